"""Strict msgpack and signed envelopes: what goes round trip, and what must be refused."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.certificates import id_of
from gpulayer_mesh.core.types import Address, AliveRecord, Incarnation
from gpulayer_mesh.errors import LocalProtocolError, RemoteProtocolError
from hypothesis import given, settings
from hypothesis import strategies as st

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
NODE = id_of(KEY)
MESH = "ab" * 32
RECORD = AliveRecord(NODE, Incarnation(3, 1), "box-1", "lab", (Address("192.0.2.7", 7400),), 9)
SIGNED = wire.seal(KEY, kind="alive", mesh=MESH, sender=NODE, body=RECORD, boot=3, seq=8)

MUTATIONS = 25_000
MUTATIONS_LIMIT_S = 60.0  # takes about 3 s; generous because CI shares its cores


def key_of(node: str) -> Any:
    return KEY.public_key() if node == NODE else None


def opened(data: bytes, **changes: Any) -> wire.Envelope:
    return wire.open_envelope(data, **{"mesh": MESH, "key_of": key_of, **changes})


# --- plain values --------------------------------------------------------------------------------

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(-1e300, 1e300)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(plain)
@settings(max_examples=300, deadline=None)
def test_plain_data_comes_back_equal(value: Any) -> None:
    assert wire.unpack(wire.pack(value)) == value


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("empty", b""),
        ("cut off", wire.pack([1, 2, 3])[:-1]),
        ("trailing byte", wire.pack(1) + b"\0"),
        ("extension type", msgpack.packb(msgpack.ExtType(5, b"x"))),
        ("timestamp", msgpack.packb(msgpack.Timestamp(1, 2))),
        ("duplicate key", b"\x82\xa1a\x01\xa1a\x02"),
        ("number as key", msgpack.packb({1: 2})),
        ("bytes as key", msgpack.packb({b"a": 2})),
        ("NaN", msgpack.packb(float("nan"))),
        ("infinity", msgpack.packb([float("-inf")])),
        ("not UTF-8", b"\xa2\xff\xfe"),
        ("17 levels", b"\x91" * 17 + b"\x01"),
        ("2,000 levels", b"\x91" * 2000 + b"\x01"),
        ("array that claims 4 G items", b"\xdd\xff\xff\xff\xff"),
        ("map that claims 4 G items", b"\xdf\xff\xff\xff\xff"),
        ("text that claims 4 GB", b"\xdb\xff\xff\xff\xff"),
        ("reserved type", b"\xc1"),
    ],
)
def test_illegal_msgpack_is_refused(name: str, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.unpack(data)


def test_sixteen_levels_are_allowed() -> None:
    assert wire.unpack(b"\x91" * 15 + b"\x01")


def test_message_over_its_limit_is_refused_before_decoding() -> None:
    with pytest.raises(RemoteProtocolError, match="101 bytes exceeds the limit of 100"):
        wire.unpack(b"\xc1" * 101, max_bytes=100)


def test_unknown_fields_are_dropped_and_missing_ones_refused() -> None:
    @dataclass(frozen=True)
    class Pair:
        a: int
        b: str = ""

    assert wire.decode_as(Pair, {"a": 1, "c": 2}) == Pair(1)
    with pytest.raises(RemoteProtocolError, match="not a valid Pair"):
        wire.decode_as(Pair, {"b": "x"})
    with pytest.raises(RemoteProtocolError):
        wire.decode_as(Pair, {"a": "1"})


def test_packet_limit_is_ours_to_keep() -> None:
    assert wire.check_packet(bytes(wire.PACKET_MAX))
    with pytest.raises(LocalProtocolError):
        wire.check_packet(bytes(wire.PACKET_MAX + 1))


# --- envelopes -----------------------------------------------------------------------------------


def test_envelope_comes_back_with_what_was_signed() -> None:
    envelope = opened(SIGNED, kind="alive")
    assert (envelope.sender, envelope.boot, envelope.seq) == (NODE, 3, 8)
    assert wire.decode_as(AliveRecord, envelope.body) == RECORD
    assert envelope.signed == SIGNED


def raw_envelope(**changes: Any) -> bytes:
    """An envelope with a good signature over a header that `seal` would not write."""
    fields = {
        "version": 1,
        "kind": "alive",
        "mesh": bytes.fromhex(MESH),
        "sender": bytes.fromhex(NODE),
        "boot": 0,
        "seq": 0,
        "audience": "",
        "body": None,
        **changes,
    }
    raw = msgpack.packb(list(fields.values()))
    return msgpack.packb([raw, KEY.sign(b"gpulayer/env/v1\0" + raw)])


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"kind": 7},
        {"mesh": b"other"},
        {"mesh": "text"},
        {"sender": bytes(32)},
        {"sender": None},
        {"boot": -1},
        {"boot": True},
        {"seq": "1"},
        {"seq": 1.0},
        {"audience": b""},
        {"body": float("nan")},
        {"extra": 1},
    ],
    ids=repr,
)
def test_signed_but_malformed_header_is_refused(changes: dict[str, Any]) -> None:
    assert opened(raw_envelope())
    with pytest.raises(RemoteProtocolError):
        opened(raw_envelope(**changes))


def test_wrong_kind_other_mesh_and_unknown_sender_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="kind"):
        opened(SIGNED, kind="caps")
    with pytest.raises(RemoteProtocolError, match="another mesh"):
        opened(SIGNED, mesh="cd" * 32)
    with pytest.raises(RemoteProtocolError, match="unknown node"):
        opened(SIGNED, key_of=lambda _: None)


def test_signature_by_another_key_is_refused() -> None:
    other = Ed25519PrivateKey.from_private_bytes(bytes(32))
    forged = wire.seal(other, kind="alive", mesh=MESH, sender=NODE, body=RECORD)
    with pytest.raises(RemoteProtocolError, match="bad signature"):
        opened(forged)


def test_signature_of_another_domain_is_refused() -> None:
    raw, _ = msgpack.unpackb(SIGNED)
    with pytest.raises(RemoteProtocolError, match="bad signature"):
        opened(msgpack.packb([raw, KEY.sign(raw)]))


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Flip bits, cut, insert, repeat or swap, one to three times."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed)) if changed else 0
        match rng.randrange(6):
            case 0 if changed:
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[at] = rng.choice([0x00, 0x7F, 0xC1, 0xC7, 0xD6, 0xDD, 0xDF, 0xFF])
            case 2:
                del changed[at:]
            case 3:
                changed[at:at] = rng.randbytes(rng.randint(1, 9))
            case 4:
                changed[at:at] = changed[at : at + 40]
            case _:
                del changed[at : at + rng.randint(1, 8)]
    return bytes(changed)


def test_no_mutation_of_an_envelope_is_accepted(rng: random.Random) -> None:
    started = time.monotonic()
    for _ in range(MUTATIONS):
        data = mutated(SIGNED, rng)
        if data == SIGNED:
            continue
        try:
            envelope = opened(data)
        except RemoteProtocolError:
            continue
        # The outer frame has several encodings of one value; the signed bytes have not.
        assert msgpack.unpackb(data) == msgpack.unpackb(SIGNED), data.hex()
        assert wire.decode_as(AliveRecord, envelope.body) == RECORD
    assert time.monotonic() - started < MUTATIONS_LIMIT_S


def test_mutated_bodies_decode_or_are_refused_and_nothing_else(rng: random.Random) -> None:
    data = wire.pack(RECORD)
    for _ in range(MUTATIONS):
        try:
            record = wire.decode_as(AliveRecord, wire.unpack(mutated(data, rng)))
        except RemoteProtocolError:
            continue
        assert len(record.addresses) <= 8


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_random_bytes_are_no_envelope(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        opened(data)


# --- replay --------------------------------------------------------------------------------------


def test_each_message_is_accepted_once_in_any_order_within_the_window() -> None:
    window = wire.ReplayWindow()
    order = [0, 1, 5, 3, 2, 4, 60]
    assert all(window.accept(1, seq) for seq in order)
    assert not any(window.accept(1, seq) for seq in order)


def test_message_older_than_the_window_is_refused() -> None:
    window = wire.ReplayWindow()
    assert window.accept(1, 100)
    assert window.accept(1, 37)
    assert not window.accept(1, 36)


def test_largest_numbers_on_the_wire_cost_nothing() -> None:
    window = wire.ReplayWindow()
    assert window.accept(1, 2**64 - 1)
    assert not window.accept(1, 0)
    assert not window.accept(1, 2**63)


def test_far_jump_ahead_forgets_the_old_window() -> None:
    window = wire.ReplayWindow()
    assert window.accept(1, 0)
    assert window.accept(1, 10**12)
    assert not window.accept(1, 10**12)
    assert not window.accept(1, 0)


def test_new_boot_starts_afresh_and_the_old_one_is_refused() -> None:
    window = wire.ReplayWindow()
    assert window.accept(1, 500)
    assert window.accept(2, 0)
    assert not window.accept(1, 501)
    assert window.accept(2, 1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 200)), max_size=300))
@settings(max_examples=200, deadline=None)
def test_no_order_of_messages_is_accepted_twice(messages: list[tuple[int, int]]) -> None:
    window = wire.ReplayWindow()
    accepted = [m for m in messages if window.accept(*m)]
    assert len(accepted) == len(set(accepted))
