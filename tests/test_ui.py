"""What reaches the terminal: cleaned, within 100 columns, failures last."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import mesh_cases
import pytest
from gpulayer_mesh.client import Queued
from gpulayer_mesh.core.jobspec import (
    Failure,
    HostPhase,
    HostReport,
    JobKind,
    JobRecord,
    JobSpec,
    JobState,
    RankState,
    RankStatus,
    Slot,
)
from gpulayer_mesh.core.logrecord import LogRecord, LogStream
from gpulayer_mesh.core.placement import Plan
from gpulayer_mesh.core.tickets import Ticket
from gpulayer_mesh.core.types import (
    Accelerator,
    Address,
    Blocked,
    Capabilities,
    Device,
    DeviceProcess,
    Grant,
    Link,
    LinkSource,
    Load,
    MemberSnapshot,
    NodeState,
    Role,
    Snapshot,
    TorchAbilities,
)
from gpulayer_mesh.errors import (
    GpuLayerError,
    PathsCutError,
    PlacementError,
    Refusal,
    Unreached,
    Versions,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulayer import views
from gpulayer.ui import PROGRESS_S, REDRAW_S, Ui, shown_path
from gpulayer.views import cells, clean, clip, duration, ranges, size, table


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and can show what one would."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Apply what a terminal does to the few controls that we use."""
        rows, column = [""], 0
        for part in re.split(r"(\x1b\[[0-9;]*[mK]|\r|\n)", self.getvalue()):
            if part == "\n":
                rows.append("")
                column = 0
            elif part == "\r":
                column = 0
            elif part == "\x1b[K":
                rows[-1] = rows[-1][:column]
            elif part.startswith("\x1b"):
                assert part.endswith("m")
            else:
                assert part.isprintable() or "\t" in part
                rows[-1] = rows[-1][:column] + part + rows[-1][column + len(part) :]
                column += len(part)
        return rows


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def line(rank: int, data: bytes, stream: LogStream = LogStream.OUT) -> LogRecord:
    return LogRecord(rank, 1, 0.0, stream, data)


# --- cleaning ------------------------------------------------------------------------------------

PAYLOADS = [
    "\x1b]0;owned\x07title",
    "\x1b]0;owned\x1b\\title",
    "\x9d0;owned\x9ctitle",
    "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;aGk=\x07clipboard",
    "\x1bPq#0~\x1b\\sixel",
    "\x1b_apc\x1b\\",
    "\x1b^pm\x1b\\",
    "\x1bXsos\x1b\\",
    "\x1b[2J\x1b[Hcleared",
    "\x1b[1A\x1b[2Kover",
    "\x1b[?1049halternate",
    "\x1b[?25lhidden cursor",
    "\x1b[6nreport",
    "\x9b2Jc1 csi",
    "\x1bcreset",
    "\x1b(0charset",
    "\x1b#8pattern",
    "\x1b",
    "\x1b[",
    "\x1b[31",
    "\x1b]unfinished",
    "\x1b\x1b[2J",
    "\x1b\x07[2J",
    "\x1b\x1b[31m[2J",
    "bell\x07 back\x08\x08 null\x00 delete\x7f",
    "vertical\x0b form\x0c next\x85 shift\x0e\x0f",
    "one\u2028two\u2029three",
    "\u202eright to left\u202c \u2066isolate\u2069",
    "line\nline\rline",
]


def only_harmless(text: str) -> bool:
    rest = views.SGR.sub("", text)
    return not re.search(
        r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", rest
    )


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("colour", [False, True])
def test_payload_loses_everything_that_moves_the_cursor(payload: str, colour: bool) -> None:
    assert only_harmless(clean(payload, colour=colour))
    assert colour or "\x1b" not in clean(payload)


@given(st.lists(st.sampled_from([*PAYLOADS, "\x1b[31m", "a", "[", "]", ";", "m", "\x9c"])))
@settings(max_examples=300, deadline=None)
def test_mixed_payloads_cannot_rebuild_a_sequence(parts: list[str]) -> None:
    text = "".join(parts)
    assert only_harmless(clean(text, colour=True))
    assert "\x1b" not in clean(text)


@given(st.text())
@settings(deadline=None)
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    assert clean(clean(text)) == clean(text)


def test_text_of_an_escape_string_goes_with_it() -> None:
    assert clean("\x1b]0;owned\x07ok") == "ok"
    assert clean("a\tb é 漢") == "a\tb é 漢"


