"""Whether a device is as free as its grants say: what others and former jobs have on it.

A process on a device is one of three: of the job that holds it, of a job of this node that does
not (any more), or of somebody else. The second kind *blocks* the device, as does memory that
stays in use, by no process that is seen, once the ranks are gone. What was in use before is read
when they start. Nothing is known of a device whose driver tells nothing (ROCm, MPS), and such a
one is never blocked.

This module does not know how a device is read, how processes are found, or when to look again.
Cost: a pass over the processes of each device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gpulayer_mesh.core.types import NAMED_MAX, Blocked, Device, DeviceProcess

# A rank takes some 300 MiB before its first tensor: context and kernels. Below this come and go the
# driver's own tables and the buffers of a display, 100 MiB at 4K, which nobody is charged for.
TOLERANCE_MIB = 128
# A killed process may be listed until the driver has taken its memory back. For as long the grant
# stays with the job that is ending, so that nobody sees a block which is none.
SETTLE_S = 2.0
SETTLE_PAUSE_S = 0.2  # between looks until then; each takes 1 ms per GPU
LOOK_AGAIN_S = 2.5  # at a blocked device; more often would not help one who waits for it much


@dataclass(frozen=True, slots=True)
class Reading:
    """One device at one moment."""

    device: Device  # without a word on processes
    processes: tuple[DeviceProcess, ...] = ()  # all that compute on it, ours included
    # In use by no process that is seen; None: the driver does not tell it all.
    unseen_mib: int | None = None

    @property
    def key(self) -> str:
        """What tells the device from others when the list of them changes."""
        return self.device.uuid or f"#{self.device.index}"


def judge(
    reading: Reading,
    *,
    holder: str = "",
    ours: Callable[[str], bool],
    before_mib: int | None = None,
) -> Device:
    """Return the device with what stands against granting it.

    Args:
        holder: the job that holds it, "" for none.
        ours: whether a job is or was one of this node; others' are as any other program.
        before_mib: what no process explained before the last job here, None if that is unknown.
    """
    left: list[DeviceProcess] = []
    others: list[DeviceProcess] = []
    for process in reading.processes:
        if not process.job or process.job != holder:
            (left if process.job and ours(process.job) else others).append(process)
    kept_mib = 0
    if not holder and before_mib is not None and reading.unseen_mib is not None:
        more_mib = reading.unseen_mib - before_mib
        kept_mib = more_mib if more_mib > TOLERANCE_MIB else 0
    return replace(
        reading.device,
        busy_pids=len(others),
        # Their use of memory changes all the time, and every change costs all members a request.
        busy_by=tuple(replace(one, memory_mib=None) for one in others[:NAMED_MAX]),
        blocked=Blocked(tuple(left[:NAMED_MAX]), max(0, len(left) - NAMED_MAX), kept_mib)
        if left or kept_mib
        else None,
    )


def unfit(device: Device) -> str | None:
    """Say why nobody gets a device although no job holds it; None if somebody may."""
    if device.blocked is not None:
        return f"is blocked: {device.blocked}"
    if device.busy_pids:
        return f"is in use by {users(device)}"
    return None


def users(device: Device) -> str:
    """Name the programs of others on a device: "pid 123 (blender) and 2 more"."""
    if not device.busy_by:
        return "another program"  # of an agent that does not say more
    more = device.busy_pids - len(device.busy_by)
    return ", ".join(map(str, device.busy_by)) + (f" and {more} more" if more > 0 else "")


class DeviceCare:
    """What must be remembered between two readings.

    Args:
        holder: the job that holds the device of this index, "" for none.
        ours: as for `judge`.
    """

    def __init__(self, holder: Callable[[int], str], ours: Callable[[str], bool]) -> None:
        self._holder = holder
        self._ours = ours
        self._before: dict[str, int] = {}  # by the device's key, MiB

    def begin(self, readings: Sequence[Reading], devices: Collection[int]) -> dict[str, int]:
        """Note what is in use on these devices before ranks start there, and return it."""
        noted: dict[str, int] = {}
        for reading in readings:
            if reading.device.index in devices:
                self._before.pop(reading.key, None)
                if reading.unseen_mib is not None:
                    noted[reading.key] = reading.unseen_mib
        self._before |= noted
        return noted

    def adopt(self, before: Mapping[str, int]) -> None:
        """Go on with what an earlier agent noted for a job that still ran."""
        self._before |= before

    def judge(self, readings: Sequence[Reading], *, over: str = "") -> tuple[Device, ...]:
        """Judge all devices; a free one that is clean is compared with nothing any more.

        Args:
            over: a job whose ranks are gone while it still holds devices.
        """
        judged = []
        for reading in readings:
            holder = self._holder(reading.device.index)
            holder = "" if holder == over else holder
            device = judge(
                reading,
                holder=holder,
                ours=self._ours,
                before_mib=self._before.get(reading.key),
            )
            if not holder and device.blocked is None:
                self._before.pop(reading.key, None)
            judged.append(device)
        return tuple(judged)
