"""Those who take part without computing: monitors that follow, auxiliaries that reduce; and peers nobody can dial."""

import pytest

from swarmcli.events import RoundFinished
from tests.optim.optim_swarm import Swarm, assist, auxiliary, digests, record, together
from tests.simulation import within
from tests.suites import soak


@within(300)
async def test_a_follower_with_other_weights_downloads_and_then_donates() -> None:
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


@pytest.mark.parametrize("client_mode", [True, *soak([False])])
@within(300)
async def test_an_auxiliary_follows_the_lineage_and_reduces(client_mode: bool) -> None:
    async with Swarm() as swarm:
        trainers = [await swarm.trainer(seed=1) for _ in range(2)]
        helper = await auxiliary(swarm, client_mode=client_mode)
        rounds = record(trainers[0].node, RoundFinished)
        await together(assist(helper, 5), *(trainer.train(7) for trainer in trainers))
        assert len(digests(trainers)) == 1
        helped = [r for r in rounds if helper.node.peer_id.text in r.members and r.outcome == "committed"]
        assert len(helped) >= 3
        assert all(helper.node.peer_id.text not in r.contributors for r in helped)
        assert helper.report().phase == "assisting"


@within(300)
async def test_everyone_in_client_mode_but_a_follower() -> None:
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
