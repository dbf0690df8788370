"""Relays and their clients, for tests: on a memory network under virtual time, or on loopback in real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from swarmcli.network import DirectTransport, Endpoint, Identity, PeerID, Stream
from swarmcli.network.addresses import Address
from swarmcli.network.transports.tcp import TCPTransport
from swarmcli.reach.circuits import RelayTransport, _Joiner, open_circuits
from swarmcli.reach.relay_messages import RESERVE, Reserve, Reserved
from swarmcli.reach.relaying import Relay, RelayBudgets
from swarmcli.testing import MemoryNetwork
from tests.network.worlds import Number, double

CLIENTS = 10  # seeds from here on are clients, those below listen


@dataclass
class Client:
    """A peer that nobody can dial."""

    endpoint: Endpoint
    transport: RelayTransport

    @property
    def peer_id(self) -> PeerID:
        return self.endpoint.peer_id

    def address(self, relay: Endpoint) -> str:
        return str(Address("relay", "", 0, self.peer_id, relay.peer_id))

    async def reserve(self, relay: Endpoint) -> None:
        """Takes a reservation, and announces it behind the others."""
        self.transport.relays.add(relay.peer_id)
        if not self.endpoint.is_connected(relay.peer_id):
            await self.endpoint.connect(relay.direct_addresses[0], timeout=5)
        await self.endpoint.call(relay.peer_id, RESERVE, Reserve(), Reserved, timeout=5)
        self.endpoint.announce(relayed=list(dict.fromkeys((*self.endpoint.addresses, self.address(relay)))))

    async def meet(self, other: Client) -> None:
        """Learns where the other client is, by hearsay."""
        self.endpoint.learn(other.peer_id, other.endpoint.addresses)


class Scene:
    """Makes peers; they are closed when it ends."""

    def __init__(self, stack: AsyncExitStack, network: Any) -> None:
        self.network = network
        self._stack = stack

    def at_end(self, close: Callable[[], Awaitable[None]]) -> None:
        self._stack.push_async_callback(close)

    async def relay(
        self, seed: int = 0, budgets: RelayBudgets | None = None, *, host: str = "", **options: Any
    ) -> tuple[Endpoint, Relay]:
        endpoint = await self.listener(seed, **({"host": host} if host else {}))
        relay = Relay(endpoint, budgets or RelayBudgets(), **options)
        await relay.start()
        self._stack.push_async_callback(relay.close)
        return endpoint, relay

    async def listener(self, seed: int, **options: Any) -> Endpoint:
        return await self._start(Endpoint(self._transport(seed, **options), seed=seed))

    async def client(self, seed: int, *, listening: bool = False, **options: Any) -> Client:
        """`listening`: it listens, but nobody can dial it at the address that it announces."""
        mine = self._transport(CLIENTS + seed, listening=listening, **options)
        endpoint = Endpoint(mine, client_mode=not listening, seed=CLIENTS + seed)
        await self._start(endpoint)
        endpoint.announce(direct=())
        return Client(endpoint, await open_circuits(endpoint))

    async def pair(self, relay: Endpoint) -> tuple[Client, Client]:
        """Two clients of one relay that know each other's addresses."""
        a, b = await self.client(0), await self.client(1)
        for client in (a, b):
            await client.reserve(relay)
        await a.meet(b)
        await b.meet(a)
        return a, b

    def _transport(self, seed: int, **options: Any) -> DirectTransport:
        identity = Identity.from_seed(seed)
        if self.network is None:
            return TCPTransport(identity, host="127.0.0.1")
        return self.network.transport(identity, **{"listening": seed < CLIENTS, **options})

    async def _start(self, endpoint: Endpoint) -> Endpoint:
        endpoint.serve("double", Number, double)
        endpoint.serve_stream("echo", Number, echo)
        await endpoint.start()
        self._stack.push_async_callback(endpoint.close)
        return endpoint


class Word(_Joiner):
    """Says its token, or other words, and keeps the socket."""

    def __init__(self, token: bytes, words: bytes | None = None) -> None:
        super().__init__(token)
        self._words = words or self._words


async def echo(peer: PeerID, request: Number, stream: Stream) -> None:
    """Sends back so many messages."""
    for _ in range(request.n):
        message, payload = await stream.receive(Number)
        await stream.send(message, payload)


@asynccontextmanager
async def scene(network: MemoryNetwork | None = None, **options: Any) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        yield Scene(stack, network or MemoryNetwork(seed=1, **options))


@asynccontextmanager
async def tcp_scene() -> AsyncIterator[Scene]:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        yield Scene(stack, None)


def payload(size: int) -> bytes:
    return bytes(range(256)) * (size // 256)
