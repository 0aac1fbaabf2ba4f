"""memberlist's list of situations, one by one, and those that GPUlayer adds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from gpulayer_mesh.core.member import MemberView
from gpulayer_mesh.core.membership import (
    CloneSeen,
    Contact,
    Effect,
    Event,
    Leave,
    LoadChanged,
    LocalChanged,
    MemberChanged,
    Membership,
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
    Woke,
)
from gpulayer_mesh.core.prober import RELAYS_MAX
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
from gpulayer_mesh.core.types import Address, AliveRecord, Incarnation, Load, NodeId, NodeState

ME = "00" * 32


def node(i: int) -> NodeId:
    return f"{i:064x}"


def record(i: int, boot: int = 1, counter: int = 0) -> AliveRecord:
    address = Address(f"10.0.0.{i + 1}", 7946)
    return AliveRecord(node(i), Incarnation(boot, counter), f"node-{i}", "", (address,), 1)


def alive(i: int, boot: int = 1, counter: int = 0) -> Alive:
    return Alive(record(i, boot, counter))


def suspect(i: int, by: int, boot: int = 1, counter: int = 0) -> Suspect:
    return Suspect(node(i), Incarnation(boot, counter), node(by))


def dead(i: int, by: int, boot: int = 1, counter: int = 0) -> Dead:
    return Dead(node(i), Incarnation(boot, counter), node(by))


class Bench:
    """One membership (node 0) and the nodes 1..n-1, played by the test."""

    def __init__(self, n: int, *, known: bool = True, boot: int = 1) -> None:
        self.now = 1000.0
        self.n = n
        me = record(0, boot)
        self.machine = Membership(me, config=SwimConfig(), rng=random.Random(7), now=self.now)
        self.tell(RosterChanged(frozenset(node(i) for i in range(n))))
        if known:
            self.tell(Synced(node(1), tuple(alive(i) for i in range(1, n))))

    def tell(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(self.now, event)
        self.machine.check()
        return effects

    def hear(self, sender: int, message: Message, via: str = "udp") -> list[Effect]:
        return self.tell(PacketReceived(node(sender), message, "tcp" if via == "tcp" else "udp"))

    def say(self, sender: int, *rumours: Rumour) -> list[Effect]:
        return self.hear(sender, Gossip(rumours))

    def wait(self, seconds: float) -> Iterator[Effect]:
        """Let time pass with a tick at each wish; yields effects while the test may answer."""
        until = self.now + seconds
        while (due := self.machine.next_timeout()) is not None and due <= until:
            self.now = max(self.now, due)
            yield from self.tell(Tick())
        self.now = until

    def idle(self, seconds: float, answering: bool = True) -> list[Effect]:
        """Let time pass; every ping is answered at once unless told otherwise."""
        seen = []
        for effect in self.wait(seconds):
            seen.append(effect)
            match effect:
                case SendPacket(to, Ping(seq, target), via) if answering and to == target:
                    self.tell(PacketReceived(to, Ack(seq, Load()), via))
        return seen

    def view(self, i: int) -> MemberView:
        return self.machine.members[node(i)]

    def state(self, i: int) -> NodeState:
        return self.view(i).state


def sent(effects: list[Effect], kind: type[Message]) -> list[SendPacket]:
    return [e for e in effects if isinstance(e, SendPacket) and isinstance(e.message, kind)]


def of(effects: list[Effect], kind: type[Effect]) -> list[Effect]:
    return [e for e in effects if isinstance(e, kind)]


def gossiped(effects: list[Effect]) -> list[Rumour]:
    return [r for e in effects if isinstance(e, SendPacket) for r in e.message.gossip]


def probe_of(bench: Bench, target: int) -> tuple[SendPacket, list[Effect]]:
    """Run until `target` is pinged; return the ping's packet and what came with it."""
    for _ in range(50):
        due = bench.machine.next_timeout()
        assert due is not None
        bench.now = due
        effects = bench.tell(Tick())
        for packet in sent(effects, Ping):
            assert isinstance(packet.message, Ping)
            if packet.to == node(target):
                return packet, effects
            bench.hear(int(packet.to, 16), Ack(packet.message.seq, Load()))
    raise AssertionError("never pinged")


