"""Ranks, and what a peer knows and remembers of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.find import candidates
from swarmcli.averaging.find.candidates import LIFETIME, Candidates, Memory
from swarmcli.averaging.find.messages import Candidate, rank_of, search_id
from swarmcli.averaging.step_control import RoundRequest
from swarmcli.network.identity import PeerID
from tests.averaging.searchers import peer_id

OPTIONS = MatchmakingOptions(request_timeout=1.0)


def candidate(number: int, *, began: float = 0.0, listening: bool = True, tag: bytes = b"") -> Candidate:
    return Candidate(peer_id(number), search_id(began, number.to_bytes(8, "big")), tag, listening)


def knowing(*others: Candidate, out: dict[PeerID, float] | None = None, **request: object) -> Candidates:
    known = Candidates(candidate(0), Memory(), RoundRequest(**request), OPTIONS, out)  # type: ignore[arg-type]
    for each in others:
        known.learn(each, 0.0)
    return known


def present(known: Candidates, now: float) -> set[int]:
    return {int.from_bytes(entry.peer_id, "big") for entry in known.present(now)}


def test_members_of_the_round_before_rank_first_and_in_turn() -> None:
    standing = [replace(candidate(number), standing=True) for number in range(1, 6)]
    queue = [standing[number].peer_id for number in (2, 0, 3)]  # the fourth and the fifth were not there, and say so
    ranked = sorted([*standing, candidate(6)], key=lambda each: rank_of(each, queue))
    assert [each.peer_id for each in ranked[:3]] == queue
    # Who says that it was not there has lost its turn, for everybody.
    assert min([candidate(3), *standing[3:]], key=lambda each: rank_of(each, queue)) == standing[3]
    # Whoever was not there believes all of them.
    assert max([*standing, candidate(6)], key=rank_of) == candidate(6)


def test_an_older_search_never_replaces_a_later_one_unless_its_owner_says_so() -> None:
    known = knowing(candidate(1, began=2.0))
    known.learn(candidate(1, began=1.0), 0.0)
    assert known.entries[peer_id(1)].candidate == candidate(1, began=2.0)
    known.learn(candidate(1, began=1.0), 0.0, direct=True)
    assert known.entries[peer_id(1)].candidate == candidate(1, began=1.0)


def test_a_finished_search_does_not_come_back_from_stale_declarations() -> None:
    known = knowing(candidate(1, began=1.0))
    for said in (replace(candidate(1, began=1.0), looking=False), candidate(1, began=1.0)):
        known.learn(said, 0.0)
        assert present(known, 0.0) == set()
    known.learn(candidate(1, began=2.0), 0.0)
    assert present(known, 0.0) == {1}


def test_keys_that_say_they_are_elsewhere_outweigh_nobody_who_was_in_the_round_before() -> None:
    """Five such keys once made each peer of a run of four believe, in each epoch, that the round began without it."""
    keys, mates = [candidate(number, tag=b"later", began=9.0) for number in range(10, 15)], [peer_id(1), peer_id(2)]
    newcomer, member = knowing(only_one=True), knowing(only_one=True, queue=[peer_id(0), *mates])
    for known in (newcomer, member):
        for said in keys:
            known.learn(said, now=10.0, direct=True)
    assert newcomer.outweigh(mates) and not member.outweigh(mates)
    for mate in (1, 2):
        member.learn(candidate(mate, tag=b"later", began=9.0), now=10.0, direct=True)
    assert member.outweigh([]) and not member.outweigh(mates)


def test_members_of_a_group_that_is_full_are_passed_over_for_a_while_and_nobody_else() -> None:
    known = knowing(candidate(1), candidate(2), candidate(3))
    known.note_elsewhere(peer_id(1), [peer_id(2), peer_id(99)], 5.0, begun=False)
    assert present(known, 4.9) == {3} and known.elsewhere == {peer_id(1), peer_id(2)}
    assert present(known, 5.0) == {1, 2, 3}, "it may have failed"
    known.learn(candidate(2, began=1.0), 4.0)
    assert present(known, 4.9) == {2, 3} and known.elsewhere == {peer_id(1)}, "one that looks again is free"


def test_who_is_out_or_unreachable_is_no_candidate_for_a_while_and_declarations_expire() -> None:
    known = knowing(candidate(1), candidate(2), out={peer_id(1): 5.0})
    known.learn(candidate(1), 0.0, direct=True)
    assert present(known, 4.9) == {2} and present(known, 5.0) == {1, 2}
    for now, until in ((5.0, 7.0), (7.0, 11.0), (11.0, 19.0)):  # longer each time
        known.lose(peer_id(2), now)
        assert present(known, until - 0.1) == {1} and present(known, until) == {1, 2}
    known.lose(peer_id(2), 20.0)
    known.learn(candidate(2), 21.0, direct=True)
    assert present(known, 21.0) == {1, 2}, "it has spoken"
    assert present(known, LIFETIME) == {2} and present(known, 21.0 + LIFETIME) == set()


def test_only_elders_tell_a_newcomer_of_other_terms_and_nobody_who_has_met_one_of_its_kind() -> None:
    known = knowing()
    known.conflicts[peer_id(1)] = ("seed",), 50.0
    assert known.conflict(40.0, 1.0) is None, "that one came later"
    error = known.conflict(60.0, 1.0)
    assert error is not None and error.keys == ("seed",)
    known.agreed = True
    assert known.conflict(60.0, 1.0) is None


# What is remembered from search to search


def holder(number: int, search: int = 0, *, looking: bool = False) -> Candidate:
    return Candidate(peer_id(number), search.to_bytes(16, "big"), b"", True, looking=looking)


def test_nothing_grows_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "MAX_CANDIDATES", 8)
    memory = Memory()
    memory.read(holder(number) for number in range(100))
    assert len(memory.holders) == 8
    known = knowing(*(candidate(number) for number in range(1, 100)))
    assert len(known.entries) == 8
    memory.note_missed(peer_id(number) for number in range(100))
    assert not memory.waits_for(peer_id(99)) and memory.waits_for(peer_id(0))
    for number in range(100):
        memory.finish(peer_id(number), holder(number, 1).search)
    assert memory.has_finished(holder(99, 1)) and not memory.has_finished(holder(0, 1))
