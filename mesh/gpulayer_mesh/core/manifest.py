"""What a job's source bundle holds, as data: sorted entries with sizes and hashes.

The packed manifest's SHA-256 is inside the signed job spec, the chunk hashes are inside the
manifest, so every byte a node writes is covered by one signature. `open_manifest` is the only way
in from the network and refuses whatever could be unsafe to write: the rules are applied before a
byte touches the disk. This module knows no folder and no ignore rule, and never sees file content.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from gpulayer_mesh.core import wire
from gpulayer_mesh.errors import RemoteProtocolError

CHUNK_BYTES = 1024 * 1024  # small enough to pass on while the rest arrives, 2,000 for 2 GB
FILES_MAX = 100_000  # entries; more is a data set, not source
BUNDLE_MAX = 2 * 1024**3  # bytes of all files; the same reason
MANIFEST_MAX = wire.BODY_MAX  # bytes packed: 100,000 entries of about 300 B
PATH_MAX = 1024  # bytes in UTF-8; PATH_MAX of macOS, and a job folder has to fit in front on Linux
PART_MAX = 255  # bytes in UTF-8; NAME_MAX of the usual file systems
# Names Windows reads as devices, whatever follows the first dot.
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$"]
    + [name + digit for name in ("com", "lpt") for digit in "0123456789\u00b9\u00b2\u00b3"]
)


class EntryKind(StrEnum):
    FILE = "file"
    DIR = "dir"  # only needed for empty folders; parents of files are implied


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or empty folder of the bundle."""

    path: Annotated[str, Meta(max_length=PATH_MAX)]
    kind: EntryKind = EntryKind.FILE
    size: Annotated[int, Meta(ge=0, le=BUNDLE_MAX)] = 0  # bytes
    executable: bool = False
    sha256: Annotated[bytes, Meta(max_length=32)] = b""  # of the whole file; empty for a folder
    # One hash per CHUNK_BYTES, the last chunk may be shorter.
    chunks: Annotated[
        tuple[Annotated[bytes, Meta(min_length=32, max_length=32)], ...],
        Meta(max_length=BUNDLE_MAX // CHUNK_BYTES),
    ] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    entries: Annotated[tuple[Entry, ...], Meta(max_length=FILES_MAX)] = ()  # sorted by path

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.entries)


def output_problem(path: str) -> str | None:
    """Return why a file that a job made may not be written under this path, or None when it may.

    Looser than what a bundle may hold, which must unpack on every system: "loss:0.3.pt" may be.
    """
    if not path:
        return "is empty"
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if len(raw) > PATH_MAX:
        return f"is longer than {PATH_MAX} bytes"
    if any(unicodedata.category(char) == "Cc" for char in path):
        return "contains a control character"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "is not relative and plain (no empty, '.' or '..' parts)"
        if len(part.encode()) > PART_MAX:
            return f"has a part longer than {PART_MAX} bytes"
    return None


def path_problem(path: str) -> str | None:
    """Return why a path may not be in a bundle, or None when it may."""
    if problem := output_problem(path):
        return problem
    if "\\" in path or ":" in path:
        return "contains a backslash or colon"
    if unicodedata.normalize("NFC", path) != path:
        return "is not in Unicode form NFC"
    for part in path.split("/"):
        if part.split(".", 1)[0].rstrip(" ").casefold() in _DEVICES:
            return f"contains {part!r}, a device name on Windows"
    return None


def check_path(path: str) -> str:
    """Return `path` if it is safe to create below a fresh folder.

    Raises:
        RemoteProtocolError: it is not.
    """
    problem = path_problem(path)
    if problem is not None:
        raise RemoteProtocolError(f"path {path[:200]!r} {problem}")
    return path


