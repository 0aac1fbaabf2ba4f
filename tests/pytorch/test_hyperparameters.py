"""Hyperparameters: what is kept of a module's arguments, in checkpoints and in hparams.yaml.

Classes drawn at random are made with Lightning's base class and with ours. `GPULAYER_TEST_SEED`
repeats a run.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings
from argparse import Namespace
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beside_lightning import their_trainer
from hypothesis import given
from hypothesis import strategies as st
from one_weight import OneWeight, loader, trainer

from gpulayer.pytorch import Module, hyperparameters
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.hyperparameters import AttributeDict


class Net(OneWeight):
    def __init__(
        self, width: Any, depth: Any = 2, *rest: Any, rate: Any = 0.1, **more: Any
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.made_with = (width, depth, rate, more)


class Strict(OneWeight):
    def __init__(self, width: Any, act: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width, self.act = width, act


def saved(model: Module, path: Path, **options: Any) -> Path:
    made = trainer(enable_checkpointing=False)
    made.fit(model, loader(2))
    made.save_checkpoint(path, **options)
    return path


# -- in the module --------------------------------------------------------------------------------


def test_arguments_are_attributes_and_keys() -> None:
    model = Net(3, 4, 5, rate=0.5, kind="a")
    assert model.hparams == {"width": 3, "depth": 4, "rate": 0.5, "kind": "a"}
    assert model.hparams.width == model.hparams["width"] == 3
    model.hparams.width = 7
    model.hparams["new"] = [1]
    del model.hparams.kind
    assert model.hparams == {"width": 7, "depth": 4, "rate": 0.5, "new": [1]}
    assert model.hparams_initial == {"width": 3, "depth": 4, "rate": 0.5, "kind": "a"}
    model.hparams_initial.width = 9
    assert model.hparams_initial.width == 3
    with pytest.raises(AttributeError, match="no 'kind'; known: width"):
        model.hparams.kind  # noqa: B018
    model.hparams[1] = 2  # type: ignore[index]
    assert (
        copy.deepcopy(model).hparams == pickle.loads(pickle.dumps(model.hparams)) == model.hparams
    )
    assert Module().hparams == Module().hparams_initial == {}


def test_module_made_in_another_keeps_its_own_arguments() -> None:
    class Outer(OneWeight):
        def __init__(self, width: int, other: str) -> None:
            super().__init__()
            self.inner = Strict(width + 1)
            self.save_hyperparameters()

    outer = Outer(3, "x")
    assert outer.hparams == {"width": 3, "other": "x"}
    assert outer.inner.hparams == {"width": 4, "act": None}


def test_misuse_is_refused() -> None:
    def saves(*what: Any) -> None:
        class Misused(Module):
            def __init__(self, width: int = 1, depth: int = 2) -> None:
                super().__init__()
                self.save_hyperparameters(*what)

        Misused()

    for what, text in (
        (("absent",), "made without an argument 'absent'"),
        ((1, 2), "not 2 objects"),
        ((3,), "a dict or a Namespace, not a int"),
        (({1}, "width"), "a dict or a Namespace, not a set"),
    ):
        with pytest.raises(ArgumentError, match=text):
            saves(*what)
    with pytest.raises(AttributeError):
        Module().hparams = {}  # type: ignore[misc,assignment]


# -- in a checkpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_only", [True, False])
def test_module_is_made_again_with_overrides(tmp_path: Path, weights_only: bool) -> None:
    path = saved(Net(3, kind="a"), tmp_path / "a.ckpt", weights_only=weights_only)
    found = Net.load_from_checkpoint(path)
    assert found.made_with == (3, 2, 0.1, {"kind": "a"})
    assert found.weight.item() == -3.0
    found = Net.load_from_checkpoint(path, depth=9, kind="b", extra=1)
    assert found.made_with == (3, 9, 0.1, {"kind": "b", "extra": 1})
    assert found.hparams == {"width": 3, "depth": 9, "rate": 0.1, "kind": "b", "extra": 1}
    with pytest.warns(UserWarning, match=r"Strict takes no arguments \['dept'\]"):
        strict = Strict.load_from_checkpoint(path, dept=9)
    assert strict.hparams == {"width": 3, "act": None}


def test_one_argument_holds_all_of_them(tmp_path: Path) -> None:
    class Configured(OneWeight):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)
            self.width = config.width  # as of a Namespace, also when it is made again

    path = saved(Configured(Namespace(width=3, rate=0.5)), tmp_path / "a.ckpt")
    found = Configured.load_from_checkpoint(path, rate=0.25)
    assert (found.width, found.hparams) == (3, {"width": 3, "rate": 0.25})
    assert Configured.load_from_checkpoint(path, config=AttributeDict(width=5)).width == 5


def test_hooks_see_overrides_and_changes_are_kept(tmp_path: Path) -> None:
    class Hooked(Strict):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["seen"] = dict(checkpoint["hyper_parameters"])

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = (checkpoint["seen"], checkpoint["hyper_parameters"])

    model = Hooked(3)
    model.hparams.width = 4
    path = saved(model, tmp_path / "a.ckpt")
    found = Hooked.load_from_checkpoint(path, act="x")
    assert found.seen == ({"width": 4, "act": None}, {"width": 4, "act": "x"})


def test_what_is_no_plain_data_is_left_out_and_asked_for(tmp_path: Path) -> None:
    for value in (torch.relu, lambda x: x, torch.nn.ReLU(), torch.nn.ReLU, Path("a"), Namespace()):
        with pytest.warns(UserWarning, match=r"checkpoints will not hold .*\['act'\]"):
            model = Strict(3, value)
        assert model.hparams.act is value
        path = saved(model, tmp_path / "a.ckpt")
        held = torch.load(path, weights_only=True)
        assert (held["hyper_parameters"], held["hparams_left_out"]) == ({"width": 3}, ["act"])
        with pytest.raises(ArgumentError, match="could not hold the hyperparameter 'act'"):
            Strict.load_from_checkpoint(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert Strict.load_from_checkpoint(path, act=value).width == 3
        plain = Strict.load_from_checkpoint(path, act=None)
        assert (plain.width, plain.act) == (3, None)


def test_ignored_arguments_are_not_warned_of(tmp_path: Path) -> None:
    class Ignoring(OneWeight):
        def __init__(self, width: int, layer: Any) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="layer")
            self.layer = layer

    path = saved(Ignoring(3, torch.nn.Linear(1, 1)), tmp_path / "a.ckpt")
    with pytest.raises(TypeError, match="layer"):
        Ignoring.load_from_checkpoint(path)
    assert Ignoring.load_from_checkpoint(path, layer=torch.nn.Linear(1, 1)).hparams == {"width": 3}


def test_numbers_of_numpy_and_values_of_torch_are_plain(tmp_path: Path) -> None:
    values = (np.float64(0.5), [np.int32(3), AttributeDict(a=(1,))], torch.float16, torch.ones(2))
    path = saved(Net(values[0], values[1], dtype=values[2], start=values[3]), tmp_path / "a.ckpt")
    width, depth, _, more = Net.load_from_checkpoint(path).made_with
    assert (type(width), width, depth) == (float, 0.5, [3, {"a": (1,)}])
    assert more["dtype"] == torch.float16
    assert more["start"].tolist() == [1.0, 1.0]


def test_hyperparameters_that_cannot_be_copied_are_shared() -> None:
    lines = (line for line in "ab")
    with pytest.warns(UserWarning, match="act"):
        assert Strict([1], lines).hparams_initial == {"width": [1], "act": lines}


def test_other_options_of_lightning_are_refused(tmp_path: Path) -> None:
    path = saved(Strict(3), tmp_path / "a.ckpt")
    with pytest.raises(ArgumentError, match="hparams_file is not read"):
        Strict.load_from_checkpoint(path, hparams_file="hparams.yaml")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="weights_only=False"):
        Strict.load_from_checkpoint(path, weights_only=False)
    assert Strict.load_from_checkpoint(path, weights_only=True, strict=None).width == 3


# -- in the log -----------------------------------------------------------------------------------


def written(path: str | Path) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((Path(path) / "hparams.yaml").read_text(encoding="utf-8"))


def test_file_is_written_beside_the_metrics_when_a_fit_starts(tmp_path: Path) -> None:
    class Looks(Strict):
        def on_train_start(self) -> None:
            self.found = written(self.trainer.log_dir)
            self.hparams.width = 9

    model, made = Looks(3, "x"), trainer(tmp_path)
    made.fit(model, loader(2))
    assert model.found == {"width": 3, "act": "x"}
    assert made.log_dir == str(tmp_path / "gpulayer_logs" / "version_0")
    assert written(made.log_dir) == {"width": 3, "act": "x"}


def test_other_calls_write_it_as_well(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    model = Net(3)
    model.predict_step = lambda batch: None  # type: ignore[method-assign]
    made.predict(model, loader(1))
    assert made.log_dir is not None
    assert written(made.log_dir)["width"] == 3


def test_file_is_not_written_where_nothing_is(tmp_path: Path) -> None:
    class Quiet(OneWeight):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)

    for number, (model, arguments) in enumerate(
        [
            (Strict(3), {"logger": False, "enable_checkpointing": False}),
            (Strict(3), {"fast_dev_run": True}),
            (Quiet(), {"enable_checkpointing": False}),
            (OneWeight(), {"enable_checkpointing": False}),
        ]
    ):
        trainer(tmp_path / str(number), **arguments).fit(model, loader(2))
    assert list(tmp_path.rglob("*")) == []


class Colour(Enum):
    RED = 1


class Level(IntEnum):
    HIGH = 1


def test_values_that_are_no_plain_data_are_written_as_text(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "colour": Colour.RED, "level": Level.HIGH, "path": Path("a"), "dtype": torch.float16,
        "on": True, "numpy": np.float32(0.5), "pair": (1, "b"), "none": None, "small": 1e-5,
        "big": 10**30, "nested": {"no": [math.inf], 1: {}, (1, 2): "x"}, "big float": 1e300,
    }  # fmt: skip
    (tmp_path / "hparams.yaml").write_text(hyperparameters.yaml(values), encoding="utf-8")
    assert written(tmp_path) == {
        "colour": "<Colour.RED: 1>", "level": "<Level.HIGH: 1>", "path": "PosixPath('a')",
        "dtype": "torch.float16", "on": True, "numpy": 0.5, "pair": [1, "b"], "none": None,
        "small": 1e-5, "big": 10**30, "nested": {"no": [math.inf], 1: {}, "(1, 2)": "x"},
        "big float": 1e300,
    }  # fmt: skip
    assert "small: 1.0e-05\n" in hyperparameters.yaml(values)


NAMES = st.text(max_size=20) | st.sampled_from(["y", "NO", "null", "1", "~", "<<", "=", "a b"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=12
)


@given(st.dictionaries(NAMES, VALUES))
def test_yaml_reads_the_same_values(values: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    assert (yaml.safe_load(hyperparameters.yaml(values)) or {}) == values


# -- under Lightning ------------------------------------------------------------------------------

FORMS = [
    "", "", "", "'lr'", "'lr', 'x{i}'", "ignore='lr'", "ignore=['x0', 'key1', 'lr']",
    "ignore=('x{i}',)", "{{'own': x{i}}}", "Namespace(lr=lr, own=2)", "config", "{{}}", "'config'",
    "logger=False", "'lr', logger=False", "dict(x{i}=x{i}), ignore='x{i}'", "'lr', config",
    "frame=inspect.currentframe()", "'more{i}'", "3", "None",
]  # fmt: skip
SAVES = [
    "self.save_hyperparameters({})", "self.helper({})",
    "(lambda: self.save_hyperparameters({}))()",
]  # fmt: skip


def source(rng: random.Random) -> tuple[str, str, bool]:
    """Draw classes `N0`, `N1`, ... each derived from the one before.

    Returns their source, the last one's name, and whether one saves before `super().__init__()`.
    """
    pick = rng.choice
    text = "import inspect\nfrom argparse import Namespace\n"
    count = pick([1, 1, 2, 3])
    accepts_more = any_early = False
    for i in range(count):
        rest, more = pick(["", f"*rest{i}, "]), pick(["", f", **more{i}"])
        bare = "*, " if not rest and pick([True, False]) else rest
        text += f"\nclass N{i}({'Base' if i == 0 else f'N{i - 1}'}):\n"
        text += f"    def __init__(self, x{i}, config=None, {bare}lr=0.5, key{i}=(1, 2){more}):\n"
        if pick([True, False]):
            text += "        lr = lr * 2\n"
        form = pick(FORMS).format(i=i)
        save = f"        {pick(SAVES).format(form)}\n" if pick([True, True, False]) else ""
        early = i == 0 and pick([True, False])  # before super().__init__()
        up = "" if i == 0 else f"x{i} + 1, {pick(['config, ', ''])}lr=lr * 10"
        if i > 0 and accepts_more and more:
            up += f", **more{i}"
        text += save * early + f"        super().__init__({up})\n" + save * (not early)
        accepts_more = bool(more)
        any_early |= early and bool(save)
    text += "\n    def helper(self, *args, **options):\n"
    text += "        self.save_hyperparameters(*args, **options)\n"
    return text, f"N{count - 1}", any_early


def outcome(make: Any, base: Any, text: str, name: str, drawn: Any, folder: Path) -> dict[str, Any]:
    class Base(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.w * batch[0].mean()).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    scope: dict[str, Any] = {"Base": Base}
    exec(text, scope)
    positional, named, overrides = drawn
    found: dict[str, Any] = {}
    try:
        model = scope[name](*positional, **named)
        found["made"] = seen(model)
        used = make(
            accelerator="cpu", devices=1, enable_progress_bar=False, default_root_dir=folder,
            max_epochs=1, limit_train_batches=1,
        )  # fmt: skip
        used.fit(model, loader(1))
        model.hparams["changed"] = 1
        used.save_checkpoint(folder / "a.ckpt")
        held = torch.load(folder / "a.ckpt", weights_only=True)
        found["held"] = {k: held.get(k) for k in ("hyper_parameters", "hparams_name")}
        # Lightning also writes a file without a value
        yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
        files = [listed(yaml.full_load(one.read_text())) for one in folder.rglob("hparams.yaml")]
        found["files"] = [one for one in files if one]
        found["again"] = seen(scope[name].load_from_checkpoint(folder / "a.ckpt", **overrides))
    except Exception as error:
        found["error"] = error
    return found


def seen(model: Any) -> Any:
    name = getattr(model, "_hparams_name", None)
    return dict(model.hparams), dict(model.hparams_initial), name, repr(model.hparams)


def listed(value: Any) -> Any:
    """Return a value with lists for tuples, which our file has not."""
    if isinstance(value, dict):
        return {k: listed(v) for k, v in value.items()}
    return [listed(one) for one in value] if isinstance(value, list | tuple) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.configurations(80)
def test_same_hyperparameters_as_lightning(
    number: int, seed: int, lightning: Any, tmp_path: Path
) -> None:
    rng = random.Random(f"{seed}/hyperparameters/{number}")
    pick = rng.choice
    text, name, early = source(rng)
    named = pick([{}, {"lr": 3}, {"config": {"a": 1, "lr": 7}}])
    drawn = ([pick([1, 2.5])], named, pick([{}, {}, {"lr": 9}, {"x0": 4}, {"x1": 4, "own": 5}]))
    expected = outcome(
        their_trainer(tmp_path / "theirs"), lightning.LightningModule, text, name, drawn,
        tmp_path / "theirs",
    )  # fmt: skip
    found = outcome(
        lambda **given: trainer(tmp_path / "ours", enable_checkpointing=False, **given),
        Module, text, name, drawn, tmp_path / "ours",
    )  # fmt: skip
    errors = expected.pop("error", None), found.pop("error", None)
    assert (errors[0] is None) == (errors[1] is None), (text, drawn, errors)
    if early:  # Lightning forgets that they are to be logged
        expected.pop("files", None)
    for key, value in expected.items():
        assert found[key] == value, (key, text, drawn, errors)


def test_dataclass_keeps_its_fields(lightning: Any) -> None:
    found = []
    for base in (lightning.LightningModule, Module):

        @dataclass(eq=False)
        class Made(base):  # type: ignore[misc]
            width: int
            depth: int = 2

            def __post_init__(self) -> None:
                super().__init__()
                self.save_hyperparameters()

        found.append(seen(Made(3)))
    assert found[0] == found[1]
    assert found[1][0] == {"width": 3, "depth": 2}
