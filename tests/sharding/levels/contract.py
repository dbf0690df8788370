"""What averaging at levels promises, whoever the members are: cases that every member of a group of four runs.

Neighbours (0 and 1, 2 and 3) are a group at level 0, all four are one at level 1. A case checks what its member sees
and returns tensors, which must be equal in every bit at all members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from swarmcli.sharding.levels.plan import LevelAverage, read_plan
from swarmcli.sharding.levels.process_groups import ProcessGroupLevels
from swarmcli.testing import virtual_time
from tests.sharding.levels.swarm import Swarm

SIZE = 4
LEVELS = {2: 2, 4: 4}
PLACES = ["left", "left", "right", "right"]


@dataclass(frozen=True)
class Side:
    """One of the four, on its way of averaging."""

    number: int
    average: Callable[[int, Sequence[torch.Tensor], int], Awaitable[LevelAverage]]


Case: TypeAlias = Callable[[Side], Awaitable[list[torch.Tensor]]]


async def shapes_types_and_places(side: Side) -> list[torch.Tensor]:
    fill = float(side.number)
    tensors = [
        torch.nn.Parameter(torch.full((3, 2), fill).t()),  # not contiguous
        torch.full((), fill),
        torch.full((7,), fill, dtype=torch.bfloat16),
        torch.full((2, 2), fill, dtype=torch.float64),
        torch.empty(0, 4),
    ]
    before = [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]
    await side.average(1, tensors, 0)
    assert [(tensor.data_ptr(), tensor.stride()) for tensor in tensors] == before
    assert tensors[0].requires_grad and tensors[0].is_leaf
    assert all(torch.equal(tensor, torch.full_like(tensor, 1.5)) for tensor in tensors)
    return [tensor.detach() for tensor in tensors]


async def equal_bits(side: Side) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(side.number)
    tensor = torch.randn(10_001, generator=generator)
    await side.average(1, [tensor], 0)
    drawn = [torch.randn(10_001, generator=torch.Generator().manual_seed(number)) for number in range(SIZE)]
    torch.testing.assert_close(tensor, torch.stack(drawn).mean(0))
    return [tensor]


async def nothing_with_a_gradient(side: Side) -> list[torch.Tensor]:
    average = await side.average(1, [], 8)
    assert not average.averaged
    assert average.reason == "no parameter has a gradient"
    return []


async def other_parameters_later(side: Side) -> list[torch.Tensor]:
    first, second = torch.full((3,), float(side.number)), torch.full((4, 4), float(side.number))
    await side.average(1, [first], 0)
    await side.average(1, [first, second], 4)
    await side.average(1, [second], 8)
    return [first, second]


CASES: Mapping[str, Case] = {
    case.__name__: case
    for case in (
        shapes_types_and_places,
        equal_bits,
        nothing_with_a_gradient,
        other_parameters_later,
    )
}


def in_process_group(name: str) -> list[torch.Tensor]:
    """Runs a case in one rank of four."""
    levels = ProcessGroupLevels(read_plan(LEVELS, 0))

    async def average(*arguments: Any) -> LevelAverage:
        return levels.average(*arguments)

    return asyncio.run(CASES[name](Side(dist.get_rank(), average)))  # type: ignore[arg-type]


def in_swarm(name: str) -> list[list[torch.Tensor]]:
    """Runs a case with four peers of a swarm."""

    async def main() -> list[list[torch.Tensor]]:
        async with Swarm(1) as swarm:
            peers = [await swarm.add(LEVELS, place) for place in PLACES]
            return list(
                await asyncio.gather(*(CASES[name](Side(n, peer.levels.average)) for n, peer in enumerate(peers)))
            )

    return virtual_time.run(main(), seed=1)
