"""The evaluation loop: validation inside fit and as its sanity check, `validate`, `test`.

Ranks may have unequal numbers of batches, so nothing in here is collective until all loaders are
done: the bare module is called, not its data-parallel wrapper, and metrics are reduced together at
the end. Semantics are Lightning's. Does not know when it is due.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpulayer.pytorch import data, seeding
from gpulayer.pytorch.arguments import ArgumentError, batches
from gpulayer.pytorch.metrics import reduce_named
from gpulayer.pytorch.module import Module, overridden

if TYPE_CHECKING:
    from gpulayer.pytorch.trainer import Trainer

Outputs = list[dict[str, float]]


class Evaluation:
    """Runs `validation_step` or `test_step` over loaders.

    Args:
        stage: "fit", "validate" or "test".
    """

    def __init__(
        self, trainer: Trainer, module: Module, stage: str, source: Callable[[], data.Loaders]
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._stage = stage
        self._source = source
        self._prefix = "test" if stage == "test" else "validation"
        self._limit = "limit_test_batches" if stage == "test" else "limit_val_batches"
        self._loaders: list[data.Loader] | None = None
        self.has_run = False
        self.num_batches: list[float] = []
        self._metrics = trainer._metrics
        self._step = getattr(module, f"{self._prefix}_step")
        self._takes_index = takes(self._step, 2)
        self._hooks = trainer._hooks
        self._transfer = transfer_of(module, trainer.runtime.device)
        # Batches seen per loader over all validations: the x axis of values logged on_step.
        self._seen: defaultdict[int, int] = defaultdict(int)
        self._step_rows: list[tuple[int, dict[str, tuple[str, bool, Tensor | float]]]] = []

    def load(self) -> list[data.Loader]:
        """Return the loaders, built when they are first needed and kept."""
        if self._loaders is None:
            trainer = self._trainer
            runtime = trainer.runtime
            within, trainer._validates = trainer._validates, self._stage == "fit"
            source = self._source()
            trainer._validates = within
            self._loaders = data.for_evaluation(
                source,
                runtime.rank,
                runtime.world_size,
                seed=trainer._seeds[0],
                inject=trainer.use_distributed_sampler,
                init=seeding.worker_init(runtime.rank, trainer._seeds[1]),
            )
            self._several = len(self._loaders) > 1
            if self._several and not takes(self._step, 3):
                raise ArgumentError(
                    f"{len(self._loaders)} {self._prefix} loaders, but {self._prefix}_step takes "
                    "no dataloader_idx"
                )
            limit = getattr(trainer, self._limit)
            self.num_batches = [
                batches(self._limit, data.padded_length(one), limit) for one in self._loaders
            ]
            # A rank without batches takes no part in what ranks do together.
            kind = "test" if self._stage == "test" else "validation"
            runtime.agree(
                f"which {kind} loaders have batches", [count > 0 for count in self.num_batches]
            )
            trainer._loaders[self._stage] = data.as_given(source, self._loaders)
            trainer._num_batches[self._stage] = self.num_batches
        return self._loaders

    def state(self) -> dict[str, Any]:
        """Return what later validations depend on."""
        loaders = self._loaders or []
        return {
            "seen": dict(self._seen),
            "generators": [data.generator_states(one) for one in loaders],
            "workers": [data.has_workers(one) for one in loaders],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._seen.update(state["seen"])
        if not (any(state["generators"]) or any(state["workers"])):
            return
        for loader, *held in zip(self.load(), state["generators"], state["workers"], strict=False):
            data.make_equal(loader, *held)

    def run(self, limit: float = float("inf")) -> Outputs:
        """Evaluate every loader, at most `limit` batches of each.

        Returns the epoch values of each loader; those logged outside of a loader are in each.
        """
        loaders = self.load()
        if sum(self.num_batches) == 0:
            self._trainer._validates = False
            return []
        trainer, metrics = self._trainer, self._metrics
        sanity = trainer.sanity_checking
        if self._stage == "fit":
            trainer._validates = True
            for loader in loaders:
                data.set_epoch(loader, trainer._epochs_processed)
        within_batch = metrics.on_step
        metrics.evaluate(True)
        flags = [(part, part.training) for part in self._module.modules()]
        outputs: list[dict[str, Tensor | float]] = []
        common: dict[str, Tensor | float] = {}
        with without_gradients(trainer, self._stage), self._local_forward():
            items = data.in_turn(loaders, [min(count, limit) for count in self.num_batches])
            self._call_own("model_eval")
            self._call("start")
            self._call("epoch_start")
            for index, batch_idx, batch in items:
                self._batch(batch, batch_idx, index)
                if not sanity:
                    self._keep_step_values(index)
            self.has_run = not sanity
            metrics.epoch_end()
            metrics.reduce()
            if not sanity:
                outputs = self._loader_values(len(loaders))
            metrics.dataloader_idx = None
            self._call("epoch_end")
            metrics.reduce()
            metrics.commit()
            if not sanity:
                common = metrics.row()
                self._write_step_values()
                row = {name: value for one in reversed(outputs) for name, value in one.items()}
                trainer._log_row(row | common)
            self._call("end")
            metrics.reset()
            metrics.hook = ""
            metrics.evaluate(False)
            metrics.on_step = within_batch
            if overridden(self._module, f"on_{self._prefix}_model_train"):
                self._call_own("model_train")
            else:
                for part, training in flags:
                    part.training = training
        trainer._validates = False
        return [{name: float(v) for name, v in (one | common).items()} for one in outputs]

    def _local_forward(self) -> AbstractContextManager[Any]:
        """Return a block in which forward passes need no other rank."""
        strategy = self._trainer._strategy
        return strategy.evaluating() if strategy and self._stage == "fit" else nullcontext()

    def _batch(self, batch: Any, batch_idx: int, index: int) -> None:
        metrics = self._metrics
        batch = self._transfer(batch, index)
        args = (batch, batch_idx, index) if self._several else (batch, batch_idx)
        metrics.batch_start(batch, index if self._several else None)
        self._call("batch_start", *args)
        metrics.hook = f"{self._prefix}_step"
        with self._trainer.runtime.autocast():
            output = self._step(*args) if self._takes_index else self._step(batch)
        self._call("batch_end", output, *args)

    def _call(self, what: str, *args: Any) -> None:
        name = f"on_{self._prefix}_{what}"
        hook = self._hooks[name]
        if hook is not None:
            self._metrics.hook = name
            hook(*args)

    def _call_own(self, what: str) -> None:
        """Call a hook that has a default in the module and none in callbacks."""
        self._metrics.hook = ""
        getattr(self._module, f"on_{self._prefix}_{what}")()

    # -- rows of metrics.csv -----------------------------------------------------------------

    def _loader_values(self, count: int) -> list[dict[str, Tensor | float]]:
        """Publish each loader's epoch values and return them."""
        found: list[dict[str, Tensor | float]] = [{} for _ in range(count)]
        for loader_index in self._metrics.loaders():
            self._metrics.dataloader_idx = loader_index
            self._metrics.commit()
            found[loader_index or 0].update(self._metrics.row())
        return found

    def _keep_step_values(self, index: int) -> None:
        """Keep what was logged on_step; written at the end, when ranks meet anyway."""
        entries = self._metrics.step_entries()
        if entries:
            values = {
                e.step_name: (e.fx, e.sync, e.last)
                for e in entries
                if e.logger and e.last is not None
            }
            self._step_rows.append((self._seen[index], values))
        self._seen[index] += 1

    def _write_step_values(self) -> None:
        rows, self._step_rows = self._step_rows, []
        plain: dict[int, dict[str, Tensor | float]] = {}
        shared: dict[str, tuple[str, Tensor | float | None, float]] = {}
        for number, (step, values) in enumerate(rows):
            plain[number] = {"step": float(step)}
            for name, (fx, sync, value) in values.items():
                plain[number][name] = value
                if sync:
                    shared[json.dumps([number, step, name])] = (fx, value, 1.0)
        runtime = self._trainer.runtime
        if runtime.world_size > 1:
            for key, reduced in reduce_named(shared, runtime).items():
                number, step, name = json.loads(key)
                plain.setdefault(number, {"step": float(step)})[name] = reduced
        for number in sorted(plain):
            row = dict(plain[number])
            self._trainer._log_row(row, step=int(row.pop("step")))