# -- alive -----------------------------------------------------------------------------------


def test_new_node_is_alive_and_spread() -> None:
    bench = Bench(3, known=False)
    effects = bench.tell(Synced(node(1), (alive(1),)))
    assert of(effects, MemberChanged) == [MemberChanged(node(1), None, NodeState.ALIVE, "joined")]
    assert of(effects, RecordChanged) == [RecordChanged(record(1))]
    effects = bench.say(1, alive(2))
    assert bench.state(2) is NodeState.ALIVE
    assert alive(2) in gossiped(effects)


def test_alive_of_a_node_outside_the_roster_is_ignored() -> None:
    bench = Bench(3)
    assert bench.say(1, alive(9)) == []
    assert node(9) not in bench.machine.members


def test_alive_with_old_or_same_incarnation_changes_nothing() -> None:
    bench = Bench(3)
    bench.say(1, alive(2, counter=5))
    before = bench.view(2).record
    for counter in (4, 5):
        newer_words = replace(record(2, counter=counter), name="other")
        effects = bench.say(1, Alive(newer_words))
        assert not of(effects, RecordChanged)
        assert bench.view(2).record == before


def test_alive_with_newer_incarnation_replaces_the_record() -> None:
    bench = Bench(3)
    moved = replace(record(2, counter=1), addresses=(Address("10.9.9.9", 1),))
    effects = bench.say(1, Alive(moved))
    assert of(effects, RecordChanged) == [RecordChanged(moved)]
    assert not of(effects, MemberChanged)
    assert Alive(moved) in gossiped(effects)


def test_alive_with_same_incarnation_does_not_clear_a_suspicion() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1))
    bench.say(1, alive(2))
    assert bench.state(2) is NodeState.SUSPECT


def test_alive_with_newer_incarnation_clears_a_suspicion_and_its_timer() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1))
    effects = bench.say(1, alive(2, counter=1))
    assert of(effects, MemberChanged) == [
        MemberChanged(node(2), NodeState.SUSPECT, NodeState.ALIVE, "refuted")
    ]
    bench.idle(30.0)
    assert bench.state(2) is NodeState.ALIVE


def test_dead_replayed_by_its_own_alive_stays_dead() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1))
    bench.idle(4.1)
    assert bench.state(2) is NodeState.DEAD
    bench.say(1, alive(2))
    assert bench.state(2) is NodeState.DEAD


def test_restarted_node_is_alive_at_once_whatever_was_said_of_its_last_life() -> None:
    bench = Bench(3)
    bench.say(1, alive(2, counter=40))
    bench.say(1, suspect(2, by=1, counter=40))
    bench.idle(4.1)
    assert bench.state(2) is NodeState.DEAD
    effects = bench.tell(Synced(node(2), (alive(2, boot=2),)))
    assert of(effects, MemberChanged) == [
        MemberChanged(node(2), NodeState.DEAD, NodeState.ALIVE, "restarted")
    ]
    assert alive(2, boot=2) in gossiped(effects + bench.idle(0.3))
    bench.say(1, suspect(2, by=1, counter=40), dead(2, by=1, counter=40))
    assert bench.state(2) is NodeState.ALIVE


# -- suspect ---------------------------------------------------------------------------------


def test_suspect_of_an_unknown_node_is_ignored() -> None:
    bench = Bench(4, known=False)
    bench.tell(Synced(node(1), (alive(1),)))
    bench.say(1, suspect(2, by=1))
    assert node(2) not in bench.machine.members


def test_suspect_starts_a_suspicion_and_is_spread() -> None:
    bench = Bench(3)
    effects = bench.say(1, suspect(2, by=1))
    assert bench.state(2) is NodeState.SUSPECT
    assert suspect(2, by=1) in gossiped(effects)


def test_suspect_with_old_incarnation_is_ignored() -> None:
    bench = Bench(3)
    bench.say(1, alive(2, counter=2))
    bench.say(1, suspect(2, by=1, counter=1))
    assert bench.state(2) is NodeState.ALIVE


def test_suspect_with_invented_incarnation_is_ignored() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1, counter=2**60))
    assert bench.state(2) is NodeState.ALIVE


