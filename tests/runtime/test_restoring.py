"""Files of the attempt before in the folder of the next one: what comes, and what never happens."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from copy_nodes import JOB, SHIPPED, Net, Node, listed, ranks, spec_of
from gpulayer_mesh.core.jobspec import HostAddress, OutputFile
from gpulayer_mesh.core.manifest import Manifest
from gpulayer_mesh.core.restoring import RestoreOrder, SlotSource, plan_restore
from gpulayer_mesh.errors import BundleError, GpuLayerError, RemoteProtocolError, TransportError
from gpulayer_mesh.runtime import restoring as runtime
from gpulayer_mesh.runtime.store import ChunkStore
from shim_jobs import eventually

NEXT = "1" * 10
SPEC = spec_of("a", "b", voters=("a", "b", "c"))


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Net]:
    made = Net(tmp_path)
    yield made
    await made.close()


def live(node: Node, *files: OutputFile) -> SlotSource:
    return SlotSource(HostAddress(node.id, ()), files)


async def restore(to: Node, *orders: RestoreOrder, **options: Any) -> None:
    for order in orders:
        options = {"ranks": range(2)} | options
        await to.restoring.fetch(order, to.job_dir(NEXT), **options)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


async def test_files_come_back_in_place_and_rank_zeros_besides(net: Net) -> None:
    a, b = net.node("a"), net.node("b")
    a.write("out/rank0/deep/last:1.ckpt", b"checkpoint")
    a.write("work/a.txt", b"changed\n")
    b.write("out/rank1/mine", b"m")
    slots = (
        live(a, listed(b"checkpoint", "deep/last:1.ckpt"), listed(b"changed\n", "a.txt", "work")),
        live(b, listed(b"m", "mine", rank=1)),
    )
    for slot, node in enumerate((a, b)):
        await restore(node, *plan_restore(JOB, slots, slot), ranks=ranks(SPEC, node))
    assert content(a.job_dir(NEXT)) == {
        "out/rank0/deep/last:1.ckpt": b"checkpoint",
        "restored/deep/last:1.ckpt": b"checkpoint",
        "work/a.txt": b"changed\n",
    }
    assert content(b.job_dir(NEXT)) == {
        "out/rank1/mine": b"m",
        "restored/deep/last:1.ckpt": b"checkpoint",
        "work/a.txt": SHIPPED,
    }
    assert net.files == [("a", "deep/last:1.ckpt")]  # what is here needs no transfer
    for path in (b.job_dir(NEXT) / "restored", b.job_dir(NEXT) / "out"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    restored = b.job_dir(NEXT) / "restored/deep/last:1.ckpt"
    assert stat.S_IMODE(restored.stat().st_mode) == 0o600


async def test_lost_nodes_files_come_from_the_copies_of_its_slot(net: Net) -> None:
    a, b, c = net.node("a"), net.node("b"), net.node("c")
    a.write("out/rank0/x", b"content")
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"content"})
    net.unreachable.add("a")
    net.files.clear()
    (held,) = b.copies.held(JOB)
    slots = (SlotSource(HostAddress(b.id, ()), held.files, 0), None)
    c.readers.add(c.id)
    b.readers.add(c.id)
    await restore(c, *plan_restore(JOB, slots, 0))
    await restore(b, *plan_restore(JOB, slots, 1))
    assert content(c.job_dir(NEXT)) == {
        "out/rank0/x": b"content",
        "restored/x": b"content",
        "work/a.txt": SHIPPED,
    }
    assert content(b.job_dir(NEXT)) == {"restored/x": b"content", "work/a.txt": SHIPPED}
    assert net.files == [("b", "x")]  # once, and b has it


async def test_rank_may_change_what_came_back_without_harm_to_the_copy(net: Net) -> None:
    a, b = net.node("a"), net.node("b")
    a.write("out/rank0/x", b"content")
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"content"})
    (held,) = b.copies.held(JOB)
    await restore(b, *plan_restore(JOB, (SlotSource(HostAddress(b.id, ()), held.files, 0),), 0))
    with (b.job_dir(NEXT) / "out/rank0/x").open("r+b") as file:
        file.write(b"CHANGED")
    assert b.held() == {"x": b"content"}
    assert (b.job_dir(NEXT) / "restored/x").read_bytes() == b"content"


async def test_nothing_to_restore_makes_the_folder_all_the_same(net: Net) -> None:
    a = net.node("a")
    await restore(a, *plan_restore(JOB, (None, None), 0))
    assert list((a.job_dir(NEXT) / "restored").iterdir()) == []


async def test_repeated_order_takes_nothing_again(net: Net) -> None:
    a, b = net.node("a"), net.node("b")
    a.write("out/rank0/x", b"content")
    a.write("out/rank0/empty", b"")
    orders = plan_restore(JOB, (live(a, listed(b"content", "x"), listed(b"", "empty")), None), 1)
    await restore(b, *orders)
    path = b.job_dir(NEXT) / "restored/x"
    before, files = path.stat(), list(net.files)
    await restore(b, *orders)
    assert (path.stat(), net.files) == (before, files)
    path.write_bytes(b"damaged")
    net.unreachable.add("a")
    with pytest.raises(TransportError, match="'x' cannot be had"):
        await restore(b, *orders)
    net.unreachable.clear()
    await restore(b, *orders)
    assert path.read_bytes() == b"content"


async def test_connection_may_break_once(net: Net) -> None:
    a, b = net.node("a"), net.node("b")
    a.write("out/rank0/x", b"content")
    broken = [b""]
    net.alter = lambda piece: broken.pop() if broken else piece
    await restore(b, *plan_restore(JOB, (live(a, listed(b"content", "x")), None), 1))
    assert (b.job_dir(NEXT) / "restored/x").read_bytes() == b"content"


Spoil = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    "spoil",
    [lambda piece: piece[:-1] + b"?", lambda piece: piece[:-1], lambda piece: b""],
    ids=["wrong hash", "cut short", "dies"],
)
async def test_file_that_is_not_whole_never_appears(net: Net, spoil: Spoil) -> None:
    a, b = net.node("a"), net.node("b")
    a.write("out/rank0/x", b"content")
    a.write("out/rank0/good", b"g")
    net.alter = lambda piece: spoil(piece) if len(piece) > 1 else piece
    found = live(a, listed(b"content", "x"), listed(b"g", "good"))
    with pytest.raises(TransportError, match="'x' cannot be had"):
        await restore(b, *plan_restore(JOB, (found, None), 1))
    assert not (b.job_dir(NEXT) / "restored/x").exists()
    assert {path.name for path in b.job_dir(NEXT).iterdir()} == {"work", "restored"}


async def test_crash_half_way_leaves_nothing_that_counts(net: Net) -> None:
    a, b = net.node("a"), net.node("b")
    a.write("out/rank0/x", b"content")
    net.gate.clear()
    orders = plan_restore(JOB, (live(a, listed(b"content", "x")), None), 1)
    task = asyncio.create_task(restore(b, *orders))
    async with asyncio.timeout(10):
        await net.begun.wait()
    (half,) = b.job_dir(NEXT).glob(".restoring-*")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    half.mkdir(exist_ok=True)  # as after a crash
    net.gate.set()
    await restore(b, *orders)
    assert content(b.job_dir(NEXT)) == {"restored/x": b"content", "work/a.txt": SHIPPED}
    assert not half.exists()


async def test_no_room_writes_nothing(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = net.node("a"), net.node("b")

    def full(folder: Path, need_bytes: int) -> None:
        raise BundleError(f"not enough disk space: {need_bytes}")

    monkeypatch.setattr(runtime, "check_space", full)
    found = live(a, listed(b"content", "x"), listed(b"content", "y"))
    with pytest.raises(BundleError, match="14"):
        await restore(b, *plan_restore(JOB, (found, None), 1))
    assert content(b.job_dir(NEXT)) == {"work/a.txt": SHIPPED}


async def test_disk_that_refuses_is_an_error_of_ours(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = net.node("a"), net.node("b")
    a.write("out/rank0/x", b"content")

    async def failing(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runtime, "receive", failing)
    with pytest.raises(GpuLayerError, match="No space left on device"):
        await restore(b, *plan_restore(JOB, (live(a, listed(b"content", "x")), None), 1))


async def test_shipped_program_stays_executable(net: Net) -> None:
    a = net.node("a")
    a.write("work/a.txt", b"#!/bin/sh\n")
    (a.job_dir(NEXT) / "work/a.txt").chmod(0o755)
    await restore(a, *plan_restore(JOB, (live(a, listed(b"#!/bin/sh\n", "a.txt", "work")),), 0))
    path = a.job_dir(NEXT) / "work/a.txt"
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"#!/bin/sh\n", 0o755)


async def test_program_that_the_job_made_is_executable_again(net: Net) -> None:
    a = net.node("a")
    a.write("out/rank0/run", b"#!/bin/sh\n")
    (a.job_dir(JOB) / "out/rank0/run").chmod(0o755)
    file, _ = ChunkStore.scan_outputs(a.job_dir(JOB), Manifest(), 0).files
    await restore(a, *plan_restore(JOB, (live(a, file),), 0))
    for name in ("out/rank0/run", "restored/run"):
        assert stat.S_IMODE((a.job_dir(NEXT) / name).stat().st_mode) == 0o700


async def test_file_may_have_become_a_folder_and_a_folder_a_file(net: Net) -> None:
    a = net.node("a")
    (a.job_dir() / "work/a.txt").unlink()
    a.write("work/a.txt/inner", b"1")
    a.write("work/folder", b"2")
    (a.job_dir(NEXT) / "work/folder/deep").mkdir(parents=True)
    found = live(a, listed(b"1", "a.txt/inner", "work"), listed(b"2", "folder", "work"))
    await restore(a, *plan_restore(JOB, (found,), 0))
    assert content(a.job_dir(NEXT) / "work") == {"a.txt/inner": b"1", "folder": b"2"}


async def test_links_in_the_way_are_replaced_and_never_followed(net: Net, tmp_path: Path) -> None:
    a = net.node("a")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"precious")
    folder = a.job_dir(NEXT)
    (folder / "out").symlink_to(outside)
    (folder / "restored").symlink_to(outside)
    (folder / "work/link").symlink_to(outside)
    (folder / "work/x").symlink_to(outside / "x")
    os.mkfifo(folder / "work/pipe")
    a.write("out/rank0/x", b"1")
    for path in ("link/x", "x", "pipe"):
        a.write(f"work/{path}", b"2")
    files = [listed(b"2", path, "work") for path in ("link/x", "x", "pipe")]
    await restore(a, *plan_restore(JOB, (live(a, listed(b"1", "x"), *files),), 0))
    assert content(outside) == {"x": b"precious"}
    assert list(outside.iterdir()) == [outside / "x"]
    assert content(folder) == {
        "out/rank0/x": b"1",
        "restored/x": b"1",
        "work/a.txt": SHIPPED,
        "work/link/x": b"2",
        "work/pipe": b"2",
        "work/x": b"2",
    }
    assert not any(path.is_symlink() for path in folder.rglob("*"))


@pytest.mark.parametrize("path", ["../x", "/tmp/x", "a/../../x", "a\0b", ".", "a//b", ""])
async def test_unsafe_path_writes_nothing(net: Net, path: str) -> None:
    a, b = net.node("a"), net.node("b")
    a.write("out/rank0/good", b"g")
    found = live(a, listed(b"g", "good"), listed(b"g", path))
    with pytest.raises(RemoteProtocolError):
        await restore(b, *plan_restore(JOB, (found, None), 1))
    assert content(b.job_dir(NEXT)) == {"work/a.txt": SHIPPED}
    assert not (b.job_dir(NEXT) / "restored").exists()


async def test_files_of_other_ranks_are_not_written(net: Net) -> None:
    a = net.node("a")
    (order,) = plan_restore(JOB, (live(a, listed(b"x", "x")),), 0)
    order = replace(order, files=tuple(replace(file, rank=9) for file in order.files[:1]))
    with pytest.raises(RemoteProtocolError, match="rank 9"):
        await restore(a, order)


async def test_restore_waits_for_the_working_folder(net: Net) -> None:
    a = net.node("a")
    folder = a.home / "jobs" / NEXT
    folder.mkdir(parents=True)
    with pytest.raises(RemoteProtocolError, match="before the working folder"):
        await a.restoring.fetch(RestoreOrder(JOB), folder, ranks=range(1))
    assert list(folder.iterdir()) == []


async def test_progress_is_told_while_bytes_arrive(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "PROGRESS_S", 0.0)
    a, b = net.node("a"), net.node("b")
    a.write("out/rank0/x", bytes(3 * 1024**2))
    told = 0

    def progress() -> None:
        nonlocal told
        told += 1

    found = live(a, listed(bytes(3 * 1024**2), "x"))
    await restore(b, *plan_restore(JOB, (found, None), 1), progress=progress)
    assert told >= 3
