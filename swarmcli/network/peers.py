"""The other peers of an endpoint: the connections of both kinds with each, and who waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from swarmcli.errors import AddressError, ConnectionLost
from swarmcli.network.addresses import Scope, parse_address, scope_of
from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.control.channel import ControlChannel
from swarmcli.network.identity import PeerID
from swarmcli.network.streams.channel import StreamChannel
from swarmcli.network.transports.base import Connection


class Peer:
    """Another peer with which there is a connection, or will be one."""

    def __init__(self, peer_id: PeerID, limits: NetworkLimits) -> None:
        self.id = peer_id
        self.boot_id: bytes | None = None  # of the process that is this peer, once it has greeted
        self.controls: list[ControlChannel] = []  # its control connections …
        self.current: ControlChannel | None = None  # … and the one that is used
        self.opening: asyncio.Future[ControlChannel] | None = None
        self.watchers: list[asyncio.Future[str]] = []  # each is told when the last control connection has gone
        self.bulk: dict[StreamChannel, None] = {}
        self.idle: list[StreamChannel] = []  # those of them on which this end can open a stream now
        self.slots = asyncio.Semaphore(limits.max_streams_per_peer)  # one for each stream that is opened here
        self.streams_opening = 0  # that wait for a slot or a connection
        self.requests: dict[int, asyncio.Future[StreamChannel]] = {}  # token → the connection that the peer dials
        self.dialing = 0  # bulk connections that are being dialed because the peer has asked for them

    @property
    def watched(self) -> bool:
        """Whether anyone wants to know soon when this peer is gone."""
        return any(not watcher.done() for watcher in self.watchers)

    @property
    def in_use(self) -> bool:
        """Whether a stream to or from this peer is open, or waits for its connection."""
        return self.streams_opening > 0 or any(channel.stream is not None for channel in self.bulk)

    @property
    def bulk_received(self) -> int:
        """A count that changes whenever a byte comes from this peer on a bulk connection."""
        return sum(channel.connection.bytes_received for channel in self.bulk)

    def prefer(self, own_id: PeerID) -> None:
        """Chooses the current control connection by the rule that both ends share (see `control_pool`)."""
        same = [c for c in self.controls if c.boot_id == self.boot_id] or self.controls
        direct = [c for c in same if not c.connection.relayed] or same
        smaller_dialed = [c for c in direct if c.connection.dialed == (own_id < self.id)]
        candidates = smaller_dialed or direct
        self.current = candidates[-1] if candidates else None

    def take_idle(self, *, relayed: bool) -> StreamChannel | None:
        """The channel that became idle last and still stands."""
        for channel in [each for each in reversed(self.idle) if each.connection.relayed == relayed]:
            self.idle.remove(channel)
            if channel.error is None:
                return channel
        return None

    def lose_bulk(self, reason: str) -> None:
        """Ends all bulk connections: without a control connection nobody would notice that the peer is gone."""
        for future in self.requests.values():
            if not future.done():
                future.set_exception(ConnectionLost(reason))
        for channel in list(self.bulk):
            channel.reset(reason)


class Peers:
    """The peers with which there is a connection, or something under way."""

    def __init__(self, limits: NetworkLimits) -> None:
        self._limits = limits
        self._peers: dict[PeerID, Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def of(self, peer_id: PeerID) -> Peer:
        if peer_id not in self._peers:
            self._peers[peer_id] = Peer(peer_id, self._limits)
        return self._peers[peer_id]

    def get(self, peer_id: PeerID) -> Peer | None:
        return self._peers.get(peer_id)

    def current(self, peer_id: PeerID) -> ControlChannel | None:
        """The control connection that is used with this peer."""
        peer = self._peers.get(peer_id)
        return peer.current if peer is not None else None

    def controls(self) -> list[ControlChannel]:
        return [channel for peer in self._peers.values() for channel in peer.controls]

    def bulk(self) -> list[StreamChannel]:
        return [channel for peer in self._peers.values() for channel in peer.bulk]

    def forget(self, peer: Peer) -> None:
        """Removes a peer with which nothing is left."""
        if not (peer.controls or peer.opening or peer.bulk or peer.streams_opening or peer.requests or peer.dialing):
            self._peers.pop(peer.id, None)


def horizon_of(connection: Connection) -> Scope:
    """The narrowest scope that the other end shares with this one, as far as its address tells."""
    if connection.relayed:
        return Scope.INTERNET
    try:
        address = parse_address(connection.remote_address)
    except AddressError:
        return Scope.INTERNET
    if address.scheme == "memory":
        return scope_of(address.host) or Scope.HOST
    found = scope_of(address.host)
    return Scope.INTERNET if found is None else found
