"""Leaders that die or freeze, declarations that lie, and knowledge that has holes: many schedules around the table."""

from __future__ import annotations

import pytest

from swarmcli.averaging.matchmaking.messages import Candidate
from tests.averaging.matchmaking.test_search import assert_consistent, by_rank, gather_around, latest, number_of
from tests.averaging.table import Seat, Table, peer_id


def untold(table: Table, dead: Seat) -> list[Seat]:
    """The survivors that do not believe that the dead leader's group has begun."""
    first = dead.search.me.peer_id
    return [seat for seat in table.seats.values() if seat is not dead and not (seat.group and seat.group[0] == first)]


# What a leader's end costs at most, in seconds: if it is noticed at once, and if it is only silent.
COSTS = {"asked": (1.5, 3.5), "accepted": (2.0, 4.0), "closing": (1.5, 4.0), "half": (1.5, 4.0)}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("step", COSTS)
@pytest.mark.parametrize("heard", [True, False], ids=["dies", "freezes"])
def test_the_survivors_of_a_leader_stay_together(seed: int, step: str, heard: bool) -> None:
    """At every step of the protocol, those who have not begun without the others come together in one group."""
    table = gather_around(seed, 8, spread=0.05)
    dead = by_rank(table)[0]
    table.doom(number_of(dead), step, heard=heard)
    table.run(15)
    assert not dead.alive
    left = untold(table, dead)
    assert len(left) >= (4 if step == "half" else 7)
    assert sorted(left[0].group or []) == sorted(seat.search.me.peer_id for seat in left)
    assert max(seat.formed_at for seat in left) < COSTS[step][not heard]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("step", ["asked", "accepted", "closing"])
def test_leaders_that_freeze_one_after_the_other(seed: int, step: str) -> None:
    table = gather_around(seed, 9, spread=0.05, min_matchmaking_time=15.0)
    for dead in by_rank(table)[:3]:
        table.doom(number_of(dead), step, heard=False)
    table.run(20)
    living = [seat for seat in table.seats.values() if seat.alive]
    assert len(living) == 6
    # The survivors may split, but nobody is left alone, and each of the three costs its patience once.
    assert all(seat.group and len(seat.group) >= 2 for seat in living)
    assert latest(table) < 14.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heard", [True, False], ids=["die", "freeze"])
def test_leaders_of_several_groups_that_are_lost(seed: int, heard: bool) -> None:
    """One or two of the leaders of 64 peers: their chunks find other groups, in time. At most the last one of them
    finds that all others have begun; it looks on, and is in the next round."""
    table = gather_around(seed, 64, spread=0.05, target_group_size=16)
    for position in (0, 16):
        table.doom(number_of(by_rank(table)[position]), "asked", heard=heard)
    table.run(15)
    assert_consistent(table)
    living = [seat for seat in table.seats.values() if seat.alive]
    assert sum(not seat.group for seat in living) <= 1
    assert all(2 <= len(group) <= 16 for group in table.groups)
    assert latest(table) < 6.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [None, 4])
def test_stale_declarations_of_peers_that_are_gone(seed: int, size: int | None) -> None:
    table = gather_around(seed, 8, target_group_size=size)
    for ghost in range(100, 108):
        table.declare_ghost(ghost)
    table.run(20)
    assert_consistent(table)
    assert latest(table) < 5.5
    if size is None:
        assert [len(group) for group in table.groups] == [8]
    assert sum(not seat.group for seat in table.seats.values()) <= 1  # half of the leaders on the board are gone


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_cyclic_knowledge(seed: int, count: int) -> None:
    """Each finds the declaration of one other only, round in a circle: by asking and inviting all of them meet."""
    table = gather_around(seed, count)
    for number in range(count):
        table.sees[peer_id(number)] = frozenset({peer_id((number + 1) % count)})
    table.run(20)
    assert_consistent(table)
    assert all(seat.group for seat in table.seats.values())
    assert latest(table) < 6.0
    assert len(table.groups) == 1 or count > 3


@pytest.mark.parametrize("seed", range(6))
def test_identical_declarations(seed: int) -> None:
    """The same search, tag and addresses from all of them, and each found twice, also under an older search."""
    table = Table(seed)
    for number in range(6):
        peer, addresses = peer_id(number), ("tcp://10.0.0.1:1",)
        table.stale.append(Candidate(peer, bytes(16), b"", True, addresses))
        me = Candidate(peer, bytes(15) + b"\x01", b"", True, addresses)
        table.sit(number, at=table.random.uniform(0, 0.02), me=me)
    table.run(10)
    assert [len(group) for group in table.groups] == [6]
    assert latest(table) < 1.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [None, 4])
def test_few_that_can_be_dialed_among_many_that_cannot(seed: int, size: int | None) -> None:
    table = gather_around(seed, 0, target_group_size=size)
    for number in range(16):
        table.sit(number, at=table.random.uniform(0, 0.05), listening=number % 4 == 0)
    table.run(20)
    assert all(seat.group for seat in table.seats.values())
    assert [len(group) for group in table.groups] == ([16] if size is None else [4] * 4)
    assert all(int.from_bytes(group[0], "big") % 4 == 0 for group in table.groups)


@pytest.mark.parametrize("seed", range(4))
def test_small_groups_merge_before_they_begin(seed: int) -> None:
    """Halves that know nothing of each other until late: leaders with room take in those who are stranded."""
    table = gather_around(seed, 3, target_group_size=16, min_group_size=4)
    table.sit(3, at=2.0)
    table.sit(4, at=2.5)
    table.run(12)
    assert [len(group) for group in table.groups] in ([5], [4])
    assert latest(table) < 6.0
