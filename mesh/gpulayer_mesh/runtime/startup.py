"""What must be settled before an agent may serve: alone on its state, a port, a mesh.

It does not know what will be served.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpulayer_mesh.config import AgentConfig
from gpulayer_mesh.core.joining import read_line
from gpulayer_mesh.core.types import Addresses
from gpulayer_mesh.errors import ConfigError, NoMeshError, RemovedError, TransportError
from gpulayer_mesh.files import replace_file
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime import joining
from gpulayer_mesh.runtime.packets import PacketPort

log = logging.getLogger("gpulayer.agent")

PORT_TRIES = 64  # next free port after the wanted one


@contextlib.contextmanager
def only_agent(home: Path) -> Iterator[Callable[[int], None]]:
    """Hold the lock that makes a second agent on this state directory impossible.

    Gives a function that notes the port in agent.json, for the commands on this machine.

    Raises:
        ConfigError: another agent runs here.
    """
    with (home / "agent.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"an agent is already running with {str(home)!r}",
                hint="stop it first, or give this one another --state-dir",
            ) from None
        path = home / "agent.json"

        def note_port(port: int) -> None:
            try:
                replace_file(path, json.dumps({"pid": os.getpid(), "port": port}).encode())
            except OSError as e:
                log.warning("commands on this machine may not find this agent: %s", e)

        try:
            yield note_port
        finally:
            path.unlink(missing_ok=True)


async def enter_mesh(
    config: AgentConfig, identity: identities.Identity, addresses: Addresses
) -> identities.MeshFiles:
    """Return the mesh this machine belongs to; joins it where the configuration says so.

    Args:
        addresses: where this agent will be reached.

    Raises:
        NoMeshError, RemovedError, JoinError: there is none to serve.
    """
    mesh = identities.load_mesh(identity)
    if mesh is not None and identity.node in mesh.book:
        if config.join is not None and read_line(config.join).mesh != mesh.mesh:
            raise ConfigError(
                f"this machine already belongs to mesh {mesh.mesh[:8]}, "
                "the line invites to another",
                hint=f"to leave it, remove {str(identity.home / 'mesh')!r}",
            )
        return mesh  # a start line with --join stays right after the invitation is over
    if config.join is None and mesh is not None:
        raise RemovedError
    if config.join is None:
        raise NoMeshError(
            "this machine belongs to no mesh yet",
            hint="run `gpulayer mesh invite` on the machine that founded the mesh, then here: "
            "gpulayer-agent --join LINE",
        )
    admission = await joining.join(
        config.join, key=identity.key, name=config.name, addresses=addresses
    )
    mesh = identities.save_membership(identity, admission)
    log.info("joined mesh %s", mesh.mesh[:8])
    return mesh


async def claim_port(hosts: Sequence[str], wanted: int) -> PacketPort:
    """Take the first port from `wanted` on that is free for TCP and UDP on every host.

    Its UDP sockets are open from here on, so that agents which start at the same time on one
    machine do not choose the same number while they join.

    Raises:
        ConfigError: there is none near it.
    """
    problem: OSError | TransportError | None = None
    for port in range(wanted, wanted + PORT_TRIES):
        try:
            for host in hosts:
                _try_bind(host, port)
            return await PacketPort.open(hosts, port)
        except (OSError, TransportError) as e:
            problem = e
    raise ConfigError(
        f"no free port from {wanted} to {wanted + PORT_TRIES - 1}: {problem}",
        hint="give another one with --port",
    )


def _try_bind(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        if family == socket.AF_INET6:
            return  # no IPv6 on this machine
        raise
    with probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
