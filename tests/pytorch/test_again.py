"""A fit in a job that started again equals one that was never broken off: weights, rows, files.

An attempt is broken off in this process: what lay in its folder at that moment is copied, as agents
would, to where the next attempt finds it, below another path.
"""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpulayer_mesh.core import ownfiles
from ranks import Ranks
from torch.utils.data import DataLoader, Dataset

from gpulayer import env as environment
from gpulayer.env import RankEnv
from gpulayer.pytorch import Callback, EarlyStopping, Module, Trainer, again, results
from gpulayer.pytorch.callback import Checkpoint
from gpulayer.pytorch.csvlog import MetricsFile
from gpulayer.pytorch.model_checkpoint import ModelCheckpoint
from gpulayer.pytorch.resume import Place

SAMPLES, BATCH = 14, 2  # 7 batches an epoch
FAR = 10**9


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return torch.full((4,), float(index)) / SAMPLES + 0.01 * noise.float()


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layers(batch) - batch.mean(1, keepdim=True)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layers(batch).mean() + random.random())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Broken(BaseException):
    pass


class Breaks(Callback):
    """Breaks an attempt off at the n-th of its hooks."""

    def __init__(self) -> None:
        self.left = FAR
        self.broken: Callable[[], None] = lambda: None
        self.signal = 0  # sent instead

        def step(*args: Any) -> None:
            self.left -= 1
            if self.left == 0 and self.signal:
                args[0]._signalled(self.signal)
            elif self.left == 0:
                self.broken()
                raise Broken

        for hook in ("on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end",
                     "on_validation_start", "on_validation_end", "on_train_epoch_start",
                     "on_train_epoch_end", "on_train_end", "on_fit_end", "on_save_checkpoint",
                     "teardown"):  # fmt: skip
            setattr(self, hook, step)


def fit_of(callbacks: Callable[[], list[Callback]], **arguments: Any) -> Callable[..., Any]:
    """Return a script with one fit."""

    def script(breaks: Breaks) -> tuple[list[Trainer], Module]:
        model = Net()
        trainer = made(breaks, callbacks, **arguments)
        trainer.fit(model, DataLoader(Noisy(), BATCH, shuffle=True), DataLoader(Noisy(), 3))
        return [trainer], model

    return script


def made(
    breaks: Breaks, callbacks: Callable[[], list[Callback]] = list, **arguments: Any
) -> Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 3, "log_every_n_steps": 1, "accumulate_grad_batches": 3,
        "val_check_interval": 2,
    }  # fmt: skip
    return Trainer(
        accelerator="cpu", devices=1, enable_progress_bar=False,
        callbacks=[*callbacks(), breaks], **{**defaults, **arguments},
    )  # fmt: skip


