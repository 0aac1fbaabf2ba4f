"""What the doctor looks at and what it says: facts, verdicts, and its two questions to agents.

A fact that could not be had is None, and `Facts.unchecked` says why. Here is nothing that decides
(`doctor` does) and nothing that knows how a fact was gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from gpulayer_mesh.core.types import Addresses, Device, Interface, NodeId, Text, TorchAbilities

REACH_MAX = 16  # members whose links are tried in pairs: 240 dials in the mesh, each of 2 s at most
_MET_MAX = 1024  # the most nodes a mesh may have


class Named(StrEnum):
    """What a verdict is called; docs/doctor.md has a section for each."""

    NO_MESH = "no-mesh"
    STATE_UNUSABLE = "state-unusable"
    PORT_TAKEN = "port-taken"
    MULTICAST_BLOCKED = "multicast-blocked"
    CONTAINER_WITHOUT_MULTICAST = "container-without-multicast"
    WSL_NAT = "wsl-nat"
    MACOS_LOCAL_NETWORK = "macos-local-network"
    WIFI_ISOLATION = "wifi-isolation"
    FIREWALL_ONE_WAY = "firewall-one-way"
    MEMBER_UNREACHABLE = "member-unreachable"
    UDP_BLOCKED = "udp-blocked"
    CLOCK_SKEW = "clock-skew"
    IDENTITY_COPIED = "identity-copied"
    TORCH_CANNOT_DRIVE_GPU = "torch-cannot-drive-gpu"
    TORCH_UNUSABLE = "torch-unusable"
    GPU_TAKEN = "gpu-taken"
    DISK_FULL = "disk-full"
    SHARED_MEMORY_SMALL = "shared-memory-small"


class Severity(StrEnum):
    ERROR = "error"  # something fails, or will
    WARNING = "warning"  # it works, but less well, or not for long
    NOTE = "note"  # as it should be, but good to know


class Check(StrEnum):
    """What is looked at, each within its own deadline."""

    STATE = "state"
    DISK = "disk"
    SHARED_MEMORY = "shared memory"
    PORT = "port"
    MULTICAST = "multicast"
    TORCH = "torch"
    MEMBERS = "members"
    PAIRS = "pairs"
    CLOCK = "clock"
    IDENTITY = "identity"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that is wrong, and what to do about it."""

    name: Named
    severity: Severity
    subject: str  # machine that it is about; "": this one
    finding: str  # one sentence
    fix: str  # one line, for the system of that machine


@dataclass(frozen=True, slots=True)
class Report:
    verdicts: tuple[Verdict, ...]  # worst first
    checked: tuple[Check, ...]
    unchecked: Mapping[Check, str]  # why


# --- what agents answer --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Room:
    """A file system."""

    total_mib: Annotated[int, Meta(ge=0)]
    free_mib: Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Health:
    """Answer of `GET /v1/health`: what only that machine's agent knows."""

    wall_s: float  # its clock, seconds since 1970
    port: Annotated[int, Meta(ge=0, le=65535)]
    wanted_port: Annotated[int, Meta(ge=0, le=65535)]
    multicast: bool = True  # False: it was bound to addresses where it uses none
    addresses: Addresses = ()  # where it says it may be reached
    mdns: Text = ""  # what keeps it from using mDNS
    disk_free_mib: Annotated[int, Meta(ge=0)] | None = None
    shared_memory: Room | None = None
    copies: Addresses = ()  # where somebody else was heard to live under its identity
    over_tcp: Annotated[tuple[NodeId, ...], Meta(max_length=_MET_MAX)] = ()  # not by UDP
    # Age in seconds of the newest request of each member.
    met: Annotated[dict[NodeId, Annotated[float, Meta(ge=0)]], Meta(max_length=_MET_MAX)] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True)
class ReachAsked:
    """Body of `POST /v1/reach`: try new connections to these members."""

    nodes: Annotated[tuple[NodeId, ...], Meta(max_length=REACH_MAX)]


