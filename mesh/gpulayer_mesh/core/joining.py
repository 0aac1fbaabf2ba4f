"""Joining a mesh with one pasted line: the line, and the ceremony on both sides, sans IO.

    joiner                                    inviter
    Hello: version, mesh, key, name, nonce ->
                                           <- Challenge: nonce             (or a refusal)
    Proof: HMAC + signature by its key     ->
                                           <- Answer: HMAC + sealed certificates, roster, peers

Binding. The joiner shows no TLS certificate: Python's ssl has no callback that would let a server
accept an unknown one. Instead the transcript both sides confirm consists of the exact Hello (with
the joiner's public key) and Challenge, and the hash of the server key *as each side sees it on its
own connection*; the joiner signs that transcript with the key in its Hello. So both keys are bound:
a relay that ends TLS has another server key on its second leg, both confirmations fail, and it has
spent one try; a relay that does not end TLS sees ciphertext. The secret has 128 bits, so nothing
heard can be guessed offline. The answer travels under a key derived from secret and transcript.

Tries. Only a proof that was evaluated and wrong costs one; noise on the port and refused Hellos
cost none. `Inviter.handle` is synchronous: proofs are evaluated one at a time, three at most.

Does not know sockets, files, clocks or how a certificate is issued (effect `Admit`).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from gpulayer_mesh.core import certificates, wire
from gpulayer_mesh.core.roster import ROSTER_MAX, open_roster
from gpulayer_mesh.core.types import Address, Addresses, MeshId, Name, NodeId
from gpulayer_mesh.errors import IllegalTransitionError, JoinError, RemoteProtocolError

INVITE_S = 600.0  # long enough to walk to the other machine, short for a line in a shell history
TRIES = 3  # wrong proofs that burn an invitation
USES_MAX = 1024  # members of a mesh
ATTEMPTS_MAX = 16  # between Hello and Proof; a joiner needs milliseconds there
STEP_S = 10.0  # every wait for the other side
REQUEST_MAX = 4 * 1024  # bytes of Hello and Proof: 8 addresses, a key, a name
ANSWER_MAX = ROSTER_MAX + 64 * 1024  # a full roster, two certificates, 64 peers
PEERS_MAX = 64  # addresses the joiner starts with; gossip brings the rest

_VERSION = 1
_PREFIX = "gpl1-"
_LINE_MAX = 1024  # characters; 8 IPv6 addresses make 330
_DOMAIN = b"gpulayer/join/v1\0"

_Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]


# --- the line ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the line carries."""

    hosts: tuple[str, ...]  # IP literals of the inviting machine, best first, 1..8
    port: int
    mesh: MeshId
    secret: bytes  # 16 random bytes


@dataclass(frozen=True, slots=True)
class _Line:
    hosts: Annotated[
        tuple[Annotated[bytes, Meta(min_length=4, max_length=16)], ...],
        Meta(min_length=1, max_length=8),
    ]
    port: Annotated[int, Meta(ge=1, le=65535)]
    mesh: _Bytes32
    secret: Annotated[bytes, Meta(min_length=16, max_length=16)]


def write_line(invitation: Invitation) -> str:
    """Encode as one token of a-z, 2-7 and '-': no shell, chat or mail program alters it.

    After the prefix: base32 of (payload length, 4 bytes of SHA-256, payload).
    """
    hosts = [ipaddress.ip_address(host).packed for host in invitation.hosts]
    payload = wire.pack([hosts, invitation.port, bytes.fromhex(invitation.mesh), invitation.secret])
    framed = len(payload).to_bytes(2, "big") + hashlib.sha256(payload).digest()[:4] + payload
    return _PREFIX + base64.b32encode(framed).decode().rstrip("=").lower()


