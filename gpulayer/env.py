"""The environment of this process: the only module of `gpulayer` that reads it.

It knows the variables of torchrun and those that the agent adds for a rank; it decides nothing.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpulayer_mesh.errors import ConfigError

VALUE_MAX = 128 * 1024 - 256  # bytes; Linux takes no longer "NAME=value" (MAX_ARG_STRLEN)
TOTAL_MAX = 512 * 1024  # bytes of all; they travel with a job's description, of 1 MiB
START_DIR = Path.cwd()  # before the script can change it

# Forwarded without being asked for: tuning knobs of the libraries that ranks use, and Lightning's
# seed. Device lists are the node's business, addresses and interface names belong to the machine
# they were set on.
_FORWARDED = ("NCCL_*", "GLOO_*", "TORCH_*", "OMP_*", "PYTORCH_*", "PL_GLOBAL_SEED")
_NEVER = ("TORCH_HOME", "TORCHELASTIC_*", "*_SOCKET_IFNAME", "*_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class RankEnv:
    """What a process started as a rank finds in its environment."""

    job: str | None  # None: started by torchrun or another launcher
    call: int | None  # the Trainer call to execute; None: all of them
    rank: int
    local_rank: int
    world_size: int
    node_rank: int
    accelerator: str | None  # what the plan granted
    node: str | None  # name
    output_dir: Path | None  # $GPULAYER_OUT
    restart: int | None = None  # how often the job has started again; None: it never does
    restored: Path | None = None  # rank 0's $GPULAYER_OUT as it was before the restart
    nodes: int = 1  # machines of the job


def rank_env(environ: Mapping[str, str] | None = None) -> RankEnv | None:
    """Return this process's place in a job, None where it is no rank of anything."""
    env = os.environ if environ is None else environ
    job = env.get("GPULAYER_JOB")
    if job is None and not ("RANK" in env and "WORLD_SIZE" in env):
        return None
    out = env.get("GPULAYER_OUT")
    call = env.get("GPULAYER_CALL")
    restored = env.get("GPULAYER_RESTORED")
    world_size = _number(env, "WORLD_SIZE", 1)
    return RankEnv(
        job=job,
        call=int(call) if call else None,
        rank=_number(env, "RANK", 0),
        local_rank=_number(env, "LOCAL_RANK", 0),
        world_size=world_size,
        node_rank=_number(env, "GROUP_RANK", 0),
        accelerator=env.get("GPULAYER_ACCELERATOR"),
        node=env.get("GPULAYER_NODE"),
        output_dir=Path(out) if out else None,
        restart=_number(env, "GPULAYER_RESTART", 0) if "GPULAYER_RESTART" in env else None,
        nodes=_number(env, "GROUP_WORLD_SIZE", 1),
        restored=Path(restored) if restored else None,
    )


def forwarded_env() -> dict[str, str]:
    """Return the variables that travel with every job: the libraries' tuning knobs."""
    return {
        key: value
        for key, value in os.environ.items()
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in _FORWARDED)
        and not any(fnmatch.fnmatchcase(key, pattern) for pattern in _NEVER)
    }


def named_env(names: Iterable[str]) -> dict[str, str]:
    """Resolve `K` and `K=V` arguments.

    Raises:
        ConfigError: a variable is not set here, or the name is empty.
    """
    chosen = {}
    for name in names:
        key, equals, value = name.partition("=")
        if not key:
            raise ConfigError(f"environment argument {name!r}: write NAME or NAME=VALUE")
        if not equals:
            if key not in os.environ:
                raise ConfigError(
                    f"environment variable {key!r} is not set here", hint=f"give {key}=VALUE"
                )
            value = os.environ[key]
        chosen[key] = value
    return chosen


def variables(
    given: Mapping[str, str] | Iterable[str] | None, argument: str = "env"
) -> dict[str, str]:
    """Return variables given as a mapping or as names, as `env=` and `secrets=` take them.

    Args:
        argument: what the caller knows them as: "env" or "secrets", whose values are not shown.

    Raises:
        ConfigError: a variable is not set here, or a single text was given.
        TypeError: it is neither a mapping nor a list of names.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    shown = (
        f"{argument}={given!r}"
        if argument == "env"
        else f"{argument} is one {type(given).__name__}"
    )
    if isinstance(given, str):
        raise ConfigError(f"{shown}: give a list of names or a mapping")
    names = list(given) if isinstance(given, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{shown}: give a list of names or a mapping")
    return named_env(names)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def problems(argument: str, given: Mapping[str, str]) -> list[str]:
    """Return what is wrong with variables that a job is to get.

    Args:
        argument: what the caller knows them as: "env" or "secrets".
    """
    # Only who submits a job asks; a script that trains should not wait for the types of a job.
    from gpulayer_mesh.core.rankenv import is_ours

    found = []
    total = 0
    for name, value in given.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            found.append(f"{argument} has the name {name!r}: names are text without '=' and NUL")
        elif is_ours(name):
            found.append(f"{argument} names {name}, which the job sets itself")
        elif not isinstance(value, str):
            found.append(f"{argument}[{name!r}] must be text, got {type(value).__name__}")
        elif "\0" in value:
            found.append(f"{argument}[{name!r}] contains a NUL character")
        elif not _encodable(name + value):
            found.append(f"{argument}[{name!r}] is not valid Unicode text")
        elif len(value.encode()) > VALUE_MAX:
            found.append(f"{argument}[{name!r}] is longer than {VALUE_MAX} bytes")
        else:
            total += len(name.encode()) + len(value.encode())
    if total > TOTAL_MAX:
        found.append(f"{argument} is larger than {TOTAL_MAX} bytes; ship a file instead")
    return found


def copied_env() -> dict[str, str]:
    """Return a copy of the whole environment, for ranks on this very machine."""
    return dict(os.environ)


def export(name: str, value: str) -> None:
    """Set a variable for libraries that read it later, and for child processes."""
    os.environ[name] = value


def home() -> Path:
    """Return this user's state directory."""
    from gpulayer_mesh.config import home_dir

    return home_dir(os.environ)


def _number(env: Mapping[str, str], key: str, default: int) -> int:
    text = env.get(key)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {key}={text!r} is not a number") from None
