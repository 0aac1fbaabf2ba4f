"""Signals during a fit, and the checkpoint that every fit leaves."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch.utils.data import DataLoader, TensorDataset

from gpulayer.pytorch import Callback, Module, Trainer, stopping
from gpulayer.pytorch.model_checkpoint import ModelCheckpoint

# A fit that goes on has a log directory of its own.
pytestmark = pytest.mark.filterwarnings("ignore:dirpath was")


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Sends(Callback):
    """Sends this process a signal the n-th time that a hook runs."""

    def __init__(self, hook: str, count: int, number: int = signal.SIGINT) -> None:
        self.left = count
        self.error: BaseException | None = None

        def send(*args: Any) -> None:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), number)

        setattr(self, hook, send)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        self.error = exception


def loader(shuffle: bool = True) -> DataLoader[Any]:
    x = torch.arange(28.0).reshape(14, 2) / 28
    return DataLoader(TensorDataset(x), 2, shuffle=shuffle)


def trainer(folder: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 0}
    return Trainer(
        accelerator="cpu", default_root_dir=folder, log_every_n_steps=1,
        callbacks=list(callbacks), **{**defaults, **arguments},
    )  # fmt: skip


def fit(run: Trainer, ckpt_path: Path | None = None) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Net()
    run.fit(model, loader(), loader(shuffle=False), ckpt_path=ckpt_path)
    return dict(model.state_dict())


def final(run: Trainer) -> Path:
    callback = run.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    return Path(callback.final_model_path)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# -- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "count", "step"),
    [
        ("on_train_batch_start", 3, 3),  # the batch in hand is finished
        ("on_after_backward", 9, 9),
        ("on_train_batch_end", 10, 10),
        ("on_validation_batch_start", 2, 7),  # a validation is not waited for
        ("on_train_epoch_start", 2, 8),
    ],
)
def test_signal_ends_a_fit_that_can_go_on_exactly(
    hook: str, count: int, step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unbroken = fit(trainer(tmp_path / "unbroken"))
    sends = Sends(hook, count)
    cut = trainer(tmp_path / "cut", sends)
    with pytest.raises(KeyboardInterrupt):
        fit(cut)
    assert cut.global_step == step
    assert isinstance(sends.error, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    said = capsys.readouterr().out
    assert f"stopped in epoch {(step - 1) // 7}, after step {step}; fit(ckpt_path='" in said
    assert str(final(cut)) in said
    torch.manual_seed(77)
    resumed = trainer(tmp_path / "resumed")
    assert same(fit(resumed, final(cut)), unbroken)
    assert resumed.global_step == 21


def test_signal_at_the_end_of_an_epoch_ends_it_with_its_hooks(tmp_path: Path) -> None:
    cut = trainer(tmp_path, Sends("on_train_batch_end", 7))
    with pytest.raises(KeyboardInterrupt):
        fit(cut)
    assert cut.current_epoch == 1
    saved = list(tmp_path.rglob("*.ckpt"))
    assert [one.name for one in saved] == ["epoch=0-step=7.ckpt"]  # the state is in it


def test_sigterm_ends_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        fit(trainer(tmp_path, Sends("on_train_batch_end", 2, signal.SIGTERM)))
    assert error.value.code == 128 + signal.SIGTERM
    assert (tmp_path / "gpulayer_logs/version_0/checkpoints/final.ckpt").is_file()


@pytest.mark.parametrize(
    "hook", ["setup", "on_fit_start", "on_sanity_check_start", "on_fit_end", "teardown"]
)
def test_signal_around_the_training_ends_it_at_once_and_is_told(hook: str, tmp_path: Path) -> None:
    sends = Sends(hook, 1, signal.SIGTERM)
    with pytest.raises(SystemExit) as error:
        fit(trainer(tmp_path, sends, num_sanity_val_steps=1))
    assert error.value.code == 128 + signal.SIGTERM
    assert isinstance(sends.error, SystemExit)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_signal_ends_an_evaluation_at_once(tmp_path: Path) -> None:
    sends = Sends("on_validation_batch_start", 1, signal.SIGTERM)
    with pytest.raises(SystemExit):
        trainer(tmp_path, sends).validate(Net(), loader())
    assert isinstance(sends.error, SystemExit)


def test_signal_after_the_last_batch_is_not_lost(tmp_path: Path) -> None:
    ended = Sends("on_train_end", 1)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer(tmp_path, ended))


def test_another_signal_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])

    class Twice(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C, from a starting program
            now[0] += 2
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("went on")

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path).fit(Twice(), loader(), loader())


def test_handler_of_the_script_stays(tmp_path: Path) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        run = trainer(tmp_path, Sends("on_train_batch_end", 2, signal.SIGTERM))
        fit(run)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]
    assert run.global_step == 21


@pytest.mark.network
@pytest.mark.parametrize("window", [1, 3])
def test_signal_to_one_rank_stops_both_and_both_go_on_exactly(tmp_path: Path, window: int) -> None:
    body = """
        import pathlib, time

        class Ready(Net):
            def on_train_batch_end(self, outputs, batch, batch_idx):
                if WAITS and self.trainer.global_step > 2:
                    pathlib.Path("ready").touch()
                    time.sleep(0.05)

        model = Ready()
        run = trainer(max_epochs=WINDOW * 3, accumulate_grad_batches=WINDOW)
        try:
            run.fit(model, DataLoader(samples(400), 2, shuffle=True), ckpt_path=PATH)
        except SystemExit as error:
            tell(code=error.code, step=run.global_step, epoch=run.current_epoch)
            raise
        tell(sums=[p.sum().item() for p in model.parameters()], step=run.global_step)
    """

    def with_values(waits: bool, path: str | None) -> str:
        return f"WAITS, PATH, WINDOW = {waits}, {path!r}, {window}\n" + textwrap.dedent(body)

    whole = Ranks(tmp_path / "whole", with_values(False, None), world=2).check()
    cut = Ranks(tmp_path / "cut", with_values(True, None), world=2, signals={1: signal.SIGTERM})
    assert cut.codes == [143, 143], "\n".join(cut.output)
    assert cut.told(0) == cut.told(1)
    assert 2 < cut.told()["step"] < whole.told()["step"]
    path = tmp_path / "cut" / "gpulayer_logs/version_0/checkpoints/final.ckpt"
    assert "final.ckpt') goes on" in cut.output[0]
    resumed = Ranks(tmp_path / "resumed", with_values(False, str(path)), world=2).check()
    assert resumed.told() == whole.told()


# -- the last checkpoint --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ["epoch=2-step=21.ckpt"]),  # the default holds the last state already
        ({"val_check_interval": 3}, ["epoch=2-step=20.ckpt", "final.ckpt"]),
        ({"check_val_every_n_epoch": 2}, ["epoch=1-step=14.ckpt", "final.ckpt"]),
        ({"max_steps": 10, "check_val_every_n_epoch": 2}, ["final.ckpt"]),
        ({"enable_checkpointing": False}, []),
        ({"fast_dev_run": True}, []),
        ({"max_epochs": 0}, []),
    ],
)
def test_every_fit_leaves_its_last_state(
    arguments: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    run = trainer(tmp_path, **arguments)
    weights = fit(run)
    assert sorted(one.name for one in tmp_path.rglob("*.ckpt")) == names
    if "final.ckpt" in names:
        assert same(torch.load(final(run), weights_only=True)["state_dict"], weights)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"save_top_k": 0}, []),
        ({"save_top_k": 0, "save_final": True}, ["final.ckpt"]),
        ({"every_n_train_steps": 5, "save_final": False}, ["epoch=2-step=20.ckpt"]),
        ({"save_weights_only": True}, ["epoch=2-step=21.ckpt", "final.ckpt"]),
    ],
)
def test_callback_says_whether(arguments: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    run = trainer(tmp_path, ModelCheckpoint(**arguments))
    fit(run)
    assert sorted(one.name for one in tmp_path.rglob("*.ckpt")) == names


def test_fit_goes_on_from_its_last_state_to_a_higher_limit(tmp_path: Path) -> None:
    unbroken = fit(trainer(tmp_path / "unbroken", max_steps=18, val_check_interval=3))
    cut = trainer(tmp_path / "cut", max_steps=11, val_check_interval=3)
    fit(cut)
    torch.manual_seed(9)
    further = trainer(tmp_path / "further", max_steps=18, val_check_interval=3)
    assert same(fit(further, final(cut)), unbroken)
