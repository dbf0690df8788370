"""Whose each parameter is, as groups come."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.sharding.zero.ownership import Ownership

GROUPS = st.lists(st.lists(st.integers(0, 20), max_size=8), min_size=1, max_size=4)


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
