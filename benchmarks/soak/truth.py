"""One job of a soak: what was planned, what was done to it, and what its ranks noted (`rank.py`).

It knows files and numbers only: neither the mesh, nor how anything is killed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lan import Process

RANKS = 3
STARTED_LINES = 20  # a rank that printed so many runs, and its keeper has told everybody


@dataclass
class Job:
    number: int
    side: Path  # where its ranks note the truth
    codes: list[int]
    harms: list[str] = field(default_factory=list)
    launcher_killed: bool = False
    launcher: Process = field(init=False)

    @property
    def name(self) -> str:
        return f"soak-{self.number}"

    @property
    def finish(self) -> Path:
        return self.side / "finish"

    @property
    def planned(self) -> int:
        """The code it ends with when nobody harms it."""
        return next((code for code in self.codes if code), 0)

    def note(self, attempt: int, rank: int, what: str) -> str:
        path = self.side / f"{attempt}.{rank}.{what}"
        return path.read_text() if path.exists() else ""

    def attempts(self) -> list[int]:
        """Return the attempts of which a rank has started; 0 is the first."""
        return sorted({int(path.name.split(".")[0]) for path in self.side.glob("*.starts")})

    def printed(self, attempt: int, rank: int) -> int:
        return int(self.note(attempt, rank, "printed") or 0)

    def beat(self, attempt: int, rank: int) -> float:
        """Return the last moment at which a rank is known to have lived, 0 if it is not."""
        return float(self.note(attempt, rank, "beat") or self.started(attempt, rank)[0])

    def started(self, attempt: int, rank: int) -> tuple[float, str]:
        """Return when a rank started and on which host; 0 if it has not."""
        when, host, _ = (self.note(attempt, rank, "starts") or "0 - 0").split(None, 2)
        return float(when), host

    def all_print(self, attempt: int) -> bool:
        return all(self.printed(attempt, rank) > STARTED_LINES for rank in range(RANKS))

    def ended_by_itself(self, attempt: int) -> bool:
        return all(self.note(attempt, rank, "code") for rank in range(RANKS))


def numbered(output: str, attempt: int, rank: int) -> tuple[list[int], bool]:
    """Return the numbers of a rank's lines, and whether its last one is there."""
    pattern = rf"^\[{rank}\|\S+\] (line|all) {attempt} (\d+)$"
    said = re.findall(pattern, output, re.MULTILINE)
    return [int(n) for word, n in said if word == "line"], any(word == "all" for word, _ in said)


def gaps(numbers: list[int]) -> str:
    wrong = [i for i, number in enumerate(numbers) if number != i][:3]
    return f"{len(numbers)} lines, wrong from {wrong}"


def started_once(job: Job) -> None:
    for attempt in job.attempts():
        for rank in range(RANKS):
            starts = job.note(attempt, rank, "starts").splitlines()
            assert len(starts) <= 1, f"attempt {attempt}: rank {rank} started {starts}"


def never_two_at_once(job: Job) -> None:
    """Every rank of an attempt was gone before the first one of the next was there."""
    last = (0.0, "")
    for attempt in job.attempts():
        ranks = [rank for rank in range(RANKS) if job.started(attempt, rank)[0]]
        began = min(job.started(attempt, rank)[0] for rank in ranks)
        assert began > last[0], f"{last[1]} lived {last[0] - began:.3f} s into attempt {attempt}"
        for rank in ranks:
            beat, host = job.beat(attempt, rank), job.started(attempt, rank)[1]
            last = max(last, (beat, f"attempt {attempt}'s rank {rank} on {host}"))


def files_came_back(
    job: Job, away: Mapping[str, Sequence[tuple[float, float]]], kept_s: float
) -> int:
    """Check that a rank found what an attempt before had written this long before its end.

    Args:
        away: host -> from when to when nothing of it was to be had.

    Returns:
        How many ranks of later attempts were compared.
    """
    compared = 0
    promised = dict.fromkeys(range(RANKS), 0)
    written: dict[int, list[tuple[int, float]]] = {rank: [] for rank in range(RANKS)}
    for attempt in job.attempts():
        found = [[int(n) for n in job.note(attempt, r, "found").split()] for r in range(RANKS)]
        for rank in [rank for rank in range(RANKS) if found[rank]]:
            out, work, zero = found[rank]
            if attempt:
                compared += 1
                what = f"attempt {attempt}: rank {rank} found {out} and {work} in its folders"
                assert min(out, work) >= promised[rank], f"{what}, {promised[rank]} was promised"
                same = [one[2] for one in found if one] + found[0][:1]
                assert set(same) == {zero}, f"attempt {attempt}: rank 0's files differ: {found}"
            # What it did not find is gone, and was not promised.
            written[rank] = [one for one in written[rank] if one[0] <= max(out, work)]
            for line in job.note(attempt, rank, "writes").splitlines():
                count, at = line.split()
                written[rank].append((int(count), float(at)))
            began, host = job.started(attempt, rank)
            ended = job.beat(attempt, rank)
            for left, back in away.get(host, ()):
                if left < ended and back > began:
                    ended = min(ended, max(left, began))
            old = [count for count, at in written[rank] if at <= ended - kept_s]
            promised[rank] = max([promised[rank], *old])
    return compared


def came_home(job: Job, attempt: int, folder: Path) -> None:
    """What the last attempt had counted to lies on the laptop."""
    for rank in range(RANKS):
        last = job.note(attempt, rank, "writes").split()[-2:]
        place = folder / f"rank{rank}" if rank else folder
        for name in ("count", f"count-{rank}") if last else ():
            path = place / name
            home = path.read_text() if path.exists() else "nothing"
            assert home == last[0], f"{place.name}/{name} at home is {home}, it was {last[0]}"
