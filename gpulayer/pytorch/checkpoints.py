"""Checkpoint files: what they hold, how they are written and read, which one a call uses.

A file is one dictionary with Lightning's keys: `epoch`, `global_step`, `state_dict`, `loops` (our
counters and the place in the loop), `callbacks`, `optimizer_states`, `lr_schedulers`, `scaler`
under 16-mixed, `hyper_parameters`, and what hooks add; `gpulayer_version` says who wrote it, and
`ranks` holds what differs between them (`resume`). Rank 0 writes it, beside its final name first,
and reads it back before it gets that name. Files are read without running code from them
(`weights_only`). Does not know when one is written (`model_checkpoint`).
"""

from __future__ import annotations

import copy
import io
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpulayer import __version__
from gpulayer.pytorch import callback, hyperparameters, resume
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.resume import Place, Position, Resume

if TYPE_CHECKING:
    from gpulayer.pytorch.callback import Callback
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.trainer import Trainer

Checkpoint = dict[str, Any]

_COUNTERS = ("global_step", "epochs_processed", "epochs_completed", "total_batches",
             "batches_that_stepped")  # fmt: skip


# -- writing --------------------------------------------------------------------------------------


def save(trainer: Trainer, path: str | Path, weights_only: bool) -> None:
    """Write a checkpoint; every rank must call this, rank 0 writes."""
    module = trainer._module
    if module is None:
        raise ArgumentError(
            "there is nothing to save: this Trainer has had no model yet",
            hint="call save_checkpoint after or in fit, validate, test or predict",
        )
    if trainer._ran_elsewhere and not weights_only:
        raise ArgumentError(
            "the optimizer's state stayed with the ranks: a checkpoint to resume from cannot be "
            "written here",
            hint="ModelCheckpoint writes one there, which comes home; or pass weights_only=True",
        )
    checkpoint = _dump(trainer, module, weights_only)
    if trainer.is_global_zero:
        write(checkpoint, Path(path))
        whole = not weights_only and bool(checkpoint["ranks"])
        if trainer._again is not None and whole and not trainer.interrupted:
            trainer._again.keep(trainer, Path(path))
    if trainer._runtime is not None:
        trainer._runtime.barrier()


def _dump(trainer: Trainer, module: Module, weights_only: bool) -> Checkpoint:
    loop, strategy = trainer._loop, trainer._strategy
    at = Position(Place.BETWEEN, 0, False, True, False, 0) if loop is None else loop.position()
    counters = {name: getattr(trainer, f"_{name}") for name in _COUNTERS}
    if at.place is Place.BATCH:
        counters["total_batches"] -= 1  # the one in hand
    position = {name: getattr(at, name) for name in Position.__slots__} | {"place": str(at.place)}
    place = {"position": position}
    if trainer._again is not None:
        place["again"] = trainer._again.mark(trainer)
    checkpoint: Checkpoint = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "gpulayer_version": __version__,
        "state_dict": strategy.state_dict() if strategy else module.state_dict(),
        "loops": {"fit_loop": {**counters, **place}},
    }
    hyperparameters.dump(module, checkpoint)
    if weights_only:
        _call_hooks(trainer, module, checkpoint, [])
        return checkpoint
    checkpoint["callbacks"] = trainer._callback_states()
    checkpoint["optimizer_states"] = [
        strategy.optimizer_state(one) for one in trainer.optimizers if strategy
    ]
    checkpoint["lr_schedulers"] = [
        config.scheduler.state_dict() for config in trainer.lr_scheduler_configs
    ]
    runtime = trainer._runtime
    if runtime is not None and runtime.scaler is not None:
        checkpoint["scaler"] = runtime.scaler.state_dict()
    checkpoint["ranks"] = [] if loop is None else _of_all_ranks(trainer, resume.capture(loop, at))
    _call_hooks(trainer, module, checkpoint, trainer.callbacks)
    return checkpoint


def _call_hooks(
    trainer: Trainer, module: Module, checkpoint: Checkpoint, callbacks: list[Callback]
) -> None:
    """Let hooks add to a checkpoint, wherever in a fit it is written; nothing may be logged."""
    metrics, within = trainer._metrics, trainer._metrics.hook
    metrics.hook = "on_save_checkpoint"
    try:
        for one in callbacks:
            one.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
    finally:
        metrics.hook = within


