"""One bulk connection: an end that opens streams on it, one after the other, and an end that serves them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any

from swarmcli.errors import ConnectionLost, EndOfStream, ProtocolViolation
from swarmcli.network.context import EndpointContext, Handler, Traffic
from swarmcli.network.ledger import Account
from swarmcli.network.prefix import Prefix
from swarmcli.network.streams.stream import Stream
from swarmcli.network.transports.base import Connection
from swarmcli.network.wire.codec import decode_body, decode_header, encode
from swarmcli.network.wire.messages import (
    BulkMessage,
    BulkOffer,
    Done,
    Finish,
    HandlerFailed,
    Open,
    Piece,
    failed,
    raised,
)


class Role(Enum):
    UNKNOWN = "accepted; the first message will tell"
    OPENER = "streams are opened here"
    SERVER = "streams are opened at the other end"


class StreamChannel:
    """The Receiver of a bulk connection."""

    def __init__(
        self,
        connection: Connection,
        context: EndpointContext,
        role: Role,
        prefix: Prefix,
        *,
        offered: Callable[[StreamChannel, int], bool],
        idle: Callable[[StreamChannel], None],
        lost: Callable[[StreamChannel, ConnectionLost], None],
    ) -> None:
        """`offered(channel, token)` says whether a stream here waits for the connection that the other end dialed;
        `idle` is called whenever a stream is over at both ends, `lost` once, when the connection has ended."""
        self.connection = connection
        self.peer_id = connection.peer_id
        self.role = role
        self.prefix = prefix
        self.account = Account(context.ledgers.payloads, connection.peer_id, prefix)  # of what has come and is not read
        self.stream: Stream | None = None
        self.holds_slot = False  # one of the streams that may be open to this peer
        self.error: ConnectionLost | None = None
        self._context = context
        self._offered, self._idle, self._lost = offered, idle, lost
        self.service = ""  # the first word of the method of the stream that is open; "": none is
        self._before = Traffic()  # what the connection had moved before that stream
        self.quiet_ticks = 0  # keepalive intervals without a byte
        self.unread_ticks = 0  # … in which something waited here, and nobody received anything
        self._received = 0  # messages that were received up to the last tick
        self._ending = False
        self._bytes_seen = 0
        self._left = False  # this end reads nothing more of the current stream
        self._said_last = False  # this end has sent its last message of the current stream …
        self._heard_last = False  # … and the other end's last one has come
        self._heard_finish = False  # the other end sends no more pieces
        self._task: asyncio.Task[None] | None = None
        self._message: Any = None  # decoded already, to find memory for its payload
        self._violation: ProtocolViolation | None = None

    @property
    def lingering(self) -> bool:
        """At the serving end: between two streams, or waiting for the opener's last message."""
        return self.role is Role.SERVER and (self.stream is None or self._left)

    @property
    def spare(self) -> bool:
        """Accepted, and nothing is under way on it."""
        return not self._ending and (self.role is Role.UNKNOWN or self.lingering)

    async def open(self, method: str, request: Any) -> Stream:
        """Begins a stream on an idle channel. Raises ConnectionLost."""
        stream = self._begin(method)
        await self.connection.send(encode(Open(method, request)))
        return stream

    async def leave(self) -> None:
        """The opener reads nothing more; what it sent still counts. Raises ConnectionLost."""
        stream = self.stream
        if stream is None:
            return
        await stream.finish()
        self._left = True
        self._said_last = True
        stream.stop_reading()
        self._settle()

    def reset(self, reason: str, violation: ProtocolViolation | None = None) -> None:
        """Ends stream and connection at once; the handler at the other end, or here, is cancelled."""
        self._violation = self._violation or violation
        self._ending = True
        self.connection.abort(reason)

    def tick(self) -> int:
        """Called at each keepalive interval. Returns for how many of them nothing has moved."""
        moved = self.connection.bytes_received + self.connection.bytes_sent
        self.quiet_ticks = self.quiet_ticks + 1 if moved == self._bytes_seen else 0
        self._bytes_seen = moved
        received = self.stream.received if self.stream is not None else 0
        self.unread_ticks = self.unread_ticks + 1 if self.account.held and received == self._received else 0
        self._received = received
        if self.stream is not None:
            self.stream.try_again()
        return self.quiet_ticks

    # Receiver

    def reading_wanted(self) -> bool:
        return self.stream is None or self.stream.reading_wanted

    def payload_buffer(self, header: bytes, size: int) -> memoryview | None:
        self._message = message = decode_header(BulkMessage, header)
        if not isinstance(message, Piece):
            raise ProtocolViolation(f"unexpected message: a payload behind {type(message).__name__}")
        stream = self._receiving()
        return _nowhere(size) if self._left else stream.payload_buffer(message, size)

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        message, self._message = self._message, None
        if message is None:
            message = decode_header(BulkMessage, header)
        if isinstance(message, Piece):
            self._piece_received(message, len(header))
        elif isinstance(message, Open):
            self._open_received(message)
        elif isinstance(message, BulkOffer):
            self._offer_received(message)
        else:
            self._end_received(message)

    def connection_lost(self, error: Exception) -> None:
        lost = error if isinstance(error, ConnectionLost) else ConnectionLost(str(error) or type(error).__name__)
        self.error = self._violation or lost
        if self.stream is not None:
            self.stream.ended(self.error, reads_on=False)
        if self._task is not None:
            self._task.cancel()
        self.account.close()
        self._end_count()
        self._lost(self, self.error)

    # Inside

    def _begin(self, method: str) -> Stream:
        self._left = self._said_last = self._heard_last = self._heard_finish = False
        self._end_count()
        self.service, self._before = method.partition(".")[0], self._passed
        self.stream = Stream(self.connection, self._context.limits, method, self.reset, self.account)
        return self.stream

    @property
    def _passed(self) -> Traffic:
        return Traffic(self.connection.bytes_sent, self.connection.bytes_received)

    @property
    def moved(self) -> Traffic:
        """Bytes that the open stream has moved so far."""
        return self._passed - self._before

    def _end_count(self) -> None:
        if self.service:
            self._context.stream_ended(self.service, self.moved)
        self.service = ""

    def _receiving(self) -> Stream:
        if self.stream is None or self._heard_finish:
            raise ProtocolViolation("unexpected message: no stream is open")
        return self.stream

    def _piece_received(self, piece: Piece, header_size: int) -> None:
        stream = self._receiving()
        if not self._left:
            stream.piece_received(piece, header_size)
            return
        stream.drop_arriving()
        if self.role is Role.OPENER:
            self.reset("nobody reads this stream any more")

    def _open_received(self, message: Open) -> None:
        if self.role is Role.OPENER or self.stream is not None:
            raise ProtocolViolation("unexpected message: a stream is opened out of turn")
        self.role = Role.SERVER
        spawn = self._context.tasks.spawn
        handler = self._context.stream_handlers.get(message.method)
        if handler is None:
            self._begin(message.method)
            spawn(self._say_last(HandlerFailed("unknown method", "", message.method)))
            return
        request = decode_body(handler.request_type, message.body, message.method)
        self._task = spawn(self._serve(handler, request, self._begin(message.method)))

    def _offer_received(self, offer: BulkOffer) -> None:
        if self.role is not Role.UNKNOWN:
            raise ProtocolViolation("unexpected message: an offer out of turn")
        self.role = Role.OPENER
        if not self._offered(self, offer.token):
            self.reset("nobody waits for this connection any more")

    def _end_received(self, message: Finish | Done | HandlerFailed) -> None:
        stream = self.stream
        if stream is None or self._heard_last or (self._heard_finish and isinstance(message, Finish)):
            raise ProtocolViolation("unexpected message: no stream is open")
        if self.role is Role.SERVER and not isinstance(message, Finish):
            raise ProtocolViolation("unexpected message: only a handler can fail")
        self._heard_finish = True
        if isinstance(message, Finish):
            stream.ended(EndOfStream("the other end has finished"), reads_on=True)
            self._heard_last = self.role is Role.SERVER
        else:
            done = EndOfStream("the handler at the other end has returned")
            stream.ended(done if isinstance(message, Done) else raised(message, self.peer_id), reads_on=False)
            self._heard_last = True
        self._settle()

    async def _serve(self, handler: Handler, request: Any, stream: Stream) -> None:
        last: Done | HandlerFailed = Done()
        try:
            await handler.answer(self.peer_id, request, stream)
        except asyncio.CancelledError:
            self._task = None
            self.reset("the handler was cancelled")
            raise
        except Exception as error:
            if self.error is None:
                last = failed(error, stream.method, self.peer_id)
        self._task = None
        await self._say_last(last)

    async def _say_last(self, message: Done | HandlerFailed) -> None:
        """The handler has ended: sends how, and throws away what the opener still sends."""
        self._left = True
        if self.stream is not None:
            self.stream.stop_reading()
        try:
            await self.connection.send(encode(message))
        except ConnectionLost:
            return  # `connection_lost` has said so, or will
        self._said_last = True
        self._settle()

    def _settle(self) -> None:
        if self._said_last and self._heard_last:
            self._end_count()
            self.stream = None
            self.quiet_ticks = 0
            self._idle(self)


_scratch = bytearray()  # where all connections put payloads that nobody reads any more


def _nowhere(size: int) -> memoryview:
    global _scratch
    if len(_scratch) < size:
        _scratch = bytearray(size)
    return memoryview(_scratch)[:size]
