"""Gathers what the doctor judges: of this machine, and of every member that answers.

All at once, each check with a deadline of its own; what does not come in time is said to be
unchecked. It works with and without a mesh, and with and without an agent on this machine. It
listens nowhere but to multicast, for seconds. What members answer is bounded by `wire`, and is
believed about themselves only. It does not judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import tempfile
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import psutil

import gpulayer_mesh
from gpulayer_mesh import config as configuration
from gpulayer_mesh.client import MeshClient, merged
from gpulayer_mesh.config import AgentConfig
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.devicecare import DeviceCare
from gpulayer_mesh.core.diagnosis import (
    REACH_MAX,
    Check,
    Dial,
    Facts,
    Gateway,
    Health,
    IdentityCopy,
    Member,
    Multicast,
    Outcome,
    PortUse,
    ReachAnswer,
    ReachAsked,
    TorchFacts,
)
from gpulayer_mesh.core.types import (
    Address,
    Addresses,
    Interface,
    MemberSnapshot,
    NodeId,
    NodeState,
)
from gpulayer_mesh.errors import DiscoveryError, GpuLayerError, RemovedError
from gpulayer_mesh.runtime import dialling, surroundings
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime import multicast as mdns
from gpulayer_mesh.runtime.capabilities import Machine
from gpulayer_mesh.runtime.gpus import Gpus, load_nvml
from gpulayer_mesh.runtime.interfaces import list_interfaces, rank_addresses

T = TypeVar("T")

TORCH_S = 8.5  # importing it takes 2 to 5 s; from a cold network disk a minute, which is too long
LOOK_S = 3.0  # for what the system answers at once, unless a disk or a driver hangs
FIND_S = 3.0  # the first member: remembered addresses, and mDNS beside them
ASK_S = 2.0  # for one answer of a member
REACH_S = 3.5  # a member's own dials take 2 s; a second doctor waits for the first one's
MEMBERS_S = 9.0  # all of that, one after the other, and the dials of 2 s in between
MEMBERS_MAX = 64  # that are looked at: a doctor is no survey
GATEWAY_S = 1.0  # a link-layer address is known within milliseconds, or never
_OF_MEMBERS = (Check.MEMBERS, Check.PAIRS, Check.CLOCK, Check.IDENTITY)


async def examine(home: Path) -> Facts:
    """Gather all facts, in 10 s at most."""
    environ = configuration.environment()
    interfaces = list_interfaces()
    facts = Facts(
        system=surroundings.system(),
        wsl=surroundings.is_wsl(),
        container=surroundings.container(environ.get("container")),
        interfaces=interfaces,
        disk_path=str(home),
    )
    checks = _Checks()
    try:
        config = configuration.agent_config([], {"GPULAYER_HOME": str(home)})
        identity, mesh = _state(home)
    except (GpuLayerError, OSError) as e:
        checks.leave(_OF_MEMBERS, "the state folder cannot be used")
        facts = replace(facts, state_problem=_problem(e))
        return await _this_machine(facts, checks, home, None, None, environ)
    agent = _agent(home)
    if identity is None or mesh is None:
        checks.leave(_OF_MEMBERS, "this machine belongs to no mesh")
        return await _this_machine(facts, checks, home, config, agent, environ)
    members = _Members(MeshClient(home, identity, mesh), interfaces, checks, agent is not None)
    try:
        here, there = await asyncio.gather(
            _this_machine(facts, checks, home, config, agent, environ),
            checks.run(Check.MEMBERS, members.examine(), MEMBERS_S),
        )
    finally:
        await members.client.close()
    facts = replace(here, in_mesh=True, node=identity.node, name=members.client.name)
    if there is None:
        checks.leave((Check.PAIRS, Check.CLOCK, Check.IDENTITY), "members could not be asked")
        return facts
    return replace(
        facts,
        state_problem=there.state_problem,
        health=there.health,
        members=there.members,
        copies=there.copies,
        torch=there.torch or here.torch,
    )


@dataclass(slots=True)
class _Checks:
    """Runs checks and notes which of them came to nothing."""

    unchecked: dict[Check, str] = field(default_factory=dict)

    async def run(self, check: Check, work: Awaitable[T], deadline_s: float) -> T | None:
        try:
            async with asyncio.timeout(deadline_s):
                return await work
        except TimeoutError:
            self.unchecked[check] = f"no answer within {deadline_s:g} s"
        except (GpuLayerError, OSError) as e:
            self.unchecked[check] = str(e)
        return None

    def leave(self, checks: Iterable[Check], why: str) -> None:
        for check in checks:
            self.unchecked.setdefault(check, why)


def _state(home: Path) -> tuple[identities.Identity | None, identities.MeshFiles | None]:
    """Load what there is; a machine that is only looked at gets no key."""
    if not (home / "identity.key").exists():
        return None, None
    identity = identities.load_or_create(home)
    return identity, identities.load_mesh(identity)


def _problem(error: BaseException) -> tuple[str, str]:
    hint = error.hint if isinstance(error, GpuLayerError) else None
    return str(error), hint or "give this user access to it, or name another in GPULAYER_HOME"


# --- this machine --------------------------------------------------------------------------------


async def _this_machine(
    facts: Facts,
    checks: _Checks,
    home: Path,
    config: AgentConfig | None,
    agent: int | None,
    environ: Mapping[str, str],
) -> Facts:
    in_thread = asyncio.to_thread
    near = [
        hosts
        for addresses in identities.load_peers(home).values()
        if (hosts := [a.host for a in addresses if _near(a.host, facts.interfaces)])
    ]
    disk, shared_memory, port, torch, multicast, gateways = await asyncio.gather(
        checks.run(Check.DISK, in_thread(surroundings.room, home), LOOK_S),
        checks.run(Check.SHARED_MEMORY, in_thread(surroundings.shared_memory), LOOK_S),
        checks.run(Check.PORT, in_thread(_port, config, agent), LOOK_S),
        checks.run(Check.TORCH, _torch(home, config, agent, environ), TORCH_S + 0.5),
        checks.run(Check.MULTICAST, _multicast(facts.interfaces, near), mdns.LISTEN_S + LOOK_S),
        checks.run(Check.MULTICAST, _gateways(facts.interfaces), LOOK_S),
    )
    return replace(
        facts,
        disk=disk,
        shared_memory=shared_memory,
        port=port,
        torch=torch,
        multicast=multicast,
        gateways=gateways or (),
        unchecked=checks.unchecked,
    )


def _agent(home: Path) -> int | None:
    """Return the port of the agent that runs here with this state folder."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
        noted = json.loads((home / "agent.json").read_bytes())
        if psutil.pid_exists(int(noted["pid"])):
            return int(noted["port"])
    return None


