"""Searches around a simulated table: who meets whom, under many schedules, without any network."""

from __future__ import annotations

from collections import Counter

import pytest

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.matchmaking.messages import Answer, Candidate, GroupInvitation, Heartbeat, Join, rank_of
from swarmcli.network.identity import PeerID
from tests.averaging.table import Seat, Table, join_of, peer_id
from tests.suites import soak


def gather_around(seed: int, count: int, *, spread: float = 0.02, **options: float | int | None) -> Table:
    table = Table(seed, MatchmakingOptions(**options))  # type: ignore[arg-type]
    for number in range(count):
        table.sit(number, at=table.random.uniform(0, spread))
    return table


def by_rank(table: Table) -> list[Seat]:
    return sorted(table.seats.values(), key=lambda seat: seat.search.rank)


def number_of(seat: Seat) -> int:
    return int.from_bytes(seat.search.me.peer_id, "big")


def latest(table: Table) -> float:
    return max(seat.formed_at for seat in table.seats.values() if seat.group)


def assert_consistent(table: Table) -> None:
    """Nobody is in two groups, and everyone in a group has the same list as its leader."""
    lists = {tuple(group) for group in table.groups}
    assert all(count == 1 for count in Counter(peer for group in lists for peer in group).values())
    for peer, seat in table.seats.items():
        if seat.group is not None and seat.alive:
            assert tuple(seat.group) in lists and peer in seat.group


@pytest.mark.parametrize("count", [2, 4, 16, 64])
@pytest.mark.parametrize("seed", range(8))
def test_peers_that_start_together_form_one_group(count: int, seed: int) -> None:
    table = gather_around(seed, count)
    table.run(10)
    assert [len(group) for group in table.groups] == [count]
    assert_consistent(table)
    assert latest(table) < 0.8  # half of it is the reading of the board, which takes up to 0.1 s here
    assert table.messages < 16 * count


@pytest.mark.parametrize("seed", range(8))
def test_the_leader_is_the_best_ranked(seed: int) -> None:
    table = gather_around(seed, 9)
    table.run(10)
    ranked = [seat.search.me.peer_id for seat in by_rank(table)]
    assert table.groups == [ranked]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("count", "size"), [(64, 16), (5, 2), (17, 16), *soak([(32, 16), (512, 16)])])
