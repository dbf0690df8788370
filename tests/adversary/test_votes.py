"""Lies about the outcome of a round: what each may achieve at most."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from swarmcli.averaging.round.allreduce import AllreduceResult
from swarmcli.events import PeerBanned
from swarmcli.testing import virtual_time
from tests.adversary.lies import LIES, Liar, votes
from tests.averaging.rounds import Kind, Outcome, Swarm
from tests.suites import soak

NAMES = [name for name, each in LIES.items() if each.tell.__module__ == votes.__name__]
SECONDS = {
    "leader that tells no outcome": 20.0,
    "leader that outbids every ballot": 50.0,
    "decision without votes": 5.0,
    "presence that brings a false decision": 1.0,
    "voter that withholds its vote": 2.0,
    "vote without a signature": 2.0,
    "vote for another result": 2.0,
    "silence while others compare": 5.0,
    "confirm for something else": 2.0,
    "second vote, shown to those who compare": 5.0,
}


def beside(name: str, places: list[int], count: int, seed: int = 0) -> tuple[Swarm, list[Outcome | None], float]:
    """One round in which those at these places lie: outcomes of the others, and how long they took."""

    async def main() -> tuple[Swarm, list[Outcome | None], float]:
        async with Swarm([Kind() for _ in range(count)], seed=seed) as swarm:
            liars = []
            for place in places:
                peer = swarm.peers[place]
                averager = SimpleNamespace(_service=peer.service)
                liars.append(Liar(random.Random(seed), peer.endpoint, averager=averager))  # type: ignore[arg-type]
                LIES[name].tell(liars[-1])
            ended = [0.0]

            async def honest_end() -> None:
                began = asyncio.get_running_loop().time()
                honest = [task for place, task in enumerate(swarm.tasks) if place not in places]
                await asyncio.wait(honest)
                ended[0] = asyncio.get_running_loop().time() - began
                for place in places:
                    swarm.tasks[place].cancel()

            outcomes = await swarm.round(honest_end)
            assert any(liar.told for liar in liars) or "presence" in name
            return swarm, [each for place, each in enumerate(outcomes) if place not in places], ended[0]

    return virtual_time.run(main(), seed=seed, timeout=2000)


def is_leaders(name: str) -> bool:
    return name.startswith("leader") or name == "decision without votes"


@pytest.mark.parametrize("name", NAMES)
def test_one_of_four_achieves_no_more_than_is_said(name: str) -> None:
    swarm, outcomes, took = beside(name, [0 if is_leaders(name) else 3], 4)
    digests = {outcome.digest for outcome in outcomes if isinstance(outcome, AllreduceResult)}
    assert len(digests) <= 1 and took < SECONDS[name]
    if name.startswith("second vote"):
        culprit = swarm.peers[3].peer_id
        assert {event.peer for event in swarm.events if isinstance(event, PeerBanned)} == {culprit.text}
    assert all(isinstance(outcome, AllreduceResult) for outcome in outcomes), outcomes
    assert all(outcome.certificate.verify() for outcome in outcomes)  # type: ignore[union-attr]


def test_second_votes_of_a_third_void_no_round() -> None:
    swarm, outcomes, _ = beside("second vote, shown to those who compare", [3, 6], 8)
    assert all(isinstance(outcome, AllreduceResult) for outcome in outcomes), outcomes
    assert len({outcome.digest for outcome in outcomes if isinstance(outcome, AllreduceResult)}) == 1
    banned = {event.peer for event in swarm.events if isinstance(event, PeerBanned)}
    assert banned == {swarm.peers[place].peer_id.text for place in (3, 6)}


@pytest.mark.parametrize("count", soak([8]))
@pytest.mark.parametrize("name", NAMES)
def test_a_third_of_a_group_together_splits_nobody(name: str, count: int) -> None:
    for seed in range(20):
        places = random.Random(seed).sample(range(count), (count - 1) // 3)
        if is_leaders(name) and 0 not in places:
            places[0] = 0
        _, outcomes, took = beside(name, places, count, seed)
        assert len({outcome.digest for outcome in outcomes if isinstance(outcome, AllreduceResult)}) <= 1
        assert took < 120
