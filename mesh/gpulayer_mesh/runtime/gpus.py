"""NVIDIA GPUs as the driver shows them, through NVML; and a stand-in for machines without one.

Every figure may be withheld (`NotSupported` on unified memory, `NoPermission` in containers), so
every call that may fail fails alone. Which processor a GPU hangs on is the kernel's word. What
torch can really do with a GPU is not known here, nor is anything of AMD or Apple: `torch_probe`
finds those; nor which process is where it should be (`core.devicecare`). Cost: about 1 ms per GPU
and reading, and two small files per process on it; links are read once, for they need a call per
pair.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar, cast

from gpulayer_mesh.core.devicecare import Reading
from gpulayer_mesh.core.types import Accelerator, Device, DeviceProcess

T = TypeVar("T")

_MAX_DEVICES = 64  # the limit of `Capabilities.devices`
_MIB = 1024 * 1024
_LINKS_MAX = 36  # NVML_NVLINK_MAX_LINKS of nvml.h, CUDA 13
_REMOTE_GPU = 0  # NVML_NVLINK_DEVICE_TYPE_GPU; anything else is a switch
# nvmlGpuTopologyLevel_t, in the words of `nvidia-smi topo -m`.
_TOPOLOGY = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


class Nvml(Protocol):
    """The functions of the module `pynvml` (package nvidia-ml-py) that are used."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Sequence[Any]: ...
    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> Sequence[Any]: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...
    def nvmlDeviceGetPciInfo_v3(self, handle: Any) -> Any: ...
    def nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any) -> int: ...
    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int: ...
    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Any, link: int) -> Any: ...
    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int: ...


