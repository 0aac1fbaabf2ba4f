"""Dialling members: one pool of TLS connections, keyed by who answers and not by address.

`request` and `stream` speak to a node. All its addresses are tried 100 ms apart, 2 s each, the one
that worked last time first (RFC 8305); a connection counts only once the certificate shown is the
wanted node's, so nothing is ever sent to a machine that has inherited an address. That happens
inside aiohttp's connector, which then keeps the connection under the node's id.

A peer that does not know us is shown our roster, once. If its own is older, it lets us in and is
asked again; if it is newer, it answers with it, and `on_roster` hears that we were removed. Every
request of our API may be repeated, so one that finds its idle connection closed is sent again once.
Does not know what is asked, and does not retry otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import re
import ssl
from asyncio import staggered
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from gpulayer_mesh import errors
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.certificates import ALPN, node_of
from gpulayer_mesh.core.roster import ROSTER_MAX, RosterBook
from gpulayer_mesh.core.types import Address, NodeId
from gpulayer_mesh.errors import (
    GpuLayerError,
    NotAllowedError,
    RemoteProtocolError,
    RemovedError,
    TransportError,
)
from gpulayer_mesh.sockets import path_mtu, watch_path, words

DIAL_S = 2.0  # per address, TCP and TLS; a LAN answers in milliseconds
STAGGER_S = 0.1  # head start of the better address
IDLE_S = 30.0  # less than a door's 75 s, so it is never the door that closes under a request
ANSWER_MAX = wire.BODY_MAX  # bytes of one answer that is not a stream
CONNECTIONS_MAX = 256  # file descriptors
CONNECTIONS_PER_NODE = 32  # half of what a door grants one peer: agent and commands share it

# Bytes of an error answer: a roster, and message and hint, which are cut at 2,000 characters.
_ERROR_MAX = ROSTER_MAX + 16 * 1024

# Errors a door may name. Anything else arrives as GpuLayerError.
_KINDS: dict[str, type[GpuLayerError]] = {
    kind.__name__: kind
    for kind in (
        errors.BundleError,
        errors.ConfigError,
        errors.DiscoveryError,
        errors.LocalProtocolError,
        errors.NotAllowedError,
        errors.NotFoundError,
        errors.PlacementBusyError,
        errors.PlacementError,
        errors.RemoteProtocolError,
        errors.TransportError,
    )
}


class Dialer:
    """Our side of every connection to a door; `close` it. Needs a running event loop.

    Args:
        context: from `identity.client_context`.
        book: whom we speak to at all, and what we show to peers that do not know us.
        node: our own id.
        on_roster: called with a newer signed roster that does not list us; `book` holds it then.
        received: called with the size of each piece of an answer as it arrives.
    """

    def __init__(
        self,
        *,
        context: ssl.SSLContext,
        book: RosterBook,
        node: NodeId,
        on_roster: Callable[[bytes], object],
        received: Callable[[NodeId, int], object] = lambda node, size: None,
    ) -> None:
        self._context = context
        self._book = book
        self._node = node
        self._on_roster = on_roster
        self._received = received
        self._candidates: dict[NodeId, Sequence[Address]] = {}
        self._good: dict[NodeId, Address] = {}  # what worked last
        self._mtus: dict[NodeId, int | None] = {}  # of the newest connection
        self._session = self._new_session()
        self._made: set[asyncio.Transport] = set()  # every connection that is still open
        self._closing: set[asyncio.Task[None]] = set()

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=_NodeConnector(self._connect),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            read_bufsize=256 * 1024,  # one chunk in four reads; bounds memory per stream
        )

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(_shut(self._session), *self._closing)
        for transport in self._made:
            transport.abort()
        self._made.clear()

    def forget_connections(self) -> None:
        """Drop every connection, idle or not: after sleep or an address change each is suspect."""
        task = asyncio.create_task(_shut(self._session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._session = self._new_session()

    def good_address(self, node: NodeId) -> Address | None:
        """Return where a node was reached last, to be remembered; None if it never was."""
        return self._good.get(node)

    def path_mtu(self, node: NodeId) -> int | None:
        """Return the MTU on the way to a node; None if it is not known."""
        return self._mtus.get(node)

    async def request(
        self,
        node: NodeId,
        addresses: Sequence[Address],
        method: str,
        path: str,
        *,
        body: bytes = b"",
        deadline_s: float = 10.0,
        max_bytes: int = ANSWER_MAX,
    ) -> bytes:
        """Make one request and return the body of the answer.

        Args:
            path: with its query, encoded: "/v1/jobs/x/logs?follow=1".

        Raises:
            TransportError: not reached, too slow, or broken off.
            RemovedError: we are no member any more, as we knew or have just heard.
            NotAllowedError: the node is no member, or our role does not allow this.
            GpuLayerError: what the peer answered, in its class.
        """
        parts: list[bytes] = []
        size = 0
        try:
            async with (
                asyncio.timeout(deadline_s),
                contextlib.aclosing(self._exchange(node, addresses, method, path, body)) as answer,
            ):
                async for part in answer:
                    size += len(part)
                    if size > max_bytes:
                        raise RemoteProtocolError(
                            f"answer of {self._name(node)} exceeds the limit of {max_bytes} bytes"
                        )
                    parts.append(part)
        except TimeoutError:
            raise TransportError(
                f"{self._name(node)} did not answer {method} {path[:80]} within {deadline_s:g} s"
            ) from None
        return b"".join(parts)

    async def stream(
        self,
        node: NodeId,
        addresses: Sequence[Address],
        method: str,
        path: str,
        *,
        body: bytes = b"",
        deadline_s: float = 10.0,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answer as it arrives.

        `deadline_s` is for the start of the answer; then it may be silent for as long as the
        kernel hears from the peer (20 s), and ends when the node leaves the roster.

        Raises:
            As `request`.
        """
        exchange = self._exchange(node, addresses, method, path, body, headers_s=deadline_s)
        async with contextlib.aclosing(exchange):
            async for part in exchange:
                if node not in self._book:
                    raise _no_member(node)
                yield part

    async def who_is(self, address: Address) -> NodeId:
        """Return which node of our mesh answers at an address, member or not.

        Raises:
            TransportError: nobody, or nobody of our mesh.
        """
        protocol, node = await self._dial(address, None)
        protocol.close()
        return node

    # --- one exchange ----------------------------------------------------------------------------

    async def _exchange(
        self,
        node: NodeId,
        addresses: Sequence[Address],
        method: str,
        path: str,
        body: bytes,
        *,
        headers_s: float | None = None,
    ) -> AsyncGenerator[bytes, None]:
        if self._node not in self._book:
            raise RemovedError
        if node not in self._book:
            raise _no_member(node)
        if addresses:
            self._candidates[node] = tuple(addresses)
        introduced = False
        while True:
            response = await self._send(node, method, path, body, headers_s)
            async with response:
                if response.status >= 400:
                    error = await self._error(node, response)
                    if isinstance(error, _UnknownMemberError) and not introduced:
                        introduced = True
                    else:
                        raise error
                else:
                    try:
                        async for part in response.content.iter_any():
                            self._received(node, len(part))
                            yield part
                    except (aiohttp.ClientError, OSError) as e:
                        raise TransportError(
                            f"the connection to {self._name(node)} broke off: {words(e)}"
                        ) from e
                    return
            signed = self._book.signed
            async with await self._send(node, "POST", "/v1/roster", signed, headers_s) as shown:
                if shown.status >= 400:
                    error = await self._error(node, shown)
                    if isinstance(error, _UnknownMemberError):
                        self._refused_with(error.roster)
                    raise error

    def _refused_with(self, signed: bytes) -> None:
        """Believe that we were removed only to the mesh's own signature."""
        with contextlib.suppress(RemoteProtocolError):
            roster = self._book.examine(signed)
            unlisted = all(entry.node != self._node for entry in roster.entries)
            if roster.epoch > self._book.epoch and unlisted:
                self._on_roster(signed)
        if self._node not in self._book:
            raise RemovedError

    async def _send(
        self, node: NodeId, method: str, path: str, body: bytes, headers_s: float | None
    ) -> aiohttp.ClientResponse:
        # The scheme is plain because the connector has done the TLS by then.
        url = URL(f"http://{node}{path}", encoded=True)
        headers = {"Content-Type": "application/octet-stream"} if body else {}
        timeout = aiohttp.ClientTimeout(total=None)
        again = True
        while True:
            try:
                async with asyncio.timeout(headers_s):
                    return await self._session.request(
                        method,
                        url,
                        # A file is sent in pieces: manifests of 32 MiB must not stall the loop.
                        data=io.BytesIO(body) if body else None,
                        headers=headers,
                        timeout=timeout,
                        allow_redirects=False,
                    )
            except TimeoutError:
                raise TransportError(
                    f"{self._name(node)} did not answer {method} {path[:80]} within {headers_s:g} s"
                ) from None
            except (aiohttp.ClientError, OSError) as e:
                if again and isinstance(e, aiohttp.ServerDisconnectedError | ConnectionError):
                    again = False
                    continue
                # With TLS 1.3 a door that refuses our certificate has us see only this.
                raise TransportError(
                    f"{self._name(node)} closed the connection without an answer: {words(e)}",
                    hint="its agent stopped, or it does not accept this machine's certificate "
                    "(another mesh?)",
                ) from e

    async def _error(self, node: NodeId, response: aiohttp.ClientResponse) -> GpuLayerError:
        """Read an error answer and return it as the class its door named."""
        fields: dict[str, Any] = {}
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, RemoteProtocolError):
            async with asyncio.timeout(DIAL_S):
                data = b""
                while len(data) < _ERROR_MAX and (part := await response.content.readany()):
                    data += part
            plain = wire.unpack(data)
            fields = plain if isinstance(plain, dict) else {}
        kind = str(fields.get("error", ""))
        message = _printable(fields.get("message")) or f"HTTP status {response.status}"
        hint = _printable(fields.get("hint")) or None
        message = f"{self._name(node)}: {message}"
        if kind == "unknown-member":
            roster = fields.get("roster")
            return _UnknownMemberError(message, hint, roster if isinstance(roster, bytes) else b"")
        return _KINDS.get(kind, GpuLayerError)(message, hint=hint)

    # --- connections -----------------------------------------------------------------------------

    async def _connect(self, node: NodeId) -> ResponseHandler:
        """Race all addresses of a node; the winner has proven to be it."""
        addresses = list(self._candidates.get(node, ()))
        best = self._good.get(node)
        if best is not None:
            addresses = [best, *(a for a in addresses if a != best)]
        if not addresses:
            raise TransportError(f"no address of {self._name(node)} is known")
        dials = [functools.partial(self._dial, address, node) for address in addresses]
        winner, index, failures = await staggered.staggered_race(dials, STAGGER_S)
        if winner is None or index is None:
            tried = "; ".join(
                f"{a.host} port {a.port}: {words(e)}"
                for a, e in zip(addresses, failures, strict=False)
            )
            raise TransportError(f"cannot reach {self._name(node)}: {tried}")
        self._good[node] = addresses[index]
        protocol: ResponseHandler = winner[0]
        if protocol.transport is not None:  # the door may have closed already
            self._mtus[node] = path_mtu(protocol.transport)
        return protocol

    async def _dial(
        self, address: Address, expected: NodeId | None
    ) -> tuple[ResponseHandler, NodeId]:
        loop = asyncio.get_running_loop()
        protocol = ResponseHandler(loop)
        try:
            async with asyncio.timeout(DIAL_S):
                tcp, _ = await loop.create_connection(asyncio.Protocol, address.host, address.port)
                try:
                    # Not in one step with the TCP connection: a dial that loses its race is
                    # cancelled, and only this way can its socket be closed at once.
                    transport = await loop.start_tls(
                        tcp, protocol, self._context, server_hostname=""
                    )
                except BaseException:
                    tcp.abort()
                    raise
                if transport is None:
                    raise TransportError("the connection was closed")
                protocol.connection_made(transport)
                # Two dials may finish in the same step of the loop, and only one is taken.
                self._made = {one for one in self._made if not one.is_closing()} | {transport}
        except TimeoutError:
            raise TransportError("no answer") from None
        except OSError as e:
            raise TransportError(words(e)) from e
        try:
            tls = transport.get_extra_info("ssl_object")
            node = node_of(tls.getpeercert(binary_form=True), self._book.mesh)
            if expected is not None and node != expected:
                raise TransportError(f"{self._name(node)} answers there")
            if tls.selected_alpn_protocol() != ALPN:
                raise TransportError(
                    f"it speaks another protocol version than {ALPN!r}",
                    hint="install the same gpulayer on both machines",
                )
        except GpuLayerError:
            transport.abort()
            raise
        watch_path(transport)
        return protocol, node

    def _name(self, node: NodeId) -> str:
        found = self._book.members.get(node)
        return found.name if found else f"node {node[:8]}"


