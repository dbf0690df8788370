"""The receiving half of a TLS connection: encrypted bytes from the socket become frames."""

from __future__ import annotations

import asyncio
import socket

from swarmcli.network.transports.base import FrameLimits
from swarmcli.network.transports.frames import FrameReader
from swarmcli.network.transports.tcp.tls import TLSEngine

_ENOUGH = 32 << 10  # bytes, two TLS records: what is worth being woken for in the middle of a payload
_RECORD = 17 << 10  # bytes of a TLS record at most, encrypted


class TLSReader(FrameReader):
    """Decrypts into the memory of the frame under way, or into a scratch that connections share."""

    def __init__(self, engine: TLSEngine, limits: FrameLimits, scratch: memoryview) -> None:
        super().__init__(limits)
        self.bytes_received = 0
        self._engine = engine
        self._scratch = scratch
        self._socket: asyncio.Transport
        self._low_water = 1  # bytes that must be there before the system wakes us

    def attach(self, socket: asyncio.Transport) -> None:
        self._socket = socket

    def read_record(self) -> int:
        """Decrypts what belongs into the payload under way, otherwise one record; 0 if there is none."""
        if self.rest:
            count = self._engine.fill(self.rest)
            self.filled(count)
        else:
            count = self._engine.read(self._scratch)
            self.feed(self._scratch[:count])
        self.bytes_received += count
        return count

    def await_enough(self) -> None:
        """Lets the system wake this process only when a good piece of the payload has come, or the rest of it.

        A slow link delivers packet by packet: without this the loop ran 8000 times a second at 100 Mbit/s, mostly for
        less than a record, and took the interpreter from the thread that trains as often.
        """
        here = self._engine.bytes_fed + _RECORD  # of the rest, at most: OpenSSL may hold a record in part
        wanted = max(1, min(_ENOUGH, self.rest.nbytes - here))  # encrypted it is more, so this much will come
        if wanted != self._low_water:
            self._low_water = wanted
            self._socket.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
