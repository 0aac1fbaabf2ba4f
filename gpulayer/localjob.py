"""Several ranks on this machine with no mesh: one shim, loopback, the folder as it is.

The same shim, rank environment and choice of the first failure as on a mesh, so a script behaves
the same; only there is nothing to plan, ship or keep.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from gpulayer_mesh.core import hosted
from gpulayer_mesh.core import job as keeping
from gpulayer_mesh.core.failure import first_failure, is_failure
from gpulayer_mesh.core.jobspec import (
    GoOrder,
    HostPhase,
    HostReport,
    JobRecord,
    JobSpec,
    JobState,
    RankState,
    RankStatus,
    Slot,
)
from gpulayer_mesh.core.logrecord import RecordParser
from gpulayer_mesh.core.rankenv import HostContext, rank_argv, rank_environment
from gpulayer_mesh.core.types import Accelerator
from gpulayer_mesh.runtime import shims
from gpulayer_mesh.runtime.preflight import FreePorts

from gpulayer import env
from gpulayer.jobs import STAYED_SHOWN
from gpulayer.ui import Ui

if TYPE_CHECKING:
    from gpulayer.launcher import JobOutcome, JobRequest

HOST = "127.0.0.1"
NAME = "local"
TAIL_LINES = 60
# Nobody else could stop these ranks, so they end soon after their launcher was killed. A launcher
# that is only suspended in a terminal has this long to come back.
SILENCE_S = 30.0


async def run(request: JobRequest, processes: int) -> JobOutcome:
    """Run `processes` ranks here and bring their files to `gpulayer_jobs/<job>` of the root."""
    from gpulayer.launcher import Interrupts, new_job_id, outcome_of

    ui = Ui()
    accelerator = request.accelerator or Accelerator.CPU
    devices = () if accelerator is Accelerator.CPU else tuple(range(processes))
    spec = JobSpec(
        id=new_job_id(),
        kind=request.kind,
        name=request.name[:256],
        submitter="0" * 64,  # nobody signs or checks: it never leaves this process
        submitter_name=NAME,
        submitted_at=time.time(),
        argv=tuple(map(os.fsencode, _in_place(request))),
        python=request.python,
        cwd="",
        env=dict(request.env),
        accelerator=accelerator,
        slots=(Slot("0" * 64, NAME, processes, devices),),
        manifest=b"\0" * 32,
        bundle_bytes=0,
        stop_grace_s=request.stop_grace_s,
        call=request.call,
    )
    folder = env.home() / "local" / spec.id
    await asyncio.to_thread(_sweep, folder.parent)
    folder.mkdir(parents=True, mode=0o700)
    host = HostContext(
        base=env.copied_env(),
        job_dir=str(folder),
        python=sys.executable,
        cookie=secrets.token_hex(16),
    )
    order = GoOrder(HOST, FreePorts().take(), (HOST,), dict(request.secrets))
    config = shims.ShimConfig(
        ranks=tuple(
            shims.RankCommand(
                rank,
                rank_argv(spec, host),
                _rank_env(spec, rank, order, host),
                str(env.START_DIR),
                python=spec.python,
            )
            for rank in range(processes)
        ),
        cookie=host.cookie,
        grace_s=request.stop_grace_s,
        raised_grace_s=keeping.raised_grace_s(spec),
        agent_silence_s=SILENCE_S,
        secrets=tuple(request.secrets.values()),
    )
    local = _LocalJob(spec, folder, ui)
    interrupts = Interrupts(asyncio.current_task())
    interrupts.on_stop = local.interrupted
    try:
        for name, source in request.extra_files.items():
            target = folder / "work" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        with interrupts:
            record = await local.run(config)
        destination = request.root / "gpulayer_jobs" / spec.id
        for problem in await asyncio.to_thread(_bring_home, folder, destination, processes):
            ui.note(problem)
        ui.outcome(record)
        return outcome_of(record, destination)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, True)


def _sweep(root: Path) -> None:
    """Remove the folders of launchers that were killed, once their ranks are gone."""
    for old in root.iterdir() if root.is_dir() else ():
        if not shims.ShimRunner().alive(old) and time.time() - old.stat().st_mtime > SILENCE_S:
            shutil.rmtree(old, ignore_errors=True)


def _in_place(request: JobRequest) -> tuple[str, ...]:
    """The ranks start in the folder where the user did, so the script needs its full path."""
    if request.python and request.argv[0] != "-m":
        return (str(request.root / request.argv[0]), *request.argv[1:])
    return request.argv


def _rank_env(spec: JobSpec, rank: int, order: GoOrder, host: HostContext) -> dict[str, str]:
    found = rank_environment(spec, 0, rank, order, host)
    # Where the files of earlier Trainer calls lie; on a mesh they are in the working folder.
    found["GPULAYER_REPLAY"] = str(Path(host.job_dir, "work", ".gpulayer-replay"))
    return found


class _LocalJob:
    """Follows one shim until every process is gone."""

    def __init__(self, spec: JobSpec, folder: Path, ui: Ui) -> None:
        self._spec = spec
        self._folder = folder
        self._ui = ui
        self._shims = shims.ShimRunner()
        self._ranks = {
            rank: RankStatus(rank, RankState.WAITING) for rank in range(spec.slots[0].processes)
        }
        self._ended: dict[int, float] = {}
        self._began = time.monotonic()
        self._stopped_by_user = False
        self._problem = ""

    async def interrupted(self, kill: bool) -> None:
        """First Ctrl-C stops, the second kills."""
        self._stopped_by_user = True
        self._ui.stopping(self._spec.id, kill, self._spec.stop_grace_s)
        if kill:
            self._shims.kill(self._folder)
        else:
            self._shims.stop(self._folder, self._spec.stop_grace_s)

    async def run(self, config: shims.ShimConfig) -> JobRecord:
        await self._shims.start(self._folder, config)
        lines = asyncio.create_task(self._print_lines())
        stopper: asyncio.Task[None] | None = None
        try:
            async for event in self._shims.watch(self._folder):
                match event:
                    case hosted.RankStarted(rank, pid):
                        self._ranks[rank] = RankStatus(rank, RankState.RUNNING, pid)
                    case hosted.RankExited(rank):
                        await self._exited(event)
                        if stopper is None and is_failure(self._ranks[rank]):
                            stopper = asyncio.create_task(self._stop_others())
                    case hosted.ShimLost(error):
                        self._problem = error
                    case hosted.ShimDone():
                        pass
                    case _:
                        assert_never(event)
            await lines
            return self._record()
        except BaseException:
            self._shims.kill(self._folder)
            raise
        finally:
            for task in (lines, stopper):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
            self._ui.finish()

    async def _print_lines(self) -> None:
        parser = RecordParser()
        prefix = len(self._ranks) > 1
        async for data in self._shims.follow_logs(self._folder, self._ranks, {}, follow=True):
            for record in parser.feed(data):
                self._ui.log(record, NAME, prefix=prefix)

    async def _exited(self, event: hosted.RankExited) -> None:
        tail = await asyncio.to_thread(self._shims.tail_lines, self._folder, event.rank, TAIL_LINES)
        self._ended[event.rank] = time.monotonic()
        self._ranks[event.rank] = RankStatus(
            event.rank,
            RankState.EXITED,
            exit_code=event.code,
            signal=event.signal,
            stopped=event.stopped,
            tail=tail,
            memory_peak_mib=event.memory_peak_mib,
            memory_limit_mib=event.memory_limit_mib,
            memory_kill=event.memory_kill,
        )

    async def _stop_others(self) -> None:
        """Give the failures that follow from the first, or caused it, a moment to show."""
        await asyncio.sleep(keeping.SETTLE_S)
        self._shims.stop(self._folder, keeping.FAILURE_GRACE_S)

    def _record(self) -> JobRecord:
        now = time.monotonic()
        ranks = tuple(
            RankStatus(
                status.rank,
                status.state,
                exit_code=status.exit_code,
                signal=status.signal,
                stopped=status.stopped,
                ended_age_s=now - self._ended.get(status.rank, now),
                tail=status.tail,
                memory_peak_mib=status.memory_peak_mib,
                memory_limit_mib=status.memory_limit_mib,
                memory_kill=status.memory_kill,
            )
            for status in self._ranks.values()
        )
        failure = first_failure((NAME, status) for status in ranks)
        over = all(status.exit_code == 0 for status in ranks)
        if self._stopped_by_user and failure is None:
            state = JobState.CANCELLED
        else:
            state = JobState.SUCCEEDED if over and failure is None else JobState.FAILED
        report = HostReport(
            self._spec.id, self._spec.slots[0].node, HostPhase.ENDED, ranks, self._problem
        )
        return JobRecord(
            self._spec,
            state,
            self._spec.slots[0].node,
            (report,),
            failure,
            "stopped by you" if self._stopped_by_user else self._problem,
            age_s=now - self._began,
            ended_age_s=0.0,
        )


def _bring_home(folder: Path, destination: Path, processes: int) -> list[str]:
    """Copy the output files of all ranks; return what could not come and why."""
    problems = []
    for rank in range(processes):
        source = folder / "out" / f"rank{rank}"
        target = destination if rank == 0 else destination / f"rank{rank}"
        if source.is_dir() and any(source.iterdir()):
            try:
                shutil.copytree(source, target, dirs_exist_ok=True)
            except shutil.Error as e:  # pipes, dangling links; everything else has been copied
                problems += [
                    f"rank {rank}: {os.path.relpath(path, source)!r} did not come home: {why}"
                    for path, _, why in e.args[0]
                ]
    if (more := len(problems) - STAYED_SHOWN) > 0:
        problems[STAYED_SHOWN:] = [f"{more} more did not come home"]
    return problems
