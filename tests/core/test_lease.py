"""Reservations: all or nothing, idempotent, expiring, never twice."""

from __future__ import annotations

import random

import pytest
from gpulayer_mesh.core.lease import GRANTS_MAX, LEASE_S, Reservations
from gpulayer_mesh.core.types import Grant
from gpulayer_mesh.errors import PlacementBusyError, PlacementError, RemoteProtocolError


def gpu_box() -> Reservations:
    return Reservations("bigbox", cpus=4, devices=range(4))


def test_grant_is_idempotent_and_renews() -> None:
    box = gpu_box()
    first = box.grant(0.0, "job-a", processes=2, devices=(0, 2))
    assert box.grant(10.0, "job-a", processes=2, devices=(0, 2)) == first
    assert box.grants == (Grant("job-a", 2, (0, 2)),)
    assert box.next_timeout() == 10.0 + LEASE_S
    with pytest.raises(RemoteProtocolError, match="already holds"):
        box.grant(11.0, "job-a", processes=1, devices=(1,))


def test_busy_device_names_the_holder_and_grants_nothing() -> None:
    box = gpu_box()
    box.grant(0.0, "job-a", processes=1, devices=(1,))
    with pytest.raises(PlacementBusyError, match="bigbox: device 1 is busy with job job-a") as e:
        box.grant(1.0, "job-b", processes=2, devices=(0, 1))
    assert not e.value.refusals[0].for_ever
    assert [g.job for g in box.grants] == ["job-a"]
    unfit = {3: "is in use by pid 123 (blender)", 2: "is blocked: pid 9 is still there"}
    for device, why in unfit.items():
        with pytest.raises(PlacementBusyError) as e:
            box.grant(1.0, "job-b", processes=1, devices=(device,), unfit=unfit)
        assert e.value.message == f"bigbox: device {device} {why}"
        assert not e.value.refusals[0].for_ever
    assert box.grant(1.0, "job-b", processes=1, devices=(0,), unfit=unfit).devices == (0,)


def test_what_can_never_be_is_told_apart_from_busy() -> None:
    for ask in ({"processes": 1, "devices": (7,)}, {"processes": 5}):
        with pytest.raises(PlacementError) as caught:
            gpu_box().grant(0.0, "job", **ask)  # type: ignore[arg-type]
        assert caught.value.refusals[0].for_ever
        assert not isinstance(caught.value, PlacementBusyError)


@pytest.mark.parametrize(("processes", "devices"), [(2, (1, 1)), (1, (0, 1)), (0, ())])
def test_senseless_request_is_refused(processes: int, devices: tuple[int, ...]) -> None:
    with pytest.raises(RemoteProtocolError):
        gpu_box().grant(0.0, "job", processes=processes, devices=devices)


def test_cpu_processes_are_counted_in_total() -> None:
    box = Reservations("box", cpus=4)
    box.grant(0.0, "job-a", processes=3)
    box.grant(0.0, "job-b", processes=1)
    with pytest.raises(PlacementBusyError, match=r"job-a, job job-b \(0 of 4 CPU"):
        box.grant(1.0, "job-c", processes=1)
    assert box.release("job-a")
    assert not box.release("job-a")
    box.grant(1.0, "job-c", processes=3)


def test_lease_expires_unless_renewed_or_held() -> None:
    box = gpu_box()
    for device, job in enumerate(("idle", "renewed", "running")):
        box.grant(0.0, job, processes=1, devices=(device,))
    assert box.renew(20.0, "renewed")
    assert box.hold("running")
    assert [g.job for g in box.expire(LEASE_S)] == ["idle"]
    assert not box.renew(LEASE_S, "idle")
    assert not box.hold("idle")
    assert [g.job for g in box.expire(1000.0)] == ["renewed"]
    assert box.next_timeout() is None
    assert box.renew(1000.0, "running")
    assert box.next_timeout() is None
    box.grant(1000.0, "next", processes=2, devices=(0, 1))


def test_expired_grant_makes_room_without_a_tick() -> None:
    box = gpu_box()
    box.grant(0.0, "gone", processes=1, devices=(0,))
    box.grant(LEASE_S, "next", processes=1, devices=(0,))
    assert box.holder(0) == Grant("next", 1, (0,))


def test_adopted_grant_does_not_expire() -> None:
    box = gpu_box()
    box.adopt(Grant("old", 1, (3,)))
    assert box.expire(1e9) == ()
    with pytest.raises(PlacementBusyError, match="old"):
        box.grant(0.0, "new", processes=1, devices=(3,))


def test_number_of_grants_is_bounded() -> None:
    box = Reservations("box", cpus=GRANTS_MAX + 1)
    for i in range(GRANTS_MAX):
        box.grant(0.0, f"job{i}", processes=1)
    with pytest.raises(PlacementBusyError, match="256 jobs"):
        box.grant(0.0, "more", processes=1)


def test_vanished_device_keeps_its_grant_but_gets_no_new_one() -> None:
    box = gpu_box()
    box.grant(0.0, "job", processes=1, devices=(3,))
    box.set_devices((0, 1))
    assert box.holder(3) == Grant("job", 1, (3,))
    with pytest.raises(PlacementError, match="no device 3"):
        box.grant(0.0, "other", processes=1, devices=(3,))


def test_random_use_never_grants_twice(rng: random.Random) -> None:
    box = gpu_box()
    now = 0.0
    for _ in range(5000):
        now += rng.random() * 5
        job = f"job{rng.randrange(12)}"
        action = rng.random()
        try:
            if action < 0.5:
                devices = tuple(rng.sample(range(5), rng.randint(0, 3)))
                box.grant(now, job, processes=len(devices) or rng.randint(1, 5), devices=devices)
            elif action < 0.7:
                box.release(job)
            elif action < 0.8:
                box.hold(job)
            elif action < 0.9:
                box.renew(now, job)
            else:
                box.expire(now)
        except (PlacementError, RemoteProtocolError):
            pass
        box.check()
        assert sum(g.processes for g in box.grants if not g.devices) <= 4