def _of_all_ranks(trainer: Trainer, mine: dict[str, Any]) -> list[Any]:
    """Return every rank's part on rank 0."""
    if trainer.world_size == 1:
        return [mine]
    packed = io.BytesIO()
    torch.save(mine, packed)
    found = trainer.runtime.gather_bytes(packed.getvalue())
    return [torch.load(io.BytesIO(one), weights_only=True) for one in found]


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write a file that is there whole or not at all.

    Raises:
        ArgumentError: something in it could not be read back without running code.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        # Mapped, so that only the structure is read.
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        os.replace(temporary, path)
    except Exception as error:
        if _refused(error):
            raise _unreadable(checkpoint, error) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _unreadable(checkpoint: Checkpoint, error: Exception) -> ArgumentError:
    """Name the part of a checkpoint that cannot be read back."""
    parts = [(repr(key), value) for key, value in checkpoint.items()]
    parts += [
        (f"the state of {key}", value) for key, value in checkpoint.get("callbacks", {}).items()
    ]
    culprit = "something"
    for name, value in parts:
        packed = io.BytesIO()
        torch.save(value, packed)
        packed.seek(0)
        try:
            torch.load(packed, map_location="cpu", weights_only=True)
        except Exception:
            culprit = name
    return ArgumentError(
        f"{culprit} in the checkpoint could not be read back: {_found_in(error)}",
        hint="tensors, numbers, strings, and lists, tuples and dicts of them can",
    )


def _refused(error: Exception) -> bool:
    """Return whether reading would have had to run code; the type's module is not imported here."""
    return type(error).__name__ == "UnpicklingError"


