"""Two switches and a slow wire between them: agents find out, and say so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from meshes import LanMesh, until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(500)]

TRUNK_MBIT = 20.0  # far below what two hosts on one switch do here, whatever else runs
UPSTAIRS, DOWNSTAIRS = ("box-1", "box-3"), ("box-2", "box-4")

TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader
from gpulayer.pytorch import Module, Trainer

class Wide(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)  # 1 MiB of gradients

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

data = DataLoader(torch.randn(400, 512), batch_size=8, shuffle=True)
Trainer(num_nodes=2, devices=1, accelerator="cpu", target=sys.argv[1:], max_steps=20,
        enable_progress_bar=False, enable_checkpointing=False).fit(Wide(), data)
"""


@pytest.fixture(scope="module")
def house(make_lan: Any) -> Iterator[LanMesh]:
    """A laptop and two boxes upstairs, two boxes downstairs."""
    boxes = ("box-1", "box-2", "box-3", "box-4")
    lan = make_lan(("laptop", *boxes))
    lan.split(DOWNSTAIRS, TRUNK_MBIT)
    mesh = LanMesh(lan, boxes)
    mesh.form()
    yield mesh
    for box in mesh.boxes:
        print(mesh.agents[box.name].output()[-4000:])


def measured(mesh: LanMesh) -> dict[tuple[str, str], dict[str, Any]]:
    return {tuple(sorted(link["names"])): link for link in mesh.status_json()["links"]}


def test_links_are_measured_and_two_floors_are_two_zones(house: LanMesh) -> None:
    def zones() -> dict[str, str] | None:
        rows = house.status()
        found = {name: row["zone"] for name, row in rows.items() if name != "laptop"}
        return found if all(found.values()) else None

    expected = dict.fromkeys(UPSTAIRS, "~box-1") | dict.fromkeys(DOWNSTAIRS, "~box-2")
    until(lambda: zones() == expected, 120, every_s=1.0)
    assert all(row["zone_inferred"] for name, row in house.status().items() if name != "laptop")

    def whole() -> dict[tuple[str, str], dict[str, Any]] | None:
        found = measured(house)
        slowest = min((one["mbit_s"] or 0 for one in found.values()), default=0)
        return found if len(found) == 6 and slowest > TRUNK_MBIT / 2 else None

    # Whoever answers learns from the others what they measured, one more each half minute; and
    # first probes that shared the trunk are made again after two minutes.
    for (a, b), link in until(whole, 300, every_s=1.0).items():
        assert link["rtt_ms"] > 0
        assert link["mtu"] == 1500
        assert link["age_s"] < 300
        if (a in UPSTAIRS) != (b in UPSTAIRS):
            assert link["mbit_s"] < TRUNK_MBIT * 1.2
    # A job stays on one floor; one for all crosses the trunk once, and the plan says so.
    dry = ("--dry-run", "--", "python", "-c", "pass")
    plan = house.gpulayer("run", "--nodes", "2", *dry).stderr
    assert re.search(r"same zone ~box-[12] and hardware, \d+ Mbit/s to box-", plan), plan
    assert re.search(r"not needed: 2 of 4 fitting; in zone ~box-[12]", plan), plan
    everywhere = house.gpulayer("run", "--nodes", "4", *dry).stderr
    assert re.search(r"ranks are in 2 zones: [\d.]+ Mbit/s between them", everywhere), everywhere
    order = re.findall(r"rank +\d +(box-\d)", everywhere)
    floors = [name in UPSTAIRS for name in order]
    assert floors in ([True, True, False, False], [False, False, True, True])
    downstairs = house.gpulayer("run", "--target", "zone:~box-2", *dry).stderr
    assert re.search(r"rank +0 +box-[24]", downstairs), downstairs
    table = house.gpulayer("mesh", "status").stdout
    assert "~box-1" in table
    assert "MBIT/S" in table
    assert max(map(len, table.splitlines())) <= 100


def test_training_over_the_slow_wire_is_foretold_and_then_measured(house: LanMesh) -> None:
    """After the test above, when the links are known."""
    folder = house.laptop.home / "wide"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    command = ["python", "train.py", UPSTAIRS[0], DOWNSTAIRS[0]]
    done = house.laptop.run(command, cwd=folder, timeout=150)
    assert done.returncode == 0, done.stderr
    foretold = re.search(
        r"note: 1\.1 MB of gradients take about (\S+) s a step, at (\S+) Mbit/s between "
        r"box-[12] and box-[12]: 2 machines are faster than one if",
        done.stderr,
    )
    assert foretold, done.stderr
    assert float(foretold[2]) < TRUNK_MBIT * 1.2
    measured = re.findall(
        r"gpulayer: 2 machines train ([\d.]+)x as fast as one: of a step's .*, (\d+) ms are spent "
        r"waiting for 1\.1 MB of gradients; what helps: .*accumulate_grad_batches",
        done.stdout + done.stderr,
    )
    assert len(measured) == 1, done.stdout + done.stderr
    assert float(measured[0][0]) < 1.8
    print(f"foretold {foretold[1]} s, waited {measured[0][1]} ms a step")
