"""What a flood of log lines costs a training step, and how late a line reaches its viewer.

    python benchmarks/log_volume.py

One agent on loopback runs a job of two ranks. Rank 0 trains on one thread; rank 1 prints 50 MB/s
for a while, writes as much to nowhere for a while, and is quiet in between, so that steps of the
same run are compared. In each round once nobody follows the job, once a viewer does. Rank 0 prints
the time as well, and the viewer's clock says how late it comes: beside the flood, and alone. Aims:
a step slows down by less than 1 %, the middle one of the rounds, and 99 of 100 lines are there
within 250 ms. All of it shares this machine's cores with whatever else it does: look at their
number, at the load, and at how far the rounds lie apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

import psutil
from gpulayer_mesh import shim

BIN = Path(sys.executable).parent
GPULAYER = str(BIN / "gpulayer")
SLOWER_PERCENT = 1.0
DELAY_S = 0.25

# Periods of 2 s by the clock: 0.4 s of writing, then 0.6 s for what is still under way. 12 of
# printing stay below the log's limit of 256 MiB per rank, past which the oldest quarter goes.
RANK = """
import json, os, sys, time
PERIOD, BURST, SETTLED, PERIODS = 2.0, 0.4, 1.0, 24
rate, start = float(sys.argv[1]) * 1e6, (time.time() // PERIOD + 3) * PERIOD
end = start + PERIODS * PERIOD
if os.environ.get("RANK") == "1":
    block = (b"x" * 99 + b"\\n") * 100
    written = 0
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in range(PERIODS if rate else 0):
        begin = start + number * PERIOD
        time.sleep(max(0.0, begin - time.time()))
        sent = 0
        while (now := time.time()) < begin + BURST:
            while sent < rate * (now - begin):
                sent += os.write(nowhere if number % 2 else 1, block)
            time.sleep(0.002)
        written += 0 if number % 2 else sent
    time.sleep(max(0.0, end - time.time()))
    result = {"bytes": written, "seconds": PERIODS / 2 * BURST}
else:
    import torch
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(128, 256)
    times = {"printing": [], "nowhere": [], "quiet": []}
    told = 0.0
    while (began := time.time()) < end:
        step = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        took = time.perf_counter() - step
        number, place = divmod(began - start, PERIOD)
        flood = number % 2 == 0 and place < BURST
        if began >= start and place + took < BURST:
            times["printing" if flood else "nowhere"].append(took)
        elif began >= start and place >= SETTLED and place + took < PERIOD:
            times["quiet"].append(took)
        if began - told > 0.02:
            told = began
            print("t", repr(time.time()), "flood" if flood else "", file=sys.stderr)
    result = times
out = os.environ["GPULAYER_OUT"]
with open(f"{out}/result{os.environ.get('RANK', 0)}.json", "w") as file:
    json.dump(result, file)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=float, default=50.0, help="MB/s that rank 1 prints")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.inside:
        command = [sys.executable, __file__, "--inside", "--rate", str(args.rate)]
        command += ["--rounds", str(args.rounds)]
        return subprocess.call([GPULAYER, "mesh", "local", "--nodes", "1", "--", *command])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"Python {sys.version.split()[0]}, {sys.platform}, {cores} cores{load}", flush=True)
    within = True
    with tempfile.TemporaryDirectory(prefix="gpl-volume-") as folder:
        (Path(folder) / "rank.py").write_text(RANK)
        rounds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(args.rounds):
            for follow in (False, True):
                slower, in_time = measure_steps(Path(folder), args.rate, follow=follow)
                rounds[follow].append(slower)
                within &= in_time
        for follow, found in rounds.items():
            middle = statistics.median(found)
            print(f"{who(follow)}, printing beside quiet, medians of {len(found)} rounds: middle")
            print(f"  {middle:+.1f} %, from {min(found):+.1f} to {max(found):+.1f} %")
            within &= middle < SLOWER_PERCENT
        within &= report_delays("line alone", measure(Path(folder), 0.0, follow=True)[1], "")
    print("within the aims" if within else "NOT within the aims: 1 %, 250 ms")
    return 0 if within else 1


def who(follow: bool) -> str:
    return "a viewer follows" if follow else "nobody follows"


