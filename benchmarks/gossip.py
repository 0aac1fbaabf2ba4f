"""How soon a whole mesh knows, and what it costs: simulations at 10, 100 and 1,000 nodes.

The agents' own membership machines run in virtual time over a network that loses packets
(`gpulayer_mesh.testing`). For each size and loss: the time until a change of one node is known to
all; the time from a crash until each other node holds the crashed one dead, over all of them;
running nodes that anybody held dead, per hour of one node's life; bytes and packets that a node
sends. Beside it the same simulation of SWIM with a fixed suspicion time and without local health,
which is what memberlist was before Lifeguard, with memberlist's settings for a LAN.

    python benchmarks/gossip.py [--rounds 20] [--log benchmarks/results/NAME.txt]
    python benchmarks/gossip.py --hours 24 [--processes 2] [--log ...]

The second form looks for false deaths only: 1,000 nodes at 5 % loss, an hour at a time, each with a
seed of its own. An hour takes some eight minutes of one core. Virtual time is exact, so that what
is printed depends on the seed and not on the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from gpulayer_mesh.core.swim import SwimConfig
from gpulayer_mesh.core.types import NodeId, NodeState
from gpulayer_mesh.testing import Simulation, node_id
from reporting import Report, parser

SIZES, LOSSES = (10, 100, 1000), (0.0, 0.05, 0.3)
# Members that answer are not waited for longer, and nobody confirms a suspicion.
PLAIN = SwimConfig(awareness_max=0, suspicion_max_mult=1.0)
LIMIT_S = 240.0
SETTLE_S = 60.0  # after a restart, before the next crash
DAY_NODES, DAY_LOSS = 1000, 0.05


def false_deaths(sim: Simulation, crashes: dict[str, list[tuple[float, float]]]) -> int:
    """Count the times that a running node was held dead by somebody.

    Args:
        crashes: node -> when it was down.
    """
    seen = set()
    for when, _, change in sim.changes:
        down = any(start <= when <= end for start, end in crashes.get(change.node, ()))
        if change.new is NodeState.DEAD and not down:
            record = sim.by_id[change.node].machine.record
            seen.add((change.node, record.incarnation, round(when / SETTLE_S)))
    return len(seen)


def measure(n: int, loss: float, config: SwimConfig, rounds: int, seed: int) -> str:
    """Return one row."""
    sim = Simulation(n, seed=seed, loss=loss, config=config)
    sim.run(5.0)
    changed: list[float] = []
    detected: list[float] = []
    crashes: dict[str, list[tuple[float, float]]] = {}
    lives = list(sim.nodes)
    for number in range(rounds):
        subject = 1 + number % (n - 1)
        node = node_id(subject)
        version = 2 + number
        sim.change(0, version)
        changed.append(sim.run_until(lambda version=version: _known(sim, version), LIMIT_S, 0.02))
        sim.run(1.0 + number / rounds)  # crashes fall on all moments of a probe interval
        at, looked = sim.now, len(sim.changes)
        sim.crash(subject)
        sim.run_until(lambda subject=subject: _dead(sim, subject), LIMIT_S, 0.1)
        detected += [
            when - at
            for when, _, change in sim.changes[looked:]
            if change.node == node and change.new is NodeState.DEAD
        ]
        sim.restart(subject, contact=0)
        lives.append(sim.nodes[subject])
        life = sim.nodes[subject].machine.record.incarnation.boot
        sim.run_until(lambda node=node, life=life: _met(sim, node, life), LIMIT_S, 0.5)
        crashes.setdefault(node, []).append((at, sim.now))
        sim.run(SETTLE_S)
    sent = sum(life.bytes_sent for life in lives) / n / sim.now
    packets = sum(life.packets_sent for life in lives) / n / sim.now
    deaths = false_deaths(sim, crashes)
    hundredths = statistics.quantiles(detected, n=100)
    return (
        f"{n:>6} {loss:>5.0%} {statistics.median(changed):>8.2f} {max(changed):>6.2f}"
        f" {statistics.median(detected):>9.2f} {hundredths[98]:>6.2f} {max(detected):>6.2f}"
        f" {deaths:>8} in {n * sim.now / 3600:<6.0f} {sent:>7.0f} {packets:>6.2f}"
    )


def _known(sim: Simulation, version: int) -> bool:
    node = node_id(0)
    return all(one.machine.members[node].record.caps_version == version for one in sim.up())


def _dead(sim: Simulation, subject: int) -> bool:
    return sim.count(subject, NodeState.DEAD) == len(sim.up())


def _met(sim: Simulation, node: NodeId, boot: int) -> bool:
    views = [one.machine.members[node] for one in sim.up()]
    return all(view.record.incarnation.boot == boot for view in views)


def rows(rounds: int, seed: int) -> Iterator[str]:
    head = "   all know (s)    held dead after (s)   false deaths      sent by a node"
    columns = " nodes  loss   median   most    median    99 %   most  in node-hours      B/s  pkt/s"
    for name, config in (("GPULayer", SwimConfig()), ("SWIM, no Lifeguard", PLAIN)):
        yield f"{name:<12}{head}"
        yield columns
        for n in SIZES:
            for loss in LOSSES:
                yield measure(n, loss, config, max(3, rounds * 10 // n if n > 10 else rounds), seed)
        yield ""


def hour(seed: int) -> tuple[int, int, float, float]:
    """Return an hour's seed, its false deaths, bytes per second of a node, and the CPU time."""
    started = time.process_time()
    sim = Simulation(DAY_NODES, seed=seed, loss=DAY_LOSS)
    sim.run(3600.0)
    sent = sum(one.bytes_sent for one in sim.nodes) / DAY_NODES / sim.now
    return seed, false_deaths(sim, {}), sent, time.process_time() - started


def hours(count: int, processes: int, seed: int) -> Iterator[str]:
    deaths = 0
    with ProcessPoolExecutor(processes) as pool:
        for done, (one, found, sent, cpu_s) in enumerate(
            pool.map(hour, range(seed, seed + count)), start=1
        ):
            deaths += found
            yield (
                f"hour {done:>2} of {DAY_NODES} nodes at {DAY_LOSS:.0%} loss (seed {one}):"
                f" {found} false deaths, {sent:.0f} B/s sent per node, {cpu_s:.0f} s of CPU"
            )
    yield f"{deaths} false deaths in {count * DAY_NODES} node-hours"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20, help="crashes of a row; fewer above 100")
    options.add_argument("--hours", type=int, default=0, help="look for false deaths only")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    report = Report(args.log)
    found = (
        hours(args.hours, args.processes, args.seed) if args.hours else rows(args.rounds, args.seed)
    )
    for line in found:
        report.say(line)


if __name__ == "__main__":
    main()
