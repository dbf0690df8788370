"""Whole swarms on one memory network."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol, TypeVar

from swarmcli.dht import DHTNode
from swarmcli.dht.joining import join
from swarmcli.network import Endpoint, Identity, NetworkLimits, PeerID
from swarmcli.reach.reach import Reach
from swarmcli.reach.relaying import RelayBudgets
from swarmcli.testing.memory_network import MemoryNetwork
from swarmcli.testing.memory_router import MemoryRouter


class Startable(Protocol):
    """A core that runs on a node: AveragerCore, OptimizerCore, AuxiliaryCore."""

    async def start(self) -> None: ...
    async def shutdown(self) -> None: ...


S = TypeVar("S", bound=Startable)


class Swarm:
    """Makes peers and ends them: `async with Swarm(seed=1) as swarm`, under virtual time."""

    def __init__(self, *, seed: int = 0, limits: NetworkLimits | None = None, **network: Any) -> None:
        """`network`: options of MemoryNetwork. Everything random follows from `seed` and the peers' numbers."""
        self.network = MemoryNetwork(seed=seed, **network)
        self.nodes: list[DHTNode] = []
        self.reach: dict[PeerID, Reach] = {}  # of peers that were given a host
        self._seed = seed
        self._limits = limits
        self._ends = contextlib.AsyncExitStack()

    async def node(
        self,
        *,
        client_mode: bool = False,
        host: str = "",
        port: int = 4000,
        behind: MemoryRouter | None = None,
        relay: bool = False,
    ) -> DHTNode:
        """A peer with an endpoint and a node of the hash table. Its first contact is the swarm's first node.

        With a `host` (5.1.0.1 on the internet; 192.168.1.2 `behind` a router of the network) it finds out by itself
        whether others can dial it, and is reached over relays if they cannot; with `relay` it relays for others.
        Without a host, everybody can dial it.
        """
        number = len(self.nodes)
        transport = self.network.transport(
            Identity.from_seed(f"swarm {self._seed} peer {number}".encode()),
            listening=not client_mode,
            limits=self._limits,
            host=host,
            port=port if host else 0,
            behind=behind,
        )
        endpoint = Endpoint(transport, client_mode=client_mode, seed=number)
        await endpoint.start()
        contacts = self.nodes[0].endpoint.addresses if number else ()
        if host:
            self._ends.push_async_callback(endpoint.close)
            budgets = RelayBudgets() if relay else None
            node, self.reach[endpoint.peer_id] = await join(
                endpoint, self._ends, initial_peers=contacts, relays_within=budgets
            )
        else:
            node = await DHTNode.create(endpoint, initial_peers=contacts)
            self._ends.push_async_callback(node.shutdown)
        self.nodes.append(node)
        return node

    async def start(self, peer: S) -> S:
        """Starts a core. It is shut down when the swarm ends, before what was made earlier."""
        await peer.start()
        self._ends.push_async_callback(peer.shutdown)
        return peer

    def kill(self, node: DHTNode) -> None:
        """Like SIGKILL: its connections are reset, and nobody hears of it again."""
        self.network.kill(node.peer_id)

    async def __aenter__(self) -> Swarm:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ends.aclose()
