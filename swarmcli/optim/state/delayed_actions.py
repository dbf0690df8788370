"""A thread in which actions run one after the other while their caller goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any


class DelayedActions:
    """Runs what is submitted, in order. Results and errors wait until they are collected."""

    def __init__(self, name: str) -> None:
        """`name` is the thread's; it begins with the first action."""
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[Any]] = []

    def submit(self, action: Callable[[], Any]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._pending.append(self._pool.submit(action))

    @property
    def are_pending(self) -> bool:
        """Whether there is anything to collect, now or later."""
        return bool(self._pending)

    @property
    def are_done(self) -> bool:
        return all(future.done() for future in self._pending)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for all that was submitted; whether it is done after so many seconds."""
        return not wait(self._pending, timeout).not_done

    def collect(self) -> list[Any]:
        """What the actions returned, once they are done. The first error of any is raised."""
        pending, self._pending = self._pending, []
        wait(pending)
        return [future.result() for future in pending]

    def close(self) -> None:
        """Waits for the action under way and drops the others. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
