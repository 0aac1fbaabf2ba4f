"""Which devices of a machine work best together: those of the fastest ring.

Collectives pass data around a ring, so its slowest link decides; among rings of equal slowest link
the one on fewer NUMA nodes wins, then the one with more fast links, then the one with more free
memory. Links are those of `nvidia-smi topo -m`. Exact where the sets and rings can be counted out,
which is up to 8 devices; above, devices are added one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, permutations
from math import comb, factorial

from gpulayer_mesh.core.types import Device

# From inside one board or switch to across sockets; NVn is above all, more lanes first.
_PCIE = {"PIX": 5, "PXB": 4, "PHB": 3, "NODE": 2, "SYS": 1}
_NVLINK = 100
_WORK_MAX = 3_000  # rings that are counted out; 1,680 for 6 of 8 devices, 20 ms

_Links = tuple[tuple[int, ...], ...]
_Worth = tuple[int, int, int]  # slowest link, NUMA nodes (negative), all links


def fastest_ring(devices: Sequence[Device], count: int) -> tuple[int, ...]:
    """Pick `count` of the devices; returns their indices, ascending."""
    if count >= len(devices):
        return tuple(sorted(device.index for device in devices))
    links = tuple(tuple(_link(one, other) for other in devices) for one in devices)
    nodes = tuple(-1 if device.numa is None else device.numa for device in devices)
    memory = [device.memory_free_mib or 0 for device in devices]
    best = max(
        _sets(links, nodes, count),
        key=lambda found: (found[1], sum(memory[i] for i in found[0]), [-i for i in found[0]]),
    )
    return tuple(sorted(devices[i].index for i in best[0]))


def _link(one: Device, other: Device) -> int:
    text = one.links[other.index] if other.index < len(one.links) else ""
    lanes = text.removeprefix("NV")
    return _NVLINK + int(lanes) if lanes != text and lanes.isdecimal() else _PCIE.get(text, 0)


@lru_cache(maxsize=256)  # boxes of one kind are alike
def _sets(
    links: _Links, nodes: tuple[int, ...], count: int
) -> tuple[tuple[tuple[int, ...], _Worth], ...]:
    """Return sets of devices, by position, and what each is worth."""
    rings = factorial(max(0, count - 1)) // 2 or 1
    if comb(len(links), count) * rings <= _WORK_MAX:
        sets = list(combinations(range(len(links)), count))
        return tuple((found, _worth(found, links, nodes, exact=True)) for found in sets)
    sets = [_grown(start, links, nodes, count) for start in range(len(links))]
    return tuple((found, _worth(found, links, nodes, exact=False)) for found in sets)


def _worth(found: tuple[int, ...], links: _Links, nodes: tuple[int, ...], *, exact: bool) -> _Worth:
    orders = [found]
    if exact and len(found) > 3:
        orders = [(found[0], *rest) for rest in permutations(found[1:]) if rest[0] < rest[-1]]
    slowest, total = max(_ring(order, links) for order in orders)
    return slowest, -len({nodes[i] for i in found}), total


def _ring(order: tuple[int, ...], links: _Links) -> tuple[int, int]:
    """Return the slowest link and the sum of all."""
    if len(order) == 1:
        return 0, 0
    steps = [links[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    return min(steps), sum(steps)


def _grown(start: int, links: _Links, nodes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Add the device with the best link to the end of the chain, near ones first."""
    chain = [start]
    while len(chain) < count:
        left = [i for i in range(len(links)) if i not in chain]
        last = chain[-1]
        chain.append(
            max(left, key=lambda i: (links[last][i], nodes[i] == nodes[start], links[i][start], -i))
        )
    return tuple(chain)
