"""The test LAN itself: it behaves as a real one where the product's tests rely on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lan as lan_module
import pytest
from lan import DECOY, Host, Lan

# Prints the port, then answers each packet or connection with the host's own name.
SERVER = """
import socket, sys
kind = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}[sys.argv[1]]
server = socket.socket(socket.AF_INET, kind)
server.bind(("0.0.0.0", int(sys.argv[2])))
name = socket.gethostname().encode()
if sys.argv[1] == "tcp":
    server.listen()
print("port", server.getsockname()[1], flush=True)
while True:
    if sys.argv[1] == "tcp":
        connection, _ = server.accept()
        connection.sendall(name)
        connection.close()
    else:
        data, peer = server.recvfrom(2000)
        server.sendto(name + b" " + data, peer)
"""
# Prints the answer, or "silence".
CLIENT = """
import socket, sys
client = socket.socket()
client.settimeout(float(sys.argv[3]))
try:
    client.connect((sys.argv[1], int(sys.argv[2])))
    print(client.recv(100).decode())
except TimeoutError:
    print("silence")
"""
# Sends n packets and counts the answers.
COUNT = """
import socket, sys
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(0.5)
n = int(sys.argv[3])
for i in range(n):
    client.sendto(b"%d" % i, (sys.argv[1], int(sys.argv[2])))
answers = 0
try:
    while answers < n:
        client.recv(2000)
        answers += 1
except TimeoutError:
    pass
print(answers)
"""
LISTEN_MULTICAST = """
import socket, struct, sys
listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener.bind(("", 5353))
membership = socket.inet_aton("224.0.0.251") + socket.inet_aton(sys.argv[1])
listener.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
print("listening", flush=True)
print("heard", *listener.recvfrom(2000), flush=True)
"""


@pytest.fixture
def mended(lan: Lan) -> Iterator[Lan]:
    """The module's LAN, whole again after the test."""
    yield lan
    for host in lan:
        host.restore()
        host.clear()
        host.kill_all()


def serve(host: Host, protocol: str, port: int = 0) -> str:
    server = host.popen([sys.executable, "-c", SERVER, protocol, str(port)])
    return server.expect(r"port (\d+)", 10)[1]


def connect(host: Host, address: str, port: str, timeout_s: float = 5) -> str:
    return host.run([sys.executable, "-c", CLIENT, address, port, str(timeout_s)]).stdout.strip()


def count_answers(host: Host, address: str, port: str, packets: int) -> int:
    done = host.run([sys.executable, "-c", COUNT, address, port, str(packets)], check=True)
    return int(done.stdout)


def test_host_has_name_home_and_temporary_folder_of_its_own(lan: Lan) -> None:
    script = (
        "import os, socket, tempfile, platformdirs; print(socket.gethostname(),"
        "socket.gethostbyname(socket.gethostname()), os.path.expanduser('~'),"
        "tempfile.gettempdir(), platformdirs.user_data_dir('x'), os.environ.get('GPULAYER_HOME'))"
    )
    for host in lan:
        words = host.run([sys.executable, "-c", script], check=True).stdout.split()
        data = f"{host.home}/.local/share/x"
        assert words == [
            host.name,
            "127.0.1.1",
            str(host.home),
            f"{host.folder}/tmp",
            data,
            "None",
        ]
    assert os.uname().nodename not in lan.hosts


def test_hosts_reach_each_other(lan: Lan) -> None:
    port = serve(lan["box-1"], "tcp")
    assert connect(lan["laptop"], lan["box-1"].address, port) == "box-1"
    assert connect(lan["box-3"], lan["box-1"].address, port) == "box-1"


def test_docker0_answers_on_the_caller_itself(mended: Lan) -> None:
    for name in ("laptop", "box-2"):
        serve(mended[name], "tcp", 4711)
    for name in ("laptop", "box-2"):
        assert connect(mended[name], DECOY, "4711") == name
        links = mended[name].run(["ip", "-br", "link", "show", "docker0"]).stdout
        assert "UP" in links
        assert "NO-CARRIER" not in links


