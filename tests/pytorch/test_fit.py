"""Fit in this process: figures observed with Lightning."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_weight import OneWeight, Validated, loader, rows, trainer
from torch.utils.data import DataLoader, IterableDataset

from gpulayer.pytorch import Trainer, precision
from gpulayer.pytorch.arguments import ArgumentError

torch.set_num_threads(1)


def validation_positions(model: OneWeight) -> list[int]:
    """Return after how many training batches, counted over all epochs, validation ran."""
    done, found = 0, []
    for kind, index in model.calls:
        if kind == "train":
            done += 1
        elif index == 0:
            found.append(done)
    return found


# -- accumulation and counters (1.2, 1.4, 1.5) ---------------------------------------------------


def test_accumulation_divides_short_last_window_by_n_too() -> None:
    model = OneWeight()
    trained = trainer(accumulate_grad_batches=3, max_epochs=2)
    trained.fit(model, loader())
    assert model.step_gradients == [2.0, 5.0, 2.333] * 2
    assert (trained.global_step, trained.current_epoch) == (6, 2)


def test_window_longer_than_epoch_steps_once_per_epoch() -> None:
    model = OneWeight()
    trained = trainer(accumulate_grad_batches=10, max_epochs=2)
    trained.fit(model, loader())
    assert model.step_gradients == [2.8, 2.8]
    assert trained.global_step == 2


def test_max_steps_counts_optimizer_steps() -> None:
    model = Validated()
    trained = trainer(accumulate_grad_batches=3, max_epochs=None, max_steps=4)
    trained.fit(model, loader(), loader())
    train = [index for kind, index in model.calls if kind == "train"]
    assert train == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert validation_positions(model) == [7]  # none where max_steps cut the second epoch
    assert (trained.global_step, trained.current_epoch) == (4, 2)


def test_global_step_is_seen_before_and_after_the_step() -> None:
    seen = []

    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(("step", self.global_step, self.current_epoch))
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(("end", self.global_step, self.current_epoch))

        def on_train_epoch_end(self) -> None:
            seen.append(("epoch", self.global_step, self.current_epoch))

    trainer().fit(Model(), loader(2))
    assert seen == [
        ("step", 0, 0), ("end", 1, 0), ("step", 1, 0), ("end", 2, 0), ("epoch", 2, 0),
    ]  # fmt: skip


def test_second_fit_continues_the_counters() -> None:
    model, trained = OneWeight(), trainer(max_epochs=1)
    trained.fit(model, loader(3))
    trained.fit(model, loader(3))
    assert trained.global_step == 3  # returned at once
    trained.max_epochs = 2
    trained.fit(model, loader(3))
    assert (trained.global_step, trained.current_epoch) == (6, 2)


def test_should_stop_validates_at_once() -> None:
    class Model(Validated):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = batch_idx == 1

    model = Model()
    trained = trainer(max_epochs=5)
    trained.fit(model, loader(), loader())
    assert validation_positions(model) == [2]
    assert (trained.global_step, trained.current_epoch) == (2, 1)


def test_should_stop_waits_for_min_steps() -> None:
    class Model(OneWeight):
        def on_train_start(self) -> None:
            self.trainer.should_stop = True

    trained = trainer(max_epochs=5, min_steps=10)
    trained.fit(Model(), loader())
    assert trained.global_step == 10


def test_batch_start_returning_minus_one_skips_the_rest_and_validation() -> None:
    class Model(Validated):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    model = Model()
    trained = trainer()
    trained.fit(model, loader(), loader())
    assert model.calls == [("train", 0), ("train", 1)]
    assert (trained.global_step, trained.current_epoch) == (2, 1)


def test_training_step_returning_none_counts_but_does_not_update() -> None:
    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None: ...

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert (outputs == {}) == (batch_idx == 0)

    model = Model()
    trained = trainer()
    trained.fit(model, loader(2))
    assert model.weight.item() == -2.0
    assert trained.global_step == 2


def test_outputs_hold_the_divided_loss_and_what_else_was_returned() -> None:
    seen = []

    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss + 6.0, "batch": batch[0]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((outputs["loss"].item(), outputs["batch"].item()))
            assert not outputs["loss"].requires_grad

    trainer(accumulate_grad_batches=3).fit(Model(), loader(2))
    assert seen == [(2.0, 1.0), (2.0, 2.0)]


@pytest.mark.parametrize("returned", [1.0, {"output": 1}])
def test_training_step_returning_no_loss_raises(returned: Any) -> None:
    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return returned

    with pytest.raises(ArgumentError, match="loss"):
        trainer().fit(Model(), loader(1))


def test_gradients_are_readable_after_the_step_and_zeroed_after_forward() -> None:
    order = []

    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            order.append("forward")
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            order.append("zero_grad")

        def on_before_backward(self, loss: Any) -> None:
            order.append("backward")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert self.weight.grad is not None

    trainer(accumulate_grad_batches=2).fit(Model(), loader(2))
    assert order == ["forward", "zero_grad", "backward", "forward", "backward"]


def test_optimizer_step_that_forgets_its_closure_raises() -> None:
    class Model(OneWeight):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
        ) -> None:
            optimizer.step()

    with pytest.raises(ArgumentError, match="closure"):
        trainer().fit(Model(), loader(1))


def test_lbfgs_calls_the_closure_several_times() -> None:
    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls.append(batch_idx)
            return ((self.weight - batch[0]) ** 2).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=4)

    model = Model()
    trainer().fit(model, loader(1, first=3))
    assert len(model.calls) > 1
    assert model.weight.item() == pytest.approx(3.0, abs=1e-3)


# -- when validation runs (1.6) ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [7, 14]),
        ({"val_check_interval": 0.5}, [3, 6, 10, 13]),
        ({"val_check_interval": 3}, [3, 6, 10, 13]),
        ({"val_check_interval": 1}, list(range(1, 15))),
        ({"val_check_interval": 10, "check_val_every_n_epoch": None}, [10]),
        ({"val_check_interval": 7, "check_val_every_n_epoch": None}, [7, 14]),
        ({"check_val_every_n_epoch": None}, [7, 14]),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 0.5}, [10, 13]),
        ({"limit_val_batches": 0}, []),
    ],
)
def test_validation_positions(arguments: dict[str, Any], expected: list[int]) -> None:
    model = Validated()
    trainer(max_epochs=2, **arguments).fit(model, loader(), loader())
    assert validation_positions(model) == expected


def test_interval_longer_than_an_epoch_is_refused() -> None:
    with pytest.raises(ArgumentError, match="val_check_interval=8"):
        trainer(val_check_interval=8).fit(Validated(), loader(), loader())


class Endless(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter([[torch.tensor([float(i)])] for i in range(1, self.count + 1)])


def test_loader_of_unknown_length_steps_its_short_window_and_validates_at_its_end() -> None:
    model = Validated()
    stream = DataLoader(Endless(7), batch_size=None)
    trainer(accumulate_grad_batches=3).fit(model, stream, loader(2))
    assert model.step_gradients == [2.0, 5.0, 2.333]
    assert validation_positions(model) == [7]


class Short(IterableDataset[Any]):
    """Announces more than it yields."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        return iter([[torch.tensor([1.0])] for _ in range(3)])


