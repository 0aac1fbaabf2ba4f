"""The agent's side: following logs and events, taking over, and what happens when either dies."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpulayer_mesh import shim
from gpulayer_mesh.core.hosted import RankExited, RankStarted, ShimDone, ShimLost
from gpulayer_mesh.core.logrecord import LogPick, LogRecord, LogStream, RecordParser
from gpulayer_mesh.errors import GpuLayerError
from gpulayer_mesh.runtime import shims
from gpulayer_mesh.runtime.shims import ShimRunner
from shim_jobs import Job, eventually, is_running

SLEEP = "import time; print('up'); time.sleep(600)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)"


def write_log(job_dir: Path, rank: int, records: list[LogRecord]) -> None:
    (job_dir / "logs").mkdir(parents=True, exist_ok=True)
    path = job_dir / "logs" / f"rank{rank}.log"
    with path.open("ab") as file:
        file.write(b"".join(record.pack() for record in records))


def record(rank: int, seq: int, wall: float, data: bytes = b"x\n", stream: int = 1) -> LogRecord:
    return LogRecord(rank, seq, wall, LogStream(stream), data)


async def read(job_dir: Path, ranks: list[int], **from_seqs: int) -> list[LogRecord]:
    parser = RecordParser()
    found: list[LogRecord] = []
    start = {int(rank[1:]): seq for rank, seq in from_seqs.items()}
    async for batch in ShimRunner().follow_logs(job_dir, ranks, start, follow=False):
        assert 0 < len(batch) <= 256 * 1024
        found += parser.feed(batch)
        assert not parser.pending  # batches are whole records
    return found


# -- logs


async def test_logs_of_several_ranks_are_merged_by_time(tmp_path: Path) -> None:
    write_log(tmp_path, 0, [record(0, i, 10.0 * i) for i in range(1, 50)])
    write_log(tmp_path, 7, [record(7, i, 10.0 * i + 5) for i in range(1, 50)])
    found = await read(tmp_path, [7, 0, 3])  # rank 3 has written nothing yet
    assert [r.wall for r in found] == sorted(r.wall for r in found)
    assert [r.seq for r in found if r.rank == 0] == list(range(1, 50))
    assert [r.seq for r in found if r.rank == 7] == list(range(1, 50))


async def test_log_resumes_at_any_number_without_loss_or_double(
    tmp_path: Path, rng: random.Random
) -> None:
    records = [record(0, i, i, os.urandom(rng.randrange(65536))) for i in range(1, 200)]
    write_log(tmp_path, 0, records)
    for start in [0, 1, 2, 199, 200, 1000, *(rng.randrange(200) for _ in range(10))]:
        assert await read(tmp_path, [0], r0=start) == [r for r in records if r.seq >= start]


async def test_record_cut_off_at_the_end_is_left_out(tmp_path: Path) -> None:
    records = [record(0, 1, 1.0), record(0, 2, 2.0)]
    write_log(tmp_path, 0, records)
    path = tmp_path / "logs/rank0.log"
    os.truncate(path, path.stat().st_size - 1)
    assert await read(tmp_path, [0]) == records[:1]
    assert ShimRunner().tail_lines(tmp_path, 0, 5) == ("x",)


async def test_damaged_log_says_so_and_ends(tmp_path: Path) -> None:
    write_log(tmp_path, 2, [record(2, 1, 1.0)])
    with (tmp_path / "logs/rank2.log").open("ab") as file:
        file.write(b"\xff" * 100)
    first, note = await read(tmp_path, [2])
    assert first == record(2, 1, 1.0)
    assert note == record(2, 2, 1.0, b"log damaged at byte 25\n", LogStream.NOTE)


class Viewer:
    """Reads at its own pace and says which numbers it got; `gaps` are those it was told of."""

    def __init__(self, job_dir: Path, from_seq: int) -> None:
        self.cursor = shims._Cursor(job_dir, 0, from_seq)
        self.next = max(1, from_seq)
        self.found: dict[int, bytes] = {}
        self.gaps: set[int] = set()

    def read(self, batches: int) -> None:
        for _ in range(batches):
            if not self.cursor.refill():
                return
            for head in self.cursor.heads:
                (got,) = RecordParser().feed(head[1])
                if got.stream is LogStream.NOTE:
                    assert b"older lines were dropped, the first " in got.data
                    self.gaps.update(range(self.next, got.seq + 1))
                else:
                    assert got.seq == self.next
                    self.found[got.seq] = got.data
                self.next = got.seq + 1
            self.cursor.heads.clear()


def test_viewers_of_a_log_that_drops_its_oldest_miss_nothing_untold(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shims, "BATCH_MAX", 70_000)  # one record at least
    (tmp_path / "logs").mkdir()
    log = shim._RankLog(str(tmp_path / "logs"), 0, 400_000, [])
    written: list[bytes] = []
    viewers = [Viewer(tmp_path, 0)]
    for _ in range(400):
        data = rng.randbytes(rng.choice([1, 50, 5_000, 60_000]))
        for piece in shim._pieces(data):
            written.append(piece)
            log.write(shim.OUT, piece)
        if rng.random() < 0.05:
            viewers.append(Viewer(tmp_path, rng.randrange(len(written) + 3)))
        viewers[0].read(10)
        rng.choice(viewers[1:] or viewers).read(rng.randrange(20))
    log.close()
    kept = sum(path.stat().st_size for path in (tmp_path / "logs").iterdir())
    assert 200_000 < kept <= 400_000
    for viewer in viewers:
        began = min([*viewer.found, *viewer.gaps, viewer.next])
        viewer.read(1000)
        assert viewer.next == max(began, len(written) + 1)
        assert sorted(viewer.found.keys() | viewer.gaps) == list(range(began, len(written) + 1))
        assert not viewer.found.keys() & viewer.gaps
        assert all(data == written[seq - 1] for seq, data in viewer.found.items())
    assert not viewers[0].gaps
    assert sum(bool(viewer.gaps) for viewer in viewers) > 3


async def picked(job_dir: Path, pick: LogPick, **from_seqs: int) -> list[LogRecord]:
    parser = RecordParser()
    start = {int(rank[1:]): seq for rank, seq in from_seqs.items()}
    follow = ShimRunner().follow_logs(job_dir, [0, 1], start, follow=False, pick=pick)
    return [one async for batch in follow for one in parser.feed(batch)]


async def test_viewer_gets_the_lines_it_picked(tmp_path: Path) -> None:
    now = time.time()
    for rank in (0, 1):
        write_log(tmp_path, rank, [
            record(rank, 1, now - 900, b"old\n"),
            record(rank, 2, now - 800, b"bad\n", LogStream.ERR),
            record(rank, 3, now - 100, b"a\nb\n"),
            record(rank, 4, now - 90, b"worse\n", LogStream.ERR),
            record(rank, 5, now - 80, b"c\nd\n"),
        ])  # fmt: skip

    async def of(rank: int, pick: LogPick, **start: int) -> list[tuple[int, bytes]]:
        found = await picked(tmp_path, pick, **start)
        return [(one.seq, one.data) for one in found if one.rank == rank]

    for rank in (0, 1):
        assert await of(rank, LogPick(tail=3)) == [(4, b"worse\n"), (5, b"c\nd\n")]
        assert await of(rank, LogPick(tail=4)) == [(3, b"b\n"), (4, b"worse\n"), (5, b"c\nd\n")]
        assert await of(rank, LogPick(tail=1)) == [(5, b"d\n")]
        assert await of(rank, LogPick(tail=0)) == []
        assert len(await of(rank, LogPick(tail=99))) == 5
        assert await of(rank, LogPick(stderr=True)) == [(2, b"bad\n"), (4, b"worse\n")]
        assert await of(rank, LogPick(stderr=True, tail=1)) == [(4, b"worse\n")]
        assert [seq for seq, _ in await of(rank, LogPick(since_s=600))] == [3, 4, 5]
        assert await of(rank, LogPick(stderr=True, since_s=600, tail=9)) == [(4, b"worse\n")]
    # Who comes back after a break has seen the lines before.
    pick = LogPick(stderr=True, since_s=1, tail=1)
    assert await of(0, pick, r0=1) == [(2, b"bad\n"), (4, b"worse\n")]
    assert await of(1, pick, r0=1) == []


async def test_tail_and_age_are_found_in_a_log_of_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shims, "TAIL_BYTES", 100_000)  # four times as much, until it is enough
    (tmp_path / "logs").mkdir()
    log = shim._RankLog(str(tmp_path / "logs"), 0, 2**20, [])
    for number in range(1, 101):
        log.write(shim.OUT, b"%05d\n" % number * 3000)
    log.close()
    for count in (1, 2999, 3001, 50_000):
        found = b"".join([one.data for one in await picked(tmp_path, LogPick(tail=count))])
        assert found.count(b"\n") == count
        assert found.endswith(b"00100\n")
    monkeypatch.setattr(shims, "TAIL_READ_MAX", 400_000)  # at most that is looked through
    found = b"".join([one.data for one in await picked(tmp_path, LogPick(tail=50_000))])
    assert 3000 < found.count(b"\n") < 400_000 / 6
    everything = await picked(tmp_path, LogPick(since_s=3600))
    assert everything[0].stream is LogStream.NOTE  # on what was dropped since then
    assert await picked(tmp_path, LogPick(since_s=-60)) == []


async def test_log_whose_beginning_was_dropped_says_so_and_resumes_at_any_number(
    tmp_path: Path,
) -> None:
    (tmp_path / "logs").mkdir()
    log = shim._RankLog(str(tmp_path / "logs"), 0, 2**20, [])
    for number in range(1, 101):
        log.write(shim.OUT, b"%d\n" % number * 6000)
    log.close()
    note, first, *rest = await read(tmp_path, [0])
    text = f"older lines were dropped, the first {shims._segments(tmp_path, 0)[0] / 2**20:.0f} MiB"
    assert note == record(0, first.seq - 1, first.wall, f"{text}\n".encode(), LogStream.NOTE)
    assert [r.seq for r in rest] == list(range(first.seq + 1, 101))
    for seq in range(first.seq, 103):
        found = await read(tmp_path, [0], r0=seq)
        assert found == [r for r in (first, *rest) if r.seq >= seq]
    assert (await read(tmp_path, [0], r0=first.seq - 1))[0] == note


async def test_log_that_cannot_go_on_in_a_new_file_says_what_it_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    log = shim._RankLog(str(tmp_path / "logs"), 0, 2**20, [])
    real = shim._AppendFile

    def full(path: str) -> shim._AppendFile:
        raise OSError(28, "No space left on device")

    for number in range(1, 100):
        monkeypatch.setattr(shim, "_AppendFile", full if 80 <= number < 95 else real)
        log.write(shim.OUT, b"%d\n" % number * 12000)
        if number == 90:  # as if the shim had been killed there
            assert len(shims._segments(tmp_path, 0)) == shim.SEGMENTS - 1
            seqs = [r.seq for r in await read(tmp_path, [0])]
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    log.close()
    found = await read(tmp_path, [0])
    assert [r.seq for r in found] == list(range(found[0].seq, found[0].seq + len(found)))
    notes = [r.data for r in found[1:] if r.stream is LogStream.NOTE]
    assert notes
    assert all(re.fullmatch(rb"disk full, \d+ bytes dropped\n", note) for note in notes)
    assert found[-1].data == b"99\n" * 12000


async def test_follower_sees_everything_and_ends_with_the_shim(tmp_path: Path) -> None:
    script = "for i in range(20000): print('line', i)"
    job = await Job(tmp_path, script, script).start()
    parser = RecordParser()
    found: list[LogRecord] = []
    async for batch in job.runner.follow_logs(job.dir, [0, 1], {}, follow=True):
        found += parser.feed(batch)
    assert not job.runner.alive(job.dir)
    for rank in (0, 1):
        data = b"".join(r.data for r in found if r.rank == rank)
        assert data == b"".join(b"line %d\n" % i for i in range(20000))
    await job.run(ShimDone)


async def test_follower_gives_up_where_no_shim_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shims, "START_DEADLINE_S", 0.2)
    (tmp_path / "logs").mkdir()
    assert [batch async for batch in ShimRunner().follow_logs(tmp_path, [0], {}, follow=True)] == []
    assert [event async for event in ShimRunner().watch(tmp_path)] == [
        ShimLost("the shim is gone without a word")
    ]


def test_status_file_is_locked_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []

    def flock(fd: int, operation: int) -> None:
        # A follower or watcher that looks now must not find a status without a lock.
        assert not (tmp_path / "status").exists()
        fcntl.flock(fd, operation)
        locked.append(fd)

    lock_ex = SimpleNamespace(LOCK_EX=fcntl.LOCK_EX, flock=flock)
    monkeypatch.setattr(shim, "fcntl", lock_ex)
    status = shim._locked_status(str(tmp_path))
    try:
        assert locked == [status.fd]
        assert ShimRunner().alive(tmp_path)
        monkeypatch.setattr(shim, "fcntl", fcntl)
        with pytest.raises(FileExistsError, match="status"):
            shim._locked_status(str(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["status"]
        assert ShimRunner().alive(tmp_path)
    finally:
        os.close(status.fd)
    assert not ShimRunner().alive(tmp_path)


async def test_shim_that_comes_while_it_is_watched_is_not_taken_for_gone(tmp_path: Path) -> None:
    events: list[dict[str, object]] = [
        {"event": "started", "pid": os.getpid(), "cookie": "c"},
        {"event": "rank-started", "rank": 0, "pid": 5},
        {"event": "rank-exited", "rank": 0, "code": 0, "signal": None, "stopped": False},
        {"event": "done"},
    ]
    looks = 0

    class Late(ShimRunner):
        def alive(self, job_dir: Path) -> bool:
            """There was none at the first look, and one event at each; the shim ends with them."""
            nonlocal looks
            looks += 1
            line = {"n": looks, "mono": 0.0, **events[looks - 1]}
            with (job_dir / "status").open("a") as file:
                file.write(json.dumps(line) + "\n")
            return looks > 1

    found = [event async for event in Late().watch(tmp_path)]
    assert found == [RankStarted(0, 5), RankExited(0, 0, None, False), ShimDone()]


@pytest.mark.parametrize("rank", [0, 7])
def test_tail_of_a_long_log_is_found_from_its_end(
    tmp_path: Path, rank: int, rng: random.Random
) -> None:
    """Zero bytes look like the beginning of a record of rank 0."""
    noise = [b"\0" * 60_000, bytes(65536), rng.randbytes(50_000), record(rank, 5, 1.0).pack()]
    records = [record(rank, i, 1.0, rng.choice(noise)) for i in range(1, 400)]
    text = b"".join(b"line %d\n" % i for i in range(30))
    records.append(record(rank, 400, 1.0, text, LogStream.ERR))
    write_log(tmp_path, rank, records)
    assert (tmp_path / f"logs/rank{rank}.log").stat().st_size > 4 * shims.TAIL_BYTES
    expected = tuple(f"line {i}" for i in range(10, 30))
    assert ShimRunner().tail_lines(tmp_path, rank, 20) == expected


def test_tail_of_nothing_is_empty(tmp_path: Path) -> None:
    assert ShimRunner().tail_lines(tmp_path, 0, 20) == ()


# -- starting


async def test_start_that_cannot_be_is_an_error_with_the_reason(tmp_path: Path) -> None:
    job = Job(tmp_path, "pass")
    with pytest.raises(GpuLayerError, match="cannot start the shim"):
        await ShimRunner(str(tmp_path / "no-python")).start(job.dir, job.config)
    job = Job(tmp_path / "large", "pass", env={"X": "x" * (5 * 2**20)})
    with pytest.raises(GpuLayerError, match="configuration exceeds"):
        await job.start()


async def test_job_folder_name_with_spaces_and_letters_works(tmp_path: Path) -> None:
    folder = tmp_path / "my prøject (1)"
    folder.mkdir()
    job = await Job(folder, "import os; print(os.getcwd())").start()
    await job.run(ShimDone)
    assert (await job.output()).decode().rstrip("\n") == str(job.dir / "work")


# -- taking over

AGENT = """
import asyncio, json, sys
from pathlib import Path
from gpulayer_mesh.runtime.shims import RankCommand, ShimConfig, ShimRunner
async def main():
    config = json.load(sys.stdin)
    config["ranks"] = tuple(RankCommand(**rank) for rank in config["ranks"])
    runner, job = ShimRunner(), Path(sys.argv[1])
    print("go", flush=True)
    await runner.start(job, ShimConfig(**config))
    print("started", flush=True)
    async for event in runner.watch(job):
        pass
