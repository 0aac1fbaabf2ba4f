"""A job's turn: what is said while it waits, how long, and what ends it. The order: tests/sim."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from gpulayer_mesh.core.jobspec import Slot
from gpulayer_mesh.core.placement import Plan, Request
from gpulayer_mesh.core.tickets import Standing, Ticket
from gpulayer_mesh.core.types import (
    Accelerator,
    Capabilities,
    Grant,
    MemberSnapshot,
    NodeState,
    Role,
    Snapshot,
    TorchAbilities,
)
from gpulayer_mesh.errors import (
    DiscoveryError,
    GpuLayerError,
    NotAllowedError,
    PlacementBusyError,
    PlacementError,
    Refusal,
    StoppedError,
    TransportError,
)
from job_cases import node
from virtual_loop import VirtualLoop

from gpulayer import waiting

WHO = waiting.Applicant("k7f2k7f2k7", node(9), "laptop", "train.py")
OLDER = Ticket(4, "1" * 10, node(8), "laptop-2", "x", "1 node")
HELD = Grant("2" * 10, 2, (), "laptop-3")


class Boxes:
    """Two boxes of two CPUs, as a client sees them; a test changes what they say."""

    def __init__(self) -> None:
        self.states: list[NodeState] = [NodeState.ALIVE, NodeState.ALIVE]
        self.torch = [True, True]
        self.grants: list[tuple[Grant, ...]] = [(HELD,), (HELD,)]
        self.ahead: list[tuple[Ticket, ...]] = [(), ()]
        self.errors: list[GpuLayerError | None] = [None, None]  # to whoever stands there
        self.stopped = ""
        self.mute: GpuLayerError | None = None  # to whoever asks who waits
        self.lost: list[GpuLayerError] = []  # of the next snapshots
        self.taken: list[tuple[int, Ticket]] = []
        self.dropped: list[int] = []
        self.found = 0
        self.reserved: list[tuple[Plan, int]] = []
        self.said: list[str] = []
        self.refuse: list[GpuLayerError] = []  # of the next tries to reserve

    async def snapshot(self) -> Snapshot:
        if self.lost:
            raise self.lost.pop(0)
        return Snapshot("a" * 64, "", 1, tuple(map(self.member, range(2))))

    def member(self, index: int) -> MemberSnapshot:
        torch = TorchAbilities("2.13.0", (Accelerator.CPU,), ("gloo",))
        caps = Capabilities(
            2, 1, 1, 1, "Linux", "3.11.7", "0", torch if self.torch[index] else None
        )
        return MemberSnapshot(
            node(index),
            f"box-{index}",
            (Role.WORKER,),
            self.states[index],
            heard_s=asyncio.get_running_loop().time(),
            caps=caps,
            grants=self.grants[index],
        )

    async def find_again(self) -> None:
        self.found += 1

    async def tickets(self, target: str) -> list[Ticket]:
        if self.mute is not None:
            raise self.mute
        return list(self.ahead[int(target, 16)])

    async def stand(self, target: str, ticket: Ticket) -> Standing:
        index = int(target, 16)
        self.taken.append((index, ticket))
        if (error := self.errors[index]) is not None:
            raise error
        return Standing(self.ahead[index], self.grants[index], self.stopped)

    async def drop_ticket(self, target: str, job: str) -> None:
        assert job == WHO.job
        self.dropped.append(int(target, 16))

    async def reserve(self, plan: Plan, attempt: int) -> tuple[Slot, ...]:
        self.reserved.append((plan, attempt))
        if self.refuse:
            raise self.refuse.pop(0)
        return plan.slots

    def wait(
        self,
        nodes: int = 2,
        *,
        wait_s: float | None = None,
        later: dict[float, Callable[[], Any]] | None = None,
    ) -> tuple[float, BaseException | None]:
        """Wait for a turn while things happen; return how long that took, and how it failed."""

        async def main() -> tuple[float, BaseException | None]:
            loop = asyncio.get_running_loop()
            for at, what in (later or {}).items():
                loop.call_at(at, what)
            self.task = asyncio.current_task()
            try:
                await waiting.in_turn(
                    self,
                    Request(nodes),
                    WHO,
                    wait_s=wait_s,
                    reserve=self.reserve,
                    say=self.said.append,
                )
            except (GpuLayerError, asyncio.CancelledError) as error:
                return loop.time(), error
            return loop.time(), None

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main())


@pytest.fixture
def boxes() -> Boxes:
    return Boxes()


def free(boxes: Boxes, *indices: int) -> Callable[[], None]:
    def change() -> None:
        for index in indices:
            boxes.grants[index] = ()

    return change


def test_free_nodes_are_taken_at_once_and_without_a_ticket(boxes: Boxes) -> None:
    free(boxes, 0, 1)()
    assert boxes.wait() == (0.0, None)
    assert (boxes.taken, boxes.dropped, boxes.said) == ([], [], [])


def test_line_of_the_queue_names_place_need_and_holders_and_comes_once(boxes: Boxes) -> None:
    boxes.ahead[1] = (OLDER,)

    def try_older() -> None:
        """Whoever is first has its reservation here, and may have to give it back."""
        boxes.grants[1] = (Grant(OLDER.job, 2, (), "laptop-2"),)

    took, error = boxes.wait(later={20.0: free(boxes, 1), 30.0: free(boxes, 0)} | {
        35.0: try_older, 40.0: free(boxes, 1), 50.5: lambda: boxes.ahead.__setitem__(1, ())
    })  # fmt: skip
    assert error is None
    assert 50.5 <= took <= 50.5 + 2 * waiting.POLL_S
    busy = f"busy with job {HELD.job} from laptop-3 (1 processes asked, 0 free)"
    kept = f"box-1 kept for job {OLDER.job} from laptop-2, which came first"
    assert boxes.said == [
        f"queued #2: needs 2 nodes; box-0, box-1 {busy}",
        f"queued #2: needs 2 nodes; box-0 {busy}; {kept}",
        f"queued #2: needs 2 nodes; {kept}",
    ]
    assert {ticket.number for _, ticket in boxes.taken} == {OLDER.number + 1}
    assert boxes.taken[-1][1].why == kept
    assert sorted(boxes.dropped) == [0, 1]
    assert [attempt for _, attempt in boxes.reserved] == [0]


def test_limit_of_waiting_is_kept_and_leaves_the_queue(boxes: Boxes) -> None:
    took, error = boxes.wait(wait_s=3.0)
    assert took == 3.0
    assert isinstance(error, PlacementBusyError)
    assert error.message.endswith("gave up after 3 s")
    assert {refusal.node for refusal in error.refusals} == {"box-0", "box-1"}
    assert sorted(boxes.dropped) == [0, 1]


def test_whoever_does_not_want_to_wait_takes_no_ticket(boxes: Boxes) -> None:
    took, error = boxes.wait(wait_s=0.0)
    assert took == 0.0
    assert isinstance(error, PlacementBusyError)
    assert error.message.endswith("it would have to wait")
    assert (boxes.taken, boxes.said) == ([], [])


def test_what_can_never_run_fails_at_once_and_also_while_it_waits(boxes: Boxes) -> None:
    for nodes, later in ((3, {}), (2, {20.0: lambda: boxes.states.__setitem__(0, NodeState.DEAD)})):
        took, error = boxes.wait(nodes, later=later)  # type: ignore[arg-type]
        assert type(error) is PlacementError
        assert took <= max(later, default=0.0) + waiting.POLL_S
    assert sorted(boxes.dropped) == [0, 1]


def test_interrupt_takes_the_tickets_back(boxes: Boxes) -> None:
    took, error = boxes.wait(later={5.0: lambda: boxes.task and boxes.task.cancel()})
    assert isinstance(error, asyncio.CancelledError)
    assert took == 5.0
    assert sorted(boxes.dropped) == [0, 1]


def test_stopped_job_says_by_whom(boxes: Boxes) -> None:
    took, error = boxes.wait(later={5.5: lambda: setattr(boxes, "stopped", "boss")})
    assert isinstance(error, StoppedError)
    assert error.message == "stopped by boss while it was queued"
    assert error.exit_code == 130
    assert took <= 5.5 + waiting.POLL_S


def test_failed_tries_are_counted_and_keep_the_place(boxes: Boxes) -> None:
    free(boxes, 0, 1)()
    boxes.refuse = [PlacementBusyError("box-0: faster"), TransportError("box-1 is silent")]
    took, error = boxes.wait()
    assert error is None
    assert [attempt for _, attempt in boxes.reserved] == [0, 1, 2]
    assert len({ticket.order for _, ticket in boxes.taken}) == 1
    assert boxes.said == ["queued #1: needs 2 nodes; box-1 is silent"]
    assert took == waiting.POLL_S


def test_node_that_this_machine_cannot_reach_is_an_error_where_nothing_is_waited_for(
    boxes: Boxes,
) -> None:
    free(boxes, 0, 1)()
    boxes.refuse = [TransportError("box-1 is silent")]
    _, error = boxes.wait()
    assert isinstance(error, TransportError)
    assert boxes.taken == []


def test_silent_node_is_left_out_until_it_answers(boxes: Boxes) -> None:
    free(boxes, 1)()
    boxes.errors[0] = TransportError("timed out")
    took, error = boxes.wait(later={9.5: lambda: boxes.errors.__setitem__(0, None)} | {
        20.0: free(boxes, 0)
    })  # fmt: skip
    assert error is None
    assert boxes.said[0] == "queued #1: needs 2 nodes; box-0 does not answer"
    assert took >= 20.0


def test_nobody_takes_a_number_before_a_node_has_said_who_waits(boxes: Boxes) -> None:
    boxes.ahead = [(OLDER,), (OLDER,)]
    boxes.mute = TransportError("timed out")
    _, error = boxes.wait(wait_s=60.0, later={9.5: lambda: setattr(boxes, "mute", None)})
    assert isinstance(error, PlacementBusyError)
    assert {ticket.number for _, ticket in boxes.taken} == {OLDER.number + 1}
    boxes.mute = TransportError("timed out")
    boxes.taken.clear()
    took, error = boxes.wait()
    assert isinstance(error, PlacementBusyError)
    assert took <= waiting.UNSURE_S + waiting.POLL_S
    assert boxes.taken == []


def test_own_reservation_of_a_lost_try_is_in_nobodys_way(boxes: Boxes) -> None:
    boxes.grants = [(Grant(WHO.job, 2),), ()]
    assert boxes.wait()[1] is None


@pytest.mark.parametrize("mute", [False, True])
def test_launcher_that_was_removed_stops_waiting(boxes: Boxes, mute: bool) -> None:
    boxes.mute = NotAllowedError("no") if mute else None
    boxes.errors = [NotAllowedError("no"), NotAllowedError("no")]
    took, error = boxes.wait()
    assert isinstance(error, NotAllowedError)
    assert took == 0.0


def test_member_that_was_asked_may_vanish(boxes: Boxes) -> None:
    def vanish() -> None:
        boxes.lost = [TransportError("gone"), DiscoveryError("nobody"), TransportError("gone")]

    _, error = boxes.wait(later={3.5: vanish, 20.0: free(boxes, 0, 1)})
    assert error is None
    assert boxes.found == 2


def test_whoever_may_never_run_keeps_nothing_from_others_and_gives_up(boxes: Boxes) -> None:
    boxes.torch[0] = False
    took, error = boxes.wait()
    assert isinstance(error, PlacementBusyError)
    assert waiting.UNSURE_S <= took <= waiting.UNSURE_S + waiting.POLL_S
    assert boxes.taken == []
    assert boxes.said[0].startswith("waiting: needs 2 nodes; box-0 has no torch, or is still")


def test_suspect_node_is_waited_for_and_its_silence_is_told_once(boxes: Boxes) -> None:
    free(boxes, 0, 1)()
    boxes.states[0] = NodeState.SUSPECT
    took, error = boxes.wait(later={20.5: lambda: boxes.states.__setitem__(0, NodeState.ALIVE)})
    assert error is None
    assert took <= 20.5 + waiting.POLL_S
    assert len(boxes.said) == 1


def test_reasons_group_nodes_and_have_an_end() -> None:
    refusals = [Refusal(f"box-{i}", "busy with job a", False) for i in range(2)]
    refusals += [Refusal("box-9", "has no cuda device", True)]
    assert waiting.reasons(PlacementBusyError("x", refusals=tuple(refusals))) == (
        "box-0, box-1 busy with job a"
    )
    many = tuple(Refusal(f"b{i}", f"busy with job {i}", False) for i in range(5))
    assert waiting.reasons(PlacementBusyError("x", refusals=many)).endswith("; and 2 more")
    assert waiting.reasons(PlacementBusyError("box-1: busy")) == "box-1: busy"
