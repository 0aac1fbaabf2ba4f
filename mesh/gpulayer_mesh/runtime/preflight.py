"""Before a job starts: can every rank's machine reach every other's ephemeral ports?

Gloo and NCCL connect to ephemeral ports in both directions, so a mesh that talks fine over the
agents' own port proves nothing about them. Each node opens a listener for a few seconds and every
other node connects to it. A connection counts only when the far end proves that it holds the nonce
its agent handed out over TLS: behind a `docker0` address that every host has answers somebody else.

This module does not know about jobs or membership; who may ask is the door's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from gpulayer_mesh.core.types import NodeId, Port
from gpulayer_mesh.errors import TransportError

NONCE_BYTES = 16
_CHALLENGE_BYTES = 16
_MAC_BYTES = 32
# Sent and echoed: more than any MTU, so a path that loses full-size packets is found out.
_ECHO_BYTES = 16 * 1024
_OPEN_S = 15.0  # ten times what the checks of a large job take
_FIRST_BYTES_S = 1.0
_CONNECTION_S = 5.0
_CONNECTIONS_MAX = 256  # at a time; a job of 64 nodes with 4 addresses each
_STAGGER_S = 0.1
_SETTLE_S = 0.25  # how long after one address worked the others may still prove themselves
_BIND_TRIES = 16
_DIALS = 2  # of `answers`; where 20 % is lost, both fail within 4 s twice in 1,000 times
_DIAL_AGAIN_S = 0.25
_ASK, _ANSWER = b"gpulayer preflight ask", b"gpulayer preflight answer"


class PreflightPort:
    """A listener on one ephemeral port of all given addresses; closes itself after 15 s."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.port: int = sockets[0].getsockname()[1]
        self._sockets = sockets
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.closed = asyncio.Event()

    @classmethod
    async def open(cls, hosts: Sequence[str], *, open_s: float = _OPEN_S) -> PreflightPort:
        """Listen on the same ephemeral port of each literal.

        Raises:
            TransportError: none of the addresses can be bound.
        """
        self = cls(_bind_same_port(hosts))
        for bound in self._sockets:
            self._servers.append(await asyncio.start_server(self._accept, sock=bound, limit=4096))
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
                    ask = await reader.readexactly(_CHALLENGE_BYTES + _MAC_BYTES)
                challenge = ask[:_CHALLENGE_BYTES]
                if not hmac.compare_digest(
                    ask[_CHALLENGE_BYTES:], _mac(self.nonce, _ASK, challenge)
                ):
                    return
                writer.write(_mac(self.nonce, _ANSWER, challenge))
                writer.write(await reader.readexactly(_ECHO_BYTES))
                await writer.drain()
                writer.write_eof()
                await reader.read(1)  # the caller closes first
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # a stranger's, or the listener closed: nothing to say to it
        finally:
            # Unsent bytes of a caller that has gone would keep the socket, so no polite end.
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@dataclass(frozen=True, slots=True)
class Target:
    """A listener of another node, as its agent described it."""

    node: NodeId
    hosts: Annotated[tuple[str, ...], Meta(max_length=16)]  # in the order to try them
    port: Port
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


@dataclass(frozen=True, slots=True)
class Reached:
    """What one target's addresses did."""

    node: NodeId
    hosts: tuple[str, ...] = ()  # those that worked, in the order they were given; () is a failure
    ms: float | None = None  # connect, proof and echo over `hosts[0]`
    error: str = ""  # one clause per address, only if none worked


async def check(targets: Sequence[Target], deadline_s: float = 2.0) -> list[Reached]:
    """Connect to every target at once over all its addresses; results in the order of `targets`."""
    return list(await asyncio.gather(*(_check(target, deadline_s) for target in targets)))


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
    ends = loop.time() + deadline_s
    tasks = {
        asyncio.create_task(_prove(host, target, i * _STAGGER_S, ends)): host
        for i, host in enumerate(target.hosts)
    }
    pending = set(tasks)
    settle_s = None  # without a success every task ends by itself at the deadline
    while pending:
        done, pending = await asyncio.wait(
            pending, timeout=settle_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            break
        if any(isinstance(task.result(), float) for task in done):
            ends = min(ends, loop.time() + _SETTLE_S)
            settle_s = max(0.0, ends - loop.time())
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    outcomes = [(host, task.result()) for task, host in tasks.items() if task not in pending]
    worked = {host: ms for host, ms in outcomes if isinstance(ms, float)}
    if worked:
        return Reached(target.node, tuple(worked), next(iter(worked.values())))
    errors = [f"{host} port {target.port}: {error}" for host, error in outcomes]
    return Reached(target.node, error="; ".join(errors) or "no address to try")


async def _prove(host: str, target: Target, delay_s: float, ends: float) -> float | str:
    """Return the milliseconds one address took, or why it does not count."""
    await asyncio.sleep(delay_s)
    started = time.perf_counter()
    writer = None
    try:
        async with asyncio.timeout_at(ends):
            # AI_NUMERICHOST: a peer's text is never looked up as a name.
            reader, writer = await asyncio.open_connection(
                host, target.port, flags=socket.AI_NUMERICHOST
            )
            challenge = secrets.token_bytes(_CHALLENGE_BYTES)
            echo = secrets.token_bytes(_ECHO_BYTES)
            writer.write(challenge + _mac(target.nonce, _ASK, challenge) + echo)
            answer = await reader.readexactly(_MAC_BYTES)
            if not hmac.compare_digest(answer, _mac(target.nonce, _ANSWER, challenge)):
                return "somebody else answered"
            if await reader.readexactly(_ECHO_BYTES) != echo:
                return "bytes came back changed"
            return (time.perf_counter() - started) * 1000
    except TimeoutError:
        waited_s = time.perf_counter() - started
        part = "no connection" if writer is None else "connected, then silence"
        return f"timed out after {waited_s:.1f} s ({part})"
    except ConnectionRefusedError:
        return "connection refused"
    except EOFError:
        return "somebody else answered"  # ours never closes on a correct nonce
    except OSError as e:
        return (e.strerror or str(e)).lower()
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


def _mac(nonce: bytes, purpose: bytes, challenge: bytes) -> bytes:
    return hmac.digest(nonce, purpose + challenge, hashlib.sha256)


def _bind_same_port(hosts: Sequence[str]) -> list[socket.socket]:
    problem = "no address given"
    for _ in range(_BIND_TRIES):
        bound: list[socket.socket] = []
        for host in hosts:
            try:
                bound.append(_bind(host, bound[0].getsockname()[1] if bound else 0))
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
