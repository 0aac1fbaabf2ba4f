"""Small jobs for the tests of the job core."""

from __future__ import annotations

from gpulayer_mesh.core.jobspec import (
    GoOrder,
    HostPhase,
    HostReport,
    JobKind,
    JobSpec,
    RankState,
    RankStatus,
    Slot,
)
from gpulayer_mesh.core.types import Accelerator

JOB = "0123456789"
ORDER = GoOrder("10.0.0.1", 29400, ("10.0.0.1", "10.0.0.2"), {"TOKEN": "canary"})


def node(index: int) -> str:
    return f"{index:064x}"


def spec(*processes: int, **fields: object) -> JobSpec:
    """A job with one slot per number, on nodes box-0, box-1, ..."""
    slots = tuple(Slot(node(i), f"box-{i}", count) for i, count in enumerate(processes or (1, 1)))
    known: dict[str, object] = {
        "id": JOB,
        "kind": JobKind.DISTRIBUTED,
        "name": "train.py",
        "submitter": node(99),
        "submitter_name": "laptop",
        "submitted_at": 1_700_000_000.25,
        "argv": (b"train.py", b"--x", b"a b"),
        "python": True,
        "cwd": "",
        "env": {},
        "accelerator": Accelerator.CPU,
        "slots": slots,
        "manifest": b"\0" * 32,
        "bundle_bytes": 0,
    }
    return JobSpec(**(known | fields))  # type: ignore[arg-type]


def running(rank: int) -> RankStatus:
    return RankStatus(rank, RankState.RUNNING, pid=100 + rank)


def exited(
    rank: int,
    code: int | None = 0,
    *tail: str,
    signal: int | None = None,
    age: float = 0.0,
    stopped: bool = False,
) -> RankStatus:
    return RankStatus(rank, RankState.EXITED, 100 + rank, code, signal, stopped, age, tail)


def report(index: int, phase: HostPhase, *ranks: RankStatus, problem: str = "") -> HostReport:
    return HostReport(JOB, node(index), phase, ranks, problem)
