"""A process that is up while its training loop stands still: a notebook cell that was stopped, a long evaluation."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, digests, together
from tests.suites import soak


@pytest.mark.parametrize("count", [2, *soak([3])])
def test_a_trainer_that_takes_no_steps_holds_the_others_up_once(count) -> None:
    """Its connections answer and it was in the group, so the round waits for its gradients; the next do not."""

    async def main() -> None:
        async with Swarm() as swarm:
            trainers = [await swarm.trainer(averaging_timeout=20.0) for _ in range(count)]
            absent, *others = trainers
            await together(*(trainer.train(3) for trainer in trainers))
            async with asyncio.timeout(60):
                await together(*(trainer.train(6) for trainer in others))
                await asyncio.sleep(absent.core.config.averaging_timeout)  # the round's time is over for it, too
            assert absent.epoch == 3 and absent.core.report().phase == "joining"
            async with asyncio.timeout(30):
                await together(*(trainer.train(9) for trainer in trainers))
            assert len(digests(trainers)) == 1
            assert absent.core.report().phase == "training"

    virtual_time.run(main(), seed=2)
