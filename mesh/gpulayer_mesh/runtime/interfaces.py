"""This machine's network interfaces: what each is, which addresses to offer, which one routes.

Nothing here knows who the peers are or whether an address works: an address counts only after the
right agent has answered on it. Host names are never resolved (hosts files map them to loopback) and
nobody is asked which address "leads to the internet": every interface speaks for itself.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

from gpulayer_mesh.clock import boot_clock
from gpulayer_mesh.core.types import Address, Interface

_ORDER = {"ethernet": 0, "wifi": 1, "tunnel": 2, "virtual": 3, "loopback": 4}
_OFFER_RANK = {"tunnel": 1, "virtual": 2}  # 0: real
_MAX_INTERFACES = 32  # the limit of `Capabilities.interfaces`; hosts of containers have hundreds
_MAX_ADDRESSES = 16  # the limit of `Interface.addresses`
_MAX_OFFERED = 8  # the limit of `types.Addresses`
_MAX_V6_OFFERED = 2  # per interface: privacy extensions keep making more of them
_SYSFS = Path("/sys/class/net")
# Devices of containers and virtual machines, and Apple's peer-to-peer ones. Only asked about
# devices without hardware behind them, so a network card may be called anything.
_VIRTUAL = re.compile(
    r"docker|br-[0-9a-f]{12}|veth|virbr|vnet\d|vmnet|vboxnet|cni|cbr|flannel|cali|cilium|lxc|lxd"
    r"|podman|nerdctl|kube|weave|dummy|ifb|bridge1\d\d|awdl|llw|anpi|ap\d"
)
_TUNNEL = re.compile(r"tun|tap|wg|tailscale|zt|utun|ppp|ipsec|gif|stf|sit|gre")
# ARPHRD numbers of if_arp.h that carry a LAN: Ethernet, IEEE 1394, InfiniBand.
_LAN_TYPES = {"1", "24", "32"}


def list_interfaces() -> tuple[Interface, ...]:
    """List the interfaces that are up and have addresses ("192.0.2.7/24"), real ones first."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        stat = stats.get(name)
        addresses = tuple(
            _with_prefix(entry.address, entry.netmask)
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        if stat is None or not stat.isup or not addresses:
            continue
        kind = "loopback" if "loopback" in stat.flags.split(",") else _kind(name)
        found.append(Interface(name, kind, stat.speed or None, addresses[:_MAX_ADDRESSES]))
    found.sort(key=lambda interface: _ORDER[interface.kind])  # stable: keeps the kernel's order
    return tuple(found[:_MAX_INTERFACES])


@lru_cache(maxsize=16)
def announce_addresses(
    interfaces: tuple[Interface, ...], port: int, bind: str = ""
) -> tuple[Address, ...]:
    """Choose what to offer to peers, best first; virtual ones last, loopback never by itself.

    `bind` is the literal the agent was told to listen on; "" and the unspecified address mean all.
    """
    wanted = ipaddress.ip_address(bind) if bind else None
    if wanted is not None and not wanted.is_unspecified:
        return (Address(bind, port),)
    ranked = []
    for interface in interfaces:
        if interface.kind == "loopback":
            continue
        hosts = [address.partition("/")[0] for address in interface.addresses]
        v4 = [host for host in hosts if ":" not in host]
        v6 = (
            [host for host in hosts if ":" in host] if wanted is None or wanted.version == 6 else []
        )
        routable = [host for host in v4 if not _link_local(host)]
        routable += [host for host in v6 if not _link_local(host)][:_MAX_V6_OFFERED]
        # Link-local only where a real interface has nothing better: peers must guess its scope.
        link_local = (v4 + v6)[:1] if interface.kind != "virtual" else []
        for host in routable or link_local:
            rank = (_OFFER_RANK.get(interface.kind, 0), _link_local(host), ":" in host)
            ranked.append((rank, Address(host, port)))
    ranked.sort(key=lambda pair: pair[0])
    return tuple(address for _, address in ranked[:_MAX_OFFERED])


@lru_cache(maxsize=1024)  # asked for every packet; a mesh has at most 1,024 members
def rank_addresses(
    addresses: tuple[Address, ...], interfaces: tuple[Interface, ...]
) -> tuple[Address, ...]:
    """Order a peer's addresses as this machine should dial them.

    Those on a network we share through a real interface come first. An address that is ours on a
    virtual device (every Docker host has 172.17.0.1) can only lead back to us and is left out. A
    link-local one is tried through each of our real interfaces, whatever scope the peer wrote.
    """
    ours_virtual: set[bytes] = set()
    networks = []
    scopes = []
    for interface in interfaces:
        parsed = [ipaddress.ip_interface(address) for address in interface.addresses]
        if interface.kind == "virtual":
            ours_virtual.update(ip.packed for ip in parsed)
        elif interface.kind not in ("loopback", "tunnel"):
            networks += [ip.network for ip in parsed if not ip.is_link_local]
            if any(ip.version == 6 and ip.is_link_local for ip in parsed):
                scopes.append(interface.name)
    ranked = []
    for address in addresses:
        ip = ipaddress.ip_address(address.host)
        if ip.packed in ours_virtual:
            continue
        if ip.version == 6 and ip.is_link_local:
            bare = address.host.partition("%")[0]
            ranked += [(2, Address(f"{bare}%{scope}", address.port)) for scope in scopes]
        else:
            ranked.append((0 if any(ip in network for network in networks) else 1, address))
    ranked.sort(key=lambda pair: pair[0])
    return tuple(address for _, address in ranked)


def route_source(host: str) -> str | None:
    """Return the local address packets to this IP literal leave from; nothing is sent."""
    try:
        found = socket.getaddrinfo(
            host, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])
            name = probe.getsockname()
        if len(name) == 4 and name[3]:
            return f"{name[0].partition('%')[0]}%{socket.if_indextoname(name[3])}"
        return str(name[0])
    except OSError:
        return None