def test_suspect_by_a_node_outside_the_roster_is_ignored() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=9))
    assert bench.state(2) is NodeState.ALIVE


def test_suspect_of_a_dead_node_is_ignored() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1))
    bench.idle(4.1)
    assert not of(bench.say(1, suspect(2, by=1)), MemberChanged)
    assert bench.state(2) is NodeState.DEAD


def test_suspect_said_twice_by_one_accuser_neither_shortens_nor_spreads() -> None:
    bench = Bench(5)
    bench.say(1, suspect(2, by=1))
    bench.idle(3.0)  # until the rumour has been sent as often as it may
    assert not gossiped(bench.say(1, suspect(2, by=1)))
    bench.idle(10.0)
    assert bench.state(2) is NodeState.SUSPECT


def test_suspect_confirmed_by_two_others_dies_at_the_minimum() -> None:
    bench = Bench(5)
    bench.say(1, suspect(2, by=1))
    for by in (3, 4):
        bench.now += 0.1
        effects = bench.say(by, suspect(2, by=by))
        effects += bench.idle(0.2)
        assert suspect(2, by=by) in gossiped(effects)
    bench.idle(3.3)
    assert bench.state(2) is NodeState.SUSPECT
    effects = bench.idle(0.2)
    assert bench.state(2) is NodeState.DEAD
    assert Dead(node(2), Incarnation(1, 0), ME) in gossiped(effects)


def test_suspect_without_confirmation_dies_at_the_maximum() -> None:
    bench = Bench(5)
    bench.say(1, suspect(2, by=1))
    bench.idle(23.9)
    assert bench.state(2) is NodeState.SUSPECT
    bench.idle(0.2)
    assert bench.state(2) is NodeState.DEAD


def test_suspect_of_ourselves_is_refuted_with_a_higher_incarnation() -> None:
    bench = Bench(3)
    effects = bench.say(1, suspect(0, by=1))
    assert of(effects, SelfChanged) == [SelfChanged(record(0, counter=1))]
    assert alive(0, counter=1) in gossiped(effects)
    assert bench.state(0) is NodeState.ALIVE
    assert bench.machine.health_score == 1


def test_suspect_of_ourselves_already_refuted_is_answered_but_not_refuted_again() -> None:
    bench = Bench(3)
    bench.say(1, suspect(0, by=1))
    bench.idle(5.0)  # the refutation has been sent as often as it may
    effects = bench.hear(1, Ping(5, ME, (suspect(0, by=1),)))
    assert not of(effects, SelfChanged)
    assert sent(effects, Ack)[0].message.gossip == (alive(0, counter=1),)


def test_ping_to_a_suspect_carries_the_accusation_first() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1), alive(1, counter=1))
    packet, _ = probe_of(bench, 2)
    assert packet.message.gossip[0] == suspect(2, by=1)


# -- dead and left ---------------------------------------------------------------------------


def test_dead_of_an_unknown_node_is_ignored() -> None:
    bench = Bench(4, known=False)
    bench.say(1, dead(2, by=1))
    assert node(2) not in bench.machine.members


def test_dead_with_old_incarnation_is_ignored() -> None:
    bench = Bench(3)
    bench.say(1, alive(2, counter=2))
    bench.say(1, dead(2, by=1, counter=1))
    assert bench.state(2) is NodeState.ALIVE


def test_dead_of_one_we_hold_alive_is_only_an_accusation() -> None:
    bench = Bench(3)
    bench.say(1, dead(2, by=1))
    assert bench.state(2) is NodeState.SUSPECT
    bench.now += 0.1
    bench.say(1, dead(2, by=1))  # the same rumour comes several times
    assert bench.state(2) is NodeState.SUSPECT


def test_dead_of_one_we_suspect_for_a_while_is_believed_and_spread() -> None:
    bench = Bench(5)
    bench.say(1, suspect(2, by=1))
    bench.idle(3.0)
    effects = bench.say(3, dead(2, by=3))
    assert bench.state(2) is NodeState.DEAD
    effects += bench.idle(0.3)
    assert dead(2, by=3) in gossiped(effects)


def test_dead_of_a_dead_node_is_no_news() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1))
    bench.idle(10.0)
    assert not gossiped(bench.say(1, dead(2, by=1)))


