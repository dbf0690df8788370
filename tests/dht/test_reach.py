"""Nodes of the hash table that others cannot dial, or can no longer, or can again."""

from __future__ import annotations

import asyncio

from swarmcli.dht import DHTNode
from swarmcli.reach.evidence import CheckOptions
from swarmcli.testing import Swarm
from tests.simulation import simulated


def knows(node: DHTNode, other: DHTNode) -> bool:
    return other.peer_id in node.core.contacts.table


@simulated
async def test_a_node_enters_and_leaves_the_routing_tables_as_its_router_lets_others_in():
    async with Swarm(seed=4) as swarm:
        public = [await swarm.node(host=f"5.{number}.0.1") for number in (1, 2, 3)]
        router = swarm.network.router("5.9.0.1")
        home = await swarm.node(host="192.168.1.2", behind=router)
        router.forward(4000, home.peer_id)
        await asyncio.sleep(1.5 * CheckOptions().rest)
        assert not home.client_mode and all(knows(node, home) for node in public)
        assert public[0].core.contacts.table.get(home.peer_id).addresses == ("memory://5.9.0.1:4000",)  # type: ignore[union-attr]
        assert await public[1].store("key", "value", home.endpoint.clock.now() + 80000)
        assert home.core.storage.keys(home.core.now())  # it keeps records for others

        router.forget(4000)
        await asyncio.sleep(1.5 * CheckOptions().rest)
        assert home.client_mode and not any(knows(node, home) for node in public)
        swarm.network.dials.clear()
        await asyncio.sleep(0.5 * CheckOptions().rest)
        assert (await home.get("key", latest=True)) is not None
        assert len([address for _, address in swarm.network.dials if "5.9." in address]) <= 6
