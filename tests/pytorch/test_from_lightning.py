"""The page for people who come from Lightning: its two scripts, and the table of arguments."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import gpulayer.pytorch as ours
from gpulayer.pytorch import Trainer
from gpulayer.pytorch.arguments import ABSENT, REFUSED

PAGE = (Path(__file__).parents[2] / "docs" / "pytorch" / "from-lightning.md").read_text()
SCRIPTS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def section(of: str) -> str:
    """Return what the page has below "... that do not exist here"."""
    return PAGE.partition(f"## {of} that do not exist here")[2].partition("\n## ")[0]


def printed(folder: Path, name: str) -> str:
    (folder / name).write_text(SCRIPTS[name])
    done = subprocess.run(
        [sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_both_scripts_print_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")
    ours = printed(tmp_path, "gpulayer_script.py")
    assert re.fullmatch(r"16 steps, val_loss \d\.\d{6}", ours)
    assert printed(tmp_path, "lightning_script.py") == ours


def test_table_names_every_argument_that_is_refused() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", section("Arguments"), re.M))
    assert table == REFUSED


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("member of `Trainer`", "Trainer"),
        ("member of `Module`", "Module"),
        ("argument of `self.log`", "self.log"),
    ],
)
def test_tables_name_every_member_that_is_absent(head: str, kind: str) -> None:
    table = section("Members").partition(f"| {head} |")[2].partition("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", table, re.MULTILINE)) == ABSENT[kind]


def test_every_argument_of_lightning_is_taken_or_refused() -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")
    theirs = set(inspect.signature(lightning.Trainer.__init__).parameters) - {"self"}
    ours = set(inspect.signature(Trainer.__init__).parameters)
    assert theirs - ours <= set(REFUSED)
    assert not ours & set(REFUSED)


IMPOSSIBLE: dict[str, dict[str, list[Any]]] = {
    "Trainer": {
        "accelerator": ["x"], "strategy": ["x"], "devices": [0, -2, "x", 1.5],
        "num_nodes": [0, "a"],
        "precision": ["x", 17, 8], "max_epochs": [-2], "max_steps": [-2, None],
        "max_time": ["1", 5, "00:00:01"], "limit_train_batches": [1.5, -1, "a"],
        "limit_val_batches": [-0.1, 1.1], "limit_test_batches": [-1],
        "limit_predict_batches": [1.5],
        "val_check_interval": [1.5, -1, "a"], "check_val_every_n_epoch": ["a", 1.5],
        "fast_dev_run": [-1, "a"], "gradient_clip_val": ["a", [1]],
        "gradient_clip_algorithm": ["l1", 3], "benchmark": ["a"], "callbacks": ["a"],
    },
    "EarlyStopping": {"mode": ["x"]},
    "ModelCheckpoint": {
        "save_top_k": [-2, 5], "mode": ["x"], "every_n_epochs": [-1], "every_n_train_steps": [-1],
    },
    "Timer": {"duration": ["1", 5], "interval": ["x"]},
    "LearningRateMonitor": {"logging_interval": ["x"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "argument"), [(name, one) for name, table in IMPOSSIBLE.items() for one in table]
)
def test_what_lightning_refuses_is_refused(name: str, argument: str, lightning: Any) -> None:
    others = {
        "Trainer": {"accelerator": "cpu", "devices": 1},
        "EarlyStopping": {"monitor": "v"},
    }.get(name, {})
    theirs = lightning.Trainer if name == "Trainer" else getattr(lightning.callbacks, name)
    for value in IMPOSSIBLE[name][argument]:
        given = {**others, argument: value}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for make, errors in (
                (theirs, Exception),
                (getattr(ours, name), (ValueError, TypeError)),
            ):
                with pytest.raises(errors):
                    make(**given)
