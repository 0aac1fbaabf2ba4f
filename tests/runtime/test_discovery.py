"""mDNS over loopback: two agents meet, strangers stay bounded, failure degrades."""

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest
from gpulayer_mesh.core.types import Address, Interface
from gpulayer_mesh.errors import DiscoveryError
from gpulayer_mesh.runtime import discovery
from gpulayer_mesh.runtime.discovery import Candidate, Discovery, browse, mesh_tag
from lan import Lan
from zeroconf.asyncio import AsyncServiceInfo

pytestmark = pytest.mark.network
LOOPBACK = (Interface("lo", "loopback", None, ("127.0.0.1/8",)),)
TAG = mesh_tag("ab" * 32)
AGENT = """
import asyncio, sys
from gpulayer_mesh.runtime.discovery import Discovery, browse, mesh_tag
from gpulayer_mesh.runtime.interfaces import announce_addresses, list_interfaces

def show(candidate):
    hosts = " ".join(address.host for address in candidate.addresses)
    print(candidate.node_hint, candidate.interface, hosts, flush=True)

async def main():
    interfaces = list_interfaces()
    tag = mesh_tag("ab" * 32)
    if sys.argv[1] == "laptop":
        async for candidate in browse(tag, interfaces, 10.0):
            show(candidate)
        return
    agent = Discovery(tag=tag, node=sys.argv[1] * 64, port=7946)
    await agent.start(announce_addresses(interfaces, 7946), interfaces)
    while True:
        show(await agent.candidates.get())

asyncio.run(main())
"""


async def agent(char: str, port: int, tag: str = TAG) -> Discovery:
    started = Discovery(tag=tag, node=char * 64, port=port)
    await started.start((Address("127.0.0.1", port),), LOOPBACK)
    assert started.problem is None
    return started


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Discovery, Discovery]]:
    agents = await agent("a", 7001), await agent("b", 7002)
    yield agents
    for one in agents:
        await one.close()


def info(number: int, tag: str = TAG, port: int = 7946, host: str = "10.0.0.9") -> AsyncServiceInfo:
    hint = f"{number:032x}"
    return AsyncServiceInfo(
        discovery.SERVICE,
        f"{hint}.{discovery.SERVICE}",
        port=port,
        properties={"v": "1", "m": tag},
        parsed_addresses=[host],
    )


async def test_two_agents_hear_each_other_and_not_themselves(
    pair: tuple[Discovery, Discovery],
) -> None:
    a, b = pair
    heard = await asyncio.wait_for(a.candidates.get(), 5)
    assert heard == Candidate("b" * 32, (Address("127.0.0.1", 7002),), "lo")
    assert (await asyncio.wait_for(b.candidates.get(), 5)).node_hint == "a" * 32
    assert a.candidates.empty()


async def test_laptop_finds_the_agents_of_its_mesh_only(pair: tuple[Discovery, Discovery]) -> None:
    stranger = await agent("c", 7003, mesh_tag("cd" * 32))
    found = set()
    async with aclosing(browse(TAG, LOOPBACK, 5.0)) as candidates:
        async for candidate in candidates:
            found.add(candidate.node_hint)
            if len(found) == 2:
                break
    for _ in range(100):
        if pair[0].other_meshes:
            break
        await asyncio.sleep(0.05)
    await stranger.close()
    assert found == {"a" * 32, "b" * 32}
    assert pair[0].other_meshes == 1


async def test_browse_ends_at_its_deadline() -> None:
    assert [c async for c in browse(mesh_tag("ef" * 32), LOOPBACK, 0.2)] == []


async def test_moved_agent_is_heard_with_its_new_address(pair: tuple[Discovery, Discovery]) -> None:
    a, b = pair
    await asyncio.wait_for(a.candidates.get(), 5)
    moved = (Interface("lo", "loopback", None, ("127.0.0.2/8",)),)
    await b.update((Address("127.0.0.2", 7002),), moved)
    async with asyncio.timeout(5):
        while Address("127.0.0.2", 7002) not in (await a.candidates.get()).addresses:
            pass


async def test_no_usable_interface_is_a_problem_not_an_error() -> None:
    one = Discovery(tag=TAG, node="a" * 64, port=7001)
    await one.start((), ())
    assert one.problem == "mDNS: no network interface with an address"
    await one.close()
    with pytest.raises(DiscoveryError, match="no network interface"):
        await anext(browse(TAG, (), 1.0))


