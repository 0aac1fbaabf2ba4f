"""The door and the dialler on loopback: who gets in, and that nothing runs for anybody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from gpulayer_mesh.core import certificates, roster, wire
from gpulayer_mesh.core.joining import JoinRequest
from gpulayer_mesh.core.roster import RosterBook
from gpulayer_mesh.core.types import Address, NodeId, Role
from gpulayer_mesh.errors import (
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    PlacementBusyError,
    RemoteProtocolError,
    RemovedError,
    TransportError,
)
from gpulayer_mesh.runtime import door as doors
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime.dial import Dialer
from gpulayer_mesh.runtime.door import Door, DoorRequest, Route, Stream

pytestmark = pytest.mark.network

HOST = "127.0.0.1"
WAIT_S = 20.0
LONG_AGO = datetime(1990, 1, 1, tzinfo=UTC)


class Mesh:
    """A founder, members by name, and the means to forge what an attacker could hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.founder = self.machine("laptop")
        identities.create_mesh(self.founder, "laptop")

    def machine(self, name: str) -> identities.Identity:
        return identities.load_or_create(self.folder / name)

    def join(self, name: str, *roles: Role) -> identities.Identity:
        machine = self.machine(name)
        public = machine.key.public_key().public_bytes_raw()
        request = JoinRequest(machine.node, public, name, ())
        admission = identities.admit(self.founder, request, roles or (Role.WORKER,), {})
        identities.save_membership(machine, admission)
        return machine

    def book(self, machine: identities.Identity) -> RosterBook:
        mesh = identities.load_mesh(machine)
        assert mesh is not None
        return mesh.book

    @property
    def ca_key(self) -> Ed25519PrivateKey:
        pem = (self.founder.home / "mesh" / "ca.key").read_bytes()
        key = load_pem_private_key(pem, None)
        assert isinstance(key, Ed25519PrivateKey)
        return key


