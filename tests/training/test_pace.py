from __future__ import annotations

import pytest

from swarmcli.training.loop import ComputePace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def compute(pace: ComputePace, clock: Clock, seconds: float) -> float:
    """A batch, and the rest behind it."""
    pace.begin()
    clock.now += seconds
    pace.end()
    rested = pace.owed
    clock.now += rested
    return rested


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> ComputePace:
    return ComputePace(0.5, clock=clock)


@pytest.mark.parametrize(("share", "batch"), [(0.1, 0.01), (0.1, 0.4), (0.9, 0.1)])
def test_a_share_of_the_time_is_kept_over_ten_seconds(share: float, batch: float, clock: Clock) -> None:
    pace, began, computed = ComputePace(share, clock=clock), clock.now, 0.0
    while clock.now < began + 10:
        compute(pace, clock, batch)
        computed += batch
    assert computed / (clock.now - began) == pytest.approx(share, rel=0.1)


def test_it_rests_after_each_batch_not_in_bursts_and_makes_up_for_long_rests(pace: ComputePace, clock: Clock) -> None:
    compute(pace, clock, 0.3)
    assert [compute(pace, clock, 0.1) for _ in range(20)] == pytest.approx([0.1] * 20)
    for _ in range(50):
        compute(pace, clock, 0.1)
        clock.now += 0.02  # the system wakes the thread late
    assert compute(pace, clock, 0.1) < 0.1


def test_waiting_for_others_counts_as_rest_and_is_not_saved_up(pace: ComputePace, clock: Clock) -> None:
    pace.begin()
    clock.now += 2.0
    pace.end()
    clock.now += 1.5  # a round
    assert pace.owed == pytest.approx(0.5)
    clock.now += 3600.0
    assert pace.owed == 0.0
    assert compute(pace, clock, 0.5 + 0.2) == pytest.approx(0.2)


def test_another_share_counts_from_now_on_also_in_the_middle_of_a_rest(pace: ComputePace, clock: Clock) -> None:
    pace.share = 0.1
    pace.begin()
    clock.now += 1.0
    pace.end()
    for share, owed in ((0.1, 9.0), (0.5, 1.0), (1.0, 0.0)):
        pace.share = share
        assert pace.owed == pytest.approx(owed, rel=0.1)
    assert compute(pace, clock, 5.0) == 0.0
