"""What stands around this process: system, container, disks, ports, gateway, neighbours.

Everything here answers at once or raises nothing: what a system does not show is None, or empty.
It does not know which of it is a fault. Nothing listens here: a port is tried by binding it, and
let go of before anybody could connect.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import platform
import socket
from pathlib import Path

import psutil

from gpulayer_mesh.core.diagnosis import Room

_MIB = 1024 * 1024
_SHM = Path("/dev/shm")
_ROUTES = Path("/proc/net/route")
_ARP = Path("/proc/net/arp")
_PCI = Path("/sys/bus/pci/devices")
_RTF_GATEWAY = 0x2  # of <linux/route.h>
_ATF_COM = 0x2  # of <linux/if_arp.h>: the link-layer address is known
_DISPLAY, _COMPUTE = "0x0300", "0x0302"  # PCI classes: VGA controller, 3D controller
_NVIDIA = "0x10de"
_DISCARD = 9  # nobody listens there; a packet makes the kernel look for the host all the same


def system() -> str:
    """Return "Linux" or "Darwin"."""
    return platform.system()


def is_wsl() -> bool:
    """Whether this Linux runs inside Windows."""
    return "microsoft" in _text(Path("/proc/sys/kernel/osrelease")).lower()


def container(variable: str | None) -> str:
    """Name the kind of container that this is, "" for none.

    Args:
        variable: `container` of the environment, which systemd-nspawn and LXC set.
    """
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    return (variable or "")[:32]


def room(path: Path) -> Room | None:
    """Return how large the file system of a folder is, or of the nearest one that exists."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            usage = psutil.disk_usage(str(folder))
            return Room(usage.total // _MIB, usage.free // _MIB)
    return None


def shared_memory() -> Room | None:
    """Return how large /dev/shm is; None on systems without it."""
    return room(_SHM) if _SHM.is_dir() else None


def gateways() -> list[str]:
    """Return the IPv4 addresses of default gateways; empty where the system does not say."""
    found = []
    for row in _text(_ROUTES).splitlines()[1:]:
        fields = row.split()
        with contextlib.suppress(ValueError, IndexError):
            if int(fields[1], 16) == 0 and int(fields[3], 16) & _RTF_GATEWAY:
                packed = int(fields[2], 16).to_bytes(4, "little")  # in the CPU's byte order
                found.append(str(ipaddress.IPv4Address(packed)))
    return list(dict.fromkeys(found))


def neighbours() -> dict[str, bool]:
    """Return the IPv4 hosts that this machine looked for on its links, and whether they are."""
    found: dict[str, bool] = {}
    for row in _text(_ARP).splitlines()[1:]:
        fields = row.split()
        with contextlib.suppress(ValueError, IndexError):
            there = bool(int(fields[2], 16) & _ATF_COM)
            found[fields[0]] = there or found.get(fields[0], False)
    return found


def look_for(host: str) -> None:
    """Have the kernel ask for the link-layer address of a host on our own network."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        probe.sendto(b"", (host, _DISCARD))


def taken(port: int) -> tuple[str, ...]:
    """Return for which of TCP and UDP a port is in use on this machine."""
    kinds = {"TCP": socket.SOCK_STREAM, "UDP": socket.SOCK_DGRAM}
    return tuple(name for name, kind in kinds.items() if _in_use(kind, port))


def holder(port: int) -> str:
    """Name the program that has a port: "python3 (pid 31)"; "" where that cannot be seen."""
    try:
        for one in psutil.net_connections("inet"):
            listens = one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
            if listens and one.laddr and one.laddr.port == port and one.pid:
                return f"{psutil.Process(one.pid).name()} (pid {one.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


def graphics_cards() -> tuple[str, ...]:
    """Return "NVIDIA" for each card of that maker on the bus, driver or not.

    Others are not counted: nearly every AMD processor has a GPU that no build of torch drives.
    """
    return tuple(
        "NVIDIA"
        for device in _folders(_PCI)
        if _text(device / "vendor").strip() == _NVIDIA
        and _text(device / "class").startswith((_DISPLAY, _COMPUTE))
    )


def _in_use(kind: socket.SocketKind, port: int) -> bool:
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, kind) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if kind == socket.SOCK_STREAM:  # as for the door: what has just ended is no user
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return True
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _folders(path: Path) -> list[Path]:
    try:
        return [path / name for name in os.listdir(path)]
    except OSError:
        return []
