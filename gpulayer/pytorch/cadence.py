"""When ranks look at rank 0's clock: after the same batches on all, about once a second.

Clocks of ranks differ, so what depends on time is decided on rank 0 and sent to the others. That
collective waits for the device; after every batch it would cost more than many a step. So each
answer also says after how many batches the next one is due, by the pace since the last one. A limit
is then met to about one batch where batches take equally long, and at the latest `MOST_BATCHES`
after it. A single rank looks after every batch. Does not know what the time is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

PAUSE_S = 1.0  # between two looks; shorter costs a wait for the device more often
MOST_BATCHES = 100  # between two looks: what a limit is missed by if batches grow slow at once


class Peers(Protocol):
    """What is needed of a `Runtime`."""

    @property
    def world_size(self) -> int: ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor: ...


class Cadence:
    """Asks whether a time is up, so that all ranks get the same answer after the same batch.

    Ranks must ask together. `remaining` returns the seconds left; rank 0's count.
    """

    def __init__(self, peers: Peers, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._clock = clock
        self._asked_s = clock()
        self._passed = 0  # batches since ranks asked
        self._due = 1  # after so many they ask again

    def after_batch(self, remaining: Callable[[], float]) -> bool:
        """Return whether the time is up; between two looks, that it is not."""
        self._passed += 1
        if self._peers.world_size > 1 and self._passed < self._due:
            return False
        return self.now(remaining)

    def now(self, remaining: Callable[[], float]) -> bool:
        """Return whether the time is up, and plan the next look."""
        left_s = remaining()
        if self._peers.world_size == 1:
            return left_s <= 0
        now_s = self._clock()
        due = next_look(self._passed, now_s - self._asked_s, left_s)
        told = self._peers.broadcast(torch.tensor([int(left_s <= 0), due]))
        up, self._due = (int(value) for value in told.tolist())  # waits for the device
        self._asked_s, self._passed = now_s, 0
        return bool(up)


def next_look(passed: int, spent_s: float, left_s: float) -> int:
    """Return after how many batches to look again.

    Args:
        passed: batches since the last look, in which `spent_s` seconds went by.
        left_s: seconds to the limit; not positive where it is reached.
    """
    wait_s = min(PAUSE_S, left_s) if left_s > 0 else PAUSE_S
    if passed == 0:
        return 1
    if spent_s <= 0:
        return MOST_BATCHES
    return max(1, min(MOST_BATCHES, int(passed * wait_s / spent_s)))
