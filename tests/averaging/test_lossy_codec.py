"""A lossy codec in an averager of one's own erases no small change: what it takes from a member stays with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmcli import DHT, DecentralizedAverager
from swarmcli.compression import BlockwiseQuantization, CompressionBase, Float16Compression, Uniform8BitQuantization
from tests.averaging.averagers import FAST, Averagers, all_results
from tests.simulation import within

CHANGE = 1e-4  # an eighth of what float16 tells apart between 1 and 2
SIZE = 1 << 12
# Numbers between 1 and 2 are off by so much at most: once on the way in, once on the way back.
CODECS: list[tuple[CompressionBase, float]] = [
    (Float16Compression(), 2 * 2**-11),
    (Uniform8BitQuantization(), 2 / 510),
    (BlockwiseQuantization(), 2 * 2 / 127),
]


@pytest.mark.parametrize(("codec", "precision"), CODECS, ids=lambda value: getattr(value, "name", ""))
@within(3600)
async def test_small_changes_stay_and_members_come_together(codec: CompressionBase, precision: float) -> None:
    async with Averagers(1) as swarm:
        allreduce = replace(FAST, compression=codec)
        tensors = [1 + torch.rand(SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        peers = [await swarm.add_one(tensors=[tensor], keeps_rest=True, allreduce=allreduce) for tensor in tensors]
        for number in range(4):
            expected = torch.stack(tensors).double().mean(0)
            results = await all_results([peer.begin() for peer in peers])
            assert max(result.bytes_sent for result in results) < 3 * SIZE  # of float32 it has 4 bytes
            assert max(float((tensor - expected).abs().max()) for tensor in tensors) < 2 * precision
            if number == 1:
                tensors[1].copy_(tensors[0])
                began = tensors[0].double()
            for tensor in tensors:
                tensor.add_(CHANGE)
        if codec is CODECS[0][0]:  # they agree, so nothing moves them but what they learn
            torch.testing.assert_close(tensors[0].double(), began + 3 * CHANGE, rtol=0, atol=0.03 * CHANGE)
            assert torch.equal(*tensors)


@within(3600)
async def test_a_member_whose_tensors_hold_no_numbers_takes_the_average() -> None:
    async with Averagers(2) as swarm:
        allreduce = replace(FAST, compression=CODECS[0][0])
        tensors = [torch.full((SIZE,), value) for value in (1.0, 2.0, float("nan"))]
        peers = [await swarm.add_one(tensors=[tensor], keeps_rest=True, allreduce=allreduce) for tensor in tensors]
        await all_results([peer.begin() for peer in peers])
        assert all(torch.equal(tensor, torch.full((SIZE,), 1.5)) for tensor in tensors)


def test_small_steps_of_two_peers_over_tcp() -> None:
    """As a script of hivemind's users has it."""
    tensors = [torch.ones(1000), torch.ones(1000)]
    options: dict[str, Any] = {"start": True, "prefix": "small", "compression": Float16Compression()}
    with (
        DHT(start=True, host="127.0.0.1") as first,
        DHT(first.get_visible_addresses(), start=True, host="127.0.0.1") as second,
        DecentralizedAverager([tensors[0]], first, **options) as one,
        DecentralizedAverager([tensors[1]], second, **options) as two,
    ):
        for _ in range(6):
            for averager in (one, two):
                with averager.get_tensors() as (tensor,):
                    tensor += CHANGE
            control = one.step(wait=False)
            assert two.step() is not None and control.result() is not None
    assert torch.equal(*tensors)
    torch.testing.assert_close(tensors[0], torch.full((1000,), 1.0006), rtol=0, atol=1e-6)
