"""The commands against a real mesh: two agents on loopback, real jobs, real invitations."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from gpulayer.cli import main
from gpulayer.localmesh import LocalMesh

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(300)]

DEADLINE_S = 120.0  # generous: the machine may be busy with other tests


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    # one torch proof for the module, not one per agent of each mesh
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULAYER_HOME", str(tmp_path_factory.mktemp("user")))
        local = LocalMesh(tmp_path_factory.mktemp("mesh"), 2)
        try:
            asyncio.run(local.start())
            yield local
        finally:
            local.stop()


@pytest.fixture
def gpulayer(
    mesh: LocalMesh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., Done]:
    """Run a command as the laptop of the mesh, in an empty folder."""
    monkeypatch.setenv("GPULAYER_HOME", str(mesh.home))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def run(*arguments: str) -> Done:
        try:
            code = main(arguments)
        except SystemExit as e:
            code = int(e.code or 0)
        return Done(code, *capfd.readouterr())

    return run


def test_status_shows_every_node_within_100_columns(gpulayer: Callable[..., Done]) -> None:
    done = gpulayer("mesh", "status")
    assert done.code == 0
    rows = done.out.splitlines()
    assert max(map(len, rows)) <= 100
    assert [row.split()[:2] for row in rows[1:]] == [
        ["laptop", "no"], ["node-1", "alive"], ["node-2", "alive"],
    ]  # fmt: skip
    assert re.search(r"gpulayer: answered in \d+ ms by node-[12]", done.err)


def test_status_json_says_what_every_node_has(gpulayer: Callable[..., Done]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:  # the member that answers hears of another's proof of torch by gossip
        plain = json.loads(gpulayer("mesh", "status", "--json").out)
        laptop, *nodes = plain["nodes"]
        if all(node["torch"] for node in nodes) or time.monotonic() > deadline:
            break
    assert plain["schema"] == 1
    assert (laptop["state"], laptop["roles"]) == (None, ["worker", "launcher", "admin"])
    for node in nodes:
        assert node["state"] == "alive"
        assert node["roles"] == ["worker"]
        assert node["addresses"][0].startswith("127.0.0.1:")
        assert node["cpus"] >= 1
        assert node["memory_total_mib"] > 0
        assert node["python"].startswith("3.")
        assert re.match(r"\d+\.\d+", node["torch"])
        assert "cpu" in node["accelerators"]
        assert node["jobs"] == []


def test_doctor_finds_nothing_wrong_with_a_healthy_mesh(gpulayer: Callable[..., Done]) -> None:
    done = gpulayer("doctor", "--json")
    plain = json.loads(done.out)
    assert (plain["schema"], plain["here"]) == (1, "laptop")
    # What the machine that runs this lacks is no fault of the mesh.
    own = {"disk-full", "shared-memory-small", "multicast-blocked", "port-taken"}
    own |= {"container-without-multicast", "wsl-nat"}
    found = {verdict["name"] for verdict in plain["verdicts"] if not verdict["here"]}
    assert found <= own
    assert {"members", "pairs", "clock", "identity"} <= set(plain["checked"])
    errors = [verdict for verdict in plain["verdicts"] if verdict["severity"] == "error"]
    assert done.code == bool(errors)


def test_watching_status_without_a_terminal_repeats_it(mesh: LocalMesh) -> None:
    watch = subprocess.Popen(
        [sys.executable, "-m", "gpulayer.cli", "mesh", "status", "--watch", "--json"],
        env=os.environ | {"GPULAYER_HOME": str(mesh.home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watch.stdout is not None
    first, second = json.loads(watch.stdout.readline()), json.loads(watch.stdout.readline())
    assert first.keys() == second.keys()
    watch.send_signal(signal.SIGINT)
    assert watch.wait(DEADLINE_S) == 0
    watch.stdout.close()


SCRIPT = """
import os, sys
rank = os.environ["RANK"]
print("rank", rank, "got", sys.argv[1:])
print("careful", file=sys.stderr)
with open(os.path.join(os.environ["GPULAYER_OUT"], "model.txt"), "w") as file:
    file.write(rank)
