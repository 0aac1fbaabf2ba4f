"""Jobs that are started again: a rank fails, a machine is lost, and what they had written is there.

The script counts in a file of `$GPULAYER_OUT`, so what an attempt finds of the one before shows in
its first line.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from lan import Host, Process
from meshes import GPULAYER, LanMesh, until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(180)]

# Counts in a file until `finish` is there; the first attempt's rank 1 fails once it is told to.
COUNTS = """
import os, sys, time
from pathlib import Path
attempt, rank = os.environ["GPULAYER_RESTART"], os.environ.get("RANK", "0")
out = Path(os.environ["GPULAYER_OUT"]) / "count"
number = int(out.read_text()) if out.exists() else 0
restored = Path(os.environ.get("GPULAYER_RESTORED", "nowhere")) / "count"
zero = int(restored.read_text()) if restored.exists() else -1
print(f"attempt {attempt} from {number}, rank 0 was at {zero}", flush=True)
while not os.path.exists(sys.argv[1] + ".finish"):
    number += 1
    fresh = out.with_suffix(".tmp")
    fresh.write_text(str(number))
    fresh.replace(out)
    if number == 40:
        print("counted to 40", flush=True)
    if attempt == "0" and rank == "1" and os.path.exists(sys.argv[1] + ".fail"):
        sys.exit(7)
    time.sleep(0.1)
print("finished at", number, flush=True)
"""


def start(mesh: LanMesh, name: str, *options: str) -> tuple[Process, Path]:
    """Run the script; also return what its marks are called."""
    folder = mesh.laptop.home / name
    folder.mkdir()
    (folder / "count.py").write_text(COUNTS)
    marks = mesh.laptop.home / f"{name}-mark"
    command = [GPULAYER, "run", *options, "--", "python", "count.py", str(marks)]
    return mesh.laptop.popen(command, cwd=folder), marks


def mark(marks: Path, what: str) -> None:
    marks.with_name(f"{marks.name}.{what}").touch()


def host_of(mesh: LanMesh, process: Process, rank: int) -> Host:
    found = process.expect(rf"^\[{rank}\|(\S+)\] attempt 0", 60)
    return mesh.lan[found[1]]


def power_off(box: Host) -> None:
    """Everything on it ends at once, and no packet tells of it."""
    box.cut()
    box.kill_all()


def jobs(mesh: LanMesh) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(mesh.gpulayer("jobs", "--json").stdout)["jobs"]
    return found


@pytest.fixture
def whole(mesh: LanMesh) -> LanMesh:
    """All three boxes are there, and nothing runs."""
    for box in mesh.boxes:
        if mesh.agents[box.name].poll() is not None:
            box.restore()
            mesh.start_agent(box)
    until(lambda: all(mesh.listed(box.name) for box in mesh.boxes), 60)
    mesh.wait_proven()
    assert mesh.ranks() == []
    return mesh


def test_failed_rank_starts_the_whole_group_again_with_its_files(whole: LanMesh) -> None:
    run, marks = start(whole, "rank", "--nodes", "2", "--restarts", "1")
    for rank in (0, 1):
        run.expect(rf"^\[{rank}\|\S+\] counted to 40", 60)
    mark(marks, "fail")
    for rank in (0, 1):
        found = run.expect(rf"^\[{rank}\|\S+\] attempt 1 from (\d+), rank 0 was at (\d+)$", 60)
        assert int(found[1]) >= 40
        assert int(found[2]) >= 40
    mark(marks, "finish")
    assert run.wait(60) == 0, run.output()
    assert re.search(r"rank 1 on \S+ failed: exit code 7; restarting \(1 of 1\)", run.output())
    home = whole.laptop.home / "rank" / "gpulayer_jobs"
    (folder,) = home.iterdir()
    last = int(re.findall(r"\[0\|\S+\] finished at (\d+)", run.output())[0])
    assert int((folder / "count").read_text()) == last
    after, before = jobs(whole)[:2]
    assert (before["job"], before["successor"]) == (folder.name, after["job"])
    assert (after["state"], after["restart"], after["origin"]) == ("succeeded", 1, before["job"])


def test_lost_machine_of_rank_0_is_replaced_and_nothing_is_lost(whole: LanMesh) -> None:
    run, marks = start(whole, "zero", "--nodes", "2", "--restarts", "1")
    lost, stays = host_of(whole, run, 0), host_of(whole, run, 1)
    for rank in (0, 1):
        run.expect(rf"^\[{rank}\|\S+\] counted to 40", 60)
    power_off(lost)
    found = run.expect(r"^\[0\|(\S+)\] attempt 1 from (\d+), rank 0 was at (\d+)$", 120)
    assert found[1] not in (lost.name, stays.name)
    assert int(found[2]) > 20  # copied every few seconds
    assert found[2] == found[3]
    found = run.expect(r"^\[1\|(\S+)\] attempt 1 from (\d+), rank 0 was at (\d+)$", 20)
    assert found[1] == stays.name
    assert int(found[2]) >= 40
    mark(marks, "finish")
    assert run.wait(60) == 0, run.output()
