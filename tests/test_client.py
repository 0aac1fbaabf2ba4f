"""What a member's client decides by itself: whom it asks, how often, and when it gives up."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpulayer_mesh import client as clients
from gpulayer_mesh.client import MeshClient, Queued
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.jobspec import (
    HostPhase,
    JobRecord,
    JobSpec,
    JobState,
    OutputFile,
    RankState,
    RankStatus,
)
from gpulayer_mesh.core.logrecord import LogRecord, LogStream
from gpulayer_mesh.core.restarts import Change, next_spec
from gpulayer_mesh.core.tickets import Ticket
from gpulayer_mesh.core.types import Role
from gpulayer_mesh.errors import (
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    RemovedError,
    TransportError,
)
from job_cases import JOB, exited, node, report, spec


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


async def test_only_a_job_that_minds_and_its_own_machine_lets_it_know_that_it_is_followed() -> None:
    asked: list[tuple[str, Any]] = []

    class Following(MeshClient):
        def __init__(self, here: str) -> None:
            self.identity = SimpleNamespace(node=here)  # type: ignore[assignment]

        async def call(self, node: str, method: str, path: str, body: Any = None, **_: Any) -> Any:
            asked.append((path.rpartition("/")[2], body))
            return wire.unpack(wire.pack(RECORD), max_bytes=wire.BODY_MAX)

    minds = replace(RECORD, spec=replace(RECORD.spec, on_disconnect_s=60.0))
    for record, here in ((RECORD, node(99)), (minds, node(5))):
        await Following(here).follow(record)
        await Following(here).leave(record)
    assert asked == [(RECORD.spec.id, None)] * 2
    asked.clear()
    await Following(node(99)).follow(minds)
    await Following(node(99)).leave(minds)
    assert asked == [("follow", {"leaving": False}), ("follow", {"leaving": True})]


async def test_nobody_answers_is_an_error() -> None:
    client = Asking({node(i): TransportError(f"no answer of {i}") for i in range(3)})
    with pytest.raises(TransportError, match="no answer of 2"):
        await client.record(RECORD)


async def test_refusal_counts_more_than_the_silence_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "NEXT_S", 0.01)
    refusal = NotAllowedError("this member may not do that to this job")
    lost = TransportError("cannot reach box-2")
    for last in (lost, None):  # refused, and as one that is cut off: it says nothing
        for order in ((refusal, lost, last), (lost, refusal, last)):
            client = Asking({node(i): answer for i, answer in enumerate(order)})
            async with asyncio.timeout(20):
                with pytest.raises(NotAllowedError):
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


@pytest.mark.parametrize("ran", [False, True])
async def test_node_on_which_no_rank_started_owes_no_lines(ran: bool) -> None:
    class Forgotten(Streaming):
        async def stream(self, asked: str, _: Any, __: str, path: str) -> AsyncIterator[bytes]:
            raise NotFoundError("no job on box-1")
            yield b""

    last = exited(0) if ran else RankStatus(0, RankState.WAITING)
    over = JobRecord(spec(1), JobState.FAILED, node(0), reports=(report(0, HostPhase.ENDED, last),))
    with pytest.raises(TransportError, match="lines are missing") if ran else nullcontext():
        async for _ in Forgotten(0).logs(over, ranks=None, follow=False):
            pass


# --- attempts ------------------------------------------------------------------------------------

FIRST = spec(1, 1, restarts=3, voters=(node(0), node(1), node(2)))
SECOND = next_spec(FIRST, Change(1, FIRST.slots, FIRST.voters))
THIRD = next_spec(SECOND, Change(2, FIRST.slots, FIRST.voters))


class Offering(MeshClient):
    """A node's file of one byte."""

    def __init__(self) -> None:
        self.dialer: Any = SimpleNamespace(stream=self.stream)

    def addresses(self, node: str) -> tuple[()]:
        return ()

    async def stream(self, *_: str | tuple[()]) -> AsyncIterator[bytes]:
        yield b"x"


@pytest.mark.parametrize("executable", [False, True])
async def test_program_that_a_job_made_comes_home_as_one(executable: bool, tmp_path: Path) -> None:
    job = JobRecord(spec(1), JobState.SUCCEEDED, node(0))
    file = OutputFile("out", 0, "run", 1, hashlib.sha256(b"x").digest(), executable)
    await Offering().fetch(job, node(0), file, tmp_path / "run")
    assert os.access(tmp_path / "run", os.X_OK) is executable


