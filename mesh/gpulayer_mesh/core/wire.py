"""Bytes on the wire: strict msgpack, and envelopes signed by their author.

An envelope is `msgpack([raw, signature])` with `raw = msgpack([1, kind, mesh, sender, boot, seq,
audience, body])`. The signature covers the exact bytes of `raw`, is checked before `raw` is
decoded, and a relay passes the envelope on byte for byte.

This module does not know what a body means, who is a member (a `key_of` callback says whose key
to use) or whether a message is a replay (`ReplayWindow` says so from boot epoch and sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gpulayer_mesh.errors import LocalProtocolError, RemoteProtocolError

T = TypeVar("T")

PACKET_MAX = 1200  # bytes; fits every path MTU seen on LANs and tunnels
RECORD_MAX = 32 * 1024  # one signed record: 64 devices with their link rows take about 20 KiB
ENVELOPE_MAX = 64 * 1024  # any control message that is not a job spec, roster or manifest
SPEC_MAX = 1024 * 1024  # a job spec: 1,000 arguments of 1 KiB
TUNNEL_PIECE_MAX = 64 * 1024  # bytes to a service in one request
BODY_MAX = 32 * 1024 * 1024  # a manifest of 100,000 files at ~300 B each

_DOMAIN = b"gpulayer/env/v1\0"
_VERSION = 1
_DEPTH_MAX = 16  # our deepest message has 7 levels
_SIGNATURE_BYTES = 64


def pack(value: Any) -> bytes:
    """Encode plain data or our dataclasses as msgpack."""
    plain = msgspec.to_builtins(value, builtin_types=(bytes,))
    return msgpack.packb(plain, use_bin_type=True)  # type: ignore[no-any-return]


def unpack(data: bytes, *, max_bytes: int = ENVELOPE_MAX) -> Any:
    """Decode one msgpack value strictly.

    Raises:
        RemoteProtocolError: too long, not msgpack, extension type, duplicate or non-text key, NaN
            or infinity, nested deeper than 16, trailing bytes.
    """
    if len(data) > max_bytes:
        raise RemoteProtocolError(f"message of {len(data)} bytes exceeds the limit of {max_bytes}")
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            ext_hook=_no_ext,
            object_pairs_hook=_no_duplicates,
            max_str_len=max_bytes,
            max_bin_len=max_bytes,
            max_array_len=max_bytes,
            max_map_len=max_bytes,
            max_ext_len=0,
        )
    except RemoteProtocolError:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as e:
        raise RemoteProtocolError(f"not a valid message: {e}") from e
    _check_plain(value, 1)
    return value


def decode_as(kind: type[T], value: Any) -> T:
    """Check plain data against a dataclass and build it; unknown fields are dropped.

    Raises:
        RemoteProtocolError: a field is missing, of the wrong type or over its limit.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as e:
        raise RemoteProtocolError(f"not a valid {kind.__name__}: {e}") from e


@dataclass(frozen=True, slots=True)
class Envelope:
    """A verified signed message."""

    kind: str
    mesh: str  # MeshId
    sender: str  # NodeId of the author; "" where the mesh CA signed
    boot: int
    seq: int
    audience: str  # node id, job id or "" for every member
    body: Any  # plain data; use `decode_as`
    signed: bytes  # the whole envelope as received, for relaying


def seal(
    key: Ed25519PrivateKey,
    *,
    kind: str,
    mesh: str,
    sender: str,
    body: Any,
    boot: int = 0,
    seq: int = 0,
    audience: str = "",
) -> bytes:
    """Sign one message; ids travel as raw bytes to keep packets small."""
    raw = pack(
        [_VERSION, kind, bytes.fromhex(mesh), bytes.fromhex(sender), boot, seq, audience, body]
    )
    return pack([raw, key.sign(_DOMAIN + raw)])


