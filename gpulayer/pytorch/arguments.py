"""Checks of what users pass, in Lightning's sense of each argument.

Pure: values in, values out. The type of a number decides its meaning: 1 is one batch, 1.0 is all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from gpulayer_mesh.errors import ConfigError

# As in `jobspec`: a script that trains does not import that module.
RESTARTS_MAX = 20
DISCONNECT_MIN_S, WAIT_MAX_S = 10, 10_000_000


class ArgumentError(ConfigError, ValueError):
    """An argument of `gpulayer.pytorch` has an impossible value."""


def limit(name: str, value: float | None) -> int | float:
    """Return a batch limit: an int counts batches, a float in [0, 1] is a fraction."""
    if value is None:
        return 1.0
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        if isinstance(value, int) or value <= 1.0:
            return value
        if value.is_integer():
            return int(value)
    raise ArgumentError(f"{name} must be an int >= 0 or a float in [0, 1], got {value!r}")


def batches(name: str, length: float, limited: int | float) -> float:
    """Return how many of `length` batches (inf: unknown) a limit lets through."""
    if length == 0:
        return 0
    if isinstance(limited, int):
        return min(length, limited)
    if length == float("inf"):
        if limited == 0.0:
            return 0
        if limited != 1.0:
            raise ArgumentError(
                f"{name}={limited} is a fraction, but the loader has no length",
                hint="give an int",
            )
        return length
    count = int(length * limited)
    if count == 0 and limited > 0:
        raise ArgumentError(f"{name}={limited} of {length:.0f} batches is not one batch")
    return count


def at_least(name: str, value: Any, least: int) -> int:
    """Return `value` if it is an int not below `least`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ArgumentError(f"{name} must be an int >= {least}, got {value!r}")


def count(name: str, value: Any, least: int) -> int:
    """Return `value` if it is a whole number, also one like 2.0, not below `least`."""
    whole = isinstance(value, float) and value.is_integer()
    return at_least(name, int(value) if whole else value, least)


def restarts(value: Any) -> int:
    """Return how often a job may start again."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= RESTARTS_MAX:
        return value
    raise ArgumentError(f"restarts must be 0 to {RESTARTS_MAX}, got {value!r}")


def on_disconnect(value: Any) -> float | None:
    """Return how long the launcher may be gone; None for "keep"."""
    if value == "keep":
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and DISCONNECT_MIN_S <= value <= WAIT_MAX_S:
        return float(value)
    limits = f"{DISCONNECT_MIN_S} to {WAIT_MAX_S} seconds"
    raise ArgumentError(f'on_disconnect must be "keep" or {limits}, got {value!r}')


def flag(name: str, value: Any, *, none: bool | None = None, hint: str | None = None) -> bool:
    """Return a switch: True, False, or the ints 1 and 0.

    Args:
        none: what None stands for; default: it is refused.
        hint: what to do instead of passing something else.
    """
    if value is None and none is not None:
        return none
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise ArgumentError(f"{name} must be True or False, got {value!r}", hint=hint)


def trial(value: Any) -> int:
    """Return how many batches `fast_dev_run` asks for; 0: it is no trial run."""
    if value is None or isinstance(value, bool):
        return int(bool(value))
    return at_least("fast_dev_run", value, 0)


def seconds(name: str, value: Any) -> float:
    """Return `value` if it is a number of seconds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0 <= value < float("inf"):
        return float(value)
    raise ArgumentError(f"{name} must be a number of seconds >= 0, got {value!r}")


def duration(name: str, value: Any) -> timedelta:
    """Return a time given as "DD:HH:MM:SS", as a timedelta or as a dict of its arguments."""
    if isinstance(value, timedelta):
        return value
    if isinstance(value, dict):
        return timedelta(**value)
    if isinstance(value, str):
        fields = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", value.strip())
        if fields is not None:
            days, hours, minutes, seconds = (int(field) for field in fields.groups())
            return timedelta(days, hours=hours, minutes=minutes, seconds=seconds)
    raise ArgumentError(
        f'{name} must be "DD:HH:MM:SS", a timedelta or a dict of its arguments, got {value!r}'
    )


