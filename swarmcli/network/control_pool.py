"""The control connections of an endpoint: one per peer. The end that can dial makes it, and makes it again when it is
needed after it has ended.

When two peers dial each other at once, both connections come about. Both ends prefer the one that the peer with the
smaller id dialed (of two by the same dialer: the newer), and begin nothing more on the other. That one is closed when
it has not been used for a while, so no call fails. A direct connection is preferred to any that a relay carries.

All connections that are used belong to one process of the peer. If another process greets with its key, its connection
waits until the first process turns out to be dead; otherwise one of them leaves (`twins.py`).
"""

from __future__ import annotations

import asyncio
import logging

from swarmcli.errors import CallError, ConnectError, ConnectionLost, OwnAddressError, PeerUnreachable
from swarmcli.events import PeerConnected, PeerDisconnected, WayChanged
from swarmcli.network.addresses import parse_address
from swarmcli.network.control.channel import ControlChannel, Reaction
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.neighbours import Neighbours
from swarmcli.network.peers import Peer, horizon_of
from swarmcli.network.prefix import Prefix, prefix_of_address
from swarmcli.network.transports.base import Connection, Purpose
from swarmcli.network.twins import METHOD, PATIENCE, Presence, TwinSeen, was_first
from swarmcli.network.wire.codec import encode
from swarmcli.network.wire.messages import AddressesChanged, ControlHello

logger = logging.getLogger(__name__)

# Seconds
_SURPLUS_LIFE = 5.0  # without a call, after which both ends are sure to use the better of two connections
_GOODBYE = 1.0  # for the other end to read why its connection ends


