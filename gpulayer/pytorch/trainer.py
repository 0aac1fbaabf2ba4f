"""`Trainer`: the arguments, the four calls, and what users and loops read and write.

Names and semantics are Lightning's; `target` is ours. What a call does is in `stages`, where it
runs in `calls`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpulayer import env as environment
from gpulayer.pytorch import (
    again,
    arguments,
    backends,
    calls,
    checkpoints,
    data,
    precision,
    stages,
)
from gpulayer.pytorch import strategy as strategies
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.callback import Callback, Checkpoint
from gpulayer.pytorch.csvlog import MetricsFile
from gpulayer.pytorch.early_stopping import EarlyStopping
from gpulayer.pytorch.evaluation import Outputs
from gpulayer.pytorch.hooks import Hooks, ordered
from gpulayer.pytorch.launching import Target
from gpulayer.pytorch.loop import FitLoop
from gpulayer.pytorch.metrics import Metrics
from gpulayer.pytorch.model_checkpoint import ModelCheckpoint
from gpulayer.pytorch.module import Module
from gpulayer.pytorch.optimizers import SchedulerConfig
from gpulayer.pytorch.progress import Progress, Status
from gpulayer.pytorch.runtime import Runtime
from gpulayer.pytorch.stopping import end_for
from gpulayer.pytorch.timer import Timer

_LOGS = "gpulayer_logs"
# Folders of ranks, and where their files came to, of all calls of this process: the callbacks in a
# checkpoint remember the paths of the ranks that wrote it, also when a later call reads it.
_moves: list[tuple[Path, Path]] = []


class Trainer:
    """Trains a `Module` here, on this machine's devices, or on other machines.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda", "rocm" or "mps".
        strategy: "auto", "ddp" (whenever there are several processes),
            "ddp_find_unused_parameters_true", or "fsdp": parameters, gradients and optimizer
            states are split over the ranks.
        devices: processes per node; "auto" or -1 is every GPU, or one process where there is none.
        num_nodes: machines.
        precision: "32-true", "bf16-mixed" (cpu, cuda) or "16-mixed" (cuda).
        target: "auto" (here if possible), "local", "mesh", node names, "zone:NAME", "!NAME".
        env, secrets: environment variables for ranks elsewhere; a list takes this process's values.
        stop_grace_s: what ranks elsewhere get to end after Ctrl-C.
        wait_s: how long to queue for busy machines; None: as long as it takes, 0: not at all.
        restarts: how often a call elsewhere may start again after a lost machine or a failed rank;
            a fit goes on from its newest checkpoint.
        on_disconnect: "keep" lets a call elsewhere go on when this process is gone without a word;
            a number of seconds stops it once nobody on this machine has followed it for so long.
        max_epochs, min_epochs, max_steps, min_steps: limits; steps are optimizer steps, -1 is none.
        max_time: "DD:HH:MM:SS", a timedelta or a dict of its arguments: adds a `Timer`.
        callbacks: one `Callback` or a list of them.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: an int
            counts batches per loader and rank, a float is a fraction: 1 is one batch, 1.0 is
            everything.
        val_check_interval: validate every so many batches (int), at this fraction of an epoch, or
            when this time has passed since the last validation (the forms of `max_time`).
        check_val_every_n_epoch: only in such epochs; None counts batches across epochs.
        fast_dev_run: a trial run of this many batches (True: one): one epoch, validation included,
            no sanity check, nothing written.
        num_sanity_val_steps: validation batches before training; -1 is all, 0 none.
        log_every_n_steps: rows of step values in metrics.csv; 0 is none.
        accumulate_grad_batches: batches per optimizer step.
        gradient_clip_val, gradient_clip_algorithm: clip by "norm" (default) or "value".
        logger: write metrics.csv and hparams.yaml.
        enable_checkpointing: add a `ModelCheckpoint()` where callbacks hold none.
        enable_progress_bar: print progress.
        default_root_dir: where `gpulayer_logs/version_N` goes; default: the rank's output
            directory in a job, else the working directory.
        deterministic: let torch use deterministic algorithms only, or raise; "warn": or warn; None
            changes nothing.
        benchmark: let cuDNN try which algorithms are fastest; None does where a fit plans 1,000
            steps or more and `deterministic` does not forbid it.
        inference_mode: run validate, test and predict under `torch.inference_mode`, where the
            process group allows it; otherwise, and always inside fit, under `torch.no_grad`.
        use_distributed_sampler: share loaders out over ranks.
        prefetch: load training batches, and copy them to a cuda device, in a thread that is up to
            two batches ahead.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str = "auto",
        devices: int | str = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        target: Target = "auto",
        env: Mapping[str, str] | Iterable[str] | None = None,
        secrets: Mapping[str, str] | Iterable[str] | None = None,
        stop_grace_s: float = 30.0,
        wait_s: float | None = None,
        restarts: int = 0,
        on_disconnect: float | str = "keep",
        callbacks: Callback | Iterable[Callback] | None = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, Any] | None = None,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        limit_test_batches: float | None = None,
        limit_predict_batches: float | None = None,
        val_check_interval: float | str | timedelta | dict[str, Any] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        fast_dev_run: int | bool = False,
        log_every_n_steps: int | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        logger: bool | None = True,
        enable_checkpointing: bool | None = True,
        enable_progress_bar: bool | None = True,
        default_root_dir: str | Path | None = None,
        deterministic: backends.Deterministic = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        prefetch: bool = False,
        **unknown: Any,
    ) -> None:
        arguments.refuse("Trainer", unknown)
        if strategy not in strategies.NAMES:
            raise ArgumentError(
                f"unknown strategy {strategy!r}", hint=f"one of {', '.join(strategies.NAMES)}"
            )
        self.accelerator = arguments.accelerator(accelerator)
        self.strategy = strategy
        self.devices = arguments.devices(devices)
        self.num_nodes = arguments.at_least("num_nodes", num_nodes, 1)
        self.precision = _precision(precision, accelerator)
        self.target = arguments.target(target)
        self._env = environment.variables(env)
        self._secrets = environment.variables(secrets, "secrets")
        self._stop_grace_s = arguments.seconds("stop_grace_s", stop_grace_s)
        self._wait_s = None if wait_s is None else arguments.seconds("wait_s", wait_s)
        self._restarts = arguments.restarts(restarts)
        self._on_disconnect_s = arguments.on_disconnect(on_disconnect)
        self.max_epochs = (
            None if max_epochs is None else arguments.count("max_epochs", max_epochs, -1)
        )
        self.min_epochs = (
            None if min_epochs is None else arguments.count("min_epochs", min_epochs, 0)
        )
        self.max_steps = arguments.count("max_steps", max_steps, -1)
        self.min_steps = None if min_steps is None else arguments.count("min_steps", min_steps, 0)
        self.limit_train_batches = arguments.limit("limit_train_batches", limit_train_batches)
        self.limit_val_batches = arguments.limit("limit_val_batches", limit_val_batches)
        self.limit_test_batches = arguments.limit("limit_test_batches", limit_test_batches)
        self.limit_predict_batches = arguments.limit("limit_predict_batches", limit_predict_batches)
        self.val_check_interval, self.check_val_every_n_epoch = arguments.val_interval(
            val_check_interval, check_val_every_n_epoch
        )
        sanity = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        sanity = arguments.count("num_sanity_val_steps", sanity, -1)
        self.num_sanity_val_steps = float("inf") if sanity == -1 else sanity
        every = 50 if log_every_n_steps is None else log_every_n_steps
        self.log_every_n_steps = arguments.count("log_every_n_steps", every, 0)
        self.accumulate_grad_batches = arguments.count(
            "accumulate_grad_batches", accumulate_grad_batches, 1
        )
        self.gradient_clip_val = gradient_clip_val
        _, algorithm = arguments.clipping(gradient_clip_val, gradient_clip_algorithm)
        self.gradient_clip_algorithm = None if gradient_clip_algorithm is None else algorithm
        self.deterministic = backends.check_deterministic(deterministic)
        self.benchmark = backends.check_benchmark(benchmark)
        self.inference_mode = arguments.flag("inference_mode", inference_mode)
        self.use_distributed_sampler = arguments.flag(
            "use_distributed_sampler", use_distributed_sampler
        )
        self.prefetch = arguments.flag("prefetch", prefetch)
        batches = arguments.trial(fast_dev_run)
        self.fast_dev_run = fast_dev_run
        # What a job prints goes to viewers, who thin such lines where they are no terminal.
        place = environment.rank_env()
        live = place is not None and place.job is not None
        shown = arguments.flag("enable_progress_bar", enable_progress_bar, none=True)
        self._progress = Progress(live=live) if shown else None
        self._logger = arguments.flag(
            "logger",
            False if isinstance(logger, list) and not logger else logger,
            none=True,
            hint="values go to metrics.csv; a Callback can send logged_metrics elsewhere",
        )
        self._logs = self._logger  # not in a trial run
        if batches:
            self.limit_train_batches = self.limit_val_batches = batches
            self.limit_test_batches = self.limit_predict_batches = batches
            self.max_steps, self.max_epochs, self.num_sanity_val_steps = batches, 1, 0
            self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1
            self._logs = False
        self._root_dir = None if default_root_dir is None else Path(default_root_dir).expanduser()
        self._file: MetricsFile | None = None
        self._log_dir: Path | None = None
        self._folders: list[Path] = []  # of the rank whose result was taken over

        saves = arguments.flag("enable_checkpointing", enable_checkpointing, none=True)
        own = _with_checkpoint(_callbacks(callbacks), saves)
        self.callbacks = ordered(_with_timer(own, max_time))

        self.stage: str | None = None  # "fit", "validate", "test", "predict" while such a call runs
        self._last: str | None = None  # the call that runs, or ran last
        self.should_stop = False
        self.sanity_checking = False
        self.interrupted = False  # the call that runs, or ran last, ended with an exception
        self._validates = False  # inside fit, or as its sanity check
        self._loaders: dict[str, Any] = {}  # of the call that runs, or ran last, in this process
        self._num_batches: dict[str, list[float]] = {}  # by stage
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self._metrics = Metrics()
        self._runtime: Runtime | None = None
        self._module: Module | None = None
        self._hooks: Hooks = Hooks(self, Module(), ())
        self._data: stages.TrainingData | None = None
        self._seeds = (0, 0)  # of samplers, equal on all ranks, and of loaders' workers
        self._strategy: strategies.Strategy | None = None
        self._call = 0  # the index in the script of the call that runs, or ran last
        self._again: again.FitAgain | None = None  # while a fit runs whose job may start again
        self._loop: FitLoop | None = None  # of the fit that runs, or ran last
        self._state_at: str | None = None  # the file with the state at the end of the last fit
        self._ran_elsewhere = False  # the last fit: its optimizers are not here
        self.ckpt_path: str | None = None  # what the call that runs, or ran last, loaded
        self._num_training_batches: float = float("inf")
        self._max_epochs = -1
        self._min_epochs: int | None = None
        # Counters run on over several fits.
        self._global_step = 0  # optimizer steps
        self._epochs_processed = 0
        self._epochs_completed = 0  # = processed, except inside on_train_epoch_end
        self._total_batches = 0
        self._batches_that_stepped = 0  # x axis of metrics.csv

    if not TYPE_CHECKING:  # a type checker knows the members

        def __getattr__(self, name: str) -> Any:
            raise arguments.absent("Trainer", type(self).__name__, name)

    # -- the four calls ----------------------------------------------------------------------

    def fit(
        self,
        model: Module,
        train_dataloaders: data.Loader | None = None,
        val_dataloaders: data.Loaders | None = None,
        *,
        ckpt_path: str | Path | None = None,
        **unknown: Any,
    ) -> None:
        """Train `model`; afterwards it holds the weights, wherever they were trained.

        On other machines and for several devices the ranks run this script from its top up to this
        call and end there. In this process each statement runs once; on ranks, what stands above a
        call runs once for each call that goes elsewhere.

        Args:
            ckpt_path: go on from this checkpoint, exactly; "last" is the newest last*.ckpt, if any;
                "best" is the best of the fit before.

        Raises:
            SystemExit: the training ran elsewhere and failed; with its exit code.
        """
        arguments.refuse("fit", unknown)
        arguments.refuse_datamodule("fit", train_dataloaders)
        model = self._checked("fit", model)
        stages.check_fit(model)
        calls.run(
            self,
            model,
            lambda path: stages.fit(self, model, train_dataloaders, val_dataloaders, path),
            checkpoint=lambda: again.chosen(
                self._call, lambda: checkpoints.choose(self, "fit", ckpt_path, model_given=True)
            ),
            trains=True,
        )

    def validate(
        self,
        model: Module | None = None,
        dataloaders: data.Loaders | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        **unknown: Any,
    ) -> Outputs:
        """Run `validation_step` over loaders; returns a dict of epoch values for each of them.

        Args:
            model: default: the one of the call before.
            dataloaders: default: the module's `val_dataloader`.
            ckpt_path: load these weights first: a file, "best" or "last"; default: "best" without
                a model, the weights as they are with one.
            verbose: print the values.
        """
        arguments.refuse("validate", unknown)
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose)

    def test(
        self,
        model: Module | None = None,
        dataloaders: data.Loaders | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        **unknown: Any,
    ) -> Outputs:
        """Run `test_step` over loaders; otherwise as `validate`."""
        arguments.refuse("test", unknown)
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose)

    def _evaluate(
        self,
        stage: str,
        model: Module | None,
        loaders: data.Loaders | None,
        ckpt_path: str | Path | None,
        verbose: bool,
    ) -> Outputs:
        arguments.refuse_datamodule(stage, loaders)
        module, given = self._checked(stage, model), model is not None
        found: Outputs = calls.run(
            self,
            module,
            lambda path: stages.evaluate(self, module, stage, loaders, path, verbose),
            checkpoint=lambda: checkpoints.choose(self, stage, ckpt_path, model_given=given),
        )
        return found

    def predict(
        self,
        model: Module | None = None,
        dataloaders: data.Loaders | None = None,
        *,
        return_predictions: bool = True,
        ckpt_path: str | Path | None = None,
        **unknown: Any,
    ) -> list[Any] | None:
        """Return what `predict_step` returned for each batch, on the CPU.

        A list, or for several loaders a list of lists. In a call that runs elsewhere these are the
        batches of all ranks in the order of one process; in a script under `launch` or torchrun
        each rank gets its own share, of the samples r, r + world_size, ...

        Args:
            model: default: the one of the call before.
            dataloaders: default: the module's `predict_dataloader`.
            return_predictions: False returns None and keeps nothing.
            ckpt_path: as for `validate`.
        """
        arguments.refuse("predict", unknown)
        arguments.refuse_datamodule("predict", dataloaders)
        module, given = self._checked("predict", model), model is not None
        found: list[list[Any]] | None = calls.run(
            self,
            module,
            lambda path: stages.predict(
                self,
                module,
                dataloaders,
                path,
                keep=return_predictions,
                whole_batches=calls.in_job_of_a_call(),
            ),
            checkpoint=lambda: checkpoints.choose(self, "predict", ckpt_path, model_given=given),
            shares=True,
        )
        return found[0] if found is not None and len(found) == 1 else found

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool = False, **unknown: Any
    ) -> None:
        """Write a checkpoint; every rank must call this, rank 0 writes.

        Args:
            weights_only: leave out what only resuming needs.
        """
        arguments.refuse("save_checkpoint", unknown)
        checkpoints.save(self, filepath, weights_only)

    def _checked(self, call: str, model: Module | None) -> Module:
        model = self._module if model is None else model
        if model is None:
            raise TypeError(f"{call} needs a model: none was given and none was used before")
        if not isinstance(model, Module):
            raise TypeError(f"{call} takes a gpulayer.pytorch.Module, got {type(model).__name__}")
        self._last = call
        return model

    # -- what a call begins with -------------------------------------------------------------

    def _attach(self, model: Module) -> None:
        self._module = model
        self._loaders = {}
        model._trainer = self
        self.callbacks = ordered(_with_those_of(model, self.callbacks))

    def _begin(self, model: Module, stage: str) -> None:
        self._attach(model)
        self.stage = stage
        self.interrupted = self._validates = False

    def _version_dir(self) -> Path | None:
        """Return the log directory, making it; None without one, and on other ranks than 0."""
        return None if self._file is None else self._file.directory

    def _open_log(self) -> None:
        if self.is_global_zero and self._logs and self._file is None:
            self._file = MetricsFile(self._root() / _LOGS, again.log_folder)

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _root(self) -> Path:
        if self._root_dir is not None:
            return self._root_dir
        place = environment.rank_env()
        return (place.output_dir if place else None) or Path.cwd()

    def _logs_at(self) -> Path | None:
        """Return the log directory, if there is one already."""
        if self._file is not None and self._file.started:
            return self._file.directory
        return self._log_dir

    # -- what a call that ran elsewhere leaves -----------------------------------------------

    def _callback_states(self) -> dict[str, Any]:
        return {one.state_key: state for one in self.callbacks if (state := one.state_dict())}

    def _counters(self) -> dict[str, Any]:
        # Relative to where it comes home to: a root the user gave lies in the working folder.
        output = self._root() if self._root_dir is None else environment.START_DIR
        found = self._logs_at()
        log_dir = None if found is None else environment.START_DIR / found
        inside = log_dir is not None and log_dir.is_relative_to(output)
        return {
            "global_step": self._global_step,
            "epochs_processed": self._epochs_processed,
            "epochs_completed": self._epochs_completed,
            "total_batches": self._total_batches,
            "batches_that_stepped": self._batches_that_stepped,
            "should_stop": self.should_stop,
            "num_training_batches": arguments.plain(self._num_training_batches),
            "num_batches": {
                stage: [arguments.plain(one) for one in found]
                for stage, found in self._num_batches.items()
            },
            "world_size": self.world_size,
            "log_dir": str(log_dir.relative_to(output)) if log_dir and inside else None,
            "state_at": self._state_at,
            "folders": [str(self.runtime.output_dir), str(environment.START_DIR)],
        }

    def _restore(
        self,
        counters: Mapping[str, Any],
        callback: dict[str, Tensor],
        logged: dict[str, Tensor],
        progress: dict[str, Tensor],
        states: Mapping[str, Any],
    ) -> None:
        self._global_step = counters["global_step"]
        self._epochs_processed = counters["epochs_processed"]
        self._epochs_completed = counters["epochs_completed"]
        self._total_batches = counters["total_batches"]
        self._batches_that_stepped = counters["batches_that_stepped"]
        self.should_stop = counters["should_stop"]
        self.interrupted = False
        self._num_batches.update(
            {
                stage: [float("inf") if one is None else one for one in found]
                for stage, found in counters["num_batches"].items()
            }
        )
        batches = counters["num_training_batches"]
        self._num_training_batches = float("inf") if batches is None else batches
        self._log_dir = Path(counters["log_dir"]) if counters["log_dir"] else None
        self._folders = [Path(one) for one in counters.get("folders", ())]
        self._state_at = counters.get("state_at")
        self._metrics.forget()
        self._metrics.callback.update(callback)
        self._metrics.logged.update(logged)
        self._metrics.progress.update(progress)
        self._ran_elsewhere = True
        for one in self.callbacks:
            if one.state_key in states:
                state = states[one.state_key]
                one.adopt(state) if isinstance(one, Checkpoint) else one.load_state_dict(state)

    def _came_home(self, folder: Path) -> None:
        """Find in `folder` what ranks wrote; here they wrote into a directory they were given."""
        if self._log_dir is not None:
            came = folder / self._log_dir
            self._log_dir = came if came.is_dir() else environment.START_DIR / self._log_dir
        for there in self._folders:
            _moves.extend([(there, folder), (there, environment.START_DIR)])
        for one in self.checkpoint_callbacks:
            for there, here in _moves:
                one.moved(there, here)
        if self._state_at is not None:
            for there, here in _moves:
                if Path(self._state_at).is_relative_to(there):
                    came = here / Path(self._state_at).relative_to(there)
                    self._state_at = str(came) if came.exists() else self._state_at

    # -- what the loops tell -----------------------------------------------------------------

    def _log_row(
        self, row: dict[str, Tensor | float], step: int | None = None, shift: int = 0
    ) -> None:
        """Add a row to metrics.csv; a logged "step" overrides the x axis."""
        if not row:
            return
        self._metrics.logged.update({k: torch.as_tensor(v) for k, v in row.items()})
        if self._file is None:
            return
        if step is None:
            if "step" in row:
                step = int(row.pop("step"))
            else:
                row.setdefault("epoch", self.current_epoch)
                step = self._batches_that_stepped + shift
        self._file.write(row, step)

    def _signalled(self, number: int) -> None:
        """Take SIGINT or SIGTERM: a training ends well, everything else at once."""
        if self._loop is None or not self._loop.ask_to_stop(number):
            raise end_for(number)

    def _save_final(self) -> None:
        """Have the state at the end of a fit written, unless a checkpoint holds it already."""
        if self._again is not None:
            if self._again.end_is_saved:
                return
            self._again.saving_end = True
        found = (one.holds_now(self) for one in self.checkpoint_callbacks)
        path = next(filter(None, found), None)
        if path is None:
            written = (one.save_end(self) for one in self.checkpoint_callbacks)
            path = next(filter(None, written), None)
        if self._again is not None:
            self._again.commit(self)
            self._again.saving_end = False
        self._state_at = path
        self._flush()
        if self._stopped() and self.is_global_zero:
            then = ""
            if path and calls.in_job_of_a_call():  # who reads this does not know the job's folders
                then = f"; its state is in {self._shown(path)} of the job's files"
            elif path:
                then = self._goes_on(path)
            self._say(f"stopped in epoch {self.current_epoch}, after step {self.global_step}{then}")

    def _stopped(self) -> bool:
        """Return whether a signal ended the fit, and all of it was saved."""
        return self._loop is not None and self._loop.interrupted

    def _goes_on(self, path: str) -> str:
        return f"; fit(ckpt_path={self._shown(path)!r}) goes on"

    def _shown(self, path: str) -> str:
        """Return a path as the user knows it: below the job's output, or the working directory."""
        place = environment.rank_env()
        root = (place.output_dir if place else None) or Path.cwd()
        return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path

    def _after_validation(self, took_s: float) -> None:
        self._flush()
        if self._progress is not None:
            self._progress.validated(took_s)

    def _say(self, line: str) -> None:
        """Print what a callback has to say."""
        (self._progress or Progress()).line(line)

    def _validation_follows(self) -> bool:
        return self._loop is not None and self._loop.validation_follows()

    def _ends_validating_epoch(self) -> bool:
        return self._loop is not None and self._loop.ends_validating_epoch()

    def _validation_batches(self) -> float:
        """Return the batches of a validation inside fit, of all loaders; 0: there is none."""
        evaluation = None if self._loop is None else self._loop.evaluation
        return 0 if evaluation is None else sum(evaluation.num_batches)

    def _has_validated(self) -> bool:
        evaluation = None if self._loop is None else self._loop.evaluation
        return evaluation is not None and evaluation.has_run

    def _show(self, stage: str, found: Outputs) -> None:
        if self._progress is not None and self.is_global_zero:
            self._progress.evaluated(stage, found)

    def _progress_epoch_start(self, done: int = 0) -> None:
        if self._progress is not None:
            self._progress.epoch_start(done)

    def _progress_step(self, done: int, total: float, loss: Tensor | None) -> None:
        progress = self._progress
        if progress is None or not self.is_global_zero or not progress.due():
            return
        if loss is not None:
            loss = loss * self.accumulate_grad_batches
        assert self._loop is not None
        timers = (one.time_remaining() for one in self.callbacks if isinstance(one, Timer))
        status = Status(
            self.current_epoch,
            done,
            total,
            loss,
            self._metrics.progress,
            left=self._batches_left(done),
            left_s=min((left for left in timers if left is not None), default=float("inf")),
            slowest=self._loop.slowest_rank(),
        )
        progress.step(status)

    def _batches_left(self, done: int) -> float:
        """Return how many batches this fit still trains, inf if nothing tells."""
        found = float("inf")
        if self._max_epochs != -1:
            epochs = self._max_epochs - self._epochs_processed
            found = epochs * self.num_training_batches - done
        if self.max_steps != -1:
            steps = self.max_steps - self.global_step
            found = min(found, steps * self.accumulate_grad_batches)
        return found

    def _epoch_end(self, done: int) -> None:
        self._flush()
        if self._progress is not None and self.is_global_zero:
            self._progress.epoch_end(self.current_epoch - 1, done, self.callback_metrics)

    # -- what users read ---------------------------------------------------------------------

    @property
    def runtime(self) -> Runtime:
        """The process's place and device; there from the first fit on."""
        if self._runtime is None:
            raise RuntimeError("no fit has begun in this process")
        return self._runtime

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first callback that writes checkpoints."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """The callbacks that write checkpoints."""
        return [one for one in self.callbacks if isinstance(one, Checkpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first `EarlyStopping`."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """The callbacks that are an `EarlyStopping`."""
        return [one for one in self.callbacks if isinstance(one, EarlyStopping)]

    @property
    def lightning_module(self) -> Module | None:
        """The module of the call that runs, or ran last."""
        return self._module

    @property
    def model(self) -> Module | None:
        """The same: never a wrapper."""
        return self._module

    @property
    def logger(self) -> None:
        """None, as with Lightning's Trainer(logger=False): values go through `Module.log`."""
        return None

    @property
    def loggers(self) -> list[Any]:
        """Empty, as with Lightning's Trainer(logger=False)."""
        return []

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of "16-mixed"."""
        return self._runtime.scaler if self._runtime else None

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)

    @property
    def global_step(self) -> int:
        """Optimizer steps completed, over all epochs."""
        return self._global_step

    @property
    def current_epoch(self) -> int:
        """Epochs completed: 0 during the first."""
        return self._epochs_completed

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Last values of everything logged, by name, `name_step` and `name_epoch`."""
        self._metrics.commit()
        return self._metrics.callback

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Last values of what goes to metrics.csv."""
        self._metrics.commit()
        return self._metrics.logged

    @property
    def progress_bar_metrics(self) -> dict[str, Tensor]:
        """Last values of what is shown in the progress line."""
        self._metrics.commit()
        return self._metrics.progress

    @property
    def num_training_batches(self) -> float:
        """Batches of an epoch on each rank; inf where the loader has no length."""
        return self._num_training_batches

    @property
    def num_val_batches(self) -> list[float]:
        """Batches of each validation loader on each rank: of fit, or of `validate` after one."""
        return list(self._num_batches.get("validate" if self._last == "validate" else "fit", ()))

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Batches of each validation loader in the sanity check of a fit."""
        found = self._num_batches.get("fit", ())
        return [min(self.num_sanity_val_steps, one) for one in found]

    @property
    def num_test_batches(self) -> list[float]:
        """Batches of each loader of `test`, on each rank."""
        return list(self._num_batches.get("test", ()))

    @property
    def num_predict_batches(self) -> list[float]:
        """Batches of each loader of `predict`, on each rank."""
        return list(self._num_batches.get("predict", ()))

    @property
    def train_dataloader(self) -> Any:
        """This rank's training loader, once a fit has it; None after calls that ran elsewhere."""
        return self._loaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        """This rank's validation loaders, one or several as they were given; None as above."""
        return self._loaders.get("fit", self._loaders.get("validate"))

    @property
    def test_dataloaders(self) -> Any:
        """This rank's loaders of `test`, one or several as they were given; None as above."""
        return self._loaders.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        """This rank's loaders of `predict`, one or several as they were given; None as above."""
        return self._loaders.get("predict")

    @property
    def training(self) -> bool:
        """Whether a fit runs, and no validation in it."""
        return self.stage == "fit" and not self._validates and not self.sanity_checking

    @property
    def validating(self) -> bool:
        """Whether a validation runs, in fit or by itself, and no sanity check."""
        within = self.stage == "fit" and self._validates and not self.sanity_checking
        return within or self.stage == "validate"

    @property
    def testing(self) -> bool:
        """Whether `test` runs."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether `predict` runs."""
        return self.stage == "predict"

    @property
    def evaluating(self) -> bool:
        """Whether a validation, a sanity check or `test` runs."""
        return self.validating or self.testing or self.sanity_checking

    def _row_due(self) -> bool:
        return self._loop is not None and self._loop.row_due()

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch in hand is the last of its training epoch."""
        return self._loop is not None and self._loop.is_last

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps that this fit will make; inf where nothing limits it."""
        if self._data is None:
            raise RuntimeError("estimated_stepping_batches is known from the start of a fit on")
        self._data.load()
        batches, epochs = self._num_training_batches, self._max_epochs
        if batches == float("inf") or epochs == -1:
            return float("inf") if self.max_steps == -1 else self.max_steps
        steps = math.ceil(batches / self.accumulate_grad_batches) * max(epochs, 1)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    @property
    def default_root_dir(self) -> str:
        """Where log directories are made."""
        return str(self._root())

    @property
    def log_dir(self) -> str | None:
        """The directory of metrics.csv; None before anything was logged, and on other ranks.

        Without a log it is `default_root_dir`.
        """
        if not self._logger:
            return self.default_root_dir
        found = self._logs_at()
        return None if found is None else str(found)

    @property
    def global_rank(self) -> int:
        return self._runtime.rank if self._runtime else 0

    @property
    def local_rank(self) -> int:
        return self._runtime.local_rank if self._runtime else 0

    @property
    def node_rank(self) -> int:
        return self._runtime.node_rank if self._runtime else 0

    @property
    def world_size(self) -> int:
        return self._runtime.world_size if self._runtime else 1

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0


