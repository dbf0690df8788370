"""Parameters as views of buckets, and what is sent of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from swarmcli.sharding.zero.buckets import ParameterBuckets, broadcast_from_owners
from tests.sharding.processes import Worlds
from tests.sharding.zero.parity import assert_bitwise, make_parameters

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_each_rank_has_one_bucket_per_type_and_the_values_stay() -> None:
    parameters = make_parameters(DTYPES)
    buckets = ParameterBuckets()
    buckets.lay_out([parameters[:4], parameters[4:], []])
    assert [[bucket.dtype for bucket in buckets.of_rank(rank)] for rank in range(3)] == [
        [torch.float32, torch.bfloat16, torch.float64],
        [torch.bfloat16, torch.float64, torch.float32],
        [],
    ]
    assert_bitwise(parameters, make_parameters(DTYPES))
    held = {storage_of(bucket) for rank in range(2) for bucket in buckets.of_rank(rank)}
    assert {storage_of(parameter) for parameter in parameters} == held


def test_what_is_written_to_a_bucket_is_the_parameter() -> None:
    parameters = make_parameters()
    buckets = ParameterBuckets()
    buckets.lay_out([parameters])
    (bucket,) = buckets.of_rank(0)
    bucket.fill_(2.0)
    assert all(bool((parameter == 2.0).all()) for parameter in parameters)
    assert buckets.intact()


def test_a_frozen_parameter_leaves_its_bucket_and_may_come_back() -> None:
    parameters = make_parameters()
    buckets = ParameterBuckets()
    buckets.lay_out([parameters])
    parameters[0].requires_grad = False
    buckets.lay_out([parameters])
    bucket, frozen = buckets.of_rank(0)
    assert frozen is parameters[0]
    assert bucket.numel() == sum(parameter.numel() for parameter in parameters[1:])
    assert parameters[0].untyped_storage().nbytes() == parameters[0].numel() * 4  # keeps no bucket alive
    parameters[0].requires_grad = True
    buckets.lay_out([parameters])
    assert len(buckets.of_rank(0)) == 1
    assert_bitwise(parameters, make_parameters())


def test_new_memory_and_new_types_are_noticed() -> None:
    parameters = make_parameters()
    buckets = ParameterBuckets()
    buckets.lay_out([parameters])
    parameters[1].data = parameters[1].data.clone()
    assert not buckets.intact()
    buckets.lay_out([parameters])
    assert buckets.intact()
    parameters[1].data = parameters[1].data.half()
    assert not buckets.intact()


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


@pytest.mark.processes
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_get_the_owners_values_of_any_type_and_layout(worlds: Worlds, ranks: int, views: bool) -> None:
    odd = worlds(ranks).run(broadcast_everything, views)
    for each in odd:
        for index, tensor in enumerate(each):
            owner = (8 + index) % ranks  # eight parameters come before
            assert torch.equal(tensor, odd[owner][index])
