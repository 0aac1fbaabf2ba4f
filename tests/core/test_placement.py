"""Placement: who is chosen and why, who is refused and whether waiting helps."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from gpulayer_mesh.core.devicecare import unfit
from gpulayer_mesh.core.placement import Plan, Request, candidates, plan
from gpulayer_mesh.core.types import (
    Accelerator,
    Blocked,
    DeviceProcess,
    Grant,
    Link,
    MemberSnapshot,
    NodeState,
    Role,
    Snapshot,
)
from gpulayer_mesh.errors import ConfigError, PlacementBusyError, PlacementError, Refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from job_cases import node
from mesh_cases import MBIT, caps, large_mesh, member, mesh

CPU, CUDA, ROCM, MPS = Accelerator.CPU, Accelerator.CUDA, Accelerator.ROCM, Accelerator.MPS


def names(found: Plan) -> list[str]:
    return [slot.name for slot in found.slots]


def why(refused: tuple[Refusal, ...], name: str) -> Refusal:
    (found,) = [refusal for refusal in refused if refusal.node == name]
    return found


def never(request: Request, snapshot: Snapshot) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        plan(request, snapshot)
    assert not isinstance(caught.value, PlacementBusyError)
    assert len(caught.value.refusals) <= len(snapshot.members)
    return caught.value


def busy(request: Request, snapshot: Snapshot) -> PlacementBusyError:
    with pytest.raises(PlacementBusyError) as caught:
        plan(request, snapshot)
    return caught.value


def test_unequal_nodes_give_every_free_device() -> None:
    found = plan(
        Request(nodes=3), mesh(member("a", caps(1)), member("b", caps(2)), member("c", caps(1)))
    )
    assert [(slot.name, slot.devices) for slot in found.slots] == [
        ("b", (0, 1)),
        ("a", (0,)),
        ("c", (0,)),
    ]
    assert (found.world_size, found.accelerator) == (4, CUDA)
    assert any("2/1/1" in warning for warning in found.warnings)


def test_one_process_where_there_is_no_device() -> None:
    found = plan(Request(nodes=2), mesh(member("a"), member("b")))
    assert [(slot.processes, slot.devices) for slot in found.slots] == [(1, ()), (1, ())]
    assert (found.accelerator, found.warnings) == (CPU, ())


def test_accelerators_are_never_mixed_and_the_reason_is_told() -> None:
    members = [member("gpu", caps(1)), member("cpu-1"), member("cpu-2")]
    found = plan(Request(nodes=3), mesh(*members))
    assert found.accelerator is CPU
    assert found.warnings == ("cpu on every node: only 1 of 3 have cuda",)
    assert all(slot.devices == () for slot in found.slots)
    found = plan(Request(nodes=1), mesh(*members))
    assert (found.accelerator, names(found)) == (CUDA, ["gpu"])


def test_every_other_member_is_refused_with_its_reason() -> None:
    members = (
        member("fits", caps(2)),
        member("launcher", roles=(Role.LAUNCHER,)),
        member("dead", state=NodeState.DEAD, heard_s=41.0),
        member("left", state=NodeState.LEFT),
        member("off", state=None),
        member("suspect", state=NodeState.SUSPECT, since_s=3.0),
        member("new", replace(caps(), torch=None)),
        member("plain"),
        member("held", caps(2), grants=(Grant("k7f2", 1, (0,)),)),
        member("gamer", caps(2, busy=(1,))),
        member("broken", replace(caps(2), torch=caps(0).torch)),
    )
    found = plan(Request(devices=2, accelerator=CUDA), mesh(*members))
    assert names(found) == ["fits"]
    expected = {
        "launcher": ("does not accept jobs: not a worker", True),
        "dead": ("is dead: no answer for 41 s", True),
        "left": ("has left: its agent was stopped", True),
        "off": ("runs no agent", True),
        "suspect": ("is suspect: no answer for 3 s", False),
        "new": ("has no torch, or is still testing it", False),
        "plain": ("has no cuda device", True),
        "held": ("busy with job k7f2 (2 cuda devices asked, 1 free)", False),
        "gamer": ("busy with another program (2 cuda devices asked, 1 free)", False),
        "broken": ("its torch 2.13.0+cpu cannot drive cuda", True),
    }
    assert {r.node: (r.reason, r.for_ever) for r in found.refused} == expected
    assert found.chosen == (("fits", "2 x RTX 3070, 8 GiB free, 1.0 ms away"),)


def test_never_and_busy_are_told_apart() -> None:
    held = member("held", caps(1), grants=(Grant("k7f2", 1, (0,)),))
    error = busy(Request(nodes=2, accelerator=CUDA), mesh(member("a", caps(1)), held))
    assert "1 free now: held busy with job k7f2 (1 cuda devices asked, 0 free)" in error.message
    error = never(Request(nodes=3, accelerator=CUDA), mesh(member("a", caps(1)), held))
    assert "only 2 of the mesh's 2 members" in error.message
    assert never(Request(), mesh()).refusals == ()


def test_what_keeps_devices_is_named_and_may_go_away() -> None:
    left = Blocked((DeviceProcess(4711, "python", "k7f2", 2048),))
    unseen = Blocked(unseen_mib=3000)
    blender = {"busy_pids": 1, "busy_by": (DeviceProcess(123, "blender"),)}

    def box(*states: dict[str, object], grants: tuple[Grant, ...] = ()) -> Refusal:
        have = caps(len(states))
        devices = tuple(
            replace(device, **state)  # type: ignore[arg-type]
            for device, state in zip(have.devices, states, strict=True)
        )
        tested = member("box", replace(have, devices=devices), grants=grants)
        request = Request(devices=len(states), accelerator=CUDA)
        (refusal,) = busy(request, mesh(tested)).refusals
        return refusal

    pid = "pid 4711 (python) of job k7f2 still holds 2,048 MiB"
    assert box({"blocked": left}) == Refusal(
        "box", f"device 0 is blocked: {pid} (1 cuda devices asked, 0 free)", False
    )
    assert box(blender, {}).reason == "busy with pid 123 (blender) (2 cuda devices asked, 1 free)"
    grants = (Grant("k9", 1, (0,)),)
    found = box(blender | {"blocked": unseen}, blender, {"blocked": unseen}, {}, grants=grants)
    assert found.reason == (
        "busy with job k9, pid 123 (blender); device 2 is blocked: 3,000 MiB are taken by no "
        "process that can be seen (4 cuda devices asked, 1 free)"
    )
    found = box(*[{"blocked": unseen}] * 5)
    assert found.reason.endswith("seen and 2 more (5 cuda devices asked, 0 free)")


def test_blocked_device_is_not_planned() -> None:
    have = caps(2)
    blocked = replace(have.devices[0], blocked=Blocked(unseen_mib=3000))
    box = member("box", replace(have, devices=(blocked, have.devices[1])))
    assert [slot.devices for slot in plan(Request(), mesh(box)).slots] == [(1,)]


def test_busy_gpu_is_waited_for_instead_of_falling_back_to_the_cpu() -> None:
    held = member("held", caps(1), grants=(Grant("k7f2", 1, (0,)),))
    assert "k7f2" in busy(Request(), mesh(held, member("cpu"))).message


def test_nodes_still_testing_their_torch_are_waited_for() -> None:
    fresh = member("fresh", replace(caps(), torch=None))
    assert "still testing" in busy(Request(nodes=2), mesh(member("a"), fresh)).message
    assert names(plan(Request(torch=False), mesh(fresh))) == ["fresh"]
    unknown = replace(fresh, caps=None)
    assert not busy(Request(torch=False), mesh(unknown)).refusals[0].for_ever


def test_cpu_node_takes_jobs_up_to_its_cpus() -> None:
    full = member("box", caps(cpus=2), grants=(Grant("k7f2", 2),))
    assert "busy with job k7f2" in busy(Request(), mesh(full)).message
    error = never(Request(devices=3), mesh(full))
    assert error.refusals[0].reason == "3 processes asked, it has 2 CPUs"
    assert "but none of the mesh's 1 members can ever do it" in error.message
    gpu_job = member("box", caps(1, cpus=2), grants=(Grant("k7f2", 1, (0,)),))
    assert names(plan(Request(accelerator=CPU, devices=2), mesh(gpu_job))) == ["box"]


def test_largest_agreeing_group_is_used() -> None:
    members = [
        member("a"),
        member("b", caps(python="3.11.9", torch="2.13.1")),
        member("old", caps(torch="2.12.0")),
        member("newer", caps(python="3.13.1")),
    ]
    found = plan(Request(nodes=2), mesh(*members))
    assert sorted(names(found)) == ["a", "b"]
    assert {(one.node, one.torch, one.python) for one in found.versions} == {
        ("a", "2.13.0+cpu", "3.11.7"),
        ("b", "2.13.1", "3.11.9"),
    }
    assert why(found.refused, "old") == Refusal(
        "old", "torch 2.12 and Python 3.11, the others have torch 2.13 and Python 3.11", True
    )
    error = never(Request(nodes=4), mesh(*members))
    assert {one.node for one in error.versions} == {"a", "b", "old", "newer"}
    assert why(error.refusals, "newer").reason.startswith("torch 2.13 and Python 3.13, the others")
    assert names(plan(Request(target="old"), mesh(*members))) == ["old"]


def test_busy_majority_is_waited_for_only_if_no_free_group_is_large_enough() -> None:
    held = {"grants": (Grant("k7f2", 8),)}
    members = [member(n, **held) for n in "abc"]  # type: ignore[arg-type]
    members += [member(n, caps(torch="2.12.0")) for n in "xy"]
    assert sorted(names(plan(Request(nodes=2), mesh(*members)))) == ["x", "y"]
    assert busy(Request(nodes=3), mesh(*members)).refusals


def test_same_zone_and_hardware_come_first() -> None:
    members = [
        member("fast-1", caps(1), zone="east", rtt_ms=0.1),
        member("fast-2", caps(1), zone="west", rtt_ms=0.1),
        member("slow-1", caps(1), zone="lab", rtt_ms=9.0),
        member("slow-2", caps(1), zone="lab", rtt_ms=9.0),
        member("odd", caps(1, model="T4"), zone="lab", rtt_ms=0.2),
    ]
    found = plan(Request(nodes=2, devices=1), mesh(*members))
    assert sorted(names(found)) == ["slow-1", "slow-2"]
    assert found.chosen[0][1].endswith("same zone lab and hardware, 9.0 ms away")
    found = plan(Request(nodes=3, devices=1), mesh(*members))
    assert sorted(names(found)) == ["odd", "slow-1", "slow-2"]
    assert names(found)[0] == "odd"


def test_order_within_a_pool_is_memory_jobs_distance_name() -> None:
    members = [
        member("d"),
        member("c"),
        member("near", rtt_ms=0.2),
        member("used", grants=(Grant("k7f2", 1),), rtt_ms=0.1),
        member("unmeasured", rtt_ms=None),
        member("roomy", replace(caps(), memory_available_mib=20000), rtt_ms=5.0),
    ]
    found = plan(Request(nodes=6), mesh(*members))
    assert names(found) == ["roomy", "near", "c", "d", "unmeasured", "used"]
    answering = replace(mesh(*members), answered_by=members[4].node)
    assert names(plan(Request(nodes=6), answering))[1] == "unmeasured"
    assert plan(Request(nodes=6), mesh(*reversed(members))).slots == found.slots


def test_auto_devices_prefers_the_machine_with_more_of_them() -> None:
    members = [member("small", caps(1, free_mib=24000)), member("big", caps(4))]
    assert names(plan(Request(), mesh(*members))) == ["big"]
    assert names(plan(Request(devices=1), mesh(*members))) == ["small"]


def test_linked_devices_are_chosen_together() -> None:
    links = (
        ("X", "SYS", "NV4", "SYS"),
        ("SYS", "X", "SYS", "PIX"),
        ("NV4", "SYS", "X", "SYS"),
        ("SYS", "PIX", "SYS", "X"),
    )
    box = member("box", caps(4, links=links))
    assert plan(Request(devices=2), mesh(box)).slots[0].devices == (0, 2)
    box = replace(box, grants=(Grant("k7f2", 1, (0,)),))
    assert plan(Request(devices=2), mesh(box)).slots[0].devices == (1, 3)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("auto", {"a", "b", "c"}),
        ("mesh", {"a", "b", "c"}),
        ("b", {"b"}),
        (("a", "c"), {"a", "c"}),
        ("zone:lab", {"a", "b"}),
        (("zone:lab", "!a"), {"b"}),
        ("!b", {"a", "c"}),
        ("!zone:lab", {"c"}),
        (("zone:lab", "c", "!a"), {"b", "c"}),
    ],
)
def test_targets(target: str | tuple[str, ...], expected: set[str]) -> None:
    members = [member("a", zone="lab"), member("b", zone="lab"), member("c", zone="attic")]
    found = plan(Request(nodes=len(expected), target=target), mesh(*members))
    assert set(names(found)) == expected
    assert all(
        why(found.refused, m.name).reason == "is not among the targets"
        for m in members
        if m.name not in expected
    )


def test_unknown_target_is_named_with_what_exists() -> None:
    error = never(Request(target=("bigbox", "zone:moon")), mesh(member("a")))
    assert error.message == "no node or zone is called 'bigbox', 'zone:moon'"
    assert error.hint == "the mesh has a"


def test_two_nodes_of_one_name_are_told_apart_by_id() -> None:
    twins = [member("ubuntu", node="1" * 64), member("ubuntu", node="2" * 64)]
    found = plan(Request(target="2" * 12), mesh(*twins))
    assert found.slots[0].node == "2" * 64
    assert {slot.node for slot in plan(Request(nodes=2), mesh(*twins)).slots} == {
        "1" * 64,
        "2" * 64,
    }


def test_mac_is_left_out_of_jobs_on_several_nodes_unless_named() -> None:
    mac = member("mac", caps(1, kind=MPS, os="Darwin 24.1 arm64"))
    found = plan(Request(nodes=2), mesh(mac, member("a"), member("b")))
    assert "mac" not in names(found)
    assert "Mac" in why(found.refused, "mac").reason
    assert "mac" in names(plan(Request(nodes=2, target=("mac", "a")), mesh(mac, member("a"))))
    found = plan(Request(), mesh(mac))
    assert (found.accelerator, found.world_size) == (MPS, 1)
    assert plan(Request(devices=2), mesh(mac)).accelerator is CPU


@pytest.mark.parametrize("request_", [Request(nodes=2, accelerator=MPS), Request(1, 2, MPS)])
def test_mps_runs_one_process(request_: Request) -> None:
    assert "one process" in never(request_, mesh(member("a"))).message


@pytest.mark.parametrize("request_", [Request(nodes=0), Request(nodes=9999), Request(devices=0)])
def test_senseless_request(request_: Request) -> None:
    with pytest.raises(ConfigError):
        plan(request_, mesh(member("a")))


def test_rocm_is_chosen_where_cuda_is_missing() -> None:
    found = plan(Request(), mesh(member("amd", caps(2, kind=ROCM)), member("cpu")))
    assert (found.accelerator, found.world_size) == (ROCM, 2)


def wired(*members: MemberSnapshot, slow: tuple[str, ...] = (), mbit: int = 940) -> Snapshot:
    """A mesh in which all links are `mbit` fast, but a tenth of that from those named to others."""
    links = tuple(
        Link(i, j, 900, (mbit if (a.name in slow) == (b.name in slow) else mbit // 10) * MBIT)
        for (i, a), (j, b) in combinations(enumerate(members), 2)
    )
    return replace(mesh(*members), links=links)


def test_slowest_link_of_the_ring_is_known_only_where_all_are_measured() -> None:
    slow = wired(*(member(n) for n in "abc"), slow=("c",))
    found = plan(Request(nodes=3), slow).slowest
    assert found is not None
    assert "c" in (found.one, found.other)
    assert found.bytes_s == min(link.bytes_s or 0 for link in slow.links)
    assert plan(Request(nodes=3), replace(slow, links=slow.links[:2])).slowest is None
    assert plan(Request(nodes=1), slow).slowest is None


def test_nodes_are_chosen_by_their_links_and_the_plan_says_so() -> None:
    roomy = replace(caps(), memory_available_mib=30000)
    members = [member("a"), member("far", roomy), member("b"), member("c")]
    found = plan(Request(nodes=3), wired(*members, slow=("far",)))
    assert sorted(names(found)) == ["a", "b", "c"]
    assert [why_ for _, why_ in found.chosen] == [
        "8 CPUs, 16 GiB free, same zone and hardware, 1.0 ms away",
        "8 CPUs, 16 GiB free, same zone and hardware, 940 Mbit/s to a",
        "8 CPUs, 16 GiB free, same zone and hardware, 940 Mbit/s to b",
    ]
    assert why(found.refused, "far").reason == (
        "not needed: 3 of 4 fitting, at best 94 Mbit/s to them"
    )
    # One node needs no link, and all nodes leave no choice.
    assert names(plan(Request(), wired(*members, slow=("far",)))) == ["far"]
    assert len(plan(Request(nodes=4), wired(*members, slow=("far",))).slots) == 4
    # Links that are nearly equal choose nobody.
    links = tuple(
        one._replace(bytes_s=one.bytes_s * 6) if 1 in one[:2] and one.bytes_s else one
        for one in wired(*members, slow=("far",)).links
    )
    assert "far" in names(plan(Request(nodes=3), replace(mesh(*members), links=links)))


def test_zone_with_the_better_links_is_chosen() -> None:
    members = [member(f"{zone}-{i}", zone=zone) for i in (1, 2, 3) for zone in ("attic", "cellar")]
    links = tuple(
        Link(i, j, 900, (940 if a.zone == "cellar" == b.zone else 94) * MBIT)
        for (i, a), (j, b) in combinations(enumerate(members), 2)
    )
    found = plan(Request(nodes=2), replace(mesh(*members), links=links))
    assert names(found) == ["cellar-1", "cellar-2"]
    assert found.chosen[1][1].endswith("same zone cellar and hardware, 940 Mbit/s to cellar-1")
    assert why(found.refused, "attic-1").reason == (
        "not needed: 2 of 6 fitting; in zone attic, at best 94 Mbit/s to them"
    )
    assert found.warnings == ()
    assert names(plan(Request(nodes=2), mesh(*members))) == ["attic-1", "attic-2"]


def test_too_large_for_a_zone_takes_few_of_them_and_crosses_between_them_once() -> None:
    members = [
        member(f"{zone}-{i}", zone=zone)
        for i, zone in enumerate("abcabcabc")
        if (i, zone) not in ((5, "c"), (8, "c"))
    ]
    found = plan(Request(nodes=5), mesh(*members))
    zones = [name[0] for name in names(found)]
    assert zones == ["a", "a", "a", "b", "b"]
    assert found.warnings == ("ranks are in 2 zones",)
    found = plan(Request(nodes=7), mesh(*members))
    assert sum(x[0] != y[0] for x, y in pairwise(names(found))) == 2
    # Of two zones that would do, the one with the better links to the first.
    links = (Link(1, 2, 900, 10 * MBIT), Link(0, 2, 900, 300 * MBIT), Link(0, 1, 900, 5 * MBIT))
    few = [member("a-1", zone="a"), member("b-1", zone="b"), member("c-1", zone="c")]
    found = plan(Request(nodes=2), replace(mesh(*few), links=links))
    assert names(found) == ["a-1", "c-1"]
    assert found.warnings == ("ranks are in 2 zones: 300 Mbit/s between them",)


def test_equal_hardware_is_second_to_one_zone() -> None:
    members = [
        member("a-1", caps(1), zone="a"),
        member("a-2", caps(1, model="T4"), zone="a"),
        member("b-1", caps(1), zone="b"),
    ]
    assert sorted(names(plan(Request(nodes=2), mesh(*members)))) == ["a-1", "a-2"]
    assert sorted(names(plan(Request(nodes=2, target=("a-1", "b-1")), mesh(*members)))) == [
        "a-1",
        "b-1",
    ]


def test_inferred_zone_is_a_target_and_named_where_none_fits() -> None:
    members = [member("a", zone="~a"), member("b", zone="~b")]
    assert names(plan(Request(target="zone:~b"), mesh(*members))) == ["b"]
    error = never(Request(target="zone:attic"), mesh(*members))
    assert error.hint == "the mesh has a, b; zones ~a, ~b"


def test_a_thousand_nodes_are_planned_in_one_zone_or_with_few_crossings(seed: int) -> None:
    snapshot = large_mesh(seed)
    for nodes in (1, 3, 100, 1000):
        start = time.process_time()
        found = plan(Request(nodes=nodes), snapshot)
        print(f"{nodes} of 1,000 nodes: {time.process_time() - start:.3f} s of CPU")
        zones = [int(slot.name[1:]) % 7 for slot in found.slots]
        crossings = sum(a != b for a, b in pairwise(zones))
        assert crossings == len(set(zones)) - 1 == (6 if nodes == 1000 else 0)


members_st = st.lists(
    st.builds(
        lambda gpus, cpus, state, worker, torch, python, held, busy_, zone: (
            gpus,
            cpus,
            state,
            worker,
            torch,
            python,
            held,
            busy_,
            zone,
        ),
        st.integers(0, 4),
        st.integers(1, 4),
        st.sampled_from([*NodeState, None]),
        st.booleans(),
        st.sampled_from(["2.13.0", "2.12.0", None]),
        st.sampled_from(["3.11.7", "3.12.1"]),
        st.sets(st.integers(0, 3)),
        st.sets(st.integers(0, 3)),
        st.sampled_from(["", "lab"]),
    ),
    max_size=8,
)
requests_st = st.builds(
    Request,
    nodes=st.integers(1, 4),
    devices=st.one_of(st.just("auto"), st.integers(1, 3)),
    accelerator=st.sampled_from([None, CPU, CUDA]),
)


links_st = st.lists(
    st.builds(
        lambda ends, rtt_us, bytes_s: Link(min(ends), max(ends), rtt_us, bytes_s),
        st.sets(st.integers(0, 7), min_size=2, max_size=2),
        st.none() | st.integers(1, 10**6),
        st.none() | st.integers(1, 10**9),
    ),
    max_size=12,
)


@settings(max_examples=400, deadline=None)
@given(requests_st, members_st, links_st)
def test_plans_never_overcommit_and_explain_every_node(
    request_: Request, drawn: list[tuple[object, ...]], links: list[Link]
) -> None:
    members = []
    for i, (gpus, cpus, state, worker, torch, python, held, busy_, zone) in enumerate(drawn):
        have = caps(gpus, cpus=cpus, torch=torch, python=python, busy=tuple(busy_))  # type: ignore
        grants = tuple(Grant(f"j{d}", 1, (d,)) for d in sorted(held))  # type: ignore
        roles = (Role.WORKER, Role.LAUNCHER) if worker else (Role.LAUNCHER,)
        members.append(
            member(f"n{i}", have, node=node(i), state=state, roles=roles, grants=grants, zone=zone)
        )
    by_node = {m.node: m for m in members}
    known = tuple(link for link in links if link.b < len(members))
    try:
        found = plan(request_, replace(mesh(*members), links=known))
    except PlacementError as error:
        refused = error
        found = None
    if found is None:
        assert {r.node for r in refused.refusals} <= {m.name for m in members}
        if isinstance(refused, PlacementBusyError):
            assert any(not r.for_ever for r in refused.refusals)
        return
    assert len(found.slots) == request_.nodes == len({slot.node for slot in found.slots})
    assert [name for name, _ in found.chosen] == names(found)
    assert {r.node for r in found.refused} == {m.name for m in members} - set(names(found))
    versions = set()
    for slot in found.slots:
        chosen = by_node[slot.node]
        assert chosen.state is NodeState.ALIVE
        assert Role.WORKER in chosen.roles
        assert chosen.caps is not None
        assert chosen.caps.torch is not None
        versions.add((chosen.caps.torch.version, chosen.caps.python))
        held = {d for grant in chosen.grants for d in grant.devices}
        if found.accelerator is CPU:
            assert slot.devices == ()
            assert slot.processes <= chosen.caps.cpus
        else:
            assert slot.processes == len(set(slot.devices)) == len(slot.devices)
            free = {d.index for d in chosen.caps.devices if unfit(d) is None} - held
            assert set(slot.devices) <= free
            if request_.devices == "auto":
                assert set(slot.devices) == free
        if request_.devices != "auto":
            assert slot.processes == request_.devices
    assert len(versions) == 1
    zones = [by_node[slot.node].zone for slot in found.slots]
    assert sum(a != b for a, b in pairwise(zones)) == len(set(zones)) - 1


def test_node_that_is_kept_for_others_is_busy_and_can_take_part_later() -> None:
    snapshot = mesh(member("a"), member("b"), member("gone", state=NodeState.DEAD))
    kept = {snapshot.members[0].node: "kept for job k7f2 from laptop-2, which came first"}
    assert names(plan(Request(), snapshot, kept)) == ["b"]
    with pytest.raises(PlacementBusyError) as caught:
        plan(Request(2), snapshot, kept)
    assert why(caught.value.refusals, "a") == Refusal("a", kept[snapshot.members[0].node], False)
    assert caught.value.counted == ("b",)
    # What can never do it is not excused by a queue, and what runs there is named before that.
    with pytest.raises(PlacementError) as impossible:
        plan(Request(2, 99), snapshot, kept)
    assert not isinstance(impossible.value, PlacementBusyError)
    full = mesh(member("a", grants=(Grant("k9", 8),)))
    with pytest.raises(PlacementBusyError, match="a busy with job k9"):
        plan(Request(), full, kept)


def test_candidates_are_free_and_busy_nodes_of_the_best_accelerator() -> None:
    held = member("held", caps(1), grants=(Grant("k7f2", 1, (0,)),))
    small, free = member("small"), member("free", caps(1))
    snapshot = mesh(held, small, free)
    assert set(candidates(Request(2), snapshot)) == {held.node, free.node}
    assert set(candidates(Request(2), snapshot, {free.node: "kept"})) == {held.node, free.node}
    assert set(candidates(Request(3), snapshot)) == {held.node, small.node, free.node}
    assert candidates(Request(4), snapshot) == ()
    assert candidates(Request(target="held"), snapshot) == (held.node,)


def test_node_that_may_never_do_it_is_no_candidate() -> None:
    unsure = mesh(member("a"), member("b", caps(torch=None)))
    busy(Request(2), unsure)
    assert candidates(Request(2), unsure) == ()
    assert len(candidates(Request(2, torch=False), unsure)) == 2
