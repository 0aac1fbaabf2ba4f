"""GPUs through a stand-in for NVML, and on real hardware where there is some."""

import os
import pathlib
import subprocess
import sys

import pytest
from gpulayer_mesh.core.types import Accelerator, Device, DeviceProcess
from gpulayer_mesh.runtime.gpus import (
    FakeGpu,
    FakeNvml,
    Gpus,
    cpu_list,
    cpus_near,
    job_of_process,
    load_nvml,
    name_of_process,
    numa_of_bus,
)


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-000000000000"


def devices_of(gpus: Gpus) -> tuple[Device, ...]:
    return tuple(reading.device for reading in gpus.read())


def names(visible: str | None, nvml: FakeNvml) -> list[str]:
    return [device.uuid for device in devices_of(Gpus(visible, nvml))]


def test_one_gpu_has_memory_and_no_links() -> None:
    gpus = Gpus(None, FakeNvml.box(1))
    (device,) = devices_of(gpus)
    assert (device.kind, device.index, device.name) == (
        Accelerator.CUDA,
        0,
        "NVIDIA GeForce RTX 4090",
    )
    assert (device.memory_total_mib, device.memory_free_mib) == (24564, 24064)
    assert device.links == ()
    assert gpus.driver == "580.95.05"


@pytest.mark.parametrize(("count", "link"), [(2, "NV4"), (4, "NV4"), (8, "NV18")])
def test_nvlink_rows(count: int, link: str) -> None:
    devices = devices_of(Gpus(None, FakeNvml.box(count)))
    for i, device in enumerate(devices):
        assert device.links == tuple("X" if i == j else link for j in range(count))


def test_pcie_rows_without_nvlink() -> None:
    devices = devices_of(Gpus(None, FakeNvml([FakeGpu("L40S") for _ in range(8)])))
    assert devices[0].links == ("X", "PIX", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS")


def test_numa_nodes_are_the_kernels_word_also_for_mig() -> None:
    asked: list[str] = []

    def numa_of(bus: str) -> int | None:
        asked.append(bus)
        return 1

    gpus = Gpus(None, FakeNvml([FakeGpu("A100", mig=["MIG-aa", "MIG-bb"])]), numa_of=numa_of)
    for _ in range(2):
        assert [device.numa for device in devices_of(gpus)] == [1, 1]
    assert asked == ["00000000:01:00.0"]


def test_what_the_kernel_does_not_say_is_unknown() -> None:
    assert numa_of_bus("00000000:f7:1f.7") is None
    assert numa_of_bus("?") is None
    assert cpus_near(None) == ()
    assert cpus_near(1023) == ()
    assert cpu_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    with pytest.raises(ValueError, match="x"):
        cpu_list("x")


def test_near_cpus_are_among_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathlib.Path, "read_text", lambda *_: "0-3,8-11\n")
    for ours, near in (({0, 1, 4, 5}, (0, 1)), ({0, 1}, ()), ({4, 5}, ())):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, ours=ours: ours)
        assert cpus_near(0) == near


def test_unified_memory_is_unknown_not_an_error() -> None:
    (device,) = devices_of(Gpus(None, FakeNvml([FakeGpu("NVIDIA GB10", memory_mib=None)])))
    assert (device.memory_total_mib, device.memory_free_mib) == (None, None)


def test_lost_gpu_leaves_the_others() -> None:
    assert names(None, FakeNvml([FakeGpu("a", lost=True), FakeGpu("b")])) == [uuid(1)]


def test_driver_not_loaded_is_a_problem_not_an_error() -> None:
    gpus = Gpus(None, FakeNvml([], loaded=False))
    assert devices_of(gpus) == ()
    assert gpus.problem == "NVML: Driver Not Loaded"


def test_machine_without_driver_has_no_gpus_and_no_problem() -> None:
    gpus = Gpus(None, None)
    assert (devices_of(gpus), gpus.problem) == ((), None)


def test_processes_are_named_with_their_job_and_memory() -> None:
    nvml = FakeNvml([FakeGpu("a", pids=[10, 11, 11], takes_mib={11: 300})])
    gpus = Gpus(
        None, nvml, job_of=lambda pid: "k7f2" if pid == 11 else "", name_of=lambda pid: f"p{pid}"
    )
    (reading,) = gpus.read()
    assert reading.processes == (DeviceProcess(10, "p10"), DeviceProcess(11, "p11", "k7f2", 300))


@pytest.mark.parametrize(
    ("gpu", "unseen"),
    [
        (FakeGpu("idle"), 500),
        (FakeGpu("unified memory", memory_mib=None), None),
        (FakeGpu("both kinds", pids=[1], drawing=[2], takes_mib={1: 100, 2: 30}), 370),
        (FakeGpu("one that does both", pids=[1], drawing=[1], takes_mib={1: 100}), 400),
        (FakeGpu("one is not told", pids=[1], drawing=[2], takes_mib={1: 100}), None),
        (FakeGpu("told late", pids=[1], takes_mib={1: 900}), 0),
    ],
    ids=lambda value: value.name if isinstance(value, FakeGpu) else "",
)
def test_memory_that_no_process_explains(gpu: FakeGpu, unseen: int | None) -> None:
    (reading,) = Gpus(None, FakeNvml([gpu])).read()
    assert reading.unseen_mib == unseen


def test_rank_is_known_by_its_job_and_any_process_by_its_name() -> None:
    waits = [sys.executable, "-c", "print(flush=True); input()"]
    for env, expected in (({"GPULAYER_JOB": "k7f2\x1b"}, "k7f2?"), ({}, "")):
        pipe = subprocess.PIPE
        with subprocess.Popen(waits, env=env, stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert job_of_process(process.pid) == expected
            assert name_of_process(process.pid).startswith("python")
            process.communicate(b"\n")
    assert (job_of_process(process.pid), name_of_process(process.pid)) == ("", "")


def test_mig_instances_stand_for_their_gpu() -> None:
    nvml = FakeNvml([FakeGpu("A100", mig=["MIG-aa", "MIG-bb"]), FakeGpu("A100")])
    devices = devices_of(Gpus(None, nvml))
    assert [device.uuid for device in devices] == ["MIG-aa", "MIG-bb", uuid(1)]
    assert devices[0].name == "A100 MIG 1g.10gb"
    assert devices[2].links == ()
    assert names("MIG-bb", nvml) == ["MIG-bb"]
    assert names("0", nvml) == ["MIG-aa", "MIG-bb"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("4,5", [4, 5]),
        ("5, 4", [5, 4]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,9,2", [1]),  # CUDA stops at the first entry it does not know
        ("GPU-00000003,0", [3, 0]),
        ("1,1", [1]),
    ],
)
def test_cuda_visible_devices_of_the_agent_decides(
    visible: str | None, expected: list[int]
) -> None:
    devices = devices_of(Gpus(visible, FakeNvml.box(8)))
    assert [device.uuid for device in devices] == [uuid(index) for index in expected]
    assert [device.index for device in devices] == list(range(len(expected)))


@pytest.mark.gpu
def test_real_driver_answers() -> None:
    nvml = load_nvml()
    if nvml is None:
        pytest.skip("no NVIDIA driver")
    gpus = Gpus(None, nvml)
    devices = devices_of(gpus)
    assert devices, gpus.problem
    assert gpus.driver
    assert all(device.name and device.uuid.startswith(("GPU-", "MIG-")) for device in devices)
