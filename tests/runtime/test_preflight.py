"""Pre-flight over loopback: who counts as reached, and what a stranger can do to the listener."""

import asyncio
import hashlib
import hmac
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from gpulayer_mesh.core.reach import BULK_BYTES, PORTS, Failed, Reached, Target, Trouble
from gpulayer_mesh.errors import TransportError
from gpulayer_mesh.runtime import preflight
from gpulayer_mesh.runtime.preflight import (
    FreePorts,
    PreflightPort,
    answers,
    check,
    ephemeral_range,
)

pytestmark = pytest.mark.network
NODE = "a" * 64
OTHER = "b" * 64


@pytest.fixture
async def port() -> AsyncIterator[PreflightPort]:
    opened = await PreflightPort.open(["127.0.0.1", "::1"], ports=PORTS)
    yield opened
    opened.close()


def target(port: PreflightPort, *hosts: str, node: str = NODE, bulk_bytes: int = 0) -> Target:
    return Target(node, hosts, port.ports, port.nonce, bulk_bytes)


def one_port(number: int, bulk_bytes: int = 0) -> Target:
    return Target(NODE, ("127.0.0.1",), (number,), bytes(16), bulk_bytes)


async def test_every_address_that_works_is_reported_in_the_given_order(port: PreflightPort) -> None:
    (reached,) = await check([target(port, "::1", "127.0.0.1", "127.0.0.2")])
    assert reached.hosts == ("::1", "127.0.0.1")
    assert reached.ms is not None
    assert reached.ms < 1000
    assert {one.host for one in reached.failed} <= {"127.0.0.2"}