def test_loader_shorter_than_its_length_ends_the_epoch() -> None:
    class Model(Validated):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    model, trained = Model(), trainer()
    with pytest.warns(UserWarning, match="announced 5 batches and yielded 3"):
        trained.fit(model, DataLoader(Short(), batch_size=None), loader(1))
    assert validation_positions(model) == [3]
    assert trained.optimizers[0].param_groups[0]["lr"] == 0.5
    with pytest.raises(RuntimeError, match="were not applied"):
        trainer(accumulate_grad_batches=2).fit(
            Model(), DataLoader(Short(), batch_size=None), loader(1)
        )


def test_empty_iterable_raises() -> None:
    with pytest.raises(RuntimeError, match="no batch"):
        trainer().fit(OneWeight(), DataLoader(Endless(0), batch_size=None))


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, 1), (1.0, 7), (3, 3), (0.5, 3), (0, 0), (2.0, 2), (99, 7)]
)
def test_type_of_a_limit_decides_its_meaning(limit: float, expected: int) -> None:
    model = OneWeight()
    trainer(limit_train_batches=limit).fit(model, loader())
    assert len(model.calls) == expected


# -- modes, sanity check (1.7, 1.8) --------------------------------------------------------------


def test_train_and_eval_flags_are_restored_exactly_and_no_grad_holds() -> None:
    class Model(Validated):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.BatchNorm1d(1).eval()
            self.live = torch.nn.Dropout()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not any((self.training, self.frozen.training, self.live.training))
            assert not torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.training
            assert self.live.training
            assert not self.frozen.training
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match="1 submodules are in eval mode"):
        trainer(val_check_interval=1).fit(Model(), loader(2), loader(1))


