"""The control connections of an endpoint: one per peer, dialed by whoever could, found again when it is gone.

When two peers dial each other at once, both connections come about. Both ends prefer the one that the peer with the
smaller id dialed (of two by the same dialer: the newer), begin nothing more on the other, say so (`Retire`), and
close it when what was under way on it has come to its end. So no call fails for it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from swarmcli.errors import ConnectError, ConnectionLost, OwnAddressError, PeerUnreachable
from swarmcli.events import Events, PeerConnected, PeerDisconnected
from swarmcli.network.address_book import AddressBook
from swarmcli.network.addresses import PeerInfo, parse_address
from swarmcli.network.control.channel import ControlChannel, ControlHost
from swarmcli.network.identity import PeerID
from swarmcli.network.transports.base import Connection, Purpose, Transport
from swarmcli.network.transports.dialing import dial_any
from swarmcli.network.wire.messages import Goodbye, Hello, Retire

logger = logging.getLogger(__name__)

_SMOOTHING = 1 / 8  # of round trips, as TCP does it (RFC 6298)


class ConnectionsHost(ControlHost, Protocol):
    """What is needed of the endpoint beyond what each channel needs."""

    transport: Transport
    events: Events
    life: bytes
    info: PeerInfo

    def link_lost(self, peer: PeerID, reason: str) -> None: ...
    def connection_ended(self, connection: Connection, error: ConnectionLost) -> None: ...


class Link:
    """All that is known about the connection to one peer."""

    def __init__(self, peer: PeerID) -> None:
        self.peer = peer
        self.channels: list[ControlChannel] = []
        self.current: ControlChannel | None = None
        self.opening: asyncio.Future[ControlChannel] | None = None
        self.watchers: list[asyncio.Future[str]] = []
        self.round_trip: float | None = None

    def prefer(self, own_id: PeerID) -> None:
        """Chooses the current channel by the rule that both ends share."""
        smaller_dialed = [c for c in self.channels if c.connection.dialed == (own_id < self.peer)]
        candidates = smaller_dialed or self.channels
        self.current = candidates[-1] if candidates else None
        for channel in self.channels:
            channel.retiring = channel is not self.current


class Connections:
    """The links to all peers."""

    def __init__(self, host: ConnectionsHost, book: AddressBook) -> None:
        self._host = host
        self._book = book
        self._links: dict[PeerID, Link] = {}
        self._own_id = host.transport.identity.peer_id
        self._closed = False

    def current(self, peer: PeerID) -> ControlChannel | None:
        link = self._links.get(peer)
        return link.current if link is not None else None

    def channels(self) -> list[ControlChannel]:
        return [channel for link in self._links.values() for channel in link.channels]

    def round_trip(self, peer: PeerID) -> float | None:
        link = self._links.get(peer)
        return link.round_trip if link is not None else None

    async def control(self, peer: PeerID) -> ControlChannel:
        """The channel to this peer, dialed if there is none. Raises PeerUnreachable."""
        link = self._links.get(peer)
        if link is not None and link.current is not None:
            return link.current
        if self._closed:
            raise ConnectionLost("this endpoint is closed")
        if peer == self._own_id:
            raise ValueError("a peer cannot call itself over the network")
        if link is None:
            link = self._links[peer] = Link(peer)
        if link.opening is None:
            link.opening = asyncio.get_running_loop().create_future()
            self._host.spawn(self._open(link, self._book.addresses_of(peer)))
        opened = await asyncio.shield(link.opening)
        return link.current or opened  # a better one may have come meanwhile

    async def connect(self, address: str, timeout: float) -> PeerID:
        """Dials an address of somebody who may be unknown. Raises ConnectError, AddressError."""
        expected = parse_address(address).peer_id
        if expected is not None and self.current(expected) is not None:
            return expected
        connection = await self._host.transport.dial(address, expected, Purpose.CONTROL, timeout)
        if connection.peer_id == self._own_id:
            connection.abort("dialed oneself")
            raise OwnAddressError(f"{address} is this peer itself", address=address)
        try:
            await self.establish(connection)
        except ConnectionLost as error:
            raise ConnectError(f"{address}: {error}", step="handshake", address=address) from error
        self._book.answered(connection.peer_id, address)
        return connection.peer_id

    async def establish(self, connection: Connection) -> ControlChannel:
        """Greets on a new connection and takes it up. Raises ConnectionLost."""
        channel = ControlChannel(connection, self._host)
        try:
            await channel.say(Hello(self._host.life, self._host.info.addresses))
        except asyncio.CancelledError:
            connection.abort("given up while being dialed")
            raise
        if self._closed:
            connection.abort("this endpoint is closed")
            raise ConnectionLost("this endpoint is closed")
        self._take_up(channel)
        connection.start(channel)
        return channel

    def lost(self, peer: PeerID) -> asyncio.Future[str]:
        """See Endpoint.lost."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        link = self._links.get(peer)
        if link is None or link.current is None:
            future.set_result("not connected")
        else:
            link.watchers = [watcher for watcher in link.watchers if not watcher.done()]
            link.watchers.append(future)
        return future

    def watched(self, peer: PeerID) -> bool:
        """Whether anyone wants to know soon when this peer is gone."""
        link = self._links.get(peer)
        return link is not None and any(not watcher.done() for watcher in link.watchers)

    async def farewell(self, reason: str) -> None:
        """Tells all peers, and closes. Takes at most the time that the limits allow."""
        self._closed = True
        channels = self.channels()
        try:
            async with asyncio.timeout(self._host.limits.goodbye_timeout), asyncio.TaskGroup() as group:
                for channel in channels:
                    group.create_task(self._say_goodbye(channel, reason))
        except TimeoutError:
            logger.debug("some peers were not told goodbye in time")
        for channel in channels:
            channel.connection.abort(reason)

    # What channels report

    def greeted(self, channel: ControlChannel, hello: Hello) -> None:
        """A peer that started anew has forgotten its older connections: they are dead, and whoever relied on what
        it knew must learn it."""
        link = self._links[channel.peer_id]
        self._book.told(channel.peer_id, hello.addresses)
        outdated = [other for other in link.channels if other.life not in (None, hello.life)]
        if outdated:
            self._fire(link, "the peer started anew")
            self._emit_connected(channel)
        for other in outdated:
            other.connection.abort("the peer started anew")

    def retired(self, channel: ControlChannel) -> None:
        self.idle(channel)

    def idle(self, channel: ControlChannel) -> None:
        """Closes a channel that neither end wants any more, once nothing is under way on it."""
        agreed = channel.retiring and channel.retire_sent and channel.retire_received
        if agreed and not channel.unfinished and channel.error is None:
            self._host.spawn(channel.connection.close("another connection is used"))

    def channel_lost(self, channel: ControlChannel, error: ConnectionLost) -> None:
        link = self._links[channel.peer_id]
        if channel not in link.channels:
            return
        link.channels.remove(channel)
        self._host.connection_ended(channel.connection, error)
        link.prefer(self._own_id)
        if link.current is None:
            self._fire(link, error.reason)
            if link.opening is None:
                del self._links[link.peer]
            self._host.link_lost(link.peer, error.reason)

    def round_trip_measured(self, peer: PeerID, seconds: float) -> None:
        link = self._links.get(peer)
        if link is not None:
            known = link.round_trip
            link.round_trip = seconds if known is None else known + _SMOOTHING * (seconds - known)

    # Inside

    def _take_up(self, channel: ControlChannel) -> None:
        link = self._links.setdefault(channel.peer_id, Link(channel.peer_id))
        first = not link.channels
        link.channels.append(channel)
        link.prefer(self._own_id)
        for other in link.channels:
            if other.retiring and not other.retire_sent:
                other.retire_sent = True
                other.post(Retire())
        if first:
            self._emit_connected(channel)
            self._make_room()
        if link.opening is not None:
            opening, link.opening = link.opening, None
            if not opening.done():
                opening.set_result(link.current or channel)

    async def _open(self, link: Link, addresses: tuple[str, ...]) -> None:
        """Dials for `link.opening`, unless the peer's own dial comes before."""
        opening = link.opening
        if opening is None:
            return  # the peer's dial has come before this task began
        problem: ConnectError | ConnectionLost | None = None
        try:
            if addresses:
                timeout = self._host.limits.dial_timeout
                connection = await dial_any(self._host.transport, link.peer, addresses, Purpose.CONTROL, timeout)
                await self.establish(connection)
                self._book.answered(link.peer, connection.remote_address)
        except (ConnectError, ConnectionLost) as error:
            problem = error
        finally:
            if not opening.done():
                self._give_up(link, opening, problem)

    def _give_up(self, link: Link, opening: asyncio.Future[ControlChannel], problem: Exception | None) -> None:
        link.opening = None
        if not link.channels:
            self._links.pop(link.peer, None)
        error = PeerUnreachable(f"{link.peer.short} cannot be reached: {problem or 'no address is known'}")
        error.__cause__ = problem
        opening.set_exception(error)
        opening.exception()  # the caller may be gone

    def _make_room(self) -> None:
        """Gives up the least used connection when there are too many."""
        if len(self._links) > self._host.limits.max_connections:
            idle = [c for c in self.channels() if not c.unfinished and not self.watched(c.peer_id)]
            if idle:
                victim = min(idle, key=lambda channel: channel.used_at)
                self._host.spawn(self._say_goodbye(victim, "too many connections"))

    async def _say_goodbye(self, channel: ControlChannel, reason: str) -> None:
        try:
            await channel.say(Goodbye(reason))
            await channel.connection.close(reason)
        except ConnectionLost:
            pass  # it is gone already

    def _emit_connected(self, channel: ControlChannel) -> None:
        self._host.events.emit(PeerConnected(channel.peer_id.text, channel.connection.remote_address))

    def _fire(self, link: Link, reason: str) -> None:
        watchers, link.watchers = link.watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(reason)
        self._host.events.emit(PeerDisconnected(link.peer.text, reason))
