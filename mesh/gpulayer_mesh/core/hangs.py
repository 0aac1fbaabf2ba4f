"""Ranks that wait for what cannot come though every process lives, seen from outside at one node.

Rules. A rank is stopped when each look for STOPPED_S found its main process in state T. One that a
debugger holds (t) is not: somebody is at work on it. A path is cut when one of the ranks' own TCP
connections has waited for an acknowledgement in each look for SILENT_S, and meanwhile FAILED_MIN
times in a row no new connection to that machine was answered either. Neither alone will do: losses
of 20 % leave a connection waiting for as long now and then, and a firewall that is switched on lets
open connections be. Whatever ranks wait for over a cut path was sent by one of them, or will be,
and waits at its node to be acknowledged; so an idle connection need not be asked. The kernel
acknowledges for a process that is busy, swapped out or stopped. A long phase of one rank shows
nothing of all this. Time in which this node did not look counts against nobody.

This module does not know how a process is found or a machine reached. Time is `now`, in seconds
that go on while the machine sleeps. Cost: a pass over the TCP connections of the machine.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpulayer_mesh.core.jobspec import Slot

LOOK_S = 2.0  # between looks; the kernel's first resends are 0.2, 0.6, 1.4, 3, 6.2 s after a cut
GAP_S = 10.0  # between two looks: the machine slept, or the agent had no time
STOPPED_S = 20.0
# Of a connection of which nothing is lost, an acknowledgement is seldom out for longer than 1 s.
SUSPECT_S = 6.0
SILENT_S = 20.0  # nine looks or more; with what follows a job with a cut path ends within 30 s
TRIES_MIN = 3  # resends by then, from the slowest path that could be trained over
FAILED_MIN = 3
PROBED_MAX = 8  # machines at a time: more is not needed to know that a job waits

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

# A line of the kernel's table: remote address and port, state, timer, resends, unanswered looks at
# a closed window or after a long pause, inode. States: established, connecting, and the ends of a
# connection that still sends; a half-open one (03) comes in, and its other end is connecting.
# Timers: of a resend (01), and of those looks.
_WAITING = re.compile(r" *\d+: \S+ (\w+):(\w+) 0[12489B] \S+ 0[124]:\S+ (\w+) +\d+ +(\d+) +(\d+)")
_QUIET = " 00:00000000 "  # no timer: most lines, so that thousands cost little


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A connection to another node of the job that waits to be acknowledged."""

    peer: Slot
    ip: Ip  # of the peer
    port: int  # there
    tries: int  # resends since the last acknowledgement
    inode: int  # tells it from others


def process_state(stat: str) -> str:
    """Return the state of a process from its /proc/PID/stat; "" where that says nothing."""
    return stat.rpartition(") ")[2][:1]  # the name may hold anything


def unanswered(table: str, peers: Mapping[Ip, Slot]) -> Iterator[Unanswered]:
    """Find connections to peers that wait to be acknowledged, in /proc/PID/net/tcp or tcp6."""
    for line in table.splitlines():
        found = None if _QUIET in line else _WAITING.match(line)
        if found is None:
            continue
        tries = int(found[3], 16) + int(found[4])
        if tries and (peer := peers.get(ip := _ip(found[1]))) is not None:
            yield Unanswered(peer, ip, int(found[2], 16), tries, int(found[5]))


def plain_ip(host: str) -> Ip:
    """Return the address of a literal, without its scope, and IPv4 as such.

    Raises:
        ValueError: it is none.
    """
    return _unmapped(ipaddress.ip_address(host.partition("%")[0]))


def _ip(text: str) -> Ip:
    """Read an address as the kernel prints it: words of 32 bits in the machine's own order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return _unmapped(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def _unmapped(ip: Ip) -> Ip:
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


@dataclass(frozen=True, slots=True)
class Looked:
    """What a look has found."""

    states: Mapping[int, str]  # of the main processes, by rank
    unanswered: tuple[Unanswered, ...] = ()


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe is over; None where it could not be made."""

    ip: Ip
    answered: bool | None


Event = Looked | Probed


@dataclass(frozen=True, slots=True)
class Probe:
    """Try whether new connections to an address are answered; ends as `Probed`."""

    peer: Slot
    ip: Ip


@dataclass(frozen=True, slots=True)
class Hung:
    """The job waits for ever."""

    reason: str


Effect = Probe | Hung


@dataclass(slots=True)
class _Silence:
    """A connection, since it was first seen to wait."""

    since: float
    last: Unanswered


class Watch:
    """One job's ranks on one node."""

    def __init__(self) -> None:
        self._hung = False
        self._looked: float | None = None
        self._stopped: dict[int, float] = {}  # rank -> since when
        self._silent: dict[int, _Silence] = {}  # by inode
        self._probing: set[Ip] = set()
        self._failed: dict[Ip, int] = {}  # probes in a row, where something waits

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Take one event; the only mutator. Nothing follows a `Hung`."""
        if self._hung:
            return []
        if isinstance(event, Probed):
            self._probing.discard(event.ip)
            if event.answered is not None and event.ip in self._failed:
                self._failed[event.ip] = 0 if event.answered else self._failed[event.ip] + 1
            return []  # the next look tells whether time has passed unseen
        self._look(now, event)
        found = self._verdict(now)
        if found is None:
            return self._probes(now)
        self._hung = True
        return [found]

    def check(self) -> None:
        """Raise if an invariant is broken."""
        assert len(self._probing) <= PROBED_MAX
        assert self._failed.keys() == {silence.last.ip for silence in self._silent.values()}

    def _look(self, now: float, look: Looked) -> None:
        if self._looked is not None and now - self._looked > GAP_S:
            self._stopped.clear()
            self._silent.clear()
            self._failed.clear()
        self._looked = now
        self._stopped = {
            rank: self._stopped.get(rank, now)
            for rank, state in look.states.items()
            if state == "T"
        }
        before, self._silent = self._silent, {}
        for one in look.unanswered:
            known = before.get(one.inode)
            if known is not None and one.tries < known.last.tries:  # acknowledged in between
                known = None
                self._failed[one.ip] = 0
            self._silent[one.inode] = _Silence(known.since if known else now, one)
        self._failed = {one.ip: self._failed.get(one.ip, 0) for one in look.unanswered}

    def _verdict(self, now: float) -> Hung | None:
        stopped = sorted(rank for rank, at in self._stopped.items() if now - at >= STOPPED_S)
        if stopped:
            are = "ranks {} have" if stopped[1:] else "rank {} has"
            ranks = are.format(", ".join(map(str, stopped[:8])))
            return Hung(f"{ranks} been stopped by a signal (SIGSTOP) for {STOPPED_S:g} s")
        for silence in self._longest_first():
            one, silent_s = silence.last, now - silence.since
            waited = silent_s >= SILENT_S and one.tries >= TRIES_MIN
            if waited and self._failed[one.ip] >= FAILED_MIN:
                return Hung(
                    f"the network to {one.peer.name} is cut: nothing that was sent to {one.ip} "
                    f"port {one.port} was acknowledged for {silent_s:.0f} s, and new connections "
                    "fail"
                )
        return None

    def _probes(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for silence in self._longest_first():
            one = silence.last
            due = now - silence.since >= SUSPECT_S and one.ip not in self._probing
            if due and len(self._probing) < PROBED_MAX:
                self._probing.add(one.ip)
                effects.append(Probe(one.peer, one.ip))
        return effects

    def _longest_first(self) -> list[_Silence]:
        return sorted(self._silent.values(), key=lambda silence: (silence.since, silence.last.port))
