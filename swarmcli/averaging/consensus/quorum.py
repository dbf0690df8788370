"""How many members of a group decide, and which of them vote.

Where strangers average, up to f = ⌊(n − 1) / 3⌋ of n voters may be hostile, and n − f decide: any two such quorums have
more than f members in common, so an honest one, and it votes once. Where all members are honest, or where fewer than
four vote (of three none could be hostile), a majority decides, and half of the group may fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from swarmcli.averaging.config import Trust

LEAST_GUARDED = 4  # voters: with fewer f would be zero


@dataclass(frozen=True)
class Quorum:
    """Of a group of so many members, called 0 to members - 1; `auxiliaries` hold no averages."""

    members: int
    auxiliaries: frozenset[int] = frozenset()
    trust: Trust = "strangers"

    @cached_property
    def guarded(self) -> bool:
        """Whether the group is safe with a hostile minority."""
        return self.trust == "strangers" and self.members - len(self.auxiliaries) >= LEAST_GUARDED

    @cached_property
    def voters(self) -> frozenset[int]:
        """Auxiliaries vote only where nobody lies: they accept what is named to them."""
        everyone = frozenset(range(self.members))
        return everyone - self.auxiliaries if self.guarded else everyone

    @property
    def hostile(self) -> int:
        """f, for how many the group is safe."""
        return (len(self.voters) - 1) // 3 if self.guarded else 0

    @property
    def to_decide(self) -> int:
        """So many decide; in a guarded group they first say what they have voted, and then confirm it."""
        return len(self.voters) - self.hostile if self.guarded else majority(self.members)

    @property
    def to_abort(self) -> int:
        """So many give the round up. In a group that is not guarded half of it may: an abort need not meet another
        abort, but only every majority ("Flexible Paxos", 2016)."""
        return self.to_decide if self.guarded else blocking(self.members)

    @property
    def at_once(self) -> int:
        """So many equal votes at ballot zero decide without anything further."""
        return len(self.voters) if self.guarded else self.to_decide


def majority(members: int) -> int:
    """Any two majorities of a group have a member in common."""
    return members // 2 + 1


def blocking(members: int) -> int:
    """So many members have one in common with every majority, though not always with each other."""
    return members - majority(members) + 1
