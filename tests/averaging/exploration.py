"""Every history of three members that agree on an outcome, as far as ballots are bounded.

The world only grows: what was said stays said, and any member may hear any of it at any time or never. So one
exploration holds every order of messages, loss, repetition, members that stop for ever or for a while at any point, and
proposers that duel or replace each other (Lamport's own specification of Paxos does the same). Acceptors, tallies and
proposals are the real classes; what they answer is remembered, so that each answer is computed once.

A result at ballot zero is "a" or "b": more than one if a reducer lies. An auxiliary ("x") holds none and accepts one
that a member with tensors has accepted, because only such are named to it. A member that never comes to hold a result
is one whose vote never comes. The leader decides ballot zero, as long as it has not promised a higher one, and promises
none after that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, permutations
from typing import Any, TypeAlias

from swarmcli.averaging.consensus.ballots import (
    LEADER,
    Acceptor,
    Blocked,
    Bound,
    Free,
    Outbid,
    Promise,
    Proposal,
    Tally,
    Value,
    ballot_after,
)
from swarmcli.averaging.consensus.messages import Aborted, Again, Committed
from swarmcli.averaging.consensus.quorum import blocking, majority


@dataclass(frozen=True)
class Rules:
    """The classes to explore: the real ones, or copies with a mistake in them."""

    acceptor: type[Acceptor] = Acceptor
    tally: type[Tally] = Tally
    proposal: type[Proposal] = Proposal


@dataclass(frozen=True)
class Member:
    """An acceptor and all that it ever said; `promises` and `accepted` by attempt."""

    kind: str
    promises: tuple[Promise | None, ...]
    accepted: tuple[bool, ...]
    vote: bytes | None = None  # told to the leader at ballot zero
    promised: int = 0
    last: tuple[int, Value] | None = None  # accepted last
    leads: bool = False
    decided: Value | None = None  # ballot zero, as the leader


ABORTED = Aborted("")  # for whatever reason: as decisions all aborts are the same

World: TypeAlias = tuple[tuple[int, ...], tuple[Value | None, ...]]  # members by number; what each attempt proposed
Living: TypeAlias = tuple[tuple[int, int, tuple[int, Value] | None], ...]  # place, promised, accepted last


@dataclass
class Explorer:
    """`explore` visits every world once; one in which an invariant is broken ends it with an AssertionError."""

    kinds: str  # of the members, the leader first: "aab" have tensors, and the last one was told another result
    attempts: int  # ballots above zero: of members 0, 1, 2, 0, ...
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.count = count = len(self.kinds)
        turns = range(self.attempts)
        self.ballots = [ballot_after(turn // count * count, turn % count, count) for turn in turns]
        self.endings: Counter[str] = Counter()  # how those who were left came to an end, of different cases
        self._members: list[Member] = []
        self._numbers: dict[Member, int] = {}
        self._came_from: dict[World, World | None] = {}
        for method in ("_steps", "_forget", "_offers", "_counted", "_passed", "_finish", "_left"):
            setattr(self, method, lru_cache(maxsize=None)(getattr(self, method)))

    def explore(self) -> int:
        """The number of worlds."""
        nothing = Member("", (None,) * self.attempts, (False,) * self.attempts)
        members = tuple(
            self._number(replace(nothing, kind=kind, leads=place == LEADER)) for place, kind in enumerate(self.kinds)
        )
        start: World = (members, (None,) * self.attempts)
        self._came_from[start] = None
        waiting = [start]
        while waiting:
            world = waiting.pop()
            for following in self._following(world):
                if following not in self._came_from:
                    self._came_from[following] = world
                    self._check(following, world)
                    waiting.append(following)
        return len(self._came_from)

    # What may happen next

    def _following(self, world: World) -> Iterator[World]:
        numbers, proposals = world
        members = [self._members[number] for number in numbers]
        named = frozenset(member.vote for member in members if member.kind != "x" and member.vote)
        leader = members[LEADER]
        if leader.decided is None and leader.promised == 0:
            for decision in self._counted(tuple(member.vote for member in members)):
                yield _with(numbers, LEADER, self._number(replace(leader, decided=decision))), proposals
        for position, number in enumerate(numbers):
            for step in self._steps(number, proposals, named):
                yield self._sorted(_with(numbers, position, step)), proposals
        for attempt, proposed in enumerate(proposals):
            if proposed is None:
                for value in self._offers(attempt, numbers):
                    heard = tuple(self._forget(number, attempt) for number in numbers)
                    yield self._sorted(heard), _with(proposals, attempt, value)

    def _sorted(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Members of one kind, besides the leader, can be exchanged for each other."""
        return numbers[:1] + tuple(sorted(numbers[1:], key=lambda number: (self._members[number].kind, number)))

    def _steps(self, number: int, proposals: tuple[Value | None, ...], named: frozenset[bytes]) -> list[int]:
        """What one member may become with one message."""
        member = self._members[number]
        following = []
        for digest in named if member.kind == "x" else {member.kind.encode()}:
            acceptor = self._acceptor(member)
            if member.vote is None and acceptor.accept_zero(digest):
                following.append(self._after(member, acceptor, vote=digest))
        if member.decided is not None:
            return following  # its answer to everything is the decision
        for attempt, (ballot, value) in enumerate(zip(self.ballots, proposals, strict=True)):
            acceptor = self._acceptor(member)
            answer = acceptor.prepare(ballot)
            if member.promises[attempt] is None and isinstance(answer, Promise):
                promises = _with(member.promises, attempt, answer if value is None else None)
                following.append(self._after(member, acceptor, promises=promises))
            acceptor = self._acceptor(member)
            if value is not None and not member.accepted[attempt] and acceptor.accept(ballot, value):
                following.append(self._after(member, acceptor, accepted=_with(member.accepted, attempt, True)))
        return following

    def _forget(self, number: int, attempt: int) -> int:
        """Once an attempt has proposed, nobody looks at its promises any more: worlds that differ in them are one."""
        member = self._members[number]
        return self._number(replace(member, promises=_with(member.promises, attempt, None)))

    def _acceptor(self, member: Member) -> Acceptor:
        acceptor = self.rules.acceptor()
        acceptor.promised, acceptor.accepted = member.promised, member.last
        return acceptor

    def _after(self, member: Member, acceptor: Acceptor, **said: Any) -> int:
        return self._number(replace(member, promised=acceptor.promised, last=acceptor.accepted, **said))

    def _number(self, member: Member) -> int:
        if member not in self._numbers:
            self._numbers[member] = len(self._members)
            self._members.append(member)
        return self._numbers[member]

    def _offers(self, attempt: int, numbers: tuple[int, ...]) -> list[Value]:
        """What the proposer of an attempt may propose now: it may have heard any of the promises, in any order."""
        said = [(index, self._members[number].promises[attempt]) for index, number in enumerate(numbers)]
        promises = [(index, promise) for index, promise in said if promise is not None]
        values: dict[Value, None] = {}
        for heard in range(len(promises) + 1):
            for some in permutations(promises, heard):
                values.update(dict.fromkeys(self._allowed(attempt, some)))
        return list(values)

    def _allowed(self, attempt: int, heard: Sequence[tuple[int, Promise]]) -> list[Value]:
        proposal = self.rules.proposal(self.ballots[attempt], self.count)
        for index, promise in (*heard, *heard):  # each may arrive twice
            proposal.promise(index, promise)
        abort: list[Value] = [ABORTED] if proposal.may_abort else []
        match proposal.state:
            case Free():
                return [*abort, Again((), (), b"%d" % attempt)]
            case Bound(value):
                return [*abort, value]
        return abort

    # What must hold

    def _check(self, world: World, before: World) -> None:
        members = [self._members[number] for number in world[0]]
        decided = self._decided(world)
        self._hold(len(decided) <= 1, "two decisions", world)
        self._hold(self._decided(before) <= decided, "a decision was taken back", world)
        held = {member.vote for member in members if member.kind != "x"}
        for value in decided:
            sound = not isinstance(value, Committed) or value.digest in held
            self._hold(sound, "nobody holds this result", world)
        for living in self._left(world[0]):
            ends = self._finish(living)
            self._hold(not decided or ends <= decided, "those who are left decide otherwise", world)

    def _hold(self, condition: bool, what: str, world: World) -> None:
        assert condition, self._story(what, world)

    def _story(self, what: str, world: World) -> str:
        worlds: list[World] = []
        before: World | None = world
        while before is not None:
            worlds.append(before)
            before = self._came_from[before]
        lines = [f"{what}: {set(self._decided(world))}"]
        for numbers, proposals in reversed(worlds):
            lines += [f"proposed {proposals}", *(f"    {self._members[number]}" for number in numbers)]
        return "\n".join(lines)

    def _decided(self, world: World) -> frozenset[Value]:
        """Whatever anybody can conclude by now."""
        numbers, proposals = world
        members = [self._members[number] for number in numbers]
        decided = frozenset({members[LEADER].decided} - {None})
        for attempt, value in enumerate(proposals):
            if value is not None:
                decided |= self._passed(attempt, value, tuple(member.accepted[attempt] for member in members))
        return decided

    def _counted(self, votes: tuple[bytes | None, ...]) -> frozenset[Value]:
        """The leader's decisions, whichever votes it has heard in whichever order."""
        decided: set[Value] = set()
        for order in permutations((index, vote) for index, vote in enumerate(votes) if vote is not None):
            tally = self.rules.tally(self.count, [index for index, kind in enumerate(self.kinds) if kind == "x"])
            for index, vote in order:
                decided.update(filter(None, [tally.accept(index, vote), tally.accept(index, vote)]))
        return frozenset(decided)

    def _passed(self, attempt: int, value: Value, accepted: tuple[bool, ...]) -> frozenset[Value]:
        """The decision of an attempt that has proposed this value."""
        proposal = self.rules.proposal(self.ballots[attempt], self.count)
        proposal.value = value
        for index, has in enumerate(accepted):
            if has:
                proposal.accepted(index)
                proposal.accepted(index)
        return frozenset() if proposal.decision is None else frozenset([proposal.decision])

    # Whatever happened: a majority that lives and hears each other comes to an end

    def _left(self, numbers: tuple[int, ...]) -> list[Living]:
        """Who may be left: everybody, or enough at least to give the round up; nobody who knows the decision."""
        members = [self._members[number] for number in numbers]
        living = [(place, member.promised, member.last) for place, member in enumerate(members) if not member.decided]
        sizes = range(blocking(self.count), self.count + 1)
        return [some for size in sizes for some in combinations(living, size)]

    def _finish(self, living: Living) -> frozenset[Value]:
        """What they decide, depending on who of them proposes; nothing where they cannot know what was chosen."""
        ends = [self._finish_by(proposer, living) for proposer in range(len(living))]
        self.endings.update("undecided" if end is None else type(end).__name__.lower() for end in ends)
        return frozenset(end for end in ends if end is not None)

    def _finish_by(self, position: int, living: Living) -> Value | None:
        acceptors = {
            place: self._acceptor(Member("", (), (), None, promised, last)) for place, promised, last in living
        }
        me = living[position][0]
        ballot = ballot_after(acceptors[me].promised, me, self.count)
        for _ in range(self.count):
            proposal = self._prepared(ballot, acceptors)
            match proposal.state:
                case Outbid(higher):
                    ballot = ballot_after(higher, me, self.count)
                case Blocked():
                    return self._blocked(proposal, acceptors, living)
                case Bound(Committed() | Again() as value):
                    return self._accepted(proposal, value, acceptors)
                case Free() | Bound():
                    return self._accepted(proposal, ABORTED, acceptors)
                case state:
                    raise AssertionError((state, living))
        raise AssertionError(("outbid again and again", living))

    def _blocked(self, proposal: Proposal, acceptors: Mapping[int, Acceptor], living: Living) -> Value | None:
        """Fewer than a majority, or the victims of a liar without the leader: they give up, if that is safe."""
        if proposal.may_abort:
            return self._accepted(proposal, ABORTED, acceptors)
        results = {last for _, _, last in living if last is not None}
        assert results, ("nothing was accepted, but they do not give up", living)
        assert LEADER not in acceptors or any(ballot > 0 for ballot, _ in results), ("the leader is here", living)
        assert len(living) < majority(self.count) or len(results) > 1, ("blocked", living)
        return None

    def _prepared(self, ballot: int, acceptors: Mapping[int, Acceptor]) -> Proposal:
        proposal = self.rules.proposal(ballot, self.count)
        for lost in set(range(self.count)) - acceptors.keys():
            proposal.lose(lost)
        for index, acceptor in acceptors.items():
            answer = acceptor.prepare(ballot)
            if isinstance(answer, Promise):
                proposal.promise(index, answer)
            else:
                proposal.refuse(index, answer)
        return proposal

    def _accepted(self, proposal: Proposal, value: Value, acceptors: Mapping[int, Acceptor]) -> Value:
        proposal.propose(value)
        for index, acceptor in acceptors.items():
            if acceptor.accept(proposal.ballot, value):
                proposal.accepted(index)
        assert proposal.decision == value, ("not accepted", value)
        return value


def _with(values: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    return (*values[:position], value, *values[position + 1 :])
