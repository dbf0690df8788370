"""Whole rounds with every codec: one result for all, within the codec's bound of the true mean, added in float32."""

from __future__ import annotations

import asyncio
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
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    Quantile8BitQuantization,
    RoleAdaptiveCompression,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    TensorRole,
    Uniform8BitQuantization,
)
from swarmcli.errors import FingerprintError, MatchmakingError
from tests.averaging.averagers import Averagers, all_outcomes
from tests.averaging.rounds import Kind, Swarm
from tests.compression.codecs import FLOATS, PLAIN, error_bound
from tests.simulation import simulated, within
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", [Uniform8BitQuantization(), *soak([BlockwiseQuantization(32, "linear")])])
@simulated
async def test_other_types_of_tensors(codec: CompressionBase, dtype: torch.dtype) -> None:
    async with Swarm(KINDS, shapes=SHAPES, dtype=dtype, seed=3) as swarm:
        await average(swarm, codec)


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


@simulated
async def test_nan_is_not_quantized_but_left_out() -> None:
    async with Swarm([Kind(), Kind(), Kind()], shapes=SHAPES) as swarm:
        swarm.options = AllreduceOptions(compression=Uniform8BitQuantization(), part_size_bytes=400)
        swarm.peers[1].tensors[2][5] = float("nan")
        outcomes = await swarm.round()
        for outcome in outcomes:
            assert isinstance(outcome, RoundResult)
            assert outcome.contributors == (swarm.peers[0].peer_id, swarm.peers[2].peer_id)
            assert swarm.peers[1].peer_id in outcome.left_out
            assert all(tensor.isfinite().all() for tensor in outcome.averages)


@pytest.mark.parametrize(
    "codec", [Uniform8BitQuantization(), *soak([Quantile8BitQuantization(), BlockwiseQuantization(64)])]
)
@pytest.mark.parametrize("moment", [0.1, 0.3, *soak([0.05, 0.2, 0.4])])
@within(2000)
async def test_a_sender_that_dies_does_not_break_the_one_result(codec: CompressionBase, moment: float) -> None:
    """Survivors hold equal bits, and the mean of those whom they name."""
    options = AllreduceOptions(part_size_bytes=200, compression=codec, sender_timeout=5.0)
    async with Swarm([*[Kind()] * 3, Kind(bandwidth=0.0), Kind()], bandwidth=10_000, options=options) as swarm:

        async def kill() -> None:
            await asyncio.sleep(moment)
            swarm.kill(3)

        outcomes = await swarm.round(kill)
        assert len(swarm.check(outcomes, tolerance=0.06)) == 4


# Averagers


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BlockwiseQuantization(64), BlockwiseQuantization(32)),
        (Float16Compression(), BFloat16Compression()),
        (
            SizeAdaptiveCompression(20, Float16Compression(), Uniform8BitQuantization()),
            SizeAdaptiveCompression(10, Float16Compression(), Uniform8BitQuantization()),
        ),
    ],
    ids=lambda codec: codec.description,
)
@simulated
async def test_unlike_codecs_are_refused_by_name(one: CompressionBase, other: CompressionBase) -> None:
    async with Averagers(2) as swarm:
        first = await swarm.add_one(allreduce=AllreduceOptions(compression=one))
        second = await swarm.add_one(allreduce=AllreduceOptions(compression=other))
        outcomes = await all_outcomes([peer.begin(timeout=20, allow_retries=False) for peer in (first, second)])
        assert all(isinstance(outcome, MatchmakingError | FingerprintError) for outcome in outcomes)
        words = [str(outcome) for outcome in outcomes] + [event.reason for event in first.refusals + second.refusals]
        assert any("averaging.compression" in text for text in words), words
