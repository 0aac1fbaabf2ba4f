"""Jobs that are started again: a rank fails, a machine is lost, and what they had written is there.

The script counts in a file of `$GPULAYER_OUT`, so what an attempt finds of the one before shows in
its first line.
"""

from __future__ import annotations

import json
import re
import time
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
    if number in (40, 120):
        print("counted to", number, flush=True)
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
    until(mesh.listed, 60)
    mesh.wait_proven()
    assert mesh.ranks() == []
    return mesh


def test_failed_rank_starts_the_whole_group_again_with_its_files(whole: LanMesh) -> None:
    run, marks = start(whole, "rank", "--nodes", "2", "--restarts", "1")
    for rank in (0, 1):
        run.expect(rf"^\[{rank}\|\S+\] counted to 40", 60)
    mark(marks, "fail")
    failed = time.monotonic()
    for rank in (0, 1):
        found = run.expect(rf"^\[{rank}\|\S+\] attempt 1 from (\d+), rank 0 was at (\d+)$", 60)
        assert int(found[1]) >= 40
        assert int(found[2]) >= 40
    print(f"next attempt ran {time.monotonic() - failed:.1f} s after a rank failed")
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
        run.expect(rf"^\[{rank}\|\S+\] counted to 120", 60)
    power_off(lost)
    off = time.monotonic()
    found = run.expect(r"^\[0\|(\S+)\] attempt 1 from (\d+), rank 0 was at (\d+)$", 120)
    print(f"next attempt seen {time.monotonic() - off:.1f} s after the machine of rank 0 was lost")
    assert found[1] not in (lost.name, stays.name)
    assert int(found[2]) > 40  # copied every few seconds
    assert found[2] == found[3]
    found = run.expect(r"^\[1\|(\S+)\] attempt 1 from (\d+), rank 0 was at (\d+)$", 20)
    assert found[1] == stays.name
    assert int(found[2]) >= 120
    mark(marks, "finish")
    assert run.wait(60) == 0, run.output()


def test_machine_that_was_rebooted_is_named_as_such(whole: LanMesh) -> None:
    run, marks = start(whole, "reboot", "--nodes", "2", "--restarts", "1")
    box = host_of(whole, run, 1)
    host_of(whole, run, 0)
    statuses = (box.home / ".local/share/gpulayer/jobs").glob("*/status")
    status = max(statuses, key=lambda path: path.stat().st_mtime)
    box.kill_all()
    # All boxes have one kernel: another boot's id is written in its place.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert boot in status.read_text()
    status.write_text(status.read_text().replace(boot, "another boot"))
    whole.start_agent(box)
    run.expect(rf"node {box.name} failed: the machine was rebooted; restarting \(1 of 1\)$", 40)
    run.expect(r"^\[0\|\S+\] attempt 1", 90)
    mark(marks, "finish")
    assert run.wait(60) == 0, run.output()


TRAINER = """
import os, signal, sys, time
import torch
from gpulayer.pytorch import Module, ModelCheckpoint, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

seed_everything(7)

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        first = os.environ.get("GPULAYER_RESTART") == "0"
        if first and self.trainer.global_step == 17:
            if sys.argv[1] == "dies" and self.trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "lost" and self.trainer.global_rank == 0:
                print("at step 17", flush=True)
                time.sleep(600)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

x = torch.randn(64, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
best = ModelCheckpoint(monitor="loss_epoch", save_top_k=2, every_n_train_steps=5, save_last=True)
trainer = Trainer(
    max_epochs=4, num_nodes=2, accelerator="cpu", devices=1, restarts=1, callbacks=[best],
    enable_progress_bar=False, log_every_n_steps=1,
)
net = Net()
trainer.fit(net, data)
weights = torch.cat([p.detach().flatten() for p in net.parameters()])
print("WEIGHTS", weights.double().sum().item().hex(), weights.abs().max().item().hex())
loss = float(trainer.callback_metrics["loss"])
print("AT", trainer.global_step, trainer.current_epoch, loss.hex())
print("BEST", os.path.exists(best.best_model_path), os.path.basename(best.best_model_path))
"""


def wait_for_copy(boxes: list[Host], job: str, *names: bytes) -> None:
    """Wait until a box holds copies of files of a job, by its lists of them."""

    def held() -> bool:
        lists = [
            held.read_bytes() for box in boxes for held in box.home.rglob(f"copies/{job}/*/slot*")
        ]
        return any(all(name in one for name in names) for one in lists)

    until(held, 30)


