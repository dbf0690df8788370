"""What one peer, and one prefix, may have a node do."""

from __future__ import annotations

from swarmcli.dht.service import Meter
from swarmcli.network.identity import Identity
from swarmcli.network.prefix import prefix_of

A, B, C = (Identity.from_seed(seed).peer_id for seed in range(3))
HERE, THERE = prefix_of("198.51.100.1"), prefix_of("203.0.113.1")


def test_a_burst_and_then_a_rate() -> None:
    meter = Meter(2.0, 4.0, 4.0)
    assert [meter.take(A, HERE, 1, now=0.0) for _ in range(5)] == [True] * 4 + [False]
    assert meter.take(B, HERE, 1, now=0.0), "another peer has a budget of its own"
    assert [meter.take(A, HERE, 1, now=1.0) for _ in range(3)] == [True, True, False]
    assert [meter.take(A, HERE, 1, now=1000.0) for _ in range(5)] == [True] * 4 + [False]


def test_many_peers_of_one_prefix_have_one_budget_unless_strangers_share_it() -> None:
    meter = Meter(1.0, 10.0, 2.0)
    assert [meter.take(peer, HERE, 10, now=0.0) for peer in (A, B, C)] == [True, True, False]
    assert meter.take(C, THERE, 10, now=0.0), "what was refused was not counted"
    at_home = Meter(1.0, 10.0, 2.0)
    assert all(at_home.take(peer, prefix_of("192.168.1.2"), 10, now=0.0) for peer in (A, B, C))


def test_what_is_owed_is_missing_later() -> None:
    meter = Meter(1.0, 10.0, 4.0)
    meter.owe(A, HERE, 15, now=0.0)
    assert not meter.take(A, HERE, 1, now=5.0)
    assert meter.take(A, HERE, 1, now=6.0)


def test_peers_are_forgotten_when_there_are_too_many() -> None:
    meter = Meter(1.0, 4.0, 100.0, most=2)
    for peer in (A, A, A, A, B, C):
        assert meter.take(peer, HERE, 1, now=0.0)
    assert meter.take(A, HERE, 1, now=0.0)
