"""Two nodes measure the link between them over real doors on loopback."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from gpulayer_mesh.core import links as core_links
from gpulayer_mesh.core import measuring, wire
from gpulayer_mesh.core.joining import JoinRequest
from gpulayer_mesh.core.member import MemberView
from gpulayer_mesh.core.recordbook import RecordBook
from gpulayer_mesh.core.rumour import Alive
from gpulayer_mesh.core.types import (
    Address,
    AliveRecord,
    Incarnation,
    Link,
    LinkReport,
    LinkSource,
    Load,
    MemberSnapshot,
    NodeId,
    Role,
)
from gpulayer_mesh.errors import PlacementBusyError
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime import links as runtime_links
from gpulayer_mesh.runtime.dial import Dialer
from gpulayer_mesh.runtime.door import Door, DoorRequest, Route, Stream
from gpulayer_mesh.runtime.interfaces import InterfaceWatch
from gpulayer_mesh.runtime.links import Links
from gpulayer_mesh.runtime.peers import Peers

pytestmark = pytest.mark.network
LARGE = 8 * 1024 * 1024


class Node:
    """As much of an agent as links need: a door, a dialler, the address book, a view."""

    def __init__(self, identity: identities.Identity, name: str) -> None:
        self.id = identity.node
        self.name = name
        self.jobs = 0
        self._identity = identity
        mesh = identities.load_mesh(identity)
        assert mesh is not None
        self.book = mesh.book
        self.views: dict[NodeId, MemberView] = {}

    async def open(self, stack: AsyncExitStack) -> None:
        self.dialer = Dialer(
            context=identities.client_context(self._identity.home),
            book=self.book,
            node=self.id,
            on_roster=lambda signed: None,
            received=lambda node, size: self.links.received(node, size),
        )
        stack.push_async_callback(self.dialer.close)
        self.peers = Peers(
            home=self._identity.home,
            node=self.id,
            book=self.book,
            dialer=self.dialer,
            watch=InterfaceWatch(),
            views=self.views,
            configured=(),
            contacted=lambda node: None,
        )
        stack.push_async_callback(self.peers.close)
        self.reports = RecordBook(self.book, "links", LinkReport)
        self.links = Links(
            node=self.id,
            boot=1,
            key=self._identity.key,
            book=self.book,
            views=self.views,
            reports=self.reports,
            stream=self.peers.stream,
            path_mtu=self.dialer.path_mtu,
            busy=lambda: self.jobs > 0,
        )
        door = Door(
            context=identities.server_context(self._identity.home),
            book=self.book,
            node=self.id,
            routes=[*self.links.routes(), Route("GET", "/v1/large", self.large)],
            on_roster=self._take,
        )
        self.port = await door.start(["127.0.0.1"], 0)
        stack.push_async_callback(door.close)

    def see(self, *nodes: Node) -> None:
        for node in nodes:
            where = (Address("127.0.0.1", node.port),)
            record = AliveRecord(node.id, Incarnation(1, 0), node.name, "", where, 1)
            view = self.views[node.id] = MemberView(Alive(record), 0.0)
            link = view.link_up()
            link.rtt_s, link.load = 0.0007, Load()

    async def large(self, request: DoorRequest) -> Stream:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(LARGE // 2**18):
                yield bytes(2**18)
                await asyncio.sleep(0.01)

        return Stream(pieces())

    async def fetch(self, other: Node) -> None:
        async for _ in self.peers.stream(other.id, "GET", "/v1/large"):
            pass

    async def _take(self, signed: bytes) -> None:
        self.book.offer(signed)

    def told(self) -> list[Link]:
        """Return what this node's own newest report makes of the pair."""
        rows = [MemberSnapshot(n, v.record.name, (), v.state) for n, v in self.views.items()]
        return list(self.links.view(rows)[0])


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Node]]:
    monkeypatch.setattr(measuring, "PAUSE_S", (0.01, 0.02))
    monkeypatch.setattr(measuring, "REFUSED_S", 0.05)  # both may ask at the same moment
    monkeypatch.setattr(core_links, "REPORT_S", 0.0)
    monkeypatch.setattr(runtime_links, "LOOK_S", 0.01)
    laptop = identities.load_or_create(tmp_path / "laptop")
    identities.create_mesh(laptop, "laptop")
    boxes = []
    for name in ("box-1", "box-2"):
        box = identities.load_or_create(tmp_path / name)
        public = box.key.public_key().public_bytes_raw()
        request = JoinRequest(box.node, public, name, ())
        identities.save_membership(box, identities.admit(laptop, request, (Role.WORKER,), {}))
        boxes.append(Node(box, name))
    boxes[0].book.offer(boxes[1].book.signed)
    async with AsyncExitStack() as stack:
        for node in boxes:
            await node.open(stack)
        for node in boxes:
            node.see(*boxes)
        yield boxes


