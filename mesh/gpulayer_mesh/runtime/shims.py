"""The agent's side of a shim: start one, follow its events and logs, stop it, take it over.

Everything goes through the job folder (see `shim`), so nothing here cares whether this process or
an earlier one started the shim. Liveness is the lock that a shim holds on its status file: the
kernel drops it with the process, and no process number is trusted. This module does not know what
a job is, what a rank's end means or who asks for logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import heapq
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import assert_never

import msgspec

from gpulayer_mesh import shim
from gpulayer_mesh.core import hosted
from gpulayer_mesh.core.jobspec import MemoryKill
from gpulayer_mesh.core.logrecord import (
    DATA_MAX,
    EVERY_LINE,
    HEADER,
    WALL_MAX,
    LogPick,
    LogRecord,
    LogStream,
    RecordParser,
    begin_of_tail,
    last_lines,
)
from gpulayer_mesh.errors import GpuLayerError, RemoteProtocolError
from gpulayer_mesh.files import replace_file

START_DEADLINE_S = 10.0  # a shim starts in 0.1 s; a machine deep in swap gets a hundred times that
POLL_S = 0.05  # a rank's end and a printed line are seen within this
POLL_QUIET_S = 0.2  # after a minute without an event
TOUCH_S = 1.0  # between renewals of the lease; cheap, so any useful silence is far above it
BATCH_MAX = 256 * 1024  # bytes handed out at once: four of the largest records, parsed in 5 ms
STATUS_BATCH = 1024 * 1024  # bytes of events read at once: the ends of 5,000 ranks
TAIL_READ_MAX = 16 * 2**20  # bytes of a rank's log that are looked through for its last lines
TAIL_BYTES = 1024 * 1024  # looked at for the last lines: 60 lines of 4 KiB four times over
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_QUIET_AFTER_S = 60.0
_SWEEP_S = 5.0


@dataclass(frozen=True, slots=True)
class RankCommand:
    """One process to start."""

    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]  # all of it: a rank inherits nothing from the agent
    cwd: str
    python: bool = False  # the program is a Python interpreter; see `rank_hook`
    cpus: tuple[int, ...] = ()  # where it may run; () for wherever the agent may


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimConfig:
    ranks: tuple[RankCommand, ...]
    cookie: str  # random; every process of the job carries it, so that none can hide
    grace_s: float = 30.0  # from SIGTERM to SIGKILL when the shim stops by itself
    raised_grace_s: float = 30.0  # to end by itself for a Python rank that an exception ended
    agent_silence_s: float = 300.0  # nobody watches; higher survives longer agent outages
    fence_grace_s: float | None = None  # what they get past the lease, if that ends them
    secrets: tuple[str, ...] = ()  # values of 8 bytes and more that are masked in the logs
    log_limit_bytes: int = shim.LOG_MAX  # per rank


class _Line(msgspec.Struct, frozen=True, tag_field="event"):
    n: int  # from 1
    mono: float  # this machine's monotonic clock


class _Started(_Line, frozen=True, tag="started"):
    pid: int
    cookie: str
    boot: str = ""  # of the machine, as `shim.boot_id`


class _RankStarted(_Line, frozen=True, tag="rank-started"):
    rank: int
    pid: int


class _RankExited(_Line, frozen=True, tag="rank-exited"):
    rank: int
    code: int | None
    signal: int | None
    stopped: bool
    memory_peak_mib: int | None = None
    memory_limit_mib: int | None = None
    memory_kill: MemoryKill | None = None


class _Stopping(_Line, frozen=True, tag="stopping"):
    reason: str


class _Problem(_Line, frozen=True, tag="error"):
    message: str


class _Done(_Line, frozen=True, tag="done"):
    pass


Until = Callable[[], float | None]
_StatusLine = _Started | _RankStarted | _RankExited | _Stopping | _Problem | _Done
ShimEvent = hosted.RankStarted | hosted.RankExited | hosted.ShimDone | hosted.ShimLost


def _unfenced() -> None:
    return None


class ShimRunner:
    """Starts shims and talks to them; holds no state of its own.

    Args:
        python: the interpreter that runs the shim itself, not the ranks.
    """

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python

    async def start(self, job_dir: Path, config: ShimConfig, until: Until = _unfenced) -> None:
        """Start a detached shim; return when its ranks are about to start.

        Makes `logs/` and `out/rank<k>/`. One shim per job folder, ever.

        Args:
            until: as for `watch`.

        Raises:
            GpuLayerError: it did not start; the message carries what it said.
        """
        for rank in config.ranks:
            (job_dir / "out" / f"rank{rank.rank}").mkdir(parents=True, exist_ok=True, mode=0o700)
        (job_dir / "logs").mkdir(exist_ok=True, mode=0o700)
        self.touch(job_dir, until())
        await asyncio.to_thread(self._spawn, job_dir, json.dumps(asdict(config)).encode())
        status = _Status(job_dir)
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            alive = self.alive(job_dir)  # before reading, as in `watch`
            if status.read():
                return
            if not alive:
                raise GpuLayerError("the shim ended without a word: is the disk full?")
            await asyncio.sleep(0.01)
        self.kill(job_dir)
        raise GpuLayerError(f"the shim did not start within {START_DEADLINE_S:.0f} s")

    def _spawn(self, job_dir: Path, payload: bytes) -> None:
        command = [self._python, "-I", "-S", "-X", "utf8", shim.__file__, str(job_dir)]
        errors = job_dir / "shim.err"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        fd = os.open(errors, flags, 0o600)
        try:
            done = subprocess.run(
                command,
                input=payload,
                stdout=subprocess.DEVNULL,
                stderr=fd,
                cwd=job_dir,
                start_new_session=True,
                timeout=START_DEADLINE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise GpuLayerError(f"cannot start the shim: {exc}") from exc
        finally:
            os.close(fd)
        if done.returncode:
            said = errors.read_text("utf-8", "replace").strip().splitlines()[-1:]
            raise GpuLayerError(
                f"the shim ended with code {done.returncode}: {' '.join(said) or 'no message'}"
            )

    def adopt(self, job_dir: Path) -> bool:
        """Take over what an earlier agent started: True if `watch` has something to tell.

        False: no shim ever got going here, and now none will.
        """
        if (job_dir / "status").exists():
            return True
        self.kill(job_dir)
        return False

    def alive(self, job_dir: Path) -> bool:
        """Return whether a shim runs for this folder."""
        try:
            fd = os.open(job_dir / "status", _READ)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    async def watch(self, job_dir: Path, until: Until = _unfenced) -> AsyncIterator[ShimEvent]:
        """Yield every event from the first on, past and future, and keep the shim's lease alive.

        Args:
            until: when `ShimConfig.fence_grace_s` is set, returns until when the ranks may run, by
                `clock.boot_clock`.

        Ends after ShimDone, or after ShimLost where the shim is gone without a word, failed, or
        stopped the ranks on its own. A rank's log is complete when its RankExited comes.
        """
        status = _Status(job_dir)
        cookie = problem = boot = ""
        next_touch = 0.0
        began = quiet_since = time.monotonic()
        while True:
            alive = self.alive(job_dir)  # before reading, so that a last word is not missed
            now = time.monotonic()
            if alive and now >= next_touch:
                self.touch(job_dir, until())
                next_touch = now + TOUCH_S
            known = bool(cookie)  # `alive` was asked when it was; else the shim has just come
            for line in status.read():
                quiet_since = now
                match line:
                    case _Started():
                        cookie, boot = line.cookie, line.boot
                    case _RankStarted():
                        yield hosted.RankStarted(line.rank, line.pid)
                    case _RankExited():
                        yield hosted.RankExited(
                            line.rank,
                            line.code,
                            line.signal,
                            line.stopped,
                            memory_peak_mib=line.memory_peak_mib,
                            memory_limit_mib=line.memory_limit_mib,
                            memory_kill=line.memory_kill,
                        )
                    case _Stopping():
                        problem = problem or line.reason
                    case _Problem():
                        problem = problem or line.message
                    case _Done():
                        yield hosted.ShimLost(problem) if problem else hosted.ShimDone()
                        return
                    case _:
                        assert_never(line)
            if not alive and (known or now - began > START_DEADLINE_S):
                left = await asyncio.to_thread(_sweep, cookie) if cookie else []
                if boot and boot != shim.boot_id():
                    problem = problem or "the machine was rebooted"
                problem = problem or "the shim is gone without a word"
                yield hosted.ShimLost(problem + (f"; processes left: {left}" if left else ""))
                return
            await asyncio.sleep(POLL_S if now - quiet_since < _QUIET_AFTER_S else POLL_QUIET_S)

    def touch(self, job_dir: Path, until: float | None = None) -> None:
        """Renew the lease by hand; `watch` does it while it runs."""
        path = job_dir / "lease"
        if until is None or not path.exists():
            path.touch(mode=0o600)
        if until is not None:
            # A full disk takes no more data, but a time; and a time is read whole or not at all.
            os.utime(path, (until, until))

    def fence(self, job_dir: Path) -> float:
        """Return until when ranks may run that an earlier agent started: `touch`'s `until`."""
        try:
            return (job_dir / "lease").stat().st_mtime
        except OSError:
            return 0.0

    def stop(self, job_dir: Path, grace_s: float, reason: str = "") -> None:
        """Ask for SIGTERM now and SIGKILL after `grace_s`; again to shorten the grace.

        Args:
            reason: what `watch` says in the end of a job whose first stop this was.
        """
        self._order(job_dir, {"grace_s": grace_s, "kill": False, "reason": reason})

    def kill(self, job_dir: Path, reason: str = "") -> None:
        """Ask for SIGKILL now; `reason` as in `stop`."""
        self._order(job_dir, {"grace_s": 0, "kill": True, "reason": reason})

    def _order(self, job_dir: Path, order: dict[str, object]) -> None:
        try:
            replace_file(job_dir / "stop", json.dumps(order).encode(), private=True)
        except OSError:
            # A full disk must not keep a job running; these signals are the same orders.
            self._signal(job_dir, signal.SIGQUIT if order["kill"] else signal.SIGTERM)

    def _signal(self, job_dir: Path, number: signal.Signals) -> None:
        for line in _Status(job_dir).read():
            if isinstance(line, _Started) and self.alive(job_dir):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(line.pid, number)

    async def follow_logs(
        self,
        job_dir: Path,
        ranks: Iterable[int],
        from_seqs: Mapping[int, int],
        *,
        follow: bool,
        pick: LogPick = EVERY_LINE,
    ) -> AsyncIterator[bytes]:
        """Yield whole packed records, at most 256 KiB at a time, merged by time over the ranks.

        With `follow` it goes on until the shim is gone (or did not come within 10 s) and
        everything was read. A caller that comes back misses and doubles nothing if it names
        the last `seq` + 1 of each rank.

        Args:
            from_seqs: the lowest `seq` wanted of a rank; all where it is not named.
            pick: what is wanted; of a rank in `from_seqs` only its stream counts, for its viewer
                has begun.
        """
        cursors: list[_Cursor] = []
        for rank in sorted(set(ranks)):
            if rank in from_seqs:
                begun = LogPick(stderr=pick.stderr)
                cursors.append(_Cursor(job_dir, rank, from_seqs[rank], begun))
            elif pick.tail is None:
                cursors.append(_Cursor(job_dir, rank, 0, pick))
            else:  # in a thread: megabytes are read
                seq, at = await asyncio.to_thread(_tail_begins, job_dir, rank, pick)
                cursors.append(_Cursor(job_dir, rank, seq, pick, at))
        give_up = time.monotonic() + START_DEADLINE_S
        while True:
            started = (job_dir / "status").exists() or time.monotonic() > give_up
            over = not follow or (started and not self.alive(job_dir))
            batch, moved = _next_batch(cursors)
            if batch:
                yield batch
            if moved or batch:
                await asyncio.sleep(0)  # a long log must not hold up the loop
            elif over:
                return
            else:
                await asyncio.sleep(POLL_S)

    def tail_lines(self, job_dir: Path, rank: int, count: int) -> tuple[str, ...]:
        """Return the last lines of a rank that explain its end; see `logrecord.last_lines`."""
        data = _end_of_log(job_dir, rank, TAIL_BYTES)
        whole = len(data) < TAIL_BYTES
        return last_lines(_records_at_end(data, rank, whole=whole), count)


