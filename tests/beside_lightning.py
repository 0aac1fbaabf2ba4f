"""One module under PyTorch Lightning 2.6.6 and under us, for tests of callbacks.

`both` runs it twice and returns what can be compared: calls, rows, counters, metrics, and what the
test reads from the callback. Skips where Lightning is not installed.
"""

from __future__ import annotations

import csv
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gpulayer.pytorch import Module, Trainer


def oracle() -> Any:
    """Return `pytorch_lightning`, quiet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    return found


class Clock:
    """Stands for the module `time`; goes on when told."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


class Plan:
    """What the module does: values it logs, the time its steps take, its optimizer."""

    def __init__(
        self,
        *,
        samples: int = 7,
        values: Sequence[float] = (),
        optimizer: Callable[[Any], Any] | None = None,
        clock: Clock | None = None,
        train_s: float = 0.0,
        val_s: float = 0.0,
        val_batches: int = 1,
        stop_at: int | None = None,
    ) -> None:
        self.samples = samples
        self.values = values  # the n-th validation logs the n-th as "v", the n-th epoch as "x"
        self.optimizer = optimizer
        self.clock = clock
        self.train_s = train_s
        self.val_s = val_s
        self.val_batches = val_batches  # 0: an empty loader
        self.stop_at = stop_at  # sets should_stop after so many steps


def module_on(base: Any, plan: Plan, trace: list[Any]) -> Any:
    """Make the module, on Lightning's base class or ours."""

    def pass_time(seconds: float) -> None:
        if plan.clock is not None:
            plan.clock.now += seconds

    def value(number: int) -> float:
        return plan.values[number % len(plan.values)] if plan.values else float(number)

    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))
            self.b = torch.nn.Parameter(torch.zeros(1))
            self.checks = self.epochs = 0

        def at(self, *what: Any) -> None:
            trainer = self.trainer
            seen = [(k, rounded(v)) for k, v in sorted(trainer.callback_metrics.items())]
            trace.append((*what, trainer.global_step, trainer.current_epoch, seen))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.at("training_step", batch_idx)
            pass_time(plan.train_s)
            if plan.stop_at is not None and self.trainer.global_step >= plan.stop_at:
                self.trainer.should_stop = True
            self.log("every", batch[0].mean(), on_step=True, on_epoch=False)
            return (self.w * batch[0].mean() + self.b).sum()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.at("on_before_optimizer_step", [bits(p.grad) for p in self.parameters()])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.at("on_train_batch_start")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.at("on_train_batch_end", self.trainer.should_stop)

        def on_train_epoch_start(self) -> None:
            self.at("on_train_epoch_start")

        def on_train_epoch_end(self) -> None:
            self.at("on_train_epoch_end")
            self.log("x", value(self.epochs))
            self.epochs += 1

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass_time(plan.val_s)
            self.log("v", value(self.checks))

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.checks += 1

        def on_validation_end(self) -> None:
            self.at("on_validation_end", self.trainer.should_stop)

        def on_train_start(self) -> None:
            self.at("on_train_start")

        def on_train_end(self) -> None:
            self.at("on_train_end", self.trainer.should_stop)

        def configure_optimizers(self) -> Any:
            if plan.optimizer is None:
                return torch.optim.SGD(self.parameters(), lr=0.1)
            return plan.optimizer(self)

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.arange(1, 1 + plan.samples).float()))

        def val_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(plan.val_batches)))

    return Net()


def their_trainer(
    folder: Path, *, logger: bool = True, checkpoints: bool = False
) -> Callable[..., Any]:
    """Return what makes Lightning's trainer with our defaults, writing metrics.csv to `folder`."""
    pl = oracle()

    def make(**given: Any) -> Any:
        from pytorch_lightning.loggers import CSVLogger

        found = CSVLogger(str(folder), name="", version="version_0") if logger else False
        return pl.Trainer(
            logger=found, enable_checkpointing=checkpoints, enable_model_summary=False, **given
        )

    return make


def bits(value: Any) -> Any:
    """Return a tensor's floats as text that differs if any bit does; None stays None."""
    return None if value is None else [one.hex() for one in value.detach().flatten().tolist()]


def kind(error: BaseException | None) -> str | None:
    """Return the built-in type that a user would catch; Lightning's own error is a ValueError."""
    if error is None:
        return None
    if type(error).__name__ == "MisconfigurationException":
        return "ValueError"
    return next(one.__name__ for one in type(error).__mro__ if one.__module__ == "builtins")


def rounded(value: Any) -> Any:
    """Return a number as a plain one that equals itself, also NaN."""
    value = round(float(value), 4)
    return str(value) if math.isnan(value) else value


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """Read all rows of metrics.csv below a folder, without empty cells."""
    found = []
    for file in sorted(folder.rglob("metrics.csv")):
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                found.append({k: rounded(v) for k, v in row.items() if v})
    return found


def both(
    folder: Path,
    plan: Plan,
    callback: Callable[[Any], Any],
    read: Callable[[Any], Any] = lambda callback: None,
    *,
    fits: int = 1,
    logger: bool = True,
    **arguments: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fit under Lightning and under us; returns (theirs, ours).

    Args:
        callback: makes the callback, or None, from the module that has its class.
        read: returns what is compared of the callback.
    """
    import gpulayer.pytorch as ours

    pl = oracle()

    theirs = their_trainer(folder / "theirs", logger=logger)
    start = plan.clock.now if plan.clock is not None else 0.0
    outcomes = []
    for name, make, base, home in (
        ("theirs", theirs, pl.LightningModule, pl.callbacks),
        ("ours", lambda **given: Trainer(logger=logger, **given), Module, ours),
    ):
        if plan.clock is not None:
            plan.clock.now = start
        trace: list[Any] = []
        model = module_on(base, plan, trace)
        watched = callback(home)
        found: dict[str, Any] = {"error": None, "trace": trace}
        try:
            trained = make(
                accelerator="cpu", devices=1, enable_progress_bar=False,
                default_root_dir=folder / name,
                callbacks=[] if watched is None else [watched], **arguments,
            )  # fmt: skip
            for _ in range(fits):
                trained.fit(model)
        except Exception as error:
            found["error"] = error
        found |= {"weights": [bits(one) for one in model.parameters()]}
        if found["error"] is None:
            found |= {
                "callback": read(watched),
                "rows": rows_in(folder / name),
                "counters": (trained.global_step, trained.current_epoch, trained.should_stop),
                **{
                    kind: {k: rounded(v) for k, v in getattr(trained, kind).items()}
                    for kind in ("callback_metrics", "logged_metrics")
                },
            }
        outcomes.append(found)
    return outcomes[0], outcomes[1]


def same(theirs: dict[str, Any], ours: dict[str, Any], *described: Any) -> None:
    """Compare two outcomes, the shortest explanation first."""
    kinds = [kind(outcome["error"]) for outcome in (theirs, ours)]
    assert kinds[0] == kinds[1], (described, theirs["error"], ours["error"])
    for i, (one, other) in enumerate(zip(ours["trace"], theirs["trace"], strict=False)):
        assert one == other, (i, described, ours["trace"][max(0, i - 3) : i])
    for key in set(theirs) - {"error"}:
        assert ours[key] == theirs[key], (key, described)
