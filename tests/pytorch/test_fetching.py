"""`fetching.iterate` against `iter`: batches, memory, errors and random draws, step by step."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from gpulayer.pytorch import Module, Trainer, data, fetching

ROWS = 11


def tensors() -> TensorDataset:
    return TensorDataset(torch.randn(ROWS, 3), torch.arange(ROWS))


def described(value: Any) -> Any:
    """Return everything about a batch that a step could depend on."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return value.layout, described(value.to_dense())
        raw = value.detach().resolve_conj().resolve_neg().contiguous().flatten()
        return (
            type(value), value.dtype, value.shape, value.stride(), value.storage_offset(),
            value.requires_grad, value.is_inference(), value._base is None,
            raw.view(torch.uint8).tolist(),
        )  # fmt: skip
    if isinstance(value, list | tuple):
        return type(value), [described(one) for one in value]
    if isinstance(value, dict):
        return type(value), [(key, described(one)) for key, one in value.items()]
    return type(value), value


def states() -> Any:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


def told(make: Callable[[], Any], iterate: Callable[[Any], Iterator[Any]]) -> list[Any]:
    """Return what an epoch of a loader shows, step by step; twice, to see what is left behind."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    found: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = make()
        for _ in range(2):
            try:
                iterator = iterate(loader)
                found.append(states())
                for batch in itertools.islice(iterator, 20):
                    found.append((described(batch), states()))
                found.append((next(iterator, "end"), states()))
            except Exception as error:
                found.append((type(error), str(error), states()))
            found.append([one.get_state().tolist() for one in data.generators(loader)])
    return [*found, [(one.category, str(one.message)) for one in caught]]


def same(make: Callable[[], Any]) -> list[Any]:
    expected = told(make, iter)
    assert told(make, fetching.iterate) == expected
    return expected


def whole(loader: Any) -> bool:
    """Return whether batches are fetched by indexing tensors."""
    return fetching._tensors_of(loader) is not None


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (2, 3), (1, 1, 1), (1, 4, 4), (3, 1, 1)])
def test_batch_of_any_type_and_shape_is_equal(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def make() -> Any:
        rows = (torch.randn(ROWS, *shape) * 3).to(dtype)
        return DataLoader(TensorDataset(rows), 4, shuffle=True)

    same(make)


def channels_last() -> TensorDataset:
    return TensorDataset(torch.randn(ROWS, 3, 4, 4).to(memory_format=torch.channels_last))


def requiring_grad() -> TensorDataset:
    return TensorDataset(torch.randn(ROWS, 3).requires_grad_())


class Own(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(1), *super().__getitem__(index)


class Marked(Tensor):
    pass


Pair = namedtuple("Pair", "left right")


class Various(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        drawn = [torch.rand(2), random.random(), np.random.rand()]
        return {"all": drawn, "pair": Pair(index, torch.tensor(index)), "name": str(index)}


class Together(Various):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, torch.rand(1)) for index in reversed(indices)]


def subset(indices: Any) -> Any:
    return Subset(tensors(), indices)


def nested() -> Any:
    first, _ = random_split(tensors(), [8, ROWS - 8])
    return random_split(first, [5, 3])[0]


DATA: dict[str, tuple[Callable[[], Any], bool]] = {
    # how it is made, whether its batches are fetched whole
    "tensors": (tensors, True),
    "one tensor": (lambda: TensorDataset(torch.randn(ROWS)), True),
    "parameter": (lambda: TensorDataset(torch.nn.Parameter(torch.ones(ROWS, 2))), True),
    "subset": (lambda: subset([4, 2, 2, 9, 0]), True),
    "subset of a range": (lambda: subset(range(3, 9)), True),
    "subset of an array": (lambda: subset(np.array([4, 2, 9])), True),
    "subset of a tensor": (lambda: subset(torch.tensor([4, 2, 9])), True),
    "subset of negatives": (lambda: subset([-1, 2, -3]), True),
    "subset with bools": (lambda: subset([True, 2, False]), True),
    "subset out of range": (lambda: subset([1, 2, ROWS]), True),
    "random split": (lambda: random_split(tensors(), [0.5, 0.5])[1], True),
    "nested subsets": (nested, True),
    "no rows": (lambda: TensorDataset(torch.empty(0, 3)), True),
    "transposed": (lambda: TensorDataset(torch.randn(3, ROWS).T), True),
    "expanded": (lambda: TensorDataset(torch.randn(1, 3).expand(ROWS, 3)), True),
    "channels last": (channels_last, True),
    "requiring grad": (requiring_grad, True),
    "conjugate": (lambda: TensorDataset(torch.randn(ROWS, 3, dtype=torch.complex64).conj()), True),
    "sparse": (lambda: TensorDataset(torch.eye(ROWS).to_sparse()), True),
    "tensor subclass": (lambda: TensorDataset(torch.randn(ROWS, 3).as_subclass(Marked)), True),
    "subclass": (lambda: Own(torch.randn(ROWS, 3)), False),
    "subset of a subclass": (lambda: Subset(Own(torch.randn(ROWS, 3)), [1, 2, 5]), False),
    "anything": (Various, False),
    "anything in batches": (Together, False),
}


OPTIONS: list[dict[str, Any]] = [
    {"batch_size": 4},
    {"batch_size": 4, "shuffle": True},
    {"batch_size": 4, "shuffle": True, "drop_last": True},
    {"batch_size": 2, "pin_memory": True},
    {"batch_size": None},
    {"batch_size": 100},
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (name, options)
        for name in DATA
        for options in OPTIONS
        if not (options.get("shuffle") and name == "no rows")  # torch refuses to draw from nothing
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_batches_of_any_data_are_equal(name: str, options: dict[str, Any]) -> None:
    make, expected = DATA[name]
    same(lambda: DataLoader(make(), **options))
    assert whole(DataLoader(make(), **options)) == (expected and options["batch_size"] is not None)


class Listed(list[Any]):
    """A batch sampler from a list."""


SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "generator": lambda _: {
        "shuffle": True, "batch_size": 3, "generator": torch.Generator().manual_seed(4),
    },
    "weighted": lambda d: {"sampler": WeightedRandomSampler([1.0] * ROWS, 20), "batch_size": 3},
    "with replacement": lambda d: {
        "sampler": RandomSampler(d, replacement=True, num_samples=20), "batch_size": 3,
    },
    "random subset": lambda d: {"sampler": SubsetRandomSampler([3, 1, 8]), "batch_size": 2},
    "tensors": lambda d: {"sampler": list(torch.arange(ROWS)), "batch_size": 2},
    "arrays": lambda d: {"sampler": list(np.arange(ROWS)), "batch_size": 2},
    "bytes": lambda d: {"sampler": list(np.arange(ROWS, dtype=np.uint8)), "batch_size": 2},
    "negatives": lambda d: {"sampler": [-1, -2, 3], "batch_size": 2},
    "bools": lambda d: {"sampler": [True, False, 1], "batch_size": 2},
    "floats": lambda d: {"sampler": [1.0, 2.0], "batch_size": 2},
    "slices": lambda d: {"sampler": [slice(0, 3), slice(3, 6)], "batch_size": 1},
    "too large": lambda d: {"sampler": [1, 2, 3, ROWS], "batch_size": 3},
    "far too large": lambda d: {"sampler": [1, 2, 3, 2**70], "batch_size": 3},
    "batches": lambda d: {"batch_sampler": Listed([[1, 2], [5], [3, 4, 5, 6]])},
    "an empty batch": lambda d: {"batch_sampler": Listed([[1, 2], [], [3]])},
    "tuples": lambda d: {"batch_sampler": Listed([(1, 2), (3, 4)])},
    "a tensor": lambda d: {"batch_sampler": Listed([torch.arange(3), torch.arange(2)])},
    "one-way": lambda d: {"batch_sampler": Listed([iter([1, 2]), iter([3])])},
    "batch sampler": lambda d: {"batch_sampler": BatchSampler(RandomSampler(d), 4, True)},
    "collate": lambda d: {"collate_fn": lambda rows: rows, "batch_size": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("kind", ["tensors", "subset", "anything"])
@pytest.mark.filterwarnings("ignore")
def test_batches_of_any_sampler_are_equal(name: str, kind: str) -> None:
    def make() -> Any:
        data = DATA[kind][0]()
        return DataLoader(data, **SAMPLERS[name](data))

    same(make)


class Stream(IterableDataset[Any]):
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def __iter__(self) -> Iterator[Any]:
        yield torch.rand(2), random.random()  # as the iterator is asked, not as it is made
        for number in range(3):
            yield torch.full((2,), number), np.random.rand()
        if self.fails:
            raise KeyError("no more")


class Drawing(Stream):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.rand(2), 1)] * 3)


@pytest.mark.parametrize("size", [None, 2, 3])
@pytest.mark.parametrize("make", [Stream, Drawing, lambda: Stream(fails=True)])
@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"collate_fn": repr}], ids=str)
def test_stream_is_equal(size: Any, make: Any, options: dict[str, Any]) -> None:
    same(lambda: DataLoader(make(), size, **options))


def test_end_of_a_stream_inside_a_data_set_ends_the_epoch_as_before() -> None:
    class Ends(Various):
        def __getitem__(self, index: int) -> Any:
            if index > 4:
                raise StopIteration
            return index

    same(lambda: DataLoader(Ends(), 2))


@pytest.mark.parametrize("kind", ["subclass", "workers", "list", "generator"])
def test_other_loaders_are_left_to_themselves(kind: str) -> None:
    class Sub(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(["mine"])

    if kind == "subclass":
        assert list(fetching.iterate(Sub(tensors()))) == ["mine"]
    elif kind == "workers":
        loader = DataLoader(tensors(), 4, num_workers=1)
        assert type(fetching.iterate(loader)) is type(iter(loader))
    elif kind == "list":
        assert list(fetching.iterate([1, 2])) == [1, 2]
    else:
        made = (i for i in range(2))
        assert fetching.iterate(made) is made


def test_timeout_is_refused_as_before() -> None:
    same(lambda: DataLoader(tensors(), 4, timeout=1.0))


def test_changed_collate_of_torch_is_used() -> None:
    loader = DataLoader(tensors(), 4)
    assert whole(loader)
    before = dict(default_collate_fn_map)

    def doubled(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return torch.stack(batch) * 2

    try:
        default_collate_fn_map[Tensor] = doubled
        assert not whole(loader)
        same(lambda: DataLoader(tensors(), 4))
        default_collate_fn_map.update(before)
        default_collate_fn_map[tuple] = lambda batch, *, collate_fn_map=None: batch
        assert not whole(loader)
        same(lambda: DataLoader(tensors(), 4))
    finally:
        default_collate_fn_map.clear()
        default_collate_fn_map.update(before)
    assert whole(loader)


def test_batch_shares_no_memory_with_the_data_nor_with_other_batches() -> None:
    source = TensorDataset(torch.zeros(ROWS, 2))
    loader = DataLoader(source, 4)
    for batch, *_ in fetching.iterate(loader):
        assert bool((batch == 0).all())
        batch += 1
    assert bool((source.tensors[0] == 0).all())


def test_tensors_and_indices_that_change_within_an_epoch_are_seen() -> None:
    def changed(iterate: Any) -> list[Any]:
        inner = tensors()
        source = Subset(inner, list(range(ROWS)))
        found = []
        for batch in iterate(DataLoader(source, 4)):
            found.append(described(batch))
            source.indices.reverse()
            inner.tensors = (torch.randn(3, ROWS).T, torch.ones(ROWS))
            torch.manual_seed(3)
        return found

    torch.manual_seed(3)
    expected = changed(iter)
    torch.manual_seed(3)
    assert changed(fetching.iterate) == expected


def test_inference_mode_makes_inference_tensors() -> None:
    with torch.inference_mode():
        expected = same(lambda: DataLoader(tensors(), 4))
    assert expected


def test_order_of_calls_of_a_sampler_and_the_seed_is_kept() -> None:
    class Watched:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            seen.append(torch.get_rng_state().tolist())
            return iter([int(torch.randint(ROWS, ())) for _ in range(3)])

    seen: list[Any] = []
    same(lambda: DataLoader(tensors(), 2, sampler=Watched()))
    assert len(seen) == 4
    assert seen[:2] == seen[2:]


# -- in a Trainer ---------------------------------------------------------------------------------


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(described(batch))
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(described(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_fit_is_the_one_that_torchs_iterator_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        torch.manual_seed(1)
        train, val = random_split(TensorDataset(torch.randn(40, 3), torch.arange(40)), [30, 10])
        model = Net()
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False,
        )  # fmt: skip
        loader = DataLoader(val, 3)
        trainer.fit(model, DataLoader(train, 4, shuffle=True), loader)
        predicted = trainer.predict(model, loader)
        weights = [described(value) for value in model.parameters()]
        return weights, model.seen, described(predicted), torch.get_rng_state().tolist()

    found = run()
    assert len(found[1]) == 3 * (8 + 4) + 2
    monkeypatch.setattr(fetching, "iterate", iter)
    assert run() == found


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_of_ranks_are_equal(pad: bool, shuffle: bool) -> None:
    for rank in range(3):

        def make(rank: int = rank) -> Any:
            loader = DataLoader(subset(list(range(ROWS))), 2, shuffle=True)
            loader = data.shard(loader, rank, 3, shuffle=shuffle, pad=pad, seed=1)
            data.set_epoch(loader, 2)
            return loader

        same(make)
        assert whole(make())


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_rest_of_an_epoch_is_equal(count: int) -> None:
    def rest(loader: Any) -> Iterator[Any]:
        return data.further(loader, count)

    def make() -> Any:
        return DataLoader(tensors(), 2, shuffle=True)

    def expected() -> list[Any]:
        return [described(batch) for batch in itertools.islice(iter(make()), count, None)]

    torch.manual_seed(1)
    batches = expected()
    torch.manual_seed(1)
    assert [described(batch) for batch in rest(make())] == batches
