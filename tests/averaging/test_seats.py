"""Who sends in a round: the decision by itself, and what one averager says of the others."""

from __future__ import annotations

import itertools
import random

import pytest

from swarmcli.averaging.seats import (
    MAX_NAMED,
    MAX_SECONDS,
    SEATS,
    Bid,
    Seats,
    Sighting,
    Sightings,
    Witness,
    decide,
)
from swarmcli.network.identity import PeerID

TARGET = 256.0
A, B, C, D, E, MONITOR = (PeerID(bytes([number]) * 32) for number in range(1, 7))


def saw(pace: float, *slow: Sighting, quickest: float = 0.02) -> Bid:
    return Bid(witness=Witness(pace, quickest, slow))


def test_where_nobody_is_slow_all_have_a_seat() -> None:
    assert decide({A: Bid(), B: Bid()}, TARGET).unseated == {}
    assert decide({A: saw(64), B: saw(60), MONITOR: Bid(sends=False, witness=Witness(64))}, TARGET).unseated == {}


def test_a_member_that_needs_minutes_for_seconds_of_work_has_none() -> None:
    slow = Sighting(B, seconds=180.0, pace=64.0, counted=True)
    seats = decide({A: saw(64), B: saw(64), MONITOR: Bid(sends=False, witness=Witness(64, 0.02, (slow,)))}, TARGET)
    assert seats.unseated == {}  # the word of one of two
    seats = decide(
        {A: saw(64, slow), B: saw(64), MONITOR: Bid(sends=False, witness=Witness(64, 0.02, (slow,)))}, TARGET
    )
    assert set(seats.unseated) == {B}
    assert seats.unseated[B].seconds == 180.0 and seats.unseated[B].epoch == pytest.approx(4.02, abs=0.03)


def test_its_samples_are_worth_waiting_for_where_an_epoch_takes_longer() -> None:
    slow = Sighting(B, seconds=20.0, pace=0.5, counted=True)
    with_it = decide({A: saw(0.5, slow), B: saw(0.5)}, TARGET)  # 512 s alone, 276 s together
    assert with_it.unseated == {} and with_it.planned == 20.0


@pytest.mark.parametrize(
    ("steps", "width", "slowest"),
    [(1, 4.0, 1278), (1, 1.002, 320), (1, 0.563, 180), (15, 0.563, 12.0), (50, 0.563, 3.65)],
)
def test_whoever_could_only_follow_a_run_with_gradients_trains_in_one_with_outer_steps(
    steps: int, width: float, slowest: float
) -> None:
    """The slowest line with a seat as docs/modes.md has it: 86 million parameters, four of 20 samples a second."""
    for mbit, seated in ((1.02 * slowest, True), (0.98 * slowest, False)):
        slow = Sighting(D, seconds=86e6 * width * 8e-6 / mbit, pace=20, counted=True)
        assert (not decide(dict.fromkeys((A, B, C, D), saw(60, slow)), 512 * steps).unseated) == seated


def test_the_first_so_many_by_sending_time_are_seated_which_make_the_most_samples() -> None:
    quick, slower, slowest = Sighting(B, 2.0, 64, True), Sighting(C, 2.2, 64, True), Sighting(D, 300.0, 64, True)
    named = (slowest, quick, slower)
    seats = decide({A: saw(8, *named), B: saw(8, *named), C: saw(8, *named), D: saw(8, *named)}, TARGET)
    assert set(seats.unseated) == {D} and seats.planned == 2.2


def test_the_decision_is_the_best_prefix_of_any() -> None:
    random_ = random.Random(1)
    for _ in range(300):
        peers = [PeerID(random_.randbytes(32)) for _ in range(random_.randint(2, 8))]
        slow = {
            peer: Sighting(peer, random_.uniform(1, 200), random_.uniform(0.1, 50), True)
            for peer in peers[1 : random_.randint(1, len(peers))]
        }
        pace = random_.uniform(0.1, 50)
        bids = {peer: saw(pace, *(s for p, s in slow.items() if p != peer)) for peer in peers}
        seats = decide(bids, TARGET)
        seated = [s for p, s in slow.items() if p not in seats.unseated]

        def epoch(chosen: list[Sighting], pace: float = pace) -> float:
            return TARGET / (pace + sum(s.pace for s in chosen)) + max([0.02, *(s.seconds for s in chosen)])

        ranked = sorted(slow.values(), key=lambda s: s.seconds)
        # One witness fewer speaks of each slow member than of the others: all of them agree here.
        assert epoch(seated) == pytest.approx(min(epoch(ranked[:k]) for k in range(len(ranked) + 1)))
        assert seats == decide(dict(reversed(bids.items())), TARGET)


def test_ones_own_word_only_makes_slower() -> None:
    slow = Sighting(B, seconds=180.0, pace=64.0, counted=True)
    boaster = Bid(seconds=0.0, witness=Witness(64, 0.02))
    assert set(decide({A: saw(64, slow), B: boaster}, TARGET).unseated) == {B}
    modest = Bid(seconds=180.0)
    assert set(decide({A: saw(64), B: modest}, TARGET).unseated) == {B}


def test_a_minority_neither_takes_a_seat_nor_gives_one() -> None:
    lie = Sighting(A, seconds=1e5, pace=1.0)
    honest = {A: saw(64), B: saw(64), C: saw(64)}
    assert decide(honest | {D: saw(64, lie)}, TARGET).unseated == {}
    slow = Sighting(D, seconds=1e5, pace=1.0)
    friends = {A: saw(64, slow), B: saw(64, slow), C: saw(64), D: saw(64)}
    assert set(decide(friends, TARGET).unseated) == {D}


