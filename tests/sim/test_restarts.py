"""Restarts against crashes, partitions, loss and sleep: never two attempts at once, and one where
one can.

The real machines of keeper and hosts, and the real procedures of `succession`, in virtual time.
Machines crash and go to sleep, paths between two are cut, agents are killed, started anew and
stopped for a while; the shim of a machine lives on without its agent and ends its ranks when the
lease runs out. `--configurations
N` plays N times as many seeds. Promises: a rank of an attempt only starts once none of an earlier
one is left anywhere, or only on a machine that sleeps, where they are gone within 3 s after it woke
up; each id is started by one author; what is reserved is freed; where one machine is lost and the
others are well, the next attempt begins within 30 s, and the time that its files take.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from gpulayer_mesh.core import hosted, job, restarts
from gpulayer_mesh.core.jobspec import (
    OVER,
    Failure,
    HostPhase,
    HostReport,
    JobRecord,
    JobSpec,
    JobState,
    Slot,
)
from gpulayer_mesh.core.lease import LEASE_S
from gpulayer_mesh.core.paths import Pair
from gpulayer_mesh.core.types import NodeId, NodeState, Snapshot
from gpulayer_mesh.errors import (
    GpuLayerError,
    NotFoundError,
    PathsCutError,
    PlacementBusyError,
    RemoteProtocolError,
    TransportError,
)
from gpulayer_mesh.runtime import ground
from gpulayer_mesh.runtime.livejob import Signed
from gpulayer_mesh.runtime.succession import (
    KeeperBackError,
    NotRestartedError,
    Succession,
    bind,
    stand_in,
)
from job_cases import JOB, ORDER, node, spec
from mesh_cases import member, mesh
from virtual_loop import VirtualLoop

T = TypeVar("T")

UNREST_S = 240.0  # machines and cables break until then
REST_S = 1500.0  # above every deadline in a row
WATCH_S = 3.0
FILES_S = 15.0  # to prepare an attempt, at most
WOKE_S = 3.0  # after it a machine has ended what its lease no longer covers


@dataclass
class Part:
    """One attempt on one node."""

    attempt: Signed
    machine: hosted.HostedJob
    record: JobRecord
    kept: job.KeptJob | None = None
    ranks: set[int] = field(default_factory=set)  # alive
    shim: str = "none"
    lease: float = 0.0  # as the shim knows it
    told: list[hosted.Event] = field(default_factory=list)  # by the shim
    timer: asyncio.TimerHandle | None = None


class Box:
    """One machine. A crash leaves `bound`, `gone` and `watched`; the end of its agent leaves the
    shims and records as well."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.id = node(index)
        self.name = f"box-{index}"
        self.up = True
        self.agent = True  # there is one
        self.asleep_until = self.frozen_until = 0.0  # the machine; its agent
        self.woke = -WOKE_S
        self.parts: dict[str, Part] = {}
        self.bound: dict[str, Signed] = {}  # on disk
        self.gone: set[str] = set()  # attempts of an earlier life
        self.heard: dict[str, float] = {}  # as a witness
        self.watched: set[str] = set()
        self.tasks: set[asyncio.Task[Any]] = set()  # the agent's
        self.shims: set[asyncio.Task[Any]] = set()
        self.seeing: dict[str, asyncio.Task[Any]] = {}

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self.world.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.finished)
        return task

    def finished(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.errors.append(error)

    def spawn_shim(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.world.loop.create_task(work)
        self.shims.add(task)
        task.add_done_callback(self.finished)
        task.add_done_callback(self.shims.discard)

    @property
    def asleep(self) -> bool:
        return self.world.loop.time() < self.asleep_until

    @property
    def answers(self) -> bool:
        """Its agent works."""
        now = self.world.loop.time()
        return self.up and self.agent and now >= max(self.asleep_until, self.frozen_until)

    async def sleep(self, seconds: float, *, shim: bool = False) -> None:
        """For what runs on this machine, which may itself sleep meanwhile."""
        await asyncio.sleep(seconds)
        await self.awake(shim=shim)

    async def awake(self, *, shim: bool = False) -> None:
        while (wait_s := self.stands_still_until(shim=shim) - self.world.loop.time()) > 0:
            await self.world.passes(wait_s + 0.001)

    def stands_still_until(self, *, shim: bool = False) -> float:
        return self.asleep_until if shim else max(self.asleep_until, self.frozen_until)

    def crash(self) -> None:
        self.up = False
        self.end_agent()
        for task in list(self.shims):
            task.cancel()
        self.gone |= {ident for ident, part in self.parts.items() if part.shim != "none"}
        self.parts.clear()

    def end_agent(self) -> None:
        self.agent = False
        for task in list(self.tasks):
            task.cancel()
        self.heard.clear()
        self.seeing.clear()

    def start_agent(self) -> None:
        """As `JobHost.adopt` and `Restarts.adopt`."""
        now = self.world.loop.time()
        self.agent = True
        for ident in list(self.watched):
            self.heard[ident] = now
            self.spawn(self.watch(self.world.attempts[ident]))
        for ident, part in list(self.parts.items()):
            spec = part.attempt.spec
            adopted = part.record.state not in OVER and part.shim != "none"
            if not adopted and part.record.state is JobState.PLACING:
                del self.parts[ident]
                continue
            index = [slot.node for slot in spec.slots].index(self.id)
            if adopted:
                part.machine = hosted.HostedJob.adopt(spec, index, now=now, lease=part.lease)
            else:
                part.machine = hosted.HostedJob(spec, index, now=now)
                part.machine.handle(now, hosted.StageFailed("its agent was started anew"))
            keeps = spec.slots[0].node == self.id
            kept, part.kept = part.kept, None
            if part.record.state in OVER:
                part.kept = kept
            elif keeps:
                proof = part.lease - hosted.KEEPER_SILENT_S
                part.kept = job.KeptJob.resume(part.record, now=now, proof=proof)
            elif part.record.state is JobState.RESTARTING:
                self.see(part, self.stand_in(part))
            if adopted:
                self.spawn(self.touch(part))
                for event in part.told:
                    self.host(part, event)
                if keeps:
                    self.tell_witnesses(part)
            self.wake(part)

    # Parts.

    def reserve(self, attempt: Signed) -> None:
        ident = attempt.spec.id
        known = self.parts.get(ident)
        if known is not None and known.attempt.chain == attempt.chain:
            if known.machine.phase is HostPhase.ENDED:
                raise RemoteProtocolError("was here before")
            self.host(known, hosted.Touched())
            return
        if known is not None:
            newer = attempt.spec.attempt > known.attempt.spec.attempt
            if known.machine.phase is not HostPhase.RESERVED or not (
                newer and attempt.signer == known.attempt.signer
            ):
                raise RemoteProtocolError("was here before")
            self.release(known.attempt)
        self.refuse_superseded(attempt.spec)
        if ident in self.gone:
            raise RemoteProtocolError("was here before")
        if any(part.machine.phase is not HostPhase.ENDED for part in self.parts.values()):
            raise PlacementBusyError("busy")
        index = [slot.node for slot in attempt.spec.slots].index(self.id)
        now = self.world.loop.time()
        part = Part(
            attempt,
            hosted.HostedJob(attempt.spec, index, now=now),
            JobRecord(attempt.spec, JobState.PLACING, attempt.spec.slots[0].node),
        )
        self.parts[ident] = part
        self.wake(part)

    def refuse_superseded(self, of: JobSpec) -> None:
        later = range(of.restart + 1, of.restarts + 1)
        if any(restarts.attempt_id(JOB, number) in self.bound for number in later):
            raise RemoteProtocolError("agreed to a later attempt")

    def hold(self, attempt: Signed) -> None:
        self.refuse_superseded(attempt.spec)
        self.heard[attempt.spec.id] = self.world.loop.time() + LEASE_S

    def release(self, attempt: Signed) -> None:
        ident = attempt.spec.id
        part = self.parts.get(ident)
        if part is not None and part.attempt.chain == attempt.chain:
            reserved = part.machine.phase is HostPhase.RESERVED
            self.host(part, hosted.Release())
            if reserved:
                self.parts.pop(ident, None)

    def staged(self, ident: str) -> None:
        part = self.parts.get(ident)
        if part is None or part.machine.phase is HostPhase.ENDED:
            raise RemoteProtocolError("no such job")
        self.host(part, hosted.StageBegan())
        self.host(part, hosted.Staged())

    def go(self, ident: str) -> None:
        part = self.parts.get(ident)
        if part is not None and part.kept is None:
            self.host(part, hosted.Tick())
        if part is None or (part.kept is None and part.machine.phase is not HostPhase.STAGED):
            raise RemoteProtocolError("not staged")
        if part.kept is None:
            self.world.went(part.attempt)
            part.kept = job.KeptJob(part.attempt.spec, now=self.world.loop.time())
            self.keep(part, job.Go(ORDER))

    def wake(self, part: Part) -> None:
        """Serve the machines' timers, as `JobHost.run` does."""
        if part.timer is not None:
            part.timer.cancel()
        if not self.agent:
            return
        times = [part.machine.next_timeout(), part.kept.next_timeout() if part.kept else None]
        known = [at for at in times if at is not None]
        if known and self.up:
            at = max(min(known), self.world.loop.time(), self.stands_still_until())
            part.timer = self.world.loop.call_at(at, self.tick, part)

    def tick(self, part: Part) -> None:
        if self.parts.get(part.attempt.spec.id) is not part or not self.agent:
            return
        if not self.answers:
            self.wake(part)
            return
        now = self.world.loop.time()
        due = part.machine.next_timeout()
        if due is not None and due <= now:
            self.host(part, hosted.Tick())
        due = part.kept.next_timeout() if part.kept else None
        if part.kept is not None and due is not None and due <= now:
            self.keep(part, job.Tick())

    def host(self, part: Part, event: hosted.Event) -> HostReport:
        now = self.world.loop.time()
        came_to_nothing = False
        for effect in part.machine.handle(now, event):
            match effect:
                case hosted.StartShim():
                    part.shim = "running"
                    part.lease = part.machine.lease
                    if part.attempt.spec.slots[0].node == self.id:
                        self.tell_witnesses(part)
                    self.spawn(self.touch(part))
                    self.spawn_shim(self.run_ranks(part))
                    if hosted.fence_grace_s(part.attempt.spec) is not None:
                        self.spawn_shim(self.fence(part))
                case hosted.StopShim(grace_s, _):
                    delay = self.world.rng.choice([0.1, grace_s])
                    self.spawn_shim(self.end_ranks(part, delay))
                case hosted.KillShim(_):
                    self.spawn_shim(self.end_ranks(part, 0.1))
                case hosted.FreeGrant():
                    if part.machine.keeper_lost:
                        self.keeper_lost(part)
                    elif part.kept is None and part.shim != "none":
                        self.spawn(self.await_word(part))
                    elif part.kept is None and part.record.state is JobState.PLACING:
                        came_to_nothing = True
                case hosted.ReportToKeeper(report):
                    self.spawn(self.report(part, report))
        part.machine.check()
        self.wake(part)
        if came_to_nothing and part.attempt.spec.restart:
            self.parts.pop(part.attempt.spec.id, None)
        return part.machine.report(now)

    async def touch(self, part: Part) -> None:
        """Renew the shim's lease, as `ShimRunner.watch` does."""
        while part.shim == "running":
            part.lease = part.machine.lease
            await self.sleep(1.0)

    def says(self, part: Part, event: hosted.Event) -> None:
        """The shim tells the agent, or the next one."""
        part.told.append(event)
        if self.agent:
            self.host(part, event)

    async def run_ranks(self, part: Part) -> None:
        await self.sleep(self.world.rng.uniform(0.05, 0.5), shim=True)
        if part.shim != "running":
            return
        for rank in sorted(part.machine._ranks):
            self.world.rank_starts(self, part)
            part.ranks.add(rank)
            self.says(part, hosted.RankStarted(rank, 100 + rank))
        fails_s = self.world.fate(part.attempt.spec, part.machine.slot)
        if fails_s is not None:
            await self.sleep(fails_s, shim=True)
            for rank in sorted(part.ranks):
                part.ranks.discard(rank)
                self.says(part, hosted.RankExited(rank, 1, tail=("ValueError: no",)))
            if part.shim == "running":
                part.shim = "done"
                await self.sleep(0.1, shim=True)
                self.says(part, hosted.ShimDone())

    async def fence(self, part: Part) -> None:
        """As `shim._poll_lease`."""
        grace_s = hosted.fence_grace_s(part.attempt.spec) or 0.0
        while part.shim == "running":
            await self.sleep(1.0, shim=True)
            left_s = part.lease - self.world.loop.time()
            if left_s <= 0:
                late_s = self.world.rng.uniform(0.0, 0.5)
                await self.end_ranks(part, max(0.0, left_s + grace_s) + late_s)
                return

    async def end_ranks(self, part: Part, delay: float) -> None:
        await self.sleep(delay, shim=True)
        if part.shim == "running":
            part.shim = "done"
            for rank in sorted(part.ranks):
                part.ranks.discard(rank)
                self.says(part, hosted.RankExited(rank, None, 15, stopped=True))
            self.says(part, hosted.ShimDone())

    async def report(self, part: Part, report: HostReport) -> None:
        keeper = self.world.boxes[part.attempt.spec.slots[0].node]

        def take() -> None:
            kept = keeper.parts.get(part.attempt.spec.id)
            if kept is not None and kept.kept is not None:
                keeper.keep(kept, job.HostReported(report))

        with contextlib.suppress(GpuLayerError):
            await self.world.call(self, keeper.id, take)

    def keeper_lost(self, part: Part) -> None:
        may = part.attempt.spec.restart < part.attempt.spec.restarts
        part.record = replace(
            part.record,
            state=JobState.RESTARTING if may else JobState.FAILED,
            failure=Failure(None, "box", 1, "keeper lost"),
            ended_age_s=None if may else 0.0,
        )
        if may:
            self.see(part, self.stand_in(part))

    async def await_word(self, part: Part) -> None:
        while part.record.state not in OVER:
            await self.sleep(5)
            try:
                keeper = part.attempt.spec.slots[0].node
                record = await Ground(self).record(keeper, part.attempt.spec.id)
            except GpuLayerError:
                if self.world.loop.time() - part.machine.heard >= hosted.KEEPER_SILENT_S:
                    self.keeper_lost(part)
                    return
                continue
            self.host(part, hosted.Renewed(-math.inf))
            part.record = record

    # The keeper.

    def keep(self, part: Part, event: job.Event) -> None:
        assert part.kept is not None
        for effect in part.kept.handle(self.world.loop.time(), event):
            match effect:
                case job.StartHost(who, order):
                    self.spawn(self.ask(part, who, hosted.Start(order)))
                case job.RenewHost(who):
                    reports = part.kept.record(self.world.loop.time()).reports
                    heard = next(report.at for report in reports if report.node == who)
                    self.spawn(self.ask(part, who, None, heard))
                case job.StopHost(who, grace_s, kill, heard):
                    self.spawn(self.ask(part, who, hosted.Stop(grace_s, kill), heard))
                case job.RecordChanged(record):
                    part.record = record
                case job.Restart(after_s):
                    self.see(part, self.restart(part, after_s))
                case job.GiveUpRestart():
                    self.seeing.pop(part.attempt.spec.id).cancel()
        part.kept.check()
        self.wake(part)

    async def ask(
        self, part: Part, who: NodeId, event: hosted.Event | None, heard: float = -math.inf
    ) -> None:
        assert part.kept is not None
        box = self.world.boxes[who]
        await self.awake()
        asked = self.world.loop.time()
        if box is self:
            heard = part.kept.proof(asked)

        def answer() -> HostReport:
            there = box.parts.get(part.attempt.spec.id)
            if there is None:
                raise NotFoundError("no such job")
            if part.record.state in OVER or there.record.state not in OVER:
                there.record = part.record
            report = box.host(there, hosted.Renewed(heard))
            return report if event is None else box.host(there, event)

        try:
            report = await self.world.call(self, who, answer)
        except GpuLayerError as error:
            self.keep(part, job.ReportFailed(who, error.message))
        else:
            self.keep(part, job.HostReported(report, asked))

    def tell_witnesses(self, part: Part) -> None:
        for witness in self.witnesses(part.attempt.spec):
            self.spawn(self.tell(part, witness))

    def witnesses(self, of: JobSpec) -> tuple[NodeId, ...]:
        return of.voters[len(of.slots) :] if of.restart < of.restarts else ()

    async def tell(self, part: Part, witness: NodeId) -> None:
        ident = part.attempt.spec.id
        box = self.world.boxes[witness]

        def hear() -> None:
            box.refuse_superseded(part.attempt.spec)
            box.heard[ident] = self.world.loop.time()
            if ident not in box.watched:
                box.watched.add(ident)
                self.world.attempts[ident] = part.attempt
                box.spawn(box.watch(part.attempt))

        while part.machine.phase is not HostPhase.ENDED:
            await self.awake()
            asked = self.world.loop.time()
            try:
                await self.world.call(self, witness, hear)
                if part.kept is not None:
                    self.keep(part, job.Watched(witness, asked))
            except GpuLayerError:
                pass
            await self.sleep(WATCH_S)

    async def watch(self, attempt: Signed) -> None:
        """As `Restarts._listen`."""
        ident = attempt.spec.id
        while True:
            silent_s = self.world.loop.time() - self.heard[ident]
            if silent_s < hosted.KEEPER_SILENT_S:
                await self.sleep(hosted.KEEPER_SILENT_S - silent_s + 0.01)
            elif await self.witness(attempt, silent_s):
                return

    async def witness(self, attempt: Signed, silent_s: float) -> bool:
        """As `Restarts._keeper_is_back`, but whether it need not listen any more."""
        heard = self.heard[attempt.spec.id]
        begun = False

        async def succeed(left_s: float) -> str:
            nonlocal begun
            begun = True
            return await Succession(Ground(self), attempt, seconds=left_s).run()

        async def see() -> bool:
            after_s = max(0.0, job.GONE_S - silent_s)
            try:
                await stand_in(Ground(self), attempt, after_s=after_s, succeed=succeed)
            except KeeperBackError:
                return False
            except NotRestartedError:
                pass
            return True

        standing = self.spawn(see())
        while not standing.done():
            await asyncio.wait([standing], timeout=1.0)
            if self.heard[attempt.spec.id] != heard and not begun:
                standing.cancel()
                return False
        return standing.result()

    # Next attempts.

    def see(self, part: Part, work: Coroutine[Any, Any, None]) -> None:
        self.seeing[part.attempt.spec.id] = self.spawn(work)

    async def restart(self, part: Part, after_s: float) -> None:
        await self.sleep(after_s)
        try:
            run = Succession(
                Ground(self),
                part.attempt,
                say=lambda why: self.keep(part, job.RestartWaits(why)),
            ).run()
            self.keep(part, job.Restarted(await run))
        except NotRestartedError as error:
            self.seeing[part.attempt.spec.id] = self.spawn(asyncio.sleep(0))
            self.keep(part, job.NotRestarted(error.message))

    async def stand_in(self, part: Part) -> None:
        def succeed(left_s: float) -> Coroutine[Any, Any, str]:
            return Succession(Ground(self), part.attempt, seconds=left_s).run()

        over = replace(part.record, state=JobState.FAILED, ended_age_s=0.0)
        try:
            found = await stand_in(
                Ground(self),
                part.attempt,
                after_s=max(0.0, part.machine.heard + job.GONE_S - self.world.loop.time()),
                succeed=succeed,
            )
        except KeeperBackError:
            self.spawn(self.await_word(part))
        except NotRestartedError:
            part.record = over
        else:
            part.record = found if isinstance(found, JobRecord) else replace(over, successor=found)

    def bind(self, attempt: Signed) -> Signed:
        part = self.parts.get(attempt.history[-1].id)
        phase = None if part is None else part.machine.phase
        heard = self.heard.get(attempt.history[-1].id)
        heard = heard if part is None else part.machine.heard
        bound = bind(
            attempt,
            self.bound.get(attempt.spec.id),
            part=phase,
            heard_s=None if heard is None else self.world.loop.time() - heard,
            node=self.id,
            name=self.name,
        )
        self.bound[attempt.spec.id] = bound
        return bound

    def word(self, ident: str) -> JobRecord:
        part = self.parts.get(ident)
        if part is None:
            raise NotFoundError("no such job")
        if part.kept is not None:
            return part.kept.record(self.world.loop.time())
        return part.record


class Ground:
    """`succession.Ground` of a box."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.world = box.world
        self.node = box.id

    def snapshot(self) -> Snapshot:
        world = self.world
        stale = not world.calm and world.rng.random() < 0.2  # gossip knows later
        return mesh(
            *(
                member(
                    box.name,
                    node=box.id,
                    state=NodeState.ALIVE
                    if stale or world.reaches(self.box, box)
                    else NodeState.DEAD,
                )
                for box in world.boxes.values()
            )
        )

    def sign(self, before: Signed, change: restarts.Change) -> Signed:
        restarts.check(before.spec, change, self.node)
        after = restarts.next_spec(before.spec, change)
        self.world.signed += 1
        chain = before.chain + f"/{self.world.signed}".encode()
        return Signed(after, self.node, chain, (*before.history, before.spec))

    async def stand(self, before: Signed) -> None:
        """Nobody else wants the machines."""

    async def leave(self) -> None: ...

    def keeper_speaks(self, attempt: Signed) -> bool:
        """As `Restarts._keeper_speaks`."""
        ident, now = attempt.spec.id, self.world.loop.time()
        part = self.box.parts.get(ident)
        if part is None:
            watched = ident in self.box.watched
            return watched and now - self.box.heard[ident] < hosted.KEEPER_SILENT_S
        if part.kept is not None:
            return part.kept.state in (JobState.STARTING, JobState.RUNNING)
        heard_s = now - part.machine.heard
        return part.shim != "none" and heard_s < hosted.KEEPER_SILENT_S

    async def answers(self, node: NodeId) -> bool:
        try:
            await self.world.call(self.box, node, lambda: None, ground.ANSWER_S)
        except GpuLayerError:
            return False
        return True

    async def on_all(self, attempt: Signed, what: Callable[[Box], None]) -> None:
        calls = (
            self.world.call(self.box, slot.node, lambda b=self.world.boxes[slot.node]: what(b))  # type: ignore[misc]
            for slot in attempt.spec.slots
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                await self.release(attempt)
                raise answer

    async def reserve(self, attempt: Signed) -> None:
        await self.on_all(attempt, lambda box: box.reserve(attempt))

    async def release(self, attempt: Signed) -> None:
        nodes = [slot.node for slot in attempt.spec.slots]
        await asyncio.gather(
            *(
                self.world.call(
                    self.box,
                    n,
                    lambda b=self.world.boxes[n]: b.release(attempt),  # type: ignore[misc]
                )
                for n in nodes
            ),
            return_exceptions=True,
        )

    async def meet(self, attempt: Signed) -> None:
        """As `starting.meet`; control messages pass where a path is cut."""
        nodes = [slot.node for slot in attempt.spec.slots]
        pairs = tuple(pair for pair in sorted(self.world.cut) if set(pair) <= set(nodes))
        await self.box.sleep(2.0 if pairs else 0.05)
        await self.on_all(attempt, lambda box: None)
        if pairs:
            raise PathsCutError("the nodes cannot all reach each other", pairs=pairs)

    async def agree(self, node: NodeId, attempt: Signed) -> Signed:
        return await self.world.call(self.box, node, lambda: self.world.boxes[node].bind(attempt))

    async def bound(self, node: NodeId, ident: str) -> Signed | None:
        box = self.world.boxes[node]
        return await self.world.call(self.box, node, lambda: box.bound.get(ident))

    async def prepare(self, attempt: Signed, ran: Signed) -> None:
        rng = self.world.rng
        await self.box.sleep(rng.choice([0.05, 0.2, rng.uniform(0.5, FILES_S)]))
        await self.on_all(attempt, lambda box: box.staged(attempt.spec.id))

    async def hold(self, node: NodeId, attempt: Signed) -> None:
        await self.world.call(self.box, node, lambda: self.world.boxes[node].hold(attempt))

    async def go(self, attempt: Signed, order: None) -> None:
        keeper = attempt.spec.slots[0].node
        await self.world.call(
            self.box, keeper, lambda: self.world.boxes[keeper].go(attempt.spec.id)
        )

    async def record(self, node: NodeId, job: str) -> JobRecord:
        box = self.world.boxes[node]
        return await self.world.call(self.box, node, lambda: box.word(job), ground.RECORD_S)


class World:
    """Machines, cables, and what may not happen."""

    def __init__(self, seed: int, loop: VirtualLoop, *, calm: bool = False) -> None:
        self.rng = random.Random(seed)
        self.loop = loop
        self.calm = calm
        self.errors: list[BaseException] = []
        self.signed = 0
        self.attempts: dict[str, Signed] = {}  # that were watched
        self.authors: dict[str, bytes] = {}
        self.loss = 0.0 if calm else self.rng.choice([0.0, 0.02, 0.1])
        self.group: dict[NodeId, int] = {}
        count = self.rng.randint(3, 5)
        self.boxes = {node(i): Box(self, i) for i in range(count)}
        for ident in self.boxes:
            self.group[ident] = 0
        self.cut: set[Pair] = set()
        self.fails = not calm and self.rng.random() < 0.5
        self.slots = self.rng.randint(1, min(3, count - 1))

    async def passes(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def reaches(self, a: Box, b: Box) -> bool:
        return a.answers and b.answers and (a is b or self.group[a.id] == self.group[b.id])

    async def call(
        self, who: Box, node: NodeId, what: Callable[[], T], deadline_s: float = job.CALL_S
    ) -> T:
        box = self.boxes[node]
        await who.awake()
        if box is who:
            return what()
        asked = self.loop.time()
        await asyncio.sleep(self.rng.uniform(0.001, 0.05))
        lies = who.up and box.up and box.agent and self.group[who.id] == self.group[box.id]
        if lies and not box.answers and self.rng.random() < 0.5:
            await box.awake()  # the request lies in a queue until then, or is given up
        if not self.reaches(who, box) or self.rng.random() < self.loss:
            await who.sleep(self.rng.choice([0.1, deadline_s]))
            raise TransportError("lost")
        answer = what()
        late = not self.calm and self.rng.random() < 0.3
        await asyncio.sleep(self.rng.uniform(0.0, deadline_s if late else 0.05))
        if not self.reaches(who, box) or self.rng.random() < self.loss:
            await who.sleep(self.rng.choice([0.1, deadline_s]))
            raise TransportError("lost")
        if self.loop.time() - asked > deadline_s:
            raise TransportError("late")
        return answer

    def fate(self, of: JobSpec, slot: Slot) -> float | None:
        """When the ranks of a slot fail, if they do."""
        if self.fails and self.rng.random() < 0.3:
            return self.rng.uniform(1, 100)
        return None

    def went(self, attempt: Signed) -> None:
        chain = self.authors.setdefault(attempt.spec.id, attempt.chain)
        assert chain == attempt.chain, f"{attempt.spec.id} was started twice"

    def rank_starts(self, box: Box, part: Part) -> None:
        for other in self.boxes.values():
            for ident, there in other.parts.items():
                counts = there.ranks and not other.asleep
                woke = self.loop.time() - other.woke < WOKE_S
                assert ident == part.attempt.spec.id or not counts or woke, (
                    f"attempt {part.attempt.spec.restart} starts on {box.name} while "
                    f"{there.attempt.spec.restart} runs on {other.name}"
                )

    def running(self) -> set[int]:
        return {
            part.attempt.spec.restart
            for box in self.boxes.values()
            for part in box.parts.values()
            if part.ranks and not box.asleep and self.loop.time() - box.woke >= WOKE_S
        }

    async def play(self) -> None:
        await self.begin()
        if self.calm:
            await asyncio.sleep(self.rng.uniform(10, 60))
            lost = self.boxes[self.rng.choice(sorted(self.authors_nodes()))]
            lost.crash()
            at = self.loop.time()
            while self.running() != {1}:
                await asyncio.sleep(0.5)
                assert self.loop.time() - at < 30.0 + FILES_S, "not restarted in time"
            return
        while self.loop.time() < UNREST_S:
            await asyncio.sleep(self.rng.expovariate(1 / 25))
            self.trouble()
            assert len(self.running()) <= 1, self.running()
        for ident in self.group:
            self.group[ident] = 0
        self.cut.clear()
        self.mend()
        end = self.loop.time() + REST_S
        while self.loop.time() < end and not self.settled():
            await self.passes(20)
        self.check_end()

    def authors_nodes(self) -> set[NodeId]:
        return {ident for ident, box in self.boxes.items() if box.parts}

    async def begin(self) -> None:
        names = list(self.boxes)
        self.rng.shuffle(names)
        slots = tuple(Slot(n, self.boxes[n].name, 1) for n in names[: self.slots])
        plain = spec(slots=slots, restarts=self.rng.randint(1, 3))
        voters = restarts.choose_voters(slots, Ground(self.boxes[names[0]]).snapshot())
        first = Signed(replace(plain, voters=voters), node(99), b"first")
        for slot in slots:
            self.boxes[slot.node].reserve(first)
        for slot in slots:
            self.boxes[slot.node].staged(JOB)
        self.boxes[slots[0].node].go(JOB)
        await asyncio.sleep(10)

    def trouble(self) -> None:
        what = self.rng.random()
        boxes = list(self.boxes.values())
        box = self.rng.choice(boxes)
        if what < 0.15:
            if box.up and sum(b.up for b in boxes) > len(boxes) // 2 + 1:
                box.crash()
        elif what < 0.25:
            if box.answers:
                box.end_agent()
                box.spawn_shim(self.later(self.rng.uniform(1, 40), box))
        elif what < 0.32:
            box.frozen_until = self.loop.time() + self.rng.uniform(1, 60)
        elif what < 0.4:
            if not box.asleep:
                box.woke = box.asleep_until = self.loop.time() + self.rng.uniform(1, 120)
        elif what < 0.55:
            self.mend()
        elif what < 0.8:
            for ident in self.group:
                self.group[ident] = self.rng.randint(0, 1)
        elif what < 0.88:
            one, other = self.rng.sample(sorted(self.boxes), 2)
            self.cut ^= {(one, other)}
        else:
            for ident in self.group:
                self.group[ident] = 0

    async def later(self, seconds: float, box: Box) -> None:
        """An agent is started again."""
        await box.sleep(seconds, shim=True)
        if box.up and not box.agent:
            box.start_agent()

    def mend(self) -> None:
        for box in self.boxes.values():
            if not box.up:
                box.up = True
                box.start_agent()

    def settled(self) -> bool:
        """All has come to rest: an attempt runs undisturbed, or nothing goes on any more."""
        boxes = self.boxes.values()
        if any(not task.done() for box in boxes for task in box.seeing.values()):
            return False
        parts = [part for box in boxes for part in box.parts.values()]
        open_ = [part for part in parts if part.machine.phase is not HostPhase.ENDED]
        return all(part.ranks for part in open_) and all(
            part.record.state in OVER for part in parts if part not in open_ and part.shim != "none"
        )

    def check_end(self) -> None:
        assert not self.errors, self.errors
        assert len(self.running()) <= 1
        for box in self.boxes.values():
            for part in box.parts.values():
                if part.machine.phase is not HostPhase.ENDED:
                    assert part.ranks, f"{box.name} holds a part of which nothing runs"
                if box.up and part.shim != "none" and part.machine.phase is HostPhase.ENDED:
                    assert part.record.state in OVER, part.record.state


def play(seed: int, *, calm: bool = False) -> World:
    loop = VirtualLoop()
    try:
        world = World(seed, loop, calm=calm)
        loop.run_until_complete(world.play())
        assert not world.errors, world.errors
        return world
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        while tasks := asyncio.all_tasks(loop):  # some start others at their end
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


@pytest.mark.configurations(4)
def test_never_two_attempts_at_once(number: int, note: Callable[[str], None]) -> None:
    worlds = [play(seed) for seed in range(number * 50, number * 50 + 50)]
    restarted = sum(len(world.authors) > 1 for world in worlds)
    note(f"restarts: 50 seeds from {number * 50}: {restarted} with a restart, 0 violations")
    assert restarted > 10


@pytest.mark.configurations(2)
def test_a_lost_machine_is_replaced_within_30_s(number: int) -> None:
    for seed in range(number * 25, number * 25 + 25):
        play(seed, calm=True)
