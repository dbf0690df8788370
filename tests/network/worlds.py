"""Helpers of the network's tests: both transports behind one face, endpoints, and a peer that breaks rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from swarmcli.network import (
    DirectTransport,
    Endpoint,
    Identity,
    NetworkLimits,
    PeerID,
    Purpose,
    Stream,
    Transport,
    wire,
)
from swarmcli.network.transports.base import Connection
from swarmcli.network.transports.tcp import TCPTransport
from swarmcli.network.wire.messages import ControlHello, Ping
from swarmcli.testing import MemoryNetwork, virtual_time
from swarmcli.testing.memory_network import MemoryTransport

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
    """A receiver that keeps whole frames, and says how its connection ended."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self.asked: list[int] = []  # sizes of the payloads that memory was asked for
        self.ends: list[Exception] = []
        self.ended = asyncio.Event()
        self.reading = True
        self._news = asyncio.Event()

    def reading_wanted(self) -> bool:
        return self.reading

    def payload_buffer(self, header: bytes, size: int) -> memoryview:
        self.asked.append(size)
        return memoryview(bytearray(size))

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        assert not self.ends, "connection_lost comes last"
        self.frames.append((bytes(header), bytes(payload)))
        self._news.set()

    def connection_lost(self, error: Exception) -> None:
        self.ends.append(error)
        self.ended.set()
        self._news.set()

    async def until(self, count: int) -> list[tuple[bytes, bytes]]:
        """Waits for this many frames, or the end."""
        while len(self.frames) < count and not self.ends:
            self._news.clear()
            await self._news.wait()
        return self.frames

    async def lost(self) -> Exception:
        await self.ended.wait()
        return self.ends[0]


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


async def stay_alive(control: Connection) -> None:
    """What an attacker does that is not to be taken for dead."""
    for number in range(10_000):
        await control.send(wire.encode(Ping(number)))
        await asyncio.sleep(1)


class Town:
    """A network whose hosts have addresses, and so prefixes as those of the internet; and who dialed where on it."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self._ends: list[Any] = []

    async def peer(self, key: int, host: str, *, limits: NetworkLimits | None = None, **options: Any) -> Endpoint:
        behind = options.pop("behind", None)
        transport = self._transport(key, host, 1000, behind=behind, limits=limits)
        endpoint = Endpoint(transport, **{"seed": key, **options})
        endpoint.serve("double", Number, double)
        endpoint.serve("wait", bytes, slow(100))  # type: ignore[arg-type]
        endpoint.serve_stream("hold", Number, hold)
        self._ends[-1] = endpoint
        await endpoint.start()
        return endpoint

    def attacker(self, seed: int, host: str) -> Attacker:
        return Attacker(self._transport(seed, host, 1000))

    async def stranger(self, victim: Endpoint, host: str, *addresses: str, seed: int = 66) -> Connection:
        """Is connected to the victim and has told it these addresses. Listens nowhere."""
        attacker = Attacker(self._transport(seed, host, 2000, listening=False))
        connection, self.heard = await attacker.dial(victim, Purpose.CONTROL, greet=False)
        await connection.send(wire.encode(ControlHello(b"s" * 16, addresses)))
        await asyncio.sleep(1)
        return connection

    def dialed_by(self, peer: Endpoint) -> list[str]:
        return [address for dialer, address in self.network.dials if dialer == peer.peer_id]

    async def close(self) -> None:
        for end in reversed(self._ends):
            await end.close()

    def _transport(self, seed: int, host: str, port: int, **options: Any) -> MemoryTransport:
        self._ends.append(self.network.transport(Identity.from_seed(seed), host=host, port=port, **options))
        return self._ends[-1]  # type: ignore[no-any-return]


@asynccontextmanager
async def town() -> AsyncIterator[Town]:
    made = Town()
    try:
        yield made
    finally:
        await made.close()


async def hold(peer: PeerID, request: Number, stream: Stream) -> None:
    await asyncio.sleep(1000)
