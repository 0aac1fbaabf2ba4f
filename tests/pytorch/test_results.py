"""A call's result as files: bit for bit into the caller's objects, and calls that run elsewhere."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from one_weight import OneWeight, Validated, loader, trainer

from gpulayer import launcher
from gpulayer.launcher import JobOutcome
from gpulayer.pytorch import Callback, Trainer, results
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.model_checkpoint import ModelCheckpoint


class Odd(OneWeight):
    """Tied weights, views of one storage, odd types, a buffer that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.tied = torch.nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(3)
        self.brain = torch.nn.Parameter(torch.randn(2, 2).bfloat16())
        self.register_buffer("flags", torch.tensor([True, False]))
        storage = torch.randn(6)
        self.register_buffer("left", storage[:3])
        self.register_buffer("turned", storage.view(2, 3).t())
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def bits(value: torch.Tensor) -> bytes:
    return value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_round_trip_is_equal_to_the_bit(tmp_path: Path) -> None:
    trained, model = trainer(max_epochs=2), Odd()
    model.hidden += 5
    model.norm.running_mean[0] = float("nan")
    trained.fit(model, loader(3))
    trained._metrics.callback |= {
        "third": torch.tensor(1 / 3),
        "wide": torch.tensor(1 / 3, dtype=torch.float64),
        "nan": torch.tensor(math.nan),
        "inf": torch.tensor(-math.inf),
    }
    results.write(results.capture(trained, model), tmp_path / "0")
    document = json.loads((tmp_path / "0" / "result.json").read_text())
    assert document["aliases"] == {"tied.weight": "first.weight"}

    fresh, other = trainer(), Odd()
    results.restore(results.read(tmp_path / "0"), fresh, other)
    assert other.tied.weight is other.first.weight
    assert other.extra == {"seen": 3}
    for (name, mine), (_, theirs) in zip(
        itertools.chain(model.named_parameters(), model.named_buffers()),
        itertools.chain(other.named_parameters(), other.named_buffers()),
        strict=True,
    ):
        assert bits(mine) == bits(theirs), name
    assert (fresh.global_step, fresh.current_epoch) == (6, 2)
    assert fresh.callback_metrics.keys() == trained.callback_metrics.keys()
    for name, value in trained.callback_metrics.items():
        found = fresh.callback_metrics[name]
        assert found.dtype is value.dtype
        assert bits(found) == bits(value)


def test_state_that_cannot_travel_is_refused_before_training() -> None:
    class Model(OneWeight):
        def get_extra_state(self) -> Any:
            return object()

    with pytest.raises(ArgumentError, match="_extra_state"):
        results.check_recordable(Model())
    results.check_recordable(Odd())


def test_result_without_its_document_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="without a result"):
        results.read(tmp_path)


# -- calls that run elsewhere, with the ranks in this process ------------------------------------


