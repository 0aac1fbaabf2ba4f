"""A job on its way from a signed spec to its start: its steps, and what an error gives back.

Besides, who gets which chunk, which address and which error.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gpulayer_mesh import starting
from gpulayer_mesh.core import wire
from gpulayer_mesh.core.jobspec import JobRecord, JobState
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
            "open": {"port": 40000, "nonce": b"", "missing": []},
            "check": [{"node": node(1 - box), "hosts": [f"10.0.0.{1 - box}"], "error": ""}],
            "port": {"port": 29400},
            "go": wire.unpack(wire.pack(RECORD)),
        }
        return answers.get(step)

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
        *("open 0", "open 1", "check 0", "check 1", "port 0"),
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


def test_address_must_be_reached_by_all() -> None:
    lan, overlay = "10.0.0.1", "100.64.0.1"
    reached = {
        (1, "a"): {"hosts": [overlay, lan], "error": ""},
        (2, "a"): {"hosts": [lan], "error": ""},
        (0, "b"): {"hosts": ["10.0.0.2"], "error": ""},
        (2, "b"): {"hosts": ["10.0.0.2"], "error": ""},
        (0, "c"): {"hosts": ["10.0.0.3"], "error": ""},
        (1, "c"): {"hosts": ["10.0.0.3"], "error": ""},
    }
    hosts, *wrong = starting.common_hosts(["a", "b", "c"], ["A", "B", "C"], reached)
    assert (hosts, wrong) == ([lan, "10.0.0.2", "10.0.0.3"], [[], []])


def test_one_way_block_names_both_ends() -> None:
    reached = {
        (1, "a"): {"hosts": [], "error": "10.0.0.1 port 40000: timed out"},
        (0, "b"): {"hosts": ["10.0.0.2"], "error": ""},
    }
    _, problems, pairs = starting.common_hosts(["a", "b"], ["A", "B"], reached)
    assert [(p.node, p.for_ever) for p in problems] == [("B", False)]
    assert problems[0].reason == "cannot connect to A: 10.0.0.1 port 40000: timed out"
    assert pairs == [("b", "a")]


def test_addresses_without_a_common_one_are_refused() -> None:
    reached = {
        (1, "a"): {"hosts": ["10.0.0.1"], "error": ""},
        (2, "a"): {"hosts": ["10.1.0.1"], "error": ""},
        **{
            (i, n): {"hosts": ["x"], "error": ""}
            for i, n in [(0, "b"), (2, "b"), (0, "c"), (1, "c")]
        },
    }
    _, problems, pairs = starting.common_hosts(["a", "b", "c"], ["A", "B", "C"], reached)
    assert [p.node for p in problems] == ["A"]
    assert pairs == [("c", "a")]


async def test_nodes_that_do_not_reach_each_other_are_told_apart_before_anything_is_staged() -> (
    None
):
    class Cut(Boxes):
        async def call(self, which: str, method: str, path: str, *rest: Any, **more: Any) -> Any:
            answer = await super().call(which, method, path, *rest, **more)
            if path.endswith("/check") and which == node(1):
                return [{"node": node(0), "hosts": [], "error": "10.0.0.0 port 40000: timed out"}]
            return answer

    boxes = Boxes()
    await starting.meet(boxes, SPEC)
    assert boxes.steps == ["open 0", "open 1", "check 0", "check 1"]
    with pytest.raises(PathsCutError) as caught:
        await starting.meet(Cut(), SPEC)
    assert caught.value.pairs == ((node(1), node(0)),)
    assert [(r.node, r.reason) for r in caught.value.refusals] == [
        ("box-1", "cannot connect to box-0: 10.0.0.0 port 40000: timed out")
    ]
