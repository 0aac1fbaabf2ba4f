"""What counts as a job's file, which holder has it, and what a holder lets itself be asked."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from gpulayer_mesh.core import copies
from gpulayer_mesh.core.copies import (
    AGAIN_S,
    CHECK_S,
    GONE_SCANS,
    GROWING_MAX,
    GROWING_S,
    Ask,
    CopyOrder,
    CopyState,
    FileKey,
    Link,
    Send,
    Stamp,
    Watch,
)
from gpulayer_mesh.core.jobspec import JobKind, JobSpec, OutputFile, Slot
from gpulayer_mesh.core.manifest import output_problem
from gpulayer_mesh.core.types import Accelerator
from gpulayer_mesh.errors import RemoteProtocolError

A, B, C = "a" * 64, "b" * 64, "c" * 64
OUT: FileKey = ("out", 0, "last.ckpt")
LOG: FileKey = ("out", 0, "metrics.csv")
WORK: FileKey = ("work", 0, "train.py")
SPEC = JobSpec(
    id="0123456789",
    kind=JobKind.COMMAND,
    name="train.py",
    submitter=C,
    submitter_name="laptop",
    submitted_at=0.0,
    argv=(b"train.py",),
    python=True,
    cwd="",
    env={},
    accelerator=Accelerator.CPU,
    slots=(Slot(A, "box-a", 2), Slot(B, "box-b", 2)),
    manifest=bytes(32),
    bundle_bytes=0,
    voters=(A, B, C),
)


def sha(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def stamp(size: int = 1, mtime_ns: int = 1, inode: int = 1, *, executable: bool = False) -> Stamp:
    return Stamp(size, mtime_ns, inode, executable)


def listed(
    text: str = "x", path: str = "last.ckpt", area: str = "out", rank: int = 0
) -> OutputFile:
    return OutputFile(area, rank, path, len(text), sha(text))


# --- the files -----------------------------------------------------------------------------------


def test_file_counts_once_it_stays_the_same() -> None:
    watch = Watch({})
    assert watch.scan(0, {OUT: stamp(1)}) == []
    assert watch.scan(2, {OUT: stamp(2)}) == []
    assert watch.scan(4, {OUT: stamp(2)}) == [OUT]
    assert watch.listed(()) == ()
    watch.hashed(OUT, stamp(2), sha("xx"), pinned=False)
    assert watch.listed(()) == (listed("xx"),)
    assert watch.scan(6, {OUT: stamp(2)}) == []


def test_file_that_changed_while_it_was_hashed_is_hashed_again() -> None:
    watch = Watch({})
    for now in (0, 2):
        watch.scan(now, {OUT: stamp(1)})
    assert watch.scan(4, {OUT: stamp(1)}) == [OUT]  # nobody said what it is
    assert watch.scan(6, {OUT: stamp(2)}) == []
    assert watch.scan(8, {OUT: stamp(2)}) == [OUT]


def test_outputs_and_small_files_are_hashed_first() -> None:
    watch = Watch({})
    found = {WORK: stamp(1), OUT: stamp(10**9), LOG: stamp(5)}
    watch.scan(0, found)
    assert watch.scan(2, found) == [LOG, OUT, WORK]


def test_shipped_file_counts_only_when_changed() -> None:
    watch = Watch({"train.py": sha("x")})
    for now, text in ((0, "x"), (10, "y"), (20, "x")):
        found = {WORK: stamp(mtime_ns=now)}
        watch.scan(now, found)
        assert watch.scan(now + 2, found) == [WORK]
        watch.hashed(WORK, found[WORK], sha(text), pinned=False)
        assert bool(watch.listed(())) == (text == "y")


def known(text: str = "x") -> Watch:
    """One checkpoint that was listed."""
    watch = Watch({})
    for now in (0, 2):
        watch.scan(now, {OUT: stamp(len(text))})
    watch.hashed(OUT, stamp(len(text)), sha(text), pinned=False)
    return watch


def test_file_being_rewritten_stays_listed_only_where_the_holder_has_it() -> None:
    watch = known()
    watch.scan(4, {OUT: stamp(5)})
    assert watch.listed(()) == ()
    assert watch.listed({sha("x")}) == (listed("x"),)
    watch.scan(6, {OUT: stamp(5)})
    watch.hashed(OUT, stamp(5), sha("12345"), pinned=False)
    assert watch.listed({sha("x")}) == (listed("12345"),)


def test_file_that_becomes_a_program_is_listed_as_one() -> None:
    watch, program = known(), stamp(executable=True)
    for now in (4, 6):
        fresh = watch.scan(now, {OUT: program})
    assert fresh == [OUT]
    watch.hashed(OUT, program, sha("x"), pinned=False)
    assert watch.listed(()) == (replace(listed("x"), executable=True),)


def test_file_that_is_gone_stays_until_what_replaces_it_can_be_listed() -> None:
    watch = known()
    new: FileKey = ("out", 0, "new.ckpt")
    found = {new: stamp(3)}
    assert watch.scan(4, found) == []  # saved, then the old one removed
    assert watch.listed({sha("x")}) == (listed("x"),)
    assert watch.scan(6, found) == [new]
    watch.hashed(new, found[new], sha("new"), pinned=False)
    both = (listed("x"), listed("new", "new.ckpt"))
    assert watch.listed({sha("x")}) == both
    watch.scan(8, found)
    assert watch.listed({sha("x")}) == both[1:]


def test_file_that_is_gone_is_forgotten_and_may_come_back() -> None:
    watch = known()
    for look in range(GONE_SCANS):
        watch.scan(4 + look, {})
    assert watch.listed({sha("x")}) == ()
    watch.scan(20, {OUT: stamp(1)})
    assert watch.scan(22, {OUT: stamp(1)}) == [OUT]


def test_log_that_never_rests_is_taken_now_and_then() -> None:
    watch = Watch({})
    taken = []
    for look in range(int(2.5 * GROWING_S)):
        now = float(look)
        size = look + 1
        if watch.scan(now, {LOG: stamp(size, mtime_ns=look)}):
            taken.append(now)
            assert watch.may_grow(LOG)
            watch.hashed(LOG, stamp(size, mtime_ns=look), sha(str(size)), pinned=False)
        if taken:
            (file,) = watch.listed(())
            assert file.size == int(taken[-1]) + 1
    assert taken == [GROWING_S, 2 * GROWING_S]


@pytest.mark.parametrize(
    "change",
    [
        lambda look: stamp(GROWING_MAX + look, look),  # half of a large checkpoint
        lambda look: stamp(1000 - look, look),
    ],
    ids=["large", "shrinks"],
)
def test_no_other_file_is_taken_before_it_rests(change: object) -> None:
    assert callable(change)
    watch = Watch({})
    assert not any(watch.scan(look, {LOG: change(look)}) for look in range(100))


def test_taken_log_that_is_cut_off_counts_no_more() -> None:
    watch = Watch({})
    for look in range(int(GROWING_S) + 1):
        watch.scan(look, {LOG: stamp(look, look)})
    watch.hashed(LOG, stamp(30, 30), sha("log"), pinned=False)
    watch.scan(40, {LOG: stamp(31, 40)})
    assert len(watch.listed(())) == 1
    watch.scan(41, {LOG: stamp(2, 41)})
    assert watch.listed(()) == ()


def test_list_ends_where_a_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "LIST_BYTES_MAX", 2 * (copies.FILE_BYTES + 1))
    files = [listed(path=path) for path in "abc"]
    assert [file.path for file in copies.within_limits(files)] == ["a", "b"]
    monkeypatch.setattr(copies, "OUTPUTS_MAX", 1)
    assert [file.path for file in copies.within_limits(files)] == ["a"]


# --- the holder ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "order"), [(A, (B, C)), (B, (C, A)), (C, (A, B)), ("d" * 64, (A, B, C))]
)
def test_holders_are_the_voters_behind_a_node(node: str, order: tuple[str, ...]) -> None:
    assert copies.holders((A, B, C), node) == order


def test_alone_nobody_holds() -> None:
    assert copies.holders((A,), A) == ()
    assert Link(()).candidates == 0
    assert Link(()).action(0, 1, ()) is None


FILES = (listed(),)
OTHER = (listed("y"),)


def sent(
    link: Link, files: tuple[OutputFile, ...] = FILES, now: float = 0.0, held: int = 0
) -> Send:
    action = link.action(now, 100, files)
    assert isinstance(action, Send)
    link.answered(now, action, files, CopyState(held, action.version))
    return action


def test_nothing_is_sent_again_once_the_holder_has_it() -> None:
    link = Link((B, C))
    action = sent(link)
    assert (action.holder, link.complete, link.confirmed) == (B, False, frozenset())
    assert link.action(2, 100, FILES) == Ask(B)
    link.answered(2, Ask(B), FILES, CopyState(action.version, action.version))
    assert link.complete
    assert link.confirmed == {sha("x")}
    assert link.action(4, 100, FILES) is None
    assert link.action(2 + CHECK_S, 100, FILES) == Ask(B)
    assert link.action(4, 100, OTHER) == Send(B, action.version + 1)


def test_empty_list_is_sent_too() -> None:
    assert Link((B,)).action(0, 7, ()) == Send(B, 7)


def test_version_goes_on_from_what_a_holder_has_of_an_earlier_agent() -> None:
    link = Link((B, C))
    action = link.action(0, 100, FILES)  # the clock was set back
    assert action == Send(B, 100)
    link.answered(0, action, FILES, CopyState(500, 501))
    assert link.action(0, 100, FILES) == Send(B, 502)


def test_version_grows_over_a_change_of_holder() -> None:
    link = Link((B, C))
    action = sent(link)
    link.failed(1, Ask(B))
    assert link.confirmed == frozenset()
    assert link.action(1, 50, FILES) == Send(C, action.version + 1)


def test_failed_holder_is_tried_later_and_left_in_peace_until_then() -> None:
    link = Link((B, C))
    for holder in (B, C):
        action = link.action(0, 1, FILES)
        assert isinstance(action, Send)
        assert action.holder == holder
        link.failed(0, action)
    assert link.action(AGAIN_S - 1, 1, FILES) is None
    again = link.action(AGAIN_S, 1, FILES)
    assert isinstance(again, Send)
    assert again.holder == B


def test_list_that_was_given_up_is_sent_later_and_another_one_at_once() -> None:
    link = Link((B, C))
    first = sent(link)
    link.answered(1, Ask(B), FILES, CopyState(first.version, first.version))
    second = sent(link, OTHER, 2, held=first.version)
    link.answered(3, Ask(B), OTHER, CopyState(first.version, first.version))
    assert link.confirmed == {sha("x")}  # it still has the one before
    assert link.action(4, 1, OTHER) is None
    assert link.action(4, 1, FILES) == Send(B, second.version + 1)
    assert isinstance(link.action(3 + AGAIN_S, 1, OTHER), Send)


def test_checkpoint_on_its_way_stays_listed_while_the_next_one_is_written() -> None:
    watch, link = known(), Link((B, C))
    action = sent(link, watch.listed(link.kept))
    watch.scan(4, {OUT: stamp(5)})
    files = watch.listed(link.kept)
    assert files == (listed("x"),)
    assert link.action(4, 1, files) == Ask(B)
    link.answered(4, Ask(B), files, CopyState(0, 0))  # it came too late
    assert watch.listed(link.kept) == ()
    assert link.action(4, 1, ()) == Send(B, action.version + 1)


def test_first_list_that_was_given_up_is_not_sent_again_at_once() -> None:
    link = Link((B, C))
    sent(link)
    link.answered(2, Ask(B), FILES, CopyState())
    assert link.action(4, 1, FILES) is None
    assert isinstance(link.action(2 + AGAIN_S, 1, FILES), Send)


def test_holder_that_lost_everything_gets_it_at_once() -> None:
    link = Link((B, C))
    action = sent(link)
    link.answered(1, Ask(B), FILES, CopyState(action.version, action.version))
    link.answered(12, Ask(B), FILES, CopyState())
    assert link.confirmed == frozenset()
    assert link.action(12, 1, FILES) == Send(B, action.version + 1)


def test_content_of_a_list_that_arrived_behind_a_newer_one_is_known() -> None:
    link = Link((B, C))
    first = sent(link)
    second = sent(link, OTHER, 2)
    link.answered(4, Ask(B), OTHER, CopyState(first.version, second.version))
    assert link.confirmed == {sha("x")}
    assert link.kept == {sha("x"), sha("y")}
    assert not link.complete
    link.answered(6, Ask(B), OTHER, CopyState(second.version, second.version))
    assert link.kept == {sha("y")}


# --- what a holder is asked ----------------------------------------------------------------------

ORDER = CopyOrder(b"signed", 1, 1, (listed(rank=2), listed("y", "a/b", "work", 2)))


def test_order_of_the_slots_node_is_good() -> None:
    ORDER.check(SPEC, B, C)
    ORDER.check(SPEC, B, A)


@pytest.mark.parametrize(
    ("order", "peer", "node"),
    [
        (ORDER, A, C),  # another slot's files
        (ORDER, B, "d" * 64),  # no voter
        (ORDER, B, B),
        (replace(ORDER, slot=2), B, C),
        (replace(ORDER, files=(listed(rank=1),)), B, C),
        (replace(ORDER, files=(listed(rank=4),)), B, C),
        (replace(ORDER, files=(listed(area="work", rank=3),)), B, C),
        (replace(ORDER, files=(listed(rank=2), listed("y", rank=2))), B, C),
        (replace(ORDER, files=(listed(rank=2), replace(listed(rank=3), size=9))), B, C),
        *(
            (replace(ORDER, files=(listed(path=path, rank=2),)), B, C)
            for path in ("", "/etc", "a/../b", ".", "a//b", "a\0b", "a\nb", "x" * 256, "a/" * 600)
        ),
    ],
)
def test_bad_order_is_refused(order: CopyOrder, peer: str, node: str) -> None:
    with pytest.raises(RemoteProtocolError):
        order.check(SPEC, peer, node)


def test_names_a_bundle_may_not_have_are_kept() -> None:
    assert output_problem("loss:0.3/con.txt") is None
    assert output_problem("\udc80") is not None


def test_file_that_was_renamed_into_place_counts_at_once() -> None:
    watch = Watch({})
    for look in range(3):  # the inode of the one before comes again
        now = replace(stamp(5, mtime_ns=look), whole=True)
        assert watch.scan(2.0 * look, {OUT: now}) == [OUT]
        assert not watch.may_grow(OUT)
        watch.hashed(OUT, now, sha(str(look)), pinned=False)
    assert watch.scan(6.0, {OUT: stamp(5, mtime_ns=2)}) == []  # a pin changed it, no write did


def test_file_that_is_replaced_all_the_time_counts_and_stays_pinned() -> None:
    watch = Watch({})
    for look in range(3):
        asked = watch.scan(2.0 * look, {OUT: stamp(5, mtime_ns=look, inode=look)})
    assert asked == [OUT]  # two in a row were whole files that came under its name
    assert not watch.may_grow(OUT)
    watch.hashed(OUT, stamp(5, mtime_ns=2, inode=2), sha("third"), pinned=True)
    watch.scan(6.0, {OUT: stamp(5, mtime_ns=3, inode=3)})
    assert [file.sha256 for file in watch.listed(())] == [sha("third")]
    assert watch.pins() == {sha("third")}
    # Written in place, it is another content under the same pin.
    watch.hashed(OUT, stamp(5, mtime_ns=3, inode=3), sha("fourth"), pinned=True)
    watch.scan(8.0, {OUT: stamp(6, mtime_ns=4, inode=3)})
    assert watch.listed(()) == ()
