"""From a request to a result: pack, plan, wait for a turn, start, follow, collect.

Until the job has started this process coordinates; afterwards rank 0's agent keeps the job and this
process only watches. It does not know what a script does, how placement or an agent decides, nor
what brings a planned job to its start (`gpulayer_mesh.starting`).
"""

from __future__ import annotations

import asyncio
import os
import secrets as random_bytes
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpulayer_mesh.core.jobspec import (
    DISCONNECT_MIN_S,
    JOB_ID_ALPHABET,
    JOB_ID_CHARS,
    RESTARTS_MAX,
    WAIT_MAX_S,
    Failure,
    JobKind,
    JobRecord,
    JobSpec,
    JobState,
    Slot,
)
from gpulayer_mesh.core.types import Accelerator, NodeId, Role, Snapshot
from gpulayer_mesh.errors import (
    BundleError,
    ConfigError,
    ExitCode,
    NotAllowedError,
    PathsCutError,
    PlacementBusyError,
    PlacementError,
)

from gpulayer import env

if TYPE_CHECKING:
    from gpulayer_mesh.client import MeshClient
    from gpulayer_mesh.core.placement import Plan, Request

    from gpulayer.bundle import Bundle, Scan
    from gpulayer.ui import Ui

ELSEWHERE_S = 10.0  # for other machines, where those of the first plan do not reach each other
SAME_PRESS_S = 0.3  # signals closer than this are one wish; nobody presses Ctrl-C twice so fast
_NO_SCRIPT = "there is no script to run on the other machines: this is a notebook, REPL or -c"
_SAVE_IT = (
    "save the code as a file, e.g. train.py, and run `python train.py`; or put a function into a "
    'module and call gpulayer.submit("module:function")'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What is to be run, and on how much; where comes out of the plan."""

    argv: tuple[str, ...]  # with `python`: the arguments of the interpreter
    python: bool
    kind: JobKind
    name: str
    root: Path  # the folder that is shipped
    # What of ours runs something for the user: that one's imports are looked at.
    program: tuple[str, ...] = ()
    cwd: str = ""  # relative to root
    nodes: int = 1
    devices: int | Literal["auto"] = "auto"  # per node
    accelerator: Accelerator | None = None  # None: the best that enough nodes have
    target: str | tuple[str, ...] = "auto"
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    stop_grace_s: float = 30.0
    call: int | None = None  # index of the Trainer call that the ranks execute
    gradient_bytes: int = 0  # that each step sends; 0: not known
    extra_files: Mapping[str, Path] = field(default_factory=dict)  # path in the bundle -> file
    wait_s: float | None = None  # for busy nodes; 0: not at all, None: as long as it takes
    restarts: int = 0  # how often the whole job may start again after a failure
    # How long nobody may follow it on this machine before it is stopped; None: for ever.
    on_disconnect_s: float | None = None
    on_exit: Literal["stop", "keep"] = "stop"  # what Ctrl-C does with a job that runs
    detach: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        from gpulayer_mesh.core.placement import target_problem

        problems = []
        if not self.argv or not (self.python or self.argv[0]):
            problems.append("no command given")
        if self.nodes < 1:
            problems.append(f"nodes must be at least 1, got {self.nodes}")
        if self.devices != "auto" and self.devices < 1:
            problems.append(f"devices must be 'auto' or at least 1, got {self.devices}")
        if problem := target_problem(self.target):
            problems.append(problem)
        grace_s: object = self.stop_grace_s
        number = isinstance(grace_s, int | float) and not isinstance(grace_s, bool)
        if not number or not 0 <= self.stop_grace_s <= 86400:
            problems.append(f"stop grace must be 0 to 86400 seconds, got {grace_s!r}")
        wait_s: object = self.wait_s
        number = isinstance(wait_s, int | float) and not isinstance(wait_s, bool)
        if wait_s is not None and not (number and 0 <= (self.wait_s or 0) <= WAIT_MAX_S):
            problems.append(f"wait must be None or 0 to {WAIT_MAX_S} seconds, got {wait_s!r}")
        restarts: object = self.restarts
        number = isinstance(restarts, int) and not isinstance(restarts, bool)
        if not number or not 0 <= self.restarts <= RESTARTS_MAX:
            problems.append(f"restarts must be 0 to {RESTARTS_MAX}, got {restarts!r}")
        gone_s: object = self.on_disconnect_s
        number = isinstance(gone_s, int | float) and not isinstance(gone_s, bool)
        limits = f"{DISCONNECT_MIN_S} to {WAIT_MAX_S} seconds"
        if gone_s is not None and not (
            number and DISCONNECT_MIN_S <= (self.on_disconnect_s or 0) <= WAIT_MAX_S
        ):
            problems.append(f'on_disconnect must be "keep" or {limits}, got {gone_s!r}')
        elif gone_s is not None and self.detach:
            problems.append("a detached job waits for nobody, so on_disconnect is not for it")
        problems += env.problems("env", self.env) + env.problems("secrets", self.secrets)
        if problems:
            raise ConfigError("; ".join(problems))


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended, as seen from here."""

    job: str
    code: int  # what this process should exit with
    output_dir: Path | None  # None: nothing came home (detached, dry run)
    failure: Failure | None = None


def script_request(**fields: Any) -> JobRequest:
    """Describe the running script; `fields` are those of `JobRequest`.

    Raises:
        ConfigError: there is no script to run again (notebook, REPL, `-c`).
    """
    script = _running_script()
    kind = fields.pop("kind", JobKind.DISTRIBUTED)
    return JobRequest(python=True, kind=kind, **(script | fields))


def run_job(request: JobRequest) -> JobOutcome:
    """Run a job on the mesh, from the plan to the files that come home.

    Prints plan, logs and result. A failed job is an outcome, not an exception.

    Raises:
        NoMeshError, DiscoveryError, PlacementError, NotAllowedError, BundleError, TransportError:
            nothing was started.
    """
    return _in_own_loop(lambda: _run_job(request))


async def start(
    request: JobRequest, ui: Ui, *, began: Callable[[JobRecord], None] = lambda record: None
) -> JobRecord:
    """Plan and start a job; returns once its keeper has it. Raises as `run_job`.

    Args:
        began: told of the job before anything else can end this call, Ctrl-C included.
    """
    from gpulayer_mesh.client import MeshClient

    packed = await asyncio.to_thread(_pack, request)
    async with await MeshClient.connect(env.home()) as client:
        record = await _place(client, request, packed, ui)
        assert record is not None  # it is for a dry run only
        began(record)
        ui.restarts(record.spec, client.names())
    return record


def run_local(request: JobRequest, *, processes: int) -> JobOutcome:
    """Run the ranks on this machine, in this folder, with no mesh and no agent."""
    from gpulayer.localjob import run

    return _in_own_loop(lambda: run(request, processes))


def accelerator_of(name: str) -> Accelerator | None:
    """Return the accelerator to ask the mesh for; None leaves it to the plan."""
    if name == "auto":
        return None
    if name == "gpu":
        return Accelerator.CUDA
    try:
        return Accelerator(name)
    except ValueError:
        raise ConfigError(
            f"unknown accelerator {name!r}", hint="one of auto, cpu, gpu, cuda, rocm, mps"
        ) from None


def new_job_id() -> str:
    """Return a fresh random job id."""
    return "".join(random_bytes.choice(JOB_ID_ALPHABET) for _ in range(JOB_ID_CHARS))


def _in_own_loop(main: Callable[[], Any]) -> JobOutcome:
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # as it should be
        try:
            return asyncio.run(main())  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    raise ConfigError(
        "jobs cannot be started from inside a running event loop",
        hint="put the call into a script of its own and run that",
    )


# -- the running script -------------------------------------------------------------------------


def _running_script() -> dict[str, Any]:
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or hasattr(sys, "ps1"):
        raise ConfigError(_NO_SCRIPT, hint=_SAVE_IT)
    start = env.START_DIR
    arguments = _script_arguments(sys.orig_argv)
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        module = spec.name.removesuffix(".__main__")
        # `python -m pkg.train` found the package in the directory it was started in
        return {
            "argv": ("-m", module, *arguments),
            "name": module,
            "root": start,
        }
    path = Path(file)
    path = path if path.is_absolute() else start / path
    if not path.is_file():  # such as "<stdin>"
        raise ConfigError(_NO_SCRIPT, hint=_SAVE_IT)
    path = path.resolve()
    return {"argv": (path.name, *arguments), "name": path.name, "root": path.parent}


def running_root() -> Path | None:
    """Return the folder of the running script; None in a notebook or REPL."""
    try:
        found: Path = _running_script()["root"]
    except ConfigError:
        return None
    return found


def _script_arguments(argv: Sequence[str]) -> tuple[str, ...]:
    """Return what follows the script or module; `sys.argv` may have been changed by now."""
    takes_value = {"-X", "-W", "--check-hash-based-pycs"}
    i = 1
    while i < len(argv):
        argument = argv[i]
        if argument in takes_value:
            i += 2
        elif argument.startswith("-") and not argument.startswith("--") and "m" in argument[1:]:
            # -m NAME, also at the end of a cluster (-um NAME) or with the name attached (-mNAME)
            attached = argument.partition("m")[2]
            return tuple(argv[i + 1 :] if attached else argv[i + 2 :])
        elif argument.startswith("-") and argument != "-":
            i += 1
        else:
            return tuple(argv[i + 1 :])
    return ()


# -- on the mesh --------------------------------------------------------------------------------


async def _run_job(request: JobRequest) -> JobOutcome:
    from gpulayer_mesh.client import MeshClient

    from gpulayer import jobs
    from gpulayer.ui import Ui

    ui = Ui()
    interrupts = Interrupts(asyncio.current_task())
    packing = asyncio.create_task(asyncio.to_thread(_pack, request))
    try:
        async with await MeshClient.connect(env.home()) as client:
            with interrupts:
                try:
                    placed = await _place(client, request, await packing, ui)
                except asyncio.CancelledError:
                    ui.note("interrupted before the start: no job runs")
                    raise
                if placed is None:
                    return JobOutcome("", ExitCode.OK, None)
                record, job = placed, placed.spec.id
                if not request.detach:
                    ui.began(record)
                ui.restarts(record.spec, client.names())
                if request.detach:
                    ui.detached(record)
                    return JobOutcome(job, ExitCode.OK, None)

                final = await attend(client, record, ui, interrupts, on_exit=request.on_exit)
                if final is None:
                    return JobOutcome(job, ExitCode.STOPPED_BY_USER, None)
                destination = request.root / "gpulayer_jobs" / job
                await jobs.bring_home(client, final, destination, ui)
                return outcome_of(final, destination)
    finally:
        packing.cancel()


async def attend(
    client: MeshClient,
    record: JobRecord,
    ui: Ui,
    interrupts: Interrupts,
    *,
    on_exit: Literal["stop", "keep"],
) -> JobRecord | None:
    """Follow a job to its end and return its last record; None where Ctrl-C left it.

    Raises:
        As `jobs.follow`.
    """
    from gpulayer import jobs

    job, newest = record.spec.id, record
    asked: list[bool] = []  # to stop, or to kill
    left = False

    async def began(further: JobRecord) -> None:
        nonlocal newest
        newest = further
        if asked:  # while it started again
            await client.stop(further.spec.id, grace_s=None, kill=asked[-1])

    following = asyncio.create_task(jobs.follow(client, record, ui, began=began))

    async def stop(kill: bool) -> None:
        asked.append(kill)
        ui.stopping(job, kill, record.spec.stop_grace_s)
        await client.stop(job, grace_s=None, kill=kill)

    async def leave(kill: bool) -> None:
        nonlocal left
        left = True
        following.cancel()

    interrupts.on_stop = stop if on_exit == "stop" else leave
    try:
        return await following
    except asyncio.CancelledError:
        if not left:
            raise
    finally:
        if on_exit == "keep":  # there is nothing to leave any more
            interrupts.on_stop = None
    await jobs.leave(client, newest, ui)
    return None


def outcome_of(record: JobRecord, output_dir: Path | None) -> JobOutcome:
    """Translate a final record into this process's exit code."""
    code = {
        JobState.SUCCEEDED: int(ExitCode.OK),
        JobState.CANCELLED: int(ExitCode.STOPPED_BY_USER),
    }.get(record.state, record.failure.code if record.failure else int(ExitCode.FAILED))
    return JobOutcome(record.spec.id, code, output_dir, record.failure)


@dataclass(frozen=True, slots=True)
class _Packed:
    """What is shipped, and what the script in it imports from elsewhere."""

    bundle: Bundle
    scan: Scan


def _pack(request: JobRequest) -> _Packed:
    from gpulayer.bundle import Scan, pack, scan

    if where := _never_shipped(request.root):
        if request.python and not request.argv[0].startswith("-"):
            raise BundleError(
                f"{request.argv[0]} is looked for in {where}, which is never shipped as a whole",
                hint="run it from the folder that it lies in, below this one",
            )
        with tempfile.TemporaryDirectory() as nothing:
            return _Packed(
                pack(Path(nothing), extra_files=request.extra_files),
                Scan((), (f"{where} is not shipped; the job starts in an empty folder",)),
            )
    bundle = pack(request.root, extra_files=request.extra_files)
    if not request.python:
        return _Packed(bundle, Scan((), ()))
    return _Packed(bundle, scan(bundle, request.program or request.argv, request.cwd))


def _never_shipped(root: Path) -> str | None:
    """Return what a folder is called that holds somebody's mail and keys, or the whole system:
    it does not travel because a command was typed there."""
    root, home = root.resolve(), Path.home().resolve()
    if root == home:
        return "your home folder"
    above = home.is_relative_to(root) or root == Path(root.anchor)
    return f"{str(root)!r} with your home folder in it" if above else None


async def _place(
    client: MeshClient, request: JobRequest, packed: _Packed, ui: Ui
) -> JobRecord | None:
    """Plan, print the plan, wait for this job's turn where nodes are busy, and start.

    Returns None for a dry run.
    """
    from gpulayer_mesh import starting
    from gpulayer_mesh.core import placement

    from gpulayer.waiting import Applicant, in_turn

    wanted = placement.Request(
        nodes=request.nodes,
        devices=request.devices,
        accelerator=request.accelerator,
        target=request.target,
        torch=request.kind is JobKind.DISTRIBUTED,
    )
    snapshot = await client.snapshot()
    # The nodes check this as well; here it spares the user a plan that they would refuse.
    if Role.LAUNCHER not in client.book.roles(client.identity.node):
        raise NotAllowedError(
            f"this machine, {client.name!r}, is a member without the role launcher",
            hint="on the machine that founded the mesh: gpulayer mesh invite --role "
            "launcher, then here: gpulayer mesh join LINE",
        )
    printed: tuple[Slot, ...] = ()

    def show(plan: Plan) -> None:
        nonlocal printed
        if plan.slots == printed:  # another try of the same
            return
        printed = plan.slots
        ui.plan(plan, request, packed.bundle, here=client.identity.node)
        for note in (*packed.scan.notes, *_elsewhere(request)):
            ui.note(note)

    if request.dry_run:
        show(placement.plan(wanted, snapshot))
        return None
    held: JobSpec | None = None

    async def begin(without: Mapping[NodeId, str], wait_s: float | None) -> JobRecord:
        nonlocal held
        job = new_job_id()  # nodes that prepared a try know its id, and take no second one of it
        who = Applicant(job, client.identity.node, client.name, _table_name(request))

        async def reserve(plan: Plan, attempt: int) -> tuple[JobSpec, bytes]:
            nonlocal held
            show(plan)
            voters = await _voters(client, request, plan)
            spec = _spec(client, request, packed, plan, job, attempt, voters)
            signed = client.sign_spec(spec)
            await starting.reserve(client, spec, signed)
            held = spec
            return spec, signed

        try:
            spec, signed = await in_turn(
                client, wanted, who, wait_s=wait_s, without=without, reserve=reserve, say=ui.note
            )
        except BaseException:
            if held is not None:  # Ctrl-C between the reservation and the start
                await asyncio.shield(starting.release(client, held, going=False))
            raise
        return await starting.start(client, spec, signed, packed.bundle, request.secrets)

    try:
        return await begin({}, request.wait_s)
    except PathsCutError as cut:
        assert held is not None  # it got as far as the pre-flight
        without = _other_choice(wanted, await client.snapshot(), held, cut)
        if without is None:
            raise
        first, held = cut.refusals[0], None
        ui.note(f"{first.node} {first.reason}; trying other machines")
        wait_s = ELSEWHERE_S if request.wait_s is None else min(ELSEWHERE_S, request.wait_s)
        try:
            return await begin(without, wait_s)
        except PlacementBusyError:  # somebody else was faster
            raise cut from None


def _other_choice(
    wanted: Request, snapshot: Snapshot, tried: JobSpec, cut: PathsCutError
) -> dict[NodeId, str] | None:
    """Return the nodes to do without where some do not reach each other, and why each of them.

    None if nothing can take their place now.
    """
    from gpulayer_mesh.core import placement
    from gpulayer_mesh.core.paths import cut_from, ways_apart

    # What was given back a moment ago, others may not have heard of yet.
    members = tuple(
        replace(member, grants=tuple(g for g in member.grants if g.job != tried.id))
        for member in snapshot.members
    )
    snapshot = replace(snapshot, members=members)
    names = {slot.node: slot.name for slot in tried.slots}
    for leaving in ways_apart(list(names), cut.pairs):
        staying = {node: name for node, name in names.items() if node not in leaving}
        without = cut_from(staying, cut.pairs)
        try:
            placement.plan(wanted, snapshot, without)
        except PlacementError:
            continue
        return without
    return None


def _elsewhere(request: JobRequest) -> tuple[str, ...]:
    if request.python and request.call is not None and request.root != env.START_DIR:
        where = f"the job runs in the folder of the script, {request.root.name}/, and only that"
        return (f"{where} is shipped: relative paths mean files there",)
    return ()


def _table_name(request: JobRequest) -> str:
    return os.fsencode(request.name[:256]).decode("utf-8", "replace")


async def _voters(client: MeshClient, request: JobRequest, plan: Plan) -> tuple[str, ...]:
    """Return the nodes that decide together about a restart."""
    if not request.restarts:
        return ()
    from gpulayer_mesh.core.restarts import choose_voters

    return choose_voters(plan.slots, await client.snapshot())


def _spec(
    client: MeshClient,
    request: JobRequest,
    packed: _Packed,
    plan: Plan,
    job: str,
    attempt: int,
    voters: tuple[str, ...],
) -> JobSpec:
    bundle = packed.bundle
    return JobSpec(
        id=job,
        kind=request.kind,
        name=_table_name(request),
        submitter=client.identity.node,
        submitter_name=client.name,
        submitted_at=time.time(),
        argv=tuple(map(os.fsencode, request.argv)),
        python=request.python,
        cwd=request.cwd,
        env=env.forwarded_env() | dict(request.env),
        accelerator=plan.accelerator,
        slots=plan.slots,
        manifest=bundle.sha256,
        bundle_bytes=bundle.total_bytes,
        imports=packed.scan.imports,
        stop_grace_s=request.stop_grace_s,
        call=request.call,
        attempt=attempt,
        target=(request.target,) if isinstance(request.target, str) else request.target,
        restarts=request.restarts,
        wait_s=request.wait_s,
        voters=voters,
        on_disconnect_s=request.on_disconnect_s,
    )


class Interrupts:
    """Ctrl-C and friends while a job is started and watched.

    Before the start a signal cancels the task; afterwards the first stops the job gracefully, the
    second kills it, or whatever else `on_stop` does. SIGHUP does the same unless it was ignored at
    start (nohup).
    """

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self.on_stop: Callable[[bool], Any] | None = None
        self._task = task
        self._count = 0
        self._last = float("-inf")
        self._before: dict[signal.Signals, Any] = {}  # what the script itself had installed
        self._stops: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> Interrupts:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before is signal.SIG_IGN:
                continue
            try:
                loop.add_signal_handler(number, self._signalled)
            except (RuntimeError, ValueError):  # not the main thread: its owner handles signals
                return self
            self._before[number] = before
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number, before in self._before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, before)

    def _signalled(self) -> None:
        # A terminal or `timeout` may send one signal to the process and to its group.
        last, self._last = self._last, time.monotonic()
        if self._last - last < SAME_PRESS_S:
            return
        self._count += 1
        if self.on_stop is None:
            if self._task is not None:
                self._task.cancel()
            return
        stop = asyncio.ensure_future(self.on_stop(self._count > 1))
        self._stops.add(stop)
        stop.add_done_callback(self._stop_done)

    def _stop_done(self, stop: asyncio.Task[Any]) -> None:
        self._stops.discard(stop)
        if not stop.cancelled() and stop.exception() is not None:
            self._count = 0  # it did not arrive; the next Ctrl-C asks again
