"""`prefetch=True` against loading in step: numbers, errors, what is read, and that threads end."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from gpulayer.pytorch import Callback, Module, Trainer, data, prefetch
from gpulayer.pytorch.prefetch import AHEAD, Prefetching

ROWS = 26
BATCH = 2  # 13 batches an epoch
NAME = "gpulayer-prefetch"


class Rows(Dataset[Any]):
    """Numbers; notes which were read, and by which thread."""

    def __init__(self, draws: str = "", fails_at: int = -1) -> None:
        self.read: list[int] = []
        self.threads: list[str] = []
        self.draws = draws
        self.fails_at = fails_at

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        if len(self.read) == self.fails_at:
            self.corrupt()
        self.read.append(index)
        self.threads.append(threading.current_thread().name)
        value = torch.full((3,), index / ROWS)
        if self.draws == "torch":
            value += torch.rand(3)
        elif self.draws == "numpy":
            value += np.random.rand()
        elif self.draws == "random":
            value += random.random()
        return value

    def corrupt(self) -> None:
        raise OSError(f"row {len(self.read)} is corrupt")


class Stream(IterableDataset[Any]):
    def __init__(self, length: int | None = None) -> None:
        if length is not None:
            self.__class__ = type("Sized", (Stream,), {"__len__": lambda self: length})

    def __iter__(self) -> Iterator[Any]:
        return (torch.full((2, 3), i / 7) for i in range(7))


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch[0] if isinstance(batch, list) else batch
        self.seen.append(batch.tolist())
        loss = self.layers(batch).square().mean() + random.random() + np.random.rand()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(
    loader: Any, model: Module | None = None, ckpt_path: Path | None = None, **arguments: Any
) -> Any:
    """Train and return everything that came of it."""
    model = model or Net()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    defaults: dict[str, Any] = {"max_epochs": 3, "prefetch": True}
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, **{**defaults, **arguments},
    )  # fmt: skip
    try:
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    finally:
        assert not running()
    return (
        getattr(model, "seen", None),
        {name: value.tolist() for name, value in model.state_dict().items()},
        repr(trainer.optimizers[0].state_dict()),
        trainer.global_step,
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        (torch.rand(1).item(), random.random(), np.random.rand()),
    )


def running() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == NAME]


def loader_of(kind: str) -> Any:
    rows = Rows()
    if kind == "tensors":
        return DataLoader(
            TensorDataset(torch.arange(ROWS * 3.0).view(ROWS, 3)), BATCH, shuffle=True
        )
    if kind == "shuffled":
        return DataLoader(rows, BATCH, shuffle=True)
    if kind == "drop last":
        return DataLoader(rows, 4, shuffle=True, drop_last=True)
    if kind == "generator":
        generator = torch.Generator().manual_seed(3)
        sampler = RandomSampler(rows, replacement=True, num_samples=90, generator=generator)
        return DataLoader(rows, BATCH, sampler=sampler, generator=generator)
    if kind == "weighted":
        return DataLoader(rows, BATCH, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS))
    if kind == "stream":
        return DataLoader(Stream(), batch_size=None)
    if kind == "sized stream":
        return DataLoader(Stream(7), batch_size=None)
    if kind == "one batch":
        return DataLoader(rows, ROWS, shuffle=True)
    if kind == "workers":
        return DataLoader(Rows("torch"), BATCH, shuffle=True, num_workers=1)
    assert kind == "iterable"
    return {torch.full((2, 3), i / 7): None for i in range(7)}.keys()


KINDS = ["tensors", "shuffled", "drop last", "generator", "weighted", "stream", "sized stream",
         "one batch", "iterable"]  # fmt: skip
LIMITS: list[dict[str, Any]] = [
    {},
    {"max_epochs": -1, "max_steps": 5},
    {"limit_train_batches": 3},
    {"limit_train_batches": 1},
    {"accumulate_grad_batches": 3, "max_epochs": -1, "max_steps": 3},
    {"accumulate_grad_batches": 4},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_fit_is_the_one_in_step(kind: str, limits: dict[str, Any]) -> None:
    ahead, in_step = loader_of(kind), loader_of(kind)
    assert fit(ahead, **limits) == fit(in_step, prefetch=False, **limits)
    if isinstance(rows := getattr(ahead, "dataset", None), Rows):
        assert rows.read == in_step.dataset.read
        # The first two batches of each epoch come from the main thread.
        many = limits.get("limit_train_batches", 13) > 2 and kind != "one batch"
        assert (NAME in rows.threads) == many
        assert rows.threads[0] == "MainThread"
    if getattr(ahead, "generator", None) is not None:
        assert torch.equal(ahead.generator.get_state(), in_step.generator.get_state())


@pytest.mark.slow
def test_fit_with_workers_is_the_one_in_step() -> None:
    assert fit(loader_of("workers")) == fit(loader_of("workers"), prefetch=False)


@pytest.mark.parametrize("draws", ["torch", "numpy", "random"])
def test_loading_that_draws_random_numbers_is_in_step_and_said_once(draws: str) -> None:
    rows = Rows(draws)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(DataLoader(rows, BATCH, shuffle=True))
    expected = fit(DataLoader(Rows(draws), BATCH, shuffle=True), prefetch=False)
    assert found == expected
    assert set(rows.threads) == {"MainThread"}
    said = [str(one.message) for one in caught]
    assert len(said) == 1
    assert "prefetch=True has no effect" in said[0]
    assert "num_workers" in said[0]


class Late(Rows):
    """Begins to draw in the second epoch."""

    def __getitem__(self, index: int) -> Any:
        self.draws = "torch" if len(self.read) >= ROWS else ""
        return super().__getitem__(index)


class Chunks(Sampler[int]):
    """Draws the next six indices when they are needed."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        for _ in range(4):
            yield from torch.randint(ROWS, (6,)).tolist()


