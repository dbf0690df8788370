"""How the members of a round agree on its outcome: single-decree Paxos, without I/O, clock or randomness.

After Leslie Lamport, "Paxos Made Simple" (2001), cited as PMS. Every member of a group is an acceptor. Ballots above
zero are the paper's: a proposer prepares (phase 1), learns what it may propose, has it accepted (phase 2), and a value
that a majority accepted in one ballot is chosen for ever. Ballot zero saves the usual round both phases: it has no
proposer, and a member accepts by itself the result that it holds. Honest reducers give everyone one result, so its
votes agree; a reducer that lies can split them. So a proposer counts the promises to find the value that ballot zero
may have chosen, as after a fast round ("Fast Paxos", 2006, observation 4). Or it asks the leader, which alone decides
ballot zero: once the leader has promised a higher ballot, without having decided, ballot zero has chosen nothing.

A majority chooses a result, and another try too: two unlike tries must not both be chosen. Half of the members can give
a round up: an abort need not meet another abort, for they are all the same, but only every majority ("Flexible Paxos",
2016). So the survivor of a pair can learn that its round has failed, instead of never knowing.

Votes belong to one life of a process: a member that has forgotten a promise must never answer for its group again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from swarmcli.averaging.consensus.messages import ZERO, Aborted, Committed, Decision, Promise
from swarmcli.averaging.consensus.quorum import blocking, majority

LEADER = 0  # the member that decides ballot zero

Value: TypeAlias = Decision


@dataclass(frozen=True, slots=True)
class Refusal:
    """Answer to Prepare or Accept: a higher ballot was promised, or (not higher) this value is not accepted here."""

    promised: int


class Acceptor:
    """One member's promises and votes (PMS 2.2, P1a). It never takes any back."""

    def __init__(self) -> None:
        self.promised = ZERO
        self.accepted: tuple[int, Value] | None = None

    def accept_zero(self, digest: bytes) -> bool:
        """Accepts a result at ballot zero. False: a higher ballot was promised, or another result accepted."""
        if self.promised > ZERO:
            return False
        if self.accepted is None:
            self.accepted = (ZERO, Committed(digest))
        return self.accepted == (ZERO, Committed(digest))

    def prepare(self, ballot: int) -> Promise | Refusal:
        """Phase 1b. Asked again by the same proposer, it promises again."""
        if ballot <= ZERO or ballot < self.promised:
            return Refusal(self.promised)
        self.promised = ballot
        return Promise(ballot, *(self.accepted or (None, None)))

    def accept(self, ballot: int, value: Value) -> bool:
        """Phase 2b, above ballot zero. False: a higher ballot was promised, or another value accepted in this one: two
        would be evidence against this member, and a proposer that lies could ask for both."""
        if ballot <= ZERO or ballot < self.promised:
            return False
        if self.accepted is not None and self.accepted[0] == ballot:
            return self.accepted[1] == value
        self.promised = ballot
        self.accepted = (ballot, value)
        return True


class Tally:
    """The leader's count of ballot zero: a majority for one digest commits it.

    No vote may be counted once the leader's own acceptor has promised a higher ballot, and it must not promise one
    after the decision: what others then propose rests on that.
    """

    def __init__(self, members: int, auxiliaries: Collection[int] = ()) -> None:
        """`members`: how many the group has, called 0 to members - 1; `auxiliaries`: those that hold no averages."""
        self.decision: Decision | None = None
        self._members, self._auxiliaries = members, frozenset(auxiliaries)
        self._votes: dict[int, bytes] = {}
        self._lost: set[int] = set()

    def accept(self, member: int, digest: bytes) -> Decision | None:
        """A member has accepted; its first vote stands. Returns the decision if there is one by now."""
        if self._votes.setdefault(member, digest) == digest:
            supporters = sum(vote == digest for vote in self._votes.values())
            if supporters >= majority(self._members):
                self.decision = Committed(digest)
        return self.decision

    def supporters(self, digest: bytes) -> list[int]:
        """The members that have accepted this digest."""
        return [member for member, vote in self._votes.items() if vote == digest]

    def lose(self, member: int) -> None:
        """A member will not accept: it cannot come to hold the result, or is out of reach.

        A vote that it has cast stands, and one that still arrives counts.
        """
        self._lost.add(member)

    @property
    def hopeless(self) -> bool:
        """Whether ballot zero can choose nothing more, as far as is known here."""
        votes, missing = Counter(self._votes.values()), self._missing()
        if not votes and missing <= self._auxiliaries:
            return True
        return self.decision is None and max(votes.values(), default=0) + len(missing) < majority(self._members)

    @property
    def digest_to_name(self) -> bytes | None:
        """The digest that auxiliaries are asked to accept, or None so far.

        Any digest would be safe. The leader names one that most members with tensors hold already, or all that are left
        of them: else an auxiliary's vote could commit a result that dies with its only holder.
        """
        holders = Counter(digest for member, digest in self._votes.items() if member not in self._auxiliaries)
        if not holders:
            return None
        digest, most = holders.most_common(1)[0]
        enough = most >= majority(self._members - len(self._auxiliaries))
        return digest if enough or self._missing() <= self._auxiliaries else None

    @property
    def held_by_most(self) -> bytes | None:
        """The digest that most members have accepted; None: none has accepted any."""
        return next((digest for digest, _ in Counter(self._votes.values()).most_common(1)), None)

    @property
    def needs_auxiliaries(self) -> bool:
        """Whether the members with tensors that are not lost are too few for a majority."""
        able = set(range(self._members)) - self._auxiliaries - self._lost
        return len(able) < majority(self._members)

    def _missing(self) -> set[int]:
        return set(range(self._members)) - self._votes.keys() - self._lost


