"""Who we are, on disk: the node key, the mesh's certificates, the roster, remembered peers.

    identity.key              Ed25519, PEM
    boot                      boot epoch, decimal text
    mesh/ca.pem, node.pem     certificates
    mesh/ca.key               on the founding machine only
    mesh/roster               newest signed roster, as received; written last: with it, a member
    mesh/peers.msgpack        {node id: [[host, port], ...]}, best first
    state.lock                one writer at a time: the agent and the commands share these files

Private keys are 0600 in a 0700 directory, opened with O_NOFOLLOW and refused when group or others
can read them, as ssh does. Every file is written beside its place (O_EXCL), fsynced and renamed.
The roster file is the high-water mark: `save_roster` never goes back.

Does not know sockets or who is reachable.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import ssl
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from gpulayer_mesh.core import certificates, roster, wire
from gpulayer_mesh.core.joining import PEERS_MAX, Admission, JoinRequest
from gpulayer_mesh.core.roster import Roster, RosterBook
from gpulayer_mesh.core.types import Address, Addresses, MeshId, NodeId, Role
from gpulayer_mesh.errors import ConfigError, NotAllowedError, RemoteProtocolError
from gpulayer_mesh.files import replace_file

_FILE_MAX = 8 * 1024 * 1024  # bytes; the largest file here is peers.msgpack, 1,024 x 8 addresses
# Not exported by ssl: X509_V_FLAG_NO_CHECK_TIME of openssl/x509_vfy.h. See core/certificates.py.
_NO_CHECK_TIME = 0x200000


@dataclass(frozen=True, slots=True)
class Identity:
    """This machine's key."""

    home: Path
    node: NodeId
    key: Ed25519PrivateKey


@dataclass(frozen=True, slots=True)
class MeshFiles:
    """The mesh this machine belongs to."""

    mesh: MeshId
    book: RosterBook
    ca_certificate: bytes  # DER


def load_or_create(home: Path) -> Identity:
    """Return the key of this machine, made at the first call.

    Raises:
        ConfigError: the key or its directory is readable or writable by others, or damaged.
    """
    _private_dir(home)
    path = home / "identity.key"
    if not path.exists():
        with _locked(home):
            if not path.exists():
                _create_key(path)
    key = _load_key(path)
    return Identity(home, certificates.id_of(key), key)


def next_boot(home: Path) -> int:
    """Raise and return the boot epoch: 1 at the first start, +1 at each later one.

    Where a full disk takes no new file the number is written over the old one, for without an agent
    the ranks that run here end.

    Raises:
        ConfigError: the counter is damaged; starting at a lower one would look like a replay.
        OSError: the disk refuses that as well.
    """
    path = home / "boot"
    with _locked(home):
        text = _read(path).decode("ascii", "replace").strip() if path.exists() else "0"
        if not text.isdecimal() or len(text) > 18:
            raise ConfigError(
                f"boot counter {str(path)!r} is damaged: {text[:20]!r}",
                hint="write a number larger than any this machine used, e.g. 1000000",
            )
        boot = int(text) + 1
        data = f"{boot}\n".encode()
        try:
            _save(path, data)
        except OSError:
            _overwrite(path, data)
    return boot


# --- the mesh ------------------------------------------------------------------------------------


def create_mesh(identity: Identity, name: str) -> MeshFiles:
    """Found a mesh: CA key, our certificate, and a roster with us in every role.

    Raises:
        ConfigError: this machine belongs to a mesh already.
    """
    folder = identity.home / "mesh"
    _private_dir(folder)
    with _locked(identity.home):
        if (folder / "roster").exists():
            raise ConfigError(
                "this machine already belongs to a mesh",
                hint=_leaving(folder),
            )
        ca_key = _create_key(folder / "ca.key")
        public = identity.key.public_key().public_bytes_raw()
        us = roster.entry(public, name, tuple(Role))
        signed = roster.seal_roster(ca_key, Roster(certificates.id_of(ca_key), 1, (us,)))
        node_der = certificates.issue_node(ca_key, public, wall=_wall(), serial=_serial())
        ca_der = certificates.issue_ca(ca_key, wall=_wall(), serial=_serial())
        return _keep(identity, Admission(node_der, ca_der, signed, {}))


