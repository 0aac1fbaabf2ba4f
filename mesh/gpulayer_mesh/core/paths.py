"""Paths between nodes that were found cut: which of a job's nodes to leave out then.

Control messages may pass where the data of ranks does not, so no list of members tells of such a
pair: a pre-flight, or a job's start, does. This module does not know how paths are tried, nor what
takes the place of a node that is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from gpulayer_mesh.core.types import NodeId

Pair: TypeAlias = tuple[NodeId, NodeId]  # who connects, and to whom
WAYS_MAX = 16  # each is a plan to try; four cut pairs without a node in common have as many


def ways_apart(nodes: Sequence[NodeId], cut: Collection[Pair]) -> Iterator[frozenset[NodeId]]:
    """Yield whom to leave out of these nodes so that all others reach each other, best first.

    Whoever is cut from most is the likeliest cause, then who was not reached, as a firewall lets
    out what it does not let in; of two alike the later one goes, for the first node keeps the job.
    """
    return islice(_ways(list(nodes), list(cut)), WAYS_MAX)


def _ways(nodes: list[NodeId], cut: list[Pair]) -> Iterator[frozenset[NodeId]]:
    left = set(nodes)
    cut = [pair for pair in cut if left.issuperset(pair)]
    if not cut:
        yield frozenset()
        return
    count = Counter(node for pair in {frozenset(pair) for pair in cut} for node in pair)
    unreached = Counter(pair[1] for pair in cut)
    worst = max(reversed(nodes), key=lambda node: (count[node], unreached[node]))
    others = {node for pair in cut if worst in pair for node in pair} - {worst}
    for leaving in ({worst}, others):
        for more in _ways([node for node in nodes if node not in leaving], cut):
            yield more | leaving


def cut_from(nodes: Mapping[NodeId, str], cut: Collection[Pair]) -> dict[NodeId, str]:
    """Return the nodes that one of these, whose names are given, has no path to, and why not."""
    found: dict[NodeId, str] = {}
    for pair in sorted(cut):
        for node, other in (pair, pair[::-1]):
            if other in nodes and node not in nodes:
                found.setdefault(node, f"has no open path to {nodes[other]}")
    return found
