"""Does multicast DNS get out of this machine, and does that of others get in?

On each interface one question of our own kind is asked, up to three times. It must come back to us,
for the kernel loops multicast back through the same firewall; and agents on that network answer it
by multicast. Whatever arrives is counted by its source and thrown away unread: anybody may send it.

All is over after a few seconds, at the latest. The sockets are bound to the group's address, so
they take nothing from other programs that use mDNS, and answer nobody. IPv4 only.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import struct
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gpulayer_mesh.core.diagnosis import Ear, Multicast
from gpulayer_mesh.core.types import Interface

GROUP, PORT = "224.0.0.251", 5353
LISTEN_S = 3.2  # answers come within 0.1 s; an agent that has just answered waits for a second
_ASK_AT_S = (0.0, 1.1, 2.2)  # Wi-Fi loses up to 40 %
_SOURCES_MAX = 256  # as many agents as one LAN is expected to have
_PACKETS_MAX = 5000  # a flood ends the check early instead of filling memory
_PACKET_BYTES = 9000  # the limit of RFC 6762, section 17
_LINUX_MULTICAST_ALL = 49  # of <linux/in.h>: 0 = only what this socket has joined
_PTR, _IN = 12, 1
_NAME = b"\x09_gpulayer\x04_tcp\x05local\x00"


@dataclass(slots=True)
class _Listener:
    interface: str
    host: str
    socket: socket.socket | None = None
    error: str = ""
    own: bool = False
    others: set[str] = field(default_factory=set)

    def ear(self) -> Ear:
        return Ear(self.interface, self.error, self.own, frozenset(self.others))


async def listen(
    interfaces: Sequence[Interface],
    expected: Collection[Collection[str]],
    *,
    listen_s: float = LISTEN_S,
) -> Multicast:
    """Ask on every LAN interface and listen.

    Args:
        expected: IPv4 addresses of each agent on our networks; once all of these have been heard
            at one of theirs, and we ourselves, it ends.
    """
    listeners = [
        _Listener(interface.name, hosts[0])
        for interface in interfaces
        if interface.kind in ("ethernet", "wifi")
        and (hosts := [a.partition("/")[0] for a in interface.addresses if ":" not in a])
    ]
    ours = {a.partition("/")[0] for interface in interfaces for a in interface.addresses}
    question = struct.pack(">6H", secrets.randbits(16), 0, 1, 0, 0, 0) + _NAME
    question += struct.pack(">2H", _PTR, _IN)
    try:
        for one in listeners:
            try:
                one.socket = _join(one.host)
            except OSError as e:
                if e.errno == errno.EADDRINUSE:
                    return Multicast(port_taken=True)
                one.error = errno.errorcode.get(e.errno or 0, str(e))
        tasks = [asyncio.create_task(_hear(one, question, ours)) for one in listeners if one.socket]
        try:
            await _ask(listeners, question, expected, listen_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for one in listeners:
            if one.socket is not None:
                one.socket.close()
    return Multicast(tuple(one.ear() for one in listeners))


async def _ask(
    listeners: Sequence[_Listener],
    question: bytes,
    expected: Collection[Collection[str]],
    listen_s: float,
) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    due = list(_ASK_AT_S)
    while (now := loop.time() - started) < listen_s:
        if due and now >= due[0]:
            due.pop(0)
            for one in listeners:
                _send(one, question)
        heard = {host for one in listeners for host in one.others}
        all_heard = expected and all(heard.intersection(hosts) for hosts in expected)
        if all_heard and all(one.own or one.error for one in listeners):
            return
        if not any(one.socket for one in listeners):
            return
        await asyncio.sleep(0.05)


def _send(one: _Listener, question: bytes) -> None:
    if one.socket is None:
        return
    try:
        one.socket.sendto(question, (GROUP, PORT))
        one.error = ""
    except BlockingIOError:
        pass  # the next one may go
    except OSError as e:
        one.error = errno.errorcode.get(e.errno or 0, str(e))


async def _hear(one: _Listener, question: bytes, ours: set[str]) -> None:
    loop = asyncio.get_running_loop()
    assert one.socket is not None
    for _ in range(_PACKETS_MAX):
        data, (host, *_rest) = await loop.sock_recvfrom(one.socket, _PACKET_BYTES)
        if host in ours:
            one.own = one.own or data == question
        elif len(one.others) < _SOURCES_MAX:
            one.others.add(host)


def _join(host: str) -> socket.socket:
    joined = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        joined.setblocking(False)
        joined.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            joined.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        joined.bind((GROUP, PORT))  # as the source port, too: others get asked for a unicast answer
        packed = socket.inet_aton(host)
        joined.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, packed)
        joined.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        joined.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        joined.setsockopt(
            socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP) + packed
        )
        if sys.platform == "linux":
            joined.setsockopt(socket.IPPROTO_IP, _LINUX_MULTICAST_ALL, 0)
    except OSError:
        joined.close()
        raise
    return joined
