"""The one background thread of a process, and the event loop that runs on it.

Synchronous shells (DHT, DecentralizedAverager, Optimizer) share it: each acquires it, hands coroutines to it, and
releases it. What comes back to the user's thread is a `SwarmFuture`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, ClassVar, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_EXIT_GRACE = 5.0  # seconds for which the interpreter's exit waits for a thread that nobody released


class SwarmFuture(concurrent.futures.Future[T]):
    """A result on its way from the loop's thread. May be waited for from any thread, or awaited from any loop."""

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


# On Windows a loop that waits by select() can have at most 512 sockets, so there completion ports are used.
_SystemLoop: type[asyncio.BaseEventLoop] = getattr(asyncio, "ProactorEventLoop", asyncio.SelectorEventLoop)


class _Loop(_SystemLoop):  # type: ignore[valid-type, misc]
    """Resolves names in threads of their own, for which neither the loop's end nor the interpreter's exit waits.

    A name server that is out of reach takes up to half a minute to fail, and nothing can interrupt the wait for it.
    """

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        found: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        found.set_running_or_notify_cancel()  # a caller that gives up waiting does not disturb the thread

        def resolve() -> None:
            try:
                found.set_result(socket.getaddrinfo(host, port, family, type, proto, flags))
            except Exception as error:
                found.set_exception(error)

        threading.Thread(target=resolve, name="swarm-names", daemon=True).start()
        return await asyncio.wrap_future(found)


class LoopThread:
    """A thread with an asyncio loop, shared by everyone who acquires it; gone after the last release.

    After `fork` a child has no such thread: there every method of an inherited instance raises RuntimeError, and
    `acquire` starts a thread of the child's own.
    """

    _guard: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[LoopThread | None] = None

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        """Starts the thread. Use `acquire`; an instance that is made directly is not shared."""
        self._users = 1
        self._process = os.getpid()
        self._closing = False
        self._order = threading.Lock()  # nothing is submitted after the request to stop
        self._stop: asyncio.Event
        started = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(started,), name="swarm-loop", daemon=True)
        self._thread.start()
        started.wait()

    @classmethod
    def acquire(cls) -> LoopThread:
        """The shared thread, started if need be. Every `acquire` needs a `release`."""
        with cls._guard:
            if cls._shared is None:
                cls._shared = LoopThread()
            else:
                cls._shared._users += 1
            return cls._shared

    def release(self) -> None:
        """Undoes one `acquire`. The last release cancels what still runs, waits for it and ends the thread."""
        self._check_callable_here("release")
        with LoopThread._guard:
            self._users -= 1
            if self._users > 0:
                return
            if LoopThread._shared is self:
                LoopThread._shared = None
        self._end(None)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> SwarmFuture[T]:
        """Runs a coroutine on the loop, from any thread. Cancelling the future cancels the coroutine."""
        future: SwarmFuture[T] = SwarmFuture()
        try:
            self._check_process()
            with self._order:
                if self._closing:
                    raise RuntimeError("the loop thread has ended: it was released by everyone who had acquired it")
                self.loop.call_soon_threadsafe(self._begin, coroutine, future)
        except RuntimeError:
            coroutine.close()
            raise
        return future

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs a coroutine on the loop and waits for it, from any other thread.

        Raises what the coroutine raises, and TimeoutError after `timeout` seconds; the coroutine is cancelled then,
        and likewise when the waiting is interrupted.
        """
        try:
            self._check_callable_here("run")
        except RuntimeError:
            coroutine.close()
            raise
        future = self.submit(coroutine)
        try:
            return future.result(timeout)
        finally:
            future.cancel()  # without effect on one that is done

    def _begin(self, coroutine: Coroutine[Any, Any, T], future: SwarmFuture[T]) -> None:
        task = self.loop.create_task(coroutine)  # the future is its owner; whatever is left over, `_end` awaits

        def cancel_task(done: concurrent.futures.Future[T]) -> None:
            if done.cancelled() and not self.loop.is_closed():
                self.loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(lambda ended: _hand_over(ended, future))
        future.add_done_callback(cancel_task)

    def _main(self, started: threading.Event) -> None:
        # Closing the runner cancels and awaits every task, then ends asynchronous generators and the executor.
        with asyncio.Runner(loop_factory=_Loop) as runner:
            self.loop = runner.get_loop()
            workers = min(16, (os.cpu_count() or 1) + 2)  # torch has threads of its own inside each job
            executor = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="swarm-work")
            self.loop.set_default_executor(executor)
            self._stop = asyncio.Event()
            started.set()
            runner.run(self._stop.wait())

    def _end(self, timeout: float | None) -> None:
        with self._order:
            self._closing = True
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout)

    def _check_callable_here(self, method: str) -> None:
        self._check_process()
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"LoopThread.{method} would wait for the very thread it is called on; await instead")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked from the one that runs the loop thread, and threads do not survive a fork; "
                "create peers after forking, or start processes with 'spawn'"
            )

    def __repr__(self) -> str:
        return f"<LoopThread users={self._users} {'ended' if self._closing else 'running'}>"


async def offload(func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `func` in the loop's executor (inline under virtual time) and returns its result.

    When the caller is cancelled, CancelledError is raised only after `func` has returned, so nothing writes any more to
    the memory that it works on.
    """
    call = [functools.partial(func, *args, **kwargs)]
    del func, args, kwargs
    # The worker pops the call: the executor drops its reference only some time after the result is known here, and
    # would keep the arguments meanwhile (once, on a busy machine, a whole round's averages beside those of the next).
    return await to_its_end(asyncio.get_running_loop().run_in_executor(None, lambda: call.pop()()))


def loop_time() -> float:
    """Seconds by the clock of the running loop."""
    return asyncio.get_running_loop().time()


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Waits until an event is set, at most so long (None: without a bound). Returns whether it was."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def to_its_end(work: Awaitable[T]) -> T:
    """Awaits what must not be left half done: when the caller is cancelled, `work` still runs to its end, and only then
    CancelledError is raised."""
    job = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        if not job.done():
            await asyncio.wait([job])
        if not job.cancelled():
            job.exception()  # read, so that asyncio does not report it as forgotten
        raise


def _hand_over(task: asyncio.Task[T], future: SwarmFuture[T]) -> None:
    if task.cancelled():
        future.cancel()
        future.set_running_or_notify_cancel()
        return
    error = task.exception()
    if not future.set_running_or_notify_cancel():
        return  # the user cancelled it while the task came to its end
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


def _forget_in_child() -> None:
    # Another thread of the parent may have held the lock at the moment of the fork.
    LoopThread._guard = threading.Lock()
    LoopThread._shared = None


def _end_with_interpreter() -> None:
    left = LoopThread._shared
    if left is not None:
        left._end(_EXIT_GRACE)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_end_with_interpreter)
