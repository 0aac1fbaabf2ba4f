"""Loaders without a length that draw random numbers in this process, as do the steps between.

When a batch is loaded then decides what is drawn. Calls, loading between them and weights are
compared with Lightning 2.6.6, where it is installed, and resumed fits with unbroken ones.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_lightning import bits
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gpulayer.pytorch import Callback, Module, Trainer

# What Lightning has to say, and our word for one of the same things.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:Your `\\w+_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:there is no validation loader"),
]


QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False,
}  # fmt: skip


class Drawn(IterableDataset[Any]):
    """Batches that are drawn when they are asked for; notes when that is."""

    def __init__(self, count: int, trace: list[Any] | None = None) -> None:
        self.count = count
        self.trace = trace

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            if self.trace is not None:
                self.trace.append(("load", self.count, number))
            yield torch.randn(2, 4) + number / 7


class Plain:
    """The same, and no data set of torch's."""

    def __init__(self, count: int, trace: list[Any] | None = None) -> None:
        self.drawn = Drawn(count, trace)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.drawn)


def unsized(count: int, trace: list[Any] | None = None) -> Any:
    return DataLoader(Drawn(count, trace), batch_size=None)


def sized(count: int) -> Any:
    return DataLoader(TensorDataset(torch.ones(count, 4)), 1, shuffle=True)


def module_on(base: Any, trace: list[Any]) -> Any:
    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
            )

        def loss(self, batch: Any) -> Any:
            batch = batch[0] if isinstance(batch, list) else batch
            return torch.nn.functional.dropout(self.layers(batch), 0.5).square().mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            trace.append(("train", batch_idx))
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            trace.append(("validate", batch_idx, dataloader_idx))
            self.log("val", self.loss(batch), on_step=True)

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            trace.append(("test", batch_idx, dataloader_idx))
            self.log("test", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            trace.append(("predict", batch_idx, dataloader_idx))
            return self.loss(batch)

        def on_validation_start(self) -> None:
            trace.append(("on_validation_start", torch.rand(1).item()))

        def on_predict_start(self) -> None:
            trace.append(("on_predict_start", torch.rand(1).item()))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    return Net()


def outcome(make: Any, base: Any, use: Any, **arguments: Any) -> dict[str, Any]:
    """Return all that depends on what was drawn, and when it was."""
    trace: list[Any] = []
    model = module_on(base, trace)
    torch.manual_seed(1)
    trainer = make(**{**QUIET, **arguments})
    returned = use(trainer, model, trace)
    return {
        "trace": trace,
        "returned": returned,
        "weights": [bits(one) for one in model.parameters()],
        # Lightning adds up in another order
        "metrics": {k: round(float(v), 5) for k, v in trainer.callback_metrics.items()},
        "counters": (trainer.global_step, trainer.current_epoch),
        "random": torch.rand(1).item(),
    }


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return round(float(value), 5)


def compare(lightning: Any, use: Any, **arguments: Any) -> None:
    expected = outcome(
        lambda **given: lightning.Trainer(enable_model_summary=False, **given),
        lightning.LightningModule, use, **arguments,
    )  # fmt: skip
    found = outcome(Trainer, Module, use, **arguments)
    for key, value in expected.items():
        assert found[key] == value, key


@pytest.mark.parametrize("kind", [unsized, Plain])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"limit_train_batches": 5},
        {"limit_train_batches": 7},
        {"limit_train_batches": 1.0},
        {"limit_train_batches": 1},
        {"max_steps": 4},
        {"max_steps": 9, "limit_train_batches": 5},
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3},
        {"accumulate_grad_batches": 3, "max_steps": 4},
    ],
    ids=str,
)
def test_training_loads_when_lightning_does(
    kind: Any, arguments: dict[str, Any], lightning: Any
) -> None:
    def use(trainer: Any, model: Any, trace: list[Any]) -> None:
        trainer.fit(model, kind(7, trace))

    compare(lightning, use, **{"max_epochs": 2, **arguments})


