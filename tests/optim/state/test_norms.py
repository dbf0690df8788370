"""How far a step went is told as it was, by all alike; one far beyond the usual is told once, with what helps."""

import pytest
import torch

from swarmcli.optim.state import norms as norms_module
from swarmcli.optim.state.norms import StepNorms, UsualNorms, measure_step


def matrices(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(64, 48), (48,), (5, 1, 3)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_both_norms_are_those_of_the_step(dtype: torch.dtype) -> None:
    parameters, gradients = matrices(dtype), [each.float() for each in matrices()]
    before = torch.cat([each.flatten().double() for each in parameters])

    def step() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(0.5 * gradient.to(dtype))
            gradient.mul_(0.01)  # as an optimizer does that clips

    wanted = torch.cat([each.flatten() for each in gradients]).norm().item()
    norms = measure_step(parameters, gradients, step)
    moved = (torch.cat([each.flatten().double() for each in parameters]) - before).norm().item()
    assert norms.gradient == pytest.approx(wanted)
    assert norms.update == pytest.approx(moved, rel=1e-5)


def test_of_many_values_a_part_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms_module, "SAMPLED", 500)
    parameters = matrices()
    # Of a matrix in which one column alone moves, as with a token that comes often, the sample meets its part.
    columns = torch.zeros(64, 48)
    columns[:, 7] = 1.0
    norms = measure_step(parameters, matrices(), lambda: parameters[0].add_(columns))
    assert norms.update == pytest.approx(8.0, rel=0.2)


def test_a_step_that_is_not_finite_has_no_norm() -> None:
    parameters = matrices()
    norms = measure_step(parameters, [torch.full((2,), torch.inf)], lambda: parameters[0].fill_(torch.nan))
    assert norms == StepNorms(None, None)


def told(gradients: list[float | None], updates: list[float] | None = None) -> dict[int, str]:
    usual = UsualNorms()
    steps = enumerate(zip(gradients, updates or [0.5] * len(gradients), strict=True), start=1)
    texts = {epoch: usual.look(epoch, StepNorms(gradient, update)) for epoch, (gradient, update) in steps}
    return {epoch: text for epoch, text in texts.items() if text}


def test_a_step_far_beyond_the_usual_one_is_told_with_what_helps() -> None:
    texts = told([*([1.2, 0.9, 1.1] * 5), 11.0, 12.0, 9.0, *([1.0] * 5), 8.0])
    assert list(texts) == [16, 24]  # once for a row of them
    assert "epoch 16" in texts[16]
    assert "the norm of the averaged gradient (before clipping) was 11, usually 1.1." in texts[16]
    assert "learning rate" in texts[16] and "warmup_epochs" in texts[16] and "--resume" in texts[16]
    assert "update" not in texts[16]
    assert "the norm of the update was 4, usually 0.5" in told([1.0] * 9, [*[0.5] * 8, 4.0])[9]
    assert "(before clipping) is not finite, usually 1." in told([*[1.0] * 9, None])[10]


def test_beginning_warming_up_and_learning_are_no_jumps() -> None:
    warming = [(epoch + 1) / 101 for epoch in range(100)]
    falling = [10 * 0.8**epoch for epoch in range(40)]
    noisy = [1.0, 2.9, 0.7, 1.6, 2.2] * 8
    assert told(falling) == told(noisy) == told([1.0] * 100, warming) == {}
    assert told([0.01, 5.0, 5.0, 5.0]) == {}
