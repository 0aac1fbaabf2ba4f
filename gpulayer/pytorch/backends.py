"""torch's own switches that a Trainer sets: deterministic algorithms, and cuDNN's autotuning."""

from __future__ import annotations

from typing import Literal

import torch

from gpulayer import env as environment
from gpulayer.pytorch.arguments import ArgumentError

Deterministic = bool | Literal["warn"] | None
WORTH_TUNING = 1000  # steps: fewer do not win back what autotuning costs at the start


def check_deterministic(value: object) -> Deterministic:
    """Return `value` if it is one that `deterministic` can have."""
    if value is None or isinstance(value, bool) or value == "warn":
        return value
    raise ArgumentError(f'deterministic is True, False, "warn" or None, not {value!r}')


def check_benchmark(value: object) -> bool | None:
    """Return `value` if it is one that `benchmark` can have."""
    if value is None or isinstance(value, bool):
        return value
    raise ArgumentError(f"benchmark is True, False or None, not {value!r}")


def set_deterministic(value: Deterministic) -> None:
    """Choose deterministic algorithms, "warn": where torch has them; None touches nothing.

    torch raises (or warns) where it has none. cuBLAS needs a variable for it, read at its start.
    """
    if value is None:
        return
    torch.use_deterministic_algorithms(bool(value), warn_only=value == "warn")
    if value:
        environment.export("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_benchmark(value: bool | None, deterministic: Deterministic, steps: float) -> None:
    """Turn cuDNN's autotuning on or off.

    Args:
        value: None turns it on where `steps` are planned that make it worth while, and off where
            algorithms must be deterministic: it may choose another one in each run.
        steps: optimizer steps of this call; inf: not limited.
    """
    if value is None:
        if deterministic:
            value = False
        elif steps >= WORTH_TUNING:
            value = True
        else:
            return
    torch.backends.cudnn.benchmark = value
