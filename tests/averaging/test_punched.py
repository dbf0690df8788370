"""Rounds among peers behind routers, over connections that both ends have dialed at once."""

from __future__ import annotations

import asyncio
from itertools import combinations

import pytest
import torch

from swarmcli.averaging import AveragerConfig, AveragerCore, RoundRequest, RoundResult
from swarmcli.dht import DHTNode
from swarmcli.testing import Swarm
from tests.averaging.averagers import all_begun
from tests.simulation import within
from tests.suites import soak


async def homes(swarm: Swarm, count: int) -> list[DHTNode]:
    """Peers behind a router each, and a public one that relays; all are connected directly once they have talked."""
    await swarm.node(host="5.1.0.1", relay=True)
    await swarm.node(host="5.9.0.1")
    routers = [swarm.network.router(f"5.{10 + number}.0.1") for number in range(count)]
    return [await swarm.node(host="192.168.1.2", behind=router) for router in routers]


def direct(nodes: list[DHTNode]) -> bool:
    pairs = [(a, b) for one, other in combinations(nodes, 2) for a, b in ((one, other), (other, one))]
    seen = [a.endpoint.seen(b.peer_id) for a, b in pairs]
    return all(each is not None and each.punched for each in seen)


async def one_round(cores: list[AveragerCore], timeout: float = 120.0) -> list[int]:
    """How many contributed, as each peer says; 0 from a peer whose round failed."""
    controls = [core.begin_round(RoundRequest(timeout=timeout)) for core in cores]
    ends = await asyncio.gather(*controls, return_exceptions=True)
    return [0 if isinstance(end, BaseException) else len(end.contributors) for end in ends]


@pytest.mark.parametrize("after", [1.0, *soak([0.2, 0.5, 2.0, 3.0])])
@within(600)
async def test_a_direct_path_that_is_cut_in_the_middle_of_a_round_leaves_all_with_equal_bits(
    after: float,
) -> None:
    async with Swarm(seed=1, latency=0.02) as swarm:
        nodes = await homes(swarm, 3)
        config = AveragerConfig(prefix="test")
        tensors = [[torch.full((20_000,), float(number))] for number in range(3)]
        cores = [await swarm.start(AveragerCore(own, node, config)) for own, node in zip(tensors, nodes, strict=True)]
        await one_round(cores)
        async with asyncio.timeout(60):
            while not direct(nodes):
                await one_round(cores)
        assert await one_round(cores) == [3, 3, 3]

        for node in nodes:
            swarm.network.set_bandwidth(node.peer_id, 4e4)
        for _ in range(3):  # what rounds take from now on is no surprise to anybody
            assert await one_round(cores) == [3, 3, 3]
        for number in range(3):
            tensors[number][0].fill_(float(number))
        controls = [core.begin_round(RoundRequest(timeout=120.0)) for core in cores]
        await all_begun(controls)
        await asyncio.sleep(after)
        swarm.network.cut(nodes[0].peer_id, nodes[1].peer_id)
        ends = await asyncio.gather(*controls, return_exceptions=True)
        # Each of the two ends misses parts of the other, and may find another group without it.
        done = [place for place, end in enumerate(ends) if isinstance(end, RoundResult)]
        assert len(done) >= 2
        groups = {ends[place].group.group_id: place for place in done}  # type: ignore[union-attr]
        for place in done:
            assert torch.equal(tensors[place][0], tensors[groups[ends[place].group.group_id]][0])  # type: ignore[union-attr]
        async with asyncio.timeout(300):  # whoever was waited for in vain has no seat in the next group
            while await one_round(cores, 20.0) != [3, 3, 3]:
                pass
