"""Helpers of the network's tests: both transports behind one face, endpoints, and a peer that breaks rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from swarmcli.network import DirectTransport, Endpoint, Identity, NetworkLimits, PeerID, Purpose, Transport, wire
from swarmcli.network.transports.base import Connection
from swarmcli.network.transports.tcp import TCPTransport
from swarmcli.network.wire.messages import ControlHello
from swarmcli.testing import MemoryNetwork, virtual_time

T = TypeVar("T")


class Number(msgspec.Struct, frozen=True):
    n: int


class MemoryWorld:
    """Peers on a memory network, under virtual time."""

    name = "memory"

    def __init__(self) -> None:
        self.network = MemoryNetwork(seed=1)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return virtual_time.run(main, timeout=3600)

    def transport(self, seed: int, limits: NetworkLimits | None = None) -> DirectTransport:
        return self.network.transport(Identity.from_seed(seed), limits=limits)

    def nowhere(self) -> str:
        return "memory://nobody"


class TCPWorld:
    """Peers on the loopback device, in real time."""

    name = "tcp"

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(60):
                return await main

        return asyncio.run(bounded())

    def transport(self, seed: int, limits: NetworkLimits | None = None) -> DirectTransport:
        return TCPTransport(Identity.from_seed(seed), host="127.0.0.1", limits=limits or NetworkLimits())

    def nowhere(self) -> str:
        return "tcp://127.0.0.1:1"


World = MemoryWorld | TCPWorld


async def reaches(a: Endpoint, b: Endpoint) -> bool:
    """Whether `a` calls `b` and hears its answer. Raises what the call raises."""
    return await a.call(b.peer_id, "double", Number(4), Number, timeout=5) == Number(8)


def slow(seconds: float) -> Callable[[PeerID, Number], Coroutine[Any, Any, Number]]:
    """A handler that takes its time and returns what it got."""

    async def handler(peer: PeerID, request: Number) -> Number:
        await asyncio.sleep(seconds)
        return request

    return handler


async def double(peer: PeerID, request: Number) -> Number:
    return Number(2 * request.n)


@asynccontextmanager
async def endpoints(
    network: MemoryNetwork,
    count: int,
    *,
    clients: tuple[int, ...] = (),
    limits: NetworkLimits | None = None,
    make: Callable[..., Endpoint] = Endpoint,
) -> AsyncIterator[list[Endpoint]]:
    """Started peers that serve `double`, and know each other's addresses; `clients` are in client mode."""
    peers = [
        make(
            network.transport(Identity.from_seed(seed), listening=seed not in clients, limits=limits),
            client_mode=seed in clients,
            seed=seed,
        )
        for seed in range(count)
    ]
    try:
        for peer in peers:
            peer.serve("double", Number, double)
            await peer.start()
        for peer in peers:
            for other in peers:
                peer.learn(other.peer_id, other.addresses)
        yield peers
    finally:
        for peer in peers:
            await peer.close()


class Recorder:
    """A Receiver that keeps everything."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self.ends: list[Exception] = []
        self.arrived = asyncio.Event()
        self.ended = asyncio.Event()

    def payload_buffer(self, header: bytes, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        self.frames.append((bytes(header), bytes(payload)))
        self.arrived.set()

    def connection_lost(self, error: Exception) -> None:
        self.ends.append(error)
        self.ended.set()
        self.arrived.set()

    async def until(self, count: int) -> None:
        """Waits for this many frames, or the end."""
        while len(self.frames) < count and not self.ends:
            self.arrived.clear()
            await self.arrived.wait()


class Attacker:
    """A peer that sends whatever it likes over an honest transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.peer_id = transport.identity.peer_id

    async def dial(self, victim: Endpoint, purpose: Purpose, *, greet: bool = True) -> tuple[Connection, Recorder]:
        connection = await self.transport.dial(victim.addresses[0], victim.peer_id, purpose, 10.0)
        recorder = Recorder()
        connection.start(recorder)
        if greet and purpose is Purpose.CONTROL:
            await connection.send(wire.encode(ControlHello(b"l" * 16)))
        return connection, recorder
