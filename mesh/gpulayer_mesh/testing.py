"""A seeded simulation of many agents' membership in virtual time; users may test with it, too.

Messages pass as objects (the codec has its own tests) through a network with loss, latency,
partitions and blocked UDP; nodes crash, restart, stall and leave. One heap of (time, counter,
node, event) drives everything, every node has its own rng seeded from one seed, so a run repeats
exactly. Nothing here knows keys, jobs or real time. Memory is n squared member views of 72 B.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import inf

from gpulayer_mesh.core.membership import (
    Contact,
    Effect,
    Event,
    Leave,
    LocalChanged,
    MemberChanged,
    Membership,
    PacketReceived,
    PushPull,
    RosterChanged,
    SendPacket,
    StreamProbe,
    StreamProbeDone,
    SwimConfig,
    Synced,
    Tick,
    Woke,
)
from gpulayer_mesh.core.rumour import Alive, Rumour, message_bytes
from gpulayer_mesh.core.types import Address, AliveRecord, Incarnation, NodeId, NodeState

_TICK = Tick()
_RTO_S = 0.3  # a stream's wait before it sends a lost segment again; doubles each time
_STREAM_LIMIT_S = 5.0  # deadline of a full-state exchange
_PROBE_LIMIT_S = 0.5  # deadline of a stream probe


@dataclass(frozen=True, slots=True)
class _SyncAsked:
    """A full state that arrived; its receiver owes its own."""

    asker: SimNode
    rumours: tuple[Rumour, ...]
    deadline: float


def node_id(index: int) -> NodeId:
    return sha256(b"simulated node %d" % index).hexdigest()


class SimNode:
    """One life of one simulated agent; a restart makes a new one under the same id."""

    __slots__ = (
        "bytes_sent",
        "group",
        "index",
        "machine",
        "node",
        "packets_sent",
        "stalled_until",
        "tick_at",
        "udp",
        "up",
    )

    def __init__(self, index: int, machine: Membership) -> None:
        self.index = index
        self.node = node_id(index)
        self.machine = machine
        self.up = True
        self.group = 0  # only nodes of one group reach each other
        self.udp = True
        self.stalled_until = -inf
        self.tick_at = inf
        self.packets_sent = 0
        self.bytes_sent = 0  # estimate of `message_bytes`


class Simulation:
    """`n` agents on one simulated LAN.

    Args:
        n: number of nodes.
        seed: of everything random; it is added to any exception that leaves `run`.
        loss: share of packets lost; streams are not lost but delayed by it.
        latency_s: shortest and longest one-way delay.
        met: whether all know each other at the start; otherwise use `introduce`.
        check: call `Membership.check` after every event; slow.
    """

    def __init__(
        self,
        n: int,
        *,
        seed: int,
        config: SwimConfig | None = None,
        loss: float = 0.0,
        latency_s: tuple[float, float] = (0.0002, 0.002),
        met: bool = True,
        check: bool = False,
    ) -> None:
        self.seed = seed
        self.loss = loss
        self.now = 0.0
        self.events = 0
        self.changes: list[tuple[float, int, MemberChanged]] = []  # (when, at which node, what)
        self.effects_of: dict[int, list[Effect]] = {}  # all effects of the nodes listed here
        self._config = config or SwimConfig()
        self._rng = random.Random(seed)
        self._latency_s = latency_s
        self._check = check
        self._heap: list[tuple[float, int, SimNode, Event | _SyncAsked]] = []
        self._count = 0
        self._boot = [1] * n
        self.roster = frozenset(node_id(i) for i in range(n))
        self.nodes = [self._new_node(i) for i in range(n)]
        self.by_id = {node.node: node for node in self.nodes}
        if met:
            everyone = tuple(Alive(node.machine.record) for node in self.nodes)
            for node in self.nodes:
                peer = self.nodes[node.index - 1].node
                node.machine.handle(0.0, Synced(peer, everyone))
                self._plan_tick(node)

    # -- what a test does to the mesh --

    def run(self, seconds: float) -> None:
        with self._seed_noted():
            self._run(self.now + seconds)

    def run_until(self, done: Callable[[], bool], limit_s: float, step_s: float = 0.01) -> float:
        """Run until `done`, asked each `step_s`; return the seconds that took.

        Raises:
            AssertionError: it was not done after `limit_s`.
        """
        start = self.now
        with self._seed_noted():
            while not done():
                assert self.now < start + limit_s, f"not done after {limit_s} simulated seconds"
                self._run(self.now + step_s)
        return self.now - start

    def crash(self, index: int) -> None:
        self.nodes[index].up = False

    def restart(self, index: int, contact: int) -> None:
        """Start the next life of a node; it has reached the door of `contact`."""
        self.nodes[index].up = False
        self._boot[index] += 1
        node = self._new_node(index)
        node.group = self.nodes[index].group
        self.nodes[index] = self.by_id[node.node] = node
        self.introduce(index, contact)

    def introduce(self, index: int, contact: int) -> None:
        self.tell(index, Contact(node_id(contact)))

    def stall(self, index: int, seconds: float) -> None:
        """Stop a node's process; what arrives meanwhile waits in its buffers."""
        self.nodes[index].stalled_until = self.now + seconds

    def suspend(self, index: int) -> None:
        """Let a machine sleep: what arrives is lost."""
        self.nodes[index].up = False

    def wake(self, index: int) -> None:
        node = self.nodes[index]
        node.up = True
        node.tick_at = inf
        self.tell(index, Woke())

    def partition(self, *groups: list[int]) -> None:
        for number, members in enumerate(groups):
            for index in members:
                self.nodes[index].group = number

    def heal(self) -> None:
        for node in self.nodes:
            node.group = 0

    def block_udp(self, *indices: int) -> None:
        for index in indices:
            self.nodes[index].udp = False

    def leave(self, index: int) -> None:
        self.tell(index, Leave())
        self.crash(index)

    def change(self, index: int, caps_version: int) -> None:
        """Change a node's record, as a new capability version does."""
        record = self.nodes[index].machine.record
        self.tell(index, LocalChanged(record.name, record.zone, record.addresses, caps_version))

    def tell(self, index: int, event: Event) -> None:
        """Hand an event to a node now."""
        with self._seed_noted():
            self._deliver(self.nodes[index], event)

    # -- what a test asks --

    def up(self) -> list[SimNode]:
        return [node for node in self.nodes if node.up]

    def state_at(self, viewer: int, subject: int) -> NodeState | None:
        view = self.nodes[viewer].machine.members.get(node_id(subject))
        return view.state if view is not None else None

    def count(self, subject: int, state: NodeState) -> int:
        """Return how many running others hold the subject to be in this state."""
        node = node_id(subject)
        views = (n.machine.members.get(node) for n in self.nodes if n.up and n.node != node)
        return sum(view is not None and view.state is state for view in views)

    def all_alive(self) -> bool:
        """Return whether every running node holds every running node alive, newest record."""
        up = self.up()
        records = [node.machine.record for node in up]
        for node in up:
            members = node.machine.members
            for record in records:
                view = members.get(record.node)
                if view is None or view.state is not NodeState.ALIVE:
                    return False
                if view.record is not record and view.record != record:
                    return False
        return True

    # -- machinery --

    def _new_node(self, index: int) -> SimNode:
        record = AliveRecord(
            node=node_id(index),
            incarnation=Incarnation(self._boot[index], 0),
            name=f"node-{index}",
            zone="",
            addresses=(Address(f"10.0.{index // 250}.{index % 250 + 1}", 7946),),
            caps_version=1,
        )
        rng = random.Random(f"{self.seed}/{index}/{self._boot[index]}")
        machine = Membership(record, config=self._config, rng=rng, now=self.now)
        node = SimNode(index, machine)
        machine.handle(self.now, RosterChanged(self.roster))
        self._plan_tick(node)
        return node

    def _run(self, until: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            when, _, node, event = heapq.heappop(heap)
            self.now = when
            if not node.up:
                continue
            if node.stalled_until > when:
                self._push(node.stalled_until, node, event)
                continue
            if event is _TICK:
                if node.tick_at != when and node.stalled_until != when:
                    continue  # another tick was planned since
                node.tick_at = inf
            self._deliver(node, event)
        self.now = until

    def _deliver(self, node: SimNode, event: Event | _SyncAsked) -> None:
        self.events += 1
        machine = node.machine
        asked = event if isinstance(event, _SyncAsked) else None
        if isinstance(event, _SyncAsked):
            event = Synced(event.asker.node, event.rumours)
        effects = machine.handle(self.now, event)
        if self._check:
            machine.check()
        for effect in effects:
            if isinstance(effect, SendPacket):
                self._send(node, effect)
            elif isinstance(effect, MemberChanged):
                self.changes.append((self.now, node.index, effect))
            elif isinstance(effect, StreamProbe):
                self._stream_probe(node, effect)
            elif isinstance(effect, PushPull):
                self._push_pull(node, effect.to)
        if asked is not None:
            wait_s = self._stream_s(node, asked.asker, 1)
            if self.now + wait_s <= asked.deadline:
                answer = Synced(node.node, machine.full_state())
                self._push(self.now + wait_s, asked.asker, answer)
        if node.index in self.effects_of:
            self.effects_of[node.index].extend(effects)
        self._plan_tick(node)

    def _plan_tick(self, node: SimNode) -> None:
        due = node.machine.next_timeout()
        if due is not None and due < node.tick_at:
            node.tick_at = due
            self._push(due, node, _TICK)

    def _push(self, when: float, node: SimNode, event: Event | _SyncAsked) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, node, event))

    def _send(self, node: SimNode, packet: SendPacket) -> None:
        node.packets_sent += 1
        node.bytes_sent += message_bytes(packet.message)
        peer = self.by_id[packet.to]
        if not peer.up or peer.group != node.group:
            return
        event = PacketReceived(node.node, packet.message, packet.via)
        if packet.via == "tcp":
            wait_s = self._stream_s(node, peer, 1)
            if wait_s <= _STREAM_LIMIT_S:
                self._push(self.now + wait_s, peer, event)
            return
        if not (node.udp and peer.udp) or (self.loss and self._rng.random() < self.loss):
            return
        low, high = self._latency_s
        self._push(self.now + low + (high - low) * self._rng.random(), peer, event)

    def _stream_s(self, a: SimNode, b: SimNode, legs: int) -> float:
        """Return how long a stream takes for `legs` one-way trips; inf if it never arrives."""
        if a.group != b.group or not b.up:
            return inf
        low, high = self._latency_s
        wait_s = 0.0
        for _ in range(legs):
            rto_s = _RTO_S
            wait_s += low + (high - low) * self._rng.random()
            while self.loss and self._rng.random() < self.loss:
                wait_s += rto_s
                rto_s *= 2
        return wait_s

    def _stream_probe(self, node: SimNode, probe: StreamProbe) -> None:
        peer = self.by_id[probe.to]
        wait_s = self._stream_s(node, peer, 2)
        ok = wait_s <= _PROBE_LIMIT_S and peer.stalled_until <= self.now
        done = StreamProbeDone(probe.to, probe.seq, ok)
        self._push(self.now + (wait_s if ok else _PROBE_LIMIT_S), node, done)

    def _push_pull(self, node: SimNode, to: NodeId) -> None:
        peer = self.by_id[to]
        wait_s = self._stream_s(node, peer, 1)
        if wait_s <= _STREAM_LIMIT_S:
            asked = _SyncAsked(node, node.machine.full_state(), self.now + _STREAM_LIMIT_S)
            self._push(self.now + wait_s, peer, asked)

    @contextmanager
    def _seed_noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            note = f"simulation of {len(self.nodes)} nodes, seed {self.seed}, at {self.now:.3f} s"
            if note not in getattr(e, "__notes__", ()):
                e.add_note(note)
            raise
