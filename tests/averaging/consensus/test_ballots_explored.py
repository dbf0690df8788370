"""One outcome in every history of three members; the same look at them finds each mistake in a copy of the rules."""

from __future__ import annotations

import pytest

from swarmcli.averaging.consensus.ballots import (
    Acceptor,
    Bound,
    Promise,
    Proposal,
    Refusal,
    State,
    Tally,
)
from swarmcli.averaging.consensus.messages import Decision
from tests.averaging.exploration import Explorer, Rules
from tests.suites import soak

FIRST = [("aa", 3), ("aab", 2)]  # these alone show each of the mistakes below
FEW = [*FIRST, ("abx", 1), ("xab", 1), ("aaaa", 1)]
MANY = [
    *(
        (kinds, attempts)
        for attempts in (1, 2)
        for kinds in ("aaa", "aab", "abb", "aax", "abx", "axx", "xaa", "xab", "xax")
    ),
    *((kinds, attempts) for attempts in (1, 2, 3) for kinds in ("aa", "ab", "ax", "xa")),
    *((kinds, 1) for kinds in ("aaaa", "aaab", "aaax", "aabx", "aaxx", "xaaa")),
    *[("aaa", 3), ("axx", 3), ("aaaa", 2)],
]
CASES = [*FEW, *soak(case for case in MANY if case not in FEW)]


@pytest.mark.parametrize(("kinds", "attempts"), CASES)
def test_members_share_one_outcome_in_every_history(kinds: str, attempts: int) -> None:
    explorer = Explorer(kinds, attempts)
    worlds = explorer.explore()
    print(f"{kinds}, {attempts} ballots above zero: {worlds} worlds, ends {dict(explorer.endings)}")
    assert explorer.endings["committed"] + explorer.endings["again"] > 0 and explorer.endings["aborted"] > 0
    # Half of a group may not know what the other half has chosen, nor may a liar's victims without the leader.
    votes = {*kinds} - {"x"} if "x" in kinds[1:] else {*kinds[1:]}
    assert (explorer.endings["undecided"] > 0) == (len(votes) > 1 or len(kinds) % 2 == 0)


# --- mistakes ---------------------------------------------------------------------------------------------------------


class ForgetsPromises(Acceptor):
    def prepare(self, ballot: int) -> Promise | Refusal:
        before = self.promised
        answer = super().prepare(ballot)
        self.promised = before
        return answer


class CountsVotesTwice(Tally):
    def accept(self, member: int, digest: bytes) -> Decision | None:
        return super().accept(len(self._votes), digest)


class FollowsTheLowestBallot(Proposal):
    def _choice(self) -> State:
        above = [promise for promise in self._promises.values() if promise.accepted_ballot]
        lowest = min(above, key=lambda promise: promise.accepted_ballot or 0, default=None)
        return Bound(lowest.accepted) if lowest and lowest.accepted else super()._choice()


MISTAKES = [
    Rules(acceptor=ForgetsPromises),
    *soak([Rules(tally=CountsVotesTwice), Rules(proposal=FollowsTheLowestBallot)]),
]


@pytest.mark.parametrize("rules", MISTAKES, ids=["acceptor", "tally", "proposal"])
def test_each_mistake_is_found(rules: Rules) -> None:
    with pytest.raises((AssertionError, ValueError)):  # ValueError: the other classes notice by themselves
        for kinds, attempts in FIRST:
            Explorer(kinds, attempts, rules).explore()
