"""TLS 1.3 on a TCP connection: an engine without I/O, and the two halves of a connection that drive it.

Python's own TLS for asyncio reads once more than it delivers when the other end closes, and decides by itself when
to pause; the engine here leaves both to its caller, and decrypts straight into memory that the caller names.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from swarmcli.errors import ConnectionLost
from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.rates import LinkWay
from swarmcli.network.transports.frames import FrameReader, FrameWriter
from swarmcli.network.transports.tcp.system import bytes_in_system_buffer, wake_at

_RECORD = 16 << 10  # bytes in one TLS record, in the clear
_RECORD_OVERHEAD = 22  # bytes that TLS adds to a record, with AES-GCM
_ENCRYPTED_RECORD = 17 << 10  # bytes, at most

_ENOUGH = 32 << 10  # bytes, two records: worth being woken for in the middle of a payload
_WRITE_HIGH = 512 << 10  # bytes waiting in a connection's write buffer above which senders wait …
_WRITE_LOW = 128 << 10  # … and below which they go on


class TLSEngine:
    """One end of a TLS connection as bytes in and bytes out. Errors are ssl.SSLError; EOFError is an orderly end."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._read = cast(Callable[[int, memoryview], int], self._ssl.read)  # with a buffer it returns the count
        self.feed = self._incoming.write  # takes encrypted bytes from the network
        self.output = self._outgoing.read  # gives encrypted bytes for the network

    def handshake(self) -> bool:
        """Goes on with the handshake; True when it is complete."""
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    @property
    def bytes_fed(self) -> int:
        """Encrypted bytes that wait here: of a record that is not whole yet, or that nobody has read."""
        return self._incoming.pending

    @property
    def peer_certificate(self) -> bytes | None:
        return self._ssl.getpeercert(binary_form=True)

    @property
    def protocol(self) -> str | None:
        """The application protocol that both ends agreed on."""
        return self._ssl.selected_alpn_protocol()

    def read(self, into: memoryview) -> int:
        """Decrypts at most one record (16 KiB) into `into`; 0 when nothing is there. EOFError after a close_notify."""
        try:
            count = self._read(len(into), into)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLZeroReturnError as error:
            raise EOFError from error
        if not count:
            raise EOFError
        return count

    def fill(self, memory: memoryview) -> int:
        """Decrypts records until `memory` is full or nothing more is there; EOFError when it ends before that.

        This is the loop that runs once for every 16 KiB received, so it does nothing else.
        """
        read, size, filled = self._read, memory.nbytes, 0
        try:
            while filled < size:
                count = read(size - filled, memory[filled:])
                if not count:
                    raise EOFError
                filled += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError as error:
            raise EOFError from error
        return filled

    def write(self, data: memoryview | bytes) -> None:
        """Encrypts all of `data`, which may be reused afterwards."""
        count = self._ssl.write(data)
        while count < len(data):
            data = data[count:]
            count = self._ssl.write(data)

    def close_notify(self) -> None:
        """Says that nothing more comes from here."""
        with suppress(ssl.SSLError):  # the other end's answer is missing, which nobody needs
            self._ssl.unwrap()


class TLSReader(FrameReader):
    """Decrypts into the memory of the frame under way, or into a scratch that connections share."""

    def __init__(self, engine: TLSEngine, limits: NetworkLimits, scratch: memoryview) -> None:
        super().__init__(limits)
        self.fed = 0  # encrypted bytes since a record was whole
        self._decrypted = 0
        self._engine = engine
        self._scratch = scratch
        self._socket: asyncio.Transport
        self._low_water = 1  # bytes that must be there before the system wakes this process
        self.may_sleep = True  # the low water may be raised; not when the system's buffer is kept small

    def attach(self, socket: asyncio.Transport) -> None:
        self._socket = socket

    @property
    def bytes_received(self) -> int:
        """Counts the record that is under way too: under a low limit it takes seconds, and its sender is not silent."""
        return self._decrypted + max(0, self.fed - _RECORD_OVERHEAD)

    def read_record(self) -> int:
        """Decrypts into the payload under way, otherwise one record into the scratch; 0 if there is none."""
        if self.rest:
            count = self._engine.fill(self.rest)
            self.filled(count)
        else:
            count = self._engine.read(self._scratch)
            self.feed(self._scratch[:count])
        if count:
            self._decrypted += count
            self.fed = 0
        return count

    def await_enough(self) -> None:
        """Lets the system wake this process only when a good piece of the payload has come, or the rest of it.

        A slow line delivers packet by packet: without this the loop ran 8000 times a second at 100 Mbit/s, mostly for
        less than a record, and took the GIL from the thread that trains as often.
        """
        here = self._engine.bytes_fed + _ENCRYPTED_RECORD  # of the rest, at most: OpenSSL may hold part of a record
        # Encrypted, the rest takes more bytes than in the clear, so this many will surely come.
        wanted = max(1, min(_ENOUGH, self.rest.nbytes - here)) if self.may_sleep else 1
        if wanted != self._low_water:
            self._low_water = wanted
            wake_at(self._socket.get_extra_info("socket"), wanted)


class TLSWriter(FrameWriter):
    """The writing half of one connection."""

    def __init__(self, engine: TLSEngine, limits: NetworkLimits, on_torn: Callable[[], None], way: LinkWay) -> None:
        super().__init__(limits, on_torn, way)
        self._engine = engine
        self._socket: asyncio.WriteTransport

    @property
    def bytes_waiting(self) -> int:
        """Bytes written and not yet acknowledged by the other end's system, as far as this system tells."""
        return self._socket.get_write_buffer_size() + bytes_in_system_buffer(self._socket.get_extra_info("socket"))

    def attach(self, socket: asyncio.WriteTransport) -> None:
        self._socket = socket
        socket.set_write_buffer_limits(_WRITE_HIGH, _WRITE_LOW)

    def write(self, data: bytes | memoryview) -> None:
        if data:
            self._engine.write(data)
            self.bytes_sent += len(data)
        self.flush()

    def write_whole(self, start: bytes, pieces: Sequence[memoryview], size: int) -> None:
        if len(start) + size <= _RECORD:
            self.write(b"".join((start, *pieces)))  # one record, one system call
            return
        self._engine.write(start)
        for piece in pieces:
            self._engine.write(piece)
        self.bytes_sent += len(start) + size
        self.flush()

    def flush(self) -> None:
        """Writes what the TLS engine has to say by itself: handshakes and alerts."""
        encrypted = self._engine.output()
        # Between a failed write and `connection_lost` a socket takes nothing more, and asyncio logs each attempt.
        if encrypted and not self._socket.is_closing():
            self.way.charge(len(encrypted))
            self._socket.write(encrypted)

    async def drained(self) -> None:
        await super().drained()
        if self._socket.is_closing():  # `fail` will be called, but a sender that never waits keeps the loop from it
            raise ConnectionLost("the connection broke")
