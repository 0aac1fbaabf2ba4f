"""Fixtures shared by the tests of the agent's shells."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from boxes import Mesh


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    made = Mesh(tmp_path)
    yield made
    for box in list(made.boxes.values()):
        await box.close()
