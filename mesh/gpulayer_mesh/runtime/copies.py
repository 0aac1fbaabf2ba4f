"""Copies of jobs' files on other machines: ours on a holder, and those of others that we hold.

    copies/ORIGIN/blobs/SHA256    contents, shared by all attempts of one job
           ORIGIN/new/            on their way; those of an earlier agent are rubbish
           ORIGIN/ID/spec         of one attempt      manifest   where this node witnesses it
                     slot<k>      the list of files of slot k, replaced once all contents are here

A peer's path never names a file here, only a hash that was checked does. Reading, hashing and
writing happen in threads; of one job one file is hashed and one is received at a time. As in
`store`, there is no fsync: whoever restores checks every hash again. What counts and who holds it,
`core.copies` decides. This module does not know how jobs run or why somebody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import quote, urlencode

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.copies import (
    Ask,
    CopyOrder,
    CopyState,
    FileKey,
    HeldSlot,
    Link,
    Send,
    Watch,
    holders,
    key_of,
    ranks_of,
    urgency,
)
from gpulayer_mesh.core.jobspec import HostAddress, JobSpec, OutputFile
from gpulayer_mesh.core.manifest import Manifest, open_manifest, unique_chunks
from gpulayer_mesh.core.restarts import origin_of
from gpulayer_mesh.core.types import NodeId, Role
from gpulayer_mesh.errors import (
    BundleError,
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    PlacementBusyError,
    RemoteProtocolError,
    TransportError,
)
from gpulayer_mesh.files import replace_file
from gpulayer_mesh.runtime.background import Background
from gpulayer_mesh.runtime.door import DoorRequest, Route, Stream
from gpulayer_mesh.runtime.peers import CALL_S, PeerCall, PeerStream
from gpulayer_mesh.runtime.staging import StageOrder, Staging
from gpulayer_mesh.runtime.store import ChunkStore, check_space
from gpulayer_mesh.runtime.transfer import read_pieces, receive

log = logging.getLogger("gpulayer.copies")
T = TypeVar("T")

COPY_S = 2.0  # between two looks at a job's files
LOOKS_SHARE = 20  # a look may take a twentieth of the time: 5 % of one core
HASH_S = 10.0  # what is hashed by then is listed; the next look goes on with the rest
LISTED_PER_S = 5_000  # files; a list of the most is 20 MB, so at most 1 MB/s of lists
HOLDERS_PER_LOOK = 3  # tried in a row; the next look goes on with the next ones
UPLOAD_PER_S = 1024 * 1024  # bytes of a list; slowest network that we wait for
HELD_FILES_MAX = 500_000  # of all jobs: their lists are in memory, some 600 bytes a file

SLOTS_MAX = 1023  # the highest of the largest job
MANIFEST_S = 60.0  # 32 MiB on a slow network

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_JOB = re.compile(r"[0-9a-hjkmnp-tv-z]{10}")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A list that was taken on."""

    version: int
    files: tuple[OutputFile, ...]
    hashes: frozenset[bytes]


@dataclass(slots=True, eq=False)
class _Family:
    """All attempts of one job: they share contents."""

    folder: Path
    blobs: set[bytes] = field(default_factory=set)  # what is in its folder, checked

    def path(self, sha256: bytes) -> Path:
        return self.folder / "blobs" / sha256.hex()

    @property
    def new(self) -> Path:
        return self.folder / "new"


