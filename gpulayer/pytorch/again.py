"""Going on in the next attempt of a job that may start again (`restarts=N`).

Rank 0 keeps in its output folder, which survives: of each fit how it began (`<call>.json`), its
newest full checkpoint (`<call>.ckpt`, a second name of that file), and beside it the states in
which it left callbacks (`<call>-N.pt`) and the rows logged so far (`<call>-N.csv`), with a mark
that both are whole; one that rests (`<call>.rest.ckpt`), because files that change all the time are
never copied; which log folders were chosen (`logs.json`); and where this folder lay in all attempts
(`roots.json`). A checkpoint counts once all callbacks have had their turn at that hook, or files of
some would lack the last.

In a later attempt every rank finds that folder in `GPULAYER_RESTORED`, and its own files in place,
below another path. The same fit then goes on exactly where that checkpoint was written: what was
written after it is taken back.

Does not know how an attempt comes about or how files got there, nor what is in a checkpoint apart
from its own part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from gpulayer_mesh.core import ownfiles
from gpulayer_mesh.files import replace_file

from gpulayer import env as environment
from gpulayer.pytorch.callback import Checkpoint
from gpulayer.pytorch.resume import Place

if TYPE_CHECKING:
    from gpulayer.env import RankEnv
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.trainer import Trainer

_LOGS, _ROOTS = "logs.json", "roots.json"
# Copies take a file that stayed the same for two of their looks, 2 s apart, and then its transfer.
REST_S = 10.0
LATE_S = 600.0  # with no checkpoint: a fit that is shorter can well begin again
_chosen: list[str] = []  # log folders, by this process, so far
# In which order checkpoints of one batch are written; one in a batch trains that one again.
_PLACES = (Place.BATCH_END, Place.VALIDATION, Place.VALIDATED, Place.NEXT, Place.EPOCH_END,
           Place.BETWEEN, Place.BATCH)  # fmt: skip


def of_fit(call: int, ckpt_path: str | None) -> FitAgain | None:
    """Return what a fit keeps and goes on from; None where its job never starts again.

    Args:
        call: the index of the Trainer call in the script.
        ckpt_path: the checkpoint that it begins with.
    """
    place = _place()
    return None if place is None else FitAgain(place, call, ckpt_path)


def chosen(call: int, choose: Callable[[], str | None]) -> str | None:
    """Return the checkpoint that a fit begins with: the one that it began with before."""
    place = _place()
    began = None if place is None else _began(place, call)
    if place is None or began is None:
        return choose()
    path: str | None = _moved(began["ckpt_path"], _moves(place, _roots(place)))
    return path


def move(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Have a checkpoint of an earlier attempt name the files of this one; every rank calls this."""
    place = _place()
    if place is not None and place.restored is not None and "callbacks" in checkpoint:
        moves = _moves(place, _rank_zeros(trainer, place))
        checkpoint["callbacks"] = _moved(checkpoint["callbacks"], moves)