def test_dead_of_ourselves_is_refuted() -> None:
    bench = Bench(3)
    effects = bench.say(1, dead(0, by=1))
    assert of(effects, SelfChanged) == [SelfChanged(record(0, counter=1))]
    assert bench.state(0) is NodeState.ALIVE


def test_left_is_believed_at_once_and_later_accusations_are_not() -> None:
    bench = Bench(3)
    effects = bench.say(2, Left(node(2), Incarnation(1, 0)))
    assert of(effects, MemberChanged) == [
        MemberChanged(node(2), NodeState.ALIVE, NodeState.LEFT, "said goodbye")
    ]
    bench.say(1, suspect(2, by=1), dead(2, by=1), alive(2))
    assert bench.state(2) is NodeState.LEFT
    assert not any(p.to == node(2) for p in sent(bench.idle(10.0), Ping))


def test_left_of_an_earlier_life_is_ignored() -> None:
    bench = Bench(3)
    bench.say(2, alive(2, boot=2))
    bench.say(1, Left(node(2), Incarnation(1, 9)))
    assert bench.state(2) is NodeState.ALIVE


def test_left_node_that_returns_is_alive() -> None:
    bench = Bench(3)
    bench.say(2, Left(node(2), Incarnation(1, 3)))
    bench.say(2, alive(2, counter=3))  # its record, delayed: not a return
    assert bench.state(2) is NodeState.LEFT
    bench.say(2, alive(2, boot=2))
    assert bench.state(2) is NodeState.ALIVE


def test_leaving_tells_others_and_stops_everything_else() -> None:
    bench = Bench(4)
    effects = bench.tell(Leave())
    left = Left(ME, Incarnation(1, 0))
    assert {p.to for p in sent(effects, Gossip)} == {node(1), node(2), node(3)}
    assert set(gossiped(effects)) == {left}
    assert bench.say(1, suspect(0, by=1)) == []
    later = bench.idle(60.0)
    assert not sent(later, Ping)
    assert set(gossiped(later)) == {left}
    assert bench.machine.next_timeout() is None


# -- probing ---------------------------------------------------------------------------------


