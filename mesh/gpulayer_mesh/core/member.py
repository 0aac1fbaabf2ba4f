"""What one node holds of the others: one view each, and the table they stand in.

The table keeps the counts and the probe order that follow from the states; it does not know why
a state changes (`membership` does). Memory: 72 B per view, plus a `Link` per member with whom
there was direct traffic; records are shared with everyone who holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Literal

from gpulayer_mesh.core.rumour import Alive, Dead, Left
from gpulayer_mesh.core.swim import Via
from gpulayer_mesh.core.types import AliveRecord, Incarnation, Load, NodeId, NodeState, Rng

ALIVE, SUSPECT, DEAD, LEFT = NodeState.ALIVE, NodeState.SUSPECT, NodeState.DEAD, NodeState.LEFT


class Link:
    """What direct traffic with a member taught us; exists only after some."""

    __slots__ = ("heard", "load", "retry_at", "rtt_s", "udp_missed", "udp_seq", "via")

    def __init__(self) -> None:
        self.heard: float | None = None
        self.load: Load | None = None
        self.rtt_s: float | None = None
        self.via: Via | Literal[""] = ""
        self.udp_seq = -1  # last ping sent by UDP and not answered by UDP
        self.udp_missed = 0
        self.retry_at = inf


class MemberView:
    """What this node believes of one member. Read only for everyone but `Membership`."""

    __slots__ = ("alive", "link", "since", "state", "verdict")

    def __init__(self, alive: Alive, now: float) -> None:
        self.alive = alive
        self.state = ALIVE
        self.since = now  # monotonic time of the last change of `state`
        self.verdict: Dead | Left | None = None  # why it is dead or left
        self.link: Link | None = None

    @property
    def record(self) -> AliveRecord:
        return self.alive.record

    @property
    def heard(self) -> float | None:
        return self.link.heard if self.link else None

    @property
    def rtt_s(self) -> float | None:
        return self.link.rtt_s if self.link else None

    @property
    def via(self) -> str:
        return self.link.via if self.link else ""

    @property
    def load(self) -> Load | None:
        return self.link.load if self.link else None

    @property
    def incarnation(self) -> Incarnation:
        """The newest one heard of: a goodbye may be newer than the record we hold."""
        known = self.alive.record.incarnation
        return max(known, self.verdict.incarnation) if isinstance(self.verdict, Left) else known

    @property
    def route(self) -> Via:
        """How packets for it travel."""
        return "tcp" if self.link is not None and self.link.via == "tcp" else "udp"

    def link_up(self) -> Link:
        if self.link is None:
            self.link = Link()
        return self.link


class MemberTable:
    """All views by node id; `order` holds everyone but ourselves."""

    __slots__ = ("_rng", "_turn", "dead", "live", "order", "views")

    def __init__(self, own: Alive, rng: Rng, now: float) -> None:
        self.views: dict[NodeId, MemberView] = {own.node: MemberView(own, now)}
        self.order: list[NodeId] = []  # shuffled at each round of probes
        self.live = 1  # alive and suspect members, ourselves included
        self.dead: dict[NodeId, None] = {}
        self._turn = 0
        self._rng = rng

    def add(self, alive: Alive, now: float) -> MemberView:
        node = alive.record.node
        view = self.views[node] = MemberView(alive, now)
        self.order.append(node)  # to a random place: a newcomer must not always be probed last
        place = int(self._rng.random() * len(self.order))
        self.order[place], self.order[-1] = node, self.order[place]
        self.live += 1
        return view

    def turn(self, view: MemberView, new: NodeState, now: float) -> None:
        """Move a member to a state and keep the counts."""
        node, old = view.alive.record.node, view.state
        view.state = new
        view.since = now
        self.live += (new in (ALIVE, SUSPECT)) - (old in (ALIVE, SUSPECT))
        if old is DEAD:
            del self.dead[node]
        if new is DEAD:
            self.dead[node] = None

    def remove(self, node: NodeId) -> None:
        view = self.views[node]
        self.turn(view, LEFT, view.since)
        del self.views[node]
        place = self.order.index(node)
        del self.order[place]
        self._turn -= place < self._turn

    def next_target(self) -> NodeId | None:
        """Return whom to probe: a randomised round robin, which bounds the time until a crash is
        noticed (SWIM, section 4.3)."""
        for _ in range(len(self.order)):
            if self._turn >= len(self.order):
                self._turn = 0
                self._rng.shuffle(self.order)
            node = self.order[self._turn]
            self._turn += 1
            if self.views[node].state in (ALIVE, SUSPECT):
                return node
        return None

    def pick(
        self, count: int, suits: Callable[[MemberView], bool], skip: NodeId = ""
    ) -> list[NodeId]:
        """Return up to `count` random other members that suit."""
        order, views = self.order, self.views
        if len(order) <= 16:
            fit = [node for node in order if node != skip and suits(views[node])]
            return fit if len(fit) <= count else self._rng.sample(fit, count)
        picked: list[NodeId] = []
        for _ in range(3 * len(order)):  # as memberlist: do not search a dead mesh for ever
            node = order[int(self._rng.random() * len(order))]
            if node != skip and node not in picked and suits(views[node]):
                picked.append(node)
                if len(picked) == count:
                    break
        return picked

    def check(self, me: NodeId) -> None:
        states = {node: view.state for node, view in self.views.items()}
        assert sorted(self.order) == sorted(n for n in states if n != me)
        assert self.live == sum(s in (ALIVE, SUSPECT) for s in states.values())
        assert set(self.dead) == {n for n, s in states.items() if s is DEAD}
        for view in self.views.values():
            if view.state is DEAD:
                assert isinstance(view.verdict, Dead)
                assert view.verdict.incarnation == view.record.incarnation
            elif view.state is LEFT:
                assert isinstance(view.verdict, Left)
            else:
                assert view.verdict is None


def is_alive(view: MemberView) -> bool:
    return view.state is ALIVE


def is_live(view: MemberView) -> bool:
    return view.state in (ALIVE, SUSPECT)
