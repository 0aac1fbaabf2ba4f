"""From a failed attempt of a job to its next one: plan, reserve, have it agreed to, start.

Rules, besides those of `core.restarts`. Whoever starts an attempt asks all voters of the one before
for their agreement, after the nodes are reserved and before anything runs. A voter is bound to the
first proposal that it is asked for. What most voters are bound to is decided; if it does not come
to run, the next number is tried on top of it, and its own voters have to agree. A voter agrees to
no attempt while the one before may run: its own part has not ended, or, as a witness, it heard of
it lately; and to none once the keeper has said that the job has ended. One that is bound takes no
part in earlier attempts and watches none. The order to go is only given once the attempt's own
witnesses hold it, with its nodes a majority. So of two attempts some voter knows both, and lets the
later one start only after the end of the earlier one. What stays undecided is tried again until
time is up.

This module does not know how anything travels (`Ground` does). Time is the event loop's, so that a
simulation can run it in virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from gpulayer_mesh.core import restarts
from gpulayer_mesh.core.job import GONE_S
from gpulayer_mesh.core.jobspec import OVER, HostPhase, JobRecord, JobState
from gpulayer_mesh.core.paths import Pair
from gpulayer_mesh.core.types import NodeId, NodeState, Snapshot
from gpulayer_mesh.errors import (
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    PathsCutError,
    PlacementBusyError,
)
from gpulayer_mesh.runtime.livejob import Signed

log = logging.getLogger("gpulayer.restarts")

T = TypeVar("T")
Order = TypeVar("Order")

RETRY_S = 1.0
RETRY_MAX_S = 5.0  # once that took long
STUCK_S = 60.0  # for the nodes of a proposal, which cannot be changed any more
OTHERS_S = 0.5  # for voters that are slower than most
ASK_S = 2.0  # for the word of those who may see to it before us
TICK_S = 20.0
STAGGER_S = 20.0  # between witnesses that miss the keeper
SHOW_S = 45.0  # for an attempt that another has started to show; above a reservation's 30 s


class NotRestartedError(GpuLayerError):
    """There will be no next attempt."""


class EndedError(NotRestartedError):
    """The job has ended: a voter has the keeper's word for it."""

    def __init__(self) -> None:
        super().__init__("it has ended already")


class KeeperBackError(NotRestartedError):
    """The attempt before runs on: its keeper, which was silent, is heard again."""

    def __init__(self) -> None:
        super().__init__("it runs on: its first machine is back")


class _Seen(StrEnum):
    """What a node says of an attempt."""

    BEGUN = "begun"
    COMING = "coming"  # it is being prepared
    NOTHING = "nothing"
    SILENCE = "silence"


def bind(
    attempt: Signed,
    known: Signed | None,
    *,
    part: HostPhase | None,
    heard_s: float | None,
    node: NodeId,
    name: str,
) -> Signed:
    """Return the attempt that a voter is bound to once it was asked for one.

    Args:
        known: what it was bound to.
        part: how far its own part in the attempt before is, None if it has none.
        heard_s: how long ago it heard the keeper of the attempt before, which counts on its voice
            for a while; None if it never did.

    Raises:
        NotAllowedError: it has no vote.
        GpuLayerError: the attempt before may still run.
    """
    before = attempt.history[-1] if attempt.history else None
    if before is None or node not in before.voters:
        raise NotAllowedError(f"{name} has no vote on that job")
    if part not in (None, HostPhase.ENDED):
        raise GpuLayerError(f"job {before.id} has not ended on {name}")
    if heard_s is not None and heard_s < GONE_S and attempt.signer != before.slots[0].node:
        raise GpuLayerError(f"{name} heard from job {before.id} {heard_s:.0f} s ago")
    return known or attempt


@dataclass(slots=True)
class _Votes:
    """What the voters of an attempt are bound to."""

    votes: Counter[bytes]  # chain -> voters bound to it
    chains: dict[bytes, Signed]
    answered: int
    of: int  # all voters
    problems: list[str]

    @property
    def decided(self) -> Signed | None:
        """Return the attempt that most are bound to."""
        for chain, votes in self.votes.items():
            if votes >= self.majority:
                return self.chains[chain]
        return None

    @property
    def split(self) -> bool:
        """Return whether nothing can be decided any more."""
        free = self.of - self.votes.total()
        return max(self.votes.values(), default=0) + free < self.majority

    @property
    def majority(self) -> int:
        return self.of // 2 + 1

    def missing(self, count: int) -> str:
        why = f" ({self.problems[0][:200]})" if self.problems else ""
        return f"{count} more of its {self.of} voters would have to agree{why}"


