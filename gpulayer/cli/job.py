"""The commands about jobs: run, jobs, logs, attach, stop, get.

They turn arguments into a request or a look at the mesh and print the answer. How a job comes to
run is the launcher's matter, how its files lie at home is `gpulayer.jobs`'s.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpulayer_mesh.client import MeshClient, Queued
from gpulayer_mesh.core.jobspec import OVER, JobKind, JobRecord
from gpulayer_mesh.core.logrecord import LogPick
from gpulayer_mesh.core.restarts import origin_of
from gpulayer_mesh.core.types import Accelerator, Snapshot
from gpulayer_mesh.errors import ConfigError, ExitCode, GpuLayerError

from gpulayer import env
from gpulayer import jobs as viewing
from gpulayer.ui import Ui
from gpulayer.views import (
    exit_code,
    job_lines,
    jobs_json,
    log_json,
    outcome_lines,
    rank_nodes,
    silent_lines,
)

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# On top of the grace time: ranks are killed, files listed, the record written; and a machine that
# is lost may have to be given up, after 19 s and a question.
_END_S = 30.0


def run(args: Namespace, ui: Ui) -> int:
    """Run a command as a job and follow it; exits with the job's code."""
    from gpulayer.launcher import JobRequest, run_job

    argv, python, root = described(args.command, Path.cwd())
    if not python and argv[0].endswith(".py") and (root / argv[0]).is_file():
        raise ConfigError(
            f"{argv[0]!r} is a Python script, not a command",
            hint=f"gpulayer run ... -- python {argv[0]}",
        )
    # One process is a plain command; several get torchrun's environment, whatever they are.
    single = args.nodes == 1 and args.devices == 1
    outcome = run_job(
        JobRequest(
            argv=argv,
            python=python,
            kind=JobKind.COMMAND if single else JobKind.DISTRIBUTED,
            name=args.name or program_name(argv, python),
            root=root,
            nodes=args.nodes,
            devices=args.devices,
            **asked(args),
            restarts=args.restarts,
            on_disconnect_s=args.on_disconnect,
            on_exit=args.on_exit,
            detach=args.detach,
            dry_run=args.dry_run,
        )
    )
    return outcome.code


def asked(args: Namespace) -> dict[str, Any]:
    """Return what every command that starts something may be given, as fields of its request."""
    for name in args.secret:
        if "=" in name:
            raise ConfigError(
                f"--secret {name.partition('=')[0]}=...: a value on the command line is no secret",
                hint="export it in this shell and give its name only",
            )
    return {
        "accelerator": None if args.accelerator == "auto" else Accelerator(args.accelerator),
        "target": tuple(args.target.split(",")) if "," in args.target else args.target,
        "env": env.named_env(args.env),
        "secrets": env.named_env(args.secret),
        "stop_grace_s": args.grace,
        "wait_s": args.wait,
    }


def described(command: tuple[str, ...], here: Path) -> tuple[tuple[str, ...], bool, Path]:
    """Return the job's arguments, whether Python runs them, and the folder to ship.

    Each node puts its own interpreter in front, so `python` goes. The folder is the one the user
    stands in; a script elsewhere is shipped with its own folder, under its plain name.
    """
    if _PYTHON.fullmatch(Path(command[0]).name) is None:
        return command, False, here
    argv = command[1:]
    if not argv:
        raise ConfigError(f"{command[0]!r} alone would wait for input that a job never gets")
    script = Path(os.path.normpath(here / argv[0]))  # not resolved: links are shipped as they are
    if script.is_file():
        root = here if script.is_relative_to(here) else script.parent
        argv = (str(script.relative_to(root)), *argv[1:])
        return argv, True, root
    return argv, True, here


def program_name(argv: tuple[str, ...], python: bool) -> str:
    """Return what tables call a command by default."""
    if python and argv[0] == "-m" and len(argv) > 1:
        return argv[1]
    if python and argv[0].startswith("-"):
        return f"python {argv[0]}"
    return Path(argv[0]).name or argv[0]


def jobs(args: Namespace, ui: Ui) -> int:
    """List jobs, newest first."""

    async def ask() -> tuple[list[JobRecord], list[Queued], Snapshot]:
        async with await MeshClient.connect(env.home()) as client:
            return await asyncio.gather(client.jobs(), client.queued(), client.snapshot())

    records, waiting, snapshot = asyncio.run(ask())
    known = {record.spec.id for record in records}  # one may just have its turn
    queued = [one for one in reversed(waiting) if one.ticket.job not in known]
    if args.json:
        ui.data([json.dumps(jobs_json(records, queued))])
    elif records or queued:
        ui.data(job_lines(records, queued))
        for line in silent_lines(records, snapshot):
            ui.note(line)
    else:
        ui.note("no jobs yet")
    return ExitCode.OK


