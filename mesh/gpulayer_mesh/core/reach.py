"""What pre-flight finds out between the nodes of a job: the address to use for each, or a refusal.

Every node tries every other one: first which of its addresses answer at all, then, over the address
that all can use, whether a megabyte gets through on several of its ephemeral ports. Small packets
prove little: a tunnel with a smaller MTU, or a firewall that forgets a connection, lets a handshake
pass and nothing after it.

This module does not know how anything is tried (`runtime/preflight`) or who asks whom (`starting`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from gpulayer_mesh.core.types import NodeId, Port, Text
from gpulayer_mesh.errors import PathsCutError, Refusal, Unreached

NONCE_BYTES = 16
BULK_BYTES = 1024 * 1024  # each way between two nodes
AT_ONCE = 64  # targets that a node tries together
PORTS = 3  # of a node: one in each third of its range, for firewalls that open a part of it
IMPORTS_MAX = 100_000  # as many as files in a bundle
_NO_ADDRESS = "it has told no address"
_HINTS = 4  # lines; five machines that all refuse each other need no more to see what is wrong

Host = Annotated[str, Meta(max_length=64)]  # as `Address.host`


class Trouble(StrEnum):
    """What happened instead of an answer."""

    SILENT = "silent"  # nothing came back, as behind a firewall that drops
    REFUSED = "refused"  # the machine, or a firewall in its name, said no
    NO_ROUTE = "no route"
    STRANGER = "stranger"  # somebody answered who does not hold the nonce
    STALLED = "stalled"  # the proof went through, full packets do not
    BROKEN = "broken"  # anything else; the text says what


@dataclass(frozen=True, slots=True)
class Opened:
    """What a node listens on for a moment, and what its script lacks there."""

    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=PORTS)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    first_port: Port  # of the range that its system takes ephemeral ports from
    last_port: Port
    missing: Annotated[tuple[str, ...], Meta(max_length=IMPORTS_MAX)] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """What one node is to try of another one's."""

    node: NodeId
    hosts: Annotated[tuple[Host, ...], Meta(max_length=16)]  # in the order to try them
    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=PORTS)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    # To send, over all ports together; 0: nothing beyond the proof of who answers.
    bulk_bytes: Annotated[int, Meta(ge=0, le=BULK_BYTES)] = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """What one port of one address did."""

    host: Host
    port: Port
    trouble: Trouble
    text: Text  # a clause: "no answer in 2.0 s"

    def __str__(self) -> str:
        return f"{self.host} port {self.port}: {self.text}"


@dataclass(frozen=True, slots=True)
class Reached:
    """What one target's addresses did."""

    node: NodeId
    # Those of which all ports worked, in the order they were given; () is a failure.
    hosts: Annotated[tuple[Host, ...], Meta(max_length=16)] = ()
    ms: Annotated[float, Meta(ge=0)] | None = None  # over `hosts[0]`
    failed: Annotated[tuple[Failed, ...], Meta(max_length=16 * PORTS)] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """One node of the job, for what is said of it."""

    node: NodeId
    name: str
    host: str = ""  # an address of it, "" if it has told none
    first_port: int = 1024
    last_port: int = 65535


Paths = Mapping[tuple[int, int], Reached]  # (from, to), as places in the list of nodes


def pairs(count: int) -> list[tuple[int, int]]:
    """Return who has to reach whom: every node every other one, and the first one itself.

    All ranks meet at an address of the first node, its own ranks too. Each begins with its
    successor, so that not all dial the same node first.
    """
    apart = [(i, (i + k) % count) for i in range(count) for k in range(1, count)]
    return [(0, 0), *apart]


def common_hosts(paths: Paths, count: int) -> list[str]:
    """Choose for each node the first address that all others reached; "" where there is none."""
    seen: list[list[tuple[str, ...]]] = [[] for _ in range(count)]
    for i, j in pairs(count):
        seen[j].append(paths[i, j].hosts)
    return [
        next((host for host in first if all(host in one for one in others)), "")
        for first, *others in seen
    ]


def without(reached: Reached, gone: str, tried: Reached) -> Reached:
    """Return what is left of a path of which an address that had answered failed after all."""
    hosts = tuple(host for host in reached.hosts if host != gone)
    return replace(reached, hosts=hosts, failed=(*tried.failed, *reached.failed)[: 16 * PORTS])