def test_probes_visit_every_member_once_per_round() -> None:
    bench = Bench(6)
    targets = [p.to for p in sent(bench.idle(50.0), Ping)]
    rounds = [targets[i : i + 5] for i in range(0, 50, 5)]
    assert all(sorted(r) == [node(i) for i in range(1, 6)] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_answered_probe_records_time_load_and_way() -> None:
    bench = Bench(3)
    packet, _ = probe_of(bench, 2)
    assert isinstance(packet.message, Ping)
    bench.now += 0.02
    bench.hear(2, Ack(packet.message.seq, Load(free_slots=3)))
    view = bench.view(2)
    assert view.rtt_s == pytest.approx(0.02)
    assert view.load == Load(free_slots=3)
    assert view.heard == bench.now
    assert view.via == "udp"


def test_idle_mesh_sends_no_gossip_and_one_ping_a_second() -> None:
    bench = Bench(3)
    bench.idle(10.0)
    effects = bench.idle(100.0)
    assert len(sent(effects, Ping)) == 100
    assert not sent(effects, Gossip)
    assert not gossiped(effects)


def test_silent_member_is_asked_through_three_others_and_by_stream_then_suspected() -> None:
    bench = Bench(6)
    packet, _ = probe_of(bench, 2)
    assert isinstance(packet.message, Ping)
    asked = list(bench.wait(0.5))
    requests = sent(asked, PingReq)
    assert len({r.to for r in requests}) == 3
    assert node(2) not in {r.to for r in requests}
    assert of(asked, StreamProbe) == [StreamProbe(node(2), packet.message.seq)]
    for request in requests:
        bench.hear(int(request.to, 16), Nack(packet.message.seq))
    bench.tell(StreamProbeDone(node(2), packet.message.seq, False))
    assert bench.state(2) is NodeState.ALIVE
    bench.idle(0.6)
    assert bench.state(2) is NodeState.SUSPECT
    assert bench.machine.health_score == 0  # every relay answered: the fault is not ours


def test_missing_nacks_lower_local_health() -> None:
    bench = Bench(6)
    packet, _ = probe_of(bench, 2)
    assert isinstance(packet.message, Ping)
    requests = sent(list(bench.wait(0.5)), PingReq)
    bench.hear(int(requests[0].to, 16), Nack(packet.message.seq))
    effects = list(bench.wait(0.5))
    assert bench.state(2) is NodeState.SUSPECT
    assert bench.machine.health_score == 2
    # The next probe began in that moment; its timeouts are three times as long.
    assert sent(effects, Ping)
    assert not sent(list(bench.wait(1.4)), PingReq)
    assert sent(list(bench.wait(0.2)), PingReq)


@pytest.mark.parametrize("way", ["relay", "stream", "late"])
def test_indirect_sign_of_life_prevents_the_suspicion(way: str) -> None:
    bench = Bench(6)
    packet, _ = probe_of(bench, 2)
    assert isinstance(packet.message, Ping)
    seq = packet.message.seq
    requests = sent(list(bench.wait(0.5)), PingReq)
    if way == "relay":
        bench.hear(int(requests[0].to, 16), Ack(seq, Load(jobs=2)))
        assert bench.view(2).load == Load(jobs=2)
    elif way == "stream":
        bench.tell(StreamProbeDone(node(2), seq, True))
    else:
        bench.hear(2, Ack(seq, Load()))
    bench.idle(1.0)
    assert bench.state(2) is NodeState.ALIVE


def test_ack_by_a_node_that_was_not_asked_counts_for_nothing() -> None:
    bench = Bench(6)
    packet, _ = probe_of(bench, 2)
    assert isinstance(packet.message, Ping)
    relays = {r.to for r in sent(list(bench.wait(0.5)), PingReq)}
    stranger = next(i for i in (1, 3, 4, 5) if node(i) not in relays)
    bench.hear(stranger, Ack(packet.message.seq, Load()))
    bench.hear(2, Ack(packet.message.seq + 1, Load()))
    bench.idle(0.6)
    assert bench.state(2) is NodeState.SUSPECT


def test_ping_is_answered_the_way_it_came_with_our_load() -> None:
    bench = Bench(3)
    bench.tell(LoadChanged(Load(jobs=7)))
    for via in ("udp", "tcp"):
        effects = bench.hear(1, Ping(77, ME), via)
        assert sent(effects, Ack) == [SendPacket(node(1), Ack(77, Load(jobs=7)), via)]


def test_ping_meant_for_another_node_is_not_answered() -> None:
    bench = Bench(3)
    assert not sent(bench.hear(1, Ping(1, node(2))), Ack)


def test_packet_from_outside_the_roster_is_ignored() -> None:
    bench = Bench(3)
    assert bench.hear(9, Ping(1, ME, (suspect(2, by=1),))) == []
    assert bench.state(2) is NodeState.ALIVE


def test_ping_request_is_relayed_and_its_ack_passed_back() -> None:
    bench = Bench(3)
    [ping] = sent(bench.hear(1, PingReq(500, node(2))), Ping)
    assert ping.to == node(2)
    assert isinstance(ping.message, Ping)
    assert not sent(bench.hear(1, Ack(ping.message.seq, Load())), Ack)  # not the target
    effects = bench.hear(2, Ack(ping.message.seq, Load(jobs=1)))
    assert sent(effects, Ack) == [SendPacket(node(1), Ack(500, Load(jobs=1)))]


def test_ping_request_for_a_silent_target_gets_a_nack_before_the_origin_gives_up() -> None:
    bench = Bench(3)
    bench.hear(1, PingReq(500, node(2)))
    start = bench.now
    nacks = []
    for effect in bench.wait(0.49):
        if isinstance(effect, SendPacket) and isinstance(effect.message, Nack):
            nacks.append((bench.now - start, effect))
    assert nacks == [(pytest.approx(0.4), SendPacket(node(1), Nack(500)))]


def test_ping_request_for_an_unknown_target_gets_a_nack_at_once() -> None:
    bench = Bench(3)
    assert bench.hear(1, PingReq(500, node(8))) == [SendPacket(node(1), Nack(500))]


def test_flood_of_ping_requests_is_bounded() -> None:
    bench = Bench(3)
    effects = [e for seq in range(1000) for e in bench.hear(1, PingReq(seq, node(2)))]
    assert len(sent(effects, Ping)) == RELAYS_MAX


def test_dead_members_are_knocked_at_and_redialled_for_ever() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1))
    bench.idle(5.0)
    effects = bench.idle(600.0)
    knocks = [p for p in sent(effects, Ping) if p.to == node(2)]
    assert 118 <= len(knocks) <= 121
    assert all(isinstance(k.message.gossip[0], Dead) for k in knocks)
    redials = [e for e in of(effects, PushPull) if e == PushPull(node(2))]
    assert 19 <= len(redials) <= 21


