"""How fast the streams of one exchange are, and which of them is plainly too slow for its time.

A stream that falls silent is noticed at once; one that trickles never is silent. What it may take follows from what the
streams of this group should take, and from what those beside it took. Once at least half of these have ended well, one
that has had its time, and by its present rate is not done soon, is given up. A slow but honest stream that ends in
time is never cut off, and where most are slow, nobody is: then the round takes longer than its time, and the next one
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
from swarmcli.network.rates import LinkRates

TIMES = 3.0  # what the streams of a round should take, for one that turns slow …
LEAST, TRIPS, MOST_TRIPS = 1.0, 8.0, 5.0  # … and at least so many seconds and round trips (up to the last, in seconds)
LAST = 4 / 3  # times that, for a stream that by its present rate is done by then
# The same for a reducer after others are done: it may wait for a sender that is slow to it alone, and then has to give
# away what it waited with.
AVERAGES = LAST + 1 / TIMES
# Of a round's time, at most: senders come first, for the same reason. And for a sender where nothing tells what it
# should take.
FOR_SENDERS, FOR_REDUCERS, CALM = 0.45, 0.6, 1 / 3
LOOKS = 12  # at each stream, in the time that it has; what has come between four of them is its present rate
MODEST = 50e6  # bytes per second that a machine encrypts, checks and adds up while much else runs on it

MARGIN = 1.5  # times what a round would have needed, for the next one …
MOST_STRETCHED = 16.0  # … up to so many times what was wished

SLOWEST = 128 << 10  # bytes per second that a round without a timeout is expected to make at least …
AT_LEAST = 300.0  # … and the seconds that it has in any case


class LaggedError(Exception):
    """A stream was too slow for its time; the words say how slow."""


class Tempo:
    """How long the streams of one exchange may take at one member, by what is known of links; and who took longer."""

    def __init__(self, time: float, planned: float | None, round_trip: float, nbytes: int, rates: LinkRates) -> None:
        """`time`: seconds that the round may take. `planned`: what the streams should; None: nobody knows.
        `round_trip`: the slowest one before they began, which jam the link of whoever turns slow. `nbytes`: what passes
        this member's link either way, at the `rates` that its user allows."""
        self.time = time
        self.slow: dict[int, str] = {}  # members whose parts came too slowly, and how: so will their averages
        # By the clock of the loop: when a member was seen to have begun, and the last of all senders.
        self.begun: dict[int, float] = {}
        self.sending: dict[int, float] = {}  # seconds that members took to send, this one among them; see Lessons
        self.all_begun = math.inf
        self.took = list[float]()  # seconds from then, of the senders that have brought all of their parts
        self._planned = CALM * time / TIMES if planned is None else planned
        self._least = LEAST + min(TRIPS * round_trip, MOST_TRIPS)
        self._nbytes, self._rates = nbytes, rates
        # Senders that may come another way, if they fall silent, once the connection is known to be lost.
        self.indirect: Set[int] = frozenset()

    @property
    def patience(self) -> float:
        """Seconds for one sender."""
        usual = statistics.median(self.took) if self.took else 0.0
        return min(max(TIMES * max(self._planned, usual), self._least), FOR_SENDERS * self.time)

    @property
    def hampered(self) -> bool:
        """Whether it is this member itself that is slow, and judges nobody."""
        return self._nbytes / (self._rates.lower or math.inf) > self.patience / 2


class Pace:
    """The streams of one kind at one member: those on which parts come in, or those on which averages do."""

    def __init__(self, tempo: Tempo, streams: int, *, averages: bool = False) -> None:
        """`streams`: how many there are, with what else shows that this member is not slow itself."""
        self.tempo = tempo
        self._averages, self._streams, self._done, self._half = averages, streams, 0, math.inf

    def note_end(self, *, well: bool = True) -> None:
        """One of them has come to its end. One that broke off, or was given up, shows nothing of this member's link."""
        self._done += well
        self._streams -= not well
        if 2 * self._done >= self._streams:
            self._half = min(self._half, asyncio.get_running_loop().time())

    @asynccontextmanager
    async def keeping_up(self, member: int, fraction: Callable[[], float]) -> AsyncIterator[None]:
        """The block is the stream of a member; `fraction` says how much of it has come so far, 0 to 1.

        Raises LaggedError when it is given up.
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
                    self.tempo.took.append(max(0.0, asyncio.get_running_loop().time() - since))
        except TimeoutError:
            if not deadline.expired():
                raise
            raise LaggedError(watch.words) from None

    def verdict(self, member: int, began: float, now: float, fraction: float, rate: float) -> str:
        """Why a stream is to be given up now, or "". `rate`: of what there is, per second, at present."""
        tempo, since, times = self.tempo, max(began, self.tempo.all_begun), 1.0
        if now < self._half or tempo.hampered or (rate <= 0 and not self._averages and member in tempo.indirect):
            return ""
        if self._averages:
            since, times = max(began, self._half, tempo.begun.get(member, math.inf)), AVERAGES
        patience = min(times * tempo.patience, FOR_REDUCERS * tempo.time)
        late = now - since >= patience and now - since + (1 - fraction) / max(rate, 1e-9) > LAST * patience
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
        self._seen = deque([(self.began, 0.0)], maxlen=LOOKS // 3)
        self._wait()

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._pace.tempo.patience / LOOKS, self._look)

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
    """What a round teaches the next one, whatever became of it.

    doubted   who kept this member waiting in vain, as seen from here and by nobody else's word; how
    lost      those of them with whom the connection broke meanwhile
    failed    reducers whose averages did not come here
    needed    seconds that the round would have taken, if it failed for want of time; infinite: hardly anything moved
    sending   seconds that each took to bring its parts here, as this member its own to the others; of one that was
              left out, what it would have taken
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
    """How long the rounds of one averager may take: as was wished, and longer where they plainly need it.

    A group whose links are too slow for the time would fail again and again. What moved shows how long it takes: the
    next round gets half as much again. A group in which hardly anything moved gets no longer.
    """

    def __init__(self, wished: float | None) -> None:
        self._wished = wished
        self.seconds = wished  # for the next round; None: no timeout was wished for

    def of(self, planned: float) -> float | None:
        """For a round in which sending should take so many seconds: enough for a sender to take three times that."""
        if self._wished is None or self.seconds is None:
            return None
        return max(self.seconds, min(planned * TIMES / FOR_SENDERS, MOST_STRETCHED * self._wished))

    def learn(self, needed: float, taken: float) -> bool:
        """After a round that took so many seconds. `needed`: see Lessons. Returns whether the next one gets longer."""
        if self._wished is None or self.seconds is None:
            return False
        before = self.seconds
        if 0 < needed < math.inf:
            self.seconds = min(max(before, MARGIN * needed), MOST_STRETCHED * self._wished)
        elif needed == 0:
            self.seconds = max(self._wished, min(before, 2 * MARGIN * taken))
        return self.seconds > before


def longest_sending(wished: float) -> float:
    """Seconds that sending may take where a round is wished to take so many: a slower one never ends."""
    return FOR_SENDERS * MOST_STRETCHED * wished


def usual_time(nbytes: int) -> float:
    """Seconds for a round that has no timeout, over so many bytes: far more than any usual one takes."""
    return AT_LEAST + nbytes / SLOWEST


def needed(seconds: float, fraction: float) -> float:
    """Seconds for the whole, of which this fraction was done in so many; infinite where hardly anything moved."""
    return seconds / fraction if fraction > 1 / 64 else math.inf
