"""What gossip says: rumours about members, the messages that carry them, the queue they wait in.

Rumours and messages are immutable, so views and simulated nodes share them. `signed` is the
author's envelope as received, relayed byte for byte; it is empty for a rumour of our own, which
the codec signs when it leaves. This module does not know how a message becomes bytes
(`gossip_codec`), only how many bytes it will take, because that decides what rides along.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpulayer_mesh.core.types import AliveRecord, Incarnation, Load, NodeId

# Room for rumours in one 1200 B packet: the packet's own envelope and the largest body around
# them take 211 B, and 1200 - 211 leaves a little slack. A record with 8 longest addresses: 873 B.
GOSSIP_BYTES = 980
RUMOUR_MIN_BYTES = 150  # no rumour is smaller; when less room is left, looking on is pointless
_ENVELOPE_BYTES = 172  # array, mesh, sender, boot, seq, kind, signature, length prefix


@dataclass(frozen=True, slots=True)
class Alive:
    """A member's word about itself."""

    record: AliveRecord
    signed: bytes = b""

    @property
    def node(self) -> NodeId:
        return self.record.node


@dataclass(frozen=True, slots=True)
class Suspect:
    """`by` got no answer from `node`; the subject may refute it with a higher incarnation."""

    node: NodeId
    incarnation: Incarnation
    by: NodeId
    signed: bytes = b""


@dataclass(frozen=True, slots=True)
class Dead:
    """`by` waited a suspicion out."""

    node: NodeId
    incarnation: Incarnation
    by: NodeId
    signed: bytes = b""


@dataclass(frozen=True, slots=True)
class Left:
    """A member's goodbye; nobody else can say it."""

    node: NodeId
    incarnation: Incarnation
    signed: bytes = b""


Rumour = Alive | Suspect | Dead | Left


@dataclass(frozen=True, slots=True)
class Ping:
    seq: int  # ours; the answer repeats it
    to: NodeId  # an address may have changed hands: another node must not answer
    gossip: tuple[Rumour, ...] = ()


@dataclass(frozen=True, slots=True)
class PingReq:
    """Ask a third member to ping `target` for us."""

    seq: int
    target: NodeId
    gossip: tuple[Rumour, ...] = ()


@dataclass(frozen=True, slots=True)
class Ack:
    seq: int
    load: Load  # of the pinged member, also when relayed
    gossip: tuple[Rumour, ...] = ()


@dataclass(frozen=True, slots=True)
class Nack:
    """The relay is fine, the target did not answer it (Lifeguard, section IV.A)."""

    seq: int
    gossip: tuple[Rumour, ...] = ()


@dataclass(frozen=True, slots=True)
class Gossip:
    gossip: tuple[Rumour, ...] = ()


Message = Ping | PingReq | Ack | Nack | Gossip

_BODY_BYTES = {Ping: 48, PingReq: 52, Ack: 36, Nack: 16, Gossip: 10}


def rumour_bytes(rumour: Rumour) -> int:
    """Return the rumour's size inside a packet: exact if received, else an upper estimate."""
    if rumour.signed:
        return len(rumour.signed) + 3
    if isinstance(rumour, Alive):
        record = rumour.record
        size = _ENVELOPE_BYTES + 20 + len(record.name) + len(record.zone.encode())
        return size + sum(len(a.host.encode()) + 6 for a in record.addresses)
    return _ENVELOPE_BYTES + 52


def message_bytes(message: Message) -> int:
    """Estimate a message's size as a packet, without encoding it."""
    body = _ENVELOPE_BYTES + _BODY_BYTES[type(message)]
    return body + sum(rumour_bytes(r) for r in message.gossip) if message.gossip else body


class RumourQueue:
    """One rumour per member, least often sent first; a newer one replaces the older.

    Tier i holds what was sent i times, in order of arrival, so taking a packetful costs what is
    taken and not the queue's length. Bounded by the number of members.
    """

    __slots__ = ("_tier_of", "_tiers")

    def __init__(self) -> None:
        self._tiers: list[dict[NodeId, Rumour]] = [{}]
        self._tier_of: dict[NodeId, int] = {}

    def __len__(self) -> int:
        return len(self._tier_of)

    def put(self, rumour: Rumour) -> None:
        self.drop(rumour.node)
        if rumour_bytes(rumour) > GOSSIP_BYTES:  # fits no packet: left to full-state exchange
            return
        self._tiers[0][rumour.node] = rumour
        self._tier_of[rumour.node] = 0

    def drop(self, node: NodeId) -> None:
        tier = self._tier_of.pop(node, None)
        if tier is not None:
            del self._tiers[tier][node]

    def take(self, room_bytes: int, limit: int) -> tuple[Rumour, ...]:
        """Return what fits, counting one transmission each; drop what reached `limit`."""
        if not self._tier_of:
            return ()
        taken: list[tuple[int, Rumour]] = []
        for tier, rumours in enumerate(self._tiers):
            for rumour in rumours.values():
                size = rumour_bytes(rumour)
                if size <= room_bytes:
                    room_bytes -= size
                    taken.append((tier, rumour))
                if room_bytes < RUMOUR_MIN_BYTES:
                    break
            if room_bytes < RUMOUR_MIN_BYTES:
                break
        for tier, rumour in taken:
            del self._tiers[tier][rumour.node]
            if tier + 1 >= limit:
                del self._tier_of[rumour.node]
                continue
            if tier + 1 == len(self._tiers):
                self._tiers.append({})
            self._tiers[tier + 1][rumour.node] = rumour
            self._tier_of[rumour.node] = tier + 1
        return tuple([rumour for _, rumour in taken])
