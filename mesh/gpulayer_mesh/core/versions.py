"""Which versions the nodes of a job have, and what to install where they differ.

Another minor version of torch or Python keeps a node out of a job (`placement` sees to that): what
one rank sends, another may not understand. Another patch, another build of torch or another
GPUlayer is worth a word. This module does not know where versions come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpulayer_mesh.core.types import MemberSnapshot
from gpulayer_mesh.errors import Versions

_NUMBERS = ("torch", "Python", "GPUlayer")


def of(member: MemberSnapshot) -> Versions:
    """Return the versions of one node, "none" where it has told none."""
    caps = member.caps
    if caps is None:
        return Versions(member.name, "none", "none", "none")
    torch = "none" if caps.torch is None else caps.torch.version
    return Versions(member.name, torch, caps.python, caps.gpulayer)


def differ(rows: Sequence[Versions]) -> list[str]:
    """Return what of the nodes differs: "torch", "Python", "GPUlayer"."""
    columns = zip(*((row.torch, row.python, row.gpulayer) for row in rows), strict=True)
    return [name for name, column in zip(_NUMBERS, columns, strict=False) if len(set(column)) > 1]


def fix(rows: Sequence[Versions]) -> str:
    """Say what brings all nodes to what most of them have."""
    columns = zip(*((row.torch, row.python, row.gpulayer) for row in rows), strict=True)
    parts = []
    for name, column in zip(_NUMBERS, columns, strict=False):
        count = Counter(column)
        # Of as many the newer, and never the lack of it.
        most = max(count, key=lambda one: (one != "none", count[one], _numbers(one), one))
        odd = [row.node for row, version in zip(rows, column, strict=True) if version != most]
        if odd:
            parts.append(f"{name} {most} on {', '.join(odd[:3])}{', ...' if odd[3:] else ''}")
    return "to make them alike, install " + ", ".join(parts)


def _numbers(version: str) -> list[int]:
    plain = version.partition("+")[0].split(".")
    return [int(part) for part in plain if part.isdecimal()]
