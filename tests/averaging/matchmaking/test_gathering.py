"""When a group begins: complete, full, out of time, or with enough progress; and when a crowd has settled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from swarmcli.averaging.config import MatchmakingOptions, SearchOptions
from swarmcli.averaging.group import MAX_GATHERED_BYTES
from swarmcli.averaging.matchmaking.candidates import Memory, Settling
from swarmcli.averaging.matchmaking.gathering import MAX_LISTED, Gathering
from swarmcli.averaging.matchmaking.messages import Candidate
from tests.averaging.table import join_of, peer_id


def gathering(
    *, followers: int = 0, progress: float = 0.0, patience: float = 100.0, target: float | None = None, **options: Any
) -> Gathering:
    made = Gathering(peer_id(0), Memory(), MatchmakingOptions(**options), target, connected=lambda _: True, now=0.0)
    for number in range(1, followers + 1):
        join(made, number, progress=progress, patience=patience)
    return made


def join(made: Gathering, number: int, *, patience: float = 100.0, **brought: Any) -> bool:
    candidate = Candidate(peer_id(number), number.to_bytes(16, "big"), b"", True)
    return made.add(join_of(candidate, patience, **brought), 0.0)


def due_at(made: Gathering, now: float, **changes: Any) -> float:
    return made.due_at(now, **{"missing": False, "asking": False, "settled_at": 0.5, **changes})


def begins(made: Gathering, now: float, **changes: Any) -> bool:
    return made.has_enough and due_at(made, now, **changes) <= now


def test_a_full_group_begins_at_once() -> None:
    made = gathering(followers=3, target_group_size=4)
    assert made.is_full and begins(made, 0.0, missing=True)
    assert not begins(made, 0.0, asking=True)  # or it would be in two groups


def test_too_few_look_again_when_time_is_up() -> None:
    made = gathering()
    assert due_at(made, 1.0) == 5.0 and not begins(made, 5.0)
    made.renew(5.0)
    assert due_at(made, 5.0) == 10.0
    assert not begins(gathering(followers=1, min_group_size=3), 1.0)


def test_an_impatient_follower_shortens_the_wait_but_not_to_nothing() -> None:
    assert begins(gathering(followers=1, patience=2.0), 2.0, missing=True)
    made = gathering(followers=1, patience=0.0)
    assert due_at(made, 0.0, missing=True) == SearchOptions().min_patience


def test_whoever_takes_the_most_of_the_list_gives_way_to_the_others() -> None:
    made = gathering()
    room = [join(made, number, gathered=bytes(MAX_GATHERED_BYTES)) for number in range(1, 60)]
    assert room == [True] * 47 + [False] * 12 and not made.is_full
    assert join(made, 60, gathered=bytes(15_000)) and peer_id(47) not in made.followers
    assert join(made, 1) and join(made, 61, gathered=bytes(15_000))  # the first one comes anew, with less
    assert peer_id(46) in made.followers
    assert not join(made, 1, gathered=bytes(MAX_GATHERED_BYTES)) and peer_id(1) not in made.followers  # and with more


def test_addresses_and_what_is_said_about_seats_take_room_as_well() -> None:
    made = gathering()
    addresses = tuple(f"memory://{'x' * 450}-{number}:1" for number in range(8))
    candidate = Candidate(peer_id(1), bytes(16), b"", listening=True, addresses=addresses)
    room = [made.add(join_of(replace(candidate, peer_id=peer_id(number))), 0.0) for number in range(1, 300)]
    assert len(made) * 3600 < MAX_LISTED < (len(made) + 1) * 4000 and not room[-1]


def test_a_preformed_group_that_would_be_too_small_waits_for_the_missing_and_then_gives_them_their_grace() -> None:
    made = gathering(target=100.0)
    made.own_progress = 100.0
    assert due_at(made, 10.0, missing=True) == due_at(made, 1000.0, missing=True) == math.inf
    join(made, 1)
    assert due_at(made, 1000.0, missing=True) == 1001.0
    assert begins(made, 1001.0, missing=True)


def test_a_group_of_one_is_possible_where_it_is_wanted() -> None:
    assert begins(gathering(min_group_size=1), 0.5)


def test_heartbeats_are_frequent_where_a_lost_member_would_delay_a_round() -> None:
    preformed = gathering(followers=2, target=100.0)
    assert preformed.beat_interval == 0.75 and preformed.patience == 3.0
    preformed.own_progress = 80.0
    assert preformed.beat_interval == gathering().beat_interval == 0.25
    assert preformed.patience == 1.0 and gathering().patience == 3.0
    assert gathering(followers=256).beat_interval == 1.0  # or the leader would do nothing else


def test_a_group_that_nobody_could_reduce_for_waits_for_one_who_can() -> None:
    made = gathering(followers=2)
    made.blocked = "no bandwidth"
    assert due_at(made, 1.0) == 5.0
    assert begins(made, 5.0)  # to say so
    join(made, 3)
    assert made.blocked == "" and begins(made, 1.0)


def test_a_crowd_asks_only_when_a_reading_brings_nothing_new() -> None:
    plain = Settling(MatchmakingOptions(), 0.0)
    assert plain.calm and plain.ready_at == -math.inf
    crowd = Settling(MatchmakingOptions(target_group_size=4), 0.0)
    assert not crowd.calm and crowd.settled_at == math.inf
    crowd.on_read(0.1, 0.1, crowd=True)
    assert not crowd.calm and crowd.ready_at == pytest.approx(0.1 + 5.0 / 4)
    crowd.news(0.15)
    crowd.on_read(0.2, 0.1, crowd=True)
    assert not crowd.calm
    crowd.on_read(0.3, 0.1, crowd=True)
    assert crowd.calm and crowd.ready_at == crowd.settled_at == pytest.approx(0.15 + 0.3)
