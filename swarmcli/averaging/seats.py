"""Decides for whom a round waits: for members whose samples are worth the time that their lines take to send them.

Each member says how long its line takes (`Bid`) and remembers how long those of others took here (`Lines`). From both
it decides for itself: whether it sends, for whom it waits as a reducer, and, as a leader, who reduces and whose samples
make the epoch. docs/averaging.md, *Seats*, has the rule in words. No input or output here.

    seconds   that a member takes to send what it brings to a round
    pace      samples per second of a member, or of several, while an epoch is computed
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType

from swarmcli.network.identity import PeerID
from swarmcli.recent import Recent

MAX_SECONDS = 1e6  # that a member may say of itself: eleven days
MAX_PEERS = 4096  # whose lines one averager remembers
LEAST = 1e-3  # seconds that any sending counts as, since 0 means that nothing has shown the line
NOISE = 0.5  # seconds of sending that a busy machine or a long distance explains
SLOWER = 2.0  # a member is slow if it takes longer than this many times what the quickest takes …
PATIENT = 5.0  # … or than this many seconds plus SLOWER times the computing of an epoch, if that is less
BACK = 1.5  # times its sending time, for a member whose samples did not count: or it would come and go round by round
TRIAL = 0.1  # of an epoch: so long a round waits for a slow member whose samples never counted, or for an unproven one
UNKNOWN_EPOCH = 5.0  # seconds that an epoch is assumed to take while nobody has seen one
OVERDUE = 3.0  # epochs, and …
OVERDUE_GRACE = 5.0  # … seconds, after which everybody's samples count: those of the seated do not reach the target


@dataclass(frozen=True, slots=True)
class Bid:
    """A member's word about itself. Raises ValueError for numbers that no honest peer has."""

    sends: bool = True  # it has gradients to send; False: it follows, or reduces for others
    seconds: float = 0.0  # that its line takes to send in a round; 0: nothing has shown that yet

    def __post_init__(self) -> None:
        if not 0 <= self.seconds <= MAX_SECONDS:
            raise ValueError(f"seconds of a bid must be between 0 and {MAX_SECONDS:g}, got {self.seconds}")


@dataclass(slots=True)
class LineSeen:
    """The line of another member, as this one saw it."""

    seconds: float = 0.0  # that it took to send the last time, or would have taken; 0: nothing has shown that here
    pace: float = 0.0  # of its samples that counted lately; 0: none did
    counted: bool = True  # its samples counted in the last round, or it has been in none yet


@dataclass(frozen=True, slots=True)
class NoSeat:
    """Why a member's samples cannot count at present."""

    seconds: float  # that it would take to send
    epoch: float  # seconds that an epoch takes without it, rounds included


@dataclass(frozen=True, slots=True)
class Seats:
    """For whom one member waits in a group.

    unseated   member whose samples are not worth the wait → why
    unproven   members whose lines nothing has shown yet, while others' are known
    planned    seconds that sending takes the slowest of all others; 0: unknown
    epoch      seconds that an epoch takes with them, rounds included
    """

    unseated: Mapping[PeerID, NoSeat] = field(default_factory=dict)
    unproven: frozenset[PeerID] = frozenset()
    planned: float = 0.0
    epoch: float = 0.0

    @property
    def overdue(self) -> float:
        """Seconds of an epoch after which everybody's samples count."""
        return OVERDUE * self.epoch + OVERDUE_GRACE

    @property
    def unwaited(self) -> frozenset[PeerID]:
        """Members that reduce nothing, and for whose parts nobody waits."""
        return self.unproven | self.unseated.keys()


