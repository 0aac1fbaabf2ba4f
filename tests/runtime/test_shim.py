"""What a shim does to real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lan
import psutil
import pytest
from gpulayer_mesh import shim
from gpulayer_mesh.clock import boot_clock
from gpulayer_mesh.core import logrecord
from gpulayer_mesh.core.hosted import RankExited, ShimDone, ShimLost
from gpulayer_mesh.core.jobspec import MemoryKill
from gpulayer_mesh.core.logrecord import LogStream, RecordParser
from gpulayer_mesh.errors import GpuLayerError
from gpulayer_mesh.runtime.shims import RankCommand
from shim_jobs import DEADLINE_S, Job, eventually, is_running

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
SLEEP = "import time; print('up'); time.sleep(600)"
# Ignores SIGTERM, as a rank inside native code does.
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)"


def test_shim_writes_the_format_the_rest_reads() -> None:
    assert shim.RECORD_FORMAT == logrecord.RECORD_FORMAT
    assert shim.DATA_MAX == logrecord.DATA_MAX
    assert tuple(LogStream) == (shim.OUT, shim.ERR, shim.NOTE)


async def test_exit_codes_arrive(tmp_path: Path) -> None:
    job = await Job(tmp_path, "pass", "raise SystemExit(7)", "import sys; sys.exit('text')").start()
    ends = await job.run(ShimDone)
    assert [(end.code, end.signal, end.stopped) for end in ends] == [
        (0, None, False),
        (7, None, False),
        (1, None, False),
    ]
    assert await job.output(2, LogStream.ERR) == b"text\n"


async def test_signal_that_we_did_not_send_is_reported_as_one(tmp_path: Path) -> None:
    kill = "import os; print('last words'); os.kill(os.getpid(), {})"
    job = await Job(tmp_path, kill.format(9), kill.format(11)).start()
    ends = await job.run(ShimDone)
    assert [(end.code, end.signal, end.stopped) for end in ends] == [
        (None, 9, False),
        (None, 11, False),
    ]
    assert await job.output(0) == b"last words\n"
    lines = job.status()
    assert [line["n"] for line in lines] == list(range(1, len(lines) + 1))
    kills = [line["memory_kill"] for line in lines if line["event"] == "rank-exited"]
    assert kills == ["no" if sys.platform == "linux" else None, None]


async def test_arguments_arrive_byte_for_byte(tmp_path: Path) -> None:
    hard = ["", "a b", "'", '"', '{"k": [1]}', "$HOME", "`id`", "a\nb", "--", "-c", "æ☃"]
    hard.append("\udcff\udc80")  # two bytes that are no UTF-8
    show = "import os, sys; print([os.fsencode(a) for a in sys.argv[1:]])"
    job = await Job(tmp_path, [sys.executable, "-X", "utf8", "-c", show, *hard]).start()
    await job.run(ShimDone)
    expected = [arg.encode("utf-8", "surrogateescape") for arg in hard]
    assert await job.output() == f"{expected}\n".encode()


async def test_rank_gets_exactly_the_given_environment(tmp_path: Path) -> None:
    os.environ["NOT_FOR_RANKS"] = "1"
    try:
        script = ["/usr/bin/env", "-0"]
        job = await Job(tmp_path, script, env={"A": "x=y\nz", "B": "\udcff"}).start()
        await job.run(ShimDone)
    finally:
        del os.environ["NOT_FOR_RANKS"]
    assert sorted((await job.output()).rstrip(b"\0").split(b"\0")) == [
        b"A=x=y\nz",
        b"B=\xff",
        b"GPULAYER_COOKIE=" + job.config.cookie.encode(),
        b"PATH=/usr/bin:/bin",
        b"PYTHONUNBUFFERED=1",
    ]


@linux_only
async def test_rank_inherits_no_descriptor_and_no_ignored_signal(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "print([os.readlink(f'/proc/self/fd/{f}')[:5] for f in (0, 1, 2)],"
        " len(os.listdir('/proc/self/fd')))\n"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('SigBlk')])\n"
        "import signal; print(signal.getsignal(1), os.getsid(0) == os.getpid())"
    )
    job = await Job(tmp_path, script).start()
    await job.run(ShimDone)
    assert (await job.output()).decode().splitlines() == [
        "['/dev/', 'pipe:', 'pipe:'] 4",  # the fourth is the listing itself
        "['0000000000000000']",
        "0 True",
    ]


async def test_input_ends_at_once(tmp_path: Path) -> None:
    job = await Job(tmp_path, "input('name? ')").start()
    (end,) = await job.run(ShimDone)
    assert end.code == 1
    assert job.runner.tail_lines(job.dir, 0, 20)[-1] == "EOFError: EOF when reading a line"


async def test_print_before_os_exit_is_kept(tmp_path: Path) -> None:
    job = await Job(tmp_path, "import os; print('x'); os._exit(1)").start()
    await job.run(ShimDone)
    assert await job.output() == b"x\n"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
async def test_rank_runs_where_it_was_put(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    tell = "import os; print(os.sched_getaffinity(0))"
    command = (sys.executable, "-c", tell)
    job = await Job(
        tmp_path,
        RankCommand(0, command, {}, "", cpus=(cpu,)),
        RankCommand(1, command, {}, "", cpus=(100_000,)),  # is not there any more
    ).start()
    assert [end.code for end in await job.run(ShimDone)] == [0, 0]
    assert await job.output(0) == f"{{{cpu}}}\n".encode()
    assert await job.output(1) == f"{os.sched_getaffinity(0)}\n".encode()


async def test_line_and_half_line_show_while_the_rank_runs(tmp_path: Path) -> None:
    job = await Job(
        tmp_path,
        "import time; print('whole'); print('half', end='', flush=True); time.sleep(600)",
    ).start()
    await job.wait_for_output(b"whole\nhalf")
    job.runner.kill(job.dir)
    await job.run(ShimDone)


async def test_lines_of_three_ranks_stay_whole(tmp_path: Path) -> None:
    script = "for i in range(500): print('{}' * 4090, i)"
    job = await Job(tmp_path, *(script.format(mark) for mark in "abc")).start()
    await job.run(ShimDone)
    for rank, mark in enumerate(b"abc"):
        records = await job.records(rank)
        assert [r.seq for r in records] == list(range(1, len(records) + 1))
        assert all(r.rank == rank and r.data.endswith(b"\n") for r in records)
        lines = b"".join(r.data for r in records).splitlines()
        assert lines == [bytes([mark]) * 4090 + b" %d" % i for i in range(500)]


async def test_progress_bar_keeps_its_bytes(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for i in range(100): sys.stderr.write(f'\\r{i}%')\n"
        "sys.stderr.write('\\r\\nend\\r\\n')"
    )
    job = await Job(tmp_path, script).start()
    await job.run(ShimDone)
    expected = b"".join(b"\r%d%%" % i for i in range(100)) + b"\r\nend\r\n"
    assert await job.output(0, LogStream.ERR) == expected
    for record in await job.records():
        assert not record.data.startswith(b"\n")


async def test_long_line_is_split_between_characters(tmp_path: Path) -> None:
    script = "import sys; sys.stdout.buffer.write('x'.encode() + '\u2603'.encode() * 100000)"
    job = await Job(tmp_path, script).start()
    await job.run(ShimDone)
    data = [record.data for record in await job.records()]
    assert len(data) > 4
    assert max(map(len, data)) <= 64 * 1024
    assert "".join(piece.decode() for piece in data) == "x" + "\u2603" * 100000


async def test_hundred_megabytes_with_nobody_reading(tmp_path: Path) -> None:
    script = "for i in range(100_000): print('y' * 1000, i)\nprint('the end')"
    job = await Job(tmp_path, script, env={"PYTHONUNBUFFERED": ""}, log_limit_bytes=2**22).start()
    (end,) = await job.run(ShimDone)
    assert end.code == 0
    logs = {path: path.stat().st_size for path in (job.dir / "logs").iterdir()}
    assert len(logs) == shim.SEGMENTS
    assert 3 * 2**20 - 2**18 < sum(logs.values()) <= 2**22
    note, *records = await job.records()
    dropped = re.fullmatch(rb"older lines were dropped, the first (\d+) MiB\n", note.data)
    assert note.stream is LogStream.NOTE
    assert dropped
    assert [r.seq for r in records] == list(range(note.seq + 1, note.seq + 1 + len(records)))
    *lines, last = b"".join(r.data for r in records).splitlines()
    assert last == b"the end"
    first = int(lines[0].split()[1])
    assert lines == [b"y" * 1000 + b" %d" % i for i in range(first, 100_000)]
    assert abs(int(dropped[1]) - first * 1006 / 2**20) < 1
    assert job.runner.tail_lines(job.dir, 0, 2) == ("y" * 1000 + " 99999", "the end")


def test_full_disk_drops_whole_records_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = shim._RankLog(str(tmp_path), 3, shim.LOG_MAX, [])
    log.write(shim.OUT, b"before\n")
    real = os.write
    room = [30]

    def write(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = real(fd, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", write)
    log.write(shim.OUT, b"l" * 70_000 + b"\n" + b"kept\n")
    log.write(shim.ERR, b"Traceback\n")
    monkeypatch.setattr(os, "write", real)
    log.write(shim.OUT, b"after\n")
    log.close()
    parser = RecordParser()
    records = parser.feed((tmp_path / "rank3.log").read_bytes())
    assert not parser.pending
    assert [(r.seq, r.stream, r.data) for r in records] == [
        (1, LogStream.OUT, b"before\n"),
        (2, LogStream.NOTE, b"disk full, 70001 bytes dropped\n"),
        (3, LogStream.OUT, b"kept\n"),
        (4, LogStream.ERR, b"Traceback\n"),
        (5, LogStream.OUT, b"after\n"),
    ]


def _stream(tmp_path: Path, *secrets: bytes) -> tuple[shim._Stream, int]:
    """A stream and the end of its pipe that a rank has."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    log = shim._RankLog(str(tmp_path), 3, shim.LOG_MAX, list(secrets))
    return shim._Stream(reader, shim.OUT, log), writer


