"""What a node does for others in a second: for each peer, and for all of one network prefix together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from swarmcli.dht.limits import DHTLimits
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix
from swarmcli.network.token_bucket import TokenBucket

K = TypeVar("K", bound=Hashable)

_MOST = 4096  # peers and prefixes that are remembered: those that were quiet longest are forgotten first


class Meter:
    """One token bucket per peer, and one per prefix unless strangers share it. Times are the loop's, handed in."""

    def __init__(self, rate: float, burst: float, factor: float, *, most: int = _MOST) -> None:
        """`factor`: how many times a peer's budget is a prefix's."""
        self._peers: _Buckets[PeerID] = _Buckets(rate, burst, most)
        self._prefixes: _Buckets[Prefix] = _Buckets(factor * rate, factor * burst, most)

    def take(self, peer: PeerID, prefix: Prefix, amount: float, now: float) -> bool:
        """Whether both have so much left; counts it if so."""
        own = self._peers.of(peer)
        if not own.take_now(amount, now):
            return False
        if prefix.shared or self._prefixes.of(prefix).take_now(amount, now):
            return True
        own.give_back(amount)
        return False

    def owe(self, peer: PeerID, prefix: Prefix, amount: float, now: float) -> None:
        """Counts what has been done already: it is missing later."""
        self._peers.of(peer).take(amount, now)
        if not prefix.shared:
            self._prefixes.of(prefix).take(amount, now)


class Meters:
    """Of one node."""

    def __init__(self, limits: DHTLimits) -> None:
        factor = limits.prefix_factor
        self.records = Meter(limits.writes_per_second, limits.write_burst, factor)
        self.bytes = Meter(limits.bytes_per_second, limits.bytes_burst, factor)
        self.work = Meter(limits.work_per_second, limits.work_burst, factor)


class _Buckets(Generic[K]):
    def __init__(self, rate: float, burst: float, most: int) -> None:
        self._rate, self._burst, self._most = rate, burst, most
        self._buckets: OrderedDict[K, TokenBucket] = OrderedDict()

    def of(self, key: K) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self._rate, self._burst)
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return bucket
