"""What a job is, as data: the signed request, the go order, each node's report, the record.

Nothing here decides anything; `placement` makes the slots, `job` turns reports into an outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from gpulayer_mesh.core.types import Accelerator, Address, Name, NodeId, Port, Sha256, Text

# 10 characters of Crockford's base 32 without I, L, O, U: 50 random bits, safe to retype.
JobId = Annotated[str, Meta(pattern="^[0-9a-hjkmnp-tv-z]{10}$")]
JOB_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
JOB_ID_CHARS = 10
RESTARTS_MAX = 20
WAIT_MAX_S = 10_000_000  # 115 days; whoever means longer means None
# A launcher that follows is heard every second; less than this would end jobs for a hiccup.
DISCONNECT_MIN_S = 10
VOTERS_MAX = 1026  # every slot, and two more where there is but one
OUTPUTS_MAX = 100_000  # files listed per node; a list of them is 20 MB on the wire
STAYED_MAX = 100  # named per node; nobody reads on, and the rest is counted
EnvMap = dict[
    Annotated[str, Meta(min_length=1, max_length=256)], Annotated[str, Meta(max_length=128 * 1024)]
]
# Relative, "/"-separated, no "." or ".." parts; `manifest.check_path` is the rule.
RelPath = Annotated[str, Meta(max_length=1024)]


class JobKind(StrEnum):
    COMMAND = "command"  # one process per slot, no rendezvous environment beyond ranks
    DISTRIBUTED = "distributed"  # n nodes x d processes with torchrun's environment
    FUNCTION = "function"  # one call in each process; its result is among the files
    SERVICE = "service"  # one process that is kept running, and answers on a port


class JobState(StrEnum):
    PENDING = "pending"
    PLACING = "placing"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"  # this attempt has failed, the next one is being started
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


OVER = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


class RankState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"


@dataclass(frozen=True, slots=True)
class Slot:
    """The part of a job on one node. Slots are in node-rank order; slot 0's node is the keeper."""

    node: NodeId
    name: Name
    processes: Annotated[int, Meta(ge=1, le=1024)]
    devices: Annotated[tuple[int, ...], Meta(max_length=64)] = ()  # `Device.index`; () on CPU


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Signed once by the launcher (envelope kind "job", audience = job id); immutable."""

    id: JobId
    kind: JobKind
    name: Text  # script or command, for tables
    submitter: NodeId
    submitter_name: Name
    submitted_at: float  # wall clock of the submitter; display only
    # Bytes, because arguments need not be text (128 KiB is Linux's limit for one). With `python`
    # the node's own interpreter is put before argv, so no path of the client travels.
    argv: Annotated[
        tuple[Annotated[bytes, Meta(max_length=128 * 1024)], ...], Meta(max_length=4096)
    ]
    python: bool
    cwd: RelPath  # inside the bundle; "" is its root
    env: EnvMap
    accelerator: Accelerator
    slots: Annotated[tuple[Slot, ...], Meta(min_length=1, max_length=1024)]
    manifest: Sha256  # of the packed Manifest; the chunk hashes are inside it
    bundle_bytes: Annotated[int, Meta(ge=0)]
    imports: Annotated[tuple[Text, ...], Meta(max_length=1024)] = ()  # top-level, not in the bundle
    stop_grace_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    # Which Trainer call of the script this job executes; None: the script is a plain job.
    call: Annotated[int, Meta(ge=0, le=10000)] | None = None
    # How often the launcher had tried to reserve before: where a job waits, slots change between
    # tries, and a node must know which of two is the newer one.
    attempt: Annotated[int, Meta(ge=0, le=2**31)] = 0
    target: Annotated[tuple[Text, ...], Meta(max_length=1024)] = ()  # as asked for; for a restart
    # How often the whole group is started again after a failure; see `restarts`.
    restarts: Annotated[int, Meta(ge=0, le=RESTARTS_MAX)] = 0
    restart: Annotated[int, Meta(ge=0, le=RESTARTS_MAX)] = 0  # which of them this attempt is
    origin: Annotated[str, Meta(max_length=JOB_ID_CHARS)] = ""  # the first attempt, "" for it
    # The nodes of which most must agree to the next attempt: those of the slots first.
    voters: Annotated[tuple[NodeId, ...], Meta(max_length=VOTERS_MAX)] = ()
    # How long it may wait for machines, before the start and again before each next attempt.
    wait_s: Annotated[float, Meta(ge=0, le=WAIT_MAX_S)] | None = None
    # How long its launcher may be gone without a word before the job is stopped; None: for ever.
    on_disconnect_s: Annotated[float, Meta(ge=DISCONNECT_MIN_S, le=WAIT_MAX_S)] | None = None


@dataclass(frozen=True, slots=True)
class GoOrder:
    """What pre-flight found out; from the launcher to the keeper, from it to every slot."""

    master_addr: str  # IP literal that every other slot reached
    master_port: Port
    # For each slot, the address by which its peers reach it; decides the interface on each host.
    peer_hosts: Annotated[tuple[str, ...], Meta(max_length=1024)]
    secrets: EnvMap = field(default_factory=dict)  # only ever in memory and in the ranks
    left: bool = False  # as `JobRecord.left`, of the attempt before


class MemoryKill(StrEnum):
    """Whether the kernel ended a rank because memory ran out."""

    NO = "no"
    LIKELY = "likely"  # it killed something on that machine just then
    YES = "yes"


@dataclass(frozen=True, slots=True)
class RankStatus:
    rank: Annotated[int, Meta(ge=0)]
    state: RankState
    pid: int | None = None
    exit_code: int | None = None  # None while running, or when a signal ended it
    signal: int | None = None
    stopped: bool = False  # we ended it: reads "stopped", never "failed"
    ended_age_s: float | None = None  # how long ago, by the reporting node's monotonic clock
    # Last lines of stderr (of stdout when stderr is empty) once exited with a failure.
    tail: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=60)] = ()
    memory_peak_mib: int | None = None
    memory_limit_mib: int | None = None  # only of a rank that was killed
    memory_kill: MemoryKill | None = None  # None: not killed, or not known
    no_result: bool = False  # its function did not return: failed, whatever the exit code
    hopeless: bool = False  # no other attempt would end better


class HostPhase(StrEnum):
    """One node's part of a job."""

    RESERVED = "reserved"
    STAGING = "staging"
    STAGED = "staged"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"  # no process of the job is left on this node


