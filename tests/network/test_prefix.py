"""Buckets of addresses: one for each owner, as far as can be told, and others for what honest peers share."""

import pytest

from swarmcli.network.identity import Identity
from swarmcli.network.prefix import Prefix, prefix_of, prefix_of_address


@pytest.mark.parametrize(
    ("host", "kind", "network"),
    [
        ("192.0.2.7", "internet", "192.0.2.0/24"),
        ("::ffff:192.0.2.200", "internet", "192.0.2.0/24"),
        ("2002:c000:0207::1", "internet", "192.0.2.0/24"),  # 6to4
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "internet", "192.0.2.0/24"),  # Teredo
        ("2001:db8:1:2::3", "internet", "2001:db8:1::/48"),
        ("127.0.0.1", "host", "this machine"),
        ("127.9.9.9", "host", "this machine"),
        ("::1", "host", "this machine"),
        ("192.168.1.9", "LAN", "192.168.1.0/24"),
        ("fe80::1%eth0", "LAN", "fe80::/48"),
        ("100.64.3.9", "carrier", "100.64.3.0/24"),
        ("somebody", "name", "somebody"),
        ("1.2.3", "name", "1.2.3"),
    ],
)
def test_each_kind_of_address_has_its_bucket(host: str, kind: str, network: str) -> None:
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
