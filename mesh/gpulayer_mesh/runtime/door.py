"""The one door of an agent: HTTP/1.1 over TLS 1.3 with a client certificate of our mesh.

Every request passes `Door._serve`, whatever its method or path: certificate -> key hash -> roster
-> role -> route, and nothing else runs before that. The roster is asked again before each frame of
a stream, and connections of nodes that are no longer members are cut when it changes.

One thing is open to holders of a certificate whom our roster does not list: `POST /v1/roster` with
a signed roster that lists them. A newer one than ours is the proof that they have joined; ours, in
answer to an older one, the proof that they were removed.

Each limit's constant says what it protects. The door does not
know what the routes do, who is alive, or where rosters are kept (`on_roster`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from gpulayer_mesh import errors
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.certificates import ALPN, node_of
from gpulayer_mesh.core.roster import ROSTER_MAX, RosterBook
from gpulayer_mesh.core.types import NodeId, Role
from gpulayer_mesh.errors import GpuLayerError, NotAllowedError, RemoteProtocolError
from gpulayer_mesh.sockets import listen, watch_path

CONNECTIONS_MAX = 512  # file descriptors: a default limit is 1,024
CONNECTIONS_PER_PEER = 64  # one member's share; a launcher that follows 64 logs uses them all
HANDSHAKES_MAX = 16  # TLS handshakes in flight: strangers get at most this much memory and CPU
HANDSHAKE_S = 5.0
HEADER_S = 5.0  # from the first byte of a request to its last header
BODY_BYTES_PER_S = 16 * 1024  # slowest upload we wait for, beside HEADER_S: one of a dozen
IDLE_S = 75.0  # longer than a dialler keeps an idle connection (30 s), so it closes first
STRANGER_S = 2.0  # time for an unknown member to show a newer roster
HEADER_MAX = 8 * 1024  # bytes of one header line; ours are below 200
HEADERS_MAX = 32  # fields
CONTROL_MAX = 1024 * 1024  # bytes of a body, unless its route says more

_SWEEP_S = 1.0
_SEGMENT = r"[A-Za-z0-9._-]{1,128}"  # ids, hashes, node ids; never '/', '%' or empty

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DoorRequest:
    """What a handler sees; the peer is authenticated and holds the route's role."""

    peer: NodeId
    roles: tuple[Role, ...]
    params: Mapping[str, str]  # of the path: {id} -> its segment
    query: Mapping[str, str]
    body: bytes  # at most the route's `max_body`

    def number(self, key: str, most: int) -> int:
        """Return a whole number of the query, 0 where it is not given.

        Raises:
            RemoteProtocolError: it is none, or above `most`.
        """
        text = self.query.get(key, "0")
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
            raise RemoteProtocolError(f"{key}={text[:32]!r} is not in 0..{most}")
        return int(text)


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer sent piece by piece. The iterator is closed when the peer goes away."""

    pieces: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class Route:
    """One thing the door does.

    A handler returns bytes, a `Stream`, or plain data to be packed. It may wait (long polls): its
    own deadline is its own work, and it is not cancelled when the peer goes away.
    """

    method: str
    path: str  # "/v1/jobs/{id}/logs"
    handler: Callable[[DoorRequest], Awaitable[Any]]
    allow: Role | None = None  # None: any member
    max_body: int = CONTROL_MAX  # bytes


# By error class, first match; the class name travels as well, so the dialler raises the same.
_STATUS: tuple[tuple[type[GpuLayerError], int], ...] = (
    (NotAllowedError, 403),
    (errors.NoMeshError, 403),
    (RemoteProtocolError, 400),
    (errors.NotFoundError, 404),
    (errors.ConfigError, 400),
    (errors.BundleError, 400),
    (errors.PlacementBusyError, 503),
    (errors.TransportError, 502),
    (errors.DiscoveryError, 502),
    (errors.PlacementError, 409),
    (errors.LocalProtocolError, 409),
)


class Door:
    """The listener.

    Args:
        context: from `identity.server_context`.
        node: our own id.
        on_roster: called with a signed roster that a peer presents; verifies, keeps and spreads it
            and returns when `book` holds it, if it was newer.
    """

    def __init__(
        self,
        *,
        context: ssl.SSLContext,
        book: RosterBook,
        node: NodeId,
        routes: Sequence[Route],
        on_roster: Callable[[bytes], Awaitable[object]],
    ) -> None:
        self.handled = 0  # handler runs since the start; a stranger must never raise it
        self._met: dict[NodeId, float] = {}  # member -> when its newest request came
        self._context = context
        self._book = book
        self._node = node
        self._on_roster = on_roster
        own = (
            Route("GET", "/v1/roster", self._get_roster),
            Route("POST", "/v1/roster", self._post_roster, max_body=ROSTER_MAX),
        )
        self._routes = [(_pattern(route.path), route) for route in (*own, *routes)]
        self._connections: set[_Connection] = set()
        self._handshakes: dict[asyncio.Task[None], str] = {}  # oldest first -> source host
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, hosts: Sequence[str], port: int) -> int:
        """Listen on one port of every host given and return the port; 0 takes a free one.

        Raises:
            OSError: the port is taken or a host is not ours.
        """
        self._server = web.Server(self._answer)
        try:
            for host in hosts:
                self._sockets.append(listen(host, port))
                port = self._sockets[-1].getsockname()[1]
        except OSError:
            for listening in self._sockets:
                listening.close()
            self._sockets.clear()
            raise
        self._tasks = [asyncio.create_task(self._accept(s), name="door") for s in self._sockets]
        self._tasks.append(asyncio.create_task(self._sweep(), name="door sweep"))
        return port

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        tasks = [*self._tasks, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()
        for connection in list(self._connections):
            connection.cut()
        await self._server.shutdown(0.1)

    def met(self) -> dict[NodeId, float]:
        """Return how many seconds ago each member last made a request."""
        now = time.monotonic()
        return {node: now - at for node, at in self._met.items()}

    def enforce(self) -> None:
        """Cut the connections of nodes that are no members (any more); call it when the roster
        has changed."""
        self._met = {node: at for node, at in self._met.items() if node in self._book}
        for connection in list(self._connections):
            if connection.peer not in self._book:
                connection.cut()

    # --- connections -----------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except OSError:  # out of file descriptors, or gone before we took it
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) + len(self._handshakes) >= CONNECTIONS_MAX:
                accepted.close()
                continue
            if len(self._handshakes) >= HANDSHAKES_MAX:
                self._evict()
            task = asyncio.create_task(self._handshake(accepted))
            self._handshakes[task] = peer[0]
            task.add_done_callback(functools.partial(self._shaken, accepted))

    def _evict(self) -> None:
        """Drop the oldest handshake of the host that has most: a member needs milliseconds, so
        idle sockets make room for it instead of keeping it out."""
        greedy, _ = Counter(self._handshakes.values()).most_common(1)[0]
        oldest = next(task for task, host in self._handshakes.items() if host == greedy)
        del self._handshakes[oldest]
        oldest.cancel()

    def _shaken(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if task.cancelled():  # perhaps before its first step, when nobody owned the socket yet
            accepted.close()

    async def _handshake(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):  # includes ssl.SSLError: no certificate
            await loop.connect_accepted_socket(
                lambda: _Connection(self, self._server, loop),
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=1.0,
            )

    def _connected(self, connection: _Connection) -> bool:
        """Take a connection whose peer is known; False if it has too many."""
        same = sum(other.peer == connection.peer for other in self._connections)
        if same >= CONNECTIONS_PER_PEER:
            return False
        self._connections.add(connection)
        return True

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            for connection in list(self._connections):
                age = loop.time() - connection.since
                if connection.peer not in self._book and age > STRANGER_S:
                    connection.cut()

    # --- requests --------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, _Connection)
        connection.headers_complete()
        try:
            return await self._serve(request, connection.peer)
        except _Denied as e:
            return _refusal(e.status, e.kind, str(e), e.hint, e.roster)
        except GpuLayerError as e:
            status = next((code for kind, code in _STATUS if isinstance(e, kind)), 500)
            return _refusal(status, type(e).__name__, e.message, e.hint)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            _log.exception("%s %s failed", request.method, request.rel_url.raw_path)
            return _refusal(500, "GpuLayerError", "internal error; its agent's log says more")

    async def _serve(self, request: web.BaseRequest, peer: NodeId) -> web.StreamResponse:
        spoken = request.get_extra_info("ssl_object").selected_alpn_protocol()
        if spoken != ALPN:
            raise _Denied(426, f"this agent speaks {ALPN!r}, the other end speaks {spoken!r}")
        path = request.rel_url.raw_path
        if "Content-Encoding" in request.headers:
            raise _Denied(415, "compressed bodies are not accepted")
        if "Upgrade" in request.headers:
            raise _Denied(400, "protocol upgrades are not offered")
        if peer not in self._book:
            if (request.method, path) != ("POST", "/v1/roster"):
                raise _unknown(peer)
            return _reply(await self._introduce(request, peer))
        found = [(m, r) for p, r in self._routes if (m := p.fullmatch(path))]
        if not found:
            raise _Denied(404, f"no such path {path!r}")
        match, route = next(((m, r) for m, r in found if r.method == request.method), (None, None))
        if match is None or route is None:
            raise _Denied(405, f"{request.method} is not possible on {path!r}")
        if not self._may(peer, route):
            raise NotAllowedError(
                f"node {self._book.members[peer].name!r} lacks the role {route.allow}",
                hint="roles are given with an invitation: `gpulayer mesh invite --role ...`",
            )
        body = await _body(request, route.max_body)
        if not self._may(peer, route):  # the body may have taken minutes
            raise _unknown(peer)
        self.handled += 1
        self._met[peer] = time.monotonic()
        roles = self._book.roles(peer)
        result = await route.handler(
            DoorRequest(peer, roles, match.groupdict(), dict(request.query), body)
        )
        if isinstance(result, Stream):
            return await self._stream(request, peer, route, result.pieces)
        return _reply(result)

    def _may(self, peer: NodeId, route: Route) -> bool:
        return peer in self._book and (route.allow is None or route.allow in self._book.roles(peer))

    async def _stream(
        self, request: web.BaseRequest, peer: NodeId, route: Route, pieces: AsyncIterator[bytes]
    ) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, _Connection)
        response = web.StreamResponse(headers=_HEADERS)
        async with contextlib.AsyncExitStack() as stack:
            if hasattr(pieces, "aclose"):
                stack.push_async_callback(pieces.aclose)
            connection.streaming = asyncio.current_task()
            try:
                await response.prepare(request)
                async for piece in pieces:
                    if not self._may(peer, route):
                        connection.cut()
                        break
                    await response.write(piece)
                else:
                    await response.write_eof()
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception:
                # The headers are gone: only an unfinished body can tell the peer.
                _log.exception("stream %s broke off", request.rel_url.raw_path)
                connection.cut()
            finally:
                connection.streaming = None
        return response

    # --- the roster ------------------------------------------------------------------------------

    async def _introduce(self, request: web.BaseRequest, peer: NodeId) -> dict[str, int]:
        body = await _body(request, ROSTER_MAX)
        shown = self._book.examine(body)
        if all(entry.node != peer for entry in shown.entries):
            raise _unknown(peer)
        if shown.epoch <= self._book.epoch:  # it was a member, and was off when it was removed
            raise _unknown(peer, self._book.signed)
        return await self._take(body)

    async def _post_roster(self, request: DoorRequest) -> dict[str, int]:
        return await self._take(request.body)

    async def _take(self, signed: bytes) -> dict[str, int]:
        await self._on_roster(signed)
        self.enforce()
        return {"epoch": self._book.epoch}

    async def _get_roster(self, request: DoorRequest) -> bytes:
        return self._book.signed


class _Connection(RequestHandler):
    """One TLS connection: who it is, and when its headers must be there."""

    peer: NodeId = ""

    def __init__(self, door: Door, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=IDLE_S,
            tcp_keepalive=False,  # ours is below, with shorter times
            access_log=None,  # type: ignore[arg-type]
            max_line_size=HEADER_MAX,
            max_field_size=HEADER_MAX,
            max_headers=HEADERS_MAX,
            lingering_time=2.0,
            auto_decompress=False,
        )
        self.streaming: asyncio.Task[Any] | None = None
        self.since = loop.time()
        self._door = door
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        tls = transport.get_extra_info("ssl_object")
        try:
            self.peer = node_of(tls.getpeercert(binary_form=True), self._door._book.mesh)
        except RemoteProtocolError as e:
            _log.info("refused a connection: %s", e)
        super().connection_made(transport)
        if not self.peer or not self._door._connected(self):
            transport.abort()
        else:
            watch_path(transport)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self._current_request is None:
            self._timer = self._loop.call_later(HEADER_S, self.cut)
        super().data_received(data)

    def headers_complete(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self.headers_complete()
        self._door._connections.discard(self)
        if self.streaming is not None:
            self.streaming.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what aiohttp could not parse, without its traceback in our log and its details
        in the answer."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer broke off")
        response = _refusal(status, "RemoteProtocolError", "not a valid HTTP request")
        response.force_close()
        return response

    def cut(self) -> None:
        """Close now; whatever was under way ends."""
        if self.transport is not None:
            self.transport.abort()


class _Denied(Exception):
    """An answer that no error class stands for."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "",
        hint: str | None = None,
        roster: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or ("NotFoundError" if status == 404 else "RemoteProtocolError")
        self.hint = hint
        self.roster = roster


