"""Copies of a running job's files on a second machine: what counts, what is sent, who holds it.

Rules. A file counts once it stayed the same from one look to the next, or is whole: renamed into
place after its last write, however soon the next one comes. Where clocks are too coarse to tell, a
file that was replaced by another before each of two looks is. What counts is pinned under its hash,
so it can be fetched although the job replaces it. What is still written, and what has just gone,
stays in the list as it was for as long as it is pinned or the holder has it, so that a holder never
drops the last checkpoint for one that is not there yet. A small file that only grows, a log, is
taken as far as it goes every half a minute. The holder is the first voter behind the sender that
answers. A list has a version; a newer one takes the place of an older one once all its files have
arrived.

`Watch` is the sender's view of its files, `Link` its view of the holder. This module does not know
folders, requests or how files travel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.jobspec import OUTPUTS_MAX, JobSpec, OutputFile
from gpulayer_mesh.core.manifest import output_problem
from gpulayer_mesh.core.rankenv import first_rank
from gpulayer_mesh.core.types import NodeId
from gpulayer_mesh.errors import RemoteProtocolError

LIST_BYTES_MAX = wire.BODY_MAX - wire.SPEC_MAX - 64 * 1024  # what a request's body leaves for files
FILE_BYTES = 128  # of a listed file on the wire beside its path: names of fields, hash, size

GROWING_MAX = 64 * 1024**2  # bytes; no disk takes GROWING_S for so few, so it is no half checkpoint
GROWING_S = 30.0
GONE_SCANS = 3  # looks for which a file that is gone stays listed: what replaces it needs two

CHECK_S = 10.0  # between questions to a holder that has everything: it may have died
AGAIN_S = 30.0  # until a holder that failed, or gave a list up, is tried again
PENDING_MAX = 8  # lists on their way of which we remember the content

FileKey = tuple[str, int, str]  # area, rank, path, as in OutputFile


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells a changed file without reading it."""

    size: int
    mtime_ns: int
    inode: int
    executable: bool = False
    # Its name or mode changed after its last write. The inode alone does not tell that a file was
    # replaced: its number is given out again at once.
    whole: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """What the node of a slot asks a holder to hold; replaces what it asked for before."""

    spec: Annotated[bytes, Meta(max_length=wire.SPEC_MAX)]  # signed
    slot: Annotated[int, Meta(ge=0, lt=1024)]
    version: Annotated[int, Meta(ge=1, lt=2**62)]
    files: Annotated[tuple[OutputFile, ...], Meta(max_length=OUTPUTS_MAX)]

    def check(self, spec: JobSpec, peer: NodeId, node: NodeId) -> None:
        """Raise RemoteProtocolError unless `peer` may ask this of `node`, and it makes sense.

        Args:
            spec: what the verified bytes say.
        """
        if self.slot >= len(spec.slots) or spec.slots[self.slot].node != peer:
            raise RemoteProtocolError("a node may only have the files of its own slot copied")
        if node not in spec.voters or node == peer:
            raise RemoteProtocolError("this node holds no copies for that one")
        ranks = ranks_of(spec, self.slot)
        sizes: dict[bytes, int] = {}
        for file in self.files:
            if file.rank not in ranks or (file.area == "work" and file.rank != ranks[0]):
                raise RemoteProtocolError(f"file {file.path[:200]!r} is of no rank of the slot")
            if problem := output_problem(file.path):
                raise RemoteProtocolError(f"path {file.path[:200]!r} {problem}")
            if sizes.setdefault(file.sha256, file.size) != file.size:
                raise RemoteProtocolError(f"content {file.sha256.hex()[:8]} has two sizes")
        if len({key_of(file) for file in self.files}) != len(self.files):
            raise RemoteProtocolError("a file is listed twice")


@dataclass(frozen=True, slots=True)
class CopyState:
    """What a holder answers."""

    version: Annotated[int, Meta(ge=0)] = 0  # held completely; 0: none
    wanted: Annotated[int, Meta(ge=0)] = 0  # newest that it took on and has not given up


@dataclass(frozen=True, slots=True)
class HeldSlot:
    """The files of one slot, as a holder has them."""

    slot: int
    version: int
    files: Annotated[tuple[OutputFile, ...], Meta(max_length=OUTPUTS_MAX)]


def key_of(file: OutputFile) -> FileKey:
    return file.area, file.rank, file.path


