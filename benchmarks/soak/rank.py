"""The program of every rank in the soak: it prints numbered lines and notes what is true.

    python rank.py SIDE FINISH CODES PAUSE_S STUBBORN

Notes lie in SIDE, under ATTEMPT.RANK: `starts` (when and where, a line each), `beat` (the last
moment that it lived), `printed` (how many lines), `writes` (which count was in its files from when
on), `found` (what the attempts before have left to it) and `code` (it ended by itself). It counts
in one file of `$GPULAYER_OUT` and in one of its working folder, until FINISH is there; it ends with
its rank's code. Where STUBBORN is 1, only SIGKILL ends it before. The clock is CLOCK_BOOTTIME,
which all hosts of the test LAN share.
"""

import os
import signal
import sys
import time
from pathlib import Path

COUNT_S = 0.25  # between two writes of the count

side, finish, codes, pause_s = sys.argv[1], sys.argv[2], sys.argv[3].split(","), float(sys.argv[4])
if sys.argv[5] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
attempt, rank = os.environ.get("GPULAYER_RESTART", "0"), int(os.environ["RANK"])


def clock() -> float:
    # Elsewhere nobody compares one machine's time with another's.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def note(what: str) -> int:
    return os.open(f"{side}/{attempt}.{rank}.{what}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def number_in(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def write(path: Path, number: int) -> None:
    fresh = path.with_suffix(".tmp")
    fresh.write_text(f"{number}")
    fresh.replace(path)


out = Path(os.environ["GPULAYER_OUT"]) / "count"
work = Path(f"count-{rank}")
zero = Path(os.environ.get("GPULAYER_RESTORED", "nowhere")) / "count"
os.write(note("starts"), f"{clock()} {os.uname().nodename} {os.getpid()}\n".encode())
os.write(note("found"), f"{number_in(out)} {number_in(work)} {number_in(zero)}".encode())
count = max(number_in(out), number_in(work))
writes = note("writes")
# Not for appending, which pwrite would do whatever its offset.
beat = os.open(f"{side}/{attempt}.{rank}.beat", os.O_WRONLY | os.O_CREAT, 0o600)
printed = os.open(f"{side}/{attempt}.{rank}.printed", os.O_WRONLY | os.O_CREAT, 0o600)
number, count_at = 0, 0.0
while not os.path.exists(finish):
    print("line", attempt, number, flush=True)
    number += 1
    os.pwrite(printed, b"%d" % number, 0)
    now = clock()
    os.pwrite(beat, f"{now:.6f}".encode(), 0)
    if now >= count_at:
        count, count_at = count + 1, now + COUNT_S
        write(out, count)
        write(work, count)
        os.write(writes, f"{count} {clock():.6f}\n".encode())
    time.sleep(pause_s)
print("all", attempt, number, flush=True)
os.pwrite(beat, f"{clock():.6f}".encode(), 0)
os.write(note("code"), codes[rank].encode())
sys.exit(int(codes[rank]))
