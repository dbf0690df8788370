"""Addresses: read strictly, announced as others can dial them, and counted by one prefix for each owner."""

from __future__ import annotations

import pytest

from swarmcli.errors import AddressError
from swarmcli.network.addresses import Address, parse_address
from swarmcli.network.identity import Identity
from swarmcli.network.prefix import Prefix, prefix_of, prefix_of_address
from swarmcli.network.transports.tcp import interfaces
from swarmcli.network.transports.tcp.interfaces import announced_addresses, rank_hosts

PEER = Identity.from_seed(1).peer_id


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://203.0.113.7:31330", Address("tcp", "203.0.113.7", 31330)),
        (f"tcp://swarm.example.org:1/{PEER}", Address("tcp", "swarm.example.org", 1, PEER)),
        ("tcp://my_host-2:65535", Address("tcp", "my_host-2", 65535)),
        ("tcp://[2001:db8::7]:31330", Address("tcp", "2001:db8::7", 31330)),
        (f"tcp://[::1]:80/{PEER}", Address("tcp", "::1", 80, PEER)),
        ("memory://abc", Address("memory", "abc")),
        (f"memory://{PEER.short}/{PEER}", Address("memory", PEER.short, 0, PEER)),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


def test_anything_else_is_refused_and_shown() -> None:
    shapes = "localhost:80 http://host:80 tcp:/host:80 tcp:// tcp://host tcp://host: tcp://:80 tcp://host:80:90"
    ports = "tcp://host:0 tcp://host:65536 tcp://host:-1 tcp://host:+1 tcp://host:1_0 tcp://host:٣"
    rest = f"tcp://host:80/ tcp://host:80/short tcp://host:80/{PEER}/more tcp://::1:80 tcp://[::1:80 tcp://[host]:80"
    odd = ["", "tcp://ho st:80", "tcp://-host:80", "tcp://host\n:80", "memory://", "memory://a b"]
    for text in (*shapes.split(), *ports.split(), *rest.split(), *odd):
        with pytest.raises(AddressError, match="expected") as caught:
            parse_address(text)
        assert isinstance(caught.value, ValueError), text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/ip4/203.0.113.7/tcp/31330/p2p/QmXyz", r"is here tcp://203\.0\.113\.7:31330; expected"),
        ("/ip6/2001:db8::7/tcp/80", r"is here tcp://\[2001:db8::7\]:80; expected"),
        ("/dns4/example.org/tcp/80", r"is here tcp://example\.org:80; expected"),
        ("/ip4/203.0.113.7/udp/31330/quic", "addresses are URLs over TCP here, no multiaddrs; expected"),
    ],
)
def test_a_multiaddr_is_told_as_what_it_is_here(text: str, words: str) -> None:
    with pytest.raises(AddressError, match=words):
        parse_address(text)


def test_a_peer_is_refused_that_sends_no_text_or_too_much() -> None:
    for nonsense in (None, 7, b"tcp://host:80", "tcp://" + "h" * 10_000 + ":80"):
        with pytest.raises(AddressError) as caught:
            parse_address(nonsense)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 200


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


def test_each_kind_of_address_has_its_bucket() -> None:
    teredo = "2001:0:4136:e378:8000:63bf:3fff:fdd2"
    for kind, network, hosts in (
        ("internet", "192.0.2.0/24", f"192.0.2.7 ::ffff:192.0.2.200 2002:c000:0207::1 {teredo}"),  # 6to4, Teredo
        ("internet", "2001:db8:1::/48", "2001:db8:1:2::3"),
        ("host", "this machine", "127.0.0.1 127.9.9.9 ::1"),
        ("LAN", "192.168.1.0/24", "192.168.1.9"),
        ("LAN", "fe80::/48", "fe80::1%eth0"),
        ("carrier", "100.64.3.0/24", "100.64.3.9"),
        ("name", "somebody", "somebody"),
    ):
        for host in hosts.split():
            found = prefix_of(host)
            assert (found.kind, found.network) == (kind, network)
            assert found.shared == (kind in ("host", "LAN", "carrier"))


def test_addresses_of_one_owner_are_one_bucket_whatever_their_ports() -> None:
    assert prefix_of_address("tcp://192.0.2.7:4000") == prefix_of_address("tcp://192.0.2.200:1")
    assert prefix_of_address("memory://somebody:77") == prefix_of_address("memory://somebody:78")
    assert prefix_of("5.2.3.4", 16) == prefix_of("5.2.200.1", 16) == Prefix("internet", "5.2.0.0/16")
    assert prefix_of_address("no address\x1b") == Prefix("name", "no address\x1b")


def test_whoever_comes_through_a_relay_is_in_the_relays_bucket() -> None:
    relay, one, other = (Identity.generate().peer_id.text for _ in range(3))
    assert prefix_of_address(f"relay://{relay}/{one}") == prefix_of_address(f"relay://{relay}/{other}")
    assert prefix_of_address(f"relay://{relay}/{one}").shared
