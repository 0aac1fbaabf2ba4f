"""The shell of `core.membership`: packets, stream probes, and the full-state exchange.

One task owns the machine; everything that happens becomes an event in its queue, and its effects
are carried out here. The exchange also carries what is too large for packets: the roster, signed
records of capabilities and of links. This module does not know who decides about a roster
(`offer_roster`), what capabilities mean, or how a member is reached (`peers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, assert_never

from gpulayer_mesh.core import swim, wire
from gpulayer_mesh.core.gossip_codec import Codec
from gpulayer_mesh.core.membership import Membership
from gpulayer_mesh.core.recordbook import RecordBook, Version
from gpulayer_mesh.core.roster import RosterBook
from gpulayer_mesh.core.rumour import Rumour
from gpulayer_mesh.core.types import (
    Addresses,
    AliveRecord,
    CapsRecord,
    LinkReport,
    NodeId,
    NodeState,
)
from gpulayer_mesh.errors import GpuLayerError, RemoteProtocolError, TransportError
from gpulayer_mesh.runtime.background import Background
from gpulayer_mesh.runtime.door import DoorRequest, Route
from gpulayer_mesh.runtime.packets import PacketPort
from gpulayer_mesh.runtime.peers import Peers

log = logging.getLogger("gpulayer.gossip")

PROBE_S = 3.0  # a stream probe is only useful while SWIM still waits for it
SYNC_S = 10.0
SYNC_MAX = 8 * 1024 * 1024  # 1,024 members' rumours (0.9 MiB) and what capabilities fit below
CAPS_PER_SYNC_BYTES = 4 * 1024 * 1024  # the rest comes with the next exchange
LINKS_PER_SYNC_BYTES = 256 * 1024  # a hundred reports; 1.2 kB/s at the pace of 1,000 members
_SHORT = 16  # digits of a node id that name it among the versions of link reports; all are 300 B/s


class Gossip:
    """Runs one membership machine. `run` and `receive` must be running."""

    def __init__(
        self,
        *,
        node: NodeId,
        book: RosterBook,
        members: Membership,
        caps: RecordBook[CapsRecord],
        links: RecordBook[LinkReport],
        codec: Codec,
        packets: PacketPort,
        peers: Peers,
        offer_roster: Callable[[bytes], None],
    ) -> None:
        self._node = node
        self._book = book
        self._members = members
        self._caps = caps
        self._links = links
        self._codec = codec
        self._packets = packets
        self._peers = peers
        self._offer_roster = offer_roster
        self._events: asyncio.Queue[swim.Event] = asyncio.Queue()
        self.copies: Addresses = ()  # where somebody else was last heard under our identity
        self._packet_seq = 0
        self._background = Background(log, expected=(GpuLayerError,))

    async def close(self) -> None:
        await self._background.close()

    def routes(self) -> list[Route]:
        """What other members may ask of the door."""
        return [
            Route("POST", "/v1/sync", self._answer_sync, max_body=SYNC_MAX),
            Route("POST", "/v1/packet", self._answer_packet, max_body=wire.PACKET_MAX),
            Route("GET", "/v1/caps", self._answer_caps),
        ]

    def post(self, event: swim.Event) -> None:
        """Tell the machine what happened."""
        self._events.put_nowait(event)

    def leave(self) -> None:
        """Say goodbye, so that nobody has to suspect us first."""
        for effect in self._members.handle(time.monotonic(), swim.Leave()):
            if isinstance(effect, swim.SendPacket):
                self._send(effect)

    async def run(self) -> None:
        """Own the machine: events and its timer, one at a time."""
        while True:
            due = self._members.next_timeout()
            event: swim.Event = swim.Tick()
            with contextlib.suppress(TimeoutError):
                wait_s = None if due is None else max(0.0, due - time.monotonic())
                async with asyncio.timeout(wait_s):
                    event = await self._events.get()
            self._handle(event)

    async def receive(self) -> None:
        """Turn datagrams into events."""
        while True:
            packet = await self._packets.received.get()
            self._packet(packet.data, "udp")

    # --- effects ---------------------------------------------------------------------------------

    def _handle(self, event: swim.Event) -> None:
        for effect in self._members.handle(time.monotonic(), event):
            match effect:
                case swim.SendPacket():
                    self._send(effect)
                case swim.StreamProbe(node, seq):
                    self._background.spawn(self._stream_probe(node, seq))
                case swim.PushPull(node):
                    self._background.spawn(self._sync_with(node))
                case swim.MemberChanged(node, old, new, cause):
                    bad = new in (NodeState.SUSPECT, NodeState.DEAD)
                    level = logging.WARNING if bad else logging.INFO
                    log.log(
                        level, "%s: %s -> %s (%s)", self._name(node), old or "unknown", new, cause
                    )
                case swim.RecordChanged(record):
                    self._record_changed(record)
                case swim.SelfChanged():
                    pass
                case swim.CloneSeen(record):
                    self.copies = record.addresses
                    log.error(
                        "another machine uses this machine's identity, at %s: its state directory "
                        "was copied; delete identity.key on one of the two and join again",
                        ", ".join(address.host for address in record.addresses),
                    )
                case _:
                    assert_never(effect)

    def _record_changed(self, record: AliveRecord) -> None:
        if record.node == self._node:
            return
        self._peers.heard(record)
        if self._caps.version(record.node) < (record.incarnation.boot, record.caps_version):
            self._background.spawn(self._pull_caps(record.node))

    def _send(self, effect: swim.SendPacket) -> None:
        self._packet_seq += 1
        data = self._codec.encode(effect.message, self._packet_seq)
        if effect.via == "tcp":
            self._background.spawn(
                self._peers.call(effect.to, "POST", "/v1/packet", data, deadline_s=PROBE_S)
            )
            return
        addresses = self._peers.addresses(effect.to)
        if addresses:
            self._packets.send(addresses[0].host, addresses[0].port, data)

    def _packet(self, data: bytes, via: swim.Via) -> None:
        try:
            sender, message = self._codec.decode(data)
        except RemoteProtocolError as e:
            log.debug("packet ignored: %s", e)
            return
        self.post(swim.PacketReceived(sender, message, via))

    async def _stream_probe(self, node: NodeId, seq: int) -> None:
        try:
            await self._peers.call(node, "GET", "/v1/ping", deadline_s=PROBE_S)
        except GpuLayerError:
            self.post(swim.StreamProbeDone(node, seq, False))
        else:
            self.post(swim.StreamProbeDone(node, seq, True))

    def _name(self, node: NodeId) -> str:
        entry = self._book.members.get(node)
        return entry.name if entry else node[:8]

    # --- full-state exchange ---------------------------------------------------------------------

    async def _sync_with(self, node: NodeId) -> None:
        own = self._links.signed(self._node)
        # Our own report goes along, so that it does not wait until somebody asks us.
        body = wire.pack({**self._sync_body(), "links": [] if own is None else [own]})
        answer = await self._peers.call(node, "POST", "/v1/sync", body, deadline_s=SYNC_S)
        self._take_sync(node, wire.unpack(answer, max_bytes=SYNC_MAX))

    async def _answer_sync(self, request: DoorRequest) -> dict[str, Any]:
        plain = wire.unpack(request.body, max_bytes=SYNC_MAX)
        self._take_sync(request.peer, plain)
        have = wire.decode_as(dict[NodeId, Version], plain.get("have", {}))
        caps = self._caps.newer_than(have, max_bytes=CAPS_PER_SYNC_BYTES)
        short = wire.decode_as(dict[str, Version], plain.get("have_links", {}))
        theirs = {
            node: short[node[:_SHORT]] for node in self._links.versions if node[:_SHORT] in short
        }
        links = self._links.newer_than(theirs, max_bytes=LINKS_PER_SYNC_BYTES)
        return {**self._sync_body(), "caps": caps, "links": links}

    def _sync_body(self) -> dict[str, Any]:
        return {
            "rumours": [self._codec.sign(rumour) for rumour in self._members.full_state()],
            "roster": self._book.signed,
            "have": self._caps.versions,
            "have_links": {node[:_SHORT]: v for node, v in self._links.versions.items()},
        }

    def _take_sync(self, peer: NodeId, plain: Any) -> None:
        if not isinstance(plain, dict):
            raise RemoteProtocolError("sync is a map")
        if isinstance(roster := plain.get("roster"), bytes):
            self._offer_roster(roster)
        rumours: list[Rumour] = []
        for signed in _signed_list(plain.get("rumours")):
            with contextlib.suppress(RemoteProtocolError):  # of a member that was just removed
                rumours.append(self._codec.open(signed))
        # At once, not through the queue: the answer must hold our refutation.
        self._handle(swim.Synced(peer, tuple(rumours)))
        for kind, records in (("caps", self._caps), ("links", self._links)):
            for signed in _signed_list(plain.get(kind, [])):
                with contextlib.suppress(RemoteProtocolError):
                    records.offer(signed)

    async def _pull_caps(self, node: NodeId) -> None:
        self._caps.offer(await self._peers.call(node, "GET", "/v1/caps"))

    async def _answer_caps(self, request: DoorRequest) -> bytes:
        own = self._caps.signed(self._node)
        if own is None:
            raise TransportError("capabilities are not known yet")
        return own

    async def _answer_packet(self, request: DoorRequest) -> None:
        self._packet(request.body, "tcp")


def _signed_list(value: Any) -> list[bytes]:
    if not isinstance(value, list) or not all(isinstance(one, bytes) for one in value):
        raise RemoteProtocolError("expected a list of signed records")
    return value
