"""What self.log keeps: reductions, suffixes, where which name appears."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_weight import OneWeight, loader, trainer
from torch.utils.data import DataLoader

from gpulayer.pytorch import Callback, Trainer
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.metrics import reduce_named

Log = Callable[["Logging", torch.Tensor], None]


class Logging(OneWeight):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.what = log

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.what(self, batch[0])


def validated(log: Log, *loaders: Any) -> dict[str, float]:
    trained = trainer()
    trained.fit(Logging(log), loader(1), list(loaders) or loader(7, 3))
    return {name: float(value) for name, value in trained.callback_metrics.items()}


def test_mean_is_weighted_by_batch_size() -> None:
    def log(model: Logging, x: torch.Tensor) -> None:
        model.log("mean", x.mean())
        model.log("unweighted", x.mean(), batch_size=1)
        model.log("sum", x.mean(), reduce_fx="sum")
        model.log("min", x.mean(), reduce_fx="min")
        model.log("max", x.mean(), reduce_fx=torch.max)
        model.log("number", float(len(x)))

    found = validated(log)
    assert found["mean"] == 4.0
    assert found["unweighted"] == pytest.approx(4.6667, abs=1e-4)
    assert found["sum"] == 14.0
    assert (found["min"], found["max"]) == (2.0, 7.0)
    assert found["number"] == pytest.approx((9 + 9 + 1) / 7)


def test_suffixes_only_when_both_levels_are_logged() -> None:
    def log(model: Logging, x: torch.Tensor) -> None:
        model.log("both", x.mean(), on_step=True)
        model.log("steps", x.mean(), on_step=True, on_epoch=False)

    found = validated(log)
    assert found == {"both": 4.0, "both_epoch": 4.0}  # evaluation never offers step values


def test_several_loaders_are_told_apart() -> None:
    found = validated(lambda m, x: m.log("v", x.mean()), loader(2), loader(2, first=11))
    assert found == {"v/dataloader_idx_0": 1.5, "v/dataloader_idx_1": 11.5}


def test_step_value_is_a_copy() -> None:
    seen = []

    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx) + 4.0
            self.log("loss", loss)
            loss /= 2
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(float(self.trainer.callback_metrics["loss"]))

    trainer().fit(Model(), loader(1))
    assert seen == [4.0]


def test_train_metric_is_the_step_value_within_the_epoch_and_the_mean_at_its_end() -> None:
    seen = []

    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", batch[0].mean(), on_step=True, on_epoch=True, logger=False)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(float(self.trainer.callback_metrics["x"]))

        def on_train_epoch_end(self) -> None:
            seen.append(float(self.trainer.callback_metrics["x"]))

    trained = trainer()
    trained.fit(Model(), loader(3))
    assert seen == [1.0, 2.0, 3.0, 2.0]
    assert set(trained.callback_metrics) == {"x", "x_step", "x_epoch"}
    assert trained.logged_metrics == {}


@pytest.mark.parametrize(
    "value", ["text", {"a": 1}, torch.zeros(2), None], ids=["str", "dict", "vector", "none"]
)
def test_values_that_are_no_scalar_are_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"self\.log\('v'"):
        validated(lambda m, x: m.log("v", value))


def test_same_name_with_other_options_is_refused_and_with_the_same_adds_a_sample() -> None:
    def twice(model: Logging, x: torch.Tensor) -> None:
        model.log("v", 1.0, batch_size=1)
        model.log("v", 4.0, batch_size=2)

    assert validated(twice) == {"v": 3.0}

    def differently(model: Logging, x: torch.Tensor) -> None:
        model.log("v", 1.0)
        model.log("v", 1.0, prog_bar=True)

    with pytest.raises(ArgumentError, match="different options"):
        validated(differently)


@pytest.mark.parametrize("given", [{"on_step": False, "on_epoch": False}, {"on_epoch": False}])
def test_value_that_is_kept_nowhere_is_refused_as_by_lightning(
    given: dict[str, bool], lightning: Any
) -> None:
    with pytest.raises(ArgumentError, match=r"self\.log\('v'.*keeps nothing"):
        validated(lambda model, x: model.log("v", 1.0, **given))

    class Theirs(lightning.LightningModule):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", 1.0, **given)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    theirs = lightning.Trainer(accelerator="cpu", devices=1, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception, match="is not useful"):
            theirs.validate(Theirs(), loader(1))


@pytest.mark.parametrize("batch_size", [0, -1, float("nan")])
def test_impossible_batch_size_is_refused_at_the_call(batch_size: Any) -> None:
    refused = []

    def log(model: Logging, x: torch.Tensor) -> None:
        with pytest.raises(ArgumentError, match=r"self\.log\('v'.*batch_size=") as caught:
            model.log("v", 1.0, batch_size=batch_size)
        refused.append(str(caught.value))
        model.log("sum", 1.0, batch_size=batch_size, reduce_fx="sum")  # it plays no part there

    assert validated(log)["sum"] == 3.0
    assert f"batch_size={batch_size!r}" in refused[0]


def test_mean_over_batches_without_a_sample_is_nan() -> None:
    class Empty(OneWeight):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("tensor", batch.sum())
            self.log("number", 1.0)

    batches = DataLoader([torch.zeros(0)] * 2, batch_size=None)  # type: ignore[arg-type]
    (found,) = trainer().validate(Empty(), batches, verbose=False)
    assert [math.isnan(found[name]) for name in ("tensor", "number")] == [True, True]


def test_logger_none_is_the_default() -> None:
    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("kept", 1.0, logger=None)
            self.log("dropped", 1.0, logger=False)
            return super().training_step(batch, batch_idx)

    used = trainer()
    used.fit(Model(), loader(1))
    assert set(used.logged_metrics) == {"kept"}


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_end", "on_validation_end", "setup"])
def test_hooks_that_may_not_log(hook: str) -> None:
    model = Logging(lambda model, x: None)
    setattr(model, hook, lambda *_: model.log("v", 1.0))
    with pytest.raises(ArgumentError, match="not possible"):
        trainer().fit(model, loader(1), loader(1))


@pytest.mark.parametrize("hook", ["on_save_checkpoint", "on_load_checkpoint"])
@pytest.mark.parametrize("of", ["module", "callback"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoint_hooks_may_not_log(
    hook: str, of: str, weights_only: bool, tmp_path: Path
) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, used: Trainer, model: Any, *args: Any) -> None:
            try:
                used.save_checkpoint(tmp_path / "a.ckpt", weights_only)
            finally:
                model.log("after", 1.0)  # which hook runs is known again

    first, model = Saves(), Logging(lambda model, x: None)
    if hook == "on_save_checkpoint" and not (weights_only and of == "callback"):
        setattr(model if of == "module" else first, hook, lambda *_: model.log("v", 1.0))
        with pytest.raises(ArgumentError, match="not possible in on_save_checkpoint"):
            trainer(callbacks=first).fit(model, loader(1), loader(1))
        return
    used = trainer(callbacks=first)
    used.fit(model, loader(1), loader(1))
    assert float(used.callback_metrics["after"]) == 1.0
    if weights_only:
        return
    again, second = Logging(lambda model, x: None), Callback()
    setattr(again if of == "module" else second, hook, lambda *_: again.log("v", 1.0))
    with pytest.raises(ArgumentError, match="not possible"):
        trainer(callbacks=second).fit(again, loader(1), loader(1), ckpt_path=tmp_path / "a.ckpt")


def test_epoch_hooks_log_epoch_values_only() -> None:
    class Model(OneWeight):
        def on_train_epoch_end(self) -> None:
            self.log("end", 5.0)
            with pytest.raises(ArgumentError, match="epochs only"):
                self.log("step", 5.0, on_step=True)

    trained = trainer()
    trained.fit(Model(), loader(1))
    assert {k: float(v) for k, v in trained.callback_metrics.items()} == {"end": 5.0}


def test_differing_sizes_in_a_batch_warn_once_and_take_the_first() -> None:
    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, on_epoch=True)
            return (self.weight * batch["a"].mean()).sum()

    batches = [{"text": "ab", "a": torch.ones(2), "b": torch.ones(3, 2)}] * 2
    with pytest.warns(UserWarning, match="2 is taken as its size") as caught:
        trainer().fit(Model(), torch.utils.data.DataLoader(batches, batch_size=None))
    assert len(caught) == 1


class TwoRanks:
    """Answers as if a second rank had logged `other`; what `Runtime` does with two processes."""

    world_size = 2
    device = torch.device("cpu")

    def __init__(self, names: str, *other: list[float]) -> None:
        self.names = names
        self.other = [torch.tensor(values, dtype=torch.float64) for values in other]

    def gather_text(self, text: str) -> list[str]:
        return [text, self.names]

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        other = self.other.pop(0).view_as(tensor)
        return tensor + other if op == "sum" else torch.maximum(tensor, other)


def test_unequal_ranks_reduce_to_the_true_mean() -> None:
    # samples 1, 3, 5 here and 2, 4 there; Lightning's gloo path gives 3.75 for this
    peers = TwoRanks('{"m": "mean", "low": "min", "there": "sum"}', [6.0, 8.0, 2.0, 0.0], [-2.0])
    mine = {"m": ("mean", torch.tensor(9.0), 3.0), "low": ("min", torch.tensor(1.0), 0.0)}
    found = reduce_named(mine, peers)
    assert {name: float(value) for name, value in found.items()} == {
        "m": 3.0,
        "low": 1.0,
        "there": 8.0,
    }
