"""Hyperparameters: the arguments a module was made with, kept in it, in checkpoints and the log.

`save_hyperparameters` reads them from the frames of the module's `__init__`s. A checkpoint holds
those that can be read back without running code, and the names of the others; `hparams.yaml` holds
all of them, where need be as text. Does not know when either is written, nor by whom.
"""

from __future__ import annotations

import copy
import inspect
import io
import re
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from gpulayer import env as environment
from gpulayer.pytorch.arguments import ArgumentError

if TYPE_CHECKING:
    from gpulayer.pytorch.module import Module

VALUES = "hyper_parameters"  # keys of a checkpoint; the first two are Lightning's
NAME = "hparams_name"
LEFT_OUT = "hparams_left_out"
FILE = "hparams.yaml"
_ANY = "kwargs"  # what `hparams_name` says when the values are separate arguments


class AttributeDict(dict[str, Any]):
    """A dictionary whose keys can be read and written as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(map(str, self))
            raise AttributeError(f"there is no {name!r}; known: {known}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __repr__(self) -> str:
        width = max((len(str(name)) for name in self), default=0) + 3
        rows = [(f'"{name}":', self[name]) for name in sorted(self, key=str)]
        return "\n".join(f"{label:{width}} {value}" for label, value in rows)


# -- in the module --------------------------------------------------------------------------------


def save(
    module: Module, given: tuple[Any, ...], ignore: Iterable[str] | str | None, frame: FrameType
) -> None:
    """Add to the module's hyperparameters, see `Module.save_hyperparameters`."""
    if len(given) == 1 and not given[0]:
        return
    ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
    init = {k: v for k, v in _init_arguments(module, frame).items() if k not in ignored}
    found: Mapping[str, Any]
    objects = [one for one in given if not isinstance(one, str)]
    if not given:
        found, name = init, _ANY if init else None
    elif len(objects) == 1:
        found, name = _mapping(objects[0]), _named(objects[0], init)
    elif not objects:
        unknown = [one for one in given if one not in init]
        if unknown:
            raise ArgumentError(
                f"{type(module).__name__} is made without an argument {unknown[0]!r}",
                hint=f"known: {', '.join(init)}",
            )
        found, name = {one: init[one] for one in given}, _ANY
    else:
        raise ArgumentError(
            f"save_hyperparameters takes names, or one dict or Namespace, not {len(objects)} "
            "objects",
            hint='save_hyperparameters("width", "depth") takes two arguments of __init__',
        )
    module._hparams_name = name
    module.hparams.update(found)
    for one in ignored:
        module.hparams.pop(one, None)
    module._hparams_initial = copied(module.hparams)
    _, absent = storable({k: v for k, v in module.hparams.items() if k in found})
    place = environment.rank_env()
    if absent and (place is None or place.rank == 0):
        warnings.warn(
            f"checkpoints will not hold the hyperparameters {absent}: they could not be read back "
            "without running code; load_from_checkpoint must be given them, and "
            f"save_hyperparameters(ignore={absent}) silences this",
            stacklevel=3,
        )


