"""What an attempt's nodes get of the files of the attempt before, and from where.

The files of a slot come from the node that had it, where that lives, else from whoever holds the
newest copies. Each slot gets its own in place, and every slot what rank 0 had put out, in a folder
of its own; nobody gets what told how the attempt before ended. This module does not know folders or
requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from gpulayer_mesh.core.copies import HeldSlot, key_of
from gpulayer_mesh.core.jobspec import HostAddress, JobId, OutputFile, RelPath
from gpulayer_mesh.core.manifest import output_problem
from gpulayer_mesh.core.ownfiles import is_outcome
from gpulayer_mesh.core.types import Sha256
from gpulayer_mesh.errors import RemoteProtocolError

ORDER_FILES_MAX = 20_000  # in one order, with the longest paths 25 MB on the wire
SOURCES_MAX = 1026  # every slot, and two witnesses


@dataclass(frozen=True, slots=True)
class RestoreFile:
    """One file to bring back.

    It goes to `work/PATH`, `out/rank<RANK>/PATH` or `restored/PATH`. At the source it is under the
    same area, rank and path; "restored" is `out` of rank 0 there.
    """

    area: Annotated[str, Meta(pattern="^(out|work|restored)$")]
    rank: Annotated[int, Meta(ge=0)]  # as in OutputFile; 0 for "restored"
    path: RelPath
    size: Annotated[int, Meta(ge=0)]
    sha256: Sha256
    source: Annotated[int, Meta(ge=0, lt=SOURCES_MAX)]  # index into the order's sources
    slot: Annotated[int, Meta(ge=0, lt=1024)] | None  # of the copies there; None: its own files
    executable: bool = False

    @property
    def from_area(self) -> str:
        return "out" if self.area == "restored" else self.area


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """Files for one node; several orders add up."""

    job: JobId  # the attempt they are of
    sources: Annotated[tuple[HostAddress, ...], Meta(max_length=SOURCES_MAX)] = ()
    files: Annotated[tuple[RestoreFile, ...], Meta(max_length=ORDER_FILES_MAX)] = ()

    def check(self, ranks: range) -> None:
        """Raise RemoteProtocolError unless every file may be written.

        Args:
            ranks: of the slot of the node that writes.
        """
        paths: set[str] = set()
        for file in self.files:
            if file.source >= len(self.sources):
                raise RemoteProtocolError("a restore order names no source")
            if problem := output_problem(file.path):
                raise RemoteProtocolError(f"path {file.path[:200]!r} {problem}")
            if file.area == "out" and file.rank not in ranks:
                raise RemoteProtocolError(f"rank {file.rank} is not on this node")
            path = _place(file)
            if path in paths:
                raise RemoteProtocolError(f"path {path[:200]!r} is restored twice")
            paths.add(path)
        for path in paths:
            while "/" in path:
                path = path.rpartition("/")[0]
                if path in paths:
                    raise RemoteProtocolError(f"path {path[:200]!r} is both a file and a folder")


@dataclass(frozen=True, slots=True)
class SlotSource:
    """Where the files of one slot of an attempt can be had."""

    source: HostAddress
    files: tuple[OutputFile, ...]
    slot: int | None = None  # a number: these are copies of that slot, else the node's own files


def newest_copy(slot: int, found: Iterable[tuple[HostAddress, HeldSlot]]) -> SlotSource | None:
    """Return the newest copies of a slot among all that holders have, None if there are none."""
    mine = [(host, held) for host, held in found if held.slot == slot]
    if not mine:
        return None
    host, held = max(mine, key=lambda one: (one[1].version, one[0].node))
    return SlotSource(host, held.files, slot)


def without(source: SlotSource, newer: Iterable[SlotSource]) -> SlotSource:
    """Return an older source less what newer ones have, or would be in the way of."""
    taken: set[tuple[str, int, str]] = set()
    folders: set[tuple[str, int, str]] = set()
    for one in newer:
        for area, rank, path in map(key_of, one.files):
            taken.add((area, rank, path))
            folders.update((area, rank, folder) for folder in _folders(path))

    def fits(file: OutputFile) -> bool:
        area, rank, path = key_of(file)
        if (area, rank, path) in taken or (area, rank, path) in folders:
            return False
        return all((area, rank, folder) not in taken for folder in _folders(path))

    return replace(source, files=tuple(filter(fits, source.files)))


def _folders(path: str) -> list[str]:
    """Return the folders that a path goes through."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def plan_restore(
    job: str, slots: Sequence[SlotSource | None], slot: int
) -> tuple[RestoreOrder, ...]:
    """Return the orders for the node of one slot of the next attempt; at least one.

    Args:
        job: the attempt before.
        slots: where the files of each of its slots are, None where they are lost.
    """
    sources: list[HostAddress] = []
    files: list[RestoreFile] = []
    own, zero = slots[slot], slots[0]
    for found, restored in ((own, False), (zero, True)):
        if found is None:
            continue
        if found.source not in sources:
            sources.append(found.source)
        index = sources.index(found.source)
        for file in found.files:
            if restored and (file.area, file.rank) != ("out", 0):
                continue
            if file.area == "out" and is_outcome(file.path):
                continue
            area = "restored" if restored else file.area
            files.append(
                RestoreFile(
                    area,
                    file.rank,
                    file.path,
                    file.size,
                    file.sha256,
                    index,
                    found.slot,
                    file.executable,
                )
            )
    return tuple(
        RestoreOrder(job, tuple(sources), tuple(files[start : start + ORDER_FILES_MAX]))
        for start in range(0, max(1, len(files)), ORDER_FILES_MAX)
    )


def _place(file: RestoreFile) -> str:
    return f"out/{file.rank}/{file.path}" if file.area == "out" else f"{file.area}/{file.path}"
