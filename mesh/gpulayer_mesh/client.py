"""A member's view of its mesh without an agent: find one, ask it, act on jobs.

Used by the commands and by the launcher. It speaks to the agents' doors with this machine's
identity and has no privilege of its own; it does not know how anything is printed or packed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.jobspec import (
    OVER,
    HostPhase,
    JobRecord,
    JobSpec,
    OutputFile,
    Outputs,
    RankState,
)
from gpulayer_mesh.core.logrecord import EVERY_LINE, LogPick, LogRecord, RecordParser
from gpulayer_mesh.core.restarts import attempt_id, has_begun, may_follow, origin_of
from gpulayer_mesh.core.tickets import RESTART, Standing, Ticket, positions
from gpulayer_mesh.core.types import Address, Addresses, NodeId, Role, Snapshot
from gpulayer_mesh.errors import (
    ConfigError,
    DiscoveryError,
    GpuLayerError,
    NoMeshError,
    NotAllowedError,
    NotFoundError,
    RemoteProtocolError,
    RemovedError,
    TransportError,
)
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime.dial import Dialer
from gpulayer_mesh.runtime.discovery import browse, mesh_tag
from gpulayer_mesh.runtime.interfaces import list_interfaces

T = TypeVar("T")

CALL_S = 10.0  # default deadline of one call
MDNS_AFTER_S = 0.3  # remembered addresses get this head start over multicast
SNAPSHOT_MAX = 16 * 1024 * 1024  # 1,024 members with full capabilities, 32 links of each
LOG_RETRY_S = (0.2, 0.5, 1.0)  # then each 1 s: the prompt waits for it where a node is lost
LOG_LATE_S = 10.0  # after the job's end, for an agent that is being restarted
FETCH_RETRY_S = (0.2, 1.0, 3.0)
RECORD_S = 5.0  # for one node's word on a job
NEXT_S = 1.0  # without it, the next node is asked as well
RETRY_FIND_S = 5.0
JOBS_S = 3.0  # a member that does not answer by then is left out of the list


@dataclass(frozen=True, slots=True)
class Queued:
    """A job that waits."""

    ticket: Ticket
    position: int  # 1: nobody goes before it
    nodes: tuple[NodeId, ...]  # where its ticket stands


class MeshClient:
    """One connection to the mesh; use as an async context manager."""

    def __init__(
        self, home: Path, identity: identities.Identity, mesh: identities.MeshFiles
    ) -> None:
        self.home = home
        self.identity = identity
        self.mesh = mesh
        self.book = mesh.book
        self.dialer = Dialer(
            context=identities.client_context(home),
            book=mesh.book,
            node=identity.node,
            on_roster=self._take_roster,
        )
        self.entry: NodeId = ""  # the member that answered first
        self._addresses: dict[NodeId, Addresses] = identities.load_peers(home)

    @classmethod
    async def connect(cls, home: Path, *, deadline_s: float = 5.0) -> MeshClient:
        """Find one reachable member: remembered addresses first, mDNS beside them.

        Raises:
            NoMeshError: this machine is in no mesh.
            RemovedError: it is no member any more, as it knew or has just heard.
            DiscoveryError: nobody answered in time.
        """
        identity = identities.load_or_create(home)
        mesh = identities.load_mesh(identity)
        if mesh is None:
            raise NoMeshError(
                "this machine belongs to no mesh yet",
                hint="gpulayer mesh create, then gpulayer mesh invite    (start a mesh here)\n"
                "gpulayer mesh join LINE                            (join one with its line)",
            )
        if identity.node not in mesh.book:
            raise RemovedError
        others = set(mesh.book.members) - {identity.node}
        if not others and not _own_agent(home):
            raise DiscoveryError(
                "the mesh has no other member yet, and no agent runs here",
                hint="gpulayer mesh invite    (then start gpulayer-agent with its line elsewhere)\n"
                "gpulayer-agent          (have this machine take part)",
            )
        client = cls(home, identity, mesh)
        try:
            await client.find_entry(deadline_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def __aenter__(self) -> MeshClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection and remember where members were reached."""
        members = {n: self.addresses(n) for n in self._addresses if n in self.book}
        identities.save_peers(self.home, members)
        await self.dialer.close()

    @property
    def name(self) -> str:
        """This machine's name in the roster."""
        entry = self.book.members.get(self.identity.node)
        return entry.name if entry else "unknown"

    def names(self) -> dict[NodeId, str]:
        """Return what the members are called."""
        return {node: entry.name for node, entry in self.book.members.items()}

    def addresses(self, node: NodeId) -> Addresses:
        """Return where a member may be reached, the proven address first."""
        proven = self.dialer.good_address(node)
        known = self._addresses.get(node, ())
        return known if proven is None else merged((proven,), known)

    async def call(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        deadline_s: float = CALL_S,
        max_bytes: int = wire.BODY_MAX,
    ) -> Any:
        """Make one request to a member's door and return the decoded answer."""
        data = raw if raw is not None else b"" if body is None else wire.pack(body)
        answer = await self.dialer.request(
            node,
            self.addresses(node),
            method,
            path,
            body=data,
            deadline_s=deadline_s,
            max_bytes=max_bytes,
        )
        return wire.unpack(answer, max_bytes=max_bytes) if answer else None

    async def snapshot(self) -> Snapshot:
        """Return what the entry member believes about everybody."""
        plain = await self.call(self.entry, "GET", "/v1/snapshot", max_bytes=SNAPSHOT_MAX)
        snapshot = wire.decode_as(Snapshot, plain)
        if any(not link.a < link.b < len(snapshot.members) for link in snapshot.links):
            raise RemoteProtocolError("a link between members that are not listed")
        for member in snapshot.members:
            if member.addresses:
                self._addresses[member.node] = merged(
                    self._addresses.get(member.node, ()), member.addresses
                )
        if snapshot.roster_epoch > self.book.epoch:
            signed = await self.dialer.request(
                self.entry, self.addresses(self.entry), "GET", "/v1/roster", deadline_s=CALL_S
            )
            self._take_roster(signed)
        return snapshot

    async def find_entry(self, deadline_s: float) -> None:
        """Find a member that answers, as `connect` does.

        Raises:
            DiscoveryError, NotAllowedError: as `connect`.
        """
        tries: set[asyncio.Task[Any]] = set()
        give_up = time.monotonic() + deadline_s

        async def ask(node: NodeId, addresses: Addresses) -> NodeId:
            await self.dialer.request(node, addresses, "GET", "/v1/ping", deadline_s=deadline_s)
            self._addresses[node] = merged(addresses, self._addresses.get(node, ()))
            return node

        found: asyncio.Queue[tuple[NodeId, Addresses]] = asyncio.Queue(maxsize=256)

        async def multicast() -> None:
            if tries:
                await asyncio.sleep(MDNS_AFTER_S)
            here = list_interfaces()
            async for candidate in browse(mesh_tag(self.mesh.mesh), here, deadline_s):
                node = self.book.hinted(candidate.node_hint)
                if node is not None and node != self.identity.node and not found.full():
                    found.put_nowait((node, candidate.addresses))

        for known, addresses in self._addresses.items():
            tries.add(asyncio.create_task(ask(known, addresses)))
        own_agent = _own_agent(self.home)
        if own_agent:
            tries.add(asyncio.create_task(ask(self.identity.node, own_agent)))
        browser = asyncio.create_task(multicast())
        getter = asyncio.create_task(found.get())
        refusal: NotAllowedError | None = None
        try:
            while (left := give_up - time.monotonic()) > 0:
                done: set[asyncio.Task[Any]]
                done, _ = await asyncio.wait(
                    {*tries, getter}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if getter in done:
                    found_node, where = getter.result()
                    tries.add(asyncio.create_task(ask(found_node, where)))
                    getter = asyncio.create_task(found.get())
                for task in done & tries:
                    tries.discard(task)
                    error = task.exception()
                    if error is None:
                        self.entry = task.result()
                        return
                    if isinstance(error, NotAllowedError):
                        refusal = error
                # One member's word that we were removed is enough: the mesh has signed it.
                if refusal is not None and (not tries or isinstance(refusal, RemovedError)):
                    raise refusal
        finally:
            browser.cancel()
            getter.cancel()
            for task in tries:
                task.cancel()
            await asyncio.gather(browser, getter, *tries, return_exceptions=True)
        if refusal is not None:  # of one; the others are silent
            raise refusal
        raise DiscoveryError(
            f"no member of the mesh answered within {deadline_s:g} s"
            + (f" ({len(self._addresses)} remembered)" if self._addresses else ""),
            hint="is gpulayer-agent running on the other machines, and is this one on their LAN?",
        )

    # -- roster ----------------------------------------------------------------------------------

    def _take_roster(self, signed: bytes) -> None:
        if self.book.offer(signed):
            with contextlib.suppress(OSError):  # then the next command is told again
                identities.save_roster(self.home, self.book)

    async def push_roster(self, signed: bytes) -> tuple[list[str], list[str]]:
        """Hand a new roster to every member; return the names reached and not reached."""
        entries = [e for e in self.book.members.values() if e.node != self.identity.node]

        async def one(node: NodeId) -> None:
            await self.dialer.request(
                node, self.addresses(node), "POST", "/v1/roster", body=signed, deadline_s=3.0
            )

        results = await asyncio.gather(*(one(e.node) for e in entries), return_exceptions=True)
        reached = [e.name for e, r in zip(entries, results, strict=True) if r is None]
        missed = [e.name for e, r in zip(entries, results, strict=True) if r is not None]
        return reached, missed

    async def find_again(self) -> None:
        """Look for another member to ask, after the one we asked fell silent.

        Raises:
            DiscoveryError, NotAllowedError: as `connect`.
        """
        await self.find_entry(RETRY_FIND_S)

    # -- the queue -------------------------------------------------------------------------------

    async def tickets(self, node: NodeId) -> list[Ticket]:
        """Return the tickets of jobs that wait on a node, oldest first."""
        plain = await self.call(node, "GET", "/v1/tickets", deadline_s=JOBS_S)
        return wire.decode_as(list[Ticket], plain)

    async def stand(self, node: NodeId, ticket: Ticket) -> Standing:
        """Register a ticket on a node or renew it."""
        path = f"/v1/tickets/{ticket.job}"
        plain = await self.call(node, "POST", path, ticket, deadline_s=JOBS_S)
        return wire.decode_as(Standing, plain)

    async def drop_ticket(self, node: NodeId, job: str) -> None:
        """Take our ticket off a node."""
        await self.call(node, "POST", f"/v1/tickets/{job}/drop", {}, deadline_s=JOBS_S)

    async def queued(self) -> list[Queued]:
        """Return the jobs that wait, the next one first."""
        snapshot = await self.snapshot()
        nodes = [m.node for m in snapshot.members if m.addresses]
        answers = await asyncio.gather(*map(self.tickets, nodes), return_exceptions=True)
        queues = dict(_answered(nodes, answers))
        places = positions(queues.values())
        found: dict[str, Queued] = {}
        for node, queue in queues.items():
            for ticket in queue:
                if ticket.number == RESTART:  # its job's record tells of it
                    continue
                before = found.get(ticket.job)
                where = (*before.nodes, node) if before is not None else (node,)
                found[ticket.job] = Queued(ticket, places[ticket.job], where)
        return sorted(found.values(), key=lambda one: one.ticket.order)

    async def stop_queued(self, job: Queued) -> bool:
        """Take a job out of the queue; False if it has left it meanwhile.

        Raises:
            NotAllowedError: it is somebody else's.
            TransportError: no node answered.
        """
        path = f"/v1/tickets/{job.ticket.job}/stop"
        answers = await asyncio.gather(
            *(self.call(node, "POST", path, {}, deadline_s=JOBS_S) for node in job.nodes),
            return_exceptions=True,
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(errors) < len(answers):  # its launcher asks all of them
            return True
        for error in errors:
            if isinstance(error, NotAllowedError):
                raise self._not_ours(job.ticket, error, "stop") from error
            if not isinstance(error, NotFoundError):
                raise error
        return False

    # -- jobs ------------------------------------------------------------------------------------

    def sign_spec(self, spec: JobSpec) -> bytes:
        """Sign a job with this machine's key; every executing node checks it."""
        return wire.seal(
            self.identity.key,
            kind="job",
            mesh=self.mesh.mesh,
            sender=self.identity.node,
            audience=spec.id,
            body=spec,
        )

    @staticmethod
    def decode_record(plain: Any) -> JobRecord:
        """Check a record that came off the wire."""
        return wire.decode_as(JobRecord, plain)

    async def jobs(self) -> list[JobRecord]:
        """Return the jobs that reachable members know, newest first; the keeper's word counts."""
        snapshot = await self.snapshot()

        async def of(node: NodeId) -> list[JobRecord]:
            plain = await self.call(node, "GET", "/v1/jobs", deadline_s=JOBS_S)
            return [self.decode_record(one) for one in plain]

        nodes = [m.node for m in snapshot.members if m.addresses]
        answers = await asyncio.gather(*(of(node) for node in nodes), return_exceptions=True)
        best: dict[str, tuple[tuple[bool, ...], JobRecord]] = {}
        for node, records in _answered(nodes, answers):
            for job in records:
                # A keeper that was cut off does not know what followed; a witness knows no ranks.
                over = job.state in OVER
                weight = (bool(job.successor), job.keeper == node, over, bool(job.reports))
                if job.spec.id not in best or weight > best[job.spec.id][0]:
                    best[job.spec.id] = weight, job
        found = [record for _, record in best.values()]
        return sorted(found, key=lambda r: (r.spec.submitted_at, r.spec.restart), reverse=True)

    async def attempts(self, job: JobRecord) -> list[JobRecord]:
        """Return the attempts of a job that reachable members know, the first one first.

        One that is still being prepared is none yet.
        """
        try:
            records = await self.jobs()
        except TransportError:  # of the member that we ask for the others
            await self.find_again()
            records = await self.jobs()
        origin = origin_of(job.spec)
        return [
            one
            for one in reversed(records)
            if origin_of(one.spec) == origin and (not one.spec.restart or has_begun(one))
        ]

    async def successor(self, job: JobRecord) -> JobRecord | None:
        """Return the attempt right after one once it has begun, by the word of whoever knows."""
        ident = job.successor or attempt_id(origin_of(job.spec), job.spec.restart + 1)
        known = dict.fromkeys((*job.spec.voters, *self._addresses))  # it may run on any of them
        return await self._first_that([n for n in known if n in self.book], ident, has_begun)

    async def next_attempt(self, job: JobRecord) -> JobRecord | None:
        """Return the attempt that followed one, if a member knows it."""
        if (found := await self.successor(job)) is not None:
            return found
        # It may have come to nothing, or run on members that we did not know of.
        later = (one for one in await self.attempts(job) if one.spec.restart > job.spec.restart)
        return next(later, None)

    async def current(self, job: JobRecord) -> JobRecord:
        """Return the newest record of the newest attempt, as `follow` does.

        Raises:
            GpuLayerError: no node of it answered.
        """
        while True:
            try:
                job = await self.follow(job)
            except (TransportError, NotFoundError):
                later = await self.next_attempt(job) if may_follow(job) else None
                if later is None:
                    raise
            else:
                later = await self.next_attempt(job) if job.successor else None
                if later is None:
                    return job
            job = later

    async def find(self, ident: str) -> JobRecord | Queued:
        """Return the one job whose id starts with `ident`, also one that still waits.

        The id of any attempt finds the newest.

        Raises:
            GpuLayerError: none or several. ConfigError: `ident` is empty.
        """
        if not ident:  # every id starts with it
            raise ConfigError("no job named", hint="`gpulayer jobs` lists them")
        records, waiting = await asyncio.gather(self.jobs(), self.queued())
        known: dict[str, JobRecord | Queued] = {one.ticket.job: one for one in waiting}
        for record in reversed(records):  # the newest attempt last
            if record.spec.restart and not has_begun(record):
                known.setdefault(record.spec.id, record)
                continue
            origin = origin_of(record.spec)
            earlier = (attempt_id(origin, number) for number in range(record.spec.restart))
            known |= dict.fromkeys((*earlier, record.spec.id), record)
        found = {job: one for job, one in known.items() if job.startswith(ident.lower())}
        if not found:
            raise GpuLayerError(f"no job {ident!r}", hint="`gpulayer jobs` lists them")
        first, *others = found.values()
        if all(one is first for one in others):
            return first
        names = ", ".join(list(found)[:5])
        raise GpuLayerError(f"job {ident!r} is ambiguous: {names}", hint="give more characters")

    async def find_job(self, ident: str) -> JobRecord:
        """Return the one job whose id starts with `ident`, if it has left the queue.

        Raises:
            As `find`.
        """
        found = await self.find(ident)
        if isinstance(found, JobRecord):
            return found
        raise GpuLayerError(
            f"job {found.ticket.job} is queued as #{found.position} and has not started",
            hint=f"gpulayer stop {found.ticket.job}    (takes it out of the queue)",
        )

    async def record(self, job: JobRecord) -> JobRecord:
        """Return the newest record, from the keeper or else from any participant or voter.

        Raises:
            GpuLayerError: no node of the job answered.
        """

        async def ask(node: NodeId) -> JobRecord:
            path = f"/v1/jobs/{job.spec.id}"
            return self.decode_record(await self.call(node, "GET", path, deadline_s=RECORD_S))

        return await self._first_answer(job, ask)

    async def follow(self, job: JobRecord) -> JobRecord:
        """As `record`; a job that this machine submitted learns that it is followed."""
        if not self._is_missed_by(job):
            return await self.record(job)
        return await self._follow(job, leaving=False)

    async def leave(self, job: JobRecord) -> None:
        """Let a job go on whether or not it is followed, where it would stop otherwise.

        Raises:
            GpuLayerError: it could not be told.
        """
        later: JobRecord | None = job
        while later is not None and self._is_missed_by(later):
            job = await self._follow(later, leaving=True)
            later = await self.next_attempt(job) if job.successor else None

    def _is_missed_by(self, job: JobRecord) -> bool:
        """Return whether a job minds that this machine does not follow it."""
        spec = job.spec
        return spec.on_disconnect_s is not None and spec.submitter == self.identity.node

    async def _follow(self, job: JobRecord, *, leaving: bool) -> JobRecord:
        async def ask(node: NodeId) -> JobRecord:
            path, body = f"/v1/jobs/{job.spec.id}/follow", {"leaving": leaving}
            return self.decode_record(
                await self.call(node, "POST", path, body, deadline_s=RECORD_S)
            )

        return await self._first_answer(job, ask)

    async def _first_answer(
        self, job: JobRecord, ask: Callable[[NodeId], Awaitable[JobRecord]]
    ) -> JobRecord:
        """Ask those who know a job, one after the other, a silent one beside the next."""
        nodes = (job.keeper, *(slot.node for slot in job.spec.slots), *job.spec.voters)
        waiting = list(dict.fromkeys(nodes))
        error: GpuLayerError | None = None
        asked: set[asyncio.Task[JobRecord]] = set()
        try:
            while waiting or asked:
                if waiting:
                    asked.add(asyncio.ensure_future(ask(waiting.pop(0))))
                refused = isinstance(error, NotAllowedError)
                done, asked = await asyncio.wait(
                    asked,
                    # A node that is cut off does not refuse, it says nothing.
                    timeout=NEXT_S if waiting or refused else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if refused and not done and not waiting:
                    break
                for task in done:
                    found = task.exception()
                    if found is None:
                        return task.result()
                    if not isinstance(found, GpuLayerError):
                        raise found
                    if error is None or _weight(found) >= _weight(error):
                        error = found
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        assert error is not None  # a job has a node
        raise error

    async def stop(self, job: str, *, grace_s: float | None, kill: bool) -> JobRecord:
        """Stop a job that has left the queue, in whatever state it is; safe to repeat.

        The id of any attempt stops the newest, also one that starts meanwhile.

        Raises:
            NotAllowedError: it is somebody else's.
        """
        record = await self.find_job(job)
        body = {"grace_s": grace_s, "kill": kill}

        async def ask(node: NodeId) -> JobRecord:
            path = f"/v1/jobs/{record.spec.id}/stop"
            return self.decode_record(await self.call(node, "POST", path, body))

        while True:
            try:
                record = await self._first_answer(record, ask)
            except NotAllowedError as e:
                raise self._not_ours(record.spec, e, "stop") from e
            later = await self.next_attempt(record) if record.successor else None
            if later is None:
                return record
            record = later

    def _not_ours(
        self, job: JobSpec | Ticket, refusal: NotAllowedError, command: str
    ) -> NotAllowedError:
        """Return a refusal that says who may: a node only says that this member may not."""
        if isinstance(refusal, RemovedError):
            return refusal
        ident = job.id if isinstance(job, JobSpec) else job.job
        owner = self.book.members.get(job.submitter)
        whose = owner.name if owner else f"{job.submitter_name} (no member any more)"
        admins = [one.name for one in self.book.members.values() if Role.ADMIN in one.roles]
        may = dict.fromkeys([owner.name, *admins] if owner else admins)
        where = " or ".join(list(may)[:3])
        return NotAllowedError(
            f"{self.name} may not {command} job {ident}: "
            f"only {whose}, which submitted it, and admins may",
            hint=f"on {where}: gpulayer {command} {ident}"
            if where
            else "on the machine that founded the mesh: gpulayer mesh invite --role admin",
        )

    async def logs(
        self,
        record: JobRecord,
        *,
        ranks: frozenset[int] | None,
        follow: bool,
        pick: LogPick = EVERY_LINE,
    ) -> AsyncIterator[LogRecord]:
        """Yield the log records of all nodes of a job as they arrive, each once, ranks in order.

        Broken connections are dialled again from the last record seen; a node that stays away
        ends its own part once the job's record says that the job is over.

        Raises:
            GpuLayerError: after everything else, where the lines of a node cannot be had.
        """
        merged_records: asyncio.Queue[LogRecord | None] = asyncio.Queue(maxsize=4096)

        async def of(node: NodeId) -> None:
            try:
                await self._node_logs(record, node, ranks, follow, pick, merged_records.put)
            finally:
                await merged_records.put(None)

        nodes = {slot.node for slot in record.spec.slots}
        tasks = [asyncio.create_task(of(node)) for node in sorted(nodes)]
        try:
            open_streams = len(tasks)
            while open_streams:
                item = await merged_records.get()
                if item is None:
                    open_streams -= 1
                else:
                    yield item
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _node_logs(
        self,
        record: JobRecord,
        node: NodeId,
        ranks: frozenset[int] | None,
        follow: bool,
        pick: LogPick,
        put: Callable[[LogRecord], Awaitable[None]],
    ) -> None:
        next_seq: dict[int, int] = {}
        began = time.monotonic()
        failures = 0
        give_up: float | None = None
        while True:
            start = ",".join(f"{rank}:{seq}" for rank, seq in sorted(next_seq.items()))
            query = f"follow={int(follow)}&from={start}"
            if ranks is not None:
                query += "&ranks=" + ",".join(map(str, sorted(ranks)))
            if pick.stderr:
                query += "&stderr=1"
            if pick.since_s is not None:
                query += f"&since_ms={(pick.since_s + time.monotonic() - began) * 1000:.0f}"
            if pick.tail is not None:
                query += f"&tail={pick.tail}"
            path = f"/v1/jobs/{record.spec.id}/logs?{query}"
            parser = RecordParser()
            try:
                async for data in self.dialer.stream(node, self.addresses(node), "GET", path):
                    failures = 0
                    for one in parser.feed(data):
                        if one.seq >= next_seq.get(one.rank, 0):
                            next_seq[one.rank] = one.seq + 1
                            await put(one)
                return
            except NotFoundError as e:
                if _lost(record, node) or _ran_nothing(record, node):
                    return
                raise TransportError(f"lines are missing: {e.message}") from e
            except TransportError as e:
                over = await self._ended_without(record, node) if follow else record
                if over is not None:
                    # It was there at the end, so its agent is being restarted; else it is lost.
                    give_up = give_up or time.monotonic() + LOG_LATE_S
                    if not follow or _lost(over, node) or time.monotonic() > give_up:
                        name = next(s.name for s in record.spec.slots if s.node == node)
                        raise TransportError(f"lines are missing: {name} does not answer") from e
                await asyncio.sleep(LOG_RETRY_S[min(failures, len(LOG_RETRY_S) - 1)])
                failures += 1

    async def _ended_without(self, record: JobRecord, node: NodeId) -> JobRecord | None:
        """Return the record of a job that has ended, as the others know it; None while it runs."""
        spec = record.spec
        others = {record.keeper, *(slot.node for slot in spec.slots), *spec.voters} - {node}
        return await self._first_that(others, spec.id, lambda one: one.ended_age_s is not None)

    async def _first_that(
        self, nodes: Collection[NodeId], job: str, fits: Callable[[JobRecord], bool]
    ) -> JobRecord | None:
        """Return the first record of a job that fits, of those that nodes have; None: none does.

        Several may be lost: once one has answered, it is not kept waiting for them.
        """

        async def ask(node: NodeId) -> tuple[bool, JobRecord | None]:
            try:
                plain = await self.call(node, "GET", f"/v1/jobs/{job}", deadline_s=RECORD_S)
                return True, self.decode_record(plain)
            except GpuLayerError as e:
                return isinstance(e, NotFoundError), None

        asking = {asyncio.ensure_future(ask(node)) for node in nodes}
        answered = False
        try:
            while asking:
                done, asking = await asyncio.wait(
                    asking,
                    timeout=NEXT_S if answered else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    break
                for answers, found in (task.result() for task in done):
                    if found is not None and found.spec.id == job and fits(found):
                        return found
                    answered = answered or answers
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return None

    async def outputs(self, record: JobRecord) -> list[tuple[NodeId, Outputs | None]]:
        """List what the nodes of a job have: None for one that does not answer.

        A node that has forgotten the job is left out.

        Raises:
            NotAllowedError: the files are not for this member.
        """
        nodes = sorted({slot.node for slot in record.spec.slots})

        async def of(node: NodeId) -> Outputs | None:
            path = f"/v1/jobs/{record.spec.id}/files"
            for wait_s in (*FETCH_RETRY_S, None):
                try:
                    plain = await self.call(node, "GET", path, deadline_s=120.0)  # hashes gigabytes
                    return wire.decode_as(Outputs, plain)
                except TransportError:
                    if wait_s is None or _lost(record, node):
                        return None
                    await asyncio.sleep(wait_s)
            return None

        answers = await asyncio.gather(*(of(node) for node in nodes), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, NotAllowedError):
                raise self._not_ours(record.spec, answer, "get") from answer
        return list(_answered(nodes, answers))

    async def fetch(self, record: JobRecord, node: NodeId, file: OutputFile, dest: Path) -> None:
        """Bring one output file home: resumed where it broke off, verified, renamed into place.

        Raises:
            TransportError: the node stayed away, or the bytes do not match their hash.
        """
        dest.parent.mkdir(parents=True, exist_ok=True)
        # Hashed, for a name with a prefix and an ending may be longer than names can be.
        part = dest.with_name(f".{hashlib.sha256(os.fsencode(dest.name)).hexdigest()[:16]}.part")
        part.unlink(missing_ok=True)
        try:
            await self._fetch_into(part, record, node, file)
            if file.executable:
                part.chmod(part.stat().st_mode | stat.S_IXUSR)
            part.replace(dest)
        finally:
            part.unlink(missing_ok=True)

    async def _fetch_into(
        self, part: Path, record: JobRecord, node: NodeId, file: OutputFile
    ) -> None:
        digest = hashlib.sha256()
        offset = 0
        with part.open("wb") as out:
            for wait_s in (*FETCH_RETRY_S, None):
                try:
                    async for data in self._read_output(record, node, file, offset):
                        digest.update(data)
                        out.write(data)
                        offset += len(data)
                    break
                except TransportError:
                    if wait_s is None:
                        raise
                    await asyncio.sleep(wait_s)
        if offset != file.size or digest.digest() != file.sha256:
            raise TransportError(f"{file.path!r} arrived damaged: {offset} of {file.size} bytes")

    async def _read_output(
        self, record: JobRecord, node: NodeId, file: OutputFile, offset: int
    ) -> AsyncIterator[bytes]:
        path = (
            f"/v1/jobs/{record.spec.id}/file?area={file.area}&rank={file.rank}"
            f"&offset={offset}&path={quote(file.path, safe='')}"
        )
        async for data in self.dialer.stream(node, self.addresses(node), "GET", path):
            yield data


def _weight(error: GpuLayerError) -> int:
    """Rank what nodes answered instead: that others are silent does not undo a refusal, and that
    one does not know a job says nothing of those that are silent."""
    return 2 if isinstance(error, NotAllowedError) else int(not isinstance(error, NotFoundError))


def _lost(record: JobRecord, node: NodeId) -> bool:
    """Return whether a job ended without a last word from this node."""
    return all(
        report.node != node or report.phase is not HostPhase.ENDED for report in record.reports
    )


def _ran_nothing(record: JobRecord, node: NodeId) -> bool:
    """Return whether no rank has started on a node: a later attempt is forgotten there then."""
    ranks = [rank for report in record.reports if report.node == node for rank in report.ranks]
    return all(rank.state is RankState.WAITING for rank in ranks)


def _answered(
    nodes: Sequence[NodeId], answers: Sequence[T | BaseException]
) -> Iterator[tuple[NodeId, T]]:
    """Yield what nodes answered; those that did not, or refused, are left out."""
    for node, answer in zip(nodes, answers, strict=True):
        if not isinstance(answer, BaseException):
            yield node, answer
        elif not isinstance(answer, GpuLayerError):
            raise answer


def _own_agent(home: Path) -> Addresses:
    """Return the addresses of an agent that runs on this machine with this state directory."""
    try:
        port = int(json.loads((home / "agent.json").read_text(encoding="utf-8"))["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return (Address("127.0.0.1", port), Address("::1", port))


def merged(first: Addresses, then: Addresses) -> Addresses:
    """Join two address lists, best first, within the limit of 8."""
    seen: dict[Address, None] = dict.fromkeys((*first, *then))
    return tuple(seen)[:8]
