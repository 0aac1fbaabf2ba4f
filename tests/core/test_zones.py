"""Zones from links: two wires are two zones, one wire is none, noise changes neither."""

from __future__ import annotations

import random
import time
from itertools import combinations

import pytest
from gpulayer_mesh.core.types import Link
from gpulayer_mesh.core.zones import Groups, inferred_zones
from hypothesis import given, settings
from hypothesis import strategies as st

FAST, SLOW = 117_000_000, 11_700_000  # 1 Gbit/s and 100 Mbit/s, as transfers show them
NEAR, FAR = 900, 25_000  # microseconds


def infer(places: str, links: list[Link], configured: dict[int, str] | None = None) -> list[str]:
    """Return the zones of members called a, b, c..., one per place."""
    names = [chr(97 + i) for i in range(len(places))]
    given_ = [(configured or {}).get(i, "") for i in range(len(places))]
    return list(inferred_zones(names, given_, links))


def wired(
    places: str,
    *,
    within: tuple[int, int] = (FAST, NEAR),
    between: tuple[int, int] = (SLOW, NEAR),
    noise: float = 0.0,
    share: float = 1.0,
    seed: int = 0,
) -> list[Link]:
    """Links between members; two of one place are `within`: bytes per second, microseconds."""
    rng = random.Random(seed)
    found = []
    for i, j in combinations(range(len(places)), 2):
        if rng.random() < share:
            bytes_s, rtt_us = within if places[i] == places[j] else between
            # Other work takes from a bandwidth and adds to a round trip.
            bytes_s = round(bytes_s / (1 + noise * rng.random()))
            rtt_us = round(rtt_us * (1 + noise * rng.random()))
            found.append(Link(i, j, rtt_us, bytes_s))
    rng.shuffle(found)
    return found


def test_border_is_where_bandwidth_falls() -> None:
    assert infer("AABBB", wired("AABBB")) == ["~a", "~a", "~c", "~c", "~c"]


def test_border_is_where_round_trips_grow() -> None:
    links = wired("ABAB", between=(FAST, FAR))
    assert infer("ABAB", links) == ["~a", "~b", "~a", "~b"]


def test_flat_lan_is_one_zone_without_a_name() -> None:
    assert infer("AAAAA", wired("AAAAA")) == [""] * 5
    assert infer("AB", wired("AB")) == ["", ""]  # one link: nothing to compare it with
    assert infer("AAA", []) == ["", "", ""]


def test_round_trips_of_a_lan_are_no_border_however_they_differ() -> None:
    links = wired("AABB", within=(FAST, 300), between=(FAST, 1900))
    assert infer("AABB", links) == [""] * 4


def test_step_below_three_is_no_border() -> None:
    assert infer("AABB", wired("AABB", between=(FAST * 10 // 29, NEAR))) == [""] * 4
    assert infer("AABB", wired("AABB", between=(FAST * 10 // 31, NEAR))) != [""] * 4


def test_largest_step_is_the_border() -> None:
    # Two racks in one house, and a house elsewhere: 10 Gbit/s, 1 Gbit/s, 10 Mbit/s.
    house = [Link(i, j, NEAR, 400_000_000 if i // 2 == j // 2 else FAST)
             for i, j in combinations(range(4), 2)]  # fmt: skip
    away = [Link(i, 4, NEAR, 1_200_000) for i in range(4)]
    assert infer("AAAAB", house + away) == ["~a"] * 4 + ["~e"]


def test_machine_with_a_slow_card_is_alone() -> None:
    assert infer("AAABA", wired("AAABA")) == ["~a", "~a", "~a", "~d", "~a"]


def test_one_good_link_is_enough_to_belong() -> None:
    links = wired("AAABBB")
    links = [one._replace(bytes_s=SLOW) if (one.a, one.b) == (0, 1) else one for one in links]
    assert infer("AAABBB", links) == ["~a"] * 3 + ["~d"] * 3


def test_configured_zones_are_left_alone_and_out() -> None:
    links = wired("AABBB")
    assert infer("AABBB", links, {2: "attic"}) == ["~a", "~a", "", "~d", "~d"]
    # Without the others' links there is no border between those that are left.
    assert infer("AABBB", links, {2: "attic", 3: "attic", 4: "hall"}) == [""] * 5


def test_what_is_not_measured_is_in_no_zone_yet() -> None:
    links = [one for one in wired("AABBC") if one.b != 4]
    assert infer("AABBC", links) == ["~a", "~a", "~c", "~c", ""]
    whole = wired("AABB")
    assert infer("AABBC", [*whole, Link(0, 4, NEAR), Link(1, 4, None, SLOW)])[4] == ""
    # Pairs that were not compared with each other may be in one place.
    assert infer("AABB", [Link(0, 1, NEAR, FAST), Link(2, 3, NEAR, FAST)]) == [""] * 4


@settings(deadline=None)
@given(
    st.text("ABC", min_size=4, max_size=12).filter(
        lambda places: min(places.count(p) for p in set(places)) > 1
    ),
    st.integers(0, 2**32),
    st.floats(0, 0.6),
)
def test_noise_changes_no_zone(places: str, seed: int, noise: float) -> None:
    exact = infer(places, wired(places))
    if len(set(places)) > 1:
        for i, j in combinations(range(len(places)), 2):
            assert (exact[i] == exact[j]) == (places[i] == places[j])
        assert "" not in exact
    else:
        assert set(exact) == {""}
    assert infer(places, wired(places, noise=noise, seed=seed)) == exact


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.integers(0, 5), st.integers(1, 10**9), st.integers(1, 10**6)
        ),
        max_size=15,
    ),
    st.randoms(),
)
def test_same_table_gives_the_same_zones_in_any_order(
    drawn: list[tuple[int, int, int, int]], rng: random.Random
) -> None:
    links = list({
        (min(a, b), max(a, b)): Link(min(a, b), max(a, b), rtt_us, bytes_s)
        for a, b, bytes_s, rtt_us in drawn if a != b
    }.values())  # fmt: skip
    found = infer("AAAAAA", links)
    rng.shuffle(links)
    assert infer("AAAAAA", links) == found
    # A border has two sides; whoever is on neither has no zone.
    assert len(set(found) - {""}) != 1


def test_a_thousand_members_with_few_links_each(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"n{i:04}" for i in range(1000)]
    pairs = {tuple(sorted(rng.sample(range(1000), 2))) for _ in range(20_000)}
    links = [
        Link(a, b, NEAR, round((FAST if a % 2 == b % 2 else SLOW) / (1 + rng.random() / 2)))
        for a, b in sorted(pairs)
    ]
    start = time.process_time()
    found = inferred_zones(names, [""] * 1000, links)
    print(f"{len(links)} links, {time.process_time() - start:.3f} s of CPU")
    assert set(found[::2]) == {"~n0000"}
    assert set(found[1::2]) == {"~n0001"}


@pytest.mark.parametrize("pairs", [[(0, 1), (2, 3), (1, 3)], [(3, 1), (1, 2), (2, 3), (0, 3)]])
def test_groups(pairs: list[tuple[int, int]]) -> None:
    groups = Groups(5)
    joined = [groups.join(a, b) for a, b in pairs]
    assert sum(joined) == 3
    assert len({groups.of(i) for i in range(4)}) == 1
    assert (groups.size(0), groups.size(4)) == (4, 1)
