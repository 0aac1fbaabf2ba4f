"""Owns the ranks of one job on one node: starts them, logs them, ends them. Outlives the agent.

Run by path as `python -I -S -X utf8 shim.py JOB_DIR` with its configuration as JSON on stdin (so
secrets never touch the disk); it then detaches. Standard library only, because it must start in
milliseconds under any interpreter. The job folder is its whole interface:

- `status`         appended NDJSON events, numbered from 1; locked (flock) while the shim lives
- `logs/rank<k>.log`  appended records, see `RECORD_FORMAT`; `core.logrecord` reads them. When it is
                   full the log goes on in `logs/rank<k>.<n>.log`, n the bytes before it, and the
                   oldest of `SEGMENTS` such files makes room for a new one
- `stop`           written by the agent: `{"grace_s": 30, "kill": false, "reason": ""}`
- `lease`          touched by the agent; the ranks end when it was not for `agent_silence_s`. With
                   `fence_grace_s` its time is set to the end of the lease instead, in seconds
                   since the machine's boot, after which they end whatever the agent does
- `logs/rank<k>.raised`  made by a Python rank that an uncaught exception ends (`rank_hook`)

It does not know what a job means, who else takes part or whether a rank's end is a failure: it
reports each end and goes on until all its ranks are gone. Memory does not grow with the output.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time

TYPE_CHECKING = False  # importing `typing` would double the start-up time
if TYPE_CHECKING:
    import resource
    from collections.abc import Callable, Iterator
    from typing import Any

# rank, sequence number within the rank (from 1), wall clock (display only), stream, length; then
# the bytes: one or more whole lines, or a piece of a line that is too long or stays unfinished.
RECORD_FORMAT = ">HQdBI"  # equal to core.logrecord's; a test compares them
OUT, ERR, NOTE = 1, 2, 3  # streams; NOTE is the shim's own word

CONFIG_MAX = 4 * 1024 * 1024  # bytes of JSON: 1,024 ranks with 4 KiB of arguments and variables
CONFIG_DEADLINE_S = 30  # the agent writes it at once; a stuck one must not leave a stuck shim
DATA_MAX = 64 * 1024  # bytes in one record; longer lines are split
LOG_MAX = 256 * 1024 * 1024  # bytes per rank on disk: 3 million lines; older ones are dropped
SEGMENTS = 4  # files for them; more would drop less at once
MASK_MIN = 8  # bytes; hiding shorter secrets would tear holes into ordinary words

_POLL_S = 0.05  # stop file and clocks; a stop is noticed within this
_LEASE_POLL_S = 1.0
# Waiting longer for a newline would hide a bar without one; shorter would cut lines that a
# loaded machine writes in two calls.
_PARTIAL_MAX_S = 1.0
# After a rank's main process ended its children may still clean up (DataLoader workers, the
# resource tracker); past this they are killed.
_LEFTOVER_GRACE_S = 0.5
_SWEEP_S = 5.0  # until a process that SIGKILL does not end is reported instead of waited for
_STATUS_RETRY_S = 60.0  # on a full disk, how long the last events are tried before giving up
_DRAIN_MAX = 1024 * 1024  # bytes still read at a rank's end; no pipe of ours holds more
# A wake-up for every few KiB of a flood costs a rank beside it more than the copying. So a busy
# pipe may fill for some milliseconds before the next read, and one that fills soon is made larger.
_PAUSE_MAX_S = 0.005  # higher saves little, and all lines beside a flood come so much later
_PAUSE_MIN_S = 0.00025  # the first one: what a rank at 1 GB/s writes meanwhile still fits
_ROOMY, _TIGHT = 1 / 8, 3 / 8  # of a pipe, in bytes; pieces of half a page fill one at a half
_PIPE_NARROW = 16 * 1024  # bytes; where the system does not say: macOS begins with it
_PIPE_WIDE = 1024 * 1024  # the most that Linux gives to anybody, and to a user 64 times
_HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank_hook")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_OOM_SCORE = b"300"  # so that the kernel ends a rank before the agent or the desktop
_MEMORY_KILL_S = 60.0  # until one explains nothing any more; a large process takes seconds to end


class _AppendFile:
    """A file that only ever holds whole appends, also when the disk is full."""

    def __init__(self, path: str, flags: int = 0) -> None:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path, flags, 0o600)
        self.size = os.fstat(self.fd).st_size

    def append(self, data: bytes) -> bool:
        """Write all of `data` or nothing; False where the disk refuses."""
        written = 0
        with contextlib.suppress(OSError):
            while written < len(data):
                written += os.write(self.fd, data[written:])
        if written < len(data):
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self.size)
            return False
        self.size += written
        return True


class _RankLog:
    """The records of one rank. Never blocks the rank: what does not fit is dropped and counted,
    and the last 64 KiB of each stream are kept for the end, where tracebacks are."""

    def __init__(self, folder: str, rank: int, limit: int, mask: list[bytes]) -> None:
        self._folder = folder
        self._rank = rank
        self._starts = [0]  # of the files, in bytes from the log's beginning
        self._file = _AppendFile(self._path(0))
        self._segment_max = limit // SEGMENTS
        self._mask = mask
        self._seq = 0
        self._dropped = 0
        self._kept = {OUT: b"", ERR: b""}

    def write(self, stream: int, data: bytes) -> None:
        for secret in self._mask:
            data = data.replace(secret, b"***")
        for piece in _pieces(data):
            if not self._settle() or not self._append(stream, piece):
                self._dropped += len(piece)
                if stream in self._kept:
                    self._kept[stream] = (self._kept[stream] + piece)[-DATA_MAX:]

    def note(self, text: str) -> None:
        self._append(NOTE, text.encode("utf-8", "backslashreplace") + b"\n")

    def close(self) -> None:
        self._settle()
        os.close(self._file.fd)

    def _settle(self) -> bool:
        """State a gap, then what was kept of it, before anything else is written."""
        if not self._dropped:
            return True
        kept = {stream: _whole_lines(data) for stream, data in self._kept.items()}
        lost = self._dropped - sum(map(len, kept.values()))
        if not self._append(NOTE, f"disk full, {lost} bytes dropped\n".encode()):
            return False
        self._dropped = 0
        self._kept = {OUT: b"", ERR: b""}
        for stream, data in kept.items():
            if data:
                self._append(stream, data)
        return True

    def _append(self, stream: int, data: bytes) -> bool:
        head = struct.pack(RECORD_FORMAT, self._rank, self._seq + 1, time.time(), stream, len(data))
        full = self._file.size + len(head) + len(data) > self._segment_max
        if full and self._file.size and not self._go_on():
            return False
        if not self._file.append(head + data):
            return False
        self._seq += 1
        return True

    def _go_on(self) -> bool:
        """Begin the next file, for which the oldest makes room; False where the disk refuses."""
        if len(self._starts) == SEGMENTS:
            with contextlib.suppress(OSError):
                os.unlink(self._path(self._starts[0]))
            del self._starts[0]
        start = self._starts[-1] + self._file.size
        try:
            fresh = _AppendFile(self._path(start))
        except OSError:
            return False
        os.close(self._file.fd)
        self._file = fresh
        self._starts.append(start)
        return True

    def _path(self, start: int) -> str:
        return f"{self._folder}/{segment_name(self._rank, start)}"


def segment_name(rank: int, start: int) -> str:
    """Name the file of a rank's log that begins `start` bytes after the log's beginning."""
    return f"rank{rank}.{start}.log" if start else f"rank{rank}.log"


class _Stream:
    """One pipe of a rank, cut into whole lines; a carriage return ends a line as well."""

    def __init__(self, fd: int, kind: int, log: _RankLog) -> None:
        self.fd = fd
        self._kind = kind
        self._log = log
        self._partial = b""
        self._since = 0.0  # when the first byte of `_partial` came
        self._widened = False
        self._capacity = _pipe_capacity(fd)
        self.fill = 0.0  # the part of the pipe that the last read found in use

    def read(self, now: float) -> int | None:
        """Take what the pipe can hold; None at the end of the stream, else the number of bytes."""
        taken = 0
        more = True
        while more and taken < self._capacity:
            room = DATA_MAX + 1 - len(self._partial)
            try:
                data = os.read(self.fd, room)
            except BlockingIOError:
                break
            if not data:
                return None
            self._take(data, now)
            taken += len(data)
            more = len(data) == room
        self.fill = taken / self._capacity
        if self.fill > _TIGHT:
            self._widen()
        return taken

    def _take(self, data: bytes, now: float) -> None:
        if not self._partial:
            self._since = now
        self._partial += data
        # A carriage return at the very end may be the first half of "\r\n".
        cut = max(self._partial.rfind(b"\n"), self._partial.rfind(b"\r", 0, -1)) + 1
        if not cut and len(self._partial) > DATA_MAX:
            cut = _piece_end(self._partial, 0)
        if cut:
            self._log.write(self._kind, self._partial[:cut])
            self._partial = self._partial[cut:]
            self._since = now

    def _widen(self) -> None:
        if sys.platform == "linux" and not self._widened:
            self._widened = True
            with contextlib.suppress(OSError):  # the user's pipes hold too much already
                self._capacity = fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_WIDE)

    def flush(self, older_than: float) -> None:
        """Write the unfinished line if its first byte came before `older_than`."""
        if self._partial and self._since < older_than:
            self._log.write(self._kind, self._partial)
            self._partial = b""

    def drain(self, now: float) -> None:
        """Read what the pipe still holds, without waiting for processes that keep it open."""
        taken = 0
        while taken < _DRAIN_MAX and (count := self.read(now)):
            taken += count
        self.flush(float("inf"))


class _Rank:
    def __init__(self, config: dict[str, Any], log: _RankLog) -> None:
        self.number: int = config["rank"]
        self.config = config
        self.log = log
        self.pid = 0
        self.streams: dict[int, _Stream] = {}  # by descriptor; those not at their end yet
        self.exited_at: float | None = None  # the main process is a zombie: we hold its number
        self.reaped: tuple[int, resource.struct_rusage] | None = None
        self.gone = False
        self.stopped = False
        self.mark = ""  # the file that says that it raised; "" for a rank that is not Python
        self.raised_at: float | None = None


class Shim:
    """One job's ranks on this node."""

    def __init__(self, job_dir: str, config: dict[str, Any]) -> None:
        self._dir = job_dir
        self._grace_s = float(config["grace_s"])
        self._silence_s = float(config["agent_silence_s"])
        self._fence_grace_s: float | None = config.get("fence_grace_s")
        self._until: float | None = None  # the end of the lease, where that ends the ranks
        self._raised_grace_s = float(config.get("raised_grace_s", self._grace_s))
        self._cookie: str = config["cookie"]
        limit = int(config.get("log_limit_bytes", LOG_MAX))
        mask = [_encode(secret) for secret in config.get("secrets", ())]
        mask = sorted((m for m in mask if len(m) >= MASK_MIN), key=len, reverse=True)
        self._rank_umask = os.umask(0o077)  # ours is strict; the ranks keep the agent's
        self._status = _locked_status(job_dir)
        self._events = 0
        self._pending: list[bytes] = []
        self._ranks = [
            _Rank(c, _RankLog(f"{job_dir}/logs", c["rank"], limit, mask)) for c in config["ranks"]
        ]
        self._kill_at: float | None = None  # the end of the grace, once stopping
        self._terms = 0
        self._stop_seen: object = None
        self._lease_seen: object = None
        self._lease_at = self._next_poll = self._next_lease = 0.0
        self._pause_s = 0.0  # before the next look at the pipes
        self._memory_kills = _MemoryKills()
        self._libc: Any = None

    def run(self) -> None:
        """Run the ranks to their end; returns when no process of the job is left."""
        self._selector = selectors.DefaultSelector()
        self._catch_signals()
        self._lease_at = time.monotonic()
        self._event("started", pid=os.getpid(), cookie=self._cookie, boot=boot_id())
        if self._pending:  # a full disk: nobody would know of the ranks, nor how to stop them
            return
        try:
            self._become_reaper()
            self._poll_stop(time.monotonic())
            for rank in self._ranks:
                self._start(rank)
            while not all(rank.gone for rank in self._ranks):
                self._turn()
            self._sweep()
        except BaseException as exc:
            self._event("error", message=f"shim: {type(exc).__name__}: {exc}")
            self._abandon()
            raise
        finally:
            self._event("done")
            deadline = time.monotonic() + _STATUS_RETRY_S
            while not self._flush_status() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            fcntl.flock(self._status.fd, fcntl.LOCK_UN)  # nobody waits for the disk
            with contextlib.suppress(OSError):
                os.fsync(self._status.fd)

    def _turn(self) -> None:
        if self._pause_s:
            time.sleep(self._pause_s)
        asked = time.monotonic()
        ready = self._selector.select(_POLL_S)
        now = time.monotonic()
        fill = 0.0
        for key, _ in ready:
            if isinstance(key.data, _Rank):
                stream = key.data.streams[key.fd]
                if stream.read(now) is None:
                    self._close(key.data, key.fd)
                fill = max(fill, stream.fill)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
        self._pause_s = _next_pause_s(self._pause_s, now - asked, fill)
        self._note_exits(now)
        for rank in self._ranks:
            over = rank.exited_at is not None and now - rank.exited_at >= _LEFTOVER_GRACE_S
            if rank.exited_at is not None and not rank.gone and (over or not rank.streams):
                self._finish(rank, now)
        if now >= self._next_poll:
            self._next_poll = now + _POLL_S
            self._poll_stop(now)
            self._poll_lease(now)
            self._poll_raised(now)
            self._flush_status()
            self._reap_orphans()
            for rank in self._ranks:
                for stream in rank.streams.values():
                    stream.flush(now - _PARTIAL_MAX_S)
        if self._terms:
            self._stop(now, self._grace_s, self._terms > 1, "signal to the shim")
        if self._kill_at is not None and now >= self._kill_at:
            for rank in self._running():
                rank.stopped = rank.raised_at is None
                _kill_group(rank.pid)

    # -- starting

    def _start(self, rank: _Rank) -> None:
        if self._kill_at is not None:
            rank.stopped = rank.gone = True
            self._event("rank-exited", rank=rank.number, code=None, signal=None, stopped=True)
            return
        argv = [_encode(arg) for arg in rank.config["argv"]]
        env = {_encode(k): _encode(v) for k, v in rank.config["env"].items()}
        env.setdefault(b"PYTHONUNBUFFERED", b"1")
        env[b"GPULAYER_COOKIE"] = self._cookie.encode()
        if rank.config.get("python"):
            rank.mark = f"{self._dir}/logs/rank{rank.number}.raised"
            env[b"GPULAYER_RAISED"] = os.fsencode(rank.mark)
            paths = [os.fsencode(_HOOK), env.get(b"PYTHONPATH", b"")]
            env[b"PYTHONPATH"] = os.pathsep.encode().join(filter(None, paths))
        pipes = [os.pipe(), os.pipe()]
        try:
            child = subprocess.Popen(
                argv,
                env=env,
                cwd=_encode(rank.config["cwd"]),
                stdin=subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                start_new_session=True,
                umask=self._rank_umask,
                preexec_fn=_child_setup(os.getpid(), self._libc, rank.config.get("cpus", ())),
            )
        except (OSError, ValueError) as exc:
            for pipe in pipes:
                os.close(pipe[0])
            self._not_started(rank, exc)
            return
        finally:
            for pipe in pipes:
                os.close(pipe[1])
        child.returncode = 0  # we reap it ourselves; Popen must neither wait nor warn
        rank.pid = child.pid
        for pipe, kind in zip(pipes, (OUT, ERR), strict=True):
            os.set_blocking(pipe[0], False)
            rank.streams[pipe[0]] = _Stream(pipe[0], kind, rank.log)
            self._selector.register(pipe[0], selectors.EVENT_READ, rank)
        self._event("rank-started", rank=rank.number, pid=rank.pid)

    def _not_started(self, rank: _Rank, exc: OSError | ValueError) -> None:
        # A shell's codes: 127 no such program, 126 found but not runnable.
        code = 127 if isinstance(exc, FileNotFoundError) else 126
        reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        program = rank.config["argv"][0]
        where = os.fsdecode(exc.filename) if isinstance(exc, OSError) and exc.filename else program
        detail = "" if where == program else f" {where!r}"
        rank.log.note(f"cannot start {program!r}: {reason.lower()}{detail}")
        rank.log.close()
        rank.gone = True
        self._event("rank-exited", rank=rank.number, code=code, signal=None, stopped=False)

    # -- ending

    def _running(self) -> Iterator[_Rank]:
        return (r for r in self._ranks if r.pid and r.exited_at is None)

    def _note_exits(self, now: float) -> None:
        for rank in self._running():
            # WNOWAIT leaves the zombie in place: until `_finish` neither its number nor its
            # group's can belong to a stranger, so both may be signalled.
            if hasattr(os, "waitid"):
                flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                if os.waitid(os.P_PID, rank.pid, flags) is None:
                    continue
            else:  # macOS before Python 3.13: reap now, and end the group in the same breath
                pid, status, usage = os.wait4(rank.pid, os.WNOHANG)
                if not pid:
                    continue
                _kill_group(rank.pid)
                rank.reaped = status, usage
            rank.exited_at = now

    def _finish(self, rank: _Rank, now: float) -> None:
        """The main process ended: end its group, complete its log, report."""
        if rank.reaped is None:
            _kill_group(rank.pid)
            _, status, usage = os.wait4(rank.pid, 0)
        else:
            status, usage = rank.reaped
        for fd in list(rank.streams):
            self._close(rank, fd)
        self._look_for_mark(rank, now)
        code = os.waitstatus_to_exitcode(status)
        if rank.raised_at is not None:
            # The exception ended it, whatever became of the clean-up; this is Python's code then.
            code, rank.stopped = code if code > 0 else 1, False
        signum = -code if code < 0 else None
        unit = 1024 if sys.platform == "darwin" else 1  # ru_maxrss: bytes there, KiB elsewhere
        peak_mib = usage.ru_maxrss // unit // 1024
        kill = limit_mib = None
        if signum == signal.SIGKILL and not rank.stopped:
            kill, limit_mib = self._memory_kills.explain(now), _memory_limit_mib()
        if kill == "yes":
            rank.log.note(f"killed by the kernel for memory: {peak_mib} of {limit_mib} MiB")
        rank.log.close()
        rank.gone = True
        self._event(
            "rank-exited",
            rank=rank.number,
            code=None if signum else code,
            signal=signum,
            stopped=rank.stopped,
            memory_peak_mib=peak_mib,
            memory_limit_mib=limit_mib,
            memory_kill=kill,
        )

    def _close(self, rank: _Rank, fd: int) -> None:
        rank.streams.pop(fd).drain(time.monotonic())
        self._selector.unregister(fd)
        os.close(fd)

    def _stop(self, now: float, grace_s: float, kill: bool, reason: str) -> None:
        """Begin or hasten the end; `reason` is empty where the keeper asked."""
        deadline = now if kill else now + grace_s
        if self._kill_at is not None:
            self._kill_at = min(self._kill_at, deadline)
            return
        self._kill_at = deadline
        self._event("stopping", reason=reason)
        self._note_exits(now)  # who ended by itself was not stopped
        for rank in self._running():
            self._look_for_mark(rank, now)
            rank.stopped = rank.raised_at is None
            if not kill:
                os.kill(rank.pid, signal.SIGTERM)  # an unreaped child: the number is ours

    def _poll_stop(self, now: float) -> None:
        path = os.path.join(self._dir, "stop")
        with contextlib.suppress(FileNotFoundError):
            seen = _identity(os.stat(path))
            if seen == self._stop_seen:
                return
            self._stop_seen = seen
            try:
                with open(path, encoding="utf-8") as file:
                    order = json.loads(file.read(8192))
                grace_s, kill = float(order["grace_s"]), bool(order["kill"])
                reason = str(order.get("reason", ""))  # an older agent gives none
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                grace_s, kill, reason = self._grace_s, False, ""  # but still an order to stop
            self._stop(now, grace_s, kill, reason)

    def _poll_lease(self, now: float) -> None:
        if now < self._next_lease:
            return
        self._next_lease = now + _LEASE_POLL_S
        self._memory_kills.look(now)
        with contextlib.suppress(OSError):
            stat = os.stat(os.path.join(self._dir, "lease"))
            if self._fence_grace_s is not None:
                self._until = stat.st_mtime
            if (seen := _identity(stat)) != self._lease_seen:
                self._lease_seen = seen
                self._lease_at = now
        if self._until is not None and self._fence_grace_s is not None:
            left = self._until - _boot_clock()
            if left <= 0:
                why = "the lease of this machine ran out"
                self._stop(now, max(0.0, left + self._fence_grace_s), False, why)
        if now - self._lease_at > self._silence_s and self._kill_at is None:
            why = f"no word from the agent for {self._silence_s} s"
            self._stop(now, self._grace_s, False, why)

    def _poll_raised(self, now: float) -> None:
        """End ranks that hang in their clean-up: their peers wait for them."""
        for rank in self._running():
            self._look_for_mark(rank, now)
            if rank.raised_at is not None and now - rank.raised_at >= self._raised_grace_s:
                why = f"raised an exception and did not end within {self._raised_grace_s:g} s"
                rank.log.note(f"{why}: killed")
                _kill_group(rank.pid)
                rank.raised_at = float("inf")  # once is enough

    def _look_for_mark(self, rank: _Rank, now: float) -> None:
        if rank.raised_at is None and rank.mark and os.path.lexists(rank.mark):
            rank.raised_at = now

    def _sweep(self) -> None:
        """End what escaped from the groups: other sessions, daemons, renamed processes."""
        deadline = time.monotonic() + _SWEEP_S
        while left := kill_leftovers(self._cookie, os.getpid(), self._reap_orphans):
            if time.monotonic() > deadline:
                self._event("error", message=f"processes that cannot be killed: {left}")
                return
            time.sleep(0.02)

    def _abandon(self) -> None:
        """After our own error: end everything, report what can be reported."""
        self._kill_at = now = time.monotonic()
        for rank in self._ranks:
            with contextlib.suppress(Exception):
                if rank.pid and not rank.gone:
                    rank.stopped = rank.stopped or rank.exited_at is None
                    self._finish(rank, now)
                elif not rank.gone:
                    self._start(rank)
        self._sweep()

    def _reap_orphans(self) -> None:
        if any(r.exited_at is not None and not r.gone for r in self._ranks):
            return  # its zombie would be found again and again
        if not hasattr(os, "waitid"):
            return  # no orphans without a subreaper
        ranks = {r.pid for r in self._ranks if not r.gone}
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in ranks:
                    return
                os.waitpid(found.si_pid, os.WNOHANG)

    # -- our own process

    def _catch_signals(self) -> None:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self._selector.register(reader, selectors.EVENT_READ, None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)  # stop; again: kill
        signal.signal(signal.SIGQUIT, self._on_term)  # kill
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_term(self, number: int, _: object) -> None:
        self._terms += 2 if number == signal.SIGQUIT else 1

    def _become_reaper(self) -> None:
        """Make orphans of the ranks our children, so that none can hide (Linux)."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                self._libc = ctypes.CDLL(None)
                self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def _event(self, event: str, **fields: object) -> None:
        self._events += 1
        # `mono` counts since the machine's boot, so the agent can tell an event's age.
        line = {"n": self._events, "event": event, "mono": time.monotonic(), **fields}
        self._pending.append(json.dumps(line).encode() + b"\n")
        self._flush_status()

    def _flush_status(self) -> bool:
        while self._pending and self._status.append(self._pending[0]):
            del self._pending[0]
        return not self._pending


def _locked_status(job_dir: str) -> _AppendFile:
    """Make the status file. It is locked before it has its name, because whoever finds a status
    file without a lock takes the shim for gone."""
    path = os.path.join(job_dir, "status")
    # O_EXCL, and a look only then: one shim per job folder, ever.
    status = _AppendFile(f"{path}.new", os.O_EXCL)
    fcntl.flock(status.fd, fcntl.LOCK_EX)
    if os.path.lexists(path):
        os.unlink(f"{path}.new")
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    os.rename(f"{path}.new", path)
    return status


def kill_leftovers(
    cookie: str, root: int | None, reap: Callable[[], None] = lambda: None
) -> list[int]:
    """SIGKILL each process that carries the cookie or descends from `root`; return those found.

    A number is signalled only through a handle opened before it was checked, so a reused one is
    never hit. Call until nothing is found.
    """
    found = []
    for pid in _candidates(cookie):
        if pid == os.getpid() or not _is_ours(pid, cookie, root):
            continue
        found.append(pid)
        try:
            handle = os.pidfd_open(pid)
        except (AttributeError, OSError):  # macOS; kernels before 5.3; sandboxes
            handle = -1
        try:
            if not _is_ours(pid, cookie, root):
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if handle >= 0:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
        finally:
            if handle >= 0:
                os.close(handle)
    reap()
    return found


def _candidates(cookie: str) -> list[int]:
    if os.path.isdir("/proc/self"):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    # macOS: `ps -E` shows the environment of our own processes.
    listing = subprocess.run(
        ["/bin/ps", "-axEww", "-o", "pid=,command="],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=10,
        check=False,
    ).stdout
    mark = b"GPULAYER_COOKIE=" + cookie.encode()
    return [int(line.split(None, 1)[0]) for line in listing.splitlines() if mark in line]


def _is_ours(pid: int, cookie: str, root: int | None) -> bool:
    if not os.path.isdir("/proc/self"):
        return pid in _candidates(cookie)
    state, parent = _state_and_parent(pid)
    if state in ("Z", "X", ""):
        return False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        if b"GPULAYER_COOKIE=" + cookie.encode() in file.read().split(b"\0"):
            return True
    while root is not None and parent > 1:
        if parent == root:
            return True
        _, parent = _state_and_parent(parent)
    return False


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may hold anything
        return fields[0].decode(), int(fields[1])
    except (OSError, IndexError):
        return "", 0


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _child_setup(shim: int, libc: Any, cpus: list[int]) -> Callable[[], None]:
    """What runs in a rank between fork and exec; safe because the shim has one thread."""

    def setup() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # an ignored one would stay ignored
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != shim:
                os._exit(1)  # it died before the line above took effect
            with contextlib.suppress(OSError):
                fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
                os.write(fd, _OOM_SCORE)
                os.close(fd)
        if cpus and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # they were taken away meanwhile: run anywhere
                os.sched_setaffinity(0, cpus)

    return setup


def _pipe_capacity(fd: int) -> int:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
    return _PIPE_NARROW


def _next_pause_s(pause_s: float, waited_s: float, fill: float) -> float:
    """How long to let the pipes fill, after `pause_s` and a wait left the fullest at `fill`.

    Doubles while there is room and ends at once where there is little: no rank may have to wait
    for our sake.
    """
    if waited_s > _PAUSE_MAX_S or fill > _TIGHT:  # in quiet times each line is taken as it comes
        return 0.0
    if fill > _ROOMY:
        return pause_s
    return min(max(2 * pause_s, _PAUSE_MIN_S), _PAUSE_MAX_S)


def _pieces(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        end = _piece_end(data, start)
        yield data[start:end]
        start = end


def _piece_end(data: bytes, start: int) -> int:
    """Where the record that begins at `start` ends: after a line if one fits, else not inside a
    UTF-8 character."""
    end = start + DATA_MAX
    if end >= len(data):
        return len(data)
    if line := data.rfind(b"\n", start, end) + 1:
        return line
    for back in range(end, end - 4, -1):
        if data[back] & 0xC0 != 0x80:
            return back
    return end


def _whole_lines(kept: bytes) -> bytes:
    """Without the half line at the front, if the front was cut off."""
    return kept[kept.find(b"\n") + 1 :] if len(kept) == DATA_MAX else kept


def boot_id() -> str:
    """Return what changes with each start of this machine, "" where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        return ""


