"""`Callback`: code that runs at the hooks of a Trainer, beside the module's own.

All hooks here do nothing; `hooks` finds out once per call which of them a class overrides. Names,
arguments and order are Lightning's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from gpulayer.pytorch.module import Module
    from gpulayer.pytorch.trainer import Trainer


class Callback:
    """Base of all callbacks; override the hooks you need.

    `stage` is "fit", "validate", "test" or "predict". Hooks run before the module's hook of the
    same name, in the order of the Trainer's list.
    """

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint; two of one class need two names."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this callback: tensors and plain data."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    # -- around a call -----------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None: ...

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None: ...

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_sanity_check_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_exception(
        self, trainer: Trainer, pl_module: Module, exception: BaseException
    ) -> None: ...

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]
    ) -> None: ...

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]
    ) -> None: ...

    # -- training ----------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int
    ) -> None: ...

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None: ...

    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: Module, optimizer: Optimizer
    ) -> None: ...

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: Tensor) -> None: ...

    def on_after_backward(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: Module, optimizer: Optimizer
    ) -> None: ...

    # -- validation, also inside fit ---------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: Module,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    # -- test --------------------------------------------------------------------------------

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_test_epoch_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: Module,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    # -- predict -----------------------------------------------------------------------------

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_predict_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: Module) -> None: ...

    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: Module,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...


class MetricCallback(Callback):
    """A callback that acts on logged values: at the end of an epoch it runs after the module."""


class Checkpoint(MetricCallback):
    """A callback that writes checkpoints: it comes after all others."""

    def last_checkpoints(self, trainer: Trainer) -> list[Path]:
        """Return the files that `ckpt_path="last"` chooses the newest of."""
        return []

    def holds_now(self, trainer: Trainer) -> str | None:
        """Return the file in which this callback has saved all of the present step; ranks agree."""
        return None

    def save_end(self, trainer: Trainer) -> str | None:
        """Write the state at the end of a fit and return the file; every rank must call this."""
        return None

    def adopt(self, state_dict: dict[str, Any]) -> None:
        """Take over the state that this callback had where the call ran."""
        self.load_state_dict(state_dict)

    def files(self) -> list[Path]:
        """Return what lies where this callback writes checkpoints; known since `setup`."""
        return []

    def can_go_on(self) -> bool:
        """Return whether this callback writes, while a fit runs, what training can go on from."""
        return True

    def go_on(self, state_dict: dict[str, Any]) -> None:
        """Take over the state that this callback had in the attempt before: the fit is the same."""
        self.load_state_dict(state_dict)

    def moved(self, folder_from: Path, folder_to: Path) -> None:
        """Note that files below one folder, where the call ran, may lie below another one here."""
