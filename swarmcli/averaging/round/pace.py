"""How fast the streams of one exchange are, and which of them is plainly too slow for its time.

A stream that falls silent is noticed at once; one that trickles never is silent. Its time follows from the time that
the streams of this group should take, and that the other streams took. Once at least half of these have ended well, a
stream that has had its time, and by its present rate does not end soon, is given up. A slow but honest stream that ends
in time is never cut off, and where most are slow, none is: then the round takes longer than its time, and the next one
gets more (`core.py`).
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import deque
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.rates import LinkRates


@dataclass(frozen=True, slots=True)
class PaceOptions:
    """How long streams and rounds may take. A stream's *usual* time is what the streams of its round should take."""

    times: float = 3.0  # its usual time, for a stream that turns slow …
    least: float = 1.0  # … and at least so many seconds …
    trips: float = 8.0  # … and so many round trips on top …
    most_trips: float = 5.0  # … which are at most so many seconds
    last: float = 4 / 3  # times that, for a stream that by its present rate ends by then
    waited: float = 1 / 3  # of that, on top for a reducer after others are done: it may have waited for a slow sender
    for_senders: float = 0.45  # of the round's time at most: senders come first, since a reducer may wait for one …
    for_reducers: float = 0.6  # … and for reducers
    calm: float = 1 / 3  # of the round's time, for a sender whose usual time is unknown
    looks: int = 12  # at each stream, in the time that it has; the bytes between four of them are its present rate
    modest: float = 50e6  # bytes per second that a machine encrypts, checks and adds up while much else runs on it
    stalled: float = 5.0  # seconds without a byte, after which a member that knows of a commit waits for no other
    quick: float = 8.0  # seconds at least, for a round whose members have all begun, and …
    unusual: float = 16.0  # … times what the last ones took: by then a line has turned slow
    margin: float = 1.5  # times what a round would have needed, for the next one …
    most_stretched: float = 16.0  # … up to so many times the user's timeout
    slowest: float = 128 << 10  # bytes per second that a round without a timeout makes at least …
    at_least: float = 300.0  # … and the seconds that it has in any case


PACE = PaceOptions()


class LaggedError(Exception):
    """A stream was too slow for its time; the words say how slow."""


class Tempo:
    """How long the streams of one exchange may take at one member, by its links; and the members that took longer."""

    def __init__(
        self,
        time: float,
        planned: float | None,
        round_trip: float,
        nbytes: int,
        rates: LinkRates,
        options: PaceOptions = PACE,
    ) -> None:
        """`time`: seconds that the round may take. `planned`: seconds that the streams should take; None: unknown.
        `round_trip`: the slowest one before the streams began, which jam the link of a member that turns slow.
        `nbytes`: of this member's traffic either way, at the `rates` that its user allows."""
        self.time, self.options = time, options
        self.slow: dict[int, str] = {}  # members whose parts came too slowly, and how: so will their averages
        # By the clock of the loop: when a member was seen to have begun, and the last of all senders.
        self.begun: dict[int, float] = {}
        self.sending: dict[int, float] = {}  # seconds that members took to send, this one among them; see Lessons
        self.all_begun = math.inf
        self.quickly = math.inf  # seconds that the round may take from then, see RoundTime
        self.deadline: asyncio.Timeout | None = None  # of the round
        self.unwaited: Set[int] = frozenset()  # members for whose parts nobody waits …
        self.grace = math.inf  # … longer than so many seconds
        self.took = list[float]()  # seconds from then, of the senders that have brought all of their parts
        self.half_averaged = asyncio.Event()  # half of the reducers are done
        self._planned = options.calm * time / options.times if planned is None else planned
        self._least = options.least + min(options.trips * round_trip, options.most_trips)
        self._nbytes, self._rates = nbytes, rates
        # Senders that may come another way, if they fall silent, once the connection is known to be lost.
        self.indirect: Set[int] = frozenset()

    def note_all_begun(self) -> None:
        """Nobody computes any more: from here on the round takes as long as the lines do."""
        self.all_begun = loop_time()
        if self.deadline is not None and not self.deadline.expired() and (ends := self.deadline.when()) is not None:
            self.deadline.reschedule(min(ends, self.all_begun + self.quickly))

    @property
    def patience(self) -> float:
        """Seconds for one sender."""
        usual = statistics.median(self.took) if self.took else 0.0
        most = self.options.for_senders * self.time
        return min(max(self.options.times * max(self._planned, usual), self._least), most)

    @property
    def look_interval(self) -> float:
        """Seconds between two looks at a stream."""
        return self.patience / self.options.looks

    @property
    def hampered(self) -> bool:
        """Whether this member itself is slow: then it judges nobody."""
        return self._nbytes / (self._rates.lower or math.inf) > self.patience / 2


