"""What runs in the rank of a service: it keeps the service's process going.

    python -m gpulayer.serving --port 8000 --health /ready --restart always -- COMMAND...

The command is started, asked for its health, and started again when it ends or falls silent, with
pauses that double. What became of it stands in a file in the output directory, for whoever lists
services. Imports little, a service needs no torch. Does not know the mesh.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from gpulayer_mesh.core.ownfiles import SERVICE_STATE
from gpulayer_mesh.files import replace_file

from gpulayer import env

POLICIES = ("always", "on-failure", "never")
CHECK_S = 2.0  # between two looks at its health
ANSWER_S = 5.0  # for one answer
FAILURES = 3  # looks in a row without an answer, and it is started again
BEGIN_S = 60.0  # until its first answer; models take time to load
PAUSE_S, PAUSE_MOST_S = 1.0, 60.0  # before a new start: doubled each time, up to the second
CALM_S = 60.0  # healthy for so long: the next pause is the first again
KILL_S = 10.0  # from SIGTERM to SIGKILL, when it is started again
TICK_S = 0.1


class Restarts:
    """When a process that ended is started again: pure, time is `now`."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.count = 0
        self._pause_s = PAUSE_S

    def ended(self, code: int, healthy_s: float) -> float | None:
        """Return the pause before the next start; None: there is none.

        Args:
            code: of the end; not 0 where it was ended for its health.
            healthy_s: how long it had been healthy.
        """
        if self.policy == "never" or (self.policy == "on-failure" and code == 0):
            return None
        if healthy_s >= CALM_S:
            self._pause_s = PAUSE_S
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_MOST_S)
        self.count += 1
        return pause_s


class Health:
    """Whether a process answers: pure, fed with the result of each look.

    Args:
        begun: when it was started.
    """

    def __init__(self, begun: float) -> None:
        self.since: float | None = None  # healthy since
        self._begun = begun
        self._failures = 0

    def looked(self, now: float, answered: bool) -> bool:
        """Return whether it should be ended."""
        if answered:
            self._failures = 0
            self.since = now if self.since is None else self.since
            return False
        self._failures += 1
        if self.since is None:
            return now - self._begun > BEGIN_S
        return self._failures >= FAILURES

    @property
    def answers(self) -> bool:
        return self.since is not None and self._failures == 0

    def healthy_s(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since


class Service:
    """Runs a command for ever.

    Args:
        port: where it listens, on loopback; 0: a free one, which it finds in $PORT.
        health: a path that answers with a status below 400; "": a connection is enough.
    """

    def __init__(
        self, command: Sequence[str], port: int, health: str, policy: str, state: Path
    ) -> None:
        self._command = list(command)
        self._port = port
        self._path = health
        self._restarts = Restarts(policy)
        self._file = state
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._told: dict[str, Any] = {}

    def run(self) -> int:
        """Return the exit code of the job."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        while True:
            code, healthy_s = self._once()
            if self._stopping:
                self._tell("stopped", code)
                return 0
            pause_s = self._restarts.ended(code, healthy_s)
            if pause_s is None:
                self._tell("ended" if code == 0 else "failed", code)
                return code if 0 <= code < 256 else 128 - code
            self._say(f"ended with {_words(code)}; it starts again in {pause_s:g} s")
            self._tell("waiting", code)
            until = time.monotonic() + pause_s
            while time.monotonic() < until and not self._stopping:
                time.sleep(TICK_S)
            if self._stopping:
                self._tell("stopped", code)
                return 0

    def _once(self) -> tuple[int, float]:
        """Run the command to its end; returns its code and how long it was healthy."""
        port = self._port or _free_port()
        if self._port and _answers(port, ""):
            return self._not_started(f"port {port} of this machine is taken by another program")
        health = Health(time.monotonic())
        try:
            self._process = subprocess.Popen(
                self._command, env=env.copied_env() | {"PORT": str(port)}, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            return self._not_started(f"{self._command[0]!r} cannot be started: {error}")
        self._tell("starting", None, port)
        look_at = time.monotonic() + TICK_S
        told_to_end = False
        while (code := self._process.poll()) is None:
            time.sleep(TICK_S)
            now = time.monotonic()
            if self._stopping and not told_to_end:
                told_to_end = True
                self._process.terminate()
            if self._stopping or now < look_at:
                continue
            look_at = now + (CHECK_S if health.since is not None else 2 * TICK_S)
            silent = health.looked(now, _answers(port, self._path))
            if silent:
                self._say("does not answer; it is ended and starts again")
                code = self._end()
                return code or 1, health.healthy_s(time.monotonic())
            if health.since is not None:
                self._tell("healthy" if health.answers else "unhealthy", None, port)
        return code, health.healthy_s(time.monotonic())

    def _not_started(self, why: str) -> tuple[int, float]:
        """Give up at the first start; later, what is in the way may go."""
        self._say(f"cannot start: {why}")
        if self._restarts.count == 0:
            self._tell("failed", 1)
            raise SystemExit(1)
        return 1, 0.0

    def _end(self) -> int:
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True  # the loop hands it on

    def _tell(self, state: str, code: int | None, port: int = 0) -> None:
        """Write down what became of it, where that changed."""
        told = {"state": state, "port": port or self._port, "restarts": self._restarts.count}
        if code is not None:
            told["last"] = _words(code)
        elif "last" in self._told:
            told["last"] = self._told["last"]
        if told == self._told:
            return
        if told["state"] == "healthy" and self._told.get("state") != "healthy":
            self._say(f"answers on port {told['port']}")
        self._told = told
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, json.dumps(told).encode())

    def _say(self, text: str) -> None:
        print(f"gpulayer: service {text}", file=sys.stderr, flush=True)


def _answers(port: int, path: str) -> bool:
    """Return whether something listens, and answers a request for `path` if there is one."""
    try:
        if not path:
            socket.create_connection(("127.0.0.1", port), ANSWER_S).close()
            return True
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status < 400
        finally:
            connection.close()
    except (OSError, http.client.HTTPException):
        return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def main(argv: list[str]) -> int:
    """Run what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpulayer.serving")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--health", default="")
    parser.add_argument("--restart", choices=POLICIES, default="always")
    cut = argv.index("--")
    args = parser.parse_args(argv[:cut])
    command = argv[cut + 1 :]
    place = env.rank_env()
    if place is None or place.output_dir is None:
        raise SystemExit("gpulayer.serving is run by services only")
    if os.path.basename(command[0]) in ("python", "python3"):
        command[0] = sys.executable  # the node's own
    state = place.output_dir / SERVICE_STATE
    return Service(command, args.port, args.health, args.restart, state).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
