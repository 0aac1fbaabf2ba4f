"""PyTorch training with GPUlayer: `launch`, `Runtime`, and `Trainer` with `Module`.

Three layers, each usable alone. Importing this package does not import torch: a name loads its
module when it is first used, so `launch` at the top of a script costs the laptop nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer.pytorch.callback import Callback
    from gpulayer.pytorch.early_stopping import EarlyStopping
    from gpulayer.pytorch.launching import is_launcher_process, launch
    from gpulayer.pytorch.lr_monitor import LearningRateMonitor
    from gpulayer.pytorch.model_checkpoint import ModelCheckpoint
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.runtime import Runtime
    from gpulayer.pytorch.seeding import seed_everything
    from gpulayer.pytorch.step_monitor import StepMonitor
    from gpulayer.pytorch.timer import Timer
    from gpulayer.pytorch.trainer import Trainer

# No module may be called like one of these names: an imported submodule becomes an attribute of the
# package and would hide the function.
_HOME = {
    "Callback": "callback",
    "EarlyStopping": "early_stopping",
    "LearningRateMonitor": "lr_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "Module": "module",
    "Runtime": "runtime",
    "StepMonitor": "step_monitor",
    "Timer": "timer",
    "Trainer": "trainer",
    "is_launcher_process": "launching",
    "launch": "launching",
    "seed_everything": "seeding",
}

__all__ = [
    "Callback",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "Module",
    "Runtime",
    "StepMonitor",
    "Timer",
    "Trainer",
    "is_launcher_process",
    "launch",
    "seed_everything",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
