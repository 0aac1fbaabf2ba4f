"""Real jobs for the shim's tests: start, collect events and logs, look for survivors."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
from gpulayer_mesh.core.hosted import RankExited
from gpulayer_mesh.core.logrecord import LogRecord, LogStream, RecordParser
from gpulayer_mesh.runtime.shims import RankCommand, ShimConfig, ShimEvent, ShimRunner

DEADLINE_S = 60.0  # of any single wait; reached only by a defect
E = TypeVar("E")


class Job:
    """One shim with one rank per script: Python source, a whole command, or all there is to it."""

    def __init__(
        self,
        folder: Path,
        *scripts: str | Sequence[str] | RankCommand,
        env: dict[str, str] | None = None,
        **config: Any,
    ) -> None:
        self.dir = folder / "job"
        (self.dir / "work").mkdir(parents=True, mode=0o700)
        self.runner = ShimRunner()
        base, cwd = {"PATH": "/usr/bin:/bin"} | (env or {}), str(self.dir / "work")

        def command(rank: int, script: str | Sequence[str] | RankCommand) -> RankCommand:
            if isinstance(script, RankCommand):
                return replace(script, rank=rank, env=base | script.env, cwd=cwd)
            argv = (sys.executable, "-c", script) if isinstance(script, str) else tuple(script)
            return RankCommand(rank, argv, base, cwd)

        ranks = tuple(command(rank, script) for rank, script in enumerate(scripts))
        cookie = f"{id(self):x}-{folder.name}"
        self.config = ShimConfig(ranks=ranks, cookie=cookie, **{"grace_s": 5.0, **config})
        self.until_at: float | None = None  # the end of the lease, for `fence_grace_s`
        self.events: list[ShimEvent] = []
        self._watch: AsyncIterator[ShimEvent] | None = None

    async def start(self) -> Job:
        await self.runner.start(self.dir, self.config, self._lease)
        return self

    def _lease(self) -> float | None:
        return self.until_at

    async def until(self, kind: type[E]) -> E:
        """Wait for the next event of this kind."""
        if self._watch is None:
            self._watch = self.runner.watch(self.dir, self._lease)
        async with asyncio.timeout(DEADLINE_S):
            async for event in self._watch:
                self.events.append(event)
                if isinstance(event, kind):
                    return event
        raise AssertionError(f"no {kind.__name__} in {self.events}")

    async def run(self, last: type[ShimEvent]) -> list[RankExited]:
        """Go on to the last event; return the ranks' ends in rank order."""
        await self.until(last)
        ends = [event for event in self.events if isinstance(event, RankExited)]
        return sorted(ends, key=lambda end: end.rank)

    def status(self) -> list[dict[str, Any]]:
        """The lines as the shim wrote them."""
        path = self.dir / "status"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    async def until_status(self, event: str) -> dict[str, Any]:
        """Wait for a status line without `watch`, which would renew the lease."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [line for line in self.status() if line["event"] == event]
            return bool(found)

        await eventually(look)
        return found[0]

    async def records(self, rank: int = 0, from_seq: int = 0) -> list[LogRecord]:
        parser = RecordParser()
        found: list[LogRecord] = []
        async for batch in self.runner.follow_logs(
            self.dir, [rank], {rank: from_seq}, follow=False
        ):
            assert len(batch) <= 256 * 1024
            found += parser.feed(batch)
        assert not parser.pending
        return found

    async def output(self, rank: int = 0, stream: LogStream = LogStream.OUT) -> bytes:
        return b"".join(r.data for r in await self.records(rank) if r.stream == stream)

    async def wait_for_output(self, text: bytes, rank: int = 0) -> None:
        """Wait until a rank has printed this."""
        seen = b""
        parser = RecordParser()
        async with asyncio.timeout(DEADLINE_S):
            async for batch in self.runner.follow_logs(self.dir, [rank], {}, follow=True):
                seen += b"".join(record.data for record in parser.feed(batch))
                if text in seen:
                    return
        raise AssertionError(f"{text!r} not in {seen!r}")

    def survivors(self) -> list[psutil.Process]:
        """Processes that carry the job's cookie; found without the shim's own code."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("GPULAYER_COOKIE") == self.config.cookie:
                    found.append(process)
            except psutil.Error:
                continue
        return [p for p in found if is_running(p.pid)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def eventually(condition: Callable[[], bool]) -> None:
    """Look until it holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  other processes set no asyncio.Event
            await asyncio.sleep(0.02)
