"""`EarlyStopping`: figures observed with Lightning, and the same runs under it."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import beside_lightning
import pytest
import torch
from one_weight import OneWeight, Validated, loader, trainer
from ranks import Ranks

from gpulayer.pytorch import EarlyStopping
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.early_stopping import EarlyStoppingReason

torch.set_num_threads(1)
NAN, INF = math.nan, math.inf


class Scripted(OneWeight):
    """Logs the n-th of given values in the n-th validation, then the last one."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__()
        self.values = list(values)
        self.checks = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", self.values[min(self.checks, len(self.values) - 1)])

    def on_validation_epoch_end(self) -> None:
        self.checks += 1


def checks(values: Sequence[float], epochs: int = 8, **options: Any) -> tuple[int, EarlyStopping]:
    """Train one validation per epoch; returns how many there were, and the callback."""
    model, callback = Scripted(values), EarlyStopping("v", **options)
    trainer(max_epochs=epochs, callbacks=callback).fit(model, loader(2), loader(1))
    return model.checks, callback


# -- the decision --------------------------------------------------------------------------------


def test_patience_counts_checks_without_improvement() -> None:
    count, callback = checks([3, 2, 2, 2, 2, 2])
    assert count == 5
    assert (callback.wait_count, callback.stopped_epoch) == (3, 4)
    assert callback.best_score == 2
    assert callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert "v did not improve in the last 3 checks" in str(callback.stopping_reason_message)


@pytest.mark.parametrize("patience", [0, 1])
def test_patience_of_0_and_1_stop_at_the_first_check_without_improvement(patience: int) -> None:
    assert checks([3, 2, 1, 1, 1], patience=patience)[0] == 4


def test_never_stopped_leaves_the_reason_open() -> None:
    count, callback = checks([5, 4, 3, 2], epochs=4)
    assert (count, callback.stopped_epoch, callback.wait_count) == (4, 0, 0)
    assert callback.stopping_reason is EarlyStoppingReason.NOT_STOPPED
    assert callback.stopping_reason_message is None


@pytest.mark.parametrize(
    ("values", "options", "count", "reason"),
    [
        ([4, 3, 2, 1], {"min_delta": 1, "patience": 2}, 5, "PATIENCE_EXHAUSTED"),
        ([4, 2.5, 1, -1], {"min_delta": 1, "patience": 1}, 5, "PATIENCE_EXHAUSTED"),
        ([1, 2, 3, 3], {"mode": "max", "patience": 1}, 4, "PATIENCE_EXHAUSTED"),
        ([3, NAN], {}, 2, "NON_FINITE_METRIC"),
        ([3, -INF], {}, 2, "NON_FINITE_METRIC"),
        ([3, NAN, NAN, 2], {"check_finite": False, "patience": 2}, 3, "PATIENCE_EXHAUSTED"),
        ([3, 2, 1], {"stopping_threshold": 2}, 3, "STOPPING_THRESHOLD"),
        ([1, 2, 3], {"divergence_threshold": 2}, 3, "DIVERGENCE_THRESHOLD"),
        ([1, 2, 3], {"mode": "max", "stopping_threshold": 2}, 3, "STOPPING_THRESHOLD"),
        ([3, 2, 1], {"mode": "max", "divergence_threshold": 2}, 3, "DIVERGENCE_THRESHOLD"),
        # non-finite is looked at before the thresholds, those before improvement
        ([3, -INF], {"stopping_threshold": 0}, 2, "NON_FINITE_METRIC"),
        ([1], {"stopping_threshold": 2, "divergence_threshold": 0}, 1, "STOPPING_THRESHOLD"),
    ],
)
def test_tests_are_strict_and_in_their_order(
    values: list[float], options: dict[str, Any], count: int, reason: str
) -> None:
    found, callback = checks(values, **options)
    assert (found, callback.stopping_reason.name) == (count, reason)


def test_minima_hold_a_stop_back() -> None:
    model, callback = Scripted([1, 2, 3, 4]), EarlyStopping("v", patience=1)
    trained = trainer(max_epochs=9, min_epochs=4, callbacks=callback)
    trained.fit(model, loader(2), loader(1))
    assert trained.current_epoch == 4
    assert trained.should_stop


