"""The keeper: rank 0's agent decides the fate of a job from what every node reports.

Rules. All hosts start at once and must have started every rank within START_S. From its first
answer on each host is renewed every RENEW_S and is lost when unheard for HOST_LOST_S; gossip's
opinion does not count. The first failure by cause ends the job: after a short wait for the reports
of others, `failure.first_failure` picks, and every other host is stopped. A stop on request ends as
cancelled, also one that a host had to carry out alone. The job ends when every host that can be
heard says that no process is left, at the latest when the deadline passes. Where others may start
the job again, most voters must be known to hear this node (`proof`), for they do when they do not;
nodes whose part is over are asked on for that. A failed job that may be restarted waits in
RESTARTING for word of its next attempt, which `Restart` asks for. A job may be told to stop when
nobody has followed it for a while on the machine that submitted it, unless the last one there said
that it goes. Reports are full snapshots that never go back: duplicates and late ones change
nothing. No state waits for a message alone.

    WAITING -> STARTING -> RUNNING -> STOPPING ---> ENDED      stage         job state
        |          |-> SETTLING <-|      ^   |        ^        WAITING       pending
        |          |       |-------------|   |        |        STARTING      starting
        |                                RESTARTING --|        RESTARTING    restarting
        |---------------------------------------------|        ENDED         the outcome
                                                               others        running

This module does not know how a host is reached; `StartHost`, `RenewHost` and `StopHost` are calls
that end as `HostReported` or `ReportFailed`. Time is `now`, monotonic seconds; of a job that others
may start again, seconds that go on while the machine sleeps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from gpulayer_mesh.core import failure
from gpulayer_mesh.core.hosted import KEEPER_SILENT_S, SILENT_GRACE_S
from gpulayer_mesh.core.jobspec import (
    Failure,
    GoOrder,
    HostPhase,
    HostReport,
    JobRecord,
    JobSpec,
    JobState,
    RankState,
    RankStatus,
    Slot,
)
from gpulayer_mesh.core.lease import LEASE_S
from gpulayer_mesh.core.rankenv import world_size
from gpulayer_mesh.core.restarts import majority
from gpulayer_mesh.core.types import NodeId
from gpulayer_mesh.errors import IllegalTransitionError, RemoteProtocolError

GO_S = 30.0  # a keeper that never gets the go order forgets the job
START_S = 50.0  # from go to the last rank's process; whoever waits knows within a minute
RENEW_S = 2.0  # a host gives up after 19 s: nine tries
CALL_S = 5.0  # a call unanswered for so long is repeated; the shell's own deadline is no longer
HOST_LOST_S = 18.0  # nine missed renewals; a job on a lost node fails, or runs again, within 30 s
SETTLE_S = 1.0  # for reports that cross: which rank failed first?
SETTLE_CAUSE_S = 3.0  # as long as all known failures only tell of a lost peer
FAILURE_GRACE_S = 5.0  # the others save what they can; they are gone 10 s after the failure
END_S = 10.0  # past the grace: hosts kill at its end and then clean up
KILL_S = 5.0  # after our kill nothing is waited for any longer
# Past its last sign of life, until the ranks of a node that is cut off, or without its agent, are
# gone: its lease, the grace, and 2 s for the shim to look and the kernel to end what was killed.
GONE_S = KEEPER_SILENT_S + SILENT_GRACE_S + 2.0
RESTART_S = 300.0  # without a word on the next attempt; who sees to it has limits of its own
HISTORY = 64  # entries


def raised_grace_s(spec: JobSpec) -> float:
    """Return how long a rank may take to end after an uncaught exception.

    What its peers get after a failure: they wait for it. Alone it may take what a stop may.
    """
    return FAILURE_GRACE_S if world_size(spec) > 1 else spec.stop_grace_s


@dataclass(frozen=True, slots=True)
class Go:
    order: GoOrder


@dataclass(frozen=True, slots=True)
class HostReported:
    """A host's report: the answer to a call that was made at `asked`, or sent by itself."""

    report: HostReport
    asked: float | None = None


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """A call to a host failed."""

    node: NodeId
    error: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the job ended. Repeating it changes nothing; `kill` skips the grace."""

    by: str  # name, for the record
    grace_s: float | None = None  # None: the spec's
    kill: bool = False


@dataclass(frozen=True, slots=True)
class Followed:
    """Somebody follows the job on the machine that submitted it."""

    leaving: bool = False  # and says that nobody has to from now on


@dataclass(frozen=True, slots=True)
class HostRemoved:
    """The roster no longer has this node; it ends its ranks by itself."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Watched:
    """A witness answered: it would see to the next attempt if this node were lost."""

    node: NodeId
    asked: float  # when it was called


