"""What a Trainer call leaves behind, as files: weights, metrics, counters.

Each call of a script has an index. When a call runs elsewhere, the ranks execute the script again:
calls before it return their recorded result, and its own result comes home and is loaded into the
caller's objects. A result is `weights.safetensors` and `result.json`; floats are written in hex, so
nothing changes on the way; `returned.pt` (what the call returned, states of callbacks) is read with
`weights_only`. Knows nothing of loops, jobs or networks.
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpulayer_mesh.files import replace_file
from torch import Tensor, nn

from gpulayer.pytorch.arguments import ArgumentError

if TYPE_CHECKING:
    from gpulayer.pytorch.trainer import Trainer

REPLAY = ".gpulayer-replay"  # in the bundle: results of earlier calls
REPLAY_VARIABLE = "GPULAYER_REPLAY"
WEIGHTS = "weights.safetensors"
RETURNED = "returned.pt"
DOCUMENT = "result.json"
_FORMAT = 2
# Results of calls in this process are kept in case a later call runs elsewhere; above this they
# would cost too much memory for what is rarely used.
KEPT_BYTES = 256 * 2**20

_indices = itertools.count()
# Results of the calls this process has made: in memory, or where the job's files came to.
# A text says why one was not kept.
_made: dict[int, Result | Path | str] = {}


@dataclass(slots=True)
class Result:
    """Tensors by name, and everything else as plain data."""

    tensors: dict[str, Tensor]
    document: dict[str, Any] = field(default_factory=dict)
    returned: Any = None  # what the call returned: tensors and plain data
    callbacks: dict[str, Any] = field(default_factory=dict)  # their states


def next_index() -> int:
    """Return the index of a Trainer call that begins now."""
    return next(_indices)


def check_recordable(module: nn.Module) -> None:
    """Raise before hours of training where the weights could not be brought home."""
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            if value.is_sparse or value.is_quantized or value.dtype == torch.complex128:
                raise ArgumentError(
                    f"{name!r} ({value.dtype}, {value.layout}) cannot be brought back from a job"
                )
        else:
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise ArgumentError(
                    f"the state {name!r} is a {type(value).__name__}; only tensors and plain data "
                    "are brought back from a job",
                    hint="let get_extra_state return numbers, strings, lists, dicts or tensors",
                ) from None


def check_plain(value: Any, what: str) -> None:
    """Raise where a value could not be read back without running code: `weights_only`."""
    if isinstance(value, Mapping) and type(value) in (dict, OrderedDict):
        for key, item in value.items():
            check_plain(key, what)
            check_plain(item, what)
    elif type(value) in (list, tuple):
        for item in value:
            check_plain(item, what)
    elif not isinstance(value, Tensor) and type(value) not in (
        str, bytes, int, float, bool, complex, type(None),
    ):  # fmt: skip
        raise ArgumentError(
            f"{what} a {type(value).__name__}, which cannot be brought back from a job",
            hint="tensors, numbers, strings, and lists, tuples and dicts of them can",
        )


def capture(
    trainer: Trainer, module: nn.Module, returned: Any = None, *, copy: bool = False
) -> Result:
    """Return the state of a finished call; tied weights are taken once."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    plain: dict[str, Any] = {}
    seen: dict[Any, str] = {}
    state = dict(module.state_dict())
    buffers = []
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name not in state:  # not persistent, yet a fit in this process would have changed it
            buffers.append(name)
            state[name] = buffer
    for name, value in state.items():
        if not isinstance(value, Tensor):
            plain[name] = value
            continue
        value = value.detach()
        place = (value.device, value.dtype, value.data_ptr(), value.shape, value.stride())
        if value.numel() and place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        value = value.cpu().contiguous()
        # A file holds no two tensors that share memory, and memory must not follow the model.
        tensors[name] = value.clone() if copy or _shares(value, tensors) else value
    document = {
        "format": _FORMAT,
        "aliases": aliases,
        "buffers": buffers,
        "plain": plain,
        "counters": trainer._counters(),
        "callback_metrics": _hex(trainer.callback_metrics),
        "logged_metrics": _hex(trainer.logged_metrics),
        "progress_bar_metrics": _hex(trainer.progress_bar_metrics),
    }
    return Result(tensors, document, returned, trainer._callback_states())


def _shares(value: Tensor, others: Mapping[str, Tensor]) -> bool:
    storage = value.untyped_storage().data_ptr()
    return storage != 0 and any(o.untyped_storage().data_ptr() == storage for o in others.values())