def _init_arguments(module: Module, frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments of the `__init__`s of this object that are running, outer ones last."""
    if is_dataclass(module):
        return {one.name: getattr(module, one.name) for one in fields(module) if one.init}
    found: dict[str, Any] = {}
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            names, _, keywords, values = inspect.getargvalues(frame)
            if names and values.get(names[0]) is module:
                found.update({name: values[name] for name in names[1:] if name in values})
                found.update(values.get(keywords, {}) if keywords else {})
        frame = frame.f_back
    return found


def _mapping(given: Any) -> Mapping[str, Any]:
    if isinstance(given, Namespace):
        return vars(given)
    if isinstance(given, Mapping):
        return given
    raise ArgumentError(
        f"hyperparameters are a dict or a Namespace, not a {type(given).__name__}",
        hint='save_hyperparameters("NAME") takes an argument of __init__ by its name',
    )


def _named(given: Any, init: Mapping[str, Any]) -> str | None:
    """Return which argument an object came as."""
    same = (k for k, v in init.items() if v is given or (type(v) is type(given) and v == given))
    return next(same, None)


def copied(values: Mapping[str, Any]) -> AttributeDict:
    """Return a deep copy; what cannot be copied is shared."""
    found = AttributeDict()
    for name, value in values.items():
        try:
            found[name] = copy.deepcopy(value)
        except Exception:  # a lock, an open file: of any type
            found[name] = value
    return found


# -- in a checkpoint ------------------------------------------------------------------------------


def storable(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what a checkpoint can hold, and the names of the rest."""
    plain = {name: _plain(value) for name, value in values.items()}
    if readable(plain):
        return plain, []
    kept = {name: value for name, value in plain.items() if readable(value)}
    return kept, [name for name in plain if name not in kept]


def readable(value: Any) -> bool:
    """Return whether a value can be written and read back without running code."""
    packed = io.BytesIO()
    try:
        torch.save(value, packed)
        packed.seek(0)
        torch.load(packed, map_location="cpu", weights_only=True)
    except Exception:  # what pickling an object may raise is up to the object
        return False
    return True


def _plain(value: Any) -> Any:
    """Turn our dictionaries and numpy's numbers into Python's."""
    value = _item(value)
    if type(value) in (dict, AttributeDict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _item(value: Any) -> Any:
    """Return a number of numpy as Python's; there is none where nobody has imported numpy."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def dump(module: Module, checkpoint: dict[str, Any]) -> None:
    """Add the module's hyperparameters, if any, to a checkpoint."""
    if not module.hparams:
        return
    checkpoint[NAME] = module._hparams_name
    checkpoint[VALUES], absent = storable(module.hparams)
    if absent:
        checkpoint[LEFT_OUT] = absent


def init_arguments(
    kind: type[Module], checkpoint: dict[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a module is made with: stored hyperparameters, overridden by `given`.

    Raises:
        ArgumentError: the checkpoint could not hold one, and it is not given.
    """
    stored = AttributeDict(checkpoint.get(VALUES, {}), **given)
    checkpoint[VALUES] = dict(stored)
    parameters = list(inspect.signature(kind).parameters.values())
    names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    one = checkpoint.get(NAME)
    in_one = one in names  # all of them are one argument, a dict
    for name in checkpoint.get(LEFT_OUT, ()):
        if name not in given and (in_one or takes_all or name in names):
            raise ArgumentError(
                f"the checkpoint could not hold the hyperparameter {name!r}",
                hint=f"load_from_checkpoint(PATH, {name}=...)",
            )
    found = {**({str(one): stored} if in_one else stored), **given}
    if takes_all:
        return found
    unknown = [name for name in given if name not in names and not in_one]
    if unknown:
        warnings.warn(
            f"{kind.__name__} takes no arguments {unknown}: they change nothing", stacklevel=3
        )
    return {name: value for name, value in found.items() if name in names}


# -- in the log -----------------------------------------------------------------------------------

# Words that YAML 1.1 takes for something else than a text.
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


def yaml(values: Mapping[str, Any]) -> str:
    """Return hyperparameters as YAML, one a line; what is no plain data stands there as text."""
    return "".join(f"{_key(name)}: {_yaml(values[name])}\n" for name in sorted(values, key=str))


def _key(name: Any) -> str:
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        return name if name.lower() not in _WORDS else f'"{name}"'
    return _yaml(name) if isinstance(name, str | int | float | None) else _text(repr(name))


def _yaml(value: Any) -> str:
    value = _item(value)
    if value is None:
        return "null"
    if isinstance(value, Enum):  # first: it may be a number or a text as well
        return _text(repr(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)}: {_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return _text(value if isinstance(value, str) else repr(value))


def _number(value: float) -> str:
    text = float.__repr__(value)
    if text.lstrip("-") in ("inf", "nan"):
        return text.replace("inf", ".inf").replace("nan", ".nan")
    # YAML 1.1 takes 1e-05 for a text
    return text if "." in text else text.replace("e", ".0e")


def _text(value: str) -> str:
    """Return a text in double quotes; only printable characters stand for themselves."""
    return '"' + "".join(map(_character, value)) + '"'


def _character(one: str) -> str:
    if one in _ESCAPES:
        return _ESCAPES[one]
    return one if one.isprintable() else f"\\U{ord(one):08x}"
