"""How the process of a rank ends: with its work's exit code, in spite of torch's threads.

Does not import torch; knows nothing of jobs.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from typing import NoReturn

from gpulayer.env import rank_env

_PAUSE_S = 0.05  # a thread that waits for the GIL has it after its 5 ms switch interval


@functools.cache  # the first call counts: exit functions run last in, first out
def pause_at_exit() -> None:
    """Give the GIL, before Python ends, to the threads of Gloo that wait for it.

    They take it to let go of a tensor after its collective; asking for it while Python ends aborts
    the process, work done, with signal 6 (torch 2.13). A script that ends right after a collective
    does so every tenth time.
    """
    atexit.register(_pause)


def _pause() -> None:
    if "torch.distributed.distributed_c10d" in sys.modules:
        time.sleep(_PAUSE_S)


def end_rank() -> NoReturn:
    """End this rank's script here, successfully.

    Raises:
        SystemExit: always, so that `finally` blocks and atexit functions of the script run. The
            interpreter is then left without tearing torch down, which takes seconds on a busy
            machine.
    """
    atexit.register(_leave)
    raise SystemExit(0)


def _leave() -> None:
    atexit.unregister(_leave)
    if rank_env() is None:  # this process only played a rank, as tests do
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
