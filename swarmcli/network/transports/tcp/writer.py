"""The sending half of a TLS connection: whole frames, one after the other, with back-pressure."""

from __future__ import annotations

import asyncio
import fcntl
import termios
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from swarmcli.errors import ConnectionLost
from swarmcli.network.transports.base import Buffer, FrameLimits
from swarmcli.network.transports.frames import byte_views, frame_start
from swarmcli.network.transports.tcp.tls import TLSEngine

_RECORD = 16 << 10  # bytes in one TLS record
_SLICE = 256 << 10  # bytes that are encrypted and handed to the socket at a time
_WHOLE = 1 << 20  # frames up to this size are written in one go, so that a cancelled send does not tear them
_WRITE_HIGH = 512 << 10  # bytes waiting in the write buffer above which senders wait
_WRITE_LOW = 128 << 10


class TLSWriter:
    """Encrypts frames into a socket's write buffer. Used by one connection, whose errors it is told."""

    def __init__(self, engine: TLSEngine, limits: FrameLimits, on_torn: Callable[[], None]) -> None:
        """`on_torn` is called when a send is cancelled in the middle of its frame: the connection cannot go on."""
        self.bytes_sent = 0
        self.mid_frame = False  # a frame is written in part: nothing else may be written
        self.turn = asyncio.Lock()  # frames do not interleave
        self._engine = engine
        self._limits = limits
        self._on_torn = on_torn
        self._socket: asyncio.WriteTransport
        self._error: Exception | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def bytes_waiting(self) -> int:
        """Written, and not yet acknowledged by the other end's system; of those, what this one can tell."""
        return self._socket.get_write_buffer_size() + _in_system_buffer(self._socket.get_extra_info("socket"))

    def attach(self, socket: asyncio.WriteTransport) -> None:
        self._socket = socket
        socket.set_write_buffer_limits(_WRITE_HIGH, _WRITE_LOW)

    def pause(self) -> None:
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
            await self._drained()
            if len(start) + size <= _WHOLE:
                self._write_whole(start, pieces, size)
            else:
                await self._write_sliced(start, pieces)
        await self._drained()

    def write(self, data: bytes | memoryview) -> None:
        """Encrypts and writes at once, whatever waits already."""
        if data:
            self._engine.write(data)
            self.bytes_sent += len(data)
        self.flush()

    def flush(self) -> None:
        """Writes what the TLS engine has to say by itself: handshakes and alerts."""
        encrypted = self._engine.output()
        # Between a failed write and the loop's word of it a socket takes nothing more, and asyncio logs each attempt.
        if encrypted and not self._socket.is_closing():
            self._socket.write(encrypted)

    def _write_whole(self, start: bytes, pieces: Sequence[memoryview], size: int) -> None:
        if len(start) + size <= _RECORD:
            self.write(b"".join((start, *pieces)))  # one record, one system call
            return
        self._engine.write(start)
        for piece in pieces:
            self._engine.write(piece)
        self.bytes_sent += len(start) + size
        self.flush()

    async def _write_sliced(self, start: bytes, pieces: Sequence[memoryview]) -> None:
        self.mid_frame = True
        try:
            self.write(start)
            for piece in pieces:
                for offset in range(0, piece.nbytes, _SLICE):
                    self.write(piece[offset : offset + _SLICE])
                    await asyncio.sleep(0)  # others on this loop get their turn, even if the socket takes everything
                    await self._drained()
        except asyncio.CancelledError:
            self._on_torn()
            raise
        self.mid_frame = False

    async def _drained(self) -> None:
        await self._writable.wait()
        if self._error is not None:
            raise ConnectionLost(str(self._error))
        if self._socket.is_closing():  # `fail` will come, but a sender in a hurry does not let the loop say so
            raise ConnectionLost("the other end broke off")


def _in_system_buffer(socket: Any) -> int:
    """Bytes that the system has taken from a socket and still holds. 0 where it does not say."""
    if not hasattr(termios, "TIOCOUTQ"):
        return 0
    count = array("i", [0])
    try:
        fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, count)
    except (OSError, ValueError):  # closed by now
        return 0
    return count[0]
