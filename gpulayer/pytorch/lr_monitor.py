"""`LearningRateMonitor`: writes learning rates to metrics.csv.

Names, rhythm and values are Lightning's. Does not know what a scheduler does.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.callback import Callback
from gpulayer.pytorch.optimizers import SchedulerConfig

if TYPE_CHECKING:
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.trainer import Trainer


class LearningRateMonitor(Callback):
    """Writes the learning rate of each parameter group to metrics.csv and `callback_metrics`.

    The name is the scheduler's "name" or `lr-SGD` by the optimizer's class, `lr-SGD-1` for the
    second of a class; with several parameter groups `/pg1`, `/pg2` or the group's own "name"
    follows.

    Args:
        logging_interval: "step" writes before the batches of logging steps, "epoch" at the start
            of epochs, None as each scheduler's own interval says; an optimizer without a scheduler
            is then written at both.
        log_momentum: also write `NAME-momentum`: momentum, or the first beta.
        log_weight_decay: also write `NAME-weight_decay`.

    Attributes:
        lrs: the values written so far, by name.
        last_momentum_values, last_weight_decay_values: the last ones written, by name.
    """

    def __init__(
        self,
        logging_interval: str | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ArgumentError(
                f'logging_interval is "step", "epoch" or None, not {logging_interval!r}'
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[Any]] = {}
        self.last_momentum_values: dict[str, Any] = {}
        self.last_weight_decay_values: dict[str, Any] = {}

    # -- hooks -------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if not trainer._logger:
            raise ArgumentError(
                "LearningRateMonitor has nowhere to write to: the Trainer has logger=False"
            )
        if self.log_momentum and trainer.is_global_zero and _lacks_momentum(trainer):
            warnings.warn(
                "log_momentum=True, but an optimizer has neither momentum nor betas: 0 is logged",
                RuntimeWarning,
                stacklevel=2,
            )
        found = names(trainer.lr_scheduler_configs, trainer.optimizers)
        every = [name for _, _, of_groups in found for name in of_groups]
        self.lrs = {name: [] for name in every}
        self.last_momentum_values = {f"{name}-momentum": None for name in every}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in every}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps
        due = every and ((trainer._batches_that_stepped + 1) % every == 0 or trainer.should_stop)
        if due and self.logging_interval != "epoch":
            self._write(trainer, "step")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        if self.logging_interval != "step":
            self._write(trainer, "epoch")

    # -- values ------------------------------------------------------------------------------

    def _write(self, trainer: Trainer, interval: str) -> None:
        row: dict[str, Any] = {}
        for optimizer, config, of_groups in names(trainer.lr_scheduler_configs, trainer.optimizers):
            self._follow_groups(of_groups)
            if self.logging_interval is None and config and config.interval != interval:
                continue
            for group, name in zip(optimizer.param_groups, of_groups, strict=True):
                row.update(self._values(group, name, betas="betas" in optimizer.defaults))
        trainer.callback_metrics.update({key: torch.as_tensor(v) for key, v in row.items()})
        if row and trainer._file is not None:
            trainer._file.write(row, trainer._batches_that_stepped)

    def _values(self, group: dict[str, Any], name: str, *, betas: bool) -> dict[str, Any]:
        if "lr" not in group:  # of the optimizer that stands for none
            return {}
        found = {name: _kept(group["lr"])}
        self.lrs[name].append(found[name])
        if self.log_momentum:
            value = _kept(group["betas"][0] if betas else group.get("momentum", 0))
            found[f"{name}-momentum"] = self.last_momentum_values[f"{name}-momentum"] = value
        if self.log_weight_decay:
            value = _kept(group["weight_decay"])
            found[f"{name}-weight_decay"] = value
            self.last_weight_decay_values[f"{name}-weight_decay"] = value
        return found

    def _follow_groups(self, of_groups: Sequence[str]) -> None:
        """Take over the values of a name to which parameter groups were added while training."""
        for name in of_groups:
            before = name.replace("/pg1", "")
            if "/pg1" in name and before in self.lrs:
                self.lrs[name] = self.lrs.pop(before)
            self.lrs.setdefault(name, [])


def names(
    configs: Sequence[SchedulerConfig], optimizers: Sequence[Optimizer]
) -> list[tuple[Optimizer, SchedulerConfig | None, list[str]]]:
    """Return the name of each parameter group: those with a scheduler first, then the others."""
    seen: Counter[type] = Counter()  # optimizers of a class that were named after it
    found: list[tuple[Optimizer, SchedulerConfig | None, list[str]]] = []
    scheduled: list[tuple[Optimizer, SchedulerConfig | None]] = [
        (config.scheduler.optimizer, config) for config in configs
    ]
    with_scheduler = [optimizer for optimizer, _ in scheduled]
    rest = [(one, None) for one in optimizers if all(one is not o for o in with_scheduler)]
    for optimizer, config in [*scheduled, *rest]:
        kind = type(optimizer)
        if config is not None and config.name is not None:
            name = config.name
        else:
            name = f"lr-{kind.__name__}"
            seen[kind] += 1
        if seen[kind] > 1:
            name += f"-{seen[kind] - 1}"
        found.append((optimizer, config, _of_groups(name, optimizer.param_groups)))
    return found


def _of_groups(name: str, groups: Sequence[dict[str, Any]]) -> list[str]:
    if len(groups) == 1:
        own = groups[0].get("name")
        return [f"{name}/{own}" if own else name]
    own_names = [group.get("name", f"pg{number}") for number, group in enumerate(groups, 1)]
    twice = sorted({one for one in own_names if own_names.count(one) > 1})
    if twice:
        raise ArgumentError(f"{name}: several parameter groups are called {twice[0]!r}")
    return [f"{name}/{own}" for own in own_names]


def _lacks_momentum(trainer: Trainer) -> bool:
    """Return whether "momentum" is no option of some optimizer, and neither is "betas"."""
    optimizers = [config.scheduler.optimizer for config in trainer.lr_scheduler_configs]
    optimizers = optimizers or trainer.optimizers
    return all(
        any(key not in optimizer.defaults for optimizer in optimizers)
        for key in ("momentum", "betas")
    )


def _kept(value: Any) -> Any:
    """Return a value that the optimizer will not change in place."""
    return value.detach().clone() if isinstance(value, Tensor) else value
