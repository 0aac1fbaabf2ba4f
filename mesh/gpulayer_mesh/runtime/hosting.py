"""Jobs on this node: the ranks it hosts, and the records of jobs whose rank 0 is here.

The shell around `core.hosted` and `core.job`: requests, timers and shim events go in, effects are
carried out. Decisions are theirs. It does not know how a request was authenticated (the door did)
but it checks every time whether the peer may do this to this job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, assert_never

from msgspec import Meta

from gpulayer_mesh.core import hosted, job, wire
from gpulayer_mesh.core.jobspec import (
    GoOrder,
    HostAddress,
    HostPhase,
    HostReport,
    JobRecord,
    JobSpec,
    JobState,
    OutputFile,
)
from gpulayer_mesh.core.lease import Reservations
from gpulayer_mesh.core.manifest import Manifest, check_path, open_manifest, unique_chunks
from gpulayer_mesh.core.rankenv import (
    HostContext,
    first_rank,
    rank_argv,
    rank_environment,
)
from gpulayer_mesh.core.roster import RosterBook
from gpulayer_mesh.core.types import Addresses, Device, Grant, NodeId, Role
from gpulayer_mesh.errors import (
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    PlacementBusyError,
    Refusal,
    RemoteProtocolError,
    TransportError,
)
from gpulayer_mesh.runtime import shims
from gpulayer_mesh.runtime.preflight import FreePorts
from gpulayer_mesh.runtime.store import ChunkStore

log = logging.getLogger("gpulayer.jobs")

JOBS_KEPT = 50  # finished jobs whose logs and files stay; the oldest go first
JOBS_LIVE_MAX = 256  # limit of grants in a capabilities record
FETCHES = 8  # parallel chunk downloads per job
CHUNK_WAIT_S = 60.0  # how long a peer may hold a chunk request until the chunk arrives
CHUNK_ROUNDS = 3  # tries over all sources before staging fails
CALL_S = job.CALL_S  # the keeper repeats a call that takes longer
FILE_PIECE_BYTES = 256 * 1024  # of an output file per write: bounded memory, few wake-ups
TAIL_LINES = 60


class Request(Protocol):
    """What a handler is given; the door makes it."""

    @property
    def peer(self) -> NodeId: ...
    @property
    def roles(self) -> Collection[Role]: ...
    @property
    def params(self) -> Mapping[str, str]: ...
    @property
    def query(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> bytes: ...


class PeerCall(Protocol):
    """One request to another agent's door."""

    def __call__(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        addresses: Addresses = (),
        deadline_s: float = CALL_S,
    ) -> Awaitable[bytes]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """This node as jobs see it; `agent` fills it in."""

    node: NodeId
    name: str
    home: Path
    python: str
    environ: Mapping[str, str]  # the agent's own, base of every rank's
    book: RosterBook
    reservations: Reservations
    store: ChunkStore
    shims: shims.ShimRunner
    ports: FreePorts
    call: PeerCall
    devices: Callable[[], tuple[Device, ...]]
    missing_imports: Callable[[Iterable[str]], Awaitable[list[str]]]
    interface_for: Callable[[Iterable[str]], str | None]
    open_preflight: Callable[[], Awaitable[tuple[int, bytes]]]
    check_preflight: Callable[[Any], Awaitable[Any]]
    changed: Callable[[], None]  # grants or jobs changed: tell the mesh


@dataclass(slots=True)
class _Job:
    spec: JobSpec
    signed: bytes
    slot: int
    dir: Path
    machine: hosted.HostedJob
    record: JobRecord  # the keeper's newest word, or what this node can say by itself
    kept: job.KeptJob | None = None  # only where rank 0 runs
    manifest: Manifest | None = None
    chunks: dict[bytes, int] = field(default_factory=dict)
    staging: asyncio.Lock = field(default_factory=asyncio.Lock)
    written: bytes = b""  # last record on disk

    @property
    def participants(self) -> frozenset[NodeId]:
        return frozenset(slot.node for slot in self.spec.slots)

    @property
    def keeper(self) -> NodeId:
        return self.spec.slots[0].node


