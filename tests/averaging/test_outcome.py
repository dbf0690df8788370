"""One outcome per round: the tally, and every order of messages and crashes of three members."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.averaging.outcome import (
    Aborted,
    Accept,
    Committed,
    Decision,
    Hearsay,
    Reject,
    Tally,
    Vote,
    conclude,
)
from swarmcli.errors import RoundFailed, RoundUndecided

A, B = b"a" * 32, b"b" * 32


def decide(voters: int, *votes: Vote) -> Decision | None:
    tally = Tally(voters)
    for voter, vote in enumerate(votes):
        tally.vote(voter, vote)
    return tally.decision


def test_a_majority_commits() -> None:
    assert decide(2, Accept(A)) is None
    assert decide(2, Accept(A), Accept(A)) == Committed(A)
    assert decide(3, Accept(A), Accept(A)) == Committed(A)
    assert decide(4, Accept(A), Accept(A)) is None
    assert decide(1, Accept(A)) == Committed(A)


def test_auxiliaries_accept_whatever_the_result_is() -> None:
    assert decide(3, Accept(None), Accept(None)) is None  # nobody has named a result yet
    assert decide(3, Accept(None), Accept(A)) == Committed(A)
    assert decide(3, Accept(A), Accept(None)) == Committed(A)


def test_an_impossible_majority_aborts_at_once_and_says_why() -> None:
    assert decide(2, Reject("reducer lost", (1,))) == Aborted(
        "0 of 2 members hold the result, 2 are needed: reducer lost", (1,)
    )
    assert decide(3, Accept(A), Reject("x")) is None
    assert isinstance(decide(3, Accept(A), Reject("x"), Reject("y")), Aborted)
    assert isinstance(decide(2, Accept(A), Accept(B)), Aborted)
    assert decide(3, Accept(A), Accept(B)) is None
    assert decide(3, Accept(A), Accept(B), Accept(B)) == Committed(B)


def test_lost_members() -> None:
    tally = Tally(3)
    tally.lose(1, "cut off")
    assert tally.vote(0, Accept(A)) is None
    assert tally.vote(1, Accept(A)) == Committed(A)  # what it sent still arrived
    assert tally.lose(2, "cut off") == Committed(A)
    assert tally.give_up("too late") == Committed(A)
    tally = Tally(3)
    tally.lose(1, "cut off")
    decision = tally.lose(2, "killed")
    assert isinstance(decision, Aborted) and decision.suspects == (1, 2) and "cut off; killed" in decision.reason


def test_the_first_vote_of_a_member_stands() -> None:
    tally = Tally(2)
    tally.vote(1, Accept(A))
    tally.vote(1, Accept(B))
    assert tally.vote(0, Accept(A)) == Committed(A)


votes = st.one_of(
    st.sampled_from([A, B, None]).map(Accept), st.builds(Reject, st.just("no"), st.just(())), st.just("lost")
)


@given(st.lists(votes, min_size=1, max_size=9))
def test_the_tally_decides_once_and_only_with_a_majority(cast: list[Vote | str]) -> None:
    tally, before = Tally(len(cast)), None
    for voter, vote in enumerate(cast):
        after = tally.lose(voter, "lost") if isinstance(vote, str) else tally.vote(voter, vote)
        assert before is None or after == before
        before = after
    assert before is not None
    if isinstance(before, Committed):
        supporters = sum(vote in (Accept(before.digest), Accept(None)) for vote in cast)
        assert supporters >= tally.majority


def test_conclusions() -> None:
    conclude(A, Committed(A))
    with pytest.raises(RoundUndecided, match="another result"):
        conclude(A, Committed(B))
    with pytest.raises(RoundUndecided, match="not all here"):
        conclude(None, Committed(B))
    with pytest.raises(RoundUndecided, match="nobody else"):
        conclude(A, None)
    with pytest.raises(RoundFailed, match="why"):
        conclude(A, Aborted("why"))


# --- every order of events among three members, member 0 leading -----------------------------------------------------


@dataclass(frozen=True)
class World:
    """Everything that is still possible follows from this. Messages on their way may arrive in any order."""

    votes: tuple[tuple[int, Vote], ...]  # cast: the history of the tally
    cast: frozenset[int]  # who has finished its data phase
    dead: frozenset[int]
    to_leader: frozenset[tuple[int, Vote]]
    to_follower: frozenset[int]  # to whom the decision is on its way
    heard: tuple[Decision | None, ...]  # by member
    leader_lost: frozenset[int]
    asked: tuple[frozenset[int], ...]  # whom each member has asked in vain


def tally_of(world: World) -> Tally:
    tally = Tally(3)
    for voter, vote in world.votes:
        if vote == Reject("lost"):
            tally.lose(voter, "lost")
        else:
            tally.vote(voter, vote)
    return tally


def successors(world: World, plan: tuple[Vote, ...], crashes: int) -> Iterator[World]:
    leader_lives = 0 not in world.dead
    for member in range(3):
        if member in world.dead:
            continue
        if len(world.dead) < crashes:
            yield replace(world, dead=world.dead | {member})
        if member not in world.cast:
            message = (member, plan[member])
            yield replace(world, cast=world.cast | {member}, to_leader=world.to_leader | {message})
        if member > 0 and not leader_lives and member not in world.leader_lost:
            yield replace(world, leader_lost=world.leader_lost | {member})
    if leader_lives:
        yield from leader_steps(world)
    for member in world.to_follower - world.dead:
        yield hear(world, member, world.heard[0], to_follower=world.to_follower - {member})
        yield replace(world, to_follower=world.to_follower - {member})  # lost with the connection
    for member in world.leader_lost - world.dead:
        yield from question_steps(world, member)


def leader_steps(world: World) -> Iterator[World]:
    for voter, vote in world.to_leader:
        yield decided(replace(world, votes=(*world.votes, (voter, vote)), to_leader=world.to_leader - {(voter, vote)}))
    for member in world.dead:
        if (member, Reject("lost")) not in world.votes:
            yield decided(replace(world, votes=(*world.votes, (member, Reject("lost")))))


def decided(world: World) -> World:
    decision = tally_of(world).decision
    if decision is None or world.heard[0] is not None:
        return world
    return hear(world, 0, decision, to_follower=frozenset({1, 2}))


def question_steps(world: World, member: int) -> Iterator[World]:
    other = 3 - member
    if world.heard[member] is not None or other in world.asked[member]:
        return
    answers = other in world.dead or world.heard[other] is not None or other in world.leader_lost
    if not answers:
        return  # the other one still hopes to hear from the leader, and answers when it knows
    if other not in world.dead and world.heard[other] is not None:
        yield hear(world, member, world.heard[other])
    asked = [*world.asked]
    asked[member] = world.asked[member] | {other}
    yield replace(world, asked=tuple(asked))


def hear(world: World, member: int, decision: Decision | None, **changes: frozenset[int]) -> World:
    heard = [*world.heard]
    heard[member] = heard[member] or decision
    return replace(world, heard=tuple(heard), **changes)  # type: ignore[arg-type]


def ends(world: World, plan: tuple[Vote, ...]) -> list[str]:
    """How the round ends for each member that lives: applied, failed, undecided, or waiting."""
    outcomes = []
    for member in set(range(3)) - world.dead:
        hearsay = Hearsay({3 - member} if member else ())
        if member in world.leader_lost:
            hearsay.lose_leader()
        for asked in world.asked[member]:
            hearsay.no_answer(asked)
        heard = world.heard[member]
        if heard is not None:
            hearsay.heard(heard)
        vote = plan[member]
        own = vote.digest if isinstance(vote, Accept) and member in world.cast else None
        try:
            if not hearsay.settled:
                outcomes.append("waiting")
                continue
            conclude(own, hearsay.decision)
            outcomes.append(f"applied {own!r}")
        except RoundFailed:
            outcomes.append("failed")
        except RoundUndecided:
            outcomes.append("undecided")
    return outcomes


@pytest.mark.parametrize("crashes", [0, 1, 2])
def test_three_members_share_one_outcome_in_every_order(crashes: int) -> None:
    cases = [Accept(A), Accept(B), Accept(None), Reject("no")]
    seen_outcomes: set[str] = set()
    for plan in product(cases, cases, [Accept(A), Accept(None), Reject("no")]):
        nothing: frozenset[int] = frozenset()
        start = World((), nothing, nothing, frozenset(), nothing, (None,) * 3, nothing, (nothing,) * 3)
        open_worlds, known = [start], {start}
        while open_worlds:
            world = open_worlds.pop()
            outcomes = ends(world, plan)
            applied = {outcome for outcome in outcomes if outcome.startswith("applied")}
            assert len(applied) <= 1, world
            assert not (applied and "failed" in outcomes), world
            seen_outcomes.update(outcomes)
            following = [step for step in successors(world, plan, crashes) if step not in known]
            known.update(following)
            open_worlds.extend(following)
    assert {"failed", "undecided", "waiting"} <= seen_outcomes
    assert f"applied {A!r}" in seen_outcomes
