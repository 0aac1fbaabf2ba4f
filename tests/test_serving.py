"""The supervisor of a service: restarts, health, what it writes down; pure and with processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpulayer_mesh.core.ownfiles import SERVICE_STATE

from gpulayer import serving
from gpulayer.serving import Health, Restarts

DEADLINE_S = 30.0

# -- decisions ------------------------------------------------------------------------------------


def test_pauses_double_up_to_a_minute_and_begin_again_after_calm() -> None:
    restarts = Restarts("always")
    assert [restarts.ended(1, 0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert restarts.ended(0, serving.CALM_S) == 1
    assert restarts.ended(1, 59.0) == 2
    assert restarts.count == 10


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [("always", 0, True), ("always", 1, True), ("on-failure", 0, False), ("on-failure", -9, True),
     ("never", 0, False), ("never", 3, False)],
)  # fmt: skip
def test_policy_decides_whether_it_starts_again(policy: str, code: int, again: bool) -> None:
    assert (Restarts(policy).ended(code, 0.0) is not None) is again


def test_first_answer_may_take_a_minute() -> None:
    health = Health(100.0)
    assert not any(health.looked(100.0 + second, False) for second in range(61))
    assert health.looked(161.0, False)


def test_three_silent_looks_in_a_row_end_it() -> None:
    health = Health(0.0)
    looks = [True, False, False, True, False, False, False]
    assert [health.looked(float(i), ok) for i, ok in enumerate(looks)] == [False] * 6 + [True]
    assert health.healthy_s(10.0) == 10.0
    assert not health.answers


# -- processes ------------------------------------------------------------------------------------

SERVER = """
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(3)
        self.send_response(500 if self.path == "/bad" else 200)
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, *args):
        pass

if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


MAIN = """
import sys
from gpulayer import serving

serving.BEGIN_S = 2.0
sys.exit(serving.main(sys.argv[1:]))
"""


class Run:
    """A supervisor as a job starts it."""

    def __init__(self, folder: Path, *options: str, words: tuple[str, ...] = ()) -> None:
        (folder / "serve.py").write_text(SERVER)
        (folder / "main.py").write_text(MAIN)
        self.folder = folder
        with (folder / "errors.txt").open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "main.py", *options, "--", "python", "serve.py", *words],
                cwd=folder,
                env={"PATH": "/bin", "GPULAYER_JOB": "x", "GPULAYER_OUT": str(folder / "out")},
                stderr=errors,
            )

    def state(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / "out" / SERVICE_STATE).read_text())
        except FileNotFoundError:
            return {}
        return found

    def wait(self, **wanted: Any) -> dict[str, Any]:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            found = self.state()
            if all(found.get(key) == value for key, value in wanted.items()):
                return found
            time.sleep(0.02)
        raise AssertionError((wanted, self.state(), self.said()))

    def said(self) -> str:
        return (self.folder / "errors.txt").read_text()

    def get(self, path: str) -> bytes:
        port = self.state()["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            found: bytes = answer.read()
        return found


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
        run.process.wait(10)


@pytest.mark.network
def test_service_answers_dies_and_answers_again(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "--health", "/ready")
    runs.append(run)
    run.wait(state="healthy", restarts=0)
    assert run.get("/") == b"here"
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        run.get("/die")
    found = run.wait(state="healthy", restarts=1)
    assert found["last"] == "exit code 3"
    assert run.get("/") == b"here"
    assert "ended with exit code 3; it starts again in 1 s" in run.said()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(DEADLINE_S) == 0
    assert run.state()["state"] == "stopped"
    with pytest.raises(urllib.error.URLError):
        run.get("/")


@pytest.mark.network
def test_service_that_does_not_answer_well_is_started_again(
    tmp_path: Path, runs: list[Run]
) -> None:
    run = Run(tmp_path, "--health", "/bad")
    runs.append(run)
    run.wait(restarts=1)
    assert "does not answer; it is ended and starts again" in run.said()


@pytest.mark.network
@pytest.mark.parametrize(
    ("restart", "code", "state"), [("never", 4, "failed"), ("on-failure", 0, "ended")]
)
def test_service_that_ends_for_good_has_its_code(
    tmp_path: Path, runs: list[Run], restart: str, code: int, state: str
) -> None:
    run = Run(tmp_path, "--restart", restart, words=(str(code),))
    runs.append(run)
    assert run.process.wait(DEADLINE_S) == code
    assert run.state()["state"] == state


@pytest.mark.network
def test_port_that_is_taken_is_said(tmp_path: Path, runs: list[Run]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = Run(tmp_path, "--port", str(port))
        runs.append(run)
        assert run.process.wait(DEADLINE_S) == 1
    assert f"port {port} of this machine is taken" in run.said()
    assert run.state()["state"] == "failed"


@pytest.mark.network
def test_port_that_is_taken_at_a_restart_is_waited_for(tmp_path: Path, runs: list[Run]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = Run(tmp_path, "--port", str(port))
    runs.append(run)
    run.wait(state="healthy")
    with contextlib.suppress(ConnectionError, http.client.HTTPException):
        run.get("/die")
    run.wait(state="waiting")
    with socket.socket() as taken:  # e.g. a child that outlived it
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        run.wait(restarts=2)
    run.wait(state="healthy")
    assert "cannot start" in run.said()
