"""A small model under DistributedDataParallel with several gradient buckets, trained on each rank's own inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from swarmcli.sharding.zero import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from tests.sharding.threads import DRAWING
from tests.sharding.zero.parity import OPTIMIZERS
from tests.suites import soak

HOOKS: dict[str, Callable[..., Any]] = {
    "at the end": hook_with_zero_step,
    "interleaved": hook_with_zero_step_interleaved,
}
EACH_HOOK = pytest.mark.parametrize("hook", ["interleaved", *soak(["at the end"])])
BUCKET_MB = 0.001  # some five buckets


def make_model(*, frozen: bool = False) -> nn.Sequential:
    """The same at every rank; with `frozen` one layer of it is."""
    with DRAWING:
        torch.manual_seed(1)
        model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 3))
    if frozen:
        model[2].requires_grad_(False)
    return model


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **{"bucket_cap_mb": BUCKET_MB, **options})


def make_zero(model: nn.Module, name: str, **options: Any) -> ZeroRedundancyOptimizer:
    optimizer_class, settings = OPTIMIZERS[name]
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options, **settings)


def make_overlapped(
    name: str = "Adam", hook: str = "at the end", *, shard_buckets: bool = False, frozen: bool = False, **options: Any
) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    ddp = wrap(make_model(frozen=frozen), **options)
    zero = make_zero(ddp, name, overlap_with_ddp=True)
    ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, zero, shard_buckets=shard_buckets))
    return ddp, zero


def backward(ddp: DistributedDataParallel, iteration: int, *, zero_grad: bool = True) -> None:
    """One pass over this rank's inputs of that iteration."""
    generator = torch.Generator().manual_seed(100 * iteration + dist.get_rank())
    if zero_grad:
        ddp.zero_grad()
    (ddp(torch.randn(8, 16, generator=generator)) ** 2).mean().backward()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]
