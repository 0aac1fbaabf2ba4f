"""The routes to a running service: what state it is in, and tunnels to its port.

Members with the role launcher may use any service. The port is what the service's own supervisor
wrote down, on loopback of this machine. Does not know how a service is kept running.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.jobspec import JobKind, ServiceState
from gpulayer_mesh.core.ownfiles import SERVICE_STATE
from gpulayer_mesh.core.types import Role
from gpulayer_mesh.errors import NotFoundError, RemoteProtocolError, TransportError
from gpulayer_mesh.runtime.door import DoorRequest, Route, Stream
from gpulayer_mesh.runtime.hosting import JobHost
from gpulayer_mesh.runtime.livejob import LiveJob
from gpulayer_mesh.runtime.tunnels import Tunnels

_STATE_MAX = 4096  # bytes of that file


class ServiceDoor:
    """The service routes of one agent; `close` it."""

    def __init__(self, host: JobHost) -> None:
        self._host = host
        self._tunnels = Tunnels()

    def routes(self) -> list[Route]:
        one, launcher = "/v1/jobs/{id}", Role.LAUNCHER
        tunnel = one + "/tunnels/{tunnel}"
        return [
            Route("GET", one + "/service", self.state, launcher),
            Route("POST", one + "/tunnels", self.open, launcher),
            Route("GET", tunnel, self.read, launcher),
            Route("PUT", tunnel, self.write, launcher, wire.TUNNEL_PIECE_MAX),
        ]

    async def close(self) -> None:
        """Close all tunnels."""
        await self._tunnels.close()

    async def state(self, request: DoorRequest) -> ServiceState:
        """Say how the service is."""
        return await self._state(self._service(request))

    async def open(self, request: DoorRequest) -> dict[str, Any]:
        """Connect to the service's port."""
        one = self._service(request)
        state = await self._state(one)
        if not state.port:
            raise TransportError(f"service {one.spec.name!r} has no port yet: {state.state}")
        return {"tunnel": await self._tunnels.open(state.port, one.spec.id)}

    async def read(self, request: DoorRequest) -> Stream:
        """Stream what the service sends."""
        job = self._service(request).spec.id
        return Stream(self._tunnels.read(request.params["tunnel"], job))

    async def write(self, request: DoorRequest) -> None:
        """Send bytes to the service."""
        at = request.number("at", 2**62)
        end = request.query.get("end") == "1"
        job, name = self._service(request).spec.id, request.params["tunnel"]
        await self._tunnels.write(name, job, at, request.body, end=end)

    def _service(self, request: DoorRequest) -> LiveJob:
        one = self._host.jobs.get(request.params["id"])
        if one is None or one.spec.kind is not JobKind.SERVICE or one.ended:
            raise NotFoundError(f"no service {request.params['id'][:16]!r} runs here")
        return one

    async def _state(self, one: LiveJob) -> ServiceState:
        try:
            return await asyncio.to_thread(self._read_state, one)
        except NotFoundError:
            return ServiceState("starting")

    def _read_state(self, one: LiveJob) -> ServiceState:
        descriptor = self._host.site.store.open_output(one.path, "out", 0, SERVICE_STATE)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(_STATE_MAX)
        try:
            plain = json.loads(data)
        except ValueError:
            raise RemoteProtocolError("the service's state is no JSON") from None
        return wire.decode_as(ServiceState, plain)
