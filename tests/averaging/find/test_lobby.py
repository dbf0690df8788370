"""When a group begins: complete, full, out of time, or with enough progress."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.find.lobby import MAX_LISTED, MIN_PATIENCE, EvenShare, Lobby, beat_interval
from swarmcli.averaging.find.messages import Answer, Candidate
from swarmcli.averaging.group import MAX_GATHERED_BYTES
from swarmcli.averaging.seats import Lines
from swarmcli.averaging.weights import Experience
from tests.averaging.searchers import join_of, peer_id
from tests.simulation import within


def candidate(number: int) -> Candidate:
    return Candidate(peer_id(number), number.to_bytes(16, "big"), b"", True)


def lobby(
    *, followers: int = 0, progress: float = 0.0, patience: float = 100.0, target: float | None = None, **options: Any
) -> Lobby:
    own = join_of(candidate(0))
    made = Lobby(own, MatchmakingOptions(**options), target, 0.0, Lines(own.candidate.peer_id), Experience())
    for number in range(1, followers + 1):
        join(made, number, progress=progress, patience=patience)
    return made


def join(made: Lobby, number: int, *, patience: float = 100.0, **brought: Any) -> bool:
    """Whether the follower's call stays open."""
    return not made.admit(join_of(candidate(number), patience, **brought), 0.0).done()


def due_at(made: Lobby, now: float, **changes: Any) -> float:
    return made.due_at(now, **{"missing": False, "full": False, "settled_at": 0.5, **changes})


def begins(made: Lobby, now: float, **changes: Any) -> bool:
    return made.has_enough and due_at(made, now, **changes) <= now


@within(60)
async def test_when_a_plain_group_begins() -> None:
    full = lobby(followers=3, target_group_size=4)
    assert begins(full, 0.0, missing=True, full=True)
    alone = lobby()
    assert due_at(alone, 1.0) == 5.0 and not begins(alone, 5.0)
    alone.renew(5.0)
    assert due_at(alone, 5.0) == 10.0
    assert not begins(lobby(followers=1, min_group_size=3), 1.0)
    assert begins(lobby(min_group_size=1), 0.5)
    assert begins(lobby(followers=1, patience=2.0), 2.0, missing=True)
    assert due_at(lobby(followers=1, patience=0.0), 0.0, missing=True) == MIN_PATIENCE, "or it could hurry everybody"


@within(60)
async def test_whoever_takes_the_most_of_the_list_gives_way_to_the_others() -> None:
    made = lobby()
    room = [join(made, number, gathered=bytes(MAX_GATHERED_BYTES)) for number in range(1, 60)]
    assert room == [True] * 47 + [False] * 12 and len(made) < made.share([], 0).most
    assert join(made, 60, gathered=bytes(15_000)) and peer_id(47) not in made.followers
    assert join(made, 1) and join(made, 61, gathered=bytes(15_000))  # the first one comes anew, with less
    assert peer_id(46) in made.followers
    assert not join(made, 1, gathered=bytes(MAX_GATHERED_BYTES)) and peer_id(1) not in made.followers  # and with more


@within(60)
async def test_addresses_take_room_as_well() -> None:
    made = lobby()
    addresses = tuple(f"memory://{'x' * 450}-{number}:1" for number in range(8))
    wordy = replace(candidate(1), addresses=addresses)
    room = [not made.admit(join_of(replace(wordy, peer_id=peer_id(number))), 0.0).done() for number in range(1, 300)]
    assert len(made) * 3600 < MAX_LISTED < (len(made) + 1) * 4000 and not room[-1]


@within(60)
async def test_a_crowd_is_shared_evenly_and_by_how_its_peers_are_reached() -> None:
    def crowd(count: int, undialed: int = 0) -> list[Candidate]:
        return [replace(candidate(number), listening=number > undialed) for number in range(1, count)]

    made = lobby(target_group_size=16, followers=8)
    assert [made.share(crowd(count), 0) for count in (16, 17, 33)] == [
        EvenShare(1, 16, 16),
        EvenShare(2, 8, 9),
        EvenShare(3, 11, 11),
    ]
    assert made.share(crowd(17), 1) == EvenShare(2, 8, 8), "the first leader takes the one that is over"
    assert made.turns_away(candidate(20), crowd(15), 0) is None
    full = made.turns_away(candidate(20), crowd(16), 0)
    assert full is not None and set(full.gone) == set(made.followers)
    few = lobby(target_group_size=4)
    cannot = crowd(12, undialed=3)[:3]
    assert few.turns_away(cannot[0], crowd(12, undialed=3), 0) is None
    few.admit(join_of(cannot[0]), 0.0)
    assert few.turns_away(cannot[1], crowd(12, undialed=3), 0) == Answer("full"), "one for each group"


@within(60)
async def test_a_call_ends_with_its_answer_and_a_second_call_replaces_the_first() -> None:
    made = lobby()
    first = made.admit(join_of(candidate(1)), 0.0)
    second = made.admit(join_of(candidate(1)), 0.0)
    assert first.result().verdict == "full" and not second.done()
    made.remove(peer_id(1), first)
    assert peer_id(1) in made.followers, "the end of the first call says nothing of the second"
    made.send_all(Answer("begins"))
    assert second.result().verdict == "begins" and len(made) == 1


@within(60)
async def test_silent_followers_are_given_up_by_looks_not_by_time() -> None:
    """A leader that was frozen has heard nothing either."""
    made, looks = lobby(followers=2), 0
    while not (lost := made.look(lambda peer: 3.0)):
        made.report(peer_id(1), 0.0)
        looks += 1
    assert lost == [peer_id(2)] and 3.0 <= looks * beat_interval(3) < 4.5
    assert beat_interval(256) == 4.0, "or the leader would do nothing else"
