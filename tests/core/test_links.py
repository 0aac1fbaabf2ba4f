"""The link table: what a node reports of its links and when, and what all reports say together."""

from __future__ import annotations

import random
from itertools import combinations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gpulayer_mesh.core import certificates, roster, wire
from gpulayer_mesh.core.links import MAX_AGE_S, REFRESH_S, REPORT_S, LinkTable, OwnLinks
from gpulayer_mesh.core.recordbook import RecordBook
from gpulayer_mesh.core.roster import Roster, RosterBook
from gpulayer_mesh.core.suspicion import push_pull_scale
from gpulayer_mesh.core.swim import SwimConfig
from gpulayer_mesh.core.types import (
    LINKS_MAX,
    Link,
    LinkReport,
    LinkSource,
    Measured,
    NodeId,
    Role,
)
from gpulayer_mesh.core.zones import Groups, inferred_zones
from job_cases import node

PROBE, TRANSFER = LinkSource.PROBE, LinkSource.TRANSFER
CA = Ed25519PrivateKey.generate()
MESH = certificates.id_of(CA)
KEYS = [Ed25519PrivateKey.generate() for _ in range(3)]
MEMBERS = [certificates.id_of(key) for key in KEYS]
A, B, C = MEMBERS


def raw(peer: NodeId) -> bytes:
    return bytes.fromhex(peer)


def reports() -> RecordBook[LinkReport]:
    entries = tuple(
        roster.entry(key.public_key().public_bytes_raw(), name, (Role.WORKER,))
        for key, name in zip(KEYS, "abc", strict=True)
    )
    members = RosterBook(CA.public_key(), roster.seal_roster(CA, Roster(MESH, 1, entries)))
    return RecordBook(members, "links", LinkReport)


def signed(author: NodeId, version: int, *links: Measured, boot: int = 1) -> bytes:
    report = LinkReport(author, boot, version, links)
    key = KEYS[MEMBERS.index(author)]
    return wire.seal(key, kind="links", mesh=MESH, sender=author, body=report)


def told(own: OwnLinks, now: float, *peers: NodeId) -> dict[NodeId, Measured]:
    found = own.news(now, peers)
    assert found is not None
    return {one.peer.hex(): one for one in found}


# --- our own figures -----------------------------------------------------------------------------


def test_shortest_round_trip_and_best_probe_of_the_last_ones_count() -> None:
    own = OwnLinks(A)
    for rtt_s in (0.004, 0.0009, 0.02):
        own.seen(B, rtt_s)
    for at, rate in enumerate((90, 110, 40)):
        own.probed(at, B, rate)
    own.seen(B, 0.02, 1500)
    assert told(own, 10, B) == {B: Measured(raw(B), 900, 110, 1500, 8, PROBE)}
    for at in range(3):  # a cable was changed: in the end only the new figures are left
        own.probed(100 + at, B, 50)
    for i in range(16):
        own.seen(B, 0.03 + i / 1000)
        own.seen(B, 0.03 + i / 1000)  # the view shows it until there is a newer one
    assert told(own, 110, B)[B][:3] == (raw(B), 30_000, 50)


def test_transfer_only_shows_that_a_link_is_at_least_this_fast() -> None:
    own = OwnLinks(A)
    assert own.transferred(0, B, 40)  # better than nothing
    assert told(own, 5, B)[B][2:] == (40, None, 5, TRANSFER)
    own.probed(10, B, 100)
    assert not own.transferred(20, B, 60)
    assert told(own, 30, B)[B][2:] == (100, None, 20, PROBE)
    assert own.transferred(40, B, 90)  # as fast as known: measured again
    assert own.transferred(50, B, 200)
    assert told(own, 60, B)[B][2:] == (200, None, 10, TRANSFER)