def interface_for(
    hosts: Iterable[str], interfaces: Sequence[Interface] | None = None
) -> str | None:
    """Name the interface that routes to most of these peers, None if none is routed."""
    if interfaces is None:
        interfaces = list_interfaces()
    owner = {
        address.partition("/")[0]: interface.name
        for interface in interfaces
        for address in interface.addresses
    }
    sources = [route_source(host) for host in hosts]
    names = Counter(owner[source] for source in sources if source in owner)
    return names.most_common(1)[0][0] if names else None


@dataclass(frozen=True, slots=True)
class AddressesChanged:
    """The interfaces differ and have settled."""

    interfaces: tuple[Interface, ...]


@dataclass(frozen=True, slots=True)
class Woke:
    """The machine was suspended, or this process was stopped, for about `gap_s` seconds."""

    gap_s: float


class InterfaceWatch:
    """Follows address changes and notices sleep.

    Polling every 5 s costs about 1 ms each and works the same on every system.
    """

    def __init__(
        self,
        *,
        poll_s: float = 5.0,  # lower: quicker after a DHCP change, more wake-ups
        damp_s: float = 2.0,  # a new address often arrives in two steps (IPv4, then IPv6)
        wake_s: float = 10.0,  # lateness that counts as sleep; a loaded machine is late by less
        read: Callable[[], tuple[Interface, ...]] = list_interfaces,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._poll_s = poll_s
        self._damp_s = damp_s
        self._wake_s = wake_s
        self._read = read
        self._clock = clock
        self.current = read()

    async def changes(self) -> AsyncIterator[AddressesChanged | Woke]:
        """Yield each change until the caller stops."""
        looked = self._clock()
        while True:
            await asyncio.sleep(self._poll_s)
            now = self._clock()
            gap_s = now - looked - self._poll_s
            if gap_s > self._wake_s:
                yield Woke(gap_s)
            seen = self._read()
            if _differ(seen, self.current):
                await asyncio.sleep(self._damp_s)
                settled = self._read()
                # Still moving: the next poll looks again.
                if not _differ(settled, seen):
                    self.current = settled
                    yield AddressesChanged(settled)
            looked = self._clock()


def _differ(a: tuple[Interface, ...], b: tuple[Interface, ...]) -> bool:
    """Compare without speed, which Wi-Fi changes all the time."""
    return [(i.name, i.kind, i.addresses) for i in a] != [(i.name, i.kind, i.addresses) for i in b]


def _kind(name: str) -> str:
    sysfs = _sysfs(name)
    if sysfs is not None:
        if (sysfs / "wireless").exists() or (sysfs / "phy80211").exists():
            return "wifi"
        if (sysfs / "bridge").exists():
            # A bridge over a network card is the LAN itself (hypervisors, routers).
            ports = _listdir(sysfs / "brif")
            return "ethernet" if any((_SYSFS / p / "device").exists() for p in ports) else "virtual"
        if (sysfs / "device").exists():
            return "ethernet"
        if (sysfs / "tun_flags").exists() or _read_text(sysfs / "type") not in _LAN_TYPES:
            return "tunnel"
    if _VIRTUAL.match(name):
        return "virtual"
    if _TUNNEL.match(name):
        return "tunnel"
    # A veth called eth0 is the LAN of a container, so being a veth proves nothing.
    return "wifi" if name.startswith("wl") else "ethernet"


def _sysfs(name: str) -> Path | None:
    """Return the device's folder, None where sysfs is absent or shows another namespace."""
    path = _SYSFS / name
    try:
        same = int(_read_text(path / "ifindex")) == socket.if_nametoindex(name)
    except (OSError, ValueError):
        return None
    return path if same else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _listdir(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.iterdir()]
    except OSError:
        return []


def _with_prefix(address: str, netmask: str | None) -> str:
    if not netmask:  # point to point
        return address
    return f"{address}/{int(ipaddress.ip_address(netmask)).bit_count()}"


def _link_local(host: str) -> bool:
    return ipaddress.ip_address(host).is_link_local
