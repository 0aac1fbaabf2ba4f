"""The forms `configure_optimizers` may return, brought into one.

Knows what belongs together, not when anything is stepped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gpulayer.pytorch.arguments import ArgumentError

_FORMS = (
    "an optimizer; a list with one; ([optimizer], [scheduler]); "
    '{"optimizer": ..., "lr_scheduler": ...}; or None'
)


@dataclass(slots=True)
class SchedulerConfig:
    """A learning-rate scheduler and when it is stepped."""

    scheduler: Any
    interval: str = "epoch"  # or "step"
    frequency: int = 1  # every so many epochs, or batches of an epoch
    monitor: str | None = None  # metric for plateau schedulers
    strict: bool = True  # a missing metric is an error, not a warning
    name: str | None = None
    reduce_on_plateau: bool = False


class NoOptimizer(Optimizer):
    """Stands where `configure_optimizers` returned None: runs the closure, updates nothing."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return closure() if closure else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """There is nothing to zero."""


def parse(
    returned: Any, *, custom_stepping: bool, several: bool
) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and their schedulers.

    Args:
        custom_stepping: the module overrides `lr_scheduler_step`, so any scheduler will do.
        several: the module steps its optimizers itself, so there may be more than one.

    Raises:
        ArgumentError: not one of the forms, or a form with a contradiction in it.
    """
    optimizers, schedulers, monitor = _split(returned)
    if len(optimizers) != 1 and not several:
        raise ArgumentError(
            f"configure_optimizers returned {len(optimizers)} optimizers; automatic optimization "
            "steps exactly one",
            hint="put all parameters into one optimizer, with parameter groups, or set "
            "automatic_optimization = False and step them in training_step",
        )
    configs = [_config(scheduler, monitor, custom_stepping) for scheduler in schedulers]
    for config in configs:
        if all(config.scheduler.optimizer is not one for one in optimizers):
            raise ArgumentError(
                f"{type(config.scheduler).__name__} belongs to an optimizer that "
                "configure_optimizers did not return"
            )
    return optimizers, configs


def _split(returned: Any) -> tuple[list[Optimizer], list[Any], str | None]:
    if returned is None:
        warnings.warn(
            "configure_optimizers returned None: this fit updates no weights", stacklevel=4
        )
        return [NoOptimizer()], [], None
    if isinstance(returned, Optimizer):
        return [returned], [], None
    if isinstance(returned, dict):
        optimizer, scheduler = _from_dict(returned)
        return [optimizer], scheduler, returned.get("monitor")
    if isinstance(returned, list | tuple):
        if len(returned) == 2 and isinstance(returned[0], list) and _all_optimizers(returned[0]):
            second = returned[1]
            return returned[0], second if isinstance(second, list) else [second], None
        if returned and all(isinstance(one, dict) for one in returned):
            pairs = [_from_dict(one) for one in returned]
            return [pair[0] for pair in pairs], [s for pair in pairs for s in pair[1]], None
        if _all_optimizers(returned):
            return list(returned), [], None
        if len(returned) == 2 and isinstance(returned[0], Optimizer):
            raise ArgumentError(
                "configure_optimizers returned (optimizer, scheduler)",
                hint="write ([optimizer], [scheduler])",
            )
    raise ArgumentError(
        f"configure_optimizers returned {type(returned).__name__}", hint=f"return {_FORMS}"
    )


def _all_optimizers(values: Any) -> bool:
    return bool(values) and all(isinstance(one, Optimizer) for one in values)


def _from_dict(form: dict[str, Any]) -> tuple[Optimizer, list[Any]]:
    if not isinstance(form.get("optimizer"), Optimizer):
        raise ArgumentError('configure_optimizers: the dict has no "optimizer"', hint=_FORMS)
    unknown = sorted(form.keys() - {"optimizer", "lr_scheduler", "monitor"})
    if unknown:
        warnings.warn(f"configure_optimizers: unknown keys {unknown}", stacklevel=5)
    return form["optimizer"], [form["lr_scheduler"]] if "lr_scheduler" in form else []


def _config(scheduler: Any, outer_monitor: str | None, custom_stepping: bool) -> SchedulerConfig:
    if isinstance(scheduler, dict):
        known = SchedulerConfig.__dataclass_fields__
        unknown = sorted(scheduler.keys() - known.keys())
        if unknown:
            warnings.warn(f"lr_scheduler dict: unknown keys {unknown}", stacklevel=4)
        if "scheduler" not in scheduler:
            raise ArgumentError('the lr_scheduler dict has no "scheduler"')
        config = SchedulerConfig(**{k: v for k, v in scheduler.items() if k in known})
        if "reduce_on_plateau" not in scheduler:
            config.reduce_on_plateau = isinstance(config.scheduler, ReduceLROnPlateau)
        where = 'inside the lr_scheduler dict: {"scheduler": ..., "monitor": "val_loss"}'
    else:
        plateau = isinstance(scheduler, ReduceLROnPlateau)
        config = SchedulerConfig(scheduler, reduce_on_plateau=plateau)
        config.monitor = outer_monitor if plateau else None
        where = 'beside it: {"optimizer": ..., "lr_scheduler": ..., "monitor": "val_loss"}'
    name = type(config.scheduler).__name__
    if config.reduce_on_plateau and config.monitor is None:
        raise ArgumentError(f"{name} needs a metric to monitor", hint=f"name it {where}")
    if config.interval not in ("epoch", "step"):
        raise ArgumentError(f'interval of {name} is "epoch" or "step", not {config.interval!r}')
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ArgumentError(f"frequency of {name} must be an int >= 1, got {config.frequency!r}")
    if not (hasattr(config.scheduler, "state_dict") and hasattr(config.scheduler, "optimizer")):
        raise ArgumentError(f"{name} is no learning-rate scheduler")
    if not isinstance(config.scheduler, LRScheduler) and not custom_stepping:
        raise ArgumentError(
            f"{name} is not one of torch's schedulers", hint="override lr_scheduler_step to step it"
        )
    return config
