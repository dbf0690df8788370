"""TrainingStateAverager between two peers over TCP."""

import pytest
import torch

from swarmcli.optim import TrainingStateAverager
from tests.optim.shells import at_once, dhts


def made(dht, value: float) -> tuple[torch.nn.Parameter, torch.Tensor, TrainingStateAverager]:
    parameter = torch.nn.Parameter(torch.full((4,), value))
    statistics = torch.full((2,), 10 * value)
    averager = TrainingStateAverager(
        dht=dht,
        prefix="state",
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        params=[parameter],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        extra_tensors=[statistics],
        min_matchmaking_time=10.0,
    )
    return parameter, statistics, averager


def test_every_peer_steps_and_then_all_hold_the_mean() -> None:
    with dhts(2) as (first, second):
        (one, extra, left), (other, _, right) = made(first, 2.0), made(second, 4.0)
        with left, right:
            one.grad, other.grad = torch.ones(4), torch.zeros(4)
            options = {"averaging_opts": {"timeout": 30}, "averaging_round": True, "optimizer_step": True}
            results = at_once(*(lambda a=a: a.step(increment_epoch=True, **options) for a in (left, right)))
            assert all(result is not None for result in results)
            assert torch.equal(one.detach(), torch.full((4,), 2.5))
            assert torch.equal(other.detach(), one.detach())
            assert torch.equal(extra, torch.full((2,), 30.0))
            assert (left.local_epoch, left.optimizer.param_groups[0]["lr"]) == (1, 0.5)
            left.step(zero_grad=True)
            assert one.grad is None


def test_options_for_a_round_that_was_not_asked_for_are_refused() -> None:
    with dhts(1) as (dht,):
        _, _, averager = made(dht, 1.0)
        with averager, pytest.raises(ValueError, match="averaging_opts"):
            averager.step(averaging_opts={"timeout": 1})