sys.exit(7 if "fail" + rank in sys.argv else 0)
"""


def test_run_brings_output_and_files_home(gpulayer: Callable[..., Done]) -> None:
    Path("train.py").write_text(SCRIPT)
    arguments = ["a b", "", "--", "$HOME", "`x`", "é\n"]
    done = gpulayer("run", "--nodes", "2", "--", "python", "train.py", *arguments)
    assert done.code == 0, done.err
    assert sorted(re.sub(r"node-\d", "node", row) for row in done.out.splitlines()) == [
        f"[{rank}|node] rank {rank} got {arguments!r}" for rank in (0, 1)
    ]
    assert "gpulayer: plan for train.py: 2 nodes x 1 process on cpu" in done.err
    (folder,) = Path("gpulayer_jobs").iterdir()
    assert done.err.count(f"gpulayer: job {folder.name} runs train.py\n") == 1
    assert (folder / "model.txt").read_text() == "0"
    assert (folder / "rank1" / "model.txt").read_text() == "1"
    assert f"gpulayer: 2 files, 2 B -> {folder}" in done.err

    # the same job, from any member, any time later
    job = folder.name
    listed = json.loads(gpulayer("jobs", "--json").out)["jobs"][0]
    assert (listed["job"], listed["state"], listed["exit_code"]) == (job, "succeeded", 0)
    assert job in gpulayer("jobs").out
    assert gpulayer("logs", job[:6], "--ranks", "1").out == f"rank 1 got {arguments!r}\n"
    unnamed = gpulayer("logs", "")
    assert (unnamed.code, unnamed.out) == (2, "")
    assert "no job named" in unnamed.err
    absent = gpulayer("logs", job, "--ranks", "0,9")
    assert (absent.code, absent.out) == (2, "")
    assert f"job {job} has no rank 9: it has ranks 0 to 1" in absent.err
    records = [json.loads(row) for row in gpulayer("logs", job, "--json").out.splitlines()]
    assert {(r["rank"], r["stream"]) for r in records} == {
        (0, "out"), (0, "err"), (1, "out"), (1, "err"),
    }  # fmt: skip
    some = gpulayer("logs", job, "--stderr", "--raw", "--tail", "1", "--since", "1h")
    assert (some.code, some.out, some.err) == (0, "", "careful\n" * 2)
    assert gpulayer("attach", job).code == 0
    assert gpulayer("get", job, "rank1", "--to", "one").code == 0
    assert [p for p in Path("one").rglob("*") if p.is_file()] == [Path("one/rank1/model.txt")]
    assert gpulayer("get", job, "no-such-file").code == 1
    assert gpulayer("stop", job).code == 0


def test_first_failure_is_last_and_its_code_ours(gpulayer: Callable[..., Done]) -> None:
    Path("train.py").write_text(SCRIPT)
    done = gpulayer("run", "--nodes", "2", "--", "python", "train.py", "fail1")
    assert done.code == 7
    *_, said, last = done.err.splitlines()
    assert re.fullmatch(r"gpulayer: rank 1 on node-\d failed: exit code 7", said)
    assert last == "careful"


def test_single_process_can_be_piped(gpulayer: Callable[..., Done]) -> None:
    assert gpulayer("run", "--", "echo", "a", "b").out == "a b\n"


def test_impossible_request_exits_3_with_a_table(gpulayer: Callable[..., Done]) -> None:
    done = gpulayer("run", "--nodes", "9", "--", "true")
    assert done.code == 3
    assert "gpulayer: error: asked for 9 nodes" in done.err
    assert re.search(r"gpulayer:   NODE +COUNTS +WHY NOT", done.err)
    assert re.search(r"gpulayer:   laptop +no +runs no agent", done.err)


def test_dry_run_starts_nothing(gpulayer: Callable[..., Done]) -> None:
    before = gpulayer("jobs", "--json").out
    done = gpulayer("run", "--dry-run", "--nodes", "2", "--", "true")
    assert (done.code, done.out) == (0, "")
    assert "gpulayer: plan for true: 2 nodes x 1 process" in done.err
    states = [job["state"] for job in json.loads(gpulayer("jobs", "--json").out)["jobs"]]
    assert len(states) == len(json.loads(before)["jobs"])


def test_detached_job_can_be_stopped_and_attached(gpulayer: Callable[..., Done]) -> None:
    done = gpulayer("run", "--detach", "--nodes", "2", "--", "sleep", "600")
    assert (done.code, done.out) == (0, "")
    match = re.search(r"gpulayer attach (\w+)", done.err)
    assert match is not None
    assert f"gpulayer stop {match[1]}" in done.err
    stopped = gpulayer("stop", match[1], "--grace", "1")
    assert stopped.code == 0
    assert f"job {match[1]} cancelled" in stopped.err
    assert gpulayer("attach", match[1]).code == 130


def test_unknown_job_is_one_line(gpulayer: Callable[..., Done]) -> None:
    done = gpulayer("logs", "zzzz")
    assert done.code == 1
    assert done.err.splitlines()[0] == "gpulayer: error: no job 'zzzz'"


def viewing(mesh: LocalMesh, *arguments: str) -> subprocess.Popen[str]:
    """Start a command that follows a job; returns once it has shown the job's first line."""
    viewer = subprocess.Popen(
        [sys.executable, "-m", "gpulayer.cli", *arguments],
        env=os.environ | {"GPULAYER_HOME": str(mesh.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert viewer.stdout is not None
    assert viewer.stdout.readline() == "started\n"
    return viewer


def test_ctrl_c_in_a_viewer_leaves_the_job_running(
    gpulayer: Callable[..., Done], mesh: LocalMesh
) -> None:
    command = ["run", "--detach", "--", "sh", "-c", "echo started; exec sleep 600"]
    match = re.search(r"gpulayer attach (\w+)", gpulayer(*command).err)
    assert match is not None
    job = match[1]
    viewer = viewing(mesh, "attach", job)
    viewer.send_signal(signal.SIGINT)
    _, err = viewer.communicate(timeout=DEADLINE_S)
    assert viewer.returncode == 130
    assert f"gpulayer: job {job} keeps running" in err
    assert f"gpulayer attach {job}" in err
    assert f"gpulayer stop {job}" in err
    assert "Traceback" not in err
    (found,) = [j for j in json.loads(gpulayer("jobs", "--json").out)["jobs"] if j["job"] == job]
    assert found["state"] == "running"
    assert gpulayer("stop", "--kill", job).code == 0


@pytest.mark.parametrize("command", ["run", "attach"])
def test_on_exit_says_what_ctrl_c_does(
    gpulayer: Callable[..., Done], mesh: LocalMesh, command: str
) -> None:
    program = ["--", "sh", "-c", "echo started; exec sleep 600"]
    if command == "run":
        arguments = ["run", "--on-exit", "keep", "--on-disconnect", "1h", *program]
    else:
        match = re.search(r"gpulayer attach (\w+)", gpulayer("run", "--detach", *program).err)
        assert match is not None
        arguments = ["attach", "--on-exit", "stop", match[1]]
    viewer = viewing(mesh, *arguments)
    viewer.send_signal(signal.SIGINT)
    _, err = viewer.communicate(timeout=DEADLINE_S)
    assert viewer.returncode == 130
    found = json.loads(gpulayer("jobs", "--json").out)["jobs"][0]
    if command == "run":
        assert "stops once nobody on this machine has followed it for 1h00m" in err
        assert f"gpulayer: job {found['job']} keeps running" in err
        assert found["state"] == "running"
        assert gpulayer("stop", "--kill", found["job"]).code == 0
    else:
        assert f"job {found['job']} cancelled" in err
        assert (found["state"], found["cause"]) == ("cancelled", "stopped by laptop")


def test_member_by_invitation_may_work_not_launch_and_can_be_removed(
    gpulayer: Callable[..., Done],
    mesh: LocalMesh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invite = subprocess.Popen(
        [sys.executable, "-m", "gpulayer.cli", "mesh", "invite", "--ttl", "2m"],
        env=os.environ | {"GPULAYER_HOME": str(mesh.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert invite.stdout is not None
    line = invite.stdout.readline()
    assert re.fullmatch(r"gpl1-[a-z2-7]+\n", line)

    monkeypatch.setenv("GPULAYER_HOME", str(tmp_path / "other"))
    joined = gpulayer("mesh", "join", line, "--name", "guest")
    assert joined.code == 0, joined.err
    assert "as 'guest': worker" in joined.err
    _, said = invite.communicate(timeout=DEADLINE_S)
    assert invite.returncode == 0
    assert "guest joined as worker; 0 more may" in said

    assert gpulayer("mesh", "status").code == 0
    refused = gpulayer("run", "--", "true")
    assert refused.code == 5, refused.err
    assert gpulayer("mesh", "remove", "node-1").code == 5  # it does not hold the key
    assert gpulayer("mesh", "invite").code == 5
    assert gpulayer("mesh", "create").code == 2

    monkeypatch.setenv("GPULAYER_HOME", str(mesh.home))
    assert gpulayer("mesh", "remove", "nobody").code == 1
    assert gpulayer("mesh", "remove", "laptop").code == 1
    removed = gpulayer("mesh", "remove", "guest")
    assert removed.code == 0
    assert "guest" in removed.err
    assert "told: node-1, node-2" in removed.err
    assert "guest" not in gpulayer("mesh", "status").out

    monkeypatch.setenv("GPULAYER_HOME", str(tmp_path / "other"))
    assert gpulayer("mesh", "status").code in (5, 6)


# --- mesh local itself ---------------------------------------------------------------------------


def local(home: Path, *command: str) -> subprocess.Popen[str]:
    module = [sys.executable, "-m", "gpulayer.cli"]
    return subprocess.Popen(
        [*module, "mesh", "local", "--nodes", "1", "--", *command],
        env=os.environ | {"GPULAYER_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def assert_gone(said: str) -> None:
    """No folder, agent, shim or rank of the mesh that said this is left."""
    found = re.search(r"state in (\S+)", said)
    assert found is not None
    assert not Path(found[1]).exists()
    left = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = [*(process.info["cmdline"] or ()), *(process.info["environ"] or {}).values()]
        if any(found[1] in word for word in words):
            left.append(process)
    assert left == []


def test_local_mesh_passes_output_and_code_and_leaves_nothing(mesh: LocalMesh) -> None:
    code = "import os, sys; print(os.environ['GPULAYER_HOME']); sys.exit(7)"
    run = local(mesh.home.parent, "python", "-c", code)
    out, err = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 7, err
    assert re.fullmatch(r"\S+/laptop\n", out)
    assert len(err.splitlines()) <= 4
    assert_gone(err)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_local_mesh_takes_jobs_and_agents_down(mesh: LocalMesh, number: int) -> None:
    script = "gpulayer run --detach -- sleep 600 && echo running && exec sleep 600"
    run = local(mesh.home.parent, "sh", "-c", script)
    assert run.stdout is not None
    assert run.stdout.readline() == "running\n"
    if number == signal.SIGINT:
        os.killpg(run.pid, number)  # as a terminal does
    else:
        run.send_signal(number)
    started = time.monotonic()
    _, err = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 128 + number
    assert_gone(err)
    assert "Traceback" not in err
    assert time.monotonic() - started < DEADLINE_S
