"""Doubts: what they cost the doubted, and how they end."""

from __future__ import annotations

from swarmcli.averaging.suspicion import LONGEST, Suspicions
from swarmcli.network import Identity

BAD, GOOD = Identity.from_seed("bad").peer_id, Identity.from_seed("good").peer_id


def test_a_doubted_peer_has_no_seat_in_the_next_group_and_then_one_again() -> None:
    suspicions = Suspicions()
    suspicions.note(BAD, "it never came")
    assert suspicions.is_suspect(BAD) and not suspicions.is_suspect(GOOD)
    assert suspicions.reason(BAD) == "it never came"
    suspicions.note_group(frozenset({GOOD}))
    assert not suspicions.is_suspect(BAD)


def test_each_further_doubt_costs_twice_as_many_groups_up_to_a_bound() -> None:
    suspicions = Suspicions()
    for times in range(8):
        suspicions.note(BAD, "again")
        groups = 0
        while suspicions.is_suspect(BAD):
            suspicions.note_group(frozenset({GOOD}))
            groups += 1
        assert groups == min(2**times, LONGEST)


def test_a_peer_whose_connection_broke_keeps_its_seat_unless_it_happens_again_at_once() -> None:
    suspicions = Suspicions()
    suspicions.note(BAD, "it did not begin", lost=True)
    assert not suspicions.is_suspect(BAD)
    suspicions.note(BAD, "it did not begin", lost=True)
    assert suspicions.is_suspect(BAD)
    suspicions.note(GOOD, "it did not begin", lost=True)
    suspicions.note_group(frozenset({GOOD}))
    suspicions.note(GOOD, "it did not begin", lost=True)
    assert not suspicions.is_suspect(GOOD)


def test_a_peer_that_takes_part_is_forgiven_in_the_end() -> None:
    suspicions = Suspicions()
    suspicions.note(BAD, "once")
    suspicions.note(BAD, "twice")
    for _ in range(2):
        suspicions.note_group(frozenset({GOOD}))
    assert not suspicions.is_suspect(BAD)
    for _ in range(2):
        suspicions.note_group(frozenset({GOOD, BAD}))
    assert suspicions.reason(BAD) == ""


def test_who_is_needed_has_its_seat_again_the_sooner_the_less_it_did() -> None:
    suspicions = Suspicions()
    for _ in range(4):
        suspicions.note(BAD, "again")
    suspicions.note(GOOD, "once")
    assert not suspicions.admit(0.9)
    assert suspicions.admit(1.0)
    assert not suspicions.is_suspect(GOOD) and suspicions.is_suspect(BAD)
    assert not suspicions.admit(7.9) and suspicions.admit(8.0)
    assert not suspicions.is_suspect(BAD)
    suspicions.note(BAD, "again")
    assert not suspicions.admit(15.9), "it stays in doubt: the next time costs twice as much"