class Box:
    """A member with an open door."""

    def __init__(self, mesh: Mesh, machine: identities.Identity) -> None:
        self.node = machine.node
        self.book = mesh.book(machine)
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.door = Door(
            context=identities.server_context(machine.home),
            book=self.book,
            node=machine.node,
            routes=[
                Route("GET", "/v1/ping", self.ping),
                Route("POST", "/v1/echo", self.echo, max_body=1000),
                Route("POST", "/v1/manifest", self.echo, max_body=4 << 20),
                Route("POST", "/v1/jobs/{id}/reserve", self.echo, Role.LAUNCHER),
                Route("DELETE", "/v1/members/{node}", self.echo, Role.ADMIN),
                Route("GET", "/v1/jobs/{id}/logs", self.logs),
                Route("GET", "/v1/fail/{kind}", self.fail),
                Route("GET", "/v1/wait", self.wait),
            ],
            on_roster=self.take,
        )

    async def open(self) -> None:
        self.port = await self.door.start([HOST], 0)
        self.addresses = (Address(HOST, self.port),)

    async def take(self, signed: bytes) -> None:
        self.book.offer(signed)

    async def ping(self, request: DoorRequest) -> dict[str, Any]:
        return {"peer": request.peer, "roles": request.roles, "query": request.query}

    async def echo(self, request: DoorRequest) -> bytes:
        return request.body

    async def logs(self, request: DoorRequest) -> Stream:
        return Stream(self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        self.started.set()
        try:
            while (piece := await self.pieces.get()) is not None:
                yield piece
            raise ValueError("the stream broke inside")
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def fail(self, request: DoorRequest) -> None:
        raise {
            "missing": NotFoundError("no job 'x'", hint="gpulayer jobs"),
            "busy": PlacementBusyError("all taken"),
            "bug": ZeroDivisionError("secret detail"),
            "escape": GpuLayerError("red \x1b[31mtext\x07"),
        }[request.params["kind"]]

    async def wait(self, request: DoorRequest) -> None:
        self.started.set()
        await asyncio.sleep(60)


@pytest.fixture
def mesh(tmp_path: Path) -> Mesh:
    return Mesh(tmp_path)


@pytest.fixture
async def box(mesh: Mesh) -> AsyncIterator[Box]:
    opened = Box(mesh, mesh.join("box"))
    await opened.open()
    yield opened
    await opened.door.close()


@contextlib.asynccontextmanager
async def dialling(mesh: Mesh, machine: identities.Identity) -> AsyncIterator[Dialer]:
    book = mesh.book(machine)
    dialer = Dialer(
        context=identities.client_context(machine.home),
        book=book,
        node=machine.node,
        on_roster=book.offer,
    )
    try:
        yield dialer
    finally:
        await dialer.close()


@pytest.fixture
async def laptop(mesh: Mesh, box: Box) -> AsyncIterator[Dialer]:
    async with dialling(mesh, mesh.founder) as dialer:
        yield dialer


async def raw(port: int, context: ssl.SSLContext | None, data: bytes) -> bytes:
    """Send bytes; return the answer, b"" where the other end just closes."""
    try:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
            try:
                writer.write(data)
                await writer.drain()
                return await reader.read()
            finally:
                writer.transport.abort()
    except OSError:
        return b""


def get(path: str = "/v1/ping", *headers: str, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode()


def post(*headers: str, path: str = "/v1/echo") -> bytes:
    return get(path, *headers, method="POST")


# --- strangers: no handler runs ------------------------------------------------------------------


def leaf(
    mesh: Mesh,
    *,
    key: Any = None,
    signer: Ed25519PrivateKey | None = None,
    node: NodeId | None = None,
    mesh_id: str | None = None,
    usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.CLIENT_AUTH,
    san: bool = True,
) -> tuple[bytes, Any]:
    """A certificate such as our CA would never write."""
    key = key or mesh.founder.key
    ca = signer or mesh.ca_key
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "forged")])
    issuer = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"gpulayer mesh {certificates.id_of(ca)[:16]}")]
    )
    public = key.public_key()
    builder = (
        x509.CertificateBuilder(issuer, subject, public, 7, LONG_AGO, LONG_AGO.replace(year=2090))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key()), False)
        .add_extension(x509.BasicConstraints(False, None), True)
        .add_extension(x509.ExtendedKeyUsage([usage]), False)
    )
    if san:
        own_mesh = certificates.id_of(mesh.ca_key)
        uri = f"gpulayer://{mesh_id or own_mesh}/{node or mesh.founder.node}"
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        builder = builder.add_extension(names, False)
    return builder.sign(ca, None).public_bytes(Encoding.PEM), key


def shown(mesh: Mesh, certificate: bytes, key: Any) -> ssl.SSLContext:
    """A client that shows any certificate and accepts any server."""
    path = mesh.folder / "attacker.pem"
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate
    )
    context = anonymous()
    context.load_cert_chain(path)
    return context


def anonymous() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([certificates.ALPN])
    return context


def old_tls(mesh: Mesh) -> ssl.SSLContext:
    context = shown(mesh, *leaf(mesh))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def ca_as_leaf(mesh: Mesh) -> ssl.SSLContext:
    der = certificates.issue_ca(mesh.ca_key, wall=datetime.now(UTC), serial=1)
    return shown(mesh, ssl.DER_cert_to_PEM_cert(der).encode(), mesh.ca_key)


def self_signed(mesh: Mesh) -> ssl.SSLContext:
    key = Ed25519PrivateKey.generate()
    der = certificates.issue_ca(key, wall=datetime.now(UTC), serial=1)
    return shown(mesh, ssl.DER_cert_to_PEM_cert(der).encode(), key)


def other_mesh(mesh: Mesh) -> ssl.SSLContext:
    return identities.client_context(Mesh(mesh.folder / "other").founder.home)


def signed_by_a_member(mesh: Mesh) -> ssl.SSLContext:
    """A node certificate must not work as a CA."""
    return shown(mesh, *leaf(mesh, key=Ed25519PrivateKey.generate(), signer=mesh.founder.key))


