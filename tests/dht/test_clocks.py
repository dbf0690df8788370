"""Peers whose clocks are ten minutes off store, read and withdraw like any others."""

from __future__ import annotations

import asyncio

from tests.simulation import simulated

from .swarm import Swarm, soon


@simulated
async def test_wrong_clocks_do_not_matter() -> None:
    async with Swarm() as swarm:
        for number, ahead in enumerate([600, -600, 600, *[0] * 4]):
            await swarm.node(number, ahead=ahead)
        nodes = swarm.nodes
        for writer in nodes:
            mine = writer.own_subkey()
            assert await writer.store("key", 1, soon(writer, 30.0), subkey=mine)
        for reader in nodes:
            found = await reader.get("key", latest=True)
            assert found is not None and set(found.value) == {node.own_subkey() for node in nodes}
        assert await nodes[-1].withdraw("key", nodes[-1].own_subkey())
        assert await nodes[0].withdraw("key", nodes[0].own_subkey())
        for reader in nodes:
            found = await reader.get("key", latest=True)
            left = set() if found is None else set(found.value)
            assert left == {node.own_subkey() for node in nodes[1:-1]}
        await asyncio.sleep(45.0)
        for reader in nodes:
            assert await reader.get("key", latest=True) is None, "expired for everyone"
