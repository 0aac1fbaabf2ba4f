"""Where a script runs: in this process, as ranks on this machine, or on machines of the mesh.

`launch()` asks for any script; `Trainer` asks the same questions for one call. Knows how to decide
and whom to ask (`gpulayer.launcher`); not how a job is run. Imports torch only when the answer
depends on this machine's accelerator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from gpulayer_mesh.errors import GpuLayerError

from gpulayer import env as environment
from gpulayer.env import rank_env
from gpulayer.pytorch import arguments, ending
from gpulayer.pytorch.arguments import ArgumentError

if TYPE_CHECKING:
    from gpulayer_mesh.core.types import Accelerator

    from gpulayer.launcher import JobOutcome

Target = str | Iterable[str]


class Where(StrEnum):
    HERE = "here"  # in this process
    LOCAL = "local"  # ranks on this machine, no mesh needed
    PEERS = "peers"  # machines of the mesh


@dataclass(frozen=True, slots=True)
class Choice:
    """Where, and with how many processes if on this machine."""

    where: Where
    processes: int = 1
    kind: str | None = None  # "cuda", "mps", "cpu" of this machine; None on peers


def is_launcher_process() -> bool:
    """Return whether this process is no rank: True on the laptop, False in the job."""
    return rank_env() is None


def launch(
    nodes: int = 1,
    devices: int | str = "auto",
    accelerator: str = "auto",
    target: Target = "auto",
    *,
    env: Mapping[str, str] | Iterable[str] | None = None,
    secrets: Mapping[str, str] | Iterable[str] | None = None,
    stop_grace_s: float = 30.0,
    wait_s: float | None = None,
    restarts: int = 0,
    on_disconnect: float | str = "keep",
    detach: bool = False,
    dry_run: bool = False,
    **unknown: Any,
) -> None:
    """Run this script as a job from here on; returns only inside the job.

    In the process that started the script this ships its folder, runs the same script with the
    same arguments on the chosen machines, follows it, brings its output files back and exits with
    the job's exit code. In a rank (also one started by torchrun) it returns at once. Code above it
    runs in both.

    Args:
        devices: processes per node; "auto" or -1 is every free GPU, or one process where there is
            none.
        accelerator: "auto", "cpu", "gpu", "cuda", "rocm" or "mps".
        target: "auto", "local", "mesh", node names, "zone:NAME", "!NAME".
        env, secrets: variables for the ranks; a list of names takes this process's values.
        wait_s: how long to queue for busy machines at most; None: as long as it takes, 0: not at
            all. Then it exits with code 4. A restart waits for as long, by default a day.
        restarts: how often the whole job may start again after a lost machine or a failed rank.
            What the ranks had written is there again; the script loads it.
        on_disconnect: "keep" lets the job go on when this process is gone without a word: killed,
            cut off, asleep. A number of seconds stops it once nobody on this machine has followed
            it for so long.
    """
    arguments.refuse("launch", unknown)
    place = rank_env()
    if place is not None:
        if nodes > 1 and place.job is not None and place.world_size == 1:
            print(
                f"gpulayer: launch(nodes={nodes}) has no effect here: this script already runs in "
                "a job of one process (start it with python, not with gpulayer run)",
                file=sys.stderr,
            )
        ending.pause_at_exit()
        return
    from gpulayer_mesh.core.jobspec import JobKind

    devices = arguments.devices(devices)
    nodes = arguments.at_least("nodes", nodes, 1)
    choice = choose(nodes, devices, accelerator, target)
    if choice.where is Where.HERE:
        # A script without a Trainer has no in-process form. With nothing asked for and no
        # accelerator here, a machine that has one is what the user wants.
        unspecific = choice.kind == "cpu" and accelerator == "auto" and target == "auto"
        choice = Choice(Where.PEERS if unspecific else Where.LOCAL, 1, choice.kind)
    single = nodes == 1 and (devices == 1 or choice == Choice(Where.LOCAL, 1, choice.kind))
    outcome = run(
        choice,
        kind=JobKind.COMMAND if single else JobKind.DISTRIBUTED,
        nodes=nodes,
        devices=devices,
        accelerator=accelerator,
        target=arguments.target(target),
        env=environment.variables(env),
        secrets=environment.variables(secrets, "secrets"),
        stop_grace_s=stop_grace_s,
        wait_s=wait_s,
        restarts=arguments.restarts(restarts),
        on_disconnect_s=arguments.on_disconnect(on_disconnect),
        detach=detach,
        dry_run=dry_run,
    )
    raise SystemExit(outcome.code)


def choose(nodes: int, devices: int | str, accelerator: str, target: Target) -> Choice:
    """Decide where `nodes` x `devices` processes run.

    Raises:
        ArgumentError: it can be seen from here that no machine could do it.
    """
    if accelerator == "mps" and (nodes > 1 or (isinstance(devices, int) and devices > 1)):
        raise _one_mps(nodes, devices)
    if nodes > 1 and target == "local":
        raise ArgumentError(f'target="local" is this machine alone, not {nodes} nodes')
    if nodes > 1 or target not in ("auto", "local"):
        return Choice(Where.PEERS)

    import torch

    from gpulayer.pytorch.runtime import local_kind

    kind = local_kind(accelerator)
    cards = torch.cuda.device_count() if kind == "cuda" else None
    count = (cards or 1) if isinstance(devices, str) else devices
    problem = None
    if kind is None:
        problem = f"this machine has no {accelerator}"
    elif kind == "mps" and count > 1:
        raise _one_mps(nodes, count)
    elif cards is not None and count > cards:
        problem = f"this machine has {cards} of the {count} devices asked for"
    if problem is not None:
        if target == "local":
            raise ArgumentError(problem, hint='target="auto" looks for another machine')
        return Choice(Where.PEERS)
    return Choice(Where.HERE if count == 1 else Where.LOCAL, count, kind)


def refuse_here(choice: Choice, restarts: int, on_disconnect_s: float | None) -> None:
    """Raise where nobody is there to start something again, or to miss this process."""
    asked = f"restarts={restarts}" if restarts else ""
    if on_disconnect_s is not None:
        asked = f"on_disconnect={on_disconnect_s:g}"
    if asked and choice.where is not Where.PEERS:
        raise ArgumentError(
            f"{asked} needs the mesh, and this runs on this machine alone",
            hint='target="mesh" runs it there; try that here: gpulayer mesh local -- python SCRIPT',
        )


def _one_mps(nodes: int, devices: int | str) -> ArgumentError:
    where = f" on {nodes} nodes" if nodes > 1 else ""
    return ArgumentError(
        f"mps trains in one process only, so devices={devices!r}{where} is not possible"
    )


def run(choice: Choice, **fields: Any) -> JobOutcome:
    """Run this script as a job; errors are printed and end the process with their exit code.

    Raises:
        ConfigError: there is no script (notebook, REPL), or a field is impossible.
    """
    from gpulayer import launcher

    refuse_here(choice, fields.get("restarts", 0), fields.get("on_disconnect_s"))
    if choice.where is Where.LOCAL:
        fields["accelerator"] = _this_machines(choice)
    else:
        fields["accelerator"] = launcher.accelerator_of(fields.get("accelerator", "auto"))
    request = launcher.script_request(**fields)
    _say_once(
        "every rank runs this script from its top to this call and ends there"
        if fields.get("call") is not None
        else "code above launch() runs here and on every rank; code below it, on the ranks only"
    )
    # The caller is a training script, not a program that could handle it: a traceback through our
    # code would bury the one line that matters, and Python would turn every exit code into 1.
    try:
        if choice.where is Where.LOCAL:
            return launcher.run_local(request, processes=choice.processes)
        return launcher.run_job(request)
    except KeyboardInterrupt:  # before the start: nothing is left anywhere
        raise SystemExit(130) from None
    except GpuLayerError as error:
        from gpulayer.ui import Ui

        Ui().error(error)
        raise SystemExit(int(error.exit_code)) from error


def _this_machines(choice: Choice) -> Accelerator:
    """Return what the ranks here get: nobody plans it, so it cannot stay open."""
    from gpulayer_mesh.core.types import Accelerator

    if choice.kind == "cuda":
        import torch

        return Accelerator.CUDA if torch.version.hip is None else Accelerator.ROCM
    assert choice.kind is not None  # `choose` looked before it said LOCAL
    return Accelerator(choice.kind)


_said: set[str] = set()


def _say_once(text: str) -> None:
    """Tell what surprises most about running one script in many places."""
    from gpulayer.ui import Ui

    if text not in _said:
        _said.add(text)
        Ui().note(text)


def unknown_accelerator(name: object) -> ArgumentError:
    return ArgumentError(
        f"unknown accelerator {name!r}", hint="one of auto, cpu, gpu, cuda, rocm, mps"
    )
