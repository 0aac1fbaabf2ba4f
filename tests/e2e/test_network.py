"""What networks do to people: no remembered address, UDP or ephemeral ports blocked, two jobs."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator

import pytest
from lan import Lan
from meshes import GPULAYER, LanMesh, until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(240)]

ENVIRONMENT = """
import json, os, socket
from gpulayer.pytorch import launch
launch(nodes=3, accelerator="cpu", devices=1)
import torch
import torch.distributed as dist
RANK = int(os.environ["RANK"])
dist.init_process_group("gloo")
# A script may meet at a port of its own as well.
with socket.socket() as free:
    free.bind(("", 0))
    port = torch.tensor([free.getsockname()[1]])
dist.broadcast(port, 0)
dist.barrier()
dist.destroy_process_group()
second = f"tcp://{os.environ['MASTER_ADDR']}:{port.item()}"
dist.init_process_group("gloo", init_method=second, rank=RANK, world_size=3)
dist.barrier()
dist.destroy_process_group()
names = ["MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE"]
with open(os.environ["GPULAYER_OUT"] + "/env.json", "w") as file:
    json.dump({name: os.environ[name] for name in names}, file)
"""


@pytest.fixture(scope="module")
def mesh(lan: Lan) -> Iterator[LanMesh]:
    mesh = LanMesh(lan)
    mesh.form()
    yield mesh
    for host in lan:
        host.clear()


def test_commands_find_the_mesh_by_mdns_alone(mesh: LanMesh) -> None:
    peers = next(mesh.laptop.home.rglob("peers.msgpack"))
    peers.unlink()
    assert all(mesh.status()[box.name]["state"] == "alive" for box in mesh.boxes)


def test_ranks_meet_over_the_lan_and_never_over_docker0(mesh: LanMesh) -> None:
    folder = mesh.laptop.home / "environment"
    folder.mkdir()
    (folder / "train.py").write_text(ENVIRONMENT)
    # torch's default port is taken everywhere, e.g. by a job that somebody runs by hand.
    listen = "import socket, time; s = socket.create_server(('', 29500)); time.sleep(600)"
    others = [box.popen(["python", "-c", listen]) for box in mesh.boxes]
    try:
        runs = [mesh.laptop.popen(["python", "train.py"], cwd=folder) for _ in range(2)]
        for run in runs:  # two jobs at once on the same hosts
            assert run.wait(120) == 0, run.output()
        assert all(other.poll() is None for other in others)
    finally:
        for other in others:
            other.kill()
            other.wait()
    found = [json.loads(path.read_text()) for path in folder.rglob("env.json")]
    assert len(found) == 6
    boxes = {box.address for box in mesh.boxes}
    assert {env["MASTER_ADDR"] for env in found} <= boxes
    assert {env["GLOO_SOCKET_IFNAME"] for env in found} == {"eth0"}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in found}) == 2
    assert {env["MASTER_PORT"] for env in found}.isdisjoint({"29500"})
    assert {env["WORLD_SIZE"] for env in found} == {"3"}
    assert sorted(env["RANK"] for env in found) == ["0", "0", "1", "1", "2", "2"]


def test_mesh_works_where_udp_is_blocked_and_says_so(mesh: LanMesh) -> None:
    box = mesh.boxes[0]
    box.block("udp")
    try:
        # Whoever answers sees the box, or the box sees everybody, through TCP.
        until(lambda: any(row["via"] == "tcp" for row in mesh.status().values()), 60, every_s=1)
        assert mesh.state(box.name) == "alive"
    finally:
        box.clear()
    until(lambda: mesh.state(box.name) == "alive", 20)


def refused_before_the_start(mesh: LanMesh) -> str:
    """Run a job on all boxes that may not start; return what was said, with single spaces."""
    started = time.monotonic()
    done = mesh.laptop.run(
        [GPULAYER, "run", "--nodes", "3", "--", "python", "-c", "print('started')"], timeout=60
    )
    print(f"refused after {time.monotonic() - started:.1f} s\n{done.stderr}")
    assert done.returncode == 3, done.stderr
    assert "started" not in done.stdout
    assert "error: the nodes cannot all reach each other" in done.stderr
    return re.sub(" +", " ", done.stderr)


def test_blocked_ephemeral_ports_are_named_before_the_start(mesh: LanMesh) -> None:
    box = mesh.boxes[1]
    box.block("tcp", "32768:60999")  # Linux's ephemeral range; the agents' own port is open
    try:
        said = refused_before_the_start(mesh)
    finally:
        box.clear()
    for other in (mesh.boxes[0], mesh.boxes[2]):
        row = rf"{other.name} {box.name} {box.address} \d+ no answer in 2.0 s works"
        assert re.search(row, said)
        assert f"{other.name} ({other.address})" in said
    assert f"hint: on {box.name}, let TCP ports 32768-60999 in from" in said


def test_ports_blocked_for_one_peer_are_named_with_their_direction(mesh: LanMesh) -> None:
    """A firewall that lets some of them through is found as well."""
    box, other = mesh.boxes[0], mesh.boxes[2]
    box.block("tcp", "51600:60999", sources=[other.address])
    try:
        said = refused_before_the_start(mesh)
    finally:
        box.clear()
    rows = re.findall(r"(\S+) (\S+) (\S+) (\d+) no answer in 2.0 s (works|fails too)", said)
    ((source, target, address, port, back),) = rows
    assert (source, target, address, back) == (other.name, box.name, box.address, "works")
    assert 51600 <= int(port) <= 60999
    assert f"from {other.name} ({other.address})" in said


def test_path_that_loses_full_packets_is_named_before_the_start(mesh: LanMesh) -> None:
    """As a tunnel does whose MTU nobody was told: a handshake fits, and nothing after it."""
    box, other = mesh.boxes[0], mesh.boxes[1]
    box.lose_packets_above(1400, sources=[other.address])
    try:
        said = refused_before_the_start(mesh)
    finally:
        box.clear()
    row = rf"{other.name} {box.name} {box.address} [\d,]+ stops after 0 of 341 KiB works"
    assert re.search(row, said)
    assert f"full packets are lost from {other.name} to {box.name}: lower the MTU" in said


def test_box_that_the_others_cannot_reach_is_left_out_of_a_job_that_can_do_without(
    mesh: LanMesh,
) -> None:
    command = [GPULAYER, "run", "--nodes", "2", "--", "python", "-c", "print('started')"]
    plan = mesh.laptop.run([*command[:2], "--dry-run", *command[2:]])
    (box,) = re.findall(r"^gpulayer: +rank +0 +(\S+)", plan.stderr, re.M)
    mesh.lan[box].block("tcp", "32768:60999")
    try:
        done = mesh.laptop.run(command, timeout=60)
    finally:
        mesh.lan[box].clear()
    assert done.returncode == 0, done.stderr
    said = rf"^gpulayer: \S+ cannot connect to {box}: .*; trying other machines$"
    assert re.search(said, done.stderr, re.M), done.stderr
    hosts = set(re.findall(r"^\[\d\|(\S+)\] started", done.stdout, re.M))
    assert hosts == {one.name for one in mesh.boxes} - {box}


@pytest.mark.parametrize("rank", [0, 2])  # rank 0's node keeps the job
def test_cut_cable_fails_the_job_by_name(mesh: LanMesh, rank: int) -> None:
    run = mesh.laptop.popen(
        [GPULAYER, "run", "--nodes", "3", "--", "python", "-c", "print('up', flush=True);"
         "import time; time.sleep(600)"]
    )  # fmt: skip
    name = run.expect(rf"^\[{rank}\|(\S+)\] up", 60)[1]
    box = mesh.lan[name]
    cut = time.monotonic()
    box.cut()
    try:
        assert run.wait(30) not in (0, 130), run.output()
        print(f"failed {time.monotonic() - cut:.1f} s after the cut")
        assert re.search(rf"{name}.*lost|lost.*{name}", run.output()), run.output()
        # Cut off, it ends its own ranks when nobody renews its lease.
        until(lambda: not box.processes("time.sleep(600)"), cut + 40 - time.monotonic())
    finally:
        box.restore()
    until(lambda: not mesh.ranks(), 30)
    until(lambda: mesh.state(name) == "alive", 60)


def test_nodes_that_start_nothing_are_named_within_a_minute(mesh: LanMesh) -> None:
    folder = mesh.laptop.home / "starts-nothing"
    folder.mkdir()
    (folder / "train.py").write_text("print('up')")
    command = [GPULAYER, "run", "--nodes", "3", "--", "python", "train.py"]
    # The source is on all of them from then on, so nothing but the order to start is missing.
    # A machine that was cut off a moment ago is not alive for every member at once.
    until(lambda: mesh.laptop.run(command, cwd=folder).returncode == 0, 60)
    port = mesh.status()[mesh.boxes[0].name]["addresses"][0].rpartition(":")[2]
    boxes = [box.address for box in mesh.boxes]
    for box in mesh.boxes:
        box.deafen(port, [address for address in boxes if address != box.address])
    started = time.monotonic()
    try:
        done = mesh.laptop.run(command, cwd=folder, timeout=100)
    finally:
        for box in mesh.boxes:
            box.clear()
    took = time.monotonic() - started
    assert done.returncode == 1, done.stderr
    said = re.search(r"not started within 50 s: (.*)", done.stderr)
    assert said, done.stderr
    late = re.findall(r"rank (\d) on (\S+) \(([^)]+)", said[1])
    assert [rank for rank, _, _ in late] == ["1", "2"]
    planned = dict(re.findall(r"^gpulayer:   rank  (\d)  (\S+)", done.stderr, re.MULTILINE))
    assert {rank: name for rank, name, _ in late} == {r: planned[r] for r in ("1", "2")}
    assert all(state for _, _, state in late)
    print(f"failed after {took:.1f} s")
    assert took < 60
    until(lambda: not mesh.ranks(), 40)


SAYS_WHEN = "import time; print('up at', time.time())"


def test_no_rank_starts_before_a_slow_node_has_everything(mesh: LanMesh) -> None:
    folder = mesh.laptop.home / "slow-node"
    folder.mkdir()
    (folder / "train.py").write_text(SAYS_WHEN)
    (folder / "large.bin").write_bytes(os.urandom(40_000_000))
    slow = mesh.boxes[2]
    slow.shape(8)  # 40 s, longer than a reservation that nobody renews
    try:
        started = time.time()
        done = mesh.laptop.run(
            [GPULAYER, "run", "--nodes", "3", "--", "python", "train.py"], cwd=folder, timeout=200
        )
    finally:
        slow.clear()
    assert done.returncode == 0, done.stderr
    times = [float(at) - started for at in re.findall(r"up at ([\d.]+)", done.stdout)]
    print("up after", times)
    assert len(times) == 3
    assert min(times) > 35


COUNTING = """
from gpulayer.pytorch import launch
launch(nodes=3, accelerator="cpu", devices=1)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("up", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
"""


def test_removing_the_node_of_rank_0_ends_its_job(mesh: LanMesh) -> None:
    folder = mesh.laptop.home / "counting"
    folder.mkdir()
    (folder / "train.py").write_text(COUNTING)
    run = mesh.laptop.popen(["python", "train.py"], cwd=folder)
    name = run.expect(r"^\[0\|(\S+)\] up", 60)[1]
    mesh.gpulayer("mesh", "remove", name)
    assert run.wait(60) not in (0, 130), run.output()
    assert "node of rank 0 lost: it was removed from the mesh" in run.output()
    assert name in run.output().splitlines()[-1]
    until(lambda: not mesh.ranks(), 30)
    states = {job["state"] for job in json.loads(mesh.gpulayer("jobs", "--json").stdout)["jobs"]}
    assert "running" not in states
