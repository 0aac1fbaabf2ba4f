"""Manual optimization: the module itself runs backward and steps its optimizers, however many.

What automatic optimization does around a step happens here around each step of the user: hooks, the
gradient scaler, the counter. Under DDP every `manual_backward` reduces gradients over ranks, also
where one `training_step` has several. Semantics are Lightning's. Does not know batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gpulayer.pytorch.arguments import ArgumentError

if TYPE_CHECKING:
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.trainer import Trainer


class ManualOptimizer(Optimizer):
    """What `self.optimizers()` gives in manual optimization: the optimizer, whose steps count.

    It is an instance of the optimizer's own class and shares its state and parameter groups.
    """

    _manual: ManualOptimization
    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, manual: ManualOptimization) -> None:
        # A scheduler puts a `step` into the optimizer's own attributes; it would hide ours.
        vars(self).update({k: v for k, v in vars(optimizer).items() if k != "step"})
        self.__class__ = type(
            f"Manual{type(optimizer).__name__}", (ManualOptimizer, type(optimizer)), {}
        )
        self.optimizer = optimizer
        self._manual = manual

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step the optimizer; `closure` runs forward and backward where the optimizer needs it."""
        return self._manual.step(self.optimizer, closure, options)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only this optimizer's parameters get gradients; without `sync_grad` on this rank."""
        module = self._manual.module
        with self._manual.synchronised(sync_grad):
            module.toggle_optimizer(self)
            yield
            module.untoggle_optimizer(self)

    def __repr__(self) -> str:
        return f"Manual{self.optimizer!r}"


class ManualOptimization:
    """The steps of one fit.

    Args:
        wrapped: the data-parallel wrapper, None on one rank.
    """

    def __init__(
        self, trainer: Trainer, module: Module, wrapped: DistributedDataParallel | None
    ) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise ArgumentError(
                "accumulate_grad_batches does not apply to manual optimization",
                hint="step the optimizer in every n-th training_step",
            )
        if trainer.gradient_clip_val:
            raise ArgumentError(
                "gradient_clip_val does not apply to manual optimization",
                hint="call self.clip_gradients(optimizer, value) before optimizer.step()",
            )
        self.module = module
        self.optimizers = [ManualOptimizer(one, self) for one in trainer.optimizers]
        self._trainer = trainer
        self._metrics = trainer._metrics
        self._hooks = trainer._hooks
        self._scaler = trainer.runtime.scaler
        self._wrapped = wrapped
        self._reduces = True
        if wrapped is not None:
            wrapped.module.after_step = self._after_forward

    # -- forward and backward ----------------------------------------------------------------

    def forward(self, *args: Any) -> Any:
        """Run `training_step`, through the wrapper where there is one."""
        if self._wrapped is None:
            return self.module.training_step(*args)
        try:
            return self._wrapped(*args)
        finally:
            self._wrapped.require_backward_grad_sync = True
            self._wrapped.require_forward_param_sync = True

    def _after_forward(self) -> None:
        """Keep the wrapper from preparing for a backward pass after `training_step`."""
        assert self._wrapped is not None
        self._wrapped.require_backward_grad_sync = False

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Run one backward pass with its hooks; gradients are then equal on all ranks."""
        if self._wrapped is not None and self._reduces:
            reducer = self._wrapped.reducer
            reducer._rebuild_buckets()
            reducer.prepare_for_backward([loss] if self._wrapped.find_unused_parameters else [])
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._call("on_before_backward", loss)
        # The wrapper would reduce in any backward pass that it has been prepared for, only.
        quiet = nullcontext() if self._wrapped is None or self._reduces else self._wrapped.no_sync()
        with quiet:
            self._named("backward")
            self.module.backward(loss, *args, **options)
        self._call("on_after_backward")
        self._named("training_step")

    @contextmanager
    def synchronised(self, on: bool) -> Iterator[None]:
        """Reduce gradients over ranks in this block, or keep them apart."""
        before, self._reduces = self._reduces, on
        try:
            yield
        finally:
            self._reduces = before

    # -- step --------------------------------------------------------------------------------

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, options: dict[str, Any]
    ) -> Any:
        """Step one optimizer, with the hook before it, and count."""
        if self._scaler is not None:
            result = self._scaled_step(self._scaler, optimizer, closure, options)
        else:

            def before_step() -> Any:
                loss = closure() if closure is not None else None
                self._before_step(optimizer)
                return loss

            result = optimizer.step(closure=before_step, **options)
        self._trainer._global_step += 1
        return result

    def _scaled_step(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None,
        options: dict[str, Any],
    ) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ArgumentError("LBFGS calls its closure many times: not possible with 16-mixed")
        if closure is not None:
            with torch.enable_grad():
                closure()
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)
        self._before_step(optimizer)
        result = scaler.step(optimizer, **options)
        scaler.update()
        return result

    def _before_step(self, optimizer: Optimizer) -> None:
        self._call("on_before_optimizer_step", optimizer)
        self._named("training_step")

    def _call(self, name: str, *args: Any) -> None:
        hook = self._hooks[name]
        if hook is not None:
            self._named(name)
            hook(*args)

    def _named(self, name: str) -> None:
        self._metrics.hook = name
