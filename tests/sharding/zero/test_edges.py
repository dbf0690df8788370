"""Where the sharded optimizer meets others: too few parameters, one rank alone, scalers, hooks, a rank that dies."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Adam

from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from tests.sharding.processes import Worlds
from tests.sharding.threads import in_threads, ranks
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


@ranks(2)
def test_a_scaler_steps_it_and_leaves_steps_out() -> None:
    """A scaled step, then one whose gradients overflow: torch's scaler must be able to leave that out."""
    ours, whole = make_parameters(), make_parameters()
    optimizers: list[Any] = [ZeroRedundancyOptimizer(ours, SGD, lr=0.1), SGD(whole, lr=0.1)]
    scales = []
    for optimizer, parameters in zip(optimizers, (ours, whole), strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(torch.stack([(parameter**2).sum() for parameter in parameters]).sum()).backward()
            if step == 1:
                parameters[3].grad = torch.tensor(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert_bitwise(ours, whole)
    assert scales == [8.0, 8.0]


@ranks(2)
def test_hooks_run_as_with_any_optimizer() -> None:
    seen: list[str] = []
    parameters = make_parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, SGD, lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before the step"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after the step"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("state dict"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("load"))
    trained(optimizer, parameters, range(1))
    for rank in range(optimizer.world_size):
        optimizer.consolidate_state_dict(to=rank)
        if rank == optimizer.rank:
            state_dict = optimizer.state_dict()
    optimizer.load_state_dict(state_dict)
    assert seen == ["before the step", "after the step", "state dict", "load"]


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