def open_envelope(
    data: bytes,
    *,
    mesh: str,
    key_of: Callable[[str], Ed25519PublicKey | None],
    kind: str | None = None,
    max_bytes: int = ENVELOPE_MAX,
) -> Envelope:
    """Verify and decode one envelope.

    `key_of` maps the claimed sender to its key, None for one who may not speak. The outer frame
    and the header's position of the sender are read before verification, nothing else is used.

    Raises:
        RemoteProtocolError: malformed, another mesh, unknown sender, bad signature, wrong kind.
    """
    outer = unpack(data, max_bytes=max_bytes)
    if (
        not isinstance(outer, list)
        or len(outer) != 2
        or not isinstance(outer[0], bytes)
        or not isinstance(outer[1], bytes)
        or len(outer[1]) != _SIGNATURE_BYTES
    ):
        raise RemoteProtocolError("not an envelope")
    raw, signature = outer
    claimed_mesh, claimed_sender = _claimed(raw)
    if claimed_mesh != mesh:
        raise RemoteProtocolError(f"message of another mesh {claimed_mesh[:8]!r}")
    key = key_of(claimed_sender)
    if key is None:
        raise RemoteProtocolError(f"message from unknown node {claimed_sender[:8]!r}")
    try:
        key.verify(signature, _DOMAIN + raw)
    except InvalidSignature:
        raise RemoteProtocolError(f"bad signature of node {claimed_sender[:8]!r}") from None
    header = unpack(raw, max_bytes=max_bytes)
    if not isinstance(header, list) or len(header) != 8:
        raise RemoteProtocolError("not an envelope")
    version, got_kind, _, _, boot, seq, audience, body = header
    if version != _VERSION:
        raise RemoteProtocolError(f"protocol version {version!r}, ours is {_VERSION}")
    if not isinstance(got_kind, str) or not isinstance(audience, str):
        raise RemoteProtocolError("not an envelope")
    if type(boot) is not int or type(seq) is not int or boot < 0 or seq < 0:
        raise RemoteProtocolError("not an envelope")
    if kind is not None and got_kind != kind:
        raise RemoteProtocolError(f"message kind {got_kind!r}, expected {kind!r}")
    return Envelope(got_kind, mesh, claimed_sender, boot, seq, audience, body, data)


class ReplayWindow:
    """Accepts each (boot, seq) of one sender once; packets may arrive out of order.

    64 positions: at 200 packets/s per peer that is 320 ms of reordering, far above a LAN's.
    """

    __slots__ = ("_boot", "_mask", "_top")

    def __init__(self) -> None:
        self._boot = -1
        self._top = -1
        self._mask = 0

    def accept(self, boot: int, seq: int) -> bool:
        """Return whether this message is new, and remember it."""
        if boot < self._boot:
            return False
        if boot > self._boot:
            self._boot, self._top, self._mask = boot, seq, 1
            return True
        ahead = seq - self._top
        if ahead > 0:
            self._mask = ((self._mask << ahead) | 1) & ((1 << 64) - 1) if ahead < 64 else 1
            self._top = seq
            return True
        if ahead <= -64:  # first: a shift by a peer's number could ask for gigabytes
            return False
        bit = 1 << -ahead
        if self._mask & bit:
            return False
        self._mask |= bit
        return True


def _claimed(raw: bytes) -> tuple[str, str]:
    unpacker = msgpack.Unpacker(
        raw=False, ext_hook=_no_ext, max_buffer_size=len(raw) + 1, max_str_len=64, max_bin_len=64
    )
    unpacker.feed(raw)
    try:
        if unpacker.read_array_header() != 8:
            raise RemoteProtocolError("not an envelope")
        unpacker.skip()
        unpacker.skip()
        mesh, sender = unpacker.unpack(), unpacker.unpack()
    except (ValueError, TypeError, msgpack.UnpackException, msgpack.OutOfData) as e:
        raise RemoteProtocolError("not an envelope") from e
    if not isinstance(mesh, bytes) or not isinstance(sender, bytes):
        raise RemoteProtocolError("not an envelope")
    return mesh.hex(), sender.hex()


def _no_ext(code: int, data: bytes) -> Any:
    raise RemoteProtocolError(f"extension type {code} is not allowed")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise RemoteProtocolError("duplicate key in a map")
    return result


def _check_plain(value: Any, depth: int) -> None:
    if depth > _DEPTH_MAX:
        raise RemoteProtocolError(f"nested deeper than {_DEPTH_MAX}")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RemoteProtocolError("map keys must be text")
            _check_plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, depth + 1)
    elif isinstance(value, float) and not (-1e308 < value < 1e308):
        raise RemoteProtocolError("NaN and infinity are not allowed")


def check_packet(data: bytes) -> bytes:
    """Return `data` if it fits one packet.

    Raises:
        LocalProtocolError: it does not.
    """
    if len(data) > PACKET_MAX:
        raise LocalProtocolError(f"packet of {len(data)} bytes exceeds {PACKET_MAX}")
    return data
