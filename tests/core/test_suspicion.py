"""The formulas against memberlist's tables, and the two small objects built on them."""

from __future__ import annotations

import pytest
from gpulayer_mesh.core.rumour import Suspect
from gpulayer_mesh.core.suspicion import (
    Awareness,
    Suspicion,
    expected_confirmations,
    push_pull_scale,
    retransmit_limit,
    suspicion_bounds_s,
    suspicion_wait_s,
)
from gpulayer_mesh.core.types import Incarnation

SUBJECT = "ff" * 32
INCARNATION = Incarnation(1, 0)


def accusation(by: int) -> Suspect:
    return Suspect(SUBJECT, INCARNATION, f"{by:064x}")


@pytest.mark.parametrize(
    ("confirmations", "k", "expected_s"),
    [  # memberlist, TestSuspicion_remainingSuspicionTime: bounds 2 and 30 s
        (0, 3, 30.0),
        (1, 3, 16.0),
        (2, 3, 7.810),
        (3, 3, 2.0),
        (4, 3, 2.0),
        (5, 3, 2.0),
        (0, 0, 2.0),
    ],
)
def test_confirmations_shorten_the_wait_to_its_minimum(
    confirmations: int, k: int, expected_s: float
) -> None:
    assert suspicion_wait_s(confirmations, k, 2.0, 30.0) == pytest.approx(expected_s, abs=0.001)


@pytest.mark.parametrize(
    ("n", "lower_s", "upper_s"), [(1, 4, 24), (3, 4, 24), (10, 4, 24), (100, 8, 48), (1000, 12, 72)]
)
def test_bounds_grow_with_the_logarithm_above_ten_members(
    n: int, lower_s: float, upper_s: float
) -> None:
    assert suspicion_bounds_s(n, 4.0, 6.0) == pytest.approx((lower_s, upper_s))


def test_bad_local_health_moves_the_shortest_wait_towards_the_longest() -> None:
    assert suspicion_bounds_s(3, 4.0, 6.0, health=0.5) == pytest.approx((14.0, 24.0))
    assert suspicion_bounds_s(3, 4.0, 6.0, health=1.0) == pytest.approx((24.0, 24.0))


@pytest.mark.parametrize(("n", "k"), [(2, 0), (3, 0), (4, 2), (5, 2), (1000, 2)])
def test_no_confirmation_is_expected_where_too_few_could_give_it(n: int, k: int) -> None:
    assert expected_confirmations(n) == k


@pytest.mark.parametrize(("n", "limit"), [(1, 8), (9, 8), (10, 8), (99, 8), (100, 12), (1000, 16)])
def test_retransmit_limit_grows_with_the_logarithm(n: int, limit: int) -> None:
    assert retransmit_limit(4, n) == limit


@pytest.mark.parametrize(("n", "scale"), [(0, 1), (32, 1), (33, 2), (64, 2), (65, 3), (128, 3)])
def test_push_pull_slows_down_at_each_doubling_above_32(n: int, scale: int) -> None:
    assert push_pull_scale(n) == scale


def test_suspicion_ends_at_its_minimum_when_two_others_confirm() -> None:
    suspicion = Suspicion(accusation(1), now=100.0, k=2, lower_s=4.0, upper_s=24.0)
    assert suspicion.deadline == pytest.approx(124.0)
    assert suspicion.confirm(accusation(2))
    assert 104.0 < suspicion.deadline < 124.0
    assert suspicion.confirm(accusation(3))
    assert suspicion.deadline == pytest.approx(104.0)


def test_same_accuser_confirms_once() -> None:
    suspicion = Suspicion(accusation(1), now=0.0, k=2, lower_s=4.0, upper_s=24.0)
    assert not suspicion.confirm(accusation(1))
    assert suspicion.confirm(accusation(2))
    assert not suspicion.confirm(accusation(2))
    assert suspicion.deadline > 4.0


def test_accusers_beyond_the_expected_are_no_news() -> None:
    suspicion = Suspicion(accusation(1), now=0.0, k=2, lower_s=4.0, upper_s=24.0)
    assert [suspicion.confirm(accusation(by)) for by in (2, 3, 4, 5)] == [True, True, False, False]
    assert len(suspicion.accusations) == 3


def test_restarted_suspicion_forgets_its_confirmations() -> None:
    suspicion = Suspicion(accusation(1), now=0.0, k=2, lower_s=4.0, upper_s=24.0)
    suspicion.confirm(accusation(2))
    suspicion.restart(50.0)
    assert suspicion.deadline == pytest.approx(74.0)
    assert list(suspicion.accusations) == [accusation(1).by]


def test_health_score_stays_in_its_range_and_scales_waits() -> None:
    health = Awareness(8)
    health.apply(-5)
    assert health.score == 0
    assert health.scale_s(0.5) == 0.5
    health.apply(3)
    assert health.scale_s(0.5) == 2.0
    health.apply(100)
    assert health.score == 8
    assert health.scale_s(1.0) == 9.0
