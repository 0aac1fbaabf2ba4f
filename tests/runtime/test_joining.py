"""Joining over real sockets: the happy path, refusals, and a relay in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gpulayer_mesh.core import joining as core
from gpulayer_mesh.core.types import Address, Role
from gpulayer_mesh.errors import GpuLayerError, JoinError, LocalProtocolError
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime.joining import (
    Joined,
    JoinListener,
    News,
    NotAdmitted,
    TriedWrongly,
    WasMember,
    _throw_away_certificate,
    join,
)

from gpulayer import membership

pytestmark = pytest.mark.network

HOST = "127.0.0.1"
WAIT_S = 20.0


class Founder:
    """A mesh whose founder invites."""

    def __init__(self, home: Path) -> None:
        self.identity = identities.load_or_create(home)
        self.mesh = identities.create_mesh(self.identity, "laptop")

    def admit(self, request: core.JoinRequest) -> core.Admission:
        peers = {self.identity.node: (Address(HOST, 7400),)}
        return identities.admit(self.identity, request, (Role.WORKER,), peers)

    def invite(self, **changes: Any) -> JoinListener:
        settings: dict[str, Any] = {
            "mesh": self.mesh.mesh,
            "admit": self.admit,
            "advertise": [HOST],
            "bind": HOST,
        }
        return JoinListener(**{**settings, **changes})

    def names(self) -> set[str]:
        mesh = identities.load_mesh(self.identity)
        assert mesh is not None
        return {e.name for e in mesh.book.roster.entries}


@pytest.fixture
def founder(tmp_path: Path) -> Founder:
    return Founder(tmp_path / "laptop")


def new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def altered(line: str, **changes: Any) -> str:
    return core.write_line(replace(core.read_line(line), **changes))


async def all_news(listener: JoinListener) -> list[News]:
    async with asyncio.timeout(WAIT_S):
        return [news async for news in listener]


async def test_machine_with_the_line_becomes_a_member(founder: Founder, tmp_path: Path) -> None:
    box = identities.load_or_create(tmp_path / "box")
    door = (Address("192.0.2.5", 7400),)
    async with founder.invite() as listener:
        admission = await join(listener.line, key=box.key, name="box-1", addresses=door)
        [news] = await all_news(listener)
        assert listener.ended is core.InviteState.USED_UP
    assert isinstance(news, Joined)
    assert (news.request.node, news.request.name) == (box.node, "box-1")
    assert news.request.addresses == door
    mesh = identities.save_membership(box, admission)
    assert mesh.mesh == founder.mesh.mesh
    assert mesh.book.roles(box.node) == (Role.WORKER,)
    assert identities.load_peers(box.home) == {founder.identity.node: (Address(HOST, 7400),)}
    identities.server_context(box.home)
    identities.client_context(box.home)


async def test_three_machines_join_at_once_and_equal_names_get_numbers(founder: Founder) -> None:
    async with founder.invite(uses=3) as listener:
        line = listener.line
        joins = [join(line, key=new_key(), name="box") for _ in range(3)]
        await asyncio.gather(*joins)
        news = await all_news(listener)
    assert len(news) == 3
    assert founder.names() == {"laptop", "box", "box-2", "box-3"}


async def test_machine_that_joins_again_keeps_one_entry(founder: Founder) -> None:
    key = new_key()
    async with founder.invite(uses=2) as listener:
        await join(listener.line, key=key, name="box")
        await join(listener.line, key=key, name="box")
        assert listener.uses_left == 1
    assert founder.names() == {"laptop", "box"}


async def test_founder_with_its_own_line_is_told_and_takes_no_use(
    founder: Founder, tmp_path: Path
) -> None:
    async with founder.invite() as listener:
        line = listener.line
        us, mesh, new = await membership.join(founder.identity.home, line, "laptop")
        assert (us.name, mesh, new) == ("laptop", founder.mesh.mesh, False)
        assert us.roles == tuple(Role)
        assert listener.uses_left == 1
        _, _, new = await membership.join(tmp_path / "box", line, "box")
        assert new
        known, joined = await all_news(listener)
    assert isinstance(known, WasMember)
    assert isinstance(joined, Joined)
    assert founder.names() == {"laptop", "box"}


async def test_three_wrong_secrets_burn_the_invitation(founder: Founder) -> None:
    async with founder.invite(uses=2) as listener:
        wrong = altered(listener.line, secret=bytes(16))
        for _ in range(3):
            with pytest.raises(JoinError, match="did not accept our proof"):
                await join(wrong, key=new_key(), name="box")
        with pytest.raises(JoinError, match="void after three wrong tries"):
            await join(listener.line, key=new_key(), name="box")
        assert await all_news(listener) == [TriedWrongly(HOST, left) for left in (2, 1, 0)]
        assert listener.ended is core.InviteState.BURNED
    assert founder.names() == {"laptop"}


async def test_used_up_invitation_says_so_while_it_is_open(founder: Founder) -> None:
    async with founder.invite() as listener:
        await join(listener.line, key=new_key(), name="box-1")
        with pytest.raises(JoinError, match="used as often as it was made for"):
            await join(listener.line, key=new_key(), name="box-2")
    assert founder.names() == {"laptop", "box-1"}


async def test_expired_invitation_says_so_and_ends(founder: Founder) -> None:
    now = 1000.0
    async with founder.invite(clock=lambda: now) as listener:
        now += core.INVITE_S
        with pytest.raises(JoinError, match="expired"):
            await join(listener.line, key=new_key(), name="box")
        assert await all_news(listener) == []
        assert listener.ended is core.InviteState.EXPIRED


async def test_closed_invitation_is_told_as_nobody_waiting(founder: Founder) -> None:
    async with founder.invite() as listener:
        line = listener.line
    with pytest.raises(JoinError, match="does not answer on port") as caught:
        await join(line, key=new_key(), name="box")
    assert "connection refused" in caught.value.message
    assert "still waiting" in (caught.value.hint or "")


async def test_line_of_another_mesh_is_refused_without_a_try(founder: Founder) -> None:
    async with founder.invite() as listener:
        with pytest.raises(JoinError, match="invites to another mesh"):
            await join(altered(listener.line, mesh="ab" * 32), key=new_key(), name="box")
        await join(listener.line, key=new_key(), name="box")
        assert [type(news) for news in await all_news(listener)] == [Joined]


async def test_cut_off_line_is_told_before_any_connection(founder: Founder) -> None:
    async with founder.invite() as listener:
        with pytest.raises(JoinError, match="cut off"):
            await join(listener.line[:-10], key=new_key(), name="box")


async def test_dead_addresses_in_the_line_cost_neither_tries_nor_much_time(
    founder: Founder,
) -> None:
    async with founder.invite() as listener:
        line = altered(listener.line, hosts=("127.0.0.2", "127.0.0.3", HOST))
        async with asyncio.timeout(WAIT_S):
            await join(line, key=new_key(), name="box")
        assert [type(news) for news in await all_news(listener)] == [Joined]


async def test_failure_to_save_is_told_on_both_sides_and_gives_the_use_back(
    founder: Founder,
) -> None:
    broken = True

    def admit(request: core.JoinRequest) -> core.Admission:
        if broken:
            raise LocalProtocolError("the mesh is full")
        return founder.admit(request)

    async with founder.invite(admit=admit) as listener:
        with pytest.raises(JoinError, match="could not admit us"):
            await join(listener.line, key=new_key(), name="box")
        broken = False
        await join(listener.line, key=new_key(), name="box")
        first, second = await all_news(listener)
    assert isinstance(first, NotAdmitted)
    assert isinstance(first.error, GpuLayerError)
    assert isinstance(second, Joined)


# --- attackers -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def relay(
    target: int, change: Callable[[bytes], bytes] = lambda data: data
) -> AsyncIterator[int]:
    """End TLS towards the joiner and open another one towards the inviter; yield our port."""
    context, _ = _throw_away_certificate()
    outgoing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    outgoing.check_hostname, outgoing.verify_mode = False, ssl.CERT_NONE

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(change(data))
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(HOST, target, ssl=outgoing)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(serve, HOST, 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_relay_in_the_middle_fails_on_both_sides_and_spends_one_try(
    founder: Founder,
) -> None:
    async with founder.invite() as listener:
        async with relay(listener.port) as port:
            with pytest.raises(JoinError, match="relays the connection"):
                await join(altered(listener.line, port=port), key=new_key(), name="box")
        await join(listener.line, key=new_key(), name="honest")
        news = await all_news(listener)
    assert news[0] == TriedWrongly(HOST, 2)
    assert isinstance(news[1], Joined)
    assert founder.names() == {"laptop", "honest"}


async def test_impostor_who_lets_everybody_in_is_refused_by_the_joiner(
    founder: Founder, tmp_path: Path
) -> None:
    """A machine at the right address that skips the proof cannot pass as the inviter."""
    other = Founder(tmp_path / "impostor")
    async with other.invite() as impostor:
        impostor._inviter._mesh = founder.mesh.mesh  # claims the mesh, lacks the secret
        line = altered(impostor.line, mesh=founder.mesh.mesh, secret=b"s" * 16)
        proof_is_enough = core._proves
        core._proves = lambda *_: True  # type: ignore[assignment]
        try:
            with pytest.raises(JoinError, match="could not prove that it made this invitation"):
                await join(line, key=new_key(), name="box")
        finally:
            core._proves = proof_is_enough


async def tls_to(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection(HOST, port, ssl=context)


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff" + bytes(100),
        (4).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1",
        (5).to_bytes(4, "big") + b"\x91\x91\x91\x91\x91",
    ],
    ids=["silence", "http", "4 GB announced", "no msgpack", "wrong shape"],
)
async def test_noise_on_the_join_port_is_dropped_and_costs_nothing(
    founder: Founder, noise: bytes
) -> None:
    async with founder.invite() as listener:
        reader, writer = await tls_to(listener.port)
        writer.write(noise)
        if noise:
            async with asyncio.timeout(WAIT_S):
                assert await reader.read() == b""
        plain_reader, plain_writer = await asyncio.open_connection(HOST, listener.port)
        plain_writer.write(noise or b"hello")
        await join(listener.line, key=new_key(), name="box")
        assert [type(news) for news in await all_news(listener)] == [Joined]
        for w in (writer, plain_writer):
            w.close()
        del plain_reader


async def test_crowd_of_silent_strangers_does_not_keep_a_joiner_out(founder: Founder) -> None:
    async with founder.invite() as listener:
        crowd = [await asyncio.open_connection(HOST, listener.port) for _ in range(60)]
        async with asyncio.timeout(WAIT_S):
            await join(listener.line, key=new_key(), name="box")
        for _, writer in crowd:
            writer.close()
        assert [type(news) for news in await all_news(listener)] == [Joined]


def test_invitation_for_nobody_or_too_many_is_refused(founder: Founder) -> None:
    for uses in (0, core.USES_MAX + 1):
        with pytest.raises(JoinError, match="allowed are 1 to"):
            founder.invite(uses=uses)
