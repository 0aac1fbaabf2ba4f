"""The same module under PyTorch Lightning 2.6.6 and under us: calls, gradients, weights, rows.

Gradients and weights must be equal to the bit, and what raises must raise the same kind of error
after the same calls.

Skipped where Lightning is not installed; it is no dependency of this project.
Arguments are drawn at random; `GPULAYER_TEST_SEED` repeats a run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_lightning import bits, kind, rows_in, their_trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gpulayer.pytorch import Module, Trainer

pytestmark = pytest.mark.filterwarnings("ignore")


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor([float(i)]),) for i in range(1, self.count + 1)])


def numbers(count: int, size: int, first: int = 1) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(first, first + count).float()), size)


class Case:
    """Arguments of one run, and what the module does in it."""

    def __init__(self, rng: random.Random) -> None:
        pick = rng.choice
        self.stream = pick([False, False, False, True])
        self.samples = pick([3, 5, 7])
        self.val_loaders = pick([1, 1, 2])
        self.val_size = pick([1, 2, 3])
        self.both = pick([True, False])
        self.reduce = pick(["mean", "sum", "min", "max"])
        self.stop_at = pick([None, None, None, 1, 2])
        self.skip_at = pick([None] * 8 + [0, 1])
        self.none_at = pick([None] * 6 + [1])
        self.val_steps = pick([True, False, False])
        self.scheduler = pick([None, None, "epoch", "step", "plateau", "train", "none"])
        self.frequency = pick([1, 2])
        self.arguments: dict[str, Any] = {
            "max_epochs": pick([0, 1, 2, 3]),
            "max_steps": pick([-1, -1, -1, 0, 2, 5]),
            "accumulate_grad_batches": pick([1, 1, 2, 3, 10]),
            "val_check_interval": pick([None, None, 1.0, 0.5, 0.3, 1, 2, 3]),
            "check_val_every_n_epoch": pick([1, 1, 1, 2, None]),
            "log_every_n_steps": pick([1, 2, 3, 50, 0]),
            "num_sanity_val_steps": pick([0, 2, 1, -1]),
            # a limit above a stream's length: Lightning never ends the epoch, we do
            "limit_train_batches": pick([None, None, 1, 2, 1.0, 0]),
            "limit_val_batches": pick([None, None, 1, 0.5, 0]),
            "gradient_clip_val": pick([None, None, 1.5]),
            "min_steps": pick([None, None, 3]),
            "fast_dev_run": pick([False] * 6 + [True, 2]),
        }
        if self.arguments["val_check_interval"] is None:
            del self.arguments["val_check_interval"]
        self.optimizer = pick(["SGD", "SGD", "momentum", "Adam"])
        self.size = pick([1, 1, 2])  # of a batch
        self.layers = pick([False, True])
        self.returns = pick(["tensor", "tensor", "dict"])
        # by value, torch cannot clip where there is no gradient, so Lightning fails there
        some = self.none_at is None and self.scheduler != "none"
        by_value = ["value", "VALUE"] if some else []
        self.arguments["gradient_clip_algorithm"] = pick([None, "norm", *by_value])

    def train(self) -> DataLoader[Any]:
        if self.stream:
            return DataLoader(Stream(self.samples), batch_size=None)
        return numbers(self.samples, self.size)

    def val(self) -> Any:
        loaders = [numbers(7, self.val_size, 1 + 10 * i) for i in range(self.val_loaders)]
        return loaders if self.val_loaders > 1 else loaders[0]


def module_on(base: Any, case: Case, trace: list[Any]) -> Any:
    """Make a module that writes down every call, on Lightning's base class or ours."""

    def plain(metrics: Any) -> list[tuple[str, float]]:
        return sorted((name, round(float(value), 3)) for name, value in metrics.items())

    class Traced(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))
            if case.layers:
                torch.manual_seed(1)
                self.layers = torch.nn.Sequential(
                    torch.nn.Linear(1, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1)
                )

        def at(self, *what: Any) -> None:
            trace.append((*what, self.trainer.global_step, self.trainer.current_epoch))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.at("training_step", batch_idx)
            loss = (self.w * batch[0].mean()).sum() + 0.0
            if case.layers:
                loss = loss + self.layers(batch[0].reshape(-1, 1)).square().mean()
            if batch_idx == case.none_at:
                return None
            self.log("loss", loss, on_step=True, on_epoch=case.both)
            self.log("x", batch[0].mean(), on_step=False, on_epoch=True, reduce_fx=case.reduce)
            if batch_idx == 1:
                self.log("rare", float(batch_idx))
            if case.stop_at is not None and self.trainer.global_step >= case.stop_at:
                self.trainer.should_stop = True
            return loss if case.returns == "tensor" else {"loss": loss, "extra": batch[0].sum()}

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.at("validation_step", batch_idx, dataloader_idx, self.training)
            self.log("v", batch[0].mean(), on_step=case.val_steps)
            self.log("vs", batch[0].mean(), reduce_fx="sum", prog_bar=True)
            self.log("vw", batch[0].mean() + self.w.detach(), batch_size=1, logger=False)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            self.at("on_train_batch_start", batch_idx)
            return -1 if batch_idx == case.skip_at else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.at("on_train_batch_end", sorted(outputs), plain(self.trainer.callback_metrics))
            self.log("end", float(batch_idx))

        def on_train_epoch_start(self) -> None:
            self.at("on_train_epoch_start")
            self.log("start", 1.0)

        def on_train_epoch_end(self) -> None:
            self.at("on_train_epoch_end", plain(self.trainer.callback_metrics))
            self.log("epoch_end", 5.0 + self.trainer.current_epoch)

        def on_validation_epoch_end(self) -> None:
            self.at("on_validation_epoch_end")
            self.log("val_end", 7.0)

        def on_validation_end(self) -> None:
            self.at("on_validation_end", plain(self.trainer.callback_metrics))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.at("on_before_optimizer_step", [bits(p.grad) for p in self.parameters()])

        def optimizer_step(self, *args: Any) -> None:
            self.at("optimizer_step")
            super().optimizer_step(*args)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.at("lr_scheduler_step", None if metric is None else round(float(metric), 3))
            super().lr_scheduler_step(scheduler, metric)

        def train_dataloader(self) -> Any:
            trace.append("train_dataloader")
            return case.train()

        def val_dataloader(self) -> Any:
            trace.append("val_dataloader")
            return case.val()

        def configure_optimizers(self) -> Any:
            optimizer: Any = torch.optim.SGD(
                self.parameters(), lr=0.01 if case.layers else 1.0,  # the layers would diverge
                momentum=0.9 if case.optimizer == "momentum" else 0,
            )  # fmt: skip
            if case.optimizer == "Adam":
                optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
            if case.scheduler is None:
                return optimizer
            if case.scheduler == "none":
                return None
            if case.scheduler == "epoch":
                return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
            if case.scheduler == "step":
                scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
                options = {"interval": "step", "frequency": case.frequency}
            else:
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
                options = {"monitor": "vs", "interval": "step", "strict": False}
                if case.scheduler == "train":
                    options = {"monitor": "x", "frequency": case.frequency}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **options}}

    def quiet(name: str) -> Any:
        def hook(self: Any, *args: Any) -> None:
            self.at(name)

        return hook

    for name in (
        "on_train_start", "on_train_end", "on_validation_start", "on_validation_epoch_start",
        "on_validation_batch_start", "on_validation_batch_end", "on_before_zero_grad",
        "on_before_backward", "on_after_backward", "on_fit_start", "on_fit_end",
    ):  # fmt: skip
        setattr(Traced, name, quiet(name))
    return Traced()


