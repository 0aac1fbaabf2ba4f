"""Gossip messages and rumours as bytes: one signed envelope per packet, each rumour in it a signed
envelope of its own author, relayed byte for byte.

Verifying costs about 180 us and signing 60 us, so what was verified or signed once is remembered
within a byte limit. A rumour of an author we hold no key of is left out, not an error: the roster
may have reached the sender first. Anything else that is wrong with a packet raises
`RemoteProtocolError` and nothing of it is used. This module does not know what the messages do
(`membership`), sockets, or which node may speak beyond what `key_of` says.

    packet body   [tag, ...fields, rumours]       kind "packet", (boot, seq) stop replays
    alive         [name, zone, [[host, port]...], caps version]   (boot, seq) is the incarnation
    suspect/dead  [node, boot, counter]           signed by the accuser
    left          []                              (boot, seq) is the incarnation
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.rumour import (
    Ack,
    Alive,
    Dead,
    Gossip,
    Left,
    Message,
    Nack,
    Ping,
    PingReq,
    Rumour,
    Suspect,
)
from gpulayer_mesh.core.types import AliveRecord, Incarnation, Load, MeshId, NodeId
from gpulayer_mesh.errors import RemoteProtocolError

PACKET_KIND = "packet"
RUMOURS_PER_PACKET = 8  # the smallest takes 150 B of 1200
CACHE_BYTES = 1024 * 1024  # verified rumours: 1,000 members with 2 rumours of 300 B each, and slack
SIGNED_BYTES = 64 * 1024  # our own: one record and accusations of 200 members
_SEQ_MAX = 2**63  # what fits every msgpack reader's signed integer

V = TypeVar("V")


class _Lru(Generic[V]):
    """Bounded by the bytes of its keys and values, oldest use out first."""

    __slots__ = ("_bytes", "_limit_bytes", "_values")

    def __init__(self, limit_bytes: int) -> None:
        self._values: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self._limit_bytes = limit_bytes
        self._bytes = 0

    def get(self, key: bytes) -> V | None:
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: bytes, value: V, size_bytes: int) -> None:
        self._values[key] = (value, size_bytes)
        self._bytes += size_bytes
        while self._bytes > self._limit_bytes:
            _, (_, gone_bytes) = self._values.popitem(last=False)
            self._bytes -= gone_bytes


class _UnknownAuthorError(RemoteProtocolError):
    pass


class Codec:
    """One node's side of the wire.

    Args:
        boot: our boot epoch; packets of an older life are replays to everyone.
        key_of: the key of a member of the roster, None for anyone else.
    """

    def __init__(
        self,
        *,
        mesh: MeshId,
        node: NodeId,
        boot: int,
        key: Ed25519PrivateKey,
        key_of: Callable[[NodeId], Ed25519PublicKey | None],
    ) -> None:
        self._mesh = mesh
        self._node = node
        self._boot = boot
        self._key = key
        self._key_of = key_of
        self._windows: dict[NodeId, wire.ReplayWindow] = {}  # only of senders with a key
        self._verified: _Lru[Rumour] = _Lru(CACHE_BYTES)
        self._signed: _Lru[bytes] = _Lru(SIGNED_BYTES)

    def encode(self, message: Message, seq: int) -> bytes:
        """Return one packet.

        Args:
            seq: higher with each packet of this boot, whatever its receiver or way.

        Raises:
            LocalProtocolError: it would exceed 1200 bytes.
        """
        rumours = [self.sign(rumour) for rumour in message.gossip]
        body: list[Any]
        match message:
            case Ping():
                body = ["ping", message.seq, bytes.fromhex(message.to), rumours]
            case PingReq():
                body = ["ping_req", message.seq, bytes.fromhex(message.target), rumours]
            case Ack():
                load = message.load
                fields = [load.cpu_percent, load.memory_available_mib, load.free_slots, load.jobs]
                body = ["ack", message.seq, fields, rumours]
            case Nack():
                body = ["nack", message.seq, rumours]
            case Gossip():
                body = ["gossip", rumours]
        return wire.check_packet(self._seal(PACKET_KIND, body, seq))

    def decode(self, data: bytes) -> tuple[NodeId, Message]:
        """Return a packet's verified sender and message.

        Raises:
            RemoteProtocolError: malformed, forged, of another mesh, too large, or a replay.
        """
        envelope = wire.open_envelope(
            data,
            mesh=self._mesh,
            key_of=self._key_of,
            kind=PACKET_KIND,
            max_bytes=wire.PACKET_MAX,
        )
        message = self._message(envelope.body)
        window = self._windows.setdefault(envelope.sender, wire.ReplayWindow())
        if not window.accept(envelope.boot, envelope.seq):
            raise RemoteProtocolError(f"replayed packet of node {envelope.sender[:8]!r}")
        return envelope.sender, message

    def sign(self, rumour: Rumour) -> bytes:
        """Return the rumour's envelope: its author's as received, or ours, signed now."""
        if rumour.signed:
            return rumour.signed
        match rumour:
            case Alive():
                record = rumour.record
                addresses = [[a.host, a.port] for a in record.addresses]
                body = [record.name, record.zone, addresses, record.caps_version]
                kind, seq = "alive", record.incarnation.counter
            case Suspect() | Dead():
                kind, seq = ("suspect" if isinstance(rumour, Suspect) else "dead"), 0
                incarnation = rumour.incarnation
                body = [bytes.fromhex(rumour.node), incarnation.boot, incarnation.counter]
            case Left():
                kind, seq, body = "left", rumour.incarnation.counter, []
        name = wire.pack([kind, seq, body])
        signed = self._signed.get(name)
        if signed is None:
            signed = self._seal(kind, body, seq)
            self._signed.put(name, signed, len(name) + len(signed) + 200)
        return signed

    def open(self, signed: bytes) -> Rumour:
        """Verify one rumour.

        Raises:
            RemoteProtocolError: malformed, forged, of another mesh, or its author has no key.
        """
        rumour = self._verified.get(signed)
        if rumour is None:
            envelope = wire.open_envelope(
                signed, mesh=self._mesh, key_of=self._author_key, max_bytes=wire.PACKET_MAX
            )
            rumour = _open_rumour(envelope)
            # The parsed rumour and its entry take about 700 B beside the bytes themselves.
            self._verified.put(signed, rumour, len(signed) + 700)
        else:  # verified once, but the author may have been removed since
            author = rumour.by if isinstance(rumour, Suspect | Dead) else rumour.node
            self._author_key(author)
        return rumour

    def _message(self, body: Any) -> Message:
        match body:
            case ["ping", int(seq), bytes(to), rumours]:
                return Ping(_seq(seq), _node(to), self._riders(rumours))
            case ["ping_req", int(seq), bytes(target), rumours]:
                return PingReq(_seq(seq), _node(target), self._riders(rumours))
            case ["ack", int(seq), [cpu, memory, slots, jobs], rumours]:
                fields = {
                    "cpu_percent": cpu,
                    "memory_available_mib": memory,
                    "free_slots": slots,
                    "jobs": jobs,
                }
                return Ack(_seq(seq), wire.decode_as(Load, fields), self._riders(rumours))
            case ["nack", int(seq), rumours]:
                return Nack(_seq(seq), self._riders(rumours))
            case ["gossip", rumours]:
                return Gossip(self._riders(rumours))
            case _:
                raise RemoteProtocolError("not a gossip message")

    def _riders(self, items: object) -> tuple[Rumour, ...]:
        if not isinstance(items, list) or len(items) > RUMOURS_PER_PACKET:
            raise RemoteProtocolError(f"not a list of up to {RUMOURS_PER_PACKET} rumours")
        rumours = []
        for item in items:
            if not isinstance(item, bytes):
                raise RemoteProtocolError("a rumour is not bytes")
            try:
                rumours.append(self.open(item))
            except _UnknownAuthorError:
                continue
        return tuple(rumours)

    def _author_key(self, author: NodeId) -> Ed25519PublicKey:
        key = self._key_of(author)
        if key is None:
            raise _UnknownAuthorError(f"rumour by unknown node {author[:8]!r}")
        return key

    def _seal(self, kind: str, body: Any, seq: int) -> bytes:
        return wire.seal(
            self._key,
            kind=kind,
            mesh=self._mesh,
            sender=self._node,
            boot=self._boot,
            seq=seq,
            body=body,
        )


def _open_rumour(envelope: wire.Envelope) -> Rumour:
    said = {"boot": envelope.boot, "counter": envelope.seq}
    match envelope.kind, envelope.body:
        case "alive", [name, zone, list(addresses), caps_version]:
            record = {
                "node": envelope.sender,
                "incarnation": said,
                "name": name,
                "zone": zone,
                "addresses": [_address(a) for a in addresses],
                "caps_version": caps_version,
            }
            return Alive(wire.decode_as(AliveRecord, record), envelope.signed)
        case ("suspect" | "dead") as kind, [bytes(node), boot, counter]:
            accused = wire.decode_as(Incarnation, {"boot": boot, "counter": counter})
            make = Suspect if kind == "suspect" else Dead
            return make(_node(node), accused, envelope.sender, envelope.signed)
        case "left", []:
            incarnation = wire.decode_as(Incarnation, said)
            return Left(envelope.sender, incarnation, envelope.signed)
        case _:
            raise RemoteProtocolError(f"not a rumour: {envelope.kind[:32]!r}")


def _address(pair: Any) -> dict[str, Any]:
    match pair:
        case [host, port]:
            return {"host": host, "port": port}
        case _:
            raise RemoteProtocolError("not an address")


def _node(raw: bytes) -> NodeId:
    if len(raw) != 32:
        raise RemoteProtocolError(f"a node id of {len(raw)} bytes")
    return raw.hex()


def _seq(seq: int) -> int:
    # `True` is an int to Python, not to us.
    if type(seq) is not int or not 0 <= seq < _SEQ_MAX:
        raise RemoteProtocolError(f"sequence number {seq!r} out of range")
    return seq
