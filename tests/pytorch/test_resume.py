"""A resumed fit equals the unbroken one to the bit, at any place: weights, rows, metrics."""

from __future__ import annotations

import csv
import functools
import logging
import random
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from gpulayer.pytorch import Callback, Module, Trainer, seeding
from gpulayer.pytorch.model_checkpoint import ModelCheckpoint

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
    ("on_validation_start", 2),  # it is run again
    ("on_validation_batch_end", 3),
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


@pytest.mark.parametrize("kind", ["quiet", "shuffled", "stream", "iterable"])
@pytest.mark.parametrize(("hook", "count"), PLACES[2::3])
def test_batches_loaded_ahead_are_loaded_again(
    tmp_path: Path, kind: str, hook: str, count: int
) -> None:
    check(tmp_path, kind, hook, count, prefetch=True)
    assert unbroken(kind, (("prefetch", True),)) == unbroken(kind, ())


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


# -- as Lightning does it ------------------------------------------------------------------------

CASES: list[Any] = [
    # first run, what is saved, which file, second run
    ({"max_epochs": 2}, {}, 0, {"max_epochs": 3}),
    ({"max_epochs": 2}, {}, 1, {"max_epochs": 3}),
    ({"max_epochs": 2}, {}, 1, {"max_epochs": 2}),
    ({"max_steps": 5}, {}, 0, {"max_steps": 9}),
    ({"max_steps": 5}, {}, 0, {"max_epochs": 2}),
    ({"max_epochs": 2}, {"every_n_train_steps": 3}, 0, {"max_epochs": 2}),
    ({"max_epochs": 2}, {"every_n_train_steps": 3}, 2, {"max_steps": 12}),
    ({"val_check_interval": 7}, {}, 0, {"val_check_interval": 7, "max_epochs": 2}),
    ({"val_check_interval": 3}, {}, 0, {"val_check_interval": 3, "max_epochs": 2}),
    ({"val_check_interval": 3}, {}, 1, {"val_check_interval": 3, "max_epochs": 2}),
    ({"max_epochs": 2}, {"every_n_epochs": 2}, 0, {"max_epochs": 1}),
]


def traced(base: Any) -> Any:
    class Traced(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))
            self.trace: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.at("training_step", batch_idx)
            return (self.w * batch[0]).sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.at("validation_step", batch_idx, self.trainer.sanity_checking)

        def at(self, *what: Any) -> None:
            self.trace.append((*what, self.trainer.global_step, self.trainer.current_epoch))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    for name in ("on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"):
        setattr(Traced, name, lambda self, name=name: self.at(name))
    return Traced()


