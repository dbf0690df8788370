"""Frames on a stream of bytes, whatever carries it: `header size, payload size`, the header, the payload.

A header size of all ones marks a goodbye: its payload says in words why the connection ends.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence

from swarmcli.errors import ConnectionLost, ProtocolViolation
from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.rates import LARGEST_PIECE, LinkWay
from swarmcli.network.transports.base import Buffer, Receiver
from swarmcli.words import printable

_PREFIX = struct.Struct("!II")  # size of the header, size of the payload
_GOODBYE = 0xFFFF_FFFF
_MAX_GOODBYE = 512
_NOTHING = memoryview(b"")
_SHORT_WORDS = 2 << 10  # bytes; a shorter frame without a payload waits for no turn when the line is limited
_WHOLE = 1 << 20  # bytes; a shorter frame is written in one go when nothing limits the upload


class PeerSaidGoodbye(ConnectionLost):
    """The other end closed the connection in order."""


def frame_start(header: bytes, payload_size: int, limits: NetworkLimits) -> bytes:
    """The bytes before the payload. Raises ValueError for a frame that the other end would refuse."""
    if len(header) > limits.max_message:
        raise ValueError(f"a header of {len(header)} bytes is above the limit of {limits.max_message}")
    if payload_size > limits.max_payload:
        raise ValueError(f"a payload of {payload_size} bytes is above the limit of {limits.max_payload}")
    return _PREFIX.pack(len(header), payload_size) + header


def goodbye_frame(reason: str) -> bytes:
    words = reason.encode()[:_MAX_GOODBYE]
    return _PREFIX.pack(_GOODBYE, len(words)) + words


def byte_views(payload: Sequence[Buffer]) -> list[memoryview]:
    """The pieces as contiguous bytes, without copying; empty ones are left out. TypeError if one has gaps."""
    return [memoryview(piece).cast("B") for piece in payload if memoryview(piece).nbytes]


class FrameReader:
    """Cuts decrypted bytes into frames and hands them to a receiver, one per call of `deliver_next`.

    Small pieces go through `feed`. While a payload is under way, `rest` is the memory that its remainder belongs
    in: the caller fills it directly and reports with `filled`.
    """

    def __init__(self, limits: NetworkLimits) -> None:
        self._limits = limits
        self._held = bytearray()  # fed and not yet cut
        self._header = b""
        self._payload: memoryview | None = None  # of the frame under way
        self.rest: memoryview = _NOTHING

    @property
    def in_payload(self) -> bool:
        return self._payload is not None

    @property
    def in_frame(self) -> bool:
        return self._payload is not None or bool(self._held)

    @property
    def large_header(self) -> int:
        """Bytes of a large header that is under way, or whose payload waits for memory; 0 for a small one."""
        if self._payload is not None or len(self._held) < _PREFIX.size:
            return 0
        size = int.from_bytes(self._held[:4], "big")
        return size if self._limits.budgets.free_bytes < size <= self._limits.max_message else 0

    def feed(self, data: memoryview | bytearray) -> None:
        self._held += data

    def filled(self, count: int) -> None:
        self.rest = self.rest[count:]

    def deliver_next(self, receiver: Receiver) -> bool:
        """Hands over the next frame if it is whole; False when more bytes are needed first.

        Raises ProtocolViolation for a frame beyond the limits (before any memory is taken for it) or refused by the
        receiver, and PeerSaidGoodbye.
        """
        if self._payload is None and not self._begin_frame(receiver):
            return False
        payload = self._payload
        if payload is None or self.rest:
            return False
        header, self._header, self._payload = self._header, b"", None
        self.rest = _NOTHING  # an empty view of the receiver's memory would keep all of it alive
        receiver.frame_received(header, payload)
        return True

    def _begin_frame(self, receiver: Receiver) -> bool:
        if len(self._held) < _PREFIX.size:
            return False
        header_size, payload_size = _PREFIX.unpack_from(self._held)
        if header_size == _GOODBYE:
            return self._read_goodbye(payload_size)
        if header_size > self._limits.max_message:
            raise ProtocolViolation(f"oversized message: {header_size} bytes, at most {self._limits.max_message}")
        if payload_size > self._limits.max_payload:
            raise ProtocolViolation(f"oversized payload: {payload_size} bytes, at most {self._limits.max_payload}")
        end = _PREFIX.size + header_size
        if len(self._held) < end:
            return False
        header = bytes(self._held[_PREFIX.size : end])
        memory = _payload_memory(receiver, header, payload_size)
        if memory is None:
            return False  # the header stays where it is, for the next time
        del self._held[:end]
        self._header, self._payload = header, memory
        early = min(payload_size, len(self._held))  # payload that came in one piece with the header
        if early:
            self._payload[:early] = self._held[:early]
            del self._held[:early]
        self.rest = self._payload[early:]
        return True

    def _read_goodbye(self, size: int) -> bool:
        if size > _MAX_GOODBYE:
            raise ProtocolViolation(f"oversized goodbye: {size} bytes, at most {_MAX_GOODBYE}")
        end = _PREFIX.size + size
        if len(self._held) < end:
            return False
        raise PeerSaidGoodbye(
            f"closed by peer: {printable(bytes(self._held[_PREFIX.size : end]).decode(errors='replace'), 200)}"
        )


class FrameWriter:
    """Writes whole frames, one after the other, with back-pressure. Subclasses send the bytes: `write`."""

    def __init__(self, limits: NetworkLimits, on_torn: Callable[[], None], way: LinkWay) -> None:
        """`on_torn` is called when a send is cancelled in the middle of its frame: the connection cannot go on.
        `way` is charged with what is written."""
        self.bytes_sent = 0
        self.bulk = False  # True: frames wait for their turns when the upload is limited
        self.mid_frame = False  # a frame is written in part: nothing else may be written
        self.turn = asyncio.Lock()  # frames do not interleave; whoever asks first writes first
        self._limits, self._on_torn, self.way = limits, on_torn, way
        self._error: Exception | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def write(self, data: bytes | memoryview) -> None:
        """Writes at once, even if much waits to be sent already."""
        raise NotImplementedError

    def write_whole(self, start: bytes, pieces: Sequence[memoryview], size: int) -> None:
        """Writes a frame in one go: `start`, then `size` bytes of payload."""
        self.write(b"".join((start, *pieces)))

    def pause(self) -> None:
        """Too much waits to be sent: senders wait as well."""
        self._writable.clear()

    def resume(self) -> None:
        self._writable.set()

    def fail(self, error: Exception) -> None:
        """From now on every send raises ConnectionLost, those that wait as well."""
        self._error = error
        self._writable.set()

    async def send(self, header: bytes, payload: Sequence[Buffer]) -> None:
        """See `Connection.send`."""
        pieces = byte_views(payload)
        size = sum(piece.nbytes for piece in pieces)
        start = frame_start(header, size, self._limits)
        async with self.turn:
            # Wait before the frame, so that a sender that is cancelled meanwhile has written nothing of it …
            await self.drained()
            # Short frames pass at once like control messages: if they waited for a turn, a round would wait for them.
            if self._limited and (size or len(start) > _SHORT_WORDS):
                await self._turn()
            if len(start) + size <= (self.way.piece if self._limited else _WHOLE):
                self.write_whole(start, pieces, size)
            else:
                await self._write_sliced(start, pieces)
        await self.drained()  # … and after it, so that a sender of one frame is slowed down as well

    async def drained(self) -> None:
        """Returns when more may be written. Raises ConnectionLost."""
        await self._writable.wait()
        if self._error is not None:
            raise ConnectionLost(str(self._error))

    @property
    def _limited(self) -> bool:
        return self.bulk and self.way.limit is not None

    async def _turn(self) -> None:
        """Waits until this connection may write its next piece. Raises ConnectionLost."""
        if self._limited:
            await self.way.turn()
        await self.drained()

    def _write_some(self, rest: deque[memoryview]) -> None:
        """Writes one piece and removes it from `rest`."""
        room = self.way.piece if self.bulk else LARGEST_PIECE
        while rest and room > 0:
            piece = rest.popleft()
            self.write(piece[:room])
            if piece.nbytes > room:
                rest.appendleft(piece[room:])
            room -= piece.nbytes

    async def _write_sliced(self, start: bytes, pieces: Sequence[memoryview]) -> None:
        """Writes piece by piece. The upload may get a limit meanwhile, or lose it."""
        self.mid_frame = True
        rest = deque([memoryview(start), *pieces])
        try:
            self._write_some(rest)
            while rest:
                await asyncio.sleep(0)  # others on this loop get their turn, even if the socket takes everything
                await self._turn()
                self._write_some(rest)
        except asyncio.CancelledError:
            self._on_torn()
            raise
        self.mid_frame = False


def _payload_memory(receiver: Receiver, header: bytes, size: int) -> memoryview | None:
    if size == 0:
        return _NOTHING
    memory = receiver.payload_buffer(header, size)
    if memory is None:
        return None
    if memory.nbytes != size:
        raise ValueError(f"the receiver named {memory.nbytes} bytes for a payload of {size}")
    return memory.cast("B")
