"""The shell of `core.hangs`: looks at ranks through /proc. Nothing is seen where there is none.

This module does not know what a job is, how a machine is reached, nor what is done about a hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import assert_never

from gpulayer_mesh.clock import boot_clock
from gpulayer_mesh.core.hangs import (
    LOOK_S,
    Hung,
    Ip,
    Looked,
    Probe,
    Probed,
    Unanswered,
    Watch,
    process_state,
    unanswered,
)
from gpulayer_mesh.core.jobspec import Slot

TABLE_MAX = 16 * 1024 * 1024  # bytes; 100,000 connections
_PROC = Path("/proc")


async def watch(
    ranks: Callable[[], Mapping[int, int] | None],
    peers: Callable[[], Mapping[Ip, Slot]],
    belongs: Callable[[int], bool],
    answers: Callable[[Slot, Ip], Awaitable[bool | None]],
) -> str:
    """Wait until ranks wait for what cannot come, and return what that is; "" at their end.

    Args:
        ranks: as for `look`; None at their end.
        peers, belongs: as for `look`.
        answers: tries new connections to a peer's address; see `Probed`.
    """
    machine = Watch()
    probes: dict[Ip, asyncio.Future[bool | None]] = {}
    try:
        while (pids := ranks()) is not None:
            events: list[Looked | Probed] = []
            for ip in [ip for ip, probe in probes.items() if probe.done()]:
                events.append(Probed(ip, probes.pop(ip).result()))
            # In a thread, for a busy machine has thousands of connections.
            events.append(await asyncio.to_thread(look, pids, peers(), belongs))
            for effect in [e for event in events for e in machine.handle(boot_clock(), event)]:
                match effect:
                    case Probe(peer, ip):
                        probes[ip] = asyncio.ensure_future(answers(peer, ip))
                    case Hung(reason):
                        return reason
                    case _:
                        assert_never(effect)
            await asyncio.sleep(LOOK_S)
        return ""
    finally:
        for probe in probes.values():
            probe.cancel()
        await asyncio.gather(*probes.values(), return_exceptions=True)


def look(
    ranks: Mapping[int, int], peers: Mapping[Ip, Slot], belongs: Callable[[int], bool]
) -> Looked:
    """Look at the main processes of ranks, and at connections of the job that wait for an answer.

    Args:
        ranks: their main processes, by rank.
        peers: the other nodes of the job, by address.
        belongs: whether a process is of the job.
    """
    states = {}
    for rank, pid in ranks.items():
        with contextlib.suppress(OSError, ValueError):
            states[rank] = process_state(_read(f"{pid}/stat"))
    found: list[Unanswered] = []
    if peers and ranks:
        # Those of the whole machine; of ranks in a network of their own, of that.
        pid = next(iter(ranks.values()))
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError, ValueError):
                found += unanswered(_read(f"{pid}/net/{name}"), peers)
    if found:
        processes = [int(name) for name in os.listdir(_PROC) if name.isdigit()]
        ours = {inode for pid in processes if belongs(pid) for inode in _sockets(pid)}
        found = [one for one in found if one.inode in ours]
    return Looked(states, tuple(found))


def _sockets(pid: int) -> set[int]:
    """Return the sockets that a process has open."""
    folder = _PROC / str(pid) / "fd"
    found = set()
    with contextlib.suppress(OSError):  # it ended meanwhile
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                kind, _, inode = os.readlink(folder / name).partition(":")
                if kind == "socket":
                    found.add(int(inode.strip("[]")))
    return found


def _read(path: str) -> str:
    with open(_PROC / path, encoding="ascii", errors="replace") as file:
        return file.read(TABLE_MAX)
