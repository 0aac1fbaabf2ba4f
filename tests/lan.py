"""A local network of hosts on one Linux machine, for tests and for hands (`scripts/lan`).

Every host is a network namespace on one bridge, with what real machines have and products
stumble over: a host name that resolves to 127.0.1.1, a `docker0` with the same address
everywhere, IPv6 as the kernel gives it, a home and a temporary folder of its own, process ids of
its own for what `popen` and `run` start. The bridge has a namespace too, so the machine's own
network is never touched.

It does not know GPUlayer, nor pytest. Hosts share clock, disk, machine id and /dev/shm with the
machine: only what is named above is theirs. Standard library only; needs root, and the tools
`ip`, `tc`, `iptables`, `mount` and `unshare`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

DEFAULT_HOSTS = ("laptop", "box-1", "box-2", "box-3")
DECOY = "172.17.0.1"  # docker0's address, the same on every host

_NETNS = Path("/run/netns")  # where `ip netns` keeps names
_NETNS_ETC = Path("/etc/netns")  # `ip netns exec` binds files in here over those in /etc
_TOOLS = ("ip", "tc", "iptables", "ip6tables", "mount", "unshare")
_CLONE_NEWPID = 0x20000000  # of <linux/sched.h>
# Process 1 of a host. The kernel reaps what ends there while SIGCHLD is ignored.
_INIT = ("sh", "-c", "trap '' CHLD TERM INT HUP; exec sleep infinity")
_NAMES = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_OWNED = re.compile(r"gpl(\d+)x\d+(?:-.*)?")  # gpl<pid>x<n> is the switch, ...-<host> the hosts
# A host's processes must not learn how the test run itself was started.
_NOT_INHERITED = re.compile(
    r"(GPULAYER_|XDG_|PYTEST_|MASTER_|TORCHELASTIC_|(RANK|LOCAL_RANK|WORLD_SIZE)$)"
)


class LanError(RuntimeError):
    """The network could not be built or changed as asked."""


def why_unavailable() -> str | None:
    """Say why no LAN can be built here; None when one can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"tools are missing: {', '.join(missing)} (packages iproute2, iptables, util-linux)"
    probe = f"gpl{os.getpid()}x0"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"this machine lets nobody make a network namespace: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


