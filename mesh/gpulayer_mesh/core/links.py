"""The mesh's link table: what each node measured of its links, and what all reports say together.

`OwnLinks` holds the figures of this node and says when a report of them is news. Figures in a
report are steady: one replaces another only when it differs by more than noise, so what is
concluded from the table (`zones`, `placement`) does not flicker. `LinkTable` joins the reports of
both ends of a pair. A node reports what it measured itself and nothing else.

This module does not know how a figure is measured (`measuring`) or how reports travel. Time is
`now` in monotonic seconds; ages cross the network, times do not. Memory is at most 2.5 kB per
member for its report, and 16 round trips per member for our own figures.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from math import inf, log2
from typing import NamedTuple

from gpulayer_mesh.core.recordbook import RecordBook, Version
from gpulayer_mesh.core.types import (
    LINKS_MAX,
    Link,
    LinkReport,
    LinkSource,
    Measured,
    NodeId,
)

RTT_SAMPLES = 16  # other work only adds to a round trip, so the shortest is the link's
BEST_OF = 3  # other traffic only takes from a bandwidth, so the best of the last ones is the link's
CONFIRMS = 3 / 4  # a transfer this near to the known figure renews it; a slower one says nothing
NEWS_BANDWIDTH = 4 / 3  # ratio; probes of an idle link differ by a tenth
NEWS_RTT = 3 / 2  # ratio, beyond a millisecond: less is the event loops' and not the link's
RTT_NOISE_US = 1000
REPORT_S = 20.0  # between two reports; full-state exchanges are 30 s apart
REFRESH_S = 3600.0  # tells the ages anew: 1,000 nodes' reports of 2.5 kB an hour are 700 B/s
MAX_AGE_S = 24 * 3600.0  # of a bandwidth: two machines may train for a day without a pause


class _Rate(NamedTuple):
    bytes_s: int
    at: float
    source: LinkSource


class _Own:
    """What this node measured of one peer."""

    __slots__ = ("mtu", "rates", "rtts", "sample")

    def __init__(self) -> None:
        self.rtts: deque[float] = deque(maxlen=RTT_SAMPLES)
        self.sample = -1.0  # the newest
        self.rates: deque[_Rate] = deque(maxlen=BEST_OF)
        self.mtu: int | None = None

    @property
    def rtt_us(self) -> int | None:
        return round(min(self.rtts) * 1e6) if self.rtts else None

    def measured(self, now: float, peer: NodeId) -> Measured:
        while self.rates and now - self.rates[0].at > MAX_AGE_S:
            self.rates.popleft()
        if not self.rates:
            return Measured(bytes.fromhex(peer), self.rtt_us, None, self.mtu)
        best, newest = max(self.rates), self.rates[-1]
        age_s = round(now - newest.at)
        return Measured(
            bytes.fromhex(peer), self.rtt_us, best.bytes_s, self.mtu, age_s, newest.source
        )


class OwnLinks:
    """The figures of this node."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._own: dict[NodeId, _Own] = {}
        self._told: dict[NodeId, Measured] = {}
        self._told_at = -inf

    def seen(self, peer: NodeId, rtt_s: float, mtu: int | None = None) -> None:
        """Take the newest round trip, which may be shown again and again, and the path's MTU."""
        own = self._own.setdefault(peer, _Own())
        own.mtu = mtu
        if rtt_s != own.sample:
            own.sample = rtt_s
            own.rtts.append(rtt_s)

    def probed(self, now: float, peer: NodeId, bytes_s: int) -> None:
        """Take what a probe found."""
        own = self._own.setdefault(peer, _Own())
        own.rates.append(_Rate(bytes_s, now, LinkSource.PROBE))

    def transferred(self, now: float, peer: NodeId, bytes_s: int) -> bool:
        """Take what a transfer did; return whether it says something of the link.

        It may have waited for a disk or shared the link, so it only shows that the link is at
        least this fast.
        """
        own = self._own.setdefault(peer, _Own())
        if own.rates and bytes_s < max(own.rates).bytes_s * CONFIRMS:
            return False
        own.rates.append(_Rate(bytes_s, now, LinkSource.TRANSFER))
        return True

    def keep(self, members: Collection[NodeId]) -> None:
        """Forget who is not among them."""
        self._own = {node: own for node, own in self._own.items() if node in members}

    def worth_measuring(self, peers: Mapping[NodeId, bool]) -> list[NodeId]:
        """Choose whom to probe and report: all, or LINKS_MAX of them.

        Half are near, for jobs run within a zone; of equally near ones those already told stay. The
        other half hold the table together: both ends of a pair rank it alike, by a hash, so they
        choose each other, and 16 such links per node leave no group of members without one.

        Args:
            peers: living members, and whether each was told the same zone as we were.
        """
        if len(peers) <= LINKS_MAX:
            return list(peers)
        pair = {peer: _pair_hash(self._node, peer) for peer in peers}

        def near(peer: NodeId) -> tuple[bool, float, bool, bytes]:
            own = self._own.get(peer)
            rtt_us = own.rtt_us if own is not None else None
            far = inf if rtt_us is None else round(log2(max(rtt_us, RTT_NOISE_US)))
            return not peers[peer], far, peer not in self._told, pair[peer]

        found = sorted(peers, key=near)[: LINKS_MAX // 2]
        others = sorted(peers.keys() - found, key=pair.__getitem__)
        return found + others[: LINKS_MAX - len(found)]

    def news(self, now: float, peers: Collection[NodeId]) -> tuple[Measured, ...] | None:
        """Return what to report of these peers, None where that would be nothing new.

        What is returned counts as told.
        """
        if now - self._told_at < REPORT_S:
            return None
        fresh = {p: self._own[p].measured(now, p) for p in peers if p in self._own}
        steady = {p: _steady(one, self._told.get(p)) for p, one in fresh.items()}
        changed = any(steady[p] is fresh[p] for p in fresh) or steady.keys() != self._told.keys()
        if not changed and now - self._told_at < REFRESH_S:
            return None
        self._told, self._told_at = steady, now
        return tuple(steady.values())


def _steady(fresh: Measured, told: Measured | None) -> Measured:
    """Return what was told, of its new age, unless it has changed by more than noise."""
    if told is None or fresh.mtu != told.mtu:
        return fresh
    if _apart(fresh.bytes_s, told.bytes_s, NEWS_BANDWIDTH):
        return fresh
    if _apart(fresh.rtt_us, told.rtt_us, NEWS_RTT, RTT_NOISE_US):
        return fresh
    return told._replace(age_s=fresh.age_s, source=fresh.source)


def _apart(new: int | None, old: int | None, ratio: float, noise: int = 0) -> bool:
    if new is None or old is None:
        return new is not old
    return max(new, old) > min(new, old) * ratio + noise


def _pair_hash(one: NodeId, other: NodeId) -> bytes:
    return hashlib.sha256("".join(sorted((one, other))).encode()).digest()


class LinkTable:
    """What all reports say, pair by pair."""

    def __init__(self, reports: RecordBook[LinkReport]) -> None:
        self._reports = reports
        self._since: dict[NodeId, tuple[Version, float]] = {}  # when this node had a report

    def pairs(
        self, now: float, members: Sequence[NodeId], *, best: bool = False
    ) -> tuple[Link, ...]:
        """Return every measured pair of these members, both ends' figures joined.

        Args:
            best: with the bandwidth of the faster direction, not of the slower. Each is a
                measurement of its own, from which other work can only have taken.
        """
        place = {bytes.fromhex(node): i for i, node in enumerate(members)}
        found: dict[tuple[int, int], Link] = {}
        since: dict[NodeId, tuple[Version, float]] = {}
        for i, node in enumerate(members):
            report = self._reports.get(node)
            if report is None:
                continue
            version = self._reports.version(node)
            known = self._since.get(node)
            since[node] = known if known is not None and known[0] == version else (version, now)
            held_s = int(now - since[node][1])
            if held_s > MAX_AGE_S:  # its node has long been gone
                continue
            for peer, rtt_us, bytes_s, mtu, age_s, source in report.links:
                j = place.get(peer)
                if j is None or j == i:
                    continue
                key = (i, j) if i < j else (j, i)
                link = Link(*key, rtt_us, bytes_s, mtu, age_s + held_s, source)
                found[key] = _joined(found[key], link, best) if key in found else link
        self._since = since
        return tuple(found.values())


def _joined(one: Link, other: Link, best: bool) -> Link:
    rtts = [link.rtt_us for link in (one, other) if link.rtt_us is not None]
    mtus = [link.mtu for link in (one, other) if link.mtu is not None]
    if best:
        shown = max(one, other, key=lambda link: link.bytes_s or 0)
    else:
        shown = min(one, other, key=lambda link: link.bytes_s or inf)
    return shown._replace(rtt_us=min(rtts, default=None), mtu=min(mtus, default=None))