def _fill(fd: int, data: bytes) -> int:
    """Write what the pipe takes, in pieces as a rank does."""
    written = 0
    with contextlib.suppress(BlockingIOError):
        while written < len(data):
            written += os.write(fd, data[written : written + 10_000])
    return written


@pytest.mark.parametrize("refused", [False, True])
def test_full_pipe_is_read_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    stream, writer = _stream(tmp_path, b"hunter2hunter2")
    if refused:
        real = shim.fcntl.fcntl

        def fcntl(fd: int, order: int, *size: int) -> int:
            if size:
                raise PermissionError(1, "Operation not permitted")
            return real(fd, order)

        monkeypatch.setattr(shim.fcntl, "fcntl", fcntl)
    lines = b"".join(b"%d hunter2hunter2\n" % i for i in range(200_000))
    sent = widest = 0
    while sent < len(lines):
        held = _fill(writer, lines[sent:])
        assert stream.read(0.0) == held
        assert stream.read(0.0) == 0
        sent += held
        widest = max(widest, held)
    stream.flush(float("inf"))
    if sys.platform == "linux":
        assert refused or widest > 10 * 64 * 1024
    records = RecordParser().feed((tmp_path / "rank3.log").read_bytes())
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert all(record.data.endswith(b"\n") for record in records)
    assert b"".join(record.data for record in records) == lines.replace(b"hunter2hunter2", b"***")
    os.close(writer)
    assert stream.read(0.0) is None
    os.close(stream.fd)


