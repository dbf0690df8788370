"""Members that keep the others waiting: what it costs a group once, and that it costs the next one nothing."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.control import RoundResult
from swarmcli.testing import virtual_time
from tests.adversary.lies import LIES, Liar, stalling
from tests.averaging.averagers import Averagers, Peer, all_outcomes
from tests.optim.optim_swarm import TARGET, Swarm, together

ROUND_TIME = 60.0
OPTIONS = AllreduceOptions(part_size_bytes=4 << 10, allreduce_timeout=ROUND_TIME)


async def honest_round(honest: list[Peer], dishonest: Peer) -> tuple[list[RoundResult], float]:
    """What a round gave to the honest, beside a peer that lies, and the seconds that it took them."""
    loop = asyncio.get_running_loop()
    began, lied = loop.time(), dishonest.begin(timeout=600)
    outcomes = await all_outcomes([peer.begin(timeout=600) for peer in honest])
    results = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
    seconds = loop.time() - began
    lied.cancel()
    assert len(results) == len(honest), outcomes
    assert len({result.group.group_id for result in results}) == 1
    assert len({tuple(peer.values) for peer in honest}) == 1
    return results, seconds


@pytest.mark.parametrize(
    ("name", "count", "at_most"),
    [
        ("trickling sender", 3, ROUND_TIME / 3 + 5),
        ("trickling sender", 4, ROUND_TIME / 3 + 5),
        ("trickling reducer", 3, 2 * ROUND_TIME / 3 + 5),
        ("trickling reducer", 4, 2 * ROUND_TIME / 3 + 5),
        ("always about to begin", 3, ROUND_TIME / 2 + 15),
    ],
)
def test_who_keeps_others_waiting_is_left_out_and_has_no_seat_in_the_next_group(
    name: str, count: int, at_most: float
) -> None:
    async def main() -> None:
        async with Averagers(5) as swarm:
            peers = await swarm.add(count, allreduce=OPTIONS, shapes=((200, 200), (40,)))
            await all_outcomes([peer.begin() for peer in peers])  # now they know each other
            honest, dishonest = peers[:-1], peers[-1]
            liar = Liar(random.Random(0), dishonest.endpoint, dishonest.node, dishonest.core)
            LIES[name].tell(liar)

            results, seconds = await honest_round(honest, dishonest)
            assert liar.told and seconds < at_most
            assert all(dishonest.peer_id not in result.contributors for result in results) or "reducer" in name
            assert all(peer.core.doubts.has_no_seat(dishonest.peer_id) for peer in honest)

            results, seconds = await honest_round(honest, dishonest)
            assert all(dishonest.peer_id not in {m.peer_id for m in result.group.members} for result in results)
            assert seconds < 2.0

    virtual_time.run(main(), timeout=3600)


def test_a_leader_that_never_begins_holds_its_followers_for_one_search() -> None:
    async def main() -> None:
        async with Averagers(6) as swarm:
            peers = await swarm.add(4, allreduce=OPTIONS)
            await all_outcomes([peer.begin() for peer in peers])
            first, *honest = peers
            liar = Liar(random.Random(0), first.endpoint, first.node, first.core)
            stalling.gather_and_never_begin(liar)
            lied, began = first.begin(timeout=600), asyncio.get_running_loop().time()
            outcomes = await all_outcomes([peer.begin(timeout=600) for peer in honest])
            assert liar.told and all(isinstance(outcome, RoundResult) for outcome in outcomes)
            assert asyncio.get_running_loop().time() - began < 15
            assert all(peer.core.doubts.has_no_seat(first.peer_id) for peer in honest)
            lied.cancel()

    virtual_time.run(main(), timeout=3600)


def test_a_leader_that_never_begins_holds_up_an_epoch_by_the_time_for_matchmaking() -> None:
    async def main() -> None:
        async with Swarm(3) as swarm:
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=2.0) for _ in range(4)]
            honest = trainers[:3]
            for trainer in trainers:
                await trainer.core.join()
            await together(*(trainer.train(1) for trainer in trainers))
            liar = Liar(random.Random(0), trainers[3].node.endpoint, averager=trainers[3].core.work.averager)
            stalling.gather_and_never_begin(liar)
            lying = asyncio.create_task(trainers[3].train(100))
            usual, patience = TARGET * 2.0 / 4, honest[0].core.config.matchmaking_time
            for epoch in range(2, 9):  # each leads in turn
                began = asyncio.get_running_loop().time()
                await together(*(trainer.train(epoch) for trainer in honest))
                assert asyncio.get_running_loop().time() - began < usual * 4 / 3 + patience + 10
            assert liar.told and len({trainer.core.position.lineage for trainer in honest}) == 1
            lying.cancel()

    virtual_time.run(main(), timeout=3600)
