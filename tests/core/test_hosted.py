"""One node's part of a job: leases, one start, stop and kill, an end in every case."""

from __future__ import annotations

import pytest
from gpulayer_mesh.core.hosted import (
    CLEANUP_S,
    CONFIRM_S,
    KEEPER_SILENT_S,
    KILL_AFTER_S,
    SILENT_GRACE_S,
    START_S,
    TAIL_CHARS,
    TAILS_MAX,
    Effect,
    Event,
    FreeGrant,
    HoldGrant,
    HostedJob,
    KillShim,
    RankExited,
    RankStarted,
    Release,
    Renewed,
    ReportToKeeper,
    ShimDone,
    ShimLost,
    StageBegan,
    Staged,
    StageFailed,
    Start,
    StartShim,
    Stop,
    StopShim,
    Tick,
    Touched,
)
from gpulayer_mesh.core.jobspec import HostPhase, RankState
from gpulayer_mesh.core.lease import LEASE_S
from gpulayer_mesh.errors import IllegalTransitionError
from job_cases import JOB, ORDER, node, spec


class Box:
    """Drives one machine and checks its invariants after every event."""

    def __init__(self, *processes: int, slot: int = 0) -> None:
        self.now = 100.0
        self.job = HostedJob(spec(*(processes or (2, 1))), slot, now=self.now)
        self.effects: list[Effect] = []

    def do(self, event: Event, after: float = 0.0) -> list[Effect]:
        self.now += after
        effects = self.job.handle(self.now, event)
        self.job.check()
        self.effects += effects
        return [effect for effect in effects if not isinstance(effect, ReportToKeeper)]

    def told(self) -> int:
        return sum(isinstance(effect, ReportToKeeper) for effect in self.effects)

    def start(self) -> Box:
        self.do(StageBegan())
        self.do(Staged())
        assert self.do(Start(ORDER)) == [HoldGrant(), StartShim(ORDER)]
        return self

    def run(self) -> Box:
        self.start()
        for rank, status in enumerate(self.job.report(self.now).ranks):
            self.do(RankStarted(status.rank, 100 + rank))
        return self

    @property
    def phase(self) -> HostPhase:
        return self.job.phase

    def states(self) -> list[RankState]:
        return [status.state for status in self.job.report(self.now).ranks]


def test_happy_path_holds_the_grant_and_frees_it_once() -> None:
    box = Box().run()
    assert box.phase is HostPhase.RUNNING
    assert box.do(RankExited(0, 0), 5) == []
    assert box.do(RankExited(1, 0), 1) == []
    assert box.phase is HostPhase.STOPPING
    assert box.do(ShimDone(), 1) == [FreeGrant()]
    assert box.phase is HostPhase.ENDED
    assert box.do(ShimDone()) == []
    assert box.job.next_timeout() is None
    report = box.job.report(box.now)
    assert report.problem == ""
    assert [r.ended_age_s for r in report.ranks] == [2.0, 1.0]
    assert (report.job, report.node) == (JOB, node(0))


def test_every_change_after_the_start_is_told_to_the_keeper_and_nothing_else() -> None:
    box = Box()
    for event in (Touched(), StageBegan(), Staged()):
        box.do(event)
    assert box.told() == 0
    box.do(Start(ORDER))
    box.do(RankStarted(0, 1))
    box.do(RankStarted(1, 2))
    assert box.told() == 3
    for event in (Start(ORDER), Renewed(), RankStarted(0, 1), Touched(), Release()):
        assert box.do(event) == []
    assert box.told() == 3
    box.do(RankExited(1, 3, tail=("boom",)))
    last = box.effects[-1]
    assert isinstance(last, ReportToKeeper)
    assert last.report.ranks[1].tail == ("boom",)