@dataclass(frozen=True, slots=True)
class ReachAnswer:
    """What came of it; "" where it worked, else why not."""

    failures: Annotated[dict[NodeId, Text], Meta(max_length=REACH_MAX)]


# --- facts ---------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """What became of one connection."""

    MEMBER = "member"  # the right one answered
    OTHER = "somebody else answers there"
    REFUSED = "connection refused"  # the machine is there, the port is not open
    SILENT = "no answer"
    FORBIDDEN = "no route to host"  # EHOSTUNREACH: nobody has the address, or macOS forbids it
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Dial:
    host: str  # IP literal
    port: int
    outcome: Outcome
    words: str = ""  # of a failure that has no name above
    resolved: bool | None = None  # whether its link-layer address is known; None: not asked for


@dataclass(frozen=True, slots=True)
class Ear:
    """What multicast did on one interface."""

    interface: str
    error: str = ""  # errno name of a question that could not be sent
    own: bool = False  # our own question came back to us
    others: frozenset[str] = frozenset()  # whose multicast arrived


@dataclass(frozen=True, slots=True)
class Multicast:
    ears: tuple[Ear, ...] = ()  # of the interfaces where it makes sense
    port_taken: bool = False  # UDP 5353 is kept by a program that does not share it
    holder: str = ""


@dataclass(frozen=True, slots=True)
class PortUse:
    wanted: int
    taken: tuple[str, ...] = ()  # "TCP", "UDP": by others than our agent
    holder: str = ""  # "python3 (pid 31)"; "": cannot be seen
    agent: int | None = None  # the port of this machine's agent, None where none runs


@dataclass(frozen=True, slots=True)
class Gateway:
    host: str
    answers: bool | None  # None: this system does not say


@dataclass(frozen=True, slots=True)
class TorchFacts:
    abilities: TorchAbilities | None  # None: not installed
    driver_gpus: int = 0  # that the driver shows
    hardware: tuple[str, ...] = ()  # "NVIDIA", one for each such device on the bus
    hidden: bool = False  # CUDA_VISIBLE_DEVICES says that none may be used
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Another member of the mesh, as far as it could be asked."""

    node: NodeId
    name: str
    state: str = ""  # by the member that answered: "alive"...; "": no agent was ever heard of
    dials: tuple[Dial, ...] = ()
    health: Health | None = None
    skew_s: float | None = None  # its clock minus ours
    skew_error_s: float = 0.0
    reached: Mapping[NodeId, str] | None = None  # as in `ReachAnswer`; None: was not asked
    system: str = ""  # "Linux 6.8 x86_64"
    torch: TorchFacts | None = None

    @property
    def answers(self) -> bool:
        return any(dial.outcome is Outcome.MEMBER for dial in self.dials)


@dataclass(frozen=True, slots=True)
class IdentityCopy:
    """Somebody else lives under the identity of a machine."""

    name: str
    here: bool  # it is this machine's
    hosts: tuple[str, ...]  # where the other one is
    ours: tuple[str, ...]  # where the one with that name is
    answers: bool  # now; False: it was heard since the agent's start


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything the doctor may know; the defaults are those of a healthy machine alone."""

    system: str = "Linux"  # `platform.system()`
    wsl: bool = False
    container: str = ""  # "docker", "podman", "container"; "": none
    interfaces: tuple[Interface, ...] = ()
    gateways: tuple[Gateway, ...] = ()
    state_problem: tuple[str, str] | None = None  # what is wrong with our files, and the fix
    disk: Room | None = None
    disk_path: str = ""
    shared_memory: Room | None = None
    port: PortUse | None = None
    multicast: Multicast | None = None
    torch: TorchFacts | None = None
    in_mesh: bool = False
    node: NodeId = ""  # ours
    name: str = ""  # ours in the mesh
    health: Health | None = None  # of this machine's own agent
    members: tuple[Member, ...] = ()  # the others
    copies: tuple[IdentityCopy, ...] = ()
    unchecked: Mapping[Check, str] = field(default_factory=dict)
