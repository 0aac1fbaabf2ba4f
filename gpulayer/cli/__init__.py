"""The `gpulayer` command: arguments in, one function called, an exit code out.

Every `--help` must come in 0.15 s, so this file imports argparse and little else; a command's own
module is imported when that command runs. It does not know what any command does.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys

from gpulayer_mesh import __version__

TYPE_CHECKING = False  # what `typing` calls by this name; importing it takes 7 ms
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_USAGE = 2  # `ExitCode.USAGE`, whose module takes 15 ms to import
_RANKS_MAX = 1024 * 1024  # of a job: nodes times processes of one
_RESTARTS_MAX = 20  # `jobspec.RESTARTS_MAX`, whose module takes 60 ms to import
_TAIL_MAX = 100_000  # `logrecord.TAIL_MAX`, likewise
_SINCE_MAX_S = 10 * 365 * 86400.0
_PIPE_CLOSED = 128 + 13  # what a shell reports for a command that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the entry point of the console script."""
    arguments, command = split_command(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown and not (args.takes_command and command is None):
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.takes_command != (command is not None):
        args.parser.error(
            "put `--` and the command to run at the end"
            if args.takes_command
            else "`--` only belongs in front of a command to run"
        )
    if args.takes_command and not command:
        args.parser.error("no command after `--`")
    args.command = tuple(command or ())
    return _run(args)


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Cut at the first `--`: what follows reaches the job byte for byte, more `--` included."""
    words = list(argv)
    if "--" not in words:
        return words, None
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def _run(args: argparse.Namespace) -> int:
    import asyncio

    from gpulayer_mesh.errors import ExitCode, GpuLayerError

    from gpulayer.ui import Ui

    ui = Ui()
    try:
        module = importlib.import_module(f"gpulayer.cli.{args.module}")
        return int(getattr(module, args.function)(args, ui))
    except GpuLayerError as e:
        ui.error(e, debug=args.debug)
        return int(e.exit_code)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return int(ExitCode.STOPPED_BY_USER)
    except BrokenPipeError:
        # The reader of our stdout is gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except OSError as e:  # a folder that cannot be written, a disk that is full
        ui.error(e, debug=args.debug)
        return int(ExitCode.FAILED)
    except Exception as e:
        ui.error(e, debug=args.debug)
        ui.note("this is a fault of gpulayer; `gpulayer --debug ...` shows where it happened")
        return int(ExitCode.FAILED)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(_USAGE, f"gpulayer: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gpulayer",
        description="Train PyTorch on every GPU you can reach.",
        epilog="State lives in GPULAYER_HOME. `gpulayer COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"gpulayer {__version__}")
    parser.add_argument("--debug", action="store_true", help="print tracebacks of errors")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    _add_mesh(_add(commands, "mesh", "membership: create, invite, join, status, remove, local"))
    _add_run(commands)
    _add_jobs(commands)
    _add_service(_add(commands, "service", "keep a process running: run, list, stop, connect"))
    text = "say what is wrong with this machine and its mesh, and how to put it right"
    _json(_add(commands, "doctor", text, "doctor", "doctor"))
    return parser


def _add(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    text: str,
    module: str = "",
    function: str = "",
    *,
    takes_command: bool = False,
) -> _Parser:
    usage = None
    if takes_command:
        usage = f"{commands._prog_prefix} {name} [options] -- COMMAND..."
    parser = commands.add_parser(name, help=text, description=text, usage=usage)
    parser.set_defaults(
        module=module, function=function, takes_command=takes_command, parser=parser
    )
    return parser


def _add_mesh(mesh: _Parser) -> None:
    commands = mesh.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    create = _add(commands, "create", "make a new mesh; this machine may invite and launch")
    create.set_defaults(module="mesh", function="create")
    create.add_argument("--name", help="this machine's name in the mesh (default: host name)")

    invite = _add(commands, "invite", "print one line and wait for machines to join with it")
    invite.set_defaults(module="mesh", function="invite")
    invite.add_argument(
        "--uses", type=_count, default=1, metavar="N", help="how many machines may join (1)"
    )
    invite.add_argument(
        "--ttl", type=_seconds, default=600.0, metavar="TIME", help="how long, e.g. 90s, 10m (10m)"
    )
    invite.add_argument(
        "--role",
        action="append",
        choices=("worker", "launcher", "admin"),
        help="what they may do; may be repeated (worker)",
    )

    join = _add(commands, "join", "join a mesh with the line that `mesh invite` printed")
    join.set_defaults(module="mesh", function="join")
    join.add_argument("line", metavar="LINE", help="the line, or - to read it from stdin")
    join.add_argument("--name", help="this machine's name in the mesh (default: host name)")

    status = _add(commands, "status", "list nodes: state, GPUs, zone, link, jobs")
    status.set_defaults(module="mesh", function="status")
    status.add_argument("--watch", action="store_true", help="refresh each second until Ctrl-C")
    _json(status)

    remove = _add(commands, "remove", "remove a member; needs the mesh key of this machine")
    remove.set_defaults(module="mesh", function="remove")
    remove.add_argument("node", metavar="NODE", help="name, or the first characters of its id")

    local = _add(
        commands,
        "local",
        "run a command on a throw-away mesh of N agents on this machine",
        takes_command=True,
    )
    local.set_defaults(module="mesh", function="local")
    local.add_argument("--nodes", type=_count, default=3, metavar="N", help="agents to start (3)")
    local.add_argument("--keep", action="store_true", help="keep the state folder and its logs")


def _add_run(commands: argparse._SubParsersAction[_Parser]) -> None:
    run = _add(
        commands, "run", "run a command on the mesh as a job", "job", "run", takes_command=True
    )
    run.add_argument("--nodes", type=_count, default=1, metavar="N", help="machines to use (1)")
    run.add_argument(
        "--devices",
        type=_devices,
        default=1,
        metavar="D",
        help="processes per machine, each with its own GPU where there are any; auto: one per "
        "free GPU (1)",
    )
    _asked(run, "what tables call the job (default: the command)")
    run.add_argument(
        "--restarts",
        type=_restarts,
        default=0,
        metavar="N",
        help="how often the whole job starts again after a failure, with its files (0)",
    )
    run.add_argument(
        "--on-disconnect",
        type=_keep_or_seconds,
        metavar="WHAT",
        help="once this command is gone without a word: keep, or the time after which the job "
        "stops, e.g. 10m (keep)",
    )
    leaving = run.add_mutually_exclusive_group()
    _on_exit(leaving, "stop")
    leaving.add_argument("--detach", action="store_true", help="start it and come back at once")
    run.add_argument("--dry-run", action="store_true", help="print the plan and stop there")


def _asked(run: _Parser, name: str) -> None:
    """Add what every command that starts something takes."""
    run.add_argument(
        "--accelerator", choices=("auto", "cpu", "cuda", "rocm", "mps"), default="auto"
    )
    run.add_argument(
        "--target",
        default="auto",
        metavar="T",
        help="auto, node names with commas between them, zone:NAME, !NAME",
    )
    run.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="K[=V]",
        help="pass a variable to the job; may be repeated",
    )
    run.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="K",
        help="pass a variable of this shell that no file, log or list may show",
    )
    run.add_argument("--name", help=name)
    run.add_argument(
        "--grace",
        type=_seconds,
        default=30.0,
        metavar="TIME",
        help="how long ranks may take to stop (30s)",
    )
    wait = run.add_mutually_exclusive_group()
    wait.add_argument(
        "--wait",
        type=_seconds,
        metavar="TIME",
        help="how long to queue at most while nodes are busy (as long as it takes)",
    )
    wait.add_argument(
        "--no-wait",
        action="store_const",
        const=0.0,
        dest="wait",
        help="fail with exit code 4 instead of queueing",
    )


def _add_service(service: _Parser) -> None:
    commands = service.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    run = _add(
        commands, "run", "start a service, and wait until it answers", "service", "run",
        takes_command=True,
    )  # fmt: skip
    run.add_argument(
        "--port",
        type=_port,
        default=0,
        metavar="P",
        help="where it listens on 127.0.0.1 (default: a free one, which it finds in $PORT)",
    )
    run.add_argument(
        "--health",
        default="",
        metavar="PATH",
        help="path that answers while it is well (default: a connection is enough)",
    )
    run.add_argument(
        "--restart",
        choices=("always", "on-failure", "never"),
        default="always",
        help="when it starts again after its end (always)",
    )
    _asked(run, "what it is called (default: the command)")

    listed = _add(commands, "list", "list the services that run", "service", "list_services")
    _json(listed)

    stop = _add(commands, "stop", "stop a service and wait until it has ended", "service", "stop")
    _service(stop)
    stop.add_argument("--kill", action="store_true", help="no time to finish")
    stop.add_argument("--grace", type=_seconds, metavar="TIME", help="instead of its own")

    connect = _add(
        commands,
        "connect",
        "lead a port of this machine to a service, until Ctrl-C",
        "service",
        "connect",
    )
    _service(connect)
    connect.add_argument(
        "--port", type=_port, metavar="P", help="of this machine (default: the service's own)"
    )


def _service(parser: _Parser) -> None:
    parser.add_argument("service", metavar="SERVICE", help="its name, or that of its job")


def _add_jobs(commands: argparse._SubParsersAction[_Parser]) -> None:
    _json(_add(commands, "jobs", "list the jobs that reachable nodes know", "job", "jobs"))

    logs = _add(commands, "logs", "print a job's output", "job", "logs")
    _job(logs)
    logs.add_argument("-f", "--follow", action="store_true", help="until the job ends")
    logs.add_argument("--ranks", type=_ranks, metavar="R", help="only these ranks, e.g. 0,4-7")
    logs.add_argument("--stderr", action="store_true", help="only what ranks wrote to stderr")
    logs.add_argument(
        "--since", type=_since, metavar="TIME", help="nothing older: 10m, or 14:02, or a date"
    )
    logs.add_argument(
        "--tail", type=_tail, metavar="N", help="of each rank only the last N lines before now"
    )
    form = logs.add_mutually_exclusive_group()
    form.add_argument(
        "--raw", action="store_true", help="bytes as ranks wrote them, nothing in front"
    )
    _json(form)

    attach = _add(
        commands,
        "attach",
        "follow a job to its end: output, files, exit code; Ctrl-C leaves it running",
        "job",
        "attach",
    )
    _job(attach)
    _on_exit(attach, "keep")

    stop = _add(commands, "stop", "stop a job and wait until it has ended", "job", "stop")
    _job(stop)
    stop.add_argument("--kill", action="store_true", help="no time to finish")
    stop.add_argument("--grace", type=_seconds, metavar="TIME", help="instead of the job's own")

    get = _add(commands, "get", "bring a job's output files here", "job", "get")
    _job(get)
    get.add_argument("path", nargs="?", metavar="PATH", help="one file or folder (default: all)")
    get.add_argument("--to", metavar="DIR", help="where to (default: gpulayer_jobs/JOB)")


def _json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="for programs; see docs/cli.md")


def _on_exit(parser: argparse._ActionsContainer, default: str) -> None:
    parser.add_argument(
        "--on-exit",
        choices=("stop", "keep"),
        default=default,
        help=f"what Ctrl-C does with the job: stop it, or leave it running ({default})",
    )


def _job(parser: _Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="its id, or the first characters of it")


# Values of options. argparse prints the ArgumentTypeError behind the option's name.


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 9999")
    return int(text)


def _restarts(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,2}", text) or int(text) > _RESTARTS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {_RESTARTS_MAX}")
    return int(text)


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def _devices(text: str) -> int | str:
    return text if text == "auto" else _count(text)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(s|m|h)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 90, 90s, 10m or 1h")
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"]
    if seconds > 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is more than a day")
    return seconds


def _since(text: str) -> float:
    """Return how many seconds ago a time was."""
    import datetime

    if match := re.fullmatch(r"(\d{1,6})(s|m|h|d)?", text):
        ago_s = float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2] or "s"]
    else:
        now = datetime.datetime.now().astimezone()
        try:
            if re.fullmatch(r"\d\d:\d\d(:\d\d)?", text):
                at = datetime.datetime.combine(now, datetime.time.fromisoformat(text)).astimezone()
                if at > now:  # the last time that a clock showed it
                    at = at - datetime.timedelta(days=1)
            else:
                at = datetime.datetime.fromisoformat(text).astimezone()
            ago_s = (now - at).total_seconds()
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a time like 90s, 10m, 2h, 3d, 14:02 or 2026-12-01T14:02"
            ) from None
        if ago_s < 0:
            raise argparse.ArgumentTypeError(f"{text!r} has not come yet")
    if ago_s > _SINCE_MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r} is more than ten years ago")
    return ago_s


def _tail(text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text) or int(text) > _TAIL_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines, 0 to {_TAIL_MAX}")
    return int(text)


def _keep_or_seconds(text: str) -> float | None:
    return None if text == "keep" else _seconds(text)


def _ranks(text: str) -> frozenset[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks like 0,4-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first > _RANKS_MAX:
            raise argparse.ArgumentTypeError(f"{text!r} are more ranks than a job can have")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
