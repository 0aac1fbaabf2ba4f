"""Kill agents, shims, ranks and launchers at random moments of jobs, and look for any loss.

    sudo python benchmarks/soak.py --kills 200 --seed 1

Three machines of the tests' LAN run jobs of three ranks that print numbered lines; without root,
or with --loopback, agents on loopback. After every job: it has ended, with the outcome its ranks
really came to; every line that a rank has printed is in the log, once; no rank started twice; no
process of it lives ten seconds after its end. At the end: what descriptors and memory the agents
have gained. Exits 1 when anything was lost; each loss is printed with its seed and its kills.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

import lan  # noqa: E402
from lan import Lan, Process  # noqa: E402
from meshes import GPULAYER, LanMesh, until  # noqa: E402

RANKS = 3
END_S = 90.0  # until a job must have ended: a reservation, a start or a lease may run out first
LEFT_S = 10.0  # after the end, until none of its processes may be left
FDS_GROWTH = 20  # connections to peers and viewers come and go; a leak grows with the jobs
RSS_GROWTH_MB = 25.0  # 50 finished jobs with their records are kept
FINAL = ("succeeded", "failed", "cancelled")

RANK = """
import os, sys, time
side, finish, codes = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
rank = os.environ["RANK"]
with open(f"{side}/{rank}.starts", "a") as file:
    file.write("x")
printed = os.open(f"{side}/{rank}.printed", os.O_WRONLY | os.O_CREAT)
number = 0
while not os.path.exists(finish):
    print("line", number)
    number += 1
    os.pwrite(printed, b"%d" % number, 0)
    time.sleep(0.005)
print("all", number)
with open(f"{side}/{rank}.code", "w") as file:
    file.write(codes[int(rank)])
