"""Restarts on real agents' parts: who may sign and ask what, what binds a voter, who takes over.

The procedure itself is played in virtual time (tests/sim), on several machines in tests/e2e.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from boxes import JOB, MANIFEST, ORDER, Box, Mesh
from gpulayer_mesh.core import hosted, job, restarts, wire
from gpulayer_mesh.core.jobspec import OVER, HostPhase, JobKind, JobRecord, JobState, Slot
from gpulayer_mesh.core.types import NodeId
from gpulayer_mesh.errors import (
    GpuLayerError,
    NotAllowedError,
    PlacementBusyError,
    RemoteProtocolError,
    TransportError,
)
from gpulayer_mesh.runtime import hosting, succession
from gpulayer_mesh.runtime import restarts as module
from gpulayer_mesh.runtime.livejob import JobFolder, Signed, open_signed, sign_change
from shim_jobs import eventually

pytestmark = pytest.mark.network

NEXT = restarts.attempt_id(JOB, 1)
COUNTS = """
import os, time
from pathlib import Path
out = Path(os.environ["GPULAYER_OUT"]) / "count"
found = int(out.read_text()) if out.exists() else 0
print("attempt", os.environ["GPULAYER_RESTART"], "from", found, os.environ.get("TOKEN"), flush=True)
out.with_suffix(".tmp").write_text(str(found + 5))
out.with_suffix(".tmp").replace(out)
time.sleep(600)
"""
# Leaves a result and is killed all the same.
LEAVES = """
import os, time
from pathlib import Path
out = Path(os.environ["GPULAYER_OUT"])
restored = Path(os.environ.get("GPULAYER_RESTORED", "nowhere"))
found = [sorted(one.name for one in place.rglob("*") if one.is_file()) for place in (out, restored)]
print("attempt", os.environ["GPULAYER_RESTART"], "from", *found, flush=True)
for name in (".gpulayer-result/value", ".gpulayer-result/resume/0.json", "own"):
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(name)
print("left", flush=True)
time.sleep(600)
"""
# What a rank of `submit` does, of a module that has no such function.
CALLS = """
from pathlib import Path
from gpulayer import called, values
file = Path(called.ARGUMENTS)
file.parent.mkdir()
file.write_bytes(values.pack([[], {}], "the call"))
called.main(["called", "json:absent"])
"""


def first(mesh: Mesh, *names: str, voters: tuple[str, ...] = (), **fields: object) -> Signed:
    """A signed first attempt that may be restarted."""
    names = names or ("box-0",)
    voters = voters or (*names, *(name for name in ("box-1", "box-2") if name not in names))
    known = {"restarts": 2, "voters": tuple(map(mesh.node, voters))} | fields
    spec = mesh.spec(*names, **known)
    return Signed(spec, spec.submitter, mesh.sign(spec))


def then(mesh: Mesh, before: Signed, by: str, *names: str, attempt: int = 0) -> Signed:
    """The next one, signed by a member."""
    slots = tuple(Slot(mesh.node(name), name, 1) for name in names or ("box-1",))
    voters = (*(slot.node for slot in slots), mesh.node("box-2"))
    voters = tuple(dict.fromkeys(voters))
    change = restarts.Change(before.spec.restart + 1, slots, voters, attempt)
    return sign_change(mesh.keys[by], mesh.roster.mesh, mesh.node(by), before, change)


# --- signatures ----------------------------------------------------------------------------------


def test_chain_proves_every_attempt_from_the_submitter_on(mesh: Mesh) -> None:
    one = first(mesh)
    two = then(mesh, one, "box-1")
    three = then(mesh, two, "box-2", "box-2")
    found = open_signed(three.chain, mesh.book())
    assert found == three
    assert [spec.id for spec in found.history] == [JOB, NEXT]
    assert found.spec.argv == one.spec.argv
    assert found.spec.manifest == one.spec.manifest


Forge = Callable[[Mesh], bytes]
FORGED: dict[str, tuple[str, Forge]] = {
    "by no voter": ("may not", lambda m: then(m, first(m), "other").chain),
    "by a voter of another attempt": (
        "may not",
        lambda m: then(m, then(m, first(m), "box-0"), "box-0", "box-2").chain,
    ),
    "one too many": (
        "does not follow",
        lambda m: then(m, first(m, restarts=0), "box-0").chain,
    ),
    "the first one replaced": (
        "may not|another job",
        lambda m: wire.pack(
            wire.unpack(then(m, first(m), "box-0").chain)
            | {"first": m.sign(first(m, id="1" * 10).spec)}
        ),
    ),
    "a change twice": (
        "does not follow",
        lambda m: wire.pack(
            {
                "first": first(m).chain,
                "changes": wire.unpack(then(m, first(m), "box-0", "box-0").chain)["changes"] * 2,
            }
        ),
    ),
    "no change at all": ("changes", lambda m: wire.pack({"first": first(m).chain, "changes": []})),
    "a first one that says it is a restart": (
        "no restart",
        lambda m: m.sign(first(m, restart=1, origin=JOB).spec),
    ),
}


@pytest.mark.parametrize("case", FORGED)
async def test_forged_restart_reserves_nothing(mesh: Mesh, case: str) -> None:
    (box,) = await mesh.start("box-1")
    says, forge = FORGED[case]
    chain = forge(mesh)
    for who in ("box-0", "box-2", "other", "laptop"):
        for ident in (JOB, NEXT):
            with pytest.raises(RemoteProtocolError, match=says):
                await box.ask(who, "POST", f"/v1/jobs/{ident}/reserve", {"spec": chain})
    assert box.reservations.grants == ()


async def test_only_who_signed_a_restart_brings_it_to_its_start(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-1")
    attempt = then(mesh, first(mesh), "box-2")
    path, body = f"/v1/jobs/{NEXT}/reserve", {"spec": attempt.chain}
    for who in ("box-0", "other", "laptop"):
        with pytest.raises(NotAllowedError):
            await box.ask(who, "POST", path, body)
    report = await box.ask("box-2", "POST", path, body)
    assert report.phase is HostPhase.RESERVED
    for who in ("box-0", "laptop"):
        with pytest.raises(NotAllowedError):
            await box.ask(who, "POST", f"/v1/jobs/{NEXT}/release")
    mesh.remove("laptop")  # whose job it is
    with pytest.raises(RemoteProtocolError):
        await box.ask("box-2", "POST", path, body)


# --- voters --------------------------------------------------------------------------------------


async def agree(box: Box, who: str, attempt: Signed) -> Any:
    answer = await box.ask(
        who, "POST", f"/v1/attempts/{attempt.spec.id}/agree", {"spec": attempt.chain}
    )
    return answer["spec"]


async def test_voter_is_bound_to_the_first_for_ever(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-1")
    mine, other = then(mesh, first(mesh), "box-2"), then(mesh, first(mesh), "box-0")
    assert await agree(box, "box-2", mine) == mine.chain
    assert await agree(box, "box-0", other) == mine.chain
    again = then(mesh, first(mesh), "box-2", attempt=7)
    assert await agree(box, "box-2", again) == mine.chain
    box = await box.restart()
    assert await agree(box, "box-0", other) == mine.chain
    assert (box.home / "attempts" / NEXT).stat().st_mode & 0o777 == 0o600
    said = await box.ask("box-0", "GET", f"/v1/attempts/{NEXT}")
    assert said == {"spec": mine.chain}


async def test_only_voters_and_only_the_author_are_heard(mesh: Mesh) -> None:
    (box,) = await mesh.start("other")
    attempt = then(mesh, first(mesh), "box-2")
    with pytest.raises(NotAllowedError, match="has no vote"):
        await agree(box, "box-2", attempt)
    (box,) = await mesh.start("box-1")
    for who in ("box-0", "other", "laptop"):
        with pytest.raises(NotAllowedError, match="only who signed"):
            await agree(box, who, attempt)
    await agree(box, "box-2", attempt)
    for who in ("other", "laptop"):
        with pytest.raises(NotAllowedError, match="only voters"):
            await box.ask(who, "GET", f"/v1/attempts/{NEXT}")
    (box.home / "nothing").touch()
    for path in ("..%2fagent.json", "..%2fnothing"):
        assert await box.ask("box-0", "GET", f"/v1/attempts/{path}") == {"spec": None}


async def test_voter_agrees_to_nothing_while_its_own_part_runs(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    attempt = first(mesh, code=COUNTS, voters=("box-0", "box-1", "box-2"))
    await mesh.stage(attempt.spec)
    with pytest.raises(GpuLayerError, match="has not ended on box-0"):
        await agree(box, "box-2", then(mesh, attempt, "box-2"))
    await box.ask("laptop", "POST", "release")
    await agree(box, "box-2", then(mesh, attempt, "box-2"))


async def test_who_agreed_to_a_later_attempt_takes_no_part_in_an_earlier_one(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-1")
    one = first(mesh)
    two = then(mesh, one, "box-2", "box-1")
    await agree(box, "box-2", then(mesh, two, "box-2", "box-2"))
    with pytest.raises(RemoteProtocolError, match="agreed to an attempt after"):
        await box.ask("box-2", "POST", f"/v1/jobs/{NEXT}/reserve", {"spec": two.chain})


async def test_witness_counts_on_what_it_heard_lately(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    (box,) = await mesh.start("box-1")
    one = first(mesh)
    word = {"spec": one.chain, "secretive": False, "sources": []}
    for who in ("laptop", "box-2", "other"):
        with pytest.raises(NotAllowedError):
            await box.ask(who, "POST", f"/v1/watches/{JOB}", word)
    await box.ask("box-0", "POST", f"/v1/watches/{JOB}", word)
    with pytest.raises(GpuLayerError, match="heard from job"):
        await agree(box, "box-2", then(mesh, one, "box-2"))
    # The keeper itself may: it knows that its attempt has failed.
    await agree(box, "box-0", then(mesh, one, "box-0"))
    with pytest.raises(NotAllowedError):
        await box.ask("box-2", "POST", f"/v1/watches/{JOB}/drop", {"forget": True})
    await box.ask("box-0", "POST", f"/v1/watches/{JOB}/drop", {"forget": True})
    assert not (box.home / "watches" / JOB).exists()
    with pytest.raises(RemoteProtocolError, match="agreed to an attempt after"):
        await box.ask("box-0", "POST", f"/v1/watches/{JOB}", word)


async def test_who_knows_the_end_of_a_job_agrees_to_no_attempt_after_it(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-1")
    one = first(mesh)
    word = {"spec": one.chain, "secretive": False, "sources": []}
    await box.ask("box-0", "POST", f"/v1/watches/{JOB}", word)
    await box.ask("box-0", "POST", f"/v1/watches/{JOB}/drop", {"forget": True})
    box = await box.restart()
    for who in ("box-2", "box-0"):
        with pytest.raises(GpuLayerError, match=f"job {JOB} has ended"):
            await agree(box, who, then(mesh, one, who))
    said = await box.ask("box-2", "GET", f"/v1/attempts/{NEXT}")
    assert said == {"spec": None, "ended": True}


# --- take-over -----------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in tenths of the time."""
    for where in (hosted, job, succession, module):
        for name in ("KEEPER_SILENT_S", "GONE_S", "STAGGER_S", "WATCH_S", "RENEW_S"):
            if hasattr(where, name):
                monkeypatch.setattr(where, name, getattr(where, name) / 10)