_BEFORE_START = frozenset({HostPhase.RESERVED, HostPhase.STAGING, HostPhase.STAGED})
_OVER = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


@dataclass(frozen=True, slots=True)
class _StageOrder:
    sources: Annotated[tuple[HostAddress, ...], Meta(max_length=1024)]
    owners: Annotated[tuple[int, ...], Meta(max_length=200_000)]  # per unique chunk, a slot index


@dataclass(frozen=True, slots=True)
class _StopOrder:
    grace_s: Annotated[float, Meta(ge=0, le=86400)] | None
    kill: bool


class JobHost:
    """All jobs of one agent. `run` must be running; handlers may be called meanwhile."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._jobs: dict[str, _Job] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what the agent asks ---------------------------------------------------------------------

    async def run(self) -> None:
        """Adopt what an earlier agent left, then serve the machines' timers for ever."""
        await self._adopt_all()
        try:
            while True:
                self._wake.clear()
                now = time.monotonic()
                for one in list(self._jobs.values()):
                    if _due(one.machine.next_timeout(), now):
                        self._hosted(one, hosted.Tick())
                    if one.kept is not None and _due(one.kept.next_timeout(), now):
                        self._kept(one, job.Tick())
                for grant in self.site.reservations.expire(now):
                    log.info("job %s: the reservation ran out", grant.job)
                    self.site.changed()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause(time.monotonic())):
                        await self._wake.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def live_jobs(self) -> int:
        """How many jobs have processes or reservations here."""
        return len(self.site.reservations.grants)

    def stop_all(self, reason: str) -> None:
        """End every rank here without grace: nobody may run anything on this node any more."""
        for one in self._jobs.values():
            if one.machine.phase is not HostPhase.ENDED:
                self._hosted(one, hosted.Stop(0.0, True, reason))

    def _pause(self, now: float) -> float:
        times = [self.site.reservations.next_timeout()]
        for one in self._jobs.values():
            times.append(one.machine.next_timeout())
            if one.kept is not None:
                times.append(one.kept.next_timeout())
        return max(0.0, min((t for t in times if t is not None), default=now + 3600.0) - now)

    # --- handlers: before the start --------------------------------------------------------------

    async def reserve(self, request: Request) -> HostReport:
        """Grant what a signed job asks of this node."""
        body = wire.unpack(request.body, max_bytes=wire.SPEC_MAX + 1024)
        signed = body.get("spec") if isinstance(body, dict) else None
        if not isinstance(signed, bytes):
            raise RemoteProtocolError("reserve needs the signed spec")
        spec, index = self._checked_spec(signed, request.peer)
        if spec.id != request.params["id"]:
            raise RemoteProtocolError("the spec is for another job")
        known = self._jobs.get(spec.id)
        if known is not None:
            if known.signed != signed or known.machine.phase is HostPhase.ENDED:
                raise RemoteProtocolError(f"job {spec.id} was here before")
            return self._touch(known)
        live = sum(one.machine.phase is not HostPhase.ENDED for one in self._jobs.values())
        if live >= JOBS_LIVE_MAX:
            reason = f"holds {live} jobs already"
            raise PlacementBusyError(
                f"{self.site.name} {reason}", refusals=(Refusal(self.site.name, reason, False),)
            )
        slot = spec.slots[index]
        busy = [device.index for device in self.site.devices() if device.busy_pids]
        now = time.monotonic()
        self.site.reservations.grant(
            now, spec.id, processes=slot.processes, devices=slot.devices, busy=busy
        )
        try:
            folder = self.site.home / "jobs" / spec.id
            folder.mkdir(parents=True, mode=0o700)
            (folder / "spec").write_bytes(signed)
        except OSError as e:
            self.site.reservations.release(spec.id)
            raise GpuLayerError(f"{self.site.name} cannot store the job: {e}") from e
        machine = hosted.HostedJob(spec, index, now=now)
        record = JobRecord(spec, JobState.PLACING, spec.slots[0].node)
        one = self._jobs[spec.id] = _Job(spec, signed, index, folder, machine, record)
        self._prune()
        self._wake.set()
        self.site.changed()
        log.info(
            "job %s: reserved %d process(es) for %s", spec.id, slot.processes, spec.submitter_name
        )
        return one.machine.report(now)

    async def release(self, request: Request) -> HostReport:
        one = self._job(request)
        self._only(request, one.spec.submitter)
        self._hosted(one, hosted.Release())
        if one.machine.phase is HostPhase.ENDED and one.record.state not in _OVER:
            one.record = replace(
                one.record, state=JobState.CANCELLED, cause="not started", ended_age_s=0.0
            )
            self._save(one)
        return one.machine.report(time.monotonic())

    async def manifest(self, request: Request) -> dict[str, Any]:
        """Take the bundle's manifest; answer which chunks are not here yet."""
        one = self._job(request)
        self._only(request, one.spec.submitter)
        manifest = await asyncio.to_thread(open_manifest, request.body, sha256=one.spec.manifest)
        one.manifest = manifest
        one.chunks = unique_chunks(manifest)
        (one.dir / "manifest").write_bytes(request.body)
        self._hosted(one, hosted.StageBegan())
        return {"missing": await asyncio.to_thread(self.site.store.missing, list(one.chunks))}

    async def put_chunk(self, request: Request) -> None:
        one = self._jobs.get(request.query.get("job", ""))
        if one is None:
            raise NotFoundError("no such job on this node")
        self._only(request, one.spec.submitter)
        chunk = self._chunk(request, one)
        await self.site.store.put(chunk, request.body)
        self._touch(one)

    async def get_chunk(self, request: Request) -> bytes:
        """Hand a chunk to another participant; waits while it is still on its way here."""
        one = self._job(request)
        self._only(request, one.spec.submitter, *one.participants)
        chunk = self._chunk(request, one)
        wait_s = _number(request, "wait", 0.0, CHUNK_WAIT_S)
        if not await self.site.store.wait_for(chunk, wait_s):
            raise NotFoundError(f"chunk {chunk.hex()[:8]} is not here")
        return await asyncio.to_thread(self.site.store.read, chunk)

    async def stage(self, request: Request) -> HostReport:
        """Fetch what is missing from the other participants and build the working folder."""
        one = self._job(request)
        self._only(request, one.spec.submitter)
        order = wire.decode_as(_StageOrder, wire.unpack(request.body, max_bytes=wire.BODY_MAX))
        if one.manifest is None:
            raise RemoteProtocolError("stage before the manifest")
        if len(order.owners) != len(one.chunks) or any(
            not 0 <= owner < len(order.sources) for owner in order.owners
        ):
            raise RemoteProtocolError("stage order does not fit the manifest")
        if any(source.node not in one.participants for source in order.sources):
            raise RemoteProtocolError("stage order names a node outside the job")
        async with one.staging:
            if not (one.dir / "work").exists():
                try:
                    await self._fetch_all(one, order)
                    await asyncio.to_thread(
                        self.site.store.materialise, one.manifest, one.dir / "work"
                    )
                except (GpuLayerError, OSError) as e:
                    self._hosted(one, hosted.StageFailed(f"{self.site.name}: {e}"))
                    raise
            self._hosted(one, hosted.Staged())
        return one.machine.report(time.monotonic())

    async def _fetch_all(self, one: _Job, order: _StageOrder) -> None:
        gate = asyncio.Semaphore(FETCHES)

        async def fetch(chunk: bytes, owner: int) -> None:
            async with gate:
                await self._fetch(one, order, chunk, owner)
                self._touch(one)

        async with asyncio.TaskGroup() as group:
            for chunk, owner in zip(one.chunks, order.owners, strict=True):
                if not self.site.store.has(chunk):
                    group.create_task(fetch(chunk, owner))

    async def _fetch(self, one: _Job, order: _StageOrder, chunk: bytes, owner: int) -> None:
        if order.sources[owner].node == self.site.node:  # it comes from the launcher
            if await self.site.store.wait_for(chunk, CHUNK_WAIT_S):
                return
            raise TransportError(f"chunk {chunk.hex()[:8]} was not uploaded")
        others = [s for i, s in enumerate(order.sources) if i != owner]
        problem: GpuLayerError = TransportError("no source")
        for _ in range(CHUNK_ROUNDS):
            for source in (order.sources[owner], *others):
                if source.node == self.site.node:
                    continue
                wait_s = CHUNK_WAIT_S if source is order.sources[owner] else 0.0
                path = f"/v1/jobs/{one.spec.id}/chunks/{chunk.hex()}?wait={wait_s:g}"
                try:
                    data = await self.site.call(
                        source.node,
                        "GET",
                        path,
                        addresses=source.addresses,
                        deadline_s=wait_s + CALL_S,
                    )
                    await self.site.store.put(chunk, data)  # verifies the hash
                    return
                except GpuLayerError as e:
                    problem = e
        raise TransportError(f"chunk {chunk.hex()[:8]} cannot be had: {problem.message}")

    async def preflight_open(self, request: Request) -> dict[str, Any]:
        one = self._job(request)
        self._only(request, one.spec.submitter)
        self._touch(one)
        port, nonce = await self.site.open_preflight()
        missing = await self.site.missing_imports(one.spec.imports) if one.spec.python else []
        return {"port": port, "nonce": nonce, "missing": missing}

    async def preflight_check(self, request: Request) -> Any:
        one = self._job(request)
        self._only(request, one.spec.submitter)
        self._touch(one)
        body = wire.unpack(request.body)
        return await self.site.check_preflight(
            body.get("targets") if isinstance(body, dict) else ()
        )

    async def free_port(self, request: Request) -> dict[str, Any]:
        self._only(request, self._job(request).spec.submitter)
        return {"port": self.site.ports.take()}

    # --- handlers: running -----------------------------------------------------------------------

    async def go(self, request: Request) -> JobRecord:
        """Become the job's keeper and start it everywhere."""
        one = self._job(request)
        self._only(request, one.spec.submitter)
        if one.keeper != self.site.node:
            raise RemoteProtocolError("go belongs to the node of rank 0")
        order = wire.decode_as(GoOrder, wire.unpack(request.body, max_bytes=wire.SPEC_MAX))
        if one.machine.phase is not HostPhase.STAGED:
            raise RemoteProtocolError(f"job {one.spec.id} is {one.machine.phase}, not staged")
        if one.kept is None:
            one.kept = job.KeptJob(one.spec, now=time.monotonic())
            self._kept(one, job.Go(order))
        return self._record(one)

    async def start(self, request: Request) -> HostReport:
        one = self._job(request)
        self._only(request, one.keeper)
        order = wire.decode_as(GoOrder, wire.unpack(request.body, max_bytes=wire.SPEC_MAX))
        self._hosted(one, hosted.Start(order))
        return one.machine.report(time.monotonic())

    async def lease(self, request: Request) -> HostReport:
        """The keeper is there; it brings the newest record and takes this node's report."""
        one = self._job(request)
        self._only(request, one.keeper)
        record = wire.decode_as(JobRecord, wire.unpack(request.body, max_bytes=wire.BODY_MAX))
        if record.spec != one.spec:
            raise RemoteProtocolError("the record is of another job")
        one.record = record
        self._save(one)
        self._hosted(one, hosted.Renewed())
        return one.machine.report(time.monotonic())

    async def report(self, request: Request) -> None:
        one = self._job(request)
        self._only(request, *one.participants)
        report = wire.decode_as(HostReport, wire.unpack(request.body, max_bytes=wire.SPEC_MAX))
        if report.node != request.peer or report.job != one.spec.id:
            raise RemoteProtocolError("a report may only speak for its sender")
        if one.kept is not None:
            self._kept(one, job.HostReported(report))

    async def stop(self, request: Request) -> JobRecord:
        """Stop a job; a participant that is not the keeper passes the request on."""
        one = self._job(request)
        if Role.ADMIN not in request.roles:
            self._only(request, one.spec.submitter, *one.participants)
        order = wire.decode_as(_StopOrder, wire.unpack(request.body))
        grace_s = one.spec.stop_grace_s if order.grace_s is None else order.grace_s
        entry = self.site.book.members.get(request.peer)
        by = entry.name if entry else request.peer[:8]
        if one.kept is not None:
            self._kept(one, job.StopRequested(by, grace_s, order.kill))
        elif one.keeper != self.site.node and one.machine.phase not in (
            _BEFORE_START | {HostPhase.ENDED}
        ):
            try:
                answer = await self.site.call(
                    one.keeper, "POST", f"/v1/jobs/{one.spec.id}/stop", request.body
                )
                return wire.decode_as(JobRecord, wire.unpack(answer, max_bytes=wire.BODY_MAX))
            except TransportError:
                # Its lease would end our ranks in 25 s; whoever asked wants it now.
                self._hosted(one, hosted.Stop(grace_s, order.kill, f"stopped by {by}"))
        else:
            self._hosted(one, hosted.Stop(grace_s, order.kill, f"stopped by {by}"))
        return self._record(one)

    # --- handlers: looking -----------------------------------------------------------------------

    async def list_jobs(self, request: Request) -> list[JobRecord]:
        return [self._record(one) for one in self._jobs.values()]

    async def get_job(self, request: Request) -> JobRecord:
        return self._record(self._job(request))

    def logs(self, request: Request) -> AsyncIterator[bytes]:
        """Stream the raw log records of this node's ranks, from where the viewer left off."""
        one = self._job(request)
        first = first_rank(one.spec, one.slot)
        ranks = list(range(first, first + one.spec.slots[one.slot].processes))
        if "ranks" in request.query:
            wanted = set(_numbers(request.query["ranks"]))
            ranks = [rank for rank in ranks if rank in wanted]
        start: dict[int, int] = {}
        for pair in filter(None, request.query.get("from", "").split(",")[:1024]):
            rank, _, seq = pair.partition(":")
            if not (rank.isdigit() and seq.isdigit()):
                raise RemoteProtocolError(f"from={pair!r}: write rank:seq")
            start[int(rank)] = int(seq)
        follow = request.query.get("follow") == "1"
        return self._log_stream(one, ranks, start, follow)

    async def _log_stream(
        self, one: _Job, ranks: list[int], start: dict[int, int], follow: bool
    ) -> AsyncIterator[bytes]:
        # Before the start there is nothing to read yet, but a viewer may already wait.
        while follow and one.machine.phase in _BEFORE_START:
            await asyncio.sleep(shims.POLL_S)
        if one.machine.phase is HostPhase.ENDED and not (one.dir / "status").exists():
            return
        async for data in self.site.shims.follow_logs(one.dir, ranks, start, follow=follow):
            yield data

    async def files(self, request: Request) -> list[OutputFile]:
        one = self._job(request)
        self._readable(request, one)
        if one.manifest is None:
            return []
        first = first_rank(one.spec, one.slot)
        return await asyncio.to_thread(self.site.store.scan_outputs, one.dir, one.manifest, first)

    def file(self, request: Request) -> AsyncIterator[bytes]:
        one = self._job(request)
        self._readable(request, one)
        path = check_path(request.query.get("path", ""))
        rank = int(_number(request, "rank", 0, 1_000_000))
        area = request.query.get("area", "")
        fd = self.site.store.open_output(one.dir, area, rank, path)
        return _pieces(fd, int(_number(request, "offset", 0, 2**62)))

    # --- checks ----------------------------------------------------------------------------------

    def _checked_spec(self, signed: bytes, peer: NodeId) -> tuple[JobSpec, int]:
        envelope = wire.open_envelope(
            signed,
            mesh=self.site.book.mesh,
            key_of=self.site.book.key_of,
            kind="job",
            max_bytes=wire.SPEC_MAX,
        )
        spec = wire.decode_as(JobSpec, envelope.body)
        if envelope.sender != spec.submitter or envelope.audience != spec.id:
            raise RemoteProtocolError("the job was signed by or for somebody else")
        if Role.LAUNCHER not in self.site.book.roles(spec.submitter) or peer != spec.submitter:
            raise NotAllowedError(
                "this member may not launch jobs", hint="ask an admin of the mesh"
            )
        if Role.WORKER not in self.site.book.roles(self.site.node):
            raise NotAllowedError(f"{self.site.name} is no worker")
        if spec.cwd:
            check_path(spec.cwd)
        mine = [i for i, slot in enumerate(spec.slots) if slot.node == self.site.node]
        if len(mine) != 1 or len({slot.node for slot in spec.slots}) != len(spec.slots):
            raise RemoteProtocolError("the job does not name this node once")
        return spec, mine[0]

    def _job(self, request: Request) -> _Job:
        one = self._jobs.get(request.params["id"])
        if one is None:
            raise NotFoundError(f"no job {request.params['id'][:16]!r} on {self.site.name}")
        return one

    @staticmethod
    def _only(request: Request, *allowed: NodeId) -> None:
        if request.peer not in allowed:
            raise NotAllowedError("this member may not do that to this job")

    def _readable(self, request: Request, one: _Job) -> None:
        if Role.ADMIN not in request.roles:
            self._only(request, one.spec.submitter, *one.participants)

    @staticmethod
    def _chunk(request: Request, one: _Job) -> bytes:
        try:
            chunk = bytes.fromhex(request.params["hash"])
        except ValueError:
            chunk = b""
        if chunk not in one.chunks:
            raise RemoteProtocolError("that chunk is not part of the job")
        return chunk

    def _touch(self, one: _Job) -> HostReport:
        now = time.monotonic()
        self.site.reservations.renew(now, one.spec.id)
        self._hosted(one, hosted.Touched())
        return one.machine.report(now)

    # --- machines and their effects --------------------------------------------------------------

    def _hosted(self, one: _Job, event: hosted.Event) -> None:
        for effect in one.machine.handle(time.monotonic(), event):
            match effect:
                case hosted.StartShim(order):
                    self._spawn(self._run_shim(one, order))
                case hosted.StopShim(grace_s):
                    self.site.shims.stop(one.dir, grace_s)
                case hosted.KillShim():
                    self.site.shims.kill(one.dir)
                case hosted.HoldGrant():
                    self.site.reservations.hold(one.spec.id)
                case hosted.FreeGrant():
                    self.site.reservations.release(one.spec.id)
                    self.site.changed()
                case hosted.ReportToKeeper(report):
                    self._spawn(self._report(one, report))
                case _:
                    assert_never(effect)
        self._wake.set()

    def _kept(self, one: _Job, event: job.Event) -> None:
        assert one.kept is not None
        for effect in one.kept.handle(time.monotonic(), event):
            match effect:
                case job.StartHost(node, order):
                    self._spawn(self._ask_host(one, node, "start", order))
                case job.RenewHost(node):
                    self._spawn(self._ask_host(one, node, "lease", self._record(one)))
                case job.StopHost(node, grace_s, kill):
                    self._spawn(self._stop_host(one, node, grace_s, kill))
                case job.RecordChanged(record):
                    if one.record.state is not record.state:
                        log.info("job %s: %s", one.spec.id, record.state)
                    one.record = record
                    self._save(one)
                    if record.state in _OVER:
                        self._spawn(self._tell_end(one))
                case _:
                    assert_never(effect)
        self._wake.set()

    async def _ask_host(self, one: _Job, node: NodeId, verb: str, body: Any) -> None:
        """One keeper's request to a participant; its report or the failure is the next event."""
        if node == self.site.node:
            self._hosted(one, hosted.Start(body) if verb == "start" else hosted.Renewed())
            self._kept(one, job.HostReported(one.machine.report(time.monotonic())))
            return
        await self._asked(one, node, f"/v1/jobs/{one.spec.id}/{verb}", body)

    async def _stop_host(self, one: _Job, node: NodeId, grace_s: float, kill: bool) -> None:
        if node == self.site.node:
            self._hosted(one, hosted.Stop(grace_s, kill))
            self._kept(one, job.HostReported(one.machine.report(time.monotonic())))
            return
        body = {"grace_s": grace_s, "kill": kill}
        await self._asked(one, node, f"/v1/jobs/{one.spec.id}/halt", body)

    async def _asked(self, one: _Job, node: NodeId, path: str, body: Any) -> None:
        try:
            answer = await self.site.call(node, "POST", path, wire.pack(body), deadline_s=CALL_S)
            report = wire.decode_as(HostReport, wire.unpack(answer, max_bytes=wire.SPEC_MAX))
            if report.node != node or report.job != one.spec.id:
                raise RemoteProtocolError("a report may only speak for its sender")
        except GpuLayerError as e:
            self._kept(one, job.ReportFailed(node, e.message))
        else:
            self._kept(one, job.HostReported(report))

    async def halt(self, request: Request) -> HostReport:
        """The keeper ends this node's ranks."""
        one = self._job(request)
        self._only(request, one.keeper)
        order = wire.decode_as(_StopOrder, wire.unpack(request.body))
        self._hosted(one, hosted.Stop(order.grace_s or 0.0, order.kill))
        return one.machine.report(time.monotonic())

    async def _report(self, one: _Job, report: HostReport) -> None:
        if one.keeper == self.site.node:
            if one.kept is not None:
                self._kept(one, job.HostReported(report))
            return
        # Lost reports do no harm: the keeper's next lease call takes the same answer along.
        with contextlib.suppress(GpuLayerError):
            await self.site.call(
                one.keeper, "POST", f"/v1/jobs/{one.spec.id}/report", wire.pack(report)
            )

    async def _tell_end(self, one: _Job) -> None:
        """Give every participant the final record, so that each can answer for the job."""
        body = wire.pack(self._record(one))
        for node in one.participants - {self.site.node}:
            with contextlib.suppress(GpuLayerError):
                await self.site.call(node, "POST", f"/v1/jobs/{one.spec.id}/lease", body)

    async def _run_shim(self, one: _Job, order: GoOrder) -> None:
        try:
            await self.site.shims.start(one.dir, self._shim_config(one, order))
        except (GpuLayerError, OSError) as e:
            self._hosted(one, hosted.ShimLost(f"{self.site.name}: {e}"))
            return
        await self._watch_shim(one)

    async def _watch_shim(self, one: _Job) -> None:
        async for event in self.site.shims.watch(one.dir):
            if isinstance(event, hosted.RankExited):
                tail = await asyncio.to_thread(
                    self.site.shims.tail_lines, one.dir, event.rank, TAIL_LINES
                )
                event = replace(event, tail=tail)
            self._hosted(one, event)

    def _shim_config(self, one: _Job, order: GoOrder) -> shims.ShimConfig:
        spec = one.spec
        others = [host for i, host in enumerate(order.peer_hosts) if i != one.slot]
        interface = self.site.interface_for(others) if len(spec.slots) > 1 else None
        host = HostContext(
            base=self.site.environ,
            job_dir=str(one.dir),
            python=self.site.python,
            cookie=secrets.token_hex(16),
            devices=self.site.devices(),
            interface=interface or "",
        )
        first = first_rank(spec, one.slot)
        ranks = tuple(
            shims.RankCommand(
                rank=first + local,
                argv=rank_argv(spec, host),
                env=rank_environment(spec, one.slot, local, order, host),
                cwd=str(one.dir / "work" / spec.cwd),
            )
            for local in range(spec.slots[one.slot].processes)
        )
        return shims.ShimConfig(
            ranks=ranks,
            cookie=host.cookie,
            grace_s=spec.stop_grace_s,
            secrets=tuple(order.secrets.values()),
        )

    def _record(self, one: _Job) -> JobRecord:
        if one.kept is not None:
            return one.kept.record(time.monotonic())
        return one.record

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a job task failed", exc_info=error)

    # --- disk ------------------------------------------------------------------------------------

    def _save(self, one: _Job) -> None:
        data = wire.pack(one.record)
        if data == one.written:
            return
        fresh = one.dir / "record.tmp"
        try:
            fresh.write_bytes(data)
            fresh.replace(one.dir / "record")
            one.written = data
        except OSError as e:
            log.warning("job %s: the record cannot be written: %s", one.spec.id, e)

    async def _adopt_all(self) -> None:
        root = self.site.home / "jobs"
        if not root.is_dir():
            return
        for folder in sorted(root.iterdir(), key=lambda path: path.stat().st_mtime):
            try:
                self._adopt(folder)
            except (GpuLayerError, OSError) as e:
                log.warning("job folder %s is unusable: %s", folder.name, e)
        self._prune()

    def _adopt(self, folder: Path) -> None:
        """Take over one job of an earlier agent: running where its shim lives, else as history."""
        signed = (folder / "spec").read_bytes()
        envelope = wire.open_envelope(
            signed,
            mesh=self.site.book.mesh,
            key_of=self.site.book.key_of,
            kind="job",
            max_bytes=wire.SPEC_MAX,
        )
        spec = wire.decode_as(JobSpec, envelope.body)
        index = next(i for i, slot in enumerate(spec.slots) if slot.node == self.site.node)
        now = time.monotonic()
        record = JobRecord(spec, JobState.PLACING, spec.slots[0].node)
        if (folder / "record").exists():
            data = (folder / "record").read_bytes()
            record = wire.decode_as(JobRecord, wire.unpack(data, max_bytes=wire.BODY_MAX))
        # A shim that ended meanwhile is taken over as well: its events tell how.
        adopted = record.state not in _OVER and self.site.shims.adopt(folder)
        if adopted:
            machine = hosted.HostedJob.adopt(spec, index, now=now)
        else:
            machine = hosted.HostedJob(spec, index, now=now)
            machine.handle(now, hosted.Release())
        one = self._jobs[spec.id] = _Job(spec, signed, index, folder, machine, record)
        if (folder / "manifest").exists():
            one.manifest = open_manifest((folder / "manifest").read_bytes(), sha256=spec.manifest)
            one.chunks = unique_chunks(one.manifest)
        if adopted:
            slot = spec.slots[index]
            self.site.reservations.adopt(Grant(spec.id, slot.processes, slot.devices))
            self._spawn(self._watch_shim(one))
        if record.state not in _OVER:
            if one.keeper == self.site.node and record.state is not JobState.PLACING:
                one.kept = job.KeptJob.resume(record, now=now)
                self._wake.set()
            elif not adopted:
                cause = "not started" if record.state is JobState.PLACING else "agent was away"
                one.record = replace(record, state=JobState.CANCELLED, cause=cause, ended_age_s=0.0)
                self._save(one)

    def _prune(self) -> None:
        over = [
            one
            for one in self._jobs.values()
            if one.machine.phase is HostPhase.ENDED and self._record(one).state in _OVER
        ]
        for one in over[: max(0, len(over) - JOBS_KEPT)]:
            del self._jobs[one.spec.id]
            self._spawn(asyncio.to_thread(shutil.rmtree, one.dir, ignore_errors=True))
        keep = {chunk for one in self._jobs.values() for chunk in one.chunks}
        self._spawn(asyncio.to_thread(self.site.store.prune, keep=keep))


def _due(at: float | None, now: float) -> bool:
    return at is not None and at <= now


def _number(request: Request, key: str, default: float, most: float) -> float:
    text = request.query.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise RemoteProtocolError(f"{key}={text[:32]!r} is not a number") from None
    if not 0 <= value <= most:
        raise RemoteProtocolError(f"{key}={value} is not in 0..{most:g}")
    return value


def _numbers(text: str) -> list[int]:
    parts = text.split(",")[:1024]
    if not all(part.isdigit() and len(part) < 10 for part in parts):
        raise RemoteProtocolError(f"ranks={text[:64]!r}: write numbers with commas")
    return [int(part) for part in parts]


async def _pieces(fd: int, offset: int) -> AsyncIterator[bytes]:
    with os.fdopen(fd, "rb") as file:
        file.seek(offset)
        while data := await asyncio.to_thread(file.read, FILE_PIECE_BYTES):
            yield data
