"""How much of the weights that members name for their tensors counts. No input or output here.

Nobody can see how many samples another peer has computed. What is bounded here are claims, relative to those of the
others; nothing is proved by it, and members that agree to lie are bounded only together with their number.

    share   nobody has more than `max_share` of a group's weight: one cap for all, which those above it get
    ramp    so many times the median weight of the group counts at most: of a new identity twice as much, of one that
            was there before four times what it had in earlier rounds; so who does much more than others is believed
            after some rounds

Groups of fewer than four members with weight are left as they are: among two or three one may well do most of the work.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from swarmcli.averaging.config import MIN_WEIGHT, AllreduceOptions
from swarmcli.averaging.group import Group
from swarmcli.network.identity import PeerID
from swarmcli.recent import Recent

LEAST = 4  # members with weight, from which on anything is bounded
FIRST, GROWTH = 2.0, 4.0  # times the median, of anybody; and times what was seen of a peer in its last rounds
KNOWN = 3  # rounds after which a peer counts as known
REMEMBERED = 8  # rounds of each peer
WARY = 16  # rounds, at most, in which strangers are believed less, after claims that were not borne out
MAX_PEERS = 4096
M = TypeVar("M", int, PeerID)  # how members are named


@dataclass(frozen=True, slots=True)
class WeightBounds:
    """Of one group: alike at all its reducers."""

    max_share: float = 1.0
    ramps: Mapping[int, float] = field(default_factory=dict)  # by member


def limits(named: Mapping[M, float], ramps: Mapping[M, float], max_share: float, missing: int = 0) -> dict[M, float]:
    """The most that counts of each weight that was named; infinite where nothing bounds it.

    `ramps`: by member, see `Experience`; none: unbounded. `missing`: how many others may still name one. A weight that
    is within its limit stays so whatever they name, also nothing: it can be counted at once.
    """
    weights = {member: weight for member, weight in named.items() if weight > 0}
    count = len(weights) + missing
    if count < LEAST or not weights:  # all that have come may have none: whoever only follows, for example
        return dict.fromkeys(weights, math.inf)
    median = _least_median(sorted(weights.values()), missing)
    ramped = {member: _ramp_limit(ramps.get(member, math.inf), median) for member in weights}
    counted = sorted((min(weight, ramped[member]) for member, weight in weights.items()), reverse=True)
    cap = _cap(counted, max_share if missing else max(max_share, 1 / count))
    return {member: min(limit, cap) for member, limit in ramped.items()}


def _least_median(ascending: Sequence[float], missing: int) -> float:
    """The lower median, if those who are missing name next to nothing."""
    place = (len(ascending) + missing - 1) // 2 - missing
    return ascending[place] if place >= 0 else 0.0


def _ramp_limit(ramp: float, median: float) -> float:
    return math.inf if ramp == math.inf else max(ramp * median, MIN_WEIGHT)


def _cap(descending: Sequence[float], share: float) -> float:
    """The weight c for which c is `share` of all weights, those above c counted as c."""
    if share >= 1 or descending[0] <= share * math.fsum(descending):
        return math.inf
    for above in range(1, len(descending) + 1):
        if share * above >= 1:
            break
        cap = share * math.fsum(descending[above:]) / (1 - share * above)
        if above == len(descending) or descending[above] <= cap:
            return max(cap, MIN_WEIGHT)
    return max(descending[-1], MIN_WEIGHT)  # so few share the weight that all have the same


class Experience:
    """What one averager has seen others contribute: by that it says, where it leads, what to expect of them."""

    def __init__(self, options: AllreduceOptions = AllreduceOptions()) -> None:  # noqa: B008  # frozen
        self._options = options
        self._wary = 0  # rounds for which claims of those who are unknown count for less
        self._seen: Recent[PeerID, deque[float]] = Recent(MAX_PEERS)  # weights of its last rounds, in medians of each

    def note(self, weights: Mapping[PeerID, float]) -> None:
        """A round has committed, in which so much was counted of each."""
        counted = {peer: weight for peer, weight in weights.items() if weight > 0}
        if not counted:
            return
        self._wary, median = max(self._wary - 1, 0), _least_median(sorted(counted.values()), 0)
        for peer, weight in counted.items():
            seen = self._seen[peer] = self._seen.get(peer) or deque(maxlen=REMEMBERED)
            seen.append(weight / median)

    def ramps(self, members: Iterable[PeerID]) -> dict[PeerID, float]:
        """Of those of a group. Nobody is new where fewer than three are known: then all are."""
        rounds = {peer: self._seen.get(peer, ()) for peer in members}
        if sum(len(seen) >= KNOWN for seen in rounds.values()) < LEAST - 1:
            return {}
        return {peer: max(FIRST, GROWTH * max(seen, default=0.0)) for peer, seen in rounds.items()}

    def count(self, claims: Mapping[PeerID, float]) -> float:
        """How much of the samples that these claim counts towards the target of their group. For 2, 6, ... rounds after
        one in which too much of what was claimed was withheld, those of whom no round has had anything together count
        for no more than the others."""
        total = math.fsum(claims.values())
        known = math.fsum(claim for peer, claim in claims.items() if peer in self._seen)
        return min(total, 2 * known) if self._wary and known > 0 else total

    def note_short(self) -> None:
        """In a round too much of what its members claimed was withheld."""
        self._wary = min(2 * self._wary + 2, WARY)

    def withheld(self, group: Group, weights: Mapping[PeerID, float]) -> set[PeerID]:
        """Who claimed samples of which less than half of what would count was counted in the round. How much that is
        hangs on who has named a weight: the lesser of what counts beside those who handed theirs in, and beside all."""
        ramps = {member.peer_id: member.ramp for member in group.members}
        named = {peer: max(claim, weights.get(peer, 0.0)) for peer, claim in group.claims.items()}
        present = self._limits({peer: each for peer, each in named.items() if weights.get(peer)}, ramps)
        least = {
            peer: min(named[peer], limit, present.get(peer, limit))
            for peer, limit in self._limits(named, ramps).items()
        }
        return {peer for peer, weight in least.items() if 2 * weights.get(peer, 0.0) < weight}

    def forget(self, peer: PeerID) -> None:
        """It is as one of whom no round has had anything."""
        self._seen.pop(peer, None)

    def _limits(self, named: Mapping[PeerID, float], ramps: Mapping[PeerID, float]) -> dict[PeerID, float]:
        trusts = self._options.trust == "members"
        return limits(named, {} if trusts else ramps, 1.0 if trusts else self._options.max_share)
