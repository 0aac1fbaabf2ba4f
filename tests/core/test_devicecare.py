"""What stands against granting a device: processes on it, and memory that did not come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.devicecare import (
    TOLERANCE_MIB,
    DeviceCare,
    Reading,
    judge,
    unfit,
)
from gpulayer_mesh.core.types import (
    NAMED_MAX,
    Accelerator,
    Blocked,
    Capabilities,
    CapsRecord,
    Device,
    DeviceProcess,
    Grant,
)
from gpulayer_mesh.errors import RemoteProtocolError
from job_cases import node

GPU = Device(Accelerator.CUDA, 0, "H100", "GPU-0", 81559, 80000)
OURS = {"old", "new"}  # jobs that are or were here


def rank(pid: int = 4711, job: str = "old", memory_mib: int | None = 2048) -> DeviceProcess:
    return DeviceProcess(pid, "python", job, memory_mib)


BLENDER = DeviceProcess(123, "blender", "", 900)
NAMELESS = DeviceProcess(5)
UNSEEN = "300 MiB are taken by no process that can be seen"

# what: holder, processes, unseen now, unseen before -> why nobody gets it, pids of others
CASES: dict[
    str, tuple[str, list[DeviceProcess], int | None, int | None, str | None, int]
] = {
    "nothing there": ("", [], 400, 400, None, 0),
    "its own rank": ("old", [rank()], 400, 400, None, 0),
    "its own rank, memory moves": ("old", [rank()], 9000, 400, None, 0),
    "a rank that survived": (
        "", [rank()], 400, 400,
        "is blocked: pid 4711 (python) of job old still holds 2,048 MiB", 0,
    ),
    "a rank that survived into the next job": (
        "new", [rank(), rank(9, "new")], 400, 400,
        "is blocked: pid 4711 (python) of job old still holds 2,048 MiB", 0,
    ),
    "a rank whose memory is not told": (
        "", [rank(memory_mib=None)], None, 400,
        "is blocked: pid 4711 (python) of job old is still there", 0,
    ),
    "a rank of another mesh, or of no mesh": (
        "", [rank(job="theirs")], 400, 400,
        "is in use by pid 4711 (python) of job theirs", 1,
    ),
    "another program": ("", [BLENDER], 400, 400, "is in use by pid 123 (blender)", 1),
    "another program beside a rank": (
        "old", [rank(), BLENDER], 400, 400, "is in use by pid 123 (blender)", 1,
    ),
    "programs without a name": ("", [NAMELESS, BLENDER], None, 400,
        "is in use by pid 5, pid 123 (blender)", 2,
    ),
    "memory without a process": ("", [], 700, 400, f"is blocked: {UNSEEN}", 0),
    "within the tolerance": ("", [], 400 + TOLERANCE_MIB, 400, None, 0),
    "just above it": (
        "", [], 401 + TOLERANCE_MIB, 400,
        f"is blocked: {TOLERANCE_MIB + 1} MiB are taken by no process that can be seen", 0,
    ),
    "less than before": ("", [], 100, 400, None, 0),
    "memory that is not told": ("", [], None, 400, None, 0),
    "memory that was not told": ("", [], 9000, None, None, 0),
    "memory while a job holds it": ("new", [], 9000, 400, None, 0),
    "both": (
        "", [rank()], 700, 400,
        f"is blocked: pid 4711 (python) of job old still holds 2,048 MiB, {UNSEEN}", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_device_is_judged_by_what_is_on_it(case: str) -> None:
    holder, processes, unseen, before, why, others = CASES[case]
    reading = Reading(GPU, tuple(processes), unseen)
    device = judge(reading, holder=holder, ours=OURS.__contains__, before_mib=before)
    assert (unfit(device), device.busy_pids) == (why, others)
    assert replace(device, busy_pids=0, busy_by=(), blocked=None) == GPU


def test_many_processes_are_counted_and_some_named() -> None:
    workers = tuple(rank(pid, memory_mib=300) for pid in range(1, 127))
    device = judge(Reading(GPU, workers), ours=OURS.__contains__)
    assert device.blocked is not None
    assert len(device.blocked.processes) == NAMED_MAX
    assert (unfit(device) or "").endswith("of job old still holds 300 MiB, 124 more processes")
    others = tuple(replace(one, job="") for one in workers)
    device = judge(Reading(GPU, others), ours=OURS.__contains__)
    assert (device.busy_pids, len(device.busy_by)) == (126, NAMED_MAX)
    assert (unfit(device) or "").endswith("pid 2 (python) and 124 more")


def test_device_of_an_agent_that_names_nobody_is_in_use() -> None:
    assert unfit(replace(GPU, busy_pids=2)) == "is in use by another program"


# --- between readings ----------------------------------------------------------------------------


def care(held: dict[int, str]) -> DeviceCare:
    return DeviceCare(lambda index: held.get(index, ""), OURS.__contains__)


def test_memory_is_compared_with_what_it_was_before_the_ranks_started() -> None:
    held = {0: "old"}
    tested = care(held)
    other = replace(GPU, index=1, uuid="GPU-1")
    assert tested.begin([Reading(GPU, (), 400), Reading(other, (), 30)], [0]) == {"GPU-0": 400}
    full = [Reading(GPU, (), 5000)]
    assert tested.judge(full)[0].blocked is None  # the job runs
    assert tested.judge(full, over="old")[0].blocked == Blocked(unseen_mib=4600)
    held.clear()
    assert tested.judge(full)[0].blocked == Blocked(unseen_mib=4600)
    assert tested.judge([Reading(GPU, (), 410)])[0].blocked is None
    # It was clean once: what comes later is not the job's.
    assert tested.judge(full)[0].blocked is None


def test_later_agent_goes_on_with_what_was_noted() -> None:
    tested = care({})
    tested.adopt({"GPU-0": 400})
    assert tested.judge([Reading(GPU, (), 5000)])[0].blocked == Blocked(unseen_mib=4600)
    # The next job starts from what it finds, also where that cannot be told.
    tested.begin([Reading(GPU, (), None)], [0])
    assert tested.judge([Reading(GPU, (), 5000)])[0].blocked is None


def test_device_without_a_name_is_told_by_its_place() -> None:
    nameless = replace(GPU, uuid="")
    tested = care({})
    assert tested.begin([Reading(nameless, (), 400)], [0]) == {"#0": 400}


# --- on the wire ---------------------------------------------------------------------------------

CAPS = Capabilities(8, 1, 1, 1, "Linux", "3.11.7", "0.1.0", None)


def decoded(plain: object) -> Device:
    return wire.decode_as(Device, plain)


def test_device_of_an_older_agent_still_decodes() -> None:
    plain = wire.unpack(wire.pack(GPU))
    del plain["busy_by"], plain["blocked"]
    assert decoded(plain) == GPU


def test_device_comes_back_as_it_was_sent() -> None:
    device = judge(Reading(GPU, (rank(), BLENDER), 700), ours=OURS.__contains__, before_mib=400)
    assert decoded(wire.unpack(wire.pack(device))) == device


@pytest.mark.parametrize(
    "wrong",
    [
        {"busy_by": [{"pid": 1}] * (NAMED_MAX + 1)},
        {"busy_by": [{"pid": -1}]},
        {"busy_by": [{"pid": 2**32}]},
        {"busy_by": [{"pid": 1, "name": "x" * 17}]},
        {"busy_by": [{"pid": 1, "job": "x" * 33}]},
        {"busy_by": [{"pid": 1, "memory_mib": -1}]},
        {"blocked": {"processes": [{"pid": 1}] * (NAMED_MAX + 1)}},
        {"blocked": {"more": -1}},
        {"blocked": {"unseen_mib": -1}},
        {"blocked": "yes"},
    ],
)
def test_what_is_over_a_limit_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        decoded(wire.unpack(wire.pack(GPU)) | wrong)


@pytest.mark.parametrize(("count", "linked"), [(16, True), (56, False)])
def test_largest_machines_fit_a_record_with_every_device_blocked(count: int, linked: bool) -> None:
    """16 GPUs with links, and eight in seven MIG instances each, which have none."""
    device = replace(
        GPU,
        name="NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        uuid="MIG-00000000-0000-4000-8000-000000000000",
        busy_pids=NAMED_MAX,
        busy_by=(DeviceProcess(2**32 - 1, "x" * 15),) * NAMED_MAX,
        blocked=Blocked((DeviceProcess(2**32 - 1, "x" * 15, "0" * 10, 2**20),) * NAMED_MAX, 126, 9),
        links=("NV18",) * count if linked else (),
    )
    devices = tuple(replace(device, index=i) for i in range(count))
    grants = tuple(Grant("0" * 10, 1, (i,), "somebody") for i in range(count))
    record = CapsRecord(node(1), 1, 1, replace(CAPS, devices=devices), grants)
    assert len(wire.pack(record)) < wire.RECORD_MAX - 1024  # the envelope, and interfaces
