"""How parts become averages: exact, the same in any order where that is promised, and what liars can do to them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from swarmcli.averaging.aggregators import Aggregator, CenteredClip, Mean, Median, TrimmedMean
from swarmcli.averaging.aggregators.base import norm
from swarmcli.averaging.aggregators.median import sort_elements


def aggregate(
    aggregator: Aggregator,
    values: list[torch.Tensor],
    weights: list[float] | None = None,
    order: list[int] | None = None,
) -> tuple[torch.Tensor, dict[int, str]]:
    """The average of parts of senders 0, 1, …, and who was left out; the parts' memory is used again at once."""
    part = aggregator.part(torch.full((values[0].numel(),), math.nan), len(values), ordered=order is not None)
    for sender in order or range(len(values)):
        memory = values[sender].clone()
        part.add(memory, 1.0 if weights is None else weights[sender], sender)
        memory.fill_(math.nan)
    average, left_out = part.finish()
    return average.clone(), dict(left_out)


def gradients(members: int, numel: int = 2000, noise: float = 3.0, seed: int = 0) -> list[torch.Tensor]:
    """One vector per member: a direction that all share, and noise of the member's own."""
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
    assert all(reason.endswith(f"times what the sender ranked {liars + 1} holds") for reason in left_out.values())
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


ROBUST = [Median(), TrimmedMean(), CenteredClip()]
ALL = [Mean(), *ROBUST]


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 33])
def test_rows_are_sorted_element_by_element(members: int) -> None:
    values = gradients(members, 40)
    rows = [value.clone() for value in values]
    sort_elements(rows)
    assert torch.equal(torch.stack(rows), torch.stack(values).sort(dim=0).values)


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 16])
def test_median_and_trimmed_mean_are_those_of_a_plain_reference(members: int) -> None:
    values = gradients(members)
    ordered = torch.stack(values).double().sort(dim=0).values
    middle = (ordered[(members - 1) // 2] + ordered[members // 2]) / 2
    torch.testing.assert_close(aggregate(Median(), values)[0], middle.float())
    cut = (members - 1) // 3
    trimmed = ordered[cut : members - cut].mean(0)
    torch.testing.assert_close(aggregate(TrimmedMean(), values)[0], trimmed.float())


@pytest.mark.parametrize("members", [4, 16])
def test_centered_clip_is_that_of_a_plain_reference(members: int) -> None:
    values, weights = gradients(members), [1.0 + index for index in range(members)]
    rows = torch.stack(values).double()
    centre = rows.quantile(0.5, dim=0)
    for _ in range(3):
        distances = (rows - centre).norm(dim=1)
        factors = (distances.sort().values[(members - 1) // 2] / distances).clamp(max=1)
        centre = centre + ((rows - centre) * (factors * torch.tensor(weights) / sum(weights))[:, None]).sum(0)
    torch.testing.assert_close(aggregate(CenteredClip(), values, weights)[0], centre.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("members", [1, 2, 3])
def test_centered_clip_of_fewer_than_four_is_the_weighted_mean(members: int) -> None:
    values, weights = gradients(members), [1.0, 5.0, 2.0][:members]
    expected = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    torch.testing.assert_close(aggregate(CenteredClip(), values, weights)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("aggregator", ALL, ids=lambda each: each.description)
def test_equal_parts_stay_what_they_are(aggregator: Aggregator) -> None:
    for value in (torch.full((50,), 1.5), torch.zeros(50), torch.tensor([torch.finfo(torch.float32).max / 2, 1e-20])):
        for members, weight in itertools.product((1, 3, 4, 16), (1e-12, 0.1, 1.0, 6e4)):
            average, left_out = aggregate(aggregator, [value] * members, [weight * (1 + i) for i in range(members)])
            torch.testing.assert_close(average, value, rtol=1e-6, atol=0)
            assert not left_out


@pytest.mark.parametrize("aggregator", ALL, ids=lambda each: each.description)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_parts_of_all_types_have_finite_averages_at_either_end_of_the_range(
    aggregator: Aggregator, dtype: torch.dtype
) -> None:
    limit = torch.finfo(dtype).max
    values = [torch.tensor([limit * sign, 1e-30 * sign], dtype=dtype) for sign in (1, -1, 1, -1, 1)]
    memory = torch.empty(2, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    part = aggregator.part(memory, len(values))
    for sender, value in enumerate(values):
        part.add(value, 1.0, sender)
    average, _ = part.finish()
    assert average.dtype is memory.dtype and average.isfinite().all()


@pytest.mark.parametrize("aggregator", ROBUST, ids=lambda each: each.description)
def test_robust_averages_have_the_same_bits_whoever_comes_first(aggregator: Aggregator) -> None:
    values, weights = gradients(6), [0.3, 7.0, 1.0, 3.0, 0.1, 2.0]
    for row in values:
        row[::7] = 0.0
    values[3] = -values[3]
    expected, _ = aggregate(aggregator, values, weights, order=list(range(6)))
    for order in ([5, 4, 3, 2, 1, 0], [2, 4, 0, 1, 3, 5]):
        assert torch.equal(aggregate(aggregator, values, weights, order=order)[0], expected)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_a_norm_neither_overflows_nor_vanishes(size: float) -> None:
    values = gradients(1, 5000)[0] * size
    assert norm(values) == pytest.approx(values.double().norm().item(), rel=1e-5)
    assert norm(torch.zeros(10)) == norm(torch.empty(0)) == 0


def test_only_what_has_to_be_compared_with_later_ones_is_held() -> None:
    values = gradients(16)
    part = Mean().part(torch.empty(2000), 16)
    held = []
    for sender, value in enumerate(values):
        part.add(value, 1.0, sender)
        held.append(part.nbytes // value.nbytes)
    assert held == [1, 2, 3, 4, 5] + [0] * 11
    collected = Median().part(torch.empty(2000), 16)
    for sender, value in enumerate(values):
        collected.add(value, 1.0, sender)
    assert collected.nbytes == 16 * values[0].nbytes


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Mean(gate=0.5), "gate must be at least 1"),
        (lambda: Mean(gate=math.nan), "gate must be at least 1"),
        (lambda: TrimmedMean(trim=0.5), "trim must lie between 0 and 0.5"),
        (lambda: TrimmedMean(trim=0.0), "trim must lie between 0 and 0.5"),
        (lambda: CenteredClip(radius=0.0), "radius must be positive"),
        (lambda: CenteredClip(radius=math.inf), "radius must be positive"),
        (lambda: CenteredClip(iterations=0), "iterations=0: expected at least 1"),
        (lambda: CenteredClip(iterations=21), "iterations must be 1 to 20"),
    ],
)
def test_impossible_parameters_are_refused(make: Callable[[], Aggregator], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_parameters_of_another_type_are_refused() -> None:
    for make in (lambda: Mean(gate="1"), lambda: TrimmedMean(trim=None), lambda: CenteredClip(iterations=1.5)):
        with pytest.raises(TypeError):
            make()


def test_descriptions_tell_all_parameters() -> None:
    different = [*ALL, Mean(gate=10), TrimmedMean(trim=0.2), CenteredClip(radius=2), CenteredClip(iterations=1)]
    assert len({each.description for each in different}) == len(different)
    assert Mean(gate=1000).description == Mean(gate=1000.0).description


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("aggregator", [Mean(), Median(), TrimmedMean(), CenteredClip()])
def test_values_that_last_are_only_read(aggregator: Aggregator, ordered: bool) -> None:
    values = gradients(5)
    values[0] *= 1e6
    lasting = [value.clone() for value in values]
    part = aggregator.part(torch.full((2000,), math.nan), 5, ordered=ordered)
    for sender, value in enumerate(lasting):
        part.add(value, 1.0 + sender, sender, lasting=True)
    average, left_out = part.finish()
    assert all(map(torch.equal, lasting, values))
    expected = aggregate(aggregator, values, [1.0, 2.0, 3.0, 4.0, 5.0], list(range(5)) if ordered else None)
    assert torch.equal(average, expected[0]) and dict(left_out) == expected[1]
