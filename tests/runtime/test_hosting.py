"""Jobs on one node: who may do what, what is refused, and what a new agent takes over.

Real machines, folders, stores, shims and small Python ranks; only the network between the boxes
is a dictionary. Requests pass the same checks as at the door, whose own tests are in test_door.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from boxes import CHUNK, CONTENT, JOB, MANIFEST, ORDER, WAITS, Box, Mesh
from gpulayer_mesh.core import job as keeping
from gpulayer_mesh.core import tickets, wire
from gpulayer_mesh.core.hangs import Looked, Unanswered, plain_ip
from gpulayer_mesh.core.jobspec import (
    HostPhase,
    HostReport,
    JobKind,
    JobRecord,
    JobSpec,
    JobState,
    RankState,
    RankStatus,
    Slot,
)
from gpulayer_mesh.core.manifest import Manifest, pack_manifest
from gpulayer_mesh.core.ownfiles import FUNCTION_RESULT
from gpulayer_mesh.errors import (
    GpuLayerError,
    NotAllowedError,
    NotFoundError,
    PlacementBusyError,
    RemoteProtocolError,
    TransportError,
)
from gpulayer_mesh.runtime import hangs, hosting, livejob, preflight
from gpulayer_mesh.runtime.door import Stream
from shim_jobs import eventually

pytestmark = pytest.mark.network  # FreePorts binds


# --- reserve -------------------------------------------------------------------------------------

Forge = Callable[[Mesh], bytes]
FORGED: dict[str, tuple[type[GpuLayerError], Forge]] = {
    "signed by somebody else": (RemoteProtocolError, lambda m: m.sign(m.spec(), "other")),
    "signed with another key": (
        RemoteProtocolError,
        lambda m: m.sign(m.spec(), "other", sender=m.node("laptop")),
    ),
    "signed as something else": (RemoteProtocolError, lambda m: m.sign(m.spec(), kind="caps")),
    "of another mesh": (RemoteProtocolError, lambda m: m.sign(m.spec(), mesh="0" * 64)),
    "signed for another job": (
        RemoteProtocolError,
        lambda m: m.sign(m.spec(), audience="0" * 10),
    ),
    "of another job": (RemoteProtocolError, lambda m: m.sign(m.spec(id="1" * 10))),
    "names the node twice": (RemoteProtocolError, lambda m: m.sign(m.spec("box-0", "box-0"))),
    "names another twice": (
        RemoteProtocolError,
        lambda m: m.sign(m.spec("box-0", "box-1", "box-1")),
    ),
    "does not name the node": (RemoteProtocolError, lambda m: m.sign(m.spec("box-1"))),
    "leaves its folder": (RemoteProtocolError, lambda m: m.sign(m.spec(cwd="a/../.."))),
    "of another launcher": (
        NotAllowedError,
        lambda m: m.sign(m.spec(submitter=m.node("other")), "other"),
    ),
    "no envelope": (RemoteProtocolError, lambda m: b"x"),
}


@pytest.mark.parametrize("case", FORGED)
async def test_forged_job_reserves_nothing(mesh: Mesh, case: str) -> None:
    (box,) = await mesh.start("box-0")
    error, forge = FORGED[case]
    with pytest.raises(error):
        await box.ask("laptop", "POST", "reserve", {"spec": forge(mesh)})
    assert box.seen() == (None, [], (), ())


async def test_worker_may_not_launch_whatever_it_signs(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    signed = mesh.sign(mesh.spec(submitter=mesh.node("box-1")), "box-1")
    with pytest.raises(NotAllowedError):
        await box.ask("box-1", "POST", "reserve", {"spec": signed})
    # Nor by the hand of somebody who may.
    with pytest.raises(NotAllowedError):
        await box.ask("other", "POST", "reserve", {"spec": signed})
    assert box.seen() == (None, [], (), ())


async def test_launcher_without_the_worker_role_takes_no_job(mesh: Mesh) -> None:
    (box,) = await mesh.start("laptop")
    with pytest.raises(NotAllowedError, match="laptop is no worker"):
        await box.ask("laptop", "POST", "reserve", {"spec": mesh.sign(mesh.spec("laptop"))})


async def test_reserve_may_be_repeated_until_the_job_has_ended(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    body = {"spec": mesh.sign(mesh.spec())}
    for _ in range(2):
        report = await box.ask("laptop", "POST", "reserve", body)
        assert report.phase is HostPhase.RESERVED
    other = mesh.sign(mesh.spec(argv=(b"other.py",)))
    with pytest.raises(RemoteProtocolError, match="was here before"):
        await box.ask("laptop", "POST", "reserve", {"spec": other})
    await mesh.stage(mesh.spec(), HostPhase.STAGING)
    await box.ask("laptop", "POST", "release")
    assert box.reservations.grants == ()
    with pytest.raises(RemoteProtocolError, match="was here before"):
        await box.ask("laptop", "POST", "reserve", body)
    box = await box.restart()
    assert box.state() is JobState.CANCELLED
    with pytest.raises(RemoteProtocolError, match="was here before"):
        await box.ask("laptop", "POST", "reserve", body)
    assert box.reservations.grants == ()


@pytest.mark.parametrize("restart", [False, True])
async def test_reservation_given_back_leaves_nothing_and_may_be_tried_again(
    mesh: Mesh, restart: bool
) -> None:
    (box,) = await mesh.start("box-0")
    await mesh.stage(mesh.spec(), HostPhase.RESERVED)
    if restart:
        box = await box.restart()
    else:
        await box.ask("laptop", "POST", "release")
    assert box.seen() == (None, [], (), ())
    await mesh.stage(mesh.spec(attempt=1), HostPhase.RESERVED)
    assert box.phase() is HostPhase.RESERVED


async def test_only_a_newer_try_takes_the_place_of_a_reservation(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    await mesh.stage(mesh.spec(attempt=1), HostPhase.RESERVED)
    with pytest.raises(RemoteProtocolError, match="was here before"):  # a late copy
        await mesh.stage(mesh.spec(attempt=0), HostPhase.RESERVED)
    spec = mesh.spec(attempt=2, submitter=mesh.node("other"), submitter_name="other")
    signed = mesh.sign(spec, "other")
    with pytest.raises(RemoteProtocolError, match="was here before"):
        await box.ask("other", "POST", "reserve", {"spec": signed})
    await box.ask("laptop", "POST", "release", {"attempt": 0})
    assert [grant.processes for grant in box.reservations.grants] == [1]
    slots = (Slot(box.node, "box-0", 2),)
    await mesh.stage(mesh.spec(attempt=2, slots=slots), HostPhase.STAGING)
    assert [grant.processes for grant in box.reservations.grants] == [2]
    with pytest.raises(RemoteProtocolError, match="was here before"):  # it has begun
        await mesh.stage(mesh.spec(attempt=3), HostPhase.RESERVED)


async def test_busy_node_names_the_holder(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0", cpus=1)
    await mesh.stage(mesh.spec(), HostPhase.RESERVED)
    second = "1" * 10
    signed = mesh.sign(mesh.spec(id=second))
    with pytest.raises(PlacementBusyError, match=f"busy with job {JOB} from laptop"):
        await box.ask("laptop", "POST", f"/v1/jobs/{second}/reserve", {"spec": signed})
    assert list(box.host.jobs) == [JOB]
    assert not (box.home / "jobs" / second).exists()


# --- rights --------------------------------------------------------------------------------------

EVERYBODY = {"laptop", "box-0", "box-2", "boss", "other"}
JOBS = {"laptop", "box-0", "box-2"}  # the submitter, the keeper, another participant
RIGHTS = {
    "GET /v1/tickets": EVERYBODY,
    f"POST /v1/tickets/{JOB}": {"laptop"},
    f"POST /v1/tickets/{JOB}/drop": {"laptop"},
    f"POST /v1/tickets/{JOB}/stop": {"laptop", "boss"},
    "GET /v1/jobs": EVERYBODY,
    "GET ": EVERYBODY,
    "GET logs": EVERYBODY,
    "POST reserve": {"laptop"},
    "POST release": {"laptop"},
    "POST manifest": {"laptop"},
    "GET manifest": set(),
    "POST restore": {"laptop"},
    f"PUT /v1/chunks/{CHUNK.hex()}": {"laptop"},
    f"GET chunks/{CHUNK.hex()}": JOBS,
    "POST stage": {"laptop"},
    "POST preflight/open": {"laptop"},
    "POST preflight/check": {"laptop"},
    "POST port": {"laptop"},
    "POST path": {"box-0", "box-2"},
    "POST go": {"laptop"},
    "POST start": {"box-0"},
    "POST lease": {"box-0"},
    "POST halt": {"box-0"},
    "POST report": {"box-0", "box-2"},
    "POST stop": JOBS | {"boss"},
    "POST follow": JOBS,
    "GET files": JOBS | {"boss"},
    "GET file": JOBS | {"boss"},
}


async def test_every_route_has_its_rights_stated(mesh: Mesh) -> None:
    box = Box(mesh, "box-1")
    stated = set()
    for request in RIGHTS:
        method, path = request.split(" ")
        full = path if path.startswith("/") else f"/v1/jobs/{JOB}/{path}".rstrip("/")
        stated.add(id(box._route(method, full)[0].handler.__func__))  # type: ignore[attr-defined]
    assert stated == {id(route.handler.__func__) for route in box.door.routes()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("request_", RIGHTS)
@pytest.mark.parametrize("who", sorted(EVERYBODY))
async def test_member_may_do_what_its_place_in_the_job_allows(
    mesh: Mesh, request_: str, who: str
) -> None:
    (box,) = await mesh.start("box-1")
    spec = mesh.spec("box-0", "box-1", "box-2")
    box.unreachable = {"box-0", "box-2"}
    await box.ask("laptop", "POST", "reserve", {"spec": mesh.sign(spec)})
    await box.ask("laptop", "POST", "manifest", raw=MANIFEST)
    await box.ask("laptop", "PUT", f"/v1/chunks/{CHUNK.hex()}", raw=CONTENT, job=JOB)
    ticket = mesh.ticket()
    await box.ask("laptop", "POST", f"/v1/tickets/{JOB}", ticket)
    before = box.seen()
    method, path = request_.split(" ")
    bodies = {"reserve": {"spec": mesh.sign(spec)}, f"/v1/tickets/{JOB}": ticket}
    body = bodies.get(path)
    try:
        await box.ask(who, method, path, body, job=JOB)
        refused = False
    except NotAllowedError:
        refused = True
    except GpuLayerError:
        refused = False  # it may; the request itself is not one
    assert refused is (who not in RIGHTS[request_])
    if refused:
        assert box.seen() == before


async def test_unknown_job_is_not_found(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    made = {f"POST /v1/tickets/{JOB}", f"POST /v1/tickets/{JOB}/drop", "POST reserve"}
    for request_ in RIGHTS.keys() - {"GET /v1/jobs", "GET /v1/tickets"} - made:
        method, path = request_.split(" ")
        who = max(RIGHTS[request_], default="other")
        with pytest.raises(NotFoundError):
            await box.ask(who, method, path, job=JOB)


async def test_reservation_that_comes_and_goes_is_logged_once(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    (box,) = await mesh.start("box-0")
    caplog.set_level("INFO", "gpulayer.jobs")
    for attempt in range(3):
        await mesh.stage(mesh.spec(attempt=attempt), HostPhase.RESERVED)
        await box.ask("laptop", "POST", f"/v1/jobs/{JOB}/release", {"attempt": attempt})
    assert box.reservations.grants == ()
    assert caplog.messages == [f"job {JOB}: reserved 1 process(es) for laptop"]


# --- the queue -----------------------------------------------------------------------------------

OLDER, YOUNGER = "1" * 10, "2" * 10


async def test_ticket_keeps_the_node_for_its_job_until_it_is_dropped(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    await box.ask("laptop", "POST", f"/v1/tickets/{OLDER}", mesh.ticket(1, OLDER))
    standing = await box.ask("other", "POST", f"/v1/tickets/{JOB}", mesh.ticket(2, JOB, "other"))
    assert [ticket.job for ticket in standing.ahead] == [OLDER]
    with pytest.raises(PlacementBusyError, match=f"kept for job {OLDER} from laptop, which came"):
        await mesh.stage(mesh.spec(), HostPhase.RESERVED)
    assert box.reservations.grants == ()
    await box.ask("laptop", "POST", f"/v1/tickets/{OLDER}/drop")
    signed = mesh.sign(mesh.spec(id=YOUNGER))  # it has never waited
    with pytest.raises(PlacementBusyError, match=f"kept for job {JOB} from other"):
        await box.ask("laptop", "POST", f"/v1/jobs/{YOUNGER}/reserve", {"spec": signed})
    assert [ticket.job for ticket in await box.ask("boss", "GET", "/v1/tickets")] == [JOB]


async def test_ticket_that_ran_out_is_not_taken_up_by_the_next_agent(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tickets, "TICKET_S", 0.2)
    (box,) = await mesh.start("box-0")
    await box.ask("laptop", "POST", f"/v1/tickets/{OLDER}", mesh.ticket(1, OLDER))
    file = box.home / "queue"
    assert wire.unpack(file.read_bytes()) != []
    await eventually(lambda: wire.unpack(file.read_bytes()) == [])
    monkeypatch.setattr(tickets, "TICKET_S", 30.0)
    box = await box.restart()
    assert not await box.ask("boss", "GET", "/v1/tickets")


async def test_ticket_carries_the_name_that_the_roster_has(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    ticket = replace(mesh.ticket(), submitter_name="somebody")
    await box.ask("laptop", "POST", f"/v1/tickets/{JOB}", ticket)
    assert (await box.ask("boss", "GET", "/v1/tickets"))[0].submitter_name == "laptop"
    with pytest.raises(NotAllowedError):
        await box.ask("laptop", "POST", f"/v1/tickets/{OLDER}", ticket)
    with pytest.raises(NotAllowedError):
        await box.ask("box-1", "POST", f"/v1/tickets/{OLDER}", mesh.ticket(1, OLDER, "box-1"))
    with pytest.raises(NotAllowedError):
        await box.ask("other", "POST", f"/v1/tickets/{JOB}/drop")
    assert len(await box.ask("boss", "GET", "/v1/tickets")) == 1


@pytest.mark.parametrize(
    "wrong", [{"number": -1}, {"number": 2**60}, {"job": "x"}, {"why": "x" * 257}, {"name": 1}]
)
async def test_malformed_ticket_is_refused(mesh: Mesh, wrong: dict[str, object]) -> None:
    (box,) = await mesh.start("box-0")
    body = wire.unpack(wire.pack(mesh.ticket())) | wrong
    with pytest.raises(RemoteProtocolError):
        await box.ask("laptop", "POST", f"/v1/tickets/{JOB}", body)
    with pytest.raises(RemoteProtocolError):
        await box.ask("laptop", "POST", "/v1/tickets/no-job-id/drop")
    assert await box.ask("boss", "GET", "/v1/tickets") == ()


async def test_stopped_ticket_cannot_reserve_and_its_launcher_is_told(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    await box.ask("laptop", "POST", f"/v1/tickets/{JOB}", mesh.ticket())
    await box.ask("boss", "POST", f"/v1/tickets/{JOB}/stop")
    with pytest.raises(PlacementBusyError, match="stopped by boss"):
        await mesh.stage(mesh.spec(), HostPhase.RESERVED)
    assert (await box.ask("laptop", "POST", f"/v1/tickets/{JOB}", mesh.ticket())).stopped == "boss"
    assert await box.ask("boss", "GET", "/v1/tickets") == ()


async def test_who_waits_survives_the_agent(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    for number, job, by in ((1, OLDER, "laptop"), (2, JOB, "other"), (3, YOUNGER, "laptop")):
        await box.ask(by, "POST", f"/v1/tickets/{job}", mesh.ticket(number, job, by))
    await box.ask("laptop", "POST", f"/v1/tickets/{YOUNGER}/drop")
    mesh.remove("laptop")
    box = await box.restart()
    assert [ticket.job for ticket in await box.ask("boss", "GET", "/v1/tickets")] == [JOB]
    (box.home / "queue").write_bytes(b"torn")
    box = await box.restart()
    assert await box.ask("boss", "GET", "/v1/tickets") == ()


async def test_removed_launcher_waits_for_nothing(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    await box.ask("laptop", "POST", f"/v1/tickets/{OLDER}", mesh.ticket(1, OLDER))
    await box.ask("other", "POST", f"/v1/tickets/{JOB}", mesh.ticket(2, JOB, "other"))
    mesh.remove("laptop")
    box.host.enforce()
    assert [ticket.job for ticket in await box.ask("boss", "GET", "/v1/tickets")] == [JOB]


# --- before the start ----------------------------------------------------------------------------


async def test_chunk_outside_the_manifest_is_refused(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    await mesh.stage(mesh.spec(), HostPhase.STAGING)
    foreign = hashlib.sha256(b"foreign").digest()
    for name in (foreign.hex(), "zz", CHUNK.hex()[:10]):
        with pytest.raises(RemoteProtocolError, match="not part of the job"):
            await box.ask("laptop", "PUT", f"/v1/chunks/{name}", raw=b"foreign", job=JOB)
        with pytest.raises(RemoteProtocolError, match="not part of the job"):
            await box.ask("laptop", "GET", f"chunks/{name}")
    with pytest.raises(RemoteProtocolError, match="another hash"):
        await box.ask("laptop", "PUT", f"/v1/chunks/{CHUNK.hex()}", raw=b"shipped?", job=JOB)
    with pytest.raises(RemoteProtocolError, match="hash the job names"):
        await box.ask("laptop", "POST", "manifest", raw=pack_manifest(Manifest())[0])
    assert box.host.site.store.missing([CHUNK, foreign]) == [CHUNK, foreign]


@pytest.mark.parametrize(
    ("sources", "owners"),
    [(["box-0"], []), (["box-0"], [0, 0]), (["box-0"], [1]), (["box-0"], [-1]), (["other"], [0])],
)
async def test_stage_order_must_fit_the_job(
    mesh: Mesh, sources: list[str], owners: list[int]
) -> None:
    (box,) = await mesh.start("box-0")
    order = {
        "sources": [{"node": mesh.node(name), "addresses": []} for name in sources],
        "owners": owners,
    }
    await mesh.stage(mesh.spec(), HostPhase.RESERVED)
    with pytest.raises(RemoteProtocolError, match="before the manifest"):
        await box.ask("laptop", "POST", "stage", order)
    await box.ask("laptop", "POST", "manifest", raw=MANIFEST)
    with pytest.raises(RemoteProtocolError, match="stage order"):
        await box.ask("laptop", "POST", "stage", order)
    assert box.phase() is HostPhase.STAGING


async def test_chunk_comes_from_another_participant(mesh: Mesh) -> None:
    spec = mesh.spec("box-0", "box-1")
    first, second = await mesh.start("box-0", "box-1")
    await mesh.stage(spec, HostPhase.STAGING)
    sources = [{"node": box.node, "addresses": []} for box in (first, second)]
    staging = asyncio.create_task(
        second.ask("laptop", "POST", "stage", {"sources": sources, "owners": [0]})
    )
    await eventually(lambda: bool(second.calls))  # it waits there until the upload is done
    await first.ask("laptop", "PUT", f"/v1/chunks/{CHUNK.hex()}", raw=CONTENT, job=JOB)
    assert (await staging).phase is HostPhase.STAGED
    assert (second.work / "a.txt").read_bytes() == CONTENT


async def test_chunk_that_nobody_has_ends_the_job_here(mesh: Mesh) -> None:
    spec = mesh.spec("box-0", "box-1")
    (box,) = await mesh.start("box-1")
    await box.ask("laptop", "POST", "reserve", {"spec": mesh.sign(spec)})
    await box.ask("laptop", "POST", "manifest", raw=MANIFEST)
    order = {"sources": [{"node": mesh.node("box-0"), "addresses": []}], "owners": [0]}
    with pytest.raises(TransportError, match="box-0 cannot be reached"):
        await box.ask("laptop", "POST", "stage", order)
    report = box.host.jobs[JOB].report()
    assert (report.phase, box.reservations.grants) == (HostPhase.ENDED, ())
    assert "cannot be had" in report.problem


async def test_full_disk_is_told_and_leaves_no_half_job(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    (box,) = await mesh.start("box-0")
    real, full = Path.write_bytes, ["spec"]

    def write_bytes(path: Path, data: bytes) -> int:
        if path.name in full:
            real(path, data[:10])
            raise OSError(28, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    monkeypatch.setattr(livejob, "replace_file", write_bytes)
    with pytest.raises(GpuLayerError, match=r"cannot store the job: .*No space left"):
        await mesh.stage(mesh.spec(), HostPhase.RESERVED)
    assert box.seen() == (None, [], (), ())
    full[:] = ["manifest"]
    with pytest.raises(GpuLayerError, match=r"cannot store the manifest: .*No space left"):
        await mesh.stage(mesh.spec(), HostPhase.STAGING)
    assert box.phase() is HostPhase.RESERVED
    full.clear()
    await mesh.stage(mesh.spec())
    assert box.phase() is HostPhase.STAGED


async def test_go_needs_the_staged_keeper_and_may_be_repeated(mesh: Mesh) -> None:
    first, second = await mesh.start("box-0", "box-1")
    spec = mesh.spec("box-0", "box-1", code=WAITS)
    await mesh.stage(spec, HostPhase.STAGING)
    with pytest.raises(RemoteProtocolError, match="not staged"):
        await first.ask("laptop", "POST", "go", ORDER)
    await mesh.stage(spec)
    with pytest.raises(RemoteProtocolError, match="node of rank 0"):
        await second.ask("laptop", "POST", "go", ORDER)
    for _ in range(2):  # at once, and when it runs
        record = await first.ask("laptop", "POST", "go", ORDER)
        assert record.state in (JobState.STARTING, JobState.RUNNING)
    await eventually(lambda: first.state() is JobState.RUNNING)
    assert (await first.ask("laptop", "POST", "go", ORDER)).state is JobState.RUNNING
    for box in (first, second):
        (box.work / "finish").touch()
    await eventually(lambda: first.state() is JobState.SUCCEEDED)
    assert (await first.ask("laptop", "POST", "go", ORDER)).state is JobState.SUCCEEDED
    await eventually(lambda: second.state() is JobState.SUCCEEDED)  # it was told
    assert first.reservations.grants == second.reservations.grants == ()


# --- running -------------------------------------------------------------------------------------


async def running(mesh: Mesh, spec: JobSpec) -> list[Box]:
    """Start boxes and the job on them; return when every rank has printed."""
    boxes = await mesh.start(*(slot.name for slot in spec.slots))
    await mesh.stage(spec)
    await boxes[0].ask("laptop", "POST", "go", ORDER)
    await eventually(lambda: boxes[0].state() is JobState.RUNNING)
    for box in boxes:
        await eventually(lambda box=box: _logged(box))
    return boxes


def _logged(box: Box) -> bool:
    return any(log.stat().st_size for log in (box.home / "jobs" / JOB / "logs").iterdir())


async def test_report_speaks_for_its_sender_only(mesh: Mesh) -> None:
    boxes = await running(mesh, mesh.spec("box-0", "box-1", code=WAITS))
    own = boxes[1].host.jobs[JOB].report()
    died = RankStatus(0, RankState.EXITED, exit_code=1)
    forged = HostReport(JOB, boxes[0].node, HostPhase.ENDED, (died,))
    for report in (forged, replace(own, job="1" * 10)):
        with pytest.raises(RemoteProtocolError, match="only speak for its sender"):
            await boxes[0].ask("box-1", "POST", "report", report)
    with pytest.raises(RemoteProtocolError, match="reports ranks"):  # rank 0 is not its own
        await boxes[0].ask("box-1", "POST", "report", replace(own, ranks=(died,)))
    assert boxes[0].state() is JobState.RUNNING


async def test_lease_brings_the_record_of_this_job_only(mesh: Mesh) -> None:
    _, box = await running(mesh, mesh.spec("box-0", "box-1", code=WAITS))
    other = JobRecord(mesh.spec("box-0", "box-1"), JobState.FAILED, mesh.node("box-0"))
    with pytest.raises(RemoteProtocolError, match="another job"):
        await box.ask("box-0", "POST", "lease", other)
    assert box.state() is not JobState.FAILED


async def test_stop_at_a_participant_reaches_the_keeper(mesh: Mesh) -> None:
    first, second = await running(mesh, mesh.spec("box-0", "box-1", code=WAITS))
    await second.ask("boss", "POST", "stop", {"grace_s": None, "kill": False})
    assert ("box-0", f"/v1/jobs/{JOB}/stop") in second.calls
    await eventually(lambda: first.state() is second.state() is JobState.CANCELLED)
    assert first.phase() is second.phase() is HostPhase.ENDED


async def test_word_of_a_launcher_reaches_the_keeper_and_its_next_agent(mesh: Mesh) -> None:
    spec = mesh.spec("box-0", "box-1", code=WAITS, on_disconnect_s=600.0)
    first, second = await running(mesh, spec)
    assert (await second.ask("laptop", "POST", "follow")).spec == spec
    assert ("box-0", f"/v1/jobs/{JOB}/follow") in second.calls
    assert not first.host.jobs[JOB].current_record().left
    await second.ask("laptop", "POST", "follow", {"leaving": True})
    assert first.host.jobs[JOB].current_record().left
    await eventually(lambda: second.host.jobs[JOB].current_record().left)
    first = await first.restart()
    assert first.host.jobs[JOB].current_record().left
    second.unreachable = {"box-0"}
    await second.ask("laptop", "POST", "follow")  # it is missed only if that goes on
    with pytest.raises(TransportError):  # who leaves must know
        await second.ask("laptop", "POST", "follow", {"leaving": True})


async def test_stop_works_without_the_keeper(mesh: Mesh) -> None:
    _, second = await running(mesh, mesh.spec("box-0", "box-1", code=WAITS))
    second.unreachable = {"box-0"}
    await second.ask("laptop", "POST", "stop", {"grace_s": 0.0, "kill": True})
    await eventually(lambda: second.phase() is HostPhase.ENDED)
    assert "stopped by laptop" in second.host.jobs[JOB].report().problem


async def test_part_that_is_over_fails_the_job_of_a_silent_keeper(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "ASK_S", (0.05, 0.05))
    _, second = await running(mesh, mesh.spec("box-0", "box-1", code=WAITS))
    (second.work / "finish").touch()
    await eventually(lambda: second.phase() is HostPhase.ENDED)
    assert second.state() not in hosting.OVER  # the keeper's own ranks go on
    monkeypatch.setattr(hosting.hosted, "KEEPER_SILENT_S", 0.2)
    second.unreachable = {"box-0"}
    await eventually(lambda: second.state() is JobState.FAILED)
    failure = second.host.jobs[JOB].current_record().failure
    assert failure is not None
    assert failure.reason == "node of rank 0 lost: it did not answer for 0.2 s"


async def test_removing_the_keeper_fails_the_job_at_once(mesh: Mesh) -> None:
    _, second = await running(mesh, mesh.spec("box-0", "box-1", code=WAITS))
    mesh.remove("box-0")
    second.host.enforce()
    await eventually(lambda: second.state() is JobState.FAILED)
    assert second.phase() is HostPhase.ENDED
    failure = second.host.jobs[JOB].current_record().failure
    assert failure is not None
    assert failure.reason == "node of rank 0 lost: it was removed from the mesh"


# --- hangs ---------------------------------------------------------------------------------------


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for hangs come at once, and each two seconds after the one before."""
    seconds = itertools.count(0.0, hangs.LOOK_S)
    monkeypatch.setattr(hangs, "boot_clock", lambda: next(seconds))
    monkeypatch.setattr(hangs, "LOOK_S", 0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize("adopted", [False, True])
async def test_job_of_a_stopped_rank_fails_and_names_it(mesh: Mesh, adopted: bool) -> None:
    first, second = await running(mesh, mesh.spec("box-0", "box-1", code=WAITS))
    if adopted:
        second = await second.restart()
        await eventually(lambda: second.host.jobs[JOB].report().ranks[0].pid)
    pid = second.host.jobs[JOB].report().ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: first.state() is second.state() is JobState.FAILED)
    failure = first.host.jobs[JOB].current_record().failure
    assert failure is not None
    stopped = "node box-1: rank 1 has been stopped by a signal (SIGSTOP) for 20 s"
    assert (failure.rank, failure.node, failure.reason) == (None, "box-1", stopped)
    reports = first.host.jobs[JOB].current_record().reports
    assert all(status.stopped for report in reports for status in report.ranks)