@dataclass(slots=True, eq=False)
class _Job:
    """One attempt whose copies, or bundle, are here."""

    spec: JobSpec
    folder: Path
    family: _Family
    held: dict[int, HeldSlot] = field(default_factory=dict)
    index: dict[int, dict[FileKey, OutputFile]] = field(default_factory=dict)
    current: dict[int, _Wanted] = field(default_factory=dict)  # being brought
    waiting: dict[int, _Wanted] = field(default_factory=dict)  # the newest, behind that
    given_up: dict[int, _Wanted] = field(default_factory=dict)  # its contents serve the next one
    problems: dict[int, str] = field(default_factory=dict)  # as last logged
    pulls: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    chunks: frozenset[bytes] = frozenset()  # of the bundle
    transfer: asyncio.Lock = field(default_factory=asyncio.Lock)

    def state(self, slot: int) -> CopyState:
        held = self.held[slot].version if slot in self.held else 0
        wanted = self.waiting.get(slot) or self.current.get(slot)
        return CopyState(held, wanted.version if wanted else held)

    def hold(self, held: HeldSlot) -> None:
        self.held[held.slot] = held
        self.index[held.slot] = {key_of(file): file for file in held.files}

    def listed(self) -> int:
        """Return how many files its lists name, those that are only on their way included."""
        lists = (self.held, self.current, self.waiting, self.given_up)
        return sum(len(one.files) for of_slot in lists for one in of_slot.values())

    def references(self) -> set[bytes]:
        """Return the hashes that some list needs."""
        found = {file.sha256 for held in self.held.values() for file in held.files}
        for lists in (self.current, self.waiting, self.given_up):
            found.update(*(wanted.hashes for wanted in lists.values()))
        return found


@dataclass(slots=True)
class _Sender:
    """One slot whose files we have copied."""

    job_dir: Path
    spec: JobSpec
    signed: bytes
    slot: int
    watch: Watch
    link: Link
    files: tuple[OutputFile, ...] = ()  # as listed last
    stopped: threading.Event = field(default_factory=threading.Event)
    problems: dict[NodeId, str] = field(default_factory=dict)  # per holder, as last logged
    full: set[NodeId] = field(default_factory=set)  # holders that had no room
    narrow: bool = False  # without the working folder


