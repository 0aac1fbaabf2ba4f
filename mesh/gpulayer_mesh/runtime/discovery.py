"""mDNS: tell the LAN that an agent of some mesh is here, and hear of others.

What is heard is a hint where to dial, nothing more: anybody on the LAN can say anything, so trust
comes from the TLS identity and liveness from gossip. The announcement carries the protocol version,
a tag of the mesh id, the port and addresses; no name, no inventory. Whatever fails here becomes
`problem`, because peers are also found without mDNS.

Everything strangers can fill is bounded. zeroconf's own service browser is not used: its query heap
keeps an entry per name it ever saw (100,000 made-up names: +28 MiB; this way +9 MiB). Instead
we ask a few times at start and every agent repeats its announcement once a minute, which costs
one packet per node, heals lost multicast, and lets separated islands find each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import ipaddress
import logging
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

# Exported for a decade, though not listed in its __all__.
from zeroconf import (  # type: ignore[attr-defined]
    DNSOutgoing,
    DNSQuestion,
    IPVersion,
    RecordUpdate,
    RecordUpdateListener,
    Zeroconf,
)
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from gpulayer_mesh.core.types import Address, Interface, MeshId, NodeId
from gpulayer_mesh.errors import DiscoveryError

T = TypeVar("T")

SERVICE = "_gpulayer._tcp.local."
PROTOCOL = "1"
_INSTANCE = re.compile(r"([0-9a-f]{32})\._gpulayer\._tcp\.local\.")
_HINT_CHARS = 32  # of the node id's 64: a DNS label holds 63, and 128 bits do not collide
_TAG_CHARS = 16
_NAMES_MAX = 256  # as many agents as one LAN is expected to have; a spoofer gets no more
_TAGS_MAX = 64  # other meshes counted
_QUEUE_MAX = 16  # candidates not yet taken by the agent; the others wait in the table
_ADDRESSES_MAX = 8  # the limit of `types.Addresses`
_HINT_EVERY_S = 0.1  # 10 dials per second at first
_HINT_BURST = 30  # then one each 6 s: one member found is enough, the others come through gossip
_HINT_REFILL_S = 6.0
_REPEAT_S = 60.0  # between announcements, and between hints of the same name
_FORGET_S = 150.0  # two announcements may get lost
_QUERY_AT_S = (0.05, 1.0, 3.0)  # multicast over Wi-Fi loses up to 40 %
_READS_PER_S = 50  # names looked up in zeroconf's cache; bounds what a flood costs
_TYPE_PTR, _TYPE_SRV, _CLASS_IN, _QUERY = 12, 33, 1, 0


def mesh_tag(mesh: MeshId) -> str:
    """Return what is announced of a mesh: enough to tell meshes apart, not the id itself."""
    return hashlib.sha256(bytes.fromhex(mesh)).hexdigest()[:_TAG_CHARS]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Somewhere to dial; the peer's certificate decides who it is."""

    node_hint: str  # first 32 characters of the node id it claims
    addresses: tuple[Address, ...]  # in no particular order: DNS does not keep one
    interface: str  # of ours, on whose network it is; "" if on none


