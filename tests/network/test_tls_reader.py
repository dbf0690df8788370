"""When the receiving half of a connection lets itself be woken: not for each packet, and never too late."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest

from swarmcli.network.limits import NetworkLimits
from swarmcli.network.transports.frames import frame_start
from swarmcli.network.transports.tcp.tls import TLSReader

from .test_certificates import engines
from .test_frames import Collector

LIMITS = NetworkLimits()


class Socket:
    """Takes the place of asyncio's transport and of its socket."""

    def __init__(self) -> None:
        self.low_water = 1

    def get_extra_info(self, name: str) -> Socket:
        return self

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT) and value >= 1
        self.low_water = value


def read_all(reader: TLSReader, sink: Collector) -> None:
    while reader.deliver_next(sink) or reader.read_record():
        pass
    reader.await_enough()


@pytest.mark.parametrize("seed", range(5))
def test_what_is_waited_for_will_come(seed: int) -> None:
    """Whatever the pieces: at least as many bytes are still to come of this frame as the reader wants to see."""
    dice = random.Random(seed)
    dialer, listener = engines()
    sizes = [dice.choice([0, 100, 20_000, 49_152, 300_000]) + dice.randrange(50) for _ in range(6)]
    encrypted: list[bytes] = []
    for size in sizes:
        dialer.write(frame_start(b"header", size, LIMITS))
        if size:
            dialer.write(bytes(size))
        encrypted.append(dialer.output())
    transport: Any = Socket()
    reader = TLSReader(listener, LIMITS, memoryview(bytearray(16 << 10)))
    reader.attach(transport)
    sink = Collector()
    most = 1
    for number, frame in enumerate(encrypted):
        position = 0
        while position < len(frame):
            assert transport.low_water <= len(frame) - position, "it would sleep until another frame comes"
            most = max(most, transport.low_water)
            # The system wakes it when so much has come, or a little more.
            position += (step := transport.low_water + dice.choice([0, 0, 1, 1448, 40_000]))
            listener.feed(frame[position - step : position])
            read_all(reader, sink)
        assert [len(payload) for _, payload in sink.frames] == sizes[: number + 1]
        assert transport.low_water == 1, "between frames every byte counts"
    assert most == 32 << 10 or max(sizes) < 100_000
