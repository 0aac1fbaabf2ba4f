"""Every message there and back; what is forged, mutated, replayed or too large is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from gpulayer_mesh.core import gossip_codec, wire
from gpulayer_mesh.core.gossip_codec import CACHE_BYTES, Codec
from gpulayer_mesh.core.rumour import (
    GOSSIP_BYTES,
    RUMOUR_MIN_BYTES,
    Ack,
    Alive,
    Dead,
    Gossip,
    Left,
    Message,
    Nack,
    Ping,
    PingReq,
    Rumour,
    RumourQueue,
    Suspect,
    message_bytes,
    rumour_bytes,
)
from gpulayer_mesh.core.types import Address, AliveRecord, Incarnation, Load, NodeId
from gpulayer_mesh.errors import LocalProtocolError, RemoteProtocolError
from hypothesis import given, settings
from hypothesis import strategies as st

MESH = "ab" * 32
A, B, C = "01" * 32, "02" * 32, "03" * 32
KEYS = {node: Ed25519PrivateKey.from_private_bytes(bytes.fromhex(node)) for node in (A, B, C)}
PUBLIC = {node: key.public_key() for node, key in KEYS.items()}
HUGE = 2**62 - 1  # the largest integer that msgspec's limits let through


class Counted:
    """A `key_of` that counts how often a key was asked for."""

    def __init__(self) -> None:
        self.known = dict(PUBLIC)
        self.asked = 0

    def __call__(self, node: NodeId) -> Ed25519PublicKey | None:
        self.asked += 1
        return self.known.get(node)


def codec(node: NodeId, *, boot: int = 3, keys: Counted | None = None, mesh: str = MESH) -> Codec:
    return Codec(mesh=mesh, node=node, boot=boot, key=KEYS[node], key_of=keys or Counted())


def record(node: NodeId, boot: int = 3, counter: int = 0, addresses: int = 2) -> AliveRecord:
    hosts = tuple(Address(f"192.168.1.{i}", 7946) for i in range(addresses))
    return AliveRecord(node, Incarnation(boot, counter), "box-1", "lab", hosts, 4)


def largest_record() -> AliveRecord:
    host = "fe80:1234:5678:9abc:def0:1234:5678:9abc%" + "x" * 24
    assert len(host) == 64
    addresses = tuple(Address(host[:-1] + str(i), 65535) for i in range(8))
    incarnation = Incarnation(HUGE, HUGE)
    return AliveRecord(A, incarnation, "n" * 63, "z" * 63, addresses, HUGE)


OWN: list[Rumour] = [
    Alive(record(A)),
    Suspect(B, Incarnation(1, 2), A),
    Dead(B, Incarnation(HUGE, HUGE), A),
    Left(A, Incarnation(3, 7)),
]


def unsigned(rumour: Rumour) -> Rumour:
    match rumour:
        case Alive():
            return Alive(rumour.record)
        case Suspect():
            return Suspect(rumour.node, rumour.incarnation, rumour.by)
        case Dead():
            return Dead(rumour.node, rumour.incarnation, rumour.by)
        case Left():
            return Left(rumour.node, rumour.incarnation)


@pytest.mark.parametrize(
    "message",
    [
        Ping(7, B, tuple(OWN[:2])),
        PingReq(HUGE, C),
        Ack(0, Load(12.5, 1000, 2, 1), (OWN[2],)),
        Nack(5, (OWN[3],)),
        Gossip(tuple(OWN)),
    ],
)
def test_message_comes_back_as_it_was(message: Message) -> None:
    sender, got = codec(B).decode(codec(A).encode(message, 1))
    assert sender == A
    assert type(got) is type(message)
    assert [unsigned(r) for r in got.gossip] == list(message.gossip)
    for field in ("seq", "to", "target", "load"):
        assert getattr(got, field, None) == getattr(message, field, None)


nodes = st.sampled_from([A, B, C])
numbers = st.integers(0, HUGE)
incarnations = st.builds(Incarnation, st.just(3), numbers)
rumours = st.one_of(
    st.builds(
        Alive,
        st.builds(
            AliveRecord,
            st.just(A),
            incarnations,
            st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z"),
            st.text("abc-é", max_size=20),
            st.lists(
                st.builds(Address, st.text("0123456789.:af%", max_size=64), st.integers(1, 65535)),
                max_size=3,
            ).map(tuple),
            numbers,
        ),
    ),
    st.builds(Suspect, nodes, st.builds(Incarnation, numbers, numbers), st.just(A)),
    st.builds(Dead, nodes, st.builds(Incarnation, numbers, numbers), st.just(A)),
    st.builds(Left, st.just(A), incarnations),
)


@settings(max_examples=100, deadline=None)
@given(rumours)
def test_any_rumour_comes_back_as_it_was(rumour: Rumour) -> None:
    signed = codec(A).sign(rumour)
    opened = codec(B).open(signed)
    assert unsigned(opened) == rumour
    assert opened.signed == signed
    assert RUMOUR_MIN_BYTES <= len(signed) + 3 <= rumour_bytes(rumour)


def test_relayed_rumour_is_passed_on_byte_for_byte() -> None:
    first = codec(A).sign(OWN[0])
    relay = codec(B)
    packet = relay.encode(Gossip((relay.open(first),)), 1)
    sender, got = codec(C).decode(packet)
    assert sender == B
    assert got.gossip[0].signed == first


def test_record_with_eight_longest_addresses_fits_a_packet() -> None:
    alive = Alive(largest_record())
    assert rumour_bytes(alive) <= GOSSIP_BYTES
    assert len(codec(A, boot=HUGE).sign(alive)) + 3 <= rumour_bytes(alive)
    packet = codec(A, boot=HUGE).encode(Ping(HUGE, B, (alive,)), HUGE)
    assert len(packet) <= wire.PACKET_MAX


@pytest.mark.parametrize(
    "empty",
    [
        Ping(HUGE, B),
        PingReq(HUGE, B),
        Ack(HUGE, Load(99.9, HUGE, HUGE, HUGE)),
        Gossip(),
        Nack(HUGE),
    ],
)
def test_whatever_the_queue_hands_out_fits_a_packet(empty: Message) -> None:
    """The core counts with estimates; with own and received rumours the packet must still fit."""
    sender = codec(A, boot=HUGE)
    room = wire.PACKET_MAX - len(sender.encode(empty, HUGE))
    assert room >= GOSSIP_BYTES
    rng = random.Random(1)
    for _ in range(200):
        queue = RumourQueue()
        for i in range(12):
            subject = f"{i:064x}"
            accusation = rng.choice([Suspect, Dead])(subject, Incarnation(HUGE, HUGE), A)
            queue.put(accusation)
        queue.put(Alive(record(A, HUGE, HUGE, rng.randrange(9))))
        taken = queue.take(GOSSIP_BYTES, 4)
        assert len(taken) <= gossip_codec.RUMOURS_PER_PACKET
        assert len(sender.encode(Gossip(taken), HUGE)) <= wire.PACKET_MAX


def test_size_estimate_is_an_upper_bound_close_to_the_truth() -> None:
    for message in (Ping(2**31, B), Ack(2**31, Load()), Gossip(tuple(OWN[:2]))):
        spare = message_bytes(message) - len(codec(A).encode(message, 9))
        assert 0 <= spare <= 40 + 40 * len(message.gossip)


def test_packet_that_cannot_fit_is_our_own_error() -> None:
    with pytest.raises(LocalProtocolError):
        codec(A).encode(Gossip((Alive(largest_record()), *OWN)), 1)


def test_replayed_packet_is_refused_and_reordered_ones_are_not() -> None:
    sender, receiver = codec(A), codec(B)
    packets = [sender.encode(Nack(i), i) for i in range(1, 6)]
    for packet in (packets[0], packets[3], packets[1], packets[4]):
        receiver.decode(packet)
    for packet in (packets[0], packets[3], packets[4]):
        with pytest.raises(RemoteProtocolError, match="replayed"):
            receiver.decode(packet)
    receiver.decode(packets[2])
    receiver.decode(codec(A, boot=4).encode(Nack(1), 1))
    with pytest.raises(RemoteProtocolError, match="replayed"):
        receiver.decode(sender.encode(Nack(6), 6))  # an older life


def test_packet_of_another_mesh_or_stranger_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="another mesh"):
        codec(B).decode(codec(A, mesh="cd" * 32).encode(Nack(1), 1))
    keys = Counted()
    del keys.known[A]
    with pytest.raises(RemoteProtocolError, match="unknown node"):
        codec(B, keys=keys).decode(codec(A).encode(Nack(1), 1))


def test_rumour_in_the_name_of_another_is_refused() -> None:
    """A's key under B's name: only the subject speaks of itself, only the accuser accuses."""
    forger = Codec(mesh=MESH, node=B, boot=3, key=KEYS[A], key_of=Counted())
    for rumour in (Alive(record(B)), Suspect(C, Incarnation(1, 0), B), Left(B, Incarnation(3, 0))):
        with pytest.raises(RemoteProtocolError, match="signature"):
            codec(C).open(forger.sign(rumour))
        with pytest.raises(RemoteProtocolError, match="signature"):
            codec(C).decode(codec(A).encode(Gossip((codec_signed(forger, rumour),)), 1))


def codec_signed(author: Codec, rumour: Rumour) -> Rumour:
    signed = author.sign(rumour)
    match rumour:
        case Alive():
            return Alive(rumour.record, signed)
        case Suspect():
            return Suspect(rumour.node, rumour.incarnation, rumour.by, signed)
        case Dead():
            return Dead(rumour.node, rumour.incarnation, rumour.by, signed)
        case Left():
            return Left(rumour.node, rumour.incarnation, signed)


def test_rumour_of_an_unknown_author_is_left_out_and_the_rest_used() -> None:
    keys = Counted()
    del keys.known[C]
    of_c = codec_signed(codec(C), Alive(record(C)))
    packet = codec(A).encode(Ping(1, B, (of_c, OWN[0])), 1)
    _, got = codec(B, keys=keys).decode(packet)
    assert [unsigned(r) for r in got.gossip] == [OWN[0]]


def test_remembered_rumour_of_a_removed_author_is_left_out() -> None:
    keys = Counted()
    receiver = codec(B, keys=keys)
    of_c = codec_signed(codec(C), Alive(record(C)))
    assert receiver.decode(codec(A).encode(Gossip((of_c,)), 1))[1].gossip
    del keys.known[C]
    assert not receiver.decode(codec(A).encode(Gossip((of_c,)), 2))[1].gossip
    with pytest.raises(RemoteProtocolError):
        receiver.open(of_c.signed)


def test_repeated_rumour_is_verified_and_parsed_once() -> None:
    receiver = codec(B)
    signed = codec(A).sign(OWN[0])
    assert receiver.open(signed) is receiver.open(signed)


def test_own_rumour_is_signed_once() -> None:
    sender = codec(A)
    assert sender.sign(OWN[0]) is sender.sign(Alive(record(A)))
    assert sender.sign(OWN[1]) != sender.sign(Suspect(B, Incarnation(1, 3), A))


def test_caches_stay_within_their_bytes() -> None:
    cache: gossip_codec._Lru[int] = gossip_codec._Lru(1000)
    for i in range(100):
        cache.put(b"%d" % i, i, 100)
        assert cache.get(b"0") == (0 if i < 100 else None)  # its use keeps it
    assert [i for i in range(100) if cache.get(b"%d" % i) is not None] == [0, *range(91, 100)]
    assert CACHE_BYTES <= 1024 * 1024


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        ["ping"],
        ["ping", 1, b"short", []],
        ["ping", -1, bytes(32), []],
        ["ping", True, bytes(32), []],
        ["ping", 2**63, bytes(32), []],
        ["ping", 1, "01" * 32, []],
        ["ping", 1, bytes(32), None],
        ["ping", 1, bytes(32), [[]]],
        ["ping", 1, bytes(32), [b"no envelope"]],
        ["ping", 1, bytes(32), [], []],
        ["ack", 1, [0.0, 0, 0], []],
        ["ack", 1, [-1.0, 0, 0, 0], []],
        ["ack", 1, ["0", 0, 0, 0], []],
        ["ack", 1, {"cpu_percent": 0.0}, []],
        ["gossip", [b""] * (gossip_codec.RUMOURS_PER_PACKET + 1)],
        ["shutdown", 1, []],
        {"ping": 1},
    ],
)
def test_signed_packet_of_wrong_form_is_refused(body: Any) -> None:
    packet = wire.seal(KEYS[A], kind="packet", mesh=MESH, sender=A, boot=1, seq=1, body=body)
    with pytest.raises(RemoteProtocolError):
        codec(B).decode(packet)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("alive", []),
        ("alive", ["box", "", [], 1, 2]),
        ("alive", ["not a name!", "", [], 1]),
        ("alive", ["box", "z" * 64, [], 1]),
        ("alive", ["box", "", [["h" * 65, 1]], 1]),
        ("alive", ["box", "", [["10.0.0.1", 0]], 1]),
        ("alive", ["box", "", [["10.0.0.1"]], 1]),
        ("alive", ["box", "", [["10.0.0.1", 1]] * 9, 1]),
        ("alive", ["box", "", [], -1]),
        ("suspect", [bytes(31), 1, 0]),
        ("suspect", [bytes(32), -1, 0]),
        ("dead", [bytes(32), 1]),
        ("dead", [bytes(32), "1", 0]),
        ("left", [1]),
        ("packet", ["gossip", []]),
        ("roster", []),
    ],
)
def test_signed_rumour_of_wrong_form_is_refused(kind: str, body: Any) -> None:
    signed = wire.seal(KEYS[A], kind=kind, mesh=MESH, sender=A, boot=1, seq=1, body=body)
    with pytest.raises(RemoteProtocolError):
        codec(B).open(signed)


def test_rumour_is_no_packet() -> None:
    with pytest.raises(RemoteProtocolError):
        codec(B).decode(codec(A).sign(OWN[0]))


def test_mutated_packets_and_rumours_are_all_refused(seed: int) -> None:
    rng = random.Random(seed)
    receiver = codec(B)
    sender = codec(A)
    valid = [
        sender.encode(Ping(7, B, tuple(OWN)), 1),
        sender.encode(Ack(7, Load(3.5, 100, 1, 0), (OWN[1],)), 2),
        sender.encode(PingReq(7, C), 3),
        *(sender.sign(rumour) for rumour in OWN),
    ]
    for round_ in range(6000):
        data = bytearray(valid[round_ % len(valid)])
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            how = rng.random()
            at = rng.randrange(len(data))
            if how < 0.6:
                data[at] ^= 1 << rng.randrange(8)
            elif how < 0.75:
                del data[at:]
                data = data or bytearray(b"\x00")
            elif how < 0.9:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                data[at : at + 8] = rng.randbytes(8)
        if bytes(data) in valid:
            continue
        with pytest.raises(RemoteProtocolError):
            receiver.decode(bytes(data))
        with pytest.raises(RemoteProtocolError):
            receiver.open(bytes(data))


def test_mutations_inside_a_signed_packet_are_refused_or_harmless(seed: int) -> None:
    """A member signs what it likes: its packet is well signed, the rumour within is mutated."""
    rng = random.Random(seed)
    receiver = codec(B)
    genuine = codec(C).sign(Alive(record(C)))
    for seq in range(1, 1500):
        data = bytearray(genuine)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        packet = wire.seal(
            KEYS[A], kind="packet", mesh=MESH, sender=A, seq=seq, body=["gossip", [bytes(data)]]
        )
        try:
            _, got = receiver.decode(packet)
        except RemoteProtocolError:
            continue
        assert got.gossip == ()  # the author's id was hit: nobody we know


def test_random_bytes_are_refused(seed: int) -> None:
    rng = random.Random(seed)
    receiver = codec(B)
    for _ in range(5000):
        with pytest.raises(RemoteProtocolError):
            receiver.decode(rng.randbytes(rng.randrange(1400)))
