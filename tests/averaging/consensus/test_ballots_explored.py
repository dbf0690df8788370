"""One outcome in every history of three members; the same look at them finds each mistake in a copy of the rules."""

from __future__ import annotations

import pytest

from swarmcli.averaging.consensus import quorum
from swarmcli.averaging.consensus.ballots import (
    Acceptor,
    Blocked,
    Bound,
    Free,
    Outbid,
    Promise,
    Proposal,
    Refusal,
    State,
    Tally,
    Value,
)
from swarmcli.averaging.consensus.messages import Committed, Decision
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


class AcceptsZeroAfterAPromise(Acceptor):
    def accept_zero(self, digest: bytes) -> bool:
        promised, self.promised = self.promised, 0
        accepted = super().accept_zero(digest)
        self.promised = promised
        return accepted


class AcceptsLowerBallots(Acceptor):
    def accept(self, ballot: int, value: Value) -> bool:
        self.accepted = (ballot, value)
        return True


class AcceptsWithoutAPromise(Acceptor):
    def accept(self, ballot: int, value: Value) -> bool:
        before = self.promised
        accepted = super().accept(ballot, value)
        self.promised = before
        return accepted


class ConcealsWhatItAccepted(Acceptor):
    def prepare(self, ballot: int) -> Promise | Refusal:
        answer = super().prepare(ballot)
        return Promise(ballot) if isinstance(answer, Promise) else answer


class KeepsWhatItAcceptedFirst(Acceptor):
    def accept(self, ballot: int, value: Value) -> bool:
        before = self.accepted
        accepted = super().accept(ballot, value)
        self.accepted = before or self.accepted
        return accepted


class RefusesWithoutAReason(Acceptor):
    def prepare(self, ballot: int) -> Promise | Refusal:
        answer = super().prepare(ballot)
        return Refusal(0) if isinstance(answer, Refusal) else answer


class CommitsOnHalf(Tally):
    def accept(self, member: int, digest: bytes) -> Decision | None:
        super().accept(member, digest)
        if list(self._votes.values()).count(digest) >= self._members // 2:
            self.decision = Committed(digest)
        return self.decision


class CountsUnlikeResultsTogether(Tally):
    def accept(self, member: int, digest: bytes) -> Decision | None:
        super().accept(member, digest)
        if len(self._votes) >= quorum.majority(self._members):
            self.decision = Committed(digest)
        return self.decision


class CountsVotesTwice(Tally):
    def accept(self, member: int, digest: bytes) -> Decision | None:
        return super().accept(len(self._votes), digest)


class IgnoresWhatBinds(Proposal):
    def _choice(self) -> State:
        return Free()


class IgnoresBallotZero(Proposal):
    def _choice(self) -> State:
        votes = [promise.accepted_ballot for promise in self._promises.values()]
        return super()._choice() if any(votes) else Free()


class ForgetsThoseWhoAreSilent(Proposal):
    def _choice(self) -> State:
        silent, self._members = self._members, len(self._promises)
        state = super()._choice()
        self._members = silent
        return state if state != Blocked() else Free()


class FollowsTheLowestBallot(Proposal):
    def _choice(self) -> State:
        above = [promise for promise in self._promises.values() if promise.accepted_ballot]
        lowest = min(above, key=lambda promise: promise.accepted_ballot or 0, default=None)
        return Bound(lowest.accepted) if lowest and lowest.accepted else super()._choice()


class GuessesBetweenTwo(Proposal):
    def _choice(self) -> State:
        state, votes = super()._choice(), [promise.accepted for promise in self._promises.values() if promise.accepted]
        return state if isinstance(state, Bound | Free) else Bound(votes[0])


class PreparesHalf(Proposal):
    @property
    def state(self) -> State:
        return self._choice() if len(self._promises) >= self._members // 2 else super().state


class AbortsWithOnePromiseTooFew(Proposal):
    @property
    def may_abort(self) -> bool:
        return self.value is None and len(self._promises) >= quorum.blocking(self._members) - 1


class AbortsWhatMayBeChosen(Proposal):
    @property
    def may_abort(self) -> bool:
        return self.value is None and len(self._promises) >= quorum.blocking(self._members)


class CommitsAsEasilyAsItAborts(Proposal):
    @property
    def state(self) -> State:
        return self._choice() if self.may_abort else super().state


class CountsPromisesTwice(Proposal):
    def promise(self, member: int, promise: Promise) -> None:
        super().promise(len(self._promises), promise)


class DecidesOnHalf(Proposal):
    def accepted(self, member: int) -> Decision | None:
        super().accepted(member)
        if len(self._accepted) >= self._members // 2:
            self.decision = self.value
        return self.decision


class CountsAcceptancesTwice(Proposal):
    def accepted(self, member: int) -> Decision | None:
        return super().accepted(len(self._accepted))


class NeverBidsHigher(Proposal):
    @property
    def state(self) -> State:
        return Blocked() if isinstance(super().state, Outbid) else super().state


MISTAKES: list[Rules] = [
    *(
        Rules(acceptor=acceptor)
        for acceptor in (
            ForgetsPromises,
            AcceptsZeroAfterAPromise,
            AcceptsLowerBallots,
            AcceptsWithoutAPromise,
            ConcealsWhatItAccepted,
            KeepsWhatItAcceptedFirst,
            RefusesWithoutAReason,
        )
    ),
    *(Rules(tally=tally) for tally in (CommitsOnHalf, CountsUnlikeResultsTogether, CountsVotesTwice)),
    *(
        Rules(proposal=proposal)
        for proposal in (
            IgnoresWhatBinds,
            IgnoresBallotZero,
            ForgetsThoseWhoAreSilent,
            FollowsTheLowestBallot,
            GuessesBetweenTwo,
            PreparesHalf,
            AbortsWithOnePromiseTooFew,
            AbortsWhatMayBeChosen,
            CommitsAsEasilyAsItAborts,
            CountsPromisesTwice,
            DecidesOnHalf,
            CountsAcceptancesTwice,
            NeverBidsHigher,
        )
    ),
    Rules(ballot_after=lambda ballot, member, members: ballot + 1),  # two members share a ballot
    Rules(restarts=True),
    Rules(counts_on=True),
    Rules(promises_on=True),
]


def name(rules: Rules) -> str:
    for part, original in ((rules.acceptor, Acceptor), (rules.tally, Tally), (rules.proposal, Proposal)):
        if part is not original:
            return part.__name__
    flags = [flag for flag in ("restarts", "counts_on", "promises_on") if getattr(rules, flag)]
    return flags[0] if flags else "shared ballots"


@pytest.mark.parametrize("rules", [MISTAKES[0], *soak(MISTAKES[1:])], ids=name)
def test_each_mistake_is_found(rules: Rules) -> None:
    with pytest.raises((AssertionError, ValueError)) as found:  # ValueError: the other classes notice by themselves
        for kinds, attempts in FIRST:
            Explorer(kinds, attempts, rules).explore()
    print(str(found.value).splitlines()[0])