class Ground(Protocol[Order]):
    """One node and its means."""

    node: NodeId

    def snapshot(self) -> Snapshot:
        """Return what this node believes of the mesh."""

    def sign(self, before: Signed, change: restarts.Change) -> Signed: ...

    async def stand(self, before: Signed) -> None:
        """Let nodes that the attempt after this one could run on take nothing else, for a while."""

    async def leave(self) -> None:
        """Let them take what they want again."""

    def keeper_speaks(self, attempt: Signed) -> bool:
        """Return whether this node knows that an attempt runs."""

    async def answers(self, node: NodeId) -> bool:
        """Return whether a node can be reached."""

    async def reserve(self, attempt: Signed) -> None: ...

    async def release(self, attempt: Signed) -> None: ...

    async def meet(self, attempt: Signed) -> None:
        """Try the paths between the nodes of a reserved attempt.

        Raises:
            PathsCutError: some do not reach each other.
            GpuLayerError: one of them cannot be asked.
        """

    async def agree(self, node: NodeId, attempt: Signed) -> Signed:
        """Ask a voter; return what it is bound to now.

        Raises:
            GpuLayerError: it cannot be asked, refuses, or has not ended the attempt before.
        """

    async def bound(self, node: NodeId, ident: str) -> Signed | None:
        """Return what a voter is bound to as the attempt of this id.

        Raises:
            EndedError: it knows that the job has ended with the one before.
            GpuLayerError: it cannot be asked.
        """

    async def prepare(self, attempt: Signed, ran: Signed) -> Order:
        """Bring a reserved attempt, with what `ran` has left, to where it can go."""

    async def hold(self, node: NodeId, attempt: Signed) -> None:
        """Have a witness count an attempt as running for a while.

        Raises:
            GpuLayerError: it cannot be asked, or agreed to a later attempt.
        """

    async def go(self, attempt: Signed, order: Order) -> None: ...

    async def record(self, node: NodeId, job: str) -> JobRecord:
        """Return a node's word on a job.

        Raises:
            NotFoundError: it knows no such job. TransportError: it cannot be asked.
        """


