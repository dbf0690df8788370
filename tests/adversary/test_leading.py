"""What a leader that lies about its group gets: a group of nobody, and no group to lead soon after."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.control import RoundResult
from swarmcli.network.identity import Identity
from swarmcli.testing import virtual_time
from swarmcli.testing.adversary import Liar
from tests.adversary.leading import ALTERED, alter_entries, stuff
from tests.averaging.averagers import Averagers, all_outcomes
from tests.optim.optim_swarm import TARGET, Swarm, digests, together
from tests.suites import soak

OPTIONS = AllreduceOptions(part_size_bytes=4 << 10, allreduce_timeout=60.0)


@pytest.mark.parametrize("count", [4, *soak([8, 16])])
@pytest.mark.parametrize("name", ALTERED)
def test_nobody_takes_part_in_a_group_that_says_of_it_what_it_did_not_offer(name: str, count: int) -> None:
    async def main() -> None:
        async with Averagers(6) as swarm:
            peers = await swarm.add(count, allreduce=OPTIONS)
            await all_outcomes([peer.begin() for peer in peers])
            first, *honest = peers
            liar = Liar(random.Random(0), first.endpoint, first.node, first.core)
            alter_entries(liar, ALTERED[name])
            while not liar.told:  # leadership goes round
                for number, peer in enumerate(peers):
                    for tensor in peer.core._tensors:
                        tensor.fill_(float(number))
                lied, began = first.begin(timeout=600), asyncio.get_running_loop().time()
                outcomes = await all_outcomes([peer.begin(timeout=600) for peer in honest])
                lied.cancel()
                await asyncio.wait([asyncio.ensure_future(all_outcomes([lied]))])
            assert all(isinstance(outcome, RoundResult) for outcome in outcomes), outcomes
            leaders = {outcome.group.leader for outcome in outcomes if isinstance(outcome, RoundResult)}
            assert len(leaders) == 1 and first.peer_id not in leaders
            assert {tuple(peer.values) for peer in honest} == {(len(peers) / 2, len(peers) / 2)}, (
                "the mean of 1 to n - 1"
            )
            assert asyncio.get_running_loop().time() - began < 15
            assert all(peer.core.suspicions.is_suspect(first.peer_id) for peer in honest)

    virtual_time.run(main(), timeout=3600)


@pytest.mark.parametrize("count", [4, *soak([8, 16])])
def test_no_trainer_loses_its_average_by_being_entered_as_an_auxiliary(count: int) -> None:
    async def main() -> None:
        async with Swarm(3) as swarm:
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=2.0) for _ in range(count)]
            first, *honest = trainers
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(1) for trainer in trainers))
            liar = Liar(random.Random(0), first.node.endpoint, averager=first.core._work.averager)
            alter_entries(liar, ALTERED["an auxiliary"])
            lying = asyncio.create_task(first.train(1000))
            usual, patience = TARGET * 2.0 / (count - 1), honest[0].core.config.matchmaking_time
            epoch = 1
            while not liar.told:
                epoch, began = epoch + 1, asyncio.get_running_loop().time()
                await together(*(trainer.train(epoch) for trainer in honest))
                assert asyncio.get_running_loop().time() - began < usual + patience + 10
            assert len({trainer.core.position.lineage for trainer in honest}) == 1
            assert len(digests(honest)) == 1
            lying.cancel()

    virtual_time.run(main(), timeout=3600)


@pytest.mark.parametrize(("count", "keys"), [(4, 6), *soak([(8, 14), (16, 30)])])
def test_a_leader_that_lists_keys_of_its_own_gets_nobody_to_follow_their_votes(count: int, keys: int) -> None:
    async def main() -> None:
        async with Averagers(6) as swarm:
            peers = await swarm.add(count, allreduce=OPTIONS)
            await all_outcomes([peer.begin() for peer in peers])
            first, *honest = peers
            liar = Liar(random.Random(0), first.endpoint, first.node, first.core)
            stuff(liar, [Identity.from_seed(f"phantom {number}".encode()) for number in range(keys)])
            good, disturbed = 0, 0.0
            while "an outcome" not in liar.told or good < 8:
                for number, peer in enumerate(peers):
                    for tensor in peer.core._tensors:
                        tensor.fill_(float(number))
                lied, began = first.begin(timeout=600), asyncio.get_running_loop().time()
                outcomes = dict(
                    zip(honest, await all_outcomes([peer.begin(timeout=600) for peer in honest]), strict=True)
                )
                lied.cancel()
                await asyncio.wait([asyncio.ensure_future(all_outcomes([lied]))])
                applied = [peer for peer, outcome in outcomes.items() if isinstance(outcome, RoundResult)]
                assert len({tuple(peer.values) for peer in applied}) <= 1
                good += len(applied) == len(honest)
                disturbed = max(disturbed, asyncio.get_running_loop().time() - began)
                if len(applied) < len(honest):
                    assert "an outcome" in liar.told and not applied
                    assert all(peer.core.suspicions.reason(first.peer_id).startswith("it listed") for peer in honest)
            assert disturbed < 15

    virtual_time.run(main(), timeout=3600)
