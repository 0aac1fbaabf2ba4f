"""StepMonitor: gradient norms before clipping and throughput, in the rows of logging steps."""

from __future__ import annotations

import csv
from itertools import count
from pathlib import Path
from typing import Any

import torch
from one_weight import OneWeight, loader, trainer

from gpulayer.pytorch import StepMonitor


def rows(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_rows_of_logging_steps_hold_norm_and_rates(tmp_path: Path) -> None:
    ticks = count(0, 4)  # a clock that goes on by 4 s whenever somebody looks
    monitor = StepMonitor()
    monitor._clock = lambda: float(next(ticks))
    used = trainer(
        max_epochs=1, callbacks=[monitor], log_every_n_steps=2, gradient_clip_val=0.5,
        logger=True, default_root_dir=tmp_path,
    )  # fmt: skip
    used.fit(OneWeight(), loader(7))
    found = rows(tmp_path)
    # The one-weight model's gradient is the batch's value: 2, 4, 6 at steps 1, 3, 5.
    assert [float(row["grad_norm"]) for row in found] == [2.0, 4.0, 6.0]
    assert [row["step"] for row in found] == ["1", "3", "5"]
    assert [float(row["batches_per_s"]) for row in found] == [0.5, 0.5, 0.5]
    assert [float(row["samples_per_s"]) for row in found] == [0.5, 0.5, 0.5]
    assert used.callback_metrics["grad_norm"].item() == 6.0


def test_only_what_is_asked_for_is_logged(tmp_path: Path) -> None:
    def logged(**arguments: Any) -> set[str]:
        folder = tmp_path / str(arguments)
        trainer(
            max_epochs=1, callbacks=[StepMonitor(**arguments)], log_every_n_steps=1, logger=True,
            default_root_dir=folder,
        ).fit(OneWeight(), loader(2))  # fmt: skip
        return set(rows(folder)[0]) - {"step", "epoch"}

    assert logged(throughput=False) == {"grad_norm"}
    assert logged(grad_norm=False) == {"batches_per_s", "samples_per_s"}


def test_norm_spans_all_parameters() -> None:
    from gpulayer.pytorch.step_monitor import total_norm

    parts = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD([{"params": parts[:1]}, {"params": parts[1:]}], lr=1.0)
    assert total_norm(optimizer).item() == 0.0
    parts[0].grad, parts[1].grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])
    assert total_norm(optimizer).item() == 7.0
