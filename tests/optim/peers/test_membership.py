"""Peers come, fall behind, die and are cut off: whoever is left goes on, and all end up in one lineage."""

import asyncio

import pytest

from swarmcli.errors import StateDownloadError
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.state.lineage import MAX_COUNT
from swarmcli.state.donor import state_method
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, digests, together


def in_one_lineage(trainers) -> bool:
    return len(digests(trainers)) == 1 and len({trainer.core.position for trainer in trainers}) == 1


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


@pytest.mark.parametrize("weight", [10**18])
def test_a_member_that_claims_more_samples_than_can_be_counted_breaks_nobody(weight) -> None:
    """Its gradients rule the average, which nobody can help; the others' reports and counts stay readable."""

    async def main() -> None:
        async with Swarm() as swarm:
            honest, liar = [await swarm.trainer() for _ in range(2)]
            freeze = liar.core.work.freeze

            async def lie() -> Weighed:
                return Weighed(weight, float(weight)) if (await freeze()).samples else Weighed()

            liar.core.work.freeze = lie
            await together(*(trainer.train(4) for trainer in (honest, liar)))
            assert honest.core.report().samples_seen == honest.core.position.samples == MAX_COUNT
            assert all(epoch.samples <= MAX_COUNT for epoch in honest.epochs)

    virtual_time.run(main(), seed=2)