def test_sanity_check_leaves_no_trace(tmp_path: Path) -> None:
    class Model(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            torch.rand(1), np.random.rand(), random.random()

        def on_train_start(self) -> None:
            self.calls.append("start")
            assert self.trainer.callback_metrics == {}
            assert not self.trainer.sanity_checking
            self.drawn = (torch.rand(1).item(), np.random.rand(), random.random())

    def drawn(steps: int) -> tuple[Model, Trainer]:
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        model = Model()
        trained = trainer(tmp_path, num_sanity_val_steps=steps)
        trained.fit(model, loader(1), loader(5))
        return model, trained

    plain, trained_plain = drawn(0)
    checked, trained_checked = drawn(2)
    assert checked.calls[:3] == [("val", 0), ("val", 1), "start"]
    assert checked.drawn == plain.drawn
    assert rows(trained_checked) == rows(trained_plain)
    everything, _ = drawn(-1)
    assert everything.calls.index("start") == 5


# -- precision and clipping (1.10) ---------------------------------------------------------------


def test_mixed_precision_wraps_the_steps_and_keeps_weights() -> None:
    class Model(Validated):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self.layer(batch[0])
            assert out.dtype is torch.bfloat16
            return out.float().sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert self.layer(batch[0]).dtype is torch.bfloat16

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.layer.weight.dtype is torch.float32

    trainer(precision="bf16-mixed").fit(Model(), loader(2), loader(2))


@pytest.mark.parametrize(("algorithm", "expected"), [("norm", 1.5), ("value", 1.5)])
def test_clipping_happens_after_the_last_hook(algorithm: str, expected: float) -> None:
    model = OneWeight()
    trainer(gradient_clip_val=1.5, gradient_clip_algorithm=algorithm).fit(model, loader(2))
    assert model.step_gradients == [1.0, 2.0]  # the hook sees them unclipped
    assert model.weight.item() == pytest.approx(-(1.0 + expected))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_step_without_a_gradient_is_not_clipped(algorithm: str) -> None:
    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    used = trainer(gradient_clip_val=1.0, gradient_clip_algorithm=algorithm)
    used.fit(Model(), loader(2))
    assert used.global_step == 2


# -- optimizers and schedulers (1.11) ------------------------------------------------------------


class Scheduled(Validated):
    """`form` makes what configure_optimizers returns from an optimizer."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form
        self.stepped: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.position = (self.current_epoch, batch_idx)
        return super().training_step(batch, batch_idx)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.stepped.append(self.position)
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        return self.form(torch.optim.SGD(self.parameters(), lr=1.0))


def half(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


@pytest.mark.parametrize(
    "form",
    [
        lambda o: ([o], [half(o)]),
        lambda o: ([o], half(o)),
        lambda o: {"optimizer": o, "lr_scheduler": half(o)},
        lambda o: [{"optimizer": o, "lr_scheduler": {"scheduler": half(o)}}],
    ],
)
def test_epoch_scheduler_is_stepped_on_the_last_batch(form: Any) -> None:
    model = Scheduled(form)
    trained = trainer(max_epochs=2)
    trained.fit(model, loader(3), loader(1))
    assert model.stepped == [(0, 2), (1, 2)]
    assert trained.optimizers[0].param_groups[0]["lr"] == 0.25


def test_step_frequency_counts_batches_of_the_epoch() -> None:
    model = Scheduled(
        lambda o: {
            "optimizer": o,
            "lr_scheduler": {"scheduler": half(o), "interval": "step", "frequency": 2},
        }
    )
    trainer(accumulate_grad_batches=3, max_epochs=2).fit(model, loader(), loader(1))
    assert model.stepped == [(0, 5), (1, 5)]


def test_plateau_reads_the_validation_metric() -> None:
    model = Scheduled(lambda o: {"optimizer": o, "lr_scheduler": plateau(o), "monitor": "mean"})
    trained = trainer(max_epochs=3)
    trained.fit(model, loader(2), loader(2))
    assert len(model.stepped) == 3
    assert trained.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_plateau_without_its_metric_raises_or_warns() -> None:
    def form(strict: bool) -> Any:
        return lambda o: {
            "optimizer": o,
            "lr_scheduler": {"scheduler": plateau(o), "monitor": "mean", "strict": strict},
        }

    with pytest.raises(ArgumentError, match="'mean', which has not been logged"):
        trainer(max_epochs=2, check_val_every_n_epoch=2).fit(
            Scheduled(form(True)), loader(1), loader(1)
        )
    with pytest.warns(UserWarning, match="has not been logged"):
        trainer(check_val_every_n_epoch=2).fit(Scheduled(form(False)), loader(1), loader(1))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda o: (o, half(o)), "optimizer, scheduler"),
        (lambda o: [o, torch.optim.SGD(o.param_groups[0]["params"], lr=1)], "2 optimizers"),
        (lambda o: {"optimizer": o, "lr_scheduler": plateau(o)}, "metric to monitor"),
        (
            lambda o: {
                "optimizer": o,
                "monitor": "mean",
                "lr_scheduler": {"scheduler": plateau(o)},
            },
            "inside the lr_scheduler dict",
        ),
        (lambda o: ([o], [half(copy.deepcopy(o))]), "did not return"),
        (
            lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": half(o), "interval": "day"}},
            "interval",
        ),
        (lambda o: "adam", "returned str"),
    ],
)
def test_wrong_forms_are_refused_with_the_right_one(form: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        trainer().fit(Scheduled(form), loader(1))
    assert message in f"{caught.value} {caught.value.hint}"


def test_no_optimizer_trains_nothing_and_counts() -> None:
    class Model(OneWeight):
        def configure_optimizers(self) -> Any:
            return None

    model, trained = Model(), trainer()
    with pytest.warns(UserWarning, match="updates no weights"):
        trained.fit(model, loader(3))
    assert model.weight.item() == 0.0
    assert trained.global_step == 3


def test_estimated_steps_are_known_in_configure_optimizers() -> None:
    class Model(OneWeight):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    model = Model()
    trainer(accumulate_grad_batches=3, max_epochs=2).fit(model, loader())
    assert model.estimate == 6


# -- metrics.csv (1.13) --------------------------------------------------------------------------


def test_rows_of_metrics_csv_use_the_count_of_stepping_batches(tmp_path: Path) -> None:
    class Model(Validated):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("x", batch[0].mean(), on_step=True, on_epoch=True)
            return loss

    trained = trainer(tmp_path, accumulate_grad_batches=3, max_epochs=2)
    trained.fit(Model(), loader(), loader())
    assert rows(trained)[:6] == [
        {"epoch": 0, "step": 0, "x_step": 3},
        {"epoch": 0, "step": 1, "x_step": 6},
        {"epoch": 0, "step": 2, "x_step": 7},
        {"epoch": 0, "step": 2, "mean": 4, "sum": 28},
        {"epoch": 0, "step": 2, "x_epoch": 4},
        {"epoch": 1, "step": 3, "x_step": 3},
    ]
    assert trained.log_dir == str(tmp_path / "gpulayer_logs" / "version_0")
    again = trainer(tmp_path)
    again.fit(Model(), loader(1), loader(1))
    assert again.log_dir == str(tmp_path / "gpulayer_logs" / "version_1")


def test_log_every_n_steps_counts_from_one(tmp_path: Path) -> None:
    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", batch[0].mean())
            return super().training_step(batch, batch_idx)

    trained = trainer(tmp_path, log_every_n_steps=3)
    trained.fit(Model(), loader())
    assert rows(trained) == [{"epoch": 0, "step": 2, "x": 3}, {"epoch": 0, "step": 5, "x": 6}]


def test_exception_leaves_the_rows_so_far(tmp_path: Path) -> None:
    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ValueError("batch 2")
            self.log("x", batch[0].mean())
            return super().training_step(batch, batch_idx)

    trained = trainer(tmp_path)
    with pytest.raises(ValueError, match="batch 2"):
        trained.fit(Model(), loader())
    assert len(rows(trained)) == 2


def test_module_is_on_the_cpu_and_detached_from_nothing_after_fit() -> None:
    model, trained = OneWeight(), trainer()
    trained.fit(model, loader(1))
    assert model.device.type == "cpu"
    assert model.trainer is trained


# -- 16-mixed, with the scaler on the CPU: it works the same and needs no GPU ------------------


def test_scaler_skips_bad_steps_and_hooks_see_unscaled_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(precision._DEVICES, "16-mixed", ("cpu",))
    scales = []

    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {1: loss * float("inf"), 2: None}.get(batch_idx, loss)

        def on_before_backward(self, loss: torch.Tensor) -> None:
            scales.append(self.trainer.runtime.scaler.get_scale())  # type: ignore[union-attr]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.weight.grad is not None:  # zeroed, and no backward where there was no loss
                self.step_gradients.append(self.weight.grad.item())

        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
        ) -> None:
            assert optimizer.param_groups[0]["lr"] == 1.0
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    model = Model()
    trained = trainer(precision="16-mixed", gradient_clip_val=3.0)
    trained.fit(model, loader(4))
    assert model.step_gradients[0] == 1.0
    assert model.step_gradients[-1] == 4.0
    assert model.weight.item() == pytest.approx(-1.0 - 3.0)  # the second and third made no update
    assert trained.global_step == 4
    assert scales == [65536.0, 65536.0, 32768.0]


def test_scaler_and_lbfgs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(precision._DEVICES, "16-mixed", ("cpu",))

    class Model(OneWeight):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ArgumentError, match="LBFGS"):
        trainer(precision="16-mixed").fit(Model(), loader(1))


# -- what a step costs ---------------------------------------------------------------------------


def test_nothing_is_read_from_the_device_between_logging_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    class Model(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None: ...

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx > 0:
                return
            for name in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
                real = getattr(torch.Tensor, name)

                def counted(self: Any, *args: Any, name: str = name, real: Any = real) -> Any:
                    reads.append(name)
                    return real(self, *args)

                monkeypatch.setattr(torch.Tensor, name, counted)

        def on_train_epoch_end(self) -> None:
            monkeypatch.undo()

    trainer(tmp_path, gradient_clip_val=1.0, log_every_n_steps=2).fit(Model(), loader(20))
    assert reads == []
