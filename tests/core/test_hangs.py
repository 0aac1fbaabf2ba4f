"""Tables as the kernel printed them over a path that was cut, and what a watch makes of looks."""

from __future__ import annotations

import random

import pytest
from gpulayer_mesh.core.hangs import (
    FAILED_MIN,
    GAP_S,
    LOOK_S,
    PROBED_MAX,
    SILENT_S,
    STOPPED_S,
    SUSPECT_S,
    TRIES_MIN,
    Effect,
    Hung,
    Looked,
    Probe,
    Probed,
    Unanswered,
    Watch,
    plain_ip,
    process_state,
    unanswered,
)
from gpulayer_mesh.core.jobspec import Slot

BOX = Slot("b" * 64, "box-3", 1)
IP = plain_ip("10.77.1.11")
PEERS = {IP: BOX}
# Printed by Linux 6.18, little-endian, 10 s after the cut; 0B014D0A is 10.77.1.11. What follows
# the inode is left out.
TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:A028 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 18000 1
   1: 0A014D0A:A71A 0B014D0A:A029 02 00000001:00000000 01:0000006A 00000006     0        0 18757 2
   2: 0A014D0A:DC68 0B014D0A:A028 01 00000005:00000000 01:00000143 00000005     0        0 18525 2
   3: 0A014D0A:DC72 0B014D0A:A028 01 00000000:00000000 00:00000000 00000000     0        0 18526 1
   4: 0A014D0A:DC7C 0B014D0A:A028 04 00000004:00000000 01:0000012A 00000005     0        0 18527 2
   5: 0A014D0A:DC82 0B014D0A:A028 01 00008358:00000000 04:00000503 00000000     0        3 18528 2
   6: 0A014D0A:DC83 0B014D0A:A028 01 00008358:00000000 04:0000001C 00000000     0        0 18529 2
   7: 0A014D0A:DC84 0B014D0A:A028 01 00000005:00000000 01:00000013 00000000     0        0 18530 2
   8: 0A014D0A:DC85 0B014D0A:A028 06 00000000:00000000 03:00000A12 00000000     0        0 0 3
   9: 0A014D0A:DC86 0C014D0A:A028 01 00000005:00000000 01:00000143 00000005     0        0 18531 2
"""


def test_only_connections_to_peers_that_nobody_acknowledges_are_found() -> None:
    assert list(unanswered(TABLE, PEERS)) == [
        Unanswered(BOX, IP, 41001, 6, 18757),  # connects
        Unanswered(BOX, IP, 41000, 5, 18525),  # has sent
        Unanswered(BOX, IP, 41000, 5, 18527),  # ends
        Unanswered(BOX, IP, 41000, 3, 18528),  # asks when the other end has room again
    ]


@pytest.mark.parametrize(
    ("printed", "ip"),
    [
        ("0000000000000000FFFF00000B014D0A", "10.77.1.11"),  # IPv4 over a socket for both
        ("000080FE00000000FF00A20A0100FEFF", "fe80::aa2:ff:fffe:1"),
    ],
)
def test_ipv6_tables_are_read_as_well(printed: str, ip: str) -> None:
    table = TABLE.replace("0B014D0A", printed).replace("0A014D0A", printed)
    found = list(unanswered(table, {plain_ip(ip): BOX}))
    assert [one.ip for one in found] == [plain_ip(ip)] * 4


def test_addresses_compare_without_scope_and_mapping() -> None:
    assert plain_ip("fe80::1%eth0") == plain_ip("fe80::1")
    assert plain_ip("::ffff:10.77.1.11") == IP


@pytest.mark.parametrize("text", ["", TABLE.splitlines()[0], "sl\nshort\n1: b c:d 01 e 01:x\n"])
def test_table_of_nothing_has_nothing(text: str) -> None:
    assert list(unanswered(text, PEERS)) == []


def test_process_state_is_found_behind_any_name() -> None:
    assert process_state("71 (python) T 1 71 71 0 -1") == "T"
    assert process_state("71 (a) T (b) R) S 1 71 71 0 -1") == "S"
    assert process_state("") == ""


class Scene:
    """A watch, time, and looks at the usual pace."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.now = 1000.0
        self.due: list[Probe] = []  # probes that end before the next look of `cut`

    def take(self, event: Looked | Probed) -> list[Effect]:
        effects = self.watch.handle(self.now, event)
        self.watch.check()
        return effects

    def look(self, *waiting: Unanswered, **states: str) -> list[Effect]:
        self.now += LOOK_S
        ranks = {int(name.removeprefix("rank")): state for name, state in states.items()}
        return self.take(Looked(ranks, waiting))

    def looks(self, seconds: float, *waiting: Unanswered, **states: str) -> list[Effect]:
        """Look the same for so long; returns all effects."""
        effects: list[Effect] = []
        for _ in range(int(seconds / LOOK_S)):
            effects += self.look(*waiting, **states)
        return effects

    def cut(
        self, seconds: float, *waiting: Unanswered, answers: bool | None = False
    ) -> list[Effect]:
        """As `looks`, and each probe ends by the next one; returns what was no probe."""
        found: list[Effect] = []
        for _ in range(int(seconds / LOOK_S)):
            effects = [e for probe in self.due for e in self.take(Probed(probe.ip, answers))]
            effects += self.look(*waiting)
            self.due = [effect for effect in effects if isinstance(effect, Probe)]
            found += [effect for effect in effects if not isinstance(effect, Probe)]
        return found


