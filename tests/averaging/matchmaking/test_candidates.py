"""Ranks, what is known of others, and who should follow whom."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.matchmaking.candidates import (
    Candidate,
    Entry,
    Roll,
    count_groups,
    differing_terms,
    make_plan,
    rank_of,
    remember_finished,
    search_id,
)
from tests.averaging.table import peer_id


def candidate(number: int, *, began: float = 0.0, listening: bool = True, tag: bytes = b"") -> Candidate:
    return Candidate(peer_id(number), search_id(began, number.to_bytes(8, "big")), tag, listening)


def roll_of(*candidates: Candidate, now: float = 0.0) -> Roll:
    roll = Roll((b"", ""), peer_id(0))
    for each in candidates:
        roll.learn(each, now, 60.0)
    return roll


def ordered(count: int, clients: int = 0) -> list[Entry]:
    candidates = [candidate(number, listening=number > clients) for number in range(1, count + 1)]
    return roll_of(*candidates).present(0.0)


def test_peers_that_nobody_can_dial_rank_last() -> None:
    ranks = sorted(rank_of(candidate(number, listening=number % 2 == 0)) for number in range(20))
    assert [hidden for hidden, _ in ranks] == [False] * 10 + [True] * 10


def test_another_search_gives_another_rank() -> None:
    assert rank_of(candidate(1)) == rank_of(candidate(1))
    assert rank_of(candidate(1)) != rank_of(candidate(1, began=1.0))
    assert rank_of(candidate(1)) != rank_of(candidate(1, tag=b"other"))


def test_later_searches_have_greater_ids() -> None:
    assert search_id(1.5, bytes(8)) < search_id(1.500001, bytes(8)) < search_id(1e9, bytes(8))


@pytest.mark.parametrize("changes", [{"search": b"short"}, {"tag": bytes(257)}, {"addresses": ("x",) * 9}])
def test_declarations_that_no_honest_peer_makes(changes: dict[str, object]) -> None:
    values: dict[str, object] = {"peer_id": peer_id(1), "search": bytes(16), "tag": b"", "listening": True}
    with pytest.raises(ValueError, match=r"search|addresses"):
        Candidate(**{**values, **changes})  # type: ignore[arg-type]


def test_learn_ignores_oneself_and_other_tags() -> None:
    roll = roll_of(candidate(0), candidate(1, tag=b"other"))
    assert roll.present(0.0) == []


def test_an_older_search_never_replaces_a_later_one_unless_its_owner_says_so() -> None:
    roll = roll_of(candidate(1, began=2.0))
    assert not roll.learn(candidate(1, began=1.0), 0.0, 60.0)
    assert roll.entries[peer_id(1)].candidate == candidate(1, began=2.0)
    assert roll.learn(candidate(1, began=1.0), 0.0, 60.0, direct=True)
    assert roll.entries[peer_id(1)].candidate == candidate(1, began=1.0)


def test_a_finished_search_does_not_come_back_from_stale_declarations() -> None:
    roll = roll_of(candidate(1, began=1.0))
    roll.finish(peer_id(1))
    assert not roll.learn(candidate(1, began=1.0), 0.0, 60.0)
    assert roll.learn(candidate(1, began=2.0), 0.0, 60.0)


def test_passing_over_and_coming_back() -> None:
    roll = roll_of(candidate(1), candidate(2))
    roll.pass_over([peer_id(1)], 5.0)
    assert [entry.candidate.peer_id for entry in roll.present(4.9)] == [peer_id(2)]
    assert roll.next_change(0.0) == 5.0 and roll.next_change(5.0) == math.inf
    assert len(roll.present(5.0)) == 2


def test_an_unreachable_peer_is_passed_over_for_longer_each_time() -> None:
    roll = roll_of(candidate(1))
    waits = []
    now = 0.0
    for _ in range(3):
        roll.fail(peer_id(1), now, 2.0)
        waits.append(roll.next_change(now) - now)
        now = roll.next_change(now)
    assert waits == [2.0, 4.0, 8.0]


def test_declarations_expire() -> None:
    roll = roll_of(candidate(1))
    roll.learn(candidate(1), 30.0, 60.0)
    assert len(roll.present(89.0)) == 1
    roll.drop_expired(90.0)
    assert roll.entries == {}


def test_finished_notes_are_bounded() -> None:
    finished: dict = {}
    remember_finished(finished, [candidate(number) for number in range(10)], keep=4)
    assert list(finished) == [peer_id(number) for number in range(6, 10)]


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


def test_everyone_follows_the_best_ranked_in_one_group() -> None:
    entries = ordered(5)
    plan = make_plan(None, None, entries, MatchmakingOptions(), 0.0)
    assert plan.leaders == [entries[0].candidate.peer_id] and not plan.crowded
    assert set(plan.dealt.values()) == {plan.leaders[0]} and len(plan.dealt) == 4


@pytest.mark.parametrize(("count", "clients"), [(33, 0), (33, 20), (64, 40), (17, 3)])
def test_groups_are_even_and_share_the_listening_peers(count: int, clients: int) -> None:
    entries = ordered(count, clients)
    options = MatchmakingOptions(target_group_size=16)
    plan = make_plan(None, None, entries, options, 0.0)
    assert plan.crowded and len(plan.leaders) == math.ceil(count / 16)
    listening = {entry.candidate.peer_id for entry in entries if entry.candidate.listening}
    groups = [{leader, *(p for p, lead in plan.dealt.items() if lead == leader)} for leader in plan.leaders]
    sizes, able = [len(group) for group in groups], [len(group & listening) for group in groups]
    assert sum(sizes) == count and max(sizes) - min(sizes) <= 1 and max(sizes) <= 16
    assert max(able) - min(able) <= 1


def test_equal_knowledge_gives_equal_plans_whoever_makes_them() -> None:
    everyone = [candidate(number) for number in range(40)]
    options = MatchmakingOptions(target_group_size=16)
    plans = []
    for me in everyone:
        roll = Roll(me.bucket, me.peer_id)
        for other in everyone:
            roll.learn(other, 0.0, 60.0)
        plans.append(make_plan(me, rank_of(me), roll.present(0.0), options, 0.0))
    assert all(plan == plans[0] for plan in plans)


def test_whoever_follows_somebody_leads_nobody() -> None:
    entries = ordered(3)
    entries[0].follows, entries[0].follows_until = peer_id(9), 2.0
    assert make_plan(None, None, entries, MatchmakingOptions(), 1.0).leaders == [entries[1].candidate.peer_id]
    assert make_plan(None, None, entries, MatchmakingOptions(), 2.0).leaders == [entries[0].candidate.peer_id]


def test_without_listening_peers_nobody_leads() -> None:
    plan = make_plan(None, None, ordered(4, clients=4), MatchmakingOptions(), 0.0)
    assert plan.leaders == [] and plan.dealt == {}


def test_differing_terms_names_the_keys() -> None:
    assert differing_terms({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == ("a", "b", "c")
    assert differing_terms({"a": "1"}, {"a": "1"}) == ()
