"""When two peers behind routers try to open a direct connection, and which addresses they may name for it.

Pure logic, no I/O. What the other end names is hostile: it may be the address of somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from swarmcli.errors import AddressError
from swarmcli.network.addresses import Address, Scope, parse_address, scope_of
from swarmcli.network.identity import PeerID
from swarmcli.reach.budgets import DialLimits
from swarmcli.reach.verdict import Family, family_of
from swarmcli.recent import Recent

TRIES = 3  # of one attempt; each sends one SYN
# Seconds that a SYN has to cross the other end's. Systems send it again after 1 s (RFC 6298): a try shorter than that
# costs a wrong address one packet. The two ends of a pair that is farther apart than this stay with their relay.
CROSSING = 0.9
MAX_NEARBY = 3  # addresses of one LAN that are dialed

# Addresses that peers name without proof of being there. One who names somebody else's has three SYNs sent to it every
# two minutes; a crowd of identities that names the same host has 24 sent, and then one every 20 s.
CONTROL_LIMITS = DialLimits(
    peer_burst=TRIES, peer_rate=TRIES / 120, network_burst=24, network_rate=1 / 20, all_burst=120, all_rate=1.0
)
# Further connections of two that are connected directly: they lead to the host at which the other end is known to be,
# but perhaps to a neighbour's port there.
BULK_LIMITS = DialLimits(peer_burst=96, peer_rate=1.0, network_burst=96, network_rate=1.0, all_burst=960, all_rate=10.0)
# Asks alone: each has this end dial a listener or two. An honest peer asks once in two minutes.
ASK_LIMITS = DialLimits(
    peer_burst=4, peer_rate=1 / 60, network_burst=120, network_rate=1.0, all_burst=120, all_rate=1.0
)
# Dials inside this end's own network, each at up to MAX_NEARBY addresses. That both ends are seen at one host is what
# the other end says alone, so whoever is served may be a stranger who wants this LAN scanned.
NEAR_LIMITS = DialLimits(
    peer_burst=2, peer_rate=1 / 120, network_burst=12, network_rate=1 / 20, all_burst=12, all_rate=1 / 20
)

Pair: TypeAlias = tuple[Family, str, str]  # a family, and in it where this end and the other one are seen

_LEAST_PORT = 1024  # routers show no client at a lower one; servers of others listen there
_FIRST_PAUSE = 120.0  # seconds after an attempt that failed …
_LONGEST_PAUSE = 3600.0  # … which doubles with each in a row, up to this
_LASTING = 600.0  # seconds for which a direct connection has to have stood for older failures to be forgotten
_MAX_PAIRS = 1024


def acceptable(text: str, own: str) -> Address | None:
    """Where the other end says that it is seen, if this end may send it a SYN; `own` is where this end is seen.

    An end in the internet has others dialed in the internet alone, and one that is itself seen in a private network
    (a company's, with routers inside) those of private networks.
    """
    try:
        theirs, ours = parse_address(text), parse_address(own)
    except AddressError:
        return None
    usual = theirs.scheme == ours.scheme and theirs.port >= _LEAST_PORT
    alike = family_of(theirs.host) == family_of(ours.host) and scope_of(theirs.host) == scope_of(ours.host)
    named = theirs.scheme == "tcp" and scope_of(theirs.host) is None  # a host name: resolved for the user alone
    return theirs if usual and alike and not named else None


def pairs_of(own: Iterable[str], theirs: Iterable[str]) -> list[Pair]:
    """The families in which both ends have an address. IPv6 comes first, since
    routers seldom translate it."""
    found: dict[Family, Pair] = {}
    for mine in own:
        for text in theirs:
            if (accepted := acceptable(text, mine)) is not None:
                family = family_of(accepted.host)
                found.setdefault(family, (family, mine, str(accepted)))
    return sorted(found.values(), key=lambda pair: pair[0] != "IPv6")


def behind_one_router(pairs: Iterable[Pair]) -> bool:
    """Whether both ends are seen at the same host: they may be in one LAN, whose router need not lead them back in."""
    return any(parse_address(mine).host == parse_address(theirs).host for _, mine, theirs in pairs)


def nearby(addresses: Iterable[str], is_near: Callable[[str], bool]) -> tuple[str, ...]:
    """Of the addresses that an end in the same LAN says it listens at, those in a network that this machine is in; none
    of this machine's loopback."""
    found: dict[str, None] = {}
    for text in addresses:
        try:
            address = parse_address(text)
        except AddressError:
            continue
        usual = address.direct and address.port >= _LEAST_PORT and scope_of(address.host) is not Scope.HOST
        if usual and is_near(address.host):
            found[str(address)] = None
    return tuple(found)[:MAX_NEARBY]


@dataclass(slots=True)
class _Past:
    failures: int = 0  # in a row
    worked_at: float | None = None  # the last time that a direct connection came about
    until: float = 0.0  # no attempt before


class Patience:
    """Which pairs are left alone for how long. Times are the loop's, handed in. Bounded: pairs that were tried longest
    ago are forgotten first."""

    def __init__(self) -> None:
        self._pairs: Recent[PeerID, _Past] = Recent(_MAX_PAIRS)

    def due(self, peer: PeerID) -> float:
        """When this pair may be tried."""
        pair = self._pairs.get(peer)
        return pair.until if pair is not None else 0.0

    def failed(self, peer: PeerID, now: float) -> None:
        pair = self._pair(peer)
        if pair.worked_at is not None and now - pair.worked_at >= _LASTING:
            pair.failures = 0
        pair.failures += 1
        pair.worked_at = None
        pair.until = now + _pause(pair.failures)

    def worked(self, peer: PeerID, now: float) -> None:
        """Should the connection be lost soon, the next attempt waits as if this one had failed."""
        pair = self._pair(peer)
        brief = pair.worked_at is not None and now - pair.worked_at < _LASTING
        pair.failures = pair.failures + 1 if brief else 0
        pair.worked_at = now
        pair.until = now + _pause(pair.failures + 1)

    def forget(self) -> None:
        """This machine is in another network: nothing of what was tried says anything now."""
        self._pairs.clear()

    def _pair(self, peer: PeerID) -> _Past:
        pair = self._pairs[peer] = self._pairs.get(peer) or _Past()
        return pair


def _pause(failures: int) -> float:
    return min(_FIRST_PAUSE * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE)
