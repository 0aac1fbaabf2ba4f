"""One job as a node remembers it, and its papers on disk.

    jobs/ID/spec       the signed spec, as received      manifest   packed, its hash is in the spec
            record     the newest word on the job        secretive  there if it got secrets
            before     memory in use on its devices before the start
            (the rest: see `shim` and `store`)

This module does not know who may do what to a job, or how anything is run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from gpulayer_mesh.clock import boot_clock
from gpulayer_mesh.core import restarts, wire
from gpulayer_mesh.core.hosted import HostedJob
from gpulayer_mesh.core.job import KeptJob
from gpulayer_mesh.core.jobspec import (
    RESTARTS_MAX,
    HostPhase,
    HostReport,
    JobRecord,
    JobSpec,
)
from gpulayer_mesh.core.manifest import Manifest, open_manifest, unique_chunks
from gpulayer_mesh.core.rankenv import first_rank
from gpulayer_mesh.core.roster import RosterBook
from gpulayer_mesh.core.types import NodeId, Role
from gpulayer_mesh.errors import GpuLayerError, NotAllowedError, RemoteProtocolError
from gpulayer_mesh.files import replace_file, sync

log = logging.getLogger("gpulayer.jobs")

CHAIN_MAX = 2 * wire.SPEC_MAX  # bytes; a change names the slots and voters, 100 bytes each


class JobFolder:
    """One folder below `jobs/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._saved = b""  # the record on disk
        self.unsaved = False  # the disk has refused a newer one

    @classmethod
    def create(cls, path: Path, signed: bytes) -> JobFolder:
        """Make the folder of a new job.

        Raises:
            GpuLayerError: the disk refuses, or the job was here before.
        """
        try:
            path.mkdir(parents=True, mode=0o700)
            try:
                replace_file(path / "spec", signed)
            except OSError:
                shutil.rmtree(path, ignore_errors=True)  # half a spec is in the next try's way
                raise
        except OSError as e:
            raise GpuLayerError(f"cannot store the job: {e}") from e
        return cls(path)

    @property
    def work(self) -> Path:
        """The working folder of the ranks; there once it is complete."""
        return self.path / "work"

    def signed_spec(self) -> bytes:
        return (self.path / "spec").read_bytes()

    def record(self) -> JobRecord | None:
        """Return what was last saved, None if nothing was, or a power cut has spoiled it."""
        try:
            data = (self.path / "record").read_bytes()
            return wire.decode_as(JobRecord, wire.unpack(data, max_bytes=wire.BODY_MAX))
        except FileNotFoundError:
            return None
        except RemoteProtocolError as e:
            log.warning("job %s: the record is damaged: %s", self.path.name, e)
            return None

    def record_age_s(self) -> float:
        """How long ago the record was saved, by the wall clock: for display only."""
        try:
            return max(0.0, time.time() - (self.path / "record").stat().st_mtime)
        except FileNotFoundError:
            return 0.0

    def save_record(self, record: JobRecord) -> None:
        """Keep the newest record; a full disk is no reason to end a job."""
        data = wire.pack(record)
        if data == self._saved:
            return
        try:
            replace_file(self.path / "record", data)
            self._saved = data
            self.unsaved = False
        except OSError as e:
            self.unsaved = True
            log.warning("job %s: the record cannot be written: %s", self.path.name, e)

    def sync(self) -> None:
        """Have what is known of the job outlive a power cut, as far as the disk can; waits for it.

        Others must not be kept waiting: whoever writes does not wait, and calls this now and then.
        """
        papers = (self.path / name for name in ("spec", "manifest", "record"))
        for path in (*papers, self.path, self.path.parent):
            with contextlib.suppress(OSError):
                sync(path)

    @property
    def secretive(self) -> bool:
        """Whether the ranks got secrets, which are on no disk."""
        return (self.path / "secretive").exists()

    def note_secrets(self) -> None:
        """Tell later agents, before the ranks have any.

        Raises:
            OSError: the disk refuses.
        """
        replace_file(self.path / "secretive", b"", private=True, durable=True)

    def save_before(self, before: Mapping[str, int]) -> None:
        """Keep what `Care.ranks_start` noted, for an agent that comes after this."""
        with contextlib.suppress(OSError):  # then that one looks at processes only
            (self.path / "before").write_bytes(wire.pack(dict(before)))

    def before(self) -> dict[str, int]:
        try:
            plain = wire.unpack((self.path / "before").read_bytes())
            return wire.decode_as(dict[str, int], plain)
        except (OSError, RemoteProtocolError):
            return {}

    def manifest_bytes(self) -> bytes:
        return (self.path / "manifest").read_bytes()

    def manifest(self, spec: JobSpec) -> Manifest | None:
        """Return what was shipped, None if that never arrived, or a power cut has spoiled it."""
        try:
            data = (self.path / "manifest").read_bytes()
            return open_manifest(data, sha256=spec.manifest)
        except FileNotFoundError:
            return None
        except RemoteProtocolError as e:
            log.warning("job %s: the manifest is damaged: %s", self.path.name, e)
            return None

    def save_manifest(self, packed: bytes) -> None:
        """Keep what is going to be shipped.

        Raises:
            GpuLayerError: the disk refuses.
        """
        try:
            replace_file(self.path / "manifest", packed)
        except OSError as e:
            raise GpuLayerError(f"cannot store the manifest: {e}") from e


@dataclass(frozen=True, slots=True)
class Signed:
    """An attempt, and what proves it."""

    spec: JobSpec
    signer: NodeId  # who may start it
    chain: bytes  # the signed spec; of a restart, with the signed changes up to it
    history: tuple[JobSpec, ...] = ()  # the attempts before, the first one first


def lease_clock(spec: JobSpec) -> float:
    """Time for a job's machines: who may start it again does not wait for a machine that sleeps."""
    return boot_clock() if spec.restart < spec.restarts else time.monotonic()


@dataclass(slots=True)
class LiveJob:
    """One job, reserved, running or over."""

    attempt: Signed
    slot: int
    folder: JobFolder
    machine: HostedJob
    record: JobRecord  # the keeper's newest word, or what this node can say by itself
    kept: KeptJob | None = None  # only where rank 0 runs, from `go` on
    manifest: Manifest | None = None
    chunks: dict[bytes, int] = field(default_factory=dict)
    staging: asyncio.Lock = field(default_factory=asyncio.Lock)
    recorded: float = field(default_factory=time.monotonic)  # when `record` was true
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # left the phases before the start
    secrets: Mapping[str, str] | None = None  # for a restart; None: of an earlier agent, if any

    @property
    def spec(self) -> JobSpec:
        return self.attempt.spec

    @property
    def starter(self) -> NodeId:
        """Who brings it to its start: the submitter, or a voter of the attempt before."""
        return self.attempt.signer

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def participants(self) -> frozenset[NodeId]:
        return frozenset(slot.node for slot in self.spec.slots)

    @property
    def keeper(self) -> NodeId:
        return self.spec.slots[0].node

    @property
    def first_rank(self) -> int:
        return first_rank(self.spec, self.slot)

    @property
    def may_be_restarted(self) -> bool:
        return self.spec.restart < self.spec.restarts

    @property
    def ended(self) -> bool:
        """No process of the job is left on this node."""
        return self.machine.phase is HostPhase.ENDED

    def clock(self) -> float:
        """The time of the machines."""
        return lease_clock(self.spec)

    def report(self) -> HostReport:
        return self.machine.report(self.clock())

    def until(self) -> float | None:
        """Until when ranks may run even while no agent does; None: no lease ends them then."""
        return self.machine.lease if self.may_be_restarted else None

    def current_record(self) -> JobRecord:
        """The job as far as this node knows, ages as of now."""
        if self.kept is not None:
            return self.kept.record(self.clock())
        now = time.monotonic()
        passed, ended = now - self.recorded, self.record.ended_age_s
        return replace(
            self.record,
            age_s=self.record.age_s + passed,
            ended_age_s=None if ended is None else ended + passed,
        )

    def take_manifest(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.chunks = unique_chunks(manifest)


@dataclass(frozen=True, slots=True)
class _Chain:
    first: bytes  # the submitter's
    changes: Annotated[tuple[bytes, ...], Meta(min_length=1, max_length=RESTARTS_MAX)]


def open_signed(chain: bytes, book: RosterBook) -> Signed:
    """Verify an attempt from the submitter's signature on.

    Raises:
        RemoteProtocolError: malformed, or not signed for this very job by the submitter it names, a
            member; of a restart, also each change by a member who may (`restarts.check`).
    """
    plain = wire.unpack(chain, max_bytes=CHAIN_MAX)
    if not isinstance(plain, dict):  # an envelope is a list
        spec = _open_first(chain, book)
        return Signed(spec, spec.submitter, chain)
    parts = wire.decode_as(_Chain, plain)
    attempts = [_open_first(parts.first, book)]
    signer = attempts[0].submitter
    for change in parts.changes:
        spec, signer = _open_change(change, attempts[-1], book)
        attempts.append(spec)
    return Signed(attempts[-1], signer, chain, tuple(attempts[:-1]))


def may_launch(attempt: Signed, book: RosterBook) -> None:
    """Raise NotAllowedError unless the submitter of a job may launch any."""
    if Role.LAUNCHER not in book.roles(attempt.spec.submitter):
        raise NotAllowedError("this member may not launch jobs", hint="ask an admin of the mesh")


def _open_first(signed: bytes, book: RosterBook) -> JobSpec:
    envelope = wire.open_envelope(
        signed, mesh=book.mesh, key_of=book.key_of, kind="job", max_bytes=wire.SPEC_MAX
    )
    spec = wire.decode_as(JobSpec, envelope.body)
    if envelope.sender != spec.submitter or envelope.audience != spec.id:
        raise RemoteProtocolError("the job was signed by or for somebody else")
    if spec.restart or spec.origin:
        raise RemoteProtocolError("a first attempt is no restart")
    return spec


def _open_change(signed: bytes, before: JobSpec, book: RosterBook) -> tuple[JobSpec, NodeId]:
    envelope = wire.open_envelope(
        signed, mesh=book.mesh, key_of=book.key_of, kind="restart", max_bytes=wire.SPEC_MAX
    )
    change = wire.decode_as(restarts.Change, envelope.body)
    restarts.check(before, change, envelope.sender)
    spec = restarts.next_spec(before, change)
    if envelope.audience != spec.id:
        raise RemoteProtocolError("the restart was signed for another job")
    return spec, envelope.sender


def sign_change(
    key: Ed25519PrivateKey, mesh: str, sender: NodeId, before: Signed, change: restarts.Change
) -> Signed:
    """Sign the attempt that follows another."""
    spec = restarts.next_spec(before.spec, change)
    signed = wire.seal(key, kind="restart", mesh=mesh, sender=sender, audience=spec.id, body=change)
    plain = wire.unpack(before.chain, max_bytes=CHAIN_MAX)
    if isinstance(plain, dict):
        known = wire.decode_as(_Chain, plain)
        chain = _Chain(known.first, (*known.changes, signed))
    else:
        chain = _Chain(before.chain, (signed,))
    return Signed(spec, sender, wire.pack(chain), (*before.history, before.spec))


def slot_of(spec: JobSpec, node: NodeId) -> int:
    """Return the index of a node's slot.

    Raises:
        RemoteProtocolError: the job does not name each node once, or not this one.
    """
    nodes = [slot.node for slot in spec.slots]
    if nodes.count(node) != 1 or len(set(nodes)) != len(nodes):
        raise RemoteProtocolError("the job does not name this node once")
    return nodes.index(node)
