"""Where the sharded optimizer meets its ends: too few parameters, one rank alone, a rank that dies."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Adam

from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from tests.sharding.processes import Worlds
from tests.sharding.threads import in_threads
from tests.sharding.zero.parity import assert_bitwise, assert_state_equal, make_parameters, trained


def own_nothing(bucket_view: bool) -> int:
    """Fewer parameters than ranks, and one of them without elements."""
    ours = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0, 2))]
    optimizer = ZeroRedundancyOptimizer(ours, Adam, parameters_as_bucket_view=bucket_view, lr=0.1)
    trained(optimizer, ours, range(3))
    whole = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0, 2))]
    reference = Adam(whole, lr=0.1)
    trained(reference, whole, range(3))
    assert_bitwise(ours, whole)
    optimizer.consolidate_state_dict(to=optimizer.world_size - 1)
    if optimizer.rank == optimizer.world_size - 1:
        assert_state_equal(optimizer.state_dict(), reference.state_dict())
        optimizer.load_state_dict(reference.state_dict())
    return len(optimizer.local_state())


@pytest.mark.parametrize(("ranks", "bucket_view"), [(4, False), (4, True), (1, False)])
def test_ranks_may_own_nothing(ranks: int, bucket_view: bool) -> None:
    assert sum(in_threads(ranks, own_nothing, bucket_view)) == 2


def lose_a_rank() -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    parameters = make_parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, SGD, lr=0.1)
    trained(optimizer, parameters, range(1))
    if optimizer.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        optimizer.step()
    with pytest.raises(RuntimeError):
        optimizer.consolidate_state_dict(to=0)
    return "told"


@pytest.mark.e2e
def test_a_rank_that_dies_is_an_error_at_the_others(worlds: Worlds) -> None:
    survivor, dead = worlds(2, grouped=False).outcomes(lose_a_rank)
    assert (survivor.value, survivor.error) == ("told", None)
    assert dead.error is not None
