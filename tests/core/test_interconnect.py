"""The fastest ring, on boxes as public listings of `nvidia-smi topo -m` show them.

None of them was recorded here.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from gpulayer_mesh.core.interconnect import fastest_ring
from gpulayer_mesh.core.types import Device
from mesh_cases import caps

# Two RTX 5090: noonghunna/club-3090#1229.
TWO = """
X PHB
PHB X
"""
# Four RTX 3090 with two bridges: aikitoria/open-gpu-kernel-modules#18.
PAIRS = """
X PHB NV4 NODE
PHB X NODE NV4
NV4 NODE X PHB
NODE NV4 PHB X
"""
# Five RTX 4090 on two sockets: noonghunna/club-3090#46.
FIVE = """
X SYS SYS SYS SYS
SYS X PHB NODE NODE
SYS PHB X NODE NODE
SYS NODE NODE X PHB
SYS NODE NODE PHB X
"""
# Eight GeForce behind four switches: kubernetes/kubernetes#53497; the second half is as the first.
SWITCHES = """
X PIX PHB PHB SYS SYS SYS SYS
PIX X PHB PHB SYS SYS SYS SYS
PHB PHB X PIX SYS SYS SYS SYS
PHB PHB PIX X SYS SYS SYS SYS
SYS SYS SYS SYS X PIX PHB PHB
SYS SYS SYS SYS PIX X PHB PHB
SYS SYS SYS SYS PHB PHB X PIX
SYS SYS SYS SYS PHB PHB PIX X
"""
# DGX-1 with V100: the links of NVIDIA/nccl#671 and of its white paper.
CUBE_MESH = """
X NV1 NV1 NV2 NV2 SYS SYS SYS
NV1 X NV2 NV1 SYS NV2 SYS SYS
NV1 NV2 X NV2 SYS SYS NV1 SYS
NV2 NV1 NV2 X SYS SYS SYS NV1
NV2 SYS SYS SYS X NV1 NV1 NV2
SYS NV2 SYS SYS NV1 X NV2 NV1
SYS SYS NV1 SYS NV1 NV2 X NV2
SYS SYS SYS NV1 NV2 NV1 NV2 X
"""


def devices(
    listing: str, numa: tuple[int | None, ...] = (), free: tuple[int, ...] = ()
) -> tuple[Device, ...]:
    links = tuple(tuple(row.split()) for row in listing.strip().splitlines())
    found = caps(len(links), links=links, numa=numa).devices
    return tuple(replace(one, memory_free_mib=free[one.index] if free else 8000) for one in found)


def all_alike(count: int, link: str, numa: tuple[int, ...]) -> tuple[Device, ...]:
    rows = (" ".join("X" if i == j else link for j in range(count)) for i in range(count))
    return devices("\n".join(rows), numa)


def test_one_gpu_is_all_there_is() -> None:
    assert fastest_ring(devices("X"), 1) == (0,)
    assert fastest_ring(devices(TWO), 2) == (0, 1)


def test_one_of_several_is_the_one_with_most_free_memory() -> None:
    assert fastest_ring(devices(TWO, free=(100, 200)), 1) == (1,)
    assert fastest_ring(devices(TWO), 1) == (0,)


def test_bridged_pairs_stay_together() -> None:
    box = devices(PAIRS)
    assert fastest_ring(box, 2) == (0, 2)
    assert fastest_ring([one for one in box if one.index != 2], 2) == (1, 3)
    assert fastest_ring(devices(PAIRS, free=(9, 9000, 9000, 9000)), 2) == (1, 3)


def test_ring_avoids_the_other_socket() -> None:
    box = devices(FIVE, numa=(1, 0, 0, 0, 0))
    assert fastest_ring(box, 2) == (1, 2)
    assert fastest_ring(box, 3) == (1, 2, 3)
    assert fastest_ring(box, 4) == (1, 2, 3, 4)


def test_pairs_behind_one_switch_then_one_socket() -> None:
    box = devices(SWITCHES, numa=(0, 0, 0, 0, 1, 1, 1, 1))
    assert fastest_ring(box, 2) == (0, 1)
    assert fastest_ring([one for one in box if one.index not in (0, 2)], 2) == (4, 5)
    assert fastest_ring(box, 4) == (0, 1, 2, 3)
    assert fastest_ring([one for one in box if one.index != 1], 4) == (4, 5, 6, 7)


def test_cube_mesh_has_rings_of_double_links() -> None:
    box = devices(CUBE_MESH, numa=(0, 0, 0, 0, 1, 1, 1, 1))
    assert fastest_ring(box, 2) == (0, 3)
    assert fastest_ring(box, 4) == (0, 1, 2, 3)
    # The only way round with three of these is over a single lane; never over the sockets.
    assert fastest_ring([box[i] for i in (0, 1, 4, 5, 6)], 4) == (0, 1, 4, 5)


def test_sockets_decide_where_all_links_are_alike() -> None:
    # Eight RTX 4090, all SYS: NVIDIA/go-gpuallocator#17. Sixteen V100 of a DGX-2, all NV6:
    # NVIDIA/nccl-tests#78. Eight A100 of a DGX, all NV12, a pair per NUMA node: NVIDIA/nccl#1505.
    geforce = all_alike(8, "SYS", (0, 0, 0, 0, 1, 1, 1, 1))
    assert fastest_ring([one for one in geforce if one.index not in (0, 1)], 4) == (4, 5, 6, 7)
    sixteen = all_alike(16, "NV6", (0,) * 8 + (1,) * 8)
    assert fastest_ring([one for one in sixteen if one.index != 3], 8) == tuple(range(8, 16))
    assert fastest_ring(all_alike(8, "NV12", (3, 3, 1, 1, 7, 7, 5, 5)), 2) == (0, 1)


def test_mig_instances_and_unified_memory_have_no_links() -> None:
    box = caps(3).devices
    assert fastest_ring([replace(one, memory_free_mib=None) for one in box], 2) == (0, 1)


def slowest(ring: tuple[int, ...], links: list[list[int]]) -> int:
    return min(links[a][b] for a, b in zip(ring, (*ring[1:], ring[0]), strict=True))


@pytest.mark.parametrize("count", [3, 4, 5])
def test_no_ring_has_a_faster_slowest_link(count: int, seed: int) -> None:
    rng = random.Random(seed)
    names = ["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV2"]
    for _ in range(20):
        size = rng.randint(count, 6)
        worth = [[0] * size for _ in range(size)]
        for i, j in combinations(range(size), 2):
            worth[i][j] = worth[j][i] = rng.randrange(len(names))
        rows = (
            " ".join("X" if i == j else names[worth[i][j]] for j in range(size))
            for i in range(size)
        )
        found = fastest_ring(devices("\n".join(rows)), count)
        best = max(slowest(ring, worth) for ring in permutations(range(size), count))
        assert max(slowest(ring, worth) for ring in permutations(found)) == best


def test_large_boxes_are_grown_one_by_one() -> None:
    for count in range(1, 32):
        assert len(set(fastest_ring(all_alike(32, "NV18", (0,) * 32), count))) == count
