"""What members may ask of this node's jobs: rights, checks, answers.

The door has authenticated the peer and knows its roles; whether it may do this to this job is
checked here, in every handler, before anything else. Bodies are decoded and held against the
signed spec here as well. This module does not know how a job is run (`hosting`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from gpulayer_mesh.core import hosted, job, wire
from gpulayer_mesh.core.copies import ranks_of
from gpulayer_mesh.core.jobspec import (
    OVER,
    GoOrder,
    HostPhase,
    HostReport,
    JobId,
    JobRecord,
    JobSpec,
    JobState,
    Outputs,
)
from gpulayer_mesh.core.logrecord import SINCE_MAX_S, TAIL_MAX, LogPick
from gpulayer_mesh.core.manifest import CHUNK_BYTES, check_path, open_manifest
from gpulayer_mesh.core.reach import PORTS, Opened
from gpulayer_mesh.core.restoring import RestoreOrder
from gpulayer_mesh.core.roster import RosterBook
from gpulayer_mesh.core.tickets import RESTART, Standing, Ticket
from gpulayer_mesh.core.types import NodeId, Role
from gpulayer_mesh.errors import (
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    RemoteProtocolError,
    TransportError,
)
from gpulayer_mesh.runtime.door import DoorRequest, Route, Stream
from gpulayer_mesh.runtime.hosting import BEFORE_START, HaltOrder, JobHost
from gpulayer_mesh.runtime.livejob import (
    CHAIN_MAX,
    LiveJob,
    Signed,
    may_launch,
    open_signed,
    slot_of,
)
from gpulayer_mesh.runtime.partwatch import OpenedPath
from gpulayer_mesh.runtime.preflight import FreePorts
from gpulayer_mesh.runtime.restarts import Restarts, stop_by
from gpulayer_mesh.runtime.restoring import Restoring
from gpulayer_mesh.runtime.staging import CHUNK_WAIT_S, StageOrder, Staging
from gpulayer_mesh.runtime.transfer import read_pieces

RANKS_MAX = 1024  # named in one request for logs
TICKET_BYTES = 8 * 1024  # three short texts of at most 1 KiB each, and ids


@dataclass(frozen=True, slots=True)
class _StopOrder:
    grace_s: Annotated[float, Meta(ge=0, le=86400)] | None
    kill: bool
    by: Annotated[str, Meta(max_length=256)] = ""  # who asked the node that passes it on


@dataclass(frozen=True, slots=True)
class _Following:
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class _Release:
    attempt: Annotated[int, Meta(ge=0)] = 0
    going: bool = False


@dataclass(frozen=True, slots=True)
class _JobRef:
    job: JobId


class JobDoor:
    """The job routes of one agent.

    Args:
        missing_imports: which of these modules the ranks' interpreter does not have.
        open_preflight: listen on so many ports.
        check_preflight: connect to other nodes' listeners.
        restoring: brings what the attempt before has made.
        restarts: what follows a job, or ends it where the keeper does not answer.
    """

    def __init__(
        self,
        host: JobHost,
        *,
        ports: FreePorts,
        missing_imports: Callable[[Iterable[str]], Awaitable[list[str]]],
        open_preflight: Callable[[int], Awaitable[Opened]],
        check_preflight: Callable[[Any], Awaitable[Any]],
        restoring: Restoring,
        restarts: Restarts,
    ) -> None:
        self._host = host
        self._site = host.site
        self._ports = ports
        self._missing_imports = missing_imports
        self._open_preflight = open_preflight
        self._check_preflight = check_preflight
        self._restoring = restoring
        self._restarts = restarts

    def routes(self) -> list[Route]:
        # What prepares a job needs no role of its own: a restart is started by one of its nodes.
        # The handlers let in who signed the attempt.
        one, launcher = "/v1/jobs/{id}", Role.LAUNCHER
        large, order = wire.BODY_MAX, wire.SPEC_MAX + 1024
        return [
            Route("GET", "/v1/tickets", self.list_tickets),
            Route("POST", "/v1/tickets/{id}", self.take_ticket, launcher, TICKET_BYTES),
            Route("POST", "/v1/tickets/{id}/drop", self.drop_ticket, launcher, TICKET_BYTES),
            Route("POST", "/v1/tickets/{id}/stop", self.stop_ticket, None, TICKET_BYTES),
            Route("GET", "/v1/jobs", self.list_jobs),
            Route("GET", one, self.get_job),
            Route("POST", one + "/reserve", self.reserve, None, CHAIN_MAX + 1024),
            Route("POST", one + "/release", self.release),
            Route("POST", one + "/manifest", self.manifest, None, large),
            Route("GET", one + "/manifest", self.get_manifest),
            Route("PUT", "/v1/chunks/{hash}", self.put_chunk, None, CHUNK_BYTES),
            Route("GET", one + "/chunks/{hash}", self.get_chunk),
            Route("POST", one + "/stage", self.stage, None, large),
            Route("POST", one + "/restore", self.restore, None, large),
            Route("POST", one + "/preflight/open", self.preflight_open),
            Route("POST", one + "/preflight/check", self.preflight_check, None, order),
            Route("POST", one + "/port", self.free_port),
            Route("POST", one + "/path", self.open_path),
            Route("POST", one + "/go", self.go, None, order),
            Route("POST", one + "/start", self.start, None, order),
            Route("POST", one + "/lease", self.lease, None, large),
            Route("POST", one + "/halt", self.halt),
            Route("POST", one + "/report", self.report, None, order),
            Route("POST", one + "/stop", self.stop),
            Route("POST", one + "/follow", self.follow),
            Route("GET", one + "/logs", self.logs),
            Route("GET", one + "/files", self.files),
            Route("GET", one + "/file", self.file),
        ]

    # --- the queue -------------------------------------------------------------------------------

    async def list_tickets(self, request: DoorRequest) -> tuple[Ticket, ...]:
        return self._host.tickets.all(time.monotonic())

    async def take_ticket(self, request: DoorRequest) -> Standing:
        """Register the ticket of a job that waits, or renew it."""
        ticket = wire.decode_as(Ticket, wire.unpack(request.body))
        if ticket.submitter != request.peer or ticket.job != request.params["id"]:
            raise NotAllowedError("a ticket may only be registered by who submits its job")
        if ticket.number == RESTART:
            raise NotAllowedError("a new job has no place before all others")
        # What others are told is the roster's name, whatever the ticket says.
        ticket = replace(ticket, submitter_name=self._site.book.members[request.peer].name)
        return self._host.take_ticket(ticket)

    async def drop_ticket(self, request: DoorRequest) -> None:
        """The job has its nodes, or its launcher gave up; safe to repeat."""
        job = _job_id(request)
        known = self._host.tickets.find(time.monotonic(), job)
        _only(request, known.submitter if known is not None else request.peer)
        self._host.drop_ticket(job, request.peer)

    async def stop_ticket(self, request: DoorRequest) -> None:
        """Take somebody's job out of the queue; its launcher hears of it when it renews."""
        job = _job_id(request)
        known = self._host.tickets.find(time.monotonic(), job)
        if known is None:
            raise NotFoundError(f"job {job} does not wait on {self._site.name}")
        if Role.ADMIN not in request.roles:
            _only(request, known.submitter)
        by = self._site.book.members[request.peer].name
        self._host.drop_ticket(job, known.submitter, stopped_by=by)

    # --- before the start ------------------------------------------------------------------------

    async def reserve(self, request: DoorRequest) -> HostReport:
        """Grant what a signed job asks of this node."""
        attempt = signed_attempt(request, self._site.book)
        spec = attempt.spec
        self._may_launch(attempt, request.peer)
        if spec.id != request.params["id"]:
            raise RemoteProtocolError("the spec is for another job")
        if spec.cwd:
            check_path(spec.cwd)
        index = slot_of(spec, self._site.node)
        return self._host.reserve(attempt, index).report()

    async def release(self, request: DoorRequest) -> HostReport:
        one = self._started(request)
        order = wire.decode_as(_Release, wire.unpack(request.body))
        if order.attempt >= one.spec.attempt:  # a late word on an earlier try must not end this one
            self._host.release(one, going=order.going)
        return one.report()

    async def manifest(self, request: DoorRequest) -> dict[str, Any]:
        """Take the bundle's manifest; answer which chunks are not here yet."""
        one = self._started(request)
        manifest = await asyncio.to_thread(open_manifest, request.body, sha256=one.spec.manifest)
        one.folder.save_manifest(request.body)
        one.take_manifest(manifest)
        self._host.on_host(one, hosted.StageBegan())
        return {"missing": await asyncio.to_thread(self._site.store.missing, list(one.chunks))}

    async def get_manifest(self, request: DoorRequest) -> bytes:
        """Hand the manifest to a witness, which may have to stage the next attempt."""
        one = self._job(request)
        _only(request, *one.spec.voters)
        if one.manifest is None:
            raise NotFoundError(f"the manifest of job {one.spec.id} is not here")
        return await asyncio.to_thread(one.folder.manifest_bytes)

    async def put_chunk(self, request: DoorRequest) -> None:
        one = self._find(request.query.get("job", ""))
        _only(request, one.starter)
        await self._site.store.put(_chunk(request, one), request.body)
        self._host.touch(one)

    async def get_chunk(self, request: DoorRequest) -> bytes:
        """Hand a chunk to another participant; waits while it is still on its way here."""
        one = self._job(request)
        _only(request, one.starter, *one.participants, *one.spec.voters)
        chunk = _chunk(request, one)
        wait_s = request.number("wait", int(CHUNK_WAIT_S))
        if not await self._site.store.wait_for(chunk, wait_s):
            raise NotFoundError(f"chunk {chunk.hex()[:8]} is not here")
        return await asyncio.to_thread(self._site.store.read, chunk)

    async def stage(self, request: DoorRequest) -> HostReport:
        """Fetch what is missing from the other participants and build the working folder."""
        one = self._started(request)
        order = wire.decode_as(StageOrder, wire.unpack(request.body, max_bytes=wire.BODY_MAX))
        if one.manifest is None:
            raise RemoteProtocolError("stage before the manifest")
        order.check(one.chunks, one.participants)
        staging = Staging(
            order,
            job=one.spec.id,
            node=self._site.node,
            store=self._site.store,
            call=self._site.call,
            progress=lambda: self._host.touch(one),
        )
        async with one.staging:
            if not one.folder.work.exists():
                try:
                    await staging.fetch(one.chunks)
                    await asyncio.to_thread(
                        self._site.store.materialise, one.manifest, one.folder.work
                    )
                except (GpuLayerError, OSError) as e:
                    self._host.on_host(one, hosted.StageFailed(f"{self._site.name}: {e}"))
                    raise
            self._host.on_host(one, hosted.Staged())
        return one.report()

    async def restore(self, request: DoorRequest) -> HostReport:
        """Fetch what the attempt before has made."""
        one = self._started(request)
        order = wire.decode_as(RestoreOrder, wire.unpack(request.body, max_bytes=wire.BODY_MAX))
        if order.job not in {spec.id for spec in one.attempt.history}:
            raise RemoteProtocolError("files may only be restored from an attempt before")
        async with one.staging:
            if one.machine.phase is not HostPhase.STAGED:
                raise RemoteProtocolError(f"job {one.spec.id} is {one.machine.phase}, not staged")
            await self._restoring.fetch(
                order,
                one.path,
                ranks=ranks_of(one.spec, one.slot),
                progress=lambda: self._host.touch(one),
            )
        return one.report()

    async def preflight_open(self, request: DoorRequest) -> Opened:
        one = self._started(request)
        self._host.touch(one)
        missing = await self._missing_imports(one.spec.imports) if one.spec.python else []
        return replace(await self._open_preflight(PORTS), missing=tuple(missing))

    async def preflight_check(self, request: DoorRequest) -> Any:
        self._host.touch(self._started(request))
        body = wire.unpack(request.body, max_bytes=wire.SPEC_MAX)
        return await self._check_preflight(body.get("targets") if isinstance(body, dict) else ())

    async def free_port(self, request: DoorRequest) -> dict[str, Any]:
        self._started(request)
        return {"port": self._ports.take()}

    # --- running ---------------------------------------------------------------------------------

    async def go(self, request: DoorRequest) -> JobRecord:
        """Become the job's keeper and start it everywhere; a repeated request changes nothing."""
        one = self._started(request)
        if one.keeper != self._site.node:
            raise RemoteProtocolError("go belongs to the node of rank 0")
        order = wire.decode_as(GoOrder, wire.unpack(request.body, max_bytes=wire.SPEC_MAX))
        if one.kept is None:
            self._host.on_host(one, hosted.Tick())  # the order may have lain in a queue for long
            if one.machine.phase is not HostPhase.STAGED:
                raise RemoteProtocolError(f"job {one.spec.id} is {one.machine.phase}, not staged")
            self._host.become_keeper(one, order)
            await self._host.sync(one)
        return one.current_record()

    async def start(self, request: DoorRequest) -> HostReport:
        one = self._kept(request)
        order = wire.decode_as(GoOrder, wire.unpack(request.body, max_bytes=wire.SPEC_MAX))
        waited = one.machine.phase is HostPhase.STAGED
        self._host.on_host(one, hosted.Start(order))
        if waited:
            await self._host.sync(one)
        return one.report()

    async def lease(self, request: DoorRequest) -> HostReport:
        """The keeper is there; it brings the newest record and takes this node's report."""
        one = self._kept(request)
        record = wire.decode_as(JobRecord, wire.unpack(request.body, max_bytes=wire.BODY_MAX))
        if record.spec != one.spec:
            raise RemoteProtocolError("the record is of another job")
        self._host.hear_keeper(one, record)
        known = [report.at for report in record.reports if report.node == self._site.node]
        self._host.called(one, max(known, default=0.0))
        return one.report()

    async def open_path(self, request: DoorRequest) -> OpenedPath:
        """Listen for a moment, for a participant whose ranks get no answer from here."""
        _only(request, *self._job(request).participants)
        opened = await self._open_preflight(1)
        return OpenedPath(opened.ports[0])

    async def halt(self, request: DoorRequest) -> HostReport:
        """The keeper ends this node's ranks."""
        one = self._kept(request)
        order = wire.decode_as(HaltOrder, wire.unpack(request.body))
        self._host.called(one, order.heard, hosted.Stop(order.grace_s, order.kill))
        return one.report()

    async def report(self, request: DoorRequest) -> None:
        """A participant tells the keeper of a change at once."""
        one = self._job(request)
        _only(request, *one.participants)
        report = wire.decode_as(HostReport, wire.unpack(request.body, max_bytes=wire.SPEC_MAX))
        if report.node != request.peer or report.job != one.spec.id:
            raise RemoteProtocolError("a report may only speak for its sender")
        if one.kept is not None:
            self._host.on_keeper(one, job.HostReported(report))

    async def stop(self, request: DoorRequest) -> JobRecord:
        """Stop a job; a participant or witness that is not the keeper passes the request on."""
        watched = self._restarts.watched_job(request.params["id"])
        if watched is not None:
            return await self._stop_watched(request, watched)
        one = self._job(request)
        stop = self._asked_stop(request, *one.attempt.history, one.spec)
        if one.kept is not None:
            self._host.on_keeper(one, job.StopRequested(stop.by, stop.grace_s, stop.kill))
            return one.current_record()
        begun = one.machine.phase not in BEFORE_START and one.record.state not in OVER
        if not begun or one.keeper == self._site.node:
            self._host.on_host(one, stop)
            return one.current_record()
        if one.record.state is not JobState.RESTARTING:  # else it is known to be lost
            answer = await self._stop_by_keeper(one.spec, stop)
            if answer is not None:
                return answer
        await self._restarts.stop_alone(one.spec, stop)
        return one.current_record()

    async def _stop_watched(self, request: DoorRequest, record: JobRecord) -> JobRecord:
        stop = self._asked_stop(request, record.spec)
        if record.state in OVER:
            return record
        answer = await self._stop_by_keeper(record.spec, stop)
        if answer is not None:
            return answer
        await self._restarts.stop_alone(record.spec, stop)
        return self._restarts.watched_job(record.spec.id) or record

    def _asked_stop(self, request: DoorRequest, *attempts: JobSpec) -> hosted.Stop:
        """Return the stop that a member asks for, if it may: in its own name, or passed on.

        Args:
            attempts: those up to the one that is to end.
        """
        spec = attempts[-1]
        passing = {slot.node for slot in spec.slots}
        passing.update(*(one.voters for one in attempts))
        if Role.ADMIN not in request.roles:
            _only(request, spec.submitter, *passing)
        order = wire.decode_as(_StopOrder, wire.unpack(request.body))
        name = self._site.book.members[request.peer].name
        by = order.by if order.by and request.peer in passing else name
        grace_s = spec.stop_grace_s if order.grace_s is None else order.grace_s
        return stop_by(by, grace_s, kill=order.kill)

    async def _stop_by_keeper(self, spec: JobSpec, stop: hosted.Stop) -> JobRecord | None:
        """Pass a stop on; None where the keeper does not answer.

        Its lease would end the ranks in 19 s, but whoever asked wants it now.
        """
        path = f"/v1/jobs/{spec.id}/stop"
        body = wire.pack(_StopOrder(stop.grace_s, stop.kill, stop.by))
        keeper = spec.slots[0].node
        try:
            answer = await self._site.call(keeper, "POST", path, body, deadline_s=job.CALL_S)
            return wire.decode_as(JobRecord, wire.unpack(answer, max_bytes=wire.BODY_MAX))
        except (TransportError, NotFoundError):
            return None

    # --- looking ---------------------------------------------------------------------------------

    async def list_jobs(self, request: DoorRequest) -> list[JobRecord]:
        own = [one.current_record() for one in self._host.jobs.values()]
        return own + self._restarts.watched()

    async def get_job(self, request: DoorRequest) -> JobRecord:
        watched = self._restarts.watched_job(request.params["id"])
        return self._job(request).current_record() if watched is None else watched

    async def follow(self, request: DoorRequest) -> JobRecord:
        """Answer who follows a job on the machine that submitted it, and let the keeper know."""
        one = self._host.jobs.get(request.params["id"])
        spec = (await self.get_job(request)).spec
        _only(request, spec.submitter, *(slot.node for slot in spec.slots), *spec.voters)
        word = wire.decode_as(_Following, wire.unpack(request.body))
        keeper = spec.slots[0].node
        if one is not None and one.kept is not None:
            self._host.on_keeper(one, job.Followed(word.leaving))
        elif request.peer == spec.submitter and keeper != self._site.node:
            path = f"/v1/jobs/{spec.id}/follow"  # perhaps only the launcher does not reach it
            try:
                await self._site.call(keeper, "POST", path, request.body, deadline_s=job.RENEW_S)
            except GpuLayerError:
                if word.leaving:
                    raise
        return await self.get_job(request)

    async def logs(self, request: DoorRequest) -> Stream:
        """Stream the raw log records of this node's ranks, from where the viewer left off."""
        one = self._job(request)
        ranks = range(one.first_rank, one.first_rank + one.spec.slots[one.slot].processes)
        wanted = set(_numbers(request.query["ranks"]) if "ranks" in request.query else ranks)
        start: dict[int, int] = {}
        for pair in filter(None, request.query.get("from", "").split(",")[:RANKS_MAX]):
            rank, _, seq = pair.partition(":")
            if not (_is_number(rank) and _is_number(seq)):
                raise RemoteProtocolError(f"from={pair[:64]!r}: write rank:seq")
            start[int(rank)] = int(seq)
        follow = request.query.get("follow") == "1"
        pick = _pick(request)
        return Stream(self._log_pieces(one, [r for r in ranks if r in wanted], start, follow, pick))

    async def _log_pieces(
        self, one: LiveJob, ranks: list[int], start: dict[int, int], follow: bool, pick: LogPick
    ) -> AsyncIterator[bytes]:
        if follow:  # there is nothing to read yet, but a viewer may already wait
            await one.begun.wait()  # without a start the lease ends in 30 s, and this with it
        if one.ended and not (one.path / "status").exists():
            return
        read = self._site.shims.follow_logs
        async for data in read(one.path, ranks, start, follow=follow, pick=pick):
            yield data

    async def files(self, request: DoorRequest) -> Outputs:
        """List what the job has made on this node."""
        one = self._readable(request)
        if one.manifest is None:
            return Outputs()
        scan = self._site.store.scan_outputs
        return await asyncio.to_thread(scan, one.path, one.manifest, one.first_rank)

    async def file(self, request: DoorRequest) -> Stream:
        one = self._readable(request)
        rank = request.number("rank", 1_000_000)
        offset = request.number("offset", 2**62)
        area, path = request.query.get("area", ""), request.query.get("path", "")
        store = self._site.store
        # With its hash, also what the job has replaced meanwhile.
        fd = store.open_pinned(one.path, request.query.get("sha256", ""))
        if fd is None:
            fd = store.open_output(one.path, area, rank, path)
        return Stream(read_pieces(lambda: fd, offset))

    # --- rights ----------------------------------------------------------------------------------

    def _may_launch(self, attempt: Signed, peer: NodeId) -> None:
        may_launch(attempt, self._site.book)
        if peer != attempt.signer:
            raise NotAllowedError("only who signed a job may start it")
        if Role.WORKER not in self._site.book.roles(self._site.node):
            raise NotAllowedError(f"{self._site.name} is no worker")

    def _find(self, ident: str) -> LiveJob:
        one = self._host.jobs.get(ident)
        if one is None:
            raise NotFoundError(f"no job {ident[:16]!r} on {self._site.name}")
        return one

    def _job(self, request: DoorRequest) -> LiveJob:
        return self._find(request.params["id"])

    def _started(self, request: DoorRequest) -> LiveJob:
        one = self._job(request)
        _only(request, one.starter)
        return one

    def _kept(self, request: DoorRequest) -> LiveJob:
        one = self._job(request)
        _only(request, one.keeper)
        return one

    def _readable(self, request: DoorRequest) -> LiveJob:
        one = self._job(request)
        if not self._restarts.may_read(one.spec.id, request.peer, request.roles):
            raise NotAllowedError("this member may not do that to this job")
        return one