def _precision(name: str | int | None, accelerator: str) -> str:
    full = precision.canonical(name)
    if accelerator in ("cpu", "mps"):  # known now; "auto" and "gpu" are looked at on the device
        precision.check(full, accelerator)
    return full


def _callbacks(given: Callback | Iterable[Callback] | None) -> list[Callback]:
    if given is None:
        return []
    found = [given] if isinstance(given, Callback) else list(given)
    for one in found:
        if not isinstance(one, Callback):
            raise TypeError(f"{type(one).__name__} is no gpulayer.pytorch.Callback")
    keys = [one.state_key for one in found if one.state_dict()]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ArgumentError(
            f"two callbacks with one state_key: {twice[0]}",
            hint="override state_key, so that a checkpoint can tell them apart",
        )
    return found


def _with_checkpoint(found: list[Callback], wanted: bool) -> list[Callback]:
    """Add the default ModelCheckpoint, unless there is one."""
    given = [one for one in found if isinstance(one, Checkpoint)]
    if given and not wanted:
        raise ArgumentError(
            f"enable_checkpointing=False, but callbacks hold a {type(given[0]).__name__}"
        )
    return found if given or not wanted else [*found, ModelCheckpoint()]


def _with_timer(found: list[Callback], max_time: Any) -> list[Callback]:
    """Add the Timer of `max_time`, unless there is one."""
    if max_time is None:
        return found
    if any(isinstance(one, Timer) for one in found):
        warnings.warn("max_time is ignored: callbacks hold a Timer", stacklevel=3)
        return found
    return [*found, Timer(arguments.duration("max_time", max_time))]


def _with_those_of(model: Module, own: list[Callback]) -> list[Callback]:
    """Add the module's callbacks; one of the same class as the Trainer's takes its place."""
    found = _callbacks(model.configure_callbacks())
    classes = {type(one) for one in found}
    return [one for one in own if type(one) not in classes] + found