def load_nvml() -> Nvml | None:
    """Return NVML if this machine has the driver's library; importing pynvml costs 2 MiB."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return cast(Nvml, importlib.import_module("pynvml"))


@dataclass(frozen=True, slots=True)
class _Found:
    """A GPU, or one MIG instance of a GPU."""

    handle: Any
    physical: int  # NVML's index of the GPU it is or is part of
    gpu_uuid: str
    uuid: str
    mig: bool


class Gpus:
    """Lists the devices that ranks of this agent may use.

    `visible` is the CUDA_VISIBLE_DEVICES the agent was started with, None if it was not set. Like
    torch, indices in it are read in NVML's order, that of the PCI bus.
    """

    def __init__(
        self,
        visible: str | None,
        nvml: Nvml | None,
        *,
        job_of: Callable[[int], str] | None = None,
        name_of: Callable[[int], str] | None = None,
        numa_of: Callable[[str], int | None] | None = None,
    ) -> None:
        self.driver = ""
        self.problem: str | None = None  # why a driver that is there shows no GPU
        self._visible = visible
        self._nvml = nvml
        self._job_of = job_of or job_of_process
        self._name_of = name_of or name_of_process
        self._numa_of = numa_of or numa_of_bus
        self._links: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        self._numas: dict[str, int | None] = {}  # by the GPU's uuid

    def read(self) -> tuple[Reading, ...]:
        """Read all usable GPUs."""
        nvml = self._nvml
        if nvml is None:
            return ()
        try:
            if not self.driver:
                nvml.nvmlInit()
                self.driver = nvml.nvmlSystemGetDriverVersion()
            found = self._find(nvml)
            self.problem = None
        except nvml.NVMLError as e:
            # Also after a driver update under our feet: next time starts afresh.
            self.driver, self.problem = "", f"NVML: {e}"
            return ()
        usable = _select(found, self._visible)[:_MAX_DEVICES]
        links = self._links_of(nvml, usable)
        return tuple(
            self._reading(nvml, index, entry, links[index]) for index, entry in enumerate(usable)
        )

    def _find(self, nvml: Nvml) -> list[_Found]:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = self._try(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:
                continue  # lost, or not permitted: the others still count
            uuid = self._try(nvml.nvmlDeviceGetUUID, handle) or ""
            instances = []
            mode = self._try(nvml.nvmlDeviceGetMigMode, handle)
            if mode is not None and mode[0]:
                for i in range(self._try(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
                    mig = self._try(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i)
                    if mig is not None:
                        mig_uuid = self._try(nvml.nvmlDeviceGetUUID, mig) or ""
                        instances.append(_Found(mig, index, uuid, mig_uuid, True))
                found += instances  # CUDA cannot use the rest of a GPU in MIG mode
            else:
                found.append(_Found(handle, index, uuid, uuid, False))
        return found

    def _reading(self, nvml: Nvml, index: int, entry: _Found, links: tuple[str, ...]) -> Reading:
        memory = self._try(nvml.nvmlDeviceGetMemoryInfo, entry.handle)
        computing = self._memory_by_pid(nvml.nvmlDeviceGetComputeRunningProcesses, entry.handle)
        drawing = self._memory_by_pid(nvml.nvmlDeviceGetGraphicsRunningProcesses, entry.handle)
        device = Device(
            kind=Accelerator.CUDA,
            index=index,
            name=self._try(nvml.nvmlDeviceGetName, entry.handle) or "NVIDIA GPU",
            uuid=entry.uuid,
            memory_total_mib=memory.total // _MIB if memory else None,
            memory_free_mib=memory.free // _MIB if memory else None,
            links=links,
            numa=self._numa(nvml, entry),
        )
        processes = tuple(
            DeviceProcess(pid, self._name_of(pid), self._job_of(pid), memory_mib)
            for pid, memory_mib in computing.items()
        )
        unseen_mib = memory.used // _MIB if memory else None
        for memory_mib in (drawing | computing).values():  # one that does both counts once
            if unseen_mib is not None:
                unseen_mib = None if memory_mib is None else max(0, unseen_mib - memory_mib)
        return Reading(device, processes, unseen_mib)

    def _memory_by_pid(
        self, running: Callable[[Any], Sequence[Any]], handle: Any
    ) -> dict[int, int | None]:
        """Return what each process takes in MiB; None where the driver withholds it."""
        return {
            process.pid: None if process.usedGpuMemory is None else process.usedGpuMemory // _MIB
            for process in self._try(running, handle) or ()
        }

    def _links_of(self, nvml: Nvml, usable: Sequence[_Found]) -> list[tuple[str, ...]]:
        key = tuple(entry.uuid for entry in usable)
        if key not in self._links:
            if len(usable) == 1 or any(entry.mig for entry in usable):
                rows: list[tuple[str, ...]] = [() for _ in usable]  # MIG instances have no links
            else:
                nvlinks = [self._nvlinks(nvml, entry.handle) for entry in usable]
                buses = [self._bus(nvml, entry.handle) for entry in usable]
                rows = []
                for i, one in enumerate(usable):
                    row = []
                    for j, other in enumerate(usable):
                        direct = nvlinks[i].get(buses[j], 0)
                        lanes = direct or min(nvlinks[i].get("", 0), nvlinks[j].get("", 0))
                        if i == j:
                            row.append("X")
                        elif lanes:
                            row.append(f"NV{lanes}")
                        else:
                            level = self._try(
                                nvml.nvmlDeviceGetTopologyCommonAncestor, one.handle, other.handle
                            )
                            row.append(_TOPOLOGY.get(-1 if level is None else level, "?"))
                    rows.append(tuple(row))
            self._links = {key: rows}
        return self._links[key]

    def _nvlinks(self, nvml: Nvml, handle: Any) -> dict[str, int]:
        """Count active links by the bus id of the far GPU, those into a switch under ""."""
        counts: dict[str, int] = {}
        for link in range(_LINKS_MAX):
            state = self._try(nvml.nvmlDeviceGetNvLinkState, handle, link)
            if state is None:
                break  # no such link, or no NVLink at all
            if state:
                kind = self._try(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
                remote = self._try(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
                bus = ""
                if remote is not None and kind in (None, _REMOTE_GPU):
                    bus = _text(remote.busId)
                counts[bus] = counts.get(bus, 0) + 1
        return counts

    def _numa(self, nvml: Nvml, entry: _Found) -> int | None:
        if entry.gpu_uuid not in self._numas:
            gpu = self._try(nvml.nvmlDeviceGetHandleByIndex, entry.physical)  # of a MIG instance
            self._numas[entry.gpu_uuid] = self._numa_of(self._bus(nvml, gpu))
        return self._numas[entry.gpu_uuid]

    def _bus(self, nvml: Nvml, handle: Any) -> str:
        pci = self._try(nvml.nvmlDeviceGetPciInfo_v3, handle)
        return _text(pci.busId) if pci is not None else "?"

    def _try(self, call: Callable[..., T], *args: Any) -> T | None:
        try:
            return call(*args)
        # pynvml raises more than NVMLError, e.g. NVMLLibraryMismatchError under an old driver.
        except Exception:
            return None


def job_of_process(pid: int) -> str:
    """Return the job whose rank started a process, whoever started the job; "" for no job."""
    mark = b"GPULAYER_JOB="
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""  # ended, or another user's
    found = next((part for part in environ.split(b"\0") if part.startswith(mark)), mark)
    return _shown(found[len(mark) :], 32)


def numa_of_bus(bus: str) -> int | None:
    """Return the NUMA node of a PCI device, None where there is one only, or the kernel is silent.

    Args:
        bus: as NVML writes it, "00000000:0a:00.0".
    """
    domain, _, rest = bus.partition(":")
    try:
        text = Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text("ascii")
    except (OSError, ValueError):
        return None
    return int(text) if text.strip().isdecimal() else None  # "-1": does not matter


def cpus_near(numa: int | None) -> tuple[int, ...]:
    """Return the CPUs of a NUMA node that this process may use.

    None of them where it may use no others, or nothing is known: then there is nothing to choose.
    """
    if numa is None or not hasattr(os, "sched_getaffinity"):
        return ()
    try:
        text = Path(f"/sys/devices/system/node/node{numa}/cpulist").read_text("ascii")
        near = cpu_list(text)
    except (OSError, ValueError):
        return ()
    ours = os.sched_getaffinity(0)
    return () if ours <= near else tuple(sorted(ours & near))


def cpu_list(text: str) -> set[int]:
    """Read the kernel's "0-7,16-23".

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def name_of_process(pid: int) -> str:
    """Return the name the kernel knows, which is no more than `ps` tells every user."""
    try:
        return _shown(Path(f"/proc/{pid}/comm").read_bytes().rstrip(b"\n"), 16)
    except OSError:
        return ""