# -- UDP blocked -----------------------------------------------------------------------------


def blocked(bench: Bench, seconds: float) -> list[Effect]:
    """Let node 2 answer streams only."""
    seen = []
    for effect in bench.wait(seconds):
        seen.append(effect)
        match effect:
            case SendPacket(to, Ping(seq, target), via) if to == target:
                if to != node(2) or via == "tcp":
                    bench.tell(PacketReceived(to, Ack(seq, Load()), via))
            case StreamProbe(to, seq):
                bench.tell(StreamProbeDone(to, seq, True))
    return seen


def test_member_that_only_answers_streams_gets_its_packets_by_stream() -> None:
    bench = Bench(3)
    blocked(bench, 10.0)
    assert bench.state(2) is NodeState.ALIVE
    assert bench.view(2).via == "tcp"
    effects = blocked(bench, 20.0)
    assert {p.via for p in sent(effects, Ping) if p.to == node(2)} == {"tcp"}
    assert {p.via for p in sent(effects, Ping) if p.to == node(1)} == {"udp"}
    effects = bench.say(1, alive(1, counter=1)) + blocked(bench, 1.0)
    assert any(p.to == node(2) and p.via == "tcp" for p in sent(effects, Gossip))


def test_blocked_udp_is_retried_and_used_again_when_answered() -> None:
    bench = Bench(3)
    blocked(bench, 10.0)
    tries = [p for p in sent(blocked(bench, 130.0), Ping) if p.to == node(2) and p.via == "udp"]
    assert len(tries) == 2
    assert bench.view(2).via == "tcp"
    bench.idle(70.0)  # everything is answered again
    assert bench.view(2).via == "udp"
    assert bench.state(2) is NodeState.ALIVE


# -- push-pull -------------------------------------------------------------------------------


def test_push_pull_happens_each_thirty_seconds_with_one_live_member() -> None:
    bench = Bench(4)
    assert len(of(bench.idle(300.0), PushPull)) == 10


def test_full_state_holds_records_and_what_speaks_against_them() -> None:
    bench = Bench(5)
    bench.say(1, suspect(2, by=1), Left(node(3), Incarnation(1, 0)))
    state = bench.machine.full_state()
    assert set(state) == {
        *(alive(i) for i in range(5)),
        suspect(2, by=1),
        Left(node(3), Incarnation(1, 0)),
    }


def test_synced_dead_is_merged_as_suspect() -> None:
    bench = Bench(3)
    bench.tell(Synced(node(1), (alive(1), alive(2), dead(2, by=1))))
    assert bench.state(2) is NodeState.SUSPECT
    bench.idle(3.0)
    bench.tell(Synced(node(1), (alive(1), alive(2), dead(2, by=1))))
    assert bench.state(2) is NodeState.SUSPECT


def test_synced_dead_stranger_is_taken_in_as_suspect_without_being_alive_first() -> None:
    bench = Bench(4, known=False)
    effects = bench.tell(Synced(node(1), (alive(1), alive(2), dead(2, by=1), alive(3))))
    changes = {e.node: (e.old, e.new) for e in effects if isinstance(e, MemberChanged)}
    assert changes == {
        node(1): (None, NodeState.ALIVE),
        node(2): (None, NodeState.SUSPECT),
        node(3): (None, NodeState.ALIVE),
    }


def test_synced_stranger_that_left_is_taken_in_as_left() -> None:
    bench = Bench(4, known=False)
    goodbye = Left(node(2), Incarnation(1, 0))
    effects = bench.tell(Synced(node(1), (alive(1), alive(2), goodbye)))
    assert bench.state(2) is NodeState.LEFT
    assert MemberChanged(node(2), None, NodeState.ALIVE, "joined") not in effects


