"""A process that ends when the one that started it has ended, however that came about."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

VARIABLE = "SWARM_PARENT"  # in the environment of a process: the id of the parent with which it ends
PR_SET_PDEATHSIG = 1  # of Linux, see prctl(2)


def end_with_parent_of_environment() -> None:
    """For a process that `processes.Child` started. Call it once, and first."""
    given = os.environ.pop(VARIABLE, None)  # processes that this one starts have another parent
    if given is None:
        return
    end_with(int(given))
    if sys.platform != "linux":
        _watch(int(given), threading.Event(), os._exit, every=0.5)


def end_with(parent: int) -> None:
    """Has the kernel kill this process when the parent's main thread ends: also one that is stopped, or stuck where
    no thread of Python's runs. Only Linux can. A parent that was gone before the kernel was told is noticed too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
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
    def watch() -> None:
        while not over.wait(every):
            if os.getppid() != parent:
                end_process(1)
                return

    thread = threading.Thread(target=watch, name="swarm-parent-watch", daemon=True)
    thread.start()
    return thread