class OwnBatches(BatchSampler):
    pass


def test_loading_that_draws_from_a_later_epoch_on_is_in_step_from_there() -> None:
    rows = Late()
    with pytest.warns(UserWarning, match="prefetch=True has no effect from here on: loading draws"):
        found = fit(DataLoader(rows, BATCH, shuffle=True))
    assert found == fit(DataLoader(Late(), BATCH, shuffle=True), prefetch=False)
    assert NAME in rows.threads[:ROWS]
    assert set(rows.threads[ROWS:]) == {"MainThread"}


@pytest.mark.parametrize(
    "kind", ["sampler", "batch sampler", "in batches", "no batches", "default"]
)
def test_sampler_that_is_not_torchs_is_read_in_step(kind: str) -> None:
    def loader() -> Any:
        rows = Rows()
        if kind == "sampler":
            return DataLoader(rows, BATCH, sampler=Chunks())
        if kind == "batch sampler":
            return DataLoader(rows, batch_sampler=OwnBatches(RandomSampler(rows), BATCH, False))
        if kind == "in batches":
            return DataLoader(rows, batch_sampler=BatchSampler(Chunks(), BATCH, False))
        if kind == "no batches":
            return DataLoader(rows, batch_size=None, sampler=Chunks())
        sampler = RandomSampler(
            rows, replacement=True, num_samples=90, generator=torch.default_generator
        )
        return DataLoader(rows, BATCH, sampler=sampler)

    ahead = loader()
    with pytest.warns(UserWarning, match="prefetch=True has no effect: .*sampler"):
        found = fit(ahead)
    assert found == fit(loader(), prefetch=False)
    assert set(ahead.dataset.threads) == {"MainThread"}