def test_many_peers_divide_into_groups(seed: int, count: int, size: int) -> None:
    if count == 512 and seed > 0:
        return
    table = gather_around(seed, count, target_group_size=size)
    table.run(15)
    assert_consistent(table)
    assert all(2 <= len(group) <= size for group in table.groups)
    grouped = sum(len(group) for group in table.groups)
    assert grouped >= count - max(1, count // 100)
    assert table.messages < 60 * count


# Single answers


def two(first_leads: bool = True) -> tuple[Seat, Seat]:
    table = Table(1)
    seats = sorted((table.sit(number) for number in (1, 2)), key=lambda seat: seat.search.rank, reverse=not first_leads)
    return seats[0], seats[1]


def asks(follower: Seat, leader: Candidate, now: float = 0.0) -> tuple[PeerID, Join]:
    return leader.peer_id, join_of(follower.search.me, 5.0 - now)


def test_requests_only_go_up_the_ranks() -> None:
    leader, follower = two()
    answer = follower.search.on_join(join_of(leader.search.me), 0.0)
    assert answer == Answer("outranked", follower.search.me)
    assert follower.search.moves(0.0).ask == asks(follower, leader.search.me)  # it knows better now


def test_a_follower_names_its_leader() -> None:
    leader, follower = two()
    follower.search.learn(leader.search.me, 0.0)
    assert follower.search.moves(0.0).ask == asks(follower, leader.search.me)
    follower.search.on_answer(leader.search.me.peer_id, Answer("accepted", leader.search.me, patience=1.0), 0.1)
    third = _ranked_after(follower.search.me)
    assert follower.search.on_join(join_of(third), 0.2) == Answer("follow", follower.search.me, leader.search.me)
    reply = follower.search.on_invitation(GroupInvitation(third, third), 0.2)
    assert reply == Answer("follow", follower.search.me, leader.search.me)


def test_nobody_is_followed_but_who_accepts() -> None:
    leader, follower = two()
    follower.search.learn(leader.search.me, 0.0)
    follower.search.moves(0.0)
    third = _ranked_before(follower.search.me)
    follower.search.on_answer(leader.search.me.peer_id, Answer("accepted", third, patience=3600.0), 0.1)
    assert follower.search.leader is None and not follower.search.may_begin(third.peer_id, follower.search.me.search)


def test_a_redirection_that_overtakes_the_acceptance_counts() -> None:
    leader, follower = two()
    better = _ranked_before(leader.search.me)
    follower.search.learn(leader.search.me, 0.0)
    follower.search.moves(0.0)
    follower.search.on_invitation(GroupInvitation(leader.search.me, better), 0.1)
    follower.search.on_answer(leader.search.me.peer_id, Answer("accepted", leader.search.me, patience=1.0), 0.1)
    moves = follower.search.moves(0.1)
    assert moves.ask == asks(follower, better, 0.1) and moves.leave == [leader.search.me.peer_id]


def test_a_beginning_that_overtakes_the_acceptance_counts() -> None:
    leader, follower = two()
    follower.search.learn(leader.search.me, 0.0)
    follower.search.moves(0.0)
    members, search = (leader.search.me.peer_id, follower.search.me.peer_id), follower.search.me.search
    assert not follower.search.on_begin(b"an earlier search", members)
    assert not follower.search.on_begin(search, (peer_id(99), follower.search.me.peer_id))
    assert follower.search.on_begin(search, members)
    assert not follower.search.on_begin(search, members)
    late = join_of(_ranked_after(follower.search.me))
    assert follower.search.on_join(late, 0.2) == Answer("begun", gone=members)


def test_a_slow_leader_is_hedged_and_a_second_acceptance_is_declined() -> None:
    leader, follower = two()
    best = _ranked_before(leader.search.me)
    for known in (best, leader.search.me):
        follower.search.learn(known, 0.0)
    assert follower.search.moves(0.0).ask == asks(follower, best)
    assert follower.search.moves(0.05).ask is None
    assert follower.search.moves(0.15).ask == asks(follower, leader.search.me, 0.15)
    follower.search.on_answer(leader.search.me.peer_id, Answer("accepted", leader.search.me, patience=1.0), 0.7)
    follower.search.on_answer(best.peer_id, Answer("accepted", best, patience=1.0), 0.8)
    assert follower.search.leader == leader.search.me
    assert follower.search.moves(0.8).leave == [best.peer_id]


@pytest.mark.parametrize(("members", "patience"), [(2, 5.75), (1, 22.0)])
def test_a_leader_that_only_sends_heartbeats_holds_nobody(members: int, patience: float) -> None:
    """One that claims to have too few members yet is followed through a few tries, and not for ever."""
    leader, follower = two()
    follower.search.learn(leader.search.me, 0.0)
    follower.search.moves(0.0)
    follower.search.on_answer(leader.search.me.peer_id, Answer("accepted", leader.search.me, patience=1.0), 0.0)
    now = 0.0
    while follower.search.leader is not None and now < 60:
        follower.search.on_heartbeat(leader.search.me.peer_id, Heartbeat(leader.search.me.search, 3.0, members), now)
        follower.search.moves(now)
        now += 1.0
    assert now < patience + 1.5


def test_a_full_group_takes_in_nobody() -> None:
    table = Table(3, MatchmakingOptions(target_group_size=2))
    seats = sorted((table.sit(number) for number in range(5)), key=lambda seat: seat.search.rank)
    first, *others = (seat.search for seat in seats)
    for other in others:
        first.learn(other.me, 0.0)
    assert first.on_join(others[0].own, 0.0).verdict == "accepted"
    assert first.on_join(others[1].own, 0.0) == Answer("full", first.me)


def _ranked_before(other: Candidate) -> Candidate:
    return next(made for made in _strangers() if rank_of(made) < rank_of(other))


def _ranked_after(other: Candidate) -> Candidate:
    return next(made for made in _strangers() if rank_of(made) > rank_of(other))


def _strangers() -> list[Candidate]:
    return [Candidate(PeerID(bytes([number]) * 32), bytes(16), b"", True) for number in range(1, 200)]