def urgency(key: FileKey, size: int) -> tuple[bool, int, FileKey]:
    """Sort key: what a rank puts out goes first, and what is small, for it changes most often."""
    return key[0] == "work", size, key


def ranks_of(spec: JobSpec, slot: int) -> range:
    """Return the global ranks of a slot."""
    first = first_rank(spec, slot)
    return range(first, first + spec.slots[slot].processes)


def within_limits(files: Iterable[OutputFile]) -> tuple[OutputFile, ...]:
    """Return as many files as one request can list."""
    taken: list[OutputFile] = []
    left = LIST_BYTES_MAX
    for file in files:
        left -= FILE_BYTES + len(file.path.encode())
        if left < 0 or len(taken) == OUTPUTS_MAX:
            break
        taken.append(file)
    return tuple(taken)


def holders(voters: Sequence[NodeId], node: NodeId) -> tuple[NodeId, ...]:
    """Return who may hold the copies of a node's files, in the order to try them."""
    start = voters.index(node) + 1 if node in voters else 0
    return tuple(other for other in (*voters[start:], *voters[:start]) if other != node)


# --- the sender's files ------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    stamp: Stamp
    settled: bool
    since: float  # when it began to change, or was last taken while it did
    replaced: int = 0  # looks in a row before which it became another file


@dataclass(frozen=True, slots=True)
class _Known:
    stamp: Stamp  # `sha256` is of the first `stamp.size` bytes
    sha256: bytes
    growing: bool
    pinned: bool


class Watch:
    """Which files of one slot count, and as what. Call `scan`, `hashed` for what it asks, `listed`.

    Args:
        shipped: hash of each file of the source, which need no copy where unchanged.
    """

    def __init__(self, shipped: Mapping[str, bytes]) -> None:
        self.looks = 0  # before the second one nothing can be known to rest, or to be gone
        self._shipped = shipped
        self._seen: dict[FileKey, _Seen] = {}
        self._known: dict[FileKey, _Known] = {}
        self._gone: dict[FileKey, int] = {}  # scans since a known file was there

    def scan(self, now: float, found: Mapping[FileKey, Stamp]) -> list[FileKey]:
        """Take a look's result; return what is to be hashed, in the order of `urgency`."""
        self.looks += 1
        fresh: list[FileKey] = []
        seen: dict[FileKey, _Seen] = {}
        for key, stamp in found.items():
            before = self._seen.get(key)
            one = seen[key] = _Seen(stamp, before is not None and before.stamp == stamp, now)
            if before is not None and before.stamp.inode != stamp.inode:
                one.replaced = before.replaced + 1
            one.settled = one.settled or stamp.whole or one.replaced > 1
            if before is not None and not before.settled:
                one.since = before.since
            grows = (
                before is not None
                and not one.settled
                and _extends(stamp, before.stamp)
                and stamp.size <= GROWING_MAX
                and now - one.since >= GROWING_S
            )
            known = self._known.get(key)
            if (one.settled or grows) and (known is None or known.stamp != stamp):
                fresh.append(key)
            if grows:
                one.since = now
        self._seen = seen
        for key in list(self._known):
            if key in found:
                self._gone.pop(key, None)
                continue
            self._gone[key] = self._gone.get(key, 0) + 1
            if self._gone[key] >= GONE_SCANS:
                del self._known[key], self._gone[key]
        return sorted(fresh, key=lambda key: urgency(key, found[key].size))

    def may_grow(self, key: FileKey) -> bool:
        """Whether a file that was asked for may grow while it is hashed."""
        return not self._seen[key].settled

    def hashed(self, key: FileKey, stamp: Stamp, sha256: bytes, *, pinned: bool) -> None:
        """A file that was asked for, as it was found; leave it out if it changed meanwhile.

        Args:
            stamp: before the first byte was read.
            sha256: of as many bytes as it says.
            pinned: it can be had by its hash, whatever becomes of its name.
        """
        self._known[key] = _Known(stamp, sha256, self.may_grow(key), pinned)

    def pins(self) -> set[bytes]:
        """Return the hashes of which a pin is still needed."""
        return {known.sha256 for known in self._known.values() if known.pinned}

    def listed(self, kept: Collection[bytes]) -> tuple[OutputFile, ...]:
        """Return what the holder should hold.

        Args:
            kept: `Link.kept`.
        """
        files = []
        for key, known in sorted(self._known.items()):
            area, rank, path = key
            if area == "work" and self._shipped.get(path) == known.sha256:
                continue
            if self._is_there(key, known) or known.sha256 in kept:
                size, runs = known.stamp.size, known.stamp.executable
                files.append(OutputFile(area, rank, path, size, known.sha256, runs))
        return within_limits(files)

    def _is_there(self, key: FileKey, known: _Known) -> bool:
        one = self._seen.get(key)
        if one is None or one.stamp.inode != known.stamp.inode:
            return known.pinned
        return one.stamp == known.stamp or (known.growing and _extends(one.stamp, known.stamp))