def test_samplers_of_ours_are_read_ahead() -> None:
    rows = Rows()
    loader = data.shard(
        DataLoader(rows, BATCH, sampler=Chunks()), 0, 1, shuffle=True, pad=True, seed=1
    )
    other = data.shard(
        DataLoader(Rows(), BATCH, sampler=Chunks()), 0, 1, shuffle=True, pad=True, seed=1
    )
    assert fit(loader) == fit(other, prefetch=False)
    assert NAME in rows.threads


def test_loader_with_a_position_of_its_own_is_read_in_step() -> None:
    class Stateful(DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {}

    rows = Rows()
    with pytest.warns(UserWarning, match="saves its position itself"):
        fit(Stateful(rows, BATCH))
    assert set(rows.threads) == {"MainThread"}


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3, 4, 9, ROWS, ROWS + 1, ROWS + 7])
def test_error_of_the_loader_comes_at_its_batch(fails_at: int) -> None:
    def outcome(ahead: bool) -> Any:
        model = Net()
        with pytest.raises(OSError, match="corrupt") as raised:
            fit(DataLoader(Rows(fails_at=fails_at), BATCH), model, prefetch=ahead)
        frames = [frame.name for frame in traceback.extract_tb(raised.tb)]
        return str(raised.value), model.seen, frames[-2:]

    found = outcome(True)
    assert found == outcome(False)
    assert found[2] == ["__getitem__", "corrupt"]
    assert len(found[1]) == fails_at // BATCH


