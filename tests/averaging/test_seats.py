"""For whom a round waits: the decision by itself, and what one averager remembers of the lines of others."""

from __future__ import annotations

import random

import pytest

from swarmcli.averaging.seats import MAX_SECONDS, Bid, Lines, LineSeen, decide
from swarmcli.network.identity import PeerID

TARGET = 256.0
A, B, C, D, MONITOR = (PeerID(bytes([number]) * 32) for number in range(1, 6))
QUICK = Bid(seconds=0.02)
WATCHES = Bid(sends=False)


def line(pace: float, seconds: float = 0.0, *, counted: bool = True) -> LineSeen:
    return LineSeen(seconds, pace, counted)


def test_where_nobody_is_slow_all_have_a_seat() -> None:
    seats = decide({A: QUICK, B: QUICK, MONITOR: WATCHES}, TARGET, {A: line(64), B: line(60)})
    assert not seats.unwaited


def test_a_member_that_needs_minutes_for_seconds_of_work_has_none() -> None:
    seats = decide({A: QUICK, B: QUICK}, TARGET, {A: line(64), B: line(64, 180.0)})
    assert set(seats.unseated) == {B}
    assert seats.unseated[B].seconds == 180.0 and seats.unseated[B].epoch == pytest.approx(4.02, abs=0.03)


def test_its_samples_are_worth_waiting_for_where_an_epoch_takes_longer() -> None:
    with_it = decide({A: QUICK, B: QUICK}, TARGET, {A: line(0.5), B: line(0.5, 20.0)})  # 512 s alone, 276 s together
    assert not with_it.unwaited and with_it.planned == 20.0


@pytest.mark.parametrize(
    ("steps", "width", "slowest"),
    [(1, 4.0, 1278), (1, 1.002, 320), (1, 0.563, 180), (15, 0.563, 12.0), (50, 0.563, 3.65)],
)
def test_whoever_could_only_follow_a_run_with_gradients_trains_in_one_with_outer_steps(
    steps: int, width: float, slowest: float
) -> None:
    """The slowest line with a seat as docs/modes.md has it: 86 million parameters, four of 20 samples a second."""
    for mbit, seated in ((1.02 * slowest, True), (0.98 * slowest, False)):
        lines = {A: line(20), B: line(20), C: line(20), D: line(20, 86e6 * width * 8e-6 / mbit)}
        assert (not decide(dict.fromkeys(lines, QUICK), 512 * steps, lines).unseated) == seated


def test_the_decision_is_the_best_prefix_of_any() -> None:
    random_ = random.Random(1)
    for _ in range(300):
        peers = [PeerID(random_.randbytes(32)) for _ in range(random_.randint(2, 8))]
        pace = random_.uniform(0.1, 50)
        lines = {peer: line(pace) for peer in peers}
        slow = peers[1 : random_.randint(1, len(peers))]
        lines |= {peer: line(random_.uniform(0.1, 50), random_.uniform(1, 200)) for peer in slow}
        bids = dict.fromkeys(peers, QUICK)
        seats = decide(bids, TARGET, lines)
        ranked = sorted(slow, key=lambda peer: lines[peer].seconds)

        def epoch(chosen: list[PeerID], lines: dict[PeerID, LineSeen] = lines, slow: list[PeerID] = slow) -> float:
            senders = [peer for peer in lines if peer not in slow or peer in chosen]
            sending = max([0.02, *(lines[peer].seconds for peer in chosen)])
            return TARGET / sum(lines[peer].pace for peer in senders) + sending

        seated = [peer for peer in slow if peer not in seats.unseated]
        assert epoch(seated) == pytest.approx(min(epoch(ranked[:k]) for k in range(len(ranked) + 1)))
        assert seats == decide(dict(reversed(bids.items())), TARGET, lines)