class Pace:
    """The streams of one kind at one member: parts come in on them, or averages do."""

    def __init__(self, tempo: Tempo, streams: int, *, averages: bool = False) -> None:
        """`streams`: how many there are, with all other signs that this member is not slow itself."""
        self.tempo = tempo
        self._averages, self._streams, self._done, self._half = averages, streams, 0, math.inf

    def note_end(self, *, well: bool = True) -> None:
        """A stream has ended. One that broke off, or was given up, shows nothing of this member's link."""
        self._done += well
        self._streams -= not well
        if 2 * self._done >= self._streams:
            self._half = min(self._half, loop_time())
            if self._averages:
                self.tempo.half_averaged.set()

    @asynccontextmanager
    async def keeping_up(self, member: int, fraction: Callable[[], float]) -> AsyncIterator[None]:
        """The block is the stream of a member; `fraction` says how much of it has arrived so far, 0 to 1.

        Raises LaggedError when the stream is given up.
        """
        try:
            async with asyncio.timeout(None) as deadline:
                watch, well = _Watch(self, member, deadline, fraction), False
                try:
                    yield
                    well = True
                finally:
                    watch.end()
                    self.note_end(well=well)
                if not self._averages:
                    since = max(watch.began, self.tempo.all_begun)
                    self.tempo.took.append(max(0.0, loop_time() - since))
        except TimeoutError:
            if not deadline.expired():
                raise
            raise LaggedError(watch.words) from None

    def verdict(self, member: int, began: float, now: float, fraction: float, rate: float) -> str:
        """Why a stream is to be given up now, or "". `rate`: the fraction that arrives per second, at present."""
        tempo, since, times = self.tempo, max(began, self.tempo.all_begun), 1.0
        options = tempo.options
        if now < self._half or tempo.hampered or (rate <= 0 and not self._averages and member in tempo.indirect):
            return ""
        if self._averages:
            since = max(began, self._half, tempo.begun.get(member, math.inf))
            times = options.last + options.waited
        patience = min(times * tempo.patience, options.for_reducers * tempo.time)
        if not self._averages and member in tempo.unwaited:
            patience = min(patience, tempo.grace)
        late = now - since >= patience and now - since + (1 - fraction) / max(rate, 1e-9) > options.last * patience
        words = f"it was too slow: {fraction:.0%} of its part in {now - began:.0f} s, when most were done"
        return tempo.slow.get(member, words if late else "")


class _Watch:
    """Looks at one stream from time to time, and lets its deadline pass once it is too slow."""

    # A class for the reason that `_Listening` of swarmcli/tasks.py is one: no cycle may keep the memory of the round.

    def __init__(self, pace: Pace, member: int, deadline: asyncio.Timeout, fraction: Callable[[], float]) -> None:
        self.words = ""
        self._pace, self._member, self._deadline, self._fraction = pace, member, deadline, fraction
        self._loop = asyncio.get_running_loop()
        self.began = self._loop.time()
        self._seen = deque([(self.began, 0.0)], maxlen=pace.tempo.options.looks // 3)
        self._wait()

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._pace.tempo.look_interval, self._look)

    def _look(self) -> None:
        now, fraction, (then, before) = self._loop.time(), min(1.0, self._fraction()), self._seen[0]
        self._seen.append((now, fraction))
        rate = (fraction - before) / max(now - then, 1e-9)
        self.words = self._pace.verdict(self._member, self.began, now, fraction, rate)
        if self.words:
            self._deadline.reschedule(now)
        else:
            self._wait()

    def end(self) -> None:
        self._timer.cancel()


