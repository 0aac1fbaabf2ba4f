"""What a plan says of gradients on a slow link."""

from __future__ import annotations

import pytest
from gpulayer_mesh.core.speed import SlowLink, forecast, ring_s

SLOW = SlowLink("box-2", "box-3", 12_500_000)


def test_ring_sends_nearly_all_bytes_twice_and_waits_for_each_round() -> None:
    assert ring_s(12_500_000, 2, SLOW) == pytest.approx(1.0)
    assert ring_s(12_500_000, 4, SLOW) == pytest.approx(1.5)
    far = SlowLink("a", "b", 12_500_000, rtt_us=50_000)
    assert ring_s(12_500_000, 4, far) == pytest.approx(1.5 + 6 * 0.05)


def test_slow_link_is_named_with_what_it_means_for_a_step() -> None:
    assert forecast(100_000_000, 3, SLOW) == (
        "100.0 MB of gradients take about 11 s a step, at 100 Mbit/s between box-2 and box-3: 3 "
        "machines are faster than one if a step takes that more than 5.3 s"
    )


def test_nothing_is_said_without_figures_or_need() -> None:
    assert forecast(0, 3, SLOW) is None
    assert forecast(100_000_000, 3, None) is None
    assert forecast(100_000_000, 1, SLOW) is None
    assert forecast(1_000_000, 2, SlowLink("a", "b", 1_250_000_000)) is None
