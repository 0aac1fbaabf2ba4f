"""Watches a part of a job for hangs: which ranks to look at, and how a silent path is tried.

What counts as a hang `core.hangs` decides. This module does not know what is done about one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.hangs import Ip, plain_ip
from gpulayer_mesh.core.jobspec import HostPhase, RankState, Slot
from gpulayer_mesh.core.types import Addresses, NodeId, Port
from gpulayer_mesh.errors import GpuLayerError, TransportError
from gpulayer_mesh.runtime import hangs, preflight
from gpulayer_mesh.runtime.gpus import job_of_process
from gpulayer_mesh.runtime.livejob import LiveJob
from gpulayer_mesh.runtime.peers import PeerCall

PROBE_S = 4.0  # for a node's agent to listen, and again for a connection to be answered


@dataclass(frozen=True, slots=True)
class OpenedPath:
    """An ephemeral port on which a node listens for a few seconds, so that another can dial it."""

    port: Port


class PartWatch:
    """One part of a job whose ranks run here, beside parts on other nodes.

    Args:
        addresses: of any member.
    """

    def __init__(
        self, one: LiveJob, call: PeerCall, addresses: Callable[[NodeId], Addresses]
    ) -> None:
        self._one = one
        self._call = call
        self._addresses = addresses
        here = one.spec.slots[one.slot].node
        self._others = [slot for slot in one.spec.slots if slot.node != here]

    async def run(self) -> str:
        """Return what the ranks wait for in vain, once they do; "" at their end."""
        job = self._one.spec.id
        return await hangs.watch(
            self._pids, self._by_ip, lambda pid: job_of_process(pid) == job, self._answers
        )

    def _pids(self) -> dict[int, int] | None:
        """Return the main processes of the ranks that run; None once the end has begun."""
        if self._one.machine.phase is not HostPhase.RUNNING:
            return None
        running = (rank for rank in self._one.report().ranks if rank.state is RankState.RUNNING)
        return {rank.rank: rank.pid for rank in running if rank.pid}

    def _by_ip(self) -> dict[Ip, Slot]:
        return {
            plain_ip(address.host): slot
            for slot in self._others
            for address in self._addresses(slot.node)
        }

    async def _answers(self, peer: Slot, ip: Ip) -> bool | None:
        """Try whether new connections to another node of the job get through; None: who knows."""
        path = f"/v1/jobs/{self._one.spec.id}/path"
        try:
            answer = await self._call(peer.node, "POST", path, deadline_s=PROBE_S)
            opened = wire.decode_as(OpenedPath, wire.unpack(answer))
        except TransportError:
            return False  # not even its agent can be reached
        except GpuLayerError:
            return None
        hosts = [address.host for address in self._addresses(peer.node)]
        host = next((host for host in hosts if plain_ip(host) == ip), str(ip))
        return await preflight.answers(host, opened.port, PROBE_S)
