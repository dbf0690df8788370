"""What members show some alone: all hear of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from swarmcli.averaging.certificate import DoubleWord, sign_word
from swarmcli.averaging.trust import ProofMessage, ProofTaken
from swarmcli.errors import CallRefused
from swarmcli.network.identity import Identity
from tests.adversary.company import lineages, trained
from tests.optim.optim_swarm import together
from tests.simulation import simulated


def evidence_against(identity: Identity) -> DoubleWord:
    """Which only this identity can make."""
    group, digests = bytes(32), (bytes(32), bytes([1]) * 32)
    first, second = (sign_word(identity, group, "vote", digest) for digest in digests)
    return DoubleWord(identity.peer_id, group, ("vote", "vote"), digests, (first, second))


@simulated
async def test_a_member_that_shows_evidence_against_itself_to_some_alone_is_banned_by_all() -> None:
    """Before, those declined each group that the others led with it in it: 2 of 8 left half of the epochs."""
    async with trained(4) as (_, trainers):
        *honest, dishonest = trainers
        endpoint, trust = dishonest.node.endpoint, honest[0].core.work.averager.trust
        told = ProofMessage(evidence_against(endpoint.identity))
        for trainer in honest[:2]:
            with suppress(CallRefused):  # the first has shown it to the others
                await endpoint.call(trainer.node.peer_id, trust.method, told, ProofTaken, timeout=5.0)
        lying = asyncio.create_task(dishonest.train(1000))
        await together(*(trainer.train(3) for trainer in honest))
        lying.cancel()
        await asyncio.wait([lying])
        assert all(trainer.core.work.averager.trust.is_banned(endpoint.peer_id) for trainer in honest)
        assert len(lineages(honest)) == 1
