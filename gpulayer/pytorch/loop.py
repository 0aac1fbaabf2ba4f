"""The training loop: epochs, batches, optimizer steps, and when validation is due.

What the module overrides is resolved once, at the start; a step without overrides and logging is
forward, zero_grad, backward, step and a handful of attribute reads. Per step nothing waits for the
device, nothing is written to disk and no rank talks to another beyond what DDP does.
Order of calls, counters and stops are Lightning's. Knows one module on one
rank; where that is, `Trainer` decided before.
"""

from __future__ import annotations

import re
import signal
import sys
import time
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpulayer.pytorch import data, fetching, seeding, shortcuts
from gpulayer.pytorch.arguments import ArgumentError, batches
from gpulayer.pytorch.cadence import Cadence
from gpulayer.pytorch.evaluation import Evaluation, takes, transfer_of, transfers_itself
from gpulayer.pytorch.lockstep import Lockstep
from gpulayer.pytorch.manual import ManualOptimization
from gpulayer.pytorch.module import Module
from gpulayer.pytorch.pace import Pace, gradient_bytes
from gpulayer.pytorch.precision import ScaledOptimizer
from gpulayer.pytorch.prefetch import Prefetching
from gpulayer.pytorch.resume import Place, Position, Resume, begin
from gpulayer.pytorch.stopping import end_for

if TYPE_CHECKING:
    from gpulayer.pytorch.optimizers import SchedulerConfig
    from gpulayer.pytorch.strategy import Strategy
    from gpulayer.pytorch.trainer import Trainer

_INF = float("inf")


