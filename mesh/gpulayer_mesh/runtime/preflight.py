"""Before a job starts: can every rank's machine reach every other's ephemeral ports?

Gloo and NCCL connect to ephemeral ports in both directions, so a mesh that talks fine over the
agents' own port proves nothing about them. Each node listens for a moment on some of them, and
every other node connects. A connection counts only when the far end proves that it holds the nonce
its agent handed out over TLS, and shows that it was sent the same: behind a `docker0` address that
every host has answers somebody else. Neither end takes or sends more before that. Then bytes are
sent, as many as the target was given, and the far end acknowledges each piece, so that a path that
loses full packets is found out and one that is only slow is not.

This module does not know about jobs or membership; who may ask is the door's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from gpulayer_mesh.core.reach import (
    AT_ONCE,
    BULK_BYTES,
    NONCE_BYTES,
    Failed,
    Reached,
    Target,
    Trouble,
)
from gpulayer_mesh.errors import TransportError

_CHALLENGE_BYTES = 16
_SIZE_BYTES = 4
_MAC_BYTES = 32
_PIECE_BYTES = 32 * 1024  # acknowledged one by one; more than any MTU
_STALL_S = 2.0  # for a piece: 16 kB/s on each connection, all of a job's at once
_OPEN_S = 60.0  # a slow node may take 15 s to open its own, and then as long to be tried
_FIRST_BYTES_S = 1.0
_CONNECTION_S = _STALL_S * BULK_BYTES / _PIECE_BYTES
_CONNECTIONS_MAX = 256  # at a time; each of AT_ONCE nodes tries 3 ports, or 4 addresses of one
_STAGGER_S = 0.1
_SETTLE_S = 0.25  # how long after one address worked the others may still prove themselves
_BIND_TRIES = 16
_DIALS = 2  # of `answers`; where 20 % is lost, both fail within 4 s twice in 1,000 times
_DIAL_AGAIN_S = 0.25
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of the network namespace
_USUAL_RANGE = (49152, 65535)  # IANA's; what macOS uses
_ASK, _ANSWER = b"gpulayer preflight ask", b"gpulayer preflight answer"
_CARRIED = b"gpulayer preflight carried"
_ACK = b"+"
_UNROUTED = (errno.EHOSTUNREACH, errno.ENETUNREACH)


class PreflightPort:
    """A listener on ephemeral ports of all given addresses; closes itself after a minute."""

    def __init__(self, sockets: Sequence[list[socket.socket]]) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.ports: tuple[int, ...] = tuple(bound[0].getsockname()[1] for bound in sockets)
        self._sockets = [one for bound in sockets for one in bound]
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.closed = asyncio.Event()

    @classmethod
    async def open(
        cls, hosts: Sequence[str], *, ports: int = 1, open_s: float = _OPEN_S
    ) -> PreflightPort:
        """Listen on the same ephemeral ports of each literal.

        Args:
            ports: how many, spread over the range that the system takes them from.

        Raises:
            TransportError: none of the addresses can be bound.
        """
        bound: list[list[socket.socket]] = []
        try:
            for part in _parts(*ephemeral_range(), ports):
                bound.append(_bind_same_port(hosts, part))
        except TransportError:
            for one in (one for some in bound for one in some):
                one.close()
            raise
        self = cls(bound)
        for one in self._sockets:
            server = await asyncio.start_server(self._accept, sock=one, limit=_PIECE_BYTES)
            self._servers.append(server)
        self._timer = asyncio.get_running_loop().call_later(open_s, self.close)
        return self

    def close(self) -> None:
        """Stop listening and drop what is connected."""
        self.closed.set()
        if self._timer is not None:
            self._timer.cancel()
        for server in self._servers:
            server.close()
        for task in self._connections:
            task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: asyncio would leave the socket open if that were cancelled unstarted.
        # What was being accepted when we closed still arrives here.
        if self.closed.is_set() or len(self._connections) >= _CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECTION_S):
                async with asyncio.timeout(_FIRST_BYTES_S):
                    ask = await reader.readexactly(_CHALLENGE_BYTES + _SIZE_BYTES + _MAC_BYTES)
                asked, mac = ask[:-_MAC_BYTES], ask[-_MAC_BYTES:]
                if not hmac.compare_digest(mac, _mac(self.nonce, _ASK, asked)):
                    return
                writer.write(_mac(self.nonce, _ANSWER, asked))
                left = int.from_bytes(asked[_CHALLENGE_BYTES:])
                if 0 < left <= BULK_BYTES:
                    await self._take(reader, writer, left, asked)
                await reader.read(1)  # the caller closes first
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # a stranger's, or the listener closed: nothing to say to it
        finally:
            # Unsent bytes of a caller that has gone would keep the socket, so no polite end.
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _take(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int, asked: bytes
    ) -> None:
        taken = hashlib.sha256()
        while left:
            piece = await reader.readexactly(min(left, _PIECE_BYTES))
            taken.update(piece)
            left -= len(piece)
            writer.write(_ACK)
        writer.write(_mac(self.nonce, _CARRIED, asked + taken.digest()))


def ephemeral_range() -> tuple[int, int]:
    """Return the first and last port that this system gives to who asks for any."""
    try:
        first, last = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        return _USUAL_RANGE
    return (first, last) if 0 < first <= last <= 65535 else _USUAL_RANGE


async def check(targets: Sequence[Target], deadline_s: float = 2.0) -> list[Reached]:
    """Connect to many targets at once over all their addresses; results in the given order.

    Args:
        deadline_s: until an address has proven who answers; each piece of bulk has its own.
    """
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(target: Target) -> Reached:
        async with gate:
            return await _check(target, deadline_s)

    return list(await asyncio.gather(*map(one, targets)))


async def answers(host: str, port: int, deadline_s: float) -> bool:
    """Return whether new connections to a port get through: one is accepted, or refused, in time.

    Several are tried, for a first packet that is lost is sent again only after a second.
    """

    async def dial(delay_s: float) -> bool:
        await asyncio.sleep(delay_s)
        try:
            _, writer = await asyncio.open_connection(host, port, flags=socket.AI_NUMERICHOST)
        except ConnectionRefusedError:
            return True  # by the machine itself: the way there and back is open
        except OSError:
            return False
        writer.transport.abort()
        return True

    dials = [asyncio.create_task(dial(i * _DIAL_AGAIN_S)) for i in range(_DIALS)]
    try:
        async with asyncio.timeout(deadline_s):
            for done in asyncio.as_completed(dials):
                if await done:
                    return True
    except TimeoutError:
        pass
    finally:
        for task in dials:
            task.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
    return False


async def _check(target: Target, deadline_s: float) -> Reached:
    loop = asyncio.get_running_loop()
    tasks = {
        asyncio.create_task(_try(host, target, i * _STAGGER_S, deadline_s)): host
        for i, host in enumerate(target.hosts)
    }
    pending = set(tasks)
    ends = None  # without a success every task ends by itself
    while pending:
        done, pending = await asyncio.wait(
            pending,
            timeout=None if ends is None else max(0.0, ends - loop.time()),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not done:
            break
        if ends is None and any(isinstance(task.result(), float) for task in done):
            ends = loop.time() + _SETTLE_S
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    outcomes = [(host, task.result()) for task, host in tasks.items() if task not in pending]
    worked = {host: ms for host, ms in outcomes if isinstance(ms, float)}
    failed = [one for _, found in outcomes if not isinstance(found, float) for one in found]
    return Reached(target.node, tuple(worked), next(iter(worked.values()), None), tuple(failed))


async def _try(
    host: str, target: Target, delay_s: float, deadline_s: float
) -> float | list[Failed]:
    """Return the milliseconds that all ports of one address took, or which failed."""
    await asyncio.sleep(delay_s)
    started = time.perf_counter()
    share = -(-target.bulk_bytes // len(target.ports))
    dials = (_dial(host, port, target.nonce, share, deadline_s) for port in target.ports)
    failed = [one for one in await asyncio.gather(*dials) if one is not None]
    return failed or (time.perf_counter() - started) * 1000


async def _dial(
    host: str, port: int, nonce: bytes, bulk_bytes: int, deadline_s: float
) -> Failed | None:
    """Connect, have the far end prove itself, and send; return what failed, if anything did."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    carried: int | None = None  # None: not proven yet
    writer = None
    try:
        async with asyncio.timeout(deadline_s) as limit:
            # AI_NUMERICHOST: a peer's text is never looked up as a name.
            reader, writer = await asyncio.open_connection(host, port, flags=socket.AI_NUMERICHOST)
            asked = secrets.token_bytes(_CHALLENGE_BYTES) + bulk_bytes.to_bytes(_SIZE_BYTES)
            writer.write(asked + _mac(nonce, _ASK, asked))
            answer = await reader.readexactly(_MAC_BYTES)
            if not hmac.compare_digest(answer, _mac(nonce, _ANSWER, asked)):
                return Failed(host, port, Trouble.STRANGER, "another machine answers there")
            if not bulk_bytes:
                return None
            carried = 0
            bulk = secrets.token_bytes(bulk_bytes)  # nothing on the way can compress it
            writer.write(bulk)
            while carried < bulk_bytes:
                limit.reschedule(loop.time() + _STALL_S)
                await reader.readexactly(len(_ACK))
                carried = min(bulk_bytes, carried + _PIECE_BYTES)
            limit.reschedule(loop.time() + _STALL_S)
            proof = await reader.readexactly(_MAC_BYTES)
            sent = hashlib.sha256(bulk).digest()
            if not hmac.compare_digest(proof, _mac(nonce, _CARRIED, asked + sent)):
                return Failed(host, port, Trouble.BROKEN, "bytes change on the way")
            return None
    except TimeoutError:
        if carried is not None:
            size = f"{carried // 1024} of {bulk_bytes // 1024} KiB"
            return Failed(host, port, Trouble.STALLED, f"stops after {size}")
        part = "" if writer is None else "connects, then "
        waited = f"{part}no answer in {loop.time() - started:.1f} s"
        return Failed(host, port, Trouble.SILENT, waited)
    except ConnectionRefusedError:
        return Failed(host, port, Trouble.REFUSED, "connection refused")
    except EOFError:
        if carried is None:  # ours never closes on a correct nonce
            return Failed(host, port, Trouble.STRANGER, "another machine answers there")
        return Failed(host, port, Trouble.BROKEN, "the connection was closed")
    except OSError as e:
        trouble = Trouble.NO_ROUTE if e.errno in _UNROUTED else Trouble.BROKEN
        return Failed(host, port, trouble, (e.strerror or str(e)).lower()[:256])
    finally:
        if writer is not None:
            writer.transport.abort()  # all is read; waiting for a polite end could only block


