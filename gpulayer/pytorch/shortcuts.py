"""`zero_grad` and `backward` without torch's Python frames around what they do.

Of a small step, ranges for the profiler and checks of arguments that a loop never passes are a
sixth. What is computed is the same; whatever is overridden, patched or not plain goes to torch's
own methods, so that it is seen. Knows no steps and no hooks.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import has_torch_function

_ZERO_GRAD = Optimizer.zero_grad
_TENSOR_BACKWARD, _AUTOGRAD_BACKWARD = Tensor.backward, torch.autograd.backward
# What `torch.autograd.backward` ends in. It has no public name, so a torch may come without it.
_run_backward: Any = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None
)
_log = logging.getLogger("torch.autograd.graph")  # at DEBUG, torch logs every node


def zero_grad(optimizer: Optimizer) -> None:
    """Do what `optimizer.zero_grad()` does."""
    if type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def backward(loss: Tensor, divisor: int = 1) -> None:
    """Do what `(loss / divisor).backward()` does."""
    if not _plain(loss):
        loss = loss if divisor == 1 else loss / divisor
        loss.backward()  # type: ignore[no-untyped-call]
        return
    gradient = _seed(loss.dtype, divisor).clone()  # a hook may change it in place
    _run_backward(
        (loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@cache
def _seed(dtype: torch.dtype, divisor: int) -> Tensor:
    """Return the gradient that backward of a division hands on."""
    ones = torch.ones((), dtype=dtype, device="cpu")
    return ones if divisor == 1 else ones / divisor


def _plain(loss: Tensor) -> bool:
    """Return whether torch would do nothing else on the way to its engine.

    On the CPU only: elsewhere torch hands the context of this thread to those of the devices.
    """
    return (
        type(loss) is Tensor
        and loss.is_cpu
        and loss.dim() == 0
        and loss.requires_grad
        and loss.is_floating_point()
        and _run_backward is not None
        and Tensor.backward is _TENSOR_BACKWARD
        and torch.autograd.backward is _AUTOGRAD_BACKWARD
        and not has_torch_function((loss,))  # a mode that wants to see every call
        and not _log.isEnabledFor(logging.DEBUG)
    )
