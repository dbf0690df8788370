"""A swarm whose relays come and go: peers behind routers keep reaching each other."""

from __future__ import annotations

import asyncio

from swarmcli.dht import DHTNode
from swarmcli.errors import NetworkError
from swarmcli.testing import Swarm
from tests.network.worlds import Number, double, reaches
from tests.simulation import simulated

CLIENTS, RELAYS = 3, 4


async def until_reached(peers: list[DHTNode], within: float) -> None:
    """Each pair calls until it gets through."""

    async def one(a: DHTNode, b: DHTNode) -> None:
        async with asyncio.timeout(within):
            while True:
                try:
                    if await reaches(a.endpoint, b.endpoint):
                        return
                except NetworkError:
                    await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        for a in peers:
            for b in peers:
                if a is not b:
                    group.create_task(one(a, b))


@simulated
async def test_relays_are_killed_one_after_the_other_and_all_pairs_keep_reaching_each_other() -> None:
    async with Swarm(seed=1, latency=0.02) as swarm:
        first = await swarm.node(host="5.0.0.1")  # the contact of all, which does not relay
        relays = [await swarm.node(host=f"5.{number}.0.1", relay=True) for number in range(1, RELAYS)]
        clients = []
        for number in range(CLIENTS):
            # Whoever is dialed sees another port, so there is no way around the relays.
            home = swarm.network.router(f"5.{100 + number}.0.1", translation="dependent")
            clients.append(await swarm.node(host="192.168.1.2", behind=home))
            clients[-1].endpoint.serve("double", Number, double)
        await asyncio.sleep(10)
        assert all(len(client.endpoint.addresses) == 2 for client in clients)
        for a in clients:
            for b in clients:
                a.endpoint.learn(b.peer_id, b.endpoint.addresses)
        await until_reached(clients, 10)
        for number in range(RELAYS, RELAYS + 2):
            relays.append(await swarm.node(host=f"5.{number}.0.1", relay=True))
            await asyncio.sleep(10)  # it advertises itself
            swarm.kill(relays.pop(0))
            await until_reached(clients, 15)
            await asyncio.sleep(20)
            assert all(len(client.endpoint.addresses) == 2 for client in clients)
            await until_reached(clients, 1)
        assert first.endpoint.direct_addresses and not any(client.endpoint.direct_addresses for client in clients)
        for a in clients:
            for b in clients:
                seen = a.endpoint.seen(b.peer_id)
                assert a is b or (seen is not None and seen.relayed)
