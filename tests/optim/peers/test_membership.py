"""Peers come, fall behind, die and are cut off: whoever is left goes on, and all end up in one lineage."""

import asyncio

import pytest

from swarmcli.errors import StateDownloadError
from swarmcli.events import Noticed
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.state.lineage import MAX_COUNT
from swarmcli.state.donor import state_method
from swarmcli.testing import virtual_time
from tests.optim import optim_swarm
from tests.optim.optim_swarm import Swarm, digests, record, together
from tests.simulation import now, simulated, within


def in_one_lineage(trainers) -> bool:
    return len(digests(trainers)) == 1 and len({trainer.core.position for trainer in trainers}) == 1


@within(300)
async def test_a_peer_that_is_a_round_behind_at_the_end_finds_a_lingering_donor() -> None:
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


@within(300)
async def test_lingering_ends_when_its_time_is_up() -> None:
    async with Swarm() as swarm:
        done, never = [await swarm.trainer(seed=1) for _ in range(2)]
        await together(done.train(2), never.train(2))
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert not await done.core.linger(3, timeout=5)
        assert 5 <= loop.time() - began < 7
        assert done.core.report().phase == "lingering"


def test_broken_gradients_of_everyone_stop_nobody() -> None:
    async def main(peers: int) -> None:
        async with Swarm() as swarm:
            trainers = [await swarm.trainer(seed=1) for _ in range(peers)]
            await together(*(trainer.train(2) for trainer in trainers))
            said = record(trainers[0].node, Noticed)
            await together(*(trainer.compute() for trainer in trainers))
            for trainer in trainers:
                assert trainer.core.work.samples
                trainer.core.work._gradients.accumulators[0].fill_(float("inf"))
            await together(*(trainer.train(5) for trainer in trainers))
            assert in_one_lineage(trainers)
            assert trainers[0].weights.isfinite().all()
            assert any("are given up: their gradients are not finite" in each.text for each in said)

    for peers in (1, 2):
        virtual_time.run(main(peers), timeout=300)


@within(300)
async def test_a_newcomer_that_gets_no_state_says_whom_it_asked() -> None:
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


@pytest.mark.parametrize("weight", [10**18])
@simulated
async def test_a_member_that_claims_more_samples_than_can_be_counted_breaks_nobody(weight) -> None:
    """The liar's gradients rule the average, which nobody can help; the others' reports and counts stay readable."""
    async with Swarm() as swarm:
        honest, liar = [await swarm.trainer() for _ in range(2)]
        freeze = liar.core.work.freeze

        async def lie() -> Weighed:
            return Weighed(weight, float(weight)) if (await freeze()).samples else Weighed()

        liar.core.work.freeze = lie
        await together(*(trainer.train(4) for trainer in (honest, liar)))
        assert honest.core.report().samples_seen == honest.core.position.samples == MAX_COUNT
        assert all(epoch.samples <= MAX_COUNT for epoch in honest.epochs)


@simulated
async def test_a_trainer_that_has_enough_by_itself_waits_for_those_who_start_with_it() -> None:
    """The trainers' first parameters are unlike, so all but one have a state to load while that one computes."""
    async with optim_swarm.Swarm(latency=0.1) as swarm:
        quick = await swarm.trainer(seed=1, batch_size=optim_swarm.TARGET, pace=0.05)
        others = [await swarm.trainer(seed=seed, pace=0.05) for seed in (2, 3)]
        began = now()
        await together(*(trainer.train(2) for trainer in (quick, *others)))
        assert [epoch.peers for epoch in quick.epochs if epoch.samples] == [3, 3]
        assert now() - began < 10


@simulated
async def test_who_is_joining_for_long_or_later_holds_up_nobody() -> None:
    async with optim_swarm.Swarm() as swarm:
        quick = await swarm.trainer(seed=1, batch_size=optim_swarm.TARGET, matchmaking_time=4.0)
        await swarm.trainer(seed=2)  # never comes to its first step
        began = now()
        await quick.train(10)
        assert 2.0 <= now() - began < 6.0
