"""A node's life on a disk that is full from some moment on: whole files, and no agent lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from boxes import CHUNK, CONTENT, JOB, MANIFEST, ORDER, Box, Mesh
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.jobspec import OVER, JobRecord, JobState
from gpulayer_mesh.core.joining import JoinRequest
from gpulayer_mesh.core.logrecord import RecordParser
from gpulayer_mesh.core.types import Address, Role
from gpulayer_mesh.errors import GpuLayerError
from gpulayer_mesh.runtime import hosting
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime.livejob import JobFolder, open_signed
from shim_jobs import eventually

pytestmark = [
    pytest.mark.network,  # FreePorts binds
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system"
    ),
]

PAGE = 4096  # bytes; any file takes one at least
DISK = 128 * PAGE


class Disk:
    """A file system of 128 pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, left: int) -> None:
        """Leave so many pages free."""
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(PAGE))
            except OSError:
                file.truncate(file.tell() - left * PAGE)

    def free(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-o", f"size={DISK},mode=700"]
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "none", str(folder)], check=False)
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# --- who we are ----------------------------------------------------------------------------------


def test_identity_outlives_a_disk_that_is_full_at_any_write(disk: Disk, tmp_path: Path) -> None:
    laptop = identities.load_or_create(tmp_path / "laptop")
    identities.create_mesh(laptop, "laptop")
    home = disk.folder / "home"
    box = identities.load_or_create(home)
    request = JoinRequest(box.node, box.key.public_key().public_bytes_raw(), "box", ())
    admission = identities.admit(laptop, request, (Role.WORKER,), {})
    boots = [identities.next_boot(home)]
    joined = []
    for left in range(8):
        disk.fill(left)
        with contextlib.suppress(OSError):
            identities.save_membership(box, admission)
        boots.append(identities.next_boot(home))
        identities.save_peers(home, {laptop.node: (Address("192.0.2.1", left + 1),)})
        assert identities.load_or_create(home).node == box.node
        joined.append(identities.load_mesh(box) is not None)
        disk.free()
        boots.append(identities.next_boot(home))
    assert list(home.rglob(".*")) == []  # half-written
    assert joined == sorted(joined)
    assert joined[0] is False
    assert joined[-1] is True
    assert boots == list(range(1, len(boots) + 1))


# --- jobs ----------------------------------------------------------------------------------------

PRINTS = """
import os, sys, time
print("up", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
for number in range(1000):
    print("line", number)
try:
    open(os.environ["GPULAYER_OUT"] + "/result", "w").write("done")
except OSError:
    print("no room for the result")
sys.exit(3)
"""


def sound(box: Box) -> None:
    """Nothing on disk is half a file."""
    for folder in (box.home / "jobs").iterdir():
        spec = open_signed((folder / "spec").read_bytes(), box.book).spec
        JobFolder(folder).record()
        JobFolder(folder).manifest(spec)
        for name in ("status", "stop"):
            if (folder / name).exists():
                for line in (folder / name).read_text().splitlines():
                    json.loads(line)
        for log in folder.glob("logs/*.log"):
            parser = RecordParser()
            parser.feed(log.read_bytes())
            assert not parser.pending
        assert not list(folder.glob(".*"))


class Life:
    """One job from its first request to its end, on a disk that fills at a moment of it."""

    def __init__(self, mesh: Mesh, box: Box, number: int, gate: Path) -> None:
        self.mesh = mesh
        self.box = box
        self.ident = f"{number:010d}"
        self.gate = gate

    async def prepare(self) -> None:
        argv = (b"-c", PRINTS.encode(), os.fsencode(self.gate))
        spec = self.mesh.spec(id=self.ident, argv=argv)
        await self.ask("POST", "reserve", wire.pack({"spec": self.mesh.sign(spec)}))
        await self.ask("POST", "manifest", MANIFEST)
        chunk = f"/v1/chunks/{CHUNK.hex()}"
        await self.box.ask("laptop", "PUT", chunk, raw=CONTENT, job=self.ident)
        source = {"node": self.box.node, "addresses": []}
        await self.ask("POST", "stage", wire.pack({"sources": [source], "owners": [0]}))

    async def go(self) -> None:
        await self.ask("POST", "go", wire.pack(ORDER))
        await eventually(lambda: self.record().state is not JobState.STARTING)

    async def ask(self, method: str, what: str, body: bytes) -> None:
        await self.box.ask("laptop", method, f"/v1/jobs/{self.ident}/{what}", raw=body)

    def record(self) -> JobRecord:
        return self.box.host.jobs[self.ident].current_record()

    async def end(self) -> str:
        self.gate.touch()
        await eventually(lambda: self.record().state in OVER)
        failure = self.record().failure
        assert failure is not None
        return failure.reason


