"""Where the members are: their addresses, requests to them, and the first contact.

Addresses come from gossip, discovery, the user and an earlier life (mesh/peers.msgpack); what
worked last goes first. Members that are not alive here are knocked at for ever. This module does
not know what a request says: a member that answered is told to `contacted`, no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

from gpulayer_mesh.config import parse_peer
from gpulayer_mesh.core.member import MemberView
from gpulayer_mesh.core.roster import RosterBook
from gpulayer_mesh.core.types import Address, Addresses, AliveRecord, NodeId, NodeState
from gpulayer_mesh.errors import GpuLayerError, NotAllowedError, TransportError
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime.background import Background
from gpulayer_mesh.runtime.dial import Dialer
from gpulayer_mesh.runtime.discovery import Candidate
from gpulayer_mesh.runtime.interfaces import InterfaceWatch, rank_addresses

log = logging.getLogger("gpulayer.peers")

CALL_S = 10.0  # one answer from a healthy agent takes milliseconds; a swapping one, seconds
CONTACT_S = 5.0  # for a dial over all addresses and a ping
SEEK_S = 10.0  # between rounds over remembered and configured peers that are not alive
SAVE_S = 5.0  # after a change, so that a join of many writes once
DIALS_AT_ONCE = 10  # of candidates; mDNS spoofing cannot make us dial more
ADDRESSES_MAX = 8  # per member; as in its record


class PeerCall(Protocol):
    """One request to another agent's door."""

    def __call__(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        addresses: Addresses = (),
        deadline_s: float = CALL_S,
    ) -> Awaitable[bytes]: ...


class PeerStream(Protocol):
    """The same, with the answer piece by piece as it arrives; close it."""

    def __call__(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        addresses: Addresses = (),
        deadline_s: float = CALL_S,
    ) -> AsyncGenerator[bytes, None]: ...


class Peers:
    """The address book of one agent.

    Args:
        views: membership's, live.
        configured: "host:port" of peers that the user named.
        contacted: called with a member that was just reached.
    """

    def __init__(
        self,
        *,
        home: Path,
        node: NodeId,
        book: RosterBook,
        dialer: Dialer,
        watch: InterfaceWatch,
        views: Mapping[NodeId, MemberView],
        configured: tuple[str, ...],
        contacted: Callable[[NodeId], None],
    ) -> None:
        self._home = home
        self._node = node
        self._book = book
        self._dialer = dialer
        self._watch = watch
        self._views = views
        self._configured = configured
        self._contacted = contacted
        self._known = identities.load_peers(home)
        self._dirty = asyncio.Event()
        self._dialling: set[str] = set()  # node ids, and configured peers as written
        self._background = Background(log, expected=(GpuLayerError,))

    async def close(self) -> None:
        await self._background.close()
        identities.save_peers(self._home, self._known)

    def addresses(self, node: NodeId) -> Addresses:
        """Return where a member may be reached, best first."""
        view = self._views.get(node)
        current = view.record.addresses if view else ()
        found = _merged(self._proven(node), current) or self._known.get(node, ())
        return rank_addresses(found, self._watch.current)

    async def call(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        addresses: Addresses = (),
        deadline_s: float = CALL_S,
    ) -> bytes:
        """Send one request to a member's door; `PeerCall`.

        Args:
            addresses: where it may be as well, if ours do not work.

        Raises:
            NotAllowedError: it is no member, or refused us.
            TransportError: it cannot be reached, or did not answer in time.
            GpuLayerError: what its door answered.
        """
        if node not in self._book:
            raise NotAllowedError(f"node {node[:8]!r} is no member")
        where = _merged(self.addresses(node), addresses)
        return await self._dialer.request(
            node, where, method, path, body=body, deadline_s=deadline_s
        )

    async def stream(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        addresses: Addresses = (),
        deadline_s: float = CALL_S,
    ) -> AsyncGenerator[bytes, None]:
        """Send one request and yield the answer as it arrives; `PeerStream`.

        Args:
            deadline_s: for the start of the answer; whoever reads has a deadline for the rest.

        Raises:
            As `call`.
        """
        if node not in self._book:
            raise NotAllowedError(f"node {node[:8]!r} is no member")
        where = _merged(self.addresses(node), addresses)
        answer = self._dialer.stream(node, where, method, path, body=body, deadline_s=deadline_s)
        async with contextlib.aclosing(answer):
            async for piece in answer:
                yield piece

    def heard(self, record: AliveRecord) -> None:
        """A member says where it is."""
        self._remember(record.node, record.addresses)

    def keep(self, members: Collection[NodeId]) -> None:
        """Forget who is not among them."""
        self._known = {node: found for node, found in self._known.items() if node in members}
        self._dirty.set()

    # --- loops -----------------------------------------------------------------------------------

    async def follow(self, candidates: asyncio.Queue[Candidate]) -> None:
        """Contact every member that discovery heard of."""
        gate = asyncio.Semaphore(DIALS_AT_ONCE)
        while True:
            candidate = await candidates.get()
            node = self._book.hinted(candidate.node_hint)
            if node is not None and node != self._node and node not in self._dialling:
                await gate.acquire()
                self._background.spawn(self._contact(node, candidate.addresses, gate))

    async def seek(self) -> None:
        """Knock at remembered and configured peers that are not alive here, for ever."""
        while True:
            for node, addresses in list(self._known.items()):
                view = self._views.get(node)
                silent = view is None or view.state in (NodeState.DEAD, NodeState.LEFT)
                if node != self._node and silent and node not in self._dialling:
                    self._background.spawn(self._contact(node, addresses))
            for text in self._configured:
                if text not in self._dialling:
                    self._background.spawn(self._contact_configured(text))
            await asyncio.sleep(SEEK_S)

    async def save(self) -> None:
        """Keep the file up to date."""
        while True:
            await self._dirty.wait()
            await asyncio.sleep(SAVE_S)
            self._dirty.clear()
            await asyncio.to_thread(identities.save_peers, self._home, dict(self._known))

    # --- contact ---------------------------------------------------------------------------------

    async def _contact(
        self, node: NodeId, addresses: Addresses, gate: asyncio.Semaphore | None = None
    ) -> None:
        """Reach a member by whatever address works."""
        self._dialling.add(node)
        try:
            where = rank_addresses(addresses, self._watch.current)
            await self._dialer.request(node, where, "GET", "/v1/ping", deadline_s=CONTACT_S)
            self._remember(node, addresses)
            self._contacted(node)
        finally:
            self._dialling.discard(node)
            if gate is not None:
                gate.release()

    async def _contact_configured(self, text: str) -> None:
        self._dialling.add(text)
        try:
            host, port = parse_peer(text)
            loop = asyncio.get_running_loop()
            try:
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError as e:
                log.warning("peer %s: %s", text, e)
                return
            for *_, where in found[:ADDRESSES_MAX]:
                address = Address(str(where[0]), port)
                with contextlib.suppress(TransportError):
                    node = await self._dialer.who_is(address)
                    if node != self._node:
                        await self._contact(node, (address,))
                    return
        finally:
            self._dialling.discard(text)

    def _proven(self, node: NodeId) -> Addresses:
        good = self._dialer.good_address(node)
        return () if good is None else (good,)

    def _remember(self, node: NodeId, addresses: Addresses) -> None:
        self._known[node] = _merged(self._proven(node), addresses)
        self._dirty.set()


def _merged(first: Addresses, then: Addresses) -> Addresses:
    return tuple(dict.fromkeys((*first, *then)))[:ADDRESSES_MAX]
