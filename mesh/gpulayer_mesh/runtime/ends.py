"""What became of jobs that this node watched and whose keeper was lost: their last records.

Nobody else may know: of a job on one machine that is gone, its witnesses are all there is. Kept as
long as the jobs of this node are. This module does not know how a job is watched or restarted.

    ends/ID       the last record of a job that this node watched
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from gpulayer_mesh.core import hosted, retention, wire
from gpulayer_mesh.core.jobspec import Failure, JobRecord, JobSpec, JobState
from gpulayer_mesh.errors import RemoteProtocolError
from gpulayer_mesh.files import make_private, remove_file, replace_file

log = logging.getLogger("gpulayer.restarts")


def without_keeper(spec: JobSpec, *, age_s: float, waiting: str = "") -> JobRecord:
    """Return a witness's word on a job whose keeper counts as lost.

    Args:
        waiting: why the next attempt has not started, where that is known.
    """
    name = spec.slots[0].name
    why = f"node of rank 0 lost: it did not answer for {hosted.KEEPER_SILENT_S:g} s"
    return JobRecord(
        spec,
        JobState.RESTARTING,
        spec.slots[0].node,
        failure=Failure(None, name, 1, why),
        age_s=age_s,
        waiting=waiting or f"its machine {name} does not answer",
    )


@dataclass(frozen=True, slots=True)
class _End:
    record: JobRecord
    at: float  # when its ages were true, by the monotonic clock

    def now(self) -> JobRecord:
        passed = time.monotonic() - self.at
        ended = (self.record.ended_age_s or 0.0) + passed
        return replace(self.record, age_s=self.record.age_s + passed, ended_age_s=ended)


class Ends:
    """Last records, by job; the folder is read when this is made."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ends: dict[str, _End] = {}
        for path in root.glob("*"):
            try:
                record = wire.decode_as(
                    JobRecord, wire.unpack(path.read_bytes(), max_bytes=wire.BODY_MAX)
                )
            except (RemoteProtocolError, OSError) as error:  # half-written, or of a version to come
                log.warning("the end of job %s cannot be read: %s", path.name, error)
                remove_file(path)
                continue
            age_s = max(0.0, time.time() - path.stat().st_mtime)  # display only
            self._ends[record.spec.id] = _End(record, time.monotonic() - age_s)

    def all(self) -> list[JobRecord]:
        """Return them, ages as of now."""
        return [end.now() for end in self._ends.values()]

    def get(self, job: str) -> JobRecord | None:
        end = self._ends.get(job)
        return None if end is None else end.now()

    def keep(self, record: JobRecord) -> None:
        """Note how a job ended."""
        self._ends[record.spec.id] = _End(record, time.monotonic())
        try:
            make_private(self._root)
            replace_file(self._root / record.spec.id, wire.pack(record), private=True)
        except OSError as error:  # known until this agent ends
            log.warning("the end of job %s cannot be written: %s", record.spec.id, error)

    def prune(self) -> None:
        """Forget what is too old, or too much."""
        finished = [retention.Finished(one.spec.id, one.ended_age_s or 0.0) for one in self.all()]
        for old in retention.outdated(finished):
            self.drop(old)

    def drop(self, job: str) -> None:
        """Its keeper is back, or it is too old."""
        if self._ends.pop(job, None) is not None:
            remove_file(self._root / job)
