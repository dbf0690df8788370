"""Whole swarms in one process: the same seed gives the same run, and nothing of them is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarmcli.dht import DHTNode
from swarmcli.errors import PeerUnreachable
from swarmcli.testing import Swarm, run
from tests.simulation import simulated


async def store_and_get(swarm: Swarm) -> list[Any]:
    nodes = [await swarm.node(client_mode=number == 3) for number in range(4)]
    expires = nodes[0].endpoint.clock.now() + 60
    await nodes[3].store("key", "value", expires)
    return [(await node.get("key")).value for node in nodes]


@simulated
async def test_nodes_find_each_other_and_end_with_the_swarm() -> None:
    async with Swarm(seed=1, loss=0.1) as swarm:
        assert await store_and_get(swarm) == ["value"] * 4


def test_what_stands_on_a_node_ends_before_it() -> None:
    story: list[str] = []

    class Peer:
        def __init__(self, node: DHTNode) -> None:
            self.node = node

        async def start(self) -> None:
            story.append("started")

        async def shutdown(self) -> None:
            await self.node.get("anything")  # the node still works
            story.append("ended")

    async def main() -> None:
        async with Swarm() as swarm:
            await swarm.start(Peer(await swarm.node()))
            story.append("used")

    run(main(), timeout=600)
    assert story == ["started", "used", "ended"]


@simulated
async def test_a_killed_peer_answers_nobody() -> None:
    async with Swarm() as swarm:
        one, other = await swarm.node(), await swarm.node()
        swarm.kill(one)
        await asyncio.sleep(1)
        with pytest.raises(PeerUnreachable):
            await other.endpoint.call(one.peer_id, "dht.ping", None, bytes, timeout=30)
