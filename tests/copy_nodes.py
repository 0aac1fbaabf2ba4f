"""Nodes that hold copies of each other's files, over a network that is a dictionary."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from urllib.parse import parse_qsl

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.copies import ranks_of
from gpulayer_mesh.core.jobspec import JobKind, JobSpec, OutputFile, Slot
from gpulayer_mesh.core.manifest import Entry, Manifest, pack_manifest
from gpulayer_mesh.core.types import Accelerator, Addresses, NodeId
from gpulayer_mesh.errors import TransportError
from gpulayer_mesh.runtime.copies import Copies
from gpulayer_mesh.runtime.door import DoorRequest, Stream
from gpulayer_mesh.runtime.restoring import Restoring
from gpulayer_mesh.runtime.store import ChunkStore
from gpulayer_mesh.runtime.transfer import read_pieces

JOB = "0123456789"
SHIPPED = b"shipped\n"
CHUNK = hashlib.sha256(SHIPPED).digest()
MANIFEST = Manifest((Entry("a.txt", size=len(SHIPPED), sha256=CHUNK, chunks=(CHUNK,)),))
PACKED, MANIFEST_SHA = pack_manifest(MANIFEST)
PAUSE_S = 0.01  # between two looks: a file counts after two


def node_id(name: str) -> NodeId:
    return hashlib.sha256(name.encode()).hexdigest()


def spec_of(*names: str, voters: tuple[str, ...] = (), **fields: object) -> JobSpec:
    known: dict[str, object] = {
        "id": JOB,
        "kind": JobKind.COMMAND,
        "name": "train.py",
        "submitter": node_id("laptop"),
        "submitter_name": "laptop",
        "submitted_at": 0.0,
        "argv": (b"train.py",),
        "python": True,
        "cwd": "",
        "env": {},
        "accelerator": Accelerator.CPU,
        "slots": tuple(Slot(node_id(name), name, 1) for name in names),
        "manifest": MANIFEST_SHA,
        "bundle_bytes": len(SHIPPED),
        "restarts": 3,
        "voters": tuple(node_id(name) for name in voters or names),
    }
    return JobSpec(**(known | fields))  # type: ignore[arg-type]


def listed(data: bytes, path: str, area: str = "out", rank: int = 0) -> OutputFile:
    return OutputFile(area, rank, path, len(data), hashlib.sha256(data).digest())


class Net:
    """Every node, and what goes wrong between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[NodeId, Node] = {}
        self.unreachable: set[str] = set()  # names
        self.gate = asyncio.Event()  # streams of files stand still while it is not set
        self.gate.set()
        self.begun = asyncio.Event()  # a file's first piece is under way
        self.alter: Callable[[bytes], bytes] | None = None  # each piece of a file; b"": breaks off
        self.files: list[tuple[str, str]] = []  # (node, path) of each file that was streamed

    def node(self, name: str) -> Node:
        made = self.nodes[node_id(name)] = Node(self, name)
        return made

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.close()


