"""Trainers that nobody can dial directly train one model with those that can, and among themselves."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.events import Noticed
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, digests, record, together
from tests.optim.peers.test_out_of_reach import helped, training


@pytest.mark.parametrize("helper", ["auxiliary", "monitor", ""])
def test_a_newcomer_gets_the_state_over_a_relay_and_both_train_one_model(helper: str) -> None:
    async def main() -> None:
        async with Swarm(contact_relays=True) as swarm:

            async def story() -> None:
                first = await swarm.trainer(seed=1, client_mode=True, relays=True)
                said = record(first.node, Noticed)
                async with training(first):
                    await asyncio.sleep(5)
                    second = await swarm.trainer(seed=2, client_mode=True, relays=True)
                    said += record(second.node, Noticed)
                    await second.train(first.epoch + 8)
                await together(first.train(second.epoch + 2), second.train(second.epoch + 2))
                assert len(digests([first, second])) == 1
                assert len(second.used) > 4
                assert not any("waits" in each.text for each in said)

            if helper == "auxiliary":
                async with helped(swarm):
                    await story()
            elif helper == "monitor":
                monitor = await swarm.trainer(seed=3, role="monitor")
                following = asyncio.ensure_future(monitor.follow(10**6))
                await story()
                following.cancel()
                await asyncio.wait([following])
            else:
                await story()

    virtual_time.run(main(), timeout=300)
