"""One weight, starting at 0, so that every number can be read.

loss = weight * mean(x), SGD with lr 1: the gradient of a batch is the mean of its samples.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from gpulayer.pytorch import Callback, Module, Trainer
from gpulayer.pytorch.callback import Checkpoint


def loader(samples: int = 7, batch_size: int = 1, first: int = 1) -> DataLoader[Any]:
    """Yield the numbers `first`, `first` + 1, ... as batches."""
    numbers = torch.arange(first, first + samples).float()
    return DataLoader(TensorDataset(numbers), batch_size=batch_size)


class OneWeight(Module):
    """Records the gradient of every step and the position of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.step_gradients: list[float] = []
        self.calls: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(("train", batch_idx))
        return (self.weight * batch[0].mean()).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.weight.grad is not None
        self.step_gradients.append(round(self.weight.grad.item(), 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Validated(OneWeight):
    """Logs the mean and the sum of the validation samples."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.calls.append(("val", batch_idx))
        self.log("mean", batch[0].mean())
        self.log("sum", batch[0].mean(), reduce_fx="sum")


def trainer(path: Path | None = None, **arguments: Any) -> Trainer:
    """Make a quiet trainer on the CPU; with a path it writes metrics and a checkpoint there."""
    callbacks = arguments.get("callbacks") or []
    given = [callbacks] if isinstance(callbacks, Callback) else callbacks
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "logger": path is not None,
        "enable_checkpointing": path is not None or any(isinstance(c, Checkpoint) for c in given),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "default_root_dir": path,
    }
    return Trainer(**{**defaults, **arguments})


def rows(trained: Trainer) -> list[dict[str, float]]:
    """Read metrics.csv without its empty cells."""
    assert trained.log_dir is not None
    with (Path(trained.log_dir) / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
