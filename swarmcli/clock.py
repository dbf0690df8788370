"""Swarm time: this machine's clock, corrected by what peers report.

Each peer's offset is measured as NTP does it (RFC 5905, section 8) on calls that carry *raw* clocks, so corrections
cannot feed on each other. The correction is the median over the peers and oneself, which a minority of wrong or
lying clocks cannot move beyond the right ones. Identities cost nothing, so votes are limited by what an attacker does
not choose: of one network few peers vote, and of the peers that came to us hardly more than of those that we dialed.
The local wall clock is read once and then carried on by a clock that nobody can set, so that setting the machine's
time in the middle of a run moves nothing.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

# The terms on which other peers' clocks correct this one's.
MAX_PEERS = 64  # whose offsets are kept; the least recently measured goes first
MAX_PER_NETWORK = 4  # of these, in one network
CAME_AT_LEAST = 8  # of the peers that came to us, each of another network, may vote however few we have dialed
MAX_OFFSET = 3600.0  # seconds; a clock further off than that is taken for broken: no correction is larger
MAX_DELAY = 10.0  # seconds; a slower round trip says too little
SAMPLE_LIFE = 60.0  # seconds for which a sample with a short delay is preferred to newer ones
SETTLING = 30.0  # seconds after the first measurement in which corrections step; later ones slew
UPDATE_PERIOD = 1.0  # seconds between two looks at the median
GENTLE_SLEW = 0.05  # seconds of correction per second …
FAST_SLEW = 0.5  # … and where more than a second is missing

# Unlike CLOCK_MONOTONIC, it goes on while the machine is suspended (on macOS, CLOCK_MONOTONIC does so too; Windows has
# neither, and its time.monotonic() does).
_UNSETTABLE = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


@dataclass(frozen=True, slots=True)
class _Sample:
    offset: float
    delay: float
    taken: float
    since: float  # when this peer was measured for the first time
    network: Hashable
    shared: bool  # many honest peers may well be in that network
    dialed: bool  # by us, at some time


class Clock:
    """One process's view of swarm time. Methods may be called from any thread."""

    def __init__(self, wall: Callable[[], float] | None = None, monotonic: Callable[[], float] | None = None) -> None:
        """`wall` is read once, at the first use. Without arguments: the machine's clocks, or the loop's under
        virtual time."""
        self._wall = wall or _wall
        self._monotonic = monotonic or _monotonic
        self._anchor: float | None = None  # raw() less monotonic()
        self._samples: OrderedDict[bytes, _Sample] = OrderedDict()
        # Offsets of dialed peers whose clocks are further off than is corrected: by peer, or by network.
        self._beyond: dict[Hashable, float] = {}
        self._changed = False
        self._first_sample = math.inf  # when it was taken, on the monotonic clock
        self._offset = 0.0
        self._target = 0.0
        self._asked = -math.inf  # when somebody last looked at the time
        self._looked = -math.inf  # when the median was last taken
        self._latest = -math.inf
        # Users read the time in their own threads, while the loop's thread takes samples in.
        self._lock = threading.RLock()

    def raw(self) -> float:
        """Seconds since the epoch by this machine alone, uncorrected; what goes on the wire."""
        anchor = self._anchor
        if anchor is None:
            with self._lock:
                if self._anchor is None:
                    self._anchor = self._wall() - self._monotonic()
                anchor = self._anchor
        return self._monotonic() + anchor

    def now(self) -> float:
        """Swarm time, seconds since the epoch. Never runs backwards, except for a correction while settling."""
        with self._lock:
            self._latest = max(self._latest, self.raw() + self.offset)
            return self._latest

    @property
    def offset(self) -> float:
        """Seconds that are added to the raw clock now."""
        with self._lock:
            monotonic = self._monotonic()
            if self._offset != self._target or self._changed:
                self._look(monotonic)
                self._slew(monotonic - self._asked)
            self._asked = monotonic
            return self._offset

    @property
    def uncorrected(self) -> float:
        """Seconds by which this machine's clock is behind those of most peers that it dialed, if that is more than the
        swarm corrects; else 0."""
        with self._lock:
            near = len(_firsts(sample for sample in self._samples.values() if sample.dialed))
            return statistics.median(self._beyond.values()) if len(self._beyond) > near else 0.0

    def observe(
        self,
        peer: bytes,
        sent: float,
        received: float,
        replied: float,
        returned: float,
        *,
        network: Hashable = None,
        shared: bool = False,
        dialed: bool = True,
    ) -> None:
        """Takes in NTP's four timestamps: when a call left here, arrived there, was answered there, came back here.

        The middle two are the peer's raw clock, the outer two this one's. Impossible ones are ignored. `network`: the
        peers in it are counted together; None: this peer is counted alone. `shared`: many honest peers may well be in
        it. `dialed`: we chose this peer; it did not come to us by itself.
        """
        delay = (returned - sent) - (replied - received)
        offset = ((received - sent) + (replied - returned)) / 2
        # Comparisons written so that NaN fails them. Slightly negative delays come from clocks that tick unlike.
        if not (-0.001 <= delay <= MAX_DELAY and abs(offset) < math.inf):
            return
        with self._lock:
            voice = peer if network is None or shared else network
            self._beyond.pop(voice, None)
            if abs(offset) > MAX_OFFSET:
                if dialed and len(self._beyond) < MAX_PEERS:
                    self._beyond[voice] = offset
                return
        now = self._monotonic()
        known = self._samples.get(peer)  # samples are put in by one thread, which is this one
        if known is not None and delay >= known.delay and now - known.taken < SAMPLE_LIFE:
            return
        with self._lock:
            since = known.since if known is not None else now
            self._keep(peer, _Sample(offset, delay, now, since, network, shared, dialed))
            self._changed = True
            self._first_sample = min(self._first_sample, now)
            if now - self._first_sample <= SETTLING:
                self._step(now)

    def _keep(self, peer: bytes, sample: _Sample) -> None:
        """If there are too many, of its network or in all, one of those that came to us goes, the least recently
        measured; if we dialed them all, the least recently measured of these."""
        self._samples[peer] = sample
        self._samples.move_to_end(peer)
        neighbours = [each for each, other in self._samples.items() if other.network == sample.network]
        if sample.network is not None and len(neighbours) > MAX_PER_NETWORK:
            self._forget_one(neighbours)
        if len(self._samples) > MAX_PEERS:
            self._forget_one(self._samples)

    def _forget_one(self, peers: Iterable[bytes]) -> None:
        del self._samples[min(peers, key=lambda peer: self._samples[peer].dialed)]  # of equals the first, so the oldest

    def _look(self, monotonic: float, period: float = UPDATE_PERIOD) -> None:
        if self._changed and monotonic - self._looked >= period:
            self._target = statistics.median([0.0, *self._counted()])
            self._looked, self._changed = monotonic, False

    def _counted(self) -> list[float]:
        """The offsets that have a vote: of each network the peer that was measured first, but all dialed peers in a
        network that many share. Peers that came to us have at most as many votes as those that we dialed, or
        CAME_AT_LEAST if that is more: in a small swarm one end has dialed all the others, and these have to agree."""
        ranked = sorted(self._samples.values(), key=lambda sample: sample.since)
        dialed = _firsts(sample for sample in ranked if sample.dialed)
        came = _firsts(sample for sample in ranked if not sample.dialed)
        return dialed + came[: max(CAME_AT_LEAST, len(dialed))]

    def _step(self, monotonic: float) -> None:
        self._look(monotonic, period=0)
        self._offset, self._latest = self._target, -math.inf

    def _slew(self, elapsed: float) -> None:
        """Corrects at most `rate` seconds for each second since the last reading, however long ago that was: what
        counts is how fast readings move."""
        missing = self._target - self._offset
        rate = FAST_SLEW if abs(missing) > 1.0 else GENTLE_SLEW
        self._offset += math.copysign(min(abs(missing), rate * max(elapsed, 0.0)), missing)


def _firsts(samples: Iterable[_Sample]) -> list[float]:
    """The offset of the first of each network, in their order."""
    found: dict[Hashable, float] = {}
    for number, sample in enumerate(samples):
        alone = sample.network is None or (sample.shared and sample.dialed)
        found.setdefault(number if alone else sample.network, sample.offset)
    return list(found.values())


def _virtual_loop() -> asyncio.AbstractEventLoop | None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop if hasattr(loop, "wall_time") else None


def _wall() -> float:
    loop = _virtual_loop()
    return loop.wall_time() if loop is not None else time.time()  # type: ignore[attr-defined]


def _monotonic() -> float:
    loop = _virtual_loop()
    if loop is not None:
        return loop.time()
    return time.monotonic() if _UNSETTABLE is None else time.clock_gettime(_UNSETTABLE)


_default: Clock = Clock()


def set_default_clock(clock: Clock) -> None:
    """`clock` is from now on the one that this process's peers share; until then it is the machine's own."""
    global _default
    _default = clock


def get_dht_time() -> float:
    """Swarm time by this process's default clock: what expiration times are counted from."""
    return _default.now()
