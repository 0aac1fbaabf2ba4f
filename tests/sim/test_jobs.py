"""Keeper and hosts against loss, delay, duplicates, crashes, stops, and agents that come back.

500 seeds in virtual time; `--configurations N` plays N times as many. Promises: a node starts its
ranks at most once, in all lives of its agent; the job ends and every surviving node agrees that
nothing of it is left; every reservation is freed; success means that every rank really finished; a
rank that failed for its own reason is never passed over for one that lost its peer; how a rank
ended is recorded as it was, also if it ended while its agent was away.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from gpulayer_mesh.core import hosted, job
from gpulayer_mesh.core.jobspec import HostPhase, HostReport, JobRecord, JobState
from gpulayer_mesh.core.lease import Reservations
from gpulayer_mesh.core.types import Grant
from job_cases import JOB, ORDER, node, spec

GLOO = "RuntimeError: gloo: Connection closed by peer"
MINUTES = 15 * 60.0  # virtual; far above every deadline together


class Node:
    """One machine: the host's machine, its reservations and a shim that runs pretended ranks."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.up = True  # the machine
        self.agent = True
        self.shim_log: list[hosted.Event] = []  # on disk: what a new agent reads from the first
        self.starts = 0
        self.booked = Reservations(f"box-{index}", cpus=8)
        self.host = hosted.HostedJob(world.spec, index, now=world.now)
        slot = world.spec.slots[index]
        self.booked.grant(world.now, JOB, processes=slot.processes)
        first = sum(s.processes for s in world.spec.slots[:index])
        self.ranks = list(range(first, first + slot.processes))
        self.alive: set[int] = set()
        self.finished: set[int] = set()  # exited with 0 by themselves
        self.shim = "none"
        self.wake(world.now)

    def handle(self, event: hosted.Event) -> HostReport:
        """Feed the host's machine, as its shell does, and answer with its report."""
        for effect in self.host.handle(self.world.now, event):
            match effect:
                case hosted.StartShim():
                    self.starts += 1
                    self.shim = "running"
                    self.world.after(self.world.rng.uniform(0.05, 0.5), self.start_ranks)
                case hosted.StopShim(grace_s):
                    # Native code may be deaf to SIGTERM; the shim kills at the end of the grace.
                    delay = self.world.rng.choice([0.1, grace_s])
                    self.world.after(delay, self.end_ranks)
                case hosted.KillShim():
                    self.world.after(0.1, self.end_ranks)
                case hosted.HoldGrant():
                    assert self.booked.hold(JOB)
                case hosted.FreeGrant():
                    assert self.booked.release(JOB)
                case hosted.ReportToKeeper(report):
                    self.world.send(self.index, 0, lambda r=report: self.world.keep(r))
        self.host.check()
        self.booked.check()
        self.wake(self.host.next_timeout())
        return self.host.report(self.world.now)

    def wake(self, at: float | None) -> None:
        if at is not None:
            self.world.at(at, self.tick)

    def tick(self) -> None:
        due = self.host.next_timeout()
        if self.hears and due is not None and self.world.now >= due:
            self.handle(hosted.Tick())

    @property
    def hears(self) -> bool:
        return self.up and self.agent

    def said(self, event: hosted.Event) -> None:
        """The shim writes something down; an agent that is there takes it up at once."""
        self.shim_log.append(event)
        if self.agent:
            self.handle(event)

    def kill_agent(self) -> None:
        if self.hears:
            self.agent = False
            self.world.after(self.world.rng.choice([0.2, 3.0, 15.0]), self.new_agent)

    def new_agent(self) -> None:
        """Do what `JobHost._adopt` does."""
        if not self.up or self.agent:
            return
        self.agent = True
        world = self.world
        over = self.index == 0 and world.keeper.stage is job.Stage.ENDED
        self.booked = Reservations(f"box-{self.index}", cpus=8)
        if self.starts and not over:
            self.host = hosted.HostedJob.adopt(world.spec, self.index, now=world.now)
            self.booked.adopt(Grant(JOB, world.spec.slots[self.index].processes, ()))
            for event in list(self.shim_log):
                self.handle(event)
        else:
            self.host = hosted.HostedJob(world.spec, self.index, now=world.now)
            self.host.handle(world.now, hosted.StageFailed("its agent was started anew"))
        self.wake(self.host.next_timeout())
        if self.index == 0:
            world.new_keeper()

    def start_ranks(self) -> None:
        if not self.up or self.shim != "running":
            return
        for rank in self.ranks:
            self.alive.add(rank)
            self.said(hosted.RankStarted(rank, 1000 + rank))
            end, code, tail = self.world.fate(rank)
            self.world.after(end, lambda r=rank, c=code, t=tail: self.exit_rank(r, c, t))

    def exit_rank(self, rank: int, code: int, tail: str = "", stopped: bool = False) -> None:
        if not self.up or rank not in self.alive:
            return
        self.alive.remove(rank)
        if code == 0:
            self.finished.add(rank)
        self.said(hosted.RankExited(rank, code, stopped=stopped, tail=(tail,) if tail else ()))
        if code != 0:
            self.world.peers_notice(rank)
            if not stopped and self.world.failed_at is None:
                self.world.failed_at = self.world.now
        if not self.alive and self.shim == "running":
            self.shim = "done"
            self.world.after(0.1, lambda: self.up and self.said(hosted.ShimDone()))

    def end_ranks(self) -> None:
        if not self.up or self.shim == "done":
            return
        self.shim = "ending"
        for rank in sorted(self.alive):
            self.exit_rank(rank, 1, stopped=True)
        self.shim = "done"
        self.world.after(0.1, lambda: self.up and self.said(hosted.ShimDone()))


