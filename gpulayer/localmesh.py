"""`gpulayer mesh local`: a whole mesh on one machine, for one command.

A temporary state directory as the laptop's, real agents on loopback with state directories of their
own, joined with a real invitation. Everything goes when the command ends, jobs included. Does not
know what the command does; it finds this mesh through GPULAYER_HOME.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from gpulayer_mesh.client import MeshClient
from gpulayer_mesh.core.roster import RosterEntry
from gpulayer_mesh.core.types import NodeState, Snapshot
from gpulayer_mesh.errors import ConfigError, DiscoveryError, GpuLayerError, TransportError
from gpulayer_mesh.files import replace_file
from gpulayer_mesh.runtime import identity as identities

from gpulayer import env, membership
from gpulayer.ui import Ui
from gpulayer.views import counted

TORCH_PROOF = "torch.json"  # what an agent keeps of its proof; it checks what it was made with
LOOPBACK = "127.0.0.1"
JOIN_S = 60.0  # 3 interpreters starting on one busy core take 5 s
READY_S = 120.0  # each agent proves its torch once, which is an import from a cold disk
POLL_S = 0.1
AT_ONCE = 8  # agents starting at a time: an invitation serves 16 joiners at once
PORT_STEP = 4  # between first choices: agents that start together should not race for one port
STOP_S = 8.0  # for an agent to say goodbye
JOBS_STOP_S = 15.0  # for jobs the command left behind
_LOG_TAIL = 15  # lines of an agent that did not come up


def run(nodes: int, command: tuple[str, ...], *, keep: bool, ui: Ui) -> int:
    """Start a mesh of `nodes` agents, run `command` on it, take it down; return its exit code.

    Raises:
        ConfigError: there is no such command.
        GpuLayerError: an agent did not come up; its last words are in the message.
    """
    if shutil.which(command[0], path=_path()) is None:
        raise ConfigError(f"cannot find the command {command[0]!r}")
    short = "/tmp" if os.path.isdir("/tmp") else None  # macOS has a long one, and paths add up
    base = Path(tempfile.mkdtemp(prefix="gpl-", dir=short))
    mesh = LocalMesh(base, nodes)
    started = time.monotonic()
    try:
        with _signals_as_exit():
            ui.note(f"starting {counted(nodes, 'agent')} on this machine, state in {base}")
            names = asyncio.run(mesh.start())
            took = time.monotonic() - started
            ui.note(f"{counted(nodes, 'node')} ready after {took:.1f} s: {', '.join(names)}")
        return mesh.call(command)
    finally:
        with _signals_ignored():
            mesh.stop()
            if keep:
                ui.note(f"stopped {counted(nodes, 'agent')}; state and logs are in {base}")
            else:
                shutil.rmtree(base, ignore_errors=True)
                ui.note(f"stopped {counted(nodes, 'agent')} and removed {base}")


class LocalMesh:
    """Agents on loopback and the laptop's state directory beside them."""

    def __init__(self, base: Path, nodes: int) -> None:
        self.home = base / "laptop"
        self._base = base
        self._nodes = nodes
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        # Below the ephemeral ports of Linux and macOS, away from a real agent, and random so that
        # two local meshes do not meet. An agent takes the next free one from where it is told.
        self._port = 16_384 + secrets.randbelow(8_192)

    async def start(self) -> list[str]:
        """Make the mesh, start and join the agents; return the names of all once they are ready."""
        identities.create_mesh(identities.load_or_create(self.home), "laptop")
        names = [f"node-{i + 1}" for i in range(self._nodes)]
        async with membership.invitation(
            self.home, uses=self._nodes, valid_s=JOIN_S, bind=LOOPBACK
        ) as invitation:
            for name in names[:AT_ONCE]:
                self._start_agent(name, invitation.line)
            joined = asyncio.create_task(self._joined(invitation, names[AT_ONCE:]))
            try:
                while not joined.done():
                    self._check_agents()
                    await asyncio.wait([joined], timeout=POLL_S)
                joined.result()
            finally:
                joined.cancel()
        await membership.spread(self.home)
        await self._ready()
        self._keep_proof(names[0])
        return names

    def call(self, command: tuple[str, ...]) -> int:
        """Run the user's command to its end; signals reach it, and us only through its end."""
        environ = env.copied_env() | {"GPULAYER_HOME": str(self.home), "PATH": _path()}
        children: list[subprocess.Popen[bytes]] = []

        def forward(number: int, frame: FrameType | None) -> None:
            for child in children:
                child.send_signal(number)

        def wait(number: int, frame: FrameType | None) -> None:
            pass  # the terminal has sent it to the command as well

        with _handlers({signal.SIGINT: wait, signal.SIGTERM: forward, signal.SIGHUP: forward}):
            children.append(subprocess.Popen(command, env=environ))
            code = children[0].wait()
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        """End the jobs that are left, then every agent, each by its own process id."""
        if any(agent.poll() is None for agent in self._agents.values()):
            with contextlib.suppress(GpuLayerError, TimeoutError, OSError):
                asyncio.run(asyncio.wait_for(self._stop_jobs(), JOBS_STOP_S))
        for agent in self._agents.values():
            if agent.poll() is None:
                agent.terminate()
        give_up = time.monotonic() + STOP_S
        for agent in self._agents.values():
            try:
                agent.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()

    async def _stop_jobs(self) -> None:
        async with await MeshClient.connect(self.home, deadline_s=2.0) as client:
            left = [job for job in await client.jobs() if job.ended_age_s is None]
            for job in left:
                await client.stop(job.spec.id, grace_s=None, kill=True)
            while left:
                await asyncio.sleep(POLL_S)
                left = [j for j in left if (await client.record(j)).ended_age_s is None]

    def _start_agent(self, name: str, line: str) -> None:
        home = self._base / name
        home.mkdir(mode=0o700)
        with contextlib.suppress(OSError):
            shutil.copyfile(env.home() / TORCH_PROOF, home / TORCH_PROOF)
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        environ = env.copied_env()
        environ.pop("GPULAYER_HOME", None)
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (cpus or 1) // self._nodes)))
        port = self._port + PORT_STEP * len(self._agents)
        arguments = ["--join", "-", "--name", name, "--bind", LOOPBACK, "--port", str(port)]
        arguments += ["--state-dir", str(home)]
        with (home / "agent.log").open("wb") as log:
            agent = subprocess.Popen(
                # -P: no module of the folder the user stands in takes the place of one of ours
                [sys.executable, "-P", "-m", "gpulayer_mesh.runtime.agent", *arguments],
                env=environ,
                stdin=subprocess.PIPE,  # arguments can be read by every user of this machine
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the command alone
            )
        self._agents[name] = agent
        assert agent.stdin is not None
        with contextlib.suppress(BrokenPipeError), agent.stdin as stdin:
            stdin.write(f"{line}\n".encode())

    def _keep_proof(self, name: str) -> None:
        """Spare the next local mesh, and a real agent here, what proving torch took this one."""
        with contextlib.suppress(OSError):
            env.home().mkdir(mode=0o700, parents=True, exist_ok=True)
            proof = (self._base / name / TORCH_PROOF).read_bytes()
            replace_file(env.home() / TORCH_PROOF, proof)

    async def _joined(self, invitation: membership.Invitation, waiting: list[str]) -> None:
        async for news in invitation:
            if waiting and isinstance(news, RosterEntry):
                self._start_agent(waiting.pop(0), invitation.line)
        if invitation.ended != "used-up":
            missing = f"{invitation.uses_left} of {counted(self._nodes, 'agent')}"
            raise GpuLayerError(f"{missing} did not join within {JOIN_S:g} s")

    async def _ready(self) -> None:
        proves_torch = importlib.util.find_spec("torch") is not None
        give_up = time.monotonic() + READY_S
        ready = 0
        while time.monotonic() < give_up:
            try:
                async with await MeshClient.connect(self.home, deadline_s=2.0) as client:
                    while time.monotonic() < give_up:
                        self._check_agents()
                        ready = _count_ready(await client.snapshot(), proves_torch)
                        if ready == self._nodes:
                            return
                        await asyncio.sleep(POLL_S)
            except (DiscoveryError, TransportError):
                self._check_agents()
                await asyncio.sleep(POLL_S)
        raise GpuLayerError(
            f"{ready} of {counted(self._nodes, 'agent')} ready after {READY_S:g} s{self._logs()}"
        )

    def _check_agents(self) -> None:
        for name, agent in self._agents.items():
            if agent.poll() is not None:
                raise GpuLayerError(
                    f"agent {name} ended with code {agent.returncode}{self._logs(name)}"
                )

    def _logs(self, *names: str) -> str:
        lines: list[str] = []
        for name in names or self._agents:
            with contextlib.suppress(OSError):
                text = (self._base / name / "agent.log").read_text(errors="replace")
                lines += [f"{name}: {line}" for line in text.splitlines()[-_LOG_TAIL:]]
        return "".join(f"\n{line}" for line in lines)


def _count_ready(snapshot: Snapshot, proves_torch: bool) -> int:
    alive = [m.caps for m in snapshot.members if m.state is NodeState.ALIVE and m.caps is not None]
    return sum(caps.torch is not None or not proves_torch for caps in alive)


def _path() -> str:
    # `python` in the command means the one that has gpulayer, in an activated venv or not
    return f"{Path(sys.executable).parent}{os.pathsep}{env.copied_env().get('PATH', os.defpath)}"


_Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextlib.contextmanager
def _handlers(handlers: Mapping[int, _Handler]) -> Iterator[None]:
    """Set signal handlers for a block; what was ignored from the start (nohup) stays ignored."""
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _signals_as_exit() -> contextlib.AbstractContextManager[None]:
    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    return _handlers({signal.SIGTERM: leave, signal.SIGHUP: leave})


def _signals_ignored() -> contextlib.AbstractContextManager[None]:
    """Taking down is bounded; a second Ctrl-C must not leave half of it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return _handlers(dict.fromkeys(numbers, signal.SIG_IGN))
