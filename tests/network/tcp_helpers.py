"""What the tests of the TCP transport share: a pair of peers, and raw ends of sockets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from swarmcli.network.identity import Identity
from swarmcli.network.transports.base import Connection, Purpose
from swarmcli.network.transports.tcp import TCPTransport
from swarmcli.network.transports.tcp.connection import TCPConnection
from swarmcli.network.transports.tcp.handshake import (
    PROTOCOL_VERSION,
    GreetingKind,
    Message,
    dialer_context,
    greet_listener,
    take_message,
)

from .worlds import Recorder

LISTENER = Identity.from_seed(b"listener")
DIALER = Identity.from_seed(b"dialer")
MALLORY = Identity.from_seed(b"mallory")
WAIT = 60.0  # seconds until a test that waits for something gives up


class Peer:
    """A listening transport whose incoming connections are started with recorders, in order."""

    def __init__(self, identity: Identity = LISTENER, **options: Any) -> None:
        self.transport = TCPTransport(identity, **{"host": "127.0.0.1", **options})
        self.incoming: asyncio.Queue[tuple[Connection, Recorder]] = asyncio.Queue()
        self.address = ""

    def accept(self, connection: Connection) -> None:
        recorder = Recorder()
        connection.start(recorder)
        self.incoming.put_nowait((connection, recorder))

    async def next(self) -> tuple[Connection, Recorder]:
        async with asyncio.timeout(WAIT):
            return await self.incoming.get()


@asynccontextmanager
async def peer(identity: Identity = LISTENER, **options: Any) -> AsyncIterator[Peer]:
    """A listening peer; at the end nothing of it may be left."""
    made = Peer(identity, **options)
    before = asyncio.all_tasks()
    made.address = (await made.transport.listen(made.accept))[0]
    try:
        yield made
    finally:
        await made.transport.close()
        assert asyncio.all_tasks() <= before


@asynccontextmanager
async def dialing(identity: Identity = DIALER, **options: Any) -> AsyncIterator[TCPTransport]:
    transport = TCPTransport(identity, **options)
    try:
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[Connection, Recorder, Connection, Recorder]]:
    """A connection with both its ends: dialer's, its recorder, listener's, its recorder."""
    async with peer(**options) as listener, dialing() as transport:
        near = await transport.dial(listener.address, None, Purpose.CONTROL, WAIT)
        recorder = Recorder()
        near.start(recorder)
        far, far_recorder = await listener.next()
        yield near, recorder, far, far_recorder


async def still_works(listener: Peer) -> None:
    """Whatever was done to the listener, an honest peer gets through."""
    async with dialing(Identity.generate()) as transport:
        connection = await transport.dial(listener.address, LISTENER.peer_id, Purpose.CONTROL, WAIT)
        connection.start(Recorder())
        await connection.send(b"honest", [b"work"])
        while True:
            _, recorder = await listener.next()
            if connection.bytes_sent and (await recorder.until(1))[0] == (b"honest", b"work"):
                return


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop go on until something without an event of its own has happened."""
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def open_descriptors() -> int:
    """This process's descriptors, with those of earlier tests' garbage, which may be collected at any time."""
    return len(list(Path("/dev/fd").iterdir()))


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


class RawPeer:
    """An end that speaks TLS through asyncio's own streams and says whatever a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, address: str, *, tls: bool = True) -> RawPeer:
        host, port = host_and_port(address)
        options: dict[str, Any] = {"ssl": dialer_context(), "server_hostname": "anyone"} if tls else {}
        return cls(*await asyncio.open_connection(host, port, **options))

    def say(self, kind: int, body: bytes, version: int = PROTOCOL_VERSION) -> None:
        self.writer.write(Message(kind, body, version).encode())

    async def hear(self) -> Message:
        received = bytearray()
        async with asyncio.timeout(WAIT):
            while (message := take_message(received)) is None:
                received += await self.reader.readexactly(1)
        return message

    async def greet(self, identity: Identity = MALLORY, purpose: Purpose = Purpose.CONTROL) -> None:
        """The honest greeting, so that what comes after it can be dishonest."""
        script = greet_listener(identity, LISTENER.peer_id, purpose)
        self.writer.write(next(script))
        self.writer.write(script.send(await self.hear()))
        assert (await self.hear()).kind == GreetingKind.WELCOME

    def frame(self, header: bytes, payload: bytes = b"", *, announced: tuple[int, int] | None = None) -> None:
        sizes = announced or (len(header), len(payload))
        self.writer.write(struct.pack("!II", *sizes) + header + payload)

    async def rest(self) -> bytes:
        """All that still comes until the other end closes."""
        async with asyncio.timeout(WAIT):
            try:
                return await self.reader.read(-1)
            except ConnectionError:
                return b""

    def leave(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def raw_peer(address: str, *, tls: bool = True) -> AsyncIterator[RawPeer]:
    raw = await RawPeer.connect(address, tls=tls)
    try:
        yield raw
    finally:
        raw.leave()


def as_tcp(connection: Connection) -> TCPConnection:
    assert isinstance(connection, TCPConnection)
    return connection
