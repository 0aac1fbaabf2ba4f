"""Which code runs at a hook: callbacks in their order, then the module. Resolved once per call.

Hooks that nobody overrides resolve to None, so that a loop can leave them out. The exception to the
order is `on_train_epoch_end`, where callbacks that act on metrics come after the module, which may
log there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpulayer.pytorch.callback import Callback, Checkpoint, MetricCallback
from gpulayer.pytorch.module import overridden

if TYPE_CHECKING:
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.trainer import Trainer

Hook = Callable[..., Any]


class Hooks(dict[str, Hook | None]):
    """What runs at each hook of one call, by name; found out when it is first asked for."""

    def __init__(self, trainer: Trainer, module: Module, callbacks: Sequence[Callback]) -> None:
        super().__init__()
        self._trainer = trainer
        self._module = module
        self._callbacks = callbacks

    def __missing__(self, name: str) -> Hook | None:
        late = name == "on_train_epoch_end"
        first = [c for c in self._callbacks if not (late and isinstance(c, MetricCallback))]
        last = [c for c in self._callbacks if late and isinstance(c, MetricCallback)]
        before, after = self._of(first, name), self._of(last, name)
        own = getattr(self._module, name) if overridden(self._module, name) else None
        self[name] = _in_order(before, own, after)
        return self[name]

    def of_callbacks(self, name: str, *args: Any) -> None:
        """Call the callbacks' hook only."""
        for hook in self._of(self._callbacks, name):
            hook(*args)

    def _of(self, callbacks: Iterable[Callback], name: str) -> list[Hook]:
        return [
            partial(getattr(callback, name), self._trainer, self._module)
            for callback in callbacks
            if overrides(callback, name)
        ]


def overrides(callback: Callback, name: str) -> bool:
    """Return whether a callback defines a hook itself instead of inheriting it from `Callback`."""
    inherited = getattr(Callback, name, None)
    return inherited is not None and (
        name in vars(callback) or getattr(type(callback), name) is not inherited
    )


def ordered(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return callbacks in the order in which they run: those that write checkpoints last."""
    given = list(callbacks)
    return [c for c in given if not isinstance(c, Checkpoint)] + [
        c for c in given if isinstance(c, Checkpoint)
    ]


def _in_order(before: list[Hook], own: Hook | None, after: list[Hook]) -> Hook | None:
    """Join hooks into one; its result is the module's."""
    if not before and not after:
        return own

    def run(*args: Any) -> Any:
        for hook in before:
            hook(*args)
        result = own(*args) if own is not None else None
        for hook in after:
            hook(*args)
        return result

    return run
