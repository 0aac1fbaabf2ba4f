"""Jobs without restarts: agents, shims, ranks and launchers are killed at random moments.

After every job: it has ended, with the outcome its ranks really came to; every line that a rank has
printed is in the log, once; no rank started twice; no process of it lives ten seconds after.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Any

from common import END_S, FINAL, LEFT_S, Soak, sleep_until
from meshes import GPULAYER, until
from truth import RANKS, Job, gaps, numbered, started_once

PAUSE_S = 0.005  # between two lines of a rank


class Kills(Soak):
    def run(self, kills: int) -> None:
        while sum(self.done.values()) < kills:
            left = kills - sum(self.done.values())
            self.one_job(min(left, self.rng.choice((1, 1, 2, 3))))
            if self.jobs % 20 == 0:
                print(f"  {self.jobs} jobs, {sum(self.done.values())} kills", flush=True)

    def one_job(self, kills: int) -> None:
        self.settle()
        codes = [0] * RANKS
        if self.rng.random() < 0.4:
            codes[self.rng.randrange(RANKS)] = self.rng.choice((3, 7, 42))
        job = self.start_job(codes, PAUSE_S)
        began = time.monotonic()
        hurt = False
        for left in reversed(range(kills)):
            if self.rng.random() < 0.35:  # between the plan and the start
                sleep_until(began + self.rng.uniform(0.3, 2.5))
            else:
                self.await_running(job)
                time.sleep(self.rng.uniform(0.0, 0.8))
            if not left and self.rng.random() < 0.4:  # around the end
                job.finish.touch()
                time.sleep(self.rng.uniform(0.0, 0.3))
            hurt |= self.kill_something(job)
        time.sleep(self.rng.uniform(0.0, 0.5))
        job.finish.touch()
        try:
            self.judge(job, hurt)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self.violate(job, f"{error}")

    def await_running(self, job: Job) -> None:
        """Return once all ranks print, or when no start is in sight any more."""
        end = time.monotonic() + 20.0
        while not (job.all_print(0) or job.launcher.poll() is not None or time.monotonic() > end):
            time.sleep(0.02)

    def kill_something(self, job: Job) -> bool:
        """Kill one process; whether the job may suffer from it."""
        runs = job.all_print(0)
        choices = [("agent", box.name, self.mesh.agents[box.name].pid) for box in self.mesh.boxes]
        if job.launcher.poll() is None:
            choices.append(("launcher", "laptop", job.launcher.pid))
        shims, ranks = self.processes_of(job)
        choices += [("shim", "", pid) for pid in shims] + [("rank", "", pid) for pid in ranks]
        kinds = sorted({kind for kind, _, _ in choices})
        # A launcher that dies before the start costs 30 s of waiting for its reservations.
        weights = [3 if kind == "agent" else 2 if runs else 1 for kind in kinds]
        kind = self.rng.choices(kinds, weights)[0]
        kind, name, pid = self.rng.choice([one for one in choices if one[0] == kind])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.done[kind] += 1
            job.harms.append(f"{kind} {name}{' while it runs' if runs else ''}")
        if kind == "agent":
            self.mesh.agents[name].wait(5)
            self.mesh.start_agent(self.mesh.lan[name])
        elif kind == "launcher":
            job.launcher.wait(5)
            job.launcher_killed = True
        return kind in ("shim", "rank") or not runs

    # Judging

    def judge(self, job: Job, hurt: bool) -> None:
        if not job.launcher_killed:
            job.launcher.wait(END_S)
        record = self.final_record(job)
        if record is None:
            assert not job.attempts(), "ranks started, and no node knows the job"
            assert job.launcher_killed or job.launcher.returncode != 0, "ended well without a job"
            self.came_to(job, "never placed")
            return
        until(lambda: not self.left_of(job, [record["job"]]), LEFT_S)
        self.came_to(job, record["state"])
        self.check_outcome(job, record, hurt)
        self.check_lines(job, record, hurt)
        started_once(job)

    def final_record(self, job: Job) -> dict[str, Any] | None:
        end = time.monotonic() + END_S
        while True:
            found = self.records_of(job)
            if not found and not self.pids(str(job.side)):
                return None
            if found and found[0]["state"] in FINAL:
                return found[0]
            states = [(one["state"], one["cause"], one["ranks"]) for one in found]
            assert time.monotonic() < end, f"no end within {END_S:g} s: {states}"
            time.sleep(0.2)

    def check_outcome(self, job: Job, record: dict[str, Any], hurt: bool) -> None:
        state, code = record["state"], record["exit_code"]
        if state == "succeeded":
            assert job.ended_by_itself(0), "a success of ranks that did not end"
            assert job.planned == 0, f"a success, and a rank ended with {job.planned}"
        if not hurt:
            assert job.ended_by_itself(0), f"{state}: ranks were ended: {record['failure']}"
            assert state == ("failed" if job.planned else "succeeded"), f"{state}, {job.planned}"
            assert code == job.planned, f"exit code {code} instead of {job.planned}"
        self.check_home(job, record, may_miss="agent" in " ".join(job.harms))

    def check_lines(self, job: Job, record: dict[str, Any], hurt: bool) -> None:
        logs = self.mesh.laptop.run([GPULAYER, "logs", record["job"]], timeout=60)
        assert logs.returncode == 0, logs.stderr
        shim_killed = any(harm.startswith("shim") for harm in job.harms)
        for rank in range(RANKS):
            numbers, ended = numbered(logs.stdout, 0, rank)
            self.lines += len(numbers)
            assert numbers == list(range(len(numbers))), f"rank {rank}: {gaps(numbers)}"
            printed = job.printed(0, rank)
            # What was in the pipe of a killed shim is lost with it.
            assert shim_killed or len(numbers) >= printed, f"{len(numbers)} of {printed} lines"
            assert ended or shim_killed or not job.note(0, rank, "code"), "the last line is missing"
            seen, _ = numbered(job.launcher.output(), 0, rank)
            assert seen == list(range(len(seen))), f"the viewer's rank {rank}: {gaps(seen)}"
            if not job.launcher_killed and not hurt:
                assert len(seen) == len(numbers), f"the viewer got {len(seen)} of {len(numbers)}"
