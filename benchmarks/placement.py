"""What placing by measured links is worth: step times of a real DDP job on two switches.

Eight hosts and a laptop as network namespaces of this machine (root, Linux), four hosts on each of
two switches, and a slow trunk between them. The agents measure their links until all show the two
zones. Then one DDP job of four ranks runs on the nodes, and in the order, that the mesh's plan
names; on random ones; on the worst, two and two with every neighbour beyond the trunk; and on two
and two in the order that the mesh gives these. All are started in the same way, by hand, so nothing
but nodes and order differs. Beside it: how long a plan takes in a mesh of 1,000 nodes.

    python benchmarks/placement.py [--random 8] [--steps 20] [--log benchmarks/results/NAME.txt]

What is printed is measured on this machine and says nothing about another one.
"""

from __future__ import annotations

import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

from gpulayer_mesh.core.placement import Request, plan  # noqa: E402
from lan import Lan, why_unavailable  # noqa: E402
from mesh_cases import large_mesh  # noqa: E402
from meshes import LanMesh, until  # noqa: E402
from reporting import Report, parser  # noqa: E402

HOST_MBIT, TRUNK_MBIT = 200.0, 50.0
BOXES = tuple(f"box-{i}" for i in range(1, 9))
# Alternately on the two switches, so that the order of names is no help.
UPSTAIRS, DOWNSTAIRS = BOXES[::2], BOXES[1::2]
PORT = 29500
WARM_UP = 3  # steps that are not counted: the first ones build buckets and connections
SCRIPT = """
import statistics, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(512, 512))  # 1 MiB of gradients, hardly any work
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(8, 512)
took = []
for _ in range(int(sys.argv[1])):
    started = time.monotonic()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    took.append(time.monotonic() - started)
print(f"STEP {statistics.median(took[int(sys.argv[2]):]):.6f}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def planned(mesh: LanMesh, *options: str) -> list[str]:
    """Return the nodes that the mesh chooses, in the order of their ranks."""
    command = ("run", "--nodes", "4", *options, "--dry-run", "--", "python", "-c", "pass")
    order = re.findall(r"rank +\d+ +(box-\d)", mesh.gpulayer(*command).stderr)
    assert len(order) == 4, order
    return order


def step_s(mesh: LanMesh, order: Sequence[str], port: int, steps: int) -> float:
    """Run the job on these nodes; return the median step time of rank 0."""
    runs = []
    for rank, name in enumerate(order):
        environ = {
            "MASTER_ADDR": mesh.lan[order[0]].address,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(order)),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        command = ["python", "-c", SCRIPT, str(steps + WARM_UP), str(WARM_UP)]
        runs.append(mesh.lan[name].popen(command, env=environ))
    took = float(runs[0].expect(r"STEP ([\d.]+)", 180)[1])
    for run in runs:
        run.wait(60)
    return took


def wait_for_zones(mesh: LanMesh) -> float:
    """Wait until every box is in the zone of its switch; return the seconds that took."""
    expected = dict.fromkeys(UPSTAIRS, f"~{UPSTAIRS[0]}")
    expected |= dict.fromkeys(DOWNSTAIRS, f"~{DOWNSTAIRS[0]}")

    def found() -> bool:
        rows = mesh.status()
        return {name: rows[name]["zone"] for name in BOXES} == expected

    started = time.monotonic()
    until(found, 600, every_s=2.0)
    return time.monotonic() - started


def plan_lines() -> list[str]:
    snapshot = large_mesh(0)
    lines = []
    for nodes in (1, 4, 100, 1000):
        took = []
        for _ in range(10):
            started = time.process_time()
            plan(Request(nodes=nodes), snapshot)
            took.append(time.process_time() - started)
        median_ms, best_ms = 1000 * statistics.median(took), 1000 * min(took)
        lines.append(
            f"plan of {nodes} of 1,000 nodes, {len(snapshot.links):,} links: "
            f"median {median_ms:.0f} ms of CPU, best {best_ms:.0f}"
        )
    return lines


def result_lines(
    aware: list[float], at_random: list[float], worst: list[float], ordered: list[float]
) -> list[str]:
    rows = {
        "chosen by the mesh": aware,
        "random nodes and order": at_random,
        "two and two, interleaved": worst,
        "two and two, ordered by the mesh": ordered,
    }
    lines = [
        f"{name:34} mean {1000 * statistics.mean(took):.0f} ms a step "
        f"({1000 * min(took):.0f} to {1000 * max(took):.0f}, {len(took)} jobs)"
        for name, took in rows.items()
    ]
    base = statistics.mean(aware)
    return [
        *lines,
        f"random / chosen       {statistics.mean(at_random) / base:.2f} (aim: at least 1.38)",
        f"worst / chosen        {statistics.mean(worst) / base:.2f}",
        f"interleaved / ordered {statistics.mean(worst) / statistics.mean(ordered):.2f}",
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--random", type=int, default=8, help="random placements to run")
    options.add_argument("--repeat", type=int, default=4, help="jobs of each other placement")
    options.add_argument("--steps", type=int, default=20, help="counted steps of a job")
    options.add_argument("--seed", type=int, default=0, help="of the random placements")
    args = options.parse_args()
    report = Report(args.log)
    report.say(
        f"{args.steps} steps a job, hosts at {HOST_MBIT:.0f} Mbit/s, a trunk of "
        f"{TRUNK_MBIT:.0f} Mbit/s between 4 and 4",
        *plan_lines(),
    )
    if reason := why_unavailable():
        raise SystemExit(f"no test LAN here: {reason}")
    rng = random.Random(args.seed)
    aware: list[float] = []
    at_random: list[float] = []
    worst: list[float] = []
    ordered: list[float] = []
    with Lan(("laptop", *BOXES)) as lan:
        lan.split(DOWNSTAIRS, TRUNK_MBIT)
        for name in BOXES:
            lan[name].shape(HOST_MBIT)
        mesh = LanMesh(lan, BOXES)
        mesh.form()
        report.say(f"both zones known {wait_for_zones(mesh):.0f} s after all were listed")
        interleaved = [UPSTAIRS[0], DOWNSTAIRS[0], UPSTAIRS[1], DOWNSTAIRS[1]]
        jobs: list[tuple[str, list[str], list[float]]] = []
        for _ in range(args.repeat):
            jobs.append(("chosen", planned(mesh), aware))
            jobs.append(("worst", interleaved, worst))
            target = ",".join(interleaved)
            jobs.append(("ordered", planned(mesh, "--target", target), ordered))
        jobs += [("random", rng.sample(BOXES, 4), at_random) for _ in range(args.random)]
        rng.shuffle(jobs)  # what else the machine does falls on all alike
        for i, (name, order, took) in enumerate(jobs):
            took.append(step_s(mesh, order, PORT + i, args.steps))
            print(f"{name:8} {' '.join(order)}  {1000 * took[-1]:.0f} ms a step", flush=True)
    report.say(*result_lines(aware, at_random, worst, ordered))


if __name__ == "__main__":
    main()