STRANGERS: dict[str, Callable[[Mesh], ssl.SSLContext | None]] = {
    "plain HTTP": lambda mesh: None,
    "no certificate": lambda mesh: anonymous(),
    "self-signed": self_signed,
    "other mesh": other_mesh,
    "signed by a member": signed_by_a_member,
    "CA certificate as leaf": ca_as_leaf,
    "TLS 1.2": old_tls,
    "wrong usage": lambda mesh: shown(mesh, *leaf(mesh, usage=ExtendedKeyUsageOID.CODE_SIGNING)),
    "server usage only": lambda mesh: shown(
        mesh, *leaf(mesh, usage=ExtendedKeyUsageOID.SERVER_AUTH)
    ),
    "SAN of another node": lambda mesh: shown(mesh, *leaf(mesh, node="ab" * 32)),
    "SAN of another mesh": lambda mesh: shown(mesh, *leaf(mesh, mesh_id="ab" * 32)),
    "no SAN": lambda mesh: shown(mesh, *leaf(mesh, san=False)),
    "not Ed25519": lambda mesh: shown(
        mesh, *leaf(mesh, key=ec.generate_private_key(ec.SECP256R1()))
    ),
}


@pytest.mark.parametrize("who", STRANGERS)
async def test_stranger_gets_no_answer_and_no_handler_runs(mesh: Mesh, box: Box, who: str) -> None:
    context = STRANGERS[who](mesh)
    for request in (
        get(),
        get(method="DELETE"),
        post("Content-Length: 0", path="/v1/roster"),
    ):
        assert await raw(box.port, context, request) == b""
    assert box.door.handled == 0


async def test_forged_but_correct_leaf_would_be_let_in(mesh: Mesh, box: Box) -> None:
    """The certificates above fail for their fault, not because the test cannot make good ones."""
    assert b" 200 " in await raw(box.port, shown(mesh, *leaf(mesh)), get())


async def test_garbage_is_dropped(box: Box) -> None:
    assert await raw(box.port, None, bytes(range(256)) * 8) == b""
    assert box.door.handled == 0


async def test_wrong_clock_locks_nobody_out(mesh: Mesh, box: Box) -> None:
    """Certificates that ended in 2000, or begin in 2100, are as good as any: no clock decides."""
    public = mesh.founder.key.public_key().public_bytes_raw()
    for year in (1990, 2100):
        wall = LONG_AGO.replace(year=year)
        der = certificates.issue_node(mesh.ca_key, public, wall=wall, serial=3)
        pem = ssl.DER_cert_to_PEM_cert(der).encode()
        (mesh.founder.home / "mesh" / "node.pem").write_bytes(pem)
        async with dialling(mesh, mesh.founder) as dialer:
            await dialer.request(box.node, box.addresses, "GET", "/v1/ping")
    assert box.door.handled == 2


# --- members -------------------------------------------------------------------------------------


async def test_member_is_known_by_its_key(mesh: Mesh, box: Box, laptop: Dialer) -> None:
    answer = wire.unpack(await laptop.request(box.node, box.addresses, "GET", "/v1/ping?a=1"))
    assert answer == {"peer": mesh.founder.node, "roles": list(Role), "query": {"a": "1"}}
    assert laptop.good_address(box.node) == box.addresses[0]
    assert await laptop.who_is(box.addresses[0]) == box.node


