"""Buckets of tokens, and bounds by several keys at once, under a time that the test makes up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmcli.network.identity import Identity
from swarmcli.network.prefix import prefix_of
from swarmcli.network.token_bucket import Meter, TokenBucket


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 500)), min_size=1, max_size=40))
def test_never_more_goes_through_than_the_burst_and_what_came_in_since(asked: list[tuple[float, float]]) -> None:
    rate, burst, now, through = 100.0, 150.0, 0.0, 0.0
    bucket = TokenBucket(rate, burst)
    last = 0.0
    for pause, amount in asked:
        now += pause
        at = now + bucket.take(amount, now)
        through += amount
        assert through <= burst + rate * at + 1e-6
        assert at >= last - 1e-6, "who asks later gets through later"
        last = at


A, B, C = (Identity.from_seed(seed).peer_id for seed in range(3))
HERE, THERE = prefix_of("198.51.100.1"), prefix_of("203.0.113.1")


def test_a_burst_and_then_a_rate() -> None:
    meter = Meter(peer=(2.0, 4.0))
    assert [meter.take(0.0, peer=A) for _ in range(5)] == [True] * 4 + [False]
    assert meter.take(0.0, peer=B), "another peer has a budget of its own"
    assert [meter.take(1.0, peer=A) for _ in range(3)] == [True, True, False]
    assert [meter.take(1000.0, peer=A) for _ in range(5)] == [True] * 4 + [False]


def test_many_peers_of_one_prefix_have_one_budget_unless_strangers_share_it() -> None:
    meter = Meter(peer=(1.0, 10.0), prefix=(2.0, 20.0))
    assert [meter.take(0.0, 10, peer=peer, prefix=HERE) for peer in (A, B, C)] == [True, True, False]
    assert meter.take(0.0, 10, peer=C, prefix=THERE), "what was refused was not counted"
    at_home = Meter(peer=(1.0, 10.0), prefix=(2.0, 20.0))
    assert all(at_home.take(0.0, 10, peer=peer) for peer in (A, B, C)), "the caller names no prefix that is shared"


def test_one_budget_for_everyone_is_asked_last() -> None:
    meter = Meter(peer=(1.0, 2.0), everyone=(1.0, 3.0))
    assert [meter.take(0.0, peer=peer) for peer in (A, A, A, B, B)] == [True, True, False, True, False]
    meter.give_back(peer=A)
    assert meter.take(0.0, peer=B) and not meter.take(0.0, peer=A)
