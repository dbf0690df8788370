"""Rounds with other aggregators than a plain mean: all apply the same bits, and who was left out is told alike."""

from __future__ import annotations

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.aggregators import Aggregator, CenteredClip, Mean, Median, TrimmedMean
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.plan import Layout, Plan
from swarmcli.compression import CompressionBase, Float16Compression, NoCompression
from swarmcli.errors import RoundFailed
from tests.averaging.averagers import Averagers, all_outcomes
from tests.averaging.round.programs import add, check
from tests.averaging.rounds import Kind, Swarm
from tests.simulation import within

AGGREGATORS = [Mean(), Median(), TrimmedMean(), CenteredClip()]


def options(aggregator: Aggregator, codec: CompressionBase | None = None) -> AllreduceOptions:
    return AllreduceOptions(codec or NoCompression(), part_size_bytes=1024, aggregator=aggregator)


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=lambda each: each.description.split()[0])
@pytest.mark.parametrize("codec", [Float16Compression()], ids=lambda each: each.name)
@within(600)
async def test_all_members_apply_what_the_aggregator_makes_of_all_parts(
    aggregator: Aggregator, codec: CompressionBase
) -> None:
    kinds = [Kind(), Kind(2.0), Kind(3.0, listening=False), Kind(0.5), Kind(auxiliary=True)]
    async with Swarm(kinds, options=options(aggregator, codec)) as swarm:
        group = swarm.group()
        results = [result for result in await swarm.round() if isinstance(result, RoundResult)]
        assert len(results) == 5 and len({result.digest for result in results}) == 1
        trainers = [result for result in results if result.averages]
        for result in trainers[1:]:
            assert all(map(torch.equal, result.averages, trainers[0].averages))
        assert not any(result.left_out for result in results)
        expected = repeated(swarm, aggregator, group.part_shares)
        for average, tensor in zip(trainers[0].averages, expected, strict=True):
            torch.testing.assert_close(average, tensor, rtol=1e-2 if codec.name != "none" else 1e-6, atol=2e-3)


def repeated(swarm: Swarm, aggregator: Aggregator, shares: tuple[float, ...]) -> list[torch.Tensor]:
    """What the tensors of all trainers become, part by part."""
    trainers = [peer for peer in swarm.peers if not peer.kind.auxiliary]
    plan = Plan.make(Layout.of(trainers[0].before, swarm.options.compression), shares, 1024)
    flat = [torch.cat([tensor.flatten() for tensor in peer.before]) for peer in trainers]
    pieces = []
    for part in plan.parts:
        reducing = aggregator.part(torch.empty(part.stop - part.start), len(trainers))
        for index, peer in enumerate(trainers):
            reducing.add(flat[index][part.start : part.stop], peer.kind.weight, index)
        pieces.append(reducing.finish()[0])
    sizes = [tensor.numel() for tensor in trainers[0].before]
    shapes = [tensor.shape for tensor in trainers[0].before]
    return [piece.view(shape) for piece, shape in zip(torch.cat(pieces).split(sizes), shapes, strict=True)]


@pytest.mark.parametrize("late", [False, True])
@within(600)
async def test_who_is_beyond_the_gate_counts_in_all_phases_or_in_none(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Averagers(1) as swarm:
        values = {await add(swarm, value): (value, 1.0) for value in (1.0, 2.0, 3.0)}
        liar = await add(swarm, 4.0 if late else 1e8)
        if late:
            inputs = liar.core._program.inputs

            def lies(phase: int, factor: float) -> list[torch.Tensor]:
                return [tensor.mul_(1e8 if phase else 1.0) for tensor in inputs(phase, factor)]

            monkeypatch.setattr(liar.core._program, "inputs", lies)
        outcomes = await all_outcomes([peer.begin(allow_retries=False) for peer in [*values, liar]])
        if late:
            assert all(isinstance(each, RoundFailed) and each.suspects == (liar.peer_id,) for each in outcomes)
            return
        result = outcomes[0]
        assert isinstance(result, RoundResult) and set(result.left_out) == {liar.peer_id}
        check([*values, liar], values, result)
