"""`zero_grad` and `backward` without torch's Python frames around what they do.

Of a small step, ranges for the profiler and checks of arguments that a loop never passes are a
sixth. What is computed is the same; whatever is overridden, patched or not plain goes to torch's
own methods, so that it is seen. Knows no steps and no hooks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import has_torch_function

try:  # what `torch.autograd.backward` ends in: no public name, so a torch may come without it
    from torch.autograd.graph import _engine_run_backward
except ImportError:  # pragma: no cover
    _engine_run_backward = None  # type: ignore[assignment]

_ZERO_GRAD = Optimizer.zero_grad
_BACKWARD = (Tensor.backward, torch.autograd.backward)


def zero_grad(optimizer: Optimizer) -> None:
    """Do what `optimizer.zero_grad()` does."""
    if type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def backward(loss: Tensor) -> None:
    """Do what `loss.backward()` does."""
    if (
        _engine_run_backward is None
        or type(loss) is not Tensor
        or loss.dim() != 0
        or not (loss.requires_grad and loss.is_floating_point())
        or (Tensor.backward, torch.autograd.backward) != _BACKWARD
        or has_torch_function((loss,))  # a mode that wants to see every call
    ):
        loss.backward()  # type: ignore[no-untyped-call]
        return
    ones = torch.ones_like(loss, memory_format=torch.preserve_format)
    _engine_run_backward(
        (loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
