"""When an epoch is over, how long a step waits for that, and how it ends: with a round, or by this peer alone.

If a trainer computes a batch that the epoch does not need, all others wait for it: with one batch per epoch every epoch
would take twice as long. So a trainer that has reported its samples waits for a moment if, by their rates, the others
do the rest before it would be half through with another batch (`LastMoment`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from swarmcli.averaging import RoundResult
from swarmcli.averaging.round.result import Outcome
from swarmcli.backoff import Backoff
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.events import Noticed
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.config import PeerContext
from swarmcli.optim.epoch.group import PreformedGroup
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.modes.base import Advanced, Timing
from swarmcli.optim.modes.gradients import GradientWork
from swarmcli.optim.peers.progress import ProgressTrackerCore
from swarmcli.optim.peers.report import PeerMetrics
from swarmcli.optim.peers.survey import Survey
from swarmcli.optim.state.lineage import solitary_round_id

if TYPE_CHECKING:
    from swarmcli.optim.epoch.keeper import StateKeeper

# How long a step waits for the end of an epoch
LOOK_AROUND = 1.0  # seconds between looks whether anybody is left to wait for
LAST_CALL = 1.5  # seconds to wait for a round that, as the others reported, should begin
OF_A_BATCH = 0.5  # of another batch: if the others do the rest in less time than that takes, this peer waits for them
MOST_EPOCHS = 64  # after which reports are believed again at the latest


class LastMoment:
    """How long a step that has just reported its samples waits for the round to begin.

    Reports are claims. Each time in a row that no round follows from them, this peer believes them more seldom: so a
    peer that always reports enough costs the others no more than a wait in one of MOST_EPOCHS epochs.
    """

    def __init__(self, tracker: ProgressTrackerCore) -> None:
        self._tracker = tracker
        self._in_vain = Backoff[None](first=1, longest=MOST_EPOCHS)  # epochs without a wait

    def patience(self, batch_size: int) -> float:
        """Seconds to wait, at most those of another batch; 0: none."""
        rate, left = self._tracker.performance_ema.samples_per_second, self._tracker.seconds_to_round
        batch = batch_size / rate if rate > 0 else 0.0
        waits = left < OF_A_BATCH * batch and not self._in_vain.rests(None, self._tracker.local_progress.epoch)
        return min(batch, left + LAST_CALL) if waits else 0.0

    def was_answered(self, begun: bool) -> None:
        """The wait is over, and the round has `begun` or not. If not, no wait follows in the same epoch."""
        if begun:
            self._in_vain.clear()
        else:
            self._in_vain.add(None, self._tracker.local_progress.epoch)


class EpochEnd:
    """Ends one epoch after the other: with a round, the step with its average, and what is due for the states.

    Once begun, an end goes on even if the trainer stops waiting for it. The trainer may compute when the mode's timing
    says so, at the latest when the end is over.
    """

    def __init__(
        self,
        peer: PeerContext,
        work: GradientWork,
        keeper: StateKeeper,
        group: PreformedGroup,
        survey: Survey,
        metrics: PeerMetrics,
    ) -> None:
        self._task: asyncio.Task[None] | None = None  # until somebody has waited for its end
        self._released = asyncio.Event()
        self.abandoned = False  # the trainer was interrupted while it waited: its parameters may be old, new, or mixed
        self._own_id, self._config, self._events = peer.node.peer_id, peer.config, peer.events
        self._timing, self._rule = keeper.mode.timing, keeper.rule
        self._work, self._replica, self._keeper = work, work.replica, keeper
        self._group, self._survey, self._metrics = group, survey, metrics
        self._claims, self._directory = survey.claims, survey.directory
        self._frozen: Weighed | None = None
        self._starts = True  # until this peer has ended an epoch
        self._share = 1.0  # this peer's part of the last round's samples; 1 before its first round
        self._said_alone = False  # since its last round with others

    @property
    def under_way(self) -> bool:
        """Whether an end goes on, or has raised an error that nobody has got yet."""
        return self._task is not None

    def begin(self, tasks: TaskOwner, work: Coroutine[Any, Any, None]) -> None:
        """Begins an end. `work` calls `run`, and acts on the outcome."""
        self._released.clear()
        self._task = tasks.spawn(work)
        # A callback, since a task that is cancelled before its first step runs no `finally` of its own.
        self._task.add_done_callback(lambda _: self._released.set())

    async def may_compute(self) -> None:
        """Returns when the trainer may go on: at once if no end is under way. Raises what an end that is over
        raised."""
        if self._task is not None:
            try:
                await self._released.wait()
            except asyncio.CancelledError:
                self.abandoned = True
                raise
            if self._task is not None and self._task.done():
                await self.over()

    async def over(self) -> None:
        """Returns when no end is under way. What an end raised is raised here, once."""
        task, self.abandoned = self._task, False
        if task is not None:
            try:
                await asyncio.shield(task)
            finally:
                self._task = None if task.done() else task

    @property
    def has_enough(self) -> bool:
        """Whether this peer may end the epoch by itself, see `EpochRule.suffices`."""
        samples = self._work.samples if self._frozen is None else self._frozen.samples
        return self._rule.suffices(samples)

    @property
    def is_ahead(self) -> bool:
        """While an end is under way: whether the next epoch seems to be over too, since this peer has accumulated as
        large a part of it as it had in the last round."""
        return self._work.samples >= self._share * self._config.target_batch_size

    async def run(self, hopeless: Callable[[], bool] = lambda: False) -> Advanced | None:
        """Tries until a round commits, or waiting longer would only cost time. `hopeless`: whether this peer is to wait
        for no other round after one that failed.

        Returns None if no round committed: what was accumulated stays for the next one.
        """
        began = loop_time()
        try:
            committed = await self._average(began, hopeless)
            return None if committed is None else await self._advance(committed, began)
        finally:
            self._frozen = None
            await self._work.restore()

    async def _average(self, began: float, hopeless: Callable[[], bool]) -> RoundResult | None:
        """Returns the committed round; None: there is none."""
        deadline = began + self._config.matchmaking_time
        while True:
            outcome = await self._attempt(began)
            if isinstance(outcome, RoundResult):
                return outcome
            if isinstance(outcome, RoundUndecided):
                await self._work.set_aside()
                return None
            if self._group.undecided or (outcome is not None and hopeless()):
                return None
            if outcome is not None:  # it failed: the group forms again, and has longer for that
                deadline = began + self._config.averaging_timeout
            patience = LOOK_AROUND if self.has_enough else LAST_CALL
            begun = await self._group.wait_until_begun(patience)
            if loop_time() >= deadline:
                break
            if not (begun or self.has_enough):
                return None
        if not (self._config.proceed_alone and self.has_enough):
            return None
        text = f"no round came about within {loop_time() - began:.0f} s: this peer steps with its own gradients alone"
        self._warn(text)
        outcome = await self._average_alone()
        return outcome if isinstance(outcome, RoundResult) else None

    async def _attempt(self, began: float) -> Outcome | None:
        """A round with the others if it has begun, or alone if nobody else is there; None: neither."""
        if self._group.begun:
            outcome = await self._average_together()
        elif self.has_enough and await self._is_alone(patient=loop_time() - began < self._config.matchmaking_time / 2):
            if await self._helpers_begin():
                outcome = await self._average_together()
            else:
                self._mention_the_unreachable()
                outcome = await self._average_alone()
        else:
            return None
        if not isinstance(outcome, RoundResult):
            undecided = isinstance(outcome, RoundUndecided)
            self._metrics.note_outcome("undecided" if undecided else "failed", str(outcome))
            # If all others have left in good order, this is no cause for a warning.
            if any(self._directory.is_there(peer) for peer in self._claims.holders()):
                then = self._work.if_undecided if undecided else "this peer's samples wait for the next round"
                left = f"; {then}" if self._frozen is not None and self._frozen.samples else ""
                self._warn(f"the round at epoch {self._replica.position.epoch} gave no result: {outcome}{left}")
            self._directory.announce()
        return outcome

    async def _is_alone(self, patient: bool) -> bool:
        """Whether nobody is left to wait for. A quick peer must not run away from peers that get the last round's
        average a moment later, or were started with it. `patient`: it still waits for peers that are behind."""
        if self._rule.several:
            return True
        looking = self._survey.surroundings(self._replica.position, starts=self._starts)
        surroundings = await self._group.unless_begun(looking)
        if surroundings == "behind":
            self._group.undecided = "another lineage leads"
        return surroundings == "alone" or (surroundings == "followed" and not patient)

    async def _helpers_begin(self) -> bool:
        """Whether the round begins with auxiliaries alone. An auxiliary that leads hears of this peer's samples a
        moment later: if this peer had stepped by itself by then, the round would fail there."""
        reports = [self._directory.others.get(peer) for peer in self._work.averager.finder.company]
        helped = any(report is not None and report.role == "auxiliary" for report in reports)
        return self._group.begun or (helped and await self._group.wait_until_begun(LOOK_AROUND))

    async def _average_together(self) -> Outcome:
        handed = await self._freeze()
        outcome = await self._group.contribute(handed)
        if isinstance(outcome, RoundResult):
            self._said_alone = self._said_alone and len(outcome.members) <= 1  # auxiliaries are no members
            self._metrics.note_outcome("committed", outcome.left_out.get(self._own_id, ""))
        return outcome

    async def _average_alone(self) -> Outcome:
        """Takes what this peer has as the swarm's average: nobody else can be reached."""
        handed = await self._freeze()
        if not (handed.samples and self.has_enough):
            return RoundFailed("this peer has no samples any more")
        await self._group.close()
        self._metrics.note_outcome("alone")
        await self._work.average_alone()
        round_id = solitary_round_id(self._own_id, self._replica.position.lineage)
        return RoundResult(
            round_id=round_id,
            weights={self._own_id: handed.weight},
            samples={self._own_id: float(handed.samples)},
            several=self._rule.several,
        )

    def _mention_the_unreachable(self) -> None:
        """Warns if this peer steps alone though others report: otherwise two peers that cannot dial each other would
        train apart, and nobody would know."""
        others = sum(not self._directory.is_away(peer) for peer in self._claims.credible())
        if others and not (self._said_alone or self._rule.several):
            self._said_alone = True
            self._warn(
                "this peer steps by itself: "
                + ("another peer has" if others == 1 else f"{others} other peers have")
                + " reported lately, but cannot be averaged with now. They may be starting, or gone; if it stays so, "
                "neither side can dial the other, and an auxiliary or a monitor that both can dial brings them together"
            )

    def _warn(self, text: str) -> None:
        self._events.emit(Noticed("warning", text))

    async def _freeze(self) -> Weighed:
        """Fixes this peer's gradients: they stay the same over all attempts. If steps are delayed, the trainer goes on,
        with the parameters of the last epoch, from here on or once these gradients are averaged."""
        first = self._frozen is None
        if first:
            await self._replica.check()
        self._frozen = await self._work.freeze()
        if first and self._timing is not Timing.AT_ONCE:
            await self._replica.publish()
        if self._timing is Timing.DELAYED_AVERAGING:
            self._released.set()
        return self._frozen

    async def _advance(self, committed: RoundResult, began: float) -> Advanced:
        """Steps with the average; from here on this peer is at the next epoch."""
        if self._timing is not Timing.AT_ONCE:
            self._released.set()
        self._starts, weighed = False, self._frozen or Weighed()
        handed = weighed.samples
        counted = committed.samples.get(self._own_id, 0.0) > 0
        if handed and counted and committed.total_samples:  # a sum of small shares rounds to 0
            self._share = handed / committed.total_samples
        lost = 0
        if handed and (not counted or self._own_id in committed.left_out):  # nobody hands in again what is lost
            lost = handed - min(handed, round(committed.samples.get(self._own_id, 0.0)))
            reason = committed.left_out.get(self._own_id, "not named among the contributors")
            self._warn(f"{lost} samples of this peer are not in the average: {reason}")
        norms = await self._work.advance(committed)
        await self._keeper.after_epoch(committed, weighed.weight)
        if self._timing is Timing.AT_ONCE:
            await self._replica.publish()
        await self._group.close()
        return Advanced(committed, handed - lost, loop_time() - began, norms)