def _end_of_log(job_dir: Path, rank: int, size: int) -> bytes:
    """Return the last bytes of a rank's log, at most `size`."""
    data = b""
    for start in reversed(_segments(job_dir, rank)):
        with contextlib.suppress(OSError):
            data = _end_of(_log_path(job_dir, rank, start), size - len(data)) + data
    return data


def _tail_begins(job_dir: Path, rank: int, pick: LogPick) -> tuple[int, int]:
    """Return where the last lines that are wanted begin, as `begin_of_tail`."""
    count, now, size = pick.tail or 0, time.time(), TAIL_BYTES
    while True:
        data = _end_of_log(job_dir, rank, size)
        whole = len(data) < size
        records = _records_at_end(data, rank, whole=whole)
        found = [one for one in records if pick.takes(one.stream, one.wall, now)]
        enough = sum(one.data.count(b"\n") for one in found) > count
        if enough or whole or size >= TAIL_READ_MAX:
            break
        size *= 4
    if not count and records and not found:
        return records[-1].seq + 1, 0
    # Where fewer lines are there, all that was read may be shown.
    return begin_of_tail(found, count) if enough or not records else (records[0].seq, 0)


def _records_at_end(data: bytes, rank: int, *, whole: bool) -> list[LogRecord]:
    """Find the first place from which records of consecutive numbers reach to the end."""
    mark = struct.pack(">H", rank)
    at = 0 if whole else data.find(mark)
    while 0 <= at <= len(data) - HEADER.size:
        _, seq, _, stream, length = HEADER.unpack_from(data, at)
        after = at + HEADER.size + length
        # Data may look like a header, but hardly like two with consecutive numbers.
        if whole or (
            stream in (1, 2, 3)
            and length <= DATA_MAX
            and after <= len(data) - HEADER.size
            and HEADER.unpack_from(data, after)[:2] == (rank, seq + 1)
        ):
            with contextlib.suppress(RemoteProtocolError):
                return RecordParser().feed(data[at:])
        at = -1 if whole else data.find(mark, at + 1)
    return []


