"""Restarts on this agent: agreements, next attempts, copies for them, and jobs it only watches.

As a voter it remembers for ever whom it is bound to, one file per attempt. As the keeper of a job
that failed, or in the place of a keeper that fell silent, it sees to the next attempt (how:
`succession`). As a witness, a voter on which nothing of the job runs, it holds what the next
attempt needs and listens to the keeper. This module does not decide when a job has failed (`job`).

    attempts/ID   the attempt of this id that this node is bound to (its signed chain)
    watches/ID    a job that this node watches
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from gpulayer_mesh import starting
from gpulayer_mesh.core import hosted, job, restarts, wire
from gpulayer_mesh.core.copies import HeldSlot, ranks_of
from gpulayer_mesh.core.jobspec import (
    JOB_ID_ALPHABET,
    JOB_ID_CHARS,
    GoOrder,
    HostAddress,
    JobRecord,
    JobSpec,
    JobState,
    Outputs,
)
from gpulayer_mesh.core.manifest import open_manifest, unique_chunks
from gpulayer_mesh.core.restoring import SlotSource, newest_copy, plan_restore
from gpulayer_mesh.core.types import Addresses, NodeId, Role, Snapshot
from gpulayer_mesh.errors import (
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    RemoteProtocolError,
)
from gpulayer_mesh.runtime.background import Background
from gpulayer_mesh.runtime.copies import Copies
from gpulayer_mesh.runtime.door import DoorRequest, Route
from gpulayer_mesh.runtime.hosting import JobHost
from gpulayer_mesh.runtime.livejob import CHAIN_MAX, LiveJob, Signed, open_signed, sign_change
from gpulayer_mesh.runtime.store import ChunkStore
from gpulayer_mesh.runtime.succession import NotRestartedError, Succession, bind, stand_in

log = logging.getLogger("gpulayer.restarts")

FILES_S = 120.0  # to list what was made, which is hashed, and to bring it; more, with its size
ANSWER_S = 2.0  # a node that is to take part answers a ping by then
AGREE_S = 5.0
RECORD_S = 3.0
LISTING_S = 30.0  # a list of copies, 20 MB at most
WATCH_S = 5.0  # between words of a keeper to its witnesses; `job` counts 20 s of silence
FORGET_S = 10 * 86400.0  # after the longest that a job's record is kept


@dataclass(frozen=True, slots=True)
class _Word:
    """What a keeper tells its witnesses."""

    spec: Annotated[bytes, Meta(max_length=CHAIN_MAX)]
    secretive: bool
    sources: Annotated[tuple[HostAddress, ...], Meta(max_length=1024)]


@dataclass(frozen=True, slots=True)
class _Drop:
    forget: bool  # the copies as well


@dataclass(slots=True)
class _Watch:
    """A job that this node watches without a part in it."""

    attempt: Signed
    secretive: bool
    task: asyncio.Task[None] | None = None
    succeeding: bool = False  # no word of the keeper ends it any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What restarts need of the agent, besides its jobs."""

    key: Ed25519PrivateKey
    copies: Copies
    snapshot: Callable[[], Snapshot]
    addresses: Callable[[NodeId], Addresses]  # of any member, this node included; at most 8


