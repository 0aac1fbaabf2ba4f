"""Zones from measured links: the border is where bandwidth falls, or round trips grow, by a factor.

For each of both the best links that hold all members together are looked at, as a minimum spanning
tree (single linkage: one good link is enough to belong). The largest step between these, if it is
a factor of three at least, is the cut; links beyond it lead to another zone. A zone that was
configured is never changed, and its nodes are left out here.

The same table gives the same zones on every node: there is no memory here. That zones hold still
while figures waver is the work of `links`, whose reports only follow changes beyond noise, and of
the factor. Cost: the links are sorted twice, 150 ms for 1,000 members with 20,000 links.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, sqrt

from gpulayer_mesh.core.types import Link

STEP = 3.0  # 1 Gbit/s to 300 Mbit/s; cables, hubs and busy machines differ by less
# Between agents an idle LAN takes about 1 ms, most of it ours; three times this is no LAN's.
RTT_FLOOR_US = 2000

_Edge = tuple[float, int, int]  # cost, and the two members


def inferred_zones(
    names: Sequence[str], configured: Sequence[str], links: Sequence[Link]
) -> tuple[str, ...]:
    """Return each member's inferred zone; "" where it has a configured one, or none was found.

    Where no border is found everybody is in one place, which has no name. A zone is called after
    its first member: "~box-1". Members without a measured link are in none.

    Args:
        configured: each member's own zone; "" for none.
    """
    usable = [
        link
        for link in links
        if link.bytes_s and link.rtt_us and not configured[link.a] and not configured[link.b]
    ]
    slow = _cut([(1 / link.bytes_s, link.a, link.b) for link in usable if link.bytes_s])
    far = _cut([(_rtt(link), link.a, link.b) for link in usable])
    zones = Groups(len(names))
    borders: list[Link] = []
    for link in usable:
        if link.bytes_s and 1 / link.bytes_s < slow and _rtt(link) < far:
            zones.join(link.a, link.b)
        else:
            borders.append(link)
    # A group that no border was measured to has only not been compared with the others yet.
    known = {
        zones.of(member)
        for link in borders
        if zones.of(link.a) != zones.of(link.b)
        for member in (link.a, link.b)
    }
    first: dict[int, str] = {}
    for i, name in enumerate(names):
        group = zones.of(i)
        if group in known:
            first[group] = min(first.get(group, name), name)
    return tuple(
        f"~{first[zones.of(i)]}" if zones.of(i) in known else "" for i in range(len(names))
    )


class Groups:
    """Members that belong together, joined pair by pair (union-find)."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._sizes = [1] * count

    def of(self, member: int) -> int:
        """Return the member that stands for this one's group."""
        parent = self._parent
        while parent[member] != member:
            parent[member] = member = parent[parent[member]]
        return member

    def join(self, a: int, b: int) -> bool:
        """Put two groups together; False if they were one."""
        a, b = self.of(a), self.of(b)
        if a == b:
            return False
        if self._sizes[a] < self._sizes[b]:
            a, b = b, a
        self._parent[b] = a
        self._sizes[a] += self._sizes[b]
        return True

    def size(self, member: int) -> int:
        return self._sizes[self.of(member)]


def _rtt(link: Link) -> float:
    return max(link.rtt_us or 0, RTT_FLOOR_US)


def _cut(edges: list[_Edge]) -> float:
    """Return the cost from which on a link leads elsewhere; infinity where there is no border."""
    edges.sort()
    groups = Groups(1 + max((b for _, _, b in edges), default=0))
    tree = [cost for cost, a, b in edges if groups.join(a, b)]
    steps = [(after / before, i) for i, (before, after) in enumerate(pairwise(tree))]
    step, i = max(steps, default=(1.0, 0))
    return sqrt(tree[i] * tree[i + 1]) if step >= STEP else inf
