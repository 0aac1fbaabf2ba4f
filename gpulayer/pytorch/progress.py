"""The progress line: one live line on a terminal, plain lines elsewhere, on rank 0 only.

The loss is read from the device only when a line is printed. Knows nothing of the loop but the
numbers it is given.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from torch import Tensor

TERMINAL_S = (
    0.5  # between updates of the live line; each reads the loss, which waits for the device
)
PLAIN_S = 5.0  # between lines in a file or a pipe, where every line stays


class Progress:
    """Prints where training is."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._pause_s = TERMINAL_S if self._live else PLAIN_S
        self._next = 0.0
        self._epoch_start = 0.0
        self._width = 0

    def epoch_start(self) -> None:
        self._epoch_start = time.monotonic()

    def due(self) -> bool:
        """Return whether a line would be printed now: the per-step question, so kept cheap."""
        return time.monotonic() >= self._next

    def step(
        self, epoch: int, done: int, total: float, loss: object, shown: Mapping[str, Tensor]
    ) -> None:
        """Print the line of a training batch."""
        now = time.monotonic()
        self._next = now + self._pause_s
        of = f"/{total:.0f}" if total != float("inf") else ""
        parts = [f"epoch {epoch}", f"step {done}{of}"]
        if isinstance(loss, Tensor):
            parts.append(f"loss {loss.item():.4g}")  # waits for the device
        if (elapsed := now - self._epoch_start) > 0:
            parts.append(f"{done / elapsed:.1f} it/s")
        self._print("  ".join(parts + _values(shown)), stays=not self._live)

    def epoch_end(self, epoch: int, done: int, metrics: Mapping[str, Tensor]) -> None:
        """Print the line that stays: what the epoch came to."""
        elapsed = time.monotonic() - self._epoch_start
        rate = f"{done / elapsed:.1f} it/s" if elapsed > 0 else ""
        parts = [f"epoch {epoch}", f"{done} steps", f"{elapsed:.1f} s", rate, *_values(metrics)]
        self._print("  ".join(part for part in parts if part), stays=True)

    def evaluated(self, stage: str, outputs: Sequence[Mapping[str, float]]) -> None:
        """Print what `validate` or `test` came to, a line per loader."""
        for index, values in enumerate(outputs):
            which = [stage, f"loader {index}"] if len(outputs) > 1 else [stage]
            shown = [f"{name} {value:.4g}" for name, value in values.items()]
            self._print("  ".join(which + shown), stays=True)

    def line(self, text: str) -> None:
        """Print a line of its own."""
        self._print(text, stays=True)

    def _print(self, line: str, *, stays: bool) -> None:
        if self._live:
            padded = line.ljust(self._width)
            self._width = 0 if stays else len(line)
            self._stream.write(f"\r{padded}" + ("\n" if stays else ""))
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()


def _values(metrics: Mapping[str, Tensor]) -> list[str]:
    return [f"{name} {float(value):.4g}" for name, value in metrics.items()]
