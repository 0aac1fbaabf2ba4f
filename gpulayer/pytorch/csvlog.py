"""metrics.csv: one row per logging call, columns sorted, buffered; hparams.yaml beside it.

Values stay tensors until the buffer is written, so a logging step does not wait for the device.
Written at the end of each validation and epoch, and while training when the last write is
`FLUSH_S` ago or `BUFFER_ROWS` are waiting. Only rank 0 has one.
"""

from __future__ import annotations

import csv
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpulayer_mesh.files import replace_file
from torch import Tensor

from gpulayer.pytorch import hyperparameters

FILE = "metrics.csv"
FLUSH_S = 5.0  # what a killed run may lose; lower costs a device sync and a write more often
BUFFER_ROWS = 1000  # a few hundred kilobytes of small tensors


class MetricsFile:
    """metrics.csv in a fresh `version_N` directory, which is made with the first row.

    Args:
        choose: given what names a fresh directory, return the name of the one to take, and whether
            an earlier attempt of this run has written into it.

    Attributes:
        rows: how many the file has.
    """

    def __init__(
        self,
        root: Path,
        choose: Callable[[Callable[[], str]], tuple[str, bool]] = lambda fresh: (fresh(), False),
    ) -> None:
        self._root = root
        self._choose = choose
        self.rows = 0
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
            name, used = self._choose(self._fresh)
            self._dir = self._root / name
            self._dir.mkdir(parents=True, exist_ok=used)
        return self._dir

    def _fresh(self) -> str:
        numbers = [
            int(found.name.removeprefix("version_"))
            for found in self._root.glob("version_*")
            if found.is_dir() and found.name.removeprefix("version_").isdigit()
        ]
        return f"version_{max(numbers, default=-1) + 1}"

    @property
    def path(self) -> Path:
        """Return where the rows are."""
        return self.directory / FILE

    def go_on(self, earlier: Path, rows: int) -> None:
        """Have the file hold the first rows that an earlier attempt wrote, and no others."""
        self._columns, held = _read(earlier)
        kept = held[:rows]
        if len(kept) < rows:
            lost = rows - len(kept)
            warnings.warn(f"{lost} of {rows} rows of {FILE} were lost", stacklevel=2)
        self._rows = []  # what this attempt has written so far is among them
        self.rows = len(kept)
        if self._columns:
            _write(self.path, self._columns, kept)

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
        replace_file(path, hyperparameters.yaml(self._hyperparameters).encode())

    def flush(self) -> None:
        """Write what is waiting; waits for the device."""
        self._written = time.monotonic()
        if not self._rows:
            return
        rows, self._rows = [_plain(row) for row in self._rows], []
        path = self.path
        self.rows += len(rows)
        columns = sorted({*self._columns, *(key for row in rows for key in row)})
        if columns != self._columns:
            old = _read(path)[1] if self._columns else []
            self._columns = columns
            _write(path, columns, [*old, *rows])
            return
        with path.open("a", newline="") as file:
            csv.DictWriter(file, columns).writerows(rows)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return columns and rows; none of a file that is not there."""
    if not path.exists():
        return [], []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or ()), list(reader)


def _write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def _plain(row: Mapping[str, Tensor | float]) -> dict[str, float]:
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in row.items()}
