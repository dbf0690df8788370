"""What holds a peer, what ends that and who is told, and how the loop of a role obeys."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmcli.events import ActivityStatus, Reason
from swarmcli.optim import Optimizer
from swarmcli.peer.activity import STAYS_ASKED, STAYS_HURRIED, Activity, PendingWork, asked
from swarmcli.peer.pausing import Pauses

BATTERY = Reason("battery", "on battery")


class FakeOptimizer:
    """Hands in what it has in its second step of a pause; what happens in a step is the test's."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.in_step: Callable[[], object] = lambda: None
        self.auxiliary, self.local_epoch, self.has_handed_in = False, 0, False
        self.tracker = SimpleNamespace(seconds_to_round=math.inf)
        self.seat_lost: str | None = None
        self.local_progress = SimpleNamespace(samples_accumulated=8)

    def pause(self, *, leaving: bool = False) -> None:
        self.calls.append("pause, leaving" if leaving else "pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def load_state_from_peers(self) -> None:
        self.calls.append("come into step")

    def step(self, batch_size: int) -> None:
        assert batch_size == 0
        self.calls.append("step")
        self.in_step()


def pauses_of(optimizer: FakeOptimizer, activity: Activity, **options: Any) -> tuple[Pauses, threading.Event]:
    stop = threading.Event()
    return Pauses(activity, cast(Optimizer, optimizer), stop, **options), stop


def test_a_loop_whose_samples_cannot_count_follows_until_they_can() -> None:
    optimizer = FakeOptimizer()
    pauses, _ = pauses_of(optimizer, Activity())
    steps = iter(["your samples cannot count here", None])

    def in_step() -> None:
        optimizer.seat_lost = next(steps)

    with pauses:
        assert not pauses.rest()
        optimizer.seat_lost, optimizer.in_step, optimizer.calls = "your samples cannot count here", in_step, []
        assert pauses.rest() and optimizer.calls == ["step", "step", "come into step"]
        assert not pauses.rest()


def test_a_loop_rests_as_long_as_something_holds_it_and_then_comes_into_step() -> None:
    optimizer, activity, states = FakeOptimizer(), Activity(), []
    pauses, _ = pauses_of(optimizer, activity)

    def in_step() -> None:
        states.append(activity.status().state)
        if len(states) == 2:
            optimizer.has_handed_in = True
        elif len(states) == 3:
            assert activity.status().keeps == 8
            activity.release("battery")

    optimizer.in_step = in_step
    with pauses:
        assert not pauses.rest()
        activity.hold(BATTERY)
        assert optimizer.calls == ["resume", "pause"], "the swarm hears of it before the loop does"
        assert pauses.rest()
    assert states == ["pausing", "pausing", "paused"]
    assert [each for each in optimizer.calls[2:] if each != "pause"] == ["step"] * 3 + ["resume", "come into step"]


def test_who_is_to_leave_waits_for_the_round_but_not_where_none_can_be_expected() -> None:
    def leaves(
        handed_in: bool = False, round_at: float = math.inf, stays: float = STAYS_ASKED, goes_at: float = math.inf
    ) -> tuple[float, str, str]:
        """After how many seconds, what it says when it is asked to, and why; the others have gone after `goes_at`."""
        optimizer, said, now = FakeOptimizer(), list[str](), [100.0]
        activity = Activity(steady=lambda: now[0])
        optimizer.has_handed_in = handed_in
        optimizer.tracker.seconds_to_round = round_at
        pauses, stop = pauses_of(optimizer, activity, lose=said.append)

        def second() -> None:
            now[0] += 1.0
            optimizer.tracker.seconds_to_round = max(0.0, optimizer.tracker.seconds_to_round - 1.0)
            optimizer.has_handed_in = now[0] >= 100.0 + goes_at

        optimizer.in_step = second
        with pauses:
            announced = activity.stop(stays).sentence
            assert pauses.rest() and stop.is_set()
        return now[0] - 100.0, announced, said[0]

    def handing_in(when: str) -> str:
        return f"leaving: handing in, {when} (8 samples)"

    gone = "nobody else computes at present"
    assert leaves(handed_in=True) == (0.0, "leaving", gone)
    assert leaves(goes_at=200.0) == (200.0, handing_in("10 min at most"), gone)
    late = "no round took them within 10 min"
    assert leaves() == (600.0, handing_in("10 min at most"), late)
    assert leaves(round_at=240.0) == (600.0, handing_in("about 4 min left"), late), "it may come later"
    far = "the next round is expected in about 15 min, which is too long to wait"
    assert leaves(round_at=900.0) == (0.0, "leaving", far)
    for seconds, after in ((59.0, 60.0), (90.0, 0.0)):  # where the machine waits no longer
        assert leaves(round_at=seconds, stays=STAYS_HURRIED)[0] == after


@pytest.mark.parametrize(("turns_out", "leaves_at"), [(math.inf, 360.0), (1200.0, 1.0)])
def test_a_machine_that_shuts_down_shortens_the_wait_and_a_round_that_is_further_away_than_was_said_ends_it(
    turns_out: float, leaves_at: float
) -> None:
    optimizer, now = FakeOptimizer(), [0.0]
    activity = Activity(steady=lambda: now[0])
    optimizer.tracker.seconds_to_round = 240.0 if turns_out < math.inf else math.inf
    pauses, stop = pauses_of(optimizer, activity)

    def second() -> None:
        now[0] += 1.0
        optimizer.tracker.seconds_to_round = turns_out
        if now[0] == 300.0:
            activity.stop(STAYS_HURRIED)

    optimizer.in_step = second
    with pauses:
        activity.stop()
        assert pauses.rest() and stop.is_set() and now[0] == leaves_at


def test_who_is_to_leave_hands_in_first_but_for_one_that_leaves_now_and_around_the_loop() -> None:
    optimizer, activity, said = FakeOptimizer(), Activity(), list[str]()
    pauses, stop = pauses_of(optimizer, activity, lose=said.append)

    def in_step() -> None:
        assert not stop.is_set()
        optimizer.has_handed_in, optimizer.local_progress.samples_accumulated = True, 0

    optimizer.in_step = in_step
    with pauses:
        activity.hold(BATTERY)
        activity.stop()
        assert optimizer.calls == ["resume", "pause", "pause, leaving"] and not stop.is_set()
        assert pauses.rest()
        assert stop.is_set() and optimizer.calls.count("step") == 1 and not said
    assert "come into step" not in optimizer.calls
    for before in ([], [STAYS_ASKED]):
        optimizer, activity = FakeOptimizer(), Activity()
        pauses, stop = pauses_of(optimizer, activity)
        with pauses:
            for stays in (*before, 0.0):
                assert not stop.is_set()
                activity.stop(stays)
            assert stop.is_set() and not pauses.rest()
        assert "step" not in optimizer.calls
    for begun in (True, False):
        activity = Activity()
        pauses, stop = pauses_of(FakeOptimizer(), activity)
        if not begun:
            activity.stop()
        with pauses:
            assert stop.is_set() is not begun
        activity.stop()
        assert stop.is_set()


def test_a_run_that_ends_during_a_pause_ends_the_role() -> None:
    optimizer, activity = FakeOptimizer(), Activity()
    pauses, stop = pauses_of(optimizer, activity, last_epoch=lambda: 3)
    optimizer.in_step = lambda: setattr(optimizer, "local_epoch", 3)
    activity.hold(BATTERY)  # before there was a loop
    with pauses:
        assert pauses.rest() and not pauses.rest()
    assert optimizer.calls == ["pause", "step"] and not stop.is_set()


def an_activity() -> tuple[Activity, list[ActivityStatus], list[float]]:
    told: list[ActivityStatus] = []
    now = [1000.0]
    return Activity(told.append, lambda: now[0], lambda: now[0]), told, now


def test_it_works_when_no_reason_holds_any_more():
    activity, told, now = an_activity()
    heard: list[str] = []
    end = activity.subscribe(lambda: heard.append(activity.status().state))
    assert activity.hold(asked()).state == "pausing"
    activity.hold(BATTERY)
    activity.pending = lambda: PendingWork(nobody_takes=True, rests=True)
    assert activity.status().state == "paused"
    assert activity.release("asked") == ActivityStatus("paused", (BATTERY,), 1000.0)
    now[0] = 1010.0
    assert activity.release("battery") == ActivityStatus("running", (), 1010.0)
    assert [event.sentence for event in told] == [
        "pausing: you asked for it; first it hands in what it has computed, or keeps it if nobody else computes",
        "pausing: you asked for it; on battery; first it hands in what it has computed, or keeps it if nobody else "
        "computes",
        "paused: you asked for it; on battery",
        "paused: on battery",
        "running",
    ]
    end()
    activity.pending = PendingWork
    activity.hold(Reason("asked", "you asked for it, until 18:00", 1060.0))
    assert activity.status().state == "pausing", "the next pause begins with handing in again"
    assert heard == ["pausing", "pausing", "paused", "paused", "running"]
    activity.pending = lambda: PendingWork(12, nobody_takes=True, rests=True)
    assert activity.status().sentence.endswith(" (12 samples kept, to count later)")
    now[0] = 1060.0
    assert not activity.is_held and told[-1].sentence == "running", "a reason ends when its time is over"


def test_a_pause_for_a_time_lasts_so_long_whatever_the_clock_on_the_wall_is_set_to():
    wall, steady = [1e9], [0.0]
    activity = Activity(clock=lambda: wall[0], steady=lambda: steady[0])
    activity.hold(asked(1e9 + 7200.0), 7200.0)
    for set_to in (2e9, 0.0):
        wall[0] = set_to
        assert activity.is_held
    steady[0] = 7200.0
    assert not activity.is_held
    activity.hold(asked(60.0))  # a moment is one on the wall
    assert activity.is_held
    wall[0] = 60.0
    assert not activity.is_held


def test_stopping_is_final_and_told_once_but_may_become_urgent():
    activity, told, _ = an_activity()
    heard: list[bool] = []
    activity.subscribe(lambda: heard.append(activity.status().stays == 0.0))
    activity.stop()
    activity.stop()
    activity.release("asked")
    activity.stop(STAYS_HURRIED)
    assert activity.stop(0.0) == ActivityStatus("stopping", (), 1000.0, stays=0.0)
    assert activity.stop().stays == 0.0, "a later wish lengthens nothing"
    assert heard == [False, False, True]
    assert [event.state for event in told] == ["stopping"]
    midst, told, _ = an_activity()  # of its first batch
    midst.stop()
    midst.pending = lambda: PendingWork(8)
    midst.status()
    assert [event.sentence for event in told] == ["leaving", "leaving: handing in, 10 min at most (8 samples)"]
    at_once, told, _ = an_activity()
    at_once.pending = lambda: PendingWork(1240, 240.0)
    at_once.stop(0.0)
    assert [event.sentence for event in told] == ["leaving"], "who leaves at once hands nothing in"


def test_what_is_handed_in_is_told_once_when_it_stops_and_shown_all_the_time():
    activity, told, now = an_activity()
    activity.pending = lambda: PendingWork(1240, 1240.0 - now[0])
    shown = [activity.stop().sentence]
    now[0] += 60.0
    shown.append(activity.status().sentence)
    for keeps, seconds in ((1256, 120.0), (1256, math.inf), (1256, 0.0), (0, math.inf)):
        pending = PendingWork(keeps, seconds, nobody_takes=not keeps)
        activity.pending = lambda pending=pending: pending  # type: ignore[misc]
        shown.append(activity.status().sentence)
    assert [event.sentence for event in told] == ["leaving: handing in, about 4 min left (1,240 samples)"]
    assert shown == [
        "leaving: handing in, about 4 min left (1,240 samples)",
        "leaving: handing in, about 3 min left (1,240 samples)",
        "leaving: handing in, about 2 min left (1,256 samples)",
        "leaving: handing in, 10 min at most (1,256 samples)",
        "leaving: handing in, now (1,256 samples)",
        "leaving",
    ]
