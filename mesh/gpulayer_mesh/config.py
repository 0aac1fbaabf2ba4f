"""Settings of the agent: arguments and environment in, one frozen object out.

The only module of this package that reads the environment. Later starts of an agent need no
argument because `config.json` in the state directory keeps what the last start was given.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from gpulayer_mesh.errors import ConfigError
from gpulayer_mesh.files import replace_file

DEFAULT_PORT = 17433  # below every system's ephemeral range, so that no connection takes it first
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_CONFIG_MAX_BYTES = 64 * 1024  # a few names and peers
_LINE_MAX = 4096  # characters of an invitation; one with 8 addresses has 400


def environment() -> Mapping[str, str]:
    """Return the process environment; everything else gets it passed in."""
    return os.environ


def home_dir(environ: Mapping[str, str]) -> Path:
    """Return the state directory: `GPULAYER_HOME`, else the platform's user data directory."""
    chosen = environ.get("GPULAYER_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(platformdirs.user_data_dir("gpulayer", appauthor=False))


def default_name() -> str:
    """Return this machine's label: its host name up to the first dot, never resolved."""
    label = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname().split(".")[0]).strip("-._")
    return label[:63] or "node"


def check_name(option: str, name: str) -> str:
    """Return `name` if it can stand in tables, prefixes and targets without quoting.

    Raises:
        ConfigError: it cannot.
    """
    if not _NAME.match(name):
        raise ConfigError(f"{option} {name[:80]!r}: letters, digits, '.', '_', '-'; at most 63")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What one agent was started with."""

    home: Path
    name: str
    zone: str = ""  # "" = none; 5 infers zones from links
    peers: tuple[str, ...] = ()  # "host:port" to dial besides everything discovered
    bind: tuple[str, ...] = ()  # addresses to listen on; () = every interface
    port: int = DEFAULT_PORT  # first choice; the next free one is taken when it is in use
    python: str = sys.executable  # interpreter of the ranks
    join: str | None = None  # paste line

    def __post_init__(self) -> None:
        problems = []
        for option, value in (("--name", self.name), ("--zone", self.zone or "none")):
            try:
                check_name(option, value)
            except ConfigError as e:
                problems.append(e.message)
        if not 1024 <= self.port <= 65000:
            problems.append(f"--port {self.port}: use 1024 to 65000")
        for peer in self.peers:
            try:
                parse_peer(peer)
            except ConfigError as e:
                problems.append(e.message)
        if not Path(self.python).is_file():
            problems.append(f"--python {self.python!r}: no such file")
        if problems:
            raise ConfigError("; ".join(problems))


def parse_peer(text: str) -> tuple[str, int]:
    """Split `HOST[:PORT]` or `[IPV6]:PORT`.

    Raises:
        ConfigError: not of that form.
    """
    match = re.fullmatch(
        r"\[([0-9a-fA-F:.]+(?:%\w+)?)\](?::(\d{1,5}))?|([^:\[\]\s]+)(?::(\d{1,5}))?", text
    )
    if match is None:
        raise ConfigError(f"peer {text!r}: write HOST:PORT or [IPV6]:PORT")
    host, port = match[1] or match[3], int(match[2] or match[4] or DEFAULT_PORT)
    if not 1 <= port <= 65535:
        raise ConfigError(f"peer {text!r}: port out of range")
    return host, port


def agent_config(argv: Sequence[str], environ: Mapping[str, str]) -> AgentConfig:
    """Build the agent's configuration from arguments, then `config.json`, then defaults.

    Raises:
        ConfigError: a value is unusable; all problems are named at once.
    """
    parser = argparse.ArgumentParser(
        prog="gpulayer-agent",
        description="Run this machine's agent in the foreground.",
        epilog="Name, zone, peers, bind and port are remembered for later starts.",
    )
    parser.add_argument(
        "--join", metavar="LINE", help="join a mesh with the line of `mesh invite`; - reads stdin"
    )
    parser.add_argument("--name", help="this machine's name in the mesh (default: host name)")
    parser.add_argument("--zone", help="where it stands, e.g. a room or a switch")
    parser.add_argument("--peer", action="append", metavar="HOST:PORT", help="a member to dial")
    parser.add_argument("--bind", action="append", metavar="ADDRESS", help="listen only there")
    parser.add_argument("--port", type=int, help=f"TCP and UDP port (default: {DEFAULT_PORT})")
    parser.add_argument("--python", metavar="PATH", help="interpreter that runs the ranks")
    parser.add_argument("--state-dir", metavar="DIR", help="instead of GPULAYER_HOME")
    args = parser.parse_args(argv)
    home = Path(args.state_dir).absolute() if args.state_dir else home_dir(environ)
    kept = _load(home)

    def pick(key: str, given: object, default: object) -> object:
        return given if given is not None else kept.get(key, default)

    try:
        return AgentConfig(
            home=home,
            name=str(pick("name", args.name, default_name())),
            zone=str(pick("zone", args.zone, "")),
            peers=tuple(map(str, pick("peers", args.peer, ()))),  # type: ignore[call-overload]
            bind=tuple(map(str, pick("bind", args.bind, ()))),  # type: ignore[call-overload]
            port=int(pick("port", args.port, DEFAULT_PORT)),  # type: ignore[call-overload]
            python=str(pick("python", args.python, sys.executable)),
            join=sys.stdin.readline(_LINE_MAX).strip() if args.join == "-" else args.join,
        )
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{home / 'config.json'} is not usable: {e}") from e


def remember(config: AgentConfig) -> None:
    """Write what later starts should repeat.

    Raises:
        OSError: the disk refuses.
    """
    values: dict[str, object] = {"name": config.name}
    for key in ("zone", "peers", "bind"):
        if value := getattr(config, key):
            values[key] = value
    if config.port != DEFAULT_PORT:
        values["port"] = config.port
    if config.python != sys.executable:
        values["python"] = config.python
    if values != _load(config.home):
        data = f"{json.dumps(values, indent=1)}\n".encode()
        replace_file(config.home / "config.json", data, durable=True)


def _load(home: Path) -> dict[str, object]:
    path = home / "config.json"
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_CONFIG_MAX_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} is not usable: {e}", hint=f"delete {path}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not usable: not an object", hint=f"delete {path}")
    return value
