"""Watching a job from any member machine, and bringing its files home.

A viewer may go at any moment, and the job goes on, unless it is one that has to be followed
(`on_disconnect`) and the viewer does not say that it goes. How a connection is found and
repaired is the client's matter, how a line looks is `ui`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from gpulayer_mesh.core import ownfiles
from gpulayer_mesh.core.jobspec import OVER, JobRecord, JobSpec, JobState, OutputFile, Outputs
from gpulayer_mesh.core.logrecord import EVERY_LINE, LogPick
from gpulayer_mesh.core.manifest import output_problem
from gpulayer_mesh.core.restarts import may_follow
from gpulayer_mesh.errors import (
    DiscoveryError,
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    TransportError,
)

from gpulayer.ui import Ui, shown_path
from gpulayer.views import attempt_line, counted, rank_nodes, restarting_line, size

if TYPE_CHECKING:
    from gpulayer_mesh.client import MeshClient
    from gpulayer_mesh.core.types import NodeId

POLL_S = 1.0  # how often the record is asked for while lines arrive
SILENT_S = 1.0  # no answer for so long: the job may go on elsewhere already
POLL_FAST_S = 0.1  # ... and once all lines are there: the end is a moment away
DRAIN_S = 10.0  # after the end, for lines still on their way
QUIET_S = 1.0  # ... while any arrive, where the next attempt has lines as well
LOST_S = 600.0  # nobody answers for this long: twice the ranks' own lease, so the job is gone
LOST_TRIES = 10  # ... and not just because this machine slept
SEARCH_TRIES = 5  # between searches for attempts behind one that came to nothing
FETCHES = 4  # parallel downloads: fills a 1 Gbit/s link through one TLS core
LEAVE_S = 3.0  # to say that we go; whoever pressed Ctrl-C wants the prompt back
STAYED_SHOWN = 10  # a folder of links must not push the job's own last lines off the screen


Began = Callable[[JobRecord], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class LogView:
    """Which lines of a job are shown, and how."""

    ranks: frozenset[int] | None = None  # None: all
    pick: LogPick = EVERY_LINE
    raw: bool = False  # bytes as the ranks wrote them, with nothing in front


ALL_LINES = LogView()


async def follow(
    client: MeshClient,
    record: JobRecord,
    ui: Ui,
    *,
    view: LogView = ALL_LINES,
    began: Began | None = None,
) -> JobRecord:
    """Print a job's lines as they come until it has ended; return the final record.

    Where it starts again, that goes on with its next attempt.

    Args:
        view: whose tail is that of the first attempt that is watched.
        began: called with the record of each further attempt.

    Raises:
        DiscoveryError: no node of the job has answered for ten minutes.
    """

    later = replace(view, pick=replace(view.pick, tail=None))

    async def see(attempt: JobRecord) -> JobRecord:
        return await _follow_attempt(client, attempt, ui, view if attempt is record else later)

    return await through_attempts(client, record, ui, see, began)


async def wait_end(
    client: MeshClient, record: JobRecord, ui: Ui, *, began: Began | None = None
) -> JobRecord:
    """Wait until a job has ended, without its lines; otherwise as `follow`."""

    async def see(record: JobRecord) -> JobRecord:
        return await wait_attempt(client, record, ui)

    return await through_attempts(client, record, ui, see, began)


async def through_attempts(
    client: MeshClient,
    record: JobRecord,
    ui: Ui,
    see: Callable[[JobRecord], Awaitable[JobRecord]],
    began: Began | None = None,
) -> JobRecord:
    """Watch an attempt, then those that follow it; return the final record of the last.

    Args:
        see: watches one to its end; returns its final record, or a later attempt's.
    """
    while True:
        final = await see(record)
        later: JobRecord | None = None
        if final.spec.restart > record.spec.restart:  # nobody knew the end of the one before
            later = final
        elif final.successor:
            later = await _successor(client, final)
        elif final.state is JobState.FAILED and may_follow(final):
            # Whoever told us of the end may have been cut off from those who started it again.
            with contextlib.suppress(GpuLayerError):
                later = await client.next_attempt(final)
        if later is None:
            return final
        record = later
        ui.note(attempt_line(record.spec))
        if began is not None:
            await began(record)


async def _successor(client: MeshClient, record: JobRecord) -> JobRecord:
    """Return the attempt that followed one, once a member knows it."""
    asked = time.monotonic()
    while True:
        with contextlib.suppress(TransportError, DiscoveryError):
            if (later := await client.next_attempt(record)) is not None:
                return later
        if time.monotonic() - asked > LOST_S:
            raise DiscoveryError(
                f"no member knows job {record.successor}, with which {record.spec.id} went on",
                hint=f"gpulayer attach {record.successor}, once its nodes are back",
            )
        await asyncio.sleep(POLL_S)


async def _follow_attempt(
    client: MeshClient, record: JobRecord, ui: Ui, view: LogView
) -> JobRecord:
    lines_done = asyncio.Event()
    heard = 0.0

    def note_line() -> None:
        nonlocal heard
        heard = time.monotonic()

    async def print_lines() -> None:
        try:
            await print_log(client, record, ui, view, live=True, heard=note_line)
        finally:
            lines_done.set()

    lines = asyncio.create_task(print_lines())
    try:
        final = await _wait_end(client, record, ui, lines_done)
        # Where an attempt follows, a machine was lost, perhaps, and says nothing more.
        follows = bool(final.successor) or final.spec.restart > record.spec.restart
        await _drain(lines, lambda: heard, QUIET_S if follows else DRAIN_S)
        if not lines.done() or isinstance(lines.exception(), GpuLayerError):
            ui.note(f"some lines did not arrive; see gpulayer logs {record.spec.id}")
        return final
    finally:
        lines.cancel()
        with contextlib.suppress(asyncio.CancelledError, GpuLayerError):
            await lines
        ui.finish()


async def _drain(lines: asyncio.Task[None], heard: Callable[[], float], quiet_s: float) -> None:
    """After a job's end, wait for lines on their way.

    Args:
        heard: when the last one came.
        quiet_s: give up once none came for so long.
    """
    ended = time.monotonic()
    while not lines.done():
        left_s = min(ended + DRAIN_S, max(ended, heard()) + quiet_s) - time.monotonic()
        if left_s <= 0:
            return
        await asyncio.wait([lines], timeout=left_s)


async def print_log(
    client: MeshClient,
    record: JobRecord,
    ui: Ui,
    view: LogView = ALL_LINES,
    *,
    live: bool = False,
    heard: Callable[[], object] = lambda: None,
) -> None:
    """Print lines of ranks; with `live`, until the job has ended.

    Args:
        heard: called for each line.
    """
    nodes = rank_nodes(record.spec)
    prefix = len(nodes if view.ranks is None else view.ranks) > 1
    async for line in client.logs(record, ranks=view.ranks, follow=live, pick=view.pick):
        heard()
        if line.rank < len(nodes):  # a node may not speak for ranks that the job does not have
            ui.log(line, nodes[line.rank], prefix=prefix, raw=view.raw)


async def wait_attempt(client: MeshClient, record: JobRecord, ui: Ui) -> JobRecord:
    """Wait until one attempt has ended; may return the record of a later one."""
    return await _wait_end(client, record, ui, asyncio.Event())


async def print_attempts(
    client: MeshClient, record: JobRecord, ui: Ui, view: LogView = ALL_LINES
) -> None:
    """Print what all attempts of a job have printed so far.

    Raises:
        GpuLayerError: after everything else, where lines cannot be had.
    """
    missing: GpuLayerError | None = None
    for attempt in await client.attempts(record) or [record]:
        if attempt.spec.restart:
            ui.note(attempt_line(attempt.spec))
        try:
            await print_log(client, attempt, ui, view)
        except GpuLayerError as e:  # of a lost machine; the attempts after it have theirs
            missing = missing or e
        ui.finish()
    if missing is not None:
        raise missing


async def _wait_end(
    client: MeshClient, record: JobRecord, ui: Ui, lines_done: asyncio.Event
) -> JobRecord:
    """Wait until an attempt has ended; return its record, or a later one's if nobody knows it."""
    answered, failures = time.monotonic(), 0
    said, waiting = False, ""
    while True:
        later: JobRecord | None = None
        try:
            record, later = await _newest(client, record)
            answered, failures = time.monotonic(), 0
        except (TransportError, NotFoundError) as e:
            if isinstance(e, NotFoundError) and not may_follow(record):
                raise
            silent_s, failures = time.monotonic() - answered, failures + 1
            if silent_s > LOST_S and failures > LOST_TRIES:
                raise DiscoveryError(
                    f"no node of job {record.spec.id} has answered for {silent_s:.0f} s",
                    hint=f"gpulayer attach {record.spec.id}, once they are back",
                ) from e
            if failures == 3:  # one or two are a hiccup
                ui.note(f"no node of job {record.spec.id} answers; trying again")
            if may_follow(record) and failures % SEARCH_TRIES == 0:
                with contextlib.suppress(GpuLayerError):
                    later = await client.next_attempt(record)
        if (record.state is JobState.RESTARTING or record.successor) and not said:
            said = True
            ui.note(restarting_line(record))
        if record.waiting and record.waiting != waiting:
            waiting = record.waiting
            ui.note(f"cannot start again yet: {waiting}")
        if later is not None:
            return later
        if record.state in OVER:
            return record
        if lines_done.is_set():
            await asyncio.sleep(POLL_S if failures else POLL_FAST_S)
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lines_done.wait(), POLL_S)