def _unknown(peer: NodeId, roster: bytes = b"") -> _Denied:
    # The dialler recognises this kind and shows its roster, or takes ours.
    return _Denied(
        403,
        f"node {peer[:8]!r} is not in our roster",
        "unknown-member",
        "that node was removed from the mesh (`gpulayer mesh invite` lets it in again), or its "
        "joining is not known here yet",
        roster,
    )


_HEADERS = {"Content-Type": "application/octet-stream", "Server": "gpulayer"}


def _reply(result: Any) -> web.Response:
    body = result if isinstance(result, bytes) else wire.pack(result)
    return web.Response(body=body, headers=_HEADERS)


def _refusal(
    status: int, kind: str, message: str, hint: str | None = None, roster: bytes = b""
) -> web.Response:
    fields = {"error": kind, "message": message[:2000], "hint": (hint or "")[:2000]}
    body = wire.pack(fields | ({"roster": roster} if roster else {}))
    return web.Response(status=status, body=body, headers=_HEADERS)


async def _body(request: web.BaseRequest, limit: int) -> bytes:
    declared = request.content_length
    too_large = _Denied(413, f"body exceeds the limit of {limit} bytes")
    if declared is not None and declared > limit:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(HEADER_S + (declared or limit) / BODY_BYTES_PER_S):
            async for piece in request.content.iter_any():
                size += len(piece)
                if size > limit:
                    raise too_large
                pieces.append(piece)
    except TimeoutError:
        raise _Denied(408, f"body of {declared or limit} bytes arrived too slowly") from None
    except web.RequestPayloadError as e:
        raise _Denied(400, f"body broke off: {e}") from e
    return b"".join(pieces)


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", path)
    return re.compile(
        "".join(
            f"(?P<{part}>{_SEGMENT})" if odd % 2 else re.escape(part)
            for odd, part in enumerate(parts)
        )
    )
