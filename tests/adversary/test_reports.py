"""Reducers that refuse."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from swarmcli.averaging import AveragerCore, RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.dht import DHTNode
from swarmcli.errors import CallRefused
from tests.adversary.lies import Liar
from tests.adversary.lies.base import on_each_exchange
from tests.averaging.averagers import Averagers, all_outcomes
from tests.optim.optim_swarm import Swarm, together
from tests.simulation import now, simulated
from tests.suites import soak

OPTIONS = AllreduceOptions(part_size_bytes=4 << 10, allreduce_timeout=60.0)
ROUNDS = 8


def refuse(node: DHTNode, averager: AveragerCore | None) -> Liar:
    """It refuses what the others would have it reduce."""
    liar = Liar(random.Random(0), node.endpoint, node, averager)

    async def busy(*_: Any) -> None:
        liar.told.append("refused")
        raise CallRefused("busy", "not now")

    def alter(exchange: Any) -> None:
        exchange.take_stream = busy

    on_each_exchange(liar, alter)
    return liar


@pytest.mark.parametrize(("count", "hostile"), [(4, 1), *soak([(8, 2), (8, 1), (16, 1), (16, 5)])])
@simulated
async def test_a_reducer_that_refuses_costs_a_round_and_the_honest_go_on(count: int, hostile: int) -> None:
    async with Averagers(5) as swarm:
        peers = await swarm.add(count, allreduce=OPTIONS, shapes=((200, 200), (40,)))
        await all_outcomes([peer.begin() for peer in peers])
        honest, lying = peers[:-hostile], peers[-hostile:]
        liars = [refuse(peer.node, peer.core) for peer in lying]
        for _ in range(ROUNDS):
            lied = [peer.begin(timeout=600) for peer in lying]
            outcomes = await all_outcomes([peer.begin(timeout=600) for peer in honest])
            await all_outcomes(lied)
            results = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
            assert len(results) == len(honest), outcomes
        failed = [each.outcome for each in honest[0].rounds].count("failed")
        assert liars[0].told and failed <= 2, "when it is found out, and once more where it leads"
        assert all(results[0].reduced[peer.peer_id] for peer in honest)
        assert not any(peer.core.trust.has_no_seat(other.peer_id) for peer in honest for other in honest)
        assert now() < 60


@simulated
async def test_a_leader_that_gives_all_work_to_itself_and_refuses_it_costs_a_round() -> None:
    async with Swarm(0) as swarm:
        trainers = [await swarm.trainer(seed=1, batch_size=2) for _ in range(4)]  # so few elements are one part
        await together(*(trainer.core.join() for trainer in trainers))
        await together(*(trainer.train(2) for trainer in trainers))
        liar = refuse(trainers[0].node, trainers[0].core.work.averager)
        honest, usual = trainers[1:], now() / 2
        lying = asyncio.create_task(trainers[0].train(1 << 20))
        async with asyncio.timeout(2 * 12 * usual):
            await together(*(trainer.train(14) for trainer in honest))
        lying.cancel()
        await asyncio.wait([lying])
        assert liar.told, "it led"
