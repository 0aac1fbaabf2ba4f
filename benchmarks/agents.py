"""Twenty real agents on one machine: how soon all see all, and how soon a new address is followed.

Twenty hosts and a laptop as network namespaces of this machine (root, Linux); nothing but mDNS and
gossip tells them of each other. The agents are started one after the other, each once the one
before serves; from then on counts each agent's own log. Then one host changes its address.

    python benchmarks/agents.py [--boxes 20] [--rounds 3] [--log benchmarks/results/NAME.txt]

All share this machine's cores, on which each agent that starts also imports torch once, to prove
it: with as many cores as agents all would be sooner.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

from lan import Host, Lan, Process, why_unavailable  # noqa: E402
from meshes import LINE, LanMesh, until  # noqa: E402
from reporting import Report, parser  # noqa: E402

LIMIT_S = 300.0
STAMP = r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \S+ "
SERVES = re.compile(STAMP + r"gpulayer\.agent: (\S+) \(\w+\) serves on port", re.MULTILINE)
ALIVE = re.compile(STAMP + r"gpulayer\.gossip: (\S+): \S+ -> alive", re.MULTILINE)


def seconds(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def start_all(mesh: LanMesh) -> list[Process]:
    agents = []
    for box in mesh.boxes:
        agents.append(mesh.start_agent(box))
        agents[-1].expect(SERVES.pattern, LIMIT_S)
    return agents


def seen(agent: Process, others: set[str]) -> float | None:
    """Return when an agent had seen all others, on the wall clock; None while it has not."""
    first: dict[str, str] = {}
    for stamp, name in ALIVE.findall(agent.output()):
        first.setdefault(name, stamp)
    return None if others - first.keys() else max(seconds(first[name]) for name in others)


def one_start(mesh: LanMesh) -> tuple[float, float]:
    """Return from the last agent's start, and from when it served, until all had seen all."""
    names = {box.name for box in mesh.boxes}
    agents = start_all(mesh)
    served = max(seconds(found[0]) for one in agents for found in SERVES.findall(one.output()))
    started = process_started(agents[-1])
    pairs = list(zip(agents, mesh.boxes, strict=True))

    def all_seen() -> float | None:
        found = [seen(agent, names - {box.name}) for agent, box in pairs]
        times = [at for at in found if at is not None]
        return max(times) if len(times) == len(found) else None

    at = until(all_seen, LIMIT_S, every_s=1.0)
    assert at is not None
    return at - started, at - served


def process_started(agent: Process) -> float:
    """Return when a process was started, on the wall clock."""
    ticks = int(Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = float(re.findall(r"^btime (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)[0])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return max(boot, time.time() - uptime) + ticks / os.sysconf("SC_CLK_TCK")


def readdress(host: Host, address: str) -> None:
    base = ["ip", "-n", host.namespace, "addr"]
    # In this order: the kernel removes an address together with later ones of its subnet.
    subprocess.run([*base, "del", f"{host.address}/24", "dev", "eth0"], check=True)
    subprocess.run([*base, "add", f"{address}/24", "dev", "eth0"], check=True)


def followed_after(mesh: LanMesh, box: Host, address: str, viewer: Host) -> float:
    """Return from a change of address until another host's agent reaches the new one."""
    at = time.monotonic()
    readdress(box, address)

    def reached() -> bool:
        found = mesh.gpulayer("mesh", "status", "--json", host=viewer).stdout
        (row,) = [row for row in json.loads(found)["nodes"] if row["name"] == box.name]
        known = any(where.startswith(f"{address}:") for where in row["addresses"])
        return known and row["state"] == "alive"

    until(reached, LIMIT_S, every_s=0.5)
    return time.monotonic() - at


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--boxes", type=int, default=20)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    if why := why_unavailable():
        raise SystemExit(f"needs a LAN of network namespaces: {why}")
    report = Report(args.log)
    boxes = tuple(f"box-{i}" for i in range(1, args.boxes + 1))
    with Lan(("laptop", *boxes)) as lan:
        mesh = LanMesh(lan, boxes)
        mesh.gpulayer("mesh", "create")
        invite = mesh.laptop.popen(["gpulayer", "mesh", "invite", "--uses", str(len(boxes))])
        line = invite.expect(LINE.pattern, 20)[0]
        for box in mesh.boxes:
            mesh.start_agent(box, "--join", line).expect(SERVES.pattern, LIMIT_S)
        invite.wait(LIMIT_S)
        from_start, from_serving = [], []
        for _ in range(args.rounds):
            for agent in mesh.agents.values():
                agent.kill()
                agent.wait(10)
            for box in mesh.boxes:
                box.kill_all()
            start_s, serving_s = one_start(mesh)
            from_start.append(start_s)
            from_serving.append(serving_s)
            report.say(f"all saw all {start_s:.1f} s after the last start")
        changed = [
            followed_after(mesh, box, f"{lan.network}.{200 + i}", mesh.boxes[-1])
            for i, box in enumerate(mesh.boxes[: args.rounds])
        ]
    report.say(
        f"{len(boxes)} agents, {args.rounds} times: all see all {statistics.median(from_start):.1f}"
        f" s after the last one's start (most {max(from_start):.1f} s), of which it takes"
        f" {statistics.median(from_start) - statistics.median(from_serving):.1f} s to serve",
        f"a new address is followed by another host {statistics.median(changed):.1f} s after the"
        f" change (most {max(changed):.1f} s)",
    )


if __name__ == "__main__":
    main()
