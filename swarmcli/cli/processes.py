"""Other processes of this command, started, watched and never left behind; and a process that ends when the one that
started it has ended, however that came about."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

VARIABLE = "SWARM_PARENT"  # in the environment of a process: the id of the parent with which it ends


def end_with_parent_of_environment() -> None:
    """For a process that `processes.Child` started. Call it once, and first."""
    given = os.environ.pop(VARIABLE, None)  # processes that this one starts have another parent
    if given is None:
        return
    _end_with(int(given))
    if sys.platform != "linux":
        _watch(int(given), threading.Event(), os._exit, every=0.5)


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when the parent's main thread ends: also one that is stopped, or stuck where
    no thread of Python's runs. Only Linux can. A parent that was gone before the kernel was told is noticed too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


@contextmanager
def ends_with_parent(*, end_process: Callable[[int], object] = os._exit, every: float = 0.5) -> Iterator[None]:
    """Within this block the process ends when its parent is gone, whatever it does. For one that torchrun started,
    whose parent told it nothing: it looks `every` so many seconds."""
    over = threading.Event()
    thread = _watch(os.getppid(), over, end_process, every)
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(parent: int, over: threading.Event, end_process: Callable[[int], object], every: float) -> threading.Thread:
    import psutil

    def watch() -> None:
        while not over.wait(every):
            # On Windows a process keeps the number of a parent that has ended.
            if os.getppid() != parent or not psutil.pid_exists(parent):
                end_process(1)
                return

    thread = threading.Thread(target=watch, name="swarm-parent-watch", daemon=True)
    thread.start()
    return thread


# Windows knows no sessions, but groups of processes, and asks them to stop by a key.
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
        parent = {} if launcher else {VARIABLE: str(os.getpid())}  # a launcher is the parent of what it starts
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, *launcher, "-m", "swarmcli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **parent, **environment},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops its children
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
        """SIGKILL: the process cannot say goodbye."""
        self._process.kill()
        self._process.wait()

    def ask_to_stop(self, *, hurry: bool = False) -> None:
        """`hurry`: it need not hand in what it has computed."""
        if self.returncode is None:
            self._process.send_signal(_STOP)
            if hurry and not self._launched and os.name != "nt":
                # A second signal, and another one: of two equal ones that come at once the kernel makes one.
                self._process.send_signal(signal.SIGINT)

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
        prefix: Sequence[str] = (),
    ) -> Child:
        """`launcher`: words for Python that start a module in its place, as torchrun does. `prefix`: a command that
        becomes the one that follows it, as nsenter does."""
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
            child.ask_to_stop(hurry=True)  # all go, so nobody is left for whom it would count
        for child in running:
            child.wait(timeout=20.0)
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # as a shell shows it
