"""Who cannot reach the state of its run waits for it and says so, instead of training another model."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from swarmcli.errors import NoDonorReachable
from swarmcli.events import Noticed
from tests.optim.optim_swarm import Swarm, Trainer, assist, auxiliary, meanwhile, record, until
from tests.simulation import now, within
from tests.suites import soak


@asynccontextmanager
async def helped(swarm: Swarm):
    """An auxiliary that everyone can dial."""
    async with meanwhile(assist(await auxiliary(swarm))):
        yield


def training(*trainers: Trainer):
    """Lets the trainers train beside the test."""
    return meanwhile(*(trainer.train(10**6) for trainer in trainers))


@pytest.mark.parametrize(
    ("gap", "seed"), [(4.0, 2), *soak([(1.0, 1), (8.0, 1), (1.0, 2), (8.0, 2)])]
)  # equal weights begin alike
@within(300)
async def test_behind_routers_the_second_waits_says_so_and_ends_in_time(gap: float, seed: int) -> None:
    async with Swarm() as swarm, helped(swarm):
        first = await swarm.trainer(seed=1, client_mode=True, pace=0.6, batch_size=24)
        async with training(first):
            await asyncio.sleep(gap)
            second = await swarm.trainer(seed=seed, client_mode=True, load_state_timeout=12.0)
            warnings, began = record(second.node, Noticed), now()
            waiting = asyncio.ensure_future(second.train(1000))
            await until(lambda: second.node.peer_id in first.core.claims.apart())
            assert now() - began < 12, "the first one's screen tells of it"
            assert second.core.report().phase == "stranded"
            with pytest.raises(NoDonorReachable, match="start `swarm monitor`"):
                await waiting
            assert 12 <= now() - began < 20
            assert second.epochs == [], "it has not trained"
            [warning] = warnings
            assert "waits instead of training another model" in warning.text and "epoch" in warning.text
            epochs = first.epoch
            await asyncio.sleep(4)
            assert first.epoch >= epochs + 2, "whoever leads is not held up"


@within(300)
async def test_told_to_proceed_alone_it_trains_on_and_raises_an_alarm() -> None:
    async with Swarm() as swarm, helped(swarm):
        first = await swarm.trainer(seed=1, client_mode=True, pace=0.6, batch_size=24)
        async with training(first):
            await asyncio.sleep(5)
            second = await swarm.trainer(seed=2, client_mode=True, pace=0.6, batch_size=24, proceed_alone=True)
            said = record(second.node, Noticed)
            await second.train(2)
            assert any(each.level == "error" and "a model of its own" in each.text for each in said)
            assert first.node.peer_id in second.core.claims.apart()
            async with training(second):
                await until(lambda: second.node.peer_id in first.core.claims.apart())


@within(300)
async def test_one_that_waits_stops_when_it_is_told_to() -> None:
    async with Swarm() as swarm, helped(swarm):
        first = await swarm.trainer(seed=1, client_mode=True, pace=0.6, batch_size=24)
        async with training(first):
            await asyncio.sleep(5)
            second = await swarm.trainer(seed=2, client_mode=True)
            stop = asyncio.Event()
            second.core.catch_up.gives_up = stop.is_set
            asyncio.get_running_loop().call_later(4, stop.set)
            with pytest.raises(NoDonorReachable, match="told to stop"):
                await second.core.join()


@pytest.mark.parametrize(
    ("client_mode", "witness"), [(True, True), (False, False), *soak([(True, False), (False, True)])]
)
@within(300)
async def test_a_sole_trainer_that_was_killed_is_no_reason_to_wait_for_a_successor_that_is_to_begin_anew(
    client_mode: bool, witness: bool
) -> None:
    """The witness is an auxiliary; without one there is only a bare contact."""
    async with Swarm() as swarm:

        async def story() -> None:
            gone = await swarm.trainer(seed=1, client_mode=client_mode)
            await gone.train(3)
            await swarm.kill(gone)
            began = now()
            back = await swarm.trainer(seed=1, client_mode=client_mode)
            back.core.catch_up.note_heard(None, begins_anew=True)
            await back.train(1)
            assert now() - began < 25
            assert 0.5 < back.epochs[0].seconds < 2, "what it waited is no part of its epoch"

        if witness:
            async with helped(swarm):
                await story()
        else:
            await story()