def measure_steps(folder: Path, rate: float, *, follow: bool) -> tuple[float, bool]:
    """Return by how many percent printing slows the median step, and whether lines were in time."""
    home, lines, cpu = measure(folder, rate, follow=follow)
    times = json.loads((home / "result0.json").read_text())
    told = json.loads((home / "rank1" / "result1.json").read_text())
    real = told["bytes"] / told["seconds"] / 1e6
    print(f"{who(follow)}: {real:.1f} MB/s while printing; {cpu}")
    medians = {name: statistics.median(took) for name, took in times.items()}
    means = {name: statistics.fmean(took) for name, took in times.items()}
    counts = ", ".join(f"{len(took)} {name}" for name, took in times.items())
    print(f"  steps: {counts}; quiet: median {medians['quiet'] * 1e3:.2f} ms")
    for what, one, other in (
        ("printing beside quiet", "printing", "quiet"),
        ("writing to nowhere beside quiet", "nowhere", "quiet"),
        ("printing beside writing to nowhere", "printing", "nowhere"),
    ):
        slower = [100 * (found[one] / found[other] - 1) for found in (medians, means)]
        print(f"  {what}: median {slower[0]:+.1f} %, mean {slower[1]:+.1f} %")
    in_time = report_delays("line beside the flood", lines, "flood") if follow else True
    return 100 * (medians["printing"] / medians["quiet"] - 1), in_time


def report_delays(name: str, lines: list[tuple[float, str]], mark: str) -> bool:
    delays = []
    for arrived, line in lines:
        found = re.search(r"\bt (\d+\.\d+) (\w*)", line)
        if found and found[2] == mark:
            delays.append(arrived - float(found[1]))
    delays.sort()
    p99 = delays[int(len(delays) * 0.99)]
    print(
        f"{name}, from print to viewer: median {1e3 * statistics.median(delays):.0f} ms,"
        f" 99th percentile {1e3 * p99:.0f} ms, most {1e3 * delays[-1]:.0f} ms"
        f"   ({len(delays)} lines)"
    )
    return p99 < DELAY_S


def measure(
    folder: Path, rate: float, *, follow: bool
) -> tuple[Path, list[tuple[float, str]], str]:
    """Run the job; return where its files are, the lines of rank 0 with their arrival, and CPU."""
    options = ["--devices", "2", *([] if follow else ["--detach"])]
    command = [GPULAYER, "run", *options, "--", "python", "rank.py", str(rate)]
    lines: list[tuple[float, str]] = []
    before = set((folder / "gpulayer_jobs").glob("*"))
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        reader = threading.Thread(target=stamp, args=(run.stderr, lines))
        reader.start()
        used = cpu_seconds() if follow else {}
        used_by_shim = ""
        while run.poll() is None:
            used_by_shim = shim_use() or used_by_shim
            time.sleep(1.0)
        code = run.returncode
        reader.join()
    assert code == 0, "".join(line for _, line in lines)
    if not follow:
        found = re.search(r"job (\w+) keeps running", "".join(line for _, line in lines))
        assert found is not None, lines
        used = cpu_seconds()
        used_by_shim = await_end(found[1])
        get = [GPULAYER, "get", found[1]]
        subprocess.run(get, cwd=folder, check=True, stderr=subprocess.DEVNULL)
    (home,) = set((folder / "gpulayer_jobs").glob("*")) - before
    now = cpu_seconds()
    agent = now.get("agent", 0.0) - used.get("agent", 0.0)
    return home, lines, f"CPU in all: shim {used_by_shim or '?'}, agent {agent:.1f} s"


def stamp(stream: IO[str], lines: list[tuple[float, str]]) -> None:
    for line in stream:
        lines.append((time.time(), line))


def shim_use() -> str:
    """CPU time of the shim and how often it was woken or interrupted, while there is one."""
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if shim.__file__ in one.cmdline():
                times = one.cpu_times()
                switches = sum(one.num_ctx_switches())
                return f"{times.user + times.system:.1f} s and {switches} context switches"
    return ""


def await_end(job: str) -> str:
    """Return what the shim used. Asks rarely: it must not be what is measured."""
    end = time.monotonic() + 180
    used = ""
    while time.monotonic() < end:
        used = shim_use() or used
        done = subprocess.run([GPULAYER, "jobs", "--json"], capture_output=True, text=True)
        states = {one["job"]: one["state"] for one in json.loads(done.stdout)["jobs"]}
        if states[job] in ("succeeded", "failed", "cancelled"):
            assert states[job] == "succeeded", states[job]
            return used
        time.sleep(2.0)
    raise SystemExit(f"job {job} did not end")


def cpu_seconds() -> dict[str, float]:
    """CPU time of this mesh's agent so far."""
    parent = psutil.Process().parent()
    used: dict[str, float] = {}
    for child in parent.children() if parent is not None else ():
        if "gpulayer_mesh.runtime.agent" in " ".join(child.cmdline()):
            times = child.cpu_times()
            used["agent"] = used.get("agent", 0.0) + times.user + times.system
    return used


if __name__ == "__main__":
    sys.exit(main())
