"""Calls and streams between peers, over any transport.

    Endpoint ── ControlPool ── ControlChannel (one per peer): calls, pings
             └─ StreamPool ─── StreamChannel (several per peer): one stream at a time each

Either end of a connection calls the other, no matter which one dialed it. What goes over the wire is in
docs/protocol.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from swarmcli.clock import Clock
from swarmcli.errors import CallTimeout, ConnectError, ConnectionLost
from swarmcli.events import GOODBYE, Events, WokeUp
from swarmcli.network.context import EndpointContext, Handler, Traffic
from swarmcli.network.control.pool import ControlPool
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import MAX_ADDRESSES
from swarmcli.network.streams.pool import StreamPool
from swarmcli.network.streams.stream import Stream
from swarmcli.network.transports.base import Connection, Purpose, Transport
from swarmcli.network.wire.messages import MAX_METHOD

logger = logging.getLogger(__name__)

Req = TypeVar("Req")
Resp = TypeVar("Resp")


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """What an endpoint looks like at one moment."""

    control_connections: int
    bulk_connections: int
    idle_bulk_connections: int
    known_peers: int  # in the address book
    calls_waiting: int  # own ones, for an answer
    calls_serving: int
    calls_made: int  # since the start
    streams_open: int  # in both directions
    traffic: Traffic  # since the start
    violations: Mapping[str, int]  # name of the broken rule → connections closed for it


class Endpoint:
    """This peer on the network. Used from one loop only."""

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Clock | None = None,
        client_mode: bool = False,
        announce: Sequence[str] = (),
        events: Events | None = None,
        seed: int | None = None,
    ) -> None:
        """`announce` replaces the addresses that the listener finds for itself. `seed` makes `random` repeatable."""
        dice = random.Random(seed if seed is not None else os.urandom(16))
        context = EndpointContext(transport, clock or Clock(), events or Events(), dice)
        self.identity = transport.identity
        self.peer_id = context.peer_id
        self.clock = context.clock
        self.client_mode = client_mode
        self.limits = context.limits
        self.events = context.events
        self.random = context.random
        self._context = context
        self._announce = tuple(announce)
        self._control = ControlPool(context)
        self._streams = StreamPool(context, self._control)
        self._calls_made = 0
        self._closed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this peer can be dialed, once it listens; nowhere in client mode."""
        return self._context.addresses

    # Life

    async def start(self) -> None:
        """Listens, unless in client mode, and sets `addresses`. Raises ListenError."""
        if not self.client_mode:
            found = await self._context.transport.listen(self._accept)
            self._context.addresses = (self._announce or found)[:MAX_ADDRESSES]  # others take no more of a peer
        self._context.tasks.spawn(self._keep_alive())

    async def close(self) -> None:
        """Says goodbye to all peers and ends everything that is under way. Idempotent; leaves no task."""
        if self._closed:
            return
        self._closed = True
        await self._control.farewell(GOODBYE)
        for channel in self._streams.channels():
            channel.reset(GOODBYE)
        await self._context.tasks.close()
        await self._context.transport.close()

    # Serving

    def serve(self, method: str, request_type: type[Req], handler: Callable[[PeerID, Req], Awaitable[Any]]) -> None:
        """Answers calls of `method` with what `handler(peer, request)` returns, a struct.

        A handler may raise CallRefused, which the caller sees as it is; any other exception is logged here and
        reaches the caller as RemoteError. It is cancelled when the caller gives up or is gone. Raises ValueError for a
        name that is taken, or too long for the wire.
        """
        self._add_handler(self._context.call_handlers, method, Handler(request_type, handler))

    def serve_stream(
        self, method: str, request_type: type[Req], handler: Callable[[PeerID, Req, Stream], Awaitable[None]]
    ) -> None:
        """The same for streams. When the handler returns, the stream has ended in both directions."""
        self._add_handler(self._context.stream_handlers, method, Handler(request_type, handler))

    def withdraw(self, *methods: str) -> None:
        """No longer answers these; handlers that run are not disturbed. Unknown names are ignored."""
        for method in methods:
            self._context.call_handlers.pop(method, None)
            self._context.stream_handlers.pop(method, None)

    # Calling

    async def call(self, peer: PeerID, method: str, request: Any, response_type: type[Resp], *, timeout: float) -> Resp:
        """One question and its answer, on the control connection, which is dialed if need be.

        Raises CallTimeout after `timeout` seconds in all, PeerUnreachable, ConnectionLost if the connection ended
        before the answer, UnknownMethod, RemoteError, CallRefused, and ProtocolViolation for an answer of another
        type. ValueError: the peer is this one, or the request is too large.
        Nothing is tried twice. Cancelling it, or its deadline, cancels the handler at the other end.
        """
        self._calls_made += 1
        try:
            async with asyncio.timeout(timeout):
                channel = self._control.current(peer) or await self._control.control(peer)
                return await channel.call(method, request, response_type)
        except TimeoutError:
            raise CallTimeout(f"{peer.short} did not answer {method} within {timeout:g} s") from None

    @contextlib.asynccontextmanager
    async def stream(self, peer: PeerID, method: str, request: Any, *, timeout: float) -> AsyncIterator[Stream]:
        """A stream of messages both ways, on a connection of its own, opened by whichever end can dial.

        `timeout` bounds the opening only (CallTimeout). What the handler raises, or that there is none, shows at
        the next `receive` or `send`. Leaving the block normally finishes the stream: what was sent still counts,
        what was not received is lost, and a failure of the handler that has arrived by then is raised. To wait for
        the handler's end, `finish()` and `receive` until EndOfStream. Leaving by an exception resets the stream,
        and the handler is cancelled. Entering raises CallTimeout, PeerUnreachable and ConnectionLost.
        """

        try:
            async with asyncio.timeout(timeout):
                channel, stream = await self._streams.open(peer, method, request)
        except TimeoutError:
            raise CallTimeout(f"no stream to {peer.short} for {method} within {timeout:g} s") from None
        try:
            yield stream
        except BaseException:  # a cancellation too must give the stream's slots back, here and at the peer
            channel.reset("cancelled by the caller")
            raise
        failure = stream.unseen_failure()
        await channel.leave()
        if failure is not None:
            raise failure

    # Knowing peers

    def learn(self, peer: PeerID, addresses: tuple[str, ...]) -> None:
        """Takes up where a peer can be dialed, by hearsay. The book is bounded; see Limits.max_known_peers."""
        if peer != self.peer_id:
            self._context.book.learn(peer, addresses)

    def addresses_of(self, peer: PeerID) -> tuple[str, ...]:
        return self.addresses if peer == self.peer_id else self._context.book.addresses_of(peer)

    async def connect(self, address: str, *, timeout: float) -> PeerID:
        """First contact at an address; with a peer id in it, only with that peer. Returns who answered.

        Raises AddressError, and ConnectError or its kinds, whose `.step` says how far it came.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._control.connect(address, timeout)
        except TimeoutError:
            raise ConnectError(f"{address} did not answer within {timeout:g} s", address=address) from None

    def can_reach(self, peer: PeerID) -> bool:
        """Whether a call could work: there is a connection or an address."""
        return self.is_connected(peer) or bool(self._context.book.addresses_of(peer))

    def is_connected(self, peer: PeerID) -> bool:
        return self._control.current(peer) is not None

    def lost(self, peer: PeerID) -> asyncio.Future[str]:
        """A future that is done, with the reason, as soon as there is no control connection to this peer any more.

        Already done if there is none. While someone waits for it, the peer is watched closely: a dead cable is
        noticed after `keepalive_interval + keepalive_timeout`. Cancel it when it no longer matters.
        """
        return self._control.lost(peer)

    def received(self, peer: PeerID) -> int | None:
        """Bytes that have come from this peer on the connections that stand now; None: there is no control connection.

        They grow as long as the peer lives: while someone waits for `lost`, each second of silence is asked about.
        """
        channel = self._control.current(peer)
        return channel.connection.bytes_received + self._streams.received_from(peer) if channel is not None else None

    def round_trip(self, peer: PeerID) -> float | None:
        """Smoothed seconds from a question to its answer, without the time spent in handlers. None: not known."""
        channel = self._control.current(peer)
        return channel.round_trip if channel is not None else None

    def passed(self) -> Traffic:
        """Bytes that have gone through this peer's links so far, as far as that is known: without what still waits."""
        waiting = sum(connection.bytes_waiting for connection in self._connections())
        traffic = self._traffic()
        return Traffic(traffic.sent - waiting, traffic.received)

    def statistics(self) -> EndpointStatistics:
        """For tests, benchmarks and debugging."""
        controls, bulk = self._control.channels(), self._streams.channels()
        return EndpointStatistics(
            control_connections=len(controls),
            bulk_connections=len(bulk),
            idle_bulk_connections=self._streams.idle_count(),
            known_peers=len(self._context.book),
            calls_waiting=sum(channel.calls_waiting for channel in controls),
            calls_serving=sum(channel.calls_serving for channel in controls),
            calls_made=self._calls_made,
            streams_open=sum(channel.stream is not None for channel in bulk),
            traffic=self._traffic(),
            violations=dict(self._context.violations),
        )

    # Inside

    def _add_handler(self, table: dict[str, Handler], method: str, handler: Handler) -> None:
        if not 0 < len(method) <= MAX_METHOD:
            raise ValueError(f"a method's name has 1 to {MAX_METHOD} characters, got {method[:200]!r}")
        if method in self._context.call_handlers or method in self._context.stream_handlers:
            raise ValueError(f"method {method!r} is served already; withdraw it first")
        table[method] = handler

    def _connections(self) -> list[Connection]:
        controls = [channel.connection for channel in self._control.channels()]
        return controls + [channel.connection for channel in self._streams.channels()]

    def _traffic(self) -> Traffic:
        """Since the start, on connections that have ended and those that stand."""
        standing = [Traffic(each.bytes_sent, each.bytes_received) for each in self._connections()]
        return sum(standing, self._context.ended_traffic)

    def _accept(self, connection: Connection) -> None:
        if self._closed:
            connection.abort("this endpoint is closed")
        elif connection.peer_id == self.peer_id:
            connection.abort("dialed oneself")
        elif connection.purpose is Purpose.BULK:
            self._streams.accepted(connection)
        else:
            self._context.tasks.spawn(self._welcome(connection))

    async def _welcome(self, connection: Connection) -> None:
        try:
            await self._control.establish(connection)
        except ConnectionLost as error:
            logger.debug("%s was gone before it was greeted: %s", connection.peer_id.short, error)

    def _wake_up(self, seconds: float) -> None:
        """Others have given up the connections from before, and routers have forgotten them: nothing would come, and
        the keepalive, which counts only the seconds in which this machine was awake, would take as long as ever to
        notice. The loop's clock may have stood still, so the swarm's raw clock has to tell."""
        reason = f"this machine slept for {seconds:.0f} s"
        self.events.emit(WokeUp(seconds))
        for bulk in self._streams.channels():
            bulk.reset(reason)
        for channel in self._control.channels():
            channel.connection.abort(reason)

    async def _keep_alive(self) -> None:
        """Ticks at random phases, so that a thousand endpoints do not ping at the same moment."""
        interval = self.limits.keepalive_interval
        await asyncio.sleep(interval * self.random.random())
        looked = self.clock.raw()
        while True:
            await asyncio.sleep(interval)
            looked, before = self.clock.raw(), looked
            if looked - before >= self.limits.asleep_after:
                self._wake_up(looked - before)
            for channel in self._control.channels():
                peer = channel.peer_id
                watched = self._control.watched(peer) or self._streams.in_use(peer)
                channel.tick(watched, self._streams.received_from(peer))
            self._control.close_surplus()
            self._streams.tick()
