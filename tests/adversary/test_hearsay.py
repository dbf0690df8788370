"""What a member says of others while groups form: their own word goes before it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from swarmcli.averaging.consensus.certificate import DoubleVote, sign_vote
from swarmcli.averaging.matchmaking.messages import SEARCH_BYTES, Answer, Candidate, GroupInvitation, method_name
from swarmcli.averaging.trust import ProofMessage, ProofTaken
from swarmcli.errors import CallRefused, NetworkError
from swarmcli.network.identity import Identity
from tests.adversary.company import go_on, liar_of, lineages, trained
from tests.adversary.lies import Liar
from tests.optim.optim_swarm import Trainer, together
from tests.simulation import simulated


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


@simulated
async def test_a_member_that_names_searches_to_come_keeps_nobody_from_another() -> None:
    """Before, these ended with the round, and no later one counted: in three epochs nobody found anybody, for good."""
    async with trained(3, 2) as (_, trainers):
        *honest, dishonest = trainers
        liar = liar_of(dishonest)
        await go_on(3, honest, dishonest.train(1000), name_searches_to_come(liar, honest))
        assert liar.told and min(trainer.epoch for trainer in honest) > 2 + 3 / 2
        assert len(lineages(honest)) == 1


def evidence_against(identity: Identity) -> DoubleVote:
    """Which only this identity can make."""
    group, values = bytes(32), (bytes(32), bytes([1]) * 32)
    first, second = (sign_vote(identity, group, 0, "vote", value) for value in values)
    return DoubleVote(identity.peer_id, group, 0, "vote", values, (first, second))


@simulated
async def test_a_member_that_shows_evidence_against_itself_to_some_alone_is_banned_by_all() -> None:
    """Before, those declined each group that the others led with it in it: 2 of 8 left half of the epochs."""
    async with trained(4) as (_, trainers):
        *honest, dishonest = trainers
        endpoint, trust = dishonest.node.endpoint, honest[0].core.work.averager.trust
        told = ProofMessage(endpoint.peer_id, evidence_against(endpoint.identity))
        for trainer in honest[:2]:
            with suppress(CallRefused):  # the first has shown it to the others
                await endpoint.call(trainer.node.peer_id, trust.method, told, ProofTaken, timeout=5.0)
        lying = asyncio.create_task(dishonest.train(1000))
        await together(*(trainer.train(3) for trainer in honest))
        lying.cancel()
        await asyncio.wait([lying])
        assert all(trainer.core.work.averager.trust.is_banned(endpoint.peer_id) for trainer in honest)
        assert len(lineages(honest)) == 1