def test_noise_is_no_news_and_what_was_told_stays() -> None:
    own = OwnLinks(A)
    own.probed(0, B, 1000)
    own.seen(B, 0.010)
    assert told(own, 0, B)[B][1:3] == (10_000, 1000)
    for i, rate in enumerate((1300, 1320, 1290)):
        own.probed(1 + i, B, rate)
        own.seen(B, 0.0095)
    assert own.news(100, [B]) is None
    # Ages are told anew, with the figures that stand.
    assert told(own, REFRESH_S, B)[B] == Measured(raw(B), 10_000, 1000, None, 3597, PROBE)
    own.probed(REFRESH_S, B, 1400)
    assert own.news(REFRESH_S + REPORT_S - 1, [B]) is None  # not so soon
    assert told(own, REFRESH_S + REPORT_S, B)[B].bytes_s == 1400
    own.seen(B, 0.005)
    assert told(own, REFRESH_S + 2 * REPORT_S, B)[B].rtt_us == 5000
    own.seen(B, 0.005, 9000)
    assert told(own, REFRESH_S + 3 * REPORT_S, B)[B].mtu == 9000


def test_peer_that_comes_or_goes_is_news() -> None:
    own = OwnLinks(A)
    own.seen(B, 0.001)
    assert told(own, 0, B, C).keys() == {B}
    own.seen(C, 0.001)
    assert told(own, 100, B, C).keys() == {B, C}
    assert told(own, 200, C).keys() == {C}
    own.keep({B})
    assert told(own, 300, B, C).keys() == {B}
    assert own.news(400, [B, C]) is None


def test_bandwidth_of_yesterday_is_forgotten() -> None:
    own = OwnLinks(A)
    own.probed(0, B, 1000)
    assert told(own, 0, B)[B].bytes_s == 1000
    assert told(own, MAX_AGE_S + 1, B)[B].bytes_s is None


def test_few_peers_are_all_worth_measuring() -> None:
    peers = {node(i): False for i in range(LINKS_MAX)}
    assert OwnLinks(node(99)).worth_measuring(peers) == list(peers)


