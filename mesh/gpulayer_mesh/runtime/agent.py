"""The agent: one asyncio process that wires the cores to the network, the disk and the machine.

It decides nothing that a core decides: `gossip` is the shell of membership, `hosting` that of
jobs, `jobdoor` lets requests in. What is left here is start and end, the roster, and what this
machine says of itself. Every part reports its failures and goes on: without mDNS, UDP, a GPU
driver or torch the agent still serves what it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import sys
import time
from dataclasses import replace
from typing import Any, assert_never

import gpulayer_mesh
from gpulayer_mesh import config as configuration
from gpulayer_mesh.config import AgentConfig
from gpulayer_mesh.core import reach, swim, wire
from gpulayer_mesh.core.devicecare import DeviceCare
from gpulayer_mesh.core.diagnosis import Health, ReachAnswer, ReachAsked
from gpulayer_mesh.core.gossip_codec import Codec
from gpulayer_mesh.core.jobspec import JobSpec
from gpulayer_mesh.core.lease import Reservations
from gpulayer_mesh.core.membership import Membership
from gpulayer_mesh.core.recordbook import RecordBook
from gpulayer_mesh.core.types import (
    Addresses,
    AliveRecord,
    Capabilities,
    CapsRecord,
    Incarnation,
    LinkReport,
    MemberSnapshot,
    NodeId,
    Snapshot,
)
from gpulayer_mesh.errors import ExitCode, GpuLayerError, RemovedError
from gpulayer_mesh.runtime import dialling, footprint, preflight, surroundings
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime import interfaces as nics
from gpulayer_mesh.runtime.capabilities import Machine
from gpulayer_mesh.runtime.copies import Copies
from gpulayer_mesh.runtime.dial import Dialer
from gpulayer_mesh.runtime.discovery import Discovery, mesh_tag
from gpulayer_mesh.runtime.door import Door, DoorRequest, Route
from gpulayer_mesh.runtime.gossip import Gossip
from gpulayer_mesh.runtime.gpus import Gpus, cpus_near, load_nvml
from gpulayer_mesh.runtime.ground import Means
from gpulayer_mesh.runtime.hosting import JobHost, Site
from gpulayer_mesh.runtime.jobdoor import JobDoor
from gpulayer_mesh.runtime.links import Links
from gpulayer_mesh.runtime.livejob import may_launch, open_signed
from gpulayer_mesh.runtime.packets import PacketPort
from gpulayer_mesh.runtime.peers import ADDRESSES_MAX, Peers
from gpulayer_mesh.runtime.restarts import Restarts
from gpulayer_mesh.runtime.restoring import Restoring
from gpulayer_mesh.runtime.servicedoor import ServiceDoor
from gpulayer_mesh.runtime.shims import ShimRunner
from gpulayer_mesh.runtime.startup import claim_port, enter_mesh, only_agent
from gpulayer_mesh.runtime.store import ChunkStore

log = logging.getLogger("gpulayer.agent")

SETTLED_S = 30.0  # by then everything that only the start needs has run
SAVE_AGAIN_S = 60.0  # of a full disk, which people have to make room on
LOAD_S = 5.0  # psutil's figures cost 1 ms
TARGETS_MAX = 1024  # of one pre-flight: the largest job


class Agent:
    """Everything of one node. Make one, `run` it."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.home = config.home
        self.identity = identities.load_or_create(self.home)
        self.node = self.identity.node
        self.watch = nics.InterfaceWatch()
        self._caps_version = 0
        self._removed = asyncio.Event()
        self._reaching = asyncio.Lock()

    # --- start and end ---------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Raises:
            ConfigError: another agent runs here, or the port cannot be had.
            NoMeshError, RemovedError, JoinError: no mesh to serve (any more).
        """
        with only_agent(self.home) as note_port:
            hosts = self.config.bind or ("0.0.0.0", "::")
            async with contextlib.AsyncExitStack() as stack:
                packets = await claim_port(hosts, self.config.port)
                stack.callback(packets.close)
                self.port = packets.port
                mesh = await enter_mesh(self.config, self.identity, self._addresses())
                self.book = mesh.book
                self.boot = identities.next_boot(self.home)
                self._remember_options()
                await self._open(stack, hosts, packets)
                note_port(self.port)
                log.info(
                    "%s (%s) serves on port %d: %s",
                    self.name,
                    self.node[:8],
                    self.port,
                    ", ".join(address.host for address in self._addresses()) or "no address",
                )
                await self._serve(stop)

    def _remember_options(self) -> None:
        try:
            configuration.remember(self.config)
        except OSError as e:
            log.warning("the options of this start are not kept for later ones: %s", e)

    async def _open(
        self, stack: contextlib.AsyncExitStack, hosts: tuple[str, ...], packets: PacketPort
    ) -> None:
        """Make every part; the door last, because requests come at once."""
        self.dialer = Dialer(
            context=identities.client_context(self.home),
            book=self.book,
            node=self.node,
            on_roster=self._offer_roster,
            received=lambda node, size: self.links.received(node, size),
        )
        stack.push_async_callback(self.dialer.close)
        self.machine = Machine(
            self.home,
            python=self.config.python,
            version=gpulayer_mesh.__version__,
            gpus=Gpus(configuration.environment().get("CUDA_VISIBLE_DEVICES"), load_nvml()),
            care=DeviceCare(
                lambda device: self.reservations.holding(device),
                lambda job: job in self.jobs.jobs,
            ),
            interfaces=lambda: self.watch.current,
        )
        self.reservations = Reservations(self.name, cpus=self.machine.cpus)
        self.members = Membership(
            AliveRecord(
                self.node,
                Incarnation(self.boot, 0),
                self.name,
                self.config.zone,
                self._addresses(),
                self._caps_version,
            ),
            config=swim.SwimConfig(),
            rng=random.Random(),
            now=time.monotonic(),
        )
        self.caps = RecordBook(self.book, "caps", CapsRecord)
        self.peers = Peers(
            home=self.home,
            node=self.node,
            book=self.book,
            dialer=self.dialer,
            watch=self.watch,
            views=self.members.members,
            configured=self.config.peers,
            contacted=lambda node: self.gossip.post(swim.Contact(node)),
        )
        stack.push_async_callback(self.peers.close)
        reports = RecordBook(self.book, "links", LinkReport)
        self.links = Links(
            node=self.node,
            boot=self.boot,
            key=self.identity.key,
            book=self.book,
            views=self.members.members,
            reports=reports,
            stream=self.peers.stream,
            path_mtu=self.dialer.path_mtu,
            busy=lambda: bool(self.reservations.grants),
        )
        self.gossip = Gossip(
            node=self.node,
            book=self.book,
            members=self.members,
            caps=self.caps,
            links=reports,
            codec=Codec(
                mesh=self.book.mesh,
                node=self.node,
                boot=self.boot,
                key=self.identity.key,
                key_of=self.book.key_of,
            ),
            packets=packets,
            peers=self.peers,
            offer_roster=self._offer_roster,
        )
        stack.push_async_callback(self.gossip.close)
        self.gossip.post(swim.RosterChanged(frozenset(self.book.members)))
        self.jobs = self._job_host()
        stack.push_async_callback(self.copies.close)
        stack.push_async_callback(self.restarts.close)
        self.jobs.adopt()  # before the door opens: what runs here is not free
        self.restarts.adopt()
        services = ServiceDoor(self.jobs)
        stack.push_async_callback(services.close)
        self.door = Door(
            context=identities.server_context(self.home),
            book=self.book,
            node=self.node,
            routes=[
                Route("GET", "/v1/ping", self.ping),
                Route("GET", "/v1/snapshot", self.snapshot),
                Route("GET", "/v1/health", self.health),
                Route("POST", "/v1/reach", self.reach),
                *self.gossip.routes(),
                *self.links.routes(),
                *self._job_door().routes(),
                *self.copies.routes(),
                *self.restarts.routes(),
                *services.routes(),
            ],
            on_roster=self._roster_presented,
        )
        await self.door.start(hosts, self.port)
        stack.push_async_callback(self.door.close)
        self.discovery = Discovery(tag=mesh_tag(self.book.mesh), node=self.node, port=self.port)
        if self._uses_multicast():
            await self.discovery.start(self._addresses(), self.watch.current)
        stack.push_async_callback(self.discovery.close)

    async def _serve(self, stop: asyncio.Event) -> None:
        loops: list[Any] = [
            self.gossip.run(),
            self.gossip.receive(),
            self.peers.follow(self.discovery.candidates),
            self.peers.seek(),
            self.peers.save(),
            self.links.run(),
            self._follow_interfaces(),
            self._follow_machine(),
            self._report_load(),
            self.jobs.run(),
        ]
        loop = asyncio.get_running_loop()
        settled = loop.call_later(SETTLED_S, footprint.release_start_up_memory)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one) for one in loops]
            await self._stopped_or_removed(stop)
            settled.cancel()
            self.gossip.leave()
            for task in running:
                task.cancel()
        if self._removed.is_set():
            raise RemovedError

    async def _stopped_or_removed(self, stop: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._removed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _site(self) -> Site:
        return Site(
            node=self.node,
            name=self.name,
            home=self.home,
            python=self.config.python,
            environ=configuration.environment(),
            book=self.book,
            reservations=self.reservations,
            store=ChunkStore(self.home / "chunks"),
            shims=ShimRunner(),
            call=self.peers.call,
            devices=lambda: self.machine.current.devices if self.machine.current else (),
            care=self.machine,
            addresses=self._addresses_of,
            interface_for=lambda hosts: nics.interface_for(hosts, nics.list_interfaces()),
            cpus_near=cpus_near,
            changed=self._grants_changed,
        )

    def _job_host(self) -> JobHost:
        site = self._site()
        self.copies = Copies(
            self.home / "copies",
            node=self.node,
            store=site.store,
            call=self.peers.call,
            stream=self.peers.stream,
            open_spec=self._open_spec,
            may_read=lambda job, peer, roles: self.restarts.may_read(job, peer, roles),
        )
        means = Means(
            key=self.identity.key,
            copies=self.copies,
            snapshot=self._snapshot,
            addresses=self._addresses_of,
        )

        def restarting(host: JobHost) -> Restarts:
            self.restarts = Restarts(host, means)
            return self.restarts

        return JobHost(site, restarting)

    def _open_spec(self, chain: bytes) -> JobSpec:
        attempt = open_signed(chain, self.book)
        may_launch(attempt, self.book)
        return attempt.spec

    def _job_door(self) -> JobDoor:
        return JobDoor(
            self.jobs,
            ports=preflight.FreePorts(),
            missing_imports=self.machine.missing_imports,
            open_preflight=self._open_preflight,
            check_preflight=_check_preflight,
            restoring=Restoring(
                node=self.node,
                stream=self.peers.stream,
                open_live=lambda job, area, rank, path: ChunkStore.open_output(
                    self.home / "jobs" / job, area, rank, path
                ),
                open_held=self.copies.open_held,
            ),
            restarts=self.restarts,
        )

    # --- roster ----------------------------------------------------------------------------------

    async def _roster_presented(self, signed: bytes) -> None:
        self._offer_roster(signed)

    def _offer_roster(self, signed: bytes) -> None:
        """Adopt a newer roster: keep it, drop who is gone, tell the cores."""
        if not self.book.offer(signed):
            return
        self._keep_roster()
        members = frozenset(self.book.members)
        log.info("roster epoch %d: %d members", self.book.epoch, len(members))
        self.door.enforce()
        self.caps.keep(members)
        self.peers.keep(members)
        self.links.keep(members)
        self.gossip.post(swim.RosterChanged(members))
        self.jobs.enforce()
        if self.node not in members:
            log.error("this machine was removed from the mesh: its jobs are stopped, and so am I")
            self._removed.set()

    def _keep_roster(self) -> None:
        """Save it; who was removed is out at once, whatever the disk says."""
        try:
            identities.save_roster(self.home, self.book)
        except OSError as e:
            log.warning("the roster cannot be saved, next try in %.0f s: %s", SAVE_AGAIN_S, e)
            asyncio.get_running_loop().call_later(SAVE_AGAIN_S, self._keep_roster)

    # --- this machine ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        entry = self.book.members.get(self.node)
        return entry.name if entry else self.config.name

    def _addresses(self) -> Addresses:
        """Where this agent may be reached."""
        found = [
            address
            for bind in self.config.bind or ("",)
            for address in nics.announce_addresses(self.watch.current, self.port, bind)
        ]
        return tuple(dict.fromkeys(found))[:ADDRESSES_MAX]

    def _addresses_of(self, node: NodeId) -> Addresses:
        mine = node == self.node
        return self._addresses() if mine else self.peers.addresses(node)[:ADDRESSES_MAX]

    def _uses_multicast(self) -> bool:
        return not self.config.bind or any(not _is_loopback(host) for host in self.config.bind)

    async def _follow_interfaces(self) -> None:
        async for change in self.watch.changes():
            match change:
                case nics.Woke(gap_s):
                    log.info("the machine slept for about %.0f s", gap_s)
                    self.dialer.forget_connections()
                    self.gossip.post(swim.Woke())
                case nics.AddressesChanged(current):
                    log.info("addresses: %s", ", ".join(a.host for a in self._addresses()))
                    self._announce()
                    if self._uses_multicast():
                        await self.discovery.update(self._addresses(), current)
                case _:
                    assert_never(change)

    async def _follow_machine(self) -> None:
        async for capabilities in self.machine.changes():
            self.reservations.set_devices([device.index for device in capabilities.devices])
            self._publish(capabilities)

    async def _report_load(self) -> None:
        while True:
            self.gossip.post(swim.LoadChanged(self.machine.load(self.reservations)))
            await asyncio.sleep(LOAD_S)

    def _grants_changed(self) -> None:
        capabilities = self.machine.judge()
        if capabilities is not None:
            self._publish(capabilities)

    def _publish(self, capabilities: Capabilities) -> None:
        """Sign what this machine has; members pull it when they hear of the new version."""
        self._caps_version += 1
        record = CapsRecord(
            self.node, self.boot, self._caps_version, capabilities, self.reservations.grants
        )
        signed = wire.seal(
            self.identity.key,
            kind="caps",
            mesh=self.book.mesh,
            sender=self.node,
            boot=self.boot,
            seq=self._caps_version,
            body=record,
        )
        self.caps.put(record, signed)
        self._announce()

    def _announce(self) -> None:
        self.gossip.post(
            swim.LocalChanged(self.name, self.config.zone, self._addresses(), self._caps_version)
        )

    async def _open_preflight(self, ports: int) -> reach.Opened:
        # Read afresh: the watch may not have seen yet that a cable is back.
        current = nics.announce_addresses(nics.list_interfaces(), self.port)
        hosts = self.config.bind or [address.host for address in current]
        port = await preflight.PreflightPort.open(list(hosts), ports=ports)
        return reach.Opened(port.ports, port.nonce, *preflight.ephemeral_range())

    # --- what members may ask --------------------------------------------------------------------

    async def ping(self, request: DoorRequest) -> dict[str, Any]:
        return {
            "node": self.node,
            "boot": self.boot,
            "version": gpulayer_mesh.__version__,
            "epoch": self.book.epoch,
        }

    async def health(self, request: DoorRequest) -> Health:
        """What the doctor asks every agent."""
        disk = await asyncio.to_thread(surroundings.room, self.home)
        return Health(
            wall_s=time.time(),
            port=self.port,
            wanted_port=self.config.port,
            multicast=self._uses_multicast(),
            addresses=self._addresses(),
            mdns=(self.discovery.problem or "")[:256],
            disk_free_mib=disk.free_mib if disk else None,
            shared_memory=await asyncio.to_thread(surroundings.shared_memory),
            copies=self.gossip.copies,
            over_tcp=tuple(n for n, view in self.members.members.items() if view.via == "tcp"),
            met=self.door.met(),
        )

    async def reach(self, request: DoorRequest) -> ReachAnswer:
        """Try to connect to the members that are asked about, for the doctor."""
        asked = wire.decode_as(ReachAsked, wire.unpack(request.body))
        where = {node: self.peers.addresses(node) for node in asked.nodes if node in self.book}
        async with self._reaching:  # one doctor at a time: each opens up to 128 connections
            return ReachAnswer(await dialling.failures(self.dialer.who_is, where))

    async def snapshot(self, request: DoorRequest) -> Snapshot:
        """What this agent believes of the mesh."""
        return self._snapshot()

    def _snapshot(self) -> Snapshot:
        rows = [self._row(entry.node) for entry in self.book.members.values()]
        links, zones = self.links.view(rows)
        members = tuple(
            replace(row, zone=zone, zone_inferred=True) if zone else row
            for row, zone in zip(rows, zones, strict=True)
        )
        return Snapshot(self.book.mesh, self.node, self.book.epoch, members, links)

    def _row(self, node: NodeId) -> MemberSnapshot:
        entry = self.book.members[node]
        view = self.members.members.get(node)
        record = self.caps.get(node)
        if view is None:
            return MemberSnapshot(node, entry.name, entry.roles, None)
        now = time.monotonic()
        mine = node == self.node
        return MemberSnapshot(
            node=node,
            name=entry.name,
            roles=entry.roles,
            state=view.state,
            zone=view.record.zone,
            addresses=self._addresses_of(node),
            incarnation=view.record.incarnation,
            since_s=now - view.since,
            heard_s=0.0 if mine else None if view.heard is None else now - view.heard,
            rtt_ms=None if view.rtt_s is None else view.rtt_s * 1000,
            via=view.via,
            load=self.machine.load(self.reservations) if mine else view.load,
            caps=record.capabilities if record else None,
            grants=self.reservations.grants if mine else record.grants if record else (),
        )


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


async def _check_preflight(targets: Any) -> list[reach.Reached]:
    wanted = wire.decode_as(tuple[reach.Target, ...], targets)
    return await preflight.check(wanted[:TARGETS_MAX])


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
    except OSError as e:  # a disk that is full or broken, a folder that is not ours
        print(f"gpulayer-agent: error: {e}", file=sys.stderr)
        return int(ExitCode.FAILED)
    return int(ExitCode.OK)


async def _main(config: AgentConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await Agent(config).run(stop)


if __name__ == "__main__":
    sys.exit(main())
