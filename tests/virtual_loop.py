"""An event loop in virtual time, for code that waits."""

from __future__ import annotations

import asyncio


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer as soon as nothing is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0

    def time(self) -> float:
        return self._virtual

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = [t.when() for t in self._scheduled if not t.cancelled()]  # type: ignore[attr-defined]
            self._virtual = max(self._virtual, min(timers, default=self._virtual))
        super()._run_once()  # type: ignore[misc]
