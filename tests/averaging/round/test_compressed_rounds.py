"""Whole rounds with every codec: one result for all, within the codec's bound of the true mean, added in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.aggregators import Mean
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    NoCompression,
    PerTensorCompression,
    Quantile8BitQuantization,
    RoleAdaptiveCompression,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    TensorRole,
    Uniform8BitQuantization,
)
from tests.averaging.rounds import Kind, Swarm
from tests.compression.codecs import PLAIN, error_bound
from tests.simulation import simulated
from tests.suites import soak

SHAPES = ((40, 30), (7,), (300,))
SCALES = (1.0, 1e-3, 100.0)  # a small tensor beside larger ones keeps its digits
ROLES = (TensorRole.GRADIENT, TensorRole.PARAMETER, TensorRole.UNSPECIFIED)
KINDS = [Kind(), Kind(weight=2), Kind(weight=0.5, listening=False), Kind(auxiliary=True)]

ADAPTIVE = [
    SizeAdaptiveCompression(100, NoCompression(), Uniform8BitQuantization()),
    RoleAdaptiveCompression(gradient=BlockwiseQuantization(64), default=ScaledFloat16Compression()),
    PerTensorCompression([Quantile8BitQuantization(), NoCompression(), BFloat16Compression()]),
]


def round_bound(codec: CompressionBase, tensor: torch.Tensor) -> torch.Tensor:
    """The codec's bound, wherever the tensor is cut into parts."""
    match codec:
        case ScaledFloat16Compression():  # no part's mean is further off than its largest element
            return error_bound(codec, tensor) + 2**-10 * tensor.double().abs().max()
        case BlockwiseQuantization():  # a block of any part may hold the largest element
            return error_bound(BlockwiseQuantization(1 << 20, codec.code, codec.bits), tensor)
    return error_bound(codec, tensor)


def true_mean(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    return sum(t.double() * w for t, w in zip(tensors, weights, strict=True)) / torch.tensor(sum(weights)).double()


async def average(swarm: Swarm, compression: CompressionBase) -> list[RoundResult]:
    """Runs a round and checks it; the results of those with tensors."""
    for peer in swarm.peers:
        for tensor, scale in zip(peer.tensors, SCALES, strict=True):
            tensor.mul_(scale)
    infos = [
        CompressionInfo.of(tensor, key, role)
        for key, (tensor, role) in enumerate(zip(swarm.peers[0].tensors, ROLES, strict=True))
    ]
    swarm.options = AllreduceOptions(part_size_bytes=400, compression=compression, tensor_infos=tuple(infos))
    outcomes = await swarm.round()
    results = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
    assert len(results) == len(outcomes) and len({result.digest for result in results}) == 1
    holders = [result for result in results if result.averages]
    for result in holders:
        assert all(torch.equal(mine, first) for mine, first in zip(result.averages, holders[0].averages, strict=True))
    senders = [peer for peer in swarm.peers if not peer.kind.auxiliary]
    weights = [peer.kind.weight for peer in senders]
    for number, info in enumerate(infos):
        sent = [peer.tensors[number] for peer in senders]
        codec, exact = compression.codec_for(info), true_mean(sent, weights)
        bound = true_mean([round_bound(codec, tensor) for tensor in sent], weights)
        mean = exact.to(sent[0].dtype)
        # The mean is one of values that were rounded already, so its largest may be larger.
        larger = 1.3 if isinstance(codec, BlockwiseQuantization) and codec.bits == 4 else 1.02
        bound += larger * round_bound(codec, mean) + torch.finfo(mean.dtype).eps * exact.abs().max()
        assert ((holders[0].averages[number].double() - exact).abs() <= bound).all(), info
    return holders


@pytest.mark.parametrize("codec", [*ADAPTIVE, *soak(PLAIN)], ids=lambda codec: codec.description)
@simulated
async def test_one_result_within_the_bound_of_the_mean(codec: CompressionBase) -> None:
    async with Swarm(KINDS, shapes=SHAPES) as swarm:
        holders = await average(swarm, codec)
        assert len(holders[0].parts) >= 6  # tensors are cut, and most codecs choose their levels part by part


@simulated
async def test_sums_are_kept_in_float32() -> None:
    """A small number is not lost in a large sum, although no number on the wire could hold both."""
    async with Swarm([Kind() for _ in range(8)], shapes=((16,),)) as swarm:
        for index, peer in enumerate(swarm.peers):
            peer.tensors[0].fill_(2.0**20 if index == 0 else -(2.0**20) if index == 7 else 1.0)
        swarm.options = AllreduceOptions(compression=BFloat16Compression(), aggregator=Mean(gate=math.inf))
        outcomes = await swarm.round()
        for outcome in outcomes:
            assert isinstance(outcome, RoundResult)
            torch.testing.assert_close(outcome.averages[0], torch.full((16,), 6 / 8), rtol=0.01, atol=0)
