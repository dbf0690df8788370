"""One member's votes: what it accepts, from whom, and that it stands by them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.certificate import sign_vote, signed, value_hash
from swarmcli.averaging.consensus.messages import ZERO, Aborted, Certificate, Committed, Decided, Decision, Propose
from swarmcli.averaging.consensus.strangers import SeenVotes
from swarmcli.averaging.group import Group, Member
from swarmcli.errors import CallRefused
from swarmcli.network import Identity

A = b"a" * 32
KEYS = [Identity.from_seed(index) for index in range(4)]
IDS = [key.peer_id for key in KEYS]


def votes(me: int = 1, auxiliary: bool = False) -> RoundVotes:
    members = [Member(peer, auxiliary=auxiliary and index == me) for index, peer in enumerate(IDS[:3])]
    return RoundVotes(Group.form(b"", members, [1, 1, 1], bytes(16)), KEYS[me])


def accept(mine: RoundVotes, ballot: int, value: Decision, held: bool = False) -> bool:
    return mine.accept(Propose(mine.group.group_id, ballot, value), held).signature is not None


def decided(mine: RoundVotes, value: Decision, voters: Iterable[int] = (0, 2), ballot: int = 4) -> Decided:
    hashed, group_id = value_hash(value), mine.group.group_id
    votes = {voter: sign_vote(KEYS[voter], group_id, ballot, "accept", hashed) for voter in voters}
    return Decided(value, signed(votes, ballot, "accept", value))


def test_a_result_is_accepted_only_where_it_is_held() -> None:
    mine = votes()
    assert not accept(mine, 2, Committed(A), held=False)
    assert accept(mine, 2, Committed(A), held=True)
    assert not accept(mine, 5, Committed(A), held=False)
    assert mine.acceptor.accepted == (2, Committed(A))


def test_an_auxiliary_accepts_what_is_named_to_it_also_at_ballot_zero() -> None:
    assert accept(votes(auxiliary=True), 0, Committed(A), held=False)
    assert accept(votes(auxiliary=True), 2, Committed(A), held=False)
    assert not accept(votes(), 0, Committed(A), held=True)  # those with tensors vote by themselves


def test_a_promise_outlives_the_part_in_the_round() -> None:
    mine = votes()
    assert mine.prepare(4).promise
    mine.over = True
    assert mine.prepare(2).promise is None and not accept(mine, 2, Aborted("x"), held=False)
    assert accept(mine, 4, Aborted("x"), held=False)


def test_whoever_knows_the_outcome_says_it_and_promises_nothing_more() -> None:
    mine = votes()
    assert mine.learn(decided(mine, Committed(A)))
    mine.learn(decided(mine, Aborted("later")))
    answer = mine.prepare(2)
    assert answer.promise is None and answer.decided is not None and answer.decided.decision == Committed(A)
    refused = mine.accept(Propose(mine.group.group_id, 2, Aborted("x")), held=False)
    assert refused.signature is None and refused.decided == mine.decided


def test_a_bare_word_is_no_decision() -> None:
    mine = votes()
    proof = decided(mine, Committed(A))
    assert not mine.learn(msgspec.structs.replace(proof, decision=Committed(bytes(32))))
    assert not mine.learn(decided(mine, Committed(A), voters=(2,)))
    assert not mine.learn(Decided(Committed(A), msgspec.structs.replace(proof.votes, ballot=7)))
    forged = dict.fromkeys(range(3), bytes(64))
    assert not mine.learn(Decided(Committed(A), msgspec.structs.replace(proof.votes, signatures=forged)))
    assert mine.decision is None and mine.learn(proof)


def test_a_proposer_that_asks_for_two_values_in_one_ballot_gets_no_evidence_against_whom_it_asks() -> None:
    mine = votes()
    assert accept(mine, 4, Aborted("x")) and accept(mine, 4, Aborted("x"))
    assert not accept(mine, 4, Aborted("y")) and not accept(mine, 4, Committed(A), held=True)
    assert accept(mine, 7, Aborted("y"))


def test_forged_ballots_are_refused() -> None:
    mine = votes()
    mine.check_proposer(IDS[0], 0)
    mine.check_proposer(IDS[1], 2)
    with pytest.raises(CallRefused, match="another member"):
        mine.check_proposer(IDS[2], 2)
    with pytest.raises(CallRefused, match="another member"):
        mine.check_proposer(IDS[1], 0)
    with pytest.raises(CallRefused, match="only members"):
        mine.check_proposer(IDS[3], 2)
    with pytest.raises(CallRefused, match="far beyond"):
        mine.check_proposer(IDS[0], 1 + 3 * 10_000)


def test_votes_of_one_in_many_ballots_do_not_make_others_forget_its_first() -> None:
    group = Group.form(b"", [Member(peer) for peer in IDS], [1, 1, 1, 1], bytes(16))
    members = [RoundVotes(group, key) for key in KEYS]
    seen = SeenVotes(members[0].electorate)

    def vote(voter: int, ballot: int, digest: bytes) -> Certificate:
        signature = members[voter].sign(ballot, "vote", Committed(digest))
        return Certificate(ballot, "vote", value_hash(Committed(digest)), {voter: signature})

    for voter in range(4):
        assert seen.note(vote(voter, ZERO, A)) == []
    for ballot in range(1, 40):
        assert seen.note(vote(3, ballot, A)) == []
    assert [proof.culprit for proof in seen.note(vote(3, ZERO, b"b" * 32))] == [IDS[3]]
