"""How much each member's link can carry: measured here in past rounds, claimed, and made comparable in a group.

A link is only as fast as it was seen to be, and it is seen at its fastest in those moments of a round in which the
others keep it busy. So what counts is the fastest eighth of a round, in the slower of the two directions. That is a
lower bound: where everyone else is slow, nobody can show more, and nothing depends on it either.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from swarmcli.network.context import Traffic

MIN_CLAIM, MAX_CLAIM = 1e3, 125e6  # bytes per second; beyond a gigabit it is the processor that limits a round
# No claim counts more than so many times the median of its group, and what a user gave no less than that part of it …
MOST_ABOVE_MEDIAN = 16.0
ALIKE = 1.3  # … and claims that differ from it by less than this factor count as the median: measuring is not exact

_SHORTEST = 0.2  # seconds; a shorter round says nothing, and gains nothing from better shares
_WINDOWS = 8  # per round
_SAMPLES = 128  # kept of one round; then every second one is dropped
_FIRST_TICK = 0.02  # seconds between the first samples
_LIMITED = 0.6  # of this peer's own limit: what goes faster was slowed down by it
_RISE, _FALL = 0.5, 0.2  # weight of a new figure, in logarithms; a slower one may be due to the others


class LinkGauge:
    """Watches what passes over this peer's connections while its rounds run."""

    def __init__(self, passed: Callable[[], Traffic], limit: Callable[[], float | None] = lambda: None) -> None:
        """`passed`: the bytes sent and received so far. `limit`: bytes per second that this peer's user allows now, in
        the slower direction; None: no limit."""
        self._passed, self._limit = passed, limit
        self._estimate: float | None = None  # bytes per second
        self._samples: list[tuple[float, Traffic]] = []
        self._tick = _FIRST_TICK
        self._timer: asyncio.TimerHandle | None = None

    @property
    def claim(self) -> float | None:
        """Bytes per second each way that others may count on; None while nothing is known. A limit counts at once,
        also before anything was measured: whoever knows nothing is taken for the mean, which it may not be."""
        known = [figure for figure in (self._estimate, self._limit()) if figure is not None]
        return min(max(min(known), MIN_CLAIM), MAX_CLAIM) if known else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A round runs in this block."""
        self._samples, self._tick = [], _FIRST_TICK
        self._look()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._note()
            self._learn()

    def _look(self) -> None:
        self._note()
        if len(self._samples) >= _SAMPLES:
            del self._samples[1::2]
            self._tick *= 2
        self._timer = asyncio.get_running_loop().call_later(self._tick, self._look)

    def _note(self) -> None:
        self._samples.append((asyncio.get_running_loop().time(), self._passed()))

    def _learn(self) -> None:
        seconds = self._samples[-1][0] - self._samples[0][0]
        if seconds < _SHORTEST:
            return
        seen = fastest_stretch(self._samples, seconds / _WINDOWS)
        if seen < MIN_CLAIM:
            return  # a round in which next to nothing passed
        limit = self._limit()
        if limit is not None and seen > _LIMITED * limit:
            # The limit was seen, not the link: what was known of that counts again as soon as the limit is gone.
            self._estimate = max(seen, self._estimate) if self._estimate is not None else None
        elif self._estimate is None:
            self._estimate = seen
        else:
            weight = _RISE if seen > self._estimate else _FALL
            self._estimate *= (seen / self._estimate) ** weight


def fastest_stretch(samples: Sequence[tuple[float, Traffic]], seconds: float) -> float:
    """The most bytes per second over any stretch of at least so many seconds, in the slower direction."""
    sent = received = 0.0
    start = 0
    for time, volume in samples:
        while start + 1 < len(samples) and time - samples[start + 1][0] >= seconds:
            start += 1
        begun, before = samples[start]
        if time - begun >= seconds:
            sent = max(sent, (volume.sent - before.sent) / (time - begun))
            received = max(received, (volume.received - before.received) / (time - begun))
    return min(sent, received)


def comparable(given: Sequence[float | None], measured: Sequence[float | None]) -> list[float]:
    """One bandwidth for each member of a group, relative to each other.

    What members have measured counts, within plausible bounds; whoever has measured nothing is taken for the mean of
    the others. What a user gave replaces the giver's own figure alone: such figures are relative to each other, and the
    median of them stands for that mean. So nobody's word, however large, changes how others compare. 0: the member
    declines to reduce.
    """
    believed = _plausible([None if own is not None else claim for own, claim in zip(given, measured, strict=True)])
    known = [figure for figure in believed if figure is not None]
    usual = statistics.fmean(known) if known else 1.0
    wishes = [own for own in given if own]
    unit = statistics.median_low(wishes) if wishes else 1.0

    def figure(own: float | None, claim: float | None) -> float:
        if own is None:
            return usual if claim is None else claim
        return usual * min(max(own / unit, 1 / MOST_ABOVE_MEDIAN), MOST_ABOVE_MEDIAN) if own else 0.0

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