def _extends(stamp: Stamp, before: Stamp) -> bool:
    return stamp.inode == before.inode and stamp.size >= before.size


# --- the sender's holder -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send the list to a holder, as this version."""

    holder: NodeId
    version: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a holder what it has."""

    holder: NodeId


class Link:
    """Who holds the copies of one slot, and what. `action`, do it, then `answered` or `failed`.

    Args:
        candidates: from `holders`.
    """

    def __init__(self, candidates: tuple[NodeId, ...]) -> None:
        self.confirmed: frozenset[bytes] = frozenset()  # hashes of what the holder has
        self._candidates = candidates
        self._silent: dict[NodeId, float] = {}  # until when not to try them
        self._version = 0  # the highest used or heard of
        self._given_up: tuple[OutputFile, ...] | None = None
        self._again = 0.0
        self._holder: NodeId | None = None
        self._sent: tuple[OutputFile, ...] | None = None  # what it took on last
        self._sent_version = 0
        self._held = 0  # the version it had last
        self._pending: dict[int, frozenset[bytes]] = {}  # version -> hashes, on their way
        self._asked = 0.0

    @property
    def candidates(self) -> int:
        """How many nodes may hold copies."""
        return len(self._candidates)

    @property
    def holder(self) -> NodeId | None:
        return self._holder

    @property
    def kept(self) -> frozenset[bytes]:
        """Hashes of what the holder has or is fetching: what may be listed though it has changed.

        What turns out to be gone before it was fetched only costs that list.
        """
        return self.confirmed.union(*self._pending.values())

    @property
    def complete(self) -> bool:
        """The holder has all it was sent."""
        return self._sent is not None and not self._pending

    def action(self, now: float, wall_ms: int, files: tuple[OutputFile, ...]) -> Send | Ask | None:
        """Return what to do for the holder to have these files.

        Args:
            wall_ms: by the wall clock. Versions grow with it, so that a holder of long ago does not
                seem newer than the one of today, whatever this agent remembers.
        """
        if self._holder is None:
            ready = [n for n in self._candidates if self._silent.get(n, now) <= now]
            if not ready:
                return None
            self._holder = ready[0]
        if files != self._sent and (files != self._given_up or now >= self._again):
            self._version = max(self._version + 1, wall_ms)
            return Send(self._holder, self._version)
        if self._sent is not None and (self._pending or now - self._asked >= CHECK_S):
            return Ask(self._holder)
        return None

    def answered(
        self, now: float, action: Send | Ask, files: tuple[OutputFile, ...], state: CopyState
    ) -> None:
        """Take a holder's answer.

        Args:
            files: what was sent.
        """
        self._asked = now
        self._version = max(self._version, state.version, state.wanted)
        if isinstance(action, Send):
            if state.wanted != action.version:  # it has a later one, of this agent's earlier life
                self._sent = None
                return
            self._sent, self._sent_version = files, action.version
            self._pending[action.version] = frozenset(file.sha256 for file in files)
            while len(self._pending) > PENDING_MAX:
                del self._pending[min(self._pending)]
        if state.version in self._pending:
            self.confirmed = self._pending[state.version]
        elif state.version != self._held:
            self.confirmed = frozenset()
        lost, self._held = state.version < self._held, state.version
        self._pending = {v: have for v, have in self._pending.items() if v > state.version}
        if state.version != self._sent_version and state.wanted != self._sent_version:
            if not lost:  # else it needs all of it at once
                self._given_up, self._again = self._sent, now + AGAIN_S
            self._sent = None
            self._pending.clear()

    def retry(self) -> None:
        """Try those that failed again: less is asked of them now."""
        self._silent.clear()

    def failed(self, now: float, action: Send | Ask) -> None:
        """A holder did not answer, or refused."""
        self._silent[action.holder] = now + AGAIN_S
        self._holder = self._sent = None
        self._held = 0
        self._pending.clear()
        self.confirmed = frozenset()