def test_unfinished_line_takes_no_more_memory_than_a_record(tmp_path: Path) -> None:
    stream, writer = _stream(tmp_path)
    line = b"first\n" + "\u2603".encode() * 700_000
    sent = 0
    while sent < len(line):
        sent += _fill(writer, line[sent:])
        stream.read(0.0)
        assert len(stream._partial) <= shim.DATA_MAX
    stream.flush(float("inf"))
    records = RecordParser().feed((tmp_path / "rank3.log").read_bytes())
    assert "".join(record.data.decode() for record in records).encode() == line
    os.close(writer)
    os.close(stream.fd)


def test_pause_grows_while_the_pipe_has_room_and_ends_when_it_has_little() -> None:
    pauses = [0.0]
    for _ in range(8):
        pauses.append(shim._next_pause_s(pauses[-1], 0.0, 0.1))
    assert pauses == [0.0, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.005, 0.005, 0.005]
    assert shim._next_pause_s(0.002, 0.0, 0.2) == 0.002
    assert shim._next_pause_s(0.002, 0.0, 0.4) == 0.0
    assert shim._next_pause_s(0.005, 0.04, 0.01) == 0.0  # quiet again


# Its traceback is out, and for its peers it lives on.
HANGS = """
import atexit, threading, time
{how}
raise ValueError("the flux capacitor is empty")
"""
THREAD = "threading.Thread(target=time.sleep, args=(600,)).start()"
ATEXIT = "atexit.register(time.sleep, 600)"


