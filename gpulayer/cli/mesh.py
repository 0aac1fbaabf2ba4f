"""The commands about membership: create, invite, join, status, remove, local.

They call `gpulayer.membership`, `gpulayer.localmesh` and the client, and print what came of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from argparse import Namespace

from gpulayer_mesh.client import MeshClient
from gpulayer_mesh.config import check_name, default_name
from gpulayer_mesh.core.types import Role, Snapshot
from gpulayer_mesh.errors import ConfigError, ExitCode, GpuLayerError

from gpulayer import env
from gpulayer.ui import Ui
from gpulayer.views import counted, duration, problem_lines, status_json, status_lines

_REFRESH_S = 1.0  # gossip moves load figures once a second
_LINE_MAX = 4096  # bytes read from stdin; an invitation has at most 1,024


def create(args: Namespace, ui: Ui) -> int:
    """Found a mesh with this machine as its first member."""
    from gpulayer_mesh.runtime import identity as identities

    name = check_name("--name", args.name or default_name())
    mesh = identities.create_mesh(identities.load_or_create(env.home()), name)
    ui.note(f"mesh {mesh.mesh[:8]} created; this machine is {name!r} and holds the mesh's key")
    ui.note("next: gpulayer mesh invite --uses N, one use per machine that is to join")
    ui.note("to have this machine take part in jobs as well, start gpulayer-agent here")
    return ExitCode.OK


def invite(args: Namespace, ui: Ui) -> int:
    """Offer one line until it is used up, expires or Ctrl-C closes it."""
    from gpulayer_mesh.runtime.joining import NotAdmitted, TriedWrongly, WasMember

    from gpulayer import membership

    roles = tuple(Role(role) for role in args.role or ("worker",))
    home = env.home()

    async def offer() -> int:
        async with membership.invitation(
            home, uses=args.uses, valid_s=args.ttl, roles=roles
        ) as invitation:
            machines = counted(args.uses, "machine")
            ui.note(f"for {machines}, valid {duration(args.ttl)}; run there:")
            ui.note("  gpulayer-agent --join LINE    with this line (it is a secret while valid):")
            ui.data([invitation.line])
            joined = 0
            async for news in invitation:
                if isinstance(news, TriedWrongly):
                    ui.note(
                        f"a wrong try from {news.host}; "
                        f"after {news.tries_left} more the line is void"
                    )
                    continue
                if isinstance(news, NotAdmitted):
                    ui.note(f"could not admit {news.request.name}: {news.error}")
                    continue
                if isinstance(news, WasMember):
                    ui.note(f"{news.request.name} was a member already; that took no use")
                    continue
                roles_of = "+".join(role.value for role in news.roles)
                joined += 1
                ui.note(f"{news.name} joined as {roles_of}; {args.uses - joined} more may")
                await membership.spread(home)
            if invitation.ended == "used-up":
                return ExitCode.OK
            ui.note(f"the invitation is closed: {invitation.ended}")
            return ExitCode.TIMED_OUT if invitation.ended == "expired" else ExitCode.FAILED

    try:
        return asyncio.run(offer())
    except KeyboardInterrupt:
        ui.note("the invitation is closed")
        raise


def join(args: Namespace, ui: Ui) -> int:
    """Join a mesh without starting an agent."""
    from gpulayer import membership

    line = args.line
    if line == "-":
        line = sys.stdin.read(_LINE_MAX)
        if not line.strip():
            raise ConfigError("no line on stdin")
    name = check_name("--name", args.name or default_name())
    us, mesh, new = asyncio.run(membership.join(env.home(), line, name))
    roles = "+".join(role.value for role in us.roles)
    if not new:
        ui.note(f"already a member of mesh {mesh[:8]} as {us.name!r}: {roles}; nothing changed")
        return ExitCode.OK
    ui.note(f"joined mesh {mesh[:8]} as {us.name!r}: {roles}")
    if Role.WORKER in us.roles:
        ui.note("start gpulayer-agent to take part in jobs")
    return ExitCode.OK


def status(args: Namespace, ui: Ui) -> int:
    """Print what one member believes about all; with --watch, again each second."""

    async def show() -> int:
        started = time.monotonic()
        client = await MeshClient.connect(env.home())
        while True:
            try:
                async with client:
                    while True:
                        snapshot = await client.snapshot()
                        _show(args, ui, snapshot, 1000 * (time.monotonic() - started))
                        if not args.watch:
                            return ExitCode.OK
                        await asyncio.sleep(_REFRESH_S)
                        started = time.monotonic()
            except GpuLayerError as e:
                if not args.watch:
                    raise
                ui.note(f"{e}; asking another member")
            client = await MeshClient.connect(env.home())

    try:
        return asyncio.run(show())
    except KeyboardInterrupt:
        if args.watch:  # how a watch ends
            return ExitCode.OK
        raise


def _show(args: Namespace, ui: Ui, snapshot: Snapshot, answered_ms: float) -> None:
    if args.json:
        ui.data([json.dumps(status_json(snapshot, answered_ms=answered_ms))])
        return
    if args.watch:
        ui.clear()
    ui.data(status_lines(snapshot))
    names = {m.node: m.name for m in snapshot.members}
    by = names.get(snapshot.answered_by, snapshot.answered_by[:8])
    ui.note(f"answered in {answered_ms:.0f} ms by {by}")
    for line in problem_lines(snapshot):
        ui.note(line)


def remove(args: Namespace, ui: Ui) -> int:
    """Remove a member and say who knows."""
    from gpulayer import membership

    member, spread = asyncio.run(membership.remove(env.home(), args.node))
    ui.note(f"{member.name} ({member.node[:8]}) is no member any more")
    if spread.reached:
        ui.note(f"told: {', '.join(spread.reached)}")
    if spread.missed:
        ui.note(f"not reached, told by the others or once back: {', '.join(spread.missed)}")
    return ExitCode.OK


def local(args: Namespace, ui: Ui) -> int:
    """Run a command on a throw-away mesh; exits with the command's code."""
    from gpulayer import localmesh

    return localmesh.run(args.nodes, args.command, keep=args.keep, ui=ui)
