"""Figures that simulations measure, printed at the end of the run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Note = Callable[[str], None]
_figures: list[str] = []


@pytest.fixture
def note() -> Note:
    """Record one line for the summary."""
    return _figures.append


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """A million live views and no cycles: the collector would only walk them, again and again."""
    gc.disable()
    yield
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _figures:
        terminalreporter.section("simulated mesh")
        for line in _figures:
            terminalreporter.write_line(line)