def test_colour_stays_and_ends_with_its_line() -> None:
    assert clean("\x1b[31mred\x1b[2J!", colour=True) == "\x1b[31mred!\x1b[0m"
    assert clean("\x1b[31mred") == "red"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", ["\x9d", "\x1b]", "\x1b[", "\x9b0", "\x1b[;", "\x1b "])
def test_flood_of_unfinished_sequences_costs_linear_time(unit: str) -> None:
    assert only_harmless(clean(unit * 100_000, colour=True))


# --- lines of ranks ------------------------------------------------------------------------------


def test_each_line_carries_its_rank_and_node_and_its_stream() -> None:
    out, err = io.StringIO(), io.StringIO()
    ui = Ui(out=out, err=err, environ={})
    ui.log(line(0, b"loss 0.5\nloss 0.4\n"), "box-1")
    ui.log(line(1, b"careful\n", LogStream.ERR), "box-2")
    ui.log(line(2, b"12 bytes dropped", LogStream.NOTE), "box-3")
    assert out.getvalue() == "[0|box-1] loss 0.5\n[0|box-1] loss 0.4\n"
    assert err.getvalue() == ("[1|box-2] careful\ngpulayer: rank 2 on box-3: 12 bytes dropped\n")


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("bar", [b"", b"\r 3%"])
def test_lines_that_come_together_look_like_lines_that_come_alone(prefix: bool, bar: bytes) -> None:
    lines = [b"loss 0.5\n", b"\n", b"  [0|a] x\n", b"tab\t\n", "naïve\n".encode(), b"~\n", b"half"]
    for many in (lines, lines[:3], lines[:1], lines[5:]):
        screens = []
        for records in (many, [b"".join(many)]):
            terminal = Terminal()
            ui = Ui(out=terminal, err=terminal, environ={})
            for data in ([bar] if bar else []) + records:
                ui.log(line(1, data), "box-1", prefix=prefix)
            ui.finish()
            screens.append(terminal.screen())
        assert screens[0] == screens[1]


def test_single_rank_is_printed_as_it_came() -> None:
    out = io.StringIO()
    Ui(out=out, err=io.StringIO(), environ={}).log(line(0, b"a\n\nb\r\n"), "box-1", prefix=False)
    assert out.getvalue() == "a\n\nb\n"


def test_fake_prefix_stays_behind_the_true_one() -> None:
    out = Terminal()
    ui = Ui(out=out, err=out, environ={})
    ui.log(line(1, b"ok\r[0|box-1] fake\ngpulayer: error: fake\n\x1b[1A\x1b[2K[0|a] x\n"), "box-2")
    assert out.screen()[:-1] == [
        "[1|box-2] [0|box-1] fake",
        "[1|box-2] gpulayer: error: fake",
        "[1|box-2] [0|a] x",
    ]


def test_invalid_utf8_and_missing_newline_are_shown() -> None:
    out = io.StringIO()
    ui = Ui(out=out, err=io.StringIO(), environ={})
    ui.log(line(0, b"caf\xe9\npassword: "), "a", prefix=False)
    assert out.getvalue() == "caf\ufffd\npassword: \n"


def test_terminal_without_unicode_gets_question_marks() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Ui(out=out, err=io.StringIO(), environ={}).log(line(0, "é\n".encode()), "a", prefix=False)
    assert raw.getvalue() == b"?\n"


def bar(percent: int) -> bytes:
    return f"\r{percent:3}%|{'#' * (percent // 10)}".encode()


def test_progress_on_a_terminal_is_one_live_line_of_the_lowest_rank() -> None:
    clock, out = Clock(), Terminal()
    ui = Ui(out=out, err=out, environ={}, now=clock)
    for percent in range(0, 100, 10):
        for rank in (0, 1, 2):
            ui.log(line(rank, bar(percent), LogStream.ERR), f"box-{rank}")
        clock.now += REDRAW_S
    assert out.screen() == ["[0|box-0]  90%|#########"]
    ui.log(line(1, b"epoch 1 done\n"), "box-1")
    assert out.screen() == ["[1|box-1] epoch 1 done", "[0|box-0]  90%|#########"]
    for rank in (0, 1, 2):
        ui.log(line(rank, bar(100) + b"\n", LogStream.ERR), f"box-{rank}")
    ui.finish()
    assert out.screen()[1:] == [f"[{rank}|box-{rank}] 100%|##########" for rank in (0, 1, 2)] + [""]


def test_live_line_is_redrawn_at_most_ten_times_a_second() -> None:
    clock, out = Clock(), Terminal()
    ui = Ui(out=out, err=out, environ={}, now=clock)
    for _ in range(1000):
        ui.log(line(0, bar(50), LogStream.ERR), "a")
        clock.now += 0.001
    assert out.getvalue().count("\x1b[K") <= 1.0 / REDRAW_S + 1


@pytest.mark.parametrize("end", [b"\r", b""])
def test_progress_in_a_file_is_one_line_in_five_seconds(end: bytes) -> None:
    clock, err = Clock(), io.StringIO()
    ui = Ui(out=io.StringIO(), err=err, environ={}, now=clock)
    for step in range(301):
        for rank in (0, 1):
            ui.log(line(rank, bar(step // 3) + end, LogStream.ERR), "a")
        clock.now += 0.1
    lines = err.getvalue().splitlines()
    assert 30 / PROGRESS_S - 1 <= len(lines) <= 30 / PROGRESS_S + 1
    assert "\r" not in err.getvalue()
    ui.log(line(0, b"\n", LogStream.ERR), "a")
    assert err.getvalue().splitlines()[-1] == "[0|a] 100%|##########"


def test_unfinished_progress_is_kept_at_the_end() -> None:
    out = Terminal()
    ui = Ui(out=out, err=out, environ={})
    ui.log(line(1, bar(40), LogStream.ERR), "a")
    ui.finish()
    assert out.screen() == ["[1|a]  40%|####", ""]


def test_live_line_is_clipped_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    Ui(out=out, err=out, environ={}).log(line(0, b"\r" + b"x" * 500), "a")
    assert len(out.screen()[0]) < 40


def test_no_colour_means_none() -> None:
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        out = Terminal()
        ui = Ui(out=out, err=out, environ=environ)
        ui.log(line(0, b"\x1b[31mred\x1b[0m\n"), "a")
        ui.error(GpuLayerError("broken"))
        assert "\x1b" not in out.getvalue()


# --- our own words -------------------------------------------------------------------------------


def words(error: BaseException) -> list[str]:
    err = io.StringIO()
    Ui(out=io.StringIO(), err=err, environ={}).error(error)
    return err.getvalue().splitlines()


def test_error_is_one_line_and_its_hint_another() -> None:
    assert words(GpuLayerError("job 'k7' is gone", hint="gpulayer jobs\nor wait")) == [
        "gpulayer: error: job 'k7' is gone",
        "gpulayer: hint: gpulayer jobs",
        "gpulayer: hint: or wait",
    ]
    assert words(OSError()) == ["gpulayer: error: OSError"]
    assert words(GpuLayerError("a\x1b[2Jb")) == ["gpulayer: error: ab"]


def test_traceback_only_with_debug() -> None:
    err = io.StringIO()
    ui = Ui(out=io.StringIO(), err=err, environ={})
    try:
        raise GpuLayerError("broken")
    except GpuLayerError as e:
        ui.error(e, debug=True)
    assert "Traceback" in err.getvalue()
    assert err.getvalue().endswith("gpulayer: error: broken\n")


def test_refused_placement_lists_every_node_and_why() -> None:
    refusals = (
        Refusal("box-1", "no CUDA device", True),
        Refusal("a-very-long-name-" * 4, "1 of 2 devices busy: " + "job k7f2 " * 20, False),
    )
    lines = words(PlacementError("3 nodes asked, 0 count", refusals=refusals, hint="ask for less"))
    assert lines[0] == "gpulayer: error: 3 nodes asked, 0 count"
    assert "NODE" in lines[1]
    assert "box-1" in lines[2]
    assert "no CUDA device" in lines[2]
    assert lines[-1] == "gpulayer: hint: ask for less"
    assert max(map(len, lines)) <= 100


def test_versions_that_differ_are_one_table_and_one_fix() -> None:
    rows = (
        Versions("box-1", "2.13.0+cpu", "3.11.7", "0.1.0"),
        Versions("box-2", "2.12.1", "3.11.7", "0.1.0"),
        Versions("box-3", "2.13.0+cpu", "3.12.1", "0.1.0"),
    )
    assert words(PlacementError("too few", versions=rows)) == [
        "gpulayer: error: too few",
        "gpulayer:   NODE   TORCH       PYTHON  GPULAYER",
        "gpulayer:   box-1  2.13.0+cpu  3.11.7  0.1.0",
        "gpulayer:   box-2  2.12.1      3.11.7  0.1.0",
        "gpulayer:   box-3  2.13.0+cpu  3.12.1  0.1.0",
        "gpulayer:   to make them alike, install torch 2.13.0+cpu on box-2, Python 3.11.7 on box-3",
    ]
    many = tuple(Versions(f"n{i}", f"2.{i % 2}.0", "3.11.7", "0.1.0") for i in range(30))
    assert words(PlacementError("too few", versions=many))[-2] == "gpulayer:   and 10 more nodes"


def test_paths_that_are_cut_are_one_table_with_direction_ports_and_remedy() -> None:
    cut = Unreached("box-1", "box-2", "10.0.0.2", (33012, 45001, 57000), "no answer in 2.0 s", True)
    both = Unreached("box-1", "box-3", "", (), "it has told no address", False)
    error = PathsCutError(
        "the nodes cannot all reach each other",
        pairs=(),
        refusals=(Refusal("box-1", "cannot connect", False),),
        unreached=(cut, both),
        hint="first\nsecond",
    )
    assert words(error) == [
        "gpulayer: error: the nodes cannot all reach each other",
        "gpulayer:   FROM   TO     ADDRESS   TCP PORTS          WHAT HAPPENS            BACK",
        "gpulayer:   box-1  box-2  10.0.0.2  33012,45001,57000  no answer in 2.0 s      works",
        "gpulayer:   box-1  box-3                               it has told no address  fails too",
        "gpulayer: hint: first",
        "gpulayer: hint: second",
    ]


# --- jobs ----------------------------------------------------------------------------------------


def record(state: JobState, failure: Failure | None = None, **fields: object) -> JobRecord:
    slots = tuple(Slot(f"{i}" * 64, f"box-{i}", 1) for i in (1, 2, 3))
    spec = JobSpec(
        id="k7f2k7f2k7",
        kind=JobKind.DISTRIBUTED,
        name="train.py",
        submitter="9" * 64,
        submitter_name="laptop",
        submitted_at=0.0,
        argv=(b"train.py", b"SECRET-ARGUMENT"),
        python=True,
        cwd="",
        env={"TOKEN": "SECRET-VALUE"},
        accelerator=Accelerator.CPU,
        slots=slots,
        manifest=b"\0" * 32,
        bundle_bytes=0,
    )
    statuses = (
        RankStatus(0, RankState.EXITED, signal=15, stopped=True),
        RankStatus(1, RankState.EXITED, exit_code=1),
        RankStatus(2, RankState.EXITED, signal=15, stopped=True),
    )
    reports = tuple(
        HostReport(spec.id, slot.node, HostPhase.ENDED, (status,))
        for slot, status in zip(slots, statuses, strict=True)
    )
    return JobRecord(spec, state, slots[0].node, reports, failure, age_s=12.0, **fields)  # type: ignore[arg-type]


def outcome(job: JobRecord) -> list[str]:
    err = io.StringIO()
    Ui(out=io.StringIO(), err=err, environ={}).outcome(job)
    return err.getvalue().splitlines()


def test_traceback_of_the_first_failure_is_the_last_thing_printed() -> None:
    tail = (*(f"  line {i}" for i in range(40)), "ValueError: bad \x1b[2Jinput")
    lines = outcome(record(JobState.FAILED, Failure(1, "box-2", 1, "exit code 1", tail)))
    assert lines[:3] == [
        "gpulayer: job k7f2k7f2k7 failed after 12s (3 ranks on box-1, box-2, box-3)",
        "gpulayer: ranks 0, 2: stopped",
        "gpulayer: rank 1 on box-2 failed: exit code 1",
    ]
    assert len(lines[3:]) == 20
    assert lines[-1] == "ValueError: bad input"


def test_live_lines_end_before_the_failure_block() -> None:
    out = Terminal()
    ui = Ui(out=out, err=out, environ={})
    ui.log(line(0, bar(10), LogStream.ERR), "box-1")
    ui.outcome(record(JobState.FAILED, Failure(1, "box-2", 1, "exit code 1", ("boom",))))
    assert out.screen()[0] == "[0|box-1]  10%|#"
    assert out.screen()[-2:] == ["boom", ""]


def test_lost_node_is_named_without_a_rank() -> None:
    lines = outcome(record(JobState.FAILED, Failure(None, "box-3", 1, "no answer for 30 s")))
    assert lines[-1] == "gpulayer: node box-3 failed: no answer for 30 s"


def test_success_and_stop_take_one_line() -> None:
    assert outcome(record(JobState.SUCCEEDED)) == [
        "gpulayer: job k7f2k7f2k7 succeeded after 12s (3 ranks on box-1, box-2, box-3)"
    ]
    assert (
        "cancelled after 12s: stopped by laptop"
        in outcome(record(JobState.CANCELLED, cause="stopped by laptop"))[0]
    )


def test_nodes_of_a_job_that_do_not_answer_are_named_with_how_long() -> None:
    running, over = record(JobState.RUNNING), record(JobState.FAILED, ended_age_s=4.0)
    one, two, three = running.spec.slots
    states = ((one, NodeState.ALIVE, 1.0), (two, NodeState.DEAD, 75.0), (three, None, None))
    members = tuple(
        mesh_cases.member(slot.name, node=slot.node, state=state, heard_s=heard_s)
        for slot, state, heard_s in states
    )
    assert views.silent_lines([over, running], mesh_cases.mesh(*members)) == [
        f"job {running.spec.id}: {two.name} has not answered for 1m15s"
    ]


def test_attempts_are_told_apart() -> None:
    first = record(JobState.FAILED, Failure(None, "box-3", 1, "node lost: box-3"))
    first = replace(first, spec=replace(first.spec, restarts=3), successor="7ht91zzkyy")
    spec = replace(first.spec, id="7ht91zzkyy", origin=first.spec.id, restart=1)
    second = replace(first, spec=spec, successor="", state=JobState.RESTARTING)
    third = replace(second, state=JobState.FAILED)
    rows = [line.split() for line in views.job_lines([third, second, first])]
    assert [row[1] for row in rows[1:]] == ["failed", "restarting", "restarted"]
    assert [row[2] for row in rows[2:]] == ["2/3", "1/3"]
    assert views.restarting_line(second) == (
        "node box-3 failed: node lost: box-3; restarting (2 of 3)"
    )
    assert outcome(third)[0].startswith("gpulayer: job 7ht91zzkyy failed after 12s, restart 1 of 3")
    plain = views.jobs_json([second, first])["jobs"]
    found = [[job[key] for key in ("restart", "restarts", "origin", "successor")] for job in plain]
    assert found == [[1, 3, "k7f2k7f2k7", None], [0, 3, None, "7ht91zzkyy"]]


@pytest.mark.parametrize(
    ("restarts", "watching", "lines"),
    [
        (0, (), []),
        (2, (), ["starts again after a failure, up to 2 times"]),
        (1, ("4" * 64, "5" * 64), ["starts again after a failure, up to 1 time; copies also on "
                                   "box-4, 55555555"]),
    ],
)  # fmt: skip
def test_job_that_may_start_again_says_what_it_survives(
    restarts: int, watching: tuple[str, ...], lines: list[str]
) -> None:
    spec = record(JobState.RUNNING).spec
    voters = (*(slot.node for slot in spec.slots), *watching) if restarts else ()
    spec = replace(spec, restarts=restarts, voters=voters)
    assert views.restart_lines(spec, {"4" * 64: "box-4"}) == lines
    if restarts:
        (alone,) = views.restart_lines(replace(spec, voters=voters[:2]), {})
        assert "where a rank failed; a machine that is lost ends the job" in alone


def test_queued_job_stands_on_top_with_place_and_reason() -> None:
    ticket = Ticket(4, "7ht91zzkyy", "9" * 64, "laptop-2", "big.py", "3 nodes", "box-1 is silent")
    lines = views.job_lines([record(JobState.RUNNING)], [Queued(ticket, 2, ("1" * 64,))], width=120)
    shown = " ".join(lines[1].split())
    assert shown.startswith("7ht91zzkyy queued #2 big.py - needs 3 nodes; box-1 is silent laptop-2")
    assert "k7f2k7f2k7" in lines[2]
    waits, runs = views.jobs_json([record(JobState.RUNNING)], [Queued(ticket, 2, ())])["jobs"]
    assert waits.keys() == runs.keys()
    assert (waits["state"], waits["nodes"], runs["queue"]) == ("pending", [], None)
    assert waits["queue"] == {"position": 2, "needs": "3 nodes", "why": "box-1 is silent"}


def test_job_json_is_stable_and_carries_no_secret() -> None:
    plain = views.jobs_json([record(JobState.FAILED, Failure(1, "box-2", 7, "exit code 7"))])
    assert plain["schema"] == 1
    (job,) = plain["jobs"]
    assert set(job) == {
        "job", "name", "kind", "state", "cause", "exit_code", "accelerator", "submitter",
        "submitted_at", "ran_s", "ended_ago_s", "nodes", "ranks", "failure", "queue",
        "restart", "restarts", "origin", "successor", "waiting",
    }  # fmt: skip
    assert job["exit_code"] == 7
    assert [rank["node"] for rank in job["ranks"]] == ["box-1", "box-2", "box-3"]
    assert "SECRET" not in str(plain)


@pytest.mark.parametrize(
    ("state", "code"),
    [(JobState.SUCCEEDED, 0), (JobState.CANCELLED, 130), (JobState.RUNNING, None)],
)
def test_exit_code_of_a_state(state: JobState, code: int | None) -> None:
    assert views.exit_code(record(state)) == code


def test_plan_names_each_node_its_ranks_and_why() -> None:
    slots = (Slot("1" * 64, "box-1", 2, (0, 1)), Slot("2" * 64, "box-2", 1, (3,)))
    chosen = (("box-1", "2 x H200, same zone"), ("box-2", "1 x H200, same zone, " + "x" * 200))
    refused = tuple(Refusal(f"box-{i}", "not needed", False) for i in range(3, 20))
    plan = Plan(slots, Accelerator.CUDA, chosen, refused, ("processes per node differ (2/1)",))
    here = views.plan_lines(plan, "train.py", here="1" * 64)
    assert "box-1  this machine: if it sleeps, the job stops; 2 x H200" in here[1]
    lines = views.plan_lines(plan, "train.py")
    assert lines[:4] == [
        "plan for train.py: 2 nodes, 3 processes on cuda",
        "  ranks  0-1  box-1  2 x H200, same zone",
        f"  rank   2    box-2  1 x H200, same zone, {'x' * 57}…",
        "  not box-3: not needed",
    ]
    assert lines[-2:] == ["  not 7 more nodes", "  note: processes per node differ (2/1)"]
    assert max(map(cells, lines)) <= 100


LEFT_ON = Device(
    Accelerator.CUDA,
    2,
    "H200",
    busy_pids=1,
    busy_by=(DeviceProcess(123, "blender"),),
    blocked=Blocked((DeviceProcess(4711, "python", "k7f2k7f2k7", 2048),), unseen_mib=300),
)


def test_blocked_device_is_not_free_and_says_why() -> None:
    torch = TorchAbilities("2.13.0", (), (), ("cuda: no kernel image",))
    free = Device(Accelerator.CUDA, 0, "H200")
    box = member("box", caps=Capabilities(1, 1, 1, 1, "", "", "", torch, (free, LEFT_ON)))
    snapshot = Snapshot("a" * 64, box.node, 3, (box, member("off", state=None)))
    assert "1/2 H200" in views.status_lines(snapshot)[1]
    why = (
        "pid 4711 (python) of job k7f2k7f2k7 still holds 2,048 MiB, "
        "300 MiB are taken by no process that can be seen"
    )
    assert views.problem_lines(snapshot) == [
        "box: cuda: no kernel image",
        f"box: device 2 is blocked: {why}",
    ]
    node, _ = views.status_json(snapshot, answered_ms=1.0)["nodes"]
    assert (node["devices"][0]["busy_by"], node["devices"][0]["blocked"]) == ([], None)
    assert node["devices"][1]["busy_by"] == [{"pid": 123, "name": "blender"}]
    left = {"pid": 4711, "name": "python", "job": "k7f2k7f2k7", "memory_mib": 2048}
    assert node["devices"][1]["blocked"] == {
        "reason": why, "processes": [left], "more": 0, "unseen_mib": 300,
    }  # fmt: skip


def test_every_json_field_is_documented() -> None:
    caps = Capabilities(1, 1, 1, 1, "", "", "", None, (LEFT_ON,))
    one = member("box", caps=caps, grants=(Grant("k7f2k7f2k7", 1),))
    job = record(JobState.FAILED, Failure(1, "box-2", 1, "exit code 1"))
    plain = [
        views.status_json(
            Snapshot("a" * 64, one.node, 3, (one, one), (Link(0, 1),)), answered_ms=1.0
        ),
        views.jobs_json([job]),
        views.log_json(job.spec, line(0, b"x")),
    ]
    keys = set()
    while plain:
        value = plain.pop()
        if isinstance(value, dict):
            keys |= value.keys()
            plain += value.values()
        elif isinstance(value, list):
            plain += value
    page = (Path(__file__).parents[1] / "docs" / "cli.md").read_text()
    assert {key for key in keys if f"`{key}`" not in page} == set()


# --- tables --------------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
devices = st.builds(
    Device,
    kind=st.just(Accelerator.CUDA),
    index=st.integers(0, 7),
    name=st.sampled_from(
        ["NVIDIA H200", "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X", "漢" * 40]
    ),
    busy_pids=st.integers(0, 1),
)
capabilities = st.builds(
    Capabilities,
    cpus=st.integers(1, 1024),
    memory_total_mib=st.integers(1, 2**23),
    memory_available_mib=st.integers(0, 2**23),
    disk_free_mib=st.integers(0, 2**30),
    os=st.just("Linux 6.8 x86_64"),
    python=st.just("3.11.7"),
    gpulayer=st.just("0.1.0"),
    torch=st.none() | st.just(TorchAbilities("2.13.0+cpu", (Accelerator.CPU,), ("gloo",))),
    devices=st.lists(devices, max_size=8).map(tuple),
)
members = st.builds(
    MemberSnapshot,
    node=st.integers(0, 2**64).map(lambda n: f"{n:064x}"),
    name=names,
    roles=st.sets(st.sampled_from(Role)).map(lambda r: tuple(sorted(r))),
    state=st.none() | st.sampled_from(NodeState),
    zone=st.just("") | names,
    addresses=st.just((Address("192.168.1.7", 47433), Address("fe80::1%eth0", 47433))),
    since_s=st.floats(0, 1e7),
    heard_s=st.none() | st.floats(0, 1e7),
    rtt_ms=st.none() | st.floats(0, 9999),
    via=st.sampled_from(["", "udp", "tcp"]),
    load=st.none() | st.builds(Load, cpu_percent=st.floats(0, 100)),
    caps=st.none() | capabilities,
    grants=st.lists(st.builds(Grant, job=st.just("k7f2k7f2k7"), processes=st.just(1))).map(tuple),
)
measured = st.builds(
    Link,
    a=st.just(0),
    b=st.integers(1, 11),
    rtt_us=st.none() | st.integers(1, 10**7),
    bytes_s=st.none() | st.integers(1, 10**11),
    mtu=st.none() | st.just(1500),
    age_s=st.integers(0, 10**5),
    source=st.none() | st.sampled_from(LinkSource),
)
snapshots = st.builds(
    lambda ms, links: Snapshot(
        "a" * 64,
        ms[0].node if ms else "b" * 64,
        3,
        tuple(ms),
        tuple(link for link in links if link.b < len(ms)),
    ),
    st.lists(members, max_size=12),
    st.lists(measured, max_size=11, unique_by=lambda link: link.b),
)


@given(snapshots)
@settings(max_examples=150, deadline=None)
def test_status_table_fits_a_hundred_columns(snapshot: Snapshot) -> None:
    lines = views.status_lines(snapshot)
    assert len(lines) == len(snapshot.members) + 1
    assert max(map(cells, lines)) <= 100


@given(snapshots)
@settings(max_examples=50, deadline=None)
def test_status_json_has_the_same_fields_whatever_is_known(snapshot: Snapshot) -> None:
    plain = views.status_json(snapshot, answered_ms=1.234)
    assert set(plain) == {
        "schema", "mesh", "roster_epoch", "answered_by", "answered_ms", "nodes", "links",
    }  # fmt: skip
    assert len(plain["links"]) == len(snapshot.links)
    for link in plain["links"]:
        assert set(link) == {"nodes", "names", "rtt_ms", "mbit_s", "mtu", "age_s", "source"}
    for node in plain["nodes"]:
        assert set(node) == {
            "node", "name", "state", "since_s", "heard_s", "roles", "zone", "zone_inferred",
            "addresses", "via", "rtt_ms", "cpus", "memory_total_mib", "memory_available_mib",
            "disk_free_mib", "cpu_percent", "os", "python", "gpulayer", "torch", "torch_backends",
            "torch_problems", "accelerators", "devices", "jobs",
        }  # fmt: skip
        assert node["addresses"] == ["192.168.1.7:47433", "[fe80::1%eth0]:47433"]


def member(name: str, **fields: object) -> MemberSnapshot:
    base: dict[str, object] = {
        "node": name.encode().hex().ljust(64, "0"),
        "name": name,
        "roles": (Role.WORKER,),
        "state": NodeState.ALIVE,
    }
    return MemberSnapshot(**(base | fields))  # type: ignore[arg-type]


def test_status_row_of_a_gpu_box_says_what_is_free() -> None:
    gpus = tuple(
        Device(Accelerator.CUDA, i, "NVIDIA H200", busy_pids=int(i == 1)) for i in range(4)
    )
    caps = Capabilities(
        64, 515_000, 400_000, 9, "Linux", "3.11.7", "0.1.0",
        TorchAbilities("2.13.0+cu128", (Accelerator.CUDA,), ("nccl",)), gpus,
    )  # fmt: skip
    box = member(
        "box-10",
        zone="rack",
        via="udp",
        rtt_ms=0.42,
        heard_s=0.8,
        load=Load(12.4, 400_000),
        caps=caps,
        grants=(Grant("k7f2k7f2k7", 1, (0,)),),
    )
    laptop = member("laptop", roles=(Role.LAUNCHER, Role.ADMIN), state=None)
    here = member("box-2", heard_s=0.0)
    snapshot = Snapshot("a" * 64, here.node, 3, (box, laptop, here))
    assert [re.split(r" {2,}", row) for row in views.status_lines(snapshot)] == [
        ["NODE", "STATE", "ROLES", "GPUS", "CPU", "MEM", "ZONE", "LINK", "JOBS", "LOAD", "SEEN",
         "TORCH/PY"],
        ["box-2", "alive", "worker", "-", "-", "-", "here", "0", "-", "now", "-"],
        ["box-10", "alive", "worker", "2/4 H200", "64", "391/503G", "rack", "udp 0.4ms", "1",
         "12%", "0.8s", "2.13/3.11"],
        ["laptop", "no agent", "l+a", "-", "-", "-", "-", "0", "-", "-", "-"],
    ]  # fmt: skip


def test_status_shows_the_links_of_who_answers_and_json_all() -> None:
    a, b, c = (member(name, via="udp", rtt_ms=1.0, zone=f"~{name}") for name in "abc")
    links = (
        Link(0, 1, 900, 117_500_000, 1500, 312, LinkSource.PROBE),
        Link(0, 2, 1100, 1_000_000, None, 4, LinkSource.TRANSFER),
        Link(1, 2, 2000),
    )
    snapshot = Snapshot("a" * 64, b.node, 3, (a, replace(b, zone_inferred=True), c), links)
    rows = [row.split() for row in views.status_lines(snapshot)]
    at = rows[0].index("ZONE")
    assert rows[0][at : at + 5] == ["ZONE", "LINK", "MBIT/S", "AGE", "JOBS"]
    assert rows[1][at : at + 5] == ["~a", "udp", "1.0ms", "940", "5m12s"]
    assert rows[2][at : at + 2] == ["~b", "here"]
    assert "940" not in rows[2]
    assert rows[3][at : at + 4] == ["~c", "udp", "1.0ms", "0"]  # not measured by b
    plain = views.status_json(snapshot, answered_ms=1.0)
    assert [node["zone_inferred"] for node in plain["nodes"]] == [False, True, False]
    assert plain["links"][1] == {
        "nodes": [a.node, c.node],
        "names": ["a", "c"],
        "rtt_ms": 1.1,
        "mbit_s": 8.0,
        "mtu": None,
        "age_s": 4,
        "source": "transfer",
    }
    assert [plain["links"][2][key] for key in ("mbit_s", "age_s", "source")] == [None] * 3


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.lists(st.lists(st.text(max_size=60), min_size=n, max_size=n), max_size=6)
    ),
    st.integers(40, 120),
)
@settings(deadline=None)
def test_any_table_keeps_its_width(rows: list[list[str]], width: int) -> None:
    header = [f"H{i}" for i in range(len(rows[0]) if rows else 3)]
    lines = table(header, rows, width=width, shrink=(0, 1))
    assert max(map(cells, lines)) <= width
    assert all(only_harmless(row) for row in lines)


def test_job_table_fits_and_shows_the_newest_words() -> None:
    lines = views.job_lines([record(JobState.RUNNING), record(JobState.FAILED, ended_age_s=4.0)])
    assert max(map(cells, lines)) <= 100
    assert lines[1].split()[:4] == ["k7f2k7f2k7", "running", "train.py", "3"]
    assert lines[2].endswith("8.0s  4.0s ago")


# --- units ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"), (0, "0.0s"), (-1, "0.0s"), (9.94, "9.9s"), (9.96, "10s"), (59.6, "1m00s"),
        (185, "3m05s"), (7800, "2h10m"), (86400 * 5, "5d"),
    ],
)  # fmt: skip
def test_duration(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (34_000, "34 kB"), (999_900, "1.0 MB"),
     (2_500_000_000_000, "2500 GB")],
)  # fmt: skip
def test_size(count: int, shown: str) -> None:
    assert size(count) == shown


def test_ranges() -> None:
    assert ranges([5, 0, 2, 3, 4, 9]) == "0, 2-5, 9"


def test_clip_counts_wide_characters() -> None:
    assert clip("漢字漢字", 5) == "漢字…"
    assert clip("abc", 3) == "abc"


def test_path_is_shown_as_it_is_typed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "a" / "b") == "a/b"
    assert shown_path(Path("/elsewhere")) == "/elsewhere"
    monkeypatch.chdir("/")
    assert shown_path(tmp_path / "a") == str(tmp_path / "a")
