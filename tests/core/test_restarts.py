"""Restarts: which attempt may follow which, signed by whom, and on which nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpulayer_mesh.core.jobspec import JobSpec, Slot
from gpulayer_mesh.core.paths import Pair
from gpulayer_mesh.core.restarts import (
    Change,
    attempt_id,
    check,
    choose_voters,
    majority,
    next_spec,
    patience_s,
    replan,
)
from gpulayer_mesh.core.types import Accelerator, Grant, NodeState, Role
from gpulayer_mesh.errors import PlacementBusyError, PlacementError, RemoteProtocolError
from job_cases import JOB, node, spec
from mesh_cases import CUDA, caps, member, mesh


def first(restarts: int = 2) -> JobSpec:
    return spec(1, 1, restarts=restarts, voters=(node(0), node(1), node(2)))


def change(number: int = 1, *nodes: int) -> Change:
    slots = tuple(Slot(node(i), f"box-{i}", 1) for i in nodes or (0, 2))
    return Change(number, slots, (*(slot.node for slot in slots), node(3)))


def test_an_attempt_is_the_one_before_elsewhere() -> None:
    before = first()
    after = next_spec(before, change())
    assert after.id == attempt_id(JOB, 1) != JOB
    assert (after.origin, after.restart) == (JOB, 1)
    assert [slot.node for slot in after.slots] == [node(0), node(2)]
    same = replace(after, id=JOB, origin="", restart=0, slots=before.slots, voters=before.voters)
    assert same == before
    third = next_spec(after, change(2, 1, 2))
    assert (third.id, third.origin) == (attempt_id(JOB, 2), JOB)


def test_ids_follow_from_the_first_attempt() -> None:
    ids = {attempt_id(JOB, number) for number in range(21)}
    assert len(ids) == 21
    assert attempt_id(JOB, 0) == JOB


@pytest.mark.parametrize(
    ("bad", "signer", "says"),
    [
        (change(), 3, "may not"),
        (change(2), 0, "does not follow"),
        (Change(1, spec(1, 2).slots, (node(0), node(1))), 0, "number of processes"),
        (Change(1, spec(1).slots, (node(0),)), 0, "number of processes"),
        (
            Change(1, (Slot(node(0), "box-0", 1, (0,)), Slot(node(1), "box-1", 1)), (node(0),)),
            0,
            "number of processes",
        ),
        (replace(change(), voters=(node(0), node(3))), 0, "voters"),
    ],
)
def test_what_may_not_follow_is_refused(bad: Change, signer: int, says: str) -> None:
    check(first(), change(), node(0))
    with pytest.raises(RemoteProtocolError, match=says):
        check(first(), bad, node(signer))


def test_no_attempt_follows_the_last() -> None:
    with pytest.raises(RemoteProtocolError, match="does not follow"):
        check(first(restarts=0), change(), node(0))


def test_voters_are_at_least_three_where_there_are() -> None:
    boxes = [member(name) for name in "abcd"]
    slots = (Slot(boxes[1].node, "b", 1),)
    assert choose_voters(slots, mesh(*boxes)) == (boxes[1].node, boxes[0].node, boxes[2].node)
    assert choose_voters(slots, mesh(*boxes), {boxes[0].node})[1:] == (
        boxes[2].node,
        boxes[3].node,
    )
    four = tuple(Slot(box.node, box.name, 1) for box in boxes)
    assert choose_voters(four, mesh(*boxes)) == tuple(box.node for box in boxes)
    assert choose_voters(slots, mesh(boxes[1])) == (boxes[1].node,)
    assert [majority(range(count)) for count in (1, 2, 3, 4, 5)] == [1, 2, 2, 3, 3]  # type: ignore[arg-type]


def test_next_attempt_waits_as_long_as_its_job_and_for_a_day_by_default() -> None:
    waits = [patience_s(replace(first(), wait_s=wait_s)) for wait_s in (None, 0.0, 60.0)]
    assert waits == [86400.0, 10.0, 60.0]


def test_lost_voters_are_voters_again_where_others_are_too_few() -> None:
    here, lost, left = member("a"), member("b", state=NodeState.DEAD), member("gone")
    before = (lost.node, here.node, left.node)
    slots = (Slot(here.node, "a", 1),)
    assert choose_voters(slots, mesh(here, lost), before=before) == (here.node, lost.node)
    other, third = member("c"), member("d")
    many = mesh(here, lost, other, third)
    assert choose_voters(slots, many, before=before) == (here.node, other.node, third.node)
    few = mesh(here, lost, other)
    assert choose_voters(slots, few, before=before) == (here.node, other.node, lost.node)


def test_only_living_workers_of_the_zone_first_are_voters() -> None:
    boxes = [
        member("a", zone="lab"),
        member("b", state=NodeState.DEAD, zone="lab"),
        member("c", roles=(Role.LAUNCHER,), zone="lab"),
        member("d", zone="far"),
        member("e", zone="lab"),
    ]
    voters = choose_voters((Slot(boxes[0].node, "a", 1),), mesh(*boxes))
    assert voters == (boxes[0].node, boxes[4].node, boxes[3].node)


def plan_of(
    before: JobSpec, *members: object, avoid: tuple[str, ...] = (), cut: tuple[Pair, ...] = ()
) -> list[str]:
    return [slot.name for slot in replan(before, mesh(*members), avoid, cut)]  # type: ignore[arg-type]


def test_nodes_stay_and_lost_ones_are_replaced_in_place() -> None:
    a, b, c, d = (member(name) for name in "abcd")
    before = spec(1, 1, slots=tuple(Slot(m.node, m.name, 1) for m in (a, b)))
    assert plan_of(before, a, b, c, d) == ["a", "b"]
    dead = replace(a, state=NodeState.DEAD)
    assert plan_of(before, dead, b, c, d) == ["c", "b"]
    assert plan_of(before, a, b, c, d, avoid=(b.node, c.node)) == ["a", "d"]
    assert plan_of(before, b, c) == ["c", "b"]  # removed from the mesh
    with pytest.raises(PlacementError):
        plan_of(before, dead, b)
    suspect = replace(a, state=NodeState.SUSPECT)
    with pytest.raises(PlacementBusyError):
        plan_of(before, suspect, b)


def test_replacements_keep_to_what_was_asked_for() -> None:
    a, b = member("a", zone="lab"), member("b", zone="lab")
    before = spec(1, 1, slots=tuple(Slot(m.node, m.name, 1) for m in (a, b)))
    before = replace(before, target=("zone:lab",))
    dead = replace(b, state=NodeState.DEAD)
    with pytest.raises(PlacementError):
        plan_of(before, a, dead, member("c", zone="home"))
    assert plan_of(before, a, dead, member("c", zone="home"), member("d", zone="lab")) == ["a", "d"]


def test_replacements_agree_with_those_that_stay() -> None:
    a, b = member("a"), member("b")
    before = spec(1, 1, slots=tuple(Slot(m.node, m.name, 1) for m in (a, b)))
    dead = replace(b, state=NodeState.DEAD)
    other = member("c", caps(torch="2.12.0+cpu"))
    with pytest.raises(PlacementError):
        plan_of(before, a, dead, other)
    assert plan_of(before, a, dead, other, member("d")) == ["a", "d"]


def test_devices_are_chosen_anew_and_the_most_demanding_place_first() -> None:
    a, b = member("a", caps(2)), member("b", caps(1))
    before = spec(
        slots=(Slot(b.node, "b", 1, (0,)), Slot(a.node, "a", 2, (0, 1))),
        accelerator=Accelerator.CUDA,
    )
    big, small = member("big", caps(2, free_mib=4000)), member("small", caps(1, free_mib=2000))
    found = replan(before, mesh(big, small))
    assert [(slot.name, slot.devices) for slot in found] == [("small", (0,)), ("big", (0, 1))]
    busy = member("a", caps(3, kind=CUDA, busy=(0,)))
    found = replan(before, mesh(busy, b))
    assert [(slot.name, slot.devices) for slot in found] == [("b", (0,)), ("a", (1, 2))]


def test_nodes_that_do_not_reach_each_other_are_not_together_in_the_next_attempt() -> None:
    a, b, c, d = (member(name) for name in "abcd")
    before = spec(1, 1, slots=tuple(Slot(m.node, m.name, 1) for m in (a, b)))
    ab, ba, ac, bc = ((x.node, y.node) for x, y in ((a, b), (b, a), (a, c), (b, c)))
    assert plan_of(before, a, b, c, cut=(ab, ba)) == ["a", "c"]
    assert plan_of(before, a, b, c, cut=(ba,)) == ["c", "b"]  # nobody gets in there
    assert plan_of(before, a, b, c, cut=(ab, ac)) == ["c", "b"]  # a is the one to leave out
    assert plan_of(before, a, b, c, d, cut=(ab, bc)) == ["a", "c"]
    assert plan_of(before, a, b, cut=(ac,)) == ["a", "b"]
    gone = replace(a, state=NodeState.DEAD)
    assert plan_of(before, gone, b, c, d, cut=(bc,)) == ["d", "b"]


def test_cut_path_is_why_a_next_attempt_waits_that_has_no_other_choice() -> None:
    a, b, c = (member(name) for name in "abc")
    before = spec(1, 1, slots=tuple(Slot(m.node, m.name, 1) for m in (a, b)))
    cut = ((a.node, b.node),)
    with pytest.raises(PlacementBusyError, match=r"b has no open path to a$"):
        plan_of(before, a, b, cut=cut)
    busy = member("c", grants=(Grant("2" * 10, 8, (), "laptop-2"),))
    with pytest.raises(PlacementBusyError, match=r"b has no open path to a; c busy with job 2222"):
        plan_of(before, a, b, busy, cut=cut)
    everywhere = (*cut, (a.node, c.node), (c.node, b.node))
    with pytest.raises(PlacementBusyError, match="no open path"):
        plan_of(before, a, b, c, cut=everywhere)


def test_of_two_that_are_cut_the_one_that_can_be_replaced_is() -> None:
    big, small, spare = member("a", caps(2)), member("b", caps(1)), member("c", caps(1))
    for slots in (
        (Slot(big.node, "a", 2, (0, 1)), Slot(small.node, "b", 1, (0,))),
        (Slot(small.node, "b", 1, (0,)), Slot(big.node, "a", 2, (0, 1))),
    ):
        before = spec(slots=slots, accelerator=Accelerator.CUDA)
        names = plan_of(before, big, small, spare, cut=((big.node, small.node),))
        assert sorted(names) == ["a", "c"]