@pytest.mark.usefixtures("quick_looks")
async def test_rank_for_which_nobody_waits_is_not_looked_at(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(hangs, "look")
    (box,) = await running(mesh, mesh.spec(code=WAITS))
    (box.work / "finish").touch()
    await eventually(lambda: box.state() is JobState.SUCCEEDED)


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize(
    ("agent", "dial", "fails"),
    [
        ("answers", False, True),
        ("answers", True, False),
        ("refuses", False, False),
        ("is silent", True, True),
    ],
)
async def test_connection_without_an_answer_fails_the_job_if_new_ones_do_not_get_through(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, agent: str, dial: bool, fails: bool
) -> None:
    waits = Unanswered(mesh.spec("box-1").slots[0], plain_ip("10.77.1.11"), 43211, 9, 18525)
    looks, dialled = 0, set()

    def look(pids: dict[int, int], *_: object) -> Looked:
        nonlocal looks
        looks += 1
        return Looked(dict.fromkeys(pids, "S"), (waits,) if 0 in pids else ())

    async def answers(host: str, port: int, deadline_s: float) -> bool:
        dialled.add((host, port))
        return dial

    async def refuse(ports: int) -> object:
        raise RemoteProtocolError("not now")

    first, second = await running(mesh, mesh.spec("box-0", "box-1", code=WAITS))
    if agent == "refuses":
        monkeypatch.setattr(second.door, "_open_preflight", refuse)
    if agent == "is silent":
        first.unreachable = {"box-1"}
    monkeypatch.setattr(preflight, "answers", answers)
    monkeypatch.setattr(hangs, "look", look)
    await eventually(lambda: looks > 100 or first.phase() is HostPhase.ENDED)
    assert ("box-1", f"/v1/jobs/{JOB}/path") in first.calls
    assert dialled == ({("10.77.1.11", 1)} if agent == "answers" else set())
    if not fails:
        assert first.state() is JobState.RUNNING
        return
    await eventually(lambda: first.host.jobs[JOB].current_record().failure is not None)
    failure = first.host.jobs[JOB].current_record().failure
    assert failure is not None
    assert failure.reason.startswith("node box-0: the network to box-1 is cut: nothing that was")


async def test_job_of_a_launcher_that_died_before_the_start_is_over(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting.hosted, "LEASE_S", 0.2)
    boxes = await mesh.start("box-0", "box-1")
    await mesh.stage(mesh.spec("box-0", "box-1"))
    for box in boxes:
        await eventually(lambda box=box: box.state() is JobState.CANCELLED)
        record = box.host.jobs[JOB].current_record()
        assert (record.cause, record.ended_age_s is None) == ("launcher silent for 0.2 s", False)
        assert box.reservations.grants == ()


async def test_viewer_waits_for_the_start_and_leaves_without_one(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    await mesh.stage(mesh.spec(), HostPhase.STAGING)
    assert await box.log(follow=False) == b""
    viewer = asyncio.create_task(box.log())
    await box.ask("laptop", "POST", "release")
    assert await viewer == b""


async def test_viewer_reads_to_the_end_and_files_have_any_name(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    await mesh.stage(mesh.spec(code=WAITS))
    viewer = asyncio.create_task(box.log())
    await box.ask("laptop", "POST", "go", ORDER)
    (box.work / "finish").touch()
    assert await viewer == b"up\n"
    outputs = await box.ask("laptop", "GET", "files")
    found = {(file.area, file.path) for file in outputs.files}
    assert found == {("out", "loss:0.3.txt"), ("work", "finish")}
    stream = await box.ask("laptop", "GET", "file", area="out", rank="0", path="loss:0.3.txt")
    assert isinstance(stream, Stream)
    assert b"".join([piece async for piece in stream.pieces]) == b"done"
    for path in ("../../spec", "/etc/passwd", "", "."):
        with pytest.raises(NotFoundError):
            await box.ask("laptop", "GET", "file", area="out", rank="0", path=path)
    for bad in ({"ranks": "x"}, {"ranks": "0,"}, {"from": "1"}, {"from": "1:" + "9" * 40}):
        with pytest.raises(RemoteProtocolError):
            await box.ask("laptop", "GET", "logs", **bad)


async def test_job_of_a_removed_submitter_ends(mesh: Mesh) -> None:
    (box,) = await running(mesh, mesh.spec(code=WAITS))
    mesh.remove("other")
    box.host.enforce()
    assert box.phase() is HostPhase.RUNNING
    mesh.remove("laptop")
    box.host.enforce()
    await eventually(lambda: box.state() is JobState.FAILED)
    failure = box.host.jobs[JOB].current_record().failure
    assert failure is not None
    assert "laptop was removed from the mesh" in failure.reason


# --- a new agent ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [JobKind.FUNCTION, JobKind.COMMAND])
@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("agent", ["stays", "comes back"])
async def test_function_must_leave_a_result(
    mesh: Mesh, kind: JobKind, returns: bool, agent: str
) -> None:
    place = f"os.environ['GPULAYER_OUT'] + '/{FUNCTION_RESULT}'"
    leave = f"os.makedirs(os.path.dirname({place})); open({place}, 'w').close()\n"
    (box,) = await running(mesh, mesh.spec(kind=kind, code=WAITS + leave * returns))
    if agent == "comes back":
        await box.crash()
    (box.work / "finish").touch()
    if agent == "comes back":
        await eventually(lambda: not box.shims.alive(box.work.parent))
        (box,) = await mesh.start("box-0")
    await eventually(lambda: box.state() in hosting.OVER)
    failure = box.host.jobs[JOB].current_record().failure
    if returns or kind is JobKind.COMMAND:
        assert (box.state(), failure) == (JobState.SUCCEEDED, None)
        return
    assert failure is not None
    assert (failure.rank, failure.code) == (0, 1)
    assert failure.reason.startswith("ended without a result")


async def test_new_agent_takes_over_running_ranks(mesh: Mesh) -> None:
    (box,) = await running(mesh, mesh.spec(code=WAITS))
    await box.crash()
    saved = box.work.parent / "record"
    os.utime(saved, (0.0, saved.stat().st_mtime - 100.0))
    (box,) = await mesh.start("box-0")
    assert box.phase() is HostPhase.RUNNING
    assert box.host.jobs[JOB].current_record().age_s > 100.0  # it ran on since it was saved
    assert [grant.job for grant in box.reservations.grants] == [JOB]
    (box.work / "finish").touch()
    await eventually(lambda: box.state() is JobState.SUCCEEDED)
    assert box.reservations.grants == ()
    assert await box.log() == b"up\n"
    assert (await box.ask("laptop", "GET", "files")).files


async def test_new_agent_learns_how_ranks_ended_meanwhile(mesh: Mesh) -> None:
    code = WAITS + "raise SystemExit(7)"
    (box,) = await running(mesh, mesh.spec(code=code))
    await box.crash()
    (box.work / "finish").touch()
    await eventually(lambda: not box.shims.alive(box.work.parent))
    (box,) = await mesh.start("box-0")
    await eventually(lambda: box.state() is JobState.FAILED)
    failure = box.host.jobs[JOB].current_record().failure
    assert failure is not None
    assert (failure.rank, failure.code) == (0, 7)
    assert box.reservations.grants == ()


async def test_ranks_of_an_agent_that_stays_away_end_before_the_job_is_forgotten(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hosting.hosted.agent_silence_s(mesh.spec("box-0")) == 300
    spec = mesh.spec("box-0", "box-1", code=WAITS)
    # Just after the others have given the node up.
    silence_s = hosting.hosted.agent_silence_s(spec)
    assert keeping.HOST_LOST_S < hosting.hosted.KEEPER_SILENT_S < silence_s == 22
    monkeypatch.setattr(hosting.hosted, "agent_silence_s", lambda _: 3.0)
    _, second = await running(mesh, spec)
    (rank,) = second.host.jobs[JOB].report().ranks
    await second.crash()
    await eventually(lambda: not second.shims.alive(second.work.parent))
    assert rank.pid is not None
    assert not psutil.pid_exists(rank.pid)


async def test_participants_new_agent_goes_on_under_the_keeper(mesh: Mesh) -> None:
    first, second = await running(mesh, mesh.spec("box-0", "box-1", code=WAITS))
    second = await second.restart()
    for box in (first, second):
        (box.work / "finish").touch()
    await eventually(lambda: first.state() is second.state() is JobState.SUCCEEDED)


async def test_job_that_did_not_start_is_history_for_a_new_agent(mesh: Mesh) -> None:
    (box,) = await mesh.start("box-0")
    await mesh.stage(mesh.spec())
    box = await box.restart()
    record = box.host.jobs[JOB].current_record()
    assert (record.state, record.cause) == (JobState.CANCELLED, "not started")
    assert box.reservations.grants == ()
    with pytest.raises(RemoteProtocolError, match="not staged"):
        await box.ask("laptop", "POST", "go", ORDER)


LOADERS = """
import os, time
for worker in range(4):
    if os.fork() == 0:
        if worker % 2:
            os.setsid()
        while True:  # no parent's end disturbs it
            time.sleep(600)
print("up", flush=True)
while True:
    time.sleep(600)
"""


ORDERS = list(itertools.permutations(("agent", "shim", "rank")))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
async def test_no_worker_of_a_rank_survives_whatever_is_killed_in_whatever_order(
    mesh: Mesh, order: tuple[str, ...]
) -> None:
    (box,) = await running(mesh, mesh.spec(code=LOADERS))
    folder = str(box.work)
    (rank,) = [one.pid for one in box.host.jobs[JOB].report().ranks]
    shim = psutil.Process(rank).ppid()
    assert len(_working_in(folder)) == 5
    for victim in order:
        if victim == "agent":
            await box.crash()
        else:
            with contextlib.suppress(ProcessLookupError):  # it went with the one before
                os.kill(shim if victim == "shim" else rank or 0, signal.SIGKILL)
    (box,) = await mesh.start("box-0")
    async with asyncio.timeout(10):
        await eventually(lambda: not _working_in(folder))
    await eventually(lambda: box.state() is JobState.FAILED)
    assert box.reservations.grants == ()


def _working_in(folder: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == folder:
                found.append(process.pid)
    return found


@pytest.mark.parametrize("why", ["submitter removed", "spec damaged"])
async def test_ranks_that_nobody_could_stop_are_ended_by_a_new_agent(mesh: Mesh, why: str) -> None:
    (box,) = await running(mesh, mesh.spec(code=WAITS))
    folder = box.work.parent
    pids = [rank.pid for rank in box.host.jobs[JOB].report().ranks]
    assert all(pid is not None and psutil.pid_exists(pid) for pid in pids)
    await box.crash()
    if why == "submitter removed":
        mesh.remove("laptop")
    else:
        (folder / why.split(" ")[0]).write_bytes(b"x")
    (folder.parent / "stray file").touch()  # whatever else lies there does no harm
    (box,) = await mesh.start("box-0")
    assert box.host.jobs == {}
    await eventually(lambda: not box.shims.alive(folder))
    assert not any(pid is not None and psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("damage", [b"", b"x", None])
async def test_running_job_goes_on_though_its_record_was_lost(
    mesh: Mesh, damage: bytes | None
) -> None:
    first, second = await running(mesh, mesh.spec("box-0", "box-1", code=WAITS))
    record = first.work.parent / "record"
    await first.crash()
    if damage is None:
        record.unlink()
    else:
        record.write_bytes(damage)
    (first,) = await mesh.start("box-0")
    assert first.state() is JobState.RUNNING
    for box in (first, second):
        (box.work / "finish").touch()
    await eventually(lambda: first.state() is second.state() is JobState.SUCCEEDED)


async def test_old_job_goes_where_the_disk_is_full_and_a_fresh_one_stays(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    (box,) = await mesh.start("box-0")
    await mesh.stage(mesh.spec())
    box = await box.restart()  # the job is history now
    folder = box.work.parent
    usage = SimpleNamespace(total=100 * 2**30, used=99 * 2**30, free=2**30)
    monkeypatch.setattr("gpulayer_mesh.runtime.hosting.shutil.disk_usage", lambda path: usage)
    box = await box.restart()
    await asyncio.sleep(0)
    assert folder.exists()
    record = folder / "record"
    old = record.stat().st_mtime - 2 * 3600
    os.utime(record, (old, old))  # its end, for an agent that starts
    box = await box.restart()
    await eventually(lambda: JOB not in box.host.jobs and not folder.exists())
