"""Members die and freeze at each step of a round and of its second try; the others share one outcome."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.errors import RoundUndecided
from tests.averaging.rounds import Kind, Swarm
from tests.simulation import now, within


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
