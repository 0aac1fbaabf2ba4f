"""strategy="fsdp": trains like DDP, evaluates exactly, and leaves a plain module behind."""

from __future__ import annotations

import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from one_weight import OneWeight, loader
from ranks import Ranks

from gpulayer.pytorch import Trainer
from gpulayer.pytorch.arguments import ArgumentError

BODY = """
class Model(Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8, bias=False)
        self.rest = torch.nn.Sequential(
            torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        )
        self.rest[3].weight = self.rest[2].weight  # tied
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.seen = []

    def forward(self, x):
        return self.rest(self.first(x)).sum(1, keepdim=True) * self.scale

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.seen.append(batch_idx)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

STRATEGY = "STRATEGY_NAME"
model = Model()
used = trainer(strategy=STRATEGY, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5,
               num_sanity_val_steps=2, enable_checkpointing=False)
used.fit(model, DataLoader(samples(48), 6, shuffle=True), DataLoader(samples(7, 5), 2))
first = {name: value.tolist() for name, value in model.state_dict().items()}
kind = [type(part).__name__ for part in model.modules()]
hooks = sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules())
tested = used.test(model, DataLoader(samples(7, 9), 2), verbose=False)
again = trainer(strategy=STRATEGY, max_epochs=1, enable_checkpointing=False)
again.fit(model, DataLoader(samples(24), 6))
tell(first=first, kind=kind, hooks=hooks, tested=tested, plain=type(model.first.weight).__name__,
     tied=model.rest[3].weight is model.rest[2].weight, seen=model.seen,
     val=used.callback_metrics["val"].item(), steps=used.global_step,
     second={name: value.tolist() for name, value in model.state_dict().items()})
"""


def close(one: Any, other: Any) -> bool:
    return torch.allclose(torch.tensor(one).double(), torch.tensor(other).double(), atol=1e-5)


@pytest.mark.network
@pytest.mark.slow
def test_trains_like_ddp_and_leaves_a_plain_module(tmp_path: Path) -> None:
    sharded = Ranks(tmp_path / "fsdp", BODY.replace("STRATEGY_NAME", "fsdp"), 2).check()
    ddp = Ranks(tmp_path / "ddp", BODY.replace("STRATEGY_NAME", "ddp"), 2).check().told()
    mine, other = sharded.told(0), sharded.told(1)
    assert mine["first"] == other["first"]
    assert mine["second"] == other["second"]
    for state in ("first", "second"):
        for name, value in ddp[state].items():
            assert close(mine[state][name], value), (state, name)
    assert close(mine["val"], ddp["val"])
    assert close(mine["tested"][0]["val"], ddp["tested"][0]["val"])
    for key in ("kind", "hooks", "plain", "tied", "seen", "steps"):
        assert mine[key] == ddp[key], key


def test_one_process_is_refused() -> None:
    with pytest.raises(ArgumentError, match="several ranks, and there is one"):
        Trainer(strategy="fsdp", max_epochs=1, devices=1, accelerator="cpu").fit(
            OneWeight(), loader(2)
        )


RESUME = (
    BODY.split('STRATEGY = "')[0]
    + """
import glob
from gpulayer.pytorch import ModelCheckpoint

def fitted(strategy, ckpt_path=None, callbacks=(), **arguments):
    seed_everything(3)
    model = Model()
    used = trainer(strategy=strategy, accumulate_grad_batches=2, callbacks=list(callbacks),
                   enable_checkpointing=bool(callbacks), **arguments)
    used.fit(model, DataLoader(samples(60), 6, shuffle=True), ckpt_path=ckpt_path)
    return model, used

def weights(model):
    return {name: value.tolist() for name, value in model.state_dict().items()}

whole, _ = fitted("fsdp", max_epochs=2)
kept = ModelCheckpoint(dirpath="saved", every_n_train_steps=2, save_top_k=-1)
fitted("fsdp", max_steps=4, max_epochs=2, callbacks=[kept])
path = "saved/epoch=1-step=4.ckpt"
resumed, used = fitted("fsdp", ckpt_path=path, max_epochs=2)
replicated, _ = fitted("ddp", ckpt_path=path, max_epochs=2)
saved = torch.load(path, weights_only=True)
tell(whole=weights(whole), resumed=weights(resumed), replicated=weights(replicated),
     steps=used.global_step, files=sorted(glob.glob("saved/*")),
     plain=all(type(value) is torch.Tensor for value in saved["state_dict"].values()),
     shapes=[tuple(s["exp_avg"].shape) for s in saved["optimizer_states"][0]["state"].values()])
"""
)