@pytest.mark.parametrize("said", [0.0, 0.001])
def test_ones_own_word_only_makes_slower(said: float) -> None:
    boaster = decide({A: QUICK, B: Bid(seconds=said)}, TARGET, {A: line(64), B: line(64, 180.0)})
    assert set(boaster.unseated) == {B}
    modest = decide({A: QUICK, B: Bid(seconds=180.0)}, TARGET, {A: line(64), B: line(64)})
    assert set(modest.unseated) == {B}


def test_a_lone_trainer_trains_however_slow_it_is() -> None:
    assert not decide({A: Bid(seconds=180.0), MONITOR: WATCHES}, TARGET, {}).unwaited
    assert not decide({A: Bid(seconds=180.0)}, TARGET, {}).unwaited


def test_of_a_pair_behind_one_slow_line_both_say_that_the_same_one_goes_on() -> None:
    seen = decide({A: Bid(seconds=181.0), B: QUICK}, TARGET, {A: line(64), B: line(64, 105.0)})
    others = decide({A: QUICK, B: Bid(seconds=170.0)}, TARGET, {A: line(64, 103.0), B: line(64)})
    assert seen.unseated.keys() == others.unseated.keys() == {B}


def test_nobody_comes_and_goes_round_by_round() -> None:
    """The sending time wavers by a quarter around where a seat is just worth it: who has one keeps it, who has none
    stays without."""

    def seated(seconds: float, counted: bool) -> bool:
        return not decide({A: QUICK, B: QUICK}, TARGET, {A: line(32), B: line(32, seconds, counted=counted)}).unseated

    assert seated(3.9, counted=True) and seated(2.5, counted=True)
    assert not seated(3.9, counted=False) and not seated(2.8, counted=False)
    assert seated(2.0, counted=False) and not seated(4.1, counted=True)


def test_a_line_counts_as_slow_until_something_has_shown_it_unless_nobody_is_known() -> None:
    newcomer = decide({A: QUICK, B: QUICK, C: Bid()}, TARGET, {})
    assert newcomer.unproven == newcomer.unwaited == {C}
    assert not decide({A: Bid(), B: Bid(), C: Bid()}, TARGET, {}).unwaited
    assert not decide({A: QUICK, B: QUICK, C: Bid()}, TARGET, {C: line(0.0, 0.1)}).unwaited  # its parts came in time


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 1e300])
def test_no_number_of_a_stranger_gets_in_that_no_honest_peer_has(wrong: float) -> None:
    with pytest.raises(ValueError):
        Bid(seconds=wrong)
    assert decide({A: Bid(seconds=MAX_SECONDS), B: Bid(seconds=MAX_SECONDS)}, 1e-300, {}).planned <= MAX_SECONDS


class Rounds:
    """What A sees of rounds of A and B, with epochs of four seconds."""

    def __init__(self) -> None:
        self.seen, self.now = Lines(A), 0.0

    def round(self, seconds: float, *, counted: bool = True, says: float = 0.0) -> None:
        began, self.now = self.now + 4.0, self.now + 4.1
        self.seen.note_sending({A: 0.02, B: seconds}, {A: QUICK, B: Bid(seconds=says)})
        self.seen.note_committed(began, self.now, {A: 128.0, B: 128.0} if counted else {A: 256.0})

    def is_waited_for(self, says: float = 0.0) -> bool:
        return not self.seen.seats({A: QUICK, B: Bid(seconds=says)}, TARGET).unwaited


def test_nobody_waits_for_whoever_spoiled_one_round_until_its_parts_come_in_time() -> None:
    rounds = Rounds()
    rounds.round(0.1)
    assert rounds.is_waited_for()
    rounds.round(9.0, counted=False)
    assert not rounds.is_waited_for() and not rounds.is_waited_for(says=0.1)
    rounds.round(0.1)
    assert rounds.is_waited_for()


def test_a_limit_that_explains_how_slow_a_peer_was_is_forgotten_with_it() -> None:
    rounds = Rounds()
    rounds.round(0.1)
    rounds.round(180.0, says=180.0, counted=False)
    assert not rounds.is_waited_for(says=180.0) and rounds.is_waited_for(says=0.1)
