"""What hooks and scripts read from `Trainer` and `Module`, beside Lightning where it has the same.

What is not here says what to do instead.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpulayer_mesh.errors import ConfigError
from one_weight import OneWeight, Validated, loader, trainer
from ranks import Ranks
from torch.utils.data import DataLoader, TensorDataset

from gpulayer.pytorch import Callback, EarlyStopping, Module, Trainer
from gpulayer.pytorch.arguments import ABSENT, ArgumentError

FLAGS = ("training", "validating", "testing", "predicting", "evaluating", "sanity_checking")
COUNTS = ("num_val_batches", "num_sanity_val_batches", "num_test_batches", "num_predict_batches")
LOADERS = ("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders")


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def quiet(make: Callable[..., Any], **arguments: Any) -> Any:
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_checkpointing": False, "max_epochs": 1,
    }  # fmt: skip
    return make(**{**defaults, **arguments})


@pytest.fixture
def theirs(lightning: Any, tmp_path: Path) -> Callable[..., Any]:
    def make(**arguments: Any) -> Any:
        return quiet(
            lightning.Trainer,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **arguments,
        )

    return make


def ours(**arguments: Any) -> Any:
    return quiet(Trainer, **arguments)


# -- nothing is forgotten ------------------------------------------------------------------------


def test_every_member_of_lightning_s_trainer_is_here_or_has_its_hint(
    theirs: Callable[..., Any],
) -> None:
    absent = public(theirs()) - public(ours())
    assert absent <= set(ABSENT["Trainer"])
    assert not set(ABSENT["Trainer"]) & public(ours())


def test_every_member_of_lightning_s_module_is_here_or_has_its_hint(lightning: Any) -> None:
    absent = public(lightning.LightningModule()) - public(Module())
    known = set(ABSENT["Module"])
    assert absent <= known
    assert known & public(Module()) == {"to_onnx", "to_tensorrt", "to_torchscript"}


# -- what is not here says so --------------------------------------------------------------------


@pytest.mark.parametrize("name", ABSENT["Trainer"])
def test_absent_member_of_trainer_says_what_to_do(name: str) -> None:
    used = trainer()
    assert not hasattr(used, name)
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute") as caught:
        getattr(used, name)
    assert ABSENT["Trainer"][name] in str(caught.value)


def test_a_trainer_is_an_ordinary_object_otherwise() -> None:
    used = trainer()
    with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'trainloader'$"):
        used.trainloader  # noqa: B018
    assert copy.copy(used).max_epochs == 1
    assert pickle.loads(pickle.dumps(used.callbacks)) == []


@pytest.mark.parametrize("name", ["to_onnx", "to_tensorrt", "to_torchscript"])
def test_exports_say_where_they_are(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'OneWeight' object has no attribute {name!r}") as e:
        getattr(OneWeight(), name)("file")
    assert ABSENT["Module"][name] in str(e.value)


def test_the_export_that_is_pointed_to_takes_a_module() -> None:
    class Net(Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = torch.ones(3)
    assert torch.equal(torch.export.export(Net(), (x,)).module()(x), x * 2)


def test_absent_member_of_module_gets_a_note_in_a_hook() -> None:
    class Model(OneWeight):
        def on_train_start(self) -> None:
            self.on_gpu  # noqa: B018

    with pytest.raises(AttributeError, match="no attribute 'on_gpu'") as caught:
        trainer().fit(Model(), loader(1))
    assert caught.value.__notes__ == [f"on_gpu of Lightning: {ABSENT['Module']['on_gpu']}"]

    class Other(OneWeight):
        def on_train_start(self) -> None:
            self.mistyped  # noqa: B018

    with pytest.raises(AttributeError, match="mistyped") as caught:
        trainer().fit(Other(), loader(1))
    assert not hasattr(caught.value, "__notes__")


# -- the same as Lightning's ---------------------------------------------------------------------


def numbers(count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(1, 1 + count).float()))


def watching(base: Any, trace: list[Any], given: dict[str, Any], fails_in: str | None) -> Any:
    def look(module: Any, where: str) -> None:
        used = module.trainer
        flags = [getattr(used, name) for name in FLAGS]
        # In a sanity check Lightning's num_test_batches is that of the check.
        names = [name for name in COUNTS if not used.sanity_checking or "test" not in name]
        counts = [list(map(float, getattr(used, name))) for name in names]
        loaders = [which(getattr(used, name)) for name in LOADERS]
        own = (used.lightning_module is module, used.model is module, used.interrupted)
        trace.append((where, flags, counts, loaders, own, module.logger, module.loggers))
        if where == fails_in:
            raise ZeroDivisionError

    def which(found: Any) -> Any:
        if isinstance(found, list | tuple):
            return type(found), [which(one) for one in found]
        return next((name for name, one in given.items() if one is found), None)

    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            look(self, "training_step")
            return (self.w * batch[0]).sum()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            look(self, "validation_step")

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            look(self, "test_step")

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            look(self, "predict_step")

        def configure_optimizers(self) -> Any:
            look(self, "configure_optimizers")
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            look(self, "train_dataloader")
            return given["train"]

        def val_dataloader(self) -> Any:
            look(self, "val_dataloader")
            return [given["val"], given["val2"]]

    def hook(name: str) -> Callable[..., None]:
        return lambda self, *args, **named: look(self, name)

    for name in (
        "setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end",
        "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_end", "on_validation_start",
        "on_validation_end", "on_validation_epoch_end", "on_validation_model_zero_grad",
        "on_test_start", "on_test_end", "on_predict_start", "on_predict_end",
    ):  # fmt: skip
        setattr(Net, name, hook(name))
    module = Net()
    module.look = look
    return module


def observed(
    make: Callable[..., Any],
    base: Any,
    callback: Any,
    fails_in: str | None = None,
    **arguments: Any,
) -> list[Any]:
    trace: list[Any] = []
    given = {
        "train": numbers(5), "val": numbers(3), "val2": numbers(2), "test": numbers(2),
        "predict": numbers(4),
    }  # fmt: skip
    module = watching(base, trace, given, fails_in)

    class Watcher(callback):  # type: ignore[misc]
        def on_exception(self, used: Any, pl_module: Any, exception: BaseException) -> None:
            trace.append(("on_exception", type(exception), used.interrupted, used.evaluating))

    used = make(callbacks=[Watcher()], **arguments)

    def after(*values: Any) -> None:
        flags = [getattr(used, name) for name in FLAGS]
        counts = [list(map(float, getattr(used, name))) for name in COUNTS]
        loaders = [getattr(used, name) is None for name in LOADERS]
        trace.append((*values, flags, counts, loaders, used.interrupted))

    after("new", used.lightning_module, used.model, used.logger, used.loggers)
    calls: list[Callable[[], Any]] = [
        lambda: used.fit(module),
        lambda: used.validate(module, given["val"], verbose=False),
        lambda: used.test(module, [given["test"]], verbose=False),
        lambda: used.predict(module, (given["predict"], given["val"])),
        lambda: used.fit(module, given["train"], given["val2"]),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls:
            try:
                call()
            except ZeroDivisionError:
                trace.append("raised")
            after("done")
    return trace


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_epochs": 2, "val_check_interval": 2},
        {"num_sanity_val_steps": 1, "limit_val_batches": 2, "check_val_every_n_epoch": 2},
        {"num_sanity_val_steps": 0, "limit_predict_batches": 3, "limit_train_batches": 0.5},
        {"num_sanity_val_steps": -1, "fails_in": "on_train_batch_end"},
        {"fails_in": "validation_step", "num_sanity_val_steps": 0},
        {"fails_in": "test_step"},
    ],
    ids=str,
)
def test_flags_counts_and_loaders_are_lightning_s(
    arguments: dict[str, Any], theirs: Callable[..., Any], lightning: Any
) -> None:
    expected = observed(theirs, lightning.LightningModule, lightning.Callback, **arguments)
    found = observed(ours, Module, Callback, **arguments)
    for mine, their in zip(found, expected, strict=True):
        assert mine == their


def test_early_stopping_callbacks_are_found() -> None:
    first, second = EarlyStopping("a"), EarlyStopping("b")
    assert trainer().early_stopping_callback is None
    used = trainer(callbacks=first)
    assert used.early_stopping_callback is first
    used.callbacks.append(second)
    assert used.early_stopping_callbacks == [first, second]


def test_trainer_prints_on_rank_0_and_has_the_scaler(capsys: pytest.CaptureFixture[str]) -> None:
    used = trainer()
    used.print("a", 1, sep="-")
    assert capsys.readouterr().out == "a-1\n"
    assert used.scaler is None


@pytest.mark.parametrize("name", ["freeze", "unfreeze"])
def test_freezing_is_lightning_s(name: str, lightning: Any) -> None:
    states = []
    for base in (lightning.LightningModule, Module):
        model = base()
        model.layers = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
        model.layers[0].weight.requires_grad = name == "unfreeze"
        model.layers[1].eval()
        assert getattr(model, name)() is model
        frozen = [one.requires_grad for one in model.parameters()]
        states.append((frozen, [part.training for part in model.modules()]))
    assert states[0] == states[1]


def gathered(base: Any, make: Callable[..., Any], data: Any) -> Any:
    found = []

    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found.append(self.all_gather(data))
            return (self.w * batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make().fit(Model(), numbers(1))
    return found[0]


def parts(value: Any) -> Any:
    """Return something that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return type(value), {key: parts(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [parts(one) for one in value]
    return value


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(6).view(2, 3),
        {"a": torch.tensor(1.5), "b": [torch.tensor([True]), (torch.zeros(0),)]},
        (1, 2.5, True, np.array([1, 2]), "text", None),
    ],
    ids=["tensor", "nested", "numbers"],
)
def test_all_gather_of_one_rank_is_lightning_s(
    data: Any, theirs: Callable[..., Any], lightning: Any
) -> None:
    expected = gathered(lightning.LightningModule, theirs, data)
    assert parts(gathered(Module, ours, data)) == parts(expected)


