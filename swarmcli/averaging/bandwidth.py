"""How fast each member's line is: a peer measures its own in rounds, claims that, and a leader compares the claims.

A peer sees of its line only what passes, and that is most in those moments of a round in which the other members keep
the line busy. So the fastest eighth of a round counts, in the slower of the two directions. That is a lower bound:
where all other lines are slow, this one cannot show more, and no round could use more of it.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from swarmcli.network.context import Traffic
from swarmcli.network.loop_thread import loop_time

MIN_CLAIM, MAX_CLAIM = 1e3, 125e6  # bytes per second; above a gigabit the processor limits a round, not the line


MOST_ABOVE_MEDIAN = 16.0  # a claim counts as at most this many times the median; a user's figure as 1/16 at least, too
ALIKE = 1.3  # claims within this factor of the median count as the median: measuring is not exact
SHORTEST = 0.2  # seconds; a shorter round shows nothing, and gains nothing from better shares
WINDOWS = 8  # the fastest stretch that counts takes this fraction of a round
SAMPLES = 128  # of one round; when there are this many, every second one is dropped and the tick doubles
FIRST_TICK = 0.02  # seconds between the first samples
LIMITED = 0.6  # of this peer's own limit: a rate above that shows the limit, not the line
STOOD_STILL = 1.0  # seconds by which a sample is late if the process was frozen, or had no processor
RISE, FALL = 0.5, 0.2  # weights, in logarithms, of a new figure that is higher or lower: others may cause a lower one


class LineGauge:
    """Watches the traffic on this peer's connections while its rounds run."""

    def __init__(self, passed: Callable[[], Traffic], limit: Callable[[], float | None] = lambda: None) -> None:
        """`passed` returns the bytes sent and received so far; `limit` the bytes per second that the user allows now,
        in the slower direction, or None for no limit."""
        self._passed, self._limit = passed, limit
        self._estimate: float | None = None  # bytes per second
        self.received = 0.0  # bytes per second that came in at most, over a stretch of the last round; 0: not measured
        # Whether the times of the last round tell of lines: this process ran all along, with the same limit.
        self.shows = True
        self._limited: float | None = None  # the limit as the round began
        self._samples: list[tuple[float, Traffic]] = []
        self._tick = FIRST_TICK
        self._timer: asyncio.TimerHandle | None = None

    @property
    def claim(self) -> float | None:
        """Bytes per second each way that others may count on; None while nothing is known. A limit counts even before
        anything was measured: others take a peer without a claim for the mean, and the limit may be lower."""
        known = [figure for figure in (self._estimate, self._limit()) if figure is not None]
        return min(max(min(known), MIN_CLAIM), MAX_CLAIM) if known else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measures while the block runs a round."""
        self._samples, self._tick = [], FIRST_TICK
        self.received, self.shows, self._limited = 0.0, True, self._limit()
        self._look()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._note()
            if self.shows:
                self._learn()

    def _look(self) -> None:
        self._note()
        if len(self._samples) >= SAMPLES:
            del self._samples[1::2]
            self._tick *= 2
        self._timer = asyncio.get_running_loop().call_later(self._tick, self._look)

    def _note(self) -> None:
        now = loop_time()
        stood_still = self._samples and now - self._samples[-1][0] > 2 * self._tick + STOOD_STILL
        if stood_still or self._limit() != self._limited:
            self.shows = False
        self._samples.append((now, self._passed()))

    def _learn(self) -> None:
        seconds = self._samples[-1][0] - self._samples[0][0]
        if seconds < SHORTEST:
            return
        sent, self.received = fastest_stretch(self._samples, seconds / WINDOWS)
        seen = min(sent, self.received)
        if seen < MIN_CLAIM:
            return  # a round in which next to nothing passed
        limit = self._limit()
        if limit is not None and seen > LIMITED * limit:
            # This shows the limit, not the line: the line's estimate counts again as soon as the limit is gone.
            self._estimate = max(seen, self._estimate) if self._estimate is not None else None
        elif self._estimate is None:
            self._estimate = seen
        else:
            weight = RISE if seen > self._estimate else FALL
            self._estimate *= (seen / self._estimate) ** weight


def fastest_stretch(samples: Sequence[tuple[float, Traffic]], seconds: float) -> tuple[float, float]:
    """The most bytes per second over any stretch of at least `seconds`: sent, and received."""
    sent = received = 0.0
    start = 0
    for time, volume in samples:
        while start + 1 < len(samples) and time - samples[start + 1][0] >= seconds:
            start += 1
        begun, before = samples[start]
        if time - begun >= seconds:
            sent = max(sent, (volume.sent - before.sent) / (time - begun))
            received = max(received, (volume.received - before.received) / (time - begun))
    return sent, received


def comparable(given: Sequence[float | None], measured: Sequence[float | None]) -> list[float]:
    """Returns one bandwidth for each member of a group; they are relative to each other. 0: it declines to reduce.

    `measured`: what each member has measured, in bytes per second, or None. It counts within plausible bounds; a member
    that has measured nothing counts as the mean of those that have.
    `given`: what each member's user has set, or None. It replaces what that member measured. Such figures are relative
    to each other, and their median counts as that mean: one huge figure makes the other members no slower.
    """
    claims = [None if own is not None else claim for own, claim in zip(given, measured, strict=True)]
    believed, bound = _plausible(claims), MOST_ABOVE_MEDIAN
    known = [figure for figure in believed if figure is not None]
    usual = statistics.fmean(known) if known else 1.0
    wishes = [own for own in given if own]
    unit = statistics.median_low(wishes) if wishes else 1.0

    def figure(own: float | None, claim: float | None) -> float:
        if own is None:
            return usual if claim is None else claim
        return usual * min(max(own / unit, 1 / bound), bound) if own else 0.0

    return [figure(own, claim) for own, claim in zip(given, believed, strict=True)]


def _plausible(measured: Sequence[float | None]) -> list[float | None]:
    claims = [min(claim, MAX_CLAIM) for claim in measured if claim]
    middle = statistics.median(claims) if claims else 0.0

    def believed(claim: float | None) -> float | None:
        if not claim:
            return None
        if middle / ALIKE < claim < middle * ALIKE:
            return middle
        return max(MIN_CLAIM, min(claim, MAX_CLAIM, MOST_ABOVE_MEDIAN * middle))

    return [believed(claim) for claim in measured]
