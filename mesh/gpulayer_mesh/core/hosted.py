"""One node's part of a job, on every participant: from the reservation to the last process gone.

Rules. Whoever asks must keep asking: before the start the launcher's calls renew a lease, while
ranks run the keeper's do, and when they stop this node ends its ranks by itself, so a cut-off node
never keeps a job alive that was declared lost elsewhere. The keeper's lease counts from when this
node sent the last report that the keeper has, which each call of the keeper names: so it is over
before the keeper's own count from when that report came, whatever the network does to calls and
answers. The keeper's own node counts from when most voters were last known to hear it. Whoever
takes the keeper's place waits from `heard`. Start happens at most once per job and
node; every further Start only gets the current report. Stop may be repeated, can only shorten the
time left, and is remembered even before a start. No state waits for a message alone.

    RESERVED -> STAGING -> STAGED -> RUNNING -> STOPPING -> ENDED      (any of them -> ENDED)

The shell executes the effects of one job in order (a StopShim after its StartShim). This module
does not know how a process is started, who the keeper is, or what a file is. Time is `now`, as in
`job`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpulayer_mesh.core.failure import is_failure
from gpulayer_mesh.core.jobspec import (
    GoOrder,
    HostPhase,
    HostReport,
    JobSpec,
    MemoryKill,
    RankState,
    RankStatus,
)
from gpulayer_mesh.core.lease import LEASE_S
from gpulayer_mesh.core.rankenv import first_rank
from gpulayer_mesh.errors import IllegalTransitionError

KEEPER_SILENT_S = 19.0  # above the keeper's 18 s: it gives a node up before the node gives up
SILENT_GRACE_S = 3.0  # then; the job is lost anyway, and the devices are wanted elsewhere
ALONE_S = 300.0  # without an agent: an update or a crash of it costs a job on this node nothing
START_S = 30.0  # from the start order to the last rank's process; a cold disk needs some
CLEANUP_S = 20.0  # all ranks are gone, the shim still ends what they left behind
KILL_AFTER_S = 2.0  # past the grace; the shim kills by itself at the end of the grace
CONFIRM_S = 5.0  # from kill to the shim's word that nothing is left
HISTORY = 64  # entries
TAIL_LINES = 60  # limit of `RankStatus.tail`
TAIL_CHARS = 16 * 1024  # per rank: a traceback with long lines
TAILS_MAX = 8  # ranks with a tail per report, the earliest failures: bounds a report to 128 KiB


def agent_silence_s(spec: JobSpec) -> float:
    """Return for how long ranks go on while no agent watches over them.

    Where other nodes take part these give the node up after a while, and the job is lost: ranks
    that went on would only hold devices. Where others may start the job again, the end of the
    keeper's lease is all that counts.
    """
    waited_for = len(spec.slots) > 1 and spec.restart == spec.restarts
    return KEEPER_SILENT_S + SILENT_GRACE_S if waited_for else ALONE_S


def fence_grace_s(spec: JobSpec) -> float | None:
    """Return what ranks get past the lease, even while no agent runs; None: it ends nothing then.

    Where others may start the job again they count on it: `job.GONE_S`.
    """
    last = spec.restart == spec.restarts
    return None if last else min(spec.stop_grace_s, SILENT_GRACE_S)


@dataclass(frozen=True, slots=True)
class Touched:
    """A call of the launcher arrived, or staging made progress."""


@dataclass(frozen=True, slots=True)
class StageBegan:
    """The manifest arrived."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The working folder is complete and verified."""


@dataclass(frozen=True, slots=True)
class StageFailed:
    error: str


@dataclass(frozen=True, slots=True)
class Start:
    """The keeper's order."""

    order: GoOrder


@dataclass(frozen=True, slots=True)
class Renewed:
    """A call of the keeper.

    Args:
        proof: when this node sent the last report that the keeper has, by the machine's clock;
            a time to come means now.
    """

    proof: float = math.inf


@dataclass(frozen=True, slots=True)
class Stop:
    grace_s: float
    kill: bool = False
    reason: str = ""  # becomes the report's problem; "" for a stop by the keeper
    by: str = ""  # who asked for it here, for the keeper does not answer


@dataclass(frozen=True, slots=True)
class Release:
    """The launcher gives the reservation back; means nothing once ranks run.

    Args:
        going: the keeper may have the order to go all the same.
    """

    going: bool = False


