"""The keeper: start together, first failure by cause, stop, lost nodes, an end in every case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpulayer_mesh.core import hosted
from gpulayer_mesh.core.job import (
    CALL_S,
    END_S,
    FAILURE_GRACE_S,
    GO_S,
    GONE_S,
    HOST_LOST_S,
    KILL_S,
    RENEW_S,
    RESTART_S,
    SETTLE_CAUSE_S,
    SETTLE_S,
    START_S,
    Effect,
    Event,
    Followed,
    GiveUpRestart,
    Go,
    HostRemoved,
    HostReported,
    KeptJob,
    NotRestarted,
    RecordChanged,
    RenewHost,
    ReportFailed,
    Restart,
    Restarted,
    RestartWaits,
    Stage,
    StartHost,
    StopHost,
    StopRequested,
    Tick,
    Watched,
)
from gpulayer_mesh.core.jobspec import (
    HostPhase,
    HostReport,
    JobRecord,
    JobState,
    RankState,
    RankStatus,
)
from gpulayer_mesh.core.lease import LEASE_S
from gpulayer_mesh.errors import IllegalTransitionError, RemoteProtocolError
from job_cases import JOB, ORDER, exited, node, report, running, spec

RUNNING, STOPPING, ENDED, STAGED = (
    HostPhase.RUNNING,
    HostPhase.STOPPING,
    HostPhase.ENDED,
    HostPhase.STAGED,
)
GLOO = "RuntimeError: gloo: Connection closed by peer [10.0.0.2]:1"


class Keeper:
    """Drives one machine and checks its invariants after every event."""

    def __init__(self, *processes: int, **fields: object) -> None:
        self.now = 50.0
        self.job = KeptJob(spec(*(processes or (1, 1, 1)), **fields), now=self.now)
        self.records: list[JobRecord] = []

    def do(self, event: Event, after: float = 0.0) -> list[Effect]:
        self.now += after
        effects = self.job.handle(self.now, event)
        self.job.check()
        self.records += [effect.record for effect in effects if isinstance(effect, RecordChanged)]
        return [effect for effect in effects if not isinstance(effect, RecordChanged)]

    def hear(self, what: HostReport, after: float = 0.0) -> list[Effect]:
        return self.do(HostReported(what), after)

    def run(self) -> Keeper:
        self.do(Go(ORDER))
        for index, slot in enumerate(self.job.spec.slots):
            first = self.job._hosts[slot.node].first_rank
            ranks = (running(first + i) for i in range(slot.processes))
            self.hear(report(index, RUNNING, *ranks))
        assert self.state is JobState.RUNNING
        return self

    def wait(self, seconds: float, *silent: int) -> list[Effect]:
        """Let time pass with every host but the silent ones answering their calls."""
        effects: list[Effect] = []
        end = self.now + seconds
        while True:
            at = self.job.next_timeout()
            if at is None or at > end:
                self.now = end
                return effects
            new = self.do(Tick(), max(0.0, at - self.now))
            effects += new
            for effect in new:
                if isinstance(effect, Restart | GiveUpRestart):
                    continue
                index = next(i for i in range(9) if node(i) == effect.node)  # type: ignore[union-attr]
                if index not in silent:
                    self.do(HostReported(self.job._hosts[node(index)].report, self.now))

    @property
    def state(self) -> JobState:
        return self.job.state

    @property
    def failed(self) -> tuple[int | None, str, int, str]:
        failure = self.job.failure
        assert failure is not None
        return failure.rank, failure.node, failure.code, failure.reason


def test_all_hosts_start_at_once_and_the_job_succeeds_when_all_are_gone() -> None:
    keeper = Keeper(1, 1)
    assert keeper.do(Go(ORDER)) == [StartHost(node(0), ORDER), StartHost(node(1), ORDER)]
    keeper.hear(report(0, RUNNING, running(0)))
    assert keeper.state is JobState.STARTING
    keeper.hear(report(1, RUNNING, running(1)), 1)
    assert keeper.state is JobState.RUNNING
    keeper.wait(60)
    keeper.hear(report(0, STOPPING, exited(0)))
    keeper.hear(report(0, ENDED, exited(0)), 1)
    assert keeper.state is JobState.RUNNING
    keeper.hear(report(1, STOPPING, exited(1)), 1)
    keeper.hear(report(1, ENDED, exited(1)), 1)
    assert keeper.state is JobState.SUCCEEDED
    record = keeper.records[-1]
    assert (record.state, record.failure, record.age_s) == (JobState.SUCCEEDED, None, 64.0)
    assert [r.ranks[0].ended_age_s for r in record.reports] == [3.0, 1.0]
    assert keeper.job.next_timeout() is None


def test_secrets_never_reach_the_record_and_are_dropped_once_all_run() -> None:
    keeper = Keeper().run()
    assert "canary" not in repr(keeper.records)
    assert keeper.job._order is None


def test_second_go_is_no_second_start() -> None:
    keeper = Keeper()
    keeper.do(Go(ORDER))
    assert keeper.do(Go(ORDER)) == []
    keeper.run()
    assert keeper.do(Go(ORDER)) == []


def test_keeper_without_a_go_forgets_the_job() -> None:
    keeper = Keeper()
    assert keeper.job.next_timeout() == keeper.now + GO_S
    keeper.do(Tick(), GO_S)
    assert keeper.state is JobState.CANCELLED
    assert keeper.job.cause == "no go order within 30 s"


def test_start_is_repeated_until_the_host_has_it() -> None:
    keeper = Keeper(1, 1)
    keeper.do(Go(ORDER))
    keeper.hear(report(0, RUNNING, running(0)))
    keeper.do(ReportFailed(node(1), "connection refused"))
    assert keeper.do(Tick(), RENEW_S) == [RenewHost(node(0)), StartHost(node(1), ORDER)]
    keeper.hear(report(1, STAGED, RankStatus(1, RankState.WAITING)))
    assert StartHost(node(1), ORDER) in keeper.do(Tick(), RENEW_S)
    keeper.hear(report(1, RUNNING, RankStatus(1, RankState.WAITING)))
    assert keeper.state is JobState.STARTING
    keeper.hear(report(1, RUNNING, running(1)))
    assert keeper.state is JobState.RUNNING


def test_host_that_starts_nothing_is_named_with_its_last_state() -> None:
    keeper = Keeper(1, 2, 1)
    keeper.do(Go(ORDER))
    keeper.hear(report(0, RUNNING, running(0)))
    waiting = [RankStatus(rank, RankState.WAITING) for rank in (1, 2)]
    keeper.hear(report(1, STAGED, *waiting))
    keeper.do(ReportFailed(node(2), "connection refused"))
    effects = keeper.wait(START_S + SETTLE_S, 2)
    assert StopHost(node(0), FAILURE_GRACE_S, False) in effects
    rank, name, code, reason = keeper.failed
    assert (rank, name, code) == (None, "box-1", 1)
    late = "ranks 1-2 on box-1 (staged), rank 3 on box-2 (connection refused)"
    assert reason == f"not started within {START_S:g} s: {late}"


def test_host_that_answers_and_falls_silent_while_starting_is_lost() -> None:
    # Its ranks may run already: they would wait for the others all the time that starting may take.
    keeper = Keeper()
    keeper.do(Go(ORDER))
    keeper.hear(report(0, RUNNING, running(0)), 0.1)
    keeper.hear(report(1, RUNNING, running(1)), 0.1)
    keeper.hear(report(2, STAGED, RankStatus(2, RankState.WAITING)), 0.1)
    effects = keeper.wait(HOST_LOST_S + SETTLE_S, 2)
    assert StopHost(node(0), FAILURE_GRACE_S, False) in effects
    assert keeper.failed[3].startswith("node lost: box-2 did not answer for 18 s")


def test_host_problem_while_starting_fails_the_job_at_once() -> None:
    keeper = Keeper()
    keeper.do(Go(ORDER))
    problem = "rank 1 did not start within 30 s"
    keeper.hear(report(1, STOPPING, RankStatus(1, RankState.WAITING), problem=problem))
    keeper.wait(SETTLE_S)
    assert keeper.failed == (None, "box-1", 1, f"node box-1: {problem}")
    assert keeper.job.stage is Stage.STOPPING


def test_first_failure_is_chosen_by_cause_and_all_others_are_stopped() -> None:
    keeper = Keeper().run()
    keeper.hear(report(0, STOPPING, exited(0, 1, GLOO)), 10)
    assert keeper.state is JobState.RUNNING
    keeper.hear(report(1, STOPPING, exited(1, 7, "ValueError: boom", age=0.4)), 0.5)
    effects = keeper.wait(SETTLE_S)
    assert effects == [StopHost(node(i), FAILURE_GRACE_S, False) for i in range(3)]
    assert keeper.failed == (1, "box-1", 7, "exit code 7")
    keeper.hear(report(0, ENDED, exited(0, 1, GLOO)))
    keeper.hear(report(1, ENDED, exited(1, 7, "ValueError: boom")))
    assert keeper.state is JobState.RUNNING
    keeper.hear(report(2, ENDED, exited(2, None, signal=15, stopped=True)))
    assert keeper.state is JobState.FAILED
    assert keeper.records[-1].failure == keeper.job.failure
    assert keeper.job.failure is not None
    assert keeper.job.failure.tail == ("ValueError: boom",)


def test_lost_peer_alone_waits_longer_for_the_cause() -> None:
    keeper = Keeper().run()
    keeper.hear(report(0, STOPPING, exited(0, 1, GLOO)))
    keeper.wait(SETTLE_S + 0.5)
    assert keeper.job.stage is Stage.SETTLING
    keeper.hear(report(1, STOPPING, exited(1, None, signal=11)))
    assert keeper.job.stage is Stage.STOPPING
    assert keeper.failed[:3] == (1, "box-1", 139)


def test_lost_peer_with_no_cause_in_sight_still_fails() -> None:
    keeper = Keeper().run()
    keeper.hear(report(0, STOPPING, exited(0, 1, GLOO)))
    keeper.wait(SETTLE_CAUSE_S)
    assert keeper.job.stage is Stage.STOPPING
    assert keeper.failed[:3] == (0, "box-0", 1)


def test_cause_that_arrives_while_stopping_still_explains_better() -> None:
    keeper = Keeper().run()
    keeper.hear(report(0, STOPPING, exited(0, 1, GLOO)))
    keeper.wait(SETTLE_CAUSE_S)
    keeper.hear(report(1, ENDED, exited(1, 3, "KeyError: 'x'")))
    assert keeper.failed[0] == 1
    keeper.hear(report(2, ENDED, exited(2, 4, "KeyError: 'y'")), 1)
    assert keeper.failed[0] == 1


def test_all_ranks_exited_ends_the_wait_at_once() -> None:
    keeper = Keeper(1, 1).run()
    keeper.hear(report(0, ENDED, exited(0, 1, GLOO)))
    keeper.hear(report(1, ENDED, exited(1, 5)))
    assert keeper.state is JobState.FAILED
    assert keeper.failed[2] == 5


def test_one_call_is_in_flight_per_host() -> None:
    keeper = Keeper(1, 1).run()
    assert keeper.do(Tick(), RENEW_S) == [RenewHost(node(0)), RenewHost(node(1))]
    assert keeper.do(Tick(), RENEW_S) == []
    assert keeper.hear(report(0, RUNNING, running(0))) == [RenewHost(node(0))]
    assert keeper.hear(report(0, RUNNING, running(0))) == []
    assert keeper.do(Tick(), CALL_S - RENEW_S) == [RenewHost(node(0)), RenewHost(node(1))]


def test_removed_node_is_lost_at_once() -> None:
    keeper = Keeper().run()
    keeper.do(HostRemoved(node(2)), 0.5)
    effects = keeper.wait(SETTLE_S, 2)
    assert StopHost(node(1), FAILURE_GRACE_S, False) in effects
    assert keeper.failed[:2] == (None, "box-2")
    assert keeper.failed[3] == "node lost: box-2 was removed from the mesh"


def test_silent_node_is_lost_and_not_waited_for() -> None:
    keeper = Keeper().run()
    keeper.do(ReportFailed(node(2), "no route to host"), 0.5)
    effects = keeper.wait(HOST_LOST_S + SETTLE_S, 2)
    assert StopHost(node(2), FAILURE_GRACE_S, False) not in effects
    assert StopHost(node(1), FAILURE_GRACE_S, False) in effects
    assert keeper.failed[:2] == (None, "box-2")
    assert keeper.failed[3].startswith("node lost: box-2 did not answer for 18 s (")
    keeper.hear(report(0, ENDED, exited(0, None, signal=9, stopped=True)))
    keeper.hear(report(1, ENDED, exited(1, None, signal=9, stopped=True)))
    assert keeper.state is JobState.FAILED
    assert keeper.now - 50.0 < 30.0


def test_late_answer_of_a_restarted_agent_is_no_sign_of_life() -> None:
    keeper = Keeper(1, 1).run()
    for _ in range(11):
        keeper.hear(report(0, RUNNING, running(0)), RENEW_S)
        keeper.hear(report(1, HostPhase.RESERVED, RankStatus(1, RankState.WAITING)))
    assert keeper.failed[:2] == (None, "box-1")


def test_node_lost_explains_the_lost_peers() -> None:
    keeper = Keeper().run()
    keeper.wait(HOST_LOST_S - 2, 2)
    keeper.hear(report(0, STOPPING, exited(0, 1, GLOO)))
    keeper.wait(SETTLE_CAUSE_S + SETTLE_S, 2)
    assert keeper.failed[3].startswith("node lost: box-2")


def test_stop_is_graceful_and_idempotent_and_ends_as_cancelled() -> None:
    keeper = Keeper(1, 1).run()
    assert keeper.do(StopRequested("laptop")) == [
        StopHost(node(0), 30.0, False),
        StopHost(node(1), 30.0, False),
    ]
    assert keeper.do(StopRequested("laptop")) == []
    keeper.hear(report(0, ENDED, exited(0, 1, stopped=True)))
    keeper.hear(report(1, ENDED, exited(1, 0)))
    assert keeper.state is JobState.CANCELLED
    assert (keeper.job.cause, keeper.job.failure) == ("stopped by laptop", None)


def test_kill_skips_the_grace() -> None:
    keeper = Keeper(1, 1).run()
    keeper.do(StopRequested("laptop", grace_s=600.0))
    kill = [StopHost(node(0), 0.0, True), StopHost(node(1), 0.0, True)]
    assert keeper.do(StopRequested("laptop", kill=True), 1) == kill
    assert keeper.do(StopRequested("laptop", kill=True)) == []
    keeper = Keeper(1, 1).run()
    assert keeper.do(StopRequested("laptop", kill=True)) == kill


def test_stop_while_starting_and_before_go() -> None:
    keeper = Keeper(1)
    keeper.do(StopRequested("laptop"))
    assert keeper.state is JobState.CANCELLED
    keeper = Keeper(1)
    keeper.do(Go(ORDER))
    keeper.do(StopRequested("laptop"), 1)
    keeper.hear(report(0, ENDED, RankStatus(0, RankState.WAITING), problem="stopped before"))
    assert (keeper.state, keeper.job.failure) == (JobState.CANCELLED, None)


def test_stop_after_a_failure_does_not_hide_it() -> None:
    keeper = Keeper(1, 1).run()
    keeper.hear(report(0, STOPPING, exited(0, 9)))
    keeper.do(StopRequested("laptop", kill=True))
    keeper.hear(report(0, ENDED, exited(0, 9)))
    keeper.hear(report(1, ENDED, exited(1, None, signal=9, stopped=True)))
    assert (keeper.state, keeper.failed[2]) == (JobState.FAILED, 9)


def test_hosts_that_never_confirm_are_killed_and_then_given_up() -> None:
    keeper = Keeper(1, 1).run()
    keeper.do(StopRequested("laptop", grace_s=3.0))
    effects = keeper.wait(3.0 + END_S)
    assert StopHost(node(1), 0.0, True) in effects
    keeper.wait(KILL_S)
    assert keeper.state is JobState.CANCELLED


def test_ranks_stopped_by_their_own_node_are_no_success() -> None:
    keeper = Keeper(1, 1).run()
    keeper.hear(report(1, ENDED, exited(1, None, signal=15, stopped=True)))
    keeper.wait(SETTLE_S)
    assert keeper.failed == (None, "box-1", 1, "ranks on box-1 were stopped there")


def test_duplicate_and_older_reports_change_nothing() -> None:
    keeper = Keeper(2, 1).run()
    keeper.hear(report(0, RUNNING, exited(0, 0), running(1)))
    seen = len(keeper.records)
    keeper.hear(report(0, RUNNING, exited(0, 0, age=3.0), running(1)), 3)
    keeper.hear(report(0, RUNNING, running(0), running(1)))
    keeper.hear(report(0, STAGED, RankStatus(0, RankState.WAITING)))
    assert len(keeper.records) == seen
    assert keeper.job.record(keeper.now).reports[0].ranks[0].ended_age_s == 3.0


@pytest.mark.parametrize(
    "bad",
    [
        HostReport("k7f2k7f2k7", node(0), RUNNING),
        HostReport(JOB, node(9), RUNNING),
        report(0, RUNNING, running(1)),
        report(1, RUNNING, running(1), running(1)),
    ],
)
def test_report_that_is_not_the_hosts_own_is_refused_and_changes_nothing(bad: HostReport) -> None:
    keeper = Keeper().run()
    before = keeper.job.record(keeper.now)
    with pytest.raises(RemoteProtocolError):
        keeper.hear(bad)
    assert keeper.job.record(keeper.now) == before


def test_resumed_keeper_goes_on_where_it_was() -> None:
    keeper = Keeper(1, 1).run()
    keeper.hear(report(0, STOPPING, exited(0)), 5)
    job = KeptJob.resume(keeper.job.record(keeper.now), now=7.0)
    job.check()
    assert job.state is JobState.RUNNING
    assert job.handle(7.0, Tick()) == [RenewHost(node(0)), RenewHost(node(1))]
    job.handle(8.0, HostReported(report(0, ENDED, exited(0))))
    job.handle(8.0, HostReported(report(1, ENDED, exited(1))))
    assert job.state is JobState.SUCCEEDED
    assert job.record(8.0).age_s == 6.0


def test_resumed_keeper_stops_what_was_starting_failing_or_cancelled() -> None:
    keeper = Keeper(1, 1)
    keeper.do(Go(ORDER))
    job = KeptJob.resume(keeper.job.record(keeper.now), now=0.0)
    assert job.failure is not None
    assert job.handle(0.0, Tick())[0] == StopHost(node(0), FAILURE_GRACE_S, False)
    keeper.run()
    keeper.do(StopRequested("laptop"))
    job = KeptJob.resume(keeper.job.record(keeper.now), now=0.0)
    assert job.handle(0.0, Tick())[0] == StopHost(node(0), 30.0, False)
    for index in range(2):
        job.handle(1.0, HostReported(report(index, ENDED, exited(index, 0, stopped=True))))
    assert job.state is JobState.CANCELLED


def test_illegal_move_carries_the_history() -> None:
    keeper = Keeper().run()
    with pytest.raises(IllegalTransitionError, match="starting->running"):
        keeper.job._move(keeper.now, Tick(), Stage.WAITING, None)


# --- a launcher that vanishes -----------------------------------------------------------------

GONE = "its launcher on laptop was gone for 60 s"


def test_job_is_stopped_once_nobody_has_followed_it_for_too_long() -> None:
    keeper = Keeper(1, 1, on_disconnect_s=60.0).run()
    keeper.wait(50)
    keeper.do(Followed())
    assert StopHost not in map(type, keeper.wait(59))
    assert StopHost(node(0), 30.0, False) in keeper.wait(1)  # with the grace of a stop
    assert (keeper.state, keeper.job.cause) == (JobState.RUNNING, GONE)
    keeper.do(Followed())  # too late
    for index in range(2):
        keeper.hear(report(index, ENDED, exited(index, 0, stopped=True)))
    assert (keeper.state, keeper.job.failure) == (JobState.CANCELLED, None)
    assert keeper.records[-1].cause == GONE


def test_nobody_has_to_follow_a_job_by_default() -> None:
    keeper = Keeper(1, 1).run()
    keeper.wait(600)
    assert keeper.state is JobState.RUNNING


def test_nobody_has_to_follow_a_job_that_its_launcher_left_until_somebody_does() -> None:
    keeper = Keeper(1, 1, on_disconnect_s=60.0).run()
    keeper.wait(50)
    keeper.do(Followed(leaving=True))
    assert keeper.records[-1].left
    keeper.wait(600)
    assert keeper.state is JobState.RUNNING
    keeper.do(Followed())
    assert not keeper.records[-1].left
    keeper.wait(60)
    assert keeper.job.cause == GONE


def test_job_that_is_about_to_start_again_is_missed_as_well() -> None:
    keeper, _ = failed_of(1, 1, on_disconnect_s=60.0)
    assert keeper.wait(60) == [GiveUpRestart()]
    assert (keeper.state, keeper.job.cause) == (JobState.CANCELLED, GONE)
    assert keeper.records[-1].successor == ""


@pytest.mark.parametrize("left", [False, True])
def test_next_attempt_and_next_agent_know_whether_the_launcher_left(left: bool) -> None:
    keeper = Keeper(1, on_disconnect_s=60.0).run()
    keeper.do(Followed(left))
    record = keeper.job.record(keeper.now)
    resumed = KeptJob.resume(record, now=500.0)
    again = KeptJob(keeper.job.spec, now=500.0)
    again.handle(500.0, Go(replace(ORDER, left=record.left)))
    for job in (resumed, again):
        job.handle(500.0, HostReported(report(0, RUNNING, running(0))))
        job.handle(559.0, HostReported(report(0, RUNNING, running(0))))
        assert job.cause == ""
        job.handle(560.0, HostReported(report(0, RUNNING, running(0))))
        assert job.cause == ("" if left else GONE)


# --- restarts ---------------------------------------------------------------------------------


def failed_of(*processes: int, **fields: object) -> tuple[Keeper, list[Effect]]:
    """A job that may be restarted, whose rank 1 failed, with every part ended."""
    keeper = Keeper(*processes, restarts=2, **fields).run()
    keeper.hear(report(1, STOPPING, exited(1, 7, "ValueError: no")))
    keeper.wait(SETTLE_S)
    keeper.hear(report(1, ENDED, exited(1, 7, "ValueError: no")))
    return keeper, keeper.hear(report(0, ENDED, exited(0, 0, stopped=True)))


def test_failed_job_asks_for_its_next_attempt_once_all_is_over() -> None:
    keeper, effects = failed_of(1, 1)
    assert effects == [Restart(0.0)]
    assert keeper.state is JobState.RESTARTING
    assert keeper.records[-1].ended_age_s is None
    assert keeper.wait(RESTART_S / 2) == []  # once, and no node is asked anything
    keeper.do(Restarted("1111111111"))
    assert (keeper.state, keeper.records[-1].successor) == (JobState.FAILED, "1111111111")
    assert keeper.failed == (1, "box-1", 7, "exit code 7")
    assert keeper.job.next_timeout() is None


def test_restart_that_waits_says_for_what_until_it_is_over() -> None:
    keeper, _ = failed_of(1, 1)
    assert keeper.do(RestartWaits("no node is free")) == []
    assert (keeper.state, keeper.records[-1].waiting) == (JobState.RESTARTING, "no node is free")
    keeper.do(Restarted("1111111111"))
    assert keeper.records[-1].waiting == ""
    before = len(keeper.records)
    keeper.do(RestartWaits("too late"))
    assert len(keeper.records) == before


def test_job_that_is_not_restarted_says_why() -> None:
    keeper, _ = failed_of(1, 1)
    assert keeper.do(NotRestarted("no node is free")) == [GiveUpRestart()]
    assert keeper.state is JobState.FAILED
    assert keeper.failed[3] == "exit code 7; not restarted: no node is free"


def test_a_restart_that_takes_too_long_is_given_up() -> None:
    keeper, _ = failed_of(1, 1)
    for _ in range(5):  # as long as somebody is at it
        assert keeper.wait(RESTART_S * 0.9) == []
        keeper.do(RestartWaits("large files"))
    assert GiveUpRestart() in keeper.wait(RESTART_S)
    assert "nothing was heard of it" in keeper.failed[3]


def test_stop_while_restarting_cancels_the_job() -> None:
    keeper, _ = failed_of(1, 1)
    assert keeper.do(StopRequested("anna")) == [GiveUpRestart()]
    assert (keeper.state, keeper.job.cause) == (JobState.CANCELLED, "stopped by anna")
    assert keeper.job.failure is None
    assert keeper.do(Restarted("1111111111")) == []  # too late
    assert keeper.records[-1].successor == ""


@pytest.mark.parametrize(
    "fields", [{"restarts": 0}, {"restarts": 2, "restart": 2}, {"restarts": 1, "restart": 1}]
)
def test_no_attempt_follows_the_last(fields: dict[str, object]) -> None:
    keeper = Keeper(1, 1, **fields).run()
    keeper.hear(report(1, STOPPING, exited(1, 7)))
    keeper.hear(report(1, ENDED, exited(1, 7)))
    keeper.hear(report(0, ENDED, exited(0, 0, stopped=True)))
    assert keeper.state is JobState.FAILED


def test_function_that_returned_nothing_is_no_success_and_started_again() -> None:
    keeper = Keeper(1, restarts=1, voters=(node(0), node(1), node(2))).run()
    keeper.hear(report(0, ENDED, replace(exited(0), no_result=True)))
    assert keeper.state is JobState.RESTARTING
    assert keeper.failed[:3] == (0, "box-0", 1)
    assert keeper.failed[3].startswith("ended without a result")


def test_failure_that_would_come_again_is_final_and_says_so() -> None:
    keeper = Keeper(1, 1, restarts=1).run()
    effects = keeper.hear(report(0, ENDED, replace(exited(0, 1), hopeless=True)))
    effects += keeper.hear(report(1, ENDED, exited(1, 1, GLOO)))
    assert not any(isinstance(effect, Restart) for effect in effects)
    assert keeper.state is JobState.FAILED
    assert keeper.failed == (0, "box-0", 1, "exit code 1; not restarted: it would end so each time")
    # A rank that only lost its peer to it does not hide it, nor does it hide a cause of another.
    keeper = Keeper(1, 1, restarts=1).run()
    keeper.hear(report(0, ENDED, exited(0, 7, age=2.0)))
    keeper.hear(report(1, ENDED, replace(exited(1, 1), hopeless=True)))
    assert keeper.state is JobState.RESTARTING


def test_neither_success_nor_a_stop_is_followed_by_an_attempt() -> None:
    keeper = Keeper(1, 1, restarts=1).run()
    for index in (0, 1):
        keeper.hear(report(index, ENDED, exited(index)))
    assert keeper.state is JobState.SUCCEEDED
    keeper = Keeper(1, 1, restarts=1).run()
    keeper.do(StopRequested("anna"))
    for index in (0, 1):
        keeper.hear(report(index, ENDED, exited(index, 0, stopped=True)))
    assert keeper.state is JobState.CANCELLED


def test_problem_of_a_node_explains_ranks_that_lost_their_peers() -> None:
    keeper = Keeper(1, 1).run()
    keeper.hear(report(0, STOPPING, exited(0, 1, GLOO)))
    keeper.wait(SETTLE_CAUSE_S)  # its agent is away; it comes back after all were stopped
    keeper.hear(report(1, ENDED, exited(1, 1, stopped=True), problem="no word from the agent"))
    keeper.hear(report(0, ENDED, exited(0, 1, GLOO)))
    assert keeper.failed == (None, "box-1", 1, "node box-1: no word from the agent")


def test_ranks_of_a_silent_node_are_waited_for() -> None:
    keeper = Keeper(1, 1, restarts=1).run()
    effects = keeper.wait(HOST_LOST_S + 1, 1)
    effects += keeper.hear(report(0, ENDED, exited(0, 0, stopped=True)))
    (restart,) = [effect for effect in effects if isinstance(effect, Restart)]
    waited = HOST_LOST_S + 1 - RENEW_S  # since it was heard last, at the least
    assert GONE_S - waited - 2 * RENEW_S <= restart.after_s <= GONE_S - waited + RENEW_S


def test_silent_nodes_are_waited_for_longer_than_they_take_to_end() -> None:
    of = spec(1, 1, restarts=1, stop_grace_s=3600.0)
    alone = spec(1, restarts=1, stop_grace_s=3600.0)
    for one in (of, alone):  # also where no agent is left, for the shim knows the lease
        grace_s = hosted.fence_grace_s(one)
        assert grace_s is not None
        assert hosted.KEEPER_SILENT_S + grace_s + 1.5 < GONE_S  # it looks once a second
    last = spec(1, 1, restarts=1, restart=1, stop_grace_s=3600.0)
    assert hosted.fence_grace_s(last) is None  # nobody waits for that one's end


def test_node_that_never_answered_may_have_started_late() -> None:
    keeper = Keeper(1, 1, restarts=1)
    keeper.do(Go(ORDER))
    keeper.hear(report(0, RUNNING, running(0)))
    effects = keeper.wait(START_S + SETTLE_S + END_S + KILL_S + 5, 1)
    effects += keeper.hear(report(0, ENDED, exited(0, 0, stopped=True)))
    effects += keeper.wait(30, 1)
    (restart,) = [effect for effect in effects if isinstance(effect, Restart)]
    assert keeper.job.history[-1][0] + restart.after_s >= 50.0 + LEASE_S + GONE_S


def test_keeper_knows_how_long_most_voters_have_heard_it() -> None:
    voters = (node(0), node(1), node(2))
    keeper = Keeper(1, 1, restarts=1, voters=voters).run()
    assert keeper.job.proof(keeper.now) == 50.0
    keeper.do(HostReported(report(1, RUNNING, running(1))), 5)  # sent by itself: proves nothing
    assert keeper.job.proof(keeper.now) == 50.0
    keeper.do(HostReported(report(1, RUNNING, running(1)), 57.0), 5)
    assert keeper.job.proof(keeper.now) == 57.0
    keeper.do(Watched(node(2), 59.0))
    assert keeper.job.proof(keeper.now) == 59.0  # one of the two will do
    keeper.hear(report(1, STOPPING, exited(1)))
    keeper.hear(report(1, ENDED, exited(1)))
    keeper.wait(120)
    assert keeper.state is JobState.RUNNING  # its part is over, and it is asked all the same
    last = Keeper(1, 1, restarts=1, restart=1, voters=voters).run()
    assert last.job.proof(1e6) == 1e6  # nothing may follow


def test_resumed_keeper_knows_no_more_than_the_one_before() -> None:
    keeper = Keeper(1, 1, restarts=1, voters=(node(0), node(1), node(2))).run()
    job = KeptJob.resume(keeper.job.record(keeper.now), now=70.0, proof=55.0)
    assert job.proof(70.0) == 55.0
    job.handle(72.0, HostReported(report(1, RUNNING, running(1)), 71.0))
    assert job.proof(72.0) == 71.0


def test_keeper_that_comes_back_asks_again() -> None:
    keeper, _ = failed_of(1, 1)
    again = KeptJob.resume(keeper.records[-1], now=500.0)
    assert again.state is JobState.RESTARTING
    assert again.next_timeout() <= 500.0  # type: ignore[operator]
    (effect,) = again.handle(500.0, Tick())
    assert effect == Restart(0.0)
    again.handle(501.0, Restarted("1111111111"))
    assert again.record(502.0).successor == "1111111111"


def test_job_of_one_node_ends_when_most_voters_are_silent() -> None:
    voters = (node(0), node(1), node(2))
    keeper = Keeper(1, restarts=1, voters=voters).run()
    keeper.wait(600)  # no witness has heard of it: none can start the next attempt
    assert keeper.state is JobState.RUNNING
    for _ in range(20):
        keeper.do(Watched(node(1), keeper.now))
        keeper.wait(5)
    assert keeper.state is JobState.RUNNING  # with one of the two it has the majority
    keeper.wait(HOST_LOST_S)
    keeper.hear(report(0, ENDED, exited(0, 0, stopped=True)))
    assert keeper.state is JobState.RESTARTING
    assert "cut off" in keeper.failed[3]


@pytest.mark.parametrize(
    ("processes", "voters", "fields"),
    [
        ((1,), 2, {}),  # the other one alone is no majority
        ((1,), 1, {}),
        ((1, 1), 3, {}),  # with the other node it has the majority
        ((1,), 3, {"restart": 1}),  # nothing may follow
    ],
)
def test_voters_that_cannot_do_without_this_node_are_not_waited_for(
    processes: tuple[int, ...], voters: int, fields: dict[str, object]
) -> None:
    names = tuple(node(index) for index in range(voters))
    keeper = Keeper(*processes, restarts=1, voters=names, **fields).run()
    for name in names[len(processes) :]:
        keeper.do(Watched(name, keeper.now))
    keeper.wait(300)
    assert keeper.state is JobState.RUNNING


def test_a_restart_must_be_heard_of_by_most_voters() -> None:
    voters = (node(0), node(1), node(2))
    keeper = Keeper(1, restarts=2, restart=1, voters=voters).run()
    keeper.wait(HOST_LOST_S + 1)
    assert keeper.job.failure is not None
    assert "cut off" in keeper.failed[3]
