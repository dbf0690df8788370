"""One outcome per round: what the members agree on, without any I/O.

The round's result is one value, because each part is averaged by one reducer; its digest is a hash over the reducers'
hashes. A member that holds every part accepts it at ballot zero, by telling the leader the digest. An auxiliary holds
no averages: it accepts whatever the result is, once its own parts are averaged. When a majority of all members has
accepted one digest, the leader commits it; when that has become impossible, the leader aborts. It decides once, and
everybody else learns the decision from it or, if it is lost, from whoever has heard of it:

    committed, and own digest equal     apply
    committed, otherwise                undecided: the group has a result that is not here
    aborted                             failed: nobody applies anything
    nobody knows                        undecided: inputs are kept

So no two members apply different results, and none takes a round for failed that another one applies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from swarmcli.errors import RoundFailed, RoundUndecided


@dataclass(frozen=True, slots=True)
class Accept:
    """A member's vote for the result; `digest` is None from an auxiliary, which accepts whatever it is."""

    digest: bytes | None


@dataclass(frozen=True, slots=True)
class Reject:
    """A member's vote when it cannot come to hold the result."""

    reason: str
    suspects: tuple[int, ...] = ()  # members whose fault it seems to be


Vote: TypeAlias = Accept | Reject


@dataclass(frozen=True, slots=True)
class Committed:
    digest: bytes


@dataclass(frozen=True, slots=True)
class Aborted:
    reason: str
    suspects: tuple[int, ...] = ()


Decision: TypeAlias = Committed | Aborted


class Tally:
    """The leader's count of the votes of ballot zero. `decision` is set once and never changes."""

    def __init__(self, voters: int) -> None:
        """`voters`: how many members the group has; they are called 0 to voters - 1."""
        self.decision: Decision | None = None
        self._voters = voters
        self._votes: dict[int, Vote] = {}
        self._lost: dict[int, str] = {}

    @property
    def majority(self) -> int:
        return self._voters // 2 + 1

    def vote(self, voter: int, vote: Vote) -> Decision | None:
        """Counts a vote; the first of each member stands. Returns the decision if there is one now."""
        self._votes.setdefault(voter, vote)
        return self._decide()

    def lose(self, voter: int, reason: str) -> Decision | None:
        """A member is out of reach. A vote that it has cast stands, and one that still arrives counts."""
        self._lost[voter] = reason
        return self._decide()

    def give_up(self, reason: str) -> Decision:
        """The deadline has passed; without a decision so far, this aborts."""
        if self.decision is None:
            self.decision = Aborted(reason, self._suspects())
        return self.decision

    def _decide(self) -> Decision | None:
        if self.decision is None:
            accepted = Counter(vote.digest for vote in self._votes.values() if isinstance(vote, Accept))
            anything = accepted.pop(None, 0)
            digest, most = accepted.most_common(1)[0] if accepted else (None, 0)
            if digest is not None and most + anything >= self.majority:
                self.decision = Committed(digest)
            elif most + anything + self._still_to_come() < self.majority or self._nobody_can_name_it(digest):
                self.decision = Aborted(self._why(most + anything), self._suspects())
        return self.decision

    def _still_to_come(self) -> int:
        return self._voters - len(self._votes.keys() | self._lost.keys())

    def _nobody_can_name_it(self, digest: bytes | None) -> bool:
        return digest is None and self._still_to_come() == 0

    def _why(self, accepted: int) -> str:
        reasons = [vote.reason for vote in self._votes.values() if isinstance(vote, Reject)]
        reasons += [reason for voter, reason in self._lost.items() if voter not in self._votes]
        words = "; ".join(dict.fromkeys(reasons)) or "unlike results"
        return f"{accepted} of {self._voters} members hold the result, {self.majority} are needed: {words}"[:500]

    def _suspects(self) -> tuple[int, ...]:
        named = {suspect for vote in self._votes.values() if isinstance(vote, Reject) for suspect in vote.suspects}
        return tuple(sorted(named | (self._lost.keys() - self._votes.keys())))


class Hearsay:
    """How a member other than the leader learns the decision: from the leader, or else from anyone who knows it."""

    def __init__(self, others: Iterable[int]) -> None:
        """`others`: the members that can be asked, besides the leader."""
        self.decision: Decision | None = None
        self.leader_lost = False
        self._unasked = set(others)

    @property
    def settled(self) -> bool:
        """Whether waiting any longer is of use."""
        return self.decision is not None or (self.leader_lost and not self._unasked)

    def heard(self, decision: Decision) -> None:
        """Someone knows. All who know it know the same, so the first word stands."""
        if self.decision is None:
            self.decision = decision

    def lose_leader(self) -> tuple[int, ...]:
        """The leader is out of reach; returns whom to ask."""
        self.leader_lost = True
        return tuple(sorted(self._unasked))

    def no_answer(self, member: int) -> None:
        """A member that was asked does not know either, or cannot be reached."""
        self._unasked.discard(member)


def conclude(own: bytes | None, decision: Decision | None, members: Sequence[bytes] = ()) -> None:
    """Returns if a member that holds the result with digest `own` (None: not all of it) is to apply it.

    Raises RoundFailed if the group gave the round up, naming the suspects among `members`, and RoundUndecided if
    this member cannot follow the group.
    """
    match decision:
        case None:
            raise RoundUndecided("the leader was lost, and nobody else in reach knows the outcome")
        case Aborted(reason, suspects):
            raise RoundFailed(reason, [members[suspect] for suspect in suspects if suspect < len(members)])
        case Committed(digest) if own is None:
            raise RoundUndecided(f"the group committed the result {digest.hex()[:8]}, which is not all here")
        case Committed(digest) if own != digest:
            raise RoundUndecided(f"the group committed another result than the one that is here ({digest.hex()[:8]})")
