"""Whether a peer pauses, and how far it is with that.

working ──asked──▶ pausing ──nothing left to hand in──▶ paused ──ended──▶ returning ──in step again──▶ working
                      └────────────────────────ended────────────────────────────────────────────────────▶

A peer that pauses computes nothing. While it has samples that no round has taken, it stays in its group, so that they
count; then it withdraws, and nobody waits for it. It returns as a peer that has been away: it asks where the run is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from swarmcli.network.loop_thread import loop_time, set_within
from swarmcli.optim.peers.report import Pause

Cause = Literal["user", "link"]  # who asks for a pause: the user, or a link that is too slow to follow the run
T = TypeVar("T")


class Pausing:
    """Belongs to one event loop."""

    def __init__(self, changed: Callable[[], object]) -> None:
        """`changed` is called after each change of what others are told."""
        self._changed = changed
        self._asked_by: set[Cause] = set()
        self.away = False  # it has withdrawn, and has not found out since where the run is
        self.away_since = 0.0  # loop time
        self._ends = set[asyncio.Timeout]()  # of works that a pause ends
        self._ended = asyncio.Event()

    @property
    def is_asked(self) -> bool:
        """Whether this peer is to compute nothing."""
        return bool(self._asked_by)

    @property
    def told(self) -> Pause:
        """The word that others are told."""
        if self.away:
            return "paused" if self.is_asked else "returning"
        return "pausing" if self.is_asked else ""

    def ask(self, cause: Cause = "user") -> None:
        """From now on this peer is to compute nothing, until each cause has ended. Idempotent."""
        asked_before = self.is_asked
        self._asked_by.add(cause)
        if not asked_before:
            for end in self._ends:
                end.reschedule(loop_time())
            self._ended.clear()
            self._changed()

    def end(self, cause: Cause = "user") -> None:
        """It may go on, for this cause. Idempotent."""
        asked_before = self.is_asked
        self._asked_by.discard(cause)
        if asked_before and not self.is_asked:
            self._ended.set()
            self._changed()

    def withdraw(self) -> None:
        """It takes part in nothing any more."""
        if not self.away:
            self.away, self.away_since = True, loop_time()
            self._changed()

    def come_back(self) -> float:
        """It is in step with the run again. Returns for how many seconds it was not."""
        if not self.away:
            return 0.0
        self.away = False
        self._changed()
        return loop_time() - self.away_since

    async def wait(self, seconds: float) -> None:
        """Until the pause ends, at most so long."""
        await set_within(self._ended, seconds)

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Returns the result of `work`; None, and the work is cancelled, if a pause is asked for before it ends.

        It runs in the caller's task: in one of its own, what ends at once would give way to others all the same, who
        then read reports of a peer that is about to be in step again.
        """
        try:
            async with asyncio.timeout(0.0 if self.is_asked else None) as end:
                self._ends.add(end)
                return await work
        except TimeoutError:
            if not end.expired():
                raise
            return None
        finally:
            self._ends.discard(end)
