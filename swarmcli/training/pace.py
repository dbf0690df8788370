"""How much of the time a trainer computes."""

from __future__ import annotations

import time
from collections.abc import Callable

CREDIT = 0.5  # seconds of waiting elsewhere that are remembered as rest: more would end in a burst of computing


class Pace:
    """Tells the loop how long to rest between two batches so that computing takes a share of the time.

    Time in which the loop waits for others counts as rest. The share may be changed from any thread; all else belongs
    to the loop's.
    """

    def __init__(
        self,
        share: float = 1.0,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`share`: above 0, 1 is all of the time. `interrupted`: whether there is something better to do than to rest,
        such as to pause."""
        self.share = share
        self.interrupted = interrupted
        self._clock = clock
        self._unrested = 0.0  # seconds of computing that no rest has followed yet; below 0, credit
        self._since = clock()

    def begin(self) -> None:
        """A batch begins."""
        self._rested()

    def end(self) -> None:
        """It has been computed."""
        now = self._clock()
        self._unrested += now - self._since
        self._since = now

    @property
    def owed(self) -> float:
        """Seconds to rest now; 0: the next batch may begin. To be called between two batches."""
        self._rested()
        return max(0.0, self._unrested) * (1 - self.share) / self.share

    def _rested(self) -> None:
        now, share = self._clock(), self.share
        if share >= 1:
            self._unrested = 0.0
        else:
            worth = share / (1 - share)  # seconds of computing that a second of rest makes up for
            least = -CREDIT * min(1.0, worth)
            self._unrested = max(least, self._unrested - (now - self._since) * worth)
        self._since = now
