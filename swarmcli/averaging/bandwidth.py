"""How much each member's link can carry: measured here in past rounds, claimed, and made comparable in a group.

A link is only as fast as it was seen to be, and it is seen at its fastest in those moments of a round in which the
others keep it busy. So the fastest eighth of a round counts, in the slower of the two directions. That is a lower
bound: where all other links are slow, no link can show more, and nothing depends on it either.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from swarmcli.network.context import Traffic
from swarmcli.network.loop_thread import loop_time

MIN_CLAIM, MAX_CLAIM = 1e3, 125e6  # bytes per second; beyond a gigabit it is the processor that limits a round


MOST_ABOVE_MEDIAN = 16.0  # times the median, for a claim at most; and a user's figure at least 1/16 of it
ALIKE = 1.3  # claims within this factor of the median count as the median: measuring is not exact
SHORTEST = 0.2  # seconds; a shorter round says nothing, and gains nothing from better shares
WINDOWS = 8  # per round; the fastest one counts
SAMPLES = 128  # kept of one round; then every second one is dropped
FIRST_TICK = 0.02  # seconds between the first samples
LIMITED = 0.6  # of this peer's own limit: a faster rate was slowed down by it
STOOD_STILL = 1.0  # seconds beyond a tick: this process was frozen, or had no processor; no line shows itself then
RISE, FALL = 0.5, 0.2  # weight of a new figure that is higher, in logarithms; a lower one may be due to the others


class LinkGauge:
    """Watches the traffic on this peer's connections while its rounds run."""

    def __init__(self, passed: Callable[[], Traffic], limit: Callable[[], float | None] = lambda: None) -> None:
        """`passed`: the bytes sent and received so far. `limit`: bytes per second that this peer's user allows now, in
        the slower direction; None: no limit."""
        self._passed, self._limit = passed, limit
        self._estimate: float | None = None  # bytes per second
        self.received = 0.0  # bytes per second that came in the last round, at its fastest; 0: next to nothing did
        # Whether the times of the last round are those of lines: this process ran all along, with the same limit.
        self.shows = True
        self._limited: float | None = None  # the limit as the round began
        self._samples: list[tuple[float, Traffic]] = []
        self._tick = FIRST_TICK
        self._timer: asyncio.TimerHandle | None = None

    @property
    def claim(self) -> float | None:
        """Bytes per second each way that others may count on; None while nothing is known. A limit counts at once,
        also before anything was measured: others take a peer without a claim for the mean, and it may be slower."""
        known = [figure for figure in (self._estimate, self._limit()) if figure is not None]
        return min(max(min(known), MIN_CLAIM), MAX_CLAIM) if known else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A round runs in this block."""
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
            # The limit was seen, not the link: the link's estimate counts again as soon as the limit is gone.
            self._estimate = max(seen, self._estimate) if self._estimate is not None else None
        elif self._estimate is None:
            self._estimate = seen
        else:
            weight = RISE if seen > self._estimate else FALL
            self._estimate *= (seen / self._estimate) ** weight


def fastest_stretch(samples: Sequence[tuple[float, Traffic]], seconds: float) -> tuple[float, float]:
    """The most bytes per second over any stretch of at least so many seconds, sent and received."""
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
    """One bandwidth for each member of a group, relative to each other.

    A member's measured figure counts, within plausible bounds; a member that has measured nothing is taken for the mean
    of the others. A user's figure replaces that member's own alone: such figures are relative to each other, and the
    median of them stands for that mean. So no member's word, however large, changes how others compare. 0: the member
    declines to reduce.
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
