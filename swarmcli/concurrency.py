"""Work beside the loop, and waiting beside work: what states, rounds and the optimizer share."""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from swarmcli.network import Stream
from swarmcli.network.loop_thread import offload
from swarmcli.threads import on_all_threads, on_one_thread

P = ParamSpec("P")
T = TypeVar("T")
Ends = Callable[[int], bool]  # whether this many bytes in a period are too few

# Bytes. Adding, converting or hashing a part of the usual half a megabyte on the wire takes 0.05 to 0.3 ms, also with
# float16; handing it to another thread and back was measured at 0.7 ms on a busy machine, more than it saves.
OFFLOAD_FROM = 2 << 20

_LEAST_TAKEN = 8 << 10  # bytes; a reader that takes fewer in the given time only holds a place


class Bell:
    """Wakes everyone who waits for something to change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


def forgetful(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorates coroutines that hold tensor memory in local variables, so that their errors do not keep it.

    An error holds the frames that it came through, frames hold their variables, and errors of task groups hold each
    other: without this the memory of a failed round stays until the garbage collector happens to come by.
    """

    @functools.wraps(function)
    async def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(*args, **kwargs)
        except (Exception, asyncio.CancelledError) as error:
            _clear_frames(error)
            raise

    return wrapper


def forget(error: BaseException) -> None:
    """For an error that goes no further: frees the variables of the frames that it came through, and its traceback."""
    _clear_frames(error, for_good=True)


def _clear_frames(error: BaseException | None, for_good: bool = False) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        if for_good:
            error.__traceback__ = None
        error = error.__cause__ or error.__context__


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Runs `work` beside the block, and cancels it at the block's end. Nothing of it is left afterwards.

    A TaskGroup for two that lets an error out as it is: the block's own, or that of `work`, which ends the block.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
            yield task
            task.cancel()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def _trickles(taken: int) -> bool:
    return taken < _LEAST_TAKEN


class _ProgressCheck:
    """Looks every `seconds` whether enough bytes have moved on a stream; if not, it lets the timeout expire."""

    # A class, because a closure that reschedules itself is a reference cycle: it would keep the waiting task, its
    # frames and the memory of the round until the garbage collector runs.

    def __init__(self, moved: Callable[[], int], ends: Ends, seconds: float, deadline: asyncio.Timeout) -> None:
        self._moved, self._ends, self._seconds, self._deadline = moved, ends, seconds, deadline
        self._loop = asyncio.get_running_loop()
        self._begin()

    def _begin(self) -> None:
        self._seen = self._moved()
        self._timer = self._loop.call_later(self._seconds, self._look)

    def _look(self) -> None:
        if self._ends(self._moved() - self._seen):
            self._deadline.reschedule(self._loop.time())
        else:
            self._begin()

    def end(self) -> None:
        self._timer.cancel()


def unless_silent(stream: Stream, seconds: float) -> AbstractAsyncContextManager[None]:
    """Raises TimeoutError when nothing at all has arrived on a stream for so long, however slow it is otherwise."""
    return _while_moving(lambda: stream.arriving, lambda moved: not moved, seconds)


def unless_stuck(stream: Stream, seconds: float, ends: Ends = _trickles) -> AbstractAsyncContextManager[None]:
    """Raises TimeoutError when the other end of a stream has taken next to nothing for so long, however slow it is
    otherwise: the line, or either end's limit, may leave it a few kilobytes per second. `ends` decides, from the bytes
    taken in that time, whether they are next to nothing."""
    return _while_moving(lambda: stream.leaving, ends, seconds)


@asynccontextmanager
async def _while_moving(moved: Callable[[], int], ends: Ends, seconds: float) -> AsyncIterator[None]:
    async with asyncio.timeout(None) as deadline:
        check = _ProgressCheck(moved, ends, seconds, deadline)
        try:
            yield
        finally:
            check.end()


async def on_executor(nbytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs arithmetic on `nbytes` of tensors on one thread: the loop's if it is short, else one of the executor."""
    job = functools.partial(on_one_thread, functools.partial(work, *args, **kwargs))
    return job() if nbytes < OFFLOAD_FROM else await offload(job)


async def on_all_processors(nbytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for work that other peers wait for: if it is long, torch uses all its threads."""
    if nbytes < OFFLOAD_FROM:
        return await on_executor(nbytes, work, *args, **kwargs)
    return await offload(functools.partial(on_all_threads, functools.partial(work, *args, **kwargs)))
