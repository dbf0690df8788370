"""Small training jobs with a sharded optimizer, for the tests of its files; the functions run in every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swarmcli.sharding import ZeroRedundancyOptimizer
from swarmcli.sharding.zero.state import State, copied_to_cpu

SHAPES = [(7, 5), (5,), (), (11, 3), (3,), (2, 2, 2), (64,)]


def parameters() -> list[nn.Parameter]:
    """The same on every rank; the fifth is frozen, so it never has a state."""
    generator = torch.Generator().manual_seed(7)
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    made[4].requires_grad_(False)
    return made


def groups(made: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": made[:3], "lr": 0.01}, {"params": made[3:], "lr": 0.02, "weight_decay": 0.1}]


def sharded(
    group: dist.ProcessGroup | None = None, *, shares: Sequence[float] | None = None, kind: Any = torch.optim.AdamW
) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(groups(parameters()), kind, process_group=group, shares=shares)


def train(optimizer: Any, steps: int, *, first: int = 0) -> None:
    """Steps with gradients that depend on nothing but the number of the step."""
    made = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in made:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient if parameter.requires_grad else None
        optimizer.step()


def reference(steps: int, kind: Any = torch.optim.AdamW) -> Any:
    """An unsharded optimizer after so many steps."""
    optimizer = kind(groups(parameters()))
    train(optimizer, steps)
    return optimizer


def plain(state: State) -> dict[int, dict[str, Any]]:
    """A copy, as the harness carries it."""
    return {index: copied_to_cpu(values) for index, values in state.items()}


def differing(found: Any, expected: Any) -> list[str]:
    """Where two nested states differ, bit for bit; empty: nowhere."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return [f"{found!r:.80} for {expected!r:.80}"]
        return [f"{key}: {text}" for key in expected for text in differing(found[key], expected[key])]
    if isinstance(expected, torch.Tensor):
        same = isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    else:
        same = type(found) is type(expected) and found == expected
    return [] if same else [f"{found!r:.80} for {expected!r:.80}"]


def whole(shares: Sequence[dict[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """All ranks' shares together; each parameter belongs to one rank only."""
    together: dict[int, dict[str, Any]] = {}
    for share in shares:
        assert not together.keys() & share.keys()
        together.update(share)
    return dict(sorted(together.items()))
