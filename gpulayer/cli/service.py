"""The commands about services: run, list, stop, connect.

They turn arguments into calls of `gpulayer.services` and print the answers.
"""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from pathlib import Path

from gpulayer_mesh.client import MeshClient
from gpulayer_mesh.core.jobspec import JobRecord
from gpulayer_mesh.errors import ConfigError, ExitCode, GpuLayerError

from gpulayer import env, services
from gpulayer import jobs as viewing
from gpulayer.cli.job import asked, described, program_name, stop_and_wait
from gpulayer.ui import Ui
from gpulayer.views import service_lines, services_json


def run(args: Namespace, ui: Ui) -> int:
    """Start a service, wait until it answers, and leave it running."""
    from gpulayer.launcher import start

    command, python, root = described(args.command, Path.cwd())
    request = services.request(
        command,
        python,
        root,
        name=args.name or program_name(command, python),
        port=args.port,
        health=args.health,
        restart=args.restart,
        **asked(args),
    )

    async def begin() -> int:
        async with await MeshClient.connect(env.home()) as client:
            taken = [one for one in await services.running(client) if one.name == request.name]
            if taken:
                raise ConfigError(
                    f"a service {request.name!r} runs on {taken[0].node} already",
                    hint=f"gpulayer service stop {request.name}, or give another --name",
                )
            started: list[JobRecord] = []

            def began(record: JobRecord) -> None:
                started.append(record)
                where = record.spec.slots[0].name
                ui.note(f"service {request.name} (job {record.spec.id}) starts on {where}")

            try:
                record = await start(request, ui, began=began)
                found = await services.wait_healthy(client, record)
            except asyncio.CancelledError:  # Ctrl-C
                for record in started:
                    ui.note(f"service {request.name} (job {record.spec.id}) runs on")
                    ui.note(f"  end it:    gpulayer service stop {record.spec.id}")
                raise
            ui.note(
                f"service {request.name} (job {record.spec.id}) answers on "
                f"{record.spec.slots[0].name}, port {found.port}"
            )
            ui.note(f"  reach it:  gpulayer service connect {request.name}")
            ui.note(f"  its lines: gpulayer logs -f {record.spec.id}")
            return ExitCode.OK

    return asyncio.run(begin())


def list_services(args: Namespace, ui: Ui) -> int:
    """List the services that run."""

    async def ask() -> list[services.Service]:
        async with await MeshClient.connect(env.home()) as client:
            return await services.running(client)

    found = asyncio.run(ask())
    if args.json:
        ui.data([json.dumps(services_json(found))])
    elif found:
        ui.data(service_lines(found))
    else:
        ui.note("no service runs")
    return ExitCode.OK


def stop(args: Namespace, ui: Ui) -> int:
    """Stop a service and wait until it has ended."""

    async def end() -> int:
        async with await MeshClient.connect(env.home()) as client:
            found = await services.find(client, args.service)
            await stop_and_wait(client, found.record, args, ui)
            ui.note(f"service {found.name} has ended")
            return ExitCode.OK

    return asyncio.run(end())


def connect(args: Namespace, ui: Ui) -> int:
    """Lead a port of this machine to a service, until Ctrl-C or its end."""

    async def lead() -> int:
        async with await MeshClient.connect(env.home()) as client:
            service = await services.find(client, args.service)
            # Asked again where it did not answer, so that who may not hears that before it listens.
            own = (service.state or await services.state(client, service.record)).port
            tunnel = services.Tunnel(client, service, lambda why: ui.note(f"a connection: {why}"))
            try:
                port = await tunnel.listen(own if args.port is None else args.port)
                ui.note(
                    f"127.0.0.1:{port} leads to service {service.name} on {service.node}; "
                    "Ctrl-C ends it"
                )
                record = await viewing.wait_end(client, service.record, ui)
                raise GpuLayerError(
                    f"service {service.name} has ended: {record.cause or record.state.value}"
                )
            finally:
                await tunnel.close()

    return asyncio.run(lead())
