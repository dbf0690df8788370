"""Who keeps the state: who writes checkpoints while a run goes on, and to whom a peer that leaves may leave it."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.optim.core import OptimizerCore
from tests.optim.optim_swarm import Swarm, Trainer, together
from tests.simulation import within
from tests.suites import soak


async def in_step(*trainers: Trainer) -> None:
    """Brings the trainers to one epoch, and waits until they know each other."""
    await together(*(trainer.train(2) for trainer in trainers))
    await asyncio.sleep(10)


async def writers(*cores: OptimizerCore) -> list[bool]:
    return [not await core.succession.is_elsewhere() for core in cores]


@pytest.mark.parametrize("count", [3, *soak([6])])
@within(300)
async def test_a_peer_leaves_its_state_to_one_that_stays_and_of_those_who_leave_at_once_one_at_least_is_left_alone(
    count: int,
) -> None:
    async with Swarm(seed=count) as swarm:
        first, *others = trainers = [await swarm.trainer(seed=1) for _ in range(count)]
        await in_step(*trainers)
        assert await first.core.succession.leave() in [(trainer.node.peer_id, 2) for trainer in others]
        heirs = await asyncio.gather(*(trainer.core.succession.leave() for trainer in others))
        assert None in heirs
        assert await first.core.succession.leave() is None, "nobody who leaves ever keeps anything for others"


@within(300)
async def test_among_those_who_offer_one_writes_and_the_next_takes_over() -> None:
    async with Swarm() as swarm:
        trainers = [await swarm.trainer(seed=1) for _ in range(4)]
        trainers.sort(key=lambda trainer: bytes(trainer.node.peer_id))
        cores = [trainer.core for trainer in trainers]
        for core in cores[1:]:
            core.succession.offer(True)
        await in_step(*trainers)
        assert await writers(*cores[1:]) == [True, False, False]
        await swarm.kill(trainers[1])
        assert await writers(*cores[2:]) == [True, False], "though its report has not expired yet"
        cores[2].leaving = True
        assert await writers(cores[3]) == [True], "one that leaves writes no more"


@within(300)
async def test_a_monitor_comes_before_all_trainers() -> None:
    async with Swarm() as swarm:
        one, other = [await swarm.trainer(seed=1) for _ in range(2)]
        monitor = await swarm.trainer(seed=1, role="monitor")
        for trainer in (one, other, monitor):
            trainer.core.succession.offer(True)
        await together(one.train(2), other.train(2), monitor.follow(2))
        await asyncio.sleep(10)
        assert await writers(one.core, other.core, monitor.core) == [False, False, True]
        monitor.core.succession.offer(False)  # its disk is full
        await asyncio.sleep(10)
        assert sum(await writers(one.core, other.core)) == 1
