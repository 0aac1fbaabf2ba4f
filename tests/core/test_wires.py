"""Which nodes are wired together best, and how their ranks stand."""

from __future__ import annotations

from itertools import combinations, pairwise

from gpulayer_mesh.core.types import Link
from gpulayer_mesh.core.wires import UNKNOWN, Wires
from hypothesis import given, settings
from hypothesis import strategies as st

MBIT = 125_000  # bytes per second


def wires(*speeds: tuple[int, int, float], count: int = 6, rtt_us: int = 500) -> Wires:
    """Nodes 0, 1, ... with links of so many Mbit/s."""
    links = [Link(a, b, rtt_us, round(mbit * MBIT)) for a, b, mbit in speeds]
    return Wires(links, range(count))


def all_of(nodes: list[int], mbit: float) -> list[tuple[int, int, float]]:
    return [(a, b, mbit) for a, b in combinations(nodes, 2)]


def test_nodes_come_from_the_largest_group_that_good_links_hold_together() -> None:
    racks = wires(
        *all_of([0, 3, 5], 900), *all_of([1, 2, 4], 400), (0, 1, 90), (3, 4, 90), (5, 2, 90)
    )
    assert racks.closest([0, 1, 2, 3, 4, 5], 2)[0] == [0, 3, 5]
    assert racks.closest([0, 1, 2, 3, 4, 5], 3)[0] == [0, 3, 5]
    assert racks.closest([0, 1, 2, 3, 4, 5], 4)[0] == [0, 1, 2, 3, 4, 5]
    assert racks.closest([1, 2, 3, 4], 3)[0] == [1, 2, 4]
    levels = [racks.closest([0, 1, 2, 3, 4, 5], count)[1] for count in (1, 2, 3, 4)]
    assert levels == sorted(levels)
    assert levels[0] == 0 < levels[1] < levels[3]


def test_what_differs_by_noise_only_is_all_to_choose_from() -> None:
    noisy = wires((0, 1, 500), (1, 2, 900), (2, 3, 600), (0, 3, 800))
    assert noisy.closest([0, 1, 2, 3], 2)[0] == [0, 1, 2, 3]


def test_round_trips_count_beside_bandwidth() -> None:
    links = [Link(0, 1, 40_000, 117_000_000), Link(1, 2, 900, 117_000_000)]
    assert Wires(links, range(3)).closest([0, 1, 2], 2)[0] == [1, 2]


def test_measured_link_is_better_than_an_unknown_one() -> None:
    assert wires((2, 3, 1)).closest([0, 1, 2, 3], 2)[0] == [2, 3]
    assert wires((2, 3, 1)).closest([0, 1, 2, 3], 3) == ([0, 1, 2, 3], UNKNOWN)
    unmeasured = Wires([Link(0, 1, 900)], range(2))
    assert unmeasured.closest([0, 1], 2) == ([0, 1], UNKNOWN)


def test_numbers_are_those_of_the_order_and_not_of_the_snapshot() -> None:
    links = [Link(3, 7, 500, 900 * MBIT), Link(3, 9, 500, 90 * MBIT), Link(1, 3, 500, 990 * MBIT)]
    known = Wires(links, [9, 3, 7])  # member 1 does not fit
    assert known.best(1, {0, 2}) == links[0]
    assert known.best(1, {0}) == links[1]
    assert known.best(2, {0}) is None
    assert known.closest([0, 1, 2], 2)[0] == [1, 2]


def test_rank_0_is_where_all_reach_it_best() -> None:
    star = wires(*[(1, i, 900) for i in (2, 3)], (0, 1, 900), (0, 2, 90), (0, 3, 90), (2, 3, 90))
    assert star.ranked([0, 1, 2, 3], [""] * 4)[0] == 1
    # Where all are reached alike, the one that placement likes best.
    assert wires(*all_of([0, 1, 2], 900)).ranked([2, 1, 0], [""] * 3) == [0, 1, 2]
    assert wires().ranked([2, 0, 1], [""] * 3) == [0, 1, 2]


def test_neighbours_in_the_ring_are_near() -> None:
    chain = wires((0, 3, 900), (1, 3, 900), (1, 2, 900), (0, 1, 90), (0, 2, 90), (2, 3, 90))
    order = chain.ranked([0, 1, 2, 3], [""] * 4)
    slow = [{a, b} for a, b in pairwise([*order, order[0]]) if {a, b} in ({0, 1}, {0, 2}, {2, 3})]
    assert slow == [{0, 2}]  # every other ring has more slow ones


def test_zones_are_crossed_where_the_link_is_best() -> None:
    zone = ["a", "b", "a", "b", "c", "c"]
    links = [*all_of([0, 2], 900), *all_of([1, 3], 900), *all_of([4, 5], 900)]
    links += [(0, 1, 9), (0, 4, 90), (2, 5, 90), (4, 1, 30), (5, 3, 30)]
    order = wires(*links).ranked(range(6), zone)
    assert [zone[node] for node in order] in (list("aaccbb"), list("bbccaa"))


def test_zones_are_filled_largest_first_then_best_wired() -> None:
    zones = {"a": [0, 1], "b": [2], "c": [3]}
    assert wires((0, 2, 9), (1, 3, 90)).fill(zones, 3) == [0, 1, 3]
    assert wires((0, 2, 90), (1, 3, 9)).fill(zones, 3) == [0, 1, 2]
    assert wires().fill(zones, 1) == [0]
    assert sorted(wires().fill(zones, 4)) == [0, 1, 2, 3]


edges_st = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0.1, 10_000)), max_size=30
)


@settings(deadline=None)
@given(edges_st, st.lists(st.sampled_from("abc"), min_size=10, max_size=10), st.sets(
    st.integers(0, 9), min_size=1
), st.data())  # fmt: skip
def test_every_choice_is_of_these_nodes_and_crosses_as_seldom_as_can_be(
    edges: list[tuple[int, int, float]], zone: list[str], nodes: set[int], data: st.DataObject
) -> None:
    known = wires(*[(min(a, b), max(a, b), m) for a, b, m in edges if a != b], count=10)
    order = known.ranked(nodes, zone)
    assert sorted(order) == sorted(nodes)
    assert sum(zone[a] != zone[b] for a, b in pairwise(order)) == len({zone[n] for n in nodes}) - 1
    count = data.draw(st.integers(1, len(nodes)))
    near, level = known.closest(sorted(nodes), count)
    assert set(near) <= nodes
    assert len(near) >= count
    assert near == sorted(near)
    assert 0 <= level <= UNKNOWN
    by_zone = {z: [n for n in sorted(nodes) if zone[n] == z] for z in sorted(zone)}
    filled = known.fill({z: found for z, found in by_zone.items() if found}, count)
    assert len(set(filled)) == len(filled) == count
    sizes = sorted((len(found) for found in by_zone.values()), reverse=True)
    fewest = next(i for i in range(1, 4) if sum(sizes[:i]) >= count)
    assert len({zone[n] for n in filled}) == fewest
