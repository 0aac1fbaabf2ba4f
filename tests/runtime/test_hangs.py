"""Looks at ranks through /proc, pretended and real, and a watch that runs at the pace of a test."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
from gpulayer_mesh.core.hangs import LOOK_S, Ip, Looked, Unanswered, plain_ip
from gpulayer_mesh.core.jobspec import Slot
from gpulayer_mesh.runtime import hangs

BOX = Slot("b" * 64, "box-3", 1)
IP = plain_ip("127.9.0.1")
PEERS = {IP: BOX}
# 0100097F is 127.9.0.1 where numbers begin with their lowest byte.
HOST = "0100097F" if sys.byteorder == "little" else "7F090001"
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout"
OURS, CHILDS, STRANGERS = 18525, 18526, 18527


def line(inode: int) -> str:
    to = f"{HOST}:A8CB 01 00000005:00000000 01:00000143 00000005     0        0 {inode} 2"
    return f"   1: 0100007F:DC68 {to}"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A rank, its child and somebody else's process, each with a connection nobody answers."""
    monkeypatch.setattr(hangs, "_PROC", tmp_path)
    (tmp_path / "uptime").touch()
    for pid, inode in ((71, OURS), (72, CHILDS), (80, STRANGERS)):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "0").symlink_to("/dev/null")
        (tmp_path / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
    (tmp_path / "71" / "stat").write_text("71 (python) S 1 71 71 0 -1\n")
    (tmp_path / "71" / "net").mkdir()
    found = "\n".join([HEAD, line(OURS), line(STRANGERS), line(0), ""])
    (tmp_path / "71" / "net" / "tcp").write_text(found)
    mapped = f"0000000000000000{'FFFF0000' if sys.byteorder == 'little' else '0000FFFF'}{HOST}"
    (tmp_path / "71" / "net" / "tcp6").write_text(
        "\n".join([HEAD, line(CHILDS).replace(HOST, mapped), ""])
    )
    return tmp_path


def belongs(pid: int) -> bool:
    return pid in (71, 72)


def test_look_finds_the_connections_of_all_processes_of_the_job(proc: Path) -> None:
    assert hangs.look({3: 71}, PEERS, belongs) == Looked(
        {3: "S"}, (Unanswered(BOX, IP, 43211, 5, OURS), Unanswered(BOX, IP, 43211, 5, CHILDS))
    )


def test_look_without_peers_or_ranks_finds_no_connection(proc: Path) -> None:
    assert hangs.look({3: 71}, {}, belongs) == Looked({3: "S"})
    assert hangs.look({}, PEERS, belongs) == Looked({})


def test_process_that_is_gone_is_no_error(proc: Path) -> None:
    (proc / "72" / "fd" / "3").unlink()
    assert len(hangs.look({3: 71, 4: 99}, PEERS, belongs).unanswered) == 1
    assert hangs.look({4: 99}, PEERS, belongs) == Looked({})


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_real_process_is_seen_to_be_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            assert hangs.look({0: child.pid}, {}, belongs).states[0] in ("R", "S", "D")
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            assert hangs.look({0: child.pid}, {}, belongs).states == {0: "T"}
        finally:
            child.kill()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look comes two seconds after the one before, in no time."""
    seconds = itertools.count(0.0, LOOK_S)
    monkeypatch.setattr(hangs, "boot_clock", lambda: next(seconds))
    monkeypatch.setattr(hangs, "LOOK_S", 0.0)


async def watch(
    answers: Callable[[Slot, Ip], Awaitable[bool | None]],
    ranks: Callable[[], Mapping[int, int] | None] = lambda: {3: 71},
) -> str:
    async with asyncio.timeout(30):
        return await hangs.watch(ranks, lambda: PEERS, belongs, answers)


async def test_watch_ends_with_the_reason_once_probes_fail(proc: Path) -> None:
    probed = []

    async def answers(peer: Slot, ip: Ip) -> bool:
        probed.append((peer, ip))
        return False

    reason = await watch(answers)
    assert reason.startswith("the network to box-3 is cut: nothing that was sent to 127.9.0.1 port")
    assert probed[:3] == [(BOX, IP)] * 3


async def test_watch_ends_without_a_word_when_the_ranks_do(proc: Path) -> None:
    left = iter(range(100))

    async def answers(peer: Slot, ip: Ip) -> bool:
        return True

    assert await watch(answers, lambda: {3: 71} if next(left, None) is not None else None) == ""


async def test_watch_that_is_ended_leaves_no_probe(proc: Path) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def answers(peer: Slot, ip: Ip) -> bool:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return False

    watching = asyncio.create_task(watch(answers))
    await begun.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert ended.is_set()
