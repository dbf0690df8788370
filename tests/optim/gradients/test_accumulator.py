"""Gradients of small batches add up to the gradient of the large one."""

import pytest
import torch

from swarmcli.optim.gradients.accumulator import GradientAccumulator


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


def test_unequal_batches_give_the_mean_over_samples() -> None:
    weights = parameter(3)
    data = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    accumulator = GradientAccumulator([weights])
    for batch in (data[:1], data[1:4], data[4:]):
        weights.grad = None
        (batch @ weights).mean().backward()
        accumulator.add(len(batch))
    accumulator.load_means()
    assert (accumulator.samples, accumulator.times) == (10, 3)
    torch.testing.assert_close(accumulator.averaged[0], data.mean(0), rtol=1e-14, atol=0)


def test_without_samples_the_means_are_zero() -> None:
    weights = parameter(2)
    weights.grad = torch.ones(2, dtype=torch.float64)
    accumulator = GradientAccumulator([weights])
    accumulator.add(3)
    accumulator.reset()
    accumulator.load_means()
    assert (accumulator.samples, accumulator.times) == (0, 0)
    assert not accumulator.averaged[0].any()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_noticed(broken: float) -> None:
    weights = parameter(2)
    accumulator = GradientAccumulator([weights])
    weights.grad = torch.tensor([1.0, broken], dtype=torch.float64)
    accumulator.add(1)
    assert not accumulator.load_means()
    accumulator.reset()
    assert accumulator.load_means()


def test_a_parameter_without_gradient_adds_nothing() -> None:
    used, unused = parameter(2), parameter(2)
    used.grad = torch.ones(2, dtype=torch.float64)
    accumulator = GradientAccumulator([used, unused])
    accumulator.add(4)
    accumulator.load_means()
    assert torch.equal(accumulator.averaged[0], torch.ones(2, dtype=torch.float64))
    assert not accumulator.averaged[1].any()


def test_short_floats_are_summed_in_float32() -> None:
    weights = parameter(1, dtype=torch.bfloat16)
    accumulator = GradientAccumulator([weights])
    weights.grad = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(1000):
        accumulator.add(1)
    assert accumulator.accumulators[0].item() == 1000.0
    accumulator.load_means()
    with accumulator.averaged_as_gradients():
        assert weights.grad.dtype == torch.bfloat16


def test_averages_stand_in_for_the_users_gradients_only_inside_the_block() -> None:
    weights = parameter(2)
    users = weights.grad = torch.ones(2, dtype=torch.float64)
    accumulator = GradientAccumulator([weights])
    with accumulator.averaged_as_gradients():
        assert not weights.grad.any()
    assert weights.grad is users


@pytest.mark.parametrize("batch_size", [0, -1])
def test_batch_size_is_checked(batch_size: int) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        GradientAccumulator([parameter(1)]).add(batch_size)


def test_a_gradient_that_does_not_fit_adds_nothing_at_all() -> None:
    first, second = parameter(2), parameter(2)
    first.grad = torch.ones(2, dtype=torch.float64)
    second.grad = torch.ones(2, dtype=torch.float64).to_sparse()
    accumulator = GradientAccumulator([first, second])
    with pytest.raises(ValueError, match="gradient 1"):
        accumulator.add(1)
    assert not accumulator.accumulators[0].any()
    assert accumulator.samples == 0


def test_at_least_one_parameter_is_needed() -> None:
    with pytest.raises(ValueError, match="parameters"):
        GradientAccumulator([])
