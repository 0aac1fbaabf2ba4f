"""What this machine has and how busy it is: the content of `Capabilities` and `Load`.

What torch can really drive is proven once in a subprocess (`torch_probe.py`) and remembered on disk
until torch, the interpreter, the driver or the set of GPUs changes. Devices are read when ranks
start and when they are gone, and often while one is blocked (`core.devicecare`). Never imports
torch, knows neither NVML nor interfaces (both are passed in), and does not decide what a job gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from gpulayer_mesh.core.devicecare import (
    LOOK_AGAIN_S,
    SETTLE_PAUSE_S,
    SETTLE_S,
    DeviceCare,
    Reading,
    unfit,
)
from gpulayer_mesh.core.diagnosis import TorchFacts
from gpulayer_mesh.core.lease import Reservations
from gpulayer_mesh.core.types import (
    Accelerator,
    Capabilities,
    Device,
    Interface,
    Load,
    TorchAbilities,
)
from gpulayer_mesh.errors import GpuLayerError
from gpulayer_mesh.files import replace_file

log = logging.getLogger("gpulayer.devices")

_PROBE = Path(__file__).with_name("torch_probe.py")
_PROVE_S = 120.0  # importing torch from a cold network disk takes a minute
_KEY_S = 15.0
_IMPORTS_S = 10.0  # pre-flight waits for it; 0.05 s when the machine is not overloaded
POLL_S = 10.0
_DRIVER_S = 10.0  # to answer for all GPUs; a job does not wait for one that hangs
_RECHECK_S = 60.0  # for a torch that was installed meanwhile; one start of Python each
_OUTPUT_MAX = 256 * 1024  # bytes of a probe's stdout: 64 devices at 200 bytes, and chatter
_LOAD_AGE_S = 1.0  # CPU share is measured between two readings; shorter ones are noise
_MIB = 1024 * 1024
_CGROUPS = Path("/sys/fs/cgroup")


class GpuSource(Protocol):
    """What `gpus.Gpus` offers."""

    driver: str

    def read(self) -> tuple[Reading, ...]: ...


@dataclass(frozen=True, slots=True)
class _Key:
    """What a proof depends on."""

    interpreter: str
    python: str = ""
    torch: str = ""  # "" while torch is not installed
    path: str = ""  # of the file that changes with torch's version
    mtime_ns: int = 0
    driver: str = ""
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Proof:
    torch: TorchAbilities | None = None
    devices: tuple[Device, ...] = ()  # as torch lists them, for machines without NVML
    failed: tuple[str, ...] = ()  # UUIDs of GPUs on which the operation went wrong


@dataclass(frozen=True, slots=True)
class _Remembered:
    key: _Key
    proof: _Proof


class Machine:
    """Reads this machine; `changes` is run by the agent for as long as it lives."""

    def __init__(
        self,
        home: Path,
        *,
        python: str,
        version: str,
        gpus: GpuSource,
        care: DeviceCare,
        interfaces: Callable[[], tuple[Interface, ...]],
    ) -> None:
        self.cpus = _cpus()
        self.current: Capabilities | None = None  # the newest reading, told to others or not
        self._home = home
        self._python = python
        self._version = version
        self._gpus = gpus
        self._care = care
        self._readings: tuple[Reading, ...] = ()  # the newest
        # A reading counts before the next begins: an older one would bring back what has ended.
        self._reading = asyncio.Lock()
        self._told: Capabilities | None = None  # the newest that others know
        self._interfaces = interfaces
        self._key = _Key(python)
        self._key_at = -math.inf
        self._proof = _Proof()
        self._load = Load()
        self._load_at = -_LOAD_AGE_S
        psutil.cpu_percent()  # the first reading is the start of the first interval

    async def changes(self) -> AsyncIterator[Capabilities]:
        """Yield what the machine has, at once and whenever it differs enough to tell others.

        torch is None in the first one unless it was proven earlier. While it is being proven
        nothing else is read, or the probe's own process would make the GPUs look busy.
        """
        while True:
            if self._stale():
                key = await self._read_key(await asyncio.to_thread(self._gpus.read))
                if key != self._key:
                    self._key, self._proof = key, self._recall(key)
                    yield self._tell(await self._read())
                    if self._proof.torch is None and key.torch:
                        self._proof = await self._prove(key)
            fresh = await self._read()
            if self._told is None or _differs(fresh, self._told):
                yield self._tell(fresh)
            until = time.monotonic() + POLL_S
            while (left_s := until - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, LOOK_AGAIN_S))
                if self.current and any(device.blocked for device in self.current.devices):
                    break

    async def examine(self, deadline_s: float) -> TorchFacts:
        """Return what the doctor asks where no agent runs; torch is proven now if it never was.

        Raises:
            GpuLayerError: the interpreter of the ranks did not answer, or not in time.
        """
        try:
            async with asyncio.timeout(deadline_s):
                readings = await self._look()
                key = await self._read_key(readings)
                if not key.python:
                    raise GpuLayerError(f"{self._python!r} cannot be asked about torch")
                proof = self._recall(key)
                if proof.torch is None and key.torch:
                    proof = await self._prove(key)
        except TimeoutError:
            raise GpuLayerError(f"torch did not answer within {deadline_s:g} s") from None
        devices = self._care.judge(readings) or proof.devices
        return TorchFacts(proof.torch, driver_gpus=len(readings), devices=devices)

    async def ranks_start(self, devices: Collection[int]) -> Mapping[str, int]:
        """Note what is in use on these devices; return it for an agent that comes after this."""
        return self._care.begin(await self._look(), devices)

    def adopt(self, before: Mapping[str, int]) -> None:
        """Take over what an earlier agent noted then."""
        self._care.adopt(before)

    async def ranks_gone(self, job: str, devices: Collection[int]) -> None:
        """Look at what ranks have left; return when it is nothing, or when it is here to stay."""
        until = time.monotonic() + SETTLE_S
        while True:
            judged = self._care.judge(await self._look(), over=job)
            if not any(device.blocked for device in judged if device.index in devices):
                return
            if time.monotonic() >= until:
                return
            await asyncio.sleep(SETTLE_PAUSE_S)

    def judge(self) -> Capabilities | None:
        """Judge the newest reading by the grants as they are now, for others to be told."""
        if self.current is not None:
            self.current = self._tell(replace(self.current, devices=self._devices()))
        return self.current

    def _tell(self, capabilities: Capabilities) -> Capabilities:
        self._told = capabilities
        return capabilities

    async def _look(self) -> tuple[Reading, ...]:
        """Read the devices; nothing where the driver does not answer in time."""
        try:
            async with asyncio.timeout(_DRIVER_S), self._reading:
                self._readings = await asyncio.to_thread(self._gpus.read)
        except TimeoutError:
            log.warning("the GPU driver does not answer within %g s", _DRIVER_S)
            return ()
        return self._readings

    def _devices(self) -> tuple[Device, ...]:
        judged = self._care.judge(self._readings)
        was = {d.index: d.blocked for d in (self.current.devices if self.current else ())}
        for device in judged:
            before = was.get(device.index)
            if device.blocked and not before:
                log.warning("device %d is blocked: %s", device.index, device.blocked)
            elif before and not device.blocked:
                log.info("device %d is free again: nothing is left on it", device.index)
        found = judged or self._proof.devices
        return tuple(d for d in found if d.uuid not in self._proof.failed or not d.uuid)

    def load(self, reservations: Reservations) -> Load:
        """Return how busy the machine is; system figures are at most a second old."""
        now = time.monotonic()
        if now - self._load_at >= _LOAD_AGE_S:
            self._load_at = now
            self._load = Load(psutil.cpu_percent(), _memory_mib()[1])
        devices = self.current.devices if self.current is not None else ()
        grants = reservations.grants
        if devices:
            held = {index for grant in grants for index in grant.devices}
            free = sum(d.index not in held and unfit(d) is None for d in devices)
        else:
            free = max(0, self.cpus - sum(grant.processes for grant in grants))
        return replace(self._load, free_slots=free, jobs=len(grants))

    async def missing_imports(self, names: Iterable[str]) -> list[str]:
        """Return which top-level modules the interpreter of the ranks cannot find.

        Raises:
            GpuLayerError: it could not be asked.
        """
        wanted = sorted(set(names))
        if not wanted:
            return []
        facts, problem = await self._probe("imports", _IMPORTS_S, json.dumps(wanted).encode())
        for fact in facts:
            if isinstance(missing := fact.get("missing"), list):
                return [str(name) for name in missing]
        raise GpuLayerError(f"cannot ask {self._python!r} about imports: {problem}")

    async def _read(self) -> Capabilities:
        # NVML, statvfs and netlink may all block for longer than a gossip probe may wait.
        async with self._reading:
            found, self._readings = await asyncio.to_thread(self._read_now)
        self.current = replace(found, devices=self._devices())
        return self.current

    def _read_now(self) -> tuple[Capabilities, tuple[Reading, ...]]:
        """Read all but what is judged of devices."""
        total_mib, available_mib = _memory_mib()
        system = os.uname()
        found = Capabilities(
            cpus=self.cpus,
            memory_total_mib=total_mib,
            memory_available_mib=available_mib,
            disk_free_mib=psutil.disk_usage(str(self._home)).free // _MIB,
            os=f"{system.sysname} {system.release} {system.machine}",
            python=self._key.python,
            gpulayer=self._version,
            torch=self._proof.torch,
            interfaces=self._interfaces(),
        )
        return found, self._gpus.read()

    def _stale(self) -> bool:
        """Whether torch may have changed since the key was read."""
        if not self._key.path:
            return time.monotonic() - self._key_at > _RECHECK_S
        with contextlib.suppress(OSError):
            return Path(self._key.path).stat().st_mtime_ns != self._key.mtime_ns
        return True  # torch was uninstalled

    async def _read_key(self, readings: tuple[Reading, ...]) -> _Key:
        facts, _ = await self._probe("key", _KEY_S)
        self._key_at = time.monotonic()
        found: dict[str, Any] = {name: value for fact in facts for name, value in fact.items()}
        return _Key(
            interpreter=self._python,
            python=str(found.get("python", "")),
            torch=str(found.get("torch", "")),
            path=str(found.get("path", "")),
            mtime_ns=int(found.get("mtime_ns", 0)),
            driver=self._gpus.driver,
            gpus=tuple(reading.device.uuid for reading in readings),
        )

    @property
    def _cache(self) -> Path:
        return self._home / "torch.json"

    def _recall(self, key: _Key) -> _Proof:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            remembered = msgspec.json.decode(self._cache.read_bytes(), type=_Remembered)
            if remembered.key == key:
                return remembered.proof
        return _Proof()

    async def _prove(self, key: _Key) -> _Proof:
        facts, problem = await self._probe("prove", _PROVE_S)
        proof = _proof_from(facts, key.torch, problem)
        if not problem:  # what broke off may go well the next time
            with contextlib.suppress(OSError):
                replace_file(self._cache, msgspec.json.encode(_Remembered(key, proof)))
        return proof

    async def _probe(
        self, mode: str, deadline_s: float, stdin: bytes = b""
    ) -> tuple[list[dict[str, Any]], str]:
        """Run the script; return what it said, and why it did not come to its end, if so."""
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                self._python,
                "-P",
                str(_PROBE),
                mode,
                stdin=pipe,
                stdout=pipe,
                stderr=null,
                cwd=self._home,
                start_new_session=True,
            )
        except OSError as e:
            return [], f"cannot start it: {e.strerror or e}"
        assert process.stdin is not None
        assert process.stdout is not None
        said = bytearray()
        problem = ""
        try:
            async with asyncio.timeout(deadline_s):
                process.stdin.write(stdin)
                process.stdin.close()
                while (piece := await process.stdout.read(4096)) and len(said) < _OUTPUT_MAX:
                    said += piece
                await process.wait()
        except TimeoutError:
            problem = f"no answer after {deadline_s:g} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        facts = []
        for line in said.splitlines():
            with contextlib.suppress(ValueError):  # torch or a plug-in of it prints as well
                if isinstance(fact := json.loads(line), dict):
                    facts.append(fact)
        if not problem and not (facts and facts[-1].get("done")):
            problem = f"it ended with code {process.returncode}"
        return facts, problem


def _proof_from(facts: Iterable[dict[str, Any]], version: str, broke_off: str) -> _Proof:
    works: list[Accelerator] = []
    backends, problems, failed = [], [], []
    devices = []
    for fact in facts:
        match fact:
            case {"torch": str(found)}:
                version = found
            case {"works": str(kind)}:
                works.append(Accelerator(kind))
            case {"backend": str(name)}:
                backends.append(name)
            case {"problem": str(text)}:
                problems.append(text[:256])
            case {"failed": str(uuid)}:
                failed.append(uuid)
            case {"device": dict(device)}:
                devices.append(msgspec.convert(device, Device))
    if broke_off:
        problems.append(f"torch: {broke_off}"[:256])
    abilities = TorchAbilities(version, tuple(works), tuple(backends), tuple(problems[:16]))
    return _Proof(abilities, tuple(devices[:64]), tuple(failed))


def _differs(new: Capabilities, old: Capabilities) -> bool:
    """Whether others should hear of it: each time costs every node a request.

    Free memory and disk change all the time; a tenth of the whole is what placement notices.
    """

    def coarse(caps: Capabilities) -> Capabilities:
        devices = tuple(replace(device, memory_free_mib=None) for device in caps.devices)
        return replace(caps, devices=devices, memory_available_mib=0, disk_free_mib=0)

    if coarse(new) != coarse(old):
        return True
    figures = [
        (new.memory_available_mib, old.memory_available_mib, old.memory_total_mib),
        (new.disk_free_mib, old.disk_free_mib, old.disk_free_mib),
    ]
    figures += [
        (a.memory_free_mib or 0, b.memory_free_mib or 0, b.memory_total_mib or 0)
        for a, b in zip(new.devices, old.devices, strict=True)
    ]
    return any(abs(now - before) > whole / 10 for now, before, whole in figures)


def _cpus() -> int:
    """Count what this process may use: affinity and the limit of its container."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cpus = min(cpus, max(1, int(quota) // int(period)))
    return cpus


def _memory_mib() -> tuple[int, int]:
    """Return total and available memory, within the limit of this process's container."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit.isdecimal() and used.isdecimal() and int(limit) < total:
        total, available = int(limit), min(available, max(0, int(limit) - int(used)))
    return total // _MIB, available // _MIB


def _cgroup(name: str) -> str:
    """Read a value of our own control group (version 2); "" where there is none."""
    with contextlib.suppress(OSError, IndexError):
        own = Path("/proc/self/cgroup").read_text().split("::")[1].splitlines()[0].lstrip("/")
        return (_CGROUPS / own / name).read_text().strip()
    return ""
