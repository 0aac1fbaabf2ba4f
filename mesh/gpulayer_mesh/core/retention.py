"""Which finished jobs a node forgets, with their logs and files.

Pure: ages and sizes in, ids out. What was ended a moment ago stays whatever happens, for whoever
waited for it is fetching its files. Does not know where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KEPT_S = 7 * 86400.0  # results wait for a week
KEPT = 200  # jobs: their records are sent whole to whoever lists them
FULL = 0.85  # of the disk; above it the oldest go
FRESH_S = 3600.0


@dataclass(frozen=True, slots=True)
class Finished:
    """One job that has ended."""

    job: str
    ended_age_s: float
    size_bytes: int = 0  # of its folder; matters where the disk is full only


def outdated(finished: Sequence[Finished]) -> list[str]:
    """Return the jobs that are too old or too many, the oldest first."""
    oldest_first = sorted(finished, key=lambda one: -one.ended_age_s)
    surplus = len(oldest_first) - KEPT
    return [
        one.job
        for number, one in enumerate(oldest_first)
        if one.ended_age_s > KEPT_S or (number < surplus and one.ended_age_s > FRESH_S)
    ]


def making_room(finished: Sequence[Finished], used_bytes: int, total_bytes: int) -> list[str]:
    """Return the jobs that go so that a disk is no longer too full, the oldest first."""
    surplus = used_bytes - FULL * total_bytes
    found = []
    for one in sorted(finished, key=lambda one: -one.ended_age_s):
        if surplus <= 0 or one.ended_age_s <= FRESH_S:
            break
        found.append(one.job)
        surplus -= one.size_bytes
    return found
