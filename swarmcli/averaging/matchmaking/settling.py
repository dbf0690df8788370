"""When everyone who is there can have been heard of. No input or output here."""

from __future__ import annotations

import math

from swarmcli.averaging.config import MatchmakingOptions

MIN_SETTLE = 0.015  # seconds of quiet after which peers that start together have met …
SETTLE_FACTOR = 3.0  # … and at least so many times as long as it took to declare and read
SETTLING_SHARE = 0.25  # of min_matchmaking_time goes by at most, while others keep coming, before anybody is asked
MIN_HEDGE = 0.1  # seconds without an answer after which the next in rank is asked as well …
HEDGE = 1 / 6  # … and the part of request_timeout that this is at most


class Settling:
    """How long ago the last news of other candidates came, measured by how long it takes to declare and to read.

    Where several groups may form, those who start together first hear of each other, so that all of them
    divide everyone in the same way: nobody is asked before a reading has brought nothing new for a while.
    """

    def __init__(self, options: MatchmakingOptions, now: float) -> None:
        self.quiet = MIN_SETTLE  # seconds without news after which things have settled
        self._options = options
        self._crowd = options.target_group_size is not None  # several groups may form
        self._first_read = math.inf
        self._last_read = -math.inf
        self._news_at = now
        self._calm = False  # the last reading brought nothing new

    def news(self, now: float) -> None:
        self._news_at = now

    def on_read(self, now: float, duration: float, *, crowd: bool) -> None:
        """The declarations were read; it took `duration` seconds to declare and read. `crowd`: they are more than fit
        into one group."""
        self._crowd = crowd
        self._calm = self._first_read < math.inf and self._news_at <= self._last_read
        self._last_read = now
        if self._first_read == math.inf:
            self._first_read = self._news_at = now
            # Two that start together learn of each other within the time that the slower takes for this.
            self.quiet = max(MIN_SETTLE, SETTLE_FACTOR * duration)

    @property
    def trip(self) -> float:
        """Seconds that it takes to declare and to read."""
        return self.quiet / SETTLE_FACTOR

    @property
    def calm(self) -> bool:
        """Whether no more readings are needed before anybody is asked."""
        return self._calm or not self._crowd

    @property
    def hedge(self) -> float:
        """Seconds after which an answer is late: a few round trips, as the first reading has measured them."""
        return min(HEDGE * self._options.request_timeout, max(MIN_HEDGE, self.quiet))

    @property
    def ready_at(self) -> float:
        """When to ask and to invite."""
        if not self._crowd:
            return -math.inf
        if self._calm:
            return self._news_at + self.quiet
        return self._first_read + SETTLING_SHARE * self._options.min_matchmaking_time

    @property
    def settled_at(self) -> float:
        """When everyone who is there can have been heard of, if nothing new happens; infinite before a reading."""
        if self._first_read == math.inf:
            return math.inf
        return max(self._news_at + self.quiet, self.ready_at)