@pytest.mark.network
@pytest.mark.slow
def test_all_gather_stacks_what_ranks_have(tmp_path: Path) -> None:
    body = """
    class Model(Net):
        def validation_step(self, batch, batch_idx):
            data = {
                "matrix": torch.full((2, 1), float(RANK)),
                "flags": (torch.tensor([RANK == 1]), torch.tensor(RANK, dtype=torch.int16)),
                "half": torch.tensor([RANK + 0.5], dtype=torch.bfloat16),
                "number": 3 + RANK,
            }
            found = self.all_gather(data)
            tell(
                matrix=found["matrix"].tolist(), flag=found["flags"][0].tolist(),
                number=found["number"].tolist(), short=found["flags"][1].tolist(),
                half=found["half"].tolist(), kind=str(found["half"].dtype),
                gradient=found["matrix"].requires_grad,
            )

    trainer().validate(Model(), DataLoader(samples(2)), verbose=False)
    """
    ranks = Ranks(tmp_path / "two", body, 2).check()
    assert ranks.told(0) == ranks.told(1)
    assert ranks.told(0) == {
        "matrix": [[[0.0], [0.0]], [[1.0], [1.0]]], "flag": [[False], [True]], "number": [3, 4],
        "short": [0, 1], "half": [[0.5], [1.5]], "kind": "torch.bfloat16", "gradient": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "value", "hint"),
    [("group", "g", "torch.distributed.all_gather"), ("sync_grads", True, "nn.functional")],
)
def test_all_gather_refuses_what_it_cannot_do(argument: str, value: Any, hint: str) -> None:
    with pytest.raises(ArgumentError, match=argument) as caught:
        OneWeight().all_gather(torch.zeros(1), **{argument: value})
    assert hint in str(caught.value.hint)


