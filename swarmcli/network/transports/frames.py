"""Frames on a byte stream, without I/O: `header size, payload size`, the header, the payload.

A header size of all ones marks a goodbye: its payload says in words why the connection ends.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from swarmcli.errors import ConnectionLost, ProtocolViolation
from swarmcli.network.transports.base import Buffer, FrameLimits, Receiver
from swarmcli.network.transports.tcp.handshake import printable

_PREFIX = struct.Struct("!II")  # size of the header, size of the payload
_GOODBYE = 0xFFFF_FFFF
_MAX_GOODBYE = 512
_NOTHING = memoryview(b"")


class PeerSaidGoodbye(ConnectionLost):
    """The other end closed the connection in order."""


def frame_start(header: bytes, payload_size: int, limits: FrameLimits) -> bytes:
    """What goes before the payload. Raises ValueError for a frame that the other end would not take."""
    if len(header) > limits.max_header:
        raise ValueError(f"a header of {len(header)} bytes is above the limit of {limits.max_header}")
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

    def __init__(self, limits: FrameLimits) -> None:
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
        self._check(header_size, payload_size)
        end = _PREFIX.size + header_size
        if len(self._held) < end:
            return False
        self._header = bytes(self._held[_PREFIX.size : end])
        del self._held[:end]
        self._payload = _payload_memory(receiver, self._header, payload_size)
        early = min(payload_size, len(self._held))  # payload that came in one piece with the header
        if early:
            self._payload[:early] = self._held[:early]
            del self._held[:early]
        self.rest = self._payload[early:]
        return True

    def _check(self, header_size: int, payload_size: int) -> None:
        if header_size > self._limits.max_header:
            raise ProtocolViolation(f"oversized header: {header_size} bytes, at most {self._limits.max_header}")
        if payload_size > self._limits.max_payload:
            raise ProtocolViolation(f"oversized payload: {payload_size} bytes, at most {self._limits.max_payload}")

    def _read_goodbye(self, size: int) -> bool:
        if size > _MAX_GOODBYE:
            raise ProtocolViolation(f"oversized goodbye: {size} bytes, at most {_MAX_GOODBYE}")
        end = _PREFIX.size + size
        if len(self._held) < end:
            return False
        raise PeerSaidGoodbye(f"closed by peer: {printable(bytes(self._held[_PREFIX.size : end]))}")


def _payload_memory(receiver: Receiver, header: bytes, size: int) -> memoryview:
    if size == 0:
        return _NOTHING
    memory = receiver.payload_buffer(header, size)
    if memory.nbytes != size:
        raise ValueError(f"the receiver named {memory.nbytes} bytes for a payload of {size}")
    return memory.cast("B")
