"""GradientAverager between two peers over TCP."""

import pytest
import torch

from swarmcli.averaging import RoundResult, StepControl
from swarmcli.dht import DHT
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
            results = at_once(lambda: small.step(timeout=120), lambda: large.step(timeout=120))
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
            controls = [one.schedule_step(timeout=120), other.schedule_step(timeout=120)]
            one.accumulate_grads_(2)
            results = [averager.step(control=c, wait=False) for averager, c in zip((one, other), controls, strict=True)]
            assert all(isinstance(result, StepControl) for result in results)
            assert controls[0].result(30).total_weight == 6
            assert one.local_samples_accumulated == 0
            with pytest.raises(RuntimeError, match="used"):
                one.step(control=controls[0])


def test_a_factory_fills_in_options(dht: DHT) -> None:
    make = GradientAverager.get_factory(prefix="elsewhere", start=False)
    averager = make([torch.nn.Parameter(torch.zeros(2))], dht=dht)
    assert averager.prefix == "elsewhere"
    assert not averager.is_alive
    averager.shutdown()


def local(dht, **options) -> tuple[list[torch.nn.Parameter], GradientAverager]:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    return parameters, GradientAverager(parameters, dht=dht, prefix="grads", min_matchmaking_time=10.0, **options)


def backward(parameters: list[torch.nn.Parameter], factor: float) -> None:
    sum((factor * parameter).sum() for parameter in parameters).backward()


def test_reused_gradients_are_the_accumulators_and_averages_come_beside_them() -> None:
    with dhts(2) as (first, second):
        made = [local(dht, reuse_grad_buffers=True) for dht in (first, second)]
        with made[0][1], made[1][1]:
            for (parameters, averager), factor in zip(made, (1.0, 3.0), strict=True):
                for _ in range(2):  # no zero_grad between
                    backward(parameters, factor)
                    averager.accumulate_grads_(4)
                assert averager.local_samples_accumulated == 8
            results = at_once(*(averager.step for _, averager in made))
            assert all(isinstance(result, RoundResult) for result in results)
            for parameters, averager in made:
                own = parameters[0].grad
                with averager.use_averaged_gradients():
                    assert torch.equal(parameters[0].grad, torch.full((3,), 2.0))
                assert parameters[0].grad is own and not own.any()


def test_averages_arrive_in_the_users_tensors() -> None:
    with dhts(2) as (first, second):
        buffers = [torch.zeros(3), torch.zeros(2, 2)]
        (one, averager), (other, second_averager) = local(first, averaged_grads=buffers), local(second)
        with averager, second_averager:
            for parameters, each, factor in ((one, averager, 1.0), (other, second_averager, 3.0)):
                backward(parameters, factor)
                each.accumulate_grads_(1)
            at_once(averager.step, second_averager.step)
            averager._take_in_outcome()
            assert torch.equal(buffers[0], torch.full((3,), 2.0)) and torch.equal(buffers[1], torch.full((2, 2), 2.0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"averaged_grads": [torch.zeros(3)]}, "expected 2 tensors"),
        ({"averaged_grads": [torch.zeros(3), torch.zeros(4)]}, r"averaged_grads\[1\] has shape \(4,\)"),
        ({"averaged_grads": [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)]}, r"averaged_grads\[1\].*float64"),
        ({"reuse_grad_buffers": True, "accumulate_grads_on": "cpu"}, "accumulate_grads_on"),
        ({"part_size_bytes": 0}, "part_size_bytes"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(dht: DHT, options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        local(dht, start=False, **options)


@pytest.mark.parametrize("warn", [True, False])
def test_averages_that_nobody_used_and_sums_that_nobody_reset_are_told_of(
    warn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with dhts(2) as (first, second):
        made = [local(dht, warn=warn) for dht in (first, second)]
        with made[0][1], made[1][1]:

            def round_of(reset: bool) -> None:
                for parameters, averager in made:
                    backward(parameters, 1.0)
                    averager.accumulate_grads_(1)
                at_once(*(lambda a=averager: a.step(reset_accumulators=reset) for _, averager in made))

            round_of(reset=False)
            assert made[0][1].local_samples_accumulated == 1
            for _, averager in made:
                averager.notify_used_averaged_gradients()
            round_of(reset=True)  # onto sums that have been averaged
            assert ("averaged already" in caplog.text) == warn
            assert "have not been used" not in caplog.text
            round_of(reset=True)
            assert ("have not been used" in caplog.text) == warn


def test_a_failed_step_gives_back_what_it_took_and_one_under_way_is_not_disturbed(dht: DHT) -> None:
    parameters, averager = local(dht)
    with averager:
        backward(parameters, 2.0)
        averager.accumulate_grads_(3)
        control = averager.step(timeout=600, wait=False)
        assert isinstance(control, StepControl) and averager.local_samples_accumulated == 0
        for disturbing in (averager.load_accumulators_into_averager_, averager.step):
            with pytest.raises(RuntimeError, match="has not ended"):
                disturbing()
        control.cancel()
        with averager.use_averaged_gradients():
            assert torch.equal(parameters[0].grad, torch.full((3,), 2.0))  # its own
        assert averager.local_samples_accumulated == 3
        averager.reset_accumulated_grads_()
        assert averager.local_samples_accumulated == 0
