"""How long to doubt a member, and how far to trust oneself: the formulas of SWIM and Lifeguard.

A suspicion starts with the longest wait and shortens as independent members confirm it.
`Awareness` is the local health score: a node that misses answers it should have got suspects
itself first and gives the others more time. Sources: SWIM (Das et al. 2002), Lifeguard
(arXiv 1707.00788) and memberlist's defaults. Nothing here knows members, messages or a clock.
"""

from __future__ import annotations

from math import ceil, log, log2, log10

from gpulayer_mesh.core.rumour import Dead, Suspect
from gpulayer_mesh.core.types import NodeId

CONFIRMATIONS = 2  # accusers beyond the first that shorten a suspicion to its minimum


def expected_confirmations(n: int) -> int:
    """Return k for `n` live members; 0 where subject and accuser leave too few to confirm."""
    return CONFIRMATIONS if n - 2 >= CONFIRMATIONS else 0


def suspicion_wait_s(confirmations: int, k: int, lower_s: float, upper_s: float) -> float:
    """Return the wait after `confirmations` of `k` (Lifeguard, section IV.B)."""
    if k < 1:
        return lower_s
    share = log(confirmations + 1) / log(k + 1)
    return max(lower_s, upper_s - share * (upper_s - lower_s))


def suspicion_bounds_s(
    n: int, min_s: float, max_mult: float, health: float = 0.0
) -> tuple[float, float]:
    """Return the shortest and longest wait for `n` live members.

    Args:
        health: our own health score as a share 0..1; it moves the shortest wait to the longest.
    """
    shortest = min_s * max(1.0, log10(max(1, n)))
    longest = shortest * max_mult
    return shortest + health * (longest - shortest), longest


def retransmit_limit(mult: int, n: int) -> int:
    """Return how often one node sends one rumour: `mult` x ceil(log10(n + 1)), at least twice
    `mult`. memberlist has `mult` below 10 members, and with n senders of m copies each member
    misses a rumour with probability e^-m: 2 % for m = 4, 0.03 % for 8."""
    return mult * max(2, ceil(log10(n + 1)))


def push_pull_scale(n: int) -> int:
    """Return the factor on the push-pull interval: +1 at each doubling above 32 members."""
    return 1 if n <= 32 else ceil(log2(n) - 5) + 1


class Suspicion:
    """One pending doubt: who accused, and until when the subject may refute."""

    __slots__ = ("_k", "_lower_s", "_upper_s", "accusations", "started")

    def __init__(
        self, first: Suspect | Dead, *, now: float, k: int, lower_s: float, upper_s: float
    ) -> None:
        self.started = now
        self.accusations: dict[NodeId, Suspect | Dead] = {first.by: first}
        self._k = k
        self._lower_s = lower_s
        self._upper_s = upper_s

    @property
    def deadline(self) -> float:
        return self.started + suspicion_wait_s(
            len(self.accusations) - 1, self._k, self._lower_s, self._upper_s
        )

    def confirm(self, accusation: Suspect | Dead) -> bool:
        """Count a further accuser; return whether that was news worth spreading."""
        if accusation.by in self.accusations or len(self.accusations) > self._k:
            return False
        self.accusations[accusation.by] = accusation
        return True

    def restart(self, now: float) -> None:
        """Begin anew with the first accusation only."""
        first = next(iter(self.accusations.items()))
        self.started = now
        self.accusations = dict([first])


class Awareness:
    """Local health: 0 is healthy, `limit` the worst. Timeouts grow with score + 1."""

    __slots__ = ("limit", "score")

    def __init__(self, limit: int) -> None:
        self.score = 0
        self.limit = limit

    def apply(self, delta: int) -> None:
        self.score = min(self.limit, max(0, self.score + delta))

    def scale_s(self, wait_s: float) -> float:
        return wait_s * (self.score + 1)
