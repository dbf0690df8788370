"""How an epoch ends: with a round, or by this peer alone where nobody else is left."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmcli.events import Noticed
from swarmcli.optim.config import PeerContext
from swarmcli.optim.epoch.group import PreformedGroup
from swarmcli.optim.epoch.wait import LAST_CALL, EpochRule, Resume
from swarmcli.optim.modes.base import Committed, EpochWork, Failed, Outcome, Timing, Undecided
from swarmcli.optim.peers.directory import PeerDirectory
from swarmcli.optim.peers.report import PeerMetrics
from swarmcli.optim.state.lineage import solitary_round_id

if TYPE_CHECKING:
    from swarmcli.optim.epoch.keeper import StateKeeper

LOOK_AROUND = 1.0  # seconds between looks whether anybody is left to wait for


@dataclass(frozen=True, slots=True)
class Advanced:
    """This peer has stepped and is at the next epoch."""

    committed: Committed
    own_samples: int  # of this peer, in the average
    seconds: float  # that the end took


class EpochEnd:
    """The end of one epoch after the other. `run` is the whole of it; for what of it the trainer waits, is `timing`.

    `left_behind` is set when, instead of mates, a peer of a lineage that leads was found; whoever acts on it clears it.
    """

    def __init__(
        self,
        peer: PeerContext,
        timing: Timing,
        rule: EpochRule,
        work: EpochWork,
        keeper: StateKeeper,
        group: PreformedGroup,
        directory: PeerDirectory,
        metrics: PeerMetrics,
    ) -> None:
        self._own_id = peer.node.peer_id
        self._config = peer.config
        self._events = peer.events
        self._timing = timing
        self._rule = rule
        self._replica = work.replica
        self._work = work
        self._keeper = keeper
        self._group = group
        self._directory = directory
        self._metrics = metrics
        self._weight: int | None = None  # samples frozen
        self._strayed = False  # they were kept out of the last round: they belong to other parameters than the others'
        self._share = 1.0  # of the last round's samples that were this peer's; until one is known, an epoch's all
        self.left_behind = False
        self._said_alone = False  # since the last round with others

    @property
    def has_enough(self) -> bool:
        """Whether this peer may end the epoch by itself: its own samples make one, as a rule."""
        samples = self._work.samples if self._weight is None else self._weight
        return self._rule.suffices(samples)

    @property
    def is_ahead(self) -> bool:
        """Whether, while an end is under way, the next epoch is over too, as far as this peer can tell: it has
        accumulated its part, as large as in the last round."""
        return self._work.samples >= self._share * self._config.target_batch_size

    async def run(self, resume: Resume) -> Advanced | None:
        """Tries until a round commits, nobody is left to average with, or waiting longer would only cost time.

        Calls `resume` when the trainer may go on to compute: at the latest when `run` ends. None: no round committed,
        and what was accumulated stays for the next one.
        """
        began = _now()
        try:
            committed = await self._average(began, resume)
            return None if committed is None else await self._advance(committed, began, resume)
        finally:
            self._weight = None
            await self._work.restore()
            resume()

    async def _average(self, began: float, resume: Resume) -> Committed | None:
        """The round; None: there was none."""
        deadline = began + self._config.matchmaking_time
        while True:
            outcome = await self._attempt(began, resume)
            if isinstance(outcome, Committed):
                return outcome
            if isinstance(outcome, Undecided) or self.left_behind:
                return None
            if outcome is not None:
                deadline = began + self._config.averaging_timeout
            begun = await self._group.wait_until_begun(LOOK_AROUND if self.has_enough else LAST_CALL)
            if _now() >= deadline:
                return await self._proceed(began, resume)
            if not (begun or self.has_enough):
                return None

    async def _proceed(self, began: float, resume: Resume) -> Committed | None:
        """Others are there, but no round came about in time: with its own gradients, if the user wants that."""
        if not (self._config.proceed_alone and self.has_enough):
            return None
        seconds = _now() - began
        self._warn(f"no round came about within {seconds:.0f} s: this peer steps with its own gradients alone")
        outcome = await self._average_alone(resume)
        return outcome if isinstance(outcome, Committed) else None

    async def _attempt(self, began: float, resume: Resume) -> Outcome | None:
        """A round with the others if it has begun, or by itself if nobody else is there; None: neither."""
        if self._group.begun:
            outcome = await self._average_together(resume)
        elif self.has_enough and await self._is_alone(patient=_now() - began < self._config.matchmaking_time / 2):
            self._mention_the_unreachable()
            outcome = await self._average_alone(resume)
        else:
            return None
        if not isinstance(outcome, Committed):
            self._metrics.note_outcome(outcome.word, outcome.reason)
            # If everybody else is gone, this is what a goodbye looks like. Who goes without one is told of by name.
            if any(self._directory.hearing.answers(peer) for peer in self._directory.holders()):
                self._warn(f"the round of epoch {self._replica.position.epoch} gave no result: {outcome.reason}")
            self._directory.announce()
        return outcome

    async def _is_alone(self, patient: bool) -> bool:
        """Whether nobody is left to wait for. A quick peer must not run away from those who take in the last round a
        moment later; one that stays behind for long is waited for no more."""
        if self._rule.several:
            return True
        surroundings = await self._group.unless_begun(self._directory.surroundings(self._replica.position))
        self.left_behind = surroundings == "behind"
        return surroundings == "alone" or (surroundings == "followed" and not patient)

    async def _average_together(self, resume: Resume) -> Outcome:
        weight = await self._freeze(resume)
        self._strayed = self._keeper.compare(self._group.gathered)
        outcome = await self._group.contribute(0 if self._strayed else weight)
        if isinstance(outcome, Committed):
            self._said_alone = self._said_alone and len(outcome.members) <= 1  # auxiliaries are no members
            self._metrics.note_outcome("committed", outcome.left_out.get(self._own_id, ""))
        return outcome

    async def _average_alone(self, resume: Resume) -> Outcome:
        """Nobody else can be reached, so what this peer has is the swarm's average."""
        samples = await self._freeze(resume)
        if not (samples and self.has_enough):
            return Failed("this peer has no samples any more")
        await self._group.close()
        self._metrics.note_outcome("alone")
        await self._work.average_alone()
        lineage = self._replica.position.lineage
        round_id = solitary_round_id(self._own_id, lineage)
        async with self._work.averager.tensors() as averages:
            await self._work.averager.archive.keep_alone(round_id, lineage, averages, samples)
        return Committed(round_id, samples, contributors=(self._own_id,), several=self._rule.several)

    def _mention_the_unreachable(self) -> None:
        """Two peers behind firewalls, above all, would otherwise train apart without a word."""
        others = len(self._directory.claims()) if not self._rule.several else 0
        if others and not self._said_alone:
            self._said_alone = True
            self._warn(
                "this peer steps by itself: "
                + ("another peer has" if others == 1 else f"{others} other peers have")
                + " reported lately, but cannot be averaged with now. They may be starting, or gone; if it stays so, "
                "neither side can dial the other, and an auxiliary or a monitor that both can dial brings them together"
            )

    def _warn(self, text: str) -> None:
        self._events.emit(Noticed("warning", text))

    async def _freeze(self, resume: Resume) -> int:
        """What is frozen stays the same over all attempts. A delayed trainer computes its next batches with the
        parameters that the last epoch gave, from here on or once these gradients are averaged."""
        first = self._weight is None
        if first:
            await self._replica.check()
        self._weight = await self._work.freeze()
        if first and self._timing is not Timing.AT_ONCE:
            await self._replica.publish()
        if self._timing is Timing.DELAYED_AVERAGING:
            resume()
        return self._weight

    async def _advance(self, committed: Committed, began: float, resume: Resume) -> Advanced:
        """Steps with the average; from here on this peer is at the next epoch."""
        if self._timing is not Timing.AT_ONCE:
            resume()
        handed = self._weight or 0
        counted = self._own_id in committed.contributors
        if handed and counted:
            self._share = handed / committed.samples
        if handed and not counted:
            reason = committed.left_out.get(self._own_id, "not named among the contributors")
            reason = "this peer's parameters have drifted away from the others'" if self._strayed else reason
            self._warn(f"{handed} samples of this peer are not in the average: {reason}")
        await self._work.advance(committed, counted)
        await self._keeper.after_epoch(committed, handed)
        if self._timing is Timing.AT_ONCE:
            await self._replica.publish()
        await self._group.close()
        return Advanced(committed, handed if counted else 0, _now() - began)


def _now() -> float:
    return asyncio.get_running_loop().time()
