"""What one peer may write."""

from __future__ import annotations

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.service import WriteMeter

LIMITS = DHTLimits(writes_per_second=2.0, write_burst=4.0, bytes_per_second=100.0, bytes_burst=1000.0)


def test_a_burst_and_then_a_rate() -> None:
    meter = WriteMeter(LIMITS)
    assert [meter.allow(b"a", 10, now=0.0) for _ in range(5)] == [True] * 4 + [False]
    assert meter.allow(b"b", 10, now=0.0), "another peer has a budget of its own"
    assert [meter.allow(b"a", 10, now=1.0) for _ in range(3)] == [True, True, False]
    assert [meter.allow(b"a", 10, now=1000.0) for _ in range(5)] == [True] * 4 + [False]


def test_bytes_count_too() -> None:
    meter = WriteMeter(LIMITS)
    assert meter.allow(b"a", 900, now=0.0)
    assert not meter.allow(b"a", 101, now=0.0)
    assert meter.allow(b"a", 101, now=0.1)


def test_peers_are_forgotten_when_there_are_too_many() -> None:
    meter = WriteMeter(LIMITS, max_peers=2)
    for peer in (b"a", b"a", b"a", b"a", b"b", b"c"):
        assert meter.allow(peer, 1, now=0.0)
    assert meter.allow(b"a", 1, now=0.0)