def _pick(request: DoorRequest) -> LogPick:
    since_s = request.number("since_ms", int(SINCE_MAX_S * 1000)) / 1000
    tail = request.number("tail", TAIL_MAX)
    return LogPick(
        stderr=request.query.get("stderr") == "1",
        since_s=since_s if "since_ms" in request.query else None,
        tail=tail if "tail" in request.query else None,
    )


def signed_attempt(request: DoorRequest, book: RosterBook) -> Signed:
    """Open the signed job that a request brings along.

    Raises:
        RemoteProtocolError: there is none, or as `open_signed`.
    """
    body = wire.unpack(request.body, max_bytes=CHAIN_MAX + 1024)
    chain = body.get("spec") if isinstance(body, dict) else None
    if not isinstance(chain, bytes):
        raise RemoteProtocolError("the signed job is missing")
    return open_signed(chain, book)


def _only(request: DoorRequest, *allowed: NodeId) -> None:
    if request.peer not in allowed:
        raise NotAllowedError("this member may not do that to this job")


def _job_id(request: DoorRequest) -> str:
    return wire.decode_as(_JobRef, {"job": request.params["id"]}).job


def _chunk(request: DoorRequest, one: LiveJob) -> bytes:
    try:
        chunk = bytes.fromhex(request.params["hash"])
    except ValueError:
        chunk = b""
    if chunk not in one.chunks:
        raise RemoteProtocolError("that chunk is not part of the job")
    return chunk


def _numbers(text: str) -> list[int]:
    parts = text.split(",")[:RANKS_MAX]
    if not all(map(_is_number, parts)):
        raise RemoteProtocolError(f"ranks={text[:64]!r}: write numbers with commas")
    return [int(part) for part in parts]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19  # 2**63 has 19 digits