class Restarts:
    """`hosting.Restarting` of one agent. `adopt` comes after the host's; `close` it."""

    def __init__(self, host: JobHost, means: Means) -> None:
        self._host = host
        self._site = host.site
        self._means = means
        self._attempts = host.site.home / "attempts"
        self._watches_dir = host.site.home / "watches"
        self._copying: dict[str, asyncio.Task[None]] = {}
        self._seeing: dict[str, asyncio.Task[None]] = {}  # job -> to its next attempt
        self._watches: dict[str, _Watch] = {}
        self._heard: dict[str, float] = {}  # of an attempt, as its witness; monotonic
        self._background = Background(log)

    def routes(self) -> list[Route]:
        attempt, watch = "/v1/attempts/{id}", "/v1/watches/{id}"
        return [
            Route("GET", attempt, self.get_bound),
            Route("POST", attempt + "/agree", self.agree, None, CHAIN_MAX + 1024),
            Route("POST", attempt + "/hold", self.hold, None, CHAIN_MAX + 1024),
            Route("POST", attempt + "/stop", self.stop_elsewhere),
            Route("POST", watch, self.watch, None, CHAIN_MAX + 1024 * 1024),
            Route("POST", watch + "/drop", self.drop_watch),
        ]

    def adopt(self) -> None:
        """Take up what an earlier agent watched."""
        for folder in (self._attempts, self._watches_dir):
            folder.mkdir(mode=0o700, exist_ok=True)
            for path in folder.glob("*.tmp"):
                path.unlink()
        for path in self._watches_dir.iterdir():
            try:
                plain = wire.unpack(path.read_bytes(), max_bytes=2 * CHAIN_MAX)
                word = wire.decode_as(_Word, plain)
                self._watch(open_signed(word.spec, self._site.book), word)
            except (GpuLayerError, OSError) as error:
                log.warning("job %s is not watched any more: %s", path.name, error)
                path.unlink(missing_ok=True)

    async def close(self) -> None:
        """End what still runs."""
        await self._background.close()

    # --- what the host tells ---------------------------------------------------------------------

    def part_began(self, one: LiveJob) -> None:
        """Copy what the ranks write to a second machine; as the keeper, tell the witnesses."""
        assert one.manifest is not None  # it was staged
        work = [
            self._means.copies.follow(
                job_dir=one.path,
                spec=one.spec,
                signed=one.attempt.chain,
                slot=one.slot,
                manifest=one.manifest,
            )
        ]
        if one.keeper == self._site.node:
            work += [self._tell(one, node) for node in self._witnesses(one.spec)]

        async def all_of_it() -> None:
            await asyncio.gather(*work)

        self._copying[one.spec.id] = self._background.spawn(all_of_it())

    def part_ended(self, one: LiveJob) -> None:
        task = self._copying.pop(one.spec.id, None)
        if task is not None:
            task.cancel()

    def begin(self, one: LiveJob, after_s: float) -> None:
        """Start the next attempt, as the keeper."""

        async def see() -> None:
            await asyncio.sleep(after_s)
            successor = await self._succeed(one.attempt, one.secrets, job.RESTART_S)
            if one.kept is not None and one.kept.state is JobState.RESTARTING:
                self._host.on_keeper(one, job.Restarted(successor))
            else:  # stopped meanwhile
                await self._stop(successor)

        self._see(one.spec.id, see(), lambda why: self._host.on_keeper(one, job.NotRestarted(why)))

    def chunks(self) -> Collection[bytes]:
        """Return what of the store the next attempts of watched jobs need."""
        return self._means.copies.chunks()

    def forget(self, old: Collection[str]) -> None:
        """Drop the copies of these jobs, and what nobody can ask for any more."""
        copies = self._means.copies
        stale = {
            ident
            for ident in copies.jobs() - self._host.jobs.keys() - self._watches.keys()
            if copies.age_s(ident) > FORGET_S
        }
        for ident in stale | (copies.jobs() & set(old)):
            copies.forget(ident)
        for path in self._attempts.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > FORGET_S:
                    path.unlink()

    def give_up(self, one: LiveJob) -> None:
        """Whoever sees to the next attempt here need not any more."""
        task = self._seeing.pop(one.spec.id, None)
        if task is not None:
            task.cancel()

    def job_over(self, one: LiveJob, record: JobRecord) -> None:
        """The witnesses of a job that this node kept need not watch it any more."""
        path = f"/v1/watches/{one.spec.id}/drop"
        # What a witness holds is all there is until the next attempt has copies of its own.
        body = wire.pack({"forget": not record.successor})
        self._background.spawn(self._ask_all(self._witnesses(one.spec), path, body))

    def stand_in(self, one: LiveJob) -> None:
        """See to the next attempt of a job whose keeper fell silent."""

        async def see() -> None:
            found = await stand_in(
                self._ground(one.secrets),
                one.attempt,
                after_s=job.GONE_S - hosted.KEEPER_SILENT_S,
                seconds=job.RESTART_S,
                succeed=lambda left_s: self._succeed(one.attempt, one.secrets, left_s),
            )
            over = replace(one.current_record(), state=JobState.FAILED, ended_age_s=0.0)
            if isinstance(found, str):
                self._host.take_record(one, replace(over, successor=found))
            else:
                self._host.take_record(one, found)

        def failed(why: str) -> None:
            record = one.current_record()
            failure = record.failure
            if failure is not None:
                failure = replace(failure, reason=f"{failure.reason}; not restarted: {why}")
            over = replace(record, state=JobState.FAILED, failure=failure, ended_age_s=0.0)
            self._host.take_record(one, over)

        self._see(one.spec.id, see(), failed)

    async def stop(self, one: LiveJob, by: str) -> bool:
        """Stop seeing to the next attempt, here and where another voter does.

        Returns whether this is such a job; then its record says what came of it.
        """
        if one.current_record().state is not JobState.RESTARTING or one.kept is not None:
            return False
        self.give_up(one)
        record = one.current_record()
        self._host.take_record(
            one,
            replace(
                record,
                state=JobState.CANCELLED,
                failure=None,
                cause=f"stopped by {by}",
                ended_age_s=0.0,
            ),
        )
        others = [node for node in one.spec.voters if node != self._site.node]
        await self._ask_all(others, f"/v1/attempts/{one.spec.id}/stop", wire.pack({}))
        return True

    # --- a voter ---------------------------------------------------------------------------------

    async def get_bound(self, request: DoorRequest) -> dict[str, Any]:
        """Say which attempt of an id this node is bound to."""
        bound = self._bound(request.params["id"])
        if bound is None:
            return {"spec": None}
        if request.peer not in bound.history[-1].voters:
            raise NotAllowedError("only voters may ask for that")
        return {"spec": bound.chain}

    async def agree(self, request: DoorRequest) -> dict[str, Any]:
        """Bind this node to an attempt, or say to which it is bound."""
        attempt = self._asked_for(request)
        return {"spec": (await asyncio.to_thread(self._bind, attempt)).chain}

    async def hold(self, request: DoorRequest) -> None:
        """Count an attempt that is about to start as running, for a while."""
        attempt = self._asked_for(request)
        if self._site.node not in self._witnesses(attempt.spec):
            raise NotAllowedError(f"{self._site.name} is no witness of that job")
        self._refuse_superseded(attempt.spec)
        self._heard[attempt.spec.id] = time.monotonic()

    def _asked_for(self, request: DoorRequest) -> Signed:
        body = wire.unpack(request.body, max_bytes=CHAIN_MAX + 1024)
        chain = body.get("spec") if isinstance(body, dict) else None
        if not isinstance(chain, bytes):
            raise RemoteProtocolError("the signed attempt is missing")
        attempt = open_signed(chain, self._site.book)
        if attempt.signer != request.peer or attempt.spec.id != request.params["id"]:
            raise NotAllowedError("only who signed an attempt may ask for it")
        return attempt

    def _refuse_superseded(self, spec: JobSpec) -> None:
        if self.superseded(spec):
            raise RemoteProtocolError(f"{self._site.name} agreed to an attempt after {spec.id}")

    def superseded(self, spec: JobSpec) -> bool:
        """Return whether this node is bound to an attempt after this one."""
        origin = restarts.origin_of(spec)
        later = range(spec.restart + 1, spec.restarts + 1)
        return any((self._attempts / restarts.attempt_id(origin, n)).exists() for n in later)

    def _bind(self, attempt: Signed) -> Signed:
        before = attempt.history[-1].id if attempt.history else ""
        part, heard = self._host.jobs.get(before), self._heard.get(before)
        bound = bind(
            attempt,
            self._bound(attempt.spec.id),
            part=None if part is None else part.machine.phase,
            heard_s=None if heard is None else time.monotonic() - heard,
            node=self._site.node,
            name=self._site.name,
        )
        if bound is attempt:
            _write(self._attempts / attempt.spec.id, attempt.chain)
        return bound

    def _bound(self, attempt: str) -> Signed | None:
        """Return the attempt of this id that this node is bound to."""
        if not is_job_id(attempt):
            return None
        try:
            return open_signed((self._attempts / attempt).read_bytes(), self._site.book)
        except FileNotFoundError:
            return None

    def may_read(self, ident: str, peer: NodeId, roles: tuple[Role, ...]) -> bool:
        """Return whether a member may see what a job has made: its own, its voters, and the nodes
        of the attempts after it."""
        one, watch = self._host.jobs.get(ident), self._watches.get(ident)
        spec = one.spec if one is not None else watch.attempt.spec if watch is not None else None
        if spec is None:
            return False
        if Role.ADMIN in roles or peer == spec.submitter:
            return True
        if peer in spec.voters or any(peer == slot.node for slot in spec.slots):
            return True
        origin = restarts.origin_of(spec)
        for number in range(spec.restart + 1, spec.restarts + 1):
            with contextlib.suppress(RemoteProtocolError):  # its signer was removed
                later = self._bound(restarts.attempt_id(origin, number))
                if later is not None and any(peer == slot.node for slot in later.spec.slots):
                    return True
        return False

    async def stop_elsewhere(self, request: DoorRequest) -> None:
        """Another voter was asked to stop the job whose next attempt this node may see to."""
        ident = request.params["id"]
        one, watch = self._host.jobs.get(ident), self._watches.get(ident)
        spec = one.spec if one is not None else watch.attempt.spec if watch is not None else None
        if spec is None:
            raise NotFoundError(f"no job {ident[:16]!r} on {self._site.name}")
        if request.peer not in (*spec.voters, spec.submitter):
            raise NotAllowedError("this member may not do that to this job")
        if one is not None:
            if one.kept is None and one.current_record().state is JobState.RESTARTING:
                self.give_up(one)
        elif watch is not None:
            self._unwatch(ident, forget=False)

    # --- a witness -------------------------------------------------------------------------------

    async def watch(self, request: DoorRequest) -> None:
        """The keeper is there; from its first word on this node watches the job."""
        plain = wire.unpack(request.body, max_bytes=CHAIN_MAX + 1024 * 1024)
        word = wire.decode_as(_Word, plain)
        ident = request.params["id"]
        known = self._watches.get(ident)
        if known is None or known.attempt.chain != word.spec:
            attempt = open_signed(word.spec, self._site.book)
            spec = attempt.spec
            if spec.id != ident or self._site.node not in self._witnesses(spec):
                raise NotAllowedError(f"{self._site.name} is no witness of that job")
            if request.peer != spec.slots[0].node or spec.restart >= spec.restarts:
                raise NotAllowedError("only the keeper of a job has it watched")
            self._refuse_superseded(spec)
            _write(self._watches_dir / ident, request.body)
            known = self._watch(attempt, word)
        elif request.peer != known.attempt.spec.slots[0].node:
            raise NotAllowedError("only the keeper of a job has it watched")
        self._heard[ident] = time.monotonic()

    async def drop_watch(self, request: DoorRequest) -> None:
        """The keeper says that the job is over; safe to repeat."""
        order = wire.decode_as(_Drop, wire.unpack(request.body))
        watch = self._watches.get(request.params["id"])
        if watch is not None:
            if request.peer != watch.attempt.spec.slots[0].node:
                raise NotAllowedError("only the keeper of a job has it watched")
            self._unwatch(watch.attempt.spec.id, forget=order.forget)

    def _watch(self, attempt: Signed, word: _Word) -> _Watch:
        watch = _Watch(attempt, word.secretive)
        self._heard[attempt.spec.id] = time.monotonic()  # at the latest: an agent started anew
        self._watches[attempt.spec.id] = watch
        watch.task = self._background.spawn(self._listen(watch, word.sources))
        return watch

    def _unwatch(self, ident: str, *, forget: bool) -> None:
        watch = self._watches.pop(ident, None)
        if watch is None:
            return
        if watch.task is not None:
            watch.task.cancel()
        (self._watches_dir / ident).unlink(missing_ok=True)
        if forget:
            self._means.copies.forget(ident)

    async def _listen(self, watch: _Watch, sources: tuple[HostAddress, ...]) -> None:
        """Fetch what the next attempt needs, then wait for the keeper's silence."""
        spec = watch.attempt.spec
        fetching = self._background.spawn(self._fetch_bundle(spec, sources))
        try:
            while True:
                silent_s = time.monotonic() - self._heard[spec.id]
                if silent_s < hosted.KEEPER_SILENT_S:
                    await asyncio.sleep(hosted.KEEPER_SILENT_S - silent_s)
                elif not await self._keeper_is_back(watch, silent_s):
                    break
        finally:
            fetching.cancel()
        self._watches.pop(spec.id, None)
        (self._watches_dir / spec.id).unlink(missing_ok=True)

    async def _keeper_is_back(self, watch: _Watch, silent_s: float) -> bool:
        """See to the next attempt; whether the keeper spoke before that was begun."""
        spec = watch.attempt.spec
        secrets: Mapping[str, str] | None = None if watch.secretive else {}
        heard = self._heard[spec.id]
        waits = max(0.0, job.GONE_S - silent_s)

        async def succeed(left_s: float) -> str:
            watch.succeeding = True
            return await self._succeed(watch.attempt, secrets, left_s)

        standing = self._background.spawn(
            stand_in(
                self._ground(secrets),
                watch.attempt,
                after_s=waits,
                seconds=job.RESTART_S,
                succeed=succeed,
            )
        )
        try:
            while not standing.done():
                await asyncio.wait([standing], timeout=1.0)
                if self._heard[spec.id] != heard and not watch.succeeding:
                    return True
            found = standing.result()
        except NotRestartedError as error:
            log.warning("job %s, which fell silent, is not restarted: %s", spec.id, error)
        else:
            what = found if isinstance(found, str) else found.state.value
            log.info("job %s, which fell silent: %s", spec.id, what)
        finally:
            standing.cancel()
        return False

    async def _fetch_bundle(self, spec: JobSpec, sources: tuple[HostAddress, ...]) -> None:
        while True:
            try:
                await self._means.copies.fetch_bundle(spec, sources)
                return
            except GpuLayerError as error:
                log.warning("job %s: its source cannot be had: %s", spec.id, error)
                await asyncio.sleep(WATCH_S)

    # --- as a keeper -----------------------------------------------------------------------------

    async def _tell(self, one: LiveJob, witness: NodeId) -> None:
        """Have a witness watch the job, and tell the keeper's machine that it does."""
        sources = tuple(
            HostAddress(slot.node, self._means.addresses(slot.node)) for slot in one.spec.slots
        )
        body = wire.pack(
            _Word(one.attempt.chain, bool(one.secrets) or one.folder.secretive, sources)
        )
        path = f"/v1/watches/{one.spec.id}"
        while True:
            with contextlib.suppress(GpuLayerError):
                await self._site.call(witness, "POST", path, body, deadline_s=WATCH_S)
                if one.kept is not None:
                    self._host.on_keeper(one, job.Watched(witness))
            await asyncio.sleep(WATCH_S)

    @staticmethod
    def _witnesses(spec: JobSpec) -> tuple[NodeId, ...]:
        return spec.voters[len(spec.slots) :] if spec.restart < spec.restarts else ()

    # --- the next attempt ------------------------------------------------------------------------

    def _see(self, ident: str, work: Any, failed: Callable[[str], None]) -> None:
        async def see() -> None:
            try:
                await work
            except GpuLayerError as error:
                log.warning("job %s is not restarted: %s", ident, error)
                failed(error.message)
            finally:
                self._seeing.pop(ident, None)

        self._seeing[ident] = self._background.spawn(see())

    async def _succeed(self, ran: Signed, secrets: Mapping[str, str] | None, seconds: float) -> str:
        if secrets is None:
            raise NotRestartedError(
                "its secrets were only in the memory of an agent that is not there any more"
            )
        log.info("job %s: starting its next attempt", ran.spec.id)
        return await Succession(self._ground(secrets), ran, seconds=seconds).run()

    def _ground(self, secrets: Mapping[str, str] | None) -> _Ground:
        return _Ground(self._host, self._means, self._bind, self._bound, secrets or {})

    async def _stop(self, ident: str) -> None:
        bound = self._bound(ident)
        order = wire.pack({"grace_s": None, "kill": False})
        if bound is not None:
            keeper = bound.spec.slots[0].node
            await self._site.call(keeper, "POST", f"/v1/jobs/{ident}/stop", order)

    async def _ask_all(self, nodes: Iterable[NodeId], path: str, body: bytes) -> None:
        """Tell several nodes the same; one that does not hear it finds out by itself."""
        await asyncio.gather(
            *(self._site.call(node, "POST", path, body, deadline_s=RECORD_S) for node in nodes),
            return_exceptions=True,
        )


