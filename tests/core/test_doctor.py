"""The doctor's verdicts from sets of facts.

What Linux can produce is produced in tests/e2e/test_doctor.py; the facts of macOS, WSL and GPUs
here were written after their documentation and users' reports, none was recorded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gpulayer_mesh.core import doctor
from gpulayer_mesh.core.diagnosis import (
    Check,
    Dial,
    Ear,
    Facts,
    Gateway,
    Health,
    IdentityCopy,
    Member,
    Multicast,
    Named,
    Outcome,
    PortUse,
    Room,
    Severity,
    TorchFacts,
    Verdict,
)
from gpulayer_mesh.core.types import (
    Accelerator,
    Blocked,
    Device,
    DeviceProcess,
    Interface,
    TorchAbilities,
)

LAN = Interface("eth0", "ethernet", 1000, ("10.0.0.9/24", "fe80::9%eth0/64"))
WIFI = Interface("wlan0", "wifi", None, ("10.0.0.9/24",))
NODE = {name: f"{i:064x}" for i, name in enumerate(("laptop", "box-1", "box-2", "box-3"))}
TORCH = TorchAbilities("2.13.0+cpu", (Accelerator.CPU,), ("gloo",))
HEALTH = Health(wall_s=0.0, port=17433, wanted_port=17433)


def member(
    name: str, outcome: Outcome = Outcome.MEMBER, *, host: str = "", **more: object
) -> Member:
    host = host or f"10.0.0.{int(NODE[name], 16)}"
    answers = outcome is Outcome.MEMBER
    others = {NODE[n]: "" for n in ("box-1", "box-2", "box-3") if n != name}
    usual: dict[str, object] = {
        "state": "alive",
        "dials": (Dial(host, 17433, outcome, resolved=True),),
        "health": HEALTH if answers else None,
        "skew_s": 0.01 if answers else None,
        "reached": others if answers else None,
        "system": "Linux 6.8 x86_64",
    }
    return Member(node=NODE[name], name=name, **(usual | more))  # type: ignore[arg-type]


def healthy(**more: object) -> Facts:
    """A laptop without an agent and three boxes, all of them well."""
    members = tuple(member(name) for name in ("box-1", "box-2", "box-3"))
    heard = frozenset(f"10.0.0.{i}" for i in (1, 2, 3))
    usual: dict[str, object] = {
        "interfaces": (LAN,),
        "gateways": (Gateway("10.0.0.254", True),),
        "disk": Room(500_000, 100_000),
        "shared_memory": Room(8000, 8000),
        "port": PortUse(17433),
        "multicast": Multicast((Ear("eth0", own=True, others=heard),)),
        "torch": TorchFacts(TORCH),
        "in_mesh": True,
        "node": NODE["laptop"],
        "members": members,
    }
    return Facts(**(usual | more))  # type: ignore[arg-type]


def told(facts: Facts) -> list[tuple[Named, Severity, str]]:
    return [(v.name, v.severity, v.subject) for v in doctor.examine(facts).verdicts]


def only(facts: Facts) -> Verdict:
    (verdict,) = doctor.examine(facts).verdicts
    assert verdict.finding
    assert verdict.fix
    assert "\n" not in verdict.finding + verdict.fix
    return verdict


def among(facts: Facts, name: Named) -> Verdict:
    return next(v for v in doctor.examine(facts).verdicts if v.name is name)


def with_members(facts: Facts, *changed: Member) -> Facts:
    by_name = {m.name: m for m in facts.members} | {m.name: m for m in changed}
    return replace(facts, members=tuple(by_name.values()))


def test_nothing_is_wrong_with_a_healthy_mesh() -> None:
    report = doctor.examine(healthy())
    assert report.verdicts == ()
    assert report.checked == tuple(Check)


def test_what_was_not_checked_is_said_and_gives_no_verdict() -> None:
    why = {Check.DISK: "no answer within 3 s", Check.TORCH: "no answer within 8 s"}
    report = doctor.examine(healthy(disk=None, torch=None, unchecked=why))
    assert report.verdicts == ()
    assert report.unchecked == why
    assert not set(report.checked) & set(why)


def test_machine_without_a_mesh_is_told_so_as_a_note() -> None:
    facts = healthy(in_mesh=False, members=(), multicast=Multicast((Ear("eth0", own=True),)))
    assert told(facts) == [(Named.NO_MESH, Severity.NOTE, "")]
    problem = ("the key can be read by other users", "chmod 600 identity.key")
    assert only(replace(facts, state_problem=problem)).name is Named.STATE_UNUSABLE


def test_errors_come_before_warnings() -> None:
    facts = healthy(disk=Room(500, 3), port=PortUse(17433, ("TCP",), "nc (pid 7)"))
    assert [v.severity for v in doctor.examine(facts).verdicts] == ["error", "warning"]


# --- this machine --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free_mib", "severity"), [(2047, Severity.WARNING), (127, Severity.ERROR)]
)
def test_disk_with_little_room(free_mib: int, severity: Severity) -> None:
    assert told(healthy(disk=Room(100_000, free_mib))) == [(Named.DISK_FULL, severity, "")]
    box = member("box-2", health=replace(HEALTH, disk_free_mib=free_mib))
    assert told(with_members(healthy(), box)) == [(Named.DISK_FULL, severity, "box-2")]


def test_shared_memory_of_a_container_is_small() -> None:
    verdict = only(healthy(shared_memory=Room(64, 64), container="docker"))
    assert (verdict.name, verdict.severity) == (Named.SHARED_MEMORY_SMALL, Severity.WARNING)
    assert "--shm-size" in verdict.fix
    assert only(healthy(shared_memory=Room(8000, 3))).severity is Severity.ERROR
    box = member("box-1", health=replace(HEALTH, shared_memory=Room(64, 60)))
    assert only(with_members(healthy(), box)).subject == "box-1"


def test_port_that_somebody_else_has() -> None:
    verdict = only(healthy(port=PortUse(17433, ("TCP", "UDP"), "python3 (pid 31)")))
    assert verdict.name is Named.PORT_TAKEN
    assert "TCP and UDP port 17433 is taken by python3 (pid 31)" in verdict.finding
    assert only(healthy(multicast=Multicast(port_taken=True))).name is Named.PORT_TAKEN
    moved = replace(HEALTH, port=17434)
    assert told(healthy(health=moved)) == [(Named.PORT_TAKEN, Severity.WARNING, "")]
    assert only(with_members(healthy(), member("box-3", health=moved))).subject == "box-3"


GPU = Device(Accelerator.CUDA, 0, "NVIDIA L40S", "GPU-1", 46068, 46000)


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (TorchFacts(TORCH, driver_gpus=2), "2 GPUs cannot be used by torch 2.13.0+cpu: this build"),
        (TorchFacts(TORCH, hardware=("NVIDIA",)), "no driver of it is loaded"),
        (
            TorchFacts(
                replace(TORCH, version="2.13.0+cu128", problems=("cuda: driver is too old",)),
                driver_gpus=1,
            ),
            "driver is too old",
        ),
        (TorchFacts(replace(TORCH, version="2.13.0+cu128"), driver_gpus=1), "sees none"),
    ],
)  # not recorded: no such machine has run this
def test_gpu_that_torch_cannot_drive(torch: TorchFacts, words: str) -> None:
    verdict = only(healthy(torch=torch))
    assert (verdict.name, verdict.severity) == (Named.TORCH_CANNOT_DRIVE_GPU, Severity.ERROR)
    assert words in verdict.finding
    assert only(with_members(healthy(), member("box-1", torch=torch))).subject == "box-1"


def test_gpu_that_works_or_is_hidden_is_no_fault() -> None:
    both = replace(TORCH, accelerators=(Accelerator.CPU, Accelerator.CUDA))
    assert told(healthy(torch=TorchFacts(both, driver_gpus=1, devices=(GPU,)))) == []
    assert told(healthy(torch=TorchFacts(TORCH, hardware=("NVIDIA",), hidden=True))) == []


def test_torch_that_cannot_be_imported_or_is_not_there() -> None:
    broken = replace(TORCH, accelerators=(), problems=("torch: libcudart.so.12: not found",))
    verdict = only(healthy(torch=TorchFacts(broken)))
    assert (verdict.name, verdict.severity) == (Named.TORCH_UNUSABLE, Severity.ERROR)
    assert "libcudart.so.12" in verdict.finding
    assert told(healthy(torch=TorchFacts(None))) == [(Named.TORCH_UNUSABLE, Severity.WARNING, "")]


def test_gpu_that_somebody_has() -> None:
    both = replace(TORCH, accelerators=(Accelerator.CPU, Accelerator.CUDA))
    blocked = replace(GPU, blocked=Blocked((DeviceProcess(7, "python"),)))
    verdict = only(healthy(torch=TorchFacts(both, driver_gpus=1, devices=(blocked,))))
    assert verdict.name is Named.GPU_TAKEN
    assert "pid 7 (python)" in verdict.finding


# --- multicast -----------------------------------------------------------------------------------


def test_own_firewall_that_drops_multicast() -> None:
    verdict = only(healthy(multicast=Multicast((Ear("eth0"),))))
    assert verdict.name is Named.MULTICAST_BLOCKED
    assert "eth0" in verdict.finding
    assert "5353" in verdict.fix
    sent = only(healthy(multicast=Multicast((Ear("eth0", "ENETUNREACH"),))))
    assert "ENETUNREACH" in sent.finding


def test_members_that_answer_but_are_not_heard() -> None:
    some = Multicast((Ear("eth0", own=True, others=frozenset({"10.0.0.1", "10.0.0.77"})),))
    assert "box-2 and box-3" in only(healthy(multicast=some)).finding
    none = Multicast((Ear("eth0", own=True),))
    verdict = only(healthy(multicast=none))
    assert verdict.name is Named.MULTICAST_BLOCKED
    assert "IGMP" in verdict.finding
    assert "--peer" in verdict.fix


def test_members_elsewhere_or_without_multicast_are_not_expected_to_be_heard() -> None:
    far = with_members(
        healthy(multicast=Multicast((Ear("eth0", own=True),))),
        *(member(name, host=f"192.0.2.{i}") for i, name in enumerate(("box-1", "box-2"))),
        member("box-3", health=replace(HEALTH, multicast=False)),
    )
    assert told(far) == []


def test_member_whose_agent_cannot_use_mdns() -> None:
    silent = Multicast((Ear("eth0", own=True, others=frozenset({"10.0.0.2", "10.0.0.3"})),))
    box = member("box-1", health=replace(HEALTH, mdns="mDNS: another program keeps UDP port 5353"))
    verdict = only(with_members(healthy(multicast=silent), box))
    assert (verdict.name, verdict.subject) == (Named.MULTICAST_BLOCKED, "box-1")


def test_container_whose_network_passes_no_multicast() -> None:
    none = Multicast((Ear("eth0", own=True),))
    assert told(healthy(multicast=none, container="docker")) == [
        (Named.CONTAINER_WITHOUT_MULTICAST, Severity.WARNING, "")
    ]
    assert told(healthy(container="docker")) == []  # with the host's network
    own = healthy(multicast=Multicast((Ear("eth0"),)), container="docker")
    assert told(own) == [(Named.MULTICAST_BLOCKED, Severity.WARNING, "")]
    bridged = Interface("eth0", "ethernet", None, ("172.17.0.2/16",))
    alone = healthy(container="podman", interfaces=(bridged,), members=(), multicast=none)
    assert told(alone) == [(Named.CONTAINER_WITHOUT_MULTICAST, Severity.WARNING, "")]


def test_wsl_behind_nat() -> None:  # not recorded
    nat = Interface("eth0", "ethernet", None, ("172.29.240.3/20",))
    none = Multicast((Ear("eth0", own=True),))
    facts = healthy(wsl=True, interfaces=(nat,), multicast=none)
    assert told(facts) == [(Named.WSL_NAT, Severity.WARNING, "")]
    assert "mirrored" in only(facts).fix
    assert only(replace(facts, health=HEALTH)).severity is Severity.ERROR  # others need to get in
    assert told(healthy(wsl=True)) == []  # mirrored


def test_macos_without_permission_for_the_local_network() -> None:  # not recorded
    forbidden = tuple(member(name, Outcome.FORBIDDEN) for name in ("box-1", "box-2"))
    far = member("box-3", host="192.0.2.3", state="alive")
    ears = Multicast((Ear("en0", "EHOSTUNREACH"),))
    facts = healthy(system="Darwin", multicast=ears, members=(*forbidden, far))
    verdict = only(facts)
    assert (verdict.name, verdict.severity) == (Named.MACOS_LOCAL_NETWORK, Severity.ERROR)
    assert "machines elsewhere answer" in verdict.finding
    assert "Local Network" in verdict.fix
    # The same on Linux, or with one member that answers, is something else.
    assert Named.MACOS_LOCAL_NETWORK not in [n for n, _, _ in told(replace(facts, system="Linux"))]
    one = replace(facts, members=(*forbidden, member("box-3")))
    assert Named.MACOS_LOCAL_NETWORK not in [n for n, _, _ in told(one)]
    assert Named.MACOS_LOCAL_NETWORK in [
        n for n, _, _ in told(replace(facts, members=(), multicast=ears))
    ]


# --- members -------------------------------------------------------------------------------------


def apart(name: str) -> Member:
    dial = Dial(f"10.0.0.{int(NODE[name], 16)}", 17433, Outcome.SILENT, resolved=False)
    return member(name, Outcome.SILENT, dials=(dial,))


def test_access_point_that_isolates_its_clients() -> None:
    # box-3 hangs on a cable and sees all of them.
    facts = with_members(healthy(), apart("box-1"), apart("box-2"))
    verdict = among(facts, Named.WIFI_ISOLATION)
    assert verdict.severity is Severity.ERROR
    assert "box-1 and box-2" in verdict.finding
    assert "10.0.0.254" in verdict.finding
    assert Named.MEMBER_UNREACHABLE not in [name for name, _, _ in told(facts)]


def test_wifi_on_which_only_the_gateway_answers() -> None:
    silent = tuple(replace(apart(name), state="") for name in ("box-1", "box-2", "box-3"))
    facts = healthy(interfaces=(WIFI,), members=silent)
    assert told(facts) == [(Named.WIFI_ISOLATION, Severity.ERROR, "")]
    # On a cable they are more likely to be off.
    assert {name for name, _, _ in told(replace(facts, interfaces=(LAN,)))} == {
        Named.MEMBER_UNREACHABLE
    }


def test_firewall_is_no_isolation_for_the_link_answers() -> None:
    facts = with_members(healthy(), member("box-1", Outcome.SILENT))
    assert told(facts) == [(Named.MEMBER_UNREACHABLE, Severity.ERROR, "box-1")]


def test_firewall_that_lets_a_box_out_and_nobody_in() -> None:
    closed = {NODE["box-1"]: "10.0.0.1 port 17433: no answer"}
    met = replace(HEALTH, met={NODE["box-1"]: 12.0})
    facts = with_members(
        healthy(),
        member("box-1", Outcome.SILENT),
        member("box-2", reached=closed | {NODE["box-3"]: ""}, health=met),
        member("box-3", reached=closed | {NODE["box-2"]: ""}),
    )
    verdict = only(facts)
    assert (verdict.name, verdict.severity, verdict.subject) == (
        Named.FIREWALL_ONE_WAY, Severity.ERROR, "box-1",
    )  # fmt: skip
    assert "this machine, box-2 and box-3 cannot connect to box-1" in verdict.finding
    assert "box-1 connects to box-2" in verdict.finding
    assert "17433" in verdict.fix


def test_firewall_between_two_boxes_names_its_direction() -> None:
    closed = {NODE["box-1"]: "10.0.0.1 port 17433: no answer", NODE["box-3"]: ""}
    verdict = only(with_members(healthy(), member("box-2", reached=closed)))
    assert verdict.subject == "box-1"
    assert verdict.finding.startswith("box-2 cannot connect to box-1 (TCP port 17433)")


def test_firewall_of_this_machine_keeps_others_out() -> None:
    closed = {NODE["laptop"]: "10.0.0.9 port 17433: no answer"}
    facts = with_members(healthy(health=HEALTH), member("box-2", reached=closed))
    verdict = only(facts)
    assert (verdict.name, verdict.subject) == (Named.FIREWALL_ONE_WAY, "")
    assert "box-2 cannot connect to this machine" in verdict.finding


def test_requests_of_long_ago_prove_nothing() -> None:
    closed = {NODE["box-1"]: "no answer"}
    old = replace(HEALTH, met={NODE["box-1"]: doctor.MET_S})
    facts = with_members(
        healthy(),
        member("box-1", Outcome.SILENT),
        member("box-2", reached=closed, health=old),
    )
    assert told(facts) == [(Named.MEMBER_UNREACHABLE, Severity.ERROR, "box-1")]


def test_refused_connections_mean_that_the_agent_is_gone() -> None:
    closed = {NODE["box-1"]: "10.0.0.1 port 17433: connection refused"}
    met = replace(HEALTH, met={NODE["box-1"]: 12.0})
    facts = with_members(
        healthy(),
        member("box-1", Outcome.REFUSED),
        member("box-2", reached=closed, health=met),
    )
    verdict = only(facts)
    assert verdict.name is Named.MEMBER_UNREACHABLE
    assert verdict.fix == "start gpulayer-agent on box-1"


def test_member_that_is_dead_for_all_is_a_warning() -> None:
    facts = with_members(healthy(), member("box-1", Outcome.SILENT, state="dead"))
    assert told(facts) == [(Named.MEMBER_UNREACHABLE, Severity.WARNING, "box-1")]


def test_members_that_left_or_run_no_agent_are_not_missed() -> None:
    gone = [member(n, Outcome.REFUSED, state=s) for n, s in (("box-1", "left"), ("box-2", ""))]
    assert told(with_members(healthy(), *gone)) == []


def test_nobody_answers() -> None:
    nobody = tuple(
        member(name, outcome, state="")
        for name, outcome in (
            ("box-1", Outcome.REFUSED), ("box-2", Outcome.SILENT), ("box-3", Outcome.OTHER),
        )
    )  # fmt: skip
    facts = healthy(members=nobody)
    fixes = [v.fix for v in doctor.examine(facts).verdicts]
    assert {name for name, _, _ in told(facts)} == {Named.MEMBER_UNREACHABLE}
    assert "start gpulayer-agent on box-1" in fixes[0]
    assert "--peer" in fixes[2]


def test_udp_that_does_not_get_through_is_told_once() -> None:
    others = tuple(NODE[name] for name in ("box-2", "box-3"))
    facts = with_members(
        healthy(),
        member("box-1", health=replace(HEALTH, over_tcp=others)),
        member("box-2", health=replace(HEALTH, over_tcp=(NODE["box-1"],))),
    )
    verdict = only(facts)
    assert (verdict.name, verdict.subject) == (Named.UDP_BLOCKED, "box-1")
    assert "between box-1 and box-2 and box-3" in verdict.finding


def test_clock_of_one_member_is_off() -> None:
    verdict = only(with_members(healthy(), member("box-2", skew_s=43200.0)))
    assert (verdict.name, verdict.severity, verdict.subject) == (
        Named.CLOCK_SKEW, Severity.WARNING, "box-2",
    )  # fmt: skip
    assert "12.0 h ahead of" in verdict.finding
    # A slow answer says little about a clock.
    slow = member("box-2", skew_s=4.0, skew_error_s=3.0)
    assert told(with_members(healthy(), slow)) == []


def test_clock_that_differs_from_all_is_our_own() -> None:
    off = [member(n, skew_s=-300.0 + i / 10) for i, n in enumerate(("box-1", "box-2", "box-3"))]
    verdict = only(with_members(healthy(), *off))
    assert verdict.subject == ""
    assert "this machine's clock is 5 min ahead of" in verdict.finding


def test_copied_identity_is_named_with_both_addresses() -> None:
    copy = IdentityCopy("box-3", False, ("10.0.0.4",), ("10.0.0.3",), True)
    verdict = only(healthy(copies=(copy,)))
    assert (verdict.name, verdict.severity) == (Named.IDENTITY_COPIED, Severity.ERROR)
    assert "10.0.0.4" in verdict.finding
    assert "10.0.0.3" in verdict.finding
    assert only(healthy(copies=(replace(copy, answers=False),))).severity is Severity.WARNING
    ours = IdentityCopy("", True, ("10.0.0.4",), (), True)
    assert only(healthy(copies=(ours,))).subject == ""


def test_every_verdict_is_given_by_some_test_here() -> None:
    source = Path(__file__).read_text()
    assert [name for name in Named if f"Named.{name.name}" not in source] == []