class ControlPool:
    """Finds the control connection to each peer.

    `reactions`: type of a message that concerns more than its channel → its handler. Other parts of the endpoint add
    theirs before the first connection comes about.
    """

    def __init__(self, endpoint: Neighbours) -> None:
        self.reactions: dict[type, Reaction] = {ControlHello: self._greeted, AddressesChanged: self._moved}
        self._endpoint, self._peers = endpoint, endpoint.peers
        self._closed = ""  # why this endpoint takes up no connections any more

    def prefix_of(self, connection: Connection) -> Prefix:
        """See Neighbours.prefix; for one connection."""
        relay = parse_address(connection.remote_address).relay if connection.relayed else None
        through = self._peers.current(relay) if relay is not None else None
        if through is not None and not through.connection.relayed:
            # It counts in the relay's own network: relays are identities too, so their ids alone would bound nothing.
            return Prefix("relay", prefix_of_address(through.connection.remote_address).network)
        return prefix_of_address(connection.remote_address)

    async def control(self, peer_id: PeerID) -> ControlChannel:
        """The channel to this peer, dialed if there is none. Raises PeerUnreachable, ConnectionLost and ValueError."""
        if (current := self._peers.current(peer_id)) is not None:
            return current
        if self._closed:
            raise ConnectionLost(f"this endpoint is closed: {self._closed}")
        if peer_id == self._endpoint.peer_id:
            raise ValueError("a peer cannot call itself over the network")
        peer = self._peers.of(peer_id)
        if peer.opening is None:
            peer.opening = asyncio.get_running_loop().create_future()
            self._endpoint.tasks.spawn(self._open(peer))
        opened = await asyncio.shield(peer.opening)
        return peer.current or opened  # a better one may have come meanwhile

    async def connect(self, address: str, timeout: float) -> PeerID:
        """Dials an address whose peer may be unknown. Raises ConnectError, AddressError."""
        expected = parse_address(address).peer_id
        if expected is not None and self._peers.current(expected) is not None:
            return expected
        connection = await self._endpoint.dialer.dial(address, expected, Purpose.CONTROL, timeout)
        if connection.peer_id == self._endpoint.peer_id:
            connection.abort("dialed oneself")
            raise OwnAddressError(f"{address} is this peer itself", address=address)
        try:
            await self.establish(connection)
        except ConnectionLost as error:
            raise ConnectError(f"{address}: {error}", step="handshake", address=address) from error
        return connection.peer_id

    async def establish(self, connection: Connection) -> None:
        """Greets on a new connection and takes it up. Raises ConnectionLost."""
        prefix = self.prefix_of(connection)
        channel = ControlChannel(connection, self._endpoint, prefix, self.reactions, self._channel_lost)
        try:
            await connection.send(encode(ControlHello(self._endpoint.boot_id, self._endpoint.addresses)))
        except asyncio.CancelledError:
            connection.abort("given up while being dialed")
            raise
        if self._closed:
            connection.abort("this endpoint is closed")
            raise ConnectionLost(f"this endpoint is closed: {self._closed}")
        self._take_up(channel)
        connection.start(channel)

    def close_surplus(self) -> None:
        """Called at each keepalive interval: closes connections besides the one that both ends prefer.

        The other end has greeted on the better one, so it knows it too and begins its calls there. The pause is for a
        call that it began just before: it may still be on its way here.
        """
        now = loop_time()
        for channel in self._peers.controls():
            better = self._peers.current(channel.peer_id)
            if channel is better or better is None or better.boot_id is None or channel.unfinished:
                continue
            # Where one end dialed several at once, the two ends may have seen different ones come last. Were
            # both as patient, each could close the one that the other prefers, at the same moment.
            patience = _SURPLUS_LIFE * (1 if self._endpoint.peer_id < channel.peer_id else 3)
            if now - max(channel.used_at, better.opened_at) >= patience:
                self._endpoint.tasks.spawn(channel.connection.close("another connection is used"))

    async def farewell(self, reason: str) -> None:
        """Tells all peers, and closes. Takes a second at most."""
        self._closed = self._closed or reason
        await asyncio.gather(*(_say_goodbye(channel, reason) for channel in self._peers.controls()))

    # Inside

    def _take_up(self, channel: ControlChannel) -> None:
        peer = self._peers.of(channel.peer_id)
        first = not peer.controls
        peer.controls.append(channel)
        self._endpoint.farthest = max(self._endpoint.farthest, horizon_of(channel.connection))
        self._prefer(peer)
        self._endpoint.ledgers.connections.charge_anyway(channel.peer_id, channel.prefix, 1)
        if first:
            self._emit_connected(channel)
        self._make_room(peer, channel.prefix)
        if peer.opening is not None:
            opening, peer.opening = peer.opening, None
            if not opening.done():
                opening.set_result(peer.current or channel)

    def _greeted(self, channel: ControlChannel, hello: ControlHello) -> None:
        peer = self._peers.of(channel.peer_id)
        if peer.boot_id not in {each.boot_id for each in peer.controls} - {None}:
            peer.boot_id = hello.boot_id  # of the first process, or of the next one after it has no connection left
        self._moved(channel, hello)
        self._prefer(peer)
        if peer.current is not None and peer.boot_id != hello.boot_id:
            self._endpoint.tasks.spawn(self._settle(peer, peer.current, channel))

    def _moved(self, channel: ControlChannel, message: ControlHello | AddressesChanged) -> None:
        """The peer says where it can be dialed. What it says below the horizon that it shares with us is left out."""
        channel.addresses = message.addresses
        peer = self._peers.of(channel.peer_id)
        if channel.boot_id == peer.boot_id:
            # Of all its connections: what a peer says over a relay is believed as far as its direct one allows.
            horizon = min(horizon_of(each.connection) for each in peer.controls)
            self._endpoint.book.told(channel.peer_id, message.addresses, horizon)

    async def _settle(self, peer: Peer, first: ControlChannel, second: ControlChannel) -> None:
        """Finds out which of two processes with one key is this peer from now on, and lets both know."""
        first_id, second_id = first.boot_id or b"", second.boot_id or b""
        stays = await _tell(first, TwinSeen(second_id, second.connection.remote_address))
        comes = stays and await _tell(second, TwinSeen(first_id, first.connection.remote_address, stays))
        if comes:
            await _tell(first, TwinSeen(second_id, second.connection.remote_address, comes))
        if second.error is not None or second_id == peer.boot_id:
            return  # the second is gone, or was taken up by another connection meanwhile
        if stays is None or (comes and was_first(comes.age, second_id, stays.age, first_id)):
            self._replace(peer, second)
        else:
            await second.connection.close("another process with this peer's key is here")

    def _replace(self, peer: Peer, channel: ControlChannel) -> None:
        """A peer that started anew has forgotten its older connections: they are dead, and listeners hear of the loss,
        because the peer has also forgotten everything that it was told on them."""
        outdated = [other for other in peer.controls if other.boot_id not in (None, channel.boot_id)]
        peer.boot_id = channel.boot_id
        self._moved(channel, AddressesChanged(channel.addresses))
        self._prefer(peer)
        self._emit_lost(peer, "the peer started anew")
        self._emit_connected(channel)
        for other in outdated:
            other.connection.abort("the peer started anew")

    def _channel_lost(self, channel: ControlChannel, error: ConnectionLost) -> None:
        peer = self._peers.of(channel.peer_id)
        peer.controls.remove(channel)
        self._endpoint.ledgers.connections.give_back(channel.peer_id, channel.prefix, 1)
        self._endpoint.connection_ended(channel.connection, error)
        self._prefer(peer)
        if peer.current is None:
            self._emit_lost(peer, error.reason)
            peer.lose_bulk(error.reason)
            self._peers.forget(peer)

    async def _open(self, peer: Peer) -> None:
        """Dials for `peer.opening`, unless the peer's own dial comes before."""
        opening = peer.opening
        if opening is None:
            return  # the peer's dial has come before this task began
        problem: ConnectError | ConnectionLost | None = None
        dialer = self._endpoint.dialer
        try:
            await self.establish(await dialer.dial_peer(peer.id, dialer.addresses_of(peer.id), Purpose.CONTROL))
        except (ConnectError, ConnectionLost) as error:
            problem = error
        finally:
            if not opening.done():
                peer.opening = None
                self._peers.forget(peer)
                failure = PeerUnreachable(f"{peer.id.short} cannot be reached: {problem}")
                failure.__cause__ = problem
                opening.set_exception(failure)
                opening.exception()  # the caller may be gone

    def _make_room(self, peer: Peer, prefix: Prefix) -> None:
        """Gives up a connection when there are too many: with a peer that dials on and on, in its prefix, or in the
        one that uses the most."""
        ledger = self._endpoint.ledgers.connections
        if len(peer.controls) > ledger.budget.identity:
            candidates = [channel for channel in peer.controls if channel is not peer.current]
        else:
            crowded = ledger.crowded(prefix, 0)
            candidates = [channel for channel in self._peers.controls() if channel.prefix == crowded]
        # A channel that is ending stays in the list until it is lost, and more may come before that.
        victim = min((channel for channel in candidates if not channel.ending), key=self._standing, default=None)
        if victim is not None:
            victim.ending = True
            self._endpoint.tasks.spawn(_say_goodbye(victim, "too many connections"))

    def _standing(self, channel: ControlChannel) -> tuple[bool, bool, bool, float]:
        """Reasons to keep a connection: that this peer wants it, that it has stood for long, that it is used.

        Calls of the other end come last, since it can always have some under way.
        """
        ours = channel.connection.dialed or channel.calls_waiting > 0 or self._peers.of(channel.peer_id).watched
        lasting = loop_time() - channel.opened_at >= self._endpoint.limits.budgets.standing
        return ours, lasting, channel.unfinished, channel.used_at

    def _prefer(self, peer: Peer) -> None:
        """Chooses the current channel anew, and tells when that is another way to the peer."""
        before = peer.current
        peer.prefer(self._endpoint.peer_id)
        now = peer.current
        if now is not None:
            self._endpoint.near[peer.id] = now.connection.on_this_computer
        if before is not None and now is not None and before.connection.relayed != now.connection.relayed:
            way = WayChanged(peer.id.text, now.connection.remote_address, now.connection.relayed)
            self._endpoint.events.emit(way)

    def _emit_connected(self, channel: ControlChannel) -> None:
        self._endpoint.events.emit(PeerConnected(channel.peer_id.text, channel.connection.remote_address))

    def _emit_lost(self, peer: Peer, reason: str) -> None:
        watchers, peer.watchers = peer.watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(reason)
        self._endpoint.events.emit(PeerDisconnected(peer.id.text, reason))


async def _tell(channel: ControlChannel, seen: TwinSeen) -> Presence | None:
    """The signed age of the process at the other end; None: it does not answer, or is of a version that gives none."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await channel.call(METHOD, seen, Presence)
    except (TimeoutError, ConnectionLost, CallError):
        return None


async def _say_goodbye(channel: ControlChannel, reason: str) -> None:
    """Closes in order, but within a second: a peer that does not read could hold the connection open."""
    try:
        async with asyncio.timeout(_GOODBYE):
            await channel.connection.close(reason)
    except TimeoutError:
        logger.debug("%s did not read the goodbye", channel.peer_id.short)
    finally:
        channel.connection.abort(reason)
