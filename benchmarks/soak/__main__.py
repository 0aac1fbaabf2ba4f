"""Harm agents, shims, ranks, launchers and machines at random moments of jobs; look for any loss.

    sudo python benchmarks/soak --kills 200 --harms 100 --seed 1

First come jobs without restarts (`kills`), on three machines of the tests' LAN, or, without root
and with --loopback, on agents on loopback; then jobs with restarts (`restarting`), on a LAN of
four. At the end: what descriptors and memory the agents have gained, and whether one of them has
logged a fault. Exits 1 when anything was lost; each loss is printed with what was done before it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

import lan  # noqa: E402
from kills import Kills  # noqa: E402
from places import formed  # noqa: E402
from restarting import Restarting  # noqa: E402


def soak(
    kind: type[Kills | Restarting], boxes: int, count: int, args: argparse.Namespace, loopback: bool
) -> int:
    """Run one kind; return how many losses it has found."""
    where = "loopback" if loopback else "the test LAN"
    what = kind.__name__.lower()
    print(f"{what}: seed {args.seed}, {count} harms, {boxes} agents on {where}", flush=True)
    began = time.monotonic()
    with (
        formed(boxes, loopback=loopback) as mesh,
        tempfile.TemporaryDirectory(prefix="gpl-side-") as folder,
    ):
        one = kind(mesh, Path(folder), args.seed, args.evidence)
        one.run(count)
        one.settle()
        one.check_agents()
        one.report(time.monotonic() - began)
    print(f"violations: {len(one.violations)}\n", flush=True)
    return len(one.violations)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="in jobs without restarts")
    parser.add_argument("--harms", type=int, default=100, help="in jobs with restarts")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--loopback", action="store_true", help="no LAN, for want of root")
    parser.add_argument("--evidence", type=Path, help="a folder for the logs of what went wrong")
    args = parser.parse_args()
    why = lan.why_unavailable()
    loopback = args.loopback or why is not None
    found = 0
    if args.kills:
        found += soak(Kills, 3, args.kills, args, loopback)
    if args.harms and loopback:
        print(f"no jobs with restarts: {why or 'machines of loopback cannot be cut off'}")
    elif args.harms:
        found += soak(Restarting, 4, args.harms, args, loopback)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
