"""States that round differently are left alone; a corrupted one is noticed, shown and repaired; liars gain little."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from swarmcli.events import DriftMeasured, RoundFinished, StateDownloaded
from swarmcli.optim.modes.base import StateOptions
from swarmcli.optim.modes.gradients import Mode
from tests.optim.optim_swarm import Swarm, Trainer, digests, record, together
from tests.simulation import within
from tests.suites import soak


class Watch:
    """Records what one peer did because of drift."""

    def __init__(self, trainer: Trainer) -> None:
        self.drifts = record(trainer.node, DriftMeasured)
        self.downloads = record(trainer.node, StateDownloaded)
        self._rounds = record(trainer.node, RoundFinished)

    @property
    def state_rounds(self) -> list[RoundFinished]:
        return [event for event in self._rounds if event.purpose == "run_state"]


async def watched(swarm: Swarm, count: int) -> tuple[list[Trainer], list[Watch]]:
    """Peers in step after two epochs of some seconds, in which reports are read. The first has the smallest id."""
    trainers = [await swarm.trainer(seed=1, pace=1.5) for _ in range(count)]
    trainers.sort(key=lambda trainer: trainer.node.peer_id)
    await together(*(trainer.train(2) for trainer in trainers))
    return trainers, [Watch(trainer) for trainer in trainers]


def corrupt(trainer: Trainer, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        trainer.weights.copy_(change(trainer.weights))


@within(300)
async def test_peers_that_round_differently_repair_nothing() -> None:
    async with Swarm() as swarm:
        trainers, watches = await watched(swarm, 3)

        async def train(trainer: Trainer, number: int) -> None:
            for epoch in range(3, 6):
                await trainer.train(epoch)
                corrupt(trainer, lambda weights: weights * (1 + 1e-6 * number))  # another processor's last bits

        await together(*(train(trainer, number) for number, trainer in enumerate(trainers)))
        assert len(digests(trainers)) == 3
        assert 0 < max(event.distance for watch in watches for event in watch.drifts) < 1e-3
        for watch in watches:
            assert watch.drifts and not watch.state_rounds and not watch.downloads
            assert not any(event.strays for event in watch.drifts)


CORRUPTED = {
    "a little": lambda weights: weights * 1.01,
    "not finite": lambda weights: torch.full_like(weights, math.nan),
    "shifted": lambda weights: weights + 3.0,
    "turned round": lambda weights: -weights,
}


@pytest.mark.parametrize("how", ["a little", *soak(["not finite", "shifted", "turned round"])])
@within(300)
async def test_a_corrupted_peer_among_three_downloads_within_some_epochs_and_tells_of_it(how: str) -> None:
    async with Swarm() as swarm:
        trainers, watches = await watched(swarm, 3)
        stray = trainers[0]
        corrupt(stray, CORRUPTED[how])
        await together(*(trainer.train(4) for trainer in trainers))
        assert stray.core.report().drift > 1e-3
        await together(*(trainer.train(7) for trainer in trainers))
        assert len(digests(trainers)) == 1
        assert len({trainer.core.position for trainer in trainers}) == 1
        assert all(torch.isfinite(trainer.weights).all() for trainer in trainers)
        assert len(watches[0].downloads) == 1
        for watch in watches:
            (noticed,) = [event for event in watch.drifts if event.strays]
            assert noticed.strays == (stray.node.peer_id.text,)
            assert noticed.distances[stray.node.peer_id.text] > 1e-3
            assert not watch.state_rounds
        assert stray.core.report().drift < 1e-3


@pytest.mark.parametrize("delay", [True, *soak([False])])
@within(300)
async def test_every_so_many_epochs_states_are_averaged_beside_the_gradients(delay: bool) -> None:
    async with Swarm() as swarm:
        mode = Mode(state=StateOptions(average_every=3, delay=delay))
        trainers = [await swarm.trainer(seed=1, mode=mode) for _ in range(3)]
        watches = [Watch(trainer) for trainer in trainers]
        await together(*(trainer.train(4) for trainer in trainers))
        assert len(digests(trainers)) == 1  # what all have in common stays, bit for bit
        right = trainers[0].weights.detach().clone()
        corrupt(trainers[1], lambda weights: weights + 3.0)
        await together(*(trainer.train(8) for trainer in trainers))
        for trainer in trainers:
            await trainer.core.state_dict()  # waits for the last round
        distances = [(trainer.weights - trainers[0].weights).norm() for trainer in trainers]
        assert max(distances) < 1e-9 * right.norm()
        for watch in watches:
            assert [event.epoch for event in watch.state_rounds] == [3, 6]
            assert not watch.drifts  # nothing is compared
            assert not watch.downloads
