"""A file is there whole or not at all, whatever becomes of the writing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from gpulayer_mesh.files import replace_file


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(("private", "mode"), [(False, 0o640), (True, 0o600)])
def test_file_takes_the_place_of_another(
    private: bool, mode: int, durable: bool, tmp_path: Path
) -> None:
    path = tmp_path / ("x" * 255)
    before = os.umask(0o027)
    try:
        for data in (b"first", b"second"):
            replace_file(path, data, private=private, durable=durable)
    finally:
        os.umask(before)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"second", mode)
    assert list(tmp_path.iterdir()) == [path]


def test_refusal_of_the_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    replace_file(path, b"first")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"second", durable=True)
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_link_in_a_files_place_is_replaced_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"safe")
    (tmp_path / "state").symlink_to(elsewhere)
    replace_file(tmp_path / "state", b"new")
    assert elsewhere.read_bytes() == b"safe"
    assert not (tmp_path / "state").is_symlink()
