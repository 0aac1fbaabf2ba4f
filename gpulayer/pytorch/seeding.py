"""Random numbers: one seed for all ranks, then a stream of its own for each.

Weights must start equal on every rank, so `seed_everything` gives all the same seed; dropout and
augmentation must not repeat across ranks, so `diverge` gives each its own stream afterwards. Numpy,
which torch can do without, is imported where it is seeded; before that it has no state to save.
This module does not know when training starts; the loop calls it.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gpulayer import env as environment
from gpulayer.pytorch.arguments import ArgumentError

# What `seed_everything` was called with: samplers use it, 0 without (as Lightning does).
_seed: int | None = None
_seed_workers = False

_VARIABLE = "PL_GLOBAL_SEED"  # Lightning's
_NUMPY_SEEDS = 2**32  # numpy takes seeds below this


def seed_everything(
    seed: int | str | None = None, workers: bool = False, verbose: bool = True
) -> int:
    """Seed torch, numpy and `random`; returns the seed.

    Args:
        seed: a number, also as text; default: the one before, else that of `PL_GLOBAL_SEED`, else 0
            with a warning.
        verbose: warn of a seed that was found nowhere.
        workers: derive the seeds of DataLoader workers from this seed, the rank and the worker's
            number instead of from the loader's own draw.
    """
    global _seed, _seed_workers
    if seed is None:
        seed = _given()
        if (
            seed is None
            and verbose
            and ((place := environment.rank_env()) is None or not place.rank)
        ):
            warnings.warn("no seed was given or found in PL_GLOBAL_SEED: it is 0", stacklevel=2)
    seed = _number("seed", 0 if seed is None else seed)
    _seed, _seed_workers = seed, workers
    import numpy as np  # also where nobody has yet: who draws from it later wants this seed

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def _given() -> int | None:
    """Return the seed that this process was given last."""
    if _seed is not None:
        return _seed
    text = environment.copied_env().get(_VARIABLE)
    return None if text is None else _number(_VARIABLE, text)


def _number(name: str, value: Any) -> int:
    try:
        found = int(value)
    except (ValueError, OverflowError):  # other texts, NaN, infinity
        found = -1
    except TypeError:
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    if 0 <= found < _NUMPY_SEEDS:
        return found
    raise ArgumentError(f"{name} must be a whole number in 0..{_NUMPY_SEEDS - 1}, got {value!r}")


def sampler_seed() -> int:
    """Return the seed that distributed samplers share."""
    return _given() or 0


def diverge(rank: int) -> None:
    """Give this rank its own random stream; rank 0 keeps the one it has."""
    if rank == 0:
        return
    torch.manual_seed(torch.initial_seed() + rank)
    if _seed is not None:
        import numpy as np

        np.random.seed((_seed + rank) % _NUMPY_SEEDS)
        random.seed(_seed + rank)


def worker_init(rank: int, seed: int | None = None) -> WorkerSeed | None:
    """Return what a DataLoader without a `worker_init_fn` should get, None to leave it alone.

    Args:
        seed: default: that of `seed_everything`.
    """
    return WorkerSeed(sampler_seed() if seed is None else seed, rank) if _seed_workers else None


class WorkerSeed:
    """A picklable `worker_init_fn` (loaders may spawn): seeds differ by rank, worker and epoch."""

    def __init__(self, seed: int, rank: int) -> None:
        self.seed = seed
        self.rank = rank

    def __call__(self, worker: int) -> None:
        import numpy as np

        drawn = torch.initial_seed() - worker  # the loader draws a new base for each iterator
        states = np.random.SeedSequence([self.seed, drawn, worker, self.rank]).generate_state(4)
        torch.manual_seed(int(states[0]) << 32 | int(states[1]))
        np.random.seed(states[2:3])
        random.seed(int(states[3]))


def states(device: torch.device) -> dict[str, Tensor]:
    """Return this process's random states, `device`'s own among them, as tensors."""
    version, numbers, gauss = random.getstate()
    assert version == 3
    found = {
        "torch": torch.get_rng_state(),
        "python": _integers(numbers),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        generator = numpy.random.get_state(legacy=False)
        assert generator["bit_generator"] == "MT19937"
        words = generator["state"]
        found |= {
            "numpy": _integers([*words["key"].tolist(), words["pos"], generator["has_gauss"]]),
            "numpy_gauss": torch.tensor(generator["gauss"], dtype=torch.float64),
        }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        found["device"] = torch.mps.get_rng_state()
    return found


def _integers(values: Iterable[int]) -> Tensor:
    # Through an array: torch.tensor looks at each number on its own and takes 20 times as long.
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def restore(found: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the random states that `states` returned."""
    torch.set_rng_state(found["torch"])
    gauss = found["python_gauss"].tolist()
    random.setstate((3, tuple(found["python"].tolist()), gauss[0] if gauss else None))
    if "numpy" in found:
        import numpy as np

        *keys, position, has_gauss = found["numpy"].tolist()
        words = np.array(keys, dtype=np.uint32)
        np.random.set_state(("MT19937", words, position, has_gauss, found["numpy_gauss"].item()))
    if "device" not in found:
        return
    if device.type == "cuda":
        torch.cuda.set_rng_state(found["device"], device)
    elif device.type == "mps":
        torch.mps.set_rng_state(found["device"])


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Restore every random state on the way out."""
    numpy = sys.modules.get("numpy")
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "python": random.getstate(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }
    try:
        yield
    finally:
        torch.set_rng_state(state["torch"])
        if numpy is not None:
            numpy.random.set_state(state["numpy"])
        random.setstate(state["python"])
        if state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])
        if state["mps"] is not None:
            torch.mps.set_rng_state(state["mps"])