def logs(args: Namespace, ui: Ui) -> int:
    """Print output of a job; with --follow until it ends, then exits with its code."""

    pick = LogPick(stderr=args.stderr, since_s=args.since, tail=args.tail)
    view = viewing.LogView(args.ranks, pick, args.raw)

    async def watch(client: MeshClient, record: JobRecord) -> int:
        if args.json:
            return await _log_objects(client, record, view, ui, follow=args.follow)
        if not args.follow:
            await viewing.print_attempts(client, record, ui, view)
            return ExitCode.OK
        final = await viewing.follow(client, record, ui, view=view)
        ui.outcome(final)
        return exit_code(final) or 0

    async def look() -> int:
        async with await MeshClient.connect(env.home()) as client:
            record = await client.find_job(args.job)
            _check_ranks(args.ranks, record)
            try:
                return await watch(client, record)
            except asyncio.CancelledError:  # Ctrl-C
                await viewing.leave(client, record, ui)
                raise

    return asyncio.run(look())


async def _log_objects(
    client: MeshClient, record: JobRecord, view: viewing.LogView, ui: Ui, *, follow: bool
) -> int:
    """Print the lines of all attempts, or as they come those of the newest and what follows it."""

    async def lines(attempt: JobRecord) -> None:
        pick = view.pick
        if follow and attempt is not record:  # it has begun under our eyes
            pick = replace(pick, tail=None)
        async for line in client.logs(attempt, ranks=view.ranks, follow=follow, pick=pick):
            ui.data([json.dumps(log_json(attempt.spec, line))])

    async def see(attempt: JobRecord) -> JobRecord:
        missing: GpuLayerError | None = None
        try:
            await lines(attempt)
        except GpuLayerError as e:
            missing = e
        final = await viewing.wait_attempt(client, attempt, ui)
        if missing is not None and not final.successor:
            raise missing
        return final

    if follow:
        return exit_code(await viewing.through_attempts(client, record, ui, see)) or 0
    for attempt in await client.attempts(record) or [record]:
        await lines(attempt)
    return ExitCode.OK


def attach(args: Namespace, ui: Ui) -> int:
    """Follow a job as its own launcher would."""
    from gpulayer.launcher import Interrupts, attend

    async def watch() -> int:
        interrupts = Interrupts(asyncio.current_task())
        async with await MeshClient.connect(env.home()) as client:
            record = await client.find_job(args.job)
            with interrupts:
                final = await attend(client, record, ui, interrupts, on_exit=args.on_exit)
                if final is None:
                    return ExitCode.STOPPED_BY_USER
                await viewing.bring_home(client, final, _home_of(final), ui)
                return exit_code(final) or 0

    return asyncio.run(watch())


def _check_ranks(wanted: frozenset[int] | None, record: JobRecord) -> None:
    count = len(rank_nodes(record.spec))
    absent = sorted(rank for rank in wanted or () if rank >= count)
    if absent:
        last = f"ranks 0 to {count - 1}" if count > 1 else "rank 0 only"
        raise ConfigError(f"job {record.spec.id} has no rank {absent[0]}: it has {last}")


def stop(args: Namespace, ui: Ui) -> int:
    """Stop a job and wait for the proof that it has ended."""

    async def end() -> JobRecord | None:
        async with await MeshClient.connect(env.home()) as client:
            found = await client.find(args.job)
            if isinstance(found, Queued):
                if await client.stop_queued(found):
                    ui.note(f"job {found.ticket.job} was taken out of the queue")
                    return None
                found = await client.find_job(found.ticket.job)  # its turn came meanwhile
            return await stop_and_wait(client, found, args, ui)

    final = asyncio.run(end())
    for line in outcome_lines(final)[0] if final is not None else ():
        ui.note(line)
    return ExitCode.OK


async def stop_and_wait(
    client: MeshClient, record: JobRecord, args: Namespace, ui: Ui
) -> JobRecord:
    """End a job as `--grace` and `--kill` say; returns its last record."""
    if record.state in OVER and not record.successor:
        return record
    own = record.spec.stop_grace_s if args.grace is None else args.grace
    grace_s = 0.0 if args.kill else own
    record = await client.stop(record.spec.id, grace_s=args.grace, kill=args.kill)
    if record.state not in OVER:
        ui.note(f"stopping job {record.spec.id}: its ranks have {grace_s:g} s")

    async def again(further: JobRecord) -> None:  # it was about to start again
        await client.stop(further.spec.id, grace_s=args.grace, kill=args.kill)

    try:
        async with asyncio.timeout(grace_s + _END_S):
            return await viewing.wait_end(client, record, ui, began=again)
    except TimeoutError:
        raise GpuLayerError(
            f"job {record.spec.id} has not ended after {grace_s + _END_S:g} s",
            hint=f"gpulayer stop --kill {record.spec.id}",
        ) from None


def get(args: Namespace, ui: Ui) -> int:
    """Bring files of a job here."""

    running = False

    async def fetch() -> list[Path]:
        nonlocal running
        async with await MeshClient.connect(env.home()) as client:
            record = await client.find_job(args.job)
            running = record.state not in OVER
            dest = Path(args.to) if args.to else _home_of(record)
            return await viewing.collect(client, record, dest, ui, only=args.path)

    if not asyncio.run(fetch()):
        what = f"no file {args.path!r}" if args.path else "no files"
        hint = "it still runs; ask again later" if running else "are all of its nodes reachable?"
        raise GpuLayerError(f"job {args.job} offers {what}", hint=hint)
    return ExitCode.OK


def _home_of(record: JobRecord) -> Path:
    return Path.cwd() / "gpulayer_jobs" / origin_of(record.spec)