def test_first_look_at_the_mesh_is_not_gossiped_back() -> None:
    bench = Bench(100)
    assert not sent(bench.idle(5.0), Gossip)


def test_synced_accusation_of_ourselves_is_refuted_before_the_reply() -> None:
    bench = Bench(3)
    bench.tell(Synced(node(1), (alive(0), dead(0, by=1))))
    assert alive(0, counter=1) in bench.machine.full_state()


def test_synced_by_a_node_outside_the_roster_is_ignored() -> None:
    bench = Bench(3)
    assert bench.tell(Synced(node(9), (suspect(2, by=1),))) == []


def test_contact_with_a_stranger_or_a_dead_member_exchanges_state() -> None:
    bench = Bench(3, known=False)
    assert bench.tell(Contact(node(2))) == [PushPull(node(2))]
    assert bench.tell(Contact(node(2))) == []  # asked a moment ago
    assert bench.tell(Contact(node(9))) == []
    bench = Bench(3)
    assert bench.tell(Contact(node(2))) == []
    bench.say(1, suspect(2, by=1))
    bench.idle(5.0)
    assert bench.tell(Contact(node(2))) == [PushPull(node(2))]


def test_packet_of_a_member_held_dead_tells_it_so_and_exchanges_state() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1))
    bench.idle(6.0)
    effects = bench.hear(2, Ping(3, ME))
    assert PushPull(node(2)) in effects
    [ack] = sent(effects, Ack)
    assert isinstance(ack.message.gossip[0], Dead)
    assert PushPull(node(2)) not in bench.hear(2, Ping(4, ME))  # not for each packet


# -- roster, ourselves, sleep ----------------------------------------------------------------


def test_removed_member_is_dropped_with_everything_about_it() -> None:
    bench = Bench(4)
    bench.say(1, suspect(2, by=1))
    effects = bench.tell(RosterChanged(frozenset((ME, node(1), node(3)))))
    assert of(effects, MemberChanged) == [
        MemberChanged(node(2), NodeState.SUSPECT, NodeState.LEFT, "removed from the roster")
    ]
    assert node(2) not in bench.machine.members
    bench.say(1, alive(2, boot=9))
    assert node(2) not in bench.machine.members
    assert not any(p.to == node(2) for p in sent(bench.idle(60.0), Ping))


def test_accusations_by_a_removed_member_are_ignored() -> None:
    bench = Bench(4)
    bench.tell(RosterChanged(frozenset((ME, node(1), node(2)))))
    bench.say(1, suspect(2, by=3))
    assert bench.state(2) is NodeState.ALIVE


def test_grown_roster_exchanges_state_within_a_second() -> None:
    bench = Bench(3)
    bench.idle(40.0)
    bench.tell(RosterChanged(frozenset(node(i) for i in range(4))))
    assert of(bench.idle(1.0), PushPull)


def test_local_change_raises_our_incarnation_once() -> None:
    bench = Bench(3)
    same = LocalChanged("node-0", "", record(0).addresses, 1)
    assert bench.tell(same) == []
    effects = bench.tell(replace(same, caps_version=2))
    changed = replace(record(0, counter=1), caps_version=2)
    assert of(effects, SelfChanged) == [SelfChanged(changed)]
    assert Alive(changed) in gossiped(effects)
    assert bench.machine.record == changed


def test_waking_accuses_nobody_for_one_suspicion_period() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1))
    bench.now += 3600.0
    effects = bench.tell(Woke())
    assert of(effects, SelfChanged) == [SelfChanged(record(0, counter=1))]
    assert {e.to for e in effects if isinstance(e, PushPull)} == {node(1), node(2)}
    assert bench.state(2) is NodeState.SUSPECT
    bench.idle(3.9, answering=False)
    assert bench.state(1) is NodeState.ALIVE
    assert bench.state(2) is NodeState.SUSPECT
    bench.idle(15.0, answering=False)
    assert bench.state(1) is not NodeState.ALIVE


