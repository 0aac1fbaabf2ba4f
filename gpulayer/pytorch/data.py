"""Loaders: sharding them over ranks, bounding them, moving batches.

A training loader is sharded by torch's `DistributedSampler`, which pads so that all ranks step
equally often. An evaluation loader is sharded without padding: each sample counts once, and ranks
may have unequal numbers of batches. Knows nothing of steps or metrics.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from gpulayer.pytorch import fetching
from gpulayer.pytorch.arguments import ArgumentError

Loader = Iterable[Any]
Loaders = Loader | Sequence[Loader]


class DrawnSamples(Dataset[Any]):
    """What a sampler draws, as a data set of indices, so that a distributed sampler can share it.

    Every rank draws all: a sampler that draws at random must draw the same on all ranks.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._drawn: list[Any] = []

    def __len__(self) -> int:
        return len(self._sampler)

    def __getitem__(self, index: int) -> Any:
        return self._drawn[index]

    def draw(self) -> None:
        self._drawn = list(self._sampler)


class ShardSampler(DistributedSampler[Any]):
    """A `DistributedSampler` that can also share out a sampler's draws, and can leave out padding.

    Without padding rank r of w gets the samples r, r + w, ... and the last ranks may get one less.
    """

    def __init__(
        self, source: Any, rank: int, world_size: int, *, shuffle: bool, pad: bool, seed: int
    ):
        super().__init__(source, world_size, rank, shuffle=shuffle, seed=seed)
        self._drawn = source if isinstance(source, DrawnSamples) else None
        if not pad:
            self.num_samples = len(range(rank, len(source), world_size))
            self.total_size = len(source)  # what the indices are padded to

    def __iter__(self) -> Iterator[Any]:
        if self._drawn is None:
            return super().__iter__()
        self._drawn.draw()
        return (self._drawn[index] for index in super().__iter__())


def iterable(loader: Any) -> bool:
    """Return whether batches can be taken from `loader`, again for each epoch."""
    return hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")


def shardable(loader: Loader) -> bool:
    """Return whether a loader can be given a sampler of ours."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader.sampler, DistributedSampler)
    )


def sequential(loader: Loader) -> bool:
    """Return whether the user asked for samples in order."""
    return isinstance(getattr(loader, "sampler", None), SequentialSampler)


def shard(
    loader: DataLoader[Any], rank: int, world_size: int, *, shuffle: bool, pad: bool, seed: int
) -> DataLoader[Any]:
    """Return a copy of `loader` that yields this rank's share."""
    if isinstance(loader.sampler, RandomSampler | SequentialSampler):
        source: Any = loader.dataset
    else:
        source = DrawnSamples(loader.sampler)
    sampler = ShardSampler(source, rank, world_size, shuffle=shuffle, pad=pad, seed=seed)
    changed: dict[str, Any] = {"sampler": sampler}
    if loader.batch_sampler is not None:
        if type(loader.batch_sampler) is not BatchSampler:
            raise ArgumentError(
                f"a loader with its own batch sampler ({type(loader.batch_sampler).__name__}) "
                "cannot be shared out over ranks",
                hint="shard it by rank yourself and pass Trainer(use_distributed_sampler=False)",
            )
        batches = BatchSampler(sampler, loader.batch_sampler.batch_size, loader.drop_last)
        changed["batch_sampler"] = batches
    # Copied, not built anew: it also works for subclasses with arguments of their own. DataLoader
    # refuses assignment to these attributes after __init__, hence __dict__.
    twin = copy.copy(loader)
    vars(twin).update(changed, _iterator=None)
    return twin


def for_training(
    loader: Loader, rank: int, world_size: int, *, seed: int, inject: bool, init: Any
) -> Loader:
    """Return the loader that this rank trains from."""
    if isinstance(loader, list | tuple | Mapping):
        raise ArgumentError(
            f"train_dataloaders is a {type(loader).__name__}: there is one training loader",
            hint="join the data sets, or yield from both in one iterable",
        )
    if not iterable(loader):
        raise ArgumentError(
            f"train_dataloaders is a {type(loader).__name__}, which yields no batches",
            hint="pass a DataLoader, or anything that can be iterated over",
        )
    if world_size > 1 and inject and shardable(loader):
        assert isinstance(loader, DataLoader)
        if sequential(loader) and rank == 0:
            warnings.warn(
                "the training loader does not shuffle, but its distributed sampler does; to keep "
                "the order, shard it by rank yourself and pass use_distributed_sampler=False",
                stacklevel=2,
            )
        loader = shard(loader, rank, world_size, shuffle=True, pad=True, seed=seed)
    return _with_init(loader, init)


