"""A job on its way from a signed spec to its start: its steps, and what an error gives back.

Besides, who gets which chunk and which error.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gpulayer_mesh import starting
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.jobspec import GoOrder, JobRecord, JobState
from gpulayer_mesh.core.reach import Failed, Opened, Reached, Target, Trouble
from gpulayer_mesh.core.types import Address, Addresses
from gpulayer_mesh.errors import PathsCutError, PlacementBusyError, TransportError
from job_cases import node, spec

SPEC = spec(1, 1)
RECORD = JobRecord(SPEC, JobState.STARTING, node(0))
SIGNED = b"signed by its author"
CHUNKS = [bytes([n]) * 32 for n in range(3)]


class Boxes:
    """A `Caller` whose nodes take a job as agents do; keeps what was asked of them."""

    def __init__(self) -> None:
        self.steps: list[str] = []  # without renewals
        self.reserved = [0, 0]
        self.renewed = asyncio.Event()  # each of them twice
        self.targets: list[Target] = []
        self.ordered: GoOrder | None = None
        self.slow = ""  # a step that takes until then, and fails

    def addresses(self, which: str) -> Addresses:
        return (Address(f"10.0.0.{int(which, 16)}", 4000),)

    async def call(
        self,
        which: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        deadline_s: float = 1.0,
    ) -> Any:
        box = int(which, 16)
        step = "chunk" if path.startswith("/v1/chunks/") else path.rpartition("/")[2]
        if step == "reserve":
            assert body == {"spec": SIGNED}
            self.reserved[box] += 1
            if min(self.reserved) == 3:
                self.renewed.set()
            if self.reserved[box] == 2:
                raise TransportError("lost on the way")  # the next one counts
            return None
        self.steps.append(f"{step} {box}")
        if step == self.slow:
            await self.until_renewed()
        answers: dict[str, Any] = {
            "manifest": {"missing": CHUNKS[box:]},
            "open": Opened((40000, 50000), bytes(16), 32768, 60999),
            "port": {"port": 29400},
            "go": RECORD,
        }
        if step == "check":
            self.targets += body["targets"]
            answers["check"] = [self.reached(box, target) for target in body["targets"]]
        elif step == "go":
            self.ordered = body
        return wire.unpack(wire.pack(answers.get(step)))

    def reached(self, box: int, target: Target) -> Reached:
        return Reached(target.node, target.hosts)

    async def until_renewed(self) -> None:
        async with asyncio.timeout(20):
            await self.renewed.wait()
        raise TransportError("that was all")

    async def before_preflight(self) -> None:
        self.steps.append("before")
        if self.slow == "before":
            await self.until_renewed()

    async def start(self) -> JobRecord:
        await starting.reserve(self, SPEC, SIGNED)
        order = await starting.prepare(
            self, SPEC, SIGNED, Folder(), {}, before_preflight=self.before_preflight
        )
        return await starting.go(self, SPEC, order)


class Folder:
    """A `Source`."""

    manifest_bytes = b"manifest"
    chunks = CHUNKS

    def read_chunk(self, sha256: bytes) -> bytes:
        return sha256


async def test_job_is_staged_prepared_and_checked_before_it_goes() -> None:
    boxes = Boxes()
    assert await boxes.start() == RECORD
    assert boxes.reserved == [1, 1]
    staged = ["manifest 0", "manifest 1", "stage 0", "stage 1", "chunk 0", "chunk 1"]
    assert sorted(boxes.steps[:6]) == sorted(staged)  # box 1 had the third chunk
    assert boxes.steps[6:] == [
        "before",
        *("open 0", "open 1", "check 0", "check 1", "check 0", "check 1", "port 0"),
        "go 0",
    ]


@pytest.mark.parametrize("slow", ["stage", "before", "open"])
async def test_nodes_are_held_while_a_slow_one_is_prepared_and_released_if_that_fails(
    monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """A reservation ends after 30 s without a word, and a slow link may need minutes."""
    monkeypatch.setattr(starting, "RENEW_S", 0.01)
    boxes = Boxes()
    boxes.slow = slow
    with pytest.raises(TransportError, match="that was all"):
        await boxes.start()
    assert boxes.steps[-2:] == ["release 0", "release 1"]
    assert "go 0" not in boxes.steps
    assert ("open 0" in boxes.steps) is (slow == "open")
    assert [task for task in asyncio.all_tasks() if "_renew" in repr(task)] == []


async def test_reservation_that_one_node_refuses_is_given_back_on_all() -> None:
    class Full(Boxes):
        async def call(self, which: str, method: str, path: str, *rest: Any, **more: Any) -> Any:
            if which == node(1) and path.endswith("/reserve"):
                raise PlacementBusyError("box-1 is full")
            return await super().call(which, method, path, *rest, **more)

    boxes = Full()
    with pytest.raises(PlacementBusyError, match="box-1 is full"):
        await boxes.start()
    assert boxes.steps == ["release 0", "release 1"]


@pytest.mark.parametrize("going", [False, True])
async def test_job_given_up_is_released_and_stopped_if_it_may_run(going: bool) -> None:
    class Silent(Boxes):
        async def call(self, which: str, method: str, path: str, *rest: Any, **more: Any) -> Any:
            await super().call(which, method, path, *rest, **more)
            raise TransportError("silent")

    boxes = Silent()
    await starting.release(boxes, SPEC, going=going)
    assert boxes.steps == (["stop 0"] if going else []) + ["release 0", "release 1"]


def test_chunks_nobody_has_are_dealt_out_once_each() -> None:
    chunks = [bytes([n]) * 32 for n in range(7)]
    nobody = [frozenset(chunks)] * 3
    owners, uploads = starting.deal_chunks(chunks, nobody)
    assert [chunk for chunk, _ in uploads] == chunks  # one copy in total
    assert owners == [0, 1, 2, 0, 1, 2, 0]
    assert [owner for _, owner in uploads] == owners


def test_chunks_that_a_node_has_are_not_uploaded() -> None:
    chunks = [bytes([n]) * 32 for n in range(4)]
    has_all, has_none = frozenset[bytes](), frozenset(chunks)
    owners, uploads = starting.deal_chunks(chunks, [has_none, has_all, has_none])
    assert owners == [1, 1, 1, 1]
    assert uploads == []
    owners, uploads = starting.deal_chunks(chunks, [frozenset(chunks[1:]), has_none, has_none])
    assert owners[0] == 0
    assert [chunk for chunk, _ in uploads] == chunks[1:]


async def test_address_that_answers_and_carries_nothing_gives_way_to_another() -> None:
    class Tunnel(Boxes):
        """The first address of box 0 answers, and full packets to it are lost."""

        def addresses(self, which: str) -> Addresses:
            return (Address("10.8.0.1", 4000), *super().addresses(which))

        def reached(self, box: int, target: Target) -> Reached:
            if target.bulk_bytes and target.hosts == ("10.8.0.1",):
                lost = Failed("10.8.0.1", target.ports[0], Trouble.STALLED, "stops")
                return Reached(target.node, failed=(lost,))
            return Reached(target.node, target.hosts)

    boxes = Tunnel()
    await boxes.start()
    assert boxes.ordered is not None
    assert boxes.ordered.peer_hosts == ("10.0.0.0", "10.0.0.1")
    sent = [(target.hosts, target.ports) for target in boxes.targets if target.bulk_bytes]
    assert sent[-3:] == [
        (("10.0.0.0",), (40000, 50000)),
        (("10.0.0.1",), (40000, 50000)),
        (("10.0.0.0",), (40000, 50000)),
    ]
    assert {target.bulk_bytes for target in boxes.targets} == {0, 1024 * 1024}


async def test_pair_that_is_cut_is_refused_and_nothing_stays_reserved() -> None:
    class OneWay(Boxes):
        def reached(self, box: int, target: Target) -> Reached:
            if box == 1:
                said = Failed(target.hosts[0], target.ports[0], Trouble.SILENT, "no answer")
                return Reached(target.node, failed=(said,))
            return Reached(target.node, target.hosts)

    await starting.meet(Boxes(), SPEC)
    with pytest.raises(PathsCutError):  # before anything is staged
        await starting.meet(OneWay(), SPEC)
    boxes = OneWay()
    with pytest.raises(PathsCutError, match="cannot all reach each other") as caught:
        await boxes.start()
    assert caught.value.pairs == ((node(1), node(0)),)
    (cut,) = caught.value.unreached
    assert (cut.source, cut.target, cut.back) == ("box-1", "box-0", True)
    assert boxes.steps[-2:] == ["release 0", "release 1"]
