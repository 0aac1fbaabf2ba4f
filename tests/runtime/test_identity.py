"""Keys, certificates and the roster on disk."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from gpulayer_mesh.core import certificates
from gpulayer_mesh.core.joining import Admission, JoinRequest
from gpulayer_mesh.core.types import Address, Role
from gpulayer_mesh.errors import (
    ConfigError,
    LocalProtocolError,
    NotAllowedError,
    RemoteProtocolError,
)
from gpulayer_mesh.runtime import identity as identities


@pytest.fixture
def founder(tmp_path: Path) -> identities.Identity:
    identity = identities.load_or_create(tmp_path / "laptop")
    identities.create_mesh(identity, "laptop")
    return identity


def request_of(identity: identities.Identity, name: str = "box") -> JoinRequest:
    return JoinRequest(identity.node, identity.key.public_key().public_bytes_raw(), name, ())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_key_is_made_once_and_private(tmp_path: Path) -> None:
    home = tmp_path / "state"
    first = identities.load_or_create(home)
    assert identities.load_or_create(home).node == first.node == certificates.id_of(first.key)
    assert (mode(home), mode(home / "identity.key")) == (0o700, 0o600)
    assert {p.name for p in home.iterdir()} == {"identity.key", "state.lock"}


def test_two_first_starts_at_once_agree_on_one_key(tmp_path: Path) -> None:
    nodes: list[str] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait(10)
        nodes.append(identities.load_or_create(tmp_path / "state").node)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(nodes) == 8
    assert len(set(nodes)) == 1


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620])
def test_key_others_can_read_is_refused_with_the_fix(tmp_path: Path, bits: int) -> None:
    identities.load_or_create(tmp_path)
    path = tmp_path / "identity.key"
    path.chmod(bits)
    with pytest.raises(ConfigError, match=f"mode {bits:04o}") as caught:
        identities.load_or_create(tmp_path)
    assert caught.value.hint == f"chmod 600 {path}"


def test_key_behind_a_symlink_is_refused(tmp_path: Path) -> None:
    identities.load_or_create(tmp_path / "other")
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "identity.key").symlink_to(tmp_path / "other" / "identity.key")
    with pytest.raises(ConfigError, match="cannot read the key"):
        identities.load_or_create(tmp_path / "state")


def test_directory_others_can_write_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "state"
    home.mkdir()
    home.chmod(0o770)
    with pytest.raises(ConfigError, match="another user") as caught:
        identities.load_or_create(home)
    assert caught.value.hint == f"chmod 700 {home}"


def test_damaged_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_text("nonsense")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="damaged"):
        identities.load_or_create(tmp_path)


def test_boot_epoch_rises_and_a_damaged_one_is_not_restarted(tmp_path: Path) -> None:
    assert [identities.next_boot(tmp_path) for _ in range(3)] == [1, 2, 3]
    (tmp_path / "boot").write_text("7x")
    with pytest.raises(ConfigError, match="damaged"):
        identities.next_boot(tmp_path)


def test_founder_has_every_role_and_the_mesh_key(founder: identities.Identity) -> None:
    mesh = identities.load_mesh(founder)
    assert mesh is not None
    identities.load_ca_key(founder.home)
    assert mesh.book.epoch == 1
    assert mesh.book.roles(founder.node) == tuple(Role)
    assert mode(founder.home / "mesh" / "ca.key") == 0o600
    with pytest.raises(ConfigError, match="already belongs"):
        identities.create_mesh(founder, "laptop")


def test_machine_without_a_mesh_has_none(tmp_path: Path) -> None:
    assert identities.load_mesh(identities.load_or_create(tmp_path)) is None


def test_founding_that_broke_off_is_begun_again(tmp_path: Path) -> None:
    identity = identities.load_or_create(tmp_path)
    identities.create_mesh(identity, "a")
    (tmp_path / "mesh" / "roster").unlink()  # what a crash before the last step leaves
    assert identities.create_mesh(identity, "a").book.epoch == 1


def test_admitted_machine_is_a_member_and_cannot_admit(
    founder: identities.Identity, tmp_path: Path
) -> None:
    box = identities.load_or_create(tmp_path / "box")
    peers = {founder.node: (Address("192.0.2.1", 7400),)}
    admission = identities.admit(founder, request_of(box), (Role.WORKER,), peers)
    mesh = identities.save_membership(box, admission)
    assert mesh.book.epoch == 2
    assert mesh.book.roles(box.node) == (Role.WORKER,)
    assert identities.load_peers(box.home) == peers
    with pytest.raises(NotAllowedError, match="does not hold the key"):
        identities.admit(box, request_of(founder), (Role.WORKER,), {})


def test_admitting_twice_keeps_the_epoch(founder: identities.Identity, tmp_path: Path) -> None:
    box = identities.load_or_create(tmp_path / "box")
    first = identities.admit(founder, request_of(box), (Role.WORKER,), {})
    again = identities.admit(founder, request_of(box), (Role.WORKER,), {})
    assert again.roster == first.roster


def test_removed_member_is_gone_from_the_next_epoch(
    founder: identities.Identity, tmp_path: Path
) -> None:
    box = identities.load_or_create(tmp_path / "box")
    identities.admit(founder, request_of(box), (Role.WORKER,), {})
    book = identities.remove_member(founder, box.node)
    assert book.epoch == 3
    assert box.node not in book
    reloaded = identities.load_mesh(founder)
    assert reloaded is not None
    assert reloaded.book.signed == book.signed
    with pytest.raises(LocalProtocolError):
        identities.remove_member(founder, box.node)


def test_roster_file_never_goes_back(founder: identities.Identity, tmp_path: Path) -> None:
    old = identities.load_mesh(founder)
    assert old is not None
    box = identities.load_or_create(tmp_path / "box")
    identities.admit(founder, request_of(box), (Role.WORKER,), {})
    identities.save_roster(founder.home, old.book)
    kept = identities.load_mesh(founder)
    assert kept is not None
    assert kept.book.epoch == 2
    assert not old.book.offer(old.book.signed)
    assert old.book.offer(kept.book.signed)


def test_admissions_from_two_processes_both_count(
    founder: identities.Identity, tmp_path: Path
) -> None:
    boxes = [identities.load_or_create(tmp_path / f"box-{i}") for i in range(6)]
    threads = [
        threading.Thread(
            target=identities.admit, args=(founder, request_of(box), (Role.WORKER,), {})
        )
        for box in boxes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    mesh = identities.load_mesh(founder)
    assert mesh is not None
    assert mesh.book.epoch == 7
    assert {e.name for e in mesh.book.roster.entries} == {
        "laptop", "box", "box-2", "box-3", "box-4", "box-5", "box-6",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["ca.pem", "node.pem", "roster"])
@pytest.mark.parametrize("data", [b"", b"nonsense", b"\xff" * 100])
def test_damaged_mesh_files_are_named(founder: identities.Identity, name: str, data: bytes) -> None:
    (founder.home / "mesh" / name).write_bytes(data)
    with pytest.raises(ConfigError, match="damaged") as caught:
        identities.load_mesh(founder)
    assert "join again" in (caught.value.hint or "")


def test_certificate_of_another_key_is_noticed(
    founder: identities.Identity, tmp_path: Path
) -> None:
    box = identities.load_or_create(tmp_path / "box")
    admission = identities.admit(founder, request_of(box), (Role.WORKER,), {})
    other = identities.load_or_create(tmp_path / "other")
    with pytest.raises(ConfigError, match="another key"):
        identities.save_membership(other, admission)


def test_own_ca_without_its_roster_is_no_mesh(tmp_path: Path) -> None:
    identity = identities.load_or_create(tmp_path)
    der = certificates.issue_ca(identity.key, wall=datetime.now(UTC), serial=1)
    with pytest.raises(ConfigError, match="damaged"):
        identities.save_membership(identity, Admission(der, der, b"", {}))


def test_damaged_peers_are_forgotten(founder: identities.Identity) -> None:
    peers = {"ab" * 32: (Address("192.0.2.1", 7400), Address("fe80::1%eth0", 7400))}
    identities.save_peers(founder.home, peers)
    assert identities.load_peers(founder.home) == peers
    (founder.home / "mesh" / "peers.msgpack").write_bytes(b"\xc1")
    assert identities.load_peers(founder.home) == {}


def test_full_disk_leaves_the_old_file_and_no_rest(
    founder: identities.Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    identities.save_peers(founder.home, {founder.node: (Address("192.0.2.1", 7400),)})
    before = {path.name: path.read_bytes() for path in (founder.home / "mesh").iterdir()}
    monkeypatch.setattr(os, "fsync", full)
    identities.save_peers(founder.home, {})  # only hints: that must end no command
    with pytest.raises(OSError, match="No space"):
        identities.admit(founder, request_of(founder, "other"), (Role.WORKER,), {})
    assert {path.name: path.read_bytes() for path in (founder.home / "mesh").iterdir()} == before


@pytest.mark.parametrize(("known", "then"), [("9\n", "10\n"), ("0041", "42\n"), (" 7 \n", "8\n")])
def test_boot_epoch_rises_where_the_disk_takes_no_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str, then: str
) -> None:
    def full(path: Path, data: bytes, **_: bool) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "boot").write_text(known)
    monkeypatch.setattr(identities, "replace_file", full)
    assert identities.next_boot(tmp_path) == int(then)
    assert (tmp_path / "boot").read_text() == then
    (tmp_path / "boot").unlink()
    with pytest.raises(OSError, match="boot"):
        identities.next_boot(tmp_path)


def test_loading_an_identity_does_not_import_x509() -> None:
    program = (
        "import sys; from gpulayer_mesh.runtime import identity; "
        "sys.exit('cryptography.x509' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_certificates_name_their_key_and_mesh(founder: identities.Identity) -> None:
    mesh = identities.load_mesh(founder)
    assert mesh is not None
    der = identities.admit(founder, request_of(founder), (), {}).node_certificate
    assert certificates.node_of(der, mesh.mesh) == founder.node
    certificates.check_issued(der, mesh.ca_certificate)
    with pytest.raises(RemoteProtocolError, match="names"):
        certificates.node_of(der, "ab" * 32)
