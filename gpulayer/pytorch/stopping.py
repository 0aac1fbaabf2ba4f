"""SIGINT and SIGTERM while a Trainer call runs: what it is told first, and that another ends it.

Handlers that a script has set stay. Knows nothing of batches or ranks.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# One Ctrl-C may come twice: from the terminal, and from the program that started this one.
ECHO_S = 1.0
_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Signals:
    """Takes the two signals while it is entered.

    Args:
        asked: called in the handler with the first signal's number.
    """

    def __init__(self, asked: Callable[[int], None]) -> None:
        self._asked = asked
        self._first_s: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for number, default in _DEFAULTS.items():
                if signal.getsignal(number) == default:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            self._asked(number)
        elif now_s - self._first_s > ECHO_S:
            raise end_for(number)


def end_for(number: int) -> BaseException:
    """Return the exception in which a signal ends a process."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
