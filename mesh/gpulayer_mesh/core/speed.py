"""What can be said of a job's speed before it starts: how long gradients take on their way.

All ranks' gradients go around a ring of machines in pieces, there and back, at the pace of the
slowest link on it. What a step computes meanwhile is not known here, so no ratio is promised: only
how long a step has to be on one machine for several to be faster.
"""

from __future__ import annotations

from dataclasses import dataclass

NOTABLE_S = 0.05  # less on the way is not worth a line


@dataclass(frozen=True, slots=True)
class SlowLink:
    """The slowest measured link between machines that stand next to each other in the ring."""

    one: str  # names
    other: str
    bytes_s: int
    rtt_us: int = 0


def ring_s(gradient_bytes: int, machines: int, link: SlowLink) -> float:
    """Return the seconds of one ring all-reduce of these bytes.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009: 2(n-1) rounds, each of an
    n-th of the bytes.
    """
    rounds = 2 * (machines - 1)
    return rounds * (gradient_bytes / machines / link.bytes_s + link.rtt_us / 1e6)


def forecast(gradient_bytes: int, machines: int, link: SlowLink | None) -> str | None:
    """Say what the slowest link means for each step; None where nothing is known or worth it."""
    if machines < 2 or link is None or not gradient_bytes:
        return None
    took_s = ring_s(gradient_bytes, machines, link)
    if took_s < NOTABLE_S:
        return None
    # Without overlap n machines are worth n * c / (c + t) of one whose step takes c: 1 at t/(n-1).
    least_s = took_s / (machines - 1)
    pace = f"{link.bytes_s * 8 / 1e6:.3g} Mbit/s between {link.one} and {link.other}"
    return (
        f"{gradient_bytes / 1e6:.1f} MB of gradients take about {took_s:.2g} s a step, at {pace}: "
        f"{machines} machines are faster than one if a step takes that more than {least_s:.2g} s"
    )
