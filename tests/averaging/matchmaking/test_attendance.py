"""Who is waited for, and who not any more."""

from __future__ import annotations

from swarmcli.averaging.matchmaking import attendance
from swarmcli.averaging.matchmaking.attendance import Attendance
from swarmcli.averaging.matchmaking.candidates import Candidate
from tests.averaging.table import peer_id


def holder(number: int, search: int = 0, *, looking: bool = False) -> Candidate:
    return Candidate(peer_id(number), search.to_bytes(16, "big"), b"", True, looking=looking)


def knowing(*holders: Candidate) -> Attendance:
    made = Attendance()
    made.read(holders)
    return made


def test_who_holds_the_bucket_and_does_not_look_is_waited_for() -> None:
    known = knowing(holder(1), holder(2, 5, looking=True), holder(3, 5, looking=True))
    assert known.idle({peer_id(3): (5).to_bytes(16, "big")}) == {peer_id(1), peer_id(3)}
    known.read([holder(2, 5)])
    assert known.idle({}) == {peer_id(2)}, "who has withdrawn is not waited for"


def test_who_missed_a_wait_is_waited_for_again_once_it_has_declared_another_search() -> None:
    known = knowing(holder(1, 5))
    known.note_missed([peer_id(1)])
    assert not known.waits_for(peer_id(1)) and known.idle({}) == set()
    known.read([holder(1, 5)])
    assert not known.waits_for(peer_id(1))
    known.read([holder(1, 6)])
    assert known.waits_for(peer_id(1))


def test_who_declares_searches_and_stays_away_is_waited_for_twice() -> None:
    known = knowing(holder(1))
    for search in range(1, 4):
        known.note_missed([peer_id(1), peer_id(1)])
        known.read([holder(1, search)])
    assert not known.waits_for(peer_id(1))
    known.note_present([peer_id(1)])
    assert known.waits_for(peer_id(1))


def test_what_is_remembered_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(attendance, "MAX_CANDIDATES", 10)
    known = knowing(*(holder(number) for number in range(100)))
    assert len(known.holders) == 10
    known.note_missed(peer_id(number) for number in range(100))
    assert not known.waits_for(peer_id(99)) and known.waits_for(peer_id(0))
