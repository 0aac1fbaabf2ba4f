"""The prediction loop: what `predict_step` returns for every batch, on the CPU.

Ranks share out samples without padding, as Lightning does; in a call that runs elsewhere they share
out whole batches, so that the launching process can put the batches of one process together again
(`interleaved`). Does not know where it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gpulayer.pytorch import data, results, seeding
from gpulayer.pytorch.arguments import ArgumentError, batches
from gpulayer.pytorch.evaluation import takes, transfer_of, without_gradients
from gpulayer.pytorch.module import Module

if TYPE_CHECKING:
    from gpulayer.pytorch.trainer import Trainer

Outputs = list[list[Any]]  # loaders x batches
_CPU = torch.device("cpu")


class Prediction:
    """One call of `predict`.

    Args:
        keep: return what the steps return; False returns None.
        whole_batches: share out batches over ranks instead of samples.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: Module,
        loaders: data.Loaders,
        *,
        keep: bool,
        whole_batches: bool,
    ) -> None:
        runtime = trainer.runtime
        self._trainer = trainer
        self._module = module
        self._keep = keep
        self._travels = whole_batches
        # Where whole batches are shared out, a batch has the number it has in one process.
        self._first, self._step = (runtime.rank, runtime.world_size) if whole_batches else (0, 1)
        self._hooks = trainer._hooks
        self._loaders = data.for_prediction(
            loaders,
            runtime.rank,
            runtime.world_size,
            inject=trainer.use_distributed_sampler or whole_batches,
            whole_batches=whole_batches,
            init=seeding.worker_init(runtime.rank),
        )
        self._several = len(self._loaders) > 1
        self._takes_index = takes(module.predict_step, 2)
        if self._several and not takes(module.predict_step, 3):
            raise ArgumentError(
                f"{len(self._loaders)} predict loaders, but predict_step takes no dataloader_idx"
            )
        self._transfer = transfer_of(module, runtime.device)
        limit = trainer.limit_predict_batches
        self._num_batches = [
            batches("limit_predict_batches", data.length(one), limit) for one in self._loaders
        ]
        trainer._loaders["predict"] = data.as_given(loaders, self._loaders)
        trainer._num_batches["predict"] = self._num_batches

    def run(self) -> Outputs | None:
        """Return a list per loader, of the outputs of its batches."""
        if sum(self._num_batches) == 0 and self._trainer.world_size == 1:
            return None
        module = self._module
        flags = [(part, part.training) for part in module.modules()]
        kept: list[list[Any]] = [[] for _ in self._loaders]
        with without_gradients(self._trainer, "predict"):
            items = data.in_turn(self._loaders, self._num_batches)
            module.on_predict_model_eval()
            self._call("start")
            self._call("epoch_start")
            for index, number, batch in items:
                batch_idx = self._first + number * self._step
                output = self._batch(batch, batch_idx, index)
                if self._keep:
                    if self._travels:
                        results.check_plain(output, "predict_step returned")
                    kept[index].append(data.move(output, _CPU))
            self._call("epoch_end")
            self._call("end")
        for part, training in flags:
            part.training = training
        return kept if self._keep else None

    def _batch(self, batch: Any, batch_idx: int, index: int) -> Any:
        batch = self._transfer(batch, index)
        args = (batch, batch_idx, index) if self._several else (batch, batch_idx)
        self._call("batch_start", *args)
        with self._trainer.runtime.autocast():
            step = self._module.predict_step
            output = step(*args) if self._takes_index else step(batch)
        self._call("batch_end", output, *args)
        return output

    def _call(self, what: str, *args: Any) -> None:
        hook = self._hooks[f"on_predict_{what}"]
        if hook is not None:
            hook(*args)


def interleaved(shares: Sequence[Outputs | None]) -> Outputs | None:
    """Return the batches of all ranks in the order of one process: rank r has r, r + W, ..."""
    if any(share is None for share in shares):
        return None
    return [_merged(loader) for loader in zip(*(share or [] for share in shares), strict=True)]


def _merged(shares: Sequence[list[Any]]) -> list[Any]:
    total = sum(map(len, shares))
    return [shares[i % len(shares)][i // len(shares)] for i in range(total)]