class World:
    """Virtual time, a lossy network, one keeper on node 0 and a launcher that may vanish."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()
        processes = [self.rng.randint(1, 3) for _ in range(self.rng.randint(1, 5))]
        self.spec = spec(*processes, stop_grace_s=self.rng.choice([1.0, 10.0, 30.0]))
        self.loss = self.rng.choice([0.0, 0.05, 0.3])
        self.slow = self.rng.choice([0.01, 0.5, 3.0])
        self.cut: set[int] = set()  # nodes without a network
        self.doomed = {r for r in range(sum(processes)) if self.rng.random() < 0.15}
        self.deaf = self.rng.random() < 0.3  # peers hang instead of noticing a lost one
        self.nodes = [Node(self, i) for i in range(len(processes))]
        self.keeper = job.KeptJob(self.spec, now=0.0)
        self.asked_to_stop = False
        self.broken = False  # a node crashed or was cut off
        self.failed_at: float | None = None  # the first rank that failed by itself
        self.ended_at: float | None = None
        self.saved: tuple[JobRecord, float] | None = None  # the keeper's record on disk, and when
        self.gone = False  # the keeper's agent came back before the job went
        self.agents_died = False

    # Time and messages

    def at(self, when: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._number), action))

    def after(self, delay: float, action: Callable[[], object]) -> None:
        self.at(self.now + delay, action)

    def send(self, source: int, target: int, action: Callable[[], object]) -> None:
        """Deliver a message once, twice, late or never."""
        for _ in range(2 if self.rng.random() < 0.1 else 1):
            if source == target or self.rng.random() >= self.loss:
                delay = 0.0 if source == target else self.rng.uniform(0, self.slow)
                self.after(delay, lambda: self.deliver(source, target, action))

    def deliver(self, source: int, target: int, action: Callable[[], object]) -> None:
        if not ({source, target} & self.cut and source != target) and self.nodes[target].hears:
            action()

    def run(self) -> None:
        while self._heap and self._heap[0][0] <= MINUTES:
            self.now, _, action = heapq.heappop(self._heap)
            action()

    # What happens

    def fate(self, rank: int) -> tuple[float, int, str]:
        if rank in self.doomed:
            return self.rng.uniform(0, 60), 3, "ValueError: doomed"
        return self.rng.uniform(60, 120), 0, ""

    def peers_notice(self, gone: int) -> None:
        if self.deaf:
            return
        for other in self.nodes:
            for rank in [r for r in other.alive if r != gone]:
                delay = self.rng.uniform(0.0, 0.3)
                self.after(delay, lambda n=other, r=rank: n.exit_rank(r, 1, GLOO))

    def crash(self, index: int) -> None:
        self.broken = True
        self.nodes[index].up = False
        for rank in sorted(self.nodes[index].alive):
            self.peers_notice(rank)

    def cut_off(self, index: int) -> None:
        self.broken = True
        self.cut.add(index)

    def go(self) -> None:
        """The launcher's order; the door takes it only where the job is staged."""
        if self.nodes[0].hears and not self.gone:
            self.decide(job.Go(ORDER))

    # The keeper's shell

    def keep(self, report: HostReport) -> None:
        self.decide(job.HostReported(report))

    def decide(self, event: job.Event) -> None:
        for effect in self.keeper.handle(self.now, event):
            match effect:
                case job.StartHost(target, order):
                    self.call(target, hosted.Start(order))
                case job.RenewHost(target):
                    self.call(target, hosted.Renewed())
                case job.StopHost(target, grace_s, kill):
                    self.call(target, hosted.Stop(grace_s, kill))
                case job.RecordChanged(record):
                    assert "canary" not in repr(record)
                    self.saved = record, self.now
        self.keeper.check()
        if self.keeper.stage is job.Stage.ENDED and self.ended_at is None:
            self.ended_at = self.now
        due = self.keeper.next_timeout()
        if due is not None:
            self.at(due, self.keeper_tick)

    def keeper_tick(self) -> None:
        due = self.keeper.next_timeout()
        if self.nodes[0].hears and due is not None and self.now >= due:
            self.decide(job.Tick())

    def new_keeper(self) -> None:
        """Rebuild the keeper from its last record, as a new agent does."""
        if self.keeper.stage is job.Stage.ENDED:
            return
        if self.saved is None:  # never went: the launcher finds nothing staged
            self.keeper = job.KeptJob(self.spec, now=self.now)
            self.gone = True
        else:
            record, at = self.saved
            aged = replace(record, age_s=record.age_s + self.now - at)
            self.keeper = job.KeptJob.resume(aged, now=self.now)
        self.decide(job.Tick())

    def call(self, target: str, event: hosted.Event) -> None:
        index = next(i for i in range(len(self.nodes)) if node(i) == target)
        answered: list[bool] = []

        def arrive() -> None:
            report = self.nodes[index].handle(event)
            self.send(index, 0, lambda: answer(report))

        def answer(report: HostReport) -> None:
            answered.append(True)
            self.keep(report)

        def give_up() -> None:
            if not answered and self.nodes[0].hears:
                self.decide(job.ReportFailed(target, "timed out"))

        self.send(0, index, arrive)
        self.after(4.0, give_up)