def save_membership(identity: Identity, admission: Admission) -> MeshFiles:
    """Keep what joining brought.

    Raises:
        ConfigError: it does not fit our key.
    """
    _private_dir(identity.home / "mesh")
    with _locked(identity.home):
        return _keep(identity, admission)


def _keep(identity: Identity, admission: Admission) -> MeshFiles:
    folder = identity.home / "mesh"
    _save(folder / "ca.pem", _pem(admission.ca_certificate))
    _save(folder / "node.pem", _pem(admission.node_certificate))
    save_peers(identity.home, {**admission.peers, **load_peers(identity.home)})
    _save(folder / "roster", admission.roster)
    return _loaded(identity)


def load_mesh(identity: Identity) -> MeshFiles | None:
    """Return the mesh this machine belongs to, None if it never joined one.

    Raises:
        ConfigError: the files are damaged or do not fit our key.
    """
    return _loaded(identity) if (identity.home / "mesh" / "roster").exists() else None


def save_roster(home: Path, book: RosterBook) -> None:
    """Keep the book's roster if it is newer than the one on disk.

    Raises:
        OSError: the disk refuses.
    """
    path = home / "mesh" / "roster"
    with _locked(home):
        if book.examine(_read(path)).epoch < book.epoch:
            _save(path, book.signed)


def admit(
    identity: Identity,
    request: JoinRequest,
    roles: tuple[Role, ...],
    peers: Mapping[NodeId, Addresses],
) -> Admission:
    """Sign a joiner's certificate and the roster that lists it, and keep that roster.

    Raises:
        NotAllowedError: the CA key is not on this machine.
        LocalProtocolError: the mesh is full.
    """
    ca_key = load_ca_key(identity.home)
    with _locked(identity.home):
        files = _loaded(identity)
        signed, old = files.book.signed, files.book.roster
        new = roster.with_member(old, roster.entry(request.public_key, request.name, roles))
        if set(new.entries) != set(old.entries):
            signed = roster.seal_roster(ca_key, new)
        public = request.public_key
        der = certificates.issue_node(ca_key, public, wall=_wall(), serial=_serial())
        if signed != files.book.signed:
            _save(identity.home / "mesh" / "roster", signed)
    known = dict(list(peers.items())[:PEERS_MAX])
    changed = signed != files.book.signed
    return Admission(der, files.ca_certificate, signed, known, changed)


def remove_member(identity: Identity, node: NodeId) -> RosterBook:
    """Sign and keep the next roster without `node`; the caller spreads it.

    Raises:
        NotAllowedError: the CA key is not on this machine.
        LocalProtocolError: it is no member.
    """
    ca_key = load_ca_key(identity.home)
    with _locked(identity.home):
        book = _loaded(identity).book
        signed = roster.seal_roster(ca_key, roster.without_member(book.roster, node))
        _save(identity.home / "mesh" / "roster", signed)
        book.offer(signed)
    return book


# --- remembered peers ----------------------------------------------------------------------------


def load_peers(home: Path) -> dict[NodeId, Addresses]:
    """Return where members were last reached; a damaged file counts as none, it is only a hint."""
    try:
        plain = wire.unpack(_read(home / "mesh" / "peers.msgpack"), max_bytes=_FILE_MAX)
        pairs = wire.decode_as(dict[NodeId, list[tuple[str, int]]], plain)
    except (OSError, ConfigError, RemoteProtocolError):
        return {}
    return {node: tuple(Address(h, p) for h, p in found[:8]) for node, found in pairs.items()}


def save_peers(home: Path, peers: Mapping[NodeId, Addresses]) -> None:
    """Remember where members were reached, best address first; a full disk only costs that."""
    plain = {node: [[a.host, a.port] for a in found] for node, found in peers.items()}
    with contextlib.suppress(OSError):
        _save(home / "mesh" / "peers.msgpack", wire.pack(plain))


# --- TLS -----------------------------------------------------------------------------------------


def server_context(home: Path) -> ssl.SSLContext:
    """TLS for the door: a client certificate of our mesh or no connection."""
    return _context(home, ssl.PROTOCOL_TLS_SERVER)


