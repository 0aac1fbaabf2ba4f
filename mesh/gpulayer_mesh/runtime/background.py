"""Work that nobody waits for: its tasks are kept alive, its failures reach the log.

It does not know what the work is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
AGAIN_S = 1.0


class Background:
    """The tasks of one part of the agent.

    Args:
        log: where failures go.
        expected: errors that are part of life, such as a peer that does not answer; told at debug
            level only.
    """

    def __init__(self, log: logging.Logger, *, expected: tuple[type[Exception], ...] = ()) -> None:
        self._log = log
        self._expected = expected
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start it now."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def close(self) -> None:
        """End what still runs.

        A task that was about to try something again after an error may take the first word for
        that error, or not hear it: it is told until it ends.
        """
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=AGAIN_S)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, self._expected):
            self._log.debug("%s", error)
        else:
            self._log.error("a task failed", exc_info=error)