@pytest.fixture
async def mesh(disk: Disk) -> AsyncIterator[Mesh]:
    made = Mesh(disk.folder)
    yield made
    for box in list(made.boxes.values()):
        await box.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["reserve", "go", "running"])
async def test_jobs_and_agent_outlive_a_disk_that_is_full_at_any_write(
    disk: Disk, mesh: Mesh, moment: str, tmp_path: Path
) -> None:
    (box,) = await mesh.start("box-0")
    ends: list[str] = []
    while len(ends) < 4 or (len(ends) < 30 and ends[-2:] != ["exit code 3"] * 2):
        life = Life(mesh, box, len(ends), tmp_path / f"gate-{len(ends)}")
        try:
            if moment == "reserve":
                disk.fill(len(ends))
            await life.prepare()
            if moment == "go":
                disk.fill(len(ends))
            await life.go()
            if moment == "running":
                disk.fill(len(ends))
                life.box = await box.restart()
            ends.append(await life.end())
        except GpuLayerError as error:
            ends.append(str(error))
        box = await life.box.restart()  # before there is room again
        disk.free()
        sound(box)
        box = life.box = await box.restart()
        if ends[-1] == "exit code 3":
            # Where even the word that it runs could not be saved.
            lost = ["keeper restarted while the job was starting"] if moment == "go" else []
            assert await life.end() in ["exit code 3", *lost]
    assert ends[-2:] == ["exit code 3"] * 2
    refused = [end for end in ends if end != "exit code 3"]
    for end in refused:
        assert re.search("No space left|not enough disk space|is the disk full", end), end
    assert bool(refused) is (moment != "running")


async def test_agent_comes_up_on_a_disk_that_takes_nothing_and_watches_once_it_does(
    disk: Disk, mesh: Mesh
) -> None:
    (box,) = await mesh.start("box-1")
    assert not [name for name in ("watches", "ends", "attempts") if (box.home / name).exists()]
    (box.home / "chunks" / "new" / "half").touch()
    spec = mesh.spec(restarts=1, voters=tuple(map(mesh.node, ("box-0", "box-1", "box-2"))))
    word = {"spec": mesh.sign(spec), "secretive": False, "sources": []}

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk.folder)], check=True)

    remount("ro")
    try:
        box = await box.restart()
        with pytest.raises(GpuLayerError, match=r"cannot note a job to watch: .*Read-only"):
            await box.ask("box-0", "POST", f"/v1/watches/{JOB}", word)
    finally:
        remount("rw")
    await box.ask("box-0", "POST", f"/v1/watches/{JOB}", word)
    box = await box.restart()
    assert box.restarts.watched_job(JOB) is not None
    assert (box.home / "watches").stat().st_mode & 0o777 == 0o700


async def test_record_that_the_disk_refused_is_saved_once_there_is_room(
    disk: Disk, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "SAVE_AGAIN_S", 0.1)
    (box,) = await mesh.start("box-0")
    life = Life(mesh, box, 0, tmp_path / "gate")
    await life.prepare()
    await life.go()
    disk.fill(0)
    assert await life.end() == "exit code 3"
    folder = box.host.jobs[life.ident].folder
    saved = folder.record()
    assert saved is not None
    assert saved.state is JobState.RUNNING
    disk.free()

    def over() -> bool:
        saved = folder.record()
        return saved is not None and saved.state is JobState.FAILED

    await eventually(over)
