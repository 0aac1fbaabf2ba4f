"""The doctor on a LAN: each fault that Linux can have is made, found, named, and put right again.

One mesh is shared; the laptop runs no agent, except where a test says so. `copy` is a machine that
belongs to no mesh until it gets somebody else's state.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeLan
from lan import Host, Lan
from meshes import GPULAYER, LanMesh, until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(180)]

PORT = "17433"
SMALL_SHM = "mount -t tmpfs -o size=24m shm /dev/shm"
# A broken installation, as a wrong CUDA leaves it.
BROKEN_TORCH = "raise ImportError('libcudart.so.12: cannot open shared object file')\n"
KEEPS_MDNS = """
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 5353))
print("bound", flush=True)
time.sleep(600)
"""
KEEPS_PORT = KEEPS_MDNS.replace("SOCK_DGRAM", "SOCK_STREAM").replace(
    '("", 5353))', '("", 17433)); s.listen()'
)
FLOODS_MDNS = """
import os, socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print("bound", flush=True)
while True:
    s.sendto(os.urandom(1400), ("224.0.0.251", 5353))
    time.sleep(0.0005)
"""
TWELVE_HOURS_OFF = "import time; now = time.time; time.time = lambda: now() + 43200\n"


@pytest.fixture(scope="module")
def lan(make_lan: MakeLan) -> Lan:
    return make_lan(("laptop", "box-1", "box-2", "box-3", "copy"))


@pytest.fixture(autouse=True)
def put_right(lan: Lan) -> Iterator[None]:
    yield
    for host in lan:
        host.clear()


def doctor(
    host: Host, *, before: str = "", env: dict[str, str] | None = None
) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    """Run it; return its exit code, the verdicts by name, and all it said.

    Args:
        before: shell commands that set the stage, in a mount namespace of their own.
    """
    argv = [GPULAYER, "doctor", "--json"]
    if before:
        argv = ["sh", "-ec", f'{before}; exec "$0" "$@"', *argv]
    done = host.run(argv, timeout=60, env=env)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    found = {verdict["name"]: verdict for verdict in report["verdicts"]}
    errors = [verdict for verdict in report["verdicts"] if verdict["severity"] == "error"]
    assert done.returncode == bool(errors)
    assert all(verdict["fix"] for verdict in report["verdicts"])
    print(f"{report['took_s']:.1f} s: {', '.join(found)}")
    return done.returncode, found, report


@contextmanager
def running(host: Host, program: str) -> Iterator[int]:
    """Run a Python program that says when it is ready."""
    process = host.popen(["python", "-c", program])
    process.expect("bound", 20)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_healthy_mesh_gets_no_verdict(mesh: LanMesh) -> None:
    code, found, report = doctor(mesh.laptop)
    assert (code, found) == (0, {})
    assert set(report["unchecked"]) <= {"torch"}  # which may take longer on a busy machine


def test_flood_of_multicast_neither_stops_nor_frightens_it(mesh: LanMesh) -> None:
    with running(mesh.lan["copy"], FLOODS_MDNS):
        code, found, _ = doctor(mesh.laptop)
    assert code == 0
    assert set(found) <= {"multicast-blocked", "container-without-multicast"}  # drowned


def test_box_with_an_agent_is_looked_at_through_it(mesh: LanMesh) -> None:
    code, found, report = doctor(mesh.boxes[0])
    assert (code, found) == (0, {})
    assert report["here"] == "box-1"
    assert "torch" in report["checked"]


def test_machine_without_a_mesh_is_looked_at_alone(mesh: LanMesh) -> None:
    code, found, report = doctor(mesh.lan["copy"])
    assert (code, set(found)) == (0, {"no-mesh"})
    assert "multicast" in report["checked"]
    assert "members" in report["unchecked"]
    assert not list(mesh.lan["copy"].home.rglob("identity.key"))


def test_own_firewall_that_drops_multicast(mesh: LanMesh) -> None:
    mesh.laptop.block("udp", "5353")
    code, found, _ = doctor(mesh.laptop)
    assert (code, set(found)) == (0, {"multicast-blocked"})
    assert "own firewall drops UDP port 5353" in found["multicast-blocked"]["finding"]


def drop_multicast(host: Host, *sources: str) -> None:
    """Drop what comes from these addresses, as a bridge or an access point would."""
    for source in (["-s", source] for source in sources):
        rule = ["-A", "INPUT", "-i", "eth0", *source, "-p", "udp", "--dport", "5353", "-j", "DROP"]
        host.run(["iptables", "-w", *rule], check=True)


def test_network_that_passes_no_multicast_of_one_machine(mesh: LanMesh) -> None:
    drop_multicast(mesh.laptop, mesh.boxes[0].address)
    code, found, _ = doctor(mesh.laptop)
    assert (code, set(found)) == (0, {"multicast-blocked"})
    assert "mDNS of box-1 does not arrive here" in found["multicast-blocked"]["finding"]


def test_network_that_passes_no_multicast_and_the_same_in_a_container(mesh: LanMesh) -> None:
    drop_multicast(mesh.laptop, *(box.address for box in mesh.boxes))
    if not Path("/.dockerenv").exists():  # else this very machine is a container
        _, found, _ = doctor(mesh.laptop)
        assert set(found) == {"multicast-blocked"}
        assert "box-1, box-2 and box-3" in found["multicast-blocked"]["finding"]
    inside = "mount -t tmpfs run /run && touch /run/.containerenv"
    code, found, _ = doctor(mesh.laptop, before=inside)
    assert (code, set(found)) == (0, {"container-without-multicast"})


def test_firewall_that_lets_a_box_out_and_nobody_in(mesh: LanMesh) -> None:
    mesh.boxes[0].block("tcp", PORT)
    code, found, _ = doctor(mesh.laptop)
    assert code == 1
    verdict = found["firewall-one-way"]
    assert verdict["node"] == "box-1"
    assert "cannot connect to box-1 (TCP port 17433)" in verdict["finding"]
    assert "member-unreachable" not in found
    # The box itself sees the same from inside.
    code, found, _ = doctor(mesh.boxes[0])
    assert (code, set(found)) == (1, {"firewall-one-way"})
    assert "box-2 and box-3 cannot connect to this machine" in found["firewall-one-way"]["finding"]


def test_firewall_between_two_boxes_names_its_direction(mesh: LanMesh) -> None:
    one, other = mesh.boxes[1:]
    # New connections only, so that the answers to its own get through.
    rule = ["-A", "INPUT", "-i", "eth0", "-s", other.address, "-p", "tcp", "--syn", "-j", "DROP"]
    one.run(["iptables", "-w", *rule], check=True)
    code, found, _ = doctor(mesh.laptop)
    assert (code, set(found)) == (1, {"firewall-one-way"})
    finding = found["firewall-one-way"]["finding"]
    assert f"{other.name} cannot connect to {one.name}" in finding
    assert f"{one.name} connects to {other.name}" in finding


def test_network_that_isolates_its_clients(mesh: LanMesh) -> None:
    """box-3 stands for the cable and the gateway: it sees everybody."""
    apart = [mesh.laptop, *mesh.boxes[:2]]
    gateway = mesh.boxes[2]
    for host in apart:
        host.isolate(True)
    mesh.laptop.run(["ip", "route", "replace", "default", "via", gateway.address], check=True)
    mesh.laptop.run(["ip", "neigh", "flush", "dev", "eth0"], check=True)
    try:
        code, found, _ = doctor(mesh.laptop)
    finally:
        for host in apart:
            host.isolate(False)
        mesh.laptop.run(["ip", "route", "replace", "default", "dev", "eth0"], check=True)
    assert code == 1
    finding = found["wifi-isolation"]["finding"]
    assert gateway.address in finding
    assert "box-1 and box-2" in finding
    assert "member-unreachable" not in found


def test_ports_that_others_have(mesh: LanMesh) -> None:
    with running(mesh.laptop, KEEPS_PORT):
        code, found, _ = doctor(mesh.laptop)
        assert (code, set(found)) == (0, {"port-taken"})
        assert "TCP port 17433 is taken by python" in found["port-taken"]["finding"]
    with running(mesh.laptop, KEEPS_MDNS):
        code, found, _ = doctor(mesh.laptop)
        assert (code, set(found)) == (0, {"port-taken"})
        assert "UDP port 5353 is kept by python" in found["port-taken"]["finding"]


def test_small_memory_a_full_disk_and_a_broken_torch(mesh: LanMesh) -> None:
    home = mesh.laptop.home / "small"
    broken = mesh.laptop.home / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(BROKEN_TORCH)
    home.mkdir(mode=0o700)
    full = f"mount -t tmpfs -o size=4m,mode=700 disk {home}"
    code, found, _ = doctor(
        mesh.laptop,
        before=f"{SMALL_SHM}; {full}",
        env={"GPULAYER_HOME": str(home), "PYTHONPATH": str(broken.parent)},
    )
    assert code == 1
    assert set(found) == {"shared-memory-small", "disk-full", "torch-unusable", "no-mesh"}
    assert "libcudart.so.12" in found["torch-unusable"]["finding"]
    assert str(home) in found["disk-full"]["finding"]


def test_state_that_others_could_read(mesh: LanMesh) -> None:
    home = mesh.laptop.home / "open"
    env = {"GPULAYER_HOME": str(home)}
    mesh.laptop.run([GPULAYER, "mesh", "create"], env=env, check=True)
    (home / "identity.key").chmod(0o644)
    code, found, _ = doctor(mesh.laptop, env=env)
    assert (code, set(found)) == (1, {"state-unusable"})
    assert "chmod 600" in found["state-unusable"]["fix"]


def test_clock_that_is_off_and_an_agent_that_is_gone(mesh: LanMesh) -> None:
    folder = mesh.laptop.home / "off"
    folder.mkdir()
    (folder / "usercustomize.py").write_text(TWELVE_HOURS_OFF)
    (folder / "sitecustomize.py").write_text(TWELVE_HOURS_OFF)
    _, found, _ = doctor(mesh.laptop, env={"PYTHONPATH": str(folder)})
    assert set(found) == {"clock-skew"}
    assert "this machine's clock is 12.0 h ahead of" in found["clock-skew"]["finding"]
    mesh.boxes[0].kill_all()
    _, found, _ = doctor(mesh.laptop)
    verdict = found["member-unreachable"]  # an error until the others miss it as well
    assert (verdict["node"], verdict["fix"]) == ("box-1", "start gpulayer-agent on box-1")
    mesh.start_agent(mesh.boxes[0])
    until(lambda: mesh.state("box-1") == "alive", 60, every_s=1)


def test_copied_identity(mesh: LanMesh) -> None:
    box, copy = mesh.boxes[2], mesh.lan["copy"]
    state = next(box.home.rglob("identity.key")).parent
    target = copy.home / state.relative_to(box.home)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(state, target, ignore=shutil.ignore_patterns("agent.*"))
    mesh.start_agent(copy)
    mesh.agents[box.name].expect("another machine uses this machine's identity", 60)
    code, found, _ = doctor(mesh.laptop)
    assert code == 1
    verdict = found["identity-copied"]
    assert verdict["node"] == "box-3"
    assert box.address in verdict["finding"]
    assert copy.address in verdict["finding"]
    # On either of both it is this machine's identity.
    code, found, _ = doctor(box)
    assert code == 1
    assert found["identity-copied"]["here"]
    assert copy.address in found["identity-copied"]["finding"]
