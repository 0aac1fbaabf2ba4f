"""A member that was removed while its agent was off: real agents on loopback tell it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from gpulayer_mesh.client import MeshClient
from gpulayer_mesh.config import AgentConfig
from gpulayer_mesh.core.joining import JoinRequest
from gpulayer_mesh.core.types import Address, Role
from gpulayer_mesh.errors import ExitCode, RemovedError
from gpulayer_mesh.runtime import agent as running
from gpulayer_mesh.runtime import identity as identities
from gpulayer_mesh.runtime.agent import Agent

pytestmark = [pytest.mark.network, pytest.mark.timeout(120)]

HOST = "127.0.0.1"
WAIT_S = 30.0


def agent(home: Path) -> Agent:
    return Agent(AgentConfig(home=home, name=home.name, bind=(HOST,), port=24433))


@asynccontextmanager
async def running_agent(home: Path) -> AsyncIterator[Agent]:
    """An agent, from when its door is open."""
    stop, one = asyncio.Event(), agent(home)
    async with asyncio.TaskGroup() as group:
        group.create_task(one.run(stop))
        async with asyncio.timeout(WAIT_S):
            while not (home / "agent.json").exists():  # noqa: ASYNC110  a file, no event
                await asyncio.sleep(0.02)
        yield one
        stop.set()


async def test_member_is_out_at_once_though_the_disk_refuses_the_roster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = identities.load_or_create(tmp_path / "laptop")
    identities.create_mesh(laptop, "laptop")
    box = identities.load_or_create(tmp_path / "box")
    public = box.key.public_key().public_bytes_raw()
    identities.admit(laptop, JoinRequest(box.node, public, "box", ()), (Role.WORKER,), {})
    elsewhere = replace(laptop, home=tmp_path / "elsewhere")
    shutil.copytree(laptop.home, elsewhere.home)
    without = identities.remove_member(elsewhere, box.node).signed

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with running_agent(laptop.home) as founder, asyncio.timeout(WAIT_S):
        assert box.node in founder.book
        monkeypatch.setattr(running, "SAVE_AGAIN_S", 0.05)
        with monkeypatch.context() as patched:
            patched.setattr(identities, "save_roster", full)
            founder._offer_roster(without)
        assert box.node not in founder.book
        assert box.node not in founder.peers._known
        while True:
            mesh = identities.load_mesh(laptop)
            assert mesh is not None
            if box.node not in mesh.book:
                break
            await asyncio.sleep(0.02)


async def test_agent_and_commands_of_a_removed_machine_hear_of_it_and_end(tmp_path: Path) -> None:
    laptop = identities.load_or_create(tmp_path / "laptop")
    identities.create_mesh(laptop, "laptop")
    box = identities.load_or_create(tmp_path / "box")
    public = box.key.public_key().public_bytes_raw()
    request = JoinRequest(box.node, public, "box", ())
    identities.save_membership(box, identities.admit(laptop, request, (Role.WORKER,), {}))
    identities.remove_member(laptop, box.node)

    async with running_agent(laptop.home) as founder, asyncio.timeout(WAIT_S):
        identities.save_peers(box.home, {laptop.node: (Address(HOST, founder.port),)})
        # Each command and the agent hears it by itself, from a state that knows nothing of it.
        viewer = tmp_path / "viewer"
        shutil.copytree(box.home, viewer)
        for _ in ("heard from the member", "read from the roster kept"):
            with pytest.raises(RemovedError) as caught:
                await MeshClient.connect(viewer)
            assert caught.value.exit_code is ExitCode.NOT_ALLOWED
            assert "gpulayer mesh join LINE" in (caught.value.hint or "")
        with pytest.raises(RemovedError):
            await agent(box.home).run(asyncio.Event())
        assert founder.door.handled == 0
    for home in (viewer, box.home):
        mesh = identities.load_mesh(identities.load_or_create(home))
        assert mesh is not None
        assert box.node not in mesh.book
