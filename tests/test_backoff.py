"""Pauses by key: how they grow, and how they end."""

from __future__ import annotations

from swarmcli.backoff import Backoff


def test_each_pause_lasts_longer_than_the_one_before_up_to_a_bound() -> None:
    known, now, expected = Backoff[str](15.0, 3600.0, growth=4.0), 0.0, 15.0
    for _ in range(6):
        known.add("one", now)
        known.add("one", now)  # one that lasts already is not made longer
        assert known.rests("one", now + expected - 0.1) and not known.rests("other", now)
        now += expected
        assert not known.rests("one", now)
        expected = min(4 * expected, 3600.0)
    assert expected == 3600.0


def test_whoever_needed_no_pause_for_long_or_is_forgiven_begins_anew() -> None:
    known = Backoff[str](1, 64)
    for epoch in (0, 1, 3):
        known.add("one", epoch)
    known.add("one", 7 + 63)
    assert known.rests("one", 70 + 7)
    known.forget("one")
    known.add("one", 80)
    assert known.rests("one", 80) and not known.rests("one", 81)
    known.add("one", 81)
    known.add("one", 83 + 64)
    assert not known.rests("one", 83 + 65)


def test_memory_is_bounded() -> None:
    known = Backoff[int](1, 64, most=2)
    for key in range(5):
        known.add(key, 0)
    assert [key for key in range(5) if known.rests(key, 0)] == [3, 4]
