"""Ranks, what is known of others, and who should follow whom."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.find import candidates
from swarmcli.averaging.find.candidates import (
    LIFETIME,
    Candidates,
    Conflicts,
    Entry,
    Memory,
    count_groups,
    make_plan,
)
from swarmcli.averaging.find.messages import Candidate, rank_of, search_id
from swarmcli.averaging.group import Dialable
from swarmcli.network.identity import PeerID
from tests.averaging.searchers import peer_id


def candidate(number: int, *, began: float = 0.0, listening: bool = True, tag: bytes = b"") -> Candidate:
    return Candidate(peer_id(number), search_id(began, number.to_bytes(8, "big")), tag, listening)


def knowing(*others: Candidate, me: Candidate | None = None) -> Candidates:
    known = Candidates(me or candidate(0), Memory())
    for each in others:
        known.learn(each, 0.0)
    return known


def ordered(count: int, clients: int = 0) -> list[Entry]:
    candidates = [candidate(number, listening=number > clients) for number in range(1, count + 1)]
    return knowing(*candidates).present(0.0)


def test_peers_that_nobody_can_dial_rank_last() -> None:
    ranks = sorted(rank_of(candidate(number, listening=number % 2 == 0)) for number in range(20))
    assert [-dialable for _, _, dialable, _ in ranks] == [Dialable.DIRECTLY] * 10 + [Dialable.NEVER] * 10


def test_members_of_the_round_before_rank_first_and_in_turn() -> None:
    standing = [replace(candidate(number), standing=True) for number in range(1, 6)]
    queue = [standing[number].peer_id for number in (2, 0, 3)]  # the fourth and the fifth were not there, and say so
    ranked = sorted([*standing, candidate(6)], key=lambda each: rank_of(each, queue))
    assert [each.peer_id for each in ranked[:3]] == queue
    # Who says that it was not there has lost its turn, for everybody.
    assert min([candidate(3), *standing[3:]], key=lambda each: rank_of(each, queue)) == standing[3]
    # Whoever was not there believes all of them.
    assert max([*standing, candidate(6)], key=rank_of) == candidate(6)


@pytest.mark.parametrize("changes", [{"search": b"short"}, {"tag": bytes(257)}])
def test_declarations_that_no_honest_peer_makes(changes: dict[str, object]) -> None:
    values: dict[str, object] = {"peer_id": peer_id(1), "search": bytes(16), "tag": b"", "listening": True}
    with pytest.raises(ValueError, match="search"):
        Candidate(**{**values, **changes})  # type: ignore[arg-type]


def test_an_older_search_never_replaces_a_later_one_unless_its_owner_says_so() -> None:
    known = knowing(candidate(1, began=2.0))
    assert not known.learn(candidate(1, began=1.0), 0.0)
    assert known.entries[peer_id(1)].candidate == candidate(1, began=2.0)
    assert known.learn(candidate(1, began=1.0), 0.0, direct=True)
    assert known.entries[peer_id(1)].candidate == candidate(1, began=1.0)


def test_a_finished_search_does_not_come_back_from_stale_declarations() -> None:
    known = knowing(candidate(1, began=1.0))
    known.finish(peer_id(1))
    assert not known.learn(candidate(1, began=1.0), 0.0)
    assert known.learn(candidate(1, began=2.0), 0.0)


def test_keys_that_say_they_are_elsewhere_outweigh_nobody_who_was_in_the_round_before() -> None:
    """Five of them had a run of four believe in each epoch that its round had begun without it."""
    keys, mates = [candidate(number, tag=b"later", began=9.0) for number in range(10, 15)], [peer_id(1), peer_id(2)]
    newcomer = Candidates(candidate(0), Memory(), only_one=True)
    member = Candidates(candidate(0), Memory(), only_one=True, queue=[peer_id(0), *mates])
    for known in (newcomer, member):
        for said in keys:
            known.learn(said, now=10.0, direct=True)
    assert newcomer.outweigh(mates) and not member.outweigh(mates)
    for mate in (1, 2):
        member.learn(candidate(mate, tag=b"later", began=9.0), now=10.0, direct=True)
    assert member.outweigh([]) and not member.outweigh(mates)


def test_who_may_not_be_in_the_group_is_no_candidate_until_then() -> None:
    known = Candidates(candidate(0), Memory(), out={peer_id(1): 5.0})
    known.learn(candidate(1), 0.0, direct=True)
    assert known.present(4.9) == [] and known.next_change(0.0) == 5.0
    assert [entry.peer_id for entry in known.present(5.0)] == [peer_id(1)]


def test_passing_over_and_coming_back() -> None:
    known = knowing(candidate(1), candidate(2))
    known.pass_over([peer_id(1)], 5.0)
    assert [entry.candidate.peer_id for entry in known.present(4.9)] == [peer_id(2)]
    assert known.next_change(0.0) == 5.0 and known.next_change(5.0) == math.inf
    assert len(known.present(5.0)) == 2


def test_an_unreachable_peer_is_passed_over_for_longer_each_time() -> None:
    known = knowing(candidate(1))
    waits = []
    now = 0.0
    for _ in range(3):
        known.fail(peer_id(1), now, 2.0)
        waits.append(known.next_change(now) - now)
        now = known.next_change(now)
    assert waits == [2.0, 4.0, 8.0]


def test_declarations_expire() -> None:
    known = knowing(candidate(1))
    known.learn(candidate(1), 30.0)
    assert len(known.present(29.0 + LIFETIME)) == 1
    assert known.present(30.0 + LIFETIME) == []


@given(
    candidates=st.integers(1, 600),
    listening=st.integers(1, 600),
    target=st.none() | st.integers(2, 64),
    minimum=st.integers(1, 2),
)
def test_group_counts_fit_the_bounds(candidates: int, listening: int, target: int | None, minimum: int) -> None:
    groups = count_groups(candidates, listening, target, minimum)
    assert 1 <= groups <= max(1, listening)
    assert groups == 1 or candidates // groups >= minimum
    if target is not None and groups == math.ceil(candidates / target):
        assert math.ceil(candidates / groups) <= target


@pytest.mark.parametrize(("count", "clients"), [(33, 0), (33, 20), (64, 40), (17, 3)])
def test_groups_are_even_and_share_the_listening_peers(count: int, clients: int) -> None:
    entries = ordered(count, clients)
    options = MatchmakingOptions(target_group_size=16)
    plan = make_plan(entries, options, 0.0)
    assert plan.crowded and len(plan.leaders) == math.ceil(count / 16)
    listening = {entry.candidate.peer_id for entry in entries if entry.candidate.listening}
    groups = [{leader, *(p for p, lead in plan.leader_of.items() if lead == leader)} for leader in plan.leaders]
    sizes, able = [len(group) for group in groups], [len(group & listening) for group in groups]
    assert sum(sizes) == count and max(sizes) - min(sizes) <= 1 and max(sizes) <= 16
    assert max(able) - min(able) <= 1


def test_groups_get_their_share_of_those_at_relays_who_lead_where_no_other_can() -> None:
    relayed = [
        Candidate(peer_id(number), search_id(0.0, number.to_bytes(8, "big")), b"", False, ("relay://a/b",))
        for number in range(100, 107)
    ]
    others = [candidate(1), candidate(2), *(candidate(number, listening=False) for number in range(3, 6))]
    entries = knowing(*relayed, *others).present(0.0)
    plan = make_plan(entries, MatchmakingOptions(target_group_size=4), 0.0)
    kinds = {entry.peer_id: entry.candidate.dialable for entry in entries}
    groups = [[leader, *(p for p, lead in plan.leader_of.items() if lead == leader)] for leader in plan.leaders]
    shared = [tuple(sum(kinds[peer] == kind for peer in group) for kind in reversed(Dialable)) for group in groups]
    assert shared == [(1, 2, 1), (1, 2, 1), (0, 3, 1)]
    assert [kinds[group[0]] for group in groups] == [Dialable.DIRECTLY, Dialable.DIRECTLY, Dialable.OVER_RELAY]


def test_equal_knowledge_gives_equal_plans_whoever_makes_them() -> None:
    everyone = [candidate(number) for number in range(40)]
    options = MatchmakingOptions(target_group_size=16)
    plans = []
    for me in everyone:
        ranked = [*knowing(*everyone, me=me).present(0.0), Entry(me, rank_of(me), since=0.0)]
        plans.append(make_plan(sorted(ranked, key=lambda entry: entry.rank), options, 0.0))
    assert all(plan == plans[0] for plan in plans)


def test_whoever_follows_somebody_leads_nobody() -> None:
    entries = ordered(3)
    entries[0].follows, entries[0].follows_until = peer_id(9), 2.0
    assert make_plan(entries, MatchmakingOptions(), 1.0).leaders == [entries[1].candidate.peer_id]
    assert make_plan(entries, MatchmakingOptions(), 2.0).leaders == [entries[0].candidate.peer_id]


# What is remembered from search to search


def holder(number: int, search: int = 0, *, looking: bool = False) -> Candidate:
    return Candidate(peer_id(number), search.to_bytes(16, "big"), b"", True, looking=looking)


def remembering(*holders: Candidate) -> Memory:
    made = Memory()
    made.read(holders)
    return made


def test_who_holds_the_bucket_and_does_not_look_is_waited_for() -> None:
    memory = remembering(holder(1), holder(2, 5, looking=True), holder(3, 5, looking=True))
    memory.finish(peer_id(3), holder(3, 5).search)
    assert memory.idle() == {peer_id(1), peer_id(3)}
    memory.read([holder(2, 5)])
    assert memory.idle() == {peer_id(2)}, "who has withdrawn is not waited for"


def test_who_missed_a_wait_is_waited_for_again_once_it_has_declared_another_search() -> None:
    memory = remembering(holder(1, 5))
    memory.note_missed([peer_id(1)])
    assert not memory.waits_for(peer_id(1)) and memory.idle() == set()
    memory.read([holder(1, 5)])
    assert not memory.waits_for(peer_id(1))
    memory.read([holder(1, 6)])
    assert memory.waits_for(peer_id(1))


def test_who_declares_searches_and_stays_away_is_waited_for_twice() -> None:
    memory = remembering(holder(1))
    for search in range(1, 4):
        memory.note_missed([peer_id(1), peer_id(1)])
        memory.read([holder(1, search)])
    assert not memory.waits_for(peer_id(1))
    memory.note_present([peer_id(1)])
    assert memory.waits_for(peer_id(1))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "MAX_CANDIDATES", 10)
    memory = remembering(*(holder(number) for number in range(100)))
    assert len(memory.holders) == 10
    memory.note_missed(peer_id(number) for number in range(100))
    assert not memory.waits_for(peer_id(99)) and memory.waits_for(peer_id(0))
    for number in range(100):
        memory.finish(peer_id(number), holder(number, 1).search)
    assert memory.has_finished(holder(99, 1)) and not memory.has_finished(holder(0, 1))


# Peers of other terms


def entry(number: int, follows: PeerID | None = None) -> Entry:
    return Entry(candidate(number), rank_of(candidate(number)), since=0.0, follows=follows)


def test_conflicts_are_new_once_and_only_elders_count() -> None:
    conflicts = Conflicts()
    assert [conflicts.note(peer_id(1), ("seed",), since=50.0) for _ in range(2)] == [True, False]
    assert conflicts.error(since=40.0, enough=1) is None, "that one came later"
    conflicts.note(peer_id(2), ("lr", "data"), since=30.0)
    error = conflicts.error(since=40.0, enough=1)
    assert error is not None and error.keys == ("data", "lr")


def test_elders_must_agree_with_each_other_and_nobody_with_the_newcomer() -> None:
    conflicts = Conflicts()
    conflicts.note(peer_id(1), ("lr", "data"), since=30.0)
    conflicts.note(peer_id(2), ("seed",), since=30.0)
    assert conflicts.error(since=40.0, enough=2) is None, "each has terms of its own"
    conflicts.note(peer_id(3), ("data", "lr"), since=30.0)
    assert conflicts.error(since=40.0, enough=2) is not None
    conflicts.agreed = True
    assert conflicts.error(since=40.0, enough=1) is None


def test_conflicts_cover_those_who_follow_them() -> None:
    conflicts = Conflicts()
    conflicts.note(peer_id(1), ("seed",), since=0.0)
    assert conflicts.cover([]) and conflicts.cover([entry(2, follows=peer_id(1))])
    assert not conflicts.cover([entry(2, follows=peer_id(1)), entry(3)])
