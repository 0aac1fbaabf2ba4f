"""Batches loaded ahead of the training, in a thread of this process.

Whoever iterates gets the same batches, and errors at the batch where they would have come, as long
as loading draws no random numbers in this process: drawn ahead, they would come in another order
than those of the training. What a loader draws as an epoch begins, it draws in the main thread,
where the first two batches of each epoch are loaded; the second shows whether loading draws. If so,
or if a sampler is not known to draw at the beginning only, all that follows is loaded in step.
Samples that draw now and then can escape this; random transforms belong in workers. A thread ends
with its epoch, however that ends. Knows neither steps nor epochs.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gpulayer.pytorch import data, seeding

AHEAD = 2  # one is not enough where times vary; each more holds the memory of a batch
JOIN_S = 30.0  # for the batch that is being loaded as an epoch is left; more than any should take


class Prefetching:
    """The prefetching of one fit.

    Args:
        copies: bring batches to `device`; False: a hook of the module does, in the main thread.
    """

    def __init__(self, loader: data.Loader, device: torch.device, *, copies: bool) -> None:
        self._device = device
        self._in_step = False
        self._used = False
        self._prepare: Callable[[Any], Any] | None = None
        if device.type == "cuda":
            self._prepare = _Staging(device, copies)
        if hasattr(loader, "state_dict"):
            self._give_up(
                "the loader saves its position itself, which would be ahead of the training"
            )
        elif (sampler := _unknown_sampler(loader)) is not None:
            self._give_up(
                f"{sampler} may draw random numbers at any time in an epoch, and drawn ahead they "
                "would change those of the training"
            )

    def over(self, iterator: Iterator[Any], most: float) -> Generator[Any, None, None]:
        """Yield what `iterator` yields; must be closed.

        Args:
            most: items to take at most before they are asked for.
        """
        taken = 0
        while taken < 2:
            look = taken == 1 and not self._in_step
            before = seeding.states(self._device) if look else None
            try:
                item = next(iterator)
            except StopIteration:
                return
            if before is not None:
                self._look(before)
            taken += 1
            yield item
            del item
        if not self._in_step:
            self._used = True
            ahead = _Thread(iterator, most - taken, self._prepare)
            try:
                yield from ahead
            finally:
                ahead.close()
            if ahead.exhausted:
                return
        yield from iterator

    def _look(self, before: dict[str, Tensor]) -> None:
        """Find out whether loading the last batch drew random numbers."""
        after = seeding.states(self._device)
        if not all(torch.equal(value, after[name]) for name, value in before.items()):
            self._give_up(
                "loading draws random numbers in this process, and drawn ahead they would change "
                "those of the training; workers (DataLoader(..., num_workers=1)) have their own"
            )

    def _give_up(self, why: str) -> None:
        self._in_step = True
        later = " from here on" if self._used else ""
        warnings.warn(f"prefetch=True has no effect{later}: {why}", stacklevel=2)


def _unknown_sampler(loader: data.Loader) -> str | None:
    """Name a sampler of a loader of which it is not known when it draws random numbers."""
    batches = getattr(loader, "batch_sampler", None)
    for one in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        kind = type(one)
        known = kind is data.ShardSampler or kind.__module__.startswith("torch.utils.data.")
        if one is not None and not known:
            return f"the sampler {kind.__name__}"
    if any(one is torch.default_generator for one in data.generators(loader)):
        return "a sampler with torch's default generator"  # with replacement, it draws in chunks
    return None


class _Thread:
    """An iterator over what a thread takes from another one.

    Args:
        most: items to take.
        prepare: what else to do with each in the thread; what it returns is called in the main
            thread and gives the item.
    """

    def __init__(
        self, iterator: Iterator[Any], most: float, prepare: Callable[[Any], Any] | None
    ) -> None:
        self.exhausted = False
        self._iterator = iterator
        self._most = most
        self._prepare = prepare
        self._modes = (
            torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_default_device(),
        )  # fmt: skip
        self._room = threading.Semaphore(AHEAD)
        self._found: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._closed = False
        # A daemon: a loader that never returns must not keep the process from ending.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._work,),
            name="gpulayer-prefetch",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while True:
            kind, value = self._found.get()
            self._room.release()
            if kind == "end":
                self.exhausted = value
                return
            if kind == "error":
                raise value
            yield value() if self._prepare is not None else value
            del value  # nothing holds a batch longer than the caller does

    def close(self) -> None:
        """End the thread and wait for that; the batches it has loaded are dropped."""
        self._closed = True
        self._room.release()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            warnings.warn(
                f"the loader has been loading one batch for more than {JOIN_S:.0f} s; prefetching "
                "goes on without waiting for it",
                stacklevel=2,
            )
        self._found = queue.SimpleQueue()

    def _work(self) -> None:
        inference, grad, device = self._modes  # a thread begins with torch's defaults
        place = nullcontext() if device.type == "cpu" else device
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad), place:
                for number in count():
                    self._room.acquire()
                    if self._closed:
                        return
                    if number >= self._most:
                        break
                    item = next(self._iterator)
                    if self._prepare is not None:
                        item = self._prepare(item)
                    self._found.put(("item", item))
                    del item
            self._found.put(("end", False))
        except StopIteration:
            self._found.put(("end", True))
        except BaseException as error:
            self._found.put(("error", error))


class _Staging:
    """Pins batches and copies them to a cuda device on a stream of its own."""

    def __init__(self, device: torch.device, copies: bool) -> None:
        self._device = device
        self._copies = copies
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batch: Any) -> Callable[[], Any]:
        batch = data.apply(batch, _pinned)
        if not self._copies:
            return lambda: batch
        with torch.cuda.stream(self._stream):
            moved = data.move(batch, self._device)  # asynchronous from pinned memory
            copied = self._stream.record_event()

        def arrive() -> Any:
            """Let the stream of the training wait for the copy; the host does not."""
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)

            def used(value: Any) -> Any:
                # Allocated on the other stream, which may not reuse the memory before this one is
                # done with it.
                if isinstance(value, Tensor) and value.device == self._device:
                    value.record_stream(current)
                return value

            return data.apply(moved, used)

        return arrive


def _pinned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.pin_memory() if value.device.type == "cpu" else value
    return value.pin_memory() if callable(getattr(value, "pin_memory", None)) else value
