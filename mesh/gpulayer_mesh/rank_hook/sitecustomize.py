"""Runs in a Python rank before its script: leaves a mark when an exception ends the script.

A process may hang after its traceback: in a thread that is no daemon, in an atexit function. For
its peers it is still alive, and they wait for it in a collective. The shim looks for the mark
(`GPULAYER_RAISED` is its path) and ends such a rank after a grace.

The script finds everything as if this had not been here: the variable, the path entry and the
module are taken away before it starts, so its children never see them, and a `sitecustomize` of
the environment runs as usual. Standard library only, under any interpreter from 3.11 on; it does
not know who reads the mark.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType, TracebackType

MARK = "GPULAYER_RAISED"
# At the bottom of the stack while a script (or `python -m`) still runs.
_PROGRAM = ("<module>", "_run_module_as_main")


def _mark_uncaught(path: str) -> None:
    """Have the end by an uncaught exception in this very process leave a file."""
    process, before = os.getpid(), sys.excepthook

    def uncaught(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            before(kind, value, trace)
        finally:
            # A script that calls the hook itself, to print what it caught, goes on; and a forked
            # child's end is not the rank's.
            if os.getpid() == process and not _script_runs():
                with contextlib.suppress(OSError):
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))

    sys.excepthook = uncaught


def _script_runs() -> bool:
    frame: FrameType = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name in _PROGRAM


def _step_aside() -> None:
    """Undo what brought us here, then make room for the environment's own module."""
    path = os.environ.pop(MARK, "")
    here = os.path.dirname(__file__)
    first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == here:
        del os.environ["PYTHONPATH"]
        if rest:
            os.environ["PYTHONPATH"] = rest
    if here in sys.path:
        sys.path.remove(here)
    if path and os.getsid(0) == os.getpid():  # a rank's main process leads its session
        _mark_uncaught(path)
    ours = sys.modules.pop(__name__)
    try:
        import sitecustomize  # noqa: F401  the next on the path, not this one
    except ImportError as e:
        if e.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, ours)  # whoever imported us looks there


if MARK in os.environ:
    _step_aside()
