"""Counters of one endpoint, and the snapshot that they are shown as."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmcli.errors import ProtocolViolation
from swarmcli.events import Event, PeerRefused
from swarmcli.network.identity import PeerID
from swarmcli.network.transports.base import Connection


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes on connections with their framing, without what encryption adds."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.sent + other.sent, self.received + other.received)


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """What an endpoint looks like at one moment."""

    peers: int  # connected ones
    bulk_connections: int
    idle_bulk_connections: int
    known_peers: int  # in the address book
    calls_waiting: int  # own ones, for an answer
    calls_serving: int
    calls_made: int  # since the start
    streams_open: int  # in both directions
    streams_made: int
    traffic: Volume  # all of it
    traffic_by_peer: Mapping[PeerID, Volume]
    violations: Mapping[str, int]  # name of the broken rule → connections closed for it
    refusals: Mapping[str, int]  # what was refused (tensors, state, group, …) → how often
    refusals_by_peer: Mapping[str, int]  # peer → how often something of it was refused

    @property
    def bytes_sent(self) -> int:
        return self.traffic.sent

    @property
    def bytes_received(self) -> int:
        return self.traffic.received


class Traffic:
    """What is left of connections that have ended. `by_peer` is bounded, the oldest go first."""

    def __init__(self, max_peers: int) -> None:
        self._max_peers = max_peers
        self._total = Volume()
        self._by_peer: OrderedDict[PeerID, Volume] = OrderedDict()
        self.violations: Counter[str] = Counter()

    def ended(self, connection: Connection) -> None:
        self._total += _volume(connection)
        self._by_peer[connection.peer_id] = self._by_peer.get(connection.peer_id, Volume()) + _volume(connection)
        self._by_peer.move_to_end(connection.peer_id)
        if len(self._by_peer) > self._max_peers:
            self._by_peer.popitem(last=False)

    def violated(self, violation: ProtocolViolation) -> None:
        """The name of a rule is what stands before the first colon of the reason."""
        self.violations[violation.reason.partition(":")[0]] += 1

    def totals(self, standing: Iterable[Connection]) -> tuple[Volume, dict[PeerID, Volume]]:
        """Everything and by peer, connections that still stand included."""
        total, by_peer = self._total, dict(self._by_peer)
        for connection in standing:
            total += _volume(connection)
            by_peer[connection.peer_id] = by_peer.get(connection.peer_id, Volume()) + _volume(connection)
        return total, by_peer

    def passed(self, standing: Iterable[Connection]) -> Volume:
        """Everything that is through the links: without what still waits to be sent."""
        total = self._total
        for connection in standing:
            total += Volume(connection.bytes_sent - connection.bytes_waiting, connection.bytes_received)
        return total


class Refusals:
    """Counts the PeerRefused events of an endpoint, whoever emits them. `by_peer` is bounded, the oldest go first."""

    def __init__(self, max_peers: int) -> None:
        self._max_peers = max_peers
        self.by_kind: Counter[str] = Counter()
        self.by_peer: OrderedDict[str, int] = OrderedDict()

    def hear(self, event: Event) -> None:
        """A listener for `Events`."""
        if isinstance(event, PeerRefused):
            self.by_kind[event.what] += 1
            self.by_peer[event.peer] = self.by_peer.pop(event.peer, 0) + 1
            if len(self.by_peer) > self._max_peers:
                self.by_peer.popitem(last=False)


def _volume(connection: Connection) -> Volume:
    return Volume(connection.bytes_sent, connection.bytes_received)
