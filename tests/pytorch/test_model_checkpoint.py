"""ModelCheckpoint: what is saved when, under which name, and what stays; also as Lightning does it.

The comparisons with PyTorch Lightning 2.6.6 are skipped where it is not installed. Arguments are
drawn at random; `GPULAYER_TEST_SEED` repeats a run.
"""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_lightning import bits, kind
from one_weight import OneWeight, Validated, loader, trainer
from ranks import Ranks
from torch.utils.data import DataLoader, TensorDataset

from gpulayer.pytorch import Callback, Module, Trainer
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.model_checkpoint import ModelCheckpoint


class Scored(OneWeight):
    """Logs a given value at each validation, and one at each training epoch's end."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = list(scores)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("score", self.scores.pop(0))


def saved(checkpoint: ModelCheckpoint) -> list[str]:
    """Return the files that Lightning would write, too."""
    assert checkpoint.dirpath is not None
    found = sorted(path.name for path in Path(checkpoint.dirpath).glob("**/*.ckpt"))
    return [name for name in found if name != "final.ckpt"]


def fit(checkpoint: ModelCheckpoint, scores: list[float], **arguments: Any) -> Trainer:
    made = trainer(callbacks=checkpoint, **{"max_epochs": len(scores), **arguments})
    made.fit(Scored(scores), loader(7), loader(2))
    return made


def epoch_of(path: Path) -> Any:
    return torch.load(path, weights_only=True)["epoch"]


def test_last_is_written_only_with_another_save(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="score", save_last=True)
    fit(checkpoint, [3.0, 1.0, 2.0, 4.0])
    assert saved(checkpoint) == ["epoch=1-step=14.ckpt", "last.ckpt"]
    assert epoch_of(tmp_path / "last.ckpt") == 1
    assert checkpoint.best_model_score == 1.0


def test_nothing_saved_is_last_saved_at_the_end(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=0, save_last=True)
    fit(checkpoint, [1.0])
    assert saved(checkpoint) == ["last.ckpt"]


def test_link_points_to_the_last_save(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last="link", save_top_k=-1)
    fit(checkpoint, [1.0, 2.0])
    assert (tmp_path / "last.ckpt").is_symlink()
    assert (tmp_path / "last.ckpt").readlink() == Path("epoch=1-step=14.ckpt")


def test_trial_run_writes_nothing(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    fit(checkpoint, [1.0], fast_dev_run=2, max_epochs=None)
    assert saved(checkpoint) == []


def test_ties_keep_the_older_file_and_nan_is_kept_until_beaten(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ties", monitor="score")
    fit(checkpoint, [2.0, 2.0])
    assert saved(checkpoint) == ["epoch=0-step=7.ckpt"]
    checkpoint = ModelCheckpoint(tmp_path / "nan", monitor="score", mode="max")
    fit(checkpoint, [float("nan"), float("nan")])
    assert saved(checkpoint) == ["epoch=0-step=7.ckpt"]
    assert checkpoint.best_model_score == -torch.inf
    checkpoint = ModelCheckpoint(tmp_path / "beaten", monitor="score", mode="max")
    fit(checkpoint, [float("nan"), 5.0])
    assert saved(checkpoint) == ["epoch=1-step=14.ckpt"]


def test_validation_in_mid_epoch_never_saves_the_final_state(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "half", save_top_k=-1)
    fit(checkpoint, [1.0] * 2, val_check_interval=0.5, max_epochs=1)
    assert saved(checkpoint) == ["epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt"]
    checkpoint = ModelCheckpoint(tmp_path / "second", save_top_k=-1)
    fit(checkpoint, [1.0] * 2, check_val_every_n_epoch=2, max_epochs=5)
    assert saved(checkpoint) == ["epoch=1-step=14.ckpt", "epoch=3-step=28.ckpt"]
    checkpoint = ModelCheckpoint(tmp_path / "each", save_top_k=-1)
    fit(checkpoint, [1.0] * 7, val_check_interval=1, max_epochs=1)
    assert saved(checkpoint) == ["epoch=0-step=7.ckpt"]


def test_end_by_max_steps_is_saved(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path)
    fit(checkpoint, [], max_steps=5, max_epochs=None)
    assert saved(checkpoint) == ["epoch=0-step=5.ckpt"]


def test_save_after_steps_takes_the_metric_of_a_validation_at_the_same_batch(
    tmp_path: Path,
) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path, monitor="score", every_n_train_steps=7, save_top_k=-1, filename="{step}-{score}"
    )
    fit(checkpoint, [3.0, 1.0])
    assert saved(checkpoint) == ["step=14-score=1.0.ckpt", "step=7-score=3.0.ckpt"]


def test_save_after_steps_waits_for_the_first_validation_too(tmp_path: Path) -> None:
    left: list[int] = []

    class Looks(Scored):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            left.append(len(self.scores))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train", 1.0)
            return super().training_step(batch, batch_idx)

    checkpoint = ModelCheckpoint(tmp_path, monitor="train", every_n_train_steps=7, save_top_k=-1)
    made = trainer(callbacks=checkpoint, max_epochs=4, check_val_every_n_epoch=2)
    made.fit(Looks([1.0, 2.0]), loader(7), loader(2))
    assert left == [2, 1, 1, 0]  # Lightning saves at step 14 before it has validated


def test_save_after_a_time(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "zero", train_time_interval=timedelta(), save_top_k=-1)
    fit(checkpoint, [1.0])
    assert len(saved(checkpoint)) == 7
    late = ModelCheckpoint(tmp_path / "late", train_time_interval=timedelta(hours=1))
    fit(late, [1.0])
    assert saved(late) == []


def test_half_filled_window_is_not_saved_twice(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    fit(checkpoint, [1.0], accumulate_grad_batches=3)
    assert saved(checkpoint) == [f"epoch=0-step={step}.ckpt" for step in (1, 2, 3)]


def test_names_hold_logged_values(tmp_path: Path) -> None:
    named = ModelCheckpoint(tmp_path, filename="{epoch:02d}-{val/acc:.2f}-{missing}")
    values = {"epoch": torch.tensor(3), "val/acc": torch.tensor(0.456)}
    assert named.format_checkpoint_name(values) == str(
        tmp_path / "epoch=03-val/acc=0.46-missing=0.ckpt"
    )
    bare = ModelCheckpoint(filename="e{epoch}-{val.acc}", auto_insert_metric_name=False)
    assert bare.format_checkpoint_name({"epoch": 1, "val.acc": 2.5}, ver=2) == "e1-2.5-v2.ckpt"
    assert ModelCheckpoint().format_checkpoint_name({"epoch": 0, "step": 7}) == (
        "epoch=0-step=7.ckpt"
    )


def test_fixed_name_gets_a_version_where_it_would_hide_another(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "k", filename="best", monitor="score", save_top_k=2)
    fit(checkpoint, [3.0, 2.0, 1.0])
    assert saved(checkpoint) == ["best-v1.ckpt", "best.ckpt"]
    latest = ModelCheckpoint(tmp_path / "latest", filename="latest")
    fit(latest, [3.0, 2.0])
    assert saved(latest) == ["latest.ckpt"]
    unversioned = ModelCheckpoint(
        tmp_path / "one", filename="x", monitor="score", save_top_k=2, enable_version_counter=False
    )
    fit(unversioned, [3.0, 2.0])
    assert saved(unversioned) == ["x.ckpt"]


def test_default_checkpoint_lies_beside_metrics(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_epochs=2)
    made.fit(OneWeight(), loader(3))
    assert made.log_dir is not None
    folder = Path(made.log_dir) / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["epoch=1-step=6.ckpt"]
    assert made.checkpoint_callback is not None
    assert getattr(made.checkpoint_callback, "best_model_path") == str(  # noqa: B009
        folder / "epoch=1-step=6.ckpt"
    )
    without = trainer(tmp_path / "bare", logger=False)
    without.fit(OneWeight(), loader(3))
    assert [path.name for path in (tmp_path / "bare" / "checkpoints").iterdir()] == [
        "epoch=0-step=3.ckpt"
    ]


def test_checkpoints_come_last_of_callbacks_and_can_be_switched_off() -> None:
    first, second = ModelCheckpoint(), Callback()
    assert trainer(callbacks=[first, second]).callbacks == [second, first]
    assert trainer(enable_checkpointing=False).callbacks == []
    assert [type(one) for one in Trainer(accelerator="cpu").callbacks] == [ModelCheckpoint]
    with pytest.raises(ArgumentError, match="enable_checkpointing=False"):
        trainer(callbacks=first, enable_checkpointing=False)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "least"},
        {"save_top_k": -2},
        {"save_top_k": 2},
        {"every_n_epochs": -1},
        {"every_n_train_steps": -1},
        {"every_n_epochs": 1, "every_n_train_steps": 1},
        {"every_n_epochs": 1, "train_time_interval": timedelta(seconds=1)},
    ],
)
def test_impossible_arguments_raise(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        ModelCheckpoint(**arguments)


def test_missing_metric_raises_once_a_validation_has_run(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="absent")
    with pytest.raises(ArgumentError, match="'absent'"):
        fit(checkpoint, [1.0])
    made = trainer(callbacks=ModelCheckpoint(tmp_path, monitor="absent"))
    with pytest.warns(UserWarning, match="'absent'"):
        made.fit(OneWeight(), loader(3))


def test_file_resumed_from_is_not_removed(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path)
    fit(first, [1.0])
    second = ModelCheckpoint(tmp_path)
    made = trainer(callbacks=second, max_epochs=3)
    with pytest.warns(UserWarning, match="is not empty"):
        made.fit(Validated(), loader(7), loader(2), ckpt_path=first.best_model_path)
    assert saved(second) == ["epoch=0-step=7.ckpt", "epoch=2-step=21.ckpt"]


def test_other_directory_takes_over_the_best_path_only(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "a", monitor="score")
    fit(first, [1.0])
    second = ModelCheckpoint(tmp_path / "b", monitor="score")
    second.dirpath = str(tmp_path / "b")
    with pytest.warns(UserWarning, match="dirpath"):
        second.load_state_dict(first.state_dict())
    assert (second.best_model_path, second.best_k_models) == (first.best_model_path, {})


def test_state_follows_files_that_moved(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "there", monitor="score", save_last=True, save_top_k=2)
    fit(first, [2.0, 1.0])
    (tmp_path / "there").rename(tmp_path / "here")
    second = ModelCheckpoint(monitor="score", save_last=True, save_top_k=2)
    second.adopt(first.state_dict())
    second.moved(tmp_path / "there", tmp_path / "here")
    assert second.dirpath == str(tmp_path / "here")
    paths = [second.best_model_path, second.last_model_path, second.kth_best_model_path]
    assert all(Path(path).is_file() for path in [*paths, *second.best_k_models])
    assert second.best_model_score == 1.0


@pytest.mark.slow
@pytest.mark.network
def test_ranks_agree_on_what_is_saved_and_rank_zero_names_it(tmp_path: Path) -> None:
    body = """
    from datetime import timedelta
    from gpulayer.pytorch import ModelCheckpoint

    class Model(Net):
        def validation_step(self, batch, batch_idx):
            epoch = self.current_epoch
            self.log("shared", float(epoch), sync_dist=True)
            self.log("own", float(RANK - epoch))  # worse on rank 1 only, in names 0, -1, -2

    kept = {
        "shared": ModelCheckpoint("shared", monitor="shared", save_last=True),
        "own": ModelCheckpoint("own", filename="{own}", monitor="own", save_top_k=-1),
        "timed": ModelCheckpoint("timed", train_time_interval=timedelta(), save_top_k=-1),
        "late": ModelCheckpoint("late", train_time_interval=timedelta(hours=1)),
    }
    used = trainer(max_epochs=3, callbacks=list(kept.values()))
    used.fit(Model(), DataLoader(samples(8), 2), DataLoader(samples(4, 1), 2))
    tell(**{name: [os.path.basename(one.best_model_path), os.path.basename(one.last_model_path),
                   sorted(map(os.path.basename, one.best_k_models))] for name, one in kept.items()})
    """
    ranks = Ranks(tmp_path / "ranks", body, 2).check()
    assert ranks.told(0) == ranks.told(1)
    told = ranks.told()
    assert told["shared"] == ["epoch=0-step=2.ckpt", "last.ckpt", ["epoch=0-step=2.ckpt"]]
    assert told["own"][2] == ["own=-1.0.ckpt", "own=-2.0.ckpt", "own=0.0.ckpt"]
    assert told["own"][0] == "own=-2.0.ckpt"
    assert told["timed"][0].startswith("epoch=")  # how often depends on the clock
    assert (ranks.path / "timed" / told["timed"][0]).is_file()
    assert told["late"] == ["", "", []]


# -- against Lightning ----------------------------------------------------------------------------


class Case:
    """Arguments of one run, and the values that are monitored."""

    def __init__(self, rng: random.Random) -> None:
        pick = rng.choice
        values = [1.0, 2.0, 3.0, float("nan"), float("inf")]
        self.scores = [pick(values) for _ in range(60)]
        self.train_scores = [pick(values) for _ in range(60)]
        self.trainer: dict[str, Any] = {
            "max_epochs": pick([1, 3, 5]),
            "max_steps": pick([-1, -1, -1, 5]),
            "accumulate_grad_batches": pick([1, 1, 2, 3]),
            "val_check_interval": pick([1.0, 1.0, 0.5, 3, 1, 7]),
            "check_val_every_n_epoch": pick([1, 1, 1, 2]),
            "num_sanity_val_steps": pick([0, 2]),
            "limit_val_batches": pick([1.0, 1.0, 1.0, 0]),
            "fast_dev_run": pick([False] * 9 + [True]),
        }
        self.monitor = pick([None, "score", "train", "train_end", "absent"])
        trigger = pick(["none", "none", "epochs", "steps", "zero"])
        self.checkpoint: dict[str, Any] = {
            "monitor": self.monitor,
            "save_last": pick([None, True, "link"]),
            "save_top_k": pick([1, 1, -1, 0, 2, 3]),
            "mode": pick(["min", "max"]),
            "filename": pick([None, None, "{epoch}-{score:.1f}", "fixed", "sub/{step}-{train}"]),
            "auto_insert_metric_name": pick([True, True, False]),
            "every_n_epochs": {"epochs": pick([1, 2]), "zero": 0}.get(trigger),
            "every_n_train_steps": pick([1, 2, 3]) if trigger == "steps" else None,
            "save_on_train_epoch_end": pick([None, None, None, True, False]),
            "enable_version_counter": pick([True, True, False]),
            "save_weights_only": pick([False, True]),
        }
        if self.monitor is not None and trigger == "steps":  # deliberately different for others
            self.monitor = self.checkpoint["monitor"] = "train"
            if self.trainer["check_val_every_n_epoch"] == 2:
                # Lightning overlooks its first validation if nothing has made the loader before
                self.trainer["num_sanity_val_steps"] = 2
        if self.trainer["fast_dev_run"]:  # Lightning writes last.ckpt there
            self.checkpoint["save_last"] = None


def outcome(base: Any, make: Any, callback: Any, case: Case, folder: Path) -> dict[str, Any]:
    scores, train_scores = list(case.scores), list(case.train_scores)
    writes: list[Any] = []

    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train", train_scores[self.trainer.global_step])
            return (self.w * batch[0].mean()).sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def on_validation_epoch_end(self) -> None:
            self.log("score", scores[0] if self.trainer.sanity_checking else scores.pop(0))

        def on_train_epoch_end(self) -> None:
            self.log("train_end", train_scores[self.trainer.current_epoch])

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            writes.append((checkpoint["epoch"], checkpoint["global_step"], len(scores)))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def numbers(count: int) -> Any:
        return DataLoader(TensorDataset(torch.arange(1, 1 + count).float()), 1)

    model, failed = Model(), None
    try:
        checkpoint = callback(dirpath=folder, **case.checkpoint)
        made = make(
            accelerator="cpu", devices=1, enable_progress_bar=False, logger=False,
            callbacks=[checkpoint], default_root_dir=folder, **case.trainer,
        )  # fmt: skip
        made.fit(model, numbers(7), numbers(2))
    except Exception as error:
        failed = error

    def name(path: str) -> str:
        return str(Path(path).relative_to(folder)) if path else ""

    files = {}
    for path in folder.rglob("*.ckpt"):
        linked = path.readlink() if path.is_symlink() else None
        held = None if linked else torch.load(path, weights_only=False)
        files[name(str(path))] = linked or (
            held["epoch"], held["global_step"], bits(held["state_dict"]["w"])
        )  # fmt: skip

    def plain(score: Any) -> Any:
        return None if score is None else round(float(score), 3)

    if failed is not None:
        return {"error": failed, "files": files, "writes": writes}
    return {
        "error": None,
        "files": files,
        "writes": writes,
        "best": (name(checkpoint.best_model_path), plain(checkpoint.best_model_score)),
        "kth": (name(checkpoint.kth_best_model_path), plain(checkpoint.kth_value)),
        "last": name(checkpoint.last_model_path),
        "ranked": {name(path): plain(v) for path, v in checkpoint.best_k_models.items()},
        "score": repr(plain(checkpoint.current_score)),
        "state_key": checkpoint.state_key,
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.configurations(40)
def test_same_files_as_lightning(number: int, seed: int, lightning: Any, tmp_path: Path) -> None:
    case = Case(random.Random(f"{seed}/{number}"))

    def theirs(**arguments: Any) -> Any:
        return lightning.Trainer(enable_model_summary=False, **arguments)

    from pytorch_lightning.callbacks import ModelCheckpoint as Theirs

    real = tmp_path.resolve()
    expected = outcome(lightning.LightningModule, theirs, Theirs, case, real / "theirs")
    found = outcome(
        Module, Trainer, partial(ModelCheckpoint, save_final=False), case, real / "ours"
    )
    described = (case.trainer, case.checkpoint, case.scores[:8], case.train_scores[:22])
    errors = expected.pop("error"), found.pop("error")
    assert kind(errors[0]) == kind(errors[1]), (described, errors)
    for key, value in expected.items():
        assert found[key] == value, (key, described, errors)