class _NodeConnector(aiohttp.BaseConnector):
    """aiohttp's pool with our way of connecting: the host of a URL is a node id.

    Overrides the one method that aiohttp's own UnixConnector overrides.
    """

    def __init__(self, connect: Any) -> None:
        super().__init__(
            keepalive_timeout=IDLE_S, limit=CONNECTIONS_MAX, limit_per_host=CONNECTIONS_PER_NODE
        )
        self._connect_node = connect

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: Any,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  aiohttp's signature
    ) -> ResponseHandler:
        protocol: ResponseHandler = await self._connect_node(req.url.host)
        return protocol


async def _shut(session: aiohttp.ClientSession) -> None:
    """Drop a session's connections at once: a TLS goodbye waits for the peer, up to 30 s."""
    assert session.connector is not None
    await session.connector.close(abort_ssl=True)
    await session.close()


class _UnknownMemberError(NotAllowedError):
    """The peer's roster does not list us; it is in `roster` if the peer showed it."""

    def __init__(self, message: str, hint: str | None, roster: bytes) -> None:
        super().__init__(message, hint=hint)
        self.roster = roster


def _no_member(node: NodeId) -> NotAllowedError:
    return NotAllowedError(f"node {node[:8]} is no member of this mesh, as far as we know")


def _printable(text: object) -> str:
    """A peer's words go to a terminal: no control characters."""
    return re.sub(r"[^\x20-\x7e\n\u00a0-\uffff]", "", text) if isinstance(text, str) else ""
