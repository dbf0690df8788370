"""How an epoch ends when everyone's gradients are averaged before anyone steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarmcli.events import Events, Noticed
from swarmcli.network.identity import PeerID
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.membership.ledger import Ledger
from swarmcli.optim.membership.lineage import solitary_round_id
from swarmcli.optim.membership.presence import Presence
from swarmcli.optim.membership.standing_group import Committed, Failed, Outcome, StandingGroup, Undecided
from swarmcli.optim.state.replica import Replica

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerCore

LAST_CALL = 1.5  # seconds to wait for a round that should begin, by what the others reported
LOOK_AROUND = 1.0  # seconds between looks whether anybody is left to wait for


class SynchronousEnd:
    """Averages this peer's gradients with those of its group, or steps by itself where nobody else is left.

    `left_behind` is set when, instead of mates, a peer of a lineage that leads was found; whoever acts on it clears it.
    """

    def __init__(
        self,
        own_id: PeerID,
        config: OptimizerConfig,
        replica: Replica,
        averager: AveragerCore,
        group: StandingGroup,
        presence: Presence,
        ledger: Ledger,
        events: Events,
        on_advanced: Callable[[Committed, int, float], None],
    ) -> None:
        """`on_advanced` is called with the round, this peer's samples in it, and the seconds that it took."""
        self._own_id = own_id
        self._config = config
        self._replica = replica
        self._averager = averager
        self._group = group
        self._presence = presence
        self._ledger = ledger
        self._events = events
        self._on_advanced = on_advanced
        self.left_behind = False

    @property
    def has_enough(self) -> bool:
        """Whether this peer's own samples make an epoch."""
        return self._replica.samples >= self._config.target_batch_size

    async def run(self) -> None:
        """Tries until a round commits, nobody is left to average with, or waiting longer would only cost time.

        Unless a round commits, the accumulated gradients stay as they are.
        """
        began = _now()
        deadline = began + self._config.matchmaking_time
        while True:
            outcome = await self._attempt(began)
            if isinstance(outcome, Committed):
                return await self._advance(outcome, began)
            if isinstance(outcome, Undecided) or self.left_behind:
                return
            if outcome is not None:
                deadline = began + self._config.averaging_timeout
            begun = await self._group.wait_until_begun(LOOK_AROUND if self.has_enough else LAST_CALL)
            if _now() >= deadline or not (begun or self.has_enough):
                return

    async def _attempt(self, began: float) -> Outcome | None:
        """A round with the others if it has begun, or by itself if nobody else is there; None: neither."""
        if self._group.begun:
            outcome = await self._average()
        elif self.has_enough and await self._is_alone(patient=_now() - began < self._config.matchmaking_time / 2):
            outcome = await self._average_alone()
        else:
            return None
        if not isinstance(outcome, Committed):
            self._ledger.note_outcome("undecided" if isinstance(outcome, Undecided) else "failed", outcome.reason)
            self._warn(f"the round of epoch {self._replica.standing.epoch} gave no result: {outcome.reason}")
            self._presence.announce()
        return outcome

    async def _is_alone(self, patient: bool) -> bool:
        """Whether nobody is left to wait for. A quick peer must not run away from those who take in the last round a
        moment later; one that stays behind for long is waited for no more."""
        surroundings = await self._group.unless_begun(self._presence.surroundings(self._replica.standing))
        self.left_behind = surroundings == "behind"
        return surroundings == "alone" or (surroundings == "followed" and not patient)

    async def _average(self) -> Outcome:
        await self._load_means()
        outcome = await self._group.contribute(self._replica.samples)
        if isinstance(outcome, Committed):
            self._ledger.note_outcome("committed", outcome.left_out.get(self._own_id, ""))
        return outcome

    async def _average_alone(self) -> Outcome:
        """Nobody else can be reached, so this peer's mean is the swarm's."""
        await self._load_means()
        if not self.has_enough:
            return Failed("this peer has no samples any more")
        await self._group.close()
        self._ledger.note_outcome("alone")
        lineage, averages = self._replica.standing.lineage, self._replica.gradients.averaged
        round_id = solitary_round_id(self._own_id, lineage)
        await self._averager.archive.keep_alone(round_id, lineage, averages, self._replica.samples)
        return Committed(round_id, self._replica.samples, contributors=(self._own_id,))

    async def _load_means(self) -> None:
        async with self._averager.tensors():
            dropped = await self._replica.load_means()
        if dropped:
            self._warn(f"{dropped} samples of this peer are given up: their gradients are not finite")

    async def _advance(self, committed: Committed, began: float) -> None:
        """Steps with the average; from here on this peer is at the next epoch."""
        own_samples = self._replica.samples if self._own_id in committed.contributors else 0
        lost = self._replica.samples - own_samples
        if lost:
            reason = committed.left_out.get(self._own_id, "not named among the contributors")
            self._warn(f"{lost} samples of this peer are not in the average: {reason}")
        await self._replica.step(committed.round_id, committed.samples)
        await self._group.close()
        self._on_advanced(committed, own_samples, _now() - began)

    def _warn(self, text: str) -> None:
        self._events.emit(Noticed("warning", text))


def _now() -> float:
    return asyncio.get_running_loop().time()