async def test_ports_are_spread_over_the_range_that_the_system_gives(port: PreflightPort) -> None:
    first, last = ephemeral_range()
    third = (last + 1 - first) // 3
    assert [(number - first) // third for number in port.ports] == [0, 1, 2]


async def test_a_megabyte_arrives_on_all_ports_together(
    port: PreflightPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = PreflightPort._take

    async def counted(self: PreflightPort, reader: asyncio.StreamReader, *rest: object) -> None:
        taken.append(rest[1])  # type: ignore[arg-type]
        await take(self, reader, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PreflightPort, "_take", counted)
    (reached,) = await check([target(port, "127.0.0.1", bulk_bytes=BULK_BYTES)])
    assert (reached.hosts, reached.failed) == (("127.0.0.1",), ())
    assert len(taken) == PORTS
    assert BULK_BYTES <= sum(taken) < BULK_BYTES + PORTS


async def test_one_port_that_is_closed_fails_its_address(port: PreflightPort) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    ports = (port.ports[0], closed)
    (reached,) = await check([Target(NODE, ("127.0.0.1",), ports, port.nonce)])
    refused = Failed("127.0.0.1", closed, Trouble.REFUSED, "connection refused")
    assert reached == Reached(NODE, failed=(refused,))
    assert str(refused) == f"127.0.0.1 port {closed}: connection refused"


async def test_results_keep_the_order_of_the_targets(port: PreflightPort) -> None:
    second = await PreflightPort.open(["127.0.0.1"])
    gone = Target("c" * 64, (), (1,), port.nonce)
    try:
        results = await check(
            [target(port, "127.0.0.1"), gone, target(second, "127.0.0.1", node=OTHER)]
        )
    finally:
        second.close()
    assert [(r.node, r.hosts) for r in results] == [
        (NODE, ("127.0.0.1",)),
        ("c" * 64, ()),
        (OTHER, ("127.0.0.1",)),
    ]


async def test_silence_is_a_timeout_and_says_how_far_it_got() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        number = silent.getsockname()[1]
        (reached,) = await check([one_port(number)], deadline_s=0.2)
    (failed,) = reached.failed
    assert failed.trouble is Trouble.SILENT
    assert failed.text == "connects, then no answer in 0.2 s"


async def test_listener_of_another_node_does_not_count(port: PreflightPort) -> None:
    (reached,) = await check([one_port(port.ports[0])])
    (failed,) = reached.failed
    assert failed.trouble is Trouble.STRANGER


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def tried(serve: Serve, bulk_bytes: int = 0) -> Failed:
    """Return what a listener that behaves otherwise makes of a try."""
    ended = asyncio.Event()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        await ended.wait()
        writer.close()

    async with await asyncio.start_server(served, "127.0.0.1", 0) as server:
        (reached,) = await check([one_port(server.sockets[0].getsockname()[1], bulk_bytes)])
        ended.set()
    assert reached.hosts == ()
    return reached.failed[0]


async def prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as who holds the nonce of `one_port`."""
    asked = (await reader.readexactly(52))[:20]
    writer.write(hmac.digest(bytes(16), b"gpulayer preflight answer" + asked, hashlib.sha256))


async def test_impostor_that_answers_anything_does_not_count() -> None:
    async def parrot(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(100))

    assert (await tried(parrot)).trouble is Trouble.STRANGER


async def test_path_that_loses_full_packets_is_told_from_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "_STALL_S", 0.2)
    pieces = 0

    async def loses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await prove(reader, writer)
        for _ in range(pieces):
            await asyncio.sleep(0.1)  # longer than a stall, all of them together
            writer.write(b"+")

    failed = await tried(loses, BULK_BYTES)
    assert failed.trouble is Trouble.STALLED
    assert failed.text == "stops after 0 of 1024 KiB"
    pieces = 4
    assert (await tried(loses, BULK_BYTES)).text == "stops after 128 of 1024 KiB"


async def test_bytes_that_change_on_the_way_do_not_count() -> None:
    async def garbles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await prove(reader, writer)
        await reader.readexactly(1000)
        writer.write(b"+" + secrets.token_bytes(32))

    failed = await tried(garbles, 1000)
    assert (failed.trouble, failed.text) == (Trouble.BROKEN, "bytes change on the way")


async def test_name_is_never_resolved(port: PreflightPort) -> None:
    (reached,) = await check([target(port, "localhost")])
    assert reached.hosts == ()
    assert {one.host for one in reached.failed} == {"localhost"}


async def test_stranger_gets_no_byte(port: PreflightPort, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port.ports[0])
    writer.write(bytes(52))
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    monkeypatch.setattr(preflight, "_FIRST_BYTES_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port.ports[0])
    assert await asyncio.wait_for(reader.read(), 5) == b""  # said nothing in time
    writer.close()


async def test_more_than_was_agreed_is_not_taken(port: PreflightPort) -> None:
    """Nobody who may ask can have a node read without end."""
    asked = bytes(16) + (BULK_BYTES + 1).to_bytes(4)
    mac = hmac.digest(port.nonce, b"gpulayer preflight ask" + asked, hashlib.sha256)
    reader, writer = await asyncio.open_connection("127.0.0.1", port.ports[0])
    writer.write(asked + mac + bytes(1000))
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await asyncio.wait_for(reader.readexactly(33), 5)
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


def test_system_that_tells_no_range_has_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "_PORT_RANGE", tmp_path / "range")
    assert ephemeral_range() == (49152, 65535)
    (tmp_path / "range").write_text("15000\t20000\n")
    assert ephemeral_range() == (15000, 20000)
    (tmp_path / "range").write_text("20000\t15000\n")
    assert ephemeral_range() == (49152, 65535)


def test_free_ports_are_bindable_and_not_repeated() -> None:
    ports = FreePorts()
    taken = [ports.take() for _ in range(20)]
    assert len(set(taken)) == 20
    with socket.create_server(("127.0.0.1", taken[0])):
        pass


async def test_accepted_and_refused_connections_answer(port: PreflightPort) -> None:
    assert await answers("127.0.0.1", port.ports[0], 5)
    assert await answers("::1", port.ports[0], 5)
    port.close()
    assert await answers("127.0.0.1", port.ports[0], 5)


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
