"""What travels as an argument or a result, comes back equal, and what does not is named."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from gpulayer import values
from gpulayer.values import UnsendableError, pack, unpack


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool(np.array_equal(one, other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other) or (one != one and other != other)


def made(rng: random.Random, depth: int) -> Any:
    """Return a random value."""
    leaves = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.randint(-(2**70), 2**70),
        lambda: rng.randint(-300, 300),
        lambda: rng.uniform(-1e300, 1e300),
        lambda: complex(rng.random(), rng.random()),
        lambda: "".join(rng.choice("aé\0\n😀") for _ in range(rng.randrange(6))),
        lambda: rng.randbytes(rng.randrange(9)),
        lambda: torch.full((rng.randrange(3), 2), rng.random(), dtype=torch.float64),
        lambda: np.full((rng.randrange(3),), rng.randrange(9), dtype="<i2"),
    ]
    kind = rng.randrange(3 if depth else 1)
    if kind == 0:
        return rng.choice(leaves)()
    count = rng.randrange(4)
    if kind == 1:
        items = [made(rng, depth - 1) for _ in range(count)]
        return items if rng.random() < 0.5 else tuple(items)
    keys = [f"k{i}" if rng.random() < 0.7 else i for i in range(count)]
    return {key: made(rng, depth - 1) for key in keys}


@pytest.mark.parametrize("seed", range(200))
def test_random_values_come_back_equal(seed: int) -> None:
    value = made(random.Random(seed), 4)
    assert same(unpack(pack(value, "it")), value)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -0.0, {1, 2}, frozenset(["x"]), {(1, 2): [None]}, 2**64, -(2**63) - 1],
)
def test_what_msgpack_lacks_comes_back(value: Any) -> None:
    found = unpack(pack(value, "it"))
    assert type(found) is type(value)
    assert found == value or value != value
    assert math.copysign(1, found) == math.copysign(1, value) if value == 0.0 else True


@pytest.mark.parametrize("name", values._TORCH_TYPES)
def test_tensors_of_every_type_come_back(name: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    for one in (tensor, tensor.T, tensor[:, 1:], tensor[:0], tensor[0, 0]):
        found = unpack(pack(one, "it"))
        assert found.dtype == one.dtype
        assert found.shape == one.shape
        assert torch.equal(found, one)


def test_parameter_and_foreign_byte_order_and_scalars() -> None:
    found = unpack(pack(torch.nn.Parameter(torch.ones(2)), "it"))
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    big = np.arange(3, dtype=">i4")
    assert np.array_equal(unpack(pack(big, "it")), big)
    assert same(unpack(pack(np.float32(1.5), "it")), 1.5)
    assert same(unpack(pack(np.bool_(True), "it")), True)


def test_what_comes_back_can_be_changed() -> None:
    tensor, array = unpack(pack([torch.ones(2), np.ones(2)], "it"))
    tensor += 1
    array += 1
    assert tensor.tolist() == array.tolist() == [2.0, 2.0]


class Odd(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "argument 1 is a builtins.object"),
        ({"a": [1, print]}, r"argument 1\['a'\]\[1\] is a builtins.builtin_function"),
        (torch.nn.Linear(1, 1), "argument 1 is a torch.nn.modules.linear.Linear"),
        (Odd(), "argument 1 is a .*Odd, which cannot"),
        ({len: 1}, "a key of argument 1 is a"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (np.array(["x"]), "argument 1 is an array of <U1"),
        ("\ud800", "holds a surrogate"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, where: str) -> None:
    with pytest.raises(UnsendableError, match=where):
        pack(value, "argument 1")


def test_value_in_itself_and_value_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(UnsendableError, match="nested deeper than 100 levels, or in itself"):
        pack(ring, "it")
    monkeypatch.setattr(values, "VALUE_MAX", 10)
    with pytest.raises(UnsendableError, match="it is 12 bytes, more than 10"):
        pack(b"x" * 10, "it")


def extension(code: int, value: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack([1, 2], "it")[:-1],
        extension(99, [1]),
        extension(1, 7),
        extension(5, [1]),
        extension(6, [[1]]),
        extension(7, ["float32", [2], b"xxx"]),
        extension(7, ["storage", [0], b""]),
        extension(7, ["float32", [-1, -4], b"x" * 16]),
        extension(8, ["O", [1], b"x" * 8]),
        extension(8, ["<i4", ["x"], b"x" * 4]),
        extension(2, [[1]]),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(4, b"zz")),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(UnsendableError, match="no value"):
        unpack(data)
