"""States that round differently are left alone; a corrupted one is noticed, shown and repaired; liars gain little."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch

from swarmcli.events import DriftMeasured, EpochAdvanced, Event, PeerRefused, RoundFinished, StateDownloaded
from swarmcli.network import wire
from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim.epoch.keeper import PAUSE
from swarmcli.optim.modes.base import StateOptions
from swarmcli.optim.modes.synchronous import Synchronous
from swarmcli.optim.state.drift import SKETCH_BYTES, MemberNote, Sketcher
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, Trainer, digests, record, together
from tests.suites import soak


class Watch:
    """What happened at one peer for the sake of drift."""

    def __init__(self, trainer: Trainer) -> None:
        self.drifts = record(trainer.node, DriftMeasured)
        self.downloads = record(trainer.node, StateDownloaded)
        self.refused = record(trainer.node, PeerRefused)
        self._rounds = record(trainer.node, RoundFinished)

    @property
    def state_rounds(self) -> list[RoundFinished]:
        return [event for event in self._rounds if event.purpose == "run_state"]


async def watched(swarm: Swarm, count: int) -> tuple[list[Trainer], list[Watch]]:
    """Peers in step, two epochs on."""
    trainers = [await swarm.trainer(seed=1) for _ in range(count)]
    await together(*(trainer.train(2) for trainer in trainers))
    return trainers, [Watch(trainer) for trainer in trainers]


def corrupt(trainer: Trainer, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        trainer.weights.copy_(change(trainer.weights))


def test_peers_that_round_differently_see_no_state_averaging() -> None:
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
                assert len(watch.drifts) == 3
                assert not watch.state_rounds
                assert not watch.downloads
                assert not any(event.strays or event.averages for event in watch.drifts)
                assert not watch.refused

    virtual_time.run(main(), timeout=300)


CORRUPTED = {
    "a little": lambda weights: weights * 1.01,
    "not finite": lambda weights: torch.full_like(weights, math.nan),
    "shifted": lambda weights: weights + 3.0,
    "turned round": lambda weights: -weights,
}


@pytest.mark.parametrize("how", ["a little", *soak(["not finite", "shifted", "turned round"])])
def test_a_corrupted_peer_among_three_downloads_within_two_epochs(how: str) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers, watches = await watched(swarm, 3)
            stray = trainers[1]
            corrupt(stray, CORRUPTED[how])
            await together(*(trainer.train(5) for trainer in trainers))
            assert len(digests(trainers)) == 1
            assert len({trainer.core.position for trainer in trainers}) == 1
            assert all(torch.isfinite(trainer.weights).all() for trainer in trainers)
            (download,) = watches[1].downloads
            assert download.reason == "its parameters had drifted away from the others'"
            assert download.epoch <= 4
            for watch in watches:
                (noticed,) = [event for event in watch.drifts if event.strays]
                assert noticed.strays == (stray.node.peer_id.text,)
                assert noticed.distances[stray.node.peer_id.text] > 1e-3
                assert not watch.state_rounds
            assert watches[1].drifts[-1].distance < 1e-3
            (epoch,) = [event.epoch for event in watches[0].drifts if event.strays]
            (ended,) = [event for event in trainers[0].epochs if event.epoch == epoch + 1]
            assert ended.peers == 2  # gradients of other parameters stay out

    virtual_time.run(main(), timeout=300)


def test_the_drift_is_in_the_report() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers = [await swarm.trainer(seed=1) for _ in range(3)]
            assert trainers[1].core.report().drift is None
            await together(*(trainer.train(2) for trainer in trainers))
            corrupt(trainers[1], lambda weights: weights + 3.0)
            told: dict[int, list[float | None]] = {0: [], 1: []}  # by peer, at the end of each epoch

            def note(number: int, event: Event) -> None:
                if isinstance(event, EpochAdvanced):
                    told[number].append(trainers[number].core.report().drift)

            for number in told:
                trainers[number].node.endpoint.events.subscribe(partial(note, number))
            await together(*(trainer.train(5) for trainer in trainers))
            assert max(told[0]) < 1e-3
            assert max(told[1]) > 0.1
            assert told[1][-1] < 1e-3

    virtual_time.run(main(), timeout=300)


@pytest.mark.parametrize(("change", "rounds"), [(lambda w: w + 3.0, True), (lambda w: w * math.nan, False)])
def test_of_two_peers_nobody_knows_who_is_right_unless_one_is_not_finite(change: Callable, rounds: bool) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers, watches = await watched(swarm, 2)
            corrupt(trainers[1], change)
            await together(*(trainer.train(5) for trainer in trainers))
            assert len(digests(trainers)) == 1
            assert torch.isfinite(trainers[0].weights).all()
            for watch in watches:
                assert [event.outcome for event in watch.state_rounds] == ["committed"] * rounds
                assert any(event.averages for event in watch.drifts) == rounds
            assert [len(watch.downloads) for watch in watches] == [0, 0 if rounds else 1]

    virtual_time.run(main(), timeout=300)


@pytest.mark.soak
def test_two_halves_that_differ_meet_in_the_middle() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers, watches = await watched(swarm, 4)
            for trainer in trainers[:2]:
                corrupt(trainer, lambda weights: weights + 1.0)
            await together(*(trainer.train(5) for trainer in trainers))
            assert len(digests(trainers)) == 1
            assert all(len(watch.state_rounds) == 1 and not watch.downloads for watch in watches)

    virtual_time.run(main(), timeout=300)


def lie(trainer: Trainer, sketch: bytes) -> None:
    """From now on this peer tells another sketch, and never repairs anything for it."""
    keeper, sign = trainer.core._keeper, trainer.node.endpoint.identity.sign
    honest = type(keeper).gathered

    class Liar(type(keeper)):  # type: ignore[misc]
        @property
        def gathered(self) -> object:
            position = self.replica.position
            signature = sign("sketch", position.lineage, sketch)
            return MemberNote(position.epoch, sketch, signature) if honest.fget(self) is not None else None

        def compare(self, gathered: object) -> bool:
            return False

    keeper.__class__ = Liar


@pytest.mark.parametrize("data", [b"short", *soak([b"\xff" * SKETCH_BYTES, b"\x00" * SKETCH_BYTES, bytes(range(256))])])
def test_one_liar_among_three_costs_the_others_nothing(data: bytes) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers, watches = await watched(swarm, 3)
            refused = record(trainers[0].node, PeerRefused)
            lie(trainers[2], data)
            await together(*(trainer.train(5) for trainer in trainers))
            assert len(digests(trainers)) == 1
            for watch in watches[:2]:
                assert not watch.downloads
                assert not watch.state_rounds
            assert any(event.what == "sketch" for event in refused) == (data == b"short")

    virtual_time.run(main(), timeout=300)


def test_a_liar_and_one_other_cost_a_bounded_number_of_state_rounds() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers, watches = await watched(swarm, 2)
            lie(trainers[1], Sketcher(b"run").sketch([torch.full((6,), 1e6)]).to_bytes())
            await together(*(trainer.train(PAUSE + 4) for trainer in trainers))
            assert not watches[0].downloads
            tried = watches[0].state_rounds
            assert len(tried) == 2
            assert {event.outcome for event in tried} == {"failed"}  # the liar never comes
            assert all(trainer.epoch == PAUSE + 4 for trainer in trainers)

    virtual_time.run(main(), timeout=600)


@pytest.mark.parametrize("count", [3, *soak([4, 8])])
def test_a_leader_that_lies_about_all_others_makes_nobody_download(count: int) -> None:
    """Every round has such a leader here, as if the liar always came first."""

    async def main() -> None:
        async with Swarm() as swarm:
            trainers, watches = await watched(swarm, count)
            for trainer in trainers:
                deceive(trainer)
            await together(*(trainer.train(5) for trainer in trainers))
            assert len(digests(trainers)) == 1
            for watch in watches:
                assert not watch.downloads
                assert not watch.state_rounds

    virtual_time.run(main(), timeout=600)


def deceive(trainer: Trainer) -> None:
    """Its leaders say that all others are far away, with a signature of their own under it."""
    keeper, own = trainer.core._keeper, trainer.node.peer_id
    compare, key = keeper.compare, Identity.generate()
    far = Sketcher(b"run").sketch([torch.full((6,), 1e6)]).to_bytes()

    def deceived(gathered: Mapping[PeerID, bytes]) -> bool:
        forged = wire.encode(MemberNote(trainer.epoch, far, key.sign("sketch", trainer.core.position.lineage, far)))
        return compare({peer: told if peer == own else forged for peer, told in gathered.items()})

    keeper.compare = deceived  # type: ignore[method-assign]


@pytest.mark.parametrize("delay", [True, *soak([False])])
def test_every_so_many_epochs_states_are_averaged_beside_the_gradients(delay: bool) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            mode = Synchronous(state=StateOptions(average_every=3, delay=delay))
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
                assert not watch.drifts  # no sketches are told
                assert not watch.downloads

    virtual_time.run(main(), timeout=300)


def test_while_a_state_is_downloaded_its_old_average_is_forgotten() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            mode = Synchronous(state=StateOptions(average_every=1, delay=True))
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
