"""A mesh on the test LAN: laptop and boxes, joined by one pasted line, found by mDNS alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lan import Host, Lan, Process

T = TypeVar("T")

BIN = Path(sys.executable).parent
GPULAYER = str(BIN / "gpulayer")
AGENT = str(BIN / "gpulayer-agent")
LINE = re.compile(r"^gpl1-\S+$", re.MULTILINE)


class LanMesh:
    """The hosts, their agents, and the commands a user types on the laptop."""

    def __init__(self, lan: Lan, boxes: tuple[str, ...] = ("box-1", "box-2", "box-3")) -> None:
        self.lan = lan
        self.laptop: Host = lan["laptop"]
        self.boxes = [lan[name] for name in boxes]
        self.agents: dict[str, Process] = {}
        self.proven_s = 0.0  # from the last agent's start until status had everything of all

    def form(self) -> None:
        """Create the mesh and have every box join with the same pasted line."""
        self.gpulayer("mesh", "create")
        invite = self.laptop.popen([GPULAYER, "mesh", "invite", "--uses", str(len(self.boxes))])
        line = invite.expect(LINE.pattern, 20)[0]
        for box in self.boxes:
            self.start_agent(box, "--join", line)
        started = time.monotonic()
        assert invite.wait(60) == 0, invite.output()
        until(self.listed, 10)
        self.wait_proven(20 * len(self.boxes))  # all prove at once, on the same few cores
        self.proven_s = time.monotonic() - started
        print(f"all listed, torch proven, {self.proven_s:.1f} s after the last start")

    def add_launcher(self, host: Host) -> None:
        """Let one more machine submit jobs; it runs no agent."""
        invite = self.laptop.popen([GPULAYER, "mesh", "invite", "--role", "launcher"])
        line = invite.expect(LINE.pattern, 20)[0]
        self.gpulayer("mesh", "join", line, host=host)
        assert invite.wait(30) == 0, invite.output()

    def start_agent(self, box: Host, *arguments: str) -> Process:
        agent = box.popen([AGENT, *arguments])
        self.agents[box.name] = agent
        return agent

    def gpulayer(
        self, *arguments: str, host: Host | None = None, code: int = 0, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the laptop (or `host`) and check its exit code."""
        done = (host or self.laptop).run([GPULAYER, *arguments], timeout=timeout_s)
        assert done.returncode == code, (
            f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def status_json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.gpulayer("mesh", "status", "--json").stdout)
        return found

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the JSON rows by node name."""
        return {row["name"]: row for row in self.status_json()["nodes"]}

    def state(self, name: str) -> str | None:
        return self.status()[name]["state"]

    def listed(self, *names: str) -> bool:
        """Return whether boxes are alive with all their figures; torch takes an import to prove.

        Args:
            names: all boxes, without any.
        """
        status = self.status()
        rows = [status.get(name, {}) for name in names or [box.name for box in self.boxes]]
        figures = ("addresses", "roles", "cpus", "memory_total_mib", "python")
        return all(row.get("state") == "alive" and all(row[key] for key in figures) for row in rows)

    def wait_proven(self, deadline_s: float = 60) -> None:
        """Wait until every box has proven its torch, which three at once take long for here."""

        def proven() -> bool:
            status = self.status()
            return all(status[box.name]["torch"] for box in self.boxes)

        until(
            proven, deadline_s, every_s=1.0
        )  # each look costs as much as a second of a torch import

    def ranks(self) -> list[int]:
        """Return the pids on all boxes that are neither agents nor their own children."""
        ours = ("gpulayer-agent", "torch_probe.py")
        agents = {pid for box in self.boxes for one in ours for pid in box.processes(one)}
        return [pid for box in self.boxes for pid in box.processes() if pid not in agents]


def until(ready: Callable[[], T], deadline_s: float, every_s: float = 0.2) -> T:
    """Poll until `ready` returns something true; fail at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = ready()
        if value:
            return value
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(every_s)
