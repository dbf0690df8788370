"""The scaler by itself: with torch's optimizers, and with a stand-in for the collaborative one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from swarmcli import GradScaler
from swarmcli.errors import GradScalerError
from swarmcli.optim.grad_scaler import check_grad_scaler

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Collaborative(torch.optim.SGD):
    """Takes batches in as the Optimizer does; what becomes of them is told by the test."""

    def __init__(self, weights: torch.Tensor, *, sums: bool = False) -> None:
        super().__init__([weights], lr=1.0)
        self.scaled_steps = self
        self.taken: list[torch.Tensor] = []  # unscaled
        self.gradients_are_sums = sums
        self.holds_scaled_sums = False
        self.overflow, self.global_steps = False, 0  # what the next step reports

    def step(self, closure: Any = None, batch_size: int | None = None, grad_scaler: Any = None) -> Any:
        check_grad_scaler(grad_scaler)
        scale = grad_scaler.scale_of(self)
        self.taken += [gradient / scale for gradient in self.batch_gradients()]
        grad_scaler.note_step(self, overflow=self.overflow, global_steps=self.global_steps)
        self.overflow, self.global_steps = False, 0
        return batch_size

    def batch_gradients(self) -> list[torch.Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]


def scaled(device: str = "cpu", **options: Any) -> tuple[GradScaler, torch.nn.Parameter]:
    """A scaler of scale 8 that grows after two steps, and weights with a scaled gradient of (8, 16)."""
    scaler = GradScaler(device, init_scale=8.0, growth_interval=2, **options)
    weights = torch.nn.Parameter(torch.zeros(2, device=device))
    backward(scaler, weights)
    return scaler, weights


def backward(scaler: GradScaler, weights: torch.Tensor, loss: float = 1.0) -> None:
    weights.grad = None
    scaler.scale((weights * torch.tensor([1.0, 2.0], device=weights.device)).sum() * loss).backward()


@pytest.mark.parametrize("device", DEVICES)
def test_a_torch_optimizer_steps_as_with_torchs_own_scaler(device) -> None:
    scaler, weights = scaled(device)
    torchs, others = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2), weights.detach().clone()
    others.requires_grad_()
    momentum = {"lr": 0.1, "momentum": 0.9}
    optimizer, other = torch.optim.SGD([weights], **momentum), torch.optim.SGD([others], **momentum)
    for loss in (1.0, 0.5, float("inf"), 2.0, 3.0, 1.0):
        backward(scaler, weights, loss)
        backward(torchs, others, loss)
        if loss == 2.0:
            scaler.unscale_(optimizer)
            torchs.unscale_(other)
        scaler.step(optimizer)
        scaler.update()
        torchs.step(other)
        torchs.update()
        assert torch.equal(weights, others)
        assert scaler.state_dict() == torchs.state_dict()
    assert scaler.get_scale() == 16.0, "grown once, backed off once, grown again"


def test_local_steps_leave_the_scale_alone_and_global_ones_let_it_grow() -> None:
    scaler, weights = scaled()
    optimizer = Collaborative(weights)
    for number in range(1, 9):
        backward(scaler, weights)
        optimizer.global_steps = int(number % 4 == 0)
        assert scaler.step(optimizer, batch_size=4) == 4
        scaler.update()
        assert scaler.get_scale() == (16.0 if number == 8 else 8.0), "two global steps make an interval"
    assert all(torch.equal(gradient, torch.tensor([1.0, 2.0])) for gradient in optimizer.taken)


def test_an_overflow_lowers_the_scale_at_the_next_update_once() -> None:
    scaler, weights = scaled()
    optimizer = Collaborative(weights)
    optimizer.overflow = True
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_the_scale_stands_still_while_reused_buffers_hold_anything() -> None:
    scaler, weights = scaled()
    optimizer = Collaborative(weights, sums=True)
    for _ in range(2):
        optimizer.global_steps, optimizer.holds_scaled_sums = 1, True  # a delayed step ended amid the next epoch
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 8.0
        with pytest.raises(GradScalerError, match="reused gradient buffers"):
            scaler.update(2.0)
        optimizer.holds_scaled_sums = False
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 16.0, "both steps counted, later"
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("late", [1, 2])
def test_global_steps_that_end_one_behind_the_other_are_counted_each(late: int) -> None:
    scaler, weights = scaled()
    optimizer = Collaborative(weights, sums=True)
    optimizer.global_steps, optimizer.holds_scaled_sums = 1, True  # the last epoch's, amid this one
    scaler.step(optimizer)
    scaler.update()
    optimizer.global_steps, optimizer.holds_scaled_sums = late, False  # this one's was at once
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (16.0, late - 1)


@pytest.mark.parametrize("device", DEVICES)
def test_one_batch_may_be_unscaled_by_hand_and_is_not_unscaled_again(device) -> None:
    scaler, weights = scaled(device)
    optimizer = Collaborative(weights)
    scaler.unscale_(optimizer)
    assert weights.grad.tolist() == [1.0, 2.0]
    with pytest.raises(GradScalerError, match="twice"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    backward(scaler, weights)
    scaler.step(optimizer)
    assert [gradient.tolist() for gradient in optimizer.taken] == [[1.0, 2.0], [1.0, 2.0]]


def test_what_cannot_be_unscaled_by_hand_is_refused() -> None:
    scaler, weights = scaled()
    with pytest.raises(GradScalerError, match="reused"):
        scaler.unscale_(Collaborative(weights, sums=True))
    half = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(GradScalerError, match="float16"):
        scaler.unscale_(Collaborative(half))


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("device", DEVICES)
def test_are_grads_finite_looks_and_changes_nothing(device, bad) -> None:
    scaler, weights = scaled(device)
    for optimizer in (Collaborative(weights), torch.optim.SGD([weights], lr=1.0)):
        backward(scaler, weights)
        before = copy.deepcopy(weights.grad)
        assert scaler.are_grads_finite(optimizer)
        assert torch.equal(weights.grad, before)
        weights.grad[1] = bad
        assert not scaler.are_grads_finite(optimizer)
    with pytest.raises(GradScalerError, match="without a step"):
        scaler.update()


def test_a_global_step_of_a_loop_that_averages_by_itself() -> None:
    scaler, weights = scaled()
    half = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    inner = torch.optim.SGD([half], lr=1.0)
    half.grad = torch.tensor([8.0, 16.0], dtype=torch.float16)  # an average of scaled gradients
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(inner)
    scaler.update(8.0)
    with scaler.running_global_step():
        scaler.step(inner)
        with pytest.raises(GradScalerError, match="after the block"):
            scaler.update()
        with pytest.raises(GradScalerError, match="by itself"):
            scaler.step(Collaborative(weights))
        with pytest.raises(GradScalerError, match="already"), scaler.running_global_step():
            pass
    scaler.update()
    assert half.tolist() == [-1.0, -2.0]
    assert scaler.state_dict()["_growth_tracker"] == 1


def test_wrong_orders_of_calls_are_refused() -> None:
    scaler = GradScaler("cpu")
    weights = torch.nn.Parameter(torch.zeros(2))
    optimizer = Collaborative(weights)
    with pytest.raises(GradScalerError, match=r"scale\(loss\)"):
        scaler.step(optimizer)
    backward(scaler, weights)
    with pytest.raises(GradScalerError, match="without a step"):
        scaler.update()
    with pytest.raises(GradScalerError, match="closure"):
        scaler.step(optimizer, closure=lambda: None)
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(GradScalerError, match="without a step"):
        scaler.update()
    assert issubclass(GradScalerError, RuntimeError), "whoever catches torch's errors catches these"


def test_a_scaler_that_is_not_enabled_does_nothing() -> None:
    scaler = GradScaler("cpu", enabled=False)
    weights = torch.nn.Parameter(torch.zeros(2))
    backward(scaler, weights)
    torch_optimizer = torch.optim.SGD([weights], lr=1.0)
    scaler.unscale_(torch_optimizer)
    scaler.step(torch_optimizer)
    scaler.update()
    assert weights.tolist() == [-1.0, -2.0]
    assert scaler.scale_of(Collaborative(weights)) == 1.0


def test_a_scaler_is_saved_loaded_and_copied_like_torchs() -> None:
    scaler, weights = scaled()
    optimizer = Collaborative(weights)
    optimizer.global_steps = 1
    scaler.step(optimizer)
    scaler.update()
    other = GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() == copy.deepcopy(scaler).state_dict()
    with scaler.running_global_step(), pytest.raises(GradScalerError, match="copied"):
        copy.deepcopy(scaler)