def _shown(text: bytes, limit: int) -> str:
    """A process chooses its name and variables itself, and people read them."""
    plain = text.decode("utf-8", "replace")[:limit]
    return "".join(char if char.isprintable() else "?" for char in plain)


def _select(found: Sequence[_Found], visible: str | None) -> list[_Found]:
    """Apply CUDA_VISIBLE_DEVICES by CUDA's rules: in its order, up to the first unknown entry."""
    if visible is None:
        return list(found)
    chosen: list[_Found] = []
    for token in (part.strip() for part in visible.split(",")):
        if token.isdecimal():
            matches = [entry for entry in found if entry.physical == int(token)]
        elif token.startswith("MIG-"):
            matches = [entry for entry in found if entry.mig and entry.uuid.startswith(token)]
        elif token.startswith("GPU-"):
            matches = [entry for entry in found if entry.gpu_uuid.startswith(token)]
        else:
            matches = []
        if not matches:
            break
        chosen += [entry for entry in matches if entry not in chosen]
    return chosen


def _text(value: str | bytes) -> str:
    """pynvml hands out struct fields as bytes or text, depending on its version."""
    return (value.decode() if isinstance(value, bytes) else value).lower()


class FakeNvmlError(Exception):
    """What `FakeNvml` raises where the driver would raise an NVMLError."""


@dataclass(slots=True)
class FakeGpu:
    """One GPU of a `FakeNvml`; None stands for a figure the driver does not support."""

    name: str
    memory_mib: int | None = 24576
    used_mib: int = 500
    pids: list[int] = field(default_factory=list)  # that compute
    drawing: list[int] = field(default_factory=list)
    takes_mib: dict[int, int] = field(default_factory=dict)  # by pid; no entry: not supported
    nvlinks: Sequence[int | None] = ()  # far GPU per link; None: a switch
    mig: list[str] | None = None  # UUIDs of instances; None: MIG is off
    lost: bool = False


