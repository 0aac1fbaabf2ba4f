"""Where one Trainer call runs: in this process, on this machine's devices, or on other machines.

Every call of a script has an index. A job executes the script again and is told which call it is
for: earlier calls return their recorded result, that call runs, and the ranks end there. So where
the script was started each statement runs once, with the results in its own objects; on ranks, what
stands above a call runs once for that call. Does not know what a call does (`stages`) nor how a job
runs (`launching`).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulayer_mesh.core import ownfiles
from torch import nn

from gpulayer import env as environment
from gpulayer.pytorch import checkpoints, ending, launching, precision, prediction, results
from gpulayer.pytorch.launching import Where
from gpulayer.pytorch.module import Module
from gpulayer.pytorch.pace import gradient_bytes

if TYPE_CHECKING:
    from gpulayer.launcher import JobOutcome
    from gpulayer.pytorch.trainer import Trainer


def run(
    trainer: Trainer,
    model: Module,
    here: Callable[[str | None], Any],
    *,
    checkpoint: Callable[[], str | None],
    shares: bool = False,
    trains: bool = False,
) -> Any:
    """Run one call where it belongs and return what it returns.

    Args:
        here: does the call's work in this process; takes the checkpoint to load.
        checkpoint: returns which one that is; asked where the script was started, or where all of
            it runs.
        shares: each rank returns its share of a result, see `prediction.interleaved`.
        trains: ranks average gradients; the plan says what that takes.

    Raises:
        SystemExit: it ran elsewhere and failed; with its exit code.
    """
    index = trainer._call = results.next_index()
    place = environment.rank_env()
    if place is None:
        choice = launching.choose(
            trainer.num_nodes, trainer.devices, trainer.accelerator, trainer.target
        )
        if choice.where is not Where.HERE:
            return _elsewhere(trainer, index, choice, model, checkpoint(), shares, trains)
        launching.refuse_here(choice, trainer._restarts, trainer._on_disconnect_s)
        if choice.kind is not None:
            precision.check(trainer.precision, choice.kind)
        returned = here(checkpoint())
        results.remember(index, trainer, model, returned)
        return returned
    if place.call is None:  # a job of launch() or torchrun: the script runs to its end
        return here(checkpoint())
    shipped = environment.copied_env().get(results.REPLAY_VARIABLE, results.REPLAY)
    replay = environment.START_DIR / shipped
    if index < place.call:
        return _adopt(trainer, model, replay / str(index))
    if index > place.call:  # the script caught the SystemExit below
        raise SystemExit(0)
    try:
        results.check_recordable(model)
        sent = replay / f"{index}.ckpt"
        try:
            returned = here(str(sent) if sent.is_file() else None)
        except BaseException:
            if place.rank == 0 and place.output_dir is not None and trainer._stopped():
                _leave(trainer, place.output_dir / ownfiles.FOLDER / f"{index}.stopped")
            raise
        if place.output_dir is not None:
            folder = place.output_dir / ownfiles.FOLDER / str(index)
            if place.rank == 0:
                results.write(results.capture(trainer, model, returned), folder)
            elif shares:
                results.write_share(returned, folder)
    finally:
        if trainer._runtime is not None:
            trainer._runtime.close()
    ending.end_rank()


def in_job_of_a_call() -> bool:
    """Return whether this process is a rank that exists for one Trainer call."""
    place = environment.rank_env()
    return place is not None and place.call is not None


def _elsewhere(
    trainer: Trainer,
    index: int,
    choice: launching.Choice,
    model: Module,
    checkpoint: str | None,
    shares: bool,
    trains: bool,
) -> Any:
    if trainer.accelerator == "cpu":
        precision.check(trainer.precision, "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        files = results.replay_files(index, Path(scratch))
        if checkpoint is not None:
            checkpoints.load(checkpoint)  # a fault in it should show before the ranks start
            files[f"{results.REPLAY}/{index}.ckpt"] = Path(checkpoint).resolve()
        sent = gradient_bytes(model) if trains and trainer.strategy != "fsdp" else 0
        outcome = _job(trainer, index, choice, files, sent)
    if outcome.code != 0:
        if outcome.output_dir is not None:
            _take_what_is_left(trainer, index, model, outcome.output_dir)
        trainer.interrupted = True
        raise SystemExit(outcome.code)  # the job's last words are on the screen
    if outcome.output_dir is None:
        raise RuntimeError(f"job {outcome.job} brought no files back")
    inside = Path(ownfiles.FOLDER) / str(index)
    found = outcome.output_dir / inside
    returned = _adopt(trainer, model, found)
    trainer._came_home(outcome.output_dir)
    trainer.ckpt_path = checkpoint
    results.write_callbacks(trainer._callback_states(), found)  # with paths that are of here
    if shares:
        ranks = range(1, results.read(found).document["counters"]["world_size"])
        others = (outcome.output_dir / f"rank{rank}" / inside for rank in ranks)
        returned = prediction.interleaved([returned, *map(results.read_share, others)])
        results.write_share(returned, found)  # for calls after this one
    results.remember_files(index, found)
    return returned


def _job(
    trainer: Trainer,
    index: int,
    choice: launching.Choice,
    files: dict[str, Path],
    sent_bytes: int,
) -> JobOutcome:
    from gpulayer_mesh.core.jobspec import JobKind

    return launching.run(
        choice,
        kind=JobKind.DISTRIBUTED,
        nodes=trainer.num_nodes,
        devices=trainer.devices,
        accelerator=trainer.accelerator,
        target=trainer.target,
        env=trainer._env,
        secrets=trainer._secrets,
        stop_grace_s=trainer._stop_grace_s,
        wait_s=trainer._wait_s,
        restarts=trainer._restarts,
        on_disconnect_s=trainer._on_disconnect_s,
        call=index,
        gradient_bytes=sent_bytes,
        extra_files=files,
    )


def _leave(trainer: Trainer, folder: Path) -> None:
    """Write what a fit came to that a signal ended; its weights are in a checkpoint."""
    with contextlib.suppress(OSError):  # its own end is what is to be told
        results.write(results.capture(trainer, nn.Module()), folder)


def _take_what_is_left(trainer: Trainer, index: int, model: Module, came: Path) -> None:
    """Take over what `_leave` wrote, and say where the fit goes on."""
    from gpulayer.ui import Ui

    folder = came / ownfiles.FOLDER / f"{index}.stopped"
    if not (folder / results.DOCUMENT).is_file():
        return
    trainer._attach(model)
    model.configure_model()
    results.restore(results.read(folder), trainer, nn.Module())
    trainer._came_home(came)
    path = trainer._state_at
    if path is None or not Path(path).is_file():
        return
    model.load_state_dict(checkpoints.load(path)["state_dict"])
    Ui().note(
        f"stopped in epoch {trainer.current_epoch}, after step {trainer.global_step}"
        + trainer._goes_on(path)
    )


def _adopt(trainer: Trainer, model: Module, folder: Path) -> Any:
    """Take over the recorded result of a call; returns what it returned."""
    trainer._attach(model)
    model.configure_model()  # it may make the layers that the weights belong to
    result = results.read(folder)
    results.restore(result, trainer, model)
    return result.returned
