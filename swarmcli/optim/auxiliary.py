"""AuxiliaryCore: it reduces for the trainers of a run, computes no gradients and holds no state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.round.result import Outcome
from swarmcli.errors import RoundUndecided
from swarmcli.network.loop_thread import loop_time
from swarmcli.optim.config import IDLE_WAIT, PeerContext
from swarmcli.optim.epoch.group import PreformedGroup
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.modes.base import Advanced
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.participant import Participant
from swarmcli.optim.state.averaging import Occasion, Slot, StateRounds, state_config
from swarmcli.optim.state.lineage import LINEAGE_BYTES, Claim, LineagePosition

_NOWHERE = LineagePosition(0, 0, bytes(LINEAGE_BYTES))  # before any trainer was heard of


class AuxiliaryCore(Participant):
    """One auxiliary of a run. `peer.averaging` says that it is one; `parameters` give the shapes of the tensors.

    It learns from the trainers' reports which lineage leads. From then on it follows that by itself, by hashing the
    rounds in which it took part. If reports are ahead of it, it asks the trainers.
    """

    def __init__(
        self,
        peer: PeerContext,
        parameters: Sequence[torch.Tensor],
        mode: Mode | None = None,
        states: Sequence[Slot] = (),
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        """`states`: like what the trainers average of their states, if they do so regularly. `buffers`: like those that
        they average with their gradients."""
        super().__init__(peer, mode)
        self._position = _NOWHERE
        self._confirmed = -math.inf  # loop time when a report last agreed with the position, or a round set it
        # Nobody ever touches the tensors that are made here like the trainers', so they take no memory.
        like = [torch.empty_like(p, device="cpu").requires_grad_(p.requires_grad) for p in parameters]
        averager = self.mode.assisting_averager(self.node, peer.averaging, like, buffers)
        self._averagers = [averager]
        self._group = PreformedGroup(averager, self.config, self._tasks, self.tracker)
        self._assisting = asyncio.Lock()  # it takes part in one averaging of states at a time
        self._states: StateRounds | None = None
        several = self.mode.target_group_size is not None
        if states and self.mode.average_state_every(several) is not None:
            own = state_config(self.config.run_id, peer.averaging, self.mode.state.compression)
            self._states = StateRounds(self.node, own, states, self.config.fingerprint)
            self._averagers.append(self._states.averager)

    @property
    def position(self) -> LineagePosition:
        return self._position

    async def start(self, *, reports: bool = False) -> None:
        await super().start(reports=reports)

    async def step(self) -> bool:
        """Waits at most `IDLE_WAIT` for a round to begin, and takes part to its end. Returns whether one was committed.
        While this peer pauses, it only ends what has begun."""
        if self.pausing.is_asked and not self._group.begun:
            await self._rest()
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

    async def _settle(self) -> None:
        async with self._assisting:  # others count on this peer in an averaging of states that has begun
            pass

    async def _follow_reports(self) -> None:
        """Joins the group of the lineage that leads. If reports are ahead of this peer, it asks trainers directly."""
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
        """This peer's claim. It has no state to lose: like a newcomer it follows what its mates, or most peers,
        hold."""
        return Claim(_NOWHERE if self._astray else self.position, settled=False)

    @property
    def _astray(self) -> bool:
        """Whether no report has named this position for a while: those who held it may be gone, and others may have
        begun anew."""
        return loop_time() - self._confirmed > 5  # reports are some seconds late

    async def _ask_for_positions(self) -> None:
        """Asks the trainers for their positions: a report is seconds old, which may be an epoch or more."""
        words = await self.survey.survey()
        now = await self.claims.decide(self._claim, words)
        if self._group.begun:
            return  # a round of this lineage has begun meanwhile
        await self._group.close()
        if now not in (_NOWHERE, self.position) and any(word.claim.settled for word in words.values()):
            if self.position != _NOWHERE:
                self.metrics.begin()  # when this epoch began is not known here
            self._position, self._confirmed = now, loop_time()
            self.directory.announce()

    async def _follow(self, outcome: Outcome, began: float) -> None:
        if not isinstance(outcome, RoundResult):
            undecided = isinstance(outcome, RoundUndecided)
            self.metrics.note_outcome("undecided" if undecided else "failed", str(outcome))
            if undecided:
                await self._group.close()  # the reports will tell how it ended
            return
        self._position = self.mode.after(self.position, outcome, self.config.target_batch_size)
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
            await states.average(occasion)  # if there is no average, the round's event says why
