"""The delta rule on its own: what was learned meanwhile is kept, and what was not is exactly the average."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from swarmcli.errors import OptimizerError
from swarmcli.optim.modes.outer import Riders
from swarmcli.optim.state.averaging import state_slots


def made(tensor: torch.Tensor, *names: str, extra: tuple[torch.Tensor, ...] = ()) -> tuple:
    """A parameter with its optimizer, and the slots of what is averaged of them."""
    parameter = torch.nn.Parameter(tensor)
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    return parameter, optimizer, list(state_slots([parameter], optimizer, names, extra))


def step(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_the_average_is_assigned_where_nothing_changed_and_added_where_it_did(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, average, learned = (torch.randn(50, generator=generator).to(dtype) for _ in range(3))
    touched = torch.rand(50, generator=generator) < 0.3
    parameter, _, (slot,) = made(start.clone())
    before = slot.copied()
    assert torch.equal(before, start)
    with torch.no_grad():
        parameter[touched] += learned[touched]
    changed = parameter.detach().clone()
    slot.move(average, before)
    still = changed == start
    assert torch.equal(parameter[still], average[still])
    expected = changed.double() + average.double() - start.double()
    torch.testing.assert_close(parameter[~still].double(), expected[~still], rtol=0.02, atol=0.02)


def test_a_state_that_was_not_finite_becomes_the_average() -> None:
    parameter, _, (slot,) = made(torch.tensor([1.0, float("nan"), float("inf")]))
    slot.move(torch.tensor([5.0, 6.0, 7.0]), slot.copied())
    assert parameter.tolist() == [5.0, 6.0, 7.0]


def test_statistics_are_averaged_by_name_and_begin_at_zero() -> None:
    parameter, optimizer, (_, average, square) = made(torch.ones(3), "exp_avg", "exp_avg_sq")
    assert average.copied().tolist() == square.copied().tolist() == [0.0] * 3
    average.move(torch.ones(3), None)  # there is nothing to move yet
    step(optimizer, parameter)
    torch.testing.assert_close(average.copied(), torch.full((3,), 0.1))
    optimizer.load_state_dict(optimizer.state_dict())  # replaces the tensors of the statistics
    average.move(torch.full((3,), 9.0), None)
    assert optimizer.state[parameter]["exp_avg"].tolist() == [9.0] * 3


def test_statistics_that_are_none_are_refused_by_name() -> None:
    parameter, optimizer, slots = made(torch.ones(3), "exp_averages", "step")
    step(optimizer, parameter)
    for slot, reason in (
        (slots[1], "there is no 'exp_averages'; there are step, exp_avg, exp_avg_sq"),
        (slots[2], r"'step' has shape \(\)"),
    ):
        with pytest.raises(OptimizerError, match=reason):
            slot.copied()


@given(st.integers(0, 1 << 20))
def test_what_optimizers_divide_by_never_falls_below_both_what_it_is_and_the_average(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    variance = torch.ones(50)
    parameter, optimizer, (_, *slots) = made(torch.ones(50), "exp_avg_sq", extra=(variance,))
    step(optimizer, parameter)
    for live, slot in zip((optimizer.state[parameter]["exp_avg_sq"], variance), slots, strict=True):
        live.copy_(torch.rand(50, generator=generator) + 0.01)
        before, average = slot.copied(), torch.rand(50, generator=generator)
        live.mul_(torch.rand(50, generator=generator) + 0.01)
        present = live.clone()
        slot.move(average, before)
        assert bool((live >= torch.minimum(present, average)).all())


def test_statistics_that_ride_along_with_a_round_keep_what_they_have_learned_meanwhile() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.5)
    step(optimizer, parameter)
    riders = Riders(optimizer, ("momentum_buffer",))
    riders.load()
    assert riders.means[0].tolist() == [1.0, 1.0]
    step(optimizer, parameter)  # while the round is under way
    riders.means[0].fill_(5.0)
    riders.finish(counted=True)
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [5.5, 5.5]
    riders.load()
    riders.finish(counted=False)  # of a round that is made up for
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [5.5, 5.5]
