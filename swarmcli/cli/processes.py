"""Starts and watches other processes of this command, and leaves none behind; and ends a process when the one that
started it has ended, however that ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

VARIABLE = "SWARM_PARENT"  # in the environment of a process: the id of the parent with which it ends


def end_with_parent_of_environment() -> None:
    """For a process that `processes.Child` started. Call it once, and first."""
    given = os.environ.pop(VARIABLE, None)  # removed: processes that this one starts have another parent
    if given is None:
        return
    if sys.platform != "linux":
        end_with_parent(int(given))
        return
    # The kernel kills this process when the parent's main thread ends, even if this process is stopped, or stuck where
    # no thread of Python's runs. If the parent had ended before the kernel was told, that is noticed below.
    ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != int(given):
        os._exit(1)


def end_with_parent(parent: int) -> None:
    """From now on this process ends when its parent has ended, whatever it does; also with a foreign launcher as
    parent, any of whose threads may end before it."""
    import psutil

    def watch() -> None:
        # On Windows a process keeps the process id of a parent that has ended.
        while os.getppid() == parent and psutil.pid_exists(parent):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="swarm-parent-watch", daemon=True).start()


# Windows has no sessions, but groups of processes, and asks them to stop by Ctrl-Break.
_OWN_GROUP = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
_STOP: signal.Signals = getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM)


class Child:
    """One `swarm …` process whose output goes to a file. It ends with the thread that started it, even if that was
    killed."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        launcher: Sequence[str],
        prefix: Sequence[str],
    ) -> None:
        self.name = name
        self.log = log
        self._launched = bool(launcher)
        parent = {} if launcher else {VARIABLE: str(os.getpid())}  # a launcher is itself the parent of what it starts
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, *launcher, "-m", "swarmcli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **parent, **environment},
                start_new_session=True,  # Ctrl-C reaches only the parent, which then stops its children
                creationflags=_OWN_GROUP,
            )

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Sends SIGKILL: the process cannot say goodbye."""
        self._process.kill()
        self._process.wait()

    def ask_to_stop(self, *, hurry: bool = False) -> None:
        """`hurry`: it need not hand in what it has computed."""
        if self.returncode is None:
            self._process.send_signal(_STOP)
            if hurry and not self._launched and os.name != "nt":
                # The second signal differs from the first: of two equal ones sent at once the kernel makes one.
                self._process.send_signal(signal.SIGINT)

    def wait(self, timeout: float) -> int:
        """Waits for the end; after `timeout` seconds it kills the process."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode

    def last_words(self, lines: int = 12) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])


class Children:
    """A block that leaves no started process behind, however it ends. In the main thread SIGTERM ends the block."""

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
        prefix: Sequence[str] = (),
    ) -> Child:
        """`launcher`: arguments with which Python starts a module in its place, as torchrun does. `prefix`: a command
        that starts the command after it, as nsenter does."""
        child = Child(name, arguments, log, environment or {}, launcher, prefix)
        self._children.append(child)
        return child

    def __enter__(self) -> Children:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _end)
        return self

    def __exit__(self, *_: object) -> None:
        running = [child for child in self._children if child.returncode is None]
        for child in running:
            child.ask_to_stop(hurry=True)  # all leave, so no peer is left whose round could take samples
        for child in running:
            child.wait(timeout=20.0)
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # as a shell shows it