def test_all_gather_needs_a_trainer() -> None:
    with pytest.raises(RuntimeError, match="not attached"):
        OneWeight().all_gather(torch.zeros(1))


# -- arguments -----------------------------------------------------------------------------------

REFUSED: dict[str, Iterable[Any]] = {
    "fast_dev_run": (1.5, 1.0, "yes", -1),
    "prefetch": ("yes", 2, None),
    "stop_grace_s": (-1, "a", True, float("nan"), float("inf")),
    "wait_s": (-1, "a", True),
    "limit_train_batches": (True, False),
    "limit_val_batches": (True,),
    "limit_test_batches": (True,),
    "limit_predict_batches": (True,),
    "logger": ("csv", 2, [1], 1.0),
    "enable_progress_bar": ("no", 2),
    "enable_checkpointing": ("no", 2),
    "inference_mode": ("no", None, 2),
    "use_distributed_sampler": ("no", None, 2),
    "env": (5, [5]),
    "min_epochs": (-1, 1.5, True, "a"),
    "min_steps": (-1, 1.5, True, "a"),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, one) for name, values in REFUSED.items() for one in values], ids=str
)
def test_impossible_argument_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises((ArgumentError, TypeError)) as caught:
        trainer(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [5, [5], "TOKEN=t0ken"], ids=str)
