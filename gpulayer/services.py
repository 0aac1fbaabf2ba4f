"""Services: processes that are kept running on a machine of the mesh, and ways to their ports.

A service is a job whose rank is a supervisor (`serving`). It is found by its name, and reached
through the door of its node's agent, so it need not listen on the network. Does not know how a job
is placed, nor how anything is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.jobspec import OVER, JobKind, JobRecord, JobState, ServiceState
from gpulayer_mesh.errors import ConfigError, GpuLayerError, NotFoundError
from gpulayer_mesh.groups import first_error

from gpulayer import serving

if TYPE_CHECKING:
    from gpulayer_mesh.client import MeshClient

    from gpulayer.launcher import JobRequest

CALL_S = 5.0
BEGIN_S = serving.BEGIN_S + 10.0  # for the first answer: the supervisor gives up before us
POLL_S = 0.3
CONNECTIONS_MAX = 24  # at once: each holds one connection to the node, of the 32 we may have


@dataclass(frozen=True, slots=True)
class Service:
    """One that runs."""

    record: JobRecord
    state: ServiceState | None  # None: its node does not answer

    @property
    def name(self) -> str:
        return self.record.spec.name

    @property
    def node(self) -> str:
        return self.record.spec.slots[0].name


def request(
    command: tuple[str, ...],
    python: bool,
    root: Path,
    *,
    name: str,
    port: int,
    health: str,
    restart: str,
    **fields: Any,
) -> JobRequest:
    """Return the job that keeps a command running; `fields` are those of `JobRequest`.

    Args:
        command: as of `gpulayer run`; with `python`, the arguments of the interpreter.
        port: where it listens, on loopback; 0: a free one that it finds in $PORT.
        health: a path; "": a connection is enough.
        restart: "always", "on-failure" or "never".
    """
    from gpulayer.launcher import JobRequest

    if health and not health.startswith("/"):
        raise ConfigError(f"health path {health!r} does not begin with '/'")
    options = ("--port", str(port), "--health", health, "--restart", restart)
    words = ("python", *command) if python else command
    return JobRequest(
        argv=("-m", "gpulayer.serving", *options, "--", *words),
        python=True,
        kind=JobKind.SERVICE,
        name=name,
        root=root,
        program=command if python else ("-c", ""),
        **fields,
    )


async def running(client: MeshClient) -> list[Service]:
    """Return the services that run, by name."""
    records = [
        record
        for record in await client.jobs()
        if record.spec.kind is JobKind.SERVICE
        and record.state in (JobState.STARTING, JobState.RUNNING)
    ]

    async def of(record: JobRecord) -> ServiceState | None:
        with contextlib.suppress(GpuLayerError):  # it ended, or its node is away
            return await state(client, record)
        return None

    states = await asyncio.gather(*map(of, records))
    found = map(Service, records, states)
    return sorted(found, key=lambda service: service.name)


async def find(client: MeshClient, name: str) -> Service:
    """Return the service of a name, or of a job id that begins so.

    Raises:
        GpuLayerError: there is none, or several.
    """
    services = await running(client)
    found = [one for one in services if one.name == name] or [
        one for one in services if name and one.record.spec.id.startswith(name.lower())
    ]
    if len(found) == 1:
        return found[0]
    known = ", ".join(one.name for one in services) or "none"
    if not found:
        raise GpuLayerError(f"no service {name!r} runs", hint=f"running: {known}")
    ids = ", ".join(one.record.spec.id for one in found)
    raise GpuLayerError(f"several services are called {name!r}", hint=f"give the id: {ids}")


async def state(client: MeshClient, record: JobRecord) -> ServiceState:
    """Ask a service's node how it is."""
    path = f"/v1/jobs/{record.spec.id}/service"
    node = record.spec.slots[0].node
    return wire.decode_as(ServiceState, await client.call(node, "GET", path, deadline_s=CALL_S))


async def wait_healthy(client: MeshClient, record: JobRecord) -> ServiceState:
    """Wait for the first answer of a service.

    Raises:
        GpuLayerError: it ended, or did not answer for a minute; it goes on in that case.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + BEGIN_S
    while True:
        try:
            found = await state(client, record)
        except NotFoundError:
            found = ServiceState("starting")
        if found.state == "healthy":
            return found
        record = await client.record(record)
        if record.state in OVER:
            why = record.failure.reason if record.failure else record.cause or "it ended"
            raise GpuLayerError(
                f"service {record.spec.name!r} did not come up: {why}",
                hint=f"gpulayer logs {record.spec.id}",
            )
        if loop.time() > end:
            raise GpuLayerError(
                f"service {record.spec.name!r} is {found.state} after {BEGIN_S:g} s, with "
                f"{found.restarts} restarts; it goes on",
                hint=f"gpulayer logs {record.spec.id}",
            )
        await asyncio.sleep(POLL_S)


class Tunnel:
    """A listener on this machine whose connections lead to a service; `close` it.

    Args:
        failed: told of each connection that did not get through.
    """

    def __init__(self, client: MeshClient, service: Service, failed: Callable[[str], None]) -> None:
        self._client = client
        self._node = service.record.spec.slots[0].node
        self._base = f"/v1/jobs/{service.record.spec.id}/tunnels"
        self._failed = failed
        self._gate = asyncio.Semaphore(CONNECTIONS_MAX)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, port: int) -> int:
        """Listen on a port of loopback, 0 for a free one; return it.

        Raises:
            ConfigError: the port is taken.
        """
        try:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        except OSError as error:
            raise ConfigError(
                f"port {port} of this machine cannot be used: {error.strerror or error}",
                hint="choose another with --port",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and cut the connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._gate:
                opened = await self._client.call(self._node, "POST", self._base, {})
                path = f"{self._base}/{opened['tunnel']}"
                async with asyncio.TaskGroup() as group:
                    up = group.create_task(self._up(reader, path))
                    await self._down(writer, path)
                    up.cancel()  # the service has ended the connection
        except* (GpuLayerError, OSError) as errors:
            self._failed(str(first_error(errors)))
        finally:
            writer.close()

    async def _down(self, writer: asyncio.StreamWriter, path: str) -> None:
        addresses = self._client.addresses(self._node)
        stream = self._client.dialer.stream(self._node, addresses, "GET", path)
        async with contextlib.aclosing(stream):
            async for data in stream:
                writer.write(data)
                await writer.drain()

    async def _up(self, reader: asyncio.StreamReader, path: str) -> None:
        at = 0
        while True:
            data = await reader.read(wire.TUNNEL_PIECE_MAX)
            query = f"?at={at}" + ("" if data else "&end=1")
            try:
                await self._client.call(self._node, "PUT", path + query, raw=data, deadline_s=60.0)
            except NotFoundError:
                return  # the service has ended the connection
            if not data:
                return
            at += len(data)
