"""Whole runs whose states go in volumes: they train as with one, repair as with one, and an average may take epochs."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarmcli.events import Noticed, RoundFinished
from swarmcli.optim.modes.base import StateOptions
from swarmcli.optim.modes.synchronous import Synchronous
from swarmcli.optim.state.volumes import VOLUME_BYTES
from swarmcli.testing import virtual_time
from tests.optim.local_swarm import Applied, EpochOver, in_one_process, local_peer
from tests.optim.optim_swarm import Swarm, adamw, digests, record, together, until
from tests.suites import soak

NAMES = ("exp_avg", "exp_avg_sq")
VOLUMES = {VOLUME_BYTES: 1, 48: 3, 16: 9}  # of weights, mean and squares, six numbers of eight bytes each


@pytest.mark.parametrize(
    ("volume_bytes", "delay", "epochs"),
    [(16, True, 2), *soak((size, delay, 6) for size in VOLUMES for delay in (False, True))],
)
def test_local_updates_are_the_same_computation_in_one_process(volume_bytes: int, delay: bool, epochs: int) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            options = {"make": adamw, "statistics": NAMES, "delay": delay, "volume_bytes": volume_bytes}
            peers = [await local_peer(swarm, batch_size=size, seed=1, pace=3.0, **options) for size in (2, 5)]
            rounds = record(peers[0].core.node, RoundFinished)
            await together(*(peer.train(epochs) for peer in peers))
            for peer in peers:
                await peer.core._keeper.averaging.apply(wait=True)
            expected = in_one_process([peer.log for peer in peers], seed=1, make=adamw, names=NAMES)
            for peer, weights in zip(peers, expected, strict=True):
                torch.testing.assert_close(peer.weights.detach(), weights, rtol=1e-11, atol=1e-12)
                assert sum(isinstance(entry, Applied) for entry in peer.log) == epochs
            states = [event.epoch for event in rounds if event.purpose == "run_state"]
            assert states == [epoch for epoch in range(1, epochs + 1) for _ in range(VOLUMES[volume_bytes])]
            assert delay or len({peer.core.replica.state.digest() for peer in peers}) == 1

    virtual_time.run(main(), timeout=300)


def test_an_average_may_take_longer_than_an_epoch_and_the_next_one_waits_for_it() -> None:
    async def main() -> None:
        async with Swarm(latency=0.3) as swarm:
            options = {"make": adamw, "statistics": NAMES, "delay": True, "volume_bytes": 24, "average_every": 2}
            peers = [await local_peer(swarm, seed=1, pace=0.5, **options) for _ in range(2)]
            rounds = record(peers[0].core.node, RoundFinished)
            told = record(peers[0].core.node, Noticed)
            await together(*(peer.train(4) for peer in peers))
            for peer in peers:
                await peer.core._keeper.averaging.apply(wait=True)
            states = [event for event in rounds if event.purpose == "run_state"]
            assert [event.epoch for event in states] == [2] * 6 + [4] * 6
            assert {event.outcome for event in states} == {"committed"}
            assert not [event for event in told if event.level == "warning"]
            log = peers[0].log
            over = {entry.epoch: place for place, entry in enumerate(log) if isinstance(entry, EpochOver)}
            applied = [place for place, entry in enumerate(log) if isinstance(entry, Applied)]
            assert [place for place in applied if over[3] < place < over[4]]  # of the average that began two epochs ago
            assert len(applied) > 2  # volumes as they come

    virtual_time.run(main(), timeout=300)


@pytest.mark.parametrize("volume_bytes", [16, *soak([VOLUME_BYTES])])
def test_a_repair_brings_all_volumes_of_one_epoch_together(volume_bytes: int) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            mode = Synchronous(state=StateOptions(volume_bytes=volume_bytes))
            trainers = [await swarm.trainer(seed=1, mode=mode) for _ in range(2)]
            await together(*(trainer.train(2) for trainer in trainers))
            with torch.no_grad():
                trainers[1].weights.add_(3.0)
            rounds = [record(trainer.node, RoundFinished) for trainer in trainers]
            await together(*(trainer.train(5) for trainer in trainers))
            assert len(digests(trainers)) == 1
            states = [[event for event in seen if event.purpose == "run_state"] for seen in rounds]
            assert [len(each) for each in states] == [1 if volume_bytes == VOLUME_BYTES else 3] * 2
            assert len({event.epoch for each in states for event in each}) == 1
            lineages = {(event.round_id, event.members) for each in states for event in each}
            assert len(lineages) == len(states[0])  # each volume is one round of both

    virtual_time.run(main(), timeout=300)


def test_who_dies_in_the_middle_of_a_repair_leaves_the_others_equal() -> None:
    """Three peers that all differ repair their states; one is lost after the first volume."""

    async def main() -> None:
        async with Swarm(latency=0.05) as swarm:
            mode = Synchronous(state=StateOptions(volume_bytes=16))
            trainers = [await swarm.trainer(seed=1, mode=mode) for _ in range(3)]
            await together(*(trainer.train(2) for trainer in trainers))
            for number, trainer in enumerate(trainers):
                with torch.no_grad():
                    trainer.weights.add_(3.0 * number)
            rounds = record(trainers[0].node, RoundFinished)
            last = asyncio.ensure_future(trainers[2].train(7))

            async def kill() -> None:
                await until(lambda: any(event.purpose == "run_state" for event in rounds))
                await swarm.kill(trainers[2])
                last.cancel()

            await together(kill(), *(trainer.train(7) for trainer in trainers[:2]))
            assert last.cancelled()
            assert len(digests(trainers[:2])) == 1
            states = [event for event in rounds if event.purpose == "run_state"]
            assert [len(event.members) for event in states][:3] == [3, 2, 2]

    virtual_time.run(main(), timeout=300)
