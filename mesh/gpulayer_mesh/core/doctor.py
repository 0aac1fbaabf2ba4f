"""The doctor: from facts to verdicts, each with its fix.

One function per cause. A fault that has a name (isolation, a firewall that lets one way through,
macOS' permission) takes the members that it explains out of the nameless `member-unreachable`, so
that nobody reads of one cause twice. Does not know how facts were gathered, nor how verdicts are
shown. Cost: members times `REACH_MAX`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Sequence

from gpulayer_mesh.core.devicecare import unfit
from gpulayer_mesh.core.diagnosis import (
    Check,
    Ear,
    Facts,
    Health,
    Member,
    Multicast,
    Named,
    Outcome,
    Report,
    Severity,
    TorchFacts,
    Verdict,
)
from gpulayer_mesh.core.types import Accelerator, NodeId

DISK_LOW_MIB = 2048  # the largest bundle of a job
DISK_FULL_MIB = 128  # logs, records and rosters cannot be kept for long
SHM_SMALL_MIB = 256  # Docker's default is 64; one loader worker's batches of images fill it
SHM_FULL_MIB = 16
SKEW_S = 2.0  # more than any clock that is kept by NTP is off
MET_S = 120.0  # each member turns to one of the others every 30 s
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
_FORBIDDEN = ("EHOSTUNREACH", "EPERM")
_NAMED_MAX = 4  # members in one sentence, the others are counted


def examine(facts: Facts) -> Report:
    """Return what is wrong, worst first."""
    found = [verdict for rule in _RULES for verdict in rule(facts)]
    found.sort(key=lambda verdict: _ORDER.index(verdict.severity))
    checked = tuple(check for check in Check if check not in facts.unchecked)
    return Report(tuple(found), checked, facts.unchecked)


# --- this machine --------------------------------------------------------------------------------


def _state(facts: Facts) -> Iterator[Verdict]:
    if facts.state_problem is not None:
        finding, fix = facts.state_problem
        yield Verdict(Named.STATE_UNUSABLE, Severity.ERROR, "", finding, fix)
    elif not facts.in_mesh:
        yield Verdict(
            Named.NO_MESH,
            Severity.NOTE,
            "",
            "this machine belongs to no mesh yet, so only the machine itself was looked at",
            "gpulayer mesh create, or gpulayer mesh join LINE",
        )


def _disk(facts: Facts) -> Iterator[Verdict]:
    where = f" of {facts.disk_path}" if facts.disk_path else ""
    places = [("", facts.disk.free_mib if facts.disk else None, where)]
    places += [(m.name, m.health.disk_free_mib, "") for m in facts.members if m.health]
    for subject, free_mib, what in places:
        if free_mib is None or free_mib >= DISK_LOW_MIB:
            continue
        full = free_mib < DISK_FULL_MIB
        yield Verdict(
            Named.DISK_FULL,
            Severity.ERROR if full else Severity.WARNING,
            subject,
            f"the disk{what} has {free_mib:,} MiB left, "
            + ("too little to run jobs" if full else "less than the files of a large job take"),
            "make room there, or have GPULAYER_HOME name a folder on another disk",
        )


def _shared_memory(facts: Facts) -> Iterator[Verdict]:
    places = [("", facts.shared_memory, bool(facts.container))]
    places += [(m.name, m.health.shared_memory, False) for m in facts.members if m.health]
    for subject, room, container in places:
        if room is not None and (room.total_mib < SHM_SMALL_MIB or room.free_mib < SHM_FULL_MIB):
            yield Verdict(
                Named.SHARED_MEMORY_SMALL,
                Severity.ERROR if room.free_mib < SHM_FULL_MIB else Severity.WARNING,
                subject,
                f"/dev/shm has {room.free_mib:,} of {room.total_mib:,} MiB left; loader workers "
                "hand batches over there and are killed when it is full",
                "start the container with --shm-size=8g"
                if container
                else "sudo mount -o remount,size=8g /dev/shm, in a container --shm-size=8g",
            )


def _port(facts: Facts) -> Iterator[Verdict]:
    port = facts.port
    if port is not None and port.agent is None and port.taken:
        by = port.holder or "another program"
        yield Verdict(
            Named.PORT_TAKEN,
            Severity.WARNING,
            "",
            f"{' and '.join(port.taken)} port {port.wanted} is taken by {by}; an agent started "
            "now takes the next free one, which a firewall may not let through",
            f"end {by}, or choose a port with gpulayer-agent --port N",
        )
    own = [("", facts.health)] if facts.health else []
    for subject, health in own + [(m.name, m.health) for m in facts.members]:
        if health is not None and health.port != health.wanted_port:
            yield Verdict(
                Named.PORT_TAKEN,
                Severity.WARNING,
                subject,
                f"port {health.wanted_port} was taken when the agent started, so it uses "
                f"{health.port}, which a firewall may not let through",
                f"let TCP and UDP {health.port} through, or free {health.wanted_port} and start "
                "the agent again",
            )


def _torch(facts: Facts) -> Iterator[Verdict]:
    places = [("", facts.torch)] + [(m.name, m.torch) for m in facts.members]
    for subject, torch in places:
        if torch is not None:
            yield from _torch_of(subject, torch)
            for device in torch.devices:
                if (why := unfit(device)) is not None:
                    yield Verdict(
                        Named.GPU_TAKEN,
                        Severity.WARNING,
                        subject,
                        f"GPU {device.index} ({device.name}) {why}",
                        "end that program on that machine; `gpulayer mesh status` shows when the "
                        "GPU is free",
                    )


def _torch_of(subject: str, torch: TorchFacts) -> Iterator[Verdict]:
    if torch.abilities is None:
        yield Verdict(
            Named.TORCH_UNUSABLE,
            Severity.WARNING,
            subject,
            "torch is not installed in the environment of the ranks, so no training can run here",
            "install it there as https://pytorch.org says, or start the agent with --python PATH",
        )
        return
    works = torch.abilities.accelerators
    failed = [p for p in torch.abilities.problems if p.startswith("torch:")]
    if not works and failed:
        yield Verdict(
            Named.TORCH_UNUSABLE,
            Severity.ERROR,
            subject,
            f"torch cannot be used: {failed[0].removeprefix('torch: ')}",
            "install torch anew in the environment of the ranks",
        )
        return
    if torch.hidden or any(kind is not Accelerator.CPU for kind in works):
        return
    reasons = [p for p in torch.abilities.problems if p.split(":")[0] in ("cuda", "rocm", "mps")]
    build = torch.abilities.version
    if reasons:
        why, fix = reasons[0], "install a driver and a torch build that fit each other and the GPU"
    elif torch.hardware and not torch.driver_gpus:
        why, fix = "no driver of it is loaded", "install the GPU's driver and restart the machine"
    elif torch.driver_gpus and ("cpu" in build or "+" not in build):
        why, fix = "this build of torch has no CUDA", "install a CUDA build of torch there"
    elif torch.driver_gpus:
        why, fix = (
            "torch sees none of them",
            "update the driver, or install a torch build that is made for it",
        )
    else:
        return
    count = torch.driver_gpus or len(torch.hardware)
    yield Verdict(
        Named.TORCH_CANNOT_DRIVE_GPU,
        Severity.ERROR,
        subject,
        f"{count or 'a'} GPU{'s' if count > 1 else ''} cannot be used by torch {build}: {why}",
        f"{fix} (https://pytorch.org, Get Started)",
    )


# --- multicast, and where this machine stands ----------------------------------------------------


def _multicast(facts: Facts) -> Iterator[Verdict]:
    multicast = facts.multicast
    if multicast is None:
        return
    if multicast.port_taken:
        by = multicast.holder or "another program"
        yield Verdict(
            Named.PORT_TAKEN,
            Severity.WARNING,
            "",
            f"UDP port 5353 is kept by {by}, which does not share it, so mDNS cannot be used",
            f"end {by}, or if it is avahi: disallow-other-stacks=no in avahi-daemon.conf",
        )
        return
    if _mac_forbids(facts):
        return
    deaf = [ear for ear in multicast.ears if ear.error or not ear.own]
    for ear in deaf:
        yield _cannot_hear_itself(facts, ear)
    if not deaf:
        yield from _silent_members(facts, multicast)


def _cannot_hear_itself(facts: Facts, ear: Ear) -> Verdict:
    finding = (
        f"multicast cannot be sent on {ear.interface}: {ear.error}"
        if ear.error
        else f"mDNS questions sent on {ear.interface} do not come back even to this machine: its "
        "own firewall drops UDP port 5353"
    )
    fix = "give the interface a multicast route" if ear.error else _let_mdns_in(facts.system)
    return Verdict(Named.MULTICAST_BLOCKED, Severity.WARNING, "", finding, fix)


def _silent_members(facts: Facts, multicast: Multicast) -> Iterator[Verdict]:
    """Who answers to a connection on our own network, and yet is not heard there."""
    heard = {_bare(host) for ear in multicast.ears for host in ear.others}
    expected = [
        m
        for m in facts.members
        if m.health
        and m.health.multicast
        and not m.health.mdns
        and any(d.outcome is Outcome.MEMBER and _near(facts, d.host) for d in m.dials)
    ]
    silent = [m for m in expected if not {_bare(dial.host) for dial in m.dials} & heard]
    if not silent:
        return
    everybody = len(silent) == len(expected)
    if everybody and (facts.container or facts.wsl):
        return  # named by the rules of these
    yield Verdict(
        Named.MULTICAST_BLOCKED,
        Severity.WARNING,
        "",
        f"mDNS of {_names(silent)} does not arrive here, though connections to "
        f"{'it' if len(silent) == 1 else 'them'} work: a firewall "
        + (
            "or the network (Wi-Fi, IGMP snooping) drops UDP port 5353"
            if everybody
            else "there drops UDP port 5353"
        ),
        "let UDP 5353 through, or name one member: gpulayer-agent --peer HOST:PORT",
    )


def _members_multicast(facts: Facts) -> Iterator[Verdict]:
    for member in facts.members:
        if member.health and member.health.mdns:
            yield Verdict(
                Named.MULTICAST_BLOCKED,
                Severity.WARNING,
                member.name,
                f"its agent cannot use mDNS: {member.health.mdns.removeprefix('mDNS: ')}",
                "run gpulayer doctor there; until then it is found by remembered addresses and "
                "--peer HOST:PORT",
            )


def _container(facts: Facts) -> Iterator[Verdict]:
    if facts.container and not facts.wsl and _hears_nobody(facts):
        yield Verdict(
            Named.CONTAINER_WITHOUT_MULTICAST,
            Severity.WARNING,
            "",
            f"this is a container ({facts.container}) whose network passes no multicast, so "
            "members cannot find it, nor it them, by mDNS",
            "start the container with --network host, or name one member: gpulayer-agent --peer "
            "HOST:PORT",
        )


def _wsl(facts: Facts) -> Iterator[Verdict]:
    """WSL 2's NAT gives the machine one address of 172.16.0.0/12; mirrored mode, Windows' own."""
    own = [ip for ip in _addresses(facts) if ip.version == 4]
    if facts.wsl and own and all(ip in _DOCKER_AND_WSL for ip in own):
        yield Verdict(
            Named.WSL_NAT,
            Severity.ERROR if facts.health else Severity.WARNING,
            "",
            f"this is WSL behind the NAT of Windows ({own[0]}): others cannot connect to it, and "
            "multicast does not pass",
            "put networkingMode=mirrored under [wsl2] in %UserProfile%\\.wslconfig, run "
            "wsl --shutdown, and let TCP and UDP 17433 through Windows' firewall",
        )


_DOCKER_AND_WSL = ipaddress.ip_network("172.16.0.0/12")


def _hears_nobody(facts: Facts) -> bool:
    """Whether multicast ends at a bridge: no member is heard, or the address is of such a one."""
    ears = facts.multicast.ears if facts.multicast else ()
    if any(ear.others or not ear.own for ear in ears):
        return False  # somebody is heard, or this machine's own firewall is in the way
    if any(m.health and m.health.multicast for m in facts.members):
        return bool(ears)
    own = [ip for ip in _addresses(facts) if ip.version == 4]
    return bool(own) and all(ip in _DOCKER_AND_WSL for ip in own)


def _mac(facts: Facts) -> Iterator[Verdict]:
    if _mac_forbids(facts):
        far = any(
            d.outcome in (Outcome.MEMBER, Outcome.REFUSED) and not _near(facts, d.host)
            for m in facts.members
            for d in m.dials
        )
        yield Verdict(
            Named.MACOS_LOCAL_NETWORK,
            Severity.ERROR,
            "",
            "macOS keeps this program off the local network (EHOSTUNREACH for everything on it"
            + (", though machines elsewhere answer)" if far else ")"),
            "System Settings > Privacy & Security > Local Network: allow the terminal or app that "
            "started this, then start it again",
        )


def _mac_forbids(facts: Facts) -> bool:
    if facts.system != "Darwin":
        return False
    ears = facts.multicast.ears if facts.multicast else ()
    near = [d.outcome for m in facts.members for d in m.dials if _near(facts, d.host)]
    if any(outcome in (Outcome.MEMBER, Outcome.REFUSED) for outcome in near):
        return False
    sends_forbidden = bool(ears) and all(ear.error in _FORBIDDEN for ear in ears)
    return sends_forbidden or (bool(near) and all(outcome is Outcome.FORBIDDEN for outcome in near))


# --- members -------------------------------------------------------------------------------------


def _isolated(facts: Facts) -> list[Member]:
    """Members on our own network whom nothing of ours reaches, while its gateway answers.

    A firewall drops connections and still tells its link-layer address; an access point that
    isolates its clients passes nothing at all.
    """
    if not any(gateway.answers and _near(facts, gateway.host) for gateway in facts.gateways):
        return []
    wifi = any(i.kind == "wifi" for i in facts.interfaces)
    found = []
    for member in facts.members:
        near = [d for d in member.dials if _near(facts, d.host)]
        cut = bool(near) and all(
            d.outcome in (Outcome.SILENT, Outcome.FORBIDDEN) and not d.resolved for d in near
        )
        seen = member.state == "alive" or (wifi and not member.state)
        if cut and not member.answers and seen and any(d.resolved is False for d in near):
            found.append(member)
    return found


def _isolation(facts: Facts) -> Iterator[Verdict]:
    isolated = [] if _mac_forbids(facts) else _isolated(facts)
    if isolated:
        gateway = next(g.host for g in facts.gateways if g.answers)
        yield Verdict(
            Named.WIFI_ISOLATION,
            Severity.ERROR,
            "",
            f"the network keeps its clients apart: the gateway {gateway} answers, "
            f"{_names(isolated)} on the same network {'is' if len(isolated) == 1 else 'are'} not "
            "even seen",
            "turn off client isolation (AP isolation, guest network, private VLAN) in the access "
            "point or switch, or use a cable or a VPN",
        )


def _one_way(facts: Facts) -> Iterator[Verdict]:
    for member in _one_way_members(facts):
        blocked = [who for who, failed in _inwards(facts, member) if failed]
        proof = _outwards(facts, member)
        port = member.health.port if member.health else _port_of(member)
        yield Verdict(
            Named.FIREWALL_ONE_WAY,
            Severity.ERROR,
            member.name,
            f"{_listed(blocked)} cannot connect to {member.name} (TCP port {port}), though "
            f"{member.name} connects to {_listed(proof)}: a firewall lets only one way through",
            f"on {member.name}: {_let_agent_in(member.system, port)}",
        )
    ours = _kept_from_us(facts)
    if ours:
        port = facts.health.port if facts.health else 0
        yield Verdict(
            Named.FIREWALL_ONE_WAY,
            Severity.ERROR,
            "",
            f"{_names(ours)} cannot connect to this machine (TCP port {port}), though this machine "
            f"connects to {'it' if len(ours) == 1 else 'them'}: a firewall lets only one way "
            "through",
            f"on this machine: {_let_agent_in(facts.system, port)}",
        )


def _one_way_members(facts: Facts) -> list[Member]:
    # Where connections are refused the machine is there and its agent is not: it said farewell to
    # nobody, and what it asked for a minute ago proves nothing.
    gone = [
        member
        for member in facts.members
        if not member.health and any(d.outcome is Outcome.REFUSED for d in member.dials)
    ]
    return [
        member
        for member in facts.members
        if not any(member is one for one in gone)
        and any(failed for _, failed in _inwards(facts, member))
        and _outwards(facts, member)
    ]


def _inwards(facts: Facts, member: Member) -> list[tuple[str, bool]]:
    """Return who tried to connect to a member, and whether that failed."""
    found = []
    if member.dials and not any(member is one for one in _isolated(facts)):
        found.append(("this machine", not member.answers))
    for other in facts.members:
        if other.reached is not None and member.node in other.reached:
            found.append((other.name, bool(other.reached[member.node])))
    return found


def _outwards(facts: Facts, member: Member) -> list[str]:
    """Return those who cannot connect to a member, and yet hear from it."""
    back = {node for node, failure in (member.reached or {}).items() if not failure}
    found = []
    if not member.answers and (facts.node in back or _meets(facts.health, member.node)):
        found.append("this machine")
    for other in facts.members:
        failed = bool((other.reached or {}).get(member.node))
        if failed and (other.node in back or _meets(other.health, member.node)):
            found.append(other.name)
    return found


def _kept_from_us(facts: Facts) -> list[Member]:
    return [
        m
        for m in facts.members
        if facts.health and m.answers and m.reached is not None and m.reached.get(facts.node)
    ]


def _unreachable(facts: Facts) -> Iterator[Verdict]:
    """What has no better name."""
    if _mac_forbids(facts):
        return
    named = [*_isolated(facts), *_one_way_members(facts)]
    alone = not any(m.answers for m in facts.members) and facts.health is None
    for member in facts.members:
        tried = [d for d in member.dials if d.outcome is not Outcome.MEMBER]
        if member.answers or any(member is one for one in named) or not tried:
            continue
        dead = member.state in ("dead", "suspect")
        if not dead and not alone and member.state != "alive":
            continue  # it runs no agent, or has left: nobody is to answer
        where = "; ".join(f"{d.host} port {d.port}: {d.words or d.outcome}" for d in tried[:2])
        yield Verdict(
            Named.MEMBER_UNREACHABLE,
            Severity.WARNING if dead else Severity.ERROR,
            member.name,
            f"{member.name} answers nobody: it is off, asleep or cut off ({where})"
            if dead
            else f"{member.name} does not answer this machine ({where})",
            _unreachable_fix([d.outcome for d in tried], member.name),
        )


def _unreachable_fix(outcomes: Sequence[Outcome], name: str) -> str:
    if Outcome.REFUSED in outcomes:
        return f"start gpulayer-agent on {name}"
    if Outcome.OTHER in outcomes:
        return f"{name} has another address now: gpulayer-agent --peer HOST:PORT on one of both"
    return f"is {name} on, and on this network? then let TCP and UDP 17433 through its firewall"


def _udp(facts: Facts) -> Iterator[Verdict]:
    names = {m.node: m.name for m in facts.members} | {facts.node: "this machine"}
    pairs: dict[NodeId, set[str]] = {}
    own = [(facts.node, facts.health)]
    for node, health in own + [(m.node, m.health) for m in facts.members]:
        for other in health.over_tcp if health else ():
            if other in names:
                pairs.setdefault(node, set()).add(names[other])
                pairs.setdefault(other, set()).add(names[node])
    told: set[str] = set()
    # Who has most such links is the likely cause; the pairs of others follow from it.
    for node in sorted(pairs, key=lambda node: (-len(pairs[node]), names[node])):
        rest = sorted(pairs[node] - told)
        if rest:
            told.add(names[node])
            yield Verdict(
                Named.UDP_BLOCKED,
                Severity.WARNING,
                "" if node == facts.node else names[node],
                f"UDP does not get through between {names[node]} and {_listed(rest)}; they use TCP",
                "let UDP through on the port of the agents, 17433 if none was chosen",
            )


def _clock(facts: Facts) -> Iterator[Verdict]:
    off = [
        (m, m.skew_s)
        for m in facts.members
        if m.skew_s is not None and abs(m.skew_s) - m.skew_error_s > SKEW_S
    ]
    asked = sum(m.skew_s is not None for m in facts.members)
    agree = max((s for _, s in off), default=0.0) - min((s for _, s in off), default=0.0) < SKEW_S
    harm = "jobs do not depend on it, but times of logs and files, and certificates elsewhere, do"
    if len(off) >= 2 and len(off) == asked and agree:
        yield Verdict(
            Named.CLOCK_SKEW,
            Severity.WARNING,
            "",
            f"this machine's clock is {_span(-off[0][1])} those of all others; {harm}",
            _set_clock(facts.system),
        )
        return
    for member, skew_s in off:
        yield Verdict(
            Named.CLOCK_SKEW,
            Severity.WARNING,
            member.name,
            f"its clock is {_span(skew_s)} this machine's; {harm}",
            _set_clock(member.system),
        )


def _copied(facts: Facts) -> Iterator[Verdict]:
    for copy in facts.copies:
        who = "this machine" if copy.here else copy.name
        at = f" at {_listed(copy.ours)}" if copy.ours else ""
        yield Verdict(
            Named.IDENTITY_COPIED,
            Severity.ERROR if copy.answers else Severity.WARNING,
            "" if copy.here else copy.name,
            f"the identity of {who}{at} is used at {_listed(copy.hosts)} as well: a state folder "
            "or disk image was copied"
            + ("" if copy.answers else "; nobody answers there now, so it may be over"),
            "on the copy: stop its agent, remove its identity.key and its folder mesh, and join "
            "again"
            if copy.answers
            else f"if it is over, start the agent of {copy.name or 'this machine'} again",
        )


_RULES: tuple[Callable[[Facts], Iterable[Verdict]], ...] = (
    _state,
    _mac,
    _wsl,
    _isolation,
    _one_way,
    _unreachable,
    _copied,
    _torch,
    _disk,
    _shared_memory,
    _port,
    _multicast,
    _container,
    _members_multicast,
    _udp,
    _clock,
)


# --- words ---------------------------------------------------------------------------------------


def _let_agent_in(system: str, port: int) -> str:
    if system.startswith("Darwin"):
        return "System Settings > Network > Firewall: allow incoming connections for python"
    return (
        f"sudo ufw allow {port}, or sudo firewall-cmd --permanent --add-port={port}/tcp "
        f"--add-port={port}/udp and sudo firewall-cmd --reload"
    )


def _let_mdns_in(system: str) -> str:
    if system.startswith("Darwin"):
        return "System Settings > Network > Firewall: allow incoming connections for python"
    return (
        "sudo ufw allow 5353/udp, or sudo firewall-cmd --permanent --add-service=mdns and "
        "sudo firewall-cmd --reload"
    )


def _set_clock(system: str) -> str:
    if system.startswith("Darwin"):
        return "System Settings > General > Date & Time: set time automatically"
    return "sudo timedatectl set-ntp true"


def _span(seconds: float) -> str:
    """Say by how much, and in which direction."""
    size = abs(seconds)
    if size < 120:
        text = f"{size:.0f} s"
    elif size < 7200:
        text = f"{size / 60:.0f} min"
    else:
        text = f"{size / 3600:.1f} h"
    return f"{text} {'ahead of' if seconds > 0 else 'behind'}"


def _names(members: Sequence[Member]) -> str:
    return _listed([member.name for member in members])


def _listed(words: Sequence[str]) -> str:
    if len(words) > _NAMED_MAX:
        words = [*words[: _NAMED_MAX - 1], f"{len(words) - _NAMED_MAX + 1} more"]
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


# --- addresses -----------------------------------------------------------------------------------


def _addresses(facts: Facts) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return ours on what may be a LAN."""
    return [
        ipaddress.ip_interface(address).ip
        for interface in facts.interfaces
        if interface.kind in ("ethernet", "wifi")
        for address in interface.addresses
    ]


def _near(facts: Facts, host: str) -> bool:
    """Whether a host is on one of our own networks."""
    ip = ipaddress.ip_address(host)
    return any(
        ip in ipaddress.ip_interface(address).network
        for interface in facts.interfaces
        if interface.kind in ("ethernet", "wifi")
        for address in interface.addresses
    )


def _bare(host: str) -> str:
    return host.partition("%")[0]


def _meets(health: Health | None, node: NodeId) -> bool:
    """Whether requests of a node come to the agent that said this."""
    return health is not None and health.met.get(node, MET_S) < MET_S


def _port_of(member: Member) -> int:
    return member.dials[0].port if member.dials else 0