class FitLoop:
    """One fit of one module."""

    def __init__(
        self,
        trainer: Trainer,
        module: Module,
        loader: data.Loader,
        num_batches: float,
        evaluation: Evaluation | None,
        strategy: Strategy,
        resume: Resume | None = None,
    ) -> None:
        self.trainer = trainer
        self.module = module
        self.loader = loader
        self.num_batches = num_batches
        self.evaluation = evaluation
        self.val_check_batch = self._val_check_batch()
        self.optimizer: Any = trainer.optimizers[0]
        self._metrics = trainer._metrics
        self._runtime = trainer.runtime
        self._hooks = trainer._hooks
        self._transfer = transfer_of(module, self._runtime.device)
        self._prefetching = (
            Prefetching(loader, self._runtime.device, copies=not transfers_itself(module))
            if trainer.prefetch
            else None
        )
        self.strategy = strategy
        self._wrapped = strategy.wrapped
        self._forward = strategy.forward
        self._takes_index = takes(module.training_step, 2)
        self._autocast = self._runtime.autocast if self._runtime.precision.mixed else None
        self._scaler = self._runtime.scaler
        self._manual: ManualOptimization | None = None
        if not module.automatic_optimization:
            self._manual = module._manual = ManualOptimization(trainer, module, strategy.wrapped)
            self._forward = self._manual.forward
        elif self._scaler is not None:
            self.optimizer = ScaledOptimizer(self.optimizer, self._scaler, self._before_step)
        self._window = trainer.accumulate_grad_batches
        # Read one batch ahead only where Lightning does, or loading that draws random numbers draws
        # others: where nobody knows how many batches there are. One case is ours: several batches
        # to a step and a limit. A loader that ends before the limit is found to end in time for
        # its last batch to step, else the gradients of a half-filled window would be lost.
        self.reads_ahead = num_batches == _INF or (self._window > 1 and data.length(loader) == _INF)
        self.ahead: dict[str, Any] | None = None  # what loading the batch ahead began with
        # Somebody sees the divided loss and its graph; else its gradient is divided, which is less.
        self._shows_loss = self._scaler is not None or any(
            self._hooks[name] is not None for name in ("on_before_backward", "backward")
        )
        self._log_every = 1 if trainer.fast_dev_run else trainer.log_every_n_steps
        self._reports_loss = (
            trainer._progress is not None or self._hooks["on_train_batch_end"] is not None
        )
        self._step_schedulers = self._schedulers("step", plateau=False)
        self._step_plateaus = self._schedulers("step", plateau=True)
        self._alone = self._runtime.world_size == 1
        # Ranks that read a loader whole would train copies of each other.
        self._compare_ranks = not self._alone and not data.shared_out(loader)
        # validation by time
        self._validated_s = 0.0
        self._val_cadence = (
            Cadence(self._runtime, time.monotonic)
            if isinstance(trainer.val_check_interval, timedelta)
            else None
        )
        # stopping by a signal, and what ranks tell each other
        self._lockstep: Lockstep | None = None
        self._pace = self._first_steps()
        self._began_s = 0.0  # the batch in hand
        # Batches whose training has begun, in all epochs: not one that on_train_batch_start left
        # out, for that hook may take longer on one rank.
        self._begun = trainer._total_batches
        self._running = False
        self._signal: int | None = None  # that this process was sent
        self._stop_after = (
            _INF  # the batch, counted in all epochs, after which to think of stopping
        )
        self.interrupted = False
        self._weights_odd = False
        # where a checkpoint would be written now, and what the epoch's iterator was made from
        self._resume = resume
        self._place = Place.BETWEEN
        self._complete = False
        self._first_step = trainer.global_step
        self.began: dict[str, Any] | None = None
        self.before_validation: dict[str, Any] = {}  # what one that is run again begins with
        # the batch in hand
        self._batch_idx = -1
        self.is_last = False
        self._stepping = True
        self._args: tuple[Any, ...] = ()
        self._outputs: dict[str, Any] = {}
        self._loss: Tensor | None = None
        self._ran = False

    # -- epochs ------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until an end is reached.

        Raises:
            KeyboardInterrupt, SystemExit: a signal ended it; what was trained is saved.
        """
        again = self._resume is not None and self._resume.again
        if not again and self._done():
            return
        self._lockstep = self._open_lockstep()
        self._running = True
        try:
            self._run()
            if self.interrupted or self._signal is not None:
                raise self._end_of_signal()
        finally:
            self._running = False
            if self._lockstep is not None:
                self._lockstep.close()

    def _run(self) -> None:
        if self.evaluation is not None and self._validating_epoch():
            self.evaluation.load()  # a fault in it should show before an epoch has passed
        self._validated_s = time.monotonic()
        if self._resume is None:
            self._call("on_train_start")
        else:
            self._go_on(self._resume)
        while not self.interrupted and not self._done():
            self._epoch()
        if not self.interrupted:
            self._call("on_train_end")

    def _done(self) -> bool:
        trainer = self.trainer
        if self.num_batches == 0 or self._steps_done():
            return True
        if self._epochs_done():
            trainer._epochs_completed = trainer._epochs_processed
            return True
        return trainer.should_stop and self._may_stop()

    def _ends(self) -> bool:
        """Return whether the epoch that ends now is the last."""
        stops = self.trainer.should_stop and self._may_stop()
        return self.interrupted or self._steps_done() or self._epochs_done() or stops

    def _epochs_done(self) -> bool:
        trainer = self.trainer
        return trainer._max_epochs != -1 and trainer._epochs_processed >= trainer._max_epochs

    def _steps_done(self) -> bool:
        return self.trainer.max_steps != -1 and self.trainer.global_step >= self.trainer.max_steps

    def _may_stop(self) -> bool:
        trainer = self.trainer
        epochs, steps = trainer._min_epochs, trainer.min_steps
        return (not epochs or trainer._epochs_processed >= epochs) and (
            not steps or trainer.global_step >= steps
        )

    def _epoch(self) -> None:
        trainer = self.trainer
        data.set_epoch(self.loader, trainer._epochs_processed)
        trainer._progress_epoch_start()
        self._call("on_train_epoch_start")
        self._batch_idx = -1
        self.is_last = self._complete = False
        self.began = begin(self)
        self._end_epoch(self._read(self._stream(fetching.iterate(self.loader))))

    def _end_epoch(self, complete: bool) -> None:
        if self.interrupted:  # between two batches, with which a fit can go on
            self._place = Place.NEXT
            self.trainer._save_final()
            return
        if self._batch_idx < 0:
            rank = "" if self._alone else f" of rank {self._runtime.rank}"
            epoch = self.trainer.current_epoch
            raise RuntimeError(
                f"the training loader{rank} yielded no batch in epoch {epoch}: "
                "each epoch iterates over the loader anew, and an iterator or generator gives its "
                "batches once only; pass a DataLoader, or an object whose __iter__ begins anew"
            )
        self._meet()
        self._complete = complete
        self._metrics.epoch_end()
        self.trainer._epochs_processed += 1
        self._metrics.reduce()
        self._metrics.commit()
        self._place = Place.EPOCH_END
        self._call("on_train_epoch_end")
        ends = self._ends()
        self._runtime.agree(f"whether training ends with epoch {self.trainer.current_epoch}", ends)
        if ends:
            self.trainer._save_final()
        self._after_epoch()

    def _after_epoch(self) -> None:
        """Do what follows the hooks at an epoch's end."""
        trainer = self.trainer
        self._metrics.reduce()
        self._metrics.commit()
        if self._complete:
            self._step_by_epoch(plateau=True)
        trainer._log_row(self._metrics.row(), step=None, shift=-1)
        self._metrics.reset()
        trainer._epochs_completed += 1
        self._place = Place.BETWEEN
        trainer._epoch_end(self._batch_idx + 1)

    def _go_on(self, resume: Resume) -> None:
        """Begin where a checkpoint was written: to the end of that epoch."""
        trainer = self.trainer
        completed, trainer._epochs_completed = trainer._epochs_completed, trainer._epochs_processed
        self._call("on_train_start")
        trainer._epochs_completed = completed
        resume.adapt(self)
        at = resume.position
        self._batch_idx, self.is_last = at.done - 1, at.is_last
        self._stepping, self._complete, self._place = at.stepping, at.complete, at.place
        stream = self._stream(iter(()))
        if resume.within_epoch:
            data.set_epoch(self.loader, trainer._epochs_processed)
            trainer._progress_epoch_start(at.done)
            if resume.reads:
                stream = self._stream(resume.iterator(self), at.done)
        resume.restore(self)
        if at.place is Place.EPOCH_END:
            self.began = resume.began
            if resume.again and self._ends():
                trainer._save_final()
            self._after_epoch()
        elif resume.within_epoch:
            if at.place not in (Place.BATCH, Place.NEXT):
                self._after_batch(at.place)
            self._end_epoch(self._read(stream))

    def has_stepped(self) -> bool:
        """Return whether this fit has made a step; on several ranks, reduced gradients."""
        return self.trainer.global_step > self._first_step

    def position(self) -> Position:
        """Return where a checkpoint is written now."""
        place, done = self._place, self._batch_idx + 1
        if place in (Place.BATCH, Place.NEXT):  # the one in hand is trained anew
            done -= place is Place.BATCH
            return Position(place, done, False, self._stepping, False, self.num_batches)
        if place is Place.VALIDATION and self._metrics.hook == "on_validation_end":
            place = Place.VALIDATED
        return Position(place, done, self.is_last, self._stepping, self._complete, self.num_batches)

    def _read(self, stream: Generator[tuple[Any, bool], None, None]) -> bool:
        """Run `_batches`; however it ends, nothing is loaded ahead afterwards."""
        with closing(stream):
            return self._batches(stream)

    def _batches(self, stream: Iterator[tuple[Any, bool]]) -> bool:
        """Run the batches of an epoch; returns whether the epoch came to its last one."""
        trainer, metrics = self.trainer, self._metrics
        on_start, on_end = self._hooks["on_train_batch_start"], self._hooks["on_train_batch_end"]
        lockstep = self._lockstep
        while not self.is_last and not self._steps_done():
            if trainer.should_stop and self._may_stop():
                return False
            if lockstep is not None:
                self._began_s = perf_counter()
                if self._pace is not None:
                    self._look_at_pace(self._pace)
            item = next(stream, None)
            if item is None:
                return self._ended_early()
            batch, self.is_last = item
            if self._compare_ranks:
                self._warn_of_copies(batch)
            batch = self._transfer(batch, 0)
            self._batch_idx = batch_idx = self._batch_idx + 1
            trainer._total_batches += 1
            self._place = Place.BATCH
            metrics.batch_start(batch)
            self._outputs = {}
            if batch is None:
                warnings.warn("the training loader yielded None; no step is made", stacklevel=2)
                self._begun += 1
                self._stepping = self._window_full()
            else:
                if on_start is not None:
                    metrics.hook = "on_train_batch_start"
                    if on_start(batch, batch_idx) == -1:
                        self.is_last = True
                        self._step_by_batch()
                        self._step_by_epoch(plateau=False)
                        return True
                self._begun += 1
                self._stepping = self._window_full()
                self._train(batch, batch_idx)
            if self._stepping and self._step_schedulers:
                self._step_by_batch()
            if self.is_last:
                self._step_by_epoch(plateau=False)
            self._place = Place.BATCH_END
            if on_end is not None:
                metrics.hook = "on_train_batch_end"
                on_end(self._outputs, batch, batch_idx)
            self._after_batch(Place.BATCH_END)
            if self._begun >= self._stop_after and self._stops_here():
                self.interrupted = True
                return False
        return self.is_last

    def _after_batch(self, done: Place) -> None:
        """Do what follows a batch: its row, validation, schedulers.

        Args:
            done: what of it a checkpoint has behind it.
        """
        trainer = self.trainer
        if done is Place.BATCH_END and self.row_due():
            trainer._log_row(self._metrics.row())
        if (
            done is not Place.VALIDATED
            and self.evaluation is not None
            and (done is Place.VALIDATION or self._validation_due())
        ):
            self._validate()
        if self._stepping:
            # In an epoch that ended early unseen they stepped before its validation.
            if self._step_plateaus and (self.reads_ahead or not self._short()):
                self._step_scheduler_list(self._step_plateaus, self._batch_idx + 1)
            trainer._batches_that_stepped += 1
        trainer._progress_step(self._batch_idx + 1, self.num_batches, self._loss)

    def row_due(self) -> bool:
        """Return whether the step of the batch in hand is one whose values are written."""
        trainer, every = self.trainer, self._log_every
        return (
            self._stepping
            and every > 0
            and ((trainer._batches_that_stepped + 1) % every == 0 or trainer.should_stop)
        )

    def _stream(
        self, iterator: Iterator[Any], done: int = 0
    ) -> Generator[tuple[Any, bool], None, None]:
        """Yield (batch, whether it is the last of the epoch), `done` batches into it."""
        limit = self.num_batches
        most = min(limit - done, self._batches_to_max_steps())
        prefetching = self._prefetching
        with (
            closing(prefetching.over(iterator, most))
            if prefetching
            else nullcontext(iterator) as batches
        ):
            if self.reads_ahead:
                source = data.look_ahead(batches, self._before_ahead)
            else:
                source = ((batch, False) for batch in batches)
            for number, (batch, last) in enumerate(source, done + 1):
                yield batch, last or number == limit
                if number == limit:
                    return

    def _before_ahead(self) -> None:
        save = getattr(self.loader, "state_dict", None)
        self.ahead = {
            "random": seeding.states(self._runtime.device),
            "loader": save() if callable(save) else None,
        }

    def _batches_to_max_steps(self) -> float:
        """Return how many more batches there may be; a loader that yields None has more."""
        trainer = self.trainer
        if trainer.max_steps == -1 or not self.module.automatic_optimization:
            return _INF
        return (trainer.max_steps - trainer.global_step) * self._window

    def _warn_of_copies(self, batch: Any) -> None:
        """Compare the first batch of all ranks, once."""
        self._compare_ranks = False
        prints = self._runtime.gather_text(data.fingerprint(batch))
        copies = [str(rank) for rank, one in enumerate(prints) if prints.count(one) > 1]
        if copies and self._runtime.is_global_zero:
            warnings.warn(
                f"ranks {', '.join(copies)} train on the same batch as another: a loader that is "
                "not a DataLoader over a map-style data set must yield each rank's own share",
                stacklevel=3,
            )

    def _ended_early(self) -> bool:
        """Treat a loader that yields less than its length, or a limit, as at its epoch's end."""
        if self._batch_idx < 0:
            return False
        if data.length(self.loader) != _INF:
            text = (
                f"the training loader announced {self.num_batches:.0f} batches and yielded "
                f"{self._batch_idx + 1}"
            )
            if not self._stepping:
                raise RuntimeError(f"{text}: gradients of its last batches were not applied")
            warnings.warn(text, stacklevel=3)
        self.is_last = True
        self._step_by_epoch(plateau=False)
        if self.evaluation is not None and self._validation_due():
            self.trainer._batches_that_stepped -= self._stepping  # rows have the last batch's step
            self._validate()
            self.trainer._batches_that_stepped += self._stepping
        return True

    # -- all ranks together ------------------------------------------------------------------

    def _open_lockstep(self) -> Lockstep | None:
        runtime = self._runtime
        store = runtime.store("gpulayer.fit")
        if store is None:
            return None
        return Lockstep(
            store,
            runtime.rank,
            runtime.world_size,
            runtime.node,
            batches=lambda: self._begun,
            collectives=lambda: runtime._collectives,
            plan_stop=self._plan_stop,
            say=lambda text: print(f"gpulayer: {text}", file=sys.stderr, flush=True),
            deadline_s=store.timeout.total_seconds(),
        )

    def _first_steps(self) -> Pace | None:
        """Return what measures several machines on the first of their ranks, None elsewhere."""
        if self._wrapped is None or self._runtime.rank or self._runtime._nodes < 2:
            return None
        return Pace(self._runtime._nodes, self._window, gradient_bytes(self.module))

    def _look_at_pace(self, pace: Pace) -> None:
        wrapped: Any = self._wrapped
        said = pace.batch(self._began_s, wrapped._get_ddp_logging_data())
        if pace.over:
            self._pace = None
        if said is not None:
            self.trainer._say(f"gpulayer: {said}")

    def _meet(self) -> None:
        """Wait at an epoch's end for all ranks, who must have trained the same batches.

        From here on `interrupted` is the same on all.
        """
        if self._lockstep is None:
            self.interrupted = self.interrupted or self._signal is not None
            return
        stops, odd = self._lockstep.meet(self.strategy.fingerprint())
        self.interrupted = self.interrupted or stops
        if odd and not self._weights_odd and self._runtime.is_global_zero:
            self._weights_odd = True
            warnings.warn(
                f"weights of rank {', '.join(map(str, odd))} differ from those of the other ranks "
                f"after epoch {self.trainer.current_epoch}: every rank must change them equally",
                stacklevel=3,
            )

    def ask_to_stop(self, number: int) -> bool:
        """Take a signal; returns whether training goes on until it can end well.

        Runs between any two instructions.
        """
        if not self._running:
            return False
        self._signal = number
        if self._lockstep is not None:
            self._lockstep.ask_to_stop(number)
        elif self._runtime.world_size == 1:
            if self._place is Place.VALIDATION:  # it may be long, and changes nothing that is saved
                self.interrupted = True
                self.trainer._save_final()
                return False
            self._stop_after = 0
        return True

    def _plan_stop(self, batch: int) -> None:
        self._stop_after = batch

    def _stops_here(self) -> bool:
        """Return whether training ends between this batch and the next of the epoch."""
        if self.is_last or self._steps_done():
            return False  # an end comes anyway, where ranks meet
        if self._lockstep is None:
            return True
        planned, self._stop_after = self._stop_after, _INF
        if self._begun > planned:
            self._lockstep.missed()
            return False
        return self._lockstep.stops_here(self._begun)

    def slowest_rank(self) -> str | None:
        """Name the rank that the others wait for, if one stands out."""
        return None if self._lockstep is None else self._lockstep.slowest()

    def _end_of_signal(self) -> BaseException:
        number = self._signal if self._lockstep is None else self._lockstep.signal()
        return end_for(signal.SIGINT if number is None else number)

    # -- one batch ---------------------------------------------------------------------------

    def _window_full(self) -> bool:
        """Return whether the optimizer steps after this batch; the last of an epoch always does."""
        return self.is_last or (self._batch_idx + 1) % self._window == 0

    def _train(self, batch: Any, batch_idx: int) -> None:
        trainer = self.trainer
        self._args = (batch, batch_idx) if self._takes_index else (batch,)
        if self._manual is not None:
            self._train_manually()
            return
        if not self._stepping:
            if self._alone and torch.is_grad_enabled():
                self._closure()
                return
            with self._unsynchronised(), torch.enable_grad():
                self._closure()
            return
        step = self._hooks["optimizer_step"]
        if step is None:
            self.optimizer.step(self._stepping_closure)
        else:
            self._ran = False
            self._metrics.hook = "optimizer_step"
            step(trainer.current_epoch, batch_idx, self.optimizer, self._stepping_closure)
            if not self._ran:
                raise ArgumentError(
                    "optimizer_step did not call its closure, which runs training_step and backward"
                )
        trainer._global_step += 1

    def _train_manually(self) -> None:
        """Run `training_step`, which optimizes by itself."""
        self._metrics.hook = "training_step"
        with self._runtime.autocast():
            output = self._forward(*self._args)
        if isinstance(output, Tensor):
            output = {"loss": output}
        if output is not None and not isinstance(output, Mapping):
            raise ArgumentError(
                f"training_step returned {type(output).__name__}; in manual optimization a tensor, "
                "a dict or None is expected"
            )
        self._outputs = {} if output is None else _detached(output)
        self._loss = self._outputs.get("loss")

    def _unsynchronised(self) -> AbstractContextManager[Any]:
        return self.strategy.unsynchronised()

    def _stepping_closure(self) -> Tensor | None:
        loss = self._closure()
        if self._scaler is None:
            self._before_step()
        return loss

    def _closure(self) -> Tensor | None:
        """Run forward, zero_grad and backward; gradients stay readable until the next window."""
        metrics, hooks = self._metrics, self._hooks
        self._ran = True
        metrics.hook = "training_step"
        try:
            if self._autocast is None:
                output = self._forward(*self._args)
            else:
                with self._autocast():
                    output = self._forward(*self._args)
        except RuntimeError as error:
            if self._wrapped is None or "Expected to have finished reduction" not in str(error):
                raise
            raise self._unused_parameters(str(error)) from error
        if self._lockstep is not None:  # in backward it may wait for others
            self._lockstep.own_s += perf_counter() - self._began_s
            self._lockstep.reached = self._begun
        loss = self._loss_of(output)
        if self._batch_idx % self._window == 0:
            self._zero_grad()
        if loss is None:
            return None
        window = self._window
        if window != 1 and self._shows_loss:
            loss, window = loss / window, 1
        detached = None
        if window == 1 or self._stepping or self._reports_loss:
            detached = loss.detach() if window == 1 else loss.detach() / window
            self._outputs["loss"] = detached
        self._loss = detached
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        if hooks["on_before_backward"] is not None:
            metrics.hook = "on_before_backward"
            hooks["on_before_backward"](loss)
        if hooks["backward"] is not None:
            metrics.hook = "backward"
            hooks["backward"](loss)
        else:
            shortcuts.backward(loss, window)
        if hooks["on_after_backward"] is not None:
            metrics.hook = "on_after_backward"
            hooks["on_after_backward"]()
        return detached

    def _loss_of(self, output: Any) -> Tensor | None:
        """Return the loss, not divided by the window yet; keeps what else was returned."""
        if isinstance(output, Tensor):  # before Mapping, which is slow to ask
            self._outputs = {}
            return output
        extra: dict[str, Any] = {}
        if isinstance(output, Mapping):
            if output.get("loss") is None:
                raise ArgumentError('training_step returned a dict without "loss"')
            extra = {k: _detached(v) for k, v in output.items() if k != "loss"}
            output = output["loss"]
        self._outputs = extra
        if output is None:
            if self._runtime.world_size > 1:
                raise RuntimeError(
                    "training_step returned None: a rank that skips a step leaves the others "
                    "waiting in their collective"
                )
            return None
        if not isinstance(output, Tensor):  # of a dict
            raise ArgumentError(
                f"training_step returned {type(output).__name__}; a tensor, a dict with "
                '"loss" or None is expected'
            )
        return output

    def _zero_grad(self) -> None:
        metrics, hooks = self._metrics, self._hooks
        if hooks["on_before_zero_grad"] is not None:
            metrics.hook = "on_before_zero_grad"
            hooks["on_before_zero_grad"](self.optimizer)
        if hooks["optimizer_zero_grad"] is not None:
            metrics.hook = "optimizer_zero_grad"
            hooks["optimizer_zero_grad"](
                self.trainer.current_epoch, self._batch_idx, self.optimizer
            )
        else:
            shortcuts.zero_grad(self.trainer.optimizers[0])

    def _before_step(self) -> None:
        """Call the last hook before the update, on unscaled gradients, then clip."""
        hooks, trainer = self._hooks, self.trainer
        if hooks["on_before_optimizer_step"] is not None:
            self._metrics.hook = "on_before_optimizer_step"
            hooks["on_before_optimizer_step"](self.optimizer)
        clip = hooks["configure_gradient_clipping"]
        if clip is not None:
            self._metrics.hook = "configure_gradient_clipping"
            clip(self.optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        elif trainer.gradient_clip_val:
            self.module.clip_gradients(
                self.optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            )

    def _unused_parameters(self, text: str) -> RuntimeError:
        """Name the parameters behind DDP's "expected to have finished reduction"."""
        found = re.search(r"did not receive grad for rank \d+: ([\d ,]+)", text)
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        unused = [names[int(i)] for i in re.findall(r"\d+", found[1])] if found else []
        return RuntimeError(
            f"parameters without a gradient in training_step: {', '.join(unused) or 'unknown'}; "
            "freeze them (requires_grad_(False)), use them in the loss, or pass "
            'Trainer(strategy="ddp_find_unused_parameters_true"), which searches at every step'
        )

    # -- validation --------------------------------------------------------------------------

    def _val_check_batch(self) -> float:
        """Return after how many batches validation is due; inf: at the end of the epoch."""
        trainer, interval = self.trainer, self.trainer.val_check_interval
        if isinstance(interval, timedelta):
            return _INF
        if isinstance(interval, int):
            if (
                interval > self.num_batches
                and trainer.check_val_every_n_epoch is not None
                and trainer.limit_val_batches > 0
            ):
                raise ArgumentError(
                    f"val_check_interval={interval} is more than the {self.num_batches:.0f} "
                    "batches of an epoch",
                    hint="check_val_every_n_epoch=None counts batches across epochs",
                )
            return interval
        if self.num_batches == _INF:
            if interval != 1.0:
                raise ArgumentError(
                    f"val_check_interval={interval} is a fraction, but the training loader has no "
                    "length",
                    hint="give an int or 1.0",
                )
            return _INF
        return max(1, int(self.num_batches * interval))

    def _validating_epoch(self) -> bool:
        every = self.trainer.check_val_every_n_epoch
        return every is None or (self.trainer.current_epoch + 1) % every == 0

    def _validation_due(self) -> bool:
        trainer = self.trainer
        if not self._validating_epoch():
            return False
        if trainer.should_stop and self._may_stop():
            return True
        if self._val_cadence is not None:
            return self._val_cadence.after_batch(self._seconds_to_validation)
        if self.val_check_batch == _INF:
            return self.is_last
        if self._short() and trainer.val_check_interval == 1.0:
            return True
        across = trainer.check_val_every_n_epoch is None
        done = trainer._total_batches if across else self._batch_idx + 1
        return done % self.val_check_batch == 0

    def _seconds_to_validation(self) -> float:
        interval = self.trainer.val_check_interval
        assert isinstance(interval, timedelta)
        return interval.total_seconds() - (time.monotonic() - self._validated_s)

    def _short(self) -> bool:
        """Return whether the loader ended before its length; all after its last batch is done."""
        return self.is_last and self._batch_idx + 1 < self.num_batches < _INF

    def validation_follows(self) -> bool:
        """Return whether validation is due after the batch in hand; not asked of a clock."""
        return self.evaluation is not None and self._val_cadence is None and self._validation_due()

    def ends_validating_epoch(self) -> bool:
        """Return whether the batch in hand is the last one of an epoch with validations."""
        return self.is_last and self.evaluation is not None and self._validating_epoch()

    def _validate(self) -> None:
        assert self.evaluation is not None
        if self._lockstep is not None:  # its results are reduced: nobody may be elsewhere then
            self._lockstep.meet()
        self._place = Place.VALIDATION
        self.trainer._validates = True
        if self._stepping:  # in mid-window the gradients so far are kept
            self._metrics.hook = ""
            self.module.on_validation_model_zero_grad()
        begun_s = time.monotonic()
        self.before_validation = {
            "random": seeding.states(self._runtime.device),
            "validation": self.evaluation.state(),
        }
        self.evaluation.run()
        self._validated_s = time.monotonic()
        self.trainer._after_validation(self._validated_s - begun_s)

    # -- schedulers --------------------------------------------------------------------------

    def _schedulers(self, interval: str, *, plateau: bool) -> list[SchedulerConfig]:
        if not self.module.automatic_optimization:
            return []  # the module steps them
        return [
            config
            for config in self.trainer.lr_scheduler_configs
            if config.interval == interval and config.reduce_on_plateau == plateau
        ]

    def _step_by_batch(self) -> None:
        self._step_scheduler_list(self._step_schedulers, self._batch_idx + 1)

    def _step_by_epoch(self, *, plateau: bool) -> None:
        # current_epoch rises only after this
        self._step_scheduler_list(
            self._schedulers("epoch", plateau=plateau), self.trainer.current_epoch + 1
        )

    def _step_scheduler_list(self, configs: list[SchedulerConfig], count: int) -> None:
        for config in configs:
            if count % config.frequency != 0:
                continue
            value = None
            if config.reduce_on_plateau:
                assert config.monitor is not None
                value = self.trainer.callback_metrics.get(config.monitor)
                if value is None:
                    text = (
                        f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which has "
                        f"not been logged; known: {sorted(self.trainer.callback_metrics)}"
                    )
                    if config.strict:
                        raise ArgumentError(text)
                    warnings.warn(text, stacklevel=2)
                    continue
            self._metrics.hook = "lr_scheduler_step"
            self.module.lr_scheduler_step(config.scheduler, value)

    def _call(self, name: str) -> None:
        hook = self._hooks[name]
        if hook is not None:
            self._metrics.hook = name
            hook()


def fit_batches(loader: data.Loader, limit: int | float) -> float:
    """Return the number of training batches of an epoch; inf: not known."""
    return batches("limit_train_batches", data.length(loader), limit)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {k: _detached(v) for k, v in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_detached(v) for v in value)
    return value
