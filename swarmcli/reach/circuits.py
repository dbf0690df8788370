"""Connections through a relay: the ordinary TLS and frames of two peers, over streams that a relay has joined.

To the two ends a circuit is a connection like any other, with the same handshake: who is behind it has proved that in
TLS, and what the relay says about it counts for nothing. A relay that swaps peers, changes bytes or leaves some out
ends the connection.

    TCPConnection ── CircuitSocket ── stream ──▶ relay ── stream ──▶ CircuitSocket ── TCPConnection
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swarmcli.backoff import Backoff
from swarmcli.errors import (
    AddressError,
    CallError,
    CallRefused,
    ConnectError,
    ConnectionLost,
    EndOfStream,
    HandshakeError,
    NetworkError,
    OwnAddressError,
    WrongPeerError,
)
from swarmcli.network.addresses import Address, Scheme, format_address, is_direct, parse_address
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.streams.stream import Stream
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.token_bucket import Meter
from swarmcli.network.transports.base import Accept, Connection, Purpose
from swarmcli.network.transports.tcp import handshake
from swarmcli.network.transports.tcp.connection import Shared, TCPConnection
from swarmcli.reach.relay_messages import CONNECT, INCOMING, PIECE, WINDOW, CircuitData, Connect, Incoming

logger = logging.getLogger(__name__)

_DATA = CircuitData()
Lookup = Callable[[PeerID], Awaitable[Sequence[str]]]


class CircuitSocket(asyncio.Transport):
    """A TCPConnection takes this for its socket: it is a stream, which `carry` brings along when it is open.

    Like a socket's, its write buffer is above its limit for a moment only, and reading pauses between two pieces.
    """

    def __init__(self, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self.failure: NetworkError | None = None  # why the stream did not come about, or ended
        self._protocol = protocol
        self._stream: Stream | None = None  # once it is open
        self._outgoing: deque[memoryview] = deque()
        self._waiting = 0  # bytes written that the stream has not taken
        self._more = asyncio.Event()  # something is there to be sent, or the end of it
        self._readable = asyncio.Event()
        self._readable.set()
        self._low, self._high = PIECE, 4 * PIECE
        self._full = False
        self._last_written = False
        self._over = False
        self._ways: list[asyncio.Task[None]] = []

    # Called by the connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._over or not data:
            return
        view = memoryview(bytes(data))
        self._outgoing.extend(view[start : start + PIECE] for start in range(0, len(view), PIECE))
        self._waiting += len(view)
        self._more.set()
        if self._waiting > self._high and not self._full:
            self._full = True
            self._protocol.pause_writing()

    def write_eof(self) -> None:
        self._last_written = True
        self._more.set()

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is not None:
            self._high = high
        self._low = low if low is not None else self._high // 4

    def get_write_buffer_size(self) -> int:
        return self._waiting

    def pause_reading(self) -> None:
        self._readable.clear()

    def resume_reading(self) -> None:
        self._readable.set()

    def is_closing(self) -> bool:
        return self._over

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "bytes_received" and self._stream is not None:
            return self._stream.arriving
        return default  # neither a socket nor an address of one

    def abort(self) -> None:
        self._end(None)

    # Called by the owner of the stream

    async def carry(self, stream: Stream) -> None:
        """Carries bytes both ways until the connection ends. Raises ConnectionLost if some that were written could
        not be sent, so that the stream is reset; and what the stream raises."""
        stream.narrow(PIECE, WINDOW)
        self._stream = stream
        try:
            async with asyncio.TaskGroup() as group:
                self._ways = [group.create_task(self._send(stream)), group.create_task(self._receive(stream))]
                if self._over:  # it was given up while the stream was opened
                    self._cancel_ways()
        except ExceptionGroup as errors:
            error = errors.exceptions[0]
            self.fail(error if isinstance(error, NetworkError) else ConnectionLost(repr(error)))
            raise error from None
        finally:
            self._end(self.failure)  # also when this task is cancelled
        if self._waiting:
            raise ConnectionLost("the circuit was given up with bytes under way")

    def fail(self, error: NetworkError) -> None:
        """The stream could not be opened, or broke."""
        self.failure = self.failure or error
        self._end(error)

    # Inside

    async def _send(self, stream: Stream) -> None:
        while True:
            while not self._outgoing:
                if self._last_written:
                    await stream.finish()
                    return
                self._more.clear()
                await self._more.wait()
            pieces = self._take()
            try:
                await stream.send(_DATA, pieces)
            except EndOfStream:
                return  # nobody reads any more; `_receive` hears the same
            self._waiting -= sum(map(len, pieces))
            if self._full and self._waiting <= self._low:
                self._full = False
                self._protocol.resume_writing()

    def _take(self) -> list[memoryview]:
        """As much as fits into one message."""
        pieces, room = [], PIECE
        while self._outgoing and len(self._outgoing[0]) <= room:
            pieces.append(self._outgoing.popleft())
            room -= len(pieces[-1])
        return pieces

    async def _receive(self, stream: Stream) -> None:
        try:
            while True:
                _, data = await stream.receive(CircuitData)
                while data:
                    await self._readable.wait()
                    memory = memoryview(self._protocol.get_buffer(len(data)))
                    count = min(len(data), len(memory))
                    memory[:count] = data[:count]
                    data = data[count:]
                    self._protocol.buffer_updated(count)
        except EndOfStream:
            await self._readable.wait()
            if not self._protocol.eof_received():
                self.write_eof()  # as a socket does: what was written still leaves, then it is over

    def _cancel_ways(self) -> None:
        for way in self._ways:
            way.cancel()

    def _end(self, error: Exception | None) -> None:
        if not self._over:
            self._over = True
            self._cancel_ways()
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, error)


@dataclass(frozen=True, slots=True)
class CircuitLimits:
    """How much one relay may bring. There is no bound of all relays together: one that holds handshakes open would keep
    out what the others bring, and this peer chooses how many relays it has."""

    handshakes: int = 32  # of strangers at the same time; further ones are refused …
    # … and per second, in the long run and at once: each takes some milliseconds of the processor. More than an honest
    # relay lets through to one client (`RelayBudgets.connects_per_second`).
    rate: tuple[float, float] = (16.0, 128.0)
    lookup_pause: float = 30.0  # seconds until one that was not found is looked up again: any peer may name any relay


class RelayTransport:
    """Implements `base.Transport` for addresses `relay://<relay>/<peer>`, by streams of an endpoint."""

    scheme: Scheme = "relay"

    def __init__(
        self, endpoint: Endpoint, lookup: Lookup | None = None, bounds: CircuitLimits = CircuitLimits()
    ) -> None:
        """`lookup(relay)` finds where a relay can be dialed of which this endpoint knows nothing."""
        self._bounds = bounds
        self.identity = endpoint.identity
        self.limits = endpoint.limits
        self.relays: set[PeerID] = set()  # that hold a reservation of this peer: only these may bring connections
        self._endpoint = endpoint
        self._lookup = lookup
        self.membership = endpoint.membership
        self._shared = Shared(endpoint.identity, endpoint.limits)
        self._tasks = TaskOwner()
        self._needed: Counter[PeerID] = Counter()  # relays to which a stream is being opened
        self._unknown = Backoff[PeerID](bounds.lookup_pause, bounds.lookup_pause)  # relays that were not found
        self._handshakes: Counter[PeerID] = Counter()  # of incoming connections, by the relay that brings them
        self._rates = Meter(relay=bounds.rate)  # of these

    @property
    def refusals(self) -> Counter[str]:
        """Connections that ended by a broken rule, by the class of the error."""
        return Counter(self._shared.refusals)

    async def listen(self, accept: Accept) -> tuple[str, ...]:
        """Takes the connections that relays bring from now on. Which addresses that makes, `relays.py` knows."""

        async def incoming(relay: PeerID, request: Incoming, stream: Stream) -> None:
            await self._incoming(relay, stream, accept)

        self._endpoint.serve_stream(INCOMING, Incoming, incoming)
        return self.own_addresses()

    def own_addresses(self) -> tuple[str, ...]:
        return ()

    # ---- dialing

    async def dial(self, address: str, expected: PeerID | None, purpose: Purpose, timeout: float) -> Connection:
        relay, target = self._ends(parse_address(address), expected, address)
        try:
            async with asyncio.timeout(timeout):
                await self._find(relay, address)
                return await self._dial(relay, target, purpose, address)
        except TimeoutError:
            raise ConnectError(f"{address} did not answer within {timeout:g} s", address=address) from None

    def _ends(self, place: Address, expected: PeerID | None, address: str) -> tuple[PeerID, PeerID]:
        relay, target, own = place.relay, place.peer_id, self.identity.peer_id
        if relay is None or target is None:
            raise AddressError(f"{address!r} is no address of this transport: expected relay://relayid/peerid")
        if expected not in (None, target):
            raise WrongPeerError(f"{address} is not an address of peer {expected.short}…", address=address)
        if target == own:
            raise OwnAddressError(f"{address} is this peer itself", address=address)
        if relay in (own, target):
            raise ConnectError(f"{address}: a circuit needs a third peer as its relay", address=address)
        if target in self._needed:
            # Two relays that name each other as their relay would have us dial in circles, ever more at a time.
            raise ConnectError(f"{address}: a relay is not reached through another one", address=address)
        return relay, target

    async def _find(self, relay: PeerID, address: str) -> None:
        """Sees to it that the relay can be dialed, or is connected."""
        seen = self._endpoint.seen(relay)
        if seen is not None and not seen.relayed:
            return
        now = loop_time()
        if not self._is_known(relay) and self._lookup is not None and not self._unknown.rests(relay, now):
            self._endpoint.learn(relay, tuple(await self._lookup(relay)))
            if not self._is_known(relay):
                self._unknown.add(relay, now)
        if not self._is_known(relay):
            raise ConnectError(f"{address}: no address of the relay is known", address=address)

    def _is_known(self, relay: PeerID) -> bool:
        return any(map(is_direct, self._endpoint.addresses_of(relay)))

    async def _dial(self, relay: PeerID, target: PeerID, purpose: Purpose, address: str) -> TCPConnection:
        connection = self._shared.leading(target, purpose, self.membership, relayed=True)
        socket = CircuitSocket(connection)
        connection.connection_made(socket)  # its first words go out with the first message of the stream
        carrier = self._tasks.spawn(self._carry(socket, relay, target))
        try:
            await connection.made()
        except (HandshakeError, ConnectionLost) as error:
            if isinstance(socket.failure, CallError):  # by the relay, or on the way to it
                raise ConnectError(f"{address}: {socket.failure}", address=address) from error
            raise handshake.at(address, error) from error
        finally:
            if not connection.is_open:
                carrier.cancel()  # it may still be opening the stream
        return _named(connection, relay)

    async def _carry(self, socket: CircuitSocket, relay: PeerID, target: PeerID) -> None:
        self._needed[relay] += 1
        opening = True
        try:
            async with self._endpoint.stream(
                relay, CONNECT, Connect(target), timeout=self.limits.dial_timeout
            ) as stream:
                self._no_longer_needed(relay)
                opening = False
                if stream.relayed:
                    raise ConnectionLost("a circuit does not lead through another one")
                await socket.carry(stream)
        except NetworkError as error:
            socket.fail(error)
        finally:
            if opening:
                self._no_longer_needed(relay)
            socket.abort()  # also if this task is cancelled before it has carried anything

    def _no_longer_needed(self, relay: PeerID) -> None:
        self._needed[relay] -= 1
        if not self._needed[relay]:
            del self._needed[relay]

    # ---- listening

    async def _incoming(self, relay: PeerID, stream: Stream, accept: Accept) -> None:
        if relay not in self.relays or stream.relayed:
            raise CallRefused("unwanted", "this peer has no reservation there")
        if self._handshakes[relay] >= self._bounds.handshakes or not self._rates.take(loop_time(), relay=relay):
            raise CallRefused("busy", "too many handshakes at once")
        connection = self._shared.listening(self.membership, relayed=True)
        self._admit(connection, relay, accept)
        socket = CircuitSocket(connection)
        connection.connection_made(socket)
        await socket.carry(stream)

    def _admit(self, connection: TCPConnection, relay: PeerID, accept: Accept) -> None:
        self._handshakes[relay] += 1
        deadline = asyncio.get_running_loop().call_later(
            self.limits.handshake_timeout, connection.refuse, "handshake timeout", "the handshake took too long"
        )

        def handshake_ended(ready: asyncio.Future[None]) -> None:
            self._handshakes[relay] -= 1
            if not self._handshakes[relay]:
                del self._handshakes[relay]
            deadline.cancel()
            if ready.exception() is None:
                accept(_named(connection, relay))

        connection.ready.add_done_callback(handshake_ended)

    async def close(self) -> None:
        self._endpoint.withdraw(INCOMING)
        for connection in tuple(self._shared.live):
            connection.abort("shutting down")
        await self._tasks.close()


async def open_circuits(endpoint: Endpoint, lookup: Lookup | None = None) -> RelayTransport:
    """Lets an endpoint dial through relays, and be dialed through those at which it will have reservations."""
    transport = RelayTransport(endpoint, lookup)
    endpoint.add_transport(transport.scheme, transport)
    await transport.listen(endpoint.adopt)
    return transport


def _named(connection: TCPConnection, relay: PeerID) -> TCPConnection:
    connection.remote_address = format_address(Address("relay", "", 0, connection.peer_id, relay))
    return connection