def play(seed: int) -> World:
    """Stage, go, and let faults happen."""
    world = World(seed)
    rng = world.rng
    for one in world.nodes:
        one.handle(hosted.StageBegan())
        # Staging may take longer than a start would be waited for, but not than the lease.
        world.at(rng.uniform(0, 25), lambda n=one: n.hears and n.handle(hosted.Staged()))
    if rng.random() < 0.9:
        world.at(rng.uniform(0, 20), world.go)
    others = range(1, len(world.nodes))
    fault = rng.random()
    when = rng.uniform(0, 130)
    if fault < 0.15:
        world.at(when, lambda: world.crash(0))
    elif fault < 0.35 and others:
        victim = rng.choice(others)
        world.at(when, lambda: world.crash(victim))
    elif fault < 0.55 and others:
        victim = rng.choice(others)
        world.at(when, lambda: world.cut_off(victim))
        if rng.random() < 0.5:
            world.at(when + rng.uniform(0, 60), lambda: world.cut.discard(victim))
    if rng.random() < 0.3:

        def stop(kill: bool) -> None:
            if world.nodes[0].hears and world.ended_at is None:
                world.asked_to_stop = True
                world.decide(job.StopRequested("laptop", kill=kill))

        at = rng.uniform(0, 130)
        world.at(at, lambda: stop(False))
        if rng.random() < 0.5:
            world.at(at + rng.uniform(0, 5), lambda: stop(True))
    if rng.random() < 0.4:
        world.agents_died = True
        for _ in range(rng.randint(1, 4)):
            dying = world.nodes[rng.randrange(len(world.nodes))]
            world.at(rng.uniform(0, 130), dying.kill_agent)
    world.at(0.0, world.keeper_tick)
    world.decide(job.Tick())
    world.run()
    return world


def judge(world: World) -> None:
    for one in world.nodes:
        assert one.starts <= 1
        if one.up:
            assert one.host.phase is HostPhase.ENDED
            assert one.booked.grants == ()
            assert not one.alive
    if not world.nodes[0].up:
        return  # the keeper died with its ranks; the others ended by themselves
    keeper = world.keeper
    assert world.ended_at is not None
    finished = set().union(*(one.finished for one in world.nodes))
    everything = {rank for one in world.nodes for rank in one.ranks}
    match keeper.state:
        case JobState.SUCCEEDED:
            assert finished == everything
        case JobState.CANCELLED:
            assert world.asked_to_stop or keeper.cause == "no go order within 30 s"
        case JobState.FAILED:
            assert keeper.failure is not None
            assert keeper.failure.code != 0
            if keeper.failure.rank is not None and not world.broken:
                assert keeper.failure.rank in world.doomed
        case other:
            pytest.fail(f"ended as {other}")
    for report in keeper.record(world.now).reports:
        one = next(one for one in world.nodes if node(one.index) == report.node)
        truth = {e.rank: e for e in one.shim_log if isinstance(e, hosted.RankExited)}
        if one.up and one.index not in world.cut and report.phase is HostPhase.ENDED:
            for status in report.ranks:
                if status.exit_code is not None or status.rank in truth:
                    end = truth[status.rank]
                    assert (status.exit_code, status.stopped) == (end.code, end.stopped), status
    calm = not world.broken and not world.agents_died and world.loss == 0 and world.slow <= 0.5
    if calm and not world.asked_to_stop and world.failed_at is not None:
        assert world.ended_at - world.failed_at < 10.0
    undisturbed = not world.broken and not world.agents_died
    if undisturbed and not world.doomed and not world.asked_to_stop and world.loss < 0.3:
        assert keeper.state in (JobState.SUCCEEDED, JobState.CANCELLED)


@pytest.mark.configurations(5)
def test_every_job_ends_starts_once_and_frees_everything(number: int) -> None:
    for seed in range(number * 100, number * 100 + 100):
        world = play(seed)
        try:
            judge(world)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {world.keeper.state} {world.keeper.failure}")
            error.add_note("\n".join(map(str, world.keeper.history)))
            raise


def test_the_same_seed_plays_the_same_job() -> None:
    first, second = play(7), play(7)
    assert list(first.keeper.history) == list(second.keeper.history)
    assert first.ended_at == second.ended_at


def test_the_seeds_cover_every_outcome() -> None:
    outcomes = {play(seed).keeper.state for seed in range(40)}
    assert outcomes >= {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
