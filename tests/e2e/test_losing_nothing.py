"""Jobs that cannot be lost: agents, ranks, terminals and viewers die, freeze and come back.

Each test names the line of its log that proves it: ranks print numbered lines, so one that was
lost or doubled on any way from the rank to the viewer is seen.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lan import Host, Process, memory_group
from meshes import AGENT, GPULAYER, LanMesh, until

from gpulayer.launcher import SAME_PRESS_S

pytestmark = [pytest.mark.lan, pytest.mark.timeout(120)]

# Prints numbered lines until the file appears, then how many there were.
COUNTS = """
import os, sys, time
with open(os.environ["GPULAYER_OUT"] + "/starts.txt", "a") as file:
    print("started", file=file)
number = 0
while not os.path.exists(sys.argv[1]):
    print("line", number, "x" * 4000)
    number += 1
    time.sleep(0.02)
print("all", number)
sys.exit(7 if os.environ.get("RANK") == "2" else 0)
"""

RAISES = """
import os, threading, time
print("up")
if os.environ["RANK"] == "1":
    threading.Thread(target=time.sleep, args=(600,)).start()  # no daemon: Python waits for it
    print(f"RAISED AT {time.time()}")
    raise ValueError("the flux capacitor is empty")
time.sleep(600)
"""

DEADLOCK = """
import os, signal, time
import torch
import torch.distributed as dist

signal.signal(signal.SIGTERM, lambda *_: None)  # never gets its turn inside native code
dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([a, b]) for a, b in ((0, 1), (1, 2), (0, 2))]
print("in", flush=True)
# Each waits for the next: rank 0 for 1 in the first group, 1 for 2, 2 for 0.
dist.all_reduce(torch.ones(1), group=groups[rank])
print("through", flush=True)
"""

# A free port at the plan may be taken when the store binds it.
TAKEN = """
import os, socket, sys, time
if os.environ["RANK"] == "0":
    taken = socket.create_server(("", int(os.environ["MASTER_PORT"])))
    print("TAKEN", flush=True)
import torch.distributed as dist
dist.init_process_group("gloo")
"""

# Rank 1 is killed at the moment that it is told; the others wait for it.
CRASHES = """
import os, signal, sys, time
moment, rank = sys.argv[1], os.environ["RANK"]