def test_integer_interval_of_the_epoch_length_checks_after_validation() -> None:
    model, callback = Scripted([1, 2]), EarlyStopping("v", patience=1)
    trained = trainer(max_epochs=9, val_check_interval=2, callbacks=callback)
    trained.fit(model, loader(4), loader(1))
    assert (model.checks, trained.global_step) == (2, 4)


@pytest.mark.parametrize("verbose", [True, False])
def test_verbose_says_what_happened(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    checks([3, 1, 2, 2], patience=2, verbose=verbose)
    said = capsys.readouterr().out.splitlines()
    assert said == (
        ["v improved to 3", "v improved by 2 to 1",
         "v did not improve in the last 2 checks; the best was 1"] if verbose else []
    )  # fmt: skip


# -- where it is inactive ------------------------------------------------------------------------


def test_inactive_in_a_trial_run() -> None:
    trainer(fast_dev_run=True, callbacks=EarlyStopping("absent")).fit(
        Validated(), loader(), loader()
    )


def test_inactive_in_sanity_check_and_validate() -> None:
    callback = EarlyStopping("v", patience=1, check_on_train_epoch_end=False)
    trained = trainer(num_sanity_val_steps=-1, callbacks=callback)
    model = Scripted([NAN, 1.0])
    trained.fit(model, loader(2), loader(1))
    assert (callback.best_score, callback.wait_count, trained.should_stop) == (1, 0, False)
    model.values = [0.0]
    trained.validate(model, loader(1), verbose=False)
    assert callback.best_score == 1


# -- a missing value -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "arguments", "text"),
    [
        (Validated, {}, {"max_steps": 3}, "max_steps=3 ended the training"),
        (
            Validated,
            {"check_on_train_epoch_end": True},
            {"check_val_every_n_epoch": 2, "max_epochs": 2},
            "check_val_every_n_epoch=2 puts the first one after 2 epochs",
        ),
        (Validated, {}, {"limit_val_batches": 0}, "limit_val_batches=0 switches it off"),
        (OneWeight, {}, {}, "OneWeight defines no validation_step"),
        (
            Validated,
            {"check_on_train_epoch_end": True},
            {"val_check_interval": 10, "check_val_every_n_epoch": None},
            "val_check_interval=10 counts batches across epochs",
        ),
        (
            Validated,
            {"check_on_train_epoch_end": True},
            {"val_check_interval": "01:00:00:00"},
            "val_check_interval=1 day, 0:00:00 has not passed yet",
        ),
    ],
)
def test_missing_value_names_the_option_that_kept_validation_from_running(
    model: type[OneWeight], options: dict[str, Any], arguments: dict[str, Any], text: str
) -> None:
    trained = trainer(callbacks=EarlyStopping("mean", **options), **arguments)
    val = loader() if model is Validated else None
    logged = "'mean', which has not been logged: no validation has run, "
    with pytest.raises(RuntimeError, match=f"{logged}{text}.*; known: nothing"):
        trained.fit(model(), loader(), val)


@pytest.mark.filterwarnings("ignore:there is no validation loader")
def test_missing_value_without_a_loader() -> None:
    trained = trainer(callbacks=EarlyStopping("mean"))
    with pytest.raises(RuntimeError, match="the fit has no validation loader"):
        trained.fit(Validated(), loader())


def test_missing_value_after_a_validation_names_what_is_known() -> None:
    trained = trainer(callbacks=EarlyStopping("absent"))
    with pytest.raises(RuntimeError) as raised:
        trained.fit(Validated(), loader(), loader())
    assert str(raised.value) == (
        "EarlyStopping monitors 'absent', which has not been logged; known: mean, sum"
    )


def test_missing_value_is_left_out_if_not_strict() -> None:
    callback = EarlyStopping("absent", strict=False)
    trainer(max_epochs=2, callbacks=callback).fit(Validated(), loader(), loader())
    assert callback.wait_count == 0
    callback = EarlyStopping("absent", strict=False, verbose=True)
    with pytest.warns(RuntimeWarning, match="'absent', which has not been logged"):
        trainer(callbacks=callback).fit(Validated(), loader(), loader())


# -- state ---------------------------------------------------------------------------------------


def test_state_survives_a_weights_only_file(tmp_path: Path) -> None:
    _, callback = checks([3, 2, 2, 2], patience=2)
    assert callback.state_key == "EarlyStopping{'monitor': 'v', 'mode': 'min'}"
    torch.save(callback.state_dict(), tmp_path / "state.pt")
    other = EarlyStopping("v")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.state_dict() == callback.state_dict()
    assert (other.patience, other.stopping_reason) == (2, EarlyStoppingReason.PATIENCE_EXHAUSTED)