class Leaves(Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5:
            if self.how == "skip":
                return -1
            if self.how == "error":
                raise KeyError("of the user")
            if self.how == "interrupt":
                raise KeyboardInterrupt
            trainer.should_stop = True
        return None


@pytest.mark.parametrize("how", ["skip", "error", "interrupt", "stop"])
def test_thread_ends_with_an_epoch_that_is_left(how: str) -> None:
    def outcome(ahead: bool) -> Any:
        model, rows = Net(), Rows()
        loader = DataLoader(rows, BATCH, shuffle=True)
        try:
            fit(loader, model, prefetch=ahead, callbacks=Leaves(how), max_epochs=2)
        except (KeyError, KeyboardInterrupt) as error:
            assert not running()  # the traceback still holds the frames of the loop
            return type(error), model.seen, len(rows.read)
        return None, model.seen, len(rows.read)

    kind, seen, read = outcome(True)
    expected_kind, expected_seen, expected_read = outcome(False)
    assert (kind, seen) == (expected_kind, expected_seen)
    assert expected_read <= read <= expected_read + 2 * AHEAD * BATCH


def test_thread_is_two_batches_ahead_and_no_more() -> None:
    rows = Rows()
    ahead: list[int] = []
    reached = threading.Event()

    class Waits(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            wanted = min(batch_idx + 1 + AHEAD, ROWS // BATCH) * BATCH
            deadline = 2000
            while batch_idx > 1 and len(rows.read) < wanted and deadline:
                reached.wait(0.01)
                deadline -= 1
            ahead.append(len(rows.read) // BATCH - batch_idx - 1)
            return super().training_step(batch, batch_idx)

    fit(DataLoader(rows, BATCH), Waits(), max_epochs=1)
    assert ahead[0] == ahead[1] == 0
    assert ahead[2:] == [AHEAD] * 9 + [1, 0]


def test_loader_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "JOIN_S", 0.05)
    hanging, go_on = threading.Event(), threading.Event()

    def batches() -> Iterator[Any]:
        for number in itertools.count():
            if number == 4:
                hanging.set()
                go_on.wait(60)
            yield number

    over = Prefetching([], torch.device("cpu"), copies=True).over(batches(), float("inf"))
    assert list(itertools.islice(over, 3)) == [0, 1, 2]
    assert hanging.wait(60)
    (thread,) = (one for one in threading.enumerate() if one.name == NAME)
    with pytest.warns(UserWarning, match="loading one batch for more than 0 s"):
        over.close()
    assert thread.daemon
    go_on.set()
    thread.join(60)
    assert not running()


def test_hooks_of_the_transfer_run_in_the_main_thread() -> None:
    threads = []

    class Hooked(Net):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            threads.append(threading.current_thread().name)
            return batch * 2

    expected = fit(DataLoader(Rows(), BATCH), Hooked(), prefetch=False)
    assert fit(DataLoader(Rows(), BATCH), Hooked()) == expected
    assert set(threads) == {"MainThread"}


@pytest.mark.filterwarnings("ignore:the training loader yielded None")
def test_batches_that_are_none_do_not_end_a_fit_early() -> None:
    class Some(Stream):
        def __iter__(self) -> Iterator[Any]:
            return (None if i % 2 else torch.full((2, 3), i / 9) for i in range(9))

    limits = {"max_steps": 5, "max_epochs": -1}
    assert fit(Some(), **limits) == fit(Some(), prefetch=False, **limits)


def test_modes_of_the_main_thread_hold_in_the_other() -> None:
    def batches() -> Iterator[Any]:
        for _ in range(5):
            made = torch.ones(2)
            yield made.is_inference(), torch.is_grad_enabled(), made.device.type

    def modes() -> list[Any]:
        return list(prefetch._Thread(batches(), 5, None))

    assert modes() == [(False, True, "cpu")] * 5
    with torch.no_grad():
        assert modes() == [(False, False, "cpu")] * 5
    with torch.inference_mode():
        assert modes() == [(True, False, "cpu")] * 5
    with torch.device("meta"):
        assert modes() == [(False, True, "meta")] * 5


@pytest.mark.parametrize("copies", [True, False])
def test_batches_for_cuda_are_pinned_and_copied_on_another_stream(
    copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With streams that only take notes; "meta" stands for the device."""
    device = torch.device("meta")
    calls: list[Any] = []

    class FakeStream:
        def __init__(self, name: Any) -> None:
            self.name = name

        def record_event(self) -> str:
            calls.append("copied")
            return "event"

        def wait_event(self, event: str) -> None:
            calls.append((self.name, "waits for", event))

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        calls.append(("on", stream.name))
        yield

    training = FakeStream("training")
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: training)
    pinned = lambda tensor: calls.append("pinned") or tensor  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, stream: calls.append(("used on", stream.name))
    )
    arrive = prefetch._Staging(device, copies)({"x": torch.ones(2), "n": 3})
    before = len(calls)
    batch = arrive()
    assert batch["n"] == 3
    assert batch["x"].device.type == ("meta" if copies else "cpu")
    if copies:
        assert calls[:before] == ["pinned", ("on", device), "copied"]
        assert calls[before:] == [("training", "waits for", "event"), ("used on", "training")]
    else:
        assert calls == ["pinned"]


def test_resume_counts_batches_that_were_trained(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 17:  # the fourth of the second epoch; six are loaded
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    whole = fit(DataLoader(Rows(), BATCH, shuffle=True), callbacks=Saves())
    rows = Rows()
    again = fit(DataLoader(rows, BATCH, shuffle=True), ckpt_path=tmp_path / "a.ckpt")
    assert again == (whole[0][17:], *whole[1:])
    assert len(rows.read) == (3 * 13 - 17) * BATCH


@pytest.mark.slow
@pytest.mark.network
def test_two_ranks_train_what_they_train_in_step(tmp_path: Path) -> None:
    body = """
    def run(**arguments):
        seed_everything(1)
        model = Net()
        used = trainer(max_epochs=2, enable_checkpointing=False, **arguments)
        used.fit(model, DataLoader(samples(28), 2, shuffle=True))
        return [p.tolist() for p in model.parameters()], used.global_step, torch.rand(1).item()

    tell(found=[run(prefetch=True), run()])
    """
    ranks = Ranks(tmp_path / "ranks", body, 2).check()
    for rank in (0, 1):
        ahead, in_step = ranks.told(rank)["found"]
        assert ahead == in_step
