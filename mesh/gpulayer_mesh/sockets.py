"""What every TCP connection of ours needs: listening, noticing a dead path, words for failures.

A library for the runtime modules, which do not import each other. Knows nothing of TLS contexts,
nodes or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys

_LINUX_IP_MTU, _LINUX_IPV6_MTU = 14, 24  # of <linux/in.h> and in6.h; Python does not name them

DEAD_PATH_S = 20  # half-open TCP: unacknowledged data or three lost keepalives end it


def listen(host: str | None, port: int) -> socket.socket:
    """Listen on one address, or with None on all of both families.

    IPv6 sockets of one address are V6ONLY, so "::" and "0.0.0.0" can share a port number.

    Raises:
        OSError: the port is taken or the address is not ours.
    """
    if host is None and socket.has_dualstack_ipv6():
        listening = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        family = socket.AF_INET6 if ":" in (host or "") else socket.AF_INET
        listening = socket.create_server((host or "", port), family=family, backlog=128)
    listening.setblocking(False)
    return listening


def watch_path(transport: asyncio.BaseTransport) -> None:
    """Have the kernel notice within `DEAD_PATH_S` a peer that is gone without a word."""
    connection = transport.get_extra_info("socket")
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (
        ("TCP_KEEPIDLE", 5),  # Linux; macOS calls it TCP_KEEPALIVE
        ("TCP_KEEPALIVE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", DEAD_PATH_S * 1000),  # Linux only, milliseconds
    ):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    for option in options:
        with contextlib.suppress(OSError):
            connection.setsockopt(*option)


def path_mtu(transport: asyncio.BaseTransport) -> int | None:
    """Return the MTU of a connection's path as the kernel knows it; None where it does not say."""
    if sys.platform != "linux":
        return None
    connection = transport.get_extra_info("socket")
    option = (socket.IPPROTO_IP, _LINUX_IP_MTU)
    try:
        if connection.family == socket.AF_INET6 and "." not in connection.getpeername()[0]:
            option = (socket.IPPROTO_IPV6, _LINUX_IPV6_MTU)
        return int(connection.getsockopt(*option))
    except OSError:  # it is closed
        return None


def words(error: BaseException | None) -> str:
    """Say in a clause what a failed connection failed of."""
    match error:
        case ssl.SSLCertVerificationError():
            return "what answers there is not of our mesh"
        case ssl.SSLError(reason=str(reason)):
            return f"TLS: {reason.lower().replace('_', ' ')}"
        case OSError(errno=int(number)) if number > 0 and not isinstance(error, TimeoutError):
            return os.strerror(number).lower()
        case EOFError():
            return "connection closed"
        case None | TimeoutError() | asyncio.CancelledError():
            return "no answer"
        case _:
            return str(error) or type(error).__name__
