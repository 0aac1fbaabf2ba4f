"""What both kinds of soak share: the mesh as a user sees it, its processes, and what was found.

It decides neither what is killed when, nor what must come of it.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from meshes import GPULAYER, LanMesh, until
from truth import RANKS, Job, came_home

END_S = 90.0  # until a job must have ended: a reservation, a start or a lease may run out first
LEFT_S = 10.0  # after the end, until none of its processes may be left
FDS_GROWTH = 20  # connections to peers and viewers come and go; a leak grows with the jobs
RSS_GROWTH_MB = 25.0  # 50 finished jobs with their records are kept
FINAL = ("succeeded", "failed", "cancelled")
# What no agent may say, whatever happens around it.
FAULT = re.compile(r"^Traceback |never retrieved|never awaited|Unclosed|met a fault", re.MULTILINE)


class Soak:
    """One mesh, what was done to it and what came of it.

    Args:
        evidence: where the logs of all hosts are kept when something was lost.
    """

    def __init__(self, mesh: LanMesh, folder: Path, seed: int, evidence: Path | None) -> None:
        self.mesh = mesh
        self.folder = folder
        self.evidence = evidence
        self.rng = random.Random(seed)
        self.violations: list[str] = []
        self.done: Counter[str] = Counter()  # kind of harm -> how often
        self.ends: Counter[str] = Counter()  # outcome -> how often
        self.jobs = 0
        self.lines = 0
        # Of each agent process: descriptors and MB, whenever we looked.
        self.looks: dict[int, list[tuple[int, float]]] = {}
        self.script = folder / "project"
        self.script.mkdir()
        shutil.copy(Path(__file__).with_name("rank.py"), self.script)

    # Jobs

    def start_job(self, codes: list[int], pause_s: float, *options: str) -> Job:
        self.jobs += 1
        side = self.folder / f"side-{self.jobs}"
        side.mkdir()
        job = Job(self.jobs, side, codes)
        stubborn = self.rng.choice("01")
        settings = [str(side), str(job.finish), ",".join(map(str, codes)), str(pause_s), stubborn]
        options = ("--nodes", str(RANKS), "--name", job.name, "--grace", "2", *options)
        job.launcher = self.mesh.laptop.popen(
            [GPULAYER, "run", *options, "--", "python", "rank.py", *settings], cwd=self.script
        )
        return job

    def ready(self) -> bool:
        """Every box is alive and idle."""
        done = self.mesh.laptop.run([GPULAYER, "mesh", "status", "--json"], timeout=60)
        if done.returncode != 0:
            return False
        rows = json.loads(done.stdout)["nodes"]
        free = [row for row in rows if row["state"] == "alive" and not row["jobs"]]
        return len([row for row in free if row["cpus"]]) == len(self.mesh.boxes)

    def records_of(self, job: Job) -> list[dict[str, Any]]:
        """Return what the mesh knows of a job's attempts, the newest first."""
        for _ in range(20):
            done = self.mesh.laptop.run([GPULAYER, "jobs", "--json"], timeout=60)
            if done.returncode == 0:
                jobs = json.loads(done.stdout)["jobs"]
                found = [one for one in jobs if one["name"] == job.name]
                return sorted(found, key=lambda one: -one["restart"])
            time.sleep(0.5)
        raise AssertionError(f"no list of jobs: {done.stderr}")

    # Processes

    def pids(self, containing: str) -> list[int]:
        return [pid for box in self.mesh.boxes for pid in box.processes(containing)]

    def check_home(self, job: Job, record: dict[str, Any], *, may_miss: bool) -> None:
        """The launcher ended as its job did, and all files are at home or can be had later."""
        launcher, code = job.launcher, record["exit_code"]
        told = re.search(r"^gpulayer: job \w+ \w+ after ", launcher.output(), re.MULTILINE)
        if job.launcher_killed or told is None:
            return
        succeeded = record["state"] == "succeeded"
        home = self.script / "gpulayer_jobs" / (record["origin"] or record["job"])
        if succeeded and "did not come home" in launcher.output():
            assert may_miss, "files did not come home"
            code = 1
            until(self.ready, END_S)
            get = [GPULAYER, "get", record["job"], "--to", str(home)]
            got = self.mesh.laptop.run(get, timeout=60)
            assert got.returncode == 0, f"files cannot be had later: {got.stderr}"
        assert launcher.returncode == code, f"launcher: {launcher.returncode}, job: {code}"
        if succeeded:
            came_home(job, record["restart"], home)

    def processes_of(self, job: Job) -> tuple[list[int], list[int]]:
        """Return the shims and the main processes of ranks that live now."""
        ranks = self.pids(str(job.side))
        shims = []
        for pid in ranks:
            try:
                parent = psutil.Process(pid).parent()
                if parent is not None and any("shim.py" in part for part in parent.cmdline()):
                    shims.append(parent.pid)
            except psutil.Error:  # it has just ended
                continue
        return sorted(set(shims)), ranks

    def left_of(self, job: Job, idents: list[str]) -> list[int]:
        left = self.pids(str(job.side))
        return left + [pid for ident in idents for pid in self.pids(f"jobs/{ident}")]

    # What was found

    def came_to(self, job: Job, end: str) -> None:
        self.ends[end] += 1
        if self.evidence is not None:
            with (self.evidence / "jobs").open("a") as file:
                file.write(f"{job.name} {end}, attempts {job.attempts()}, after {job.harms}\n")

    def violate(self, job: Job, what: str) -> None:
        tail = "\n    ".join(job.launcher.output().splitlines()[-6:])
        text = f"{job.name} after {job.harms}: {what}\n    {tail}"
        self.violations.append(text)
        print(f"VIOLATION {text}", flush=True)
        if self.evidence is not None:
            kept = self.evidence / job.name
            shutil.copytree(job.side, kept / "side")
            for log in self.mesh.lan.logs():
                shutil.copy(log, kept / f"{log.parent.parent.name}-{log.name}")
            (kept / "records.json").write_text(json.dumps(self.records_of(job), indent=1))
            (kept / "what").write_text(text)
        for record in self.records_of(job):  # or all jobs after it would wait for it
            if record["state"] not in FINAL:
                self.mesh.laptop.run([GPULAYER, "stop", "--kill", record["job"]], timeout=60)
        job.finish.touch()

    def look_at_agents(self) -> None:
        for box in self.mesh.boxes:
            agent = self.mesh.agents[box.name]
            if agent.poll() is not None:
                self.violations.append(f"the agent of {box.name} ended: {agent.output()[-2000:]}")
                print(f"VIOLATION {self.violations[-1]}", flush=True)
                self.mesh.start_agent(box)
                continue
            process = psutil.Process(agent.pid)
            look = (process.num_fds(), process.memory_info().rss / 1e6)
            self.looks.setdefault(agent.pid, []).append(look)

    def growth(self) -> tuple[int, float]:
        """Return the largest growth of any agent between two jobs of its life."""
        long = [looks for looks in self.looks.values() if len(looks) > 1]
        fds = max((looks[-1][0] - looks[0][0] for looks in long), default=0)
        return fds, max((looks[-1][1] - looks[0][1] for looks in long), default=0.0)

    def check_agents(self) -> None:
        """Judge all that the agents have said and gained in their lives."""
        for log in self.mesh.lan.logs():
            if "agent" in log.name and (found := FAULT.search(log.read_text(errors="replace"))):
                around = log.read_text(errors="replace")[max(0, found.start() - 300) :][:2000]
                self.violations.append(f"{log.parent.parent.name}'s agent says: {around}")
                print(f"VIOLATION {self.violations[-1]}", flush=True)
        fds, rss_mb = self.growth()
        if fds > FDS_GROWTH or rss_mb > RSS_GROWTH_MB:
            self.violations.append(f"an agent has grown by {fds} descriptors, {rss_mb:.1f} MB")

    def settle(self) -> None:
        """Wait until nothing is left of any job, then look at the agents."""
        until(self.ready, END_S)
        self.look_at_agents()

    def report(self, took_s: float) -> None:
        fds, rss_mb = self.growth()
        now = [self.looks[agent.pid][-1] for agent in self.mesh.agents.values()]
        first = next(iter(self.looks.values()))[0]
        print(f"{self.jobs} jobs in {took_s:.0f} s: {dict(sorted(self.ends.items()))}")
        print(f"harms: {dict(sorted(self.done.items()))}")
        print(f"log lines checked: {self.lines}")
        print(f"the first agent at the start: {first[0]} descriptors, {first[1]:.1f} MB")
        ends = ", ".join(f"{fds} descriptors {rss:.1f} MB" for fds, rss in now)
        print(f"the agents at the end: {ends}")
        lives = Counter(min(len(looks), 10) for looks in self.looks.values())
        print(f"largest growth in one agent's life: {fds} descriptors, {rss_mb:.1f} MB")
        print(f"agents by jobs they lived through (10: 10 and more): {dict(sorted(lives.items()))}")


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
