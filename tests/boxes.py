"""Several agents' jobs in one process: real machines, folders, stores, shims and small ranks.

Only the network between the boxes is a dictionary. Requests pass the same checks as at the door.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import mesh_cases
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gpulayer_mesh.core import certificates, roster, wire
from gpulayer_mesh.core.devicecare import DeviceCare
from gpulayer_mesh.core.jobspec import (
    GoOrder,
    HostPhase,
    JobKind,
    JobSpec,
    JobState,
    Slot,
)
from gpulayer_mesh.core.lease import Reservations
from gpulayer_mesh.core.logrecord import RecordParser
from gpulayer_mesh.core.manifest import Entry, Manifest, pack_manifest
from gpulayer_mesh.core.reach import NONCE_BYTES, Failed, Opened, Reached, Trouble
from gpulayer_mesh.core.roster import Roster, RosterBook
from gpulayer_mesh.core.tickets import Ticket
from gpulayer_mesh.core.types import (
    Accelerator,
    Addresses,
    Capabilities,
    NodeId,
    NodeState,
    Role,
    Snapshot,
)
from gpulayer_mesh.errors import (
    NotAllowedError,
    TransportError,
)
from gpulayer_mesh.runtime.capabilities import Machine
from gpulayer_mesh.runtime.copies import Copies
from gpulayer_mesh.runtime.door import DoorRequest, Route
from gpulayer_mesh.runtime.gpus import FakeNvml, Gpus
from gpulayer_mesh.runtime.ground import Means
from gpulayer_mesh.runtime.hosting import JobHost, Site
from gpulayer_mesh.runtime.jobdoor import JobDoor
from gpulayer_mesh.runtime.livejob import may_launch, open_signed
from gpulayer_mesh.runtime.preflight import FreePorts
from gpulayer_mesh.runtime.restarts import Restarts
from gpulayer_mesh.runtime.restoring import Restoring
from gpulayer_mesh.runtime.shims import ShimRunner
from gpulayer_mesh.runtime.store import ChunkStore
from shim_jobs import eventually

JOB = "0123456789"
CONTENT = b"shipped\n"
CHUNK = hashlib.sha256(CONTENT).digest()
MANIFEST, MANIFEST_SHA = pack_manifest(
    Manifest((Entry("a.txt", size=len(CONTENT), sha256=CHUNK, chunks=(CHUNK,)),))
)
ORDER = GoOrder("127.0.0.1", 29400, ("127.0.0.1", "127.0.0.1"))
WAITS = """
import os, time
print("up", flush=True)
while not os.path.exists("finish"):
    time.sleep(0.02)
open(os.environ["GPULAYER_OUT"] + "/loss:0.3.txt", "w").write("done")
"""
ROLES = {
    "laptop": (Role.LAUNCHER,),
    "box-0": (Role.WORKER,),
    "box-1": (Role.WORKER,),
    "box-2": (Role.WORKER,),
    "boss": (Role.ADMIN,),
    "other": (Role.WORKER, Role.LAUNCHER),
}


class Mesh:
    """Members by name, their keys, and the boxes that run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = {name: Ed25519PrivateKey.generate() for name in ROLES}
        self.ca = Ed25519PrivateKey.generate()
        self.boxes: dict[NodeId, Box] = {}
        entries = tuple(
            roster.entry(key.public_key().public_bytes_raw(), name, ROLES[name])
            for name, key in self.keys.items()
        )
        self.roster = Roster(certificates.id_of(self.ca), 1, entries)

    def node(self, name: str) -> NodeId:
        return certificates.id_of(self.keys[name])

    def book(self) -> RosterBook:
        return RosterBook(self.ca.public_key(), roster.seal_roster(self.ca, self.roster))

    def remove(self, name: str) -> None:
        """Every running box learns of it."""
        self.roster = roster.without_member(self.roster, self.node(name))
        for box in self.boxes.values():
            box.book.offer(roster.seal_roster(self.ca, self.roster))

    def spec(self, *names: str, code: str = "", **fields: object) -> JobSpec:
        known: dict[str, object] = {
            "id": JOB,
            "kind": JobKind.COMMAND,
            "name": "train.py",
            "submitter": self.node("laptop"),
            "submitter_name": "laptop",
            "submitted_at": 1_700_000_000.0,
            "argv": (b"-c", code.encode()),
            "python": True,
            "cwd": "",
            "env": {},
            "accelerator": Accelerator.CPU,
            "slots": tuple(Slot(self.node(name), name, 1) for name in names or ("box-0",)),
            "manifest": MANIFEST_SHA,
            "bundle_bytes": len(CONTENT),
            "stop_grace_s": 2.0,
        }
        return JobSpec(**(known | fields))  # type: ignore[arg-type]

    def ticket(self, number: int = 1, job: str = JOB, by: str = "laptop") -> Ticket:
        return Ticket(number, job, self.node(by), by, "train.py", "1 node")

    def sign(self, spec: JobSpec, by: str = "laptop", **fields: Any) -> bytes:
        known = {
            "kind": "job",
            "mesh": self.roster.mesh,
            "sender": self.node(by),
            "audience": spec.id,
        }
        return wire.seal(self.keys[by], body=spec, **(known | fields))

    async def start(self, *names: str, **fields: Any) -> list[Box]:
        boxes = [Box(self, name, **fields) for name in names]
        for box in boxes:
            await box.start()
        return boxes

    async def stage(self, spec: JobSpec, to: HostPhase = HostPhase.STAGED) -> None:
        """Bring a job on all its boxes as far as this, as the launcher does."""
        for slot in spec.slots:
            box = self.boxes[slot.node]
            await box.ask("laptop", "POST", "reserve", {"spec": self.sign(spec)})
            if to is HostPhase.RESERVED:
                continue
            await box.ask("laptop", "POST", "manifest", raw=MANIFEST)
            if to is HostPhase.STAGING:
                continue
            await box.ask("laptop", "PUT", f"/v1/chunks/{CHUNK.hex()}", raw=CONTENT, job=JOB)
            source = {"node": slot.node, "addresses": []}
            await box.ask("laptop", "POST", "stage", {"sources": [source], "owners": [0]})


