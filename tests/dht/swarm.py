"""Nodes on a memory network under virtual time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

from swarmcli.clock import Clock
from swarmcli.dht import DHTNode
from swarmcli.dht.routing import Contact
from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.testing.memory_network import MemoryNetwork
from swarmcli.testing.virtual_time import EPOCH

# Hundreds of nodes would spend their virtual minutes on keepalives, which are tested elsewhere. Who looks once a minute
# only must not take that for sleep: it would make all its connections anew each time.
QUIET = NetworkLimits(
    keepalive_interval=60.0, keepalive_idle_interval=120.0, keepalive_timeout=120.0, asleep_after=300.0
)


class Swarm:
    """Makes nodes and closes them: `async with Swarm() as swarm`."""

    def __init__(self, seed: int = 0, *, limits: NetworkLimits | None = None, **network: Any) -> None:
        self.network = MemoryNetwork(seed=seed, **network)
        self.nodes: list[DHTNode] = []
        self._endpoints: list[Endpoint] = []
        self._limits = limits
        self._seed = seed
        self._lives = 0

    async def endpoint(self, name: object, *, client_mode: bool = False, ahead: float = 0.0) -> Endpoint:
        """A started endpoint whose machine's clock is `ahead` of the true time by so many seconds."""
        transport = self.network.transport(identity(name), listening=not client_mode, limits=self._limits)
        loop = asyncio.get_running_loop()
        clock = Clock(wall=lambda: EPOCH + loop.time() + ahead)
        self._lives += 1  # a peer that starts anew must not draw the same numbers again
        seed = zlib.crc32(f"{self._seed} {name} {self._lives}".encode())
        endpoint = Endpoint(transport, clock=clock, client_mode=client_mode, seed=seed)
        self._endpoints.append(endpoint)
        await endpoint.start()
        return endpoint

    async def stranger(self, node: DHTNode, name: object = "stranger", *, client_mode: bool = True) -> Endpoint:
        """A peer that is no node, connected with this node."""
        endpoint = await self.endpoint(name, client_mode=client_mode)
        await endpoint.connect(address(node), timeout=5.0)
        return endpoint

    async def node(
        self,
        name: object,
        initial_peers: Sequence[str] | None = None,
        *,
        client_mode: bool = False,
        ahead: float = 0.0,
        **options: Any,
    ) -> DHTNode:
        """A node that knows the first one, unless told otherwise."""
        if initial_peers is None:
            initial_peers = [address(self.nodes[0])] if self.nodes else []
        endpoint = await self.endpoint(name, client_mode=client_mode, ahead=ahead)
        node = await DHTNode.create(endpoint, initial_peers=initial_peers, **options)
        self.nodes.append(node)
        return node

    async def grow(self, count: int, **options: Any) -> list[DHTNode]:
        """Adds `count` nodes, one after the other, each through one that is there already."""
        start = len(self.nodes)
        for number in range(start, start + count):
            known = [address(self.network.random.choice(self.nodes))] if self.nodes else []
            await self.node(number, known, **options)
        return self.nodes[start:]

    def kill(self, node: DHTNode) -> None:
        """Like SIGKILL."""
        self.network.kill(node.peer_id)

    async def __aenter__(self) -> Swarm:
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes:
            await node.shutdown()
        for endpoint in self._endpoints:
            await endpoint.close()


def identity(name: object) -> Identity:
    return Identity.from_seed(f"dht test {name}".encode())


def address(node: DHTNode) -> str:
    """In the form that `initial_peers` takes."""
    return f"{node.endpoint.addresses[0]}/{node.peer_id.text}"


def soon(node: DHTNode, seconds: float = 1000.0) -> float:
    """An expiration time."""
    return node.endpoint.clock.now() + seconds


def contact(number: int) -> Contact:
    """The contact of a peer that does not exist."""
    return Contact(PeerID(number.to_bytes(32, "big")), (f"memory://{number}",))
