"""What the doctor reads of the machine: /proc as Linux writes it, ports, and who has them."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from gpulayer_mesh.core.diagnosis import Multicast, Outcome
from gpulayer_mesh.core.types import Address, Interface
from gpulayer_mesh.errors import TransportError
from gpulayer_mesh.runtime import dialling, multicast, surroundings

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\tFE0A4D0A\t0003\t0\t0\t0\t00000000\t0\t0\t0
wlan0\t00000000\tFE0A4D0A\t0003\t0\t0\t600\t00000000\t0\t0\t0
tun0\t00000000\t00000000\t0001\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000A4D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""
ARP = """\
IP address       HW type     Flags       HW address            Mask     Device
10.77.10.254     0x1         0x2         52:54:00:12:35:02     *        eth0
10.77.10.11      0x1         0x0         00:00:00:00:00:00     *        eth0
"""


def test_gateways_and_neighbours_as_linux_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("_ROUTES", ROUTES), ("_ARP", ARP)):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(surroundings, name, tmp_path / name)
    assert surroundings.gateways() == ["10.77.10.254"]
    assert surroundings.neighbours() == {"10.77.10.254": True, "10.77.10.11": False}


def test_system_that_shows_nothing_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_ROUTES", "_ARP", "_PCI", "_SHM"):
        monkeypatch.setattr(surroundings, name, tmp_path / "missing")
    assert surroundings.gateways() == []
    assert surroundings.neighbours() == {}
    assert surroundings.graphics_cards() == ()
    assert surroundings.shared_memory() is None


def test_cards_of_nvidia_are_counted_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = {"0": ("0x10de", "0x030200"), "1": ("0x1002", "0x030000"), "2": ("0x10de", "0x040300")}
    for name, (vendor, kind) in cards.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(surroundings, "_PCI", tmp_path)
    assert surroundings.graphics_cards() == ("NVIDIA",)


def test_room_of_a_folder_that_is_not_there_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    assert surroundings.room(tmp_path / "not" / "yet") is not None


def test_environment_variable_names_the_container() -> None:
    assert surroundings.container(None) in ("", "docker", "podman")
    if surroundings.container(None) == "":
        assert surroundings.container("lxc") == "lxc"


@pytest.mark.network
def test_port_that_is_taken_and_by_whom() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "TCP" in surroundings.taken(port)
        assert surroundings.holder(port).endswith(f"(pid {os.getpid()})")
    assert surroundings.taken(port) == ()


async def test_without_a_lan_interface_nothing_is_heard_and_no_time_spent() -> None:
    loopback = Interface("lo", "loopback", None, ("127.0.0.1/8",))
    assert await multicast.listen((loopback,), ()) == Multicast()


@pytest.mark.parametrize(
    ("cause", "message", "outcome"),
    [
        (ConnectionRefusedError(111, "refused"), "connection refused", Outcome.REFUSED),
        (OSError(113, "no route"), "no route to host", Outcome.FORBIDDEN),
        (None, "no answer", Outcome.SILENT),
        (OSError(1, "x"), "what answers there is not of our mesh", Outcome.OTHER),
        (OSError(101, "x"), "network is unreachable", Outcome.FAILED),
    ],
)
async def test_failed_connection_has_a_name(
    cause: OSError | None, message: str, outcome: Outcome
) -> None:
    async def who_is(address: Address) -> str:
        raise TransportError(message) from cause

    node, where = "a" * 64, (Address("10.0.0.1", 7),)
    found = await dialling.failures(who_is, {node: where})
    assert found == {node: f"10.0.0.1 port 7: {message}"} or outcome is Outcome.OTHER
    (dial,) = await dialling.dials(who_is, node, where, asyncio.Semaphore(1))
    assert dial.outcome is outcome


async def test_one_address_that_leads_to_the_member_is_enough() -> None:
    async def who_is(address: Address) -> str:
        return {"10.0.0.1": "b" * 64, "10.0.0.2": "a" * 64}[address.host]

    where = (Address("10.0.0.1", 7), Address("10.0.0.2", 7))
    assert await dialling.failures(who_is, {"a" * 64: where, "c" * 64: ()}) == {
        "a" * 64: "",
        "c" * 64: "no address is known",
    }
