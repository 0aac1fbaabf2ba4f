"""X.509 around Ed25519 keys: issue and read the certificates of a mesh.

A certificate proves one thing: this key was admitted by this mesh CA. Whether its owner still is a
member, its name and its roles are the roster's to say. So validity times decide nothing: they are
written (48 h back, ten years ahead) because X.509 wants them, and both TLS contexts switch the
check off; a wrong clock can never lock a machine out, and removal is a roster epoch.

Layout checked by OpenSSL under VERIFY_X509_STRICT: SKI, AKI, basic constraints, key usage.
Does not know files or sockets. `cryptography.x509` is imported when first used (25 ms).
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gpulayer_mesh.core.types import MeshId, NodeId
from gpulayer_mesh.errors import RemoteProtocolError

if TYPE_CHECKING:
    from cryptography import x509

ALPN = "gpulayer/1"  # protocol name in TLS; a peer that speaks another one is told so
CERTIFICATE_MAX = 4096  # bytes of DER; ours take about 500

# RFC 8410: the DER SubjectPublicKeyInfo of every Ed25519 key is this and the 32 raw bytes.
_SPKI_PREFIX = bytes.fromhex("302a300506032b6570032100")
_BACKDATED = timedelta(hours=48)
_VALID = timedelta(days=3650)


def node_id(public_key: bytes) -> NodeId:
    """Name a raw Ed25519 public key: SHA-256 of its SubjectPublicKeyInfo; also gives mesh ids."""
    return hashlib.sha256(_SPKI_PREFIX + public_key).hexdigest()


def id_of(key: Ed25519PrivateKey | Ed25519PublicKey) -> NodeId:
    """Name a key object, private or public."""
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return node_id(public.public_bytes_raw())


def issue_ca(ca_key: Ed25519PrivateKey, *, wall: datetime, serial: int) -> bytes:
    """Return the self-signed CA certificate of a new mesh, DER."""
    from cryptography import x509

    mesh = id_of(ca_key)
    name = _name(f"gpulayer mesh {mesh[:16]}")
    builder = _builder(name, name, ca_key.public_key(), ca_key, wall, serial)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _sign(builder.add_extension(_usage(ca=True), critical=True), ca_key)


def issue_node(
    ca_key: Ed25519PrivateKey, public_key: bytes, *, wall: datetime, serial: int
) -> bytes:
    """Return the certificate of one node, signed by the mesh CA, DER."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    mesh, node = id_of(ca_key), node_id(public_key)
    builder = _builder(
        _name(f"gpulayer node {node[:16]}"),
        _name(f"gpulayer mesh {mesh[:16]}"),
        Ed25519PublicKey.from_public_bytes(public_key),
        ca_key,
        wall,
        serial,
    )
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    uri = x509.UniformResourceIdentifier(_uri(mesh, node))
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
    )
    return _sign(builder, ca_key)


def node_of(der: bytes | None, mesh: MeshId) -> NodeId:
    """Return who a certificate belongs to: the hash of its key, which its SAN must repeat.

    The chain to the CA is TLS's work (`check_issued` where there is no TLS).

    Raises:
        RemoteProtocolError: no certificate, not Ed25519, or its SAN names another node or mesh.
    """
    from cryptography import x509

    certificate = _load(der)
    node = id_of(_public_key(certificate))
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        ValueError,
    ) as e:
        raise RemoteProtocolError("certificate names no node") from e
    if uris != [_uri(mesh, node)]:
        raise RemoteProtocolError(f"certificate of key {node[:8]!r} names {uris!r}")
    return node


def key_of(der: bytes | None) -> Ed25519PublicKey:
    """Return the key inside a certificate, whoever signed it.

    Raises:
        RemoteProtocolError: no certificate, or not Ed25519.
    """
    return _public_key(_load(der))


def check_issued(der: bytes, ca_der: bytes) -> None:
    """Check that the key of `ca_der` signed `der`.

    Raises:
        RemoteProtocolError: it did not.
    """
    try:
        _load(der).verify_directly_issued_by(_load(ca_der))
    except (InvalidSignature, ValueError, TypeError) as e:
        raise RemoteProtocolError("certificate is not signed by the CA sent with it") from e


def _load(der: bytes | None) -> x509.Certificate:
    from cryptography import x509

    if der is None or len(der) > CERTIFICATE_MAX:
        raise RemoteProtocolError("no certificate, or one over 4 KiB")
    try:
        return x509.load_der_x509_certificate(der)
    except (ValueError, x509.InvalidVersion) as e:
        raise RemoteProtocolError("not a certificate") from e


def _public_key(certificate: x509.Certificate) -> Ed25519PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as e:
        raise RemoteProtocolError("unreadable key in certificate") from e
    if not isinstance(key, Ed25519PublicKey):
        raise RemoteProtocolError("certificate without an Ed25519 key")
    return key


def _uri(mesh: MeshId, node: NodeId) -> str:
    return f"gpulayer://{mesh}/{node}"


def _name(text: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])


def _usage(*, ca: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: Ed25519PublicKey,
    ca_key: Ed25519PrivateKey,
    wall: datetime,
    serial: int,
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=public_key)
        .serial_number(serial)
        .not_valid_before(wall - _BACKDATED)
        .not_valid_after(wall + _VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )


def _sign(builder: x509.CertificateBuilder, ca_key: Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return builder.sign(ca_key, None).public_bytes(Encoding.DER)
