"""Chunks by their hash on disk, the working folder made from them, and the files a job leaves.

Nothing is written on a peer's word: chunk bytes must have the hash they are stored under, a
manifest passes `core.manifest.validate` before its first byte is written, and a working folder
appears under its name only when it is complete. There is no fsync: after a power loss a torn chunk
is found by the file's hash and thrown away, and the jobs that ran are gone anyway. This module
does not know jobs, peers or who may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from gpulayer_mesh.core.copies import FileKey, Stamp
from gpulayer_mesh.core.jobspec import OUTPUTS_MAX, STAYED_MAX, OutputFile, Outputs, Stayed
from gpulayer_mesh.core.manifest import (
    CHUNK_BYTES,
    FILES_MAX,
    PATH_MAX,
    Entry,
    EntryKind,
    Manifest,
    unique_chunks,
    validate,
)
from gpulayer_mesh.errors import BundleError, GpuLayerError, NotFoundError, RemoteProtocolError
from gpulayer_mesh.files import remove_file

log = logging.getLogger("gpulayer.store")

QUOTA_BYTES = 10 * 1024**3  # five of the largest bundles; more saves uploads, costs disk
# A job may not fill the disk: a tenth of it stays free, but not more than this on large ones.
RESERVE_BYTES = 5 * 1024**3

PINNED = "pinned"  # in a job's folder: files that are being copied, by hash

_READ_BYTES = 1024 * 1024
_KINDS = (
    (stat.S_ISLNK, "it is a symbolic link"),
    (stat.S_ISFIFO, "it is a named pipe"),
    (stat.S_ISSOCK, "it is a socket"),
)
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ChunkStore:
    """Chunks under `root/<2 hex>/<hex>`; one process at a time uses a root.

    `put` and `wait_for` belong to one event loop; the others block and may run in threads.
    """

    def __init__(self, root: Path, *, quota_bytes: int = QUOTA_BYTES) -> None:
        self._root = root
        self._new = root / "new"  # half-written chunks; those of an earlier process are rubbish
        self._quota_bytes = quota_bytes
        self._waiting: dict[bytes, list[asyncio.Future[None]]] = {}
        self._new.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in self._new.iterdir():
            remove_file(path)

    def has(self, sha256: bytes) -> bool:
        return self._path(sha256).exists()

    def missing(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Return those that are not here, in their order."""
        return [sha256 for sha256 in hashes if not self.has(sha256)]

    def read(self, sha256: bytes) -> bytes:
        """Return a chunk's bytes.

        Raises:
            NotFoundError: it is not here.
        """
        try:
            return self._path(sha256).read_bytes()
        except FileNotFoundError:
            raise NotFoundError(f"chunk {sha256.hex()[:8]} is not here") from None

    async def put(self, sha256: bytes, data: bytes) -> None:
        """Store a chunk and wake who waits for it.

        Raises:
            RemoteProtocolError: too long, or the bytes have another hash.
            GpuLayerError: the disk refuses.
        """
        if len(data) > CHUNK_BYTES:
            raise RemoteProtocolError(f"chunk of {len(data)} bytes exceeds {CHUNK_BYTES}")
        await asyncio.to_thread(self._write, sha256, data)
        for waiter in self._waiting.pop(sha256, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, sha256: bytes, deadline_s: float) -> bool:
        """Wait until a chunk is here; False when the deadline came first."""
        if self.has(sha256):
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sha256, []).append(waiter)
        try:
            async with asyncio.timeout(deadline_s):
                await waiter
        except TimeoutError:
            return self.has(sha256)
        finally:
            waiters = self._waiting.get(sha256, [])
            if waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiting[sha256]
        return True

    def prune(self, *, keep: Collection[bytes]) -> int:
        """Delete the longest unused chunks above the quota; return the bytes freed."""
        found = []
        for folder in self._root.iterdir():
            if len(folder.name) != 2:
                continue
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    about = path.stat()
                    found.append((about.st_mtime_ns, about.st_size, path))
        surplus = sum(size for _, size, _ in found) - self._quota_bytes
        freed = 0
        for _, size, path in sorted(found):
            if freed >= surplus:
                break
            if bytes.fromhex(path.name) not in keep:
                path.unlink(missing_ok=True)
                freed += size
        return freed

    def materialise(self, manifest: Manifest, work_dir: Path) -> None:
        """Write the whole tree, or nothing.

        Raises:
            RemoteProtocolError: the manifest breaks a rule.
            BundleError: chunks are missing or damaged, or the disk has no room.
        """
        validate(manifest)
        if missing := self.missing(unique_chunks(manifest)):
            raise BundleError(f"{len(missing)} chunks are missing, first {missing[0].hex()[:8]}")
        check_space(work_dir.parent, manifest.size)
        fresh = Path(tempfile.mkdtemp(prefix=".work-", dir=work_dir.parent))  # 0700
        try:
            root = os.open(fresh, _DIR)
            try:
                for entry in manifest.entries:
                    self._write_entry(root, entry)
            finally:
                os.close(root)
            fresh.rename(work_dir)
        except OSError as exc:
            raise BundleError(f"cannot write the working folder: {exc}") from exc
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _write_entry(self, root: int, entry: Entry) -> None:
        *parents, name = entry.path.split("/")
        if entry.kind is EntryKind.DIR:
            os.close(make_dirs(root, [*parents, name]))
            return
        folder = make_dirs(root, parents)
        try:
            fd = os.open(name, _NEW, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
        with open(fd, "wb") as file:
            digest = hashlib.sha256()
            for chunk in entry.chunks:
                data = self.read(chunk)
                os.utime(self._path(chunk))
                digest.update(data)
                file.write(data)
            if digest.digest() != entry.sha256 or file.tell() != entry.size:
                self._drop_damaged(entry)
                raise BundleError(f"file {entry.path!r} does not have the hash the job names")
            os.fchmod(fd, 0o755 if entry.executable else 0o644)

    def _drop_damaged(self, entry: Entry) -> None:
        for chunk in entry.chunks:
            if hashlib.sha256(self.read(chunk)).digest() != chunk:
                log.warning("chunk %s is damaged on disk and was removed", chunk.hex()[:8])
                self._path(chunk).unlink(missing_ok=True)

    def _write(self, sha256: bytes, data: bytes) -> None:
        if hashlib.sha256(data).digest() != sha256:
            raise RemoteProtocolError(f"chunk {sha256.hex()[:8]} has another hash")
        path = self._path(sha256)
        try:
            fd, name = tempfile.mkstemp(dir=self._new)
            try:
                with open(fd, "wb") as file:
                    file.write(data)
                path.parent.mkdir(exist_ok=True, mode=0o700)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as exc:
            raise GpuLayerError(f"cannot store a chunk: {exc}") from exc

    def _path(self, sha256: bytes) -> Path:
        name = sha256.hex()
        return self._root / name[:2] / name

    # Static, so that whoever was given a store needs no import of this module.

    @staticmethod
    def scan_outputs(job_dir: Path, manifest: Manifest, first_rank: int) -> Outputs:
        """List what a job has made here: `out/rank<k>/`, and new or changed files of `work/`.

        Hashes every file listed. Links, devices, sockets, names that are no text and what exceeds
        100,000 files stay, with the reason; compiled Python does so without a word.
        """
        shipped = {entry.path: entry for entry in manifest.entries}
        found: list[OutputFile] = []
        stayed: list[Stayed] = []
        more = 0

        def stay(rank: int, path: str, problem: str) -> None:
            nonlocal more
            if len(stayed) < STAYED_MAX:
                stayed.append(Stayed(rank, os.fsencode(path)[:PATH_MAX], problem))
            else:
                more += 1

        for area, rank, path, problem in _candidates(job_dir, first_rank):
            if problem or len(found) >= OUTPUTS_MAX:
                stay(rank, path, problem or f"there are more than {OUTPUTS_MAX} files")
                continue
            try:
                with open(ChunkStore.open_output(job_dir, area, rank, path), "rb") as file:
                    digest, size = hashlib.sha256(), 0
                    runs = _runs(os.fstat(file.fileno()))
                    while data := file.read(_READ_BYTES):
                        digest.update(data)
                        size += len(data)
            except (OSError, NotFoundError) as e:
                if not isinstance(e.__cause__, FileNotFoundError):  # the job may still run
                    stay(rank, path, "the agent cannot read it")
                continue
            known = shipped.get(path) if area == "work" else None
            if known is None or known.sha256 != digest.digest():
                found.append(OutputFile(area, rank, path, size, digest.digest(), runs))
        return Outputs(tuple(found), tuple(stayed), more)

    @staticmethod
    def stamp_outputs(job_dir: Path, ranks: range) -> dict[FileKey, Stamp]:
        """Look at what `scan_outputs` would list, and at shipped files, without reading any.

        Args:
            ranks: those of this node; what else lies beside their output folders stays.
        """
        found: dict[FileKey, Stamp] = {}
        for area, rank, path, problem in _candidates(job_dir, ranks[0]):
            if problem or rank not in ranks:
                continue
            if len(found) >= FILES_MAX + OUTPUTS_MAX:
                break
            with contextlib.suppress(OSError):  # the job removes files as it likes
                about = os.lstat(f"{_area_dir(job_dir, area, rank)}/{path}")
                if stat.S_ISREG(about.st_mode):
                    found[area, rank, path] = _stamp(about)
        return found

    @staticmethod
    def hash_output(
        job_dir: Path, key: FileKey, *, may_grow: bool, stopped: Callable[[], bool]
    ) -> tuple[Stamp, bytes, bool] | None:
        """Hash one file as it is now and pin it: a link to it under its hash.

        Args:
            may_grow: what is appended meanwhile does not count.
            stopped: asked between pieces.

        Returns:
            Its stamp, the hash of as many bytes as that says, and whether it is pinned; None if it
            cannot be read, has changed while it was, or nobody waits any more.
        """
        try:
            with open(ChunkStore.open_output(job_dir, *key), "rb", buffering=0) as file:
                before = _stamp(os.fstat(file.fileno()))
                digest, left = hashlib.sha256(), before.size
                while left and not stopped() and (data := file.read(min(left, _READ_BYTES))):
                    digest.update(data)
                    left -= len(data)
                after = _stamp(os.fstat(file.fileno()))
        except (OSError, NotFoundError):
            return None
        same = after.size >= before.size if may_grow else after == before
        if not same or left:
            return None
        sha256 = digest.digest()
        return before, sha256, ChunkStore._pin(job_dir, key, before.inode, sha256)

    @staticmethod
    def _pin(job_dir: Path, key: FileKey, inode: int, sha256: bytes) -> bool:
        area, rank, path = key
        pin = job_dir / PINNED / sha256.hex()
        try:
            pin.parent.mkdir(mode=0o700, exist_ok=True)
            fresh = pin.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            os.link(f"{_area_dir(job_dir, area, rank)}/{path}", fresh, follow_symlinks=False)
            if fresh.lstat().st_ino != inode:  # replaced since
                fresh.unlink()
                return False
            fresh.replace(pin)
            fresh.unlink(missing_ok=True)  # it was the same file already: rename does nothing
        except OSError:  # another file system, or one without links
            return False
        return True

    @staticmethod
    def unpin(job_dir: Path, *, keep: Collection[bytes] = ()) -> None:
        """Remove the pins of a job that nobody needs any more."""
        names = {sha256.hex() for sha256 in keep}
        with contextlib.suppress(FileNotFoundError):
            for pin in os.scandir(job_dir / PINNED):
                if pin.name not in names:
                    os.unlink(pin.path)
            if not names:
                os.rmdir(job_dir / PINNED)

    @staticmethod
    def open_pinned(job_dir: Path, sha256: str) -> int | None:
        """Open a pinned file by its hash in hex; None if there is none."""
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            return None
        try:
            return os.open(job_dir / PINNED / sha256, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None

    @staticmethod
    def open_output(job_dir: Path, area: str, rank: int, path: str) -> int:
        """Open one output file for reading; return its descriptor.

        Follows no link, so it cannot leave the job's folder.

        Raises:
            NotFoundError: no such regular file.
        """
        *parents, name = path.split("/")
        if area not in ("out", "work") or {"", ".", ".."} & {*parents, name} or "\0" in path:
            raise NotFoundError(f"no output file {path[:200]!r}")
        try:
            folder = os.open(_area_dir(job_dir, area, rank), _DIR)
            try:
                for part in parents:
                    inner = os.open(part, _DIR, dir_fd=folder)
                    os.close(folder)
                    folder = inner
                # O_NONBLOCK: a named pipe must not hold us up.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                fd = os.open(name, flags, dir_fd=folder)
            finally:
                os.close(folder)
        except (OSError, UnicodeEncodeError) as exc:
            raise NotFoundError(f"no output file {path[:200]!r}") from exc
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotFoundError(f"{path[:200]!r} is no regular file")
        return fd


def check_space(folder: Path, need_bytes: int) -> None:
    """Refuse what would fill the disk.

    Raises:
        BundleError: names free and needed space.
    """
    usage = shutil.disk_usage(folder)
    reserve = min(usage.total // 10, RESERVE_BYTES)
    if usage.free < need_bytes + reserve:
        raise BundleError(
            f"not enough disk space: {need_bytes // 2**20} MiB needed, {usage.free // 2**20} MiB "
            f"free, of which {reserve // 2**20} MiB stay reserved"
        )


def make_dirs(root: int, parts: list[str], mode: int = 0o755, *, instead: bool = False) -> int:
    """Make and open a folder below `root`, one part at a time; return its descriptor.

    Args:
        instead: of whatever is there under the name of a folder and is none.
    """
    folder = os.dup(root)
    for part in parts:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, mode, dir_fd=folder)
            try:
                inner = os.open(part, _DIR, dir_fd=folder)
            except OSError as e:  # a symbolic link is ENOTDIR or ELOOP
                if not instead or e.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                os.unlink(part, dir_fd=folder)
                os.mkdir(part, mode, dir_fd=folder)
                inner = os.open(part, _DIR, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


def _stamp(about: os.stat_result) -> Stamp:
    whole = about.st_ctime_ns > about.st_mtime_ns
    return Stamp(about.st_size, about.st_mtime_ns, about.st_ino, _runs(about), whole)


def _runs(about: os.stat_result) -> bool:
    return bool(about.st_mode & stat.S_IXUSR)


def _area_dir(job_dir: Path, area: str, rank: int) -> Path:
    return job_dir / "out" / f"rank{rank}" if area == "out" else job_dir / "work"


def _candidates(job_dir: Path, first_rank: int) -> Iterator[tuple[str, int, str, str]]:
    """Yield area, rank, path, and why it must stay ("": it need not)."""
    with contextlib.suppress(FileNotFoundError):
        names = [name[4:] for name in os.listdir(job_dir / "out") if name.startswith("rank")]
        for rank in sorted(int(name) for name in names if name.isdecimal()):
            for path, problem in _walk(_area_dir(job_dir, "out", rank)):
                yield "out", rank, path, problem
    for path, problem in _walk(job_dir / "work"):
        if "__pycache__" not in path.split("/") and not path.endswith(".pyc"):
            yield "work", first_rank, path, problem


def _walk(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the relative paths of everything but folders, sorted, and why it must stay.

    A folder that cannot be read or named on the wire is yielded itself.
    """
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except FileNotFoundError:
            continue
        except OSError:
            yield folder, "the agent cannot read it"
            continue
        folders = []
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if problem := _unnameable(path):
                yield path, problem
            elif entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif entry.is_file(follow_symlinks=False):
                yield path, ""
            else:
                yield path, _kind(entry)
        pending += reversed(folders)


def _unnameable(path: str) -> str:
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if len(raw) > PATH_MAX:
        return f"its path is longer than {PATH_MAX} bytes"
    if any(unicodedata.category(char) == "Cc" for char in path):
        return "its name contains a control character"
    return ""


def _kind(entry: os.DirEntry[str]) -> str:
    with contextlib.suppress(OSError):
        mode = entry.stat(follow_symlinks=False).st_mode
        return next((words for test, words in _KINDS if test(mode)), "it is a device")
    return "it is gone"
