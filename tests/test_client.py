"""What a member's client decides by itself: whom it asks, how often, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from gpulayer_mesh import client as clients
from gpulayer_mesh.client import MeshClient
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.jobspec import HostPhase, JobRecord, JobState
from gpulayer_mesh.core.logrecord import LogRecord, LogStream
from gpulayer_mesh.errors import TransportError
from job_cases import node, report, spec


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


class Streaming(MeshClient):
    """Two nodes of a job that has ended; the second one's agent is away for a number of calls."""

    def __init__(self, away: int, *last_words: HostPhase) -> None:
        reports = tuple(report(i, phase) for i, phase in enumerate(last_words))
        self.over = JobRecord(
            spec(1, 1), JobState.FAILED, node(0), reports=reports, ended_age_s=1.0
        )
        self.away = away
        self.dialer: Any = SimpleNamespace(stream=self.stream)

    def addresses(self, node: str) -> tuple[()]:
        return ()

    async def call(self, asked: str, *_: Any, **__: Any) -> Any:
        if asked == node(1):
            raise TransportError("away")
        return wire.unpack(wire.pack(self.over), max_bytes=wire.BODY_MAX)

    async def stream(self, asked: str, _: Any, __: str, path: str) -> AsyncIterator[bytes]:
        rank = int(asked == node(1))
        first = int(path.partition(f"from={rank}:")[2] or 1)
        for seq in range(first, 4):
            if rank == 1 and seq == 2 and self.away:
                self.away -= 1
                raise TransportError("broke off")
            yield LogRecord(rank, seq, 1.0, LogStream.OUT, b"x\n").pack()

    async def lines(self) -> list[tuple[int, int]]:
        job = JobRecord(spec(1, 1), JobState.RUNNING, node(0))
        self.seen: list[tuple[int, int]] = []
        async with asyncio.timeout(20):
            async for one in self.logs(job, ranks=None, follow=True):
                self.seen.append((one.rank, one.seq))
        return self.seen


EVERY_LINE = [(rank, seq) for rank in (0, 1) for seq in (1, 2, 3)]


async def test_lines_of_an_agent_that_is_away_at_the_end_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "LOG_RETRY_S", (0.0,))
    client = Streaming(5, HostPhase.ENDED, HostPhase.ENDED)
    assert sorted(await client.lines()) == EVERY_LINE


@pytest.mark.parametrize("last_word", [HostPhase.ENDED, HostPhase.RUNNING])
async def test_lines_that_cannot_be_had_are_missed_aloud(
    monkeypatch: pytest.MonkeyPatch, last_word: HostPhase
) -> None:
    monkeypatch.setattr(clients, "LOG_RETRY_S", (0.0,))
    if last_word is HostPhase.ENDED:  # of a lost node nothing more is expected
        monkeypatch.setattr(clients, "LOG_LATE_S", 0.05)
    client = Streaming(10**6, HostPhase.ENDED, last_word)
    with pytest.raises(TransportError, match="lines are missing: box-1 does not answer"):
        await client.lines()
    assert sorted(client.seen) == EVERY_LINE[:4]
