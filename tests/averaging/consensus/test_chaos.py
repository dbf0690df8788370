"""A thousand rounds in which members are killed, frozen, cut off, or leave: whoever has a quorum shares one outcome."""

from __future__ import annotations

from collections import Counter

import pytest

from swarmcli.testing import virtual_time
from tests.averaging.chaos import play
from tests.suites import soak

BLOCK = 50


@pytest.mark.parametrize("faults", [1, 2])
@pytest.mark.parametrize("block", [0, *soak(range(1, 10))])
def test_one_outcome_whatever_happens(block: int, faults: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(block * BLOCK, block * BLOCK + BLOCK):
        chaos, outcomes = virtual_time.run(play(seed, faults), seed=seed, timeout=3000)
        ends.update(type(outcome).__name__ for outcome in outcomes)
        ends["faults that came"] += len(chaos.happened)
    print(dict(ends))
    assert ends["AllreduceResult"] > 100 and ends["faults that came"] > BLOCK * faults / 2
