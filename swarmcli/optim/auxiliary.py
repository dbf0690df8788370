"""AuxiliaryCore: reduces for the trainers of a run, computes no gradients and holds no state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.round.result import Outcome
from swarmcli.errors import RoundUndecided
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.config import IDLE_WAIT, PeerContext
from swarmcli.optim.epoch.group import PreformedGroup
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.modes.base import Advanced
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.peers.claims import Claims
from swarmcli.optim.peers.directory import PeerDirectory
from swarmcli.optim.peers.pausing import Pausing
from swarmcli.optim.peers.progress import ProgressTrackerCore
from swarmcli.optim.peers.report import PeerMetrics, PeerReport, describe
from swarmcli.optim.peers.survey import Survey
from swarmcli.optim.state.averaging import Occasion, Slot, StateRounds, state_config
from swarmcli.optim.state.lineage import LINEAGE_BYTES, Claim, LineagePosition

_NOWHERE = LineagePosition(0, 0, bytes(LINEAGE_BYTES))  # before any trainer was heard of


class AuxiliaryCore:
    """One auxiliary of a run. `peer.averaging` says that it is one; `parameters` give the shapes of the tensors.

    It learns from the trainers' reports which lineage leads, and after that follows it by itself, hashing the
    rounds that it helped with. Reports that are ahead of it correct it.
    """

    def __init__(
        self,
        peer: PeerContext,
        parameters: Sequence[torch.Tensor],
        mode: Mode | None = None,
        states: Sequence[Slot] = (),
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        """`states`: what the trainers average of their states, where they do so regularly; `buffers`: like those that
        they average with their gradients."""
        self.node = node = peer.node
        self.config = config = peer.config
        self.position = _NOWHERE
        self.metrics = PeerMetrics(node.peer_id, peer.events)
        self.directory = PeerDirectory(node, config.run_id, self.report)
        self.pausing = Pausing(self.directory.announce)
        self.leaving = False
        self.claims = Claims(self.directory)
        self.survey = Survey(self.claims)
        self.tracker = ProgressTrackerCore(node, config.run_id, config.target_batch_size, options=config.tracker)
        self._tasks = TaskOwner()
        self._confirmed = -math.inf  # when a trainer's report last agreed with the position, or a round made it
        self.mode = mode or Mode()
        # Tensors like the trainers' are made and never touched, so they are not in memory either.
        like = [torch.empty_like(p, device="cpu").requires_grad_(p.requires_grad) for p in parameters]
        self._averager = self.mode.assisting_averager(node, peer.averaging, like, buffers)
        self._group = PreformedGroup(
            self._averager,
            config,
            self._tasks,
            reported=lambda: self.tracker.reported(self.position.epoch),
        )
        self._assisting = asyncio.Lock()  # with states, once at a time
        self._states: StateRounds | None = None
        several = self.mode.target_group_size is not None
        if states and self.mode.average_state_every(several) is not None:
            own = state_config(config.run_id, peer.averaging)
            self._states = StateRounds(node, own, states, config.fingerprint)

    async def start(self) -> None:
        await self._averager.start()
        if self._states is not None:
            await self._states.averager.start()
        await self.survey.start()
        await self.tracker.start(report=False)
        self.metrics.begin()

    async def shutdown(self) -> None:
        """Leaves the group and withdraws what this peer said about itself. Idempotent; leaves no task."""
        await self._group.leave()
        await self._tasks.close()
        await self._averager.shutdown()
        if self._states is not None:
            await self._states.averager.shutdown()
        await self.tracker.shutdown()
        await self.survey.shutdown()

    def report(self) -> PeerReport:
        """Returns what this peer says about itself under `{run_id}_peers`."""
        told = self.config.description, self.config.terms, self.metrics
        pause, leaving = self.pausing.told, self.leaving
        return describe(self.node, *told, "assisting", self.position, pause=pause, leaving=leaving)

    @property
    def is_averaging(self) -> bool:
        """Whether a round is under way."""
        return self._group.begun

    async def step(self) -> bool:
        """Waits (at most `IDLE_WAIT`) for a round to begin and brings it to its end; whether one was committed. While
        this peer pauses it only ends what has begun."""
        if self.pausing.is_asked and not self._group.begun:
            if self.pausing.away:
                await self.pausing.wait(IDLE_WAIT)
            else:
                await self._withdraw()
            return False
        self.pausing.come_back()
        await self._follow_reports()
        if self._group.position is None:
            await asyncio.sleep(IDLE_WAIT)
            return False
        if not await self._group.wait_until_begun(IDLE_WAIT):
            return False
        began = loop_time()
        outcome = await self._group.contribute(Weighed())
        await self._follow(outcome, began)
        return isinstance(outcome, RoundResult)

    def pause(self, *, leaving: bool = False) -> None:
        """From now on this peer helps with nothing new, and the others hear of it at once; `leaving`: that it will not
        come back, too. Idempotent."""
        self.leaving |= leaving
        self.pausing.ask()

    def resume(self) -> None:
        """It helps again, from the next step on. Idempotent."""
        self.pausing.end()

    @property
    def has_handed_in(self) -> bool:
        """Whether, of a peer that pauses, nobody counts on it any more."""
        return self.pausing.away

    async def _withdraw(self) -> None:
        if not self.pausing.away:
            await self._group.close()
            async with self._assisting:  # with states that others count on
                pass
            await self._averager.finder.withdraw()
            self.pausing.withdraw()

    async def _follow_reports(self) -> None:
        """Joins the group of the lineage that leads; where reports are ahead of it, trainers are asked directly."""
        if self._group.begun:
            return
        if self.position == _NOWHERE:
            await self.directory.refresh()
        reported = [claim.position for claim in self.claims.reported() if claim.settled]
        if self.position in reported:
            self._confirmed = loop_time()
        behind = self.claims.leading(self._claim) != self.position
        if behind or self._group.undecided or (reported and self._astray):
            await self._ask_for_positions()
        if self.position != _NOWHERE and self.mode.brings(self.position.epoch):
            self._group.open(self.position)

    @property
    def _claim(self) -> Claim:
        """Where it stands. It has no state to lose: as a newcomer does, it takes what its mates hold, or most."""
        return Claim(_NOWHERE if self._astray else self.position, settled=False)

    @property
    def _astray(self) -> bool:
        """Whether nobody has held this lineage for a while: those who did may be gone, and others begun anew."""
        return loop_time() - self._confirmed > 5  # reports are some seconds late

    async def _ask_for_positions(self) -> None:
        """A report is seconds old, which may be an epoch or more."""
        words = await self.survey.survey()
        now = await self.claims.decide(self._claim, words)
        if self._group.begun:
            return  # the round meanwhile, of this lineage after all
        await self._group.close()
        if now not in (_NOWHERE, self.position) and any(word.claim.settled for word in words.values()):
            if self.position != _NOWHERE:
                self.metrics.begin()  # when this epoch began is not known here
            self.position, self._confirmed = now, loop_time()
            self.directory.announce()

    async def _follow(self, outcome: Outcome, began: float) -> None:
        if not isinstance(outcome, RoundResult):
            undecided = isinstance(outcome, RoundUndecided)
            self.metrics.note_outcome("undecided" if undecided else "failed", str(outcome))
            if undecided:
                await self._group.close()  # the reports will tell how it ended
            return
        self.position = self.mode.after(self.position, outcome, self.config.target_batch_size)
        self.claims.note_round(outcome.members, outcome.round_id, outcome.certificate)
        self._confirmed = loop_time()
        self.metrics.note_outcome("committed")
        self._assist_states(outcome)
        await self._group.close()
        self.directory.announce()
        self.metrics.end_epoch(self.position, Advanced(outcome, 0, loop_time() - began))

    def _assist_states(self, committed: RoundResult) -> None:
        """Takes part in the averaging of states that follows this epoch, if one does."""
        every = self.mode.average_state_every(committed.several)
        if self._states is not None and every and self.position.epoch % every == 0:
            everyone = (self.node.peer_id, *self.directory.at_work())
            mates = everyone if committed.several else committed.members + committed.helpers
            occasion = Occasion(self.position.lineage, self.position.epoch, 0.0, mates, several=committed.several)
            self._tasks.spawn(self._assist(self._states, occasion))

    async def _assist(self, states: StateRounds, occasion: Occasion) -> None:
        async with self._assisting:  # trainers too wait for the last averaging of states
            await states.average(occasion)  # why there is no average is told by the round's event