class Discovery:
    """The agent's announcement and ear; `candidates` yields 10 hints per second at most."""

    def __init__(self, *, tag: str, node: NodeId, port: int) -> None:
        self.candidates: asyncio.Queue[Candidate] = asyncio.Queue(_QUEUE_MAX)
        self.problem: str | None = None
        self._tag = tag
        self._hint = node[:_HINT_CHARS]
        self._port = port
        self._mdns: _Mdns | None = None
        self._addresses: tuple[Address, ...] = ()
        self._interfaces: tuple[Interface, ...] = ()
        # Hint -> (newest candidate, when it became due).
        self._known: dict[str, tuple[Candidate, float]] = {}
        self._due: dict[str, Candidate] = {}
        self._wake = asyncio.Event()
        self._others: dict[str, float] = {}  # tag of another mesh -> last heard
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def other_meshes(self) -> int:
        """How many other meshes were heard on this LAN lately."""
        since = asyncio.get_running_loop().time() - _FORGET_S
        return sum(heard > since for heard in self._others.values())

    async def start(self, addresses: Sequence[Address], interfaces: Sequence[Interface]) -> None:
        """Announce these addresses, best first; on failure `problem` is set and it retries."""
        self._addresses, self._interfaces = tuple(addresses), tuple(interfaces)
        await self._open()
        self._tasks = [asyncio.create_task(self._repeat()), asyncio.create_task(self._feed())]

    async def update(self, addresses: Sequence[Address], interfaces: Sequence[Interface]) -> None:
        """Follow a change of address or a wake-up: new sockets, new announcement, new questions.

        Sockets are made anew even for equal addresses, for a device that went and came back has
        lost its multicast membership.
        """
        self._addresses, self._interfaces = tuple(addresses), tuple(interfaces)
        self._known.clear()
        await self._shut()
        await self._open()

    async def close(self) -> None:
        """Say goodbye and free the port."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._shut()

    async def _open(self) -> None:
        hosts = {address.host for address in self._addresses}
        owners = [i for i in self._interfaces if hosts & {a.partition("/")[0] for a in i.addresses}]
        spoken = _real(owners)
        # Peers heard by mDNS are on the same link, so only addresses of that link are useful.
        local = {a.partition("/")[0] for i in spoken for a in i.addresses}
        offered = [address.host for address in self._addresses if address.host in local]
        try:
            self._mdns = await _Mdns.open(spoken, self._heard)
            await self._mdns.announce(self._hint, self._tag, self._port, offered)
            self.problem = None
        except DiscoveryError as e:
            self.problem = e.message
            await self._shut()

    async def _shut(self) -> None:
        mdns, self._mdns = self._mdns, None
        if mdns is not None:
            await mdns.close()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(_REPEAT_S)
            if self._mdns is None:
                await self._open()
            else:
                await self._mdns.repeat()
                self.problem = self._mdns.problem

    async def _feed(self) -> None:
        clock = asyncio.get_running_loop().time
        budget, since = float(_HINT_BURST), clock()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._due:
                await self.candidates.put(self._due.pop(next(iter(self._due))))
                now = clock()
                budget = min(_HINT_BURST, budget + (now - since) / _HINT_REFILL_S) - 1
                since = now
                await asyncio.sleep(_HINT_EVERY_S if budget >= 1 else _HINT_REFILL_S)

    def _heard(self, info: AsyncServiceInfo) -> None:
        hint = info.name[:_HINT_CHARS]
        if hint == self._hint:
            return
        now = asyncio.get_running_loop().time()
        tag = _tag_of(info)
        if tag != self._tag:
            if tag:
                _remember(self._others, tag, now, _TAGS_MAX)
            return
        candidate = _candidate(info, self._interfaces)
        known, due = self._known.get(hint, (None, 0.0))
        same = known is not None and set(known.addresses) == set(candidate.addresses)
        if not candidate.addresses or (same and now - due < _REPEAT_S / 2):
            return
        if hint in self._due or len(self._due) < _NAMES_MAX:
            _remember(self._known, hint, (candidate, now), _NAMES_MAX)
            self._due[hint] = candidate
            self._wake.set()


async def browse(
    tag: str, interfaces: Sequence[Interface], deadline_s: float
) -> AsyncIterator[Candidate]:
    """Yield agents of one mesh as they answer, each once; for a machine without an agent.

    Raises:
        DiscoveryError: mDNS cannot be used here.
    """
    found: asyncio.Queue[Candidate] = asyncio.Queue(_NAMES_MAX)
    seen: set[str] = set()

    def heard(info: AsyncServiceInfo) -> None:
        if _tag_of(info) == tag and info.name not in seen and len(seen) < _NAMES_MAX:
            candidate = _candidate(info, interfaces)
            if candidate.addresses:
                seen.add(info.name)
                found.put_nowait(candidate)

    mdns = await _Mdns.open(_real(interfaces), heard)
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                yield await found.get()
    except TimeoutError:
        return
    finally:
        await mdns.close()


class _Mdns(RecordUpdateListener):
    """One zeroconf instance on chosen interfaces; hands every agent's record to `heard`."""

    def __init__(self, zeroconf: AsyncZeroconf, heard: Callable[[AsyncServiceInfo], None]) -> None:
        self.problem: str | None = None
        self._zeroconf = zeroconf
        self._heard = heard
        self._touched: dict[str, None] = {}
        self._reads = float(_READS_PER_S)
        self._read_at = 0.0
        self._info: AsyncServiceInfo | None = None
        self._asking: asyncio.Task[None] | None = None
        self._log = _LogTap(self)

    @classmethod
    async def open(
        cls, interfaces: Sequence[Interface], heard: Callable[[AsyncServiceInfo], None]
    ) -> _Mdns:
        speakers = _speakers(interfaces)
        if not speakers:
            raise DiscoveryError("mDNS: no network interface with an address")
        try:
            zeroconf = AsyncZeroconf(
                interfaces=speakers,
                ip_version=IPVersion.All
                if any(isinstance(speaker, int) for speaker in speakers)
                else IPVersion.V4Only,
            )
            self = cls(zeroconf, heard)
            await zeroconf.zeroconf.async_wait_for_start()
        # Any failure of an optional extra must leave the agent running, whatever its type.
        except Exception as e:
            raise DiscoveryError(_explain(e)) from e
        zeroconf.zeroconf.async_add_listener(self, None)
        self._asking = asyncio.create_task(self._ask())
        return self

    async def announce(self, hint: str, tag: str, port: int, hosts: Sequence[str]) -> None:
        """Register without probing: the name is the hash of a key, nobody else has it."""
        self._info = AsyncServiceInfo(
            SERVICE,
            f"{hint}.{SERVICE}",
            port=port,
            server=f"{hint}.local.",
            properties={"v": PROTOCOL, "m": tag, "port": str(port)},
            parsed_addresses=[host.partition("%")[0] for host in hosts],
        )
        try:
            await self._zeroconf.async_register_service(self._info, cooperating_responders=True)
        except Exception as e:  # as above
            raise DiscoveryError(_explain(e)) from e

    async def repeat(self) -> None:
        if self._info is not None:
            with contextlib.suppress(Exception):  # sending is best effort and tried again
                await self._zeroconf.async_update_service(self._info)

    async def close(self) -> None:
        self._log.remove()
        if self._asking is not None:
            self._asking.cancel()
        with contextlib.suppress(Exception):  # nothing depends on a clean end
            async with asyncio.timeout(2.0):
                await self._zeroconf.async_close()

    async def _ask(self) -> None:
        start = asyncio.get_running_loop().time()
        for at_s in _QUERY_AT_S:
            await asyncio.sleep(max(0.0, start + at_s - asyncio.get_running_loop().time()))
            # Multicast answers wanted: unicast ones may reach another program sharing port 5353.
            query = DNSOutgoing(_QUERY)
            query.add_question(DNSQuestion(SERVICE, _TYPE_PTR, _CLASS_IN))
            self._zeroconf.zeroconf.async_send(query)

    def async_update_records(self, zc: Zeroconf, now: float, records: list[RecordUpdate]) -> None:
        for update in records:
            record = update.new
            if record.type == _TYPE_PTR and record.name == SERVICE:
                name = getattr(record, "alias", "")
            elif record.type == _TYPE_SRV:
                name = record.name
            else:
                continue
            if len(self._touched) < _NAMES_MAX and _INSTANCE.fullmatch(name):
                self._touched[name] = None

    def async_update_records_complete(self) -> None:
        touched, self._touched = self._touched, {}
        now = asyncio.get_running_loop().time()
        self._reads = min(_READS_PER_S, self._reads + (now - self._read_at) * _READS_PER_S)
        self._read_at = now
        for name in touched:
            if self._reads < 1:
                return
            self._reads -= 1
            info = AsyncServiceInfo(SERVICE, name)
            # Complete in one packet when an agent of ours sent it; else its next one may be.
            if info.load_from_cache(self._zeroconf.zeroconf) and info.port:
                self._heard(info)


