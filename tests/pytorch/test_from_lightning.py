"""The page for people who come from Lightning: its two scripts, and the table of arguments."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from one_weight import OneWeight, trainer

import gpulayer.pytorch as ours
from gpulayer.pytorch import Trainer
from gpulayer.pytorch.arguments import ABSENT, REFUSED, ArgumentError

PAGE = (Path(__file__).parents[2] / "docs" / "pytorch" / "from-lightning.md").read_text()
SCRIPTS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def section(of: str) -> str:
    """Return what the page has below "... that do not exist here"."""
    return PAGE.partition(f"## {of} that do not exist here")[2].partition("\n## ")[0]


def printed(folder: Path, name: str) -> str:
    (folder / name).write_text(SCRIPTS[name])
    done = subprocess.run(
        [sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_both_scripts_print_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")
    ours = printed(tmp_path, "gpulayer_script.py")
    assert re.fullmatch(r"16 steps, val_loss \d\.\d{6}", ours)
    assert printed(tmp_path, "lightning_script.py") == ours


@pytest.mark.parametrize("call", REFUSED)
def test_tables_name_every_argument_that_is_refused(call: str) -> None:
    table = section("Arguments").partition(f"| argument of `{call}` |")[2].partition("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", table, re.M)) == REFUSED[call]


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("member of `Trainer`", "Trainer"),
        ("member of `Module`", "Module"),
    ],
)
def test_tables_name_every_member_that_is_absent(head: str, kind: str) -> None:
    table = section("Members").partition(f"| {head} |")[2].partition("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", table, re.MULTILINE)) == ABSENT[kind]


CLASSES = ("Trainer", "Module", "Callback", "EarlyStopping", "ModelCheckpoint", "Timer",
           "LearningRateMonitor")  # fmt: skip
KINDS = inspect.Parameter
# Their functions leave out arguments that no hook of theirs reads, or only say what to do instead.
LONGER = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
          "on_train_batch_end", "on_train_epoch_end")  # fmt: skip
EXPORTS = ("to_onnx", "to_tensorrt", "to_torchscript")


def theirs_and_ours(lightning: Any, name: str) -> tuple[Any, Any]:
    theirs = {"Module": "LightningModule"}.get(name, name)
    return getattr(lightning, theirs, getattr(lightning.callbacks, theirs, None)), getattr(
        ours, name
    )


def parameters(function: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters
    return {k: v for k, v in found.items() if k not in ("self", "cls")}


def functions(lightning: Any, name: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return what both have: how errors call it, their parameters and ours."""
    them, us = theirs_and_ours(lightning, name)
    found = [(name, parameters(them.__init__), parameters(us.__init__))]
    own = set(dir(them)) - set(dir(torch.nn.Module)) - set(EXPORTS)
    for method in sorted(own):
        one, other = getattr(them, method), getattr(us, method, None)
        if not method.startswith("_") and callable(one) and callable(other):
            called = f"self.{method}" if name == "Module" else method
            found.append((called, parameters(one), parameters(other)))
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_of_lightning_is_taken_or_refused(name: str, lightning: Any) -> None:
    for called, theirs, mine in functions(lightning, name):
        named = {k for k, v in theirs.items() if v.kind not in (KINDS.VAR_POSITIONAL,
                                                                KINDS.VAR_KEYWORD)}  # fmt: skip
        table = REFUSED.get("self.log" if called == "self.log_dict" else called, {})
        assert named - set(mine) == named & set(table), called
        assert not set(mine) & set(table), called


@pytest.mark.parametrize("name", CLASSES)
def test_arguments_by_position_mean_what_lightning_s_do(name: str, lightning: Any) -> None:
    for called, theirs, mine in functions(lightning, name):
        if called in LONGER and name in ("Timer", "LearningRateMonitor"):
            continue
        one, other = ([k for k, v in found.items() if v.kind is KINDS.POSITIONAL_OR_KEYWORD]
                      for found in (theirs, mine))  # fmt: skip
        assert one[: len(other)] == other, called


def test_seeding_takes_lightning_s_arguments(lightning: Any) -> None:
    assert list(parameters(lightning.seed_everything)) == list(parameters(ours.seed_everything))


@pytest.mark.parametrize(
    ("call", "name"), [(call, one) for call, table in REFUSED.items() for one in table]
)
def test_refused_argument_says_what_to_do(call: str, name: str) -> None:
    model, used = OneWeight(), trainer()
    calls: dict[str, Any] = {
        "Trainer": Trainer,
        "ModelCheckpoint": ours.ModelCheckpoint,
        "launch": ours.launch,
        "self.log": functools.partial(model.log, "v", 1.0),
        "save_checkpoint": functools.partial(used.save_checkpoint, "file"),
    }
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'") as caught:
        (calls[call] if call in calls else functools.partial(getattr(used, call), model))(
            **{name: None}
        )
    assert REFUSED[call][name] in str(caught.value)
    if call == "self.log":
        with pytest.raises(TypeError, match=name):
            model.log_dict({"v": 1.0}, **{name: None})


@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
def test_data_module_in_place_of_loaders_is_named(call: str, lightning: Any) -> None:
    class Data(lightning.LightningDataModule):  # type: ignore[misc]
        pass

    with pytest.raises(ArgumentError, match=f"{call} takes loaders, not a Data") as caught:
        getattr(trainer(), call)(OneWeight(), Data())
    assert f"{'val' if call == 'validate' else call.replace('fit', 'train')}_dataloader()" in str(
        caught.value.hint
    )


IMPOSSIBLE: dict[str, dict[str, list[Any]]] = {
    "Trainer": {
        "accelerator": ["x"], "strategy": ["x"], "devices": [0, -2, "x", 1.5],
        "num_nodes": [0, "a"],
        "precision": ["x", 17, 8], "max_epochs": [-2], "max_steps": [-2, None],
        "max_time": ["1", 5, "00:00:01"], "limit_train_batches": [1.5, -1, "a"],
        "limit_val_batches": [-0.1, 1.1], "limit_test_batches": [-1],
        "limit_predict_batches": [1.5],
        "val_check_interval": [1.5, -1, "a"], "check_val_every_n_epoch": ["a", 1.5],
        "fast_dev_run": [-1, "a"], "gradient_clip_val": ["a", [1]],
        "gradient_clip_algorithm": ["l1", 3], "benchmark": ["a"], "callbacks": ["a"],
    },
    "EarlyStopping": {"mode": ["x"]},
    "ModelCheckpoint": {
        "save_top_k": [-2, 5], "mode": ["x"], "every_n_epochs": [-1], "every_n_train_steps": [-1],
    },
    "Timer": {"duration": ["1", 5], "interval": ["x"]},
    "LearningRateMonitor": {"logging_interval": ["x"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "argument"), [(name, one) for name, table in IMPOSSIBLE.items() for one in table]
)
def test_what_lightning_refuses_is_refused(name: str, argument: str, lightning: Any) -> None:
    others = {
        "Trainer": {"accelerator": "cpu", "devices": 1},
        "EarlyStopping": {"monitor": "v"},
    }.get(name, {})
    theirs = lightning.Trainer if name == "Trainer" else getattr(lightning.callbacks, name)
    for value in IMPOSSIBLE[name][argument]:
        given = {**others, argument: value}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for make, errors in (
                (theirs, Exception),
                (getattr(ours, name), (ValueError, TypeError)),
            ):
                with pytest.raises(errors):
                    make(**given)
