"""Nodes that others cannot dial, and relays in the hash table: found by their signed records, or by their place."""

from __future__ import annotations

import asyncio

from swarmcli.dht import DHTNode
from swarmcli.dht.joining import RelayDirectory
from swarmcli.dht.records import OwnedSubkey, Record, encode_subkey, encode_value, sign_record
from swarmcli.dht.storage import RecordWriter
from swarmcli.network import Identity
from swarmcli.network.prefix import prefix_of
from swarmcli.reach.reach import REST
from swarmcli.reach.relay_messages import RELAYS_KEY, RelayRecord
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
        record = RelayRecord(relay.endpoint.addresses)
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
async def test_hundreds_of_identities_of_one_network_hide_no_honest_relay() -> None:
    """They write as fast as they like, before the honest ones come; the records claim networks of their own, too."""
    async with Swarm(seed=1) as swarm:
        first, reader = [await swarm.node() for _ in range(2)]
        core = first.core
        for number in range(300):
            owner = Identity.from_seed(number + 100)
            claimed = f"tcp://203.0.{number % 250}.1:1" if number % 2 else "tcp://198.51.100.1:1"
            value = encode_value(RelayRecord((claimed,)).value())
            record = Record(RELAYS_KEY, encode_subkey(OwnedSubkey(owner.peer_id)), value, core.now() + 900, sequence=1)
            core.accept(sign_record(owner, record), RecordWriter(owner.peer_id, prefix_of("198.51.100.1")))
        relays = [await swarm.node() for _ in range(8)]
        for relay in relays:
            assert await directory(relay).publish(RelayRecord(relay.endpoint.addresses), 900)
        seen = [await directory(reader).find() for _ in range(10)]
        assert all(len(found) <= 64 for found in seen)
        assert all(relay.peer_id in found for relay in relays for found in seen)
        assert {found[relays[0].peer_id] for found in seen} == {RelayRecord(relays[0].endpoint.addresses)}


@simulated
async def test_of_more_networks_than_are_read_some_are_drawn_by_lot() -> None:
    async with Swarm(seed=1) as swarm:
        node, reader = [await swarm.node() for _ in range(2)]
        for number in range(200):
            owner = Identity.from_seed(number + 100)
            value = encode_value(RelayRecord((f"tcp://20.1.{number}.1:1",)).value())
            record = Record(RELAYS_KEY, encode_subkey(OwnedSubkey(owner.peer_id)), value, node.core.now() + 900, 1)
            node.core.accept(sign_record(owner, record), RecordWriter(owner.peer_id, prefix_of(f"20.1.{number}.1")))
        seen = [set(await directory(reader).find()) for _ in range(20)]
        assert all(len(found) == 64 for found in seen) and len(set().union(*seen)) > 190


def knows(node: DHTNode, other: DHTNode) -> bool:
    return other.peer_id in node.core.contacts.table


@simulated
async def test_a_node_enters_and_leaves_the_routing_tables_as_its_router_lets_others_in():
    async with Swarm(seed=4) as swarm:
        public = [await swarm.node(host=f"5.{number}.0.1") for number in (1, 2, 3)]
        router = swarm.network.router("5.9.0.1")
        home = await swarm.node(host="192.168.1.2", behind=router)
        router.forward(4000, home.peer_id)
        await asyncio.sleep(1.5 * REST)
        assert not home.client_mode and all(knows(node, home) for node in public)
        assert public[0].core.contacts.table.get(home.peer_id).addresses == ("memory://5.9.0.1:4000",)  # type: ignore[union-attr]
        assert await public[1].store("key", "value", home.endpoint.clock.now() + 80000)
        assert home.core.storage.keys(home.core.now())  # it keeps records for others

        router.forget(4000)
        await asyncio.sleep(1.5 * REST)
        assert home.client_mode and not any(knows(node, home) for node in public)
        swarm.network.dials.clear()
        await asyncio.sleep(0.5 * REST)
        assert (await home.get("key", latest=True)) is not None
        assert len([address for _, address in swarm.network.dials if "5.9." in address]) <= 6
