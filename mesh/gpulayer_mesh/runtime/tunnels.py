"""TCP connections of members to a port of this machine, carried by requests to its door.

A tunnel is opened, its bytes from the service are one streamed answer, and bytes to it arrive in
numbered pieces, so that a repeated request does no harm. It ends with the answer: whoever reads it
no more has gone. Loopback only. Does not know who may open one, nor to what.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from gpulayer_mesh.errors import NotFoundError, RemoteProtocolError, TransportError

TUNNELS_MAX = 128  # file descriptors: each holds two
CONNECT_S = 5.0
READ_S = 10.0  # an opened tunnel that nobody reads is closed
WRITE_S = 30.0  # a service that takes nothing for so long has lost the connection
PIECE_BYTES = 64 * 1024  # read from a service at once


@dataclass(slots=True)
class _Tunnel:
    owner: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    unread: asyncio.TimerHandle  # closes it, until somebody reads
    read: bool = False  # whether somebody reads, or has
    taken: int = 0  # bytes that went to the service
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Tunnels:
    """The open tunnels of one agent."""

    def __init__(self) -> None:
        self._open: dict[str, _Tunnel] = {}

    def __contains__(self, name: str) -> bool:
        """Whether a tunnel is open."""
        return name in self._open

    async def open(self, port: int, owner: str) -> str:
        """Connect to a port of loopback; returns the tunnel's name.

        Args:
            owner: who asks for the tunnel by this name later must name it, too.

        Raises:
            TransportError: nothing listens there, or too many tunnels are open.
        """
        if len(self._open) >= TUNNELS_MAX:
            raise TransportError(f"{TUNNELS_MAX} tunnels are open already")
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except (OSError, TimeoutError) as error:
            raise TransportError(f"nothing answers on port {port}") from error
        name = secrets.token_hex(16)
        unread = asyncio.get_running_loop().call_later(READ_S, self._close, name)
        self._open[name] = _Tunnel(owner, reader, writer, unread)
        return name

    async def read(self, name: str, owner: str) -> AsyncIterator[bytes]:
        """Yield what the service sends; the tunnel ends with it."""
        tunnel = self._find(name, owner)
        if tunnel.read:
            raise RemoteProtocolError("this tunnel is read already")
        tunnel.read = True
        tunnel.unread.cancel()
        try:
            with contextlib.suppress(ConnectionError):
                while data := await tunnel.reader.read(PIECE_BYTES):
                    yield data
        finally:
            self._close(name)

    async def write(self, name: str, owner: str, at: int, data: bytes, *, end: bool) -> None:
        """Send bytes to the service.

        Args:
            at: their place in all that is sent; a piece that was sent already is not sent again.
            end: nothing comes after them.

        Raises:
            NotFoundError: the tunnel has ended. RemoteProtocolError: a piece is missing before.
            TransportError: the service takes nothing.
        """
        tunnel = self._find(name, owner)
        async with tunnel.turn:
            if at > tunnel.taken:
                raise RemoteProtocolError(f"bytes {tunnel.taken} to {at} of the tunnel are missing")
            fresh = data[tunnel.taken - at :]
            try:
                tunnel.writer.write(fresh)
                async with asyncio.timeout(WRITE_S):
                    await tunnel.writer.drain()
                tunnel.taken += len(fresh)
                if end and tunnel.writer.can_write_eof():
                    tunnel.writer.write_eof()
            except (OSError, TimeoutError) as error:
                self._close(name)
                raise TransportError("the service closed the connection") from error

    async def close(self) -> None:
        """Close all."""
        writers = [tunnel.writer for tunnel in self._open.values()]
        for name in list(self._open):
            self._close(name)
        for writer in writers:
            writer.transport.abort()  # a service that takes nothing must not keep us waiting
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _find(self, name: str, owner: str) -> _Tunnel:
        tunnel = self._open.get(name)
        if tunnel is None or tunnel.owner != owner:
            raise NotFoundError("the tunnel has ended")
        return tunnel

    def _close(self, name: str) -> None:
        tunnel = self._open.pop(name, None)
        if tunnel is not None:
            tunnel.unread.cancel()
            tunnel.writer.close()
