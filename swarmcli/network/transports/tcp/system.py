"""Calls on a socket that only some systems have. Elsewhere peers work without them, a little slower."""

from __future__ import annotations

import os
import socket
import struct
from array import array
from contextlib import suppress
from typing import Any

try:
    import fcntl
    import termios
except ImportError:  # Windows
    _UNSENT = None
else:
    _UNSENT = getattr(termios, "TIOCOUTQ", None)


def bytes_in_system_buffer(sock: Any) -> int:
    """Bytes written to a socket that the other end has not acknowledged; 0 if the system does not tell."""
    if _UNSENT is None or sock is None:  # a relayed connection has no socket of its own
        return 0
    count = array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), _UNSENT, count)
    except (OSError, ValueError):  # closed by now
        return 0
    return count[0]


_LEAST_WINDOW, _MOST_WINDOW = 8 << 10, 1 << 30  # bytes


def bound_window(sock: Any, nbytes: int | None) -> None:
    """Bounds how many bytes the other end may have under way to here; None: as many as the system allows. Only on
    Linux. Elsewhere an unread connection takes in what its buffer holds, some 100 kB, before the other end waits."""
    option = getattr(socket, "TCP_WINDOW_CLAMP", None)
    if option is None or sock is None:
        return
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, option, _MOST_WINDOW if nbytes is None else max(nbytes, _LEAST_WINDOW))


def forget_unsent(sock: Any) -> None:
    """From now on, closing the socket throws away what the system has not sent yet. Otherwise it would go on sending
    megabytes of a failed round beside those of the next one."""
    if sock is None:
        return
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("hh" if os.name == "nt" else "ii", 1, 0))


def wake_at(sock: Any, nbytes: int) -> None:
    """Lets the system wake this process only when `nbytes` have come. Windows has the option and refuses it."""
    if sock is None:
        return
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
