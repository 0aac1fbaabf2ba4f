"""Copies of running jobs' files: what arrives, what a failure leaves, who may ask for it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from copy_nodes import (
    CHUNK,
    JOB,
    MANIFEST,
    PACKED,
    SHIPPED,
    Net,
    Node,
    listed,
    node_id,
    spec_of,
)
from gpulayer_mesh.core import copies as core
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.copies import CopyOrder, CopyState, HeldSlot
from gpulayer_mesh.core.jobspec import HostAddress, JobSpec, OutputFile
from gpulayer_mesh.core.joining import JoinRequest
from gpulayer_mesh.core.types import Address, NodeId, Role
from gpulayer_mesh.errors import (
    BundleError,
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    PlacementBusyError,
    RemoteProtocolError,
    TransportError,
)
from gpulayer_mesh.runtime import copies as runtime
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime.copies import Copies
from gpulayer_mesh.runtime.dial import Dialer
from gpulayer_mesh.runtime.door import Door, DoorRequest, Route, Stream
from gpulayer_mesh.runtime.interfaces import InterfaceWatch
from gpulayer_mesh.runtime.peers import Peers
from gpulayer_mesh.runtime.store import ChunkStore
from gpulayer_mesh.runtime.transfer import read_pieces
from shim_jobs import eventually

SPEC = spec_of("a", "b", voters=("a", "b", "c"))


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Net]:
    made = Net(tmp_path)
    yield made
    await made.close()


@pytest.fixture
def abc(net: Net) -> tuple[Node, Node, Node]:
    return net.node("a"), net.node("b"), net.node("c")


async def offer(to: Node, by: Node, version: int, *files: OutputFile, **fields: Any) -> CopyState:
    """Send a list by hand."""
    spec = fields.pop("spec", SPEC)
    nodes = [slot.node for slot in spec.slots]
    slot = fields.pop("slot") if "slot" in fields else nodes.index(by.id)
    body = wire.pack(CopyOrder(wire.pack(spec), slot, version, files))
    answer = await to.ask(by, "POST", fields.pop("path", f"/v1/copies/{spec.id}"), body)
    assert isinstance(answer, CopyState)
    return answer


def idle(node: Node, slot: int = 0, job: str = JOB) -> bool:
    """Nothing is on its way to a node."""
    one = node.copies._jobs.get(job)
    return one is None or slot not in one.pulls


# --- a job that runs -----------------------------------------------------------------------------


async def test_files_of_every_rank_and_folder_are_copied_and_follow_changes(
    abc: tuple[Node, Node, Node],
) -> None:
    a, b, _ = abc
    a.write("out/rank0/loss:0.3.txt", b"best")
    a.write("out/rank0/empty", b"")
    a.write("work/deep/er/made.txt", b"made")
    a.write("work/__pycache__/a.pyc", b"no")
    a.write("out/rank7/not-ours", b"no")
    a.follow(SPEC)
    wanted = {"loss:0.3.txt": b"best", "empty": b"", "deep/er/made.txt": b"made"}
    await eventually(lambda: b.held() == wanted)
    a.write("out/rank0/loss:0.3.txt", b"better")
    a.write("work/a.txt", b"changed\n")
    (a.job_dir() / "out/rank0/empty").unlink()
    wanted = {"loss:0.3.txt": b"better", "deep/er/made.txt": b"made", "a.txt": b"changed\n"}
    await eventually(lambda: b.held() == wanted)
    await eventually(lambda: len(list((b.home / "copies" / JOB / "blobs").iterdir())) == 3)
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (b.home / "copies").rglob("*")}
    assert set(modes.values()) == {0o700, 0o600}
    assert all((mode == 0o700) == path.is_dir() for path, mode in modes.items())


async def test_nothing_is_hashed_or_sent_twice(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = abc
    hashed: list[str] = []
    real = ChunkStore.hash_output

    def counting(job_dir: Path, key: core.FileKey, **options: Any) -> object:
        hashed.append(key[2])
        return real(job_dir, key, **options)

    monkeypatch.setattr(a.store, "hash_output", counting)
    a.write("out/rank0/x", b"x")
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"x"})
    looks = 0
    real_stamps = a.store.stamp_outputs

    def stamps(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return real_stamps(*args)

    monkeypatch.setattr(a.store, "stamp_outputs", stamps)
    await eventually(lambda: looks > 10)
    assert sorted(hashed) == ["a.txt", "x"]
    assert [method for method, _ in a.calls].count("POST") == 1
    assert a.net.files == [("a", "x")]


async def test_job_without_files_has_an_empty_copy(abc: tuple[Node, Node, Node]) -> None:
    a, b, _ = abc
    a.follow(SPEC)
    await eventually(lambda: b.held() == {})


async def test_nobody_to_hold_ends_at_once(net: Net) -> None:
    a = net.node("a")
    async with asyncio.timeout(10):
        await a.follow(spec_of("a"))


async def test_two_slots_and_equal_content_share_a_holder(net: Net) -> None:
    a, b, w = net.node("a"), net.node("b"), net.node("w")
    spec = spec_of("a", "b", voters=("a", "b", "w"))
    net.unreachable.add("nobody")
    a.write("out/rank0/x", b"same")
    b.write("out/rank1/x", b"same")
    b.write("out/rank1/y", b"same")
    b.follow(spec)
    await eventually(lambda: w.held(1) == {"x": b"same", "y": b"same"})
    assert len(net.files) == 1
    await offer(w, a, 1, listed(b"same", "x"), spec=spec)
    await eventually(lambda: w.held(0) == {"x": b"same"})
    assert len(net.files) == 1
    w.copies.forget(JOB)
    await eventually(lambda: w.on_disk() == [])


async def test_content_of_the_attempt_before_is_not_sent_again(net: Net) -> None:
    a, b = net.node("a"), net.node("b")
    first = spec_of("a", "b")
    a.write("out/rank0/x", b"x")
    task = a.follow(first)
    await eventually(lambda: b.held() == {"x": b"x"})
    task.cancel()
    second = replace(first, id="1" * 10, origin=JOB, restart=1)
    a.write("out/rank0/x", b"x", "1" * 10)
    a.follow(second)
    await eventually(lambda: b.held(job="1" * 10) == {"x": b"x"})
    assert len(net.files) == 1
    b.copies.forget(JOB)
    await eventually(lambda: not (b.home / "copies" / JOB / JOB).exists())
    assert b.held(job="1" * 10) == {"x": b"x"}
    assert b.copies.jobs() == {"1" * 10}


async def test_log_that_grows_during_its_transfer_is_copied_as_it_was(
    abc: tuple[Node, Node, Node],
) -> None:
    a, b, _ = abc
    log = a.write("out/rank0/log", b"line 1\n")
    with log.open("ab") as more:
        more.write(b"line 2\n")
    assert (await offer(b, a, 1, listed(b"line 1\n", "log"))).wanted == 1
    await eventually(lambda: b.held() == {"log": b"line 1\n"})


# --- failures ------------------------------------------------------------------------------------


async def test_old_list_stays_complete_until_the_new_one_is(abc: tuple[Node, Node, Node]) -> None:
    a, b, _ = abc
    a.write("out/rank0/x", b"old")
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"old"})
    a.net.gate.clear()
    a.net.begun.clear()
    a.write("out/rank0/x", b"new")
    async with asyncio.timeout(10):
        await a.net.begun.wait()
    assert b.held() == {"x": b"old"}
    await b.restart()  # its agent crashes half way
    assert b.held() == {"x": b"old"}
    assert not list((b.home / "copies" / JOB / "new").iterdir())
    a.net.gate.set()
    a.write("out/rank0/y", b"more")  # else the sender would ask only ten seconds later
    await eventually(lambda: b.held() == {"x": b"new", "y": b"more"})


async def test_sender_goes_on_after_its_agent_was_restarted(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = abc
    a.write("out/rank0/x", b"old")
    task = a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"old"})
    task.cancel()
    await a.restart()
    monkeypatch.setattr("time.time_ns", lambda: 1_000_000)  # and its clock was set back
    a.write("out/rank0/x", b"new")
    before = b.copies.held(JOB)[0].version
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"new"})
    assert b.copies.held(JOB)[0].version > before


async def test_next_voter_holds_what_the_first_does_not(abc: tuple[Node, Node, Node]) -> None:
    a, b, c = abc
    a.write("out/rank0/x", b"x")
    a.net.unreachable.add("b")
    a.follow(SPEC)
    await eventually(lambda: c.held() == {"x": b"x"})
    assert b.copies.jobs() == set()


async def test_holder_that_dies_is_replaced_though_nothing_changes(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "CHECK_S", 0.01)
    a, b, c = abc
    a.write("out/rank0/x", b"x")
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"x"})
    a.net.unreachable.add("b")
    await eventually(lambda: c.held() == {"x": b"x"})
    assert c.copies.held(JOB)[0].version > b.copies.held(JOB)[0].version


async def test_holder_that_lost_everything_is_given_it_again(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "CHECK_S", 0.01)
    monkeypatch.setattr(core, "AGAIN_S", 0.05)  # where the sender had not heard that it arrived
    a, b, _ = abc
    a.write("out/rank0/x", b"x")
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"x"})
    b.copies.forget(JOB)
    await eventually(lambda: b.held() == {"x": b"x"})


Spoil = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    "spoil",
    [lambda piece: piece[:-1] + b"?", lambda piece: piece[:-1], lambda piece: b""],
    ids=["changed", "cut short", "broken off"],
)
async def test_spoiled_transfer_is_given_up_and_made_good_later(
    abc: tuple[Node, Node, Node],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Spoil,
) -> None:
    monkeypatch.setattr(core, "AGAIN_S", 0.05)
    a, b, _ = abc
    a.write("out/rank0/good", b"g")
    a.write("out/rank0/x", b"content")
    a.net.alter = lambda piece: spoil(piece) if len(piece) > 1 else piece
    a.follow(SPEC)
    await eventually(lambda: "not copied yet" in caplog.text)
    assert b.held() is None
    assert not [name for name in b.on_disk() if "/new/" in name and idle(b)]
    a.net.alter = None
    await eventually(lambda: b.held() == {"good": b"g", "x": b"content"})
    assert a.net.files.count(("a", "good")) == 1  # what had arrived was kept


async def test_file_that_vanishes_before_its_transfer_is_left_out(
    abc: tuple[Node, Node, Node],
) -> None:
    a, b, _ = abc
    a.write("out/rank0/x", b"x")
    answer = await offer(b, a, 1, listed(b"x", "x"), listed(b"longer", "gone"))
    assert answer == CopyState(0, 1)
    await eventually(lambda: idle(b))
    assert await a_state(a, b) == CopyState(0, 0)
    await offer(b, a, 2, listed(b"x", "x"))
    await eventually(lambda: b.held() == {"x": b"x"})


async def a_state(a: Node, b: Node) -> CopyState:
    answer = await b.ask(a, "GET", f"/v1/copies/{JOB}/state?slot=0")
    assert isinstance(answer, CopyState)
    return answer


async def test_list_under_way_is_finished_and_then_the_newest_fetched(
    abc: tuple[Node, Node, Node],
) -> None:
    a, b, _ = abc
    a.net.gate.clear()
    a.write("out/rank0/x", b"one")
    await offer(b, a, 1, listed(b"one", "x"))
    async with asyncio.timeout(10):
        await a.net.begun.wait()  # the file is open: replacing it does no harm
    a.write("out/rank0/x", b"three")
    assert await offer(b, a, 2, listed(b"two", "x")) == CopyState(0, 2)
    assert await offer(b, a, 3, listed(b"three", "x")) == CopyState(0, 3)
    assert await offer(b, a, 2, listed(b"two", "x")) == CopyState(0, 3)
    a.net.gate.set()
    await eventually(lambda: b.held() == {"x": b"three"})
    assert a.net.files == [("a", "x"), ("a", "x")]


async def test_list_that_a_newer_one_disproves_is_not_fetched(
    abc: tuple[Node, Node, Node],
) -> None:
    a, b, _ = abc
    a.net.gate.clear()
    a.write("out/rank0/x", b"x")
    await offer(b, a, 1, listed(b"x", "x"), listed(b"large one", "y"))
    async with asyncio.timeout(10):
        await a.net.begun.wait()
    await offer(b, a, 2, listed(b"x", "x"))
    a.net.gate.set()
    await eventually(lambda: b.held() == {"x": b"x"})
    assert a.net.files == [("a", "x")]


async def test_full_disk_refuses_and_the_next_voter_is_asked(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = abc

    def full(folder: Path, need_bytes: int) -> None:
        if folder.parent == b.home and need_bytes:
            raise BundleError("not enough disk space")

    monkeypatch.setattr(runtime, "check_space", full)
    a.write("out/rank0/x", b"x")
    a.follow(SPEC)
    await eventually(lambda: c.held() == {"x": b"x"})
    assert b.held() is None
    assert [name for name in b.on_disk() if "blobs" in name] == []


async def test_without_room_for_a_data_set_the_outputs_are_copied(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = abc

    def little(folder: Path, need_bytes: int) -> None:
        if need_bytes > 5:
            raise BundleError("not enough disk space")

    monkeypatch.setattr(runtime, "check_space", little)
    a.write("out/rank0/x", b"x")
    a.write("work/data/train.bin", b"a data set")
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"x"})
    assert "nobody has room for the files of its working folder" in caplog.text
    assert c.held() is None


async def test_disk_that_fills_during_a_transfer_leaves_nothing_behind(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, _ = abc
    a.write("out/rank0/small", b"x")
    a.write("out/rank0/large", b"content")
    real = runtime.receive

    async def failing(pieces: Any, file: Any, *, size: int, sha256: bytes) -> None:
        await real(pieces, file, size=size, sha256=sha256)
        if size > 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(runtime, "receive", failing)
    await offer(b, a, 1, listed(b"x", "small"), listed(b"content", "large"))
    await eventually(lambda: idle(b))
    assert "No space left" in caplog.text
    assert b.on_disk() == [f"{JOB}/{JOB}/spec"]


async def test_own_folder_that_cannot_be_read_ends_nothing(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, _ = abc
    real, fails = a.store.stamp_outputs, [OSError(5, "Input/output error")]

    def stamps(job_dir: Path, ranks: range) -> Any:
        if fails:
            raise fails.pop()
        return real(job_dir, ranks)

    monkeypatch.setattr(a.store, "stamp_outputs", stamps)
    a.write("out/rank0/x", b"x")
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"x"})
    assert "Input/output error" in caplog.text


async def test_what_is_hashed_in_time_is_listed_before_the_rest(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "HASH_S", 0.0)
    a, b, _ = abc
    a.write("out/rank0/x", b"x")
    a.write("out/rank0/y", b"larger")
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"x", "y": b"larger"})
    assert [method for method, _ in a.calls].count("POST") == 2


async def test_cancelled_sender_stops_hashing(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = abc
    stops: list[Callable[[], bool]] = []
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(job_dir: Path, key: core.FileKey, *, stopped: Callable[[], bool], **_: Any) -> None:
        stops.append(stopped)
        loop.call_soon_threadsafe(began.set)

    monkeypatch.setattr(a.store, "hash_output", slow)
    task = a.follow(SPEC)
    async with asyncio.timeout(10):
        await began.wait()
    assert not stops[0]()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert stops[0]()


def test_hash_of_a_file_that_changes_meanwhile_is_none(tmp_path: Path) -> None:
    path = tmp_path / "out/rank0/x"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(3 * 1024**2))
    key = ("out", 0, "x")

    def grown() -> bool:
        with path.open("ab") as file:
            file.write(b"x")
        return False

    assert ChunkStore.hash_output(tmp_path, key, may_grow=False, stopped=grown) is None
    size = path.stat().st_size
    found = ChunkStore.hash_output(tmp_path, key, may_grow=True, stopped=grown)
    assert found is not None
    assert found[0].size == size
    assert found[1] == hashlib.sha256(path.read_bytes()[:size]).digest()
    assert ChunkStore.hash_output(tmp_path, key, may_grow=True, stopped=lambda: True) is None
    assert ChunkStore.hash_output(tmp_path, ("out", 0, "y"), may_grow=True, stopped=grown) is None


def test_links_and_pipes_are_not_looked_at(tmp_path: Path) -> None:
    out = tmp_path / "out/rank0"
    out.mkdir(parents=True)
    (out / "x").write_bytes(b"x")
    (out / "link").symlink_to(out / "x")
    (out / "folder").symlink_to("/etc")
    os.mkfifo(out / "pipe")
    (tmp_path / "work").symlink_to("/etc/ssl")
    (out / "sub").mkdir()
    found = ChunkStore.stamp_outputs(tmp_path, range(1))
    assert [key for key in found if key[0] == "out"] == [("out", 0, "x")]


# --- after a restart of the holder's agent -------------------------------------------------------


async def test_new_agent_holds_what_the_old_one_did_and_sweeps_the_rest(
    abc: tuple[Node, Node, Node],
) -> None:
    a, b, _ = abc
    a.write("out/rank0/x", b"x")
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x": b"x"})
    place = b.home / "copies" / JOB
    before = b.on_disk()
    (place / "blobs" / ("0" * 64)).write_bytes(b"of no list")
    (place / "new" / "half").write_bytes(b"half")
    (place / JOB / ".0123.tmp").write_bytes(b"half")
    (b.home / "copies" / "0000000000").mkdir()
    await b.restart()
    assert b.held() == {"x": b"x"}
    assert b.copies.spec(JOB) == SPEC
    assert b.on_disk() == before
    assert not (b.home / "copies" / "0000000000").exists()


@pytest.mark.parametrize("damage", ["blob gone", "blob cut", "list torn"])
async def test_list_that_is_no_longer_complete_goes(
    abc: tuple[Node, Node, Node], damage: str
) -> None:
    a, b, _ = abc
    a.write("out/rank0/x", b"content")
    await offer(b, a, 1, listed(b"content", "x"))
    await eventually(lambda: b.held() is not None)
    (blob,) = (b.home / "copies" / JOB / "blobs").iterdir()
    match damage:
        case "blob gone":
            blob.unlink()
        case "blob cut":
            blob.write_bytes(b"con")
        case _:
            (b.home / "copies" / JOB / JOB / "slot0").write_bytes(b"\x99")
    await b.restart()
    assert b.held() is None
    assert await offer(b, a, 1, listed(b"content", "x")) == CopyState(0, 1)
    await eventually(lambda: b.held() == {"x": b"content"})


async def test_copies_that_cannot_be_read_now_stay_for_the_next_agent(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, _ = abc
    a.write("out/rank0/x", b"content")
    await offer(b, a, 1, listed(b"content", "x"))
    await eventually(lambda: b.held() is not None)

    def failing(path: Path, kind: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "_read", failing)
        await b.restart()
    assert b.held() is None
    assert "Input/output error" in caplog.text
    await b.restart()
    assert b.held() == {"x": b"content"}


async def test_pull_that_fails_in_an_unforeseen_way_is_begun_anew(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, _ = abc
    real, fails = runtime._unlink, [OSError(5, "Input/output error")]

    def failing(paths: list[Path]) -> None:
        if fails:
            raise fails.pop()
        real(paths)

    a.write("out/rank0/x", b"content")
    monkeypatch.setattr(runtime, "_unlink", failing)
    await offer(b, a, 1, listed(b"content", "x"))
    await eventually(lambda: idle(b))
    assert "copying for job" in caplog.text
    await offer(b, a, 2)
    await eventually(lambda: b.held() == {})


async def test_forgetting_ends_a_transfer_and_leaves_nothing(abc: tuple[Node, Node, Node]) -> None:
    a, b, _ = abc
    a.net.gate.clear()
    a.write("out/rank0/x", b"x")
    await offer(b, a, 1, listed(b"x", "x"))
    async with asyncio.timeout(10):
        await a.net.begun.wait()
    b.copies.forget(JOB)
    b.copies.forget(JOB)
    assert b.copies.jobs() == set()
    await eventually(lambda: not (b.home / "copies" / JOB).exists())


# --- rights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "to", "fields"),
    [
        ("c", "b", {"slot": 0}),  # no slot of its own
        ("b", "c", {"slot": 0}),
        ("a", "a", {}),
        ("a", "d", {}),  # no voter
        ("a", "b", {"path": "/v1/copies/1111111111"}),
        ("a", "b", {"spec": replace(SPEC, id="!" * 10)}),
        ("a", "b", {"spec": replace(SPEC, origin="../../../x")}),
    ],
)
async def test_list_of_somebody_else_is_refused(
    net: Net, by: str, to: str, fields: dict[str, Any]
) -> None:
    nodes = {name: net.node(name) for name in "abcd"}
    with pytest.raises(RemoteProtocolError):
        await offer(nodes[to], nodes[by], 1, **fields)
    assert nodes[to].copies.jobs() == set()
    assert nodes[to].on_disk() == []


async def test_other_job_with_a_known_id_is_refused(abc: tuple[Node, Node, Node]) -> None:
    a, b, _ = abc
    await offer(b, a, 1)
    await eventually(lambda: b.held() == {})
    for spec in (
        replace(SPEC, name="other"),
        replace(SPEC, id="1" * 10, origin=JOB, submitter=node_id("eve")),
    ):
        with pytest.raises(RemoteProtocolError, match="is here already"):
            await offer(b, a, 2, spec=spec)
    assert b.copies.held(JOB)[0].version == 1


async def test_holder_takes_no_more_files_than_its_memory_allows(
    abc: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "HELD_FILES_MAX", 1)
    a, b, _ = abc
    with pytest.raises(PlacementBusyError):
        await offer(b, a, 1, listed(b"x", "x"), listed(b"y", "y"))


async def test_only_the_slots_node_asks_how_far_it_is(abc: tuple[Node, Node, Node]) -> None:
    a, b, c = abc
    assert await a_state(a, b) == CopyState()
    await offer(b, a, 7)
    await eventually(lambda: b.held() == {})
    assert await a_state(a, b) == CopyState(7, 7)
    for peer, slot in ((c, 0), (a, 1), (a, 2)):
        with pytest.raises(NotAllowedError):
            await b.ask(peer, "GET", f"/v1/copies/{JOB}/state?slot={slot}")
    with pytest.raises(RemoteProtocolError):
        await b.ask(a, "GET", f"/v1/copies/{JOB}/state?slot=-1")


async def test_copies_are_read_by_whom_main_allows(abc: tuple[Node, Node, Node]) -> None:
    a, b, c = abc
    a.write("out/rank0/x y:1%", b"content")
    a.follow(SPEC)
    await eventually(lambda: b.held() == {"x y:1%": b"content"})
    one = f"/v1/copies/{JOB}"
    file = f"{one}/file?slot=0&area=out&rank=0&path=x%20y%3A1%25&offset=3"
    for path in (one, file):
        with pytest.raises(NotAllowedError):
            await b.ask(c, "GET", path)
    b.readers.add(c.id)
    answer = await b.ask(c, "GET", one)
    assert isinstance(answer, bytes)
    (held,) = wire.decode_as(tuple[HeldSlot, ...], wire.unpack(answer))
    assert (held.slot, held.files) == (0, (listed(b"content", "x y:1%"),))
    assert await b.ask(c, "GET", f"{one}?slot=1") == wire.pack(())
    stream = await b.ask(c, "GET", file)
    assert isinstance(stream, Stream)
    assert b"".join([piece async for piece in stream.pieces]) == b"tent"
    for bad in (
        file.replace("slot=0", "slot=1"),
        file.replace("path=x", "path=../x"),
        "/v1/copies/1111111111",
    ):
        with pytest.raises(NotFoundError):
            await b.ask(c, "GET", bad)


# --- a witness -----------------------------------------------------------------------------------


async def test_witness_gets_the_source_from_whoever_has_it(abc: tuple[Node, Node, Node]) -> None:
    a, b, c = abc
    await a.store.put(CHUNK, SHIPPED)
    a.net.unreachable.add("b")
    sources = (HostAddress(b.id, ()), HostAddress(a.id, ()))
    assert c.copies.manifest(JOB) is None
    await c.copies.fetch_bundle(SPEC, sources)
    assert c.copies.manifest(JOB) == PACKED
    assert c.copies.chunks() == {CHUNK}
    assert c.store.read(CHUNK) == SHIPPED
    await c.restart()
    assert (c.copies.manifest(JOB), c.copies.chunks()) == (PACKED, {CHUNK})
    calls = len(c.calls)
    await c.copies.fetch_bundle(SPEC, sources)
    assert len(c.calls) == calls


async def test_source_with_another_hash_is_not_kept(abc: tuple[Node, Node, Node]) -> None:
    a, _, c = abc
    spec = replace(SPEC, manifest=bytes(32))
    with pytest.raises(GpuLayerError, match="hash"):
        await c.copies.fetch_bundle(spec, (HostAddress(a.id, ()),))
    assert c.copies.manifest(JOB) is None
    with pytest.raises(TransportError):
        await c.copies.fetch_bundle(SPEC, ())


# --- over real doors -----------------------------------------------------------------------------


class Agent:
    """As much of one as copies need: a door, a dialler, the address book."""

    def __init__(self, identity: identities.Identity) -> None:
        self.identity = identity
        self.home = identity.home
        mesh = identities.load_mesh(identity)
        assert mesh is not None
        self.book = mesh.book
        self.store = ChunkStore(self.home / "chunks")

    async def open(self, stack: AsyncExitStack) -> None:
        self.dialer = Dialer(
            context=identities.client_context(self.home),
            book=self.book,
            node=self.identity.node,
            on_roster=lambda signed: None,
        )
        stack.push_async_callback(self.dialer.close)
        self.copies = Copies(
            self.home / "copies",
            node=self.identity.node,
            store=self.store,
            call=lambda *args, **options: self.peers.call(*args, **options),
            stream=lambda *args, **options: self.peers.stream(*args, **options),
            open_spec=lambda signed: wire.decode_as(JobSpec, wire.unpack(signed)),
            may_read=lambda job, peer, roles: True,
            pause_s=0.01,
        )
        stack.push_async_callback(self.copies.close)
        door = Door(
            context=identities.server_context(self.home),
            book=self.book,
            node=self.identity.node,
            routes=[*self.copies.routes(), Route("GET", "/v1/jobs/{id}/file", self.file)],
            on_roster=self.take_roster,
        )
        self.port = await door.start(["127.0.0.1"], 0)
        stack.push_async_callback(door.close)

    def meet(self, stack: AsyncExitStack, other: Agent) -> None:
        address = Address("127.0.0.1", other.port)
        identities.save_peers(self.home, {other.identity.node: (address,)})
        self.peers = Peers(
            home=self.home,
            node=self.identity.node,
            book=self.book,
            dialer=self.dialer,
            watch=InterfaceWatch(),
            views={},
            configured=(),
            contacted=lambda node: None,
        )
        stack.push_async_callback(self.peers.close)

    async def take_roster(self, signed: bytes) -> None:
        self.book.offer(signed)

    async def file(self, request: DoorRequest) -> Stream:
        query = request.query
        key = query["area"], int(query["rank"]), query["path"]
        fd = self.store.open_output(self.home / "jobs" / request.params["id"], *key)
        return Stream(read_pieces(lambda: fd))


@pytest.mark.network
async def test_files_travel_over_real_doors(tmp_path: Path) -> None:
    laptop = identities.load_or_create(tmp_path / "laptop")
    identities.create_mesh(laptop, "laptop")
    boxes = []
    for name in ("box-a", "box-b"):
        box = identities.load_or_create(tmp_path / name)
        public = box.key.public_key().public_bytes_raw()
        request = JoinRequest(box.node, public, name, ())
        identities.save_membership(box, identities.admit(laptop, request, (Role.WORKER,), {}))
        boxes.append(box)
    agents = [Agent(box) for box in boxes]
    a, b = agents
    a.book.offer(b.book.signed)
    nodes: tuple[NodeId, ...] = (a.identity.node, b.identity.node)
    spec = spec_of("box-a", "box-b")
    slots = tuple(replace(s, node=node) for s, node in zip(spec.slots, nodes, strict=True))
    spec = replace(spec, slots=slots, voters=nodes)
    job_dir = a.home / "jobs" / JOB
    (job_dir / "work").mkdir(parents=True)
    large = os.urandom(3 * 1024**2 + 1)
    (job_dir / "work" / "größe + 100%.bin").write_bytes(large)
    async with AsyncExitStack() as stack:
        for agent in agents:
            await agent.open(stack)
        a.meet(stack, b)
        b.meet(stack, a)
        task = asyncio.create_task(a.copies.follow(job_dir, spec, wire.pack(spec), 0, MANIFEST))
        await eventually(lambda: bool(b.copies.held(JOB)) and bool(b.copies.held(JOB)[0].files))
        task.cancel()
        (file,) = b.copies.held(JOB)[0].files
        assert file == listed(large, "größe + 100%.bin", "work")
        where = f"/v1/copies/{JOB}/file?slot=0&area=work&rank=0"
        path = f"{where}&path=gr%C3%B6%C3%9Fe%20%2B%20100%25.bin&offset=1"
        async with aclosing(a.peers.stream(nodes[1], "GET", path)) as pieces:
            assert b"".join([piece async for piece in pieces]) == large[1:]
        with pytest.raises(NotFoundError):
            async with aclosing(a.peers.stream(nodes[1], "GET", where)) as pieces:
                await anext(pieces)
        with pytest.raises(NotAllowedError):
            async with aclosing(a.peers.stream("0" * 64, "GET", where)) as pieces:
                await anext(pieces)
