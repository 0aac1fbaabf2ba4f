"""fit, validate, test and predict in a row, with callbacks: under Lightning 2.6.6 and under us.

Every hook of a callback and of the module is written down, with what it is given and what it can
see. Skipped where Lightning is not installed. `GPULAYER_TEST_SEED` repeats a run.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_lightning import bits, kind, rows_in, their_trainer
from torch.utils.data import DataLoader, TensorDataset

from gpulayer.pytorch import Callback, Module, Trainer

pytestmark = pytest.mark.filterwarnings("ignore")

PLAIN = (
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start",
    "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    *(
        f"on_{kind}_{what}"
        for kind in ("validation", "test", "predict")
        for what in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
    ),
)  # fmt: skip
OF_CALLBACKS = (*PLAIN, "on_sanity_check_start", "on_sanity_check_end", "setup", "teardown")
OF_MODULES = (*PLAIN, "prepare_data", "configure_model")


class Case:
    """What is called in which order, and what happens inside."""

    def __init__(self, rng: random.Random) -> None:
        pick = rng.choice
        self.calls = [pick(["fit", "fit", "validate", "test", "predict"]) for _ in range(3)]
        self.loaders = pick([1, 1, 2])
        self.on_step = pick([True, False])
        self.of_module = pick([True, False])  # a second callback, of the module
        self.callbacks = pick([1, 1, 2])
        self.drop_last = pick([True, False])
        self.index = pick([True, False]) or self.loaders > 1
        self.verbose = pick([True, False])
        self.keep = pick([True, True, False])
        self.defined = pick([True, True, False])  # predict_step, else forward
        self.fail_in = pick([None] * 8 + ["training_step", "test_step", "on_validation_start"])
        self.arguments: dict[str, Any] = {
            "max_epochs": pick([1, 2]),
            "limit_val_batches": pick([None, 1, 0.5]),
            "limit_test_batches": pick([None, 1, 0.5]),
            "limit_predict_batches": pick([None, 1, 0, 0.5]),
            "num_sanity_val_steps": pick([0, 1]),
            "log_every_n_steps": pick([1, 2]),
            "inference_mode": pick([True, False]),
            "fast_dev_run": pick([False] * 5 + [True]),
        }


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [round(x, 3) for x in value.detach().flatten().tolist()]
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return sorted((k, plain(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, int | str | None) else type(value).__name__


def loader(case: Case, count: int, size: int = 2, first: int = 1) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(first, first + count).float())
    return DataLoader(data, batch_size=size, drop_last=case.drop_last)


def callback_on(base: Any, name: str, trace: list[Any], classes: dict[str, Any]) -> Any:
    def hook(what: str) -> Any:
        def run(self: Any, trainer: Any, module: Any, *args: Any, **options: Any) -> None:
            given = plain((*args, *options.values()))
            trace.append((name, what, given, trainer.global_step, trainer.sanity_checking))
            if what.endswith(("_batch_end", "epoch_end", "epoch_start")) and "predict" not in what:
                module.log(f"{name}_{what}", 2.0 * trainer.current_epoch)

        return run

    def failed(self: Any, trainer: Any, module: Any, error: BaseException) -> None:
        trace.append((name, "on_exception", str(error)))

    # Callbacks of a module replace those of the same class, so a class is made once per run.
    hooks = {what: hook(what) for what in OF_CALLBACKS} | {"on_exception": failed}
    return classes.setdefault(name, type(name, (base,), hooks))()


def module_on(base: Any, callback: Any, case: Case, trace: list[Any]) -> Any:
    classes: dict[str, Any] = {}

    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))
            self.frozen = torch.nn.Dropout(0.0).eval()

        def forward(self, batch: Any) -> Any:
            return batch[0] * self.w + 10

        def at(self, what: str, *args: Any) -> None:
            inference = torch.is_inference_mode_enabled()
            seen = (self.training, self.frozen.training, torch.is_grad_enabled(), inference)
            trace.append(("module", what, plain(args), *seen))
            if what == case.fail_in:
                raise RuntimeError(f"fails in {what}")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.at("training_step", batch, batch_idx)
            loss = (self.w * batch[0].mean()).sum()
            self.log("loss", loss, on_step=case.on_step, on_epoch=True)
            return loss

        def evaluated(self, kind: str, batch: Any, *args: Any) -> Any:
            self.at(f"{kind}_step", batch, *args)
            self.log(kind, batch[0].mean(), on_step=case.on_step)
            self.log(f"{kind}_sum", batch[0].sum() * self.w.detach(), reduce_fx="sum")
            self.log(f"{kind}_hidden", 4.0, logger=False)
            return {"kept": batch[0].sum()}

        def configure_callbacks(self) -> Any:
            return callback_on(callback, "own", trace, classes) if case.of_module else []

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return loader(case, 5)

        def several(self) -> Any:
            found = [loader(case, 5 + i, 2, 10 * i) for i in range(case.loaders)]
            return found if case.loaders > 1 else found[0]

        val_dataloader = test_dataloader = predict_dataloader = several

        def setup(self, stage: str) -> None:
            self.at("setup", str(getattr(stage, "value", stage)))

        def teardown(self, stage: str) -> None:
            self.at("teardown", str(getattr(stage, "value", stage)))

    def step(kind: str) -> Any:
        if kind == "predict":

            def indexed(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
                self.at("predict_step", batch, batch_idx, dataloader_idx)
                return {"p": batch[0] * self.w, "i": (batch_idx, dataloader_idx)}

            return indexed
        if case.index:
            return lambda self, batch, batch_idx, dataloader_idx=0: self.evaluated(
                kind, batch, batch_idx, dataloader_idx
            )
        return lambda self, batch: self.evaluated(kind, batch)

    def hook(what: str) -> Any:
        def run(self: Any, *args: Any) -> None:
            self.at(what, *args, bits(self.w.grad) if what == "on_before_optimizer_step" else None)
            if what in ("on_validation_epoch_end", "on_test_epoch_end", "on_train_epoch_end"):
                self.log(what, 7.0)

        return run

    for what in ("validation", "test"):
        setattr(Net, f"{what}_step", step(what))
    if case.defined:
        Net.predict_step = step("predict")
    for what in OF_MODULES:
        setattr(Net, what, hook(what))
    return Net()


def outcome(make: Any, base: Any, callback: Any, case: Case, folder: Path) -> dict[str, Any]:
    trace: list[Any] = []
    model = module_on(base, callback, case, trace)
    given = [callback_on(callback, f"given{i}", trace, {}) for i in range(case.callbacks)]
    trainer = make(
        accelerator="cpu", devices=1, enable_progress_bar=False, default_root_dir=folder,
        callbacks=given, **case.arguments,
    )  # fmt: skip
    returned: list[Any] = []
    seen: list[Any] = []
    for call in case.calls:
        trace.append(call)
        options: dict[str, Any] = {}
        if call == "predict":
            options = {"return_predictions": case.keep}
        elif call != "fit":
            options = {"verbose": case.verbose}
        try:
            returned.append(plain(getattr(trainer, call)(model, **options)))
        except Exception as error:
            returned.append(("raised", kind(error), str(error)))
        seen.append(
            [
                plain(dict(getattr(trainer, name)))
                for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics")
            ]
        )
        seen.append((trainer.global_step, trainer.current_epoch, model.training, bits(model.w)))
    return {"returned": returned, "trace": trace, "seen": seen, "rows": rows_in(folder)}


@pytest.mark.configurations(80)
def test_calls_in_a_row_are_the_same(
    number: int, seed: int, lightning: Any, tmp_path: Path
) -> None:
    case = Case(random.Random(f"{seed}/calls/{number}"))

    theirs = their_trainer(tmp_path / "theirs")

    expected = outcome(
        theirs, lightning.LightningModule, lightning.Callback, case, tmp_path / "theirs"
    )
    found = outcome(Trainer, Module, Callback, case, tmp_path / "ours")
    described = {k: v for k, v in vars(case).items() if v is not None}
    for key, value in expected.items():
        for i, (one, other) in enumerate(zip(found[key], value, strict=False)):
            assert one == other, (key, i, described, found[key][max(0, i - 3) : i])
        assert len(found[key]) == len(value), (key, described)
