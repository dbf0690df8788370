"""The harnesses themselves: what goes through it, and what a rank that fails looks like in the test."""

from __future__ import annotations

import os
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.sharding.processes import RankFailed, Worlds
from tests.sharding.threads import in_threads


def gather(start: float) -> dict[str, object]:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "total": total, "pid": os.getpid(), "draw": torch.rand(2)}


def fail_in_one() -> None:
    if dist.get_rank() == 1:
        print("the last words", file=sys.stderr)
        raise ValueError("rank 1 has had enough")
    dist.barrier()


@pytest.mark.e2e
def test_a_failed_rank_is_shown_and_the_next_check_has_a_new_world(worlds: Worlds) -> None:
    before = worlds(2).run(gather, 0.0)
    with pytest.raises(RankFailed, match=r"rank 1: Traceback(.|\n)*has had enough(.|\n)*the last words"):
        worlds(2).run(fail_in_one)
    assert not any(psutil.pid_exists(each["pid"]) for each in before)
    assert [float(each["total"]) for each in worlds(2).run(gather, 1.0)] == [3.0, 3.0]


def test_a_rank_that_fails_in_a_thread_is_shown_and_the_others_do_not_wait_for_it() -> None:
    with pytest.raises(RankFailed, match=r"rank 1: Traceback(.|\n)*has had enough"):
        in_threads(2, fail_in_one)
    assert [float(each["total"]) for each in in_threads(2, gather, 1.0)] == [3.0, 3.0]
