"""Rounds of whole groups under virtual time."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.round import service
from swarmcli.averaging.round.messages import RoundWord
from swarmcli.errors import RoundFailed, RoundUndecided
from tests.averaging.rounds import Kind, Swarm
from tests.simulation import now, simulated

CLIENT = Kind(listening=False)
AUXILIARY = Kind(auxiliary=True)
CLIENT_AUXILIARY = Kind(auxiliary=True, listening=False)

GROUPS = {
    "alone": [Kind()],
    "two": [Kind(), Kind(weight=3)],
    "eight": [Kind(weight=1 + index) for index in range(8)],
    "clients": [Kind(), CLIENT, CLIENT],
    "auxiliary": [Kind(), Kind(weight=5), AUXILIARY],
    "client-mode auxiliary": [Kind(), Kind(), CLIENT_AUXILIARY],
    "client-mode auxiliary does it all": [Kind(bandwidth=0), Kind(bandwidth=0), CLIENT_AUXILIARY],
    "clients and an auxiliary": [Kind(bandwidth=0), CLIENT, CLIENT, AUXILIARY],
    "a follower of weight zero": [Kind(), Kind(weight=0), Kind(weight=2)],
    "one slow to begin": [Kind(), Kind(delay=20), Kind()],
    "a slow leader": [Kind(delay=20), Kind(), CLIENT],
    "unequal links": [Kind(bandwidth=10), Kind(bandwidth=1), Kind(bandwidth=5, weight=4)],
}


@pytest.mark.parametrize("kinds", GROUPS.values(), ids=GROUPS.keys())
@simulated
async def test_everyone_gets_the_weighted_mean(kinds: list[Kind]) -> None:
    async with Swarm(kinds) as swarm:
        outcomes = await swarm.round()
        holders = swarm.check(outcomes)
        assert all(isinstance(outcome, RoundResult) for outcome in outcomes)
        assert len(holders) == sum(not kind.auxiliary for kind in kinds)
        contributing = [peer for peer in swarm.peers if not peer.kind.auxiliary and peer.kind.weight > 0]
        assert holders[0].weights == {peer.peer_id: peer.kind.weight for peer in contributing}
        assert all(result.left_out == {} for result in holders)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@simulated
async def test_other_types(dtype: torch.dtype) -> None:
    async with Swarm([Kind(), Kind(weight=2), Kind()], dtype=dtype) as swarm:
        holders = swarm.check(await swarm.round(), tolerance=max(1e-15, 2 * torch.finfo(dtype).eps))
        assert len(holders) == 3 and holders[0].averages[0].dtype is dtype


@pytest.mark.parametrize(("poison", "sick"), [(math.nan, 0), (math.inf, 2)])
@simulated
async def test_a_member_with_nan_keeps_out_of_the_average_and_is_named(poison: float, sick: int) -> None:
    async with Swarm([Kind(), Kind(), Kind()]) as swarm:
        swarm.peers[sick].tensors[1][3] = poison
        holders = swarm.check(await swarm.round())
        assert len(holders) == 3
        for result in holders:
            assert swarm.peers[sick].peer_id not in result.contributors
            assert "NaN or infinity" in result.left_out[swarm.peers[sick].peer_id]


@simulated
async def test_a_round_takes_a_few_round_trips() -> None:
    async with Swarm([Kind() for _ in range(4)], latency=0.05) as swarm:
        began = now()
        swarm.check(await swarm.round())
        took = now() - began
        assert took < 0.05 * 2 * 8


@simulated
async def test_a_sender_of_other_tensors_is_refused_and_the_others_go_on() -> None:
    async with Swarm([Kind(), Kind(), Kind(bandwidth=0), Kind()]) as swarm:
        swarm.peers[2].tensors[0] = torch.zeros(30, 40)
        outcomes = await swarm.round()
        stranger = outcomes.pop(2)
        assert isinstance(stranger, RoundUndecided)
        holders = swarm.check(outcomes)
        assert len(holders) == 3
        for result in holders:
            assert "differ from the group's" in result.left_out[swarm.peers[2].peer_id]
        assert now() < 5


@simulated
async def test_a_group_that_is_begun_again_fails_and_names_its_leader() -> None:
    async with Swarm([Kind(), Kind()]) as swarm:
        group = swarm.group()
        first = await asyncio.gather(*(swarm.take_part(peer, group) for peer in swarm.peers))
        assert len(swarm.check(first)) == 2
        outcome = await swarm.take_part(swarm.peers[1], group)
        assert isinstance(outcome, RoundFailed) and outcome.suspects == (swarm.peers[0].peer_id,)


@pytest.mark.parametrize(("rounds", "members"), [(4, 1 << 16), (256, 8)])
@simulated
async def test_it_answers_for_the_last_rounds_and_always_for_one_that_runs(
    rounds: int, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of two: four of them are eight members."""
    monkeypatch.setattr(service, "REMEMBERED", rounds)
    monkeypatch.setattr(service, "REMEMBERED_MEMBERS", members)
    async with Swarm([Kind(), Kind()]) as swarm:
        peer, asker = swarm.peers
        running, *declined = groups = [swarm.group() for _ in range(8)]
        with peer.service.hosting(running):
            for group in declined:
                peer.service.decline(group)
            asks, method = asker.endpoint.call, peer.service.method("outcome")
            words = [
                await asks(peer.peer_id, method, RoundWord(group.group_id, "running"), RoundWord, timeout=5)
                for group in groups
            ]
        assert [word.standing for word in words] == ["running", *["unknown"] * 4, *["over"] * 3]
