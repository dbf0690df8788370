"""Swarms of optimizers in one process, under virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarmcli.dht import DHTNode
from swarmcli.events import Event, Events
from swarmcli.network.identity import Identity
from swarmcli.network.memory import MemoryNetwork
from swarmcli.network.rpc import Endpoint


async def make_node(
    network: MemoryNetwork, number: int, first: DHTNode | None = None, *, client_mode: bool = False
) -> DHTNode:
    """A node whose identity and randomness follow from its number; `first` is its first contact."""
    transport = network.transport(Identity.from_seed(number), listening=not client_mode)
    endpoint = Endpoint(transport, client_mode=client_mode, events=Events(), seed=number)
    await endpoint.start()
    contacts = [f"{address}/{first.peer_id.text}" for address in first.endpoint.info.addresses] if first else []
    return await DHTNode.create(endpoint, initial_peers=contacts)


@asynccontextmanager
async def nodes(count: int, *, clients: int = 0, seed: int = 0) -> AsyncIterator[list[DHTNode]]:
    """`count` nodes that know each other, the last `clients` of them in client mode."""
    network = MemoryNetwork(seed=seed)
    made = [await make_node(network, 0)]
    made += [await make_node(network, n, made[0], client_mode=n >= count - clients) for n in range(1, count)]
    try:
        yield made
    finally:
        for node in reversed(made):
            await node.shutdown()


def record(node: DHTNode, kind: type[Event]) -> list[Event]:
    """A list to which this peer's events of one kind are added from now on."""
    seen: list[Event] = []
    node.endpoint.events.subscribe(lambda event: seen.append(event) if isinstance(event, kind) else None)
    return seen
