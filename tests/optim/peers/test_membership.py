"""Peers come, fall behind, die and are cut off: whoever is left goes on, and all end up in one lineage."""

import asyncio
import math

import pytest
import torch

from swarmcli.errors import StateDownloadError
from swarmcli.events import Noticed, RoundFinished
from swarmcli.state.donor import state_method
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import TARGET, Swarm, digests, record, together, until
from tests.suites import soak


def in_one_lineage(trainers) -> bool:
    return len(digests(trainers)) == 1 and len({trainer.core.position for trainer in trainers}) == 1


@pytest.mark.parametrize("victim", [0, *soak([1, 2])])
@pytest.mark.parametrize("seed", [0, *soak(range(1, 5))])
def test_one_of_three_is_killed_and_the_others_go_on(seed: int, victim: int) -> None:
    async def main() -> None:
        async with Swarm(seed=seed) as swarm:
            trainers = [await swarm.trainer(seed=1, pace=0.1 + 0.03 * n) for n in range(3)]
            dead = trainers[victim]
            survivors = [trainer for trainer in trainers if trainer is not dead]
            async with asyncio.TaskGroup() as group:
                doomed = group.create_task(dead.train(1000))
                for trainer in survivors:
                    group.create_task(trainer.train(6))
                await asyncio.sleep(1.0 + 0.11 * seed)
                swarm.network.kill(dead.node.peer_id)
                doomed.cancel()
            assert in_one_lineage(survivors)
            assert all(trainer.epoch == 6 for trainer in survivors)

    virtual_time.run(main(), seed=seed, timeout=300)


def test_a_peer_that_is_a_round_behind_at_the_end_finds_a_lingering_donor() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers = [await swarm.trainer(seed=1) for _ in range(3)]
            late = trainers[0]
            await together(*(trainer.train(2) for trainer in trainers))
            swarm.network.freeze(late.node.peer_id)
            await together(*(trainer.train(3) for trainer in trainers[1:]))
            swarm.network.thaw(late.node.peer_id)

            async def leave_when_nobody_is_behind(trainer) -> None:
                assert await trainer.core.linger(3, timeout=60)
                assert late.epoch == 3
                await trainer.core.shutdown()

            await together(late.train(3), *(leave_when_nobody_is_behind(trainer) for trainer in trainers[1:]))
            assert in_one_lineage(trainers)
            assert await late.core.linger(3, timeout=60)

    virtual_time.run(main(), timeout=300)


def test_lingering_ends_when_its_time_is_up() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            done, never = [await swarm.trainer(seed=1) for _ in range(2)]
            await together(done.train(2), never.train(2))
            loop = asyncio.get_running_loop()
            began = loop.time()
            assert not await done.core.linger(3, timeout=5)
            assert 5 <= loop.time() - began < 7
            assert done.core.report().phase == "lingering"

    virtual_time.run(main(), timeout=300)


def test_a_round_that_fails_loses_no_samples() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers = [await swarm.trainer(seed=1) for _ in range(3)]
            rounds = record(trainers[0].node, RoundFinished)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(trainer.train(6)) for trainer in trainers]
                await asyncio.sleep(0.8)
                await until(lambda: trainers[2].core.is_averaging)
                swarm.network.kill(trainers[2].node.peer_id)
                tasks[2].cancel()
            survivors = trainers[:2]
            assert in_one_lineage(survivors)
            failed = {round_.epoch for round_ in rounds if round_.outcome != "committed"}
            for epoch in failed:
                assert sum(len(trainer.used[epoch]) for trainer in survivors) >= TARGET

    virtual_time.run(main(), timeout=300)


def test_broken_gradients_are_given_up_by_the_peer_that_has_them() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            broken, sound = [await swarm.trainer(seed=1) for _ in range(2)]
            told = record(broken.node, Noticed)
            await together(broken.train(2), sound.train(2))
            await broken.compute()
            broken.core.work._gradients.accumulators[0].fill_(float("nan"))
            await together(broken.train(4), sound.train(4))
            assert in_one_lineage([broken, sound])
            assert broken.weights.isfinite().all()
            assert [event.own_samples > 0 for event in broken.epochs] == [True, True, False, True]
            assert "not finite" in next(event.text for event in told if event.level == "warning")

    virtual_time.run(main(), timeout=300)


def test_of_a_batch_with_broken_gradients_only_itself_is_given_up() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            broken, sound = [await swarm.trainer(seed=1) for _ in range(2)]
            told = record(broken.node, Noticed)
            await together(broken.train(2), sound.train(2))
            await broken.compute()
            samples = broken.core.work.samples
            for _ in range(2):
                broken.weights.grad = torch.full_like(broken.weights, math.nan)
                await broken.core.step(4)
            assert (broken.core.work.samples, broken.core.work.given_up.count) == (samples, 2)
            await together(broken.train(4), sound.train(4))
            assert in_one_lineage([broken, sound])
            assert broken.weights.isfinite().all()
            assert all(event.own_samples for event in broken.epochs)
            assert ["not finite" in event.text for event in told if event.level == "warning"] == [True]

    virtual_time.run(main(), timeout=300)


def test_broken_gradients_of_everyone_stop_nobody() -> None:
    async def main(peers: int) -> None:
        async with Swarm() as swarm:
            trainers = [await swarm.trainer(seed=1) for _ in range(peers)]
            await together(*(trainer.train(2) for trainer in trainers))
            for trainer in trainers:
                trainer.core.work._gradients.accumulators[0].fill_(float("inf"))
            await together(*(trainer.train(5) for trainer in trainers))
            assert in_one_lineage(trainers)
            assert trainers[0].weights.isfinite().all()

    for peers in (1, 2):
        virtual_time.run(main(peers), timeout=300)


def test_a_newcomer_that_gets_no_state_says_whom_it_asked() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            donor = await swarm.trainer(seed=1)
            await donor.train(3)
            newcomer = await swarm.trainer(seed=2, load_state_timeout=20.0)
            donor.node.endpoint.withdraw(state_method("run"))
            before = newcomer.core.replica.state.digest()
            with pytest.raises(StateDownloadError) as caught:
                await newcomer.compute()
            assert donor.node.peer_id.text in caught.value.attempts
            assert newcomer.epoch == 0 and newcomer.core.replica.state.digest() == before

    virtual_time.run(main(), timeout=300)