@pytest.mark.parametrize(
    ("roles", "may_reserve", "may_remove"),
    [
        ((Role.WORKER,), False, False),
        ((Role.LAUNCHER,), True, False),
        ((Role.ADMIN,), False, True),
        (tuple(Role), True, True),
    ],
)
async def test_each_route_asks_for_its_role(
    mesh: Mesh, box: Box, roles: tuple[Role, ...], may_reserve: bool, may_remove: bool
) -> None:
    member = mesh.join("member", *roles)
    box.book.offer(mesh.book(member).signed)
    async with dialling(mesh, member) as dialer:
        for allowed, method, path in (
            (True, "GET", "/v1/ping"),
            (may_reserve, "POST", "/v1/jobs/x/reserve"),
            (may_remove, "DELETE", "/v1/members/y"),
        ):
            ran = box.door.handled
            if allowed:
                await dialer.request(box.node, box.addresses, method, path)
            else:
                with pytest.raises(NotAllowedError, match="lacks the role"):
                    await dialer.request(box.node, box.addresses, method, path)
            assert box.door.handled == ran + allowed


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("GET", "/v1/jobs//logs", 404),
        ("GET", "/v1/jobs/a%2Fb/logs", 404),
        ("GET", "/v1/jobs/a/b/logs", 404),
        ("GET", "/v1/ping/", 404),
        ("GET", "http://elsewhere/v1/nothing", 404),
        ("DELETE", "/v1/ping", 405),
        ("HEAD", "/v1/ping", 405),
        ("OPTIONS", "/v1/ping", 405),
        ("PATCH", "/v1/echo", 405),
    ],
)
async def test_other_paths_and_methods_are_refused(
    mesh: Mesh, box: Box, method: str, path: str, status: int
) -> None:
    context = identities.client_context(mesh.founder.home)
    answer = await raw(box.port, context, get(path, method=method))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert box.door.handled == 0


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post("Content-Encoding: gzip", "Content-Length: 0"), 415),
        (get("/v1/ping", "Upgrade: websocket"), 400),
        (get("/v1/ping", "X: " + "x" * 9000), 400),
        (get("/v1/ping", *(f"X-{i}: 1" for i in range(40))), 400),
        (get("/v1/" + "x" * 9000), 400),
        (post("Content-Length: 0", "Content-Length: 1"), 400),
        (post("Content-Length: 1001"), 413),
        (
            post("Transfer-Encoding: chunked") + b"3e9\r\n" + bytes(1001) + b"\r\n0\r\n\r\n",
            413,
        ),
    ],
    ids=[
        "encoded",
        "upgrade",
        "long header",
        "many headers",
        "long path",
        "two lengths",
        "declared too large",
        "chunked too large",
    ],
)
async def test_requests_over_a_limit_are_refused(
    mesh: Mesh, box: Box, data: bytes, status: int
) -> None:
    answer = await raw(box.port, identities.client_context(mesh.founder.home), data)
    assert f" {status} " in answer.split(b"\r\n", 1)[0].decode()
    assert b"aiohttp" not in answer
    assert box.door.handled == 0


async def test_body_at_its_limit_is_taken(box: Box, laptop: Dialer) -> None:
    body = bytes(1000)
    assert await laptop.request(box.node, box.addresses, "POST", "/v1/echo", body=body) == body
    with pytest.raises(RemoteProtocolError, match="exceeds the limit of 1000"):
        await laptop.request(box.node, box.addresses, "POST", "/v1/echo", body=body + b"x")


async def test_megabytes_go_both_ways(box: Box, laptop: Dialer) -> None:
    body = bytes(range(256)) * (3 << 12)
    assert await laptop.request(box.node, box.addresses, "POST", "/v1/manifest", body=body) == body


async def test_other_protocol_version_is_told_so_on_both_sides(mesh: Mesh, box: Box) -> None:
    context = identities.client_context(mesh.founder.home)
    context.set_alpn_protocols(["gpulayer/0"])
    answer = await raw(box.port, context, get())
    assert b" 426 " in answer
    assert b"'gpulayer/1'" in answer
    book = mesh.book(mesh.founder)
    dialer = Dialer(context=context, book=book, node=mesh.founder.node, on_roster=book.offer)
    with pytest.raises(TransportError, match="another protocol version"):
        await dialer.request(box.node, box.addresses, "GET", "/v1/ping")
    await dialer.close()
    assert box.door.handled == 0