@pytest.mark.parametrize("val", ["unsized", "sized", "both", "both turned", "two"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"limit_val_batches": 2},
        {"limit_val_batches": 1.0, "num_sanity_val_steps": -1},
        {"limit_val_batches": 2, "num_sanity_val_steps": -1},
        {"num_sanity_val_steps": 0, "limit_train_batches": 5},
        {"val_check_interval": 2, "limit_train_batches": 5},
    ],
    ids=str,
)
def test_validation_in_a_fit_loads_when_lightning_does(
    val: str, arguments: dict[str, Any], lightning: Any
) -> None:
    def use(trainer: Any, model: Any, trace: list[Any]) -> None:
        trainer.fit(model, unsized(6, trace), evaluated(val, trace))

    compare(lightning, use, **{"max_epochs": 2, **arguments})


def evaluated(kind: str, trace: list[Any]) -> Any:
    if kind in ("unsized", "sized"):
        return unsized(3, trace) if kind == "unsized" else sized(3)
    if kind == "two":
        return [unsized(3, trace), Plain(4, trace)]
    found = [unsized(3, trace), sized(4)]
    return found if kind == "both" else found[::-1]


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
@pytest.mark.parametrize("kind", ["unsized", "sized", "both", "both turned", "two"])
@pytest.mark.parametrize("limit", [None, 2, 3, 1.0], ids=str)
def test_evaluation_and_prediction_load_when_lightning_does(
    call: str, kind: str, limit: Any, lightning: Any
) -> None:
    def use(trainer: Any, model: Any, trace: list[Any]) -> Any:
        if call in ("validate", "predict"):
            model.layers[1].register_forward_hook(lambda *_: torch.rand(1) and None)
        found = getattr(trainer, call)(model, evaluated(kind, trace))
        return rounded(found)

    name = {"validate": "val"}.get(call, call)
    compare(lightning, use, **{f"limit_{name}_batches": limit})


