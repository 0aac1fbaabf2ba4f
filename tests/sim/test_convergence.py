"""Whole meshes in virtual time: how soon everyone knows, and what must never be believed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from gpulayer_mesh.core.membership import CloneSeen
from gpulayer_mesh.core.types import NodeState
from gpulayer_mesh.testing import Simulation, node_id

ALIVE, SUSPECT, DEAD, LEFT = NodeState.ALIVE, NodeState.SUSPECT, NodeState.DEAD, NodeState.LEFT
Note = Callable[[str], None]
SEEDS = 20  # for small meshes, where one run takes milliseconds


def burials(sim: Simulation, *, of: int | None = None, since: float = 0.0) -> list[str]:
    return [
        f"{when:.2f} s at {viewer}: {change.node[:8]} {change.cause}"
        for when, viewer, change in sim.changes
        if change.new is DEAD and when >= since and (of is None or change.node == node_id(of))
    ]


def known(sim: Simulation, subject: int, version: int) -> bool:
    node = node_id(subject)
    return all(n.machine.members[node].record.caps_version == version for n in sim.up())


@pytest.mark.parametrize(
    ("n", "change_limit_s", "suspect_limit_s", "dead_limit_s"),
    [(3, 0.5, 6, 15), (4, 0.5, 6, 15), (10, 1, 6, 15), (100, 2, 12, 25), (1000, 3, 12, 35)],
)
def test_change_and_crash_become_known_to_all_at_flat_load(
    n: int,
    change_limit_s: float,
    suspect_limit_s: float,
    dead_limit_s: float,
    seed: int,
    note: Note,
) -> None:
    changed, suspected, buried = [], [], []
    packets = bytes_ = 0.0
    runs, idle_s, step_s = (SEEDS, 10, 0.01) if n <= 10 else (1, 2, 0.1)
    for run in range(runs):
        sim = Simulation(n, seed=seed + run, check=n <= 10)
        sim.run(2 + run / SEEDS)
        packets -= sum(node.packets_sent for node in sim.nodes) / (n * runs * idle_s)
        bytes_ -= sum(node.bytes_sent for node in sim.nodes) / (n * runs * idle_s)
        sim.run(idle_s)
        packets += sum(node.packets_sent for node in sim.nodes) / (n * runs * idle_s)
        bytes_ += sum(node.bytes_sent for node in sim.nodes) / (n * runs * idle_s)
        sim.change(0, 2)
        changed.append(sim.run_until(lambda s=sim: known(s, 0, 2), change_limit_s))
        sim.run(1)
        crash_at = sim.now
        sim.crash(1)
        sim.run_until(lambda s=sim: s.count(1, SUSPECT) == n - 1, suspect_limit_s, step_s)
        suspected.append(sim.now - crash_at)
        sim.run_until(lambda s=sim: s.count(1, DEAD) == n - 1, dead_limit_s, step_s)
        buried.append(sim.now - crash_at)
        assert len(burials(sim)) == n - 1, "somebody else was buried"
    note(
        f"n={n:<5} change known to all {max(changed):.2f} s; crash: all suspect"
        f" {max(suspected):.2f} s, dead {max(buried):.2f} s (worst of {runs});"
        f" idle {packets:.2f} packets/s and {bytes_:.0f} B/s sent per node"
    )
    assert packets <= 2.2, "a ping and an ack a second, whatever n is"
    assert bytes_ <= 700


def test_nobody_is_buried_in_an_hour_at_thirty_percent_loss(seed: int, note: Note) -> None:
    sim = Simulation(10, seed=seed, loss=0.3)
    sim.run(3600)
    suspected = sum(change.new is SUSPECT for _, _, change in sim.changes) / 9
    packets = sum(node.packets_sent for node in sim.nodes) / 36_000
    note(
        f"n=10, 30 % loss for an hour: {len(burials(sim))} false deaths, {suspected:.0f} suspicions"
        f" refuted, {packets:.1f} packets/s per node"
    )
    assert burials(sim) == []
    sim.loss = 0.0
    sim.run_until(sim.all_alive, 30)


@pytest.mark.parametrize("n", [3, 4, 10])
def test_stalled_node_refutes_within_a_second_and_accuses_nobody(
    n: int, seed: int, note: Note
) -> None:
    worst_s = 0.0
    for run in range(SEEDS):
        sim = Simulation(n, seed=seed + run, check=True)
        sim.run(3 + run / SEEDS)
        sim.stall(0, 10)
        sim.run(10)
        assert sim.count(0, ALIVE) < n - 1
        worst_s = max(worst_s, sim.run_until(sim.all_alive, 1.0))
        sim.run(20)
        assert {change.node for _, _, change in sim.changes if change.new is SUSPECT} == {
            node_id(0)
        }
    note(f"n={n:<5} after a stall of 10 s: alive at all {worst_s:.2f} s later (worst of {SEEDS})")


@pytest.mark.parametrize("n", [3, 4, 10])
def test_stall_of_four_and_a_half_seconds_buries_nobody(n: int, seed: int) -> None:
    for run in range(SEEDS):
        sim = Simulation(n, seed=seed + run, check=True)
        sim.run(3 + run / SEEDS)
        sim.stall(0, 4.5)
        sim.run(10)
        assert burials(sim) == []
        assert sim.all_alive()


@pytest.mark.parametrize("n", [3, 4, 10])
def test_restarted_node_is_soon_alive_at_all(n: int, seed: int, note: Note) -> None:
    worst_s = 0.0
    for run in range(SEEDS):
        sim = Simulation(n, seed=seed + run, check=True)
        sim.run(3)
        sim.crash(1)
        sim.run(run)  # alive, suspect or dead in the others' view
        sim.restart(1, contact=0)
        worst_s = max(worst_s, sim.run_until(sim.all_alive, 1.0 if n < 10 else 2.0))
    note(f"n={n:<5} restarted node alive at all {worst_s:.2f} s after first contact")


@pytest.mark.parametrize(
    ("n", "cut", "limit_s"), [(3, 1, 10), (4, 2, 10), (10, 5, 10), (10, 1, 10), (100, 50, 30)]
)
def test_healed_partition_converges(
    n: int, cut: int, limit_s: float, seed: int, note: Note
) -> None:
    worst_s = 0.0
    for run in range(SEEDS if n <= 10 else 1):
        sim = Simulation(n, seed=seed + run, check=n < 10)
        sim.run(2)
        sim.partition(list(range(cut)), list(range(cut, n)))
        sim.run(40 + run)
        # A lone node doubts itself more than the others and may still hold some of them alive.
        assert sim.state_at(n - 1, 0) is DEAD
        sim.change(0, 2)
        sim.change(n - 1, 2)
        sim.run(5)
        sim.heal()
        worst_s = max(worst_s, sim.run_until(sim.all_alive, limit_s, n / 1000))
    note(
        f"n={n:<5} partition {cut}/{n - cut} of a minute: all alive {worst_s:.2f} s after it heals"
    )


def test_islands_that_never_met_merge_by_one_contact(seed: int) -> None:
    sim = Simulation(10, seed=seed, met=False, check=True)
    for i in (1, 2, 3, 4):
        sim.introduce(i, 0)
    for i in (6, 7, 8, 9):
        sim.introduce(i, 5)
    sim.run(5)
    assert sim.state_at(0, 5) is None
    sim.introduce(3, 8)
    sim.run_until(sim.all_alive, 2.0)


@pytest.mark.parametrize("n", [10, 100])
def test_nodes_that_know_one_member_learn_of_all(n: int, seed: int, note: Note) -> None:
    sim = Simulation(n, seed=seed, met=False)
    for i in range(1, n):
        sim.introduce(i, 0)
    took_s = sim.run_until(sim.all_alive, 35.0, n / 1000)
    note(f"n={n:<5} all join through one member at once: all know all after {took_s:.2f} s")


def test_half_of_a_mesh_crashing_at_once_is_noticed_by_the_rest(seed: int, note: Note) -> None:
    worst_s = 0.0
    for run in range(SEEDS):
        sim = Simulation(10, seed=seed + run, check=True)
        sim.run(2)
        for i in range(5):
            sim.crash(i)
        all_dead = lambda s=sim: all(s.count(i, DEAD) == 5 for i in range(5))  # noqa: E731
        worst_s = max(worst_s, sim.run_until(all_dead, 60))
        assert all(sim.count(i, ALIVE) == 4 for i in range(5, 10))
    note(f"n=10    five crash at once: all dead at all others after {worst_s:.2f} s")


@pytest.mark.parametrize("blocked", [(0,), (0, 1, 2, 3)])
def test_mesh_without_udp_works_over_streams(blocked: tuple[int, ...], seed: int) -> None:
    sim = Simulation(4, seed=seed, check=True)
    sim.block_udp(*blocked)
    sim.run(60)
    assert sim.all_alive()
    assert not any(change.new is not ALIVE for _, _, change in sim.changes)
    assert {sim.nodes[i].machine.members[node_id(0)].via for i in (1, 2, 3)} == {"tcp"}
    sim.change(0, 2)
    sim.run_until(lambda: known(sim, 0, 2), 1.0)
    sim.crash(0)
    sim.run_until(lambda: sim.count(0, DEAD) == 3, 15)


def test_sleeping_laptop_wakes_without_accusing_anyone(seed: int) -> None:
    for run in range(3):
        sim = Simulation(4, seed=seed + run, check=True)
        sim.run(3 + run / 3)
        sim.suspend(0)
        sim.run(600)
        assert sim.count(0, DEAD) == 3
        asleep_until = sim.now
        sim.wake(0)
        sim.run_until(sim.all_alive, 2.0)
        sim.run(30)
        accused = {c.node for when, _, c in sim.changes if c.new is SUSPECT and when > asleep_until}
        assert accused == set()


def test_leaving_node_is_never_suspected(seed: int) -> None:
    sim = Simulation(10, seed=seed, check=True)
    sim.run(3)
    sim.leave(4)
    sim.run_until(lambda: sim.count(4, LEFT) == 9, 1.0)
    sim.run(60)
    assert {change.new for _, _, change in sim.changes if change.node == node_id(4)} == {LEFT}


def test_copied_identity_is_named_by_the_copy_with_the_older_boot(seed: int) -> None:
    """Two machines under one id: the one that sees a newer life of itself knows."""
    sim = Simulation(4, seed=seed)
    sim.run(2)
    original = sim.nodes[0]
    sim.restart(0, contact=1)
    original.up = True  # it runs on, and push-pull shows it the other
    sim.effects_of[0] = []
    sim.run(120)
    assert any(isinstance(effect, CloneSeen) for effect in sim.effects_of[0])


def test_random_faults_break_no_invariant_and_heal(seed: int) -> None:
    for run in range(SEEDS):
        rng = random.Random(seed + run)
        n = rng.randrange(3, 9)
        sim = Simulation(n, seed=seed + run, loss=rng.choice((0.0, 0.1, 0.3)), check=True)
        for _ in range(40):
            sim.run(rng.random() * 6)
            i, j = rng.sample(range(n), 2)
            node = sim.nodes[i]
            match rng.randrange(7):
                case 0:
                    sim.crash(i)
                case 1:
                    sim.restart(i, contact=j)
                case 2:
                    sim.stall(i, rng.random() * 12)
                case 3:
                    sim.partition([i], [k for k in range(n) if k != i])
                case 4:
                    sim.heal()
                case 5 if node.up and node.stalled_until < sim.now:
                    sim.change(i, rng.randrange(2**31))
                case _:
                    sim.block_udp(i)
        sim.heal()
        sim.loss = 0.0
        for i, node in enumerate(sim.nodes):
            if not node.up:
                sim.restart(i, contact=(i + 1) % n)
        sim.run(2)
        for i in range(n):  # an agent goes on dialling whom it remembers
            sim.introduce(i, (i + 1) % n)
        sim.run_until(sim.all_alive, 90)


def test_same_seed_gives_the_same_run(seed: int) -> None:
    runs = []
    for _ in range(2):
        sim = Simulation(10, seed=seed, loss=0.2)
        sim.run(10)
        sim.crash(3)
        sim.run(30)
        runs.append((sim.events, sim.changes, [node.bytes_sent for node in sim.nodes]))
    assert runs[0] == runs[1]


def test_failure_names_the_seed(seed: int) -> None:
    sim = Simulation(3, seed=seed)
    with pytest.raises(AssertionError) as failure:
        sim.run_until(lambda: False, 1.0)
    assert any(f"seed {seed}" in line for line in failure.value.__notes__)