@pytest.mark.network
@pytest.mark.slow
def test_checkpoint_is_whole_and_training_goes_on_from_it(tmp_path: Path) -> None:
    told = Ranks(tmp_path / "two", RESUME, 2).check().told()
    assert told["plain"]
    assert [8, 4] in told["shapes"]  # optimizer states are whole as well
    assert told["steps"] == 6
    assert told["resumed"] == told["whole"]
    for name, value in told["whole"].items():
        assert close(told["replicated"][name], value), name


CLIPPED = (
    BODY.split('STRATEGY = "')[0]
    + """
class Clipped(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)  # Adam would hide what was clipped

def fitted(strategy, **arguments):
    seed_everything(3)
    model = Clipped()
    used = trainer(strategy=strategy, accumulate_grad_batches=2, max_epochs=2,
                   enable_checkpointing=False, **arguments)
    used.fit(model, DataLoader(samples(48), 6, shuffle=True))
    return {name: value.tolist() for name, value in model.state_dict().items()}

found = {}
for name, arguments in {"value": dict(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
                        "norm": dict(gradient_clip_val=0.01), "free": {}}.items():
    found[name] = [fitted(strategy, **arguments) for strategy in ("fsdp", "ddp")]
tell(**found)
"""
)


@pytest.mark.network
@pytest.mark.slow
def test_gradients_are_clipped_by_value_and_by_norm_as_under_ddp(tmp_path: Path) -> None:
    told = Ranks(tmp_path / "two", CLIPPED, 2).check().told()
    for kind in ("value", "norm", "free"):
        sharded, ddp = told[kind]
        for name, value in ddp.items():
            assert close(sharded[name], value), (kind, name)
    weights = [told[kind][0]["first.weight"] for kind in ("value", "norm", "free")]
    assert not any(close(one, other) for one, other in pairwise(weights))


KEPT = """
from gpulayer.pytorch import ModelCheckpoint

class Made(Net):
    def __init__(self, width, kind="a"):
        super().__init__()
        self.save_hyperparameters()
        self.extra = torch.nn.Linear(4, width)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.extra(batch[0]).sum() * 0

model = Made(3, kind="b")
kept = ModelCheckpoint()
used = trainer(callbacks=kept, **ARGUMENTS)
used.fit(model, DataLoader(samples(8), 2))
again = Made.load_from_checkpoint(kept.best_model_path)
tell(hparams=model.hparams, again=again.hparams, kind=type(again.extra.weight).__name__,
     text="" if used.log_dir is None else open(f"{used.log_dir}/hparams.yaml").read())
"""


@pytest.mark.network
@pytest.mark.slow
def test_hyperparameters_are_kept_by_ranks_and_come_home(tmp_path: Path) -> None:
    sharded = KEPT.replace("ARGUMENTS", '{"strategy": "fsdp"}')
    elsewhere = "if __name__ == '__main__':\n" + textwrap.indent(
        KEPT.replace("ARGUMENTS", '{"devices": 2, "default_root_dir": None}'), "    "
    )
    for name, body, ranks in (("sharded", sharded, 2), ("elsewhere", elsewhere, 1)):
        done = Ranks(tmp_path / name, body, ranks).check()
        made = {"width": 3, "kind": "b"}
        assert done.told() == {
            "hparams": made, "again": made, "kind": "Parameter",
            "text": 'kind: "b"\nwidth: 3\n',
        }  # fmt: skip
        assert len([*done.path.rglob("hparams.yaml")]) == 1