def python(script: str, *options: str) -> RankCommand:
    return RankCommand(0, (sys.executable, *options, "-c", script), {}, "", python=True)


@pytest.mark.parametrize("how", [THREAD, ATEXIT, "try: 1 / 0\nfinally: " + THREAD])
async def test_rank_that_hangs_after_its_traceback_is_ended(tmp_path: Path, how: str) -> None:
    job = Job(tmp_path, python(HANGS.format(how=how)), raised_grace_s=0.3)
    (end,) = await (await job.start()).run(ShimDone)
    assert (end.code, end.signal, end.stopped) == (1, None, False)
    said = job.runner.tail_lines(job.dir, 0, 20)
    assert said[-2].endswith("Error: " + said[-2].partition(": ")[2])
    assert said[-1] == "raised an exception and did not end within 0.3 s: killed"


async def test_rank_that_raised_before_the_stop_is_not_called_stopped(tmp_path: Path) -> None:
    job = await Job(tmp_path, python(HANGS.format(how=ATEXIT)), raised_grace_s=600).start()
    mark = job.dir / "logs/rank0.raised"
    await eventually(mark.exists)
    job.runner.stop(job.dir, 0.1)
    (end,) = await job.run(ShimDone)
    assert (end.code, end.signal, end.stopped) == (1, None, False)


async def test_clean_up_within_the_grace_is_left_alone(tmp_path: Path) -> None:
    script = "import atexit; atexit.register(print, 'cleaned up'); raise ValueError('x')"
    job = await Job(tmp_path, python(script)).start()
    (end,) = await job.run(ShimDone)
    assert (end.code, end.signal, end.stopped) == (1, None, False)
    assert await job.output() == b"cleaned up\n"


GOES_ON = """
import os, subprocess, sys, threading, time
def printed():
    try:
        raise ValueError("caught")
    except ValueError:
        sys.excepthook(*sys.exc_info())
printed()
def raises():
    raise ValueError("in a thread")
thread = threading.Thread(target=raises); thread.start(); thread.join()
if os.fork() == 0:
    raise ValueError("in a child")
os.wait()
subprocess.run([sys.executable, "-c", "raise ValueError('in another program')"])
time.sleep(0.5)  # the shim looks every 50 ms
"""


@pytest.mark.filterwarnings("ignore:This process")  # of fork in a program with threads
async def test_exception_that_does_not_end_the_rank_is_none(tmp_path: Path) -> None:
    job = await Job(tmp_path, python(GOES_ON), raised_grace_s=0.0).start()
    (end,) = await job.run(ShimDone)
    said = (await job.output(0, LogStream.ERR)).decode()
    assert (end.code, end.signal) == (0, None), said
    assert said.count("ValueError: ") == 4
    assert not (job.dir / "logs/rank0.raised").exists()


