"""Tunnels to a port of this machine: bytes both ways, repeats, ends, limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from gpulayer_mesh.errors import NotFoundError, RemoteProtocolError, TransportError
from gpulayer_mesh.runtime import tunnels
from gpulayer_mesh.runtime.tunnels import Tunnels

pytestmark = pytest.mark.network
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data.upper())
    writer.write(b"END")
    writer.close()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.close()


async def served(handler: Handler, use: Callable[[Tunnels, int], Awaitable[None]]) -> None:
    """Use tunnels to a server; whatever happens, every connection is closed before the loop is."""
    connections: set[asyncio.Task[None]] = set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await handler(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    found = Tunnels()
    try:
        async with asyncio.timeout(20.0):
            await use(found, server.sockets[0].getsockname()[1])
    finally:
        await found.close()
        server.close()
        await server.wait_closed()
        await asyncio.gather(*connections, return_exceptions=True)


async def all_of(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


def test_bytes_go_both_ways_and_repeats_go_once() -> None:
    async def use(found: Tunnels, port: int) -> None:
        name = await found.open(port, "job")
        reading = asyncio.create_task(all_of(found.read(name, "job")))
        await asyncio.sleep(0)
        await found.write(name, "job", 0, b"hello ", end=False)
        await found.write(name, "job", 0, b"hello ", end=False)  # the answer was lost
        await found.write(name, "job", 4, b"o world", end=False)  # part of it is known
        await found.write(name, "job", 11, b"", end=True)
        assert await reading == b"HELLO WORLDEND"
        assert name not in found
        with pytest.raises(NotFoundError):
            await found.write(name, "job", 11, b"more", end=False)

    asyncio.run(served(echo, use))


def test_tunnel_of_another_owner_is_not_found() -> None:
    async def use(found: Tunnels, port: int) -> None:
        name = await found.open(port, "job")
        with pytest.raises(NotFoundError):
            await found.write(name, "other", 0, b"x", end=False)
        with pytest.raises(NotFoundError):
            await anext(found.read(name, "other"))

    asyncio.run(served(echo, use))


def test_missing_piece_is_refused() -> None:
    async def use(found: Tunnels, port: int) -> None:
        name = await found.open(port, "job")
        with pytest.raises(RemoteProtocolError, match="bytes 0 to 5 of the tunnel are missing"):
            await found.write(name, "job", 5, b"x", end=False)

    asyncio.run(served(echo, use))


def test_reader_that_goes_ends_the_tunnel() -> None:
    async def use(found: Tunnels, port: int) -> None:
        name = await found.open(port, "job")
        await found.write(name, "job", 0, b"x", end=False)
        pieces = found.read(name, "job")
        assert await anext(pieces) == b"X"
        with pytest.raises(RemoteProtocolError, match="read already"):
            await anext(found.read(name, "job"))
        await pieces.aclose()  # type: ignore[attr-defined]
        assert name not in found

    asyncio.run(served(echo, use))


def test_tunnel_that_nobody_reads_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnels, "READ_S", 0.05)

    async def use(found: Tunnels, port: int) -> None:
        name = await found.open(port, "job")
        while name in found:  # noqa: ASYNC110  it tells nobody
            await asyncio.sleep(0.01)

    asyncio.run(served(echo, use))


def test_end_of_the_service_ends_the_tunnel() -> None:
    async def use(found: Tunnels, port: int) -> None:
        name = await found.open(port, "job")
        reading = asyncio.create_task(all_of(found.read(name, "job")))
        await found.write(name, "job", 0, b"x", end=False)
        assert await reading == b""
        with pytest.raises(NotFoundError, match="has ended"):
            await found.write(name, "job", 1, b"y", end=False)

    asyncio.run(served(silent, use))


def test_closed_port_and_too_many_tunnels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnels, "TUNNELS_MAX", 2)

    async def use(found: Tunnels, port: int) -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        closed = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        with pytest.raises(TransportError, match=f"nothing answers on port {closed}"):
            await found.open(closed, "job")
        await found.open(port, "job")
        await found.open(port, "job")
        with pytest.raises(TransportError, match="2 tunnels are open already"):
            await found.open(port, "job")

    asyncio.run(served(echo, use))
