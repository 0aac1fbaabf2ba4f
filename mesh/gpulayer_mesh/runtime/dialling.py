"""Can new connections be made to a member, and if not, what becomes of them?

Over every address at once, each with the dialler's own deadline. A connection counts once the
certificate shown is the member's. Nothing is asked over it. It knows neither jobs nor gossip.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Mapping

from gpulayer_mesh.core.diagnosis import Dial, Outcome
from gpulayer_mesh.core.types import Address, Addresses, NodeId
from gpulayer_mesh.errors import TransportError

AT_ONCE = 64  # connections that one check opens at a time
_STRANGER = "what answers there is not of our mesh"  # `sockets.words`, of a certificate

WhoIs = Callable[[Address], Awaitable[NodeId]]  # `Dialer.who_is`


async def dial(who_is: WhoIs, node: NodeId, address: Address, gate: asyncio.Semaphore) -> Dial:
    """Try one address."""
    try:
        async with gate:
            found = await who_is(address)
    except TransportError as e:
        outcome = _outcome(e)
        words = e.message if outcome is Outcome.FAILED else ""
        return Dial(address.host, address.port, outcome, words)
    outcome = Outcome.MEMBER if found == node else Outcome.OTHER
    return Dial(address.host, address.port, outcome)


async def dials(
    who_is: WhoIs, node: NodeId, addresses: Addresses, gate: asyncio.Semaphore
) -> tuple[Dial, ...]:
    """Try all addresses of a member."""
    return tuple(await asyncio.gather(*(dial(who_is, node, a, gate) for a in addresses)))


async def failures(who_is: WhoIs, where: Mapping[NodeId, Addresses]) -> dict[NodeId, str]:
    """Return for each member "" if it was reached, else what its addresses did."""
    gate = asyncio.Semaphore(AT_ONCE)
    found = await asyncio.gather(*(dials(who_is, n, a, gate) for n, a in where.items()))
    return {node: _failure(tried) for node, tried in zip(where, found, strict=True)}


def _failure(tried: tuple[Dial, ...]) -> str:
    if any(one.outcome is Outcome.MEMBER for one in tried):
        return ""
    parts = [f"{one.host} port {one.port}: {one.words or one.outcome}" for one in tried]
    return "; ".join(parts)[:256] or "no address is known"


def _outcome(error: TransportError) -> Outcome:
    cause = error.__cause__
    if isinstance(cause, ConnectionRefusedError):
        return Outcome.REFUSED
    if isinstance(cause, OSError) and cause.errno == errno.EHOSTUNREACH:
        return Outcome.FORBIDDEN
    if isinstance(cause, OSError) and error.message == _STRANGER:
        return Outcome.OTHER
    return Outcome.SILENT if error.message == "no answer" else Outcome.FAILED
