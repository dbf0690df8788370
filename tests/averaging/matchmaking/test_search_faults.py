"""Leaders that die or freeze, and knowledge that has holes: many schedules around the table."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("seed", range(4))
def test_small_groups_merge_before_they_begin(seed: int) -> None:
    """Halves that know nothing of each other until late: leaders with room take in those who are stranded."""
    table = gather_around(seed, 3, target_group_size=16, min_group_size=4)
    table.sit(3, at=2.0)
    table.sit(4, at=2.5)
    table.run(12)
    assert [len(group) for group in table.groups] in ([5], [4])
    assert latest(table) < 6.0