class Process(subprocess.Popen[str]):
    """A program running on a host; `log` holds what it printed, unless its output is piped."""

    log: Path | None = None

    def output(self) -> str:
        """Return what it has printed so far."""
        assert self.log is not None, "its output goes to a pipe"
        return self.log.read_text(errors="replace")

    def expect(self, pattern: str, deadline_s: float) -> re.Match[str]:
        """Wait until the output matches; fail with the output at the deadline or at its end."""
        end = time.monotonic() + deadline_s
        while True:
            ended = self.poll() is not None  # before reading, so that the last words count
            if found := re.search(pattern, self.output(), re.MULTILINE):
                return found
            if ended or time.monotonic() > end:
                why = f"ended with {self.returncode}" if ended else f"waited {deadline_s} s"
                raise AssertionError(f"no {pattern!r} ({why}) in:\n{self.output()}")
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Do what Ctrl-C in its terminal does: SIGINT to its whole process group."""
        os.killpg(self.pid, signal.SIGINT)


class Host:
    """One machine of the LAN."""

    def __init__(self, lan: Lan, name: str, index: int) -> None:
        self.name = name
        self.address = f"{lan.network}.{10 + index}"  # of eth0
        self.namespace = f"{lan.tag}-{name}"
        self.folder = lan.folder / name
        self.home = self.folder / "home"
        self._switch = lan.tag
        self._port = f"port{index}"  # the switch's end of this host's cable
        self._container = f"container{index}"
        self._started: list[Process] = []
        self._log_number = itertools.count()
        self._init: Process | None = None
        inherited = {k: v for k, v in os.environ.items() if not _NOT_INHERITED.match(k)}
        self.env: dict[str, str] = inherited | {
            "PATH": f"{Path(sys.executable).parent}:{inherited.get('PATH', os.defpath)}",
            "HOME": str(self.home),
            "TMPDIR": str(self.folder / "tmp"),
            "HOSTNAME": name,
        }

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs argv on this host, from the machine's own shell."""
        # Each step replaces the process by the next, so a signal to it reaches the program. The
        # mount is of the namespace that `ip netns exec` makes.
        rename = 'mount -t proc proc /proc && echo "$0" >/proc/sys/kernel/hostname && exec "$@"'
        inside = ["unshare", "--uts", "--", "sh", "-c", rename, self.name]
        return ["ip", "netns", "exec", self.namespace, *inside, *argv]

    def popen(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] = subprocess.STDOUT,
    ) -> Process:
        """Start a program, in a session of its own; it is killed when the LAN is closed.

        Args:
            cwd: the host's home if not given.
            env: on top of `self.env`.
            stdout: None writes stdout and stderr to a file, see `Process.log`.
        """
        with contextlib.ExitStack() as stack:
            log = None
            if stdout is None:
                log = self.folder / "logs" / f"{next(self._log_number)}-{Path(argv[0]).name}.log"
                stdout = stack.enter_context(log.open("wb"))
            stack.enter_context(_children_in(f"/proc/{self._first_process().pid}/ns/pid"))
            process = Process(
                self.command(argv),
                cwd=cwd or self.home,
                env=self.env | dict(env or {}),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        process.log = log
        self._started.append(process)
        return process

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60.0,
        check: bool = False,
        input: str | None = None,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end and return its exit code, stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: with the output so far; its process group was killed.
        """
        pipe = subprocess.PIPE
        stdin = subprocess.DEVNULL if input is None else pipe
        process = self.popen(argv, cwd=cwd, env=env, stdin=stdin, stdout=pipe, stderr=pipe)
        try:
            stdout, stderr = process.communicate(input, timeout)
        except subprocess.TimeoutExpired as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            error.output, error.stderr = process.communicate(timeout=10)
            error.add_note(f"stdout:\n{error.output}\nstderr:\n{error.stderr}")
            raise
        finally:
            self._started.remove(process)
        done = subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)
        if check and done.returncode != 0:
            raise AssertionError(f"{list(argv)} ended with {done.returncode}:\n{stdout}{stderr}")
        return done

    def _first_process(self) -> Process:
        """Switch the host on if it is off; the process ids of all others come from this one."""
        if self._init is None or self._init.poll() is not None:
            nothing = subprocess.DEVNULL
            with _children_in(None):
                self._init = Process(
                    self.command(_INIT),
                    stdin=nothing,
                    stdout=nothing,
                    stderr=nothing,
                    start_new_session=True,
                )
            self._started.append(self._init)
        return self._init

    def processes(self, containing: str = "") -> list[int]:
        """Return the pids of all that runs on this host, optionally by a piece of command line.

        They are the machine's, not those that the host's own programs know.
        """
        first = self._init.pid if self._init else 0
        return [
            pid
            for pid in _pids_in(self.namespace)
            if pid != first and (not containing or containing in _command_line(pid))
        ]

    def pid_of(self, inside: int) -> int:
        """Return the machine's number of the process that this host knows by `inside`."""
        for pid in self.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                numbers = re.search(r"^NSpid:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.M)
                if numbers and int(numbers[1].split()[-1]) == inside:
                    return pid
        raise LanError(f"no process {inside} on {self.name}")

    def kill_all(self, deadline_s: float = 10.0) -> None:
        """Pull the power plug: SIGKILL to everything on this host, and wait until it is gone."""
        _kill_all_in(self.namespace, deadline_s)
        # Process 1 is the last: it ends when nobody has to fetch any of the others.
        for process in sorted(self._started, key=lambda process: process is self._init):
            process.wait(deadline_s)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._started.clear()

    def cut(self) -> None:
        """Pull the cable: the link goes down, nobody is told."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def restore(self) -> None:
        """Plug the cable in again."""
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def isolate(self, apart: bool) -> None:
        """Have the switch keep this host from all others that are isolated, as an access point."""
        state = "on" if apart else "off"
        _ip(
            "-n", self._switch, "link", "set", self._port, "type", "bridge_slave", "isolated", state
        )

    def block(
        self, protocol: str, ports: str = "1:65535", sources: Sequence[str] | None = None
    ) -> None:
        """Drop silently what others send to these ports, as a firewall does.

        For tcp only new connections to this host are dropped, so that the answers to its own get
        through; for udp everything.

        Args:
            protocol: tcp or udp.
            ports: one port, or first:last.
            sources: the IPv4 addresses of those others, who get through over IPv6 then.
        """
        new = ["--syn"] if protocol == "tcp" else []
        rule = ["-A", "INPUT", "-i", "eth0", "-p", protocol, *new, "--dport", ports]
        if sources is None:
            self._filter(*rule)
        for source in sources or ():
            self._filter4(*rule, "-s", source)

    def lose_packets_above(self, size_bytes: int, sources: Sequence[str]) -> None:
        """Drop silently all larger TCP packets from these addresses, and tell nobody of an MTU."""
        for source in sources:
            rule = ["-A", "INPUT", "-i", "eth0", "-p", "tcp", "-s", source]
            self._filter4(*rule, "-m", "length", "--length", f"{size_bytes + 1}:65535")

    def deafen(self, port: str, sources: Sequence[str]) -> None:
        """Drop silently all that these addresses send to a TCP port, open connections included."""
        for source in sources:
            self._filter4("-A", "INPUT", "-i", "eth0", "-s", source, "-p", "tcp", "--dport", port)

    def keep_only(self, port: str, sources: Sequence[str]) -> None:
        """Drop silently all TCP from these addresses but that of one port, at either end."""
        tails = (["--dport", port, "-j", "ACCEPT"], ["--sport", port, "-j", "ACCEPT"])
        for source in sources:
            rule = ["-A", "INPUT", "-i", "eth0", "-s", source, "-p", "tcp"]
            for tail in (*tails, ["-j", "DROP"]):
                _run("ip", "netns", "exec", self.namespace, "iptables", "-w", *rule, *tail)

    def loss(self, percent: float) -> None:
        """Lose this share of all incoming packets at random."""
        probability = f"{percent / 100:.4f}"
        random = ("-m", "statistic", "--mode", "random", "--probability", probability)
        self._filter("-A", "INPUT", "-i", "eth0", *random)

    def shape(self, mbit: float) -> None:
        """Limit the link to this speed, both ways."""
        for namespace, device in ((self.namespace, "eth0"), (self._switch, self._port)):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *_limit(mbit))

    def clear(self) -> None:
        """End block, loss and shape."""
        for tool in ("iptables", "ip6tables"):
            _run("ip", "netns", "exec", self.namespace, tool, "-w", "-F", "INPUT")
        for namespace, device in ((self.namespace, "eth0"), (self._switch, self._port)):
            delete = ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"]
            subprocess.run(delete, capture_output=True)  # fails where nothing was shaped

    def _filter(self, *rule: str) -> None:
        for tool in ("iptables", "ip6tables"):
            _run("ip", "netns", "exec", self.namespace, tool, "-w", *rule, "-j", "DROP")

    def _filter4(self, *rule: str) -> None:
        _run("ip", "netns", "exec", self.namespace, "iptables", "-w", *rule, "-j", "DROP")

    def _set_up(self) -> None:
        for name in ("home", "tmp", "logs"):
            (self.folder / name).mkdir(parents=True, mode=0o700)
        etc = _NETNS_ETC / self.namespace
        etc.mkdir(parents=True)
        (etc / "hosts").write_text(
            f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n::1 localhost ip6-localhost\n"
        )
        (etc / "hostname").write_text(f"{self.name}\n")
        # No name server is reachable; one that refuses at once spares every look-up 10 s.
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\noptions attempts:1\n")
        _ip(
            "-n",
            self.namespace,
            "-batch",
            "-",
            input=f"""
                link set lo up
                address add {self.address}/24 broadcast + dev eth0
                link set eth0 up
                route add default dev eth0
                link add docker0 type bridge
                address add {DECOY}/16 broadcast + dev docker0
                link add veth0a1b2c3 type veth peer name {self._container} netns {self._switch}
                link set veth0a1b2c3 master docker0 up
                link set docker0 up
            """,
        )
        # A container's end of docker0, out of sight: with it the decoy has a carrier.
        _ip("-n", self._switch, "link", "set", self._container, "up")


class Lan:
    """Hosts by name on one switch. `up` builds it, `close` removes every trace of it.

    Two LANs never meet, whatever their addresses: each has a switch of its own.
    """

    _count = itertools.count(1)

    def __init__(self, hosts: Sequence[str] = DEFAULT_HOSTS, *, tag: str | None = None) -> None:
        """Name the parts; nothing is made yet.

        Args:
            tag: starts the name of every namespace. The default belongs to this process and is
                removed when it ends, or swept away by the next user of this module. A LAN with
                a tag of your own stays until `close`, also in another process.
        """
        if wrong := [name for name in hosts if not _NAMES.fullmatch(name)]:
            raise LanError(f"not usable as host names: {wrong}")
        if len(set(hosts)) != len(hosts) or not 1 <= len(hosts) <= 200:
            raise LanError("1 to 200 different host names are needed")
        number = next(self._count)
        self.tag = tag or f"gpl{os.getpid()}x{number}"
        self.network = f"10.77.{number % 256}"
        self.folder = _folder(self.tag)
        self.hosts = {name: Host(self, name, index) for index, name in enumerate(hosts)}

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts.values())

    def __enter__(self) -> Lan:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def up(self) -> None:
        """Build the network; about 50 ms a host."""
        _sweep()
        if _OWNED.fullmatch(self.tag):
            atexit.register(self.close)
        self.folder.mkdir(mode=0o700)
        _ip("netns", "add", self.tag)
        for host in self:
            _ip("netns", "add", host.namespace)
        # Without a multicast querier a snooping bridge may stop forwarding mDNS: no snooping.
        switch = ["link add lan0 type bridge mcast_snooping 0", "link set lan0 up"]
        for host in self:
            port, peer = host._port, host.namespace
            switch.append(f"link add {port} type veth peer name eth0 netns {peer}")
            switch.append(f"link set {port} master lan0 up")
        _ip("-n", self.tag, "-batch", "-", input="\n".join(switch))
        for host in self:
            host._set_up()

    def split(self, hosts: Sequence[str], mbit: float) -> None:
        """Put these hosts on a second switch; all that passes between both shares this speed."""
        commands = ["link add lan1 type bridge mcast_snooping 0", "link set lan1 up"]
        commands.append("link add trunk0 type veth peer name trunk1")
        commands += [f"link set trunk{i} master lan{i} up" for i in (0, 1)]
        commands += [f"link set {self[name]._port} master lan1" for name in hosts]
        _ip("-n", self.tag, "-batch", "-", input="\n".join(commands))
        for end in ("trunk0", "trunk1"):
            _run("tc", "-n", self.tag, "qdisc", "replace", "dev", end, "root", *_limit(mbit))

    def join(self) -> None:
        """Put all hosts on one switch again."""
        commands = ["link del trunk0"]
        commands += [f"link set {host._port} master lan0" for host in self]
        commands.append("link del lan1")
        _ip("-n", self.tag, "-batch", "-", input="\n".join(commands))

    def close(self) -> None:
        """Kill what runs on the hosts and remove them, their files and the switch."""
        atexit.unregister(self.close)
        for host in self:
            host.kill_all()
        for namespace in [host.namespace for host in self] + [self.tag]:
            _remove_namespace(namespace)
        shutil.rmtree(self.folder, ignore_errors=True)

    def logs(self) -> list[Path]:
        """Return the files that hold what `popen`'s programs printed, oldest first."""
        files = [log for host in self for log in (host.folder / "logs").glob("*.log")]
        return sorted(files, key=lambda log: log.stat().st_ctime)


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group, of either version, whose processes have so much memory together.

    Write their numbers to its cgroup.procs; all must have ended, or left it, in the end.

    Raises:
        LanError: none can be made here.
    """
    top = Path("/sys/fs/cgroup")
    old = not (top / "cgroup.controllers").exists()
    limit = "memory.limit_in_bytes" if old else "memory.max"
    group = (top / "memory" if old else top) / f"gpl{os.getpid()}m{next(_groups)}"
    try:
        if not old and "memory" not in (top / "cgroup.subtree_control").read_text().split():
            raise LanError("no memory limits can be set here")
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        raise LanError(f"no control group can be made here: {error}") from error
    try:
        yield group
    finally:
        end = time.monotonic() + 30
        while (group / "cgroup.procs").read_text():
            if time.monotonic() > end:
                raise LanError(f"processes are left in {group}")
            time.sleep(0.01)
        group.rmdir()


def _limit(mbit: float) -> tuple[str, ...]:
    """Return the queue that lets this much through."""
    burst = max(32_000, int(mbit * 1e6 / 8 / 100))  # bytes; 10 ms worth, or tbf stays below
    return ("tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "100ms")


def _folder(tag: str) -> Path:
    # Short: a Unix socket's path below it may have 107 characters at most.
    return Path(tempfile.gettempdir()) / tag


def _run(*argv: str, input: str | None = None) -> None:
    done = subprocess.run(argv, input=input, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise LanError(f"{' '.join(argv)} failed: {done.stderr.strip()}")


def _ip(*argv: str, input: str | None = None) -> None:
    _run("ip", *argv, input=input)


@contextlib.contextmanager
def _children_in(pid_namespace: str | None) -> Iterator[None]:
    """Have what this thread starts meanwhile live in a PID namespace; None makes a new one."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> int:
        fd = os.open(path, os.O_RDONLY)
        try:
            return int(libc.setns(fd, _CLONE_NEWPID))
        finally:
            os.close(fd)

    if (enter(pid_namespace) if pid_namespace else libc.unshare(_CLONE_NEWPID)) != 0:
        raise LanError(f"no PID namespace: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        assert enter("/proc/self/ns/pid") == 0


def _pids_in(namespace: str) -> list[int]:
    try:
        wanted = (_NETNS / namespace).stat()
    except FileNotFoundError:
        return []
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            # Ended since we looked, or a zombie: it has no namespace any more.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if os.path.samestat((entry / "ns/net").stat(), wanted):
                    pids.append(int(entry.name))
    return sorted(pids)


def _command_line(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _kill_all_in(namespace: str, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while pids := _pids_in(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise LanError(f"processes {pids} in {namespace} survive SIGKILL")
        time.sleep(0.01)


def _remove_namespace(namespace: str) -> None:
    if (_NETNS / namespace).exists():
        _ip("netns", "del", namespace)
    shutil.rmtree(_NETNS_ETC / namespace, ignore_errors=True)


_groups = itertools.count(1)
_swept = False


def _sweep() -> None:
    """Remove what a process left that died before its `close`; once per process."""
    global _swept
    if _swept:
        return
    _swept = True
    # Both places: a restart of the machine empties only the first.
    found = [path.name for place in (_NETNS, _NETNS_ETC) for path in place.glob("gpl*")]
    for namespace in sorted(set(found)):
        owner = _OWNED.fullmatch(namespace)
        # Our own pid counts as dead: before our first LAN a name with it is another's, long gone.
        if owner and (int(owner[1]) == os.getpid() or not Path(f"/proc/{owner[1]}").exists()):
            _kill_all_in(namespace, 10.0)
            _remove_namespace(namespace)
            shutil.rmtree(_folder(namespace), ignore_errors=True)
