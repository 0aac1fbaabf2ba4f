"""Bring a job's chunks to this node: from its owner first, from any other participant otherwise.

The launcher deals the chunks out (`owners`), uploads each to its owner only, and the nodes get the
rest from each other while uploads still run. Every chunk is checked by its hash, so it does not
matter who it comes from. This module does not know the job's rights or what chunks are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from gpulayer_mesh.core.jobspec import HostAddress
from gpulayer_mesh.core.types import NodeId
from gpulayer_mesh.errors import GpuLayerError, RemoteProtocolError, TransportError
from gpulayer_mesh.groups import together
from gpulayer_mesh.runtime.peers import PeerCall
from gpulayer_mesh.runtime.store import ChunkStore

FETCHES = 8  # parallel chunk downloads per job
CHUNK_WAIT_S = 60.0  # how long a peer may hold a chunk request until the chunk arrives
ANSWER_S = 60.0  # beyond that; eight chunks at once share a link of 1 Mbit/s
ROUNDS = 3  # tries over all sources before staging fails


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Who gets which chunk first."""

    sources: Annotated[tuple[HostAddress, ...], Meta(max_length=1024)]
    owners: Annotated[tuple[int, ...], Meta(max_length=200_000)]  # per unique chunk, a source

    def check(self, chunks: Collection[bytes], participants: Collection[NodeId]) -> None:
        """Raise RemoteProtocolError unless the order fits the job."""
        if len(self.owners) != len(chunks) or any(
            not 0 <= owner < len(self.sources) for owner in self.owners
        ):
            raise RemoteProtocolError("stage order does not fit the manifest")
        if any(source.node not in participants for source in self.sources):
            raise RemoteProtocolError("stage order names a node outside the job")


class Staging:
    """Fetches the chunks of one job.

    Args:
        progress: called with each chunk that arrived.
    """

    def __init__(
        self,
        order: StageOrder,
        *,
        job: str,
        node: NodeId,
        store: ChunkStore,
        call: PeerCall,
        progress: Callable[[], object],
    ) -> None:
        self._order = order
        self._job = job
        self._node = node
        self._store = store
        self._call = call
        self._progress = progress
        self._gate = asyncio.Semaphore(FETCHES)

    async def fetch(self, chunks: Collection[bytes]) -> None:
        """Return when every chunk is in the store.

        Raises:
            TransportError: one cannot be had.
            GpuLayerError: the disk refuses.
        """
        missing = [
            self._fetch_one(chunk, owner)
            for chunk, owner in zip(chunks, self._order.owners, strict=True)
            if not self._store.has(chunk)
        ]
        await together(*missing)

    async def _fetch_one(self, chunk: bytes, owner: int) -> None:
        async with self._gate:
            if self._order.sources[owner].node != self._node:
                await self._from_others(chunk, owner)
            elif not await self._store.wait_for(chunk, CHUNK_WAIT_S):  # from the launcher
                raise TransportError(f"chunk {chunk.hex()[:8]} was not uploaded")
        self._progress()

    async def _from_others(self, chunk: bytes, owner: int) -> None:
        first = self._order.sources[owner]
        others = [s for i, s in enumerate(self._order.sources) if i != owner]
        problem: GpuLayerError = TransportError("no source")
        for _ in range(ROUNDS):
            for source in (first, *others):
                if source.node == self._node:
                    continue
                wait_s = CHUNK_WAIT_S if source is first else 0.0
                try:
                    data = await self._call(
                        source.node,
                        "GET",
                        f"/v1/jobs/{self._job}/chunks/{chunk.hex()}?wait={wait_s:g}",
                        addresses=source.addresses,
                        deadline_s=wait_s + ANSWER_S,
                    )
                    await self._store.put(chunk, data)  # verifies the hash
                    return
                except GpuLayerError as e:
                    problem = e
        raise TransportError(f"chunk {chunk.hex()[:8]} cannot be had: {problem.message}")
