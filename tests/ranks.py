"""A script as several ranks of real processes over gloo, with torchrun's variables."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DEADLINE_S = 120  # importing torch twice on a busy two-core machine takes half a minute

HEAD = """
import json, os, sys, warnings
import torch
from torch.utils.data import DataLoader, TensorDataset
from gpulayer.pytorch import Module, Runtime, Trainer, seed_everything
warnings.simplefilter("ignore")
torch.set_num_threads(1)
seed_everything(1)
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def tell(**values):
    with open(f"told{RANK}.json", "w") as file:
        json.dump(values, file)

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

def samples(count, seed=0):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))

def trainer(**arguments):
    defaults = dict(accelerator="cpu", devices=1, enable_progress_bar=False, log_every_n_steps=1,
                    num_sanity_val_steps=0, max_epochs=1, default_root_dir=".")
    return Trainer(**{**defaults, **arguments})
"""


class Ranks:
    """Runs a script as `world` processes in `path`; when one fails, the others are killed.

    Args:
        signals: what is sent to which rank once the script has made the file `ready`.
        environ: further variables of a rank.
    """

    def __init__(
        self,
        path: Path,
        body: str,
        world: int,
        *,
        signals: Mapping[int, int] | None = None,
        environ: Callable[[int], Mapping[str, str]] = lambda rank: {},
    ) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        script = path / "script.py"
        script.write_text(HEAD + textwrap.dedent(body))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(world):
            env = os.environ | {"OMP_NUM_THREADS": "1"} | environ(rank)
            if world > 1:
                env |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            with (path / f"output{rank}.txt").open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(script)],
                        cwd=path,
                        env=env,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            self._watch(processes, signals or {})
        finally:
            for process in processes:
                process.kill()
                process.wait()
        self.output = [(path / f"output{rank}.txt").read_text() for rank in range(world)]
        self.codes = [process.returncode for process in processes]

    def _watch(self, processes: list[subprocess.Popen[bytes]], signals: Mapping[int, int]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while any(process.poll() is None for process in processes):
            if time.monotonic() > end_s or any(process.returncode for process in processes):
                if not self._others_end(processes):
                    return
            elif signals and (self.path / "ready").exists():
                for rank, number in signals.items():
                    processes[rank].send_signal(number)
                signals = {}
            time.sleep(0.02)

    @staticmethod
    def _others_end(processes: list[subprocess.Popen[bytes]]) -> bool:
        """Return whether all end by themselves soon: they may fail for the same reason."""
        try:
            for process in processes:
                process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return False
        return True

    def check(self) -> Ranks:
        assert set(self.codes) == {0}, "\n".join(self.output)
        return self

    def told(self, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / f"told{rank}.json").read_text())
        return found

    def column(self, name: str) -> list[float]:
        file = self.path / "gpulayer_logs" / "version_0" / "metrics.csv"
        with file.open(newline="") as rows:
            return [float(row[name]) for row in csv.DictReader(rows) if row[name]]