@dataclass(frozen=True, slots=True)
class RankStarted:
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankExited:
    rank: int
    code: int | None = None
    signal: int | None = None
    stopped: bool = False
    tail: tuple[str, ...] = ()
    memory_peak_mib: int | None = None
    memory_limit_mib: int | None = None
    memory_kill: MemoryKill | None = None
    no_result: bool = False
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class ShimDone:
    """The shim says: no process of the job is left."""


@dataclass(frozen=True, slots=True)
class ShimLost:
    """The shim could not be started, or is gone without a word; its ranks are gone with it."""

    error: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Touched
    | StageBegan
    | Staged
    | StageFailed
    | Start
    | Renewed
    | Stop
    | Release
    | RankStarted
    | RankExited
    | ShimDone
    | ShimLost
    | Tick
)


@dataclass(frozen=True, slots=True)
class StartShim:
    order: GoOrder


@dataclass(frozen=True, slots=True)
class StopShim:
    grace_s: float
    reason: str = ""  # the shim notes it, so that an agent which comes after this one knows


@dataclass(frozen=True, slots=True)
class KillShim:
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HoldGrant:
    """Ranks use the devices from now on: no lease ends the grant."""


@dataclass(frozen=True, slots=True)
class FreeGrant:
    pass


@dataclass(frozen=True, slots=True)
class ReportToKeeper:
    report: HostReport


Effect = StartShim | StopShim | KillShim | HoldGrant | FreeGrant | ReportToKeeper

_P = HostPhase
MOVES: Mapping[HostPhase, frozenset[HostPhase]] = {
    _P.RESERVED: frozenset({_P.STAGING, _P.STAGED, _P.ENDED}),
    _P.STAGING: frozenset({_P.STAGED, _P.ENDED}),
    _P.STAGED: frozenset({_P.RUNNING, _P.ENDED}),
    _P.RUNNING: frozenset({_P.STOPPING, _P.ENDED}),
    _P.STOPPING: frozenset({_P.ENDED}),
    _P.ENDED: frozenset(),
}
_BEFORE_START = frozenset({_P.RESERVED, _P.STAGING, _P.STAGED})
_ALIVE = frozenset({_P.RUNNING, _P.STOPPING})


