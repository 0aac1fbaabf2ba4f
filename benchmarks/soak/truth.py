"""One job of a soak: what was planned, what was done to it, and what its ranks noted (`rank.py`).

It knows files and numbers only: neither the mesh, nor how anything is killed.
"""

from __future__ import annotations

import re
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


def files_came_back(job: Job, away: dict[str, list[float]], kept_s: float) -> int:
    """Check that a rank found what an attempt before had written this long before its end.

    Args:
        away: host -> when it was lost or cut off, after which nothing of it was to be had.

    Returns:
        How many ranks of later attempts were compared.
    """
    compared = 0
    promised = dict.fromkeys(range(RANKS), 0)
    for attempt in job.attempts():
        found = [[int(n) for n in job.note(attempt, r, "found").split()] for r in range(RANKS)]
        zeros = {one[2] for one in found if one}
        for rank, one in enumerate(found):
            if not one or attempt == 0:
                continue
            out, work, zero = one
            compared += 1
            least = f"{promised[rank]} or later of what came before"
            assert out >= promised[rank], f"attempt {attempt}: rank {rank} found {out}, not {least}"
            assert work >= promised[rank], (
                f"attempt {attempt}: rank {rank} found {work} in its working folder, not {least}"
            )
            assert zeros == {zero}, f"attempt {attempt}: rank 0's files differ: {found}"
            assert not found[0] or zero == found[0][0], f"attempt {attempt}: {found}"
        for rank, one in enumerate(found):
            if one:
                promised[rank] = max(promised[rank], min(one[:2]))
            began, host = job.started(attempt, rank)
            ended = job.beat(attempt, rank)
            ended = min([ended, *(at for at in away.get(host, []) if began <= at)])
            for line in job.note(attempt, rank, "writes").splitlines():
                count, at = line.split()
                if float(at) <= ended - kept_s:
                    promised[rank] = max(promised[rank], int(count))
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