def test_secrets_are_named_and_not_shown(value: Any) -> None:
    with pytest.raises((ConfigError, TypeError), match="secrets is one") as caught:
        trainer(secrets=value)
    assert "5" not in str(caught.value)
    assert "t0ken" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"fast_dev_run": False}, {"fast_dev_run": 0}, {"fast_dev_run": None},
        {"fast_dev_run": True}, {"fast_dev_run": 3}, {"logger": None}, {"logger": []},
        {"enable_progress_bar": None}, {"enable_checkpointing": None}, {"inference_mode": 0},
        {"inference_mode": 1}, {"use_distributed_sampler": 1}, {"min_epochs": 0}, {"min_steps": 0},
        {"min_epochs": None}, {"devices": -1}, {"limit_val_batches": 2.0},
        {"num_sanity_val_steps": None}, {"num_sanity_val_steps": 1.0}, {"log_every_n_steps": None},
        {"log_every_n_steps": 5.0}, {"accumulate_grad_batches": 2.0}, {"max_epochs": 2.0},
        {"max_steps": 2.0}, {"min_epochs": 1.0}, {"min_steps": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_what_lightning_takes_is_taken(
    arguments: dict[str, Any], theirs: Callable[..., Any]
) -> None:
    if arguments != {"devices": -1}:  # it finds no CPU to count
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs(**arguments)
    trainer(**arguments)


@pytest.mark.parametrize("root", [None, ".", "~/x", "a/b", Path("a")], ids=str)
def test_directories_are_texts_as_lightning_s(root: Any, lightning: Any) -> None:
    one, other = (quiet(make, default_root_dir=root) for make in (lightning.Trainer, Trainer))
    assert (other.default_root_dir, other.log_dir) == (one.default_root_dir, one.log_dir)
    assert type(other.default_root_dir) is type(other.log_dir) is str


def test_devices_minus_1_is_auto() -> None:
    assert trainer(devices=-1).devices == trainer(devices="-1").devices == "auto"


# -- clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_trainer", "of_call"),
    [
        ({}, (0.5, None)),
        ({}, (0.5, "value")),
        ({}, (None, None)),
        ({"gradient_clip_val": 0.5}, (None, None)),
        ({"gradient_clip_val": 0.5}, (0.5, "value")),
        ({"gradient_clip_val": 0.5}, (1.0, None)),
        ({"gradient_clip_val": 0}, (1.0, None)),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, (None, None)),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, (0.5, "VALUE")),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, (0.5, "norm")),
        ({"gradient_clip_algorithm": "norm"}, (0.5, "value")),
        ({}, (0.5, "l1")),
        ({}, ("a", None)),
    ],
    ids=str,
)
def test_clip_gradients_takes_and_refuses_what_lightning_does(
    of_trainer: dict[str, Any],
    of_call: tuple[Any, Any],
    theirs: Callable[..., Any],
    lightning: Any,
) -> None:
    def result(base: Any, make: Callable[..., Any]) -> Any:
        seen: list[Any] = []

        class Model(base):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.w = torch.nn.Parameter(torch.zeros(2))

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return (self.w * torch.tensor([3.0, 4.0])).sum()

            def configure_gradient_clipping(
                self,
                optimizer: Any,
                gradient_clip_val: Any = None,
                gradient_clip_algorithm: Any = None,
            ) -> None:
                by = gradient_clip_algorithm
                seen.append((gradient_clip_val, by and str(getattr(by, "value", by))))
                self.clip_gradients(optimizer, *of_call)
                assert self.w.grad is not None
                seen.append(self.w.grad.tolist())

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                make(**of_trainer).fit(Model(), numbers(1))
            except Exception as error:
                refusals = (ValueError, TypeError, lightning_error)
                seen.append("refused" if isinstance(error, refusals) else error)
        return seen

    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    lightning_error = MisconfigurationException
    assert result(Module, ours) == result(lightning.LightningModule, theirs)


def test_differing_clip_values_are_both_named() -> None:
    class Model(Validated):
        def configure_gradient_clipping(self, optimizer: Any, *given: Any) -> None:
            self.clip_gradients(optimizer, 1.0)

    with pytest.raises(ArgumentError, match=r"gradient_clip_val=1\.0.*gradient_clip_val=0\.5"):
        trainer(gradient_clip_val=0.5).fit(Model(), loader(1), loader(1))
