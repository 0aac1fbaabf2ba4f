"""`Timer`: ends a training after a given time.

The decision is rank 0's. With one rank it is made after every batch, as in Lightning; with several,
Lightning sends it to all ranks after every batch, and here `cadence` says after which.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gpulayer.pytorch import arguments
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.cadence import Cadence
from gpulayer.pytorch.callback import Callback

if TYPE_CHECKING:
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.trainer import Trainer

_TRAIN = "train"
_STAGES = (_TRAIN, "sanity_check", "validate", "test", "predict")  # keys of the state


class Timer(Callback):
    """Measures how long training, validation and test take, and limits the time of training.

    The time runs from `on_train_start`, validations included. What an earlier fit took, or one that
    a checkpoint comes from, counts. Several ranks look at rank 0's clock about once a
    second and at least every 100 batches, so they may train up to that much longer.

    Args:
        duration: "DD:HH:MM:SS", a timedelta or a dict of its arguments; None only measures.
        interval: "step" ends the training after the batch in hand, "epoch" after the epoch.
        verbose: print when the time is up.
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, Any] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ArgumentError(f'interval of a Timer is "step" or "epoch", not {interval!r}')
        self._duration_s = (
            None if duration is None else arguments.duration("duration", duration).total_seconds()
        )
        self._interval = interval
        self._verbose = verbose
        self._start_s: dict[str, float | None] = dict.fromkeys(_STAGES)
        self._end_s: dict[str, float | None] = dict.fromkeys(_STAGES)
        self._before_s = 0.0  # of training, before its start
        self._cadence: Cadence | None = None
        self._said = False

    # -- what users read ---------------------------------------------------------------------

    def start_time(self, stage: str = _TRAIN) -> float | None:
        """Return when a stage ("train", "validate", "test") last began, in monotonic seconds."""
        return self._start_s[_known(stage)]

    def end_time(self, stage: str = _TRAIN) -> float | None:
        """Return when a stage last ended, in monotonic seconds."""
        return self._end_s[_known(stage)]

    def time_elapsed(self, stage: str = _TRAIN) -> float:
        """Return the seconds that a stage took or has taken so far."""
        start, end = self.start_time(stage), self.end_time(stage)
        before_s = self._before_s if stage == _TRAIN else 0.0
        if start is None:
            return before_s
        return before_s + (time.monotonic() if end is None else end) - start

    def time_remaining(self, stage: str = _TRAIN) -> float | None:
        """Return the seconds left of `duration`; None without one."""
        return None if self._duration_s is None else self._duration_s - self.time_elapsed(stage)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before_s = state_dict.get("time_elapsed", {}).get(_TRAIN, 0.0)
        self._start_s[_TRAIN] = self._end_s[_TRAIN] = None

    # -- hooks -------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._said = False
        if self._duration_s is not None:
            self._cadence = Cadence(trainer.runtime, time.monotonic)
            # The time may be up already, in what a checkpoint or an earlier fit brought.
            self._stop(trainer, self._cadence.now(self._left_s))

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._before_s = self.time_elapsed()
        self._start_s[_TRAIN], self._end_s[_TRAIN] = time.monotonic(), None

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._end_s[_TRAIN] = time.monotonic()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        if self._start_s[_TRAIN] is not None and self._end_s[_TRAIN] is None:
            self._end_s[_TRAIN] = time.monotonic()  # what comes after it is no training

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._interval == "step" and self._cadence is not None:
            self._stop(trainer, self._cadence.after_batch(self._left_s))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._interval == "epoch" and self._cadence is not None:
            self._stop(trainer, self._cadence.now(self._left_s))

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._start_s["validate"] = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._end_s["validate"] = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._start_s["test"] = time.monotonic()

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._end_s["test"] = time.monotonic()

    def _left_s(self) -> float:
        assert self._duration_s is not None
        return self._duration_s - self.time_elapsed()

    def _stop(self, trainer: Trainer, up: bool) -> None:
        if not up:
            return
        trainer.should_stop = True
        if self._verbose and not self._said and trainer.is_global_zero:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            trainer._say(f"time limit reached after {elapsed}: training stops")
        self._said = True


def _known(stage: str) -> str:
    if stage not in _STAGES:
        raise ArgumentError(f"unknown stage {stage!r}", hint=f"one of {', '.join(_STAGES)}")
    return stage
