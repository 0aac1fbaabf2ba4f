"""`Trainer`: the arguments, where a call runs, and what a fit consists of around its loop.

Names and semantics are Lightning's; `target` is ours. The loop itself is in `loop`,
the decision where to run in `launching`, the results of calls elsewhere in `results`.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gpulayer import env as environment
from gpulayer.pytorch import (
    arguments,
    data,
    ending,
    launching,
    optimizers,
    precision,
    results,
    seeding,
)
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.csvlog import MetricsFile
from gpulayer.pytorch.evaluation import Evaluation
from gpulayer.pytorch.launching import Target, Where
from gpulayer.pytorch.loop import FitLoop, StepForward, fit_batches
from gpulayer.pytorch.metrics import Metrics
from gpulayer.pytorch.module import Module, overridden
from gpulayer.pytorch.optimizers import SchedulerConfig
from gpulayer.pytorch.progress import Progress
from gpulayer.pytorch.runtime import Runtime

_LOGS = "gpulayer_logs"
_STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true")
_DEFAULT_EPOCHS = 1000  # Lightning's, when neither epochs nor steps are limited


class Trainer:
    """Trains a `Module` here, on this machine's devices, or on other machines.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda", "rocm" or "mps".
        strategy: "auto", "ddp" or "ddp_find_unused_parameters_true"; ddp whenever there are
            several processes.
        devices: processes per node; "auto" is every GPU, or one process where there is none.
        num_nodes: machines.
        precision: "32-true", "bf16-mixed" (cpu, cuda) or "16-mixed" (cuda).
        target: "auto" (here if possible), "local", "mesh", node names, "zone:NAME", "!NAME".
        env, secrets: environment variables for ranks elsewhere; a list takes this process's values.
        stop_grace_s: what ranks elsewhere get to end after Ctrl-C.
        max_epochs, min_epochs, max_steps, min_steps: limits; steps are optimizer steps, -1 is none.
        limit_train_batches, limit_val_batches: an int counts batches per loader and rank, a float
            is a fraction: 1 is one batch, 1.0 is everything.
        val_check_interval: validate every so many batches (int), or this fraction of an epoch.
        check_val_every_n_epoch: only in such epochs; None counts batches across epochs.
        fast_dev_run: a trial run of this many batches (True: one): one epoch, validation included,
            no sanity check, nothing written.
        num_sanity_val_steps: validation batches before training; -1 is all, 0 none.
        log_every_n_steps: rows of step values in metrics.csv; 0 is none.
        accumulate_grad_batches: batches per optimizer step.
        gradient_clip_val, gradient_clip_algorithm: clip by "norm" (default) or "value".
        logger: write metrics.csv.
        enable_progress_bar: print progress.
        default_root_dir: where `gpulayer_logs/version_N` goes; default: the rank's output
            directory in a job, else the working directory.
        use_distributed_sampler: share loaders out over ranks.
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
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        val_check_interval: float | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int = 2,
        fast_dev_run: int | bool = False,
        log_every_n_steps: int = 50,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        logger: bool = True,
        enable_progress_bar: bool = True,
        default_root_dir: str | Path | None = None,
        use_distributed_sampler: bool = True,
        **unknown: Any,
    ) -> None:
        arguments.refuse(unknown)
        if strategy not in _STRATEGIES:
            raise ArgumentError(
                f"unknown strategy {strategy!r}", hint=f"one of {', '.join(_STRATEGIES)}"
            )
        self.accelerator = accelerator
        self.strategy = strategy
        self.devices = arguments.devices(devices)
        self.num_nodes = arguments.at_least("num_nodes", num_nodes, 1)
        self.precision = _precision(precision, accelerator)
        self.target: Target = target if isinstance(target, str) else tuple(target)
        self._env = launching.variables(env)
        self._secrets = launching.variables(secrets)
        self._stop_grace_s = stop_grace_s
        self.max_epochs = (
            None if max_epochs is None else arguments.at_least("max_epochs", max_epochs, -1)
        )
        self.min_epochs = min_epochs
        self.max_steps = arguments.at_least("max_steps", max_steps, -1)
        self.min_steps = min_steps
        self.limit_train_batches = arguments.limit("limit_train_batches", limit_train_batches)
        self.limit_val_batches = arguments.limit("limit_val_batches", limit_val_batches)
        self.val_check_interval, self.check_val_every_n_epoch = arguments.val_interval(
            val_check_interval, check_val_every_n_epoch
        )
        sanity = arguments.at_least("num_sanity_val_steps", num_sanity_val_steps, -1)
        self.num_sanity_val_steps = float("inf") if sanity == -1 else sanity
        self.log_every_n_steps = arguments.at_least("log_every_n_steps", log_every_n_steps, 0)
        self.accumulate_grad_batches = arguments.at_least(
            "accumulate_grad_batches", accumulate_grad_batches, 1
        )
        if gradient_clip_val is not None and not isinstance(gradient_clip_val, int | float):
            raise TypeError(f"gradient_clip_val must be a number, got {gradient_clip_val!r}")
        self.gradient_clip_val = gradient_clip_val
        algorithm = (gradient_clip_algorithm or "norm").lower()
        if algorithm not in ("norm", "value"):
            raise ArgumentError(
                f'gradient_clip_algorithm is "norm" or "value", not {gradient_clip_algorithm!r}'
            )
        self.gradient_clip_algorithm = algorithm
        self.use_distributed_sampler = use_distributed_sampler
        self.fast_dev_run = fast_dev_run
        self._progress = Progress() if enable_progress_bar else None
        self._logs = logger
        if fast_dev_run:
            batches = arguments.at_least("fast_dev_run", int(fast_dev_run), 1)
            self.limit_train_batches = self.limit_val_batches = batches
            self.max_steps, self.max_epochs, self.num_sanity_val_steps = batches, 1, 0
            self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1
            self._logs = False
        self._root_dir = None if default_root_dir is None else Path(default_root_dir)
        self._file: MetricsFile | None = None
        self._log_dir: Path | None = None

        self.should_stop = False
        self.sanity_checking = False
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self._metrics = Metrics()
        self._runtime: Runtime | None = None
        self._module: Module | None = None
        self._train_source: data.Loader | None = None
        self._train_loader: data.Loader | None = None
        self._num_training_batches: float = float("inf")
        self._max_epochs = -1
        self._min_epochs: int | None = None
        # Counters run on over several fits.
        self._global_step = 0  # optimizer steps
        self._epochs_processed = 0
        self._epochs_completed = 0  # = processed, except inside on_train_epoch_end
        self._total_batches = 0
        self._batches_that_stepped = 0  # x axis of metrics.csv

    # -- fit ---------------------------------------------------------------------------------

    def fit(
        self,
        model: Module,
        train_dataloaders: data.Loader | None = None,
        val_dataloaders: data.Loaders | None = None,
    ) -> None:
        """Train `model`; afterwards it holds the weights, wherever they were trained.

        On other machines and for several devices the ranks run this script from its top up to this
        call and end there, so what follows it runs once, in this process.

        Raises:
            SystemExit: the training ran elsewhere and failed; with its exit code.
        """
        if not isinstance(model, Module):
            raise TypeError(f"fit takes a gpulayer.pytorch.Module, got {type(model).__name__}")
        for name in ("training_step", "configure_optimizers"):
            if not overridden(model, name):
                raise ArgumentError(f"{type(model).__name__} defines no {name}")
        if not model.automatic_optimization:
            raise ArgumentError("manual optimization (automatic_optimization=False) is not offered")
        index = results.next_index()
        place = environment.rank_env()
        if place is None:
            choice = launching.choose(self.num_nodes, self.devices, self.accelerator, self.target)
            if choice.where is not Where.HERE:
                self._run_elsewhere(index, choice, model)
                return
            if choice.kind is not None:
                precision.check(self.precision, choice.kind)
            self._fit_here(model, train_dataloaders, val_dataloaders)
            results.remember(index, self, model)
            return
        if place.call is None:  # a job of launch() or torchrun: the script runs to its end
            self._fit_here(model, train_dataloaders, val_dataloaders)
            return
        if index < place.call:
            self._replay(index, model)
            return
        if index > place.call:  # the script caught the SystemExit below
            raise SystemExit(0)
        try:
            results.check_recordable(model)
            self._fit_here(model, train_dataloaders, val_dataloaders)
            if place.rank == 0 and place.output_dir is not None:
                folder = place.output_dir / results.FOLDER / str(index)
                results.write(results.capture(self, model), folder)
        finally:
            if self._runtime is not None:
                self._runtime.close()
        ending.end_rank()

    def _fit_here(self, model: Module, train: data.Loader | None, val: data.Loaders | None) -> None:
        self.should_stop = False
        self._module = model
        model._trainer = self
        self._limits()
        runtime = self._runtime = Runtime(
            self.accelerator,
            self.precision,
            find_unused_parameters=self.strategy == "ddp_find_unused_parameters_true",
        )
        self._train_source, self._train_loader = train, None
        self._metrics.start(runtime)
        if runtime.is_global_zero and self._logs and self._file is None:
            self._file = MetricsFile(self.default_root_dir / _LOGS)
        try:
            if overridden(model, "prepare_data"):
                if runtime.local_rank == 0:
                    model.prepare_data()
                runtime.barrier()
            model.setup("fit")
            model.configure_model()
            self._metrics.forget()
            evaluation, wrapped = self._prepare(model, val)
            model.on_fit_start()
            model.zero_grad()
            if evaluation is not None:
                self._sanity_check(evaluation)
            if self.limit_train_batches != 0:
                loader = self._load_training_data()
                runtime.agree("the number of training batches", _plain(self._num_training_batches))
                self._warn_at_start(model)
                FitLoop(self, model, loader, self._num_training_batches, evaluation, wrapped).run()
        finally:
            if self._file is not None:
                self._file.flush()
        model.cpu()
        self._metrics.hook = ""
        model.on_fit_end()
        model.teardown("fit")

    def _prepare(
        self, model: Module, val: data.Loaders | None
    ) -> tuple[Evaluation | None, DistributedDataParallel | None]:
        """Bring the module to its device, wrap it, and build optimizers and validation."""
        runtime = self.runtime
        wrapped = None
        if runtime.world_size > 1:
            prepared = runtime.prepare(StepForward(model))  # also makes all ranks' weights equal
            assert isinstance(prepared, DistributedDataParallel)
            wrapped = prepared
            seeding.diverge(runtime.rank)
        else:
            runtime.prepare(model)
        optimizer, self.lr_scheduler_configs = optimizers.parse(
            model.configure_optimizers(), custom_stepping=overridden(model, "lr_scheduler_step")
        )
        self.optimizers = [optimizer]
        given = val is not None or overridden(model, "val_dataloader")
        stepped = overridden(model, "validation_step")
        if stepped != given:
            absent = "no validation loader" if stepped else "no validation_step"
            warnings.warn(f"there is {absent}: validation is skipped", stacklevel=4)
        if not given or not stepped or self.limit_val_batches == 0:
            return None, wrapped
        source = model.val_dataloader if val is None else lambda: val
        return Evaluation(self, model, source), wrapped

    def _load_training_data(self) -> data.Loader:
        if self._train_loader is None:
            source, module = self._train_source, self._module
            assert module is not None
            if source is None:
                if not overridden(module, "train_dataloader"):
                    raise ArgumentError(
                        "there is no training loader",
                        hint="pass train_dataloaders to fit, or define train_dataloader",
                    )
                source = module.train_dataloader()
            runtime = self.runtime
            self._train_loader = data.for_training(
                source,
                runtime.rank,
                runtime.world_size,
                seed=seeding.sampler_seed(),
                inject=self.use_distributed_sampler,
                init=seeding.worker_init(runtime.rank),
            )
            self._num_training_batches = fit_batches(self._train_loader, self.limit_train_batches)
        return self._train_loader

    def _limits(self) -> None:
        self._min_epochs = self.min_epochs
        if self.min_epochs is None and self.min_steps is not None:
            self._min_epochs = 1
        self._max_epochs = -1 if self.max_epochs is None else self.max_epochs
        if self.max_epochs is None and self.max_steps == -1:
            warnings.warn(
                f"neither max_epochs nor max_steps is given: training ends after "
                f"{_DEFAULT_EPOCHS} epochs; max_epochs=-1 never ends",
                stacklevel=4,
            )
            self._max_epochs = _DEFAULT_EPOCHS

    def _sanity_check(self, evaluation: Evaluation) -> None:
        """Run a little validation first; leaves no trace in metrics, counters or randomness."""
        if self.num_sanity_val_steps <= 0:
            return
        with seeding.isolated():
            self.sanity_checking = True
            try:
                evaluation.run(self.num_sanity_val_steps)
            finally:
                self.sanity_checking = False
        self._metrics.forget()

    def _warn_at_start(self, model: Module) -> None:
        if not self.is_global_zero:
            return
        evaluating = sum(not part.training for part in model.modules())
        if evaluating:
            warnings.warn(
                f"{evaluating} submodules are in eval mode and stay so while training", stacklevel=4
            )
        if self._logs and self._num_training_batches < self.log_every_n_steps:
            warnings.warn(
                f"an epoch has {self._num_training_batches:.0f} batches, fewer than "
                f"log_every_n_steps={self.log_every_n_steps}: step values will be rare in "
                "metrics.csv",
                stacklevel=4,
            )

    # -- elsewhere ---------------------------------------------------------------------------

    def _run_elsewhere(self, index: int, choice: launching.Choice, model: Module) -> None:
        from gpulayer_mesh.core.jobspec import JobKind

        if self.accelerator == "cpu":
            precision.check(self.precision, "cpu")
        with tempfile.TemporaryDirectory() as scratch:
            files = results.replay_files(index, Path(scratch))
            outcome = launching.run(
                choice,
                kind=JobKind.DISTRIBUTED,
                nodes=self.num_nodes,
                devices=self.devices,
                accelerator=launching.accelerator_of(self.accelerator),
                target=self.target,
                env=self._env,
                secrets=self._secrets,
                stop_grace_s=self._stop_grace_s,
                call=index,
                extra_files=files,
            )
        if outcome.code != 0:
            raise SystemExit(outcome.code)  # the job's last words are on the screen
        if outcome.output_dir is None:
            raise RuntimeError(f"job {outcome.job} brought no files back")
        found = outcome.output_dir / results.FOLDER / str(index)
        self._adopt(results.read(found), model)
        if self._log_dir is not None:  # ranks here wrote into this folder if they were told to
            came = outcome.output_dir / self._log_dir
            self._log_dir = came if came.is_dir() else environment.START_DIR / self._log_dir
        results.remember_files(index, found)

    def _replay(self, index: int, model: Module) -> None:
        """Return the recorded result of an earlier call of the script."""
        folder = environment.copied_env().get(results.REPLAY_VARIABLE, results.REPLAY)
        self._adopt(results.read(environment.START_DIR / folder / str(index)), model)

    def _adopt(self, result: results.Result, model: Module) -> None:
        self._module = model
        model._trainer = self
        model.configure_model()  # it may make the layers that the weights belong to
        results.restore(result, self, model)

    def _counters(self) -> dict[str, Any]:
        # Relative to where it comes home to: a root the user gave lies in the working folder.
        output = self.default_root_dir if self._root_dir is None else environment.START_DIR
        log_dir = None if self.log_dir is None else environment.START_DIR / self.log_dir
        inside = log_dir is not None and log_dir.is_relative_to(output)
        return {
            "global_step": self._global_step,
            "epochs_processed": self._epochs_processed,
            "epochs_completed": self._epochs_completed,
            "total_batches": self._total_batches,
            "batches_that_stepped": self._batches_that_stepped,
            "should_stop": self.should_stop,
            "num_training_batches": _plain(self._num_training_batches),
            "log_dir": str(log_dir.relative_to(output)) if log_dir and inside else None,
        }

    def _restore(
        self,
        counters: Mapping[str, Any],
        callback: dict[str, Tensor],
        logged: dict[str, Tensor],
        progress: dict[str, Tensor],
    ) -> None:
        self._global_step = counters["global_step"]
        self._epochs_processed = counters["epochs_processed"]
        self._epochs_completed = counters["epochs_completed"]
        self._total_batches = counters["total_batches"]
        self._batches_that_stepped = counters["batches_that_stepped"]
        self.should_stop = counters["should_stop"]
        batches = counters["num_training_batches"]
        self._num_training_batches = float("inf") if batches is None else batches
        self._log_dir = Path(counters["log_dir"]) if counters["log_dir"] else None
        self._metrics.forget()
        self._metrics.callback.update(callback)
        self._metrics.logged.update(logged)
        self._metrics.progress.update(progress)

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

    def _after_validation(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _progress_epoch_start(self) -> None:
        if self._progress is not None:
            self._progress.epoch_start()

    def _progress_step(self, done: int, total: float, loss: Tensor | None) -> None:
        progress = self._progress
        if progress is not None and progress.due() and self.is_global_zero:
            if loss is not None:
                loss = loss * self.accumulate_grad_batches
            progress.step(self.current_epoch, done, total, loss, self._metrics.progress)

    def _epoch_end(self, done: int) -> None:
        if self._file is not None:
            self._file.flush()
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
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps that this fit will make; inf where nothing limits it."""
        self._load_training_data()
        batches, epochs = self._num_training_batches, self._max_epochs
        if batches == float("inf") or epochs == -1:
            return float("inf") if self.max_steps == -1 else self.max_steps
        steps = math.ceil(batches / self.accumulate_grad_batches) * max(epochs, 1)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    @property
    def default_root_dir(self) -> Path:
        if self._root_dir is not None:
            return self._root_dir
        place = environment.rank_env()
        return (place.output_dir if place else None) or Path.cwd()

    @property
    def log_dir(self) -> Path | None:
        """The directory of metrics.csv; None before anything was logged, and on other ranks."""
        if self._file is not None and self._file.started:
            return self._file.directory
        return self._log_dir

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


def _plain(count: float) -> int | None:
    return None if count == float("inf") else int(count)
