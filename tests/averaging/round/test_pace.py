"""How long the streams of a round may take, and which of them is given up."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.averaging.round.pace import FOR_SENDERS, LAST, MOST_STRETCHED, LaggedError, Pace, Tempo, round_time
from swarmcli.testing import virtual_time

TIME = 60.0


def tempo(planned: float | None = 1.0, round_trip: float = 0.0) -> Tempo:
    made = Tempo(TIME, planned, round_trip)
    made.all_begun = 0.0
    return made


@pytest.mark.parametrize(
    ("planned", "round_trip", "patience"),
    [
        (1.0, 0.01, 3.0),  # three times what was planned
        (0.01, 0.1, 1.8),  # or a second and eight round trips
        (0.01, 100.0, 6.0),  # whose length nobody makes up
        (None, 0.01, TIME / 3),  # where nothing is known
        (1000.0, 0.01, TIME * FOR_SENDERS),  # and never beyond a part of the round's time
    ],
)
def test_what_a_stream_may_take(planned: float | None, round_trip: float, patience: float) -> None:
    assert tempo(planned, round_trip).patience == pytest.approx(patience)


def test_it_may_take_longer_where_most_do() -> None:
    busy = tempo()
    busy.took += [4.0, 4.0, 0.1]
    assert busy.patience == pytest.approx(12.0)


def stream(streams: Pace, share: float, began: float = 0.0) -> float:
    """Seconds after which a stream is done, or (negative) given up, that brings this share of itself per second."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(began)
        start = loop.time()
        try:
            async with streams.keeping_up(1, lambda: (loop.time() - start) * share):
                await asyncio.sleep(1 / share if share else 1e6)
        except LaggedError:
            return start - loop.time()
        return loop.time() - start

    return virtual_time.run(main(), timeout=1e7)


@pytest.mark.parametrize(
    ("share", "ends"),
    [
        (1.0, 1.0),
        (1 / 3.9, 3.9),  # by its rate it is done soon
        (1 / 4.2, -3.0),
        (0.0, -3.0),
    ],
)
def test_a_stream_is_judged_by_when_it_would_end(share: float, ends: float) -> None:
    streams = Pace(tempo(), 2)
    streams._half = 0.0
    assert stream(streams, share) == pytest.approx(ends, abs=0.01)


def test_nobody_is_given_up_before_half_of_the_streams_are_done() -> None:
    assert stream(Pace(tempo(), 4), 1 / 50) == pytest.approx(50)


def test_a_sender_is_judged_from_when_all_have_begun() -> None:
    late = tempo()
    late.all_begun = 40.0
    streams = Pace(late, 2)
    streams._half = 0.0
    assert stream(streams, 0.0) == pytest.approx(-43.0, abs=0.3)


def test_a_reducer_is_not_judged_before_a_sender_that_is_slow_to_it_alone_was_given_up() -> None:
    known = tempo()
    streams = Pace(known, 2, averages=True)
    streams._half, known.begun[1] = 10.0, 0.0
    assert stream(streams, 0.0) < -10 - LAST * 3
    known.slow[1] = "it was too slow"  # as a sender: then its averages are not waited for either
    assert -11 < stream(streams, 0.0) <= -10


def test_a_round_whose_senders_need_longer_than_the_user_allows_gets_longer() -> None:
    assert round_time(None, 1e3) is None
    assert round_time(60.0, 5.0) == 60.0
    assert round_time(60.0, 90.0) == pytest.approx(600.0)
    assert round_time(60.0, 1e6) == 60.0 * MOST_STRETCHED
