"""The examples as a newcomer runs them, and several devices of one machine without a mesh.

All real: `gpulayer mesh local` with its agents, ranks over gloo, what comes home. The examples are
copied first, so that nothing is written beside them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpulayer.localjob import SILENCE_S

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
EXAMPLES = ROOT / "docs" / "examples"
DEADLINE_S = 240.0  # torch is imported four times on two busy cores

TRAINED = """
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from gpulayer.pytorch import Module, Trainer


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if "--fail" in sys.argv and self.global_rank == 1:
            raise ValueError("no such batch")
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


model = Net()
before = model.layer.weight.detach().clone()
trainer = Trainer(devices=2, accelerator="cpu", max_epochs=2, log_every_n_steps=1)
trainer.fit(model, DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2))
print("steps", trainer.global_step, "changed", not torch.equal(before, model.layer.weight))
"""

LAUNCHED = """
import os, sys

from gpulayer.pytorch import launch

launch(devices=2, accelerator="cpu", target="local")

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
with open(os.path.join(os.environ["GPULAYER_OUT"], "out.txt"), "w") as file:
    file.write(os.environ["RANK"] + " of " + os.environ["WORLD_SIZE"])
if os.environ["RANK"] == "1" and len(sys.argv) > 1:
    print("about to fail", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
"""


def run(folder: Path, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder as a user with an activated venv does, and check its exit code."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}{done.stderr}"
    return done


def run_on_mesh(folder: Path, example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example on a local mesh of two as README does: in the clone, from its top.

    Nothing of the mesh is left afterwards.
    """
    script = folder / "docs" / "examples" / example
    script.parent.mkdir(parents=True)
    script.write_bytes((EXAMPLES / example).read_bytes())
    done = run(
        folder, "gpulayer", "mesh", "local", "--nodes", "2", "--",
        "python", f"docs/examples/{example}", "--nodes", "2", *arguments,
    )  # fmt: skip
    found = re.search(r"state in (\S+)$", done.stderr, re.MULTILINE)
    assert found is not None, done.stderr
    assert not Path(found[1]).exists()
    assert processes_of(found[1]) == []
    return done


def processes_of(folder: str) -> list[str]:
    """Return the command lines of processes that name a folder or work in it."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            if folder in words or process.cwd().startswith(folder):
                found.append(words)
        except psutil.Error:  # it ended meanwhile, or is not ours
            continue
    return found


def home_of(folder: Path) -> Path:
    (home,) = (folder / "gpulayer_jobs").iterdir()
    return home


def shape(row: str) -> str:
    """Return a printed line without what differs from run to run, and with the number of nodes."""
    for pattern, instead in (
        (r"/tmp/\S+", "FOLDER"),
        (r"(?<=-> )\S+", "FOLDER"),
        (r"(?<=: job )\S+", "JOB"),
        (r"(?<= after )[\w.]+", "TIME"),
        (r"node-\d+(, node-\d+)*", "NODES"),
        (r", [\d.]+ ms away", ""),
        (r"\d+ files?, [\d.]+ k?B", "FILES"),
        (r"\d[\d.]*", "0"),
    ):
        row = re.sub(pattern, instead, row)
    return row


def transcript() -> list[str]:
    """Return what README shows of this example, without the command and the mark of a cut."""
    (block,) = re.findall(
        r"^```console\n\$ (.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL
    )
    return [row for row in block.splitlines()[1:] if row != "..."]


def test_digits_are_learnt_and_code_after_fit_runs_once(tmp_path: Path) -> None:
    done = run_on_mesh(tmp_path, "digits.py", "--epochs", "2")
    accuracies = re.findall(r"^(.*)validation accuracy: ([\d.]+)%$", done.stdout, re.MULTILINE)
    assert len(accuracies) == 1
    assert accuracies[0][0] == ""  # by the launching process, not behind a rank's prefix
    assert float(accuracies[0][1]) > 80
    assert "trained for 46 steps on 2 machine(s)" in done.stdout
    assert list(home_of(tmp_path / "docs" / "examples").glob("gpulayer_logs/version_0/metrics.csv"))
    shapes = {shape(row) for row in (done.stdout + done.stderr).splitlines()}
    assert [row for row in transcript() if shape(row) not in shapes] == []  # README shows this run


def test_character_transformer_trains_with_launch_alone(tmp_path: Path) -> None:
    done = run_on_mesh(tmp_path, "char_gpt.py", "--steps", "2")
    assert (
        len(re.findall(r"^\[0\|node-\d\] step 2: loss \d\.\d{3}$", done.stdout, re.MULTILINE)) == 1
    )
    home = home_of(tmp_path / "docs" / "examples")
    assert (home / "sample.txt").read_text().startswith("def ")
    assert (home / "char_gpt.pt").stat().st_size > 1_000_000


def test_trainer_on_two_devices_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINED)
    done = run(tmp_path, "python", "train.py")
    assert [row for row in done.stdout.splitlines() if not row.startswith("[")] == [
        "steps 8 changed True"
    ]
    assert list(home_of(tmp_path).glob("gpulayer_logs/version_0/metrics.csv"))


def test_traceback_of_a_failing_device_is_last(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINED)
    done = run(tmp_path, "python", "train.py", "--fail", code=1)
    assert "steps" not in [row.split()[0] for row in done.stdout.splitlines() if row]
    assert done.stderr.rstrip().endswith("ValueError: no such batch")
    assert "rank 1 on local failed: exit code 1" in done.stderr
    assert "launching.py" not in done.stderr  # no traceback of ours around it
    assert processes_of(str(tmp_path)) == []


def test_launch_on_two_devices_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAUNCHED)
    run(tmp_path, "python", "train.py")
    home = home_of(tmp_path)
    assert (home / "out.txt").read_text() == "0 of 2"
    assert (home / "rank1" / "out.txt").read_text() == "1 of 2"


def test_launch_exits_with_the_code_of_the_failing_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAUNCHED)
    done = run(tmp_path, "python", "train.py", "9", code=9)
    assert done.stderr.rstrip().endswith("about to fail")
    assert (home_of(tmp_path) / "rank1" / "out.txt").read_text() == "1 of 2"


def test_killed_launcher_of_a_local_job_takes_its_ranks_along(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(
        "from gpulayer.pytorch import launch\n"
        "launch(devices=2, accelerator='cpu', target='local')\n"
        "import time\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "sleeps.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert "up" in launcher.stdout.readline()
        launcher.kill()
    ranks = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert ranks
    _, alive = psutil.wait_procs(ranks, timeout=SILENCE_S + 30)
    assert not alive