def at(name):
    if (name, rank) == (moment, "1"):
        print("crash at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

class Weights:
    def __reduce__(self):
        at("saving")
        return (dict, ())

at("importing")
if moment in ("importing", "stopping"):
    signal.signal(signal.SIGTERM, lambda *_: (at("stopping"), sys.exit(0)))
    print("up", flush=True)
    time.sleep(600)
import torch
import torch.distributed as dist
at("meeting")
dist.init_process_group("gloo")
print("up", flush=True)
for step in range(10):
    dist.all_reduce(torch.ones(1))
at("training")
torch.save(Weights(), os.environ["GPULAYER_OUT"] + "/weights.pt")
dist.barrier()
time.sleep(600)
"""

DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)"


@pytest.fixture(autouse=True)
def nothing_left(mesh: LanMesh) -> Iterator[None]:
    """No process of a job outlives its end by ten seconds, and no other process is touched."""
    strangers = [box.popen(["sleep", "900"]) for box in mesh.boxes]
    pids = {one.pid for one in strangers}
    yield
    until(lambda: set(job_processes(mesh)) <= pids, 10)
    assert [one.poll() for one in strangers] == [None] * len(strangers)
    for one in strangers:
        one.kill()
        one.wait()


def job_processes(mesh: LanMesh) -> list[int]:
    """Return the processes on all boxes but the agents and what was started with them."""
    return [pid for pid in mesh.ranks() if "sleep 901" not in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def folder_with(mesh: LanMesh, name: str, text: str) -> Path:
    folder = mesh.laptop.home / name
    folder.mkdir()
    (folder / "train.py").write_text(text)
    return folder


def run(mesh: LanMesh, *options: str, command: tuple[str, ...], cwd: Path | None = None) -> Process:
    return mesh.laptop.popen([GPULAYER, "run", *options, "--", *command], cwd=cwd)


def assert_complete(output: str, ranks: int = 3) -> None:
    """Every rank's lines are there, once, in order, up to the number it said."""
    for rank in range(ranks):
        whole = rf"^\[{rank}\|\S+\] (line|all) (\d+)(?: x{{4000}})?$"
        said = re.findall(whole, output, re.MULTILINE)
        numbers = [int(number) for _, number in said]
        assert numbers == list(range(len(numbers))), f"rank {rank}: {numbers}"
        assert [word for word, _ in said[-2:]] == ["line", "all"]


def newest_job(mesh: LanMesh) -> dict[str, object]:
    job: dict[str, object] = json.loads(mesh.gpulayer("jobs", "--json").stdout)["jobs"][0]
    return job


def host_of(mesh: LanMesh, process: Process, rank: int) -> Host:
    return mesh.lan[process.expect(rf"^\[{rank}\|(\S+)\] ", 60)[1]]


def test_killed_agents_cost_neither_line_nor_code_and_start_nothing_twice(mesh: LanMesh) -> None:
    folder = folder_with(mesh, "counts", COUNTS)
    finish = folder / "finish"
    job = run(mesh, "--nodes", "3", command=("python", "train.py", str(finish)), cwd=folder)
    for rank in range(3):
        job.expect(rf"^\[{rank}\|\S+\] line 10 ", 60)
    for box, number in zip(mesh.boxes, ("KILL", "TERM", "KILL"), strict=True):
        mesh.agents[box.name].send_signal(signal.Signals[f"SIG{number}"])
        mesh.agents[box.name].wait(10)
    # Started by hand from a shell that has another program running.
    for box in mesh.boxes:
        shell = ["sh", "-c", 'sleep 901 & exec "$0"', AGENT]
        mesh.agents[box.name] = box.popen(shell)
    seen = len(job.output())
    until(lambda: re.search(r"^\[0\|\S+\] line", job.output()[seen:], re.MULTILINE), 30)
    finish.touch()
    assert job.wait(60) == 7, job.output()
    assert_complete(job.output())
    starts = [path.read_text() for path in folder.rglob("starts.txt")]
    assert starts == ["started\n"] * 3
    assert all(len(box.processes("sleep 901")) == 1 for box in mesh.boxes)


def test_killed_rank_is_named_with_its_signal_and_the_others_are_stopped(mesh: LanMesh) -> None:
    sleep = ("python", "-c", "import time; print('up'); time.sleep(600)")
    job = run(mesh, "--nodes", "3", command=sleep)
    for rank in range(3):
        job.expect(rf"^\[{rank}\|\S+\] up$", 60)
    name = host_of(mesh, job, 1).name
    ranks = {rank["rank"]: rank for rank in newest_job(mesh)["ranks"]}  # type: ignore[attr-defined]
    os.kill(mesh.lan[name].pid_of(ranks[1]["pid"]), signal.SIGKILL)
    assert job.wait(20) == 128 + 9, job.output()
    said = rf"rank 1 on {name} failed: killed by signal 9 \(SIGKILL\).*memory"
    assert re.search(said, job.output()), job.output()
    assert re.search("^gpulayer: ranks 0, 2: stopped$", job.output(), re.MULTILINE), job.output()
    after = newest_job(mesh)["ranks"]
    ends = {rank["rank"]: (rank["signal"], rank["stopped"]) for rank in after}  # type: ignore[attr-defined]
    assert ends == {0: (15, True), 1: (9, False), 2: (15, True)}


# The rank on one machine takes what that has not got.
GROWS = """
import os, sys, time
print("up", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
taken = []
while os.environ["GPULAYER_NODE"] == sys.argv[1]:
    taken.append(b"1" * 2**20)
time.sleep(600)
"""

# What loaders of several processes do with their batches.
SHARES = """
import mmap, os
size = 64 * 2**20
file = os.open("/dev/shm/batch", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, size)
shared = mmap.mmap(file, size)
for page in range(0, size, 4096):
    shared[page] = 1
"""


@pytest.fixture(scope="module")
def poor(mesh: LanMesh) -> Iterator[Host]:
    """A box whose agent and ranks have 512 MiB of memory together, and 16 MiB of it to share."""
    box = mesh.boxes[1]
    groups = Path("/sys/fs/cgroup")
    with memory_group(512 * 2**20) as group:
        kind = "cgroup -o memory" if (groups / "memory").exists() else "cgroup2"
        # A host does not see the machine's /sys.
        start = (
            f"mount -t tmpfs none {groups} && mkdir -p {group.parent} && "
            f"mount -t {kind} none {group.parent} && mount -t tmpfs -o size=16m none /dev/shm && "
            f'echo $$ >{group}/cgroup.procs && exec "$0"'
        )
        stop_agent(mesh, box)
        mesh.agents[box.name] = box.popen(["sh", "-c", start, AGENT])
        until(lambda: mesh.listed(box.name), 30)
        yield box
        stop_agent(mesh, box)
    mesh.start_agent(box)
    until(lambda: mesh.listed(box.name), 30)


def stop_agent(mesh: LanMesh, box: Host) -> None:
    mesh.agents[box.name].interrupt()
    assert mesh.agents[box.name].wait(10) == 0


def test_rank_that_the_kernel_ends_for_memory_is_told_with_peak_and_limit(
    mesh: LanMesh, poor: Host
) -> None:
    folder = folder_with(mesh, "grows", GROWS)
    for number in range(3):
        now = folder / f"now-{number}"
        command = ("python", "train.py", poor.name, str(now))
        job = run(mesh, "--nodes", "3", command=command, cwd=folder)
        for rank in range(3):
            job.expect(rf"^\[{rank}\|\S+\] up$", 60)
        now.touch()
        assert job.wait(60) == 128 + 9, job.output()
        said = (
            rf"^gpulayer: rank \d on {poor.name} failed: killed by the kernel for memory: "
            r"peak (\d+) MiB of 512 MiB \(signal 9, SIGKILL\)$"
        )
        found = re.search(said, job.output(), re.MULTILINE)
        assert found, job.output()
        assert 200 < int(found[1]) < 512
        assert re.search(r"^gpulayer: ranks \d[-, ]+\d: stopped$", job.output(), re.MULTILINE)
    assert mesh.agents[poor.name].poll() is None
    assert mesh.state(poor.name) == "alive"


def test_rank_without_shared_memory_is_told_so(mesh: LanMesh, poor: Host) -> None:
    folder = folder_with(mesh, "shares", SHARES)
    job = run(mesh, "--target", poor.name, command=("python", "train.py"), cwd=folder)
    assert job.wait(60) == 128 + 7, job.output()
    said = r"killed by signal 7 \(SIGBUS\): shared memory \(/dev/shm\) may be full"
    assert re.search(said, job.output()), job.output()


@pytest.mark.parametrize("moment", ["importing", "meeting", "training", "saving", "stopping"])
def test_rank_killed_at_any_moment_ends_the_job_in_15_s(mesh: LanMesh, moment: str) -> None:
    folder = folder_with(mesh, f"crash-{moment}", CRASHES)
    job = run(mesh, "--nodes", "3", command=("python", "train.py", moment), cwd=folder)
    if moment == "stopping":
        for rank in range(3):
            job.expect(rf"^\[{rank}\|\S+\] up$", 60)
        job.interrupt()
    assert job.wait(60) == (130 if moment == "stopping" else 128 + 9), job.output()
    back = time.time()
    crashed = float(re.search(r"crash at (\S+)", job.output())[1])  # type: ignore[index]
    print(f"from the crash to the prompt: {back - crashed:.1f} s")
    assert back - crashed < 15
    if moment != "stopping":
        named = r"^gpulayer: rank 1 on \S+ failed: killed by signal 9 \(SIGKILL\)"
        assert re.search(named, job.output(), re.MULTILINE), job.output()


def test_rank_that_hangs_after_its_traceback_fails_the_job(mesh: LanMesh) -> None:
    folder = folder_with(mesh, "raises", RAISES)
    job = run(mesh, "--nodes", "3", command=("python", "train.py"), cwd=folder)
    assert job.wait(60) == 1, job.output()
    back = time.time()
    words = job.output().splitlines()
    assert "ValueError: the flux capacitor is empty" in words[-2:], job.output()
    raised = float(re.search(r"RAISED AT (\S+)", job.output())[1])  # type: ignore[index]
    print(f"from the exception to the prompt: {back - raised:.1f} s")
    assert back - raised < 15  # the sum of our own waits


def test_rank_0_that_cannot_bind_takes_the_others_along(mesh: LanMesh) -> None:
    folder = folder_with(mesh, "taken", TAKEN)
    job = run(mesh, "--nodes", "3", command=("python", "train.py"), cwd=folder)
    zero = host_of(mesh, job, 0)
    job.expect("EADDRINUSE|address already in use", 60)
    until(lambda: not zero.processes("train.py"), 10, every_s=0.05)
    until(lambda: not [pid for pid in job_processes(mesh) if "train.py" in _command(pid)], 5)
    assert job.wait(20) == 1, job.output()
    assert re.search(r"^gpulayer: rank 0 on \S+ failed: exit code 1$", job.output(), re.MULTILINE)
    assert re.search("EADDRINUSE|address already in use", job.output().splitlines()[-1])


def test_one_interrupt_ends_ranks_in_a_collective_that_cannot_finish(mesh: LanMesh) -> None:
    folder = folder_with(mesh, "deadlock", DEADLOCK)
    command = ("python", "train.py")
    job = run(mesh, "--nodes", "3", "--grace", "2", command=command, cwd=folder)
    for rank in range(3):
        job.expect(rf"^\[{rank}\|\S+\] in$", 60)
    job.interrupt()
    until(lambda: not [pid for pid in job_processes(mesh) if "train.py" in _command(pid)], 2 + 5)
    assert job.wait(10) == 130, job.output()
    assert "through" not in job.output()


def test_second_interrupt_skips_the_grace(mesh: LanMesh) -> None:
    job = run(mesh, "--nodes", "3", "--grace", "600", command=("python", "-c", DEAF))
    for rank in range(3):
        job.expect(rf"^\[{rank}\|\S+\] up$", 60)
    job.interrupt()
    job.expect("Ctrl-C again kills them now", 10)
    until(lambda: newest_job(mesh)["cause"], 10)
    time.sleep(SAME_PRESS_S + 0.1)  # two presses closer than that count as one
    assert job.poll() is None
    job.interrupt()
    assert job.wait(15) == 130, job.output()


def test_closed_terminal_stops_the_job(mesh: LanMesh) -> None:
    job = run(mesh, "--nodes", "2", command=("python", "-c", "print('up'); input()"))
    assert job.wait(30) == 1, job.output()
    *_, named, _, _, last = job.output().splitlines()
    assert re.match(r"gpulayer: rank \d on \S+ failed: exit code 1", named), job.output()
    assert last == "EOFError: EOF when reading a line"
    sleep = ("python", "-c", "import time; print('up'); time.sleep(600)")
    job = run(mesh, "--nodes", "2", command=sleep)
    job.expect(r"^\[1\|\S+\] up$", 60)
    os.kill(job.pid, signal.SIGHUP)
    assert job.wait(20) == 130, job.output()
    assert newest_job(mesh)["state"] == "cancelled"


def test_job_outlives_its_terminal_and_is_followed_from_another_machine(mesh: LanMesh) -> None:
    folder = folder_with(mesh, "nohup", COUNTS)
    finish = folder / "finish"
    command = ["nohup", GPULAYER, "run", "--nodes", "3", "--", "python", "train.py", str(finish)]
    job = mesh.laptop.popen(command, cwd=folder)
    job.expect(r"^\[2\|\S+\] line 10 ", 60)
    os.kill(job.pid, signal.SIGHUP)
    job.expect(r"^\[0\|\S+\] line 50 ", 30)
    assert job.poll() is None
    job.kill()  # and the machine goes off
    job.wait(5)
    ident = str(newest_job(mesh)["job"])
    viewer = mesh.boxes[1].popen([GPULAYER, "attach", ident])
    viewer.expect(r"^\[1\|\S+\] line 60 ", 30)
    finish.touch()
    assert viewer.wait(30) == 7, viewer.output()
    assert_complete(viewer.output())
    other = mesh.boxes[2]
    assert_complete(mesh.gpulayer("logs", ident, host=other).stdout)
    mesh.gpulayer("get", ident, host=other)
    fetched = sorted((other.home / "gpulayer_jobs" / ident).rglob("starts.txt"))
    assert [path.read_text() for path in fetched] == ["started\n"] * 3


SECONDS = """
import os, signal, sys, time
from pathlib import Path
saved = Path(os.environ["GPULAYER_OUT"]) / "saved"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(saved.write_text("stopped") and 0))
second = 0
while not os.path.exists(sys.argv[1]):
    print("second", second, flush=True)
    second += 1
    time.sleep(1)
saved.write_text("finished")
"""


@pytest.mark.parametrize("stays", [True, False])
def test_job_of_a_killed_launcher_goes_on_or_stops_as_it_was_asked(
    mesh: LanMesh, stays: bool
) -> None:
    folder = folder_with(mesh, "stays" if stays else "goes", SECONDS)
    finish = folder / "finish"
    command = ("python", "train.py", str(finish))
    options = () if stays else ("--on-disconnect", "10s")
    job = run(mesh, *options, command=command, cwd=folder)
    job.expect("^second 13$", 60)  # followed for longer than that
    job.kill()
    job.wait(5)
    ident = str(newest_job(mesh)["job"])
    if stays:
        finish.touch()
    until(lambda: newest_job(mesh)["state"] != "running", 60, 1.0)
    last = newest_job(mesh)
    assert last["state"] == ("succeeded" if stays else "cancelled")
    assert last["cause"] == ("" if stays else "its launcher on laptop was gone for 10 s")
    mesh.gpulayer("get", ident)
    saved = mesh.laptop.home / "gpulayer_jobs" / ident / "saved"
    assert saved.read_text() == ("finished" if stays else "stopped")


TRAIN = ("python", "train.py")
LINGERS = """
import os, signal, sys, time
def linger(*_):
    print("lingers", flush=True)
    time.sleep(3)
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, linger)
print("up", flush=True)
while True:
    time.sleep(0.1)
"""


def test_launcher_killed_while_its_job_stops_leaves_nothing(mesh: LanMesh) -> None:
    job = run(mesh, "--nodes", "2", command=TRAIN, cwd=folder_with(mesh, "lingers", LINGERS))
    for rank in (0, 1):
        job.expect(rf"^\[{rank}\|\S+\] up", 60)
    job.interrupt()
    job.expect("lingers$", 20)
    job.kill()
    job.wait(5)
    until(lambda: not any(row["jobs"] for row in mesh.status().values()), 20, every_s=1.0)
    last = newest_job(mesh)
    assert (last["state"], last["cause"]) == ("cancelled", "stopped by laptop")


def test_frozen_viewer_holds_up_nobody_and_misses_nothing(mesh: LanMesh) -> None:
    """What is printed meanwhile, 20 MB, fits no socket: most of it must wait in the node's log."""
    script = (
        "import os, sys\n"
        "for i in range(20): print('line', i)\n"
        "print('up')\n"
        "while not os.path.exists(sys.argv[1]): pass\n"
        "for i in range(20, 20000): print('line', i, 'x' * 1000)\n"
        "print('all 20000')\n"
        "open(sys.argv[1] + '.done', 'w')\n"
        "while not os.path.exists(sys.argv[1] + '.end'): pass\n"
    )
    folder = folder_with(mesh, "frozen", script)
    go = folder / "go"
    job = run(mesh, command=("python", "train.py", str(go)), cwd=folder)
    job.expect("^up$", 60)
    os.kill(job.pid, signal.SIGSTOP)
    try:
        go.touch()
        until(Path(f"{go}.done").exists, 60)
        assert newest_job(mesh)["state"] == "running"
    finally:
        os.kill(job.pid, signal.SIGCONT)
    job.expect("^all 20000$", 60)
    Path(f"{go}.end").touch()
    assert job.wait(30) == 0, job.output()[-2000:]
    numbers = [int(n) for n in re.findall(r"^line (\d+)", job.output(), re.MULTILINE)]
    assert numbers == list(range(20000))


def state_files(box: Host, pattern: str) -> set[Path]:
    return set((box.home / ".local/share/gpulayer").glob(pattern))


def door_port(mesh: LanMesh, box: Host) -> str:
    port: str = mesh.status()[box.name]["addresses"][0].rpartition(":")[2]
    return port


def reservations(mesh: LanMesh, box: Host) -> int:
    return mesh.agents[box.name].output().count(": reserved ")


@pytest.mark.parametrize("moment", ["reserving", "staging", "pre-flight", "starting"])
def test_agent_killed_before_all_ranks_run_is_no_hang(mesh: LanMesh, moment: str) -> None:
    """The launcher is back within 15 s, or the job runs: the agent is started again at once, as a
    service manager does."""
    folder = folder_with(mesh, f"agent-{moment}", COUNTS)
    (folder / "data").write_bytes(os.urandom(3_000_000))
    finish = folder.with_name(f"finish-{moment}")
    box, other = mesh.boxes[1], mesh.boxes[2]
    sign = {"staging": "jobs/*/manifest", "pre-flight": "jobs/*/work", "starting": "jobs/*/status"}
    before = state_files(box, sign.get(moment, "nothing"))
    granted = reservations(mesh, other)
    if moment == "reserving":
        box.deafen(door_port(mesh, box), [mesh.laptop.address])
    elif moment == "staging":
        box.shape(4)
    elif moment == "pre-flight":
        other.block("tcp", "32768:60999")
    job = run(mesh, "--nodes", "3", command=("python", "train.py", str(finish)), cwd=folder)
    if moment == "reserving":
        until(lambda: reservations(mesh, other) > granted, 30, every_s=0.01)
    else:
        until(lambda: state_files(box, sign[moment]) - before, 30, every_s=0.01)
    mesh.agents[box.name].kill()
    killed = time.monotonic()
    mesh.agents[box.name].wait(5)
    box.clear()
    other.clear()
    mesh.start_agent(box)

    def settled() -> bool:
        return job.poll() is not None or bool(re.search(r"^\[2\|\S+\] line 5 ", job.output(), re.M))

    until(settled, 15)
    print(f"settled {time.monotonic() - killed:.1f} s after the kill: {job.poll()}")
    finish.touch()
    code = job.wait(15)
    if code == 7 and moment in ("reserving", "starting"):  # the new agent was there in time
        assert_complete(job.output())
    elif moment == "starting":  # the order of a keeper is on no disk, for it has the secrets
        assert "keeper restarted while the job was starting" in job.output()
    else:
        assert code not in (0, 130), job.output()
        assert "line" not in job.output()
    until(lambda: not any(row["jobs"] for row in mesh.status().values()), 10)


def test_laptop_that_dies_or_sleeps_leaves_only_what_runs(mesh: LanMesh) -> None:
    """Launchers are killed while they reserve, stage and check; one sleeps while it stages, and so
    does one whose job runs. Nothing is heard of the laptop for longer than any lease."""
    one, two, three = mesh.boxes
    large = folder_with(mesh, "large", "print('never')")
    (large / "data").write_bytes(os.urandom(6_000_000))
    small = folder_with(mesh, "small", COUNTS)
    never, counts = ("python", "train.py"), ("python", "train.py", str(small / "finish"))
    runs = run(mesh, "--target", two.name, command=counts, cwd=small)
    runs.expect("^line 5 ", 60)
    three.deafen(door_port(mesh, three), [mesh.laptop.address])
    granted = reservations(mesh, one)
    both = ("--nodes", "2", "--target")
    reserves = run(mesh, *both, f"{one.name},{three.name}", command=never, cwd=small)
    until(lambda: reservations(mesh, one) > granted, 30, every_s=0.01)
    reserves.kill()  # while it dials the other one
    three.clear()
    three.shape(1)  # 48 s for each
    before = state_files(three, "jobs/*/manifest")
    launchers = [run(mesh, "--target", three.name, command=never, cwd=large) for _ in range(2)]
    until(lambda: len(state_files(three, "jobs/*/manifest") - before) == 2, 30)
    stages, sleeps = launchers
    stages.kill()
    before = state_files(one, "jobs/*/work")
    two.block("tcp", "32768:60999")
    checks = run(mesh, *both, f"{one.name},{two.name}", command=never, cwd=small)
    until(lambda: state_files(one, "jobs/*/work") - before, 30, every_s=0.01)
    checks.kill()
    for process in (sleeps, runs):
        process.send_signal(signal.SIGSTOP)
    mesh.laptop.cut()
    gone = time.monotonic()
    two.clear()

    def status(command: str) -> Any:
        return json.loads(mesh.gpulayer(*command.split(), "--json", host=one).stdout)

    def only_what_runs() -> bool:
        nodes = status("mesh status")["nodes"]
        return [row["name"] for row in nodes if row["jobs"]] == [two.name]

    until(only_what_runs, 40)
    print(f"the others were free {time.monotonic() - gone:.1f} s after the last word of the laptop")
    assert status("jobs")["jobs"][0]["state"] != "running"
    (job,) = [job for job in status("jobs")["jobs"] if job["state"] == "running"]
    assert [node["name"] for node in job["nodes"]] == [two.name]
    three.clear()
    mesh.laptop.restore()
    for process in (sleeps, runs):
        process.send_signal(signal.SIGCONT)
    (small / "finish").touch()
    assert sleeps.wait(15) not in (0, 130), sleeps.output()
    assert runs.wait(60) == 0, runs.output()
    numbers = re.findall(r"^(?:line|all) (\d+)(?: x+)?$", runs.output(), re.MULTILINE)
    assert numbers == [str(number) for number in range(len(numbers))]
    assert not [one for one in (*launchers, reserves, checks) if "never" in one.output()]


BARS = """
import time
from tqdm import tqdm
for step in tqdm(range(40), mininterval=0.05, ncols=60):
    time.sleep(0.05)
print("end")
"""


def test_progress_bars_of_several_ranks_are_one_live_line(mesh: LanMesh) -> None:
    folder = folder_with(mesh, "bars", BARS)
    command = [GPULAYER, "run", "--nodes", "2", "--", "python", "train.py"]
    into_file = mesh.laptop.popen(command, cwd=folder)
    assert into_file.wait(60) == 0, into_file.output()
    lines = into_file.output().split("\n")
    assert not any("\r" in line for line in lines)
    bars = [line for line in lines if "it/s" in line]
    assert 2 <= len(bars) <= 4, bars  # the last state of each, at most one more in five seconds
    ours, theirs = pty.openpty()
    try:
        shown = mesh.laptop.popen(command, cwd=folder, stdout=theirs, stderr=theirs)
        os.close(theirs)
        text = b""
        with os.fdopen(ours, "rb", buffering=0, closefd=False) as screen:
            while True:
                try:
                    data = screen.read(65536)
                except OSError:  # Linux: the last user of the other end has gone
                    break
                if not data:
                    break
                text += data
        assert shown.wait(10) == 0, text.decode()
    finally:
        os.close(ours)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text.decode())
    live = re.findall(r"\r\x1b\[K\[(\d)\|", plain)
    assert live.count("0") > 5
    ended = [line for line in plain.replace("\r\n", "\n").split("\n") if "100%" in line]
    assert len(ended) == 2, ended


