"""validate, test and predict on several ranks, and several calls of one script elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks

pytestmark = [pytest.mark.network, pytest.mark.slow]

MODEL = """
class Model(Net):
    def step(self, name, batch):
        # sums and counts of numbers that floats hold exactly: order cannot matter
        self.log(f"{name}_mean", batch[1].mean(), sync_dist=True)
        self.log(f"{name}_count", float(len(batch[1])), reduce_fx="sum", sync_dist=True)
        self.log(f"{name}_largest", batch[1].max(), reduce_fx="max", sync_dist=True, on_step=True)

    def validation_step(self, batch, batch_idx):
        self.step("val", batch)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.step("test", batch)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"y": batch[1].flatten().tolist(), "at": (batch_idx, dataloader_idx)}

def numbered(count, first=0):
    return TensorDataset(torch.zeros(count, 4), torch.arange(first, first + count).float()[:, None])
"""


def test_each_sample_counts_once_on_uneven_ranks(tmp_path: Path) -> None:
    body = MODEL + (
        "model, used = Model(), trainer()\n"
        "if RANK == 1:\n"
        "    torch.nn.init.zeros_(model.layers[0].weight)\n"
        "found = [used.validate(model, DataLoader(numbered(7), 2), verbose=False),\n"
        "         used.test(model, [DataLoader(numbered(5), 2), DataLoader(numbered(1, 9), 2)],\n"
        "                   verbose=False)]\n"
        "shares = used.predict(model, DataLoader(numbered(5), 2))\n"
        "equal = used.runtime.gather_text(str(model.layers[0].weight.sum().item()))\n"
        "tell(found=found, shares=shares, equal=len(set(equal)), steps=used.global_step,\n"
        "     on=used.callback_metrics.keys() == set())\n"
    )
    one = Ranks(tmp_path / "one", body, 1).check().told()
    ranks = Ranks(tmp_path / "three", body, 3).check()
    three = [ranks.told(rank) for rank in range(3)]
    for told in three:
        assert told["found"] == one["found"]
        assert told["equal"] == 1  # a module that trains nothing is still rank 0's everywhere
        assert told["steps"] == 0
    assert one["found"][0] == [{"val_mean": 3.0, "val_count": 7.0, "val_largest_epoch": 6.0}]
    # Each rank has its own share, r, r + 3, ..., nothing padded.
    assert [[y for batch in told["shares"] for y in batch["y"]] for told in three] == [
        [0.0, 3.0],
        [1.0, 4.0],
        [2.0],
    ]


def test_calls_of_one_script_on_two_devices_equal_those_in_one_process(tmp_path: Path) -> None:
    body = MODEL + (
        "DEVICES = int(sys.argv[1]) if len(sys.argv) > 1 else 2\n"
        "if __name__ == '__main__':\n"
        "    model, used = Model(), trainer(devices=DEVICES, max_epochs=1)\n"
        "    log = []\n"
        "    data = DataLoader(samples(16), 2 if DEVICES == 1 else 1, shuffle=False)\n"
        "    log.append(used.validate(model, DataLoader(numbered(7), 2), verbose=False))\n"
        "    used.fit(model, DataLoader(numbered(8), 8 // DEVICES))\n"
        "    both = [DataLoader(numbered(7), 2), DataLoader(numbered(1))]\n"
        "    log.append(used.predict(model, both))\n"
        "    log.append(used.test(model, DataLoader(numbered(5), 2), verbose=False))\n"
        "    three = DataLoader(numbered(3), 2)\n"
        "    log.append(used.predict(model, three, return_predictions=False))\n"
        "    from gpulayer.pytorch import is_launcher_process\n"
        "    if is_launcher_process():  # ranks of later calls come by here as well\n"
        "        with open('between.txt', 'a') as file: file.write('once ')\n"
        "    second = trainer(devices=DEVICES, max_epochs=1)\n"
        "    second.fit(model, DataLoader(numbered(8), 8 // DEVICES))\n"
        "    log.append([round(p.sum().item(), 4) for p in model.parameters()])\n"
        "    log.append([used.global_step, used.current_epoch, second.global_step])\n"
        "    tell(log=log)\n"
    )
    two = Ranks(tmp_path / "two", body, 1).check()
    one = Ranks(tmp_path / "one", body.replace("else 2\n", "else 1\n"), 1).check()
    assert two.told()["log"] == one.told()["log"]
    assert (two.path / "between.txt").read_text() == "once "


def test_each_statement_runs_once_here_and_on_ranks_once_for_each_call_below_it(
    tmp_path: Path,
) -> None:
    body = MODEL + (
        "from gpulayer.pytorch import is_launcher_process\n"
        "def visit(place):\n"
        "    where = 'here' if is_launcher_process() else 'ranks'\n"
        f"    with open(f'{tmp_path}/{{place}} {{where}}', 'a') as file: file.write('x')\n"
        "if __name__ == '__main__':\n"
        "    visit('top')\n"
        "    model, used = Model(), trainer(devices=2)\n"
        "    used.fit(model, DataLoader(samples(8)), DataLoader(numbered(6)))\n"
        "    fitted = [used.num_val_batches, used.num_training_batches]\n"
        "    visit('between')\n"
        "    used.test(model, DataLoader(numbered(10)), verbose=False)\n"
        "    visit('end')\n"
        "    tell(fitted=fitted, tested=used.num_test_batches, loader=used.test_dataloaders,\n"
        "         interrupted=used.interrupted, module=used.model is model)\n"
    )
    told = Ranks(tmp_path / "script", body, 1).check().told()
    visits = {one.name: len(one.read_text()) for one in tmp_path.iterdir() if one.is_file()}
    assert visits == {
        "top here": 1, "top ranks": 4, "between here": 1, "between ranks": 2, "end here": 1,
    }  # fmt: skip
    assert told == {
        "fitted": [[3], 4], "tested": [5], "loader": None, "interrupted": False, "module": True,
    }  # fmt: skip


def test_a_call_that_fails_elsewhere_leaves_the_trainer_interrupted(tmp_path: Path) -> None:
    body = MODEL + (
        "class Failing(Model):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        raise ValueError('no')\n"
        "if __name__ == '__main__':\n"
        "    used = trainer(devices=2)\n"
        "    try:\n"
        "        used.fit(Failing(), DataLoader(samples(8)))\n"
        "    except SystemExit as error:\n"
        "        tell(interrupted=used.interrupted, code=error.code)\n"
    )
    told = Ranks(tmp_path / "script", body, 1).check().told()
    assert told["interrupted"] is True
    assert told["code"] not in (0, None)