class FakeNvml:
    """NVML as its documentation describes it (CUDA 13) and as public `nvidia-smi topo -m` listings
    of such machines show it. It was not recorded on hardware.
    """

    NVMLError: type[Exception] = FakeNvmlError

    def __init__(self, gpus: Sequence[FakeGpu], *, numa: int = 4, loaded: bool = True) -> None:
        self.gpus = list(gpus)
        self._numa = numa  # GPUs per processor socket
        self._loaded = loaded

    @classmethod
    def box(cls, count: int) -> FakeNvml:
        """Return a machine with 1, 2, 4 or 8 GPUs as they are commonly sold.

        1: one RTX 4090. 2: RTX 3090 with a bridge, NV4. 4: A100 of a DGX Station, NV4 between all.
        8: H100 of a DGX, NV18 through switches.
        """
        if count == 1:
            return cls([FakeGpu("NVIDIA GeForce RTX 4090", 24564)])
        if count == 2:
            return cls(
                [FakeGpu("NVIDIA GeForce RTX 3090", 24576, nvlinks=[1 - i] * 4) for i in range(2)]
            )
        if count == 4:
            return cls(
                [
                    FakeGpu(
                        "NVIDIA A100-SXM4-80GB", 81920, nvlinks=[j for j in range(4) if j != i] * 4
                    )
                    for i in range(4)
                ]
            )
        if count == 8:
            return cls(
                [FakeGpu("NVIDIA H100 80GB HBM3", 81559, nvlinks=[None] * 18) for _ in range(8)]
            )
        raise ValueError(f"no such box: {count} GPUs")

    def nvmlInit(self) -> None:
        if not self._loaded:
            raise FakeNvmlError("Driver Not Loaded")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if self.gpus[index].lost:
            raise FakeNvmlError("GPU is lost")
        return (index, None)

    def nvmlDeviceGetName(self, handle: Any) -> str:
        gpu = self.gpus[handle[0]]
        return gpu.name if handle[1] is None else f"{gpu.name} MIG 1g.10gb"

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        index: int = handle[0]
        instance: int | None = handle[1]
        mig = self.gpus[index].mig
        if instance is not None and mig is not None:
            return mig[instance]
        return f"GPU-{index:08x}-0000-4000-8000-000000000000"

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        gpu = self.gpus[handle[0]]
        if gpu.memory_mib is None:
            raise FakeNvmlError("Not Supported")
        used = gpu.used_mib * _MIB
        return SimpleNamespace(
            total=gpu.memory_mib * _MIB, free=gpu.memory_mib * _MIB - used, used=used
        )

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Sequence[Any]:
        gpu = self.gpus[handle[0]]
        return [_process(gpu, pid) for pid in gpu.pids]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> Sequence[Any]:
        gpu = self.gpus[handle[0]]
        return [_process(gpu, pid) for pid in gpu.drawing]

    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]:
        on = self.gpus[handle[0]].mig is not None
        return [int(on), int(on)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        if index >= len(self.gpus[handle[0]].mig or ()):
            raise FakeNvmlError("Not Found")
        return (handle[0], index)

    def nvmlDeviceGetPciInfo_v3(self, handle: Any) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle[0] + 1:02X}:00.0".encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any) -> int:
        # Pairs share a PCIe switch, fours a socket, as in the usual 8-GPU servers.
        if one[0] // 2 == other[0] // 2:
            return 10
        return 40 if one[0] // self._numa == other[0] // self._numa else 50

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:
        if link >= len(self.gpus[handle[0]].nvlinks):
            raise FakeNvmlError("Not Supported")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Any, link: int) -> Any:
        far = self.gpus[handle[0]].nvlinks[link]
        return self.nvmlDeviceGetPciInfo_v3((far if far is not None else 0xF0, None))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int:
        return 2 if self.gpus[handle[0]].nvlinks[link] is None else _REMOTE_GPU


def _process(gpu: FakeGpu, pid: int) -> Any:
    takes = gpu.takes_mib.get(pid)
    return SimpleNamespace(pid=pid, usedGpuMemory=None if takes is None else takes * _MIB)
