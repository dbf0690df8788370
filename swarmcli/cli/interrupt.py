"""Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # what a shell shows for a command that Ctrl-C ended


@contextmanager
def stop_on_signals(
    stop: threading.Event,
    *,
    on_first: Callable[[signal.Signals], object] | None = None,
    end_process: Callable[[int], object] = os._exit,
) -> Iterator[None]:
    """Within this block the first of the SIGNALS sets `stop` and calls `on_first`; the second ends the process at
    once.

    For the main thread only (Python gives signals to no other). The handlers of before are put back at the end.
    """
    setters: list[threading.Thread] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if setters:
            end_process(INTERRUPTED)
            return
        # Event.set() takes a lock that the interrupted main thread may hold in Event.wait(): set from a thread.
        setter = threading.Thread(target=stop.set, name="stop on signal")
        setters.append(setter)
        setter.start()
        if on_first is not None:
            on_first(signal.Signals(number))

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for setter in setters:
            setter.join()
