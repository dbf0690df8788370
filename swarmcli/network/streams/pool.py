"""The bulk connections of an endpoint: kept for the next stream, dialed by whichever end can dial."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Protocol

from swarmcli.errors import ConnectError, ConnectionLost, PeerUnreachable, ProtocolViolation
from swarmcli.network import wire
from swarmcli.network.address_book import AddressBook
from swarmcli.network.addresses import PeerInfo
from swarmcli.network.control.channel import ControlChannel
from swarmcli.network.control.pool import Connections
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import Limits
from swarmcli.network.streams.channel import BulkChannel, BulkHost, Role
from swarmcli.network.streams.stream import Stream
from swarmcli.network.transports.base import Connection, Purpose, Transport
from swarmcli.network.transports.dialing import dial_any
from swarmcli.network.wire.messages import MAX_TEXT, BulkDenied, BulkWanted, Offer


class PoolHost(BulkHost, Protocol):
    """What the pool needs of the endpoint beyond what each channel needs."""

    transport: Transport
    info: PeerInfo

    def connection_ended(self, connection: Connection, error: ConnectionLost) -> None: ...


class _PeerBulk:
    """The bulk connections with one peer."""

    def __init__(self, limits: Limits) -> None:
        self.channels: dict[BulkChannel, None] = {}
        self.idle: list[BulkChannel] = []  # of those that streams are opened on here
        self.using: dict[BulkChannel, None] = {}  # each holds one of `slots`
        self.slots = asyncio.Semaphore(limits.max_streams_per_peer)
        self.opening = 0  # streams that wait for a slot or a connection
        self.requests: dict[int, asyncio.Future[BulkChannel]] = {}  # token → the connection that the peer dials
        self.dialing = 0  # connections that the peer has asked for

    @property
    def empty(self) -> bool:
        return not (self.channels or self.opening or self.requests or self.dialing)


class BulkPool:
    """Finds a bulk connection for each stream."""

    def __init__(self, host: PoolHost, connections: Connections, book: AddressBook) -> None:
        self._host = host
        self._limits = host.limits
        self._connections = connections
        self._book = book
        self._peers: dict[PeerID, _PeerBulk] = {}
        self._next_token = 0

    def channels(self) -> list[BulkChannel]:
        return [channel for bulk in self._peers.values() for channel in bulk.channels]

    def idle_count(self) -> int:
        return sum(len(bulk.idle) for bulk in self._peers.values())

    def in_use(self, peer: PeerID) -> bool:
        """Whether a stream to or from this peer is open, or waits for its connection."""
        bulk = self._peers.get(peer)
        return bulk is not None and (bulk.opening > 0 or any(c.stream is not None for c in bulk.channels))

    def received_from(self, peer: PeerID) -> int:
        """A count that changes whenever a byte comes from this peer on a bulk connection."""
        bulk = self._peers.get(peer)
        return sum(channel.connection.bytes_received for channel in bulk.channels) if bulk is not None else 0

    async def open(self, peer: PeerID, method: str, request: Any) -> tuple[BulkChannel, Stream]:
        """Begins a stream. Raises PeerUnreachable, ConnectionLost."""
        bulk = self._bulk(peer)
        bulk.opening += 1
        try:
            await bulk.slots.acquire()
            try:
                channel = await self._opener(peer, bulk)
            except (ConnectionLost, PeerUnreachable, asyncio.CancelledError):
                bulk.slots.release()
                raise
            bulk.using[channel] = None
            try:
                return channel, await channel.open(method, request)
            except (ConnectionLost, TypeError, asyncio.CancelledError):
                channel.reset("the stream was given up while it was opened")
                raise
        finally:
            bulk.opening -= 1
            self._drop_if_empty(peer)

    def accepted(self, connection: Connection) -> None:
        bulk = self._bulk(connection.peer_id)
        limit = self._limits.max_bulk_connections_per_peer
        if len(bulk.channels) >= limit:
            violation = ProtocolViolation(f"too many bulk connections: more than {limit}")
            connection.abort(violation.reason)
            self._host.connection_ended(connection, violation)
        else:
            self._take_up(connection, Role.UNKNOWN)

    def link_lost(self, peer: PeerID, reason: str) -> None:
        """Without its control connection nobody would notice that a peer is gone: everything else goes too."""
        bulk = self._peers.get(peer)
        if bulk is None:
            return
        for future in bulk.requests.values():
            if not future.done():
                future.set_exception(ConnectionLost(reason))
        for channel in list(bulk.channels):
            channel.reset(reason)

    def tick(self) -> None:
        """Called at each keepalive interval: closes what is not used."""
        for channel in self.channels():
            quiet = channel.tick() * self._limits.keepalive_interval
            alive = self._connections.current(channel.peer_id) is not None
            if not alive and quiet >= self._limits.keepalive_timeout:
                channel.reset("no control connection to this peer")
            elif channel.role is Role.UNKNOWN and quiet >= self._limits.keepalive_timeout:
                channel.reset("opened and never used")
            elif channel.role is Role.OPENER and channel.stream is None and quiet >= self._limits.bulk_idle_timeout:
                self._retire(channel)
            elif channel.lingering and quiet >= 2 * self._limits.bulk_idle_timeout:
                channel.reset("idle for too long")

    # What channels and peers say

    def offered(self, channel: BulkChannel, token: int) -> bool:
        future = self._bulk(channel.peer_id).requests.pop(token, None)
        if future is None or future.done():
            return False
        future.set_result(channel)
        return True

    def bulk_idle(self, channel: BulkChannel) -> None:
        """The stream on this channel is over at both ends."""
        bulk = self._bulk(channel.peer_id)
        self._release(bulk, channel)
        if channel.role is Role.OPENER and channel.error is None:
            bulk.idle.append(channel)
            if len(bulk.idle) > self._limits.max_idle_bulk_per_peer:
                self._retire(bulk.idle[0])

    def bulk_lost(self, channel: BulkChannel, error: ConnectionLost) -> None:
        bulk = self._bulk(channel.peer_id)
        bulk.channels.pop(channel, None)
        if channel in bulk.idle:
            bulk.idle.remove(channel)
        self._release(bulk, channel)
        self._host.connection_ended(channel.connection, error)
        self._drop_if_empty(channel.peer_id)

    def bulk_wanted(self, control: ControlChannel, wanted: BulkWanted) -> None:
        bulk = self._bulk(control.peer_id)
        if bulk.dialing >= self._limits.max_streams_per_peer or not wanted.addresses:
            control.reply(BulkDenied(wanted.token, "too many requests" if wanted.addresses else "no address to dial"))
            return
        bulk.dialing += 1
        self._host.spawn(self._dial_for(control, bulk, wanted))

    def bulk_denied(self, control: ControlChannel, denied: BulkDenied) -> None:
        future = self._bulk(control.peer_id).requests.pop(denied.token, None)
        if future is not None and not future.done():
            future.set_exception(PeerUnreachable(f"{control.peer_id.short} cannot dial this peer: {denied.reason}"))
        self._drop_if_empty(control.peer_id)

    # Inside

    async def _opener(self, peer: PeerID, bulk: _PeerBulk) -> BulkChannel:
        """An idle channel, or a new one. Who dialed the control connection is the likelier to succeed again."""
        while bulk.idle:
            channel = bulk.idle.pop()
            if channel.error is None:
                return channel
        control = await self._connections.control(peer)
        addresses = self._book.addresses_of(peer)
        askable = bool(self._host.info.addresses)
        if not addresses and not askable:
            raise PeerUnreachable(f"neither this peer nor {peer.short} can be dialed")
        ways = [partial(self._dial, peer, addresses)] if addresses else []
        if askable:
            ways.insert(len(ways) if control.connection.dialed else 0, partial(self._ask, control, bulk))
        problems = []
        for way in ways:
            try:
                return await way()
            except PeerUnreachable as problem:
                problems.append(problem)
        raise PeerUnreachable("; ".join(map(str, problems))) from problems[0]

    async def _dial(self, peer: PeerID, addresses: tuple[str, ...]) -> BulkChannel:
        try:
            connection = await dial_any(self._host.transport, peer, addresses, Purpose.BULK, self._limits.dial_timeout)
        except ConnectError as error:
            raise PeerUnreachable(f"{peer.short} cannot be dialed: {error}") from error
        return self._take_up(connection, Role.OPENER)

    async def _ask(self, control: ControlChannel, bulk: _PeerBulk) -> BulkChannel:
        """Has the other end dial. It names our token on the new connection; see `offered`."""
        token, self._next_token = self._next_token, self._next_token + 1
        future = bulk.requests[token] = asyncio.get_running_loop().create_future()
        control.post(BulkWanted(token, self._host.info.addresses))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().reset("nobody waits for this connection any more")
            raise
        finally:
            bulk.requests.pop(token, None)

    async def _dial_for(self, control: ControlChannel, bulk: _PeerBulk, wanted: BulkWanted) -> None:
        try:
            connection = await dial_any(
                self._host.transport, control.peer_id, wanted.addresses, Purpose.BULK, self._limits.dial_timeout
            )
            self._take_up(connection, Role.SERVER)
            await connection.send(wire.encode(Offer(wanted.token)))
        except ConnectError as error:
            control.reply(BulkDenied(wanted.token, str(error)[:MAX_TEXT]))
        except ConnectionLost:
            pass  # the asker hears of it: its request ends with the control connection or its deadline
        finally:
            bulk.dialing -= 1
            self._drop_if_empty(control.peer_id)

    def _take_up(self, connection: Connection, role: Role) -> BulkChannel:
        channel = BulkChannel(connection, self._host, role)
        self._bulk(channel.peer_id).channels[channel] = None
        connection.start(channel)
        return channel

    def _retire(self, channel: BulkChannel) -> None:
        self._bulk(channel.peer_id).idle.remove(channel)
        self._host.spawn(channel.connection.close("idle"))

    def _release(self, bulk: _PeerBulk, channel: BulkChannel) -> None:
        if channel in bulk.using:
            del bulk.using[channel]
            bulk.slots.release()

    def _bulk(self, peer: PeerID) -> _PeerBulk:
        bulk = self._peers.get(peer)
        if bulk is None:
            bulk = self._peers[peer] = _PeerBulk(self._limits)
        return bulk

    def _drop_if_empty(self, peer: PeerID) -> None:
        bulk = self._peers.get(peer)
        if bulk is not None and bulk.empty:
            del self._peers[peer]
