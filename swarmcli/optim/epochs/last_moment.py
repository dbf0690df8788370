"""Whether a step near the end of an epoch waits for the round, or lets the trainer compute another batch.

A batch that the epoch does not need is computed while all others wait for it: with one batch per epoch every epoch
would take twice as long. So a trainer that has reported its samples stays for a moment when, by their rates, the others
will have done the rest before it would be half through with another batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from swarmcli.optim.epochs.epoch_end import LAST_CALL
from swarmcli.optim.progress.last_call import LastCall
from swarmcli.optim.progress.progress import LocalTrainingProgress, seconds_until

if TYPE_CHECKING:
    from swarmcli.clock import Clock
    from swarmcli.optim.progress.tracker import ProgressTrackerCore

HALF = 0.5  # of a batch


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