class Succession(Generic[Order]):
    """What follows one attempt that has failed.

    Args:
        ran: that attempt.
        seconds: for all of it; default: what the job has.
        say: told why it cannot start yet.
    """

    def __init__(
        self,
        ground: Ground[Order],
        ran: Signed,
        *,
        seconds: float | None = None,
        say: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._ground = ground
        self._ran = ran
        self._loop = asyncio.get_running_loop()
        patience_s = restarts.patience_s(ran.spec) if seconds is None else seconds
        self._until = self._loop.time() + patience_s
        self._say = say
        self._problem = ""
        self._tries = 0

    async def run(self) -> str:
        """Start the next attempt, or find that another node has; return its id.

        Raises:
            KeeperBackError: there is no need to.
            NotRestartedError: says why.
        """
        try:
            return await self._run()
        finally:
            await asyncio.shield(self._ground.leave())

    async def _run(self) -> str:
        before = self._ran
        while before.spec.restart < before.spec.restarts:
            try:
                decided = await self._decide(before)
            except KeeperBackError:
                if before is self._ran:
                    raise
                return before.spec.id
            if await self._runs(decided):
                return decided.spec.id
            log.warning("job %s did not start: %s", decided.spec.id, self._problem)
            before = decided
        used = f"all {before.spec.restarts} restarts are used"
        raise NotRestartedError(f"{used}; {self._problem}" if self._problem else used)

    async def _decide(self, before: Signed) -> Signed:
        """Come to an attempt that most voters agreed to; ours is started, or has failed to."""
        avoid: set[NodeId] = set()
        cut: set[Pair] = set()
        mine: Signed | None = None  # once it was proposed, there is no other
        had = 0.0  # when its nodes were
        pause_s = RETRY_S
        while True:
            known = await self._votes(before, None)
            found = known.decided
            if found is not None and (mine is None or found.chain != mine.chain):
                return found  # another's
            if known.split:
                raise NotRestartedError("its voters agreed to different attempts")
            try:
                if found is None:
                    self._may_propose(before, known)
                plan = mine or self._plan(before, avoid, cut)
                if mine is None and (silent := await self._silent(plan, avoid)):
                    avoid |= silent
                    continue
                await self._ground.reserve(plan)
                if mine is None:
                    await self._meet(plan)
                mine, had = plan, self._loop.time()
                if (decided := await self._propose(before, mine)) is not None:
                    return decided
            except NotRestartedError:
                raise
            except GpuLayerError as error:  # a node may come back, or get free
                if isinstance(error, PathsCutError) and not cut.issuperset(error.pairs):
                    cut.update(error.pairs)
                    log.info("job %s: its next attempt goes elsewhere: %s", before.spec.id, error)
                    continue
                self._problem = error.message
                avoid.clear()
                cut.clear()
                if found is not None:
                    return found  # ours, which is decided and cannot be had any more
                stuck = mine is not None and self._loop.time() - had >= STUCK_S
                # Once it is decided, the next number can do without the node that is missing.
                if stuck and (decided := (await self._votes(before, mine)).decided) is not None:
                    return decided
                if isinstance(error, PlacementBusyError):
                    await self._ground.stand(before)
            if self._loop.time() >= self._until:
                raise NotRestartedError(self._problem)
            self._say(self._problem)
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_MAX_S, pause_s * 1.1)

    def _may_propose(self, before: Signed, known: _Votes) -> None:
        """Raise unless it can come to anything: what is reserved, others cannot have."""
        if self._ground.keeper_speaks(before):
            raise KeeperBackError()
        if known.answered < known.majority:
            raise GpuLayerError(known.missing(known.majority - known.answered))

    async def _propose(self, before: Signed, mine: Signed) -> Signed | None:
        """Have a reserved attempt agreed to and start it; return what is decided."""
        try:
            votes = await self._votes(before, mine)
        except (asyncio.CancelledError, NotRestartedError):
            await asyncio.shield(self._ground.release(mine))
            raise
        decided = votes.decided
        if decided is not None and decided.chain == mine.chain:
            await self._start(mine)
            return mine
        self._problem = votes.missing(votes.majority - votes.votes[mine.chain])
        await self._ground.release(mine)
        return decided

    async def _meet(self, plan: Signed) -> None:
        """Try the paths before anybody agrees: what was agreed to cannot go elsewhere any more."""
        try:
            await self._ground.meet(plan)
        except BaseException:
            await asyncio.shield(self._ground.release(plan))
            raise

    def _plan(self, before: Signed, avoid: Collection[NodeId], cut: Collection[Pair]) -> Signed:
        snapshot = self._ground.snapshot()
        slots = restarts.replan(before.spec, snapshot, avoid, cut)
        voters = restarts.choose_voters(slots, snapshot, avoid, before.spec.voters)
        self._tries += 1
        change = restarts.Change(before.spec.restart + 1, slots, voters, self._tries)
        return self._ground.sign(before, change)

    async def _silent(self, plan: Signed, known: Collection[NodeId]) -> set[NodeId]:
        """Return who does not answer of those that are needed, besides the known ones."""
        alive = {m.node for m in self._ground.snapshot().members if m.state is NodeState.ALIVE}
        slots = [slot.node for slot in plan.spec.slots]
        nodes = [n for n in plan.spec.voters if n not in known and (n in slots or n in alive)]
        answers = await asyncio.gather(*map(self._ground.answers, nodes))
        return {node for node, answer in zip(nodes, answers, strict=True) if not answer}

    async def _votes(self, before: Signed, mine: Signed | None) -> _Votes:
        """Ask all voters: what they are bound to, or to agree to our proposal.

        Does not wait for all: one of them was lost.

        Raises:
            EndedError: none is decided, and one of them knows that the job has ended.
        """
        voters = before.spec.voters
        votes = _Votes(Counter(), {}, 0, len(voters), [])
        ident = restarts.attempt_id(restarts.origin_of(before.spec), before.spec.restart + 1)

        async def ask(node: NodeId) -> Signed | None:
            if mine is None:
                return await self._ground.bound(node, ident)
            return await self._ground.agree(node, mine)

        def count(answer: asyncio.Task[Signed | None]) -> EndedError | None:
            try:
                bound = answer.result()
            except EndedError as error:
                return error
            except GpuLayerError as error:
                votes.problems.append(error.message)
                return None
            votes.answered += 1
            if bound is not None:
                votes.chains[bound.chain] = bound
                votes.votes[bound.chain] += 1
            return None

        ended: list[EndedError] = []
        asking = [asyncio.ensure_future(ask(node)) for node in voters]
        try:
            while asking and votes.decided is None:
                most_did = len(voters) - len(asking) >= votes.majority
                done, asking = await _next(asking, OTHERS_S if most_did else None)
                ended += [error for error in map(count, done) if error is not None]
                if not done:
                    break
        finally:
            for task in asking:
                task.cancel()
        if ended and votes.decided is None:
            raise ended[0]
        return votes

    async def _start(self, mine: Signed) -> None:
        ticking = asyncio.create_task(self._tick())
        try:
            order = await self._ground.prepare(mine, self._ran)
            if not await self._is_held(mine):
                self._problem = "its witnesses do not answer"
                return
            await self._ground.go(mine, order)
        except GpuLayerError as error:
            self._problem = error.message
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        """Show that somebody is at it, for files may take long."""
        while True:
            await asyncio.sleep(TICK_S)
            self._say("its files are being brought to its machines")

    async def _is_held(self, mine: Signed) -> bool:
        """Have enough witnesses count it as running; gives the nodes back if too few do."""
        spec = mine.spec
        if spec.restart == spec.restarts:  # nothing follows the last
            return True
        held = len(spec.slots)
        asking = [asyncio.ensure_future(self._held(n, mine)) for n in restarts.witnesses(spec)]
        try:
            while asking and held < restarts.majority(spec.voters):
                done, asking = await _next(asking, None)
                held += sum(task.result() for task in done)
        except asyncio.CancelledError:
            await asyncio.shield(self._ground.release(mine))
            raise
        finally:
            for task in asking:
                task.cancel()
        if held >= restarts.majority(spec.voters):
            return True
        await self._ground.release(mine)
        return False

    async def _held(self, node: NodeId, mine: Signed) -> bool:
        try:
            await self._ground.hold(node, mine)
        except GpuLayerError:
            return False
        return True

    async def _runs(self, attempt: Signed) -> bool:
        """Return whether a decided attempt has begun; its own voters protect it if not seen."""
        until = self._loop.time() + SHOW_S
        nodes = [slot.node for slot in attempt.spec.slots]
        while True:
            seen = await asyncio.gather(*(self._seen(node, attempt.spec.id) for node in nodes))
            if _Seen.BEGUN in seen:
                return True
            # Its keeper alone gets the order to go: where that one knows nothing, nothing comes.
            if seen[0] is _Seen.NOTHING or self._loop.time() >= min(until, self._until):
                return False
            if seen[0] is _Seen.COMING:  # large files take their time; its lease tells of an end
                until = self._loop.time() + SHOW_S
            self._say(f"job {attempt.spec.id} is about to start")
            await asyncio.sleep(RETRY_S)

    async def _seen(self, node: NodeId, job: str) -> _Seen:
        try:
            record = await self._ground.record(node, job)
        except NotFoundError:
            return _Seen.NOTHING
        except GpuLayerError:
            return _Seen.SILENCE
        if restarts.has_begun(record):
            return _Seen.BEGUN
        return _Seen.NOTHING if record.state is JobState.CANCELLED else _Seen.COMING


