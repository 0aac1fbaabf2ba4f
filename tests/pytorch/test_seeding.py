"""`seed_everything` takes what Lightning's takes, and says what it does not take."""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from gpulayer import env
from gpulayer.pytorch import seed_everything, seeding

VARIABLE = "PL_GLOBAL_SEED"


@pytest.fixture(autouse=True)
def unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "_seed", None)
    monkeypatch.setattr(seeding, "_seed_workers", False)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)


def drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


@pytest.mark.parametrize(
    "seed",
    [0, 7, "7", " 8 ", 7.9, True, np.int64(3), 2**32 - 1, -1, 2**32, "x", "7.5", math.nan, math.inf,
     [1], None],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("variable", [None, "9", "x"])
def test_seeds_are_lightning_s(
    seed: Any, variable: str | None, lightning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(function: Any) -> Any:
        monkeypatch.delenv(VARIABLE, raising=False)
        if variable is not None:
            monkeypatch.setenv(VARIABLE, variable)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = function(seed)
            except (ValueError, TypeError, OverflowError) as error:
                kind = ValueError if isinstance(error, ValueError | OverflowError) else TypeError
                return kind
        return int(found), drawn(), len(caught)

    assert outcome(seed_everything) == outcome(lightning.seed_everything)


def test_without_a_seed_it_is_the_one_before() -> None:
    assert seed_everything(5) == 5
    first = drawn()
    assert seed_everything() == 5
    assert drawn() == first


def test_a_seed_that_is_nowhere_is_said_unless_asked_not_to(
    recwarn: pytest.WarningsRecorder,
) -> None:
    assert seed_everything(verbose=False) == 0
    assert not recwarn.list
    seeding._seed = None
    with pytest.warns(UserWarning, match="no seed was given or found in PL_GLOBAL_SEED: it is 0"):
        seed_everything()


@pytest.mark.parametrize("seed", [-1, "x"])
def test_impossible_seed_is_named_with_the_range(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed must be a whole number in 0\.\.4294967295") as e:
        seed_everything(seed)
    assert repr(seed) in str(e.value)


def test_samplers_take_the_variable_and_jobs_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeding.sampler_seed() == 0
    monkeypatch.setenv(VARIABLE, "9")
    assert seeding.sampler_seed() == 9
    assert env.forwarded_env()[VARIABLE] == "9"
    seed_everything(3)
    assert seeding.sampler_seed() == 3
