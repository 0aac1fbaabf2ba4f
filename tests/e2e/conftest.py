"""The mesh of most files here: a laptop and three boxes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lan import Lan
from meshes import LanMesh


@pytest.fixture(scope="module")
def mesh(lan: Lan) -> Iterator[LanMesh]:
    """A formed mesh, one per file; what its agents said is shown if a test fails."""
    mesh = LanMesh(lan)
    mesh.form()
    yield mesh
    for box in mesh.boxes:
        print(mesh.agents[box.name].output()[-4000:])
