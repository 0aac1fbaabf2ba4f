"""Every error a caller may branch on, and the exit code each one becomes.

Messages are lower case without a full stop and carry values; `hint` says what to do next.
`ui` prints them; nothing here knows about terminals.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the commands; a failed job's own code takes precedence."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NEVER_PLACEABLE = 3
    TIMED_OUT = 4
    NOT_ALLOWED = 5
    UNREACHABLE = 6
    STOPPED_BY_USER = 130


class GpuLayerError(Exception):
    """Base of all errors of this project.

    Args:
        message: what went wrong, with values.
        hint: what the user can do about it.
    """

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # for tracebacks of the user's script


class ConfigError(GpuLayerError):
    """A setting, argument or file of ours is unusable."""

    exit_code = ExitCode.USAGE


class NoMeshError(GpuLayerError):
    """This machine belongs to no mesh yet."""

    exit_code = ExitCode.NOT_ALLOWED


class NotAllowedError(GpuLayerError):
    """The peer knows us but our role does not permit this, or we are no member any more."""

    exit_code = ExitCode.NOT_ALLOWED


class RemovedError(NotAllowedError):
    """This machine was removed from its mesh."""

    def __init__(self) -> None:
        super().__init__(
            "this machine was removed from the mesh",
            hint="to come back: `gpulayer mesh invite` on the machine that founded the mesh, "
            "then here: gpulayer mesh join LINE",
        )


class DiscoveryError(GpuLayerError):
    """No member of the mesh answered."""

    exit_code = ExitCode.UNREACHABLE


class NotFoundError(GpuLayerError):
    """What was asked for does not exist on the node that answered."""


class TransportError(GpuLayerError):
    """A connection failed, timed out or broke off."""

    exit_code = ExitCode.UNREACHABLE


class ProtocolError(GpuLayerError):
    """Abstract: somebody broke the protocol."""


class LocalProtocolError(ProtocolError):
    """We asked for something illegal; our bug or a caller's."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something illegal: wrong form, wrong signature, over a limit."""


class JoinError(GpuLayerError):
    """Joining a mesh was refused or broke off; the message names the cause."""

    exit_code = ExitCode.NOT_ALLOWED


class BundleError(GpuLayerError):
    """The source bundle breaks a rule: unsafe path, too large, hash mismatch."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one node does not count for a request."""

    node: str  # name as the user knows it
    reason: str  # a clause, e.g. "2 CUDA devices asked, 1 present"
    for_ever: bool  # True: no wait can change it; False: only busy now


@dataclass(frozen=True, slots=True)
class Unreached:
    """One direction between two nodes of a job that its ranks cannot use."""

    source: str  # name of who tried to connect
    target: str
    host: str  # the address that was tried; "" if there was none
    ports: tuple[int, ...]  # TCP, of the target
    what: str  # a clause: "no answer in 2.0 s"
    back: bool  # whether the target reaches the source


@dataclass(frozen=True, slots=True)
class Versions:
    """What one node has, where nodes of a job differ."""

    node: str  # name as the user knows it
    torch: str  # with its build: "2.13.0+cpu"
    python: str
    gpulayer: str


class PlacementError(GpuLayerError):
    """A request cannot be placed; carries every node's reason, and who would have counted."""

    exit_code = ExitCode.NEVER_PLACEABLE

    def __init__(
        self,
        message: str,
        *,
        refusals: tuple[Refusal, ...] = (),
        counted: tuple[str, ...] = (),
        versions: tuple[Versions, ...] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.refusals = refusals
        self.versions = versions  # of the nodes that fit but for these
        self.counted = counted  # names of the nodes that fit


class PlacementBusyError(PlacementError):
    """The request fits the mesh but not now."""

    exit_code = ExitCode.TIMED_OUT


class PathsCutError(PlacementError):
    """The nodes of a job cannot all reach each other.

    Args:
        pairs: ids of nodes that were found cut: who connects, and to whom.
        unreached: the same for people; without those that would only need another address.
    """

    def __init__(
        self,
        message: str,
        *,
        pairs: tuple[tuple[str, str], ...],
        refusals: tuple[Refusal, ...] = (),
        unreached: tuple[Unreached, ...] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, refusals=refusals, hint=hint)
        self.pairs = pairs
        self.unreached = unreached


class StoppedError(GpuLayerError):
    """Somebody stopped the job while it waited for its turn."""

    exit_code = ExitCode.STOPPED_BY_USER


class IllegalTransitionError(LocalProtocolError):
    """A state machine got an event its state does not allow; carries its recent history."""

    def __init__(self, ident: str, state: str, event: str, history: tuple[str, ...] = ()) -> None:
        trail = "; ".join(history)
        super().__init__(f"{ident}: event {event!r} in state {state!r} (history: {trail})")
        self.ident = ident
        self.state = state
        self.event = event
        self.history = history
