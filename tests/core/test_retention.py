"""Which finished jobs are forgotten."""

from __future__ import annotations

import random

import pytest
from gpulayer_mesh.core import retention
from gpulayer_mesh.core.retention import Finished, making_room, outdated

DAY_S, GIB = 86400.0, 2**30


def test_results_wait_for_a_week() -> None:
    jobs = [Finished("new", 0.0), Finished("old", 8 * DAY_S), Finished("six", 6 * DAY_S)]
    assert outdated(jobs) == ["old"]


def test_of_too_many_the_oldest_go_but_none_of_the_last_hour() -> None:
    count = retention.KEPT + 3
    jobs = [Finished(str(i), 2 * 3600.0 + i) for i in range(count)]
    assert outdated(jobs) == [str(i) for i in (count - 1, count - 2, count - 3)]
    assert outdated([Finished(str(i), 1.0 + i / 1000) for i in range(count)]) == []


def test_full_disk_takes_the_oldest_until_there_is_room() -> None:
    jobs = [Finished(str(i), i * DAY_S, 2 * GIB) for i in (1, 3, 2)]
    assert making_room(jobs, used_bytes=80 * GIB, total_bytes=100 * GIB) == []
    assert making_room(jobs, used_bytes=88 * GIB, total_bytes=100 * GIB) == ["3", "2"]
    assert making_room(jobs, used_bytes=99 * GIB, total_bytes=100 * GIB) == ["3", "2", "1"]


def test_full_disk_leaves_what_has_just_ended() -> None:
    jobs = [Finished("old", DAY_S, GIB), Finished("fresh", 60.0, 50 * GIB)]
    assert making_room(jobs, used_bytes=99 * GIB, total_bytes=100 * GIB) == ["old"]


@pytest.mark.parametrize("seed", range(50))
def test_no_more_than_needed_goes(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [Finished(str(i), rng.uniform(0, 6 * DAY_S), rng.randrange(10 * GIB)) for i in range(20)]
    used = rng.randrange(100 * GIB)
    gone = making_room(jobs, used, 100 * GIB)
    sizes = {one.job: one.size_bytes for one in jobs}
    left = used - sum(sizes[job] for job in gone)
    ages = {one.job: one.ended_age_s for one in jobs}
    assert all(ages[job] > retention.FRESH_S for job in gone)
    if gone:
        assert left + sizes[gone[-1]] > retention.FULL * 100 * GIB
    removable = [job for job in ages if ages[job] > retention.FRESH_S]
    assert left <= retention.FULL * 100 * GIB or set(gone) == set(removable)
