"""Two halves of a network that could not see each other become one again."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.dht import DHTNode
from tests.simulation import simulated
from tests.suites import soak

from .swarm import QUIET, Swarm, address, soon


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
