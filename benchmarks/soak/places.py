"""Where a soak runs: the LAN of the tests, or hosts that are folders and ports of this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from lan import Lan, Process
from meshes import LanMesh


@contextlib.contextmanager
def formed(boxes: int, *, loopback: bool) -> Iterator[LanMesh]:
    """A mesh of a laptop and this many boxes, with nothing running on it."""
    names = tuple(f"box-{number}" for number in range(1, boxes + 1))
    with contextlib.ExitStack() as stack:
        place: Any
        if loopback:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpl-soak-"))
            place = Loopback(("laptop", *names), Path(folder))
            stack.callback(place.close)
        else:
            place = stack.enter_context(Lan(("laptop", *names)))
        mesh = LanMesh(place, names)
        mesh.form()
        yield mesh


class Loopback:
    """Stands in for a LAN where there is no root: hosts are state directories and ports."""

    def __init__(self, names: tuple[str, ...], folder: Path) -> None:
        self.hosts = {name: LoopHost(name, i, folder / name) for i, name in enumerate(names)}

    def __getitem__(self, name: str) -> LoopHost:
        return self.hosts[name]

    def logs(self) -> list[Path]:
        return [log for host in self.hosts.values() for log in (host.home / "logs").iterdir()]

    def close(self) -> None:
        for host in self.hosts.values():
            for pid in host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class LoopHost:
    """The part of `lan.Host` that the soak uses."""

    def __init__(self, name: str, index: int, folder: Path) -> None:
        self.name = name
        self.home = folder
        (folder / "logs").mkdir(parents=True)
        self._log_number = itertools.count()
        self._agent = ["--name", name, "--bind", "127.0.0.1", "--port", str(21_300 + 4 * index)]
        self.env = os.environ | {"GPULAYER_HOME": str(folder / "state"), "GPL_SOAK_HOST": name}

    def popen(self, argv: list[str], *, cwd: Path | None = None) -> Process:
        if argv[0].endswith("gpulayer-agent"):
            argv = [*argv, *self._agent]
        log = self.home / "logs" / f"{next(self._log_number)}-{Path(argv[0]).name}.log"
        with log.open("wb") as out:
            process = Process(
                argv,
                cwd=cwd or self.home,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        process.log = log
        return process

    def run(self, argv: list[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=timeout
        )

    def processes(self, containing: str = "") -> list[int]:
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = one.environ().get("GPL_SOAK_HOST") == self.name
                if ours and containing in " ".join(one.cmdline()):
                    found.append(one.pid)
        return found