sys.exit(int(codes[int(rank)]))
"""


@dataclass
class Job:
    """One job: what was planned, what was done to it, what is known to be true."""

    number: int
    side: Path  # where its ranks note the truth
    codes: list[int]
    kills: list[str] = field(default_factory=list)
    hurt: bool = False  # a rank or shim was killed, or an agent before all ranks ran
    launcher_killed: bool = False

    @property
    def name(self) -> str:
        return f"soak-{self.number}"

    def note(self, rank: int, what: str) -> str:
        path = self.side / f"{rank}.{what}"
        return path.read_text() if path.exists() else ""

    def runs(self) -> bool:
        """All ranks have printed, so the keeper has told everybody that the job runs."""
        return all(int(self.note(rank, "printed") or 0) > 40 for rank in range(RANKS))

    def ended_by_itself(self) -> bool:
        return all(self.note(rank, "code") for rank in range(RANKS))


class Loopback:
    """Stands in for a LAN where there is no root: hosts are state directories and ports."""

    def __init__(self, names: tuple[str, ...], folder: Path) -> None:
        self.hosts = {name: LoopHost(name, i, folder / name) for i, name in enumerate(names)}

    def __getitem__(self, name: str) -> LoopHost:
        return self.hosts[name]

    def close(self) -> None:
        for host in self.hosts.values():
            for pid in host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class LoopHost:
    """The part of `lan.Host` that the soak uses."""

    def __init__(self, name: str, index: int, folder: Path) -> None:
        self.name = name
        self.home = folder
        folder.mkdir()
        self._log_number = itertools.count()
        self._agent = ["--name", name, "--bind", "127.0.0.1", "--port", str(21_300 + 4 * index)]
        self.env = os.environ | {"GPULAYER_HOME": str(folder / "state"), "GPL_SOAK_HOST": name}

    def popen(self, argv: list[str], *, cwd: Path | None = None) -> Process:
        if argv[0].endswith("gpulayer-agent"):
            argv = [*argv, *self._agent]
        log = self.home / f"{next(self._log_number)}.log"
        with log.open("wb") as out:
            process = Process(
                argv,
                cwd=cwd or self.home,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        process.log = log
        return process

    def run(self, argv: list[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=timeout
        )

    def processes(self, containing: str = "") -> list[int]:
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = one.environ().get("GPL_SOAK_HOST") == self.name
                if ours and containing in " ".join(one.cmdline()):
                    found.append(one.pid)
        return found


class Soak:
    def __init__(self, mesh: LanMesh, folder: Path, seed: int) -> None:
        self.mesh = mesh
        self.folder = folder
        self.rng = random.Random(seed)
        self.violations: list[str] = []
        self.killed: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.jobs = 0
        self.lines = 0
        # Of each agent process: the first and the last look, and the largest growth of any.
        self.looks: dict[int, list[tuple[int, float]]] = {}
        self.script = folder / "project"
        self.script.mkdir()
        (self.script / "rank.py").write_text(RANK)

    def run(self, kills: int) -> None:
        while sum(self.killed.values()) < kills:
            left = kills - sum(self.killed.values())
            self.one_job(min(left, self.rng.choice((1, 1, 2, 3))))
            if self.jobs % 20 == 0:
                print(f"  {self.jobs} jobs, {sum(self.killed.values())} kills", flush=True)

    def one_job(self, kills: int) -> None:
        until(self.ready, END_S)
        self.look_at_agents()
        self.jobs += 1
        side = self.folder / f"side-{self.jobs}"
        side.mkdir()
        bad = self.rng.random() < 0.4
        codes = [0] * RANKS
        if bad:
            codes[self.rng.randrange(RANKS)] = self.rng.choice((3, 7, 42))
        job = Job(self.jobs, side, codes)
        finish = side / "finish"
        command = ["python", "rank.py", str(side), str(finish), ",".join(map(str, codes))]
        options = ["--nodes", str(RANKS), "--name", job.name, "--grace", "2"]
        launcher = self.mesh.laptop.popen(
            [GPULAYER, "run", *options, "--", *command], cwd=self.script
        )
        began = time.monotonic()
        for left in reversed(range(kills)):
            if self.rng.random() < 0.35:  # between the plan and the start
                sleep_until(began + self.rng.uniform(0.3, 2.5))
            else:
                self.await_running(job, launcher)
                time.sleep(self.rng.uniform(0.0, 0.8))
            if not left and self.rng.random() < 0.4:  # around the end
                finish.touch()
                time.sleep(self.rng.uniform(0.0, 0.3))
            self.kill_something(job, launcher)
        time.sleep(self.rng.uniform(0.0, 0.5))
        finish.touch()
        try:
            self.judge(job, launcher)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self.violate(job, f"{error}", launcher)

    def await_running(self, job: Job, launcher: Process) -> None:
        """Return once all ranks print, or when no start is in sight any more."""
        end = time.monotonic() + 20.0
        while not job.runs() and launcher.poll() is None and time.monotonic() < end:
            time.sleep(0.02)

    def ready(self) -> bool:
        done = self.mesh.laptop.run([GPULAYER, "mesh", "status", "--json"], timeout=60)
        if done.returncode != 0:
            return False
        rows = json.loads(done.stdout)["nodes"]
        free = [row for row in rows if row["state"] == "alive" and not row["jobs"]]
        return len([row for row in free if row["cpus"]]) == len(self.mesh.boxes)

    # Killing

    def kill_something(self, job: Job, launcher: Process) -> None:
        runs = job.runs()
        choices = [("agent", box.name, self.mesh.agents[box.name].pid) for box in self.mesh.boxes]
        if launcher.poll() is None:
            choices.append(("launcher", "laptop", launcher.pid))
        shims, ranks = self.processes_of(job)
        choices += [("shim", "", pid) for pid in shims] + [("rank", "", pid) for pid in ranks]
        kinds = sorted({kind for kind, _, _ in choices})
        # A launcher that dies before the start costs 30 s of waiting for its reservations.
        weights = [3 if kind == "agent" else 2 if runs else 1 for kind in kinds]
        kind = self.rng.choices(kinds, weights)[0]
        kind, name, pid = self.rng.choice([one for one in choices if one[0] == kind])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.killed[kind] += 1
            job.kills.append(f"{kind} {name}{' while it runs' if runs else ''}")
        if kind == "agent":
            self.mesh.agents[name].wait(5)
            self.mesh.start_agent(self.mesh.lan[name])
        elif kind == "launcher":
            launcher.wait(5)
            job.launcher_killed = True
        if kind in ("shim", "rank") or not runs:
            job.hurt = True

    def processes_of(self, job: Job) -> tuple[list[int], list[int]]:
        """Return the shims and the main processes of ranks that live now."""
        ranks = self.pids(str(job.side))
        shims = []
        for pid in ranks:
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(pid).parent()
                if parent is not None and any("shim.py" in part for part in parent.cmdline()):
                    shims.append(parent.pid)
        return sorted(set(shims)), ranks

    def pids(self, containing: str) -> list[int]:
        return [pid for box in self.mesh.boxes for pid in box.processes(containing)]

    # Judging

    def judge(self, job: Job, launcher: Process) -> None:
        if not job.launcher_killed:
            launcher.wait(END_S)
        record = self.final_record(job)
        if record is None:
            started = any(job.note(rank, "starts") for rank in range(RANKS))
            assert not started, "ranks started, and no node knows the job"
            assert job.launcher_killed or launcher.returncode != 0, "ended well without a job"
            self.ends["never placed"] += 1
            return
        until(lambda: not self.left_of(job, record["job"]), LEFT_S)
        self.ends[record["state"]] += 1
        self.check_outcome(job, record, launcher)
        self.check_lines(job, record, launcher)
        for rank in range(RANKS):
            starts = job.note(rank, "starts")
            assert len(starts) <= 1, f"rank {rank} started {len(starts)} times"

    def final_record(self, job: Job) -> dict[str, Any] | None:
        end = time.monotonic() + END_S
        while True:
            found = [one for one in self.records() if one["name"] == job.name]
            if not found and not self.pids(str(job.side)):
                return None
            if found and found[0]["state"] in FINAL:
                return found[0]
            states = [(one["state"], one["cause"], one["ranks"]) for one in found]
            assert time.monotonic() < end, f"no end within {END_S:g} s: {states}"
            time.sleep(0.2)

    def records(self) -> list[dict[str, Any]]:
        for _ in range(20):
            done = self.mesh.laptop.run([GPULAYER, "jobs", "--json"], timeout=60)
            if done.returncode == 0:
                jobs: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
                return jobs
            time.sleep(0.5)
        raise AssertionError(f"no list of jobs: {done.stderr}")

    def left_of(self, job: Job, ident: str) -> list[int]:
        return self.pids(str(job.side)) + self.pids(f"jobs/{ident}")

    def check_outcome(self, job: Job, record: dict[str, Any], launcher: Process) -> None:
        state, code = record["state"], record["exit_code"]
        planned = next((c for c in job.codes if c), 0)
        if state == "succeeded":
            assert job.ended_by_itself(), "a success of ranks that did not end"
            assert planned == 0, f"a success, and a rank ended with {planned}"
        if not job.hurt:
            assert job.ended_by_itself(), f"{state}: ranks were ended: {record['failure']}"
        if job.ended_by_itself() and not job.hurt:
            assert state == ("failed" if planned else "succeeded"), f"{state}, code {planned}"
            assert code == planned, f"exit code {code} instead of {planned}"
        if not job.launcher_killed and re.search(r"^gpulayer: job \w+ ", launcher.output(), re.M):
            assert launcher.returncode == code, f"launcher: {launcher.returncode}, job: {code}"

    def check_lines(self, job: Job, record: dict[str, Any], launcher: Process) -> None:
        logs = self.mesh.laptop.run([GPULAYER, "logs", record["job"]], timeout=60)
        assert logs.returncode == 0, logs.stderr
        shim_killed = any(kill.startswith("shim") for kill in job.kills)
        for rank in range(RANKS):
            numbers, ended = numbered(logs.stdout, rank)
            self.lines += len(numbers)
            assert numbers == list(range(len(numbers))), f"rank {rank}: {gaps(numbers)}"
            printed = int(job.note(rank, "printed") or 0)
            # What was in the pipe of a killed shim is lost with it.
            assert shim_killed or len(numbers) >= printed, f"{len(numbers)} of {printed} lines"
            assert ended or shim_killed or not job.note(rank, "code"), "the last line is missing"
            seen, _ = numbered(launcher.output(), rank)
            assert seen == list(range(len(seen))), f"the viewer's rank {rank}: {gaps(seen)}"
            if not job.launcher_killed and not job.hurt:
                assert len(seen) == len(numbers), f"the viewer got {len(seen)} of {len(numbers)}"

    def violate(self, job: Job, what: str, launcher: Process) -> None:
        tail = "\n    ".join(launcher.output().splitlines()[-6:])
        text = f"{job.name} after {job.kills}: {what}\n    {tail}"
        self.violations.append(text)
        print(f"VIOLATION {text}", flush=True)

    # Agents

    def look_at_agents(self) -> None:
        for agent in self.mesh.agents.values():
            process = psutil.Process(agent.pid)
            rss_mb = process.memory_info().rss / 1e6
            self.looks.setdefault(agent.pid, []).append((process.num_fds(), rss_mb))

    def growth(self) -> tuple[int, float]:
        """Return the largest growth of any agent between two jobs of its life."""
        long = [looks for looks in self.looks.values() if len(looks) > 1]
        fds = max((looks[-1][0] - looks[0][0] for looks in long), default=0)
        return fds, max((looks[-1][1] - looks[0][1] for looks in long), default=0.0)


def numbered(output: str, rank: int) -> tuple[list[int], bool]:
    said = re.findall(rf"^\[{rank}\|\S+\] (line|all) (\d+)$", output, re.MULTILINE)
    return [int(n) for word, n in said if word == "line"], any(word == "all" for word, _ in said)


def gaps(numbers: list[int]) -> str:
    wrong = [i for i, number in enumerate(numbers) if number != i][:3]
    return f"{len(numbers)} lines, wrong from {wrong}"


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


@contextlib.contextmanager
def formed(loopback: bool) -> Iterator[LanMesh]:
    names = ("laptop", "box-1", "box-2", "box-3")
    with contextlib.ExitStack() as stack:
        place: Any
        if loopback:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpl-soak-"))
            place = Loopback(names, Path(folder))
            stack.callback(place.close)
        else:
            place = stack.enter_context(Lan(names))
        mesh = LanMesh(place)
        mesh.form()
        yield mesh


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--loopback", action="store_true", help="no LAN, for want of root")
    args = parser.parse_args()
    why = lan.why_unavailable()
    loopback = args.loopback or why is not None
    where = "loopback" if loopback else "the test LAN"
    print(f"seed {args.seed}, {args.kills} kills, 3 agents on {where}", flush=True)
    began = time.monotonic()
    with formed(loopback) as mesh, tempfile.TemporaryDirectory(prefix="gpl-side-") as folder:
        soak = Soak(mesh, Path(folder), args.seed)
        soak.run(args.kills)
        until(soak.ready, END_S)
        soak.look_at_agents()
        fds, rss_mb = soak.growth()
        now = [soak.looks[agent.pid][-1] for agent in mesh.agents.values()]
    first = next(iter(soak.looks.values()))[0]
    took = time.monotonic() - began
    print(f"{soak.jobs} jobs in {took:.0f} s: {dict(sorted(soak.ends.items()))}")
    print(f"killed with SIGKILL: {dict(sorted(soak.killed.items()))}")
    print(f"log lines checked: {soak.lines}")
    print(f"the first agent at the start: {first[0]} descriptors, {first[1]:.1f} MB")
    ends = ", ".join(f"{fds} descriptors {rss:.1f} MB" for fds, rss in now)
    print(f"the agents at the end: {ends}")
    lives = Counter(min(len(looks), 10) for looks in soak.looks.values())
    print(f"largest growth in one agent's life: {fds} descriptors, {rss_mb:.1f} MB")
    print(f"agents by jobs they lived through (10: 10 and more): {dict(sorted(lives.items()))}")
    if fds > FDS_GROWTH or rss_mb > RSS_GROWTH_MB:
        soak.violations.append("an agent has grown")
    print(f"violations: {len(soak.violations)}")
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
