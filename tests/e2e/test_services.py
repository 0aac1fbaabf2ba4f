"""Services on the test LAN: started, reached from another machine, killed, back, stopped."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from meshes import LanMesh, until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(240)]
GPULAYER = "gpulayer"

SERVE = """
import http.server, os, socketserver

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.environ['GPULAYER_NODE']} {os.getpid()} {self.path}".encode())

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data[::-1])

class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

print("serving", flush=True)
Server(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""

USE = """
import sys, urllib.request
base = f"http://127.0.0.1:{sys.argv[1]}"
print(urllib.request.urlopen(base + "/where", timeout=20).read().decode())
data = bytes(range(256)) * 8000  # two megabytes
back = urllib.request.urlopen(base + "/", data=data, timeout=60).read()
assert back == data[::-1]
print("equal")
"""


def listed(mesh: LanMesh) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(mesh.gpulayer("service", "list", "--json").stdout)[
        "services"
    ]
    return found


def test_service_is_reached_through_the_mesh_and_comes_back(mesh: LanMesh) -> None:
    laptop = mesh.laptop
    folder = laptop.home / "service"
    folder.mkdir()
    (folder / "serve.py").write_text(SERVE)
    (folder / "use.py").write_text(USE)
    start = [GPULAYER, "service", "run", "--name", "web", "--health", "/ready", "--target",
             "box-2", "--", "python", "serve.py"]  # fmt: skip
    done = laptop.run(start, cwd=folder, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "service web (job " in done.stderr
    again = laptop.run(start, cwd=folder, timeout=30)
    assert again.returncode == 2
    assert "a service 'web' runs on box-2 already" in again.stderr
    (row,) = listed(mesh)
    assert (row["name"], row["node"], row["state"], row["restarts"]) == (
        "web",
        "box-2",
        "healthy",
        0,
    )
    assert "healthy" in mesh.gpulayer("service", "list").stdout

    connect = laptop.popen([GPULAYER, "service", "connect", "web", "--port", "18080"], cwd=folder)
    connect.expect("127.0.0.1:18080 leads to service web on box-2", 30)
    used = laptop.run(["python", "use.py", "18080"], cwd=folder, timeout=90)
    assert used.returncode == 0, used.stderr + connect.output()
    worker = mesh.boxes[0].run([GPULAYER, "service", "connect", "web"], timeout=30)
    assert worker.returncode == 5
    assert "leads to" not in worker.stderr
    assert "launcher" in worker.stderr  # the role that it takes
    where, pid, path = used.stdout.split()[:3]
    assert (where, path) == ("box-2", "/where")

    os.kill(mesh.lan[where].pid_of(int(pid)), signal.SIGKILL)
    until(lambda: listed(mesh)[0]["restarts"] == 1 and listed(mesh)[0]["state"] == "healthy", 30)
    assert listed(mesh)[0]["last_end"] == "signal 9 (SIGKILL)"

    box = mesh.boxes[1]
    mesh.agents[box.name].kill()
    mesh.agents[box.name].wait(10)
    mesh.agents[box.name] = mesh.start_agent(box)
    until(lambda: any(row["state"] == "healthy" for row in listed(mesh)), 60)
    (row,) = listed(mesh)
    assert row["restarts"] == 1  # the service did not notice
    connect.interrupt()
    assert connect.wait(20) == 130, connect.output()

    mesh.gpulayer("service", "stop", "web", "--grace", "3")
    assert listed(mesh) == []
    assert until(lambda: not mesh.ranks(), 15)
    gone = laptop.run([GPULAYER, "service", "connect", "web"], cwd=folder, timeout=30)
    assert "no service 'web' runs" in gone.stderr


def test_service_that_is_not_waited_for_runs_on(mesh: LanMesh) -> None:
    folder = mesh.laptop.home / "slow"
    folder.mkdir()
    (folder / "serve.py").write_text("import time\ntime.sleep(600)\n")
    start = [GPULAYER, "service", "run", "--name", "slow", "--", "python", "serve.py"]
    run = mesh.laptop.popen(start, cwd=folder)
    run.expect(r"service slow \(job \S+\) starts on box-", 60)
    run.interrupt()
    assert run.wait(20) == 130, run.output()
    assert re.search(r"service slow \(job \S+\) runs on", run.output())
    mesh.gpulayer("service", "stop", "slow", "--grace", "1")


def test_service_that_cannot_come_up_says_why(mesh: LanMesh) -> None:
    folder = mesh.laptop.home / "broken"
    folder.mkdir()
    (folder / "serve.py").write_text("raise SystemExit('no model here')\n")
    start = [GPULAYER, "service", "run", "--restart", "never", "--", "python", "serve.py"]
    done = mesh.laptop.run(start, cwd=folder, timeout=90)
    assert done.returncode == 1
    assert "service 'serve.py' did not come up: exit code 1" in done.stderr
    job = json.loads(mesh.gpulayer("jobs", "--json").stdout)["jobs"][0]
    assert "no model here" in mesh.gpulayer("logs", job["job"]).stderr