async def test_script_does_not_see_the_hook(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('customized')")
    show = (
        "import os, sys\n"
        "print([n for n in os.environ if n in ('GPULAYER_RAISED', 'PYTHONPATH')],"
        " os.environ.get('PYTHONPATH'), [p for p in sys.path if 'rank_hook' in p],"
        " getattr(sys.modules.get('sitecustomize'), '__file__', ''))"
    )
    for path, expected in [
        (str(own), f"customized\n['PYTHONPATH'] {own} [] {own}/sitecustomize.py\n"),
        ("", "[] None [] "),
    ]:
        command = replace(python(show), env={"PYTHONPATH": path} if path else {})
        job = await Job(tmp_path / f"with{path.count('/')}", command).start()
        await job.run(ShimDone)
        assert (await job.output()).decode().startswith(expected)
        assert await job.output(0, LogStream.ERR) == b""


async def test_program_that_is_missing_is_named(tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("x")
    job = await Job(tmp_path, ["no-such-program", "x"], [str(plain)], "print('fine')").start()
    ends = await job.run(ShimDone)
    assert [end.code for end in ends] == [127, 126, 0]
    assert job.runner.tail_lines(job.dir, 0, 20) == (
        "cannot start 'no-such-program': no such file or directory",
    )
    assert "permission denied" in job.runner.tail_lines(job.dir, 1, 20)[0]


async def test_stop_is_polite_first_and_final_after_the_grace(tmp_path: Path) -> None:
    polite = (
        "import signal, sys, time\n"
        "signal.signal(15, lambda *_: (print('saved'), sys.exit(3)))\n"
        "print('up'); time.sleep(600)"
    )
    job = await Job(tmp_path, polite, DEAF).start()
    await job.wait_for_output(b"up", 0)
    await job.wait_for_output(b"up", 1)
    began = time.monotonic()
    job.runner.stop(job.dir, 0.5)
    ends = await job.run(ShimDone)
    assert 0.5 <= time.monotonic() - began < 10
    assert [(end.code, end.signal, end.stopped) for end in ends] == [
        (3, None, True),
        (None, 9, True),
    ]
    assert (await job.output(0)).endswith(b"saved\n")
    assert not job.survivors()


CHILD = """
import signal, sys, time
signal.signal(15, lambda *_: print("child was told", flush=True))
print("child up", flush=True)
while True:
    time.sleep(600)
"""
PARENT = f"""
import signal, subprocess, sys, time
def on_term(*_):
    time.sleep(0.3)  # longer than a signal to the group would take
    print("main saved with its child", "gone" if child.poll() else "there", flush=True)
    sys.exit(0)
signal.signal(15, on_term)
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
time.sleep(600)
"""


async def test_stop_is_told_to_the_main_process_alone_and_ends_the_rest(tmp_path: Path) -> None:
    job = await Job(tmp_path, PARENT).start()
    await job.wait_for_output(b"child up")
    job.runner.stop(job.dir, 30)
    (end,) = await job.run(ShimDone)
    assert (end.code, end.stopped) == (0, True)
    assert await job.output() == b"child up\nmain saved with its child there\n"
    assert not job.survivors()


async def test_rank_that_failed_before_the_stop_is_not_called_stopped(tmp_path: Path) -> None:
    job = await Job(tmp_path, "raise SystemExit(5)", SLEEP).start()
    first = await job.until(RankExited)
    job.runner.stop(job.dir, 5)
    ends = await job.run(ShimDone)
    assert (first.rank, first.code, first.stopped) == (0, 5, False)
    assert (ends[1].signal, ends[1].stopped) == (15, True)


async def test_second_stop_shortens_the_grace(tmp_path: Path) -> None:
    job = await Job(tmp_path, DEAF).start()
    await job.wait_for_output(b"up")
    job.runner.stop(job.dir, 600)
    await job.until_status("stopping")
    job.runner.kill(job.dir)
    (end,) = await job.run(ShimDone)
    assert (end.signal, end.stopped) == (9, True)


async def test_reason_of_a_stop_is_there_for_an_agent_that_comes_later(tmp_path: Path) -> None:
    job = await Job(tmp_path, SLEEP).start()
    job.runner.stop(job.dir, 5, "rank 0 waits for nobody")
    await job.until_status("stopping")
    job.runner.stop(job.dir, 1, "another one")
    await job.run(ShimLost)
    said = [event async for event in job.runner.watch(job.dir)]
    assert said[-1] == job.events[-1] == ShimLost("rank 0 waits for nobody")


async def test_stop_before_start_starts_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, "open('../out/rank0/ran', 'w')")
    job.runner.stop(job.dir, 1)
    await job.start()
    (end,) = await job.run(ShimDone)
    assert (end.code, end.signal, end.stopped) == (None, None, True)
    assert not (job.dir / "out/rank0/ran").exists()


FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, '-c', 'import time; time.sleep(600)']
own = subprocess.Popen(sleep)  # same group, holds the pipes: a DataLoader worker
far = subprocess.Popen(sleep, start_new_session=True, stdout=-3, stderr=-3)
bare = subprocess.Popen(sleep, start_new_session=True, stdout=-3, stderr=-3, env={})
# an orphan in a session of its own, twice removed
subprocess.run([sys.executable, '-c', f'''
import subprocess
p = subprocess.Popen({sleep!r}, start_new_session=True, env=dict())
print("pid", p.pid); p.returncode = 0
'''])
print('pid', own.pid); print('pid', far.pid); print('pid', bare.pid); print('family')
"""


def _pids(output: bytes) -> list[int]:
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith(b"pid")]


@linux_only
@pytest.mark.parametrize("end", ["exit", "stop", "kill"])
async def test_no_process_of_the_job_is_left(tmp_path: Path, end: str) -> None:
    stranger = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220  started, not waited for
    try:
        job = await Job(tmp_path, FAMILY + ("" if end == "exit" else "time.sleep(600)")).start()
        await job.wait_for_output(b"family")
        pids = _pids(await job.output())
        if end == "stop":
            job.runner.stop(job.dir, 5)
        elif end == "kill":
            job.runner.kill(job.dir)
        await job.run(ShimDone)
        assert len(pids) == 4
        assert [pid for pid in pids if is_running(pid)] == []
        assert not job.survivors()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@linux_only
async def test_orphans_are_reaped_while_the_job_runs(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "subprocess.run([sys.executable, '-c', 'import subprocess; p = subprocess.Popen"
        '(["sleep", "0.1"]); print("pid", p.pid); p.returncode = 0\'])\n'
        "time.sleep(600)"
    )
    job = await Job(tmp_path, script).start()
    await job.wait_for_output(b"pid")
    (pid,) = _pids(await job.output())
    await eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    job.runner.kill(job.dir)
    await job.run(ShimDone)


async def test_silent_agent_ends_the_ranks(tmp_path: Path) -> None:
    job = await Job(tmp_path, SLEEP, agent_silence_s=0.3).start()
    await job.until_status("done")  # nobody watches
    (end,) = await job.run(ShimLost)
    assert end.stopped
    assert job.events[-1] == ShimLost("no word from the agent for 0.3 s")


async def test_deaf_ranks_end_soon_after_the_lease_though_the_agent_watches(tmp_path: Path) -> None:
    job = Job(tmp_path, DEAF, grace_s=600, fence_grace_s=0.2)
    job.until_at = boot_clock() + 1.5
    await job.start()
    (end,) = await job.run(ShimLost)
    assert (end.signal, end.stopped) == (9, True)
    assert job.events[-1] == ShimLost("the lease of this machine ran out")


async def test_renewed_lease_ends_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, "import time; time.sleep(4)", fence_grace_s=0.2)
    job.until_at = boot_clock() + 2.5
    await job.start()
    assert job.runner.fence(job.dir) == pytest.approx(job.until_at, abs=1e-3)
    job.until_at += 600.0
    (end,) = await job.run(ShimDone)
    assert (end.code, end.stopped) == (0, False)


async def test_watched_job_outlives_the_silence(tmp_path: Path) -> None:
    job = await Job(tmp_path, "import time; time.sleep(5)", agent_silence_s=2.0).start()
    (end,) = await job.run(ShimDone)
    assert (end.code, end.stopped) == (0, False)


async def test_signals_to_the_shim(tmp_path: Path) -> None:
    job = await Job(tmp_path, DEAF, grace_s=600).start()
    await job.wait_for_output(b"up")
    pid = (await job.until_status("started"))["pid"]
    os.kill(pid, signal.SIGHUP)
    os.kill(pid, signal.SIGTERM)
    assert (await job.until_status("stopping"))["reason"] == "signal to the shim"
    os.kill(pid, signal.SIGTERM)
    (end,) = await job.run(ShimLost)
    assert (end.signal, end.stopped) == (9, True)


@linux_only
async def test_secret_is_in_no_file_and_no_argument_list(tmp_path: Path) -> None:
    canary = "canary-8d1f2c77"
    script = "import os, time; print('token', os.environ['TOKEN']); time.sleep(600)"
    job = await Job(tmp_path, script, env={"TOKEN": canary}, secrets=(canary, "up")).start()
    await job.wait_for_output(b"token ***\n")
    assert not [p for p in psutil.process_iter(["cmdline"]) if canary in str(p.info["cmdline"])]
    job.runner.kill(job.dir)
    await job.run(ShimDone)
    files = [path for path in job.dir.rglob("*") if path.is_file()]
    assert len(files) >= 4
    assert [path for path in files if canary.encode() in path.read_bytes()] == []
    assert [path for path in files if path.stat().st_mode & 0o077] == []


async def test_folder_takes_one_shim_only(tmp_path: Path) -> None:
    job = await Job(tmp_path, SLEEP).start()
    with pytest.raises(GpuLayerError, match="File exists"):
        await job.start()
    job.runner.kill(job.dir)
    await job.run(ShimDone)
    with pytest.raises(GpuLayerError, match="File exists"):
        await job.start()


async def test_memory_peak_is_reported(tmp_path: Path) -> None:
    job = await Job(tmp_path, "x = b'1' * (200 * 2**20)").start()
    (end,) = await job.run(ShimDone)
    assert end.memory_peak_mib is not None
    assert 200 <= end.memory_peak_mib < 400


async def test_error_of_the_shim_itself_ends_the_ranks(tmp_path: Path) -> None:
    job = Job(tmp_path, SLEEP)
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('shim', {shim.__file__!r})\n"
        "shim = importlib.util.module_from_spec(spec); spec.loader.exec_module(shim)\n"
        "def broken(self, now): raise RuntimeError('broken')\n"
        "shim.Shim._poll_lease = broken\n"
        "shim.main()\n"
    )
    (job.dir / "logs").mkdir()
    config = {
        "grace_s": 30,
        "agent_silence_s": 30,
        "cookie": job.config.cookie,
        "ranks": [{"rank": 0, "argv": job.config.ranks[0].argv, "env": {}, "cwd": "/"}],
    }
    subprocess.run(  # noqa: ASYNC221  returns at once: the shim detaches
        [sys.executable, str(driver), str(job.dir)],
        input=json.dumps(config).encode(),
        stderr=subprocess.DEVNULL,
        check=True,
    )
    (end,) = await job.run(ShimLost)
    assert (end.signal, end.stopped) == (9, True)
    assert job.events[-1] == ShimLost("shim: RuntimeError: broken")
    assert not job.survivors()


@linux_only
def test_reused_process_number_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number changes hands between the first look and the handle."""
    stranger = subprocess.Popen(["sleep", "600"])
    looks: list[int] = []

    def is_ours(pid: int, cookie: str, root: int | None) -> bool:
        looks.append(pid)
        return looks.count(pid) == 1 and pid == stranger.pid

    monkeypatch.setattr(shim, "_is_ours", is_ours)
    try:
        assert shim.kill_leftovers("cookie", None) == [stranger.pid]
        assert looks.count(stranger.pid) == 2
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


