"""One bulk connection: an end that opens streams on it, one after the other, and an end that serves them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import Enum
from typing import Any, Protocol

import msgspec

from swarmcli.errors import ConnectionLost, EndOfStream, ProtocolViolation
from swarmcli.network import wire
from swarmcli.network.limits import Limits
from swarmcli.network.streams.stream import Stream
from swarmcli.network.transports.base import Connection
from swarmcli.network.wire.handlers import FailureWords, Methods, StreamMethod, decode_body
from swarmcli.network.wire.messages import (
    BulkMessage,
    Done,
    Failed,
    Finish,
    IncomingOpen,
    IncomingPiece,
    Offer,
    Open,
)

_BULK: Any = BulkMessage  # to mypy a union is no type[T]


class Role(Enum):
    UNKNOWN = "accepted, and the first message will tell"
    OPENER = "streams are opened here"
    SERVER = "streams are opened at the other end"


class BulkHost(Protocol):
    """What a bulk channel needs of its endpoint."""

    limits: Limits
    methods: Methods

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...
    def offered(self, channel: BulkChannel, token: int) -> bool: ...
    def bulk_idle(self, channel: BulkChannel) -> None: ...
    def bulk_lost(self, channel: BulkChannel, error: ConnectionLost) -> None: ...


class BulkChannel:
    """The Receiver of a bulk connection."""

    def __init__(self, connection: Connection, host: BulkHost, role: Role) -> None:
        self.connection = connection
        self.peer_id = connection.peer_id
        self.limits = host.limits
        self.role = role
        self.stream: Stream | None = None
        self.error: ConnectionLost | None = None
        self.quiet_ticks = 0  # keepalive intervals without a byte
        self._bytes_seen = 0
        self._host = host
        self._left = False  # this end reads nothing more of the current stream
        self._said_last = False  # this end has sent its last word on the current stream …
        self._heard_last = False  # … and the other end its own
        self._heard_finish = False
        self._task: asyncio.Task[None] | None = None
        self._message: Any = None  # decoded for its payload's sake
        self._violation: ProtocolViolation | None = None

    @property
    def lingering(self) -> bool:
        """At the serving end: between two streams, or waiting for an opener who sends no last word."""
        return self.role is Role.SERVER and (self.stream is None or self._left)

    async def open(self, method: str, request: Any) -> Stream:
        """Begins a stream on an idle channel. Raises ConnectionLost."""
        stream = self._begin(method)
        await self.connection.send(wire.encode(Open(method, request)))
        return stream

    async def leave(self) -> None:
        """The opener wants nothing more: what it sent still counts. Raises ConnectionLost."""
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
        self.connection.abort(reason)

    def tick(self) -> int:
        """Called at each keepalive interval; for how many of them nothing has moved."""
        moved = self.connection.bytes_received + self.connection.bytes_sent
        self.quiet_ticks = self.quiet_ticks + 1 if moved == self._bytes_seen else 0
        self._bytes_seen = moved
        return self.quiet_ticks

    # Receiver

    def payload_buffer(self, header: bytes, size: int) -> memoryview:
        self._message = message = self._decode(header)
        if size > self.limits.max_payload:
            raise ProtocolViolation(f"oversized payload: {size} bytes, at most {self.limits.max_payload}")
        if not isinstance(message, IncomingPiece):
            raise ProtocolViolation(f"unexpected message: a payload behind {type(message).__name__}")
        stream = self._receiving()
        return stream.payload_buffer(message, size) if not self._left else memoryview(bytearray(size))

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        message, self._message = self._message, None
        if message is None:
            message = self._decode(header)
        if isinstance(message, IncomingPiece):
            self._piece_received(message, len(header))
        elif isinstance(message, IncomingOpen):
            self._open_received(message)
        elif isinstance(message, Offer):
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
        self._host.bulk_lost(self, self.error)

    # Inside

    def _decode(self, header: bytes) -> Any:
        if len(header) > self.limits.max_message:
            raise ProtocolViolation(f"oversized message: {len(header)} bytes, at most {self.limits.max_message}")
        try:
            return wire.decode(_BULK, header)
        except msgspec.DecodeError as error:
            raise ProtocolViolation(f"unreadable message: {error}") from None

    def _begin(self, name: str) -> Stream:
        self._left = self._said_last = self._heard_last = self._heard_finish = False
        self.stream = Stream(self, name)
        return self.stream

    def _receiving(self) -> Stream:
        if self.stream is None or self._heard_finish:
            raise ProtocolViolation("unexpected message: no stream is open")
        return self.stream

    def _piece_received(self, piece: IncomingPiece, header_size: int) -> None:
        stream = self._receiving()
        if not self._left:
            stream.piece_received(piece, header_size)
        elif self.role is Role.OPENER:
            self.reset("nobody reads this stream any more")

    def _open_received(self, message: IncomingOpen) -> None:
        if self.role is Role.OPENER or self.stream is not None:
            raise ProtocolViolation("unexpected message: a stream is opened out of turn")
        self.role = Role.SERVER
        method = self._host.methods.streams.get(message.method)
        if method is None:
            self._begin(message.method)
            self._host.spawn(self._say_last(_failed(FailureWords.unknown(message.method))))
            return
        request = decode_body(method.request_type, message.body, message.method)
        self._task = self._host.spawn(self._serve(method, request, self._begin(message.method)))

    def _offer_received(self, offer: Offer) -> None:
        if self.role is not Role.UNKNOWN:
            raise ProtocolViolation("unexpected message: an offer out of turn")
        self.role = Role.OPENER
        if not self._host.offered(self, offer.token):
            self.reset("nobody waits for this connection any more")

    def _end_received(self, message: Finish | Done | Failed) -> None:
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
            stream.ended(_end_error(message, stream), reads_on=False)
            self._heard_last = True
        self._settle()

    async def _serve(self, method: StreamMethod, request: Any, stream: Stream) -> None:
        last: Done | Failed = Done()
        try:
            await method.handler(self.peer_id, request, stream)
        except asyncio.CancelledError:
            self._task = None
            self.reset("the handler was cancelled")
            raise
        except Exception as error:
            if self.error is None:
                last = _failed(FailureWords.of(error, stream.name, self.peer_id))
        self._task = None
        await self._say_last(last)

    async def _say_last(self, message: Done | Failed) -> None:
        """The handler has come to its end: whatever the opener still sends is thrown away."""
        self._left = True
        if self.stream is not None:
            self.stream.stop_reading()
        try:
            await self.connection.send(wire.encode(message))
        except ConnectionLost:
            return  # `connection_lost` has said so, or will
        self._said_last = True
        self._settle()

    def _settle(self) -> None:
        if self._said_last and self._heard_last:
            self.stream = None
            self.quiet_ticks = 0
            self._host.bulk_idle(self)


def _failed(words: FailureWords) -> Failed:
    return Failed(words.kind, words.code, words.text)


def _end_error(message: Done | Failed, stream: Stream) -> Exception:
    if isinstance(message, Done):
        return EndOfStream("the handler at the other end has returned")
    return FailureWords(message.kind, message.code, message.text).error(stream.peer)
