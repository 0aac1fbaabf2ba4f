"""One file on its way: from a peer's answer or the disk to the disk, checked by size and hash.

It does not know where a file belongs; who asks gives it a name once it is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncGenerator, Callable
from typing import BinaryIO

from gpulayer_mesh.errors import RemoteProtocolError, TransportError

PIECE_BYTES = 256 * 1024  # of one read: bounded memory, few wake-ups
WRITE_BYTES = 1024 * 1024  # gathered for one write: a thread for each small piece costs more
PIECE_S = 30.0  # between two pieces; a disk that sleeps takes ten
BYTES_PER_S = 64 * 1024  # slowest transfer that we wait for, as at the door


async def receive(
    pieces: AsyncGenerator[bytes, None],
    file: BinaryIO,
    *,
    size: int,
    sha256: bytes,
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Write a stream's first `size` bytes to a file; closes the stream.

    What follows them is no error: a log may have grown since its hash was taken.

    Args:
        progress: called after each write.

    Raises:
        TransportError: it ended early, or is too slow.
        RemoteProtocolError: the bytes have another hash.
        OSError: the disk refuses.
    """
    digest, left = hashlib.sha256(), size
    gathered = bytearray()

    def flush(data: bytes) -> None:
        digest.update(data)
        file.write(data)

    try:
        async with (
            asyncio.timeout(PIECE_S + size / BYTES_PER_S),
            contextlib.aclosing(pieces),
        ):
            while left:
                async with asyncio.timeout(PIECE_S):
                    piece = await anext(pieces, b"")
                if not piece:
                    raise TransportError(f"a file ended {left} bytes early")
                gathered += piece[:left]
                left = max(0, left - len(piece))
                if len(gathered) >= WRITE_BYTES or not left:
                    await asyncio.to_thread(flush, bytes(gathered))
                    gathered.clear()
                    progress()
    except TimeoutError:
        raise TransportError(f"a file of {size} bytes came too slowly") from None
    if digest.digest() != sha256:
        raise RemoteProtocolError("a file does not have the hash it was listed with")
    await asyncio.to_thread(file.flush)


async def read_pieces(open_file: Callable[[], int], offset: int = 0) -> AsyncGenerator[bytes, None]:
    """Yield a file piece by piece.

    Args:
        open_file: returns its descriptor; called with the first piece.
    """
    with os.fdopen(open_file(), "rb") as file:
        file.seek(offset)
        while data := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield data
