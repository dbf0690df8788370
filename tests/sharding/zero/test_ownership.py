"""Which rank owns each parameter, as groups are added; and each of DDP's buckets."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.sharding.zero.ownership import Ownership, Share, assign, share_out

GROUPS = st.lists(st.lists(st.integers(0, 20), max_size=8), min_size=1, max_size=4)


@settings(max_examples=25)
@given(GROUPS, st.integers(1, 4))
def test_groups_that_come_later_move_nothing(groups: list[list[int]], ranks: int) -> None:
    ownership = Ownership([1.0] * ranks)
    everything: list[torch.Tensor] = []
    for sizes in groups:
        before = list(ownership.owners)
        group = [torch.empty(size) for size in sizes]
        ownership.take_on(group)
        shares = ownership.by_rank(group, first=len(everything))
        everything += group
        assert ownership.owners[: len(before)] == before
        assert sum(map(len, shares)) == len(group)
    for rank, share in enumerate(ownership.by_rank(everything)):
        assert [id(everything[index]) for index in ownership.indices_of(rank)] == [id(each) for each in share]


def test_bytes_are_shared_out_and_not_elements() -> None:
    ownership = Ownership([1.0, 1.0])
    ownership.take_on([torch.empty(10, dtype=torch.float64), *(torch.empty(10, dtype=torch.int16) for _ in range(4))])
    assert ownership.owners == [0, 1, 1, 1, 1]


SIZES = st.lists(st.integers(0, 10**9), max_size=40)
# Not so small that a division by them has no room left.
WEIGHTS = st.lists(st.just(0.0) | st.floats(1e-9, 100.0), min_size=1, max_size=8).filter(
    lambda weights: max(weights) > 1e-3
)


@settings(max_examples=25)
@given(SIZES, WEIGHTS)
def test_nobody_holds_more_than_the_bound(sizes: list[int], weights: list[float]) -> None:
    loads = [0] * len(weights)
    assign(sizes, loads, weights)
    able = sum(weight > 0 for weight in weights)
    most = (sum(sizes) + (able - 1) * max(sizes, default=0)) / math.fsum(weights)
    for load, weight in zip(loads, weights, strict=True):
        assert load <= weight * most * (1 + 1e-9)


BUCKETS = st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=8), min_size=1, max_size=8)


def test_a_large_bucket_is_split_into_runs() -> None:
    assert share_out([[4, 4, 4, 4]], 2, split=True) == [
        Share(0, 0, 0, 1),
        Share(0, 1, 1, 2),
        Share(0, 0, 2, 3),
        Share(0, 1, 3, 4),
    ]
    assert share_out([[4, 4, 4, 4]], 2, split=False) == [Share(0, 0, 0, 4)]


@settings(max_examples=25)
@given(sizes=BUCKETS, ranks=st.integers(1, 5), split=st.booleans())
def test_every_parameter_has_one_owner_and_shares_are_in_order_and_even_up_to_one_run(
    sizes: list[list[int]], ranks: int, split: bool
) -> None:
    shares = share_out(sizes, ranks, split=split)
    covered = [(share.bucket, index) for share in shares for index in range(share.start, share.stop)]
    assert covered == [(bucket, index) for bucket, parameters in enumerate(sizes) for index in range(len(parameters))]
    loads = [0] * ranks
    for share in shares:
        loads[share.rank] += sum(sizes[share.bucket][share.start : share.stop])
    if split:
        even = sum(map(sum, sizes)) / ranks
        assert max(loads) <= even + max(even, *map(max, sizes)) * (ranks - 1) / ranks + 1e-9
    else:
        assert len(shares) == len(sizes)
