"""Arguments and results of functions that run elsewhere, as bytes: plain data and tensors.

The format is msgpack; what it lacks (tuples, sets, large and complex numbers, dicts with other keys
than text, tensors, arrays) is an extension of ours. Reading it runs no code: there is no pickle,
and a type that is not listed here cannot come out. Torch and numpy are imported only for values of
theirs. Does not know what the values are for.
"""

from __future__ import annotations

import math
import sys
from enum import IntEnum
from typing import Any

import msgspec
from gpulayer_mesh.errors import ConfigError

VALUE_MAX = 1024 * 1024 * 1024  # bytes, packed; larger things are files
DEPTH_MAX = 100
_NUMPY_KINDS = "biufc"  # bool, integers, floats, complex
_TORCH_TYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128",
)  # fmt: skip


class Code(IntEnum):
    """Of an extension; part of the format."""

    TUPLE = 1
    SET = 2
    FROZENSET = 3
    INT = 4
    COMPLEX = 5
    DICT = 6
    TENSOR = 7
    ARRAY = 8


_SEQUENCES: dict[type, Code] = {tuple: Code.TUPLE, set: Code.SET, frozenset: Code.FROZENSET}


class UnsendableError(ConfigError):
    """A value cannot travel; says where in it, and what can."""


def pack(value: Any, what: str) -> bytes:
    """Return a value as bytes.

    Args:
        what: its name in messages: "argument 1", "the result".

    Raises:
        UnsendableError: something in it is neither plain data nor a tensor, or it is too large.
    """
    data = msgspec.msgpack.encode(_plain(value, what, 0))
    if len(data) > VALUE_MAX:
        raise UnsendableError(
            f"{what} is {len(data)} bytes, more than {VALUE_MAX}",
            hint="write it to a file: files in the folder are shipped, those in $GPULAYER_OUT "
            "come home",
        )
    return data


def unpack(data: bytes) -> Any:
    """Return what `pack` was given; tensors are on the CPU.

    Raises:
        UnsendableError: the bytes are no value.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_extension, strict=True)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise UnsendableError(f"these bytes are no value: {error}") from error


def _plain(value: Any, what: str, depth: int) -> Any:
    """Return a value in types that msgpack has."""
    if depth > DEPTH_MAX:
        raise UnsendableError(f"{what} is nested deeper than {DEPTH_MAX} levels, or in itself")
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UnsendableError(f"{what} holds a surrogate: {value!r:.80}") from None
        return value
    if kind is int:
        if -(2**63) <= value < 2**64:
            return value
        return msgspec.msgpack.Ext(int(Code.INT), f"{value:x}".encode())
    if kind is complex:
        return _extended(Code.COMPLEX, [value.real, value.imag])
    if kind is list:
        return [_plain(item, f"{what}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind in _SEQUENCES:
        items = [_plain(item, f"{what}[{i}]", depth + 1) for i, item in enumerate(value)]
        return _extended(_SEQUENCES[kind], items)
    if kind is dict:
        pairs = []
        for key, item in value.items():
            packed = _plain(key, f"a key of {what}", depth + 1)
            pairs.append((packed, _plain(item, f"{what}[{key!r:.40}]", depth + 1)))
        if all(type(key) is str for key in value):
            return dict(pairs)
        return _extended(Code.DICT, pairs)
    return _of_library(value, what)


def _of_library(value: Any, what: str) -> Any:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        name = str(value.dtype).removeprefix("torch.")
        if name in _TORCH_TYPES and value.layout is torch.strided:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return _extended(Code.TENSOR, [name, list(value.shape), flat.numpy().tobytes()])
        raise UnsendableError(f"{what} is a tensor of {value.dtype}, {value.layout}: cannot travel")
    if numpy is not None and isinstance(value, numpy.number | numpy.bool_):
        return _plain(value.item(), what, 0)  # the number it is
    if numpy is not None and type(value) is numpy.ndarray:
        if value.dtype.kind in _NUMPY_KINDS:
            kind = value.dtype.newbyteorder("<").str
            raw = numpy.ascontiguousarray(value, dtype=kind).tobytes()
            return _extended(Code.ARRAY, [kind, list(value.shape), raw])
        raise UnsendableError(f"{what} is an array of {value.dtype}: cannot travel")
    raise UnsendableError(
        f"{what} is a {type(value).__module__}.{type(value).__qualname__}, which cannot travel",
        hint="None, numbers, text, bytes, tensors, arrays, and lists, tuples, sets and dicts of "
        "them can; of a module, send state_dict()",
    )


def _extended(code: Code, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(int(code), msgspec.msgpack.encode(value))


def _extension(code: int, data: memoryview) -> Any:
    if code == Code.INT:
        return int(bytes(data), 16)
    value = msgspec.msgpack.decode(data, ext_hook=_extension)
    if not isinstance(value, list):
        raise ValueError(f"extension {code} holds no list")
    match code:
        case Code.TUPLE:
            return tuple(value)
        case Code.SET:
            return set(value)
        case Code.FROZENSET:
            return frozenset(value)
        case Code.COMPLEX:
            real, imaginary = value
            return complex(real, imaginary)
        case Code.DICT:
            return dict(value)
        case Code.TENSOR:
            return _tensor(*value)
        case Code.ARRAY:
            return _array(*value)
    raise ValueError(f"unknown extension {code}")


def _tensor(name: str, shape: list[int], raw: bytes) -> Any:
    import torch

    if name not in _TORCH_TYPES:
        raise ValueError(f"unknown type {name!r}")
    kind = getattr(torch, name)
    _check_size(shape, kind.itemsize, raw)
    if not raw:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(shape)


def _array(name: str, shape: list[int], raw: bytes) -> Any:
    import numpy

    kind = numpy.dtype(name)
    if kind.kind not in _NUMPY_KINDS:
        raise ValueError(f"unknown type {name!r}")
    _check_size(shape, kind.itemsize, raw)
    return numpy.frombuffer(raw, dtype=kind).reshape(shape).copy()


def _check_size(shape: list[int], itemsize: int, raw: bytes) -> None:
    if any(type(size) is not int or size < 0 for size in shape) or len(shape) > 64:
        raise ValueError(f"{shape!r:.80} is no shape")
    if math.prod(shape) * itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes do not fill the shape {shape}")