@dataclass
class Lessons:
    """The lessons of a round for the next one, however it ended.

    doubted   member that kept this one waiting in vain → how; by no other member's word
    lost      doubted members whose connection broke meanwhile
    failed    reducers whose averages did not come here
    needed    seconds that the round would have taken, if it failed for want of time; infinite: hardly anything moved
    sending   seconds that each sender took to bring its parts here, and this member to the others; for a sender that
              was left out, the seconds that it would have taken
    """

    doubted: dict[PeerID, str] = field(default_factory=dict)
    needed: float = 0.0
    lost: frozenset[PeerID] = frozenset()
    sending: dict[PeerID, float] = field(default_factory=dict)
    failed: frozenset[PeerID] = frozenset()

    def add(self, other: Lessons) -> None:
        slow = (self.doubted.keys() - self.lost) | (other.doubted.keys() - other.lost)
        self.doubted |= other.doubted
        self.lost = frozenset(self.doubted.keys() - slow)
        self.needed, self.failed = max(self.needed, other.needed), self.failed | other.failed
        for peer, seconds in other.sending.items():
            self.sending[peer] = self.sending.get(peer, 0.0) + seconds


class RoundTime:
    """How long the rounds of one averager may take: the user's timeout, and longer where they plainly need it.

    A group whose links are too slow for the time would fail again and again. The bytes that moved show how long it
    takes: the next round gets half as much again. A group in which hardly anything moved gets no longer.
    """

    def __init__(self, timeout: float | None, options: PaceOptions = PACE) -> None:
        self._timeout, self._options = timeout, options
        self.seconds = timeout  # for the next round; None: the user set no timeout
        self._needed = 0.0  # seconds, with a margin, by the last round that failed for want of time

    def of(self, planned: float) -> float | None:
        """For a round in which sending should take so many seconds: enough for a sender to take three times that."""
        if self._timeout is None or self.seconds is None:
            return None
        options = self._options
        wanted = planned * options.times / options.for_senders
        return max(self.seconds, min(wanted, options.most_stretched * self._timeout))

    def quickly(self, usual: float) -> float:
        """Seconds for a round once all members have begun, where the last ones took `usual`; 0: nobody knows."""
        options = self._options
        return max(options.quick, options.unusual * usual, self._needed) if usual else math.inf

    def learn(self, needed: float, taken: float) -> bool:
        """After a round that took so many seconds. `needed`: see Lessons. Returns whether the next one gets longer."""
        if needed < math.inf:
            self._needed = self._options.margin * (needed or min(2 * taken, self._needed))
        if self._timeout is None or self.seconds is None:
            return False
        before, options = self.seconds, self._options
        if 0 < needed < math.inf:
            self.seconds = min(max(before, options.margin * needed), options.most_stretched * self._timeout)
        elif needed == 0:
            self.seconds = max(self._timeout, min(before, 2 * options.margin * taken))
        return self.seconds > before


def longest_sending(timeout: float) -> float:
    """Seconds that sending may take in rounds with this timeout: a slower one never ends."""
    return PACE.for_senders * PACE.most_stretched * timeout


def usual_time(nbytes: int) -> float:
    """Seconds for a round that has no timeout, over so many bytes: far more than a usual round takes."""
    return PACE.at_least + nbytes / PACE.slowest


def needed(seconds: float, fraction: float) -> float:
    """Seconds for the whole, if this fraction took `seconds`; infinite where hardly anything moved."""
    return seconds / fraction if fraction > 1 / 64 else math.inf