class HostedJob:
    """The participant's machine; see the module for its rules.

    Args:
        spec: the signed job.
        slot_index: which slot is this node's.
    """

    def __init__(self, spec: JobSpec, slot_index: int, *, now: float) -> None:
        slot = spec.slots[slot_index]
        first = first_rank(spec, slot_index)
        self.spec = spec
        self.slot = slot
        self.phase = HostPhase.RESERVED
        self.problem = ""
        self.keeper_lost = False  # our own end came because the keeper fell silent
        self.stopped_by = ""
        self.history: deque[tuple[float, str, str, str, str]] = deque(maxlen=HISTORY)
        self._ranks = {
            rank: RankStatus(rank, RankState.WAITING)
            for rank in range(first, first + slot.processes)
        }
        self._ended: dict[int, float] = {}  # rank -> when it ended
        self.heard = now + LEASE_S  # the keeper, which may still get the order to go
        self._lease = now + LEASE_S  # the launcher's, then the keeper's
        self._deadline: float | None = None  # of RUNNING's start, cleanup or of STOPPING
        self._killed = False

    @classmethod
    def adopt(
        cls, spec: JobSpec, slot_index: int, *, now: float, lease: float | None = None
    ) -> HostedJob:
        """Rebuild the machine around a shim that outlived the agent.

        The shim's status events are then replayed into it from the first.

        Args:
            lease: what is left of the earlier agent's, None where it does not matter.
        """
        job = cls(spec, slot_index, now=now)
        job.phase = HostPhase.RUNNING
        job.heard = now
        job._lease = now + KEEPER_SILENT_S if lease is None else min(lease, now + KEEPER_SILENT_S)
        job._deadline = now + START_S
        job.history.append((now, "adopted", "", job.phase.value, ""))
        return job

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Take one event; the only mutator."""
        before = (self.phase, self.problem, tuple(self._ranks.values()))
        effects = self._react(now, event)
        if (self.phase, self.problem, tuple(self._ranks.values())) != before:
            if before[0] is not self.phase and self.phase is HostPhase.ENDED:
                effects.append(FreeGrant())
            if before[0] in _ALIVE or self.phase in _ALIVE:
                effects.append(ReportToKeeper(self.report(now)))
        return effects

    def _react(self, now: float, event: Event) -> list[Effect]:
        match event:
            case Touched() | StageBegan() | Staged():
                if self.phase not in _BEFORE_START:
                    return []
                self._lease = self.heard = now + LEASE_S
                if isinstance(event, StageBegan) and self.phase is HostPhase.RESERVED:
                    self._move(now, event, HostPhase.STAGING)
                elif isinstance(event, Staged) and self.phase is not HostPhase.STAGED:
                    self._move(now, event, HostPhase.STAGED)
                return []
            case StageFailed(error):
                return self._give_up(now, event, error)
            case Release(going):
                if self.phase in _BEFORE_START and not going:
                    self.heard = -math.inf  # there will be no keeper
                return self._give_up(now, event, "released by the launcher")
            case Start(order):
                self.heard = now
                if self.phase is not HostPhase.STAGED:
                    return []  # too early: the keeper asks again; later: it is no second start
                if now >= self._lease:  # an order that lay in a queue: others may run it by now
                    return self._tick(now, event)
                self._move(now, event, HostPhase.RUNNING)
                self._lease = now + KEEPER_SILENT_S
                self._deadline = now + START_S
                return [HoldGrant(), StartShim(order)]
            case Renewed(proof):
                self.heard = now
                if self.phase in _ALIVE:
                    self._lease = max(self._lease, min(proof, now) + KEEPER_SILENT_S)
                return []
            case Stop(grace_s, kill, reason, by):
                self.stopped_by = self.stopped_by or by
                if self.phase in _BEFORE_START:
                    return self._give_up(now, event, reason or "stopped before the start")
                return self._stop(now, event, grace_s, kill, reason)
            case RankStarted(rank, pid):
                known = self._ranks.get(rank)
                if known is not None and known.state is RankState.WAITING:
                    state = RankState.RUNNING if self.phase is _P.RUNNING else RankState.STOPPING
                    self._ranks[rank] = replace(known, state=state, pid=pid)
                if self.phase is HostPhase.RUNNING and not self._has(RankState.WAITING):
                    self._deadline = None
                return []
            case RankExited():
                return self._exited(now, event)
            case ShimDone():
                if self.phase in _ALIVE:
                    self._end(now, event, "")
                return []
            case ShimLost(error):
                if self.phase in _ALIVE:
                    self._end(now, event, error)
                return []
            case Tick():
                return self._tick(now, event)

    def next_timeout(self) -> float | None:
        """When the machine next wants a Tick."""
        if self.phase is HostPhase.ENDED:
            return None
        if self.phase is HostPhase.STOPPING:
            return self._deadline
        return self._lease if self._deadline is None else min(self._lease, self._deadline)

    @property
    def lease(self) -> float:
        """Until when ranks may run, unless it is renewed."""
        return self._lease

    def report(self, now: float) -> HostReport:
        """Everything this node knows of its part."""
        ranks = []
        failed = sorted(
            (rank for rank, status in self._ranks.items() if is_failure(status)),
            key=lambda rank: self._ended[rank],
        )
        for rank, status in self._ranks.items():
            if rank in self._ended:
                status = replace(status, ended_age_s=max(0.0, now - self._ended[rank]))
            if rank not in failed[:TAILS_MAX]:
                status = replace(status, tail=())
            ranks.append(status)
        return HostReport(
            self.spec.id,
            self.slot.node,
            self.phase,
            tuple(ranks),
            self.problem[:4096],
            now,
            self.stopped_by,
        )

    def check(self) -> None:
        """Raise if an invariant is broken."""
        timeout = self.next_timeout()
        assert (timeout is None) is (self.phase is HostPhase.ENDED), (self.phase, timeout)
        if self.phase is HostPhase.ENDED:
            assert not self._has(RankState.RUNNING)
            assert not self._has(RankState.STOPPING)
        if self.phase in _BEFORE_START:
            assert not self._ended
        assert all(
            (status.state is RankState.EXITED) is (rank in self._ended)
            for rank, status in self._ranks.items()
            if self.phase is not HostPhase.ENDED
        )

    def _exited(self, now: float, event: RankExited) -> list[Effect]:
        known = self._ranks.get(event.rank)
        if known is None or known.state is RankState.EXITED or self.phase in _BEFORE_START:
            return []
        self._ended[event.rank] = now
        status = replace(
            known,
            state=RankState.EXITED,
            exit_code=event.code,
            signal=event.signal,
            stopped=event.stopped,
            memory_peak_mib=event.memory_peak_mib,
            memory_limit_mib=event.memory_limit_mib,
            memory_kill=event.memory_kill,
            no_result=event.no_result,
            hopeless=event.hopeless,
        )
        if is_failure(status):
            status = replace(status, tail=_bounded(event.tail))
        self._ranks[event.rank] = status
        if self.phase is HostPhase.RUNNING and not (
            self._has(RankState.WAITING) or self._has(RankState.RUNNING)
        ):
            self._move(now, event, HostPhase.STOPPING)
            self._deadline = now + CLEANUP_S
        return []

    def _stop(
        self, now: float, event: Event, grace_s: float, kill: bool, reason: str
    ) -> list[Effect]:
        if self.phase is HostPhase.ENDED:
            return []
        first = self.phase is HostPhase.RUNNING
        if first:
            self.problem = reason
            self._move(now, event, HostPhase.STOPPING)
            for rank, status in self._ranks.items():
                if status.state is RankState.RUNNING:
                    self._ranks[rank] = replace(status, state=RankState.STOPPING)
        if kill:
            return self._kill(now)
        deadline = now + grace_s + KILL_AFTER_S
        if not first and (self._deadline is None or deadline >= self._deadline):
            return []
        self._deadline = deadline
        return [StopShim(grace_s, self.problem)]

    def _kill(self, now: float) -> list[Effect]:
        if self._killed:
            return []
        self._killed = True
        self._deadline = now + CONFIRM_S
        return [KillShim(self.problem)]

    def _give_up(self, now: float, event: Event, problem: str) -> list[Effect]:
        if self.phase in _BEFORE_START:
            self.problem = problem
            self._move(now, event, HostPhase.ENDED)
        return []

    def _end(self, now: float, event: Event, problem: str) -> None:
        """The shim is done or lost: whatever did not report an exit was ended with it."""
        left = [s for s in self._ranks.values() if s.state is not RankState.EXITED]
        stopping = self.phase is HostPhase.STOPPING
        if not problem and left and not stopping:
            ranks = ", ".join(str(s.rank) for s in left[:8])
            problem = f"the shim ended without the exit status of rank {ranks}"
        for status in left:
            self._ended[status.rank] = now
            self._ranks[status.rank] = replace(status, state=RankState.EXITED, stopped=True)
        self.problem = self.problem or problem
        self._move(now, event, HostPhase.ENDED)

    def _tick(self, now: float, event: Event) -> list[Effect]:
        late = self._deadline is not None and now >= self._deadline
        if self.phase in _BEFORE_START and now >= self._lease:
            return self._give_up(now, event, f"launcher silent for {LEASE_S:g} s")
        if self.phase is HostPhase.RUNNING and now >= self._lease:
            self.keeper_lost = True
            reason = f"the node of rank 0 did not answer for {KEEPER_SILENT_S:g} s"
            return self._stop(now, event, SILENT_GRACE_S, False, reason)
        if self.phase is HostPhase.RUNNING and late:
            waiting = [s.rank for s in self._ranks.values() if s.state is RankState.WAITING]
            reason = f"rank {waiting[0]} did not start within {START_S:g} s"
            return self._stop(now, event, 0.0, True, reason)
        if self.phase is HostPhase.STOPPING and late:
            if not self._killed:
                return self._kill(now)
            self._end(now, event, "the shim did not confirm that every process is gone")
        return []

    def _has(self, state: RankState) -> bool:
        return any(status.state is state for status in self._ranks.values())

    def _move(self, now: float, event: Event, new: HostPhase) -> None:
        name = type(event).__name__
        if new not in MOVES[self.phase]:
            trail = tuple(f"{at:.1f} {what} {a}->{b}" for at, what, a, b, _ in self.history)[-20:]
            raise IllegalTransitionError(self.spec.id, self.phase.value, name, trail)
        self.history.append((now, name, self.phase.value, new.value, self.problem))
        self.phase = new
        if new in (HostPhase.RUNNING, HostPhase.ENDED):
            self._deadline = None


def _bounded(tail: tuple[str, ...]) -> tuple[str, ...]:
    """Keep the last lines within the limits of a report."""
    kept: list[str] = []
    left = TAIL_CHARS
    for line in reversed(tail[-TAIL_LINES:]):
        line = line[:4096]
        left -= len(line) + 1
        if left < 0:
            break
        kept.append(line)
    return tuple(reversed(kept))
