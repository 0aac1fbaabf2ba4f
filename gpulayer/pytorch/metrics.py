"""What `self.log` keeps: a step's last value, an epoch's accumulation, three dictionaries.

Logging costs a lookup and one or two small tensor operations: no value is read on the host, moved
between devices or, without `sync_dist` on a step, sent anywhere. Epoch values of all ranks are
reduced together when an epoch ends: sums and weights are added up as floats, so ranks with unequal
numbers of batches count right. Semantics are Lightning's; this module does not
know loops, it is told the current hook and batch.
"""

from __future__ import annotations

import json
import numbers
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from gpulayer.pytorch.arguments import ArgumentError

# on_step and on_epoch defaults per hook. Hooks that are missing here may not log.
_STEP = (True, False)
_EVAL = (False, True)
_EPOCH_ONLY = None
_HOOKS: Mapping[str, tuple[bool, bool] | None] = {
    **dict.fromkeys(
        (
            "training_step", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad",
            "optimizer_zero_grad", "on_before_backward", "backward", "on_after_backward",
            "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step",
        ),
        _STEP,
    ),
    **dict.fromkeys(
        (
            "validation_step", "on_validation_batch_start", "on_validation_batch_end",
            "test_step", "on_test_batch_start", "on_test_batch_end",
        ),
        _EVAL,
    ),
    **dict.fromkeys(
        (
            "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start",
            "on_validation_epoch_start", "on_validation_epoch_end", "on_test_start",
            "on_test_epoch_start", "on_test_epoch_end",
        ),
        _EPOCH_ONLY,
    ),
}  # fmt: skip
_VALUES = ("last", "total", "computed")  # of an entry: tensors, numbers or None
PILE = 64  # small: each pending value of a device holds a block of its memory
_FUNCTIONS: Mapping[Any, str] = {
    "mean": "mean", "avg": "mean", torch.mean: "mean",
    "sum": "sum", torch.sum: "sum", sum: "sum",
    "min": "min", torch.min: "min", min: "min",
    "max": "max", torch.max: "max", max: "max",
}  # fmt: skip


class Peers(Protocol):
    """The part of `Runtime` that reductions need."""

    world_size: int
    device: torch.device

    def gather_text(self, text: str) -> list[str]: ...
    def all_reduce(self, tensor: Tensor, op: str) -> Tensor: ...