def test_multicast_reaches_the_other_hosts(mended: Lan) -> None:
    listeners = [
        mended[name].popen([sys.executable, "-c", LISTEN_MULTICAST, mended[name].address])
        for name in ("box-1", "box-2", "box-3")
    ]
    for listener in listeners:
        listener.expect("listening", 10)
    send = "import socket; socket.socket(2, 2).sendto(b'hello', ('224.0.0.251', 5353))"
    mended["laptop"].run([sys.executable, "-c", send], check=True)
    for listener in listeners:
        listener.expect(rf"heard b'hello' \('{mended['laptop'].address}'", 5)


def test_cut_link_is_silent_until_restored(mended: Lan) -> None:
    box, laptop = mended["box-1"], mended["laptop"]
    port = serve(box, "tcp")
    box.cut()
    assert connect(laptop, box.address, port, 0.5) == "silence"
    assert connect(box, box.address, port) == "box-1"
    box.restore()
    assert connect(laptop, box.address, port) == "box-1"


def test_blocked_tcp_port_is_silent_one_way_only(mended: Lan) -> None:
    box, laptop = mended["box-1"], mended["laptop"]
    inside, outside = serve(box, "tcp", 40_000), serve(box, "tcp", 30_000)
    back = serve(laptop, "tcp", 40_000)
    box.block("tcp", "32768:65535")
    assert connect(laptop, box.address, inside, 0.5) == "silence"
    assert connect(laptop, box.address, outside) == "box-1"
    assert connect(box, laptop.address, back) == "laptop"
    box.clear()
    assert connect(laptop, box.address, inside) == "box-1"


def test_blocked_udp_leaves_tcp_alone(mended: Lan) -> None:
    box, laptop = mended["box-1"], mended["laptop"]
    udp, tcp = serve(box, "udp"), serve(box, "tcp")
    assert count_answers(laptop, box.address, udp, 10) == 10
    box.block("udp")
    assert count_answers(laptop, box.address, udp, 10) == 0
    assert connect(laptop, box.address, tcp) == "box-1"


def test_loss_drops_about_its_share(mended: Lan) -> None:
    box, laptop = mended["box-1"], mended["laptop"]
    port = serve(box, "udp")
    box.loss(30)
    answers = count_answers(laptop, box.address, port, 300)
    # Six standard deviations around 210: fails by chance once in 10^8 runs.
    assert 160 <= answers <= 260


SINK = """
import socket, sys, time
sink = socket.create_server(("0.0.0.0", 0))
print("port", sink.getsockname()[1], flush=True)
source, _ = sink.accept()
start, received = time.monotonic(), 0
while data := source.recv(65536):
    received += len(data)
print("mbit", received * 8 / 1e6 / (time.monotonic() - start), flush=True)
"""


def mbit_between(source: Host, target: Host) -> float:
    sink = target.popen([sys.executable, "-c", SINK])
    where = (target.address, int(sink.expect(r"port (\d+)", 10)[1]))
    send = f"import socket; socket.create_connection({where}).sendall(bytes(10**6))"
    source.run([sys.executable, "-c", send], check=True)
    return float(sink.expect(r"mbit ([\d.]+)", 10)[1])


def test_shaped_link_is_slow(mended: Lan) -> None:
    mended["laptop"].shape(10)
    assert 5 <= mbit_between(mended["laptop"], mended["box-1"]) <= 15


def test_trunk_between_two_switches_is_slow_and_nothing_else_is(mended: Lan) -> None:
    laptop, *boxes = mended
    mended.split([boxes[1].name, boxes[2].name], 10)
    try:
        assert 5 <= mbit_between(laptop, boxes[1]) <= 15
        assert 5 <= mbit_between(boxes[2], boxes[0]) <= 15
        assert mbit_between(laptop, boxes[0]) > 30
        assert mbit_between(boxes[1], boxes[2]) > 30
    finally:
        mended.join()
    assert mbit_between(laptop, boxes[1]) > 30


def test_arguments_and_exit_code_pass_unchanged(lan: Lan) -> None:
    arguments = ["a b", "'\"", "$HOME", "`x`", "line\nbreak", "", "ü", "-n"]
    script = "import sys; print(ascii(sys.argv[1:])); sys.exit(7)"
    done = lan["box-1"].run([sys.executable, "-c", script, *arguments])
    assert done.stdout.strip() == ascii(arguments)
    assert done.returncode == 7


