"""What a Trainer call consists of around its loop, in this process: set-up, hooks, tear-down.

The order of calls is Lightning's. Does not know where else a call could run (`calls`), nor what a
batch is (`loop`, `evaluation`, `prediction`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpulayer.pytorch import again, arguments, backends, checkpoints, data, optimizers, seeding
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.evaluation import Evaluation, Outputs
from gpulayer.pytorch.hooks import Hooks
from gpulayer.pytorch.loop import FitLoop, fit_batches
from gpulayer.pytorch.module import Module, explain, overridden
from gpulayer.pytorch.prediction import Prediction
from gpulayer.pytorch.runtime import Runtime, agreed, by_rank, gathered
from gpulayer.pytorch.stopping import Signals
from gpulayer.pytorch.strategy import Replicated, Strategy
from gpulayer.pytorch.timer import Timer

if TYPE_CHECKING:
    from gpulayer.pytorch.trainer import Trainer

_DEFAULT_EPOCHS = 1000  # Lightning's, when neither epochs nor steps are limited


class TrainingData:
    """The training loader of a fit, built when it is first needed."""

    def __init__(self, trainer: Trainer, module: Module, given: data.Loader | None) -> None:
        self._trainer = trainer
        self._module = module
        self._given = given
        self._loader: data.Loader | None = None

    def load(self) -> data.Loader:
        """Return this rank's loader; the trainer then knows the number of batches."""
        if self._loader is not None:
            return self._loader
        source, trainer = self._given, self._trainer
        if source is None:
            if not overridden(self._module, "train_dataloader"):
                raise ArgumentError(
                    "there is no training loader",
                    hint="pass train_dataloaders to fit, or define train_dataloader",
                )
            source = self._module.train_dataloader()
        runtime = trainer.runtime
        self._loader = data.for_training(
            source,
            runtime.rank,
            runtime.world_size,
            seed=trainer._seeds[0],
            inject=trainer.use_distributed_sampler,
            init=seeding.worker_init(runtime.rank, trainer._seeds[1]),
        )
        trainer._num_training_batches = fit_batches(self._loader, trainer.limit_train_batches)
        trainer._loaders["train"] = self._loader
        return self._loader


def check_fit(model: Module) -> None:
    """Raise where a module lacks what fit calls."""
    for name in ("training_step", "configure_optimizers"):
        if not overridden(model, name):
            raise ArgumentError(f"{type(model).__name__} defines no {name}")


def fit(
    trainer: Trainer,
    model: Module,
    train: data.Loader | None,
    val: data.Loaders | None,
    ckpt_path: str | None,
) -> None:
    """Train `model` in this process, which may be one of several ranks."""
    trainer.should_stop = trainer._ran_elsewhere = False
    trainer._loop = None
    if trainer._progress is not None:
        trainer._progress.fit_start()
    _limits(trainer)
    trainer._again = restart = again.of_fit(trainer._call, ckpt_path)
    with _around(trainer, model, "fit"):
        trainer._data = TrainingData(trainer, model, train)
        try:
            if restart is not None:
                restart.start(trainer)
            validates = _validates(trainer, model, val)
            checkpoint = _load(
                trainer, model, ckpt_path, checkpoints.load_for_fit, restart, validates=validates
            )
            evaluation, strategy = _prepare(trainer, model, val, validates)
            _call(trainer, "on_fit_start")
            _log_hyperparameters(trainer, model)
            resume = None
            if checkpoint is not None:
                goes_on = restart is not None and restart.checkpoint is not None
                resume = checkpoints.restore_training(trainer, checkpoint, again=goes_on)
                del checkpoint  # as large as the weights and the optimizer's state
            model.zero_grad()
            begins = resume is None or not (resume.within_epoch or resume.again)
            if evaluation is not None and begins:
                _sanity_check(trainer, evaluation)
            if trainer.limit_train_batches != 0:
                loader = trainer._data.load()
                batches = trainer.num_training_batches
                trainer.runtime.agree("the number of training batches", arguments.plain(batches))
                steps = trainer.estimated_stepping_batches
                backends.set_benchmark(trainer.benchmark, trainer.deterministic, steps)
                _warn_at_start(trainer, model)
                trainer._loop = FitLoop(
                    trainer, model, loader, batches, evaluation, strategy, resume
                )
                trainer._loop.run()
        finally:
            trainer._flush()
            trainer._again = None
            model._manual = None
        strategy.release()
        _call(trainer, "on_fit_end")


