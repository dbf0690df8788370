"""A trainer's seat in its run: what others and its user hear of it, and what a download shows of its line."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from swarmcli.events import Noticed
from swarmcli.network.loop_thread import loop_time
from swarmcli.optim.epoch.group import PreformedGroup
from swarmcli.optim.epoch.seat import OwnSeat
from swarmcli.optim.participant import Participant
from swarmcli.optim.peers.catch_up import CatchUp
from swarmcli.optim.peers.exchange import StateExchange
from swarmcli.optim.state.lineage import Claim
from swarmcli.optim.state.replica import Replica

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerCore

MOST_BEHIND = 2  # epochs, for a state on which a trainer computes
LOOK_AT_LINE = 5.0  # seconds of a download


class RunSeat(OwnSeat):
    """The seat of one trainer or follower, reviewed as its run goes on."""

    def __init__(
        self,
        core: Participant,
        averager: AveragerCore,
        group: PreformedGroup,
        catch_up: CatchUp,
        exchange: StateExchange,
        replica: Replica,
    ) -> None:
        super().__init__(averager, core.node.peer_id, core.config.target_batch_size)
        self._core, self._group, self._catch_up = core, group, catch_up
        self._exchange, self._replica = exchange, replica
        self._latest = 0, 0.0  # the epoch of the run, as far as this peer knows, and since when, by the loop's time

    @property
    def rate(self) -> float:
        """Samples per second of this peer, as others are told: 0 where they cannot count."""
        core = self._core
        return 0.0 if core.pausing.told or self.lost else core.tracker.performance_ema.samples_per_second

    def spoils_rounds(self) -> bool:
        """Whether this trainer's samples cannot count in the next round, as far as it knows."""
        core = self._core
        if core.config.description.role != "trainer":
            return False
        self.review_in_run()
        # Where the run has gone on without it, and nobody gives it that state, what it computed would be worthless. A
        # claim that is no reason to follow is none to stand still either: one stranger could hold up a lone trainer.
        return (
            self.lost is not None or core.claims.leading(Claim(core.position)).epoch > core.position.epoch + MOST_BEHIND
        )

    def review_in_run(self, *, stays: bool = False) -> None:
        """Finds out anew whether this trainer's samples can count, and says so where that has changed: others hear that
        it computes nothing, its user hears why. See `averaging/seats.py`. `stays`: it goes on with what it does now,
        even if it cannot follow the run."""
        core = self._core
        latest = core.claims.leading(Claim(core.position)).epoch
        if latest != self._latest[0]:
            self._latest = latest, loop_time()
        changed = self.review(self._group.last, core.directory.trainers(), loop_time() - self._latest[1])
        lost = self.lost
        if lost is None or lost.follows:
            core.pausing.end("link")
        elif not stays:
            core.pausing.ask("link")
        if changed:
            core.tracker.rest(lost is not None or core.pausing.is_asked)
            if lost is not None:
                self._spare_line(lost.nbytes / lost.reason.seconds)
            if self._catch_up.settled and not core.pausing.away:
                core.phase = "training" if lost is None else "following"
            if lost is not None:
                core.node.endpoint.events.emit(Noticed("warning", f"{lost.sentence}; {lost.remedy}"))
            elif not self.tries:
                self.tell_that_samples_count()
            core.directory.announce()

    def tell_that_samples_count(self) -> None:
        """Once a round has shown that a line that was tried again is quick enough."""
        self._spare_line(math.inf)
        text = "this computer's samples count again: it computes"
        self._core.node.endpoint.events.emit(Noticed("info", text))

    def _spare_line(self, rate: float) -> None:
        """A line of so many bytes per second is left to averaging and states, or this peer would come too late to each
        group: others' records alone would take a quarter of 10 kB/s."""
        core = self._core
        core.node.rest(rate < math.inf)
        core.directory.spare(rate)
        core.tracker.spare(rate)

    async def watch_line(self) -> None:
        """Downloads show this peer's line: a newcomer need not spoil a round to learn that it is too slow."""
        core, replica = self._core, self._replica
        endpoint, generation = core.node.endpoint, replica.generation
        while core.config.description.role == "trainer":
            before = endpoint.passed().received
            await asyncio.sleep(LOOK_AT_LINE)
            rate = (endpoint.passed().received - before) / LOOK_AT_LINE
            if self._exchange.on_its_way and self.note_download(rate):
                # It takes the first state in any case; if it needs another one by then, it cannot follow the run.
                self.review_in_run(stays=not core.pausing.away and replica.generation == generation)
