"""The UDP port over loopback: round trip and every limit."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from gpulayer_mesh.core.wire import PACKET_MAX
from gpulayer_mesh.errors import TransportError
from gpulayer_mesh.runtime import packets
from gpulayer_mesh.runtime.packets import Packet, PacketPort

pytestmark = pytest.mark.network


@pytest.fixture
async def port() -> AsyncIterator[PacketPort]:
    opened = await PacketPort.open(["127.0.0.1"], 0)
    yield opened
    opened.close()


async def receive(port: PacketPort) -> Packet:
    return await asyncio.wait_for(port.received.get(), 5)


async def test_both_families_share_one_port_and_carry_packets(port: PacketPort) -> None:
    dual = await PacketPort.open(["0.0.0.0", "::"], 0)
    try:
        assert dual.send("127.0.0.1", port.port, b"ping")
        assert (await receive(port)).data == b"ping"
        assert port.send("127.0.0.1", dual.port, b"four")
        assert await receive(dual) == Packet(b"four", "127.0.0.1", port.port)
        assert dual.send("::1", dual.port, b"six")
        assert await receive(dual) == Packet(b"six", "::1", dual.port)
    finally:
        dual.close()


async def test_taken_port_is_named(port: PacketPort) -> None:
    with pytest.raises(TransportError, match=rf"UDP port {port.port} on 127\.0\.0\.1"):
        await PacketPort.open(["127.0.0.1"], port.port)


async def test_absent_address_is_skipped_if_another_works() -> None:
    opened = await PacketPort.open(["192.0.2.250", "127.0.0.1"], 0)
    opened.close()
    with pytest.raises(TransportError, match=r"192\.0\.2\.250"):
        await PacketPort.open(["192.0.2.250"], 0)


async def test_sending_without_a_fitting_socket_says_so(port: PacketPort) -> None:
    assert not port.send("::1", 9, b"x")
    assert not port.send("10.0.0.1", 9, b"x")
    assert not port.send("fe80::1%no-such-device", 9, b"x")


async def test_oversized_packet_is_counted_not_kept(port: PacketPort) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(bytes(PACKET_MAX + 1), ("127.0.0.1", port.port))
        stranger.sendto(bytes(PACKET_MAX), ("127.0.0.1", port.port))
        assert len((await receive(port)).data) == PACKET_MAX
    assert port.oversized == 1


async def test_flood_of_one_source_is_limited(port: PacketPort) -> None:
    for _ in range(1000):
        port._datagram(b"x", "10.0.0.9", 1)
    assert port.received.qsize() == pytest.approx(200, abs=5)
    assert port.limited == 1000 - port.received.qsize()


async def test_flood_of_many_sources_is_bounded(port: PacketPort) -> None:
    for i in range(5000):
        port._datagram(b"x", f"10.0.{i // 256}.{i % 256}", 1)
    assert port.received.qsize() == packets._QUEUE_MAX
    assert port.dropped == 5000 - packets._QUEUE_MAX
    assert len(port._buckets._state) == packets._SOURCES_MAX


async def test_system_errors_are_counted(port: PacketPort) -> None:
    port.send("127.0.0.1", port.port, bytes(70_000))  # EMSGSIZE arrives as error_received
    assert port.errors == 1
    assert "too long" in port.last_error.lower()
