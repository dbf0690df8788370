"""What travels on the memory network, and the links over which a peer sends and receives it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

CHUNK = 16 * 1024  # bytes that one connection may send before it is another's turn
OVERHEAD = 8  # bytes per frame beyond header and payload


class Kind(Enum):
    PART = "more of a frame"  # its bytes count as heard, nothing is delivered yet
    FRAME = "a whole frame, or the last of it"
    FIN = "an orderly end; arrives behind everything sent before"
    RESET = "an end at once"


@dataclass(frozen=True, slots=True, eq=False)
class Packet:
    kind: Kind
    size: int
    header: bytes = b""
    payload: bytes = b""
    reason: str = ""


def frame_packets(header: bytes, payload: bytes, split: bool) -> Iterator[Packet]:
    """A frame as packets of at most CHUNK bytes, or as one packet if nothing else has to fit in between."""
    size = OVERHEAD + len(header) + len(payload)
    while split and size > CHUNK:
        yield Packet(Kind.PART, CHUNK)
        size -= CHUNK
    yield Packet(Kind.FRAME, size, header, payload)


class Link:
    """A peer's way out, or in. With a bandwidth, its connections take turns, so that a small frame passes between the
    chunks of large ones. `bandwidth` (bytes per second) may change at any time."""

    def __init__(self, bandwidth: float | None) -> None:
        self.bandwidth = bandwidth
        self._queues: dict[object, deque[tuple[Packet, Callable[[Packet], None]]]] = {}
        self._busy = False

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
        packet, travel = queue.popleft()
        if queue:
            self._queues[connection] = queue  # now the last in line
        seconds = packet.size / self.bandwidth if self.bandwidth else 0.0
        asyncio.get_running_loop().call_later(seconds, self._sent, packet, travel)

    def _sent(self, packet: Packet, travel: Callable[[Packet], None]) -> None:
        travel(packet)
        self._next()