# Runs in a PID namespace, where the next process gets the number we want.
REUSES = """
import os, signal, subprocess
from gpulayer_mesh import shim

NUMBER = 77

def take(ours):
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(NUMBER - 1))
    env = {"GPULAYER_COOKIE": "ours"} if ours else {}
    process = subprocess.Popen(["/bin/sleep", "600"], env={"A": "b"} | env)
    assert process.pid == NUMBER
    while not open(f"/proc/{NUMBER}/environ").read():  # the program is still being loaded
        pass
    return process

def end(process):
    process.kill()
    process.wait()

class Hands:
    def __init__(self, moment):
        self.moment, self.holder, self.changed = moment, take(True), False

    def change_at(self, moment):
        if moment == self.moment and not self.changed:
            end(self.holder)
            self.holder, self.changed = take(False), True

pidfd_open, send = os.pidfd_open, signal.pidfd_send_signal

def opens(pid):
    hands.change_at("before the handle")
    handle = pidfd_open(pid)
    hands.change_at("before the second look")
    return handle

def sends(handle, number):
    hands.change_at("before the signal")
    send(handle, number)

os.pidfd_open, signal.pidfd_send_signal = opens, sends
survived = 0
for moment in ("before the handle", "before the second look", "before the signal", "never") * 100:
    hands = Hands(moment)
    assert shim.kill_leftovers("ours", None) == [NUMBER]
    if hands.changed:
        assert hands.holder.poll() is None, moment
        survived += 1
        end(hands.holder)
    else:
        assert moment == "never" and hands.holder.wait(10) == -9
print("strangers that live:", survived)
"""

