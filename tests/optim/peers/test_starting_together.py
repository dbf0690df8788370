from __future__ import annotations

import asyncio

from tests.optim import optim_swarm
from tests.optim.optim_swarm import together
from tests.simulation import simulated


@simulated
async def test_a_trainer_that_has_enough_by_itself_waits_for_those_who_start_with_it() -> None:
    """Their first parameters are unlike, so all but one have a state to load, while that one computes."""
    async with optim_swarm.Swarm(latency=0.1) as swarm:
        quick = await swarm.trainer(seed=1, batch_size=optim_swarm.TARGET, pace=0.05)
        others = [await swarm.trainer(seed=seed, pace=0.05) for seed in (2, 3)]
        began = asyncio.get_running_loop().time()
        await together(*(trainer.train(2) for trainer in (quick, *others)))
        assert [epoch.peers for epoch in quick.epochs if epoch.samples] == [3, 3]
        assert asyncio.get_running_loop().time() - began < 10


@simulated
async def test_who_is_joining_for_long_or_later_holds_up_nobody() -> None:
    async with optim_swarm.Swarm() as swarm:
        quick = await swarm.trainer(seed=1, batch_size=optim_swarm.TARGET, matchmaking_time=4.0)
        await swarm.trainer(seed=2)  # never comes to its first step
        began = asyncio.get_running_loop().time()
        await quick.train(10)
        assert 2.0 <= asyncio.get_running_loop().time() - began < 6.0
