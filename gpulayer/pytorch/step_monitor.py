"""`StepMonitor`: gradient norm and throughput in metrics.csv, at logging steps only.

Between logging steps it costs two function calls a step; nothing waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpulayer.pytorch.callback import Callback
from gpulayer.pytorch.metrics import batch_sizes

if TYPE_CHECKING:
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.trainer import Trainer


class StepMonitor(Callback):
    """Logs at every logging step (`log_every_n_steps`) what happened since the last one.

    Args:
        grad_norm: log `grad_norm`: the 2-norm of all gradients of the optimizer, before clipping.
        throughput: log `batches_per_s` of this rank, and `samples_per_s` of all ranks together,
            with the size of the batch in hand; validations in between count as time.
    """

    def __init__(self, grad_norm: bool = True, throughput: bool = True) -> None:
        self.grad_norm = grad_norm
        self.throughput = throughput
        self._clock: Callable[[], float] = time.perf_counter
        self._since_s = 0.0
        self._batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._since_s, self._batches = self._clock(), 0

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: Module, optimizer: Optimizer
    ) -> None:
        if self.grad_norm and trainer._row_due():
            pl_module.log("grad_norm", total_norm(optimizer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if not self.throughput or not trainer._row_due():
            return
        now_s = self._clock()
        rate = self._batches / max(now_s - self._since_s, 1e-9)
        pl_module.log("batches_per_s", rate)
        size = next(iter(batch_sizes(batch)), None)
        if size is not None:
            pl_module.log("samples_per_s", rate * size * trainer.world_size)
        self._since_s, self._batches = now_s, 0


def total_norm(optimizer: Optimizer) -> Tensor:
    """Return the 2-norm of all gradients of an optimizer's parameters, on their device."""
    grads = [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    if not grads:
        return torch.zeros(())
    norm = torch.nn.utils.get_total_norm(grads)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole
