"""Following a job and bringing its files home, against a client that plays a script."""

from __future__ import annotations

import asyncio
import io
import os
from argparse import Namespace
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from gpulayer_mesh.client import MeshClient
from gpulayer_mesh.core.jobspec import (
    OVER,
    Failure,
    JobKind,
    JobRecord,
    JobSpec,
    JobState,
    OutputFile,
    Outputs,
    Slot,
    Stayed,
)
from gpulayer_mesh.core.logrecord import LogPick, LogRecord, LogStream
from gpulayer_mesh.core.restarts import Change, next_spec
from gpulayer_mesh.core.types import Accelerator
from gpulayer_mesh.errors import (
    DiscoveryError,
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    TransportError,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulayer import jobs
from gpulayer.cli import job as command
from gpulayer.launcher import Interrupts, attend
from gpulayer.ui import Ui

A, B, C = "a" * 64, "b" * 64, "c" * 64
SPEC = JobSpec(
    id="k7f2k7f2k7",
    kind=JobKind.DISTRIBUTED,
    name="train.py",
    submitter="9" * 64,
    submitter_name="laptop",
    submitted_at=0.0,
    argv=(b"train.py",),
    python=True,
    cwd="",
    env={},
    accelerator=Accelerator.CPU,
    slots=(Slot(A, "box-1", 1), Slot(B, "box-2", 2)),
    manifest=b"\0" * 32,
    bundle_bytes=0,
)
RUNNING = JobRecord(SPEC, JobState.RUNNING, A)
DONE = replace(RUNNING, state=JobState.SUCCEEDED, ended_age_s=0.1)


def line(rank: int, text: str) -> LogRecord:
    return LogRecord(rank, 1, 0.0, LogStream.OUT, text.encode())


def out(path: str, rank: int = 0, area: str = "out", content: bytes = b"x") -> OutputFile:
    return OutputFile(area, rank, path, len(content), content.ljust(32)[:32])


Answer = JobRecord | Exception | None  # None: never


class ScriptedClient:
    """Answers from lists; the last answer of `records` repeats."""

    def __init__(
        self,
        *,
        records: list[Answer] | None = None,
        lines: list[LogRecord | Exception] | None = None,
        files: list[tuple[str, OutputFile]] | None = None,
        stayed: list[tuple[str, Outputs]] | None = None,
    ) -> None:
        self.records = records or [DONE]
        self.lines = lines or []
        self.files = files or []
        self.stayed = stayed or []
        self.silent: list[str] = []
        self.left: list[str] = []
        self.never_ends = False
        self.asked: list[frozenset[int] | None] = []
        self.fetching = 0
        self.most_fetching = 0

    async def record(self, job: JobRecord) -> JobRecord:
        answer = self.records.pop(0) if len(self.records) > 1 else self.records[0]
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        return cast(JobRecord, answer)

    async def follow(self, job: JobRecord) -> JobRecord:
        return await self.record(job)

    async def leave(self, job: JobRecord) -> None:
        if self.silent:
            raise TransportError("no answer")
        self.left.append(job.spec.id)

    async def logs(
        self, record: JobRecord, *, ranks: frozenset[int] | None, follow: bool, pick: LogPick
    ) -> AsyncIterator[LogRecord]:
        self.asked.append(ranks)
        for one in self.lines:
            if isinstance(one, Exception):
                raise one
            yield one
        if self.never_ends:
            await asyncio.Event().wait()

    async def outputs(self, record: JobRecord) -> list[tuple[str, Outputs | None]]:
        answers: list[tuple[str, Outputs | None]] = [*self.stayed]
        answers += [(node, Outputs((file,))) for node, file in self.files]
        return answers + [(node, None) for node in self.silent]

    async def fetch(self, record: JobRecord, node: str, file: OutputFile, dest: Path) -> None:
        self.fetching += 1
        self.most_fetching = max(self.fetching, self.most_fetching)
        await asyncio.sleep(0)
        self.fetching -= 1
        if "broken" in file.path:
            raise TransportError("it arrived damaged")
        await asyncio.to_thread(self._write, dest, file.sha256)

    @staticmethod
    def _write(dest: Path, data: bytes) -> None:
        dest.parent.mkdir(parents=True, exist_ok=True)
        dest.write_bytes(data)


LOST = Failure(None, "box-2", 1, "node lost: box-2 did not answer for 18 s")
FIRST = replace(SPEC, restarts=3)
SECOND = next_spec(FIRST, Change(1, (Slot(A, "box-1", 1), Slot(C, "box-3", 2)), (A, C)))
THIRD = next_spec(SECOND, Change(2, SECOND.slots, SECOND.voters))


def at(spec: JobSpec, state: JobState, **fields: Any) -> JobRecord:
    ended = 0.1 if state in OVER else None
    return JobRecord(spec, state, spec.slots[0].node, ended_age_s=ended, **fields)


class Attempts(ScriptedClient):
    """A job's attempts: answers and lines by number.

    Args:
        silent: which question for the next attempt nobody answers.
    """

    def __init__(self, *attempts: list[Answer], silent: int = 0) -> None:
        super().__init__()
        self.answers = list(attempts)
        self.late: list[str] = []  # lines of an attempt that come when it has ended
        self.questions, self.unanswered = 0, silent
        self.stopped: list[str] = []
        self.picked: list[LogPick] = []

    async def record(self, job: JobRecord) -> JobRecord:
        self.records = self.answers[job.spec.restart]
        return await super().record(job)

    async def logs(
        self, record: JobRecord, *, ranks: frozenset[int] | None, follow: bool, pick: LogPick
    ) -> AsyncIterator[LogRecord]:
        self.picked.append(pick)
        yield line(0, f"of {record.spec.restart}\n")
        for text in self.late if not record.spec.restart else ():
            await asyncio.sleep(0.05)  # after the end
            yield line(0, text)
        if self.never_ends and not record.spec.restart:
            await asyncio.Event().wait()
        if isinstance(self.answers[record.spec.restart][-1], Exception):
            raise TransportError("lines are missing: box-2 does not answer")

    async def attempts(self, record: JobRecord) -> list[JobRecord]:
        found = [[one for one in some if isinstance(one, JobRecord)] for some in self.answers]
        return [some[-1] for some in found if some]

    async def successor(self, record: JobRecord) -> JobRecord | None:
        """It has begun once there is one word left on the attempt before."""
        number = record.spec.restart
        found = [one for one in await self.attempts(record) if one.spec.restart == number + 1]
        return found[0] if found and len(self.answers[number]) == 1 else None

    async def next_attempt(self, record: JobRecord) -> JobRecord | None:
        self.questions += 1
        if self.questions == self.unanswered:
            raise TransportError("the member that was asked is gone, too")
        return next(
            (one for one in await self.attempts(record) if one.spec.restart > record.spec.restart),
            None,
        )

    async def stop(self, job: str, *, grace_s: float | None, kill: bool) -> JobRecord:
        self.stopped.append(job)
        return RUNNING


class Screen:
    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.ui = Ui(out=self.out, err=self.err, environ={})


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_S", 0.01)
    monkeypatch.setattr(jobs, "POLL_FAST_S", 0.001)
    monkeypatch.setattr(jobs, "SILENT_S", 0.01)


def scripted(client: ScriptedClient) -> MeshClient:
    return cast(MeshClient, client)


# --- follow --------------------------------------------------------------------------------------


async def test_lines_are_printed_with_their_rank_until_the_job_has_ended(screen: Screen) -> None:
    client = ScriptedClient(
        records=[RUNNING, RUNNING, RUNNING, DONE],
        lines=[line(0, "a\n"), line(2, "b\n"), line(1, "c\n"), line(7, "of no such rank\n")],
    )
    assert await jobs.follow(scripted(client), RUNNING, screen.ui) == DONE
    assert screen.out.getvalue() == "[0|box-1] a\n[2|box-2] b\n[1|box-2] c\n"
    assert screen.err.getvalue() == ""


async def test_chosen_rank_alone_is_printed_without_prefix(screen: Screen) -> None:
    client = ScriptedClient(lines=[line(2, "b\n")])
    await jobs.follow(scripted(client), RUNNING, screen.ui, view=jobs.LogView(frozenset({2})))
    assert client.asked == [frozenset({2})]
    assert screen.out.getvalue() == "b\n"


async def test_end_is_reported_when_the_lines_never_finish(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "DRAIN_S", 0.05)
    client = ScriptedClient(records=[RUNNING, DONE], lines=[line(0, "a\n")])
    client.never_ends = True
    assert await jobs.follow(scripted(client), RUNNING, screen.ui) == DONE
    assert "some lines did not arrive; see gpulayer logs k7f2k7f2k7" in screen.err.getvalue()


async def test_broken_lines_do_not_hide_the_end(screen: Screen) -> None:
    client = ScriptedClient(records=[RUNNING, DONE], lines=[NotAllowedError("removed")])
    assert await jobs.follow(scripted(client), RUNNING, screen.ui) == DONE
    assert "some lines did not arrive" in screen.err.getvalue()


async def test_reader_that_went_away_is_no_fault_of_the_lines(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(screen.ui, "log", gone)
    client = ScriptedClient(records=[RUNNING, DONE], lines=[line(0, "a\n")])
    with pytest.raises(BrokenPipeError):
        await jobs.follow(scripted(client), RUNNING, screen.ui)
    assert "did not arrive" not in screen.err.getvalue()


async def test_silent_nodes_are_asked_again(screen: Screen) -> None:
    silent = TransportError("no node answered")
    client = ScriptedClient(records=[RUNNING, *[silent] * 5, RUNNING, DONE])
    assert await jobs.follow(scripted(client), RUNNING, screen.ui) == DONE
    assert screen.err.getvalue().count("answers; trying again") == 1


async def test_nodes_silent_for_ever_end_the_wait(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LOST_S", 0.05)
    client = ScriptedClient(records=[TransportError("no node answered")])
    with pytest.raises(DiscoveryError, match=r"no node of job k7f2k7f2k7 has answered"):
        await jobs.follow(scripted(client), RUNNING, screen.ui)


async def test_cancelled_viewer_leaves_no_task_behind(screen: Screen) -> None:
    client = ScriptedClient(records=[RUNNING])
    client.never_ends = True
    watching = asyncio.create_task(jobs.follow(scripted(client), RUNNING, screen.ui))
    await asyncio.sleep(0.02)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- a job that starts again ---------------------------------------------------------------------

RESTARTED = [
    [
        at(FIRST, JobState.RUNNING),
        at(FIRST, JobState.RESTARTING, failure=LOST),
        at(FIRST, JobState.RESTARTING, failure=LOST, waiting="none is free"),
        at(FIRST, JobState.RESTARTING, failure=LOST, waiting="none is free"),
        at(FIRST, JobState.FAILED, failure=LOST, successor=SECOND.id),
    ],
    [at(SECOND, JobState.STARTING), at(SECOND, JobState.SUCCEEDED)],
]


async def test_viewer_goes_on_with_the_next_attempt_and_says_so_once(screen: Screen) -> None:
    client = Attempts(*map(list, RESTARTED))
    began: list[JobRecord] = []

    async def note(record: JobRecord) -> None:
        began.append(record)

    view = jobs.LogView(pick=LogPick(stderr=True, tail=5))
    final = await jobs.follow(scripted(client), RESTARTED[0][0], screen.ui, view=view, began=note)
    assert final == RESTARTED[1][-1]
    assert client.picked == [LogPick(stderr=True, tail=5), LogPick(stderr=True)]
    assert [one.spec.id for one in began] == [SECOND.id]
    assert screen.out.getvalue() == "[0|box-1] of 0\n[0|box-1] of 1\n"
    assert screen.err.getvalue().splitlines() == [
        f"gpulayer: node box-2 failed: {LOST.reason}; restarting (1 of 3)",
        "gpulayer: cannot start again yet: none is free",
        f"gpulayer: restart 1 runs as job {SECOND.id} on box-1, box-3",
    ]


async def test_attempts_that_a_viewer_missed_are_gone_through_in_order(screen: Screen) -> None:
    failed = Failure(1, "box-3", 7, "exit code 7")
    client = Attempts(
        [at(FIRST, JobState.FAILED, failure=LOST, successor=SECOND.id)],
        [at(SECOND, JobState.FAILED, failure=failed, successor=THIRD.id)],
        [at(THIRD, JobState.FAILED, failure=failed)],
    )
    final = await jobs.wait_end(scripted(client), at(FIRST, JobState.RUNNING), screen.ui)
    assert (final.spec.id, final.state) == (THIRD.id, JobState.FAILED)
    assert [row.partition(";")[0] for row in screen.err.getvalue().splitlines()] == [
        "gpulayer: node box-2 failed: node lost: box-2 did not answer for 18 s",
        f"gpulayer: restart 1 runs as job {SECOND.id} on box-1, box-3",
        "gpulayer: rank 1 on box-3 failed: exit code 7",
        f"gpulayer: restart 2 runs as job {THIRD.id} on box-1, box-3",
    ]


@pytest.mark.parametrize(
    "answer", [TransportError("no node answered"), NotFoundError("no job"), None]
)
async def test_next_attempt_is_found_when_all_nodes_of_the_last_are_gone(
    answer: Answer, screen: Screen
) -> None:
    client = Attempts([at(FIRST, JobState.RUNNING), answer], list(RESTARTED[1]))
    async with asyncio.timeout(20):
        final = await jobs.follow(scripted(client), at(FIRST, JobState.RUNNING), screen.ui)
    assert final == RESTARTED[1][-1]
    assert "of 1\n" in screen.out.getvalue()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_attempt_behind_one_that_came_to_nothing_is_found(screen: Screen) -> None:
    gone = TransportError("no node answered")
    last = at(THIRD, JobState.SUCCEEDED)
    client = Attempts([at(FIRST, JobState.RUNNING), gone], [gone], [last], silent=1)
    assert await jobs.wait_end(scripted(client), at(FIRST, JobState.RUNNING), screen.ui) == last


@pytest.mark.parametrize("end", [RESTARTED[0][-1], None])
async def test_lines_of_a_lost_machine_do_not_hold_up_those_of_the_next_attempt(
    end: JobRecord | None, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "DRAIN_S", 600.0)
    monkeypatch.setattr(jobs, "QUIET_S", 0.1)
    client = Attempts([*RESTARTED[0][:2], end], list(RESTARTED[1]))
    client.never_ends = True
    async with asyncio.timeout(20):
        final = await jobs.follow(scripted(client), RESTARTED[0][0], screen.ui)
    assert final == RESTARTED[1][-1]
    assert "some lines did not arrive; see gpulayer logs" in screen.err.getvalue()


async def test_lines_that_still_come_are_printed_before_those_of_the_next_attempt(
    screen: Screen,
) -> None:
    client = Attempts(*map(list, RESTARTED))
    client.late = [f"late {i}\n" for i in range(4)]
    await jobs.follow(scripted(client), RESTARTED[0][0], screen.ui)
    said = [row.partition("] ")[2] for row in screen.out.getvalue().splitlines()]
    assert said == ["of 0", "late 0", "late 1", "late 2", "late 3", "of 1"]


async def test_end_told_by_a_node_that_was_cut_off_is_not_believed(screen: Screen) -> None:
    client = Attempts([at(FIRST, JobState.FAILED, failure=LOST)], list(RESTARTED[1]))
    final = await jobs.wait_end(scripted(client), at(FIRST, JobState.RUNNING), screen.ui)
    assert final == RESTARTED[1][-1]


@pytest.mark.parametrize(
    "last",
    [at(FIRST, JobState.CANCELLED, cause="stopped by laptop"), at(FIRST, JobState.SUCCEEDED)],
)
async def test_job_that_was_stopped_or_succeeded_has_no_next_attempt(
    last: JobRecord, screen: Screen
) -> None:
    client = Attempts([last], list(RESTARTED[1]))
    assert await jobs.wait_end(scripted(client), last, screen.ui) == last


async def test_lines_of_all_attempts_are_printed_in_order_and_missing_ones_missed(
    screen: Screen,
) -> None:
    client = Attempts([RESTARTED[0][-1], TransportError("gone")], [at(SECOND, JobState.RUNNING)])
    with pytest.raises(TransportError, match="box-2 does not answer"):
        await jobs.print_attempts(scripted(client), at(SECOND, JobState.RUNNING), screen.ui)
    assert screen.out.getvalue() == "[0|box-1] of 0\n[0|box-1] of 1\n"
    assert f"restart 1 runs as job {SECOND.id}" in screen.err.getvalue()


async def test_job_that_starts_again_while_it_is_stopped_is_stopped_there(screen: Screen) -> None:
    client = Attempts(*map(list, RESTARTED))
    args = Namespace(grace=None, kill=False)
    record = at(FIRST, JobState.RUNNING)
    final = await command.stop_and_wait(scripted(client), record, args, screen.ui)
    assert final.spec.id == SECOND.id
    assert client.stopped == [FIRST.id, SECOND.id]


async def test_refused_stop_does_not_say_that_it_stops(screen: Screen) -> None:
    class Refusing(Attempts):
        async def stop(self, job: str, *, grace_s: float | None, kill: bool) -> JobRecord:
            raise NotAllowedError("this member may not do that to this job")

    args = Namespace(grace=None, kill=False)
    with pytest.raises(NotAllowedError):
        await command.stop_and_wait(scripted(Refusing()), RUNNING, args, screen.ui)
    assert screen.err.getvalue() == ""


async def test_files_for_the_next_attempt_stay_unless_they_are_asked_for(
    screen: Screen, tmp_path: Path
) -> None:
    kept = ".gpulayer-result/resume/0.ckpt"
    client = ScriptedClient(files=[(A, out(kept)), (A, out("model.pt"))])
    home = await jobs.collect(scripted(client), DONE, tmp_path, screen.ui)
    assert home == [tmp_path / "model.pt"]
    assert await jobs.collect(scripted(client), DONE, tmp_path, screen.ui, only=kept) == [
        tmp_path / kept
    ]


# --- collect -------------------------------------------------------------------------------------


def places(files: list[tuple[str, OutputFile]]) -> dict[str, tuple[str, int]]:
    found, _ = jobs.placed(SPEC, files)
    return {str(path): (file.area, file.rank) for _, file, path in found}


def test_rank_0_lies_plainly_and_others_under_their_rank() -> None:
    assert places(
        [
            (B, out("m.pt", 1)),
            (B, out("m.pt", 2)),
            (A, out("m.pt")),
            (A, out("data/cache.bin", 0, "work")),
            (B, out("data/cache.bin", 1, "work")),
        ]
    ) == {
        "m.pt": ("out", 0),
        "rank1/m.pt": ("out", 1),
        "rank2/m.pt": ("out", 2),
        "data/cache.bin": ("work", 0),
        "rank1/data/cache.bin": ("work", 1),
    }


def test_working_folder_gives_way_to_output() -> None:
    assert places(
        [
            (A, out("log.txt", 0, "work")),
            (A, out("log.txt")),
            (A, out("runs")),
            (A, out("runs/1", 0, "work")),  # a file cannot be a folder as well
            (A, out("rank1/x")),
            (B, out("x", 1)),
        ]
    ) == {
        "log.txt": ("out", 0),
        "work/log.txt": ("work", 0),
        "runs": ("out", 0),
        "work/runs/1": ("work", 0),
        "rank1/x": ("out", 0),
        "out/rank1/x": ("out", 1),
    }


@pytest.mark.parametrize(
    "path", ["../x", "..", "/etc/x", "a/../x", "", "a//b", "a/", "x\n", "x\0", "\x9bx", ".", "a/."]
)
def test_unsafe_path_of_a_peer_is_refused(path: str) -> None:
    found, refused = jobs.placed(SPEC, [(A, out(path))])
    assert found == []
    assert len(refused) == 1


@pytest.mark.parametrize("path", ["loss:0.3.pt", "a\\b", "e\u0301", "con", "...", "..x/y..", " "])
def test_output_may_have_a_name_that_no_bundle_may_have(path: str) -> None:
    found, refused = jobs.placed(SPEC, [(A, out(path))])
    assert [str(place) for _, _, place in found] == [path]
    assert refused == []


def test_node_offers_files_of_its_own_ranks_only() -> None:
    found, refused = jobs.placed(SPEC, [(B, out("m.pt", 0)), (A, out("x", 3)), (A, out("x", -1))])
    assert found == []
    assert "rank 0 does not run on the node that offers 'm.pt'" in refused


parts = st.sampled_from(["a", "b", "rank1", "work", "out"])


@given(
    st.lists(
        st.builds(
            out,
            st.lists(parts, min_size=1, max_size=3).map("/".join),
            st.integers(0, 2),
            st.sampled_from(["out", "work"]),
        ),
        max_size=12,
    )
)
@settings(deadline=None)
def test_no_two_files_share_a_place(files: list[OutputFile]) -> None:
    found, _ = jobs.placed(SPEC, [(A if f.rank == 0 else B, f) for f in files])
    paths = [path for _, _, path in found]
    assert len(paths) == len(files)
    assert len(set(paths)) == len(paths)
    assert not {parent for path in paths for parent in path.parents} & set(paths)


async def test_files_come_home_and_one_line_says_so(screen: Screen, tmp_path: Path) -> None:
    client = ScriptedClient(
        files=[(A, out(f"{i}.txt", content=b"12345678")) for i in range(20)]
        + [(A, out(".gpulayer-result/weights", content=b"hidden")), (B, out("../evil", 1))]
    )
    dest = tmp_path / "gpulayer_jobs" / SPEC.id
    home = await jobs.collect(scripted(client), DONE, dest, screen.ui)
    assert len(home) == 21
    assert (dest / "0.txt").read_bytes().startswith(b"12345678")
    assert (dest / ".gpulayer-result" / "weights").exists()
    assert client.most_fetching <= jobs.FETCHES
    assert screen.err.getvalue().splitlines() == [
        "gpulayer: rank 1 on box-2: '../evil' did not come home: its path is not relative and "
        "plain (no empty, '.' or '..' parts)",
        f"gpulayer: 20 files, 160 B -> {dest}",
    ]


async def test_file_that_cannot_come_is_named_and_the_others_come(
    screen: Screen, tmp_path: Path
) -> None:
    client = ScriptedClient(files=[(A, out("broken.bin")), (A, out("good.bin"))])
    with pytest.raises(GpuLayerError, match=r"1 file of job .* did not come home") as caught:
        await jobs.collect(scripted(client), DONE, tmp_path, screen.ui)
    assert caught.value.hint is not None
    assert f"gpulayer get {SPEC.id}" in caught.value.hint
    assert os.listdir(tmp_path) == ["good.bin"]
    assert "broken.bin did not come home: it arrived damaged" in screen.err.getvalue()


async def test_node_that_does_not_answer_is_named_and_the_others_files_come(
    screen: Screen, tmp_path: Path
) -> None:
    client = ScriptedClient(files=[(A, out("weights.pt"))])
    client.silent = [B]
    with pytest.raises(GpuLayerError, match=r"^box-2 did not answer: what job k7f2k7f2k7 has"):
        await jobs.collect(scripted(client), DONE, tmp_path, screen.ui)
    assert (tmp_path / "weights.pt").exists()


async def test_what_stays_on_a_node_is_named_with_rank_and_reason(
    screen: Screen, tmp_path: Path
) -> None:
    kept = (
        Stayed(1, b"caf\xe9", "its name is not UTF-8"),
        Stayed(2, "two\nlinés".encode(), "its name contains\na control character"),
        Stayed(0, b"forged", "rank 0 runs elsewhere"),
        *(Stayed(1, b"%d" % i, "it is a symbolic link") for i in range(9)),
    )
    client = ScriptedClient(stayed=[(B, Outputs((), kept, 5))])
    assert await jobs.collect(scripted(client), DONE, tmp_path, screen.ui) == []
    said = screen.err.getvalue().splitlines()
    assert said[:2] == [
        "gpulayer: rank 1 on box-2: b'caf\\xe9' did not come home: its name is not UTF-8",
        "gpulayer: rank 2 on box-2: 'two\\nlinés' did not come home: "
        "its name contains a control character",
    ]
    assert len(said) == jobs.STAYED_SHOWN + 1
    assert said[-1] == "gpulayer: 6 more did not come home"


async def test_one_folder_can_be_asked_for(screen: Screen, tmp_path: Path) -> None:
    client = ScriptedClient(files=[(A, out("a/1")), (A, out("ab/2")), (B, out("a/1", 1))])
    assert await jobs.collect(scripted(client), DONE, tmp_path, screen.ui, only="a") == [
        tmp_path / "a" / "1"
    ]
    assert await jobs.collect(scripted(client), DONE, tmp_path, screen.ui, only="rank1/a/1") == [
        tmp_path / "rank1" / "a" / "1"
    ]


@pytest.mark.parametrize("submitter", [SPEC.submitter, "8" * 64])
async def test_who_looks_on_and_may_not_have_the_files_sees_the_job_succeed(
    screen: Screen, tmp_path: Path, submitter: str
) -> None:
    class Refusing(ScriptedClient):
        identity = Namespace(node=SPEC.submitter)

        async def outputs(self, job: JobRecord) -> Any:
            raise NotAllowedError("box-9 may not get it")

    done = replace(DONE, spec=replace(SPEC, submitter=submitter))
    bringing = jobs.bring_home(scripted(Refusing()), done, tmp_path, screen.ui)
    if submitter == SPEC.submitter:
        with pytest.raises(NotAllowedError):
            await bringing
    else:
        await bringing
        assert "gpulayer: box-9 may not get it\n" in screen.err.getvalue()
    assert "succeeded" in screen.err.getvalue()


async def test_nothing_to_bring_home_says_nothing(screen: Screen, tmp_path: Path) -> None:
    assert await jobs.collect(scripted(ScriptedClient()), DONE, tmp_path, screen.ui) == []
    assert screen.err.getvalue() == ""


# --- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [False, True])
async def test_ctrl_c_that_leaves_a_job_tells_its_newest_attempt(
    screen: Screen, silent: bool
) -> None:
    before = at(FIRST, JobState.FAILED, failure=LOST, successor=SECOND.id)
    client = Attempts([before], [at(SECOND, JobState.RUNNING)])
    client.silent = ["box-1"] * silent
    interrupts = Interrupts(None)
    first = at(FIRST, JobState.RUNNING)
    async with asyncio.timeout(20):
        viewing = asyncio.create_task(
            attend(scripted(client), first, screen.ui, interrupts, on_exit="keep")
        )
        while "of 1" not in screen.out.getvalue():  # noqa: ASYNC110  printing wakes nobody
            await asyncio.sleep(0.001)
        interrupts._signalled()
        assert await viewing is None
    assert interrupts.on_stop is None
    assert client.left == [SECOND.id] * (not silent)
    said = screen.err.getvalue()
    assert ("could not be told that nobody follows it any more" in said) is silent
    assert f"gpulayer attach {SECOND.id}" in said
    assert client.stopped == []


async def test_ctrl_c_that_stops_a_job_waits_for_its_end(screen: Screen) -> None:
    class Stopping(Attempts):
        async def stop(self, job: str, *, grace_s: float | None, kill: bool) -> JobRecord:
            self.answers[0] = [at(FIRST, JobState.CANCELLED, cause="stopped by laptop")]
            return await super().stop(job, grace_s=grace_s, kill=kill)

    client = Stopping([at(FIRST, JobState.RUNNING)])
    interrupts = Interrupts(None)
    async with asyncio.timeout(20):
        viewing = asyncio.create_task(
            attend(
                scripted(client), at(FIRST, JobState.RUNNING), screen.ui, interrupts, on_exit="stop"
            )
        )
        while "of 0" not in screen.out.getvalue():  # noqa: ASYNC110  printing wakes nobody
            await asyncio.sleep(0.001)
        interrupts._signalled()
        final = await viewing
    assert final is not None
    assert (final.state, client.stopped, client.left) == (JobState.CANCELLED, [FIRST.id], [])
