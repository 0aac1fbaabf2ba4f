"""Devices before, while and after a job has them: real shims and ranks, pretended GPUs.

What the driver shows is set by hand, as no pretended GPU knows the real ranks.
"""

from __future__ import annotations

import logging
import time

import psutil
import pytest
from boxes import JOB, ORDER, WAITS, Box, Mesh
from gpulayer_mesh.core.jobspec import HostPhase, JobSpec, Slot
from gpulayer_mesh.core.types import Accelerator, Blocked, DeviceProcess
from gpulayer_mesh.errors import PlacementBusyError
from gpulayer_mesh.runtime import capabilities, gpus
from gpulayer_mesh.runtime.gpus import FakeGpu, FakeNvml
from shim_jobs import eventually

pytestmark = pytest.mark.network  # FreePorts binds

NEXT = "1" * 10


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "SETTLE_S", 0.1)
    monkeypatch.setattr(capabilities, "SETTLE_PAUSE_S", 0.02)
    monkeypatch.setattr(capabilities, "LOOK_AGAIN_S", 0.05)


class Driver(FakeNvml):
    """Counts readings, and may hang for a while in each."""

    def __init__(self, count: int = 1) -> None:
        super().__init__([FakeGpu("H100", 81559, used_mib=400) for _ in range(count)])
        self.readings = 0
        self.hangs_s = 0.0

    def nvmlDeviceGetCount(self) -> int:
        self.readings += 1
        time.sleep(self.hangs_s)
        return super().nvmlDeviceGetCount()


def gpu_job(mesh: Mesh, job: str = JOB, device: int = 0) -> JobSpec:
    slots = (Slot(mesh.node("box-0"), "box-0", 1, (device,)),)
    return mesh.spec(id=job, slots=slots, accelerator=Accelerator.CUDA, code=WAITS)


async def run(mesh: Mesh, box: Box, spec: JobSpec) -> None:
    await mesh.stage(spec)
    await box.ask("laptop", "POST", "go", ORDER)
    await eventually(lambda: b"up" in _logged(box))


def _logged(box: Box) -> bytes:
    logs = box.home / "jobs" / JOB / "logs"
    return b"".join(path.read_bytes() for path in logs.glob("*.log"))


def finish(box: Box) -> None:
    (box.work / "finish").touch()


async def reserve(mesh: Mesh, box: Box, job: str = NEXT, device: int = 0) -> None:
    body = {"spec": mesh.sign(gpu_job(mesh, job, device))}
    await box.ask("laptop", "POST", f"/v1/jobs/{job}/reserve", body)


async def refusal(mesh: Mesh, box: Box, device: int = 0) -> str:
    with pytest.raises(PlacementBusyError) as caught:
        await reserve(mesh, box, device=device)
    return caught.value.message


def blocks(box: Box) -> list[Blocked | None]:
    """What was told of device 0, one after another."""
    told = [found.devices[0].blocked for found in box.published]
    return [one for i, one in enumerate(told) if i == 0 or one != told[i - 1]]


async def test_clean_device_is_free_after_one_reading(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "LOOK_AGAIN_S", 60.0)
    monkeypatch.setattr(capabilities, "POLL_S", 600.0)
    driver = Driver()
    (box,) = await mesh.start("box-0", nvml=driver)
    before = driver.readings
    await run(mesh, box, gpu_job(mesh))
    assert driver.readings == before + 1
    driver.gpus[0].pids = [4711]
    box.ranks[4711] = JOB
    assert "busy with job" in await refusal(mesh, box)
    driver.gpus[0].pids = []
    finish(box)
    await eventually(lambda: box.reservations.grants == ())
    assert driver.readings == before + 2
    assert blocks(box) == [None]
    await reserve(mesh, box)