asyncio.run(main())
"""


def start_agent(job: Job) -> subprocess.Popen[bytes]:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(job.dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert agent.stdin
    agent.stdin.write(json.dumps(asdict(job.config)).encode())
    agent.stdin.close()
    return agent


def end_agent(agent: subprocess.Popen[bytes]) -> None:
    os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()
    assert agent.stdout
    agent.stdout.close()


async def test_killed_agent_costs_nothing(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = Job(
        tmp_path,
        "import os, time\n"
        "for i in range(1000): print('before', i)\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        "for i in range(1000): print('after', i)\n"
        "raise SystemExit(9)",
    )
    agent = start_agent(job)
    assert agent.stdout
    assert agent.stdout.readline() == b"go\n"
    assert agent.stdout.readline() == b"started\n"
    end_agent(agent)
    gate.touch()
    await job.until_status("done")
    assert job.runner.adopt(job.dir)
    await job.run(ShimDone)
    assert [type(event) for event in job.events] == [RankStarted, RankExited, ShimDone]
    (end,) = [event for event in job.events if isinstance(event, RankExited)]
    assert (end.code, end.stopped) == (9, False)
    words = [(word, i) for word in ("before", "after") for i in range(1000)]
    assert await job.output() == "".join(f"{word} {i}\n" for word, i in words).encode()


@pytest.mark.parametrize("attempt", range(8))
async def test_agent_killed_at_any_moment_starts_nothing_twice(
    tmp_path: Path, attempt: int, rng: random.Random
) -> None:
    job = Job(tmp_path, "print('ran', file=open('../out/rank0/ran', 'a')); raise SystemExit(4)")
    agent = start_agent(job)
    assert agent.stdout
    assert agent.stdout.readline() == b"go\n"
    moments = [rng.uniform(0, 0.3) for _ in range(8)]  # a whole start takes about 0.2 s
    try:
        agent.wait(timeout=moments[attempt])
    except subprocess.TimeoutExpired:
        end_agent(agent)
    else:
        agent.stdout.close()
    ran = job.dir / "out/rank0/ran"
    if job.runner.adopt(job.dir):
        (end,) = await job.run(ShimDone)
        if end.stopped and end.signal is None:
            assert not ran.exists()
        else:
            assert end.code == 4
            assert ran.read_text() == "ran\n"
        return
    # None was there; a shim that is only now getting up finds the order to end.
    with contextlib.suppress(GpuLayerError):
        await job.start()
    await job.run(ShimDone)
    assert not ran.exists()


async def test_killed_shim_takes_its_ranks_along(tmp_path: Path) -> None:
    script = (
        "import subprocess, time\n"
        "p = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print('up', p.pid); time.sleep(600)"
    )
    job = await Job(tmp_path, script, SLEEP).start()
    await job.wait_for_output(b"up", 0)
    pids = [event["pid"] for event in job.status() if event["event"] == "rank-started"]
    pids.append(int((await job.output(0)).split()[1]))
    shim_pid = (await job.until_status("started"))["pid"]
    os.kill(shim_pid, signal.SIGKILL)
    await job.run(ShimLost)
    assert job.events[-1] == ShimLost("the shim is gone without a word")
    status = job.dir / "status"
    status.write_text(status.read_text().replace(shim.boot_id(), "another boot"))
    assert [event async for event in ShimRunner().watch(job.dir)][-1] == ShimLost(
        "the machine was rebooted"
    )
    await eventually(lambda: not any(map(is_running, pids)))
    assert not job.survivors()
    assert not job.runner.alive(job.dir)


async def test_adopt_where_nothing_started_forbids_a_late_start(tmp_path: Path) -> None:
    job = Job(tmp_path, "open('../out/rank0/ran', 'w')")
    assert not job.runner.adopt(job.dir)
    await job.start()
    (end,) = await job.run(ShimDone)
    assert end.stopped
    assert not (job.dir / "out/rank0/ran").exists()


@pytest.mark.parametrize("kill", [False, True])
async def test_stop_arrives_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: bool
) -> None:
    job = await Job(tmp_path, DEAF, grace_s=600 if kill else 0.2).start()
    await job.wait_for_output(b"up")

    def full(*args: object, **kwargs: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shims, "replace_file", full)
    if kill:
        job.runner.kill(job.dir)
    else:
        job.runner.stop(job.dir, 0.2)
    (end,) = await job.run(ShimLost)
    assert (end.signal, end.stopped) == (9, True)
    assert not job.survivors()
