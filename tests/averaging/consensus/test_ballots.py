"""Acceptors, tallies and proposals one by one. What they give together is in test_ballots_explored and _drawn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.averaging.consensus.ballots import (
    Acceptor,
    Blocked,
    Outbid,
    Promise,
    Proposal,
    Refusal,
    Tally,
    Waiting,
    ballot_after,
    proposer_of,
)
from swarmcli.averaging.consensus.messages import Aborted, Committed
from swarmcli.averaging.consensus.quorum import blocking, majority

A, B = b"a" * 32, b"b" * 32
NO = Aborted("no")


def tally_of(members: int, *votes: bytes, auxiliaries: tuple[int, ...] = ()) -> Tally:
    tally = Tally(members, auxiliaries)
    for member, vote in enumerate(votes):
        tally.accept(member, vote)
    return tally


def proposal_of(ballot: int, members: int, *promises: Promise | None) -> Proposal:
    """With the promises of members 0, 1, 2, ...; None: not yet."""
    proposal = Proposal(ballot, members)
    for member, promise in enumerate(promises):
        if promise is not None:
            proposal.promise(member, promise)
    return proposal


# --- one acceptor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ballot", [0, -1])
def test_nobody_proposes_at_ballot_zero_or_below(ballot: int) -> None:
    acceptor = Acceptor()
    assert acceptor.prepare(ballot) == Refusal(0)
    assert not acceptor.accept(ballot, NO)
    with pytest.raises(ValueError, match="no proposer"):
        Proposal(ballot, 3)
    with pytest.raises(ValueError, match="no proposer"):
        proposer_of(ballot, 3)


@pytest.mark.parametrize(
    ("accepted_ballot", "value"), [(None, NO), (1, None), (-1, Committed(A)), (3, Committed(A)), (0, NO)]
)
def test_impossible_promises_are_refused(accepted_ballot: int | None, value: Aborted | Committed | None) -> None:
    with pytest.raises(ValueError, match=r"promise|ballot zero"):
        Promise(2, accepted_ballot, value)


# --- ballot zero ------------------------------------------------------------------------------------------------------


def test_ballot_zero_is_hopeless_when_no_result_can_get_a_majority() -> None:
    assert tally_of(2, A, B).hopeless and not tally_of(3, A, B).hopeless
    tally = tally_of(3, A)
    tally.lose(1)
    assert not tally.hopeless
    tally.lose(2)
    assert tally.hopeless
    assert tally.accept(2, A) == Committed(A) and not tally.hopeless  # what it had sent still arrived


def test_without_anybody_with_tensors_ballot_zero_is_hopeless() -> None:
    tally = Tally(3, auxiliaries=(1, 2))
    assert not tally.hopeless
    tally.lose(0)
    assert tally.hopeless and tally.digest_to_name is None


def test_auxiliaries_are_named_a_result_that_outlives_one_of_its_holders() -> None:
    tally = Tally(4, auxiliaries=(3,))
    tally.accept(0, A)
    assert tally.digest_to_name is None
    tally.accept(1, A)
    assert tally.digest_to_name == A
    alone = Tally(3, auxiliaries=(2,))
    alone.accept(0, A)
    assert alone.digest_to_name is None
    alone.lose(1)
    assert alone.digest_to_name == A  # it is the only one that is left


events = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from([A, A, A, B, None])), min_size=8, max_size=8, unique_by=lambda e: e[0]
)


@given(events, st.sets(st.integers(0, 7), max_size=7))
def test_when_all_has_been_heard_ballot_zero_is_decided_or_hopeless(
    events: list[tuple[int, bytes | None]], auxiliaries: set[int]
) -> None:
    tally = Tally(8, auxiliaries)
    for member, vote in events:
        if vote is None:
            tally.lose(member)
        elif member not in auxiliaries or tally.digest_to_name == vote:
            tally.accept(member, vote)
        else:
            tally.lose(member)
        assert tally.decision is None or not tally.hopeless
    assert tally.hopeless == (tally.decision is None)


# --- above zero -------------------------------------------------------------------------------------------------------


def test_a_proposal_stands_for_one_value() -> None:
    proposal = proposal_of(1, 3, Promise(1))
    with pytest.raises(ValueError, match="must not propose"):
        proposal.propose(NO)
    with pytest.raises(ValueError, match="nothing was proposed"):
        proposal.accepted(0)
    proposal.promise(1, Promise(1))
    proposal.propose(NO)
    proposal.propose(NO)
    with pytest.raises(ValueError, match="must not propose"):
        proposal.propose(Committed(A))
    proposal.promise(2, Promise(1, 0, Committed(A)))  # too late to matter, and no reason to change the value
    assert proposal.accepted(0) is None and proposal.accepted(0) is None and proposal.state == Waiting()
    assert proposal.accepted(1) == NO == proposal.accepted(2)


def test_what_binds_must_be_proposed() -> None:
    proposal = proposal_of(1, 3, None, Promise(1), Promise(1, 0, Committed(A)))
    for value in (NO, Committed(B)):
        with pytest.raises(ValueError, match="must not propose"):
            proposal.propose(value)
    proposal.propose(Committed(A))


def test_a_proposal_that_most_do_not_accept_is_blocked_or_outbid() -> None:
    proposal = proposal_of(1, 3, Promise(1), Promise(1))
    proposal.propose(NO)
    proposal.lose(1)
    proposal.lose(2)
    assert proposal.state == Blocked()
    proposal.refuse(2, Refusal(3))
    assert proposal.state == Outbid(3)
    proposal.accepted(0)
    proposal.accepted(1)
    assert proposal.decision == NO and proposal.state == Waiting()


@given(st.integers(0, 1 << 40), st.integers(1, 64), st.data())
def test_every_ballot_has_one_owner(ballot: int, members: int, data: st.DataObject) -> None:
    member = data.draw(st.integers(0, members - 1))
    after = ballot_after(ballot, member, members)
    assert ballot < after <= ballot + members
    assert proposer_of(after, members) == member
    assert 2 * majority(members) > members >= majority(members)
    assert majority(members) + blocking(members) == members + 1
