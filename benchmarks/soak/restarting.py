"""Jobs with restarts: besides single processes, whole machines are lost, or cut off for a while.

Three of four boxes run a job; at most one box is away at any moment, so that a next attempt is
always possible. After every job: it has ended, and well where a restart was left; no attempt had
a rank while another one lived; every line printed is in the log once and in order, all of them
where no machine was lost; what was written ten seconds before the end of an attempt was there in
the next; no attempt followed where nothing had happened to its ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from common import FINAL, LEFT_S, Soak
from lan import Host
from meshes import GPULAYER, until
from truth import (
    RANKS,
    Job,
    files_came_back,
    gaps,
    never_two_at_once,
    numbered,
    started_once,
)

PAUSE_S = 0.01  # between two lines of a rank, and two notes that it lives
KEPT_S = 10.0  # files that rested so long before the end of an attempt are in the next one
NEXT_S = 90.0  # from a harm until an attempt runs: a lost machine, a try that burns, a loaded host
END_S = 180.0  # from the last harm to the job's end: two such attempts
BEAT_S = 0.5  # a rank that noted nothing for so long is gone, or the machine is overloaded
UNNOTICED_S = 6.0  # a cut for so long costs nothing: three renewals of a lease
NOTICED_S = 45.0  # one for so long costs an attempt
RESTARTS_MAX = 20


@dataclass
class Away:
    """A box that is cut off, lost or without its agent, until it comes back."""

    box: Host
    kind: str
    back_at: float  # monotonic


class Restarting(Soak):
    """Ends of attempts that the harms explain are counted in `allowed`, per job."""

    away: Away | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.found_again = 0  # ranks whose files were compared with those of the attempt before
        self.times: dict[str, list[float]] = {}  # kind of harm -> until the next attempt ran

    def run(self, harms: int) -> None:
        while sum(self.done.values()) < harms:
            left = harms - sum(self.done.values())
            self.one_job(min(left, self.rng.choice((1, 2, 3))))
            if self.jobs % 5 == 0:
                print(f"  {self.jobs} jobs, {sum(self.done.values())} harms", flush=True)

    def one_job(self, harms: int) -> None:
        self.settle()
        codes = [0] * RANKS
        if self.rng.random() < 0.15:
            codes[self.rng.randrange(RANKS)] = self.rng.choice((3, 7, 42))
        # Enough for every harm, and for one more try each that comes to nothing; or too few.
        self.restarts = self.rng.choice((1, 2 * harms + 1, 2 * harms + 1))
        self.allowed = 0
        self.hit = -1  # the newest attempt when something happened that may end it
        self.hits: list[tuple[str, float]] = []  # kind and time of what may end an attempt
        self.gone: dict[str, list[tuple[float, float]]] = {}  # host -> from when to when
        self.lost: list[str] = []
        self.touched: set[str] = set()  # hosts whose agent was not always there
        job = self.start_job(codes, PAUSE_S, "--restarts", str(self.restarts))
        for left in reversed(range(harms)):
            if self.rng.random() < 0.7:
                self.wait_for(lambda: self.settled(job), job, NEXT_S)
                self.pass_time(self.rng.uniform(0.0, 15.0))
            else:  # at any moment: before the start, between two attempts
                self.pass_time(self.rng.uniform(0.3, 25.0))
            if not left and self.rng.random() < 0.3:  # around the end
                job.finish.touch()
                time.sleep(self.rng.uniform(0.0, 0.5))
            self.harm(job)
        if self.rng.random() < 0.7:
            self.wait_for(lambda: self.settled(job), job, NEXT_S)
        self.pass_time(self.rng.uniform(0.0, 5.0))
        job.finish.touch()
        try:
            self.judge(job)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self.violate(job, f"{error}")
        if self.away is not None:
            self.bring_back()

    # Time

    def pass_time(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.tick()

    def tick(self) -> None:
        if self.away is not None and time.monotonic() >= self.away.back_at:
            self.bring_back()
        time.sleep(0.02)

    def wait_for(self, done: Callable[[], bool], job: Job, seconds: float) -> None:
        """Wait for something that may never come, as long as the job is not over."""
        end = time.monotonic() + seconds
        while not done() and job.launcher.poll() is None and time.monotonic() < end:
            self.tick()

    def settled(self, job: Job) -> bool:
        """An attempt runs to which nothing has happened yet."""
        attempt = max(job.attempts(), default=-1)
        if attempt <= self.hit or not job.all_print(attempt):
            return False
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        return all(now - job.beat(attempt, rank) < BEAT_S for rank in range(RANKS))

    # Harm

    def harm(self, job: Job) -> None:
        settled = self.settled(job)
        kinds = {"agent": 3, "launcher": 1}
        if self.away is None:
            kinds |= {"cut": 4, "lost": 4, "agent for a while": 1}
        shims, ranks = self.processes_of(job)
        if ranks:
            kinds |= {"shim": 2, "rank": 2}
        if job.launcher.poll() is not None:
            del kinds["launcher"]
        kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
        box = self.rng.choice([box for box in self.mesh.boxes if box.processes("gpulayer-agent")])
        attempt = max(job.attempts(), default=-1)
        hosts = [job.started(attempt, rank)[1] for rank in range(RANKS)]
        self.done[kind] += 1
        how = f" {box.name}" if kind not in ("launcher", "shim", "rank") else ""
        may_cost = True
        if how:
            self.touched.add(box.name)
        match kind:
            case "agent":
                self.kill_agent(box)
                self.mesh.start_agent(box)
                may_cost = not settled
            case "launcher":
                job.launcher.kill()
                job.launcher.wait(5)
                job.launcher_killed = True
                may_cost = False
            case "shim" | "rank":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.rng.choice(shims if kind == "shim" and shims else ranks), 9)
            case "cut":
                longest = self.rng.choice((UNNOTICED_S, 30.0, 2 * NOTICED_S))
                seconds = self.rng.uniform(1.0, longest)
                box.cut()
                self.leave(box, kind, seconds)
                how += f" for {seconds:.0f} s"
                may_cost = seconds > UNNOTICED_S or not settled
            case "lost":
                box.cut()
                box.kill_all()
                self.lost.append(box.name)
                self.leave(box, kind, self.rng.uniform(0.5, 60.0))
            case "agent for a while":
                self.kill_agent(box)
                seconds = self.rng.uniform(3.0, 40.0)
                self.leave(box, kind, seconds)
                how += f" {seconds:.0f} s"
        if how and settled and box.name not in hosts:
            may_cost = False
        if may_cost:
            self.allowed += 1 if settled else 2
            self.hit = attempt
            self.hits.append((kind, time.clock_gettime(time.CLOCK_BOOTTIME)))
        stage = f"while attempt {attempt} runs" if settled else f"after attempt {attempt} began"
        at = time.clock_gettime(time.CLOCK_BOOTTIME)
        job.harms.append(f"{at:.1f} {kind}{how} {stage if attempt >= 0 else 'before the start'}")

    def kill_agent(self, box: Host) -> None:
        agent = self.mesh.agents[box.name]
        os.kill(agent.pid, signal.SIGKILL)
        agent.wait(5)

    def leave(self, box: Host, kind: str, seconds: float) -> None:
        self.away = Away(box, kind, time.monotonic() + seconds)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.gone.setdefault(box.name, []).append((now, now + seconds))

    def bring_back(self) -> None:
        assert self.away is not None
        box, kind, self.away = self.away.box, self.away.kind, None
        if kind in ("cut", "lost"):
            box.restore()
        if kind != "cut":
            self.mesh.start_agent(box)

    def report(self, took_s: float) -> None:
        super().report(took_s)
        print(f"ranks whose files were compared with the attempt before: {self.found_again}")
        for kind, times in sorted(self.times.items()):
            middle, longest = statistics.median(times), max(times)
            print(f"next attempt after {kind}: {middle:.1f} s, {longest:.1f} s at most", end="")
            print(f", {len(times)} times")

    # Judging

    def judge(self, job: Job) -> None:
        if not job.launcher_killed:
            self.wait_for(lambda: False, job, END_S)
            assert job.launcher.poll() is not None, f"no end within {END_S:g} s"
        final = self.final_records(job)
        if not final:
            assert not job.attempts(), "ranks started, and no node knows the job"
            assert job.launcher_killed or job.launcher.returncode != 0, "ended well without a job"
            self.came_to(job, "never placed")
            return
        idents = [record["job"] for record in final]
        until(lambda: not self.left_of(job, idents), LEFT_S)
        if self.away is not None:  # what it has of the log is asked for
            self.bring_back()
        until(self.ready, END_S)
        until(lambda: all(one["state"] in FINAL for one in self.records_of(job)), LEFT_S)
        self.came_to(job, final[0]["state"])
        self.ends["restarts"] += max(job.attempts(), default=0)
        started_once(job)
        never_two_at_once(job)
        self.check_outcome(job, final[0])
        self.check_lines(job, final[-1]["job"])
        self.found_again += files_came_back(job, self.gone, KEPT_S)
        self.take_times(job)

    def take_times(self, job: Job) -> None:
        """Note how long after a harm the next attempt ran, where only one explains it."""
        for before, attempt in itertools.pairwise(job.attempts()):
            began, after = (
                min(when for when, _ in map(partial(job.started, one), range(RANKS)) if when)
                for one in (before, attempt)
            )
            hits = [(kind, at) for kind, at in self.hits if began < at < after]
            if len(hits) == 1:
                self.times.setdefault(hits[0][0], []).append(after - hits[0][1])

    def final_records(self, job: Job) -> list[dict[str, Any]]:
        """Return the records of all attempts, the newest first, once the job is over."""
        end = time.monotonic() + END_S
        while True:
            found = self.records_of(job)
            if not found and not self.pids(str(job.side)):
                return []
            if found and self.is_over(found[0]):
                return found
            states = [(one["restart"], one["state"], one["waiting"]) for one in found]
            assert time.monotonic() < end, f"no end within {END_S:g} s: {states}"
            self.pass_time(0.3)

    @staticmethod
    def is_over(newest: dict[str, Any]) -> bool:
        """Return whether no attempt follows; who was cut off may say so too early."""
        if newest["state"] not in FINAL or newest["successor"]:
            return False
        why = (newest["failure"] or {}).get("reason", "")
        used = newest["restart"] == newest["restarts"]
        return newest["state"] != "failed" or used or "not restarted" in why

    def check_outcome(self, job: Job, record: dict[str, Any]) -> None:
        state, launcher = record["state"], job.launcher
        last = record["restart"]
        reason = (record["failure"] or {}).get("reason", "")
        used = last == self.restarts or f"all {self.restarts} restarts are used" in reason
        why = f"{state} in attempt {last} of {self.restarts}, {record['failure']}"
        if state == "succeeded":
            assert job.ended_by_itself(last), "a success of ranks that did not end"
            assert job.planned == 0, f"a success, and a rank ended with {job.planned}"
        elif job.attempts():
            assert state == "failed", why
            assert used, f"{why}: not started again"
            explained = job.planned or self.allowed > self.restarts
            assert explained, f"{why}: harms explain {self.allowed}"
        told = re.findall(r"^gpulayer: job (\w+) (\w+) after ", launcher.output(), re.MULTILINE)
        assert told in ([], [(record["job"], state)]), f"{why}, but the user was told {told}"
        ended_badly = self.restarts if job.planned else 0
        assert last <= self.allowed + ended_badly, f"{why}: harms explain {self.allowed}"
        hosts = {job.started(last, rank)[1] for rank in range(RANKS)}
        self.check_home(job, record, may_miss=bool(hosts & self.touched))

    def check_lines(self, job: Job, origin: str) -> None:
        logs = self.mesh.laptop.run([GPULAYER, "logs", origin], timeout=120)
        assert logs.returncode == 0, logs.stderr
        shim_killed = any(" shim " in harm for harm in job.harms)
        for attempt in job.attempts():
            for rank in range(RANKS):
                who = f"attempt {attempt}: rank {rank}"
                host, printed = job.started(attempt, rank)[1], job.printed(attempt, rank)
                numbers, ended = numbered(logs.stdout, attempt, rank)
                self.lines += len(numbers)
                assert numbers == list(range(len(numbers))), f"{who}: {gaps(numbers)}"
                # What was in the pipe of a shim that was killed is lost with it.
                whole = not shim_killed and host not in self.lost
                assert not whole or len(numbers) >= printed, f"{who}: {len(numbers)} of {printed}"
                code = job.note(attempt, rank, "code")
                assert ended or not whole or not code, f"{who}: the last line is missing"
                seen, _ = numbered(job.launcher.output(), attempt, rank)
                assert seen == list(range(len(seen))), f"{who}, in the viewer: {gaps(seen)}"
                left = job.launcher_killed or host in self.gone
                assert left or len(seen) == len(numbers), (
                    f"{who}: the viewer got {len(seen)} of {len(numbers)}"
                )
