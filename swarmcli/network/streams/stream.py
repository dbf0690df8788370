"""Streams of messages with raw payloads, each on a bulk connection of its own.

Payloads are written straight from the sender's memory. They are read straight into the receiver's memory if it waits
with `receive(…, into=…)`; what arrives before that waits in a bounded queue, and then in the sender.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from swarmcli.errors import CallError, ConnectionLost, EndOfStream, ProtocolViolation
from swarmcli.events import GOODBYE
from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.identity import PeerID
from swarmcli.network.ledger import Account
from swarmcli.network.transports.base import Buffer, Connection
from swarmcli.network.wire.codec import decode_body, encode
from swarmcli.network.wire.messages import Finish, Piece

M = TypeVar("M")

Into = Callable[[Any, int], memoryview]

_WINDOW = 4 << 20  # bytes received and not yet read by the stream's owner; above it the sender waits
_DIRECT = 64 << 10  # bytes of a payload above which it is worth waiting for a reader that names memory for it
_EMPTY = memoryview(b"")
_BOOKKEEPING = 500  # bytes that a waiting message takes beyond its own


@dataclass(slots=True)
class _Reader:
    """A `receive` that waits."""

    arrived: asyncio.Future[None]
    message_type: type[Any]
    into: Into | None
    lent: bool = False  # the connection may be writing into memory that `into` gave


@dataclass(slots=True)
class _Arrived:
    piece: Piece
    payload: memoryview
    size: int
    charged: int  # bytes, to the account
    placed: bool  # the payload is where the waiting reader wanted it
    message: Any = None  # decoded already, for a reader that waited


class Stream:
    """One end of a stream. Used from the loop; one task may send while another receives."""

    def __init__(
        self,
        connection: Connection,
        limits: NetworkLimits,
        method: str,
        reset: Callable[[str, ProtocolViolation | None], None],
        account: Account,
    ) -> None:
        """`account` is charged for what has come and nobody has received yet."""
        self.peer: PeerID = connection.peer_id
        self.method = method
        self.bytes_sent = 0  # payloads only, as `bytes_received`
        self.bytes_received = 0
        self.received = 0  # messages
        self._connection = connection
        self._window = _WINDOW
        self._largest = limits.max_payload
        self._reset = reset
        self._queue: deque[_Arrived] = deque()
        self._queued = 0  # bytes
        self._reader: _Reader | None = None
        self._places = False  # the last `receive` named memory; the next one probably will
        self._arriving: _Arrived | None = None  # its payload is being read
        self.reading_wanted = True  # False: nothing more is read until a `receive` takes what waits here
        self.starved = False  # a payload waits for memory: the budget is used up, and nobody receives
        self._account = account
        self._finished = False  # nothing more is sent from here
        self._error: Exception | None = None  # what `receive` raises once the queue is empty
        self._send_error: Exception | None = None
        self._error_seen = False

    async def send(self, message: Any, payload: Buffer | Sequence[Buffer] = b"") -> None:
        """Sends one message and the raw bytes of its payload, in one piece or several.

        Returns when the connection has taken them, which a slow reader delays; the memory may then be reused. Raises
        ConnectionLost, the error of the handler at the other end, EndOfStream if that has returned, and ValueError for
        more than the limits allow.
        """
        if self._finished:
            raise RuntimeError("this end of the stream is finished")
        self._raise(self._send_error)
        header = encode(Piece(message))
        pieces = [payload] if isinstance(payload, bytes | bytearray | memoryview) else payload
        size = sum(memoryview(piece).nbytes for piece in pieces)
        self.bytes_sent += size
        await self._connection.send(header, pieces if size else ())

    async def receive(self, message_type: type[M], into: Into | None = None) -> tuple[M, memoryview]:
        """The next message and its payload.

        `into(message, size)` names `size` bytes of memory for a payload that is not empty; whatever it raises comes
        out here and resets the stream. Without it the payload lies in fresh memory. Raises EndOfStream when the
        other end has finished, ConnectionLost, ProtocolViolation for a message of another type, or what the handler
        failed with. Cancelled while a payload is on its way into the caller's memory, it resets the stream.
        """
        if self._reader is not None:
            raise RuntimeError("another task is receiving from this stream")
        self._places = into is not None
        if not self._queue:
            await self._wait(message_type, into)
        arrived = self._queue.popleft()
        self._queued -= arrived.size
        self._account.give_back(arrived.charged)
        self.received += 1
        if self._queued < self._window // 2 and into is None:
            self._resume()
        return self._placed(arrived, message_type, into)

    async def finish(self) -> None:
        """Says that nothing more comes from here; the other direction stays open. Raises ConnectionLost."""
        if self._finished:
            return
        self._finished = True
        try:
            await self._connection.send(encode(Finish()))
        except asyncio.CancelledError:
            # The message waited for bytes that the other end does not read, and nobody would send it again: the stream
            # would never be over, and its slot never free.
            self._reset("cancelled while it finished", None)
            raise

    def narrow(self, largest: int, window: int) -> None:
        """From now on this end takes payloads of at most `largest` bytes, and lets no more than `window` bytes and one
        payload wait here. A larger payload is a violation, noticed before memory is taken for it."""
        self._largest, self._window = largest, window

    @property
    def relayed(self) -> bool:
        """Whether a relay carries it."""
        return self._connection.relayed

    @property
    def arriving(self) -> int:
        """A count that grows whenever a byte arrives, also within a message: to tell slow from silent."""
        return self._connection.bytes_received

    @property
    def leaving(self) -> int:
        """The same for what this end sends: bytes that are known to have reached the other one."""
        return self._connection.bytes_sent - self._connection.bytes_waiting

    @property
    def broke(self) -> bool:
        """Whether its connection broke: no end said goodbye, and none broke a rule."""
        lost = isinstance(self._error, ConnectionLost) and not isinstance(self._error, ProtocolViolation)
        return lost and not str(self._error).endswith(GOODBYE)

    async def _wait(self, message_type: type[Any], into: Into | None) -> None:
        self._raise(self._error)
        reader = self._reader = _Reader(asyncio.get_running_loop().create_future(), message_type, into)
        self._resume()
        try:
            await reader.arrived
            reader.lent = False
        finally:
            self._reader = None
            lent = reader.lent
            del reader  # its future holds the error, which holds this frame: a cycle that keeps the caller's memory
            if lent:
                self._reset("gave up a payload that was arriving", None)

    def _placed(self, arrived: _Arrived, message_type: type[M], into: Into | None) -> tuple[M, memoryview]:
        """Decodes a message that arrived while no `receive` waited, and copies its payload to where it is wanted."""
        if arrived.message is not None:
            return arrived.message, arrived.payload
        try:
            message = decode_body(message_type, arrived.piece.body, self.method)
            payload = arrived.payload
            if into is not None and payload.nbytes:
                payload = _memory(into, message, payload.nbytes)
                payload[:] = arrived.payload
        except Exception as error:
            self._reset("a message was refused", error if isinstance(error, ProtocolViolation) else None)
            raise
        return message, payload

    def _resume(self) -> None:
        if not self.reading_wanted:
            self.reading_wanted, self.starved = True, False
            self._connection.read_on()

    def _raise(self, error: Exception | None) -> None:
        if error is not None:
            self._error_seen = True
            raise _fresh(error)

    # For the channel

    def try_again(self) -> None:
        """Asks for memory again if a payload waits for it."""
        if self.starved:
            self._resume()

    def payload_buffer(self, piece: Piece, size: int) -> memoryview | None:
        """Memory for a payload. If the waiting reader names it, it costs no budget. Otherwise it is charged before it
        is allocated; None: the budget is used up, and the other end waits until somebody receives, or there is
        memory."""
        if size > self._largest:
            raise ProtocolViolation(f"oversized payload: {size} bytes, at most {self._largest} in {self.method}")
        reader = self._reader
        if reader is None or reader.arrived.done() or self._queue or reader.into is None:
            if not self._account.charge(size):
                self.reading_wanted, self.starved = False, True
                return None
            # The system provides the pages as bytes come in, so a header alone costs next to nothing.
            import numpy  # here: a command that only shows its help loads nothing heavy

            self._arriving = _Arrived(piece, numpy.empty(size, numpy.uint8).data, size, size, placed=False)
            return self._arriving.payload
        try:
            message = decode_body(reader.message_type, piece.body, self.method)
            memory = _memory(reader.into, message, size)
        except Exception as error:
            reader.arrived.set_exception(error)
            if isinstance(error, ProtocolViolation):
                raise
            raise ProtocolViolation("payload refused") from error
        reader.lent = True
        self._arriving = _Arrived(piece, memory, size, 0, placed=True, message=message)
        return memory

    def piece_received(self, piece: Piece, header_size: int) -> None:
        arrived = self._arriving or _Arrived(piece, _EMPTY, 0, 0, placed=False)
        self._arriving = None
        self.bytes_received += arrived.size
        reader = self._reader
        # After a large payload for a reader that names memory, read on only for its next `receive`: otherwise the next
        # payload would arrive before that and have to be copied, and so would all that follow.
        direct = (arrived.placed or self._places) and arrived.size >= _DIRECT
        arrived.size += header_size + _BOOKKEEPING
        arrived.charged += header_size + _BOOKKEEPING
        full = not self._account.charge(header_size + _BOOKKEEPING)
        if full:
            self._account.charge_anyway(header_size + _BOOKKEEPING)  # it is here already
        self._queue.append(arrived)
        self._queued += arrived.size
        if reader is not None and not reader.arrived.done():
            reader.arrived.set_result(None)
        if direct or full or self._queued > self._window:
            self.reading_wanted = False

    def drop_arriving(self) -> None:
        """Drops a whole payload that nobody wants any more; when it began, somebody may still have wanted it."""
        if self._arriving is not None:
            self._account.give_back(self._arriving.charged)
            self._arriving = None

    def ended(self, error: Exception, *, reads_on: bool) -> None:
        """The other end sends nothing more: `receive` raises `error` from now on. Unless it `reads_on`, so does
        `send`."""
        if self._error is None or not isinstance(error, EndOfStream):
            self._error = error
        if not reads_on:
            self._send_error = self._send_error or error
        reader = self._reader
        if reader is not None and not reader.arrived.done():
            reader.arrived.set_exception(_fresh(error))
            self._error_seen = True

    def unseen_failure(self) -> Exception | None:
        """The failure of the handler, if nobody here was told yet."""
        return self._error if isinstance(self._error, CallError) and not self._error_seen else None

    def stop_reading(self) -> None:
        """Drops what is queued: no `receive` comes any more, and the other end's last message must get through."""
        self._account.give_back(sum(arrived.charged for arrived in self._queue))
        self._queue.clear()
        self._resume()


def _memory(into: Into, message: Any, size: int) -> memoryview:
    memory = into(message, size).cast("B")
    if memory.nbytes != size:
        raise ValueError(f"`into` gave {memory.nbytes} bytes of memory for a payload of {size}")
    return memory


def _fresh(error: Exception) -> Exception:
    """An instance of its own for each raise: a shared one's traceback would grow, and keep streams' frames alive."""
    if isinstance(error, EndOfStream):
        return EndOfStream(str(error))
    return error.fresh() if isinstance(error, ConnectionLost) else error
