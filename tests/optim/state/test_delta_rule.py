"""The delta rule on its own: what was learned meanwhile is kept, and what was not is exactly the average."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from swarmcli.errors import OptimizerError
from swarmcli.optim.state.averaging import Slot, state_slots


def made(*tensors: torch.Tensor, statistics: tuple[str, ...] = (), extra: tuple[torch.Tensor, ...] = ()) -> tuple:
    """The optimizer of these parameters, and its buffers."""
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    return parameters, optimizer, buffers_of(parameters, optimizer, statistics, extra)


class Buffers:
    """Those of one round; after `pin` the state may change."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots, self._before = slots, None
        self.fill()

    def fill(self) -> None:
        self.tensors = [slot.copied() for slot in self.slots]

    def pin(self) -> None:
        self._before = [slot.copied() for slot in self.slots]

    def apply(self) -> None:
        for slot, average, before in zip(self.slots, self.tensors, self._before or [None] * 9, strict=False):
            slot.move(average, before)


def buffers_of(
    parameters: list, optimizer: torch.optim.Optimizer, statistics: tuple = (), extra: tuple = ()
) -> Buffers:
    return Buffers(list(state_slots(parameters, optimizer, statistics, extra)))


def step(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_the_average_is_assigned_where_nothing_changed_and_added_where_it_did(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, average = (torch.randn(50, generator=generator).to(dtype) for _ in range(2))
    touched = torch.rand(50, generator=generator) < 0.3
    (parameter,), _, buffers = made(start.clone())
    buffers.pin()
    buffers.fill()
    assert torch.equal(buffers.tensors[0], start)
    learned = torch.randn(50, generator=generator).to(dtype)
    with torch.no_grad():
        parameter[touched] += learned[touched]
    changed = parameter.detach().clone()
    buffers.tensors[0].copy_(average)
    buffers.apply()
    still = changed == start
    assert torch.equal(parameter[still], average[still])
    expected = changed.double() + average.double() - start.double()
    torch.testing.assert_close(parameter[~still].double(), expected[~still], rtol=0.02, atol=0.02)


def test_a_state_that_was_not_finite_becomes_the_average() -> None:
    (parameter,), _, buffers = made(torch.tensor([1.0, float("nan"), float("inf")]))
    buffers.pin()
    buffers.fill()
    buffers.tensors[0].copy_(torch.tensor([5.0, 6.0, 7.0]))
    buffers.apply()
    assert parameter.tolist() == [5.0, 6.0, 7.0]


def test_statistics_are_averaged_by_name_and_begin_at_zero() -> None:
    (parameter,), optimizer, buffers = made(torch.ones(3), statistics=("exp_avg", "exp_avg_sq"))
    buffers.fill()
    assert [tensor.tolist() for tensor in buffers.tensors[1:]] == [[0.0] * 3] * 2
    buffers.apply()  # there is nothing to move yet
    step(optimizer, [parameter])
    buffers.fill()
    torch.testing.assert_close(buffers.tensors[1], torch.full((3,), 0.1))
    buffers.tensors[1].fill_(9.0)
    optimizer.load_state_dict(optimizer.state_dict())  # replaces the tensors of the statistics
    buffers.apply()
    assert optimizer.state[parameter]["exp_avg"].tolist() == [9.0] * 3


def test_statistics_that_are_none_are_refused_by_name() -> None:
    parameters, optimizer, buffers = made(torch.ones(3), statistics=("exp_averages",))
    step(optimizer, parameters)
    with pytest.raises(OptimizerError, match="there is no 'exp_averages'; there are step, exp_avg, exp_avg_sq"):
        buffers.fill()
    with pytest.raises(OptimizerError, match=r"'step' has shape \(\)"):
        buffers_of(parameters, optimizer, ("step",))


@given(st.integers(0, 1 << 20))
def test_what_optimizers_divide_by_never_falls_below_both_what_it_is_and_the_average(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters, optimizer, _ = made(torch.ones(50))
    step(optimizer, parameters)
    squares = optimizer.state[parameters[0]]["exp_avg_sq"]
    variance = torch.ones(50)
    buffers = buffers_of(parameters, optimizer, ("exp_avg_sq",), (variance,))
    for live in (squares, variance):
        live.copy_(torch.rand(50, generator=generator) + 0.01)
    buffers.pin()
    buffers.fill()
    averages = [torch.rand(50, generator=generator) for _ in buffers.tensors]
    for buffer, average in zip(buffers.tensors, averages, strict=True):
        buffer.copy_(average)
    present = []
    for live in (squares, variance):
        live.mul_(torch.rand(50, generator=generator) + 0.01)
        present.append(live.clone())
    buffers.apply()
    for live, before, average in zip((squares, variance), present, averages[1:], strict=True):
        assert bool((live >= torch.minimum(before, average)).all())
