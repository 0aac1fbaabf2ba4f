"""Train PyTorch on every GPU you can reach: one Trainer, from your laptop to many machines.

Importing this costs nothing; `gpulayer.pytorch` (which needs torch) is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer.functions import Job, JobFailedError, attach, submit

__version__ = "0.1.0"
__all__ = ["Job", "JobFailedError", "__version__", "attach", "pytorch", "submit"]


def __getattr__(name: str) -> Any:
    if name == "pytorch":
        return import_module("gpulayer.pytorch")
    if name in ("Job", "JobFailedError", "attach", "submit"):
        return getattr(import_module("gpulayer.functions"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
