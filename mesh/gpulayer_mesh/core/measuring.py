"""How fast bytes come from a peer, and when to have some sent only to find out.

`Meter` looks at the arrival of bytes that travel anyway, or of a probe's. `ProbeSchedule` says whom
to probe: one at a time, a peer twice within minutes and then each twenty. Whether anybody runs a
job is the caller's to know: while one does, nobody asks.

This module does not know what travels, nor what becomes of a figure (`links`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from gpulayer_mesh.core.types import NodeId, Rng

GAP_S = 5.0  # no byte for so long: another transfer begins
# Of a transfer's figure. A busy event loop reads late, and then at once what the kernel held; over
# this much and this long that hardly counts.
METERED_BYTES = 1024 * 1024
METERED_S = 0.25
PROBE_BYTES = 4 * 1024 * 1024  # 34 ms at 1 Gbit/s; the kernel holds far less at the start
PROBE_S = 0.5  # of a slow link's time; then what has come counts, if it is
PROBE_LEAST_BYTES = 128 * 1024  # ten times what leaves before the first acknowledgement
PROBE_LIMIT_S = 5.0  # below 25 kB/s no figure is found
AGAIN_S = 1200.0  # between two probes of a peer
# From the first to the second: in a mesh that was just started all probe, and share their wires.
SECOND_S = 120.0
ANSWER_S = 60.0  # between two answers to one peer: nobody can keep a link busy by asking
PAUSE_S = (2.0, 6.0)  # between two probes by one node; random, or all would meet at one
REFUSED_S = 30.0  # until a peer is asked again that was busy


class Meter:
    """The pace of one peer's bytes, however many requests they answer.

    Time counts from the first piece on, so it holds no wait for the sender to begin. A pause of the
    sender's makes a figure too low, never too high.
    """

    __slots__ = ("_bytes", "_last", "_start")

    def __init__(self) -> None:
        self._bytes = 0
        self._start = self._last = -inf

    def add(self, now: float, size_bytes: int) -> None:
        if now - self._last > GAP_S:
            self._start, self._bytes = now, 0
        else:
            self._bytes += size_bytes
        self._last = now

    def take(self, least_bytes: int = METERED_BYTES, least_s: float = METERED_S) -> int | None:
        """Return bytes per second and begin anew; None while there is too little to tell."""
        took_s = self._last - self._start
        if self._bytes < least_bytes or took_s <= least_s:
            return None
        rate = max(1, round(self._bytes / took_s))
        self._start, self._bytes = self._last, 0
        return rate


class ProbeSchedule:
    """When this node probes whom, and whose probes it answers."""

    def __init__(self, rng: Rng, now: float) -> None:
        self._rng = rng
        self._next = now + rng.uniform(*PAUSE_S)
        self._due: dict[NodeId, float] = {}  # when we may probe; who is not in here goes first
        self._probed: set[NodeId] = set()
        self._answered: dict[NodeId, float] = {}
        self._busy_until = -inf  # with a probe, ours or a peer's

    def choose(self, now: float, peers: Sequence[NodeId]) -> NodeId | None:
        """Return whom to probe now, None most of the time.

        Args:
            peers: who is worth measuring, alive and idle; empty while we run a job.
        """
        if now < self._next or now < self._busy_until:
            return None
        first = min((self._due.get(peer, -inf) for peer in peers), default=inf)
        if first > now:
            return None
        self._next = now + self._rng.uniform(*PAUSE_S)
        self._busy_until = now + PROBE_LIMIT_S
        return self._rng.choice([peer for peer in peers if self._due.get(peer, -inf) == first])

    def measured(self, now: float, peer: NodeId) -> None:
        """A probe was made, or a transfer told as much."""
        again_s = AGAIN_S if peer in self._probed else SECOND_S
        self._due[peer] = now + again_s + self._rng.uniform(*PAUSE_S)
        self._probed.add(peer)

    def refused(self, now: float, peer: NodeId) -> None:
        """The peer had no time for a probe, or did not answer."""
        # Two that ask each other at the same moment refuse each other: not again, then.
        self._due[peer] = now + REFUSED_S * self._rng.uniform(1.0, 1.5)

    def admit(self, now: float, peer: NodeId) -> bool:
        """Return whether to answer this peer's probe, and count it if so."""
        if now < self._busy_until or now - self._answered.get(peer, -inf) < ANSWER_S:
            return False
        self._busy_until = now + PROBE_LIMIT_S
        self._answered[peer] = now
        return True

    def ended(self) -> None:
        """The probe that was chosen or admitted is over."""
        self._busy_until = -inf

    def keep(self, members: Collection[NodeId]) -> None:
        """Forget who is not among them."""
        self._due = {peer: at for peer, at in self._due.items() if peer in members}
        self._probed &= set(members)
        self._answered = {peer: at for peer, at in self._answered.items() if peer in members}
