"""Going on from a checkpoint in the middle of a fit, exactly: to the bit what an unbroken run does.

A checkpoint holds, besides weights and counters, where in the loop it was written (`Place`) and of
each rank its random states, the gradients of a half-filled accumulation window, the order in which
gradients are reduced, what it has logged since the epoch began, and the random states from which
the epoch's iterator was made. The iterator is made again from those, the batches that were trained
are skipped, and then the states of the moment are set. Batches are skipped by their indices,
without reading data, except where workers or an iterable data set read ahead with random states of
their own.

With another number of ranks this is impossible; then the epoch goes on after as many whole windows
as cover the same share of it, with fresh random states. Knows the loop and its loader, not files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch

from gpulayer.pytorch import data, seeding
from gpulayer.pytorch.results import set_buffer

if TYPE_CHECKING:
    from gpulayer.pytorch.loop import FitLoop


class Place(StrEnum):
    """What of a fit is done where a checkpoint is written."""

    BETWEEN = "between epochs"
    BATCH = "batch"  # before or in a batch, which is trained again from its start
    NEXT = "next batch"  # a batch is done with, the next is to come
    BATCH_END = "batch end"  # a batch is trained; its row, validation and schedulers are to come
    VALIDATION = "validation"  # in a validation, which is run again from its start
    VALIDATED = "validated"  # at the end of a validation
    EPOCH_END = "epoch end"  # the hooks at an epoch's end have run; its row is to come


TAILS = (Place.BATCH_END, Place.VALIDATION, Place.VALIDATED)  # the rest of a batch is to come


@dataclass(slots=True)
class Position:
    """Where in an epoch: what the loop knows of the batch in hand."""

    place: Place
    done: int  # batches of the epoch that are trained
    is_last: bool
    stepping: bool
    complete: bool  # the epoch came to its last batch
    of: float  # batches of the epoch; inf: not known

    @property
    def within_epoch(self) -> bool:
        """Whether something of the epoch is left."""
        if self.place is Place.EPOCH_END:
            return not self.complete  # cut by a limit, which may be raised
        return self.place is not Place.BETWEEN


class Resume:
    """What a loop goes on from.

    Args:
        position: the fields of a `Position`.
        ranks: what `capture` returned on each rank.
        rank, world: of this process, now.
        again: the same fit goes on in another attempt, so what is left of its end is done, too.
    """

    def __init__(
        self,
        position: Mapping[str, Any],
        ranks: list[Any],
        rank: int,
        world: int,
        again: bool = False,
    ) -> None:
        self.again = again
        self.position = Position(**{**position, "place": Place(position["place"])})
        self._ranks = ranks
        self._same = len(ranks) == world
        self._mine: Mapping[str, Any] = ranks[rank if self._same else 0]
        self._world = world
        self._rank = rank

    def finish_epoch(self) -> None:
        """Train what is left of an epoch that a limit cut, as if it had not ended."""
        self.position.place, self.position.is_last = Place.BATCH, False

    @property
    def within_epoch(self) -> bool:
        return self.position.place not in (Place.BETWEEN, Place.EPOCH_END)

    @property
    def reads(self) -> bool:
        """Whether batches of the epoch are left."""
        return self.within_epoch and not self.position.is_last

    @property
    def began(self) -> dict[str, Any] | None:
        """What the iterator of the epoch was made from."""
        found: dict[str, Any] | None = self._mine["began"]
        return found

    def adapt(self, loop: FitLoop) -> None:
        """Choose where another number of ranks goes on."""
        at = self.position
        if not self._same and self.reads:
            if at.place in TAILS and at.stepping:
                loop.trainer._batches_that_stepped += 1
            window = loop.trainer.accumulate_grad_batches
            done = at.done * len(self._ranks) // self._world
            if max(at.of, loop.num_batches) != float("inf"):
                done = int(at.done * loop.num_batches / at.of)
            done = done // window * window
            self.position = at = Position(Place.BATCH, done, False, True, False, loop.num_batches)
        if not self._same and self._rank == 0:
            after = f" after {at.done} batches of the epoch" if self.within_epoch else ""
            warnings.warn(
                f"the checkpoint was written by {len(self._ranks)} ranks and {self._world} go "
                f"on{after}: random states start afresh",
                stacklevel=2,
            )
        if at.done >= loop.num_batches:
            at.is_last = True

    def iterator(self, loop: FitLoop) -> Iterator[Any]:
        """Return the loader's iterator at the batch to go on with."""
        began = self._mine["began"]
        if not self._same or began is None:
            began = begin(loop)
        loop.began = began
        state = self._mine["loader"] if self._same else None
        ahead = self._mine.get("ahead") if self._same else None
        if ahead is not None:
            state = ahead["loader"]
        device = loop.trainer.runtime.device
        iterator = _further(loop.loader, began, state, self.position.done, device)
        if not loop.reads_ahead:
            return iterator
        # The next batch had been loaded, too, before the random states that will be set.
        if ahead is not None:
            seeding.restore(ahead["random"], device)
        return chain(list(islice(iterator, 1)), iterator)

    def restore(self, loop: FitLoop) -> None:
        """Set what differs from rank to rank: random states, gradients, what was logged."""
        mine, device = self._mine, loop.trainer.runtime.device
        metrics = dict(mine["metrics"])
        if not self._same:
            metrics["entries"] = []
        loop.trainer._metrics.restore(metrics, device)
        loop.trainer._metrics.on_step = self.position.place in TAILS
        if loop.evaluation is not None and mine["validation"] is not None:
            loop.evaluation.restore(mine["validation"])
        if not self._same:
            return
        if not self.reads:
            data.make_equal(loop.loader, mine["generators"], mine["workers"])
        loop.strategy.settle(self._ranks[0].get("order", []))
        loop.strategy.load_gradients(mine["gradients"])
        with torch.no_grad():
            for name, buffer in mine["buffers"].items():
                set_buffer(loop.module, name, buffer)
        seeding.restore(mine["random"], device)


