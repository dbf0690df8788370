"""Who steps what of DDP's buckets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmcli.sharding.zero.bucket_shares import Share, share_out

BUCKETS = st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=8), min_size=1, max_size=8)


def test_whole_buckets_go_to_the_emptiest_rank_the_largest_first() -> None:
    sizes = [[1, 2], [10], [3, 3, 3], [4]]
    assert share_out(sizes, 2, split=False) == [
        Share(0, 0, 0, 2),
        Share(1, 0, 0, 1),
        Share(2, 1, 0, 3),
        Share(3, 1, 0, 1),
    ]


def test_a_large_bucket_is_split_into_runs() -> None:
    assert share_out([[4, 4, 4, 4]], 2, split=True) == [
        Share(0, 0, 0, 1),
        Share(0, 1, 1, 2),
        Share(0, 0, 2, 3),
        Share(0, 1, 3, 4),
    ]
    assert share_out([[4, 4, 4, 4]], 2, split=False) == [Share(0, 0, 0, 4)]


@given(sizes=BUCKETS, ranks=st.integers(1, 5), split=st.booleans())
def test_every_parameter_has_one_owner_and_the_shares_are_in_order(
    sizes: list[list[int]], ranks: int, split: bool
) -> None:
    shares = share_out(sizes, ranks, split=split)
    covered = [(share.bucket, index) for share in shares for index in range(share.start, share.stop)]
    assert covered == [(bucket, index) for bucket, parameters in enumerate(sizes) for index in range(len(parameters))]
    assert all(0 <= share.rank < ranks for share in shares)
    if not split:
        assert len(shares) == len(sizes)


@given(sizes=BUCKETS, ranks=st.integers(1, 5))
def test_split_shares_are_even_up_to_one_run(sizes: list[list[int]], ranks: int) -> None:
    total, largest = sum(map(sum, sizes)), max(map(max, sizes))
    loads = [0] * ranks
    for share in share_out(sizes, ranks, split=True):
        loads[share.rank] += sum(sizes[share.bucket][share.start : share.stop])
    run = max(total / ranks, largest)
    assert max(loads) <= total / ranks + run * (ranks - 1) / ranks + 1e-9
