"""`LearningRateMonitor`: names, rhythm and values, and the same runs under Lightning."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beside_lightning
import pytest
import torch
from one_weight import OneWeight, loader, rows, trainer
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Rprop
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from gpulayer.pytorch import LearningRateMonitor
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.lr_monitor import names
from gpulayer.pytorch.optimizers import SchedulerConfig

torch.set_num_threads(1)


def parameter() -> Tensor:
    return torch.nn.Parameter(torch.zeros(1))


class Optimized(OneWeight):
    """Has the optimizers that a function makes."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


def written(path: Path, make: Callable[[Any], Any], **options: Any) -> list[tuple[int, Any]]:
    """Train 2 epochs of 4 batches; returns (step, values) of what the monitor wrote."""
    callback = LearningRateMonitor(**options)
    trained = trainer(path, max_epochs=2, log_every_n_steps=2, callbacks=callback)
    trained.fit(Optimized(make), loader(4))
    return [
        (int(row["step"]), {k: v for k, v in row.items() if k not in ("step", "epoch")})
        for row in rows(trained)
    ]


# -- rhythm --------------------------------------------------------------------------------------


def halved(interval: str) -> Callable[[Any], Any]:
    def make(module: Any) -> Any:
        optimizer = SGD(module.parameters(), lr=1.0)
        scheduler = StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": interval}]

    return make


def test_interval_is_the_scheduler_s_own(tmp_path: Path) -> None:
    found = written(tmp_path / "epoch", halved("epoch"))
    assert found == [(0, {"lr-SGD": 1.0}), (4, {"lr-SGD": 0.5})]
    found = written(tmp_path / "step", halved("step"))
    # before the batches of logging steps: 1 and 3
    assert found == [(step, {"lr-SGD": 0.5**step}) for step in (1, 3, 5, 7)]


def test_interval_given_overrides_the_scheduler_s(tmp_path: Path) -> None:
    found = written(tmp_path / "epoch", halved("step"), logging_interval="epoch")
    assert found == [(0, {"lr-SGD": 1.0}), (4, {"lr-SGD": 0.5**4})]
    found = written(tmp_path / "step", halved("epoch"), logging_interval="step")
    assert found == [(step, {"lr-SGD": lr}) for step, lr in ((1, 1), (3, 1), (5, 0.5), (7, 0.5))]


def test_optimizer_without_scheduler_is_written_at_both(tmp_path: Path) -> None:
    found = written(tmp_path, lambda module: SGD(module.parameters(), lr=1.0))
    assert [step for step, _ in found] == [0, 1, 3, 4, 5, 7]


def test_window_repeats_the_value_for_each_of_its_batches(tmp_path: Path) -> None:
    callback = LearningRateMonitor("step")
    trained = trainer(tmp_path, accumulate_grad_batches=3, callbacks=callback)
    trained.fit(Optimized(halved("epoch")), loader(7))
    assert callback.lrs == {"lr-SGD": [1.0] * 7}
    assert [int(row["step"]) for row in rows(trained)] == [0, 0, 0, 1, 1, 1, 2]


def test_trial_run_writes_nothing_but_callback_metrics(tmp_path: Path) -> None:
    callback = LearningRateMonitor()
    trained = trainer(tmp_path, fast_dev_run=True, callbacks=callback)
    trained.fit(Optimized(halved("epoch")), loader())
    assert trained.callback_metrics["lr-SGD"] == 1.0
    assert trained.log_dir is None
    assert trained.logged_metrics == {}


# -- names and values ----------------------------------------------------------------------------


def test_names_of_groups_and_of_optimizers_of_one_class() -> None:
    first = SGD([parameter()], lr=0.1)
    second = SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=0.1)
    third = Adam([{"params": [parameter()], "name": "head"}])
    fourth = Adam([{"params": [parameter()], "name": "a"}, {"params": [parameter()]}])
    found = [of_groups for _, _, of_groups in names([], [first, second, third, fourth])]
    assert found == [
        ["lr-SGD"],
        ["lr-SGD-1/pg1", "lr-SGD-1/pg2"],
        ["lr-Adam/head"],
        ["lr-Adam-1/a", "lr-Adam-1/pg2"],
    ]


def test_schedulers_come_first_and_may_have_a_name() -> None:
    plain, scheduled = SGD([parameter()], lr=0.1), SGD([parameter()], lr=0.1)
    config = SchedulerConfig(StepLR(scheduled, 1), name="mine")
    found = names([config], [plain, scheduled])
    assert [(one, of_groups) for one, _, of_groups in found] == [
        (scheduled, ["mine"]),
        (plain, ["lr-SGD"]),
    ]


def test_groups_of_one_name_are_refused() -> None:
    groups = [{"params": [parameter()], "name": "same"} for _ in range(2)]
    with pytest.raises(ArgumentError, match="several parameter groups are called 'same'"):
        names([], [SGD(groups, lr=0.1)])


@pytest.mark.parametrize(
    ("make", "momentum", "decay"),
    [
        (lambda m: SGD(m.parameters(), lr=1.0, momentum=0.5, weight_decay=0.25), 0.5, 0.25),
        (lambda m: AdamW(m.parameters(), betas=(0.75, 0.5), weight_decay=0.125), 0.75, 0.125),
    ],
)
def test_momentum_and_weight_decay(
    tmp_path: Path, make: Callable[[Any], Any], momentum: float, decay: float
) -> None:
    callback = LearningRateMonitor("epoch", log_momentum=True, log_weight_decay=True)
    trained = trainer(tmp_path, log_every_n_steps=0, callbacks=callback)
    trained.fit(Optimized(make), loader(2))
    (name,) = callback.lrs
    assert callback.last_momentum_values == {f"{name}-momentum": momentum}
    assert callback.last_weight_decay_values == {f"{name}-weight_decay": decay}
    (row,) = rows(trained)
    assert row == {
        "step": 0, name: row[name], f"{name}-momentum": momentum, f"{name}-weight_decay": decay,
    }  # fmt: skip