def begin(loop: FitLoop) -> dict[str, Any]:
    """Return what the iterator that is made next depends on."""
    return {
        "random": seeding.states(loop.trainer.runtime.device),
        "generators": data.generator_states(loop.loader),
        "workers": data.has_workers(loop.loader),
    }


def capture(loop: FitLoop, at: Position) -> dict[str, Any]:
    """Return this rank's part of a checkpoint."""
    trainer, module = loop.trainer, loop.module
    within = at.within_epoch
    half = within and (
        at.done % trainer.accumulate_grad_batches != 0
        if at.place in (Place.BATCH, Place.NEXT)
        else not at.stepping
    )
    save = getattr(loop.loader, "state_dict", None)
    saved = module.state_dict()
    if at.place is Place.VALIDATION:
        now = loop.before_validation
    else:
        validation = None if loop.evaluation is None else loop.evaluation.state()
        now = {"random": seeding.states(trainer.runtime.device), "validation": validation}
    return {
        **now,
        "began": loop.began if within else None,
        "loader": save() if within and callable(save) else None,
        # of the next batch to train; a batch in hand is loaded anew
        "ahead": loop.ahead if within and at.place is not Place.BATCH else None,
        "generators": data.generator_states(loop.loader),
        "workers": data.has_workers(loop.loader),
        "gradients": loop.strategy.gradients() if half else {},
        "seeds": list(trainer._seeds),
        "order": loop.strategy.order(reduced=loop.has_stepped()),
        # Data parallelism takes rank 0's at the next step only; a validation before it does not.
        "buffers": {
            name: buffer.cpu()
            for name, buffer in module.named_buffers()
            if trainer.global_rank > 0 or name not in saved
        },
        "metrics": trainer._metrics.state(),
    }


def _further(
    loader: data.Loader, began: Mapping[str, Any], state: Any, done: int, device: torch.device
) -> Iterator[Any]:
    """Make an epoch's iterator again, `done` batches further; random states are those it left."""
    data.make_equal(loader, began["generators"], began["workers"])
    seeding.restore(began["random"], device)
    load = getattr(loader, "load_state_dict", None)
    if state is not None and callable(load):
        load(state)
        return iter(loader)
    return data.further(loader, done)