def for_evaluation(
    loaders: Loaders | None, rank: int, world_size: int, *, seed: int, inject: bool, init: Any
) -> list[Loader]:
    """Return the loaders that this rank evaluates."""
    if loaders is None:
        return []
    found = _listed(loaders)
    if world_size > 1 and inject:
        found = [
            shard(one, rank, world_size, shuffle=not sequential(one), pad=False, seed=seed)
            if isinstance(one, DataLoader) and shardable(one)
            else one
            for one in found
        ]
    return [_with_init(one, init) for one in found]


def for_prediction(
    loaders: Loaders, rank: int, world_size: int, *, inject: bool, whole_batches: bool, init: Any
) -> list[Loader]:
    """Return the loaders of which this rank predicts: nothing padded, nothing dropped."""
    found = _listed(loaders)
    result: list[Loader] = []
    for one in found:
        if isinstance(one, DataLoader) and type(one.batch_sampler) is BatchSampler:
            one = _replaced(one, BatchSampler(one.sampler, one.batch_size or 1, drop_last=False))
        if world_size > 1 and inject:
            if whole_batches:
                one = _every(one, rank, world_size)
            elif isinstance(one, DataLoader) and shardable(one):
                one = shard(one, rank, world_size, shuffle=False, pad=False, seed=0)
        result.append(_with_init(one, init))
    return result


def _listed(loaders: Loaders) -> list[Loader]:
    found = list(loaders) if isinstance(loaders, list | tuple) else [loaders]
    for one in found:
        if not iterable(one):
            raise ArgumentError(
                f"a loader is a {type(one).__name__}, which yields no batches",
                hint="pass a DataLoader, or anything that can be iterated over, or a list of them",
            )
    return found


def as_given(source: Loaders, found: list[Loader]) -> Any:
    """Return a rank's loaders as the user gave them: one, a list or a tuple."""
    if isinstance(source, list | tuple):
        return tuple(found) if isinstance(source, tuple) else list(found)
    return found[0] if found else None


def _replaced(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    twin = copy.copy(loader)
    vars(twin).update(batch_sampler=batch_sampler, drop_last=False, _iterator=None)
    return twin


def _every(loader: Loader, rank: int, world_size: int) -> Loader:
    """Return every `world_size`-th batch of a loader, from `rank` on."""
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        return _replaced(loader, Every(loader.batch_sampler, rank, world_size))
    return Every(loader, rank, world_size)  # reads all: nothing else is known of it


class Every:
    """Every so many items of something that can be iterated over."""

    def __init__(self, items: Iterable[Any], first: int, step: int) -> None:
        self._items = items
        self._first = first
        self._step = step

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._items), self._first, None, self._step)

    def __len__(self) -> int:
        return len(range(self._first, len(self._items), self._step))  # type: ignore[arg-type]


def _with_init(loader: Loader, init: Any) -> Loader:
    if init is not None and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        twin = copy.copy(loader)
        twin.worker_init_fn = init
        return twin
    return loader


def length(loader: Loader) -> float:
    """Return the number of batches, inf where the loader does not say."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # an IterableDataset without __len__ raises TypeError
        return float("inf")


def padded_length(loader: Loader) -> float:
    """Return the batches of the rank that has most: equal on all ranks where `length` is not."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ShardSampler) or not isinstance(loader, DataLoader):
        return length(loader)
    samples = -(-sampler.total_size // sampler.num_replicas)
    size = loader.batch_size or 1
    return samples // size if loader.drop_last else -(-samples // size)


def shared_out(loader: Loader) -> bool:
    """Return whether a sampler gives each rank its own share."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return any(isinstance(one, DistributedSampler) for one in samplers)


def fingerprint(batch: Any) -> str:
    """Return a checksum of a batch's tensors; reads them back from the device."""
    found: list[str] = []

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            raw = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            found.append(f"{tuple(value.shape)}:{zlib.crc32(raw.numpy().data)}")
        elif isinstance(value, Mapping):
            for item in value.values():
                look(item)
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)

    look(batch)
    return " ".join(found) or "no tensors"


def set_epoch(loader: Loader, epoch: int) -> None:
    """Tell the samplers of a loader which epoch begins; forgetting it repeats the order."""
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    for one in (sampler, batches, getattr(batches, "sampler", None)):
        if callable(getattr(one, "set_epoch", None)):
            one.set_epoch(epoch)  # type: ignore[union-attr]


def generators(loader: Loader) -> list[torch.Generator]:
    """Return the random generators that a loader and its samplers own, each once."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {
        id(one): one
        for owner in owners
        if isinstance(one := getattr(owner, "generator", None), torch.Generator)
    }
    return list(found.values())


def generator_states(loader: Loader) -> list[Tensor]:
    """Return the states of a loader's own random generators."""
    return [one.get_state() for one in generators(loader)]