def write(result: Result, folder: Path) -> None:
    """Write a result; the document comes last, so a folder with one is complete."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(result.tensors, folder / WEIGHTS)
    _save((result.returned, result.callbacks), folder / RETURNED)
    replace_file(folder / DOCUMENT, json.dumps(result.document).encode())


def read(folder: Path) -> Result:
    """Read a result.

    Raises:
        ArgumentError: there is none, or it was written by another version.
    """
    from safetensors.torch import load_file

    path = folder / DOCUMENT
    if not path.is_file():
        raise ArgumentError(
            f"the ranks ended without a result in {folder}",
            hint="the script must reach the same Trainer calls in the same order on every rank",
        )
    document = json.loads(path.read_text())
    if document.get("format") != _FORMAT:
        raise ArgumentError(f"{path} has format {document.get('format')!r}, not {_FORMAT}")
    returned, callbacks = _load(folder / RETURNED)
    return Result(load_file(folder / WEIGHTS), document, returned, callbacks)


def write_share(returned: Any, folder: Path) -> None:
    """Write what another rank than 0 returned, or what all did together."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RETURNED
    callbacks = _load(path)[1] if path.exists() else {}
    _save((returned, callbacks), path)


def write_callbacks(states: Mapping[str, Any], folder: Path) -> None:
    """Replace the states of callbacks in a result that came home."""
    path = folder / RETURNED
    _save((_load(path)[0], dict(states)), path)


def read_share(folder: Path) -> Any:
    """Read what `write_share` wrote."""
    return _load(folder / RETURNED)[0]


def _save(value: Any, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(value, temporary)
    temporary.replace(path)


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=True, map_location="cpu")


def restore(result: Result, trainer: Trainer, module: nn.Module) -> None:
    """Load a result into the caller's own objects, bit for bit."""
    document = result.document
    state: dict[str, Any] = dict(result.tensors)
    for name, original in document["aliases"].items():
        state[name] = result.tensors[original]
    for name in document["buffers"]:
        set_buffer(module, name, state.pop(name))
    module.load_state_dict({**state, **document["plain"]}, strict=True)
    trainer._restore(
        document["counters"],
        _unhex(document["callback_metrics"]),
        _unhex(document["logged_metrics"]),
        _unhex(document["progress_bar_metrics"]),
        result.callbacks,
    )


def set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a module's buffer a value, in place if it fits."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    present = getattr(owner, last, None)
    if isinstance(present, Tensor) and present.shape == value.shape:
        present.copy_(value)
    else:
        setattr(owner, last, value if present is None else value.to(present.device))


def _hex(metrics: Mapping[str, Tensor]) -> dict[str, list[str]]:
    return {
        name: [str(value.dtype).removeprefix("torch."), float(value).hex()]
        for name, value in metrics.items()
    }


def _unhex(written: Mapping[str, list[str]]) -> dict[str, Tensor]:
    kinds = {"float32": torch.float32, "float64": torch.float64}
    return {
        name: torch.tensor(float.fromhex(text), dtype=kinds[kind])
        for name, (kind, text) in written.items()
    }


# -- the calls of this script -------------------------------------------------------------------


def remember(index: int, trainer: Trainer, module: nn.Module, returned: Any) -> None:
    """Keep the result of a call that ran in this process."""
    state = [value for value in module.state_dict().values() if isinstance(value, Tensor)]
    size = sum(value.nbytes for value in state)
    if size > KEPT_BYTES:
        _made[index] = f"its {size / 2**20:.0f} MiB of weights were not kept in memory"
        return
    try:
        check_recordable(module)
        check_plain(returned, "it returned")
    except ArgumentError as error:
        _made[index] = error.message
    else:
        _made[index] = capture(trainer, module, returned, copy=True)


def remember_files(index: int, folder: Path) -> None:
    """Note where the result of a call that ran elsewhere lies."""
    _made[index] = folder


def replay_files(before: int, scratch: Path) -> dict[str, Path]:
    """Return the files that ranks need to repeat the calls before one: path in the bundle -> file.

    Raises:
        ArgumentError: a result was too large to be kept.
    """
    files: dict[str, Path] = {}
    for index in range(before):
        made = _made.get(index)
        if made is None or isinstance(made, str):
            raise ArgumentError(
                f"other ranks need the result of Trainer call {index} of this script first, but "
                + (made or "it did not finish"),
                hint="train in two scripts, with the weights saved between them",
            )
        folder = made if isinstance(made, Path) else scratch / str(index)
        if isinstance(made, Result):
            write(made, folder)
        for name in (WEIGHTS, RETURNED, DOCUMENT):
            files[f"{REPLAY}/{index}/{name}"] = folder / name
    return files