class Refused(MeshClient):
    """Box-9, which may do nothing to the job of box-0 and box-1."""

    def __init__(self, refusal: NotAllowedError, *members: tuple[int, str, Role]) -> None:
        self.refusal = refusal
        entries = {node(i): SimpleNamespace(name=name, roles=(role,)) for i, name, role in members}
        self.book: Any = SimpleNamespace(members=entries)
        self.identity: Any = SimpleNamespace(node=node(9))

    async def find_job(self, ident: str) -> JobRecord:
        return JobRecord(spec(1, 1), JobState.RUNNING, node(0))

    async def call(self, asked: str, *_: Any, **__: Any) -> Any:
        if asked == node(1):
            raise NotFoundError("it has forgotten the job")
        raise self.refusal


NINE, OWNER, DESK = (
    (9, "box-9", Role.WORKER),
    (99, "laptop", Role.LAUNCHER),
    (5, "desk", Role.ADMIN),
)


@pytest.mark.parametrize("command", ["get", "stop"])
@pytest.mark.parametrize(
    ("members", "who", "hint"),
    [
        ([NINE, OWNER, DESK], "laptop", f"on laptop or desk: gpulayer COMMAND {JOB}"),
        ([NINE, OWNER], "laptop", f"on laptop: gpulayer COMMAND {JOB}"),
        ([NINE], "laptop (no member any more)", "on the machine that founded the mesh: "),
    ],
)
async def test_who_may_not_is_told_who_may(
    command: str, members: list[tuple[int, str, Role]], who: str, hint: str
) -> None:
    client = Refused(NotAllowedError("this member may not do that to this job"), *members)
    if command == "get":
        asked: Any = client.outputs(await client.find_job(JOB))
    else:
        asked = client.stop(JOB, grace_s=None, kill=False)
    said = f"box-9 may not {command} job {JOB}: only {re.escape(who)}, which submitted it, and adm"
    with pytest.raises(NotAllowedError, match=said) as caught:
        await asked
    assert str(caught.value.hint).startswith(hint.replace("COMMAND", command))


async def test_who_may_not_take_a_job_out_of_the_queue_is_told_who_may() -> None:
    client = Refused(NotAllowedError("this member may not do that to this job"), NINE, OWNER)
    ticket = Ticket(1, JOB, node(99), "laptop", "train.py", "1 node")
    said = f"^box-9 may not stop job {JOB}: only laptop, which submitted it, and admins may"
    with pytest.raises(NotAllowedError, match=said) as caught:
        await client.stop_queued(Queued(ticket, 1, (node(0),)))
    assert caught.value.hint == f"on laptop: gpulayer stop {JOB}"


async def test_who_was_removed_is_told_that() -> None:
    client = Refused(RemovedError(), NINE, OWNER)
    with pytest.raises(RemovedError):
        await client.outputs(await client.find_job(JOB))


class Knowing(MeshClient):
    """Members by number, each with the records it knows; the entry may be silent at first.

    One with None is there and says nothing, ever.
    """

    def __init__(self, *known: list[JobRecord] | None, silent_entry: bool = False) -> None:
        self.known = dict(enumerate(known))
        self._addresses = {node(i): () for i in self.known}
        self.book: Any = self._addresses
        self.silent_entry = silent_entry
        self.stopped: list[tuple[str, str]] = []

    async def find_again(self) -> None:
        self.silent_entry = False

    async def snapshot(self) -> Any:
        if self.silent_entry:
            raise TransportError("the entry is gone")
        return SimpleNamespace(
            members=[SimpleNamespace(node=node(i), addresses=("x",)) for i in self.known]
        )

    async def queued(self) -> list[clients.Queued]:
        return []

    async def call(self, asked: str, method: str, path: str, *_: Any, **__: Any) -> Any:
        number = next((i for i in self.known if node(i) == asked), None)
        if number is None:
            raise TransportError("no answer")
        records = self.known[number]
        if records is None:
            return await asyncio.Event().wait()
        if path == "/v1/jobs":
            found: Any = records
        else:
            job = path.split("/")[3]
            found = next((one for one in records if one.spec.id == job), None)
            if found is None:
                raise NotFoundError("no such job")
            if method == "POST":
                self.stopped.append((asked, job))
        return wire.unpack(wire.pack(found), max_bytes=wire.BODY_MAX)


def of(attempt: JobSpec, state: JobState, successor: str = "") -> JobRecord:
    return JobRecord(attempt, state, node(0), successor=successor)


