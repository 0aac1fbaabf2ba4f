"""A resumed fit is the unbroken one to the bit: weights, counters, rows, metrics, from any place."""

from __future__ import annotations

import csv
import functools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from gpulayer.pytorch import Callback, Module, Trainer

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLES = 14
BATCH = 2  # 7 batches an epoch


class Noisy(Dataset[Any]):
    """Numbers, each with noise from all random generators of the process that reads them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return torch.full((4,), float(index)) / SAMPLES + 0.01 * noise.float()


class Quiet(Noisy):
    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index)) / SAMPLES


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.full((2, 4), i / 7) for i in range(7)])


class Broken(Exception):
    pass


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
        )  # fmt: skip
        self.seen: list[float] = []
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layers(batch) - batch.mean(1, keepdim=True)).square().mean()
        self.hidden += loss.detach()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", batch.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("hidden", self.hidden, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layers(batch).mean() + random.random())
        self.log("val_step", batch.mean(), on_step=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        step = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return [optimizer], [
            {"scheduler": plateau, "monitor": "loss_epoch", "interval": "epoch"},
            {"scheduler": step, "interval": "step"},
        ]


class SaveAt(Callback):
    """Writes a checkpoint the n-th time a hook runs."""

    def __init__(self, path: Path, hook: str, count: int) -> None:
        self.path = path
        self.left = count

        def save(trainer: Trainer, module: Module, *args: Any) -> None:
            if trainer.sanity_checking:
                return
            self.left -= 1
            if self.left == 0:
                trainer.save_checkpoint(path)
                raise Broken

        setattr(self, hook, save)


def loaders(kind: str) -> tuple[Any, Any]:
    val = DataLoader(Noisy(), 3)
    if kind == "quiet":
        return DataLoader(Quiet(), BATCH, shuffle=True), val
    if kind == "shuffled":
        return DataLoader(Noisy(), BATCH, shuffle=True), val
    if kind == "workers":
        return DataLoader(Noisy(), BATCH, shuffle=True, num_workers=2), val
    if kind == "persistent":
        train = DataLoader(Quiet(), BATCH, shuffle=True, num_workers=1, persistent_workers=True)
        return train, DataLoader(Quiet(), 3, num_workers=1, persistent_workers=True)
    if kind == "generator":
        generator = torch.Generator().manual_seed(3)
        return DataLoader(Noisy(), BATCH, shuffle=True, generator=generator), val
    if kind == "weighted":
        sampler = WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], SAMPLES)
        return DataLoader(Noisy(), BATCH, sampler=sampler), val
    if kind == "stream":
        return DataLoader(Stream(), batch_size=None), val
    assert kind == "iterable"
    return {torch.full((2, 4), i / 7): None for i in range(7)}.keys(), val


def run(
    folder: Path, kind: str, ckpt_path: Path | None = None, save: Any = None, **arguments: Any
) -> tuple[Trainer, Net, list[dict[str, str]]]:
    model = Net()
    seed = 1 if ckpt_path is None else 2  # a resumed process has other random states
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    defaults: dict[str, Any] = {
        "max_epochs": 3, "log_every_n_steps": 1, "accumulate_grad_batches": 3,
        "val_check_interval": 2, "enable_checkpointing": False,
    }  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=1, enable_progress_bar=False, default_root_dir=folder,
        callbacks=save, **{**defaults, **arguments},
    )  # fmt: skip
    train, val = loaders(kind)
    trainer.fit(model, train, val, ckpt_path=ckpt_path)
    rows: list[dict[str, str]] = []
    for file in folder.rglob("metrics.csv"):
        with file.open(newline="") as text:
            rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(text)]
    return trainer, model, rows


def state(trainer: Trainer, model: Net) -> dict[str, Any]:
    return {
        "weights": {k: v.tolist() for k, v in model.state_dict().items()},
        "hidden": model.hidden.tolist(),
        "optimizer": repr(trainer.optimizers[0].state_dict()),
        "schedulers": repr([c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]),
        "counters": {
            name: getattr(trainer, f"_{name}")
            for name in ("global_step", "epochs_processed", "epochs_completed", "total_batches",
                         "batches_that_stepped")
        },
        "callback": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "logged": {k: float(v) for k, v in trainer.logged_metrics.items()},
        "random": (torch.rand(1).item(), random.random(), np.random.rand()),
    }  # fmt: skip


PLACES = [
    ("on_train_batch_end", 1),  # in mid-window
    ("on_train_batch_end", 3),  # at the end of a window
    ("on_train_batch_end", 4),  # validation follows, in mid-window
    ("on_train_batch_end", 6),  # validation follows
    ("on_train_batch_end", 7),  # the epoch's last
    ("on_train_batch_end", 10),  # in the second epoch
    ("on_validation_end", 2),  # in mid-window
    ("on_validation_end", 3),
    ("on_train_epoch_end", 1),
    ("on_train_epoch_end", 2),
    ("on_train_epoch_start", 2),
]


@pytest.mark.parametrize(("hook", "count"), PLACES)
def test_resumed_fit_equals_the_unbroken_one(tmp_path: Path, hook: str, count: int) -> None:
    check(tmp_path, "shuffled", hook, count)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_batch_in_hand_is_trained_again_from_its_start(tmp_path: Path, count: int) -> None:
    check(tmp_path, "quiet", "on_train_batch_start", count)


@pytest.mark.parametrize("kind", ["generator", "weighted", "stream", "iterable"])
@pytest.mark.parametrize(("hook", "count"), PLACES[3::3])
def test_every_kind_of_loader_goes_on_in_its_order(
    tmp_path: Path, kind: str, hook: str, count: int
) -> None:
    check(tmp_path, kind, hook, count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["workers", "persistent"])
@pytest.mark.parametrize(
    ("hook", "count"),
    [("on_train_batch_end", 4), ("on_train_batch_end", 11), ("on_train_epoch_end", 1)],
)
def test_loader_workers_go_on_with_their_random_numbers(
    tmp_path: Path, kind: str, hook: str, count: int
) -> None:
    check(tmp_path, kind, hook, count)


@functools.cache
def unbroken(kind: str, arguments: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
    with tempfile.TemporaryDirectory() as folder:
        trainer, model, rows = run(Path(folder), kind, **dict(arguments))
    return state(trainer, model), rows


def check(tmp_path: Path, kind: str, hook: str, count: int, **arguments: Any) -> None:
    expected, rows = unbroken(kind, tuple(arguments.items()))
    file = tmp_path / "saved.ckpt"
    with pytest.raises(Broken):
        run(tmp_path / "broken", kind, save=SaveAt(file, hook, count), **arguments)
    resumed, other, later = run(tmp_path / "resumed", kind, ckpt_path=file, **arguments)
    found = state(resumed, other)
    for key, value in expected.items():
        assert found[key] == value, key
    assert later == rows[len(rows) - len(later) :]
