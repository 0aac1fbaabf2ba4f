"""Files that are there whole or not at all: written beside their place, then renamed into it.

A library for all packages of ours, ranks included: standard library only. What comes in pieces is
written where it arrives. Knows nothing of what a file is for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def replace_file(path: Path, data: bytes, *, private: bool = False, durable: bool = False) -> None:
    """Write a file in the place of the one that is there, if any; its folder is.

    Several may write one file at once: it is what one of them wrote.

    Args:
        private: nobody else may read it (mode 0600); else the umask decides.
        durable: it outlives a crash of the machine; costs two waits for the disk.

    Raises:
        OSError: the disk refuses; nothing half-written is left.
    """
    fresh = path.with_name(f".{secrets.token_hex(8)}.tmp")  # short: the name may be as long as any
    try:
        with open(os.open(fresh, _FRESH, 0o600 if private else 0o666), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def make_private(folder: Path) -> None:
    """Make a folder that nobody else may read, if it is not there; it outlives a crash.

    Raises:
        OSError: the disk refuses.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    sync(folder.parent)


def remove_file(path: Path) -> None:
    """Remove a file that nothing depends on; where the disk refuses even that, it stays."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, outlive a crash of the machine.

    Raises:
        OSError: the disk refuses, or it is not there.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
