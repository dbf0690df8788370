"""Messages between the launcher of a site and its processes on this machine: JSON, a line each, over a socket pair.

A process inherits its end of the pair. The pair has no name, so nobody else can come to it, and it closes with either
process however that ends: so a process learns that its launcher is gone, even if that happened before its first line.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from swarmcli.cli.processes import end_with

VARIABLE = "SWARM_SITE"  # in the environment of a process: its Start, as JSON


class Past(msgspec.Struct, frozen=True, tag=True):
    """The record that one life of the site leaves to the next. Rank 0 sends it whenever it has changed."""

    epoch: int = 0  # the last that the site has ended; 0 before the first
    home: str = ""  # the peer's directory, which it takes up again, and by it the port where that is free
    contacts: tuple[str, ...] = ()  # whom it knew
    samples: int = 0  # that the site has contributed


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A process cannot go on, and is about to end."""

    code: int  # with which it ends
    words: str = ""  # for people; empty if it knows only that others are gone


class StopProcess(msgspec.Struct, frozen=True, tag=True):
    """The launcher was asked to stop, by this signal."""

    number: int
    again: bool = False  # for the second time


class Start(msgspec.Struct, frozen=True):
    """A process's place and past, known from its first moment on."""

    link: int  # the descriptor of its end of the pair
    launcher: int  # its process id
    store: str  # the file at which the processes of this life meet
    past: Past = Past()


class ProcessPipe:
    """One end of the pair."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._begun = b""  # of a line

    def send(self, message: Past | Failed | StopProcess) -> None:
        """Without effect if the other process has ended."""
        with suppress(OSError):
            self._end.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> list[Past | Failed | StopProcess] | None:
        """All that has come, after a wait if nothing has; None: the other process has ended, or left the line."""
        try:
            data = self._end.recv(1 << 20)  # more than the kernel keeps for a pair
        except BlockingIOError:  # a launcher does not wait
            return []
        except ConnectionError:
            return None
        if not data:
            return None
        *lines, self._begun = (self._begun + data).split(b"\n")
        return [msgspec.json.decode(line, type=Past | Failed | StopProcess) for line in lines]

    def leave(self) -> None:
        """Ends `receive` at both ends. Idempotent."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()

    def fileno(self) -> int:
        return self._end.fileno()


class LauncherLink:
    """A process of a site, as its launcher's child: it hears the wish to stop, and ends when the launcher has ended.

    `end_process` ends it, in the middle of whatever it does: nobody else would.
    """

    def __init__(self, start: Start, *, end_process: Callable[[int], object] = os._exit) -> None:
        self.start = start
        self.past = start.past
        self._asked: list[StopProcess] = []
        self._line = ProcessPipe(socket.socket(fileno=start.link))
        self._on_stop: Callable[[signal.Signals, bool], object] = lambda number, again: None
        self._end_process = end_process
        self._lock = threading.Lock()
        self._over = False
        self._thread = threading.Thread(target=self._listen, name="swarm-launcher-link", daemon=True)
        self._thread.start()

    @classmethod
    def found(cls) -> LauncherLink | None:
        """To the launcher that started this process; None: it was not `swarm` that did. Call it once, and first."""
        given = os.environ.pop(VARIABLE, None)  # the descriptor is not for processes that this one starts
        if given is None:
            return None
        start = msgspec.json.decode(given, type=Start)
        end_with(start.launcher)
        return cls(start)

    def tell(self, message: Past | Failed) -> None:
        if isinstance(message, Past):
            self.past = message
        self._line.send(message)

    def on_stop(self, call: Callable[[signal.Signals, bool], object]) -> None:
        """`call` hears of the launcher's wish to stop, and whether it is said again, also of what came before; in a
        thread of its own."""
        with self._lock:
            self._on_stop = call
            for stop in self._asked:
                call(signal.Signals(stop.number), stop.again)

    def close(self) -> None:
        """From here on this process may outlive its launcher."""
        self._over = True
        self._line.leave()
        self._thread.join()
        self._line.close()

    def _listen(self) -> None:
        while (messages := self._line.receive()) is not None:
            for message in messages:
                if isinstance(message, StopProcess):
                    with self._lock:
                        self._asked.append(message)
                        self._on_stop(signal.Signals(message.number), message.again)
        if not self._over:
            self._end_process(1)