@dataclass(frozen=True, slots=True)
class Waiting:
    """More answers may come, and are needed."""


@dataclass(frozen=True, slots=True)
class Free:
    """Nothing can have been chosen in a lower ballot: any value may be proposed."""


@dataclass(frozen=True, slots=True)
class Bound:
    """This value may have been chosen: no other one may be proposed."""

    value: Value


@dataclass(frozen=True, slots=True)
class Outbid:
    """This ballot fails because members have promised higher ones, at most `ballot`."""

    ballot: int


@dataclass(frozen=True, slots=True)
class Blocked:
    """Too many members are out of reach, or (unlike results) those in reach do not show which one was chosen."""


State: TypeAlias = Waiting | Free | Bound | Outbid | Blocked


class Proposal:
    """One ballot above zero at its proposer (PMS 2.2). A ballot is used once: its owner makes one Proposal of it."""

    def __init__(self, ballot: int, members: int) -> None:
        """`members`: how many the group has. Raises ValueError for ballot zero, which nobody proposes."""
        if ballot <= ZERO:
            raise ValueError(f"ballot {ballot} has no proposer")
        self.ballot = ballot
        self.value: Value | None = None  # once proposed
        self.decision: Decision | None = None
        self._members = members
        self._promises: dict[int, Promise] = {}
        self._accepted: set[int] = set()
        self._lost: set[int] = set()
        self._highest = ballot

    def promise(self, member: int, promise: Promise) -> None:
        """Phase 1: an answer to Prepare. One for another ballot is ignored, and so is one after `propose`."""
        if promise.ballot == self.ballot and self.value is None:
            self._promises.setdefault(member, promise)

    def refuse(self, member: int, refusal: Refusal) -> None:
        """Either phase: this member does not take part in this ballot."""
        self._highest = max(self._highest, refusal.promised)
        self._lost.add(member)

    def lose(self, member: int) -> None:
        """A member is out of reach, or does not accept the value. An answer that still arrives counts."""
        self._lost.add(member)

    @property
    def state(self) -> State:
        """Before `propose` the values that may be proposed, after it whether a majority can still accept."""
        answered = self._promises.keys() if self.value is None else self._accepted
        if len(answered) < self._needed:
            return self._wait_for(self._members - len(self._lost - answered) - self._needed + 1)
        return self._choice() if self.value is None else Waiting()

    @property
    def may_abort(self) -> bool:
        """Whether the round may be given up in this ballot; for that fewer promises are enough."""
        if self.value is not None or len(self._promises) < blocking(self._members):
            return False
        match self._choice():
            case Free() | Bound(Aborted()):
                return True
        return False

    def propose(self, value: Value) -> None:
        """Phase 2 begins: from here on the ballot stands for this value.

        Raises ValueError if it does not follow from the promises, or if another value was proposed.
        """
        allowed = self.state in (Free(), Bound(value)) or (isinstance(value, Aborted) and self.may_abort)
        if self.value is None and allowed:
            self.value = value
        elif self.value != value:
            raise ValueError(f"ballot {self.ballot} must not propose {value}: {self.value or self.state}")

    def accepted(self, member: int) -> Decision | None:
        """A member has accepted the proposed value. Returns the decision if enough have.

        Raises ValueError as long as nothing was proposed.
        """
        if self.value is None:
            raise ValueError(f"nothing was proposed in ballot {self.ballot}")
        self._accepted.add(member)
        if len(self._accepted) >= self._needed:
            self.decision = self.value
        return self.decision

    @property
    def _needed(self) -> int:
        """Answers in the present phase."""
        return blocking(self._members) if isinstance(self.value, Aborted) else majority(self._members)

    def _choice(self) -> State:
        """The values that the promises allow (PMS 2.2, P2c; at ballot zero any that may have got a majority).

        They are from a majority, or, if only an abort is proposed, from a blocking set: either has a member in common
        with every majority that may have accepted a result.
        """
        accepted = [promise for promise in self._promises.values() if promise.accepted is not None]
        last = max(accepted, key=lambda promise: promise.accepted_ballot or ZERO, default=None)
        if last is None or last.accepted is None:
            return Free()
        if last.accepted_ballot != ZERO:
            return Bound(last.accepted)
        if LEADER in self._promises:
            return Free()
        silent = self._members - len(self._promises)
        votes = Counter(promise.accepted for promise in accepted if promise.accepted is not None)
        chosen = [value for value, count in votes.items() if count + silent >= majority(self._members)]
        if len(chosen) > 1:
            return self._wait_for(silent - len(self._lost - self._promises.keys()))
        return Bound(chosen[0]) if chosen else Free()

    def _wait_for(self, hopes: int) -> State:
        if hopes > 0:
            return Waiting()
        return Outbid(self._highest) if self._highest > self.ballot else Blocked()


def ballot_after(ballot: int, member: int, members: int) -> int:
    """The lowest ballot above `ballot` that belongs to `member`: so no two members ever use the same one."""
    above = max(ballot, ZERO) + 1
    return above + (member - (above - 1)) % members


def proposer_of(ballot: int, members: int) -> int:
    """The owner of a ballot above zero. Raises ValueError for ballot zero."""
    if ballot <= ZERO:
        raise ValueError(f"ballot {ballot} has no proposer")
    return (ballot - 1) % members
