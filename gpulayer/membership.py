"""Inviting, joining and removing from the command line, with the roster spread at once.

Only the founding machine can invite and remove: it holds the key of the mesh. Needs no agent on
this machine. Does not know how a ceremony proves anything (`gpulayer_mesh.core.joining` does), nor
how results are printed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gpulayer_mesh.client import MeshClient
from gpulayer_mesh.core.joining import Admission, JoinRequest, read_line
from gpulayer_mesh.core.roster import RosterEntry
from gpulayer_mesh.core.types import Role
from gpulayer_mesh.errors import (
    ConfigError,
    DiscoveryError,
    GpuLayerError,
    NoMeshError,
)
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime import interfaces, joining

SPREAD_S = 2.0  # to find a member to tell; a mesh of one has nobody, gossip repairs the rest


@dataclass(frozen=True, slots=True)
class Spread:
    """Who has a new roster now; the others get it through gossip, or when they are back."""

    reached: tuple[str, ...]
    missed: tuple[str, ...]


class Invitation:
    """One open invitation: its line, and who came."""

    def __init__(self, home: Path, listener: joining.JoinListener) -> None:
        self._home = home
        self._listener = listener
        self.line = listener.line

    @property
    def uses_left(self) -> int:
        return self._listener.uses_left

    @property
    def ended(self) -> str:
        """Why no more machine can join: "used-up", "expired", "burned"; "" while it is open."""
        return self._listener.ended.value if self._listener.ended else ""

    async def __aiter__(
        self,
    ) -> AsyncIterator[
        RosterEntry | joining.TriedWrongly | joining.NotAdmitted | joining.WasMember
    ]:
        """Yield each new member, each wrong try, and who was not or need not be admitted."""
        async for news in self._listener:
            if isinstance(news, joining.Joined):
                yield _mesh(self._home).book.members[news.request.node]
            else:
                yield news


@asynccontextmanager
async def invitation(
    home: Path,
    *,
    uses: int = 1,
    valid_s: float = 600.0,
    roles: tuple[Role, ...] = (Role.WORKER,),
    bind: str | None = None,
) -> AsyncIterator[Invitation]:
    """Open an invitation and close it at the end of the block.

    Args:
        bind: listen on this address only and invite to it; None: on every address.

    Raises:
        NoMeshError: no mesh here. NotAllowedError: another machine holds its key.
        ConfigError: this machine has no address to invite to.
    """
    identity = identities.load_or_create(home)
    mesh = _mesh(home)
    identities.load_ca_key(home)  # an unusable key should stop us before anybody is invited
    hosts = [bind] if bind else _hosts()
    if not hosts:
        raise ConfigError("this machine has no network address that others could reach")

    def admit(request: JoinRequest) -> Admission:
        peers = identities.load_peers(home)
        admission = identities.admit(identity, request, roles, peers)
        if request.addresses:  # at once: whoever joins next is told about this one
            identities.save_peers(home, {**peers, request.node: request.addresses})
        return admission

    async with joining.JoinListener(
        mesh=mesh.mesh, admit=admit, advertise=hosts, bind=bind, uses=uses, valid_s=valid_s
    ) as listener:
        yield Invitation(home, listener)


async def join(home: Path, line: str, name: str) -> tuple[RosterEntry, str, bool]:
    """Join with a pasted line; return our entry in the roster, the mesh id, and whether that
    changed anything.

    Raises:
        JoinError: refused or not reached. ConfigError: this machine is in another mesh.
    """
    identity = identities.load_or_create(home)
    known = identities.load_mesh(identity)
    if known is not None and known.mesh != read_line(line).mesh:
        raise ConfigError(
            f"this machine already belongs to mesh {known.mesh[:8]}, the line invites to another",
            hint=f"to leave it, remove {str(home / 'mesh')!r}",
        )
    admission = await joining.join(line, key=identity.key, name=name)
    mesh = identities.save_membership(identity, admission)
    return mesh.book.members[identity.node], mesh.mesh, admission.new


async def remove(home: Path, ident: str) -> tuple[RosterEntry, Spread]:
    """Take a member out of the roster, by name or start of its id, and tell the others.

    Raises:
        NoMeshError, NotAllowedError: as `invitation`. GpuLayerError: no such member, or ourselves.
    """
    identity = identities.load_or_create(home)
    mesh = _mesh(home)
    identities.load_ca_key(home)
    member = mesh.book.find(ident)
    if member is None:
        raise GpuLayerError(f"no member {ident!r}", hint="`gpulayer mesh status` lists them")
    if member.node == identity.node:
        raise GpuLayerError(
            "this machine holds the key of the mesh and cannot remove itself",
            hint="to leave a machine out of jobs, stop its agent",
        )
    try:
        # Connected with the roster that still lists it, so that it hears of its removal as well.
        async with await MeshClient.connect(home, deadline_s=SPREAD_S) as client:
            book = identities.remove_member(identity, member.node)
            reached, missed = await client.push_roster(book.signed)
    except DiscoveryError:
        book = identities.remove_member(identity, member.node)
        reached, missed = [], [e.name for e in book.roster.entries if e.node != identity.node]
    told = Spread(
        tuple(name for name in reached if name != member.name),
        tuple(name for name in missed if name != member.name),
    )
    peers = identities.load_peers(home)
    identities.save_peers(home, {n: a for n, a in peers.items() if n != member.node})
    return member, told


async def spread(home: Path) -> Spread:
    """Hand the newest roster to every member that can be reached."""
    try:
        async with await MeshClient.connect(home, deadline_s=SPREAD_S) as client:
            reached, missed = await client.push_roster(client.book.signed)
    except DiscoveryError:
        us = identities.load_or_create(home).node
        missed = [e.name for e in _mesh(home).book.roster.entries if e.node != us]
        reached = []
    return Spread(tuple(reached), tuple(missed))


def _mesh(home: Path) -> identities.MeshFiles:
    mesh = identities.load_mesh(identities.load_or_create(home))
    if mesh is None:
        raise NoMeshError(
            "this machine belongs to no mesh yet", hint="gpulayer mesh create    (start one here)"
        )
    return mesh


def _hosts() -> list[str]:
    offered = interfaces.announce_addresses(interfaces.list_interfaces(), 1)
    # Link-local IPv6 needs the name of the other machine's interface, which nobody knows here.
    return [a.host for a in offered if not ipaddress.ip_address(a.host).is_link_local]
