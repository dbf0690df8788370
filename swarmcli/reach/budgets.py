"""How many dials a peer makes for strangers: so many that each finds out where it stands, too few for a scan or a
flood. All constants are here."""

from __future__ import annotations

from dataclasses import dataclass

from swarmcli.network.token_bucket import TokenBucket, TokenBuckets


@dataclass(frozen=True, slots=True)
class DialLimits:
    """Dials at once, and dials per second after that.

    A peer asks three contacts at a time: when it starts, a few times in the next minutes, then every ten minutes, for
    each family of addresses. One dial costs the dialed host a connection that ends after a greeting, and the asker
    learns nothing but what the dialed peer itself hears.
    """

    peer_burst: int = 6  # for one identity …
    peer_rate: float = 1 / 60
    network_burst: int = 24  # … to hosts of one network, whoever asks (a household, a campus behind one router) …
    network_rate: float = 1 / 10
    all_burst: int = 120  # … and in all
    all_rate: float = 2.0
    under_way: int = 32  # at one moment
    known: int = 4096  # identities and networks that are remembered, each; those quiet longest are forgotten first


class DialBudget:
    """Counts dials. Times are the loop's, handed in."""

    def __init__(self, limits: DialLimits = DialLimits()) -> None:
        self.limits = limits
        self._all = TokenBucket(limits.all_rate, limits.all_burst)
        self._peers: TokenBuckets[bytes] = TokenBuckets(limits.peer_rate, limits.peer_burst, limits.known)
        self._networks: TokenBuckets[str] = TokenBuckets(limits.network_rate, limits.network_burst, limits.known)

    def take(self, peer: bytes, network: str, now: float) -> bool:
        """Whether `peer` may have one more host in `network` dialed; counts it if so.

        Identities cost nothing, so theirs is asked for first and the others bound what many of them do together.
        """
        buckets = self._peers.of(peer), self._networks.of(network), self._all
        return all(bucket.take_now(1, now) for bucket in buckets)
