"""A rank's environment: equal to a real torchrun's, and only what it may see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.jobspec import GoOrder, JobSpec, Slot
from gpulayer_mesh.core.rankenv import HostContext, first_rank, rank_argv, rank_environment
from gpulayer_mesh.core.types import Accelerator, Device
from job_cases import JOB, ORDER, node, spec

DUMP = """
import json, os, sys
with open(os.path.join(os.environ["DUMP_TO"], os.environ.get("RANK", "base")), "w") as f:
    json.dump(dict(os.environ), f)
"""
# Cannot be equal: addresses, paths, ids; and the store flag, because our agents host no store.
DIFFERENT = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
}


def host(
    base: Mapping[str, str] | None = None, devices: tuple[Device, ...] = (), interface: str = ""
) -> HostContext:
    return HostContext(
        base=base or {"PATH": "/bin"},
        job_dir="/state/jobs/1",
        python="/opt/python",
        cookie="cookie",
        devices=devices,
        interface=interface,
    )


def env(
    job: JobSpec, slot: int = 0, local: int = 0, where: HostContext | None = None
) -> dict[str, str]:
    return rank_environment(job, slot, local, ORDER, where or host())


@pytest.mark.parametrize("processes", [2, 1])
def test_environment_equals_torchruns(tmp_path: Path, processes: int) -> None:
    script = tmp_path / "dump.py"
    script.write_text(DUMP)
    base = {
        key: value
        for key, value in os.environ.items()
        if key in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")
    } | {"DUMP_TO": str(tmp_path)}
    subprocess.run([sys.executable, str(script)], env=base, check=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=x"]
    subprocess.run(
        [*launcher, f"--nproc-per-node={processes}", *rendezvous, str(script)],
        env=base,
        check=True,
        capture_output=True,
        timeout=120,
    )
    plain = json.loads((tmp_path / "base").read_text())
    # A one-process job of ours is no group, so the one-process torchrun is compared with the
    # first of two nodes.
    job = spec(2) if processes == 2 else spec(1, 1)
    for rank in range(processes):
        theirs = json.loads((tmp_path / str(rank)).read_text())
        ours = rank_environment(job, 0, rank, GoOrder("::1", 1, ()), host(plain))
        ours = {key: value for key, value in ours.items() if not key.startswith("GPULAYER_")}
        assert ours.pop("TORCH_CPP_LOG_LEVEL") == "ERROR"
        assert ours.keys() == theirs.keys()
        same = theirs.keys() - DIFFERENT
        if processes == 1:
            same -= {"WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"}
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
        assert ours["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert theirs["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_unequal_nodes_number_ranks_through() -> None:
    job = spec(2, 1, 1)
    ranks = [
        env(job, slot, local)
        for slot, slot_spec in enumerate(job.slots)
        for local in range(slot_spec.processes)
    ]
    assert [e["RANK"] for e in ranks] == ["0", "1", "2", "3"]
    assert [e["LOCAL_RANK"] for e in ranks] == ["0", "1", "0", "0"]
    assert [e["GROUP_RANK"] for e in ranks] == ["0", "0", "1", "2"]
    assert [e["LOCAL_WORLD_SIZE"] for e in ranks] == ["2", "2", "1", "1"]
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GPULAYER_STARTED", "GPULAYER_JOB"):
        assert len({e[name] for e in ranks}) == 1
    assert ranks[0]["WORLD_SIZE"] == "4"
    assert [first_rank(job, i) for i in range(3)] == [0, 2, 3]


def test_single_process_gets_no_rendezvous_even_from_the_agents_own_environment() -> None:
    got = env(spec(1), where=host({"RANK": "3", "MASTER_ADDR": "x", "HOME": "/h"}))
    assert got == {
        "HOME": "/h",
        "GPULAYER_JOB": JOB,
        "GPULAYER_OUT": "/state/jobs/1/out/rank0",
        "GPULAYER_NODE": "box-0",
        "GPULAYER_ACCELERATOR": "cpu",
        "GPULAYER_COOKIE": "cookie",
        "GPULAYER_STARTED": "1700000000.250",
        "TOKEN": "canary",
    }


def test_user_wins_over_agent_and_we_win_over_the_user() -> None:
    job = spec(1, 1, env={"A": "user", "RANK": "7", "GPULAYER_JOB": "forged", "X": "1"})
    got = env(job, where=host({"A": "agent", "GPULAYER_HOME": "/secret"}))
    assert got["A"] == "user"
    assert got["RANK"] == "0"
    assert got["GPULAYER_JOB"] == JOB
    assert "GPULAYER_HOME" not in got


def test_trainer_call_names_its_result_folder_on_rank_0_only() -> None:
    job = spec(1, 1, call=3)
    assert env(job)["GPULAYER_CALL"] == "3"
    assert "GPULAYER_CALL" not in env(spec(1, 1))


@pytest.mark.parametrize(
    ("base", "user", "processes", "expected"),
    [
        ({}, {}, 2, "1"),
        ({}, {}, 1, None),
        ({"OMP_NUM_THREADS": "4"}, {}, 2, "4"),
        ({}, {"OMP_NUM_THREADS": "3"}, 2, "3"),
    ],
)
def test_threads_as_torchrun(
    base: dict[str, str], user: dict[str, str], processes: int, expected: str | None
) -> None:
    got = env(spec(processes, processes, env=user), where=host(base))
    assert got.get("OMP_NUM_THREADS") == expected


def test_interface_is_computed_but_a_users_own_value_wins() -> None:
    got = env(spec(1, 1), where=host(interface="wlan0"))
    assert got["GLOO_SOCKET_IFNAME"] == "wlan0"
    assert got["NCCL_SOCKET_IFNAME"] == "=wlan0"
    job = spec(1, 1, env={"NCCL_SOCKET_IFNAME": "^docker"})
    got = env(job, where=host(interface="lan7"))
    assert got["NCCL_SOCKET_IFNAME"] == "^docker"
    assert got["GLOO_SOCKET_IFNAME"] == "lan7"
    assert "GLOO_SOCKET_IFNAME" not in env(spec(2), where=host(interface="lan7"))


def gpus(kind: Accelerator, *uuids: str) -> tuple[Device, ...]:
    return tuple(Device(kind, i, "card", uuid) for i, uuid in enumerate(uuids))


def gpu_job(kind: Accelerator, *granted: int, **fields: object) -> JobSpec:
    slots = (Slot(node(0), "box-0", len(granted), granted), Slot(node(1), "box-1", 1, (0,)))
    return spec(slots=slots, accelerator=kind, **fields)


def test_granted_devices_are_visible_by_uuid_and_the_clients_list_is_ignored() -> None:
    devices = gpus(Accelerator.CUDA, "GPU-a", "GPU-b", "GPU-c")
    job = gpu_job(Accelerator.CUDA, 2, 0, env={"CUDA_VISIBLE_DEVICES": "3"})
    assert env(job, where=host(devices=devices))["CUDA_VISIBLE_DEVICES"] == "GPU-c,GPU-a"


def test_an_agent_restricted_to_some_devices_passes_exactly_these_on() -> None:
    job = gpu_job(Accelerator.CUDA, 0, 1)
    where = host({"CUDA_VISIBLE_DEVICES": "4,5"}, gpus(Accelerator.CUDA, "", ""))
    assert env(job, where=where)["CUDA_VISIBLE_DEVICES"] == "4,5"
    where = host({}, gpus(Accelerator.CUDA, "", ""))
    got = env(job, where=where)
    assert (got["CUDA_VISIBLE_DEVICES"], got["CUDA_DEVICE_ORDER"]) == ("0,1", "PCI_BUS_ID")


def test_rocm_uses_its_own_variable() -> None:
    job = gpu_job(Accelerator.ROCM, 1)
    where = host({"HIP_VISIBLE_DEVICES": "2,3"}, gpus(Accelerator.ROCM, "", ""))
    got = env(job, where=where)
    assert got["HIP_VISIBLE_DEVICES"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in got


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_rocm_counts_within_the_lists_that_the_agent_was_given(name: str) -> None:
    job = gpu_job(Accelerator.ROCM, 1, env={"ROCR_VISIBLE_DEVICES": "7"})
    where = host({name: "2,3", "ROCR_VISIBLE_DEVICES": "4,5,6,7"}, gpus(Accelerator.ROCM, "", ""))
    got = env(job, where=where)
    assert (got["HIP_VISIBLE_DEVICES"], got["ROCR_VISIBLE_DEVICES"]) == ("3", "4,5,6,7")
    assert "CUDA_VISIBLE_DEVICES" not in got
    assert "ROCR_VISIBLE_DEVICES" not in env(job, where=host({}, gpus(Accelerator.ROCM, "", "")))


def test_cpu_rank_on_a_machine_with_gpus_sees_none() -> None:
    where = host({"CUDA_VISIBLE_DEVICES": "0"}, gpus(Accelerator.CUDA, "GPU-a"))
    assert env(spec(1), where=where)["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in env(spec(1))
    where = host({"HIP_VISIBLE_DEVICES": "0"}, gpus(Accelerator.ROCM, ""))
    assert env(spec(1), where=where)["HIP_VISIBLE_DEVICES"] == "-1"  # "" shows all to HIP


def test_mps_falls_back_to_the_cpu_unless_the_user_says_otherwise() -> None:
    job = spec(1, accelerator=Accelerator.MPS)
    assert env(job)["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"
    job = spec(1, accelerator=Accelerator.MPS, env={"PYTORCH_ENABLE_MPS_FALLBACK": "0"})
    assert env(job)["PYTORCH_ENABLE_MPS_FALLBACK"] == "0"


def test_arguments_are_passed_untouched() -> None:
    words = ("train.py", "", " a ", "'\"", '{"a": 1}', "$HOME", "`x`", "a\nb", "--", "æ")
    job = spec(1, argv=tuple(word.encode() for word in words))
    assert rank_argv(job, host()) == ("/opt/python", *words)
    command = spec(1, argv=(b"sh", b"-c", b"x"), python=False)
    assert rank_argv(command, host()) == ("sh", "-c", "x")


def test_arguments_that_are_no_text_travel_byte_for_byte() -> None:
    words = (b"train.py", b"caf\xe9", b"\xff\xfe", bytes(range(1, 256)))
    sent = wire.pack(spec(1, argv=words))
    arrived = wire.decode_as(JobSpec, wire.unpack(sent))
    assert arrived.argv == words
    assert tuple(map(os.fsencode, rank_argv(arrived, host())[1:])) == words


def test_secrets_reach_the_rank_from_the_order_only() -> None:
    assert "canary" not in repr(spec(1, 1))
    order = GoOrder("10.0.0.1", 1, (), {"TOKEN": "t", "RANK": "5"})
    got = rank_environment(spec(1, 1), 0, 0, order, host())
    assert (got["TOKEN"], got["RANK"]) == ("t", "0")
