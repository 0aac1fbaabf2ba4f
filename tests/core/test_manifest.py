"""The manifest's rules: what may be written below a fresh folder, and nothing else."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.manifest import (
    BUNDLE_MAX,
    CHUNK_BYTES,
    FILES_MAX,
    Entry,
    EntryKind,
    Manifest,
    check_path,
    chunk_lengths,
    open_manifest,
    pack_manifest,
    path_problem,
    unique_chunks,
    validate,
)
from gpulayer_mesh.errors import RemoteProtocolError
from hypothesis import given
from hypothesis import strategies as st

HASH = hashlib.sha256(b"x").digest()


def file(path: str, content: bytes = b"x") -> Entry:
    chunks = [content[i : i + CHUNK_BYTES] for i in range(0, len(content), CHUNK_BYTES)]
    hashes = tuple(hashlib.sha256(chunk).digest() for chunk in chunks)
    whole = hashlib.sha256(content).digest()
    return Entry(path, EntryKind.FILE, len(content), False, whole, hashes)


def folder(path: str) -> Entry:
    return Entry(path, EntryKind.DIR)


GOOD = Manifest(
    (
        file("a b/træin v2.py"),
        folder("empty"),
        file("none", b""),
        replace(file("run.sh"), executable=True),
        file("z/two.bin", b"1" * CHUNK_BYTES + b"2"),
    )
)
UNSAFE = (
    """
/etc/passwd|../x|a/../x|a/./x|./x|.|..|a//b|a/|/|a\\b|C:x|a:b|con|CON.txt|aux.tar.gz|a/nul|COM1|lpt9.x
com¹.txt|con .py|cafe\u0301|a\tb|a\x7f|a\u0085b
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


def test_packed_manifest_opens_again_and_hash_is_checked() -> None:
    packed, sha256 = pack_manifest(GOOD)
    assert open_manifest(packed, sha256=sha256) == GOOD
    assert open_manifest(packed) == GOOD
    with pytest.raises(RemoteProtocolError, match="hash the job names"):
        open_manifest(packed, sha256=HASH)


@pytest.mark.parametrize("path", [*UNSAFE, "", "a\0b", "\ud800", "a" * 256, "æ" * 128, "a/" * 600])
def test_unsafe_path_is_refused(path: str) -> None:
    with pytest.raises(RemoteProtocolError):
        check_path(path)
    entries = tuple(sorted((file("ok.py"), file(path)), key=lambda e: e.path))
    with pytest.raises(RemoteProtocolError):
        validate(Manifest(entries))


@pytest.mark.parametrize(
    "path", ["a", "a  b.txt", "my prøject (1)/træin v2.py", ".gitignore", "console.py", "a" * 255]
)
def test_ordinary_path_is_accepted(path: str) -> None:
    assert check_path(path) == path


@given(st.text(max_size=40))
def test_accepted_paths_stay_inside(path: str) -> None:
    if path_problem(path) is None:
        parts = path.split("/")
        assert parts
        assert not any(part in ("", ".", "..") for part in parts)
        assert not set(path) & set("\\:\0")


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ((file("b"), file("a")), "out of order"),
        ((file("a"), file("a")), "doubled"),
        ((file("a"), file("a/b")), "both a file and a folder"),
        ((file("A"), file("a")), "only in case"),
        ((file("Src/a"), file("src/b")), "only in case"),
        ((file("STRASSE"), file("straße")), "only in case"),
        ((folder("A"), file("a/b")), "only in case"),
        ((replace(folder("d"), size=1),), "has content"),
        ((replace(folder("d"), executable=True),), "has content"),
        ((replace(file("f"), sha256=b""),), "no hash"),
        ((replace(file("f"), size=2 * CHUNK_BYTES),), "lists 1 chunks"),
        ((replace(file("f"), chunks=()),), "lists 0 chunks"),
        ((replace(file("f"), sha256=b"\1" * 32),), "two different hashes"),
        ((file("f"), replace(file("g"), size=2)), "two sizes"),
    ],
)
def test_broken_manifest_is_refused(entries: tuple[Entry, ...], why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        validate(Manifest(entries))


def test_a_folder_may_be_listed_beside_its_files() -> None:
    validate(Manifest((folder("a"), file("a/b"), file("a-b"), file("a/c"))[:2]))


def test_limits_are_on_files_and_total_size() -> None:
    with pytest.raises(RemoteProtocolError, match="exceed the limit"):
        validate(Manifest(tuple(folder(f"{i:06}") for i in range(FILES_MAX + 1))))
    half = BUNDLE_MAX // 2 // CHUNK_BYTES * CHUNK_BYTES
    chunks = tuple(HASH for _ in chunk_lengths(half))
    big = Entry("a", EntryKind.FILE, half, False, HASH, chunks)
    validate(Manifest((big, replace(big, path="b"))))
    with pytest.raises(RemoteProtocolError, match="exceeds the limit"):
        validate(Manifest((big, replace(big, path="b"), file("c", b"yz"))))


def test_unknown_kind_and_wrong_types_are_refused() -> None:
    plain = {"path": "a", "kind": "symlink", "size": 0, "sha256": HASH}
    with pytest.raises(RemoteProtocolError):
        open_manifest(wire.pack({"entries": [plain]}))
    with pytest.raises(RemoteProtocolError):
        open_manifest(wire.pack({"entries": [plain | {"kind": "file", "size": -1}]}))
    with pytest.raises(RemoteProtocolError):
        open_manifest(wire.pack(["entries"]))


def test_unique_chunks_keep_order_and_length() -> None:
    found = unique_chunks(Manifest((*GOOD.entries, file("zz"))))
    assert list(found.values()) == [1, CHUNK_BYTES, 1]
    assert sum(chunk_lengths(5 * CHUNK_BYTES + 7)) == 5 * CHUNK_BYTES + 7


def test_mutated_manifests_are_refused_or_safe(rng: random.Random) -> None:
    packed, _ = pack_manifest(GOOD)
    for _ in range(3000):
        data = bytearray(packed)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            manifest = open_manifest(bytes(data))
        except RemoteProtocolError:
            continue
        validate(manifest)


def test_large_manifest_is_validated_quickly() -> None:
    entries = tuple(file(f"pkg{i // 100:03}/mod{i:05}.py") for i in range(10_000))
    packed, sha256 = pack_manifest(Manifest(entries))
    assert open_manifest(packed, sha256=sha256).entries == entries
