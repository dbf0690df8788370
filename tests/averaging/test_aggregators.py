"""How parts become averages: exact, the same in any order where that is promised, and what liars can do to them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from swarmcli.averaging.aggregators import Aggregator, Mean


def aggregate(
    aggregator: Aggregator,
    values: list[torch.Tensor],
    weights: list[float] | None = None,
    order: list[int] | None = None,
) -> tuple[torch.Tensor, dict[int, str]]:
    """What becomes of the parts of senders 0, 1, …, whose memory is used again at once."""
    part = aggregator.part(torch.full((values[0].numel(),), math.nan), len(values), ordered=order is not None)
    for sender in order or range(len(values)):
        memory = values[sender].clone()
        part.add(memory, 1.0 if weights is None else weights[sender], sender)
        memory.fill_(math.nan)
    average, left_out = part.finish()
    return average.clone(), dict(left_out)


def gradients(members: int, numel: int = 2000, noise: float = 3.0, seed: int = 0) -> list[torch.Tensor]:
    """One direction, and noise of each member's own."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(numel, generator=generator)
    return [truth + noise * torch.randn(numel, generator=generator) for _ in range(members)]


@pytest.mark.parametrize("members", [4, 5, 16])
@pytest.mark.parametrize("position", ["first", "last"])
def test_the_gate_leaves_out_what_is_far_beyond_the_others(members: int, position: str) -> None:
    values, liars = gradients(members), (members - 1) // 3
    lying = range(liars) if position == "first" else range(members - liars, members)
    for liar in lying:
        values[liar] = values[liar] * 1e6
    average, left_out = aggregate(Mean(), values)
    assert set(left_out) == set(lying)
    assert all("times the largest of the others" in reason for reason in left_out.values())
    honest = [value for index, value in enumerate(values) if index not in lying]
    torch.testing.assert_close(average, torch.stack(honest).mean(0))


@pytest.mark.parametrize("members", [1, 2, 3])
def test_with_fewer_than_four_members_the_gate_has_no_say(members: int) -> None:
    values = gradients(members)
    values[0] = values[0] * 1e9
    assert aggregate(Mean(), values)[1] == {}


def test_the_gate_leaves_out_nobody_whose_batch_is_small_or_large() -> None:
    for noise, members in itertools.product([0.0, 1.0, 1e3], [4, 7, 16]):
        weights = [10.0 ** (6 * index / (members - 1)) for index in range(members)]
        generator = torch.Generator().manual_seed(members)
        values = [1 + noise / math.sqrt(w) * torch.randn(500, generator=generator) for w in weights]
        assert aggregate(Mean(gate=2.0), values, weights)[1] == {}


def test_the_gate_leaves_out_nobody_where_the_others_hold_zeros() -> None:
    values = [torch.zeros(10) for _ in range(16)]
    assert aggregate(Mean(), values)[1] == {}
    for seen in range(5):  # rows of an embedding that few have read
        values[seen] = torch.ones(10)
        assert aggregate(Mean(), values)[1] == {}


def test_a_mean_in_order_has_the_same_bits_whoever_comes_first() -> None:
    values = gradients(7)
    values[2] = values[2] * 1e6
    weights = [0.3, 7.0, 1.0, 3.0, 0.1, 2.0, 11.0]
    expected, left_out = aggregate(Mean(), values, weights, order=list(range(7)))
    for order in ([6, 5, 4, 3, 2, 1, 0], [2, 4, 6, 0, 1, 3, 5]):
        average, also = aggregate(Mean(), values, weights, order=order)
        assert torch.equal(average, expected) and also == left_out == {2: also[2]}


def test_a_mean_multiplies_and_then_adds() -> None:
    values, weights = gradients(3), [3.0, 0.7, 1.9]
    unit = 2.0**20 * 4
    total = values[0] * (weights[0] / unit)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * (weight / unit)
    assert torch.equal(aggregate(Mean(), values, weights)[0], total / (math.fsum(weights) / unit))


@pytest.mark.parametrize("gate", [0.5, 0.0, -1.0, math.nan])
def test_a_gate_below_one_is_refused(gate: float) -> None:
    with pytest.raises(ValueError, match="gate must be at least 1"):
        Mean(gate=gate)
