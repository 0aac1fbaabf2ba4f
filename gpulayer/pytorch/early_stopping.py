"""`EarlyStopping`: ends a training whose monitored value no longer gets better.

Semantics are Lightning's. Does not know where the value was logged.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.callback import MetricCallback
from gpulayer.pytorch.module import overridden

if TYPE_CHECKING:
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.trainer import Trainer

_BETTER: dict[str, Callable[[Any, Any], Any]] = {"min": torch.lt, "max": torch.gt}
_SIGN = {"min": "<", "max": ">"}
_WORSE_SIGN = {"min": ">", "max": "<"}


class EarlyStoppingReason(Enum):
    """Why a training was stopped."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(MetricCallback):
    """Stops training when a logged value stops improving; on several ranks when any rank's does.

    Args:
        monitor: the value's name in `callback_metrics`.
        min_delta: a smaller or equal change is no improvement.
        patience: checks without improvement before the stop. A check is made once per epoch or, if
            validation has another rhythm, once per validation.
        verbose: print improvements and the stop.
        mode: "min" or "max", what is better.
        strict: a missing value is an error; otherwise such a check is left out.
        check_finite: stop when the value is NaN or infinite.
        stopping_threshold: stop as soon as the value is better than this.
        divergence_threshold: stop as soon as the value is worse than this.
        check_on_train_epoch_end: check at the end of training epochs (True) or of validations
            (False); None chooses: epochs if each ends with its only validation.
        log_rank_zero_only: with `verbose`, print on rank 0 only.

    Attributes:
        wait_count: checks since the last improvement.
        best_score: the best value so far.
        stopped_epoch: the epoch of the stop; 0 without one.
        stopping_reason: an `EarlyStoppingReason`, of this rank's value.
        stopping_reason_message: the same in words.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        if mode not in _BETTER:
            raise ArgumentError(f'mode is "min" or "max", not {mode!r}')
        self.monitor = monitor
        self.min_delta = min_delta if mode == "max" else -min_delta  # signed, as in Lightning
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._asked_at_epoch_end = check_on_train_epoch_end
        self._at_epoch_end = bool(check_on_train_epoch_end)
        self._validated = False  # in this fit, the sanity check aside

    # -- state -------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        names = {"monitor": self.monitor, "mode": self.mode}
        return f"{type(self).__qualname__}{names!r}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = state_dict["best_score"]
        self.patience = state_dict["patience"]
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")

    # -- hooks -------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._validated = False
        if self._asked_at_epoch_end is None:
            self._at_epoch_end = (
                trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._at_epoch_end:
            self._check(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.stage != "fit" or trainer.sanity_checking:
            return
        self._validated = True
        if not self._at_epoch_end:
            self._check(trainer, pl_module)

    # -- the decision ------------------------------------------------------------------------

    def _check(self, trainer: Trainer, module: Module) -> None:
        if trainer.fast_dev_run:
            return
        value = self._value(trainer, module)
        stop, said = (False, None) if value is None else self._judge(value)
        # A rank without the value asks too: the others wait for its answer.
        if trainer.runtime.any(stop):
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = said if stop else "another rank's value stopped training"
        if said and self.verbose:
            self._say(trainer, said)

    def _value(self, trainer: Trainer, module: Module) -> Tensor | None:
        known = trainer.callback_metrics
        if self.monitor in known:
            return known[self.monitor].detach().squeeze().cpu()  # waits for the device
        text = f"EarlyStopping monitors {self.monitor!r}, which has not been logged"
        if not self._validated:
            text += f": no validation has run, {why_no_validation(trainer, module)}"
        text += f"; known: {', '.join(sorted(known)) or 'nothing'}"
        if self.strict:
            raise RuntimeError(text)
        if self.verbose and trainer.is_global_zero:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None

    def _judge(self, value: Tensor) -> tuple[bool, str | None]:
        """Return whether to stop and what there is to say; keeps the best value and the count."""
        better, name, limit = _BETTER[self.mode], self.monitor, self.stopping_threshold
        worst = self.divergence_threshold
        if self.check_finite and not torch.isfinite(value):
            self.stopping_reason = EarlyStoppingReason.NON_FINITE_METRIC
            return True, f"{name} = {value:g} is not finite; the best was {self.best_score:.4g}"
        if limit is not None and better(value, limit):
            self.stopping_reason = EarlyStoppingReason.STOPPING_THRESHOLD
            return True, f"{name} = {value:.4g} {_SIGN[self.mode]} stopping_threshold {limit}"
        if worst is not None and better(-value, -worst):
            self.stopping_reason = EarlyStoppingReason.DIVERGENCE_THRESHOLD
            sign = _WORSE_SIGN[self.mode]
            return True, f"{name} = {value:.4g} {sign} divergence_threshold {worst}"
        if better(value - self.min_delta, self.best_score):
            before, self.best_score = self.best_score, value.clone()
            self.wait_count = 0
            by = f" by {abs(before - value):.4g}" if torch.isfinite(before) else ""
            return False, f"{name} improved{by} to {value:.4g}"
        self.wait_count += 1
        if self.wait_count < self.patience:
            return False, None
        self.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED
        return True, (
            f"{name} did not improve in the last {self.wait_count} checks; the best was "
            f"{self.best_score:.4g}"
        )

    def _say(self, trainer: Trainer, text: str) -> None:
        if trainer.world_size == 1:
            trainer._say(text)
        elif trainer.is_global_zero or not self.log_rank_zero_only:
            trainer._say(f"rank {trainer.global_rank}: {text}")


def why_no_validation(trainer: Trainer, module: Module) -> str:
    """Say which option is the cause of no validation so far, at the end of an epoch."""
    every, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    if not overridden(module, "validation_step"):
        return f"{type(module).__name__} defines no validation_step"
    if trainer.limit_val_batches == 0:
        return f"limit_val_batches={trainer.limit_val_batches} switches it off"
    if trainer._loop is not None and trainer._loop.evaluation is None:
        return "the fit has no validation loader"
    if every is not None and (trainer.current_epoch + 1) % every != 0:
        return f"check_val_every_n_epoch={every} puts the first one after {every} epochs"
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return f"max_steps={trainer.max_steps} ended the training before the first one"
    if isinstance(interval, timedelta):
        return f"val_check_interval={interval} has not passed yet"
    if every is None:
        return f"val_check_interval={interval} counts batches across epochs"
    return "the rest of the epoch was skipped"
