"""Scripts for other frameworks under `launch`: they find their ranks without being told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from meshes import LanMesh

pytestmark = [pytest.mark.lan, pytest.mark.timeout(240)]

# Only the lines up to launch() are ours; what follows is what anybody writes for that framework.
HEAD = """
import json, os
from gpulayer.pytorch import launch
launch(nodes=2, accelerator="cpu", devices=1)
import torch
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
x = torch.arange(64.0).reshape(16, 4) / 64
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

def tell(**values):
    with open(os.environ["GPULAYER_OUT"] + "/told.json", "w") as file:
        json.dump(values, file)
"""

LIGHTNING = """
import pytorch_lightning as pl

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", strategy="ddp", num_nodes=2, devices=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=4))
tell(rank=trainer.global_rank, world=trainer.world_size, steps=trainer.global_step,
     weight=[p.tolist() for p in model.parameters()])
"""

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    steps += 1
tell(rank=accelerator.process_index, world=accelerator.num_processes, steps=steps,
     weight=[p.tolist() for p in accelerator.unwrap_model(model).parameters()])
accelerator.end_training()
"""

# As the example scripts of Transformers that use no library: everything from the environment.
FROM_THE_ENVIRONMENT = """
local_rank = int(os.environ.get("LOCAL_RANK", -1))
if local_rank != -1:
    torch.distributed.init_process_group(backend="gloo")
sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 0
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(wrapped(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps += 1
tell(rank=torch.distributed.get_rank(), world=torch.distributed.get_world_size(), steps=steps,
     weight=[p.tolist() for p in model.parameters()])
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("needs", "body"),
    [
        ("pytorch_lightning", LIGHTNING),
        ("accelerate", ACCELERATE),
        ("torch", FROM_THE_ENVIRONMENT),
    ],
    ids=["lightning", "accelerate", "environment"],
)
def test_script_finds_its_ranks(mesh: LanMesh, needs: str, body: str, request: Any) -> None:
    pytest.importorskip(needs)
    folder = mesh.laptop.home / request.node.callspec.id
    folder.mkdir()
    (folder / "train.py").write_text(HEAD + body)
    done = mesh.laptop.run(["python", "train.py"], cwd=folder, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(path.read_text()) for path in sorted(folder.rglob("told.json"))]
    assert sorted(one["rank"] for one in told) == [0, 1]
    assert {one["world"] for one in told} == {2}
    assert {one["steps"] for one in told} == {2}
    assert told[0]["weight"] == told[1]["weight"]