async def test_slow_headers_end_the_connection(
    mesh: Mesh, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "HEADER_S", 0.2)
    context = identities.client_context(mesh.founder.home)
    assert await raw(box.port, context, b"GET /v1/ping HTTP/1.1\r\nHost: x\r\n") == b""


async def test_slow_body_ends_the_request(
    mesh: Mesh, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "HEADER_S", 0.2)
    context = identities.client_context(mesh.founder.home)
    request = post("Content-Length: 10")
    assert b" 408 " in await raw(box.port, context, request + b"12345")
    assert box.door.handled == 0


async def test_idle_sockets_do_not_keep_members_out(box: Box, laptop: Dialer) -> None:
    crowd = [await asyncio.open_connection(HOST, box.port) for _ in range(200)]
    async with asyncio.timeout(WAIT_S):
        await laptop.request(box.node, box.addresses, "GET", "/v1/ping")
    assert len(box.door._handshakes) <= doors.HANDSHAKES_MAX
    for _, writer in crowd:
        writer.close()


async def test_peer_over_its_connections_is_cut_and_others_are_served(
    mesh: Mesh, box: Box, laptop: Dialer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "CONNECTIONS_PER_PEER", 3)
    greedy = mesh.join("greedy")
    box.book.offer(mesh.book(greedy).signed)
    context = identities.client_context(greedy.home)
    held = [await asyncio.open_connection(HOST, box.port, ssl=context) for _ in range(3)]
    for _, writer in held:
        writer.write(get().replace(b"close", b"keep-alive"))
    for reader, _ in held:
        async with asyncio.timeout(WAIT_S):
            assert b" 200 " in await reader.readline()
    assert await raw(box.port, context, get()) == b""
    await laptop.request(box.node, box.addresses, "GET", "/v1/ping")
    for _, writer in held:
        writer.transport.abort()


# --- errors and streams --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("missing", NotFoundError, "box: no job 'x'"),
        ("busy", PlacementBusyError, "box: all taken"),
        ("bug", GpuLayerError, "box: internal error; its agent's log says more"),
        ("escape", GpuLayerError, "box: red [31mtext"),
    ],
)
async def test_errors_arrive_in_their_class_without_inner_details(
    box: Box, laptop: Dialer, kind: str, error: type[GpuLayerError], message: str
) -> None:
    with pytest.raises(error) as caught:
        await laptop.request(box.node, box.addresses, "GET", f"/v1/fail/{kind}")
    assert type(caught.value) is error
    assert caught.value.message == message
    assert caught.value.hint == ("gpulayer jobs" if kind == "missing" else None)


async def test_stream_arrives_piece_by_piece_and_an_inner_fault_breaks_it(
    box: Box, laptop: Dialer
) -> None:
    stream = laptop.stream(box.node, box.addresses, "GET", "/v1/jobs/x/logs")
    async with asyncio.timeout(WAIT_S):
        for piece in (b"one", b"two"):
            box.pieces.put_nowait(piece)
            assert await anext(stream) == piece
        box.pieces.put_nowait(None)
        with pytest.raises(TransportError, match="broke off"):
            await anext(stream)


async def test_stream_ends_inside_when_the_reader_leaves(box: Box, laptop: Dialer) -> None:
    stream = laptop.stream(box.node, box.addresses, "GET", "/v1/jobs/x/logs")
    box.pieces.put_nowait(b"one")
    async with asyncio.timeout(WAIT_S):
        await anext(stream)
        await stream.aclose()
        await box.cancelled.wait()


# --- the roster ----------------------------------------------------------------------------------


def without(mesh: Mesh, node: NodeId) -> bytes:
    return identities.remove_member(mesh.founder, node).signed


async def test_removed_member_is_refused_on_its_open_connection(
    mesh: Mesh, box: Box, laptop: Dialer
) -> None:
    member = mesh.join("member")
    box.book.offer(mesh.book(member).signed)
    async with dialling(mesh, member) as dialer:
        await dialer.request(box.node, box.addresses, "GET", "/v1/ping")
        box.book.offer(without(mesh, member.node))  # nobody calls enforce
        for _ in ("heard from the box", "known from then on"):
            with pytest.raises(RemovedError):
                await dialer.request(box.node, box.addresses, "GET", "/v1/ping")
    assert box.door.handled == 1


