"""Peers on a memory network with routers, each with its `Reach`, under virtual time."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from swarmcli.events import Event, ReachabilityChanged
from swarmcli.network import Endpoint, Identity
from swarmcli.network.identity import PeerID
from swarmcli.reach.reach import Reach
from swarmcli.testing import MemoryNetwork
from swarmcli.testing.memory_network import MemoryTransport
from swarmcli.testing.memory_router import MemoryRouter

PORT = 4000


class Peer:
    """An endpoint, what it found out, and what it said."""

    def __init__(self, endpoint: Endpoint, reach: Reach, address: str) -> None:
        self.endpoint = endpoint
        self.reach = reach
        self.address = address  # where others on the internet would dial it
        self.events: list[Event] = []
        endpoint.events.subscribe(self.events.append)

    @property
    def said(self) -> list[ReachabilityChanged]:
        return [event for event in self.events if isinstance(event, ReachabilityChanged)]

    async def meet(self, other: Peer) -> PeerID:
        return await self.endpoint.connect(other.address, timeout=5.0)


class Homes:
    """`async with Homes() as homes`: the internet 5.x and the homes behind its routers."""

    def __init__(self, **network: Any) -> None:
        self.network = MemoryNetwork(seed=1, **network)
        self._ends = contextlib.AsyncExitStack()
        self._count = 0

    def router(self, host: str, **options: Any) -> MemoryRouter:
        return self.network.router(host, **options)

    async def peer(
        self,
        host: str,
        behind: MemoryRouter | None = None,
        *,
        contacts: Sequence[Peer] = (),
        client_mode: bool = False,
        announce: tuple[str, ...] = (),
        honest: bool = True,
        expects: bool = False,
        **reach: Any,
    ) -> Peer:
        """A peer at this host, which has met its contacts. Not `honest`: without a Reach of its own.
        `expects`: it waits for contacts whom the test makes it meet."""
        self._count += 1
        identity = Identity.from_seed(f"home {self._count}".encode())
        transport = self.network.transport(identity, host=host, port=PORT, behind=behind, listening=not client_mode)
        endpoint = Endpoint(transport, client_mode=client_mode, announce=announce, seed=self._count)
        await endpoint.start()
        self._ends.push_async_callback(endpoint.close)
        keeper = Reach(endpoint, alone=not (contacts or expects), **reach)
        peer = Peer(endpoint, keeper, f"memory://{host}:{PORT}")
        if honest:
            await keeper.start()
            self._ends.push_async_callback(keeper.close)
        for contact in contacts:
            await peer.meet(contact)
        return peer

    def move(self, peer: Peer, host: str, behind: MemoryRouter | None) -> None:
        """The machine is taken to another network: its connections are dead."""
        transport = peer.endpoint.transport
        assert isinstance(transport, MemoryTransport)
        self.network.move(transport, host, behind)

    def dials_to(self, host: str) -> int:
        """How often anybody dialed this host so far."""
        return sum(address.startswith(f"memory://{host}") for _, address in self.network.dials)

    async def __aenter__(self) -> Homes:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ends.aclose()
