"""From a signed spec to a job that runs: reserve, stage, pre-flight, go.

Whoever starts a job does this, a launcher as well as an agent. All of a job's nodes take part or
none: an error at any step gives back what was reserved. This module does not know how the nodes
were chosen, who may sign, nor how a node is reached (`Caller`) or where source lies (`Source`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from gpulayer_mesh.core import reach, wire
from gpulayer_mesh.core.jobspec import GoOrder, HostAddress, JobRecord, JobSpec
from gpulayer_mesh.core.reach import BULK_BYTES, Opened, Peer, Reached, Target
from gpulayer_mesh.core.types import Addresses, NodeId
from gpulayer_mesh.errors import GpuLayerError, PlacementError, Refusal, RemoteProtocolError
from gpulayer_mesh.groups import first_error, together

T = TypeVar("T")

RPC_S = 10.0  # one answer from a healthy agent takes milliseconds; a swapping one, seconds
PREFLIGHT_S = 15.0  # 2 s for the dials, the rest for `find_spec` on a cold disk
BULK_S = 30.0  # on top of it: a third of a megabyte at 16 kB/s, the slowest that is no failure
STAGE_FLOOR_BYTES_S = 500_000  # slowest link worth training over; a deadline, not a promise
STAGE_S = 60.0  # on top of the transfer: unpacking 100,000 files
CHUNK_S = 120.0  # to upload one, on a slow link that others share
UPLOADS = 4  # parallel chunk uploads: fills a 1 Gbit/s link through one TLS core
RENEW_S = 10.0  # between renewals of the reservations, which end after 30 s of silence


class Caller(Protocol):
    """What is asked of `MeshClient` here."""

    async def call(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,  # the body as it is, instead of `body` packed
        deadline_s: float = RPC_S,
    ) -> Any: ...

    def addresses(self, node: NodeId) -> Addresses: ...


class Source(Protocol):
    """What is asked of a packed folder here."""

    @property
    def manifest_bytes(self) -> bytes: ...

    @property
    def chunks(self) -> Sequence[bytes]: ...  # their hashes, each once, as `unique_chunks`

    def read_chunk(self, sha256: bytes) -> bytes: ...  # runs in a thread


async def reserve(caller: Caller, spec: JobSpec, signed: bytes) -> None:
    """Reserve all of a plan, or give back what was granted and raise.

    Args:
        signed: the spec as its author signed it; each node checks that.

    Raises:
        PlacementError, PlacementBusyError: a node cannot take its part, or not now.
        NotAllowedError, StoppedError, TransportError: what a node, or the way to it, answered.
    """
    body = {"spec": signed}
    path = f"/v1/jobs/{spec.id}/reserve"
    try:
        # All are waited for: a call that is cut short may still be granted after its release.
        answers = await asyncio.gather(
            *(caller.call(slot.node, "POST", path, body) for slot in spec.slots),
            return_exceptions=True,
        )
        if errors := [answer for answer in answers if isinstance(answer, BaseException)]:
            raise first_error(BaseExceptionGroup("reserve", errors))
    except BaseException:
        await asyncio.shield(release(caller, spec, going=False))
        raise


async def start(
    caller: Caller, spec: JobSpec, signed: bytes, source: Source, secrets: Mapping[str, str]
) -> JobRecord:
    """Bring a job that holds its reservations to its start; its keeper has it then.

    Raises:
        As `prepare` and `go`; after any of them no node holds a lease or runs it.
    """
    order = await prepare(caller, spec, signed, source, secrets)
    try:
        return await go(caller, spec, order)
    except BaseException:
        await asyncio.shield(release(caller, spec, going=True))
        raise


async def prepare(
    caller: Caller,
    spec: JobSpec,
    signed: bytes,
    source: Source,
    secrets: Mapping[str, str],
    *,
    before_preflight: Callable[[], Awaitable[None]] | None = None,
) -> GoOrder:
    """Do all that has to be done before the order to go.

    Args:
        signed: the very bytes that were reserved with; they renew the reservations.
        before_preflight: what else the nodes need once the source is there. It may take its time:
            the reservations are renewed meanwhile.

    Raises:
        PlacementError: packages are missing.
        PathsCutError: nodes cannot reach each other.
        BundleError: a file changed after it was packed.
        GpuLayerError: what a node answered.
        Exception: what `before_preflight` raised. After any of them nothing is reserved.
    """
    try:
        renewing = asyncio.create_task(_renew(caller, spec, signed))
        try:
            await _stage(caller, spec, source)
            if before_preflight is not None:
                await before_preflight()
            return await preflight(caller, spec, secrets)
        finally:
            renewing.cancel()
    except BaseException:
        # whatever broke, Ctrl-C included: no node keeps a lease for a job that will not start
        await asyncio.shield(release(caller, spec, going=False))
        raise


async def go(caller: Caller, spec: JobSpec, order: GoOrder) -> JobRecord:
    """Give the order. Where the answer is lost, the job may run all the same.

    Raises:
        GpuLayerError: what the keeper answered, or the way to it.
    """
    path = f"/v1/jobs/{spec.id}/go"
    record = await caller.call(spec.slots[0].node, "POST", path, order, deadline_s=RPC_S)
    return wire.decode_as(JobRecord, record)


async def release(caller: Caller, spec: JobSpec, *, going: bool) -> None:
    """Give the reservations back.

    Args:
        going: the keeper may have the order to go, after which a release means nothing.
    """
    if going:
        with contextlib.suppress(GpuLayerError):
            order = {"grace_s": 0.0, "kill": True}
            path = f"/v1/jobs/{spec.id}/stop"
            await caller.call(spec.slots[0].node, "POST", path, order, deadline_s=3.0)

    async def one(node: NodeId) -> None:
        path, order = f"/v1/jobs/{spec.id}/release", {"attempt": spec.attempt, "going": going}
        await caller.call(node, "POST", path, order, deadline_s=3.0)

    await asyncio.gather(*(one(slot.node) for slot in spec.slots), return_exceptions=True)


async def _renew(caller: Caller, spec: JobSpec, signed: bytes) -> None:
    """Keep the reservations of nodes that are ready while a slow one is still being prepared."""
    body = {"spec": signed}
    path = f"/v1/jobs/{spec.id}/reserve"

    async def one(node: NodeId) -> None:
        await caller.call(node, "POST", path, body, deadline_s=RENEW_S)

    while True:
        await asyncio.sleep(RENEW_S)
        # One that does not answer shows in what is being done with it.
        await asyncio.gather(*(one(slot.node) for slot in spec.slots), return_exceptions=True)


async def _on_all(spec: JobSpec, call: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
    """Run one call per slot at once; the first error ends the others and is raised plainly."""
    return await together(*(call(i) for i in range(len(spec.slots))))


async def _stage(caller: Caller, spec: JobSpec, source: Source) -> None:
    """Bring the bundle to every node with about one upload in total.

    Each chunk that nobody has is uploaded to one node, dealt out in turn; the nodes fetch the rest
    from each other while the uploads still run.
    """
    nodes = [slot.node for slot in spec.slots]
    path = f"/v1/jobs/{spec.id}"
    answers = await _on_all(
        spec,
        lambda i: caller.call(
            nodes[i], "POST", f"{path}/manifest", raw=source.manifest_bytes, deadline_s=60.0
        ),
    )
    missing = [frozenset(answer["missing"]) for answer in answers]
    owners, uploads = deal_chunks(source.chunks, missing)
    order = {
        "sources": [HostAddress(node, caller.addresses(node)) for node in nodes],
        "owners": owners,
    }
    limit_s = STAGE_S + spec.bundle_bytes / STAGE_FLOOR_BYTES_S
    gate = asyncio.Semaphore(UPLOADS)

    async def upload(chunk: bytes, owner: int) -> None:
        async with gate:
            data = await asyncio.to_thread(source.read_chunk, chunk)
            await caller.call(
                nodes[owner],
                "PUT",
                f"/v1/chunks/{chunk.hex()}?job={spec.id}",
                raw=data,
                deadline_s=CHUNK_S,
            )

    stage = [
        caller.call(node, "POST", f"{path}/stage", order, deadline_s=limit_s) for node in nodes
    ]
    await together(*stage, *(upload(chunk, owner) for chunk, owner in uploads))


def deal_chunks(
    chunks: Sequence[bytes], missing: Sequence[frozenset[bytes]]
) -> tuple[list[int], list[tuple[bytes, int]]]:
    """Decide who holds each chunk first: a node that has it already, else each in turn.

    Returns the owner's slot index per chunk, and the uploads (chunk, owner) that are needed.
    """
    owners: list[int] = []
    uploads: list[tuple[bytes, int]] = []
    for number, chunk in enumerate(chunks):
        holders = [i for i, lacking in enumerate(missing) if chunk not in lacking]
        if holders:
            owners.append(holders[number % len(holders)])
        else:
            owner = len(uploads) % len(missing)
            owners.append(owner)
            uploads.append((chunk, owner))
    return owners, uploads


async def preflight(caller: Caller, spec: JobSpec, secrets: Mapping[str, str]) -> GoOrder:
    """Prove before the start that imports resolve and that every pair of nodes can connect.

    Raises:
        PlacementError: names each node and what is wrong with it.
        PathsCutError: names each pair that cannot.
    """
    opened = await _open(caller, spec)
    lacking = [
        Refusal(slot.name, "cannot import " + ", ".join(one.missing), for_ever=True)
        for slot, one in zip(spec.slots, opened, strict=True)
        if one.missing
    ]
    if lacking:
        raise PlacementError(
            f"{spec.name} imports packages that are not installed on every node",
            refusals=tuple(lacking),
            hint="pip install them into the environment of gpulayer-agent on those machines",
        )
    hosts = ["127.0.0.1"] if len(opened) == 1 else await _meet(caller, spec, opened)
    path = f"/v1/jobs/{spec.id}/port"
    port = await caller.call(spec.slots[0].node, "POST", path, {"host": hosts[0]})
    return GoOrder(hosts[0], port["port"], tuple(hosts), dict(secrets))


async def meet(caller: Caller, spec: JobSpec) -> None:
    """Prove that every pair of a reserved job's nodes can connect now; nothing has to be staged.

    Raises:
        PathsCutError: names each pair that cannot.
    """
    if len(spec.slots) > 1:
        await _meet(caller, spec, await _open(caller, spec))


async def _open(caller: Caller, spec: JobSpec) -> list[Opened]:
    """Have every node listen for a while, and say what it cannot import."""
    path = f"/v1/jobs/{spec.id}/preflight/open"

    async def one(i: int) -> Opened:
        plain = await caller.call(spec.slots[i].node, "POST", path, {}, deadline_s=PREFLIGHT_S)
        return wire.decode_as(Opened, plain)

    return await _on_all(spec, one)


async def _meet(caller: Caller, spec: JobSpec, opened: Sequence[Opened]) -> list[str]:
    """Return for each node an address over which all others can send to it.

    Raises:
        PathsCutError: there is none.
    """
    addresses = [tuple(a.host for a in caller.addresses(slot.node)) for slot in spec.slots]
    answered = reach.pairs(len(opened))
    paths = await _try(
        caller,
        spec,
        {
            (i, j): Target(spec.slots[j].node, addresses[j], opened[j].ports[:1], opened[j].nonce)
            for i, j in answered
        },
    )
    proven: set[tuple[int, int, str]] = set()
    # As often as a node has addresses that answer and then carry nothing; mostly once.
    while all(hosts := reach.common_hosts(paths, len(opened))):
        carried = await _try(
            caller,
            spec,
            {
                (i, j): Target(
                    spec.slots[j].node, (hosts[j],), opened[j].ports, opened[j].nonce, BULK_BYTES
                )
                for i, j in answered
                if (i, j, hosts[j]) not in proven
            },
        )
        proven |= {(i, j, hosts[j]) for (i, j), one in carried.items() if one.hosts}
        lost = {
            (i, j): reach.without(paths[i, j], hosts[j], one)
            for (i, j), one in carried.items()
            if not one.hosts
        }
        if not lost:
            return hosts
        paths |= lost
    raise reach.refusal(
        [
            Peer(slot.node, slot.name, next(iter(hosts), ""), one.first_port, one.last_port)
            for slot, hosts, one in zip(spec.slots, addresses, opened, strict=True)
        ],
        paths,
    )


async def _try(
    caller: Caller, spec: JobSpec, targets: Mapping[tuple[int, int], Target]
) -> dict[tuple[int, int], Reached]:
    """Have each node try its targets, all at once."""
    limit_s = PREFLIGHT_S + BULK_S * (1 + len(spec.slots) // reach.AT_ONCE)

    async def one(i: int) -> dict[tuple[int, int], Reached]:
        keys = [key for key in targets if key[0] == i]
        if not keys:
            return {}
        body = {"targets": [targets[key] for key in keys]}
        path = f"/v1/jobs/{spec.id}/preflight/check"
        plain = await caller.call(spec.slots[i].node, "POST", path, body, deadline_s=limit_s)
        found = wire.decode_as(tuple[Reached, ...], plain)
        if [one.node for one in found] != [targets[key].node for key in keys]:
            raise RemoteProtocolError(f"{spec.slots[i].name} answered for other nodes than asked")
        return dict(zip(keys, found, strict=True))

    found = {}
    for some in await _on_all(spec, one):
        found.update(some)
    return found
