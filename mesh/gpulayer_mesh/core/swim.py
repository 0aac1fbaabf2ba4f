"""The words `Membership` is spoken to with: its settings, its events, its effects.

All are immutable. How they hang together, and when which effect follows, is in `membership`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpulayer_mesh.core.rumour import Message, Rumour
from gpulayer_mesh.core.types import Addresses, AliveRecord, Load, NodeId, NodeState

Via = Literal["udp", "tcp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwimConfig:
    probe_interval_s: float = 1.0  # higher: slower detection; lower: more packets (2 per probe)
    probe_timeout_s: float = 0.5  # for the direct answer; a LAN's 99.9 % is far below
    nack_share: float = 0.8  # of the timeout, then a relay says it got no answer (Lifeguard)
    indirect_probes: int = 3  # members asked to ping for us; more: fewer false alarms, more packets
    gossip_interval_s: float = 0.2  # only while there are rumours
    gossip_nodes: int = 3  # members told per interval
    gossip_to_dead_s: float = 30.0  # the falsely accused must hear of it to refute
    retransmit_mult: int = 4  # x max(2, ceil(log10(n + 1))) sends of one rumour by one node
    push_pull_interval_s: float = 30.0  # full-state exchange with one member; scaled above n = 32
    suspicion_min_s: float = 4.0  # x max(1, log10 n); lower: a stalled member dies sooner
    suspicion_max_mult: float = 6.0  # longest wait in shortest waits, without confirmations
    awareness_max: int = 8  # timeouts grow at most ninefold
    redial_s: float = 30.0  # one full-state attempt at a dead member
    knock_s: float = 5.0  # one ping at a dead member: finds a healed network sooner than a redial
    late_s: float = 0.1  # a timer later than this means that we did not run
    udp_misses: int = 3  # answers by stream only, in a row, before packets go by stream
    udp_retry_s: float = 60.0  # then a ping goes by UDP as well, this often
    ask_again_s: float = 5.0  # between full-state requests to one member whose packets surprise us


# -- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PacketReceived:
    sender: NodeId  # verified
    message: Message
    via: Via = "udp"


@dataclass(frozen=True, slots=True)
class StreamProbeDone:
    node: NodeId
    seq: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Synced:
    """The peer's full state, either because we asked or because it did."""

    peer: NodeId
    rumours: tuple[Rumour, ...]


@dataclass(frozen=True, slots=True)
class Contact:
    """An authenticated connection with this node came about."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class RosterChanged:
    members: frozenset[NodeId]


@dataclass(frozen=True, slots=True)
class LocalChanged:
    name: str
    zone: str
    addresses: Addresses
    caps_version: int


@dataclass(frozen=True, slots=True)
class LoadChanged:
    load: Load


@dataclass(frozen=True, slots=True)
class Woke:
    """The machine slept; monotonic time may not show it."""


@dataclass(frozen=True, slots=True)
class Leave:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    PacketReceived
    | StreamProbeDone
    | Synced
    | Contact
    | RosterChanged
    | LocalChanged
    | LoadChanged
    | Woke
    | Leave
    | Tick
)

# -- effects ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendPacket:
    to: NodeId
    message: Message
    via: Via = "udp"


@dataclass(frozen=True, slots=True)
class StreamProbe:
    """Ask the node's door for a sign of life; the answer is `StreamProbeDone`."""

    to: NodeId
    seq: int


@dataclass(frozen=True, slots=True)
class PushPull:
    """Exchange `full_state` both ways; the answer, if any, is `Synced`. The answering side handles
    `Synced` before it takes its own `full_state`, so that a refutation is in the reply."""

    to: NodeId


@dataclass(frozen=True, slots=True)
class MemberChanged:
    node: NodeId
    old: NodeState | None  # None: not known before
    new: NodeState
    cause: str


@dataclass(frozen=True, slots=True)
class RecordChanged:
    record: AliveRecord


@dataclass(frozen=True, slots=True)
class SelfChanged:
    record: AliveRecord


@dataclass(frozen=True, slots=True)
class CloneSeen:
    """Somebody else lives under our identity: a copied state directory or disk image."""

    record: AliveRecord


Effect = (
    SendPacket | StreamProbe | PushPull | MemberChanged | RecordChanged | SelfChanged | CloneSeen
)
