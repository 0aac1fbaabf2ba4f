"""deterministic and benchmark: which of torch's switches a call sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from one_weight import OneWeight, loader, trainer

from gpulayer.pytorch import Trainer
from gpulayer.pytorch.arguments import ArgumentError


@pytest.fixture(autouse=True)
def switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    yield
    torch.backends.cudnn.benchmark = before
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, (0, None)), (True, (2, ":4096:8")), ("warn", (1, ":4096:8"))]
)
def test_deterministic_algorithms(value: Any, expected: Any, monkeypatch: Any) -> None:
    import os

    trainer(max_epochs=1, deterministic=value).fit(OneWeight(), loader(2))
    mode = torch.get_deterministic_debug_mode()
    assert (mode, os.environ.get("CUBLAS_WORKSPACE_CONFIG")) == expected


def test_false_turns_deterministic_algorithms_off() -> None:
    torch.use_deterministic_algorithms(True)
    trainer(max_epochs=1, deterministic=False).fit(OneWeight(), loader(2))
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_steps": 2}, False),  # not worth it
        ({"max_steps": 1000, "max_epochs": 500}, True),
        ({"max_steps": 1000, "max_epochs": 500, "deterministic": True}, False),
        ({"max_steps": 1000, "max_epochs": 500, "benchmark": False}, False),
        ({"max_steps": 2, "benchmark": True}, True),
    ],
    ids=str,
)
def test_autotuning_is_on_where_it_is_worth_while(arguments: Any, expected: bool) -> None:
    trainer(**arguments).fit(OneWeight(), loader(2))
    assert torch.backends.cudnn.benchmark is expected


def test_other_values_are_refused() -> None:
    with pytest.raises(ArgumentError, match="deterministic is True, False"):
        Trainer(deterministic="yes")
