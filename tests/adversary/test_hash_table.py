"""Each lie of the hash table beside honest nodes: what it may achieve at most."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from swarmcli.dht import DHTLimits, DHTNode, messages
from swarmcli.dht.joining import RelayDirectory
from swarmcli.dht.lookup import MOST_MISSED
from swarmcli.dht.records import OwnedSubkey, encode_subkey, key_id, node_id
from swarmcli.reach.relay_messages import RELAYS_KEY, RelayRecord
from swarmcli.testing import Swarm
from tests.adversary.lies import LIES, Liar
from tests.simulation import now, simulated

NAMES = sorted(lie.name for lie in LIES.values() if lie.layer == "hash table")
HONEST = 6


async def beside(swarm: Swarm, name: str) -> tuple[list[DHTNode], Liar]:
    """Honest nodes and one liar, whom they all know; it lies as soon as there is something to lie about."""
    honest = [await swarm.node() for _ in range(HONEST)]
    node = await swarm.node()
    await honest[0].store("run", "there first", honest[0].core.now() + 1000, honest[0].own_subkey())
    liar = Liar(random.Random(1), node.endpoint, node)
    LIES[name].tell(liar)
    return honest, liar


@pytest.mark.parametrize("name", NAMES)
@simulated
async def test_honest_nodes_keep_their_records_and_their_pace(name: str) -> None:
    """Beside any of them: every honest record is found, in its newest version, and nobody waits for long."""
    async with Swarm(seed=1) as swarm:
        honest, liar = await beside(swarm, name)
        await asyncio.sleep(5.0)
        for turn in range(2):
            began = now()
            for node in honest:
                words, until = f"{turn} of {node.peer_id.text}", node.core.now() + 600
                assert await node.store("run", words, until, node.own_subkey())
            for reader in honest:
                found = await reader.get("run", latest=True)
                assert found is not None
                for node in honest:
                    assert found.value[OwnedSubkey(node.peer_id)].value == f"{turn} of {node.peer_id.text}"
            assert now() - began < 15.0
            await asyncio.sleep(12.0)
        assert liar.told, "it has lied"
        if name in AT_MOST:
            await AT_MOST[name](swarm, honest, liar)


async def share_of_a_key(swarm: Swarm, honest: list[DHTNode], liar: Liar) -> None:
    limits = DHTLimits()
    for node in honest:
        held = node.core.storage.records(key_id("run"))
        assert 0 < len(held) <= limits.max_subkeys // limits.prefixes_in_key + HONEST


async def share_of_a_node(swarm: Swarm, honest: list[DHTNode], liar: Liar) -> None:
    for node in honest:
        assert 0 < node.core.storage.size <= DHTLimits().storage_per_prefix + (1 << 20)


async def some_dials_and_then_hardly_any(swarm: Swarm, honest: list[DHTNode], liar: Liar) -> None:
    reader = honest[1]
    known = {node.peer_id for node in swarm.nodes}
    before = len(swarm.network.dials)
    for _ in range(10):
        await reader.core.explore(node_id(reader.peer_id))
    assert messages.FIND in liar.told
    assert len(swarm.network.dials) - before < 10 * (MOST_MISSED + 3)
    assert {contact.peer_id for contact in reader.core.contacts.table} <= known


async def share_of_the_relays(swarm: Swarm, honest: list[DHTNode], liar: Liar) -> None:
    for node in honest[:3]:
        directory = RelayDirectory()
        directory.node = node
        assert await directory.publish(RelayRecord(node.endpoint.addresses), 900)
    directory.node = honest[5]
    for node in honest:
        assert len(node.core.storage.records(key_id(RELAYS_KEY))) <= DHTLimits().max_directory
    found = [await directory.find() for _ in range(20)]
    for node in honest[:3]:
        assert sum(node.peer_id in each for each in found) >= 3, "each search draws again"


async def one_replica(swarm: Swarm, honest: list[DHTNode], liar: Liar) -> None:
    for number in range(20):
        assert await honest[0].store(f"key {number}", number, honest[0].core.now() + 600)
        holders = [node for node in honest if node.core.storage.find(key_id(f"key {number}"), encode_subkey(None))]
        assert len(holders) >= honest[0].core.num_replicas - 1


AT_MOST: dict[str, Callable[[Swarm, list[DHTNode], Liar], Awaitable[None]]] = {
    "fills keys with throwaway identities": share_of_a_key,
    "fills the storage": share_of_a_node,
    "invents contacts": some_dials_and_then_hardly_any,
    "stores a thousand relays that are none": share_of_the_relays,
    "hides records": one_replica,
}
