"""Jobs that would wait for ever: a rank that is stopped, a path between two machines that is cut.

And jobs that only look so: one rank at work alone, and a network that loses a fifth of all packets.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lan import Host, Lan, Process
from meshes import GPULAYER, LanMesh, until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(240)]

# Ranks add up all the time. While a file called `alone` is there, rank 0 does not, and the others
# wait for it.
ADDS = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
mark = sys.argv[1]
# As the Trainer has it: no collective ends by itself.
dist.init_process_group("gloo", timeout=datetime.timedelta(days=1))
rank = dist.get_rank()
print("up, attempt", os.environ.get("GPULAYER_RESTART", "0"), flush=True)
while True:
    if rank == 0 and os.path.exists(mark + ".alone"):
        print("alone", flush=True)
        while os.path.exists(mark + ".alone"):
            time.sleep(0.05)
        print("back", flush=True)
    done = torch.tensor([float(rank == 0 and os.path.exists(mark + ".finish"))])
    dist.all_reduce(done)
    if done:
        break
print("finished", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def whole(mesh: LanMesh) -> Iterator[LanMesh]:
    until(mesh.listed, 60)
    yield mesh
    for box in mesh.boxes:
        box.clear()
    until(lambda: not mesh.ranks(), 60)


class Run:
    """The script, begun on some boxes."""

    def __init__(self, mesh: LanMesh, name: str, *options: str) -> None:
        folder = mesh.laptop.home / name
        folder.mkdir()
        (folder / "adds.py").write_text(ADDS)
        self._marks = mesh.laptop.home / f"{name}-mark"
        command = [GPULAYER, "run", *options, "--", "python", "adds.py", str(self._marks)]
        self.process: Process = mesh.laptop.popen(command, cwd=folder)
        self._mesh = mesh

    def mark(self, what: str) -> Path:
        return self._marks.with_name(f"{self._marks.name}.{what}")

    def host_of(self, rank: int) -> Host:
        return self._mesh.lan[self.process.expect(rf"^\[{rank}\|(\S+)\] up, attempt 0", 60)[1]]

    def finish(self) -> None:
        self.mark("finish").touch()
        assert self.process.wait(60) == 0, self.process.output()
        assert self.process.output().count("] finished") >= 2


def stop(box: Host) -> None:
    (pid,) = [pid for pid in box.processes("adds.py") if "shim" not in _command(pid)]
    os.kill(pid, signal.SIGSTOP)


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def cut_data(mesh: LanMesh, one: Host, other: Host) -> None:
    """Let nothing but the agents' own traffic pass between two boxes."""
    port = mesh.status()[one.name]["addresses"][0].rpartition(":")[2]
    for here, there in ((one, other), (other, one)):
        assert mesh.status()[there.name]["addresses"][0].endswith(f":{port}")
        here.keep_only(port, [there.address])


def test_stopped_rank_fails_the_job_by_name(whole: LanMesh) -> None:
    run = Run(whole, "stopped", "--nodes", "3")
    box = run.host_of(0)
    stop(box)
    began = time.monotonic()
    assert run.process.wait(60) == 1, run.process.output()
    print(f"ended {time.monotonic() - began:.1f} s after rank 0 was stopped")
    said = rf"node {box.name} failed: rank 0 has been stopped by a signal \(SIGSTOP\) for 20 s"
    assert re.search(said, run.process.output().splitlines()[-1]), run.process.output()


def test_job_with_restarts_goes_on_after_a_rank_was_stopped(whole: LanMesh) -> None:
    run = Run(whole, "again", "--nodes", "2", "--restarts", "1")
    stop(run.host_of(1))
    for rank in (0, 1):
        run.process.expect(rf"^\[{rank}\|\S+\] up, attempt 1", 90)
    assert re.search(r"rank 1 has been stopped .*; restarting \(1 of 1\)", run.process.output())
    run.finish()


@pytest.mark.parametrize("busy", [True, False])
def test_cut_path_between_two_boxes_fails_the_job_and_is_named(whole: LanMesh, busy: bool) -> None:
    run = Run(whole, f"cut-{busy}", "--nodes", "3")
    one, other = run.host_of(0 if busy else 1), run.host_of(2)
    if not busy:  # nothing is on its way, and nothing will be until rank 0 is back
        run.mark("alone").touch()
        run.process.expect("alone$", 30)
    cut_data(whole, one, other)
    began = time.monotonic()
    run.mark("alone").unlink(missing_ok=True)
    assert run.process.wait(75) == 1, run.process.output()
    print(f"ended {time.monotonic() - began:.1f} s after the path was cut")
    said = re.search(
        r"node (\S+) failed: the network to (\S+) is cut: nothing that was sent to \S+ port \d+ "
        r"was acknowledged for \d+ s, and new connections fail",
        run.process.output().splitlines()[-1],
    )
    assert said, run.process.output()
    assert {said[1], said[2]} == {one.name, other.name}
    assert all(whole.state(box.name) == "alive" for box in whole.boxes)


def test_job_leaves_one_of_two_boxes_whose_path_stays_cut(whole: LanMesh) -> None:
    run = Run(whole, "moves", "--nodes", "2", "--restarts", "1")
    pair = [run.host_of(rank) for rank in (0, 1)]
    (third,) = [box for box in whole.boxes if box not in pair]
    cut_data(whole, *pair)
    began = time.monotonic()
    names = {run.process.expect(rf"^\[{rank}\|(\S+)\] up, attempt 1", 90)[1] for rank in (0, 1)}
    print(f"goes on {time.monotonic() - began:.1f} s after the path was cut")
    assert third.name in names
    assert len(names) == 2
    run.finish()


def test_rank_at_work_alone_in_a_lossy_network_is_no_hang(whole: LanMesh, lan: Lan) -> None:
    run = Run(whole, "alone", "--nodes", "3")
    for rank in (0, 1, 2):
        run.host_of(rank)
    for box in whole.boxes:
        box.loss(20)
    run.mark("alone").touch()
    run.process.expect("alone$", 60)
    time.sleep(45)  # more than twice what a hang takes to be found
    assert run.process.poll() is None, run.process.output()
    run.mark("alone").unlink()
    run.process.expect("back$", 30)
    for box in whole.boxes:
        box.clear()
    run.finish()