async def run_until(nodes: list[Node], done: Callable[[], bool], deadline_s: float = 30.0) -> None:
    running = [asyncio.create_task(node.links.run()) for node in nodes]
    try:
        async with asyncio.timeout(deadline_s):
            while not done():
                await asyncio.sleep(0.01)
                for task in running:
                    if task.done():
                        task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_round_trip_bandwidth_and_mtu_of_a_pair(pair: list[Node]) -> None:
    a, b = pair
    await run_until(pair, lambda: any(link.bytes_s for node in pair for link in node.told()))
    prober = next(node for node in pair if any(link.bytes_s for link in node.told()))
    (link,) = prober.told()
    assert (link.rtt_us, link.source) == (700, LinkSource.PROBE)
    assert link.bytes_s is not None
    print(f"loopback: {link.bytes_s / 1e6:.0f} MB/s")
    assert link.bytes_s > 1_000_000
    if sys.platform == "linux":
        assert link.mtu == 65535
    # The report is signed by who measured, and counts wherever it comes.
    other = a if prober is b else b
    signed = prober.reports.signed(prober.id)
    assert signed is not None
    other.reports.keep(())
    other.reports.offer(signed)
    assert [found.bytes_s for found in other.told()] == [link.bytes_s]


async def test_busy_node_probes_nobody_and_refuses(pair: list[Node]) -> None:
    a, b = pair
    asked = []

    async def answer(request: DoorRequest) -> Stream:
        asked.append(request.peer)
        raise PlacementBusyError("not now")

    b.jobs = 1
    with pytest.raises(PlacementBusyError):
        await b.links._answer_probe(DoorRequest(a.id, (), {}, {}, b""))
    await run_until([b], lambda: bool(b.told()))
    # a has not heard yet that b runs a job: it asks, is refused, and has no figure but the trip.
    await run_until([a], lambda: a.links._schedule._due.get(b.id, 0) > time.monotonic())
    assert [link.bytes_s for link in a.told()] == [None]
    # Once it has heard, it does not ask.
    a.links._schedule._due.clear()
    link = a.views[b.id].link
    assert link is not None
    link.load = Load(jobs=1)
    assert a.links._is_idle(b.id) is False


async def test_files_that_travel_anyway_are_measured(pair: list[Node]) -> None:
    a, b = pair
    a.jobs = b.jobs = 1  # no probes
    await a.fetch(b)
    await run_until([a], lambda: bool(a.told()))
    (link,) = a.told()
    assert link.source is LinkSource.TRANSFER
    # It waited 10 ms after each quarter of a MiB, so the link is faster than that, which is said.
    assert link.bytes_s is not None
    assert 1_000_000 < link.bytes_s < 26_000_000
    assert wire.RECORD_MAX > len(a.reports.signed(a.id) or b"") > 100


async def test_member_that_left_is_forgotten(pair: list[Node]) -> None:
    a, b = pair
    await a.fetch(b)
    await run_until([a], lambda: bool(a.told()))
    a.links.keep({a.id})
    del a.views[b.id]

    def forgotten() -> bool:
        report = a.reports.get(a.id)
        return report is not None and report.links == ()

    await run_until([a], forgotten)
