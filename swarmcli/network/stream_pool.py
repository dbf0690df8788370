"""The bulk connections of an endpoint: kept for the next stream, dialed by whichever end can dial."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from swarmcli.errors import ConnectError, ConnectionLost, NetworkError, PeerUnreachable, ProtocolViolation
from swarmcli.network.addresses import is_direct, parse_address
from swarmcli.network.bounds import MAX_ADDRESSES
from swarmcli.network.control.channel import ControlChannel
from swarmcli.network.control_pool import ControlPool
from swarmcli.network.identity import PeerID
from swarmcli.network.ledger import HandshakeRates
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.neighbours import Neighbours
from swarmcli.network.peers import Peer
from swarmcli.network.prefix import Prefix
from swarmcli.network.streams.channel import Role, StreamChannel
from swarmcli.network.streams.stream import Stream
from swarmcli.network.transports.base import Connection, Purpose
from swarmcli.network.wire.codec import encode
from swarmcli.network.wire.messages import BulkDenied, BulkOffer, BulkWanted

_IDLE = 60.0  # seconds for which an unused connection is kept for the next stream


class StreamPool:
    """Finds a bulk connection for each stream."""

    def __init__(self, endpoint: Neighbours, control: ControlPool) -> None:
        self._endpoint, self._peers = endpoint, endpoint.peers
        self._limits = endpoint.limits
        self._control = control
        self._next_token = 0
        self._rates = HandshakeRates(endpoint.limits.budgets)  # of dials that others ask for
        control.reactions[BulkWanted] = self._bulk_wanted
        control.reactions[BulkDenied] = self._bulk_denied

    async def open(self, peer_id: PeerID, method: str, request: Any) -> tuple[StreamChannel, Stream]:
        """Begins a stream. Raises PeerUnreachable, ConnectionLost."""
        peer = self._peers.of(peer_id)
        peer.streams_opening += 1
        try:
            await peer.slots.acquire()
            try:
                channel = await self._opener(peer)
            except BaseException:  # a cancellation too: no channel is there yet whose end would release the slot
                peer.slots.release()
                raise
            channel.holds_slot = True  # from here on the slot is the channel's: its end releases it
            try:
                return channel, await channel.open(method, request)
            except BaseException:  # a cancellation too, or the slot would be taken until the peer hangs up
                channel.reset("the stream was given up while it was opened")
                raise
        finally:
            peer.streams_opening -= 1
            self._peers.forget(peer)

    def accepted(self, connection: Connection) -> None:
        ledger, peer = self._endpoint.ledgers.bulk, connection.peer_id
        if ledger.of_identity(peer) >= ledger.budget.identity:
            violation = ProtocolViolation(f"too many bulk connections: more than {ledger.budget.identity}")
            connection.abort(violation.reason)
            self._endpoint.connection_ended(connection, violation)
            return
        crowded = ledger.crowded(self._control.prefix_of(connection))
        if crowded is None or self._give_up_one_of(crowded):
            self._take_up(connection, Role.UNKNOWN)
        else:
            connection.abort("too many bulk connections from this network")

    def made(self, connection: Connection) -> None:
        """Keeps for the next stream a connection that this end has dialed by other means."""
        channel = self._take_up(connection, Role.OPENER)
        self._peers.of(connection.peer_id).idle.append(channel)

    def tick(self) -> None:
        """Called at each keepalive interval: closes what is not used."""
        self._feed_the_starved()  # before the ticks: they let starved streams try again, and then none seems to wait
        for channel in self._peers.bulk():
            quiet = channel.tick() * self._limits.keepalive_interval
            alive = self._peers.current(channel.peer_id) is not None
            if not alive and quiet >= self._limits.keepalive_timeout:
                channel.reset("no control connection to this peer")
            elif channel.role is Role.UNKNOWN and quiet >= self._limits.keepalive_timeout:
                channel.reset("opened and never used")
            elif channel.role is Role.OPENER and channel.stream is None and quiet >= _IDLE:
                self._retire(channel)
            elif channel.lingering and quiet >= 2 * _IDLE:
                channel.reset("idle for too long")

    def _feed_the_starved(self) -> None:
        """If payloads wait for memory, ends the connection that has held the most of it for long: in the prefix that is
        full or, if everyone's memory is taken, in the one that uses the most."""
        starved = [c for c in self._peers.bulk() if c.stream is not None and c.stream.starved]
        ledger = self._endpoint.ledgers.payloads
        for crowded in {ledger.crowded(each.prefix, self._limits.max_payload) for each in starved}:
            patient = self._limits.budgets.patience / self._limits.keepalive_interval
            holders = [c for c in self._peers.bulk() if c.prefix == crowded and c.unread_ticks >= patient]
            if holders:
                most = max(holders, key=lambda c: (ledger.of_identity(c.peer_id), c.account.held))
                most.reset("its memory is needed")

    # Called by channels, and for peers

    def _offered(self, channel: StreamChannel, token: int) -> bool:
        future = self._peers.of(channel.peer_id).requests.pop(token, None)
        if future is None or future.done():
            return False
        future.set_result(channel)
        return True

    def _channel_idle(self, channel: StreamChannel) -> None:
        peer = self._peers.of(channel.peer_id)
        self._release(peer, channel)
        if channel.role is Role.OPENER and channel.error is None:
            peer.idle.append(channel)
            if len(peer.idle) > self._limits.max_idle_bulk_per_peer:
                self._retire(peer.idle[0])

    def _channel_lost(self, channel: StreamChannel, error: ConnectionLost) -> None:
        peer = self._peers.of(channel.peer_id)
        peer.bulk.pop(channel, None)
        self._endpoint.ledgers.bulk.give_back(channel.peer_id, channel.prefix, 1)
        if channel in peer.idle:
            peer.idle.remove(channel)
        self._release(peer, channel)
        self._endpoint.connection_ended(channel.connection, error)
        self._peers.forget(peer)

    def _bulk_wanted(self, control: ControlChannel, wanted: BulkWanted) -> None:
        peer = self._peers.of(control.peer_id)
        addresses = self._where_seen(control)
        # Dials that succeed cost the asker nothing. Without the second bound they could take all descriptors of this
        # process; without the rate, its processor, by connections that the asker ends as soon as they are there.
        full = (
            peer.dialing >= self._limits.max_streams_per_peer
            or len(peer.bulk) + peer.dialing >= self._limits.budgets.bulk.identity
        )
        if full or not addresses or not self._rates.take(control.prefix, loop_time()):
            control.reply(BulkDenied(wanted.token))
            self._peers.forget(peer)
            return
        peer.dialing += 1
        self._endpoint.tasks.spawn(self._dial_for(control, peer, wanted, addresses))

    def _bulk_denied(self, control: ControlChannel, denied: BulkDenied) -> None:
        peer = self._peers.of(control.peer_id)
        future = peer.requests.pop(denied.token, None)
        if future is not None and not future.done():
            future.set_exception(PeerUnreachable(f"{control.peer_id.short} did not dial this peer"))
        self._peers.forget(peer)

    # Inside

    async def _opener(self, peer: Peer) -> StreamChannel:
        """An idle channel, or a new one. The end that dialed the control connection is tried first: it is the likelier
        to succeed again."""
        if (channel := peer.take_idle(relayed=False)) is not None:
            return channel
        control = await self._control.control(peer.id)
        if control.connection.relayed and (channel := peer.take_idle(relayed=True)) is not None:
            return channel
        problems = []
        for way in self._ways(control, peer):
            try:
                return await way()
            except PeerUnreachable as problem:
                problems.append(problem)
        if not problems:
            raise PeerUnreachable(f"neither this peer nor {peer.id.short} can be dialed")
        raise PeerUnreachable("; ".join(map(str, problems))) from problems[0]

    def _ways(self, control: ControlChannel, peer: Peer) -> list[Callable[[], Awaitable[StreamChannel]]]:
        """The ways to a new channel, in the order in which they are tried; a relay is the last, even if a connection
        through one is idle."""
        came, addresses = not control.connection.dialed, self._endpoint.dialer.addresses_of(peer.id)
        direct = tuple(filter(is_direct, addresses))
        relays = addresses[len(direct) :]
        ways: list[Callable[[], Awaitable[StreamChannel]]] = [partial(self._dial, peer.id, direct)] if direct else []
        if control.connection.punched:
            return [partial(self._punch, peer.id), *ways, partial(self._relay, peer, relays)]
        # The other end can be asked to dial if this peer announces an address, or if it has dialed this peer before.
        if self._endpoint.direct or (came and not control.connection.relayed):
            ways.insert(0 if came else len(ways), partial(self._ask, control, peer))
        return [*ways, partial(self._relay, peer, relays)] if relays else ways

    def _where_seen(self, control: ControlChannel) -> tuple[str, ...]:
        """Where to dial a peer that asks for it: where it has answered, at the host from which it comes with the ports
        that it announces, and over its relays. Nowhere else: other addresses that it names may be others' hosts."""
        peer, connection = control.peer_id, control.connection
        proven, said = self._endpoint.book.first_hand(peer), self._endpoint.book.own_word(peer)
        seen: list[str] = []
        if not connection.dialed and not connection.relayed:
            host = parse_address(connection.remote_address)
            ports = [parse_address(each).port for each in said if is_direct(each)]
            seen = [str(replace(host, port=port)) for port in ports]
        relays = [each for each in said if not is_direct(each)]
        return self._endpoint.dialer.usable(dict.fromkeys((*proven, *seen, *relays)))[:MAX_ADDRESSES]

    async def _dial(self, peer: PeerID, addresses: tuple[str, ...]) -> StreamChannel:
        try:
            connection = await self._endpoint.dialer.dial_peer(peer, addresses, Purpose.BULK)
        except ConnectError as error:
            raise PeerUnreachable(f"{peer.short} cannot be dialed: {error}") from error
        return self._take_up(connection, Role.OPENER)

    async def _punch(self, peer: PeerID) -> StreamChannel:
        """Both ends dial at once, as for the control connection."""
        punch = self._endpoint.punch_bulk
        if punch is None:
            raise PeerUnreachable(f"{peer.short} cannot be dialed")
        try:
            connection = await punch(peer)
        except NetworkError as error:
            raise PeerUnreachable(f"{peer.short} and this peer could not dial each other: {error}") from error
        return self._take_up(connection, Role.OPENER)

    async def _relay(self, peer: Peer, relays: tuple[str, ...]) -> StreamChannel:
        idle = peer.take_idle(relayed=True)
        return idle if idle is not None else await self._dial(peer.id, relays)

    async def _ask(self, control: ControlChannel, peer: Peer) -> StreamChannel:
        """Has the other end dial. It names our token on the new connection; see `_offered`."""
        token, self._next_token = self._next_token, self._next_token + 1
        future = peer.requests[token] = asyncio.get_running_loop().create_future()
        control.post(BulkWanted(token))
        try:
            return await future
        except asyncio.CancelledError:
            # The connection may have come at the very moment at which its asker was cancelled.
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().reset("nobody waits for this connection any more")
            raise
        finally:
            peer.requests.pop(token, None)

    async def _dial_for(
        self, control: ControlChannel, peer: Peer, wanted: BulkWanted, addresses: tuple[str, ...]
    ) -> None:
        try:
            connection = await self._endpoint.dialer.dial_peer(control.peer_id, addresses, Purpose.BULK)
            self._take_up(connection, Role.SERVER)
            await connection.send(encode(BulkOffer(wanted.token)))
        except ConnectError:
            control.reply(BulkDenied(wanted.token))
        except ConnectionLost:
            pass  # the asker hears of it: its request ends with the control connection or its deadline
        finally:
            peer.dialing -= 1
            self._peers.forget(peer)

    def _take_up(self, connection: Connection, role: Role) -> StreamChannel:
        prefix = self._control.prefix_of(connection)
        channel = StreamChannel(
            connection,
            self._endpoint,
            role,
            prefix,
            offered=self._offered,
            idle=self._channel_idle,
            lost=self._channel_lost,
        )
        self._peers.of(channel.peer_id).bulk[channel] = None
        self._endpoint.ledgers.bulk.charge_anyway(channel.peer_id, prefix, 1)
        connection.start(channel)
        return channel

    def _give_up_one_of(self, crowded: Prefix) -> bool:
        """Ends the connection of this prefix that has been unused for longest, if there is one."""
        unused = [c for c in self._peers.bulk() if c.prefix == crowded and c.spare]
        if not unused:
            return False
        max(unused, key=lambda c: (c.role is Role.UNKNOWN, c.quiet_ticks)).reset("too many bulk connections")
        return True

    def _retire(self, channel: StreamChannel) -> None:
        self._peers.of(channel.peer_id).idle.remove(channel)
        self._endpoint.tasks.spawn(channel.connection.close("idle"))

    def _release(self, peer: Peer, channel: StreamChannel) -> None:
        if channel.holds_slot:
            channel.holds_slot = False
            peer.slots.release()
