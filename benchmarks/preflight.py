"""How long it takes to prove that all nodes of a job reach each other, beside the number of them.

Five hosts and a laptop as network namespaces of this machine (root, Linux). Jobs of 2, 3 and 5
nodes are started in turn by `gpulayer run`, and the time is taken around the pre-flight: imports,
every pair both ways on three ephemeral ports with 1 MiB, and a port for rank 0. Beside it the
same without the bulk, so that what the megabyte costs can be seen as a ratio.

    python benchmarks/preflight.py [--repeat 5] [--log benchmarks/results/NAME.txt]

All agents share this machine's cores, so real machines are faster where their network is.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

from lan import Lan, why_unavailable  # noqa: E402
from meshes import LanMesh  # noqa: E402
from reporting import Report, parser  # noqa: E402

BOXES = tuple(f"box-{i}" for i in range(1, 6))
NODES = (2, 3, 5)
AIM_S = 2.0  # for five
TIMED = """
import sys, time
from gpulayer_mesh import starting
from gpulayer.cli import main

preflight = starting.preflight

async def timed(*arguments):
    started = time.monotonic()
    order = await preflight(*arguments)
    print(f"PREFLIGHT {time.monotonic() - started:.4f}", flush=True)
    return order

starting.preflight = timed
if sys.argv.pop(1) == "0":
    starting.BULK_BYTES = 0
sys.exit(main())
"""


def preflight_s(mesh: LanMesh, nodes: int, *, bulk: bool) -> float:
    command = ["python", "-c", TIMED, str(int(bulk)), "run", "--nodes", str(nodes), "--", "true"]
    done = mesh.laptop.run(command, timeout=60)
    found = re.search(r"PREFLIGHT ([\d.]+)", done.stdout)
    if done.returncode != 0 or found is None:
        raise SystemExit(f"the job failed:\n{done.stderr}")
    return float(found[1])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=5, help="jobs of each number of nodes")
    args = options.parse_args()
    if reason := why_unavailable():
        raise SystemExit(f"no test LAN here: {reason}")
    report = Report(args.log)
    took: dict[tuple[int, bool], list[float]] = {(n, b): [] for n in NODES for b in (True, False)}
    with Lan(("laptop", *BOXES)) as lan:
        mesh = LanMesh(lan, BOXES)
        mesh.form()
        for _ in range(args.repeat):
            for nodes, bulk in took:
                took[nodes, bulk].append(preflight_s(mesh, nodes, bulk=bulk))
    for nodes in NODES:
        whole, small = took[nodes, True], took[nodes, False]
        ratio = statistics.median(whole) / statistics.median(small)
        report.say(
            f"{nodes} nodes, {nodes * (nodes - 1):2} directions: median "
            f"{statistics.median(whole):.2f} s (most {max(whole):.2f}), "
            f"{ratio:.1f} times the same without bulk"
        )
    five = statistics.median(took[5, True])
    report.say(
        f"5 nodes / 2 nodes {five / statistics.median(took[2, True]):.1f}",
        f"5 nodes / aim of {AIM_S:.0f} s {five / AIM_S:.2f}",
    )


if __name__ == "__main__":
    main()
