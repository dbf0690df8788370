"""Calls and streams between peers, over any transport.

    Endpoint ── Connections ── ControlChannel (one per peer): calls, pings
             └─ BulkPool ───── BulkChannel (several per peer): one stream at a time each

Either end of a connection calls the other, whoever dialed it. See docs/protocol.md for what goes over the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from swarmcli.clock import Clock
from swarmcli.errors import CallTimeout, ConnectError, ConnectionLost, ProtocolViolation
from swarmcli.events import Events, PeerRefused
from swarmcli.network.address_book import AddressBook
from swarmcli.network.addresses import PeerInfo
from swarmcli.network.control.channel import ChannelRetired, ControlChannel
from swarmcli.network.control.pool import Connections
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import Limits
from swarmcli.network.streams.channel import BulkChannel
from swarmcli.network.streams.pool import BulkPool
from swarmcli.network.streams.stream import Stream, StreamBlock
from swarmcli.network.tasks import TaskOwner
from swarmcli.network.traffic import EndpointStatistics, Refusals, Traffic, Volume
from swarmcli.network.transports.base import Connection, Purpose, Transport
from swarmcli.network.wire.handlers import Methods
from swarmcli.network.wire.messages import BulkDenied, BulkWanted, Hello

logger = logging.getLogger(__name__)

Req = TypeVar("Req")
Resp = TypeVar("Resp")


class Endpoint:
    """This peer on the network. Used from one loop only."""

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Clock | None = None,
        client_mode: bool = False,
        announce: Sequence[str] = (),
        limits: Limits | None = None,
        events: Events | None = None,
        seed: int | None = None,
    ) -> None:
        """`announce` replaces the addresses that the listener finds for itself. `seed` makes `random` repeatable."""
        self.transport = transport
        self.identity = transport.identity
        self.peer_id = transport.identity.peer_id
        self.clock = clock if clock is not None else Clock()
        self.client_mode = client_mode
        self.limits = limits if limits is not None else Limits()
        self.events = events if events is not None else Events()
        self.random = random.Random(seed if seed is not None else os.urandom(16))
        self.methods = Methods()
        self.life = self.random.randbytes(16)
        self.info = PeerInfo(self.peer_id)
        self._announce = tuple(announce)
        self._book = AddressBook(self.limits.max_known_peers)
        self._traffic = Traffic(self.limits.max_known_peers)
        self._refusals = Refusals(self.limits.max_known_peers)
        self.events.subscribe(self._refusals.hear)
        self._connections = Connections(self, self._book)
        self._pool = BulkPool(self, self._connections, self._book)
        self._tasks = TaskOwner()
        self._calls_made = 0
        self._streams_made = 0
        self._closed = False

    # Life

    async def start(self) -> None:
        """Listens, unless in client mode, and sets `info`. Raises ListenError."""
        if not self.client_mode:
            found = await self.transport.listen(self._accept)
            self.info = PeerInfo(self.peer_id, self._announce or found)
        self._tasks.spawn(self._keep_alive())

    async def close(self) -> None:
        """Says goodbye to all peers and ends everything that is under way. Idempotent; leaves no task."""
        if self._closed:
            return
        self._closed = True
        await self._connections.farewell("the peer has left")
        for channel in self._pool.channels():
            channel.reset("the peer has left")
        await self._tasks.close()
        await self.transport.close()

    # Serving

    def serve(self, method: str, request_type: type[Req], handler: Callable[[PeerID, Req], Awaitable[Any]]) -> None:
        """Answers calls of `method` with what `handler(peer, request)` returns, a struct.

        A handler may raise CallRefused, which the caller sees as it is; any other exception is logged here and
        reaches the caller as RemoteError. It is cancelled when the caller gives up or is gone.
        """
        self.methods.serve(method, request_type, handler)

    def serve_stream(
        self, method: str, request_type: type[Req], handler: Callable[[PeerID, Req, Stream], Awaitable[None]]
    ) -> None:
        """The same for streams. When the handler returns, the stream has ended in both directions."""
        self.methods.serve_stream(method, request_type, handler)

    def withdraw(self, *methods: str) -> None:
        """No longer answers these; handlers that run are not disturbed. Unknown names are ignored."""
        self.methods.withdraw(*methods)

    # Calling

    async def call(self, peer: PeerID, method: str, request: Any, response_type: type[Resp], *, timeout: float) -> Resp:
        """One question and its answer, on the control connection, which is dialed if need be.

        Raises CallTimeout after `timeout` seconds in all, PeerUnreachable, ConnectionLost if the connection ended
        before the answer, UnknownMethod, RemoteError, CallRefused, and ProtocolViolation for an answer of another
        type. Nothing is tried twice. Cancelling it, or its deadline, cancels the handler at the other end.
        """
        self._calls_made += 1
        try:
            async with asyncio.timeout(timeout):
                while True:
                    channel = self._connections.current(peer) or await self._connections.control(peer)
                    with contextlib.suppress(ChannelRetired):
                        return await channel.call(method, request, response_type)
        except TimeoutError:
            raise CallTimeout(f"{peer.short} did not answer {method} within {timeout:g} s") from None

    def stream(self, peer: PeerID, method: str, request: Any, *, timeout: float) -> AbstractAsyncContextManager[Stream]:
        """A stream of messages both ways, on a connection of its own, opened by whichever end can dial.

        `timeout` bounds the opening only (CallTimeout). What the handler raises, or that there is none, shows at
        the next `receive` or `send`. Leaving the block normally finishes the stream: what was sent still counts,
        what was not received is lost, and a failure of the handler that has arrived by then is raised. To wait for
        the handler's end, `finish()` and `receive` until EndOfStream. Leaving by an exception resets the stream,
        and the handler is cancelled. Entering raises CallTimeout, PeerUnreachable and ConnectionLost.
        """

        async def opened() -> tuple[BulkChannel, Stream]:
            self._streams_made += 1
            try:
                async with asyncio.timeout(timeout):
                    return await self._pool.open(peer, method, request)
            except TimeoutError:
                raise CallTimeout(f"no stream to {peer.short} for {method} within {timeout:g} s") from None

        return StreamBlock(opened)

    # Knowing peers

    def learn(self, info: PeerInfo) -> None:
        """Takes up where a peer can be dialed, by hearsay. The book is bounded; see Limits.max_known_peers."""
        if info.peer_id != self.peer_id:
            self._book.learn(info)

    def addresses_of(self, peer: PeerID) -> tuple[str, ...]:
        return self.info.addresses if peer == self.peer_id else self._book.addresses_of(peer)

    async def connect(self, address: str, *, timeout: float) -> PeerID:
        """First contact at an address; with a peer id in it, only with that peer. Returns who answered.

        Raises AddressError, and ConnectError or its kinds, whose `.step` says how far it came.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._connections.connect(address, timeout)
        except TimeoutError:
            raise ConnectError(f"{address} did not answer within {timeout:g} s", address=address) from None

    def can_reach(self, peer: PeerID) -> bool:
        """Whether a call could work: there is a connection or an address."""
        return self.is_connected(peer) or bool(self._book.addresses_of(peer))

    def is_connected(self, peer: PeerID) -> bool:
        return self._connections.current(peer) is not None

    def lost(self, peer: PeerID) -> asyncio.Future[str]:
        """A future that is done, with the reason, as soon as there is no control connection to this peer any more.

        Already done if there is none. While someone waits for it, the peer is watched closely: a dead cable is
        noticed after `keepalive_interval + keepalive_timeout`. Cancel it when it no longer matters.
        """
        return self._connections.lost(peer)

    def received(self, peer: PeerID) -> int | None:
        """Bytes that have come from this peer on the connections that stand now; None: there is no control connection.

        They grow as long as the peer lives: while someone waits for `lost`, each second of silence is asked about.
        """
        channel = self._connections.current(peer)
        return channel.connection.bytes_received + self._pool.received_from(peer) if channel is not None else None

    def round_trip(self, peer: PeerID) -> float | None:
        """Smoothed seconds from a question to its answer, without the time spent in handlers. None: not known."""
        return self._connections.round_trip(peer)

    def passed(self) -> Volume:
        """Bytes that have gone through this peer's links so far, as far as that is known."""
        return self._traffic.passed(self._standing())

    def _standing(self) -> list[Connection]:
        controls = [channel.connection for channel in self._connections.channels()]
        return controls + [channel.connection for channel in self._pool.channels()]

    def statistics(self) -> EndpointStatistics:
        controls, bulk = self._connections.channels(), self._pool.channels()
        total, by_peer = self._traffic.totals(self._standing())
        return EndpointStatistics(
            peers=len({channel.peer_id for channel in controls}),
            bulk_connections=len(bulk),
            idle_bulk_connections=self._pool.idle_count(),
            known_peers=len(self._book),
            calls_waiting=sum(channel.calls_waiting for channel in controls),
            calls_serving=sum(channel.calls_serving for channel in controls),
            calls_made=self._calls_made,
            streams_open=sum(channel.stream is not None for channel in bulk),
            streams_made=self._streams_made,
            traffic=total,
            traffic_by_peer=by_peer,
            violations=dict(self._traffic.violations),
            refusals=dict(self._refusals.by_kind),
            refusals_by_peer=dict(self._refusals.by_peer),
        )

    # What channels need of their endpoint

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.spawn(work)

    def greeted(self, channel: ControlChannel, hello: Hello) -> None:
        self._connections.greeted(channel, hello)

    def retired(self, channel: ControlChannel) -> None:
        self._connections.retired(channel)

    def idle(self, channel: ControlChannel) -> None:
        self._connections.idle(channel)

    def bulk_wanted(self, channel: ControlChannel, wanted: BulkWanted) -> None:
        self._pool.bulk_wanted(channel, wanted)

    def bulk_denied(self, channel: ControlChannel, denied: BulkDenied) -> None:
        self._pool.bulk_denied(channel, denied)

    def round_trip_measured(self, peer: PeerID, seconds: float) -> None:
        self._connections.round_trip_measured(peer, seconds)

    def channel_lost(self, channel: ControlChannel, error: ConnectionLost) -> None:
        self._connections.channel_lost(channel, error)

    def link_lost(self, peer: PeerID, reason: str) -> None:
        self._pool.link_lost(peer, reason)

    def offered(self, channel: BulkChannel, token: int) -> bool:
        return self._pool.offered(channel, token)

    def bulk_idle(self, channel: BulkChannel) -> None:
        self._pool.bulk_idle(channel)

    def bulk_lost(self, channel: BulkChannel, error: ConnectionLost) -> None:
        self._pool.bulk_lost(channel, error)

    def connection_ended(self, connection: Connection, error: ConnectionLost) -> None:
        self._traffic.ended(connection)
        if isinstance(error, ProtocolViolation):
            self._traffic.violated(error)
            self.events.emit(PeerRefused(connection.peer_id.text, error.reason))
            logger.warning("closed the connection to %s: %s", connection.peer_id.short, error.reason)

    # Inside

    def _accept(self, connection: Connection) -> None:
        if self._closed:
            connection.abort("this endpoint is closed")
        elif connection.peer_id == self.peer_id:
            connection.abort("dialed oneself")
        elif connection.purpose is Purpose.BULK:
            self._pool.accepted(connection)
        else:
            self._tasks.spawn(self._welcome(connection))

    async def _welcome(self, connection: Connection) -> None:
        try:
            await self._connections.establish(connection)
        except ConnectionLost as error:
            logger.debug("%s was gone before it was greeted: %s", connection.peer_id.short, error)

    async def _keep_alive(self) -> None:
        """Ticks at random phases, so that a thousand endpoints do not ping at the same moment."""
        interval = self.limits.keepalive_interval
        await asyncio.sleep(interval * self.random.random())
        while True:
            await asyncio.sleep(interval)
            for channel in self._connections.channels():
                channel.tick(self._watched(channel), self._pool.received_from(channel.peer_id))
            self._pool.tick()

    def _watched(self, channel: ControlChannel) -> bool:
        peer = channel.peer_id
        return channel.busy or self._connections.watched(peer) or self._pool.in_use(peer)