async def test_removal_is_only_believed_to_a_newer_roster_of_the_mesh(
    mesh: Mesh, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = mesh.join("member")
    old = box.book.signed  # older than the member's own, and does not list it
    newest = without(mesh, member.node)
    other_ca = Ed25519PrivateKey.generate()
    forged = roster.Roster(certificates.id_of(other_ca), 99, ())
    shown = {
        "old": old,
        "of another mesh": roster.seal_roster(other_ca, forged),
        "one bit off": newest[:-1] + bytes([newest[-1] ^ 1]),
        "nothing": b"",
    }
    async with dialling(mesh, member) as dialer:
        for name, signed in shown.items():
            liar = doors._unknown(member.node, signed)

            async def refuse(*_: object, liar: Exception = liar) -> None:
                raise liar

            monkeypatch.setattr(box.door, "_introduce", refuse)
            with pytest.raises(NotAllowedError, match="not in our roster"):
                await dialer.request(box.node, box.addresses, "GET", "/v1/ping")
            assert member.node in dialer._book, name


@pytest.mark.parametrize("path", ["/v1/jobs/x/logs", "/v1/wait"], ids=["stream", "long poll"])
async def test_open_session_of_a_removed_member_ends_within_5_s(
    mesh: Mesh, box: Box, laptop: Dialer, path: str
) -> None:
    """Even a silent one, and even when only a roster push tells the door."""
    member = mesh.join("member")
    box.book.offer(mesh.book(member).signed)
    async with dialling(mesh, member) as dialer:
        reading = asyncio.create_task(
            dialer.request(box.node, box.addresses, "GET", path, deadline_s=60)
        )
        async with asyncio.timeout(WAIT_S):
            await box.started.wait()
        removed = time.monotonic()
        signed = without(mesh, member.node)
        await laptop.request(box.node, box.addresses, "POST", "/v1/roster", body=signed)
        with pytest.raises(GpuLayerError):
            await reading
        assert time.monotonic() - removed < 5


async def test_sweep_ends_sessions_when_nobody_tells_the_door(mesh: Mesh, box: Box) -> None:
    member = mesh.join("member")
    box.book.offer(mesh.book(member).signed)
    async with dialling(mesh, member) as dialer:
        stream = dialer.stream(box.node, box.addresses, "GET", "/v1/jobs/x/logs")
        box.pieces.put_nowait(b"one")
        await anext(stream)
        box.book.offer(without(mesh, member.node))
        removed = time.monotonic()
        with pytest.raises(TransportError):
            await anext(stream)
        assert time.monotonic() - removed < 5


async def test_not_one_more_piece_reaches_a_removed_member(mesh: Mesh, box: Box) -> None:
    member = mesh.join("member")
    box.book.offer(mesh.book(member).signed)
    async with dialling(mesh, member) as dialer:
        stream = dialer.stream(box.node, box.addresses, "GET", "/v1/jobs/x/logs")
        box.pieces.put_nowait(b"one")
        await anext(stream)
        box.book.offer(without(mesh, member.node))
        box.pieces.put_nowait(b"secret")
        with pytest.raises(TransportError):
            await anext(stream)


async def test_second_joiner_introduces_itself_to_the_first(mesh: Mesh, box: Box) -> None:
    second = mesh.join("second")
    assert second.node not in box.book
    async with dialling(mesh, second) as dialer:
        await dialer.request(box.node, box.addresses, "GET", "/v1/ping")
    assert second.node in box.book
    assert box.book.epoch == 3


async def test_certified_peer_without_a_newer_roster_stays_outside(mesh: Mesh, box: Box) -> None:
    """Removed members hold certificates and old rosters; forgers hold anything."""
    member = mesh.join("member")
    old = mesh.book(member).signed
    box.book.offer(old)
    box.book.offer(without(mesh, member.node))
    newest = mesh.book(mesh.founder)
    listed = roster.with_member(
        newest.roster, roster.entry(member.key.public_key().public_bytes_raw(), "member", ())
    )
    other_ca = Ed25519PrivateKey.generate()
    offers = {
        "old": old,
        "current, not listed": newest.signed,
        "signed by itself": wire.seal(
            member.key, kind="roster", mesh=newest.mesh, sender=newest.mesh, seq=99, body={}
        ),
        "signed by another CA": roster.seal_roster(
            other_ca, roster.Roster(certificates.id_of(other_ca), 99, listed.entries)
        ),
        "one bit off": (good := roster.seal_roster(mesh.ca_key, listed))[:-1]
        + bytes([good[-1] ^ 1]),
        "nothing": b"",
    }
    context = identities.client_context(member.home)
    for name, body in offers.items():
        request = post(f"Content-Length: {len(body)}", path="/v1/roster") + body
        answer = await raw(box.port, context, request)
        # Ours goes to a former member only: it shows a roster that the mesh signed and that
        # lists it. Whoever knows of its removal needs no proof.
        assert (box.book.signed in answer) == (name == "old")
        assert answer.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 ")), (name, answer)
        assert b" 403 " in await raw(box.port, context, get("/v1/roster")), name
    assert box.book.epoch == 4
    assert box.door.handled == 0
    # The same peer with the real thing is in.
    request = post(f"Content-Length: {len(good)}", path="/v1/roster") + good
    assert b" 200 " in await raw(box.port, context, request)
    assert box.book.epoch == 5


async def test_roster_can_be_read_and_an_older_one_changes_nothing(
    mesh: Mesh, box: Box, laptop: Dialer
) -> None:
    old = box.book.signed
    new = mesh.book(mesh.join("second")).signed
    for pushed in (new, old):
        answer = await laptop.request(box.node, box.addresses, "POST", "/v1/roster", body=pushed)
        assert wire.unpack(answer) == {"epoch": 3}
    assert await laptop.request(box.node, box.addresses, "GET", "/v1/roster") == new


# --- dialling ------------------------------------------------------------------------------------


async def test_nothing_is_sent_to_another_node_at_the_address(mesh: Mesh, box: Box) -> None:
    second = mesh.join("second")
    async with dialling(mesh, second) as dialer:
        with pytest.raises(TransportError, match=r"cannot reach laptop.*: box answers there"):
            await dialer.request(mesh.founder.node, box.addresses, "POST", "/v1/echo", body=b"x")
    assert box.door.handled == 0


async def test_dead_and_foreign_addresses_are_passed_over(
    mesh: Mesh, box: Box, laptop: Dialer, tmp_path: Path
) -> None:
    foreign_mesh = Mesh(tmp_path / "foreign")
    foreign = Box(foreign_mesh, foreign_mesh.founder)
    await foreign.open()
    silent = socket.create_server((HOST, 0))  # never accepts
    addresses = (
        Address("127.0.0.2", 1),
        Address(HOST, silent.getsockname()[1]),
        *foreign.addresses,
        *box.addresses,
    )
    started = time.monotonic()
    await laptop.request(box.node, addresses, "GET", "/v1/ping")
    assert time.monotonic() - started < 2
    assert laptop.good_address(box.node) == box.addresses[0]
    with pytest.raises(TransportError, match="not of our mesh"):
        await laptop.who_is(foreign.addresses[0])
    await foreign.door.close()
    silent.close()


async def test_strangers_and_our_own_removal_are_told_before_dialling(
    mesh: Mesh, box: Box, laptop: Dialer
) -> None:
    with pytest.raises(NotAllowedError, match="no member of this mesh"):
        await laptop.request("ab" * 32, box.addresses, "GET", "/v1/ping")
    member = mesh.join("member")
    async with dialling(mesh, member) as dialer:
        dialer._book.offer(without(mesh, member.node))
        with pytest.raises(NotAllowedError, match="this machine was removed"):
            await dialer.request(box.node, box.addresses, "GET", "/v1/ping")


async def test_unreachable_node_names_every_address(mesh: Mesh, box: Box, laptop: Dialer) -> None:
    addresses = (Address(HOST, 1), Address("127.0.0.2", 1))
    with pytest.raises(TransportError) as caught:
        await laptop.request(box.node, addresses, "GET", "/v1/ping")
    assert caught.value.message == (
        "cannot reach box: 127.0.0.1 port 1: connection refused; "
        "127.0.0.2 port 1: connection refused"
    )
    with pytest.raises(TransportError, match="no address of box"):
        async with dialling(mesh, mesh.founder) as fresh:
            await fresh.request(box.node, (), "GET", "/v1/ping")


async def test_refused_certificate_is_told_in_words(mesh: Mesh, box: Box, tmp_path: Path) -> None:
    """With TLS 1.3 the refused side sees a connection that opens and closes."""
    context = identities.client_context(mesh.founder.home)
    foreign = Mesh(tmp_path / "foreign").founder
    context.load_cert_chain(foreign.home / "mesh" / "node.pem", foreign.home / "identity.key")
    book = mesh.book(mesh.founder)
    dialer = Dialer(context=context, book=book, node=mesh.founder.node, on_roster=book.offer)
    with pytest.raises(TransportError, match="closed the connection without an answer") as caught:
        await dialer.request(box.node, box.addresses, "GET", "/v1/ping")
    assert "does not accept this machine's certificate" in (caught.value.hint or "")
    await dialer.close()


async def test_deadline_is_kept_and_connection_reused_afterwards(box: Box, laptop: Dialer) -> None:
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"did not answer GET /v1/wait within 0\.3 s"):
        await laptop.request(box.node, box.addresses, "GET", "/v1/wait", deadline_s=0.3)
    assert time.monotonic() - started < 5
    await laptop.request(box.node, box.addresses, "GET", "/v1/ping")


