"""Functions on machines of the test LAN: arguments there, results back, failures told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshes import LanMesh, until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(240)]

WORK = """
import os, socket, time
from pathlib import Path

def where(factor, *, add=0):
    print("working on", factor)
    Path(os.environ["GPULAYER_OUT"], "made.txt").write_text(str(factor))
    return {"host": os.environ["GPULAYER_NODE"], "value": (factor * 2 + add,)}

def mean(tensor):
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = tensor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total, dist.is_initialized()

def fails():
    raise LookupError("nothing there")

def leaves():
    os._exit(0)

def sleeps():
    print("asleep", flush=True)
    time.sleep(600)
"""

SUBMIT = """
import json
import gpulayer
import torch
import work

if __name__ == "__main__":
    jobs = [gpulayer.submit("work:where", i, kwargs={"add": 1}, target=f"box-{i + 1}")
            for i in range(3)]
    found = [job.result() for job in jobs]
    assert [one["host"] for one in found] == ["box-1", "box-2", "box-3"], found
    assert [one["value"] for one in found] == [(1,), (3,), (5,)], found
    assert all(job.state == "succeeded" for job in jobs)
    assert jobs[0].result() == found[0]
    together = gpulayer.submit(work.mean, torch.arange(3.0), nodes=2)
    for total, initialised in together.results():
        assert total.tolist() == [0.0, 3.0, 6.0], total
    again = gpulayer.attach(together.id).result(logs=False)
    assert again[0].tolist() == [0.0, 3.0, 6.0]
    try:
        gpulayer.submit(work.fails).result()
    except gpulayer.JobFailedError as error:
        assert error.code == 1
        assert "LookupError: nothing there" in str(error), error
    else:
        raise AssertionError("it did not fail")
    try:
        gpulayer.submit("work:leaves", target="box-2").result()
    except gpulayer.JobFailedError as error:
        assert "failed: rank 0 on box-2: ended without a result: somethi" in str(error), error
    else:
        raise AssertionError("it returned something")
    asleep = gpulayer.submit(work.sleeps)
    try:
        asleep.result(timeout_s=3)
    except TimeoutError as error:
        print(error)
    asleep.stop(kill=True)
    try:
        asleep.result()
    except gpulayer.JobFailedError as error:
        assert error.code == 130, error.code
        print("stopped:", error)
    else:
        raise AssertionError("it went on")
    print(json.dumps([job.id for job in jobs]))
"""


@pytest.fixture
def folder(mesh: LanMesh) -> Path:
    folder = mesh.laptop.home / "functions"
    folder.mkdir(exist_ok=True)
    (folder / "work.py").write_text(WORK)
    return folder


def test_functions_run_elsewhere_and_their_results_come_back(mesh: LanMesh, folder: Path) -> None:
    (folder / "submit.py").write_text(SUBMIT)
    done = mesh.laptop.run(["python", "submit.py"], cwd=folder, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "working on 2" in done.stdout
    assert "has not ended within 3 s; it goes on" in done.stdout
    first = json.loads(done.stdout.splitlines()[-1])[0]
    assert (folder / "gpulayer_jobs" / first / "made.txt").read_text() == "0"
    record = json.loads(mesh.gpulayer("jobs", "--json").stdout)["jobs"]
    assert {one["name"] for one in record} >= {"work:where", "work:mean", "work:fails"}


def test_result_outlives_the_process_that_submitted(mesh: LanMesh, folder: Path) -> None:
    code = "import gpulayer; print(gpulayer.submit('work:where', 21).id)"
    done = mesh.laptop.run(["python", "-c", code], cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr
    ident = done.stdout.split()[-1]

    def ended() -> bool:
        jobs = json.loads(mesh.gpulayer("jobs", "--json").stdout)["jobs"]
        return any(one["job"] == ident and one["state"] == "succeeded" for one in jobs)

    until(ended, 30)
    code = f"import gpulayer; print(gpulayer.attach('{ident}').result(logs=False)['value'])"
    done = mesh.laptop.run(["python", "-c", code], cwd=folder, timeout=60)
    assert "(42,)" in done.stdout, done.stderr


def test_interrupted_wait_stops_the_job(mesh: LanMesh, folder: Path) -> None:
    code = "import gpulayer; gpulayer.submit('work:sleeps', stop_grace_s=1).result()"
    run = mesh.laptop.popen(["python", "-c", code], cwd=folder)
    run.expect("asleep", 60)
    run.interrupt()
    assert run.wait(30) != 0
    assert until(lambda: not mesh.ranks(), 15)

    def ended() -> bool:
        job = json.loads(mesh.gpulayer("jobs", "--json").stdout)["jobs"][0]
        return (job["name"], job["state"]) == ("work:sleeps", "cancelled")

    until(ended, 15)
