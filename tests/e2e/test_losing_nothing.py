"""Jobs that cannot be lost: agents, ranks, terminals and viewers die, freeze and come back.

Each test names the line of its log that proves it: ranks print numbered lines, so one that was
lost or doubled on any way from the rank to the viewer is seen.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lan import Host, Process
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
    print("line", number)
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
        said = re.findall(rf"^\[{rank}\|\S+\] (line|all) (\d+)$", output, re.MULTILINE)
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
        job.expect(rf"^\[{rank}\|\S+\] line 10$", 60)
    for box in mesh.boxes:
        mesh.agents[box.name].kill()
        mesh.agents[box.name].wait(5)
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
    after = newest_job(mesh)["ranks"]
    ends = {rank["rank"]: (rank["signal"], rank["stopped"]) for rank in after}  # type: ignore[attr-defined]
    assert ends == {0: (15, True), 1: (9, False), 2: (15, True)}


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
    job.expect("EADDRINUSE|address already in use", 60)
    until(lambda: not [pid for pid in job_processes(mesh) if "train.py" in _command(pid)], 10)
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
    assert job.wait(2 + 5 + 5) == 130, job.output()  # 5 s more for a busy machine
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
    job.wait(30)
    assert job.returncode == 1, job.output()
    assert "EOFError: EOF when reading a line" in job.output().splitlines()[-1]
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
    job.expect(r"^\[2\|\S+\] line 10$", 60)
    os.kill(job.pid, signal.SIGHUP)
    job.expect(r"^\[0\|\S+\] line 50$", 30)
    assert job.poll() is None
    job.kill()  # and the machine goes off
    job.wait(5)
    ident = str(newest_job(mesh)["job"])
    viewer = mesh.boxes[1].popen([GPULAYER, "attach", ident])
    viewer.expect(r"^\[1\|\S+\] line 60$", 30)
    finish.touch()
    assert viewer.wait(30) == 7, viewer.output()
    assert_complete(viewer.output())


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
