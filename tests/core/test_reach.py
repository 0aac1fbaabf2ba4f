"""Which address of each node a job uses, and what is said when there is none for all."""

from __future__ import annotations

from gpulayer_mesh.core import reach
from gpulayer_mesh.core.reach import Failed, Peer, Reached, Trouble

PEERS = [
    Peer(name * 64, f"box-{name}", f"10.0.0.{i}", 32768, 60999) for i, name in enumerate("abc")
]
LAN, OVERLAY = "10.0.0.0", "100.64.0.1"


def silent(host: str = LAN, port: int = 40000) -> Failed:
    return Failed(host, port, Trouble.SILENT, "no answer in 2.0 s")


def paths(**changed: Reached) -> dict[tuple[int, int], Reached]:
    """All three reach each other, but for changes such as `_0_1`."""
    found = {(i, j): Reached(PEERS[j].node, (PEERS[j].host,)) for i, j in reach.pairs(3)}
    for key, one in changed.items():
        i, j = map(int, key.split("_")[1:])
        found[i, j] = one
    return found


def test_every_pair_is_tried_both_ways_and_the_first_node_by_itself() -> None:
    assert reach.pairs(3) == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)]


def test_address_must_be_reached_by_all() -> None:
    both = Reached(PEERS[0].node, (OVERLAY, LAN))
    assert reach.common_hosts(paths(_0_0=both, _1_0=both), 3) == [LAN, "10.0.0.1", "10.0.0.2"]
    only = Reached(PEERS[0].node, (OVERLAY,))
    assert reach.common_hosts(paths(_0_0=both, _1_0=only), 3)[0] == ""


def test_one_way_block_names_both_ends_direction_ports_and_range() -> None:
    failed = tuple(silent(port=port) for port in (33000, 44000))
    error = reach.refusal(PEERS, paths(_1_0=Reached(PEERS[0].node, failed=failed)))
    (one,) = error.unreached
    assert (one.source, one.target, one.host) == ("box-b", "box-a", LAN)
    assert error.pairs == ((PEERS[1].node, PEERS[0].node),)
    assert (one.ports, one.what, one.back) == ((33000, 44000), "no answer in 2.0 s", True)
    (refusal,) = error.refusals
    assert (refusal.node, refusal.for_ever) == ("box-b", False)
    assert refusal.reason == "cannot connect to box-a: 10.0.0.0 port 33000: no answer in 2.0 s"
    assert error.hint is not None
    assert error.hint.splitlines() == [
        "on box-a, let TCP ports 32768-60999 in from box-b (10.0.0.1)",
        "with ufw: sudo ufw allow proto tcp from 10.0.0.1 to any port 32768:60999",
    ]


def test_node_that_nobody_reaches_gets_one_hint_for_all() -> None:
    gone = Reached(PEERS[2].node, failed=(silent("10.0.0.2"),))
    error = reach.refusal(PEERS, paths(_0_2=gone, _1_2=gone))
    assert [(one.source, one.target) for one in error.unreached] == [
        ("box-a", "box-c"),
        ("box-b", "box-c"),
    ]
    assert error.hint is not None
    assert error.hint.count("let TCP ports") == 1
    assert "from box-a (10.0.0.0), box-b (10.0.0.1)" in error.hint


def test_cut_both_ways_says_so() -> None:
    error = reach.refusal(
        PEERS,
        paths(
            _0_1=Reached(PEERS[1].node, failed=(silent("10.0.0.1"),)),
            _1_0=Reached(PEERS[0].node, failed=(silent(),)),
        ),
    )
    assert [one.back for one in error.unreached] == [False, False]


def test_path_that_got_farthest_is_shown_and_its_remedy_is_the_mtu() -> None:
    stalled = Failed(LAN, 40001, Trouble.STALLED, "stops after 0 of 342 KiB")
    before = Reached(PEERS[0].node, (LAN,), failed=(silent(OVERLAY),))
    left = reach.without(before, LAN, Reached(PEERS[0].node, failed=(stalled,)))
    error = reach.refusal(PEERS, paths(_1_0=left))
    (one,) = error.unreached
    assert (one.host, one.ports, one.what) == (LAN, (40001,), stalled.text)
    assert error.hint is not None
    assert error.hint.startswith("full packets are lost from box-b to box-a: lower the MTU of both")


def test_another_address_is_used_where_one_carries_nothing() -> None:
    both = Reached(PEERS[0].node, (LAN, OVERLAY))
    tried = Reached(PEERS[0].node, failed=(silent(),))
    left = reach.without(both, LAN, tried)
    assert reach.common_hosts(paths(_0_0=both, _1_0=left, _2_0=both), 3)[0] == OVERLAY


def test_stranger_and_missing_addresses_ask_for_bind() -> None:
    stranger = Failed("172.17.0.1", 40000, Trouble.STRANGER, "another machine answers there")
    error = reach.refusal(
        PEERS,
        paths(
            _0_1=Reached(PEERS[1].node, failed=(stranger,)),
            _0_2=Reached(PEERS[2].node),
        ),
    )
    assert [one.what for one in error.unreached] == [stranger.text, "it has told no address"]
    assert error.hint is not None
    assert [line.partition(" at its")[0] for line in error.hint.splitlines()] == [
        "box-a does not find box-b",
        "box-a does not find box-c",
    ]


def test_addresses_without_a_common_one_are_refused() -> None:
    error = reach.refusal(PEERS, paths(_2_0=Reached(PEERS[0].node, (OVERLAY,))))
    assert error.unreached == ()
    assert error.pairs == ((PEERS[2].node, PEERS[0].node),)
    assert [(r.node, r.reason) for r in error.refusals] == [
        ("box-a", "has no address that all others can reach")
    ]
    assert error.hint is not None
    assert "the others reach box-a at different addresses" in error.hint