async def counting(mesh: Mesh, *, secretive: bool = False, **fields: Any) -> Box:
    """Start a job on box-0 that box-1 and box-2 watch; it has counted once it is there."""
    zero, *_ = await mesh.start("box-0", "box-1", "box-2")
    await mesh.stage(first(mesh, **{"code": COUNTS} | fields).spec)
    order = replace(ORDER, secrets={"TOKEN": "canary"} if secretive else {})
    await zero.ask("laptop", "POST", "go", order)
    await ran(zero, JOB)
    return zero


async def killed(box: Box, ident: str) -> JobRecord:
    """Kill the only rank of an attempt; returns its last record."""
    one = box.host.jobs[ident]
    await eventually(lambda: one.report().ranks[0].pid is not None)
    pid = one.report().ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: one.current_record().state is JobState.FAILED)
    return one.current_record()


async def ran(box: Box, ident: str = NEXT, until: str = "from") -> str:
    """Return what an attempt's only rank has printed, once that is in it."""

    async def line() -> str:
        if ident not in box.host.jobs or box.host.jobs[ident].machine.phase is not (
            HostPhase.RUNNING
        ):
            return ""
        stream = await box.ask("boss", "GET", f"/v1/jobs/{ident}/logs", follow="0")
        return b"".join([piece async for piece in stream.pieces]).decode(errors="replace")

    async with asyncio.timeout(60):
        while until not in (found := await line()):  # noqa: ASYNC110  its own process prints
            await asyncio.sleep(0.05)
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("secretive", [False, True])
async def test_witness_takes_a_job_over_whose_only_machine_is_lost(
    mesh: Mesh, quick: None, secretive: bool
) -> None:
    zero = await counting(mesh, secretive=secretive)
    witnesses = [mesh.boxes[mesh.node(name)] for name in ("box-1", "box-2")]

    def copied() -> bool:
        return any(
            file.path == "count"
            for box in witnesses
            for held in box.copies.held(JOB)
            for file in held.files
        ) and all(box.copies.manifest(JOB) is not None for box in witnesses)

    await eventually(copied)
    await zero.close()  # with its ranks
    if secretive:  # which only the lost machine knew
        await eventually(lambda: all(not box.restarts._watches for box in witnesses))
        assert all(NEXT not in box.host.jobs for box in witnesses)
        for box in witnesses:
            record = box.restarts.watched_job(JOB)
            assert record is not None
            assert record.failure is not None
            assert record.state is JobState.FAILED
            assert "not restarted: its secrets" in record.failure.reason
        return
    await eventually(lambda: any(NEXT in box.host.jobs for box in witnesses))
    there = next(box for box in witnesses if NEXT in box.host.jobs)
    assert "attempt 1 from 5" in await ran(there)
    assert there.host.jobs[NEXT].current_record().state is JobState.RUNNING


