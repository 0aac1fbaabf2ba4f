"""The join listener of `gpulayer mesh invite`, and joining: asyncio around `core.joining`.

The listener has its own port and its own throw-away certificate, lives as long as the invitation
and speaks nothing but the ceremony: frames of a 4-byte length and that many bytes, over TLS 1.3.
What is bound to what is explained in `core.joining`.

Does not know how a certificate is signed or where files are (`admit` is passed in), and whether
the machine that joined ever starts an agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
import ssl
import tempfile
import time
from asyncio import staggered
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self, assert_never

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from gpulayer_mesh.core import certificates
from gpulayer_mesh.core import joining as core
from gpulayer_mesh.core.types import Address, MeshId
from gpulayer_mesh.errors import GpuLayerError, JoinError, RemoteProtocolError
from gpulayer_mesh.sockets import listen, words

_CONNECTIONS_MAX = 16  # strangers at once; the oldest goes when one more comes
_DIAL_S = 2.0  # per address; a LAN answers in milliseconds
_STAGGER_S = 0.1  # RFC 8305: head start of the better address


@dataclass(frozen=True, slots=True)
class Joined:
    """A machine was admitted."""

    request: core.JoinRequest
    admission: core.Admission


@dataclass(frozen=True, slots=True)
class WasMember:
    """A machine had joined before, with these roles at least: nothing changed."""

    request: core.JoinRequest


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """A machine had the right line, but we could not sign or save."""

    request: core.JoinRequest
    error: GpuLayerError | OSError


@dataclass(frozen=True, slots=True)
class TriedWrongly:
    """Somebody answered our challenge without the secret."""

    host: str
    tries_left: int


News = Joined | WasMember | NotAdmitted | TriedWrongly


class JoinListener:
    """One invitation being offered; iterate for what happens until it ends.

    Args:
        admit: signs and saves; may raise GpuLayerError or OSError, the joiner is then refused.
        advertise: IP literals to put into the line, best first.
        bind: one address to listen on; None: all.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        mesh: MeshId,
        admit: Callable[[core.JoinRequest], core.Admission],
        advertise: Sequence[str],
        bind: str | None = None,
        uses: int = 1,
        valid_s: float = core.INVITE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 <= uses <= core.USES_MAX:
            raise JoinError(f"an invitation for {uses} machines, allowed are 1 to {core.USES_MAX}")
        self.ended: core.InviteState | None = None
        self._mesh = mesh
        self._admit = admit
        self._advertise = tuple(advertise)[:8]
        self._bind = bind
        self._uses = uses
        self._valid_s = valid_s
        self._clock = clock
        self._secret = secrets.token_bytes(16)
        self._news: asyncio.Queue[News | None] = asyncio.Queue()
        self._attempts = 0
        self._serving: dict[asyncio.Task[None], None] = {}  # in order of arrival

    @property
    def line(self) -> str:
        """What to paste on the other machine."""
        return core.write_line(
            core.Invitation(self._advertise, self.port, self._mesh, self._secret)
        )

    @property
    def uses_left(self) -> int:
        return self._inviter.uses_left

    async def __aenter__(self) -> Self:
        self._context, channel = _throw_away_certificate()
        self._inviter = core.Inviter(
            mesh=self._mesh,
            secret=self._secret,
            channel=channel,
            uses=self._uses,
            now=self._clock(),
            valid_s=self._valid_s,
        )
        self._socket = listen(self._bind, 0)
        self.port: int = self._socket.getsockname()[1]
        self._tasks = [asyncio.create_task(self._accept()), asyncio.create_task(self._expire())]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tasks = [*self._tasks, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def __aiter__(self) -> AsyncIterator[News]:
        while (news := await self._news.get()) is not None:
            yield news

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._socket)
            except OSError:  # out of file descriptors, or gone before we took it
                await asyncio.sleep(0.1)
                continue
            if len(self._serving) >= _CONNECTIONS_MAX:
                next(iter(self._serving)).cancel()
            task = asyncio.create_task(self._serve(connection, peer[0]))
            self._serving[task] = None
            task.add_done_callback(functools.partial(self._served, connection))

    def _served(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        del self._serving[task]
        connection.close()
        if not task.cancelled() and (error := task.exception()):
            raise error  # a bug of ours: to the loop's exception handler

    async def _expire(self) -> None:
        while (at := self._inviter.next_timeout()) is not None:
            # At most a second at a time: a suspended machine must not keep a line alive.
            await asyncio.sleep(min(1.0, max(0.0, at - self._clock())))
            if self._clock() >= at:
                news: list[News | None] = []
                self._perform(self._inviter.handle(self._clock(), core.Tick()), "", news)
                self._tell(news)

    async def _serve(self, connection: socket.socket, host: str) -> None:
        self._attempts += 1
        number = self._attempts
        writer: asyncio.StreamWriter | None = None
        news: list[News | None] = []
        try:
            async with asyncio.timeout(core.STEP_S):
                reader, writer = await _tls(connection, self._context)
                data, nonce = await _receive(reader, core.REQUEST_MAX), secrets.token_bytes(32)
            if self._react(writer, core.HelloReceived(number, data, nonce), host, news):
                return
            async with asyncio.timeout(core.STEP_S):
                await writer.drain()
                data = await _receive(reader, core.REQUEST_MAX)
            self._react(writer, core.ProofReceived(number, data), host, news)
        except (OSError, EOFError, TimeoutError, RemoteProtocolError):
            pass  # noise on the port, or a joiner that went away
        finally:
            self._inviter.handle(self._clock(), core.ConnectionLost(number))
            try:
                if writer is not None:
                    await _finish(writer)
            finally:  # last: who hears that all have joined may close the listener at once
                self._tell(news)

    def _react(
        self, writer: asyncio.StreamWriter, event: core.Event, host: str, news: list[News | None]
    ) -> bool:
        """Feed the machine and carry out what it wants; return whether that was the last word."""
        replies = self._perform(self._inviter.handle(self._clock(), event), host, news)
        for reply in replies:
            _send(writer, reply.data)
        return any(reply.last for reply in replies)

    def _perform(
        self, effects: list[core.Effect], host: str, news: list[News | None]
    ) -> list[core.Reply]:
        replies: list[core.Reply] = []
        for effect in effects:
            match effect:
                case core.Reply():
                    replies.append(effect)
                case core.Admit():
                    replies += self._perform(self._sign(effect, news), host, news)
                case core.WrongTry():
                    news.append(TriedWrongly(host, effect.tries_left))
                case core.Ended():
                    self.ended = effect.state
                    news.append(None)
                case _:
                    assert_never(effect)
        return replies

    def _sign(self, effect: core.Admit, news: list[News | None]) -> list[core.Effect]:
        try:
            admission = self._admit(effect.request)
        except (GpuLayerError, OSError) as e:
            news.append(NotAdmitted(effect.request, e))
            return self._inviter.handle(self._clock(), core.AdmitFailed(effect.attempt))
        news.append(
            Joined(effect.request, admission) if admission.new else WasMember(effect.request)
        )
        return self._inviter.handle(self._clock(), core.Admitted(effect.attempt, admission))

    def _tell(self, news: list[News | None]) -> None:
        for item in news:
            self._news.put_nowait(item)


async def join(
    line: str, *, key: Ed25519PrivateKey, name: str, addresses: tuple[Address, ...] = ()
) -> core.Admission:
    """Join the mesh a line invites to; the caller saves what comes back.

    All addresses are dialled, 100 ms apart; the first that answers with a challenge is used, so
    addresses where nobody or somebody else answers spend no try.

    Raises:
        JoinError: nobody answered, or the inviter said no; says why and what to do.
    """
    invitation = core.read_line(line)
    dials = [
        functools.partial(_greet, invitation, host, key, name, addresses)
        for host in invitation.hosts
    ]
    greeted: _Greeted | None
    greeted, _, errors = await staggered.staggered_race(dials, _STAGGER_S)
    if greeted is None:
        for error in errors:
            if isinstance(error, JoinError):
                raise error
        hosts = invitation.hosts
        tried = ", ".join(f"{host} ({words(e)})" for host, e in zip(hosts, errors, strict=False))
        raise JoinError(
            f"the inviting machine does not answer on port {invitation.port} of {tried}",
            hint="is `gpulayer mesh invite` still waiting there? an invitation lasts 10 minutes; "
            "a firewall may block the port",
        )
    joiner, challenge, reader, writer = greeted
    try:
        async with asyncio.timeout(core.STEP_S):
            _send(writer, joiner.prove(challenge))
            await writer.drain()
            return joiner.accept(await _receive(reader, core.ANSWER_MAX))
    except (OSError, EOFError, TimeoutError, RemoteProtocolError) as e:
        raise JoinError(f"joining broke off: {words(e)}", hint="run the same command again") from e
    finally:
        await _finish(writer)


# A connection whose other end has sent a challenge.
_Greeted = tuple[core.Joiner, bytes, asyncio.StreamReader, asyncio.StreamWriter]


async def _greet(
    invitation: core.Invitation,
    host: str,
    key: Ed25519PrivateKey,
    name: str,
    addresses: tuple[Address, ...],
) -> _Greeted:
    """Connect to one address and get a challenge."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Whose certificate it is, is proven by the ceremony: its key is part of the transcript.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_DIAL_S):
            reader, writer = await asyncio.open_connection(
                host, invitation.port, ssl=context, server_hostname=""
            )
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        joiner = core.Joiner(
            invitation,
            key,
            name=name,
            addresses=addresses,
            channel=_channel(shown),
            nonce=secrets.token_bytes(32),
        )
        async with asyncio.timeout(core.STEP_S):
            _send(writer, joiner.hello())
            await writer.drain()
            challenge = await _receive(reader, core.REQUEST_MAX)
        core.raise_if_refused(challenge)
        return joiner, challenge, reader, writer
    except BaseException:
        if writer is not None:
            writer.transport.abort()
        raise


def _throw_away_certificate() -> tuple[ssl.SSLContext, bytes]:
    """Return the listener's TLS context and the hash of its key."""
    key = Ed25519PrivateKey.generate()
    der = certificates.issue_ca(key, wall=datetime.now(UTC), serial=secrets.randbits(127) | 1)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nothing of one attempt may help another
    with tempfile.TemporaryDirectory(prefix="gpulayer-") as folder:  # 0700; ssl reads files only
        path = Path(folder) / "join.pem"
        path.write_bytes(pem + ssl.DER_cert_to_PEM_cert(der).encode("ascii"))
        context.load_cert_chain(path)
    return context, _channel(der)


def _channel(certificate: bytes | None) -> bytes:
    return bytes.fromhex(certificates.id_of(certificates.key_of(certificate)))


async def _tls(
    connection: socket.socket, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(len(data).to_bytes(4, "big") + data)


async def _receive(reader: asyncio.StreamReader, limit: int) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > limit:
        raise RemoteProtocolError(f"message of {length} bytes exceeds the limit of {limit}")
    return await reader.readexactly(length)


async def _finish(writer: asyncio.StreamWriter) -> None:
    """Close after the last bytes have gone, but wait for nobody long."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_DIAL_S):
            await writer.wait_closed()
    writer.transport.abort()
