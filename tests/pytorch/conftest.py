"""Fixtures of the tests of `gpulayer.pytorch`."""

from __future__ import annotations

from typing import Any

import pytest
from beside_lightning import oracle


@pytest.fixture(scope="session")
def lightning() -> Any:
    """Return `pytorch_lightning`, to compare with; skips where it is not installed."""
    return oracle()