def test_two_of_one_monitor_need_two_names() -> None:
    trainer(callbacks=[EarlyStopping("a"), EarlyStopping("a", mode="max")])
    with pytest.raises(ArgumentError, match="two callbacks with one state_key"):
        trainer(callbacks=[EarlyStopping("a"), EarlyStopping("a")])


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ArgumentError, match='mode is "min" or "max", not \'least\''):
        EarlyStopping("v", mode="least")


# -- Lightning's behaviour -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.configurations(60)
def test_same_as_lightning(number: int, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{seed}/stopping/{number}")
    pick = rng.choice
    plan = beside_lightning.Plan(
        samples=pick([2, 5]),
        values=[pick([0, 1, 2, 3, 3.5, 4, *[NAN, INF] * pick([0, 0, 1])]) for _ in range(9)],
        val_batches=pick([1, 1, 1, 1, 0]),
    )
    options = {
        "monitor": pick(["v", "v", "x", "every"]),
        "min_delta": pick([0.0, 0.0, 0.5, 1]),
        "patience": pick([0, 1, 2, 3]),
        "mode": pick(["min", "max"]),
        "strict": pick([True, False]),
        "check_finite": pick([True, False]),
        "stopping_threshold": pick([None, None, 1, 3]),
        "divergence_threshold": pick([None, None, 1, 3]),
        "check_on_train_epoch_end": pick([None, None, True, False]),
    }
    arguments = {
        "max_epochs": pick([3, 6]),
        "max_steps": pick([-1, -1, 4]),
        "min_epochs": pick([None, None, 2]),
        "min_steps": pick([None, None, 7]),
        "val_check_interval": pick([1.0, 1.0, 1, 2, 0.5]),
        "check_val_every_n_epoch": pick([1, 1, 2]),
        "num_sanity_val_steps": pick([0, 1]),
        "limit_val_batches": pick([1.0, 1.0, 1.0, 0]),
        "fast_dev_run": pick([False] * 7 + [True]),
        "log_every_n_steps": pick([1, 2]),
    }

    def make(home: Any) -> Any:
        return importlib.import_module(f"{home.__name__}.early_stopping").EarlyStopping(**options)

    def read(callback: Any) -> Any:
        state = callback.state_dict()
        del state["stopping_reason_message"]  # our words
        state["best_score"] = beside_lightning.rounded(state["best_score"])
        return state, callback.state_key, callback.min_delta

    theirs, ours = beside_lightning.both(
        tmp_path, plan, make, read, fits=pick([1, 1, 2]), **arguments
    )
    beside_lightning.same(theirs, ours, options, arguments, vars(plan))


# -- several ranks -------------------------------------------------------------------------------


@pytest.mark.network
@pytest.mark.slow
def test_ranks_that_disagree_stop_together(tmp_path: Path) -> None:
    body = """
    from gpulayer.pytorch import EarlyStopping

    class Model(Net):
        def validation_step(self, batch, batch_idx):
            if RANK == 1 and self.current_epoch == 0:
                return  # this rank has no value at its first check
            # rank 0 gets better at each check; rank 1 is stuck after its first value
            self.log("v", -float(self.current_epoch) if RANK == 0 else 1.0)

    stopping = EarlyStopping("v", patience=2, strict=False)
    fit = trainer(max_epochs=9, callbacks=stopping)
    fit.fit(Model(), DataLoader(samples(8), 2), DataLoader(samples(4), 2))
    tell(epochs=fit.current_epoch, stopped=stopping.stopped_epoch, best=float(stopping.best_score),
         reason=stopping.stopping_reason.name, message=stopping.stopping_reason_message)
    """
    ranks = Ranks(tmp_path / "ranks", body, 2).check()
    first, second = ranks.told(0), ranks.told(1)
    assert (first["epochs"], first["stopped"]) == (second["epochs"], second["stopped"]) == (4, 3)
    assert (first["best"], first["reason"]) == (-3.0, "NOT_STOPPED")
    assert first["message"] == "another rank's value stopped training"
    assert (second["best"], second["reason"]) == (1.0, "PATIENCE_EXHAUSTED")
