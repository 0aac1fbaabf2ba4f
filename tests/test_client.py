"""What a member's client decides by itself: whom to ask for a job's record, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gpulayer_mesh import client as clients
from gpulayer_mesh.client import MeshClient
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.jobspec import JobRecord, JobState
from gpulayer_mesh.errors import TransportError
from job_cases import node, spec


class Asking(MeshClient):
    """Answers by node: a state, an error, or nothing ever."""

    def __init__(self, answers: dict[str, JobState | Exception | None]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def call(self, node: str, *_: Any, **__: Any) -> Any:
        self.asked.append(node)
        answer = self.answers[node]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        record = JobRecord(spec(1, 1, 1), answer, node)
        return wire.unpack(wire.pack(record), max_bytes=wire.BODY_MAX)


RECORD = JobRecord(spec(1, 1, 1), JobState.RUNNING, node(0))


async def test_keeper_that_answers_is_the_only_one_asked() -> None:
    client = Asking({node(0): JobState.RUNNING})
    assert (await client.record(RECORD)).state is JobState.RUNNING
    assert client.asked == [node(0)]


async def test_silent_keeper_does_not_hold_up_the_answer_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "NEXT_S", 0.01)
    client = Asking({node(0): None, node(1): TransportError("refused"), node(2): JobState.FAILED})
    async with asyncio.timeout(20):
        assert (await client.record(RECORD)).state is JobState.FAILED
    assert client.asked == [node(0), node(1), node(2)]
    assert len(asyncio.all_tasks()) == 1


async def test_nobody_answers_is_an_error() -> None:
    client = Asking({node(i): TransportError(f"no answer of {i}") for i in range(3)})
    with pytest.raises(TransportError, match="no answer of 2"):
        await client.record(RECORD)
