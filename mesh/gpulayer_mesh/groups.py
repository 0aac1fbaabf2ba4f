"""Several things at once, of which the first error ends the rest and is raised plainly.

It does not know what is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from gpulayer_mesh.errors import GpuLayerError, TransportError

T = TypeVar("T")


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all at once; return their results, or raise the first error once the rest has ended.

    Not a TaskGroup: before Python 3.13 one forgets that its caller was cancelled when a task fails
    at the same moment, and a caller that tries again after errors would then never end.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [e for task in tasks if not task.cancelled() and (e := task.exception()) is not None]
    if errors:
        raise first_error(BaseExceptionGroup("together", errors))
    return [task.result() for task in tasks]


def first_error(many: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that caused a group to end: ours before anything that followed from it."""
    flat: list[BaseException] = []
    stack: list[BaseException] = [many]
    while stack:
        error = stack.pop(0)
        if isinstance(error, BaseExceptionGroup):
            stack[:0] = error.exceptions
        else:
            flat.append(error)
    ours = [e for e in flat if isinstance(e, GpuLayerError)]
    known = [e for e in ours if not isinstance(e, TransportError)]
    return (known or ours or flat)[0]
