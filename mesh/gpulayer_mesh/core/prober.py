"""Asks members for signs of life: pings, pings through others, stream probes, and the relaying of
other members' pings.

One probe runs at a time. A direct ping has `probe_timeout_s`; then up to three members ping for us
and a stream is tried; who stays silent until `probe_interval_s` is handed to the caller. All
times grow with our own local health score, which missing nacks raise and answers lower. Where only
streams are answered, packets for that member go by stream and UDP is tried again now and then.

This module does not know what silence means for a member, nor what rumours ride along.
Sources: SWIM (Das et al. 2002), section 3; Lifeguard (arXiv 1707.00788), section IV.A.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gpulayer_mesh.core.member import MemberTable, is_alive
from gpulayer_mesh.core.rumour import Ack, Nack, Ping, PingReq, Rumour
from gpulayer_mesh.core.suspicion import Awareness
from gpulayer_mesh.core.swim import (
    Effect,
    SendPacket,
    StreamProbe,
    StreamProbeDone,
    SwimConfig,
    Via,
)
from gpulayer_mesh.core.types import NodeId, Rng

RELAYS_MAX = 128  # pings run for others at once; 3 a second are normal, a flood stops here


class Probe:
    """The one under way."""

    __slots__ = ("asked", "due", "ends", "forgiven", "nacks", "relays", "sent", "seq", "target")

    def __init__(self, target: NodeId, seq: int, now: float, due: float, ends: float) -> None:
        self.target = target
        self.seq = seq
        self.sent = now
        self.due = due  # next step: ask others, then give up
        self.ends = ends
        self.asked = False  # others were
        self.relays: list[NodeId] = []
        self.nacks: set[NodeId] = set()
        self.forgiven = False


class Relay(NamedTuple):
    """A ping run for another member."""

    origin: NodeId
    seq: int  # the origin's
    target: NodeId
    nack_at: float
    via: Via


class Prober:
    """Args:
    riders: returns the rumours for a packet to a member.
    """

    __slots__ = (
        "_config",
        "_me",
        "_next_probe",
        "_relays",
        "_riders",
        "_seq",
        "_table",
        "health",
        "probe",
    )

    def __init__(
        self,
        me: NodeId,
        table: MemberTable,
        riders: Callable[[NodeId], tuple[Rumour, ...]],
        *,
        config: SwimConfig,
        rng: Rng,
        now: float,
    ) -> None:
        self.health = Awareness(config.awareness_max)
        self.probe: Probe | None = None
        self._me = me
        self._table = table
        self._riders = riders
        self._config = config
        self._relays: dict[int, Relay] = {}  # by our seq; all wait equally long, so in time order
        # A random start, so that an old answer of another life or to another node never fits.
        self._seq = rng.getrandbits(31)
        self._next_probe = now + rng.random() * config.probe_interval_s

    @property
    def due(self) -> float:
        due = self._next_probe if self.probe is None else self.probe.due
        if self._relays:
            return min(due, next(iter(self._relays.values())).nack_at)
        return due

    def run(self, now: float, out: list[Effect]) -> NodeId | None:
        """Do what is due; return the member that gave no sign of life, if one is found out."""
        silent = None
        probe = self.probe
        if probe is not None and probe.due <= now:
            if probe.asked:
                silent = self._conclude(probe)
            else:
                self._ask_others(probe, out)
        if self.probe is None and self._next_probe <= now:
            self._start(now, out)
        while self._relays:
            seq, relay = next(iter(self._relays.items()))
            if relay.nack_at > now:
                break
            del self._relays[seq]
            nack = Nack(relay.seq, self._riders(relay.origin))
            out.append(SendPacket(relay.origin, nack, relay.via))
        return silent

    def knock(self, node: NodeId, out: list[Effect]) -> None:
        """Ping without waiting for an answer."""
        self._ping(node, self._take_seq(), out)

    def forgive(self, now: float, late_s: float) -> None:
        """Make up for time in which we did not run: answers may wait unread."""
        config = self._config
        if late_s >= config.probe_interval_s:
            self.health.apply(1)
        probe = self.probe
        if probe is not None and not probe.forgiven:  # once, or a slow loop would never conclude
            probe.forgiven = True
            probe.due = max(probe.due + late_s, now + config.probe_timeout_s)
            probe.ends = max(probe.ends + late_s, probe.due)

    def reset(self, now: float) -> None:
        """Start anew after a sleep."""
        self.probe = None
        self._relays.clear()
        self._next_probe = now

    def forget(self, node: NodeId) -> None:
        if self.probe is not None and self.probe.target == node:
            self.probe = None

    def on_ack(self, now: float, sender: NodeId, ack: Ack, via: Via, out: list[Effect]) -> None:
        relay = self._relays.get(ack.seq)
        if relay is not None:
            if relay.target == sender:
                del self._relays[ack.seq]
                answer = Ack(relay.seq, ack.load, self._riders(relay.origin))
                out.append(SendPacket(relay.origin, answer, relay.via))
            return
        view = self._table.views.get(sender)
        if view is not None and view.link is not None and via == "udp":
            link = view.link
            if link.udp_seq == ack.seq:
                link.udp_seq = -1
                link.udp_missed = 0
                link.via = "udp"
        probe = self.probe
        if probe is None or probe.seq != ack.seq:
            return
        if sender != probe.target and sender not in probe.relays:
            return
        link = self._table.views[probe.target].link_up()
        link.load = ack.load
        if sender == probe.target:
            link.rtt_s = now - probe.sent
        self._succeed()

    def on_nack(self, sender: NodeId, nack: Nack) -> None:
        probe = self.probe
        if probe is not None and probe.seq == nack.seq and sender in probe.relays:
            probe.nacks.add(sender)

    def on_ping_req(
        self, now: float, sender: NodeId, ask: PingReq, via: Via, out: list[Effect]
    ) -> None:
        if ask.target not in self._table.views or ask.target == self._me:
            out.append(SendPacket(sender, Nack(ask.seq, self._riders(sender)), via))
            return
        if len(self._relays) >= RELAYS_MAX:
            return
        seq = self._take_seq()
        nack_at = now + self._config.probe_timeout_s * self._config.nack_share
        self._relays[seq] = Relay(sender, ask.seq, ask.target, nack_at, via)
        self._ping(ask.target, seq, out)

    def on_stream_probe(self, now: float, done: StreamProbeDone) -> None:
        view = self._table.views.get(done.node)
        if view is None or not done.ok:
            return
        link = view.link_up()
        link.heard = now
        if link.udp_seq == done.seq:  # the stream answers, UDP did not
            link.udp_missed += 1
            if link.udp_missed >= self._config.udp_misses and link.via != "tcp":
                link.via = "tcp"
                link.retry_at = now + self._config.udp_retry_s
        probe = self.probe
        if probe is not None and probe.seq == done.seq and probe.target == done.node:
            self._succeed()

    def check(self) -> None:
        assert len(self._relays) <= RELAYS_MAX
        assert 0 <= self.health.score <= self.health.limit
        assert self.probe is None or self.probe.target in self._table.views

    def _start(self, now: float, out: list[Effect]) -> None:
        config = self._config
        self._next_probe = now + config.probe_interval_s
        target = self._table.next_target()
        if target is None:
            return
        seq = self._take_seq()
        due = now + self.health.scale_s(config.probe_timeout_s)
        ends = now + self.health.scale_s(config.probe_interval_s)
        self.probe = Probe(target, seq, now, due, ends)
        self._ping(target, seq, out)
        link = self._table.views[target].link_up()
        if link.via == "tcp":
            if now < link.retry_at:
                return
            link.retry_at = now + config.udp_retry_s
            out.append(SendPacket(target, Ping(seq, target)))
        link.udp_seq = seq

    def _ask_others(self, probe: Probe, out: list[Effect]) -> None:
        probe.asked = True
        probe.due = probe.ends
        probe.relays = self._table.pick(self._config.indirect_probes, is_alive, probe.target)
        for node in probe.relays:
            ask = PingReq(probe.seq, probe.target, self._riders(node))
            out.append(SendPacket(node, ask, self._table.views[node].route))
        out.append(StreamProbe(probe.target, probe.seq))

    def _conclude(self, probe: Probe) -> NodeId:
        # Relays that owe us a nack say that the fault may be ours (Lifeguard, section IV.A).
        missing = len(probe.relays) - len(probe.nacks)
        self.health.apply(missing if probe.relays else 1)
        self.probe = None
        return probe.target

    def _succeed(self) -> None:
        self.probe = None
        self.health.apply(-1)

    def _ping(self, node: NodeId, seq: int, out: list[Effect]) -> None:
        ping = Ping(seq, node, self._riders(node))
        out.append(SendPacket(node, ping, self._table.views[node].route))

    def _take_seq(self) -> int:
        self._seq += 1
        return self._seq
