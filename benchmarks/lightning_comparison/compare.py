"""Time per training step: a loop by hand, PyTorch Lightning and GPUlayer, side by side in one run.

    python benchmarks/lightning_comparison/compare.py                      one process
    torchrun --nproc-per-node 2 benchmarks/lightning_comparison/compare.py   two, over gloo

Every contender trains the same model on the same batches from the same weights. They take turns, in
an order that rotates from round to round; a figure is the median of the rounds. Measured is what
lies between `on_train_start` and `on_train_end`. At the end of each case the weights of all three
must be equal, in one process to the bit. Lightning is no dependency:
`pip install pytorch-lightning==2.6.6`.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as lightning
import torch
import torch.distributed as dist
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import gpulayer.pytorch as ours

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# -- models and their batches ---------------------------------------------------------------------


class Batches(IterableDataset[Any]):
    """The same few batches in memory again and again: loading costs next to nothing."""

    def __init__(self, made: list[Any], steps: int) -> None:
        self.made = made
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Any:
        return (self.made[i % len(self.made)] for i in range(self.steps))


def linear() -> tuple[nn.Module, Callable[[], Any]]:
    return nn.Linear(16, 1), lambda: (torch.randn(8, 16), torch.randn(8, 1))


def mlp() -> tuple[nn.Module, Callable[[], Any]]:
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
                        nn.Linear(128, 1))  # fmt: skip
    return net, lambda: (torch.randn(32, 64), torch.randn(32, 1))


def cnn() -> tuple[nn.Module, Callable[[], Any]]:
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
                        nn.Flatten(), nn.Linear(128, 1))  # fmt: skip
    return net, lambda: (torch.randn(32, 1, 28, 28), torch.randn(32, 1))


def transformer() -> tuple[nn.Module, Callable[[], Any]]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(),
                        nn.Linear(32 * 64, 1))  # fmt: skip
    return net, lambda: (torch.randn(8, 32, 64), torch.randn(8, 1))


MODELS = {"linear": linear, "mlp": mlp, "cnn": cnn, "transformer": transformer}
STEPS = {"linear": 1500, "mlp": 1000, "cnn": 60, "transformer": 60}


@dataclass(frozen=True)
class Variant:
    """What a step does beside forward, backward and update."""

    name: str
    scalars: int = 0
    accumulate: int = 1
    files: bool = False  # metrics.csv every 50 steps, and a checkpoint at the end


VARIANTS = (
    Variant("bare"),
    Variant("1 scalar", scalars=1),
    Variant("5 scalars", scalars=5),
    Variant("accumulate 4", accumulate=4),
    Variant("csv, checkpoint", scalars=1, files=True),
)


# -- contenders -----------------------------------------------------------------------------------


def by_hand(net: nn.Module, data: Any, variant: Variant, folder: str) -> float:
    wrapped = DistributedDataParallel(net) if WORLD > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=None)
    started = time.perf_counter()
    count = len(data)
    for i, (x, y) in enumerate(loader):
        stepping = (i + 1) % variant.accumulate == 0 or i + 1 == count
        apart = wrapped.no_sync() if WORLD > 1 and not stepping else nullcontext()  # type: ignore[operator]
        with apart:
            loss = nn.functional.mse_loss(wrapped(x), y)
            if i % variant.accumulate == 0:
                optimizer.zero_grad()
            if variant.accumulate > 1:
                loss = loss / variant.accumulate
            loss.backward()
        if stepping:
            optimizer.step()
    return time.perf_counter() - started


def module_on(base: Any) -> Any:
    class Step(base):  # type: ignore[misc]
        def __init__(self, net: nn.Module, scalars: int) -> None:
            super().__init__()
            self.net = net
            self.scalars = [f"scalar_{i}" for i in range(scalars)]
            self.took_s = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            for name in self.scalars:
                self.log(name, loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def on_train_start(self) -> None:
            self.took_s = -time.perf_counter()

        def on_train_end(self) -> None:
            self.took_s += time.perf_counter()

    return Step


TheirStep, OurStep = module_on(lightning.LightningModule), module_on(ours.Module)


def in_lightning(net: nn.Module, data: Any, variant: Variant, folder: str) -> float:
    step = TheirStep(net, variant.scalars)
    lightning.Trainer(
        accelerator="cpu", devices=WORLD, max_epochs=1, enable_progress_bar=False,
        logger=CSVLogger(folder) if variant.files else False, log_every_n_steps=50,
        enable_checkpointing=variant.files, enable_model_summary=False, default_root_dir=folder,
        accumulate_grad_batches=variant.accumulate, use_distributed_sampler=False,
    ).fit(step, DataLoader(data, batch_size=None))  # fmt: skip
    return step.took_s  # type: ignore[no-any-return]


def in_gpulayer(net: nn.Module, data: Any, variant: Variant, folder: str) -> float:
    step = OurStep(net, variant.scalars)
    ours.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, enable_progress_bar=False,
        logger=variant.files, log_every_n_steps=50, enable_checkpointing=variant.files,
        default_root_dir=folder, accumulate_grad_batches=variant.accumulate,
        use_distributed_sampler=False,
    ).fit(step, DataLoader(data, batch_size=None))  # fmt: skip
    return step.took_s  # type: ignore[no-any-return]


CONTENDERS = {"hand": by_hand, "lightning": in_lightning, "gpulayer": in_gpulayer}


# -- the comparison -------------------------------------------------------------------------------


def compare(model: str, variant: Variant, rounds: int, scale: float) -> dict[str, float]:
    """Return microseconds per step of each contender."""
    steps = max(8, int(STEPS[model] * scale))
    took: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        weights = {}
        names = list(CONTENDERS)
        for name in names[number % 3 :] + names[: number % 3]:
            torch.manual_seed(1)
            net, batch = MODELS[model]()
            torch.manual_seed(2 + RANK)
            data = Batches([batch() for _ in range(16)], steps)
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seconds = CONTENDERS[name](net, data, variant, folder)
            took[name].append(seconds / steps * 1e6)
            weights[name] = [parameter.detach().clone() for parameter in net.parameters()]
        for name in ("lightning", "gpulayer"):
            pairs = zip(weights[name], weights["hand"], strict=True)
            same = torch.equal if WORLD == 1 else torch.allclose  # sums over ranks round
            assert all(same(a, b) for a, b in pairs), f"{name} trained something else"
    return {name: statistics.median(values) for name, values in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of steps")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if WORLD > 1:
        dist.init_process_group("gloo")
    if RANK == 0:
        print(
            f"{time.strftime('%Y-%m-%d')}  torch {torch.__version__}, Lightning "
            f"{lightning.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs"
        )
        print(
            f"{WORLD} process(es), cpu, 1 thread each, median of {args.rounds} rounds, "
            "microseconds per step"
        )
        print(f"{'model':12} {'variant':16} {'by hand':>9} {'Lightning':>15} {'GPUlayer':>15} "
              f"{'over hand':>10} {'Lightning/GPUlayer':>19}")  # fmt: skip
    for model in args.models:
        for variant in VARIANTS:
            found = compare(model, variant, args.rounds, args.scale)
            hand, theirs, mine = (found[name] for name in CONTENDERS)
            if RANK == 0:
                ratios = f"{theirs:8.0f} {theirs / hand:5.2f}x {mine:8.0f} {mine / hand:5.2f}x"
                print(
                    f"{model:12} {variant.name:16} {hand:9.0f} {ratios} {mine - hand:+10.0f} "
                    f"{theirs / mine:18.2f}x",
                    flush=True,
                )
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
