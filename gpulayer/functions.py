"""`submit`: run a function of a module on other machines, and get back what it returns.

The function travels as a reference, "package.module:name", with the folder that has the module in
it; arguments and results are plain data and tensors (`values`). A submitted function is a job like
any other: it runs on if this process ends, and any member machine can get its result with
`attach`. Does not know how a job is placed, watched or fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from gpulayer_mesh.core.ownfiles import FUNCTION_RESULT
from gpulayer_mesh.errors import ConfigError, GpuLayerError

from gpulayer import called, values
from gpulayer import env as environment

if TYPE_CHECKING:
    from gpulayer_mesh.client import MeshClient
    from gpulayer_mesh.core.jobspec import JobRecord

    from gpulayer.launcher import JobRequest

T = TypeVar("T")
P = ParamSpec("P")

FOLLOW_S = 2.0  # between words to jobs that have to be followed, whose patience is 10 s and more


def _plainly(function: Callable[P, T]) -> Callable[P, T]:
    """Let its errors show the caller's line and what they say.

    The frames in between are of the event loop and ours. They are many, say nothing of the job, and
    push the line that called off the screen.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (GpuLayerError, TimeoutError) as error:
            raise error.with_traceback(None) from error.__cause__

    return call


class JobFailedError(GpuLayerError):
    """A job failed or was stopped.

    Args:
        code: its exit code.
    """

    def __init__(self, message: str, code: int, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class Job:
    """A job on the mesh, seen from here; `submit` and `attach` return one.

    Attributes:
        id: what the commands call it.
    """

    def __init__(self, record: JobRecord, root: Path) -> None:
        self.id: str = record.spec.origin or record.spec.id
        self._record = record
        self._root = root
        self._results: list[Any] | None = None

    def __repr__(self) -> str:
        return f"<Job {self.id} {self._record.spec.name}>"

    @property
    @_plainly
    def state(self) -> str:
        """Its state now, as `gpulayer jobs` shows it; asks the mesh."""
        self._record = _run(lambda: _asking(lambda client: client.current(self._record)))
        return self._record.state.value

    @_plainly
    def result(self, timeout_s: float | None = None, *, logs: bool = True) -> Any:
        """Wait for the end and return what the function returned on rank 0.

        Ctrl-C stops the job.

        Args:
            timeout_s: raise TimeoutError after this; the job goes on.
            logs: print the job's lines meanwhile.

        Raises:
            JobFailedError: the function raised, or the job was stopped; with its last lines.
        """
        return self._wait(timeout_s, logs)[0]

    @_plainly
    def results(self, timeout_s: float | None = None, *, logs: bool = True) -> list[Any]:
        """Return what the function returned on each rank; otherwise as `result`."""
        return list(self._wait(timeout_s, logs))

    @_plainly
    def stop(self, *, kill: bool = False) -> None:
        """Ask for the end of the job: its processes get their grace time, or with `kill` none."""
        _run(lambda: _asking(lambda client: client.stop(self.id, grace_s=None, kill=kill)))

    def _wait(self, timeout_s: float | None, logs: bool) -> list[Any]:
        """Wait for the end and return what the function returned on each rank."""
        if self._results is None:
            try:
                home = _run(lambda: _asking(lambda client: self._home(client, timeout_s, logs)))
            except KeyboardInterrupt:
                self.stop()
                raise
            self._results = [self._read(home, rank) for rank in range(self._ranks())]
        return self._results

    def _ranks(self) -> int:
        return sum(slot.processes for slot in self._record.spec.slots)

    async def _home(self, client: MeshClient, timeout_s: float | None, logs: bool) -> Path:
        """Wait for the end and bring the files home; returns the folder."""
        from gpulayer_mesh.core.jobspec import JobState

        from gpulayer import jobs
        from gpulayer.launcher import outcome_of
        from gpulayer.ui import Ui

        ui = Ui()
        home = self._root / "gpulayer_jobs" / self.id
        try:
            async with asyncio.timeout(timeout_s):
                waits = jobs.follow if logs else jobs.wait_end
                self._record = await waits(client, self._record, ui)
        except TimeoutError:
            raise TimeoutError(
                f"job {self.id} has not ended within {timeout_s} s; it goes on"
            ) from None
        succeeded = self._record.state is JobState.SUCCEEDED
        try:
            await jobs.collect(client, self._record, home, ui)
        except GpuLayerError as error:
            if succeeded:
                raise
            ui.note(error.message)
        if succeeded:
            return home
        failure = self._record.failure
        said = "".join(f"\n  {line}" for line in (failure.tail if failure else ()))
        why = failure.reason if failure else self._record.cause
        where = ""
        if failure is not None and failure.rank is not None:
            where = f"rank {failure.rank} on {failure.node}: "
        raise JobFailedError(
            f"job {self.id} ({self._record.spec.name}) {self._record.state.value}: "
            f"{where}{why}{said}",
            outcome_of(self._record, None).code,
            hint=f"gpulayer logs {self.id}",
        )

    def _read(self, home: Path, rank: int) -> Any:
        file = home / ("" if rank == 0 else f"rank{rank}") / FUNCTION_RESULT
        if not file.is_file():
            raise self._without_result(rank)
        return values.unpack(file.read_bytes())

    def _without_result(self, rank: int) -> JobFailedError:
        """Return what to raise where a job succeeded, and all its files are here, but no result."""
        from gpulayer_mesh.core.jobspec import JobKind

        spec = self._record.spec
        if spec.kind is not JobKind.FUNCTION:
            return JobFailedError(
                f"job {self.id} ({spec.name}) is a {spec.kind.value} job, and those return nothing",
                1,
                hint=f"its files: gpulayer get {self.id}",
            )
        return JobFailedError(
            f"job {self.id} ({spec.name}): what rank {rank} returned is not among its files",
            1,
            hint=f"gpulayer logs {self.id}",
        )


@_plainly
def submit(
    function: str | Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    nodes: int = 1,
    devices: int | str = 1,
    accelerator: str = "auto",
    target: str | Iterable[str] = "auto",
    env: Mapping[str, str] | Iterable[str] | None = None,
    secrets: Mapping[str, str] | Iterable[str] | None = None,
    stop_grace_s: float = 30.0,
    wait_s: float | None = None,
    restarts: int = 0,
    on_disconnect: float | str = "keep",
    root: str | Path | None = None,
) -> Job:
    """Run `function(*args, **kwargs)` on machines of the mesh; returns once it has been started.

    Where there is no room it waits for it, as every job does.

    Args:
        function: "package.module:name", or a function of such a module. The module is imported
            there, so what stands at its top level runs, too: guard what should not with
            `if __name__ == "__main__":`.
        args: None, numbers, text, bytes, tensors, arrays, and lists, tuples, sets and dicts of
            them; in all at most 100 MB.
        nodes: machines; the function is called once on each, or `devices` times, with torchrun's
            variables where it is several.
        devices: processes per node; "auto" is every free GPU.
        accelerator: "auto", "cpu", "gpu", "cuda", "rocm" or "mps".
        target: "auto", "mesh", node names, "zone:NAME", "!NAME".
        env, secrets: variables for the ranks; a list of names takes this process's values.
        stop_grace_s: what the ranks get to end after a stop.
        wait_s: how long to queue for busy machines at most; None: as long as it takes, 0: not at
            all. Then PlacementBusyError is raised. A restart waits for as long, by default a day.
        restarts: how often all calls start again after a lost machine or a failure, 0 to 20.
        on_disconnect: "keep" lets the job go on when this process is gone; a number of seconds
            stops it once it has been for so long. Whoever calls `result` or `attach` on this
            machine takes its place.
        root: the folder that is shipped and imported from; default: the one of the script that
            runs, or the working directory in a notebook or REPL.

    Raises:
        ConfigError: the function cannot be referred to, an argument cannot travel, or this is a
            job already.
        NoMeshError, DiscoveryError, PlacementError, NotAllowedError, BundleError, TransportError:
            nothing was started.
    """
    from gpulayer_mesh.core.jobspec import JobKind

    from gpulayer.launcher import JobRequest, accelerator_of

    folder = _root(root)
    reference = function if isinstance(function, str) else _reference(function, folder)
    _check(reference)
    data = values.pack([list(args), dict(kwargs or {})], "the call")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "arguments"
        file.write_bytes(data)
        request = JobRequest(
            argv=("-m", "gpulayer.called", reference),
            python=True,
            kind=JobKind.FUNCTION,
            name=reference,
            root=folder,
            program=("-m", reference.partition(":")[0]),
            nodes=nodes,
            devices=devices,  # type: ignore[arg-type]  # it is checked there
            accelerator=accelerator_of(accelerator),
            target=target if isinstance(target, str) else tuple(target),
            env=environment.variables(env),
            secrets=environment.variables(secrets, "secrets"),
            stop_grace_s=stop_grace_s,
            wait_s=wait_s,
            restarts=restarts,
            on_disconnect_s=None if on_disconnect == "keep" else on_disconnect,  # type: ignore[arg-type]  # as above
            extra_files={called.ARGUMENTS: file},
        )
        begun: list[JobRecord] = []
        try:
            record = _run(lambda: _start(request, begun.append))
            if record.spec.on_disconnect_s is not None:
                _presence.show(record)
            return Job(record, folder)
        except BaseException:
            if begun:  # interrupted as it began: the caller has nothing to stop it with
                _give_up(Job(begun[0], folder))
            raise


@_plainly
def attach(job: str) -> Job:
    """Return the job of this id, or of the one that begins with it; from any member machine.

    Raises:
        GpuLayerError: there is none, or several.
    """
    return Job(_run(lambda: _asking(lambda client: client.find_job(job))), Path.cwd())


class _Presence:
    """Lets jobs know, from a thread of its own, that the process that submitted them is there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, JobRecord] = {}  # by the id that they were submitted with
        self._thread: threading.Thread | None = None

    def show(self, record: JobRecord) -> None:
        """Follow a job until it has ended or this process does."""
        with self._lock:
            self._jobs[record.spec.id] = record
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._known():
            try:
                asyncio.run(self._follow())
            except GpuLayerError:  # nobody answers; the jobs count from when they last heard
                time.sleep(FOLLOW_S)

    def _known(self) -> dict[str, JobRecord]:
        with self._lock:
            if not self._jobs:
                self._thread = None
            return dict(self._jobs)

    async def _follow(self) -> None:
        from gpulayer_mesh.client import MeshClient
        from gpulayer_mesh.core.jobspec import OVER

        async with await MeshClient.connect(environment.home()) as client:

            async def one(job: str, record: JobRecord) -> None:
                with contextlib.suppress(GpuLayerError):
                    record = await client.current(record)
                with self._lock:
                    self._jobs[job] = record
                    if record.state in OVER:
                        del self._jobs[job]

            while self._jobs:
                await asyncio.gather(*(one(*known) for known in self._known().items()))
                await asyncio.sleep(FOLLOW_S)


_presence = _Presence()


def _root(given: str | Path | None) -> Path:
    """Return the folder that is shipped, and imported from."""
    from gpulayer.launcher import running_root

    if environment.rank_env() is not None:
        raise ConfigError(
            "submit() was called in a job",
            hint='where a module is imported as well as run, guard it: if __name__ == "__main__":',
        )
    folder = Path(given) if given is not None else running_root() or environment.START_DIR
    if not folder.is_dir():
        raise ConfigError(f"root {str(folder)!r} is no folder")
    return folder.resolve()


def _reference(function: Callable[..., Any], root: Path) -> str:
    """Return how another process finds a function."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not name.isprintable():
        raise ConfigError(
            f"a {type(function).__name__} cannot be submitted", hint='name it: "module:function"'
        )
    if "<" in name:
        raise ConfigError(
            f"{name!r} cannot be imported: it is defined in a function, or is a lambda",
            hint="define it at the top level of a module",
        )
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        path = None if file is None else Path(file).resolve()
        if path is None or path.parent != root or not path.stem.isidentifier():
            raise ConfigError(
                f"{name!r} is defined where it cannot be imported from: a notebook, REPL or script "
                "outside of the folder that is shipped",
                hint="put it into a module, e.g. work.py, and submit work.function",
            )
        module = path.stem
    return f"{module}:{name}"


def _check(reference: str) -> None:
    module, colon, name = reference.partition(":")
    parts = [*module.split("."), *name.split(".")]
    file = module.endswith(".py")
    if not colon or file or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"{reference!r} names no function",
            hint="name the module, not its file" if file else 'write "package.module:function"',
        )


async def _start(request: JobRequest, began: Callable[[JobRecord], None]) -> JobRecord:
    from gpulayer.launcher import start
    from gpulayer.ui import Ui

    ui = Ui()
    record = await start(request, ui, began=began)
    ui.began(record)
    return record


def _give_up(job: Job) -> None:
    from gpulayer.ui import Ui

    try:
        job.stop(kill=True)
    except GpuLayerError as error:
        Ui().note(f"job {job.id} may run: {error.message}; end it with: gpulayer stop {job.id}")


def _run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end, in a thread where a loop runs here already, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def main() -> T:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await work()

    with ThreadPoolExecutor(1) as pool:
        running: Future[T] | None = None
        try:
            running = pool.submit(lambda: asyncio.run(main()))
            return running.result()
        except KeyboardInterrupt:  # it came to this thread, and the pool waits for the other
            loop, task = begun.result()
            if task is not None and (running is None or not running.done()):
                loop.call_soon_threadsafe(task.cancel)
            raise


async def _asking(ask: Callable[[MeshClient], Awaitable[T]]) -> T:
    """Ask the mesh something, over a connection of its own."""
    from gpulayer_mesh.client import MeshClient

    async with await MeshClient.connect(environment.home()) as client:
        return await ask(client)
