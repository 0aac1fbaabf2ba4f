"""The nouns everything else is written in: ids, members, capabilities.

All are frozen and carry their own limits (`msgspec` checks them when a value comes off the wire,
see `wire.decode_as`). Nothing here knows how a value travels or who believes it.
"""

from __future__ import annotations

import random  # noqa: TID251  the one place; machines get an instance passed in
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple

from msgspec import Meta

Rng = random.Random

# SHA-256 over the DER SubjectPublicKeyInfo of the Ed25519 key, lower-case hex (64 characters).
NodeId = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
MeshId = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # the same over the mesh CA's key
# DNS-label-like, so it can stand in tables, prefixes and target expressions without quoting.
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Text = Annotated[str, Meta(max_length=256)]  # short free text: models, versions, reasons
Sha256 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class Role(StrEnum):
    """What a member may do; joining as a worker is not permission to launch."""

    WORKER = "worker"  # accepts jobs
    LAUNCHER = "launcher"  # may submit
    ADMIN = "admin"  # may invite and remove


class NodeState(StrEnum):
    """SWIM's view of a member."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True, slots=True, order=True)
class Incarnation:
    """Orders what a subject says of itself; only the subject raises it."""

    boot: Annotated[int, Meta(ge=0, lt=2**62)]  # boot epoch: persisted, +1 at each agent start
    counter: Annotated[int, Meta(ge=0, lt=2**62)]  # +1 at each refutation or change of the record


@dataclass(frozen=True, slots=True)
class Address:
    """Where a door may be reached. Best first in every list; loopback never leaves a machine
    unless the agent was bound to loopback."""

    host: Annotated[str, Meta(max_length=64)]  # IP literal, IPv6 link-local with %scope
    port: Port


# 8 addresses: real machines have 1 to 4 usable ones; more would not fit one 1200 B packet.
Addresses = Annotated[tuple[Address, ...], Meta(max_length=8)]


@dataclass(frozen=True, slots=True)
class AliveRecord:
    """What a member says of itself in gossip; signed by it, small enough for a packet."""

    node: NodeId
    incarnation: Incarnation
    name: Name
    zone: Annotated[str, Meta(max_length=63)]  # "" = none given
    addresses: Addresses
    caps_version: Annotated[int, Meta(ge=0, lt=2**62)]  # newest `CapsRecord.version` of this boot


@dataclass(frozen=True, slots=True)
class Load:
    """Travels on acks, never as a rumour."""

    cpu_percent: Annotated[float, Meta(ge=0)] = 0.0  # of the whole machine, 0..100
    memory_available_mib: Annotated[int, Meta(ge=0)] = 0
    free_slots: Annotated[int, Meta(ge=0)] = 0  # devices that a job would get now
    jobs: Annotated[int, Meta(ge=0)] = 0  # jobs with ranks on this node


class Accelerator(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    MPS = "mps"


# Processes named per device, the others are counted: a device has one rank, seldom more, and all
# devices of a machine (56 MIG instances) must fit one record of 32 KiB.
NAMED_MAX = 2


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that computes on a device."""

    pid: Annotated[int, Meta(ge=0, lt=2**32)]  # NVML's are unsigned
    name: Annotated[str, Meta(max_length=16)] = ""  # the kernel keeps 15 bytes; "": unreadable
    job: Annotated[str, Meta(max_length=32)] = ""  # "": no rank of any job
    memory_mib: Annotated[int, Meta(ge=0)] | None = None

    def __str__(self) -> str:
        name = f" ({self.name})" if self.name else ""
        return f"pid {self.pid}{name}" + (f" of job {self.job}" if self.job else "")


@dataclass(frozen=True, slots=True)
class Blocked:
    """What jobs that are over have left on a device."""

    processes: Annotated[tuple[DeviceProcess, ...], Meta(max_length=NAMED_MAX)] = ()
    more: Annotated[int, Meta(ge=0)] = 0  # processes beyond those named
    unseen_mib: Annotated[int, Meta(ge=0)] = 0  # not back, though no process is seen that has it

    def __str__(self) -> str:
        parts = [
            f"{one} is still there"
            if one.memory_mib is None
            else f"{one} still holds {one.memory_mib:,} MiB"
            for one in self.processes
        ]
        if self.more:
            parts.append(f"{self.more} more processes")
        if self.unseen_mib:
            parts.append(f"{self.unseen_mib:,} MiB are taken by no process that can be seen")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator as the driver shows it. Every figure the driver may withhold is optional."""

    kind: Accelerator
    index: Annotated[int, Meta(ge=0, lt=1024)]  # position in the list of usable devices
    name: Text
    uuid: Text = ""
    memory_total_mib: int | None = None  # None: unified memory, or not supported
    memory_free_mib: int | None = None
    busy_pids: Annotated[int, Meta(ge=0)] = 0  # compute processes of others
    links: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()  # to device j: "NV4","PIX","SYS"
    busy_by: Annotated[tuple[DeviceProcess, ...], Meta(max_length=NAMED_MAX)] = ()  # of busy_pids
    blocked: Blocked | None = None  # is granted to nobody until that is gone
    numa: Annotated[int, Meta(ge=0, lt=1024)] | None = None  # node of the nearest CPUs


@dataclass(frozen=True, slots=True)
class TorchAbilities:
    """What the interpreter's torch really did in a subprocess, not what it claims."""

    version: Text  # "2.13.0+cpu"
    accelerators: Annotated[tuple[Accelerator, ...], Meta(max_length=8)]  # each did a real matmul
    backends: Annotated[tuple[Text, ...], Meta(max_length=8)]  # of torch.distributed: gloo, nccl
    problems: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()  # "cuda: no kernel image ..."


