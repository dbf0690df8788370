"""How fast the streams of one exchange are, and which of them is plainly too slow for its time.

A stream that falls silent is noticed soon; one that trickles is never silent. Its time follows from the time that the
streams of this group should take, and that the other streams took. Once at least half of the streams have ended well, a
stream that has had its time, and by its rate does not end soon, is given up. A slow but honest stream that ends in time
is never cut off. If most are slow, none is cut off: then the round does not end within its time, and the next one gets
more (`round_time`).
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time

# The time that a stream may take. Its *usual* time is what the streams of its round should take.
TIMES = 3.0  # times its usual time, …
LEAST = 1.0  # … but at least this many seconds, …
TRIPS = 8.0  # … plus this many round trips, …
MOST_TRIPS = 5.0  # … which count as this many seconds at most
LAST = 4 / 3  # times that, for a stream that by its rate ends by then
WAITED = 1 / 3  # of that more for a reducer, after others are done: it may have waited for a slow sender
FOR_SENDERS = 0.45  # of the round's time, for a sender at most: a reducer may have to wait for it …
FOR_REDUCERS = 0.6  # … and for a reducer
CALM = 1 / 3  # of the round's time, for a sender whose usual time is unknown
LOOKS = 12  # at each stream, in the time that it has
MODEST = 50e6  # bytes per second that a machine encrypts, checks and adds up while much else runs on it
STALLED = 5.0  # seconds without a byte, after which a member that knows of a commit waits for nobody

# The time that a round may take.
QUICK = 8.0  # least seconds for a round whose members have all begun, and …
UNUSUAL = 16.0  # … times what the last rounds took: beyond that a line has turned slow
MARGIN = 1.5  # times what sending would have taken in a round that failed, for the next one
MOST_STRETCHED = 16.0  # times the user's timeout, at most
SLOWEST = 128 << 10  # bytes per second by which the time of a round without a timeout is counted …
AT_LEAST = 300.0  # … plus this many seconds
HARDLY = 64  # times as long as the round took: a stream that needs more may as well be dead, and more time is no cure


class LaggedError(Exception):
    """A stream was too slow for its time; the words say how slow."""


class Tempo:
    """How long the streams of one exchange may take at one member, and the members that took longer."""

    def __init__(self, time: float, planned: float | None, round_trip: float) -> None:
        """`time`: seconds that the round may take. `planned`: seconds that the streams should take; None: unknown.
        `round_trip`: seconds of the slowest one, measured before the streams began: they jam the line of a member that
        turns slow."""
        self.time = time
        self.slow: dict[int, str] = {}  # member whose parts came too slowly → how slowly: so will its averages
        self.begun: dict[int, float] = {}  # member → loop time when it was seen to take part, or gave no answer
        self.sending: dict[int, float] = {}  # member, this one too → seconds that it took to send; see Lessons
        self.all_begun = math.inf  # loop time when the last sender had begun
        self.quickly = math.inf  # seconds that the round may take from then on
        self.deadline: asyncio.Timeout | None = None  # of the round
        self.unwaited: Set[int] = frozenset()  # members for whose parts nobody waits …
        self.grace = math.inf  # … longer than this many seconds
        self.took = list[float]()  # seconds since all had begun, of each sender that has brought all of its parts
        self.half_averaged = False  # half of the reducers are done: nobody still computes
        self._planned = CALM * time / TIMES if planned is None else planned
        self._least = LEAST + min(TRIPS * round_trip, MOST_TRIPS)

    def note_all_begun(self) -> None:
        """Nobody computes any more: from here on the round takes as long as the lines do."""
        self.all_begun = loop_time()
        if self.deadline is not None and not self.deadline.expired() and (ends := self.deadline.when()) is not None:
            self.deadline.reschedule(min(ends, self.all_begun + self.quickly))

    @property
    def soonest(self) -> float:
        """Seconds for which every reducer waits for a sender with a seat."""
        return max(LEAST, self._planned)

    @property
    def patience(self) -> float:
        """Seconds that one sender may take."""
        usual = statistics.median(self.took) if self.took else 0.0
        return min(max(TIMES * max(self._planned, usual), self._least), FOR_SENDERS * self.time)


class Pace:
    """The streams of one kind at one member: parts come in on them, or averages do."""

    def __init__(self, tempo: Tempo, streams: int, *, averages: bool = False) -> None:
        """`streams`: how many there are, plus all other signs that this member itself is not slow. `averages`: averages
        come in on them."""
        self.tempo = tempo
        self._averages, self._streams, self._done, self._half = averages, streams, 0, math.inf

    def note_end(self, *, well: bool = True) -> None:
        """A stream has ended. One that broke off, or was given up, shows nothing of this member's line."""
        self._done += well
        self._streams -= not well
        if 2 * self._done >= self._streams:
            self._half = min(self._half, loop_time())
            self.tempo.half_averaged |= self._averages

    @asynccontextmanager
    async def keeping_up(self, member: int, fraction: Callable[[], float]) -> AsyncIterator[None]:
        """The block is the stream of a member; `fraction` says how much of it has arrived so far, 0 to 1.

        Raises LaggedError when the stream is given up.
        """
        began, well = loop_time(), False
        try:
            async with asyncio.timeout(None) as deadline:
                # Not `beside`: a group of errors would hold the memory of the round.
                watching = asyncio.create_task(self._watch(member, fraction, deadline))
                try:
                    yield
                    well = True
                finally:
                    watching.cancel()
                    self.note_end(well=well)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise LaggedError(watching.result()) from None
        if not self._averages:
            self.tempo.took.append(max(0.0, loop_time() - max(began, self.tempo.all_begun)))

    async def _watch(self, member: int, fraction: Callable[[], float], deadline: asyncio.Timeout) -> str:
        """Looks at a stream from time to time, until it is too slow. Returns how slow."""
        began, words = loop_time(), ""
        while not words:
            await asyncio.sleep(self.tempo.patience / LOOKS)
            words = self.verdict(member, began, loop_time(), min(1.0, fraction()))
        deadline.reschedule(loop_time())
        return words

    def verdict(self, member: int, began: float, now: float, fraction: float) -> str:
        """Why a stream is to be given up now, or "". `began`, `now`: loop times. `fraction`: that has arrived of it."""
        tempo, since, patience = self.tempo, max(began, self.tempo.all_begun), self.tempo.patience
        if now < self._half:
            return ""
        if self._averages:
            since = max(began, self._half, tempo.begun.get(member, math.inf))
            patience *= LAST + WAITED
        patience = min(patience, FOR_REDUCERS * tempo.time)
        if not self._averages and member in tempo.unwaited:
            patience = min(patience, tempo.grace)
        late = now - since >= patience and now - since > LAST * patience * fraction
        words = f"it was too slow: {fraction:.0%} of its part in {now - began:.0f} s, when most were done"
        return tempo.slow.get(member, words if late else "")


