"""Restarts: who may start a job's next attempt, what that attempt is, and where it goes.

Rules. An attempt is a job of its own: same program, source, shape and submitter, other nodes where
some are lost, the next number. Its id follows from the first attempt's and its number. It is signed
by a voter of the attempt before it, and only started once most of those voters have agreed: each
agrees to one, once and for ever, so two that think themselves alone cannot both start it. Voters
are the nodes of the job, and where these are fewer than three, others that watch it. An attempt
takes the processes of a lost node to another one, and leaves the others where they were. Of two
nodes that were found not to reach each other it takes one at most.

Signatures form a chain: the submitter signs the first attempt, a voter each further `Change`.
This module does not know how nodes are asked, or what an attempt finds of the one before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from gpulayer_mesh.core import placement
from gpulayer_mesh.core.jobspec import (
    JOB_ID_ALPHABET,
    JOB_ID_CHARS,
    RESTARTS_MAX,
    VOTERS_MAX,
    JobKind,
    JobRecord,
    JobSpec,
    JobState,
    Slot,
)
from gpulayer_mesh.core.paths import Pair, cut_from, ways_apart
from gpulayer_mesh.core.tickets import RESTART, Ticket
from gpulayer_mesh.core.types import NodeId, NodeState, Role, Snapshot
from gpulayer_mesh.errors import PlacementError, RemoteProtocolError

WAIT_S = 86400.0  # for machines or voters: one may come back the next morning
WAIT_MIN_S = 10.0  # devices may take seconds to be free again
VOTERS_MIN = 3  # of two, none may act once the other is lost


@dataclass(frozen=True, slots=True)
class Change:
    """What an attempt changes of the one before it; signed (envelope kind "restart")."""

    restart: Annotated[int, Meta(ge=1, le=RESTARTS_MAX)]
    slots: Annotated[tuple[Slot, ...], Meta(min_length=1, max_length=1024)]
    voters: Annotated[tuple[NodeId, ...], Meta(min_length=1, max_length=VOTERS_MAX)]
    attempt: Annotated[int, Meta(ge=0, le=2**31)] = 0  # which try of its author; see `JobSpec`


def attempt_id(origin: str, restart: int) -> str:
    """Return the job id of an attempt; the first one's is the origin."""
    if restart == 0:
        return origin
    digest = hashlib.sha256(f"{origin} {restart}".encode()).digest()
    return "".join(JOB_ID_ALPHABET[byte % 32] for byte in digest[:JOB_ID_CHARS])


def origin_of(spec: JobSpec) -> str:
    """Return the id of a job's first attempt."""
    return spec.origin or spec.id


def may_follow(record: JobRecord) -> bool:
    """Return whether an attempt may have a next one, perhaps unknown to who wrote its record."""
    return not record.cause and record.spec.restart < record.spec.restarts


def has_begun(record: JobRecord) -> bool:
    """Return whether an attempt got as far as the order to go.

    One that is being prepared for a job that failed is nothing yet that could be watched or
    stopped: its job is still the attempt before.
    """
    if record.state in (JobState.PENDING, JobState.PLACING):
        return False
    return record.state is not JobState.CANCELLED or any(r.ranks for r in record.reports)


def next_spec(previous: JobSpec, change: Change) -> JobSpec:
    """Return the attempt that a change makes of the one before."""
    origin = origin_of(previous)
    return replace(
        previous,
        id=attempt_id(origin, change.restart),
        origin=origin,
        restart=change.restart,
        slots=change.slots,
        voters=change.voters,
        attempt=change.attempt,
    )


def check(previous: JobSpec, change: Change, signer: NodeId) -> None:
    """Raise unless a change may follow an attempt.

    Raises:
        RemoteProtocolError: signed by no voter, not the next one, one too many, or another shape.
    """
    if signer not in previous.voters:
        raise RemoteProtocolError("a restart was signed by a node that may not")
    if change.restart != previous.restart + 1 or change.restart > previous.restarts:
        raise RemoteProtocolError(f"restart {change.restart} does not follow {previous.restart}")
    if shape(change.slots) != shape(previous.slots):
        raise RemoteProtocolError("a restart has another number of processes")
    if change.voters[: len(change.slots)] != tuple(slot.node for slot in change.slots):
        raise RemoteProtocolError("the nodes of a restart are not its voters")


def witnesses(spec: JobSpec) -> tuple[NodeId, ...]:
    """Return the voters on which nothing of an attempt runs."""
    return spec.voters[len(spec.slots) :]


