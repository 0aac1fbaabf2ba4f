"""Who is in the mesh and who is alive: SWIM with Lifeguard, as a pure state machine.

    unknown -> alive <-> suspect -> dead -> alive (higher incarnation only)
               any state -> left (said by the subject) -> alive (higher incarnation only)

Each second one member is pinged; a silent one is asked through three others and by a stream, then
suspected, and dead when nobody refutes. Rules that keep this honest:

- Only the subject raises its incarnation; an accusation counts only for the incarnation we hold.
- A remote "dead" is one more accusation unless we have doubted the member ourselves for a while,
  so neither an island's late verdict nor a lying member can kill one who still can answer.
- Time in which this process did not run counts against nobody.
- The dead are not forgotten while the roster has them: knocked at and redialled for ever.

This module does not know sockets, bytes, keys, the roster's signature, or what a dead node means
for a job. Sources: SWIM (Das et al. 2002), Lifeguard (arXiv 1707.00788), hashicorp/memberlist.
Load per node does not grow with n.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple, assert_never

from gpulayer_mesh.core.member import (
    ALIVE,
    DEAD,
    LEFT,
    SUSPECT,
    MemberTable,
    MemberView,
    is_alive,
    is_live,
)
from gpulayer_mesh.core.prober import Prober
from gpulayer_mesh.core.rumour import (
    GOSSIP_BYTES,
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
    RumourQueue,
    Suspect,
    rumour_bytes,
)
from gpulayer_mesh.core.suspicion import (
    Suspicion,
    expected_confirmations,
    push_pull_scale,
    retransmit_limit,
    suspicion_bounds_s,
)
from gpulayer_mesh.core.swim import (
    CloneSeen,
    Contact,
    Effect,
    Event,
    Leave,
    LoadChanged,
    LocalChanged,
    MemberChanged,
    PacketReceived,
    PushPull,
    RecordChanged,
    RosterChanged,
    SelfChanged,
    SendPacket,
    StreamProbe,
    StreamProbeDone,
    SwimConfig,
    Synced,
    Tick,
    Via,
    Woke,
)
from gpulayer_mesh.core.types import AliveRecord, Incarnation, Load, NodeId, NodeState, Rng

__all__ = [
    "CloneSeen",
    "Contact",
    "Effect",
    "Event",
    "Leave",
    "LoadChanged",
    "LocalChanged",
    "MemberChanged",
    "MemberView",
    "Membership",
    "PacketReceived",
    "PushPull",
    "RecordChanged",
    "RosterChanged",
    "SelfChanged",
    "SendPacket",
    "StreamProbe",
    "StreamProbeDone",
    "SwimConfig",
    "Synced",
    "Tick",
    "Via",
    "Woke",
]

HISTORY_MAX = 128  # entries of ~150 B; days of an ordinary mesh
GOODBYES = 10  # members told at once when leaving; gossip does the rest if the process lives on
SYNCS_ON_WAKE = 3  # full-state requests after a sleep: the first members may be gone


class HistoryEntry(NamedTuple):
    now: float
    event: str
    node: NodeId
    old: str
    new: str
    cause: str


class Membership:
    """One node's view of the mesh.

    Args:
        me: our first record; its boot epoch must be higher than any earlier life's.
    """

    def __init__(self, me: AliveRecord, *, config: SwimConfig, rng: Rng, now: float) -> None:
        self.history: deque[HistoryEntry] = deque(maxlen=HISTORY_MAX)
        self._config = config
        self._rng = rng
        self._now = now
        self._me = me.node
        self._own = Alive(me)
        self._table = MemberTable(self._own, rng, now)
        self._views = self._table.views
        self._roster: frozenset[NodeId] = frozenset((me.node,))
        self._load = Load()
        self._prober = Prober(me.node, self._table, self._riders, config=config, rng=rng, now=now)
        self._queue = RumourQueue()
        self._hush = False  # do not spread what everyone else knows
        self._accused = False  # the packet in hand accuses us
        self._suspicions: dict[NodeId, Suspicion] = {}
        self._asked: dict[NodeId, float] = {}  # last surprised full-state request
        self._left = False
        self._clone: Incarnation | None = None
        self._quiet_until = -inf  # no accusations of ours before this
        self._suspicion_due = inf  # not later than the earliest deadline
        self._next_gossip = now
        self._next_push_pull = now + rng.random() * config.push_pull_interval_s
        self._next_knock = inf
        self._next_redial = inf
        self._event: Event = Tick()
        self._out: list[Effect] = []
        self._due = self._next_due()

    @property
    def members(self) -> Mapping[NodeId, MemberView]:
        """Every member we have a record of, ourselves included."""
        return self._views

    @property
    def record(self) -> AliveRecord:
        """What we say of ourselves."""
        return self._own.record

    @property
    def health_score(self) -> int:
        """Lifeguard's local health: 0 is healthy."""
        return self._prober.health.score

    def next_timeout(self) -> float | None:
        return None if self._due == inf else self._due

    def handle(self, now: float, event: Event) -> list[Effect]:
        self._now = now
        self._event = event
        out = self._out = []
        late_s = now - self._due
        if late_s > self._config.late_s and not isinstance(event, Woke):
            self._forgive(late_s)
        if not self._left:
            match event:
                case PacketReceived():
                    self._on_packet(event.sender, event.message, event.via)
                case Tick():
                    pass
                case StreamProbeDone():
                    self._prober.on_stream_probe(now, event)
                case Synced():
                    self._on_synced(event.peer, event.rumours)
                case Contact():
                    self._on_contact(event.node)
                case RosterChanged():
                    self._on_roster(event.members)
                case LocalChanged():
                    self._on_local(event)
                case LoadChanged():
                    self._load = event.load
                case Woke():
                    self._wake()
                case Leave():
                    self._leave()
                case _ as never:
                    assert_never(never)
        due = self._next_due()
        if due <= now:
            self._run_timers()
            due = self._next_due()
        self._due = due
        return out

    def full_state(self) -> tuple[Rumour, ...]:
        """Return everything we believe, for push-pull."""
        return tuple(self._state())

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._table.check(self._me)
        self._prober.check()
        own = self._views[self._me]
        assert own.alive is self._own
        assert own.state is (LEFT if self._left else ALIVE)
        assert self._views.keys() <= self._roster | {self._me}, "a member outside the roster"
        assert set(self._suspicions) == {n for n, v in self._views.items() if v.state is SUSPECT}
        for node, suspicion in self._suspicions.items():
            held = self._views[node].record.incarnation
            assert all(a.incarnation == held for a in suspicion.accusations.values())
            assert suspicion.deadline >= self._suspicion_due
        assert len(self._queue) <= len(self._views)

    # -- timers --

    def _next_due(self) -> float:
        due = self._next_gossip if self._queue else inf
        if self._left:
            return due
        due = min(due, self._prober.due, self._next_push_pull, self._suspicion_due)
        if self._table.dead:
            due = min(due, self._next_knock, self._next_redial)
        return due

    def _run_timers(self) -> None:
        now = self._now
        if not self._left:
            if self._suspicion_due <= now:
                self._expire_suspicions()
            if self._prober.due <= now:
                silent = self._prober.run(now, self._out)
                if silent is not None and now >= self._quiet_until:
                    incarnation = self._views[silent].record.incarnation
                    accusation = Suspect(silent, incarnation, self._me)
                    self._merge_suspect(accusation, "no answer to a probe")
            if self._next_push_pull <= now:
                scale = push_pull_scale(self._table.live)
                self._next_push_pull = now + self._config.push_pull_interval_s * scale
                self._out.extend(PushPull(node) for node in self._table.pick(1, is_alive))
            if self._table.dead:
                self._seek_dead(now)
        if self._queue and self._next_gossip <= now:
            self._gossip()

    def _seek_dead(self, now: float) -> None:
        if self._next_knock <= now:
            self._next_knock = now + self._config.knock_s * self._unhurried()
            self._prober.knock(self._rng.choice(list(self._table.dead)), self._out)
        if self._next_redial <= now:
            self._next_redial = now + self._config.redial_s * self._unhurried()
            self._out.append(PushPull(self._rng.choice(list(self._table.dead))))

    def _unhurried(self) -> float:
        """Return the factor that keeps what one dead member gets from all of us flat in n."""
        return max(1.0, self._table.live / (10 * len(self._table.dead)))

    def _forgive(self, late_s: float) -> None:
        """Time in which we did not run counts against nobody: answers may wait unread."""
        if late_s >= self._config.suspicion_min_s:  # as long as a sleep: others may have buried us
            self._note(self._me, "", "", f"did not run for {late_s:.1f} s")
            if not self._left:
                self._wake()
            return
        self._prober.forgive(self._now, late_s)
        for suspicion in self._suspicions.values():
            suspicion.started += late_s
        self._suspicion_due = self._first_deadline()

    # -- packets --

    def _on_packet(self, sender: NodeId, message: Message, via: Via) -> None:
        if sender not in self._roster or sender == self._me:
            return
        for rumour in message.gossip:
            self._merge(rumour)
        view = self._views.get(sender)
        if view is not None:
            view.link_up().heard = self._now
        # A stranger, or one we hold dead (1 s for packets that were under way): compare notes.
        if view is None or (view.state in (DEAD, LEFT) and self._now - view.since > 1.0):
            self._ask(sender, self._config.ask_again_s)
        match message:
            case Ping():
                if message.to == self._me:
                    ack = Ack(message.seq, self._load, self._riders(sender))
                    self._out.append(SendPacket(sender, ack, via))
            case Ack():
                self._prober.on_ack(self._now, sender, message, via, self._out)
            case PingReq():
                self._prober.on_ping_req(self._now, sender, message, via, self._out)
            case Nack():
                self._prober.on_nack(sender, message)
            case Gossip():
                pass
            case _ as never:
                assert_never(never)
        self._accused = False

    def _send(self, to: NodeId, message: Message) -> None:
        self._out.append(SendPacket(to, message, self._views[to].route))

    # -- gossip --

    @property
    def _limit(self) -> int:
        return retransmit_limit(self._config.retransmit_mult, self._table.live)

    def _riders(self, to: NodeId) -> tuple[Rumour, ...]:
        """Return the rumours for a packet to `to`; what one of us must refute comes first."""
        must: list[Rumour] = []
        view = self._views.get(to)
        if view is not None and view.state is not ALIVE:
            if view.verdict is not None:
                must.append(view.verdict)
            else:
                accusations = self._suspicions[to].accusations
                must.append(accusations.get(self._me) or next(iter(accusations.values())))
        if self._accused:  # the sender missed our refutation
            must.append(self._own)
        if not must and not self._queue:
            return ()
        room_bytes = GOSSIP_BYTES
        front: list[Rumour] = []
        for rumour in must:
            if (size_bytes := rumour_bytes(rumour)) <= room_bytes:
                room_bytes -= size_bytes
                front.append(rumour)
        return (*front, *self._queue.take(room_bytes, self._limit))

    def _gossip(self) -> None:
        config, now = self._config, self._now
        self._next_gossip = now + config.gossip_interval_s

        def wants(view: MemberView) -> bool:
            fresh = now - view.since < config.gossip_to_dead_s
            return is_live(view) or (view.state is DEAD and fresh)

        for node in self._table.pick(config.gossip_nodes, wants):
            if rumours := self._queue.take(GOSSIP_BYTES, self._limit):
                self._send(node, Gossip(rumours))

    def _spread(self, rumour: Rumour) -> None:
        if not self._hush:
            self._queue.put(rumour)

    def _ask(self, node: NodeId, again_s: float) -> None:
        if self._now - self._asked.get(node, -inf) >= again_s:
            self._asked[node] = self._now
            self._out.append(PushPull(node))

    def _state(self) -> Iterator[Rumour]:
        for node, view in self._views.items():
            yield view.alive
            if view.verdict is not None:
                yield view.verdict
            elif view.state is SUSPECT:
                yield from self._suspicions[node].accusations.values()

    # -- merge rules --

    def _merge(self, rumour: Rumour) -> None:
        match rumour:
            case Alive():
                self._merge_alive(rumour)
            case Suspect():
                self._merge_suspect(rumour)
            case Dead():
                self._merge_dead(rumour)
            case Left():
                self._merge_left(rumour)
            case _ as never:
                assert_never(never)

    def _merge_alive(self, alive: Alive, doubt: Suspect | Dead | Left | None = None) -> None:
        record = alive.record
        view = self._views.get(record.node)
        if view is None:
            if record.node in self._roster:
                self._admit(alive, doubt)
            return
        if alive is view.alive:
            return
        if record.node == self._me:
            self._meet_own_name(record)
            return
        if record.incarnation <= view.incarnation:
            return  # old news
        restarted = record.incarnation.boot > view.record.incarnation.boot
        view.alive = alive
        view.verdict = None
        self._suspicions.pop(record.node, None)
        self._spread(alive)
        self._out.append(RecordChanged(record))
        if view.state is not ALIVE:
            self._turn(view, ALIVE, "restarted" if restarted else "refuted")

    def _admit(self, alive: Alive, doubt: Suspect | Dead | Left | None) -> None:
        """Take in a new member, at once with what the same full state says against it."""
        view = self._table.add(alive, self._now)
        self._spread(alive)
        self._out.append(RecordChanged(alive.record))
        if doubt is None or doubt.incarnation != alive.record.incarnation:
            self._tell(alive.record.node, None, ALIVE, "joined")
        elif isinstance(doubt, Left):
            view.verdict = doubt
            self._turn(view, LEFT, "had left when first heard of", new_here=True)
        elif doubt.by in self._roster:
            self._doubt(view, doubt, "accused when first heard of", new_here=True)

    def _meet_own_name(self, record: AliveRecord) -> None:
        """An older record is our former life; anything else nobody but we could have written."""
        if record.incarnation < self.record.incarnation or record == self.record:
            return
        if record.incarnation != self._clone:
            self._clone = record.incarnation
            self._note(self._me, "", "", "our identity lives elsewhere")
            self._out.append(CloneSeen(record))

    def _merge_suspect(self, accusation: Suspect | Dead, cause: str = "") -> None:
        if accusation.by not in self._roster:
            return
        if accusation.node == self._me:
            self._refute(accusation.incarnation)
            return
        view = self._views.get(accusation.node)
        # A newer incarnation than ours: the record will come. Nobody can invent one, either.
        if view is None or accusation.incarnation != view.record.incarnation:
            return
        if view.state is ALIVE:
            self._doubt(view, accusation, cause or f"accused by {accusation.by[:8]}")
        elif view.state is SUSPECT:
            suspicion = self._suspicions[accusation.node]
            if suspicion.confirm(accusation):
                self._suspicion_due = min(self._suspicion_due, suspicion.deadline)
                self._spread(accusation)

    def _merge_dead(self, dead: Dead) -> None:
        suspicion = self._suspicions.get(dead.node)
        # An honest accuser has waited since about when its suspicion reached us; see the header.
        if suspicion is None or self._now - suspicion.started < self._config.suspicion_min_s / 2:
            self._merge_suspect(dead)
            return
        view = self._views[dead.node]
        if dead.by in self._roster and dead.incarnation == view.record.incarnation:
            self._bury(view, dead, f"declared dead by {dead.by[:8]}")

    def _merge_left(self, left: Left) -> None:
        view = self._views.get(left.node)
        if view is None or left.node == self._me or view.state is LEFT:
            return
        if left.incarnation < view.record.incarnation:
            return
        self._suspicions.pop(left.node, None)
        view.verdict = left
        self._spread(left)
        self._turn(view, LEFT, "said goodbye")

    def _refute(self, incarnation: Incarnation) -> None:
        self._accused = True
        # Older: already refuted, whoever said it gets our record. Newer: nobody holds it.
        if incarnation == self.record.incarnation:
            self._prober.health.apply(1)
            self._renew()

    def _renew(self, **changes: Any) -> None:
        old = self.record.incarnation
        incarnation = Incarnation(old.boot, old.counter + 1)
        record = replace(self.record, incarnation=incarnation, **changes)
        self._own = self._views[self._me].alive = Alive(record)
        self._queue.put(self._own)
        self._out.append(SelfChanged(record))

    # -- transitions --

    def _doubt(
        self, view: MemberView, first: Suspect | Dead, cause: str, *, new_here: bool = False
    ) -> None:
        config, health, live = self._config, self._prober.health, self._table.live
        lower_s, upper_s = suspicion_bounds_s(
            live,
            config.suspicion_min_s,
            config.suspicion_max_mult,
            health.score / max(1, health.limit),
        )
        k = expected_confirmations(live)
        suspicion = Suspicion(first, now=self._now, k=k, lower_s=lower_s, upper_s=upper_s)
        self._suspicions[first.node] = suspicion
        self._suspicion_due = min(self._suspicion_due, suspicion.deadline)
        self._spread(first)
        self._turn(view, SUSPECT, cause, new_here=new_here)

    def _expire_suspicions(self) -> None:
        for node, suspicion in list(self._suspicions.items()):
            if suspicion.deadline <= self._now:
                view = self._views[node]
                cause = f"no refutation in {self._now - suspicion.started:.1f} s"
                self._bury(view, Dead(node, view.record.incarnation, self._me), cause)
        self._suspicion_due = self._first_deadline()

    def _first_deadline(self) -> float:
        return min((s.deadline for s in self._suspicions.values()), default=inf)

    def _bury(self, view: MemberView, dead: Dead, cause: str) -> None:
        del self._suspicions[dead.node]
        view.verdict = dead
        self._spread(dead)
        if not self._table.dead:
            self._next_knock = self._next_redial = inf
        self._turn(view, DEAD, cause)
        factor = self._unhurried()
        self._next_knock = min(self._next_knock, self._now + self._config.knock_s * factor)
        wait_s = self._rng.random() * self._config.redial_s * factor
        self._next_redial = min(self._next_redial, self._now + wait_s)

    def _turn(
        self, view: MemberView, new: NodeState, cause: str, *, new_here: bool = False
    ) -> None:
        old = None if new_here else view.state
        self._table.turn(view, new, self._now)
        self._tell(view.alive.record.node, old, new, cause)

    def _tell(self, node: NodeId, old: NodeState | None, new: NodeState, cause: str) -> None:
        self._out.append(MemberChanged(node, old, new, cause))
        if not self._hush:
            self._note(node, old or "", new, cause)

    def _note(self, node: NodeId, old: str, new: str, cause: str) -> None:
        event = type(self._event).__name__
        self.history.append(HistoryEntry(self._now, event, node, old, new, cause))

    # -- other events --

    def _on_synced(self, peer: NodeId, rumours: tuple[Rumour, ...]) -> None:
        if peer not in self._roster:
            return
        self._hush = len(self._views) == 1  # our first look at a mesh that knows all this
        others = [rumour for rumour in rumours if not isinstance(rumour, Alive)]
        doubts = {rumour.node: rumour for rumour in others}
        for rumour in rumours:
            if isinstance(rumour, Alive):
                self._merge_alive(rumour, doubts.get(rumour.record.node))
        for rumour in others:
            match rumour:
                case Suspect() | Dead():
                    self._merge_suspect(rumour)
                case Left():
                    self._merge_left(rumour)
                case _ as never:
                    assert_never(never)
        if self._hush:
            self._note(peer, "", "", f"learnt of {len(self._views) - 1} members")
        self._hush = self._accused = False
        view = self._views.get(peer)
        if view is not None:
            view.link_up().heard = self._now

    def _on_contact(self, node: NodeId) -> None:
        if node not in self._roster or node == self._me:
            return
        view = self._views.get(node)
        if view is not None:
            view.link_up().heard = self._now
        if view is None or view.state is not ALIVE:
            self._ask(node, 1.0)

    def _on_roster(self, roster: frozenset[NodeId]) -> None:
        added = roster - self._roster
        self._roster = roster
        for node in [n for n in self._views if n not in roster and n != self._me]:
            state = self._views[node].state
            self._suspicions.pop(node, None)
            self._queue.drop(node)
            self._table.remove(node)
            self._tell(node, state, LEFT, "removed from the roster")
            self._prober.forget(node)
        self._asked = {n: t for n, t in self._asked.items() if n in roster}
        if (
            added and self._table.order
        ):  # rumours about them may have come before the roster; spread over a second
            self._next_push_pull = min(self._next_push_pull, self._now + self._rng.random())

    def _on_local(self, local: LocalChanged) -> None:
        changes = {
            "name": local.name,
            "zone": local.zone,
            "addresses": local.addresses,
            "caps_version": local.caps_version,
        }
        if any(getattr(self.record, field) != value for field, value in changes.items()):
            self._renew(**changes)

    def _wake(self) -> None:
        """Doubt ourselves first: nobody is accused for one suspicion period."""
        self._prober.reset(self._now)
        for suspicion in self._suspicions.values():
            suspicion.restart(self._now)
        self._suspicion_due = self._first_deadline()
        quiet_s, _ = suspicion_bounds_s(self._table.live, self._config.suspicion_min_s, 1.0)
        self._quiet_until = self._now + quiet_s
        self._prober.health.apply(1)
        self._renew()
        self._asked.clear()
        peers = self._table.pick(SYNCS_ON_WAKE, is_live)
        peers = peers or self._table.pick(SYNCS_ON_WAKE, lambda view: view.state is DEAD)
        self._out.extend(PushPull(node) for node in peers)

    def _leave(self) -> None:
        left = Left(self._me, self.record.incarnation)
        for node in self._table.pick(GOODBYES, is_live):
            self._send(node, Gossip((left,)))
        own = self._views[self._me]
        own.verdict = left
        self._turn(own, LEFT, "leaving")
        self._queue.put(left)
        self._next_gossip = self._now + self._config.gossip_interval_s
        self._left = True
