"""Train PyTorch on every GPU you can reach: one Trainer, from your laptop to many machines.

Importing this costs nothing; `gpulayer.pytorch` (which needs torch) is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"
__all__ = ["__version__", "pytorch"]


def __getattr__(name: str) -> ModuleType:
    if name == "pytorch":
        return import_module("gpulayer.pytorch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
