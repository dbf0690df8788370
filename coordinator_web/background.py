"""Serves a peer's dashboard in a thread of its own, which loads the web framework too: half a second that no peer
waits for. The ports are taken before, so whoever asks meanwhile is answered a moment later."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)


@contextmanager
def serving(make_app: Callable[[], FastAPI], sockets: Sequence[socket.socket]) -> Iterator[None]:
    """Serves what `make_app` makes, called in the thread, while the block lasts, and closes the sockets. Where that
    fails it is logged once, and all else goes on."""
    server = _Background(make_app, sockets)
    thread = threading.Thread(target=server.run, name="swarm-dashboard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()


class _Background:
    def __init__(self, make_app: Callable[[], FastAPI], sockets: Sequence[socket.socket]) -> None:
        self._make_app = make_app
        self._sockets = sockets
        self._lock = threading.Lock()  # between the end of the loading and a stop in the middle of it
        self._over = False
        self._wake: Callable[[], object] = lambda: None

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            logger.warning("this peer serves no dashboard, and `swarm status` cannot ask it: %s", error)
        finally:
            for each in self._sockets:
                each.close()

    async def _serve(self) -> None:
        from coordinator_web.server import DashboardServer

        server = DashboardServer(self._make_app(), sockets=self._sockets)
        loop, asked_to_stop = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            if self._over:
                return
            self._wake = lambda: loop.call_soon_threadsafe(asked_to_stop.set)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve())
            waiting = tasks.create_task(asked_to_stop.wait())
            await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
            serving.cancel()
            waiting.cancel()

    def stop(self) -> None:
        with self._lock:
            self._over = True
        with suppress(RuntimeError):  # the loop has ended by itself
            self._wake()
