"""Gradients of small batches add up to the gradient of the large one."""

import pytest
import torch

from swarmcli.errors import OptimizerError
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
    torch.testing.assert_close(accumulator.means[0], data.mean(0), rtol=1e-14, atol=0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_noticed(broken: float) -> None:
    weights = parameter(2)
    accumulator = GradientAccumulator([weights])
    weights.grad = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert accumulator.add(3)
    weights.grad = torch.tensor([1.0, broken], dtype=torch.float64)
    assert not accumulator.add(1)
    assert (accumulator.samples, accumulator.times) == (3, 1)
    assert accumulator.load_means()
    assert accumulator.means[0].tolist() == [1.0, 2.0]
    accumulator.accumulators[0][1] = broken  # as a sum may become of itself
    assert not accumulator.load_means()
    accumulator.reset()
    assert accumulator.load_means()


def test_a_parameter_without_gradient_adds_nothing() -> None:
    used, unused = parameter(2), parameter(2)
    used.grad = torch.ones(2, dtype=torch.float64)
    accumulator = GradientAccumulator([used, unused])
    accumulator.add(4)
    accumulator.load_means()
    assert torch.equal(accumulator.means[0], torch.ones(2, dtype=torch.float64))
    assert not accumulator.means[1].any()


def test_short_floats_are_summed_in_float32() -> None:
    weights = parameter(1, dtype=torch.bfloat16)
    accumulator = GradientAccumulator([weights])
    weights.grad = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(1000):
        accumulator.add(1)
    assert accumulator.accumulators[0].item() == 1000.0
    accumulator.load_means()
    assert accumulator.means[0].dtype == torch.float32


def test_a_gradient_that_does_not_fit_adds_nothing_at_all() -> None:
    first, second = parameter(2), parameter(2)
    first.grad = torch.ones(2, dtype=torch.float64)
    second.grad = torch.ones(2, dtype=torch.float64).to_sparse()
    accumulator = GradientAccumulator([first, second])
    with pytest.raises(ValueError, match="gradient 1"):
        accumulator.add(1)
    assert not accumulator.accumulators[0].any()
    assert accumulator.samples == 0


# What is handed in, used up or taken back.


def filled(*gradients: float, batch_size: int = 2, **options: object) -> tuple[torch.Tensor, GradientAccumulator]:
    """An accumulator of one number that has taken in these gradients, each of a batch of two."""
    weights = parameter(1)
    accumulator = GradientAccumulator([weights], **options)
    for gradient in gradients:
        batch(weights, accumulator, gradient, batch_size)
    return weights, accumulator


def batch(
    weights: torch.Tensor,
    accumulator: GradientAccumulator,
    gradient: float,
    batch_size: int = 2,
    scale: float | None = None,
) -> bool:
    """A backward pass whose gradient is that number, and `add`."""
    if not accumulator.reuse:
        weights.grad = None
    (weights * gradient).sum().backward()
    return accumulator.add(batch_size, scale)


@pytest.mark.parametrize("reuse", [False, True])
def test_freezing_leaves_room_for_the_next_epoch(reuse: bool) -> None:
    weights, accumulator = filled(1.0, 3.0, reuse=reuse)
    assert accumulator.freeze().samples == 4
    assert accumulator.means[0].item() == 2.0
    assert (accumulator.samples, accumulator.times, accumulator.handed_in.samples) == (0, 0, 4)
    batch(weights, accumulator, 7.0)
    assert accumulator.means[0].item() == 2.0, "the round may be using it"
    accumulator.settle()
    assert accumulator.freeze().samples == 2
    assert accumulator.means[0].item() == 7.0


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("meanwhile", [(), (7.0,), (7.0, 9.0)])
def test_what_is_taken_back_counts_once(reuse: bool, meanwhile: tuple[float, ...]) -> None:
    weights, accumulator = filled(1.0, 3.0, reuse=reuse)
    accumulator.freeze()
    for gradient in meanwhile:
        batch(weights, accumulator, gradient)
    for _ in range(2):
        accumulator.restore()
    everything = [1.0, 3.0, *meanwhile]
    assert accumulator.samples == 2 * len(everything)
    assert accumulator.freeze().samples == 2 * len(everything)
    assert accumulator.means[0].item() == pytest.approx(sum(everything) / len(everything), rel=1e-15)
    assert accumulator.handed_in.samples == 2 * len(everything)


def test_rounds_that_fail_leave_the_sums_bit_for_bit() -> None:
    weights = parameter(50, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    accumulator = GradientAccumulator([weights])
    for size in (3, 7, 1):
        weights.grad = torch.randn(50, generator=generator)
        accumulator.add(size)
    accumulator.freeze()
    first = accumulator.means[0].clone()
    for _ in range(20):
        accumulator.restore()
        assert accumulator.freeze().samples == 11
    assert torch.equal(accumulator.means[0], first)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_reset_drops_what_was_handed_in_or_taken_back(reuse: bool) -> None:
    weights, accumulator = filled(1.0, reuse=reuse)
    accumulator.freeze()
    accumulator.restore()
    accumulator.reset()
    assert (accumulator.samples, accumulator.handed_in.samples) == (0, 0)
    assert not accumulator.accumulators[0].any()
    accumulator.restore()
    batch(weights, accumulator, 5.0)
    assert (accumulator.freeze().samples, accumulator.means[0].item()) == (2, 5.0)


# Reused gradients.


@pytest.mark.parametrize(
    ("size", "scale", "words"), [(3, None, r"weight 3.* which were 2 and 1"), (2, 16.0, r"scale 16: .* 2 and 1")]
)
def test_reused_gradients_want_batches_of_one_size_and_scale(size: int, scale: float | None, words: str) -> None:
    weights, accumulator = filled(1.0, 3.0, reuse=True)
    with pytest.raises(OptimizerError, match=words):
        batch(weights, accumulator, 5.0, size, scale)
    assert accumulator.samples == 0 and not weights.grad.any()
    batch(weights, accumulator, 7.0 * (scale or 1.0), size, scale)
    assert (accumulator.freeze().samples, accumulator.means[0].item()) == (size, 7.0)


@pytest.mark.parametrize("replacement", [None, torch.ones(1, dtype=torch.float64)])
def test_replaced_gradients_are_noticed(replacement: torch.Tensor | None) -> None:
    weights, accumulator = filled(1.0, reuse=True)
    weights.grad = replacement
    with pytest.raises(OptimizerError, match="parameter 0 was replaced"):
        accumulator.add(2)
    assert weights.grad is accumulator.accumulators[0]
    batch(weights, accumulator, 5.0)
    assert (accumulator.freeze().samples, accumulator.means[0].item()) == (2, 5.0)


# Where the sums live.


@pytest.mark.parametrize("reuse", [False, True])
def test_scaled_gradients_are_handed_in_unscaled_and_come_back_so(reuse: bool) -> None:
    weights, accumulator = filled(reuse=reuse)
    for gradient in (8.0, 24.0):
        batch(weights, accumulator, gradient, scale=8.0)
    assert (accumulator.freeze().samples, accumulator.means[0].item()) == (4, 2.0)
    accumulator.restore()
    batch(weights, accumulator, 5.0 * 64, batch_size=4, scale=64.0)
    assert (accumulator.freeze().samples, accumulator.means[0].item()) == (8, (4 * 2.0 + 4 * 5.0) / 8)


@pytest.mark.parametrize("reuse", [False, True])
def test_an_overflow_drops_everything_and_the_next_batch_counts_again(reuse: bool) -> None:
    weights, accumulator = filled(reuse=reuse)
    assert batch(weights, accumulator, 8.0, scale=8.0)
    accumulator.freeze()
    accumulator.restore()
    assert not batch(weights, accumulator, float("inf"), scale=8.0)
    assert accumulator.samples == 0
    assert batch(weights, accumulator, 12.0, scale=4.0)
    assert (accumulator.freeze().samples, accumulator.means[0].item()) == (2, 3.0)


@pytest.mark.parametrize("reuse", [False, True])
def test_an_overflow_leaves_what_a_round_is_using(reuse: bool) -> None:
    weights, accumulator = filled(2.0, reuse=reuse)
    accumulator.freeze()
    assert not batch(weights, accumulator, float("nan"), scale=8.0)
    accumulator.restore()
    assert (accumulator.freeze().samples, accumulator.means[0].item()) == (2, 2.0)


def test_small_float16_gradients_survive_their_scale() -> None:
    weights = parameter(1, dtype=torch.float16)
    accumulator = GradientAccumulator([weights])
    weights.grad = torch.tensor([2.0**-8], dtype=torch.float16)  # of 2 ** -28, for which float16 has no number
    accumulator.add(2, scale=2.0**20)
    accumulator.freeze()
    assert accumulator.means[0].item() == 2.0**-28
