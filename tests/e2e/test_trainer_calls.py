"""fit, validate, test of the best checkpoint, predict and fit again on three machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import LanMesh

pytestmark = [pytest.mark.lan, pytest.mark.timeout(300)]

SCRIPT = """
import json, sys, warnings
import torch
from torch.utils.data import DataLoader, TensorDataset
from gpulayer.pytorch import ModelCheckpoint, Module, Trainer, seed_everything

warnings.simplefilter("ignore")
NODES = int(sys.argv[1])

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        # Worse after every epoch, so that the best checkpoint is not the last.
        self.log("val", float(self.current_epoch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)
        self.log("count", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return {"y": self.layers(batch[0]).flatten(), "number": batch_idx}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

def samples(count, seed):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))

def trainer(**more):
    return Trainer(num_nodes=NODES, devices=1, accelerator="cpu", enable_progress_bar=False,
                   num_sanity_val_steps=0, log_every_n_steps=1, **more)

seed_everything(1)
whole = 12  # a step sees the same samples on any number of nodes: all of them
train = DataLoader(samples(whole, 1), batch_size=whole // NODES)
best = ModelCheckpoint(monitor="val", save_top_k=1)
model, used = Net(), trainer(max_epochs=3, callbacks=[best])
used.fit(model, train, DataLoader(samples(7, 2), batch_size=2))
told = {
    "validated": used.validate(model, DataLoader(samples(7, 2), batch_size=2), verbose=False),
    "of_last": used.test(model, DataLoader(samples(7, 3), batch_size=2), verbose=False),
    "of_best": used.test(
        model, DataLoader(samples(7, 3), batch_size=2), ckpt_path="best", verbose=False
    ),
    "predicted": [
        [one["y"].tolist(), one["number"]]
        for one in used.predict(model, DataLoader(samples(7, 4), batch_size=2))
    ],
    "best": best.best_model_path,
    "score": best.best_model_score.item(),
}
used = trainer(max_epochs=1)
used.fit(model, train)
told["weights"] = [p.tolist() for p in model.parameters()]
told["steps"] = used.global_step
if not model.trainer.is_global_zero:
    raise AssertionError("ranks do not come here")
with open(f"told{NODES}.json", "w") as file:
    json.dump(told, file)
"""


def flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for one in value for number in flat(one)]
    return [float(value)]


def test_calls_on_three_machines_equal_those_in_one_process(mesh: LanMesh) -> None:
    folder = mesh.laptop.home / "calls"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    for nodes in ("1", "3"):
        done = mesh.laptop.run(["python", "train.py", nodes], cwd=folder, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    one, three = (json.loads((folder / f"told{nodes}.json").read_text()) for nodes in (1, 3))
    for key in ("validated", "of_last", "of_best", "predicted", "score", "weights", "steps"):
        mine, theirs = torch.tensor(flat(three[key])), torch.tensor(flat(one[key]))
        assert mine.shape == theirs.shape, key
        assert torch.allclose(mine, theirs, atol=1e-5), (key, three[key], one[key])
    assert three["of_best"][0]["loss"] != three["of_last"][0]["loss"]
    assert three["of_best"][0]["count"] == 7.0
    # The checkpoint came home, and its path says where to.
    assert Path(three["best"]).name == Path(one["best"]).name == "epoch=0-step=1.ckpt"
    assert (folder / "gpulayer_jobs") in Path(three["best"]).parents
    assert Path(three["best"]).is_file()


LONG = """
import sys, time, warnings
import torch
from torch.utils.data import DataLoader, TensorDataset
from gpulayer.pytorch import Module, Trainer, seed_everything

warnings.simplefilter("ignore")

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.02 if self.global_rank else 0.1)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

seed_everything(1)
data = DataLoader(TensorDataset(torch.randn(6000, 2)), batch_size=1)
steps, path = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
trainer = Trainer(num_nodes=3, accelerator="cpu", max_steps=steps)
trainer.fit(Net(), data, ckpt_path=path)
print("ended at", trainer.global_step)
"""


def test_interrupted_training_is_saved_comes_home_and_goes_on(mesh: LanMesh) -> None:
    folder = mesh.laptop.home / "long"
    folder.mkdir()
    (folder / "train.py").write_text(LONG)
    run = mesh.laptop.popen(["python", "train.py", "100000"], cwd=folder)
    run.expect(r"^\[0\|[^]]*\] epoch 0  step \d+/2000 .*ETA.*$", 90)
    run.expect(r"slowest rank 0 on \S+ \d", 60)
    run.interrupt()
    assert run.wait(40) == 130, run.output()
    told = run.expect(r"stopped in epoch 0, after step (\d+); fit\(ckpt_path='(\S+)'\) goes on", 1)
    steps = int(told[1])
    saved = folder / told[2]  # where it came home to
    assert saved.name == "final.ckpt"
    assert torch.load(saved, weights_only=True)["global_step"] == steps
    done = mesh.laptop.run(["python", "train.py", str(steps + 2), told[2]], cwd=folder, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ended at {steps + 2}" in done.stdout