@pytest.mark.parametrize("events", [[], [StageBegan()], [StageBegan(), Staged()]])
def test_launcher_that_falls_silent_loses_the_reservation(events: list[Event]) -> None:
    box = Box()
    for event in events:
        box.do(event, 1)
    box.do(Touched(), 10)
    assert box.job.next_timeout() == box.now + LEASE_S
    assert box.do(Tick(), LEASE_S - 0.1) == []
    assert box.do(Tick(), 0.1) == [FreeGrant()]
    assert box.job.problem == "launcher silent for 30 s"
    assert box.do(Start(ORDER)) == []


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (Release(), "released by the launcher"),
        (StageFailed("disk full: 3 MB free"), "disk full: 3 MB free"),
        (Stop(30.0), "stopped before the start"),
    ],
)
def test_end_before_the_start(event: Event, problem: str) -> None:
    box = Box()
    box.do(StageBegan())
    assert box.do(event) == [FreeGrant()]
    assert (box.phase, box.job.problem) == (HostPhase.ENDED, problem)
    for late in (event, Staged(), Start(ORDER), StageBegan()):
        assert box.do(late) == []


def test_start_before_staging_is_complete_does_nothing_yet() -> None:
    box = Box()
    assert box.do(Start(ORDER)) == []
    box.do(StageBegan())
    assert box.do(Start(ORDER)) == []
    assert box.phase is HostPhase.STAGING
    box.do(Staged())
    assert box.do(Start(ORDER)) == [HoldGrant(), StartShim(ORDER)]
    assert box.do(Start(ORDER)) == []


def test_silent_keeper_ends_the_ranks() -> None:
    box = Box().run()
    box.do(Renewed(), 20)
    assert box.do(Tick(), KEEPER_SILENT_S - 0.1) == []
    assert box.do(Tick(), 0.1) == [StopShim(SILENT_GRACE_S, box.job.problem)]
    assert box.job.problem == "the node of rank 0 did not answer for 19 s"
    assert box.job.keeper_lost
    assert box.states() == [RankState.STOPPING, RankState.STOPPING]
    box.do(Renewed())
    assert box.phase is HostPhase.STOPPING
    box.do(RankExited(0, None, signal=15, stopped=True, tail=("x",)))
    box.do(RankExited(1, 0, stopped=True))
    assert box.do(ShimDone()) == [FreeGrant()]
    assert all(status.tail == () for status in box.job.report(box.now).ranks)


def test_lease_counts_from_the_report_that_the_keeper_has() -> None:
    box = Box().run()
    sent = box.job.report(box.now).at
    box.do(Renewed(sent), 10)
    assert (box.job.lease, box.job.heard) == (sent + KEEPER_SILENT_S, box.now)
    box.do(Renewed(sent - 5))  # an old call that came late
    assert box.job.lease == sent + KEEPER_SILENT_S
    box.do(Renewed(box.now + 1000))  # of the clock before the machine was started again
    assert box.job.lease == box.now + KEEPER_SILENT_S


def test_stop_with_a_long_grace_keeps_the_lease() -> None:
    box = Box().run()
    box.do(Stop(600.0))
    box.do(Renewed(), 15)
    assert box.job.lease == box.now + KEEPER_SILENT_S


def test_order_to_start_that_lay_in_a_queue_starts_nothing() -> None:
    box = Box()
    for event in (Touched(), StageBegan(), Staged()):
        box.do(event)
    assert box.do(Start(ORDER), LEASE_S + 1) == [FreeGrant()]
    assert box.phase is HostPhase.ENDED


def test_ranks_that_do_not_start_end_the_part() -> None:
    box = Box().start()
    box.do(RankStarted(0, 1))
    for _ in range(2):
        box.do(Renewed(), START_S / 2 - 1)
    assert box.do(Tick(), 2) == [KillShim("rank 1 did not start within 30 s")]
    assert box.job.problem == "rank 1 did not start within 30 s"


def test_stop_may_be_repeated_and_only_shortens() -> None:
    box = Box().run()
    assert box.do(Stop(30.0)) == [StopShim(30.0)]
    deadline = box.job.next_timeout()
    assert deadline == box.now + 30.0 + KILL_AFTER_S
    assert box.do(Stop(30.0), 1) == []
    assert box.do(Stop(60.0), 1) == []
    assert box.job.next_timeout() == deadline
    assert box.do(Stop(5.0), 1) == [StopShim(5.0)]
    assert box.do(Stop(5.0, kill=True), 1) == [KillShim()]
    assert box.do(Stop(0.0, kill=True), 1) == []


