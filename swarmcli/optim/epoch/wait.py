"""When an epoch is over, and what the trainer waits for around that: the round, and the end itself.

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
from swarmcli.optim.peers.board import LocalTrainingProgress
from swarmcli.optim.peers.progress import seconds_until

if TYPE_CHECKING:
    from swarmcli.clock import Clock
    from swarmcli.optim.peers.progress import ProgressTrackerCore
    from swarmcli.optim.state.lineage import LineagePosition

HALF = 0.5  # of a batch
CALM = 30.0  # seconds without more peers than one group may hold, after which one group ends the epochs again
LEFT_BEHIND = 1.0  # seconds for which a peer looks for others that are left over, once the rest has gone on
LAST_CALL = 1.5  # seconds to wait for a round that should begin, by what the others reported
MOST_EPOCHS = 64  # that pass at most until reports are believed again
Resume: TypeAlias = Callable[[], None]


class EpochRule:
    """When an epoch is over for one peer. `samples` are its own, towards the next round.

    Here all peers of a lineage average with each other, so the leader of their group knows what all of them have.
    """

    def __init__(self, target_batch_size: int) -> None:
        self.target = target_batch_size

    @property
    def several(self) -> bool:
        """Whether, as far as this peer can tell, several groups end the epoch."""
        return False

    def told(self, samples: int) -> float:
        """What the leader of the group hears; it begins the round when its members' sum reaches the target."""
        return samples

    def suffices(self, samples: int) -> bool:
        """Whether this peer may end the epoch although no round begins."""
        return samples >= self.target

    def excuses(self, own: LineagePosition, leading: LineagePosition) -> bool:
        """Whether this peer may stay on its way although another position leads."""
        return False


class CrowdedEpochRule(EpochRule):
    """The rule where one group holds at most so many peers (`target_group_size`).

    While all fit into one group, it is the rule of one group. With more peers the progress reports say when the epoch
    is over, and several groups end it, one after the other, within moments. A peer for which no group has room steps
    with its own gradients when nobody has come for `patience` seconds; the averaging of states brings it back.

    The number of peers changes while a run goes on, and each peer goes by its own count until a round begins. Where
    counts differ that costs moments: a leader that sums up samples also begins when a member says that the reports
    suffice. What the round means for the lineage its members decide together (`are_several`). Where two groups decide
    differently, their lineages part, and the rule for lineages brings them together again.
    """

    def __init__(self, tracker: ProgressTrackerCore, size: int, count: Callable[[], int], patience: float) -> None:
        """`count` gives the peers that are there, this one too."""
        super().__init__(tracker.target_batch_size)
        self._tracker = tracker
        self._size = size
        self._count = count
        self._patience = patience
        self._crowded_at = -math.inf  # loop time; when there were last more than fit into one group
        self._over: tuple[int, float] | None = None  # which epoch has been seen to be over, and since when (loop time)

    @property
    def several(self) -> bool:
        """It takes a download by everyone to be one group again, so a peer that comes and goes must not cause it."""
        if self._count() > self._size:
            self._crowded_at = _now()
        return _now() - self._crowded_at < CALM

    def told(self, samples: int) -> float:
        if not self.several:
            return super().told(samples)
        return self.target if self._is_over() else 0.0

    def suffices(self, samples: int) -> bool:
        if not self.several:
            return super().suffices(samples)
        if not self._is_over() or self._over is None:
            return False
        epoch, since = self._over
        patience = min(LEFT_BEHIND, self._patience) if self._tracker.global_epoch > epoch else self._patience
        return _now() - since >= patience

    def excuses(self, own: LineagePosition, leading: LineagePosition) -> bool:
        """Another group has ended this epoch a moment earlier."""
        return self.several and leading == own.by_epoch(self.target)

    def _is_over(self) -> bool:
        epoch = self._tracker.local_progress.epoch
        if self._over is not None and self._over[0] == epoch:
            return True
        if self._tracker.accumulated_enough_samples or self._tracker.global_epoch > epoch:
            self._over = epoch, _now()
            return True
        return False


class Backoff:
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
        self._reported, self._expected = Backoff(), Backoff()
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


def _now() -> float:
    return asyncio.get_running_loop().time()
