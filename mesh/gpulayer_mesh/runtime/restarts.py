"""Restarts on this agent: next attempts, copies for them, and jobs that it only watches.

As the keeper of a job that failed, or in the place of a keeper that fell silent, it sees to the
next attempt (how: `succession`; by what means: `ground`). As a witness, a voter on which nothing of
the job runs, it holds what the next attempt needs and listens to the keeper. This module does not
decide when a job has failed (`job`), nor what a voter agrees to (`agreements`).

    watches/ID    a job that this node watches
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from gpulayer_mesh.core import hosted, job, restarts, wire
from gpulayer_mesh.core.jobspec import (
    HostAddress,
    HostPhase,
    JobRecord,
    JobSpec,
    JobState,
    RankState,
)
from gpulayer_mesh.core.types import NodeId, Role
from gpulayer_mesh.errors import (
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    RemoteProtocolError,
)
from gpulayer_mesh.files import make_private, remove_file, replace_file
from gpulayer_mesh.runtime.agreements import Agreements
from gpulayer_mesh.runtime.background import Background
from gpulayer_mesh.runtime.door import DoorRequest, Route
from gpulayer_mesh.runtime.ends import Ends, without_keeper
from gpulayer_mesh.runtime.ground import RECORD_S, Means, MeshGround
from gpulayer_mesh.runtime.hosting import JobHost
from gpulayer_mesh.runtime.livejob import CHAIN_MAX, LiveJob, Signed, may_launch, open_signed
from gpulayer_mesh.runtime.succession import (
    EndedError,
    KeeperBackError,
    NotRestartedError,
    Succession,
    stand_in,
)

log = logging.getLogger("gpulayer.restarts")

WATCH_S = 3.0  # between words of a keeper to its witnesses; `job` counts 18 s of silence
FORGET_S = 10 * 86400.0  # after the longest that a job's record is kept


@dataclass(frozen=True, slots=True)
class _Word:
    """What a keeper tells its witnesses."""

    spec: Annotated[bytes, Meta(max_length=CHAIN_MAX)]
    secretive: bool
    sources: Annotated[tuple[HostAddress, ...], Meta(max_length=1024)]
    left: bool = False  # as `JobRecord.left`


@dataclass(frozen=True, slots=True)
class _Place:
    """Whether a node is to be kept for the attempt after one."""

    spec: Annotated[bytes, Meta(max_length=CHAIN_MAX)]
    stands: bool


@dataclass(frozen=True, slots=True)
class _Drop:
    forget: bool  # the copies as well


@dataclass(frozen=True, slots=True)
class _Stop:
    """What a node that was asked to stop a job tells the others, where the keeper is silent."""

    by: Annotated[str, Meta(max_length=256)]
    grace_s: Annotated[float, Meta(ge=0, le=86400)]
    kill: bool


@dataclass(frozen=True, slots=True)
class _Stopped:
    """What a witness answers to a keeper that it had missed."""

    by: Annotated[str, Meta(max_length=256)]


@dataclass(slots=True)
class _Watch:
    """A job that this node watches without a part in it."""

    attempt: Signed
    secretive: bool
    began: float  # monotonic
    left: bool  # as `JobRecord.left`
    waiting: str = ""  # why its next attempt has not started
    task: asyncio.Task[None] | None = None
    succeeding: bool = False  # no word of the keeper ends it any more


class Restarts:
    """`hosting.Restarting` of one agent. `adopt` comes after the host's; `close` it."""

    def __init__(self, host: JobHost, means: Means) -> None:
        self._host = host
        self._site = host.site
        self._means = means
        self.agreements = Agreements(
            host.site.home / "attempts",
            node=host.site.node,
            name=host.site.name,
            book=host.site.book,
            part=self._part,
            keeper_heard_s=self._keeper_heard_s,
        )
        self._watches_dir = host.site.home / "watches"
        self._copying: dict[str, asyncio.Task[None]] = {}
        self._seeing: dict[str, asyncio.Task[None]] = {}  # job -> to its next attempt
        self._watches: dict[str, _Watch] = {}
        self._ends = Ends(host.site.home / "ends")
        self._background = Background(log)

    def routes(self) -> list[Route]:
        attempt, watch = "/v1/attempts/{id}", "/v1/watches/{id}"
        return [
            *self.agreements.routes(),
            Route("POST", attempt + "/stop", self.stop_elsewhere),
            Route("POST", attempt + "/stand", self.stand, None, CHAIN_MAX + 1024),
            Route("POST", watch, self.watch, None, CHAIN_MAX + 1024 * 1024),
            Route("POST", watch + "/drop", self.drop_watch),
        ]

    def adopt(self) -> None:
        """Take up what an earlier agent watched."""
        for path in self._watches_dir.glob("*"):
            if path.name.startswith("."):  # half-written
                remove_file(path)
                continue
            try:
                plain = wire.unpack(path.read_bytes(), max_bytes=2 * CHAIN_MAX)
                word = wire.decode_as(_Word, plain)
                age_s = max(0.0, time.time() - path.stat().st_mtime)  # display only
                self._watch(open_signed(word.spec, self._site.book), word, age_s)
            except (GpuLayerError, OSError) as error:
                log.warning("job %s is not watched any more: %s", path.name, error)
                remove_file(path)

    async def close(self) -> None:
        """End what still runs."""
        await self._background.close()

    # --- what the host tells ---------------------------------------------------------------------

    def part_began(self, one: LiveJob) -> None:
        """Copy what the ranks write to a second machine; as the keeper, tell the witnesses."""
        assert one.manifest is not None  # it was staged
        work = [
            self._means.copies.follow(
                job_dir=one.path,
                spec=one.spec,
                signed=one.attempt.chain,
                slot=one.slot,
                manifest=one.manifest,
            )
        ]
        if one.keeper == self._site.node:
            work += [self._tell(one, node) for node in restarts.witnesses(one.spec)]

        async def all_of_it() -> None:
            await asyncio.gather(*work)

        self._copying[one.spec.id] = self._background.spawn(all_of_it())

    def part_ended(self, one: LiveJob) -> None:
        task = self._copying.pop(one.spec.id, None)
        if task is not None:
            task.cancel()

    def begin(self, one: LiveJob, after_s: float) -> None:
        """Start the next attempt, as the keeper."""

        async def see() -> None:
            await asyncio.sleep(after_s)
            try:
                successor = await self._succeed(
                    one.attempt,
                    _secrets(one),
                    say=lambda why: self._host.on_keeper(one, job.RestartWaits(why)),
                )
            except EndedError:
                by = await self._stopper(one.spec)
                if not by:
                    raise
                self._host.on_keeper(one, job.StopRequested(by))
                return
            if one.kept is not None and one.kept.state is JobState.RESTARTING:
                self._host.on_keeper(one, job.Restarted(successor))
            else:  # stopped meanwhile
                await self._stop(successor, "")

        self._see(one.spec.id, see(), lambda why: self._host.on_keeper(one, job.NotRestarted(why)))

    def chunks(self) -> Collection[bytes]:
        """Return what of the store the next attempts of watched jobs need."""
        return self._means.copies.chunks()

    def forget(self, old: Collection[str]) -> None:
        """Drop the copies of these jobs, and what nobody can ask for any more."""
        self._ends.prune()
        copies = self._means.copies
        stale = {
            ident
            for ident in copies.jobs() - self._host.jobs.keys() - self._watches.keys()
            if copies.age_s(ident) > FORGET_S
        }
        for ident in stale | (copies.jobs() & set(old)):
            copies.forget(ident)
        known = [one.spec for one in self._host.jobs.values()]
        known += [watch.attempt.spec for watch in self._watches.values()]
        known += [spec for ident in copies.jobs() if (spec := copies.spec(ident)) is not None]
        self.agreements.forget(FORGET_S, map(restarts.origin_of, known))

    def superseded(self, spec: JobSpec) -> bool:
        """Return whether this node agreed to an attempt after this one."""
        return self.agreements.superseded(spec)

    def give_up(self, one: LiveJob) -> None:
        """Whoever sees to the next attempt here need not any more."""
        task = self._seeing.pop(one.spec.id, None)
        if task is not None:
            task.cancel()

    def ended(self, one: LiveJob) -> None:
        self.agreements.close(one.spec)

    def job_over(self, one: LiveJob, record: JobRecord) -> None:
        """Who watches a job that this node kept, or holds copies for it, need not any more."""
        path = f"/v1/watches/{one.spec.id}/drop"
        # What the others hold is all there is until the next attempt has copies of its own.
        body = wire.pack({"forget": not record.successor})
        others = [node for node in one.spec.voters if node != self._site.node]
        self._background.spawn(self._ask_all(others, path, body))
        if not record.successor:
            self.agreements.close(one.spec)
            self._forget_copies(one.spec)

    def stand_in(self, one: LiveJob) -> None:
        """See to the next attempt of a job whose keeper fell silent."""

        async def see() -> None:
            try:
                found = await stand_in(
                    self._ground(_secrets(one)),
                    one.attempt,
                    after_s=max(0.0, one.machine.heard + job.GONE_S - one.clock()),
                    succeed=lambda left_s: self._succeed(
                        one.attempt, _secrets(one), seconds=left_s, say=waits
                    ),
                )
            except KeeperBackError:
                waits("")
                self._host.await_word(one)
                return
            over = replace(one.current_record(), state=JobState.FAILED, ended_age_s=0.0, waiting="")
            if isinstance(found, str):
                self._host.take_record(one, replace(over, successor=found))
            else:
                self._host.take_record(one, found)

        def waits(why: str) -> None:
            if one.record.waiting != why[:512]:
                self._host.take_record(one, replace(one.current_record(), waiting=why[:512]))

        def failed(why: str) -> None:
            record = replace(one.current_record(), waiting="")
            failure = record.failure
            if failure is not None:
                failure = replace(failure, reason=f"{failure.reason}; not restarted: {why}")
            over = replace(record, state=JobState.FAILED, failure=failure, ended_age_s=0.0)
            self._host.take_record(one, over)

        self._see(one.spec.id, see(), failed)

    async def stop_alone(self, spec: JobSpec, stop: hosted.Stop) -> None:
        """Stop a job whose keeper does not answer, here and wherever else it is known.

        Nothing follows it then, and should the keeper be back, it reads of it in a report.
        """
        self._stop_here(spec, stop)
        nodes = dict.fromkeys((*(slot.node for slot in spec.slots), *spec.voters))
        body = wire.pack(_Stop(stop.by, stop.grace_s, stop.kill))
        others = [node for node in nodes if node != self._site.node]
        await self._ask_all(others, f"/v1/attempts/{spec.id}/stop", body)
        # Whoever saw to the next attempt may have had it agreed to, and started, by then.
        following = restarts.attempt_id(restarts.origin_of(spec), spec.restart + 1)
        self._background.spawn(self._stop(following, stop.by))

    async def _stopper(self, spec: JobSpec) -> str:
        """Return who had a job stopped while its keeper was cut off, "" if no voter says so."""
        ground = self._ground(None)
        words = await asyncio.gather(
            *(ground.record(node, spec.id) for node in spec.voters), return_exceptions=True
        )
        for word in words:
            if isinstance(word, JobRecord) and word.state is JobState.CANCELLED:
                return word.cause.removeprefix("stopped by ")
        return ""

    def _stop_here(self, spec: JobSpec, stop: hosted.Stop) -> None:
        self.agreements.close(spec)
        one = self._host.jobs.get(spec.id)
        if one is None:
            self._stop_watched(spec.id, stop.by)
        elif one.kept is not None:
            self._host.on_keeper(one, job.StopRequested(stop.by, stop.grace_s, stop.kill))
        elif one.current_record().state is JobState.RESTARTING:
            self.give_up(one)
            self._host.cancelled(one, f"stopped by {stop.by}")
        else:
            self._host.on_host(one, stop)

    # --- rights ----------------------------------------------------------------------------------

    def may_read(self, ident: str, peer: NodeId, roles: tuple[Role, ...]) -> bool:
        """Return whether a member may see what a job has made: its own, its voters, and the nodes
        of the attempts after it."""
        spec = self._spec(ident)
        if spec is None:
            return False
        if Role.ADMIN in roles or peer == spec.submitter:
            return True
        if peer in spec.voters or any(peer == slot.node for slot in spec.slots):
            return True
        origin = restarts.origin_of(spec)
        later = range(spec.restart + 1, spec.restarts + 1)
        return any(
            self.agreements.may_read(restarts.attempt_id(origin, number), peer) for number in later
        )

    async def stop_elsewhere(self, request: DoorRequest) -> None:
        """Another node was asked to stop a job, and its keeper did not answer there."""
        ident = request.params["id"]
        spec = self._spec(ident)
        if spec is None:
            raise NotFoundError(f"no job {ident[:16]!r} on {self._site.name}")
        if request.peer not in (*spec.voters, *(slot.node for slot in spec.slots), spec.submitter):
            raise NotAllowedError("this member may not do that to this job")
        order = wire.decode_as(_Stop, wire.unpack(request.body))
        self._stop_here(spec, stop_by(order.by, order.grace_s, kill=order.kill))

    async def stand(self, request: DoorRequest) -> None:
        """Keep this node for an attempt that a voter of the one before has no nodes for yet."""
        plain = wire.unpack(request.body, max_bytes=CHAIN_MAX + 1024)
        place = wire.decode_as(_Place, plain)
        before = open_signed(place.spec, self._site.book)
        may_launch(before, self._site.book)
        spec = before.spec
        ticket = restarts.place_of_next(spec)
        if ticket.job != request.params["id"] or spec.restart >= spec.restarts:
            raise NotAllowedError("no such attempt follows that one")
        if request.peer not in spec.voters:
            raise NotAllowedError("only a voter may start an attempt")
        if place.stands and not self.agreements.closed(ticket.job):
            self._host.take_ticket(ticket)
        else:
            self._host.drop_ticket(ticket.job, ticket.submitter)

    def _spec(self, ident: str) -> JobSpec | None:
        """Return what an attempt is in which this node has a part, if only as a voter."""
        one, watch = self._host.jobs.get(ident), self._watches.get(ident)
        if one is not None:
            return one.spec
        if watch is not None:
            return watch.attempt.spec
        if (held := self._means.copies.spec(ident)) is not None:
            return held
        with contextlib.suppress(RemoteProtocolError):  # its signer was removed
            bound = self.agreements.bound(ident)
            return None if bound is None else bound.spec
        return None

    # --- a witness -------------------------------------------------------------------------------

    def watched(self) -> list[JobRecord]:
        """Return what this node can say of the jobs that it watches, or has watched."""
        return [*self._ends.all(), *map(self._witnessed, self._watches.values())]

    def watched_job(self, ident: str) -> JobRecord | None:
        """Return the same of one job, None if it is none of them."""
        watch = self._watches.get(ident)
        return self._ends.get(ident) if watch is None else self._witnessed(watch)

    def _witnessed(self, watch: _Watch) -> JobRecord:
        """Return what a witness knows: the job runs, until its keeper counts as lost."""
        now, spec = time.monotonic(), watch.attempt.spec
        age_s = now - watch.began
        if now - self.agreements.heard_at(spec.id) < hosted.KEEPER_SILENT_S:
            return JobRecord(spec, JobState.RUNNING, spec.slots[0].node, age_s=age_s)
        return without_keeper(spec, age_s=age_s, waiting=watch.waiting)

    def _stop_watched(self, ident: str, by: str) -> None:
        watch = self._watches.get(ident)
        if watch is not None:
            self._unwatch(ident)
            cause = f"stopped by {by}"
            self._watch_over(watch, state=JobState.CANCELLED, failure=None, cause=cause)

    def _watch_over(self, watch: _Watch, **known: Any) -> None:
        """Note what became of a job whose keeper was lost."""
        record = without_keeper(watch.attempt.spec, age_s=time.monotonic() - watch.began)
        over: dict[str, Any] = {"state": JobState.FAILED, "waiting": "", "ended_age_s": 0.0}
        self._ends.keep(replace(record, **(over | known)))

    def _not_restarted(self, watch: _Watch, why: str) -> None:
        failure = without_keeper(watch.attempt.spec, age_s=0.0).failure
        assert failure is not None
        reason = f"{failure.reason}; not restarted: {why}"
        self._watch_over(watch, failure=replace(failure, reason=reason))

    async def watch(self, request: DoorRequest) -> _Stopped | None:
        """The keeper is there; from its first word on this node watches the job."""
        plain = wire.unpack(request.body, max_bytes=CHAIN_MAX + 1024 * 1024)
        word = wire.decode_as(_Word, plain)
        ident = request.params["id"]
        end = self._ends.get(ident)
        if end is not None and end.state is JobState.CANCELLED and end.keeper == request.peer:
            return _Stopped(end.cause.removeprefix("stopped by "))
        known = self._watches.get(ident)
        if known is None or known.attempt.chain != word.spec:
            attempt = open_signed(word.spec, self._site.book)
            may_launch(attempt, self._site.book)
            spec = attempt.spec
            if spec.id != ident or self._site.node not in restarts.witnesses(spec):
                raise NotAllowedError(f"{self._site.name} is no witness of that job")
            if request.peer != spec.slots[0].node or spec.restart >= spec.restarts:
                raise NotAllowedError("only the keeper of a job has it watched")
            self.agreements.refuse_superseded(spec)
            self._unwatch(ident)
            self._note_watch(ident, request.body)
            known = self._watch(attempt, word)
        elif request.peer != known.attempt.spec.slots[0].node:
            raise NotAllowedError("only the keeper of a job has it watched")
        elif known.left is not word.left:
            known.left = word.left
            self._note_watch(ident, request.body)
        self.agreements.heard(ident)
        return None

    def _note_watch(self, ident: str, word: bytes) -> None:
        try:
            make_private(self._watches_dir)
            replace_file(self._watches_dir / ident, word, private=True, durable=True)
        except OSError as error:
            raise GpuLayerError(f"cannot note a job to watch: {error}") from error

    async def drop_watch(self, request: DoorRequest) -> None:
        """The keeper says that the job is over; safe to repeat."""
        order = wire.decode_as(_Drop, wire.unpack(request.body))
        spec = self._spec(request.params["id"])
        if spec is None:
            return
        if request.peer != spec.slots[0].node:
            raise NotAllowedError("only the keeper of a job has it watched")
        self._unwatch(spec.id)
        if order.forget:
            self.agreements.close(spec)
            self._host.free_from_next(spec)
            self._forget_copies(spec)

    def _forget_copies(self, last: JobSpec) -> None:
        """Drop what is held of a job that is over, of all its attempts."""
        copies, origin = self._means.copies, restarts.origin_of(last)
        for ident in copies.jobs():
            spec = copies.spec(ident)
            if spec is not None and restarts.origin_of(spec) == origin:
                copies.forget(ident)

    def _watch(self, attempt: Signed, word: _Word, age_s: float = 0.0) -> _Watch:
        watch = _Watch(attempt, word.secretive, time.monotonic() - age_s, word.left)
        self._ends.drop(attempt.spec.id)
        self.agreements.heard(attempt.spec.id)  # at the latest: an agent started anew
        self._watches[attempt.spec.id] = watch
        watch.task = self._background.spawn(self._listen(watch, word.sources))
        return watch

    def _unwatch(self, ident: str) -> None:
        watch = self._watches.pop(ident, None)
        if watch is None:
            return
        if watch.task is not None:
            watch.task.cancel()
        remove_file(self._watches_dir / ident)

    async def _listen(self, watch: _Watch, sources: tuple[HostAddress, ...]) -> None:
        """Fetch what the next attempt needs, then wait for the keeper's silence."""
        spec = watch.attempt.spec
        fetching = self._background.spawn(self._fetch_bundle(spec, sources))
        try:
            while True:
                silent_s = time.monotonic() - self.agreements.heard_at(spec.id)
                if silent_s < hosted.KEEPER_SILENT_S:
                    await asyncio.sleep(hosted.KEEPER_SILENT_S - silent_s)
                elif not await self._keeper_is_back(watch, silent_s):
                    break
        finally:
            fetching.cancel()
        if self._watches.get(spec.id) is watch:
            del self._watches[spec.id]
            remove_file(self._watches_dir / spec.id)

    async def _keeper_is_back(self, watch: _Watch, silent_s: float) -> bool:
        """See to the next attempt; whether the keeper spoke before that was begun."""
        spec = watch.attempt.spec
        secrets: Mapping[str, str] | None = None if watch.secretive else {}
        heard = self.agreements.heard_at(spec.id)
        waits = max(0.0, job.GONE_S - silent_s)

        async def succeed(left_s: float) -> str:
            watch.succeeding = True
            return await self._succeed(watch.attempt, secrets, seconds=left_s, say=say)

        def say(why: str) -> None:
            watch.waiting = why[:512]

        standing = self._background.spawn(
            stand_in(
                self._ground(secrets),
                watch.attempt,
                after_s=waits,
                succeed=succeed,
            )
        )
        try:
            while not standing.done():
                await asyncio.wait([standing], timeout=1.0)
                if self.agreements.heard_at(spec.id) != heard and not watch.succeeding:
                    return True
            found = standing.result()
        except KeeperBackError:
            watch.succeeding = False
            watch.waiting = ""
            return True
        except GpuLayerError as error:
            log.warning("job %s, which fell silent, is not restarted: %s", spec.id, error)
            if not isinstance(error, EndedError):  # nobody says how
                self._not_restarted(watch, error.message)
        else:
            if isinstance(found, JobRecord):  # it had ended
                self._forget_copies(spec)
                self._ends.keep(replace(found, spec=spec))
            else:
                self._watch_over(watch, successor=found)
            what = found if isinstance(found, str) else found.state.value
            log.info("job %s, which fell silent: %s", spec.id, what)
        finally:
            standing.cancel()
        return False

    async def _fetch_bundle(self, spec: JobSpec, sources: tuple[HostAddress, ...]) -> None:
        told = ""
        while True:
            try:
                await self._means.copies.fetch_bundle(spec, sources)
                return
            except GpuLayerError as error:
                if error.message != told:
                    told = error.message
                    log.warning("job %s: its source cannot be had: %s", spec.id, told)
                await asyncio.sleep(WATCH_S)

    # --- as a keeper -----------------------------------------------------------------------------

    async def _tell(self, one: LiveJob, witness: NodeId) -> None:
        """Have a witness watch the job, and tell the keeper's machine that it does."""
        sources = tuple(
            HostAddress(slot.node, self._means.addresses(slot.node)) for slot in one.spec.slots
        )
        secretive = bool(one.secrets) or one.folder.secretive
        path = f"/v1/watches/{one.spec.id}"
        while True:
            asked = one.clock()
            body = wire.pack(
                _Word(one.attempt.chain, secretive, sources, self._launcher_left(one.spec.id))
            )
            with contextlib.suppress(GpuLayerError):
                answer = await self._site.call(witness, "POST", path, body, deadline_s=WATCH_S)
                plain = wire.unpack(answer) if answer else None
                event: job.Event = job.Watched(witness, asked)
                if plain is not None:
                    event = job.StopRequested(wire.decode_as(_Stopped, plain).by)
                if one.kept is not None:
                    self._host.on_keeper(one, event)
            await asyncio.sleep(WATCH_S)

    # --- the next attempt ------------------------------------------------------------------------

    def _see(self, ident: str, work: Any, failed: Callable[[str], None]) -> None:
        async def see() -> None:
            try:
                await work
            except GpuLayerError as error:
                log.warning("job %s is not restarted: %s", ident, error)
                failed(error.message)
            except Exception as error:
                failed(f"its machine {self._site.name} met a fault: {error!r}")
                raise
            finally:
                self._seeing.pop(ident, None)

        self._seeing[ident] = self._background.spawn(see())

    async def _succeed(
        self,
        ran: Signed,
        secrets: Mapping[str, str] | None,
        *,
        seconds: float | None = None,
        say: Callable[[str], None] = lambda why: None,
    ) -> str:
        if ran.spec.submitter not in self._site.book:
            raise NotRestartedError(f"{ran.spec.submitter_name} was removed from the mesh")
        if secrets is None:
            raise NotRestartedError(
                "its secrets were only in the memory of an agent that is not there any more"
            )
        log.info("job %s: starting its next attempt", ran.spec.id)
        return await Succession(self._ground(secrets), ran, seconds=seconds, say=say).run()

    def _ground(self, secrets: Mapping[str, str] | None) -> MeshGround:
        return MeshGround(
            self._host,
            self._means,
            self.agreements,
            secrets or {},
            self._keeper_speaks,
            self._launcher_left,
        )

    def _launcher_left(self, ident: str) -> bool:
        one, watch = self._host.jobs.get(ident), self._watches.get(ident)
        if one is not None:
            return one.current_record().left
        return watch is not None and watch.left

    def _keeper_speaks(self, ident: str) -> bool:
        """Return whether an attempt is known to run: it is kept here, or its keeper was heard."""
        one = self._host.jobs.get(ident)
        if one is None:
            heard = self.agreements.heard_at(ident) if ident in self._watches else -math.inf
            return time.monotonic() - heard < hosted.KEEPER_SILENT_S
        if one.kept is not None:
            return one.kept.state in (JobState.STARTING, JobState.RUNNING)
        # An attempt that is only prepared has an author, whose word does not mean that it runs.
        ran = any(rank.state is not RankState.WAITING for rank in one.report().ranks)
        return ran and one.clock() - one.machine.heard < hosted.KEEPER_SILENT_S

    def _part(self, attempt: str) -> HostPhase | None:
        one = self._host.jobs.get(attempt)
        return None if one is None else one.machine.phase

    def _keeper_heard_s(self, attempt: str) -> float | None:
        one = self._host.jobs.get(attempt)
        return None if one is None else one.clock() - one.machine.heard

    async def _stop(self, ident: str, by: str) -> None:
        """Stop an attempt that this node agreed to, if there is one."""
        order = wire.pack({"grace_s": None, "kill": False, "by": by})
        with contextlib.suppress(GpuLayerError):
            if (bound := self.agreements.bound(ident)) is not None:
                keeper = bound.spec.slots[0].node
                await self._site.call(keeper, "POST", f"/v1/jobs/{ident}/stop", order)

    async def _ask_all(self, nodes: Iterable[NodeId], path: str, body: bytes) -> None:
        """Tell several nodes the same; one that does not hear it finds out by itself."""
        await asyncio.gather(
            *(self._site.call(node, "POST", path, body, deadline_s=RECORD_S) for node in nodes),
            return_exceptions=True,
        )


def stop_by(by: str, grace_s: float, *, kill: bool) -> hosted.Stop:
    """Return what ends ranks because a member asked this node for it."""
    return hosted.Stop(grace_s, kill, f"stopped by {by}", by)


def _secrets(one: LiveJob) -> Mapping[str, str] | None:
    """Return what the ranks got as secrets, None where only an earlier agent knew."""
    return {} if one.secrets is None and not one.folder.secretive else one.secrets