@pytest.mark.timeout(300)
def test_trainer_goes_on_to_the_bit_after_a_rank_or_the_machine_of_rank_0_is_lost(
    whole: LanMesh,
) -> None:
    folder = whole.laptop.home / "trainer"
    folder.mkdir()
    (folder / "train.py").write_text(TRAINER)
    said = []
    for how in ("lives", "dies", "lost"):
        run = whole.laptop.popen(["python", "train.py", how], cwd=folder)
        if how == "lost":
            lost = whole.lan[run.expect(r"^\[0\|(\S+)\] at step 17", 60)[1]]
            job = run.expect(r"job (\S+) runs train.py", 5)[1]
            others = [box for box in whole.boxes if box is not lost]
            wait_for_copy(others, job, b"step=15.ckpt", b".whole")  # it, and what lies beside it
            power_off(lost)
        assert run.wait(120) == 0, run.output()
        assert ("restart 1 runs as job" in run.output()) is (how != "lives")
        assert ("fit goes on in epoch" in run.output()) is (how != "lives")
        said.append(re.findall(r"^(?:WEIGHTS|AT|BEST) .*$", run.output(), re.MULTILINE))
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == 3
    assert said[0][2].startswith("BEST True ")
    jobs_home = sorted((folder / "gpulayer_jobs").iterdir(), key=lambda path: path.stat().st_mtime)
    rows = [next(home.rglob("metrics.csv")).read_text() for home in jobs_home]
    assert rows[0] == rows[1] == rows[2]


def test_job_on_one_machine_goes_on_elsewhere_when_that_is_lost(whole: LanMesh) -> None:
    run, marks = start(whole, "alone", "--restarts", "2")
    run.expect("^counted to 120", 60)
    (job,) = [job for job in jobs(whole) if job["state"] == "running"]
    (name,) = [node["name"] for node in job["nodes"]]  # type: ignore[attr-defined]
    power_off(whole.lan[name])
    found = run.expect(r"^attempt 1 from (\d+), rank 0 was at (\d+)$", 120)
    assert found[1] == found[2]
    assert int(found[1]) > 40
    mark(marks, "finish")
    assert run.wait(60) == 0, run.output()


def test_job_whose_only_machine_is_lost_is_listed_and_can_be_stopped(whole: LanMesh) -> None:
    run, _ = start(whole, "gone", "--restarts", "2")
    run.expect("^counted to 40", 60)
    (job,) = [job for job in jobs(whole) if job["state"] == "running"]
    (name,) = [node["name"] for node in job["nodes"]]  # type: ignore[attr-defined]
    power_off(whole.lan[name])
    assert [one["state"] for one in jobs(whole) if one["job"] == job["job"]] == ["running"]
    whole.gpulayer("stop", str(job["job"]))
    assert run.wait(60) == 130, run.output()
    (last,) = [one for one in jobs(whole) if job["job"] in (one["job"], one["origin"])]
    assert (last["state"], last["cause"]) == ("cancelled", "stopped by laptop")
    assert whole.ranks() == []


def test_job_that_waits_for_a_machine_to_start_again_can_be_stopped(whole: LanMesh) -> None:
    run, _ = start(whole, "none", "--nodes", "3", "--restarts", "1")
    lost = host_of(whole, run, 2)
    run.expect(r"^\[0\|\S+\] counted to 40", 60)
    power_off(lost)
    run.expect(rf"node {lost.name} failed: node lost: .*; restarting \(1 of 1\)", 60)
    run.expect(r"cannot start again yet: asked for 1 node", 90)
    # Whoever does not want to wait for a machine to come back stops it.
    whole.gpulayer("stop", str(jobs(whole)[0]["job"]))
    assert run.wait(60) == 130, run.output()
    assert jobs(whole)[0]["state"] == "cancelled"
    assert whole.ranks() == []


def test_job_without_a_replacement_fails_once_it_has_waited_enough(whole: LanMesh) -> None:
    run, _ = start(whole, "few", "--nodes", "3", "--restarts", "1", "--wait", "15s")
    lost = host_of(whole, run, 2)
    run.expect(r"^\[0\|\S+\] counted to 40", 60)
    power_off(lost)
    assert run.wait(120) == 1, run.output()
    assert re.search(rf"node lost: {lost.name} .*; not restarted: asked for 1 node", run.output())
    assert jobs(whole)[0]["state"] == "failed"
    assert whole.ranks() == []


def test_stop_while_the_next_attempt_is_prepared_ends_the_job(whole: LanMesh) -> None:
    folder = whole.laptop.home / "stopped"
    folder.mkdir()
    code = "import os, sys; out = os.environ['GPULAYER_OUT'] + '/large'; "
    code += "os.path.exists(out) or open(out, 'wb').write(bytes(200_000_000)); sys.exit(7)"
    for delay_s in (0.0, 0.1, 0.4):
        run = whole.laptop.popen(
            [GPULAYER, "run", "--restarts", "20", "--", "python", "-c", code], cwd=folder
        )
        run.expect(r"restarting \(1 of 20\)", 60)
        time.sleep(delay_s)  # into another step of the preparation
        stop = whole.laptop.run([GPULAYER, "stop", str(jobs(whole)[0]["job"])], timeout=60)
        assert run.wait(60) == 130, run.output() + stop.stderr
        assert jobs(whole)[0]["state"] == "cancelled"
        until(lambda: not whole.ranks(), 10)
        grants = [job for row in whole.status().values() for job in row["jobs"]]
        assert grants == []
