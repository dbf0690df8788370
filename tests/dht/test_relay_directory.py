"""Relays in the hash table: found by their signed records, or by their place in it."""

from __future__ import annotations

from swarmcli.dht import DHTNode
from swarmcli.dht.relay_directory import RelayDirectory
from swarmcli.network import Identity
from swarmcli.reach.relay_records import RELAYS_KEY, RelayRecord
from swarmcli.testing import Swarm
from tests.simulation import simulated


def directory(node: DHTNode) -> RelayDirectory:
    made = RelayDirectory()
    made.node = node
    return made


@simulated
async def test_a_published_relay_is_found_by_its_signed_word_alone() -> None:
    async with Swarm(seed=1) as swarm:
        relay, other, reader = [await swarm.node() for _ in range(3)]
        record = RelayRecord(relay.endpoint.addresses, 0.25)
        assert await directory(relay).publish(record, 100)
        # What is not under a relay's own subkey, or is no record, counts for nothing.
        until = other.core.now() + 100
        await other.store(RELAYS_KEY, record.value(), until, b"somebody")
        await other.store(RELAYS_KEY, {"addresses": "no"}, until, other.own_subkey())
        assert await directory(reader).find() == {relay.peer_id: record}
        assert await directory(reader).where(relay.peer_id) == record.addresses


@simulated
async def test_a_relay_without_a_record_is_found_by_its_place() -> None:
    async with Swarm(seed=1) as swarm:
        nodes = [await swarm.node() for _ in range(6)]
        client = await swarm.node(client_mode=True)
        assert await directory(client).where(nodes[3].peer_id) == nodes[3].endpoint.addresses
        assert await directory(client).where(Identity.from_seed(77).peer_id) == ()


@simulated
async def test_before_there_is_a_node_nothing_is_known() -> None:
    empty = RelayDirectory()
    assert await empty.find() == {} and await empty.where(Identity.from_seed(1).peer_id) == ()
    assert not await empty.publish(RelayRecord(("tcp://192.0.2.1:1",)), 10)
