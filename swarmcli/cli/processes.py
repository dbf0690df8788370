"""Other processes of this command, started, watched and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from swarmcli.cli.parent import VARIABLE

GRACE_SECONDS = 20.0  # between asking a process to stop and stopping it


class Child:
    """One `swarm …` process whose output goes to a file. It ends with the thread that started it, even if that was
    killed."""

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], launcher: Sequence[str]
    ) -> None:
        self.name = name
        self.log = log
        parent = {} if launcher else {VARIABLE: str(os.getpid())}  # a launcher is the parent of what it starts
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "swarmcli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **parent, **environment},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops its children
            )

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL: the process cannot say goodbye."""
        self._process.kill()
        self._process.wait()

    def ask_to_stop(self) -> None:
        if self.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float) -> int:
        """Waits for the end; past `timeout` seconds the process is killed."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode

    def last_words(self, lines: int = 12) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])


class Children:
    """A block at whose end, however it ends, no started process is left. In the main thread SIGTERM ends the block."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._before: Any = None  # the handler of SIGTERM

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> Child:
        """`launcher`: words for Python that start a module in its place, as torchrun does."""
        child = Child(name, arguments, log, environment or {}, launcher)
        self._children.append(child)
        return child

    def __enter__(self) -> Children:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running = [child for child in self._children if child.returncode is None]
        for child in running:
            child.ask_to_stop()
        for child in running:
            child.wait(GRACE_SECONDS)
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # as a shell shows it
