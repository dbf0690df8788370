"""Connections on a memory network.

Frames are cut and put together by the same code as over TCP. A payload arrives piece by piece in the receiver's
memory, a sender waits before it writes where the other end does not read, and a connection may end in the middle.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from swarmcli.errors import ConnectionLost, ProtocolViolation
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import NetworkLimits
from swarmcli.network.rates import LinkRates
from swarmcli.network.transports.base import Buffer, Purpose, Receiver
from swarmcli.network.transports.frames import FrameReader, FrameWriter, goodbye_frame
from swarmcli.testing.memory_cables import Cables, Packet, cut


class _Writer(FrameWriter):
    def __init__(self, connection: MemoryConnection, limits: NetworkLimits, rates: LinkRates) -> None:
        def torn() -> None:
            connection.abort("a send was cancelled in the middle of a frame")

        super().__init__(limits, torn, rates.upload)
        self._connection = connection
        self.bulk = connection.purpose is Purpose.BULK

    def write(self, data: bytes | memoryview) -> None:
        self.bytes_sent += len(data)
        self.way.charge(len(data))
        self._connection.transmit(data)


class MemoryConnection:
    """One end of a connection; `other` is the other one."""

    other: MemoryConnection

    def __init__(
        self,
        cables: Cables,
        ends: tuple[PeerID, PeerID],
        purpose: Purpose,
        limits: NetworkLimits,
        rates: LinkRates,
        *,
        dialed: bool,
        address: str,
    ) -> None:
        """`ends` are this peer and the other one; `address` is the other one's."""
        self.rates = rates
        self._own_id, self.peer_id = ends
        self.purpose = purpose
        self.dialed = dialed
        self.remote_address = address
        self.observed_address: str | None = None  # set where it is dialed
        self.local_host: str | None = None
        self.on_this_computer = False
        self.relayed = False
        self.punched = False
        self.bytes_received = 0
        self._cables = cables
        self._loop = asyncio.get_running_loop()
        self._receiver: Receiver | None = None
        self._error: Exception | None = None
        self._ended_in_order = False
        self._paused = False
        self._pumping = False
        self._turn = False  # one packet may be taken, however much has come already
        self._travelling: deque[Packet] = deque()  # towards this end, in order
        self._last_arrival = 0.0
        self._inbox: deque[Packet] = deque()  # arrived and not yet delivered
        self._unacknowledged = 0  # bytes sent from here that the other end has not taken yet
        self._reader = FrameReader(limits)
        self._writer = _Writer(self, limits, rates)
        self._cables.pumps[self] = self.pump

    @property
    def own_id(self) -> PeerID:
        return self._own_id

    @property
    def ended(self) -> bool:
        return self._error is not None

    @property
    def bytes_sent(self) -> int:
        return self._writer.bytes_sent

    @property
    def bytes_waiting(self) -> int:
        return self._unacknowledged

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._error is not None:
            self._loop.call_soon(receiver.connection_lost, self._error)
        else:
            self._loop.call_soon(self.pump)

    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        await self._writer.send(header, payload)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._loop.call_soon(self.pump)

    async def close(self, reason: str = "") -> None:
        if self._error is None:
            try:  # a frame that is being written has a moment to end
                async with asyncio.timeout(2.0), self._writer.turn:
                    self._end_in_order(ConnectionLost(f"closed by us: {reason}"), reason)
            except TimeoutError:
                self.abort(reason)

    def abort(self, reason: str) -> None:
        self.die(f"closed by us: {reason}")

    def die(self, reason: str) -> None:
        """Ends at once; the other end is reset."""
        if self._error is None:
            self._reset_other()
            self._end(ConnectionLost(reason))

    # For the writer, the links and the network

    def transmit(self, data: bytes | memoryview) -> None:
        uplink, downlink = self._cables.uplinks[self._own_id], self._cables.downlinks[self.peer_id]
        self._unacknowledged += len(data)
        if self._unacknowledged > 256 << 10:  # bytes under way, beyond which a sender waits …
            self._writer.pause()
        for packet in cut(data, min(uplink.piece, downlink.piece, self.other.rates.download.piece)):
            uplink.submit(self, packet, self.other.travel)

    def travel(self, packet: Packet) -> None:
        """The packet has left the other end's link and will reach this one's, behind those before it."""
        arrival = self._loop.time() + self._cables.latency(self.peer_id, self._own_id)
        behind = packet.size / 1e9 if packet.follows else 0  # seconds, on a line that no link slows down
        in_line = self._last_arrival + behind
        self._last_arrival = max(arrival, in_line)
        self._travelling.append(packet)
        self._loop.call_at(self._last_arrival, self._reach_link)

    def pump(self) -> None:
        """Delivers what has arrived as far as path, pauses and receiver allow."""
        if self._pumping:  # a receiver resumed reading while being handed a frame
            return
        self._pumping = True
        try:
            while self._error is None and self._receiver is not None and self._deliver_next(self._receiver):
                pass
        except ProtocolViolation as error:
            self._end_in_order(error, error.reason)
        except ConnectionLost as error:  # the other end has said goodbye
            self._end(error)
        finally:
            self._pumping = False

    # Inside

    def _deliver_next(self, receiver: Receiver) -> bool:
        """Hands over a frame, or puts a packet to where it belongs; False when there is nothing to do."""
        if not self._cables.flows(self._own_id, self.peer_id):
            return False
        # As over TCP, a pause takes effect between frames: one whose payload has begun is read to its end.
        may_read = not self._paused or self._reader.in_payload
        if may_read and self._reader.deliver_next(receiver):
            return True
        if not self._inbox or not (may_read or self._inbox[0].reset):
            return False
        if not (self._inbox[0].reset or self._may_take()):
            return False
        packet = self._inbox.popleft()
        if packet.reset:
            raise ConnectionLost(packet.reset)
        self.rates.download.charge(packet.size)
        self.bytes_received += packet.size
        self.other._acknowledged(packet.size)
        if (self.peer_id, self._own_id) in self._cables.to_tear:
            self._take(packet.data[: packet.size // 2])
            if not self._reader.deliver_next(receiver) and self._reader.in_payload:
                self._cables.to_tear.remove((self.peer_id, self._own_id))
                self.die("the connection broke in the middle of a payload")
                return False
            packet = Packet(packet.data[packet.size // 2 :])
        self._take(packet.data)
        return True

    def _may_take(self) -> bool:
        """Whether the way in has room, or it is this connection's turn; otherwise it is told when."""
        way = self.rates.download
        if self._turn or way.is_open or self.purpose is not Purpose.BULK:
            self._turn = False
            return True
        way.when_open(self, self._its_turn)
        return False

    def _its_turn(self) -> None:
        self._turn = True
        self.pump()

    def _take(self, data: bytes) -> None:
        """First the rest of the payload under way, which goes to the receiver's memory, then what is behind it."""
        early = min(len(self._reader.rest), len(data))
        if early:
            self._reader.rest[:early] = data[:early]
            self._reader.filled(early)
        self._reader.feed(memoryview(data)[early:])

    def _reach_link(self) -> None:
        self._cables.downlinks[self._own_id].submit(self, self._travelling.popleft(), self._arrive)

    def _arrive(self, packet: Packet) -> None:
        if self._error is None:
            self._inbox.append(packet)
            self.pump()
        elif self._ended_in_order:
            self.other._acknowledged(packet.size)  # nobody reads it any more, and the goodbye is on its way
        elif self._cables.flows(self._own_id, self.peer_id) and self.other._error is None:
            self._reset_other()  # like a kernel that knows no such connection (any more)

    def _reset_other(self) -> None:
        """Sends the other end a reset; it is lost where the path is cut."""
        delay = self._cables.latency(self._own_id, self.peer_id)
        self._loop.call_later(delay, self.other._was_reset)

    def _was_reset(self) -> None:
        if not self._cables.severed(self._own_id, self.peer_id):
            self._inbox.clear()
            self._inbox.append(Packet(b"", reset="reset by peer"))
            self.pump()

    def _acknowledged(self, size: int) -> None:
        self._unacknowledged -= size
        if self._unacknowledged <= 128 << 10:  # … until there are only so many
            self._writer.resume()

    def _end_in_order(self, error: Exception, reason: str) -> None:
        if self._error is not None:
            return
        if self._writer.mid_frame:
            self._reset_other()  # a goodbye would be taken for payload
        else:
            self._ended_in_order = True
            self._writer.write(goodbye_frame(reason))
        self._end(error)

    def _end(self, error: Exception) -> None:
        """This end is no more; says so to the receiver, from the loop."""
        self._error = error
        self._inbox.clear()
        if not self._ended_in_order:  # as a socket that is reset forgets what has not been sent, on either end
            self._cables.uplinks[self._own_id].drop(self)
            self._cables.downlinks[self._own_id].drop(self)
        self.rates.download.forget(self)
        self._writer.fail(error)
        self._cables.pumps.pop(self, None)
        if self._receiver is not None:
            self._loop.call_soon(self._receiver.connection_lost, error)
