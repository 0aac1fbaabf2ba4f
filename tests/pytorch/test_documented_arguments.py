"""Every argument of `Trainer` and of the callbacks: documented, and held to its word by a test.

The table at the end names that test; those that are nowhere else stand here.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpulayer_mesh.core.types import Accelerator
from one_weight import OneWeight, Validated, loader, trainer
from ranks import Ranks

import gpulayer.pytorch
from gpulayer import launcher
from gpulayer.launcher import JobOutcome
from gpulayer.pytorch import Callback, EarlyStopping, ModelCheckpoint, Timer, Trainer, results

ROOT = Path(__file__).parents[2]


class Called(Validated):
    """Writes down which batches its steps saw, and in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def at(self, kind: str, batch_idx: int) -> None:
        self.seen.append((kind, batch_idx, torch.is_inference_mode_enabled()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.at("val", batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.at("test", batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("predict", batch_idx)
        return batch[0]


# -- where ---------------------------------------------------------------------------------------


def test_machines_are_asked_for_with_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[dict[str, Any]] = []

    def run_job(request: dict[str, Any]) -> JobOutcome:
        requests.append(request)
        return JobOutcome("job", 7, None)

    monkeypatch.setattr(results, "_indices", itertools.count())  # as in a fresh process
    monkeypatch.setattr(results, "_made", {})
    monkeypatch.setattr(launcher, "script_request", lambda **fields: fields)
    monkeypatch.setattr(launcher, "run_job", run_job)
    monkeypatch.setenv("TOKEN", "t0ken")
    used = trainer(
        accelerator="gpu", num_nodes=2, devices=4, target=["box-1", "!box-2"],
        env={"A": "1"}, secrets=["TOKEN"], stop_grace_s=5.0, wait_s=60.0, restarts=3,
        on_disconnect=600,
    )  # fmt: skip
    with pytest.raises(SystemExit, match="7"):
        used.fit(OneWeight(), loader(2))
    (found,) = requests
    expected = {
        "nodes": 2, "devices": 4, "accelerator": Accelerator.CUDA, "target": ("box-1", "!box-2"),
        "env": {"A": "1"}, "secrets": {"TOKEN": "t0ken"}, "stop_grace_s": 5.0, "wait_s": 60.0,
        "restarts": 3, "on_disconnect_s": 600.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


@pytest.mark.network
@pytest.mark.slow
def test_strategy_and_distributed_sampler_decide_what_ranks_share(tmp_path: Path) -> None:
    body = """
    def seen(strategy, use_distributed_sampler):
        found = []

        class Model(Net):
            def training_step(self, batch, batch_idx):
                found.extend(batch[1].flatten().tolist())
                return self.loss(batch)

        data = TensorDataset(torch.zeros(6, 4), torch.arange(6.0)[:, None])
        used = trainer(strategy=strategy, use_distributed_sampler=use_distributed_sampler)
        used.fit(Model(), DataLoader(data, 1, shuffle=use_distributed_sampler))
        return found

    tell(shared=seen("ddp", True), whole=seen("auto", False))
    """
    ranks = Ranks(tmp_path / "two", body, 2).check()
    first, second = ranks.told(0), ranks.told(1)
    assert sorted(first["shared"] + second["shared"]) == [0, 1, 2, 3, 4, 5]
    assert first["whole"] == second["whole"] == [0, 1, 2, 3, 4, 5]


# -- how much ------------------------------------------------------------------------------------


def test_limits_of_evaluation_count_batches_or_are_fractions() -> None:
    for limit, count in ((1, 1), (3, 3), (1.0, 4), (0.5, 2)):
        model = Called()
        used = trainer(
            limit_val_batches=limit, limit_test_batches=limit, limit_predict_batches=limit
        )
        used.validate(model, loader(4), verbose=False)
        used.test(model, loader(4), verbose=False)
        expected = [(kind, i) for kind in ("val", "test") for i in range(count)]
        assert [seen[:2] for seen in model.seen] == expected
        predicted = used.predict(model, loader(4))
        assert predicted is not None
        assert len(predicted) == count


def test_fast_dev_run_is_so_many_batches_of_everything_and_writes_nothing(tmp_path: Path) -> None:
    model = Called()
    used = trainer(
        tmp_path, fast_dev_run=2, max_epochs=5, num_sanity_val_steps=2, enable_checkpointing=True,
    )  # fmt: skip
    used.fit(model, loader(7), loader(7))
    assert (used.global_step, used.current_epoch) == (2, 1)
    assert [seen[:2] for seen in model.seen] == [("val", 0), ("val", 1)]
    assert list(tmp_path.iterdir()) == []


# -- how -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inference_mode", [True, False])
def test_inference_mode_holds_outside_fit(inference_mode: bool) -> None:
    model = Called()
    used = trainer(inference_mode=inference_mode)
    used.fit(model, loader(1), loader(1))
    used.validate(model, loader(1), verbose=False)
    used.test(model, loader(1), verbose=False)
    used.predict(model, loader(1))
    kinds = ("val", "val", "test", "predict")
    modes = (False, *[inference_mode] * 3)
    assert model.seen == [(kind, 0, mode) for kind, mode in zip(kinds, modes, strict=True)]


def test_gradients_are_scaled_by_norm_and_cut_by_value() -> None:
    class Two(OneWeight):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.weight * torch.tensor([3.0, 4.0])).sum()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    for gradient_clip_algorithm, expected in (
        (None, [-1.5, -2.0]), ("norm", [-1.5, -2.0]), ("value", [-2.5, -2.5]),
    ):  # fmt: skip
        model = Two()
        used = trainer(gradient_clip_val=2.5, gradient_clip_algorithm=gradient_clip_algorithm)
        used.fit(model, loader(1))
        assert model.weight.tolist() == pytest.approx(expected, abs=1e-4)


def test_callbacks_are_one_or_several() -> None:
    first, second = Callback(), Callback()
    assert trainer(callbacks=first).callbacks == [first]
    assert trainer(callbacks=(first, second)).callbacks == [first, second]
    with pytest.raises(TypeError, match="str is no"):
        Trainer(callbacks=["early"])  # type: ignore[list-item]


# -- what is left --------------------------------------------------------------------------------


def test_logger_and_root_directory_decide_what_is_written(tmp_path: Path) -> None:
    used = trainer(logger=True, default_root_dir=tmp_path / "given", enable_checkpointing=True)
    model = Validated()
    used.fit(model, loader(2), loader(1))
    files = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    folder = Path("given", "gpulayer_logs", "version_0")
    assert files == {folder / "metrics.csv", folder / "checkpoints" / "epoch=0-step=2.ckpt"}
    quiet = trainer(logger=False, default_root_dir=tmp_path / "other", enable_checkpointing=False)
    quiet.fit(model, loader(2), loader(1))
    assert not (tmp_path / "other").exists()


def test_working_directory_is_the_default_root_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    used = trainer(logger=True, default_root_dir=None)
    used.fit(Validated(), loader(2), loader(1))
    assert used.log_dir == str(tmp_path / "gpulayer_logs" / "version_0")


def test_progress_is_printed_unless_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    for enable_progress_bar in (True, False):
        used = trainer(enable_progress_bar=enable_progress_bar)
        used.fit(OneWeight(), loader(2))
        used.validate(Validated(), loader(1))
        assert bool(capsys.readouterr().out) is enable_progress_bar


# -- callbacks -----------------------------------------------------------------------------------


def test_verbose_timer_and_checkpoint_say_what_they_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verbose in (True, False):
        callbacks = [
            Timer({"seconds": 0}, verbose=verbose),
            ModelCheckpoint(tmp_path / str(verbose), monitor="mean", verbose=verbose),
        ]
        trainer(callbacks=callbacks, min_epochs=1).fit(Validated(), loader(4), loader(1))
        said = capsys.readouterr().out
        assert bool(said) is verbose
        assert ("time limit reached" in said) is ("step=4.ckpt" in said) is verbose


@pytest.mark.parametrize("log_rank_zero_only", [True, False])
def test_other_ranks_words_of_early_stopping_are_printed_on_request(
    log_rank_zero_only: bool,
) -> None:
    said: list[str] = []
    for rank in range(2):
        place = SimpleNamespace(
            world_size=2, global_rank=rank, is_global_zero=rank == 0, _say=said.append
        )
        EarlyStopping("mean", log_rank_zero_only=log_rank_zero_only)._say(place, "improved")  # type: ignore[arg-type]
    assert said == ["rank 0: improved", "rank 1: improved"][: 1 if log_rank_zero_only else 2]


def test_checkpoint_of_weights_only_is_written_on_request(tmp_path: Path) -> None:
    for save_weights_only in (True, False):
        kept = ModelCheckpoint(
            tmp_path / str(save_weights_only), save_weights_only=save_weights_only
        )
        trainer(callbacks=kept).fit(OneWeight(), loader(2))
        held = torch.load(kept.best_model_path, weights_only=True)
        assert ("optimizer_states" in held) is not save_weights_only


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"every_n_epochs": 1}, [3, 6, 9, 12]),
        ({"every_n_epochs": 2}, [6, 12]),
        ({"every_n_epochs": 0}, []),
        ({"save_on_train_epoch_end": True}, [3, 6, 9, 12]),
        ({"save_on_train_epoch_end": False}, [2, 5, 8, 11]),  # after validations
    ],
    ids=str,
)
def test_checkpoints_are_written_in_the_epochs_asked_for(
    arguments: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    kept = ModelCheckpoint(
        tmp_path, filename="{step}", save_top_k=-1, save_final=False, **arguments
    )
    interval = 2 if "save_on_train_epoch_end" in arguments else 1.0
    used = trainer(callbacks=kept, max_epochs=4, val_check_interval=interval)
    used.fit(Validated(), loader(3), loader(1))
    assert {path.name for path in tmp_path.iterdir()} == {f"step={step}.ckpt" for step in steps}


# -- the table -----------------------------------------------------------------------------------

HERE = "test_documented_arguments.py"
STOPPING = "test_early_stopping.py::test_same_as_lightning"

# argument -> the test that fails when it stops doing what the documentation says
TESTS = {
    "Trainer": {
        "accelerator": f"{HERE}::test_machines_are_asked_for_with_what_was_given",
        "strategy": f"{HERE}::test_strategy_and_distributed_sampler_decide_what_ranks_share",
        "devices": f"{HERE}::test_machines_are_asked_for_with_what_was_given",
        "num_nodes": f"{HERE}::test_machines_are_asked_for_with_what_was_given",
        "precision": "test_fit.py::test_mixed_precision_wraps_the_steps_and_keeps_weights",
        "target": f"{HERE}::test_machines_are_asked_for_with_what_was_given",
        "env": f"{HERE}::test_machines_are_asked_for_with_what_was_given",
        "secrets": f"{HERE}::test_machines_are_asked_for_with_what_was_given",
        "stop_grace_s": f"{HERE}::test_machines_are_asked_for_with_what_was_given",
        "wait_s": f"{HERE}::test_machines_are_asked_for_with_what_was_given",
        "restarts": f"{HERE}::test_machines_are_asked_for_with_what_was_given",
        "on_disconnect": f"{HERE}::test_machines_are_asked_for_with_what_was_given",
        "callbacks": f"{HERE}::test_callbacks_are_one_or_several",
        "max_epochs": "test_fit.py::test_second_fit_continues_the_counters",
        "min_epochs": "test_early_stopping.py::test_minima_hold_a_stop_back",
        "max_steps": "test_fit.py::test_max_steps_counts_optimizer_steps",
        "min_steps": "test_fit.py::test_should_stop_waits_for_min_steps",
        "max_time": "test_timer.py::test_time_counts_validation_and_ends_after_the_batch",
        "limit_train_batches": "test_fit.py::test_type_of_a_limit_decides_its_meaning",
        "limit_val_batches": f"{HERE}::test_limits_of_evaluation_count_batches_or_are_fractions",
        "limit_test_batches": f"{HERE}::test_limits_of_evaluation_count_batches_or_are_fractions",
        "limit_predict_batches": f"{HERE}::"
        "test_limits_of_evaluation_count_batches_or_are_fractions",
        "val_check_interval": "test_fit.py::test_validation_positions",
        "check_val_every_n_epoch": "test_fit.py::test_validation_positions",
        "num_sanity_val_steps": "test_fit.py::test_sanity_check_leaves_no_trace",
        "fast_dev_run": f"{HERE}::"
        "test_fast_dev_run_is_so_many_batches_of_everything_and_writes_nothing",
        "log_every_n_steps": "test_fit.py::test_log_every_n_steps_counts_from_one",
        "accumulate_grad_batches": "test_fit.py::"
        "test_accumulation_divides_short_last_window_by_n_too",
        "gradient_clip_val": f"{HERE}::test_gradients_are_scaled_by_norm_and_cut_by_value",
        "gradient_clip_algorithm": f"{HERE}::test_gradients_are_scaled_by_norm_and_cut_by_value",
        "logger": f"{HERE}::test_logger_and_root_directory_decide_what_is_written",
        "enable_checkpointing": f"{HERE}::test_logger_and_root_directory_decide_what_is_written",
        "enable_progress_bar": f"{HERE}::test_progress_is_printed_unless_switched_off",
        "default_root_dir": f"{HERE}::test_working_directory_is_the_default_root_dir",
        "prefetch": "test_prefetch.py::test_fit_is_the_one_in_step",
        "deterministic": "test_backends.py::test_deterministic_algorithms",
        "benchmark": "test_backends.py::test_autotuning_is_on_where_it_is_worth_while",
        "inference_mode": f"{HERE}::test_inference_mode_holds_outside_fit",
        "use_distributed_sampler": f"{HERE}::"
        "test_strategy_and_distributed_sampler_decide_what_ranks_share",
    },
    "EarlyStopping": {
        "monitor": STOPPING,
        "min_delta": "test_early_stopping.py::test_tests_are_strict_and_in_their_order",
        "patience": "test_early_stopping.py::"
        "test_patience_of_0_and_1_stop_at_the_first_check_without_improvement",
        "verbose": "test_early_stopping.py::test_verbose_says_what_happened",
        "mode": "test_early_stopping.py::test_tests_are_strict_and_in_their_order",
        "strict": "test_early_stopping.py::test_missing_value_is_left_out_if_not_strict",
        "check_finite": "test_early_stopping.py::test_tests_are_strict_and_in_their_order",
        "stopping_threshold": "test_early_stopping.py::test_tests_are_strict_and_in_their_order",
        "divergence_threshold": "test_early_stopping.py::test_tests_are_strict_and_in_their_order",
        "check_on_train_epoch_end": STOPPING,
        "log_rank_zero_only": f"{HERE}::"
        "test_other_ranks_words_of_early_stopping_are_printed_on_request",
    },
    "Timer": {
        "duration": "test_timer.py::test_same_as_lightning",
        "interval": "test_timer.py::test_interval_of_epochs_lets_the_epoch_end",
        "verbose": f"{HERE}::test_verbose_timer_and_checkpoint_say_what_they_do",
    },
    "LearningRateMonitor": {
        "logging_interval": "test_lr_monitor.py::test_interval_given_overrides_the_scheduler_s",
        "log_momentum": "test_lr_monitor.py::test_momentum_and_weight_decay",
        "log_weight_decay": "test_lr_monitor.py::test_momentum_and_weight_decay",
    },
    "StepMonitor": {
        "grad_norm": "test_step_monitor.py::test_only_what_is_asked_for_is_logged",
        "throughput": "test_step_monitor.py::test_only_what_is_asked_for_is_logged",
    },
    "ModelCheckpoint": {
        "dirpath": "test_model_checkpoint.py::test_other_directory_takes_over_the_best_path_only",
        "filename": "test_model_checkpoint.py::test_names_hold_logged_values",
        "monitor": "test_model_checkpoint.py::test_last_is_written_only_with_another_save",
        "verbose": f"{HERE}::test_verbose_timer_and_checkpoint_say_what_they_do",
        "save_last": "test_model_checkpoint.py::test_last_is_written_only_with_another_save",
        "save_top_k": "test_model_checkpoint.py::"
        "test_fixed_name_gets_a_version_where_it_would_hide_another",
        "save_weights_only": f"{HERE}::test_checkpoint_of_weights_only_is_written_on_request",
        "mode": "test_model_checkpoint.py::"
        "test_ties_keep_the_older_file_and_nan_is_kept_until_beaten",
        "auto_insert_metric_name": "test_model_checkpoint.py::test_names_hold_logged_values",
        "every_n_train_steps": "test_model_checkpoint.py::"
        "test_save_after_steps_takes_the_metric_of_a_validation_at_the_same_batch",
        "train_time_interval": "test_model_checkpoint.py::test_save_after_a_time",
        "every_n_epochs": f"{HERE}::test_checkpoints_are_written_in_the_epochs_asked_for",
        "save_on_train_epoch_end": f"{HERE}::test_checkpoints_are_written_in_the_epochs_asked_for",
        "save_final": "test_stopping.py::test_callback_says_whether",
        "enable_version_counter": "test_model_checkpoint.py::"
        "test_fixed_name_gets_a_version_where_it_would_hide_another",
    },
}


@cache
def sources_in(file: str) -> dict[str, str]:
    """Return the source of each test of a file, decorators included."""
    text = (Path(__file__).parent / file).read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min(one.lineno for one in (node, *node.decorator_list))
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


@pytest.mark.parametrize("name", TESTS)
def test_every_argument_is_documented_and_has_its_test(name: str) -> None:
    parameters = inspect.signature(getattr(gpulayer.pytorch, name)).parameters.values()
    known = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
    assert TESTS[name].keys() == known
    page = (ROOT / "docs" / "pytorch" / "trainer.md").read_text()
    head = "| argument |" if name == "Trainer" else f"| argument of `{name}` |"
    table = page.partition(head)[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == known
    for argument, test in TESTS[name].items():
        file, _, function = test.partition("::")
        source = sources_in(file).get(function)
        assert source is not None, f"{argument}: there is no {test}"
        assert re.search(rf"\b{argument}\b", source), f"{test} does not mention {argument}"
