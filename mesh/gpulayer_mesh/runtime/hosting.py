"""Jobs on this node: the ranks it hosts, and the records of jobs whose rank 0 is here.

The shell around `core.hosted` and `core.job`: events go in, effects are carried out on the shim,
the reservations and the other participants. Decisions are theirs. What an earlier agent left is
taken over at the start. This module does not know requests or who may ask (`jobdoor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol, assert_never

from msgspec import Meta

from gpulayer_mesh.core import hosted, job, restarts, retention, wire
from gpulayer_mesh.core.devicecare import unfit
from gpulayer_mesh.core.failure import ended_well
from gpulayer_mesh.core.jobspec import (
    OVER,
    Failure,
    GoOrder,
    HostPhase,
    HostReport,
    JobKind,
    JobRecord,
    JobSpec,
    JobState,
    RankState,
)
from gpulayer_mesh.core.lease import Reservations
from gpulayer_mesh.core.ownfiles import FUNCTION_HOPELESS, FUNCTION_RESULT
from gpulayer_mesh.core.rankenv import HostContext, rank_argv, rank_environment, world_size
from gpulayer_mesh.core.roster import RosterBook
from gpulayer_mesh.core.tickets import RESTART, Standing, Ticket, Tickets
from gpulayer_mesh.core.types import Addresses, Device, Grant, NodeId, Role
from gpulayer_mesh.errors import (
    GpuLayerError,
    PlacementBusyError,
    Refusal,
    RemoteProtocolError,
)
from gpulayer_mesh.files import replace_file
from gpulayer_mesh.runtime.background import Background
from gpulayer_mesh.runtime.livejob import (
    JobFolder,
    LiveJob,
    Signed,
    lease_clock,
    open_signed,
    slot_of,
)
from gpulayer_mesh.runtime.partwatch import PartWatch
from gpulayer_mesh.runtime.peers import PeerCall
from gpulayer_mesh.runtime.shims import RankCommand, ShimConfig, ShimRunner
from gpulayer_mesh.runtime.store import ChunkStore

log = logging.getLogger("gpulayer.jobs")

JOBS_LIVE_MAX = 256  # limit of grants in a capabilities record
TAIL_LINES = hosted.TAIL_LINES

BEFORE_START = frozenset({HostPhase.RESERVED, HostPhase.STAGING, HostPhase.STAGED})
_GONE = ".gone-"  # in front of the names of folders that are being removed
SYNC_S = 3.0  # a disk that is busy with checkpoints may take longer, and the job goes on meanwhile
SAVE_AGAIN_S = 60.0  # between tries to save a record on a full disk
# Between questions of a part that is over to the keeper. The first ones come soon: while a job may
# be restarted, a machine that was away and is back takes nothing else.
ASK_S = (0.5, 5.0)


@dataclass(frozen=True, slots=True)
class HaltOrder:
    """The keeper ends a node's ranks."""

    grace_s: Annotated[float, Meta(ge=0, le=86400)]
    kill: bool
    heard: float  # as `hosted.Renewed.proof`


class Care(Protocol):
    """What looks at devices before and after their jobs, as `capabilities.Machine` does."""

    async def ranks_start(self, devices: Collection[int]) -> Mapping[str, int]:
        """Note what is in use on them."""

    def adopt(self, before: Mapping[str, int]) -> None:
        """Take over what `ranks_start` returned to an earlier agent."""

    async def ranks_gone(self, job: str, devices: Collection[int]) -> None:
        """Return when the job's grant may end."""


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
    shims: ShimRunner
    call: PeerCall
    devices: Callable[[], tuple[Device, ...]]
    care: Care
    addresses: Callable[[NodeId], Addresses]  # of any member; at most 8
    interface_for: Callable[[Iterable[str]], str | None]
    cpus_near: Callable[[int | None], tuple[int, ...]]  # a NUMA node, see `gpus.cpus_near`
    changed: Callable[[], None]  # grants changed: tell the mesh


