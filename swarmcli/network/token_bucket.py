"""How fast something may go: a bucket of tokens that fills at a constant rate, and buckets by key."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TypeAlias

from swarmcli.recent import Recent

Bound: TypeAlias = tuple[float, float]  # tokens per second in the long run, and at once
MOST_KEYS = 4096


class TokenBucket:
    """`rate` tokens come in per second, up to `burst`. A token is a byte, or one of whatever is bounded.

    The caller hands in the time, in seconds of a clock that does not go back.
    """

    def __init__(self, rate: float, burst: float) -> None:
        """Begins full. Raises ValueError unless both are above 0."""
        if not (rate > 0 and burst > 0):
            raise ValueError(f"a token bucket has a rate and a burst above 0, got {rate} and {burst}")
        self.rate = rate
        self.burst = burst
        self._tokens = burst  # below 0: taken in advance by those who wait now
        self._at = float("-inf")  # when the tokens were counted

    def take(self, amount: float, now: float) -> float:
        """Takes tokens, even if they are not there yet; returns the seconds until they are.

        Whoever comes later waits longer, so everyone gets through in the order of asking, however much each takes.
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
        """Gives back what was taken and is not used after all."""
        self._tokens = min(self.burst, self._tokens + amount)

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
            self._at = now


class Meter:
    """Bounds one thing by several keys at once: each bound has a bucket for each of its keys, and there may be one
    bucket for everyone. Callers name the bounds that apply: `take(now, peer=peer, network=network)`.

    Name the identity's bound first: what it refuses does not touch the other bounds.
    """

    def __init__(self, *, everyone: Bound | None = None, **bounds: Bound | None) -> None:
        """A bound of None is none. Of each bound, MOST_KEYS keys are remembered; those quiet for longest are forgotten
        first."""
        self._everyone = None if everyone is None else TokenBucket(*everyone)
        self._bounds = bounds
        self._buckets: dict[str, Recent[Hashable, TokenBucket]] = {name: Recent(MOST_KEYS) for name in bounds}

    def take(self, now: float, amount: float = 1, **keys: Hashable) -> bool:
        """Takes `amount` from all of these, if each has so much left; returns whether it did."""
        taken: list[TokenBucket] = []
        for bucket in self._of(keys):
            if not bucket.take_now(amount, now):
                for each in taken:
                    each.give_back(amount)
                return False
            taken.append(bucket)
        return True

    def owe(self, now: float, amount: float, **keys: Hashable) -> float:
        """Charges what has been done already, even if it is not there. Returns the seconds until all of these are back
        at zero or above."""
        return max([bucket.take(amount, now) for bucket in self._of(keys)], default=0.0)

    def give_back(self, amount: float = 1, **keys: Hashable) -> None:
        """Gives back what was taken and is not used after all."""
        for bucket in self._of(keys):
            bucket.give_back(amount)

    def _of(self, keys: dict[str, Hashable]) -> Iterator[TokenBucket]:
        for name, key in keys.items():
            bound, buckets = self._bounds[name], self._buckets[name]
            if bound is not None:
                bucket = buckets[key] = buckets.get(key) or TokenBucket(*bound)
                yield bucket
        if self._everyone is not None:
            yield self._everyone
