"""A peer comes into the network: its reach, its relays and its node of the hash table, in the order in which they need
each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from swarmcli.dht.node import DHTNode
from swarmcli.dht.relay_directory import RelayDirectory
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.reach.circuits import open_circuits
from swarmcli.reach.reach import PortMapping, Reach, ReachOptions
from swarmcli.reach.relaying import Relay, RelayBudgets
from swarmcli.reach.relays import Relays
from swarmcli.reach.verdict import Family

FIRST_VERDICT_SECONDS = 3.0  # that a peer with contacts beyond its own network waits to know whether it can be dialed


async def join(
    endpoint: Endpoint,
    ends: AsyncExitStack,
    *,
    initial_peers: Sequence[str] = (),
    options: ReachOptions = ReachOptions(),  # noqa: B008  a frozen value
    relay_budgets: RelayBudgets = RelayBudgets(),  # noqa: B008  a frozen value
    mapping: Callable[[int, Family], PortMapping] | None = None,
    **node_options: Any,
) -> tuple[DHTNode, Reach]:
    """A node on an endpoint that has been started, and what finds out whether others can dial it.

    Returns once the node knows its neighbours and the first verdict is there, or has been waited for long enough.
    `ends` closes both; the endpoint is the caller's. Raises what DHTNode.create raises.
    """
    directory = RelayDirectory()

    def contacts() -> list[PeerID]:
        return [] if directory.node is None else [contact.peer_id for contact in directory.node.core.contacts.table]

    relays = Relays(endpoint, await open_circuits(endpoint, directory.where), find=directory.find)
    # Before the first contact is met: what that one sees says at once where this peer can be dialed, or that a
    # dial-back has to show it. Meanwhile the node finds its neighbours.
    reach = Reach(endpoint, contacts=contacts, options=options, alone=not initial_peers, mapping=mapping, relays=relays)
    ends.push_async_callback(reach.close)
    await reach.start()
    if options.relay:
        relay = Relay(endpoint, relay_budgets, publish=directory.publish)
        await relay.start()
        ends.push_async_callback(relay.close)
    node = await DHTNode.create(endpoint, initial_peers=initial_peers, owns_endpoint=False, **node_options)
    ends.push_async_callback(node.shutdown)
    directory.node = node
    await reach.settle(FIRST_VERDICT_SECONDS)
    return node, reach
