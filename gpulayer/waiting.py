"""A job's turn: from a plan that cannot be had yet to a reservation, in the order of the queue.

A job that finds its nodes free takes them at once. One that does not takes a ticket and waits; the
rules are in `gpulayer_mesh.core.tickets`. Every second it asks all its candidates how it stands,
which renews its tickets and tells what they run, and tries again with what is new. Whatever ends
the waiting takes the tickets back.

This module does not know what a job is or how it is reserved (`reserve` does), nor how a line is
printed. Time is the event loop's, so that a simulation can run it in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol, TypeVar

from gpulayer_mesh.core import placement, tickets
from gpulayer_mesh.core.tickets import Standing, Ticket
from gpulayer_mesh.core.types import NodeId, Snapshot
from gpulayer_mesh.errors import (
    DiscoveryError,
    GpuLayerError,
    NotAllowedError,
    PlacementBusyError,
    StoppedError,
    TransportError,
)

POLL_S = 1.0  # how late a job notices that its turn has come; 30 polls fit one ticket's life
# A node that is suspect is dead or alive within 24 s, one that tests its torch knows in less than
# two minutes: whoever cannot tell after that whether the job can ever run, will not know later.
UNSURE_S = 120.0
GROUPS = 3  # reasons in one line; `gpulayer mesh status` has the rest
ASKS = 3  # 9 s at most; longer would only keep those out who could have their turn
CALLS = 64  # nodes asked at once
LEAVE_S = 3.0  # for taking tickets back; a node that is silent for longer forgets them by itself
_AGE = re.compile(r"no answer for \d+ s")  # changes each second, and says nothing new

T = TypeVar("T")


class Mesh(Protocol):
    """What is asked of `MeshClient` here."""

    async def snapshot(self) -> Snapshot: ...
    async def find_again(self) -> None: ...
    async def tickets(self, node: NodeId) -> list[Ticket]: ...
    async def stand(self, node: NodeId, ticket: Ticket) -> Standing: ...
    async def drop_ticket(self, node: NodeId, job: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Applicant:
    """Whose turn it is that is waited for."""

    job: str
    submitter: NodeId
    submitter_name: str
    name: str  # what tables call the job


async def in_turn(
    mesh: Mesh,
    request: placement.Request,
    who: Applicant,
    *,
    wait_s: float | None,
    without: Mapping[NodeId, str] | None = None,
    reserve: Callable[[placement.Plan, int], Awaitable[T]],
    say: Callable[[str], None],
) -> T:
    """Plan and reserve as soon as it is this job's turn; return what `reserve` returned.

    Args:
        wait_s: for how long it may wait; 0: not at all, None: as long as it takes.
        without: nodes that are of no use to it now, and why.
        reserve: takes all of a plan or nothing; its second argument counts the tries. Raises
            PlacementBusyError where somebody else was faster.
        say: told why the job waits, whenever that has changed.

    Raises:
        PlacementError: it can never be placed.
        PlacementBusyError: not within `wait_s`.
        StoppedError: somebody stopped it meanwhile.
    """
    clock = asyncio.get_running_loop().time
    line = _Line(mesh, who, placement.needs(request), without or {})
    snapshot = await mesh.snapshot()
    started = sure = clock()
    attempt, said = 0, ""
    try:
        while True:
            try:
                plan = placement.plan(request, line.fresh(snapshot), line.kept())
                attempt += 1
                return await reserve(plan, attempt - 1)
            except PlacementBusyError as e:
                busy = e
            except TransportError as e:
                if not line.waits:  # the plan named a node that this machine cannot reach
                    raise
                busy = PlacementBusyError(e.message)
            waited_s = clock() - started
            if wait_s is not None and waited_s >= wait_s:
                raise _gave_up(busy, waited_s)
            candidates = placement.candidates(request, line.fresh(snapshot), line.kept())
            if candidates and line.number:
                sure = clock()
            elif clock() - sure >= UNSURE_S:
                raise busy
            first = not line.waits
            if not first:
                place = f"queued #{line.position}: " if line.number else "waiting: "
                text = f"{place}needs {line.needs}; {reasons(busy)}"
                if _AGE.sub("", text) != said:
                    said = _AGE.sub("", text)
                    say(text)
                pause_s = POLL_S if wait_s is None else min(POLL_S, wait_s - waited_s)
                await asyncio.sleep(pause_s)
                with contextlib.suppress(TransportError, DiscoveryError):
                    snapshot = await _look(mesh)  # the nodes' own answers count more
            await line.stand(candidates, why=reasons(busy))
    finally:
        if line.waits:
            await asyncio.shield(line.leave())


@dataclass(slots=True)
class _Line:
    """Our tickets, and what the nodes last said to them."""

    mesh: Mesh
    who: Applicant
    needs: str
    without: Mapping[NodeId, str]  # nodes that are of no use, and why
    waits: bool = False
    number: int = 0
    standings: dict[NodeId, Standing] = field(default_factory=dict)
    silent: dict[NodeId, str] = field(default_factory=dict)  # and what is wrong with them
    registered: set[NodeId] = field(default_factory=set)

    @property
    def position(self) -> int:
        return tickets.position(self.standings.values())

    def fresh(self, snapshot: Snapshot) -> Snapshot:
        """Put what the nodes themselves said they run in place of what gossip had."""
        members = []
        for member in snapshot.members:
            standing = self.standings.get(member.node)
            grants = member.grants if standing is None else standing.grants
            if member.node in self.silent:
                grants = ()  # nobody knows; that it is silent stands in `kept`
            # What a try of our own left there, the next one replaces; one of somebody who waits as
            # we do is no job that runs, and stands in `kept`.
            ahead = standing.ahead if standing is not None else ()
            waits = {self.who.job, *(ticket.job for ticket in ahead)}
            grants = tuple(grant for grant in grants if grant.job not in waits)
            members.append(replace(member, grants=grants))
        return replace(snapshot, members=tuple(members))

    def kept(self) -> dict[NodeId, str]:
        """Return the nodes that are not for us yet, and why."""
        found = {
            node: tickets.kept_for(standing.ahead[0])
            for node, standing in self.standings.items()
            if standing.ahead
        }
        return {**found, **self.silent, **self.without}

    async def stand(self, nodes: Sequence[NodeId], *, why: str) -> None:
        """Register with these nodes, or renew, and keep their answers.

        Raises:
            StoppedError: one of them knows that the job was stopped.
            NotAllowedError: they all say so.
        """
        if nodes and not self.number:
            self.number = await self._take_number(nodes)
        self.waits = True
        if not self.number:  # too few nodes could take part as far as known, or all are silent
            self.silent = dict.fromkeys(nodes, "does not answer")
            return
        ticket = Ticket(
            self.number,
            self.who.job,
            self.who.submitter,
            self.who.submitter_name,
            self.who.name,
            self.needs,
            why[:256],
        )
        self.registered.update(nodes)  # before they are asked: an answer may be lost
        answers = await _ask(nodes, lambda node: self.mesh.stand(node, ticket))
        self.standings = {n: one for n, one in answers.items() if isinstance(one, Standing)}
        errors = {n: one for n, one in answers.items() if isinstance(one, GpuLayerError)}
        _raise_if_not_allowed(answers.values())
        self.silent = {
            node: "does not answer" if isinstance(one, TransportError) else f"says: {one.message}"
            for node, one in errors.items()
        }
        for standing in self.standings.values():
            if standing.stopped:
                raise StoppedError(f"stopped by {standing.stopped} while it was queued")

    async def _take_number(self, nodes: Sequence[NodeId]) -> int:
        """Return a number above all that these nodes know, 0 if they say nothing.

        Who stands on a node that says nothing may have a higher one and be overtaken there, so it
        is asked more than once.
        """
        heard: list[list[Ticket]] = []
        for _ in range(ASKS):
            answers = await _ask(nodes, self.mesh.tickets)
            _raise_if_not_allowed(answers.values())
            heard += [one for one in answers.values() if isinstance(one, list)]
            nodes = [n for n, one in answers.items() if isinstance(one, TransportError)]
            if not nodes:
                break
        return tickets.next_number(chain(*heard)) if heard else 0

    async def leave(self) -> None:
        """Take all tickets back."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await _ask(
                    sorted(self.registered),
                    lambda node: self.mesh.drop_ticket(node, self.who.job),
                )


