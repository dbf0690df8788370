"""A peer comes into the network: its reach, its relays and its node of the hash table, in the order in which they need
each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from swarmcli.dht.node import DHTNode
from swarmcli.dht.records import OwnedSubkey, node_id
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import in_turns, prefix_of_address
from swarmcli.reach.circuits import open_circuits
from swarmcli.reach.reach import FIRST_VERDICT, PortMapping, Reach
from swarmcli.reach.relay_messages import MAX_RECORDS, RELAYS_KEY, RelayRecord, read_record
from swarmcli.reach.relaying import Relay, RelayBudgets
from swarmcli.reach.relays import Relays


class RelayDirectory:
    """Reads and writes the records of relays. Without a node it knows nothing: reach begins before there is one."""

    def __init__(self) -> None:
        self.node: DHTNode | None = None

    async def find(self) -> dict[PeerID, RelayRecord]:
        """Finds relays by the records that they signed: at most MAX_RECORDS, one of each network prefix before a second
        of any, chosen by lot. So a thousand identities of one network count as one relay.

        By lot and not the newest: whoever claims an honest relay's network would only have to write last.
        """
        if self.node is None:
            return {}
        records = await self._read(latest=True)
        ranked = in_turns(
            records, lambda peer: prefix_of_address(records[peer].addresses[0]), self.node.endpoint.random
        )
        return {peer: records[peer] for peer in ranked[:MAX_RECORDS]}

    async def publish(self, record: RelayRecord, seconds: float) -> bool:
        """Writes this peer's own record; whether anybody keeps it now."""
        if self.node is None:
            return False
        until = self.node.core.now() + seconds
        return await self.node.store(RELAYS_KEY, record.value(), until, self.node.own_subkey())

    async def where(self, relay: PeerID) -> tuple[str, ...]:
        """Addresses of a relay that another peer has named: from its record, else from the hash table's nodes near its
        id."""
        records = await self._read(latest=False)
        if relay in records:
            return records[relay].addresses
        if self.node is None:
            return ()
        core = self.node.core
        await core.explore(node_id(relay))
        return next((contact.addresses for contact in core.contacts.table if contact.peer_id == relay), ())

    async def _read(self, *, latest: bool) -> dict[PeerID, RelayRecord]:
        """The records of all relays. `latest`: from all replicas, since a single one might show only its friends."""
        found = None if self.node is None else await self.node.get(RELAYS_KEY, latest=latest)
        if found is None or not isinstance(found.value, dict):
            return {}
        records: dict[PeerID, RelayRecord] = {}
        for subkey, (value, _) in found.value.items():
            record = read_record(value)
            if isinstance(subkey, OwnedSubkey) and subkey.name == b"" and record is not None:
                records[subkey.owner] = record
        return records


async def join(
    endpoint: Endpoint,
    ends: AsyncExitStack,
    *,
    initial_peers: Sequence[str] = (),
    relays_within: RelayBudgets | None = None,
    mapping: Callable[[int], PortMapping] | None = None,
    **node_options: Any,
) -> tuple[DHTNode, Reach]:
    """A node on an endpoint that has been started, and what finds out whether others can dial it.

    `relays_within`: this peer relays for peers that cannot dial each other, within these budgets. `mapping`: see Reach.
    Returns once the node knows its neighbours and the first verdict is there or FIRST_VERDICT seconds have passed.
    `ends` closes both; the endpoint is the caller's. Raises what DHTNode.create raises.
    """
    directory = RelayDirectory()

    def contacts() -> list[PeerID]:
        return [] if directory.node is None else [contact.peer_id for contact in directory.node.core.contacts.table]

    relays = Relays(endpoint, await open_circuits(endpoint, directory.where), find=directory.find)
    # Reach starts before the first contact is dialed: what that contact sees shows at once where this peer can be
    # dialed, or that a dial-back has to. Meanwhile the node finds its neighbours.
    reach = Reach(endpoint, contacts=contacts, alone=not initial_peers, mapping=mapping, relays=relays)
    ends.push_async_callback(reach.close)
    await reach.start()
    if relays_within is not None:
        relay = Relay(endpoint, relays_within, publish=directory.publish)
        await relay.start()
        ends.push_async_callback(relay.close)
    node = await DHTNode.create(endpoint, initial_peers=initial_peers, owns_endpoint=False, **node_options)
    ends.push_async_callback(node.shutdown)
    directory.node = node
    await reach.settle(FIRST_VERDICT)
    return node, reach