class Copies:
    """The copies of one agent; made before its door opens. `close` it.

    Args:
        root: `copies` below the agent's home; what an earlier agent held is taken over.
        node: this one.
        store: for bundles.
        call: `Peers.call`.
        stream: `Peers.stream`.
        open_spec: verify the signed chain of an attempt; raises RemoteProtocolError.
        may_read: whether a member may see what is held of a job: id, member, its roles.
        pause_s: between two looks at a job's files.
    """

    def __init__(
        self,
        root: Path,
        *,
        node: NodeId,
        store: ChunkStore,
        call: PeerCall,
        stream: PeerStream,
        open_spec: Callable[[bytes], JobSpec],
        may_read: Callable[[str, NodeId, tuple[Role, ...]], bool],
        pause_s: float = COPY_S,
    ) -> None:
        self._root = root
        self._node = node
        self._store = store
        self._call = call
        self._stream = stream
        self._open_spec = open_spec
        self._may_read = may_read
        self._pause_s = pause_s
        self._jobs: dict[str, _Job] = {}
        self._families: dict[str, _Family] = {}
        self._disk = asyncio.Lock()  # what gives or takes a name; transfers go on meanwhile
        self._background = Background(log)
        self._adopt()

    async def close(self) -> None:
        """End every transfer."""
        pulls = [task for one in self._jobs.values() for task in one.pulls.values()]
        for task in pulls:
            task.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        await self._background.close()

    def routes(self) -> list[Route]:
        """Return the requests that members may make."""
        one = "/v1/copies/{id}"
        return [
            Route("POST", one, self.offer, None, wire.BODY_MAX),
            Route("GET", one, self.list_held),
            Route("GET", one + "/state", self.get_state),
            Route("GET", one + "/file", self.get_file),
        ]

    # --- our own files ---------------------------------------------------------------------------

    async def follow(
        self, job_dir: Path, spec: JobSpec, signed: bytes, slot: int, manifest: Manifest
    ) -> None:
        """Keep copies of one slot's files on a holder until cancelled.

        Returns at once where nobody may hold them.

        Args:
            signed: the chain that `open_spec` of the holder takes.
            slot: ours.
            manifest: what was shipped needs no copy.
        """
        link = Link(holders(spec.voters, self._node))
        if not link.candidates:
            return
        shipped = {entry.path: entry.sha256 for entry in manifest.entries if entry.sha256}
        sender = _Sender(job_dir, spec, signed, slot, Watch(shipped), link)
        try:
            while True:
                began = time.monotonic()
                try:
                    looked_s = await self._look(sender)
                    if sender.watch.looks > 1:  # an earlier agent's list must not give way to none
                        await self._tell(sender)
                except OSError as e:
                    looked_s = time.monotonic() - began
                    log.warning("job %s: its files cannot be looked at: %s", spec.id, e)
                busy_s = max(looked_s * LOOKS_SHARE, len(sender.files) / LISTED_PER_S)
                await asyncio.sleep(max(self._pause_s, busy_s))
        finally:
            sender.stopped.set()  # a thread may be in the middle of a large file
            with contextlib.suppress(OSError):
                self._store.unpin(job_dir)

    async def _look(self, sender: _Sender) -> float:
        """See what has changed and hash it; return what the look alone took, in seconds."""
        began = time.monotonic()
        ranks = ranks_of(sender.spec, sender.slot)
        found = await asyncio.to_thread(self._store.stamp_outputs, sender.job_dir, ranks)
        fresh = await asyncio.to_thread(sender.watch.scan, began, found)
        looked_s = time.monotonic() - began
        for key in fresh:
            hashed = await asyncio.to_thread(
                self._store.hash_output,
                sender.job_dir,
                key,
                may_grow=sender.watch.may_grow(key),
                stopped=sender.stopped.is_set,
            )
            if hashed is not None:  # else it has changed, and the next look comes soon
                stamp, sha256, pinned = hashed
                sender.watch.hashed(key, stamp, sha256, pinned=pinned)
            if time.monotonic() - began >= HASH_S:
                break
        # What is on its way must stay, although it was replaced.
        pins = sender.watch.pins() | set(sender.link.kept)
        await asyncio.to_thread(self._store.unpin, sender.job_dir, keep=pins)
        return looked_s

    async def _tell(self, sender: _Sender) -> None:
        """Have a holder know of the newest list, and see what it has made of it."""
        link, path = sender.link, f"/v1/copies/{sender.spec.id}"
        for _ in range(HOLDERS_PER_LOOK):
            files = await asyncio.to_thread(sender.watch.listed, link.kept)
            if sender.narrow:
                files = tuple(file for file in files if file.area == "out")
            sender.files = files
            action = link.action(time.monotonic(), time.time_ns() // 1_000_000, files)
            if action is None:
                return
            name = next((s.name for s in sender.spec.slots if s.node == action.holder), "a witness")
            try:
                if isinstance(action, Send):
                    order = CopyOrder(sender.signed, sender.slot, action.version, files)
                    body = await asyncio.to_thread(wire.pack, order)
                    deadline_s = CALL_S + len(body) / UPLOAD_PER_S
                    answer = await self._call(
                        action.holder, "POST", path, body, deadline_s=deadline_s
                    )
                else:
                    where = f"{path}/state?slot={sender.slot}"
                    answer = await self._call(action.holder, "GET", where)
                state = wire.decode_as(CopyState, wire.unpack(answer))
            except GpuLayerError as e:
                link.failed(time.monotonic(), action)
                if sender.problems.get(action.holder) != e.message:
                    log.warning("job %s: no copies on %s: %s", sender.spec.id, name, e.message)
                sender.problems[action.holder] = e.message
                if isinstance(e, BundleError):
                    self._narrow(sender, action.holder)
                continue
            sender.problems.pop(action.holder, None)
            link.answered(time.monotonic(), action, files, state)
            if isinstance(action, Ask) or state.wanted == action.version:
                return

    def _narrow(self, sender: _Sender, holder: NodeId) -> None:
        """Where nobody has room for all, go on with the ranks' output folders: a job may have
        brought a data set into its working folder, but its checkpoints are what a restart needs."""
        sender.full.add(holder)
        if sender.narrow or len(sender.full) < min(HOLDERS_PER_LOOK, sender.link.candidates):
            return
        if any(file.area == "work" for file in sender.files):
            sender.narrow = True
            sender.link.retry()
            log.warning(
                "job %s: nobody has room for the files of its working folder, they are not copied",
                sender.spec.id,
            )

    # --- for this node ---------------------------------------------------------------------------

    def jobs(self) -> set[str]:
        """Return the attempts of which anything is held."""
        return set(self._jobs)

    def spec(self, job: str) -> JobSpec | None:
        """Return what an attempt is of which anything is held."""
        one = self._jobs.get(job)
        return one.spec if one else None

    def age_s(self, job: str) -> float:
        """Return for how long nothing has changed in what is held, by the wall clock."""
        one = self._jobs.get(job)
        try:
            return time.time() - one.folder.stat().st_mtime if one else 0.0
        except FileNotFoundError:
            return 0.0

    def held(self, job: str) -> tuple[HeldSlot, ...]:
        """Return what is held of an attempt: per slot, the newest complete list."""
        one = self._jobs.get(job)
        return tuple(one.held[slot] for slot in sorted(one.held)) if one else ()

    def open_held(self, job: str, sha256: bytes) -> int | None:
        """Open content by its hash, of any attempt of the same job; None if it is not here."""
        one = self._jobs.get(job)
        if one is None or sha256 not in one.family.blobs:
            return None
        with contextlib.suppress(OSError):
            return os.open(one.family.path(sha256), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return None

    def chunks(self) -> set[bytes]:
        """Return the chunks of held bundles: nobody may prune them."""
        return {chunk for one in self._jobs.values() for chunk in one.chunks}

    def manifest(self, job: str) -> bytes | None:
        """Return the packed manifest of a bundle that is here completely (or was, a moment ago)."""
        one = self._jobs.get(job)
        if one is not None:
            with contextlib.suppress(OSError):
                return (one.folder / "manifest").read_bytes()
        return None

    async def fetch_bundle(self, spec: JobSpec, sources: Sequence[HostAddress]) -> None:
        """Bring the source of an attempt here, so that this node can give it to the next one.

        Args:
            sources: nodes that have it.

        Raises:
            TransportError: it cannot be had.
            BundleError: the disk has no room.
            GpuLayerError: the disk refuses.
        """
        hosts = tuple(source for source in sources if source.node != self._node)
        problem: GpuLayerError = TransportError(f"no node has the source of job {spec.id}")
        packed = await asyncio.to_thread(self.manifest, spec.id)
        for host in hosts if packed is None else ():
            try:
                packed = await self._call(
                    host.node,
                    "GET",
                    f"/v1/jobs/{spec.id}/manifest",
                    addresses=host.addresses,
                    deadline_s=MANIFEST_S,
                )
                await asyncio.to_thread(open_manifest, packed, sha256=spec.manifest)
                break
            except GpuLayerError as e:
                problem, packed = e, None
        if packed is None:
            raise problem
        chunks = unique_chunks(await asyncio.to_thread(open_manifest, packed, sha256=spec.manifest))
        one = await self._enter(spec)
        one.chunks = frozenset(chunks)  # from now on nobody prunes those that are here already
        missing = await asyncio.to_thread(self._store.missing, list(chunks))
        if missing and not hosts:
            raise TransportError(f"no node has the source of job {spec.id}")
        if missing:
            need_bytes = sum(chunks[chunk] for chunk in missing)
            await asyncio.to_thread(check_space, self._root, need_bytes)
            staging = Staging(
                StageOrder(hosts, tuple(i % len(hosts) for i in range(len(missing)))),
                job=spec.id,
                node=self._node,
                store=self._store,
                call=self._call,
                progress=lambda: None,
            )
            await staging.fetch(missing)
        async with self._disk:
            self._check_here(one)
            await asyncio.to_thread(replace_file, one.folder / "manifest", packed, private=True)

    def forget(self, job: str) -> None:
        """Drop what is held of an attempt, in the background."""
        one = self._jobs.pop(job, None)
        if one is None:
            return
        for task in one.pulls.values():
            task.cancel()
        self._background.spawn(self._remove(one))

    async def _remove(self, one: _Job) -> None:
        family = one.family
        await asyncio.gather(*one.pulls.values(), return_exceptions=True)
        async with self._disk:
            if one.spec.id not in self._jobs:  # it may have been asked for anew meanwhile
                await asyncio.to_thread(shutil.rmtree, one.folder, ignore_errors=True)
            if not any(other.family is family for other in self._jobs.values()):
                self._families.pop(family.folder.name, None)
                family.blobs.clear()
                await asyncio.to_thread(shutil.rmtree, family.folder, ignore_errors=True)
        await self._sweep(family)

    # --- what members may ask --------------------------------------------------------------------

    async def offer(self, request: DoorRequest) -> CopyState:
        """Take a list on; the contents are fetched in the background."""
        order = await asyncio.to_thread(_decode_order, request.body)
        spec = self._open_spec(order.spec)
        if spec.id != request.params["id"]:
            raise RemoteProtocolError("the spec is for another job")
        await asyncio.to_thread(order.check, spec, request.peer, self._node)
        one = await self._enter(spec)
        if order.version <= one.state(order.slot).wanted:
            return one.state(order.slot)
        wanted = _Wanted(order.version, order.files, frozenset(f.sha256 for f in order.files))
        missing = {f.sha256: f.size for f in order.files if f.sha256 not in one.family.blobs}
        if missing:
            await asyncio.to_thread(check_space, self._root, sum(missing.values()))
        self._check_here(one)
        files = sum(job.listed() for job in self._jobs.values())
        if files + len(order.files) > HELD_FILES_MAX:
            raise PlacementBusyError(f"this node holds copies of {files} files already")
        if wanted.version > one.state(order.slot).wanted:  # two may have come at once
            one.waiting[order.slot] = wanted
            if order.slot not in one.pulls:
                task = asyncio.create_task(self._pull(one, order.slot))
                one.pulls[order.slot] = task
        return one.state(order.slot)

    async def get_state(self, request: DoorRequest) -> CopyState:
        """Tell the node of `?slot=` how far its copies are."""
        one = self._jobs.get(request.params["id"])
        slot = request.number("slot", SLOTS_MAX)
        if one is None:
            return CopyState()
        if slot >= len(one.spec.slots) or one.spec.slots[slot].node != request.peer:
            raise NotAllowedError("this member may not ask for the copies of that slot")
        return one.state(slot)

    async def list_held(self, request: DoorRequest) -> bytes:
        """List what is held, of `?slot=` only if that is given: a tuple of HeldSlot."""
        one = self._readable(request)
        slots = sorted(one.held)
        if "slot" in request.query:
            wanted = request.number("slot", SLOTS_MAX)
            slots = [slot for slot in slots if slot == wanted]
        return await asyncio.to_thread(wire.pack, tuple(one.held[slot] for slot in slots))

    async def get_file(self, request: DoorRequest) -> Stream:
        """Stream one file: ?slot=&area=&rank=&path=&offset=."""
        one = self._readable(request)
        slot, rank = request.number("slot", SLOTS_MAX), request.number("rank", 2**31)
        offset = request.number("offset", 2**62)
        area, path = request.query.get("area", ""), request.query.get("path", "")
        file = one.index.get(slot, {}).get((area, rank, path))
        if file is None:
            raise NotFoundError(f"no copy of {path[:200]!r}")
        fd = self._open_blob(one, file.sha256)
        return Stream(read_pieces(lambda: fd, offset))

    def _open_blob(self, one: _Job, sha256: bytes) -> int:
        fd = self.open_held(one.spec.id, sha256)
        if fd is None:
            raise NotFoundError(f"content {sha256.hex()[:8]} is gone")
        return fd

    def _readable(self, request: DoorRequest) -> _Job:
        job = request.params["id"]
        if not self._may_read(job, request.peer, request.roles):
            raise NotAllowedError("this member may not read that job's files")
        one = self._jobs.get(job)
        if one is None:
            raise NotFoundError(f"no copies of job {job[:16]!r} are here")
        return one

    # --- what we hold ----------------------------------------------------------------------------

    async def _enter(self, spec: JobSpec) -> _Job:
        """Return the place of a verified attempt, made where there is none.

        Raises:
            RemoteProtocolError: another attempt, or another member's job, has this id.
            GpuLayerError: the disk refuses.
        """
        async with self._disk:
            name = origin_of(spec)
            if not (_JOB.fullmatch(name) and _JOB.fullmatch(spec.id)):
                raise RemoteProtocolError("not the id of a job")
            for other in self._jobs.values():
                same = other.spec.id == spec.id
                related = other.family.folder.name == name
                if (same and other.spec != spec) or (
                    related and other.spec.submitter != spec.submitter
                ):
                    raise RemoteProtocolError(f"another job {spec.id} is here already")
                if same:
                    return other
            family = self._families.get(name) or _Family(self._root / name)
            one = _Job(spec, family.folder / spec.id, family)
            try:
                await asyncio.to_thread(_make_place, one)
            except OSError as e:
                raise GpuLayerError(f"cannot store copies: {e}") from e
            self._families[name] = family
            self._jobs[spec.id] = one
            return one

    def _check_here(self, one: _Job) -> None:
        if self._jobs.get(one.spec.id) is not one:
            raise NotFoundError(f"job {one.spec.id} was forgotten meanwhile")

    async def _pull(self, one: _Job, slot: int) -> None:
        """Bring what is wanted for one slot, and then what is wanted by then."""
        try:
            while (wanted := one.waiting.pop(slot, None)) is not None:
                one.current[slot] = wanted
                try:
                    complete = await self._bring(one, slot, wanted)
                    if complete:
                        await self._switch(one, HeldSlot(slot, wanted.version, wanted.files))
                        one.problems.pop(slot, None)
                        log.debug("job %s: slot %d is here: %s", one.spec.id, slot, wanted.version)
                    one.given_up.pop(slot, None)
                    if not complete:
                        one.given_up[slot] = wanted
                except (GpuLayerError, OSError) as e:
                    one.given_up.pop(slot, None)
                    if not isinstance(e, OSError | BundleError):  # else the disk needs the room
                        one.given_up[slot] = wanted
                    if one.problems.get(slot) != str(e):
                        log.warning("job %s: slot %d is not copied yet: %s", one.spec.id, slot, e)
                    one.problems[slot] = str(e)
                del one.current[slot]
                await self._sweep(one.family)
        except Exception:
            log.exception("copying for job %s failed", one.spec.id)
        finally:
            one.current.pop(slot, None)
            one.waiting.pop(slot, None)  # the sender asks, and sends again
            del one.pulls[slot]

    async def _bring(self, one: _Job, slot: int, wanted: _Wanted) -> bool:
        """Fetch every content that is not here, in the order of `urgency`.

        Returns:
            False where a newer list waits which shows that this one cannot be completed.
        """
        files = {file.sha256: file for file in wanted.files}
        for file in sorted(files.values(), key=lambda file: urgency(key_of(file), file.size)):
            async with one.transfer:
                if file.sha256 in one.family.blobs:
                    continue
                newer = one.waiting.get(slot)
                if newer is not None and file.sha256 not in newer.hashes:
                    return False
                await self._fetch(one, slot, file)
        return True

    async def _fetch(self, one: _Job, slot: int, file: OutputFile) -> None:
        family = one.family
        await asyncio.to_thread(check_space, self._root, file.size)
        query = {"area": file.area, "rank": file.rank, "path": file.path, "offset": 0}
        query["sha256"] = file.sha256.hex()
        path = f"/v1/jobs/{one.spec.id}/file?{urlencode(query, quote_via=quote)}"
        fresh = family.new / secrets.token_hex(16)
        try:
            with _create(fresh) as out:
                pieces = self._stream(one.spec.slots[slot].node, "GET", path)
                try:
                    await receive(pieces, out, size=file.size, sha256=file.sha256)
                except GpuLayerError as e:
                    raise TransportError(f"{file.path[:200]!r}: {e.message}") from e
            async with self._disk:
                self._check_here(one)
                await asyncio.to_thread(os.replace, fresh, family.path(file.sha256))
                family.blobs.add(file.sha256)
        finally:
            fresh.unlink(missing_ok=True)

    async def _switch(self, one: _Job, held: HeldSlot) -> None:
        """Have a complete list take the place of the one before."""
        packed = await asyncio.to_thread(wire.pack, held)
        async with self._disk:
            self._check_here(one)
            await asyncio.to_thread(
                replace_file, one.folder / f"slot{held.slot}", packed, private=True
            )
            one.hold(held)

    async def _sweep(self, family: _Family) -> None:
        """Delete the contents that no list needs."""
        async with self._disk:
            jobs = [one for one in self._jobs.values() if one.family is family]
            gone = family.blobs.difference(*(one.references() for one in jobs))
            family.blobs -= gone
            await asyncio.to_thread(_unlink, [family.path(sha256) for sha256 in gone])

    # --- what an earlier agent held --------------------------------------------------------------

    def _adopt(self) -> None:
        """Take over what is on disk; what is no complete list of contents that are here, goes.

        What cannot be read now stays for the next agent.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            names = sorted(os.listdir(self._root))
        except OSError as e:
            log.warning("copies held here cannot be read: %s", e)
            return
        for name in filter(_JOB.fullmatch, names):
            family = _Family(self._root / name)
            try:
                shutil.rmtree(family.new, ignore_errors=True)
                family.new.mkdir(exist_ok=True, mode=0o700)
                sizes = _sizes(family.folder / "blobs")
                family.blobs = set(sizes)
                idents = sorted(filter(_JOB.fullmatch, os.listdir(family.folder)))
                jobs = [one for ident in idents if (one := _adopt_job(family, ident, sizes))]
                if not jobs:
                    shutil.rmtree(family.folder, ignore_errors=True)
                    continue
                gone = family.blobs.difference(*(one.references() for one in jobs))
                family.blobs -= gone
                _unlink([family.path(sha256) for sha256 in gone])
            except OSError as e:
                log.warning("copies of job %s cannot be read: %s", name, e)
                continue
            self._families[name] = family
            self._jobs.update({one.spec.id: one for one in jobs})


def _adopt_job(family: _Family, ident: str, sizes: dict[bytes, int]) -> _Job | None:
    folder = family.folder / ident
    try:
        spec = _read(folder / "spec", JobSpec)
        if spec.id != ident or origin_of(spec) != family.folder.name:
            raise RemoteProtocolError("it is of another job")
        one = _Job(spec, folder, family)
        _unlink(list(folder.glob("*.tmp")))
        for path in sorted(folder.glob("slot*")):
            held = _read(path, HeldSlot)
            if all(sizes.get(f.sha256) == f.size for f in held.files):
                one.hold(held)
            else:
                path.unlink()
        if (packed := _read_manifest(folder / "manifest")) is not None:
            manifest = open_manifest(packed, sha256=spec.manifest)
            one.chunks = frozenset(unique_chunks(manifest))
    except (GpuLayerError, FileNotFoundError) as e:
        log.warning("copies of job %s are unusable, they go: %s", ident, e)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return one


def _decode_order(body: bytes) -> CopyOrder:
    return wire.decode_as(CopyOrder, wire.unpack(body, max_bytes=wire.BODY_MAX))


def _make_place(one: _Job) -> None:
    family = one.family
    for folder in (family.folder, one.folder, family.folder / "blobs", family.new):
        folder.mkdir(exist_ok=True, mode=0o700)
    replace_file(one.folder / "spec", wire.pack(one.spec), private=True)


def _create(path: Path) -> BinaryIO:
    return open(os.open(path, _NEW, 0o600), "wb")


def _read(path: Path, kind: type[T]) -> T:
    return wire.decode_as(kind, wire.unpack(path.read_bytes(), max_bytes=wire.BODY_MAX))


def _read_manifest(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _sizes(blobs: Path) -> dict[bytes, int]:
    """Return what lies there under the name of a hash; our own names, checked when written."""
    found: dict[bytes, int] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(blobs) as listing:
        for entry in listing:
            if re.fullmatch("[0-9a-f]{64}", entry.name) and entry.is_file(follow_symlinks=False):
                found[bytes.fromhex(entry.name)] = entry.stat(follow_symlinks=False).st_size
    return found


def _unlink(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