def test_a_lone_trainer_trains_however_slow_it_is() -> None:
    alone = {A: Bid(seconds=180.0), MONITOR: Bid(sends=False)}
    assert decide(alone, TARGET).unseated == {}
    both = {A: Bid(seconds=180.0), B: Bid(seconds=200.0), MONITOR: Bid(sends=False)}
    assert decide(both, TARGET).unseated == {}  # twice the samples for a tenth more time


def test_nobody_comes_and_goes_round_by_round() -> None:
    """The sending time wavers by a quarter around where a seat is just worth it: who has one keeps it, who has none
    stays without."""

    def seated(seconds: float, counted: bool) -> bool:
        slow = Sighting(B, seconds, 32.0, counted)
        return not decide({A: saw(32, slow), B: saw(32)}, TARGET).unseated

    assert seated(3.9, counted=True) and seated(2.5, counted=True)
    assert not seated(3.9, counted=False) and not seated(2.8, counted=False)
    assert seated(2.0, counted=False) and not seated(4.1, counted=True)


def test_no_number_of_a_stranger_gets_in_that_no_honest_peer_has() -> None:
    for wrong in (-1.0, float("nan"), float("inf"), 1e300):
        with pytest.raises(ValueError):
            Bid(seconds=wrong)
        with pytest.raises(ValueError):
            Sighting(A, seconds=wrong)
        with pytest.raises(ValueError):
            Witness(pace=wrong)
    with pytest.raises(ValueError):
        Witness(slow=(Sighting(A), Sighting(A)))
    with pytest.raises(ValueError):
        Witness(slow=tuple(Sighting(PeerID(bytes([n]) * 32)) for n in range(MAX_NAMED + 1)))
    worst = Bid(seconds=MAX_SECONDS, witness=Witness(1e15, MAX_SECONDS, (Sighting(A, MAX_SECONDS, 1e15),)))
    assert isinstance(decide({A: worst, B: worst}, 1e-300), Seats)


class Rounds:
    """What A sees of rounds of A and B, with epochs of four seconds."""

    def __init__(self) -> None:
        self.seen, self.now = Sightings(A), 0.0

    def round(self, seconds: float, *, counted: bool = True, says: float = 0.0) -> None:
        began, self.now = self.now + 4.0, self.now + 4.1
        self.seen.note_sending(self.now, {A: 0.02, B: seconds}, {A: Bid(), B: Bid(seconds=says)})
        self.seen.note_committed(began, self.now, {A: 128.0, B: 128.0} if counted else {A: 256.0})

    def named(self) -> Sighting | None:
        witness = self.seen.witness(self.now)
        assert witness is not None
        return next((each for each in witness.slow if each.peer == B), None)


def test_one_slow_round_among_good_ones_is_forgiven() -> None:
    rounds = Rounds()
    for seconds in (0.1, 0.1, 9.0, 0.1):
        rounds.round(seconds)
        assert rounds.named() is None


def test_a_peer_that_is_slow_is_named_with_the_pace_of_the_samples_that_counted() -> None:
    rounds = Rounds()
    for seconds in (0.1, 0.1, 0.1, 9.0, 9.0):
        rounds.round(seconds)
    assert (named := rounds.named()) is not None and named.seconds == 9.0
    assert named.pace == pytest.approx(32.0) and named.counted
    newcomer = Rounds()
    newcomer.round(9.0, counted=False)
    assert (named := newcomer.named()) is not None and named.pace == 0.0 and not named.counted


def test_who_reduces_for_a_lone_trainer_tells_how_long_that_sends() -> None:
    bids = {A: Bid(), MONITOR: Bid(sends=False)}
    monitor, trainer = Sightings(MONITOR), Sightings(A)
    for seen in (monitor, trainer):
        seen.note_sending(0.0, {A: 120.0}, bids)
    assert trainer.witness(1.0) is None, "it has seen itself alone"
    seats = decide(bids | {MONITOR: Bid(sends=False, witness=monitor.witness(1.0))}, TARGET)
    assert not seats.unseated and 120 <= seats.planned <= 2 * 120


def test_a_slow_peer_is_tried_again_ever_more_seldom() -> None:
    rounds, tries = Rounds(), []
    while rounds.now < 4000.0:
        slow = rounds.seen.witness(rounds.now)
        if slow is None or not slow.slow:
            tries.append(rounds.now)
            rounds.round(100.0, counted=False)
        else:
            rounds.now += 4.1
    pauses = [later - sooner for sooner, later in itertools.pairwise(tries)]
    assert pauses[0] < 2 * SEATS.first_retry and pauses == pytest.approx(sorted(pauses))
    assert max(pauses) < SEATS.longest_retry + 10.0 and len(tries) < 14


def test_a_limit_that_explains_how_slow_a_peer_was_is_forgotten_with_it() -> None:
    rounds = Rounds()
    for _ in range(3):
        rounds.round(0.1)
    for _ in range(3):
        rounds.round(180.0, says=180.0, counted=False)
    assert (named := rounds.named()) is not None and named.seconds == 0.0 and named.pace > 0
    rounds.round(0.1)
    assert rounds.named() is None


def test_a_small_word_of_ones_own_gives_no_seat_either() -> None:
    slow = Sighting(B, seconds=180.0, pace=64.0, counted=True)
    boaster = Bid(seconds=0.001, witness=Witness(64, 0.02))
    assert set(decide({A: saw(64, slow), B: boaster}, TARGET).unseated) == {B}