async def _next(
    tasks: list[asyncio.Task[T]], timeout_s: float | None
) -> tuple[list[asyncio.Task[T]], list[asyncio.Task[T]]]:
    """Wait for some of these; return those done and the others, in their order."""
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return [task for task in tasks if task in done], [task for task in tasks if task not in done]


async def stand_in(
    ground: Ground[Any],
    ran: Signed,
    *,
    after_s: float,
    succeed: Callable[[float], Awaitable[str]],
) -> JobRecord | str:
    """See to the next attempt in the keeper's place, unless a voter before this one does.

    Args:
        after_s: until no rank of the attempt can be left where nobody answers.
        succeed: starts it here, in the seconds given.

    Returns:
        The next attempt's id, or the final record that another voter has.

    Raises:
        KeeperBackError: none is needed.
        NotRestartedError: there will be none.
    """
    loop = asyncio.get_running_loop()
    voters = ran.spec.voters
    place = voters.index(ground.node)
    earlier = voters[:place]
    # Witnesses miss the keeper all at once: the one before this one has begun by then.
    after_s += STAGGER_S * max(0, place - len(ran.spec.slots))
    begins = loop.time() + after_s
    until = begins + restarts.patience_s(ran.spec)

    async def word(node: NodeId) -> JobRecord | None:
        try:
            return await ground.record(node, ran.spec.id)
        except GpuLayerError:
            return None

    pause_s = after_s - ASK_S
    while earlier and loop.time() < until:  # at once, for we may have been away for long
        records = [one for one in await asyncio.gather(*map(word, earlier)) if one is not None]
        for record in records:
            if record.ended_age_s is not None and record.state is not JobState.RESTARTING:
                return record.successor or record
        if not records and loop.time() >= begins - ASK_S:
            break
        await asyncio.sleep(max(pause_s, RETRY_S))
        pause_s = RETRY_S
    await asyncio.sleep(begins - loop.time())
    left = until - loop.time()
    if left <= 0:
        raise NotRestartedError("another machine was to do it, and has not")
    try:
        return await succeed(left)
    except EndedError:
        for final in await asyncio.gather(*map(word, voters)):
            if final is not None and final.state in OVER:
                return final
        raise
