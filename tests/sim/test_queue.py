"""Launchers that queue for the same nodes, over a bad network, in virtual time.

The waiting side is the launcher's own code on an event loop whose clock jumps; a node is what its
agent has: reservations and tickets, by a clock of its own, which stands still or jumps while the
machine sleeps. Calls are late, lost or doubled, nodes cut off; launchers die, sleep or are
interrupted, and agents start anew, at any time and at each of POINTS. Promises: no CPU is granted
twice; whoever was registered on all its nodes before another one asked is not overtaken on any of
them; every job that can run gets its turn; what a launcher held that died is free in bounded time;
at the end nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from gpulayer_mesh import starting
from gpulayer_mesh.core import placement, wire
from gpulayer_mesh.core.jobspec import JobSpec
from gpulayer_mesh.core.lease import LEASE_S, Reservations
from gpulayer_mesh.core.tickets import TICKET_S, Standing, Ticket, Tickets
from gpulayer_mesh.core.types import (
    Accelerator,
    Capabilities,
    Grant,
    MemberSnapshot,
    NodeState,
    Role,
    Snapshot,
    TorchAbilities,
)
from gpulayer_mesh.errors import (
    GpuLayerError,
    PlacementBusyError,
    PlacementError,
    StoppedError,
    TransportError,
)
from job_cases import node, spec
from virtual_loop import VirtualLoop

from gpulayer import waiting

T = TypeVar("T")

CALL_S = 3.0  # a launcher's patience with one call
LATE_S = 8.0  # a copy of a message may arrive this much later
ALL_SUBMITTED_S = 100.0  # and every fault has happened
HORIZON_S = 3600.0  # far more than all jobs one after another
FREE_S = TICKET_S + LEASE_S + LATE_S + 4.0  # then nothing of a launcher is left that died
KEPT_S = 100.0  # no job takes longer
SEEDS = 120
HOURS_S = 6 * 3600.0  # what a clock jumps by at most

ASKED = ("tickets", "stand", "drop", "reserve", "release", "start")
POINTS = (
    "launcher before snapshot",
    *(f"launcher {when} {verb}" for verb in ASKED for when in ("before", "after")),
    *(f"node {when} {verb}" for verb in ASKED for when in ("before", "after")),
)
FAULTS = ("die", "sleep", "interrupt")  # of launchers; an agent starts anew


class Down(Exception):
    """The agent that was asked has ended."""


@dataclass(slots=True)
class Job:
    """What becomes of one, for the judge."""

    ident: str
    nodes: int
    processes: int
    target: tuple[str, ...]
    length_s: float
    wait_s: float | None
    asked: float = -1.0
    heard: dict[int, float] = field(default_factory=dict)  # node -> when it told who waits there
    left: float | None = None  # it has its nodes, gave up, or its launcher is gone
    begun: float | None = None
    dead: bool = False
    end: str = ""
    awake: float = 0.0  # from when on
    task: asyncio.Task[Any] | None = field(default=None, compare=False)


class Node:
    """An agent as `JobHost` is one: it asks its tickets first, then its reservations."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.name = f"box-{index}"
        self.cpus = world.rng.randint(1, 4)
        self.up = True
        self.asleep = False
        self.offset = world.rng.uniform(0, 1e6)  # of its clock
        self.down_since = 0.0
        self.restarted = -TICKET_S
        self.booked = Reservations(self.name, cpus=self.cpus)
        self.tickets = Tickets(self.name)
        self.tries: dict[str, int] = {}  # job -> attempt that holds the reservation
        self.running: set[str] = set()
        self.over: set[str] = set()  # ran here, or was ended before it could
        # job -> first, newest renewal by this node's clock
        self.registered: dict[str, tuple[float, float]] = {}
        self.gossip: tuple[Grant, ...] = ()

    @property
    def now(self) -> float:
        """By this node's clock."""
        return self.world.now + self.offset

    @property
    def hears(self) -> bool:
        return self.up and not self.asleep

    def take(self, ticket: Ticket) -> Standing:
        now = self.now
        self.booked.expire(now)  # as the agent's timer does
        stood = self.tickets.find(now, ticket.job) is not None
        standing = self.tickets.take(now, ticket)
        if self.tickets.find(now, ticket.job) is not None:
            first = self.registered[ticket.job][0] if stood else self.world.now
            self.registered[ticket.job] = (first, now)
        self.tickets.check()
        return replace(standing, grants=self.booked.grants)

    def reserve(self, wanted: JobSpec) -> None:
        now, job = self.now, wanted.id
        known = self.tries.get(job) if job in {g.job for g in self.booked.grants} else None
        if known == wanted.attempt:
            self.booked.renew(now, job)
            return
        if job in self.over or job in self.running or (known or 0) > wanted.attempt:
            raise GpuLayerError(f"job {job} was here before")
        if known is not None:
            self.booked.release(job)
        (slot,) = [slot for slot in wanted.slots if slot.node == node(self.index)]
        self.tickets.admit(now, job, wanted.submitter)
        self.booked.grant(now, job, processes=slot.processes)
        self.tries[job] = wanted.attempt
        self.booked.check()
        self.world.judge_turn(self, job)

    def release(self, job: str, attempt: int) -> None:
        if job not in self.running and self.tries.get(job, 0) <= attempt:
            self.booked.release(job)

    def start(self, wanted: JobSpec) -> bool:
        self.booked.expire(self.now)
        if self.tries.get(wanted.id) == wanted.attempt and self.booked.hold(wanted.id):
            self.running.add(wanted.id)
            # From `go` on the keeper ends a job, whatever becomes of the launcher.
            self.world.loop.call_later(KEPT_S, self.finish, wanted.id)
        return wanted.id in self.running

    def finish(self, job: str) -> None:
        self.running.discard(job)
        self.over.add(job)
        self.booked.release(job)

    def crash(self) -> None:
        if self.hears:
            self.up, self.down_since = False, self.world.now
            self.world.loop.call_later(self.world.rng.uniform(0.1, 6), self.restart)

    def sleep(self, seconds: float, jump: float) -> None:
        """Have the machine sleep.

        Args:
            jump: by how much more or less its clock goes on meanwhile.
        """

        def wake() -> None:
            self.asleep = False
            self.offset += jump
            self.restarted = self.world.now  # those who wait may have lost time, or won some

        if not self.asleep:
            self.asleep, self.down_since = True, self.world.now
            self.world.loop.call_later(seconds, wake)

    def restart(self) -> None:
        """The shims' jobs are taken over, mere reservations are not; who waits is on disk."""
        now = self.now
        held = [grant for grant in self.booked.grants if grant.job in self.running]
        self.booked = Reservations(self.name, cpus=self.cpus)
        for grant in held:
            self.booked.adopt(grant)
        waits = self.tickets.all(self.down_since + self.offset)
        self.tickets = Tickets(self.name)
        self.tickets.adopt(now, waits)
        self.up, self.restarted = True, self.world.now