async def test_answer_over_its_limit_is_refused(box: Box, laptop: Dialer) -> None:
    with pytest.raises(RemoteProtocolError, match="exceeds the limit of 100 bytes"):
        await laptop.request(
            box.node, box.addresses, "POST", "/v1/echo", body=bytes(500), max_bytes=100
        )


async def test_restarted_agent_is_reached_over_a_stale_connection(
    mesh: Mesh, box: Box, laptop: Dialer
) -> None:
    await laptop.request(box.node, box.addresses, "GET", "/v1/ping")
    await box.door.close()
    again = Box(mesh, mesh.machine("box"))
    again.port = await again.door.start([HOST], box.port)
    echoed = await laptop.request(box.node, box.addresses, "POST", "/v1/echo", body=b"x")
    assert echoed == b"x"
    await again.door.close()


async def test_forgotten_connections_are_dialled_anew(box: Box, laptop: Dialer) -> None:
    await laptop.request(box.node, box.addresses, "GET", "/v1/ping")
    before = set(box.door._connections)
    laptop.forget_connections()
    await laptop.request(box.node, box.addresses, "GET", "/v1/ping")
    assert not before & box.door._connections


async def test_one_connection_serves_many_requests(box: Box, laptop: Dialer) -> None:
    for _ in range(20):
        await laptop.request(box.node, box.addresses, "GET", "/v1/ping")
    assert len(box.door._connections) == 1


async def test_taken_port_is_an_error_and_nothing_stays_open(mesh: Mesh, box: Box) -> None:
    other = Box(mesh, mesh.machine("box"))
    with pytest.raises(OSError, match="in use"):
        await other.door.start(["127.0.0.2", HOST], box.port)
    await asyncio.sleep(0)
    listening = await asyncio.start_server(lambda r, w: None, "127.0.0.2", box.port)
    listening.close()
