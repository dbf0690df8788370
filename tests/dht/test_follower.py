"""Reading changes only, and never missing one."""

from __future__ import annotations

import asyncio
from typing import Any

from swarmcli.dht import DHTNode, Follower
from swarmcli.dht.records import key_id
from swarmcli.dht.storage import Storage
from tests.simulation import simulated

from .swarm import Swarm, soon


def values(read: dict[Any, Any]) -> dict[Any, Any]:
    return {name: item.value for name, item in read.items()}


def received(node: DHTNode) -> int:
    return node.endpoint.statistics().traffic.received


async def filled(swarm: Swarm, subkeys: int) -> tuple[DHTNode, DHTNode, Follower]:
    nodes = await swarm.grow(6)
    reader = await swarm.node("reader", client_mode=True)
    names = [f"{number}" for number in range(subkeys)]
    await nodes[0].store_many(["key"] * subkeys, ["x" * 100] * subkeys, soon(nodes[0]), names)
    return nodes[0], reader, reader.follow("key")


@simulated
async def test_a_refresh_costs_what_has_changed() -> None:
    async with Swarm() as swarm:
        writer, reader, follower = await filled(swarm, 300)
        before = received(reader)
        assert len(await follower.refresh()) == 300
        whole = received(reader) - before
        before = received(reader)
        assert len(await follower.refresh()) == 300
        assert received(reader) - before < whole / 50
        await writer.store("key", "changed", soon(writer, 2000.0), subkey="7")
        before = received(reader)
        assert values(await follower.refresh())["7"] == "changed"
        assert received(reader) - before < whole / 20


@simulated
async def test_expired_and_withdrawn_subkeys_disappear() -> None:
    async with Swarm() as swarm:
        writer, _, follower = await filled(swarm, 3)
        mine = writer.own_subkey()
        await writer.store("key", "mine", soon(writer), subkey=mine)
        await writer.store("key", "short", soon(writer, 5.0), subkey="short")
        assert len(await follower.refresh()) == 5
        await writer.withdraw("key", mine)
        assert mine not in await follower.refresh()
        await asyncio.sleep(6.0)
        assert set(await follower.refresh()) == {"0", "1", "2"}
        await writer.store("key", "again", soon(writer), subkey=mine)
        assert values(await follower.refresh())[mine] == "again"


@simulated
async def test_it_is_right_when_replicas_restart_and_count_anew() -> None:
    """Every replica, one after the other, comes back empty under its old name; cursors into its past mean nothing."""

    async with Swarm() as swarm:
        writer, reader, follower = await filled(swarm, 20)
        await follower.refresh()
        for number in range(1, 6):
            old = swarm.nodes[number]
            await old.shutdown()
            swarm.nodes[number] = await swarm.node(number)
            swarm.nodes.pop()
            for _ in range(25):  # so that its count passes the old one
                await writer.store("key", f"life {number}", soon(writer, 2000.0 + number + _), subkey="changing")
            assert values(await follower.refresh())["changing"] == f"life {number}"
        fresh = await reader.follow("key").refresh()
        assert values(await follower.refresh()) == values(fresh)


@simulated
async def test_records_that_their_owner_had_replaced_are_ignored() -> None:
    async with Swarm() as swarm:
        keeper = await swarm.node("keeper", cache_locally=False)
        reader = await swarm.node("reader", client_mode=True)
        mine = keeper.own_subkey()
        await keeper.store("key", "old", soon(keeper), subkey=mine)
        (old,) = keeper.core.storage.records(key_id("key"))
        await keeper.store("key", "new", soon(keeper), subkey=mine)
        follower = reader.follow("key")
        assert values(await follower.refresh()) == {mine: "new"}
        keeper.core.storage = Storage(keeper.core.limits)  # a replica that forgot, or wants others to forget
        keeper.core.storage.put(old, keeper.core.now())
        follower._read.cursors.clear()
        assert values(await follower.refresh()) == {mine: "new"}