class Node:
    """One agent's copies, and its jobs as far as their files go."""

    def __init__(self, net: Net, name: str) -> None:
        self.net = net
        self.name = name
        self.id = node_id(name)
        self.home = net.folder / name
        self.calls: list[tuple[str, str]] = []  # method and path
        self.readers: set[NodeId] = {node_id("laptop")}
        self.store = ChunkStore(self.home / "chunks")
        self.copies = self._copies()
        self.restoring = Restoring(
            node=self.id,
            stream=self.stream,
            open_live=lambda job, *key: self.store.open_output(self.home / "jobs" / job, *key),
            open_held=lambda job, sha256: self.copies.open_held(job, sha256),
        )
        self._following: list[asyncio.Task[None]] = []

    def _copies(self) -> Copies:
        return Copies(
            self.home / "copies",
            node=self.id,
            store=self.store,
            call=self.call,
            stream=self.stream,
            open_spec=lambda signed: wire.decode_as(JobSpec, wire.unpack(signed)),
            may_read=lambda job, peer, roles: peer in self.readers,
            pause_s=PAUSE_S,
        )

    async def restart(self) -> None:
        """The agent ends and a new one comes."""
        await self.copies.close()
        self.copies = self._copies()

    async def close(self) -> None:
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        self._following.clear()
        await self.copies.close()

    def job_dir(self, job: str = JOB) -> Path:
        """Return a job's folder as it is after staging."""
        folder = self.home / "jobs" / job
        if not folder.exists():
            (folder / "work").mkdir(parents=True)
            (folder / "work" / "a.txt").write_bytes(SHIPPED)
        return folder

    def write(self, path: str, data: bytes, job: str = JOB) -> Path:
        """Write a file of a job as a careful program does."""
        where = self.job_dir(job) / path
        where.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.home / "being-written"
        fresh.write_bytes(data)
        fresh.rename(where)
        return where

    def follow(self, spec: JobSpec) -> asyncio.Task[None]:
        """Have the files of this node's slot copied."""
        slot = [slot.node for slot in spec.slots].index(self.id)
        task = asyncio.create_task(
            self.copies.follow(self.job_dir(spec.id), spec, wire.pack(spec), slot, MANIFEST)
        )
        self._following.append(task)
        return task

    def held(self, slot: int = 0, job: str = JOB) -> dict[str, bytes] | None:
        """Return path -> content of what this node holds of a slot; None: nothing."""
        found = [held for held in self.copies.held(job) if held.slot == slot]
        return {file.path: self._read(job, file) for file in found[0].files} if found else None

    def _read(self, job: str, file: OutputFile) -> bytes:
        fd = self.copies.open_held(job, file.sha256)
        assert fd is not None
        with os.fdopen(fd, "rb") as blob:
            return blob.read()

    def on_disk(self) -> list[str]:
        """Return every file below `copies`."""
        root = self.home / "copies"
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())

    # --- the network -----------------------------------------------------------------------------

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
        self.calls.append((method, path))
        answer = await self._other(node).ask(self, method, path, body)
        assert not isinstance(answer, Stream)
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
    ) -> AsyncGenerator[bytes, None]:
        answer = await self._other(node).ask(self, method, path, body)
        assert isinstance(answer, Stream)
        self.net.files.append((self._other(node).name, dict(parse_qsl(path))["path"]))
        pieces = answer.pieces
        assert isinstance(pieces, AsyncGenerator)
        async with aclosing(pieces):
            async for piece in pieces:
                self.net.begun.set()
                await self.net.gate.wait()
                self._other(node)
                sent = self.net.alter(piece) if self.net.alter else piece
                if not sent:
                    raise TransportError("the connection broke off")
                yield sent

    def _other(self, node: NodeId) -> Node:
        found = self.net.nodes.get(node)
        if found is None or {found.name, self.name} & self.net.unreachable:
            raise TransportError("cannot be reached")
        return found

    async def ask(self, peer: Node, method: str, path: str, body: bytes = b"") -> object:
        """Answer one request, as behind the door."""
        path, _, query = path.partition("?")
        fields = dict(parse_qsl(query, keep_blank_values=True))
        for route in self.copies.routes():
            match = re.fullmatch(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", route.path), path)
            if match and route.method == method:
                assert len(body) <= route.max_body
                params = match.groupdict()
                return await route.handler(DoorRequest(peer.id, (), params, fields, body))
        _, _, kind, job, verb, *rest = [*path.split("/"), ""]
        assert kind == "jobs"
        if verb == "manifest":
            return PACKED
        if verb == "chunks":
            return self.store.read(bytes.fromhex(rest[0]))
        assert verb == "file"
        key = fields["area"], int(fields["rank"]), fields["path"]
        fd = self.store.open_output(self.home / "jobs" / job, *key)
        return Stream(read_pieces(lambda: fd, int(fields["offset"])))


def ranks(spec: JobSpec, node: Node) -> range:
    return ranks_of(spec, [slot.node for slot in spec.slots].index(node.id))