class World:
    """Nodes, launchers and the network between them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.loss = rng.choice([0.0, 0.02, 0.2])
        self.slow = rng.choice([0.01, 0.3, 1.2])
        self.cut: set[int] = set()  # nodes that no launcher reaches
        self.was_cut = False
        self.point = self.fault = ""  # what happens, once, where somebody gets to a point
        self.left = 1  # times until it does
        self.struck = ""  # the point at which it has
        self.nodes = [Node(self, index) for index in range(rng.randint(2, 5))]
        self.jobs: list[Job] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.loop = asyncio.get_running_loop()

    @property
    def now(self) -> float:
        return self.loop.time()

    def spawn(self, what: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(what)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # The network

    async def call(self, job: Job, verb: str, index: int, what: Callable[[], T]) -> T:
        """Ask a node; the question or the answer may be late, lost or doubled."""
        await self.reach(job, f"launcher before {verb}")
        rng, target = self.rng, self.nodes[index]
        if rng.random() < 0.05:
            self.loop.call_later(rng.uniform(0, LATE_S), self._late, target, what)
        there, back = rng.uniform(0, self.slow), rng.uniform(0, self.slow)
        lost = rng.random()
        delivered: asyncio.Future[tuple[T | None, GpuLayerError | None]] = self.loop.create_future()

        def arrive() -> None:
            if not target.hears or index in self.cut:
                return
            try:
                self.strike(target, f"node before {verb}")
                answer: tuple[T | None, GpuLayerError | None] = (what(), None)
                self.strike(target, f"node after {verb}")
            except Down:
                return
            except GpuLayerError as error:
                answer = (None, error)
            if not delivered.done():
                delivered.set_result(answer)

        if lost >= self.loss / 2:
            self.loop.call_later(there, arrive)
        try:
            async with asyncio.timeout(CALL_S):
                value, error = await delivered
                await asyncio.sleep(back)
                if lost > 1 - self.loss / 2 or index in self.cut:
                    await asyncio.Event().wait()
        except TimeoutError:
            raise TransportError("no answer") from None
        finally:
            if not job.dead:
                await self.reach(job, f"launcher after {verb}")
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    async def reach(self, job: Job, point: str) -> None:
        """Have a launcher come to a point, and perhaps no further for now."""
        if self._is_time(point):
            match self.fault:
                case "die" if job.begun is None:
                    self.die(job)
                case "sleep":
                    job.awake = self.now + self.rng.uniform(1, 60)
                case "interrupt" if job.left is None and job.task is not None:
                    job.task.cancel()
        if job.dead:
            await asyncio.Event().wait()  # a killed process asks nothing more
        await asyncio.sleep(job.awake - self.now)

    def die(self, job: Job) -> None:
        job.dead, job.end = True, "died"
        self.loop.call_later(FREE_S, self.judge_dead, job)

    def strike(self, target: Node, point: str) -> None:
        """Have a node come to a point.

        Raises:
            Down: it goes no further.
        """
        if self._is_time(point):
            target.crash()
            raise Down

    def _is_time(self, point: str) -> bool:
        assert point in POINTS
        self.left -= point == self.point and not self.struck
        if self.left or self.struck:
            return False
        self.struck = point
        return True

    def _late(self, target: Node, what: Callable[[], object]) -> None:
        if target.hears and target.index not in self.cut:
            with contextlib.suppress(GpuLayerError):
                what()

    async def gossiping(self) -> None:
        """What members hear of each other is seconds old."""
        while True:
            for one in self.nodes:
                if one.hears and self.rng.random() < 0.7:
                    one.booked.expire(one.now)
                    one.gossip = one.booked.grants
            await asyncio.sleep(1.0)

    def snapshot(self) -> Snapshot:
        members = []
        for one in self.nodes:
            silent = not one.hears and self.now - one.down_since > 2.0
            caps = Capabilities(
                one.cpus,
                32000,
                16000,
                100_000,
                "Linux",
                "3.11.7",
                "0",
                TorchAbilities("2.13.0", (Accelerator.CPU,), ("gloo",)),
            )
            members.append(
                MemberSnapshot(
                    node(one.index),
                    one.name,
                    (Role.WORKER,),
                    NodeState.SUSPECT if silent else NodeState.ALIVE,
                    rtt_ms=1.0,
                    heard_s=self.now - one.down_since,
                    caps=caps,
                    grants=one.gossip,
                )
            )
        return Snapshot("a" * 64, "", 1, tuple(members))

    # A launcher

    async def launch(self, job: Job) -> None:
        """One launcher process, from its start to the end of its job."""
        job.asked = self.now
        who = waiting.Applicant(job.ident, node(900 + len(job.ident)), "laptop", "x")
        client = _Client(self, job, who)
        request = placement.Request(job.nodes, job.processes, Accelerator.CPU, job.target)

        async def reserve(plan: placement.Plan, attempt: int) -> JobSpec:
            slots = plan.slots
            wanted = replace(
                spec(1), id=job.ident, submitter=who.submitter, slots=slots, attempt=attempt
            )
            await starting.reserve(client, wanted, wire.pack(wanted))  # type: ignore[arg-type]
            job.left = job.left or self.now
            return wanted

        try:
            wanted = await waiting.in_turn(
                client, request, who, wait_s=job.wait_s, reserve=reserve, say=lambda text: None
            )
            await asyncio.sleep(self.rng.uniform(0, 10))  # staging
            used = [_index(slot.node) for slot in wanted.slots]
            answers = await asyncio.gather(
                *(
                    self.call(job, "start", i, lambda i=i: self.nodes[i].start(wanted))
                    for i in used
                ),
                return_exceptions=True,
            )
            if all(answer is True for answer in answers):
                job.begun, job.end = self.now, "ran"
                await asyncio.sleep(job.length_s)
            else:
                job.end = "failed to start"
            for i in used:
                self.nodes[i].finish(job.ident)
        except (PlacementError, TransportError, StoppedError) as error:
            job.end = type(error).__name__
        except asyncio.CancelledError:
            job.end = job.end or "interrupted"
        finally:
            job.left = job.left or self.now

    # The judge

    def judge_turn(self, where: Node, job: str) -> None:
        """Nobody who had registered here before this one came here may still wait."""
        mine = next(one for one in self.jobs if one.ident == job)
        came = mine.heard.get(where.index, mine.asked if not mine.heard else 0.0)
        # One that had to wait and never heard from this node can have a number that is too low.
        for other in self.jobs:
            first, newest = where.registered.get(other.ident, (None, None))
            if other is mine or first is None or newest is None or first >= came:
                continue
            stands = newest + TICKET_S > where.now and not other.dead and other.left is None
            assert not stands, f"{job} overtook {other.ident} on {where.name} at {self.now:.2f}"

    def judge_dead(self, job: Job) -> None:
        """Its tickets and reservations are gone, unless its job has begun.

        A restart gives those who wait another lease.
        """
        for one in self.nodes:
            one.booked.expire(one.now)
            if one.hears and self.now - one.restarted > TICKET_S and job.ident not in one.running:
                assert one.tickets.find(one.now, job.ident) is None
                assert all(grant.job != job.ident for grant in one.booked.grants)


class _Client:
    """What `waiting` and `starting.reserve` ask of a `MeshClient`."""

    def __init__(self, world: World, job: Job, who: waiting.Applicant) -> None:
        self.world = world
        self.job = job
        self.identity = SimpleNamespace(node=who.submitter)

    async def snapshot(self) -> Snapshot:
        await self.world.reach(self.job, "launcher before snapshot")
        await asyncio.sleep(self.world.rng.uniform(0, self.world.slow))
        return self.world.snapshot()

    async def find_again(self) -> None:
        await asyncio.sleep(1.0)

    async def tickets(self, target: str) -> list[Ticket]:
        box = self.world.nodes[_index(target)]

        def answer() -> tuple[float, tuple[Ticket, ...]]:
            return self.world.now, box.tickets.all(box.now)

        at, found = await self.world.call(self.job, "tickets", box.index, answer)
        self.job.heard[box.index] = at
        return list(found)

    async def stand(self, target: str, ticket: Ticket) -> Standing:
        box = self.world.nodes[_index(target)]
        return await self.world.call(self.job, "stand", box.index, lambda: box.take(ticket))

    async def drop_ticket(self, target: str, job: str) -> None:
        self.job.left = self.job.left or self.world.now
        box = self.world.nodes[_index(target)]
        who = self.identity.node
        await self.world.call(
            self.job, "drop", box.index, lambda: box.tickets.drop(box.now, job, who)
        )

    async def call(self, target: str, method: str, path: str, body: Any, **_: Any) -> None:
        box = self.world.nodes[_index(target)]
        if path.endswith("/reserve"):
            wanted = wire.decode_as(JobSpec, wire.unpack(body["spec"]))
            await self.world.call(self.job, "reserve", box.index, lambda: box.reserve(wanted))
        else:
            attempt = body["attempt"]
            await self.world.call(
                self.job, "release", box.index, lambda: box.release(self.job.ident, attempt)
            )


def _index(ident: str) -> int:
    return int(ident, 16)


async def play(seed: int, point: str, fault: str) -> World:
    world = World(seed)
    rng = world.rng
    if point or seed % 2:
        world.point = point or POINTS[seed // 2 % len(POINTS)]
        world.fault = fault or rng.choice(FAULTS)
        world.left = rng.choice([1, 1, 2, 5])
    world.spawn(world.gossiping())
    launchers: list[asyncio.Task[Any]] = []

    def submit(job: Job) -> None:
        world.jobs.append(job)
        task = job.task = world.spawn(world.launch(job))
        launchers.append(task)
        fate = rng.random()
        at = rng.expovariate(1 / 20)
        if fate < 0.15:

            def die() -> None:
                if job.left is None and not job.dead:
                    world.die(job)

            world.loop.call_later(at, die)
        elif fate < 0.25:
            world.loop.call_later(at, lambda: None if job.left is not None else task.cancel())
        elif fate < 0.35:
            world.loop.call_later(at, lambda: setattr(job, "awake", world.now + 2 * at))

    for number in range(rng.randint(4, 14)):
        count = rng.randint(1, len(world.nodes))
        some = rng.sample(world.nodes, rng.randint(count, len(world.nodes)))
        job = Job(
            ident=f"{rng.randrange(10**6):06}{number:04}",
            nodes=count,
            processes=rng.randint(1, min(one.cpus for one in some)),
            target=tuple(one.name for one in some),
            length_s=min(rng.expovariate(1 / 20), KEPT_S - 10),
            wait_s=rng.choice([None, None, None, None, 0.0, 20.0]),
        )
        world.loop.call_later(rng.uniform(0, 30), submit, job)
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 4)):
            victim = rng.choice(world.nodes)
            world.loop.call_later(rng.uniform(0, 90), victim.crash)
    if rng.random() < 0.3:
        tired, seconds = rng.choice(world.nodes), rng.choice([2.0, 15.0, 40.0])
        jump = rng.choice([-seconds, 0.0, rng.uniform(0, HOURS_S)])
        world.loop.call_later(rng.uniform(0, 50), tired.sleep, seconds, jump)
    if rng.random() < 0.3:
        lost, at = rng.randrange(len(world.nodes)), rng.uniform(0, 50)
        world.was_cut = True
        world.loop.call_later(at, world.cut.add, lost)
        world.loop.call_later(at + rng.uniform(1, 40), world.cut.discard, lost)
    await asyncio.sleep(ALL_SUBMITTED_S)
    alive = [task for task, job in zip(launchers, world.jobs, strict=True) if not job.dead]
    await asyncio.wait(alive, timeout=HORIZON_S)
    await asyncio.sleep(FREE_S)
    while world.tasks:  # those of dead launchers hang in their own ends, too
        for task in list(world.tasks):
            task.cancel()
        await asyncio.wait(world.tasks, timeout=1.0)
    return world


def judge(world: World) -> None:
    calm = world.loss == 0 and not world.was_cut
    calm &= all(one.down_since == 0.0 for one in world.nodes)
    calm &= all(job.awake == 0.0 for job in world.jobs)
    # A bad network or a restart may cost a start, or the first look, but leaves nobody waiting.
    allowed = {"ran"} if calm else {"ran", "failed to start", TransportError.__name__}
    for job in world.jobs:
        if job.wait_s is None and job.end not in ("died", "interrupted"):
            assert job.end in allowed, job
    for one in world.nodes:
        one.booked.expire(one.now)
        assert one.tickets.all(one.now) == ()
        assert one.booked.grants == ()


def run(seed: int, point: str = "", fault: str = "") -> World:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        failures: list[BaseException] = []

        async def main() -> World:
            asyncio.get_running_loop().set_exception_handler(
                lambda loop, context: failures.append(context.get("exception") or Exception())
            )
            return await play(seed, point, fault)

        world = runner.run(main())
        if failures:
            raise failures[0]
        judge(world)
        return world


@pytest.mark.parametrize("batch", range(4))
def test_nobody_is_overtaken_and_everybody_gets_a_turn(batch: int) -> None:
    size = SEEDS // 4
    for seed in range(batch * size, batch * size + size):
        try:
            run(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def test_launchers_and_agents_may_go_at_each_point() -> None:
    for number, point in enumerate(POINTS):
        for seed in range(number * 30, number * 30 + 30):
            if run(seed, point, FAULTS[seed % len(FAULTS)]).struck:
                break
        else:
            pytest.fail(f"nobody came to {point!r}")


def test_the_same_seed_plays_the_same_queue() -> None:
    first, second = run(7), run(7)
    assert first.jobs == second.jobs


def test_the_seeds_cover_every_end() -> None:
    ends = {job.end for seed in range(40) for job in run(seed).jobs}
    assert ends >= {"ran", "died", "interrupted", PlacementBusyError.__name__}
