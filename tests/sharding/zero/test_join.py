"""Uneven inputs: ranks that run out of batches step along until the last one has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from swarmcli.sharding.zero import ZeroRedundancyOptimizer
from tests.sharding.threads import DRAWING, in_threads, ranks
from tests.sharding.zero.parity import assert_bitwise, make_parameters, set_gradients


def train_unevenly(make: Any, joined: bool, **options: Any) -> list[torch.Tensor]:
    """Rank r has 2 + r batches. `joined`: the optimizer takes part in the join; an unsharded one need not."""
    with DRAWING:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    parallel = DistributedDataParallel(model)
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(5, 4, generator=generator) for _ in range(2 + dist.get_rank())]
    with Join([parallel, optimizer] if joined else [parallel], **options):
        for batch in batches:
            optimizer.zero_grad()
            parallel(batch).square().mean().backward()
            optimizer.step()
    return list(model.parameters())


def compare(bucket_view: bool) -> list[torch.Tensor]:
    settings: Any = {"parameters_as_bucket_view": bucket_view, "lr": 0.05}
    like_torch = train_unevenly(lambda params: ZeroRedundancyOptimizer(params, Adam, **settings), True)
    assert_bitwise(like_torch, train_unevenly(lambda params: TorchZero(params, Adam, **settings), True))
    ours = train_unevenly(
        lambda params: ZeroRedundancyOptimizer(params, Adam, **settings), True, hand_over_gradients=True
    )
    whole = train_unevenly(lambda params: Adam(params, lr=0.05), False)
    if dist.get_rank() == dist.get_world_size() - 1:  # only the last to join has made all steps itself
        assert_bitwise(ours, whole)
        assert not torch.equal(like_torch[0], whole[0])  # it has not the gradients: this is why one may hand them over
    return ours


@pytest.mark.parametrize(("ranks", "bucket_view"), [(3, False), (2, True)])
def test_uneven_inputs_beside_ddp(ranks: int, bucket_view: bool) -> None:
    first, *others = in_threads(ranks, compare, bucket_view)
    for other in others:
        assert_bitwise(first, other)


@ranks(3)
def test_the_optimizer_may_join_alone() -> None:
    """No DDP: every rank sets its gradients, in the end with none for some of the parameters."""
    ours, whole = make_parameters(), make_parameters()
    optimizer, reference = ZeroRedundancyOptimizer(ours, Adam, lr=0.05), Adam(whole, lr=0.05)
    with Join([optimizer], hand_over_gradients=True):
        for step in range(2 + dist.get_rank()):
            set_gradients(ours, step)
            ours[step].grad = None
            optimizer.step()
    for step in range(2 + dist.get_world_size() - 1):
        set_gradients(whole, step)
        whole[step].grad = None
        reference.step()
    assert_bitwise(ours, whole)
    set_gradients(ours, 20)
    set_gradients(whole, 20)
    optimizer.step(closure=lambda: 0.0)  # the join is over, and its options with it
    reference.step()
    assert_bitwise(ours, whole)


@ranks(2)
def test_gradients_that_a_closure_makes_cannot_be_handed_over() -> None:
    optimizer = ZeroRedundancyOptimizer(make_parameters(), Adam)
    with (
        pytest.raises(ValueError, match="call it without closure"),
        Join([optimizer], hand_over_gradients=True),
    ):
        optimizer.step(closure=lambda: 0.0)
    with Join([optimizer], enable=False, hand_over_gradients=True):
        optimizer.step(closure=lambda: 0.0)


@ranks(2)
def test_all_ranks_may_stop_when_the_first_has_no_more() -> None:
    with pytest.raises(RuntimeError, match="exhausted"):
        train_unevenly(lambda params: ZeroRedundancyOptimizer(params, Adam), True, throw_on_early_termination=True)