async def test_rank_that_survived_blocks_its_device_until_it_is_gone(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpulayer.devices")
    driver = Driver(2)
    (box,) = await mesh.start("box-0", nvml=driver)
    box.ranks[4711] = JOB
    await run(mesh, box, gpu_job(mesh))
    driver.gpus[0].pids, driver.gpus[0].used_mib = [4711], 2448
    driver.gpus[0].takes_mib = {4711: 2048}
    finish(box)
    await eventually(lambda: box.reservations.grants == ())
    why = f"pid 4711 (python) of job {JOB} still holds 2,048 MiB"
    assert await refusal(mesh, box) == f"box-0: device 0 is blocked: {why}"
    assert caplog.messages == [f"device 0 is blocked: {why}"]
    assert box.machine.load(box.reservations).free_slots == 1
    await reserve(mesh, box, device=1)
    await box.ask("laptop", "POST", f"/v1/jobs/{NEXT}/release")
    driver.gpus[0].pids, driver.gpus[0].used_mib = [], 400
    await eventually(lambda: blocks(box)[-1] is None)
    left = Blocked((DeviceProcess(4711, "python", JOB, 2048),))
    assert blocks(box) == [None, left, None]
    assert caplog.messages[1:] == ["device 0 is free again: nothing is left on it"]
    await reserve(mesh, box)


async def test_process_that_takes_a_moment_to_vanish_is_never_shown(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "SETTLE_S", 30.0)
    driver = Driver()
    (box,) = await mesh.start("box-0", nvml=driver)
    box.ranks[4711] = JOB
    await run(mesh, box, gpu_job(mesh))
    driver.gpus[0].pids = [4711]
    before = driver.readings
    finish(box)
    await eventually(lambda: driver.readings > before + 2)
    assert box.phase() is HostPhase.ENDED
    assert "busy with job" in await refusal(mesh, box)
    driver.gpus[0].pids = []
    await eventually(lambda: box.reservations.grants == ())
    assert blocks(box) == [None]


async def test_memory_that_does_not_come_back_blocks_the_device(mesh: Mesh) -> None:
    driver = Driver()
    (box,) = await mesh.start("box-0", nvml=driver)
    await run(mesh, box, gpu_job(mesh))
    driver.gpus[0].used_mib = 2448
    finish(box)
    await eventually(lambda: box.reservations.grants == ())
    why = "device 0 is blocked: 2,048 MiB are taken by no process that can be seen"
    assert why in await refusal(mesh, box)
    driver.gpus[0].used_mib = 405
    await eventually(lambda: blocks(box)[-1] is None)
    await reserve(mesh, box)


async def test_new_agent_looks_at_what_the_earlier_one_left(mesh: Mesh) -> None:
    driver = Driver(3)
    (box,) = await mesh.start("box-0", nvml=driver)
    await run(mesh, box, gpu_job(mesh))
    finished = box
    await box.crash()
    driver.gpus[0].used_mib = 2448  # and the job ends with no agent there
    finish(finished)
    await eventually(lambda: not finished.shims.alive(finished.home / "jobs" / JOB))
    box = Box(mesh, "box-0", nvml=driver)
    await box.start()
    await eventually(lambda: box.reservations.grants == ())
    assert "2,048 MiB are taken by no process" in await refusal(mesh, box)
    # The next one finds the job over: what it sees of its processes still counts, anywhere.
    driver.gpus[2].pids = [4711]
    box.ranks[4711] = JOB
    box = await box.restart()
    assert f"pid 4711 (python) of job {JOB} is still there" in await refusal(mesh, box, device=2)
    # Memory alone is taken for normal then, as there is nothing else that would ever free it.
    await reserve(mesh, box)


async def test_program_of_somebody_else_is_named(mesh: Mesh) -> None:
    driver = Driver(2)
    driver.gpus[0].pids = [123]
    driver.gpus[1].pids = [4711]
    box = Box(mesh, "box-0", nvml=driver)
    box.ranks[4711] = "2" * 10  # of another agent on this machine, or of a job without agents
    await box.start()
    assert await refusal(mesh, box) == "box-0: device 0 is in use by pid 123 (blender)"
    why = f"box-0: device 1 is in use by pid 4711 (python) of job {'2' * 10}"
    assert await refusal(mesh, box, device=1) == why


async def test_driver_that_hangs_costs_no_job(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "_DRIVER_S", 0.05)
    monkeypatch.setattr(capabilities, "LOOK_AGAIN_S", 60.0)
    driver = Driver()
    (box,) = await mesh.start("box-0", nvml=driver)
    driver.hangs_s = 0.5
    await run(mesh, box, gpu_job(mesh))
    finish(box)
    await eventually(lambda: box.reservations.grants == ())
    await reserve(mesh, box)


async def test_job_without_devices_asks_no_driver(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "POLL_S", 600.0)  # nobody else asks it meanwhile
    driver = Driver()
    (box,) = await mesh.start("box-0", nvml=driver)
    before, driver.hangs_s = driver.readings, 60.0
    await run(mesh, box, mesh.spec(code=WAITS))
    finish(box)
    await eventually(lambda: box.phase() is HostPhase.ENDED)
    assert (box.reservations.grants, driver.readings) == ((), before)


async def test_rank_runs_near_its_device(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "numa_of_bus", lambda bus: 0)
    (box,) = await mesh.start("box-0", nvml=Driver())
    await run(mesh, box, gpu_job(mesh))
    (rank,) = box.host.jobs[JOB].report().ranks
    assert rank.pid is not None
    assert psutil.Process(rank.pid).cpu_affinity() == [0]  # what boxes have near node 0
    finish(box)
    await eventually(lambda: box.phase() is HostPhase.ENDED)