class _Ground:
    """`succession.Ground` of this node.

    Args:
        bind: have this node agree.
        bound: what it agreed to.
    """

    def __init__(
        self,
        host: JobHost,
        means: Means,
        bind: Callable[[Signed], Signed],
        bound: Callable[[str], Signed | None],
        secrets: Mapping[str, str],
    ) -> None:
        self._host = host
        self._site = host.site
        self._means = means
        self._bind = bind
        self._bound = bound
        self._secrets = secrets
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

    async def agree(self, node: NodeId, attempt: Signed) -> Signed:
        if node == self.node:
            return await asyncio.to_thread(self._bind, attempt)
        path = f"/v1/attempts/{attempt.spec.id}/agree"
        plain = await self.call(node, "POST", path, {"spec": attempt.chain}, deadline_s=AGREE_S)
        found = self._opened(plain, attempt.spec.id)
        if found is None:
            raise RemoteProtocolError("a voter answered nothing")
        return found

    async def bound(self, node: NodeId, ident: str) -> Signed | None:
        if node == self.node:
            return await asyncio.to_thread(self._bound, ident)
        plain = await self.call(node, "GET", f"/v1/attempts/{ident}", deadline_s=AGREE_S)
        return self._opened(plain, ident)

    def _opened(self, plain: Any, ident: str) -> Signed | None:
        """Open the attempt that a voter says it is bound to."""
        answer = wire.decode_as(_Bound, plain)
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
        return await starting.prepare(
            self,
            attempt.spec,
            attempt.chain,
            source,
            self._secrets,
            before_preflight=lambda: self._restore(attempt.spec, ran),
        )

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
            packed = one.folder.manifest_bytes()
        if packed is None:
            raise NotFoundError(f"the source of job {ran.spec.id} is not here")
        manifest = open_manifest(packed, sha256=ran.spec.manifest)
        return _Stored(packed, tuple(unique_chunks(manifest)), self._site.store)

    async def _restore(self, spec: JobSpec, ran: Signed) -> None:
        """Have every node of the next attempt fetch what the one before has left."""
        slots = range(len(spec.slots))
        found = await asyncio.gather(*(self._left(ran, slot) for slot in slots))
        path = f"/v1/jobs/{spec.id}/restore"

        async def one(slot: int) -> None:
            for ident in {found[slot][0], found[0][0]}:
                parts = [source if of == ident else None for of, source in found]
                for order in plan_restore(ident, parts, slot):
                    size = sum(file.size for file in order.files)
                    limit_s = FILES_S + size / starting.STAGE_FLOOR_BYTES_S
                    node = spec.slots[slot].node
                    await self.call(node, "POST", path, order, deadline_s=limit_s)

        results = await asyncio.gather(*map(one, slots), return_exceptions=True)
        if errors := [error for error in results if isinstance(error, BaseException)]:
            raise starting.first_error(BaseExceptionGroup("restore", errors))

    async def _left(self, ran: Signed, slot: int) -> tuple[str, SlotSource | None]:
        """Find the newest that a slot has left; also return of which attempt.

        One that was lost at once had no copies yet, but the one before it had.
        """
        for spec in (ran.spec, *reversed(ran.history)):
            source = await self._left_by(spec, slot)
            if source is not None:
                return spec.id, source
        log.warning("job %s: nothing is left of what slot %d has made", ran.spec.id, slot)
        return ran.spec.id, None

    async def _left_by(self, ran: JobSpec, slot: int) -> SlotSource | None:
        """Find what an attempt has left: on its node, or else the newest copy on a voter."""
        node = ran.slots[slot].node
        here = HostAddress(node, self.addresses(node))
        if await self.answers(node):
            with contextlib.suppress(GpuLayerError):
                path = f"/v1/jobs/{ran.id}/files"
                plain = await self.call(node, "GET", path, deadline_s=FILES_S)
                ranks = ranks_of(ran, slot)
                files = wire.decode_as(Outputs, plain).files
                return SlotSource(here, tuple(f for f in files if f.rank in ranks), None)

        async def held(voter: NodeId) -> list[tuple[HostAddress, HeldSlot]]:
            path = f"/v1/copies/{ran.id}?slot={slot}"
            try:
                plain = await self.call(voter, "GET", path, deadline_s=LISTING_S)
                lists = wire.decode_as(tuple[HeldSlot, ...], plain)
            except GpuLayerError:
                return []
            return [(HostAddress(voter, self.addresses(voter)), one) for one in lists]

        answers = await asyncio.gather(*map(held, ran.voters))
        return newest_copy(slot, [one for answer in answers for one in answer])


@dataclass(frozen=True, slots=True)
class _Bound:
    spec: Annotated[bytes, Meta(max_length=CHAIN_MAX)] | None


@dataclass(frozen=True, slots=True)
class _Stored:
    """`starting.Source` from the chunk store."""

    manifest_bytes: bytes
    chunks: tuple[bytes, ...]
    store: ChunkStore

    def read_chunk(self, sha256: bytes) -> bytes:
        return self.store.read(sha256)


def is_job_id(text: str) -> bool:
    """Whether a text may be a job's id, and so the name of a file here."""
    return len(text) == JOB_ID_CHARS and set(text) <= set(JOB_ID_ALPHABET)


def _write(path: Path, data: bytes) -> None:
    """Write what must survive a crash of this machine.

    Raises:
        GpuLayerError: the disk refuses.
    """
    fresh = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise GpuLayerError(f"cannot write {path.name}: {error}") from error
