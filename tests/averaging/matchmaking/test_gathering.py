"""When a group begins: complete, full, out of time, or with enough progress."""

from __future__ import annotations

from typing import Any

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.group import MAX_GATHERED_BYTES
from swarmcli.averaging.matchmaking.candidates import Candidate
from swarmcli.averaging.matchmaking.gathering import MIN_PATIENCE, Decision, Gathering
from swarmcli.averaging.matchmaking.meeting import Joining
from tests.averaging.table import peer_id


def gathering(*, followers: int = 0, progress: float = 0.0, patience: float = 100.0, **changes: Any) -> Gathering:
    options = MatchmakingOptions(**changes.pop("options", {}))
    made = Gathering(options, **{"now": 0.0, "opens_at": -1.0, "target": None, **changes})
    for number in range(1, followers + 1):
        join(made, number, progress=progress, patience=patience)
    return made


def join(
    made: Gathering, number: int, *, progress: float = 0.0, patience: float = 100.0, gathered: bytes = b""
) -> None:
    candidate = Candidate(peer_id(number), number.to_bytes(16, "big"), b"", True)
    made.add(candidate, Joining(patience, progress, gathered=gathered), 0.0)


def decide(made: Gathering, now: float, **changes: Any) -> Decision:
    return made.decide(now, **{"missing": False, "asking": False, "settled_at": 0.5, "keep_looking": True, **changes})


def test_a_complete_group_begins_as_soon_as_things_have_settled() -> None:
    made = gathering(followers=1)
    assert decide(made, 0.4) == Decision(wake_at=0.5)
    assert decide(made, 0.5).begin


def test_with_someone_missing_it_waits_until_time_is_up() -> None:
    made = gathering(followers=1)
    assert decide(made, 4.9, missing=True) == Decision(wake_at=5.0)
    assert decide(made, 5.0, missing=True).begin


def test_a_full_group_begins_at_once() -> None:
    made = gathering(followers=3, options={"target_group_size": 4})
    assert made.is_full and decide(made, 0.0, missing=True).begin
    assert not decide(made, 0.0, asking=True).begin  # or it would be in two groups


def test_too_few_look_on_or_give_up() -> None:
    assert decide(gathering(), 5.0) == Decision(wake_at=10.0)
    assert "only 1 of at least 2" in decide(gathering(), 5.0, keep_looking=False).give_up
    made = gathering(followers=1, options={"min_group_size": 3})
    assert not decide(made, 1.0).begin


def test_an_impatient_follower_shortens_the_wait_but_not_to_nothing() -> None:
    assert decide(gathering(followers=1, patience=2.0), 2.0, missing=True).begin
    made = gathering(followers=1, patience=0.0)
    assert decide(made, 0.0, missing=True) == Decision(wake_at=MIN_PATIENCE)


def test_a_scheduled_group_does_not_begin_before_its_time() -> None:
    made = gathering(followers=3, opens_at=7.0, options={"target_group_size": 4})
    assert decide(made, 6.0) == Decision(wake_at=7.0)
    assert decide(made, 7.0).begin
    made.schedule(9.0)
    assert decide(made, 8.0) == Decision(wake_at=9.0)
    assert made.close_at == 14.0


def test_gathered_data_makes_a_group_full() -> None:
    made = gathering()
    for number in range(1, 34):
        join(made, number, gathered=bytes(MAX_GATHERED_BYTES))
    assert made.is_full
    made.remove(peer_id(1))
    assert not made.is_full
    join(made, 2)  # anew, with less
    assert not made.is_full


def test_removing_and_clearing() -> None:
    made = gathering(followers=3)
    made.remove(peer_id(2))
    made.remove(peer_id(2))
    assert len(made) == 3
    assert set(made.clear()) == {peer_id(1), peer_id(3)} and len(made) == 1


def test_a_standing_group_begins_when_the_sum_reaches_the_target() -> None:
    made = gathering(followers=2, progress=30.0, target=100.0)
    made.own_progress = 39.0
    assert decide(made, 1000.0) == Decision()
    made.followers[peer_id(1)].progress = 31.0
    assert decide(made, 1000.0).begin


def test_a_standing_group_waits_for_the_missing_during_a_short_grace() -> None:
    made = gathering(followers=1, progress=100.0, target=100.0)
    assert decide(made, 10.0, missing=True) == Decision(wake_at=11.0)
    assert decide(made, 11.0, missing=True).begin


def test_whoever_leaves_a_standing_group_takes_its_progress_along() -> None:
    made = gathering(followers=2, progress=50.0, target=100.0)
    made.remove(peer_id(1))
    assert decide(made, 10.0) == Decision()


def test_alone_with_enough_progress_a_standing_group_stays_to_be_found() -> None:
    made = gathering(target=100.0)
    made.own_progress = 100.0
    assert decide(made, 0.2) == Decision(wake_at=0.5)
    assert decide(made, 1000.0) == Decision()
    join(made, 1)
    assert decide(made, 1000.0).begin


def test_a_standing_group_that_would_be_too_small_waits_for_the_missing_and_then_gives_them_their_grace() -> None:
    made = gathering(target=100.0)
    made.own_progress = 100.0
    assert decide(made, 10.0, missing=True) == decide(made, 1000.0, missing=True) == Decision()
    join(made, 1)
    assert decide(made, 1000.0, missing=True) == Decision(wake_at=1001.0)
    assert decide(made, 1001.0, missing=True).begin


def test_a_group_of_one_is_possible_where_it_is_wanted() -> None:
    assert decide(gathering(options={"min_group_size": 1}), 0.5).begin


def test_a_claim_counts_for_the_target_at_most_and_never_shrinks() -> None:
    made = gathering(followers=2, target=100.0)
    assert made.report(peer_id(1), 1e30) and made.total_progress == 100.0
    assert made.report(peer_id(1), 5.0) and made.total_progress == 100.0
    assert not made.report(peer_id(9), 50.0)
    join(made, 3, progress=1e30)
    assert made.total_progress == 200.0


def test_heartbeats_are_frequent_where_a_lost_member_would_delay_a_round() -> None:
    standing = gathering(followers=2, target=100.0)
    assert standing.beat_interval == 0.75 and standing.patience == 3.0
    standing.own_progress = 80.0
    assert standing.beat_interval == gathering().beat_interval == 0.25
    assert standing.patience == 1.0 and gathering().patience == 3.0
    assert gathering(followers=256).beat_interval == 1.0  # or the leader would do nothing else


def test_a_group_that_nobody_could_reduce_for_waits_for_one_who_can() -> None:
    made = gathering(followers=2)
    made.blocked = "no bandwidth"
    assert decide(made, 1.0) == Decision(wake_at=5.0)
    assert decide(made, 5.0).begin  # to say so
    join(made, 3)
    assert made.blocked == "" and decide(made, 1.0).begin
