"""A thousand rounds in which members are killed, frozen, cut off, or leave: whoever has a quorum shares one outcome."""

from __future__ import annotations

from collections import Counter

import pytest

from swarmcli.testing import virtual_time
from tests.averaging.chaos import play
from tests.suites import soak

# `make test` plays the first 5 seeds only: a round costs 0.2 s, and all others are in `make soak`.
CASES = [(0, 5, 2), *soak((first, 50, faults) for faults in (1, 2) for first in range(0, 500, 50))]


@pytest.mark.parametrize(("first", "count", "faults"), CASES)
def test_one_outcome_whatever_happens(first: int, count: int, faults: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(first, first + count):
        chaos, outcomes = virtual_time.run(play(seed, faults), seed=seed, timeout=3000)
        ends.update(type(outcome).__name__ for outcome in outcomes)
        ends["faults that came"] += len(chaos.happened)
    print(dict(ends))
    # One list is one try: where a reducer is lost all members fail, and others look for another group.
    assert ends["RoundResult"] > 1.5 * count and ends["faults that came"] > count * faults / 2
