"""Members behind unlike links: who is slow, out or in, takes its own time and nobody else's."""

from __future__ import annotations

import asyncio

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from tests.averaging.rounds import Kind, Swarm
from tests.simulation import simulated

MBIT = 1e6 / 8
SIZE = 2 << 20  # bytes of each member's vector
PARTS = AllreduceOptions(part_size_bytes=32 << 10, audit=0)  # or a part that is drawn by chance counts as well


def peers_of(*bandwidths: float) -> Swarm:
    return Swarm([Kind(bandwidth=bandwidth) for bandwidth in bandwidths], shapes=((SIZE // 4,),), options=PARTS)


async def ends(swarm: Swarm) -> list[float]:
    """One round; seconds after which each member has its result."""
    loop, group = asyncio.get_running_loop(), swarm.group()
    began = loop.time()

    async def until_done(index: int) -> float:
        outcome = await swarm.take_part(swarm.peers[index], group)
        assert isinstance(outcome, RoundResult) and not outcome.left_out
        return loop.time() - began

    return list(await asyncio.gather(*(until_done(index) for index in range(len(swarm.peers)))))


@simulated
async def test_who_receives_slowly_does_not_hold_the_others_back() -> None:
    async with peers_of(0, 100, 100, 100) as swarm:
        swarm.network.set_bandwidths(swarm.peers[0].peer_id, uplink=100 * MBIT, downlink=5 * MBIT)
        for peer in swarm.peers[1:]:
            swarm.network.set_bandwidth(peer.peer_id, 100 * MBIT)
        slow, *others = await ends(swarm)
        assert slow >= SIZE / (5 * MBIT)
        assert max(others) < slow / 4  # with two round trips more than if all had voted


@simulated
async def test_equal_links_are_used_nearly_in_full() -> None:
    async with peers_of(100, 100, 100, 100) as swarm:
        for peer in swarm.peers:
            swarm.network.set_bandwidth(peer.peer_id, 20 * MBIT)
        allowed = 2 * 3 / 4 * SIZE / (20 * MBIT)
        assert max(await ends(swarm)) < allowed / 0.85
