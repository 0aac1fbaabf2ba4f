"""Time that does not stop while the machine sleeps."""

from __future__ import annotations

import time


def boot_clock() -> float:
    """Seconds that also pass while the machine sleeps; `time.monotonic` stands still then."""
    # Linux has CLOCK_BOOTTIME; on macOS it is CLOCK_MONOTONIC that counts sleep.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