def shape(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """Return processes and devices of each slot, which no restart changes."""
    return [(slot.processes, len(slot.devices)) for slot in slots]


def majority(voters: Collection[NodeId]) -> int:
    """Return how many voters must agree."""
    return len(voters) // 2 + 1


def choose_voters(
    slots: Sequence[Slot],
    snapshot: Snapshot,
    avoid: Collection[NodeId] = (),
    before: Sequence[NodeId] = (),
) -> tuple[NodeId, ...]:
    """Return the nodes of the slots, and others where these are too few to lose one.

    Args:
        avoid: nodes that did not answer.
        before: voters of the attempt before. Where those that live are too few, lost ones are
            chosen again: most come back, and the loss of one more can be survived from then on.
    """
    nodes = [slot.node for slot in slots]
    workers = [
        member
        for member in snapshot.members
        if Role.WORKER in member.roles and member.node not in nodes
    ]
    zones = {member.zone for member in snapshot.members if member.node in nodes}
    alive = sorted(
        (m for m in workers if m.state is NodeState.ALIVE and m.node not in avoid),
        key=lambda member: (member.zone not in zones, len(member.grants), member.name, member.node),
    )
    lost = [node for node in before if any(member.node == node for member in workers)]
    others = dict.fromkeys((*(member.node for member in alive), *lost))
    return (*nodes, *list(others)[: max(0, VOTERS_MIN - len(nodes))])


def patience_s(spec: JobSpec) -> float:
    """Return how long a next attempt may wait for machines."""
    return WAIT_S if spec.wait_s is None else max(WAIT_MIN_S, spec.wait_s)


def place_of_next(previous: JobSpec) -> Ticket:
    """Return the ticket of the attempt after one: what its nodes have is not for others yet."""
    origin = origin_of(previous)
    return Ticket(
        number=RESTART,
        job=attempt_id(origin, previous.restart + 1),
        submitter=previous.submitter,
        submitter_name=previous.submitter_name,
        name=previous.name,
        needs=placement.needs(placement.Request(nodes=len(previous.slots))),
        why=f"job {origin} from {previous.submitter_name}, which is being restarted",
    )


def candidates(previous: JobSpec, snapshot: Snapshot) -> tuple[NodeId, ...]:
    """Return all nodes that could take part in the next attempt, busy ones included."""
    found: dict[NodeId, None] = {}
    for slot in previous.slots:
        found |= dict.fromkeys(placement.candidates(_request(previous, slot), snapshot))
    return tuple(found)


def replan(
    previous: JobSpec,
    snapshot: Snapshot,
    avoid: Collection[NodeId] = (),
    cut: Collection[Pair] = (),
) -> tuple[Slot, ...]:
    """Choose the nodes of the next attempt: the same where they can, others for those lost.

    Args:
        avoid: nodes that did not answer, whatever the snapshot says.
        cut: nodes that were found not to reach each other; both of a pair are not taken.

    Raises:
        PlacementBusyError: not now.
        PlacementError: nothing can take the place of a lost node.
    """
    problem: PlacementError | None = None
    for leaving in ways_apart([slot.node for slot in previous.slots], cut):
        try:
            return _replan(previous, snapshot, avoid, leaving, cut)
        except PlacementError as error:  # another of a pair that is cut may be easier to replace
            problem = problem or error
    assert problem is not None  # there is one way at least
    raise problem


def _replan(
    previous: JobSpec,
    snapshot: Snapshot,
    avoid: Collection[NodeId],
    leaving: Collection[NodeId],
    cut: Collection[Pair],
) -> tuple[Slot, ...]:
    found: dict[int, Slot] = {}
    for index, slot in enumerate(previous.slots):
        if slot.node in avoid or slot.node in leaving:
            continue
        try:
            found[index] = _place(previous, slot, (slot.node,), snapshot)
        except PlacementError:  # its place may be taken by another node
            continue
    lost = [index for index in range(len(previous.slots)) if index not in found]
    # The most demanding first: what only one node can take must not be given to another.
    lost.sort(key=lambda index: -previous.slots[index].processes)
    staying = frozenset(slot.node for slot in found.values())
    for index in lost:
        taken = {*(slot.node for slot in found.values()), *avoid}
        taken |= _differing(snapshot, staying)
        never = tuple(f"!{node}" for node in sorted(taken) if snapshot_has(snapshot, node))
        target = (*previous.target, *never)
        kept = cut_from({slot.node: slot.name for slot in found.values()}, cut)
        found[index] = _place(previous, previous.slots[index], target, snapshot, kept)
    return tuple(found[index] for index in range(len(previous.slots)))


def snapshot_has(snapshot: Snapshot, node: NodeId) -> bool:
    return any(member.node == node for member in snapshot.members)


def _place(
    spec: JobSpec,
    slot: Slot,
    target: tuple[str, ...],
    snapshot: Snapshot,
    kept: Mapping[NodeId, str] | None = None,
) -> Slot:
    return placement.plan(_request(spec, slot, target), snapshot, kept).slots[0]


def _request(spec: JobSpec, slot: Slot, target: tuple[str, ...] = ()) -> placement.Request:
    return placement.Request(
        nodes=1,
        devices=slot.processes,
        accelerator=spec.accelerator,
        target=target or spec.target or "auto",
        torch=spec.kind is JobKind.DISTRIBUTED,
    )


def _differing(snapshot: Snapshot, staying: Collection[NodeId]) -> set[NodeId]:
    """Return the nodes whose torch or Python differ from those that stay."""
    versions = {
        member.node: placement.versions(member.caps)
        for member in snapshot.members
        if member.caps is not None
    }
    wanted = {versions[node] for node in staying if node in versions}
    return {node for node, found in versions.items() if wanted and found not in wanted}
