"""Which nodes and devices a job gets: a pure function of request and snapshot that explains itself.

Only workers that are alive count. On several nodes torch and Python must agree in their minor
version (the largest agreeing group is used), accelerators are never mixed, and the nodes should
share zone and hardware before anything else, then be well wired (`wires`), which also decides the
order of the ranks. Where one zone is too small, few are used. Every other node is refused with its
reason, and whether waiting could change it. Cost: `benchmarks/placement.py` prints it.

This module does not know how to reserve what it planned; the snapshot may be seconds old, so the
nodes have the last word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Literal

from gpulayer_mesh.core import versions as version_rows
from gpulayer_mesh.core.devicecare import unfit, users
from gpulayer_mesh.core.interconnect import fastest_ring
from gpulayer_mesh.core.jobspec import Slot
from gpulayer_mesh.core.speed import SlowLink
from gpulayer_mesh.core.types import (
    Accelerator,
    Capabilities,
    Device,
    Grant,
    Link,
    MemberSnapshot,
    NodeId,
    NodeState,
    Role,
    Snapshot,
)
from gpulayer_mesh.core.wires import Wires
from gpulayer_mesh.errors import ConfigError, PlacementBusyError, PlacementError, Refusal, Versions

NODES_MAX = 1024  # slots of a job spec
PROCESSES_MAX = 1024  # of one slot
_HOLDERS = 3  # jobs, programs or blocked devices named per busy node; its own list has all
# What "auto" tries in turn. MPS has no collectives, so it only serves one process.
_PREFERENCE = (Accelerator.CUDA, Accelerator.ROCM, Accelerator.MPS, Accelerator.CPU)


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for."""

    nodes: int = 1
    devices: int | Literal["auto"] = "auto"  # per node; "auto": every free one, or one process
    accelerator: Accelerator | None = None  # None: the best that enough nodes have
    # "auto" or "mesh": any; node names, ids, "zone:NAME", and "!" before any of them to exclude.
    target: str | tuple[str, ...] = "auto"
    torch: bool = True  # the job needs torch on its nodes


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the job goes and why. `slots[0]` is the keeper's node."""

    slots: tuple[Slot, ...]
    accelerator: Accelerator
    chosen: tuple[tuple[str, str], ...]  # (node name, why), in slot order
    refused: tuple[Refusal, ...]  # every other member
    warnings: tuple[str, ...] = ()
    versions: tuple[Versions, ...] = ()  # of the chosen, where they differ
    slowest: SlowLink | None = None  # on the ring of the chosen; None: not all are measured

    @property
    def world_size(self) -> int:
        return sum(slot.processes for slot in self.slots)


