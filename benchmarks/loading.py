"""Time of an epoch where loading counts: a loop by hand, PyTorch Lightning and GPUlayer in one run.

    python benchmarks/loading.py

First a `TensorDataset` behind a shuffling DataLoader of this process, whose batches GPUlayer
fetches whole. Then a data set whose samples take time (matrix products, which leave the GIL to
others meanwhile) and a model that takes about as long, loaded in step and with `prefetch=True`:
two cores can then halve the time. All contenders train on the same batches from the same weights,
take turns in an order that rotates, and must end with equal weights, to the bit. A figure is the
median of the rounds. Lightning is no dependency: `pip install pytorch-lightning==2.6.6`.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gpulayer.pytorch as ours

SAMPLES = 16 * 1024
DECODED = 6 * 1024
WIDTH = 64


class Decoded(Dataset[Any]):
    """Samples that are computed as they are read, from a state that no sample changes."""

    def __init__(self) -> None:
        self.raw = torch.randn(DECODED, WIDTH)
        self.codebook = torch.randn(WIDTH, 160) / 8
        self.mixing = torch.randn(160, 160) / 13

    def __len__(self) -> int:
        return DECODED

    def __getitem__(self, index: int) -> Any:
        made = self.raw[index].expand(160, WIDTH) @ self.codebook
        made = torch.tanh(made @ self.mixing)
        return made[0, :WIDTH].clone(), made[0, :1].clone()


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, 1))  # fmt: skip


def by_hand(net: nn.Module, loader: Any) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    started = time.perf_counter()
    for x, y in loader:
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return time.perf_counter() - started


def module_on(base: Any) -> Any:
    class Step(base):  # type: ignore[misc]
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net
            self.took_s = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def on_train_start(self) -> None:
            self.took_s = -time.perf_counter()

        def on_train_end(self) -> None:
            self.took_s += time.perf_counter()

    return Step


TheirStep, OurStep = module_on(lightning.LightningModule), module_on(ours.Module)
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_progress_bar": False,
    "logger": False, "enable_checkpointing": False,
}  # fmt: skip


def in_lightning(net: nn.Module, loader: Any) -> float:
    step = TheirStep(net)
    lightning.Trainer(**QUIET, enable_model_summary=False).fit(step, loader)
    return step.took_s  # type: ignore[no-any-return]


def in_gpulayer(net: nn.Module, loader: Any) -> float:
    step = OurStep(net)
    ours.Trainer(**QUIET).fit(step, loader)
    return step.took_s  # type: ignore[no-any-return]


def prefetching(net: nn.Module, loader: Any) -> float:
    step = OurStep(net)
    ours.Trainer(**QUIET, prefetch=True).fit(step, loader)
    return step.took_s  # type: ignore[no-any-return]


Contenders = dict[str, Callable[[nn.Module, Any], float]]


def compare(
    contenders: Contenders, data: Dataset[Any], size: int, width: int, rounds: int
) -> dict[str, float]:
    """Return milliseconds per epoch of each contender."""
    took: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        weights = []
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            torch.manual_seed(1)
            net = network(width)
            loader = DataLoader(
                data, size, shuffle=True, generator=torch.Generator().manual_seed(2)
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                took[name].append(contenders[name](net, loader) * 1e3)
            weights.append([parameter.detach() for parameter in net.parameters()])
        for one in weights[1:]:
            assert all(map(torch.equal, one, weights[0])), "they trained something else"
    return {name: statistics.median(values) for name, values in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(
        f"{time.strftime('%Y-%m-%d')}  torch {torch.__version__}, Lightning "
        f"{lightning.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs"
    )
    print(f"cpu, 1 thread, median of {rounds} rounds, milliseconds per epoch")
    torch.manual_seed(3)
    rows = TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, 1))
    three: Contenders = {"hand": by_hand, "lightning": in_lightning, "gpulayer": in_gpulayer}
    print(f"{'TensorDataset':22} {'by hand':>8} {'Lightning':>10} {'GPUlayer':>9} "
          f"{'hand/GPUlayer':>14} {'Lightning/GPUlayer':>19}")  # fmt: skip
    for size in (32, 256):
        found = compare(three, rows, size, 64, rounds)
        hand, theirs, mine = found.values()
        print(f"{f'{SAMPLES} rows, batch {size}':22} {hand:8.0f} {theirs:10.0f} {mine:9.0f} "
              f"{hand / mine:13.2f}x {theirs / mine:18.2f}x", flush=True)  # fmt: skip
    both: Contenders = {"hand": by_hand, "in step": in_gpulayer, "ahead": prefetching}
    print(f"{'samples that take time':22} {'by hand':>8} {'in step':>10} {'prefetch':>9} "
          f"{'hand/prefetch':>14} {'in step/prefetch':>19}")  # fmt: skip
    for size in (32, 256):
        found = compare(both, Decoded(), size, 1024, rounds)
        hand, in_step, ahead = found.values()
        print(f"{f'{DECODED} rows, batch {size}':22} {hand:8.0f} {in_step:10.0f} {ahead:9.0f} "
              f"{hand / ahead:13.2f}x {in_step / ahead:18.2f}x", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