ALL = [
    of(FIRST, JobState.FAILED, SECOND.id),
    of(SECOND, JobState.FAILED, THIRD.id),
    of(THIRD, JobState.RUNNING),
]


@pytest.mark.parametrize("ident", [FIRST.id, SECOND.id, THIRD.id, SECOND.id[:6]])
@pytest.mark.parametrize("known", [ALL, ALL[2:], ALL[1:]])
async def test_id_of_any_attempt_finds_the_newest(ident: str, known: list[JobRecord]) -> None:
    assert (await Knowing(known).find_job(ident)).spec.id == THIRD.id


async def test_witness_has_the_last_word_on_a_job_of_which_nobody_else_speaks() -> None:
    from_witness = JobRecord(FIRST, JobState.RESTARTING, node(0), waiting="does not answer")
    from_part = JobRecord(FIRST, JobState.RUNNING, node(0), reports=(report(1, HostPhase.RUNNING),))
    from_keeper = JobRecord(FIRST, JobState.STARTING, node(0))
    nobody: list[JobRecord] = []
    for known, best in (
        ((nobody, nobody, [from_witness]), from_witness),
        ((nobody, [from_part], [from_witness]), from_part),
        ((nobody, [from_witness], [from_part]), from_part),
        (([from_keeper], [from_part], [from_witness]), from_keeper),
    ):
        assert await Knowing(*known).jobs() == [best]


async def test_other_jobs_are_not_mixed_up_with_attempts() -> None:
    other = JobRecord(spec(1, id="0123499999"), JobState.RUNNING, node(0))
    client = Knowing([*ALL, other])
    assert await client.find_job("0123499") == other
    with pytest.raises(GpuLayerError, match=r"'01234' is ambiguous: .*, "):
        await client.find_job("01234")


async def test_attempts_are_listed_newest_first_and_known_in_order() -> None:
    client = Knowing(ALL[:1], ALL[1:], silent_entry=True)
    assert [one.spec.restart for one in await client.attempts(ALL[1])] == [0, 1, 2]
    assert [one.spec.restart for one in await client.jobs()] == [2, 1, 0]
    found = await client.next_attempt(ALL[0])
    assert found is not None
    assert found.spec.id == SECOND.id
    assert await client.next_attempt(ALL[2]) is None


async def test_attempt_that_has_begun_is_known_by_one_members_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "NEXT_S", 0.01)
    failed, later = of(FIRST, JobState.RUNNING), of(SECOND, JobState.STARTING)
    async with asyncio.timeout(20):  # one member is silent for ever
        assert await Knowing(None, [failed], [failed, later]).successor(failed) == later
        assert await Knowing(None, [failed], [of(SECOND, JobState.PLACING)]).successor(failed) is (
            None
        )
        assert await Knowing([*ALL], None).successor(of(FIRST, JobState.FAILED, THIRD.id)) == ALL[2]
    found = await Knowing(ALL[:1], ALL[2:]).next_attempt(failed)  # the second came to nothing
    assert found == ALL[2]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_record_that_names_a_successor_counts_more_than_the_keepers() -> None:
    cut_off = of(FIRST, JobState.FAILED)
    for order in ([[cut_off], ALL], [ALL, [cut_off]]):
        records = await Knowing(*order).jobs()
        assert next(one for one in records if one.spec.id == FIRST.id).successor == SECOND.id


async def test_witness_is_asked_when_the_nodes_of_a_job_are_gone() -> None:
    client = Knowing([], [], ALL[:1])
    assert (await client.record(of(FIRST, JobState.RUNNING))).successor == SECOND.id
    client = Knowing([], [], [])
    with pytest.raises(NotFoundError):
        await client.record(of(FIRST, JobState.RUNNING))
    del client.known[1]
    with pytest.raises(TransportError, match="no answer"):
        await client.record(of(FIRST, JobState.RUNNING))


async def test_current_record_is_of_the_newest_attempt_also_without_the_first() -> None:
    for known in (ALL, ALL[2:]):
        found = await Knowing([], known).current(of(FIRST, JobState.RUNNING))
        assert found.spec.id == THIRD.id


async def test_stop_reaches_the_attempt_that_has_just_begun() -> None:
    class Late(Knowing):
        async def find_job(self, ident: str) -> JobRecord:
            return ALL[0]

    client = Late(ALL)
    await client.stop(FIRST.id, grace_s=None, kill=False)
    assert [job for _, job in client.stopped] == [FIRST.id, SECOND.id, THIRD.id]