def client_context(home: Path) -> ssl.SSLContext:
    """TLS for dialling; who answered is checked by the dialler, by node id."""
    return _context(home, ssl.PROTOCOL_TLS_CLIENT)


def _context(home: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VerifyFlags(_NO_CHECK_TIME)
    context.set_alpn_protocols([certificates.ALPN])
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are kept alive instead; nobody resumes
    folder = home / "mesh"
    try:
        context.load_verify_locations(cafile=folder / "ca.pem")
        context.load_cert_chain(folder / "node.pem", home / "identity.key")
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(
            f"cannot use the certificates in {str(folder)!r}: {e}",
            hint="ask for an invitation and join again",
        ) from e
    return context


# --- files ---------------------------------------------------------------------------------------


def _loaded(identity: Identity) -> MeshFiles:
    folder = identity.home / "mesh"
    try:
        ca_der = ssl.PEM_cert_to_DER_cert(_read(folder / "ca.pem").decode("ascii"))
        node_der = ssl.PEM_cert_to_DER_cert(_read(folder / "node.pem").decode("ascii"))
        ca = certificates.key_of(ca_der)
        mesh = certificates.id_of(ca)
        certificates.check_issued(node_der, ca_der)
        if certificates.node_of(node_der, mesh) != identity.node:
            raise RemoteProtocolError("the certificate is for another key than identity.key")
        book = RosterBook(ca, _read(folder / "roster"))
    except (OSError, ValueError, RemoteProtocolError) as e:
        raise ConfigError(
            f"the mesh files in {str(folder)!r} are damaged: {e}",
            hint="ask for an invitation and join again; " + _leaving(folder),
        ) from e
    return MeshFiles(mesh, book, ca_der)


def _leaving(folder: Path) -> str:
    """How to leave a mesh; on the founding machine that is the end of the mesh."""
    hint = f"to leave the mesh, remove {str(folder)!r}"
    if (folder / "ca.key").exists():
        hint += "; keep its ca.key: it is the only copy of the mesh's key"
    return hint


def load_ca_key(home: Path) -> Ed25519PrivateKey:
    """Return the mesh's key, with which members are admitted and removed.

    Raises:
        NotAllowedError: another machine holds it. ConfigError: it is damaged or readable by others.
    """
    path = home / "mesh" / "ca.key"
    if not path.exists():
        raise NotAllowedError(
            "this machine does not hold the key of the mesh",
            hint="invite and remove on the machine where `gpulayer mesh create` ran",
        )
    return _load_key(path)


def _private_dir(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as e:
        raise ConfigError(
            f"cannot use the state directory {str(path)!r}: {e.strerror}",
            hint="GPULAYER_HOME names another one",
        ) from e
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{str(path)!r} belongs to or is writable by another user", hint=f"chmod 700 {path}"
        )


def _create_key(path: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _save(path, pem)
    return key


def _load_key(path: Path) -> Ed25519PrivateKey:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise ConfigError(f"cannot read the key {str(path)!r}: {e.strerror}") from e
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
            raise ConfigError(
                f"the key {str(path)!r} can be read by other users"
                f" (mode {stat.S_IMODE(found.st_mode):04o})",
                hint=f"chmod 600 {path}",
            )
        data = file.read(_FILE_MAX)
    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as e:
        raise ConfigError(f"the key {str(path)!r} is damaged: {e}") from e
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"the key {str(path)!r} is not an Ed25519 key")
    return key


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_FILE_MAX + 1)
    if len(data) > _FILE_MAX:
        raise ConfigError(f"{str(path)!r} is larger than {_FILE_MAX} bytes")
    return data


def _save(path: Path, data: bytes) -> None:
    replace_file(path, data, private=True, durable=True)


def _overwrite(path: Path, data: bytes) -> None:
    """Write a few bytes into a file that is there: in its first sector, so whole or not at all."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Exclude the other processes of this machine; held for milliseconds, freed by the kernel."""
    fd = os.open(home / "state.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _pem(der: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(der).encode("ascii")


def _wall() -> datetime:
    return datetime.now(UTC)  # written into certificates for other tools, checked by nobody


def _serial() -> int:
    return secrets.randbits(127) | 1