def _raise_if_not_allowed(answers: Collection[object]) -> None:
    """Raise what all nodes say; one alone may only know an older roster."""
    refusals = [one for one in answers if isinstance(one, NotAllowedError)]
    if refusals and len(refusals) == len(answers):
        raise refusals[0]


def reasons(busy: PlacementBusyError) -> str:
    """Say in one line what a request waits for, nodes with one reason together."""
    groups: dict[str, list[str]] = {}
    for refusal in busy.refusals:
        if not refusal.for_ever:
            groups.setdefault(refusal.reason, []).append(refusal.node)
    if not groups:
        return busy.message
    clauses = [f"{', '.join(nodes)} {reason}" for reason, nodes in groups.items()]
    more = f"; and {len(clauses) - GROUPS} more" if len(clauses) > GROUPS else ""
    return "; ".join(clauses[:GROUPS]) + more


def _gave_up(busy: PlacementBusyError, waited_s: float) -> PlacementBusyError:
    what = f"gave up after {waited_s:.0f} s" if waited_s else "it would have to wait"
    return PlacementBusyError(
        f"{busy.message}; {what}",
        refusals=busy.refusals,
        counted=busy.counted,
        versions=busy.versions,
        hint=busy.hint,
    )


async def _look(mesh: Mesh) -> Snapshot:
    try:
        return await mesh.snapshot()
    except TransportError:
        await mesh.find_again()
        return await mesh.snapshot()


async def _ask(
    nodes: Sequence[NodeId], call: Callable[[NodeId], Awaitable[T]]
) -> dict[NodeId, T | GpuLayerError]:
    """Ask all at once; what went wrong stands in the answer's place."""
    gate = asyncio.Semaphore(CALLS)

    async def one(node: NodeId) -> T | GpuLayerError:
        async with gate:
            try:
                return await call(node)
            except GpuLayerError as e:
                return e

    answers = await asyncio.gather(*map(one, nodes))
    return dict(zip(nodes, answers, strict=True))
