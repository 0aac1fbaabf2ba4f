"""The power goes at any write: a new agent comes up, tells no lie, and starts nothing twice.

A job's life is recorded: what lay in `jobs/` after each write of the agent, and what of it was
synced. From each of these images one file is cut or taken away, as file systems do with what was
not synced, or all of that at once; then an agent starts on it, as on a machine that is on again.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from boxes import JOB, MANIFEST, ORDER, Box, Mesh
from gpulayer_mesh import config as configuration
from gpulayer_mesh import files
from gpulayer_mesh.config import AgentConfig
from gpulayer_mesh.core import job, wire
from gpulayer_mesh.core.jobspec import OVER, JobRecord, JobSpec, JobState
from gpulayer_mesh.core.logrecord import LogRecord, LogStream, RecordParser
from gpulayer_mesh.errors import GpuLayerError, RemoteProtocolError
from gpulayer_mesh.runtime import hosting, livejob, shims
from gpulayer_mesh.runtime.livejob import JobFolder, open_signed
from shim_jobs import eventually

COUNTS = """
import os, time
with open({starts!r}, "a") as file:
    print("started", file=file)
print("up", flush=True)
while not os.path.exists({gate!r}):
    time.sleep(0.01)
raise SystemExit(3)
"""
PAPERS = ("spec", "manifest", "record", "status", "lease", "stop", "shim.err")
Image = Callable[[Path], object]  # makes a folder


class Trace:
    """Copies of a folder, one after each write of the agent."""

    def __init__(self, folder: Path, to: Path) -> None:
        self._folder = folder
        self._to = to
        self._synced: dict[Path, bytes] = {}
        self.copies: list[tuple[Path, dict[Path, bytes]]] = []  # and what of each was synced
        self.went = 0  # how many there were when go was acknowledged

    def replace_file(self, path: Path, data: bytes, **how: bool) -> None:
        files.replace_file(path, data, **how)
        self.take()

    def sync(self, path: Path) -> None:
        files.sync(path)
        if path.is_file():
            self._synced[path.relative_to(self._folder)] = path.read_bytes()

    def take(self) -> None:
        copy = self._to / str(len(self.copies))
        shutil.copytree(self._folder, copy)
        self.copies.append((copy, dict(self._synced)))

    def images(self, number: int) -> Iterator[tuple[str, Image]]:
        copy, synced = self.copies[number]

        def without(paper: str, length: int | None) -> Image:
            def make(to: Path) -> None:
                shutil.copytree(copy, to)
                path = to / JOB / paper
                path.unlink() if length is None else os.truncate(path, length)

            return make

        def only_synced(to: Path) -> None:
            (to / JOB).mkdir(parents=True)
            for path, data in synced.items():
                (to / path).write_bytes(data)

        yield "nothing", lambda to: shutil.copytree(copy, to)
        yield "all that was not synced", only_synced
        for paper in PAPERS:
            if (copy / JOB / paper).exists():
                size = (copy / JOB / paper).stat().st_size
                yield paper, without(paper, None)
                for length in sorted({0, size // 3, size - 1} - {-1, size}):
                    yield f"{paper} from byte {length}", without(paper, length)


async def recorded(
    mesh: Mesh, spec: JobSpec, finish: Callable[[], None], patch: pytest.MonkeyPatch
) -> Trace:
    """Run a job to its end."""
    (box,) = await mesh.start("box-0")
    trace = Trace(box.home / "jobs", mesh.folder / "images")
    for module in (hosting, livejob, shims):
        patch.setattr(module, "replace_file", trace.replace_file)
    patch.setattr(livejob, "sync", trace.sync)
    await mesh.stage(spec)
    await box.ask("laptop", "POST", "go", ORDER)
    trace.went = len(trace.copies)
    trace.take()
    await eventually(lambda: box.state() is JobState.RUNNING)
    await eventually(lambda: any((box.work.parent / "logs").glob("*.log")))
    trace.take()
    finish()
    await eventually(lambda: box.state() in OVER)
    await box.host.sync(box.host.jobs[JOB])
    trace.take()
    await box.crash()
    return trace


@pytest.mark.network  # FreePorts binds
@pytest.mark.timeout(300)
async def test_agent_comes_up_after_a_power_cut_at_any_write_and_starts_nothing_twice(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, gate = tmp_path / "starts", tmp_path / "gate"
    spec = mesh.spec(code=COUNTS.format(starts=str(starts), gate=str(gate)))
    with monkeypatch.context() as patch:
        trace = await recorded(mesh, spec, gate.touch, patch)
    monkeypatch.setattr(shims, "START_DEADLINE_S", 0.1)  # no shim is still getting up
    monkeypatch.setattr(job, "SETTLE_S", 0.0)
    monkeypatch.setattr(job, "HOST_LOST_S", 1.0)  # where no word is left of ranks that ran
    numbers = itertools.count()
    for number, (copy, _) in enumerate(trace.copies):
        last = number == len(trace.copies) - 1
        for lost, make in trace.images(number):
            mesh.folder = tmp_path / f"after-{next(numbers)}"
            make(mesh.folder / "box-0/jobs")
            (box,) = await mesh.start("box-0")
            try:
                end = await ended(box)
                if (copy / JOB / "status").exists():
                    with pytest.raises(GpuLayerError):
                        await mesh.stage(spec)
            finally:
                await box.crash()
            what = f"write {number} of {len(trace.copies)}, lost: {lost}: {end}"
            if last and not lost.startswith("spec"):
                assert end == "exit code 3", what
            if number >= trace.went and not lost.startswith("spec"):
                assert end, what
    assert starts.read_text() == "started\n"
    assert next(numbers) > 100


async def ended(box: Box) -> str:
    """Return how the job ended; "" if nobody knows it."""
    one = box.host.jobs.get(JOB)
    if one is None:
        return ""
    await eventually(lambda: one.ended and one.current_record().state in OVER)
    record = one.current_record()
    assert record.state is not JobState.SUCCEEDED
    return record.failure.reason if record.failure else record.cause


async def test_log_and_events_cut_at_any_byte_are_read_up_to_there(tmp_path: Path) -> None:
    job_dir = tmp_path / "job"
    (job_dir / "logs").mkdir(parents=True)
    records = [LogRecord(0, seq, 1.0 * seq, LogStream.OUT, b"line %d\n" % seq) for seq in (1, 2, 3)]
    ends = list(itertools.accumulate(len(one.pack()) for one in records))
    packed = b"".join(one.pack() for one in records)
    lines = [
        b'{"n": %d, "event": "rank-started", "mono": 0, "rank": 0, "pid": 5}\n' % n for n in (1, 2)
    ]
    for cut in range(len(packed) + 1):
        (job_dir / "logs/rank0.log").write_bytes(packed[:cut])
        parser = RecordParser()
        found: list[LogRecord] = []
        async for batch in shims.ShimRunner().follow_logs(job_dir, [0], {}, follow=False):
            found += parser.feed(batch)
        assert found == [one for one, end in zip(records, ends, strict=True) if end <= cut]
        tail = tuple(one.data.decode().strip() for one in found)
        assert shims.ShimRunner().tail_lines(job_dir, 0, 5) == tail
    for cut in range(len(b"".join(lines)) + 1):
        (job_dir / "status").write_bytes(b"".join(lines)[:cut])
        assert len(shims._Status(job_dir).read()) == cut // len(lines[0])


async def test_papers_of_a_job_cut_at_any_byte_are_none(mesh: Mesh, tmp_path: Path) -> None:
    spec = mesh.spec()
    record = JobRecord(spec, JobState.RUNNING, spec.slots[0].node)
    signed = mesh.sign(spec)
    folder = JobFolder.create(tmp_path / "job", signed)
    for name, data, read in (
        ("record", wire.pack(record), folder.record),
        ("manifest", MANIFEST, lambda: folder.manifest(spec)),
    ):
        for cut in range(len(data)):
            (folder.path / name).write_bytes(data[:cut])
            assert read() is None, (name, cut)
        (folder.path / name).write_bytes(data)
        assert read() is not None
    for cut in range(len(signed)):
        with pytest.raises(RemoteProtocolError):
            open_signed(signed[:cut], mesh.book())


def test_options_of_an_agent_are_written_once_and_outlive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of that file would keep an agent from starting."""
    written: list[bool] = []

    def replace_file(path: Path, data: bytes, *, durable: bool = False) -> None:
        files.replace_file(path, data, durable=durable)
        written.append(durable)

    monkeypatch.setattr(configuration, "replace_file", replace_file)
    for zone in ("a", "a", "b"):
        configuration.remember(AgentConfig(home=tmp_path, name="box", zone=zone))
    assert written == [True, True]
    kept = configuration.agent_config(["--state-dir", str(tmp_path)], {})
    assert (kept.name, kept.zone) == ("box", "b")
