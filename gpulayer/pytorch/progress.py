"""The progress line: one live line on a terminal, plain lines elsewhere, on rank 0 only.

The loss is read from the device only when a line is printed. Knows nothing of the loop but the
numbers it is given.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TextIO

from torch import Tensor

# Between updates of the live line; each reads the loss, which waits for the device.
TERMINAL_S = 0.5
# Between lines in a file or a pipe, where every line stays: at first, and after a minute.
PLAIN_S, PLAIN_LATER_S, LATER_S = 5.0, 30.0, 60.0


@dataclass(frozen=True, slots=True)
class Status:
    """What the line of a training batch shows.

    Args:
        epoch: counted from 0.
        done: batches of the epoch.
        total: of them, inf: not known.
        loss: of the batch; read only where a line is printed.
        left: batches to the end of the fit; inf: not known.
        left_s: seconds to a time limit; inf: there is none.
        slowest: which rank the others wait for.
        shown: values that were logged for this line.
    """

    epoch: int
    done: int
    total: float
    loss: Tensor | None
    shown: Mapping[str, Tensor]
    left: float = float("inf")
    left_s: float = float("inf")
    slowest: str | None = None


class Progress:
    """Prints where training is.

    Args:
        stream: default: standard output.
        live: replace the line instead of adding one; default: where the stream is a terminal.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool = False) -> None:
        self._stream = stream or sys.stdout
        self._live = live or self._stream.isatty()
        self._begin: float | None = None  # of the fit
        self._next = 0.0
        self._epoch_start = 0.0
        self._batches = 0  # of the fit, before this epoch
        self._done = 0  # of the epoch, at the line before
        self._marked = 0.0  # when that was
        self._width = 0

    def fit_start(self) -> None:
        self._begin = None
        self._batches = 0
        self._next = 0.0

    def epoch_start(self, done: int) -> None:
        """Begin an epoch, `done` batches into it."""
        self._epoch_start = self._marked = now = time.monotonic()
        self._begin = now if self._begin is None else self._begin
        self._batches -= done
        self._done = done

    def validated(self, took_s: float) -> None:
        """Leave a validation out of the rate; it stays in the time that is left."""
        self._marked += took_s

    def due(self) -> bool:
        """Return whether a line would be printed now: the per-step question, so kept cheap."""
        return time.monotonic() >= self._next

    def step(self, status: Status) -> None:
        """Print the line of a training batch."""
        now = time.monotonic()
        begin = now if self._begin is None else self._begin
        self._next = now + self._pause_s(now - begin)
        of = f"/{status.total:.0f}" if status.total != float("inf") else ""
        parts = [f"epoch {status.epoch}", f"step {status.done}{of}"]
        if status.loss is not None:
            parts.append(f"loss {status.loss.item():.4g}")  # waits for the device
        if (elapsed := now - self._marked) > 0 and status.done > self._done:
            parts.append(f"{(status.done - self._done) / elapsed:.1f} it/s")
        self._marked, self._done = now, status.done
        trained = self._batches + status.done
        left_s = status.left_s
        if status.left != float("inf") and trained > 0:
            left_s = min(left_s, status.left * (now - begin) / trained)
        if left_s != float("inf"):
            parts.append(f"ETA {timedelta(seconds=max(0, round(left_s)))}")
        if status.slowest is not None:
            parts.append(status.slowest)
        self._print("  ".join(parts + _values(status.shown)), stays=not self._live)

    def epoch_end(self, epoch: int, done: int, metrics: Mapping[str, Tensor]) -> None:
        """Print the line that stays: what the epoch came to."""
        self._batches += done
        elapsed = time.monotonic() - self._epoch_start
        rate = f"{done / elapsed:.1f} it/s" if elapsed > 0 else ""
        parts = [f"epoch {epoch}", f"{done} steps", f"{elapsed:.1f} s", rate, *_values(metrics)]
        self._print("  ".join(part for part in parts if part), stays=True)

    def _pause_s(self, trained_s: float) -> float:
        if self._live:
            return TERMINAL_S
        return PLAIN_S if trained_s < LATER_S else PLAIN_LATER_S

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
            # A viewer of the job clears the line itself.
            padded = line.ljust(self._width) if self._stream.isatty() else line
            self._width = 0 if stays else len(line)
            self._stream.write(f"\r{padded}" + ("\n" if stays else ""))
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()


def _values(metrics: Mapping[str, Tensor]) -> list[str]:
    return [f"{name} {float(value):.4g}" for name, value in metrics.items()]