class Job:
    """Attempts of a job, each in a folder of its own, in this process."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
        self.root = root
        self.patch = monkeypatch
        self.script = script
        self.attempts = 0
        self.copied = False  # of what changes all the time, nothing has arrived

    @property
    def folder(self) -> Path:
        return self.root / f"attempt{self.attempts}"

    def run(self, after: int = FAR, sent: int = 0) -> dict[str, Any] | None:
        """Run one attempt; None if it was broken off after so many hooks, or a signal then."""
        out = self.folder / "out" / "rank0"
        for path in (out, self.folder / "work"):
            path.mkdir(parents=True, exist_ok=True)
        self.patch.chdir(self.folder / "work")
        self.patch.setattr(environment, "START_DIR", self.folder / "work")
        self.patch.setattr(results, "_indices", itertools.count())  # as in a fresh process
        self.patch.setattr(again, "_chosen", [])
        variables = {"GPULAYER_JOB": "j", "GPULAYER_OUT": out, "GPULAYER_RESTART": self.attempts}
        if self.attempts:
            variables["GPULAYER_RESTORED"] = self.folder / "restored"
        for name, value in variables.items():
            self.patch.setenv(name, str(value))
        self.breaks = breaks = Breaks()
        breaks.left, breaks.broken, breaks.signal = after, self._next, sent
        # A fit that goes on must not depend on what its process began with.
        seed = 2 if (self.folder / "restored" / ownfiles.checkpoint(0)).is_file() else 1
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        try:
            trainers, model = self.script(breaks)
        except SystemExit:
            self._next()
            return None
        except Broken:
            return None
        return self._result(trainers, model)

    def _next(self) -> None:
        """Bring the files of this attempt to where the next one finds them."""
        before = self.folder
        self.attempts += 1
        shutil.copytree(before / "out", self.folder / "out")
        shutil.copytree(before / "work", self.folder / "work")
        if self.copied:
            for out in self.folder.glob("out/*"):
                self._drop_newest(out / ownfiles.RESUME)
        shutil.copytree(self.folder / "out" / "rank0", self.folder / "restored")

    @staticmethod
    def _drop_newest(kept: Path) -> None:
        last = max((int(file.stem) for file in kept.glob("[0-9].json")), default=0)
        for rests in kept.glob(f"{last}.rest.ckpt"):
            call = rests.name.partition(".")[0]  # its newest checkpoint came without the rest
            held = torch.load(rests, weights_only=True)["loops"]["fit_loop"]["again"]["beside"]
            for file in kept.glob(f"{call}-*"):
                if file.stem != held:
                    file.unlink()

    def _result(self, trainers: list[Trainer], model: Module) -> dict[str, Any]:
        folder = self.folder
        files = {
            str(path.relative_to(folder)): path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and ownfiles.FOLDER not in path.parts and "restored" not in path.parts
        }
        return {
            "weights": {k: v.tolist() for k, v in model.state_dict().items()},
            "trainers": [self._state(one, folder) for one in trainers],
            "files": {name: _content(path) for name, path in files.items()},
            "random": (torch.rand(1).item(), random.random(), np.random.rand()),
        }

    @staticmethod
    def _state(trainer: Trainer, folder: Path) -> str:
        counters = {
            name: getattr(trainer, f"_{name}")
            for name in ("global_step", "epochs_processed", "epochs_completed", "total_batches",
                         "batches_that_stepped")
        }  # fmt: skip
        found = {
            "optimizer": [one.state_dict() for one in trainer.optimizers],
            "counters": counters | {"stop": trainer.should_stop, "ckpt": trainer.ckpt_path},
            "callbacks": trainer._callback_states(),
            "metrics": [trainer.callback_metrics, trainer.logged_metrics],
            "log_dir": str(trainer.log_dir),
        }
        return repr(found).replace(str(folder), "FOLDER")


def _content(path: Path) -> Any:
    if path.suffix == ".csv":
        return path.read_text()
    if path.suffix == ".ckpt":
        held = torch.load(path, weights_only=True)
        held["loops"]["fit_loop"].pop("again")
        held.pop("callbacks", None)  # have paths
        return repr(held)
    return None


TWO = [
    lambda: ModelCheckpoint(monitor="val", save_top_k=2, save_last=True),
    lambda: ModelCheckpoint(
        "weights", "{step}", every_n_train_steps=1, save_weights_only=True, save_top_k=-1
    ),
]
SCRIPTS: dict[str, Callable[[], Any]] = {
    "default": lambda: fit_of(list),
    "two": lambda: fit_of(lambda: [one() for one in TWO]),
    "steps": lambda: fit_of(lambda: [ModelCheckpoint(every_n_train_steps=2)], max_steps=7),
    "best": lambda: fit_of(lambda: [ModelCheckpoint(monitor="loss", save_final=True)]),
    "link": lambda: fit_of(lambda: [ModelCheckpoint(save_last="link", every_n_train_steps=1)]),
    "stopped": lambda: fit_of(
        lambda: [EarlyStopping("loss", patience=0, mode="max"), ModelCheckpoint("own")],
        max_epochs=5,
    ),
}


def several(breaks: Breaks) -> tuple[list[Trainer], Module]:
    """Several calls under launch(): two fits of one Trainer, one of another, others between."""
    model = Net()
    train, val = DataLoader(Noisy(), BATCH, shuffle=True), DataLoader(Noisy(), 3)
    first = made(breaks, lambda: [ModelCheckpoint(monitor="val", save_last=True)], max_epochs=1)
    first.validate(model, val, verbose=False)
    first.fit(model, train, val)
    first.max_epochs = 3
    first.fit(model, train, val, ckpt_path="last")
    second = made(breaks, lambda: [ModelCheckpoint("own", every_n_train_steps=1)], max_epochs=2)
    second.fit(model, train, val)
    second.validate(model, val, ckpt_path="best", verbose=False)
    return [first, second], model


SCRIPTS["several"] = lambda: several
_unbroken: dict[str, Any] = {}
_hooks: dict[str, int] = {}


def unbroken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if name not in _unbroken:
        job = Job(tmp_path / "unbroken", monkeypatch, SCRIPTS[name]())
        _unbroken[name] = job.run()
        _hooks[name] = FAR - job.breaks.left
    return _unbroken[name]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.configurations(2)
def test_restarted_job_equals_the_unbroken_one(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    expected = unbroken(name, tmp_path, monkeypatch)
    job = Job(tmp_path / "job", monkeypatch, SCRIPTS[name]())
    after = int(_hooks[name] * rng.random()) + 1
    breaks = [after, *([rng.randrange(1, 30)] if number % 2 else [])]
    for attempt in [*breaks, FAR]:
        found = job.run(attempt)
        if found is not None:  # the second attempt may end before it breaks
            break
    assert found == expected, f"broken off after {breaks} hooks"


@pytest.mark.parametrize("name", ["default", "two", "best", "steps"])
@pytest.mark.parametrize("after", [12, 45])
def test_attempt_that_a_signal_ended_is_gone_on_from_its_last_batch(
    name: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unbroken(name, tmp_path, monkeypatch)
    job = Job(tmp_path / "job", monkeypatch, SCRIPTS[name]())
    assert job.run(after, signal.SIGTERM) is None
    assert job.run() == expected


def test_only_checkpoints_of_the_same_job_are_taken_back(tmp_path: Path) -> None:
    files = {}
    for name, mark in (("ours", {"job": "0123456789"}), ("theirs", {"job": "1" * 10}), ("old", {})):
        files[name] = tmp_path / f"{name}.ckpt"
        loop = {"total_batches": 9, "position": {"place": Place.BATCH_END.value}, "again": mark}
        torch.save({"loops": {"fit_loop": loop}}, files[name])

    class Writer(Checkpoint):
        def files(self) -> list[Path]:
            return list(files.values())

    place = RankEnv("2" * 10, None, 0, 0, 1, 0, None, None, tmp_path, 1, tmp_path / "restored")
    began = tmp_path / "restored" / ownfiles.RESUME / "0.json"
    began.parent.mkdir(parents=True)
    began.write_text('{"job": "0123456789", "ckpt_path": null, "present": []}')
    again.FitAgain(place, 0, None)._take_back([Writer()])
    assert [name for name, file in files.items() if file.exists()] == ["theirs", "old"]


def test_job_that_may_start_again_trains_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unbroken("default", tmp_path, monkeypatch)
    monkeypatch.delenv("GPULAYER_RESTART", raising=False)
    monkeypatch.setenv("GPULAYER_JOB", "j")
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    monkeypatch.setenv("GPULAYER_OUT", str(tmp_path / "plain"))
    _, model = SCRIPTS["default"]()(Breaks())
    assert {k: v.tolist() for k, v in model.state_dict().items()} == expected["weights"]
    (rows,) = (tmp_path / "plain").rglob("metrics.csv")
    assert rows.read_text() == expected["files"]["out/rank0/gpulayer_logs/version_0/metrics.csv"]
    assert not (tmp_path / "plain" / ownfiles.RESUME).exists()


@pytest.mark.parametrize(
    ("callback", "warned"),
    [
        (None, True),
        (lambda: ModelCheckpoint(), False),
        (lambda: ModelCheckpoint(save_top_k=0, save_last=True), False),
        (lambda: ModelCheckpoint(train_time_interval=timedelta(hours=1)), False),
        (lambda: ModelCheckpoint(save_weights_only=True), True),
        (lambda: ModelCheckpoint(save_top_k=0, save_final=True), True),
        (lambda: ModelCheckpoint(every_n_epochs=0), True),
    ],
)
def test_fit_that_saves_nothing_to_go_on_from_says_so(
    callback: Any, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (lambda: []) if callback is None else (lambda: [callback()])
    script = fit_of(given, enable_checkpointing=callback is not None, max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Job(tmp_path, monkeypatch, script).run()
    said = [str(one.message) for one in caught if "after a restart" in str(one.message)]
    assert len(said) == warned


@pytest.mark.parametrize(
    ("callback", "told"),
    [
        (None, 1),  # at the end of an epoch, that is the seventh batch
        (lambda: ModelCheckpoint(every_n_train_steps=1), 0),
        (lambda: ModelCheckpoint(save_weights_only=True), 0),  # said when the fit began
    ],
)
def test_fit_whose_first_checkpoint_is_far_away_says_so_once(
    callback: Any,
    told: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    minutes = itertools.count(step=60.0)
    monkeypatch.setattr(again, "LATE_S", 300.0)
    monkeypatch.setattr(again, "monotonic", lambda: next(minutes))
    given = (lambda: []) if callback is None else (lambda: [callback()])
    script = fit_of(given, accumulate_grad_batches=1, val_check_interval=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Job(tmp_path, monkeypatch, script).run()
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("no checkpoint in 5 min of training") == told


def test_rows_that_did_not_arrive_are_missed_aloud(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.csv"
    earlier.write_text("loss,step\r\n1.0,0\r\n2.0,1\r\n")
    file = MetricsFile(tmp_path, lambda fresh: ("version_0", True))
    with pytest.warns(UserWarning, match=r"1 of 3 rows of metrics\.csv were lost"):
        file.go_on(earlier, 3)
    file.write({"loss": 4.0}, 3)
    file.flush()
    written = (tmp_path / "version_0" / "metrics.csv").read_text().split()
    assert (file.rows, written) == (3, ["loss,step", "1.0,0", "2.0,1", "4.0,3"])


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_two_ranks_go_on_below_other_folders(strategy: str, tmp_path: Path) -> None:
    body = f"""
    from gpulayer.pytorch import Callback, ModelCheckpoint

    class Dies(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if os.environ["DIES"] == "yes" and RANK == 1 and trainer.global_step == 7:
                os.kill(os.getpid(), 9)

    class Model(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.loss(batch), sync_dist=True)

    kept = ModelCheckpoint(monitor="val", save_top_k=2, every_n_train_steps=2)
    fit = trainer(max_epochs=3, default_root_dir=None, callbacks=[kept, Dies()],
                  val_check_interval=2, strategy={strategy!r})
    model = Model()
    fit.fit(model, DataLoader(samples(16), 2, shuffle=True), DataLoader(samples(5, 1), 2))
    out = os.path.dirname(os.environ["GPULAYER_OUT"])
    tell(
        weights={{name: value.tolist() for name, value in model.state_dict().items()}},
        metrics={{name: float(value) for name, value in fit.callback_metrics.items()}},
        best=[kept.best_model_path.removeprefix(out), os.path.exists(kept.best_model_path)],
        kept=[path.removeprefix(out) for path in kept.best_k_models],
        drawn=torch.rand(1).item(),
    )
    """

    def attempt(name: str, number: int, dies: str) -> Ranks:
        folder = tmp_path / name

        def environ(rank: int) -> dict[str, str]:
            found = {
                "GPULAYER_JOB": "j", "GPULAYER_OUT": str(folder / "out" / f"rank{rank}"),
                "GPULAYER_RESTART": str(number), "DIES": dies,
            }  # fmt: skip
            return found | ({"GPULAYER_RESTORED": str(folder / "restored")} if number else {})

        for rank in range(2):
            (folder / "out" / f"rank{rank}").mkdir(parents=True, exist_ok=True)
        return Ranks(folder / "work", body, 2, environ=environ)

    whole = attempt("whole", 0, "no").check()
    first = attempt("first", 0, "yes")
    assert first.codes[1] == -signal.SIGKILL
    shutil.copytree(tmp_path / "first" / "out", tmp_path / "second" / "out")
    shutil.copytree(tmp_path / "first" / "out" / "rank0", tmp_path / "second" / "restored")
    shutil.rmtree(tmp_path / "first")
    second = attempt("second", 1, "no").check()
    assert "restart 1: fit goes on in epoch 1, after step 6" in second.output[0]
    for rank in range(2):
        assert second.told(rank) == whole.told(rank)
    assert second.told()["best"][1]
    rows = "out/rank0/gpulayer_logs/version_0/metrics.csv"
    assert (tmp_path / "second" / rows).read_text() == (tmp_path / "whole" / rows).read_text()


@pytest.mark.network
@pytest.mark.slow
def test_script_of_the_page_goes_on_where_it_was(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "restarts.md").read_text()
    script = page.partition("```python\n# survives.py\n")[2].partition("```")[0]
    loop = "for epoch in range(begin, 5):\n"
    dies = (
        "    if epoch == 3 and os.environ['GPULAYER_RESTART'] == os.environ['DIES']: os._exit(9)\n"
    )
    assert loop in script
    script = script.replace(loop, f"print('from', begin)\n{loop}{dies}")

    def attempt(name: str, number: int, dies: str) -> tuple[Ranks, Path]:
        out = tmp_path / name / "out"
        for rank in range(2):
            (out / f"rank{rank}").mkdir(parents=True, exist_ok=True)
        found = {"GPULAYER_JOB": "j", "GPULAYER_RESTART": str(number), "DIES": dies}
        if number:
            found["GPULAYER_RESTORED"] = str(tmp_path / name / "restored")
        ranks = Ranks(
            tmp_path / name / "work", script, 2,
            environ=lambda rank: found | {"GPULAYER_OUT": str(out / f"rank{rank}")},
        )  # fmt: skip
        return ranks, out / "rank0" / "state.pt"

    _, whole = attempt("whole", 0, "never")
    assert attempt("first", 0, "0")[0].codes == [9, 9]
    shutil.copytree(tmp_path / "first" / "out" / "rank0", tmp_path / "second" / "restored")
    ranks, went_on = attempt("second", 1, "0")
    assert [text.splitlines()[-1] for text in ranks.check().output] == ["from 3", "from 3"]
    states = [torch.load(path, weights_only=True) for path in (whole, went_on)]
    assert repr(states[0]) == repr(states[1])


@pytest.mark.parametrize("name", ["two", "link", "several"])
def test_checkpoint_that_rests_serves_where_newer_ones_were_not_copied(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    expected = unbroken(name, tmp_path, monkeypatch)
    clock = itertools.count()
    monkeypatch.setattr(again, "monotonic", lambda: next(clock))  # once or twice a checkpoint
    monkeypatch.setattr(again, "REST_S", 4)
    job = Job(tmp_path / "job", monkeypatch, SCRIPTS[name]())
    job.copied = True
    after = int(_hooks[name] * rng.random()) + 1
    assert job.run(after) is None
    assert job.run() == expected, f"broken off after {after} hooks"
