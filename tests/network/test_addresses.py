"""Addresses are read strictly, written back the same, and named when they are wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.errors import AddressError
from swarmcli.network.addresses import Address, format_address, parse_address
from swarmcli.network.identity import Identity

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
    assert format_address(address) == str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:80",
        "http://host:80",
        "tcp:/host:80",
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://:80",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:+1",
        "tcp://host:1_0",
        "tcp://host:٣",
        "tcp://host:80:90",
        "tcp://ho st:80",
        "tcp://host:80/",
        "tcp://host:80/short",
        f"tcp://host:80/{PEER}/more",
        "tcp://::1:80",
        "tcp://[::1:80",
        "tcp://[host]:80",
        "tcp://-host:80",
        "tcp://host\n:80",
        "memory://",
        "memory://a b",
    ],
)
def test_anything_else_is_refused_and_shown(text: str) -> None:
    with pytest.raises(AddressError, match="expected") as caught:
        parse_address(text)
    assert isinstance(caught.value, ValueError)


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


@given(st.text(max_size=60))
def test_no_text_raises_anything_but_an_address_error(text: str) -> None:
    for candidate in (text, "tcp://" + text, "tcp://[" + text + "]:80", "memory://" + text):
        try:
            address = parse_address(candidate)
        except AddressError:
            continue
        assert parse_address(str(address)) == address
