"""The environment and command line of one rank: exactly torchrun's variables, and ours.

A test compares the result with a real torchrun of the installed torch (written for 2.13:
`LocalElasticAgent._start_workers`, `run.config_from_args`). A job of one process gets none of the
rendezvous variables. What the client's machine has set never arrives unless the user named it,
and device lists never do: which devices a rank sees is what its node granted, so LOCAL_RANK
indexes into them. This module does not know how a process is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpulayer_mesh.core.jobspec import GoOrder, JobSpec
from gpulayer_mesh.core.types import Accelerator, Device

# What torchrun sets; a rank never inherits one of these from the agent or the user.
TORCHRUN_VARIABLES = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
    ]
)
DEVICE_VARIABLES = frozenset(
    ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"]
)


def is_ours(name: str) -> bool:
    """Return whether the job alone sets a variable, whatever its submitter would give it."""
    return name in TORCHRUN_VARIABLES | DEVICE_VARIABLES or name.startswith("GPULAYER_")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostContext:
    """What only the rank's own node knows."""

    base: Mapping[str, str]  # the agent's own environment
    job_dir: str  # absolute; holds work/, out/rank<k>/ and logs/
    python: str  # absolute path of the interpreter that runs ranks
    cookie: str  # marks every process of this job on this node
    devices: tuple[Device, ...] = ()  # all of the node, as in its capabilities
    interface: str = ""  # the one that routes to the job's other nodes; "" when alone


def first_rank(spec: JobSpec, slot_index: int) -> int:
    """Return the global rank of a slot's first process."""
    return sum(slot.processes for slot in spec.slots[:slot_index])


def world_size(spec: JobSpec) -> int:
    """Return the number of processes of a job."""
    return sum(slot.processes for slot in spec.slots)


def rank_argv(spec: JobSpec, host: HostContext) -> tuple[str, ...]:
    """Return a rank's argument list; no shell ever sees it.

    Bytes that are no UTF-8 become surrogate escapes, which the shim turns back.
    """
    argv = tuple(argument.decode("utf-8", "surrogateescape") for argument in spec.argv)
    return (host.python, *argv) if spec.python else argv


def rank_environment(
    spec: JobSpec, slot_index: int, local_rank: int, order: GoOrder, host: HostContext
) -> dict[str, str]:
    """Return the complete environment of one rank.

    Later wins: the agent's own variables, the user's, the user's secrets, ours.
    """
    slot = spec.slots[slot_index]
    rank = first_rank(spec, slot_index) + local_rank
    env: dict[str, str] = {}
    for given in (host.base, spec.env, order.secrets):
        env.update((name, value) for name, value in given.items() if not is_ours(name))
    _see_granted_devices(env, spec, slot_index, host)
    if len(spec.slots) > 1 and host.interface:
        env.setdefault("GLOO_SOCKET_IFNAME", host.interface)
        # NCCL takes prefixes; "=" asks for this very name ("eth1" would also mean "eth10").
        env.setdefault("NCCL_SOCKET_IFNAME", f"={host.interface}")
    if world_size(spec) > 1:
        env |= _torchrun(spec, slot_index, local_rank, order)
        env["TORCHELASTIC_ERROR_FILE"] = f"{host.job_dir}/logs/rank{rank}.error.json"
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        # Without: a warning per rank on a network that has no reverse names, and the C++ stack of
        # each rank whose store went with rank 0, after the traceback that matters.
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if slot.processes > 1:
            env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: n ranks share the cores
    out = f"{host.job_dir}/out/rank{rank}"
    env |= {
        "GPULAYER_JOB": spec.id,
        "GPULAYER_OUT": out,
        "GPULAYER_NODE": slot.name,
        "GPULAYER_ACCELERATOR": spec.accelerator.value,
        "GPULAYER_COOKIE": host.cookie,
        # One instant for all ranks, so folders named by time agree; wall clock of the submitter.
        "GPULAYER_STARTED": f"{spec.submitted_at:.3f}",
    }
    if spec.restarts:
        env["GPULAYER_RESTART"] = str(spec.restart)
    if spec.restart:
        env["GPULAYER_RESTORED"] = f"{host.job_dir}/restored"
    if spec.call is not None:
        env["GPULAYER_CALL"] = str(spec.call)
    return env


def _torchrun(spec: JobSpec, slot_index: int, local_rank: int, order: GoOrder) -> dict[str, str]:
    rank = str(first_rank(spec, slot_index) + local_rank)
    world = str(world_size(spec))
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(slot_index),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(spec.slots[slot_index].processes),
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(len(spec.slots)),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": str(order.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(spec.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.restarts),
        "TORCHELASTIC_RUN_ID": spec.id,
        # Our agents host no store: with "True" every rank would be a client and wait for ever
        # (pytorch/pytorch#191989).
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }


def _see_granted_devices(
    env: dict[str, str], spec: JobSpec, slot_index: int, host: HostContext
) -> None:
    granted = spec.slots[slot_index].devices
    by_index = {device.index: device for device in host.devices}
    kinds = {device.kind for device in host.devices}
    if spec.accelerator is Accelerator.CUDA:
        outer = [part for part in host.base.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        ids = []
        for index in granted:
            device = by_index.get(index)
            if device is not None and device.uuid:
                ids.append(device.uuid)
            elif index < len(outer):
                ids.append(outer[index])  # the agent itself was restricted to these
            else:
                ids.append(str(index))
                env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order our indices have
        env["CUDA_VISIBLE_DEVICES"] = ",".join(ids)
    elif spec.accelerator is Accelerator.ROCM:
        # HIP reads the first of these that is not empty, and counts within what ROCr lets through.
        lists = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        listed = next((found for name in lists if (found := host.base.get(name))), "")
        outer = [part for part in listed.split(",") if part]
        env["HIP_VISIBLE_DEVICES"] = ",".join(
            outer[index] if index < len(outer) else str(index) for index in granted
        )
        if "ROCR_VISIBLE_DEVICES" in host.base:
            env["ROCR_VISIBLE_DEVICES"] = host.base["ROCR_VISIBLE_DEVICES"]
    elif spec.accelerator is Accelerator.MPS:
        env.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    else:
        # A CPU rank must not see devices that may be granted to another job. Metal has no such
        # list.
        if Accelerator.CUDA in kinds:
            env["CUDA_VISIBLE_DEVICES"] = ""
        if Accelerator.ROCM in kinds:
            env["HIP_VISIBLE_DEVICES"] = "-1"  # an empty list would count as none given
