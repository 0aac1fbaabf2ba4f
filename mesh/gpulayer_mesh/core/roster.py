"""The roster: who is a member, under which name, in which roles; signed by the mesh CA.

Epochs only rise. `RosterBook` holds the newest roster and ignores older ones; the shell keeps it
on disk, and the kept file is the high-water mark. An entry travels as (public key, name, roles):
the node id is the key's hash, so an entry with somebody else's id cannot even be written.

Does not know who is alive, where anybody is, or how rosters travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.certificates import id_of, node_id
from gpulayer_mesh.core.types import MeshId, Name, NodeId, Role
from gpulayer_mesh.errors import LocalProtocolError, RemoteProtocolError

MEMBERS_MAX = 1024  # gossip keeps one view per member; beyond this SWIM's figures do not hold
# Bytes: 1,024 x (32 key + 63 name + 3 roles + framing) is 133 KiB at most.
ROSTER_MAX = 160 * 1024

_KIND = "roster"
_NAME_MAX = 63

_Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Roles = Annotated[tuple[Role, ...], Meta(max_length=len(Role))]


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """One member."""

    node: NodeId  # hash of `public_key`
    public_key: bytes  # raw Ed25519, 32 bytes
    name: Name
    roles: tuple[Role, ...]  # in the order of `Role`, each once


@dataclass(frozen=True, slots=True)
class Roster:
    """All members at one epoch, sorted by name."""

    mesh: MeshId
    epoch: int  # >= 1
    entries: tuple[RosterEntry, ...]


@dataclass(frozen=True, slots=True)
class _Body:
    members: Annotated[tuple[tuple[_Key, Name, _Roles], ...], Meta(max_length=MEMBERS_MAX)]


def entry(public_key: bytes, name: str, roles: tuple[Role, ...]) -> RosterEntry:
    """Build an entry from a raw key; roles are put in order."""
    return RosterEntry(node_id(public_key), public_key, name, _ordered(roles))


def with_member(roster: Roster, new: RosterEntry) -> Roster:
    """Return the next epoch with `new` in it.

    A node already listed keeps one entry: it gets the new name and adds the new roles to its old
    ones (taking roles away is `without_member`). A name taken by another node gets -2, -3, ...

    Raises:
        LocalProtocolError: the mesh is full.
    """
    others = tuple(e for e in roster.entries if e.node != new.node)
    roles = new.roles + tuple(r for e in roster.entries if e.node == new.node for r in e.roles)
    if len(others) >= MEMBERS_MAX:
        raise LocalProtocolError(f"the mesh is full: {MEMBERS_MAX} members")
    name = _free_name(new.name, {e.name.lower() for e in others})
    added = entry(new.public_key, name, roles)
    members = sorted((*others, added), key=lambda e: e.name)
    return Roster(roster.mesh, roster.epoch + 1, tuple(members))


def without_member(roster: Roster, node: NodeId) -> Roster:
    """Return the next epoch without one node.

    Raises:
        LocalProtocolError: it is no member.
    """
    rest = tuple(e for e in roster.entries if e.node != node)
    if len(rest) == len(roster.entries):
        raise LocalProtocolError(f"node {node[:8]!r} is no member")
    return Roster(roster.mesh, roster.epoch + 1, rest)


def seal_roster(ca_key: Ed25519PrivateKey, roster: Roster) -> bytes:
    """Sign a roster; its sender is the mesh itself, its sequence number the epoch.

    Raises:
        LocalProtocolError: another mesh's key, or the roster breaks a rule.
    """
    if id_of(ca_key) != roster.mesh:
        raise LocalProtocolError("the roster belongs to another mesh than the CA key")
    if problem := _problem(roster):
        raise LocalProtocolError(problem)
    body = _Body(tuple((e.public_key, e.name, e.roles) for e in roster.entries))
    mesh = roster.mesh
    return wire.seal(ca_key, kind=_KIND, mesh=mesh, sender=mesh, seq=roster.epoch, body=body)


def open_roster(data: bytes, ca_public_key: Ed25519PublicKey) -> Roster:
    """Verify and decode a signed roster.

    Raises:
        RemoteProtocolError: malformed, not signed by this CA, or it breaks a rule.
    """
    mesh = id_of(ca_public_key)
    envelope = wire.open_envelope(
        data,
        mesh=mesh,
        key_of=lambda sender: ca_public_key if sender == mesh else None,
        kind=_KIND,
        max_bytes=ROSTER_MAX,
    )
    body = wire.decode_as(_Body, envelope.body)
    entries = tuple(
        RosterEntry(node_id(key), key, name, roles) for key, name, roles in body.members
    )
    roster = Roster(mesh, envelope.seq, entries)
    if problem := _problem(roster):
        raise RemoteProtocolError(problem)
    return roster


class RosterBook:
    """The newest roster seen, with what every check needs looked up in O(1)."""

    def __init__(self, ca_public_key: Ed25519PublicKey, signed: bytes) -> None:
        self._ca = ca_public_key
        self._keys: dict[NodeId, Ed25519PublicKey] = {}
        self._adopt(open_roster(signed, ca_public_key), signed)

    @property
    def mesh(self) -> MeshId:
        return self.roster.mesh

    @property
    def epoch(self) -> int:
        return self.roster.epoch

    @property
    def members(self) -> Mapping[NodeId, RosterEntry]:
        """Every member by node id."""
        return self._members

    def __contains__(self, node: object) -> bool:
        return node in self._members

    def roles(self, node: NodeId) -> tuple[Role, ...]:
        """Return a node's roles; none for a stranger."""
        found = self._members.get(node)
        return found.roles if found else ()

    def key_of(self, node: NodeId) -> Ed25519PublicKey | None:
        """Return a member's key, None for a stranger; fits `wire.open_envelope`."""
        found = self._members.get(node)
        if found is None:
            return None
        if node not in self._keys:
            self._keys[node] = Ed25519PublicKey.from_public_bytes(found.public_key)
        return self._keys[node]

    def find(self, ident: str) -> RosterEntry | None:
        """Look a member up by name or by at least 6 characters of its id; None if not exactly
        one fits."""
        found = [e for e in self.roster.entries if e.name.lower() == ident.lower()]
        if not found and len(ident) >= 6:
            found = [e for e in self.roster.entries if e.node.startswith(ident.lower())]
        return found[0] if len(found) == 1 else None

    def hinted(self, prefix: str) -> NodeId | None:
        """Return the member whose id starts with what discovery heard, None for a stranger."""
        return next((node for node in self._members if node.startswith(prefix)), None)

    def examine(self, signed: bytes) -> Roster:
        """Verify a roster without adopting it; raises as `open_roster`."""
        return open_roster(signed, self._ca)

    def offer(self, signed: bytes) -> bool:
        """Adopt a newer roster; return whether it was newer.

        Raises:
            RemoteProtocolError: not a roster of this mesh.
        """
        if signed == self.signed:  # what most push-pulls bring; saves the signature check
            return False
        roster = open_roster(signed, self._ca)
        if roster.epoch <= self.epoch:
            return False
        self._adopt(roster, signed)
        return True

    def _adopt(self, roster: Roster, signed: bytes) -> None:
        self.roster = roster
        self.signed = signed  # exactly as received, to be passed on
        self._members = {e.node: e for e in roster.entries}
        self._keys = {n: k for n, k in self._keys.items() if n in self._members}


def _ordered(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    return tuple(r for r in Role if r in roles)


def _problem(roster: Roster) -> str | None:
    entries = roster.entries
    if not 1 <= roster.epoch < 2**63:
        return f"roster epoch {roster.epoch} is not a positive number"
    if len(entries) > MEMBERS_MAX:
        return f"roster of {len(entries)} members, the limit is {MEMBERS_MAX}"
    if any(e.node != node_id(e.public_key) for e in entries):
        return "roster entry whose node id is not the hash of its key"
    if len({e.node for e in entries}) != len(entries):
        return "roster lists a node twice"
    if len({e.name.lower() for e in entries}) != len(entries):
        return "roster lists a name twice"
    if any(e.roles != _ordered(e.roles) for e in entries):
        return "roster entry with roles out of order"
    return None


def _free_name(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 2
    while name.lower() in taken:
        suffix = f"-{number}"
        name, number = wanted[: _NAME_MAX - len(suffix)] + suffix, number + 1
    return name