class FreePorts:
    """Finds TCP ports for rank 0 and does not hand one out twice while its job may be starting."""

    def __init__(self, *, keep_s: float = 60.0) -> None:
        self._keep_s = keep_s  # from asking to rank 0's bind takes 1 to 10 s
        self._given: dict[int, float] = {}

    def take(self) -> int:
        """Return a port that is free on every local address: torch's store binds them all.

        Raises:
            TransportError: the system has none.
        """
        now = time.monotonic()
        self._given = {p: t for p, t in self._given.items() if now - t < self._keep_s}
        for _ in range(_BIND_TRIES):
            bound = _bind_same_port(["0.0.0.0", "::"])
            port: int = bound[0].getsockname()[1]
            for one in bound:
                one.close()
            if port not in self._given:
                self._given[port] = now
                return port
        raise TransportError("no free TCP port")


def _mac(nonce: bytes, purpose: bytes, asked: bytes) -> bytes:
    return hmac.digest(nonce, purpose + asked, hashlib.sha256)


def _parts(first: int, last: int, count: int) -> list[range]:
    """Cut a range of ports into equal parts; one part is all of it."""
    size = (last + 1 - first) // count
    return [range(first + i * size, first + (i + 1) * size) for i in range(count)]


def _bind_same_port(hosts: Sequence[str], among: range | None = None) -> list[socket.socket]:
    """Bind a free port of all addresses: one of `among` if that can be had, else any."""
    problem = "no address given"
    for tried in range(2 * _BIND_TRIES):
        wished = 0
        if among and tried < _BIND_TRIES:
            wished = among[secrets.randbelow(len(among))]
        bound: list[socket.socket] = []
        for host in hosts:
            try:
                bound.append(_bind(host, bound[0].getsockname()[1] if bound else wished))
            except OSError as e:
                problem = f"cannot listen on {host}: {e.strerror or e}"
                if "in use" in str(e).lower():
                    break  # the number is taken on this address: try another number
        else:
            if not bound:
                break
            return bound
        for one in bound:
            one.close()
    raise TransportError(problem)


def _bind(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    bound = socket.socket(found[0][0], socket.SOCK_STREAM)
    try:
        if found[0][0] == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(found[0][4])
    except OSError:
        bound.close()
        raise
    return bound
