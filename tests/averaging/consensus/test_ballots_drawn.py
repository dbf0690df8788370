"""Groups of 2 to 16 agree on an outcome, drawn by seeds: messages in any order, lost and doubled, members that die."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from swarmcli.averaging.consensus.ballots import (
    Acceptor,
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
from swarmcli.averaging.consensus.quorum import majority

Message = Callable[[], None]


@dataclass
class Member:
    """What one process knows and does; `get` is the result that its reducers have for it, None from an auxiliary."""

    index: int
    get: bytes | None
    acceptor: Acceptor = field(default_factory=Acceptor)
    proposal: Proposal | None = None
    decision: Value | None = None
    holds: set[bytes] = field(default_factory=set)
    awake: bool = True
    dead: bool = False


class Group:
    """A round of `size` members, of whom `faults` die or freeze for a while at moments of their own."""

    def __init__(self, size: int, faults: int, random_: random.Random) -> None:
        self.random, self.size, self.faults = random_, size, min(faults, size - 1)
        self.pace = random_.choice([0.72, 0.75, 0.95])  # how soon results arrive, beside other things that happen
        lies = random_.random() < 0.2  # of one reducer, which tells some members another result
        self.members = [Member(index, self._result(index, lies)) for index in range(size)]
        self.tally = Tally(size, [member.index for member in self.members if member.get is None])
        self.messages: list[tuple[int, Message]] = []
        self.concluded: set[Value] = set()

    def _result(self, index: int, lies: bool) -> bytes | None:
        if index > 0 and self.random.random() < 0.25:
            return None
        return b"b" if lies and self.random.random() < 0.4 else b"a"

    # The network

    def send(self, to: Member, act: Message) -> None:
        for _ in range(1 + (self.random.random() < 0.05)):
            self.messages.append((to.index, act))

    def deliver(self, position: int) -> None:
        to, act = self.messages.pop(position)
        if not self.members[to].dead:
            act()

    def step(self) -> None:
        """One thing happens, whichever."""
        deliverable = [place for place, (to, _) in enumerate(self.messages) if self.members[to].awake]
        awake = [member for member in self.members if member.awake and not member.dead]
        dice = self.random.random()
        if deliverable and dice < 0.7:
            self.deliver(self.random.choice(deliverable))
        elif self.messages and dice < 0.72:
            self.messages.pop(self.random.randrange(len(self.messages)))  # lost with its connection
        elif awake and dice < self.pace:
            self.get_result(self.random.choice(awake))
        elif awake and dice < 0.98:
            self.prepare(self.random.choice(awake))
        elif self.faults and dice < 0.99:
            self.faults -= 1
            victim = self.random.choice(self.members)
            victim.awake, victim.dead = False, self.random.random() < 0.6
        else:
            for member in self.members:
                member.awake = not member.dead

    # Ballot zero

    def get_result(self, member: Member) -> None:
        if member.get is not None and member.get not in member.holds:
            member.holds.add(member.get)
            self.accept_zero(member, member.get)

    def accept_zero(self, member: Member, digest: bytes) -> None:
        if member.acceptor.accept_zero(digest):
            self.send(self.members[0], partial(self.count, member, digest))

    def count(self, voter: Member, digest: bytes) -> None:
        if self.members[0].acceptor.promised > 0:
            return  # the leader itself has ended ballot zero
        self.conclude(self.members[0], self.tally.accept(voter.index, digest))
        named = self.tally.digest_to_name
        for member in self.members:
            if voter.get is not None and member.get is None and named is not None:
                self.send(member, partial(self.accept_zero, member, named))

    # Ballots above zero

    def prepare(self, proposer: Member, above: int = 0) -> None:
        used = proposer.proposal.ballot if proposer.proposal else 0  # what it promises itself may still be on its way
        known = max(above, used, proposer.acceptor.promised)
        proposer.proposal = proposal = Proposal(ballot_after(known, proposer.index, self.size), self.size)
        for member in self.members:
            self.send(member, partial(self.promise, member, proposer, proposal))

    def promise(self, member: Member, proposer: Member, proposal: Proposal) -> None:
        if member.decision is not None:
            self.send(proposer, partial(self.conclude, proposer, member.decision))
            return
        answer = member.acceptor.prepare(proposal.ballot)
        hear = proposal.promise if isinstance(answer, Promise) else proposal.refuse
        self.send(proposer, partial(self.heard, proposer, proposal, partial(hear, member.index, answer)))  # type: ignore[arg-type]

    def heard(self, proposer: Member, proposal: Proposal, hear: Message) -> None:
        hear()
        if proposal.may_abort and self.random.random() < 0.05:
            self.propose(proposal, proposer, Aborted(f"by {proposer.index}"))
        match proposal.state:
            case Outbid(higher) if proposer.proposal is proposal and proposer.decision is None:
                self.prepare(proposer, higher)
            case Free() if proposal.value is None:
                self.propose(proposal, proposer, self.free_value(proposer, proposal))
            case Bound(value) if proposal.value is None:
                self.propose(proposal, proposer, value)

    def free_value(self, proposer: Member, proposal: Proposal) -> Value:
        if self.random.random() < 0.5:
            return Aborted(f"by {proposer.index}")
        return Again((), (), b"%d" % proposal.ballot)

    def propose(self, proposal: Proposal, proposer: Member, value: Value) -> None:
        proposal.propose(value)
        for member in self.members:
            self.send(member, partial(self.accept, member, proposer, proposal, value))

    def accept(self, member: Member, proposer: Member, proposal: Proposal, value: Value) -> None:
        if member.decision is not None:
            self.send(proposer, partial(self.conclude, proposer, member.decision))
            return
        if isinstance(value, Committed) and member.get is not None:
            if not any(value.digest in other.holds for other in self.members if other.awake and not other.dead):
                return
            member.holds.add(value.digest)
        if member.acceptor.accept(proposal.ballot, value):
            self.send(proposer, lambda: self.conclude(proposer, proposal.accepted(member.index)))

    def conclude(self, member: Member, decision: Value | None) -> None:
        if decision is not None and member.decision is None:
            member.decision = decision
            for other in self.members:
                self.send(other, partial(self.conclude, other, decision))
        self.check(decision)

    # What must hold

    def check(self, decision: Value | None) -> None:
        if decision is not None:
            self.concluded.add(Aborted("") if isinstance(decision, Aborted) else decision)
        assert len(self.concluded) <= 1, self.concluded
        for value in self.concluded:
            assert not isinstance(value, Committed) or any(value.digest in member.holds for member in self.members)

    def finish(self) -> str:
        """No more faults: the living hear each other, and one of them proposes again until it knows."""
        living = [member for member in self.members if not member.dead]
        for member in living:
            member.awake = True
            for other in living:
                self.send(other, partial(self.conclude, other, member.decision))  # whoever asks is told
        for _ in range(5):
            self.prepare(living[0])
            for member in set(range(self.size)) - {member.index for member in living}:
                assert living[0].proposal is not None
                living[0].proposal.lose(member)
            while self.messages:
                self.deliver(self.random.randrange(len(self.messages)))
        ends = {Aborted("") if isinstance(member.decision, Aborted) else member.decision for member in living}
        assert len(ends) == 1, ends
        return self.named(ends.pop(), living)

    def named(self, decision: Value | None, living: list[Member]) -> str:
        """How it ended. No decision has a reason: no majority, a liar's victims, or nobody with the result lives."""
        if decision is not None:
            return type(decision).__name__
        if len(living) < majority(self.size):
            return "no majority"
        if len({member.get for member in self.members} - {None}) > 1:
            return "unlike results"
        value = living[0].proposal.value if living[0].proposal else None
        assert isinstance(value, Committed) and not any(value.digest in member.holds for member in living), value
        return "died with its holders"


@pytest.mark.soak  # `test_ballots_explored.py` sees every history of small groups in `make test`
@pytest.mark.parametrize("faults", [1, 2])
@pytest.mark.parametrize("block", [0, 1])
def test_drawn_groups_share_one_outcome(block: int, faults: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(250 * block, 250 * block + 250):
        random_ = random.Random(seed * 2 + faults)
        group = Group(random_.randint(2, 16), faults, random_)
        for _ in range(random_.randint(10, 400)):
            group.step()
        try:
            ends[group.finish()] += 1
        except AssertionError:
            print(f"seed {seed}, {faults} faults, {group.size} members")
            raise
    print(f"{faults} faults: {dict(ends)}")
    assert ends["Committed"] > 60 and ends["Again"] > 40 and ends["Aborted"] > 40
