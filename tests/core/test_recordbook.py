"""The newest record of each member, whoever brings it."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gpulayer_mesh.core import certificates, roster, wire
from gpulayer_mesh.core.recordbook import RecordBook
from gpulayer_mesh.core.roster import Roster, RosterBook
from gpulayer_mesh.core.types import Capabilities, CapsRecord, NodeId, Role
from gpulayer_mesh.errors import RemoteProtocolError

CA = Ed25519PrivateKey.generate()
MESH = certificates.id_of(CA)
KEYS = [Ed25519PrivateKey.generate() for _ in range(3)]
A, B, STRANGER = (certificates.id_of(key) for key in KEYS)
CAPS = Capabilities(4, 100, 50, 10, "Linux", "3.11.7", "0.1.0", None)


def caps_book() -> RecordBook[CapsRecord]:
    entries = tuple(
        roster.entry(key.public_key().public_bytes_raw(), name, (Role.WORKER,))
        for key, name in zip(KEYS[:2], "ab", strict=True)
    )
    members = RosterBook(CA.public_key(), roster.seal_roster(CA, Roster(MESH, 1, entries)))
    return RecordBook(members, "caps", CapsRecord)


def signed(node: NodeId, boot: int, version: int, by: NodeId | None = None, **fields: Any) -> bytes:
    author = by or node
    key = KEYS[(A, B, STRANGER).index(author)]
    body = CapsRecord(node, boot, version, CAPS)
    return wire.seal(
        key, **({"kind": "caps", "mesh": MESH, "sender": author, "body": body} | fields)
    )


def test_newer_boot_or_version_wins_in_any_order() -> None:
    caps = caps_book()
    assert (caps.get(A), caps.signed(A), caps.version(A)) == (None, None, (-1, -1))
    newest = signed(A, 2, 1)
    for data in (signed(A, 1, 9), newest, signed(A, 1, 10), signed(A, 2, 0)):
        caps.offer(data)
    assert caps.version(A) == (2, 1)
    assert caps.signed(A) == newest


@pytest.mark.parametrize(
    "data",
    [
        signed(A, 9, 9, by=B),
        signed(A, 9, 9, sender=B),
        signed(STRANGER, 9, 9),
        signed(A, 9, 9, mesh="0" * 64),
        signed(A, 9, 9, kind="job"),
        signed(A, 9, 9, body={"node": A}),
        b"x",
    ],
)
def test_record_that_is_not_its_nodes_word_is_refused(data: bytes) -> None:
    caps = caps_book()
    with pytest.raises(RemoteProtocolError):
        caps.offer(data)
    assert caps.versions == {}


def test_peer_gets_what_it_lacks_as_far_as_it_fits() -> None:
    caps = caps_book()
    caps.offer(signed(A, 1, 1))
    caps.offer(signed(B, 1, 2))
    both = [caps.signed(A), caps.signed(B)]
    assert caps.versions == {A: (1, 1), B: (1, 2)}
    assert caps.newer_than({}, max_bytes=10_000) == both
    assert caps.newer_than({A: (1, 1), B: (1, 1)}, max_bytes=10_000) == both[1:]
    assert caps.newer_than({A: (2, 0), B: (1, 2)}, max_bytes=10_000) == []
    assert len(caps.newer_than({}, max_bytes=len(both[0] or b"") + 10)) == 1
    assert caps.newer_than({}, max_bytes=10) == []


def test_member_that_left_is_forgotten() -> None:
    caps = caps_book()
    caps.offer(signed(A, 1, 1))
    caps.offer(signed(B, 1, 1))
    caps.keep({B})
    assert caps.versions == {B: (1, 1)}
