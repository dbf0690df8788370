"""OptimizerCore: the collaborative optimizer on the event loop.

An epoch, as `step` tells it: a peer adds up gradients and tells its count of samples to the leader of its group, which
forms while the epoch is computed. When the swarm has enough samples, the leader begins the round, and each member
freezes the mean of its gradients, weighted by its samples. All step with the average, and are at the next epoch of the
next lineage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from swarmcli.concurrency import beside
from swarmcli.network.loop_thread import loop_time
from swarmcli.optim.config import IDLE_WAIT, PeerContext
from swarmcli.optim.epoch.end import LOOK_AROUND, EpochEnd, LastMoment
from swarmcli.optim.epoch.group import EpochRule, PreformedGroup
from swarmcli.optim.epoch.keeper import StateKeeper
from swarmcli.optim.modes.base import Timing, Trained, tell_lost
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.participant import Participant
from swarmcli.optim.peers.catch_up import STRANDED_AFTER, CatchUp
from swarmcli.optim.peers.exchange import StateExchange
from swarmcli.optim.peers.frozen_exchange import FrozenExchange
from swarmcli.optim.peers.proof import Saved
from swarmcli.optim.peers.report import PeerReport, credited
from swarmcli.optim.run_seat import RunSeat
from swarmcli.optim.state.frozen import TERM
from swarmcli.optim.state.lineage import Claim, LineagePosition
from swarmcli.optim.succession import Succession


class OptimizerCore(Participant):
    """One trainer or follower of a run.

    If every peer is honest and in step, training equals one process that steps with the whole batch. A peer whose
    lineage another one beats downloads that one's state and starts over. The optimizer gets the averaged gradients; the
    user's own gradients stay as they were.
    """

    def __init__(self, peer: PeerContext, trained: Trained, mode: Mode | None = None) -> None:
        super().__init__(peer, mode)
        config = self.config
        self.phase = "joining"
        self.work = self.mode.build(peer, trained)
        self.replica = self.work.replica
        averager = self.work.averager
        size = self.mode.target_group_size
        self._rule = EpochRule(self.tracker, size, self.directory.at_work, config.matchmaking_time)
        self._keeper = keeper = StateKeeper(peer, self.mode, self.replica, self._rule, self.directory)
        self._averagers = averager, keeper.averaging
        self._group = PreformedGroup(averager, config, self._tasks, self.tracker)
        self.exchange = StateExchange(self.replica, self.mode, self.claims, averager.at_rest)
        timeout = config.load_state_timeout
        self.frozen = FrozenExchange(trained.frozen, self.replica, self.claims, timeout, averager.at_rest)
        self.catch_up = CatchUp(peer, self.work, self.survey, self.exchange)
        self.seat = RunSeat(self, self._group, self.catch_up, self.exchange, self.replica)
        self.succession = Succession(self)
        self._end = EpochEnd(peer, self.work, keeper, self._group, self.survey, self.metrics)
        self._last_seen = self.position  # at the end of the last `step`
        self._last_moment = LastMoment(self.tracker)
        self.global_steps = 0  # steps with an average that holds gradients of this peer

    @property
    def position(self) -> LineagePosition:
        return self.replica.position

    async def start(self, *, reports: bool = True) -> None:
        """Makes this peer known. It decides which lineage to train on when it first joins or steps."""
        self.exchange.donor.start()
        self.frozen.start()
        await super().start(reports=reports)
        self._tasks.spawn(self.catch_up.hear(set()))  # it may be minutes until this peer joins

    async def shutdown(self) -> None:
        await super().shutdown()
        self.exchange.donor.close()
        self.frozen.close()

    # the story of an epoch

    async def step(self, batch_size: int, scale: float | None = None, weight: float | None = None) -> bool:
        """Takes in the parameters' gradients, means over `batch_size` samples; ends the epoch when it is time. Returns
        whether this peer is at another position than after the last `step`.

        `weight`: of these gradients in the average, if that is not the number of samples. `scale`: the losses were
        multiplied by it; see GradientWork.accumulate for overflows.

        A step that only accumulates waits for nobody. With `batch_size=0` nothing is accumulated: the peer waits at
        most `IDLE_WAIT` for the epoch's end and takes part in it with what it has, a follower with nothing. If another
        lineage leads, this peer downloads its state and drops the gradients, whose parameters are gone. If a round
        fails, what was accumulated stays for the next one. Cancelling the call does not cancel the end of an epoch
        that is under way. While this peer pauses, see `pause`.
        """
        if not self._end.under_way:  # otherwise the scheduler may be at work, and the end checks the rates itself
            self.replica.state.check_rates()
        try:
            if not self.is_averaging and self.seat.spoils_rounds() and (batch_size or self.work.samples):
                await self.work.drop()  # no round takes it, and it would be minutes old
                self._report_samples()
                batch_size = 0
            if self.pausing.is_asked and (batch_size or not await self._has_to_hand_in()):
                if not batch_size:
                    await self._rest()
                elif not await self._replaced_meanwhile():
                    await self._take_in(batch_size, scale, weight)
                return self.position != self._last_seen
            if await self._replaced_meanwhile() or (not self._end.under_way and await self._join()):
                tell_lost(self.node.endpoint.events, batch_size)
                return True
            if batch_size:
                await self._take_in(batch_size, scale, weight)
            averaging = self._keeper.averaging
            changed = not self._end.under_way and averaging.under_way and await averaging.apply()
            if changed and self.mode.timing is Timing.AT_ONCE:
                await self.replica.publish()
            if await self._epoch_is_over(batch_size):
                self._end.begin(self._tasks, self._end_epoch())
                await self._end.may_compute()
                if self._end.under_way:  # the end goes on, but from here on this peer computes
                    self.tracker.performance_ema.resume(loop_time())
            return self.position != self._last_seen
        finally:
            self._last_seen = self.position

    async def join(self) -> bool:
        """Brings this peer to the lineage that leads. Returns whether its state changed for that.

        It is cheap if nothing tells that another lineage leads, or if a round has begun: the next step ends that, and
        looks then. Raises StateDownloadError if a newcomer gets no state, and FingerprintError, which names the keys,
        if the others refuse this peer. Without effect while this peer pauses; a pause that is asked for meanwhile ends
        it.
        """
        if self.pausing.is_asked:
            return False
        await self._end.over()
        changed = await self._join()
        self._last_seen = self.position
        if not self.metrics.samples:
            self.metrics.begin()  # whoever joins before its first batch computes from here on
        return changed

    async def _join(self) -> bool:
        if self.frozen.looks or not self.catch_up.settled:
            self.frozen.compare(settled=self.catch_up.settled)
        reason = self.reason_to_look()
        changed = False
        if reason:
            await self._group.close()
            changed, in_step = await self._look_around(reason)
            if not in_step:
                return changed
            await self._keeper.look()
        self._group.open(self.position, self._keeper.gathered, self.catch_up.asked_at if reason else None)
        self._group.report(self._rule.told(self.work.samples))
        return changed

    async def _look_around(self, reason: str) -> tuple[bool, bool]:
        """Brings this peer to the lineage that leads. Returns whether its state changed for that, and whether it is in
        step: not if it was asked to pause meanwhile."""
        began, before, generation = loop_time(), self.position, self.replica.generation
        lacked = not self.frozen.frozen.held
        found = await self.pausing.unless_asked(self._come_into_step(reason))
        changed = self.position != before or self.replica.generation != generation or lacked
        waited = loop_time() - began
        self.metrics.leave_out(waited)
        if waited > STRANDED_AFTER:  # it computed nothing meanwhile
            self.tracker.performance_ema.resume(loop_time())
        if found is not None:
            self.metrics.leave_out(max(0.0, self.pausing.come_back() - waited))
            follows = self.config.description.role == "monitor" or self.seat.lost is not None
            self.phase = "following" if follows else "training"
            self.directory.announce()
        if changed:
            if self.exchange.speed:
                self.seat.note_catching_up(self.exchange.speed)
            self._keeper.drop()
            self.metrics.forget_losses()  # they are of other parameters
            self._begin_epoch()
            self.metrics.end_epoch(self.position, rate=self.seat.rate)
            self.directory.announce(anew=True)
        return changed, found is not None

    async def _come_into_step(self, reason: str) -> bool:
        if not self.frozen.frozen.held:
            await self.frozen.obtain(lambda: self.catch_up.gives_up is not None and self.catch_up.gives_up())
            await self.work.start_over()
        async with beside(self.seat.watch_line()):
            return await self.catch_up.run(reason, returns=self.pausing.away)

    # pausing

    def resume(self) -> None:
        super().resume()
        self.tracker.rest(self.seat.lost is not None)

    @property
    def has_handed_in(self) -> bool:
        """Whether nothing that this peer computed before its pause is on its way to a round, or could be soon."""
        if self._end.under_way or self._group.begun:
            return False
        # In its first seconds a peer has read no reports yet, and knows the others only by the rounds that it was in.
        mates = filter(self.node.endpoint.is_connected, self.work.averager.finder.memory.last_members)
        return self.pausing.away or not self.directory.anyone_computes([*self._group.members, *mates])

    async def _has_to_hand_in(self) -> bool:
        """Whether this peer, which pauses, still has to bring samples to the end of the epoch, where a round can use
        them."""
        await self._end.over()  # with delayed ends each step would find another one under way
        if self._group.begun:
            return True  # the others wait for it
        if self.pausing.away or not self.work.samples or not self.catch_up.settled:
            return False
        if not self.reason_to_look():
            return True
        # This peer downloads nothing while it pauses: if the run has gone elsewhere, that waits until it is back.
        answers = await self.survey.survey()
        return await self.claims.decide(Claim(self.position), answers) == self.position

    async def _settle(self) -> None:
        # With local updates what this peer has learned is in its state: others get it by the average of the states.
        if self._keeper.averaging.under_way:
            await self._keeper.averaging.apply(wait=True)
        await self.replica.publish()

    @property
    def is_averaging(self) -> bool:
        """Whether an epoch is being ended."""
        return self._end.under_way or self._group.begun

    async def _take_in(self, batch_size: int, scale: float | None, weight: float | None) -> None:
        before = self.work.given_up.count
        await self.work.accumulate(batch_size, scale, weight)
        if self.work.given_up.count == before:
            self.metrics.samples += batch_size
        if not self._end.under_way:  # otherwise these samples are of an epoch that has not begun for the others
            self._report_samples()

    def _report_samples(self) -> None:
        epoch, samples = self.position.epoch, self.work.samples
        self.tracker.report_local_progress(epoch, samples)
        self._group.report(self._rule.told(samples))

    async def _epoch_is_over(self, batch_size: int) -> bool:
        """Whether the round has begun, or this peer alone has enough samples. `batch_size`: of the step that asks.
        While the end of the last epoch is under way the answer is no, unless this step has nothing to compute or this
        epoch seems to be over, too (`EpochEnd.is_ahead`)."""
        if self._end.under_way:
            if batch_size and not self._end.is_ahead:
                return False
            await self._end.over()
            if await self._join():
                return False
        if self._group.begun or self._end.has_enough:
            return True
        if not batch_size:
            began = loop_time()
            begun = await self._group.wait_until_begun(IDLE_WAIT)
            if self.config.description.role == "monitor" and not self.directory.trainers():
                self.metrics.leave_out(loop_time() - began)  # the run has not begun, or all trainers are away
            if not begun and self.pausing.is_asked:  # it stays only while somebody computes, and others may pause, too
                await self.directory.refresh()
            return begun
        if self.mode.timing is Timing.DELAYED_AVERAGING:
            return False  # the trainer computes during the round, so one batch more costs nobody time
        if patience := self._last_moment.patience(batch_size):
            self._last_moment.was_answered(await self._group.wait_until_begun(patience))
        return self._group.begun

    async def _replaced_meanwhile(self) -> bool:
        """Waits until the trainer may compute. Returns whether the parameters have changed under its last gradients: by
        the end of an epoch for which it waited here, or for which it had stopped waiting when it was interrupted."""
        before, under_it = self.position, self._end.abandoned
        if under_it:
            await self._end.over()
        await self._end.may_compute()
        replaced = self.mode.timing is Timing.AT_ONCE and self.position != before
        if replaced or (under_it and self.mode.reuse_grad_buffers):
            await self.work.drop()  # reused buffers hold those gradients already
        return replaced or under_it

    async def _end_epoch(self) -> None:
        """Ends the epoch. Once this peer has stepped, its next group begins to form, and the others hear of it."""
        with self.tracker.pause_updates() if self.mode.timing is Timing.AT_ONCE else nullcontext():
            if (advanced := await self._end.run(self.seat.spoils_rounds)) is not None:
                committed = advanced.committed
                self.claims.note_round(committed.members, committed.round_id, committed.certificate)
                self.global_steps += advanced.own_samples > 0
                self._begin_epoch()
                self._group.open(self.position, self._keeper.gathered)
                if advanced.own_samples and self.seat.note_round():
                    self.seat.tell_that_samples_count()
                seconds = self.metrics.end_epoch(self.position, advanced, self.seat.rate).seconds
                credit = credited(self.position, committed.samples, committed.reduced, seconds)
                self.node.endpoint.events.emit(credit)
                self.directory.announce()
        self._report_samples()

    def _begin_epoch(self) -> None:
        with self.tracker.pause_updates():
            self.tracker.update_epoch(self.position.epoch)
            self._report_samples()  # a trainer that did not wait has some already

    def reason_to_look(self) -> str:
        """Why this peer should find out which lineage leads; "" if it need not."""
        if not self.catch_up.settled:
            return "joining the run"
        if not self.frozen.frozen.held:
            return "its frozen weights were changed"
        if self.pausing.away:
            return "this peer has paused"
        if self._group.begun:
            return ""  # the others wait for this peer's gradients
        if self._keeper.strayed:
            return "its parameters had drifted away from the others'"
        if self._group.undecided:
            return self._group.undecided
        leading = self.claims.leading(Claim(self.position))
        behind = leading != self.position and not self._rule.excuses(self.position, leading)
        return "another lineage leads" if behind else ""

    # what others see, and get

    def report(self, **more: Any) -> PeerReport:
        phase = self.phase
        # A trainer that no longer called `step` when a round began is nobody to wait for once that round is over: it
        # reports that it is joining, until it steps again and finds out where the run is.
        lost = phase == "training" and self._group.is_overdue(self.config.averaging_timeout)
        if lost or self.replica.state.torn:
            phase = "joining"
        if self.catch_up.stranded:
            phase = "stranded"
        return super().report(
            phase=phase,
            samples_per_second=self.seat.rate,
            sending=self.seat.sending if self.config.description.role == "trainer" else 0.0,
            limited=self.seat.limited,
            drift=self._keeper.monitor.drift,
            sketch=self._keeper.monitor.told,
            keeps=self.succession.offered and not self.pausing.away,
            owners_word=self.claims.vouching.told_by_owner(self.position),
            frozen=self.frozen.frozen.told,
            **more,
        )

    async def linger(self, until_others_at: int, timeout: float) -> bool:
        """Hands out the state, without computing, until nobody who can be reached is behind the epoch
        `until_others_at`, for `timeout` seconds at most. Returns False if time was up.

        For the end of training: peers that missed the last round still get its outcome, and the model gets the last
        parameters if steps are delayed.
        """
        await self._end.over()
        await self.replica.publish()
        await self._group.close()
        self.phase = "lingering"
        self.directory.announce()
        deadline = loop_time() + timeout
        while await self.survey.anyone_behind(until_others_at):
            if loop_time() >= deadline:
                return False
            await asyncio.sleep(min(LOOK_AROUND, max(0.0, deadline - loop_time())))
        return True

    # checkpoints

    async def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state, with scheduler and position under "swarm". Parameters are not in it.

        Waits for the end of an epoch, and for an average of states, that is under way; the model then has the
        parameters that follow from them.
        """
        await self._end.over()
        await self._keeper.averaging.apply(wait=True)
        await self.replica.rest()
        saved = await self.replica.checkpoint()
        swarm = {**saved["swarm"], "standing": self.claims.saved(), TERM: self.frozen.frozen.digest}
        return {**saved, "swarm": swarm}

    async def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`; restore the model's parameters of that moment first.

        The next step joins the run anew: a run that is further leads, one that is behind follows this peer. Raises
        ValueError if the state does not belong to these parameters, or is of another optimizer; then nothing has
        changed.
        """
        await self._end.over()
        swarm = state_dict.get("swarm")
        swarm = swarm if isinstance(swarm, Mapping) else {}
        standing = Saved.read(swarm.get("standing"))
        owners = bytes.fromhex(str(swarm.get("parameters", ""))), bytes.fromhex(str(swarm.get("owner", "")))
        await self.frozen.look()  # even if this call fails, the model may hold the checkpoint's frozen weights by now
        frozen = swarm.get(TERM, self.frozen.frozen.digest)  # earlier versions did not save it
        if frozen != self.frozen.frozen.digest:
            raise ValueError(
                f"{TERM}: the checkpoint is of a model with other frozen weights than this run's: {frozen!r:.80}, not "
                f"{self.frozen.frozen.digest!r}"
            )
        await self.replica.load_checkpoint(state_dict, accepted=self._group.close)
        await self.work.drop()
        self._keeper.drop()
        self.catch_up.settled, self.phase = False, "joining"
        self._last_seen = self.position
        self._begin_epoch()
        self.directory.announce(anew=True)
        self.claims.restore(standing)
        if owners[1]:
            self.claims.vouching.owners_word = self.position, *owners