async def _newest(client: MeshClient, record: JobRecord) -> tuple[JobRecord, JobRecord | None]:
    """Return the newest record of an attempt, and the attempt after it if one has begun.

    That may be so although nobody of the attempt answers: then with the record as it was given.

    Raises:
        TransportError, NotFoundError: as `MeshClient.record`.
    """
    asked = asyncio.ensure_future(client.follow(record))
    try:
        while True:
            await asyncio.wait([asked], timeout=SILENT_S)
            answered = asked.done() and asked.exception() is None
            known = asked.result() if answered else record
            later: JobRecord | None = None
            if may_follow(known) and (not answered or known.state is JobState.RESTARTING):
                later = await client.successor(known)
            if later is not None:
                return known, later
            if asked.done():
                return await asked, None
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def leave(client: MeshClient, record: JobRecord, ui: Ui) -> None:
    """Go while a job runs: it goes on, and nobody has to follow it."""
    ui.finish()
    if record.ended_age_s is not None:
        return
    try:
        async with asyncio.timeout(LEAVE_S):
            await client.leave(record)
    except (GpuLayerError, TimeoutError):
        ui.note(f"job {record.spec.id} could not be told that nobody follows it any more")
    ui.detached(record)


async def bring_home(client: MeshClient, record: JobRecord, dest: Path, ui: Ui) -> None:
    """Collect everything of a job that has ended, and print how it ended.

    Raises:
        GpuLayerError: as `collect`, for a job of ours that succeeded; a failed one is news enough,
            and whoever only looks on may not have all that it left.
    """
    missing: GpuLayerError | None = None
    try:
        await collect(client, record, dest, ui)
    except GpuLayerError as e:
        theirs = record.spec.submitter != client.identity.node and isinstance(e, NotAllowedError)
        if record.state is JobState.SUCCEEDED and not theirs:
            missing = e
        else:
            ui.note(e.message)
    ui.outcome(record)
    if missing is not None:
        raise missing


