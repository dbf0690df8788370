"""Who is waited for: a member that says it will come, and nobody that is gone or knows nothing of the round."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.allreduce import AllreduceResult
from swarmcli.errors import RoundFailed, RoundUndecided
from tests.averaging.rounds import Kind, Peer, Swarm
from tests.simulation import now, within


@within(2000)
async def test_a_member_that_still_computes_is_waited_for() -> None:
    async with Swarm([Kind(), Kind(delay=45), Kind()]) as swarm:
        holders = swarm.check(await swarm.round())
        assert len(holders) == 3 and len(holders[0].contributors) == 3


@pytest.mark.parametrize("reduces", [0.0, 1.0])
@within(2000)
async def test_a_connected_mate_that_knows_nothing_of_the_round_holds_nobody_for_long(reduces: float) -> None:
    async def deaf(peer: Peer, group: object) -> None:
        await asyncio.sleep(200)

    async with Swarm([Kind(), Kind(), Kind(), Kind(bandwidth=reduces)]) as swarm:
        ended: list[float] = []

        async def watch() -> None:
            await asyncio.wait(swarm.tasks[:3])
            ended.append(now())

        outcomes = await swarm.round(watch, scripts={3: deaf})
        holders = swarm.check(outcomes)
        assert len(holders) == 3 and ended[0] < 5
        for result in holders:
            assert swarm.peers[3].peer_id in result.left_out


@within(2000)
async def test_of_a_pair_nobody_waits_for_long_for_one_that_does_not_begin_in_time() -> None:
    """A leader that began the group, and knows nothing of it any more."""

    async def deaf(peer: Peer, group: object) -> None:
        await asyncio.sleep(500)

    async with Swarm([Kind(), Kind()]) as swarm:
        ended: list[float] = []

        async def watch() -> None:
            await asyncio.wait(swarm.tasks[1:])
            ended.append(now())

        outcomes = await swarm.round(watch, scripts={0: deaf})
        assert isinstance(outcomes[1], (RoundFailed, RoundUndecided))
        assert ended[0] < 2 * swarm.options.to_begin + 10


@within(2000)
async def test_a_member_that_has_left_is_not_waited_for() -> None:
    async def leaves(peer: Peer, group: object) -> None:
        peer.service.leave(group)  # type: ignore[arg-type]

    async with Swarm([Kind(), Kind(), Kind(), Kind(bandwidth=0)]) as swarm:
        outcomes = await swarm.round(scripts={3: leaves})
        assert all(isinstance(outcome, AllreduceResult) for outcome in outcomes[:3])
        assert now() < 3


@pytest.mark.parametrize(("how", "least", "most"), [("kill", 0.0, 15.0), ("close", 0.0, 15.0), ("cut", 30.0, 70.0)])
@within(2000)
async def test_who_is_left_alone_waits_for_those_that_may_come_back_not_for_those_that_are_gone(
    how: str, least: float, most: float
) -> None:
    """Whoever closes its averager may stay connected, as a script that tries out its model does."""
    options = AllreduceOptions(part_size_bytes=512)
    async with Swarm([Kind(), Kind(), Kind()], bandwidth=20_000.0, options=options) as swarm:

        def lose(index: int) -> None:
            match how:
                case "kill":
                    swarm.kill(index)
                case "close":
                    swarm.close(index)
                case "cut":
                    swarm.network.cut(swarm.peers[index].peer_id, swarm.peers[2].peer_id)

        async def leave_alone() -> None:
            await asyncio.sleep(0.2)
            for index in (0, 1):
                lose(index)
            began = now()
            await asyncio.wait([swarm.tasks[2]])
            assert least <= now() - began <= most

        outcomes = await swarm.round(leave_alone)
        assert isinstance(outcomes[2], RoundUndecided)
        swarm.check(outcomes)