def without_gradients(trainer: Trainer, stage: str) -> AbstractContextManager[Any]:
    """Return what a loop runs in that trains nothing.

    Tensors made in inference mode may not take part in training later, so not inside fit; and gloo
    cannot reduce them.
    """
    runtime = trainer.runtime
    gloo = runtime.world_size > 1 and runtime.device.type != "cuda"
    if stage == "fit" or gloo or not trainer.inference_mode:
        return torch.no_grad()
    return torch.inference_mode()


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with `count` positional arguments."""
    wrapped = getattr(function, "__wrapped__", None)
    if inspect.ismethod(wrapped):  # a method that FSDP2 replaced
        function = wrapped
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def transfer_of(module: Module, device: torch.device) -> Callable[[Any, int], Any]:
    """Return how a batch gets to the device: directly unless the module has a say in it."""
    if not transfers_itself(module):
        moved = data.mover(device)
        return lambda batch, index: data.apply(batch, moved)

    def transfer(batch: Any, index: int) -> Any:
        batch = module.on_before_batch_transfer(batch, index)
        batch = module.transfer_batch_to_device(batch, device, index)
        return module.on_after_batch_transfer(batch, index)

    return transfer


def transfers_itself(module: Module) -> bool:
    """Return whether the module overrides a hook of the transfer."""
    names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    return any(overridden(module, name) for name in names)