def test_optimizer_without_momentum_is_warned_of_and_logged_as_0(tmp_path: Path) -> None:
    callback = LearningRateMonitor("epoch", log_momentum=True)
    with pytest.warns(RuntimeWarning, match="neither momentum nor betas"):
        trainer(tmp_path, callbacks=callback, log_every_n_steps=0).fit(
            Optimized(lambda module: Rprop(module.parameters())), loader(2)
        )
    assert callback.last_momentum_values == {"lr-Rprop-momentum": 0}


def test_learning_rate_in_a_tensor_is_kept_as_it_was(tmp_path: Path) -> None:
    def make(module: Any) -> Any:
        optimizer = Adam(module.parameters(), lr=torch.tensor(1.0))
        return [optimizer], [ExponentialLR(optimizer, 0.5)]

    found = written(tmp_path, make)
    assert found == [(0, {"lr-Adam": 1.0}), (4, {"lr-Adam": 0.5})]


def test_group_added_while_training_takes_the_name_over(tmp_path: Path) -> None:
    class Grows(Optimized):
        def on_train_epoch_end(self) -> None:
            if self.trainer.current_epoch == 0:
                self.trainer.optimizers[0].add_param_group({"params": [parameter()], "lr": 3.0})

    callback = LearningRateMonitor("epoch")
    trained = trainer(tmp_path, max_epochs=2, callbacks=callback, log_every_n_steps=0)
    trained.fit(Grows(lambda module: SGD(module.parameters(), lr=1.0)), loader(2))
    assert callback.lrs == {"lr-SGD/pg1": [1.0, 1.0], "lr-SGD/pg2": [3.0]}


@pytest.mark.filterwarnings("ignore:configure_optimizers returned None")
def test_no_optimizer_has_no_rate(tmp_path: Path) -> None:
    callback = LearningRateMonitor()
    trained = trainer(tmp_path, callbacks=callback)
    trained.fit(Optimized(lambda module: None), loader())
    assert callback.lrs == {"lr-NoOptimizer": []}
    assert trained.callback_metrics == {}


# -- refusals ------------------------------------------------------------------------------------


def test_unknown_interval_is_refused() -> None:
    with pytest.raises(ArgumentError, match="or None, not 'batch'"):
        LearningRateMonitor("batch")


@pytest.mark.parametrize("fast_dev_run", [True, False])
def test_no_logger_is_refused(fast_dev_run: bool) -> None:
    trained = trainer(fast_dev_run=fast_dev_run, callbacks=LearningRateMonitor())
    with pytest.raises(ArgumentError, match="the Trainer has logger=False"):
        trained.fit(OneWeight(), loader())


# -- Lightning's behaviour -----------------------------------------------------------------------


def optimizers(rng: random.Random) -> Callable[[Any], Any]:
    """Draw an optimizer with parameter groups and schedulers."""
    pick = rng.choice
    groups, named = pick([1, 1, 2]), pick([True, False])
    kind = pick(["sgd", "adam", "rprop"])
    count, interval = pick([0, 1, 1, 2]), pick(["step", "epoch"])
    name, second = pick([None, None, "mine"]), pick(["step", "epoch"])

    def make(module: Any) -> Any:
        parameters = [module.w, module.b]
        parts = [parameters] if groups == 1 else [parameters[:1], parameters[1:]]
        given = [{"params": part} | ({"name": f"g{i}"} if named else {})
                 for i, part in enumerate(parts)]  # fmt: skip
        optimizer: Any
        if kind == "sgd":
            optimizer = SGD(given, lr=0.5, momentum=0.5, weight_decay=0.25)
        elif kind == "adam":
            optimizer = Adam(given, lr=0.5)
        else:
            optimizer = Rprop(given, lr=0.5)
        schedulers = [
            {"scheduler": StepLR(optimizer, 2, 0.5), "interval": interval, "name": name},
            {"scheduler": ExponentialLR(optimizer, 0.75), "interval": second},
        ]
        return [optimizer], schedulers[:count]

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.configurations(40)
def test_same_as_lightning(number: int, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{seed}/rates/{number}")
    pick = rng.choice
    plan = beside_lightning.Plan(
        samples=pick([2, 5, 7]), optimizer=optimizers(rng), stop_at=pick([None, None, 1])
    )
    options = {
        "logging_interval": pick([None, None, "step", "epoch"]),
        "log_momentum": pick([True, False]),
    }
    arguments = {
        "max_epochs": pick([1, 3]),
        "max_steps": pick([-1, -1, 4]),
        "min_steps": pick([None, 5]),
        "accumulate_grad_batches": pick([1, 1, 3]),
        "val_check_interval": pick([1.0, 1, 0.5]),
        "num_sanity_val_steps": pick([0, 1]),
        "log_every_n_steps": pick([0, 1, 2, 3, 50]),
        "fast_dev_run": pick([False] * 5 + [True, 3]),
        "logger": pick([True] * 9 + [False]),
    }

    def make(home: Any) -> Any:
        found = importlib.import_module(f"{home.__name__}.lr_monitor")
        return found.LearningRateMonitor(**options)

    def read(callback: Any) -> Any:
        return callback.lrs, callback.last_momentum_values, callback.state_key

    theirs, ours = beside_lightning.both(tmp_path, plan, make, read, fits=pick([1, 2]), **arguments)
    beside_lightning.same(theirs, ours, options, arguments)
