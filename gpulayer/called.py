"""What runs in a rank of a function job: `python -m gpulayer.called MODULE:FUNCTION`.

It reads the arguments that were shipped, calls the function, and leaves the result among the files
that come home. What no other attempt would do better it marks, so that none follows. Does not know
where it was submitted.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpulayer_mesh.core.ownfiles import FUNCTION_HOPELESS, FUNCTION_RESULT
from gpulayer_mesh.errors import ConfigError
from gpulayer_mesh.files import replace_file

from gpulayer import env, values

ARGUMENTS = ".gpulayer-call/arguments"  # in the bundle


def main(argv: list[str]) -> None:
    """Call the function that the command line names.

    Raises:
        ConfigError: there is no such function, it ended the process as if all were well, or its
            result cannot travel.
    """
    place = env.rank_env()
    if len(argv) != 2 or place is None or place.output_dir is None:
        raise ConfigError("this is run by jobs of gpulayer.submit() only")
    args, kwargs = values.unpack((env.START_DIR / ARGUMENTS).read_bytes())
    try:
        with _hopeless(place.output_dir):
            function = resolve(argv[1])
        result = function(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):  # that code fails the rank, which is what was meant
            raise
        raise ConfigError(
            f"{argv[1]} ended in sys.exit() and returned nothing", hint="return in its place"
        ) from error
    with _hopeless(place.output_dir):
        if inspect.isawaitable(result):
            raise ConfigError(f"{argv[1]} is a coroutine function: call asyncio.run() in it")
        data = values.pack(result, f"the result of {argv[1]}")
    _leave(place.output_dir / FUNCTION_RESULT, data)


@contextlib.contextmanager
def _hopeless(output_dir: Path) -> Iterator[None]:
    """Mark an end that follows from the function itself, not from what it came upon."""
    try:
        yield
    except ConfigError:
        _leave(output_dir / FUNCTION_HOPELESS, b"")
        raise


def _leave(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, data)


def resolve(reference: str) -> Callable[..., Any]:
    """Return the function that "package.module:name" or "module:Class.method" refers to.

    Raises:
        ConfigError: the module has no such function.
        ImportError: importing the module failed.
    """
    module, _, name = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{reference!r}: {module} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{reference!r} is a {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(sys.argv)
