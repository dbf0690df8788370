"""What holds a peer, what ends that, and who is told."""

import math

from swarmcli.events import ActivityChanged
from swarmcli.peer.activity import STAYS, Activity, ActivityStatus, asked
from swarmcli.run.values import Reason

BATTERY = Reason("battery", "on battery")


def an_activity() -> tuple[Activity, list[ActivityChanged], list[float]]:
    told: list[ActivityChanged] = []
    now = [1000.0]
    return Activity(told.append, lambda: now[0]), told, now


def test_it_works_when_no_reason_holds_any_more():
    activity, told, now = an_activity()
    assert activity.hold(asked()).state == "pausing"
    activity.hold(BATTERY)
    activity.note(rests=True)
    assert activity.release("asked") == ActivityStatus("paused", (BATTERY,), 1000.0)
    now[0] = 1010.0
    assert activity.release("battery") == ActivityStatus("running", (), 1010.0)
    assert [event.sentence for event in told] == [
        "pausing: you asked for it",
        "pausing: you asked for it; on battery",
        "paused: you asked for it; on battery",
        "paused: on battery",
        "running",
    ]


def test_a_reason_ends_when_its_time_is_over():
    activity, told, now = an_activity()
    activity.hold(Reason("asked", "you asked for it, until 18:00", 1060.0))
    assert activity.is_held
    now[0] = 1060.0
    assert not activity.is_held
    assert told[-1].sentence == "running"


def test_what_is_kept_is_told():
    activity, _, _ = an_activity()
    activity.hold(BATTERY)
    activity.note(rests=True, keeps=12)
    sentence = "paused: on battery (12 computed samples count when the run goes on)"
    assert activity.status().sentence == sentence
    activity.note(rests=False)
    assert activity.status().sentence == "pausing: on battery"


def test_stopping_is_final_and_told_once_but_may_become_urgent():
    activity, told, _ = an_activity()
    heard: list[bool] = []
    activity.subscribe(lambda: heard.append(activity.status().at_once))
    activity.stop()
    activity.stop()
    activity.release("asked")
    activity.stop(STAYS.hurried)
    assert activity.stop(0.0) == ActivityStatus("stopping", (), 1000.0, stays=0.0)
    assert activity.stop().at_once, "a later wish lengthens nothing"
    assert heard == [False, False, True]
    assert [event.state for event in told] == ["stopping"]


def test_what_is_handed_in_is_told_once_when_it_stops_and_shown_all_the_time():
    activity, told, now = an_activity()
    activity.hands_in = lambda stays: (1240, 240.0)
    shown = [activity.stop().sentence]
    now[0] += 60.0
    shown.append(activity.status().sentence)
    for keeps, seconds in ((1256, 120.0), (1256, math.inf), (1256, 0.0), (0, math.inf)):
        activity.note(rests=not keeps, keeps=keeps, seconds=seconds)
        shown.append(activity.status().sentence)
    assert [event.sentence for event in told] == [
        "handing in 1,240 samples with the round expected in about 4 min, then leaving"
    ]
    assert shown == [
        "handing in, about 4 min left (1,240 samples)",
        "handing in, about 3 min left (1,240 samples)",
        "handing in, about 2 min left (1,256 samples)",
        "handing in, 10 min at most (1,256 samples)",
        "handing in, now (1,256 samples)",
        "leaving",
    ]


def test_who_stops_in_the_middle_of_its_first_batch_tells_of_it_when_it_is_computed():
    activity, told, _ = an_activity()
    activity.stop()
    activity.note(rests=False, keeps=8, seconds=math.inf)
    assert [event.sentence for event in told] == ["leaving", "handing in 8 samples with the next round, then leaving"]
    at_once, told, _ = an_activity()
    at_once.hands_in = lambda stays: (1240, 240.0)
    at_once.stop(0.0)
    assert [event.sentence for event in told] == ["leaving"], "who leaves at once hands nothing in"


def test_whoever_has_unsubscribed_hears_no_more():
    activity, _, _ = an_activity()
    heard: list[str] = []
    end = activity.subscribe(lambda: heard.append(activity.status().state))
    activity.hold(BATTERY)
    end()
    activity.note(rests=True)
    assert activity.status().state == "paused"
    activity.release("battery")
    assert activity.hold(BATTERY).state == "pausing", "the next pause begins with handing in again"
    assert heard == ["pausing"]
