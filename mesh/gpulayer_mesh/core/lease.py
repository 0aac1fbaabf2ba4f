"""Which job holds which devices of this node, until when.

One `Reservations` per agent. A grant is all or nothing and idempotent by job id; it expires
LEASE_S after the last renewal unless `hold` pins it because the job runs. Time is `now` in
monotonic seconds. This module does not know what a job is or who may ask; `HostedJob` decides when
a grant is held or released.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpulayer_mesh.core.types import Grant
from gpulayer_mesh.errors import (
    PlacementBusyError,
    PlacementError,
    Refusal,
    RemoteProtocolError,
)

LEASE_S = 30.0  # a launcher that vanished blocks a node no longer than this
GRANTS_MAX = 256  # limit of `CapsRecord.grants`


class Reservations:
    """Grants of one node.

    Args:
        node: this node's name, for messages.
        cpus: how many processes without a device this node takes in total.
        devices: indices of its accelerators.
    """

    def __init__(self, node: str, *, cpus: int, devices: Collection[int] = ()) -> None:
        self._node = node
        self._cpus = cpus
        self._devices = frozenset(devices)
        self._grants: dict[str, Grant] = {}
        self._until: dict[str, float | None] = {}  # None: held while the job runs

    @property
    def grants(self) -> tuple[Grant, ...]:
        return tuple(self._grants.values())

    def set_devices(self, devices: Collection[int]) -> None:
        """Follow the driver's list; grants of a device that vanished stay with their job."""
        self._devices = frozenset(devices)

    def grant(
        self,
        now: float,
        job: str,
        *,
        processes: int,
        devices: tuple[int, ...] = (),
        owner: str = "",
        unfit: Mapping[int, str] | None = None,
    ) -> Grant:
        """Grant all of it, or nothing; asking again for the same only renews.

        Args:
            owner: the submitter's name, for messages.
            unfit: free devices that nobody gets, and why (`devicecare.unfit`).

        Raises:
            PlacementBusyError: something of it is taken; names the holder.
            PlacementError: this node could never grant it.
            RemoteProtocolError: the job already holds something else here.
        """
        wanted = Grant(job, processes, devices, owner)
        known = self._grants.get(job)
        if known is not None:
            if known != wanted:
                raise RemoteProtocolError(
                    f"job {job} already holds {known.processes} processes on {known.devices} of "
                    f"{self._node!r}"
                )
            self.renew(now, job)
            return known
        self.expire(now)
        if processes < 1 or len(set(devices)) != len(devices):
            raise RemoteProtocolError(f"job {job} asks for {processes} processes on {devices}")
        if devices and processes != len(devices):
            raise RemoteProtocolError(
                f"job {job} asks for {processes} processes on {len(devices)} devices"
            )
        missing = [index for index in devices if index not in self._devices]
        if missing:
            raise self._refuse(f"has no device {missing[0]}", for_ever=True)
        if not devices and processes > self._cpus:
            raise self._refuse(
                f"runs at most {self._cpus} CPU processes, {processes} asked", for_ever=True
            )
        for index in devices:
            holder = self.holder(index)
            if holder is not None:
                raise self._refuse(f"device {index} is busy with {holder}", for_ever=False)
            if unfit and index in unfit:
                raise self._refuse(f"device {index} {unfit[index]}", for_ever=False)
        cpu_grants = [g for g in self._grants.values() if not g.devices]
        used = sum(g.processes for g in cpu_grants)
        if not devices and used + processes > self._cpus:
            holders = ", ".join(map(str, cpu_grants))
            raise self._refuse(
                f"busy with {holders} ({self._cpus - used} of {self._cpus} CPU processes free)",
                for_ever=False,
            )
        if len(self._grants) >= GRANTS_MAX:
            raise self._refuse(f"holds {GRANTS_MAX} jobs already", for_ever=False)
        self._grants[job] = wanted
        self._until[job] = now + LEASE_S
        return wanted

    def holder(self, device: int) -> Grant | None:
        """Return the grant that a device belongs to."""
        return next((g for g in self._grants.values() if device in g.devices), None)

    def holding(self, device: int) -> str:
        """Return the job that a device belongs to, "" for none."""
        grant = self.holder(device)
        return grant.job if grant is not None else ""

    def renew(self, now: float, job: str) -> bool:
        """Prolong a lease; False when the job holds nothing here (any more)."""
        self.expire(now)
        if job not in self._grants:
            return False
        if self._until[job] is not None:
            self._until[job] = now + LEASE_S
        return True

    def hold(self, job: str) -> bool:
        """Keep a grant until `release`, because the job's processes use it."""
        if job not in self._grants:
            return False
        self._until[job] = None
        return True

    def adopt(self, grant: Grant) -> None:
        """Take over the grant of a job that was already running when the agent started."""
        self._grants[grant.job] = grant
        self._until[grant.job] = None

    def release(self, job: str) -> bool:
        """Free what a job holds; False when it held nothing."""
        self._until.pop(job, None)
        return self._grants.pop(job, None) is not None

    def expire(self, now: float) -> tuple[Grant, ...]:
        """Free every grant whose lease ran out and return them."""
        over = [job for job, until in self._until.items() if until is not None and until <= now]
        gone = tuple(self._grants[job] for job in over)
        for job in over:
            self.release(job)
        return gone

    def next_timeout(self) -> float | None:
        return min((until for until in self._until.values() if until is not None), default=None)

    def check(self) -> None:
        """Raise if a device is granted twice or CPU processes exceed the limit."""
        devices = [index for grant in self._grants.values() for index in grant.devices]
        assert len(devices) == len(set(devices)), self._grants
        assert self._grants.keys() == self._until.keys()

    def _refuse(self, reason: str, *, for_ever: bool) -> PlacementError:
        kind = PlacementError if for_ever else PlacementBusyError
        return kind(f"{self._node}: {reason}", refusals=(Refusal(self._node, reason, for_ever),))
