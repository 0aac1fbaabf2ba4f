"""One node's means to start the next attempt of a job: `succession.Ground` over the mesh.

What is asked of others goes through their doors as a launcher's requests do; what the attempt
before has left is looked for on its nodes, and where one is silent, among the copies that voters
hold. This module does not decide when, or whether, there is a next attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from gpulayer_mesh import starting
from gpulayer_mesh.core import restarts, wire
from gpulayer_mesh.core.copies import HeldSlot, ranks_of
from gpulayer_mesh.core.jobspec import GoOrder, HostAddress, JobRecord, JobSpec, Outputs
from gpulayer_mesh.core.manifest import open_manifest, unique_chunks
from gpulayer_mesh.core.restoring import SlotSource, newest_copy, plan_restore, without
from gpulayer_mesh.core.types import Addresses, NodeId, NodeState, Snapshot
from gpulayer_mesh.errors import GpuLayerError, NotFoundError, RemoteProtocolError
from gpulayer_mesh.groups import first_error
from gpulayer_mesh.runtime.agreements import Agreements
from gpulayer_mesh.runtime.copies import Copies
from gpulayer_mesh.runtime.hosting import JobHost
from gpulayer_mesh.runtime.livejob import CHAIN_MAX, Signed, open_signed, sign_change
from gpulayer_mesh.runtime.store import ChunkStore
from gpulayer_mesh.runtime.succession import ASK_S, EndedError

log = logging.getLogger("gpulayer.restarts")

FILES_S = 900.0  # to list what was made, which is hashed: 100 GB from a slow disk
RESTORE_S = 120.0  # to bring it; more, with its size
ANSWER_S = 2.0  # a node that is to take part answers a ping by then
AGREE_S = 5.0
RECORD_S = ASK_S
LISTING_S = 30.0  # a list of copies, 20 MB at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What restarts need of the agent, besides its jobs."""

    key: Ed25519PrivateKey
    copies: Copies
    snapshot: Callable[[], Snapshot]
    addresses: Callable[[NodeId], Addresses]  # of any member, this node included; at most 8


