"""The cables of a memory network: what travels on them, the lines of peers, and the faults that they can have."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from swarmcli.network.identity import PeerID

Latency = float | Callable[[PeerID, PeerID], float]

# Bytes that one connection may send over a slow line before it is another's turn, at most and at least: what passes in
# 20 ms, as systems do it, but not less than a packet.
SHARED_PIECE, LEAST_PIECE = 16 << 10, 1448
PIECE = 64 << 10  # bytes that arrive at a time if no line is slow


@dataclass(frozen=True, slots=True, eq=False)
class Packet:
    data: bytes
    follows: bool = False  # it was written together with the packet before it
    reset: str = ""  # not "": the connection is reset, for this reason

    @property
    def size(self) -> int:
        return len(self.data)


def cut(data: bytes | memoryview, size: int) -> Iterator[Packet]:
    """The data as packets of at most `size` bytes. They are copies: the memory may be reused at once."""
    view = memoryview(data)
    for offset in range(0, len(view), size):
        yield Packet(bytes(view[offset : offset + size]), follows=offset > 0)


class MemoryLink:
    """One direction of a peer's line. With a bandwidth, its connections take turns, so that a small frame passes
    between the pieces of large ones. `bandwidth` (bytes per second) may change at any time."""

    def __init__(self, bandwidth: float | None) -> None:
        self.bandwidth = bandwidth
        self._queues: dict[object, deque[tuple[Packet, Callable[[Packet], None]]]] = {}
        self._busy = False

    @property
    def piece(self) -> int:
        """Bytes that travel at a time."""
        if self.bandwidth is None:
            return PIECE
        return int(min(SHARED_PIECE, max(LEAST_PIECE, self.bandwidth / 50)))

    def submit(self, connection: object, packet: Packet, travel: Callable[[Packet], None]) -> None:
        """Calls `travel` with the packet once it is through."""
        if self.bandwidth is None and not self._queues:
            travel(packet)
            return
        self._queues.setdefault(connection, deque()).append((packet, travel))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._queues)
        if not self._busy:
            return
        connection = next(iter(self._queues))
        queue = self._queues.pop(connection)
        turn = [queue.popleft()]
        size = turn[0][0].size
        while queue and size + queue[0][0].size <= self.piece:  # as TCP puts small frames into one packet
            turn.append(queue.popleft())
            size += turn[-1][0].size
        if queue:
            self._queues[connection] = queue  # now the last in line
        seconds = size / self.bandwidth if self.bandwidth else 0.0
        asyncio.get_running_loop().call_later(seconds, self._sent, turn)

    def _sent(self, turn: list[tuple[Packet, Callable[[Packet], None]]]) -> None:
        for packet, travel in turn:
            travel(packet)
        self._next()

    def drop(self, connection: object) -> None:
        """Drops the packets of a connection that wait to be sent."""
        self._queues.pop(connection, None)


class Cables:
    """The lines of all peers, the latency between them, and their faults. Every random choice comes from `random`."""

    def __init__(self, seed: int, latency: Latency, bandwidth: float | None, loss: float) -> None:
        """See MemoryNetwork."""
        self.random = random.Random(seed)
        self._latency = latency
        self._bandwidth = bandwidth
        self._loss = loss
        self.uplinks: dict[PeerID, MemoryLink] = {}
        self.downlinks: dict[PeerID, MemoryLink] = {}
        self._groups: dict[PeerID, int] = {}  # partition; a peer in none is in group -1
        self._cuts: dict[tuple[PeerID, PeerID], None] = {}
        self._frozen: dict[PeerID, None] = {}
        self.pumps: dict[object, Callable[[], None]] = {}  # end of a connection → delivers what can be delivered there
        self._changed = asyncio.Event()

    def partition(self, *groups: Iterable[PeerID]) -> None:
        """Peers reach only those of their own group; peers in no group reach each other. Replaces the last
        partition."""
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

    def set_bandwidth(self, peer: PeerID, bytes_per_second: float | None) -> None:
        """Sets both directions."""
        self.set_bandwidths(peer, uplink=bytes_per_second, downlink=bytes_per_second)

    def set_bandwidths(self, peer: PeerID, *, uplink: float | None, downlink: float | None) -> None:
        """Sets a link that is faster one way than the other, in bytes per second."""
        self.uplinks[peer].bandwidth = uplink
        self.downlinks[peer].bandwidth = downlink

    # For connections and transports

    def plug_in(self, peer: PeerID) -> None:
        self.uplinks[peer] = MemoryLink(self._bandwidth)
        self.downlinks[peer] = MemoryLink(self._bandwidth)

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
            seconds += 0.2 + 2 * seconds  # the least timeout of TCP on Linux
        return seconds

    def _flow_again(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for pump in list(self.pumps.values()):
            pump()


def _pair(a: PeerID, b: PeerID) -> tuple[PeerID, PeerID]:
    return (a, b) if a < b else (b, a)