def set_generators(loader: Loader, states: Sequence[Tensor]) -> None:
    """Set the states that `generator_states` returned."""
    for one, state in zip(generators(loader), states, strict=False):
        one.set_state(state)


def has_workers(loader: Loader) -> bool:
    """Return whether workers of an earlier epoch wait for the next, which then draws no seed."""
    return bool(getattr(loader, "persistent_workers", False)) and (
        getattr(loader, "_iterator", None) is not None
    )


def make_equal(loader: Loader, states: Sequence[Tensor], workers: bool) -> None:
    """Bring a loader to where another one was, with these generators and with or without workers.

    Draws from the process's random states.
    """
    if workers and not has_workers(loader):
        iter(loader)
    set_generators(loader, states)


class _Later:
    """A sampler whose first items are left out."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._held: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self._items = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        return self._held.pop() if self._held else next(self._items)

    def __len__(self) -> int:
        return len(self._sampler)

    def skip(self, count: int) -> None:
        # A sampler draws its order with its first item, so that is taken even for count = 0.
        self._held = list(islice(self._items, count, count + 1))


def further(loader: Loader, count: int) -> Iterator[Any]:
    """Return a loader's iterator without its first batches; it has drawn all that it will draw.

    Data is read for them only where it must be: by workers, whose random states depend on what they
    read, and by iterables, which cannot be asked for the rest alone.
    """
    if (
        isinstance(loader, DataLoader)
        and loader.num_workers == 0
        and not isinstance(loader.dataset, IterableDataset)
    ):
        which = "sampler" if loader.batch_sampler is None else "batch_sampler"
        later = _Later(getattr(loader, which))
        twin = copy.copy(loader)
        vars(twin)[which] = later  # DataLoader refuses assignment after __init__
        iterator = fetching.iterate(twin)
        later.skip(count)
        return iterator
    iterator = fetching.iterate(loader)
    found = sum(1 for _ in islice(iterator, count))
    if found < count:
        raise ArgumentError(
            f"the training loader ended after {found} batches, but the checkpoint was written "
            f"after {count}"
        )
    return iterator


def look_ahead(
    iterator: Iterator[Any], before: Callable[[], None] = lambda: None
) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, whether it is the last) of an iterator of unknown length.

    Args:
        before: called before each batch is read.
    """
    held: list[Any] = []
    before()
    for batch in iterator:
        if held:
            yield held.pop(), False
        held.append(batch)
        before()
    if held:
        yield held.pop(), True


def in_turn(loaders: Sequence[Loader], counts: Sequence[float]) -> Iterator[tuple[int, int, Any]]:
    """Return an iterator over one loader after another: (loader's index, batch's index, batch).

    Reads when Lightning does, so that loading may draw random numbers: the first loader's iterator
    is made at once, and where the number of batches is not known, one is read ahead, from now on
    and over the end of a loader.

    Args:
        counts: of each loader the batches to take at most; inf: not known.
    """
    first = fetching.iterate(loaders[0])

    def items() -> Iterator[tuple[int, int, Any]]:
        for index, (loader, count) in enumerate(zip(loaders, counts, strict=True)):
            iterator = fetching.iterate(loader) if index else first
            bounded = iterator if count == float("inf") else islice(iterator, int(count))
            for number, batch in enumerate(bounded):
                yield index, number, batch

    found, total = items(), sum(counts)
    if total != float("inf"):
        return islice(found, int(total))
    begun = chain(list(islice(found, 1)), found)
    return (item for item, _ in look_ahead(begun))


def move(batch: Any, device: torch.device) -> Any:
    """Return a batch with every tensor in it, at any depth, on `device`."""
    return apply(batch, mover(device))


def mover(device: torch.device) -> Callable[[Any], Any]:
    """Return what brings a part of a batch to `device`, for `apply`."""
    # Copies from pinned memory overlap on cuda; on mps they have been seen to race.
    non_blocking = device.type == "cuda"

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.device == device else value.to(device, non_blocking=non_blocking)
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return moved


def apply(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return a batch with what `function` makes of everything in it that is no container."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, tuple):
        made = [apply(value, function) for value in batch]
        return type(batch)(*made) if hasattr(batch, "_fields") else type(batch)(made)
    if isinstance(batch, list):
        return [
            function(value) if type(value) is Tensor else apply(value, function) for value in batch
        ]
    if isinstance(batch, dict):
        made_items = {key: apply(value, function) for key, value in batch.items()}
        if type(batch) is dict:
            return made_items
        kept = copy.copy(batch)  # an OrderedDict, a defaultdict, a BatchEncoding
        kept.update(made_items)
        return kept
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(twin, field.name, apply(getattr(batch, field.name), function))
        return twin
    return function(batch)
