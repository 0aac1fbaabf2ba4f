"""How a module trains replicated on all ranks: DDP, or the bare module on one rank.

`sharded` has the other way, with the same methods; the loops ask nothing else about ranks. State
dicts are whole and plain in both, so that any run can read a checkpoint. Does not know steps.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

if TYPE_CHECKING:
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.runtime import Runtime
    from gpulayer.pytorch.sharded import FullySharded

Strategy: TypeAlias = "Replicated | FullySharded"
NAMES = ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp")


class StepForward(nn.Module):
    """Makes `training_step` the forward of a module, so that DDP's hooks run around it."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.after_step: Callable[[], None] | None = None

    def forward(self, *args: Any) -> Any:
        output = self.module.training_step(*args)
        if self.after_step is not None:
            self.after_step()
        return output


@contextmanager
def _without_hooks(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Keep hooks on parameters from being called."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooked = [(one, name, kept) for one in parameters for name in names
              if (kept := getattr(one, name))]  # fmt: skip
    for one, name, _ in hooked:
        setattr(one, name, OrderedDict())  # None would leave the latter kind where it is
    try:
        yield
    finally:
        for one, name, kept in hooked:
            setattr(one, name, kept)


class Replicated:
    """Every rank has the whole module and DDP averages gradients; one rank needs no wrapper."""

    def __init__(self, runtime: Runtime, module: Module) -> None:
        self._runtime = runtime
        self._module = module
        self.wrapped: DistributedDataParallel | None = None
        self.forward: Callable[..., Any] = module.training_step
        self._order: list[int] | None = None

    def prepare(self) -> None:
        """Bring the module to its device, equal on all ranks, ready to train."""
        if self._runtime.world_size == 1:
            self._runtime.prepare(self._module)
            return
        wrapped = self._runtime.prepare(StepForward(self._module))
        assert isinstance(wrapped, DistributedDataParallel)
        self.wrapped = self.forward = wrapped

    def unsynchronised(self) -> AbstractContextManager[Any]:
        """Return a block in which backward leaves gradients on their rank."""
        return nullcontext() if self.wrapped is None else self.wrapped.no_sync()

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients by parameter, on the CPU."""
        return {
            name: parameter.grad.cpu()
            for name, parameter in self._module.named_parameters()
            if parameter.grad is not None
        }

    def load_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Take back what `gradients` returned."""
        for name, parameter in self._module.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device)
        if gradients and self.wrapped is not None:
            self.wrapped.require_forward_param_sync = False  # as after a batch of the window

    # DDP puts gradients into buckets in the order of its parameters at first, and after the first
    # backward pass in the order in which they became ready in it. Rings of three ranks and more add
    # up in an order that depends on the place in a bucket: a resumed fit needs the same places.

    def order(self, *, reduced: bool) -> list[int]:
        """Return the order of gradients in DDP's buckets on rank 0; empty: as at first.

        Args:
            reduced: whether this fit has reduced gradients.
        """
        if self._order is None and reduced and self._lays_out_anew():
            wrapped: Any = self.wrapped
            wrapped.logger.set_runtime_stats_and_log()  # it would do so with the next forward
            found = wrapped._get_ddp_logging_data()
            ready = found.get("prev_iteration_grad_ready_order_indices", "")
            text = str(found.get("rebuilt_per_bucket_param_indices", ready))
            self._order = [int(number) for number in re.findall(r"\d+", text)]
        return self._order or []

    def settle(self, order: list[int]) -> None:
        """Have DDP lay out its buckets as those of another run were, by a backward pass of zeros.

        No hook on parameters is called, and gradients stay what they are.
        """
        if not self._lays_out_anew():
            return
        assert self.wrapped is not None
        # Those that it reduces, and whether their gradients are sparse.
        parameters, sparse = self.wrapped._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if sorted(order) != list(range(len(parameters))):
            return
        self._order = order
        gradients = [one.grad for one in parameters]
        with _without_hooks(parameters):
            for one in parameters:
                one.grad = None
            self.wrapped.reducer.prepare_for_backward([])
            for index in order:
                zeros = torch.zeros_like(parameters[index])
                torch.autograd.backward(
                    parameters[index], zeros.to_sparse(1) if sparse[index] else zeros
                )
            self.wrapped.reducer._rebuild_buckets()
        for one, gradient in zip(parameters, gradients, strict=True):
            one.grad = gradient

    def _lays_out_anew(self) -> bool:
        return self.wrapped is not None and not self.wrapped.find_unused_parameters

    def fingerprint(self) -> tuple[float, float] | None:
        """Return two numbers that depend on all weights, None if not finite; waits for the device.

        They are the weights' 2-norm and the sum of their sums.
        """
        weights = [one.detach() for one in self._module.parameters() if one.is_floating_point()]
        if not weights:
            return None
        norm = torch.nn.utils.get_total_norm(weights).double()
        total = torch.stack([one.sum().to(norm) for one in weights]).sum()
        first, second = torch.stack([norm, total]).tolist()
        return (first, second) if math.isfinite(first) and math.isfinite(second) else None

    def evaluating(self) -> AbstractContextManager[Any]:
        """Return a block in which ranks may run unequal numbers of forward passes."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the module's whole state; all ranks must ask."""
        return self._module.state_dict()

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Load a whole state."""
        self._module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state; all ranks must ask."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a whole state of an optimizer."""
        optimizer.load_state_dict(state)

    def release(self) -> None:
        """Leave the module as a plain one on the CPU, with its trained weights."""
        self._module.cpu()
