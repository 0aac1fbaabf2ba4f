"""`ModelCheckpoint`: when a fit writes checkpoints, what they are called, and which ones stay.

Names, arguments and rules are Lightning's, of version 2.6 where versions differ (`save_last`). All
ranks decide together, paths and ranking are rank 0's. Differences: a save that falls on the same
batch as a validation comes after it, so that its metric is fresh; a trial run writes nothing; and
several ranks look at the clock of `train_time_interval` as `cadence` says. What is in a file is not
known here (`checkpoints`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from gpulayer.env import rank_env
from gpulayer.pytorch import arguments
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.cadence import Cadence
from gpulayer.pytorch.callback import Checkpoint

if TYPE_CHECKING:
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.trainer import Trainer

_T = TypeVar("_T")


class ModelCheckpoint(Checkpoint):
    """Writes checkpoints while a fit runs.

    Args:
        dirpath: default: `checkpoints` in the log directory of the run, or without a logger in
            `default_root_dir`.
        filename: a template, "{epoch}-{step}" by default; any logged name may stand in it, as in
            "{epoch}-{val_loss:.2f}".
        monitor: the logged value to compare by; None keeps the latest.
        verbose: print what is saved.
        save_last: also write `last.ckpt` when a checkpoint is saved, and at the end of a training
            that saved none; "link" makes it a link to that checkpoint.
        save_top_k: how many to keep, the best by `monitor`; -1 is all, 0 none.
        save_weights_only: leave out what only resuming needs.
        mode: "min" or "max": which value of `monitor` is better.
        auto_insert_metric_name: write "name=" before each value in the file's name.
        every_n_train_steps: save after every so many optimizer steps. At most one of this and the
            two below is given; with none, every epoch saves.
        train_time_interval: save when so much time has passed, after the batch in hand.
        every_n_epochs: save only in such epochs.
        save_on_train_epoch_end: at the end of an epoch, or (False) of a validation; default: of an
            epoch, if a validation runs at the end of each.
        enable_version_counter: append -v1, -v2, ... where a file of that name exists.
        save_final: write `final.ckpt` at the end of a fit, also of one that a signal ended, if no
            other file holds that state; default: unless `save_top_k` is 0.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    CHECKPOINT_NAME_FINAL = "final"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        *,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        save_final: bool | None = None,
        **unknown: Any,
    ) -> None:
        arguments.refuse("ModelCheckpoint", unknown)
        if mode not in ("min", "max"):
            raise ArgumentError(f'mode of a ModelCheckpoint is "min" or "max", not {mode!r}')
        self._given = None if not dirpath else os.path.realpath(os.path.expanduser(dirpath))
        self.dirpath = self._given
        self._adopted = False
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_final = save_top_k != 0 if save_final is None else save_final
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        triggers = (every_n_train_steps, every_n_epochs, train_time_interval)
        self._every_n_train_steps = every_n_train_steps or 0
        self._every_n_epochs = 1 if triggers == (None, None, None) else every_n_epochs or 0
        self._train_time_interval = train_time_interval
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._enable_version_counter = enable_version_counter
        self._check_arguments()
        self.current_score: Tensor | None = None
        self.best_k_models: dict[str, Tensor] = {}
        self.kth_best_model_path = ""
        self.kth_value = torch.tensor(torch.inf if mode == "min" else -torch.inf)
        self.best_model_score: Tensor | None = None
        self.best_model_path = ""
        self.last_model_path = ""
        self.final_model_path = ""
        self._last_step_saved = 0  # nothing is saved before the first step
        self._last_file_saved = ""
        self._waits_for_metric = False
        self._waits_for_validation = False
        self._cadence: Cadence | None = None
        self._looked_s = 0.0

    def _check_arguments(self) -> None:
        least = {"save_top_k": (self.save_top_k, -1),
                 "every_n_train_steps": (self._every_n_train_steps, 0),
                 "every_n_epochs": (self._every_n_epochs, 0)}  # fmt: skip
        for name, (value, bound) in least.items():
            if value < bound:
                raise ArgumentError(f"{name} must be at least {bound}, got {value!r}")
        timed = self._train_time_interval is not None
        if (self._every_n_train_steps > 0) + (self._every_n_epochs > 0) + timed > 1:
            raise ArgumentError(
                "a ModelCheckpoint saves by one of every_n_train_steps, every_n_epochs and "
                "train_time_interval",
                hint="several of them are several callbacks",
            )
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            raise ArgumentError(
                f"save_top_k={self.save_top_k} needs something to compare by",
                hint='name it: monitor="val_loss"',
            )

    @property
    def every_n_epochs(self) -> int:
        return self._every_n_epochs

    # -- state -------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        named = {
            "monitor": self.monitor,
            "mode": self.mode,
            "every_n_train_steps": self._every_n_train_steps,
            "every_n_epochs": self._every_n_epochs,
            "train_time_interval": self._train_time_interval,
        }
        return f"{type(self).__qualname__}{named!r}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "current_score": self.current_score,
            "dirpath": self.dirpath,
            "best_k_models": dict(self.best_k_models),
            "kth_best_model_path": self.kth_best_model_path,
            "kth_value": self.kth_value,
            "last_model_path": self.last_model_path,
            "final_model_path": self.final_model_path,
            "last_step_saved": self._last_step_saved,
            "last_file_saved": self._last_file_saved,
            "waits": [self._waits_for_metric, self._waits_for_validation],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_model_path = state_dict["best_model_path"]
        self._last_step_saved = state_dict.get("last_step_saved", 0)
        if state_dict["dirpath"] != self.dirpath:
            if not self._adopted:  # else both are folders of jobs, which nobody chose
                warnings.warn(
                    f"dirpath was {state_dict['dirpath']!r} and is {self.dirpath!r}: of the "
                    "checkpoint callback's state best_model_path alone is taken over",
                    stacklevel=2,
                )
            return
        self.best_model_score = state_dict["best_model_score"]
        self.best_k_models = state_dict["best_k_models"]
        self.kth_best_model_path = state_dict["kth_best_model_path"]
        self.kth_value = state_dict["kth_value"]
        self.last_model_path = state_dict["last_model_path"]

    def adopt(self, state_dict: dict[str, Any]) -> None:
        self.dirpath, self._adopted = state_dict["dirpath"], True
        self.load_state_dict(state_dict)
        self.current_score = state_dict["current_score"]
        self.final_model_path = state_dict["final_model_path"]

    def files(self) -> list[Path]:
        found = Path(self.dirpath).rglob(f"*{self.FILE_EXTENSION}") if self.dirpath else ()
        return sorted(found)

    def can_go_on(self) -> bool:
        timed = self._train_time_interval is not None
        saves = self._every_n_train_steps > 0 or self._every_n_epochs > 0 or timed
        kept = self.save_top_k != 0 or bool(self.save_last)
        return saves and kept and not self.save_weights_only

    def go_on(self, state_dict: dict[str, Any]) -> None:
        self.load_state_dict(state_dict)
        if state_dict["dirpath"] == self.dirpath:
            self.current_score = state_dict["current_score"]
            self.final_model_path = state_dict["final_model_path"]
            self._last_file_saved = state_dict["last_file_saved"]
            self._waits_for_metric, self._waits_for_validation = state_dict["waits"]

    def moved(self, folder_from: Path, folder_to: Path) -> None:
        def here(path: str) -> str:
            if not path or not Path(path).is_relative_to(folder_from):
                return path
            came = folder_to / Path(path).relative_to(folder_from)
            return str(came) if came.exists() else path

        self.dirpath = self.dirpath and here(self.dirpath)
        self.best_model_path = here(self.best_model_path)
        self.last_model_path = here(self.last_model_path)
        self.final_model_path = here(self.final_model_path)
        self.kth_best_model_path = here(self.kth_best_model_path)
        self.best_k_models = {here(path): score for path, score in self.best_k_models.items()}

    # -- hooks -------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if stage != "fit":
            return
        if self._adopted:  # that directory belongs to another job
            self.dirpath, self._adopted = self._given, False
        again = trainer._again is not None and trainer._again.again
        if self.dirpath is not None and not self._last_file_saved and not again:
            self._warn_of_others_files(trainer)
        chosen = self.dirpath or str(self._directory(trainer))
        self.dirpath = _rank_zeros(trainer, chosen)

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._looked_s = monotonic()
        if self._train_time_interval is not None:
            self._cadence = Cadence(trainer.runtime, monotonic)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = self._every_n_train_steps
        if not (steps and trainer.global_step % steps == 0):
            if self._cadence is None or not self._cadence.after_batch(self._left_s):
                return
            self._looked_s = monotonic()
        if self.monitor is not None and self._waits(trainer):
            return
        if not self._saves_nothing_now(trainer):
            self._save(trainer)
            self._save_last(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._saves_nothing_now(trainer) and self._at_epoch_end(trainer):
            self._save_by_epoch(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._saves_nothing_now(trainer):
            return
        at_epoch_end = self._at_epoch_end(trainer)
        waits, self._waits_for_validation = self._waits_for_validation, False
        if waits or (self._waits_for_metric and not at_epoch_end):
            self._waits_for_metric = False
            self._save(trainer)
            self._save_last(trainer)
        elif not at_epoch_end:
            self._save_by_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self.save_last and not self._last_file_saved and not trainer.fast_dev_run:
            self._save_last(trainer)

    def holds_now(self, trainer: Trainer) -> str | None:
        path = self._last_file_saved
        if self._last_step_saved != trainer.global_step or self.save_weights_only or not path:
            return None
        return _rank_zeros(trainer, path if os.path.exists(path) else None)

    def save_end(self, trainer: Trainer) -> str | None:
        if not self.save_final or trainer.fast_dev_run:
            return None
        assert self.dirpath is not None  # since setup
        path = os.path.join(self.dirpath, self.CHECKPOINT_NAME_FINAL + self.FILE_EXTENSION)
        self.final_model_path = path  # before it is written: it is part of the file
        trainer.save_checkpoint(path, self.save_weights_only)
        return path

    def _waits(self, trainer: Trainer) -> bool:
        """Return whether a save is put off until a validation has run."""
        assert self.monitor is not None
        if trainer._validation_follows() and not trainer._metrics.of_training(self.monitor):
            self._waits_for_validation = True
        elif self.monitor not in trainer.callback_metrics or (
            trainer._ends_validating_epoch() and not self._at_epoch_end(trainer)
        ):
            self._waits_for_metric = True
        else:
            return False
        return True

    def _left_s(self) -> float:
        assert self._train_time_interval is not None
        return self._train_time_interval.total_seconds() - (monotonic() - self._looked_s)

    # -- when --------------------------------------------------------------------------------

    def _saves_nothing_now(self, trainer: Trainer) -> bool:
        return (
            bool(trainer.fast_dev_run)
            or trainer.stage != "fit"
            or trainer.sanity_checking
            or self._last_step_saved == trainer.global_step
        )

    def _at_epoch_end(self, trainer: Trainer) -> bool:
        """Return whether it saves at the end of epochs and not of validations."""
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        by_time = isinstance(trainer.val_check_interval, timedelta)
        if by_time or trainer.check_val_every_n_epoch != 1:
            return False
        # An int 1 counts here too: Lightning does not tell them apart at this point.
        return trainer._validation_batches() == 0 or trainer.val_check_interval == 1.0

    def _save_by_epoch(self, trainer: Trainer) -> None:
        every = self._every_n_epochs
        if every and (trainer.current_epoch + 1) % every == 0:
            self._save(trainer)
        if self._last_step_saved == trainer.global_step or (
            self.save_last == "link" and self._last_file_saved
        ):
            self._save_last(trainer)

    # -- what --------------------------------------------------------------------------------

    def _save(self, trainer: Trainer) -> None:
        """Save if it is among the best, and remove what no longer is."""
        if self.save_top_k == 0:
            return
        values = self._values(trainer)
        if self.monitor is None:
            previous = self.best_model_path
            path = self._free_path(trainer, values, None, previous)
            self.best_model_path = path  # before it is written: it is part of the file
            self._write(trainer, path)
            if self.save_top_k == 1:
                self._remove(trainer, previous, path)
            return
        current = values.get(self.monitor)
        if current is None:
            self._complain(trainer, values)
        # A rank that lacks the metric, or has a worse one, keeps all from saving.
        if trainer.runtime.any(not self._among_best(current)):
            if self.verbose and current is not None:
                self._tell(trainer, f"{self.monitor} was not in top {self.save_top_k}")
            return
        assert current is not None
        self._save_ranked(trainer, values, current)

    def _save_ranked(self, trainer: Trainer, values: dict[str, Tensor], current: Tensor) -> None:
        k = len(self.best_k_models) + 1 if self.save_top_k == -1 else self.save_top_k
        removed = ""
        if len(self.best_k_models) == k:
            removed = self.kth_best_model_path
            del self.best_k_models[removed]
        if current.isnan():
            current = torch.full_like(current, torch.inf if self.mode == "min" else -torch.inf)
        path = self._free_path(trainer, values, None, removed)
        self.current_score = current
        self.best_k_models[path] = current
        best, worst = (min, max) if self.mode == "min" else (max, min)
        ranked = self.best_k_models
        chosen = [best(ranked, key=ranked.__getitem__), worst(ranked, key=ranked.__getitem__)]
        self.best_model_path, kth = _rank_zeros(trainer, chosen)
        self.best_model_score = ranked[self.best_model_path]
        if len(ranked) == k:
            self.kth_best_model_path, self.kth_value = kth, ranked[kth]
        if self.verbose:
            text = f"{self.monitor} reached {current:0.5f} (best {self.best_model_score:0.5f})"
            self._tell(trainer, f"{text}, saving {path} as top {k}")
        self._write(trainer, path)
        self._remove(trainer, removed, path)

    def _among_best(self, current: Tensor | None) -> bool:
        if current is None:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        kth = self.best_k_models[self.kth_best_model_path]
        return bool(current < kth if self.mode == "min" else current > kth)

    def _complain(self, trainer: Trainer, values: dict[str, Tensor]) -> None:
        text = f"ModelCheckpoint monitors {self.monitor!r}, which has not been logged; known: "
        text += str(sorted(values))
        if trainer.world_size > 1:
            text += f"; this is rank {trainer.global_rank}, all must log it"
        if trainer._has_validated():
            raise ArgumentError(text)
        if trainer.is_global_zero:
            warnings.warn(text, stacklevel=2)

    def _save_last(self, trainer: Trainer) -> None:
        if not self.save_last:
            return
        previous = self.last_model_path
        name = self.CHECKPOINT_NAME_LAST
        path = self._free_path(trainer, self._values(trainer), name, previous)
        self.last_model_path = path
        if self.save_last == "link" and self._last_file_saved and self.save_top_k != 0:
            if trainer.is_global_zero:
                _link(Path(self._last_file_saved), Path(path))
            trainer.runtime.barrier()
        else:
            self._write(trainer, path)
        self._remove(trainer, previous, path)

    def _write(self, trainer: Trainer, path: str) -> None:
        self._last_step_saved = trainer.global_step  # before: it is part of the file
        self._last_file_saved = path
        trainer.save_checkpoint(path, self.save_weights_only)

    def _remove(self, trainer: Trainer, path: str, replaced_by: str) -> None:
        """Remove a file of this callback's directory that another one took the place of."""
        if not path or path == replaced_by or not trainer.is_global_zero:
            return
        assert self.dirpath is not None
        resumed = trainer.ckpt_path
        old = Path(path).absolute()
        if resumed is not None and old == Path(resumed).absolute():
            return
        if Path(self.dirpath).absolute() in old.parents:
            old.unlink(missing_ok=True)

    def _tell(self, trainer: Trainer, text: str) -> None:
        if trainer.is_global_zero:
            trainer._say(f"epoch {trainer.current_epoch}, step {trainer.global_step}: {text}")

    # -- names -------------------------------------------------------------------------------

    def format_checkpoint_name(
        self,
        metrics: dict[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the path that a template becomes with these values."""
        template = filename or self.filename
        if not template:
            template = f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        values = dict(metrics)
        # Longest first: a name may be the beginning of another. Names are looked up as items, so
        # that dots and slashes may stand in them.
        for field in sorted(re.findall(r"(\{.*?)[:\}]", template), key=len, reverse=True):
            name = field[1:]
            if self.auto_insert_metric_name:
                template = template.replace(field, name + self.CHECKPOINT_EQUALS_CHAR + field)
            template = template.replace(field, f"{{0[{name}]")
            values.setdefault(name, torch.tensor(0))
        text = template.format(values)
        if prefix is not None:
            text = f"{prefix}{self.CHECKPOINT_JOIN_CHAR}{text}"
        if ver is not None:
            text = f"{text}{self.CHECKPOINT_JOIN_CHAR}v{ver}"
        text += self.FILE_EXTENSION
        return os.path.join(self.dirpath, text) if self.dirpath else text

    def _values(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return what may stand in a name: logged values, epoch and step."""
        found = {name: value.clone() for name, value in trainer.callback_metrics.items()}
        for name, now in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
            found[name] = found[name].int() if name in found else torch.tensor(now)
        return found

    def _free_path(
        self, trainer: Trainer, values: dict[str, Tensor], filename: str | None, replaced: str
    ) -> str:
        """Return a path at which nothing lies but the file that is replaced."""
        path = self.format_checkpoint_name(values, filename)
        version = self.STARTING_VERSION
        while (
            self._enable_version_counter
            and trainer.is_global_zero
            and os.path.exists(path)
            and path != replaced
        ):
            path = self.format_checkpoint_name(values, filename, version)
            version += 1
        return _rank_zeros(trainer, path)

    def _directory(self, trainer: Trainer) -> Path:
        """Return where files go by default; makes the log directory, on rank 0 only."""
        if self.dirpath is not None:
            return Path(self.dirpath)
        return (trainer._version_dir() or trainer._root()).absolute() / "checkpoints"

    def last_checkpoints(self, trainer: Trainer) -> list[Path]:
        folder = Path(self.dirpath) if self.dirpath else None
        if folder is None:
            folder = (trainer._logs_at() or trainer._root()) / "checkpoints"
        begins = re.compile(rf"^{self.CHECKPOINT_NAME_LAST}(-(\d+))?")
        return [
            path
            for path in sorted(folder.glob(f"*{self.FILE_EXTENSION}"))
            if begins.match(path.stem) and path.exists()
        ]

    def _warn_of_others_files(self, trainer: Trainer) -> None:
        folder = Path(self.dirpath or "")
        used = folder.is_dir() and any(folder.iterdir())
        if used and self.save_top_k != 0 and trainer.is_global_zero:
            warnings.warn(f"the checkpoint directory {folder} is not empty", stacklevel=2)


def _link(target: Path, link: Path) -> None:
    """Make `link` point to a file, relatively; in a job to the same data: links stay there."""
    if target.absolute() == link.absolute():
        return
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    else:
        link.unlink(missing_ok=True)
    try:
        if rank_env() is None:
            link.symlink_to(os.path.relpath(target, link.parent))
        else:
            link.hardlink_to(target)
    except OSError:  # some systems and users may not
        shutil.copy(target, link)


def _rank_zeros(trainer: Trainer, value: _T) -> _T:
    """Return rank 0's value on all ranks."""
    found: _T = json.loads(trainer.runtime.gather_text(json.dumps(value))[0])
    return found