class FitAgain:
    """One fit of a job that may start again.

    Attributes:
        checkpoint: what it goes on from; None: it begins.
        again: whether this is not the first attempt.
        saving_end: whether the state at the end of the fit is being written.
        end_is_saved: whether an earlier attempt has done so.
    """

    def __init__(self, place: RankEnv, call: int, ckpt_path: str | None) -> None:
        self._place = place
        self._call = call
        self._began = _began(place, call)
        self._ckpt_path = ckpt_path
        # The first attempt's id: checkpoints of other jobs may lie in the same folder.
        self._job = place.job if self._began is None else self._began["job"]
        self._present: frozenset[str] = frozenset()  # checkpoints that lay there before the fit
        self._marks = 0  # checkpoints of this attempt
        # Of one that was written and is to count: when, and the name of what lies beside it.
        self._pending: tuple[tuple[int, Place], str] | None = None
        self._resting, self._rests_s = "", float("-inf")  # what lies beside it, and since when
        self._late_s = float("inf")  # when to say that there is no checkpoint yet
        self.checkpoint = None if place.restored is None else _newest(place.restored, call)
        self.again = place.restored is not None
        self.saving_end = self.end_is_saved = False

    # -- at the start ------------------------------------------------------------------------

    def start(self, trainer: Trainer) -> None:
        """Note how the fit begins, and take back what it wrote later; every rank must call this."""
        roots = _rank_zeros(trainer, self._place)
        if self._began is not None:
            self._present = frozenset(_moved(self._began["present"], _moves(self._place, roots)))
        if trainer.is_global_zero:
            writers = trainer.checkpoint_callbacks
            if self._began is None:
                self._present = frozenset(str(file) for one in writers for file in one.files())
            elif not self._ended():
                self._take_back(writers)
            began = {
                "job": self._job,
                "ckpt_path": self._ckpt_path,
                "present": sorted(self._present),
            }
            _write_json(self._kept(f"{self._call}.json"), began)
            earlier = _earlier_roots(self._place)
            _write_json(self._kept(_ROOTS), [*(one for one in earlier if one != roots), roots])
            self._tell(trainer, writers)
        trainer.runtime.barrier()

    def _tell(self, trainer: Trainer, writers: Sequence[Checkpoint]) -> None:
        if self.again and self.checkpoint is None:
            trainer._say(f"restart {self._place.restart}: fit begins: there was no checkpoint yet")
        if not trainer.fast_dev_run and not any(one.can_go_on() for one in writers):
            warnings.warn(
                "no callback writes checkpoints that training can go on from: after a restart this "
                "fit begins at its start",
                stacklevel=2,
            )

    def training(self, trainer: Trainer) -> None:
        """Note that batches come now; on rank 0 the first checkpoint is waited for."""
        comes = any(one.can_go_on() for one in trainer.checkpoint_callbacks)  # else that was said
        if trainer.is_global_zero and comes and not trainer.fast_dev_run:
            self._late_s = monotonic() + LATE_S

    def _tell_late(self, trainer: Trainer) -> None:
        self._late_s = float("inf")
        trainer._say(
            f"no checkpoint in {LATE_S / 60:.0f} min of training: a restart now would begin "
            "before them; ModelCheckpoint(train_time_interval=timedelta(minutes=5)) saves sooner"
        )

    def _ended(self) -> bool:
        """Return whether the script had come to a later fit: then this one wrote nothing late."""
        if self._place.restored is None:
            return False
        kept = self._place.restored / ownfiles.RESUME
        calls = (file.stem for file in kept.glob("*.json"))
        return any(call.isdigit() and int(call) > self._call for call in calls)

    def _take_back(self, writers: Sequence[Checkpoint]) -> None:
        """Remove checkpoints that will be written again: they would be in the way."""
        at = None if self.checkpoint is None else _head(self.checkpoint)
        for file in [file for one in writers for file in one.files()]:
            if str(file) in self._present:
                continue
            its = _head(file)
            if its is None or its.job != self._job:
                continue
            if at is None or its.moment > at.moment:
                file.unlink(missing_ok=True)

    # -- the checkpoint ----------------------------------------------------------------------

    def mark(self, trainer: Trainer) -> dict[str, Any]:
        """Return what a checkpoint holds for the next attempt."""
        rows = 0
        if trainer._file is not None:
            trainer._file.flush()
            rows = trainer._file.rows
        self._marks += 1
        return {
            "rows": rows,
            "should_stop": trainer.should_stop,
            "final": self.saving_end,
            "beside": self._beside(),
            "job": self._job,
        }

    def _beside(self) -> str:
        return f"{self._call}-{self._place.restart}.{self._marks}"

    def keep(self, trainer: Trainer, path: Path) -> None:
        """Take a checkpoint that was written, for `commit`; on rank 0."""
        pending = self._kept(f"{self._call}.tmp")
        pending.parent.mkdir(parents=True, exist_ok=True)
        _second_name(path, pending)
        self._pending = _moment(trainer), self._beside()

    def commit(self, trainer: Trainer) -> None:
        """Have the checkpoint count that was taken last, if there is a new one; on rank 0."""
        if self._pending is None:
            if monotonic() >= self._late_s:
                self._tell_late(trainer)
            return
        self._late_s = float("inf")
        (at, beside), self._pending = self._pending, None
        if at == _moment(trainer):
            temporary = self._kept(f"{beside}.tmp")
            torch.save(trainer._callback_states(), temporary)
            os.replace(temporary, self._kept(f"{beside}.pt"))
        if trainer._file is not None and trainer._file.rows:
            # The log itself changes all the time, and may be copied as it was before.
            shutil.copyfile(trainer._file.path, self._kept(f"{beside}.csv"))
        self._kept(f"{beside}.whole").touch()
        newest, pending = self._kept(f"{self._call}.ckpt"), self._kept(f"{self._call}.tmp")
        os.replace(pending, newest)
        if monotonic() - self._rests_s >= REST_S:
            _second_name(newest, pending)
            os.replace(pending, self._kept(f"{self._call}.rest.ckpt"))
            self._resting, self._rests_s = beside, monotonic()
        for old in self._kept("").glob(f"{self._call}-*"):
            if old.stem not in (beside, self._resting):
                old.unlink()

    def take(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Make a checkpoint of an earlier attempt one of this; its rows are those of the file."""
        mark = checkpoint["loops"]["fit_loop"]["again"]
        assert self._place.restored is not None
        beside = self._place.restored / ownfiles.RESUME / mark["beside"]
        states = beside.with_name(f"{beside.name}.pt")
        if states.is_file():
            found = torch.load(states, map_location="cpu", weights_only=True)
            checkpoint["callbacks"] = found
        move(trainer, checkpoint)
        counters = checkpoint["loops"]["fit_loop"]
        at_end = Place(counters["position"]["place"]) is Place.EPOCH_END
        self.end_is_saved = mark["final"] and at_end  # else a signal ended it too early
        if not self._ended() and not self.end_is_saved:
            for state in checkpoint["callbacks"].values():
                self._forget_final(trainer, state)
        if trainer.is_global_zero:
            if trainer._file is not None and mark["rows"]:
                trainer._file.go_on(beside.with_name(f"{beside.name}.csv"), mark["rows"])
            trainer._say(
                f"restart {self._place.restart}: fit goes on in epoch "
                f"{counters['epochs_completed']}, after step {counters['global_step']}"
            )

    def _forget_final(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Remove the last file of a fit that a signal ended: its end is yet to come."""
        final = state.get("final_model_path")
        if final and final not in self._present:
            state["final_model_path"] = ""
            if trainer.is_global_zero:
                Path(final).unlink(missing_ok=True)

    def _kept(self, name: str) -> Path:
        assert self._place.output_dir is not None
        return self._place.output_dir / ownfiles.RESUME / name


class Keeper(Checkpoint):
    """Has checkpoints count: the last at each hook in which they are written."""

    def __init__(self, fit: FitAgain) -> None:
        self._fit = fit

        for name in ("train_batch", "validation", "train_epoch", "train"):
            setattr(self, f"on_{name}_end", self._commit)

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._fit.training(trainer)

    def _commit(self, trainer: Trainer, *_: Any) -> None:
        self._fit.commit(trainer)


def log_folder(fresh: Callable[[], str]) -> tuple[str, bool]:
    """Choose a log folder; return its name, and whether an earlier attempt has written into it.

    A script chooses them in the same order in every attempt.
    """
    place = _place()
    if place is None or place.output_dir is None:
        return fresh(), False
    before: list[str] = []
    if place.restored is not None:
        before = _read_json(place.restored / ownfiles.RESUME / _LOGS) or []
    number = len(_chosen)
    old = number < len(before)
    _chosen.append(before[number] if old else fresh())
    noted = [*_chosen, *before[number + 1 :]]
    _write_json(place.output_dir / ownfiles.RESUME / _LOGS, noted)
    return _chosen[number], old


# -- files and paths ------------------------------------------------------------------------------


def _place() -> RankEnv | None:
    place = environment.rank_env()
    if place is None or place.restart is None or place.output_dir is None:
        return None
    return place


def _began(place: RankEnv, call: int) -> Any:
    if place.restored is None:
        return None
    return _read_json(place.restored / ownfiles.RESUME / f"{call}.json")


def _newest(restored: Path, call: int) -> Path | None:
    """Return the checkpoint that a fit had come to, of those that arrived."""
    newest = restored / ownfiles.checkpoint(call)
    found = []
    for file in (newest, newest.with_suffix(".rest.ckpt")):
        head = _head(file)
        if head is None or head.beside is None:
            continue
        # What lies beside it is copied on its own, and may not have arrived.
        if file.with_name(f"{head.beside}.whole").exists():
            found.append((head.moment, file))
    return max(found)[1] if found else None


def _second_name(file: Path, name: Path) -> None:
    name.unlink(missing_ok=True)
    try:
        os.link(file, name)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, name)