def _port(config: AgentConfig | None, agent: int | None) -> PortUse | None:
    if config is None:
        return None
    taken = () if agent else surroundings.taken(config.port)
    holder = surroundings.holder(config.port) if taken else ""
    return PortUse(config.port, taken, holder, agent)


async def _torch(
    home: Path, config: AgentConfig | None, agent: int | None, environ: Mapping[str, str]
) -> TorchFacts | None:
    """Ask the interpreter of the ranks; where an agent runs, it has done so already."""
    if config is None:
        raise GpuLayerError("the state folder cannot be used")
    if agent is not None:
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    with _kept(home) as folder:
        machine = Machine(
            folder,
            python=config.python,
            version=gpulayer_mesh.__version__,
            gpus=Gpus(visible, load_nvml()),
            care=DeviceCare(lambda device: "", lambda job: False),
            interfaces=lambda: (),
        )
        found = await machine.examine(TORCH_S)
    hidden = visible is not None and visible.strip() in ("", "-1")
    return replace(found, hardware=surroundings.graphics_cards(), hidden=hidden)


@contextlib.contextmanager
def _kept(home: Path) -> Iterator[Path]:
    """Where an answer of torch is kept for the next time: nowhere, if there is no state yet."""
    if home.is_dir():
        yield home
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


async def _multicast(
    interfaces: Sequence[Interface], expected: Sequence[Sequence[str]]
) -> Multicast:
    heard = await mdns.listen(interfaces, expected)
    if not heard.ears and not heard.port_taken:
        raise DiscoveryError("there is no LAN interface with an IPv4 address")
    if heard.port_taken:
        return replace(heard, holder=await asyncio.to_thread(surroundings.holder, mdns.PORT))
    return heard


