"""Measures this node's links and tells the mesh: the shell of `core.measuring` and `core.links`.

Round trips are those of gossip. Bandwidth comes from bytes that travel anyway (`received`), and
from probes: a few megabytes from a peer's door, half a second on a slow link, while no job runs at
either end. Reports are signed here and spread by `gossip`; `view` joins all that were heard.
This module does not know how a report reaches others, nor what a job does with a link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.links import LinkTable, OwnLinks
from gpulayer_mesh.core.measuring import (
    PROBE_BYTES,
    PROBE_LEAST_BYTES,
    PROBE_LIMIT_S,
    PROBE_S,
    Meter,
    ProbeSchedule,
)
from gpulayer_mesh.core.member import MemberView, is_alive
from gpulayer_mesh.core.recordbook import RecordBook
from gpulayer_mesh.core.roster import RosterBook
from gpulayer_mesh.core.types import Link, LinkReport, Measured, MemberSnapshot, NodeId
from gpulayer_mesh.core.zones import inferred_zones
from gpulayer_mesh.errors import GpuLayerError, PlacementBusyError
from gpulayer_mesh.runtime.door import DoorRequest, Route, Stream
from gpulayer_mesh.runtime.peers import PeerStream

log = logging.getLogger("gpulayer.links")

LOOK_S = 2.0  # between two looks at round trips and at whose turn it is; 1 ms for 1,000 members
ANSWER_S = 2.0  # for the first bytes of a probe
_PIECE = bytes(64 * 1024)  # TLS makes noise of it, so nothing on the way can compress it


class Links:
    """The links of one agent; `run` must be running.

    Args:
        views: membership's, live.
        reports: where all reports are kept; ours is put there.
        stream: `Peers.stream`.
        path_mtu: of the way to a peer.
        busy: whether this node runs a job.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        boot: int,
        key: Ed25519PrivateKey,
        book: RosterBook,
        views: Mapping[NodeId, MemberView],
        reports: RecordBook[LinkReport],
        stream: PeerStream,
        path_mtu: Callable[[NodeId], int | None],
        busy: Callable[[], bool],
    ) -> None:
        self._table = LinkTable(reports)
        self._zones: tuple[object, tuple[str, ...]] = (None, ())  # of which reports and members
        self._node = node
        self._boot = boot
        self._key = key
        self._book = book
        self._views = views
        self._reports = reports
        self._stream = stream
        self._path_mtu = path_mtu
        self._busy = busy
        self._own = OwnLinks(node)
        self._version = 0
        self._schedule = ProbeSchedule(random.Random(), time.monotonic())
        self._meters: dict[NodeId, Meter] = {}
        self._probing: NodeId = ""

    def routes(self) -> list[Route]:
        """What other members may ask of the door."""
        return [Route("GET", "/v1/links/probe", self._answer_probe)]

    def received(self, node: NodeId, size_bytes: int) -> None:
        """Bytes of a peer's answer have arrived."""
        if node == self._probing:  # has a meter of its own
            return
        now = time.monotonic()
        meter = self._meters.setdefault(node, Meter())
        meter.add(now, size_bytes)
        bytes_s = meter.take()
        if bytes_s is not None and self._own.transferred(now, node, bytes_s):
            self._schedule.measured(now, node)

    def keep(self, members: Collection[NodeId]) -> None:
        """Forget who is not among them."""
        self._own.keep(members)
        self._reports.keep(members)
        self._schedule.keep(members)
        self._meters = {node: one for node, one in self._meters.items() if node in members}

    def view(self, members: Sequence[MemberSnapshot]) -> tuple[tuple[Link, ...], tuple[str, ...]]:
        """Return all measured pairs of these members, and the inferred zone of each."""
        now, nodes = time.monotonic(), [member.node for member in members]
        names, configured = [one.name for one in members], [one.zone for one in members]
        basis = (self._reports.versions, names, configured)
        if self._zones[0] != basis:
            best = self._table.pairs(now, nodes, best=True)
            self._zones = (basis, inferred_zones(names, configured, best))
        return self._table.pairs(now, nodes), self._zones[1]

    async def run(self) -> None:
        """Look, report and probe, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            peers = self._look()
            self._report(peers)
            idle = [] if self._busy() else [peer for peer in peers if self._is_idle(peer)]
            peer = self._schedule.choose(time.monotonic(), idle)
            if peer is not None:
                await self._probe(peer)

    def _look(self) -> list[NodeId]:
        """Take the newest round trips; return whose links are worth measuring."""
        zone = self._views[self._node].record.zone
        peers = {}
        for node, view in self._views.items():
            if node != self._node and is_alive(view):
                peers[node] = bool(zone) and view.record.zone == zone
                if view.rtt_s is not None:
                    self._own.seen(node, view.rtt_s, self._path_mtu(node))
        return self._own.worth_measuring(peers)

    def _is_idle(self, peer: NodeId) -> bool:
        load = self._views[peer].load
        return load is not None and load.jobs == 0

    def _report(self, peers: Collection[NodeId]) -> None:
        found = self._own.news(time.monotonic(), peers)
        if found is not None:
            self._version += 1
            self._publish(found)

    def _publish(self, found: tuple[Measured, ...]) -> None:
        report = LinkReport(self._node, self._boot, self._version, found)
        signed = wire.seal(
            self._key,
            kind="links",
            mesh=self._book.mesh,
            sender=self._node,
            boot=self._boot,
            seq=self._version,
            body=report,
        )
        self._reports.put(report, signed)

    # --- probes ----------------------------------------------------------------------------------

    async def _probe(self, peer: NodeId) -> None:
        self._probing = peer
        try:
            bytes_s = await self._measure(peer)
        except GpuLayerError as e:
            log.debug("probe: %s", e)
            self._schedule.refused(time.monotonic(), peer)
        else:
            now = time.monotonic()
            self._schedule.measured(now, peer)
            if bytes_s is not None:
                self._own.probed(now, peer, bytes_s)
        finally:
            self._probing = ""
            self._schedule.ended()

    async def _measure(self, peer: NodeId) -> int | None:
        """Have a peer send for a moment; return bytes per second if that was enough to tell."""
        meter, got = Meter(), 0
        started = time.monotonic()
        pieces = self._stream(peer, "GET", "/v1/links/probe", deadline_s=ANSWER_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_LIMIT_S), contextlib.aclosing(pieces):
                async for piece in pieces:
                    now = time.monotonic()
                    meter.add(now, len(piece))
                    got += len(piece)
                    if now - started > PROBE_S and got >= 2 * PROBE_LEAST_BYTES:
                        break
        return meter.take(PROBE_LEAST_BYTES, 0.0)

    async def _answer_probe(self, request: DoorRequest) -> Stream:
        if self._busy() or not self._schedule.admit(time.monotonic(), request.peer):
            raise PlacementBusyError("this node measures no link now")
        return Stream(self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            for _ in range(PROBE_BYTES // len(_PIECE)):
                yield _PIECE
        finally:
            self._schedule.ended()