def test_deaf_shim_is_killed_and_then_given_up_with_a_word() -> None:
    box = Box().run()
    box.do(Stop(5.0))
    assert box.do(Tick(), 5.0 + KILL_AFTER_S) == [KillShim()]
    assert box.do(Tick(), CONFIRM_S) == [FreeGrant()]
    assert box.job.problem == "the shim did not confirm that every process is gone"
    assert all(status.stopped for status in box.job.report(box.now).ranks)


def test_leftovers_after_the_last_rank_have_a_deadline() -> None:
    box = Box(1).run()
    box.do(RankExited(0, 0))
    assert box.job.next_timeout() == box.now + CLEANUP_S
    assert box.do(Tick(), CLEANUP_S) == [KillShim()]
    assert box.do(ShimDone()) == [FreeGrant()]
    assert box.job.problem == ""


def test_lost_shim_is_a_problem_and_its_ranks_are_gone() -> None:
    box = Box().run()
    box.do(RankExited(0, 0))
    assert box.do(ShimLost("the shim was killed by signal 9")) == [FreeGrant()]
    report = box.job.report(box.now)
    assert report.problem == "the shim was killed by signal 9"
    assert [status.exit_code for status in report.ranks] == [0, None]


def test_shim_that_ends_without_every_exit_status_is_a_problem() -> None:
    box = Box().run()
    box.do(RankExited(0, 0))
    box.do(ShimDone())
    assert box.job.problem == "the shim ended without the exit status of rank 1"


def test_stop_while_the_shim_starts_is_not_lost() -> None:
    box = Box().start()
    assert box.do(Stop(5.0)) == [StopShim(5.0)]
    box.do(RankStarted(0, 1))
    assert box.states()[0] is RankState.STOPPING
    box.do(RankExited(0, None, signal=15, stopped=True))
    assert box.do(ShimDone()) == [FreeGrant()]


def test_foreign_and_doubled_rank_events_change_nothing() -> None:
    box = Box(2, 1, slot=1).run()
    box.do(RankExited(2, 4))
    before = box.job.report(box.now)
    for event in (RankExited(2, 0), RankExited(0, 1), RankStarted(7, 1), RankStarted(2, 9)):
        box.do(event)
    assert box.job.report(box.now) == before


def test_tails_of_a_report_are_bounded() -> None:
    box = Box(20).run()
    for rank in range(20):
        lines = tuple(f"{i} " + "x" * 5000 for i in range(100))
        box.do(RankExited(rank, 1, tail=lines), 1)
    ranks = box.job.report(box.now).ranks
    assert [bool(status.tail) for status in ranks] == [i < TAILS_MAX for i in range(20)]
    assert sum(len(line) + 1 for line in ranks[0].tail) <= TAIL_CHARS
    assert ranks[0].tail[-1].startswith("99 ")


def test_adopted_job_takes_the_replayed_events() -> None:
    job = HostedJob.adopt(spec(2, 1), 0, now=0.0)
    for event in (RankStarted(0, 1), RankStarted(1, 2), RankExited(0, 0), RankExited(1, 0)):
        job.handle(1.0, event)
        job.check()
    assert job.handle(2.0, ShimDone())[0] == FreeGrant()
    job = HostedJob.adopt(spec(1), 0, now=0.0)
    silent = StopShim(SILENT_GRACE_S, "the node of rank 0 did not answer for 19 s")
    assert job.handle(KEEPER_SILENT_S, Tick())[0] == silent
    job = HostedJob.adopt(spec(1), 0, now=0.0, lease=5.0)
    assert job.handle(5.0, Tick())[0] == silent


def test_illegal_move_carries_the_history() -> None:
    box = Box().run()
    with pytest.raises(IllegalTransitionError, match="reserved") as caught:
        box.job._move(box.now, Tick(), HostPhase.RESERVED)
    assert caught.value.state == "running"
    assert len(caught.value.history) == 3