def test_interrupt_reaches_the_program_itself(mended: Lan) -> None:
    program = mended["box-1"].popen(["sh", "-c", "echo ready; exec sleep 60"])
    program.expect("ready", 5)
    program.interrupt()
    assert program.wait(5) == -signal.SIGINT


def test_run_past_its_time_is_killed_with_its_children(mended: Lan) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        mended["box-1"].run(["sh", "-c", "echo begun; sleep 60 & sleep 60"], timeout=0.5)
    assert caught.value.output == "begun\n"
    assert mended["box-1"].processes() == []


def test_processes_are_those_of_the_host_only(mended: Lan) -> None:
    first = mended["box-1"].popen(["sh", "-c", "echo ready; exec sleep 61"])
    second = mended["box-2"].popen(["sh", "-c", "echo ready; exec sleep 62"])
    first.expect("ready", 5)
    second.expect("ready", 5)
    assert mended["box-1"].processes() == [first.pid]
    assert mended["box-1"].processes("sleep 62") == []
    assert mended["box-2"].processes("sleep") == [second.pid]
    mended["box-1"].kill_all()
    assert mended["box-1"].processes() == []
    assert mended["box-2"].processes() == [second.pid]


def test_host_has_process_ids_of_its_own_and_reaps_its_orphans(mended: Lan) -> None:
    box = mended["box-1"]
    orphan = "import os; seen = [name for name in os.listdir('/proc') if name.isdigit()];"
    orphan += "print('pid', os.getpid(), len(seen))"
    script = f"""
import os, subprocess, sys, time
print("mine", os.getpid(), flush=True)
if os.fork() == 0:
    subprocess.Popen([sys.executable, "-c", {orphan!r}], start_new_session=True)
    os._exit(0)
time.sleep(60)
"""
    program = box.popen([sys.executable, "-c", script])
    inside, seen = map(int, program.expect(r"pid (\d+) (\d+)", 10).groups())
    own = int(program.expect(r"mine (\d+)", 10)[1])
    assert own < inside < 100
    assert seen <= 4  # with the first, its child that nobody has reaped, and the host's process 1
    end = time.monotonic() + 10
    while len(box.processes()) > 1:
        assert time.monotonic() < end
        time.sleep(0.02)
    with pytest.raises(lan_module.LanError):
        box.pid_of(inside)
    assert box.pid_of(own) == program.pid


def test_close_leaves_nothing(make_lan: Callable[..., Lan]) -> None:
    begin = time.monotonic()
    with Lan(["one", "two"]) as lan:
        built_s = time.monotonic() - begin
        # A daemon that ignores the polite signals, in a session of its own.
        script = "trap '' TERM INT HUP; setsid sleep 60 & echo ready; wait"
        lan["one"].popen(["sh", "-c", script]).expect("ready", 5)
        pids = lan["one"].processes()
        assert len(pids) >= 2
    assert built_s < 3
    assert_nothing_left(lan, pids)


def test_lan_of_a_killed_owner_is_swept_by_the_next(make_lan: Callable[..., Lan]) -> None:
    script = """
import os, signal, lan
one = lan.Lan(["only"])
one.up()
sleeper = one["only"].popen(["sleep", "60"])
print(one.tag, sleeper.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    here = str(Path(__file__).parent)
    owner = subprocess.run([sys.executable, "-c", script], cwd=here, stdout=subprocess.PIPE)
    tag, pid = owner.stdout.decode().split()
    assert Path(f"/run/netns/{tag}-only").exists()
    sweep = "import lan; lan.Lan(['next']).up()"
    subprocess.run([sys.executable, "-c", sweep], cwd=here, check=True)
    assert_nothing_left(Lan(["only"], tag=tag), [int(pid)])


def assert_nothing_left(lan: Lan, pids: list[int]) -> None:
    assert not [path for path in Path("/run/netns").iterdir() if path.name.startswith(lan.tag)]
    assert not [path for path in Path("/etc/netns").iterdir() if path.name.startswith(lan.tag)]
    assert not lan.folder.exists()
    for pid in pids:
        status = Path(f"/proc/{pid}/status")  # a zombie may wait for init to fetch it
        assert not status.exists() or "State:\tZ" in status.read_text()


def test_unusable_host_names_are_refused() -> None:
    for hosts in (["Box"], ["a b"], ["../x"], [], ["one", "one"]):
        with pytest.raises(lan_module.LanError):
            Lan(hosts)