# Process numbers come round again every few hundred starts, while ranks and what they left end.
SMALL_SPACE = """
import asyncio, os, pathlib, sys, threading
from gpulayer_mesh.core.hosted import RankExited
from gpulayer_mesh.runtime.shims import RankCommand, ShimConfig, ShimRunner

with open("/proc/sys/kernel/pid_max", "w") as most:
    most.write("400")
FAMILY = "sleep 600 & setsid sleep 600 & setsid sh -c 'sleep 600 & sleep 600' & exec sleep 0.05"
numbers, ended, over = [], [], threading.Event()

def strangers():
    while not over.is_set():
        pid = os.posix_spawn("/bin/true", ["true"], {}, setsid=True)
        numbers.append(pid)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

async def main():
    runner, ranks = ShimRunner(), []
    for job in range(4):
        folder = pathlib.Path(sys.argv[1], str(job))
        (folder / "work").mkdir(parents=True)
        env = {"PATH": os.environ["PATH"]}
        commands = tuple(
            RankCommand(rank, ("sh", "-c", FAMILY), env, str(folder)) for rank in range(5)
        )
        await runner.start(folder, ShimConfig(ranks=commands, cookie=f"job{job}", grace_s=5.0))
        if job % 2:
            runner.kill(folder)
        async for event in runner.watch(folder):
            if isinstance(event, RankExited):
                ranks.append(event)
    over.set()
    return ranks

churn = threading.Thread(target=strangers)
churn.start()
try:
    ranks = asyncio.run(main())
finally:
    over.set()
    churn.join()
left = [open(f"/proc/{n}/cmdline").read() for n in os.listdir("/proc") if n.isdigit()]
assert not [line for line in left if line.startswith(("sh", "sleep"))], left
assert len(ranks) == 20
assert set(ended) == {0}, set(ended)
assert len(numbers) > 2 * len(set(numbers)), (len(numbers), len(set(numbers)))
print("strangers that ended by themselves:", len(ended))
"""