def _log_path(job_dir: Path, rank: int, start: int) -> Path:
    return job_dir / "logs" / shim.segment_name(rank, start)


def _segments(job_dir: Path, rank: int) -> list[int]:
    """Return where the files that are left of a rank's log begin, in bytes, the oldest first."""
    mine = re.compile(rf"rank{rank}\.(?:(\d{{1,18}})\.)?log")
    try:
        names = os.listdir(job_dir / "logs")
    except FileNotFoundError:
        return []
    return sorted(int(found[1] or 0) for name in names if (found := mine.fullmatch(name)))


def _pread(path: Path, size: int, offset: int) -> bytes:
    fd = os.open(path, _READ)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def _end_of(path: Path, size: int) -> bytes:
    """Return the last bytes of a file, at most `size`."""
    fd = os.open(path, _READ)
    try:
        return os.pread(fd, size, max(0, os.fstat(fd).st_size - size))
    finally:
        os.close(fd)


class _Cursor:
    """A place in one rank's log; at most one batch of records is read ahead."""

    def __init__(
        self,
        job_dir: Path,
        rank: int,
        from_seq: int,
        pick: LogPick = EVERY_LINE,
        cut: int = 0,  # bytes of the record `from_seq` that are not wanted
    ) -> None:
        self.rank = rank
        self.heads: deque[tuple[float, bytes]] = deque()  # (wall, packed record)
        self._job_dir = job_dir
        self._from_seq = from_seq
        self._pick = pick
        self._cut = cut
        self._now = time.time()
        self._start = self._offset = self._seq = 0  # of the file, and from the log's beginning
        self._wall = 0.0
        self._damaged = False
        self._skip_known()

    def _skip_known(self) -> None:
        """Begin in the last file in which what is wanted can be."""
        if self._from_seq <= 1 and self._pick.since_s is None:
            return
        for start in reversed(_segments(self._job_dir, self.rank)):
            with contextlib.suppress(OSError, struct.error):
                head = _pread(_log_path(self._job_dir, self.rank, start), HEADER.size, 0)
                _, first, wall, _, _ = HEADER.unpack(head)
                old = self._pick.since_s is not None and wall < self._now - self._pick.since_s
                if first <= self._from_seq or old:
                    self._start = self._offset = start
                    self._seq = first - 1
                    return

    def _read(self) -> bytes:
        """Read on from here, in the next file where this one is at its end or was dropped."""
        try:
            path = _log_path(self._job_dir, self.rank, self._start)
            data = _pread(path, BATCH_MAX, self._offset - self._start)
            if data or self._offset == self._start:
                return data
            after = self._offset  # the next one begins where this one ended
        except FileNotFoundError:
            left = [at for at in _segments(self._job_dir, self.rank) if at >= self._offset]
            if not left:
                return b""
            after = left[0]
        try:
            data = _pread(_log_path(self._job_dir, self.rank, after), BATCH_MAX, 0)
        except FileNotFoundError:
            return b""
        self._start = self._offset = after
        return data

    def refill(self) -> bool:
        """Read on if there is more; True if anything was taken, wanted or not."""
        if self._damaged:
            return False
        data = self._read()
        at = 0
        while len(data) - at >= HEADER.size:
            rank, seq, wall, stream, length = HEADER.unpack_from(data, at)
            sound = stream in (1, 2, 3) and length <= DATA_MAX and 0 <= wall <= WALL_MAX
            if rank != self.rank or not sound:
                # A job may write into its own folder; say so instead of ending without a word.
                self._damaged = True
                text = f"log damaged at byte {self._offset + at}\n".encode()
                note = LogRecord(self.rank, self._seq + 1, self._wall, LogStream.NOTE, text)
                self.heads.append((self._wall, note.pack()))
                return True
            end = at + HEADER.size + length
            if end > len(data):
                break
            if seq > max(self._seq + 1, self._from_seq):
                gap = f"older lines were dropped, the first {self._start / 2**20:.0f} MiB\n"
                note = LogRecord(self.rank, seq - 1, wall, LogStream.NOTE, gap.encode())
                self.heads.append((wall, note.pack()))
            self._seq, self._wall = seq, wall
            if seq >= self._from_seq and self._pick.takes(stream, wall, self._now):
                piece = data[at:end]
                if self._cut and seq == self._from_seq:
                    body = piece[HEADER.size + self._cut :]
                    piece = LogRecord(rank, seq, wall, LogStream(stream), body).pack()
                self.heads.append((wall, piece))
            at = end
        self._offset += at
        return at > 0