@dataclass(frozen=True, slots=True)
class Interface:
    name: Text
    kind: Text  # "ethernet" "wifi" "virtual" "loopback" "tunnel"
    speed_mbit: int | None = None
    addresses: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a machine has. Refreshed by its agent; `CapsRecord` carries it, signed."""

    cpus: int
    memory_total_mib: int
    memory_available_mib: int
    disk_free_mib: int
    os: Text  # "Linux 6.8 x86_64"
    python: Text  # "3.11.7", of the interpreter that will run ranks
    gpulayer: Text
    torch: TorchAbilities | None  # None: not installed, or still being proven
    devices: Annotated[tuple[Device, ...], Meta(max_length=64)] = ()
    interfaces: Annotated[tuple[Interface, ...], Meta(max_length=32)] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """Devices of a node that a job holds; `devices` is empty for CPU ranks."""

    job: Annotated[str, Meta(max_length=32)]
    processes: Annotated[int, Meta(ge=1, le=1024)]
    devices: Annotated[tuple[int, ...], Meta(max_length=64)] = ()
    owner: Annotated[str, Meta(max_length=63)] = ""  # the submitter's name, for messages

    def __str__(self) -> str:
        return f"job {self.job} from {self.owner}" if self.owner else f"job {self.job}"


@dataclass(frozen=True, slots=True)
class CapsRecord:
    """Signed by its node; pulled over TLS when `AliveRecord.caps_version` is newer."""

    node: NodeId
    boot: Annotated[int, Meta(ge=0)]
    version: Annotated[int, Meta(ge=0)]
    capabilities: Capabilities
    grants: Annotated[tuple[Grant, ...], Meta(max_length=256)] = ()


class LinkSource(StrEnum):
    """Where a bandwidth figure comes from."""

    PROBE = "probe"  # a short transfer made to measure
    TRANSFER = "transfer"  # bytes that travelled anyway


# Links that a node reports: all in a mesh of 33 members. A report is below 2.5 kB then, and those
# of 1,000 nodes, told anew each hour, take 700 B/s.
LINKS_MAX = 32

_Microseconds = Annotated[int, Meta(ge=0, lt=2**40)]
_BytesPerSecond = Annotated[int, Meta(ge=1, lt=2**50)]
_Mtu = Annotated[int, Meta(ge=1, lt=2**32)]  # loopback has 65,536
_AgeSeconds = Annotated[int, Meta(ge=0, lt=2**40)]


class Measured(NamedTuple):
    """What one node saw of its link to a peer. Travels as a list: 32 of them in each report."""

    peer: Sha256  # node id as raw bytes, half of its hex
    rtt_us: _Microseconds | None = None  # shortest of the last round trips
    bytes_s: _BytesPerSecond | None = None  # what came from there; None: not measured yet
    mtu: _Mtu | None = None  # of the path, as the kernel sees it; None: it does not say
    age_s: _AgeSeconds = 0  # of `bytes_s`, when this was signed
    source: LinkSource | None = None  # of `bytes_s`


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Signed by the node that measured; spreads with the full-state exchange."""

    node: NodeId
    boot: Annotated[int, Meta(ge=0)]
    version: Annotated[int, Meta(ge=0)]
    links: Annotated[tuple[Measured, ...], Meta(max_length=LINKS_MAX)] = ()


class Link(NamedTuple):
    """A pair of members, from what both reported. Travels as a list: a mesh has many thousands."""

    a: Annotated[int, Meta(ge=0)]  # position in `Snapshot.members`; a < b
    b: Annotated[int, Meta(ge=0)]
    rtt_us: _Microseconds | None = None  # the shorter of both: other work only adds to it
    bytes_s: _BytesPerSecond | None = None  # the slower direction: a ring goes at that pace
    mtu: _Mtu | None = None  # the smaller
    age_s: _AgeSeconds = 0  # of `bytes_s`
    source: LinkSource | None = None  # of `bytes_s`


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """One row of what an agent believes: input of placement and of `mesh status`."""

    node: NodeId
    name: str
    roles: tuple[Role, ...]
    state: NodeState | None  # None: no agent of this member was ever heard of
    zone: str = ""
    zone_inferred: bool = False  # from measured links; False: the node was told its zone
    addresses: tuple[Address, ...] = ()
    incarnation: Incarnation = Incarnation(0, 0)
    since_s: float = 0.0  # how long in this state, by the answering agent's monotonic clock
    heard_s: float | None = None  # age of the last direct answer; None: never
    rtt_ms: float | None = None
    via: str = ""  # "udp", "tcp" where UDP is blocked, "" unknown
    load: Load | None = None
    caps: Capabilities | None = None
    grants: tuple[Grant, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The answer of `GET /v1/snapshot`."""

    mesh: MeshId
    answered_by: NodeId
    roster_epoch: int
    members: tuple[MemberSnapshot, ...] = field(default=())
    links: tuple[Link, ...] = ()