@dataclass(frozen=True, slots=True)
class Restarted:
    """The next attempt runs."""

    job: str


@dataclass(frozen=True, slots=True)
class RestartWaits:
    """The next attempt cannot start yet."""

    why: str


@dataclass(frozen=True, slots=True)
class NotRestarted:
    """There will be no next attempt."""

    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Go
    | HostReported
    | ReportFailed
    | StopRequested
    | Followed
    | HostRemoved
    | Watched
    | Restarted
    | RestartWaits
    | NotRestarted
    | Tick
)


@dataclass(frozen=True, slots=True)
class StartHost:
    node: NodeId
    order: GoOrder


@dataclass(frozen=True, slots=True)
class RenewHost:
    node: NodeId


@dataclass(frozen=True, slots=True)
class StopHost:
    node: NodeId
    grace_s: float
    kill: bool
    heard: float = 0.0  # `HostReport.at` of the last report


@dataclass(frozen=True, slots=True)
class RecordChanged:
    record: JobRecord


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the next attempt, and tell how that went.

    Args:
        after_s: until no rank of this one can be left on a node that fell silent.
    """

    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUpRestart:
    """Nobody wants the next attempt any more; should it run already, stop it."""


Effect = StartHost | RenewHost | StopHost | RecordChanged | Restart | GiveUpRestart


class Stage(StrEnum):
    WAITING = "waiting"  # for the go order
    STARTING = "starting"
    RUNNING = "running"
    SETTLING = "settling"  # something failed; reports that explain it may be on their way
    STOPPING = "stopping"
    RESTARTING = "restarting"  # all is over here; the next attempt is being started
    ENDED = "ended"


MOVES: Mapping[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.STARTING, Stage.ENDED}),
    Stage.STARTING: frozenset({Stage.RUNNING, Stage.SETTLING, Stage.STOPPING}),
    Stage.RUNNING: frozenset({Stage.SETTLING, Stage.STOPPING}),
    Stage.SETTLING: frozenset({Stage.STOPPING}),
    Stage.STOPPING: frozenset({Stage.RESTARTING, Stage.ENDED}),
    Stage.RESTARTING: frozenset({Stage.ENDED}),
    Stage.ENDED: frozenset(),
}
_QUIET = frozenset({Stage.WAITING, Stage.RESTARTING, Stage.ENDED})  # no node is asked anything
_ORDER = {phase: place for place, phase in enumerate(HostPhase)}
_RANK_ORDER = {state: place for place, state in enumerate(RankState)}


@dataclass(slots=True)
class _Host:
    """What the keeper knows of one node."""

    slot: Slot
    first_rank: int
    heard: float  # when a report came that was not older than what we knew
    hears: float  # when the last call was made that it answered
    report: HostReport
    ended_at: dict[int, float]  # rank -> keeper's time
    answered: bool = False  # since go
    call_until: float | None = None  # a call is in flight at most until then
    call_at: float = 0.0  # when the next is due
    error: str = ""  # of the last call, "" after an answer
    lost: str = ""  # why it counts no more

    @property
    def ranks(self) -> str:
        last = self.first_rank + self.slot.processes - 1
        return f"rank {last}" if last == self.first_rank else f"ranks {self.first_rank}-{last}"

    @property
    def started(self) -> bool:
        return len(self.report.ranks) == self.slot.processes and all(
            rank.state is not RankState.WAITING for rank in self.report.ranks
        )

    @property
    def gone(self) -> bool:
        return self.report.phase is HostPhase.ENDED

    @property
    def over(self) -> bool:
        return bool(self.lost) or self.gone

    @property
    def ranks_gone(self) -> bool:
        return len(self.report.ranks) == self.slot.processes and all(
            rank.state is RankState.EXITED for rank in self.report.ranks
        )

    @property
    def succeeded(self) -> bool:
        return self.ranks_gone and all(map(failure.ended_well, self.report.ranks))


class KeptJob:
    """The keeper's machine; see the module for its rules."""

    def __init__(self, spec: JobSpec, *, now: float) -> None:
        self.spec = spec
        self.stage = Stage.WAITING
        self.failure: Failure | None = None
        self.cause = ""
        self.history: deque[tuple[float, str, str, str, str]] = deque(maxlen=HISTORY)
        self._hosts: dict[NodeId, _Host] = {}
        rank = 0
        for slot in spec.slots:
            report = HostReport(spec.id, slot.node, HostPhase.RESERVED)
            self._hosts[slot.node] = _Host(slot, rank, now, now, report, {})
            rank += slot.processes
        self._order: GoOrder | None = None  # dropped once all run: it carries the secrets
        self._cancelled = False
        self._went = now
        self._failed_at = now
        self._ended: float | None = None
        self._deadline: float | None = now + GO_S
        self._grace_s = 0.0
        self._killed = False
        self._successor = ""
        self._waiting = ""  # for what the next attempt waits
        self._asked = False  # for the next attempt
        self._watched: dict[NodeId, float] = {}  # witness -> as `_Host.hears`
        self._followed = now  # when that was last known
        self._left = False  # as `JobRecord.left`

    @classmethod
    def resume(cls, record: JobRecord, *, now: float, proof: float | None = None) -> KeptJob:
        """Rebuild the machine of a job that runs, after the keeper's agent restarted.

        A job that was still starting is stopped: its order, with the secrets, was never on disk.

        Args:
            proof: what the earlier agent knew, as `proof` returns it; None if it is of no use.
        """
        proof = now if proof is None else min(proof, now)
        job = cls(record.spec, now=now)
        job._went = now - record.age_s
        for report in record.reports:
            job._merge(now, job._hosts[report.node], report)
        for host in job._hosts.values():
            host.hears = proof
            host.answered = True
        job._left = record.left
        if record.state is JobState.RESTARTING:
            job.failure = record.failure
            job.stage = Stage.RESTARTING
            job._deadline = now + RESTART_S
            job.history.append((now, "resumed", "", job.stage.value, ""))
            return job
        job.stage = Stage.RUNNING
        job._deadline = None
        job.history.append((now, "resumed", "", job.stage.value, ""))
        # It may have been watched, and they may count the seconds.
        job._watched = dict.fromkeys(record.spec.voters[len(record.spec.slots) :], proof)
        if record.cause:
            job.cause, job._cancelled = record.cause, True
            job._stop_all(now, Tick(), record.spec.stop_grace_s)
        elif record.failure is not None or record.state is not JobState.RUNNING:
            job.failure = record.failure or Failure(
                None, record.spec.slots[0].name, 1, "keeper restarted while the job was starting"
            )
            job._stop_all(now, Tick(), FAILURE_GRACE_S)
        return job

    def proof(self, now: float) -> float:
        """Return when most voters, this node among them, were last known to hear it.

        Once that is `GONE_S` ago the others may start the next attempt. Where they cannot, now.
        """
        spec = self.spec
        others = [node for node in spec.voters if node != spec.slots[0].node]
        most = majority(spec.voters)
        known_of = len(spec.slots) > 1 or self._watched or spec.restart
        if not self._may_be_restarted or not known_of or not 1 < most <= len(others):
            return now
        heard = sorted((self._heard_by(node) for node in others), reverse=True)
        return min(now, heard[most - 2])

    def _heard_by(self, voter: NodeId) -> float:
        host = self._hosts.get(voter)
        return self._watched.get(voter, self._went) if host is None else host.hears

    @property
    def state(self) -> JobState:
        match self.stage:
            case Stage.WAITING:
                return JobState.PENDING
            case Stage.STARTING:
                return JobState.STARTING
            case Stage.RESTARTING:
                return JobState.RESTARTING
            case Stage.ENDED:
                if self._cancelled:
                    return JobState.CANCELLED
                return JobState.SUCCEEDED if self.failure is None else JobState.FAILED
            case _:
                return JobState.RUNNING

    def record(self, now: float) -> JobRecord:
        """The job as everybody may see it, ages as of `now`."""
        return JobRecord(
            self.spec,
            self.state,
            self.spec.slots[0].node,
            tuple(
                replace(host.report, ranks=tuple(self._aged(now, host)))
                for host in self._hosts.values()
            ),
            self.failure,
            self.cause,
            now - self._went,
            None if self._ended is None else now - self._ended,
            self._successor,
            self._waiting,
            self._left,
        )

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Take one event; the only mutator.

        Raises:
            RemoteProtocolError: a report of another job, an unknown node or a foreign rank.
        """
        if isinstance(event, HostReported):
            self._check_report(event.report)
        if self.stage is Stage.ENDED:
            return []
        before, was = self._visible(), self.stage
        match event:
            case Go(order):
                if self.stage is Stage.WAITING:
                    self._order = order
                    self._went = self._followed = now
                    self._left = order.left
                    for host in self._hosts.values():
                        host.heard = host.hears = now
                    self._move(now, event, Stage.STARTING, now + START_S)
            case HostReported(report, asked):
                host = self._hosts[report.node]
                host.call_until = None
                host.error = ""
                host.answered = True
                host.hears = max(host.hears, asked or 0.0)
                self._merge(now, host, report)
                if report.stopped_by and not self._cancelled:
                    self._stop_requested(now, StopRequested(report.stopped_by))
            case ReportFailed(node, error):
                if node in self._hosts:
                    self._hosts[node].call_until = None
                    self._hosts[node].error = error[:256]
            case StopRequested():
                self._stop_requested(now, event)
            case Followed(leaving):
                self._followed, self._left = now, leaving
            case HostRemoved(node):
                if node in self._hosts and not self._hosts[node].over:
                    self._hosts[node].lost = "was removed from the mesh"
            case Watched(node, asked):
                self._watched[node] = max(asked, self._watched.get(node, 0.0))
            case Restarted(successor):
                if self.stage is Stage.RESTARTING:
                    self._successor = successor
                    self._end(now, event)
            case RestartWaits(why):
                if self.stage is Stage.RESTARTING:
                    self._waiting = why[:512]
                    self._deadline = now + RESTART_S
            case NotRestarted(why):
                if self.stage is Stage.RESTARTING:
                    self._not_restarted(now, event, why)
            case Tick():
                pass
        self._judge(now, event)
        effects = self._calls(now)
        effects += self._about_restart(now, was)
        if self._visible() != before:
            effects.append(RecordChanged(self.record(now)))
        return effects

    def next_timeout(self) -> float | None:
        """When the machine next wants a Tick."""
        if self.stage is Stage.ENDED:
            return None
        times = [] if self._deadline is None else [self._deadline]
        if self.stage is Stage.RESTARTING and not self._asked:
            return self._went  # at once
        if self.stage not in (Stage.WAITING, Stage.RESTARTING):
            for host in self._hosts.values():
                if self._calls_on(host):
                    times.append(host.call_at if host.call_until is None else host.call_until)
                if self._watches(host):
                    times.append(host.heard + HOST_LOST_S)
        if self.stage in (Stage.STARTING, Stage.RUNNING):
            times += [at for at in [self._cut_off_at()] if at is not None]
        times += [at for at in [self._abandoned_at()] if at is not None]
        return min(times)

    def check(self) -> None:
        """Raise if an invariant is broken."""
        timeout = self.next_timeout()
        assert (timeout is None) is (self.stage is Stage.ENDED), (self.stage, timeout)
        assert self.stage in (Stage.RUNNING, Stage.ENDED) or self._deadline is not None
        if self.stage is Stage.ENDED and self.state is JobState.SUCCEEDED:
            assert all(host.ranks_gone for host in self._hosts.values())
        assert self._order is None or self.stage in (Stage.STARTING, Stage.WAITING)

    # Events

    def _stop_requested(self, now: float, event: StopRequested, cause: str = "") -> None:
        if self.stage is Stage.STOPPING:
            if event.kill:
                self._kill(now)
            return
        grace_s = self.spec.stop_grace_s if event.grace_s is None else event.grace_s
        if self.failure is None or self.stage is Stage.RESTARTING:
            self.failure = None
            self._cancelled = True
            self.cause = cause or f"stopped by {event.by}"
        if self.stage in (Stage.WAITING, Stage.RESTARTING):
            self._end(now, event)
            return
        self._stop_all(now, event, grace_s)
        if event.kill:
            self._kill(now)

    def _check_report(self, report: HostReport) -> None:
        host = self._hosts.get(report.node)
        if report.job != self.spec.id or host is None:
            raise RemoteProtocolError(f"report of {report.node[:8]} does not belong to this job")
        ranks = [status.rank for status in report.ranks]
        own = range(host.first_rank, host.first_rank + host.slot.processes)
        if len(set(ranks)) != len(ranks) or any(rank not in own for rank in ranks):
            raise RemoteProtocolError(f"node {host.slot.name} reports ranks {ranks}, has {own}")

    def _merge(self, now: float, host: _Host, report: HostReport) -> None:
        """Take a report over unless it is older than what is known."""
        if _ORDER[report.phase] < _ORDER[host.report.phase]:
            return  # delayed on the way, or of an agent that lost the job: not a sign of life
        known = {status.rank: status for status in host.report.ranks}
        fresh = {status.rank: status for status in report.ranks}
        for rank, old in known.items():
            new = fresh.get(rank)
            if old.state is RankState.EXITED or new is None:
                fresh[rank] = old
            elif _RANK_ORDER[new.state] < _RANK_ORDER[old.state]:
                return
        for rank, status in fresh.items():
            if status.state is RankState.EXITED and rank not in host.ended_at:
                host.ended_at[rank] = now - (status.ended_age_s or 0.0)
        host.heard = now
        host.report = replace(report, ranks=tuple(fresh[r] for r in sorted(fresh)))

    # Decisions

    def _judge(self, now: float, event: Event) -> None:
        """Move on as far as what is known allows."""
        hosts = self._hosts.values()
        abandoned = self._abandoned_at()
        if abandoned is not None and now >= abandoned:
            who = f"its launcher on {self.spec.submitter_name}"
            gone = f"{who} was gone for {self.spec.on_disconnect_s:g} s"
            self._stop_requested(now, StopRequested(who), gone)
        for host in hosts:
            if self._watches(host) and now >= host.heard + HOST_LOST_S:
                why = f" ({host.error})" if host.error else ""
                host.lost = f"did not answer for {HOST_LOST_S:g} s{why}"
        if self.stage is Stage.WAITING and self._late(now):
            self._cancelled = True
            self.cause = f"no go order within {GO_S:g} s"
            self._end(now, event)
            return
        if self.stage is Stage.STARTING and all(host.started for host in hosts):
            self._move(now, event, Stage.RUNNING, None)
        if self.stage in (Stage.STARTING, Stage.RUNNING):
            found = self._find_failure(now)
            if found is not None:
                self.failure = found
                self._failed_at = now
                self._move(now, event, Stage.SETTLING, now + SETTLE_S)
            elif all(host.succeeded for host in hosts):
                self._stop_all(now, event, FAILURE_GRACE_S)
        if self.stage is Stage.SETTLING and self.failure is not None:
            weak = self.failure.rank is not None and self._rank_cause(now) is None
            better = self._find_failure(now) if weak else self._rank_cause(now)
            self.failure = better or self.failure
            # As long as ranks only tell of a lost peer, its own report may be on its way.
            weak = weak and self.failure.rank is not None
            self._deadline = self._failed_at + (SETTLE_CAUSE_S if weak else SETTLE_S)
            if self._late(now) or all(host.over or host.ranks_gone for host in hosts):
                self._stop_all(now, event, FAILURE_GRACE_S)
        if self.stage is Stage.STOPPING:
            if self.failure is not None and self.failure.rank is not None:
                cause = self._rank_cause(now) or self._problem() or self._lost()
                self.failure = cause or self.failure
            if all(host.over for host in hosts) or (self._late(now) and self._killed):
                if not self._may_restart():
                    self._end(now, event)
                elif self.failure is not None and self.failure.hopeless:
                    self._not_restarted(now, event, "it would end so each time")
                else:
                    self._move(now, event, Stage.RESTARTING, now + RESTART_S)
            elif self._late(now):
                self._kill(now)
        if self.stage is Stage.RESTARTING and self._late(now):
            self._not_restarted(now, event, f"nothing was heard of it for {RESTART_S:g} s")

    def _find_failure(self, now: float) -> Failure | None:
        """The failure that explains the others: a rank's cause, a host's problem, a lost peer."""
        found = self._rank_cause(now)
        if found is not None:
            return found
        found = self._problem() or self._lost() or self._cut_off(now)
        if found is None and self.stage is Stage.STARTING and self._late(now):
            found = self._not_started()
        return found or failure.first_failure(self._ranks(now)) or self._stopped_there()

    def _rank_cause(self, now: float) -> Failure | None:
        """The first rank that failed for a reason of its own."""
        return failure.first_failure(
            (node, status)
            for node, status in self._ranks(now)
            if not failure.is_consequence(status)
        )

    def _problem(self) -> Failure | None:
        for host in self._hosts.values():
            if host.report.problem:
                name = host.slot.name
                return Failure(None, name, 1, f"node {name}: {host.report.problem}")
        return None

    def _lost(self) -> Failure | None:
        for host in self._hosts.values():
            if host.lost and not host.ranks_gone:
                name = host.slot.name
                return Failure(None, name, 1, f"node lost: {name} {host.lost}")
        return None

    def _cut_off(self, now: float) -> Failure | None:
        """Most of the voters are elsewhere and silent: they may be about to restart the job."""
        at = self._cut_off_at()
        if at is None or now < at:
            return None
        name = self.spec.slots[0].name
        reason = f"cut off from the machines that would restart it for {HOST_LOST_S:g} s"
        return Failure(None, name, 1, f"node {name}: {reason}")

    def _cut_off_at(self) -> float | None:
        """When too few voters are known to hear this node; None: they could not do without it."""
        proof = self.proof(math.inf)
        return None if proof == math.inf else proof + HOST_LOST_S

    def _abandoned_at(self) -> float | None:
        """When the job stops because nobody follows it; None: it does not."""
        limit_s = self.spec.on_disconnect_s
        stops = self.stage in (Stage.STARTING, Stage.RUNNING, Stage.RESTARTING)
        return None if limit_s is None or self._left or not stops else self._followed + limit_s

    @property
    def _may_be_restarted(self) -> bool:
        return self.spec.restart < self.spec.restarts

    def _stopped_there(self) -> Failure | None:
        """A host ended its ranks though nobody asked, and they did not fail by themselves."""
        for host in self._hosts.values():
            if (host.over or host.ranks_gone) and not host.succeeded:
                name = host.slot.name
                return Failure(None, name, 1, f"ranks on {name} were stopped there")
        return None

    def _ranks(self, now: float) -> list[tuple[str, RankStatus]]:
        return [
            (host.slot.name, status)
            for host in self._hosts.values()
            for status in self._aged(now, host)
        ]

    def _not_started(self) -> Failure:
        """Name every host that keeps the others waiting, and its last state."""
        late = [host for host in self._hosts.values() if not host.started]
        states = ", ".join(
            f"{host.ranks} on {host.slot.name} ({host.error or host.report.phase.value})"
            for host in late[:8]
        )
        more = f" and {len(late) - 8} more" if len(late) > 8 else ""
        return Failure(
            None, late[0].slot.name, 1, f"not started within {START_S:g} s: {states}{more}"
        )

    # Effects

    def _calls(self, now: float) -> list[Effect]:
        """Make the calls that are due, one in flight per host."""
        effects: list[Effect] = []
        for host in self._hosts.values():
            if self.stage in _QUIET or not self._calls_on(host):
                continue
            if host.call_until is not None and now >= host.call_until:
                host.call_until = None
                host.error = host.error or f"no answer for {CALL_S:g} s"
            if host.call_until is not None or now < host.call_at:
                continue
            host.call_until = now + CALL_S
            host.call_at = now + RENEW_S
            node = host.slot.node
            if self.stage is Stage.STOPPING and not host.gone:
                effects.append(StopHost(node, self._grace_s, self._killed, host.report.at))
            elif self._order is not None and _ORDER[host.report.phase] < _ORDER[HostPhase.RUNNING]:
                effects.append(StartHost(node, self._order))
            else:
                effects.append(RenewHost(node))
        return effects

    def _about_restart(self, now: float, was: Stage) -> list[Effect]:
        if self.stage is Stage.RESTARTING and not self._asked:
            self._asked = True
            return [Restart(self._gone_after_s(now))]
        ended = was is Stage.RESTARTING and self.stage is Stage.ENDED
        return [GiveUpRestart()] if ended and not self._successor else []

    def _stop_all(self, now: float, event: Event, grace_s: float) -> None:
        self._grace_s = grace_s
        self._move(now, event, Stage.STOPPING, now + grace_s + END_S)
        self._call_now(now)

    def _kill(self, now: float) -> None:
        if not self._killed:
            self._killed = True
            self._grace_s = 0.0
            self._deadline = now + KILL_S
            self._call_now(now)

    def _call_now(self, now: float) -> None:
        for host in self._hosts.values():
            host.call_until = None
            host.call_at = now

    def _may_restart(self) -> bool:
        return self.failure is not None and not self._cancelled and self._may_be_restarted

    def _gone_after_s(self, now: float) -> float:
        """How long ranks may be left on nodes that did not say that theirs are gone."""
        gone = [self._gone_at(host) for host in self._hosts.values() if not host.gone]
        return max(0.0, *gone, now) - now if gone else 0.0

    def _gone_at(self, host: _Host) -> float:
        # One that never answered may have taken the order to start until its reservation ended.
        return host.heard + GONE_S + (0.0 if host.answered else LEASE_S)

    def _not_restarted(self, now: float, event: Event, why: str) -> None:
        assert self.failure is not None
        reason = f"{self.failure.reason}; not restarted: {why}"
        self.failure = replace(self.failure, reason=reason)
        self._end(now, event)

    def _end(self, now: float, event: Event) -> None:
        self._ended = now
        self._waiting = ""
        self._move(now, event, Stage.ENDED, None)

    # Small things

    def _watches(self, host: _Host) -> bool:
        """Silence counts only where ranks run, or may run: anywhere that answered since go."""
        if host.over or self.stage in _QUIET:
            return False
        return self.stage is not Stage.STARTING or host.heard > self._went

    def _calls_on(self, host: _Host) -> bool:
        """A node whose part is over is asked on where it could go on without this one."""
        return not host.over or (host.gone and not host.lost and self._may_be_restarted)

    def _late(self, now: float) -> bool:
        return self._deadline is not None and now >= self._deadline

    def _aged(self, now: float, host: _Host) -> list[RankStatus]:
        return [
            replace(status, ended_age_s=max(0.0, now - host.ended_at[status.rank]))
            if status.rank in host.ended_at
            else status
            for status in host.report.ranks
        ]

    def _visible(self) -> tuple[object, ...]:
        """What makes a new record worth telling; a growing memory peak does not."""
        return (
            self.stage,
            self.failure,
            self.cause,
            self._cancelled,
            self._waiting,
            self._left,
            tuple(
                (
                    host.lost,
                    host.report.phase,
                    host.report.problem,
                    tuple((status.rank, status.state, status.pid) for status in host.report.ranks),
                )
                for host in self._hosts.values()
            ),
        )

    def _move(self, now: float, event: Event, new: Stage, deadline: float | None) -> None:
        name = type(event).__name__
        if new not in MOVES[self.stage]:
            trail = tuple(f"{at:.1f} {what} {a}->{b}" for at, what, a, b, _ in self.history)[-20:]
            raise IllegalTransitionError(self.spec.id, self.stage.value, name, trail)
        why = self.failure.reason if self.failure is not None else self.cause
        self.history.append((now, name, self.stage.value, new.value, why))
        self.stage = new
        self._deadline = deadline
        if new is not Stage.STARTING:
            self._order = None