def test_of_many_peers_near_ones_and_a_fixed_share_of_the_others_are_worth_it() -> None:
    ids = [node(i) for i in range(200)]
    chosen: dict[int, set[int]] = {}
    groups = Groups(200)
    for me in range(200):
        own = OwnLinks(ids[me])
        for peer in range(200):
            own.seen(ids[peer], 0.001 if peer // 20 == me // 20 else 0.015)
        found = own.worth_measuring({ids[i]: False for i in range(200) if i != me})
        assert len(found) == len(set(found)) == LINKS_MAX
        chosen[me] = {int(peer, 16) for peer in found}
        assert sum(peer // 20 == me // 20 for peer in chosen[me]) >= LINKS_MAX // 2
        for peer in chosen[me]:
            groups.join(me, peer)
    assert groups.size(0) == 200
    mutual = sum(me in chosen[peer] for me in chosen for peer in chosen[me])
    assert mutual > 200 * LINKS_MAX * 0.7  # most pairs get the figures of both ends
    # The zone that the user gave counts before any round trip.
    own = OwnLinks(ids[0])
    own.seen(ids[1], 0.001)
    found = own.worth_measuring({ids[i]: i >= 190 for i in range(1, 200)})
    assert {ids[i] for i in range(190, 200)} <= set(found)


def test_choice_of_peers_does_not_change_with_noise(seed: int) -> None:
    rng = random.Random(seed)
    own = OwnLinks(node(0))
    peers = {node(i): False for i in range(1, 101)}
    for peer in peers:
        own.seen(peer, 0.001 + rng.random() / 10_000)
    first = own.worth_measuring(peers)
    own.news(0, first)
    for peer in peers:
        own.seen(peer, 0.0009 + rng.random() / 10_000)
    assert own.worth_measuring(peers) == first


# --- all reports ---------------------------------------------------------------------------------


def test_both_ends_make_one_link() -> None:
    book = reports()
    book.offer(signed(A, 1, Measured(raw(B), 900, 110, 1500, 40, PROBE)))
    book.offer(signed(B, 1, Measured(raw(A), 700, 90, 9000, 30, TRANSFER)))
    book.offer(signed(C, 1, Measured(raw(B), 800)))
    table = LinkTable(book)
    assert sorted(table.pairs(0, MEMBERS)) == [
        Link(0, 1, 700, 90, 1500, 30, TRANSFER),  # the shorter, the slower, the smaller
        Link(1, 2, 800),
    ]
    assert Link(0, 1, 700, 110, 1500, 40, PROBE) in table.pairs(0, MEMBERS, best=True)
    assert table.pairs(0, [C, B]) == (Link(0, 1, 800),)
    assert sorted(table.pairs(0, [B, A])) == [Link(0, 1, 700, 90, 1500, 30, TRANSFER)]
    # A bandwidth that only one end knows is the link's.
    book.offer(signed(C, 2, Measured(raw(B), 800), Measured(raw(A), None, 70, None, 3, PROBE)))
    book.offer(signed(A, 2, Measured(raw(C), 600)))
    assert Link(0, 2, 600, 70, None, 3, PROBE) in table.pairs(0, MEMBERS)


def test_figures_age_where_they_are_held_and_go_with_who_told_them() -> None:
    book = reports()
    book.offer(signed(A, 1, Measured(raw(B), 900, 110, 1500, 40, PROBE)))
    table = LinkTable(book)
    assert table.pairs(1000, MEMBERS)[0].age_s == 40
    assert table.pairs(1060, MEMBERS)[0].age_s == 100
    book.offer(signed(A, 2, Measured(raw(B), 900, 110, 1500, 5, PROBE)))
    assert table.pairs(1070, MEMBERS)[0].age_s == 5
    assert table.pairs(1070 + MAX_AGE_S + 1, MEMBERS) == ()


def test_report_counts_for_its_authors_own_links_only() -> None:
    book = reports()
    links = [Measured(raw(A), 1, 1), Measured(b"\7" * 32, 1, 1)]  # itself, and a stranger
    book.offer(signed(A, 1, *links))
    assert LinkTable(book).pairs(0, MEMBERS) == ()


# --- over time -----------------------------------------------------------------------------------


def test_zones_hold_still_while_figures_waver(seed: int) -> None:
    """A day of probes whose figures waver by a third: the reports, and so the zones, stand."""
    rng = random.Random(seed)
    places = "AAABB"
    own = [OwnLinks(node(i)) for i in range(5)]
    rows: dict[int, tuple[Measured, ...]] = {}
    seen = set()
    published = 0
    for now in range(0, 24 * 3600, 600):
        for i, j in combinations(range(5), 2):
            a, b = rng.sample((i, j), 2)
            rate = (100e6 if places[i] == places[j] else 25e6) / (1 + rng.random() / 3)
            own[a].probed(now, node(b), round(rate))
            own[a].seen(node(b), 0.001 + rng.random() / 1000)
        for i, one in enumerate(own):
            fresh = one.news(now, [node(j) for j in range(5) if j != i])
            if fresh is not None:
                published += 1
                rows[i] = fresh
        links = {}
        for i, found in rows.items():
            for one in found:
                j = int(one.peer.hex(), 16)
                key = (min(i, j), max(i, j))
                rate = min(one.bytes_s or 10**9, links[key].bytes_s if key in links else 10**9)
                links[key] = Link(*key, one.rtt_us, rate)
        if now >= 1200:  # both directions of every pair have been measured
            seen.add(inferred_zones("abcde", [""] * 5, list(links.values())))
    assert seen == {("~a", "~a", "~a", "~d", "~d")}
    assert published < 5 * 24 * 2  # one an hour each, and what the first hour brings


def test_full_reports_of_a_thousand_nodes_cost_each_below_two_kilobytes_a_second() -> None:
    peers = [Measured(b"\xff" * 32, 99_999, 10**10, 65_536, 86_400, TRANSFER)] * LINKS_MAX
    size = len(signed(A, 10**6, *peers, boot=10**6))
    assert size < 2500
    hours = 1000 * size / REFRESH_S
    exchange_s = SwimConfig().push_pull_interval_s * push_pull_scale(1000)
    # Each node asks once in that time and is asked once: what it holds goes out twice.
    have = 2 * len(wire.pack({f"{i:016x}": (10**6, 10**6) for i in range(1000)})) / exchange_s
    print(f"{size} B a report; {hours:.0f} B/s of reports, {have:.0f} B/s of versions")
    assert hours + have < 1100  # packets take up to 700
