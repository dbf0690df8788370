"""How fast this peer may send and receive, as its user wishes: one token bucket for each direction of its line.

All connections of the peer share the two. Control messages pass at once, and bulk connections pay for them: these wait
until the bucket is in credit again, then each of those that wait passes one piece, so that all get the same. What
passed is charged afterwards, so the mean is exact even if a piece was larger than what was left.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable

from swarmcli.network.loop_thread import loop_time
from swarmcli.network.token_bucket import TokenBucket

# Bytes per second. Less would not carry what a peer of a run of twenty says besides its gradients: keepalives, calls,
# records of the hash table.
LEAST_RATE = 5_000.0

_BURST = 0.05  # seconds of the rate that pass at once after a pause, and in one turn of all who wait
_SMALLEST, LARGEST_PIECE = 2 << 10, 256 << 10  # bytes
# Seconds of the rate that control messages may take in advance. A peer whose control messages alone need more than the
# limit exceeds it; otherwise its streams would stand still, and others would take it for dead.
_DEBT = 5.0


class LinkWay:
    """One direction of the line. Used from the loop."""

    def __init__(self) -> None:
        self.limit: float | None = None  # bytes per second; None: unlimited, and nothing is counted
        self._bucket: TokenBucket
        self._opens = 0.0  # when the bucket is in credit again, in the loop's time
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._sharing = 1  # how many were let go together: the bytes of a turn are divided among them
        self._timer: asyncio.TimerHandle | None = None

    def change(self, limit: float | None) -> None:
        """From now on so fast; None: as fast as it goes. Those who wait go on, or wait as long as the new rate asks."""
        owed = max(0.0, self._opens - loop_time()) * self.limit if self.limit is not None else 0.0
        self.limit = limit
        if limit is None:
            self._release()
            return
        self._bucket = TokenBucket(limit, max(_SMALLEST, _BURST * limit))
        self._bucket.take(self._bucket.burst, loop_time())  # otherwise each change would let a burst through
        self._opens = 0.0
        self.charge(owed)
        if self._waiting:
            self._wait()

    @property
    def piece(self) -> int:
        """Bytes that a bulk connection passes at a time."""
        if self.limit is None:
            return LARGEST_PIECE
        return int(min(max(_SMALLEST, _BURST * self.limit / self._sharing), LARGEST_PIECE))

    @property
    def is_open(self) -> bool:
        """Whether a bulk connection may pass a piece now."""
        return self.limit is None or loop_time() >= self._opens

    def charge(self, nbytes: float) -> None:
        """So many bytes have passed, or pass now."""
        if self.limit is None:
            return
        now = loop_time()
        seconds = self._bucket.take(nbytes, now)
        if seconds > _DEBT:
            self._bucket.give_back((seconds - _DEBT) * self.limit)
        self._opens = now + min(seconds, _DEBT)

    def when_open(self, who: Hashable, go: Callable[[], None]) -> None:
        """Calls `go` once, when `who` may pass its next piece."""
        self._waiting[who] = go
        self._wait()

    def forget(self, who: Hashable) -> None:
        """It waits no more. Unknown ones are ignored."""
        self._waiting.pop(who, None)

    async def turn(self) -> None:
        """Returns when a bulk connection may pass its next piece, which is then charged."""
        if self.is_open:
            return
        mine = asyncio.Event()
        self.when_open(mine, mine.set)
        try:
            await mine.wait()
        finally:
            self.forget(mine)

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._opens, self._look)

    def _look(self) -> None:
        if self.is_open:
            self._release()
        else:
            self._wait()  # control messages have passed meanwhile

    def _release(self) -> None:
        """Lets all go at once: if one went first, and then had nothing to read, it would hold up the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        self._sharing = max(1, len(waiting))
        for go in waiting.values():
            go()


class LinkRates:
    """The two directions of this peer's line."""

    def __init__(self) -> None:
        self.upload, self.download = LinkWay(), LinkWay()
        self.on_change: list[Callable[[], None]] = []

    @property
    def lower(self) -> float | None:
        """The lower of the two limits, in bytes per second; None: there is none."""
        limits = [way.limit for way in (self.upload, self.download) if way.limit is not None]
        return min(limits, default=None)

    def change(self, upload: float | None, download: float | None) -> None:
        """See Endpoint.limit_rates."""
        check_rates(upload, download)
        self.upload.change(upload)
        self.download.change(download)
        for tell in self.on_change:
            tell()


def check_rates(upload: float | None, download: float | None) -> None:
    """Raises ValueError for what is no limit that a peer can live with."""
    for name, rate in (("upload", upload), ("download", download)):
        if rate is not None and not LEAST_RATE <= rate < math.inf:
            raise ValueError(
                f"{name} of {rate:g} bytes per second is too little: a peer needs {LEAST_RATE:g} at least for what it"
                " says besides its gradients (None: no limit; to send nothing, pause the peer)"
            )
