"""GPUs through a stand-in for NVML, and on real hardware where there is some."""

import subprocess
import sys

import pytest
from gpulayer_mesh.core.types import Accelerator
from gpulayer_mesh.runtime.gpus import FakeGpu, FakeNvml, Gpus, is_rank_process, load_nvml


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-000000000000"


def names(visible: str | None, nvml: FakeNvml) -> list[str]:
    return [device.uuid for device in Gpus(visible, nvml).devices()]


def test_one_gpu_has_memory_and_no_links() -> None:
    gpus = Gpus(None, FakeNvml.box(1))
    (device,) = gpus.devices()
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
    devices = Gpus(None, FakeNvml.box(count)).devices()
    for i, device in enumerate(devices):
        assert device.links == tuple("X" if i == j else link for j in range(count))


def test_pcie_rows_without_nvlink() -> None:
    devices = Gpus(None, FakeNvml([FakeGpu("L40S") for _ in range(8)])).devices()
    assert devices[0].links == ("X", "PIX", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS")


def test_unified_memory_is_unknown_not_an_error() -> None:
    (device,) = Gpus(None, FakeNvml([FakeGpu("NVIDIA GB10", memory_mib=None)])).devices()
    assert (device.memory_total_mib, device.memory_free_mib) == (None, None)


def test_lost_gpu_leaves_the_others() -> None:
    assert names(None, FakeNvml([FakeGpu("a", lost=True), FakeGpu("b")])) == [uuid(1)]


def test_driver_not_loaded_is_a_problem_not_an_error() -> None:
    gpus = Gpus(None, FakeNvml([], loaded=False))
    assert gpus.devices() == ()
    assert gpus.problem == "NVML: Driver Not Loaded"


def test_machine_without_driver_has_no_gpus_and_no_problem() -> None:
    gpus = Gpus(None, None)
    assert (gpus.devices(), gpus.problem) == ((), None)


def test_only_processes_of_others_make_a_gpu_busy() -> None:
    nvml = FakeNvml([FakeGpu("a", pids=[10, 11, 11, 12])])
    (device,) = Gpus(None, nvml, is_rank={12}.__contains__).devices()
    assert device.busy_pids == 2


def test_rank_is_known_by_its_cookie() -> None:
    waits = [sys.executable, "-c", "print(flush=True); input()"]
    for env, expected in (({"GPULAYER_COOKIE": "x"}, True), ({}, False)):
        pipe = subprocess.PIPE
        with subprocess.Popen(waits, env=env, stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert is_rank_process(process.pid) is expected
            process.communicate(b"\n")
    assert not is_rank_process(process.pid)


def test_mig_instances_stand_for_their_gpu() -> None:
    nvml = FakeNvml([FakeGpu("A100", mig=["MIG-aa", "MIG-bb"]), FakeGpu("A100")])
    devices = Gpus(None, nvml).devices()
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
    devices = Gpus(visible, FakeNvml.box(8)).devices()
    assert [device.uuid for device in devices] == [uuid(index) for index in expected]
    assert [device.index for device in devices] == list(range(len(expected)))


@pytest.mark.gpu
def test_real_driver_answers() -> None:
    nvml = load_nvml()
    if nvml is None:
        pytest.skip("no NVIDIA driver")
    gpus = Gpus(None, nvml)
    devices = gpus.devices()
    assert devices, gpus.problem
    assert gpus.driver
    assert all(device.name and device.uuid.startswith(("GPU-", "MIG-")) for device in devices)
