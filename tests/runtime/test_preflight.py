"""Pre-flight over loopback: who counts as reached, and what a stranger can do to the listener."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator

import pytest
from gpulayer_mesh.errors import TransportError
from gpulayer_mesh.runtime import preflight
from gpulayer_mesh.runtime.preflight import (
    FreePorts,
    PreflightPort,
    Reached,
    Target,
    answers,
    check,
)

pytestmark = pytest.mark.network
NODE = "a" * 64
OTHER = "b" * 64


@pytest.fixture
async def port() -> AsyncIterator[PreflightPort]:
    opened = await PreflightPort.open(["127.0.0.1", "::1"])
    yield opened
    opened.close()


def target(port: PreflightPort, *hosts: str, node: str = NODE) -> Target:
    return Target(node, hosts, port.port, port.nonce)


async def test_every_address_that_works_is_reported_in_the_given_order(port: PreflightPort) -> None:
    (reached,) = await check([target(port, "::1", "127.0.0.1", "127.0.0.2")])
    assert reached.hosts == ("::1", "127.0.0.1")
    assert reached.ms is not None
    assert reached.ms < 1000
    assert reached.error == ""


async def test_results_keep_the_order_of_the_targets(port: PreflightPort) -> None:
    second = await PreflightPort.open(["127.0.0.1"])
    try:
        results = await check([target(port, "127.0.0.1"), target(second, "127.0.0.1", node=OTHER)])
    finally:
        second.close()
    assert [(r.node, r.hosts) for r in results] == [(NODE, ("127.0.0.1",)), (OTHER, ("127.0.0.1",))]


async def test_refusal_names_address_and_port(port: PreflightPort) -> None:
    port.close()
    results = await check([target(port, "127.0.0.1"), Target(OTHER, (), 1, port.nonce)])
    assert results == [
        Reached(NODE, error=f"127.0.0.1 port {port.port}: connection refused"),
        Reached(OTHER, error="no address to try"),
    ]


async def test_silence_is_a_timeout_and_says_how_far_it_got() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        number = silent.getsockname()[1]
        (reached,) = await check([Target(NODE, ("127.0.0.1",), number, bytes(16))], deadline_s=0.2)
    assert reached.error.startswith(f"127.0.0.1 port {number}: timed out after 0.2 s (connected")


async def test_listener_of_another_node_does_not_count(port: PreflightPort) -> None:
    (reached,) = await check([Target(NODE, ("127.0.0.1",), port.port, bytes(16))])
    assert reached.hosts == ()
    assert "somebody else answered" in reached.error


async def test_impostor_that_answers_anything_does_not_count() -> None:
    async def parrot(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(100))
        writer.write(bytes(20_000))
        writer.close()

    async with await asyncio.start_server(parrot, "127.0.0.1", 0) as server:
        number = server.sockets[0].getsockname()[1]
        (reached,) = await check([Target(NODE, ("127.0.0.1",), number, bytes(16))])
    assert "somebody else answered" in reached.error


async def test_name_is_never_resolved(port: PreflightPort) -> None:
    (reached,) = await check([target(port, "localhost")])
    assert reached.hosts == ()
    assert "localhost" in reached.error


async def test_stranger_gets_no_byte(port: PreflightPort, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(bytes(48))
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    monkeypatch.setattr(preflight, "_FIRST_BYTES_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    assert await asyncio.wait_for(reader.read(), 5) == b""  # said nothing in time
    writer.close()


async def test_listener_closes_by_itself() -> None:
    port = await PreflightPort.open(["127.0.0.1"], open_s=0.05)
    await asyncio.wait_for(port.closed.wait(), 5)
    assert (await check([target(port, "127.0.0.1")]))[0].hosts == ()


async def test_unusable_address_is_skipped_or_named() -> None:
    port = await PreflightPort.open(["192.0.2.250", "127.0.0.1"])
    port.close()
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.250"):
        await PreflightPort.open(["192.0.2.250"])


def test_free_ports_are_bindable_and_not_repeated() -> None:
    ports = FreePorts()
    taken = [ports.take() for _ in range(20)]
    assert len(set(taken)) == 20
    with socket.create_server(("127.0.0.1", taken[0])):
        pass


async def test_accepted_and_refused_connections_answer(port: PreflightPort) -> None:
    assert await answers("127.0.0.1", port.port, 5)
    assert await answers("::1", port.port, 5)
    port.close()
    assert await answers("127.0.0.1", port.port, 5)


@pytest.mark.skipif(sys.platform != "linux", reason="others count a backlog in another way")
async def test_connection_to_nowhere_is_not_answered() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        where = full.getsockname()
        # Linux takes one more than told, and drops what comes then as a firewall does.
        with socket.create_connection(where), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(where)
            assert not await answers("127.0.0.1", where[1], 0.5)


async def test_address_without_a_route_is_not_answered() -> None:
    assert not await answers("fe80::1%lo", 9, 5)
