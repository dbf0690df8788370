"""States that round differently are left alone; a corrupted one is noticed, shown and repaired; liars gain little."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from swarmcli.events import DriftMeasured, RoundFinished, StateDownloaded
from swarmcli.optim.modes.base import StateOptions
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.state.drift import DriftMonitor, Sketcher
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, Trainer, digests, record, together
from tests.suites import soak


class Watch:
    """What happened at one peer for the sake of drift."""

    def __init__(self, trainer: Trainer) -> None:
        self.drifts = record(trainer.node, DriftMeasured)
        self.downloads = record(trainer.node, StateDownloaded)
        self._rounds = record(trainer.node, RoundFinished)

    @property
    def state_rounds(self) -> list[RoundFinished]:
        return [event for event in self._rounds if event.purpose == "run_state"]


async def watched(swarm: Swarm, count: int) -> tuple[list[Trainer], list[Watch]]:
    """Peers in step, two epochs on; each of some seconds, in which reports are read. The first has the smallest id."""
    trainers = [await swarm.trainer(seed=1, pace=1.5) for _ in range(count)]
    trainers.sort(key=lambda trainer: trainer.node.peer_id)
    await together(*(trainer.train(2) for trainer in trainers))
    return trainers, [Watch(trainer) for trainer in trainers]


def corrupt(trainer: Trainer, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        trainer.weights.copy_(change(trainer.weights))


def test_peers_that_round_differently_repair_nothing() -> None:
    async def main() -> None:
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

    virtual_time.run(main(), timeout=300)


CORRUPTED = {
    "a little": lambda weights: weights * 1.01,
    "not finite": lambda weights: torch.full_like(weights, math.nan),
    "shifted": lambda weights: weights + 3.0,
    "turned round": lambda weights: -weights,
}


@pytest.mark.parametrize("how", ["a little", *soak(["not finite", "shifted", "turned round"])])
def test_a_corrupted_peer_among_three_downloads_within_some_epochs_and_tells_of_it(how: str) -> None:
    async def main() -> None:
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

    virtual_time.run(main(), timeout=300)


@pytest.mark.parametrize("first_is_broken", [False, True])
def test_of_two_peers_the_smaller_id_is_followed_unless_it_is_not_finite(first_is_broken: bool) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers, watches = await watched(swarm, 2)
            if first_is_broken:
                corrupt(trainers[0], lambda weights: weights * math.nan)
            else:
                corrupt(trainers[1], lambda weights: weights + 3.0)
            await together(*(trainer.train(6) for trainer in trainers))
            assert len(digests(trainers)) == 1
            assert torch.isfinite(trainers[0].weights).all()
            assert [len(watch.downloads) for watch in watches] == ([1, 0] if first_is_broken else [0, 1])

    virtual_time.run(main(), timeout=300)


@pytest.mark.parametrize("far", [True, *soak([False])])
def test_one_liar_among_three_costs_the_others_nothing(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers, watches = await watched(swarm, 3)
            liar, lie = trainers[0], Sketcher(b"run").sketch([torch.full((6,), 1e6)]).tobytes()
            monitor, tell = liar.core._keeper.monitor, DriftMonitor.told.fget

            def told(each: DriftMonitor) -> bytes:
                return tell(each)[:32] + (lie if far else b"short") if each is monitor else tell(each)

            monkeypatch.setattr(DriftMonitor, "told", property(told))
            await together(*(trainer.train(6) for trainer in trainers))
            for watch in watches[1:]:
                assert not watch.downloads
            assert len(digests(trainers)) == 1

    virtual_time.run(main(), timeout=300)


@pytest.mark.parametrize("delay", [True, *soak([False])])
def test_every_so_many_epochs_states_are_averaged_beside_the_gradients(delay: bool) -> None:
    async def main() -> None:
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

    virtual_time.run(main(), timeout=300)


def test_while_a_state_is_downloaded_its_old_average_is_forgotten() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            mode = Mode(state=StateOptions(average_every=1, delay=True))
            trainers = [await swarm.trainer(seed=1, mode=mode) for _ in range(2)]
            await together(*(trainer.train(3) for trainer in trainers))
            keeper = trainers[1].core._keeper
            other = trainers[0].core
            captured = await other.replica.capture()
            await trainers[1].core.replica.restore(captured)  # as after a download
            keeper.drop()
            before = trainers[1].weights.detach().clone()
            await keeper.averaging.apply(wait=True)
            assert torch.equal(trainers[1].weights.detach(), before)

    virtual_time.run(main(), timeout=300)
