"""Reading changes only, and never missing one."""

from __future__ import annotations

import asyncio
from typing import Any

from swarmcli.dht import DHTLimits, DHTNode, Follower
from swarmcli.dht.records import key_id
from swarmcli.dht.storage import Storage
from tests.simulation import simulated

from .swarm import Swarm, address, identity, soon


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
async def test_a_cursor_into_another_life_is_not_mistaken_for_this_one() -> None:
    """The only replica comes back with nothing and has counted less than before: what it counts now is new."""

    async with Swarm() as swarm:
        keeper = await swarm.node("keeper", [])
        known = [address(keeper)]
        reader = await swarm.node("reader", known, client_mode=True)
        writer = await swarm.node("writer", known, client_mode=True)
        follower = reader.follow("key")
        for number in range(10):
            await writer.store("key", "first life", soon(writer), subkey=f"{number}")
        assert len(await follower.refresh()) == 10
        swarm.nodes.remove(keeper)
        await keeper.shutdown()
        await swarm.node("keeper", [])
        await asyncio.sleep(60.0)
        assert await writer.store("key", "second life", soon(writer, 2000.0), subkey="0")
        assert values(await follower.refresh())["0"] == "second life"


@simulated
async def test_it_moves_on_to_other_replicas() -> None:
    async with Swarm() as swarm:
        nodes = await swarm.grow(12)
        reader = await swarm.node("reader", client_mode=True)
        follower = reader.follow("key")
        assert await follower.refresh() == {}
        await nodes[0].store("key", 0, soon(nodes[0]), subkey="first")
        assert values(await follower.refresh()) == {"first": 0}
        for node in [node for node in nodes[1:] if node.core.storage.count()][:3]:
            swarm.kill(node)
        assert values(await follower.refresh()) == {"first": 0}
        await asyncio.sleep(5.0)
        assert await reader.store("key", 1, soon(reader), subkey="second")
        assert values(await follower.refresh()) == {"first": 0, "second": 1}


@simulated
async def test_it_reads_where_others_write_as_soon_as_the_network_has_grown() -> None:
    """The first three keep all there is. Seconds later twelve more are there, and nobody writes to the three any more,
    nor does anybody hand on to them."""

    async with Swarm() as swarm:
        first, *_ = await swarm.grow(3)
        keys = [f"key {number}" for number in range(16)]
        followers = [first.follow(key) for key in keys]
        for follower in followers:
            assert await follower.refresh() == {}
        writer = (await swarm.grow(12))[-1]
        await writer.store_many(keys, keys, soon(writer), ["name"] * len(keys))
        assert [values(await follower.refresh()) for follower in followers] == [{"name": key} for key in keys]


@simulated
async def test_a_replica_may_follow_what_it_holds_itself() -> None:
    async with Swarm() as swarm:
        first, second = await swarm.grow(2)
        follower = first.follow("key")
        for number in range(3):
            await second.store("key", number, soon(second), subkey=f"{number}")
            assert len(await follower.refresh()) == number + 1


@simulated
async def test_long_answers_come_in_pages_and_a_change_in_between_is_not_lost() -> None:
    async with Swarm() as swarm:
        limits = DHTLimits(max_reply=10_000)
        keeper = await swarm.node("keeper", limits=limits)
        reader = await swarm.node("reader", client_mode=True, limits=limits)
        names = [f"{number}" for number in range(100)]
        await keeper.store_many(["key"] * 100, ["x" * 500] * 100, soon(keeper), names)
        reading = asyncio.create_task(reader.follow("key").refresh())
        await asyncio.sleep(0.05)
        await keeper.store("key", "changed", soon(keeper, 2000.0), subkey="0")
        found = values(await reading)
        assert len(found) == 100 and found["0"] == "changed"


@simulated
async def test_records_that_their_owner_had_replaced_are_ignored_and_counted() -> None:
    async with Swarm() as swarm:
        keeper = await swarm.node("keeper", cache_locally=False)
        reader = await swarm.node("reader", client_mode=True)
        mine = keeper.own_subkey()
        await keeper.store("key", "old", soon(keeper), subkey=mine)
        (old,) = keeper.core.storage.records(key_id("key"))
        await keeper.store("key", "new", soon(keeper), subkey=mine)
        follower = reader.follow("key")
        assert values(await follower.refresh()) == {mine: "new"} and follower.outdated == 0
        keeper.core.storage = Storage(keeper.core.limits)  # a replica that forgot, or wants others to forget
        keeper.core.storage.put(old, keeper.core.now())
        follower._read.cursors.clear()
        assert values(await follower.refresh()) == {mine: "new"} and follower.outdated == 1


@simulated
async def test_a_node_writes_and_withdraws_for_another_identity_too() -> None:
    async with Swarm() as swarm:
        writer, reader = await swarm.grow(2)
        other = identity("not a node's")
        subkey = writer.own_subkey(identity=other)
        assert subkey.owner == other.peer_id != writer.peer_id
        assert await writer.store("key", 1, soon(writer), subkey=subkey)
        again = reader.own_subkey(identity=other)  # the same owner, on another machine, goes on
        assert again == subkey and await reader.store("key", 2, soon(reader), subkey=again)
        follower = writer.follow("key")
        assert values(await follower.refresh()) == {subkey: 2}
        assert await writer.withdraw("key", subkey)
        assert await follower.refresh() == {}