def _next_batch(cursors: Iterable[_Cursor]) -> tuple[bytes, bool]:
    """Merge the next records by time; also return whether anything was read."""
    moved = False
    heap = []
    for cursor in cursors:
        if not cursor.heads:
            moved |= cursor.refill()
        if cursor.heads:
            heap.append((cursor.heads[0][0], cursor.rank, cursor))
    heapq.heapify(heap)
    batch: list[bytes] = []
    size = 0
    while heap:
        cursor = heap[0][2]
        size += len(cursor.heads[0][1])
        if size > BATCH_MAX:
            break
        batch.append(cursor.heads.popleft()[1])
        if cursor.heads or (cursor.refill() and cursor.heads):
            heapq.heapreplace(heap, (cursor.heads[0][0], cursor.rank, cursor))
        else:
            heapq.heappop(heap)
    return b"".join(batch), moved


class _Status:
    """Reads events as they are appended."""

    def __init__(self, job_dir: Path) -> None:
        self.count = 0
        self._path = job_dir / "status"
        self._offset = 0

    def read(self) -> list[_StatusLine]:
        """Return the complete events that are new."""
        try:
            data = _pread(self._path, STATUS_BATCH, self._offset)
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        lines: list[_StatusLine] = []
        for line in data.splitlines():
            self.count += 1
            try:
                lines.append(msgspec.json.decode(line, type=_StatusLine))
            except msgspec.DecodeError as exc:
                problem = f"status line {self.count} is damaged: {exc}"
                lines.append(_Problem(self.count, 0.0, problem))
        return lines


def _sweep(cookie: str) -> list[int]:
    deadline = time.monotonic() + _SWEEP_S
    while (left := shim.kill_leftovers(cookie, None)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