async def _gateways(interfaces: Sequence[Interface]) -> tuple[Gateway, ...]:
    """Look for the gateways on our own networks: do they answer at all?"""
    hosts = [host for host in surroundings.gateways() if _near(host, interfaces)]
    for host in hosts:
        surroundings.look_for(host)
    until = time.monotonic() + GATEWAY_S
    known: dict[str, bool] = {}
    while hosts and time.monotonic() < until and not all(known.get(host) for host in hosts):
        await asyncio.sleep(0.1)
        known = surroundings.neighbours()
    return tuple(Gateway(host, known.get(host)) for host in hosts)


def _near(host: str, interfaces: Sequence[Interface]) -> bool:
    ip = ipaddress.ip_address(host)
    return any(
        ip in ipaddress.ip_interface(address).network
        for interface in interfaces
        if interface.kind in ("ethernet", "wifi")
        for address in interface.addresses
    )


# --- members -------------------------------------------------------------------------------------


class _Members:
    """Finds the members and asks each of them.

    Args:
        client: not connected; the caller closes it.
        agent: whether this machine runs one.
    """

    def __init__(
        self, client: MeshClient, interfaces: tuple[Interface, ...], checks: _Checks, agent: bool
    ) -> None:
        self.client = client
        self._interfaces = interfaces
        self._checks = checks
        self._agent = agent
        self._us = client.identity.node
        self._gate = asyncio.Semaphore(dialling.AT_ONCE)

    async def examine(self) -> Facts:
        """Return facts of which only those about members are filled in."""
        if self._us not in self.client.book:
            self._checks.leave(_OF_MEMBERS, "this machine is no member any more")
            return Facts(state_problem=_problem(RemovedError()))
        rows, problem = await self._rows()
        others = [row for row in rows.values() if row.node != self._us and row.addresses]
        tried = await asyncio.gather(*(self._dials(row) for row in others))
        members = await asyncio.gather(
            *(self._member(row, dials, others) for row, dials in zip(others, tried, strict=True))
        )
        if not any(member.health for member in members):
            why = "no member answers" if members else "the mesh has no other member yet"
            self._checks.leave((Check.PAIRS, Check.CLOCK, Check.IDENTITY), why)
        own = rows.get(self._us)
        health, _, _ = await self._health(self._us) if self._agent else (None, None, 0.0)
        return Facts(
            state_problem=problem,
            health=health,
            members=tuple(members),
            copies=tuple(await self._copies(members, health, own)),
            torch=_proven(own) if self._agent else None,
        )

    async def _rows(self) -> tuple[dict[NodeId, MemberSnapshot], tuple[str, str] | None]:
        """Return what a member believes of all, or the addresses that are remembered here."""
        remembered = {
            node: MemberSnapshot(node, entry.name, entry.roles, None, addresses=addresses)
            for node, entry in self.client.book.members.items()
            if (addresses := self.client.addresses(node))
        }
        try:
            await self.client.find_entry(FIND_S)
            snapshot = await self.client.snapshot()
        except RemovedError as e:
            self._checks.leave(_OF_MEMBERS, "this machine is no member any more")
            return {}, _problem(e)
        except GpuLayerError:
            return remembered, None
        rows = {row.node: row for row in snapshot.members[: MEMBERS_MAX + 1]}
        if len(snapshot.members) > MEMBERS_MAX + 1:
            self._checks.leave((Check.PAIRS,), f"only {MEMBERS_MAX} members were looked at")
        return rows, None

    async def _dials(self, row: MemberSnapshot) -> tuple[Dial, ...]:
        # What is remembered as well: of two machines with one identity, others know the last.
        known = merged(self.client.addresses(row.node), row.addresses)
        where = rank_addresses(known, self._interfaces)
        found = await dialling.dials(self.client.dialer.who_is, row.node, where, self._gate)
        seen = surroundings.neighbours()
        return tuple(replace(one, resolved=seen.get(one.host)) for one in found)

    async def _member(
        self, row: MemberSnapshot, dials: tuple[Dial, ...], others: Sequence[MemberSnapshot]
    ) -> Member:
        member = Member(
            node=row.node,
            name=row.name,
            state=row.state.value if row.state else "",
            dials=dials,
            system=row.caps.os if row.caps else "",
            torch=_proven(row),
        )
        if not member.answers:
            return member
        (health, skew_s, error_s), reached = await asyncio.gather(
            self._health(row.node), self._reach(row.node, others)
        )
        return replace(member, health=health, skew_s=skew_s, skew_error_s=error_s, reached=reached)

    async def _health(self, node: NodeId) -> tuple[Health | None, float | None, float]:
        """Return what an agent says of itself, how far its clock is ahead, and how sure that is."""
        try:
            await self.client.call(node, "GET", "/v1/ping", deadline_s=ASK_S)  # connects
            asked, began = time.time(), time.monotonic()
            plain = await self.client.call(node, "GET", "/v1/health", deadline_s=ASK_S)
            health = wire.decode_as(Health, plain)
        except GpuLayerError as e:  # an older agent does not know what is asked, either
            self._checks.leave((Check.CLOCK, Check.IDENTITY), str(e))
            return None, None, 0.0
        took_s = time.monotonic() - began
        return health, health.wall_s - (asked + took_s / 2), took_s / 2

    async def _reach(
        self, node: NodeId, others: Sequence[MemberSnapshot]
    ) -> Mapping[NodeId, str] | None:
        wanted = [row.node for row in others if row.state is NodeState.ALIVE and row.node != node]
        if self._agent:
            wanted.insert(0, self._us)
        if len(wanted) > REACH_MAX:
            self._checks.leave((Check.PAIRS,), f"only {REACH_MAX} members were tried from each")
        asked = ReachAsked(tuple(wanted[:REACH_MAX]))
        try:
            plain = await self.client.call(node, "POST", "/v1/reach", asked, deadline_s=REACH_S)
            return wire.decode_as(ReachAnswer, plain).failures
        except GpuLayerError as e:
            self._checks.leave((Check.PAIRS,), str(e))
            return None

    async def _copies(
        self, members: Sequence[Member], health: Health | None, own: MemberSnapshot | None
    ) -> list[IdentityCopy]:
        """Return who was heard to live elsewhere as well, and whether that one answers now."""
        found = []
        if health is not None and health.copies:
            found.append(await self._copy(self._us, "", health.copies, None))
        for member in members:
            said = member.health
            if said is None:
                continue
            if said.copies:
                # The one that answered us; which of both that is is chance.
                ours = self.client.dialer.good_address(member.node)
                found.append(await self._copy(member.node, member.name, said.copies, ours))
                continue
            claimed = {address.host for address in said.addresses}
            proven = [d.host for d in member.dials if d.outcome is Outcome.MEMBER]
            strange = tuple(host for host in proven if host not in claimed and "%" not in host)
            if claimed and strange:
                own_hosts = tuple(host for host in proven if host in claimed)
                found.append(IdentityCopy(member.name, False, strange, own_hosts, True))
        alive = own is not None and own.state is NodeState.ALIVE
        if own is not None and alive and not self._agent:
            # Nobody should live under our identity, for we run no agent.
            found.append(await self._copy(self._us, "", own.addresses, None))
        return [copy for copy in found if copy is not None]

    async def _copy(
        self, node: NodeId, name: str, where: Addresses, ours: Address | None
    ) -> IdentityCopy | None:
        here = {a.partition("/")[0] for i in self._interfaces for a in i.addresses}
        elsewhere = tuple(a for a in where if a != ours and a.host not in here)
        elsewhere = rank_addresses(elsewhere, self._interfaces)
        if not elsewhere:
            return None
        dials = await dialling.dials(self.client.dialer.who_is, node, elsewhere, self._gate)
        answers = any(one.outcome is Outcome.MEMBER for one in dials)
        hosts = tuple(one.host for one in dials if one.outcome is Outcome.MEMBER or not answers)
        return IdentityCopy(name, node == self._us, hosts, (ours.host,) if ours else (), answers)


def _proven(row: MemberSnapshot | None) -> TorchFacts | None:
    """Return what an agent told of its torch; None while it is being tried."""
    if row is None or row.caps is None or row.caps.torch is None:
        return None
    devices = row.caps.devices
    return TorchFacts(row.caps.torch, driver_gpus=len(devices), devices=devices)