def val_interval(
    interval: Any, every_n_epoch: int | None
) -> tuple[int | float | timedelta, int | None]:
    """Check `val_check_interval` and `check_val_every_n_epoch` together."""
    if every_n_epoch is None and isinstance(interval, float):
        raise ArgumentError(
            f"val_check_interval={interval} is a fraction of an epoch, but "
            "check_val_every_n_epoch=None counts batches across epochs",
            hint="give val_check_interval as an int or a time",
        )
    if every_n_epoch is not None:
        at_least("check_val_every_n_epoch", every_n_epoch, 1)
    if interval is None:
        return 1.0, every_n_epoch
    if isinstance(interval, str | dict | timedelta):
        return duration("val_check_interval", interval), every_n_epoch
    if isinstance(interval, bool) or not isinstance(interval, int | float):
        raise ArgumentError(
            f"val_check_interval must be an int, a float or a time, got {interval!r}"
        )
    if (isinstance(interval, int) and interval >= 1) or (
        isinstance(interval, float) and 0.0 <= interval <= 1.0
    ):
        return interval, every_n_epoch
    raise ArgumentError(
        f"val_check_interval must be an int >= 1 or a float in [0, 1], got {interval!r}"
    )


def clipping(gradient_clip_val: Any, gradient_clip_algorithm: Any) -> tuple[float, str]:
    """Return to what and how gradients are clipped; 0 is not at all."""
    value = 0.0 if gradient_clip_val is None else gradient_clip_val
    if not isinstance(value, int | float):
        raise TypeError(f"gradient_clip_val must be a number, got {value!r}")
    algorithm = str(gradient_clip_algorithm or "norm").lower()
    if algorithm not in ("norm", "value"):
        raise ArgumentError(
            f'gradient_clip_algorithm is "norm" or "value", not {gradient_clip_algorithm!r}'
        )
    return value, algorithm


def accelerator(name: Any) -> str:
    """Return the name of a kind of device; which are here is not known yet."""
    known = ("auto", "cpu", "gpu", "cuda", "rocm", "mps")
    if name in known:
        return str(name)
    raise ArgumentError(f"unknown accelerator {name!r}", hint=f"one of {', '.join(known)}")


def devices(value: Any) -> int | str:
    """Return "auto" or the number of devices per node."""
    if value in ("auto", -1, "-1"):
        return "auto"
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, list | tuple):
        raise ArgumentError(
            f"devices={value!r}: devices are counted, not chosen",
            hint="give a number; CUDA_VISIBLE_DEVICES picks cards on this machine",
        )
    return at_least("devices", value, 1)


def target(value: Any) -> str | tuple[str, ...]:
    """Return where to run as one word or several."""
    if isinstance(value, str):
        return value
    if isinstance(value, Iterable):
        words = tuple(value)
        if all(isinstance(word, str) for word in words):
            return words
    raise ArgumentError(
        f"target is a name or a list of names, not {value!r}",
        hint='"auto", "local", "mesh", node names, "zone:NAME", "!NAME"',
    )


def refuse_datamodule(call: str, loaders: Any) -> None:
    """Raise where a data module of Lightning stands for loaders."""
    if callable(getattr(loaders, "prepare_data", None)) and hasattr(loaders, "train_dataloader"):
        name = type(loaders).__name__
        raise ArgumentError(
            f"{call} takes loaders, not a {name}: there are no data modules",
            hint="call its prepare_data() and setup(stage), then pass what its "
            f"{_LOADERS[call]} return",
        )


_LOADERS = {
    "fit": "train_dataloader() and val_dataloader()",
    "validate": "val_dataloader()",
    "test": "test_dataloader()",
    "predict": "predict_dataloader()",
}


def plain(count: float) -> int | None:
    """Return a number of batches as JSON has it: None is unknown."""
    return None if count == float("inf") else int(count)


# What a Lightning user may pass that is not taken here, by what it is passed to, and what to do
# instead.
_READ = "files are always read without running code from them"
REFUSED = {
    "Trainer": {
        "nodes": "machines are num_nodes here",
        "ckpt_path": "pass it to fit, validate, test or predict",
        "datamodule": "pass loaders to fit, or define train_dataloader in the module",
        "enable_model_summary": "there is no model summary",
        "barebones": "the loop is lean as it is",
        "detect_anomaly": "wrap fit in torch.autograd.set_detect_anomaly(True)",
        "overfit_batches": "use limit_train_batches",
        "plugins": "there are no plugins; use launch() with your own script",
        "profiler": "use torch.profiler around fit",
        "reload_dataloaders_every_n_epochs": "loaders are built once per fit",
        "sync_batchnorm": "call torch.nn.SyncBatchNorm.convert_sync_batchnorm yourself",
        "enable_autolog_hparams": "save_hyperparameters(logger=False) leaves a module's out of the "
        "log",
        "model_registry": "there is no registry; pass paths",
    },
    "fit": {
        "datamodule": "pass loaders, or define train_dataloader and val_dataloader in the module",
        "weights_only": _READ,
    },
    "validate": {
        "datamodule": "pass dataloaders, or define val_dataloader in the module",
        "weights_only": _READ,
    },
    "test": {
        "datamodule": "pass dataloaders, or define test_dataloader in the module",
        "weights_only": _READ,
    },
    "predict": {
        "datamodule": "pass dataloaders, or define predict_dataloader in the module",
        "weights_only": _READ,
    },
    "save_checkpoint": {"storage_options": "checkpoints are files on a disk of the machine"},
    "ModelCheckpoint": {
        "save_on_exception": "save_final=True saves at the end, also for Ctrl-C and SIGTERM; else "
        "call trainer.save_checkpoint in on_exception",
    },
    "self.log": {
        "metric_attribute": "log the value: self.log(name, metric.compute())",
        "sync_dist_group": "sync_dist=True reduces over all ranks",
        "enable_graph": "logged values are detached; keep the tensor for what needs its graph",
    },
    "launch": {"num_nodes": "machines are nodes here"},
}