@dataclass
class Lessons:
    """What a round teaches for the next one, however it ended.

    suspects   member that kept this one waiting in vain → how; by no other member's word
    lost       suspects whose connections broke meanwhile
    failed     reducers whose averages did not come here
    elsewhere  whether each of these, as some other member says, failed there as well
    sending    seconds that each sender took to bring its parts here, and this member to the others; for a sender that
               was left out, and a reducer that was too slow, the seconds that it would have taken
    broke      whether a connection with a reducer broke here: what came in tells nothing of this member's line
    cut        senders that were lost with their streams: they have withheld nothing on purpose
    """

    suspects: dict[PeerID, str] = field(default_factory=dict)
    lost: frozenset[PeerID] = frozenset()
    sending: dict[PeerID, float] = field(default_factory=dict)
    failed: frozenset[PeerID] = frozenset()
    elsewhere: bool = False
    broke: bool = False
    cut: frozenset[PeerID] = frozenset()

    def add(self, other: Lessons) -> None:
        slow = (self.suspects.keys() - self.lost) | (other.suspects.keys() - other.lost)
        self.suspects |= other.suspects
        self.lost = frozenset(self.suspects.keys() - slow)
        self.failed |= other.failed
        self.broke |= other.broke
        self.cut |= other.cut
        for peer, seconds in other.sending.items():
            self.sending[peer] = self.sending.get(peer, 0.0) + seconds

    def slowest(self, seconds: float) -> float:
        """Seconds that sending takes the slowest member, without reducers that failed. `seconds`: that the failed round
        took."""
        came = (each for peer, each in self.sending.items() if peer not in self.failed)
        return max((each for each in came if each < HARDLY * seconds), default=0.0)


def round_time(timeout: float | None, sending: float) -> float | None:
    """Seconds for a round in which sending should take `sending`: the user's `timeout`, or more for a group whose lines
    are too slow for that, and which would fail again and again. None: the user set none."""
    return timeout and max(timeout, min(TIMES * sending / FOR_SENDERS, MOST_STRETCHED * timeout))


def quickly(usual: float, sending: float) -> float:
    """Seconds for a round once all members have begun. `usual`: seconds that the last rounds took; 0: unknown, then
    there is no bound. `sending`: seconds that sending would have taken in the last round, if that failed."""
    return max(QUICK, UNUSUAL * usual, MARGIN * sending) if usual else math.inf


def longest_sending(timeout: float) -> float:
    """Most seconds that sending may take in rounds with this timeout: slower rounds never end."""
    return FOR_SENDERS * MOST_STRETCHED * timeout


def usual_time(nbytes: int) -> float:
    """Seconds for a round of `nbytes` that has no timeout: far more than a usual round takes."""
    return AT_LEAST + nbytes / SLOWEST