def evaluate(
    trainer: Trainer,
    model: Module,
    stage: str,
    loaders: data.Loaders | None,
    ckpt_path: str | None,
    verbose: bool,
) -> Outputs:
    """Run `validate` or `test` in this process; returns one dict of epoch values per loader."""
    prefix = "test" if stage == "test" else "val"
    step = "test_step" if stage == "test" else "validation_step"
    if not overridden(model, step):
        raise ArgumentError(f"{type(model).__name__} defines no {step}")
    with _around(trainer, model, stage):
        source = _source(model, f"{prefix}_dataloader", loaders)
        _load(trainer, model, ckpt_path, checkpoints.load)
        _to_device(trainer, model)
        _log_hyperparameters(trainer, model)
        try:
            found = Evaluation(trainer, model, stage, source).run()
        finally:
            trainer._flush()
        model.cpu()
    if verbose:
        trainer._show(stage, found)
    return found


def predict(
    trainer: Trainer,
    model: Module,
    loaders: data.Loaders | None,
    ckpt_path: str | None,
    *,
    keep: bool,
    whole_batches: bool,
) -> list[list[Any]] | None:
    """Run `predict` in this process; returns this rank's share: loaders x batches."""
    with _around(trainer, model, "predict"):
        if trainer.limit_predict_batches == 0:
            return None
        source = _source(model, "predict_dataloader", loaders)
        _load(trainer, model, ckpt_path, checkpoints.load)
        _to_device(trainer, model)
        _log_hyperparameters(trainer, model)
        found = Prediction(trainer, model, source(), keep=keep, whole_batches=whole_batches).run()
        model.cpu()
    return found


@contextmanager
def _around(trainer: Trainer, model: Module, stage: str) -> Iterator[None]:
    """Attach the module, set up, and tear down; an exception reaches `on_exception`."""
    trainer._begin(model, stage)
    keeper = [] if trainer._again is None else [again.Keeper(trainer._again)]
    hooks = trainer._hooks = Hooks(trainer, model, [*trainer.callbacks, *keeper])
    with Signals(trainer._signalled):
        try:
            backends.set_deterministic(trainer.deterministic)
            backends.set_benchmark(trainer.benchmark, trainer.deterministic, steps=0)
            trainer._runtime = runtime = Runtime(
                trainer.accelerator,
                trainer.precision,
                find_unused_parameters=trainer.strategy == "ddp_find_unused_parameters_true",
            )
            trainer._metrics.start(runtime)
            trainer._open_log()
            if overridden(model, "prepare_data"):
                if runtime.local_rank == 0:
                    model.prepare_data()
                runtime.barrier()
            _call(trainer, "setup", stage)
            model.configure_model()
            trainer._metrics.forget()
            yield
            _call(trainer, "teardown", stage)
        except BaseException as error:
            trainer.interrupted = True
            explain(error)
            hooks.of_callbacks("on_exception", error)
            raise
        finally:
            trainer.stage = None


def _call(trainer: Trainer, name: str, *args: Any) -> None:
    """Call a hook in which nothing may be logged."""
    hook = trainer._hooks[name]
    if hook is not None:
        trainer._metrics.hook = ""
        hook(*args)


def _source(model: Module, name: str, given: data.Loaders | None) -> Callable[[], data.Loaders]:
    if given is not None:
        return lambda: given
    if not overridden(model, name):
        raise ArgumentError(
            f"there are no loaders: pass dataloaders, or define {name} in the module"
        )
    made: Callable[[], data.Loaders] = getattr(model, name)
    return made


def _load(
    trainer: Trainer,
    model: Module,
    ckpt_path: str | None,
    read: Callable[[str], checkpoints.Checkpoint],
    restart: again.FitAgain | None = None,
    *,
    validates: bool | None = None,
) -> checkpoints.Checkpoint | None:
    """Load weights and states of callbacks from a checkpoint, if one was asked for.

    Here ranks meet first, and compare what they start with.

    Args:
        restart: a fit that may have begun in an earlier attempt: what it had come to goes before.
        validates: whether a fit has a validation; None: it is no fit.
    """
    trainer.ckpt_path = ckpt_path
    goes_on = None if restart is None else restart.checkpoint
    source = ckpt_path if goes_on is None else str(goes_on)
    found = None if source is None else read(source)
    point = found and [found.get("epoch"), found.get("global_step")]
    everyone = gathered(trainer.runtime, [point, validates, seeding.sampler_seed()])
    points, validations, seeds = (list(column) for column in zip(*everyone, strict=True))
    agreed("the epoch and step of the checkpoint", points)
    agreed("whether there is a validation", validations)
    ranks = [] if found is None or validates is None else found["ranks"]
    _choose_seeds(trainer, seeds, ranks)
    if found is not None:
        if restart is not None and goes_on is not None:
            restart.take(trainer, found)
        else:
            again.move(trainer, found)
        checkpoints.restore_module(trainer, model, found, again=goes_on is not None)
    return found


