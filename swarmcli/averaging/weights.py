"""Bounds on the weights that members name for their tensors. No input or output here.

No peer can see how many samples another one has computed. These bounds limit claims relative to those of the others;
they prove nothing, and members that agree to lie are bounded only together with their number.

    share   no member has more than `max_share` of a group's weight: one cap for all, and heavier members get the cap
    ramp    a weight counts up to so many times the group's median: twice for a new identity; for a known one four times
            what it was in the last round, and twice at least. So a member that does much more than others is believed
            after some rounds

Groups of fewer than four members with weight are left as they are: among two or three one may well do most of the work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from swarmcli.averaging.config import MIN_WEIGHT, AllreduceOptions
from swarmcli.averaging.group import Group
from swarmcli.network.identity import PeerID

LEAST = 4  # members with weight; smaller groups are not bounded
GROWTH, FIRST = 4.0, 2.0  # the ramps of a known member, times its weight in the last round, and of a new one
WARY = 16  # most rounds in which claims of unknown members count for less, after some claimed samples and withheld them
M = TypeVar("M", int, PeerID)  # how members are named


@dataclass(frozen=True, slots=True)
class WeightBounds:
    """The bounds of one group: the same at all its reducers."""

    max_share: float = 1.0
    ramps: Mapping[int, float] = field(default_factory=dict)  # by member

    @classmethod
    def of(cls, group: Group, senders: Iterable[int], options: AllreduceOptions) -> WeightBounds:
        """The bounds of these senders, by index. A group that trusts its members takes their weights as they are."""
        if options.trust == "members":
            return cls()
        return cls(options.max_share, {index: group.members[index].ramp for index in senders})


def limits(named: Mapping[M, float], ramps: Mapping[M, float], max_share: float, missing: int = 0) -> dict[M, float]:
    """Returns the most that counts of each weight above 0 that was named; infinite where nothing bounds it.

    `ramps`: by member, see `Experience`; a member without one has no such bound. `missing`: how many others may still
    name a weight. Whatever they name, a weight within its limit stays within it, so it can be counted at once.
    """
    weights = {member: weight for member, weight in named.items() if weight > 0}
    count = len(weights) + missing
    if count < LEAST or not weights:  # all that have come may have weight 0: peers that only follow, for example
        return dict.fromkeys(weights, math.inf)
    median = _least_median(sorted(weights.values()), missing)
    ramped = {
        member: math.inf if (ramp := ramps.get(member, math.inf)) == math.inf else max(ramp * median, MIN_WEIGHT)
        for member in weights
    }
    counted = sorted((min(weight, ramped[member]) for member, weight in weights.items()), reverse=True)
    cap = _cap(counted, max_share if missing else max(max_share, 1 / count))
    return {member: min(limit, cap) for member, limit in ramped.items()}


def _least_median(ascending: Sequence[float], missing: int) -> float:
    """The lower median at its least: the missing members name next to nothing."""
    place = (len(ascending) + missing - 1) // 2 - missing
    return ascending[place] if place >= 0 else 0.0


def _cap(descending: Sequence[float], share: float) -> float:
    """The weight c that is `share` of the sum in which those above c count as c; infinite if none is above."""
    if share >= 1 or descending[0] <= share * math.fsum(descending):
        return math.inf
    for above in range(1, len(descending) + 1):
        if share * above >= 1:
            break
        cap = share * math.fsum(descending[above:]) / (1 - share * above)
        if above == len(descending) or descending[above] <= cap:
            return max(cap, MIN_WEIGHT)
    return max(descending[-1], MIN_WEIGHT)  # so few members meet that share only if all have the same weight


class Experience:
    """Remembers how much weight of each member counted in the last round that committed here. Its certificate covers
    that, so all its members know the same. Ramps follow from it: a leader lists them, its followers compute them
    again."""

    def __init__(
        self,
        bounds: AllreduceOptions = AllreduceOptions(),  # noqa: B008  # frozen
    ) -> None:
        self._bounds = bounds
        self._wary = 0  # rounds for which claims of unknown peers count for less
        self._members: frozenset[PeerID] = frozenset()  # of that round, and …
        self._counted: dict[PeerID, float] = {}  # … the weights of its contributors, in medians
        self._known: set[PeerID] = set()  # contributors that kept their word

    def note(self, weights: Mapping[PeerID, float], members: Iterable[PeerID] = ()) -> None:
        """A round of these members has committed. `weights`: what counted of each."""
        counted = {peer: weight for peer, weight in weights.items() if weight > 0}
        if not counted:
            return
        self._wary, median = max(self._wary - 1, 0), _least_median(sorted(counted.values()), 0)
        self._counted = {peer: weight / median for peer, weight in counted.items()}
        self._members, self._known = frozenset(members), set(counted)

    def knows(self, members: Collection[PeerID]) -> bool:
        """Whether the last round was of these members."""
        return bool(members) and self._members == frozenset(members)

    def ramps(self, members: Iterable[PeerID]) -> dict[PeerID, float]:
        """The ramps of a group's members. If fewer than three of them contributed to the last round, there are none."""
        counted = {peer: self._counted.get(peer, 0.0) for peer in members}
        if sum(weight > 0 for weight in counted.values()) < LEAST - 1:
            return {}
        return {peer: max(FIRST, GROWTH * weight) for peer, weight in counted.items()}

    def agrees(self, group: Group, queue: Collection[PeerID]) -> bool:
        """Whether a leader lists the ramps that follow from the round of the `queue`, which led to the group's tag. If
        nobody checked, it could raise those of accomplices and lower others. True also where this peer or the leader
        was not in that round, and cannot know."""
        if not (self.knows(queue) and group.members[0].standing):
            return True
        ramps = self.ramps(member.peer_id for member in group.members)
        return all(member.ramp == ramps.get(member.peer_id, math.inf) for member in group.members)

    def count(self, claims: Mapping[PeerID, float]) -> float:
        """Returns how many of the samples that members claim count towards their group's target.

        After a round in which members withheld too many of the samples that they had claimed, and for 2, 6, … rounds,
        the claims of all that did not contribute to the last round count for no more in sum than those of all that did.
        """
        total = math.fsum(claims.values())
        known = math.fsum(claim for peer, claim in claims.items() if peer in self._known)
        return min(total, 2 * known) if self._wary and known > 0 else total

    def note_short(self) -> None:
        """The members of a round withheld too many of the samples that they had claimed."""
        self._wary = min(2 * self._wary + 2, WARY)

    def withheld(self, group: Group, weights: Mapping[PeerID, float]) -> set[PeerID]:
        """Returns the members that handed in less than half of what would count of their claim. What would count
        depends on the others' weights: it is the lesser of two, among those that handed in samples, and among all."""
        ramps = {member.peer_id: member.ramp for member in group.members}
        named = {peer: max(claim, weights.get(peer, 0.0)) for peer, claim in group.claims.items()}
        present = self._limits({peer: each for peer, each in named.items() if weights.get(peer)}, ramps)
        least = {
            peer: min(named[peer], limit, present.get(peer, limit))
            for peer, limit in self._limits(named, ramps).items()
        }
        return {peer for peer, weight in least.items() if 2 * weights.get(peer, 0.0) < weight}

    def forget(self, peer: PeerID) -> None:
        """The peer did not keep its word."""
        self._known.discard(peer)

    def _limits(self, named: Mapping[PeerID, float], ramps: Mapping[PeerID, float]) -> dict[PeerID, float]:
        trusts = self._bounds.trust == "members"
        return limits(named, {} if trusts else ramps, 1.0 if trusts else self._bounds.max_share)


class Pledges:
    """What the members of one group have claimed towards its target. The round counts only if members that kept their
    word had claimed half of the target. All members judge alike, before they vote."""

    def __init__(self, experience: Experience, group: Group, target: float) -> None:
        self._experience, self._group, self._target = experience, group, target
        self.withheld = set[PeerID]()  # members that have not kept their word, in a round that was refused

    def refuses(self, samples: Mapping[PeerID, float]) -> str:
        """Why a result with these samples of each member does not count; "": it does."""
        claims, absent = self._group.claims, self._experience.withheld(self._group, samples)
        kept = math.fsum(claim for peer, claim in claims.items() if peer not in absent)
        if 2 * kept >= self._target:
            return ""
        self.withheld = absent
        return (
            f"members did not send the samples that they had claimed: the others' are {kept:g} of {self._target:g}, "
            "less than half; all samples wait for the next round"
        )
