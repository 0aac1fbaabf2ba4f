"""Batches of a `DataLoader` that works in this process, in less time than torch's iterator takes.

Equal to `iter(loader)` in what is yielded, raised and drawn at random, and in when that happens.
Two things are left out: a Python loop over the samples of a `TensorDataset` (one indexing per
tensor gives the same batch), and torch's frames around each batch, a profiler range among them.
What is not certainly equal goes to torch: subclasses of DataLoader, workers, data pipes, chunks of
an iterable data set. Knows nothing of ranks and epochs.
"""

from __future__ import annotations

import copy
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map


def iterate(loader: Iterable[Any]) -> Iterator[Any]:
    """Return what `iter(loader)` returns, or an iterator equal to it."""
    if not _plain(loader):
        return iter(loader)
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        if batches is not None or loader.pin_memory:
            return iter(loader)
        _draw_seed(loader)
        # torch counts batches to warn of more than the data set's length; no loop asks for more.
        return map(loader.collate_fn, iter(loader.dataset))
    tensors = _tensors_of(loader)
    if loader.pin_memory:
        return iter(loader if tensors is None else _over(loader, tensors))
    indices = iter(loader.sampler if batches is None else batches)
    _draw_seed(loader)
    return map(tensors.batch if tensors is not None else _fetch(loader), indices)


def _plain(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Return whether torch's own single-process iterator would be used, and nothing else."""
    return (
        type(loader) is DataLoader
        and loader.num_workers == 0
        and loader.timeout == 0  # torch refuses another
        and "_get_iterator" not in vars(loader)
        and not isinstance(loader.dataset, IterDataPipe | MapDataPipe)
    )


def _draw_seed(loader: DataLoader[Any]) -> None:
    # What torch draws for workers when it makes any iterator, in the same way.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def _fetch(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """Return the function from what a sampler yields to a batch."""
    data, collate = loader.dataset, loader.collate_fn
    if loader.batch_sampler is None:
        return lambda index: collate(data[index])
    together = getattr(data, "__getitems__", None)
    if together:
        return lambda indices: collate(together(indices))
    return lambda indices: collate([data[index] for index in indices])


def _integers() -> frozenset[type]:
    """Return what samplers and subsets yield as row numbers; other types may not (True)."""
    numpy = sys.modules.get("numpy")  # where nobody has imported it, there are no such numbers
    return frozenset((int,) if numpy is None else (int, numpy.int64, numpy.int32))


class _Tensors:
    """A `TensorDataset`, or a subset of one, that gives whole batches as `default_collate` would.

    Args:
        levels: the indices of the subsets, the outermost first.
    """

    def __init__(self, data: Any, source: TensorDataset, levels: list[Any]) -> None:
        self._data = data
        self._source = source
        self._levels = levels
        self._integers = _integers()
        self._checked: tuple[Tensor, ...] | None = None

    def batch(self, indices: Any) -> Any:
        """Return the samples with these indices, stacked: one new tensor for each of the set."""
        if type(indices) is list and indices:
            try:
                rows = indices
                for level in self._levels:
                    rows = [level[index] for index in rows]
                if self._integers.issuperset(map(type, rows)) and self._stackable():
                    where = torch.frombuffer(array("q", rows), dtype=torch.int64)
                    return [tensor.index_select(0, where) for tensor in self._source.tensors]
            except Exception:
                pass  # negative or impossible indices: below is right, or raises as torch does
        data = self._data
        if hasattr(data, "__getitems__"):
            return default_collate(data.__getitems__(indices))
        return default_collate([data[index] for index in indices])

    def _stackable(self) -> bool:
        """Return whether rows of all tensors may be taken in this way."""
        tensors = self._source.tensors
        if tensors is not self._checked and all(map(_stackable, tensors)):
            self._checked = tensors
        return tensors is self._checked


def _stackable(tensor: Tensor) -> bool:
    """Return whether selected rows equal stacked ones in everything, strides included."""
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
    )


def _tensors_of(loader: DataLoader[Any]) -> _Tensors | None:
    """Return the data set of a loader if its batches can be fetched whole."""
    if (
        loader.batch_sampler is None
        or loader.collate_fn is not default_collate
        or default_collate_fn_map.get(Tensor) is not collate_tensor_fn
        or any(issubclass(tuple, kind) for kind in default_collate_fn_map)
    ):
        return None
    levels, source = [], loader.dataset
    while type(source) is Subset and not _changed(source):
        levels.append(source.indices)
        source = source.dataset
    if type(source) is not TensorDataset or _changed(source):
        return None
    return _Tensors(loader.dataset, source, levels)


def _changed(data: Any) -> bool:
    return any(name.startswith("__get") for name in vars(data))


def _over(loader: DataLoader[Any], tensors: _Tensors) -> DataLoader[Any]:
    """Return a loader that fetches whole batches and leaves the rest to torch, pinning above all.

    Copied, not built anew, as in `data.shard`; its parts are the same objects.
    """
    twin = copy.copy(loader)
    vars(twin).update(dataset=_Whole(tensors), collate_fn=_as_is)
    return twin


class _Whole:
    """A data set whose `__getitems__` gives batches instead of lists of samples."""

    def __init__(self, tensors: _Tensors) -> None:
        self.__getitems__ = tensors.batch


def _as_is(batch: Any) -> Any:
    return batch