@dataclass(frozen=True, slots=True)
class HostReport:
    """Everything one node knows of its part; a full, idempotent snapshot."""

    job: JobId
    node: NodeId
    phase: HostPhase
    ranks: Annotated[tuple[RankStatus, ...], Meta(max_length=1024)] = ()
    problem: Annotated[str, Meta(max_length=4096)] = ""  # why it could not start or go on
    at: float = 0.0  # by the node's own clock; the keeper gives it back, see `hosted`
    # Who had it stopped at this node, while the keeper did not answer; "" if nobody.
    stopped_by: Annotated[str, Meta(max_length=256)] = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure, by cause."""

    rank: int | None  # None: a node or the start failed, not a rank
    node: str  # name
    code: int  # the exit code the caller's process takes
    reason: str  # "exit code 7", "killed by signal 9 (SIGKILL): ...", "node lost: ..."
    tail: tuple[str, ...] = ()
    hopeless: bool = False  # as in RankStatus


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What `gpulayer jobs` shows and every participant keeps; the keeper writes it."""

    spec: JobSpec
    state: JobState
    keeper: NodeId
    reports: tuple[HostReport, ...] = ()
    failure: Failure | None = None
    cause: str = ""  # of a cancel: "stopped by laptop"
    age_s: float = 0.0  # since go, by the keeper's monotonic clock
    ended_age_s: float | None = None
    successor: Annotated[str, Meta(max_length=JOB_ID_CHARS)] = ""  # the attempt that followed
    waiting: Annotated[str, Meta(max_length=512)] = ""  # why the next one has not started yet
    left: bool = False  # its launcher said that it goes: nobody has to follow the job


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file a node offers after (or while) a job ran."""

    area: Annotated[str, Meta(pattern="^(out|work)$")]  # $GPULAYER_OUT of a rank, working folder
    rank: int  # for "work": the lowest rank on the node
    path: RelPath
    size: Annotated[int, Meta(ge=0)]
    sha256: Sha256
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Stayed:
    """Something a job has made that cannot come home."""

    rank: int  # as in OutputFile
    path: Annotated[bytes, Meta(max_length=1024)]  # as on disk, perhaps no text; longer ones cut
    reason: Text


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a job has made on one node."""

    files: Annotated[tuple[OutputFile, ...], Meta(max_length=OUTPUTS_MAX)] = ()
    stayed: Annotated[tuple[Stayed, ...], Meta(max_length=STAYED_MAX)] = ()
    more: Annotated[int, Meta(ge=0)] = 0  # of the latter, beyond those named


@dataclass(frozen=True, slots=True)
class ServiceState:
    """How a service is, as its supervisor wrote it down."""

    state: Annotated[
        str, Meta(pattern="^(starting|healthy|unhealthy|waiting|stopped|ended|failed)$")
    ]
    port: Annotated[int, Meta(ge=0, le=65535)] = 0  # on loopback of its node; 0: not known yet
    restarts: Annotated[int, Meta(ge=0)] = 0
    last: Annotated[str, Meta(max_length=64)] = ""  # how its process ended last


@dataclass(frozen=True, slots=True)
class HostAddress:
    """Where a participant can be reached, handed to the others for staging and pre-flight."""

    node: NodeId
    addresses: Annotated[tuple[Address, ...], Meta(max_length=8)]
