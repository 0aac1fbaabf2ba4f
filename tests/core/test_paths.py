"""Cut paths: whom to leave out so that all others reach each other."""

from __future__ import annotations

import pytest
from gpulayer_mesh.core.paths import WAYS_MAX, cut_from, ways_apart


def ways(nodes: str, *cut: str) -> list[str]:
    found = ways_apart(list(nodes), [(pair[0], pair[1]) for pair in cut])
    return ["".join(sorted(leaving)) for leaving in found]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ([], [""]),
        (["xy", "ax"], [""]),  # none of them, or one of them only
        (["ab"], ["b", "a"]),  # who was not reached
        (["ba"], ["a", "b"]),
        (["ba", "ab"], ["b", "a"]),  # the first keeps the job
        (["ab", "ac"], ["a", "bc"]),  # who is cut from most
        (["ab", "cd"], ["bd", "bc", "ad", "ac"]),
        (["ab", "bc", "ca"], ["bc", "ac", "ab"]),
    ],
)
def test_all_ways_to_part_what_is_cut_are_found_best_first(
    cut: list[str], expected: list[str]
) -> None:
    found = ways("abcd", *cut)
    assert found[0] == expected[0]
    assert sorted(found) == sorted(expected)


def test_number_of_ways_is_bounded() -> None:
    nodes = [str(i) for i in range(200)]
    halves = [(a, b) for a in nodes[:100] for b in nodes[100:]]
    found = list(ways_apart(nodes, halves))
    assert (len(found[0]), len(found)) == (100, WAYS_MAX)


def test_who_is_cut_from_one_of_a_group_is_named_with_it() -> None:
    cut = [("c", "a"), ("b", "d"), ("a", "b"), ("e", "f")]
    assert cut_from({"a": "box-a", "b": "box-b"}, cut) == {
        "c": "has no open path to box-a",
        "d": "has no open path to box-b",
    }
