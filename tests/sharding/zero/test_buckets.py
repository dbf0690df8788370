"""Parameters as views of buckets."""

from __future__ import annotations

import torch

from swarmcli.sharding.zero.ownership import ParameterBuckets
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


def test_who_is_frozen_at_first_stays_apart_and_later_changes_move_nobody() -> None:
    parameters = make_parameters()
    buckets = ParameterBuckets()
    parameters[0].requires_grad = False
    buckets.lay_out([parameters])
    for trainable in (False, True):
        bucket, apart = buckets.of_rank(0)
        assert apart is parameters[0]
        assert bucket.numel() == sum(parameter.numel() for parameter in parameters[1:])
        assert parameters[0].untyped_storage().nbytes() == parameters[0].numel() * 4
        parameters[0].requires_grad, parameters[1].requires_grad = not trainable, trainable
        buckets.lay_out([parameters])
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


def test_each_device_has_buckets_of_its_own() -> None:
    here, elsewhere = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4, device="meta"))
    buckets = ParameterBuckets()
    buckets.lay_out([[here, elsewhere]])
    assert [(bucket.device.type, bucket.numel()) for bucket in buckets.of_rank(0)] == [("cpu", 3), ("meta", 4)]