def waits(tries: int = TRIES_MIN, *, ip: str = "10.77.1.11", inode: int = 1) -> Unanswered:
    return Unanswered(BOX, plain_ip(ip), 43211, tries, inode)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_rank_that_stays_stopped_is_named_once(scene: Scene) -> None:
    assert scene.looks(STOPPED_S, rank2="S", rank3="T") == []
    said = scene.looks(STOPPED_S, rank2="S", rank3="T")
    assert said == [Hung("rank 3 has been stopped by a signal (SIGSTOP) for 20 s")]


def test_several_stopped_ranks_are_named_together(scene: Scene) -> None:
    (hung,) = scene.looks(2 * STOPPED_S, rank1="T", rank0="T")
    assert hung == Hung("ranks 0, 1 have been stopped by a signal (SIGSTOP) for 20 s")


@pytest.mark.parametrize("state", ["t", "S", "R", "D", "Z", ""])
def test_rank_in_any_other_state_is_no_hang(scene: Scene, state: str) -> None:
    assert scene.looks(3600, rank0=state, rank1=state) == []


def test_rank_that_goes_on_in_between_is_no_hang(scene: Scene) -> None:
    for _ in range(100):
        assert scene.looks(STOPPED_S, rank0="T") == []
        assert scene.look(rank0="R") == []


def test_stopped_rank_counts_from_the_end_of_a_sleep(scene: Scene) -> None:
    scene.looks(STOPPED_S, rank0="T")
    scene.now += GAP_S
    assert scene.looks(STOPPED_S, rank0="T") == []
    assert scene.look(rank0="T") != []


def test_cut_path_is_found_in_time_and_named(scene: Scene) -> None:
    began = scene.now
    (hung,) = scene.cut(60, waits())
    assert isinstance(hung, Hung)
    assert hung.reason == (
        "the network to box-3 is cut: nothing that was sent to 10.77.1.11 port 43211 was "
        "acknowledged for 20 s, and new connections fail"
    )
    scene = Scene()
    assert scene.cut(SILENT_S + 2 * LOOK_S, waits()) != []
    assert scene.now - began <= 30 - 5  # the rest is for what follows


def test_probe_begins_early_and_one_at_a_time(scene: Scene) -> None:
    assert scene.looks(SUSPECT_S, waits()) == []
    assert scene.looks(SUSPECT_S, waits()) == [Probe(BOX, IP)]


def test_answered_probe_acquits(scene: Scene) -> None:
    assert scene.cut(3600, waits(9), answers=True) == []


def test_probe_that_could_not_be_made_proves_nothing(scene: Scene) -> None:
    assert scene.cut(3600, waits(9), answers=None) == []


def test_failing_probes_alone_are_no_hang(scene: Scene) -> None:
    for _ in range(100):
        assert scene.cut(SILENT_S - LOOK_S, waits()) == []
        assert scene.look() == []  # acknowledged


def test_probes_must_fail_in_a_row(scene: Scene) -> None:
    scene.looks(SILENT_S, waits())
    for number in range(1, 100):
        scene.take(Probed(IP, number % FAILED_MIN == 0))
        assert not any(isinstance(effect, Hung) for effect in scene.look(waits()))


def test_acknowledgement_between_two_looks_is_seen_by_fewer_tries(scene: Scene) -> None:
    for _ in range(50):
        for tries in range(1, 6):
            assert scene.cut(2 * LOOK_S, waits(tries)) == []


def test_connection_that_is_seldom_tried_again_waits_longer(scene: Scene) -> None:
    assert scene.cut(3 * SILENT_S, waits(TRIES_MIN - 1)) == []
    assert scene.cut(2 * LOOK_S, waits(TRIES_MIN)) != []


def test_another_connection_begins_anew(scene: Scene) -> None:
    for inode in range(50):
        assert scene.cut(SILENT_S, waits(inode=inode)) == []


def test_time_in_which_nobody_looked_does_not_count(scene: Scene) -> None:
    scene.cut(SILENT_S, waits())
    scene.now += 3600  # the machine slept
    assert scene.cut(SILENT_S, waits()) == []
    assert scene.cut(3 * LOOK_S, waits()) != []


def test_idle_connection_and_long_phase_of_one_rank_are_no_hang(scene: Scene) -> None:
    assert scene.cut(7200) == []


def test_few_machines_are_probed_at_a_time(scene: Scene) -> None:
    waiting = [waits(ip=f"10.77.2.{n}", inode=n) for n in range(1, 3 * PROBED_MAX)]
    effects = scene.looks(SILENT_S, *waiting)
    assert len(effects) == PROBED_MAX
    assert len({effect.ip for effect in effects if isinstance(effect, Probe)}) == PROBED_MAX


def test_lossy_path_is_not_taken_for_a_cut_one(rng: random.Random) -> None:
    """At 20 % loss both ways, resends and packets of new connections are lost alike."""

    def lost() -> bool:
        return rng.random() > 0.8**2

    for _ in range(4000):  # times that a first packet was lost
        scene = Scene()
        tries, next_at, pause = 1, scene.now + 0.2, 0.2
        while next_at > scene.now or lost():
            if next_at <= scene.now:
                tries, pause = tries + 1, 2 * pause
                next_at += pause
                continue
            answers = not all(lost() for _ in range(6))  # two connections, three packets in 4 s
            assert scene.cut(LOOK_S, waits(tries), answers=answers) == []
