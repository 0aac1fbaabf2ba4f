"""The progress line on a terminal and in a file."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from torch.utils.data import DataLoader

from gpulayer.pytorch import Module, Trainer, progress
from gpulayer.pytorch.progress import Progress, Status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def shown(stream: io.StringIO, clock: Clock) -> str:
    line = Progress(stream)
    line.fit_start()
    line.epoch_start(0)
    for step in range(1, 13):
        clock.now += 0.25
        if line.due():
            loss, values = torch.tensor(1.0 / step), {"acc": torch.tensor(0.5)}
            line.step(Status(0, step, 12, loss, values, left=12 - step))
    line.epoch_end(0, 12, {"val_loss": torch.tensor(0.25)})
    return stream.getvalue()


def test_terminal_gets_one_live_line_that_is_replaced(clock: Clock) -> None:
    text = shown(Terminal(), clock)
    assert text.count("\n") == 1
    first, *_, last_step, end = text.strip().split("\r")
    assert first == "epoch 0  step 1/12  loss 1  4.0 it/s  ETA 0:00:03  acc 0.5"
    assert last_step.startswith("epoch 0  step 11/12  loss 0.09091  4.0 it/s  ETA 0:00:00")
    assert end.rstrip() == "epoch 0  12 steps  3.0 s  4.0 it/s  val_loss 0.25"
    assert text.count("\r") == 7  # every half second, and the end


def test_file_gets_few_plain_lines(clock: Clock) -> None:
    assert shown(io.StringIO(), clock).splitlines() == [
        "epoch 0  step 1/12  loss 1  4.0 it/s  ETA 0:00:03  acc 0.5",
        "epoch 0  12 steps  3.0 s  4.0 it/s  val_loss 0.25",
    ]


def test_file_of_a_long_training_gets_fewer_lines(clock: Clock) -> None:
    stream = io.StringIO()
    line = Progress(stream)
    line.fit_start()
    line.epoch_start(0)
    for step in range(1, 181):
        clock.now += 1.0
        if line.due():
            line.step(Status(0, step, 180, None, {}))
    steps = [int(text.split("step ")[1].split("/")[0]) for text in stream.getvalue().splitlines()]
    assert steps == [*range(1, 62, 5), 91, 121, 151]


def test_time_left_counts_validation_and_the_rate_does_not(clock: Clock) -> None:
    stream = io.StringIO()
    line = Progress(stream)
    line.fit_start()
    line.epoch_start(0)
    clock.now += 10.0
    line.step(Status(0, 10, 20, None, {}, left=10))
    clock.now += 40.0
    line.validated(40.0)
    clock.now += 10.0
    line.step(Status(0, 20, 20, None, {}, left=20))
    assert stream.getvalue().splitlines() == [
        "epoch 0  step 10/20  1.0 it/s  ETA 0:00:10",
        "epoch 0  step 20/20  1.0 it/s  ETA 0:01:00",
    ]


@pytest.mark.parametrize(
    ("left", "left_s", "found"),
    [
        (90.0, float("inf"), "ETA 0:01:30"),
        (90.0, 30.0, "ETA 0:00:30"),
        (float("inf"), 4000.0, "ETA 1:06:40"),
        (float("inf"), float("inf"), "it/s"),
    ],
)
def test_what_ends_first_counts(clock: Clock, left: float, left_s: float, found: str) -> None:
    stream = io.StringIO()
    line = Progress(stream)
    line.epoch_start(0)
    clock.now += 10.0
    line.step(Status(0, 10, float("inf"), None, {}, left, left_s))
    assert stream.getvalue().rstrip().endswith(found)


def test_resumed_epoch_counts_what_it_trains_itself(clock: Clock) -> None:
    stream = io.StringIO()
    line = Progress(stream)
    line.fit_start()
    line.epoch_start(50)
    clock.now += 10.0
    line.step(Status(3, 60, 100, None, {}, left=40))
    assert stream.getvalue() == "epoch 3  step 60/100  1.0 it/s  ETA 0:00:40\n"


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"max_epochs": 3}, 13),
        ({"max_epochs": -1, "max_steps": 4}, 6),
        ({"max_epochs": 2, "max_steps": 100}, 8),
        ({"max_epochs": -1, "max_time": "00:01:00:00", "limit_train_batches": 3}, float("inf")),
    ],
)
def test_batches_left_follow_from_the_limits(limits: dict[str, object], left: float) -> None:
    found: list[float] = []

    class Asks(Net):
        def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
            found.append(self.trainer._batches_left(batch_idx + 1))
            if len(found) == 2:
                self.trainer.should_stop = True

    trainer = Trainer(
        accelerator="cpu", accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, **limits,
    )  # fmt: skip
    trainer.fit(Asks(), DataLoader(torch.ones(5, 1)))
    assert found[1] == left


@pytest.mark.network
def test_slow_rank_is_named_in_the_line(tmp_path: Path) -> None:
    ranks = Ranks(
        tmp_path / "two",
        """
        import time

        class Slow(Net):
            def training_step(self, batch, batch_idx):
                time.sleep(0.09 if RANK == 1 else 0.03)
                return self.loss(batch)

        from gpulayer.pytorch import progress
        progress.PLAIN_S = 0.3
        trainer(enable_progress_bar=True, max_steps=40, max_epochs=-1).fit(
            Slow(), DataLoader(samples(64), 4)
        )
        """,
        world=2,
    ).check()
    lines = [line for line in ranks.output[0].splitlines() if "slowest" in line]
    assert lines, ranks.output[0]
    assert all("slowest rank 1 " in line and "ETA" in line for line in lines)
    assert "slowest" not in ranks.output[1]
