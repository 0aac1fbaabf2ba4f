"""What a machine says of itself: the real torch once, then interpreters that misbehave."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from gpulayer_mesh.core.devicecare import DeviceCare, Reading
from gpulayer_mesh.core.lease import Reservations
from gpulayer_mesh.core.types import (
    Accelerator,
    Capabilities,
    Device,
    DeviceProcess,
    Interface,
)
from gpulayer_mesh.errors import GpuLayerError
from gpulayer_mesh.runtime import capabilities
from gpulayer_mesh.runtime.capabilities import Machine

LAN = (Interface("eth0", "ethernet", 1000, ("10.0.0.1/24",)),)
KEY = json.dumps({"python": "3.11.7", "torch": "2.13.0", "path": "", "mtime_ns": 1})


class NoGpus:
    driver = ""

    def read(self) -> tuple[Reading, ...]:
        return ()


class TwoGpus:
    driver = "580.95.05"
    pids = 0

    def read(self) -> tuple[Reading, ...]:
        processes = tuple(DeviceProcess(pid) for pid in range(self.pids))
        return tuple(
            Reading(Device(Accelerator.CUDA, i, "L40S", f"GPU-{i}", 46068, 46000), processes)
            for i in range(2)
        )


def machine(
    home: Path, python: str = sys.executable, gpus: NoGpus | TwoGpus | None = None
) -> Machine:
    return Machine(
        home,
        python=python,
        version="0.1.0",
        gpus=gpus or NoGpus(),
        care=DeviceCare(lambda device: "", lambda job: False),
        interfaces=lambda: LAN,
    )


def interpreter(folder: Path, prove: str, key: str = KEY) -> str:
    """Write a program that answers like the probe script; `prove` is shell text."""
    script = folder / "python"
    done = json.dumps({"done": True})
    script.write_text(
        "#!/bin/sh\n"
        f"echo $3 >> {folder}/calls\n"
        f"case $3 in\n key) echo '{key}'; echo '{done}';;\n prove) {prove};;\nesac\n"
    )
    script.chmod(0o755)
    return str(script)


def lines(*facts: dict[str, object]) -> str:
    return "; ".join(f"echo '{json.dumps(fact)}'" for fact in facts)


async def take(changes: AsyncIterator[Capabilities], count: int) -> list[Capabilities]:
    async with asyncio.timeout(60), aclosing(changes) as stream:  # type: ignore[type-var]
        return [await anext(stream) for _ in range(count)]


async def test_first_without_torch_then_with_what_it_did(tmp_path: Path) -> None:
    first, second = await take(machine(tmp_path).changes(), 2)
    assert first.torch is None
    assert second.torch is not None
    assert Accelerator.CPU in second.torch.accelerators
    assert "gloo" in second.torch.backends
    assert second.python == ".".join(map(str, sys.version_info[:3]))
    assert second.cpus >= 1
    assert 0 < second.memory_available_mib <= second.memory_total_mib
    assert second.interfaces == LAN
    # The next start knows it at once.
    (again,) = await take(machine(tmp_path).changes(), 1)
    assert again.torch == second.torch


async def test_torch_is_proven_anew_when_the_driver_changes(tmp_path: Path) -> None:
    python = interpreter(tmp_path, lines({"works": "cuda"}, {"done": True}))
    gpus = TwoGpus()
    await take(machine(tmp_path, python, gpus).changes(), 2)
    await take(machine(tmp_path, python, gpus).changes(), 1)
    gpus.driver = "590.10"
    await take(machine(tmp_path, python, gpus).changes(), 2)
    assert (tmp_path / "calls").read_text().split() == ["key", "prove", "key", "key", "prove"]


async def test_broken_cache_is_ignored(tmp_path: Path) -> None:
    python = interpreter(tmp_path, lines({"works": "cpu"}, {"done": True}))
    (tmp_path / "torch.json").write_text('{"key": 1}')
    caps = await take(machine(tmp_path, python).changes(), 2)
    assert caps[1].torch is not None


async def test_gpu_that_fails_the_operation_is_left_out(tmp_path: Path) -> None:
    facts = lines(
        {"works": "cpu"},
        {"problem": "cuda:1: no kernel image is available"},
        {"failed": "GPU-1"},
        {"works": "cuda"},
        {"done": True},
    )
    caps = (await take(machine(tmp_path, interpreter(tmp_path, facts), TwoGpus()).changes(), 2))[1]
    assert [(device.index, device.uuid) for device in caps.devices] == [(0, "GPU-0")]
    assert caps.torch is not None
    assert caps.torch.problems == ("cuda:1: no kernel image is available",)


async def test_devices_of_torch_stand_in_where_nvml_has_none(tmp_path: Path) -> None:
    device = {"kind": "mps", "index": 0, "name": "Apple arm GPU"}
    python = interpreter(tmp_path, lines({"works": "mps"}, {"device": device}, {"done": True}))
    caps = (await take(machine(tmp_path, python).changes(), 2))[1]
    assert caps.devices == (Device(Accelerator.MPS, 0, "Apple arm GPU"),)


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ("kill -SEGV $$", "torch: it ended with code -11"),
        ("sleep 60", "torch: no answer after 0.5 s"),
    ],
)
async def test_crash_or_hang_keeps_what_was_said_and_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str, problem: str
) -> None:
    monkeypatch.setattr(capabilities, "_PROVE_S", 0.5 if "sleep" in rest else 30.0)
    python = interpreter(tmp_path, f"{lines({'works': 'cpu'})}; echo chatter; {rest}")
    caps = (await take(machine(tmp_path, python).changes(), 2))[1]
    assert caps.torch is not None
    assert caps.torch.accelerators == (Accelerator.CPU,)
    assert caps.torch.problems == (problem,)
    assert not (tmp_path / "torch.json").exists()


async def test_doctor_hears_what_torch_does_and_leaves_it_for_the_agent(tmp_path: Path) -> None:
    python = interpreter(tmp_path, lines({"torch": "2.13.0"}, {"works": "cpu"}, {"done": True}))
    facts = await machine(tmp_path, python, TwoGpus()).examine(20.0)
    assert facts.abilities is not None
    assert facts.abilities.accelerators == (Accelerator.CPU,)
    assert (facts.driver_gpus, len(facts.devices)) == (2, 2)
    assert await machine(tmp_path, python, TwoGpus()).examine(20.0) == facts
    assert (tmp_path / "calls").read_text().split().count("prove") == 1


async def test_doctor_does_not_wait_for_a_torch_that_hangs(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "sleep 60")
    with pytest.raises(GpuLayerError, match=r"torch did not answer within 1 s"):
        await machine(tmp_path, python).examine(1.0)
    with pytest.raises(GpuLayerError, match="cannot be asked about torch"):
        await machine(tmp_path, str(tmp_path / "missing")).examine(20.0)


async def test_machine_without_torch_or_interpreter_still_answers(tmp_path: Path) -> None:
    bare = interpreter(tmp_path, "exit 1", key=json.dumps({"python": "3.11.7"}))
    (caps,) = await take(machine(tmp_path, bare).changes(), 1)
    assert (caps.torch, caps.python) == (None, "3.11.7")
    (caps,) = await take(machine(tmp_path, "/nowhere/python").changes(), 1)
    assert (caps.torch, caps.python) == (None, "")


async def test_change_is_told_and_noise_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "POLL_S", 0.0)
    python = interpreter(tmp_path, lines({"works": "cuda"}, {"done": True}))
    gpus = TwoGpus()
    async with asyncio.timeout(30), aclosing(machine(tmp_path, python, gpus).changes()) as changes:
        await anext(changes)
        await anext(changes)
        gpus.pids = 1
        caps = await anext(changes)
    assert [device.busy_pids for device in caps.devices] == [1, 1]
    less = replace(caps, memory_available_mib=caps.memory_available_mib - 10)
    assert not capabilities._differs(less, caps)
    assert capabilities._differs(replace(caps, memory_available_mib=0), caps)


async def test_load_counts_what_is_free(tmp_path: Path) -> None:
    python = interpreter(tmp_path, lines({"works": "cuda"}, {"done": True}))
    tested = machine(tmp_path, python, TwoGpus())
    reservations = Reservations("box", cpus=tested.cpus)
    assert tested.load(reservations).free_slots == tested.cpus
    await take(tested.changes(), 2)
    reservations.set_devices([0, 1])
    reservations.grant(0.0, "a" * 10, processes=1, devices=(1,))
    load = tested.load(reservations)
    assert (load.free_slots, load.jobs) == (1, 1)
    assert load.memory_available_mib > 0


async def test_missing_imports_are_found_without_importing(tmp_path: Path) -> None:
    tested = machine(tmp_path)
    asked = ["torch", "os", "no_such_thing", "os.path", "../evil"]
    assert await tested.missing_imports(asked) == ["../evil", "no_such_thing", "os.path"]
    assert await tested.missing_imports([]) == []
    with pytest.raises(GpuLayerError, match="cannot ask '/nowhere/python'"):
        await machine(tmp_path, "/nowhere/python").missing_imports(["os"])


def test_limits_of_a_container_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"cpu.max": "100000 100000", "memory.max": str(2**30), "memory.current": str(2**28)}
    monkeypatch.setattr(capabilities, "_cgroup", values.__getitem__)
    assert capabilities._cpus() == 1
    assert capabilities._memory_mib() == (1024, 768)
    monkeypatch.setattr(capabilities, "_cgroup", lambda name: "max")
    assert capabilities._memory_mib()[0] > 1024
    assert capabilities._cpus() == len(os.sched_getaffinity(0))
