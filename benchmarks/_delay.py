"""Lets packets wait: what is routed into the device `delay` leaves the device `delayed` so many seconds later.

    python -m benchmarks._delay SECONDS          prints `ready`, and runs until it is killed

For namespaces on systems whose kernel has no netem.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001  # IFF_TUN | IFF_NO_PI
MAX_WAITING = 20_000  # packets; beyond them new ones are lost, as they would be on the way


def open_tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN_WITHOUT_HEADER))
    return device


def pass_on(seconds: float, reader: int, writer: int) -> None:
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        select.select([reader], [], [], patience)
        now = time.monotonic()
        try:
            while len(waiting) < MAX_WAITING:
                waiting.append((now + seconds, os.read(reader, 65536)))
        except BlockingIOError:
            pass
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(writer, waiting.popleft()[1])


if __name__ == "__main__":
    ends = open_tun("delay"), open_tun("delayed")
    print("ready", flush=True)
    pass_on(float(sys.argv[1]), *ends)