async def collect(
    client: MeshClient,
    record: JobRecord,
    dest: Path,
    ui: Ui,
    *,
    only: str | None = None,
) -> list[Path]:
    """Bring output files home into `dest`; return their paths. What cannot come is named.

    Args:
        only: a file or folder as it lies in `dest`; None: everything.

    Raises:
        GpuLayerError: some could not be fetched or written; all others are home.
    """
    everybody = await client.outputs(record)
    answers = [(node, one) for node, one in everybody if one is not None]
    offered = [(node, file) for node, one in answers for file in one.files]
    everything, refused = placed(record.spec, offered)
    named, more = stayed(record.spec, answers)
    wanted = None if only is None else PurePosixPath(only)
    files = [
        one
        for one in everything
        if (not _stays_there(one[1]) if wanted is None else wanted in (one[2], *one[2].parents))
    ]
    unwelcome = [*refused, *named]
    for problem in unwelcome[:STAYED_SHOWN]:
        ui.note(problem)
    if more := more + max(0, len(unwelcome) - STAYED_SHOWN):
        ui.note(f"{more} more did not come home")
    gate = asyncio.Semaphore(FETCHES)

    async def fetch(node: NodeId, file: OutputFile, path: PurePosixPath) -> Path | None:
        async with gate:
            try:
                await client.fetch(record, node, file, dest / path)
            except (GpuLayerError, OSError) as e:
                ui.note(f"{path} did not come home: {e}")
                return None
            return dest / path

    fetched = await asyncio.gather(*(fetch(*one) for one in files))
    home = [
        (path, file)
        for path, (_, file, _) in zip(fetched, files, strict=True)
        if path is not None and not _hidden(file)
    ]
    if home:
        total = size(sum(file.size for _, file in home))
        ui.note(f"{counted(len(home), 'file')}, {total} -> {shown_path(dest)}")
    if silent := {node for node, one in everybody if one is None}:
        names = ", ".join(slot.name for slot in record.spec.slots if slot.node in silent)
        raise GpuLayerError(
            f"{names} did not answer: what job {record.spec.id} has made there did not come home",
            hint=f"gpulayer get {record.spec.id}    (the nodes keep it for a while)",
        )
    if missed := sum(path is None for path in fetched):
        raise GpuLayerError(
            f"{counted(missed, 'file')} of job {record.spec.id} did not come home",
            hint=f"gpulayer get {record.spec.id}    (the nodes keep them for a while)",
        )
    return [path for path in fetched if path is not None]


