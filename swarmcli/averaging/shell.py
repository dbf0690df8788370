"""Holds a core on the process's loop thread, for a synchronous shell."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from swarmcli.network.loop_thread import LoopThread, SwarmFuture

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Core(Protocol):
    async def shutdown(self) -> None: ...


C = TypeVar("C", bound=Core)


class CoreRunner(Generic[C]):
    """Starts one core, calls it from any thread, and ends it. `name` stands in messages."""

    def __init__(self, name: str, shutdown_timeout: float, *, daemon: bool = True) -> None:
        """`shutdown_timeout`: seconds. `daemon`: this ends with the main thread; otherwise the process stays alive
        until `shutdown`."""
        self._name, self._shutdown_timeout, self._daemon = name, shutdown_timeout, daemon
        self._over = threading.Event()
        self._thread: LoopThread | None = None
        self._starting: SwarmFuture[C] | None = None
        self._closed = False

    @property
    def has_been_started(self) -> bool:
        return self._thread is not None

    @property
    def can_be_called(self) -> bool:
        """Whether it has been started and not shut down. A call may have to wait until the core is up."""
        return self._thread is not None and not self._closed

    @property
    def is_alive(self) -> bool:
        starting = self._starting
        if self._closed or starting is None or not starting.done() or starting.cancelled():
            return False
        return starting.exception() is None  # `start` without `wait` raises nothing itself

    def start(self, make: Callable[[], Coroutine[Any, Any, C]], *, wait: bool, timeout: float | None) -> None:
        """Runs `make` on the loop. RuntimeError after an earlier `start` or `shutdown`.

        With `wait` it returns once the core is up; it raises what `make` raises, or TimeoutError after `timeout`
        seconds, and then leaves nothing running.
        """
        if self._closed or self._thread is not None:
            raise RuntimeError(f"{self._name} {'has been shut down' if self._closed else 'has been started already'}")
        self._thread = LoopThread.acquire()
        self._starting = self._thread.submit(make())
        if not self._daemon:
            threading.Thread(target=self._over.wait, name="swarm-keeps-the-process", daemon=False).start()
        if not wait:
            return
        try:
            self._starting.result(timeout)
        except (Exception, KeyboardInterrupt):
            self.shutdown()
            raise

    def call(self, action: Callable[[C], T], wait: bool = True) -> Any:
        """Calls `action` with the core on the loop's thread. Returns its result, or without `wait` a SwarmFuture.
        RuntimeError unless `can_be_called`."""

        async def act(core: C) -> T:
            return action(core)

        return self.run(act, wait)

    def run(self, action: Callable[[C], Awaitable[T]], wait: bool = True) -> Any:
        """The same for an action that is a coroutine."""

        async def act() -> T:
            return await action(await self._core())

        thread = self._thread
        if thread is None or not self.can_be_called:
            raise RuntimeError(f"{self._name} is not running; start it with run_in_background()")
        return thread.run(act()) if wait else thread.submit(act())

    def shutdown(self) -> None:
        """Ends the core, within `shutdown_timeout` or with a warning, and releases the loop's thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            return
        try:
            self._thread.run(self._stop(), self._shutdown_timeout)
        except TimeoutError:
            logger.warning("%s did not end within %g s", self._name, self._shutdown_timeout)
        finally:
            self._over.set()
            self._thread.release()

    async def _core(self) -> C:
        assert self._starting is not None
        return await asyncio.shield(asyncio.wrap_future(self._starting))

    async def _stop(self) -> None:
        core = None
        try:
            core = await self._core()
        except Exception:
            logger.debug("%s had not come up", self._name, exc_info=True)
        if core is not None:
            await core.shutdown()
