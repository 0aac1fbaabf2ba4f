"""Numeric precision: which names exist, which devices they are for, and how a step is wrapped.

A combination that a device does not support is an error, never a quiet change; so
"16-mixed" on CPU is refused where Lightning falls back to "bf16-mixed". Knows nothing of loops.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from gpulayer.pytorch.arguments import ArgumentError

# Spellings that Lightning accepts for the three modes we have.
_CANONICAL = {
    None: "32-true",
    32: "32-true",
    "32": "32-true",
    "32-true": "32-true",
    16: "16-mixed",
    "16": "16-mixed",
    "16-mixed": "16-mixed",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
}
_ELSEWHERE = (64, "64", "64-true", "16-true", "bf16-true", "transformer-engine")
_DEVICES = {
    "32-true": ("cpu", "cuda", "mps"),
    "bf16-mixed": ("cpu", "cuda"),
    "16-mixed": ("cuda",),
}


def canonical(precision: str | int | None) -> str:
    """Return the full name of a precision.

    Raises:
        ArgumentError: no such precision, or one that is not offered here.
    """
    name = _CANONICAL.get(precision)
    if name is None:
        known = "precision is one of 32-true, bf16-mixed, 16-mixed"
        if precision in _ELSEWHERE:
            raise ArgumentError(
                f"precision {precision!r} is not offered", hint=f"{known}; or call module.to(dtype)"
            )
        raise ArgumentError(f"unknown precision {precision!r}", hint=known)
    if precision in (16, "16", "bf16"):
        warnings.warn(f"precision={precision!r} means {name!r}; write that", stacklevel=3)
    return name


def check(precision: str, device_type: str) -> None:
    """Raise `ArgumentError` where `device_type` cannot train in `precision`."""
    if device_type not in _DEVICES[precision]:
        usable = [name for name, devices in _DEVICES.items() if device_type in devices]
        raise ArgumentError(
            f"precision {precision!r} is not supported on {device_type}",
            hint=f"on {device_type} use {' or '.join(map(repr, usable))}",
        )


class Precision:
    """How steps are wrapped on one device: autocast, and for float16 a gradient scaler."""

    def __init__(self, name: str, device: torch.device) -> None:
        check(name, device.type)
        self.name = name
        self.device = device
        self.scaler: torch.amp.GradScaler | None = None
        self._dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(name)
        if name == "16-mixed":
            self.scaler = torch.amp.GradScaler(device.type)

    @property
    def mixed(self) -> bool:
        return self._dtype is not None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forward passes and losses are computed."""
        if self._dtype is None:
            return contextlib.nullcontext()
        # No weight cache: it would hold stale casts when a step runs under no_grad first.
        return torch.autocast(self.device.type, dtype=self._dtype, cache_enabled=False)


class ScaledOptimizer:
    """What a user's `optimizer_step` gets under 16-mixed: the optimizer, stepped by the scaler.

    The closure runs first, then `before_step` (hooks and clipping, on unscaled gradients), then the
    update, which the scaler leaves out where gradients are not finite.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        before_step: Callable[[], None],
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ArgumentError("LBFGS calls its closure many times: not possible with 16-mixed")
        self.optimizer = optimizer
        self._scaler = scaler
        self._before_step = before_step
        # Fused optimizers unscale inside their step; nothing could be clipped before it.
        self.unscales_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def step(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        if loss is None:  # training_step returned None: there are no gradients to unscale
            self._before_step()
            return None
        if not self.unscales_itself:
            self._scaler.unscale_(self.optimizer)
        self._before_step()
        result = self._scaler.step(self.optimizer)
        self._scaler.update()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
