"""Tickets: one order on all nodes, nobody overtaken, nothing left of who went away."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from gpulayer_mesh.core import tickets
from gpulayer_mesh.core.jobspec import JOB_ID_ALPHABET, JOB_ID_CHARS
from gpulayer_mesh.core.tickets import (
    NUMBER_MAX,
    RESTART,
    TICKET_S,
    TICKETS_MAX,
    TICKETS_PER_MEMBER,
    Standing,
    Ticket,
    Tickets,
)
from gpulayer_mesh.core.wire import decode_as, pack, unpack
from gpulayer_mesh.errors import PlacementBusyError, RemoteProtocolError
from job_cases import node

LAPTOP, OTHER = node(1), node(2)


def job(index: int) -> str:
    return f"{index:010}"


def ticket(number: int, index: int | None = None, submitter: str = LAPTOP) -> Ticket:
    who = "laptop" if submitter == LAPTOP else "laptop-2"
    return Ticket(number, job(number if index is None else index), submitter, who, "x", "1 node")


def test_next_attempt_goes_before_all_that_wait() -> None:
    queue = Tickets("box-1")
    queue.take(0.0, ticket(1))
    with pytest.raises(PlacementBusyError, match=f"kept for job {job(1)} from laptop, which came"):
        queue.admit(0.0, job(9), LAPTOP)
    queue.admit(0.0, job(9), LAPTOP, number=RESTART)
    queue.take(0.0, replace(ticket(RESTART, 5), why="job x, which is being restarted"))
    with pytest.raises(PlacementBusyError, match="box-1 kept for job x, which is being restarted"):
        queue.admit(0.0, job(1), LAPTOP)
    with pytest.raises(PlacementBusyError, match="kept for job x"):  # of two, one must be first
        queue.admit(0.0, job(9), LAPTOP, number=RESTART)
    queue.admit(0.0, job(4), LAPTOP, number=RESTART)
    queue.admit(0.0, job(5), LAPTOP, number=RESTART)


def ahead(standing: Standing) -> list[str]:
    return [one.job for one in standing.ahead]


def test_order_is_by_number_then_by_job() -> None:
    box = Tickets("box")
    for number, index in ((2, 5), (1, 9), (2, 4)):
        box.take(0.0, ticket(number, index))
    assert [one.job for one in box.all(0.0)] == [job(9), job(4), job(5)]
    assert ahead(box.take(0.0, ticket(2, 5))) == [job(9), job(4)]
    assert ahead(box.take(0.0, ticket(1, 9))) == []


def test_only_the_oldest_is_admitted_and_who_never_waited_comes_last() -> None:
    box = Tickets("box")
    box.admit(0.0, job(7), LAPTOP)
    box.take(0.0, ticket(1, submitter=OTHER))
    box.take(0.0, ticket(2))
    box.admit(0.0, job(1), OTHER)
    for index in (2, 7):
        with pytest.raises(PlacementBusyError) as caught:
            box.admit(0.0, job(index), LAPTOP)
        reason = f"kept for job {job(1)} from laptop-2, which came first"
        assert caught.value.message == f"box {reason}"
        assert [(r.node, r.reason, r.for_ever) for r in caught.value.refusals] == [
            ("box", reason, False)
        ]


def test_another_members_ticket_opens_no_door() -> None:
    box = Tickets("box")
    box.take(0.0, ticket(1))
    box.take(0.0, ticket(2, submitter=OTHER))
    with pytest.raises(PlacementBusyError):
        box.admit(0.0, job(1), OTHER)
    with pytest.raises(RemoteProtocolError):
        box.take(0.0, replace(ticket(1), submitter=OTHER))
    with pytest.raises(RemoteProtocolError):
        box.take(0.0, ticket(3, 1))
    box.drop(0.0, job(1), OTHER)
    assert [one.job for one in box.all(0.0)] == [job(1), job(2)]


def test_ticket_ends_unless_renewed() -> None:
    box = Tickets("box")
    box.take(0.0, ticket(1))
    box.take(0.0, ticket(2))
    box.take(20.0, ticket(2))
    assert ahead(box.take(TICKET_S - 0.1, ticket(3))) == [job(1), job(2)]
    box.admit(TICKET_S, job(2), LAPTOP)
    assert ahead(box.take(20.0 + TICKET_S, ticket(3))) == []
    assert box.find(20.0 + TICKET_S, job(2)) is None


def test_late_copy_of_a_renewal_does_not_bring_a_ticket_back() -> None:
    box = Tickets("box")
    box.take(0.0, ticket(1))
    box.drop(1.0, job(1), LAPTOP)
    assert box.take(1.0 + TICKET_S - 0.1, ticket(1)) == Standing()
    assert box.all(1.0) == ()
    box.drop(2.0, job(2), LAPTOP)  # overtook its registration
    box.take(3.0, ticket(2))
    assert box.all(3.0) == ()
    box.admit(3.0, job(1), LAPTOP)  # it left because it may begin


def test_stopped_job_is_told_so_and_not_admitted() -> None:
    box = Tickets("box")
    box.take(0.0, ticket(1))
    box.drop(0.0, job(1), LAPTOP, stopped_by="boss")
    box.drop(0.0, job(1), LAPTOP)
    assert box.take(1.0, ticket(1)).stopped == "boss"
    with pytest.raises(PlacementBusyError, match="box stopped by boss"):
        box.admit(1.0, job(1), LAPTOP)
    box.admit(1.0, job(1), OTHER)
    box.admit(TICKET_S, job(1), LAPTOP)


def test_numbers_of_tickets_are_bounded() -> None:
    box = Tickets("box")
    for index in range(TICKETS_PER_MEMBER):
        box.take(0.0, ticket(1, index))
    with pytest.raises(PlacementBusyError, match="64 of this launcher"):
        box.take(0.0, ticket(1, 999))
    box.take(1.0, ticket(1, 0))  # renewing is always possible
    for index in range(TICKETS_PER_MEMBER, TICKETS_MAX):
        box.take(0.0, ticket(1, index, node(index // TICKETS_PER_MEMBER + 2)))
    with pytest.raises(PlacementBusyError, match="256 jobs waiting"):
        box.take(0.0, ticket(1, 999, node(99)))
    for index in range(2 * TICKETS_MAX):
        box.drop(0.0, job(index), LAPTOP)
    box.check()


def test_only_launchers_keep_their_tickets() -> None:
    box = Tickets("box")
    box.take(0.0, ticket(1))
    box.take(0.0, ticket(2, submitter=OTHER))
    box.keep([OTHER])
    assert [one.job for one in box.all(0.0)] == [job(2)]


def test_adopted_tickets_stand_for_another_lease() -> None:
    old = Tickets("box")
    old.take(0.0, ticket(2))
    old.take(0.0, ticket(1))
    new = Tickets("box")
    new.adopt(100.0, old.all(1.0))
    assert ahead(new.take(100.0 + TICKET_S - 1, ticket(3))) == [job(1), job(2)]
    assert ahead(new.take(100.0 + TICKET_S, ticket(3))) == []


def test_place_of_a_next_attempt_is_not_adopted() -> None:
    box = Tickets("box")
    box.adopt(0.0, [ticket(tickets.RESTART), ticket(2)])
    assert [one.job for one in box.all(0.0)] == [job(2)]


def test_first_ticket_to_run_out_is_the_next_timeout() -> None:
    box = Tickets("box")
    assert box.next_timeout() is None
    box.take(0.0, ticket(1))
    box.take(5.0, ticket(2))
    assert box.next_timeout() == TICKET_S
    box.take(7.0, ticket(1))
    assert box.next_timeout() == 5.0 + TICKET_S


def test_next_number_comes_after_all_known_and_has_an_end() -> None:
    assert tickets.next_number([]) == 1
    assert tickets.next_number([ticket(3), ticket(7), ticket(5)]) == 8
    assert tickets.next_number([ticket(NUMBER_MAX, 1)]) == NUMBER_MAX
    box = Tickets("box")
    box.take(0.0, ticket(NUMBER_MAX, 1))
    assert ahead(box.take(0.0, ticket(NUMBER_MAX, 2))) == [job(1)]  # job ids still tell them apart


def test_position_counts_each_job_once() -> None:
    one, two, three, four = map(ticket, (1, 2, 3, 4))
    assert tickets.position([]) == 1
    assert tickets.position([Standing((one, two)), Standing((two,)), Standing()]) == 3
    assert tickets.positions([[one, three], [three, two], [four]]) == {
        job(1): 1,
        job(2): 1,
        job(3): 3,
        job(4): 1,
    }


def test_ticket_survives_the_wire() -> None:
    one = Ticket(7, JOB_ID_ALPHABET[:JOB_ID_CHARS], LAPTOP, "laptop", "träin.py", "3 nodes", "x")
    assert decode_as(Ticket, unpack(pack(one))) == one
    assert decode_as(Standing, unpack(pack(Standing((one,))))) == Standing((one,))


def test_random_use_keeps_order_and_limits(rng: random.Random) -> None:
    box = Tickets("box")
    now = 0.0
    for _ in range(5000):
        now += rng.random() * 3
        one = ticket(rng.randint(1, 9), rng.randint(0, 30), rng.choice([LAPTOP, OTHER]))
        try:
            match rng.randrange(4):
                case 0 | 1:
                    box.take(now, one)
                case 2:
                    box.drop(now, one.job, one.submitter)
                case 3:
                    box.admit(now, one.job, one.submitter)
                    standing = box.find(now, one.job)
                    if standing is not None and standing.submitter == one.submitter:
                        assert standing == box.all(now)[0]
        except (PlacementBusyError, RemoteProtocolError):
            pass
        box.check()
        orders = [standing.order for standing in box.all(now)]
        assert orders == sorted(set(orders))