# Fills the disk, prints on, and makes room when it is told to.
FILLS = """
import os, sys, time
path = os.environ["GPULAYER_OUT"] + "/large"
with open(path, "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass  # it is full
for number in range(20000):
    print("line", number)
open(sys.argv[1] + ".full", "w")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
os.unlink(path)
print("room")
sys.exit(7)
"""


@pytest.fixture
def tight(mesh: LanMesh) -> Iterator[Host]:
    """A box whose agent has 16 MB for everything."""
    box = mesh.boxes[2]
    home = box.home / ".local/share/gpulayer"
    usual = home.with_name("usual")

    stop_agent(mesh, box)
    home.rename(usual)
    home.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", str(home)]
    subprocess.run(mount, check=True)
    try:
        left_out = shutil.ignore_patterns("chunks", "jobs")  # of earlier tests
        shutil.copytree(usual, home, dirs_exist_ok=True, ignore=left_out)
        mesh.start_agent(box)
        until(lambda: mesh.listed(box.name), 30)
        yield box
        stop_agent(mesh, box)
    finally:
        subprocess.run(["umount", "--lazy", str(home)], check=True)
    home.rmdir()
    usual.rename(home)
    mesh.start_agent(box)


def test_full_disk_costs_lines_and_new_jobs_but_neither_agent_nor_exit_code(
    mesh: LanMesh, tight: Host
) -> None:
    folder = folder_with(mesh, "fills", FILLS)
    room = folder / "room"
    here = ("--target", tight.name)
    job = run(mesh, *here, command=("python", "train.py", str(room)), cwd=folder)
    until(Path(f"{room}.full").exists, 60)
    refused = run(mesh, *here, command=("python", "-c", "print('it ran')"), cwd=folder)
    assert refused.wait(30) == 1, refused.output()
    assert "No space left on device" in refused.output().splitlines()[-1]
    assert "it ran" not in refused.output()
    for number in (signal.SIGKILL, signal.SIGTERM):
        mesh.agents[tight.name].send_signal(number)
        mesh.agents[tight.name].wait(10)
        agent = mesh.start_agent(tight)
        agent.expect("serves on port", 30)
        until(lambda: mesh.listed(tight.name), 30)
        assert newest_job(mesh)["state"] == "running"
    room.touch()
    assert job.wait(30) == 7, job.output()
    lines = re.findall(r"^line \d+$", job.output(), re.MULTILINE)
    dropped = re.search(r"disk full, (\d+) bytes dropped", job.output())
    assert dropped, job.output()[-2000:]
    everything = "".join(f"line {number}\n" for number in range(20000))
    assert sum(len(line) + 1 for line in lines) + int(dropped[1]) == len(everything)
    assert lines[-1] == "line 19999"
    again = run(mesh, *here, command=("python", "-c", "print('it ran')"), cwd=folder)
    assert again.wait(30) == 0, again.output()
    assert mesh.agents[tight.name].poll() is None
