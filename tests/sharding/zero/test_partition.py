"""The share-out of parameters: complete, balanced within the bound it states, and the same wherever it is computed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.sharding.zero.partition import assign, check_weights

SIZES = st.lists(st.integers(0, 10**9), max_size=40)
# Not so small that a division by them has no room left.
WEIGHTS = st.lists(st.just(0.0) | st.floats(1e-9, 100.0), min_size=1, max_size=8).filter(
    lambda weights: max(weights) > 1e-3
)


def emptiest_rank(sizes: list[int], ranks: int) -> list[int]:
    """The rule in its simplest words, for ranks that are alike: largest first, each to the emptiest rank."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


@given(SIZES, st.integers(1, 8))
def test_equal_weights_are_the_sorted_greedy_rule(sizes: list[int], ranks: int) -> None:
    assert assign(sizes, [0] * ranks, [2.5] * ranks) == emptiest_rank(sizes, ranks)


@given(SIZES, WEIGHTS)
def test_everything_is_owned_and_the_loads_are_counted(sizes: list[int], weights: list[float]) -> None:
    loads = [0] * len(weights)
    owners = assign(sizes, loads, weights)
    assert len(owners) == len(sizes)
    assert loads == [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(len(weights))
    ]
    assert all(weights[owner] > 0 for owner in owners)


@given(SIZES, WEIGHTS)
def test_nobody_holds_more_than_the_bound(sizes: list[int], weights: list[float]) -> None:
    loads = [0] * len(weights)
    assign(sizes, loads, weights)
    able = sum(weight > 0 for weight in weights)
    most = (sum(sizes) + (able - 1) * max(sizes, default=0)) / math.fsum(weights)
    for load, weight in zip(loads, weights, strict=True):
        assert load <= weight * most * (1 + 1e-9)


@given(SIZES, SIZES, WEIGHTS)
def test_a_later_group_fills_up_what_the_earlier_left(
    first: list[int], second: list[int], weights: list[float]
) -> None:
    loads = [0] * len(weights)
    assign(first, loads, weights)
    before = list(loads)
    owners = assign(second, loads, weights)
    assert sum(loads) == sum(before) + sum(second)
    assert all(load >= earlier for load, earlier in zip(loads, before, strict=True))
    if len(second) == 1:  # goes where it leaves the fullest rank least full
        fullness = [
            (load + second[0]) / weight if weight else math.inf for load, weight in zip(before, weights, strict=True)
        ]
        assert fullness[owners[0]] == min(fullness)


@given(SIZES, WEIGHTS, st.integers(-3, 3))
def test_the_unit_of_the_weights_does_not_matter(sizes: list[int], weights: list[float], power: int) -> None:
    scaled = [weight * 2.0**power for weight in weights]
    assert assign(sizes, [0] * len(weights), weights) == assign(sizes, [0] * len(weights), scaled)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], "2 weights for 3 ranks"),
        ([1.0, -2.0, 1.0], "share of rank 1 is -2.0"),
        ([1.0, 2.0, math.nan], "share of rank 2 is nan"),
        ([math.inf, 2.0, 1.0], "share of rank 0 is inf"),
        ([0.0, 0, 0.0], "all shares are 0"),
    ],
)
def test_weights_that_share_nothing_out_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_weights(weights, 3)


def test_weights_may_be_whole_numbers() -> None:
    assert check_weights([0, 3], 2) == [0.0, 3.0]
