"""Two switches and a slow wire between them: agents find out, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from meshes import LanMesh, until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(500)]

TRUNK_MBIT = 20.0  # far below what two hosts on one switch do here, whatever else runs
UPSTAIRS, DOWNSTAIRS = ("box-1", "box-3"), ("box-2", "box-4")


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
    table = house.gpulayer("mesh", "status").stdout
    assert "~box-1" in table
    assert "MBIT/S" in table
    assert max(map(len, table.splitlines())) <= 100
