"""An owner of tasks, of lasting work and of subscriptions to events: `close` ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

from swarmcli.events import Event, Events, Noticed
from swarmcli.words import printable

AFTER_A_FAULT = 5.0  # seconds: a step that fails at once, always, must not take the whole processor


class TaskOwner:
    """Keeps every task that it starts until the task has ended, and sees its error.

    Unlike an asyncio.TaskGroup, it survives a task that fails (one handler's fault must not end the others): the error
    goes to the loop's exception handler. Tasks are cancelled in the order in which they were started.
    """

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._unsubscribe: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def keep(self, events: Events, *steps: Callable[[], Awaitable[None]]) -> None:
        """Runs each of these steps again and again, see `keep`."""
        for step in steps:
            self.spawn(keep(step, events))

    def hear(self, events: Events, listener: Callable[[Event], None]) -> None:
        """Subscribes a listener until `close`."""
        self._unsubscribe.append(events.subscribe(listener))

    async def join(self) -> None:
        """Waits until no task is left, those included that are started meanwhile. Cancels nothing."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Ends the subscriptions, then cancels and awaits all tasks, even those that others start while they end."""
        while self._unsubscribe:
            self._unsubscribe.pop()()
        own = asyncio.current_task()
        while others := [task for task in self._tasks if task is not own]:
            for task in others:
                task.cancel()
            await asyncio.wait(others)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "a task of the network failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)


async def keep(step: Callable[[], Awaitable[None]], events: Events) -> NoReturn:
    """Runs `step` again and again until it is cancelled; a step may be a loop that never ends. Tells of an unexpected
    error (`tell_fault`), pauses, and goes on: otherwise one fault would end lasting work for good."""
    told, name = "", getattr(step, "__qualname__", "a step")
    asyncio.current_task().set_name(name)  # type: ignore[union-attr]
    while True:
        try:
            await step()
        except Exception as error:
            told = tell_fault(name, error, events, told)
            await asyncio.sleep(AFTER_A_FAULT)


def tell_fault(what: str, error: Exception, events: Events | None = None, told: str = "") -> str:
    """Tells of an unexpected error in work that goes on: the loop's exception handler logs it, and an event tells
    people, unless its words are those that were `told` last. Returns the words."""
    words = printable(f"a fault of this program in {what}, which goes on: {type(error).__name__}: {error}", 500)
    asyncio.get_running_loop().call_exception_handler({"message": words, "exception": error})
    if events is not None and words != told:
        events.emit(Noticed("error", words))
    return words