def tree_problem(entries: Iterable[Entry]) -> str | None:
    """Return why entries cannot live in one tree: a file that is also a folder, case twins."""
    kinds: dict[str, EntryKind] = {}  # every path and every parent of one
    spelled: dict[str, str] = {}  # case-folded -> as first seen
    for entry in entries:
        parts = entry.path.split("/")
        for end in range(len(parts), 0, -1):
            path = "/".join(parts[:end])
            kind = entry.kind if end == len(parts) else EntryKind.DIR
            known = kinds.setdefault(path, kind)
            if known is not kind:
                return f"path {path!r} is both a file and a folder"
            if end < len(parts) and spelled.get(_fold(path)) == path:
                break  # this parent and all above it were seen
            twin = spelled.setdefault(_fold(path), path)
            if twin != path:
                return f"paths {twin!r} and {path!r} differ only in case"
    return None


def validate(manifest: Manifest) -> None:
    """Check every rule a manifest must keep before anything is written.

    Raises:
        RemoteProtocolError: unsorted or doubled, unsafe path, conflicting paths, sizes that do
            not match the chunks, over a limit.
    """
    previous = ""
    total = 0
    sizes: dict[bytes, int] = {}
    if len(manifest.entries) > FILES_MAX:
        raise RemoteProtocolError(f"{len(manifest.entries)} files exceed the limit of {FILES_MAX}")
    for entry in manifest.entries:
        check_path(entry.path)
        if entry.path <= previous:
            raise RemoteProtocolError(f"entry {entry.path!r} is out of order or doubled")
        previous = entry.path
        if entry.kind is EntryKind.DIR:
            if entry.size or entry.executable or entry.sha256 or entry.chunks:
                raise RemoteProtocolError(f"folder {entry.path!r} has content")
            continue
        if len(entry.sha256) != 32:
            raise RemoteProtocolError(f"file {entry.path!r} has no hash")
        lengths = chunk_lengths(entry.size)
        if len(lengths) != len(entry.chunks):
            raise RemoteProtocolError(
                f"file {entry.path!r} of {entry.size} bytes lists {len(entry.chunks)} chunks"
            )
        if len(entry.chunks) == 1 and entry.chunks[0] != entry.sha256:
            raise RemoteProtocolError(f"file {entry.path!r} has two different hashes")
        for chunk, length in zip(entry.chunks, lengths, strict=True):
            if sizes.setdefault(chunk, length) != length:
                raise RemoteProtocolError(f"chunk {chunk.hex()[:8]} has two sizes")
        total += entry.size
    if total > BUNDLE_MAX:
        raise RemoteProtocolError(f"bundle of {total} bytes exceeds the limit of {BUNDLE_MAX}")
    problem = tree_problem(manifest.entries)
    if problem is not None:
        raise RemoteProtocolError(problem)


def chunk_lengths(size: int) -> list[int]:
    """Return the length of each chunk of a file of `size` bytes."""
    full, rest = divmod(size, CHUNK_BYTES)
    return [CHUNK_BYTES] * full + ([rest] if rest else [])


def unique_chunks(manifest: Manifest) -> dict[bytes, int]:
    """Return every different chunk hash with its length, in manifest order."""
    result: dict[bytes, int] = {}
    for entry in manifest.entries:
        for chunk, length in zip(entry.chunks, chunk_lengths(entry.size), strict=True):
            result.setdefault(chunk, length)
    return result


def pack_manifest(manifest: Manifest) -> tuple[bytes, bytes]:
    """Return the packed manifest and its SHA-256, which goes into the job spec."""
    packed = wire.pack(manifest)
    return packed, hashlib.sha256(packed).digest()


def open_manifest(packed: bytes, *, sha256: bytes | None = None) -> Manifest:
    """Decode and validate a packed manifest.

    Args:
        sha256: what the signed job spec says; None only for bytes of our own disk.

    Raises:
        RemoteProtocolError: another hash, malformed, or breaking a rule of `validate`.
    """
    if sha256 is not None and hashlib.sha256(packed).digest() != sha256:
        raise RemoteProtocolError("manifest does not have the hash the job names")
    manifest = wire.decode_as(Manifest, wire.unpack(packed, max_bytes=MANIFEST_MAX))
    validate(manifest)
    return manifest


def _fold(path: str) -> str:
    return unicodedata.normalize("NFC", path.casefold())
