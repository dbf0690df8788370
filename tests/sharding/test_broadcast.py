"""Parameters on their way to all ranks: which share a message, and that every value arrives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.sharding.transfer import SIZES, broadcast_from_owners, packs
from swarmcli.sharding.zero.ownership import ParameterBuckets
from tests.sharding.threads import in_threads
from tests.sharding.zero.parity import assert_bitwise, make_parameters

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 2 * SIZES.short), st.booleans()), max_size=60))
def test_short_tensors_of_a_device_share_messages_of_bounded_size(sizes: list[tuple[int, bool]]) -> None:
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta" if far else "cpu") for size, far in sizes]
    messages = list(packs(tensors))
    assert sum(part.numel() for message in messages for part in message) == sum(each.numel() for each in tensors)
    for message in messages:
        assert len({tensor.device for tensor in message}) == 1
        if len(message) > 1:
            assert sum(tensor.numel() for tensor in message) <= SIZES.pack
            assert all(tensor.numel() <= SIZES.short for tensor in message)
    alone = sum(tensor.numel() > SIZES.short for tensor in tensors)
    short = sum(tensor.numel() for tensor in tensors if tensor.numel() <= SIZES.short)
    assert len(messages) <= alone + 2 + short // SIZES.pack


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
