"""Who goes first among jobs that wait: a queue over many nodes without a server or a clock.

Rules. A job that has to wait takes a number above every number that its candidates (all nodes that
could ever take part in it) know, and registers it on each of them: Lamport's bakery. The order is
(number, job id), equal on every node. A node grants nothing to a job while an older ticket stands
here, not even what that one would leave over: nobody is overtaken, so nobody starves. The oldest
ticket of all is first wherever it stands, so something can always go on. A launcher that asks after
another has registered gets a higher number and goes later; two that ask at once may get one
number, and their job ids decide.

A job that failed and is to be restarted had its turn: its next attempt goes before everything that
waits, with a ticket of its own number that the nodes give it themselves.

A ticket stands for TICKET_S after its launcher renewed it last. One that was dropped or stopped is
remembered for as long, so that a late copy of a renewal cannot bring it back.

This module does not know which nodes a job could use (`placement`), what a node has to give
(`lease`), nor who may register for whom: the shell has checked that. Time is `now`, monotonic
seconds. Cost: each call walks the node's tickets, at most TICKETS_MAX.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from gpulayer_mesh.core.jobspec import JobId
from gpulayer_mesh.core.types import Grant, Name, NodeId, Text
from gpulayer_mesh.errors import PlacementBusyError, Refusal, RemoteProtocolError

TICKET_S = 30.0  # as long as a reservation's lease: one bound for all that a dead launcher holds
TICKETS_MAX = 256  # of one node; bounds an answer with all of them to 256 KiB
TICKETS_PER_MEMBER = 64  # so that one launcher's loop leaves room for the others
RESTART = 0  # the number of next attempts
NUMBER_MAX = 2**53  # exact in every JSON reader; who gets it twice is ordered by job id


@dataclass(frozen=True, slots=True)
class Ticket:
    """One job's place in the queue, the same on all its candidates."""

    number: Annotated[int, Meta(ge=RESTART, le=NUMBER_MAX)]
    job: JobId
    submitter: NodeId
    submitter_name: Name
    name: Text  # what tables call the job
    needs: Text  # "3 nodes with 2 devices each"
    why: Text = ""  # what it waits for, in its launcher's words

    @property
    def order(self) -> tuple[int, str]:
        """Lower goes first."""
        return self.number, self.job

    @property
    def owner(self) -> str:
        return f"job {self.job} from {self.submitter_name}"


@dataclass(frozen=True, slots=True)
class Standing:
    """A node's answer to one who registers or renews."""

    ahead: Annotated[tuple[Ticket, ...], Meta(max_length=TICKETS_MAX)] = ()  # older ones, in order
    grants: Annotated[tuple[Grant, ...], Meta(max_length=256)] = ()  # fresher than gossip's
    stopped: Text = ""  # by whom, while it waited


