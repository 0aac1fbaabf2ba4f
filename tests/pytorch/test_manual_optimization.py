"""Manual optimization: under Lightning 2.6.6 and under us, and over two ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_lightning import bits, kind, rows_in, their_trainer
from ranks import Ranks
from torch.utils.data import DataLoader, TensorDataset

from gpulayer.pytorch import Module, Trainer
from gpulayer.pytorch.arguments import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore")


class Case:
    def __init__(self, rng: random.Random) -> None:
        pick = rng.choice
        self.optimizers = pick([1, 2])
        self.kind = pick(["SGD", "Adam"])
        self.every = pick([1, 2])  # batches between steps
        self.toggle = pick(["no", "pair", "context", "model"]) if self.optimizers == 2 else "no"
        self.closure = pick([False, False, True])
        self.clip = pick([None, 0.5])
        self.schedule = pick([False, True])
        self.returns = pick(["none", "tensor", "dict"])
        self.override = pick([False, True])  # backward
        self.validates = pick([False, True])
        self.bare = pick([False] * 5 + [True])
        self.stop_at = pick([None] * 4 + [2])
        self.arguments: dict[str, Any] = {
            "max_epochs": pick([1, 2]),
            "max_steps": pick([-1, -1, 3]),
            "log_every_n_steps": pick([1, 2]),
            "val_check_interval": pick([1.0, 2]),
            "num_sanity_val_steps": 0,
        }


def module_on(base: Any, case: Case, trace: list[Any]) -> Any:
    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first = torch.nn.Linear(1, 1)
            self.second = torch.nn.Linear(1, 1)
            for part in (self.first, self.second):
                torch.nn.init.constant_(part.weight, 0.5)
                torch.nn.init.constant_(part.bias, 0.1)

        def at(self, *what: Any) -> None:
            trace.append((*what, self.trainer.global_step, self.trainer.current_epoch))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.at("training_step", batch_idx)
            found = self.optimizers(use_pl_optimizer=not case.bare)
            for i, optimizer in enumerate(found if isinstance(found, list) else [found]):
                self.at("optimizer", isinstance(optimizer, torch.optim.Optimizer) or i)
                if case.toggle == "context":
                    with self.toggled_optimizer(optimizer):
                        self.one(optimizer, i, batch, batch_idx)
                elif case.toggle == "model" and not case.bare:
                    with optimizer.toggle_model():
                        self.one(optimizer, i, batch, batch_idx)
                else:
                    if case.toggle == "pair":
                        self.toggle_optimizer(optimizer)
                    self.one(optimizer, i, batch, batch_idx)
                    if case.toggle == "pair":
                        self.untoggle_optimizer(optimizer)
            if case.schedule and self.trainer.is_last_batch:
                scheduler = self.lr_schedulers()
                for one in scheduler if isinstance(scheduler, list) else [scheduler]:
                    one.step()
            if case.stop_at is not None and self.trainer.global_step >= case.stop_at:
                self.trainer.should_stop = True
            loss = batch[0].mean()
            return {"none": None, "tensor": loss, "dict": {"loss": loss, "x": loss}}[case.returns]

        def one(self, optimizer: Any, i: int, batch: Any, batch_idx: int) -> None:
            self.at("requires", [p.requires_grad for p in self.parameters()])

            def loss() -> Any:
                value = (self.second(self.first(batch[0])) ** 2).mean()
                self.log(f"loss{i}", value, on_epoch=True, on_step=True)
                return value

            if case.closure:

                def closure() -> Any:
                    optimizer.zero_grad()
                    value = loss()
                    self.manual_backward(value)
                    return value

                optimizer.step(closure=closure)
                return
            self.manual_backward(loss())
            if (batch_idx + 1) % case.every == 0:
                if case.clip:
                    self.clip_gradients(optimizer, case.clip, "norm")
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            kind = getattr(torch.optim, case.kind)
            parts = [self.first, self.second] if case.optimizers == 2 else [self]
            made = [kind(part.parameters(), lr=0.1) for part in parts]
            if not case.schedule:
                return made
            return made, [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in made]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.at("before_step", [bits(p.grad) for p in optimizer.param_groups[0]["params"]])

        def on_before_backward(self, loss: Any) -> None:
            self.at("before_backward", round(loss.item(), 4))

        def on_after_backward(self) -> None:
            self.at("after_backward")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.at("batch_end", sorted(outputs or {}))

    if case.override:

        def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
            self.at("backward")
            loss.backward(*args, **kwargs)

        Net.backward = backward
    if case.validates:
        Net.validation_step = lambda self, batch, batch_idx: self.log("v", batch[0].mean())
    return Net()


def loader(count: int) -> Any:
    data = TensorDataset(torch.arange(1, count + 1).float().unsqueeze(1))
    return DataLoader(data, batch_size=1)


def outcome(make: Any, base: Any, case: Case, folder: Path) -> dict[str, Any]:
    trace: list[Any] = []
    model = module_on(base, case, trace)
    trainer = make(
        accelerator="cpu", devices=1, enable_progress_bar=False, default_root_dir=folder,
        **case.arguments,
    )  # fmt: skip
    failed = None
    try:
        trainer.fit(model, loader(5), loader(2) if case.validates else None)
    except Exception as error:
        failed = error
    return {
        "error": kind(failed),
        "trace": trace,
        "counters": (trainer.global_step, trainer.current_epoch),
        "weights": [bits(value) for value in model.parameters()],
        "rows": rows_in(folder),
        "metrics": {k: round(float(v), 3) for k, v in trainer.callback_metrics.items()},
    }


@pytest.mark.configurations(60)
def test_manual_optimization_is_the_same(
    number: int, seed: int, lightning: Any, tmp_path: Path
) -> None:
    case = Case(random.Random(f"{seed}/manual/{number}"))

    theirs = their_trainer(tmp_path / "theirs")

    expected = outcome(theirs, lightning.LightningModule, case, tmp_path / "theirs")
    found = outcome(Trainer, Module, case, tmp_path / "ours")
    described = {k: v for k, v in vars(case).items() if v is not None}
    for key, value in expected.items():
        assert found[key] == value, (key, described)


class Plain(Module):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 5

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def quiet(**arguments: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=1, enable_progress_bar=False, logger=False, max_epochs=1,
        **arguments,
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.5}], ids=str
)
def test_arguments_of_automatic_optimization_are_refused(arguments: Any) -> None:
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        quiet(**arguments).fit(Plain(), loader(2))


def test_what_a_step_returns_is_checked() -> None:
    with pytest.raises(ArgumentError, match="training_step returned int"):
        quiet().fit(Plain(), loader(2))


def test_manual_backward_elsewhere_is_refused() -> None:
    with pytest.raises(RuntimeError, match="automatic_optimization = False"):
        Plain().manual_backward(torch.ones(1))


@pytest.mark.network
@pytest.mark.slow
def test_ranks_reduce_at_every_backward(tmp_path: Path) -> None:
    body = """
    class Two(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.a, self.b = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            x, y = batch
            for part, optimizer in zip((self.a, self.b), self.optimizers()):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(self.a(x) + self.b(x), y)
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.a, self.b)]

    class Half(torch.utils.data.IterableDataset):
        def __iter__(self):
            x, y = samples(32).tensors
            for i in range(4):
                part = slice(8 * i, 8 * i + 8) if WORLD == 1 else (
                    slice(8 * i + 4 * RANK, 8 * i + 4 * RANK + 4))
                yield x[part], y[part]

    model = Two()
    used = trainer(strategy="ddp_find_unused_parameters_true")
    used.fit(model, DataLoader(Half(), batch_size=None))
    tell(weights=[p.tolist() for p in model.parameters()], steps=used.global_step)
    """
    one = Ranks(tmp_path / "one", body, 1).check().told()
    ranks = Ranks(tmp_path / "two", body, 2).check()
    two = [ranks.told(rank) for rank in range(2)]
    assert two[0] == two[1]
    assert two[0]["steps"] == one["steps"] == 8
    for mine, theirs in zip(two[0]["weights"], one["weights"], strict=True):
        assert torch.allclose(torch.tensor(mine), torch.tensor(theirs), atol=1e-6)
