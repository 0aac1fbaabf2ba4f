"""Interfaces: what is offered, in which order, and how changes and sleep are noticed."""

import asyncio

import pytest
from gpulayer_mesh.core.types import Address, Interface
from gpulayer_mesh.runtime import interfaces
from gpulayer_mesh.runtime.interfaces import (
    AddressesChanged,
    InterfaceWatch,
    Woke,
    announce_addresses,
    interface_for,
    list_interfaces,
    rank_addresses,
    route_source,
)

LAN = Interface("eth0", "ethernet", 1000, ("10.0.0.1/24", "fd00::1/64", "fe80::1%eth0/64"))
DOCKER = Interface("docker0", "virtual", None, ("172.17.0.1/16",))
VPN = Interface("wg0", "tunnel", None, ("100.64.0.1/10",))
LOOPBACK = Interface("lo", "loopback", None, ("127.0.0.1/8", "::1/128"))


def hosts(addresses: tuple[Address, ...]) -> list[str]:
    return [address.host for address in addresses]


def test_offers_real_before_tunnel_before_virtual_and_never_loopback() -> None:
    offered = announce_addresses((DOCKER, LOOPBACK, VPN, LAN), 7)
    assert hosts(offered) == ["10.0.0.1", "fd00::1", "100.64.0.1", "172.17.0.1"]
    assert {address.port for address in offered} == {7}


def test_bound_address_is_the_only_one_offered_even_loopback() -> None:
    assert announce_addresses((LAN, LOOPBACK), 7, "127.0.0.1") == (Address("127.0.0.1", 7),)
    assert hosts(announce_addresses((LAN, DOCKER), 7, "0.0.0.0")) == ["10.0.0.1", "172.17.0.1"]
    assert hosts(announce_addresses((LAN,), 7, "::")) == ["10.0.0.1", "fd00::1"]


def test_link_local_is_offered_only_when_an_interface_has_nothing_else() -> None:
    bare = Interface("eth1", "ethernet", None, ("fe80::2%eth1/64",))
    port = Interface("veth0", "virtual", None, ("fe80::3%veth0/64",))
    assert hosts(announce_addresses((bare, LAN, port), 7)) == [
        "10.0.0.1",
        "fd00::1",
        "fe80::2%eth1",
    ]


def test_offers_at_most_eight() -> None:
    many = tuple(Interface(f"e{i}", "ethernet", None, (f"10.0.{i}.1/24",)) for i in range(20))
    assert len(announce_addresses(many, 7)) == 8


def test_dials_shared_network_first_and_never_our_own_virtual_address() -> None:
    theirs = tuple(Address(h, 7) for h in ("172.17.0.1", "100.64.0.9", "fe80::9%x", "10.0.0.9"))
    ranked = rank_addresses(theirs, (LAN, DOCKER, VPN, LOOPBACK))
    assert hosts(ranked) == ["10.0.0.9", "100.64.0.9", "fe80::9%eth0"]


def test_address_of_another_agent_on_this_machine_is_kept() -> None:
    assert rank_addresses((Address("10.0.0.1", 8),), (LAN, DOCKER)) == (Address("10.0.0.1", 8),)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("docker0", "virtual"),
        ("br-0123456789ab", "virtual"),
        ("veth12ab", "virtual"),
        ("virbr0", "virtual"),
        ("cni0", "virtual"),
        ("flannel.1", "virtual"),
        ("bridge100", "virtual"),
        ("tun0", "tunnel"),
        ("wg0", "tunnel"),
        ("tailscale0", "tunnel"),
        ("utun3", "tunnel"),
        ("wlp3s0", "wifi"),
        ("lan7", "ethernet"),
        ("en0", "ethernet"),
        ("bridge0", "ethernet"),  # Thunderbolt on macOS
        ("br-lan", "ethernet"),
    ],
)
def test_kind_without_sysfs_follows_the_name(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "_sysfs", lambda name: None)
    assert interfaces._kind(name) == kind


def test_lists_this_machine_with_loopback_last() -> None:
    found = list_interfaces()
    assert found[-1].kind == "loopback"
    assert "127.0.0.1/8" in found[-1].addresses


@pytest.mark.network
def test_route_is_asked_per_destination() -> None:
    assert route_source("127.0.0.1") == "127.0.0.1"
    assert route_source("not a literal") is None
    assert interface_for(["127.0.0.1"]) == list_interfaces()[-1].name
    assert interface_for([]) is None


async def test_watch_reports_a_change_once_it_has_settled() -> None:
    readings = iter([(LAN,), (), (LAN, VPN), (LAN, VPN), (LAN, VPN)])
    watch = InterfaceWatch(poll_s=0, damp_s=0, read=lambda: next(readings), clock=lambda: 0.0)
    change = await asyncio.wait_for(anext(watch.changes()), 5)
    assert change == AddressesChanged((LAN, VPN))
    assert watch.current == (LAN, VPN)


async def test_watch_notices_a_gap_as_waking_up() -> None:
    times = iter([0.0, 3.0, 3.0, 63.5])
    watch = InterfaceWatch(poll_s=0, read=lambda: (LAN,), clock=lambda: next(times))
    assert await asyncio.wait_for(anext(watch.changes()), 5) == Woke(60.5)
