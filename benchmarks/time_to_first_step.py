"""How long from `python train.py` to the first training step, beside torchrun started by hand.

Three hosts and a laptop as network namespaces of this machine (root, Linux). One script with
`Trainer`, run alternately: from the laptop on the mesh, which plans, ships the source, checks the
network and starts; and by torchrun on the three hosts, where the source already lies, with address,
ranks and interface name given by hand, all three started in the same instant. The time of a run is
from the start of the command to the first training step of rank 0.

    python benchmarks/time_to_first_step.py [--runs 5] [--log benchmarks/results/NAME.txt]
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

from lan import Lan, why_unavailable  # noqa: E402
from meshes import LanMesh  # noqa: E402
from reporting import Report, parser  # noqa: E402

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from gpulayer.pytorch import Module, Trainer


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 0 and self.global_step == 0:
            print(f"FIRST STEP {time.time():.6f}", flush=True)
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=4)
    trainer = Trainer(num_nodes=3, devices=1, accelerator="cpu", max_steps=2)
    trainer.fit(Net(), data)
"""
FIRST = re.compile(r"FIRST STEP (\d+\.\d+)")


def by_mesh(mesh: LanMesh, folder: Path, edit: int) -> float:
    """Return seconds to the first step; each run has an edited script, as a developer's has."""
    (folder / "train.py").write_text(f"# edit {edit}\n{SCRIPT}")
    started = time.time()
    done = mesh.laptop.run(["python", "train.py"], cwd=folder, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return first_step(done.stdout) - started


def by_torchrun(mesh: LanMesh, port: int) -> float:
    """Return seconds to the first step of rank 0."""
    started = time.time()
    runs = []
    for rank, box in enumerate(mesh.boxes):
        command = [
            *(TORCHRUN, "--nnodes=3", f"--node-rank={rank}", "--nproc-per-node=1"),
            *(f"--master-addr={mesh.boxes[0].address}", f"--master-port={port}", "train.py"),
        ]
        runs.append(box.popen(command, env={"GLOO_SOCKET_IFNAME": "eth0"}))
    for run in runs:
        run.wait(120)  # how it ends does not count: ranks under torchrun abort in teardown at times
    return min(first_step(run.output()) for run in runs) - started


def first_step(output: str) -> float:
    """Return when the first step was, in wall time; infinity where none was printed."""
    return min((float(found) for found in FIRST.findall(output)), default=float("inf"))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=5, help="counted runs of each, after one more")
    args = options.parse_args()
    if reason := why_unavailable():
        raise SystemExit(f"no test LAN here: {reason}")
    report = Report(args.log)
    mesh_s: list[float] = []
    torchrun_s: list[float] = []
    with Lan() as lan:
        mesh = LanMesh(lan)
        mesh.form()
        folder = mesh.laptop.home / "work"
        folder.mkdir()
        for box in mesh.boxes:
            (box.home / "train.py").write_text(SCRIPT)
        for run in range(args.runs + 1):
            pair = by_mesh(mesh, folder, run), by_torchrun(mesh, 29500 + run)
            report.say(f"run {run}: mesh {pair[0]:.2f} s, torchrun {pair[1]:.2f} s")
            if run:  # the first warms the disk
                mesh_s.append(pair[0])
                torchrun_s.append(pair[1])
    ratios = [a / b for a, b in zip(mesh_s, torchrun_s, strict=True)]
    report.say(
        f"python train.py on the mesh   median {statistics.median(mesh_s):.2f} s "
        f"({min(mesh_s):.2f} to {max(mesh_s):.2f})",
        f"torchrun started by hand      median {statistics.median(torchrun_s):.2f} s "
        f"({min(torchrun_s):.2f} to {max(torchrun_s):.2f})",
        f"ratio, pair by pair           median {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
    )


if __name__ == "__main__":
    main()
