"""GradientAverager between two peers over TCP."""

import pytest
import torch

from swarmcli.averaging import RoundResult, StepControl
from swarmcli.optim import GradientAverager
from tests.optim.shells import at_once, dhts


def filled(dht, gradient: float, samples: int, **options) -> tuple[torch.nn.Parameter, GradientAverager]:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    averager = GradientAverager([parameter], dht=dht, prefix="grads", min_matchmaking_time=10.0, **options)
    parameter.grad = torch.full((3,), gradient, dtype=torch.float64)
    averager.accumulate_grads_(samples)
    return parameter, averager


def test_the_average_is_weighted_by_samples() -> None:
    with dhts(2) as (first, second):
        (one, small), (_, large) = filled(first, 1.0, 1), filled(second, 5.0, 3)
        with small, large:
            results = at_once(lambda: small.step(timeout=30), lambda: large.step(timeout=30))
            assert all(isinstance(result, RoundResult) for result in results)
            assert results[0].total_weight == 4
            assert (small.local_samples_accumulated, small.local_times_accumulated) == (0, 0)
            users = one.grad
            with small.use_averaged_gradients():
                assert torch.allclose(one.grad, torch.full((3,), 4.0, dtype=torch.float64))
            assert one.grad is users


def test_scheduled_ahead_it_averages_what_is_there_when_it_begins() -> None:
    with dhts(2) as (first, second):
        (_, one), (_, other) = filled(first, 2.0, 2), filled(second, 4.0, 2)
        with one, other:
            controls = [one.schedule_step(timeout=30), other.schedule_step(timeout=30)]
            one.accumulate_grads_(2)
            results = [averager.step(control=c, wait=False) for averager, c in zip((one, other), controls, strict=True)]
            assert all(isinstance(result, StepControl) for result in results)
            assert controls[0].result(30).total_weight == 6
            assert one.local_samples_accumulated == 0
            with pytest.raises(RuntimeError, match="used"):
                one.step(control=controls[0])


def test_a_round_that_fails_keeps_what_was_accumulated() -> None:
    with dhts(1) as (dht,):
        _, averager = filled(dht, 1.0, 5)
        with averager:
            assert averager.step(timeout=0.2) is None
            assert averager.local_samples_accumulated == 5


def test_a_factory_fills_in_options() -> None:
    with dhts(1) as (dht,):
        make = GradientAverager.get_factory(prefix="elsewhere", start=False)
        averager = make([torch.nn.Parameter(torch.zeros(2))], dht=dht)
        assert averager.prefix == "elsewhere"
        assert not averager.is_alive
        averager.shutdown()
