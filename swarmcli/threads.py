"""How many threads torch uses for arithmetic beside the loop: one, unless the trainer waits for it.

torch divides even the sum of half a megabyte among a team of threads and waits for all of them. While a trainer keeps
the processors busy that waiting costs far more than the sum: rounds of 1 MiB took three to ten times as long, and as
much processor time, which the trainer then missed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

T = TypeVar("T")

_lock = threading.Lock()
_here = threading.local()  # `usual`: how many this thread had before it was set to one
_count: Callable[[], int] | None = None  # says how many a team has now; None: as many as torch decided at the start


@contextmanager
def count_threads_by(count: Callable[[], int]) -> Iterator[None]:
    """Within this block `on_all_threads` uses as many threads as `count` returns, which is called from any thread."""
    global _count
    before, _count = _count, count
    try:
        yield
    finally:
        _count = before


def on_one_thread(work: Callable[[], T]) -> T:
    """Runs `work` without a team of threads. On the main thread, which is the user's, nothing changes."""
    if not hasattr(_here, "usual") and threading.current_thread() is not threading.main_thread():
        with _lock:
            _here.usual = torch.get_num_threads()
            torch.set_num_threads(1)
            # That holds for this thread, and for all that begin later: for those the usual count is restored.
            restoring = threading.Thread(target=torch.set_num_threads, args=(_here.usual,), name="swarm-threads")
            with suppress(RuntimeError):  # this computer lets it have no further thread, and so no team
                restoring.start()
                restoring.join()
    return work()


def on_all_threads(work: Callable[[], T]) -> T:
    """Runs `work` with the full team of threads of this process: for steps that the trainer waits for."""
    usual = getattr(_here, "usual", None) if _count is None else _count()
    if usual is not None:
        torch.set_num_threads(usual)
    if hasattr(_here, "usual"):
        del _here.usual
    return work()