def test_stall_is_seen_from_the_late_tick_and_held_against_nobody() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1))
    packet, _ = probe_of(bench, 1)
    assert isinstance(packet.message, Ping)
    bench.now += 10.0
    effects = bench.tell(Tick())
    assert not of(effects, MemberChanged)
    assert of(effects, SelfChanged)  # they may have buried us
    assert bench.state(1) is NodeState.ALIVE
    assert bench.state(2) is NodeState.SUSPECT
    assert bench.machine.health_score > 0


def test_short_stall_leaves_time_to_read_the_answer_that_waits() -> None:
    bench = Bench(3)
    packet, _ = probe_of(bench, 2)
    assert isinstance(packet.message, Ping)
    list(bench.wait(0.6))
    bench.now += 1.5
    bench.tell(Tick())
    assert bench.state(2) is NodeState.ALIVE
    bench.hear(2, Ack(packet.message.seq, Load()))
    bench.idle(0.9)
    assert bench.state(2) is NodeState.ALIVE


def test_loop_that_is_always_late_still_finds_a_dead_member() -> None:
    bench = Bench(3)
    for _ in range(200):
        due = bench.machine.next_timeout()
        assert due is not None
        bench.now = due + 0.3
        for packet in sent(bench.tell(Tick()), Ping):
            assert isinstance(packet.message, Ping)
            if packet.to == node(1):
                bench.hear(1, Ack(packet.message.seq, Load()))
    assert bench.state(2) is NodeState.DEAD
    assert bench.state(1) is NodeState.ALIVE


def test_own_record_of_a_former_life_is_ignored() -> None:
    bench = Bench(3, boot=5)
    effects = bench.say(1, alive(0, boot=4, counter=9), suspect(0, by=1, boot=4, counter=9))
    assert not of(effects, CloneSeen)
    assert not of(effects, SelfChanged)


@pytest.mark.parametrize(
    "other", [record(0, boot=6), record(0, 5, 1), replace(record(0, boot=5), name="twin")]
)
def test_own_id_living_elsewhere_is_named_once(other: AliveRecord) -> None:
    bench = Bench(3, boot=5)
    assert of(bench.say(1, Alive(other)), CloneSeen) == [CloneSeen(other)]
    assert not of(bench.say(2, Alive(other)), CloneSeen)
    assert bench.machine.record == record(0, boot=5)


def test_history_tells_what_happened_and_why() -> None:
    bench = Bench(3)
    bench.say(1, suspect(2, by=1))
    bench.idle(4.1)
    trail = [(e.event, e.old, e.new, e.cause) for e in bench.machine.history if e.node == node(2)]
    assert trail == [
        ("PacketReceived", "alive", "suspect", "accused by 00000000"),
        ("Tick", "suspect", "dead", "no refutation in 4.0 s"),
    ]


# -- the queue -------------------------------------------------------------------------------


def test_queue_hands_out_the_least_sent_first_and_drops_at_the_limit() -> None:
    queue = RumourQueue()
    for i in range(20):
        queue.put(alive(i))
    counts: dict[NodeId, int] = {}
    while queue:
        taken = queue.take(GOSSIP_BYTES, 4)
        assert 1 <= len(taken) <= 5
        assert sum(map(rumour_bytes, taken)) <= GOSSIP_BYTES
        for rumour in taken:
            counts[rumour.node] = counts.get(rumour.node, 0) + 1
        assert max(counts.values()) - min(counts.get(node(i), 0) for i in range(20)) <= 1
    assert set(counts.values()) == {4}


def test_newer_rumour_replaces_the_older_of_the_same_member() -> None:
    queue = RumourQueue()
    queue.put(suspect(1, by=2))
    queue.take(GOSSIP_BYTES, 4)
    queue.put(alive(1, counter=1))
    assert len(queue) == 1
    assert queue.take(GOSSIP_BYTES, 4) == (alive(1, counter=1),)


def test_rumour_without_room_waits_for_the_next_packet() -> None:
    queue = RumourQueue()
    queue.put(alive(1))
    assert queue.take(100, 4) == ()
    assert queue.take(GOSSIP_BYTES, 4) == (alive(1),)


def test_rumour_too_large_for_any_packet_does_not_clog_the_queue() -> None:
    queue = RumourQueue()
    queue.put(Alive(record(1), signed=bytes(GOSSIP_BYTES)))
    assert not queue