class _LogTap(logging.Handler):
    """zeroconf reports send errors only to its log; turn them into the one line users see."""

    def __init__(self, owner: _Mdns) -> None:
        super().__init__(logging.WARNING)
        self._owner = owner
        self._logger = logging.getLogger("zeroconf")
        self._logger.propagate = False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], OSError):
            self._owner.problem = _explain(record.exc_info[1])

    def remove(self) -> None:
        self._logger.removeHandler(self)


def _explain(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return (
            "mDNS: another program keeps UDP port 5353 to itself (if it is avahi, set "
            "disallow-other-stacks=no in avahi-daemon.conf)"
        )
    if number in (errno.EHOSTUNREACH, errno.EPERM) and sys.platform == "darwin":
        return (
            "mDNS: the system forbids it; allow Local Network for this program in System Settings "
            "> Privacy & Security"
        )
    return f"mDNS: {error or type(error).__name__}"


def _real(interfaces: Sequence[Interface]) -> list[Interface]:
    """Where multicast makes sense: LAN devices; else whatever there is but tunnels."""
    for kinds in (("ethernet", "wifi"), ("virtual",), ("loopback",)):
        chosen = [interface for interface in interfaces if interface.kind in kinds]
        if chosen:
            return chosen
    return []


def _speakers(interfaces: Sequence[Interface]) -> list[str | int]:
    """Return one IPv4 address and one IPv6 device index per interface, as zeroconf wants them."""
    speakers: list[str | int] = []
    for interface in interfaces:
        v4 = [a.partition("/")[0] for a in interface.addresses if ":" not in a]
        speakers += v4[:1]
        # On loopback IPv6 multicast has no route.
        if len(v4) < len(interface.addresses) and interface.kind != "loopback":
            with contextlib.suppress(OSError):
                speakers.append(socket.if_nametoindex(interface.name))
    return speakers


def _tag_of(info: AsyncServiceInfo) -> str:
    properties = info.properties
    if properties.get(b"v") != PROTOCOL.encode():
        return ""
    tag = (properties.get(b"m") or b"").decode("ascii", "replace")
    return tag if len(tag) == _TAG_CHARS else ""


def _candidate(info: AsyncServiceInfo, interfaces: Sequence[Interface]) -> Candidate:
    hosts = info.parsed_scoped_addresses()[:_ADDRESSES_MAX]
    ips = [ipaddress.ip_address(host) for host in hosts]
    interface = next(
        (
            interface.name
            for interface in interfaces
            for own in interface.addresses
            if any(ip in ipaddress.ip_interface(own).network for ip in ips)
        ),
        "",
    )
    addresses = tuple(Address(host, info.port or 0) for host in hosts)
    return Candidate(info.name[:_HINT_CHARS], addresses, interface)


def _remember(table: dict[str, T], key: str, value: T, limit: int) -> None:
    """Keep the newest `limit` entries."""
    table.pop(key, None)
    table[key] = value
    if len(table) > limit:
        del table[next(iter(table))]
