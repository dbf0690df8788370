"""The other peers as an endpoint knows them, and what passes between them and it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from swarmcli.clock import Clock
from swarmcli.events import Events
from swarmcli.network.addresses import Scope, is_direct
from swarmcli.network.bounds import MAX_KNOWN_PEERS
from swarmcli.network.context import EndpointContext, Traffic
from swarmcli.network.identity import PeerID
from swarmcli.network.peers import Peers, horizon_of
from swarmcli.network.prefix import Prefix
from swarmcli.network.transports.base import Connection, Transport
from swarmcli.recent import Recent


class Neighbours(EndpointContext):
    """The half of an endpoint that answers questions, and changes nothing but the address book."""

    def __init__(self, transport: Transport, clock: Clock | None, events: Events | None, seed: int | None) -> None:
        super().__init__(transport, clock, events, seed)
        self.peers = Peers(self.limits)
        self.dialer.ping_time = self.ping_time  # compares relays, so by a measure that they cannot lower by a lie
        self.near: Recent[PeerID, bool] = Recent(MAX_KNOWN_PEERS)  # see `is_on_this_computer`
        self.farthest = Scope.HOST  # the widest scope in which a connected peer was ever seen

    @property
    def direct_addresses(self) -> tuple[str, ...]:
        """Where this peer can be dialed itself, as far as it knows."""
        return tuple(filter(is_direct, self.addresses))

    def learn(self, peer: PeerID, addresses: Iterable[str], *, horizon: Scope | None = None) -> None:
        """Takes in addresses of a peer by hearsay, without those that cannot be read or lie below the horizon. None:
        `horizon(None)`. The book is bounded; see MAX_KNOWN_PEERS."""
        if peer != self.peer_id:
            self.book.learn(peer, addresses, self.horizon(None) if horizon is None else horizon)

    def horizon(self, source: PeerID | None) -> Scope:
        """The narrowest scope of addresses that are believed when this connected peer names them.

        A peer on the internet cannot name hosts of our LAN, and one in our LAN none of this machine: the same address
        would mean another host to it than to us, at best. None: a source that is not connected, such as a record of the
        hash table; it counts like the farthest peer that was ever connected.
        """
        channel = self.peers.current(source) if source is not None else None
        return horizon_of(channel.connection) if channel is not None else self.farthest

    def addresses_of(self, peer: PeerID) -> tuple[str, ...]:
        """Where this peer would be tried now, the best address first."""
        return self.addresses if peer == self.peer_id else self.dialer.addresses_of(peer)

    def first_hand(self, peer: PeerID) -> tuple[str, ...]:
        """Where we have dialed this peer and it has answered."""
        return self.book.first_hand(peer)

    def own_word(self, peer: PeerID) -> tuple[str, ...]:
        """Where this peer has answered us, or says that it can be dialed: without hearsay and host names, so it may be
        told to others, as hearsay."""
        return self.addresses if peer == self.peer_id else self.book.own_word(peer)

    def seen(self, peer: PeerID) -> Connection | None:
        """The current control connection, which tells where the two ends see each other; None: there is none."""
        channel = self.peers.current(peer)
        return channel.connection if channel is not None else None

    def prefix(self, peer: PeerID) -> Prefix | None:
        """The network that this peer is counted in, by its current control connection; None: there is none.

        A peer that comes through a relay is counted in the relay's network, however many identities relay there.
        """
        channel = self.peers.current(peer)
        return channel.prefix if channel is not None else None

    def connected(self) -> tuple[PeerID, ...]:
        """The peers to which there is a control connection."""
        return tuple(peer.id for peer in self.peers if peer.controls)

    def is_connected(self, peer: PeerID) -> bool:
        return self.peers.current(peer) is not None

    def is_on_this_computer(self, peer: PeerID) -> bool:
        """Whether the control connection with this peer stays within this computer, or the last one did."""
        return self.near.get(peer, False)

    def lost(self, peer: PeerID) -> asyncio.Future[str]:
        """A future that is done, with the reason, as soon as there is no control connection to this peer any more.

        Already done if there is none. While someone waits for it, the peer is watched closely: a dead cable is
        noticed after `keepalive_interval + keepalive_timeout`. Cancel it when it no longer matters.
        """
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        known = self.peers.get(peer)
        if known is None or known.current is None:
            future.set_result("not connected")
        else:
            known.watchers = [watcher for watcher in known.watchers if not watcher.done()]
            known.watchers.append(future)
        return future

    def received(self, peer: PeerID) -> int | None:
        """Bytes that have come from this peer on the connections that stand now; None: there is no control connection.

        They grow as long as the peer lives: while someone waits for `lost`, it is pinged after each second of silence.
        """
        known = self.peers.get(peer)
        if known is None or known.current is None:
            return None
        return known.current.connection.bytes_received + known.bulk_received

    def round_trip(self, peer: PeerID) -> float | None:
        """Smoothed seconds from a question to its answer, without the time that the peer says it took. None: not known.

        A peer can claim to be nearer than it is; see `ping_time`. One that answers late is believed up to
        `LONGEST_ROUND_TRIP`.
        """
        channel = self.peers.current(peer)
        return channel.round_trip if channel is not None else None

    def ping_time(self, peer: PeerID) -> float | None:
        """Smoothed seconds from a ping to its pong, with the time that the peer took. None: not known.

        For decisions in which a peer would gain by a lie: it can seem farther away than it is, but never nearer.
        """
        channel = self.peers.current(peer)
        return channel.ping_time if channel is not None else None

    def passed(self) -> Traffic:
        """Bytes that have passed this peer's line so far, as far as that is known: without what still waits."""
        waiting = sum(connection.bytes_waiting for connection in self.connections())
        traffic = self._traffic()
        return Traffic(traffic.sent - waiting, traffic.received)

    def moved_by_now(self) -> dict[str, Traffic]:
        moved = dict(self.streamed)
        for channel in self.peers.bulk():
            if channel.service:
                moved[channel.service] = moved.get(channel.service, Traffic()) + channel.moved
        return moved | {"": self._traffic() - sum(moved.values(), Traffic())}

    def connections(self) -> list[Connection]:
        controls = [channel.connection for channel in self.peers.controls()]
        return controls + [channel.connection for channel in self.peers.bulk()]

    def _traffic(self) -> Traffic:
        """Since the start, on connections that have ended and those that stand, and what was relayed for others."""
        ended, standing = self.ended_traffic, self.connections()
        sent = sum(each.bytes_sent for each in standing)
        return Traffic(ended.sent + sent, ended.received + sum(each.bytes_received for each in standing))

    def passed_on(self, nbytes: int) -> None:
        """Counts bytes that this peer relayed for others, which came and went, as those of the service `relay`."""
        moved = Traffic(nbytes, nbytes)
        self.ended_traffic += moved
        self.stream_ended("relay", moved)
