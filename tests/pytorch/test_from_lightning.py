"""The page for people who come from Lightning: its two scripts, and the table of arguments."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpulayer.pytorch import Trainer
from gpulayer.pytorch.arguments import REFUSED

PAGE = (Path(__file__).parents[2] / "docs" / "pytorch" / "from-lightning.md").read_text()
SCRIPTS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


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
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", PAGE.split("do not exist here")[1], re.M))
    assert table == REFUSED


def test_every_argument_of_lightning_is_taken_or_refused() -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")
    theirs = set(inspect.signature(lightning.Trainer.__init__).parameters) - {"self"}
    ours = set(inspect.signature(Trainer.__init__).parameters)
    assert theirs - ours <= set(REFUSED)
    assert not ours & set(REFUSED)
