"""What the trainer waits for around the end of an epoch: whether a step stays for the round, and the end itself.

A batch that the epoch does not need is computed while all others wait for it: with one batch per epoch every epoch
would take twice as long. So a trainer that has reported its samples stays for a moment when, by their rates, the others
will have done the rest before it would be half through with another batch (`LastMoment`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from swarmcli.network.tasks import TaskOwner
from swarmcli.optim.progress.progress import LocalTrainingProgress, seconds_until

if TYPE_CHECKING:
    from swarmcli.clock import Clock
    from swarmcli.optim.progress.tracker import ProgressTrackerCore

HALF = 0.5  # of a batch
LAST_CALL = 1.5  # seconds to wait for a round that should begin, by what the others reported
MOST_EPOCHS = 64  # that pass at most until reports are believed again
Resume: TypeAlias = Callable[[], None]


class LastCall:
    """Reports are claims. Each time in a row that no round followed from them, they are believed more seldom.

    So a peer that always reports enough costs the others a wait in one epoch of `MOST_EPOCHS`, and no more.
    """

    def __init__(self) -> None:
        self._in_vain = 0  # waits in a row
        self._next_epoch = 0  # from which on to wait again

    def is_worth_it(self, epoch: int) -> bool:
        """Whether to wait, in this epoch, for a round that should begin."""
        return epoch >= self._next_epoch

    def was_answered(self, epoch: int, begun: bool) -> None:
        """That wait is over; whether the round began. If not, none follows in the same epoch."""
        if begun:
            self._in_vain = 0
            return
        self._next_epoch = epoch + min(2**self._in_vain, MOST_EPOCHS)
        self._in_vain += 1


class LastMoment:
    """How long a step waits, and for which of two reasons: the reports suffice, or they soon should."""

    def __init__(self, tracker: ProgressTrackerCore, clock: Clock) -> None:
        self._tracker = tracker
        self._clock = clock
        self._began = clock.now()
        self._mates: frozenset[bytes] = frozenset()
        self._reported, self._expected = LastCall(), LastCall()
        self._asked = self._reported  # for the wait under way

    def begin_epoch(self, mates: Iterable[bytes] = ()) -> None:
        """`mates` took part in the round before, so they begin at the same moment."""
        self._began, self._mates = self._clock.now(), frozenset(mates)

    def patience(self, batch_size: int) -> float:
        """Seconds for which a step that has just reported its samples waits for the round to begin; 0: not at all."""
        if self._tracker.accumulated_enough_samples:
            self._asked, seconds = self._reported, LAST_CALL
        else:
            self._asked, seconds = self._expected, self._short_of_a_batch(batch_size)
        return seconds if self._asked.is_worth_it(self._epoch) else 0.0

    def was_answered(self, begun: bool) -> None:
        """The wait is over; whether the round began."""
        self._asked.was_answered(self._epoch, begun)

    @property
    def _epoch(self) -> int:
        return self._tracker.local_progress.epoch

    def _short_of_a_batch(self, batch_size: int) -> float:
        tracker = self._tracker
        rate = tracker.performance_ema.samples_per_second
        batch = batch_size / rate if rate > 0 else 0.0
        left = seconds_left_to_others(
            [self._as_of_this_epoch(report) for report in tracker.reports],
            tracker.local_progress,
            tracker.target_batch_size,
            self._clock.now(),
        )
        return min(batch, left + LAST_CALL) if left < HALF * batch else 0.0

    def _as_of_this_epoch(self, report: LocalTrainingProgress) -> LocalTrainingProgress:
        """A mate's report of an earlier epoch was read before it began with this one, or has not been read anew."""
        if report.epoch >= self._epoch or report.peer_id not in self._mates:
            return report
        return report.model_copy(update={"epoch": self._epoch, "samples_accumulated": 0, "time": self._began})


def seconds_left_to_others(
    others: Iterable[LocalTrainingProgress], local: LocalTrainingProgress, target: int, now: float
) -> float:
    """After how many seconds the others at this epoch will have done, by their rates, what it still lacks; infinite if
    no one else computes. `now` is swarm time."""
    samples, rate = float(local.samples_accumulated), 0.0
    for report in others:
        if report.epoch == local.epoch:
            rate += report.samples_per_second
            samples += report.samples_accumulated + max(0.0, now - report.time) * report.samples_per_second
    return seconds_until(target - samples, rate) if rate > 0 else math.inf


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
