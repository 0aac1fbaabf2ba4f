"""Chunks, the working folder made from them, and the files that come home."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from gpulayer_mesh.core.jobspec import Outputs, Stayed
from gpulayer_mesh.core.manifest import CHUNK_BYTES, Entry, EntryKind, Manifest
from gpulayer_mesh.errors import BundleError, GpuLayerError, NotFoundError, RemoteProtocolError
from gpulayer_mesh.runtime import store as store_module
from gpulayer_mesh.runtime.store import ChunkStore


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def pieces(data: bytes) -> list[bytes]:
    return [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]


def file_entry(path: str, data: bytes, executable: bool = False) -> Entry:
    chunks = tuple(sha(piece) for piece in pieces(data))
    return Entry(path, EntryKind.FILE, len(data), executable, sha(data), chunks)


async def fill(store: ChunkStore, *contents: bytes) -> None:
    for data in contents:
        for piece in pieces(data):
            await store.put(sha(piece), piece)


def manifest_of(*entries: Entry) -> Manifest:
    return Manifest(tuple(sorted(entries, key=lambda entry: entry.path)))


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "chunks")


# -- chunks


async def test_chunk_is_kept_under_its_hash(store: ChunkStore) -> None:
    data = b"x" * CHUNK_BYTES
    assert store.missing([sha(data), sha(b"y")]) == [sha(data), sha(b"y")]
    await store.put(sha(data), data)
    await store.put(sha(data), data)
    assert store.has(sha(data))
    assert store.missing([sha(data), sha(b"y")]) == [sha(b"y")]
    assert store.read(sha(data)) == data
    with pytest.raises(NotFoundError):
        store.read(sha(b"y"))


async def test_chunk_with_another_hash_or_too_long_is_refused(
    store: ChunkStore, tmp_path: Path
) -> None:
    with pytest.raises(RemoteProtocolError, match="another hash"):
        await store.put(sha(b"a"), b"b")
    long = b"x" * (CHUNK_BYTES + 1)
    with pytest.raises(RemoteProtocolError, match="exceeds"):
        await store.put(sha(long), long)
    assert tree(tmp_path / "chunks") == {"new"}


async def test_one_flipped_bit_is_always_found(store: ChunkStore, rng: random.Random) -> None:
    data = bytearray(rng.randbytes(4096))
    for _ in range(500):
        bit = rng.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            store._write(sha(b"what was promised"), bytes(data))


async def test_waiters_wake_when_the_chunk_comes(store: ChunkStore) -> None:
    waiting = [asyncio.create_task(store.wait_for(sha(b"a"), 30)) for _ in range(3)]
    other = asyncio.create_task(store.wait_for(sha(b"b"), 0.05))
    await asyncio.sleep(0)
    await store.put(sha(b"a"), b"a")
    assert await asyncio.gather(*waiting) == [True, True, True]
    assert await other is False
    assert await store.wait_for(sha(b"a"), 0) is True
    assert store._waiting == {}


async def test_half_written_chunks_of_an_earlier_process_are_removed(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    await store.put(sha(b"a"), b"a")
    (tmp_path / "new" / "left").write_bytes(b"half")
    again = ChunkStore(tmp_path)
    assert again.has(sha(b"a"))
    assert list((tmp_path / "new").iterdir()) == []


async def test_full_disk_is_an_error_that_leaves_nothing(
    store: ChunkStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(GpuLayerError, match="No space left"):
        await store.put(sha(b"a"), b"a")
    assert list((tmp_path / "chunks" / "new").iterdir()) == []


async def test_prune_removes_the_longest_unused_first(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, quota_bytes=250)
    data = [bytes([i]) * 100 for i in range(5)]
    for age, chunk in enumerate(data):
        await store.put(sha(chunk), chunk)
        os.utime(store._path(sha(chunk)), ns=(0, 10**9 * age))
    assert store.prune(keep={sha(data[0])}) == 300
    assert [store.has(sha(chunk)) for chunk in data] == [True, False, False, False, True]
    assert store.prune(keep=()) == 0


# -- the working folder


async def test_tree_arrives_as_it_was(store: ChunkStore, tmp_path: Path) -> None:
    large = random.Random(1).randbytes(2 * CHUNK_BYTES + 17)
    exact = large[:CHUNK_BYTES]
    manifest = manifest_of(
        file_entry("træin v2.py", b"print()\n"),
        file_entry("run.sh", b"#!/bin/sh\n", executable=True),
        file_entry("deep/er/a  b.txt", large),
        file_entry("deep/exact", exact),
        file_entry("empty.txt", b""),
        Entry("none/at all", EntryKind.DIR),
    )
    await fill(store, b"print()\n", b"#!/bin/sh\n", large, exact)
    work = tmp_path / "work"
    store.materialise(manifest, work)
    assert tree(work) == {
        "træin v2.py",
        "run.sh",
        "deep",
        "deep/er",
        "deep/er/a  b.txt",
        "deep/exact",
        "empty.txt",
        "none",
        "none/at all",
    }
    assert (work / "deep/er/a  b.txt").read_bytes() == large
    assert (work / "deep/exact").read_bytes() == exact
    assert (work / "empty.txt").read_bytes() == b""
    assert work.stat().st_mode & 0o777 == 0o700
    assert (work / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (work / "deep/exact").stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == ["chunks", "work"]


async def test_second_tree_under_the_same_name_is_refused(
    store: ChunkStore, tmp_path: Path
) -> None:
    await fill(store, b"a")
    manifest = manifest_of(file_entry("a", b"a"))
    store.materialise(manifest, tmp_path / "work")
    with pytest.raises(BundleError):
        store.materialise(manifest, tmp_path / "work")
    assert sorted(os.listdir(tmp_path)) == ["chunks", "work"]


async def test_missing_chunk_is_named_before_anything_is_written(
    store: ChunkStore, tmp_path: Path
) -> None:
    await fill(store, b"a")
    with pytest.raises(BundleError, match=f"1 chunks are missing, first {sha(b'b').hex()[:8]}"):
        store.materialise(manifest_of(file_entry("a", b"a"), file_entry("b", b"b")), tmp_path / "w")
    assert sorted(os.listdir(tmp_path)) == ["chunks"]


async def test_chunk_damaged_on_disk_is_thrown_away(store: ChunkStore, tmp_path: Path) -> None:
    large = random.Random(2).randbytes(2 * CHUNK_BYTES)
    manifest = manifest_of(file_entry("large", large))
    await fill(store, large)
    first, second = (sha(piece) for piece in pieces(large))
    store._path(second).write_bytes(b"torn")
    with pytest.raises(BundleError, match="does not have the hash"):
        store.materialise(manifest, tmp_path / "work")
    assert sorted(os.listdir(tmp_path)) == ["chunks"]
    assert (store.has(first), store.has(second)) == (True, False)
    await fill(store, large)
    store.materialise(manifest, tmp_path / "work")
    assert (tmp_path / "work/large").read_bytes() == large


async def test_file_whose_chunks_do_not_make_it_is_refused(
    store: ChunkStore, tmp_path: Path
) -> None:
    large = bytes(CHUNK_BYTES) + b"tail"
    good = file_entry("f", large)
    await fill(store, large)
    lying = Entry("f", EntryKind.FILE, good.size, False, sha(b"other"), good.chunks)
    with pytest.raises(BundleError, match="does not have the hash"):
        store.materialise(Manifest((lying,)), tmp_path / "work")
    assert sorted(os.listdir(tmp_path)) == ["chunks"]
    assert store.missing(good.chunks) == []


class Usage(NamedTuple):
    total: int
    used: int
    free: int


async def test_bundle_that_would_fill_the_disk_is_refused(
    store: ChunkStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store, b"a" * CHUNK_BYTES)
    manifest = manifest_of(file_entry("a", b"a" * CHUNK_BYTES))
    small = Usage(100 * 2**20, 90 * 2**20, 10 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: small)
    with pytest.raises(BundleError, match="1 MiB needed, 10 MiB free, of which 10 MiB stay"):
        store.materialise(manifest, tmp_path / "work")
    large = Usage(1000 * 2**30, 994 * 2**30, 6 * 2**30)  # a tenth would be 100 GiB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: large)
    store.materialise(manifest, tmp_path / "work")


async def test_hostile_manifest_writes_nothing_outside(
    store: ChunkStore, tmp_path: Path, rng: random.Random
) -> None:
    await fill(store, b"x")
    folder = tmp_path / "in" / "job"
    folder.mkdir(parents=True)
    before = tree(tmp_path)
    parts = ["..", ".", "", "a", "A", "b", "..\\b", "C:", "nul", "a\0", "é", "e\u0301", "/etc"]
    parts += ["x" * 300, "a\n", "~", "-", " ", "work"]
    written = 0
    for i in range(2000):
        paths = {
            "/".join(rng.choices(parts, k=rng.randrange(1, 5))) for _ in range(rng.randrange(4))
        }
        kinds = {path: rng.choice(["file", "dir"]) for path in paths}
        manifest = manifest_of(
            *(
                file_entry(path, b"x") if kind == "file" else Entry(path, EntryKind.DIR)
                for path, kind in kinds.items()
            )
        )
        work = folder / f"work{i}"
        try:
            store.materialise(manifest, work)
        except (RemoteProtocolError, BundleError):
            assert not work.exists()
        else:
            written += 1
            shutil.rmtree(work)
        assert tree(tmp_path) == before
    assert written > 100


# -- outputs


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    for name in ("out/rank4", "out/rank12", "work/pkg"):
        (tmp_path / "job" / name).mkdir(parents=True)
    return tmp_path / "job"


def listed(job_dir: Path, *shipped: Entry) -> list[tuple[str, int, str, bytes]]:
    found = ChunkStore.scan_outputs(job_dir, manifest_of(*shipped), 4).files
    for file in found:
        with open(ChunkStore.open_output(job_dir, file.area, file.rank, file.path), "rb") as opened:
            data = opened.read()
        assert (len(data), sha(data)) == (file.size, file.sha256)
    return [(f.area, f.rank, f.path, f.sha256) for f in found]


def test_outputs_are_those_of_the_ranks_and_new_or_changed_files(job_dir: Path) -> None:
    (job_dir / "out/rank4/r4.txt").write_bytes(b"four")
    (job_dir / "out/rank12/sub").mkdir()
    (job_dir / "out/rank12/sub/12:30 ø.txt").write_bytes(b"")
    (job_dir / "work/same.py").write_bytes(b"same")
    (job_dir / "work/pkg/edited.py").write_bytes(b"new!")
    (job_dir / "work/pkg/made.bin").write_bytes(b"made")
    (job_dir / "work/pkg/__pycache__").mkdir()
    (job_dir / "work/pkg/__pycache__/x.txt").write_bytes(b"x")
    (job_dir / "work/pkg/old.pyc").write_bytes(b"x")
    assert listed(
        job_dir, file_entry("same.py", b"same"), file_entry("pkg/edited.py", b"old!")
    ) == [
        ("out", 4, "r4.txt", sha(b"four")),
        ("out", 12, "sub/12:30 ø.txt", sha(b"")),
        ("work", 4, "pkg/edited.py", sha(b"new!")),
        ("work", 4, "pkg/made.bin", sha(b"made")),
    ]


def test_links_pipes_sockets_and_nameless_files_stay(
    job_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = job_dir / "out/rank4"
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"key")
    (out / "link").symlink_to(secret / "key")
    (out / "folder").symlink_to(secret)
    os.mkfifo(out / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(out)  # the path of a socket may have 104 bytes on macOS
        listener.bind("socket")
    (out / "ok").write_bytes(b"ok")
    (out / "two\nlines").touch()
    (job_dir / "work/latest").symlink_to("same.py")
    expected = [
        Stayed(4, b"folder", "it is a symbolic link"),
        Stayed(4, b"link", "it is a symbolic link"),
        Stayed(4, b"pipe", "it is a named pipe"),
        Stayed(4, b"socket", "it is a socket"),
        Stayed(4, b"two\nlines", "its name contains a control character"),
        Stayed(4, b"latest", "it is a symbolic link"),
    ]
    if sys.platform == "linux":  # macOS refuses such a name itself
        (out / "\udcff").touch()
        expected.insert(5, Stayed(4, b"\xff", "its name is not UTF-8"))
    assert listed(job_dir) == [("out", 4, "ok", sha(b"ok"))]
    found = ChunkStore.scan_outputs(job_dir, Manifest(), 4)
    assert (list(found.stayed), found.more) == (expected, 0)


def test_what_stays_is_named_to_a_limit_and_counted_beyond_it(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "STAYED_MAX", 2)
    for name in "abcd":
        (job_dir / "out/rank4" / name).symlink_to("x")
    found = ChunkStore.scan_outputs(job_dir, Manifest(), 4)
    assert ([one.path for one in found.stayed], found.more) == ([b"a", b"b"], 2)


@pytest.mark.parametrize(
    "path",
    [
        "link",
        "folder/key",
        "pipe",
        "../rank4/ok",
        "/etc/passwd",
        "",
        "ok/x",
        "no",
        "sub",
        "a\0b",
        "./ok",
    ],
)
def test_only_regular_files_inside_can_be_opened(job_dir: Path, tmp_path: Path, path: str) -> None:
    out = job_dir / "out/rank4"
    (tmp_path / "key").write_bytes(b"key")
    (out / "link").symlink_to(tmp_path / "key")
    (out / "folder").symlink_to(tmp_path)
    (out / "sub").mkdir()
    (out / "ok").write_bytes(b"ok")
    os.mkfifo(out / "pipe")
    with pytest.raises(NotFoundError):
        ChunkStore.open_output(job_dir, "out", 4, path)


def test_area_outside_the_job_cannot_be_opened(job_dir: Path) -> None:
    (job_dir / "logs").mkdir()
    (job_dir / "logs/f").write_bytes(b"x")
    for area, rank in (("logs", 4), ("../job/logs", 4), ("out", 5), ("out", -1)):
        with pytest.raises(NotFoundError):
            ChunkStore.open_output(job_dir, area, rank, "f")


def test_output_list_is_limited(job_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "OUTPUTS_MAX", 3)
    for i in range(5):
        (job_dir / f"out/rank4/{i}").write_bytes(b"")
    assert [path for _, _, path, _ in listed(job_dir)] == ["0", "1", "2"]
    assert ChunkStore.scan_outputs(job_dir, Manifest(), 4).stayed == (
        Stayed(4, b"3", "there are more than 3 files"),
        Stayed(4, b"4", "there are more than 3 files"),
    )


def test_file_that_was_renamed_or_dated_after_its_last_write_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "rank0"
    folder.mkdir(parents=True)
    (folder / "written").write_text("a")
    (folder / "fresh").write_text("a")
    about = (folder / "fresh").stat()
    os.utime(folder / "fresh", ns=(about.st_atime_ns, about.st_mtime_ns - 1))  # clocks are coarse
    (folder / "fresh").rename(folder / "whole")
    stamps = ChunkStore.stamp_outputs(tmp_path, range(1))
    assert {path: stamp.whole for (_, _, path), stamp in stamps.items()} == {
        "written": False,
        "whole": True,
    }


def test_job_without_outputs_lists_none(tmp_path: Path) -> None:
    assert ChunkStore.scan_outputs(tmp_path / "none", Manifest(), 0) == Outputs()