def _boot_clock() -> float:
    """As `clock.boot_clock`."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


class _MemoryKills:
    """The kernel's kills for memory, each of which explains the end of one process.

    Counted in the control group of the shim and its ranks. Where there is none, on the whole
    machine, and then another program may be the one that was killed.
    """

    def __init__(self) -> None:
        names = [name for group in _memory_groups() for name in _kill_counters(group)]
        own = [name for name in names if _kills_in(name) is not None]
        self._certain = bool(own)
        self._name = (own or ["/proc/vmstat"])[0]
        self._count = _kills_in(self._name)
        self._recent: list[float] = []  # when each was seen

    def look(self, now: float) -> None:
        """Note when a kill was counted; call it every few seconds."""
        count = _kills_in(self._name)
        self._recent = [at for at in self._recent if now - at < _MEMORY_KILL_S]
        self._recent += [now] * ((count or 0) - (self._count or 0))
        self._count = count

    def explain(self, now: float) -> str | None:
        """Say if a process was ended by one: yes, likely or no; None where that is not known."""
        self.look(now)
        if self._count is None or not self._recent:
            return None if self._count is None else "no"
        del self._recent[0]
        return "yes" if self._certain else "likely"


def _kill_counters(group: str) -> tuple[str, ...]:
    # Without ".local" those of the groups below are counted too; it is missing before Linux 5.2.
    names = ("memory.events.local", "memory.events", "memory.oom_control")
    return tuple(f"{group}/{name}" for name in names)


def _kills_in(counter: str) -> int | None:
    """How often the kernel has killed for memory; None where it does not say."""
    with contextlib.suppress(OSError), open(counter, encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _memory_groups() -> Iterator[str]:
    """The control groups that bind this process, its own first; Linux only, of either version."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, kinds, path = line.rstrip("\n").split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            # The groups around it count as well; in a container not all of the path is there.
            parts = ["memory"] if kinds else []
            parts += [part for part in path.split("/") if part]
            for depth in range(len(parts), bool(kinds) - 1, -1):
                yield "/".join(("/sys/fs/cgroup", *parts[:depth]))


def _memory_limit_mib() -> int:
    """What the kernel grants this process: the lowest limit of its groups, or all there is."""
    limits_bytes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in _memory_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError), open(f"{group}/{name}") as limit:
                limits_bytes.append(int(limit.read()))  # or "max"
    return min(limits_bytes) // 2**20


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")  # bytes that are no UTF-8 arrive as they were


def main() -> None:
    """Read the configuration, detach, run. Fails before detaching if it can fail at all."""
    signal.alarm(CONFIG_DEADLINE_S)
    data = sys.stdin.buffer.read(CONFIG_MAX + 1)
    signal.alarm(0)
    if len(data) > CONFIG_MAX:
        sys.exit(f"configuration exceeds {CONFIG_MAX} bytes")
    shim = Shim(os.path.abspath(sys.argv[1]), json.loads(data))
    if os.fork():
        os._exit(0)  # the agent gets its child back at once; the shim belongs to init
    # glibc gives the end of its heap back after each large block that is freed, and faults it in
    # again for the next one, page by page. Having seen a larger one go, it keeps as much.
    bytes(2 * _PIPE_WIDE)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    shim.run()


if __name__ == "__main__":
    main()
