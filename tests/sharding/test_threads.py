"""The harness of threads itself: what a rank that fails looks like in the test."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.sharding.processes import RankFailed
from tests.sharding.threads import in_threads


def gather(start: float) -> torch.Tensor:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return total


def fail_in_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def test_a_rank_that_fails_in_a_thread_is_shown_and_the_others_do_not_wait_for_it() -> None:
    with pytest.raises(RankFailed, match=r"rank 1: Traceback(.|\n)*has had enough"):
        in_threads(2, fail_in_one)
    assert [float(each) for each in in_threads(2, gather, 1.0)] == [3.0, 3.0]
