"""A person at a terminal: a command runs on a pseudo-terminal, its screen is read as the person sees it, and keys are
typed."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import pyte

SECONDS = 120.0  # for anything, on a busy machine


class Terminal:
    """Runs a command while the block lasts. The process group is killed at its end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 80,
        lines: int = 24,
        environment: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_output: Callable[[pyte.Screen], object] = lambda screen: None,
    ) -> None:
        """`on_output(screen)` is called whenever the screen may have changed."""
        self.screen = pyte.HistoryScreen(columns, lines, history=2000)
        self._stream = pyte.ByteStream(self.screen)
        self._on_output = on_output
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        surroundings = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(environment or {})}
        surroundings.pop("COLUMNS", None)
        self._process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env=surroundings,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it as a signal
        )
        os.close(slave)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def text(self) -> str:
        """The screen, and above it what has scrolled away."""
        above = ["".join(line[x].data for x in range(self.screen.columns)) for line in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self.screen.display])

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def watch(self, seconds: float) -> bool:
        """Reads output for at most so many seconds; returns False once the command has ended and all its output is
        read."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([self._master], [], [], left)
            if not ready:
                break
            try:
                said = os.read(self._master, 1 << 16)
            except OSError:  # what Linux says when the other end is closed
                return False
            if not said:
                return False
            self._stream.feed(said)
            self._on_output(self.screen)
        return True

    def until(self, look: Callable[[str], object], seconds: float = SECONDS) -> str:
        """Waits until `look` is true of the screen's text, and returns that text. Raises AssertionError, which shows
        the screen, after so many seconds, or if the command ends before."""
        deadline = time.monotonic() + seconds
        while not look(self.text):
            alive = self.watch(0.1)
            assert (alive or look(self.text)) and time.monotonic() < deadline, self.text
        return self.text

    def end(self, seconds: float = SECONDS) -> int:
        """Waits for the command's end, and returns its exit code."""
        deadline = time.monotonic() + seconds
        while self.watch(0.1):
            assert time.monotonic() < deadline, self.text
        return self._process.wait(seconds)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._master)