class Box:
    """One agent's jobs, reached as through its door."""

    def __init__(
        self, mesh: Mesh, name: str, *, cpus: int = 4, nvml: FakeNvml | None = None
    ) -> None:
        self.mesh = mesh
        self.name = name
        self.node = mesh.node(name)
        self.home = mesh.folder / name
        self.home.mkdir(exist_ok=True)
        self.book = mesh.book()
        self.calls: list[tuple[str, str]] = []  # (node's name, path)
        self.unreachable: set[str] = set()
        self.cut: set[str] = set()  # whom ranks cannot connect to
        self.shims = ShimRunner()
        self.reservations = Reservations(name, cpus=cpus)
        self.nvml = nvml
        self.ranks: dict[int, str] = {}  # pid on a pretended device -> job
        self.published: list[Capabilities] = []
        self.machine = Machine(
            self.home,
            python="/nowhere/python",  # there is no torch to be proven
            version="0.1.0",
            gpus=Gpus(
                None,
                nvml,
                job_of=lambda pid: self.ranks.get(pid, ""),
                name_of=lambda pid: "python" if pid in self.ranks else "blender",
            ),
            care=DeviceCare(self.reservations.holding, lambda job: job in self.host.jobs),
            interfaces=lambda: (),
        )
        self.host = JobHost(
            Site(
                node=self.node,
                name=name,
                home=self.home,
                python=sys.executable,
                environ={"PATH": "/usr/bin:/bin"},
                book=self.book,
                reservations=self.reservations,
                store=ChunkStore(self.home / "chunks"),
                shims=self.shims,
                call=self.call,
                devices=lambda: self.machine.current.devices if self.machine.current else (),
                care=self.machine,
                addresses=lambda node: (),
                interface_for=lambda hosts: None,
                cpus_near=lambda numa: () if numa is None else (0,),
                changed=self._changed,
            ),
            self._restarts,
        )
        self.door = JobDoor(
            self.host,
            ports=FreePorts(),
            missing_imports=self._missing_imports,
            open_preflight=self._open_preflight,
            check_preflight=self._check_preflight,
            restoring=Restoring(
                node=self.node,
                stream=self.stream,
                open_live=lambda job, area, rank, path: ChunkStore.open_output(
                    self.home / "jobs" / job, area, rank, path
                ),
                open_held=self.copies.open_held,
            ),
            restarts=self.restarts,
        )

    def _restarts(self, host: JobHost) -> Restarts:
        self.copies = Copies(
            self.home / "copies",
            node=self.node,
            store=host.site.store,
            call=self.call,
            stream=self.stream,
            open_spec=self.open_spec,
            may_read=lambda job, peer, roles: self.restarts.may_read(job, peer, roles),
        )
        means = Means(
            key=self.mesh.keys[self.name],
            copies=self.copies,
            snapshot=self.snapshot,
            addresses=lambda node: (),
        )
        self.restarts = Restarts(host, means)
        return self.restarts

    def open_spec(self, chain: bytes) -> JobSpec:
        attempt = open_signed(chain, self.book)
        may_launch(attempt, self.book)
        return attempt.spec

    def snapshot(self) -> Snapshot:
        """What gossip knows: who is reachable is alive."""
        return mesh_cases.mesh(
            *(
                mesh_cases.member(
                    name,
                    node=self.mesh.node(name),
                    roles=ROLES[name],
                    state=NodeState.ALIVE
                    if self.mesh.node(name) in self.mesh.boxes and name not in self.unreachable
                    else NodeState.DEAD,
                )
                for name in ROLES
            )
        )

    async def start(self) -> None:
        self.mesh.boxes[self.node] = self
        self.host.adopt()
        self.restarts.adopt()
        loops = [self.host.run()]
        if self.nvml is not None:
            loops.append(self._follow_machine())
        self._running = asyncio.gather(*loops)
        if self.nvml is not None:
            await eventually(lambda: bool(self.published))

    async def _follow_machine(self) -> None:
        async for capabilities in self.machine.changes():
            self.reservations.set_devices([device.index for device in capabilities.devices])
            self.published.append(capabilities)

    def _changed(self) -> None:
        if capabilities := self.machine.judge():
            self.published.append(capabilities)

    async def crash(self) -> None:
        """End this agent without a word; its shims live on."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.restarts.close()
        await self.copies.close()
        del self.mesh.boxes[self.node]

    async def restart(self) -> Box:
        await self.crash()
        box = Box(self.mesh, self.name, nvml=self.nvml)
        box.ranks = self.ranks
        await box.start()
        return box

    async def close(self) -> None:
        await self.crash()
        for folder in (self.home / "jobs").glob("*/"):
            self.shims.kill(folder)
            await eventually(lambda folder=folder: not self.shims.alive(folder))

    async def ask(
        self,
        who: str,
        method: str,
        path: str,
        body: object = None,
        /,
        *,
        raw: bytes | None = None,
        **query: str,
    ) -> Any:
        """One request; a path without a slash in front is one of the job."""
        path = path if path.startswith("/") else f"/v1/jobs/{JOB}/{path}".rstrip("/")
        route, params = self._route(method, path)
        peer = self.mesh.node(who)
        roles = self.book.roles(peer)
        if route.allow is not None and route.allow not in roles:
            raise NotAllowedError("the door lets only some roles in")
        data = wire.pack({} if body is None else body) if raw is None else raw
        assert len(data) <= route.max_body
        return await route.handler(DoorRequest(peer, roles, params, query, data))

    def _route(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        routes = [*self.door.routes(), *self.copies.routes(), *self.restarts.routes()]
        routes.append(Route("GET", "/v1/ping", self._ping))
        for route in routes:
            match = re.fullmatch(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", route.path), path)
            if match and route.method == method:
                return route, match.groupdict()
        raise AssertionError(f"no route {method} {path}")

    async def call(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        addresses: Addresses = (),
        deadline_s: float = 10.0,
    ) -> bytes:
        """`PeerCall` to the other boxes of the test."""
        name = next(name for name in ROLES if self.mesh.node(name) == node)
        self.calls.append((name, path))
        if name in self.unreachable or node not in self.mesh.boxes:
            raise TransportError(f"{name} cannot be reached")
        path, _, query = path.partition("?")
        pairs = dict(pair.split("=") for pair in query.split("&") if pair)
        answer = await self.mesh.boxes[node].ask(self.name, method, path, raw=body, **pairs)
        return answer if isinstance(answer, bytes) else wire.pack(answer)

    async def stream(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        addresses: Addresses = (),
        deadline_s: float = 10.0,
    ) -> AsyncIterator[bytes]:
        """`PeerStream` likewise."""
        name = next(name for name in ROLES if self.mesh.node(name) == node)
        if name in self.unreachable or node not in self.mesh.boxes:
            raise TransportError(f"{name} cannot be reached")
        path, _, query = path.partition("?")
        pairs = dict(parse_qsl(query, keep_blank_values=True))
        answer = await self.mesh.boxes[node].ask(self.name, method, path, raw=body, **pairs)
        async for piece in answer.pieces:
            yield piece

    async def _ping(self, request: DoorRequest) -> dict[str, Any]:
        return {}

    async def _missing_imports(self, names: object) -> list[str]:
        return []

    async def _open_preflight(self, ports: int) -> Opened:
        return Opened((1,) * ports, bytes(NONCE_BYTES), 1, 65535)

    async def _check_preflight(self, targets: Any) -> list[Reached]:
        nodes = [target["node"] for target in targets or ()]
        cut = {self.mesh.node(name) for name in self.cut}
        silent = (Failed("127.0.0.1", 1, Trouble.SILENT, "no answer"),)
        return [
            Reached(node, failed=silent) if node in cut else Reached(node, ("127.0.0.1",))
            for node in nodes
        ]

    def phase(self) -> HostPhase:
        return self.host.jobs[JOB].machine.phase

    def state(self) -> JobState:
        return self.host.jobs[JOB].current_record().state

    def seen(self) -> object:
        """What a refused request must not change."""
        one = self.host.jobs.get(JOB)
        paths = map(str, (self.home / "jobs").rglob("*"))
        papers = sorted(path for path in paths if "/.gone-" not in path)  # being removed
        known = one and (replace(one.report(), at=0.0), one.record, one.kept, one.manifest)
        tickets = self.host.tickets.all(time.monotonic())
        return known, papers, self.reservations.grants, tickets

    @property
    def work(self) -> Path:
        return self.home / "jobs" / JOB / "work"

    async def log(self, *, follow: bool = True) -> bytes:
        stream = await self.ask("other", "GET", "logs", follow="1" if follow else "0")
        parser = RecordParser()
        return b"".join([r.data for b in [p async for p in stream.pieces] for r in parser.feed(b)])
