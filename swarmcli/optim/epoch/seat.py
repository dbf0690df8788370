"""Whether this trainer's samples can count: what its group will decide about its seat, found out before it computes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmcli.averaging.seats import MAX_SECONDS, NOISE, Bid, LineSeen, NoSeat, decide
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.words import amount, roughly

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerCore
    from swarmcli.averaging.group import Group
    from swarmcli.optim.peers.report import PeerReport


# A line that was seen to be too slow is tried again after so many seconds, then twice as many each time, up to these: a
# try costs the others TRIAL of an epoch at most, or the donor a part of a state.
FIRST_RETRY, LONGEST_RETRY = 60.0, 960.0
LOOKS_AT_LINE = 4  # the quickest of the last ones counts, also where a download ends and the next begins


@dataclass(frozen=True, slots=True)
class SeatLost:
    """Why this trainer computes nothing, in figures.

    nbytes   that it would send in a round, and receive
    limit    bytes per second that its user lets it have; None: the others have seen how long it takes
    divided  what that user has set, by this limit: several peers of one user share it
    follows  it gets each average in time; otherwise it is away, as in a pause
    """

    reason: NoSeat
    nbytes: int
    limit: float | None
    follows: bool
    divided: float = 1.0

    @property
    def sentence(self) -> str:
        """For people."""
        needs = roughly(self.reason.seconds)
        cause = "your link has been seen to need"
        if self.limit:
            shared = ", which your peers here share," if self.divided > 1 else ""
            cause = f"your limit of {amount(self.limit * self.divided)}/s{shared} needs"
        return (
            f"a round sends {amount(self.nbytes)}; {cause} {needs}, epochs take {roughly(self.reason.epoch)}: "
            "your samples cannot count here"
        )

    @property
    def remedy(self) -> str:
        """Says what this computer does now, and what helps: what its user can do, and what the run's owner."""
        does = "follows the run and computes nothing"
        if not self.follows:
            does = "waits, since it could not even follow the run"
        helps = "a higher limit brings it back" if self.limit else "it is tried again now and then"
        return (
            f"this computer {does}; {helps}; the run's owner can make rounds smaller, by outer steps (outer:, "
            "docs/modes.md) or fewer bits (compression:)"
        )


def before_joining(nbytes: int, limit: float | None, target: float, epoch: float = 0.0) -> str:
    """Tells people what a trainer should know of the rounds of a run before it joins. A round sends `nbytes`, the user
    lets `limit` bytes per second pass (None: all), `target` samples make an epoch of so many seconds (0: unknown).

    That its samples cannot count is told where it is certain: a single other trainer has the least to lose by waiting.
    """
    sends = f"a round sends {amount(nbytes)}, and as much comes in"
    if limit is None:
        return (
            f"a round sends {amount(nbytes)}; a link that needs more than an epoch for it follows the run: its samples "
            "cannot count"
        )
    elsewhere = "unless all others are on this computer, where no limit counts"
    seconds = min(nbytes / limit, MAX_SECONDS)
    me, other = PeerID(bytes(32)), PeerID(bytes([1] * 32))
    pace = LineSeen(pace=target / epoch if epoch else 0.0)
    bids = {me: Bid(seconds=seconds), other: Bid(seconds=NOISE)} if epoch else {}
    if reason := decide(bids, target, {me: pace, other: pace}).unseated.get(me):
        sentence = SeatLost(reason, nbytes, limit, follows=True).sentence
        return f"{sentence}, {elsewhere}; this computer would follow the run and compute nothing; a higher limit helps"
    return (
        f"{sends}, for which your limit of {amount(limit)}/s needs {roughly(seconds)}; in a run whose epochs are not "
        f"much longer your samples cannot count, {elsewhere}"
    )