def _roots(place: RankEnv) -> list[str]:
    """Return the folders of a job on this node, as paths begin with them."""
    assert place.output_dir is not None
    plain = [str(place.output_dir), str(environment.START_DIR)]
    return [*plain, *map(os.path.realpath, plain)]


def _rank_zeros(trainer: Trainer, place: RankEnv) -> list[str]:
    """Return rank 0's folders on all ranks: paths in checkpoints are its paths."""
    found: list[str] = json.loads(trainer.runtime.gather_text(json.dumps(_roots(place)))[0])
    return found


def _earlier_roots(place: RankEnv) -> list[list[str]]:
    """Return where rank 0's folders lay in earlier attempts."""
    if place.restored is None:
        return []
    return _read_json(place.restored / ownfiles.RESUME / _ROOTS) or []


def _moves(place: RankEnv, new: Sequence[str]) -> list[tuple[str, str]]:
    """Return which folders of earlier attempts have become which of this one."""
    pairs = [pair for old in _earlier_roots(place) for pair in zip(old, new, strict=True)]
    return sorted(pairs, key=lambda pair: -len(pair[0]))


def _moved(value: Any, moves: Sequence[tuple[str, str]]) -> Any:
    """Return plain data with each path below an old folder below its new one."""
    if isinstance(value, str):
        for old, new in moves:
            if value == old or value.startswith(old + os.sep):
                return new + value[len(old) :]
        return value
    if type(value) is dict:
        return {_moved(key, moves): _moved(item, moves) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, moves) for item in value)
    return value


def _moment(trainer: Trainer) -> tuple[int, Place]:
    assert trainer._loop is not None
    return trainer._total_batches, trainer._loop.position().place


@dataclass(frozen=True, slots=True)
class _Head:
    moment: tuple[int, int]  # when in its fit it was written, to compare
    beside: str | None  # see `mark`
    job: str | None


def _head(file: Path) -> _Head | None:
    """Look into a checkpoint; None for other files."""
    with contextlib.suppress(Exception):  # of many types: anything may lie there
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        loop = held["loops"]["fit_loop"]
        moment = loop["total_batches"], _PLACES.index(Place(loop["position"]["place"]))
        mark = loop.get("again", {})
        return _Head(moment, mark.get("beside"), mark.get("job"))
    return None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(value).encode())