@dataclass(frozen=True, slots=True)
class _Fit:
    """A node that can take its part now."""

    position: int  # in `Snapshot.members`
    member: MemberSnapshot
    caps: Capabilities
    processes: int
    devices: tuple[Device, ...]  # free ones of the accelerator; may be more than asked
    rtt_ms: float

    def order(self, auto: bool) -> tuple[object, ...]:
        """Better nodes first."""
        memory = (
            min((device.memory_free_mib or 0) for device in self.devices)
            if self.devices
            else self.caps.memory_available_mib
        )
        return (
            -self.processes if auto else 0,
            -(memory // 1024),  # whole GiB: less is noise
            len(self.member.grants),
            self.rtt_ms,
            self.member.name,
            self.member.node,
        )

    @property
    def hardware(self) -> tuple[object, ...]:
        if self.devices:
            return (self.processes, *sorted({device.name for device in self.devices}))
        return (self.caps.cpus,)


@dataclass(slots=True)
class _Attempt:
    """The mesh seen with one accelerator."""

    accelerator: Accelerator
    fits: list[_Fit]
    refused: list[Refusal]
    later: list[_Fit]  # nodes that could take their part once they are free
    versions: tuple[Versions, ...] = ()  # of all that would fit, where these differ too much

    @property
    def ever(self) -> int:
        return len(self.fits) + len(self.later)

    @property
    def hoped(self) -> int:
        """With the nodes of which it is not known yet: suspect, or still testing their torch."""
        return len(self.fits) + sum(not refusal.for_ever for refusal in self.refused)


def plan(request: Request, snapshot: Snapshot, kept: Mapping[NodeId, str] | None = None) -> Plan:
    """Choose nodes and devices.

    Args:
        kept: nodes that are not for this job yet, and why: somebody else comes first there. What
            a node runs is a better reason, as nobody gets it before that has ended.

    Raises:
        ConfigError: the request itself makes no sense.
        PlacementBusyError: it fits the mesh, but not now.
        PlacementError: it can never be placed on the mesh as it is.
    """
    _check_request(request)
    attempt, passed_over = _survey(request, snapshot, kept or {})
    if len(attempt.fits) >= request.nodes:
        return _choose(attempt, request, snapshot.links, passed_over=passed_over)
    refusals = tuple(attempt.refused)
    counted = tuple(fit.member.name for fit in attempt.fits)
    if attempt.hoped >= request.nodes:
        raise PlacementBusyError(
            f"{_what(request, attempt.accelerator)}, {len(attempt.fits)} free now: "
            f"{_holders(refusals)}",
            refusals=refusals,
            counted=counted,
            versions=attempt.versions,
        )
    can = f"only {attempt.hoped}" if attempt.hoped else "none"
    raise PlacementError(
        f"{_what(request, request.accelerator)}, but {can} of the mesh's "
        f"{len(snapshot.members)} members can ever do it",
        refusals=refusals,
        counted=counted,
        versions=attempt.versions,
        hint="`gpulayer mesh status` shows what each node has",
    )


def candidates(
    request: Request, snapshot: Snapshot, kept: Mapping[NodeId, str] | None = None
) -> tuple[NodeId, ...]:
    """Return all nodes that could take part, busy ones included; none if they are too few.

    Too few means that nobody knows yet whether the request can ever run.
    """
    attempt, _ = _survey(request, snapshot, kept or {})
    if attempt.ever < request.nodes:
        return ()
    return tuple(fit.member.node for fit in (*attempt.fits, *attempt.later))


def _survey(
    request: Request, snapshot: Snapshot, kept: Mapping[NodeId, str]
) -> tuple[_Attempt, list[_Attempt]]:
    """Return the mesh seen with the accelerator to use, and those passed over before it."""
    wanted = _target(request.target, snapshot)
    attempts: list[_Attempt] = []
    for accelerator in _accelerators(request):
        attempt = _agreeing(_look(request, accelerator, snapshot, wanted, kept), request)
        if attempt.ever >= request.nodes:
            return attempt, attempts
        attempts.append(attempt)
    # Nothing fits for certain; the accelerator that comes closest explains best.
    best = max(reversed(attempts), key=lambda a: (a.hoped >= request.nodes, a.hoped))
    return best, attempts


def _check_request(request: Request) -> None:
    if not 1 <= request.nodes <= NODES_MAX:
        raise ConfigError(f"nodes must be 1 to {NODES_MAX}, not {request.nodes!r}")
    if request.devices != "auto" and not 1 <= request.devices <= PROCESSES_MAX:
        raise ConfigError(f"devices must be 'auto' or 1 to {PROCESSES_MAX}, not {request.devices}")
    if request.accelerator is Accelerator.MPS and not _single(request):
        raise PlacementError(
            "accelerator 'mps' runs one process: it has no collectives for more",
            hint="use nodes=1, devices=1, or accelerator='cpu'",
        )


def target_problem(target: object) -> str | None:
    """Return what is wrong with a target whatever the mesh looks like, None if nothing is."""
    parts = (target,) if isinstance(target, str) else target
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return f"target must be a node name or a list of them, got {target!r}"
    if not parts:
        return "target is an empty list: it names no machine"
    for part in parts:
        if part.removeprefix("!") in ("", "zone:"):
            return f"target {part!r} names no machine: write NODE, zone:NAME, !NODE or auto"
    return None


def _single(request: Request) -> bool:
    return request.nodes == 1 and request.devices in (1, "auto")


def _accelerators(request: Request) -> tuple[Accelerator, ...]:
    if request.accelerator is not None:
        return (request.accelerator,)
    return tuple(a for a in _PREFERENCE if a is not Accelerator.MPS or _single(request))


def _target(
    target: str | tuple[str, ...], snapshot: Snapshot
) -> Callable[[MemberSnapshot], tuple[bool, bool]]:
    """Return a test of a member: (is it meant, was it named itself)."""
    parts = (target,) if isinstance(target, str) else target
    unknown = []
    only: list[str] = []
    never: list[str] = []
    for part in parts:
        name = part.removeprefix("!")
        if part in ("auto", "mesh"):
            continue
        if not any(_matches(name, member) for member in snapshot.members):
            unknown.append(name)
        (never if part.startswith("!") else only).append(name)
    if unknown:
        names = ", ".join(sorted({member.name for member in snapshot.members})[:20])
        zones = ", ".join(sorted({member.zone for member in snapshot.members} - {""})[:20])
        raise PlacementError(
            f"no node or zone is called {', '.join(map(repr, unknown))}",
            hint=f"the mesh has {names}" + (f"; zones {zones}" if zones else ""),
        )

    def test(member: MemberSnapshot) -> tuple[bool, bool]:
        named = any(_matches(name, member) for name in only)
        excluded = any(_matches(name, member) for name in never)
        alone = any(not name.startswith("zone:") and _matches(name, member) for name in only)
        return (named or not only) and not excluded, alone

    return test


def _matches(name: str, member: MemberSnapshot) -> bool:
    if name.startswith("zone:"):
        return member.zone == name.removeprefix("zone:")
    # Two nodes may share a name; eight digits of the id tell them apart.
    return name == member.name or (len(name) >= 8 and member.node.startswith(name))


def _look(
    request: Request,
    accelerator: Accelerator,
    snapshot: Snapshot,
    wanted: Callable[[MemberSnapshot], tuple[bool, bool]],
    kept: Mapping[NodeId, str],
) -> _Attempt:
    attempt = _Attempt(accelerator, [], [], [])
    for position, member in enumerate(snapshot.members):
        meant, named = wanted(member)
        caps = member.caps
        why = _unusable(request, accelerator, member, meant, named)
        if why is not None:
            attempt.refused.append(Refusal(member.name, *why))
            continue
        if caps is None:
            attempt.refused.append(Refusal(member.name, "has not told what it has yet", False))
            continue
        devices, processes, why = _part(request, accelerator, member, caps)
        if member.node in kept and why is None:
            why = (kept[member.node], False)
        if member.node == snapshot.answered_by:
            rtt_ms = 0.0
        else:
            rtt_ms = inf if member.rtt_ms is None else member.rtt_ms
        fit = _Fit(position, member, caps, processes, devices, rtt_ms)
        if why is None:
            attempt.fits.append(fit)
        else:
            attempt.refused.append(Refusal(member.name, *why))
            if not why[1]:
                attempt.later.append(fit)
    return attempt


def _unusable(
    request: Request, accelerator: Accelerator, member: MemberSnapshot, meant: bool, named: bool
) -> tuple[str, bool] | None:
    """What rules a member out before its devices are counted."""
    if Role.WORKER not in member.roles:
        return "does not accept jobs: not a worker", True
    if not meant:
        return "is not among the targets", True
    if member.state is None:
        return "runs no agent", True
    if member.state is NodeState.SUSPECT:
        return f"is suspect: no answer for {_silence(member)}", False
    if member.state is NodeState.LEFT:
        return "has left: its agent was stopped", True
    if member.state is not NodeState.ALIVE:
        return f"is dead: no answer for {_silence(member)}", True
    caps = member.caps
    if caps is None:
        return None
    if request.nodes > 1 and not named and caps.os.startswith(("Darwin", "macOS")):
        # Gloo groups with a Mac hang (pytorch/pytorch#148440, still open).
        return "is a Mac: left out of jobs on several nodes unless named in target", True
    if request.torch:
        if caps.torch is None:
            return "has no torch, or is still testing it", False
        if accelerator is not Accelerator.CPU and accelerator not in caps.torch.accelerators:
            said = next((p for p in caps.torch.problems if p.startswith(accelerator.value)), "")
            if not any(device.kind is accelerator for device in caps.devices):
                return f"has no {accelerator.value} device", True
            return said or f"its torch {caps.torch.version} cannot drive {accelerator.value}", True
    return None


def _silence(member: MemberSnapshot) -> str:
    age = member.since_s if member.heard_s is None else member.heard_s
    return f"{age:.0f} s"


def _part(
    request: Request, accelerator: Accelerator, member: MemberSnapshot, caps: Capabilities
) -> tuple[tuple[Device, ...], int, tuple[str, bool] | None]:
    """What a node could give: devices and processes, or why not (now)."""
    if accelerator is Accelerator.CPU:
        processes = 1 if request.devices == "auto" else request.devices
        holders = [grant for grant in member.grants if not grant.devices]
        free = caps.cpus - sum(grant.processes for grant in holders)
        if processes > caps.cpus:
            return (), processes, (f"{processes} processes asked, it has {caps.cpus} CPUs", True)
        if processes > free:
            count = f"{processes} processes asked, {max(0, free)} free"
            return (), processes, (f"busy with {_named(holders)} ({count})", False)
        return (), processes, None
    present = [device for device in caps.devices if device.kind is accelerator]
    asked = max(1, len(present)) if request.devices == "auto" else request.devices
    if asked > len(present):
        kind = f"{accelerator.value} device"
        if not present:
            return (), asked, (f"has no {kind}", True)
        return (), asked, (f"{asked} {kind}s asked, it has {len(present)}", True)
    held = {index: grant for grant in member.grants for index in grant.devices}
    free_devices = tuple(d for d in present if d.index not in held and unfit(d) is None)
    if request.devices == "auto":
        asked = max(1, len(free_devices))
    if accelerator is Accelerator.MPS:
        asked = 1
    if len(free_devices) < asked:
        count = f"{asked} {accelerator.value} devices asked, {len(free_devices)} free"
        return (), asked, (f"{_taken(present, held)} ({count})", False)
    return free_devices, asked, None


def _taken(present: Sequence[Device], held: Mapping[int, Grant]) -> str:
    """Say what keeps devices: "busy with job k7f2, pid 9 (blender); device 1 is blocked: ..."."""
    others = [d for d in present if d.index not in held]
    holders = list(dict.fromkeys(held[d.index] for d in present if d.index in held))
    programs = list(dict.fromkeys(users(d) for d in others if d.busy_pids and d.blocked is None))
    blocked = [f"device {d.index} is blocked: {d.blocked}" for d in others if d.blocked is not None]
    busy = ", ".join(_named(names) for names in (holders, programs) if names)
    parts = ([f"busy with {busy}"] if busy else []) + ([_named(blocked)] if blocked else [])
    return "; ".join(parts)


def _named(what: Sequence[object]) -> str:
    more = f" and {len(what) - _HOLDERS} more" if len(what) > _HOLDERS else ""
    return ", ".join(map(str, what[:_HOLDERS])) + more


def versions(caps: Capabilities) -> tuple[str, str]:
    """Return the minor versions of torch and Python, which the nodes of a job share."""
    torch = caps.torch.version if caps.torch is not None else "none"
    return _minor(torch), _minor(caps.python)


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _agreeing(attempt: _Attempt, request: Request) -> _Attempt:
    """Keep the largest group with equal torch and Python minors; refuse the others."""
    if request.nodes == 1 or not request.torch:
        return attempt
    groups: dict[tuple[str, str], tuple[list[_Fit], list[_Fit]]] = defaultdict(lambda: ([], []))
    for fit in attempt.fits:
        groups[versions(fit.caps)][0].append(fit)
    for fit in attempt.later:
        groups[versions(fit.caps)][1].append(fit)
    if len(groups) < 2:
        return attempt

    def size(versions: tuple[str, str]) -> tuple[bool, bool, int, int, list[int]]:
        now, later = groups[versions]
        ever = len(now) + len(later)
        numbers = [int(n) if n.isdigit() else 0 for v in versions for n in v.split(".")]
        return len(now) >= request.nodes, ever >= request.nodes, ever, len(now), numbers

    best = max(groups, key=size)
    rows = tuple(version_rows.of(fit.member) for fit in (*attempt.fits, *attempt.later))
    rest = [fit for v, (now, later) in groups.items() if v != best for fit in now + later]
    names = {fit.member.node for fit in rest}
    later_names = {fit.member.name for fit in attempt.later if fit.member.node in names}
    refused = [r for r in attempt.refused if r.node not in later_names]
    refused += [
        Refusal(
            fit.member.name,
            "torch {} and Python {}, the others have torch {} and Python {}".format(
                *versions(fit.caps), *best
            ),
            True,
        )
        for fit in rest
    ]
    now, later = groups[best]
    return _Attempt(attempt.accelerator, now, refused, later, rows)


def _choose(
    attempt: _Attempt, request: Request, links: Sequence[Link], *, passed_over: Sequence[_Attempt]
) -> Plan:
    auto = request.devices == "auto"
    # Better ones first; a number in what follows is a place in this list.
    fits = sorted(attempt.fits, key=lambda fit: fit.order(auto))
    wires = Wires(links if request.nodes > 1 else (), [fit.position for fit in fits])
    pool, shared = _pool(fits, request.nodes, wires)
    ranked = wires.ranked(pool, [fit.member.zone for fit in fits])
    chosen = [fits[i] for i in ranked]
    slots = tuple(_slot(fit) for fit in chosen)
    taken, zones = set(ranked), {fit.member.zone for fit in chosen}
    said = [_wire(wires, a, b, fits) for a, b in pairwise(ranked)]
    spare = [
        Refusal(
            fit.member.name,
            f"not needed: {request.nodes} of {len(fits)} fitting"
            + _apart(fit, zones, wires.best(i, taken)),
            False,
        )
        for i, fit in enumerate(fits)
        if i not in taken
    ]
    return Plan(
        slots,
        attempt.accelerator,
        tuple(
            (fit.member.name, _because(fit, slot, shared, wire))
            for fit, slot, wire in zip(chosen, slots, ("", *said), strict=True)
        ),
        tuple(attempt.refused + spare),
        tuple(
            f"{attempt.accelerator.value} on every node: only {better.ever} of {request.nodes} "
            f"have {better.accelerator.value}"
            for better in passed_over
            if better.ever
        )
        + _warnings(slots)
        + _crossings(chosen, said),
        _differing(chosen),
        _slowest(wires, ranked, fits),
    )


def _slowest(wires: Wires, ranked: Sequence[int], fits: Sequence[_Fit]) -> SlowLink | None:
    """Return the slowest link between neighbours in rank order, the last and the first included."""
    if len(ranked) < 2:
        return None
    found = []
    for a, b in pairwise((*ranked, ranked[0])):
        link = wires.between(a, b)
        if link is None or not link.bytes_s:
            return None
        found.append((link.bytes_s, link.rtt_us or 0, a, b))
    bytes_s, rtt_us, a, b = min(found)
    return SlowLink(fits[a].member.name, fits[b].member.name, bytes_s, rtt_us)


def _differing(chosen: Sequence[_Fit]) -> tuple[Versions, ...]:
    """Return the versions of all nodes where any of them differs, else nothing."""
    rows = tuple(version_rows.of(fit.member) for fit in chosen)
    return rows if version_rows.differ(rows) else ()


def _pool(fits: Sequence[_Fit], nodes: int, wires: Wires) -> tuple[list[int], str]:
    """Take the best `nodes` of the most uniform pool that is large enough."""
    alike = [(fit.member.zone, fit.hardware) for fit in fits]
    for same_zone, same_hardware in ((True, True), (True, False), (False, True), (False, False)):
        pools: dict[object, list[int]] = defaultdict(list)
        for i, (zone, hardware) in enumerate(alike):
            pools[zone if same_zone else None, hardware if same_hardware else None].append(i)
        full = [pool for pool in pools.values() if len(pool) >= nodes]
        if not full:
            continue
        if same_zone:
            wired = [wires.closest(pool, nodes) for pool in full]
            near, _ = min(wired, key=lambda one: (one[1], one[0][:nodes]))
            best = near[:nodes]
        else:
            best = min(_filled(fits, pool, nodes, wires) for pool in full)
        zone = fits[best[0]].member.zone if same_zone else ""
        what = [f"zone {zone}".strip()] * same_zone + ["hardware"] * same_hardware
        return best, "same " + " and ".join(what) if what and nodes > 1 else ""
    raise AssertionError("fewer nodes fit than are asked for")


def _filled(fits: Sequence[_Fit], pool: Sequence[int], nodes: int, wires: Wires) -> list[int]:
    zones: dict[str, list[int]] = defaultdict(list)
    for i in pool:
        zones[fits[i].member.zone].append(i)
    return wires.fill(zones, nodes)


def _slot(fit: _Fit) -> Slot:
    devices = fastest_ring(fit.devices, fit.processes) if fit.devices else ()
    return Slot(fit.member.node, fit.member.name, fit.processes, devices)


def _because(fit: _Fit, slot: Slot, shared: str, wire: str) -> str:
    if slot.devices:
        used = [device for device in fit.devices if device.index in slot.devices]
        names = ", ".join(sorted({device.name for device in used}))
        what = f"{len(used)} x {names}"
        if all(device.memory_free_mib is not None for device in used):
            what += f", {min(d.memory_free_mib or 0 for d in used) / 1024:.0f} GiB free"
    else:
        what = f"{fit.caps.cpus} CPUs, {fit.caps.memory_available_mib / 1024:.0f} GiB free"
    if not wire and 0 < fit.rtt_ms < inf:
        wire = f"{fit.rtt_ms:.1f} ms away"
    return ", ".join(part for part in (what, shared, wire) if part)


def _wire(wires: Wires, a: int, b: int, fits: Sequence[_Fit]) -> str:
    """Say how a node is wired to the one before it."""
    link = wires.between(a, b)
    return "" if link is None else f"{pace(link)} to {fits[a].member.name}"


def pace(link: Link) -> str:
    """Return a link's bandwidth: "940 Mbit/s", "9.4 Mbit/s"."""
    mbit = (link.bytes_s or 0) * 8 / 1e6
    return f"{mbit:.0f} Mbit/s" if mbit >= 9.95 else f"{mbit:.1f} Mbit/s"


def _apart(fit: _Fit, zones: Collection[str], link: Link | None) -> str:
    """Say what speaks against a node that was not chosen."""
    zone = fit.member.zone
    place = f"; in zone {zone}" if zone and zone not in zones else ""
    return place + ("" if link is None else f", at best {pace(link)} to them")


def _crossings(chosen: Sequence[_Fit], said: Sequence[str]) -> tuple[str, ...]:
    """Warn of ranks in several zones, and say what is known of the links between these."""
    zones = [fit.member.zone for fit in chosen]
    if len(set(zones)) == 1:
        return ()
    crossing = [wire for wire, (a, b) in zip(said, pairwise(zones), strict=True) if a != b and wire]
    speeds = ", ".join(wire.partition(" to ")[0] for wire in crossing[:3])
    return (
        f"ranks are in {len(set(zones))} zones" + (f": {speeds} between them" if speeds else ""),
    )


def _warnings(slots: Sequence[Slot]) -> tuple[str, ...]:
    warnings = []
    counts = [slot.processes for slot in slots]
    if len(set(counts)) > 1:
        warnings.append(
            f"processes per node differ ({'/'.join(map(str, counts))}); a script that derives the "
            "world size from nodes x devices needs an equal devices=N"
        )
    return tuple(warnings)


def needs(request: Request) -> str:
    """Say how much is asked for: "3 nodes with 2 devices each"."""
    nodes = f"{request.nodes} node{'s' if request.nodes > 1 else ''}"
    if request.devices == "auto" or request.devices == 1:
        return nodes
    return f"{nodes} with {request.devices} devices each"


def _what(request: Request, accelerator: Accelerator | None) -> str:
    kind = "" if accelerator is None else f" ({accelerator.value})"
    return f"asked for {needs(request)}{kind}"


def _holders(refused: Sequence[Refusal]) -> str:
    busy = [f"{r.node} {r.reason}" for r in refused if not r.for_ever]
    more = f" and {len(busy) - 3} more" if len(busy) > 3 else ""
    return "; ".join(busy[:3]) + more