def read_line(text: str) -> Invitation:
    """Decode a pasted line; white space that a terminal put into it does not matter.

    Raises:
        JoinError: not such a line, cut off, or damaged; says which.
    """
    token = "".join(text.split()).lower()
    again = "copy the whole line that `gpulayer mesh invite` printed"
    if not token.startswith(_PREFIX):
        raise JoinError(
            f"not an invitation: {token[:12]!r} does not start with 'gpl1-'", hint=again
        )
    if len(token) > _LINE_MAX:
        raise JoinError(f"not an invitation: {len(token)} characters are too many", hint=again)
    coded = token.removeprefix(_PREFIX).upper()
    usable = coded[: len(coded) - (len(coded) % 8 in (1, 3, 6))]  # lengths base32 cannot have
    try:
        framed = base64.b32decode(usable + "=" * (-len(usable) % 8))
    except ValueError:
        raise JoinError("the invitation contains characters it cannot have", hint=again) from None
    length, payload = int.from_bytes(framed[:2], "big"), framed[6:]
    whole = len(_PREFIX) + -(-(6 + length) * 8 // 5) if len(framed) >= 2 else 100
    if len(token) < whole <= _LINE_MAX:
        raise JoinError(
            f"the invitation is cut off: {len(token)} of {whole} characters", hint=again
        )
    if len(token) != whole or hashlib.sha256(payload).digest()[:4] != framed[2:6]:
        raise JoinError("the invitation is damaged: its checksum does not match", hint=again)
    try:
        values = wire.unpack(payload)
        if not isinstance(values, list) or len(values) != 4:
            raise RemoteProtocolError("not an invitation")
        names = ("hosts", "port", "mesh", "secret")
        line = wire.decode_as(_Line, dict(zip(names, values, strict=True)))
        hosts = tuple(str(ipaddress.ip_address(host)) for host in line.hosts)
    except (RemoteProtocolError, ValueError) as e:
        raise JoinError("the invitation is from another version of gpulayer", hint=again) from e
    return Invitation(hosts, line.port, line.mesh.hex(), line.secret)


# --- messages ------------------------------------------------------------------------------------


class Refusal(StrEnum):
    """Why the inviter says no. A code travels, never text: the joiner does not trust it yet."""

    VERSION = "version"
    WRONG_MESH = "wrong-mesh"
    EXPIRED = "expired"
    USED_UP = "used-up"
    BURNED = "burned"
    WRONG_PROOF = "wrong-proof"
    BUSY = "busy"
    FAILED = "failed"  # the inviter could not sign or save


_IN_WORDS = {
    Refusal.VERSION: (
        "the inviting machine speaks another protocol version",
        "install the same gpulayer on both machines",
    ),
    Refusal.WRONG_MESH: (
        "the machine that answered invites to another mesh",
        "ask for a new line: `gpulayer mesh invite`",
    ),
    Refusal.EXPIRED: (
        "the invitation has expired",
        "ask for a new line: `gpulayer mesh invite`",
    ),
    Refusal.USED_UP: (
        "the invitation has been used as often as it was made for",
        "ask for a new line: `gpulayer mesh invite --uses N`",
    ),
    Refusal.BURNED: (
        "the invitation is void after three wrong tries",
        "ask for a new line: `gpulayer mesh invite`",
    ),
    Refusal.WRONG_PROOF: (
        "the inviting machine did not accept our proof: the line is not its current one, "
        "or something between us relays the connection",
        "ask for a new line and copy it whole; on a network you do not trust, use another one",
    ),
    Refusal.BUSY: ("the inviting machine is busy with other joiners", "try again"),
    Refusal.FAILED: (
        "the inviting machine could not admit us",
        "look at what `gpulayer mesh invite` printed there",
    ),
}


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Who wants in; its key is proven when an inviter sees this."""

    node: NodeId
    public_key: bytes
    name: Name
    addresses: tuple[Address, ...]  # of its door, as it believes; may be empty


@dataclass(frozen=True, slots=True)
class Admission:
    """What a joiner needs to be a member."""

    node_certificate: Annotated[bytes, Meta(max_length=certificates.CERTIFICATE_MAX)]  # DER
    ca_certificate: Annotated[bytes, Meta(max_length=certificates.CERTIFICATE_MAX)]  # DER
    roster: Annotated[bytes, Meta(max_length=ROSTER_MAX)]  # signed
    peers: Annotated[dict[NodeId, Addresses], Meta(max_length=PEERS_MAX)]
    new: bool = True  # False: the roster had it like this before, so no use was spent


@dataclass(frozen=True, slots=True)
class _Hello:
    version: int
    mesh: MeshId
    public_key: _Bytes32
    name: Name
    addresses: Addresses
    nonce: _Bytes32


@dataclass(frozen=True, slots=True)
class _Challenge:
    nonce: _Bytes32


@dataclass(frozen=True, slots=True)
class _Proof:
    confirmation: _Bytes32
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


@dataclass(frozen=True, slots=True)
class _Answer:
    confirmation: _Bytes32
    sealed: Annotated[bytes, Meta(max_length=ANSWER_MAX)]


@dataclass(frozen=True, slots=True)
class _Keys:
    joiner: bytes
    inviter: bytes
    seal: bytes
    transcript: bytes


def _keys(secret: bytes, hello: bytes, challenge: bytes, channel: bytes) -> _Keys:
    parts = (hello, challenge, channel)
    transcript = _DOMAIN + b"".join(hashlib.sha256(part).digest() for part in parts)
    okm = HKDF(SHA256(), 96, salt=hashlib.sha256(transcript).digest(), info=_DOMAIN).derive(secret)
    return _Keys(okm[:32], okm[32:64], okm[64:], transcript)


def _mac(key: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, transcript, "sha256")


_NONCE = bytes(12)  # each seal key is derived for one message


# --- joiner --------------------------------------------------------------------------------------


class Joiner:
    """One attempt on one connection; call `hello`, `prove`, `accept`, in this order, once each.

    Args:
        channel: SHA-256 of the server's SubjectPublicKeyInfo as seen on this connection.
        nonce: 32 random bytes.
    """

    def __init__(
        self,
        invitation: Invitation,
        key: Ed25519PrivateKey,
        *,
        name: str,
        addresses: tuple[Address, ...],
        channel: bytes,
        nonce: bytes,
    ) -> None:
        self._invitation = invitation
        self._key = key
        self._channel = channel
        public = key.public_key().public_bytes_raw()
        hello = _Hello(_VERSION, invitation.mesh, public, name, addresses, nonce)
        self._hello = wire.pack(hello)
        self._keys: _Keys | None = None

    def hello(self) -> bytes:
        """Return the first message."""
        return self._hello

    def prove(self, challenge: bytes) -> bytes:
        """Return the proof for a challenge.

        Raises:
            JoinError: the inviter refused; says why and what to do.
            RemoteProtocolError: not a challenge.
        """
        wire.decode_as(_Challenge, _unless_refused(challenge, REQUEST_MAX))
        self._keys = _keys(self._invitation.secret, self._hello, challenge, self._channel)
        transcript = self._keys.transcript
        return wire.pack(_Proof(_mac(self._keys.joiner, transcript), self._key.sign(transcript)))

    def accept(self, answer: bytes) -> Admission:
        """Return the admission, after checking that it comes from the mesh in the line.

        Raises:
            JoinError: refused, or the answer proves nothing.
            RemoteProtocolError: malformed.
        """
        if self._keys is None:
            raise IllegalTransitionError("joiner", "no challenge yet", "accept")
        decoded = wire.decode_as(_Answer, _unless_refused(answer, ANSWER_MAX))
        expected = _mac(self._keys.inviter, self._keys.transcript)
        if not hmac.compare_digest(decoded.confirmation, expected):
            raise _unproven()
        try:
            plain = ChaCha20Poly1305(self._keys.seal).decrypt(_NONCE, decoded.sealed, None)
        except InvalidTag:
            raise _unproven() from None
        admission = wire.decode_as(Admission, wire.unpack(plain, max_bytes=ANSWER_MAX))
        check_admission(admission, self._invitation.mesh, certificates.id_of(self._key))
        return admission


def check_admission(admission: Admission, mesh: MeshId, node: NodeId) -> None:
    """Check that certificates and roster are this mesh's and make `node` a member.

    Raises:
        JoinError: the CA key is not the one the mesh id names, or we are not in.
        RemoteProtocolError: a certificate or the roster is not valid.
    """
    ca = certificates.key_of(admission.ca_certificate)
    if certificates.id_of(ca) != mesh:
        raise JoinError("the certificates we were sent belong to another mesh than the line")
    certificates.check_issued(admission.node_certificate, admission.ca_certificate)
    if certificates.node_of(admission.node_certificate, mesh) != node:
        raise JoinError("the certificate we were sent is for another machine's key")
    if all(e.node != node for e in open_roster(admission.roster, ca).entries):
        raise JoinError("the roster we were sent does not list this machine")


def _unproven() -> JoinError:
    return JoinError(
        "the machine that answered could not prove that it made this invitation",
        hint="something between the two machines relays the connection; use another network",
    )


def raise_if_refused(data: bytes) -> None:
    """Look at a challenge early: a refusal must not win a race of addresses."""
    _unless_refused(data, REQUEST_MAX)


def _unless_refused(data: bytes, limit: int) -> object:
    """Decode a reply of the inviter; raise if it is a refusal."""
    plain = wire.unpack(data, max_bytes=limit)
    if not isinstance(plain, dict) or "refused" not in plain:
        return plain
    try:
        words, hint = _IN_WORDS[Refusal(plain["refused"])]
    except ValueError:
        raise JoinError("the inviting machine refused without a reason we know") from None
    raise JoinError(words, hint=hint)


# --- inviter -------------------------------------------------------------------------------------


class InviteState(StrEnum):
    OPEN = "open"
    USED_UP = "used-up"
    EXPIRED = "expired"
    BURNED = "burned"


@dataclass(frozen=True, slots=True)
class HelloReceived:
    attempt: int  # names one connection
    data: bytes
    nonce: bytes  # 32 random bytes


@dataclass(frozen=True, slots=True)
class ProofReceived:
    attempt: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Admitted:
    """The shell has signed and saved."""

    attempt: int
    admission: Admission


@dataclass(frozen=True, slots=True)
class AdmitFailed:
    attempt: int


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    attempt: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = HelloReceived | ProofReceived | Admitted | AdmitFailed | ConnectionLost | Tick


@dataclass(frozen=True, slots=True)
class Reply:
    attempt: int
    data: bytes
    last: bool  # close after sending


@dataclass(frozen=True, slots=True)
class Admit:
    """Sign a certificate and the next roster, save, then send `Admitted` or `AdmitFailed`."""

    attempt: int
    request: JoinRequest


@dataclass(frozen=True, slots=True)
class WrongTry:
    """For the inviter's screen."""

    tries_left: int


@dataclass(frozen=True, slots=True)
class Ended:
    state: InviteState


Effect = Reply | Admit | WrongTry | Ended


@dataclass(slots=True)
class _Attempt:
    request: JoinRequest
    keys: _Keys
    admitting: bool = False


class Inviter:
    """One invitation: `uses` machines, three wrong tries, ten minutes.

    A machine that comes back within the window (its connection broke after it was admitted) does
    not take a second use, and one that was a member like this before takes none.

    Args:
        channel: SHA-256 of the SubjectPublicKeyInfo of our listener's certificate.
    """

    def __init__(
        self,
        *,
        mesh: MeshId,
        secret: bytes,
        channel: bytes,
        uses: int,
        now: float,
        valid_s: float = INVITE_S,
    ) -> None:
        self.state = InviteState.OPEN
        self.uses_left = uses
        self.tries_left = TRIES
        self.history: deque[str] = deque(maxlen=20)
        self._uses = uses
        self._mesh = mesh
        self._secret = secret
        self._channel = channel
        self._expires = now + valid_s
        self._attempts: dict[int, _Attempt] = {}
        self._admitted: set[NodeId] = set()

    def next_timeout(self) -> float | None:
        """Return when to send `Tick`."""
        return self._expires if self.state is InviteState.OPEN else None

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Take one event; malformed data raises RemoteProtocolError and changes nothing."""
        before = self.state
        effects: list[Effect] = []
        match event:
            case HelloReceived():
                effects = self._hello(now, event)
            case ProofReceived():
                effects = self._proof(now, event)
            case Admitted():
                effects = self._answer(event)
            case AdmitFailed():
                self._release(event.attempt)
                effects = [_refuse(event.attempt, Refusal.FAILED)]
            case ConnectionLost():
                # While the shell signs, the attempt still owns its use: only its end returns it.
                found = self._attempts.get(event.attempt)
                if found is not None and not found.admitting:
                    del self._attempts[event.attempt]
            case Tick():
                if self.state is InviteState.OPEN and now >= self._expires:
                    self.state = InviteState.EXPIRED
        if self.state is not before:
            effects.append(Ended(self.state))
        kind = type(event).__name__
        self.history.append(f"{now:.3f} {kind} {before}->{self.state}")
        return effects

    def check(self) -> None:
        """Raise if an invariant is broken."""
        admitting = sum(a.admitting for a in self._attempts.values())
        assert 0 <= self.uses_left <= self._uses
        assert 0 <= self.tries_left <= TRIES
        assert len(self._admitted) <= self._uses - self.uses_left
        assert self._uses - self.uses_left <= len(self._admitted) + admitting
        assert len(self._attempts) <= ATTEMPTS_MAX
        assert (self.tries_left == 0) == (self.state is InviteState.BURNED)

    def _hello(self, now: float, event: HelloReceived) -> list[Effect]:
        plain = wire.unpack(event.data, max_bytes=REQUEST_MAX)
        # The version first, by itself: the rest of another version may look different.
        if isinstance(plain, dict) and plain.get("version", _VERSION) != _VERSION:
            return [_refuse(event.attempt, Refusal.VERSION)]
        hello = wire.decode_as(_Hello, plain)
        if event.attempt in self._attempts:
            raise RemoteProtocolError("a second hello on one connection")
        if hello.mesh != self._mesh:
            return [_refuse(event.attempt, Refusal.WRONG_MESH)]
        node = certificates.node_id(hello.public_key)
        if refusal := self._closed_for(now, node):
            return [_refuse(event.attempt, refusal)]
        if len(self._attempts) >= ATTEMPTS_MAX:
            return [_refuse(event.attempt, Refusal.BUSY)]
        challenge = wire.pack(_Challenge(event.nonce))
        self._attempts[event.attempt] = _Attempt(
            JoinRequest(node, hello.public_key, hello.name, hello.addresses),
            _keys(self._secret, event.data, challenge, self._channel),
        )
        return [Reply(event.attempt, challenge, last=False)]

    def _proof(self, now: float, event: ProofReceived) -> list[Effect]:
        attempt = self._attempts.get(event.attempt)
        if attempt is None or attempt.admitting:
            raise RemoteProtocolError("a proof without a challenge")
        proof = wire.decode_as(_Proof, wire.unpack(event.data, max_bytes=REQUEST_MAX))
        node = attempt.request.node
        if refusal := self._closed_for(now, node):
            del self._attempts[event.attempt]
            return [_refuse(event.attempt, refusal)]
        if not _proves(proof, attempt):
            del self._attempts[event.attempt]
            self.tries_left -= 1
            if self.tries_left == 0:
                self.state = InviteState.BURNED
            return [_refuse(event.attempt, Refusal.WRONG_PROOF), WrongTry(self.tries_left)]
        if any(a.admitting and a.request.node == node for a in self._attempts.values()):
            del self._attempts[event.attempt]
            return [_refuse(event.attempt, Refusal.BUSY)]
        if node not in self._admitted:
            self.uses_left -= 1
        attempt.admitting = True
        return [Admit(event.attempt, attempt.request)]

    def _answer(self, event: Admitted) -> list[Effect]:
        attempt = self._attempts.pop(event.attempt, None)
        if attempt is None or not attempt.admitting:
            raise IllegalTransitionError("invitation", self.state, "Admitted", tuple(self.history))
        node = attempt.request.node
        if event.admission.new:
            self._admitted.add(node)
        elif node not in self._admitted:
            self.uses_left += 1
        if self.state is InviteState.OPEN and len(self._admitted) == self._uses:
            self.state = InviteState.USED_UP
        keys = attempt.keys
        sealed = ChaCha20Poly1305(keys.seal).encrypt(_NONCE, wire.pack(event.admission), None)
        answer = wire.pack(_Answer(_mac(keys.inviter, keys.transcript), sealed))
        return [Reply(event.attempt, answer, last=True)]

    def _closed_for(self, now: float, node: NodeId) -> Refusal | None:
        if self.state is InviteState.BURNED:
            return Refusal.BURNED
        if now >= self._expires:
            return Refusal.EXPIRED
        return None if node in self._admitted or self.uses_left > 0 else Refusal.USED_UP

    def _release(self, number: int) -> None:
        attempt = self._attempts.pop(number, None)
        if attempt is not None and attempt.admitting and attempt.request.node not in self._admitted:
            self.uses_left += 1


def _proves(proof: _Proof, attempt: _Attempt) -> bool:
    keys = attempt.keys
    if not hmac.compare_digest(proof.confirmation, _mac(keys.joiner, keys.transcript)):
        return False
    try:
        public = Ed25519PublicKey.from_public_bytes(attempt.request.public_key)
        public.verify(proof.signature, keys.transcript)
    except (InvalidSignature, ValueError):
        return False
    return True


def _refuse(attempt: int, why: Refusal) -> Reply:
    return Reply(attempt, wire.pack({"refused": why}), last=True)
