"""How much of a group decides, and which of its members vote.

Where strangers average, up to f = ⌊(n − 1) / 3⌋ of n voters may be hostile, and n − f decide: any two such quorums have
more than f in common, so an honest one, and it votes once. Keys cost nothing, and addresses do: where members listen
in four networks or more, n counts networks, and members that do not listen have no vote. Where all members are honest,
or fewer than four vote (of three none could be hostile), a majority decides, and half of the group may fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from swarmcli.averaging.config import Trust

LEAST_GUARDED = 4  # voters: with fewer f would be zero


@dataclass(frozen=True)
class Quorum:
    """The voters of a group of so many members, called 0 to members - 1; `auxiliaries` hold no averages. `networks`:
    the one in which each member listens, 0 for a member that does not, see `Group`; (): unknown, each voter counts as
    one."""

    members: int
    auxiliaries: frozenset[int] = frozenset()
    trust: Trust = "strangers"
    networks: Sequence[int] = ()

    @cached_property
    def guarded(self) -> bool:
        """Whether the group is safe with a hostile minority."""
        return self.trust == "strangers" and self.members - len(self.auxiliaries) >= LEAST_GUARDED

    @cached_property
    def by_networks(self) -> bool:
        """Whether each network has one vote."""
        able = {self.networks[index] for index in range(len(self.networks)) if index not in self.auxiliaries} - {0}
        return self.guarded and len(able) >= LEAST_GUARDED

    @cached_property
    def weights(self) -> Mapping[int, Fraction | int]:
        """Voter → its weight: the voters of a network share its vote alike. Auxiliaries vote only in groups that are
        not guarded: they accept any result that the leader names."""
        everyone = [index for index in range(self.members) if not (self.guarded and index in self.auxiliaries)]
        if not self.by_networks:
            return dict.fromkeys(everyone, 1)
        sharing = Counter(self.networks[index] for index in everyone)
        return {index: Fraction(1, sharing[network]) for index in everyone if (network := self.networks[index])}

    @cached_property
    def voters(self) -> frozenset[int]:
        return frozenset(self.weights)

    def weight(self, members: Iterable[int]) -> Fraction | int:
        return sum(self.weights.get(index, 0) for index in set(members))

    @cached_property
    def hostile(self) -> int:
        """f: with so many hostile votes the group is safe."""
        return (int(self.weight(self.voters)) - 1) // 3 if self.guarded else 0

    @cached_property
    def to_decide(self) -> int:
        """So many votes decide; in a guarded group the voters cast them first, and then confirm."""
        return int(self.weight(self.voters)) - self.hostile if self.guarded else majority(self.members)

    def decides(self, members: Iterable[int]) -> bool:
        """Whether these members have so many votes together."""
        return self.weight(members) >= self.to_decide

    @property
    def to_abort(self) -> int:
        """So many votes give the round up. In a group that is not guarded half of it may: an abort need not meet
        another abort, but only every majority ("Flexible Paxos", 2016)."""
        return self.to_decide if self.guarded else blocking(self.members)

    @property
    def at_once(self) -> int:
        """So many voters with equal votes at ballot zero decide without anything further."""
        return len(self.voters) if self.guarded else self.to_decide


def majority(members: int) -> int:
    """Any two majorities of a group have a member in common."""
    return members // 2 + 1


def blocking(members: int) -> int:
    """So many members have one in common with every majority, though not always with each other."""
    return members - majority(members) + 1