@pytest.mark.timeout(120)
@pytest.mark.parametrize("secretive", [False, True])
async def test_keeper_whose_agent_was_started_anew_restarts_a_job_without_secrets(
    mesh: Mesh, quick: None, secretive: bool
) -> None:
    zero = await counting(mesh, secretive=secretive)
    zero = await zero.restart()
    record = await killed(zero, JOB)
    assert record.failure is not None
    if secretive:
        assert (record.successor, NEXT in zero.host.jobs) == ("", False)
        assert "not restarted: its secrets" in record.failure.reason
        return
    assert record.successor == NEXT
    assert "attempt 1 from 5" in await ran(zero)


async def test_job_with_secrets_does_not_start_where_that_cannot_be_noted(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later agent would take it for one without, and start it again without them."""

    def full(_: JobFolder) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JobFolder, "note_secrets", full)
    zero, *_ = await mesh.start("box-0", "box-1", "box-2")
    await mesh.stage(first(mesh, code=COUNTS, restarts=1).spec)
    await zero.ask("laptop", "POST", "go", replace(ORDER, secrets={"TOKEN": "canary"}))
    one = zero.host.jobs[JOB]
    await eventually(lambda: one.ended)
    assert one.report().problem == "box-0: [Errno 28] No space left on device"
    assert not (one.path / "status").exists()


@pytest.mark.timeout(120)
async def test_result_of_an_attempt_that_failed_is_not_found_by_the_next(
    mesh: Mesh, quick: None
) -> None:
    zero = await counting(mesh, code=LEAVES)
    await ran(zero, JOB, until="left")
    await killed(zero, JOB)
    assert "attempt 1 from ['0.json', 'own'] ['0.json', 'own']" in await ran(zero)


@pytest.mark.timeout(120)
async def test_function_that_returned_nothing_is_called_again(mesh: Mesh, quick: None) -> None:
    zero, *_ = await mesh.start("box-0", "box-1", "box-2")
    code = "import os\nif os.environ['GPULAYER_RESTART'] == '0': os._exit(0)\n" + LEAVES
    await mesh.stage(first(mesh, kind=JobKind.FUNCTION, code=code).spec)
    await zero.ask("laptop", "POST", "go", ORDER)
    await eventually(lambda: bool(zero.host.jobs[JOB].current_record().successor))
    failure = zero.host.jobs[JOB].current_record().failure
    assert failure is not None
    assert failure.reason.startswith("ended without a result")
    assert "attempt 1 from [] []" in await ran(zero)


@pytest.mark.timeout(120)
async def test_function_that_can_never_return_is_not_called_again(mesh: Mesh) -> None:
    zero, *_ = await mesh.start("box-0", "box-1", "box-2")
    await mesh.stage(first(mesh, kind=JobKind.FUNCTION, code=CALLS).spec)
    await zero.ask("laptop", "POST", "go", ORDER)
    await eventually(lambda: zero.host.jobs[JOB].current_record().state in OVER)
    record = zero.host.jobs[JOB].current_record()
    assert (record.state, record.successor) == (JobState.FAILED, "")
    assert record.failure is not None
    assert record.failure.reason == "exit code 1; not restarted: it would end so each time"
    assert record.failure.tail[-1].endswith("json has no 'absent'")


@pytest.mark.timeout(120)
async def test_job_that_has_ended_is_not_restarted_by_who_was_cut_off_meanwhile(
    mesh: Mesh, quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hosting, "ASK_S", (0.2, 0.2))
    finish = tmp_path / "finish"
    code = f"import os, time\nwhile not os.path.exists({str(finish)!r}): time.sleep(0.02)"
    spec = first(mesh, "box-0", "box-1", code=code, kind=JobKind.DISTRIBUTED).spec
    cut, call = True, Box.call

    async def cut_at_the_end(self: Box, node: NodeId, *rest: Any, **named: Any) -> bytes:
        if cut and mesh.node("box-1") in (self.node, node) and zero.state() in OVER:
            raise TransportError("cut off")
        return await call(self, node, *rest, **named)

    monkeypatch.setattr(Box, "call", cut_at_the_end)
    zero, one, two = await mesh.start("box-0", "box-1", "box-2")
    await mesh.stage(spec)
    await zero.ask("laptop", "POST", "go", ORDER)
    await eventually(lambda: zero.state() is JobState.RUNNING)
    finish.touch()
    await eventually(lambda: one.state() is JobState.RESTARTING)
    assert zero.state() is JobState.SUCCEEDED
    cut = False
    await eventually(lambda: one.state() is JobState.SUCCEEDED)
    assert not [box.name for box in (zero, one, two) if NEXT in box.host.jobs]


KEPT = f"kept for job {JOB} from laptop, which is being restarted"


async def asks(mesh: Mesh, box: Box) -> None:
    """Another job asks for a machine."""
    spec = mesh.spec(box.name, id="abcdefghjk")
    await box.ask("laptop", "POST", "/v1/jobs/abcdefghjk/reserve", {"spec": mesh.sign(spec)})


@pytest.mark.timeout(120)
async def test_nobody_gets_what_a_failed_attempt_had_before_the_next(mesh: Mesh) -> None:
    zero = await counting(mesh)
    zero.unreachable = {"box-1", "box-2"}  # so that it lacks votes
    pid = zero.host.jobs[JOB].report().ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: zero.host.jobs[JOB].ended)
    with pytest.raises(PlacementBusyError, match=KEPT):
        await asks(mesh, zero)
    zero.unreachable = set()
    await ran(zero)
    assert zero.host.tickets.all(time.monotonic()) == ()


@pytest.mark.timeout(120)
async def test_next_attempt_that_waits_for_a_machine_goes_before_the_queue(
    mesh: Mesh, quick: None
) -> None:
    zero, one, two = await mesh.start("box-0", "box-1", "box-2", cpus=1)
    await mesh.stage(first(mesh, code=COUNTS).spec)
    await zero.ask("laptop", "POST", "go", ORDER)
    await ran(zero, JOB)
    await eventually(lambda: JOB in one.restarts._watches and JOB in two.restarts._watches)
    for box in (one, two):
        await asks(mesh, box)
    await zero.close()
    await eventually(lambda: all(box.host.tickets.all(time.monotonic()) for box in (one, two)))
    await one.ask("laptop", "POST", "/v1/jobs/abcdefghjk/release")
    with pytest.raises(PlacementBusyError, match=KEPT):
        await asks(mesh, one)
    assert "attempt 1" in await ran(one)
    await eventually(lambda: not two.host.tickets.all(time.monotonic()))


async def test_only_voters_keep_a_machine_for_the_next_attempt(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-1")
    before = first(mesh)
    path = f"/v1/attempts/{NEXT}/stand"
    body = {"spec": before.chain, "stands": True}
    for who, where in (("laptop", path), ("other", path), ("box-2", f"/v1/attempts/{JOB}/stand")):
        with pytest.raises(NotAllowedError):
            await box.ask(who, "POST", where, body)
    await box.ask("box-2", "POST", path, body)
    with pytest.raises(PlacementBusyError, match=KEPT):
        await asks(mesh, box)
    ticket = restarts.place_of_next(before.spec)
    with pytest.raises(NotAllowedError, match="no place before all others"):
        await box.ask("laptop", "POST", f"/v1/tickets/{NEXT}", ticket)
    await box.ask("box-2", "POST", path, body | {"stands": False})
    await asks(mesh, box)
    box.restarts.agreements.close(before.spec)
    await box.ask("box-2", "POST", path, body)
    assert box.host.tickets.all(time.monotonic()) == ()


@pytest.mark.timeout(120)
async def test_second_loss_is_survived_once_the_machine_lost_first_is_back(
    mesh: Mesh, quick: None
) -> None:
    zero = await counting(mesh, restarts=3)
    await zero.close()
    boxes = [mesh.boxes[mesh.node(name)] for name in ("box-1", "box-2")]
    await eventually(lambda: any(NEXT in box.host.jobs for box in boxes))
    there = next(box for box in boxes if NEXT in box.host.jobs)
    await ran(there)
    zero = Box(mesh, "box-0")
    await zero.start()
    await eventually(lambda: NEXT in zero.restarts._watches)  # it is told, as a voter
    await there.close()
    boxes = [zero, *(box for box in boxes if box is not there)]
    later = restarts.attempt_id(JOB, 2)
    await eventually(lambda: any(later in box.host.jobs for box in boxes))
    last = next(box for box in boxes if later in box.host.jobs)
    assert "attempt 2" in await ran(last, later)


@pytest.mark.timeout(120)
async def test_witness_that_was_cut_off_listens_again_when_the_keeper_is_back(
    mesh: Mesh, quick: None
) -> None:
    zero = await counting(mesh)
    one, two = (mesh.boxes[mesh.node(name)] for name in ("box-1", "box-2"))
    zero.unreachable = two.unreachable = {"box-1"}
    one.unreachable = {"box-0", "box-2"}
    await eventually(lambda: one.restarts._watches[JOB].succeeding)
    assert zero.state() is JobState.RUNNING  # box-2 hears it
    for box in (zero, one, two):
        box.unreachable = set()
    await eventually(lambda: not one.restarts._watches[JOB].succeeding)
    assert zero.state() is JobState.RUNNING
    await zero.close()
    await eventually(lambda: NEXT in one.host.jobs or NEXT in two.host.jobs)


async def test_voters_that_agreed_to_different_attempts_end_the_job(mesh: Mesh) -> None:
    voters = ("box-0", "box-1", "box-2", "other")
    boxes = await mesh.start(*voters)
    before = first(mesh, voters=voters)
    mine, others = (then(mesh, before, by, "box-1") for by in ("box-1", "box-2"))
    for box, attempt in zip(boxes, (mine, mine, others, others), strict=True):
        box.restarts.agreements.bind(attempt)
    with pytest.raises(succession.NotRestartedError, match="agreed to different attempts"):
        await boxes[1].restarts._succeed(before, {})


WAITS = "import time; time.sleep(600)"
STOP = {"grace_s": 0.0, "kill": False}


async def together(mesh: Mesh, **fields: object) -> list[Box]:
    """Start a job on box-0 and box-1 that box-2 watches."""
    boxes = await mesh.start("box-0", "box-1", "box-2")
    known = {"code": WAITS, "kind": JobKind.DISTRIBUTED} | fields
    await mesh.stage(first(mesh, "box-0", "box-1", **known).spec)
    await boxes[0].ask("laptop", "POST", "go", ORDER)
    await eventually(lambda: boxes[0].state() is boxes[1].state() is JobState.RUNNING)
    return boxes


@pytest.mark.timeout(120)
async def test_cut_path_moves_the_next_attempt_or_is_why_it_waits(mesh: Mesh, quick: None) -> None:
    boxes = await together(mesh, restarts=1)
    zero, one, two = boxes
    for box in boxes:  # while all control messages pass
        box.cut = {other.name for other in boxes if other is not box}
    (rank,) = one.host.jobs[JOB].report().ranks
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGKILL)
    await eventually(lambda: "no open path" in zero.host.jobs[JOB].current_record().waiting)
    waiting = zero.host.jobs[JOB].current_record().waiting
    assert re.search(r"box-\d has no open path to box-\d; box-\d has no open path to", waiting)
    assert not [box.name for box in boxes if box.restarts.agreements.bound(NEXT)]
    zero.cut, two.cut = {"box-1"}, {"box-1"}
    await eventually(lambda: NEXT in two.host.jobs and zero.host.jobs[JOB].record.successor == NEXT)
    assert [slot.name for slot in two.host.jobs[NEXT].spec.slots] == ["box-0", "box-2"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("restarts", [0, 2])
async def test_stop_before_the_keeper_is_known_to_be_lost_is_the_end(
    mesh: Mesh, quick: None, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    monkeypatch.setattr(hosting, "ASK_S", (0.2, 0.2))
    zero, one, two = await together(mesh, restarts=restarts)
    await zero.close()  # with its ranks
    record = await one.ask("laptop", "POST", "stop", STOP)
    assert record.state is JobState.RUNNING  # perhaps there, until its lease is over
    await eventually(lambda: one.state() in OVER)
    record = one.host.jobs[JOB].current_record()
    assert (record.state, record.cause) == (JobState.CANCELLED, "stopped by laptop")
    if restarts:
        for box in (one, two):
            with pytest.raises(GpuLayerError, match=f"job {JOB} has ended"):
                box.restarts.agreements.bind(then(mesh, first(mesh, "box-0", "box-1"), "box-1"))
    assert not [box.name for box in (one, two) if NEXT in box.host.jobs]


async def watching(mesh: Mesh, **fields: object) -> list[Box]:
    """Start a job on box-0 that box-1 and box-2 watch."""
    zero = await counting(mesh, **fields)
    one, two = (mesh.boxes[mesh.node(name)] for name in ("box-1", "box-2"))
    await eventually(lambda: bool(one.restarts.watched() and two.restarts.watched()))
    return [zero, one, two]


def said(box: Box) -> tuple[JobState, str, str]:
    """What a witness says of the job: state, successor, cause."""
    record = box.restarts.watched_job(JOB)
    assert record is not None
    return record.state, record.successor, record.cause


@pytest.mark.timeout(120)
async def test_witnesses_answer_for_a_job_whose_machine_is_lost(mesh: Mesh, quick: None) -> None:
    zero, one, two = await watching(mesh)
    assert (await one.ask("other", "GET", "")).state is JobState.RUNNING
    await zero.close()  # with its ranks
    for box in (one, two):
        await eventually(lambda box=box: said(box)[0] is JobState.RESTARTING)
        (record,) = await box.ask("other", "GET", "/v1/jobs")
        assert (record.spec.id, record.keeper) == (JOB, zero.node)
        assert record.waiting == "its machine box-0 does not answer"
        assert record.failure.reason.startswith("node of rank 0 lost: ")
    for box in (one, two):
        await eventually(lambda box=box: said(box)[1] == NEXT)
        assert (await box.ask("other", "GET", "")).state is JobState.FAILED


@pytest.mark.timeout(120)
@pytest.mark.parametrize("at_once", [True, False])
async def test_stop_at_a_witness_ends_a_job_whose_machine_is_lost(
    mesh: Mesh, quick: None, at_once: bool
) -> None:
    zero, one, two = await watching(mesh)
    await zero.close()  # with its ranks
    if not at_once:
        await eventually(lambda: said(one)[0] is JobState.RESTARTING)
    with pytest.raises(NotAllowedError):
        await one.ask("other", "POST", "stop", STOP)
    record = await one.ask("laptop", "POST", "stop", STOP)
    assert (record.state, record.cause) == (JobState.CANCELLED, "stopped by laptop")
    assert said(two) == (JobState.CANCELLED, "", "stopped by laptop")
    one = await one.restart()
    assert said(one) == (JobState.CANCELLED, "", "stopped by laptop")
    assert (await one.ask("laptop", "POST", "stop", STOP)).cause == "stopped by laptop"
    for box in (one, two):
        with pytest.raises(GpuLayerError, match=f"job {JOB} has ended"):
            box.restarts.agreements.bind(then(mesh, first(mesh), "box-1"))
        assert NEXT not in box.host.jobs


async def test_stop_at_a_witness_is_the_keepers_while_that_answers(mesh: Mesh) -> None:
    zero, one, _ = await watching(mesh)
    assert (await one.ask("laptop", "POST", "stop", STOP)).keeper == zero.node
    await eventually(lambda: zero.state() is JobState.CANCELLED)
    assert zero.host.jobs[JOB].current_record().cause == "stopped by laptop"
    await eventually(lambda: not one.restarts.watched())


@pytest.mark.timeout(120)
async def test_keeper_that_was_cut_off_hears_of_a_stop_from_its_witnesses(
    mesh: Mesh, quick: None
) -> None:
    zero, one, _ = await watching(mesh)
    zero.unreachable, one.unreachable = {"box-1", "box-2"}, {"box-0", "box-2"}
    await one.ask("laptop", "POST", "stop", STOP)
    zero.unreachable = set()
    await eventually(lambda: zero.state() is JobState.CANCELLED)
    assert zero.host.jobs[JOB].current_record().cause == "stopped by laptop"
    word = {"spec": first(mesh).chain, "secretive": False, "sources": []}
    with pytest.raises(NotAllowedError):  # it is the keeper's to hear
        await one.ask("other", "POST", f"/v1/watches/{JOB}", word)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("left", [True, False])
async def test_next_attempt_knows_from_a_witness_whether_the_launcher_left(
    mesh: Mesh, quick: None, left: bool
) -> None:
    zero, one, two = await watching(mesh, on_disconnect_s=600.0)
    await zero.ask("laptop", "POST", "follow", {"leaving": left})
    for box in (one, two):
        await eventually(lambda box=box: box.restarts._watches[JOB].left is left)
    one = await one.restart()  # it is on its disk as well
    assert one.restarts._watches[JOB].left is left
    await zero.close()  # with its ranks
    await eventually(lambda: any(NEXT in box.host.jobs for box in (one, two)))
    there = next(box for box in (one, two) if NEXT in box.host.jobs)
    await ran(there)
    record = there.host.jobs[NEXT].current_record()
    assert (record.left, record.spec.on_disconnect_s) == (left, 600.0)


@pytest.mark.timeout(120)
async def test_stop_at_a_witness_reaches_the_attempt_that_another_has_just_started(
    mesh: Mesh, quick: None
) -> None:
    zero, one, two = await watching(mesh)
    await zero.close()  # with its ranks
    two.unreachable = {"box-1"}
    await eventually(lambda: said(one)[1] == NEXT)
    two.unreachable = set()
    assert said(two)[0] is JobState.RESTARTING
    await two.ask("laptop", "POST", "stop", STOP)
    after = one.host.jobs[NEXT]
    await eventually(lambda: after.current_record().state is JobState.CANCELLED)
    assert after.current_record().cause == "stopped by laptop"


@pytest.mark.timeout(120)
async def test_keeper_that_did_not_answer_a_stop_learns_of_it(mesh: Mesh) -> None:
    zero, one, two = await together(mesh)
    one.unreachable = two.unreachable = {"box-0"}
    await one.ask("laptop", "POST", "stop", STOP)
    await eventually(lambda: zero.state() in OVER)
    record = zero.host.jobs[JOB].current_record()
    assert (record.state, record.cause) == (JobState.CANCELLED, "stopped by laptop")


@pytest.mark.timeout(120)
async def test_keeper_that_was_cut_off_from_a_stop_restarts_nothing(
    mesh: Mesh, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "ASK_S", (0.2, 0.2))
    monkeypatch.setattr(job, "HOST_LOST_S", job.HOST_LOST_S / 10)
    zero, one, two = await together(mesh)
    zero.unreachable = {"box-1", "box-2"}
    one.unreachable = two.unreachable = {"box-0"}
    await one.ask("laptop", "POST", "stop", STOP)
    await eventually(lambda: one.state() is JobState.CANCELLED)
    await eventually(lambda: zero.state() is JobState.RESTARTING)  # its lease is over
    for box in (zero, one, two):
        box.unreachable = set()
    await eventually(lambda: zero.state() is JobState.CANCELLED)
    assert zero.host.jobs[JOB].current_record().cause == "stopped by laptop"


async def test_last_attempt_starts_and_none_follows_it(mesh: Mesh, quick: None) -> None:
    zero = await counting(mesh, restarts=1)
    for ident in (JOB, NEXT):
        await ran(zero, ident)
        await killed(zero, ident)
    assert zero.host.jobs[JOB].current_record().successor == NEXT
    assert zero.host.jobs[NEXT].current_record().successor == ""


async def test_attempt_that_came_to_nothing_leaves_nothing(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    (box,) = await mesh.start("box-1")
    attempt = then(mesh, first(mesh), "box-2")
    path = f"/v1/jobs/{NEXT}"
    for staging, restart in ((False, False), (True, False), (True, True)):
        await box.ask("box-2", "POST", f"{path}/reserve", {"spec": attempt.chain})
        if staging:
            await box.ask("box-2", "POST", f"{path}/manifest", raw=MANIFEST)
        if restart:
            box = await box.restart()
        else:
            await box.ask("box-2", "POST", f"{path}/release")
        assert NEXT not in box.host.jobs
        assert not (box.home / "jobs" / NEXT).exists()
    assert "cannot be removed" not in caplog.text


async def copied_by(mesh: Mesh, zero: Box) -> Box:
    """Return the witness that holds what the job's rank has written."""
    boxes = [mesh.boxes[mesh.node(name)] for name in ("box-1", "box-2")]

    def holders() -> list[Box]:
        return [
            box
            for box in boxes
            if any(file.path == "count" for held in box.copies.held(JOB) for file in held.files)
        ]

    await eventually(lambda: bool(holders()))
    return holders()[0]


@pytest.mark.timeout(120)
async def test_copies_outlive_a_restart_and_not_the_job(mesh: Mesh, quick: None) -> None:
    zero = await counting(mesh, restarts=1)
    holder = await copied_by(mesh, zero)
    record = await killed(zero, JOB)
    assert record.successor == NEXT
    await eventually(lambda: JOB not in holder.restarts._watches)
    # Should the machine be lost now, the next attempt has none of its own yet.
    for name in ("box-0", "box-1", "box-2"):
        (held,) = wire.unpack(await holder.ask(name, "GET", f"/v1/copies/{JOB}"))
        assert [file["path"] for file in held["files"]] == ["count"]
    with pytest.raises(NotAllowedError):
        await holder.ask("other", "GET", f"/v1/copies/{JOB}")
    await ran(zero)
    await killed(zero, NEXT)
    await eventually(lambda: holder.copies.jobs() == set())


async def test_only_jobs_of_launchers_are_held_watched_and_agreed_to(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-1")
    submitter = {"submitter": mesh.node("box-0"), "submitter_name": "box-0"}
    spec = mesh.spec(
        "box-0",
        restarts=2,
        voters=tuple(map(mesh.node, ("box-0", "box-1", "box-2"))),
        **submitter,
    )
    forged = Signed(spec, spec.submitter, mesh.sign(spec, "box-0"))
    word = {"spec": forged.chain, "secretive": False, "sources": []}
    offer = {"spec": forged.chain, "slot": 0, "version": 1, "files": []}
    attempt = then(mesh, forged, "box-0")
    for path, body in (
        (f"/v1/watches/{JOB}", word),
        (f"/v1/copies/{JOB}", offer),
        (f"/v1/attempts/{NEXT}/agree", {"spec": attempt.chain}),
        (f"/v1/attempts/{NEXT}/hold", {"spec": attempt.chain}),
    ):
        with pytest.raises(NotAllowedError, match="may not launch jobs"):
            await box.ask("box-0", "POST", path, body)
    assert not (box.home / "attempts").exists()
    assert box.copies.jobs() == set()


@pytest.mark.parametrize("how", ["agreed", "told"])
async def test_nodes_of_the_next_attempt_may_read_what_the_one_before_has_left(
    mesh: Mesh, how: str
) -> None:
    (box,) = await mesh.start("box-1")
    one = first(mesh, "box-1", voters=("box-1", "box-2", "box-0"))
    await mesh.stage(one.spec)
    await box.ask("laptop", "POST", "release")
    for who, may in (("box-0", True), ("box-2", True), ("other", False), ("boss", True)):
        allowed = box.restarts.may_read(JOB, mesh.node(who), box.book.roles(mesh.node(who)))
        assert allowed is may, who
    change = restarts.Change(1, (Slot(mesh.node("other"), "other", 1),), (mesh.node("other"),))
    after = sign_change(mesh.keys["box-2"], mesh.roster.mesh, mesh.node("box-2"), one, change)
    path = f"/v1/attempts/{NEXT}/read"
    for who in ("other", "box-0"):
        with pytest.raises(NotAllowedError, match="only who signed"):
            await box.ask(who, "POST", path, {"spec": after.chain})
    if how == "agreed":
        await agree(box, "box-2", after)
    else:  # it was away when others agreed
        await box.ask("box-2", "POST", path, {"spec": after.chain})
    assert box.restarts.may_read(JOB, mesh.node("other"), ())
