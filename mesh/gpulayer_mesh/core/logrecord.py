"""What a rank printed, as numbered records: the form on disk and in a stream over the network.

A record's `data` is one or more whole lines, as bytes; a line longer than 64 KiB, or one that
stays unfinished for a second, comes in pieces. This module does not know who writes records (the
shim does, with its own copy of the format, since it may import nothing of ours) or who shows them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gpulayer_mesh.errors import RemoteProtocolError

# rank, sequence number, wall clock, stream, length; then the bytes
RECORD_FORMAT = ">HQdBI"
HEADER = struct.Struct(RECORD_FORMAT)
DATA_MAX = 64 * 1024  # bytes; the shim splits longer lines
TAIL_MAX = 100_000  # lines; more than anybody reads, few enough to count at once
SINCE_MAX_S = 10 * 365 * 86400.0  # no job is that old
WALL_MAX = 253402300799.0  # the last second of the year 9999: anything later cannot be shown


class LogStream(IntEnum):
    """Where a record comes from."""

    OUT = 1
    ERR = 2
    NOTE = 3  # the shim's own word: bytes dropped, program not found


@dataclass(frozen=True, slots=True)
class LogRecord:
    rank: int
    seq: int  # from 1, without gaps within a rank, but where a note says what was dropped
    wall: float  # wall clock of the writing machine; display only
    stream: LogStream
    data: bytes

    def pack(self) -> bytes:
        """Encode as on disk."""
        head = HEADER.pack(self.rank, self.seq, self.wall, self.stream, len(self.data))
        return head + self.data

    def lines(self) -> list[bytes]:
        r"""Split into lines, each with its own end: "\n", "\r\n" or the "\r" of a progress bar."""
        return self.data.splitlines(keepends=True)


@dataclass(frozen=True, slots=True)
class LogPick:
    """Which lines of ranks a viewer wants; by default all."""

    stderr: bool = False  # what ranks wrote to stderr only, and notes
    since_s: float | None = None  # none older than that, by the clock of the machine they are on
    tail: int | None = None  # of each rank this many of the last, and what comes after

    def takes(self, stream: int, wall: float, now: float) -> bool:
        """Return whether a record is wanted, whatever its place in the log.

        Args:
            now: the wall clock where it was written.
        """
        if self.stderr and stream == LogStream.OUT:
            return False
        return self.since_s is None or wall >= now - self.since_s


EVERY_LINE = LogPick()


class RecordParser:
    """Turns a byte stream into records; holds at most one unfinished record (64 KiB)."""

    def __init__(self) -> None:
        self._buffer = b""

    @property
    def pending(self) -> int:
        """Bytes of a record that is not complete yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[LogRecord]:
        """Take bytes as they come and return the records they complete.

        Raises:
            RemoteProtocolError: these bytes cannot be records; nothing of this call is returned.
        """
        buffer = self._buffer + data
        records: list[LogRecord] = []
        start = 0
        while len(buffer) - start >= HEADER.size:
            rank, seq, wall, stream, length = HEADER.unpack_from(buffer, start)
            if length > DATA_MAX:
                raise RemoteProtocolError(f"log record of {length} bytes exceeds {DATA_MAX}")
            if stream not in (1, 2, 3) or not 0 <= wall <= WALL_MAX:
                raise RemoteProtocolError(f"not a log record: stream {stream!r}, time {wall!r}")
            end = start + HEADER.size + length
            if end > len(buffer):
                break
            body = buffer[start + HEADER.size : end]
            records.append(LogRecord(rank, seq, wall, LogStream(stream), body))
            start = end
        self._buffer = buffer[start:]
        return records


def begin_of_tail(records: Sequence[LogRecord], count: int) -> tuple[int, int]:
    """Return where the last lines begin: the number of a record, and a place in its bytes."""
    if not records:
        return 0, 0
    unfinished = not records[-1].data.endswith(b"\n")  # counts as a line
    ends = count + 1 - (unfinished and count > 0)  # of lines, from the last one back
    for record in reversed(records):
        at = len(record.data)
        while ends and (at := record.data.rfind(b"\n", 0, at)) >= 0:
            ends -= 1
        if not ends:
            begin = at + 1
            return (record.seq, begin) if begin < len(record.data) else (record.seq + 1, 0)
    return records[0].seq, 0


def last_lines(
    records: Iterable[LogRecord], count: int, *, chars_max: int = 4096
) -> tuple[str, ...]:
    r"""The last lines that explain an end: of stderr and notes, of stdout when those are blank.

    Of a line that "\r" redrew, the last state counts. `chars_max` cuts long lines at their start.
    """
    streams: dict[bool, list[bytes]] = {True: [], False: []}
    for record in records:
        streams[record.stream != LogStream.OUT].append(record.data)
    for chosen in (True, False):
        text = b"".join(streams[chosen]).decode("utf-8", "replace")
        lines = [_last_state(line)[-chars_max:] for line in text.split("\n")]
        while lines and not lines[-1].strip():
            lines.pop()
        if lines:
            return tuple(lines[-count:])
    return ()


def _last_state(line: str) -> str:
    states = [state for state in line.split("\r") if state.strip()]
    return states[-1].rstrip() if states else ""
