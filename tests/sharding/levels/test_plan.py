"""When which level averages, and what is said about hierarchies that make no sense."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from typing import Any

import numpy
import pytest

from swarmcli.sharding.levels.plan import LevelPlan, read_plan


def due(periods: tuple[int, ...], steps: int, warmup: int = 0) -> list[int | None]:
    plan = LevelPlan(periods, (2,) * len(periods), warmup)
    return [plan.due(step) for step in range(steps)]


def test_the_last_level_whose_period_divides_the_step() -> None:
    assert due((2, 4), 9) == [1, None, 0, None, 1, None, 0, None, 1]
    assert due((2, 3), 7) == [1, None, 0, 1, 0, None, 1]
    assert due((1,), 3) == [0, 0, 0]
    assert due((4, 2), 5) == [1, None, 1, None, 1], "also out of order"
    assert due((2, 4), 7, warmup=3) == [None, None, None, None, 1, None, 0], "nothing during warm-up"


def test_what_is_read() -> None:
    plan = read_plan(OrderedDict([(2, 4), (8, 16)]), 3)
    assert plan == LevelPlan((2, 8), (4, 16), 3)
    assert read_plan({numpy.int64(2): numpy.int32(4)}, numpy.int64(1)) == LevelPlan((2,), (4,), 1)
    assert read_plan({2: 4, 8: None}, 0, swarm=True).group_sizes == (4, None)


@pytest.mark.parametrize(
    ("given", "warmup", "kind", "words"),
    [
        ({}, 0, ValueError, "period_group_size_dict is empty; give at least one level"),
        ([(2, 4)], 0, TypeError, "period_group_size_dict must be a mapping of periods to group sizes, got list"),
        ({0: 4}, 0, ValueError, "a period in period_group_size_dict=0: expected at least 1"),
        ({2: None}, 0, TypeError, "the group size of period 2=None: expected a whole number"),
        ({2: 4}, -1, ValueError, "warmup_steps=-1: expected at least 0"),
    ],
)
def test_what_is_refused(given: Any, warmup: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        read_plan(given, warmup)


def test_unusual_hierarchies_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="largest period is 1"):
        read_plan({1: 4}, 0)
    with pytest.warns(UserWarning, match="level of period 4 never averages: the later one of period 2"):
        read_plan({4: 2, 2: 4}, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_plan({1: 2, 2: 4, 8: 8}, 0)
        read_plan({2: 2, 3: 4}, 0)
        read_plan({1: None}, 0, swarm=True)
