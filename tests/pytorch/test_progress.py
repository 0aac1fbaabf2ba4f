"""The progress line on a terminal and in a file."""

from __future__ import annotations

import io

import pytest
import torch

from gpulayer.pytorch import progress
from gpulayer.pytorch.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    line = Progress(stream)
    line.epoch_start()
    for step in range(1, 13):
        clock[0] += 0.25
        if line.due():
            loss = torch.tensor(1.0 / step)
            line.step(0, step, 12, loss, {"acc": torch.tensor(0.5)})
    line.epoch_end(0, 12, {"val_loss": torch.tensor(0.25)})
    return stream.getvalue()


def test_terminal_gets_one_live_line_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Terminal(), monkeypatch)
    assert text.count("\n") == 1
    first, *_, last_step, end = text.strip().split("\r")
    assert first == "epoch 0  step 1/12  loss 1  4.0 it/s  acc 0.5"
    assert last_step.startswith("epoch 0  step 11/12  loss 0.09091")
    assert end.rstrip() == "epoch 0  12 steps  3.0 s  4.0 it/s  val_loss 0.25"
    assert text.count("\r") == 7  # every half second, and the end


def test_file_gets_few_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), monkeypatch).splitlines() == [
        "epoch 0  step 1/12  loss 1  4.0 it/s  acc 0.5",
        "epoch 0  12 steps  3.0 s  4.0 it/s  val_loss 0.25",
    ]
