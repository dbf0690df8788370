"""An event loop whose clock jumps to the next timer instead of waiting for it.

Hours of a simulated swarm pass in seconds, and nothing depends on how fast the machine is. There is no input or
output besides the memory transport: the loop polls nothing. Jobs for an executor run inline; otherwise the clock would
run past them. Everything follows from the program and its seeds alone: tasks hash by the order of their creation, so
even the standard library's sets of tasks are iterated in the same order in every run.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH = 1_700_000_000.0  # the wall clock when virtual time begins


class Deadlock(RuntimeError):
    """The main coroutine waits, and nothing is scheduled that could ever wake it."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. `time()` moves only when nothing is left to do at the present moment."""

    def __init__(self, *, end: float = float("inf")) -> None:
        """`end`: the time at which whatever still runs is taken to hang; the loop then stops with TimeoutError."""
        self.end = end
        self._now = 0.0
        super().__init__(_NoInput(self._advance))
        self._task_numbers = itertools.count()
        self.set_task_factory(self._make_task)
        self.faults: list[Exception] = []  # errors of callbacks and of tasks that nobody awaits
        self.set_exception_handler(self._note_fault)

    def time(self) -> float:
        return self._now

    def wall_time(self) -> float:
        """Stands in for `time.time()` in here; swarmcli.clock asks for it."""
        return EPOCH + self._now

    def stall(self, seconds: float) -> None:
        """Time passes, and nothing runs, as for a process that was frozen or had no processor."""
        self._now += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs the job at once, on the loop's thread."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _advance(self, timeout: float | None) -> None:
        if self.faults:
            raise self.faults[0]
        if timeout is None:
            raise Deadlock(f"nothing is scheduled, and these tasks wait forever: {_names(asyncio.all_tasks(self))}")
        if self._now + timeout > self.end:
            raise TimeoutError(f"{self.end:g} s have passed, and these tasks run: {_names(asyncio.all_tasks(self))}")
        self._now += timeout

    def _note_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.default_exception_handler(context)
        error = context.get("exception")
        # An error that was never retrieved is reported when its future is garbage collected, which is not reproducible.
        if isinstance(error, Exception) and "never retrieved" not in context["message"]:
            self.faults.append(error)

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **options: Any,
    ) -> asyncio.Task[T]:
        return _NumberedTask(next(self._task_numbers), coroutine, loop=loop, **options)


class _NumberedTask(asyncio.Task[T]):
    """A task that hashes by its number, so that sets of tasks have one order."""

    def __init__(self, number: int, *arguments: Any, **options: Any) -> None:
        self.number = number
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _NoInput(selectors.BaseSelector):
    """Knows what asyncio registers and never finds any of it ready; waiting is left to `advance`."""

    def __init__(self, advance: Callable[[float | None], None]) -> None:
        self._advance = advance
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, descriptor, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._advance(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


def run(main: Coroutine[Any, Any, T], *, seed: int | None = None, timeout: float = 1e6) -> T:
    """Runs `main` to its end under virtual time and returns its result.

    Raises Deadlock when it can never end, TimeoutError after `timeout` virtual seconds, RuntimeError when it leaves
    tasks behind, and the first error of a callback or of a task that nobody awaited. `seed` is only shown with a
    failure, so that the run can be repeated.
    """
    loop = VirtualTimeLoop(end=timeout)
    try:
        return loop.run_until_complete(_leaving_nothing(main, loop))
    except Exception as error:
        error.add_note(f"under virtual time, at {loop.time():.6f} s, seed {seed}")
        raise
    finally:
        _cancel_leftovers(loop)
        loop.close()


async def _leaving_nothing(main: Coroutine[Any, Any, T], loop: VirtualTimeLoop) -> T:
    result = await main
    await asyncio.sleep(0)  # tasks that were cancelled last may still end
    if loop.faults:
        raise loop.faults[0]
    leftovers = asyncio.all_tasks() - {asyncio.current_task()}
    if leftovers:
        raise RuntimeError(f"tasks were left behind: {_names(leftovers)}")
    return result


def _cancel_leftovers(loop: VirtualTimeLoop) -> None:
    loop.end = float("inf")
    loop.faults.clear()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _names(tasks: set[asyncio.Task[Any]]) -> str:
    return ", ".join(sorted(f"{task.get_name()} ({task.get_coro()!r:.100})" for task in tasks))
