"""What an idle agent costs: memory and CPU share of N real agents in one mesh on this machine.

    python benchmarks/agent_idle.py --nodes 3 --seconds 60

Limits from the design: below 60 MB resident and 0.5 % of a core. Agents announce themselves by
mDNS on this machine's real interfaces, as on a LAN. What is printed is measured on this machine
and says nothing about another one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
RSS_LIMIT_MB = 60.0
CPU_LIMIT_PERCENT = 0.5
FIRST_PORT = 28_300  # away from the default, and below the ephemeral ports
READY_S = 120.0  # importing torch once per agent, for the proof


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure")
    parser.add_argument("--settle", type=float, default=20.0, help="wait after all are ready")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="gpl-idle-") as folder,
        mesh(Path(folder), args.nodes) as agents,
    ):
        time.sleep(args.settle)
        before = [cpu_seconds(agent) for agent in agents]
        started = time.monotonic()
        time.sleep(args.seconds)
        took = time.monotonic() - started
        rows = [row(agent, cpu, took) for agent, cpu in zip(agents, before, strict=True)]
    print(f"{len(rows)} agents, {took:.0f} s, Python {sys.version.split()[0]}, {sys.platform}")
    for number, one in enumerate(rows, 1):
        print(
            f"  agent {number}: RSS {one['rss_mb']:.1f} MB, USS {one['uss_mb']:.1f} MB, "
            f"CPU {one['cpu_percent']:.2f} % of a core, {one['threads']} threads"
        )
    print(json.dumps(rows))
    within = all(
        one["rss_mb"] < RSS_LIMIT_MB and one["cpu_percent"] < CPU_LIMIT_PERCENT for one in rows
    )
    print("within the limits" if within else "OVER the limits: 60 MB, 0.5 %")
    return 0 if within else 1


@contextlib.contextmanager
def mesh(folder: Path, nodes: int) -> Iterator[list[psutil.Process]]:
    """Start agents with the commands a user types; yield them once all are alive and proven."""
    environ = os.environ | {"GPULAYER_HOME": str(folder / "laptop")}
    subprocess.run([BIN / "gpulayer", "mesh", "create"], env=environ, check=True, timeout=30)
    invite = subprocess.Popen(
        [BIN / "gpulayer", "mesh", "invite", "--uses", str(nodes)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started: list[subprocess.Popen[bytes]] = []
    try:
        line = pasted_line(invite)
        for number in range(nodes):
            home, name = folder / f"node-{number}", f"node-{number}"
            # Ports apart, so that agents that start together do not race for one.
            command = [BIN / "gpulayer-agent", "--join", line, "--name", name]
            command += ["--state-dir", home, "--port", str(FIRST_PORT + 4 * number)]
            with (folder / f"{name}.log").open("wb") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log))
        wait_ready(environ, nodes)
        yield [psutil.Process(process.pid) for process in started]
    except BaseException:
        for log_path in sorted(folder.glob("node-*.log")):
            print(log_path.name, log_path.read_text(errors="replace")[-2000:], file=sys.stderr)
        raise
    finally:
        for process in [*started, invite]:
            process.terminate()
        for process in [*started, invite]:
            process.wait(timeout=20)
        if invite.stdout is not None:
            invite.stdout.close()


def pasted_line(invite: subprocess.Popen[str]) -> str:
    assert invite.stdout is not None
    for text in invite.stdout:
        if found := re.search(r"gpl1-\S+", text):
            return found[0]
    raise SystemExit("gpulayer mesh invite printed no line")


def wait_ready(environ: dict[str, str], nodes: int) -> None:
    end = time.monotonic() + READY_S
    command = [BIN / "gpulayer", "mesh", "status", "--json"]
    while time.monotonic() < end:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
        if done.returncode == 0:
            rows = json.loads(done.stdout)["nodes"]
            ready = [row for row in rows if row["state"] == "alive" and row.get("torch")]
            if len(ready) >= nodes:
                return
        time.sleep(1.0)
    raise SystemExit(f"the agents were not ready after {READY_S:.0f} s: {done.stdout}{done.stderr}")


def cpu_seconds(agent: psutil.Process) -> float:
    times = agent.cpu_times()
    return times.user + times.system


def row(agent: psutil.Process, cpu_before: float, took_s: float) -> dict[str, float]:
    memory = agent.memory_full_info()
    return {
        "rss_mb": memory.rss / 1e6,
        "uss_mb": memory.uss / 1e6,
        "cpu_percent": 100 * (cpu_seconds(agent) - cpu_before) / took_s,
        "threads": agent.num_threads(),
    }


if __name__ == "__main__":
    sys.exit(main())