class Elsewhere:
    """Runs a script's ranks as a function of their environment, where a job would be."""

    def __init__(self, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script = script
        self.path = tmp_path
        self.monkeypatch = monkeypatch
        self.requests: list[dict[str, Any]] = []
        self.code = 0
        monkeypatch.setattr(launcher, "script_request", lambda **fields: fields)
        monkeypatch.setattr(launcher, "run_job", self.run_job)
        self.fresh_process()

    def fresh_process(self) -> None:
        self.monkeypatch.setattr(results, "_indices", itertools.count())
        self.monkeypatch.setattr(results, "_made", {})

    def run_job(self, request: dict[str, Any]) -> JobOutcome:
        self.requests.append(request)
        if self.code:
            return JobOutcome("job", self.code, None)
        home = self.path / f"job{len(self.requests)}"
        work = self.path / f"work{len(self.requests)}"
        for name, source in request["extra_files"].items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(source.read_bytes())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GPULAYER_JOB", "0123456789")
            patch.setenv("GPULAYER_OUT", str(home))
            patch.setenv("GPULAYER_CALL", str(request["call"]))
            patch.setattr("gpulayer.env.START_DIR", work)
            patch.setattr(results, "_indices", itertools.count())
            patch.setattr(results, "_made", {})
            with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
                self.script()
        if isinstance(caught.value, KeyboardInterrupt):
            return JobOutcome("job", 130, home)
        assert caught.value.code == 0
        return JobOutcome("job", 0, home)


def test_only_the_call_in_question_runs_and_the_rest_of_the_script_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []

    class Model(Validated):
        def on_train_start(self) -> None:
            log.append(("trains", self.global_step))

    def script() -> tuple[Model, Trainer]:
        model = Model()
        here = trainer(tmp_path / "here")
        here.fit(model, loader(2), loader(2))
        log.append(("between", model.weight.item(), here.global_step))
        there = trainer(target="mesh", logger=True, default_root_dir=None)
        there.fit(model, loader(3), loader(3))
        log.append(("after", model.weight.item(), float(there.callback_metrics["mean"])))
        there.max_epochs = 2
        there.fit(model, loader(3), loader(3))
        log.append(("end", model.weight.item()))
        return model, there

    machine = Elsewhere(script, tmp_path, monkeypatch)
    model, there = script()
    assert log == [
        ("trains", 0),  # call 0, in this process
        ("between", -3.0, 2),
        ("between", -3.0, 2),  # call 1's ranks: call 0 is replayed
        ("trains", 0),
        ("after", -9.0, 2.0),
        ("between", -3.0, 2),  # call 2's ranks: calls 0 and 1 are
        ("after", -9.0, 2.0),
        ("trains", 3),
        ("end", -15.0),
    ]
    assert (there.global_step, there.current_epoch) == (6, 2)
    assert [sorted(r["extra_files"]) for r in machine.requests] == [
        [
            f".gpulayer-replay/{i}/{name}"
            for i in before
            for name in ("result.json", "returned.pt", "weights.safetensors")
        ]
        for before in ((0,), (0, 1))
    ]
    assert [r["call"] for r in machine.requests] == [1, 2]
    assert there.log_dir == str(tmp_path / "job2" / "gpulayer_logs" / "version_0")
    assert (Path(there.log_dir) / "metrics.csv").is_file()
    assert model.trainer is there


def test_failed_job_ends_the_script_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Elsewhere(None, tmp_path, monkeypatch)
    machine.code = 7
    with pytest.raises(SystemExit) as caught:
        trainer(num_nodes=3).fit(OneWeight(), loader(1))
    assert caught.value.code == 7
    assert machine.requests[0]["nodes"] == 3


def test_call_that_left_too_much_to_keep_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Elsewhere(None, tmp_path, monkeypatch)
    monkeypatch.setattr(results, "KEPT_BYTES", 2)
    trainer().fit(OneWeight(), loader(1))
    with pytest.raises(ArgumentError, match=r"call 0 .* were not kept"):
        trainer(num_nodes=2).fit(OneWeight(), loader(1))


def test_layers_made_by_configure_model_exist_before_the_weights_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(OneWeight):
        def configure_model(self) -> None:
            if not hasattr(self, "late"):
                self.late = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.late(batch[0]).sum() + super().training_step(batch, batch_idx)

    def script() -> Model:
        model = Model()
        trainer(target="mesh", logger=False).fit(model, loader(2))
        return model

    Elsewhere(script, tmp_path, monkeypatch)
    assert script().late.weight.shape == (1, 1)


def test_checkpoints_come_home_and_go_to_the_ranks_of_later_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(Validated):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("weight", self.weight)

    found: dict[str, Any] = {}

    def note(name: str, value: Any) -> None:
        found.setdefault(name, value)  # by the launching side: ranks that repeat it come later

    def script() -> None:
        model = Model()
        kept = ModelCheckpoint(monitor="sum", save_last="link", save_top_k=2)
        there = trainer(target="mesh", logger=True, default_root_dir=None, callbacks=kept)
        there.fit(model, loader(3), loader(3))
        note("paths", [kept.best_model_path, kept.last_model_path, *kept.best_k_models])
        note("dirpath", kept.dirpath)
        with torch.no_grad():
            model.weight += 1000
        note("best", there.test(model, loader(1), ckpt_path="best", verbose=False))
        note("used", there.ckpt_path)
        again = trainer(target="mesh", callbacks=ModelCheckpoint(monitor="sum"), max_epochs=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "best" by default; another directory
            note("default", there.validate(dataloaders=loader(1), verbose=False))
            again.fit(model, loader(3), loader(3), ckpt_path=kept.best_model_path)
        note("again", (again.global_step, model.weight.item()))
        there.max_epochs = 3
        there.fit(model, loader(3), loader(3))
        note("later", [kept.best_model_path, kept.last_model_path, *kept.best_k_models])

    machine = Elsewhere(script, tmp_path, monkeypatch)
    script()
    home = tmp_path / "job1" / "gpulayer_logs" / "version_0" / "checkpoints"
    assert found["dirpath"] == str(home)
    best, last = str(home / "epoch=0-step=3.ckpt"), str(home / "last.ckpt")
    assert found["paths"] == [best, last, best]
    assert found["used"] == best
    assert Path(last).is_file()
    assert found["best"] == [{"weight": -6.0}]
    assert found["default"] == [{"mean": 1.0, "sum": 1.0}]
    assert found["again"] == (6, -12.0)
    sent = [[n for n in r["extra_files"] if n.endswith(".ckpt")] for r in machine.requests]
    assert sent == [
        [], [".gpulayer-replay/1.ckpt"], [".gpulayer-replay/2.ckpt"], [".gpulayer-replay/3.ckpt"],
        [],
    ]  # fmt: skip
    assert all(Path(path).is_file() for path in found["later"])
    assert len(found["later"]) == 4


@pytest.mark.parametrize("root", ["", "given"])
def test_a_fit_that_a_signal_ended_elsewhere_leaves_its_place_and_says_where_it_goes_on(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Counts(Callback):
        seen = 0

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = state_dict["seen"]

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen += 1
            if self.seen == 5:
                os.kill(os.getpid(), signal.SIGINT)

    made: list[Trainer] = []
    models: list[Validated] = []

    def script() -> None:
        used = trainer(
            target="mesh", logger=True, enable_checkpointing=True, callbacks=Counts(), max_epochs=3,
            default_root_dir=root or None,
        )  # fmt: skip
        made.append(used)
        models.append(Validated())
        used.fit(models[-1], loader(3), loader(3))

    machine = Elsewhere(script, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        script()
    assert caught.value.code == 130
    used = made[0]
    assert models[0].weight.item() == -9.0  # of samples 1, 2, 3, 1, 2
    assert (used.global_step, used.current_epoch, used.interrupted) == (5, 1, True)
    assert [one.seen for one in used.callbacks if isinstance(one, Counts)] == [5]
    assert float(used.callback_metrics["mean"]) == 2.0
    path = Path(getattr(used.checkpoint_callback, "final_model_path"))  # noqa: B009
    assert path.is_file()
    assert root or path.is_relative_to(tmp_path / "job1")
    said = capsys.readouterr()
    last = (said.out + said.err).splitlines()[-1]
    assert f"fit(ckpt_path={str(path.relative_to(tmp_path))!r}) goes on" in last, said
    used.save_checkpoint(tmp_path / "here.ckpt", weights_only=True)
    assert len(machine.requests) == 1
