"""What this node, as a voter, agreed to: for each attempt's id one proposal, for ever.

The rules are in `succession.bind`; here they meet the disk and the requests. All of it happens in
one step of the event loop, the write to the disk included: between the look at what this node runs
and has heard, and the note that it agreed, nothing may come.

    attempts/ID   the attempt of this id that this node is bound to (its signed chain), or nothing:
                  the job ended with the attempt before
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gpulayer_mesh.core import restarts, wire
from gpulayer_mesh.core.jobspec import (
    JOB_ID_ALPHABET,
    JOB_ID_CHARS,
    RESTARTS_MAX,
    HostPhase,
    JobSpec,
)
from gpulayer_mesh.core.lease import LEASE_S
from gpulayer_mesh.core.roster import RosterBook
from gpulayer_mesh.core.types import NodeId
from gpulayer_mesh.errors import GpuLayerError, NotAllowedError, RemoteProtocolError
from gpulayer_mesh.files import make_private, replace_file
from gpulayer_mesh.runtime.door import DoorRequest, Route
from gpulayer_mesh.runtime.livejob import CHAIN_MAX, Signed, may_launch, open_signed
from gpulayer_mesh.runtime.succession import bind


class Agreements:
    """The votes of one agent.

    Args:
        root: `attempts` below the agent's home.
        node, name: this one.
        part: how far this node's part in an attempt is, None if it has none.
        keeper_heard_s: how long ago it heard the keeper of one in which it has a part.
    """

    def __init__(
        self,
        root: Path,
        *,
        node: NodeId,
        name: str,
        book: RosterBook,
        part: Callable[[str], HostPhase | None],
        keeper_heard_s: Callable[[str], float | None],
    ) -> None:
        self._root = root
        self._node = node
        self._name = name
        self._book = book
        self._part = part
        self._keeper_heard_s = keeper_heard_s
        self._heard: dict[str, float] = {}  # of an attempt, as its witness; monotonic
        self._readers: dict[str, tuple[float, Signed]] = {}  # attempts told of, and when

    def routes(self) -> list[Route]:
        attempt = "/v1/attempts/{id}"
        return [
            Route("GET", attempt, self.get_bound),
            Route("POST", attempt + "/agree", self.agree, None, CHAIN_MAX + 1024),
            Route("POST", attempt + "/hold", self.hold, None, CHAIN_MAX + 1024),
            Route("POST", attempt + "/read", self.let_read, None, CHAIN_MAX + 1024),
        ]

    def heard(self, attempt: str) -> None:
        """As a witness: an attempt runs, or is about to."""
        self._heard[attempt] = time.monotonic()

    def heard_at(self, attempt: str) -> float:
        """Return when that was, by the monotonic clock."""
        return self._heard[attempt]

    def bind(self, attempt: Signed) -> Signed:
        """Agree to an attempt, or return what this node is bound to.

        Raises:
            As `succession.bind`.
            GpuLayerError: the disk refuses.
        """
        before = attempt.history[-1].id if attempt.history else ""
        if self.closed(attempt.spec.id):
            raise GpuLayerError(f"job {before} has ended")
        heard_s = self._keeper_heard_s(before)
        if heard_s is None and (heard := self._heard.get(before)) is not None:
            heard_s = time.monotonic() - heard
        bound = bind(
            attempt,
            self.bound(attempt.spec.id),
            part=self._part(before),
            heard_s=heard_s,
            node=self._node,
            name=self._name,
        )
        if bound is attempt:
            _keep(self._root / attempt.spec.id, attempt.chain)
        return bound

    def bound(self, attempt: str) -> Signed | None:
        """Return the attempt of this id that this node is bound to.

        Raises:
            RemoteProtocolError: who signed it is no member any more.
        """
        if not _is_id(attempt):
            return None
        try:
            chain = (self._root / attempt).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise GpuLayerError(f"cannot read an agreement: {error}") from error
        return open_signed(chain, self._book) if chain else None

    def close(self, last: JobSpec) -> None:
        """A job has ended with this attempt: agree to none after it, unless that was done before.

        Who was cut off meanwhile, and thinks that the keeper is lost, must not start a next one.
        """
        if last.restart == last.restarts:
            return
        path = self._root / restarts.attempt_id(restarts.origin_of(last), last.restart + 1)
        if not path.exists():
            with contextlib.suppress(GpuLayerError):  # the other voters know it as well
                _keep(path, b"")

    def closed(self, attempt: str) -> bool:
        """Return whether there will be no attempt of this id: its job had ended before."""
        path = self._root / attempt
        return _is_id(attempt) and path.exists() and not path.stat().st_size

    def may_read(self, attempt: str, peer: NodeId) -> bool:
        """Return whether a node starts or runs an attempt of this id, as far as this one knows."""
        known = [self._readers[attempt][1]] if attempt in self._readers else []
        with contextlib.suppress(RemoteProtocolError):  # its signer was removed
            if (bound := self.bound(attempt)) is not None:
                known.append(bound)
        nodes = {slot.node for one in known for slot in one.spec.slots}
        return peer in nodes | {one.signer for one in known}

    def superseded(self, spec: JobSpec) -> bool:
        """Return whether this node is bound to an attempt after this one."""
        origin = restarts.origin_of(spec)
        later = range(spec.restart + 1, spec.restarts + 1)
        return any((self._root / restarts.attempt_id(origin, n)).exists() for n in later)

    def refuse_superseded(self, spec: JobSpec) -> None:
        """Raise RemoteProtocolError if it is."""
        if self.superseded(spec):
            raise RemoteProtocolError(f"{self._name} agreed to an attempt after {spec.id}")

    def forget(self, older_s: float, origins: Iterable[str]) -> None:
        """Drop what is so old that nobody asks for it any more.

        Args:
            origins: first attempts of jobs of which something is left here.
        """
        now = time.monotonic()
        self._heard = {i: at for i, at in self._heard.items() if now - at < older_s}
        self._readers = {i: one for i, one in self._readers.items() if now - one[0] < older_s}
        numbers = range(1, RESTARTS_MAX + 1)
        kept = {restarts.attempt_id(origin, number) for origin in origins for number in numbers}
        for path in self._root.glob("*"):
            if path.name in kept:
                continue
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > older_s:
                    path.unlink()

    # --- what members may ask --------------------------------------------------------------------

    async def get_bound(self, request: DoorRequest) -> dict[str, Any]:
        """Say which attempt of an id this node is bound to."""
        bound = self.bound(request.params["id"])
        if bound is None:
            closed = {"ended": True} if self.closed(request.params["id"]) else {}
            return {"spec": None, **closed}
        if request.peer not in bound.history[-1].voters:
            raise NotAllowedError("only voters may ask for that")
        return {"spec": bound.chain}

    async def agree(self, request: DoorRequest) -> dict[str, Any]:
        """Bind this node to an attempt, or say to which it is bound."""
        return {"spec": self.bind(self._asked_for(request)).chain}

    async def hold(self, request: DoorRequest) -> None:
        """Count an attempt that is about to start as running, for a while."""
        attempt = self._asked_for(request)
        if self._node not in restarts.witnesses(attempt.spec):
            raise NotAllowedError(f"{self._name} is no witness of that job")
        self.refuse_superseded(attempt.spec)
        self._heard[attempt.spec.id] = time.monotonic() + LEASE_S  # until when it may go

    async def let_read(self, request: DoorRequest) -> None:
        """Let its author and the nodes of an attempt have what those before it have left here.

        Who was away when others agreed to it, or has no vote on it, knows nothing of it yet.
        """
        attempt = self._asked_for(request)
        self._readers[attempt.spec.id] = (time.monotonic(), attempt)

    def _asked_for(self, request: DoorRequest) -> Signed:
        body = wire.unpack(request.body, max_bytes=CHAIN_MAX + 1024)
        chain = body.get("spec") if isinstance(body, dict) else None
        if not isinstance(chain, bytes):
            raise RemoteProtocolError("the signed attempt is missing")
        attempt = open_signed(chain, self._book)
        may_launch(attempt, self._book)
        if attempt.signer != request.peer or attempt.spec.id != request.params["id"]:
            raise NotAllowedError("only who signed an attempt may ask for it")
        return attempt


def _is_id(attempt: str) -> bool:
    """A member may ask for anything; only this may become a path."""
    return len(attempt) == JOB_ID_CHARS and set(attempt) <= set(JOB_ID_ALPHABET)


def _keep(path: Path, chain: bytes) -> None:
    try:
        make_private(path.parent)
        replace_file(path, chain, private=True, durable=True)
    except OSError as error:
        raise GpuLayerError(f"cannot note an agreement: {error}") from error
