"""Which of the nodes that fit are best wired together, and in which order their ranks should stand.

Collectives pass data around a ring of ranks, and the slowest wire on it sets the pace. So nodes are
taken from the largest group that good links hold together, and ranks stand such that neighbours are
near and zones are crossed as seldom as can be. A link costs what it takes for one bucket of
gradients, in levels of a factor of 1.4; two levels are noise where nodes are chosen by them. A
measured link is better than an unknown one.

This module does not know what a node has (`placement`) or how links are measured. A node is a
number: its place in the order in which `placement` likes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpulayer_mesh.core.types import Link
from gpulayer_mesh.core.zones import Groups

# DDP's first bucket, 1 MiB, in bytes and microseconds: larger ones leave round trips without a say.
_BUCKET = 1024 * 1024 * 1_000_000
NOISE = 2  # levels
UNKNOWN = 1000  # a level worse than any

# A wire is one number, from its highest bits on: level, other end, place among the links. Wires
# compare by level, then by liking, and 20,000 of them are nothing to the garbage collector.
_BITS = 20
_MASK = (1 << _BITS) - 1
_LEVEL = 2 * _BITS  # wire >> _LEVEL


class Wires:
    """The measured links among some nodes.

    Args:
        positions: of the nodes in the snapshot that the links are of, liked ones first.
    """

    def __init__(self, links: Sequence[Link], positions: Sequence[int]) -> None:
        self._links = links
        self._wires: list[dict[int, int]] = [{} for _ in positions]  # other end -> wire
        number = {position: i for i, position in enumerate(positions)}
        for i, (one, other, rtt_us, bytes_s, _, _, _) in enumerate(links):
            if bytes_s and one in number and other in number:
                cost_us = (rtt_us or 0) + _BUCKET // bytes_s
                level = (cost_us * cost_us).bit_length()  # twice the logarithm to the base of two
                a, b = number[one], number[other]
                self._wires[a][b] = (level << _BITS | b) << _BITS | i
                self._wires[b][a] = (level << _BITS | a) << _BITS | i

    def best(self, node: int, others: Collection[int]) -> Link | None:
        """Return the best link from a node to any of others."""
        wire = self._best(node, others)
        return None if wire is None else self._links[wire & _MASK]

    def between(self, a: int, b: int) -> Link | None:
        wire = self._wires[a].get(b)
        return None if wire is None else self._links[wire & _MASK]

    def closest(self, nodes: Sequence[int], count: int) -> tuple[list[int], int]:
        """Return those of the nodes to choose `count` from, and the level that holds them together.

        It is all of them, and UNKNOWN, where too few are measured.
        """
        if count < 2:
            return list(nodes), 0
        inside = set(nodes)
        edges: dict[int, list[int]] = defaultdict(list)  # level -> ends, one after the other
        for a in nodes:
            for b, wire in self._wires[a].items():
                if a < b and b in inside:
                    edges[wire >> _LEVEL] += (a, b)
        groups = Groups(len(self._wires))
        limit, member = UNKNOWN, -1
        for level in sorted(edges):
            if level > limit + NOISE:
                break
            ends = iter(edges[level])
            for a, b in zip(ends, ends, strict=True):
                if groups.join(a, b) and member < 0 and groups.size(a) >= count:
                    limit, member = level, a
        if member < 0:
            return list(nodes), UNKNOWN
        return [node for node in nodes if groups.of(node) == groups.of(member)], limit

    def fill(self, zones: Mapping[str, Sequence[int]], count: int) -> list[int]:
        """Take `count` nodes zone by zone: the largest first, of equal ones the best wired."""
        taken: list[int] = []
        open_ = dict(zones)
        while (left := count - len(taken)) > 0:
            largest = max(min(left, len(nodes)) for nodes in open_.values())
            equal = [zone for zone, nodes in open_.items() if min(left, len(nodes)) == largest]
            if len(equal) > 1 and taken:
                equal.sort(key=lambda zone: self._apart(open_[zone], taken))
            taken += open_.pop(equal[0])[:left]
        return taken

    def ranked(self, nodes: Iterable[int], zone: Sequence[str]) -> list[int]:
        """Return the nodes in the order of their ranks: the best reached one first, then by zones.

        Args:
            zone: of each node by its number.
        """
        among = set(nodes)
        last = min(among, key=lambda node: (self._reached(node, among), node))
        left: dict[str, dict[int, None]] = defaultdict(dict)
        for node in sorted(among):
            left[zone[node]][node] = None
        order = []
        while True:
            order.append(last)
            among.discard(last)
            del left[zone[last]][last]
            if not among:
                return order
            here: Collection[int] = left[zone[last]] or among
            wire = self._best(last, here)
            last = min(here) if wire is None else wire >> _BITS & _MASK

    def _best(self, node: int, others: Collection[int]) -> int | None:
        found = [wire for other, wire in self._wires[node].items() if other in others]
        return min(found, default=None)

    def _apart(self, some: Sequence[int], others: Sequence[int]) -> int:
        """Return the level of the best link between two sets of nodes."""
        far = set(others)
        found = [wire for node in some if (wire := self._best(node, far)) is not None]
        return min(found) >> _LEVEL if found else UNKNOWN

    def _reached(self, node: int, others: Collection[int]) -> tuple[int, int]:
        """Return how badly others reach a node: the worst of them, then all."""
        found = [wire for other, wire in self._wires[node].items() if other in others]
        if not found:
            return UNKNOWN, UNKNOWN
        return max(found) >> _LEVEL, sum(found) // len(found) >> _LEVEL