def placed(
    spec: JobSpec, outputs: Sequence[tuple[NodeId, OutputFile]]
) -> tuple[list[tuple[NodeId, OutputFile, PurePosixPath]], list[str]]:
    """Decide where each file lies at home, no two in one place; also return what is refused.

    Rank 0's `$GPULAYER_OUT` and the working folder of its node come to the plain path, those of
    other ranks and nodes under `rank<k>/`. Where two want one place, the second, usually a file of
    the working folder, moves under `work/`. Peers name the files: those with unsafe paths, or of
    ranks that do not run on the node that offers them, are refused.
    """
    hosts = [slot.node for slot in spec.slots for _ in range(slot.processes)]
    taken: set[PurePosixPath] = set()  # files
    folders: set[PurePosixPath] = set()
    result = []
    refused = []
    ordered = sorted(outputs, key=lambda one: (one[1].area != "out", one[1].rank, one[1].path))
    for node, file in ordered:
        if not 0 <= file.rank < len(hosts) or hosts[file.rank] != node:
            refused.append(f"rank {file.rank} does not run on the node that offers {file.path!r}")
            continue
        if problem := output_problem(file.path):
            refused.append(_stays(spec, file.rank, file.path[:200], f"its path {problem}"))
            continue
        usual = path = PurePosixPath("" if file.rank == 0 else f"rank{file.rank}", file.path)
        attempt = 1
        while path in taken or path in folders or not taken.isdisjoint(path.parents):
            path = PurePosixPath(file.area if attempt == 1 else f"{file.area}-{attempt}") / usual
            attempt += 1
        taken.add(path)
        folders.update(path.parents)
        result.append((node, file, path))
    return result, refused


def stayed(spec: JobSpec, outputs: Sequence[tuple[NodeId, Outputs]]) -> tuple[list[str], int]:
    """Say what the nodes keep and why, and how much more they have not named."""
    hosts = [slot.node for slot in spec.slots for _ in range(slot.processes)]
    lines = []
    for node, one in outputs:
        for item in one.stayed:
            if 0 <= item.rank < len(hosts) and hosts[item.rank] == node:
                reason = " ".join(item.reason.split())  # a peer's words: they get one line
                lines.append(_stays(spec, item.rank, _text(item.path), reason))
    return lines, sum(one.more for _, one in outputs)


def _stays(spec: JobSpec, rank: int, path: str | bytes, reason: str) -> str:
    return f"rank {rank} on {rank_nodes(spec)[rank]}: {path!r} did not come home: {reason}"


def _text(path: bytes) -> str | bytes:
    try:
        return path.decode()
    except UnicodeDecodeError:
        return path


def _stays_there(file: OutputFile) -> bool:
    """Return whether a file only serves the next attempt, and is as large as a checkpoint."""
    return file.area == "out" and file.path.startswith(f"{ownfiles.RESUME}/")


def _hidden(file: OutputFile) -> bool:
    return file.area == "out" and file.path.split("/")[0] == ownfiles.FOLDER