def _found_in(error: Exception) -> str:
    """Return what reading stumbled over."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found[1] if found else str(error).partition("\n")[0]


# -- reading --------------------------------------------------------------------------------------


def load(path: str | Path, map_location: Any = "cpu") -> Checkpoint:
    """Read a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ArgumentError: it is no checkpoint, or holds more than tensors and plain data.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no checkpoint {str(path)!r}")
    try:
        found = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # of many types, by where in the file the damage is
        if _refused(error):
            raise ArgumentError(
                f"{str(path)!r} holds more than tensors and plain data: {_found_in(error)}",
                hint="code would have to run to read it; it was not written by this Trainer",
            ) from error
        raise ArgumentError(f"{str(path)!r} is damaged or no checkpoint: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), Mapping):
        raise ArgumentError(f"{str(path)!r} is no checkpoint: it has no 'state_dict'")
    return found


def where_it_was(storage: Any, location: str) -> Any:
    """Return a storage on the CPU where its device is not here, None to leave it to torch."""
    absent = (location.startswith("cuda") and not torch.cuda.is_available()) or (
        location.startswith("mps") and not torch.backends.mps.is_available()
    )
    return storage if absent else None


def load_for_fit(path: str | Path) -> Checkpoint:
    """Read a checkpoint that training can go on from."""
    found = load(path)
    if "gpulayer_version" not in found:
        raise ArgumentError(
            f"{str(path)!r} was not written by this Trainer: training cannot go on from it",
            hint="Module.load_from_checkpoint takes the weights alone",
        )
    if "optimizer_states" not in found:
        raise ArgumentError(
            f"{str(path)!r} holds weights only: training cannot go on from it",
            hint="write it with save_weights_only=False, or load the weights with "
            "Module.load_from_checkpoint",
        )
    return found


def restore_module(
    trainer: Trainer, module: Module, checkpoint: Checkpoint, *, again: bool = False
) -> None:
    """Load weights and states of callbacks, with their hooks.

    Args:
        again: it is of the same fit, in an earlier attempt.
    """
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"])
    states = checkpoint.get("callbacks")
    if states is None:
        return
    missing = sorted(states.keys() - {one.state_key for one in trainer.callbacks})
    if missing and trainer.is_global_zero:
        warnings.warn(
            f"the checkpoint has states of callbacks that this Trainer lacks: {missing}",
            stacklevel=2,
        )
    for one in trainer.callbacks:
        one.on_load_checkpoint(trainer, module, checkpoint)
    for one in trainer.callbacks:
        if states.get(one.state_key):
            state = copy.deepcopy(states[one.state_key])
            if again and isinstance(one, callback.Checkpoint):
                one.go_on(state)
            else:
                one.load_state_dict(state)


def restore_training(
    trainer: Trainer, checkpoint: Checkpoint, *, again: bool = False
) -> Resume | None:
    """Load scaler, counters, optimizers and schedulers; returns where to go on.

    Args:
        again: it is of the same fit, in an earlier attempt.

    Raises:
        ArgumentError: the checkpoint is of more epochs than are asked for, or of other optimizers.
    """
    runtime = trainer.runtime
    if runtime.scaler is not None and "scaler" in checkpoint:
        runtime.scaler.load_state_dict(checkpoint["scaler"])
    counters = checkpoint["loops"]["fit_loop"]
    for name in _COUNTERS:
        setattr(trainer, f"_{name}", counters[name])
    if trainer._max_epochs != -1 and trainer.current_epoch > trainer._max_epochs:
        raise ArgumentError(
            f"the checkpoint is of epoch {trainer.current_epoch}, beyond "
            f"max_epochs={trainer._max_epochs}"
        )
    states = checkpoint["optimizer_states"]
    if len(states) != len(trainer.optimizers):
        raise ArgumentError(
            f"the checkpoint has states of {len(states)} optimizers, and configure_optimizers "
            f"returned {len(trainer.optimizers)}"
        )
    assert trainer._strategy is not None
    for optimizer, state in zip(trainer.optimizers, states, strict=True):
        trainer._strategy.load_optimizer_state(optimizer, state)
    for config, state in zip(
        trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=False
    ):
        config.scheduler.load_state_dict(state)
    if not checkpoint["ranks"]:
        return None
    found = Resume(
        counters["position"], checkpoint["ranks"], trainer.global_rank, trainer.world_size, again
    )
    if again:  # with the same limits: what had ended stays so
        trainer.should_stop = counters["again"]["should_stop"]
        return found
    at = found.position
    if at.place is Place.EPOCH_END and at.within_epoch and trainer.max_steps != -1:
        trainer._epochs_processed -= 1
        found.finish_epoch()
    return found


# -- which one ------------------------------------------------------------------------------------


def choose(
    trainer: Trainer, call: str, asked: str | Path | None, *, model_given: bool
) -> str | None:
    """Return the file that a call loads, None for the weights as they are.

    Args:
        asked: a path, "best", "last" or None.
    """
    if asked is None and model_given:
        return None
    if asked is None:
        asked = "best"
        warnings.warn(
            f"{call}() without a model loads the best checkpoint of the last fit; "
            f'{call}(ckpt_path="best") says so, {call}(model) takes the weights as they are',
            stacklevel=5,
        )
    if asked == "best":
        return _best(trainer, call)
    if asked == "last":
        return _last(trainer, call)
    return str(asked)


def _best(trainer: Trainer, call: str) -> str:
    callbacks = trainer.checkpoint_callbacks
    if not callbacks:
        raise ArgumentError(f'{call}(ckpt_path="best"): this Trainer has no ModelCheckpoint')
    if len(callbacks) > 1:
        warnings.warn(
            f'{call}(ckpt_path="best") takes the best of the first of {len(callbacks)} callbacks '
            "that write checkpoints",
            stacklevel=6,
        )
    found = str(getattr(callbacks[0], "best_model_path", ""))
    if not found:
        why = "fast_dev_run writes none" if trainer.fast_dev_run else "none has been written"
        raise ArgumentError(
            f'{call}(ckpt_path="best"): there is no best checkpoint, {why}',
            hint="pass a path, or the model to take its weights as they are",
        )
    return found


def _last(trainer: Trainer, call: str) -> str | None:
    found: list[Path] = []
    for one in trainer.checkpoint_callbacks:
        found += one.last_checkpoints(trainer)
    if not found:
        warnings.warn(
            f'{call}(ckpt_path="last"): there is no last checkpoint, so none is loaded; '
            "ModelCheckpoint(save_last=True) writes them",
            stacklevel=6,
        )
        return None
    return str(max(found, key=lambda path: path.stat().st_mtime))