class Restarting(Protocol):
    """What sees to the next attempts of jobs that may be restarted."""

    def part_began(self, one: LiveJob) -> None:
        """Ranks run here."""

    def part_ended(self, one: LiveJob) -> None: ...

    def begin(self, one: LiveJob, after_s: float) -> None:
        """Start the next attempt, as the keeper; as `job.Restart`."""

    def give_up(self, one: LiveJob) -> None:
        """Nobody wants it any more."""

    def stand_in(self, one: LiveJob) -> None:
        """See to it in the keeper's place, which fell silent."""

    def ended(self, one: LiveJob) -> None:
        """The keeper, another node, says that a job has ended, and no attempt follows it."""

    def job_over(self, one: LiveJob, record: JobRecord) -> None:
        """A job that was kept here has ended for good, or another attempt follows it."""

    def superseded(self, spec: JobSpec) -> bool:
        """Whether this node agreed to a later attempt, so that it takes no part in this one."""

    def chunks(self) -> Collection[bytes]:
        """What of the store is needed for next attempts."""

    def forget(self, old: Collection[str]) -> None:
        """These jobs are forgotten; what else is too old may go as well."""


class JobHost:
    """All jobs of one agent. `adopt` comes first; then `run`, and the rest may be called.

    Args:
        restarting: made of the host.
    """

    def __init__(self, site: Site, restarting: Callable[[JobHost], Restarting]) -> None:
        self.site = site
        self._restarting = restarting(self)
        self.jobs: dict[str, LiveJob] = {}  # read only for others
        self.tickets = Tickets(site.name)  # read only for others
        self._queue_file = site.home / "queue"
        self._queue_saved: tuple[str, ...] = ()  # its jobs, in order
        self._told = ""  # the last reservation in the log
        self._wake = asyncio.Event()
        self._background = Background(log)

    async def run(self) -> None:
        """Serve the machines' timers for ever."""
        self._background.spawn(self._save_again())
        try:
            while True:
                self._wake.clear()
                for one in list(self.jobs.values()):
                    if _due(one.machine.next_timeout(), one.clock()):
                        self.on_host(one, hosted.Tick())
                    if one.kept is not None and _due(one.kept.next_timeout(), one.clock()):
                        self.on_keeper(one, job.Tick())
                for grant in self.site.reservations.expire(time.monotonic()):
                    log.info("job %s: the reservation ran out", grant.job)
                    self.site.changed()
                self._save_tickets()  # an agent that comes later must not take up what ran out
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause()):
                        await self._wake.wait()
        finally:
            await self._background.close()

    async def _save_again(self) -> None:
        """Save the records that the disk has refused, for an agent that comes after this."""
        while True:
            await asyncio.sleep(SAVE_AGAIN_S)
            for one in self.jobs.values():
                if one.folder.unsaved:
                    one.folder.save_record(one.current_record())

    def enforce(self) -> None:
        """End, without grace, what the roster no longer covers; call it when it has changed."""
        book = self.site.book
        self._keep_tickets()
        for one in list(self.jobs.values()):
            gone = self.site.node if self.site.node not in book else one.spec.submitter
            if gone not in book and not one.ended:
                who = "this node" if gone == self.site.node else one.spec.submitter_name
                self.on_host(one, hosted.Stop(0.0, True, f"{who} was removed from the mesh"))
            elif one.keeper not in book and not one.ended:
                name = one.spec.slots[0].name
                self.on_host(one, hosted.Stop(0.0, True, f"{name} was removed from the mesh"))
            for node in one.participants if one.kept is not None else ():
                if node not in book:
                    self.on_keeper(one, job.HostRemoved(node))

    def take_ticket(self, ticket: Ticket) -> Standing:
        """Register or renew a checked ticket.

        Raises:
            PlacementBusyError, RemoteProtocolError: as `Tickets.take`.
        """
        standing = self.tickets.take(time.monotonic(), ticket)
        self._save_tickets()
        return replace(standing, grants=self.site.reservations.grants)

    def drop_ticket(self, job: str, submitter: NodeId, *, stopped_by: str = "") -> None:
        """Take a member's ticket out of the queue."""
        self.tickets.drop(time.monotonic(), job, submitter, stopped_by=stopped_by)
        self._save_tickets()

    def _keep_for_next(self, one: LiveJob) -> None:
        """Let nobody have what a failed attempt had before the next one was there to ask for it."""
        ranks = one.report().ranks
        failed = any(not ended_well(rank) for rank in ranks if rank.state is RankState.EXITED)
        if one.may_be_restarted and failed and one.record.state not in OVER:
            with contextlib.suppress(PlacementBusyError):  # too many wait
                self.take_ticket(restarts.place_of_next(one.spec))

    def free_from_next(self, spec: JobSpec) -> None:
        """No attempt follows this one."""
        ticket = restarts.place_of_next(spec)
        if self.tickets.find(time.monotonic(), ticket.job) is not None:
            self.drop_ticket(ticket.job, ticket.submitter)

    def _keep_tickets(self) -> None:
        book = self.site.book
        self.tickets.keep([node for node in book.members if Role.LAUNCHER in book.roles(node)])
        self._save_tickets()

    def _save_tickets(self) -> None:
        """Keep who waits for the next agent; a full disk only costs the order after a restart."""
        waiting = self.tickets.all(time.monotonic())
        jobs = tuple(ticket.job for ticket in waiting)
        if jobs == self._queue_saved:
            return
        self._queue_saved = jobs
        self._wake.set()  # the first to run out may be another one now
        try:
            replace_file(self._queue_file, wire.pack(waiting))
        except OSError as e:
            log.warning("who waits here cannot be written: %s", e)

    def reserve(self, attempt: Signed, slot_index: int) -> LiveJob:
        """Grant what a checked job asks of this node; asking again only renews.

        Raises:
            PlacementError, PlacementBusyError: not (now), or others came first.
            RemoteProtocolError: the job was here before.
            GpuLayerError: the disk refuses.
        """
        spec = attempt.spec
        known = self.jobs.get(spec.id)
        if known is not None and known.attempt.chain == attempt.chain and not known.ended:
            self.touch(known)
            return known
        now = time.monotonic()
        if known is not None:
            newer = spec.attempt > known.spec.attempt and attempt.signer == known.starter
            if known.machine.phase is not HostPhase.RESERVED or not newer:
                raise RemoteProtocolError(f"job {spec.id} was here before")
            self.release(known)  # of a try whose launcher could not take it back
        if self._restarting.superseded(spec):
            raise RemoteProtocolError(f"{self.site.name} agreed to an attempt after {spec.id}")
        number = RESTART if spec.restart else None
        self.tickets.admit(now, spec.id, spec.submitter, number=number)
        live = sum(not one.ended for one in self.jobs.values())
        if live >= JOBS_LIVE_MAX:
            reason = f"holds {live} jobs already"
            raise PlacementBusyError(
                f"{self.site.name} {reason}", refusals=(Refusal(self.site.name, reason, False),)
            )
        slot = spec.slots[slot_index]
        reasons = {device.index: unfit(device) for device in self.site.devices()}
        self.site.reservations.grant(
            now,
            spec.id,
            processes=slot.processes,
            devices=slot.devices,
            owner=spec.submitter_name,
            unfit={index: why for index, why in reasons.items() if why is not None},
        )
        try:
            folder = JobFolder.create(self.site.home / "jobs" / spec.id, attempt.chain)
        except GpuLayerError:
            self.site.reservations.release(spec.id)
            raise
        machine = hosted.HostedJob(spec, slot_index, now=lease_clock(spec))
        record = JobRecord(spec, JobState.PLACING, spec.slots[0].node)
        one = LiveJob(attempt, slot_index, folder, machine, record)
        self.jobs[spec.id] = one
        self._prune()
        self._wake.set()
        self.site.changed()
        told = f"job {spec.id}: reserved {slot.processes} process(es) for {spec.submitter_name}"
        if told != self._told:  # one that lacks votes, or another node, tries it every few seconds
            self._told = told
            log.info("%s", told)
        return one

    def touch(self, one: LiveJob) -> None:
        """The launcher still prepares this job."""
        self.site.reservations.renew(time.monotonic(), one.spec.id)
        self.on_host(one, hosted.Touched())

    def release(self, one: LiveJob, *, going: bool = False) -> None:
        """The launcher gives up before the start; as `hosted.Release`."""
        self.on_host(one, hosted.Release(going))

    def become_keeper(self, one: LiveJob, order: GoOrder) -> None:
        """Hold the job's record from now on, and start it everywhere."""
        one.kept = job.KeptJob(one.spec, now=one.clock())
        self.on_keeper(one, job.Go(order))

    def called(
        self, one: LiveJob, heard: float = -math.inf, event: hosted.Event | None = None
    ) -> None:
        """The keeper spoke, and has what this node reported at `heard`, by this node's clock."""
        self.on_host(one, hosted.Renewed(heard))
        if event is not None:
            self.on_host(one, event)

    def hear_keeper(self, one: LiveJob, record: JobRecord) -> None:
        """Take the keeper's word on a job."""
        self.take_record(one, record)
        if record.state in OVER and not record.successor:
            self._restarting.ended(one)

    def take_record(self, one: LiveJob, record: JobRecord) -> None:
        """Keep the newest word on a job; who was lost may say later how it really ended."""
        if one.record.state in OVER and record.state not in OVER:
            return
        if record.state in OVER:  # the next attempt, if there is one, has what it needs
            self.free_from_next(one.spec)
        one.record, one.recorded = record, time.monotonic()
        one.folder.save_record(record)
        if record.state in OVER:
            self._background.spawn(self.sync(one))

    async def sync(self, one: LiveJob) -> None:
        """Wait until a power cut cannot undo what is known of a job, but for no long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SYNC_S):
                await asyncio.to_thread(one.folder.sync)

    def cancelled(self, one: LiveJob, cause: str) -> None:
        """A job of which no keeper will ever say how it ended."""
        record = replace(
            one.current_record(),
            state=JobState.CANCELLED,
            failure=None,
            cause=cause,
            waiting="",
            ended_age_s=0.0,
        )
        self.take_record(one, record)

    # --- machines and their effects --------------------------------------------------------------

    def on_host(self, one: LiveJob, event: hosted.Event) -> None:
        """Tell this node's part of a job what happened."""
        reserved = one.machine.phase is HostPhase.RESERVED
        for effect in one.machine.handle(one.clock(), event):
            match effect:
                case hosted.StartShim(order):
                    if one.spec.restart:
                        self.drop_ticket(one.spec.id, one.spec.submitter)
                    if one.may_be_restarted:
                        one.secrets = order.secrets  # for the next attempt, in memory only
                        self._restarting.part_began(one)
                    self._background.spawn(self._run_shim(one, order))
                case hosted.StopShim(grace_s, reason):
                    self.site.shims.stop(one.path, grace_s, reason)
                case hosted.KillShim(reason):
                    self.site.shims.kill(one.path, reason)
                case hosted.HoldGrant():
                    self.site.reservations.hold(one.spec.id)
                case hosted.FreeGrant():
                    self._keep_for_next(one)
                    self._end_grant(one)
                    self._restarting.part_ended(one)
                    if one.machine.keeper_lost:
                        self._keeper_silent(one)
                    elif one.kept is None and any(
                        rank.state is RankState.EXITED for rank in one.report().ranks
                    ):
                        self.await_word(one)
                    elif one.kept is None and one.record.state is JobState.PLACING:
                        self._came_to_nothing(one)
                case hosted.ReportToKeeper(report):
                    self._background.spawn(self._report(one, report))
                case _:
                    assert_never(effect)
        if one.machine.phase not in BEFORE_START:
            one.begun.set()
        if reserved and one.ended and isinstance(event, hosted.Release | hosted.Tick):
            self._drop_reservation(one)
        self._wake.set()

    def _end_grant(self, one: LiveJob) -> None:
        """Free what a part that is over had: devices on which ranks ran, after a look at them."""
        devices = one.machine.slot.devices
        if devices and any(rank.state is RankState.EXITED for rank in one.report().ranks):
            self._background.spawn(self._free_devices(one.spec.id, devices))
        else:
            self.site.reservations.release(one.spec.id)
            self.site.changed()

    async def _free_devices(self, ident: str, devices: Collection[int]) -> None:
        try:
            await self.site.care.ranks_gone(ident, devices)
        finally:
            self.site.reservations.release(ident)
            self.site.changed()

    def _came_to_nothing(self, one: LiveJob) -> None:
        """Nobody else will say that a job has not started; of a next attempt nobody need know."""
        if one.spec.restart:
            self._drop_reservation(one)
        else:
            self.cancelled(one, one.machine.problem)

    def _drop_reservation(self, one: LiveJob) -> None:
        """Forget a reservation that came to nothing: it was no job yet, lists must not fill up with
        the tries of one that waits, and its next try has the same id."""
        if self.jobs.pop(one.spec.id, None) is not None:
            self._remove(one.path)

    def _keeper_silent(self, one: LiveJob) -> None:
        self._keeper_lost(one, f"it did not answer for {hosted.KEEPER_SILENT_S:g} s")

    def _keeper_lost(self, one: LiveJob, why: str) -> None:
        """Answer viewers in the keeper's place: rank 0 is gone, so the job has failed, unless it
        was stopped.

        Should the keeper come back, its own word replaces this one.
        """
        if one.machine.stopped_by:
            self.cancelled(one, f"stopped by {one.machine.stopped_by}")
            return
        name = one.spec.slots[0].name
        follows = one.may_be_restarted
        record = replace(
            one.current_record(),
            state=JobState.RESTARTING if follows else JobState.FAILED,
            failure=Failure(None, name, 1, f"node of rank 0 lost: {why}"),
            ended_age_s=None if follows else 0.0,
        )
        log.warning("job %s: %s", one.spec.id, why)
        self.take_record(one, record)
        if follows:
            self._restarting.stand_in(one)

    def await_word(self, one: LiveJob) -> None:
        """Ask the keeper of a job that is over here how it ended; it is not lost after all."""
        self._background.spawn(self._await_word(one))

    async def _await_word(self, one: LiveJob) -> None:
        """Ask the keeper how the job ended, which asks nothing more of a part that is over.

        One that stays silent or is no member is lost, whatever our own ranks came to.
        """
        path = f"/v1/jobs/{one.spec.id}"
        pause_s = ASK_S[0]
        while one.record.state not in OVER:
            if one.keeper not in self.site.book:
                self._keeper_lost(one, "it was removed from the mesh")
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, ASK_S[1])
            try:
                answer = await self.site.call(one.keeper, "GET", path, deadline_s=job.CALL_S)
                record = wire.decode_as(JobRecord, wire.unpack(answer, max_bytes=wire.BODY_MAX))
            except GpuLayerError:
                if one.clock() - one.machine.heard >= hosted.KEEPER_SILENT_S:
                    self._keeper_silent(one)
                    return
                continue
            self.called(one)
            if record.spec == one.spec and one.record.state not in OVER:
                self.hear_keeper(one, record)

    def on_keeper(self, one: LiveJob, event: job.Event) -> None:
        """Tell the keeper's machine of a job what happened."""
        assert one.kept is not None
        for effect in one.kept.handle(one.clock(), event):
            match effect:
                case job.StartHost(node, order):
                    start = hosted.Start(order)
                    self._background.spawn(self._ask(one, node, "start", order, start))
                case job.RenewHost(node):
                    record = one.current_record()
                    self._background.spawn(self._ask(one, node, "lease", record, None))
                case job.StopHost(node, grace_s, kill, heard):
                    body = HaltOrder(grace_s, kill, heard)
                    stop = hosted.Stop(grace_s, kill)
                    self._background.spawn(self._ask(one, node, "halt", body, stop))
                case job.Restart(after_s):
                    self._restarting.begin(one, after_s)
                case job.GiveUpRestart():
                    self._restarting.give_up(one)
                case job.RecordChanged(record):
                    if one.record.state is not record.state:
                        log.info("job %s: %s", one.spec.id, record.state)
                    self.take_record(one, record)
                    if record.state in OVER:
                        self._restarting.job_over(one, record)
                        self._background.spawn(self._tell_end(one))
                case _:
                    assert_never(effect)
        self._wake.set()

    def _pause(self) -> float:
        """Return the seconds until a timer is due."""
        now = time.monotonic()
        due = [(self.site.reservations.next_timeout(), now), (self.tickets.next_timeout(), now)]
        for one in self.jobs.values():
            now = one.clock()
            due.append((one.machine.next_timeout(), now))
            if one.kept is not None:
                due.append((one.kept.next_timeout(), now))
        return max(0.0, min((at - now for at, now in due if at is not None), default=3600.0))

    # --- the other participants ------------------------------------------------------------------

    async def _ask(
        self, one: LiveJob, node: NodeId, verb: str, body: object, event: hosted.Event | None
    ) -> None:
        """One keeper's call to a participant; its report, or the failure, is the next event.

        Args:
            event: the same, for this node itself; None only renews.
        """
        assert one.kept is not None
        asked = one.clock()
        if node == self.site.node:
            self.called(one, one.kept.proof(asked), event)
            self.on_keeper(one, job.HostReported(one.report(), asked))
            return
        try:
            path = f"/v1/jobs/{one.spec.id}/{verb}"
            answer = await self.site.call(
                node, "POST", path, wire.pack(body), deadline_s=job.CALL_S
            )
            report = wire.decode_as(HostReport, wire.unpack(answer, max_bytes=wire.SPEC_MAX))
            if report.node != node or report.job != one.spec.id:
                raise RemoteProtocolError("a report may only speak for its sender")
        except GpuLayerError as e:
            self.on_keeper(one, job.ReportFailed(node, e.message))
        else:
            self.on_keeper(one, job.HostReported(report, asked))

    async def _report(self, one: LiveJob, report: HostReport) -> None:
        if one.keeper == self.site.node:
            if one.kept is not None:
                self.on_keeper(one, job.HostReported(report))
            return
        # Lost reports do no harm: the keeper's next lease call takes the same answer along.
        with contextlib.suppress(GpuLayerError):
            path = f"/v1/jobs/{one.spec.id}/report"
            await self.site.call(one.keeper, "POST", path, wire.pack(report))

    async def _tell_end(self, one: LiveJob) -> None:
        """Give every participant the final record, so that each can answer for the job."""
        body = wire.pack(one.current_record())
        path = f"/v1/jobs/{one.spec.id}/lease"
        # At once, not in a row: one that cannot be reached must not keep the others waiting.
        calls = (
            self.site.call(node, "POST", path, body) for node in one.participants - {self.site.node}
        )
        await asyncio.gather(*calls, return_exceptions=True)

    # --- the shim --------------------------------------------------------------------------------

    async def _run_shim(self, one: LiveJob, order: GoOrder) -> None:
        if devices := one.machine.slot.devices:
            one.folder.save_before(await self.site.care.ranks_start(devices))
        try:
            if order.secrets and one.may_be_restarted:
                await asyncio.to_thread(one.folder.note_secrets)
            await self.site.shims.start(one.path, self._shim_config(one, order), one.until)
        except (GpuLayerError, OSError) as e:
            self.on_host(one, hosted.ShimLost(f"{self.site.name}: {e}"))
            return
        await self._watch_shim(one)

    async def _watch_shim(self, one: LiveJob) -> None:
        if world_size(one.spec) > 1:  # else nobody waits for it
            self._background.spawn(self._watch_for_hangs(one))
        async for event in self.site.shims.watch(one.path, one.until):
            if isinstance(event, hosted.RankExited):
                tail = await asyncio.to_thread(
                    self.site.shims.tail_lines, one.path, event.rank, TAIL_LINES
                )
                event = replace(event, tail=tail)
                if one.spec.kind is JobKind.FUNCTION and not event.stopped:
                    event = _with_outcome(event, one.path / "out" / f"rank{event.rank}")
            self.on_host(one, event)

    async def _watch_for_hangs(self, one: LiveJob) -> None:
        """End the ranks of this node when they wait for what cannot come."""
        reason = await PartWatch(one, self.site.call, self.site.addresses).run()
        if reason and one.machine.phase is HostPhase.RUNNING:
            log.warning("job %s: %s", one.spec.id, reason)
            self.on_host(one, hosted.Stop(job.FAILURE_GRACE_S, reason=reason))

    def _shim_config(self, one: LiveJob, order: GoOrder) -> ShimConfig:
        spec = one.spec
        others = [host for i, host in enumerate(order.peer_hosts) if i != one.slot]
        interface = self.site.interface_for(others) if len(spec.slots) > 1 else None
        host = HostContext(
            base=self.site.environ,
            job_dir=str(one.path),
            python=self.site.python,
            cookie=secrets.token_hex(16),
            devices=self.site.devices(),
            interface=interface or "",
        )
        ranks = tuple(
            RankCommand(
                rank=one.first_rank + local,
                argv=rank_argv(spec, host),
                env=rank_environment(spec, one.slot, local, order, host),
                cwd=str(one.folder.work / spec.cwd),
                python=spec.python,
                cpus=self._cpus_near(one.machine.slot.devices[local : local + 1]),
            )
            for local in range(spec.slots[one.slot].processes)
        )
        return ShimConfig(
            ranks=ranks,
            cookie=host.cookie,
            grace_s=spec.stop_grace_s,
            raised_grace_s=job.raised_grace_s(spec),
            agent_silence_s=hosted.agent_silence_s(spec),
            fence_grace_s=hosted.fence_grace_s(spec),
            secrets=tuple(order.secrets.values()),
        )

    def _cpus_near(self, devices: Collection[int]) -> tuple[int, ...]:
        """Return where the rank of a device runs best, () for anywhere."""
        numas = [known.numa for known in self.site.devices() if known.index in devices]
        return self.site.cpus_near(numas[0]) if numas else ()

    # --- what an earlier agent left --------------------------------------------------------------

    def adopt(self) -> None:
        """Take over what an earlier agent left; call it before anything can be reserved here."""
        self._adopt_tickets()
        root = self.site.home / "jobs"
        if not root.is_dir():
            return
        for path in root.glob(f"{_GONE}*"):  # an earlier agent was removing it
            self._background.spawn(asyncio.to_thread(shutil.rmtree, path, ignore_errors=True))
        folders = [p for p in root.iterdir() if p.is_dir() and not p.name.startswith(_GONE)]
        for path in sorted(folders, key=lambda path: path.stat().st_mtime):
            try:
                self._adopt(JobFolder(path))
            except (GpuLayerError, OSError) as e:
                # Its submitter was removed meanwhile, or the disk lost something: nobody could
                # watch or stop these ranks any more.
                log.warning("job folder %s is unusable, ending its ranks: %s", path.name, e)
                self.site.shims.kill(path)
                if not (path / "status").exists():  # none ever ran
                    self._remove(path)
        self._prune()

    def _adopt_tickets(self) -> None:
        """Without them a younger job could slip in before the older ones have renewed theirs."""
        try:
            data = self._queue_file.read_bytes()
            plain = wire.unpack(data, max_bytes=wire.SPEC_MAX)
            waiting = wire.decode_as(tuple[Ticket, ...], plain)
        except FileNotFoundError:
            return
        except (OSError, RemoteProtocolError) as e:
            log.warning("who waits here cannot be read, they will register again: %s", e)
            return
        self.tickets.adopt(time.monotonic(), waiting)
        self._keep_tickets()

    def _adopt(self, folder: JobFolder) -> None:
        """Take over one job: running where its shim lives, else as history."""
        attempt = open_signed(folder.signed_spec(), self.site.book)
        spec = attempt.spec
        index = slot_of(spec, self.site.node)
        manifest = folder.manifest(spec)
        known, keeper = folder.record(), spec.slots[0].node
        if manifest is None and known is None:  # as in `_drop_reservation`
            self._remove(folder.path)
            return
        # A shim that ended meanwhile is taken over as well: its events tell how.
        over = known is not None and known.state in OVER
        adopted = not over and self.site.shims.adopt(folder.path)
        # A full disk, or a power cut, may have cost the keeper's own word.
        went = adopted and keeper == self.site.node
        state = JobState.RUNNING if went else JobState.PLACING
        record = known or JobRecord(spec, state, keeper)
        if spec.restart and record.state is JobState.PLACING and not adopted:
            self._remove(folder.path)  # as in `_came_to_nothing`
            return
        now = lease_clock(spec)
        fenced = spec.restart < spec.restarts
        lease = self.site.shims.fence(folder.path) if fenced else None
        if adopted:
            machine = hosted.HostedJob.adopt(spec, index, now=now, lease=lease)
        else:
            machine = hosted.HostedJob(spec, index, now=now)
            machine.handle(now, hosted.StageFailed("its agent was started anew before the job"))
        one = LiveJob(attempt, index, folder, machine, record)
        self.jobs[spec.id] = one
        one.recorded = time.monotonic() - folder.record_age_s()
        one.begun.set()
        if manifest is not None:
            one.take_manifest(manifest)
        if adopted:
            slot = spec.slots[index]
            grant = Grant(spec.id, slot.processes, slot.devices, spec.submitter_name)
            self.site.reservations.adopt(grant)
            self.site.care.adopt(folder.before())
            self._background.spawn(self._watch_shim(one))
            if one.may_be_restarted and manifest is not None:
                self._restarting.part_began(one)
        if record.state in OVER:
            return
        if one.keeper == self.site.node and record.state is not JobState.PLACING:
            proof = None if lease is None else lease - hosted.KEEPER_SILENT_S
            one.kept = job.KeptJob.resume(one.current_record(), now=now, proof=proof)
        elif record.state is JobState.RESTARTING:
            self._restarting.stand_in(one)
        elif not adopted:
            placing = record.state is JobState.PLACING
            self.cancelled(one, "not started" if placing else "agent was away")

    def _prune(self) -> None:
        """Forget what is too old, and where the disk is too full, the oldest."""
        old = retention.outdated(self._finished())
        for ident in old:
            self._forget(ident)
        self._restarting.forget(old)
        usage = shutil.disk_usage(self.site.home)
        if usage.used > retention.FULL * usage.total:
            self._background.spawn(self._make_room(usage.used, usage.total))
        keep = {chunk for one in self.jobs.values() for chunk in one.chunks}
        keep.update(self._restarting.chunks())
        self._background.spawn(asyncio.to_thread(self.site.store.prune, keep=keep))

    def _finished(self) -> list[retention.Finished]:
        records = {i: one.current_record() for i, one in self.jobs.items() if one.ended}
        return [
            retention.Finished(ident, record.ended_age_s or 0.0)
            for ident, record in records.items()
            if record.state in OVER
        ]

    async def _make_room(self, used: int, total: int) -> None:
        finished = self._finished()
        paths = [self.jobs[one.job].path for one in finished]
        sizes = await asyncio.to_thread(lambda: [_size_of(path) for path in paths])
        weighed = [replace(one, size_bytes=size) for one, size in zip(finished, sizes, strict=True)]
        gone = retention.making_room(weighed, used, total)
        if gone:
            log.info("the disk is %.0f %% full: %d old jobs go", 100 * used / total, len(gone))
        for ident in gone:
            self._forget(ident)
        self._restarting.forget(gone)

    def _forget(self, ident: str) -> None:
        one = self.jobs.pop(ident, None)
        if one is not None:
            self._remove(one.path)

    def _remove(self, folder: Path) -> None:
        """Take a job's folder away: at once by its name, for a next try may come with it."""
        gone = folder.with_name(f"{_GONE}{folder.name}-{secrets.token_hex(8)}")
        try:
            folder.rename(gone)
        except OSError as e:
            log.warning("job folder %s cannot be removed: %s", folder.name, e)
            return
        self._background.spawn(asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True))


def _size_of(folder: Path) -> int:
    """Return the bytes that the files of a folder take."""
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another job's end removed it
                size += (Path(where) / name).lstat().st_size
    return size


def _with_outcome(event: hosted.RankExited, out: Path) -> hosted.RankExited:
    """Add what the files of a rank tell of its function, which the exit code does not."""
    if event.code == 0:
        return replace(event, no_result=not os.path.isfile(out / FUNCTION_RESULT))
    return replace(event, hopeless=os.path.isfile(out / FUNCTION_HOPELESS))


def _due(at: float | None, now: float) -> bool:
    return at is not None and at <= now
