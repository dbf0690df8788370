"""Relays in simulated swarms, without the search for one's own reachability that real peers do."""

from __future__ import annotations

import asyncio

from swarmcli.dht import DHTNode
from swarmcli.dht.joining import RelayDirectory
from swarmcli.reach.circuits import RelayTransport
from swarmcli.reach.relaying import Relay, RelayBudgets
from swarmcli.reach.relays import Relays


class Relaying:
    """A peer's part in relaying, from `start` to `close`: it dials over relays. With `takes_part` it also carries the
    connections of others, or is reached over relays if it is in client mode."""

    def __init__(self, node: DHTNode, *, takes_part: bool = False, budgets: RelayBudgets | None = None) -> None:
        endpoint, directory = node.endpoint, RelayDirectory()
        directory.node = node
        self._transport = RelayTransport(endpoint, directory.where)
        endpoint.add_transport("relay", self._transport)
        self._endpoint = endpoint
        self._part: Relay | Relays | None = None
        if takes_part and endpoint.client_mode:
            self._part = Relays(endpoint, self._transport, find=directory.find)
        elif takes_part:
            self._part = Relay(endpoint, budgets or RelayBudgets(), publish=directory.publish)

    async def start(self, *, wait: bool = True) -> None:
        """Begins to relay; or to search for a relay, and waits until one is found and announced."""
        await self._transport.listen(self._endpoint.adopt)
        if self._part is not None:
            announced = asyncio.Event()
            unsubscribe = self._endpoint.events.subscribe(lambda _: announced.set())
            await self._part.start()
            while wait and not self._endpoint.addresses:
                announced.clear()
                await announced.wait()
            unsubscribe()

    async def close(self) -> None:
        """Idempotent."""
        if self._part is not None:
            await self._part.close()