class MeshGround:
    """`succession.Ground` of this node.

    Args:
        secrets: for the ranks.
        keeper_speaks: as the method, by an attempt's id.
        left: whether nobody has to follow an attempt, as `JobRecord.left`.
    """

    def __init__(
        self,
        host: JobHost,
        means: Means,
        agreements: Agreements,
        secrets: Mapping[str, str],
        keeper_speaks: Callable[[str], bool],
        left: Callable[[str], bool],
    ) -> None:
        self._host = host
        self._site = host.site
        self._means = means
        self._agreements = agreements
        self._secrets = secrets
        self._keeper_speaks = keeper_speaks
        self._launcher_left = left
        self._standing: dict[str, tuple[Signed, set[NodeId]]] = {}  # attempt it follows -> where
        self.node = host.site.node

    # As `starting.Caller`.

    async def call(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        deadline_s: float = starting.RPC_S,
    ) -> Any:
        data = raw if raw is not None else b"" if body is None else wire.pack(body)
        answer = await self._site.call(node, method, path, data, deadline_s=deadline_s)
        return wire.unpack(answer, max_bytes=wire.BODY_MAX) if answer else None

    def addresses(self, node: NodeId) -> Addresses:
        return self._means.addresses(node)

    # As `succession.Ground`.

    def snapshot(self) -> Snapshot:
        return self._means.snapshot()

    def sign(self, before: Signed, change: restarts.Change) -> Signed:
        return sign_change(self._means.key, self._site.book.mesh, self.node, before, change)

    async def stand(self, before: Signed) -> None:
        snapshot = self.snapshot()
        alive = {m.node for m in snapshot.members if m.state is NodeState.ALIVE}
        nodes = alive & set(restarts.candidates(before.spec, snapshot))
        self._standing.setdefault(before.spec.id, (before, set()))[1].update(nodes)
        await self._stands(before, nodes, stands=True)

    async def leave(self) -> None:
        while self._standing:
            _, (before, nodes) = self._standing.popitem()
            await self._stands(before, nodes, stands=False)

    async def _stands(self, before: Signed, nodes: Iterable[NodeId], *, stands: bool) -> None:
        """Tell nodes; one that does not hear it takes other jobs, or waits until it is outdated."""
        ident = restarts.attempt_id(restarts.origin_of(before.spec), before.spec.restart + 1)
        path = f"/v1/attempts/{ident}/stand"
        body = {"spec": before.chain, "stands": stands}
        calls = (self.call(node, "POST", path, body, deadline_s=ANSWER_S) for node in nodes)
        await asyncio.gather(*calls, return_exceptions=True)

    def keeper_speaks(self, attempt: Signed) -> bool:
        return self._keeper_speaks(attempt.spec.id)

    async def answers(self, node: NodeId) -> bool:
        try:
            await self.call(node, "GET", "/v1/ping", deadline_s=ANSWER_S)
        except GpuLayerError:
            return False
        return True

    async def reserve(self, attempt: Signed) -> None:
        await starting.reserve(self, attempt.spec, attempt.chain)

    async def release(self, attempt: Signed) -> None:
        await starting.release(self, attempt.spec, going=False)

    async def meet(self, attempt: Signed) -> None:
        await starting.meet(self, attempt.spec)

    async def agree(self, node: NodeId, attempt: Signed) -> Signed:
        if node == self.node:
            return self._agreements.bind(attempt)
        path = f"/v1/attempts/{attempt.spec.id}/agree"
        plain = await self.call(node, "POST", path, {"spec": attempt.chain}, deadline_s=AGREE_S)
        found = self._opened(plain, attempt.spec.id)
        if found is None:
            raise RemoteProtocolError("a voter answered nothing")
        return found

    async def bound(self, node: NodeId, ident: str) -> Signed | None:
        if node == self.node:
            if self._agreements.closed(ident):
                raise EndedError()
            return self._agreements.bound(ident)
        plain = await self.call(node, "GET", f"/v1/attempts/{ident}", deadline_s=AGREE_S)
        return self._opened(plain, ident)

    def _opened(self, plain: Any, ident: str) -> Signed | None:
        """Open the attempt that a voter says it is bound to."""
        answer = wire.decode_as(_Bound, plain)
        if answer.ended:
            raise EndedError()
        if answer.spec is None:
            return None
        found = open_signed(answer.spec, self._site.book)
        if found.spec.id != ident:
            raise RemoteProtocolError("a voter answered with another attempt")
        return found

    async def record(self, node: NodeId, job: str) -> JobRecord:
        if node == self.node:
            one = self._host.jobs.get(job)
            if one is None:
                raise NotFoundError(f"no job {job} here")
            return one.current_record()
        plain = await self.call(node, "GET", f"/v1/jobs/{job}", deadline_s=RECORD_S)
        return wire.decode_as(JobRecord, plain)

    async def prepare(self, attempt: Signed, ran: Signed) -> GoOrder:
        source = await asyncio.to_thread(self._source, ran)
        order = await starting.prepare(
            self,
            attempt.spec,
            attempt.chain,
            source,
            self._secrets,
            before_preflight=lambda: self._restore(attempt, ran),
        )
        return replace(order, left=self._launcher_left(ran.spec.id))

    async def hold(self, node: NodeId, attempt: Signed) -> None:
        path = f"/v1/attempts/{attempt.spec.id}/hold"
        await self.call(node, "POST", path, {"spec": attempt.chain}, deadline_s=AGREE_S)

    async def go(self, attempt: Signed, order: GoOrder) -> None:
        try:
            await starting.go(self, attempt.spec, order)
        except asyncio.CancelledError:  # nobody wants it any more
            await asyncio.shield(starting.release(self, attempt.spec, going=True))
            raise

    def _source(self, ran: Signed) -> _Stored:
        """Return what was shipped with the first attempt."""
        one = self._host.jobs.get(ran.spec.id)
        packed = self._means.copies.manifest(ran.spec.id)
        if one is not None and one.manifest is not None:
            try:
                packed = one.folder.manifest_bytes()
            except OSError as error:
                raise GpuLayerError(f"the source cannot be read: {error}") from error
        if packed is None:
            raise NotFoundError(f"the source of job {ran.spec.id} is not here")
        manifest = open_manifest(packed, sha256=ran.spec.manifest)
        return _Stored(packed, tuple(unique_chunks(manifest)), self._site.store)

    async def _restore(self, attempt: Signed, ran: Signed) -> None:
        """Have every node of the next attempt fetch what the one before has left."""
        spec = attempt.spec
        slots = range(len(spec.slots))
        found = await asyncio.gather(*(self._left(attempt, ran, slot) for slot in slots))
        path = f"/v1/jobs/{spec.id}/restore"

        async def one(slot: int) -> None:
            # Files of rank 0 go to every node, the others to their own.
            for ident in dict.fromkeys((*found[slot], *found[0])):
                parts: list[SlotSource | None] = [None] * len(found)
                parts[slot], parts[0] = found[slot].get(ident), found[0].get(ident)
                for order in plan_restore(ident, parts, slot):
                    size = sum(file.size for file in order.files)
                    limit_s = RESTORE_S + size / starting.STAGE_FLOOR_BYTES_S
                    node = spec.slots[slot].node
                    await self.call(node, "POST", path, order, deadline_s=limit_s)

        results = await asyncio.gather(*map(one, slots), return_exceptions=True)
        if errors := [error for error in results if isinstance(error, BaseException)]:
            raise first_error(BaseExceptionGroup("restore", errors))

    async def _let_read(self, node: NodeId, attempt: Signed) -> None:
        """Have a node let this one, and those of an attempt, read what it has of the job."""
        path = f"/v1/attempts/{attempt.spec.id}/read"
        await self.call(node, "POST", path, {"spec": attempt.chain}, deadline_s=AGREE_S)

    async def _left(self, attempt: Signed, ran: Signed, slot: int) -> dict[str, SlotSource]:
        """Find what a slot has left, by the attempt that it is of.

        An attempt that was lost early may have no copies yet of files that the one before it had:
        these are taken from that one, so what the later one had removed may be there again.
        """
        found: dict[str, SlotSource] = {}
        for spec in (ran.spec, *reversed(ran.history)):
            source = await self._left_by(attempt, spec, slot)
            if source is None:
                continue
            found[spec.id] = without(source, found.values())
            if source.slot is None:  # its node is there, and these are all
                break
        if not found:
            log.warning("job %s: nothing is left of what slot %d has made", ran.spec.id, slot)
            found[ran.spec.id] = SlotSource(HostAddress(self.node, ()), ())
        return found

    async def _left_by(self, attempt: Signed, ran: JobSpec, slot: int) -> SlotSource | None:
        """Find what an attempt has left: on its node, or else the newest copy on a voter."""
        node = ran.slots[slot].node
        here = HostAddress(node, self.addresses(node))
        path = f"/v1/jobs/{ran.id}/files"
        # Of a node that is there nothing older will do: an error ends this try.
        there = await self.answers(node)
        with contextlib.suppress(NotFoundError):
            if there:
                await self._let_read(node, attempt)
                plain = await self.call(node, "GET", path, deadline_s=FILES_S)
                ranks = ranks_of(ran, slot)
                files = wire.decode_as(Outputs, plain).files
                return SlotSource(here, tuple(f for f in files if f.rank in ranks), None)

        async def held(voter: NodeId) -> list[tuple[HostAddress, HeldSlot]]:
            path = f"/v1/copies/{ran.id}?slot={slot}"
            try:
                await self._let_read(voter, attempt)
                plain = await self.call(voter, "GET", path, deadline_s=LISTING_S)
                lists = wire.decode_as(tuple[HeldSlot, ...], plain)
            except GpuLayerError:
                return []
            return [(HostAddress(voter, self.addresses(voter)), one) for one in lists]

        voters = [voter for voter in ran.voters if voter != node or there]
        answers = await asyncio.gather(*map(held, voters))
        return newest_copy(slot, [one for answer in answers for one in answer])


@dataclass(frozen=True, slots=True)
class _Bound:
    spec: Annotated[bytes, Meta(max_length=CHAIN_MAX)] | None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class _Stored:
    """`starting.Source` from the chunk store."""

    manifest_bytes: bytes
    chunks: tuple[bytes, ...]
    store: ChunkStore

    def read_chunk(self, sha256: bytes) -> bytes:
        return self.store.read(sha256)
