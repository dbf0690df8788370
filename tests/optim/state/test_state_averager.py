"""TrainingStateAverager: every action alone, and what `step` makes of them; mostly between two peers over TCP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from swarmcli.errors import OptimizerError
from swarmcli.optim import TrainingStateAverager
from swarmcli.optim.grad_scaler import GradScaler
from tests.optim.shells import at_once, dhts

ROUND = {"averaging_round": True, "averaging_opts": {"timeout": 30}}


class Peer:
    """A parameter of four equal elements, statistics ten times as large, and the averager of both."""

    def __init__(self, dht: Any, value: float, **options: Any) -> None:
        self.parameter = torch.nn.Parameter(torch.full((4,), value))
        self.extra = torch.full((2,), 10 * value)
        self.averager = TrainingStateAverager(
            dht=dht,
            prefix="state",
            optimizer=lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.5),
            params=[self.parameter],
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
            extra_tensors=[self.extra],
            min_matchmaking_time=10.0,
            **options,
        )

    @property
    def value(self) -> float:
        assert (self.parameter == self.parameter[0]).all()
        return self.parameter[0].item()

    def give(self, gradient: float) -> None:
        self.parameter.grad = torch.full((4,), gradient)


@contextmanager
def peers(*values: float, **options: Any) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        made = [
            Peer(dht, value, **options)
            for dht, value in zip(stack.enter_context(dhts(len(values))), values, strict=True)
        ]
        for peer in made:
            stack.enter_context(peer.averager)
        yield made


def all_step(those: list[Peer], **options: Any) -> list[Any]:
    return at_once(*(lambda peer=peer: peer.averager.step(**options) for peer in those))


def test_every_peer_steps_and_then_all_hold_the_mean() -> None:
    with peers(2.0, 4.0) as both:
        one, other = both
        one.give(1.0), other.give(0.0)
        results = all_step(both, increment_epoch=True, optimizer_step=True, **ROUND)
        assert all(result is not None for result in results)
        assert one.value == other.value == 2.5
        assert torch.equal(one.extra, torch.full((2,), 30.0))
        assert (one.averager.local_epoch, one.averager.optimizer.param_groups[0]["lr"]) == (1, 0.5)
        one.averager.step(zero_grad=True)
        assert not one.parameter.grad.any()
        one.averager.step(zero_grad=True, set_to_none=True)
        assert one.parameter.grad is None


def test_what_is_learned_during_a_delayed_round_is_kept() -> None:
    with peers(2.0, 4.0) as both:
        assert all_step(both, delay_averaging=True, **ROUND) == [None, None]
        with torch.no_grad():
            both[0].parameter += 100.0  # whenever the round ends, this comes on top
        for peer in both:
            assert peer.averager.wait_for_delayed_updates(30)
        assert both[1].value == 4.0  # not before it is applied
        assert all(peer.averager.apply_delayed_updates() is not None for peer in both)
        assert (both[0].value, both[1].value) == (103.0, 3.0)
        assert both[0].averager.apply_delayed_updates() is None


def test_an_offloaded_step_is_delayed_and_takes_the_gradients_of_its_moment() -> None:
    with peers(2.0, offload_optimizer=True) as (peer,):
        may_step = threading.Event()
        peer.give(1.0)
        peer.averager.step(optimizer_step=True, delay_optimizer_step=True, zero_grad=True, increment_epoch=True)
        assert peer.averager.local_epoch == 1
        peer.give(7.0)
        assert peer.averager.wait_for_delayed_updates(30)
        assert peer.value == 2.0
        peer.averager.step()
        assert (peer.value, peer.averager.optimizer.param_groups[0]["lr"]) == (1.0, 0.5)
        # With a trigger the gradients are those that are there after it; it may write them to the copies itself.
        own = peer.averager.optimizer.param_groups[0]["params"][0]

        def trigger() -> None:
            assert may_step.wait(30)
            own.grad = torch.full((4,), 3.0)

        peer.averager.step(optimizer_step=True, delay_optimizer_step=True, wait_for_trigger=trigger)
        peer.averager.step(apply_delayed_updates=True)
        assert peer.value == 1.0
        may_step.set()
        peer.averager.step(wait_for_delayed_updates=True)
        assert peer.value == 1.0 - 0.5 * (0.5 * 1.0 + 3.0)  # with the momentum of the first step
        assert own.grad is None


def test_a_delayed_round_comes_after_the_delayed_step() -> None:
    with peers(2.0, 4.0, offload_optimizer=True) as both:
        for peer in both:
            peer.give(1.0)
        all_step(both, optimizer_step=True, delay_optimizer_step=True, **ROUND)
        assert [peer.value for peer in both] == [2.0, 4.0]
        for peer in both:
            peer.averager.step(wait_for_delayed_updates=True)
        assert [peer.value for peer in both] == [2.0, 2.0]


def test_a_trigger_that_fails_is_told_and_nothing_has_changed() -> None:
    with peers(2.0, offload_optimizer=True) as (peer,):

        def trigger() -> None:
            raise ZeroDivisionError("no gradients today")

        peer.give(1.0)
        peer.averager.step(optimizer_step=True, delay_optimizer_step=True, wait_for_trigger=trigger)
        with pytest.raises(ZeroDivisionError, match="no gradients today"):
            peer.averager.step(wait_for_delayed_updates=True)
        assert peer.value == 2.0
        peer.averager.step(optimizer_step=True)
        assert peer.value == 1.0


def test_a_round_scheduled_before_is_used() -> None:
    with peers(2.0, 6.0) as both:
        controls = [peer.averager.schedule_step(timeout=30) for peer in both]
        with torch.no_grad():
            both[0].parameter += 2.0  # the round averages what is there when it begins
        results = at_once(
            *(
                lambda peer=peer, control=control: peer.averager.step(averaging_round=True, averaging_control=control)
                for peer, control in zip(both, controls, strict=True)
            )
        )
        assert all(len(result) == 2 for result in results)
        assert [peer.value for peer in both] == [5.0, 5.0]


def test_a_round_that_nobody_comes_to_changes_nothing() -> None:
    with peers(2.0) as (peer,):
        peer.give(1.0)
        result = peer.averager.step(optimizer_step=True, averaging_round=True, averaging_opts={"timeout": 0.2})
        assert result is None
        assert peer.value == 1.0
        peer.averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": 0.2})
        assert peer.averager.wait_for_delayed_updates(30)
        assert peer.averager.apply_delayed_updates() is None
        assert peer.value == 1.0


def test_statistics_are_averaged_by_name() -> None:
    with peers(0.0, 0.0, average_opt_statistics=("momentum_buffer",)) as both:
        for peer, gradient in zip(both, (1.0, 3.0), strict=True):
            peer.give(gradient)
        all_step(both, optimizer_step=True, **ROUND)
        for peer in both:
            assert peer.averager.optimizer.state[peer.parameter]["momentum_buffer"].tolist() == [2.0] * 4
    with dhts(1) as (dht,), pytest.raises(OptimizerError, match="there is no 'exp_avg'"):
        peer = Peer(dht, 0.0, average_opt_statistics=("exp_avg",))
        with peer.averager:
            peer.give(1.0)
            peer.averager.step(optimizer_step=True, **ROUND)


@pytest.mark.parametrize("offload", [False, True])
def test_a_newcomer_downloads_the_whole_state(offload: bool) -> None:
    with peers(2.0, 5.0, offload_optimizer=offload) as (veteran, newcomer):
        for _ in range(3):
            veteran.give(1.0)
            veteran.averager.step(optimizer_step=True, increment_epoch=True)
        assert newcomer.averager.load_state_from_peers(timeout=30)
        assert newcomer.value == veteran.value
        assert newcomer.averager.local_epoch == 3
        assert torch.equal(newcomer.extra, veteran.extra)
        for peer in (veteran, newcomer):
            peer.give(2.0)
            peer.averager.step(optimizer_step=True, increment_epoch=True)
        assert newcomer.value == veteran.value
        assert newcomer.averager.optimizer.param_groups[0]["lr"] == 0.0625


def test_nobody_to_download_from() -> None:
    with peers(2.0) as (peer,):
        assert not peer.averager.load_state_from_peers(timeout=5)
        assert peer.value == 2.0


def test_a_scaled_step_that_overflowed_is_left_out() -> None:
    with peers(2.0) as (peer,):
        scaler = GradScaler("cpu", init_scale=8.0)
        peer.give(8.0)
        scaler.scale(torch.tensor(1.0))  # as for a loss
        peer.averager.step(optimizer_step=True, grad_scaler=scaler)
        scaler.update()
        assert peer.value == 1.0
        peer.give(float("inf"))
        peer.averager.step(optimizer_step=True, grad_scaler=scaler)
        scaler.update()
        assert (peer.value, scaler.get_scale()) == (1.0, 4.0)


REFUSED = {
    "averaging_opts": {"averaging_opts": {"timeout": 1}},
    "delay_averaging, ": {"delay_averaging": True},
    "wait_for_trigger": {"wait_for_trigger": print},
    "delay_optimizer_step=True needs offload_optimizer": {"optimizer_step": True, "delay_optimizer_step": True},
    "delay_averaging=False": {
        **{"optimizer_step": True, "delay_optimizer_step": True, "averaging_round": True, "delay_averaging": False}
    },
    "grad_scaler: a delayed step": {
        "optimizer_step": True,
        "delay_optimizer_step": True,
        "grad_scaler": GradScaler("cpu"),
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_actions_that_do_not_go_together_are_refused(reason: str) -> None:
    with peers(1.0) as (peer,), pytest.raises(ValueError, match=reason):
        peer.averager.step(**REFUSED[reason])


def test_options_that_make_no_sense_are_refused() -> None:
    with dhts(1) as (dht,):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        with pytest.raises(ValueError, match="offload_optimizer"):
            TrainingStateAverager(dht=dht, prefix="state", optimizer=optimizer, offload_optimizer=True)
        with pytest.raises(ValueError, match="params"):
            TrainingStateAverager(dht=dht, prefix="state", optimizer=optimizer, params=[parameter])
        averager = TrainingStateAverager(dht=dht, prefix="state", optimizer=optimizer)
        with averager, pytest.raises(OptimizerError, match=r"swarmcli\.GradScaler"):
            averager.step(optimizer_step=True, grad_scaler=torch.amp.GradScaler("cpu"))
