"""What a checkpoint holds, how it is written and read, and which one a call takes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from one_weight import OneWeight, Validated, loader, trainer

from gpulayer import __version__
from gpulayer.pytorch import Callback, Module, Trainer, checkpoints
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.model_checkpoint import ModelCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:there is no validation loader")


class Counting(Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Evaluated(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("weight", self.weight)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("weight", self.weight)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight


def saved(path: Path, epochs: int = 1, **arguments: Any) -> Trainer:
    """Train on 7 samples, whose step gradients add up to -28 an epoch, and save."""
    made = trainer(max_epochs=epochs, enable_checkpointing=False, **arguments)
    made.fit(Evaluated(), loader(7))
    made.save_checkpoint(path)
    return made


# -- contents -------------------------------------------------------------------------------------


def test_file_has_lightnings_keys_and_ours(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.ckpt"
    saved(path, callbacks=Counting())
    found = torch.load(path, weights_only=True)
    assert found.keys() == {
        "epoch", "global_step", "gpulayer_version", "state_dict", "loops", "callbacks",
        "optimizer_states", "lr_schedulers", "ranks",
    }  # fmt: skip
    assert (found["epoch"], found["global_step"]) == (1, 7)
    assert found["gpulayer_version"] == __version__
    assert found["state_dict"]["weight"].item() == -28.0
    assert found["callbacks"] == {"Counting": {"count": 7}}
    assert [one.name for one in path.parent.iterdir()] == ["a.ckpt"]


def test_weights_only_leaves_out_what_only_resuming_needs(tmp_path: Path) -> None:
    made = saved(tmp_path / "full.ckpt", callbacks=Counting())
    made.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    found = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert found.keys() == {"epoch", "global_step", "gpulayer_version", "state_dict", "loops"}
    with pytest.raises(ArgumentError, match="weights only"):
        trainer().fit(OneWeight(), loader(7), ckpt_path=tmp_path / "weights.ckpt")


def test_hooks_add_to_the_file_and_read_it_in_lightnings_order(tmp_path: Path) -> None:
    order: list[str] = []

    class Model(OneWeight):
        def setup(self, stage: str) -> None:
            order.append("setup")

        def configure_model(self) -> None:
            order.append("configure_model")

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            order.append("module saves")
            checkpoint["mine"] = {"x": 1}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            order.append(f"module loads {checkpoint['mine']} over {self.weight.item()}")

        def configure_optimizers(self) -> Any:
            order.append(f"configure_optimizers with {self.weight.item()}")
            return super().configure_optimizers()

        def on_fit_start(self) -> None:
            order.append(f"fit start at {self.global_step}")

        def on_train_start(self) -> None:
            order.append(f"train start at {self.global_step} in {self.current_epoch}")

    class Keeps(Counting):
        def on_save_checkpoint(self, *args: Any) -> None:
            order.append("callback saves")

        def on_load_checkpoint(self, *args: Any) -> None:
            order.append("callback loads")

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            order.append(f"callback state {state_dict}")

    made = trainer(callbacks=Keeps(), enable_checkpointing=False)
    made.fit(Model(), loader(7))
    made.save_checkpoint(tmp_path / "a.ckpt")
    assert order[-2:] == ["callback saves", "module saves"]
    order.clear()
    again = trainer(callbacks=Keeps(), enable_checkpointing=False, max_epochs=2)
    again.fit(Model(), loader(7), ckpt_path=tmp_path / "a.ckpt")
    assert order == [
        "setup",
        "configure_model",
        "module loads {'x': 1} over 0.0",
        "callback loads",
        "callback state {'count': 7}",
        "configure_optimizers with -28.0",
        "fit start at 0",
        "train start at 7 in 1",
    ]


def test_what_cannot_be_read_back_is_refused_and_named_and_leaves_no_file(tmp_path: Path) -> None:
    class Odd(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"path": tmp_path}

    with pytest.raises(ArgumentError, match=r"the state of .*Odd .*PosixPath"):
        saved(tmp_path / "a.ckpt", callbacks=Odd())
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_the_file_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saved(tmp_path / "a.ckpt")
    before = (tmp_path / "a.ckpt").read_bytes()
    made._module.weight.data += 1  # type: ignore[union-attr,operator]

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        made.save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_saving_needs_a_model_and_its_optimizer(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="nothing to save"):
        trainer().save_checkpoint(tmp_path / "a.ckpt")
    made = saved(tmp_path / "a.ckpt")
    made._ran_elsewhere = True
    with pytest.raises(ArgumentError, match="stayed with the ranks"):
        made.save_checkpoint(tmp_path / "b.ckpt")
    made.save_checkpoint(tmp_path / "b.ckpt", weights_only=True)


def test_faults_of_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpoints.load(tmp_path / "none.ckpt")
    (tmp_path / "text.ckpt").write_text("text")
    with pytest.raises(ArgumentError, match=r"text\.ckpt"):
        checkpoints.load(tmp_path / "text.ckpt")
    torch.save([1], tmp_path / "list.ckpt")
    with pytest.raises(ArgumentError, match="state_dict"):
        checkpoints.load(tmp_path / "list.ckpt")
    torch.save({"state_dict": {}, "x": tmp_path}, tmp_path / "code.ckpt")
    with pytest.raises(ArgumentError, match="more than tensors"):
        checkpoints.load(tmp_path / "code.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(ArgumentError, match="not written by this Trainer"):
        checkpoints.load_for_fit(tmp_path / "foreign.ckpt")
    saved(tmp_path / "a.ckpt")
    whole = (tmp_path / "a.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArgumentError, match="damaged"):
        checkpoints.load(tmp_path / "cut.ckpt")


def test_schedulers_and_scaler_like_states_are_readable(tmp_path: Path) -> None:
    class Model(OneWeight):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            schedulers = torch.optim.lr_scheduler
            return [optimizer], [
                schedulers.MultiStepLR(optimizer, [1, 2]),
                schedulers.LambdaLR(optimizer, lambda epoch: 0.5),
                schedulers.OneCycleLR(optimizer, 0.1, 30),
                schedulers.SequentialLR(
                    optimizer, [schedulers.ConstantLR(optimizer), schedulers.StepLR(optimizer, 2)],
                    [1],
                ),
                schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
            ]  # fmt: skip

    made = trainer(enable_checkpointing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(Model(), loader(3))
        made.save_checkpoint(tmp_path / "a.ckpt")
        trainer(max_epochs=2).fit(Model(), loader(3), ckpt_path=tmp_path / "a.ckpt")


# -- which one a call takes -----------------------------------------------------------------------


def test_epochs_below_the_stored_one_raise_and_equal_ones_return_at_once(tmp_path: Path) -> None:
    saved(tmp_path / "a.ckpt", epochs=3)
    with pytest.raises(ArgumentError, match="epoch 3"):
        trainer(max_epochs=2).fit(OneWeight(), loader(7), ckpt_path=tmp_path / "a.ckpt")
    model, made = OneWeight(), trainer(max_epochs=3)
    made.fit(model, loader(7), ckpt_path=tmp_path / "a.ckpt")
    assert (model.calls, model.weight.item()) == ([], -84.0)
    assert (made.global_step, made.current_epoch) == (21, 3)


def test_without_a_model_the_best_is_loaded_with_a_warning(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_epochs=2)
    model = Evaluated()
    made.fit(model, loader(7))
    with torch.no_grad():
        model.weight += 1000
    assert made.test(model, loader(1), verbose=False) == [{"weight": 944.0}]
    with pytest.warns(UserWarning, match="best checkpoint"):
        assert made.test(dataloaders=loader(1), verbose=False) == [{"weight": -56.0}]
    with torch.no_grad():
        model.weight += 1000
    assert made.validate(model, loader(1), "best", verbose=False) == [{"weight": -56.0}]
    saved(tmp_path / "other.ckpt")
    found = made.predict(model, loader(1), ckpt_path=tmp_path / "other.ckpt")
    assert found is not None
    assert found[0].item() == -28.0


def test_best_without_a_checkpoint_raises() -> None:
    for arguments, why in (
        ({"enable_checkpointing": False}, "no ModelCheckpoint"),
        ({"enable_checkpointing": True, "fast_dev_run": True}, "fast_dev_run"),
        ({"enable_checkpointing": True}, "none has been written"),
    ):
        made = trainer(**arguments)
        if why != "none has been written":
            made.fit(Evaluated(), loader(3))
        with pytest.raises(ArgumentError, match=why):
            made.test(Evaluated(), loader(1), ckpt_path="best")


def test_last_takes_the_newest_or_starts_afresh(tmp_path: Path) -> None:
    def fit(epochs: int) -> tuple[Trainer, Evaluated]:
        model = Evaluated()
        made = trainer(callbacks=ModelCheckpoint(tmp_path, save_last=True), max_epochs=epochs)
        made.fit(model, loader(7), ckpt_path="last")
        return made, model

    with pytest.warns(UserWarning, match="no last checkpoint"):
        fit(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is not empty")
        made, model = fit(3)
    assert made.global_step == 21
    assert len([call for call in model.calls if call[0] == "train"]) == 14
    assert made.ckpt_path == str(tmp_path / "last.ckpt")


def test_missing_callbacks_are_told(tmp_path: Path) -> None:
    saved(tmp_path / "a.ckpt", callbacks=Counting())
    with pytest.warns(UserWarning, match="Counting"):
        trainer(max_epochs=2).fit(OneWeight(), loader(7), ckpt_path=tmp_path / "a.ckpt")


def test_other_optimizers_than_in_the_file_raise(tmp_path: Path) -> None:
    class Two(OneWeight):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=1.0) for _ in range(2)]

    saved(tmp_path / "a.ckpt")
    with pytest.raises(ArgumentError, match="1 optimizers"):
        trainer(max_epochs=2).fit(Two(), loader(7), ckpt_path=tmp_path / "a.ckpt")


# -- load_from_checkpoint -------------------------------------------------------------------------


class Sized(Evaluated):
    def __init__(self, size: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.more = torch.nn.Linear(size, size, bias=bias)


def test_module_is_made_with_its_arguments_and_weights(tmp_path: Path) -> None:
    made = trainer(enable_checkpointing=False)
    made.fit(Sized(3), loader(2))
    made.save_checkpoint(tmp_path / "a.ckpt")
    found = Sized.load_from_checkpoint(tmp_path / "a.ckpt", size=3)
    assert (found.weight.item(), found.more.weight.shape) == (-3.0, (3, 3))
    with pytest.raises(RuntimeError, match=r"more\.bias"):
        Sized.load_from_checkpoint(tmp_path / "a.ckpt", size=3, bias=True)
    loose = Sized.load_from_checkpoint(tmp_path / "a.ckpt", strict=False, size=3, bias=True)
    assert loose.weight.item() == -3.0
    there = Sized.load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu", size=3)
    assert there.device.type == "cpu"
