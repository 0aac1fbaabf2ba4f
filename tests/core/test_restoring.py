"""What the nodes of the next attempt get, and which orders may not be carried out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpulayer_mesh.core import restoring
from gpulayer_mesh.core.copies import HeldSlot
from gpulayer_mesh.core.jobspec import HostAddress, OutputFile
from gpulayer_mesh.core.ownfiles import FUNCTION_RESULT, checkpoint
from gpulayer_mesh.core.restoring import (
    RestoreFile,
    RestoreOrder,
    SlotSource,
    newest_copy,
    plan_restore,
    without,
)
from gpulayer_mesh.errors import RemoteProtocolError

JOB = "0123456789"
A, B = HostAddress("a" * 64, ()), HostAddress("b" * 64, ())
ZERO = (
    OutputFile("out", 0, "last.ckpt", 1, b"1" * 32, executable=True),
    OutputFile("out", 1, "other", 1, b"2" * 32),
    OutputFile("work", 0, "made.txt", 1, b"3" * 32),
)
ONE = (OutputFile("out", 2, "mine", 1, b"4" * 32),)


def test_slot_gets_its_own_files_in_place_and_rank_zeros_besides() -> None:
    slots = (SlotSource(A, ZERO), SlotSource(B, ONE, slot=1))
    (order,) = plan_restore(JOB, slots, 1)
    assert order.sources == (B, A)
    assert order.files == (
        RestoreFile("out", 2, "mine", 1, b"4" * 32, 0, 1),
        RestoreFile("restored", 0, "last.ckpt", 1, b"1" * 32, 1, None, executable=True),
    )
    assert [file.from_area for file in order.files] == ["out", "out"]
    order.check(range(2, 4))


def test_rank_zeros_node_gets_its_files_twice() -> None:
    (order,) = plan_restore(JOB, (SlotSource(A, ZERO), None), 0)
    assert order.sources == (A,)
    areas = [(file.area, file.path) for file in order.files]
    assert areas == [
        ("out", "last.ckpt"),
        ("out", "other"),
        ("work", "made.txt"),
        ("restored", "last.ckpt"),
    ]
    order.check(range(2))


def test_what_told_how_the_attempt_before_ended_is_left_behind() -> None:
    def out(path: str, rank: int = 0, area: str = "out") -> OutputFile:
        return OutputFile(area, rank, path, 1, b"7" * 32)

    outcomes = [FUNCTION_RESULT, ".gpulayer-result/0/result.json", ".gpulayer-result/0.stopped/w"]
    kept = (out(checkpoint(0)), out("value"), out(FUNCTION_RESULT, area="work"))
    zero = SlotSource(A, (*map(out, outcomes), out(FUNCTION_RESULT, rank=1), *kept))
    (order,) = plan_restore(JOB, (zero, None), 0)
    found = [(file.area, file.path) for file in order.files]
    in_place = [(file.area, file.path) for file in kept]
    assert found == [*in_place, ("restored", checkpoint(0)), ("restored", "value")]
    (order,) = plan_restore(JOB, (zero, SlotSource(B, (out(FUNCTION_RESULT, rank=2),))), 1)
    assert [(file.area, file.path) for file in order.files] == found[3:]


def test_lost_files_make_an_empty_order() -> None:
    assert plan_restore(JOB, (None, None), 1) == (RestoreOrder(JOB),)


def test_many_files_make_several_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "ORDER_FILES_MAX", 3)
    orders = plan_restore(JOB, (SlotSource(A, ZERO),), 0)
    assert [len(order.files) for order in orders] == [3, 1]


def test_newest_of_several_copies_counts() -> None:
    found = [(A, HeldSlot(0, 5, ZERO)), (B, HeldSlot(0, 9, ())), (A, HeldSlot(1, 99, ONE))]
    assert newest_copy(0, found) == SlotSource(B, (), 0)
    assert newest_copy(1, found) == SlotSource(A, ONE, 1)
    assert newest_copy(2, found) is None


GOOD = RestoreFile("out", 0, "a/b", 1, bytes(32), 0, None)


@pytest.mark.parametrize(
    "files",
    [
        (replace(GOOD, path="../x"),),
        (replace(GOOD, path="/x"),),
        (replace(GOOD, path="a/\0"),),
        (replace(GOOD, rank=2),),
        (replace(GOOD, source=1),),
        (GOOD, GOOD),
        (GOOD, replace(GOOD, path="a")),
        (replace(GOOD, area="work", path="a/b/c/d"), replace(GOOD, area="work", path="a/b")),
    ],
)
def test_bad_order_is_refused(files: tuple[RestoreFile, ...]) -> None:
    with pytest.raises(RemoteProtocolError):
        RestoreOrder(JOB, (A,), files).check(range(2))


def test_same_path_in_several_areas_is_good() -> None:
    files = (GOOD, replace(GOOD, rank=1, path="a"), replace(GOOD, area="work", path="a"))
    RestoreOrder(JOB, (A,), (*files, replace(GOOD, area="restored"))).check(range(2))


def test_older_copies_fill_what_newer_ones_lack_and_are_in_nobodys_way() -> None:
    def files(*paths: str) -> tuple[OutputFile, ...]:
        return tuple(OutputFile("out", 0, path, 1, b"5" * 32) for path in paths)

    newer = SlotSource(A, files("last.ckpt", "logs/a/x", "plain"), slot=0)
    older = SlotSource(B, files("last.ckpt", "train.log", "logs", "logs/a", "logs/b", "plain/y"))
    assert without(older, [newer]).files == files("train.log", "logs/b")
    elsewhere = SlotSource(B, (OutputFile("work", 0, "last.ckpt", 1, b"6" * 32),))
    assert without(elsewhere, [newer]) == elsewhere
    assert without(older, []) == older
