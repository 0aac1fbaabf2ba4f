"""`Module`: the steps and hooks a user writes, with Lightning's names and signatures.

All hooks here do nothing; the loop asks once per fit which of them a class overrides (`overridden`)
and calls only those. Knows neither devices nor ranks.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from gpulayer.pytorch import arguments, hyperparameters
from gpulayer.pytorch.arguments import ArgumentError
from gpulayer.pytorch.hyperparameters import AttributeDict

if TYPE_CHECKING:
    from gpulayer.pytorch.data import Loaders
    from gpulayer.pytorch.manual import ManualOptimization
    from gpulayer.pytorch.trainer import Trainer


# What numbers become in `all_gather`: Lightning's choice.
_NUMBERS = ((bool, torch.uint8), (int, torch.int32), (float, torch.float32))


class Module(nn.Module):
    """A model that says how it is trained."""

    automatic_optimization = True
    logger: Any = None  # as with Lightning's Trainer(logger=False): values go through `log`
    # Of the class, so that hyperparameters may be saved before `super().__init__()`.
    _hparams: AttributeDict | None = None
    _hparams_initial: AttributeDict | None = None
    _hparams_name: str | None = None  # the argument of __init__ that holds all of them
    _logs_hparams = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer: Trainer | None = None
        self._manual: ManualOptimization | None = None
        self._toggled: dict[nn.Parameter, bool] = {}

    # -- what a user writes ------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of `(batch, batch_idx)`: a tensor, a dict with "loss", or None."""
        raise NotImplementedError(f"{type(self).__name__} defines no training_step")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Look at `(batch, batch_idx[, dataloader_idx])`; log what is to be known."""

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Look at `(batch, batch_idx[, dataloader_idx])` in `Trainer.test`."""

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `Trainer.predict` is to give for `(batch, batch_idx[, dataloader_idx])`."""
        return self(args[0])

    def configure_callbacks(self) -> Any:
        """Return a callback or a list of them; they replace the Trainer's of the same class."""
        return []

    def configure_optimizers(self) -> Any:
        """Return an optimizer, ([optimizer], [scheduler]), a dict of both, or None."""
        raise NotImplementedError(f"{type(self).__name__} defines no configure_optimizers")

    def train_dataloader(self) -> Loaders:
        raise NotImplementedError

    def val_dataloader(self) -> Loaders:
        raise NotImplementedError

    def test_dataloader(self) -> Loaders:
        raise NotImplementedError

    def predict_dataloader(self) -> Loaders:
        raise NotImplementedError

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **init_arguments: Any,
    ) -> Self:
        """Make a module as it was made before, and give it the weights of a checkpoint.

        Args:
            map_location: where tensors go, as for `torch.load`; default: to the device they were
                on, if it is here, else to the CPU.
            hparams_file: not taken; give what it holds by name.
            strict: the weights must be exactly the module's; default true.
            weights_only: always true: files are read without running code from them.
            init_arguments: override hyperparameters of the checkpoint, and add to them.
        """
        from gpulayer.pytorch import checkpoints

        if hparams_file is not None:
            raise ArgumentError(
                "hyperparameters are in the checkpoint; hparams_file is not read",
                hint="give others by name: load_from_checkpoint(PATH, width=3)",
            )
        if weights_only is False:
            raise ArgumentError("checkpoints are never read with weights_only=False")
        strict = True if strict is None else strict
        checkpoint = checkpoints.load(checkpoint_path, map_location or checkpoints.where_it_was)
        module = cls(**hyperparameters.init_arguments(cls, checkpoint, init_arguments))
        module.configure_model()
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"], strict=strict)
        first = next(iter(checkpoint["state_dict"].values()), None)
        return module.to(first.device) if isinstance(first, Tensor) else module

    # -- hyperparameters ---------------------------------------------------------------------

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Iterable[str] | str | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep arguments of `__init__` in `hparams`, in checkpoints and in hparams.yaml.

        Called in `__init__`; a further call adds to the ones before.

        Args:
            args: names of arguments, or one dict or Namespace; default: all arguments, also those
                of subclasses.
            ignore: names to leave out.
            frame: the frame of `__init__`, if this is called from elsewhere.
            logger: write hparams.yaml.
        """
        frame = frame or inspect.currentframe()
        assert frame is not None
        self._logs_hparams = logger
        hyperparameters.save(self, args, ignore, frame)

    @property
    def hparams(self) -> AttributeDict:
        """The hyperparameters; changes are saved in checkpoints from then on."""
        if self._hparams is None:
            self._hparams = AttributeDict()
        return self._hparams

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the hyperparameters as they were saved."""
        return hyperparameters.copied(self._hparams_initial or {})

    # -- logging -----------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        *,
        sync_dist: bool = False,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
        **unknown: Any,
    ) -> None:
        """Record a scalar.

        Args:
            value: a number or a tensor of one element; it is not moved and not waited for.
            prog_bar: show it in the progress line.
            logger: write it to metrics.csv.
            on_step, on_epoch: keep the step's value, the epoch's, or both; the hook decides the
                default.
            reduce_fx: "mean" (weighted by `batch_size`), "sum", "min" or "max" over the epoch.
            sync_dist: reduce over all ranks; costs a collective at each step if `on_step`.
            add_dataloader_idx: append `/dataloader_idx_<i>` when there are several loaders.
            batch_size: above 0; default: first dimension of the first tensor in the batch.
            rank_zero_only: only rank 0 calls this; never synchronised.
        """
        if unknown:
            arguments.refuse("self.log", unknown)
        trainer = self._trainer
        if trainer is None:
            return  # steps can be tried without a trainer
        trainer._metrics.log(
            name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist,
            add_dataloader_idx, batch_size, rank_zero_only,
        )  # fmt: skip

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        *,
        sync_dist: bool = False,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
        **unknown: Any,
    ) -> None:
        """Record several scalars with the same options as `log`."""
        for name, value in dictionary.items():
            self.log(
                name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist=sync_dist,
                add_dataloader_idx=add_dataloader_idx, batch_size=batch_size,
                rank_zero_only=rank_zero_only, **unknown,
            )  # fmt: skip

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self._trainer is None or self._trainer.is_global_zero:
            print(*args, **kwargs)

    @property
    def loggers(self) -> list[Any]:
        """Empty, as with Lightning's Trainer(logger=False)."""
        return []

    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """Return `data` with what all ranks have of each tensor: (world_size, ...), in rank order.

        Every rank must call this, with tensors of the same shapes. One rank adds no dimension.

        Args:
            data: a tensor, number or numpy array, or a collection of them, however nested.
            group: not taken: all ranks take part.
            sync_grads: not taken: gradients end here.
        """
        from gpulayer.pytorch.data import apply

        if group is not None:
            raise ArgumentError(
                f"all_gather over group={group!r}: it gathers from all ranks",
                hint="call torch.distributed.all_gather with the group",
            )
        if sync_grads:
            raise ArgumentError(
                "all_gather with sync_grads=True: gradients do not pass through it",
                hint="call torch.distributed.nn.functional.all_gather",
            )
        runtime, device = self.trainer.runtime, self.device
        numpy = sys.modules.get("numpy")  # there are no arrays where nobody has imported it

        def gathered(value: Any) -> Any:
            if numpy is not None and isinstance(value, numpy.ndarray):
                value = torch.from_numpy(value)
            kind = next((kind for of, kind in _NUMBERS if isinstance(value, of)), None)
            if kind is not None:
                value = torch.tensor(value, dtype=kind)
            if not isinstance(value, Tensor):
                return value
            return value.to(device) if runtime.world_size == 1 else runtime.all_gather(value)

        return apply(data, gathered)

    # -- where training is -------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a Trainer yet")
        return self._trainer

    @property
    def global_step(self) -> int:
        """Optimizer steps completed."""
        return self._trainer.global_step if self._trainer else 0

    @property
    def current_epoch(self) -> int:
        """Epochs completed."""
        return self._trainer.current_epoch if self._trainer else 0

    @property
    def global_rank(self) -> int:
        return self._trainer.global_rank if self._trainer else 0

    @property
    def local_rank(self) -> int:
        return self._trainer.local_rank if self._trainer else 0

    @property
    def device(self) -> torch.device:
        tensors: Iterator[Tensor] = itertools.chain(self.parameters(), self.buffers())
        first = next(tensors, None)
        return torch.device("cpu") if first is None else first.device

    def freeze(self) -> Self:
        """Let no parameter get gradients, and switch to eval mode."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Let all parameters get gradients, and switch to train mode."""
        return self.requires_grad_(True).train()

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer of this fit, or the list of them.

        Args:
            use_pl_optimizer: in manual optimization, with steps that count and call hooks; False
                gives the bare ones.
        """
        found: Sequence[Any] = self.trainer.optimizers
        if self._manual is not None and use_pl_optimizer:
            found = self._manual.optimizers
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        """Return the scheduler of this fit, the list of them, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return (found[0] if len(found) == 1 else found) if found else None

    # -- manual optimization (automatic_optimization = False) ---------------------------------

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward on `loss`, scaled under 16-mixed and reduced over ranks."""
        if self._manual is None:
            raise RuntimeError(
                "manual_backward belongs into a training_step with automatic_optimization = False"
            )
        self._manual.backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters get gradients, until `untoggle_optimizer`."""
        self._toggled = {
            parameter: parameter.requires_grad
            for one in self.trainer.optimizers
            for group in one.param_groups
            for parameter in group["params"]
        }
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        for parameter, before in self._toggled.items():
            parameter.requires_grad = before and parameter in mine

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo `toggle_optimizer`; what was changed on its own parameters meanwhile stays."""
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        for parameter, before in self._toggled.items():
            if parameter not in mine:
                parameter.requires_grad = before
        self._toggled = {}

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Toggle an optimizer within a block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    # -- methods of Lightning that are elsewhere -----------------------------------------------

    def to_torchscript(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: torch has this; the error says where."""
        raise arguments.absent("Module", type(self).__name__, "to_torchscript")

    def to_onnx(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: torch has this; the error says where."""
        raise arguments.absent("Module", type(self).__name__, "to_onnx")

    def to_tensorrt(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: torch has this; the error says where."""
        raise arguments.absent("Module", type(self).__name__, "to_tensorrt")

    # -- hooks with a default ----------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any],
    ) -> None:
        """Step; `optimizer_closure` runs training_step and backward and must be called."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of the optimizer's parameters by 2-norm or by value.

        Args:
            gradient_clip_val, gradient_clip_algorithm: default: the Trainer's, from which they may
                not differ where it has one.
        """
        gradient_clip_val, by = self._clipping(gradient_clip_val, gradient_clip_algorithm)
        if gradient_clip_val <= 0:
            return
        if getattr(optimizer, "unscales_itself", False):
            raise ArgumentError(
                f"{type(optimizer.optimizer).__name__} unscales gradients inside its step: they "
                "cannot be clipped under 16-mixed",
                hint="build the optimizer with fused=False",
            )
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        if not parameters:  # training_step returned None; torch 2.13 cannot clip no value at all
            return
        if by == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
        else:
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)

    def _clipping(self, value: float | None, algorithm: str | None) -> tuple[float, str]:
        given: dict[str, Any] = {
            "gradient_clip_val": value,
            "gradient_clip_algorithm": algorithm,
        }
        if isinstance(algorithm, str):
            given["gradient_clip_algorithm"] = algorithm.lower()
        if self._trainer is not None:
            for name, one in given.items():
                own = getattr(self._trainer, name)
                if one is None:
                    given[name] = own
                elif own is not None and own != one:
                    raise ArgumentError(
                        f"clip_gradients({name}={one!r}) differs from Trainer({name}={own!r})",
                        hint="give it in one place only",
                    )
        return arguments.clipping(**given)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        from gpulayer.pytorch.data import move

        return move(batch, device)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_validation_model_zero_grad(self) -> None:
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        self.eval()

    def on_validation_model_train(self) -> None:
        """Override to replace the exact restoring of train and eval flags after validation."""

    def on_test_model_eval(self) -> None:
        self.eval()

    def on_test_model_train(self) -> None:
        """Override to replace the exact restoring of train and eval flags after a test."""

    def on_predict_model_eval(self) -> None:
        self.eval()

    # -- hooks that do nothing ---------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download and the like: runs once per machine, before `setup`."""

    def setup(self, stage: str) -> None: ...

    def configure_model(self) -> None: ...

    def teardown(self, stage: str) -> None: ...

    def on_fit_start(self) -> None: ...

    def on_fit_end(self) -> None: ...

    def on_train_start(self) -> None: ...

    def on_train_end(self) -> None: ...

    def on_train_epoch_start(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_before_zero_grad(self, optimizer: Any) -> None: ...

    def on_before_backward(self, loss: Tensor) -> None: ...

    def on_after_backward(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def on_validation_start(self) -> None: ...

    def on_validation_end(self) -> None: ...

    def on_validation_epoch_start(self) -> None: ...

    def on_validation_epoch_end(self) -> None: ...

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_test_start(self) -> None: ...

    def on_test_end(self) -> None: ...

    def on_test_epoch_start(self) -> None: ...

    def on_test_epoch_end(self) -> None: ...

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_predict_start(self) -> None: ...

    def on_predict_end(self) -> None: ...

    def on_predict_epoch_start(self) -> None: ...

    def on_predict_epoch_end(self) -> None: ...

    def on_predict_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_predict_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to what is saved: tensors and plain data."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read, before the weights are loaded, what `on_save_checkpoint` added."""


def explain(error: BaseException) -> None:
    """Add to an error about a member that Lightning's module has what to do instead."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Module):
        hint = arguments.ABSENT["Module"].get(error.name or "")
        if hint is not None:
            error.add_note(f"{error.name} of Lightning: {hint}")


def overridden(module: nn.Module, name: str) -> bool:
    """Return whether `module` defines `name` itself instead of inheriting it from `Module`."""
    if name in vars(module):
        return True
    own = getattr(type(module), name, None)
    return own is not None and own is not getattr(Module, name, None)