@pytest.mark.parametrize("number", range(len(CASES)))
def test_same_calls_as_lightning_after_resuming(number: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    first, checkpoint, which, second = CASES[number]

    def outcome(base: Any, make: Any, callback: Any, folder: Path, **more: Any) -> Any:
        def numbers(count: int) -> Any:
            return DataLoader(TensorDataset(torch.arange(1, 1 + count).float()), 1)

        def fit(name: str, ckpt_path: Any, **arguments: Any) -> Any:
            model = traced(base)
            saves = callback(dirpath=folder / name, save_top_k=-1, **checkpoint)
            used = make(
                accelerator="cpu", devices=1, enable_progress_bar=False, logger=False,
                default_root_dir=folder, callbacks=[saves],
                **{"max_epochs": None if "max_steps" in arguments else 1, **more, **arguments},
            )  # fmt: skip
            used.fit(model, numbers(7), numbers(2), ckpt_path=ckpt_path)
            files = sorted((folder / name).glob("*.ckpt"), key=lambda f: int(f.stem.split("=")[2]))
            return model.trace, (used.global_step, used.current_epoch), files

        file = fit("first", None, **first)[2][which]
        try:
            trace, counters, files = fit("second", file, **second)
        except Exception:
            return "error"
        return trace, counters, [path.name for path in files]

    theirs = outcome(
        lightning.LightningModule, lightning.Trainer, lightning.callbacks.ModelCheckpoint,
        tmp_path / "theirs", enable_model_summary=False,
    )  # fmt: skip
    saves = functools.partial(ModelCheckpoint, save_final=False)  # Lightning has no such file
    ours = outcome(Module, Trainer, saves, tmp_path / "ours")
    assert ours == theirs


def test_run_cut_by_max_steps_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    limits = {"max_epochs": None, "val_check_interval": 100, "check_val_every_n_epoch": None}
    expected, rows = unbroken("shuffled", tuple({**limits, "max_steps": 4}.items()))
    file = tmp_path / "saved.ckpt"
    with pytest.raises(Broken):
        run(
            tmp_path / "broken", "shuffled", save=SaveAt(file, "on_train_epoch_end", 1),
            **limits, max_steps=2,
        )  # fmt: skip
    resumed, other, later = run(
        tmp_path / "resumed", "shuffled", ckpt_path=file, **limits, max_steps=4
    )
    found = state(resumed, other)
    assert found == expected
    assert later == rows[len(rows) - len(later) :]


# -- several ranks --------------------------------------------------------------------------------

OVER_RANKS = """
from gpulayer.pytorch import Callback

class Model(Net):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
        )

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("own", loss, on_step=True, on_epoch=True)
        self.log("all", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch) + torch.rand(()), sync_dist=True)

class SaveAt(Callback):
    def __init__(self, name, hook, count):
        def save(used, module, *args):
            self.count -= 1
            if self.count == 0:
                used.save_checkpoint(name)
        self.count = count
        setattr(self, hook, save)

def run(folder, ckpt_path=None, callbacks=None, **arguments):
    seed_everything(1)
    if ckpt_path is not None:
        seed_everything(2)  # shares and workers are seeded as they were
    model = Model()
    used = trainer(default_root_dir=folder, max_epochs=2, accumulate_grad_batches=3,
                   val_check_interval=4, enable_checkpointing=False, callbacks=callbacks,
                   **arguments)
    train = DataLoader(samples(28), 4 // WORLD, shuffle=True)
    used.fit(model, train, DataLoader(samples(6, 1), 2), ckpt_path=ckpt_path)
    return {
        "weights": {k: v.tolist() for k, v in model.state_dict().items()},
        "counters": [used.global_step, used.current_epoch, used._total_batches],
        "metrics": {k: float(v) for k, v in used.callback_metrics.items()},
        "random": torch.rand(1).item(),
    }
"""


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "gpulayer_logs" / "version_0" / "metrics.csv").open(newline="") as text:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(text)]


@pytest.mark.slow
@pytest.mark.network
def test_two_ranks_go_on_as_if_unbroken(tmp_path: Path) -> None:
    places = [
        ("on_train_batch_end", 1),
        ("on_train_batch_end", 4),
        ("on_train_batch_end", 9),
        ("on_validation_end", 1),
        ("on_train_epoch_end", 1),
    ]
    body = f"""
    places = {places!r}
    saves = [SaveAt(f"{{i}}.ckpt", hook, count) for i, (hook, count) in enumerate(places)]
    whole = run("whole", callbacks=saves)
    tell(whole=whole, again=[run(str(i), f"{{i}}.ckpt") for i in range(len(places))])
    """
    ranks = Ranks(tmp_path / "ranks", textwrap.dedent(OVER_RANKS) + textwrap.dedent(body), 2)
    ranks.check()
    whole = rows_of(ranks.path / "whole")
    for rank in (0, 1):
        told = ranks.told(rank)
        for place, again in zip(places, told["again"], strict=True):
            assert again == told["whole"], (rank, place)
    for number, place in enumerate(places):
        later = rows_of(ranks.path / str(number))
        assert later == whole[len(whole) - len(later) :], place


@pytest.mark.slow
def test_loader_workers_keep_the_seed_they_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "_seed_workers", True)
    monkeypatch.setattr(seeding, "_seed", 1)
    check(tmp_path, "workers", "on_train_batch_end", 4, accumulate_grad_batches=2)
    broken = torch.load(tmp_path / "saved.ckpt")
    assert broken["ranks"][0]["seeds"] == [1, 1]
    monkeypatch.setattr(seeding, "_seed", 2)
    expected, _ = unbroken("workers", (("accumulate_grad_batches", 2),))
    found = run(
        tmp_path / "again", "workers", ckpt_path=tmp_path / "saved.ckpt", accumulate_grad_batches=2
    )
    assert state(*found[:2]) == expected