class Tickets:
    """The tickets that stand on one node."""

    def __init__(self, node: str) -> None:
        self._node = node  # its name, for messages
        self._live: dict[str, Ticket] = {}
        self._until: dict[str, float] = {}
        # (job, submitter) -> until when; stopped by whom, or "". The submitter is part of the key
        # so that nobody can keep another's job out.
        self._gone: dict[tuple[str, NodeId], tuple[float, str]] = {}

    def take(self, now: float, ticket: Ticket) -> Standing:
        """Register a ticket or renew it; say who goes before it.

        Raises:
            PlacementBusyError: too many wait here.
            RemoteProtocolError: the job already waits with another number, or for another member.
        """
        self._expire(now)
        gone = self._gone.get((ticket.job, ticket.submitter))
        if gone is not None:
            return Standing(stopped=gone[1])
        known = self._live.get(ticket.job)
        if known is not None and (known.number, known.submitter) != (
            ticket.number,
            ticket.submitter,
        ):
            raise RemoteProtocolError(f"job {ticket.job} waits with another ticket already")
        if known is None:
            same = sum(other.submitter == ticket.submitter for other in self._live.values())
            if len(self._live) >= TICKETS_MAX or same >= TICKETS_PER_MEMBER:
                reason = f"has {len(self._live)} jobs waiting, {same} of this launcher"
                raise PlacementBusyError(
                    f"{self._node} {reason}", refusals=(Refusal(self._node, reason, False),)
                )
        self._live[ticket.job] = ticket
        self._until[ticket.job] = now + TICKET_S
        return Standing(self._older(ticket.order))

    def admit(self, now: float, job: str, submitter: NodeId, *, number: int | None = None) -> None:
        """Return if it is this job's turn here; one that never waited comes after all who do.

        Args:
            number: of a job that needs no ticket.

        Raises:
            PlacementBusyError: an older ticket stands here, or the job was stopped as it waited.
        """
        self._expire(now)
        stopped = self._gone.get((job, submitter), (0.0, ""))[1]
        mine = self._live.get(job)
        order = mine.order if mine is not None and mine.submitter == submitter else None
        order = order if number is None else (number, job)
        older = self._older(order)
        if older or stopped:
            reason = f"stopped by {stopped}" if stopped else kept_for(older[0])
            raise PlacementBusyError(
                f"{self._node} {reason}", refusals=(Refusal(self._node, reason, False),)
            )

    def find(self, now: float, job: str) -> Ticket | None:
        self._expire(now)
        return self._live.get(job)

    def drop(self, now: float, job: str, submitter: NodeId, *, stopped_by: str = "") -> None:
        """Take a member's ticket out: its job has what it waited for, or nobody wants it.

        It need not stand here yet: its registration may be on its way.
        """
        self._expire(now)
        known = self._live.get(job)
        if known is not None and known.submitter == submitter:
            del self._live[job], self._until[job]
        key = (job, submitter)
        before = self._gone.pop(key, (0.0, ""))[1]  # popped: the newest stands last
        self._gone[key] = (now + TICKET_S, before or stopped_by)
        while len(self._gone) > TICKETS_MAX:
            del self._gone[next(iter(self._gone))]

    def keep(self, launchers: Collection[NodeId]) -> None:
        """Forget the tickets of everybody else."""
        for job, ticket in list(self._live.items()):
            if ticket.submitter not in launchers:
                del self._live[job], self._until[job]

    def all(self, now: float) -> tuple[Ticket, ...]:
        """Return what stands here, in order."""
        self._expire(now)
        return self._older(None)

    def next_timeout(self) -> float | None:
        """Return when a ticket runs out, unless it is renewed."""
        return min(self._until.values(), default=None)

    def adopt(self, now: float, tickets: Iterable[Ticket]) -> None:
        """Take over what stood here when an earlier agent ended; their launchers renew them.

        Next attempts register anew: this node may have been away until after they ran.
        """
        standing = [ticket for ticket in tickets if ticket.number != RESTART]
        for ticket in standing[:TICKETS_MAX]:
            self._live[ticket.job] = ticket
            self._until[ticket.job] = now + TICKET_S

    def check(self) -> None:
        """Raise if an invariant is broken."""
        assert self._live.keys() == self._until.keys()
        assert all((job, one.submitter) not in self._gone for job, one in self._live.items())
        assert len(self._live) <= TICKETS_MAX
        assert len(self._gone) <= TICKETS_MAX

    def _older(self, order: tuple[int, str] | None) -> tuple[Ticket, ...]:
        found = [t for t in self._live.values() if order is None or t.order < order]
        return tuple(sorted(found, key=lambda ticket: ticket.order))

    def _expire(self, now: float) -> None:
        for job in [job for job, until in self._until.items() if until <= now]:
            del self._live[job], self._until[job]
        for key in [key for key, (until, _) in self._gone.items() if until <= now]:
            del self._gone[key]


def next_number(known: Iterable[Ticket]) -> int:
    """Return the number of one who comes after all of these."""
    return min(NUMBER_MAX, max((ticket.number for ticket in known), default=0) + 1)


def position(standings: Iterable[Standing]) -> int:
    """Return a job's place, 1 for the first, from what all its nodes answered."""
    return 1 + len({ticket.job for one in standings for ticket in one.ahead})


def positions(queues: Iterable[Iterable[Ticket]]) -> dict[str, int]:
    """Return the place of each job, from all tickets of each node."""
    ahead: dict[str, set[str]] = {}
    for queue in queues:
        before: set[str] = set()
        for ticket in sorted(queue, key=lambda ticket: ticket.order):
            ahead.setdefault(ticket.job, set()).update(before)
            before.add(ticket.job)
    return {job: 1 + len(older) for job, older in ahead.items()}


def kept_for(ticket: Ticket) -> str:
    """Say, as a clause behind the names of nodes, why they take nothing else."""
    if ticket.number == RESTART:
        return f"kept for {ticket.why}"
    return f"kept for {ticket.owner}, which came first"