@pytest.mark.parametrize(("driver", "least"), [(REUSES, 300), (SMALL_SPACE, 500)])
def test_no_stranger_is_killed_where_process_numbers_are_reused(
    tmp_path: Path, driver: str, least: int
) -> None:
    if (why := lan.why_unavailable()) is not None:
        pytest.skip(f"no PID namespace: {why}")
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    done = subprocess.run(
        [*inside, sys.executable, "-c", driver, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.rpartition(" ")[2]) >= least


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with 200 MiB; the shim has said its last word when a test ends."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(lan.memory_group(200 * 2**20))
        except lan.LanError as error:
            pytest.skip(str(error))
        yield group


@linux_only
async def test_rank_without_memory_is_told_from_one_that_somebody_killed(
    tmp_path: Path, small_group: Path
) -> None:
    """The limit holds for all, as in a container; the kernel takes the rank, not the shim."""
    gate = tmp_path / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    grows = "print('up'); x = []\nwhile True: x.append(b'1' * 2**20)"
    job = Job(tmp_path, grows, waits + "os.kill(os.getpid(), 9)", SLEEP)
    (small_group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        await job.start()
    finally:
        (small_group.parent / "cgroup.procs").write_text(str(os.getpid()))
    end = await job.until(RankExited)
    assert (end.rank, end.signal, end.stopped) == (0, 9, False)
    assert end.memory_peak_mib is not None
    assert 100 < end.memory_peak_mib <= 200
    (said,) = job.runner.tail_lines(job.dir, 0, 20)
    assert said == f"killed by the kernel for memory: {end.memory_peak_mib} of 200 MiB"
    assert (end.memory_kill, end.memory_limit_mib) == (MemoryKill.YES, 200)
    gate.touch()
    end = await job.until(RankExited)
    assert (end.rank, end.signal, end.memory_kill) == (1, 9, MemoryKill.NO)
    await job.wait_for_output(b"up", 2)
    job.runner.kill(job.dir)
    await job.until(RankExited)
    await job.run(ShimDone)


def test_kill_for_memory_explains_one_end_and_only_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "memory.events"

    def counted(kills: int) -> None:
        counter.write_text(f"oom 9\noom_kill {kills}\noom_group_kill 0\n")

    counted(5)
    monkeypatch.setattr(shim, "_memory_groups", lambda: iter([str(tmp_path)]))
    kills = shim._MemoryKills()
    assert kills.explain(0.0) == "no"
    counted(6)
    kills.look(1.0)
    assert kills.explain(60.0) == "yes"
    assert kills.explain(60.0) == "no"
    counted(7)
    kills.look(61.0)
    assert kills.explain(121.0) == "no"
    counted(9)
    assert [kills.explain(200.0) for _ in range(3)] == ["yes", "yes", "no"]


def test_without_a_group_of_its_own_a_kill_for_memory_is_only_likely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: dict[str, int | None] = {"/proc/vmstat": 3}
    monkeypatch.setattr(shim, "_memory_groups", lambda: iter(["/nowhere"]))
    monkeypatch.setattr(shim, "_kills_in", counts.get)
    kills = shim._MemoryKills()
    assert kills.explain(0.0) == "no"
    counts["/proc/vmstat"] = 4
    assert [kills.explain(1.0) for _ in range(2)] == ["likely", "no"]
    counts.clear()
    assert shim._MemoryKills().explain(0.0) is None


def test_record_header_is_23_bytes() -> None:
    assert struct.calcsize(shim.RECORD_FORMAT) == 23
