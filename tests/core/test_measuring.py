"""How fast bytes come, and whose turn it is to find out."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
from gpulayer_mesh.core.measuring import (
    AGAIN_S,
    ANSWER_S,
    GAP_S,
    METERED_BYTES,
    PROBE_LIMIT_S,
    REFUSED_S,
    SECOND_S,
    Meter,
    ProbeSchedule,
)
from gpulayer_mesh.core.types import NodeId
from job_cases import node

A, B, C = node(1), node(2), node(3)


def test_meter_counts_from_the_first_piece_on() -> None:
    meter = Meter()
    meter.add(10.0, 500_000)  # what came while the sender was waited for is not counted
    assert meter.take(1, 0.0) is None
    meter.add(10.1, 700_000)
    meter.add(10.2, 700_000)
    assert meter.take() is None
    assert meter.take(METERED_BYTES, 0.1) == 7_000_000
    meter.add(10.5, METERED_BYTES)  # a long transfer has many figures
    assert meter.take() == round(METERED_BYTES / 0.3)
    assert meter.take() is None


def test_pause_of_the_sender_lowers_a_figure_and_a_long_one_begins_anew() -> None:
    meter = Meter()
    meter.add(0.0, 1)
    meter.add(0.5, METERED_BYTES // 2)
    meter.add(0.5 + GAP_S, METERED_BYTES // 2)
    assert meter.take() == round(METERED_BYTES / (0.5 + GAP_S))
    meter.add(100.0, METERED_BYTES)
    assert meter.take() is None
    meter.add(100.5, METERED_BYTES)
    assert meter.take() == METERED_BYTES * 2


def schedule(seed: int = 0) -> ProbeSchedule:
    return ProbeSchedule(random.Random(seed), 0.0)


def next_choice(one: ProbeSchedule, now: float, *peers: NodeId) -> tuple[float, NodeId]:
    for _ in range(20_000):
        peer = one.choose(now, peers)
        if peer is not None:
            return now, peer
        now += 1.0
    raise AssertionError("nobody was chosen")


def test_one_probe_at_a_time_with_a_pause_between_them() -> None:
    one = schedule()
    at, first = next_choice(one, 0, A, B, C)
    assert at >= 2
    assert not one.admit(at, A)
    assert one.choose(at + PROBE_LIMIT_S - 0.1, [A, B, C]) is None
    one.measured(at + 0.3, first)
    one.ended()
    assert one.choose(at + 0.4, [A, B, C]) is None
    again, second = next_choice(one, at + 1, A, B, C)
    assert (second != first, again <= at + 7) == (True, True)


def test_who_answers_a_probe_makes_none_meanwhile() -> None:
    one = schedule()
    assert one.admit(100, A)
    assert not one.admit(100.1, B)
    assert one.choose(100.2, [B]) is None
    one.ended()
    assert one.admit(100.3, B)
    # An asker that went away without a word holds nobody up.
    assert one.admit(100.3 + PROBE_LIMIT_S, C)


def test_each_direction_has_its_figure_soon_and_another_only_much_later() -> None:
    ends = {A: schedule(1), B: schedule(2)}
    made: dict[NodeId, list[float]] = {A: [], B: []}
    for now in map(float, range(0, 10_000)):
        for me, peer in ((A, B), (B, A)):
            if ends[me].choose(now, [peer]) == peer:
                if ends[peer].admit(now, me):
                    made[me].append(now)
                    ends[me].measured(now + 0.3, peer)
                    ends[peer].ended()
                else:
                    ends[me].refused(now, peer)
                ends[me].ended()
    for times in made.values():
        pauses = [b - a for a, b in pairwise(times)]
        assert times[0] < 60
        assert SECOND_S <= pauses[0] < SECOND_S + 60
        assert min(pauses[1:]) >= AGAIN_S
        assert len(times) == 10


def test_refused_probe_is_tried_again_soon_and_a_transfer_makes_one_needless() -> None:
    one = schedule()
    at, _ = next_choice(one, 0, A)
    one.refused(at, A)
    one.ended()
    again, _ = next_choice(one, at, A)
    assert REFUSED_S <= again - at < 1.5 * REFUSED_S + 10
    one.ended()
    one.measured(again, A)
    one.measured(again, A)
    assert next_choice(one, again, A)[0] - again > AGAIN_S


def test_peer_that_asks_again_soon_is_refused() -> None:
    one = schedule()
    assert one.admit(100, A)
    one.ended()
    assert not one.admit(100 + ANSWER_S - 1, A)
    assert one.admit(100 + ANSWER_S, A)


def test_nobody_is_probed_while_a_job_runs() -> None:
    one = schedule()
    assert all(one.choose(now, []) is None for now in range(100))
    assert one.choose(100, [A]) == A


def test_members_that_left_are_forgotten() -> None:
    one = schedule()
    at, _ = next_choice(one, 0, A)
    one.measured(at, A)
    one.ended()
    one.keep({B})
    assert next_choice(one, at, A)[0] < at + 10


@pytest.mark.parametrize("n", [3, 8, 33])
def test_whole_mesh_is_measured_in_minutes(n: int, seed: int) -> None:
    """Every pair once each way, each node in one probe at a time; a probe takes half a second."""
    rng = random.Random(seed)
    nodes = [node(i) for i in range(n)]
    ends = {one: ProbeSchedule(random.Random(rng.random()), rng.random()) for one in nodes}
    pairs: dict[tuple[NodeId, NodeId], int] = defaultdict(int)
    under_way: list[tuple[float, NodeId, NodeId]] = []
    step_s = now = 0.25
    while len(pairs) < n * (n - 1):
        now += step_s
        assert now < 600
        for ending in [one for one in under_way if one[0] <= now]:
            _, me, peer = ending
            under_way.remove(ending)
            ends[me].measured(now, peer)
            ends[me].ended()
            ends[peer].ended()
        for me in nodes:
            peer = ends[me].choose(now, [one for one in nodes if one != me])
            if peer is None:
                continue
            if not ends[peer].admit(now, me):
                ends[me].refused(now, peer)
                ends[me].ended()
                continue
            pairs[me, peer] += 1
            under_way.append((now + 0.5, me, peer))
            busy = [end for _, *both in under_way for end in both]
            assert len(busy) == len(set(busy))
    print(f"{n} nodes: {len(pairs)} probes within {now:.0f} s")
    assert set(pairs.values()) <= {1, 2}
