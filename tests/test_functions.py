"""How a function is referred to, and what a rank does with the reference."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpulayer_mesh.client import MeshClient
from gpulayer_mesh.core.jobspec import Failure, JobKind, JobRecord, JobState
from gpulayer_mesh.core.ownfiles import FUNCTION_HOPELESS, FUNCTION_RESULT
from gpulayer_mesh.errors import ConfigError, TransportError
from job_cases import JOB, node, spec

import gpulayer
from gpulayer import called, functions, jobs, launcher, values


@pytest.mark.parametrize(
    "reference", ["work", "work:", ":f", "work:f()", "work.py:f", "a b:c", "work:f:g", "../x:f"]
)
def test_malformed_references_are_refused(reference: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no function"):
        gpulayer.submit(reference, root=tmp_path)


def test_functions_that_cannot_be_imported_are_refused(tmp_path: Path) -> None:
    def inner() -> None: ...

    for function in (inner, lambda: None):
        with pytest.raises(ConfigError, match="cannot be imported"):
            gpulayer.submit(function, root=tmp_path)
    with pytest.raises(ConfigError, match="cannot be submitted"):
        gpulayer.submit(object(), root=tmp_path)  # type: ignore[arg-type]


def test_function_of_a_module_is_referred_to_by_name(tmp_path: Path) -> None:
    assert functions._reference(values.pack, tmp_path) == "gpulayer.values:pack"
    assert functions._reference(functions.Job.stop, tmp_path) == "gpulayer.functions:Job.stop"


def test_function_of_the_running_script_is_referred_to_by_its_file(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(
        "from pathlib import Path\n"
        "from gpulayer import functions\n"
        "def double(x):\n    return 2 * x\n"
        "print(functions._reference(double, Path(__file__).parent))\n"
    )
    done = subprocess.run(
        [sys.executable, "work.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "work:double\n", done.stderr


def test_cell_of_a_notebook_is_told_to_be_a_module(tmp_path: Path) -> None:
    code = (
        "import gpulayer\n"
        "def double(x): return 2 * x\n"
        "try: gpulayer.submit(double, 1)\n"
        "except Exception as error: print(type(error).__name__, error, error.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "a notebook, REPL or script" in done.stdout, done.stderr
    assert "put it into a module" in done.stdout


def test_argument_that_cannot_travel_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the call\[0\]\[1\] is a builtins.object"):
        gpulayer.submit("work:f", 1, object(), root=tmp_path)


def test_folder_and_variables_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        gpulayer.submit("work:f", root=tmp_path / "absent")
    with pytest.raises(ConfigError, match="give a list of names"):
        gpulayer.submit("work:f", root=tmp_path, env="HOME")
    with pytest.raises(ConfigError, match="unknown accelerator"):
        gpulayer.submit("work:f", root=tmp_path, accelerator="tpu")
    with pytest.raises(ConfigError, match="nodes must be at least 1"):
        gpulayer.submit("work:f", root=tmp_path, nodes=0)


def run_called(
    folder: Path, body: str, reference: str, *args: Any, **kwargs: Any
) -> subprocess.CompletedProcess[str]:
    """Do what a node does with a function job, in `folder`."""
    (folder / "work.py").write_text(body)
    arguments = folder / called.ARGUMENTS
    arguments.parent.mkdir()
    arguments.write_bytes(values.pack([list(args), kwargs], "the call"))
    return subprocess.run(
        [sys.executable, "-m", "gpulayer.called", reference],
        cwd=folder,
        env={"PATH": "/bin", "GPULAYER_JOB": "x", "GPULAYER_OUT": str(folder / "out")},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_rank_calls_the_function_and_leaves_its_result(tmp_path: Path) -> None:
    body = (
        "import sys\n"
        "assert 'torch' not in sys.modules\n"
        "class Tools:\n"
        "    @staticmethod\n"
        "    def add(a, b, *, scale=1):\n"
        "        print('adding')\n"
        "        return {'sum': (a + b) * scale, 'pair': (a, b)}\n"
    )
    done = run_called(tmp_path, body, "work:Tools.add", 1, 2, scale=10)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "adding\n"
    found = values.unpack((tmp_path / "out" / FUNCTION_RESULT).read_bytes())
    assert found == {"sum": 30, "pair": (1, 2)}


@pytest.mark.parametrize(
    ("body", "text", "hopeless"),
    [
        ("def f(): raise KeyError('lost')", "KeyError: 'lost'", False),
        ("def g(): pass", "work has no 'f'", True),
        ("f = 3", "is a int, which cannot be called", True),
        ("def f(): return object()", "the result of work:f is a builtins.object", True),
        ("def f(): return [lambda: 1]", "hint: None, numbers, text, bytes, tensors", True),
        ("async def f(): pass", "is a coroutine function", True),
        ("import absent\ndef f(): pass", "No module named 'absent'", False),
        ("import sys\ndef f(): sys.exit()", "work:f ended in sys.exit() and returned noth", False),
        ("import sys\ndef f(): pass\nsys.exit(0)", "work:f ended in sys.exit()", False),
        ("import sys\ndef f(): sys.exit('no data')", "no data", False),
        ("import gpulayer\ndef f(): gpulayer.submit('work:f')", "submit() was called in", False),
    ],
)
def test_rank_fails_with_the_reason(body: str, text: str, hopeless: bool, tmp_path: Path) -> None:
    done = run_called(tmp_path, body, "work:f")
    assert done.returncode == 1
    assert text in done.stderr
    assert (tmp_path / "out" / FUNCTION_HOPELESS).exists() is hopeless
    assert not (tmp_path / "out" / FUNCTION_RESULT).exists()


INTERRUPTED = """
import asyncio, os, signal, threading, time
from gpulayer import functions

