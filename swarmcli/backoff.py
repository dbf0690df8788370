"""Pauses between tries, longer each time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from swarmcli.recent import Recent


def growing(first: float, longest: float) -> Iterator[float]:
    """Pauses between tries, in seconds: each is twice as long as the one before, at most `longest`."""
    while True:
        yield first
        first = min(2 * first, longest)


K = TypeVar("K", bound=Hashable)


class Backoff(Generic[K]):
    """Pauses by key: the first lasts `first`, each further one `growth` times as long, at most `longest`. After `quiet`
    (None: `longest`) without a pause, a key begins with a first one again. The caller gives the moments: seconds of the
    loop, or epochs."""

    def __init__(
        self, first: float, longest: float, growth: float = 2.0, *, quiet: float | None = None, most: int = 4096
    ) -> None:
        """`most`: how many keys are remembered; the oldest are forgotten."""
        self._first, self._longest, self._growth = first, longest, growth
        self._quiet = longest if quiet is None else quiet
        self._pauses: Recent[K, tuple[float, float]] = Recent(most)  # key → until when, seconds of the last one

    def rests(self, key: K, now: float) -> bool:
        """Whether a pause of this key lasts."""
        return now < self.until(key)

    def until(self, key: K) -> float:
        """When this key's last pause ends, or has ended; -inf: it has had none."""
        return self._pauses.get(key, (-math.inf, 0.0))[0]

    def forget(self, key: K) -> None:
        """The key's next pause is a first one."""
        self._pauses.pop(key, None)

    def clear(self) -> None:
        """Forgets all keys."""
        self._pauses.clear()

    def add(self, key: K, now: float) -> None:
        """Begins a pause. Without effect while one lasts."""
        until, seconds = self._pauses.get(key, (-math.inf, 0.0))
        if now >= until:
            anew = now >= until + self._quiet
            seconds = self._first if anew else min(self._growth * seconds, self._longest)
            self._pauses[key] = now + seconds, seconds
