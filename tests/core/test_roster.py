"""The roster: signed by the CA, epochs only rise, every entry's id is its key's hash."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.certificates import id_of, node_id
from gpulayer_mesh.core.roster import (
    MEMBERS_MAX,
    ROSTER_MAX,
    Roster,
    RosterBook,
    RosterEntry,
    entry,
    open_roster,
    seal_roster,
    with_member,
    without_member,
)
from gpulayer_mesh.core.types import Role
from gpulayer_mesh.errors import LocalProtocolError, RemoteProtocolError

CA = Ed25519PrivateKey.from_private_bytes(b"c" * 32)
MESH = id_of(CA)
ALL = tuple(Role)


def key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))


def member(number: int, name: str = "", roles: tuple[Role, ...] = (Role.WORKER,)) -> RosterEntry:
    return entry(key(number).public_key().public_bytes_raw(), name or f"box-{number}", roles)


FIRST = Roster(MESH, 1, (member(1, "laptop", ALL),))


def book(roster: Roster = FIRST) -> RosterBook:
    return RosterBook(CA.public_key(), seal_roster(CA, roster))


def test_signed_roster_comes_back_equal() -> None:
    roster = with_member(FIRST, member(2))
    assert roster.epoch == 2
    assert open_roster(seal_roster(CA, roster), CA.public_key()) == roster


def test_node_id_is_the_hash_of_the_der_public_key() -> None:
    from hashlib import sha256

    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    der = CA.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert MESH == sha256(der).hexdigest() == node_id(CA.public_key().public_bytes_raw())


def test_full_mesh_with_long_names_fits_the_limit_and_one_more_does_not() -> None:
    entries = tuple(
        RosterEntry(node_id(k), k, f"{i:063d}", ALL)
        for i in range(MEMBERS_MAX)
        for k in [i.to_bytes(32, "big")]
    )
    full = Roster(MESH, 2**62, entries)
    assert len(seal_roster(CA, full)) < ROSTER_MAX
    with pytest.raises(LocalProtocolError, match="full"):
        with_member(full, member(1))


def test_taken_name_gets_a_number_and_the_same_node_keeps_its_own() -> None:
    roster = with_member(with_member(FIRST, member(2, "box")), member(3, "BOX"))
    assert {e.name for e in roster.entries} == {"laptop", "box", "BOX-2"}
    assert len(with_member(roster, member(3, "box-9")).entries) == 3
    long = "x" * 63
    names = [
        e.name for e in with_member(with_member(FIRST, member(4, long)), member(5, long)).entries
    ]
    assert "x" * 61 + "-2" in names


def test_rejoining_keeps_one_entry_and_adds_roles() -> None:
    roster = with_member(FIRST, member(1, "laptop", (Role.WORKER,)))
    assert roster.entries == FIRST.entries
    launcher = with_member(with_member(FIRST, member(2)), member(2, "box-2", (Role.LAUNCHER,)))
    assert launcher.entries[0].roles == (Role.WORKER, Role.LAUNCHER)


def test_removal_raises_the_epoch_and_a_stranger_cannot_be_removed() -> None:
    roster = without_member(with_member(FIRST, member(2)), member(2).node)
    assert (roster.epoch, roster.entries) == (3, FIRST.entries)
    with pytest.raises(LocalProtocolError, match="no member"):
        without_member(roster, member(2).node)


def broken(**changes: object) -> Roster:
    return replace(FIRST, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "roster",
    [
        broken(epoch=0),
        broken(entries=(*FIRST.entries, *FIRST.entries)),
        broken(entries=(*FIRST.entries, member(2, "LAPTOP"))),
        broken(entries=(replace(member(2), roles=(Role.ADMIN, Role.WORKER)),)),
        broken(entries=(replace(member(2), node=member(3).node),)),
        broken(entries=tuple(member(i) for i in range(1, MEMBERS_MAX + 2))),
    ],
    ids=["epoch 0", "node twice", "name twice", "role order", "id of another key", "too many"],
)
def test_roster_that_breaks_a_rule_is_neither_sealed_nor_opened(roster: Roster) -> None:
    with pytest.raises(LocalProtocolError):
        seal_roster(CA, roster)
    body = {"members": [[e.public_key, e.name, list(e.roles)] for e in roster.entries]}
    signed = wire.seal(CA, kind="roster", mesh=MESH, sender=MESH, seq=roster.epoch, body=body)
    if roster.entries[0].node == node_id(roster.entries[0].public_key):  # ids do not travel
        with pytest.raises(RemoteProtocolError):
            open_roster(signed, CA.public_key())


def test_roster_of_another_key_or_mesh_is_refused() -> None:
    other = key(99)
    forged = wire.seal(other, kind="roster", mesh=MESH, sender=MESH, seq=9, body={"members": []})
    with pytest.raises(RemoteProtocolError, match="bad signature"):
        open_roster(forged, CA.public_key())
    with pytest.raises(RemoteProtocolError, match="another mesh"):
        open_roster(seal_roster(other, replace(FIRST, mesh=id_of(other))), CA.public_key())
    with pytest.raises(LocalProtocolError):
        seal_roster(other, FIRST)


def test_member_cannot_sign_a_roster() -> None:
    us = member(1).node
    forged = wire.seal(key(1), kind="roster", mesh=MESH, sender=us, seq=9, body={"members": []})
    with pytest.raises(RemoteProtocolError, match="unknown node"):
        book().offer(forged)


def test_other_envelope_of_the_ca_is_no_roster() -> None:
    signed = wire.seal(CA, kind="job", mesh=MESH, sender=MESH, seq=9, body={"members": []})
    with pytest.raises(RemoteProtocolError, match="kind"):
        book().offer(signed)


def test_book_takes_newer_rosters_and_ignores_older_ones() -> None:
    second = with_member(FIRST, member(2))
    third = without_member(second, member(2).node)
    held = book()
    assert held.offer(seal_roster(CA, third))
    assert not held.offer(seal_roster(CA, second))
    assert not held.offer(seal_roster(CA, third))
    assert held.epoch == 3
    assert member(2).node not in held
    assert held.key_of(member(2).node) is None
    assert held.roles(member(2).node) == ()
    assert held.signed == seal_roster(CA, third)


def test_refused_roster_changes_nothing() -> None:
    held = book()
    with pytest.raises(RemoteProtocolError):
        held.offer(b"junk")
    assert held.roster == FIRST


def test_book_gives_keys_roles_and_members_by_name_or_id() -> None:
    held = book(with_member(FIRST, member(2)))
    node = member(2).node
    found = held.key_of(node)
    assert found is held.key_of(node)
    assert found is not None
    assert id_of(found) == node
    assert held.roles(member(1).node) == ALL
    assert held.find("BOX-2") == held.find(node[:6]) == held.members[node]
    assert held.find(node[:5]) is None
    assert held.find("") is None


def test_no_mutation_of_a_roster_is_accepted(rng: random.Random) -> None:
    signed = seal_roster(CA, with_member(FIRST, member(2)))
    for _ in range(3000):
        data = bytearray(signed)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(RemoteProtocolError):
            open_roster(bytes(data), CA.public_key())