class Entry:
    """One logged name in one hook (and loader)."""

    __slots__ = (
        "computed", "dataloader_idx", "dtype", "epoch_name", "fresh", "fx", "hook", "last",
        "logger", "name", "on_epoch", "on_step", "options", "pending", "pending_weight",
        "prog_bar", "step_name", "sync", "total", "weight",
    )  # fmt: skip

    def __init__(
        self,
        hook: str,
        name: str,
        fx: str,
        on_step: bool,
        on_epoch: bool,
        prog_bar: bool,
        logger: bool,
        sync: bool,
        dataloader_idx: int | None,
        suffix: bool,
        options: tuple[Any, ...] | None = None,
    ) -> None:
        forked = on_step and on_epoch
        loader = f"/dataloader_idx_{dataloader_idx}" if suffix else ""
        self.hook = hook
        self.name = name + loader
        self.step_name = (f"{name}_step" if forked else name) + loader
        self.epoch_name = (f"{name}_epoch" if forked else name) + loader
        self.fx = fx
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.prog_bar = prog_bar
        self.logger = logger
        self.sync = sync
        self.dataloader_idx = dataloader_idx
        self.options = options
        self.dtype = torch.float32
        self.reset()

    def reset(self) -> None:
        self.fresh = False
        self.last: Tensor | float | None = None
        self.total: Tensor | float | None = None
        self.weight = 0.0
        # Values of equal weight that are not in `total` yet: summing up a pile of them costs a
        # tenth of adding each.
        self.pending: list[Tensor] = []
        self.pending_weight = 0.0
        self.computed: Tensor | None = None

    def add(self, value: Tensor | float, weight: float) -> None:
        """Add to a sum or mean; a tensor must be a copy that nobody changes."""
        self.weight += weight
        if isinstance(value, Tensor):
            if weight != self.pending_weight or len(self.pending) == PILE:
                self.fold()
                self.pending_weight = weight
            self.pending.append(value)
        else:
            product = value * weight
            self.total = product if self.total is None else self.total + product

    def fold(self) -> None:
        """Bring `total` up to date."""
        if not self.pending:
            return
        device = self.pending[0].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        piled = torch.stack([value.to(device) for value in self.pending]).to(wide)
        product = piled.sum() * self.pending_weight
        self.pending = []
        if isinstance(self.total, Tensor):
            self.total = self.total.to(device) + product
        else:
            self.total = product if self.total is None else product + self.total

    def extreme(self, value: Tensor | float) -> None:
        """Keep the smaller or larger of what is there and `value`."""
        if self.total is None:
            self.total = value
            return
        first = torch.as_tensor(self.total)
        second = torch.as_tensor(value, dtype=first.dtype, device=first.device)
        self.total = (torch.maximum if self.fx == "max" else torch.minimum)(first, second)

    def local(self) -> Tensor | None:
        """Return this rank's epoch value."""
        self.fold()
        if self.total is None:
            return None
        total = self.total
        if self.fx == "mean":  # 0: batches without a sample
            total = total / self.weight if self.weight else float("nan")
        return torch.as_tensor(total).to(self.dtype)

    def state(self) -> dict[str, Any]:
        """Return everything as tensors and plain data, not folded: sums must not round anew."""
        arguments = json.loads(self.describe())
        arguments[7] = self.sync
        values = {name: getattr(self, name) for name in _VALUES}
        return {
            "arguments": arguments,
            "double": self.dtype is torch.float64,
            "fresh": self.fresh,
            "weight": self.weight,
            "pending_weight": self.pending_weight,
            "values": {name: _to_host(value) for name, value in values.items()},
            "pending": [_to_host(value) for value in self.pending],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> Entry:
        """Make the entry that `state` was taken from; the next `log` brings its options."""
        entry = cls(*state["arguments"])
        entry.dtype = torch.float64 if state["double"] else torch.float32
        entry.fresh = state["fresh"]
        entry.weight = state["weight"]
        entry.pending_weight = state["pending_weight"]
        for name, value in state["values"].items():
            setattr(entry, name, _to_device(value, device))
        entry.pending = [_to_device(value, device) for value in state["pending"]]
        return entry

    def describe(self) -> str:
        """Return what another rank needs to make the same entry."""
        suffix = self.dataloader_idx is not None and self.name.endswith(
            f"/dataloader_idx_{self.dataloader_idx}"
        )
        plain = self.name.rpartition("/")[0] if suffix else self.name
        return json.dumps(
            [self.hook, plain, self.fx, self.on_step, self.on_epoch, self.prog_bar, self.logger,
             True, self.dataloader_idx, suffix]
        )  # fmt: skip


class Metrics:
    """The dictionaries of a trainer and what feeds them."""

    def __init__(self) -> None:
        self.callback: dict[str, Tensor] = {}
        self.logged: dict[str, Tensor] = {}
        self.progress: dict[str, Tensor] = {}
        self.peers: Peers | None = None
        self._train: dict[Any, Entry] = {}
        self._eval: dict[Any, Entry] = {}
        self._entries = self._train
        # set by the loops around every call of user code
        self.hook = ""
        self.batch: Any = None
        self.dataloader_idx: int | None = None
        self.on_step = False
        self._batch_size: int | None = None
        self._warned = False

    # -- the loops' side ---------------------------------------------------------------------

    def start(self, peers: Peers) -> None:
        """Begin a fit with empty dictionaries."""
        self.peers = peers
        # An earlier call may have failed in the middle of anything.
        self._entries = self._train
        self.batch = self.dataloader_idx = None
        self.forget()

    def forget(self) -> None:
        """Drop everything: at the start of a fit and after the sanity check."""
        for dictionary in (self.callback, self.logged, self.progress, self._train, self._eval):
            dictionary.clear()
        self.on_step = False

    @property
    def evaluating(self) -> bool:
        return self._entries is self._eval

    def evaluate(self, on: bool) -> None:
        """Switch between the entries of training and those of evaluation."""
        if on:
            self.commit()
        self._entries = self._eval if on else self._train

    def batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        self.batch = batch
        self._batch_size = None
        self.dataloader_idx = dataloader_idx
        self.on_step = True

    def epoch_end(self) -> None:
        """From here on epoch values count."""
        self.commit()
        self.batch = None
        self.on_step = False
        self.dataloader_idx = None

    def reset(self) -> None:
        """Forget accumulations; the dictionaries keep their values."""
        for entry in self._entries.values():
            entry.reset()
        self.on_step = False

    def of_training(self, name: str) -> bool:
        """Return whether this epoch's training has logged a name."""
        return any(
            entry.fresh and name in (entry.name, entry.step_name, entry.epoch_name)
            for entry in self._train.values()
        )

    def state(self) -> dict[str, Any]:
        """Return what training has logged, as tensors and plain data: see `restore`."""
        self.commit()
        return {
            "entries": [[key, entry.state()] for key, entry in self._train.items()],
            "callback": {name: value.cpu() for name, value in self.callback.items()},
            "logged": {name: value.cpu() for name, value in self.logged.items()},
            "progress": {name: value.cpu() for name, value in self.progress.items()},
        }

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from what `state` returned; values of devices go to `device`."""
        self.forget()
        for key, fields in state["entries"]:
            self._train[key] = Entry.from_state(fields, device)
        self.callback.update(state["callback"])
        self.logged.update(state["logged"])
        self.progress.update(state["progress"])

    def commit(self) -> None:
        """Bring the dictionaries up to date with what is logged now."""
        train = self._entries is self._train
        for entry in self._entries.values():
            if not entry.fresh or entry.dataloader_idx != self.dataloader_idx:
                continue
            if self.on_step:
                value = entry.last
                name = entry.step_name
            else:
                value = self._epoch_value(entry)
                name = entry.epoch_name
            if value is None:
                continue
            tensor = torch.as_tensor(value)
            if entry.logger:
                self.logged[name] = tensor
            if train or not self.on_step:
                self.callback[entry.name] = tensor
                self.callback[name] = tensor
            if entry.prog_bar:
                self.progress[name] = tensor

    def row(self) -> dict[str, Tensor | float]:
        """Return what goes to metrics.csv now: of the step or, after `epoch_end`, of the epoch."""
        found: dict[str, Tensor | float] = {}
        for entry in self._entries.values():
            if entry.fresh and entry.logger and entry.dataloader_idx == self.dataloader_idx:
                value = entry.last if self.on_step else self._epoch_value(entry)
                if value is not None:
                    found[entry.step_name if self.on_step else entry.epoch_name] = value
        return found

    def step_entries(self) -> list[Entry]:
        """Return the current loader's entries that have a value for this step."""
        return [
            entry
            for entry in self._entries.values()
            if entry.fresh and entry.on_step and entry.dataloader_idx == self.dataloader_idx
        ]

    def reduce(self) -> None:
        """Compute the epoch values of everything logged so far; every rank must call this."""
        pending = [
            e for e in self._entries.values() if e.fresh and e.on_epoch and e.computed is None
        ]
        if self.peers is not None and self.peers.world_size > 1:
            for entry in pending:
                entry.fold()
            mine = {
                e.describe(): (e.fx, e.total, e.weight)
                for e in pending
                if e.sync and e.total is not None
            }
            theirs = reduce_named(mine, self.peers)
            for entry in pending:
                if entry.sync:
                    entry.computed = theirs.pop(entry.describe()).to(entry.dtype)
            for description, value in theirs.items():  # logged on other ranks only
                entry = Entry(*json.loads(description))
                entry.fresh = True
                entry.computed = value.to(entry.dtype)
                self._entries[description] = entry
        for entry in pending:
            if entry.computed is None:
                entry.computed = entry.local()

    def loaders(self) -> list[int | None]:
        """Return the loader indices that have entries."""
        return list(dict.fromkeys(e.dataloader_idx for e in self._entries.values() if e.fresh))

    def _epoch_value(self, entry: Entry) -> Tensor | None:
        if not entry.on_epoch:
            return None
        if entry.computed is None and not entry.sync:
            entry.computed = entry.local()
        return entry.computed

    # -- the user's side ---------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool,
        logger: bool | None,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        sync_dist: bool,
        add_dataloader_idx: bool,
        batch_size: int | None,
        rank_zero_only: bool,
    ) -> None:
        loader = self.dataloader_idx
        options = (
            prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx,
            rank_zero_only, loader,
        )  # fmt: skip
        key = (self.hook, name, loader if add_dataloader_idx else None)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._new_entry(name, options)
        elif entry.options is None:  # from a checkpoint
            entry.options = options
        elif entry.options != options:
            raise ArgumentError(
                f"{name!r} is logged twice in {self.hook} with different options",
                hint="with several loaders and add_dataloader_idx=False, use a name per loader"
                if loader is not None
                else None,
            )

        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ArgumentError(
                    f"self.log({name!r}, ...): one value expected, got a tensor of shape "
                    f"{tuple(value.shape)}"
                )
            value = value.detach()
            if value.dim():
                value = value.reshape(())
            if value.dtype is not torch.float32:
                if value.dtype is torch.float64:
                    entry.dtype = torch.float64
                else:
                    value = value.to(torch.float32)
        elif isinstance(value, numbers.Real):
            value = float(value)
        else:
            raise ArgumentError(
                f"self.log({name!r}, ...): a number or a tensor of one element expected, got "
                f"{type(value).__name__}"
            )

        entry.fresh = True
        if value.__class__ is not float:
            value = value.clone()  # the user may go on to change it in place (loss /= n)
        if entry.on_step:
            entry.last = self._reduce_step(entry, value) if entry.sync else value
        if entry.on_epoch:
            entry.computed = None
            fx = entry.fx
            if fx == "mean":
                if batch_size is None:
                    batch_size = self._batch_size or self._find_batch_size(name)
                elif not batch_size > 0:
                    raise ArgumentError(
                        f"self.log({name!r}, ..., batch_size={batch_size!r}): it is the value's "
                        "weight in the mean of the epoch and must be above 0"
                    )
                entry.add(value, batch_size)
            elif fx == "sum":
                entry.add(value, 1)
            else:
                entry.extreme(value)

    def _new_entry(self, name: str, options: tuple[Any, ...]) -> Entry:
        (
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            sync_dist,
            add_loader,
            zero_only,
            loader,
        ) = options
        if self.hook not in _HOOKS:
            where = f"in {self.hook}" if self.hook else "outside of a fit"
            raise ArgumentError(f"self.log({name!r}, ...) is not possible {where}")
        defaults = _HOOKS[self.hook]
        if defaults is None:
            if on_step or on_epoch is False:
                raise ArgumentError(f"self.log({name!r}, ...) in {self.hook} is for epochs only")
            defaults = (False, True)
        fx = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
        if fx not in _FUNCTIONS:
            raise ArgumentError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): only mean, sum, min and max"
            )
        if add_loader and "/dataloader_idx_" in name:
            raise ArgumentError(
                f"self.log({name!r}, ...): the loader's index is appended by itself",
                hint="leave it out of the name, or pass add_dataloader_idx=False",
            )
        on_step = defaults[0] if on_step is None else on_step
        on_epoch = defaults[1] if on_epoch is None else on_epoch
        if not on_step and not on_epoch:
            raise ArgumentError(
                f"self.log({name!r}, ..., on_step=False, on_epoch=False) in {self.hook} keeps "
                "nothing",
                hint="pass on_epoch=True, or leave the call out",
            )
        return Entry(
            self.hook,
            name,
            _FUNCTIONS[fx],
            on_step=on_step,
            on_epoch=on_epoch,
            prog_bar=prog_bar,
            logger=logger is None or logger,
            sync=self._shared() and sync_dist and not zero_only,
            dataloader_idx=loader,
            suffix=add_loader and loader is not None,
            options=options,
        )

    def _shared(self) -> bool:
        return self.peers is not None and self.peers.world_size > 1

    def _reduce_step(self, entry: Entry, value: Tensor | float) -> Tensor | float:
        if self.evaluating:
            return value  # ranks may have unequal numbers of batches: reduced at the end
        assert self.peers is not None
        tensor = torch.as_tensor(value, device=self.peers.device)
        tensor = self.peers.all_reduce(tensor, "sum" if entry.fx == "mean" else entry.fx)
        return tensor / self.peers.world_size if entry.fx == "mean" else tensor

    def _find_batch_size(self, name: str) -> int:
        if self.batch is None:
            return 1
        sizes = iter(batch_sizes(self.batch))
        size = next(sizes, None)
        if size is None:
            raise ArgumentError(
                f"self.log({name!r}, ...): the batch holds no tensor to take its size from",
                hint="pass batch_size=",
            )
        if not self._warned and any(other != size for other in sizes):
            self._warned = True
            warnings.warn(
                f"the tensors of a batch differ in their first dimension; {size} is taken as its "
                "size, pass batch_size= to self.log",
                stacklevel=4,
            )
        self._batch_size = size
        return size


