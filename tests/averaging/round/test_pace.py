"""Streams that are too slow for their time."""

from __future__ import annotations

import math

import pytest

from swarmcli.averaging.round import pace
from swarmcli.averaging.round.pace import GRACE, Pace, RoundTime

LIMIT = 60.0


def test_nobody_is_too_slow_before_half_of_the_streams_are_done() -> None:
    streams = Pace(4, LIMIT)
    streams.note_done()
    assert not streams.is_too_slow(LIMIT * 10, 0.0)
    streams.note_done()
    assert streams.is_too_slow(LIMIT * 10, 0.0)


@pytest.mark.parametrize(
    ("seconds", "fraction", "given_up"),
    [(GRACE - 1, 0.0, False), (GRACE + 1, 0.0, True), (20.0, 0.5, False), (20.0, 0.3, True), (LIMIT + 1, 0.99, True)],
)
def test_a_stream_is_judged_by_when_it_would_end(seconds: float, fraction: float, given_up: bool) -> None:
    streams = Pace(1, LIMIT)
    streams.note_done()
    assert streams.is_too_slow(seconds, fraction) == given_up


def test_a_reducer_is_not_judged_before_a_sender_that_is_slow_to_it_alone_was_given_up() -> None:
    time = 60.0
    parts, averages = pace.of_parts(time, 2), pace.of_averages(time, 2)
    for streams in (parts, averages):
        streams.note_done()
        streams.note_done()
    first = next(second for second in range(100) if parts.is_too_slow(second, second / (time * pace.SENDERS) - 0.01))
    assert not any(averages.is_too_slow(second, 0.0) for second in range(first + 2))
    assert averages.is_too_slow(time * pace.SENDERS + 3, 0.0)


def test_a_round_that_needs_longer_gets_longer_and_in_the_end_as_long_as_was_wished() -> None:
    time = RoundTime(60.0)
    assert not time.learn(math.inf, 60.0) and time.seconds == 60.0  # hardly anything moved: more time is no cure
    assert time.learn(100.0, 60.0) and time.seconds == 150.0
    assert not time.learn(0.0, 90.0) and time.seconds == 150.0
    time.learn(0.0, 5.0)
    assert time.seconds == 60.0
    time.learn(1e6, 60.0)
    assert time.seconds == 60.0 * pace.MOST_STRETCHED
