"""Groups of tasks: which error is raised, and that a cancellation is never lost."""

from __future__ import annotations

import asyncio
import logging

import pytest
from gpulayer_mesh.errors import GpuLayerError, NotAllowedError, TransportError
from gpulayer_mesh.groups import first_error, together
from gpulayer_mesh.runtime import background
from gpulayer_mesh.runtime.background import Background


def test_cause_comes_before_its_consequences() -> None:
    refused = NotAllowedError("no")
    many = BaseExceptionGroup(
        "", [TransportError("broke off"), ExceptionGroup("", [ValueError("x"), refused])]
    )
    assert first_error(many) is refused
    assert isinstance(first_error(ExceptionGroup("", [OSError("disk")])), OSError)


async def fail_at(event: asyncio.Event) -> None:
    await event.wait()
    raise TransportError("broke off")


async def test_error_of_a_task_is_raised_plainly() -> None:
    event = asyncio.Event()
    event.set()
    with pytest.raises(TransportError, match="broke off"):
        await together(asyncio.sleep(60), fail_at(event))


async def test_results_come_in_order() -> None:
    assert await together() == []
    assert await together(asyncio.sleep(0.01, "a"), asyncio.sleep(0, "b")) == ["a", "b"]


async def test_caller_cancelled_as_a_task_fails_ends_and_does_not_try_again() -> None:
    event, tries = asyncio.Event(), 0

    async def again_and_again() -> None:
        nonlocal tries
        while True:
            tries += 1
            try:
                await together(asyncio.sleep(60), fail_at(event))
            except GpuLayerError:
                await asyncio.sleep(0.01)

    running = asyncio.create_task(again_and_again())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    event.set()
    running.cancel()
    await asyncio.wait([running], timeout=5)
    assert running.cancelled()
    assert tries == 1


async def test_background_ends_a_task_that_missed_the_first_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "AGAIN_S", 0.01)
    missed = 0

    async def misses_one() -> None:
        nonlocal missed
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            missed += 1
        await asyncio.sleep(60)

    work = Background(logging.getLogger("test"))
    task = work.spawn(misses_one())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await work.close()
    assert task.cancelled()
    assert missed == 1