def outcome(make_trainer: Any, base: Any, case: Case, folder: Path) -> dict[str, Any]:
    trace: list[Any] = []
    model = module_on(base, case, trace)
    trained, failed = None, None
    try:
        trained = make_trainer(
            accelerator="cpu", devices=1, enable_progress_bar=False, default_root_dir=folder,
            **case.arguments,
        )  # fmt: skip
        trained.fit(model)
    except Exception as error:
        failed = error
    if trained is None:
        return {"error": failed}
    return {
        "error": failed,
        "trace": trace,
        "rows": rows_in(folder),
        "files": sorted({path.name for path in folder.rglob("*.ckpt")} - {"final.ckpt"}),  # ours
        "counters": (trained.global_step, trained.current_epoch, trained.num_training_batches),
        "weights": [bits(one) for one in model.parameters()],
        **{
            name: {k: round(float(v), 3) for k, v in getattr(trained, name).items()}
            for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics")
        },
    }


@pytest.mark.configurations(40)
def test_same_module_behaves_the_same(
    number: int, seed: int, lightning: Any, tmp_path: Path
) -> None:
    case = Case(random.Random(f"{seed}/{number}"))
    if case.stream and case.arguments["limit_train_batches"] in (1, 2):
        assert case.samples > 2  # else the one deliberate difference would show, see Case

    theirs = their_trainer(tmp_path / "theirs", checkpoints=True)

    expected = outcome(theirs, lightning.LightningModule, case, tmp_path / "theirs")
    found = outcome(Trainer, Module, case, tmp_path / "ours")
    described = {k: v for k, v in vars(case).items() if v is not None}
    errors = expected.pop("error"), found.pop("error")
    if errors[0] is not None:  # Lightning forgets what the batch in hand has logged
        for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            expected.pop(name, None)
    assert kind(errors[0]) == kind(errors[1]), (described, errors)
    for key, value in expected.items():
        assert found[key] == value, (key, described, errors)
