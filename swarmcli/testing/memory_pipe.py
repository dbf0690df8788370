"""Bytes from one end of a memory network to another: packets that leave by a line, travel, arrive and are taken.

`MemorySocket` carries plain bytes, without frames: for circuits, where the two ends run TLS of their own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from swarmcli.network.identity import PeerID
from swarmcli.testing.memory_cables import Cables, Packet, cut

_HIGH, _LOW = 256 << 10, 128 << 10  # bytes under way above which a sender waits, and at which it goes on


class MemoryPipe:
    """One end of a connection; `other` is the other one. The faults of the cables apply to it."""

    other: Any  # of the same class

    def __init__(self, cables: Cables, ends: tuple[PeerID, PeerID]) -> None:
        """`ends` are this peer and the other one."""
        self.own_id, self.peer_id = ends
        self._cables = cables
        self._loop = asyncio.get_running_loop()
        self._travelling: deque[Packet] = deque()  # towards this end, in order
        self._last_arrival = 0.0
        self._inbox: deque[Packet] = deque()  # arrived and not yet delivered
        self._unacknowledged = 0  # bytes sent from here that the other end has not taken yet
        self._ended_in_order = False
        cables.pumps[self] = self.pump

    @property
    def ended(self) -> bool:
        raise NotImplementedError

    def pump(self) -> None:
        """Delivers what has arrived, as far as path and receiver allow."""
        raise NotImplementedError

    def sending_may_go_on(self, may: bool) -> None:
        """False: too much is under way; True: that is over."""
        raise NotImplementedError

    def transmit(self, data: bytes | memoryview, largest: int) -> None:
        self._unacknowledged += len(data)
        if self._unacknowledged > _HIGH:
            self.sending_may_go_on(False)
        uplink, downlink = self._cables.uplinks[self.own_id], self._cables.downlinks[self.peer_id]
        for packet in cut(data, min(uplink.piece, downlink.piece, largest)):
            uplink.submit(self, packet, self.other.travel)

    def travel(self, packet: Packet) -> None:
        """The packet has left the other end's line and will reach this one's, after those before it."""
        arrival = self._loop.time() + self._cables.latency(self.peer_id, self.own_id)
        gap = packet.size / 1e9 if packet.follows else 0  # seconds after the packet before: 1 GB/s if no line is slow
        self._last_arrival = max(arrival, self._last_arrival + gap)
        self._travelling.append(packet)
        self._loop.call_at(self._last_arrival, self._reach_link)

    def acknowledged(self, size: int) -> None:
        self._unacknowledged -= size
        if self._unacknowledged <= _LOW:
            self.sending_may_go_on(True)

    def forget_unsent(self) -> None:
        """Forgets what has not been sent or delivered yet, like a socket that is reset."""
        self._cables.uplinks[self.own_id].drop(self)
        self._cables.downlinks[self.own_id].drop(self)

    def reset_other(self) -> None:
        """Sends the other end a reset, which is lost if the path is cut."""
        delay = self._cables.latency(self.own_id, self.peer_id)
        self._loop.call_later(delay, self.other.was_reset)

    def was_reset(self) -> None:
        if not self._cables.severed(self.own_id, self.peer_id):
            self._inbox.clear()
            self._inbox.append(Packet(b"", reset="reset by peer"))
            self.pump()

    def _reach_link(self) -> None:
        self._cables.downlinks[self.own_id].submit(self, self._travelling.popleft(), self._arrive)

    def _arrive(self, packet: Packet) -> None:
        if not self.ended:
            self._inbox.append(packet)
            self.pump()
        elif self._ended_in_order:
            self.other.acknowledged(packet.size)  # thrown away: the goodbye is on its way to the other end
        elif self._cables.flows(self.own_id, self.peer_id) and not self.other.ended:
            self.reset_other()  # like a kernel that knows no such connection (any more)


class MemorySocket(asyncio.Transport, MemoryPipe):
    """Takes the place of asyncio's transport of a socket, and calls a BufferedProtocol. An empty packet is EOF."""

    other: MemorySocket

    def __init__(self, cables: Cables, ends: tuple[PeerID, PeerID], protocol: asyncio.BufferedProtocol) -> None:
        asyncio.Transport.__init__(self)
        MemoryPipe.__init__(self, cables, ends)
        self._protocol = protocol
        self._paused = self._pumping = self._over = self._full = False

    @property
    def ended(self) -> bool:
        return self._over

    # What asyncio.Transport promises

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._over:
            self.transmit(bytes(data), _HIGH)

    def write_eof(self) -> None:
        if not self._over:
            self._cables.uplinks[self.own_id].submit(self, Packet(b""), self.other.travel)

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Does nothing: the memory network has limits of its own."""

    def get_write_buffer_size(self) -> int:
        return self._unacknowledged

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.BufferedProtocol)
        self._protocol = protocol

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._loop.call_soon(self.pump)

    def is_closing(self) -> bool:
        return self._over

    def close(self) -> None:
        self._ended_in_order = True
        self.write_eof()
        self._end(None)

    def abort(self) -> None:
        self.die("")

    def die(self, reason: str) -> None:
        if not self._over:
            self.forget_unsent()
            self.reset_other()
            self._end(None)

    # For the network

    def sending_may_go_on(self, may: bool) -> None:
        if self._full is may and not self._over:
            self._full = not may
            (self._protocol.resume_writing if may else self._protocol.pause_writing)()

    def pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._inbox and not self._over and self._cables.flows(self.own_id, self.peer_id):
                if self._paused and not self._inbox[0].reset:
                    return
                self._deliver(self._inbox.popleft())
        finally:
            self._pumping = False

    def _deliver(self, packet: Packet) -> None:
        if packet.reset:
            self._end(ConnectionResetError(packet.reset))
            return
        if not packet.data:
            if not self._protocol.eof_received():
                self.close()
            return
        memory = memoryview(self._protocol.get_buffer(packet.size))
        count = min(len(memory), packet.size)
        memory[:count] = packet.data[:count]
        if count < packet.size:
            self._inbox.appendleft(Packet(packet.data[count:]))
        self.other.acknowledged(count)
        self._protocol.buffer_updated(count)

    def _end(self, error: Exception | None) -> None:
        if not self._over:
            self._over = True
            self._inbox.clear()
            self._cables.pumps.pop(self, None)
            self._loop.call_soon(self._protocol.connection_lost, error)
