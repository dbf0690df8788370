"""How fast the streams of one exchange are, and which of them is plainly too slow for its time.

A stream that falls silent is noticed at once; one that trickles never is silent. What it may take follows from the
round's own rates: once at least half of what runs beside it is done, a stream that by its own rate so far would need
longer than its limit is given up. A slow but honest stream that ends in time is never cut off, and where most are slow,
nobody is: then the round takes longer than its time, and the next one gets more (`core.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from swarmcli.network.identity import PeerID

GRACE = 20.0  # seconds that a sender has in any case; longer than silence is borne, which is told apart from slowness
LOOK = 1.0  # seconds between two looks at a stream
SENDERS = 1 / 3  # of a round's time, for the parts of one sender …
# … and where a member has told the group that its link, or its user's limit, takes longer: it is as slow as it said,
# and nobody is to blame. No more, or whoever tells a crawl would hold up every round to its end.
SLOW_SENDERS = 3 / 5
# For the averages of one reducer, after that. It waits for its slowest sender, who may be slow to it alone: so it is
# not judged before that one must have been given up.
REDUCERS = 1 / 3

MARGIN = 1.5  # times what a round would have needed, for the next one …
MOST_STRETCHED = 16.0  # … up to so many times what was wished

SLOWEST = 128 << 10  # bytes per second that a round without a timeout is expected to make at least …
AT_LEAST = 300.0  # … and the seconds that it has in any case


class LaggedError(Exception):
    """A stream was too slow for its time; the words say how slow."""


class Pace:
    """The streams of one kind at one member: those on which parts come in, or those on which averages do."""

    def __init__(self, streams: int, limit: float, grace: float = GRACE) -> None:
        """`streams`: how many there are, own work beside them counted as one. `limit`: seconds that one may take;
        `grace`: seconds that it has in any case, if the limit is no less."""
        self._streams, self._limit, self._grace = streams, limit, min(grace, limit)
        self._done = 0

    def note_done(self) -> None:
        """One of them has come to its end; what came of it does not matter."""
        self._done += 1

    @asynccontextmanager
    async def keeping_up(self, fraction: Callable[[], float]) -> AsyncIterator[None]:
        """The block is one stream; `fraction` says how much of it has come so far, 0 to 1.

        Raises LaggedError when it is given up.
        """
        try:
            async with asyncio.timeout(None) as deadline:
                watch = _Watch(self, deadline, fraction)
                try:
                    yield
                finally:
                    watch.end()
                    self.note_done()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise LaggedError(watch.words) from None

    def is_too_slow(self, seconds: float, fraction: float) -> bool:
        """Whether a stream that has brought this fraction within so many seconds is to be given up now."""
        if seconds < self._grace or 2 * self._done < self._streams:
            return False
        return seconds / max(fraction, 1e-9) > self._limit


class _Watch:
    """Looks at one stream from time to time, and lets its deadline pass once it is too slow."""

    # A class for the reason that `_Listening` of swarmcli/tasks.py is one: no cycle may keep the memory of the round.

    def __init__(self, pace: Pace, deadline: asyncio.Timeout, fraction: Callable[[], float]) -> None:
        self.words = ""
        self._pace, self._deadline, self._fraction = pace, deadline, fraction
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer = self._loop.call_later(LOOK, self._look)

    def _look(self) -> None:
        seconds, fraction = self._loop.time() - self._began, self._fraction()
        if self._pace.is_too_slow(seconds, fraction):
            self.words = f"it was too slow: {fraction:.0%} of its part in {seconds:.0f} s, when most were done"
            self._deadline.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(LOOK, self._look)

    def end(self) -> None:
        self._timer.cancel()


@dataclass
class Lessons:
    """What a round teaches the next one, whatever became of it.

    doubted   who kept this member waiting in vain, as seen from here and by nobody else's word; how
    lost      those of them with whom the connection broke meanwhile
    needed    seconds that the round would have taken, if it failed for want of time; infinite: hardly anything moved
    """

    doubted: dict[PeerID, str] = field(default_factory=dict)
    needed: float = 0.0
    lost: frozenset[PeerID] = frozenset()

    def add(self, other: Lessons) -> None:
        slow = (self.doubted.keys() - self.lost) | (other.doubted.keys() - other.lost)
        self.doubted |= other.doubted
        self.lost = frozenset(self.doubted.keys() - slow)
        self.needed = max(self.needed, other.needed)


class RoundTime:
    """How long the rounds of one averager may take: as was wished, and longer where they plainly need it.

    A group whose links are too slow for the time would fail again and again. What moved shows how long it takes: the
    next round gets half as much again. A group in which hardly anything moved gets no longer.
    """

    def __init__(self, wished: float | None) -> None:
        self._wished, self._seconds = wished, wished

    @property
    def seconds(self) -> float | None:
        """For the next round; None: no timeout was wished for."""
        return self._seconds

    def learn(self, needed: float, taken: float) -> bool:
        """After a round that took so many seconds. `needed`: see Lessons. Returns whether the next one gets longer."""
        if self._wished is None or self._seconds is None:
            return False
        before = self._seconds
        if 0 < needed < math.inf:
            self._seconds = min(max(before, MARGIN * needed), MOST_STRETCHED * self._wished)
        elif needed == 0:
            self._seconds = max(self._wished, min(before, 2 * MARGIN * taken))
        return self._seconds > before


def usual_time(nbytes: int) -> float:
    """Seconds for a round that has no timeout, over so many bytes: far more than any usual one takes."""
    return AT_LEAST + nbytes / SLOWEST


def of_parts(time: float, senders: int, told: float = 0.0) -> Pace:
    """For what this member's reducer gets, in a round that may take `time` seconds. What this member sends itself
    counts as one of the streams, so that it shows in a group of two that the other one alone is slow.

    `told`: seconds that the round takes by the bandwidths that the members have told; infinite: this member itself is
    the one that is too slow for the time, and judges nobody.
    """
    return Pace(senders + 1, _for_senders(time, told))


def of_averages(time: float, reducers: int, told: float = 0.0) -> Pace:
    """For what this member gets of reducers, its own one included."""
    senders = _for_senders(time, told)
    return Pace(reducers, senders + REDUCERS * time, senders + 2 * LOOK)


def _for_senders(time: float, told: float) -> float:
    return told if told == math.inf else max(SENDERS * time, min(MARGIN * told, SLOW_SENDERS * time))


def needed(seconds: float, fraction: float) -> float:
    """Seconds for the whole, of which this fraction was done in so many; infinite where hardly anything moved."""
    return seconds / fraction if fraction > 1 / 64 else math.inf