def _choose_seeds(trainer: Trainer, seeds: list[int], ranks: list[Any]) -> None:
    """Take the seeds of loaders from what ranks were seeded with, or from a checkpoint's ranks.

    Samplers need one seed, or samples are trained twice and others not at all.
    """
    rank, world = trainer.global_rank, trainer.world_size
    trainer._seeds = seeds[0], seeds[rank]
    if ranks and "seeds" in ranks[0]:
        same = len(ranks) == world
        trainer._seeds = ranks[0]["seeds"][0], ranks[rank]["seeds"][1] if same else seeds[rank]
    elif len(set(seeds)) > 1 and rank == 0:
        warnings.warn(
            f"seeds differ between ranks ({by_rank(seeds)}): samples are shared out by rank 0's; "
            "every rank draws other random numbers also with one seed for all",
            stacklevel=6,
        )


def _to_device(trainer: Trainer, model: Module) -> None:
    """Bring the module to its device, equal on all ranks; nothing is wrapped: nothing trains."""
    runtime = trainer.runtime
    model.to(runtime.device)
    runtime.equalise(model)


def _log_hyperparameters(trainer: Trainer, model: Module) -> None:
    """Write hparams.yaml on the rank that logs, if the module saved hyperparameters for it."""
    found = model.hparams_initial
    if trainer._file is not None and found and model._logs_hparams:
        trainer._file.write_hyperparameters(found)


# -- fit ------------------------------------------------------------------------------------------


def _limits(trainer: Trainer) -> None:
    trainer._min_epochs = trainer.min_epochs
    if trainer.min_epochs is None and trainer.min_steps is not None:
        trainer._min_epochs = 1
    trainer._max_epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
    timed = any(isinstance(one, Timer) for one in trainer.callbacks)
    if trainer.max_epochs is None and trainer.max_steps == -1 and not timed:
        warnings.warn(
            f"neither max_epochs nor max_steps is given: training ends after "
            f"{_DEFAULT_EPOCHS} epochs; max_epochs=-1 never ends",
            stacklevel=5,
        )
        trainer._max_epochs = _DEFAULT_EPOCHS


def _prepare(
    trainer: Trainer, model: Module, val: data.Loaders | None, validates: bool
) -> tuple[Evaluation | None, Strategy]:
    """Bring the module to its device, ready to train, and build optimizers and validation."""
    runtime = trainer.runtime
    strategy = trainer._strategy = _strategy(trainer, model)
    strategy.prepare()  # also makes all ranks' weights equal
    if runtime.world_size > 1:
        seeding.diverge(runtime.rank)
    trainer.optimizers, trainer.lr_scheduler_configs = optimizers.parse(
        model.configure_optimizers(),
        custom_stepping=overridden(model, "lr_scheduler_step"),
        several=not model.automatic_optimization,
    )
    given, stepped = _has_validation(model, val)
    if stepped != given:
        absent = "no validation loader" if stepped else "no validation_step"
        warnings.warn(f"there is {absent}: validation is skipped", stacklevel=5)
    if not validates:
        return None, strategy
    return Evaluation(trainer, model, "fit", _source(model, "val_dataloader", val)), strategy


def _validates(trainer: Trainer, model: Module, val: data.Loaders | None) -> bool:
    """Return whether a fit has a validation."""
    given, stepped = _has_validation(model, val)
    return given and stepped and trainer.limit_val_batches != 0


def _has_validation(model: Module, val: data.Loaders | None) -> tuple[bool, bool]:
    """Return whether there are loaders for it, and a step."""
    given = val is not None or overridden(model, "val_dataloader")
    return given, overridden(model, "validation_step")


def _strategy(trainer: Trainer, model: Module) -> Strategy:
    if trainer.strategy == "fsdp":
        from gpulayer.pytorch.sharded import FullySharded

        return FullySharded(trainer.runtime, model)
    return Replicated(trainer.runtime, model)


def _sanity_check(trainer: Trainer, evaluation: Evaluation) -> None:
    """Run a little validation first; leaves no trace in metrics, counters or randomness."""
    if trainer.num_sanity_val_steps <= 0:
        return
    with seeding.isolated():
        trainer.sanity_checking = True
        try:
            trainer._hooks.of_callbacks("on_sanity_check_start")
            evaluation.run(trainer.num_sanity_val_steps)
            trainer._hooks.of_callbacks("on_sanity_check_end")
            trainer._metrics.forget()
        finally:
            trainer.sanity_checking = False


def _warn_at_start(trainer: Trainer, model: Module) -> None:
    if not trainer.is_global_zero:
        return
    evaluating = sum(not part.training for part in model.modules())
    if evaluating:
        warnings.warn(
            f"{evaluating} submodules are in eval mode and stay so while training", stacklevel=5
        )
    if trainer._logs and trainer.num_training_batches < trainer.log_every_n_steps:
        warnings.warn(
            f"an epoch has {trainer.num_training_batches:.0f} batches, fewer than "
            f"log_every_n_steps={trainer.log_every_n_steps}: step values will be rare in "
            "metrics.csv",
            stacklevel=5,
        )
