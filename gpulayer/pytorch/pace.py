"""What several machines are worth: how long the first steps of a fit wait for gradients.

DDP times its first ten iterations by itself; a look at its figures costs no collective and no wait
for the device. Rank 0 says one line within the first 20 steps if machines wait for gradients for
more than a tenth of a step, and nothing otherwise. Where gradients are not DDP's (`fsdp`), nothing
is known. This module does not know what links there are: the plan named the slowest.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

GOOD = 0.9  # of the step without waiting: not worth a word
STEPS = 20
SAMPLES = 5  # iterations of DDP; the median of as many is steady enough for a word
SKIPPED = 2  # the first ones build buckets and connections
_NS = 1e-9


class Pace:
    """The first steps of one fit, on rank 0.

    Args:
        machines: of the job.
        window: batches to a step.
        gradient_bytes: that a step sends.
    """

    def __init__(self, machines: int, window: int, gradient_bytes: int) -> None:
        self._machines = machines
        self._window = window
        self._gradient_bytes = gradient_bytes
        self._begun: list[float] = []  # of batches, in seconds
        self._waited_s: dict[int, float] = {}  # by DDP's iteration
        self.over = False

    def batch(self, now_s: float, figures: Mapping[str, Any]) -> str | None:
        """Take that a batch begins, and DDP's figures; return what is worth saying, once."""
        self._begun.append(now_s)
        iteration = figures.get("iteration", 0)
        if iteration > SKIPPED and "backward_comm_time" in figures:
            hidden = figures.get("backward_compute_comm_overlap_time", 0)
            self._waited_s[iteration] = (figures["backward_comm_time"] - hidden) * _NS
        self.over = len(self._waited_s) >= SAMPLES or len(self._begun) > STEPS * self._window
        if not self.over or len(self._waited_s) < SAMPLES:
            return None
        # Validations and checkpoints fall between some batches, not between most.
        times = self._begun[SKIPPED * self._window :]
        step_s = self._window * median(after - before for before, after in pairwise(times))
        return verdict(
            step_s, median(self._waited_s.values()), self._machines, self._gradient_bytes
        )


def verdict(step_s: float, waited_s: float, machines: int, gradient_bytes: int) -> str | None:
    """Say what several machines are worth beside one, None where that is nearly all of them.

    Args:
        step_s: of a step as it is.
        waited_s: of it, for gradients after the backward pass had ended.
    """
    useful = 1 - min(max(waited_s / step_s, 0.0), 1.0) if step_s > 0 else 1.0
    if useful >= GOOD:
        return None
    worth = machines * useful
    levers = ["a larger accumulate_grad_batches", "larger batches", 'target="zone:NAME"']
    if worth < 1:
        levers.insert(0, "num_nodes=1, which is faster")
    elif machines > 2:
        levers.append("fewer num_nodes")
    return (
        f"{machines} machines train {worth:.1f}x as fast as one: of a step's {_seconds(step_s)}, "
        f"{_seconds(waited_s)} are spent waiting for {gradient_bytes / 1e6:.1f} MB of gradients; "
        f"what helps: {', '.join(levers)}"
    )


def gradient_bytes(module: nn.Module) -> int:
    """Return what each step of a replicated module sends, as far as its parameters exist."""
    return sum(
        one.numel() * one.element_size()
        for one in module.parameters()
        if one.requires_grad and not is_lazy(one)
    )


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 0.9995 else f"{1000 * value:.0f} ms"