# Members of Lightning that are not here, and what to do instead. Of `Module` they are told where a
# Trainer call meets them (`explain`): torch looks up every parameter in `Module.__getattr__`.
ABSENT = {
    "Trainer": {
        "datamodule": "pass loaders to fit, or define train_dataloader in the module",
        "device_ids": "module.device is this rank's device; world_size counts the ranks",
        "num_devices": "world_size counts the ranks of all machines; devices is what was asked for",
        "distributed_sampler_kwargs": "use_distributed_sampler=False leaves loaders as they are",
        "enable_validation": "num_val_batches is empty where nothing is validated",
        "fit_loop": "loops are not open; read current_epoch, global_step and num_training_batches",
        "validate_loop": "loops are not open; read num_val_batches and val_dataloaders",
        "test_loop": "loops are not open; read num_test_batches and test_dataloaders",
        "predict_loop": "loops are not open; read num_predict_batches and predict_dataloaders",
        "init_module": "make large layers in configure_model",
        "precision_plugin": "precision is its name, scaler the gradient scaler",
        "profiler": "use torch.profiler around fit",
        "progress_bar_callback": "progress is no callback; enable_progress_bar=False stops it",
        "received_sigterm": "on_exception gets the SystemExit(143) that ends such a fit",
        "state": "stage is the call that runs; training, validating, interrupted tell more",
        "val_check_batch": "val_check_interval is what was asked for",
        "barebones": "the loop is lean as it is",
        "overfit_batches": "use limit_train_batches",
        "reload_dataloaders_every_n_epochs": "loaders are built once per fit",
        "enable_autolog_hparams": "save_hyperparameters(logger=False) leaves a module's out",
    },
    "Module": {
        "dtype": "ask a parameter: next(self.parameters()).dtype",
        "example_input_array": "it would only serve a summary and graphs; set what you like",
        "fabric": "launch() with Runtime runs a loop of your own",
        "to_torchscript": "call torch.export.export(model, args)",
        "to_onnx": "call torch.onnx.export(model, args, path)",
        "to_tensorrt": "call torch_tensorrt.compile(model, inputs=...)",
        "device_mesh": 'Trainer(strategy="fsdp") splits parameters by itself',
        "configure_sharded_model": "configure_model has its place",
        "on_gpu": 'self.device.type == "cuda" tells',
        "strict_loading": "pass strict=False to load_from_checkpoint",
        "prepare_data_per_node": "prepare_data runs once per machine",
        "allow_zero_length_dataloader_with_multiple_devices": "every rank needs data to train",
        "remove_ignored_hparams": "pass ignore= to save_hyperparameters",
        "CHECKPOINT_HYPER_PARAMS_KEY": 'the key is "hyper_parameters"',
        "CHECKPOINT_HYPER_PARAMS_NAME": 'the key is "hparams_name"',
        "CHECKPOINT_HYPER_PARAMS_TYPE": "hyperparameters are always an AttributeDict",
    },
}


def absent(kind: str, owner: str, name: str) -> AttributeError:
    """Return the error Python would raise for a member, and what to do if it is known."""
    hint = f" ({ABSENT[kind][name]})" if name in ABSENT[kind] else ""
    return AttributeError(f"{owner!r} object has no attribute {name!r}{hint}", name=name)


def refuse(call: str, unknown: Mapping[str, Any]) -> None:
    """Raise the TypeError Python would, with a word on what to do."""
    table = REFUSED[call]
    for name in unknown:
        hint = f" ({table[name]})" if name in table else ""
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")
