"""Bring the files of the attempt before to this node, each checked by its hash.

Files appear in place one by one, whole; what is there already stays as it is, so an order may be
repeated. Nothing is written outside the job's folder, whatever an order says. This module does not
know who may order this, or how it was decided (`core.restoring`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlencode

from gpulayer_mesh.core.restoring import RestoreFile, RestoreOrder
from gpulayer_mesh.core.types import NodeId
from gpulayer_mesh.errors import GpuLayerError, NotFoundError, RemoteProtocolError, TransportError
from gpulayer_mesh.groups import together
from gpulayer_mesh.runtime.peers import PeerStream
from gpulayer_mesh.runtime.store import check_space, make_dirs
from gpulayer_mesh.runtime.transfer import read_pieces, receive

FETCHES = 4  # files at once; one connection does not fill 10 Gbit/s
TRIES = 2  # of a source elsewhere: a connection may break
PROGRESS_S = 1.0  # between two calls; a reservation lasts 30 s

_TEMPORARY = ".restoring-"  # folders for what is on its way, beside `work`
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HASHED_BYTES = 1024 * 1024


class Restoring:
    """Fetches files for the next attempts of this node's jobs.

    Args:
        node: this one.
        stream: `Peers.stream`.
        open_live: open a file of a job that was here: job, area, rank, path; raises NotFoundError.
        open_held: `Copies.open_held`.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        stream: PeerStream,
        open_live: Callable[[str, str, int, str], int],
        open_held: Callable[[str, bytes], int | None],
    ) -> None:
        self._node = node
        self._stream = stream
        self._open_live = open_live
        self._open_held = open_held

    async def fetch(
        self,
        order: RestoreOrder,
        job_dir: Path,
        *,
        ranks: range,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Return when every file is in `job_dir`, and `job_dir/restored` is there.

        One at a time for one folder.

        Args:
            ranks: of this node's slot.
            progress: called about once a second while bytes arrive.

        Raises:
            RemoteProtocolError: the order breaks a rule; nothing was written.
            TransportError: a file cannot be had as it was listed.
            BundleError: the disk has no room.
            GpuLayerError: the disk refuses.
        """
        order.check(ranks)
        try:
            if not await asyncio.to_thread((job_dir / "work").is_dir):
                # Made from here it would look as if the source were in it.
                raise RemoteProtocolError("restore before the working folder is there")
            await _Fetch(self, order, job_dir, _throttled(progress)).run()
        except OSError as e:
            raise GpuLayerError(f"cannot restore files: {e}") from e

    def sources(
        self, order: RestoreOrder, file: RestoreFile
    ) -> list[Callable[[], AsyncGenerator[bytes, None]]]:
        """Return the ways to get a file, the nearest first."""
        found: list[Callable[[], AsyncGenerator[bytes, None]]] = []
        host = order.sources[file.source]

        def open_held() -> int:
            fd = self._open_held(order.job, file.sha256)
            if fd is None:
                raise NotFoundError(f"content {file.sha256.hex()[:8]} is not here")
            return fd

        def open_live() -> int:
            return self._open_live(order.job, file.from_area, file.rank, file.path)

        def remote() -> AsyncGenerator[bytes, None]:
            query = {"area": file.from_area, "rank": file.rank, "path": file.path, "offset": 0}
            copies = {} if file.slot is None else {"slot": file.slot}
            kind = "jobs" if file.slot is None else "copies"
            path = f"/v1/{kind}/{order.job}/file?{urlencode(query | copies, quote_via=quote)}"
            return self._stream(host.node, "GET", path, addresses=host.addresses)

        found.append(lambda: read_pieces(open_held))
        if host.node != self._node:
            found += [remote] * TRIES
        elif file.slot is None:
            found.append(lambda: read_pieces(open_live))
        return found


class _Fetch:
    """One order being carried out."""

    def __init__(
        self,
        restoring: Restoring,
        order: RestoreOrder,
        job_dir: Path,
        progress: Callable[[], object],
    ) -> None:
        self._restoring = restoring
        self._order = order
        self._job_dir = job_dir
        self._progress = progress
        self._gate = asyncio.Semaphore(FETCHES)

    async def run(self) -> None:
        try:
            self._fresh = await asyncio.to_thread(_make_temporary, self._job_dir)
            os.close(self._folder(["restored"]))
            right: dict[bytes, RestoreFile] = {}  # content -> where it is already
            missing: dict[bytes, list[RestoreFile]] = {}
            for file in self._order.files:
                if await asyncio.to_thread(self._is_right, file):
                    right.setdefault(file.sha256, file)
                else:
                    missing.setdefault(file.sha256, []).append(file)
                self._progress()
            need_bytes = sum(file.size for files in missing.values() for file in files)
            if missing:
                await asyncio.to_thread(check_space, self._job_dir, need_bytes)
            await together(
                *(self._bring(files, right.get(sha256)) for sha256, files in missing.items())
            )
        finally:
            await asyncio.to_thread(_remove_temporary, self._job_dir)

    async def _bring(self, files: Sequence[RestoreFile], there: RestoreFile | None) -> None:
        """Fetch content once, for all files that have it."""
        async with self._gate:
            for file in files:
                ways = self._restoring.sources(self._order, file)
                if there is not None:
                    ways.insert(0, lambda there=there: read_pieces(lambda: self._open(there)))  # type: ignore[misc]
                await self._bring_one(file, ways)
                there = file

    async def _bring_one(
        self, file: RestoreFile, ways: Sequence[Callable[[], AsyncGenerator[bytes, None]]]
    ) -> None:
        problem: GpuLayerError = TransportError("no source")
        for way in ways:
            handle, name = tempfile.mkstemp(dir=self._fresh)  # 0600
            try:
                with _writing(handle) as out:
                    await receive(
                        way(), out, size=file.size, sha256=file.sha256, progress=self._progress
                    )
                await asyncio.to_thread(self._place, file, name)
                return
            except GpuLayerError as e:
                problem = e
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
        raise TransportError(f"{file.path[:200]!r} cannot be had: {problem.message}")

    # --- blocking --------------------------------------------------------------------------------

    def _is_right(self, file: RestoreFile) -> bool:
        with contextlib.suppress(OSError, NotFoundError), open(self._open(file), "rb") as found:
            if os.fstat(found.fileno()).st_size == file.size:
                digest = hashlib.sha256()
                while data := found.read(_HASHED_BYTES):
                    digest.update(data)
                return digest.digest() == file.sha256
        return False

    def _open(self, file: RestoreFile) -> int:
        """Open what is in a file's place; follows no link.

        Raises:
            NotFoundError: no such regular file.
        """
        *parents, name = _parts(file)
        folder = -1
        try:
            folder = os.open(self._job_dir, _DIR)
            for part in parents:
                inner = os.open(part, _DIR, dir_fd=folder)
                os.close(folder)
                folder = inner
            fd = os.open(name, _READ, dir_fd=folder)
        except OSError as e:
            raise NotFoundError(f"no file {file.path[:200]!r}") from e
        finally:
            if folder >= 0:
                os.close(folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotFoundError(f"{file.path[:200]!r} is no regular file")
        return fd

    def _folder(self, parts: list[str]) -> int:
        """Make and open a folder of the job; whoever waits may be gone, so none stays open."""
        root = os.open(self._job_dir, _DIR)
        try:
            return make_dirs(root, parts, 0o700, instead=True)
        finally:
            os.close(root)

    def _place(self, file: RestoreFile, fresh: str) -> None:
        """Give a complete file its name; what was shipped under it lends its mode."""
        *parents, name = _parts(file)
        folder = self._folder(parents)
        mode = 0o600
        try:
            with contextlib.suppress(FileNotFoundError):
                there = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
                if stat.S_ISDIR(there):
                    shutil.rmtree(name, dir_fd=folder)
                elif stat.S_ISREG(there):
                    mode = there & 0o777
            os.chmod(fresh, mode | stat.S_IXUSR if file.executable else mode)
            os.rename(fresh, name, dst_dir_fd=folder)
        finally:
            os.close(folder)


def _parts(file: RestoreFile) -> list[str]:
    area = ["out", f"rank{file.rank}"] if file.area == "out" else [file.area]
    return [*area, *file.path.split("/")]


def _writing(handle: int) -> BinaryIO:
    return open(handle, "wb")


def _make_temporary(job_dir: Path) -> str:
    _remove_temporary(job_dir)  # of an earlier agent
    return tempfile.mkdtemp(prefix=_TEMPORARY, dir=job_dir)  # 0700


def _remove_temporary(job_dir: Path) -> None:
    for path in job_dir.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def _throttled(call: Callable[[], object]) -> Callable[[], None]:
    last = time.monotonic()

    def sometimes() -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            call()

    return sometimes