@pytest.mark.slow
@pytest.mark.network
def test_other_number_of_ranks_goes_on_at_the_same_share_of_the_epoch(tmp_path: Path) -> None:
    two = Ranks(
        tmp_path / "two",
        OVER_RANKS + 'run("whole", callbacks=SaveAt("a.ckpt", "on_train_batch_end", 4))\ntell()\n',
        2,
    ).check()
    body = f"""
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    seen = []
    class Told(Callback):
        def on_train_batch_start(self, used, module, batch, batch_idx):
            seen.append([used.current_epoch, batch_idx, used.global_step])
    run("one", {str(two.path / "a.ckpt")!r}, callbacks=Told())
tell(seen=seen, warned=[str(one.message) for one in caught])
"""
    one = Ranks(tmp_path / "one", OVER_RANKS + body, 1).check()
    told = one.told()
    assert told["seen"][0] == [0, 3, 1]  # 4 of 7 batches were trained; windows are of 3
    assert any("written by 2 ranks and 1 go on" in text for text in told["warned"])


BUCKETS = """
import functools
import gpulayer.pytorch.runtime as runtime

class Wide(Model):
    # Used in another order than registered, so that DDP lays gradients out anew.
    def __init__(self):
        super().__init__()
        sizes = [5, 33, 2, 17, 9]
        self.parts = torch.nn.ModuleList(torch.nn.Linear(4, size) for size in sizes)
        self.last = torch.nn.Parameter(torch.tensor(0.3))
        self.parts[0].weight.register_hook(self.look)
        self.parts[1].weight.register_post_accumulate_grad_hook(lambda one: self.look(one.grad))

    def look(self, gradient):
        assert gradient.any()  # hooks see gradients of batches only

    def loss(self, batch):
        found = self.layers(batch[0])
        for index in (2, 0, 4, 3, 1):
            found = found + self.parts[index](batch[0]).tanh().mean(1, keepdim=True) * self.last
        return torch.nn.functional.mse_loss(found, batch[1])

Model = Wide

def buckets_of(bytes_each):
    wrapper = torch.nn.parallel.DistributedDataParallel
    runtime.DistributedDataParallel = functools.partial(
        wrapper, bucket_cap_mb=bytes_each / 2**20
    )
"""


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("world", [2, 3])
def test_resumed_ranks_sum_gradients_in_the_same_order(tmp_path: Path, world: int) -> None:
    places = [
        ("on_train_batch_end", 1),  # before gradients were ever reduced
        ("on_train_batch_start", 3),  # the batch in hand is the first that reduces
        ("on_train_batch_end", 3),  # before the buckets are laid out anew
        ("on_train_batch_end", 4),
        ("on_validation_end", 1),
        ("on_train_epoch_end", 1),
    ]
    body = f"""
    places = {places!r}
    wrong = []
    for size, strategy in ((64, "ddp"), (300, "ddp"), (2**20, "ddp"),
                           (300, "ddp_find_unused_parameters_true")):
        buckets_of(size)
        saves = [SaveAt(f"{{i}}.ckpt", hook, count) for i, (hook, count) in enumerate(places)]
        whole = run("whole", callbacks=saves, strategy=strategy)
        for i, place in enumerate(places):
            again = SaveAt("again.ckpt", "on_train_batch_end", 1)
            found = [run(str(i), f"{{i}}.ckpt", callbacks=again, strategy=strategy)]
            if i in (1, 3):  # at once again
                found.append(run(str(i), "again.ckpt", strategy=strategy))
            wrong += [[size, strategy, place] for one in found if one != whole]
    tell(wrong=wrong)
    """
    head = textwrap.dedent(OVER_RANKS) + textwrap.dedent(BUCKETS)
    head = head.replace("4 // WORLD", "2").replace("samples(28)", f"samples({14 * world})")
    ranks = Ranks(tmp_path, head + textwrap.dedent(body), world).check()
    assert [ranks.told(rank)["wrong"] for rank in range(world)] == [[]] * world
