"""What people read: our own words, and the lines of ranks.

Our own words go to stderr, one `gpulayer: ` per line, so that a job's stdout can be piped. A rank's
stdout goes to our stdout and its stderr to our stderr, each line behind `[rank|node] ` when there
is more than one rank. Text from ranks and peers is cleaned first: it may colour its own line and
nothing else.

This module does not know how anything travels, what a job is waiting for, or what a table shows
(`views` does).
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gpulayer_mesh.errors import GpuLayerError, NoMeshError, PathsCutError, PlacementError

from gpulayer.views import (
    SGR,
    TABLE_WIDTH,
    cells,
    clean,
    clip,
    duration,
    outcome_lines,
    plan_lines,
    refusal_lines,
    restart_lines,
    unreached_lines,
    version_lines,
)

if TYPE_CHECKING:
    from gpulayer_mesh.core.jobspec import JobRecord, JobSpec
    from gpulayer_mesh.core.logrecord import LogRecord
    from gpulayer_mesh.core.placement import Plan

    from gpulayer.bundle import Bundle
    from gpulayer.launcher import JobRequest

REDRAW_S = 0.1  # a live line changes at most this often on a terminal
PROGRESS_S = 5.0  # ... and in a file, where every change stays

_PLAIN = bytes([10, *range(32, 127)])  # nothing that `clean` changes, no line that is redrawn
_STDERR = 2  # `LogRecord.stream`; 1 is stdout, 3 a note of the shim
_NOTE = 3
# Cyan, green, yellow, blue, magenta and their bright forms; red is for errors.
_RANK_COLOURS = (36, 32, 33, 34, 35, 96, 92, 93, 94, 95)
# Wherever a mesh is missing, these are the ways to one.
_NO_MESH_HINT = """\
gpulayer mesh local -- COMMAND                     (try a command on this machine alone)
gpulayer mesh create, then gpulayer mesh invite    (start a mesh here)
gpulayer mesh join LINE                            (join one with its line)"""


class Ui:
    """Prints; one per command.

    Args:
        out: for what was asked for: tables, JSON, stdout of ranks.
        err: for our own words and stderr of ranks.
        environ: `NO_COLOR` and `TERM=dumb` turn colour off.
        now: monotonic seconds; spaces out the updates of live lines.
    """

    def __init__(
        self,
        *,
        out: TextIO | None = None,
        err: TextIO | None = None,
        environ: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if environ is None:
            from gpulayer.env import copied_env

            environ = copied_env()
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._now = now
        self._plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
        self._live: dict[tuple[int, int], tuple[str, str]] = {}  # unfinished lines: prefix, text
        self._shown: TextIO | None = None  # the terminal that shows one of them now
        self._live_at = float("-inf")  # when a live line was last drawn, or first seen in a file
        self.tables_width = TABLE_WIDTH

    # Our own words

    def note(self, text: str) -> None:
        """Print one or more lines of our own."""
        for line in text.splitlines():
            self._line(self._err, f"gpulayer: {clean(line)}")

    def data(self, lines: Iterable[str]) -> None:
        """Print what was asked for, on stdout; the lines are clean already."""
        for line in lines:
            self._line(self._out, line)

    def clear(self) -> None:
        """Start a fresh page, on a terminal only."""
        if self._out.isatty():
            self._write(self._out, "\x1b[H\x1b[2J")

    def error(self, error: BaseException, *, debug: bool = False) -> None:
        """Print what went wrong and what to do about it."""
        if debug:
            self._line(self._err, "".join(traceback.format_exception(error)).rstrip())
        message, hint = str(error) or type(error).__name__, None
        if isinstance(error, GpuLayerError):
            message, hint = error.message, error.hint
        first, *rest = message.splitlines() or [""]
        mark = self._paint(self._err, "error:", 31)
        self._line(self._err, f"gpulayer: {mark} {clean(first)}")
        for line in rest:
            self._line(self._err, f"gpulayer:   {clean(line)}")
        if isinstance(error, PlacementError):
            self.refusals(error)
        if isinstance(error, NoMeshError):
            hint = _NO_MESH_HINT
        for line in (hint or "").splitlines():
            self._line(self._err, f"gpulayer: hint: {clean(line)}")

    def refusals(self, error: PlacementError) -> None:
        """Print every node and why it does not count, or who cannot reach whom."""
        width = self.tables_width - len("gpulayer:   ")
        lines = unreached_lines(error.unreached, width) if isinstance(error, PathsCutError) else []
        for line in lines or refusal_lines(error.refusals, error.counted, width):
            self._line(self._err, f"gpulayer:   {line}")
        for line in version_lines(error.versions, width):
            self._line(self._err, f"gpulayer:   {line}")

    def plan(self, plan: Plan, request: JobRequest, bundle: Bundle, *, here: str = "") -> None:
        """Print where a job is going to run and why, and what is shipped.

        Args:
            here: node id of this machine; the plan says so where it takes part itself.
        """
        from gpulayer_mesh.core.speed import forecast

        width = self.tables_width - len("gpulayer: ")
        for line in plan_lines(plan, request.name, here=here, width=width):
            self.note(line)
        if said := forecast(request.gradient_bytes, len(plan.slots), plan.slowest):
            self.note(f"  note: {said}")
        self.note(f"bundle: {bundle.summary()}")
        for warning in bundle.warnings:
            self.note(f"  note: {warning}")

    def began(self, record: JobRecord) -> None:
        """Say that a job runs, and what all commands call it."""
        self.note(f"job {record.spec.id} runs {clean(record.spec.name)}")
        if (gone_s := record.spec.on_disconnect_s) is not None:
            self.note(
                f"it stops once nobody on this machine has followed it for {duration(gone_s)}"
            )

    def restarts(self, spec: JobSpec, names: Mapping[str, str]) -> None:
        """Say what a job that may start again can survive; nothing for another.

        Args:
            names: what nodes are called.
        """
        for line in restart_lines(spec, names):
            self.note(line)

    def stopping(self, job: str, kill: bool, grace_s: float) -> None:
        """Say what this Ctrl-C does: the first stops, the second kills."""
        if kill:
            self.note(f"killing all ranks of job {job}")
        else:
            self.note(
                f"stopping job {job}: its ranks have {grace_s:g} s; Ctrl-C again kills them now"
            )

    def detached(self, record: JobRecord) -> None:
        """Say that the job goes on, and how to get back to it or end it."""
        job = record.spec.id
        self.note(f"job {job} keeps running")
        self.note(f"  watch it:  gpulayer attach {job}")
        self.note(f"  end it:    gpulayer stop {job}")

    # Lines of ranks

    def log(self, record: LogRecord, node: str, *, prefix: bool = True, raw: bool = False) -> None:
        """Print one record of a rank's output; `raw` writes the bytes as they are."""
        if record.stream == _NOTE:
            for text in record.data.decode("utf-8", "replace").splitlines():
                self.note(f"rank {record.rank} on {node}: {text}")
            return
        stream = self._err if record.stream == _STDERR else self._out
        if raw:
            stream.flush()
            stream.buffer.write(record.data)
            stream.buffer.flush()
            return
        mark = ""
        if prefix:
            colour = _RANK_COLOURS[record.rank % len(_RANK_COLOURS)]
            mark = self._paint(stream, f"[{record.rank}|{clean(node)}]", colour) + " "
        key = (record.rank, record.stream)
        text = record.data.decode("utf-8", "replace")
        if (
            self._shown is None
            and key not in self._live
            and not record.data.translate(None, _PLAIN)
        ):
            # A flood of plain lines, at once: line by line they would come seconds late.
            whole, end, text = text.rpartition("\n")
            if end:
                self._write(stream, mark + whole.replace("\n", f"\n{mark}") + end)
        *lines, rest = text.split("\n")
        for line in lines:
            self._piece(key, stream, mark, line, ended=True)
        if rest:
            self._piece(key, stream, mark, rest, ended=False)

    def finish(self) -> None:
        """Turn what is still live into ordinary lines: nothing more will come."""
        self._erase()
        for rank, stream in sorted(self._live):
            mark, text = self._live.pop((rank, stream))
            self._line(self._err if stream == _STDERR else self._out, mark + text)

    def outcome(self, record: JobRecord) -> None:
        """Print how a job ended; a failing rank's last stderr lines are the last thing printed."""
        self.finish()
        lines, tail = outcome_lines(record)
        for line in lines:
            self.note(line)
        for line in tail:
            self._line(self._err, clean(line, colour=self._coloured(self._err)))

    # Streams

    def _piece(
        self, key: tuple[int, int], stream: TextIO, mark: str, text: str, *, ended: bool
    ) -> None:
        # "\r" takes the cursor back: of all that was written to a line, the last state counts.
        state = next((part for part in reversed(text.split("\r")) if part), "")
        if not ended and ("\r" in text or key in self._live):
            if state:
                self._update(key, stream, mark, clean(state))
            return
        _, before = self._live.pop(key, ("", ""))
        shown = clean(state, colour=self._coloured(stream)) if state else before
        self._line(stream, mark + shown)

    def _update(self, key: tuple[int, int], stream: TextIO, mark: str, text: str) -> None:
        if not self._live and not stream.isatty():
            self._live_at = max(self._live_at, self._now())
        self._live[key] = (mark, text)
        if key != min(self._live):  # one live line: that of the lowest rank
            return
        if stream.isatty():
            if self._now() - self._live_at >= REDRAW_S:
                self._draw(stream)
        elif self._now() - self._live_at >= PROGRESS_S:
            self._live_at = self._now()
            self._line(stream, mark + text)

    def _draw(self, stream: TextIO) -> None:
        mark, text = self._live[min(self._live)]
        room = shutil.get_terminal_size().columns - cells(SGR.sub("", mark)) - 1
        self._write(stream, f"\r\x1b[K{mark}{clip(text, max(room, 10))}")
        self._shown, self._live_at = stream, self._now()

    def _erase(self) -> None:
        if self._shown is not None:
            self._write(self._shown, "\r\x1b[K")
            self._shown = None

    def _line(self, stream: TextIO, text: str) -> None:
        shown = self._shown
        self._erase()
        self._write(stream, text + "\n")
        if shown is not None and self._live:
            self._draw(shown)

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
        except UnicodeEncodeError:  # a terminal that cannot show it all
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()

    def _coloured(self, stream: TextIO) -> bool:
        return not self._plain and stream.isatty()

    def _paint(self, stream: TextIO, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._coloured(stream) else text


def shown_path(path: Path) -> str:
    """Return `path` as the user would type it from here."""
    with contextlib.suppress(ValueError, OSError):
        here = Path.cwd()
        # From / the short form of a path would only lack its slash, and hold nowhere else.
        return str(path if here == Path(here.anchor) else path.relative_to(here))
    return str(path)