class OwnSeat:
    """Knows whether one trainer's samples count: `lost` is None while they do. Belongs to the event loop."""

    def __init__(self, averager: AveragerCore, peer: PeerID, target: float) -> None:
        self.lost: SeatLost | None = None
        self.tries = False  # its line was seen to be too slow, and no round has shown since that it is not any more
        self.divided = 1.0  # what its user has set, by the limits of this peer
        self.seconds = 0.0  # that sending takes by these limits
        self._limit = math.inf  # bytes per second, at the last review
        self.nbytes = averager.finder.round_bytes  # that a round sends, and as much comes in, at most
        self._averager, self._peer, self._target = averager, peer, target
        self._retry = 0.0  # seconds for which what this peer has seen of its line counts
        self._until = math.inf  # loop time
        self._downloads = deque[float](maxlen=LOOKS_AT_LINE)  # bytes per second that came in
        self._caught_up: list[float] = []  # bytes per second that came, each time since the last round with this peer
        self._since = 0.0  # loop time from which samples do not count

    @property
    def sending(self) -> float:
        """Seconds that a round takes to send on this peer's line, as others are told; 0: nothing has shown that yet."""
        return float(f"{self._averager.finder.bid(self._target).seconds:.2g}")

    def note_download(self, rate: float) -> bool:
        """So many bytes per second came in while this peer downloaded. Returns whether that shows its line by now."""
        self._downloads.append(rate)
        if len(self._downloads) < LOOKS_AT_LINE or not any(self._downloads):
            return False
        self._note_receiving(max(self._downloads))
        return True

    def note_catching_up(self, rate: float) -> None:
        """It came to where the run was once more, by so many bytes per second. If that was the second time since it
        was in a round, these show its line, where a round takes longer to receive than an epoch lasts."""
        self._caught_up.append(rate)
        if len(self._caught_up) > 1:
            self._note_receiving(max(self._caught_up))

    def note_round(self) -> bool:
        """It is in step, and its samples count. Returns whether it was tried if its line is quick enough for that."""
        self._caught_up.clear()
        tried, self.tries, self._retry = self.tries, False, 0.0
        return tried

    def _note_receiving(self, rate: float) -> None:
        finder = self._averager.finder
        finder.lines.receiving = min(finder.round_bytes / rate, MAX_SECONDS)
        if self._until < math.inf:
            self._until = loop_time() + self._retry  # it has been seen now

    def review(self, group: Group | None, others: Mapping[PeerID, PeerReport], epoch_age: float) -> bool:
        """Decides anew. Returns whether this peer has lost its seat or got it back.

        `group`: the last one of this peer. `others`: those who compute now: a peer that has met nobody goes by what
        they say of their lines and samples per second. `epoch_age`: seconds since the present epoch began: if
        those who have seats do not end it, everybody's samples count.
        """
        finder, lines, link = self._averager.finder, self._averager.finder.lines, self._averager.node.endpoint.rates
        members = group.bids if group is not None else {}
        bids = {peer: bid for peer, bid in members.items() if peer in others or not bid.sends}
        bids |= {p: Bid(seconds=report.sending) for p, report in others.items() if report.sending or p not in bids}
        self.seconds, self.nbytes = finder.seconds_by_limits, finder.round_bytes
        before, self._limit = self._limit, link.lower or math.inf
        # What was seen of this line is old, or was seen under a limit: the next round shows how it is now.
        if loop_time() >= self._until or self._limit > before:
            lines.own = lines.receiving = 0.0
            self._downloads.clear()
            self._caught_up.clear()
            self._until, self.tries = math.inf, True
        own = finder.bid(self._target)
        paces = {peer: report.samples_per_second for peer, report in others.items()}
        seats = lines.seats(bids | {self._peer: own}, self._target, paces)
        reason = seats.unseated.get(self._peer)
        if reason is None and len(self._caught_up) > 1 and lines.receiving > seats.epoch:
            reason = NoSeat(lines.receiving, seats.epoch)
        had, self.lost = self.lost, None
        self._since = loop_time() if had is None else self._since
        if reason is not None and min(epoch_age, loop_time() - self._since) <= seats.overdue:
            seen = own.seconds > self.seconds
            if seen and self._until == math.inf:
                self._retry = min(2 * self._retry, LONGEST_RETRY) or FIRST_RETRY
                self._until = loop_time() + self._retry
            receives = max(lines.receiving, self.nbytes / (link.download.limit or math.inf))
            limit = None if seen else link.lower
            self.lost = SeatLost(reason, self.nbytes, limit, receives <= reason.epoch, self.divided)
        return (had is None) != (self.lost is None)
