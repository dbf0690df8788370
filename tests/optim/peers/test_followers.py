"""Those who take part without computing: monitors that follow, auxiliaries that reduce; and peers nobody can dial."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from swarmcli.events import EpochAdvanced, RoundFinished
from swarmcli.optim.auxiliary import AuxiliaryCore
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import TARGET, Swarm, auxiliary, digests, record, together, until
from tests.suites import soak


async def assist(helper: AuxiliaryCore, until: int) -> None:
    while helper.position.epoch < until:
        await helper.step()


@asynccontextmanager
async def helping(swarm: Swarm, **options):
    helper = await auxiliary(swarm, **options)
    try:
        yield helper
    finally:
        await helper.shutdown()


@pytest.mark.parametrize("trainers", [2, *soak([1, 3])])
def test_a_follower_stays_bit_identical(trainers: int) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            monitor = await swarm.trainer(seed=1, role="monitor")
            computing = [await swarm.trainer(seed=1) for _ in range(trainers)]
            await together(monitor.follow(4), *(trainer.train(4) for trainer in computing))
            assert len(digests(swarm.trainers)) == 1
            assert len({trainer.core.position for trainer in swarm.trainers}) == 1
            assert monitor.used == {}
            assert monitor.core.report().phase == "following"

    virtual_time.run(main(), timeout=300)


def test_a_follower_with_other_weights_downloads_and_then_donates() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainer = await swarm.trainer(seed=1)
            await trainer.train(2)
            monitor = await swarm.trainer(seed=2, role="monitor")
            await together(monitor.follow(4), trainer.train(4))
            await trainer.core.shutdown()
            late = await swarm.trainer(seed=3)
            await late.core.join()
            assert late.epoch == 4
            assert digests([late]) == digests([monitor])

    virtual_time.run(main(), timeout=300)


def test_a_follower_waits_only_a_moment_when_nothing_happens() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            monitor = await swarm.trainer(role="monitor")
            began = asyncio.get_running_loop().time()
            for _ in range(3):
                await monitor.wait()
            assert asyncio.get_running_loop().time() - began < 5
            assert monitor.epoch == 0

    virtual_time.run(main())


@pytest.mark.parametrize("client_mode", [True, *soak([False])])
def test_an_auxiliary_follows_the_lineage_and_reduces(client_mode: bool) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers = [await swarm.trainer(seed=1) for _ in range(2)]
            async with helping(swarm, client_mode=client_mode) as helper:
                rounds = record(trainers[0].node, RoundFinished)
                await together(assist(helper, 5), *(trainer.train(7) for trainer in trainers))
                assert len(digests(trainers)) == 1
                helped = [r for r in rounds if helper.node.peer_id.text in r.members and r.outcome == "committed"]
                assert len(helped) >= 3
                assert all(helper.node.peer_id.text not in r.contributors for r in helped)
                assert helper.report().phase == "assisting"

    virtual_time.run(main(), timeout=300)


@pytest.mark.soak
def test_an_auxiliary_that_lost_the_lineage_finds_it_again() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers = [await swarm.trainer(seed=1) for _ in range(2)]
            async with helping(swarm) as helper:
                await together(assist(helper, 2), *(trainer.train(2) for trainer in trainers))
                swarm.network.freeze(helper.node.peer_id)
                await together(*(trainer.train(5) for trainer in trainers))
                swarm.network.thaw(helper.node.peer_id)
                await together(assist(helper, 7), *(trainer.train(9) for trainer in trainers))
                lineages = {trainer.core.position.lineage for trainer in trainers}
                assert len(lineages) == 1

    virtual_time.run(main(), timeout=300)


def test_one_trainer_and_an_auxiliary() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainer = await swarm.trainer(seed=1, batch_size=TARGET)
            async with helping(swarm) as helper:
                began = asyncio.get_running_loop().time()
                await trainer.train(10)
                assert asyncio.get_running_loop().time() - began < 30
                await assist(helper, 10)

    virtual_time.run(main(), timeout=300)


def test_everyone_in_client_mode_but_a_follower() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            monitor = await swarm.trainer(seed=1, role="monitor")
            computing = [await swarm.trainer(seed=n, client_mode=True) for n in (1, 2)]
            await together(monitor.follow(4), *(trainer.train(4) for trainer in computing))
            assert len(digests(swarm.trainers)) == 1
            assert all(len(trainer.used) >= 2 for trainer in computing)
            late = await swarm.trainer(seed=5, client_mode=True)
            await together(monitor.follow(7), *(trainer.train(7) for trainer in [*computing, late]))
            assert len(digests(swarm.trainers)) == 1
            assert late.used

    virtual_time.run(main(), timeout=300)


def test_a_client_mode_trainer_beside_a_listening_one() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            listening, client = await swarm.trainer(seed=1), await swarm.trainer(seed=1, client_mode=True)
            await together(listening.train(5), client.train(5))
            assert len(digests(swarm.trainers)) == 1
            assert len(client.used) == 5

    virtual_time.run(main(), timeout=300)


@pytest.mark.soak
@pytest.mark.parametrize("pace", [2.0, 0.1])
def test_an_epoch_is_as_long_as_somebody_computed(pace: float) -> None:
    """Neither the time before the first trainer counts, nor that between two of them."""

    async def main() -> None:
        async with Swarm() as swarm, helping(swarm) as helper:
            advanced = record(helper.node, EpochAdvanced)
            monitor = await swarm.trainer(seed=1, role="monitor", target=TARGET)
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(assist(helper, 10**6)), group.create_task(monitor.follow(10**6))]
                for came in range(2):
                    await asyncio.sleep(15)
                    trainer = await swarm.trainer(seed=1, pace=pace)
                    await trainer.train(2 * came + 2)
                    await until(lambda: min(monitor.epoch, helper.position.epoch) >= 2 * came + 2)  # noqa: B023
                    await trainer.core.shutdown()
                for watcher in watching:
                    watcher.cancel()
            usual = TARGET / trainer.batch_size * pace
            for who, epochs in (("trainer", trainer.epochs), ("monitor", monitor.epochs), ("auxiliary", advanced)):
                computed = [epoch for epoch in epochs if epoch.samples]
                assert len(computed) >= 2
                for epoch in computed:
                    # These trainers join with their first batch. Who has left is known within five seconds.
                    assert usual - pace - 1 < epoch.seconds < usual + 6, f"{who}, epoch {epoch.epoch}"

    virtual_time.run(main(), timeout=600)