def reduce_named(
    mine: Mapping[str, tuple[str, Tensor | float | None, float]], peers: Peers
) -> dict[str, Tensor]:
    """Reduce named values over all ranks; a rank may lack names that others have.

    `mine` maps a name to (function, total, weight). Three collectives at most, however many names.
    """
    kinds: dict[str, str] = {}
    for text in peers.gather_text(json.dumps({key: item[0] for key, item in mine.items()})):
        kinds.update(json.loads(text))
    wide = torch.float32 if peers.device.type == "mps" else torch.float64

    def column(keys: list[str], pick: Callable[[str], Any]) -> Tensor:
        values = [torch.as_tensor(pick(key), dtype=wide, device=peers.device) for key in keys]
        return torch.stack(values)

    result: dict[str, Tensor] = {}
    added = [key for key, fx in kinds.items() if fx in ("mean", "sum")]
    if added:
        totals = column(added, lambda key: mine[key][1] if key in mine else 0.0)
        weights = column(added, lambda key: mine[key][2] if key in mine else 0.0)
        both = peers.all_reduce(torch.stack([totals, weights]), "sum")
        for i, key in enumerate(added):
            result[key] = both[0, i] / both[1, i] if kinds[key] == "mean" else both[0, i]
    extreme = [key for key, fx in kinds.items() if fx in ("max", "min")]
    if extreme:
        signs = {key: 1.0 if kinds[key] == "max" else -1.0 for key in extreme}
        largest = peers.all_reduce(
            column(
                extreme,
                lambda key: mine[key][1] * signs[key] if key in mine else float("-inf"),  # type: ignore[operator]
            ),
            "max",
        )
        for i, key in enumerate(extreme):
            result[key] = largest[i] * signs[key]
    return {key: result[key] for key in kinds}


def _to_host(value: Any) -> list[Any]:
    """Return a value where a file can hold it, and whether it was on another device."""
    if isinstance(value, Tensor):
        return [value.detach().cpu(), value.device.type != "cpu"]
    return [value, False]


def _to_device(held: list[Any], device: torch.device) -> Any:
    value, elsewhere = held
    return value.to(device) if elsewhere else value


def batch_sizes(batch: Any) -> Iterable[int]:
    """Yield the first dimension of each tensor in a batch, depth first; 1 for a 0-dim one."""
    if isinstance(batch, Tensor):
        yield batch.shape[0] if batch.dim() else 1
    elif isinstance(batch, Iterable) and not isinstance(batch, str | bytes):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from batch_sizes(value)
    elif hasattr(batch, "__dataclass_fields__"):
        for name in batch.__dataclass_fields__:
            yield from batch_sizes(getattr(batch, name))
