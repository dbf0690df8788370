"""A transport inside one process: delay, bandwidth, loss, partitions, kills and freezes, all from one seed.

The faults are those of real networks. A cut path loses nothing and resets nothing: what was sent waits (TCP sends
it again) until the path heals or someone gives up. A killed peer's connections are reset. A frozen peer is silent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.transports.base import FrameLimits
from swarmcli.testing.memory_link import Link
from swarmcli.testing.memory_transport import MemoryConnection, MemoryTransport

Latency = float | Callable[[PeerID, PeerID], float]

_RETRANSMISSION = 0.2  # seconds; the least timeout of TCP on Linux


class MemoryNetwork:
    """The cables between the peers of one simulation. Every random choice comes from `random`."""

    def __init__(
        self, *, seed: int = 0, latency: Latency = 0.01, bandwidth: float | None = None, loss: float = 0.0
    ) -> None:
        """`latency` is seconds one way, or a function of source and target; `bandwidth` bytes per second of each
        peer's own link, in each direction (None: unlimited); `loss` the probability that a packet has to be sent
        twice, which delays it."""
        self.random = random.Random(seed)
        self._latency = latency
        self._bandwidth = bandwidth
        self._loss = loss
        self._transports: dict[str, MemoryTransport] = {}
        self._uplinks: dict[PeerID, Link] = {}
        self._downlinks: dict[PeerID, Link] = {}
        self._groups: dict[PeerID, int] = {}  # partition; who is in none is in group -1
        self._cuts: dict[tuple[PeerID, PeerID], None] = {}
        self._frozen: dict[PeerID, None] = {}
        self._connections: dict[MemoryConnection, None] = {}
        self._changed = asyncio.Event()

    def transport(
        self, identity: Identity, *, listening: bool = True, limits: FrameLimits | None = None
    ) -> MemoryTransport:
        """A peer's access to this network, at memory://<peer id's short form> if it may listen."""
        transport = MemoryTransport(self, identity, listening=listening, limits=limits or FrameLimits())
        self._transports[transport.name] = transport
        self._uplinks[identity.peer_id] = Link(self._bandwidth)
        self._downlinks[identity.peer_id] = Link(self._bandwidth)
        return transport

    def partition(self, *groups: Iterable[PeerID]) -> None:
        """Peers reach only those of their own group; peers in no group reach each other. Replaces the last one."""
        self._groups = {peer: number for number, group in enumerate(groups) for peer in group}

    def cut(self, a: PeerID, b: PeerID) -> None:
        """Nothing passes between these two any more."""
        self._cuts[_pair(a, b)] = None

    def heal(self) -> None:
        """Ends every partition and cut; what was held up arrives now."""
        self._groups.clear()
        self._cuts.clear()
        self._flow_again()

    def freeze(self, peer: PeerID) -> None:
        """Like SIGSTOP: nothing comes from this peer and nothing reaches it, but its connections stand."""
        self._frozen[peer] = None

    def thaw(self, peer: PeerID) -> None:
        self._frozen.pop(peer, None)
        self._flow_again()

    def kill(self, peer: PeerID) -> None:
        """Like SIGKILL: its connections are reset, it neither listens nor dials again."""
        for transport in list(self._transports.values()):
            if transport.identity.peer_id == peer:
                transport.die("killed")

    def set_bandwidth(self, peer: PeerID, bytes_per_second: float | None) -> None:
        """Of both directions."""
        self.set_bandwidths(peer, uplink=bytes_per_second, downlink=bytes_per_second)

    def set_bandwidths(self, peer: PeerID, *, uplink: float | None, downlink: float | None) -> None:
        """Of a link that is faster one way than the other, in bytes per second."""
        self._uplinks[peer].bandwidth = uplink
        self._downlinks[peer].bandwidth = downlink

    # The rest is for memory_transport.py.

    def severed(self, a: PeerID, b: PeerID) -> bool:
        return self._groups.get(a, -1) != self._groups.get(b, -1) or _pair(a, b) in self._cuts

    def frozen(self, *peers: PeerID) -> bool:
        return any(peer in self._frozen for peer in peers)

    def flows(self, a: PeerID, b: PeerID) -> bool:
        return not self.severed(a, b) and not self.frozen(a, b)

    async def until_flowing(self, a: PeerID, b: PeerID) -> None:
        while not self.flows(a, b):
            await self._changed.wait()

    def latency(self, source: PeerID, target: PeerID) -> float:
        """Seconds that the next packet takes one way."""
        seconds = self._latency(source, target) if callable(self._latency) else self._latency
        if self._loss and self.random.random() < self._loss:
            seconds += _RETRANSMISSION + 2 * seconds
        return seconds

    def uplink(self, peer: PeerID) -> Link:
        return self._uplinks[peer]

    def downlink(self, peer: PeerID) -> Link:
        return self._downlinks[peer]

    def listener(self, name: str) -> MemoryTransport | None:
        transport = self._transports.get(name)
        return transport if transport is not None and transport.accepts else None

    def joined(self, connection: MemoryConnection) -> None:
        self._connections[connection] = None

    def left(self, connection: MemoryConnection) -> None:
        self._connections.pop(connection, None)

    def _flow_again(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for connection in list(self._connections):
            connection.pump()


def _pair(a: PeerID, b: PeerID) -> tuple[PeerID, PeerID]:
    return (a, b) if a < b else (b, a)
