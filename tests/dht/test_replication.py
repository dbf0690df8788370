"""Records stay where they are found while nodes come and go, also when two halves did not see each other."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.dht import DHTLimits, DHTNode
from swarmcli.dht.records import key_id, node_id
from swarmcli.dht.storage import Storage
from tests.simulation import simulated
from tests.suites import soak

from .swarm import QUIET, Swarm, address, soon


def holders(swarm: Swarm, key: str) -> set[int]:
    """Numbers of the nodes that hold a key."""
    target = key_id(key)
    return {number for number, node in enumerate(swarm.nodes) if node.core.storage.entry(target, 0.0) is not None}


def nearest(swarm: Swarm, key: str) -> set[int]:
    numbers = range(len(swarm.nodes))
    return set(sorted(numbers, key=lambda n: node_id(swarm.nodes[n].peer_id) ^ key_id(key))[:5])


@simulated
async def test_records_move_to_newcomers_that_are_nearer() -> None:
    async with Swarm(limits=QUIET) as swarm:
        nodes = await swarm.grow(5)
        keys = [f"key {number}" for number in range(20)]
        mine = nodes[1].own_subkey()
        await nodes[1].store_many(keys, keys, soon(nodes[1]), [mine] * 20)
        await swarm.grow(15)
        await asyncio.sleep(10.0)
        for key in keys:
            assert holders(swarm, key) >= nearest(swarm, key)


@simulated
async def test_replicas_that_missed_something_are_brought_up_to_date() -> None:
    """Without any change among the contacts that would give the occasion."""

    async with Swarm(limits=QUIET) as swarm:
        nodes = await swarm.grow(5, limits=DHTLimits(sync_interval=30.0))
        await nodes[0].store("key", 1, soon(nodes[0]), subkey="a")
        await asyncio.sleep(10.0)
        nodes[2].core.storage = Storage(DHTLimits())
        assert holders(swarm, "key") == {0, 1, 3, 4}
        await asyncio.sleep(60.0)
        assert holders(swarm, "key") == {0, 1, 2, 3, 4}


async def populated(swarm: Swarm, count: int, keys: list[str]) -> list[DHTNode]:
    """Nodes of which every one has stored something; each seventh key has subkeys of several writers."""
    nodes = await swarm.grow(count)
    for number, key in enumerate(keys):
        writer = nodes[number % count]
        assert await writer.store(key, number, soon(writer, 5000.0), subkey="of one" if number % 7 == 0 else None)
        if number % 7 == 0:
            other = nodes[(number * 13 + 5) % count]
            assert await other.store(key, -number, soon(other, 5000.0), subkey=other.own_subkey())
    return nodes


@pytest.mark.parametrize("count", [20, *soak([60, 200])])
@simulated
async def test_a_fifth_of_the_nodes_killed_at_once_loses_no_live_record(count: int) -> None:
    """And again after half a minute, which only copies that were made anew survive."""
    async with Swarm(1, limits=QUIET) as swarm:
        keys = [f"key {number}" for number in range(28)]
        nodes = await populated(swarm, count, keys)
        living = list(nodes)
        for _ in range(2):
            for node in swarm.network.random.sample(living, count // 5):
                swarm.kill(node)
                living.remove(node)
            for number, key in enumerate(keys):
                reader = living[(number * 7) % len(living)]
                found = await reader.get(key, latest=True)
                assert found is not None, f"{key} is lost"
                if number % 7 == 0:
                    assert sorted(item.value for item in found.value.values()) == sorted([number, -number])
                else:
                    assert found.value == number
            await asyncio.sleep(30.0)


@pytest.mark.parametrize("minutes", [1.0, *soak([10.0])])
@simulated
async def test_after_a_partition_everyone_reads_what_either_half_stored(minutes: float) -> None:
    async with Swarm(5, limits=QUIET) as swarm:
        nodes = await swarm.grow(12)
        one, other = nodes[::2], nodes[1::2]
        await nodes[0].store("before", 0, soon(nodes[0], 1e4))
        swarm.network.partition([node.peer_id for node in one], [node.peer_id for node in other])
        await asyncio.sleep(60.0 * minutes)
        for half, name in ((one, "one"), (other, "other")):
            assert await half[3].store("shared", name, soon(half[3], 1e4), subkey=name)
            assert await half[4].store(f"only {name}", name, soon(half[4], 1e4))
            assert (await half[5].get(f"only {name}", latest=True)).value == name  # type: ignore[union-attr]
            assert (await half[5].get("before", latest=True)) is not None
        assert await one[2].get("only other", latest=True) is None
        swarm.network.heal()
        await asyncio.sleep(900.0)
        for node in nodes:
            shared = await node.get("shared", latest=True)
            assert shared is not None and {name: item.value for name, item in shared.value.items()} == {
                "one": "one",
                "other": "other",
            }
            for name in ("one", "other"):
                assert (await node.get(f"only {name}", latest=True)).value == name  # type: ignore[union-attr]


@simulated
async def test_two_networks_merge_when_a_first_contact_comes_up() -> None:
    """The second network's founder was given an address where nobody listened yet, beside one that answered."""

    async with Swarm(6, limits=QUIET) as swarm:
        left = await swarm.grow(4)
        founder = await swarm.node("founder", [])
        late = await swarm.endpoint("late")
        late_address = f"{late.addresses[0]}/{late.peer_id.text}"
        swarm.network.partition([late.peer_id])
        follower = await swarm.node("follower", [address(founder), late_address])
        swarm.network.heal()
        swarm.nodes.append(await DHTNode.create(late, initial_peers=[address(left[0])]))
        await left[1].store("key", "left", soon(left[1]))
        await asyncio.sleep(200.0)
        for node in (founder, follower):
            assert (await node.get("key", latest=True)).value == "left"  # type: ignore[union-attr]


@simulated
async def test_a_node_that_was_cut_off_from_everyone_finds_back_at_once() -> None:
    async with Swarm(7, limits=QUIET) as swarm:
        nodes = await swarm.grow(6)
        await nodes[0].store("key", 1, soon(nodes[0], 1e4))
        lonely = await swarm.node("lonely", client_mode=True)
        swarm.network.partition([lonely.peer_id])
        for _ in range(4):
            await lonely.get(f"missing {_}", latest=True)
        assert len(lonely.core.contacts.table) == 0
        swarm.network.heal()
        assert (await lonely.get("key", latest=True)).value == 1, "the contacts lost last are asked again"  # type: ignore[union-attr]