began = threading.Event()

async def work():
    began.set()
    await asyncio.sleep(60)

def press():
    began.wait(30)
    os.kill(os.getpid(), signal.SIGINT)

async def cell():
    threading.Thread(target=press).start()
    functions._run(work)

try:
    asyncio.new_event_loop().run_until_complete(cell())  # as notebooks do
except KeyboardInterrupt:
    print("interrupted")
"""


def test_interrupt_reaches_what_runs_beside_the_loop_of_a_notebook() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "interrupted\n", done.stderr


STARTED = JobRecord(spec(1, kind=JobKind.FUNCTION, name="work:f"), JobState.STARTING, node(0))


class Client:
    """A `MeshClient` that takes a moment to close, where it is interrupted."""

    reached = True

    def __init__(self) -> None:
        self.killed: list[str] = []

    async def connect(self, home: Path) -> Client:
        return self

    def names(self) -> dict[str, str]:
        return {}

    async def stop(self, job: str, *, grace_s: float | None, kill: bool) -> None:
        if not self.reached:
            raise TransportError("no answer")
        assert kill
        self.killed.append(job)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)


def test_failure_shows_the_callers_line_and_ends_in_the_ranks_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ("Traceback (most recent call last):", '  File "work.py", line 2, in f', "KeyError: 3")
    failure = Failure(0, "box-0", 1, "exit code 1", said)
    failed = replace(STARTED, state=JobState.FAILED, failure=failure)

    async def end(*_: object) -> JobRecord:
        return failed

    async def collect(*_: object) -> list[Path]:
        return []

    monkeypatch.setattr(MeshClient, "connect", Client().connect)
    monkeypatch.setattr(jobs, "wait_end", end)
    monkeypatch.setattr(jobs, "collect", collect)
    with pytest.raises(gpulayer.JobFailedError) as caught:
        functions.Job(STARTED, tmp_path).result(logs=False)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [Path(frame.filename).name for frame in frames] == ["test_functions.py", "functions.py"]
    text = "".join(traceback.format_exception_only(caught.value)).splitlines()
    assert text == [
        f"gpulayer.functions.JobFailedError: job {JOB} (work:f) failed: rank 0 on box-0: "
        "exit code 1",
        *(f"  {line}" for line in said),
        f"hint: gpulayer logs {JOB}",
    ]


@pytest.mark.parametrize("beside", [False, True], ids=["script", "notebook"])
@pytest.mark.parametrize("reached", [True, False])
def test_submit_that_is_interrupted_leaves_no_job(
    beside: bool,
    reached: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    client = Client()
    client.reached = reached

    async def place(*_: object) -> JobRecord:
        os.kill(os.getpid(), signal.SIGINT)  # as the job has begun
        return STARTED

    monkeypatch.setattr(MeshClient, "connect", client.connect)
    monkeypatch.setattr(launcher, "_place", place)

    def script() -> None:
        gpulayer.submit("work:f", root=tmp_path)

    async def cell() -> None:
        script()

    def notebook() -> None:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            loop.run_until_complete(cell())

    with pytest.raises(KeyboardInterrupt):
        (notebook if beside else script)()
    assert client.killed == [JOB] * reached
    assert (f"end it with: gpulayer stop {JOB}" in capfd.readouterr().err) is not reached


def test_jobs_that_mind_know_that_the_process_which_submitted_them_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minds = replace(STARTED, spec=replace(STARTED.spec, on_disconnect_s=60.0))
    answers = [minds, TransportError("no answer"), minds, replace(minds, state=JobState.SUCCEEDED)]
    tries: list[BaseException | None] = [None, TransportError("nobody"), None]

    class Following(Client):
        async def connect(self, home: Path) -> Client:
            if (error := tries.pop(0)) is not None:
                raise error
            return self

        async def current(self, record: JobRecord) -> JobRecord:
            assert record is minds
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    async def place(client: MeshClient, request: launcher.JobRequest, *_: object) -> JobRecord:
        assert request.on_disconnect_s == 60
        return minds

    monkeypatch.setattr(functions, "FOLLOW_S", 0.001)
    monkeypatch.setattr(MeshClient, "connect", Following().connect)
    monkeypatch.setattr(launcher, "_place", place)
    gpulayer.submit("work:f", root=tmp_path, on_disconnect=60)
    thread = functions._presence._thread
    if thread is not None:  # it may have gone through all of them
        thread.join(20)
    assert (answers, tries, functions._presence._thread) == ([], [], None)


def test_importing_what_submits_does_not_import_torch() -> None:
    code = "import sys, gpulayer; gpulayer.submit; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