async def test_port_5353_taken_names_avahis_switch_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def taken(**_: object) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    with monkeypatch.context() as patched:
        patched.setattr(discovery, "AsyncZeroconf", taken)
        one = Discovery(tag=TAG, node="a" * 64, port=7001)
        await one.start((Address("127.0.0.1", 7001),), LOOPBACK)
    assert one.problem is not None
    assert "disallow-other-stacks" in one.problem
    await one.update((Address("127.0.0.1", 7001),), LOOPBACK)
    assert one.problem is None
    await one.close()


async def test_send_errors_reach_problem_through_zeroconfs_log() -> None:
    one = await agent("a", 7001)
    assert one._mdns is not None
    error = OSError(errno.ENETUNREACH, "Network is unreachable")
    logging.getLogger("zeroconf").warning("Error with socket: %s", error, exc_info=error)
    assert one._mdns.problem == "mDNS: [Errno 101] Network is unreachable"
    await one.close()


async def test_flood_of_names_is_bounded_and_hints_are_paced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Discovery(tag=TAG, node="a" * 64, port=7001)
    for number in range(10_000):
        one._heard(info(number))
        one._heard(info(number, tag=f"{number:016x}"))
    assert len(one._due) == len(one._known) == discovery._NAMES_MAX
    assert one.other_meshes == discovery._TAGS_MAX
    # The agent takes nothing: the rest waits in the bounded table.
    monkeypatch.setattr(discovery, "_HINT_EVERY_S", 0.0)
    feeding = asyncio.create_task(one._feed())
    for _ in range(100):
        await asyncio.sleep(0)
    assert one.candidates.full()
    assert len(one._due) == discovery._NAMES_MAX - discovery._QUEUE_MAX - 1
    # The agent takes all: after the burst hints come slowly.
    taken = 0
    for _ in range(1000):
        while not one.candidates.empty():
            one.candidates.get_nowait()
            taken += 1
        await asyncio.sleep(0)
    feeding.cancel()
    assert taken == discovery._HINT_BURST


async def test_repeated_announcement_is_not_hinted_again_at_once() -> None:
    one = Discovery(tag=TAG, node="a" * 64, port=7001)
    one._heard(info(1))
    one._due.clear()
    one._heard(info(1))
    assert one._due == {}
    one._heard(info(1, host="10.0.0.10"))  # it moved
    assert len(one._due) == 1


async def test_other_protocol_version_and_own_name_are_ignored() -> None:
    one = Discovery(tag=TAG, node=f"{1:032x}" * 2, port=7001)
    one._heard(info(1))
    other = AsyncServiceInfo(
        discovery.SERVICE, info(2).name, port=1, properties={"v": "2", "m": TAG}
    )
    one._heard(other)
    assert (one._due, one.other_meshes) == ({}, 0)


def test_tag_tells_meshes_apart_without_the_id() -> None:
    assert len(TAG) == 16
    assert TAG not in "ab" * 32
    assert mesh_tag("cd" * 32) != TAG


def test_speaks_on_real_interfaces_with_one_socket_per_family() -> None:
    name = socket.if_indextoname(1)
    lan = Interface(name, "ethernet", None, ("10.0.0.1/24", "10.0.0.2/24", "fd00::1/64"))
    docker = Interface("docker0", "virtual", None, ("172.17.0.1/16",))
    assert discovery._real((docker, lan)) == [lan]
    assert discovery._real((docker, *LOOPBACK)) == [docker]
    assert discovery._speakers((lan,)) == ["10.0.0.1", 1]
    assert discovery._speakers(LOOPBACK) == ["127.0.0.1"]


@pytest.mark.lan
def test_hosts_meet_over_the_lan_and_docker_is_not_offered(make_lan: Callable[..., Lan]) -> None:
    lan = make_lan(["laptop", "box-1", "box-2"])
    one, two, laptop = (
        lan[host].popen([sys.executable, "-c", AGENT, argument])
        for host, argument in (("box-1", "1"), ("box-2", "2"), ("laptop", "laptop"))
    )
    one.expect(rf"^{'2' * 32} eth0 {lan['box-2'].address}$", 20)
    two.expect(rf"^{'1' * 32} eth0 {lan['box-1'].address}$", 20)
    laptop.expect(rf"^{'1' * 32} eth0 {lan['box-1'].address}$", 20)
    laptop.expect(rf"^{'2' * 32} eth0 {lan['box-2'].address}$", 20)
