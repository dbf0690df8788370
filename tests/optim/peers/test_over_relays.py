"""Trainers that nobody can dial directly train one model with those that can, and among themselves."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.events import Noticed
from swarmcli.testing import Swarm as Homes
from swarmcli.testing.memory_router import MemoryRouter
from tests.optim.optim_swarm import Swarm, Trainer, assist, assistant, digests, meanwhile, record, together, until
from tests.optim.peers.test_out_of_reach import training
from tests.simulation import now, within
from tests.suites import soak


@within(300)
async def test_a_newcomer_without_a_way_to_the_state_says_so_and_goes_on_when_a_relay_comes() -> None:
    async with Swarm() as swarm:
        first = await swarm.trainer(seed=1, pace=0.5, client_mode=True, relays=True)
        async with training(first):
            await asyncio.sleep(6)
            second = await swarm.trainer(seed=2, pace=0.5, client_mode=True, relays=True)
            said, began = record(second.node, Noticed), now()
            async with training(second):
                await until(lambda: bool(said))
                assert now() - began < 10
                assert "waits" in said[0].text and "`swarm aux`" in said[0].text
                await asyncio.sleep(10)
                assert second.epochs == []
                await swarm.node(relays=True)
                await until(lambda: len(second.used) > 2)
            await together(first.train(second.epoch + 2), second.train(second.epoch + 2))
            assert len(digests([first, second])) == 1


@pytest.mark.parametrize("keeps_ports", [True, *soak([False])])
@within(300)
async def test_two_homes_with_a_direct_connection_stay_one_run_when_the_only_public_peer_is_killed(
    keeps_ports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not keeps_ports:  # so that no further connection can be made
        monkeypatch.setattr(MemoryRouter, "_keeps", lambda router, port: False)
    async with Homes(seed=1) as swarm:
        public = await swarm.node(host="5.1.0.1", relay=True)
        helper = await swarm.start(assistant(public))

        async def home(number: int) -> Trainer:
            router = swarm.network.router(f"5.{number}.0.1")
            trainer = Trainer(await swarm.node(host="192.168.1.2", behind=router), seed=1, pace=4.0)
            await swarm.start(trainer.core)
            return trainer

        first, second = await home(2), await home(3)
        async with training(first, second):
            async with meanwhile(assist(helper)):
                await until(lambda: len(first.used) > 1 and len(second.used) > 1)
            seen = first.node.endpoint.seen(second.node.peer_id)
            assert seen is not None and seen.punched
            said = record(first.node, Noticed)
            swarm.network.kill(public.peer_id)
            epoch = max(first.epoch, second.epoch)
            await asyncio.sleep(90)  # longer than reports and declarations live
            if keeps_ports:
                assert min(first.epoch, second.epoch) > epoch + 3
            else:
                assert max(first.epoch, second.epoch) <= epoch + 1, "they wait, and train no two models"
                assert any("could not dial each other" in each.text for each in said)
        if keeps_ports:
            last = max(first.epoch, second.epoch)
            await together(first.train(last + 2), second.train(last + 2))
            assert len(digests([first, second])) == 1
