"""Certificates: what ours say, and that damaged ones are refused by the one error for it."""

from __future__ import annotations

import random
import warnings
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gpulayer_mesh.core import certificates
from gpulayer_mesh.errors import RemoteProtocolError

WALL = datetime(2024, 1, 10, tzinfo=UTC)
CA = Ed25519PrivateKey.from_private_bytes(b"c" * 32)
KEY = Ed25519PrivateKey.from_private_bytes(b"n" * 32)
MESH, NODE = certificates.id_of(CA), certificates.id_of(KEY)
CA_DER = certificates.issue_ca(CA, wall=WALL, serial=1)
DER = certificates.issue_node(CA, KEY.public_key().public_bytes_raw(), wall=WALL, serial=2)


def test_node_certificate_says_who_and_where_and_nothing_else() -> None:
    assert certificates.node_of(DER, MESH) == NODE
    assert certificates.id_of(certificates.key_of(DER)) == NODE
    certificates.check_issued(DER, CA_DER)
    found = x509.load_der_x509_certificate(DER)
    assert found.not_valid_before_utc == datetime(2024, 1, 8, tzinfo=UTC)
    assert len(DER) < certificates.CERTIFICATE_MAX


def test_ca_may_sign_leaves_only() -> None:
    found = x509.load_der_x509_certificate(CA_DER)
    basic = found.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (basic.ca, basic.path_length) == (True, 0)
    with pytest.raises(RemoteProtocolError, match="names no node"):
        certificates.node_of(CA_DER, MESH)


def test_certificate_of_another_mesh_or_signer_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="names"):
        certificates.node_of(DER, NODE)
    other = certificates.issue_ca(KEY, wall=WALL, serial=3)
    with pytest.raises(RemoteProtocolError, match="not signed"):
        certificates.check_issued(DER, other)


@pytest.mark.parametrize("der", [None, b"", b"nonsense", bytes(5000)])
def test_what_is_no_certificate_is_refused(der: bytes | None) -> None:
    with pytest.raises(RemoteProtocolError):
        certificates.node_of(der, MESH)


def test_name_of_a_kind_that_nobody_uses_is_refused() -> None:
    uri = certificates._uri(MESH, NODE).encode()
    at = DER.index(uri) - 3  # its tag: URI, then a length of two bytes
    assert DER[at] == 0x86
    for tag in (0xA3, 0xA5):  # x400Address, ediPartyName
        der = DER[:at] + bytes([tag]) + DER[at + 1 :]
        with pytest.raises(RemoteProtocolError, match="names no node"):
            certificates.node_of(der, MESH)


def test_damaged_certificates_are_refused_and_never_pass_as_ours(rng: random.Random) -> None:
    for _ in range(3000):
        der = bytearray(DER)
        for _ in range(rng.randint(1, 3)):
            der[rng.randrange(len(der))] = rng.randrange(256)
        if bytes(der) == DER:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cryptography's, about serial numbers below 1
            try:
                certificates.node_of(bytes(der), MESH)
            except RemoteProtocolError:
                continue
            # The key and the name survived; the signature cannot have.
            with pytest.raises(RemoteProtocolError):
                certificates.check_issued(bytes(der), CA_DER)