def decide(bids: Mapping[PeerID, Bid], target: float, lines: Mapping[PeerID, LineSeen]) -> Seats:
    """Gives seats to all members that are not slow, and then to the quickest slow ones: to as many as make an epoch
    shortest, rounds included.

    `target`: samples that make an epoch. `lines`: what this peer saw of each member; the member's own word can only
    make it slower.
    """
    seen = {peer: lines.get(peer) or LineSeen() for peer, bid in bids.items() if bid.sends}
    seconds = {peer: max(bids[peer].seconds, line.seconds) for peer, line in seen.items()}
    known = [line.pace for line in seen.values() if line.pace > 0]
    mean = statistics.fmean(known) if known else target / UNKNOWN_EPOCH / max(1, len(seen))
    paces = {peer: line.pace or mean for peer, line in seen.items()}
    quickest = min(filter(None, seconds.values()), default=0.0)
    excused = min(SLOWER * quickest, PATIENT + SLOWER * target / math.fsum(paces.values())) if seen else 0.0
    bound = max(NOISE, excused)

    def felt(peer: PeerID) -> float:
        return seconds[peer] * (1.0 if seen[peer].counted else BACK)

    slow = sorted((peer for peer in seen if seconds[peer] > bound), key=lambda peer: (felt(peer), peer))
    if len(slow) == len(bids) == 2:
        slow.sort()  # by id: neither of a pair can tell whose line is slow, and both must decide alike
    quick = len(seen) - len(slow)
    pace = list(accumulate(map(paces.__getitem__, slow), initial=math.fsum(paces[peer] for peer in seen.keys() - slow)))

    def epoch(count: int, time: Callable[[PeerID], float]) -> float:
        """Seconds of an epoch with `count` of the slow members. A lone peer sends to nobody."""
        alone = quick + count == 1 and all(bid.sends for bid in bids.values())
        sending = 0.0 if alone else time(slow[count - 1]) if count else quickest
        return target / pace[count] + sending if quick + count else math.inf

    count = min(range(len(slow) + 1), key=lambda count: epoch(count, felt))
    usual = epoch(count, seconds.__getitem__) if seen else UNKNOWN_EPOCH
    seated = seen.keys() - slow[count:]
    proven = {peer for peer in seated if seconds[peer]}
    most = TRIAL * usual if quick else math.inf
    times = [seconds[peer] if seen[peer].pace else min(seconds[peer], most) for peer in slow[:count]]
    return Seats(
        {peer: NoSeat(seconds[peer], usual) for peer in slow[count:]},
        frozenset(seated - proven) if proven else frozenset(),
        max(times, default=bound if quickest else 0.0),
        usual,
    )


class Lines:
    """One averager's memory of the lines of others."""

    def __init__(self, own: PeerID) -> None:
        # Seconds that this peer took to send in its last round, and that it would take to receive, which is known when
        # slow receiving has spoiled a round, or from downloading a state; 0: nothing has shown that.
        self.own = self.receiving = 0.0
        self._own = own
        self._lines: Recent[PeerID, LineSeen] = Recent(MAX_PEERS)
        self._ended: float | None = None  # loop time of the last round that committed

    def seats(
        self, bids: Mapping[PeerID, Bid], target: float | None, said: Mapping[PeerID, float] = MappingProxyType({})
    ) -> Seats:
        """Decides for whom this peer waits in a group; without a target, for every member. `said`: the paces that
        members claim, for those whose samples never counted."""
        if target is None:
            return Seats()
        lines = {peer: self._lines.get(peer) or LineSeen() for peer in bids}
        return decide(bids, target, {p: replace(line, pace=line.pace or said.get(p, 0.0)) for p, line in lines.items()})

    def note_sending(self, taken: Mapping[PeerID, float], bids: Mapping[PeerID, Bid], limited: float = 0.0) -> None:
        """Remembers the seconds that each sender of a round has `taken` here, this peer itself among them; for a sender
        that was left out, an estimate from the parts that arrived. `bids`: of the group. `limited`: seconds that this
        peer's limits make it need now; they may have changed after its bid."""
        for peer, seconds in taken.items():
            shown = min(max(seconds, LEAST), MAX_SECONDS)
            if peer == self._own:
                self.own = shown
            else:  # the member's own bid, which may come from a limit, or a limit of this peer may explain the time
                explained = max(bids[peer].seconds, bids[self._own].seconds if self._own in bids else 0.0, limited)
                self._line(peer).seconds = shown if shown > SLOWER * explained else 0.0

    def note_committed(self, began: float, now: float, weights: Mapping[PeerID, float]) -> None:
        """A round that began at `began` (loop time) has committed `now`. `weights`: samples that counted, by member."""
        ended, self._ended = self._ended, now
        for peer, line in self._lines.items():
            line.counted = weights.get(peer, 0.0) > 0
        if ended is not None and began > ended:
            for peer, weight in weights.items():
                line, pace = self._line(peer), weight / (began - ended)
                line.pace, line.counted = (line.pace + pace) / 2 if line.pace else pace, True

    def _line(self, peer: PeerID) -> LineSeen:
        line = self._lines[peer] = self._lines.get(peer) or LineSeen()
        return line
