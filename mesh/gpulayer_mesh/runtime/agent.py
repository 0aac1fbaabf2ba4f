"""The agent: one asyncio process that wires the cores to the network, the disk and the machine.

It decides nothing that a core decides. One task owns the membership machine; everything that
happens becomes an event in its queue. Every other part reports its failures and goes on: without
mDNS, UDP, a GPU driver or torch the agent still serves what it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, assert_never

from msgspec import Meta

import gpulayer_mesh
from gpulayer_mesh import config as configuration
from gpulayer_mesh.config import AgentConfig
from gpulayer_mesh.core import swim, wire
from gpulayer_mesh.core.gossip_codec import Codec
from gpulayer_mesh.core.lease import Reservations
from gpulayer_mesh.core.membership import Membership
from gpulayer_mesh.core.rumour import Rumour
from gpulayer_mesh.core.types import (
    Address,
    Addresses,
    AliveRecord,
    Capabilities,
    CapsRecord,
    Incarnation,
    Load,
    MemberSnapshot,
    NodeId,
    NodeState,
    Role,
    Snapshot,
)
from gpulayer_mesh.errors import (
    ConfigError,
    ExitCode,
    GpuLayerError,
    NoMeshError,
    NotAllowedError,
    RemoteProtocolError,
    TransportError,
)
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime import interfaces as nics
from gpulayer_mesh.runtime import joining, preflight
from gpulayer_mesh.runtime.capabilities import Machine
from gpulayer_mesh.runtime.dial import Dialer
from gpulayer_mesh.runtime.discovery import Discovery, mesh_tag
from gpulayer_mesh.runtime.door import Door, DoorRequest, Route, Stream
from gpulayer_mesh.runtime.gpus import Gpus, load_nvml
from gpulayer_mesh.runtime.hosting import JobHost, Site
from gpulayer_mesh.runtime.packets import PacketPort
from gpulayer_mesh.runtime.shims import ShimRunner
from gpulayer_mesh.runtime.store import ChunkStore

log = logging.getLogger("gpulayer.agent")

PORT_TRIES = 64  # next free port after the wanted one
PROBE_S = 3.0  # a stream probe is only useful while SWIM still waits for it
SYNC_S = 10.0
SYNC_MAX = 8 * 1024 * 1024  # 1,024 members' rumours (0.9 MiB) and what capabilities fit below
CAPS_PER_SYNC_BYTES = 4 * 1024 * 1024  # the rest comes with the next exchange
SEEK_S = 10.0  # between rounds over remembered and configured peers that are not alive
LOAD_S = 5.0  # psutil's figures cost 1 ms
SAVE_PEERS_S = 5.0  # after a change, so that a join of many writes once
DIALS_AT_ONCE = 10  # of candidates; mDNS spoofing cannot make us dial more


class Agent:
    """Everything of one node. Make one, `run` it."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.home = config.home
        self.identity = identities.load_or_create(self.home)
        self._events: asyncio.Queue[swim.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._caps: dict[NodeId, tuple[CapsRecord, bytes]] = {}
        self._peers: dict[NodeId, Addresses] = {}
        self._caps_version = 0
        self._packet_seq = 0
        self._dialling: set[object] = set()
        self._peers_dirty = asyncio.Event()
        self._removed = asyncio.Event()

    # --- start and end ---------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Raises:
            ConfigError: another agent runs here, or the port cannot be had.
            NoMeshError, JoinError: no mesh to serve.
        """
        with _only_agent(self.home) as note_port:
            hosts = self.config.bind or ("0.0.0.0", "::")
            self.watch = nics.InterfaceWatch()
            port = _free_port(hosts, self.config.port)
            mesh = await self._mesh(port)
            self.book = mesh.book
            self.boot = identities.next_boot(self.home)
            self._peers = identities.load_peers(self.home)
            configuration.remember(self.config)
            async with contextlib.AsyncExitStack() as stack:
                await self._open(stack, hosts, port)
                note_port(self.port)
                log.info(
                    "%s (%s) serves on port %d: %s",
                    self.name,
                    self.identity.node[:8],
                    self.port,
                    ", ".join(address.host for address in self._addresses()) or "no address",
                )
                await self._serve(stop)

    async def _mesh(self, port: int) -> identities.MeshFiles:
        mesh = identities.load_mesh(self.identity)
        if mesh is not None and self.identity.node in mesh.book:
            return mesh  # a start line with --join stays right after the invitation is over
        if self.config.join is None and mesh is not None:
            raise NotAllowedError(
                f"this machine was removed from mesh {mesh.mesh[:8]}",
                hint="ask for a new invitation, then: gpulayer-agent --join LINE",
            )
        if self.config.join is None:
            raise NoMeshError(
                "this machine belongs to no mesh yet",
                hint="run `gpulayer mesh invite` on the machine that founded the mesh, then here: "
                "gpulayer-agent --join LINE",
            )
        admission = await joining.join(
            self.config.join,
            key=self.identity.key,
            name=self.config.name,
            addresses=self._offered(port),
        )
        mesh = identities.save_membership(self.identity, admission)
        log.info("joined mesh %s", mesh.mesh[:8])
        return mesh

    async def _open(
        self, stack: contextlib.AsyncExitStack, hosts: tuple[str, ...], port: int
    ) -> None:
        self.dialer = Dialer(
            context=identities.client_context(self.home), book=self.book, node=self.identity.node
        )
        stack.push_async_callback(self.dialer.close)
        self.machine = Machine(
            self.home,
            python=self.config.python,
            version=gpulayer_mesh.__version__,
            gpus=Gpus(configuration.environment().get("CUDA_VISIBLE_DEVICES"), load_nvml()),
            interfaces=lambda: self.watch.current,
        )
        self.reservations = Reservations(self.name, cpus=self.machine.cpus)
        self.jobs = JobHost(self._site())
        self.door = Door(
            context=identities.server_context(self.home),
            book=self.book,
            node=self.identity.node,
            routes=self._routes(),
            on_roster=self._roster_presented,
        )
        self.port = await self.door.start(hosts, port)
        stack.push_async_callback(self.door.close)
        self.packets = await PacketPort.open(hosts, self.port)
        stack.callback(self.packets.close)
        self.codec = Codec(
            mesh=self.book.mesh,
            node=self.identity.node,
            boot=self.boot,
            key=self.identity.key,
            key_of=self.book.key_of,
        )
        me = AliveRecord(
            self.identity.node,
            Incarnation(self.boot, 0),
            self.name,
            self.config.zone,
            self._addresses(),
            self._caps_version,
        )
        self.members = Membership(
            me, config=swim.SwimConfig(), rng=random.Random(), now=time.monotonic()
        )
        self._post(swim.RosterChanged(frozenset(self.book.members)))
        self.discovery = Discovery(
            tag=mesh_tag(self.book.mesh), node=self.identity.node, port=self.port
        )
        if self._uses_multicast():
            await self.discovery.start(self._addresses(), self.watch.current)
        stack.push_async_callback(self.discovery.close)

    async def _serve(self, stop: asyncio.Event) -> None:
        loops: list[Any] = [
            self._own_membership(),
            self._receive_packets(),
            self._follow_candidates(),
            self._seek(),
            self._follow_interfaces(),
            self._follow_machine(),
            self._report_load(),
            self._save_peers(),
            self.jobs.run(),
        ]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one) for one in loops]
            await self._stopped_or_removed(stop)
            self._leave()
            for task in running:
                task.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        identities.save_peers(self.home, self._peers)
        if self._removed.is_set():
            raise NotAllowedError("this machine was removed from the mesh")

    async def _stopped_or_removed(self, stop: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._removed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _leave(self) -> None:
        """Say goodbye, so that nobody has to suspect us first."""
        for effect in self.members.handle(time.monotonic(), swim.Leave()):
            if isinstance(effect, swim.SendPacket):
                self._send(effect)

    @property
    def name(self) -> str:
        entry = self.book.members.get(self.identity.node)
        return entry.name if entry else self.config.name

    def _offered(self, port: int) -> Addresses:
        if self.config.bind:
            found = [
                address
                for bind in self.config.bind
                for address in nics.announce_addresses(self.watch.current, port, bind)
            ]
            return tuple(dict.fromkeys(found))[:8]
        return nics.announce_addresses(self.watch.current, port)

    def _addresses(self) -> Addresses:
        return self._offered(self.port)

    def _uses_multicast(self) -> bool:
        return not self.config.bind or any(not _is_loopback(host) for host in self.config.bind)

    def _post(self, event: swim.Event) -> None:
        self._events.put_nowait(event)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, GpuLayerError):
                log.debug("%s", error)
            else:
                log.error("a task failed", exc_info=error)

    # --- membership ------------------------------------------------------------------------------

    async def _own_membership(self) -> None:
        while True:
            due = self.members.next_timeout()
            event: swim.Event = swim.Tick()
            try:
                wait_s = None if due is None else max(0.0, due - time.monotonic())
                async with asyncio.timeout(wait_s):
                    event = await self._events.get()
            except TimeoutError:
                pass
            self._handle(event)

    def _handle(self, event: swim.Event) -> None:
        for effect in self.members.handle(time.monotonic(), event):
            match effect:
                case swim.SendPacket():
                    self._send(effect)
                case swim.StreamProbe(node, seq):
                    self._spawn(self._stream_probe(node, seq))
                case swim.PushPull(node):
                    self._spawn(self._sync_with(node))
                case swim.MemberChanged(node, old, new, cause):
                    self._member_changed(node, old, new, cause)
                case swim.RecordChanged(record):
                    self._record_changed(record)
                case swim.SelfChanged():
                    pass
                case swim.CloneSeen(record):
                    log.error(
                        "another machine uses this machine's identity, at %s: its state directory "
                        "was copied; delete identity.key on one of the two and join again",
                        ", ".join(address.host for address in record.addresses),
                    )
                case _:
                    assert_never(effect)

    def _member_changed(
        self, node: NodeId, old: NodeState | None, new: NodeState, cause: str
    ) -> None:
        name = self._name_of(node)
        level = logging.WARNING if new in (NodeState.SUSPECT, NodeState.DEAD) else logging.INFO
        log.log(level, "%s: %s -> %s (%s)", name, old or "unknown", new, cause)

    def _record_changed(self, record: AliveRecord) -> None:
        if record.node == self.identity.node:
            return
        self._peers[record.node] = _merged(self._proven(record.node), record.addresses)
        self._peers_dirty.set()
        known = self._caps.get(record.node)
        version = (record.incarnation.boot, record.caps_version)
        if known is None or (known[0].boot, known[0].version) < version:
            self._spawn(self._pull_caps(record.node))

    def _proven(self, node: NodeId) -> Addresses:
        good = self.dialer.good_address(node)
        return () if good is None else (good,)

    def _peer_addresses(self, node: NodeId) -> Addresses:
        view = self.members.members.get(node)
        current = view.record.addresses if view else ()
        known = _merged(self._proven(node), current)
        return nics.rank_addresses(known or self._peers.get(node, ()), self.watch.current)

    def _name_of(self, node: NodeId) -> str:
        entry = self.book.members.get(node)
        return entry.name if entry else node[:8]

    def _send(self, effect: swim.SendPacket) -> None:
        self._packet_seq += 1
        data = self.codec.encode(effect.message, self._packet_seq)
        if effect.via == "tcp":
            self._spawn(self._call(effect.to, "POST", "/v1/packet", data, deadline_s=PROBE_S))
            return
        addresses = self._peer_addresses(effect.to)
        if addresses:
            self.packets.send(addresses[0].host, addresses[0].port, data)

    async def _receive_packets(self) -> None:
        while True:
            packet = await self.packets.received.get()
            self._packet(packet.data, "udp")

    def _packet(self, data: bytes, via: swim.Via) -> None:
        try:
            sender, message = self.codec.decode(data)
        except RemoteProtocolError as e:
            log.debug("packet ignored: %s", e)
            return
        self._post(swim.PacketReceived(sender, message, via))

    async def _stream_probe(self, node: NodeId, seq: int) -> None:
        try:
            await self._call(node, "GET", "/v1/ping", deadline_s=PROBE_S)
        except GpuLayerError:
            self._post(swim.StreamProbeDone(node, seq, False))
        else:
            self._post(swim.StreamProbeDone(node, seq, True))

    async def _call(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        addresses: Addresses = (),
        deadline_s: float = 10.0,
    ) -> bytes:
        if node not in self.book:
            raise NotAllowedError(f"node {node[:8]!r} is no member")
        where = _merged(self._peer_addresses(node), addresses)
        answer: bytes = await self.dialer.request(
            node, where, method, path, body=body, deadline_s=deadline_s
        )
        return answer

    # --- full-state exchange ---------------------------------------------------------------------

    async def _sync_with(self, node: NodeId) -> None:
        answer = await self._call(
            node, "POST", "/v1/sync", wire.pack(self._sync_body()), deadline_s=SYNC_S
        )
        self._take_sync(node, wire.unpack(answer, max_bytes=SYNC_MAX))

    def _sync_body(self) -> dict[str, Any]:
        return {
            "rumours": [self.codec.sign(rumour) for rumour in self.members.full_state()],
            "roster": self.book.signed,
            "have": {n: [c.boot, c.version] for n, (c, _) in self._caps.items()},
        }

    async def sync(self, request: DoorRequest) -> dict[str, Any]:
        plain = wire.unpack(request.body, max_bytes=SYNC_MAX)
        have = _have(plain)
        self._take_sync(request.peer, plain)
        answer = self._sync_body()
        answer["caps"] = []
        room = CAPS_PER_SYNC_BYTES
        for node, (caps, signed) in self._caps.items():
            if have.get(node, (-1, -1)) < (caps.boot, caps.version) and room > len(signed):
                room -= len(signed)
                answer["caps"].append(signed)
        return answer

    def _take_sync(self, peer: NodeId, plain: Any) -> None:
        if not isinstance(plain, dict):
            raise RemoteProtocolError("sync is a map")
        if isinstance(roster := plain.get("roster"), bytes):
            self._offer_roster(roster)
        rumours: list[Rumour] = []
        for signed in _signed_list(plain.get("rumours")):
            with contextlib.suppress(RemoteProtocolError):  # of a member that was just removed
                rumours.append(self.codec.open(signed))
        # At once, not through the queue: the answer must hold our refutation.
        self._handle(swim.Synced(peer, tuple(rumours)))
        for signed in _signed_list(plain.get("caps", [])):
            with contextlib.suppress(RemoteProtocolError):
                self._take_caps(signed)

    async def _pull_caps(self, node: NodeId) -> None:
        self._take_caps(await self._call(node, "GET", "/v1/caps"))

    def _take_caps(self, signed: bytes) -> None:
        envelope = wire.open_envelope(
            signed,
            mesh=self.book.mesh,
            key_of=self.book.key_of,
            kind="caps",
            max_bytes=wire.RECORD_MAX,
        )
        record = wire.decode_as(CapsRecord, envelope.body)
        if record.node != envelope.sender:
            raise RemoteProtocolError("capabilities signed by somebody else")
        known = self._caps.get(record.node)
        if known is None or (known[0].boot, known[0].version) < (record.boot, record.version):
            self._caps[record.node] = (record, signed)

    # --- roster ----------------------------------------------------------------------------------

    async def _roster_presented(self, signed: bytes) -> None:
        self._offer_roster(signed)

    def _offer_roster(self, signed: bytes) -> None:
        if self.book.offer(signed):
            self._roster_adopted()

    def _roster_adopted(self) -> None:
        """The book holds a newer roster: keep it, drop who is gone, tell the cores."""
        identities.save_roster(self.home, self.book)
        members = frozenset(self.book.members)
        log.info("roster epoch %d: %d members", self.book.epoch, len(members))
        self.door.enforce()
        self._caps = {n: c for n, c in self._caps.items() if n in members}
        self._peers = {n: a for n, a in self._peers.items() if n in members}
        self._peers_dirty.set()
        self._post(swim.RosterChanged(members))
        if self.identity.node not in members:
            log.error("this machine was removed from the mesh: its jobs are stopped, and so am I")
            self.jobs.stop_all("removed from the mesh")
            self._removed.set()

    # --- finding each other ----------------------------------------------------------------------

    async def _follow_candidates(self) -> None:
        gate = asyncio.Semaphore(DIALS_AT_ONCE)
        while True:
            candidate = await self.discovery.candidates.get()
            node = self.book.hinted(candidate.node_hint)
            if node is not None and node != self.identity.node and node not in self._dialling:
                await gate.acquire()
                self._spawn(self._contact(node, candidate.addresses, gate))

    async def _contact(
        self, node: NodeId, addresses: Addresses, gate: asyncio.Semaphore | None = None
    ) -> None:
        """Reach a member by whatever address works; the core then exchanges state with it."""
        self._dialling.add(node)
        try:
            where = nics.rank_addresses(addresses, self.watch.current)
            await self.dialer.request(node, where, "GET", "/v1/ping", deadline_s=5.0)
            self._peers[node] = _merged(self._proven(node), addresses)
            self._peers_dirty.set()
            self._post(swim.Contact(node))
        finally:
            self._dialling.discard(node)
            if gate is not None:
                gate.release()

    async def _seek(self) -> None:
        """Knock at remembered and configured peers that are not alive here, for ever."""
        while True:
            for node, addresses in list(self._peers.items()):
                view = self.members.members.get(node)
                silent = view is None or view.state in (NodeState.DEAD, NodeState.LEFT)
                if node != self.identity.node and silent and node not in self._dialling:
                    self._spawn(self._contact(node, addresses))
            for text in self.config.peers:
                if text not in self._dialling:
                    self._spawn(self._contact_peer(text))
            await asyncio.sleep(SEEK_S)

    async def _contact_peer(self, text: str) -> None:
        self._dialling.add(text)
        try:
            host, port = configuration.parse_peer(text)
            loop = asyncio.get_running_loop()
            try:
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError as e:
                log.warning("peer %s: %s", text, e)
                return
            for *_, where in found[:8]:
                address = Address(str(where[0]), port)
                with contextlib.suppress(TransportError):
                    node = await self.dialer.who_is(address)
                    if node != self.identity.node:
                        await self._contact(node, (address,))
                    return
        finally:
            self._dialling.discard(text)

    async def _follow_interfaces(self) -> None:
        async for change in self.watch.changes():
            match change:
                case nics.Woke(gap_s):
                    log.info("the machine slept for about %.0f s", gap_s)
                    self.dialer.forget_connections()
                    self._post(swim.Woke())
                case nics.AddressesChanged(current):
                    log.info("addresses: %s", ", ".join(a.host for a in self._addresses()))
                    self._announce()
                    if self._uses_multicast():
                        await self.discovery.update(self._addresses(), current)
                case _:
                    assert_never(change)

    def _announce(self) -> None:
        self._post(
            swim.LocalChanged(self.name, self.config.zone, self._addresses(), self._caps_version)
        )

    async def _save_peers(self) -> None:
        while True:
            await self._peers_dirty.wait()
            await asyncio.sleep(SAVE_PEERS_S)
            self._peers_dirty.clear()
            with contextlib.suppress(OSError):
                await asyncio.to_thread(identities.save_peers, self.home, dict(self._peers))

    # --- the machine -----------------------------------------------------------------------------

    async def _follow_machine(self) -> None:
        async for capabilities in self.machine.changes():
            self.reservations.set_devices([device.index for device in capabilities.devices])
            self._publish(capabilities)

    def _publish(self, capabilities: Capabilities) -> None:
        self._caps_version += 1
        record = CapsRecord(
            self.identity.node,
            self.boot,
            self._caps_version,
            capabilities,
            self.reservations.grants,
        )
        signed = wire.seal(
            self.identity.key,
            kind="caps",
            mesh=self.book.mesh,
            sender=self.identity.node,
            boot=self.boot,
            seq=self._caps_version,
            body=record,
        )
        self._caps[self.identity.node] = (record, signed)
        self._announce()

    def _grants_changed(self) -> None:
        if self.machine.current is not None:
            self._publish(self.machine.current)

    async def _report_load(self) -> None:
        while True:
            load: Load = self.machine.load(self.reservations)
            self._post(swim.LoadChanged(load))
            await asyncio.sleep(LOAD_S)

    # --- doors -----------------------------------------------------------------------------------

    def _site(self) -> Site:
        return Site(
            node=self.identity.node,
            name=self.name,
            home=self.home,
            python=self.config.python,
            environ=configuration.environment(),
            book=self.book,
            reservations=self.reservations,
            store=ChunkStore(self.home / "chunks"),
            shims=ShimRunner(),
            ports=preflight.FreePorts(),
            call=self._call,
            devices=lambda: self.machine.current.devices if self.machine.current else (),
            missing_imports=self.machine.missing_imports,
            interface_for=lambda hosts: nics.interface_for(hosts, nics.list_interfaces()),
            open_preflight=self._open_preflight,
            check_preflight=_check_preflight,
            changed=self._grants_changed,
        )

    async def _open_preflight(self) -> tuple[int, bytes]:
        hosts = self.config.bind or [address.host for address in self._addresses()]
        port = await preflight.PreflightPort.open(list(hosts))
        return port.port, port.nonce

    def _routes(self) -> list[Route]:
        jobs = self.jobs
        member: None = None
        launcher = Role.LAUNCHER
        large = wire.BODY_MAX
        spec = wire.SPEC_MAX + 1024
        chunk = 1024 * 1024 + 64 * 1024
        job = "/v1/jobs/{id}"
        return [
            Route("GET", "/v1/ping", self.ping, member),
            Route("POST", "/v1/sync", self.sync, member, SYNC_MAX),
            Route("POST", "/v1/packet", self.packet, member, wire.PACKET_MAX),
            Route("GET", "/v1/caps", self.caps, member),
            Route("GET", "/v1/snapshot", self.snapshot, member),
            Route("GET", "/v1/jobs", jobs.list_jobs, member),
            Route("GET", job, jobs.get_job, member),
            Route("POST", job + "/reserve", jobs.reserve, launcher, spec),
            Route("POST", job + "/release", jobs.release, launcher),
            Route("POST", job + "/manifest", jobs.manifest, launcher, large),
            Route("PUT", "/v1/chunks/{hash}", jobs.put_chunk, launcher, chunk),
            Route("GET", job + "/chunks/{hash}", jobs.get_chunk, member),
            Route("POST", job + "/stage", jobs.stage, launcher, large),
            Route("POST", job + "/preflight/open", jobs.preflight_open, launcher),
            Route("POST", job + "/preflight/check", jobs.preflight_check, launcher),
            Route("POST", job + "/port", jobs.free_port, launcher),
            Route("POST", job + "/go", jobs.go, launcher, spec),
            Route("POST", job + "/start", jobs.start, member, spec),
            Route("POST", job + "/lease", jobs.lease, member, large),
            Route("POST", job + "/halt", jobs.halt, member),
            Route("POST", job + "/report", jobs.report, member, spec),
            Route("POST", job + "/stop", jobs.stop, member),
            Route("GET", job + "/logs", _streaming(jobs.logs), member),
            Route("GET", job + "/files", jobs.files, member),
            Route("GET", job + "/file", _streaming(jobs.file), member),
        ]

    async def ping(self, request: DoorRequest) -> dict[str, Any]:
        return {
            "node": self.identity.node,
            "boot": self.boot,
            "version": gpulayer_mesh.__version__,
            "epoch": self.book.epoch,
        }

    async def packet(self, request: DoorRequest) -> None:
        self._packet(request.body, "tcp")

    async def caps(self, request: DoorRequest) -> bytes:
        own = self._caps.get(self.identity.node)
        if own is None:
            raise TransportError("capabilities are not known yet")
        return own[1]

    async def snapshot(self, request: DoorRequest) -> Snapshot:
        return Snapshot(
            self.book.mesh,
            self.identity.node,
            self.book.epoch,
            tuple(self._row(entry.node) for entry in self.book.members.values()),
        )

    def _row(self, node: NodeId) -> MemberSnapshot:
        entry = self.book.members[node]
        view = self.members.members.get(node)
        caps = self._caps.get(node)
        record = caps[0] if caps else None
        if view is None:
            return MemberSnapshot(node, entry.name, entry.roles, None)
        now = time.monotonic()
        mine = node == self.identity.node
        return MemberSnapshot(
            node=node,
            name=entry.name,
            roles=entry.roles,
            state=view.state,
            zone=view.record.zone,
            addresses=self._addresses() if mine else self._peer_addresses(node)[:8],
            incarnation=view.record.incarnation,
            since_s=now - view.since,
            heard_s=0.0 if mine else None if view.heard is None else now - view.heard,
            rtt_ms=None if view.rtt_s is None else view.rtt_s * 1000,
            via=view.via,
            load=self.machine.load(self.reservations) if mine else view.load,
            caps=record.capabilities if record else None,
            grants=self.reservations.grants if mine else record.grants if record else (),
        )


# --- small parts ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _only_agent(home: Path) -> Any:
    """Hold the lock that makes a second agent on this state directory impossible."""
    with (home / "agent.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"an agent is already running with {str(home)!r}",
                hint="stop it first, or give this one another --state-dir",
            ) from None
        path = home / "agent.json"

        def note_port(port: int) -> None:
            path.write_text(json.dumps({"pid": os.getpid(), "port": port}), encoding="utf-8")

        try:
            yield note_port
        finally:
            path.unlink(missing_ok=True)


def _free_port(hosts: Iterable[str], wanted: int) -> int:
    """Return the first port from `wanted` on that is free for TCP and UDP on every host."""
    problem: OSError | None = None
    for port in range(wanted, wanted + PORT_TRIES):
        try:
            for host in hosts:
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    _try_bind(host, port, kind)
        except OSError as e:
            problem = e
            continue
        return port
    raise ConfigError(
        f"no free port from {wanted} to {wanted + PORT_TRIES - 1}: {problem}",
        hint="give another one with --port",
    )


def _try_bind(host: str, port: int, kind: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        probe = socket.socket(family, kind)
    except OSError:
        if family == socket.AF_INET6:
            return  # no IPv6 on this machine
        raise
    with probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if kind == socket.SOCK_STREAM:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


def _merged(first: Addresses, then: Addresses) -> Addresses:
    return tuple(dict.fromkeys((*first, *then)))[:8]


_Have = dict[NodeId, Annotated[tuple[int, int], Meta()]]


def _have(plain: Any) -> dict[NodeId, tuple[int, int]]:
    have = plain.get("have", {}) if isinstance(plain, dict) else {}
    return wire.decode_as(_Have, have)


def _signed_list(value: Any) -> list[bytes]:
    if not isinstance(value, list) or not all(isinstance(one, bytes) for one in value):
        raise RemoteProtocolError("expected a list of signed records")
    return value


def _streaming(handler: Callable[[DoorRequest], AsyncIterator[bytes]]) -> Any:
    async def stream(request: DoorRequest) -> Stream:
        return Stream(handler(request))

    return stream


async def _check_preflight(targets: Any) -> list[preflight.Reached]:
    wanted = wire.decode_as(tuple[preflight.Target, ...], targets)
    return await preflight.check(wanted[:1024])


def main(argv: list[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; the entry point of `gpulayer-agent`."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        config = configuration.agent_config(
            sys.argv[1:] if argv is None else argv, configuration.environment()
        )
        asyncio.run(_main(config))
    except GpuLayerError as e:
        print(f"gpulayer-agent: error: {e.message}", file=sys.stderr)
        if e.hint:
            print(f"gpulayer-agent: hint: {e.hint}", file=sys.stderr)
        return int(e.exit_code)
    return int(ExitCode.OK)


async def _main(config: AgentConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await Agent(config).run(stop)


if __name__ == "__main__":
    sys.exit(main())
