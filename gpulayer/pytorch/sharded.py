"""How a module trains split over ranks: FSDP2, with the methods of `strategy.Replicated`.

Imported only when it is asked for: DTensor takes a second to import.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.module import overridden

if TYPE_CHECKING:
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.runtime import Runtime


class FullySharded:
    """Every rank has a part of each parameter, its gradient and its optimizer state (FSDP2).

    Submodules with parameters are split one by one, so that only one of them is whole at a time;
    what they do not own belongs to the root. While it evaluates, a rank holds the whole weights.
    Buffers are rank 0's, as under DDP.
    """

    wrapped = None

    def __init__(self, runtime: Runtime, module: Module) -> None:
        if runtime.world_size == 1:
            raise ArgumentError(
                'strategy="fsdp" splits a module over several ranks, and there is one',
                hint="give devices or num_nodes, or leave strategy out",
            )
        if not module.automatic_optimization:
            raise ArgumentError('manual optimization is not possible with strategy="fsdp"')
        if runtime.scaler is not None:
            raise ArgumentError(
                '"16-mixed" is not possible with strategy="fsdp"', hint='use "bf16-mixed"'
            )
        self._runtime = runtime
        self._module = module
        self.forward: Callable[..., Any] = module.training_step
        self._traces: dict[nn.Module, _Trace] = {}

    def prepare(self) -> None:
        """Split the module over the ranks; all start with rank 0's weights."""
        module, runtime = self._module, self._runtime
        module.to(runtime.device)
        runtime.equalise(module)
        self._traces = {part: _Trace(part) for part in module.modules()}
        peers = init_device_mesh(runtime.device.type, (runtime.world_size,))
        for part in _units(module):
            fully_shard(part, mesh=peers)
        fully_shard(module, mesh=peers)
        for name in ("training_step", "validation_step"):
            if overridden(module, name):
                register_fsdp_forward_method(module, name)
        for part, trace in self._traces.items():
            trace.look(part)
        self.forward = module.training_step

    def unsynchronised(self) -> AbstractContextManager[Any]:
        """Return an empty block: a rank that kept its gradients apart would hold them whole."""
        return nullcontext()

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self._module.named_parameters():
            if isinstance(parameter.grad, DTensor):
                found[name] = parameter.grad.to_local().cpu()
        return found

    def load_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for name, parameter in self._module.named_parameters():
            if name in gradients and isinstance(parameter, DTensor):
                part = gradients[name].to(parameter.device)
                parameter.grad = DTensor.from_local(
                    part,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )

    def order(self, *, reduced: bool) -> list[int]:
        """Return nothing: gradients are laid out by modules, from the first step on."""
        return []

    def settle(self, order: list[int]) -> None:
        """Do nothing, see `order`."""

    def fingerprint(self) -> None:
        """Return nothing: each rank has weights that no other rank has."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._share_buffers()
        parts = self._parts()
        for part in parts:
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.reshard()
                part.set_reshard_after_forward(part is not self._module, recurse=False)

    def state_dict(self) -> dict[str, Any]:
        self._share_buffers()
        return {name: _whole(value) for name, value in self._module.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        mine = self._module.state_dict()
        split = {name: _split_like(mine.get(name), value) for name, value in state.items()}
        self._module.load_state_dict(split, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()
        whole = {
            index: {name: _whole(value) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        return {**state, "state": whole}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        split = {
            index: {
                name: _split_like(parameters[index], value)
                if isinstance(value, Tensor) and value.shape == parameters[index].shape
                else value
                for name, value in values.items()
            }
            for index, values in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": split})

    def release(self) -> None:
        """Make the module what it was: FSDP2 has no way back, so its traces are taken out."""
        self._share_buffers()
        whole: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay one
        for part, trace in self._traces.items():
            for name, value in part._parameters.items():
                if value is not None and value not in whole:
                    whole[value] = nn.Parameter(_whole(value.detach()), value.requires_grad)
                if value is not None:
                    part._parameters[name] = whole[value]
            trace.remove(part)
            _composable_state._module_state_mapping.pop(part, None)
        self._traces = {}
        self._module.cpu()

    def _parts(self) -> list[Any]:
        return [part for part in self._module.modules() if isinstance(part, FSDPModule)]

    def _share_buffers(self) -> None:
        for buffer in self._module.buffers():
            dist.broadcast(buffer, 0)


class _Trace:
    """What splitting adds to a module's attributes: its class, hooks, registries."""

    def __init__(self, part: nn.Module) -> None:
        self._kind = type(part)
        self._before = _keys(part)
        self._added: dict[str, set[Any]] = {}

    def look(self, part: nn.Module) -> None:
        """Note what is new."""
        after = _keys(part)
        self._added = {name: keys - self._before.get(name, set()) for name, keys in after.items()}

    def remove(self, part: nn.Module) -> None:
        part.__class__ = self._kind
        for name, keys in self._added.items():
            owner: dict[Any, Any] = vars(part) if name == "" else vars(part).get(name, {})
            for key in keys:
                owner.pop(key, None)


def _keys(part: nn.Module) -> dict[str, set[Any]]:
    """Return the names of a module's attributes, and of its hooks."""
    hooks = {k: set(v) for k, v in vars(part).items() if k.endswith("_hooks") and v is not None}
    return {"": set(vars(part)), **hooks}


def _units(module: nn.Module) -> list[nn.Module]:
    """Return the submodules to split one by one, inner ones first.

    These own parameters themselves. One that shares a parameter with another is left to the root,
    which then holds it once.
    """
    owners: Counter[int] = Counter()
    for part in module.modules():
        owners.update({id(p) for p in part._parameters.values() if p is not None})
    found = []
    for part in module.modules():
        own = [p for p in part._parameters.values() if p is not None]
        if part is not module and own and all(owners[id(p)] == 1 for p in own):
            found.append(part)
    return found[::-1]


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _split_like(target: Any, value: Any) -> Any:
    """Return a rank's part of a whole tensor, as `target` is split."""
    if not isinstance(target, DTensor) or isinstance(value, DTensor):
        return value
    value = value.to(target.device)
    return distribute_tensor(value, target.device_mesh, target.placements)
