"""metrics.csv: one row per logging call, columns sorted, buffered; hparams.yaml beside it.

Values stay tensors until the buffer is written, so a logging step does not wait for the device.
Written at the end of each validation and epoch, and while training when the last write is
`FLUSH_S` ago or `BUFFER_ROWS` are waiting. Only rank 0 has one.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gpulayer.pytorch import hyperparameters

FLUSH_S = 5.0  # what a killed run may lose; lower costs a device sync and a write more often
BUFFER_ROWS = 1000  # a few hundred kilobytes of small tensors


class MetricsFile:
    """metrics.csv in a fresh `version_N` directory, which is made with the first row."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._dir: Path | None = None
        self._columns: list[str] = []
        self._rows: list[dict[str, Tensor | float]] = []
        self._hyperparameters: dict[str, Any] = {}
        self._written = time.monotonic()

    @property
    def started(self) -> bool:
        """Return whether anything was logged."""
        return self._dir is not None

    @property
    def directory(self) -> Path:
        """Return the version directory, choosing its number at the first call."""
        if self._dir is None:
            numbers = [
                int(found.name.removeprefix("version_"))
                for found in self._root.glob("version_*")
                if found.is_dir() and found.name.removeprefix("version_").isdigit()
            ]
            self._dir = self._root / f"version_{max(numbers, default=-1) + 1}"
            self._dir.mkdir(parents=True)
        return self._dir

    def write(self, values: Mapping[str, Tensor | float], step: int) -> None:
        """Add a row; nothing is read from a device here."""
        if not self._rows and not self._columns:
            self.directory  # noqa: B018  the version is taken when the run starts, not ends
        self._rows.append({**values, "step": step})
        if len(self._rows) >= BUFFER_ROWS or time.monotonic() - self._written > FLUSH_S:
            self.flush()

    def write_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Write hparams.yaml; several modules of one Trainer share the file."""
        self._hyperparameters.update(values)
        path = self.directory / hyperparameters.FILE
        temporary = path.with_suffix(".tmp")
        temporary.write_text(hyperparameters.yaml(self._hyperparameters), encoding="utf-8")
        os.replace(temporary, path)

    def flush(self) -> None:
        """Write what is waiting; waits for the device."""
        self._written = time.monotonic()
        if not self._rows:
            return
        rows, self._rows = [_plain(row) for row in self._rows], []
        path = self.directory / "metrics.csv"
        columns = sorted({*self._columns, *(key for row in rows for key in row)})
        if columns != self._columns:
            old = []
            if self._columns:
                with path.open(newline="") as file:
                    old = list(csv.DictReader(file))
            self._columns = columns
            temporary = path.with_suffix(".tmp")
            with temporary.open("w", newline="") as file:
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows(old)
                writer.writerows(rows)
            os.replace(temporary, path)
            return
        with path.open("a", newline="") as file:
            csv.DictWriter(file, columns).writerows(rows)


def _plain(row: Mapping[str, Tensor | float]) -> dict[str, float]:
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in row.items()}
