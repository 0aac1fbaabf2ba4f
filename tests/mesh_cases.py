"""Members and snapshots of pretended meshes."""

from __future__ import annotations

import random
from dataclasses import replace

from gpulayer_mesh.core.types import (
    Accelerator,
    Capabilities,
    Device,
    Link,
    MemberSnapshot,
    NodeState,
    Role,
    Snapshot,
    TorchAbilities,
)
from job_cases import node

CPU, CUDA = Accelerator.CPU, Accelerator.CUDA
MBIT = 125_000  # bytes per second


def caps(
    gpus: int = 0,
    *,
    kind: Accelerator = CUDA,
    cpus: int = 8,
    torch: str | None = "2.13.0+cpu",
    python: str = "3.11.7",
    os: str = "Linux 6.8 x86_64",
    model: str = "RTX 3070",
    free_mib: int = 8000,
    busy: tuple[int, ...] = (),
    links: tuple[tuple[str, ...], ...] = (),
    numa: tuple[int | None, ...] = (),
) -> Capabilities:
    devices = tuple(
        Device(
            kind,
            i,
            model,
            f"GPU-{i}",
            8192,
            free_mib,
            int(i in busy),
            links[i] if i < len(links) else (),
            numa=numa[i] if i < len(numa) else None,
        )
        for i in range(gpus)
    )
    abilities = (CPU, kind) if gpus else (CPU,)
    return Capabilities(
        cpus,
        32000,
        16000,
        100_000,
        os,
        python,
        "0.1.0",
        None if torch is None else TorchAbilities(torch, abilities, ("gloo",)),
        devices,
    )


def member(name: str, have: Capabilities | None = None, **fields: object) -> MemberSnapshot:
    number = sum(ord(char) * 31**place for place, char in enumerate(name))
    known: dict[str, object] = {
        "node": node(number),
        "name": name,
        "roles": (Role.WORKER,),
        "state": NodeState.ALIVE,
        "rtt_ms": 1.0,
        "caps": have or caps(),
    }
    return MemberSnapshot(**(known | fields))  # type: ignore[arg-type]


def mesh(*members: MemberSnapshot) -> Snapshot:
    return Snapshot("a" * 64, "", 1, members)


def large_mesh(seed: int) -> Snapshot:
    """A thousand nodes in seven zones, with as many pairs as their reports of 32 links make."""
    rng = random.Random(seed)
    members = [
        member(f"n{i:04}", caps(8), zone=f"z{i % 7}", node=node(i), rtt_ms=i % 13)
        for i in range(1000)
    ]
    pairs = {
        tuple(sorted((i, j))) for i in range(1000) for j in rng.sample(range(1000), 20) if i != j
    }
    links = tuple(
        Link(i, j, 900, round((940 if i % 7 == j % 7 else 94) * MBIT / (1 + rng.random())))
        for i, j in sorted(pairs)
    )
    return replace(mesh(*members), links=links)
