"""One member's votes: what it accepts, from whom, and that it stands by them."""

from __future__ import annotations

import pytest

from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.messages import Aborted, Committed
from swarmcli.averaging.group import Group, Member
from swarmcli.errors import CallRefused
from swarmcli.network import Identity

A = b"a" * 32
IDS = [Identity.from_seed(index).peer_id for index in range(4)]


def votes(me: int = 1, auxiliary: bool = False) -> RoundVotes:
    members = [Member(peer, auxiliary=auxiliary and index == me) for index, peer in enumerate(IDS[:3])]
    return RoundVotes(Group.form(b"", members, [1, 1, 1], bytes(16)), me)


def test_a_result_is_accepted_only_where_it_is_held() -> None:
    mine = votes()
    assert not mine.accept(2, Committed(A), held=False).accepted
    assert mine.accept(2, Committed(A), held=True).accepted
    assert not mine.accept(5, Committed(A), held=False).accepted
    assert mine.acceptor.accepted == (2, Committed(A))


def test_an_auxiliary_accepts_what_is_named_to_it_also_at_ballot_zero() -> None:
    assert votes(auxiliary=True).accept(0, Committed(A), held=False).accepted
    assert votes(auxiliary=True).accept(2, Committed(A), held=False).accepted
    assert not votes().accept(0, Committed(A), held=True).accepted  # those with tensors vote by themselves


def test_a_promise_outlives_the_part_in_the_round() -> None:
    mine = votes()
    assert mine.prepare(4).promise
    mine.over = True
    assert mine.prepare(2).promise is None and not mine.accept(2, Aborted("x"), held=False).accepted
    assert mine.accept(4, Aborted("x"), held=False).accepted


def test_whoever_knows_the_outcome_says_it_and_promises_nothing_more() -> None:
    mine = votes()
    mine.learn(Committed(A))
    mine.learn(Aborted("later"))
    answer = mine.prepare(2)
    assert answer.promise is None and answer.decision == Committed(A)
    refused = mine.accept(2, Aborted("x"), held=False)
    assert not refused.accepted and refused.decision == Committed(A)


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
