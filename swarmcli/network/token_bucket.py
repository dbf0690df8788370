"""How fast something may go: a bucket of tokens that fills at a constant rate."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

from swarmcli.recent import Recent

K = TypeVar("K", bound=Hashable)


class TokenBucket:
    """`rate` tokens come in per second, up to `burst`. A token is a byte, or one of whatever is bounded.

    It knows no time of its own: whoever asks says what the time is, in seconds of a clock that does not go back.
    """

    def __init__(self, rate: float, burst: float) -> None:
        """Begins full. Raises ValueError for what would never let anything through."""
        if not (rate > 0 and burst > 0):
            raise ValueError(f"a token bucket has a rate and a burst above 0, got {rate} and {burst}")
        self.rate = rate
        self.burst = burst
        self._tokens = burst  # below 0: taken in advance by those who wait now
        self._at = float("-inf")  # when the tokens were counted

    def take(self, amount: float, now: float) -> float:
        """Takes tokens, also those that are not there yet; the seconds until they would have been.

        Who comes later waits longer, so everyone gets through in the order of asking, however much each takes.
        """
        self._fill(now)
        self._tokens -= amount
        return max(0.0, -self._tokens / self.rate)

    def take_now(self, amount: float, now: float) -> bool:
        """Takes tokens if they are there."""
        self._fill(now)
        if self._tokens < amount:
            return False
        self._tokens -= amount
        return True

    def give_back(self, amount: float) -> None:
        """What was taken is not used after all."""
        self._tokens = min(self.burst, self._tokens + amount)

    async def wait(self, amount: float) -> None:
        """Returns, in the loop's time, when `amount` may go. Who is cancelled meanwhile has used its tokens up."""
        seconds = self.take(amount, asyncio.get_running_loop().time())
        if seconds > 0:
            await asyncio.sleep(seconds)

    def is_full(self, now: float) -> bool:
        """Whether it is as good as a new one, and need not be kept."""
        self._fill(now)
        return self._tokens >= self.burst

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
            self._at = now


class TokenBuckets(Generic[K]):
    """One bucket for each key, all alike. Of more than `most`, those that were quiet longest are forgotten first."""

    def __init__(self, rate: float, burst: float, most: int) -> None:
        self._rate, self._burst = rate, burst
        self._buckets: Recent[K, TokenBucket] = Recent(most)

    def of(self, key: K) -> TokenBucket:
        bucket = self._buckets[key] = self._buckets.get(key) or TokenBucket(self._rate, self._burst)
        return bucket
