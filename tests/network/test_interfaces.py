"""Announced addresses: a certain host as it is, "any" as what others can dial."""

from __future__ import annotations

import pytest

from swarmcli.network.transports.tcp import interfaces
from swarmcli.network.transports.tcp.interfaces import announced_addresses, rank_hosts


@pytest.mark.parametrize(
    ("host", "address"),
    [("192.0.2.5", "tcp://192.0.2.5:7"), ("::1", "tcp://[::1]:7"), ("swarm.example.org", "tcp://swarm.example.org:7")],
)
def test_a_certain_host_is_announced_as_it_is(host: str, address: str) -> None:
    assert announced_addresses(host, 7) == (address,)


def test_the_way_to_the_internet_comes_first_and_loopback_last() -> None:
    hosts = ["127.0.0.1", "192.168.1.5", "10.0.0.3", "192.168.1.5", "169.254.3.4", "fe80::1%eth0", "2001:db8::7"]
    assert rank_hosts(hosts, "10.0.0.3", with_ipv6=False) == ["10.0.0.3", "192.168.1.5"]
    assert rank_hosts(hosts, None, with_ipv6=True) == ["192.168.1.5", "10.0.0.3", "2001:db8::7"]
    assert rank_hosts(["127.0.0.1", "::1"], None, with_ipv6=True) == ["127.0.0.1"]
    assert rank_hosts([], None, with_ipv6=False) == ["127.0.0.1"]


def test_bridges_that_every_machine_has_are_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Up:
        isup = True

    class Down:
        isup = False

    class Entry:
        family = interfaces.socket.AF_INET

        def __init__(self, address: str) -> None:
            self.address = address

    cards = {"docker0": "172.17.0.1", "eth0": "10.0.0.3", "br-1f": "172.18.0.1", "wlan0": "10.0.0.4", "lo": "127.0.0.1"}
    entries = {name: [Entry(address)] for name, address in cards.items()}
    states = {name: Up() for name in cards} | {"wlan0": Down()}
    monkeypatch.setattr(interfaces.psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(interfaces.psutil, "net_if_stats", lambda: states)
    monkeypatch.setattr(interfaces, "_outgoing_host", lambda: None)
    assert announced_addresses("0.0.0.0", 7) == ("tcp://10.0.0.3:7",)