def test_loader_that_ends_before_a_limit_ends_its_epoch_without_a_word(
    recwarn: pytest.WarningsRecorder,
) -> None:
    for window in (1, 2, 4):
        trace: list[Any] = []
        trainer = Trainer(
            max_epochs=2, limit_train_batches=100, accumulate_grad_batches=window, **QUIET
        )
        trainer.fit(module_on(Module, trace), unsized(7), unsized(2, trace))
        assert trainer.global_step == 2 * -(-7 // window)
        assert sum(one[0] == "validate" for one in trace) == 2 + 2 * 2
    assert not [str(one.message) for one in recwarn if "announced" in str(one.message)]


class Liar(Plain):
    def __len__(self) -> int:
        return self.drawn.count + 2


ENDS_EARLY: list[Any] = [
    (unsized, {"limit_train_batches": 100}),
    (unsized, {"limit_train_batches": 100, "accumulate_grad_batches": 2}),
    (unsized, {"limit_train_batches": 100, "accumulate_grad_batches": 3}),
    (Liar, {}),
]


@pytest.mark.filterwarnings("ignore:the training loader announced")
@pytest.mark.parametrize(("kind", "arguments"), ENDS_EARLY)
def test_rows_at_the_end_of_a_short_epoch_have_the_step_of_its_last_batch(
    kind: Any, arguments: dict[str, Any], tmp_path: Path
) -> None:
    def rows(name: str, loader: Any, **arguments: Any) -> Any:
        trainer = Trainer(
            max_epochs=2,
            log_every_n_steps=1,
            **{**QUIET, "logger": True, "default_root_dir": tmp_path / name, **arguments},
        )
        trainer.fit(module_on(Module, []), loader, unsized(2))
        with open(f"{trainer.log_dir}/metrics.csv", newline="") as file:
            return [(row["step"], [k for k, v in row.items() if v]) for row in csv.DictReader(file)]

    window = arguments.get("accumulate_grad_batches", 1)
    assert rows("short", kind(7), **arguments) == rows(
        "whole", Plain(7), accumulate_grad_batches=window
    )


@pytest.mark.filterwarnings("ignore:the training loader announced")
@pytest.mark.parametrize(("kind", "arguments"), ENDS_EARLY)
@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_end", "on_train_epoch_end"])
def test_short_epoch_goes_on_from_its_validation(
    kind: Any, arguments: dict[str, Any], hook: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.ckpt"

    def run(ckpt_path: Path | None) -> Any:
        def use(trainer: Any, model: Any, trace: list[Any]) -> None:
            optimizers = model.configure_optimizers
            model.configure_optimizers = lambda: {
                "optimizer": (optimizer := optimizers()),
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(
                        optimizer, patience=0, threshold=10.0
                    ),
                    "interval": "step", "monitor": "loss", "strict": False,
                },
            }  # fmt: skip
            trainer.fit(model, kind(7), unsized(2), ckpt_path=ckpt_path)
            rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
            rates.append(trainer._batches_that_stepped)

        return use

    rates: list[Any] = []
    given = {"max_epochs": 2, **arguments}
    whole = outcome(Trainer, Module, run(None), **given, callbacks=SaveAt(file, hook, 1))
    again = outcome(Trainer, Module, run(file), **given)
    assert rates[2:] == rates[:2]
    for key in ("weights", "metrics", "counters"):
        assert again[key] == whole[key], key


def test_generator_is_used_up_after_an_epoch() -> None:
    batches = (torch.ones(2, 4) for _ in range(3))
    trainer = Trainer(max_epochs=3, **QUIET)
    with pytest.raises(RuntimeError, match=r"no batch in epoch 1: .* generator .* once only") as e:
        trainer.fit(module_on(Module, []), batches)
    assert trainer.global_step == 3
    assert "a list" not in str(e.value)  # which is refused


class SaveAt(Callback):
    """Writes a checkpoint the n-th time a hook runs, after sanity checks."""

    def __init__(self, path: Path, hook: str, count: int) -> None:
        self.left = count

        def save(trainer: Trainer, module: Module, *args: Any) -> None:
            self.left -= not trainer.sanity_checking
            if self.left == 0:
                self.left = -1
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


class Keeps(Plain):
    """Saves how far it was read, and goes on from there."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.first = self.read = 0

    def __iter__(self) -> Iterator[Any]:
        self.read, self.first = self.first, 0
        while self.read < self.drawn.count:
            self.read += 1
            yield torch.randn(2, 4) + self.read / 7

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["read"]


@pytest.mark.parametrize("kind", [unsized, Plain, Keeps])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"limit_train_batches": 5},
        {"limit_train_batches": 5, "accumulate_grad_batches": 3},
        {"accumulate_grad_batches": 2, "val_check_interval": 3},
        {"max_epochs": -1, "max_steps": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("hook", "count"),
    [
        ("on_train_batch_end", 1), ("on_train_batch_end", 3), ("on_train_batch_end", 8),
        ("on_validation_end", 1), ("on_validation_start", 1), ("on_train_epoch_end", 1),
    ],
)  # fmt: skip
def test_resumed_fit_draws_what_the_unbroken_one_draws(
    tmp_path: Path, kind: Any, arguments: dict[str, Any], hook: str, count: int
) -> None:
    def use(ckpt_path: Path | None) -> Any:
        def run(trainer: Any, model: Any, trace: list[Any]) -> None:
            if ckpt_path is not None:
                torch.manual_seed(3)
            trainer.fit(model, kind(7), unsized(2), ckpt_path=ckpt_path)

        return run

    file = tmp_path / "a.ckpt"
    given = {"max_epochs": 2, **arguments}
    whole = outcome(Trainer, Module, use(None), **given, callbacks=SaveAt(file, hook, count))
    again = outcome(Trainer, Module, use(file), **given)
    assert again["trace"]
    for key in ("weights", "metrics", "counters", "random"):
        assert again[key] == whole[key], key
