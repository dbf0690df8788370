"""An owner for tasks that come and go while something lives."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class TaskOwner:
    """Keeps every task that it starts until the task has ended, and sees its error.

    Unlike an asyncio.TaskGroup it survives a task that fails (one handler's fault is not the others'): the error
    goes to the loop's exception handler. Tasks are cancelled in the order in which they were started.
    """

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    async def join(self) -> None:
        """Waits until no task is left, of those too that are started meanwhile. Cancels nothing."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Cancels and awaits all tasks, those too that others start while they end."""
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
