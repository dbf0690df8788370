"""OptimizerCore: the collaborative optimizer on the event loop.

An epoch, as `step` tells it: gradients add up; every count goes to the leader of the group that stands while the
epoch is computed; when the swarm has enough, the leader begins the round and each member hands in the mean of its
gradients, weighted by its samples; all step with the average, and are at the next epoch of the next lineage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from swarmcli.events import EpochAdvanced
from swarmcli.network.tasks import TaskOwner
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.epochs.epoch_end import LAST_CALL, LOOK_AROUND, EpochEnd
from swarmcli.optim.epochs.work import Timing
from swarmcli.optim.membership.following import LineageFollower
from swarmcli.optim.membership.ledger import Ledger
from swarmcli.optim.membership.lineage import Standing
from swarmcli.optim.membership.presence import Presence
from swarmcli.optim.membership.replaying import Replayer
from swarmcli.optim.membership.report import PeerReport, Phase, describe
from swarmcli.optim.membership.standing_group import Committed, StandingGroup
from swarmcli.optim.membership.state_exchange import StateExchange
from swarmcli.optim.modes import Modes, assemble
from swarmcli.optim.progress.last_call import LastCall
from swarmcli.optim.progress.tracker import ProgressTrackerCore
from swarmcli.optim.state.keeper import StateKeeper
from swarmcli.optim.state.residence import Residence
from swarmcli.optim.state.training_state import Scheduler

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode


class OptimizerCore:
    """One trainer or follower of a run. Its coroutines belong to one event loop; one `step` runs at a time.

    With every peer honest and in step it equals one process that steps with the whole batch. A peer whose lineage
    another one beats downloads that one's state and starts over. `optimizer` steps in place; this class gives it the
    averaged gradients and leaves the user's own as they were.
    """

    def __init__(
        self,
        node: DHTNode,
        config: OptimizerConfig,
        averager_config: AveragerConfig,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        *,
        residence: Residence | None = None,
        modes: Modes | None = None,
    ) -> None:
        """`residence` says where the model's parameters are if the optimizer's are others; `modes` how to train."""
        self.node = node
        self.config = config
        self.modes = modes or Modes()
        self.ledger = Ledger()
        self.phase: Phase = "joining"
        self.tracker = ProgressTrackerCore(
            node,
            config.run_id,
            config.target_batch_size,
            options=config.tracker,
            performance_ema_alpha=config.performance_ema_alpha,
            client_mode=config.client_mode,
            status_loglevel=logging.INFO if config.verbose else logging.DEBUG,
            latest_epoch=self._latest_epoch,
        )
        self.presence = Presence(node, config.run_id, self.report)
        self._events = events = node.endpoint.events
        self._tasks = TaskOwner()
        self.replica, self._work = assemble(
            node, config, averager_config, self.modes, optimizer, scheduler, extra_tensors, residence
        )
        averager = self._work.averager
        self._keeper = keeper = StateKeeper(node, config, averager_config, self.modes, self.replica)
        self._group = StandingGroup(
            averager, config.target_batch_size, config.fingerprint, self._tasks, lambda: keeper.gathered
        )
        self._exchange = StateExchange(
            node.endpoint, config.run_id, self.replica, averager.at_rest, self.modes.state.load_compression
        )
        replayer = Replayer(self._work, self.replica, events)
        self._lineage = LineageFollower(
            self.presence, self._exchange, replayer, lambda: self.standing, events, config.load_state_timeout
        )
        self._end = EpochEnd(
            node.peer_id,
            config,
            self.modes.timing,
            self.replica,
            self._work,
            keeper,
            self._group,
            self.presence,
            self.ledger,
            events,
            self._advanced,
        )
        self._ending: asyncio.Task[None] | None = None  # the end of an epoch; once begun it is brought to its end
        self._may_compute = asyncio.Event()  # while an epoch is being ended: the trainer need not wait any more
        self._last_seen = self.standing  # at the end of the last step
        self._last_call = LastCall()
        self.global_steps = 0  # with gradients of this peer in them

    @property
    def standing(self) -> Standing:
        """Where this peer's parameters stand."""
        return self.replica.standing

    @property
    def samples(self) -> int:
        """Taken in by this peer for its next round."""
        return self._work.samples

    @property
    def overflows(self) -> int:
        """How often this peer has given up what it had taken in, since its gradients were not finite."""
        return self._work.overflows

    async def start(self) -> None:
        """Makes this peer known. It decides which lineage to train on when it first joins or steps."""
        await self._work.averager.start()
        await self._keeper.start()
        self._exchange.start()
        await self.presence.start()
        await self.tracker.start()
        self.ledger.begin(_now())

    async def shutdown(self) -> None:
        """Leaves the group and withdraws what this peer said about itself. Idempotent; leaves no task."""
        await self._group.close()
        await self._tasks.close()
        await self._work.averager.shutdown()
        await self._keeper.shutdown()
        self._exchange.close()
        await self.tracker.shutdown()
        await self.presence.shutdown()

    # the story of an epoch

    async def step(self, batch_size: int, scale: float | None = None) -> bool:
        """Takes in the parameters' gradients, means over `batch_size` samples; ends the epoch when it is time.

        With `scale` the gradients are those of losses multiplied by it; see EpochWork.take_in for their overflow.
        Returns whether the epoch is another one than after the last step. A step that only accumulates waits for no
        one. With `batch_size=0` nothing is taken in: the peer waits (at most `idle_wait`) for the epoch's end and
        takes part in it with what it has, a follower with nothing. If another lineage leads, its state is downloaded
        and the gradients, whose parameters are gone, are dropped. A round that fails leaves what was taken in for the
        next one. Cancelling the call leaves the end of an epoch under way running.
        """
        try:
            if await self._settle_what_was_begun() or (self._ending is None and await self._join()):
                return True
            if self._ending is None and await self._keeper.apply() and self.modes.timing is Timing.AT_ONCE:
                await self.replica.publish()
            if batch_size:
                await self._take_in(batch_size, scale)
            if self._ending is not None and (batch_size == 0 or self._is_ahead):
                await self._finish_what_was_begun()
            elif self._ending is None and await self._epoch_is_over(waiting=batch_size == 0):
                await self._end_epoch()
            return self.standing != self._last_seen
        finally:
            self._last_seen = self.standing

    async def join(self) -> bool:
        """Sees to it that this peer is on the lineage that leads; returns whether its state changed for that.

        Cheap while nothing points to the contrary. Raises StateDownloadError if a newcomer gets no state, and
        FingerprintError, which names the keys, if the others refuse this peer.
        """
        await self._finish_what_was_begun()
        changed = await self._join()
        self._last_seen = self.standing
        return changed

    async def _join(self) -> bool:
        reason = self._reason_to_look()
        changed = False
        if reason:
            await self._group.close()
            self._end.left_behind = False
            changed = await self._lineage.catch_up(reason)
            self.phase = "following" if self.config.description.role == "monitor" else "training"
            if changed:
                self._keeper.drop()
                self._start_over()
            await self._keeper.look()
        self._group.open(self.standing)
        self._group.report(self._work.samples)
        return changed

    @property
    def is_averaging(self) -> bool:
        """Whether an epoch is being ended."""
        return self._ending is not None or self._group.begun

    @property
    def is_synchronized(self) -> bool:
        """Whether, by what the others last reported, no other lineage leads."""
        return not self._reason_to_look()

    async def _take_in(self, batch_size: int, scale: float | None) -> None:
        before = self.overflows
        await self._work.take_in(batch_size, scale)
        if self.overflows == before:
            self.ledger.samples += batch_size
        if self._ending is None:  # otherwise these samples are of an epoch that has not begun for the others
            self._report_samples()

    def _report_samples(self) -> None:
        self.tracker.report_local_progress(self.standing.epoch, self._work.samples)
        self._group.report(self._work.samples)

    @property
    def _is_ahead(self) -> bool:
        """Whether this peer has all samples of an epoch before the one before it has ended."""
        return self._work.samples >= self.config.target_batch_size

    async def _epoch_is_over(self, waiting: bool) -> bool:
        """Whether the round has begun, or this peer alone has enough."""
        if self._group.begun or self._end.has_enough:
            return True
        if waiting:
            return await self._group.wait_until_begun(self.config.idle_wait)
        epoch = self.standing.epoch
        if self.tracker.accumulated_enough_samples and self._last_call.is_worth_it(epoch):
            self._last_call.was_answered(epoch, await self._group.wait_until_begun(LAST_CALL))
        return self._group.begun

    async def _end_epoch(self) -> None:
        self._may_compute.clear()
        self._ending = self._tasks.spawn(self._run_end())
        await self._settle_what_was_begun()

    async def _settle_what_was_begun(self) -> bool:
        """Waits until the trainer may compute on; whether the parameters changed under its last gradients for that."""
        if self._ending is None:
            return False
        before = self.standing
        await self._may_compute.wait()
        if self._ending.done():
            await self._finish_what_was_begun()
        return self.modes.timing is Timing.AT_ONCE and self.standing != before

    async def _finish_what_was_begun(self) -> None:
        """An end of epoch outlives the call that began it: a state half stepped would be nobody's."""
        ending = self._ending
        if ending is not None:
            try:
                await asyncio.shield(ending)
            finally:
                self._ending = None if ending.done() else ending

    async def _run_end(self) -> None:
        pause = self.tracker.pause_updates() if self.modes.timing is Timing.AT_ONCE else nullcontext()
        try:
            with pause:
                await self._end.run(self._may_compute.set)
            self._report_samples()
        finally:
            self._may_compute.set()

    def _advanced(self, committed: Committed, own_samples: int, seconds: float) -> None:
        self.global_steps += own_samples > 0
        self._begin_epoch()
        self._group.open(self.standing)
        self._tell_epoch(committed.samples, own_samples, len(committed.contributors), averaging_seconds=seconds)

    def _start_over(self) -> None:
        """The parameters are others than those that the gradients belong to."""
        self.ledger.forget_losses()
        self._begin_epoch()
        self._tell_epoch(samples=0, own_samples=0, peers=0, averaging_seconds=0.0)

    def _begin_epoch(self) -> None:
        with self.tracker.pause_updates():
            self.tracker.update_epoch(self.standing.epoch)

    def _tell_epoch(self, samples: int, own_samples: int, peers: int, averaging_seconds: float) -> None:
        loss, seconds = self.ledger.end_epoch(_now(), self.replica.standing.epoch)
        self.presence.announce()
        self._events.emit(
            EpochAdvanced(
                epoch=self.standing.epoch,
                lineage=self.standing.lineage.hex(),
                samples=samples,
                own_samples=own_samples,
                peers=peers,
                loss=loss,
                seconds=seconds,
                averaging_seconds=averaging_seconds,
            )
        )

    def _latest_epoch(self) -> int:
        """Of those who train: what progress reports say beyond it leads nobody on."""
        epochs = (claim.standing.epoch for claim in self.presence.claims() if claim.settled)
        return max(epochs, default=self.standing.epoch)

    def _reason_to_look(self) -> str:
        """Why this peer should find out which lineage leads; empty if it need not."""
        if not self._lineage.settled:
            return "joining the run"
        if self._group.begun:
            return ""  # the others wait for this peer's gradients
        if self._group.undecided:
            return f"the outcome of a round is not known here: {self._group.undecided}"
        if self._keeper.strayed:
            return "its parameters had drifted away from the others'"
        return "another lineage leads" if self._lineage.may_be_behind or self._end.left_behind else ""

    # what others see, and get

    def report(self) -> PeerReport:
        """What this peer says about itself under `{run_id}_peers`."""
        rate = self.tracker.performance_ema.samples_per_second
        return describe(
            self.node,
            self.config.description,
            self.config.terms,
            self.ledger,
            self.phase,
            self.standing,
            samples_per_second=rate,
            drift=self._keeper.drift,
        )

    async def linger(self, until_others_at: int, timeout: float) -> bool:
        """Stays to hand out the state, without computing, until nobody who can be reached is behind that epoch.

        For the end of training: peers that missed the last round still find its outcome. False: time was up.
        """
        await self._finish_what_was_begun()
        await self._group.close()
        self.phase = "lingering"
        self.presence.announce()
        deadline = _now() + timeout
        while await self.presence.anyone_behind(until_others_at):
            if _now() >= deadline:
                return False
            await asyncio.sleep(min(LOOK_AROUND, max(0.0, deadline - _now())))
        return True

    # checkpoints

    def state_digest(self) -> str:
        """SHA-256 over the parameters: equal for peers that hold them bit-identically."""
        return self.replica.state.digest()

    async def state_dict(self) -> dict[str, Any]:
        """The optimizer's, with the scheduler and where this peer stands under "swarm". Parameters are not in it.

        Waits for the end of an epoch under way; the model then computes with the parameters that it gave.
        """
        await self._finish_what_was_begun()
        await self.replica.publish()
        return self.replica.state.checkpoint()

    async def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`, once the model's parameters of that moment have been restored.

        The next step joins the run anew: a run that is further leads, one that is behind follows this peer. Raises
        ValueError if the parameters are not those that the state belongs to; nothing has changed then.
        """
        await self._finish_what_was_begun()
        await self._group.close()
        await self.replica.load_checkpoint(state_dict)
        await self._work.drop()
        self._keeper.drop()
        self._lineage.settled, self.phase = False, "joining"
        self._last_seen = self.standing
        self._begin_epoch()
        self.presence.announce()


def _now() -> float:
    return asyncio.get_running_loop().time()
