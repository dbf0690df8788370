"""The end of an epoch while it is under way: who waits for what of it, and who learns how it went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from swarmcli.network.tasks import TaskOwner

Resume: TypeAlias = Callable[[], None]


class EndUnderWay:
    """Runs one end of an epoch at a time. Once begun it is brought to its end, whoever stops waiting for it.

    The trainer waits until it may compute on; where something is delayed the rest runs beside its next batches. An
    error of the end is raised once, to whoever next waits for it.
    """

    def __init__(self, tasks: TaskOwner) -> None:
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None
        self._may_compute = asyncio.Event()

    def __bool__(self) -> bool:
        """Whether an end is under way, or has ended and nobody has waited for that yet."""
        return self._task is not None

    def begin(self, run: Callable[[Resume], Coroutine[Any, Any, None]]) -> None:
        """Runs it in the background. It calls what it is given when the trainer may go on."""
        self._may_compute.clear()
        self._task = self._tasks.spawn(self._run(run))

    async def may_compute(self) -> None:
        """Returns when the trainer may go on; at once if nothing is under way. Raises what an end that is over did."""
        if self._task is not None:
            await self._may_compute.wait()
            if self._task.done():
                await self.over()

    async def over(self) -> None:
        """Returns when the end is over; at once if nothing is under way. Raises what it raised."""
        task = self._task
        if task is not None:
            try:
                await asyncio.shield(task)
            finally:
                self._task = None if task.done() else task

    async def _run(self, run: Callable[[Resume], Coroutine[Any, Any, None]]) -> None:
        try:
            await run(self._may_compute.set)
        finally:
            self._may_compute.set()
