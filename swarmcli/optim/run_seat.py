"""A trainer's seat in its run: what others and the user hear of it, and what a download shows of its line."""

from __future__ import annotations

import asyncio
import math
from collections import deque

from swarmcli.averaging.seats import MAX_SECONDS, NOISE, Bid, NoSeat
from swarmcli.events import Noticed
from swarmcli.network.loop_thread import loop_time
from swarmcli.optim.epoch.group import PreformedGroup
from swarmcli.optim.epoch.seat import SeatLost
from swarmcli.optim.participant import Participant
from swarmcli.optim.peers.catch_up import CatchUp
from swarmcli.optim.peers.exchange import StateExchange
from swarmcli.optim.state.lineage import Claim
from swarmcli.optim.state.replica import Replica

MOST_BEHIND = 2  # epochs by which the state of a trainer that computes may be behind the run
LOOK_AT_LINE = 5.0  # seconds of a download
LOOKS_AT_LINE = 4  # the quickest of this many counts, even if one download ends and the next begins
# A line that was seen to be too slow is tried again after so many seconds, then after twice as many each time, up to
# the longest. A try costs the others TRIAL of an epoch at most, or the donor a part of a state.
FIRST_RETRY, LONGEST_RETRY = 60.0, 960.0
EXPLAINED = 4.0  # times the seconds that a limit asks for are explained by it: control messages pass first


