"""Uneven inputs: ranks that run out of batches go on stepping their shares until the last one has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from swarmcli.errors import ShardingError
from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from tests.sharding.threads import DRAWING, in_threads, ranks
from tests.sharding.zero.parity import assert_bitwise, make_parameters, set_gradients


def train_unevenly(make: Any, **options: Any) -> list[torch.Tensor]:
    """Rank r has 2 + r batches."""
    with DRAWING:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    parallel = DistributedDataParallel(model)
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(5, 4, generator=generator) for _ in range(2 + dist.get_rank())]
    with Join([parallel, optimizer], **options):
        for batch in batches:
            optimizer.zero_grad()
            parallel(batch).square().mean().backward()
            optimizer.step()
    return list(model.parameters())


def compare(bucket_view: bool) -> list[torch.Tensor]:
    settings: Any = {"parameters_as_bucket_view": bucket_view, "lr": 0.05}
    ours = train_unevenly(lambda params: ZeroRedundancyOptimizer(params, Adam, **settings))
    assert_bitwise(ours, train_unevenly(lambda params: TorchZero(params, Adam, **settings)))
    return ours


@pytest.mark.parametrize(("ranks", "bucket_view"), [(3, False), (2, True)])
def test_uneven_inputs_beside_ddp(ranks: int, bucket_view: bool) -> None:
    first, *others = in_threads(ranks, compare, bucket_view)
    for other in others:
        assert_bitwise(first, other)


@ranks(3)
def test_the_optimizer_may_join_alone_and_again() -> None:
    """No DDP: a rank without inputs steps its share with the gradients that it has."""
    ours, whole = make_parameters(), make_parameters()
    optimizer, reference = ZeroRedundancyOptimizer(ours, Adam, lr=0.05), Adam(whole, lr=0.05)
    for turn in range(2):
        set_gradients(ours, turn)
        set_gradients(whole, turn)
        with Join([optimizer]):
            for _ in range(2 + dist.get_rank()):
                optimizer.step()
        for _ in range(2 + dist.get_world_size() - 1):
            reference.step()
        assert_bitwise(ours, whole)


@ranks(2)
def test_all_ranks_may_stop_when_the_first_has_no_more() -> None:
    with pytest.raises(RuntimeError, match="exhausted"):
        train_unevenly(lambda params: ZeroRedundancyOptimizer(params, Adam), throw_on_early_termination=True)


@ranks(2)
def test_gradients_that_nobody_hands_over_are_not_promised_in_silence() -> None:
    with pytest.raises(ShardingError, match="hand_over_gradients=True: nobody"):
        train_unevenly(lambda params: ZeroRedundancyOptimizer(params, Adam), hand_over_gradients=True)
