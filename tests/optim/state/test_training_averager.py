"""TrainingAverager: what was chosen of a plain optimizer is averaged, and what is learned meanwhile is kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from swarmcli import TrainingAverager
from swarmcli.errors import OptimizerError
from tests.optim.shells import at_once, dhts


class Peer:
    def __init__(self, dht: Any, value: float, **options: Any) -> None:
        self.parameter = torch.nn.Parameter(torch.full((3,), value))
        self.extra = torch.full((2,), 10 * value)
        self.optimizer = torch.optim.Adam([self.parameter], lr=0.1)
        chosen = {"average_parameters": True, "average_gradients": False, **options}
        self.averager = TrainingAverager(
            self.optimizer, dht=dht, prefix="run", extra_tensors=[self.extra], min_matchmaking_time=10.0, **chosen
        )

    @property
    def value(self) -> float:
        return self.parameter[0].item()


@contextmanager
def peers(*values: float, **options: Any) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        tables = stack.enter_context(dhts(len(values)))
        made = [Peer(dht, value, **options) for dht, value in zip(tables, values, strict=True)]
        for peer in made:
            stack.enter_context(peer.averager)
        yield made


def all_step(those: list[Peer], **options: Any) -> list[Any]:
    return at_once(*(lambda peer=peer: peer.averager.step(timeout=30, **options) for peer in those))


def test_parameters_and_extra_tensors() -> None:
    with peers(1.0, 5.0) as both:
        both[0].parameter.grad = torch.ones(3)
        assert all(len(result) == 2 for result in all_step(both))
        assert [peer.value for peer in both] == [3.0, 3.0]
        assert both[0].extra.tolist() == [30.0, 30.0]
        assert both[0].parameter.grad.tolist() == [1.0] * 3


def test_gradients_alone() -> None:
    with peers(1.0, 5.0, average_parameters=False, average_gradients=True) as both:
        for peer, gradient in zip(both, (2.0, 4.0), strict=True):
            peer.parameter.grad = torch.full((3,), gradient)
        all_step(both)
        assert [peer.parameter.grad.tolist() for peer in both] == [[3.0] * 3] * 2
        assert [peer.value for peer in both] == [1.0, 5.0]


def test_statistics_by_name_with_weights() -> None:
    with peers(0.0, 0.0, average_opt_statistics=("exp_avg",)) as both:
        for peer, gradient in zip(both, (10.0, 40.0), strict=True):
            peer.parameter.grad = torch.full((3,), gradient)
            peer.optimizer.step()
        at_once(
            *(
                lambda peer=peer, weight=weight: peer.averager.step(timeout=30, weight=weight)
                for peer, weight in zip(both, (2.0, 1.0), strict=True)
            )
        )
        for peer in both:
            torch.testing.assert_close(peer.optimizer.state[peer.parameter]["exp_avg"], torch.full((3,), 2.0))


def test_in_the_background_what_is_learned_meanwhile_is_kept() -> None:
    with peers(1.0, 5.0) as both:
        lock, learner = threading.Lock(), both[0]
        average_loaded = learner.averager.average_loaded

        def learn(*args: Any) -> Any:
            with lock, torch.no_grad():
                learner.parameter += 1.0
            return average_loaded(*args)

        learner.averager.average_loaded = learn  # type: ignore[method-assign]
        with lock:  # nothing is read before this block ends
            futures = [peer.averager.step(data_lock=lock, wait=False, timeout=30) for peer in both]
            with torch.no_grad():
                learner.parameter += 2.0
        assert all(future.result(30) is not None for future in futures)
        assert [peer.value for peer in both] == [5.0, 4.0]


def test_a_round_that_nobody_comes_to_changes_nothing() -> None:
    with peers(1.0) as (peer,):
        assert peer.averager.step(timeout=0.2) is None
        assert (peer.value, peer.extra.tolist()) == (1.0, [10.0, 10.0])


def test_a_newcomer_downloads_parameters_and_statistics() -> None:
    with peers(1.0, 5.0) as (veteran, newcomer):
        veteran.parameter.grad = torch.ones(3)
        veteran.optimizer.step()
        assert newcomer.averager.load_state_from_peers(timeout=30)
        for peer in (veteran, newcomer):
            peer.parameter.grad = torch.full((3,), -2.0)
            peer.optimizer.step()
        assert torch.equal(newcomer.parameter, veteran.parameter)
        assert torch.equal(newcomer.extra, veteran.extra)


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    with peers(1.0, 5.0) as (veteran, newcomer):
        veteran.averager.get_current_state = lambda: ({"state": {}, "names": ["parameter/0"]}, [torch.zeros(9)])
        assert not newcomer.averager.load_state_from_peers(timeout=30)
        veteran.averager.get_current_state = lambda: (None, [torch.zeros(3)])
        assert not newcomer.averager.load_state_from_peers(timeout=30)
        assert newcomer.value == 5.0


def test_options_that_make_no_sense_are_refused() -> None:
    with dhts(1) as (dht,):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
        chosen = {"dht": dht, "prefix": "run", "average_gradients": False}
        with pytest.raises(ValueError, match="nothing is to be averaged"):
            TrainingAverager(optimizer, average_parameters=False, **chosen)
        with pytest.raises(TypeError, match="opt: expected a torch optimizer"):
            TrainingAverager([parameter], average_parameters=True, **chosen)  # type: ignore[arg-type]
        parameter.grad = torch.ones(2)
        optimizer.step()
        with pytest.raises(OptimizerError, match="there is no 'exp_avg'"):
            TrainingAverager(optimizer, average_parameters=True, average_opt_statistics=("exp_avg",), **chosen)
