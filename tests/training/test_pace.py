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


@pytest.mark.parametrize(("share", "batch"), [(0.1, 0.01), (0.1, 0.4), (0.9, 0.1)])
def test_a_share_of_the_time_is_kept_over_ten_seconds(share: float, batch: float) -> None:
    clock = Clock()
    pace = ComputePace(share, clock=clock)
    began, computed = clock.now, 0.0
    while clock.now < began + 10:
        compute(pace, clock, batch)
        computed += batch
    assert computed / (clock.now - began) == pytest.approx(share, rel=0.1)


def test_it_rests_after_each_batch_and_not_in_bursts() -> None:
    clock = Clock()
    pace = ComputePace(0.5, clock=clock)
    compute(pace, clock, 0.3)
    assert [compute(pace, clock, 0.1) for _ in range(20)] == pytest.approx([0.1] * 20)


def test_waiting_for_others_counts_as_rest_and_is_not_saved_up() -> None:
    clock = Clock()
    pace = ComputePace(0.5, clock=clock)
    pace.begin()
    clock.now += 2.0
    pace.end()
    clock.now += 1.5  # a round
    assert pace.owed == pytest.approx(0.5)
    clock.now += 3600.0
    assert pace.owed == 0.0
    assert compute(pace, clock, 0.5 + 0.2) == pytest.approx(0.2)


def test_a_rest_that_takes_longer_than_asked_is_made_up_for() -> None:
    clock = Clock()
    pace = ComputePace(0.5, clock=clock)
    for _ in range(50):
        compute(pace, clock, 0.1)
        clock.now += 0.02  # the system wakes the thread late
    assert compute(pace, clock, 0.1) < 0.1


def test_another_share_counts_from_now_on_also_in_the_middle_of_a_rest() -> None:
    clock = Clock()
    pace = ComputePace(0.1, clock=clock)
    pace.begin()
    clock.now += 1.0
    pace.end()
    assert pace.owed == pytest.approx(9.0, rel=0.1)
    pace.share = 0.5
    assert pace.owed == pytest.approx(1.0, rel=0.1)
    pace.share = 1.0
    assert pace.owed == 0.0
    assert compute(pace, clock, 5.0) == 0.0
