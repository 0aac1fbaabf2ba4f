"""The launcher's own decisions: which script, which requests, what is shipped, which signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpulayer_mesh.client import MeshClient
from gpulayer_mesh.core.jobspec import JOB_ID_CHARS, JobKind, Slot
from gpulayer_mesh.core.placement import Request
from gpulayer_mesh.core.types import Grant, MemberSnapshot
from gpulayer_mesh.errors import BundleError, ConfigError, PathsCutError
from job_cases import JOB, spec
from mesh_cases import caps, member, mesh

from gpulayer import launcher, localjob

TELL = """
import json, os, sys
{change}
from gpulayer import env
from gpulayer.launcher import script_request
request = script_request(nodes=2)
print(json.dumps([list(request.argv), request.name, str(request.root)]))
"""
ODD = ["a b", "", "--", "$HOME", "`x`", "line\nbreak", "ñ", "-m", "-c"]


def told(*command: str, cwd: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=True, timeout=60
    )
    argv, name, root = json.loads(done.stdout)
    return [*argv, name, root]


def test_script_is_named_by_its_folder_and_keeps_its_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "my prøject"
    folder.mkdir()
    (folder / "træin v2.py").write_text(TELL.format(change=""))
    found = told(str(folder / "træin v2.py"), *ODD, cwd=tmp_path)
    assert found == ["træin v2.py", *ODD, "træin v2.py", str(folder)]


def test_changed_argv_and_directory_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        TELL.format(change="from gpulayer import env; sys.argv[:] = ['x']; os.chdir('/')")
    )
    found = told("-X", "utf8", "-u", "train.py", "--lr", "1", cwd=tmp_path)
    assert found == ["train.py", "--lr", "1", "train.py", str(tmp_path)]


def test_module_form_is_kept(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(TELL.format(change=""))
    for form in (["-m", "pkg.train"], ["-um", "pkg.train"]):
        found = told(*form, "--x", "1", cwd=tmp_path)
        assert found == ["-m", "pkg.train", "--x", "1", "pkg.train", str(tmp_path)]


def test_code_without_a_file_is_refused(tmp_path: Path) -> None:
    code = "from gpulayer.launcher import script_request; script_request()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "no script to run" in done.stderr


def test_request_names_all_its_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        launcher.JobRequest(
            argv=(), python=True, kind=JobKind.COMMAND, name="x", root=Path(), nodes=0, devices=0
        )
    assert all(word in caught.value.message for word in ("command", "nodes", "devices"))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("env", {"A": 1}, "env['A'] must be text, got int"),
        ("env", {"A": None}, "env['A'] must be text, got NoneType"),
        ("env", {"A": "a\0b"}, "env['A'] contains a NUL character"),
        ("env", {"A": "\ud800"}, "env['A'] is not valid Unicode text"),
        ("env", {"A": "x" * 200_000}, "env['A'] is longer than 130816 bytes"),
        ("env", {f"A{i}": "x" * 120_000 for i in range(5)}, "env is larger than 524288 bytes"),
        ("env", {"": "x"}, "env has the name ''"),
        ("env", {"A=B": "x"}, "env has the name 'A=B'"),
        ("env", {"A\0": "x"}, "env has the name 'A\\x00'"),
        ("env", {7: "x"}, "env has the name 7"),
        ("env", {"RANK": "0"}, "env names RANK, which the job sets itself"),
        ("env", {"MASTER_ADDR": "h"}, "env names MASTER_ADDR, which"),
        ("env", {"CUDA_VISIBLE_DEVICES": "0"}, "env names CUDA_VISIBLE_DEVICES, which"),
        ("secrets", {"GPULAYER_OUT": "/"}, "secrets names GPULAYER_OUT, which"),
        ("target", 5, "target must be a node name or a list of them, got 5"),
        ("target", ("box-1", 5), "target must be a node name or a list of them, got ('box-1', 5)"),
        ("target", (), "target is an empty list"),
        ("target", "", "target '' names no machine"),
        ("target", "zone:", "target 'zone:' names no machine"),
        ("target", ("box-1", "!"), "target '!' names no machine"),
        ("target", "!zone:", "target '!zone:' names no machine"),
        ("stop_grace_s", "30", "stop grace must be 0 to 86400 seconds, got '30'"),
        ("stop_grace_s", True, "stop grace must be"),
        ("stop_grace_s", float("nan"), "stop grace must be"),
        ("restarts", -1, "restarts must be 0 to 20, got -1"),
        ("restarts", 21, "restarts must be"),
        ("restarts", True, "restarts must be"),
        ("restarts", 1.0, "restarts must be"),
        ("on_disconnect_s", "10m", 'on_disconnect must be "keep" or 10 to 10000000 seconds, got'),
        ("on_disconnect_s", 9.9, "on_disconnect must be"),
        ("on_disconnect_s", float("nan"), "on_disconnect must be"),
        ("wait_s", "10m", "wait must be None or 0 to 10000000 seconds, got '10m'"),
        ("wait_s", False, "wait must be"),
        ("wait_s", -1.0, "wait must be"),
        ("wait_s", float("nan"), "wait must be"),
    ],
)
def test_impossible_input_is_refused_before_any_plan(field: str, value: object, words: str) -> None:
    fields: dict[str, Any] = {"env": {"LR": "0.1", "NCCL_DEBUG": "INFO"}, field: value}
    with pytest.raises(ConfigError) as caught:
        launcher.JobRequest(
            argv=("x",), python=True, kind=JobKind.COMMAND, name="x", root=Path(), **fields
        )
    assert caught.value.message.startswith(words)


def test_detached_job_is_not_to_be_followed() -> None:
    with pytest.raises(ConfigError, match="a detached job waits for nobody"):
        launcher.JobRequest(
            argv=("x",), python=True, kind=JobKind.COMMAND, name="x", root=Path(),
            on_disconnect_s=60.0, detach=True,
        )  # fmt: skip


def test_local_job_names_what_cannot_be_copied_and_copies_the_rest(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"out/rank{rank}").mkdir(parents=True)
        (tmp_path / f"out/rank{rank}/kept").touch()
    os.mkfifo(tmp_path / "out/rank1/pipe")
    home = tmp_path / "home"
    (problem,) = localjob._bring_home(tmp_path, home, 2)
    assert problem.startswith("rank 1: 'pipe' did not come home: ")
    assert "named pipe" in problem
    assert (home / "kept").exists()
    assert (home / "rank1/kept").exists()


@pytest.mark.parametrize("shown", ["home", "above", "root"])
def test_home_and_what_holds_it_are_never_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    home = tmp_path / "above" / "home"
    home.mkdir(parents=True)
    (home / "mail").touch()
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    root, words = {
        "home": (home, "your home folder"),
        "above": (home.parent, f"'{home.parent}' with your home folder in it"),
        "root": (Path("/"), "'/' with your home folder in it"),
    }[shown]
    request = launcher.JobRequest(
        argv=("hostname",), python=False, kind=JobKind.COMMAND, name="hostname", root=root
    )
    packed = launcher._pack(request)
    assert packed.bundle.files == 0
    assert packed.scan.notes == (f"{words} is not shipped; the job starts in an empty folder",)
    script = replace(request, argv=("train.py",), python=True, name="train.py")
    with pytest.raises(BundleError, match=r"train\.py is looked for in .*, which is never shipped"):
        launcher._pack(script)
    (home / "project").mkdir()
    (home / "project" / "file").touch()
    assert launcher._pack(replace(request, root=home / "project")).bundle.files == 1


def test_interrupt_before_the_start_says_that_no_job_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def connect(home: Path) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    async def interrupted(*_: object) -> None:
        raise asyncio.CancelledError  # what `Interrupts` makes of Ctrl-C

    monkeypatch.setattr(MeshClient, "connect", connect)
    monkeypatch.setattr(launcher, "_place", interrupted)
    request = launcher.JobRequest(
        argv=("true",), python=False, kind=JobKind.COMMAND, name="true", root=tmp_path
    )
    with pytest.raises(KeyboardInterrupt):
        launcher.run_job(request)
    assert capsys.readouterr().err == "gpulayer: interrupted before the start: no job runs\n"


def test_empty_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no command given"):
        launcher.JobRequest(argv=("",), python=False, kind=JobKind.COMMAND, name="x", root=tmp_path)


def test_job_ids_are_random_and_of_the_alphabet() -> None:
    ids = {launcher.new_job_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(one) == JOB_ID_CHARS and not set(one) & set("ilou") for one in ids)


async def test_one_signal_sent_twice_is_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    async def stop(kill: bool) -> None:
        asked.append(kill)

    # timeout(1) signals the process and its group, a person presses again a second later
    times = iter([100.0, 100.01, 101.0])
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: next(times)))
    interrupts = launcher.Interrupts(None)
    interrupts.on_stop = stop
    for _ in range(3):
        interrupts._signalled()
        await asyncio.sleep(0)
    assert asked == [False, True]


def test_nodes_that_do_not_reach_each_other_are_parted_where_others_are_free() -> None:
    mine = Grant(JOB, 2, (), "laptop")  # given back, which these do not know yet
    a, b = (member(name, caps(cpus=2), grants=(mine,)) for name in "ab")
    c, busy = member("c"), member("c", caps(cpus=2), grants=(Grant("2" * 10, 2, (), "x"),))
    tried = spec(slots=tuple(Slot(one.node, one.name, 1) for one in (a, b)))
    cut = PathsCutError("cut", pairs=((a.node, b.node),))

    def without(*members: MemberSnapshot, **wanted: Any) -> dict[str, str] | None:
        request = Request(nodes=2, **wanted)
        return launcher._other_choice(request, mesh(*members), tried, cut)

    assert without(a, b, c) == {b.node: "has no open path to a"}
    assert without(a, b, c, target=("b", "c")) == {a.node: "has no open path to b"}
    assert without(a, b) is None
    assert without(a, b, busy) is None
    assert without(a, b, c, target=("a", "b")) is None
