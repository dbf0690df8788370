"""Parameters on their way to all ranks: every value arrives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from swarmcli.sharding.transfer import SHORT, broadcast_from_owners
from swarmcli.sharding.zero.ownership import ParameterBuckets
from tests.sharding.threads import in_threads
from tests.sharding.zero.parity import assert_bitwise, make_parameters

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def broadcast_everything(views: bool) -> list[torch.Tensor]:
    """Every rank starts with what only it has; afterwards all have what the owners had."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = make_parameters(DTYPES, seed=rank)
    odd = [
        torch.full((3, 4), float(rank)).T,  # dense, but not in the usual order
        torch.full((8,), rank, dtype=torch.int16)[::2],  # with gaps
        torch.empty(0, 2),
        torch.full((2, 2), rank, dtype=torch.float8_e4m3fn),
        torch.full((2,), complex(rank, 1)),
        torch.tensor([bool(rank)]),
        torch.full((200, 200), float(rank)),  # long enough for a message of its own
        torch.full((200, 200), float(rank)).T[::2],
        torch.full((SHORT,), rank, dtype=torch.uint8),  # the longest that shares a message
    ]
    tensors = [*parameters, *odd]
    by_rank: list[list[torch.Tensor]] = [tensors[owner::size] for owner in range(size)]
    if views:
        buckets = ParameterBuckets()
        buckets.lay_out(by_rank)
        by_rank = [buckets.of_rank(owner) for owner in range(size)]
    group = dist.group.WORLD
    assert group is not None
    broadcast_from_owners(by_rank, group)
    for owner in range(size):
        own = make_parameters(DTYPES, seed=owner)
        assert_bitwise(parameters[owner::size], own[owner::size])
    return [tensor.double() if not tensor.is_complex() else tensor for tensor in odd]


@pytest.mark.parametrize(("ranks", "views"), [(2, False), (4, True)])
def test_all_ranks_get_the_owners_values_of_any_type_and_layout(ranks: int, views: bool) -> None:
    odd = in_threads(ranks, broadcast_everything, views)
    for each in odd:
        for index, tensor in enumerate(each):
            owner = (8 + index) % ranks  # eight parameters come before
            assert torch.equal(tensor, odd[owner][index])
