"""What a member says of others while groups form: their own word goes before it."""

from __future__ import annotations

import asyncio
import random

from swarmcli.averaging.bans import ToldEvidence
from swarmcli.averaging.consensus.certificate import DoubleVote, sign_vote
from swarmcli.averaging.matchmaking.messages import SEARCH_BYTES, Answer, Candidate, GroupInvitation, method_name
from swarmcli.errors import NetworkError
from swarmcli.network import wire
from swarmcli.network.identity import Identity
from swarmcli.testing import virtual_time
from tests.adversary.lies import Liar
from tests.optim.optim_swarm import TARGET, Swarm, Trainer, together


async def name_searches_to_come(liar: Liar, others: list[Trainer]) -> None:
    """It invites each to each other one, which cannot be dialed, it says, and whose search begins long after all."""
    assert liar.averager is not None
    finder = liar.averager.finder
    while True:
        await asyncio.sleep(0.2)
        if finder.driver is None:
            continue
        me = finder.driver.search.me
        for told in others:
            for other in others:
                named = Candidate(other.node.peer_id, b"\xff" * SEARCH_BYTES, me.tag, listening=False)
                method = method_name(finder._config.prefix, GroupInvitation)
                try:
                    await liar.endpoint.call(told.node.peer_id, method, GroupInvitation(me, named), Answer, timeout=2.0)
                except NetworkError:
                    continue
                liar.told.append("a search to come")


def test_a_member_that_names_searches_to_come_keeps_nobody_from_another() -> None:
    """Before, these ended with the round, and no later one counted: in three epochs nobody found anybody, for good."""

    async def main() -> None:
        async with Swarm(3) as swarm:
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=2.0) for _ in range(4)]
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(2) for trainer in trainers))
            *honest, dishonest = trainers
            liar = Liar(random.Random(0), dishonest.node.endpoint, averager=dishonest.core.work.averager)
            lying = [
                asyncio.create_task(dishonest.train(1000)),
                asyncio.create_task(name_searches_to_come(liar, honest)),
            ]
            working = [asyncio.create_task(trainer.train(1000)) for trainer in honest]
            epochs, usual = 12, TARGET * 2.0 / len(honest)
            await asyncio.sleep(epochs * usual)
            for task in (*working, *lying):
                assert not task.done(), task
                task.cancel()
            await asyncio.wait([*working, *lying])
            assert liar.told and min(trainer.epoch for trainer in honest) >= 2 + epochs / 2
            assert len({trainer.core.position.lineage for trainer in honest}) == 1

    virtual_time.run(main(), timeout=3600)


def evidence_against(identity: Identity) -> DoubleVote:
    """Which only this identity can make."""
    group, values = bytes(32), (bytes(32), bytes([1]) * 32)
    first, second = (sign_vote(identity, group, 0, "vote", value) for value in values)
    return DoubleVote(identity.peer_id, group, 0, "vote", values, (first, second))


def test_a_member_that_shows_evidence_against_itself_to_some_alone_is_banned_by_all() -> None:
    """Before, those declined each group that the others led with it in it: 2 of 8 left half of the epochs."""

    async def main() -> None:
        async with Swarm(3) as swarm:
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=2.0) for _ in range(4)]
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(2) for trainer in trainers))
            *honest, dishonest = trainers
            endpoint, bans = dishonest.node.endpoint, honest[0].core.work.averager._ban_news
            proof = wire.encode(evidence_against(endpoint.identity))
            for trainer in honest[:2]:
                await endpoint.call(
                    trainer.node.peer_id, bans.method, ToldEvidence((proof,)), ToldEvidence, timeout=5.0
                )
            lying = asyncio.create_task(dishonest.train(1000))
            await together(*(trainer.train(6) for trainer in honest))
            lying.cancel()
            await asyncio.wait([lying])
            assert all(trainer.core.work.averager.bans.is_banned(endpoint.peer_id) for trainer in honest)
            assert len({trainer.core.position.lineage for trainer in honest}) == 1

    virtual_time.run(main(), timeout=3600)
