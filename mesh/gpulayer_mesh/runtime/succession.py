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
from gpulayer_mesh.core.types import NodeId, Snapshot
from gpulayer_mesh.errors import GpuLayerError, NotAllowedError, NotFoundError
from gpulayer_mesh.runtime.livejob import Signed

log = logging.getLogger("gpulayer.restarts")

Order = TypeVar("Order")

FREE_S = 240.0  # for a free node; a machine that starts again takes a minute or three
RETRY_S = 1.0
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


@dataclass(frozen=True, slots=True)
class _Votes:
    """What the voters of an attempt are bound to."""

    votes: Counter[bytes]  # chain -> voters bound to it
    chains: dict[bytes, Signed]

    def decided(self, before: Signed) -> Signed | None:
        """Return the attempt that most are bound to."""
        for chain, votes in self.votes.items():
            if votes >= restarts.majority(before.spec.voters):
                return self.chains[chain]
        return None


class Ground(Protocol[Order]):
    """One node and its means."""

    node: NodeId

    def snapshot(self) -> Snapshot:
        """Return what this node believes of the mesh."""

    def sign(self, before: Signed, change: restarts.Change) -> Signed: ...

    async def answers(self, node: NodeId) -> bool:
        """Return whether a node can be reached."""

    async def reserve(self, attempt: Signed) -> None: ...

    async def release(self, attempt: Signed) -> None: ...

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
        seconds: for all of it.
        say: told why it cannot start yet.
    """

    def __init__(
        self,
        ground: Ground[Order],
        ran: Signed,
        *,
        seconds: float,
        say: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._ground = ground
        self._ran = ran
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + seconds
        self._say = say
        self._problem = ""
        self._tries = 0

    async def run(self) -> str:
        """Start the next attempt, or find that another node has; return its id.

        Raises:
            NotRestartedError: says why.
        """
        before = self._ran
        while before.spec.restart < before.spec.restarts:
            decided = await self._decide(before)
            if await self._runs(decided):
                return decided.spec.id
            log.warning("job %s did not start: %s", decided.spec.id, self._problem)
            before = decided
        used = f"all {before.spec.restarts} restarts are used"
        raise NotRestartedError(f"{used}; {self._problem}" if self._problem else used)

    async def _decide(self, before: Signed) -> Signed:
        """Come to an attempt that most voters agreed to; ours is started, or has failed to."""
        until = min(self._until, self._loop.time() + FREE_S)
        avoid: set[NodeId] = set()
        mine: Signed | None = None  # once it was proposed, there is no other
        while True:
            found = (await self._votes(before, None)).decided(before)
            if found is not None and (mine is None or found.chain != mine.chain):
                return found  # another's
            try:
                plan = mine or self._plan(before, avoid)
                if mine is None and (silent := await self._silent(plan)):
                    avoid |= silent
                    continue
                await self._ground.reserve(plan)
                mine = plan
                try:
                    decided = (await self._votes(before, mine)).decided(before)
                except asyncio.CancelledError:
                    await asyncio.shield(self._ground.release(mine))
                    raise
                if decided is not None and decided.chain == mine.chain:
                    await self._start(mine)
                    return mine
                await self._ground.release(mine)
                if decided is not None:
                    return decided
            except GpuLayerError as error:  # a node may come back, or get free
                self._problem = error.message
                avoid.clear()
                if found is not None:
                    return found  # ours, which is decided and cannot be had any more
            if self._loop.time() >= until:
                raise NotRestartedError(self._problem)
            self._say(self._problem)
            await asyncio.sleep(RETRY_S)

    def _plan(self, before: Signed, avoid: Collection[NodeId]) -> Signed:
        snapshot = self._ground.snapshot()
        slots = restarts.replan(before.spec, snapshot, avoid)
        voters = restarts.choose_voters(slots, snapshot, avoid)
        self._tries += 1
        change = restarts.Change(before.spec.restart + 1, slots, voters, self._tries)
        return self._ground.sign(before, change)

    async def _silent(self, plan: Signed) -> set[NodeId]:
        nodes = plan.spec.voters
        answers = await asyncio.gather(*map(self._ground.answers, nodes))
        return {node for node, answer in zip(nodes, answers, strict=True) if not answer}

    async def _votes(self, before: Signed, mine: Signed | None) -> _Votes:
        """Ask all voters: what they are bound to, or to agree to our proposal.

        Does not wait for all: one of them was lost.

        Raises:
            EndedError: none is decided, and one of them knows that the job has ended.
        """
        problems: list[str] = []
        ended: list[EndedError] = []
        ident = restarts.attempt_id(restarts.origin_of(before.spec), before.spec.restart + 1)

        async def ask(node: NodeId) -> Signed | None:
            try:
                if mine is None:
                    return await self._ground.bound(node, ident)
                return await self._ground.agree(node, mine)
            except EndedError as error:
                ended.append(error)
                return None
            except GpuLayerError as error:
                problems.append(error.message)
                return None

        voters, most = before.spec.voters, restarts.majority(before.spec.voters)
        found: dict[bytes, Signed] = {}
        votes: Counter[bytes] = Counter()
        asking = {asyncio.ensure_future(ask(node)) for node in voters}
        try:
            while asking:
                most_did = len(voters) - len(asking) >= most
                done, asking = await asyncio.wait(
                    asking,
                    timeout=OTHERS_S if most_did else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for answer in (task.result() for task in done):
                    if answer is not None:
                        found[answer.chain] = answer
                        votes[answer.chain] += 1
                if not done or max(votes.values(), default=0) >= most:
                    break
        finally:
            for task in asking:
                task.cancel()
        if ended and max(votes.values(), default=0) < most:
            raise ended[0]
        if mine is not None:
            missing = most - votes[mine.chain]
            why = f" ({problems[0][:200]})" if problems else ""
            self._problem = f"{missing} more of its {len(voters)} voters would have to agree{why}"
        return _Votes(votes, found)

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
        """Have the witnesses count it as running; gives the nodes back if too few can be asked."""
        spec = mine.spec
        try:
            watching = restarts.witnesses(spec)
            holding = await asyncio.gather(*(self._held(node, mine) for node in watching))
            enough = len(spec.slots) + sum(holding) >= restarts.majority(spec.voters)
            if enough or spec.restart == spec.restarts:  # nothing follows the last
                return True
        except asyncio.CancelledError:
            await asyncio.shield(self._ground.release(mine))
            raise
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


async def stand_in(
    ground: Ground[Any],
    ran: Signed,
    *,
    after_s: float,
    seconds: float,
    succeed: Callable[[float], Awaitable[str]],
) -> JobRecord | str:
    """See to the next attempt in the keeper's place, unless a voter before this one does.

    Args:
        after_s: until no rank of the attempt can be left where nobody answers.
        succeed: starts it here, in the seconds given.

    Returns:
        The next attempt's id, or the final record that another voter has.

    Raises:
        NotRestartedError: there will be none.
    """
    loop = asyncio.get_running_loop()
    voters = ran.spec.voters
    place = voters.index(ground.node)
    earlier = voters[:place]
    # A witness has no word on the job; the one before this one has begun by then.
    after_s += STAGGER_S * max(0, place - len(ran.spec.slots))
    begins = loop.time() + after_s
    until = begins + seconds
    await asyncio.sleep(after_s - ASK_S)

    async def word(node: NodeId) -> JobRecord | None:
        try:
            return await ground.record(node, ran.spec.id)
        except GpuLayerError:
            return None

    while earlier and loop.time() < until:
        records = [one for one in await asyncio.gather(*map(word, earlier)) if one is not None]
        for record in records:
            if record.ended_age_s is not None and record.state is not JobState.RESTARTING:
                return record.successor or record
        if not records:
            break
        await asyncio.sleep(RETRY_S)
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
