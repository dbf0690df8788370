"""Connections on a memory network.

The same code as over TCP makes and reads the frames. A payload arrives piece by piece in the receiver's memory, a
sender waits if the other end does not read, and a connection may end in the middle of a frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmcli.errors import ConnectionLost, ProtocolViolation
from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.identity import PeerID
from swarmcli.network.rates import LinkRates
from swarmcli.network.transports.base import Buffer, Purpose, Receiver
from swarmcli.network.transports.frames import FrameReader, FrameWriter, goodbye_frame
from swarmcli.testing.memory_cables import Cables
from swarmcli.testing.memory_pipe import MemoryPipe


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
        self._connection.transmit(data, self._connection.other.rates.download.piece)


class MemoryConnection(MemoryPipe):
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
        super().__init__(cables, ends)
        self.rates = rates
        self.purpose = purpose
        self.dialed = dialed
        self.remote_address = address
        self.observed_address: str | None = None  # set where it is dialed
        self.local_host: str | None = None
        self.on_this_computer = False
        self.relayed = False
        self.punched = False
        self.bytes_received = 0
        self._receiver: Receiver | None = None
        self._error: Exception | None = None
        self._pumping = False
        self._turn = False  # one packet may be taken, whatever the download limit says
        self._reader = FrameReader(limits)
        self._writer = _Writer(self, limits, rates)

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
            self.read_on()

    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        await self._writer.send(header, payload)

    def read_on(self) -> None:
        self._loop.call_soon(self.pump)

    async def close(self, reason: str = "") -> None:
        if self._error is None:
            try:  # a frame that is being written has two seconds to end
                async with asyncio.timeout(2.0), self._writer.turn:
                    self._end_in_order(ConnectionLost(f"closed by us: {reason}"), reason)
            except TimeoutError:
                self.abort(reason)

    def abort(self, reason: str) -> None:
        self.die(f"closed by us: {reason}")

    def die(self, reason: str) -> None:
        """Ends at once; the other end is reset."""
        if self._error is None:
            self.reset_other()
            self._end(ConnectionLost(reason))

    # For the writer, the links and the network

    def sending_may_go_on(self, may: bool) -> None:
        if may:
            self._writer.resume()
        else:
            self._writer.pause()

    def pump(self) -> None:
        """Delivers what has arrived, as far as path and receiver allow."""
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
        """Hands over a frame, or takes in a packet. Returns False when there is nothing to do."""
        if not self._cables.flows(self.own_id, self.peer_id):
            return False
        # As over TCP, a frame whose payload has begun is read to its end.
        may_read = self._reader.in_payload or receiver.reading_wanted()
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
        self.other.acknowledged(packet.size)
        self._take(packet.data)
        return True

    def _may_take(self) -> bool:
        """Whether a packet may be taken under the download limit; if not, `_its_turn` is called once it may."""
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
        """Puts the rest of the payload under way into the receiver's memory, and feeds the reader with what follows."""
        early = min(len(self._reader.rest), len(data))
        if early:
            self._reader.rest[:early] = data[:early]
            self._reader.filled(early)
        self._reader.feed(memoryview(data)[early:])

    def _end_in_order(self, error: Exception, reason: str) -> None:
        if self._error is not None:
            return
        if self._writer.mid_frame:
            self.reset_other()  # a goodbye would be taken for payload
        else:
            self._ended_in_order = True
            self._writer.write(goodbye_frame(reason))
        self._end(error)

    def _end(self, error: Exception) -> None:
        """Ends this end, and tells the receiver, from the loop."""
        self._error = error
        self._inbox.clear()
        if not self._ended_in_order:
            self.forget_unsent()
        self.rates.download.forget(self)
        self._writer.fail(error)
        self._cables.pumps.pop(self, None)
        if self._receiver is not None:
            self._loop.call_soon(self._receiver.connection_lost, error)
