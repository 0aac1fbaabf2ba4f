"""The UDP port: datagrams in and out, with a bound on everything a stranger can make us hold.

It does not know what a packet means or who sent it; source addresses are forgeable, so the limits
here only protect memory and CPU until the signature has been checked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gpulayer_mesh.core.wire import PACKET_MAX
from gpulayer_mesh.errors import TransportError

_QUEUE_MAX = 1024  # packets (1.2 MiB): half a second of five busy peers while the loop is stalled
_RATE_PER_S = 200.0  # a peer in a mesh of 100 sends about 20; also the burst
_SOURCES_MAX = 1024  # the most nodes a mesh may have
_UNSENT_MAX = 256 * 1024  # bytes; gossip that waits longer than this takes is stale


@dataclass(frozen=True, slots=True)
class Packet:
    data: bytes
    host: str  # IP literal, IPv6 link-local with %scope
    port: int


class PacketPort:
    """One port number on several local addresses; `received` is read by the agent's loop."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[Packet] = asyncio.Queue(_QUEUE_MAX)
        self.port = 0
        self.dropped = 0  # the queue was full
        self.limited = 0  # over a source's rate
        self.oversized = 0
        self.errors = 0  # reported by the system: no route, not permitted, no buffer
        self.last_error = ""
        self._buckets = _Buckets()
        self._transports: dict[int, list[asyncio.DatagramTransport]] = {4: [], 6: []}

    @classmethod
    async def open(cls, hosts: Sequence[str], port: int) -> PacketPort:
        """Bind `port` on each of these literals; 0 picks one number for all.

        A host whose address family this machine lacks is skipped if another one works.

        Raises:
            TransportError: nothing could be bound, or the port is taken.
        """
        self = cls()
        problem = "no address given"
        for host in hosts:
            try:
                bound = _bind(host, self.port or port)
            except OSError as e:
                problem = f"cannot bind UDP port {port} on {host}: {e.strerror or e}"
                # A port that is taken on one address would split the mesh's traffic: say so.
                if "in use" in str(e).lower():
                    self.close()
                    raise TransportError(problem, hint="choose another with --port") from e
                continue
            self.port = bound.getsockname()[1]
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: _Protocol(self), sock=bound
            )
            self._transports[4 if bound.family == socket.AF_INET else 6].append(transport)
        if not self.port:
            raise TransportError(problem)
        return self

    def send(self, host: str, port: int, data: bytes) -> bool:
        """Send one datagram, best effort; False if it was not even handed to the system."""
        ip = ipaddress.ip_address(host)
        target: tuple[str, int] | tuple[str, int, int, int] = (host, port)
        if ip.version == 6:
            scope = ip.scope_id
            try:
                index = socket.if_nametoindex(scope) if scope else 0
            except OSError:
                return False
            target = (host.partition("%")[0], port, 0, index)
        for transport in self._transports[ip.version]:
            # A socket bound to loopback cannot reach the LAN and the other way round.
            own = ipaddress.ip_address(transport.get_extra_info("sockname")[0])
            if not own.is_unspecified and own.is_loopback != ip.is_loopback:
                continue
            # typeshed lacks get_write_buffer_size here; asyncio's transport has it since 3.4
            unsent = transport.get_write_buffer_size()  # type: ignore[attr-defined]
            if transport.is_closing() or unsent > _UNSENT_MAX:
                continue
            transport.sendto(data, target)
            return True
        return False

    def close(self) -> None:
        for transport in self._transports[4] + self._transports[6]:
            transport.close()

    def _datagram(self, data: bytes, host: str, port: int) -> None:
        if len(data) > PACKET_MAX:
            self.oversized += 1
        elif not self._buckets.allow(host, port):
            self.limited += 1
        else:
            try:
                self.received.put_nowait(Packet(data, host, port))
            except asyncio.QueueFull:
                self.dropped += 1

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        self.last_error = str(error)


class _Protocol(asyncio.DatagramProtocol):
    def __init__(self, owner: PacketPort) -> None:
        self._owner = owner

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._owner._datagram(data, addr[0], addr[1])

    def error_received(self, exc: Exception) -> None:
        self._owner._failed(exc)


class _Buckets:
    """A token bucket per source; the source silent for longest is forgotten first."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._state: dict[str | tuple[str, int], tuple[float, float]] = {}

    def allow(self, host: str, port: int) -> bool:
        # All agents on one machine share its loopback address, so there the port tells them apart;
        # elsewhere a port is the sender's free choice.
        key = (host, port) if host in ("127.0.0.1", "::1") else host
        now = self._clock()
        tokens, since = self._state.pop(key, (_RATE_PER_S, now))
        tokens = min(_RATE_PER_S, tokens + (now - since) * _RATE_PER_S)
        allowed = tokens >= 1
        self._state[key] = (tokens - allowed, now)
        if len(self._state) > _SOURCES_MAX:
            del self._state[next(iter(self._state))]
        return allowed


def _bind(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
    family, kind, proto, _, address = found[0]
    bound = socket.socket(family, kind, proto)
    try:
        bound.setblocking(False)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
