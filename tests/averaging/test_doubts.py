"""Doubts: what they cost the doubted, and how they end."""

from __future__ import annotations

from swarmcli.averaging.doubts import DOUBTS, Doubts
from swarmcli.network import Identity

BAD, GOOD = Identity.from_seed("bad").peer_id, Identity.from_seed("good").peer_id


def test_a_doubted_peer_has_no_seat_in_the_next_group_and_then_one_again() -> None:
    doubts = Doubts()
    doubts.note(BAD, "it never came")
    assert doubts.has_no_seat(BAD) and not doubts.has_no_seat(GOOD)
    assert doubts.reason(BAD) == "it never came"
    doubts.note_group(frozenset({GOOD}))
    assert not doubts.has_no_seat(BAD)


def test_each_further_doubt_costs_twice_as_many_groups_up_to_a_bound() -> None:
    doubts = Doubts()
    for times in range(8):
        doubts.note(BAD, "again")
        groups = 0
        while doubts.has_no_seat(BAD):
            doubts.note_group(frozenset({GOOD}))
            groups += 1
        assert groups == min(2**times, DOUBTS.longest)


def test_a_peer_whose_connection_broke_keeps_its_seat_unless_it_happens_again_at_once() -> None:
    doubts = Doubts()
    doubts.note(BAD, "it did not begin", lost=True)
    assert not doubts.has_no_seat(BAD)
    doubts.note(BAD, "it did not begin", lost=True)
    assert doubts.has_no_seat(BAD)
    doubts.note(GOOD, "it did not begin", lost=True)
    doubts.note_group(frozenset({GOOD}))
    doubts.note(GOOD, "it did not begin", lost=True)
    assert not doubts.has_no_seat(GOOD)


def test_a_peer_that_takes_part_is_forgiven_in_the_end() -> None:
    doubts = Doubts()
    doubts.note(BAD, "once")
    doubts.note(BAD, "twice")
    for _ in range(2):
        doubts.note_group(frozenset({GOOD}))
    assert not doubts.has_no_seat(BAD)
    for _ in range(2):
        doubts.note_group(frozenset({GOOD, BAD}))
    assert doubts.reason(BAD) == ""


def test_who_is_needed_has_its_seat_again_the_sooner_the_less_it_did() -> None:
    doubts = Doubts()
    for _ in range(4):
        doubts.note(BAD, "again")
    doubts.note(GOOD, "once")
    assert not doubts.admit(0.9)
    assert doubts.admit(1.0)
    assert not doubts.has_no_seat(GOOD) and doubts.has_no_seat(BAD)
    assert not doubts.admit(7.9) and doubts.admit(8.0)
    assert not doubts.has_no_seat(BAD)
    doubts.note(BAD, "again")
    assert not doubts.admit(15.9), "it stays in doubt: the next time costs twice as much"