class RunSeat:
    """The seat of one trainer or follower, reviewed as its run goes on: `lost` is None while its samples can count. It
    belongs to the event loop."""

    def __init__(
        self, core: Participant, group: PreformedGroup, catch_up: CatchUp, exchange: StateExchange, replica: Replica
    ) -> None:
        self.lost: SeatLost | None = None
        self.tries = False  # its line was too slow, it is tried again, and no round has shown yet how it is now
        self._told_lost = False  # the user has heard that the samples do not count, and not yet that they count again
        self.divided = 1.0  # the user's limit divided by this peer's part of it
        self.seconds = 0.0  # that sending takes in a round within that limit
        self._finder = group.averager.finder
        self.nbytes = self._finder.round_bytes  # most bytes that this peer sends in a round, or receives
        self._core, self._group, self._catch_up = core, group, catch_up
        self._exchange, self._replica = exchange, replica
        self._limit = math.inf  # bytes per second, at the last review
        self._retry = 0.0  # seconds for which what this peer has seen of its line counts …
        self._until = math.inf  # … and the loop time when they are over
        self._downloads = deque[float](maxlen=LOOKS_AT_LINE)  # bytes per second that came in
        self._caught_up: list[float] = []  # bytes per second, each time it caught up since its last round
        self._since = 0.0  # loop time from which samples do not count
        self._latest = 0, 0.0  # the epoch of the run, as far as this peer knows, and since when (loop time)

    @property
    def rate(self) -> float:
        """Samples per second of this peer, as it tells others: 0 while they cannot count."""
        core = self._core
        return 0.0 if core.pausing.told or self.lost else core.tracker.performance_ema.samples_per_second

    def spoils_rounds(self) -> bool:
        """Whether this trainer's samples cannot count in the next round, as far as it knows."""
        core = self._core
        if core.config.description.role != "trainer":
            return False
        self.review_in_run()
        # If the run has gone on without it, and nobody gives it that state, what it computes is worthless. A claim that
        # is no reason to follow is no reason to stop either: one stranger could hold up a lone trainer.
        return (
            self.lost is not None or core.claims.leading(Claim(core.position)).epoch > core.position.epoch + MOST_BEHIND
        )

    def review_in_run(self, *, stays: bool = False) -> None:
        """Finds out anew whether this trainer's samples can count, and says so if that has changed: others hear that it
        computes nothing, the user hears why. See `averaging/seats.py`. `stays`: it does not pause now, even if it
        cannot follow the run."""
        core = self._core
        latest = core.claims.leading(Claim(core.position)).epoch
        if latest != self._latest[0]:
            self._latest = latest, loop_time()
        if self._saw_the_other():
            self._forget()
        changed = self._review(loop_time() - self._latest[1])
        lost = self.lost
        if lost is None or lost.follows:
            core.pausing.end("line")
        elif not stays:
            core.pausing.ask("line")
        if changed:
            core.tracker.rest(lost is not None or core.pausing.is_asked)
            if lost is not None:
                self._spare_line(lost.nbytes / lost.reason.seconds)
            if self._catch_up.settled and not core.pausing.away:
                core.phase = "training" if lost is None else "following"
            if lost is not None:
                self._told_lost = True
                core.node.endpoint.events.emit(Noticed("warning", f"{lost.sentence}; {lost.remedy}"))
            elif not self.tries:
                self.tell_that_samples_count()
            core.directory.announce()

    def _saw_the_other(self) -> bool:
        """Whether what this peer saw of its line may have been another's: of two senders, one has a limit of its
        user."""
        group, reports = self._group.last, self._core.directory.others
        senders = {peer for peer, bid in group.bids.items() if bid.sends} if group is not None else set()
        if len(senders) != 2:
            return False
        return any(peer in reports and reports[peer].limited for peer in senders)

    def _forget(self) -> None:
        """The next round shows this peer's line anew."""
        self._finder.lines.own = self._finder.lines.receiving = 0.0
        self._downloads.clear()
        self._caught_up.clear()

    def tell_that_samples_count(self) -> None:
        """Tells the user that the samples count again, if the user heard that they do not. After a try that waits for a
        round to show it. A limit that is raised makes a try too, whether a seat was lost or not."""
        self._spare_line(math.inf)
        if not self._told_lost:
            return
        self._told_lost = False
        text = "this computer's samples count again: it computes"
        self._core.node.endpoint.events.emit(Noticed("info", text))

    def _spare_line(self, rate: float) -> None:
        """Leaves a line of `rate` bytes per second to averaging and states: otherwise this peer would come too late to
        each group. Others' records alone would take a quarter of 10 kB/s."""
        core = self._core
        core.node.rest(rate < math.inf)
        core.directory.spare(rate)
        core.tracker.spare(rate)

    async def watch_line(self) -> None:
        """Measures this peer's line while it downloads: so a newcomer need not spoil a round to learn that its line is
        too slow."""
        core, replica = self._core, self._replica
        endpoint, generation = core.node.endpoint, replica.generation
        while core.config.description.role == "trainer":
            before = endpoint.passed().received
            await asyncio.sleep(LOOK_AT_LINE)
            rate = (endpoint.passed().received - before) / LOOK_AT_LINE
            if self._exchange.on_its_way and self.note_download(rate):
                # It completes its first state in any case; if it then needs another one, it cannot follow the run.
                self.review_in_run(stays=not core.pausing.away and replica.generation == generation)

    @property
    def sending(self) -> float:
        """Seconds that this peer's line takes to send in a round, as it tells others; 0: nothing has shown that yet."""
        return float(f"{self._finder.bid(self._core.config.target_batch_size).seconds:.2g}")

    @property
    def limited(self) -> bool:
        """Whether the limits of this peer's user explain why sending takes so long."""
        return NOISE < self.sending <= EXPLAINED * self._finder.seconds_by_limits

    def note_download(self, rate: float) -> bool:
        """While this peer downloaded, `rate` bytes per second came in. Returns whether that shows its line by now."""
        self._downloads.append(rate)
        if len(self._downloads) < LOOKS_AT_LINE or not any(self._downloads):
            return False
        self._note_receiving(max(self._downloads))
        return True

    def note_catching_up(self, rate: float) -> None:
        """This peer has caught up with the run, at `rate` bytes per second. If it has done so twice since it was in a
        round, that shows its line: a round seems to take longer to receive than an epoch lasts."""
        self._caught_up.append(rate)
        if len(self._caught_up) > 1:
            self._note_receiving(max(self._caught_up))

    def note_round(self) -> bool:
        """A round has counted this peer's samples. Returns whether that was a try of a line that had been too slow."""
        self._caught_up.clear()
        tried, self.tries, self._retry = self.tries, False, 0.0
        return tried

    def _note_receiving(self, rate: float) -> None:
        receiving = self._finder.lines.receiving = min(self._finder.round_bytes / rate, MAX_SECONDS)
        # A line that is still too slow is not tried yet. A quick one is, however often this peer has to catch up.
        if self._until < math.inf and self.lost is not None and receiving > self.lost.reason.epoch:
            self._until = loop_time() + self._retry

    def _review(self, epoch_age: float) -> bool:
        """Decides anew. Returns whether this peer has lost its seat or got it back.

        A peer that has been in no group goes by what trainers that compute now say of their lines and samples per
        second. `epoch_age`: seconds since the present epoch began. If those with seats do not end it in time,
        everybody's samples count.
        """
        core, finder, lines = self._core, self._finder, self._finder.lines
        own_id, target, rates = core.node.peer_id, core.config.target_batch_size, core.node.endpoint.rates
        others = core.directory.trainers()
        members = self._group.last.bids if self._group.last is not None else {}
        bids = {peer: bid for peer, bid in members.items() if peer in others or not bid.sends}
        bids |= {p: Bid(seconds=report.sending) for p, report in others.items() if report.sending or p not in bids}
        self.seconds, self.nbytes = finder.seconds_by_limits, finder.round_bytes
        before, self._limit = self._limit, rates.lower or math.inf
        # What was seen of this line is old, or was seen under a lower limit: the next round shows how it is now.
        if loop_time() >= self._until or self._limit > before:
            self._forget()
            self._until, self.tries = math.inf, True
        own = finder.bid(target)
        paces = {peer: report.samples_per_second for peer, report in others.items()}
        seats = lines.seats(bids | {own_id: own}, target, paces)
        reason = seats.unseated.get(own_id)
        if reason is None and len(self._caught_up) > 1 and lines.receiving > seats.epoch:
            reason = NoSeat(lines.receiving, seats.epoch)
        had, self.lost = self.lost, None
        self._since = loop_time() if had is None else self._since
        if reason is not None and min(epoch_age, loop_time() - self._since) <= seats.overdue:
            seen = own.seconds > self.seconds
            if seen and self._until == math.inf:
                self._retry = min(2 * self._retry, LONGEST_RETRY) or FIRST_RETRY
                self._until = loop_time() + self._retry
            receives = max(lines.receiving, self.nbytes / (rates.download.limit or math.inf))
            limit = None if seen else rates.lower
            self.lost = SeatLost(reason, self.nbytes, limit, receives <= reason.epoch, self.divided)
        return (had is None) != (self.lost is None)