def refusal(peers: Sequence[Peer], paths: Paths) -> PathsCutError:
    """Say who cannot reach whom, which way, on which ports, and what usually helps."""
    cut = sorted(pair for pair, reached in paths.items() if not reached.hosts)
    refusals = [
        Refusal(peers[i].name, f"cannot connect to {peers[j].name}: {told or _NO_ADDRESS}", False)
        for i, j in cut
        for told in [_telling(paths[i, j].failed)]
    ]
    hints = _hints(peers, [(i, j, _telling(paths[i, j].failed)) for i, j in cut])
    apart = _apart(paths, len(peers))
    for j in dict.fromkeys(j for _, j in apart):
        name = peers[j].name
        refusals.append(Refusal(name, "has no address that all others can reach", False))
        hints.append(
            f"the others reach {name} at different addresses: start its agent with --bind and one "
            "that all can use"
        )
    return PathsCutError(
        "the nodes cannot all reach each other",
        pairs=tuple((peers[i].node, peers[j].node) for i, j in (*cut, *apart) if i != j),
        refusals=tuple(refusals),
        unreached=tuple(_unreached(peers, paths, i, j) for i, j in cut),
        hint="\n".join(hints[:_HINTS]),
    )


def _apart(paths: Paths, count: int) -> list[tuple[int, int]]:
    """Return who reaches a node, but not at the address where most do."""
    found = []
    seen_by: list[dict[int, tuple[str, ...]]] = [{} for _ in range(count)]
    for (i, j), one in sorted(paths.items()):
        if one.hosts:
            seen_by[j][i] = one.hosts
    for j, seen in enumerate(seen_by):
        if not seen:
            continue
        known = dict.fromkeys(host for hosts in seen.values() for host in hosts)
        best = max(known, key=lambda host: sum(host in hosts for hosts in seen.values()))
        found += [(i, j) for i, hosts in seen.items() if best not in hosts]
    return found


def _unreached(peers: Sequence[Peer], paths: Paths, i: int, j: int) -> Unreached:
    failed = paths[i, j].failed
    told = _telling(failed)
    host = "" if told is None else told.host
    ports = dict.fromkeys(one.port for one in failed if one.host == host)
    return Unreached(
        source=peers[i].name,
        target=peers[j].name,
        host=host,
        ports=tuple(ports),
        what=_NO_ADDRESS if told is None else told.text,
        back=bool(paths[j, i].hosts),
    )


def _telling(failed: Sequence[Failed]) -> Failed | None:
    """Return the failure that says most: of the path that got farthest, then of the best address.

    Those of the address that others would use come first.
    """
    stalled = [one for one in failed if one.trouble is Trouble.STALLED]
    return next(iter((*stalled, *failed)), None)


def _hints(peers: Sequence[Peer], cut: Sequence[tuple[int, int, Failed | None]]) -> list[str]:
    hints: dict[str, None] = {}
    closed: dict[int, list[int]] = {}  # to -> from, in which a firewall seems to stand
    for i, j, told in cut:
        one, other = peers[i].name, peers[j].name
        if told is None or told.trouble is Trouble.STRANGER:
            hints[
                f"{one} does not find {other} at its addresses: start the agent of {other} with "
                "--bind and one that the others can use"
            ] = None
        elif told.trouble is Trouble.STALLED:
            hints[
                f"full packets are lost from {one} to {other}: lower the MTU of both (sudo ip link "
                "set dev DEVICE mtu 1400), or let ICMP through: a tunnel or VPN may need it"
            ] = None
        else:
            closed.setdefault(j, []).append(i)
    for j, sources in closed.items():
        froms = ", ".join(f"{peers[i].name} ({peers[i].host})" for i in sources)
        hints[
            f"on {peers[j].name}, let TCP ports {peers[j].first_port}-{peers[j].last_port} in from "
            f"{froms}"
        ] = None
    for j, sources in list(closed.items())[:1]:
        hints[
            f"with ufw: sudo ufw allow proto tcp from {peers[sources[0]].host} to any port "
            f"{peers[j].first_port}:{peers[j].last_port}"
        ] = None
    return list(hints)
