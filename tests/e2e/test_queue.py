"""Two laptops, three boxes and more jobs than fit: who goes first, what is said, what is left.

Every job takes whole boxes, so that two of them compete where they need more than three together.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpulayer_mesh.core.tickets import TICKET_S
from lan import Host, Process
from meshes import GPULAYER, LanMesh, until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(300)]

SIZES = (3, 1, 2, 3, 1, 1, 2, 3, 2, 1)  # nodes of ten jobs, in the order of their submission
DEADLINE_S = 60.0


class Queue:
    """The mesh, and jobs by number, each of which writes when it begins and ends into one file."""

    def __init__(self, mesh: LanMesh, laptops: tuple[Host, Host], folder: Path) -> None:
        self.mesh = mesh
        self.laptops = laptops
        self.log = folder / "order"
        self.gate = folder / "gate"  # blocks while it is there
        self.cpus = min(row["cpus"] for row in mesh.status().values() if row["cpus"])

    def submit(self, name: str, nodes: int, *options: str, on: int = 0) -> Process:
        """Start a job of whole boxes on one of the laptops, in a shell of its own."""
        said = 'test "${RANK:-0}" = 0 && echo "$0 $1" >>"$2"'
        command = f"{said}; sleep 0.3; while test $0 = block -a -e $3; do sleep 0.1; done"
        ends = 'test "${RANK:-0}" != 0 || echo "$0 end" >>"$2"'
        folder = Path(tempfile.mkdtemp(dir=self.laptops[on].home))
        argv = ["sh", "-c", f"{command}; {ends}", name, "begin", str(self.log), str(self.gate)]
        size = ["--nodes", str(nodes), "--devices", str(self.cpus), "--name", name]
        return self.laptops[on].popen([GPULAYER, "run", *size, *options, "--", *argv], cwd=folder)

    def block(self) -> Process:
        """Take all boxes until `gate` is removed."""
        self.gate.touch()
        blocker = self.submit("block", 3)
        until(lambda: "block begin" in self.events(), DEADLINE_S)
        return blocker

    def events(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def queued(self) -> list[dict[str, Any]]:
        """Return the jobs that wait, the next one first."""
        rows = json.loads(self.mesh.gpulayer("jobs", "--json").stdout)["jobs"]
        return [row for row in reversed(rows) if row["state"] == "pending"]


@pytest.fixture(scope="module")
def mesh(make_lan: Any) -> LanMesh:
    lan = make_lan(("laptop", "laptop-2", "box-1", "box-2", "box-3"))
    mesh = LanMesh(lan)
    mesh.form()
    mesh.add_launcher(lan["laptop-2"])
    return mesh


@pytest.fixture
def queue(mesh: LanMesh, tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(mesh, (mesh.laptop, mesh.lan["laptop-2"]), tmp_path)
    yield queue
    queue.gate.unlink(missing_ok=True)
    until(lambda: not queue.queued() and not mesh.ranks(), DEADLINE_S)


def place(process: Process, number: int) -> re.Match[str]:
    """Wait until a launcher says that its job has this place in the queue."""
    return process.expect(rf"^gpulayer: queued #{number}: (.*)$", DEADLINE_S)


def test_ten_jobs_of_two_laptops_run_in_the_order_of_submission(queue: Queue) -> None:
    blocker = queue.block()
    jobs = []
    for number, nodes in enumerate(SIZES):
        jobs.append(queue.submit(f"job{number}", nodes, on=number % 2))
        place(jobs[-1], number + 1)
    first = place(jobs[0], 1)[1]
    each = f" with {queue.cpus} devices each" if queue.cpus > 1 else ""
    busy = r"box-\d, box-\d, box-\d busy with job (\w{10}) from laptop "
    assert re.match(rf"needs 3 nodes{each}; {busy}", first), first
    second = place(jobs[1], 2)[1]
    assert re.match(rf"needs 1 node{each}; {busy}", second), second  # not what waits as well
    rows = queue.queued()
    assert [row["name"] for row in rows] == [f"job{number}" for number in range(len(SIZES))]
    assert [row["queue"]["position"] for row in rows] == list(range(1, len(SIZES) + 1))
    assert {row["submitter"] for row in rows} == {"laptop", "laptop-2"}
    table = queue.mesh.gpulayer("jobs").stdout
    assert re.search(r"queued #10 +job9", table), table

    queue.gate.unlink()
    for process in (blocker, *jobs):
        assert process.wait(DEADLINE_S * 2) == 0, process.output()
    events = queue.events()
    for i, j in itertools.combinations(range(len(SIZES)), 2):
        if SIZES[i] + SIZES[j] > 3:
            assert events.index(f"job{i} end") < events.index(f"job{j} begin"), events
    # A line of the queue comes when it has changed, not each second.
    lines = re.findall(r"^gpulayer: queued .*$", jobs[-1].output(), re.MULTILINE)
    assert lines == list(dict.fromkeys(lines))


def test_limits_of_waiting_and_what_never_fits(queue: Queue) -> None:
    blocker = queue.block()
    at_once = queue.submit("impatient", 1, "--no-wait")
    assert at_once.wait(DEADLINE_S) == 4, at_once.output()
    assert "queued" not in at_once.output()
    assert "busy with job" in at_once.output()
    soon = queue.submit("short", 2, "--wait", "3s", on=1)
    place(soon, 1)
    assert soon.wait(DEADLINE_S) == 4, soon.output()
    assert "gave up after 3 s" in soon.output()
    never = queue.submit("never", 4)
    assert never.wait(DEADLINE_S) == 3, never.output()
    assert queue.queued() == []
    queue.gate.unlink()
    assert blocker.wait(DEADLINE_S) == 0, blocker.output()
    assert not [event for event in queue.events() if not event.startswith("block")]


def test_whoever_leaves_the_queue_holds_nobody_up(queue: Queue) -> None:
    blocker = queue.block()
    interrupted, stopped, killed = (queue.submit(name, 3) for name in ("a", "b", "c"))
    until(lambda: len(queue.queued()) == 3, DEADLINE_S)
    last = queue.submit("last", 2, on=1)
    place(last, 4)
    interrupted.interrupt()
    assert interrupted.wait(DEADLINE_S) == 130, interrupted.output()
    assert "no job runs" in interrupted.output()
    assert "a" not in {row["name"] for row in queue.queued()}

    job = next(row["job"] for row in queue.queued() if row["name"] == "b")
    logs = queue.mesh.gpulayer("logs", job, code=1)
    assert "is queued as #" in logs.stderr
    other = queue.mesh.gpulayer("stop", job, host=queue.laptops[1], code=5)
    assert "may not" in other.stderr
    queue.mesh.gpulayer("stop", job)
    assert stopped.wait(DEADLINE_S) == 130, stopped.output()
    assert "stopped by laptop while it was queued" in stopped.output()

    killed.send_signal(signal.SIGKILL)
    place(last, 1)
    assert [row["name"] for row in queue.queued()] == ["last"]
    queue.gate.unlink()
    for process in (blocker, last):
        assert process.wait(DEADLINE_S + TICKET_S) == 0, process.output()
    begun = [event for event in queue.events() if event.endswith("begin")]
    assert begun == ["block begin", "last begin"]
